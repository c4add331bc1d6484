use std::ops::RangeBounds;
use std::ptr;
use zerocopy::IntoBytes;

use super::buffer::{GatherBuffer, ScatterBuffer};
use super::options::{AccessFlags, check_access};
use super::region::{Addressed, Backing, Parts, Peers, Region, Writable};
use super::scatter_gather::{Element, LocalMemory, LocalMemoryMut, private, resolve};
use crate::base::{Error, Handle, Leak, Parent, Result, debug, ffi, object, resource};
use crate::verbs::device::quirks::copies_results;
use crate::verbs::device::{Context, ContextRef};
use crate::verbs::domain::DomainRef;

object!(ibv_dm, ibv_free_dm or ibv_unimport_dm);

/// `struct ibv_dm`: a piece of the device's own memory.
///
/// Peers access it without the machine's bus, which is faster; the program copies from and to it. It is small:
/// see [`DeviceAttributes::max_device_memory`](crate::device::DeviceAttributes::max_device_memory).
///
/// ```no_run
/// # // not on Soft-RoCE alone: needs device memory
/// use ibverbs::memory::DeviceMemoryRegion;
/// use ibverbs::AccessFlags;
///
/// # let context = ibverbs::open("mlx5_0")?;
/// # let domain = context.alloc_pd()?;
/// let memory = context.alloc_dm(4096)?;
/// memory.write(0, &[1_u32, 2, 3])?;
/// let region = DeviceMemoryRegion::new(&domain, &memory, .., AccessFlags::REMOTE_READ)?;
/// let for_the_peer = region.remote();
/// # Ok::<(), ibverbs::Error>(())
/// ```
#[doc(alias = "ibv_dm")]
pub struct DeviceMemory<'ctx> {
    raw: Handle<ffi::ibv_dm>,
    bytes: usize,
    context: ContextRef<'ctx>,
}

resource! {
    /// `ibv_free_dm`: frees the memory. Unlike a drop, it returns the error.
    ///
    /// # Errors
    ///
    /// The memory is then [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with all that it
    /// was made from.
    ///
    ///  - `EBUSY`: a region of it still exists: it was leaked, or could not be deregistered.
    #[doc(alias = "ibv_free_dm")]
    DeviceMemory<'ctx>: raw of ibv_dm, context
}

// Threads may share it: providers copy by atomic accesses.

impl<'ctx> DeviceMemory<'ctx> {
    /// `ibv_alloc_dm`: allocates `bytes` bytes.
    ///
    /// # Errors
    ///
    /// Those of [`with_alignment`](Self::with_alignment).
    pub fn new(context: impl Into<ContextRef<'ctx>>, bytes: usize) -> Result<Self> {
        Self::with_alignment(context, bytes, 1)
    }

    /// `ibv_alloc_dm`: allocates `bytes` bytes aligned to `alignment`, a power of 2. RDMA atomics need 8.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `bytes` is 0, or the alignment is not a power of 2, or the device does not support it.
    ///  - `ENOMEM`: the device does not have that much memory, or not that much left.
    ///  - `EOPNOTSUPP`: the device has no memory for programs.
    #[doc(alias = "ibv_alloc_dm")]
    #[doc(alias = "ibv_alloc_dm_attr")]
    pub fn with_alignment(
        context: impl Into<ContextRef<'ctx>>,
        bytes: usize,
        alignment: usize,
    ) -> Result<Self> {
        const VERB: &str = "ibv_alloc_dm";
        let context = context.into();
        Error::invalid_if(bytes == 0, VERB, "the memory is empty")?;
        Error::invalid_if(!alignment.is_power_of_two(), VERB, "the alignment is not a power of 2")?;
        let most = context.query_device()?.max_device_memory();
        Error::unsupported_if(most == 0, VERB, "the device has no memory for programs")?;
        if bytes as u64 > most {
            let reason = "the device has less memory than that";
            return Err(Error::with_reason(VERB, libc::ENOMEM, reason));
        }
        let mut attributes = ffi::ibv_alloc_dm_attr {
            length: bytes,
            log_align_req: alignment.trailing_zeros(),
            comp_mask: 0,
        };
        // SAFETY: the context is live; memory that comes back is ours alone.
        let raw =
            unsafe { Handle::new(VERB, ffi::ibv_alloc_dm(context.as_raw(), &mut attributes)) }?;
        Ok(Self { raw, bytes, context })
    }

