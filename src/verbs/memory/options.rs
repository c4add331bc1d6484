use std::alloc::Layout;

use super::allocation::{Allocation, HugePages, page_size};
use super::scatter_gather::GatherElement;
use crate::base::{Error, Result, c_enum, ffi, setters};
use crate::verbs::device::OnDemandPaging;
use crate::verbs::domain::ProtectionDomain;

/// The program must have no references to a region with any of these flags.
const REMOTE: AccessFlags = AccessFlags::REMOTE_WRITE
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_ATOMIC)
    .union(AccessFlags::MW_BIND)
    .union(AccessFlags::FLUSH_GLOBAL)
    .union(AccessFlags::FLUSH_PERSISTENT);

/// Options for [`MemoryRegion::with_options`](crate::MemoryRegion::with_options) and
/// [`SharedMemoryRegion::new`](crate::SharedMemoryRegion::new). [`AccessFlags`] convert into them.
///
/// # Fork
///
/// A device writes physical pages. After a `fork`, the kernel gives a process copies of the pages that it
/// writes, so the device could write pages that the program no longer sees.
///
///  - Linux 5.12 and later copy registered pages for the child: nothing needs to be done, and
///    [`is_fork_initialized`](crate::device::is_fork_initialized) returns
///    [`Unneeded`](crate::device::ForkStatus::Unneeded).
///  - On older kernels, call [`fork_init`](crate::device::fork_init): registrations then call
///    `madvise(MADV_DONTFORK)`, which takes the pages, and other data on them, away from children. With
///    [`page_aligned`](Self::page_aligned) there is no other data. For [huge pages](Self::huge_pages), set the
///    environment variable `RDMAV_HUGEPAGES_SAFE` first.
///
/// ```no_run
/// # // not on Soft-RoCE alone: needs huge pages set aside
/// use ibverbs::memory::HugePages;
/// use ibverbs::{AccessFlags, RegionOptions};
///
/// # let context = ibverbs::open("rxe0")?;
/// # let domain = context.alloc_pd()?;
/// let options = RegionOptions::new()
///     .access(AccessFlags::REMOTE_WRITE | AccessFlags::RELAXED_ORDERING)
///     .huge_pages(HugePages::Size2MiB);
/// let region = domain.allocate_shared::<u64>(1 << 24, options)?;
/// # Ok::<(), ibverbs::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[must_use]
pub struct RegionOptions {
    access: AccessFlags,
    alignment: usize,
    whole_pages: bool,
    huge_pages: Option<HugePages>,
    iova: Option<u64>,
}

impl Default for RegionOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl From<AccessFlags> for RegionOptions {
    fn from(access: AccessFlags) -> Self {
        Self::new().access(access)
    }
}

impl RegionOptions {
    /// Local access, a buffer aligned to 64 bytes, addressed by its own address.
    pub const fn new() -> Self {
        Self {
            access: AccessFlags::LOCAL_WRITE,
            alignment: 64,
            whole_pages: false,
            huge_pages: None,
            iova: None,
        }
    }

    /// Adds access. Local write access is always set.
    pub const fn access(mut self, access: AccessFlags) -> Self {
        self.access = self.access.union(access);
        self
    }

    setters! { const self,
        /// Aligns the buffer to at least this power of 2, and never less than the elements need. The default is
        /// 64 bytes.
        alignment(bytes: usize) => self.alignment = bytes;

        /// Makes the buffer begin on a page and share its pages with no other data.
        page_aligned() => self.whole_pages = true;

        /// Makes the buffer consist of huge pages. With [`AccessFlags::ON_DEMAND`], add
        /// [`AccessFlags::HUGETLB`] to tell the device.
        huge_pages(pages: HugePages) => self.huge_pages = Some(pages);

        /// `ibv_reg_mr_iova`: requests and peers address the region from `iova` on, not by its buffer's
        /// address. An `iova` of 0 has the same effect as [`AccessFlags::ZERO_BASED`].
        ///
        /// `iova` must be a multiple of the page size; the buffer is [page-aligned](Self::page_aligned). Use it
        /// for peers: naming such a region in this program's own requests is
        /// [unsafe](crate::memory::Region::scatter_element_by_iova).
        #[doc(alias = "ibv_reg_mr_iova")]
        iova(iova: u64) => self.iova = Some(iova);
    }

    pub(super) fn local(self, verb: &'static str) -> Result<Self> {
        check_local(verb, self.access)?;
        if self.iova.is_some() || self.access.contains(AccessFlags::ZERO_BASED) {
            let reason = "a region for local access is addressed by its own address";
            return Err(Error::invalid(verb, reason));
        }
        Ok(self)
    }

    /// The access that was asked for.
    pub const fn flags(self) -> AccessFlags {
        self.access
    }

