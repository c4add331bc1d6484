//! Access flags of regions, memory windows and queue pairs.

use crate::ffi;

bitflags::bitflags! {
    /// `ibv_access_flags`: what the device may do to registered memory, and which operations of a peer
    /// a queue pair accepts.
    ///
    /// The device can always read registered memory for a local send or write. Every other access must
    /// be requested here, and nothing that a peer could use is on by default.
    #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
    pub struct AccessFlags: u32 {
        /// The device writes the memory for local receives, reads and atomics. Remote write and
        /// remote atomic access need it too.
        const LOCAL_WRITE = ffi::ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;
        /// A peer that knows the rkey may write.
        const REMOTE_WRITE = ffi::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0;
        /// A peer that knows the rkey may read.
        const REMOTE_READ = ffi::ibv_access_flags::IBV_ACCESS_REMOTE_READ.0;
        /// A peer that knows the rkey may carry out atomics.
        const REMOTE_ATOMIC = ffi::ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC.0;
        /// A memory window may be bound to the region.
        const MW_BIND = ffi::ibv_access_flags::IBV_ACCESS_MW_BIND.0;
        /// Addresses in the region count from 0 rather than from the buffer's address.
        const ZERO_BASED = ffi::ibv_access_flags::IBV_ACCESS_ZERO_BASED.0;
        /// Pages are brought in when the device needs them instead of being pinned (on-demand
        /// paging).
        const ON_DEMAND = ffi::ibv_access_flags::IBV_ACCESS_ON_DEMAND.0;
        /// The memory consists of huge pages.
        const HUGETLB = ffi::ibv_access_flags::IBV_ACCESS_HUGETLB.0;
        /// A peer may flush its writes to global visibility.
        const FLUSH_GLOBAL = ffi::ibv_access_flags::IBV_ACCESS_FLUSH_GLOBAL.0;
        /// A peer may flush its writes to persistence.
        const FLUSH_PERSISTENT = ffi::ibv_access_flags::IBV_ACCESS_FLUSH_PERSISTENT.0;
        /// The device may write in any order (PCIe relaxed ordering): a completion then guarantees that
        /// the whole message has arrived, but the arrival of its last byte does not. Ignored on devices
        /// without support.
        const RELAXED_ORDERING = ffi::ibv_access_flags::IBV_ACCESS_RELAXED_ORDERING.0;
    }
}

impl Default for AccessFlags {
    /// Local write access, and no access for peers.
    fn default() -> Self {
        Self::LOCAL_WRITE
    }
}
