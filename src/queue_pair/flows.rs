//! The flows of a queue pair, and its multicast groups.

use super::QueuePair;
use super::object::Object;
use super::transport::Transport;
use crate::device::Gid;
use crate::error::{Error, Result};
use crate::ffi;
use crate::flow::{Counter, Counters, FlowId, Rule};
use crate::handle::Leak;
use crate::parent::Parent;
use crate::queue_pair_state::QueuePairType;

/// Flow steering, for raw packet and UD queue pairs.
impl<'res, T: Transport> QueuePair<'res, T> {
    /// `ibv_create_flow`: directs the packets that match `rule` to this queue pair. The flow ends with
    /// [`destroy_flow`](Self::destroy_flow) or with the queue pair.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: this is neither a raw packet nor a UD queue pair; the device has no such port; a default
    ///    rule or a sniffer matches headers; the rule's counters or action belong to another context, or have
    ///    no counter attached; or the device does not support the headers, or not in this order.
    ///  - `EOPNOTSUPP`, `ENOSYS`: the device has no flows, or not these options or actions.
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
    ///  - `EINVAL`: the flow has ended already, or belongs to another queue pair.
    ///
    /// If the device cannot destroy the flow, it is [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed),
    /// with this queue pair and all that it was made from.
    #[doc(alias = "ibv_destroy_flow")]
    pub fn destroy_flow(&mut self, flow: FlowId) -> Result<()> {
        let (raw, parents) = (&self.object.raw, &self.object.parents);
        self.object.flows.destroy(flow, || {
            raw.leak();
            parents.leak();
        })
    }

    /// `ibv_attach_counters_point_flow`: counts the packets of a flow that exists, at `index` of the
    /// counters. See [`Counters::attach`] for flows that are created later, which is all that mlx5 can
    /// do.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the flow has ended already, or belongs to another queue pair, or the device has no such
    ///    index.
    ///  - `EOPNOTSUPP`: the device cannot attach counters to a flow that exists.
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

impl Object<'_> {
    /// Destroys all flows: the kernel refuses to destroy a queue pair that has one.
    pub(super) fn end_flows(&mut self) {
        let (raw, parents) = (&self.raw, &self.parents);
        self.flows.destroy_all(|| {
            raw.leak();
            parents.leak();
        });
    }
}

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

    /// Leaves all groups.
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

impl Object<'_> {
    /// Leaves all groups: the kernel refuses to destroy a queue pair that is in one.
    pub(super) fn leave_groups(&mut self) {
        for (gid, lid) in std::mem::take(&mut self.groups) {
            // SAFETY: as in `attach_multicast`. If it fails, destroying fails too, and reports that.
            let _ = unsafe { ffi::ibv_detach_mcast(self.raw.as_ptr(), &gid.into(), lid) };
        }
    }
}
