//! Living with `fork`.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};
use crate::ffi;
use crate::foreign_enum::foreign_enum;

foreign_enum! {
    /// `enum ibv_fork_status`: whether a program that uses RDMA may fork.
    #[doc(alias = "ibv_fork_status")]
    pub enum ForkStatus: ibv_fork_status(u32) {
        /// [`fork_init`] was not called: after a fork, the parent's writes to registered memory may
        /// go to pages that the device does not see.
        Disabled = IBV_FORK_DISABLED,
        /// Registered memory is kept from the child: touching it kills the child, and does nothing to
        /// the parent.
        Enabled = IBV_FORK_ENABLED,
        /// The kernel (5.12 and later) copies pinned pages for the child: nothing is needed. Parent and
        /// device go on seeing the same memory, requests in flight included, and the child has a
        /// copy of its own to write to.
        Unneeded = IBV_FORK_UNNEEDED,
    }
}

/// Whether a device was opened. libibverbs takes no lock when it is told about forks: a thread that
/// registers memory meanwhile would walk a tree that is not there yet.
static OPENED: Mutex<bool> = Mutex::new(false);

/// Keeps all else that concerns forks from happening meanwhile. To be held when a device is opened,
/// which is noted there; and when devices are listed, since libibverbs then looks into the environment
/// (`RDMAV_FORK_SAFE`) and may call `ibv_fork_init` itself.
pub(crate) fn exclusive() -> MutexGuard<'static, bool> {
    OPENED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `ibv_fork_init`: makes `fork` safe for the parent, on kernels that need it.
///
/// It is never called implicitly, since registering and deregistering cost more after it. It must be
/// called before a device is opened. Registered pages are then not there in the child: a child that
/// touches one, or other data on the same page, is killed. The child must not use any object of this
/// crate in any case, and should soon call `exec`.
///
/// # Errors
///
///  - `EINVAL`: a device was opened already.
///  - `ENOSYS`: the kernel does not have `madvise(MADV_DONTFORK)`.
///  - `ENOMEM`: out of memory.
#[doc(alias = "ibv_fork_init")]
pub fn fork_init() -> Result<()> {
    const VERB: &str = "ibv_fork_init";
    let opened = exclusive();
    if *opened && status() == ForkStatus::Disabled {
        return Err(Error::invalid(VERB, "it comes too late: a device was opened already"));
    }
    // SAFETY: no other thread is in libibverbs with memory to register, as there is no device; or
    // this changes nothing.
    ffi::status(VERB, unsafe { ffi::ibv_fork_init() })
}

/// `ibv_is_fork_initialized`: whether this program may fork while memory is registered.
#[doc(alias = "ibv_is_fork_initialized")]
pub fn is_fork_initialized() -> ForkStatus {
    let _alone = exclusive();
    status()
}

fn status() -> ForkStatus {
    // SAFETY: it only reads, and nothing writes meanwhile, as the callers see to.
    unsafe { ffi::ibv_is_fork_initialized() }.into()
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
