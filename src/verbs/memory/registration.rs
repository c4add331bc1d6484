use std::{fmt, fs, io};

use super::options::{AccessFlags, check_access};
#[cfg(debug_assertions)]
use crate::base::mr_tracker;
use crate::base::{
    Detail, Error, Handle, Result, debug, ffi,
    hooks::{Hooks, hooks},
    object,
};
use crate::verbs::domain::{DomainRef, ProtectionDomain};

object!(ibv_mr, ibv_dereg_mr or ibv_unimport_mr, mr_tracker);

/// Requests name the memory from `iova` on.
///
/// # Safety
///
/// The device's accesses under `access` are sound until the region is deregistered.
pub(super) unsafe fn register(
    verb: &'static str,
    domain: &ProtectionDomain<'_>,
    address: *mut u8,
    bytes: usize,
    iova: u64,
    access: AccessFlags,
) -> Result<Handle<ffi::ibv_mr>> {
    // C's public functions end in this one, which drops optional flags that the kernel does not know.
    // SAFETY: the domain is live; the caller vouches for the memory.
    let registered = unsafe {
        let (address, access) = (address.cast(), access.bits());
        let raw = ffi::ibv_reg_mr_iova2(domain.as_raw(), address, bytes, iova, access);
        Handle::new(verb, raw)
    };
    registered.map_err(|error| explained(error, verb, domain, bytes))
}

/// The region must be of this domain.
///
/// # Safety
///
/// `raw` is null or a live region.
pub(super) unsafe fn check_foreign(
    verb: &'static str,
    raw: *mut ffi::ibv_mr,
    domain: &ProtectionDomain<'_>,
) -> Result<()> {
    // SAFETY: the caller vouches for a pointer that is not null.
    let is_foreign = raw.is_null() || unsafe { (*raw).pd } != domain.as_raw();
    Error::invalid_if(is_foreign, verb, "not a memory region of this domain")?;
    Ok(())
}

/// # Safety
///
/// `raw` is null or a live region, and nothing else deregisters it.
pub(super) unsafe fn adopt(
    verb: &'static str,
    raw: *mut ffi::ibv_mr,
    domain: &ProtectionDomain<'_>,
) -> Result<Handle<ffi::ibv_mr>> {
    // SAFETY: the caller hands over a live region.
    unsafe {
        check_foreign(verb, raw, domain)?;
        Handle::new(verb, raw)
    }
}

/// Names the limit that `bytes` of memory exceed, if it is known.
#[cold]
fn explained(
    error: Error,
    verb: &'static str,
    domain: &ProtectionDomain<'_>,
    bytes: usize,
) -> Error {
    let longest = domain.context().query_device().map_or(u64::MAX, |it| it.max_mr_size());
    if bytes as u64 > longest {
        return Error::out_of_range(verb, "the region's length in bytes", bytes as u64, 1, longest);
    }
    match error.raw_os_error() {
        Some(libc::ENOMEM) => PinnedMemory::refusal(verb, domain, bytes).unwrap_or(error),
        _ => error,
    }
}

/// The changes that `rereg` makes to a region: its access, its protection domain, or both.
///
/// ```no_run
/// # // not on Soft-RoCE alone: needs ibv_rereg_mr
/// use ibverbs::memory::Reregistration;
/// use ibverbs::AccessFlags;
///
/// # let context = ibverbs::open("mlx5_0")?;
/// # let domain = context.alloc_pd()?;
/// let mut region = domain.allocate_shared::<u8>(4096, AccessFlags::REMOTE_WRITE)?;
/// // From now on peers can only read it.
/// region.rereg(Reregistration::new().access(AccessFlags::REMOTE_READ))?;
/// # Ok::<(), ibverbs::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
#[must_use]
#[doc(alias = "ibv_rereg_mr_flags")]
pub struct Reregistration<'pd> {
    domain: Option<DomainRef<'pd>>,
    pub(crate) access: Option<AccessFlags>,
}

impl<'pd> Reregistration<'pd> {
    /// No changes yet.
    pub const fn new() -> Self {
        Self { domain: None, access: None }
    }

    /// `IBV_REREG_MR_CHANGE_ACCESS`: replaces the access.
    #[doc(alias = "IBV_REREG_MR_CHANGE_ACCESS")]
    pub const fn access(mut self, access: AccessFlags) -> Self {
        self.access = Some(access);
        self
    }

