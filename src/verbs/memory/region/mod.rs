//! The common part of all regions.
//!
//! # Why regions for local access are safe
//!
//! If a region is forgotten, or its deregistration fails, the device still knows memory that has another owner.
//! That is harmless, because a device accesses memory only for a request that names it:
//!
//!  - Peers cannot name it: the region has no remote access, and no window can be bound to it.
//!  - Requests of this program name it by elements borrowed from the region. The code that posts keeps the memory
//!    alive until the completion, and after the borrow no element can be made.
//!
//! The cost is pinned memory, and a protection domain that cannot be deallocated.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut, RangeBounds};
use std::ptr::NonNull;
use std::{fmt, ptr};

use crate::base::{Error, Handle, Leak, Result, ffi, getters};
use crate::verbs::domain::{DomainRef, ProtectionDomain};
use crate::verbs::memory::options::AccessFlags;
use crate::verbs::memory::registration::{
    ReregisterError, ReregisteredState, Reregistration, reregister,
};
use crate::verbs::memory::remote_region::RemoteMemoryRegion;
use crate::verbs::memory::scatter_gather::{
    Element, GatherElement, LocalMemory, LocalMemoryMut, ScatterElement, private, resolve, sge,
    sge_at,
};
use crate::verbs::memory::slice::{MemorySlice, MemorySliceMut};

/// `struct ibv_mr`: registered memory of the kind `M`. Each kind has a name and a page of its own.
///
/// | name | memory | who accesses it | has |
/// |---|---|---|---|
/// | [`MemoryRegion`](crate::MemoryRegion) | allocated here, owned | this program and its device | `[T]` |
/// | [`SharedMemoryRegion`](crate::SharedMemoryRegion) | allocated here, owned | peers too | copies, atomics, a remote key |
/// | [`BorrowedMemoryRegion`](crate::memory::BorrowedMemoryRegion) | a `&mut [T]` of the caller | this program and its device | `[T]` |
/// | [`ReadOnlyMemoryRegion`](crate::memory::ReadOnlyMemoryRegion) | a `&[T]` of the caller | its device, to read | `[T]`, not mutable |
/// | [`RawMemoryRegion`](crate::memory::RawMemoryRegion) | mapped files, GPUs, dma-bufs, other processes; or allocated by the provider | as its access flags say | a pointer, a remote key |
/// | [`DeviceMemoryRegion`](crate::memory::DeviceMemoryRegion) | on the device itself | peers and the device, without the bus | a remote key |
/// | [`ImplicitMemoryRegion`](crate::memory::ImplicitMemoryRegion) | the whole address space, paged on demand | this program and its device | slices of any memory |
/// | [`NullMemoryRegion`](crate::memory::NullMemoryRegion) | none: discards writes, reads as zeros | this program's requests | elements of any length |
///
/// The methods are bounded by properties of the kinds:
///
/// | bound | kinds |
/// |---|---|
/// | `Addressed`: it has a length, and requests name its parts | all but `Implicit` and `Null` |
/// | `InMemory`: it is `Addressed`, by addresses of this program | also not `OnDevice` |
/// | `Local`: only this program and its device access it, so it derefs to `[T]` | `Owned`, `Borrowed`, `ReadOnly` |
/// | `Writable`: it is `Addressed`, and requests of this program write it | not `ReadOnly` |
/// | `Peers`: peers access it by a remote key | `Shared`, `Raw`, `OnDevice` |
/// | `Allocated`: it was allocated with the region | `Owned`, `Shared` |
#[doc(alias = "ibv_mr")]
pub struct Region<'pd, M: Backing> {
    raw: Handle<ffi::ibv_mr>,
    /// Null if there is none, or it is unknown.
    address: *mut u8,
    len: usize,
    /// The address by which requests name the first byte.
    base: u64,
    access: AccessFlags,
    /// Dropped once the device no longer knows it; else leaked.
    memory: ManuallyDrop<M>,
    domain: DomainRef<'pd>,
}

/// The memory that a region is made of.
pub trait Backing {
    type Item;

    const NAME: &'static str;

    /// Leaks what it was made from.
    fn leak(&self) {}
}

/// Memory that has a length, and whose parts requests name.
pub trait Addressed: Backing<Item: Element> {
    /// Whether requests may name it by an iova that is not its address.
    const HAS_IOVA: bool = false;
}

/// Memory that requests name by its address in this program.
pub trait InMemory: Addressed {
    /// Whether this program can read it.
    fn is_in_reach(&self) -> bool {
        true
    }
}

/// Memory that only this program and its own device access.
///
/// # Safety
///
/// The region has the address of `len` initialised elements, which are borrowed or owned while the region
/// lives, exclusively if it is [`Writable`]; peers have no access.
pub unsafe trait Local: InMemory {}

