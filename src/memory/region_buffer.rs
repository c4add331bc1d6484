//! The memory of a region that was deregistered.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::slice;

use super::allocation::Allocation;
use super::scatter_gather::Element;

use crate::debug::debug;

/// The memory of a region after its deregistration: the same bytes at the same address, without a copy. It
/// derefs to `[T]`, and is freed when it is dropped.
///
/// [`MemoryRegion::into_inner`](crate::MemoryRegion::into_inner) and
/// [`SharedMemoryRegion::into_inner`](crate::SharedMemoryRegion::into_inner) return it. It has no lifetime, so it
/// can outlive the domain and the context.
pub struct RegionBuffer<T> {
    memory: Allocation,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Element> RegionBuffer<T> {
    /// The memory is aligned for `T`, has `len` initialised elements, and no device knows it any more.
    pub(super) fn new(memory: Allocation, len: usize) -> Self {
        Self { memory, len, elements: PhantomData }
    }

    /// Its address, and the number of its elements.
    pub(super) fn raw_parts(&self) -> (*mut u8, usize) {
        (self.memory.data().as_ptr(), self.len)
    }
}

impl<T: Element> Deref for RegionBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the memory is ours alone, aligned, and has that many elements, for which all bytes are
        // valid: `new` asks for it.
        unsafe { slice::from_raw_parts(self.memory.data().cast().as_ptr(), self.len) }
    }
}

impl<T: Element> DerefMut for RegionBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`.
        unsafe { slice::from_raw_parts_mut(self.memory.data().cast().as_ptr(), self.len) }
    }
}

debug! { impl[T] RegionBuffer<T>, self, len: self.len, .. }
