#[cfg(rdma_core_65)]
mod by_provider;
#[cfg(rdma_core_65)]
mod provider_buffer;

use std::ops::RangeBounds;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

#[cfg(rdma_core_65)]
use provider_buffer::ProviderBuffer;

use crate::base::{Error, Handle, Leak as _, Result, ffi};
use crate::verbs::device::quirks::copies_results;
use crate::verbs::domain::{DomainRef, ProtectionDomain};
use crate::verbs::memory::allocation::{Allocation, page_size};
use crate::verbs::memory::options::{AccessFlags, check_access, check_iova};
use crate::verbs::memory::region::{
    Addressed, Backing, InMemory, Parts, Peers, Region, Writable, check_writable,
};
use crate::verbs::memory::registration::{
    ReregisterError, Reregistration, check_foreign, register,
};
use crate::verbs::memory::scatter_gather::{LocalMemoryMut, ScatterElement};

/// `struct ibv_mr`: registered memory that something else owns, as bytes.
///
/// It is for memory that no Rust reference covers: mapped files and devices, memory of a GPU or of another
/// library, dma-bufs, regions of other processes. A slice needs no `unsafe`: see
/// [`BorrowedMemoryRegion`](crate::memory::BorrowedMemoryRegion).
pub type RawMemoryRegion<'pd> = Region<'pd, Raw<'pd>>;

/// An earlier rdma-core allocates none.
#[cfg(not(rdma_core_65))]
type ProviderBuffer<'pd> = DomainRef<'pd>;

/// Memory that something else owns, or that the provider has allocated.
#[derive(Debug, Default)]
pub struct Raw<'pd> {
    provider: Option<ProviderBuffer<'pd>>,
    dmabuf: Option<Mapped>,
}

/// The addresses of a dma-buf.
#[derive(Debug)]
struct Mapped {
    #[expect(dead_code, reason = "for its drop")]
    addresses: Allocation,
    /// Whether the dma-buf's memory is there. Else nobody looks at what is.
    is_in_reach: bool,
    /// The provider itself would write there.
    copies: bool,
}

impl Backing for Raw<'_> {
    type Item = u8;

    const NAME: &'static str = "RawMemoryRegion";

    fn leak(&self) {
        self.provider.leak();
    }
}

impl Addressed for Raw<'_> {
    const HAS_IOVA: bool = true;
}

impl InMemory for Raw<'_> {
    #[inline]
    fn is_in_reach(&self) -> bool {
        self.dmabuf.as_ref().is_none_or(|mapped| mapped.is_in_reach)
    }
}

impl Peers for Raw<'_> {}

impl Writable for Raw<'_> {
    #[inline]
    fn check_write(&self, access: AccessFlags) -> Result<()> {
        let copies = |mapped: &Mapped| mapped.copies && !mapped.is_in_reach;
        if self.dmabuf.as_ref().is_some_and(copies) {
            return Err(copied());
        }
        check_writable(access)
    }
}

#[cold]
fn copied() -> Error {
    let reason = "the provider delivers short messages itself, which it cannot to this dma-buf: set \
         MLX5_SCATTER_TO_CQE=0 before the region is registered and the queue pair is created";
    Error::with_reason("ibv_sge", libc::EOPNOTSUPP, reason)
}

impl<'pd> RawMemoryRegion<'pd> {
    /// `ibv_reg_mr`: registers `bytes` bytes at `address`.
    ///
    /// With [`ZERO_BASED`](AccessFlags::ZERO_BASED), requests and peers address the region from 0 on.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the address is null; `bytes` is 0, or more than the address space or the device allows;
    ///    remote write or atomic access without local write access.
    ///  - `EFAULT`: the memory is not mapped, or it is read-only and the access includes writing.
    ///  - `EOPNOTSUPP`: the device does not have that access.
    ///  - `ENOMEM`: no region left on the device, or `RLIMIT_MEMLOCK` is too low.
    ///
    /// # Safety
    ///
    /// From now until the region is deregistered (by [`close`](Self::close), or by a drop that succeeds; never
    /// if it is forgotten):
    ///
    ///  - The memory is not unmapped, freed or given to another owner.
    ///  - The device may read the memory at any time, and with write access write any bytes to it. So may the
    ///    CPU, because providers carry out some small transfers themselves. Unless it is known that neither
    ///    this program nor a peer has such a request outstanding, no code relies on the contents, and no
    ///    reference exists that these accesses conflict with.
    #[doc(alias = "ibv_reg_mr")]
    pub unsafe fn new(
        domain: impl Into<DomainRef<'pd>>,
        address: *mut u8,
        bytes: usize,
        access: AccessFlags,
    ) -> Result<Self> {
        let zero_based = access.contains(AccessFlags::ZERO_BASED);
        let iova = if zero_based { 0 } else { address as u64 };
        // SAFETY: the caller vouches for the memory.
        unsafe { Self::register("ibv_reg_mr", domain.into(), address, bytes, iova, access) }
    }