/// Memory that requests of this program write.
pub trait Writable: Addressed {
    #[inline]
    fn check_write(&self, _access: AccessFlags) -> Result<()> {
        Ok(())
    }
}

/// Memory that peers access by a remote key.
#[diagnostic::on_unimplemented(
    message = "peers cannot access this region: it is private to this program",
    label = "a region for peers is needed here: `domain.allocate_shared(len, access)`",
    note = "a `SharedMemoryRegion` has `remote()`, which a peer needs to read or write it"
)]
pub trait Peers: Writable {}

pub(super) struct Parts {
    pub(super) raw: Handle<ffi::ibv_mr>,
    pub(super) address: *mut u8,
    pub(super) len: usize,
    pub(super) base: u64,
    pub(super) access: AccessFlags,
}

impl Parts {
    /// Requests name it by its address in this program.
    pub(super) fn by_address(
        raw: Handle<ffi::ibv_mr>,
        address: *mut u8,
        len: usize,
        access: AccessFlags,
    ) -> Self {
        Self { raw, address, len, base: address as u64, access }
    }

    pub(super) fn whole(raw: Handle<ffi::ibv_mr>, access: AccessFlags) -> Self {
        Self::by_address(raw, ptr::null_mut(), 0, access)
    }
}

impl<M: Backing> Drop for Region<'_, M> {
    fn drop(&mut self) {
        let _ = self.destroy();
    }
}

impl<M: Backing> Leak for Region<'_, M> {
    fn leak(&self) {
        self.raw.leak();
        self.memory.leak();
        self.domain.leak();
    }
}

// SAFETY: libibverbs allows all verbs on a region from any thread. `M` says whether others may follow the
// address.
unsafe impl<M: Backing + Send> Send for Region<'_, M> {}
// SAFETY: as above.
unsafe impl<M: Backing + Sync> Sync for Region<'_, M> {}

impl<'pd, M: Backing> Region<'pd, M> {
    pub(super) fn from_parts(parts: Parts, memory: M, domain: DomainRef<'pd>) -> Self {
        let Parts { raw, address, len, base, access } = parts;
        Self { raw, address, len, base, access, memory: ManuallyDrop::new(memory), domain }
    }

    /// Leaks the memory on failure. Does nothing if that was done.
    fn destroy(&mut self) -> Result<()> {
        if self.raw.is_gone() {
            return Ok(());
        }
        self.deregister()?;
        // SAFETY: the device no longer knows the memory, and nothing borrows it. This runs once: the handle is
        // gone afterwards.
        unsafe { ManuallyDrop::drop(&mut self.memory) };
        Ok(())
    }

    /// On failure, leaks what it was made from.
    fn deregister(&mut self) -> Result<()> {
        self.raw.destroy().inspect_err(|_| {
            self.memory.leak();
            self.domain.leak();
        })
    }

    /// Leaks the memory on failure.
    pub(super) fn into_memory(mut self) -> Result<M> {
        self.deregister()?;
        // SAFETY: taken once: the handle is gone now, so `drop` does nothing.
        Ok(unsafe { ManuallyDrop::take(&mut self.memory) })
    }

    /// `ibv_dereg_mr`: deregisters the region and frees what it owns. Unlike a drop, it returns the error.
    ///
    /// # Errors
    ///
    /// The provider's errno. The region is then
    /// [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with its memory and all that it was
    /// made from, and the device may still access the memory.
    ///
    ///  - `EBUSY`, `EINVAL`: a memory window is bound to it.
    #[doc(alias = "ibv_dereg_mr")]
    pub fn close(mut self) -> Result<()> {
        self.destroy()
    }

    /// The key by which this program's work requests name the region.
    #[inline]
    pub fn lkey(&self) -> u32 {
        // SAFETY: the region is live.
        unsafe { (*self.as_raw()).lkey }
    }

    getters! { self,
        /// The access that it was registered with.
        access: AccessFlags => self.access;

        /// The domain that it is registered in.
        protection_domain: &ProtectionDomain<'pd> => &self.domain;

        /// The C object, valid while the region is.
        #[inline]
        as_raw: *mut ffi::ibv_mr => self.raw.as_ptr();
    }

    pub(super) fn memory(&self) -> &M {
        &self.memory
    }

    pub(super) fn address(&self) -> *mut u8 {
        self.address
    }

    pub(super) fn base(&self) -> u64 {
        self.base
    }

    /// Makes an imported region ours to deregister.
    pub(super) fn own_raw(&mut self) {
        self.raw.own();
    }

