use std::ptr;

use super::options::AccessFlags;
use super::region::{Backing, Parts, Region};
use super::registration::{adopt, register};
use super::scatter_gather::{Element, GatherElement, ScatterElement, sge};
use super::slice::{MemorySlice, MemorySliceMut};
use crate::base::{Error, Handle, Result, ffi};
use crate::verbs::device::OnDemandPaging;
use crate::verbs::domain::DomainRef;

/// `struct ibv_mr`: a region without memory, of any length.
///
/// The device discards what requests of this program write to it, and reads it as zeros, without the bus. In a
/// list of elements, it skips a part of an incoming message or pads an outgoing one.
///
/// ```no_run
/// # // not on Soft-RoCE alone: needs a null region
/// # let context = ibverbs::open("mlx5_0")?;
/// let domain = context.alloc_pd()?;
/// let header = domain.allocate::<u8>(64)?;
/// let padding = ibverbs::memory::NullMemoryRegion::new(&domain)?;
/// let list = [header.gather_element(..)?, padding.gather_element(4032)?];
/// # Ok::<(), ibverbs::Error>(())
/// ```
pub type NullMemoryRegion<'pd> = Region<'pd, Null>;

/// No memory.
#[derive(Debug)]
pub struct Null(());

impl Backing for Null {
    type Item = ();

    const NAME: &'static str = "NullMemoryRegion";
}

/// More than any device sends inline. Longer requests are refused before their data is read.
static ZEROS: [u8; 4096] = [0; 4096];

impl<'pd> NullMemoryRegion<'pd> {
    /// `ibv_alloc_null_mr`: allocates a null region.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: the device has no null regions.
    ///  - `ENOMEM`: no region left on the device.
    #[doc(alias = "ibv_alloc_null_mr")]
    pub fn new(domain: impl Into<DomainRef<'pd>>) -> Result<Self> {
        let domain = domain.into();
        // SAFETY: the domain is live; a region that comes back is ours alone.
        let raw =
            unsafe { Handle::new("ibv_alloc_null_mr", ffi::ibv_alloc_null_mr(domain.as_raw())) }?;
        Ok(Self::from_parts(Parts::whole(raw, AccessFlags::LOCAL_WRITE), Null(()), domain))
    }

    /// Takes over a null region made elsewhere, such as by a C library.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the pointer is null, or it is of another domain.
    ///
    /// # Safety
    ///
    /// `raw` is null or a live region of `ibv_alloc_null_mr`, and nothing else deallocates it.
    pub unsafe fn from_raw(
        raw: *mut ffi::ibv_mr,
        domain: impl Into<DomainRef<'pd>>,
    ) -> Result<Self> {
        let domain = domain.into();
        // SAFETY: the caller hands over a region.
        let raw = unsafe { adopt("ibv_alloc_null_mr", raw, &domain) }?;
        Ok(Self::from_parts(Parts::whole(raw, AccessFlags::LOCAL_WRITE), Null(()), domain))
    }

    /// `bytes` zeros, for a work request that reads them.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `bytes` is more than 4 GiB - 1.
    #[inline]
    pub fn gather_element(&self, bytes: usize) -> Result<GatherElement<'_>> {
        // The device ignores the address; a provider reads it to send inline.
        sge(ZEROS.as_ptr() as u64, bytes, self.lkey()).map(GatherElement::new)
    }

    /// `bytes` bytes that are discarded, for a work request that writes them.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `bytes` is more than 4 GiB - 1.
    #[inline]
    pub fn scatter_element(&self, bytes: usize) -> Result<ScatterElement<'_>> {
        // Providers that copy short messages themselves recognise the key, and copy nothing.
        sge(0, bytes, self.lkey()).map(ScatterElement::new)
    }
}

/// `struct ibv_mr`: all present and future memory of the program, registered at once for local access.
///
/// The device brings pages in as it needs them (implicit on-demand paging). Any slice can be posted, at no cost
/// in advance:
///
/// ```no_run
/// # // not on Soft-RoCE alone: needs on-demand paging
/// # let context = ibverbs::open("mlx5_0")?;
/// let domain = context.alloc_pd()?;
/// let memory = ibverbs::memory::ImplicitMemoryRegion::new(&domain)?;
/// let text = String::from("hello");
/// let element = memory.slice(text.as_bytes()).gather_element()?;
/// # Ok::<(), ibverbs::Error>(())
/// ```
///
/// It is safe because peers have no access, and requests of this program name memory only by slices that borrow
/// it.
pub type ImplicitMemoryRegion<'pd> = Region<'pd, Implicit>;

/// All memory of the program.
#[derive(Debug)]
pub struct Implicit(());

impl Backing for Implicit {
    type Item = ();

    const NAME: &'static str = "ImplicitMemoryRegion";
}

const ACCESS: AccessFlags = AccessFlags::LOCAL_WRITE.union(AccessFlags::ON_DEMAND);

impl<'pd> ImplicitMemoryRegion<'pd> {
    /// `ibv_reg_mr`: registers the whole address space, for local access.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: the device does not have implicit on-demand paging
    ///    ([`OnDemandPaging::SUPPORT_IMPLICIT`]).
    ///  - `ENOMEM`: no region left on the device.
    #[doc(alias = "ibv_reg_mr")]
    pub fn new(domain: impl Into<DomainRef<'pd>>) -> Result<Self> {
        const VERB: &str = "ibv_reg_mr";
        let domain = domain.into();
        let paging = domain.context().query_device()?.on_demand_paging().general;
        if !paging.contains(OnDemandPaging::SUPPORT | OnDemandPaging::SUPPORT_IMPLICIT) {
            let reason = "the device has no implicit on-demand paging";
            return Err(Error::with_reason(VERB, libc::EOPNOTSUPP, reason));
        }
        // SAFETY: the device accesses only memory that requests name, by slices that borrow it.
        let raw = unsafe { register(VERB, &domain, ptr::null_mut(), usize::MAX, 0, ACCESS) }?;
        Ok(Self::from_parts(Parts::whole(raw, ACCESS), Implicit(()), domain))
    }

    /// Takes over a region of the whole address space made elsewhere, such as by a C library.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the pointer is null, or it is of another domain.
    ///
    /// # Safety
    ///
    /// `raw` is null or a live region that was registered for the whole address space, on demand, for local
    /// access only; no peer knows its keys; and nothing else deregisters it.
    pub unsafe fn from_raw(
        raw: *mut ffi::ibv_mr,
        domain: impl Into<DomainRef<'pd>>,
    ) -> Result<Self> {
        let domain = domain.into();
        // SAFETY: the caller hands over a region.
        let raw = unsafe { adopt("ibv_reg_mr", raw, &domain) }?;
        Ok(Self::from_parts(Parts::whole(raw, ACCESS), Implicit(()), domain))
    }

    /// A slice with the region's key, for a work request.
    #[inline]
    pub fn slice<'buf, T: Element>(&'buf self, memory: &'buf [T]) -> MemorySlice<'buf, T> {
        MemorySlice::new(memory, self.lkey())
    }

    /// An exclusive slice with the region's key, for a work request.
    #[inline]
    pub fn slice_mut<'buf, T: Element>(
        &'buf self,
        memory: &'buf mut [T],
    ) -> MemorySliceMut<'buf, T> {
        MemorySliceMut::new(memory, self.lkey())
    }
}