    /// `ibv_reg_mr_iova`: [`new`](Self::new), but requests and peers address the region from `iova` on.
    ///
    /// `address` and `iova` must have the same offset in a page.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new), and:
    ///
    ///  - `EINVAL`: the offsets in the page differ; the last byte is beyond the last iova; or
    ///    [`ZERO_BASED`](AccessFlags::ZERO_BASED) with an iova other than 0.
    ///
    /// # Safety
    ///
    /// As [`new`](Self::new).
    #[doc(alias = "ibv_reg_mr_iova")]
    #[doc(alias = "ibv_reg_mr_iova2")]
    pub unsafe fn with_iova(
        domain: impl Into<DomainRef<'pd>>,
        address: *mut u8,
        bytes: usize,
        iova: u64,
        access: AccessFlags,
    ) -> Result<Self> {
        const VERB: &str = "ibv_reg_mr_iova";
        let reason = "ZERO_BASED and another iova exclude each other";
        Error::invalid_if(access.contains(AccessFlags::ZERO_BASED) && iova != 0, VERB, reason)?;
        // SAFETY: the caller vouches for the memory.
        unsafe { Self::register(VERB, domain.into(), address, bytes, iova, access) }
    }

    /// # Safety
    ///
    /// As [`new`](Self::new).
    unsafe fn register(
        verb: &'static str,
        domain: DomainRef<'pd>,
        address: *mut u8,
        bytes: usize,
        iova: u64,
        access: AccessFlags,
    ) -> Result<Self> {
        check_memory(verb, address, bytes)?;
        check_access(verb, &domain, access)?;
        check_iova(verb, iova, address as usize % page_size(), bytes)?;
        // An iova of 0 has the same effect, and every device supports it.
        let access = access.difference(AccessFlags::ZERO_BASED);
        // SAFETY: the caller vouches for the memory.
        let raw = unsafe { register(verb, &domain, address, bytes, iova, access) }?;
        let parts = Parts { base: iova, ..Parts::by_address(raw, address, bytes, access) };
        Ok(Self::from_parts(parts, Raw::default(), domain))
    }

    /// `ibv_reg_mr_ex`: [`new`](Self::new), and the device accesses the memory with the hints of `handle`.
    /// Since rdma-core 65.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new), and:
    ///
    ///  - `EINVAL`: the handle is of another context, or the access includes
    ///    [`ZERO_BASED`](AccessFlags::ZERO_BASED).
    ///  - `EOPNOTSUPP`: the device, or the kernel, has no such handles.
    ///
    /// # Safety
    ///
    /// As [`new`](Self::new).
    #[cfg(rdma_core_65)]
    #[doc(alias = "ibv_reg_mr_ex")]
    pub unsafe fn with_dma_handle(
        domain: impl Into<DomainRef<'pd>>,
        address: *mut u8,
        bytes: usize,
        access: AccessFlags,
        handle: &'pd crate::verbs::device::DmaHandle<'_>,
    ) -> Result<Self> {
        use ffi::ibv_mr_init_attr_mask as mask;

        const VERB: &str = "ibv_reg_mr_ex";
        let domain = domain.into();
        check_memory(VERB, address, bytes)?;
        check_access(VERB, &domain, access)?;
        let reason = "a region with a DMA handle begins at its address";
        Error::invalid_if(access.contains(AccessFlags::ZERO_BASED), VERB, reason)?;
        // SAFETY: both objects are live.
        if unsafe { (*handle.as_raw()).context != (*domain.as_raw()).context } {
            return Err(Error::invalid(VERB, "the DMA handle is of another context"));
        }
        let fields = mask::IBV_REG_MR_MASK_ADDR.0
            | mask::IBV_REG_MR_MASK_IOVA.0
            | mask::IBV_REG_MR_MASK_DMAH.0;
        let mut attributes = ffi::ibv_mr_init_attr {
            length: bytes,
            access: access.bits() as i32,
            comp_mask: fields.into(),
            iova: address as u64,
            addr: address.cast(),
            dmah: handle.as_raw(),
            ..Default::default()
        };
        // SAFETY: the domain is live, and the region borrows the handle; the caller vouches for the memory.
        let raw =
            unsafe { Handle::new(VERB, ffi::ibv_reg_mr_ex(domain.as_raw(), &mut attributes)) }?;
        Ok(Self::from_parts(Parts::by_address(raw, address, bytes, access), Raw::default(), domain))
    }

