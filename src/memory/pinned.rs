//! How much memory the kernel lets this process pin.

use std::fs;

use crate::domain::ProtectionDomain;
use crate::error::{Error, Result};
use crate::hooks::{Hooks, hooks};

/// How much memory this process has pinned for devices, and how much the kernel lets it pin.
///
/// A registration pins its pages, unless it is [on demand](crate::RegionOptions::on_demand) or on a software
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
        // The soft limit, which holds, then the hard one.
        let limit = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
        let limit = match limit.split_whitespace().next()? {
            "unlimited" => None,
            number => Some(number.parse::<u64>().ok()?),
        };
        let field = |name| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        let kib = field("VmPin:")?.strip_suffix("kB")?.trim().parse::<u64>().ok()?;
        let capabilities = u64::from_str_radix(field("CapEff:")?, 16).ok()?;
        // The kernel here ignores capabilities of any user namespace but the first.
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

    /// The error for a registration that this limit refuses.
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
        (bytes as u64 > room).then(|| Error::beyond_memlock(verb, bytes as u64, room))
    }
}

/// Whether the device is a software device of this process, which pins nothing.
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