    /// `IBV_REREG_MR_CHANGE_PD`: replaces the protection domain.
    #[doc(alias = "IBV_REREG_MR_CHANGE_PD")]
    pub fn protection_domain(mut self, domain: impl Into<DomainRef<'pd>>) -> Self {
        self.domain = Some(domain.into());
        self
    }
}

/// `enum ibv_rereg_mr_err_code`: the state of a region after a failed `rereg`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[doc(alias = "ibv_rereg_mr_err_code")]
pub enum ReregisteredState {
    /// The region is unchanged.
    Unchanged,
    /// The change was made, but the former memory's pages stay hidden from forked children.
    Changed,
    /// No request can use the region: drop or close it. Its contents are still there.
    Lost,
}

/// The error of a failed `rereg`, and the state of the region.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ReregisterError {
    /// The reason.
    pub error: Error,
    /// The state that the region is in now.
    pub state: ReregisteredState,
}

impl ReregisterError {
    /// Found before the verb was called.
    pub(super) fn unchanged(error: Error) -> Self {
        Self { error, state: ReregisteredState::Unchanged }
    }

    #[cold]
    fn from_c(returned: i32, errno: i32) -> Self {
        use ffi::ibv_rereg_mr_err_code as code;

        let state = match ffi::ibv_rereg_mr_err_code(returned) {
            code::IBV_REREG_MR_ERR_INPUT | code::IBV_REREG_MR_ERR_DONT_FORK_NEW => {
                ReregisteredState::Unchanged
            }
            code::IBV_REREG_MR_ERR_DO_FORK_OLD => ReregisteredState::Changed,
            // Device or kernel lacks the operation: nothing has changed.
            _ if matches!(errno, libc::EOPNOTSUPP | libc::ENOSYS) => ReregisteredState::Unchanged,
            _ => ReregisteredState::Lost,
        };
        Self { error: Error::new(VERB, errno), state }
    }
}

impl fmt::Display for ReregisterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            ReregisteredState::Unchanged => "the region is as it was",
            ReregisteredState::Changed => {
                "the region is changed, but its former memory stays hidden from forked children"
            }
            ReregisteredState::Lost => "no request can use the region any more",
        };
        write!(f, "{}; {state}", self.error)
    }
}

debug! { ReregisterError, self, error: self.error, state: self.state }

impl std::error::Error for ReregisterError {}

impl From<ReregisterError> for Error {
    fn from(error: ReregisterError) -> Self {
        error.error
    }
}

impl From<ReregisterError> for io::Error {
    fn from(error: ReregisterError) -> Self {
        Self::new(Self::from(error.error).kind(), error)
    }
}

const VERB: &str = "ibv_rereg_mr";

/// Replaces `domain` if the change includes it.
///
/// # Safety
///
/// Until the region is deregistered or changed again, the device's accesses are sound: to the memory of
/// `translation`, else to the present memory, under the new access, else under `access`. If this fails, accesses
/// to the present memory under `access` stay sound too.
pub(super) unsafe fn reregister<'pd>(
    region: &Handle<ffi::ibv_mr>,
    domain: &mut DomainRef<'pd>,
    access: &mut AccessFlags,
    change: Reregistration<'pd>,
    translation: Option<(*mut u8, usize)>,
) -> Result<(), ReregisterError> {
    use ffi::ibv_rereg_mr_flags as flag;

    let mut flags = flag(0);
    let mut raw_domain = std::ptr::null_mut();
    if let Some(new) = &change.domain {
        let reason = "the new protection domain is of another context";
        let checked = domain.context().check_same(new.context(), VERB, reason);
        checked.map_err(ReregisterError::unchanged)?;
        flags |= flag::IBV_REREG_MR_CHANGE_PD;
        raw_domain = new.as_raw();
    }
    if let Some(new) = change.access {
        let fixed = AccessFlags::ZERO_BASED | AccessFlags::ON_DEMAND | AccessFlags::HUGETLB;
        if (new ^ *access).intersects(fixed) {
            let reason = "ZERO_BASED, ON_DEMAND and HUGETLB cannot be changed";
            return Err(ReregisterError::unchanged(Error::invalid(VERB, reason)));
        }
        check_access(VERB, domain, new).map_err(ReregisterError::unchanged)?;
        flags |= flag::IBV_REREG_MR_CHANGE_ACCESS;
    }
    let (address, bytes) = match translation {
        Some(memory) => {
            flags |= flag::IBV_REREG_MR_CHANGE_TRANSLATION;
            memory
        }
        None => (std::ptr::null_mut(), 0),
    };
    if flags == flag(0) {
        return Err(ReregisterError::unchanged(Error::invalid(VERB, "nothing is to be changed")));
    }
    let new_access = change.access.unwrap_or(AccessFlags::empty());
    #[cfg(debug_assertions)]
    mr_tracker::remove(region.as_ptr());
    // SAFETY: `errno` is the calling thread's. Region and domains are live, the flags are defined and fit, and
    // the caller vouches for the memory.
    let (returned, errno) = unsafe {
        // Not every provider sets `errno`.
        *crate::base::linux::__errno_location() = 0;
        let returned = ffi::ibv_rereg_mr(
            region.as_ptr(),
            flags.0 as i32,
            raw_domain,
            address.cast(),
            bytes,
            new_access.bits() as i32,
        );
        (returned, ffi::errno())
    };
    #[cfg(debug_assertions)]
    mr_tracker::add(region.as_ptr());
    let result = match returned {
        0 => Ok(()),
        n => {
            let failed = ReregisterError::from_c(n, errno);
            Err(ReregisterError { error: explained(failed.error, VERB, domain, bytes), ..failed })
        }
    };
    if !matches!(result, Err(e) if e.state != ReregisteredState::Changed) {
        *domain = change.domain.unwrap_or_else(|| domain.clone());
        *access = change.access.unwrap_or(*access);
    }
    result
}

