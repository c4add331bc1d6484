use std::marker::PhantomData;
use std::ptr;

use super::allocation::page_size;
use super::options::{AccessFlags, RegionOptions, check_access, check_iova, check_local};
use super::region::{Addressed, Backing, InMemory, Local, Parts, Region, Writable};
use super::region_buffer::RegionBuffer;
use super::registration::{ReregisterError, Reregistration, register};
use super::scatter_gather::Element;
use crate::base::{Error, Result};
use crate::verbs::domain::{DomainRef, ProtectionDomain};

const VERB: &str = "ibv_reg_mr";

/// `struct ibv_mr`: registered memory for `len` elements, owned, which only this program and its device access.
///
/// It derefs to `[T]`: use it like a vector of fixed length. Peers exchange messages with it; for RDMA reads
/// and writes by peers, use [`SharedMemoryRegion`](crate::SharedMemoryRegion).
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
pub type MemoryRegion<'pd, T> = Region<'pd, Owned<T>>;

/// Memory that the region owns.
#[derive(Debug)]
pub struct Owned<T>(RegionBuffer<T>);

impl<T: Element> Backing for Owned<T> {
    type Item = T;

    const NAME: &'static str = "MemoryRegion";
}

impl<T: Element> Addressed for Owned<T> {}
impl<T: Element> InMemory for Owned<T> {}
impl<T: Element> Writable for Owned<T> {}

// SAFETY: the buffer keeps the zeroed elements until it is dropped. `with_options` and `rereg` allow local access
// only.
unsafe impl<T: Element> Local for Owned<T> {}

/// Memory that was allocated for its region.
pub trait Allocated: Addressed + From<RegionBuffer<Self::Item>> {
    const PEERS: bool;

    /// The memory, if nothing else has it.
    fn into_buffer(self) -> Option<RegionBuffer<Self::Item>>;
}

impl<T: Element> Allocated for Owned<T> {
    const PEERS: bool = false;

    fn into_buffer(self) -> Option<RegionBuffer<T>> {
        Some(self.0)
    }
}

impl<T> From<RegionBuffer<T>> for Owned<T> {
    fn from(memory: RegionBuffer<T>) -> Self {
        Self(memory)
    }
}

impl<'pd, M: Allocated> Region<'pd, M> {
    pub(super) fn allocate(
        domain: DomainRef<'pd>,
        len: usize,
        options: RegionOptions,
    ) -> Result<Self> {
        check_access(VERB, &domain, options.flags())?;
        let memory = options.allocate::<M::Item>(VERB, len)?;
        Self::register_buffer(domain, RegionBuffer::of(memory, len), options)
    }

    pub(super) fn register_buffer(
        domain: DomainRef<'pd>,
        buffer: RegionBuffer<M::Item>,
        options: RegionOptions,
    ) -> Result<Self> {
        let whole = buffer.raw_parts();
        // SAFETY: it is the whole buffer, aligned for its elements.
        unsafe { Self::register_part(domain, buffer.into(), whole, options) }
    }

    /// # Safety
    ///
    /// The part is that many elements of `memory`, aligned for them.
    pub(super) unsafe fn register_part(
        domain: DomainRef<'pd>,
        memory: M,
        (address, len): (*mut u8, usize),
        options: RegionOptions,
    ) -> Result<Self> {
        let (iova, access) = options.addressing(VERB)?;
        check_access(VERB, &domain, access)?;
        let bytes = len * size_of::<M::Item>();
        let base = iova.unwrap_or(address as u64);
        if iova.is_some() {
            check_iova(VERB, base, address as usize % page_size(), bytes)?;
        }
        // SAFETY: the memory has this length until the region is deregistered. Its elements accept any bytes, and
        // no references to what a peer may write exist.
        let raw = unsafe { register(VERB, &domain, address, bytes, base, access) }?;
        let parts = Parts { base, ..Parts::by_address(raw, address, len, access) };
        Ok(Self::from_parts(parts, memory, domain))
    }

    /// `ibv_dereg_mr`: deregisters the region and returns its memory, without a copy.
    ///
    /// No device and no peer can reach the memory then.
    ///
    /// # Errors
    ///
    /// Those of [`close`](Self::close), and
    ///
    ///  - `EBUSY`: others have the memory: it is [registered in another
    ///    domain](crate::SharedMemoryRegion::register_in) too, or is [`SharedMemory`](crate::memory::SharedMemory) that
    ///    this program does not have alone.
    #[doc(alias = "ibv_dereg_mr")]
    pub fn into_inner(self) -> Result<RegionBuffer<M::Item>> {
        let shared = "others have the memory, such as its region in another domain";
        let shared = Error::with_reason("ibv_dereg_mr", libc::EBUSY, shared);
        self.into_memory()?.into_buffer().ok_or(shared)
    }

