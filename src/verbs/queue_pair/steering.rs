//! The flows and multicast groups of a queue pair.

use super::QueuePair;
use super::object::Object;
use super::transport::Transport;
use crate::base::{Error, Parent, QueuePairType, Result, ffi};
use crate::verbs::device::Gid;
use crate::verbs::flow::{Counter, Counters, FlowId, Rule};

/// Flow steering, for raw packet and UD queue pairs.
impl<'res, T: Transport> QueuePair<'res, T> {
    /// `ibv_create_flow`: directs the packets that match `rule` to this queue pair, until
    /// [`destroy_flow`](Self::destroy_flow) or the end of the queue pair.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: this is no raw packet or UD queue pair; the device has no such port; a default rule or sniffer
    ///    matches headers; the counters or action belong to another context; the counters have no counter attached; or
    ///    the device does not support these headers in this order.
    ///  - `EOPNOTSUPP`, `ENOSYS`: the device has no flows, or lacks an option or action.
    ///  - `EPERM`: the process may not receive raw packets (`CAP_NET_RAW`).
    ///  - `EEXIST`: the device has the same rule already.
    ///  - `EBUSY`: default rules and sniffers are taken.
    ///  - `ENOMEM`: the device has no flow left.
    #[doc(alias = "ibv_create_flow")]
    pub fn create_flow(&mut self, rule: &Rule<'res>) -> Result<FlowId> {
        let (raw, kind) = (self.as_raw(), self.queue_pair_type());
        let context = self.object.parents.domain.context();
        // SAFETY: the queue pair is live, of that type, and destroys its flows before itself.
        unsafe { self.object.flows.create(raw, kind, context, rule) }
    }

    /// `ibv_destroy_flow`: ends a flow.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the flow has ended, or belongs to another queue pair.
    ///
    /// If the device cannot destroy the flow, it is [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed),
    /// with this queue pair and its parents.
    #[doc(alias = "ibv_destroy_flow")]
    pub fn destroy_flow(&mut self, flow: FlowId) -> Result<()> {
        let Object { raw, parents, flows, .. } = &mut self.object;
        flows.destroy(flow, raw, parents)
    }

    /// `ibv_attach_counters_point_flow`: counts the packets of an existing flow, at `index` of the counters. mlx5 has
    /// only [`Counters::attach`], for later flows.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the flow has ended, or belongs to another queue pair, or the device has no such index.
    ///  - `EOPNOTSUPP`: the device cannot count an existing flow.
    ///  - `ENOMEM`: out of memory.
    #[doc(alias = "ibv_attach_counters_point_flow")]
    pub fn attach_counters(
        &mut self,
        flow: FlowId,
        counters: impl Into<Parent<'res, Counters<'res>>>,
        counter: Counter,
        index: u32,
    ) -> Result<()> {
        self.object.flows.attach(flow, counters.into(), counter, index)
    }
}

impl<T: Transport> QueuePair<'_, T> {
    /// `ibv_attach_mcast`: receives the messages to the multicast group `gid` on a UD queue pair, until it is detached
    /// or destroyed.
    ///
    /// On InfiniBand, `lid` is the group's LID, and the port must have joined the group through the subnet manager. On
    /// RoCE `lid` is 0, and `gid` is the group's IP address.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: it is not a UD queue pair, or `gid` is not a multicast GID.
    ///  - `ENOMEM`: the device has no group left, or the group no room.
    #[doc(alias = "ibv_attach_mcast")]
    pub fn attach_multicast(&mut self, gid: Gid, lid: u16) -> Result<()> {
        const VERB: &str = "ibv_attach_mcast";
        self.check_multicast(VERB, gid)?;
        if self.object.groups.try_reserve(1).is_err() {
            return Err(Error::new(VERB, libc::ENOMEM));
        }
        // SAFETY: the queue pair is live, and the verb reads the GID during the call only.
        let returned = unsafe { ffi::ibv_attach_mcast(self.as_raw(), &gid.into(), lid) };
        ffi::status(VERB, returned)?;
        self.object.groups.push((gid, lid));
        Ok(())
    }

    /// `ibv_detach_mcast`: leaves the multicast group.
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

    #[cfg(feature = "channel")]
    pub(crate) fn leave_groups(&mut self) {
        self.object.leave_groups();
    }

    fn check_multicast(&self, verb: &'static str, gid: Gid) -> Result<()> {
        if self.queue_pair_type() != QueuePairType::UnreliableDatagram {
            return Err(Error::invalid(verb, "only UD queue pairs receive multicast"));
        }
        Error::invalid_if(!gid.is_multicast(), verb, "the GID is not a multicast GID")?;
        Ok(())
    }
}
