use std::ops::RangeBounds;
use std::sync::Arc;

use super::buffer::{GatherBuffer, One, ScatterBuffer};
use super::raw_region::Raw;
use super::region::{Backing, InMemory, Peers, Region};
use super::remote_region::RemoteMemoryRegion;
use super::scatter_gather::Element;
use super::shared_region::Shared;
use super::shared_slice::SharedMemorySlice;
use crate::base::{Result, debug, ffi};

/// A range of elements of an `Arc<Region<'static, M>>`, which it keeps registered: the buffer of an operation that owns its
/// memory, on loops, as a future or on rails.
///
/// The region is one that peers access too, a [`SharedMemoryRegion`](crate::SharedMemoryRegion) or a
/// [`RawMemoryRegion`](crate::memory::RawMemoryRegion): there are no references into it. So ranges of one region may
/// overlap, be in several operations at a time, and be accessed meanwhile. A clone is the same range.
///
/// ```
/// use std::sync::Arc;
///
/// use ibverbs::memory::{MemoryRange, RawMemoryRegion};
/// use ibverbs::{AccessFlags, ProtectionDomain};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// let domain = Arc::new(ProtectionDomain::new(ibverbs::open("rxe0")?)?);
/// let arena: &'static mut [u8] = Box::leak(vec![7; 8192].into_boxed_slice());
/// // SAFETY: the memory is never freed, and used through the region alone from now on.
/// let region = unsafe { RawMemoryRegion::new(&domain, arena.as_mut_ptr(), 8192, AccessFlags::LOCAL_WRITE) }?;
/// let message = MemoryRange::new(Arc::new(region), 4096..4160)?; // `SendWorkRequest::new(message)`
/// # Ok(())
/// # }
/// ```
pub struct MemoryRange<M: Backing + 'static> {
    region: Arc<Region<'static, M>>,
    element: ffi::ibv_sge,
}

/// A range of an `Arc<RawMemoryRegion<'static>>`: memory of another owner, or of a dma-buf.
pub type RawMemoryRange = MemoryRange<Raw<'static>>;

/// A range of an `Arc<SharedMemoryRegion<'static, T>>`.
pub type SharedMemoryRange<T> = MemoryRange<Shared<T>>;

impl<M: InMemory + Peers + 'static> MemoryRange<M> {
    /// The elements in `range`; of a raw region, the bytes.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds, or longer than 4 GiB - 1 bytes; or requests do not address the region by
    ///    an address of this program: it has an [iova](crate::RegionOptions::iova) of its own, is imported, or is a
    ///    dma-buf that is not registered by
    ///    [`map_dmabuf`](crate::memory::RawMemoryRegion::map_dmabuf).
    #[inline]
    pub fn new(region: Arc<Region<'static, M>>, range: impl RangeBounds<usize>) -> Result<Self> {
        let element = region.sge_of_range(range)?;
        Ok(Self { region, element })
    }

    /// The region.
    pub fn region(&self) -> &Arc<Region<'static, M>> {
        &self.region
    }

    /// Its length in bytes.
    pub fn byte_len(&self) -> u32 {
        self.element.length
    }

    /// The bytes, for a peer that reads or writes them.
    pub fn remote(&self) -> RemoteMemoryRegion {
        let &ffi::ibv_sge { addr: address, length, .. } = &self.element;
        RemoteMemoryRegion { address, length: length.into(), rkey: self.region.rkey() }
    }
}

impl<T: Element> SharedMemoryRange<T> {
    /// The elements.
    ///
    /// # Errors
    ///
    /// None: the range was checked.
    #[inline]
    pub fn as_slice(&self) -> Result<SharedMemorySlice<'_, T>> {
        let start = (self.element.addr - self.region.base()) as usize / size_of::<T>();
        self.region.slice(start..start + self.element.length as usize / size_of::<T>())
    }
}

impl<M: Backing> Clone for MemoryRange<M> {
    fn clone(&self) -> Self {
        Self { region: self.region.clone(), element: self.element }
    }
}

// SAFETY: the range is within the region, whose memory stays in place and registered until the region is dropped; this
// keeps the region. Peers may access such memory, so there are no references into it: the region has none, or the caller
// of an `unsafe` function has promised it for as long as the region is registered. The element is plain numbers. Its
// address is one that this program has for this memory alone, so that it names no other memory on another device either.
unsafe impl<M: InMemory + Peers + 'static> GatherBuffer for MemoryRange<M> {
    type List = One;
    type Kept = Self;

    #[inline]
    fn gather(&self) -> Result<One> {
        Ok([self.element])
    }

    #[inline]
    fn is_in_reach(&self) -> bool {
        self.region.memory().is_in_reach()
    }
}

// SAFETY: as above. Any bytes are a valid `Element`, and `check_write` refuses a region without local write access.
unsafe impl<M: InMemory + Peers + 'static> ScatterBuffer for MemoryRange<M> {
    #[inline]
    fn scatter(&mut self) -> Result<One> {
        self.region.memory().check_write(self.region.access())?;
        Ok([self.element])
    }
}

// SAFETY: as of a range, of the whole region.
unsafe impl<M: InMemory + Peers + 'static> GatherBuffer for Arc<Region<'static, M>> {
    type List = One;
    type Kept = Self;

    #[inline]
    fn gather(&self) -> Result<One> {
        Ok([self.sge_of_range(..)?])
    }

    #[inline]
    fn is_in_reach(&self) -> bool {
        self.memory().is_in_reach()
    }
}

// SAFETY: as above.
unsafe impl<M: InMemory + Peers + 'static> ScatterBuffer for Arc<Region<'static, M>> {
    #[inline]
    fn scatter(&mut self) -> Result<One> {
        self.memory().check_write(self.access())?;
        self.gather()
    }
}

debug! {
    impl[M: Backing] MemoryRange<M>, self,
    addr: format_args!("{:#x}", self.element.addr), bytes: self.element.length, ..
}