    /// `memory` is the address and the element count of other memory.
    ///
    /// # Safety
    ///
    /// That of [`reregister`].
    pub(super) unsafe fn reregister(
        &mut self,
        change: Reregistration<'pd>,
        memory: Option<(*mut u8, usize)>,
    ) -> Result<(), ReregisterError> {
        let Self { raw, domain, access, .. } = self;
        // SAFETY: the caller vouches for the memory.
        let result = unsafe { reregister(raw, domain, access, change, memory) };
        let changed = !matches!(result, Err(e) if e.state != ReregisteredState::Changed);
        if let (true, Some((address, len))) = (changed, memory) {
            (self.address, self.len, self.base) = (address, len, address as u64);
        }
        result
    }
}

impl<M: Addressed> Region<'_, M> {
    /// The number of elements; of bytes, if its elements have no type.
    #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// By the address that requests use, whatever that is.
    #[inline]
    fn sge_by_iova(&self, range: impl RangeBounds<usize>) -> Result<ffi::ibv_sge> {
        let range = resolve(range, self.len)?;
        let address = self.base + (range.start * size_of::<M::Item>()) as u64;
        sge(address, range.len() * size_of::<M::Item>(), self.lkey())
    }
}

impl<M: InMemory> Region<'_, M> {
    /// Its address is this program's own, though perhaps nothing can be read there.
    #[inline]
    pub(super) fn sge_of_range(&self, range: impl RangeBounds<usize>) -> Result<ffi::ibv_sge> {
        if self.memory.is_in_reach() { self.sge(range) } else { self.sge_by_iova(range) }
    }

    /// The elements in `range`, for a work request that reads them.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds, or longer than 4 GiB - 1 bytes; or requests do not address the
    ///    region by its own address: it has another [iova](crate::RegionOptions::iova), is a dma-buf, or is
    ///    imported. See [`gather_element_by_iova`](Self::gather_element_by_iova).
    #[inline]
    pub fn gather_element(&self, range: impl RangeBounds<usize>) -> Result<GatherElement<'_>> {
        self.sge(range).map(GatherElement::new)
    }
}

impl<M: Backing> private::Sealed for Region<'_, M> {}

// Without this, the compiler's message would be about the kind of memory.
#[diagnostic::do_not_recommend]
impl<M: Addressed> LocalMemory for Region<'_, M> {
    #[inline]
    fn sge(&self, range: impl RangeBounds<usize>) -> Result<ffi::ibv_sge> {
        if !M::HAS_IOVA {
            return self.sge_by_iova(range);
        }
        let range = resolve(range, self.len)?;
        let offset = (range.start * size_of::<M::Item>()) as u64;
        // Null means an unknown address, which must differ from every base, even 0.
        let own = if self.address.is_null() { !self.base } else { self.address as u64 };
        let (address, iova) = (own.wrapping_add(offset), self.base + offset);
        sge_at(address, iova, range.len() * size_of::<M::Item>(), self.lkey())
    }
}

#[diagnostic::do_not_recommend]
impl<M: Writable> LocalMemoryMut for Region<'_, M> {
    #[inline]
    fn sge_mut(&self, range: impl RangeBounds<usize>) -> Result<ffi::ibv_sge> {
        self.memory.check_write(self.access)?;
        self.sge(range)
    }
}

impl<M: Local> Region<'_, M> {
    /// The elements in `range`, with the region's key, for a work request.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds.
    #[inline]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Result<MemorySlice<'_, M::Item>> {
        let range = resolve(range, self.len)?;
        // SAFETY: as in `deref`, but of these elements alone: a request may be using others.
        let data = unsafe {
            let first = self.address.cast::<M::Item>().add(range.start);
            std::slice::from_raw_parts(first, range.len())
        };
        Ok(MemorySlice::new(data, self.lkey()))
    }
}

impl<M: Local + Writable> Region<'_, M> {
    /// The elements in `range`, exclusively, with the region's key.
    ///
    /// It borrows the whole region: for two at once, [split](crate::memory::MemorySliceMut::split_at) one, or use
    /// [`slices_mut`](Self::slices_mut).
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds.
    #[inline]
    pub fn slice_mut(
        &mut self,
        range: impl RangeBounds<usize>,
    ) -> Result<MemorySliceMut<'_, M::Item>> {
        let range = resolve(range, self.len)?;
        // SAFETY: as in `slice`, and the borrow is exclusive.
        unsafe {
            let first = NonNull::new_unchecked(self.address.cast::<M::Item>().add(range.start));
            let data = NonNull::slice_from_raw_parts(first, range.len());
            Ok(MemorySliceMut::from_raw(data, self.lkey()))
        }
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

