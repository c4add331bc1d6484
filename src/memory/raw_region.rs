//! Registered memory that is not this crate's: mapped files and devices, dma-bufs, imported regions.

use std::ops::RangeBounds;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use super::access::AccessFlags;
use super::allocation::page_size;
use super::byte_region::byte_region;
use super::options::{check_access, check_iova};
use super::registration::{ReregisterError, ReregisteredState, Reregistration};
use super::registration::{register, reregister};
use super::scatter_gather::{GatherElement, LocalMemory, ScatterElement};
use super::scatter_gather::{private, resolve, sge_at};
use crate::domain::ProtectionDomain;
use crate::error::{Error, Result};
use crate::ffi;
use crate::handle::{Handle, resource};
use crate::importable_handle::{ImportableHandle, importable_object};
use crate::parent::Parent;

importable_object!(ibv_mr, ibv_unimport_mr);

/// `struct ibv_mr`: registered memory that something else owns, by its bytes.
///
/// This is for what no Rust reference stands for: a mapped file or device, memory of a GPU, memory
/// that another library manages, a dma-buf, or a region of another process. For a slice there is
/// [`BorrowedMemoryRegion`](crate::BorrowedMemoryRegion), without `unsafe`.
#[doc(alias = "ibv_mr")]
pub struct RawMemoryRegion<'pd> {
    region: ImportableHandle<ffi::ibv_mr>,
    address: *mut u8,
    bytes: usize,
    base: u64,
    access: AccessFlags,
    domain: Parent<'pd, ProtectionDomain<'pd>>,
}

