use std::marker::PhantomData;
use std::num::NonZero;
use std::ops::{Deref, DerefMut};
#[cfg(rdma_core_65)]
use std::ptr;
#[cfg(rdma_core_65)]
use std::ptr::NonNull;
use std::slice;

use super::allocation::Allocation;
use super::options::RegionOptions;
use super::scatter_gather::Element;
#[cfg(rdma_core_65)]
use crate::base::Error;
#[cfg(rdma_core_65)]
use crate::base::ffi;
use crate::base::{Leak, Result, debug};
use crate::verbs::domain::DomainRef;

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

/// Holds its own domain: `rereg` may move its region to another.
#[derive(Debug)]
pub(super) struct ProviderBuffer<'pd> {
    #[cfg(rdma_core_65)]
    raw: NonNull<ffi::ibv_buf>,
    #[cfg(rdma_core_65)]
    address: *mut u8,
    domain: DomainRef<'pd>,
}

// SAFETY: libibverbs allows its functions from any thread; the address is followed as the region allows.
unsafe impl Send for ProviderBuffer<'_> {}
// SAFETY: as above.
unsafe impl Sync for ProviderBuffer<'_> {}

impl Leak for ProviderBuffer<'_> {
    fn leak(&self) {
        self.domain.leak();
    }
}

#[cfg(rdma_core_65)]
impl Drop for ProviderBuffer<'_> {
    fn drop(&mut self) {
        // SAFETY: the buffer and its domain are live, and no region of it is registered any more.
        unsafe { ffi::ibv_free_buf(self.raw.as_ptr()) }
    }
}

#[cfg(rdma_core_65)]
impl<'pd> ProviderBuffer<'pd> {
    pub(super) fn new(domain: DomainRef<'pd>, bytes: usize) -> Result<Self> {
        const VERB: &str = "ibv_alloc_buf";
        let mut raw = ptr::null_mut();
        ffi::set_errno(0);
        // SAFETY: the domain is live, and the pointer is ours.
        let address = unsafe { ffi::ibv_alloc_buf(domain.as_raw(), bytes, &mut raw) }.cast::<u8>();
        let raw = NonNull::new(raw).filter(|_| !address.is_null());
        let raw = raw.ok_or_else(|| Error::new(VERB, ffi::errno()))?;
        // SAFETY: the memory is new, and has that many bytes.
        unsafe { address.write_bytes(0, bytes) };
        Ok(Self { raw, address, domain })
    }

    pub(super) fn as_raw(&self) -> *mut ffi::ibv_buf {
        self.raw.as_ptr()
    }

    pub(super) fn address(&self) -> *mut u8 {
        self.address
    }
}