/// How much memory this process has pinned for devices, and how much the kernel lets it pin.
///
/// A registration pins its pages, unless it is [on demand](AccessFlags::ON_DEMAND) or on a software
/// device of this process. The kernel refuses it (`ENOMEM`) if all regions of the process together would exceed
/// `RLIMIT_MEMLOCK` (`ulimit -l`), unless the process may exceed that. Memory registered in several protection
/// domains counts once for each.
///
/// ```
/// if let Some(pinned) = ibverbs::memory::PinnedMemory::current() {
///     println!("{} bytes are pinned; room for {}", pinned.bytes(), pinned.room());
/// }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[doc(alias = "RLIMIT_MEMLOCK")]
pub struct PinnedMemory {
    bytes: u64,
    limit: Option<u64>,
}

impl PinnedMemory {
    /// The values now, from `limits`, `status` and `uid_map` of `/proc/self`; `None` if those are hidden.
    pub fn current() -> Option<Self> {
        let [limits, status, user_ids] = ["limits", "status", "uid_map"]
            .map(|name| fs::read_to_string(format!("/proc/self/{name}")).ok());
        Self::read(&limits?, &status?, &user_ids?)
    }

    fn read(limits: &str, status: &str, user_ids: &str) -> Option<Self> {
        const CAP_IPC_LOCK: u64 = 1 << 14;
        // The first is the soft limit, which holds.
        let limit = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
        let limit = match limit.split_whitespace().next()? {
            "unlimited" => None,
            number => Some(number.parse::<u64>().ok()?),
        };
        let field = |name| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let kib = field("VmPin:")?.strip_suffix("kB")?.trim().parse::<u64>().ok()?;
        let capabilities = u64::from_str_radix(field("CapEff:")?, 16).ok()?;
        // The kernel ignores capabilities of other user namespaces here.
        let first_namespace = user_ids.split_whitespace().eq(["0", "0", "4294967295"]);
        let exempt = capabilities & CAP_IPC_LOCK != 0 && first_namespace;
        Some(Self { bytes: kib.saturating_mul(1024), limit: limit.filter(|_| !exempt) })
    }

    /// The bytes that are pinned.
    pub const fn bytes(self) -> u64 {
        self.bytes
    }

    /// The most bytes that may be pinned: `RLIMIT_MEMLOCK`, or `None` without a limit.
    pub const fn limit(self) -> Option<u64> {
        self.limit
    }

    /// The bytes that may be pinned in addition; `u64::MAX` without a limit.
    pub const fn room(self) -> u64 {
        match self.limit {
            Some(limit) => limit.saturating_sub(self.bytes),
            None => u64::MAX,
        }
    }