    pub(super) fn allocate<T>(self, verb: &'static str, len: usize) -> Result<Allocation> {
        let (iova, access) = self.addressing(verb)?;
        let reason = "the alignment is not a power of 2";
        Error::invalid_if(!self.alignment.is_power_of_two(), verb, reason)?;
        let real_huge_pages = matches!(self.huge_pages, Some(h) if h != HugePages::Transparent);
        let reason = "HUGETLB is for buffers that consist of huge pages";
        Error::invalid_if(access.contains(AccessFlags::HUGETLB) && !real_huge_pages, verb, reason)?;
        let too_long = |_| Error::invalid(verb, "the region is longer than memory can be");
        let layout = Layout::array::<T>(len)
            .and_then(|layout| layout.align_to(self.alignment))
            .map_err(too_long)?;
        Error::invalid_if(layout.size() == 0, verb, "the region is empty")?;
        if let Some(iova) = iova {
            check_iova(verb, iova, 0, layout.size())?;
        }
        let whole_pages = self.whole_pages || iova.is_some();
        Allocation::zeroed(verb, layout, whole_pages, self.huge_pages)
    }

    /// The iova, unless it is the buffer's address, and the access without `ZERO_BASED`, which the iova replaces.
    pub(super) fn addressing(self, verb: &'static str) -> Result<(Option<u64>, AccessFlags)> {
        match (self.access.contains(AccessFlags::ZERO_BASED), self.iova) {
            (true, Some(1..)) => {
                Err(Error::invalid(verb, "ZERO_BASED and another iova exclude each other"))
            }
            (true, _) => Ok((Some(0), self.access.difference(AccessFlags::ZERO_BASED))),
            (false, iova) => Ok((iova, self.access)),
        }
    }
}

/// Without peers, the program may have references to the memory.
pub(super) fn check_local(verb: &'static str, access: AccessFlags) -> Result<()> {
    let reason = "this region is for local access only: peers need a SharedMemoryRegion";
    Error::invalid_if(access.intersects(REMOTE), verb, reason)?;
    Ok(())
}

pub(super) fn check_access(
    verb: &'static str,
    domain: &ProtectionDomain<'_>,
    access: AccessFlags,
) -> Result<()> {
    let writes = AccessFlags::REMOTE_WRITE.union(AccessFlags::REMOTE_ATOMIC);
    if access.intersects(writes) && !access.contains(AccessFlags::LOCAL_WRITE) {
        let reason = "remote write and remote atomic access need LOCAL_WRITE too";
        return Err(Error::invalid(verb, reason));
    }
    if access.contains(AccessFlags::ON_DEMAND) {
        let paging = domain.context().query_device()?.on_demand_paging().general;
        let reason = "the device has no on-demand paging";
        Error::unsupported_if(!paging.contains(OnDemandPaging::SUPPORT), verb, reason)?;
    }
    Ok(())
}

pub(super) fn check_iova(
    verb: &'static str,
    iova: u64,
    offset_in_page: usize,
    bytes: usize,
) -> Result<()> {
    let reason = "the iova and the memory do not begin at the same offset in a page";
    Error::invalid_if(iova % page_size() as u64 != offset_in_page as u64, verb, reason)?;
    match iova.checked_add(bytes as u64) {
        Some(_) => Ok(()),
        None => Err(Error::invalid(verb, "the region ends beyond the last iova")),
    }
}

bitflags::bitflags! {
    /// `ibv_access_flags`: what the device may do to registered memory, and which operations of a peer a queue
    /// pair accepts.
    ///
    /// The device can always read registered memory for a local send or write. All other access must be
    /// requested.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    pub struct AccessFlags: u32 {
        /// The device writes the memory for local receives, reads and atomics. Remote write and remote atomic
        /// access need it too.
        const LOCAL_WRITE = ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;
        /// A peer that knows the rkey may write.
        const REMOTE_WRITE = ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
        /// A peer that knows the rkey may read.
        const REMOTE_READ = ffi::ibv_access_flags::IBV_ACCESS_REMOTE_READ.0;
        /// A peer that knows the rkey may carry out atomics.
        const REMOTE_ATOMIC = ffi::ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC.0;
        /// A memory window may be bound to the region.
        const MW_BIND = ffi::ibv_access_flags::IBV_ACCESS_MW_BIND.0;
        /// Addresses in the region count from 0, not from the buffer's address.
        const ZERO_BASED = ffi::ibv_access_flags::IBV_ACCESS_ZERO_BASED.0;
        /// Pages are brought in when the device needs them, not pinned (on-demand paging).
        const ON_DEMAND = ffi::ibv_access_flags::IBV_ACCESS_ON_DEMAND.0;
        /// The memory consists of huge pages.
        const HUGETLB = ffi::ibv_access_flags::IBV_ACCESS_HUGETLB.0;
        /// A peer may flush its writes to global visibility.
        const FLUSH_GLOBAL = ffi::ibv_access_flags::IBV_ACCESS_FLUSH_GLOBAL.0;
        /// A peer may flush its writes to persistence.
        const FLUSH_PERSISTENT = ffi::ibv_access_flags::IBV_ACCESS_FLUSH_PERSISTENT.0;
        /// The device may write in any order (PCIe relaxed ordering): a completion guarantees that the whole
        /// message has arrived, the arrival of its last byte does not. Devices without support ignore it.
        const RELAXED_ORDERING = ffi::ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0;
    }
}