    /// `ibv_reg_dmabuf_mr`: registers `bytes` bytes of a dma-buf (such as memory of a GPU), from `offset` on.
    ///
    /// Requests and peers address it from `iova` on. `offset` and `iova` must have the same offset in a page.
    ///
    /// The region keeps the dma-buf alive: you may close the file descriptor, and the exporter may go away.
    /// This is safe because a dma-buf is shared memory: code that maps it must expect others to write it.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `bytes` is 0; the offsets in the page differ; the end is beyond the last offset or iova;
    ///    the access includes flags other than local write, remote and relaxed ordering, or includes remote
    ///    write or atomic access without local write access; or the file is not a dma-buf.
    ///  - `EBADF`: the file is not a dma-buf, on some kernels.
    ///  - `EOPNOTSUPP`: the device, or the kernel, cannot register dma-bufs.
    ///  - `ENOMEM`: no region left on the device.
    #[doc(alias = "ibv_reg_dmabuf_mr")]
    pub fn from_dmabuf(
        domain: impl Into<DomainRef<'pd>>,
        dmabuf: BorrowedFd<'_>,
        offset: u64,
        bytes: usize,
        iova: u64,
        access: AccessFlags,
    ) -> Result<Self> {
        Self::register_dmabuf(domain.into(), dmabuf, offset, bytes, iova, access, Raw::default())
    }

    /// `ibv_reg_dmabuf_mr`: as [`from_dmabuf`](Self::from_dmabuf), with addresses of this program that no other memory
    /// has, for a [`RawMemoryRange`](crate::memory::RawMemoryRange): so loops and futures send from a dma-buf, and write
    /// to it.
    ///
    /// If the exporter lets this program map the dma-buf, it is mapped there, and [`as_ptr`](Self::as_ptr) is its
    /// address. Otherwise (the memory of most GPUs) the addresses are only set aside. Then
    /// [`inline`](crate::WriteWorkRequest::inline) has no effect on requests with such memory; and where the provider
    /// itself delivers short messages (mlx5, hns), requests that write to it are refused (`EOPNOTSUPP`), unless the
    /// environment variable `MLX5_SCATTER_TO_CQE` is 0, which mlx5 reads when a queue pair is created.
    ///
    /// # Errors
    ///
    /// Those of [`from_dmabuf`](Self::from_dmabuf), and:
    ///
    ///  - `ENOMEM`: the address space has no room.
    pub fn map_dmabuf(
        domain: impl Into<DomainRef<'pd>>,
        dmabuf: BorrowedFd<'_>,
        offset: u64,
        bytes: usize,
        access: AccessFlags,
    ) -> Result<Self> {
        const VERB: &str = "ibv_reg_dmabuf_mr";
        let domain = domain.into();
        let in_page = (offset % page_size() as u64) as usize;
        let Some(length) = bytes.checked_add(in_page) else {
            return Err(Error::invalid(VERB, "the region is longer than memory can be"));
        };
        let mapped = Allocation::file(VERB, dmabuf, offset - in_page as u64, length);
        let is_in_reach = mapped.is_ok();
        let addresses = mapped.or_else(|_| Allocation::addresses(VERB, length))?;
        let copies = !is_in_reach && delivers(&domain)?;
        let iova = addresses.data().as_ptr() as u64 + in_page as u64;
        let dmabuf_of = Some(Mapped { addresses, is_in_reach, copies });
        let memory = Raw { provider: None, dmabuf: dmabuf_of };
        Self::register_dmabuf(domain, dmabuf, offset, bytes, iova, access, memory)
    }

