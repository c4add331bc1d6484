//! Registered memory that peers access too.

use std::ops::RangeBounds;

use super::access::AccessFlags;
use super::accessors::{region_accessors, shared_region_accessors};
use super::atomic_element::AtomicElement;
use super::options::RegionOptions;
use super::owned_buffer::RegisteredBuffer;
use super::region_buffer::RegionBuffer;
use super::registration::{ReregisterError, Reregistration};
use super::remote_region::RemoteMemoryRegion;
use super::scatter_gather::private;
use super::scatter_gather::{Element, GatherElement, LocalMemory, LocalMemoryMut, ScatterElement};
use super::shared_slice::SharedMemorySlice;
use crate::debug::debug;
use crate::domain::ProtectionDomain;
use crate::error::Result;
use crate::ffi;
use crate::handle::Leak;
use crate::parent::Parent;

/// `struct ibv_mr`: registered memory for `len` elements, which it owns and which peers read or write
/// by RDMA, as far as its [`AccessFlags`] allow.
///
/// A peer may write at any time, so there is never a reference into it: [`read`](Self::read) and
/// [`write`](Self::write) copy. [`SharedMemorySlice`], which is a part of a region, explains what they
/// see of a concurrent write.
///
/// ```
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// use ibverbs::AccessFlags;
///
/// # let context = ibverbs::open("rxe0")?;
/// let domain = context.alloc_pd()?;
/// let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
/// let region = domain.allocate_shared::<u64>(1024, access)?;
/// region.write(0, &[1, 2, 3])?;
/// let for_the_peer = region.remote_range(..3)?;
/// # Ok::<(), ibverbs::Error>(())
/// ```
#[doc(alias = "ibv_mr")]
pub struct SharedMemoryRegion<'pd, T: Element> {
    buffer: RegisteredBuffer<'pd, T>,
}

impl<T: Element> Leak for SharedMemoryRegion<'_, T> {
    fn leak(&self) {
        self.buffer.leak();
    }
}

