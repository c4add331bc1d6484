//! Living with `fork`.

use crate::foreign_enum::foreign_enum;
use crate::{Result, ffi};

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

/// `ibv_fork_init`: makes `fork` safe for the parent, on kernels that need it.
///
/// It is never called implicitly, since registering and deregistering cost more after it. It must be
/// called before anything else of this crate. Registered pages are then not there in the child: a
/// child that touches one, or other data on the same page, is killed. The child must not use any
/// object of this crate in any case, and should soon call `exec`.
///
/// # Errors
///
///  - `EINVAL`: memory was registered already.
///  - `ENOSYS`: the kernel does not have `madvise(MADV_DONTFORK)`.
///  - `ENOMEM`: out of memory.
#[doc(alias = "ibv_fork_init")]
pub fn fork_init() -> Result<()> {
    // SAFETY: it may be called at any time; called too late, it fails.
    ffi::status("ibv_fork_init", unsafe { ffi::ibv_fork_init() })
}

/// `ibv_is_fork_initialized`: whether this program may fork while memory is registered.
#[doc(alias = "ibv_is_fork_initialized")]
pub fn is_fork_initialized() -> ForkStatus {
    // SAFETY: it only reads.
    unsafe { ffi::ibv_is_fork_initialized() }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_is_a_known_one() {
        let status = is_fork_initialized();
        assert!(!matches!(status, ForkStatus::Unknown(_)), "{status:?}");
        assert_eq!(ForkStatus::from(ffi::ibv_fork_status(9)), ForkStatus::Unknown(9));
    }
}
