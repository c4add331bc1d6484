//! The memory of a pool: a region that it owns, of one process or shared with peers.

use std::ops::RangeBounds;
use std::sync::Arc;

use crate::channel::OwnedBuffer;
use crate::debug::debug;
use crate::error::{Error, Result};
use crate::ffi;
use crate::memory::{
    Element, GatherBuffer, MemoryRegion, ScatterBuffer, SharedMemoryRegion, SharedMemorySlice,
};

// SAFETY: the region owns its memory, which does not move, is registered for local writes until it is dropped, and is
// accessed only through the region.
unsafe impl<T: Element> GatherBuffer for Box<MemoryRegion<'static, T>> {
    type List = [ffi::ibv_sge; 1];
    type Kept = Self;

    fn gather(&self) -> Result<Self::List> {
        self.slice(..)?.gather()
    }
}

// SAFETY: as above. Any bytes are a valid `Element`.
unsafe impl<T: Element> ScatterBuffer for Box<MemoryRegion<'static, T>> {
    const PEERS_MAY_WRITE: bool = false;

    fn scatter(&mut self) -> Result<Self::List> {
        self.slice_mut(..)?.scatter()
    }
}

// SAFETY: it borrows nothing, and is `Send` and `Sync`.
unsafe impl<T: Element> OwnedBuffer for Box<MemoryRegion<'static, T>> {}

/// A range of elements of an `Arc<SharedMemoryRegion<'static, T>>`: an [`OwnedBuffer`].
///
/// Ranges of one region may overlap, be in several operations at a time, and be accessed meanwhile: see
/// [`SharedMemorySlice`].
pub struct SharedMemoryRange<T: Element> {
    region: Arc<SharedMemoryRegion<'static, T>>,
    start: usize,
    len: usize,
}

impl<T: Element> SharedMemoryRange<T> {
    /// The elements in `range`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds.
    pub fn new(
        region: Arc<SharedMemoryRegion<'static, T>>,
        range: impl RangeBounds<usize>,
    ) -> Result<Self> {
        use std::ops::Bound::{Excluded, Included, Unbounded};

        let start = match range.start_bound() {
            Included(&start) => start,
            Excluded(&start) => start.saturating_add(1),
            Unbounded => 0,
        };
        let end = match range.end_bound() {
            Included(&end) => end.saturating_add(1),
            Excluded(&end) => end,
            Unbounded => region.len(),
        };
        Error::invalid_if(start > end, "ibv_sge", "the range ends before it begins")?;
        let len = region.slice(start..end)?.len();
        Ok(Self { region, start, len })
    }

    /// The region.
    pub fn region(&self) -> &Arc<SharedMemoryRegion<'static, T>> {
        &self.region
    }

    /// The elements.
    ///
    /// # Errors
    ///
    /// None: the range was checked.
    #[inline]
    pub fn as_slice(&self) -> Result<SharedMemorySlice<'_, T>> {
        self.region.slice(self.start..self.start + self.len)
    }
}

// SAFETY: the region owns its memory, which does not move and is registered for local writes until the region is
// dropped; this keeps the region. There are no references into the memory.
unsafe impl<T: Element> GatherBuffer for SharedMemoryRange<T> {
    type List = [ffi::ibv_sge; 1];
    type Kept = Self;

    #[inline]
    fn gather(&self) -> Result<Self::List> {
        self.as_slice()?.gather()
    }
}

// SAFETY: as above. Any bytes are a valid `Element`.
unsafe impl<T: Element> ScatterBuffer for SharedMemoryRange<T> {
    fn scatter(&mut self) -> Result<Self::List> {
        self.gather()
    }
}

// SAFETY: it borrows nothing, and is `Send` and `Sync`.
unsafe impl<T: Element> OwnedBuffer for SharedMemoryRange<T> {}

debug! { impl[T: Element] SharedMemoryRange<T>, self, start: self.start, len: self.len, .. }