resource!(RawMemoryRegion<'pd>: region, domain);

// SAFETY: libibverbs allows every verb on a region from any thread; the address is never followed.
unsafe impl Send for RawMemoryRegion<'_> {}
// SAFETY: as above.
unsafe impl Sync for RawMemoryRegion<'_> {}

byte_region!(RawMemoryRegion);

impl<'pd> RawMemoryRegion<'pd> {
    /// `ibv_reg_mr`: registers `bytes` bytes at `address`. With
    /// [`ZERO_BASED`](AccessFlags::ZERO_BASED), requests and peers address it from 0 on (see
    /// [`with_iova`](Self::with_iova)).
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the address is null, or there are no bytes, or more than there are addresses or
    ///    the device allows; remote write or atomic access without local write access.
    ///  - `EFAULT`: the memory is not mapped, or is read-only and is to be written.
    ///  - `EOPNOTSUPP`: the device does not have that access.
    ///  - `ENOMEM`: no region left on the device, or `RLIMIT_MEMLOCK` is too low.
    ///
    /// # Safety
    ///
    /// From now on until the region is deregistered ([`close`](Self::close) returns `Ok`, or it is
    /// dropped and can be deregistered; never if it is forgotten):
    ///
    ///  - The memory stays what it is: it is not unmapped, freed or given to another owner.
    ///  - The device may read it at any time, and with write access write any bytes to it, and so may
    ///    the CPU: providers carry out some small transfers themselves. So nothing relies on its
    ///    contents, and no reference exists that this would conflict with, unless it is known that
    ///    neither this program nor a peer has a request that does it.
    #[doc(alias = "ibv_reg_mr")]
    pub unsafe fn new(
        domain: impl Into<Parent<'pd, ProtectionDomain<'pd>>>,
        address: *mut u8,
        bytes: usize,
        access: AccessFlags,
    ) -> Result<Self> {
        let zero_based = access.contains(AccessFlags::ZERO_BASED);
        let iova = if zero_based { 0 } else { address as u64 };
        // SAFETY: the caller vouches for the memory.
        unsafe { Self::register("ibv_reg_mr", domain.into(), address, bytes, iova, access) }
    }

    /// `ibv_reg_mr_iova`: as [`new`](Self::new), but requests and peers address the region from
    /// `iova` on. The two must begin at the same offset in a page.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new), and:
    ///
    ///  - `EINVAL`: the offsets in the page differ, or the last byte is beyond the last iova.
    ///
    /// # Safety
    ///
    /// As [`new`](Self::new).
    #[doc(alias = "ibv_reg_mr_iova")]
    #[doc(alias = "ibv_reg_mr_iova2")]
    pub unsafe fn with_iova(
        domain: impl Into<Parent<'pd, ProtectionDomain<'pd>>>,
        address: *mut u8,
        bytes: usize,
        iova: u64,
        access: AccessFlags,
    ) -> Result<Self> {
        const VERB: &str = "ibv_reg_mr_iova";
        if access.contains(AccessFlags::ZERO_BASED) && iova != 0 {
            return Err(Error::invalid(VERB, "the region is to begin at 0, and elsewhere"));
        }
        // SAFETY: the caller vouches for the memory.
        unsafe { Self::register(VERB, domain.into(), address, bytes, iova, access) }
    }

    /// # Safety
    ///
    /// As [`new`](Self::new).
    unsafe fn register(
        verb: &'static str,
        domain: Parent<'pd, ProtectionDomain<'pd>>,
        address: *mut u8,
        bytes: usize,
        iova: u64,
        access: AccessFlags,
    ) -> Result<Self> {
        check_memory(verb, address, bytes)?;
        check_access(verb, &domain, access)?;
        check_iova(verb, iova, address as usize % page_size(), bytes)?;
        // An iova of 0 says the same, and every device knows it.
        let access = access.difference(AccessFlags::ZERO_BASED);
        // SAFETY: the caller vouches for the memory.
        let region = unsafe { register(verb, &domain, address, bytes, iova, access) }?;
        let region = ImportableHandle::owned(region);
        Ok(Self { region, address, bytes, base: iova, access, domain })
    }

    /// `ibv_reg_dmabuf_mr`: registers `bytes` bytes of a dma-buf, from `offset` on, which requests
    /// and peers address from `iova` on: memory of a GPU or of another device, most of all. The two
    /// must begin at the same offset in a page.
    ///
    /// The region holds the dma-buf by itself: the file descriptor can be closed, and whoever exported
    /// it can go away. A dma-buf is shared memory by nature, so this is safe: whoever maps it has to
    /// expect that others write it.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: there are no bytes; the offsets in the page differ; the end is beyond the last
    ///    offset or iova; the access is other than local write, remote and relaxed ordering, or
    ///    remote write or atomic access without local write access; or it is not a dma-buf.
    ///  - `EBADF`: it is not a dma-buf, on some kernels.
    ///  - `EOPNOTSUPP`: the device, or the kernel, cannot register dma-bufs.
    ///  - `ENOMEM`: no region left on the device.
    #[doc(alias = "ibv_reg_dmabuf_mr")]
    pub fn from_dmabuf(
        domain: impl Into<Parent<'pd, ProtectionDomain<'pd>>>,
        dmabuf: BorrowedFd<'_>,
        offset: u64,
        bytes: usize,
        iova: u64,
        access: AccessFlags,
    ) -> Result<Self> {
        const VERB: &str = "ibv_reg_dmabuf_mr";
        const ALLOWED: AccessFlags = AccessFlags::LOCAL_WRITE
            .union(AccessFlags::REMOTE_WRITE)
            .union(AccessFlags::REMOTE_READ)
            .union(AccessFlags::REMOTE_ATOMIC)
            .union(AccessFlags::RELAXED_ORDERING);
        let domain = domain.into();
        if bytes == 0 {
            return Err(Error::invalid(VERB, "the region is empty"));
        }
        if offset.checked_add(bytes as u64).is_none() {
            return Err(Error::invalid(VERB, "the region ends beyond the last offset"));
        }
        if !ALLOWED.contains(access) {
            let reason = "a dma-buf can be registered for local write, remote read, write and \
                 atomic access, and relaxed ordering only";
            return Err(Error::invalid(VERB, reason));
        }
        check_access(VERB, &domain, access)?;
        check_iova(VERB, iova, (offset % page_size() as u64) as usize, bytes)?;
        // SAFETY: the domain is live; the kernel checks the descriptor and takes a reference to what
        // it names, whose memory is shared with whoever else has one.
        let region = unsafe {
            let (fd, access) = (dmabuf.as_raw_fd(), access.bits() as i32);
            let raw = ffi::ibv_reg_dmabuf_mr(domain.as_raw(), offset, bytes, iova, fd, access);
            Handle::new(VERB, raw)
        }?;
        let (region, address) = (ImportableHandle::owned(region), ptr::null_mut());
        Ok(Self { region, address, bytes, base: iova, access, domain })
    }

    /// `ibv_import_mr`: a region that another process has registered through the same file
    /// descriptor of the device, by the kernel's [number](Self::handle) of it. Requests address it
    /// from `base` on, as they do there (what its [`remote`](Self::remote) says).
    ///
    /// Dropping or closing it gives back what the import took, and leaves the region as it is
    /// (`ibv_unimport_mr`); after [`own`](Self::own) it deregisters the region.
    ///
    /// # Errors
    ///
    ///  - `ENOENT`, `EINVAL`: the domain's context has no region of that number.
    ///  - `EINVAL`: its end would be beyond the last address.
    ///  - `EOPNOTSUPP`: the device cannot import.
    ///
    /// # Safety
    ///
    ///  - It is a region whose memory may be accessed as with [`new`](Self::new), under the access
    ///    that it was registered with, for as long as this one is used.
    ///  - Only one of the processes deregisters it, when the others are done with it.
    #[doc(alias = "ibv_import_mr")]
    #[doc(alias = "ibv_unimport_mr")]
    pub unsafe fn import(
        domain: impl Into<Parent<'pd, ProtectionDomain<'pd>>>,
        handle: u32,
        base: u64,
        access: AccessFlags,
    ) -> Result<Self> {
        const VERB: &str = "ibv_import_mr";
        let domain = domain.into();
        // SAFETY: the domain is live; what comes back is an import of ours.
        let region = unsafe { Handle::new(VERB, ffi::ibv_import_mr(domain.as_raw(), handle)) }?;
        let region = ImportableHandle::imported(region);
        // SAFETY: the region is live; the import has set its length.
        let bytes = unsafe { (*region.as_ptr()).length };
        if base.checked_add(bytes as u64).is_none() {
            return Err(Error::invalid(VERB, "the region ends beyond the last address"));
        }
        Ok(Self { region, address: ptr::null_mut(), bytes, base, access, domain })
    }

    /// Takes over a region that was registered elsewhere, such as by a C library: any `struct ibv_mr`.
    /// `base` is the address by which requests and peers name its first byte (the `iova`; without one
    /// it is the address of the memory), and `access` what it was registered for: the C object knows
    /// neither.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the pointer is null, or it is of another domain; or its end would be beyond the
    ///    last address.
    ///
    /// # Safety
    ///
    /// `raw` is null or a live region, of which `base` and `access` are right, and nothing else
    /// deregisters it. For its memory the conditions of [`new`](Self::new) hold.
    pub unsafe fn from_raw(
        raw: *mut ffi::ibv_mr,
        base: u64,
        access: AccessFlags,
        domain: impl Into<Parent<'pd, ProtectionDomain<'pd>>>,
    ) -> Result<Self> {
        const VERB: &str = "ibv_reg_mr";
        let domain = domain.into();
        // SAFETY: the caller vouches for the pointer.
        if raw.is_null() || unsafe { (*raw).pd } != domain.as_raw() {
            return Err(Error::invalid(VERB, "not a memory region of this domain"));
        }
        // SAFETY: the region is live.
        let (address, bytes) = unsafe { ((*raw).addr.cast(), (*raw).length) };
        if base.checked_add(bytes as u64).is_none() {
            return Err(Error::invalid(VERB, "the region ends beyond the last address"));
        }
        // SAFETY: the caller hands over a live region.
        let region = ImportableHandle::owned(unsafe { Handle::new(VERB, raw) }?);
        Ok(Self { region, address, bytes, base, access, domain })
    }

    /// Makes an [imported](Self::import) region this program's own: from now on dropping or closing
    /// it deregisters it, for all processes.
    pub fn own(&mut self) {
        self.region.own();
    }

    /// `ibv_rereg_mr`: changes the region's access, its protection domain, or both. Its keys may be
    /// others afterwards.
    ///
    /// # Errors
    ///
    /// [`ReregisterError::state`] says which state the region is in.
    ///
    ///  - `EINVAL`: nothing is to be changed, or what cannot be: the domain is of another context,
    ///    the access is a contradiction, the region is of a dma-buf or imported, or a window is bound
    ///    to it.
    ///  - `EOPNOTSUPP`: the device cannot do that.
    ///
    /// # Safety
    ///
    /// No request that names the region is outstanding. The conditions of [`new`](Self::new) hold for
    /// the new access too.
    #[doc(alias = "ibv_rereg_mr")]
    pub unsafe fn rereg(&mut self, change: Reregistration<'pd>) -> Result<(), ReregisterError> {
        // SAFETY: the caller vouches for the memory under the new access.
        unsafe { self.reregister(change, None) }
    }

    /// `ibv_rereg_mr`: makes it a region of other memory, and also applies `change`, as
    /// [`rereg`](Self::rereg) does, if it has anything. Requests and peers address it by its
    /// address.
    ///
    /// # Errors
    ///
    /// Those of [`rereg`](Self::rereg), and:
    ///
    ///  - `EINVAL`: the address is null, or there are no bytes, or more than there are addresses.
    ///  - `EFAULT`: the memory is not mapped, or is read-only and is to be written.
    ///
    /// # Safety
    ///
    /// No request that names the region is outstanding. The conditions of [`new`](Self::new) hold for
    /// the new memory from now on; and for the former one until this returned `Ok`, or until the
    /// region is deregistered if it did not.
    #[doc(alias = "ibv_rereg_mr")]
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

    /// # Safety
    ///
    /// As [`rereg`](Self::rereg), or [`rereg_memory`](Self::rereg_memory).
    unsafe fn reregister(
        &mut self,
        change: Reregistration<'pd>,
        memory: Option<(*mut u8, usize)>,
    ) -> Result<(), ReregisterError> {
        let Self { region, domain, access, .. } = self;
        // SAFETY: the caller vouches for the memory.
        let result = unsafe { reregister(region.handle(), domain, access, change, memory) };
        let changed = match result {
            Ok(()) => true,
            Err(error) => error.state() == ReregisteredState::Changed,
        };
        if let (true, Some((address, bytes))) = (changed, memory) {
            (self.address, self.bytes, self.base) = (address, bytes, address as u64);
        }
        result
    }

    /// The bytes in `range`, for a work request that reads them.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds, or longer than 4 GiB - 1 bytes; or requests do not see
    ///    the region at its own address: it has another iova, is a dma-buf, or is imported. See
    ///    [`gather_element_by_iova`](Self::gather_element_by_iova).
    #[inline]
    pub fn gather_element(&self, range: impl RangeBounds<usize>) -> Result<GatherElement<'_>> {
        self.sge(range).map(GatherElement::new)
    }

    /// The bytes in `range`, for a work request that writes them. Any number of requests may write
    /// the same bytes; what they leave is unspecified.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds, or longer than 4 GiB - 1 bytes; or requests do not see
    ///    the region at its own address: it has another iova, is a dma-buf, or is imported. See
    ///    [`scatter_element_by_iova`](Self::scatter_element_by_iova).
    #[inline]
    pub fn scatter_element(&self, range: impl RangeBounds<usize>) -> Result<ScatterElement<'_>> {
        self.sge(range).map(ScatterElement::new)
    }

    /// The address of the memory; null for a dma-buf and an imported region.
    pub fn as_ptr(&self) -> *mut u8 {
        self.address
    }

    /// `ibv_dereg_mr`: deregisters the region, and returns the error if that fails, which dropping
    /// cannot. The device may then still access the memory.
    ///
    /// # Errors
    ///
    /// The region is then [leaked](crate#when-a-resource-cannot-be-destroyed), with all that it was made from.
    ///
    ///  - `EBUSY`, `EINVAL`: a memory window is bound to it.
    #[doc(alias = "ibv_dereg_mr")]
    pub fn close(mut self) -> Result<()> {
        self.destroy()
    }
}