    /// `ibv_import_dm`: imports device memory that another process has allocated through the same file
    /// descriptor of the device.
    ///
    /// `handle` is the kernel's [number](Self::handle) of it. Dropping or closing it undoes the import
    /// (`ibv_unimport_dm`) and leaves the memory alone; after [`own`](Self::own), frees it.
    ///
    /// # Errors
    ///
    ///  - `ENOENT`, `EINVAL`: the context has no device memory of that number.
    ///  - `EOPNOTSUPP`: the device cannot import.
    ///
    /// # Safety
    ///
    /// Only one of the processes frees it, when the others no longer use it.
    #[doc(alias = "ibv_import_dm")]
    #[doc(alias = "ibv_unimport_dm")]
    pub unsafe fn import(
        context: impl Into<ContextRef<'ctx>>,
        handle: u32,
        bytes: usize,
    ) -> Result<Self> {
        let context = context.into();
        // SAFETY: the context is live; the import that comes back is ours.
        let raw = unsafe {
            Handle::import("ibv_import_dm", ffi::ibv_import_dm(context.as_raw(), handle))
        }?;
        Ok(Self { raw, bytes, context })
    }

    /// Takes over memory of `bytes` bytes allocated elsewhere, such as by a C library.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the pointer is null, or it is of another context.
    ///
    /// # Safety
    ///
    /// `raw` is null or live device memory of that length, and nothing else frees it.
    pub unsafe fn from_raw(
        raw: *mut ffi::ibv_dm,
        bytes: usize,
        context: impl Into<ContextRef<'ctx>>,
    ) -> Result<Self> {
        const VERB: &str = "ibv_alloc_dm";
        let context = context.into();
        // SAFETY: the caller vouches for the pointer.
        let is_foreign = raw.is_null() || unsafe { (*raw).context } != context.as_raw();
        Error::invalid_if(is_foreign, VERB, "not device memory of this context")?;
        // SAFETY: the caller hands over live memory.
        let raw = unsafe { Handle::new(VERB, raw) }?;
        Ok(Self { raw, bytes, context })
    }

    /// `ibv_dm_export_dmabuf_fd`: a dma-buf of the memory, which keeps it alive. Since rdma-core 65.
    ///
    /// Another device can register it by
    /// [`RawMemoryRegion::from_dmabuf`](crate::memory::RawMemoryRegion::from_dmabuf).
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: the device, or the kernel, cannot export its memory.
    ///  - `EMFILE`, `ENFILE`: too many open files.
    #[cfg(rdma_core_65)]
    #[doc(alias = "ibv_dm_export_dmabuf_fd")]
    pub fn export_dmabuf(&self) -> Result<std::os::fd::OwnedFd> {
        // SAFETY: the memory is live, and the descriptor is new.
        unsafe {
            ffi::new_fd("ibv_dm_export_dmabuf_fd", ffi::ibv_dm_export_dmabuf_fd(self.as_raw()))
        }
    }

    /// Makes [imported](Self::import) memory this program's own: its drop or close frees it, for all processes.
    pub fn own(&mut self) {
        self.raw.own();
    }

    /// Its length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// `ibv_memcpy_to_dm`: copies `from` to the memory at `offset` (in bytes).
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the copy would go beyond the end; or, on devices that copy words, `offset` or the length in
    ///    bytes is not a multiple of 4.
    #[doc(alias = "ibv_memcpy_to_dm")]
    pub fn write<T: Element>(&self, offset: usize, from: &[T]) -> Result<()> {
        const VERB: &str = "ibv_memcpy_to_dm";
        let from = from.as_bytes();
        self.check(VERB, offset, from.len())?;
        let mut block = Block([0; BLOCK]);
        for (at, part) in from.chunks(BLOCK).enumerate().map(|(i, part)| (i * BLOCK, part)) {
            block.0[..part.len()].copy_from_slice(part);
            let (offset, data) = ((offset + at) as u64, block.0.as_ptr().cast());
            // SAFETY: the memory is live and, says `check`, long enough; the block is as long as the part.
            let returned =
                unsafe { ffi::ibv_memcpy_to_dm(self.as_raw(), offset, data, part.len()) };
            ffi::status(VERB, returned).map_err(|error| explain(error, offset, part.len()))?;
        }
        Ok(())
    }

