//! Registered slices: memory of the caller, for local access. The module `region` says why that is safe.

use std::marker::PhantomData;
use std::ptr;

use super::access::AccessFlags;
use super::options::{check_access, check_local};
use super::region::{Addressed, Backing, InMemory, Local, Parts, Region, Writable};
use super::registration::register;
use super::scatter_gather::Element;
use crate::domain::ProtectionDomain;
use crate::error::{Error, Result};
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
pub type BorrowedMemoryRegion<'pd, 'buf, T> = Region<'pd, Borrowed<'buf, T>>;

/// `struct ibv_mr`: a slice of the caller's, registered for as long as it is borrowed, which requests
/// of this program can read but not write.
///
/// It derefs to the slice.
#[doc(alias = "ibv_mr")]
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

// SAFETY: the address is that of the slice, which is borrowed exclusively for longer than the region lives.
unsafe impl<T: Element> Local for Borrowed<'_, T> {}

impl<T: Element> Backing for ReadOnly<'_, T> {
    type Item = T;

    const NAME: &'static str = "ReadOnlyMemoryRegion";
}

impl<T: Element> Addressed for ReadOnly<'_, T> {}
impl<T: Element> InMemory for ReadOnly<'_, T> {}

// SAFETY: the address is that of the slice, which is borrowed for longer than the region lives.
unsafe impl<T: Element> Local for ReadOnly<'_, T> {}

const VERB: &str = "ibv_reg_mr";

/// Registers a slice for local access.
///
/// # Safety
///
/// With local write access, the slice is borrowed exclusively. Requests name the memory only by
/// elements that are borrowed from the region (see the module `region`).
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
    // SAFETY: the slice lives for as long as elements can be made from the region. Without local write
    // access the device does not write it.
    let raw = unsafe { register(VERB, domain, address, bytes, address as u64, access) }?;
    Ok(Parts::at(raw, address, slice.len(), access))
}

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
        // SAFETY: the slice is borrowed exclusively for `'buf`, which the region keeps.
        let parts = unsafe { register_slice(&domain, memory, access) }?;
        Ok(Self::from_parts(parts, Borrowed(PhantomData), domain))
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
        let reason = "memory that is borrowed for reading cannot be written";
        Error::invalid_if(access.contains(AccessFlags::LOCAL_WRITE), VERB, reason)?;
        let slice = ptr::from_ref(memory).cast_mut();
        // SAFETY: the slice is borrowed for `'buf`, which the region keeps; the device gets no write
        // access.
        let parts = unsafe { register_slice(&domain, slice, access) }?;
        Ok(Self::from_parts(parts, ReadOnly(PhantomData), domain))
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
