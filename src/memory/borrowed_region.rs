//! Registered slices: memory of the caller, for local access.
//!
//! # Why this is safe
//!
//! The device knows the memory from its registration to its deregistration. A region that is dropped as
//! usual is deregistered within the borrow. But a region can be forgotten, or deregistering can fail:
//! then the device still knows memory that has another owner. That alone does no harm, because a device
//! accesses memory only for a request that names it. Peers cannot name it: the region has no remote
//! access, and no window can be bound to it. This program's own requests name it by elements that are
//! borrowed from the region, under the same rules as for any other memory (the code that posts keeps
//! the memory alive until the completion). After the borrow no element can be made. So a forgotten
//! region costs only memory that stays pinned, and a protection domain that cannot be deallocated.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, RangeBounds};
use std::ptr::NonNull;

use super::access::AccessFlags;
use super::accessors::region_accessors;
use super::options::{check_access, check_local};
use super::registration::register;
use super::scatter_gather::{Element, GatherElement, LocalMemory, LocalMemoryMut, ScatterElement};
use super::scatter_gather::{private, resolve, sge};
use super::slice::{MemorySlice, MemorySliceMut};
use crate::debug::debug;
use crate::domain::ProtectionDomain;
use crate::error::{Error, Result};
use crate::ffi;
use crate::handle::{Handle, resource};
use crate::parent::Parent;

/// `struct ibv_mr`: a slice of the caller's, registered for as long as it is borrowed, which only this
/// program and its own device access.
///
/// It is used as a [`MemoryRegion`](crate::MemoryRegion) is; it derefs to the slice. Registering
/// takes many microseconds and pins whole pages, so it pays off for memory that is large or used
/// repeatedly.
///
/// ```
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// # let context = ibverbs::open("rxe0")?;
/// let domain = context.alloc_pd()?;
/// let mut samples = vec![0_f32; 1 << 20];
/// let mut region = domain.register(&mut samples)?;
/// region[0] = 1.5;
/// drop(region);
/// assert_eq!(samples[0], 1.5);
/// # Ok::<(), ibverbs::Error>(())
/// ```
///
/// While the region lives, the slice cannot be accessed directly or freed:
///
/// ```compile_fail,E0505
/// # use ibverbs::{ProtectionDomain, Result};
/// # fn f(domain: &ProtectionDomain<'_>) -> Result<()> {
/// let mut samples = vec![0_f32; 1 << 20];
/// let region = domain.register(&mut samples)?;
/// drop(samples);
/// drop(region);
/// # Ok(())
/// # }
/// ```
#[doc(alias = "ibv_mr")]
pub struct BorrowedMemoryRegion<'pd, 'buf, T: Element> {
    region: Handle<ffi::ibv_mr>,
    data: NonNull<T>,
    len: usize,
    domain: Parent<'pd, ProtectionDomain<'pd>>,
    memory: PhantomData<&'buf mut [T]>,
}

resource!(BorrowedMemoryRegion<'pd, 'buf, T: Element>: region, domain);

/// `struct ibv_mr`: a slice of the caller's, registered for as long as it is borrowed, which requests
/// of this program can read but not write.
///
/// It derefs to the slice.
#[doc(alias = "ibv_mr")]
pub struct ReadOnlyMemoryRegion<'pd, 'buf, T: Element> {
    region: Handle<ffi::ibv_mr>,
    data: &'buf [T],
    domain: Parent<'pd, ProtectionDomain<'pd>>,
}

resource!(ReadOnlyMemoryRegion<'pd, 'buf, T: Element>: region, domain);

// SAFETY: the region stands for a `&mut [T]`, whose elements are `Send`; libibverbs deregisters from
// any thread.
unsafe impl<T: Element> Send for BorrowedMemoryRegion<'_, '_, T> {}
// SAFETY: a shared reference gives out shared references to elements, which are `Sync`.
unsafe impl<T: Element> Sync for BorrowedMemoryRegion<'_, '_, T> {}
// SAFETY: the region stands for a `&[T]`, whose elements are `Sync`; libibverbs deregisters from any
// thread.
unsafe impl<T: Element> Send for ReadOnlyMemoryRegion<'_, '_, T> {}
// SAFETY: as above.
unsafe impl<T: Element> Sync for ReadOnlyMemoryRegion<'_, '_, T> {}

const VERB: &str = "ibv_reg_mr";

/// Registers a slice for local access.
///
/// # Safety
///
/// With local write access, the slice is borrowed exclusively. Requests name the memory only by
/// elements that are borrowed from the region (see the module).
unsafe fn register_slice<T: Element>(
    domain: &ProtectionDomain<'_>,
    data: *const T,
    len: usize,
    access: AccessFlags,
) -> Result<Handle<ffi::ibv_mr>> {
    check_local(VERB, access)?;
    if access.intersects(AccessFlags::ZERO_BASED | AccessFlags::HUGETLB) {
        let reason = "a slice is addressed by its own address, and its pages are unknown";
        return Err(Error::invalid(VERB, reason));
    }
    let bytes = len * size_of::<T>();
    if bytes == 0 {
        return Err(Error::invalid(VERB, "the region is empty"));
    }
    check_access(VERB, domain, access)?;
    let address = data.cast_mut().cast::<u8>();
    // SAFETY: the slice lives for as long as elements can be made from the region. Without local write
    // access the device does not write it.
    unsafe { register(VERB, domain, address, bytes, address as u64, access) }
}