    /// `ibv_memcpy_from_dm`: copies from the memory at `offset` (in bytes) to `to`.
    ///
    /// # Errors
    ///
    /// Those of [`write`](Self::write).
    #[doc(alias = "ibv_memcpy_from_dm")]
    pub fn read<T: Element>(&self, offset: usize, to: &mut [T]) -> Result<()> {
        const VERB: &str = "ibv_memcpy_from_dm";
        // SAFETY: an `Element` accepts any bytes, and none of its bytes is padding.
        let to = unsafe {
            std::slice::from_raw_parts_mut(to.as_mut_ptr().cast::<u8>(), size_of_val(to))
        };
        self.check(VERB, offset, to.len())?;
        let mut block = Block([0; BLOCK]);
        for (at, part) in to.chunks_mut(BLOCK).enumerate().map(|(i, part)| (i * BLOCK, part)) {
            let (offset, data) = ((offset + at) as u64, block.0.as_mut_ptr().cast());
            // SAFETY: as in `write`.
            let returned =
                unsafe { ffi::ibv_memcpy_from_dm(data, self.as_raw(), offset, part.len()) };
            ffi::status(VERB, returned).map_err(|error| explain(error, offset, part.len()))?;
            part.copy_from_slice(&block.0[..part.len()]);
        }
        Ok(())
    }

    /// Providers compute the end of a copy without regard to overflow.
    fn check(&self, verb: &'static str, offset: usize, bytes: usize) -> Result<()> {
        let (offset, bytes, most) = (offset as u64, bytes as u64, self.bytes as u64);
        Error::within(verb, "the offset", offset, 0, most)?;
        Error::within(verb, "the length in bytes", bytes, 0, most - offset)
    }

    /// The kernel's number of the memory, by which a process that shares the device's file descriptor
    /// [imports](Self::import) it; `None` if the provider does not store it.
    pub fn handle(&self) -> Option<u32> {
        let has_handle = ffi::ibv_dm_mask::IBV_DM_MASK_HANDLE.0;
        // SAFETY: the memory is live.
        let raw = unsafe { &*self.as_raw() };
        (raw.comp_mask & has_handle != 0).then_some(raw.handle)
    }

    /// The context that it was allocated from.
    pub fn context(&self) -> &Context<'ctx> {
        &self.context
    }
}

/// In bytes.
const BLOCK: usize = 1024;

/// For a device that copies words only.
#[cold]
fn explain(error: Error, offset: u64, bytes: usize) -> Error {
    if error.errno() != libc::EINVAL || (offset.is_multiple_of(4) && bytes.is_multiple_of(4)) {
        return error;
    }
    let reason =
        "the device copies words: the offset and the length in bytes must be multiples of 4";
    Error::invalid(error.verb(), reason)
}

/// mlx5 accesses the program's side in words of 4 bytes, whatever its alignment.
#[repr(align(8))]
struct Block([u8; BLOCK]);

impl Context<'_> {
    /// `ibv_alloc_dm`: [`DeviceMemory::new`], borrowing this context.
    ///
    /// To return the memory from a function, call that with the context by value or in an `Arc`.
    ///
    /// # Errors
    ///
    /// Those of [`DeviceMemory::with_alignment`].
    #[doc(alias = "ibv_alloc_dm")]
    pub fn alloc_dm(&self, bytes: usize) -> Result<DeviceMemory<'_>> {
        DeviceMemory::new(self, bytes)
    }
}

debug! { DeviceMemory<'_>, self, bytes: self.bytes, .. }

/// `struct ibv_mr`: registered [`DeviceMemory`], as bytes. Requests and peers address it from 0 on.
///
/// `&region` is a [`GatherBuffer`] and `&mut region` a [`ScatterBuffer`] of the whole region, in a channel too.
/// [`QueuePair::post_send`](crate::QueuePair::post_send) and the like take a part.
///
/// Requests that write the region are refused (`EOPNOTSUPP`) on devices whose provider delivers short messages
/// and results itself (mlx5): it would write to an address of this program. See
/// [`scatter_element_by_iova`](Region::scatter_element_by_iova).
///
/// ```no_run
/// # // not on Soft-RoCE alone: needs device memory
/// use ibverbs::memory::DeviceMemoryRegion;
/// use ibverbs::AccessFlags;
///
/// # fn send(channel: &mut ibverbs::Channel<'_>) -> Result<(), Box<dyn std::error::Error>> {
/// # let context = ibverbs::open("mlx5_0")?;
/// # let domain = context.alloc_pd()?;
/// let memory = context.alloc_dm(4096)?;
/// memory.write(0, &[1_u32, 2, 3])?;
/// let region = DeviceMemoryRegion::new(&domain, &memory, ..12, AccessFlags::empty())?;
/// channel.send(&region)?;
/// # Ok(())
/// # }
/// ```
pub type DeviceMemoryRegion<'pd> = Region<'pd, OnDevice<'pd>>;

/// Memory of a device.
#[derive(Debug)]
pub struct OnDevice<'pd> {
    memory: Parent<'pd, DeviceMemory<'pd>>,
    /// Whether the provider itself copies results to the request's address.
    copies: bool,
}