region_accessors!(['pd, T: Element] SharedMemoryRegion<'pd, T>, |this| this.buffer.as_raw(), this.buffer.domain());
shared_region_accessors!(['pd, T: Element] SharedMemoryRegion<'pd, T>);

impl<'pd, T: Element> SharedMemoryRegion<'pd, T> {
    /// `ibv_reg_mr`: allocates `len` zeroed elements and registers them as `options` say; plain
    /// [`AccessFlags`] are accepted too.
    ///
    /// Local write access, which remote write and remote atomic access require, is always included. The
    /// buffer is aligned to 64 bytes, or more if `T` is. A region can have 4 GiB and more; only a
    /// single scatter/gather element cannot.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the region would be empty, or longer than memory or the device allow, or the
    ///    options contradict each other.
    ///  - `EOPNOTSUPP`: the device does not have that access, or the machine does not have such huge
    ///    pages.
    ///  - `ENOMEM`: no memory, not enough huge pages set aside, no region left on the device, or
    ///    `RLIMIT_MEMLOCK` is too low.
    #[doc(alias = "ibv_reg_mr")]
    #[doc(alias = "ibv_reg_mr_iova")]
    #[doc(alias = "ibv_reg_mr_iova2")]
    pub fn new(
        domain: impl Into<Parent<'pd, ProtectionDomain<'pd>>>,
        len: usize,
        options: impl Into<RegionOptions>,
    ) -> Result<Self> {
        Ok(Self { buffer: RegisteredBuffer::new(domain.into(), len, options.into())? })
    }

    /// `ibv_dereg_mr`: deregisters the region and frees its buffer, and returns the error if that
    /// fails, which dropping cannot.
    ///
    /// # Errors
    ///
    /// The region is then [leaked](crate#when-a-resource-cannot-be-destroyed), with its buffer and all that
    /// it was made from.
    ///
    ///  - `EBUSY`, `EINVAL`: a memory window is bound to it.
    #[doc(alias = "ibv_dereg_mr")]
    pub fn close(self) -> Result<()> {
        self.buffer.close()
    }

    /// `ibv_dereg_mr`: deregisters the region and returns its memory, without a copy. No peer can reach it any
    /// more, so it is plain memory.
    ///
    /// # Errors
    ///
    /// Those of [`close`](Self::close).
    #[doc(alias = "ibv_dereg_mr")]
    pub fn into_inner(self) -> Result<RegionBuffer<T>> {
        self.buffer.into_inner()
    }

    /// `ibv_rereg_mr`: changes the region's access, its protection domain, or both; its contents stay.
    /// This may change both keys. The region always keeps local write access.
    ///
    /// No request that names the region may be outstanding, and no memory window bound to it.
    ///
    /// # Errors
    ///
    /// [`ReregisterError::state`] tells which state the region is in.
    ///
    ///  - `EINVAL`: `change` is empty, or is not possible: the domain is of another context, the access
    ///    flags contradict each other, or a window is bound to the region.
    ///  - `EOPNOTSUPP`: the device cannot do that.
    #[doc(alias = "ibv_rereg_mr")]
    pub fn rereg(&mut self, mut change: Reregistration<'pd>) -> Result<(), ReregisterError> {
        change.access = change.access.map(|access| access | AccessFlags::LOCAL_WRITE);
        self.buffer.rereg(change)
    }

    /// The number of elements.
    #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
    #[inline]
    pub fn len(&self) -> usize {
        self.buffer.len()
    }

    /// The whole region as a slice.
    #[inline]
    pub fn as_slice(&self) -> SharedMemorySlice<'_, T> {
        let buffer = &self.buffer;
        let (lkey, rkey) = (self.lkey(), self.rkey());
        // SAFETY: the buffer holds that many elements, initialised (zeroed, and any bytes are valid
        // for an `Element`), at least aligned to 64 bytes, for as long as the region is borrowed.
        // Nothing but the slice accesses them.
        unsafe { SharedMemorySlice::new(buffer.data(), buffer.len(), buffer.base(), lkey, rkey) }
    }

    /// The elements in `range`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds.
    #[inline]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<SharedMemorySlice<'_, T>> {
        self.as_slice().slice(range)
    }

    /// Copies the elements from `index` on to `to`. See [`SharedMemorySlice`].
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the region ends before that many elements.
    #[inline]
    pub fn read(&self, index: usize, to: &mut [T]) -> Result<()> {
        self.as_slice().read(index, to)
    }

    /// Copies the element at `index`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `index` is out of bounds.
    #[inline]
    pub fn read_one(&self, index: usize) -> Result<T> {
        self.as_slice().read_one(index)
    }

    /// Copies all elements.
    pub fn to_vec(&self) -> Vec<T> {
        self.as_slice().to_vec()
    }

    /// Copies `from` to the elements from `index` on. See [`SharedMemorySlice`].
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the region ends before that many elements.
    #[inline]
    pub fn write(&self, index: usize, from: &[T]) -> Result<()> {
        self.as_slice().write(index, from)
    }

    /// Writes the element at `index`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `index` is out of bounds.
    #[inline]
    pub fn write_one(&self, index: usize, value: T) -> Result<()> {
        self.as_slice().write_one(index, value)
    }

    /// Writes `value` to all elements.
    pub fn fill(&self, value: T) {
        self.as_slice().fill(value);
    }

    /// Sets all bytes to zero.
    pub fn zero(&self) {
        self.as_slice().zero();
    }

    /// The elements in `range`, for a work request that reads them.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds, or longer than 4 GiB - 1 bytes, or the region has an
    ///    [`iova`](RegionOptions::iova) of its own.
    #[inline]
    pub fn gather_element(&self, range: impl RangeBounds<usize>) -> Result<GatherElement<'_>> {
        self.sge(range).map(GatherElement::new)
    }

    /// The elements in `range`, for a work request that writes them.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds, or longer than 4 GiB - 1 bytes, or the region has an
    ///    [`iova`](RegionOptions::iova) of its own.
    #[inline]
    pub fn scatter_element(&self, range: impl RangeBounds<usize>) -> Result<ScatterElement<'_>> {
        self.sge(range).map(ScatterElement::new)
    }

    /// The address, length and key that a peer needs to access the region: send them over.
    pub fn remote(&self) -> RemoteMemoryRegion {
        self.as_slice().remote()
    }

    /// The address, length and key that a peer needs to access the elements in `range`.
    ///
    /// Only an honest peer keeps to that range; the key opens the whole region. To confine a peer to
    /// the range, use a [`MemoryWindow`](crate::MemoryWindow).
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds.
    pub fn remote_range(&self, range: impl RangeBounds<usize>) -> Result<RemoteMemoryRegion> {
        Ok(self.slice(range)?.remote())
    }

    /// The access that it was registered with.
    pub fn access(&self) -> AccessFlags {
        self.buffer.access()
    }
}

impl<T: AtomicElement> SharedMemoryRegion<'_, T> {
    /// The element at `index`, for atomic operations of the CPU. See [`SharedMemorySlice::atomic`].
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `index` is out of bounds.
    #[inline]
    pub fn atomic(&self, index: usize) -> Result<&T::Atomic> {
        self.as_slice().atomic(index)
    }

    /// All elements, for atomic operations of the CPU.
    #[inline]
    pub fn atomics(&self) -> &[T::Atomic] {
        self.as_slice().atomics()
    }
}

impl ProtectionDomain<'_> {
    /// `ibv_reg_mr`: allocates `len` zeroed elements that peers access too, as far as `options` let
    /// them: [`AccessFlags`](crate::AccessFlags) or [`RegionOptions`]. See
    /// [`SharedMemoryRegion::new`].
    ///
    /// # Errors
    ///
    /// Those of [`SharedMemoryRegion::new`].
    #[doc(alias = "ibv_reg_mr")]
    pub fn allocate_shared<T: Element>(
        &self,
        len: usize,
        options: impl Into<RegionOptions>,
    ) -> Result<SharedMemoryRegion<'_, T>> {
        SharedMemoryRegion::new(self, len, options)
    }
}

impl<T: Element> private::Sealed for SharedMemoryRegion<'_, T> {}

impl<T: Element> LocalMemoryMut for SharedMemoryRegion<'_, T> {}

impl<T: Element> LocalMemory for SharedMemoryRegion<'_, T> {
    #[inline]
    fn sge(&self, range: impl RangeBounds<usize>) -> Result<ffi::ibv_sge> {
        self.as_slice().sge(range)
    }
}

// Without the keys (on most devices the local one is the same number): a log must not give its
// readers access to the memory.
debug! {
    impl[T: Element] SharedMemoryRegion<'_, T>, self,
    len: self.buffer.len(), access: self.access(), ..
}
