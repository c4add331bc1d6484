//! Registered memory that the region itself allocates and owns.

use super::access::AccessFlags;
use super::allocation::page_size;
use super::options::{RegionOptions, check_access, check_iova, check_local};
use super::region::{Addressed, Backing, InMemory, Local, Parts, Region, Writable};
use super::region_buffer::RegionBuffer;
use super::registration::{self, ReregisterError, Reregistration};
use super::scatter_gather::Element;
use crate::domain::ProtectionDomain;
use crate::error::{Error, Result};
use crate::parent::Parent;

const VERB: &str = "ibv_reg_mr";

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
pub type MemoryRegion<'pd, T> = Region<'pd, Owned<T>>;

/// Memory of the region's own.
#[derive(Debug)]
pub struct Owned<T>(RegionBuffer<T>);

impl<T: Element> Backing for Owned<T> {
    type Item = T;

    const NAME: &'static str = "MemoryRegion";
}

impl<T: Element> Addressed for Owned<T> {}
impl<T: Element> InMemory for Owned<T> {}
impl<T: Element> Writable for Owned<T> {}

// SAFETY: the memory has the elements, zeroed, until it is dropped. It is registered for local access only, by
// `with_options` and `rereg`.
unsafe impl<T: Element> Local for Owned<T> {}

/// Memory that was allocated with its region.
pub trait Allocated: Addressed + From<RegionBuffer<Self::Item>> {
    /// Whether peers may have access.
    const PEERS: bool;

    fn buffer(&self) -> &RegionBuffer<Self::Item>;

    /// The memory, if no other region has it.
    fn into_buffer(self) -> Option<RegionBuffer<Self::Item>>;
}

impl<T: Element> Allocated for Owned<T> {
    const PEERS: bool = false;

    fn buffer(&self) -> &RegionBuffer<T> {
        &self.0
    }

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
    /// Allocates `len` zeroed elements and registers them.
    pub(super) fn allocate(
        domain: Parent<'pd, ProtectionDomain<'pd>>,
        len: usize,
        options: RegionOptions,
    ) -> Result<Self> {
        check_access(VERB, &domain, options.flags())?;
        let memory = options.allocate::<M::Item>(VERB, len)?;
        Self::register_buffer(domain, RegionBuffer::of(memory, len).into(), options)
    }

    /// Registers memory that was allocated.
    pub(super) fn register_buffer(
        domain: Parent<'pd, ProtectionDomain<'pd>>,
        memory: M,
        options: RegionOptions,
    ) -> Result<Self> {
        let (iova, access) = options.addressing(VERB)?;
        check_access(VERB, &domain, access)?;
        let (address, len) = memory.buffer().raw_parts();
        let bytes = len * size_of::<M::Item>();
        let base = iova.unwrap_or(address as u64);
        if iova.is_some() {
            check_iova(VERB, base, address as usize % page_size(), bytes)?;
        }
        // SAFETY: the memory has this length until the region is deregistered. Its elements
        // accept any bytes that the device writes, and there are no references to what a peer may write.
        let raw = unsafe { registration::register(VERB, &domain, address, bytes, base, access) }?;
        let parts = Parts { base, ..Parts::at(raw, address, len, access) };
        Ok(Self::from_parts(parts, memory, domain))
    }

    /// `ibv_dereg_mr`: deregisters the region and returns its memory, without a copy. No device and no peer can
    /// reach it any more, so it is plain memory.
    ///
    /// # Errors
    ///
    /// Those of [`close`](Self::close), and
    ///
    ///  - `EBUSY`: the memory is [registered in another domain](crate::SharedMemoryRegion::register_in) too, whose region
    ///    keeps it.
    #[doc(alias = "ibv_dereg_mr")]
    pub fn into_inner(self) -> Result<RegionBuffer<M::Item>> {
        let shared = "the memory is registered in another domain too";
        let shared = Error::with_reason("ibv_dereg_mr", libc::EBUSY, shared);
        self.into_memory()?.into_buffer().ok_or(shared)
    }

    /// `ibv_rereg_mr`: changes the region's access, its protection domain, or both; its contents stay.
    /// This may change its keys. The region always keeps local write access. A
    /// [`MemoryRegion`](crate::MemoryRegion) stays local: only relaxed ordering can be changed.
    ///
    /// No request that names the region may be outstanding, and no memory window bound to it.
    ///
    /// # Errors
    ///
    /// [`ReregisterError::state`] tells which state the region is in.
    ///
    ///  - `EINVAL`: `change` is empty, or is not possible: the domain is of another context, the access
    ///    flags contradict each other, or include access for peers that the kind of region excludes, or a
    ///    window is bound to the region.
    ///  - `EOPNOTSUPP`: the device cannot do that.
    #[doc(alias = "ibv_rereg_mr")]
    pub fn rereg(&mut self, mut change: Reregistration<'pd>) -> Result<(), ReregisterError> {
        if let Some(access) = &mut change.access {
            if !M::PEERS {
                check_local("ibv_rereg_mr", *access).map_err(ReregisterError::unchanged)?;
            }
            *access |= AccessFlags::LOCAL_WRITE;
        }
        // SAFETY: the memory stays ours, and is freed only after the region was deregistered. The access
        // is right for its kind of region.
        unsafe { self.reregister(change, None) }
    }
}

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
        Self::allocate(domain.into(), len, options.local("ibv_reg_mr")?)
    }
}

impl ProtectionDomain<'_> {
    /// `ibv_reg_mr`: allocates `len` zeroed elements that only this program accesses. See
    /// [`MemoryRegion::new`].
    ///
    /// For a value that leaves its function: `MemoryRegion::new(domain, ..)`, with the domain by value or in an `Arc`.
    ///
    /// # Errors
    ///
    /// Those of [`MemoryRegion::new`].
    #[doc(alias = "ibv_reg_mr")]
    pub fn allocate<T: Element>(&self, len: usize) -> Result<MemoryRegion<'_, T>> {
        MemoryRegion::new(self, len)
    }
}