impl Backing for OnDevice<'_> {
    type Item = u8;

    const NAME: &'static str = "DeviceMemoryRegion";

    fn leak(&self) {
        self.memory.leak();
    }
}

impl Addressed for OnDevice<'_> {}
impl Peers for OnDevice<'_> {}

impl Writable for OnDevice<'_> {
    #[inline]
    fn check_write(&self, _: AccessFlags) -> Result<()> {
        if self.copies { Err(copied()) } else { Ok(()) }
    }
}

#[cold]
fn copied() -> Error {
    let reason = "the provider delivers short messages itself, which it cannot in device memory: \
         see scatter_element_by_iova";
    Error::with_reason("ibv_sge", libc::EOPNOTSUPP, reason)
}

/// The element of a whole region. As it is no array, it cannot be in a tuple, all of which a post copies if one
/// piece is [`Inline`](crate::Inline).
#[doc(hidden)]
#[derive(Debug)]
pub struct Whole(ffi::ibv_sge);

impl AsMut<[ffi::ibv_sge]> for Whole {
    #[inline]
    fn as_mut(&mut self) -> &mut [ffi::ibv_sge] {
        std::slice::from_mut(&mut self.0)
    }
}

impl private::List for Whole {}

// SAFETY: the memory is registered until the region is dropped. Only the device reads it: no post of it is
// inline.
unsafe impl GatherBuffer for DeviceMemoryRegion<'_> {
    type List = Whole;
    type Kept = Self;

    #[inline]
    fn gather(&self) -> Result<Whole> {
        self.sge(..).map(Whole)
    }

    fn is_in_reach(&self) -> bool {
        false
    }
}

// SAFETY: as above. Only the device writes it (`sge_mut` has checked); no references to it exist.
unsafe impl ScatterBuffer for DeviceMemoryRegion<'_> {
    #[inline]
    fn scatter(&mut self) -> Result<Whole> {
        self.sge_mut(..).map(Whole)
    }
}

impl<'pd> DeviceMemoryRegion<'pd> {
    /// `ibv_reg_dm_mr`: registers the bytes of `memory` in `range`.
    ///
    /// Local write access and [`ZERO_BASED`](AccessFlags::ZERO_BASED) are always included.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is empty or out of bounds; memory and domain are of different contexts; the
    ///    device does not have that access.
    ///  - `EOPNOTSUPP`: the device cannot register its memory, or does not have that access.
    ///  - `ENOMEM`: no region left on the device.
    #[doc(alias = "ibv_reg_dm_mr")]
    pub fn new(
        domain: impl Into<DomainRef<'pd>>,
        memory: impl Into<Parent<'pd, DeviceMemory<'pd>>>,
        range: impl RangeBounds<usize>,
        access: AccessFlags,
    ) -> Result<Self> {
        const VERB: &str = "ibv_reg_dm_mr";
        let (domain, memory) = (domain.into(), memory.into());
        let access = access | AccessFlags::LOCAL_WRITE | AccessFlags::ZERO_BASED;
        let range = resolve(range, memory.len())?;
        let bytes = range.len();
        Error::invalid_if(range.is_empty(), VERB, "the region is empty")?;
        let reason = "the memory and the protection domain are of different contexts";
        domain.context().check_same(memory.context(), VERB, reason)?;
        check_access(VERB, &domain, access)?;
        let copies = copies_results(&domain.context().query_device()?);
        // SAFETY: domain and memory are live and of one context; no references to device memory exist.
        let raw = unsafe {
            let (domain, offset) = (domain.as_raw(), range.start as u64);
            let raw = ffi::ibv_reg_dm_mr(domain, memory.as_raw(), offset, bytes, access.bits());
            Handle::new(VERB, raw)
        }?;
        let parts = Parts::by_address(raw, ptr::null_mut(), bytes, access);
        Ok(Self::from_parts(parts, OnDevice { memory, copies }, domain))
    }

    /// The memory that is registered.
    pub fn device_memory(&self) -> &DeviceMemory<'pd> {
        &self.memory().memory
    }
}
