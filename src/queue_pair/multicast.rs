//! Multicast groups.

use super::QueuePair;
use super::object::Object;
use super::transport::Transport;
use crate::device::Gid;
use crate::error::{Error, Result};
use crate::ffi;
use crate::queue_pair_state::QueuePairType;

impl<T: Transport> QueuePair<'_, T> {
    /// `ibv_attach_mcast`: lets a UD queue pair receive the messages to the multicast group `gid`.
    ///
    /// On InfiniBand, `lid` is the group's LID, and the port must have joined the group through the subnet
    /// manager. On RoCE `lid` is 0, and `gid` is the group's IP address. Destroying a queue pair first
    /// detaches it from its groups.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: it is not a UD queue pair, or `gid` is not a multicast GID.
    ///  - `ENOMEM`: the device has no group left, or the group has no room left.
    #[doc(alias = "ibv_attach_mcast")]
    pub fn attach_multicast(&mut self, gid: Gid, lid: u16) -> Result<()> {
        const VERB: &str = "ibv_attach_mcast";
        self.check_multicast(VERB, gid)?;
        if self.object.groups.try_reserve(1).is_err() {
            return Err(Error::new(VERB, libc::ENOMEM));
        }
        // SAFETY: the queue pair is live, and the GID is read during the call only.
        let returned = unsafe { ffi::ibv_attach_mcast(self.as_raw(), &gid.into(), lid) };
        ffi::status(VERB, returned)?;
        self.object.groups.push((gid, lid));
        Ok(())
    }

    /// `ibv_detach_mcast`: leaves the multicast group again.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the queue pair is not attached to that group.
    #[doc(alias = "ibv_detach_mcast")]
    pub fn detach_multicast(&mut self, gid: Gid, lid: u16) -> Result<()> {
        const VERB: &str = "ibv_detach_mcast";
        self.check_multicast(VERB, gid)?;
        // SAFETY: as in `attach_multicast`.
        let returned = unsafe { ffi::ibv_detach_mcast(self.as_raw(), &gid.into(), lid) };
        ffi::status(VERB, returned)?;
        if let Some(at) = self.object.groups.iter().position(|&group| group == (gid, lid)) {
            self.object.groups.swap_remove(at);
        }
        Ok(())
    }

    fn check_multicast(&self, verb: &'static str, gid: Gid) -> Result<()> {
        if self.queue_pair_type() != QueuePairType::UnreliableDatagram {
            return Err(Error::invalid(verb, "only UD queue pairs receive multicast"));
        }
        Error::invalid_if(!gid.is_multicast(), verb, "the GID is not a multicast GID")?;
        Ok(())
    }
}

impl Object<'_> {
    /// Leaves all groups: the kernel refuses to destroy a queue pair that is in one.
    pub(super) fn leave_groups(&mut self) {
        for (gid, lid) in std::mem::take(&mut self.groups) {
            // SAFETY: as in `attach_multicast`. If it fails, destroying fails too, and reports that.
            let _ = unsafe { ffi::ibv_detach_mcast(self.raw.as_ptr(), &gid.into(), lid) };
        }
    }
}