    fn register_dmabuf(
        domain: DomainRef<'pd>,
        dmabuf: BorrowedFd<'_>,
        offset: u64,
        bytes: usize,
        iova: u64,
        access: AccessFlags,
        memory: Raw<'pd>,
    ) -> Result<Self> {
        const VERB: &str = "ibv_reg_dmabuf_mr";
        const ALLOWED: AccessFlags = AccessFlags::LOCAL_WRITE
            .union(AccessFlags::REMOTE_WRITE)
            .union(AccessFlags::REMOTE_READ)
            .union(AccessFlags::REMOTE_ATOMIC)
            .union(AccessFlags::RELAXED_ORDERING);
        Error::invalid_if(bytes == 0, VERB, "the region is empty")?;
        let reason = "the region ends beyond the last offset";
        Error::invalid_if(offset.checked_add(bytes as u64).is_none(), VERB, reason)?;
        let reason = "a dma-buf can be registered for local write, remote read, write and \
                 atomic access, and relaxed ordering only";
        Error::invalid_if(!ALLOWED.contains(access), VERB, reason)?;
        check_access(VERB, &domain, access)?;
        check_iova(VERB, iova, (offset % page_size() as u64) as usize, bytes)?;
        // SAFETY: the domain is live. The kernel checks the descriptor and takes a reference to the dma-buf,
        // which its holders share.
        let raw = unsafe {
            let (fd, access) = (dmabuf.as_raw_fd(), access.bits() as i32);
            let raw = ffi::ibv_reg_dmabuf_mr(domain.as_raw(), offset, bytes, iova, fd, access);
            Handle::new(VERB, raw)
        }?;
        let is_mapped = memory.dmabuf.is_some() && memory.is_in_reach();
        let address = if is_mapped { iova as *mut u8 } else { ptr::null_mut() };
        let parts = Parts { base: iova, ..Parts::by_address(raw, address, bytes, access) };
        Ok(Self::from_parts(parts, memory, domain))
    }

    /// `ibv_import_mr`: imports a region that another process has registered through the same file descriptor
    /// of the device.
    ///
    /// `handle` is the kernel's [number](Self::handle) of it. Requests address it from `base` on, as in the
    /// other process (see [`remote`](Self::remote) there). Dropping or closing it undoes the import
    /// (`ibv_unimport_mr`) and leaves the region alone; after [`own`](Self::own), deregisters it.
    ///
    /// # Errors
    ///
    ///  - `ENOENT`, `EINVAL`: the domain's context has no region of that number.
    ///  - `EINVAL`: its end would be beyond the last address.
    ///  - `EOPNOTSUPP`: the device cannot import.
    ///
    /// # Safety
    ///
    ///  - While this value is used, the memory of the region may be accessed as [`new`](Self::new) says, under
    ///    the access that the region was registered with.
    ///  - Only one of the processes deregisters it, when the others no longer use it.
    #[doc(alias = "ibv_import_mr")]
    #[doc(alias = "ibv_unimport_mr")]
    pub unsafe fn import(
        domain: impl Into<DomainRef<'pd>>,
        handle: u32,
        base: u64,
        access: AccessFlags,
    ) -> Result<Self> {
        const VERB: &str = "ibv_import_mr";
        let domain = domain.into();
        // SAFETY: the domain is live; the import that comes back is ours.
        let raw = unsafe { Handle::import(VERB, ffi::ibv_import_mr(domain.as_raw(), handle)) }?;
        // SAFETY: the region is live, and the import has set its length.
        let len = unsafe { (*raw.as_ptr()).length };
        let reason = "the region ends beyond the last address";
        Error::invalid_if(base.checked_add(len as u64).is_none(), VERB, reason)?;
        let parts = Parts { raw, address: ptr::null_mut(), len, base, access };
        Ok(Self::from_parts(parts, Raw::default(), domain))
    }

    /// Takes over any `struct ibv_mr` registered elsewhere, such as by a C library.
    ///
    /// The C object does not store `base`, the address by which requests and peers name its first byte (its
    /// iova, or else its address), nor the `access` that it was registered with.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the pointer is null, or it is of another domain; or its end would be beyond the last
    ///    address.
    ///
    /// # Safety
    ///
    /// `raw` is null or a live region, `base` and `access` are right for it, and nothing else deregisters it.
    /// The conditions of [`new`](Self::new) hold for its memory.
    pub unsafe fn from_raw(
        raw: *mut ffi::ibv_mr,
        base: u64,
        access: AccessFlags,
        domain: impl Into<DomainRef<'pd>>,
    ) -> Result<Self> {
        const VERB: &str = "ibv_reg_mr";
        let domain = domain.into();
        // SAFETY: the caller vouches for a pointer that is not null.
        unsafe { check_foreign(VERB, raw, &domain) }?;
        // SAFETY: the region is live.
        let (address, bytes) = unsafe { ((*raw).addr.cast(), (*raw).length) };
        let reason = "the region ends beyond the last address";
        Error::invalid_if(base.checked_add(bytes as u64).is_none(), VERB, reason)?;
        // SAFETY: the caller hands over a live region.
        let raw = unsafe { Handle::new(VERB, raw) }?;
        let parts = Parts { base, ..Parts::by_address(raw, address, bytes, access) };
        Ok(Self::from_parts(parts, Raw::default(), domain))
    }