impl<M: Local> Deref for Region<'_, M> {
    type Target = [M::Item];

    #[inline]
    fn deref(&self) -> &[M::Item] {
        // SAFETY: that many initialised elements exist (`Local`), and any bytes are valid. The device writes only
        // elements that were posted; the caller of the post, or the element's exclusive borrow, keeps references
        // away. Peers have no access.
        unsafe { std::slice::from_raw_parts(self.address.cast(), self.len) }
    }
}

impl<M: Local + Writable> DerefMut for Region<'_, M> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [M::Item] {
        // SAFETY: as in `deref`, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.address.cast(), self.len) }
    }
}

/// Providers that copy short messages to their destination themselves do not check it.
#[inline]
pub(super) fn check_writable(access: AccessFlags) -> Result<()> {
    if access.contains(AccessFlags::LOCAL_WRITE) { Ok(()) } else { Err(read_only()) }
}

#[cold]
fn read_only() -> Error {
    Error::invalid(
        "ibv_sge",
        "the region was registered without LOCAL_WRITE: the device only reads it",
    )
}

// Without the keys: a log must not give its readers access to the memory. On most devices the lkey is the rkey.
impl<M: Backing> fmt::Debug for Region<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(M::NAME)
            .field("base", &format_args!("{:#x}", self.base))
            .field("len", &self.len)
            .field("access", &self.access)
            .finish_non_exhaustive()
    }
}

impl<M: Backing> Region<'_, M> {
    /// The key by which peers name the region.
    ///
    /// It lets a peer that has a connection into this protection domain do what the region's access flags
    /// allow.
    #[inline]
    pub fn rkey(&self) -> u32
    where
        M: Peers,
    {
        // SAFETY: the region is live.
        unsafe { (*self.as_raw()).rkey }
    }

    /// The kernel's number of the region, by which a process that shares the device's file descriptor
    /// [imports](crate::memory::RawMemoryRegion::import) it.
    pub fn handle(&self) -> u32
    where
        M: Peers,
    {
        // SAFETY: the region is live.
        unsafe { (*self.as_raw()).handle }
    }

    /// The address, length and key that a peer needs to access the region.
    pub fn remote(&self) -> RemoteMemoryRegion
    where
        M: Peers,
    {
        let length = (self.len * size_of::<M::Item>()) as u64;
        RemoteMemoryRegion { address: self.base, length, rkey: self.rkey() }
    }

    /// [`remote`](Self::remote), of the elements in `range` alone.
    ///
    /// The key opens the whole region: only an honest peer keeps to the range. A
    /// [`MemoryWindow`](crate::memory::MemoryWindow) confines a peer.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds.
    pub fn remote_range(&self, range: impl RangeBounds<usize>) -> Result<RemoteMemoryRegion>
    where
        M: Peers,
    {
        let range = resolve(range, self.len)?;
        let of = |elements: usize| (elements * size_of::<M::Item>()) as u64;
        self.remote().sub_region(of(range.start), of(range.len()))
    }
}

impl<M: Peers> Region<'_, M> {
    /// [`gather_element`](Self::gather_element), whatever address requests use for the region.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds, or longer than 4 GiB - 1 bytes.
    ///
    /// # Safety
    ///
    /// Unless requests use the region's own address, the request does not carry its data inline: the provider
    /// would read the data at the iova, as an address of this program.
    #[inline]
    pub unsafe fn gather_element_by_iova(
        &self,
        range: impl RangeBounds<usize>,
    ) -> Result<GatherElement<'_>> {
        self.sge_by_iova(range).map(GatherElement::new)
    }

    /// The elements in `range`, for a work request that writes them, whatever address requests use for the
    /// region.
    ///
    /// Any number of requests may write the same bytes; their contents are then unspecified.
    ///
    /// # Errors
    ///
    /// Those of [`gather_element_by_iova`](Self::gather_element_by_iova), and:
    ///
    ///  - `EINVAL`: the region was registered without [`LOCAL_WRITE`](crate::AccessFlags::LOCAL_WRITE).
    ///
    /// # Safety
    ///
    /// Unless requests use the region's own address, the provider does not itself copy short messages, or the
    /// results of reads and atomics, to their destination: it would write to the iova, as an address of this
    /// program. mlx5 does copy unless the environment variable `MLX5_SCATTER_TO_CQE` is 0, and so may hns.
    #[inline]
    pub unsafe fn scatter_element_by_iova(
        &self,
        range: impl RangeBounds<usize>,
    ) -> Result<ScatterElement<'_>> {
        check_writable(self.access)?;
        self.sge_by_iova(range).map(ScatterElement::new)
    }
}