region_accessors!(
    ['pd, 'buf, T: Element] BorrowedMemoryRegion<'pd, 'buf, T>, |this| this.region.as_ptr(), &this.domain
);
region_accessors!(
    ['pd, 'buf, T: Element] ReadOnlyMemoryRegion<'pd, 'buf, T>, |this| this.region.as_ptr(), &this.domain
);

impl<'pd, 'buf, T: Element> BorrowedMemoryRegion<'pd, 'buf, T> {
    /// `ibv_reg_mr`: registers a slice for local access. See
    /// [`with_access`](Self::with_access).
    ///
    /// # Errors
    ///
    /// Those of [`with_access`](Self::with_access).
    #[doc(alias = "ibv_reg_mr")]
    pub fn new(
        domain: impl Into<Parent<'pd, ProtectionDomain<'pd>>>,
        memory: &'buf mut [T],
    ) -> Result<Self> {
        Self::with_access(domain, memory, AccessFlags::LOCAL_WRITE)
    }

    /// `ibv_reg_mr`: registers a slice for local access, with on-demand paging or relaxed ordering
    /// if asked for. Local write access is always included.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the slice is empty, or longer than the device allows, or `access` includes access
    ///    for peers.
    ///  - `EOPNOTSUPP`: the device does not have that access.
    ///  - `ENOMEM`: no region left on the device, or `RLIMIT_MEMLOCK` is too low.
    #[doc(alias = "ibv_reg_mr")]
    pub fn with_access(
        domain: impl Into<Parent<'pd, ProtectionDomain<'pd>>>,
        memory: &'buf mut [T],
        access: AccessFlags,
    ) -> Result<Self> {
        let (domain, access) = (domain.into(), access | AccessFlags::LOCAL_WRITE);
        let (data, len) = (NonNull::from(&mut *memory).cast::<T>(), memory.len());
        // SAFETY: the slice is borrowed exclusively for `'buf`, which the region keeps.
        let region = unsafe { register_slice(&domain, data.as_ptr(), len, access) }?;
        Ok(Self { region, data, len, domain, memory: PhantomData })
    }

    /// `ibv_dereg_mr`: deregisters the region, and returns the error if that fails, which dropping
    /// cannot.
    ///
    /// # Errors
    ///
    /// The provider's errno value. The region is then
    /// [leaked](crate#when-a-resource-cannot-be-destroyed), with all that it was made from.
    #[doc(alias = "ibv_dereg_mr")]
    pub fn close(mut self) -> Result<()> {
        self.destroy()
    }

    /// The elements in `range`, with what a work request needs to name them.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds.
    #[inline]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<MemorySlice<'_, T>> {
        let range = resolve(range, self.len)?;
        // SAFETY: as in `deref`, but of these elements alone: a request may be using others.
        let data =
            unsafe { std::slice::from_raw_parts(self.data.add(range.start).as_ptr(), range.len()) };
        Ok(MemorySlice::new(data, self.lkey()))
    }

    /// The elements in `range`, exclusively, with what a work request needs to name them.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds.
    #[inline]
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> Result<MemorySliceMut<'_, T>> {
        let range = resolve(range, self.len)?;
        // SAFETY: as in `slice`, and the borrow is exclusive.
        unsafe {
            let data = NonNull::slice_from_raw_parts(self.data.add(range.start), range.len());
            Ok(MemorySliceMut::from_raw(data, self.lkey()))
        }
    }

    /// The elements in `range`, for a work request that reads them.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds, or longer than 4 GiB - 1 bytes.
    #[inline]
    pub fn gather_element(&self, range: impl RangeBounds<usize>) -> Result<GatherElement<'_>> {
        self.sge(range).map(GatherElement::new)
    }

    /// The elements in `range`, for a work request that writes them.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds, or longer than 4 GiB - 1 bytes.
    #[inline]
    pub fn scatter_element(
        &mut self,
        range: impl RangeBounds<usize>,
    ) -> Result<ScatterElement<'_>> {
        self.sge(range).map(ScatterElement::new)
    }
}

impl<T: Element> Deref for BorrowedMemoryRegion<'_, '_, T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: this is the slice that was borrowed for `'buf`. The device writes only elements that
        // were posted, and the caller of the post, or the element's exclusive borrow, keeps references
        // away from them.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.len) }
    }
}

impl<T: Element> DerefMut for BorrowedMemoryRegion<'_, '_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.data.as_ptr(), self.len) }
    }
}

impl<'pd, 'buf, T: Element> ReadOnlyMemoryRegion<'pd, 'buf, T> {
    /// `ibv_reg_mr`: registers a slice that requests only read. See
    /// [`with_access`](Self::with_access).
    ///
    /// # Errors
    ///
    /// Those of [`with_access`](Self::with_access).
    #[doc(alias = "ibv_reg_mr")]
    pub fn new(
        domain: impl Into<Parent<'pd, ProtectionDomain<'pd>>>,
        memory: &'buf [T],
    ) -> Result<Self> {
        Self::with_access(domain, memory, AccessFlags::empty())
    }