impl private::Sealed for RawMemoryRegion<'_> {}

impl LocalMemory for RawMemoryRegion<'_> {
    #[inline]
    fn sge(&self, range: impl RangeBounds<usize>) -> Result<ffi::ibv_sge> {
        let range = resolve(range, self.bytes)?;
        // Null is nobody's own address, not even that of a dma-buf seen at 0.
        let own = if self.address.is_null() { !self.base } else { self.address as u64 };
        let (address, iova) =
            (own.wrapping_add(range.start as u64), self.base + range.start as u64);
        sge_at(address, iova, range.len(), self.lkey())
    }
}

impl ProtectionDomain<'_> {
    /// `ibv_reg_mr`: registers memory that something else owns. See [`RawMemoryRegion::new`].
    ///
    /// # Errors
    ///
    /// Those of [`RawMemoryRegion::new`].
    ///
    /// # Safety
    ///
    /// That of [`RawMemoryRegion::new`].
    #[doc(alias = "ibv_reg_mr")]
    pub unsafe fn register_raw(
        &self,
        address: *mut u8,
        bytes: usize,
        access: AccessFlags,
    ) -> Result<RawMemoryRegion<'_>> {
        // SAFETY: the caller vouches for the memory.
        unsafe { RawMemoryRegion::new(self, address, bytes, access) }
    }

    /// `ibv_reg_dmabuf_mr`: registers a part of a dma-buf. See [`RawMemoryRegion::from_dmabuf`].
    ///
    /// # Errors
    ///
    /// Those of [`RawMemoryRegion::from_dmabuf`].
    #[doc(alias = "ibv_reg_dmabuf_mr")]
    pub fn register_dmabuf(
        &self,
        dmabuf: BorrowedFd<'_>,
        offset: u64,
        bytes: usize,
        iova: u64,
        access: AccessFlags,
    ) -> Result<RawMemoryRegion<'_>> {
        RawMemoryRegion::from_dmabuf(self, dmabuf, offset, bytes, iova, access)
    }
}

/// Whether there can be memory of this length at the address.
fn check_memory(verb: &'static str, address: *mut u8, bytes: usize) -> Result<()> {
    if address.is_null() {
        return Err(Error::invalid(verb, "the address is null"));
    }
    if bytes == 0 {
        return Err(Error::invalid(verb, "the region is empty"));
    }
    match (address as usize).checked_add(bytes) {
        Some(_) => Ok(()),
        None => Err(Error::invalid(verb, "the region ends beyond the last address")),
    }
}