impl Default for AccessFlags {
    /// Local write access, and no access for peers.
    fn default() -> Self {
        Self::LOCAL_WRITE
    }
}

c_enum! {
    /// `enum ibv_advise_mr_advice`: how memory that is paged on demand will be used.
    #[doc(alias = "ibv_advise_mr_advice")]
    pub enum MemoryAdvice: ib_uverbs_advise_mr_advice(u32) {
        /// Bring the memory in: it will be read.
        Prefetch = IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH,
        /// Bring the memory in, writable: it will be written.
        PrefetchWrite = IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_WRITE,
        /// Map the pages that are in memory anyway, and bring in no others: they will be read.
        PrefetchNoFault = IB_UVERBS_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT,
    }
}

/// `IBV_ADVISE_MR_FLAG_FLUSH`, a macro in the header.
const FLUSH: u32 = 1 << 0;

impl ProtectionDomain<'_> {
    /// `ibv_advise_mr`: announces how regions of this domain that are [paged on
    /// demand](AccessFlags::ON_DEMAND) will be used, so that the device need not wait for pages later.
    ///
    /// With `flush`, this returns when the device has the pages; without, it may still be bringing them in.
    ///
    /// ```no_run
    /// # // not on Soft-RoCE alone: needs on-demand paging
    /// use ibverbs::memory::MemoryAdvice;
    /// use ibverbs::{AccessFlags, MemoryRegion, RegionOptions};
    ///
    /// # let context = ibverbs::open("mlx5_0")?;
    /// let domain = context.alloc_pd()?;
    /// let options = RegionOptions::new().access(AccessFlags::ON_DEMAND);
    /// let region = MemoryRegion::<u8>::with_options(&domain, 1 << 30, options)?;
    /// domain.advise_mr(MemoryAdvice::Prefetch, true, &[region.gather_element(..1 << 20)?])?;
    /// # Ok::<(), ibverbs::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the list is empty, or the kernel does not know the advice.
    ///  - `EOPNOTSUPP`: the device takes no advice.
    ///  - `EFAULT`, `ENOENT`: an element is not in a region of this domain that is paged on demand.
    ///  - `EPERM`: an element's region is of another domain, or the advice is to write and the region is not
    ///    writable.
    ///  - `ENOMEM`: out of memory.
    #[doc(alias = "ibv_advise_mr")]
    pub fn advise_mr(
        &self,
        advice: MemoryAdvice,
        flush: bool,
        elements: &[GatherElement<'_>],
    ) -> Result<()> {
        const VERB: &str = "ibv_advise_mr";
        Error::invalid_if(elements.is_empty(), VERB, "there is nothing to give advice about")?;
        let Ok(count) = u32::try_from(elements.len()) else {
            return Err(Error::invalid(VERB, "there are too many elements"));
        };
        let flags = if flush { FLUSH } else { 0 };
        // The list is only read.
        let list = GatherElement::raw_list(elements).as_ptr().cast_mut();
        // SAFETY: the domain is live, and the list has that many elements. The call changes no contents.
        let returned =
            unsafe { ffi::ibv_advise_mr(self.as_raw(), advice.into(), flags, list, count) };
        ffi::status(VERB, returned)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VERB: &str = "ibv_reg_mr";

    #[test]
    fn local_regions_let_nobody_in() {
        for access in REMOTE.iter() {
            assert!(RegionOptions::from(access).local(VERB).is_err(), "{access:?}");
        }
        let harmless = RegionOptions::new()
            .access(AccessFlags::RELAXED_ORDERING)
            .access(AccessFlags::ON_DEMAND);
        assert!(harmless.local(VERB).is_ok());
        assert!(harmless.iova(0).local(VERB).is_err());
        assert!(harmless.access(AccessFlags::ZERO_BASED).local(VERB).is_err());
    }

    #[test]
    fn zero_based_is_an_iova_of_0() {
        let flag = RegionOptions::from(AccessFlags::ZERO_BASED);
        assert_eq!(flag.addressing(VERB), Ok((Some(0), AccessFlags::LOCAL_WRITE)));
        assert_eq!(flag.iova(0).addressing(VERB).unwrap().0, Some(0));
        assert_eq!(RegionOptions::new().iova(0x4000).addressing(VERB).unwrap().0, Some(0x4000));
        assert_eq!(RegionOptions::new().addressing(VERB).unwrap().0, None);
        assert!(flag.iova(0x4000).addressing(VERB).is_err());
    }

    #[test]
    fn an_iova_agrees_with_the_address_and_ends() {
        let page = page_size() as u64;
        assert!(check_iova(VERB, 4 * page, 0, 1).is_ok());
        assert!(check_iova(VERB, 4 * page + 8, 8, 1).is_ok());
        assert!(check_iova(VERB, 4 * page + 8, 0, 1).is_err());
        assert!(check_iova(VERB, u64::MAX - page + 1, 0, page as usize - 1).is_ok());
        assert!(check_iova(VERB, u64::MAX - page + 1, 0, page as usize).is_err());
    }
}