    /// Makes an [imported](Self::import) region this program's own: its drop or close deregisters it, for all
    /// processes.
    pub fn own(&mut self) {
        self.own_raw();
    }

    /// `ibv_rereg_mr`: changes the region's access, its protection domain, or both. Its keys may change.
    ///
    /// # Errors
    ///
    /// [`ReregisterError::state`] tells which state the region is in.
    ///
    ///  - `EINVAL`: `change` is empty; the domain is of another context; the access flags contradict each
    ///    other, or change `ZERO_BASED`, `ON_DEMAND` or `HUGETLB`; the region is of a dma-buf or imported; or a
    ///    window is bound to it.
    ///  - `EOPNOTSUPP`: the device cannot do that.
    ///
    /// # Safety
    ///
    /// No request that names the region is outstanding. The conditions of [`new`](Self::new) hold for the new
    /// access too.
    #[doc(alias = "ibv_rereg_mr")]
    pub unsafe fn rereg(&mut self, change: Reregistration<'pd>) -> Result<(), ReregisterError> {
        // SAFETY: the caller vouches for the memory under the new access.
        unsafe { self.reregister(change, None) }
    }

    /// `ibv_rereg_mr`: moves the region to other memory, by whose address requests and peers name it.
    ///
    /// Unless `change` is empty, applies it too, as [`rereg`](Self::rereg) does.
    ///
    /// # Errors
    ///
    /// Those of [`rereg`](Self::rereg), and:
    ///
    ///  - `EINVAL`: the address is null; or `bytes` is 0, or more than the address space or the device allows.
    ///  - `EFAULT`: the memory is not mapped, or it is read-only and the access includes writing.
    ///
    /// # Safety
    ///
    /// No request that names the region is outstanding. The conditions of [`new`](Self::new) hold for the new
    /// memory from now on. For the former memory they hold until this returns `Ok`, or if it fails until the
    /// region is deregistered.
    pub unsafe fn rereg_memory(
        &mut self,
        address: *mut u8,
        bytes: usize,
        change: Reregistration<'pd>,
    ) -> Result<(), ReregisterError> {
        check_memory("ibv_rereg_mr", address, bytes).map_err(ReregisterError::unchanged)?;
        // SAFETY: the caller vouches for both memories.
        unsafe { self.reregister(change, Some((address, bytes))) }
    }

    /// The bytes in `range`, for a work request that writes them.
    ///
    /// Any number of requests may write the same bytes; their contents are then unspecified.
    ///
    /// # Errors
    ///
    /// Those of [`gather_element`](Self::gather_element), and:
    ///
    ///  - `EINVAL`: the region was registered without [`LOCAL_WRITE`](AccessFlags::LOCAL_WRITE).
    ///
    /// If requests do not address the region by its own address, use
    /// [`scatter_element_by_iova`](Self::scatter_element_by_iova).
    #[inline]
    pub fn scatter_element(&self, range: impl RangeBounds<usize>) -> Result<ScatterElement<'_>> {
        self.sge_mut(range).map(ScatterElement::new)
    }

    /// The address of the memory; null for an imported region, and for a dma-buf unless it could be
    /// [mapped](Self::map_dmabuf).
    pub fn as_ptr(&self) -> *mut u8 {
        self.address()
    }
}

/// Whether the provider itself writes short messages to the addresses of requests.
fn delivers(domain: &ProtectionDomain<'_>) -> Result<bool> {
    let is_off = std::env::var_os("MLX5_SCATTER_TO_CQE").is_some_and(|value| value == "0");
    Ok(!is_off && copies_results(&domain.context().query_device()?))
}

fn check_memory(verb: &'static str, address: *mut u8, bytes: usize) -> Result<()> {
    Error::invalid_if(address.is_null(), verb, "the address is null")?;
    Error::invalid_if(bytes == 0, verb, "the region is empty")?;
    match (address as usize).checked_add(bytes) {
        Some(_) => Ok(()),
        None => Err(Error::invalid(verb, "the region ends beyond the last address")),
    }
}
