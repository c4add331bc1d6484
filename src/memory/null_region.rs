//! The region without memory: the device discards writes to it, and reads it as zeros.

use super::access::AccessFlags;
use super::region::{Backing, Parts, Region};
use super::registration::adopt;
use super::scatter_gather::{GatherElement, ScatterElement, sge};
use crate::domain::ProtectionDomain;
use crate::error::Result;
use crate::ffi;
use crate::handle::Handle;
use crate::parent::Parent;

/// `struct ibv_mr`: a region without memory, of any length. The device discards what requests of this
/// program write to it, and reads it as zeros; neither uses the bus.
///
/// Use it as an element of a list, to skip a part of an incoming message or to pad an outgoing one.
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
#[doc(alias = "ibv_mr")]
pub type NullMemoryRegion<'pd> = Region<'pd, Null>;

/// No memory.
#[derive(Debug)]
pub struct Null(());

impl Backing for Null {
    type Item = ();

    const NAME: &'static str = "NullMemoryRegion";
}

/// Zeros for inline sends: more than any device sends inline; longer requests are refused before their
/// data is read.
static ZEROS: [u8; 4096] = [0; 4096];

impl<'pd> NullMemoryRegion<'pd> {
    /// `ibv_alloc_null_mr`: allocates a null region.
    ///
    /// # Errors
    ///
    ///  - `EOPNOTSUPP`: the device has no null regions.
    ///  - `ENOMEM`: no region left on the device.
    #[doc(alias = "ibv_alloc_null_mr")]
    pub fn new(domain: impl Into<Parent<'pd, ProtectionDomain<'pd>>>) -> Result<Self> {
        let domain = domain.into();
        // SAFETY: the domain is live; a region that comes back is ours alone.
        let raw =
            unsafe { Handle::new("ibv_alloc_null_mr", ffi::ibv_alloc_null_mr(domain.as_raw())) }?;
        Ok(Self::from_parts(Parts::whole(raw, AccessFlags::LOCAL_WRITE), Null(()), domain))
    }

    /// Takes over a null region that was made elsewhere, such as by a C library.
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
        domain: impl Into<Parent<'pd, ProtectionDomain<'pd>>>,
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
        // The device ignores the address. A provider that sends inline reads it.
        sge(ZEROS.as_ptr() as u64, bytes, self.lkey()).map(GatherElement::new)
    }

    /// `bytes` bytes that are discarded, for a work request that writes them.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `bytes` is more than 4 GiB - 1.
    #[inline]
    pub fn scatter_element(&self, bytes: usize) -> Result<ScatterElement<'_>> {
        // A provider that copies short messages to their destination itself recognises the key, and
        // copies nothing.
        sge(0, bytes, self.lkey()).map(ScatterElement::new)
    }
}
