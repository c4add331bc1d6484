use std::marker::PhantomData;
use std::num::NonZero;
use std::ops::{Deref, DerefMut};
use std::slice;

use super::allocation::Allocation;
use super::options::RegionOptions;
use super::scatter_gather::Element;
use crate::base::{Result, debug};

/// The memory of a region before its registration or after its deregistration, at the same address.
///
/// [`from_buffer`](crate::SharedMemoryRegion::from_buffer) registers it, and
/// [`into_inner`](crate::SharedMemoryRegion::into_inner) returns it, without a copy. It derefs to `[T]`, is
/// freed when it is dropped, and can outlive the domain and the context.
pub struct RegionBuffer<T> {
    memory: Allocation,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Element> RegionBuffer<T> {
    /// Allocates `len` zeroed elements as the options say. Their access does not matter here.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: it would be empty, or longer than memory, or the options contradict each other.
    ///  - `EOPNOTSUPP`: the machine does not have such huge pages.
    ///  - `ENOMEM`: no memory, or not enough huge pages set aside.
    pub fn new(len: usize, options: impl Into<RegionOptions>) -> Result<Self> {
        let memory = options.into().allocate::<T>("ibv_reg_mr", len)?;
        Ok(Self::of(memory, len))
    }

    /// `memory` is aligned for `T`, has `len` initialised elements, and no device knows it.
    pub(super) fn of(memory: Allocation, len: usize) -> Self {
        Self { memory, len, elements: PhantomData }
    }

    /// `madvise(MADV_POPULATE_WRITE)`: brings all pages in, on several threads, so that the registration only
    /// has to pin them.
    ///
    /// Many GB are registered several times faster. After each part, any of the threads calls `progress` with
    /// the number of bytes that are in. Memory of less than 1 MiB has no pages of its own, unless the options
    /// ask for them, and stays as it is.
    ///
    /// # Errors
    ///
    ///  - `ENOMEM`: no memory is left, or not enough huge pages.
    ///  - `EFAULT`: huge pages that were set aside are gone.
    #[doc(alias = "MADV_POPULATE_WRITE")]
    pub fn populate(
        &mut self,
        threads: NonZero<usize>,
        progress: impl Fn(usize) + Sync,
    ) -> Result<()> {
        self.memory.populate("madvise", threads.get(), &progress)
    }

    /// Whether nothing but this value can access the memory. If not, no code dereferences it.
    pub(super) fn is_exclusive(&self) -> bool {
        self.memory.is_exclusive()
    }

    pub(super) fn raw_parts(&self) -> (*mut u8, usize) {
        (self.memory.data().as_ptr(), self.len)
    }
}

impl<T: Element> Deref for RegionBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the memory is ours alone; `new` asks that it is aligned and has that many elements. All bytes
        // are valid.
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
