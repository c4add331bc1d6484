use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::base::{Error, Result, c_enum, ffi};

c_enum! {
    /// `enum ibv_fork_status`: whether a program that uses RDMA may fork.
    #[doc(alias = "ibv_fork_status")]
    pub enum ForkStatus: ibv_fork_status(u32) {
        /// [`fork_init`] was not called. After a fork, the parent's writes to registered memory may go to
        /// pages that the device does not see.
        Disabled = IBV_FORK_DISABLED,
        /// The child does not get registered memory: touching it kills the child, not the parent.
        Enabled = IBV_FORK_ENABLED,
        /// The kernel (5.12 and later) copies pinned pages for the child. Parent and device keep sharing
        /// memory, also for requests in flight.
        Unneeded = IBV_FORK_UNNEEDED,
    }
}

/// A device was opened. `ibv_fork_init` takes no lock: a thread that registers memory would walk a tree that does not
/// exist yet.
static OPENED: Mutex<bool> = Mutex::new(false);

/// To open a device, set it, drop the guard, and open. To list devices, hold it: libibverbs may call `ibv_fork_init`
/// (`RDMAV_FORK_SAFE`), which reads files of the kernel and calls no verb.
pub(crate) fn exclusive() -> MutexGuard<'static, bool> {
    OPENED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `ibv_fork_init`: makes `fork` safe for the parent, on kernels that need it.
///
/// Call it before opening a device; nothing calls it implicitly, as it slows down registering and
/// deregistering. A child that touches a registered page, or other data on that page, is killed. It must
/// never use an object of this crate, and should soon call `exec`.
///
/// # Errors
///
///  - `EINVAL`: a device was opened already.
///  - `ENOSYS`: the kernel lacks `madvise(MADV_DONTFORK)`.
///  - `ENOMEM`: out of memory.
#[doc(alias = "ibv_fork_init")]
pub fn fork_init() -> Result<()> {
    const VERB: &str = "ibv_fork_init";
    let opened = exclusive();
    let reason = "call fork_init before any device is opened";
    Error::invalid_if(*opened && status() == ForkStatus::Disabled, VERB, reason)?;
    // SAFETY: no device was opened, so no thread registers memory; or fork support is on or unneeded, and this does
    // nothing.
    ffi::status(VERB, unsafe { ffi::ibv_fork_init() })
}

/// `ibv_is_fork_initialized`: whether this program may fork while memory is registered.
#[doc(alias = "ibv_is_fork_initialized")]
pub fn is_fork_initialized() -> ForkStatus {
    let _alone = exclusive();
    status()
}

fn status() -> ForkStatus {
    // SAFETY: it only reads, and the callers hold the lock.
    unsafe { ffi::ibv_is_fork_initialized() }.into()
}

/// A number that tells a process from its parent: the C library's `fork` gives the child another one, also if both have the same
/// process ID. What was made under one number is not to be used under another.
///
/// A child of `_Fork`, or of the system call alone, has its parent's number: neither calls handlers of `pthread_atfork`. Such a
/// child has another process ID.
pub fn forks() -> u32 {
    static FORKS: AtomicU32 = AtomicU32::new(0);
    static COUNTS: AtomicBool = AtomicBool::new(false);
    extern "C" fn count() {
        FORKS.fetch_add(1, Ordering::Relaxed);
    }
    // Two threads may do this, and each fork then counts twice. If one waited for the other, a child without that thread would
    // wait for ever.
    if !COUNTS.load(Ordering::Acquire) {
        // SAFETY: the function may be called in any child: it changes an atomic only. If memory is short, a child that
        // goes on to use its parent's device may disturb that device's connections, as it may with its sockets.
        unsafe { libc::pthread_atfork(None, None, Some(count)) };
        COUNTS.store(true, Ordering::Release);
    }
    FORKS.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "calls libibverbs")]
    fn the_status_is_a_known_one() {
        let status = is_fork_initialized();
        assert!(!matches!(status, ForkStatus::Unknown(_)), "{status:?}");
        assert_eq!(ForkStatus::from(ffi::ibv_fork_status(9)), ForkStatus::Unknown(9));
    }
}