    /// `ibv_rereg_mr`: changes the region's access, its protection domain, or both; its contents stay.
    ///
    /// Its keys may change. The region keeps local write access. A [`MemoryRegion`](crate::MemoryRegion) stays
    /// local: only relaxed ordering can be changed.
    ///
    /// No request that names the region may be outstanding, and no memory window bound to it.
    ///
    /// # Errors
    ///
    /// [`ReregisterError::state`] tells which state the region is in.
    ///
    ///  - `EINVAL`: `change` is empty; the domain is of another context; the access flags contradict each
    ///    other, change `ZERO_BASED`, `ON_DEMAND` or `HUGETLB`, or include access for peers that the kind of
    ///    region excludes; or a window is bound to the region.
    ///  - `EOPNOTSUPP`: the device cannot do that.
    #[doc(alias = "ibv_rereg_mr")]
    pub fn rereg(&mut self, mut change: Reregistration<'pd>) -> Result<(), ReregisterError> {
        if let Some(access) = &mut change.access {
            if !M::PEERS {
                check_local("ibv_rereg_mr", *access).map_err(ReregisterError::unchanged)?;
            }
            *access |= AccessFlags::LOCAL_WRITE;
        }
        // SAFETY: the region frees its memory only once deregistered. Without `PEERS`, the access was checked to
        // be local.
        unsafe { self.reregister(change, None) }
    }
}

impl<'pd, T: Element> MemoryRegion<'pd, T> {
    /// `ibv_reg_mr`: allocates `len` zeroed elements and registers them for local access.
    ///
    /// The buffer is aligned to 64 bytes, or more if `T` is. It may exceed 4 GiB, which a single scatter/gather
    /// element may not.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the region would be empty, or longer than memory or the device allow.
    ///  - `ENOMEM`: no memory, no region left on the device, or `RLIMIT_MEMLOCK` is too low.
    pub fn new(domain: impl Into<DomainRef<'pd>>, len: usize) -> Result<Self> {
        Self::with_options(domain, len, RegionOptions::new())
    }

    /// `ibv_reg_mr`: [`new`](Self::new) with options, such as huge pages, on-demand paging or relaxed ordering.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new), and:
    ///
    ///  - `EINVAL`: the options contradict each other, or ask for remote access, memory windows or an iova,
    ///    which need a [`SharedMemoryRegion`](crate::SharedMemoryRegion).
    ///  - `EOPNOTSUPP`: the device does not have that access, or the machine does not have such huge pages.
    ///  - `ENOMEM`: not enough huge pages are set aside.
    #[doc(alias = "ibv_reg_mr")]
    pub fn with_options(
        domain: impl Into<DomainRef<'pd>>,
        len: usize,
        options: RegionOptions,
    ) -> Result<Self> {
        Self::allocate(domain.into(), len, options.local("ibv_reg_mr")?)
    }
}

/// `struct ibv_mr`: a slice of the caller's, registered while borrowed, which only this program and its device
/// access.
///
/// It derefs to the slice; use it like a [`MemoryRegion`](crate::MemoryRegion). Registering takes many
/// microseconds and pins whole pages: it pays off for memory that is large or used repeatedly.
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
pub type BorrowedMemoryRegion<'pd, 'buf, T> = Region<'pd, Borrowed<'buf, T>>;

/// `struct ibv_mr`: a slice of the caller's, registered while borrowed, which requests of this program only
/// read.
///
/// It derefs to the slice.
pub type ReadOnlyMemoryRegion<'pd, 'buf, T> = Region<'pd, ReadOnly<'buf, T>>;

/// A slice that is borrowed exclusively.
#[derive(Debug)]
pub struct Borrowed<'buf, T>(PhantomData<&'buf mut [T]>);

/// A slice that is borrowed.
#[derive(Debug)]
pub struct ReadOnly<'buf, T>(PhantomData<&'buf [T]>);

impl<T: Element> Backing for Borrowed<'_, T> {
    type Item = T;

    const NAME: &'static str = "BorrowedMemoryRegion";
}

impl<T: Element> Addressed for Borrowed<'_, T> {}
impl<T: Element> InMemory for Borrowed<'_, T> {}
impl<T: Element> Writable for Borrowed<'_, T> {}

// SAFETY: the address is that of the slice, whose exclusive borrow outlives the region.
unsafe impl<T: Element> Local for Borrowed<'_, T> {}

impl<T: Element> Backing for ReadOnly<'_, T> {
    type Item = T;

    const NAME: &'static str = "ReadOnlyMemoryRegion";
}

impl<T: Element> Addressed for ReadOnly<'_, T> {}
impl<T: Element> InMemory for ReadOnly<'_, T> {}

// SAFETY: the address is that of the slice, whose borrow outlives the region.
unsafe impl<T: Element> Local for ReadOnly<'_, T> {}

