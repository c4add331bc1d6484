//! The whole address space as one region.

use std::ptr;

use super::access::AccessFlags;
use super::region::{Backing, Parts, Region};
use super::registration::{adopt, register};
use super::scatter_gather::Element;
use super::slice::{MemorySlice, MemorySliceMut};
use crate::device::OnDemandPaging;
use crate::domain::ProtectionDomain;
use crate::error::{Error, Result};
use crate::ffi;
use crate::parent::Parent;

/// `struct ibv_mr`: all present and future memory of the program, registered at once for local access;
/// the device brings pages in as it needs them (implicit on-demand paging).
///
/// Any slice can then be posted, at no cost in advance:
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
/// It is safe for the same reasons as [`BorrowedMemoryRegion`](crate::memory::BorrowedMemoryRegion): peers have
/// no access, and requests of this program name memory only by slices that borrow it.
#[doc(alias = "ibv_mr")]
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
    pub fn new(domain: impl Into<Parent<'pd, ProtectionDomain<'pd>>>) -> Result<Self> {
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

    /// Takes over a region of the whole address space that was made elsewhere, such as by a C library.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the pointer is null, or it is of another domain.
    ///
    /// # Safety
    ///
    /// `raw` is null or a live region that was registered for the whole address space, on demand, for
    /// local access only; no peer knows its keys; and nothing else deregisters it.
    pub unsafe fn from_raw(
        raw: *mut ffi::ibv_mr,
        domain: impl Into<Parent<'pd, ProtectionDomain<'pd>>>,
    ) -> Result<Self> {
        let domain = domain.into();
        // SAFETY: the caller hands over a region.
        let raw = unsafe { adopt("ibv_reg_mr", raw, &domain) }?;
        Ok(Self::from_parts(Parts::whole(raw, ACCESS), Implicit(()), domain))
    }

    /// A slice, with what a work request needs to name it.
    #[inline]
    pub fn slice<'buf, T: Element>(&'buf self, memory: &'buf [T]) -> MemorySlice<'buf, T> {
        MemorySlice::new(memory, self.lkey())
    }

    /// A slice, exclusively, with what a work request needs to name it.
    #[inline]
    pub fn slice_mut<'buf, T: Element>(
        &'buf self,
        memory: &'buf mut [T],
    ) -> MemorySliceMut<'buf, T> {
        MemorySliceMut::new(memory, self.lkey())
    }
}
