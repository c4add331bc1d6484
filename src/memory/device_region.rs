//! Regions of memory on the device.

use std::ops::RangeBounds;
use std::ptr;

use super::access::AccessFlags;
use super::buffer::{GatherBuffer, ScatterBuffer};
use super::device_memory::DeviceMemory;
use super::options::check_access;
use super::region::{Addressed, Backing, Parts, Peers, Region, Writable};
use super::scatter_gather::{LocalMemory, LocalMemoryMut, private, resolve};
use crate::device::quirks::copies_results;
use crate::domain::ProtectionDomain;
use crate::error::{Error, Result};
use crate::ffi;
use crate::handle::{Handle, Leak};
use crate::parent::Parent;

/// `struct ibv_mr`: registered [`DeviceMemory`], as bytes. Requests and peers address it from 0 on.
///
/// This program's requests take a region whole: `&region` is a [`GatherBuffer`], `&mut region` a
/// [`ScatterBuffer`], in a channel too. [`QueuePair::post_send`](crate::QueuePair::post_send) and the like
/// take a part. A request that writes the region is refused (`EOPNOTSUPP`) on devices whose provider
/// delivers short messages and results itself (mlx5), at an address that would be one of this program:
/// see [`scatter_element_by_iova`](Region::scatter_element_by_iova).
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
#[doc(alias = "ibv_mr")]
pub type DeviceMemoryRegion<'pd> = Region<'pd, OnDevice<'pd>>;

/// Memory of a device.
#[derive(Debug)]
pub struct OnDevice<'pd> {
    memory: Parent<'pd, DeviceMemory<'pd>>,
    /// Whether the provider copies results to the address that a request names.
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

/// The element of a whole region: not an array, so that it is no part of a tuple, of which the post copies
/// all pieces if one is [`Inline`](crate::Inline).
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

// SAFETY: the memory is registered until the region is dropped. It is not this program's, and the device
// alone reads it: what is posted is not inline.
unsafe impl GatherBuffer for DeviceMemoryRegion<'_> {
    type List = Whole;
    type Kept = Self;

    #[inline]
    fn gather(&self) -> Result<Whole> {
        self.sge(..).map(Whole)
    }
}

// SAFETY: as above. The device alone writes it, which `sge_mut` has checked; there are no references to it.
unsafe impl ScatterBuffer for DeviceMemoryRegion<'_> {
    #[inline]
    fn scatter(&mut self) -> Result<Whole> {
        self.sge_mut(..).map(Whole)
    }
}

impl<'pd> DeviceMemoryRegion<'pd> {
    /// `ibv_reg_dm_mr`: registers the bytes of `memory` in `range`. Local write access is always
    /// included, and so is [`ZERO_BASED`](AccessFlags::ZERO_BASED), since the addresses of such regions
    /// begin at 0.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is empty or out of bounds; memory and domain are of different contexts;
    ///    the device does not have that access.
    ///  - `EOPNOTSUPP`: the device cannot register its memory, or does not have that access.
    ///  - `ENOMEM`: no region left on the device.
    #[doc(alias = "ibv_reg_dm_mr")]
    pub fn new(
        domain: impl Into<Parent<'pd, ProtectionDomain<'pd>>>,
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
        Error::invalid_if(domain.context().as_raw() != memory.context().as_raw(), VERB, reason)?;
        check_access(VERB, &domain, access)?;
        let copies = copies_results(&domain.context().query_device()?);
        // SAFETY: domain and memory are live, and of one context; no reference to the memory can
        // exist.
        let raw = unsafe {
            let (domain, offset) = (domain.as_raw(), range.start as u64);
            let raw = ffi::ibv_reg_dm_mr(domain, memory.as_raw(), offset, bytes, access.bits());
            Handle::new(VERB, raw)
        }?;
        let parts = Parts::at(raw, ptr::null_mut(), bytes, access);
        Ok(Self::from_parts(parts, OnDevice { memory, copies }, domain))
    }

    /// The memory that is registered.
    pub fn device_memory(&self) -> &DeviceMemory<'pd> {
        &self.memory().memory
    }
}