/// # Safety
///
/// With local write access, the slice is borrowed exclusively. Requests name it only by elements borrowed from
/// the region (see the module `region`).
unsafe fn register_slice<T: Element>(
    domain: &ProtectionDomain<'_>,
    slice: *mut [T],
    access: AccessFlags,
) -> Result<Parts> {
    check_local(VERB, access)?;
    if access.intersects(AccessFlags::ZERO_BASED | AccessFlags::HUGETLB) {
        let reason = "a slice is addressed by its own address, and its pages are unknown";
        return Err(Error::invalid(VERB, reason));
    }
    let bytes = slice.len() * size_of::<T>();
    Error::invalid_if(bytes == 0, VERB, "the region is empty")?;
    check_access(VERB, domain, access)?;
    let address = slice.cast::<u8>();
    // SAFETY: the slice outlives all elements of the region. Without local write access the device only reads it.
    let raw = unsafe { register(VERB, domain, address, bytes, address as u64, access) }?;
    Ok(Parts::by_address(raw, address, slice.len(), access))
}

impl<'pd, 'buf, T: Element> BorrowedMemoryRegion<'pd, 'buf, T> {
    /// `ibv_reg_mr`: registers a slice for local access.
    ///
    /// # Errors
    ///
    /// Those of [`with_access`](Self::with_access).
    pub fn new(domain: impl Into<DomainRef<'pd>>, memory: &'buf mut [T]) -> Result<Self> {
        Self::with_access(domain, memory, AccessFlags::LOCAL_WRITE)
    }

    /// `ibv_reg_mr`: [`new`](Self::new), with on-demand paging or relaxed ordering if asked for.
    ///
    /// Local write access is always included.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the slice is empty, or longer than the device allows, or `access` includes access for
    ///    peers, [`ZERO_BASED`](AccessFlags::ZERO_BASED) or [`HUGETLB`](AccessFlags::HUGETLB).
    ///  - `EOPNOTSUPP`: the device does not have that access.
    ///  - `ENOMEM`: no region left on the device, or `RLIMIT_MEMLOCK` is too low.
    #[doc(alias = "ibv_reg_mr")]
    pub fn with_access(
        domain: impl Into<DomainRef<'pd>>,
        memory: &'buf mut [T],
        access: AccessFlags,
    ) -> Result<Self> {
        let (domain, access) = (domain.into(), access | AccessFlags::LOCAL_WRITE);
        // SAFETY: the slice is borrowed exclusively for `'buf`, which is part of the region's type.
        let parts = unsafe { register_slice(&domain, memory, access) }?;
        Ok(Self::from_parts(parts, Borrowed(PhantomData), domain))
    }
}

impl<'pd, 'buf, T: Element> ReadOnlyMemoryRegion<'pd, 'buf, T> {
    /// `ibv_reg_mr`: registers a slice that requests only read.
    ///
    /// # Errors
    ///
    /// Those of [`with_access`](Self::with_access).
    pub fn new(domain: impl Into<DomainRef<'pd>>, memory: &'buf [T]) -> Result<Self> {
        Self::with_access(domain, memory, AccessFlags::empty())
    }

    /// `ibv_reg_mr`: [`new`](Self::new), with on-demand paging or relaxed ordering if asked for.
    ///
    /// # Errors
    ///
    /// Those of [`BorrowedMemoryRegion::with_access`], and:
    ///
    ///  - `EINVAL`: `access` includes local write access.
    #[doc(alias = "ibv_reg_mr")]
    pub fn with_access(
        domain: impl Into<DomainRef<'pd>>,
        memory: &'buf [T],
        access: AccessFlags,
    ) -> Result<Self> {
        let domain = domain.into();
        let reason = "memory that is borrowed for reading cannot be written";
        Error::invalid_if(access.contains(AccessFlags::LOCAL_WRITE), VERB, reason)?;
        let slice = ptr::from_ref(memory).cast_mut();
        // SAFETY: the region's type includes the borrow `'buf`; the device gets no write access.
        let parts = unsafe { register_slice(&domain, slice, access) }?;
        Ok(Self::from_parts(parts, ReadOnly(PhantomData), domain))
    }
}

impl ProtectionDomain<'_> {
    /// `ibv_reg_mr`: [`MemoryRegion::new`], borrowing this domain.
    ///
    /// To return the region from a function, call that with the domain by value or in an `Arc`.
    ///
    /// # Errors
    ///
    /// Those of [`MemoryRegion::new`].
    pub fn allocate<T: Element>(&self, len: usize) -> Result<MemoryRegion<'_, T>> {
        MemoryRegion::new(self, len)
    }

    /// `ibv_reg_mr`: [`BorrowedMemoryRegion::new`], borrowing this domain.
    ///
    /// To return a region from a function, let it own its memory: [`MemoryRegion::new`].
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

    /// `ibv_reg_mr`: [`ReadOnlyMemoryRegion::new`], borrowing this domain.
    ///
    /// To return a region from a function, let it own its memory: [`MemoryRegion::new`].
    ///
    /// # Errors
    ///
    /// Those of [`ReadOnlyMemoryRegion::with_access`].
    pub fn register_read_only<'buf, T: Element>(
        &self,
        memory: &'buf [T],
    ) -> Result<ReadOnlyMemoryRegion<'_, 'buf, T>> {
        ReadOnlyMemoryRegion::new(self, memory)
    }
}
