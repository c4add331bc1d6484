//! Registered memory that only this program accesses.

use std::ops::{Deref, DerefMut, RangeBounds};
use std::ptr::NonNull;

use super::access::AccessFlags;
use super::accessors::region_accessors;
use super::options::RegionOptions;
use super::options::check_local;
use super::owned_buffer::RegisteredBuffer;
use super::region_buffer::RegionBuffer;
use super::registration::{ReregisterError, Reregistration};
use super::scatter_gather::{Element, GatherElement, LocalMemory, LocalMemoryMut, ScatterElement};
use super::scatter_gather::{private, resolve, sge};
use super::slice::{MemorySlice, MemorySliceMut};
use crate::debug::debug;
use crate::domain::ProtectionDomain;
use crate::error::Result;
use crate::ffi;
use crate::parent::Parent;

/// `struct ibv_mr`: registered memory for `len` elements, which it owns and which only this program and
/// its own device access.
///
/// It derefs to `[T]`, so use it like a vector of fixed length. A peer can exchange messages with it,
/// but cannot read or write it by RDMA: for that, use
/// [`SharedMemoryRegion`](crate::SharedMemoryRegion).
///
/// ```
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// # let context = ibverbs::open("rxe0")?;
/// let domain = context.alloc_pd()?;
/// let mut region = domain.allocate::<u64>(1024)?;
/// region[0] = 17;
/// assert_eq!(region.iter().sum::<u64>(), 17);
/// # Ok::<(), ibverbs::Error>(())
/// ```
#[doc(alias = "ibv_mr")]
pub struct MemoryRegion<'pd, T: Element> {
    buffer: RegisteredBuffer<'pd, T>,
}

region_accessors!(['pd, T: Element] MemoryRegion<'pd, T>, |this| this.buffer.as_raw(), this.buffer.domain());

impl<'pd, T: Element> MemoryRegion<'pd, T> {
    /// `ibv_reg_mr`: allocates `len` zeroed elements and registers them for local access.
    ///
    /// The buffer is aligned to 64 bytes, or more if `T` is. A region can have 4 GiB and more; only a
    /// single scatter/gather element cannot.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the region would be empty, or longer than memory or the device allow.
    ///  - `ENOMEM`: no memory, no region left on the device, or `RLIMIT_MEMLOCK` is too low.
    #[doc(alias = "ibv_reg_mr")]
    pub fn new(domain: impl Into<Parent<'pd, ProtectionDomain<'pd>>>, len: usize) -> Result<Self> {
        Self::with_options(domain, len, RegionOptions::new())
    }

    /// `ibv_reg_mr`: allocates `len` zeroed elements and registers them as `options` say: huge pages,
    /// on-demand paging, relaxed ordering ..
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the region would be empty, or longer than memory or the device allow; or the
    ///    options contradict each other, or ask for remote access, memory windows or an iova, which
    ///    need a [`SharedMemoryRegion`](crate::SharedMemoryRegion).
    ///  - `EOPNOTSUPP`: the device does not have that access, or the machine does not have such huge
    ///    pages.
    ///  - `ENOMEM`: no memory, not enough huge pages set aside, no region left on the device, or
    ///    `RLIMIT_MEMLOCK` is too low.
    #[doc(alias = "ibv_reg_mr")]
    pub fn with_options(
        domain: impl Into<Parent<'pd, ProtectionDomain<'pd>>>,
        len: usize,
        options: RegionOptions,
    ) -> Result<Self> {
        let options = options.local("ibv_reg_mr")?;
        Ok(Self { buffer: RegisteredBuffer::new(domain.into(), len, options)? })
    }

    /// `ibv_dereg_mr`: deregisters the region and frees its buffer, and returns the error if that
    /// fails, which dropping cannot.
    ///
    /// # Errors
    ///
    /// The region is then [leaked](crate#when-a-resource-cannot-be-destroyed), with its buffer and all that
    /// it was made from.
    ///
    ///  - `EBUSY`: a memory window is bound to it.
    #[doc(alias = "ibv_dereg_mr")]
    pub fn close(self) -> Result<()> {
        self.buffer.close()
    }

    /// `ibv_dereg_mr`: deregisters the region and returns its memory, without a copy.
    ///
    /// # Errors
    ///
    /// Those of [`close`](Self::close).
    #[doc(alias = "ibv_dereg_mr")]
    pub fn into_inner(self) -> Result<RegionBuffer<T>> {
        self.buffer.into_inner()
    }

    /// `ibv_rereg_mr`: changes the region's protection domain, or the local part of its access (relaxed
    /// ordering); its contents stay. This may change its key. The region always keeps local write
    /// access.
    ///
    /// No request that names the region may be outstanding.
    ///
    /// # Errors
    ///
    /// [`ReregisterError::state`] tells which state the region is in.
    ///
    ///  - `EINVAL`: `change` is empty, or is not possible: the domain is of another context, or the
    ///    access includes access for peers.
    ///  - `EOPNOTSUPP`: the device cannot do that.
    #[doc(alias = "ibv_rereg_mr")]
    pub fn rereg(&mut self, mut change: Reregistration<'pd>) -> Result<(), ReregisterError> {
        if let Some(access) = &mut change.access {
            check_local("ibv_rereg_mr", *access).map_err(ReregisterError::unchanged)?;
            *access |= AccessFlags::LOCAL_WRITE;
        }
        self.buffer.rereg(change)
    }

    /// The elements in `range`, with what a work request needs to name them.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds.
    #[inline]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<MemorySlice<'_, T>> {
        let range = resolve(range, self.buffer.len())?;
        // SAFETY: as in `deref`, but of these elements alone: a request may be using others.
        let data = unsafe {
            std::slice::from_raw_parts(self.buffer.data().add(range.start).as_ptr(), range.len())
        };
        Ok(MemorySlice::new(data, self.lkey()))
    }

    /// The elements in `range`, exclusively, with what a work request needs to name them.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds.
    #[inline]
    pub fn slice_mut(&mut self, range: impl RangeBounds<usize>) -> Result<MemorySliceMut<'_, T>> {
        let range = resolve(range, self.buffer.len())?;
        // SAFETY: as in `slice`, and the borrow is exclusive.
        unsafe {
            let data = self.buffer.data().add(range.start);
            let data = NonNull::slice_from_raw_parts(data, range.len());
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

    /// The access that it was registered with.
    pub fn access(&self) -> AccessFlags {
        self.buffer.access()
    }
}

impl<T: Element> Deref for MemoryRegion<'_, T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: the buffer holds `len` elements, initialised (zeroed, and any bytes are valid for an
        // `Element`). The device writes only elements that were posted, and the caller of the post, or
        // the element's exclusive borrow, keeps references away from them; peers have no access.
        unsafe { std::slice::from_raw_parts(self.buffer.data().as_ptr(), self.buffer.len()) }
    }
}