    /// `ibv_reg_mr`: registers a slice that requests only read, with on-demand paging or relaxed
    /// ordering.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the slice is empty, or longer than the device allows, or `access` includes writing
    ///    or access for peers.
    ///  - `EOPNOTSUPP`: the device does not have that access.
    ///  - `ENOMEM`: no region left on the device, or `RLIMIT_MEMLOCK` is too low.
    #[doc(alias = "ibv_reg_mr")]
    pub fn with_access(
        domain: impl Into<Parent<'pd, ProtectionDomain<'pd>>>,
        memory: &'buf [T],
        access: AccessFlags,
    ) -> Result<Self> {
        let domain = domain.into();
        if access.contains(AccessFlags::LOCAL_WRITE) {
            return Err(Error::invalid(
                VERB,
                "memory that is borrowed for reading cannot be written",
            ));
        }
        // SAFETY: the slice is borrowed for `'buf`, which the region keeps; the device gets no write
        // access.
        let region = unsafe { register_slice(&domain, memory.as_ptr(), memory.len(), access) }?;
        Ok(Self { region, data: memory, domain })
    }

    /// `ibv_dereg_mr`: deregisters the region, and returns the error if that fails, which dropping
    /// cannot.
    ///
    /// # Errors
    ///
    /// The provider's errno value. The region is then
    /// [leaked](crate#when-a-resource-cannot-be-destroyed), with all that it was made from.
    #[doc(alias = "ibv_dereg_mr")]
    pub fn close(mut self) -> Result<()> {
        self.destroy()
    }

    /// The elements in `range`, with what a work request needs to name them.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds.
    #[inline]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<MemorySlice<'_, T>> {
        MemorySlice::new(self.data, self.lkey()).slice(range)
    }

    /// The elements in `range`, for a work request that reads them.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds, or longer than 4 GiB - 1 bytes.
    #[inline]
    pub fn gather_element(&self, range: impl RangeBounds<usize>) -> Result<GatherElement<'_>> {
        self.slice(range)?.gather_element()
    }
}

impl<T: Element> Deref for ReadOnlyMemoryRegion<'_, '_, T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        self.data
    }
}

impl ProtectionDomain<'_> {
    /// `ibv_reg_mr`: registers a slice for local access, for as long as it is borrowed. See
    /// [`BorrowedMemoryRegion::new`].
    ///
    /// # Errors
    ///
    /// Those of [`BorrowedMemoryRegion::with_access`].
    #[doc(alias = "ibv_reg_mr")]
    pub fn register<'buf, T: Element>(
        &self,
        memory: &'buf mut [T],
    ) -> Result<BorrowedMemoryRegion<'_, 'buf, T>> {
        BorrowedMemoryRegion::new(self, memory)
    }

    /// `ibv_reg_mr`: registers a slice that requests only read, for as long as it is borrowed. See
    /// [`ReadOnlyMemoryRegion::new`].
    ///
    /// # Errors
    ///
    /// Those of [`ReadOnlyMemoryRegion::with_access`].
    #[doc(alias = "ibv_reg_mr")]
    pub fn register_read_only<'buf, T: Element>(
        &self,
        memory: &'buf [T],
    ) -> Result<ReadOnlyMemoryRegion<'_, 'buf, T>> {
        ReadOnlyMemoryRegion::new(self, memory)
    }
}

impl<T: Element> private::Sealed for BorrowedMemoryRegion<'_, '_, T> {}

impl<T: Element> LocalMemory for BorrowedMemoryRegion<'_, '_, T> {
    #[inline]
    fn sge(&self, range: impl RangeBounds<usize>) -> Result<ffi::ibv_sge> {
        let range = resolve(range, self.len)?;
        let address = self.data.as_ptr() as u64 + (range.start * size_of::<T>()) as u64;
        sge(address, range.len() * size_of::<T>(), self.lkey())
    }
}

impl<T: Element> LocalMemoryMut for BorrowedMemoryRegion<'_, '_, T> {}

impl<T: Element> private::Sealed for ReadOnlyMemoryRegion<'_, '_, T> {}

impl<T: Element> LocalMemory for ReadOnlyMemoryRegion<'_, '_, T> {
    #[inline]
    fn sge(&self, range: impl RangeBounds<usize>) -> Result<ffi::ibv_sge> {
        let range = resolve(range, self.data.len())?;
        let address = self.data.as_ptr() as u64 + (range.start * size_of::<T>()) as u64;
        sge(address, range.len() * size_of::<T>(), self.lkey())
    }
}

debug! {
    impl[T: Element] BorrowedMemoryRegion<'_, '_, T>, self,
    len: self.len, lkey: format_args!("{:#x}", self.lkey()), ..
}

debug! {
    impl[T: Element] ReadOnlyMemoryRegion<'_, '_, T>, self,
    len: self.data.len(), lkey: format_args!("{:#x}", self.lkey()), ..
}