    /// Checks that the kernel would let this process pin `bytes` more for a device.
    ///
    /// Call it before memory is brought in and pinned, which takes long. Memory that several devices pin counts
    /// once for each: ask for the sum.
    ///
    /// # Errors
    ///
    ///  - `ENOMEM`: they are more than [`room`](Self::room). The error names both numbers.
    pub fn check(domain: &ProtectionDomain<'_>, bytes: usize) -> Result<()> {
        Self::refusal("ibv_reg_mr", domain, bytes).map_or(Ok(()), Err)
    }

    #[cold]
    pub(super) fn refusal(
        verb: &'static str,
        domain: &ProtectionDomain<'_>,
        bytes: usize,
    ) -> Option<Error> {
        if is_software(domain) {
            return None;
        }
        let room = Self::current()?.room();
        let what =
            "the region's length in bytes, by what is pinned and RLIMIT_MEMLOCK (ulimit -l),";
        let detail = Detail::Range { what, value: bytes as u64, low: 0, high: room };
        (bytes as u64 > room).then(|| Error::with(verb, libc::ENOMEM, detail))
    }
}

/// One of this process pins nothing.
fn is_software(domain: &ProtectionDomain<'_>) -> bool {
    let guid = |hooks: &Hooks| {
        // SAFETY: the context is live, and with it the device.
        unsafe { (hooks.guid)((*domain.context().as_raw()).device) }
    };
    hooks().and_then(guid).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_says_what_became_of_the_region() {
        for (returned, errno, state) in [
            (-1, libc::EINVAL, ReregisteredState::Unchanged),
            (-2, libc::ENOMEM, ReregisteredState::Unchanged),
            (-3, libc::ENOMEM, ReregisteredState::Changed),
            (-4, libc::EIO, ReregisteredState::Lost),
            (-4, libc::EOPNOTSUPP, ReregisteredState::Unchanged),
            (-5, libc::EIO, ReregisteredState::Lost),
            (-77, 0, ReregisteredState::Lost),
            (12, libc::ENOMEM, ReregisteredState::Lost),
        ] {
            assert_eq!(ReregisterError::from_c(returned, errno).state, state, "{returned}");
        }
        let error = ReregisterError::from_c(-4, libc::EIO);
        let text = error.to_string();
        assert!(text.starts_with("ibv_rereg_mr: ") && text.contains("no request"), "{text}");
        assert_eq!(Error::from(error).raw_os_error(), Some(libc::EIO));
    }

    const FIRST: &str = "         0          0 4294967295\n";

    fn limits(soft: &str) -> String {
        format!(
            "Limit  Soft Limit  Hard Limit  Units\nMax locked memory         {soft}  unlimited  bytes\n"
        )
    }

    fn status(pinned: u64, capabilities: u64) -> String {
        format!("Name:\tx\nVmLck:\t 9 kB\nVmPin:\t  {pinned} kB\nCapEff:\t{capabilities:016x}\n")
    }

    #[test]
    fn room_is_what_the_limit_leaves() {
        let memory = PinnedMemory::read(&limits("65536"), &status(16, 0), FIRST).unwrap();
        assert_eq!((memory.bytes(), memory.limit(), memory.room()), (16384, Some(65536), 49152));
        let memory = PinnedMemory::read(&limits("8192"), &status(16, 0), FIRST).unwrap();
        assert_eq!(memory.room(), 0, "the limit was lowered");
        let memory = PinnedMemory::read(&limits("unlimited"), &status(16, 0), FIRST).unwrap();
        assert_eq!((memory.limit(), memory.room()), (None, u64::MAX));
    }

    #[test]
    fn only_the_capability_of_the_first_user_namespace_exempts() {
        let limit = |capabilities, ids| {
            PinnedMemory::read(&limits("65536"), &status(0, capabilities), ids).unwrap().limit()
        };
        assert_eq!(limit(1 << 14, FIRST), None);
        assert_eq!(limit(!(1 << 14), FIRST), Some(65536));
        assert_eq!(limit(1 << 14, "0 1000 1\n"), Some(65536), "root of a container");
    }

    #[test]
    fn a_file_of_another_form_is_not_guessed_at() {
        for text in ["", "VmPin:\t0 kB\n", "CapEff:\t0\n", "VmPin:\tx kB\nCapEff:\t0\n"] {
            assert_eq!(PinnedMemory::read(&limits("1"), text, FIRST), None, "{text}");
        }
        for text in [String::new(), limits("many")] {
            assert_eq!(PinnedMemory::read(&text, &status(1, 0), FIRST), None, "{text}");
        }
    }
}