impl<T: Element> DerefMut for MemoryRegion<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.buffer.data().as_ptr(), self.buffer.len()) }
    }
}

impl ProtectionDomain<'_> {
    /// `ibv_reg_mr`: allocates `len` zeroed elements that only this program accesses. See
    /// [`MemoryRegion::new`].
    ///
    /// # Errors
    ///
    /// Those of [`MemoryRegion::new`].
    #[doc(alias = "ibv_reg_mr")]
    pub fn allocate<T: Element>(&self, len: usize) -> Result<MemoryRegion<'_, T>> {
        MemoryRegion::new(self, len)
    }

    /// `ibv_reg_mr`: allocates `len` zeroed elements that only this program accesses, as `options`
    /// say. See [`MemoryRegion::with_options`].
    ///
    /// # Errors
    ///
    /// Those of [`MemoryRegion::with_options`].
    #[doc(alias = "ibv_reg_mr")]
    pub fn allocate_with<T: Element>(
        &self,
        len: usize,
        options: RegionOptions,
    ) -> Result<MemoryRegion<'_, T>> {
        MemoryRegion::with_options(self, len, options)
    }
}

impl<T: Element> private::Sealed for MemoryRegion<'_, T> {}

impl<T: Element> LocalMemoryMut for MemoryRegion<'_, T> {}

impl<T: Element> LocalMemory for MemoryRegion<'_, T> {
    #[inline]
    fn sge(&self, range: impl RangeBounds<usize>) -> Result<ffi::ibv_sge> {
        let range = resolve(range, self.buffer.len())?;
        let address = self.buffer.data().as_ptr() as u64 + (range.start * size_of::<T>()) as u64;
        sge(address, range.len() * size_of::<T>(), self.lkey())
    }
}

debug! {
    impl[T: Element] MemoryRegion<'_, T>, self,
    len: self.buffer.len(), lkey: format_args!("{:#x}", self.lkey()), ..
}
