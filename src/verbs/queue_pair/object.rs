//! The C object of a queue pair, with its flows and multicast groups.

use super::attributes::{AttributeMask, QueuePairAttributes};
use super::connection_settings::{Answers, ConnectionSettings};
use super::endpoint::QueuePairEndpoint;
use super::message_limits::MessageLimits;
use super::shared_receive_queue::SharedReceiveQueue;
use super::transition::StateTransition;
use super::transport::DriverTransport;
use crate::base::{
    Error, Handle, Leak, Parent, QueuePairState, QueuePairType, Result, debug, ffi, object,
    resource,
};
#[cfg(rdma_core_65)]
use crate::verbs::completion::{CompletionCounter, QueueRef};
use crate::verbs::device::Gid;
use crate::verbs::domain::{DomainRef, XrcDomain};
use crate::verbs::flow::Flows;
use crate::verbs::queue_pair::SendOperations;

use std::ptr::NonNull;

object!(ibv_qp, ibv_destroy_qp, event_acks);

pub(super) struct Object<'res> {
    pub(super) raw: Handle<ffi::ibv_qp>,
    pub(super) extended: Option<NonNull<ffi::ibv_qp_ex>>,
    pub(super) properties: Properties,
    pub(super) parents: Parents<'res>,
    /// With their LIDs.
    pub(super) groups: Vec<(Gid, u16)>,
    pub(super) flows: Flows<'res>,
    #[cfg(rdma_core_65)]
    pub(super) counters: Vec<Parent<'res, CompletionCounter<'res>>>,
    /// Given back on destruction.
    pub(super) _answers: Answers,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Properties {
    pub(super) kind: QueuePairType,
    pub(super) has_peer: bool,
    pub(super) capacities: ffi::ibv_qp_cap,
    pub(super) messages: MessageLimits,
    pub(super) settings: ConnectionSettings,
    pub(super) endpoint: QueuePairEndpoint,
    /// Empty without the extended posting interface.
    pub(super) operations: SendOperations,
    pub(super) functions: u64,
    pub(super) driver: Option<DriverTransport>,
}

/// The objects that outlive the queue pair.
#[derive(Clone)]
pub(super) struct Parents<'res> {
    pub(super) domain: DomainRef<'res>,
    pub(super) send_cq: QueueRef<'res>,
    pub(super) receive_cq: QueueRef<'res>,
    pub(super) srq: Option<Parent<'res, SharedReceiveQueue<'res>>>,
    pub(super) xrc_domain: Option<Parent<'res, XrcDomain<'res>>>,
}

impl Leak for Parents<'_> {
    fn leak(&self) {
        self.domain.leak();
        self.send_cq.leak();
        self.receive_cq.leak();
        self.srq.leak();
        self.xrc_domain.leak();
    }
}

impl Object<'_> {
    pub(super) fn destroy(&mut self) -> Result<()> {
        if !self.raw.is_gone() {
            self.leave_groups();
            // The kernel refuses to destroy a queue pair that has flows.
            self.flows.destroy_all(&self.raw, &self.parents);
        }
        // After a failed destruction the device may use them for ever.
        self.raw.destroy().inspect_err(|_| {
            self.parents.leak();
            #[cfg(rdma_core_65)]
            Leak::leak(&self.counters);
        })
    }

    /// The kernel refuses to destroy a queue pair that is in a group.
    pub(super) fn leave_groups(&mut self) {
        for (gid, lid) in std::mem::take(&mut self.groups) {
            // SAFETY: as in `attach_multicast`. Destroying reports a failure.
            let _ = unsafe { ffi::ibv_detach_mcast(self.raw.as_ptr(), &gid.into(), lid) };
        }
    }
}

impl Drop for Object<'_> {
    fn drop(&mut self) {
        let _ = self.destroy();
    }
}

// SAFETY: libibverbs allows every verb on a queue pair from any thread.
unsafe impl Send for Object<'_> {}
// SAFETY: as above; methods that change the queue pair or post to it take `&mut self`.
unsafe impl Sync for Object<'_> {}

const VERB: &str = "ibv_open_qp";

/// A receiving XRC queue pair, opened by number, perhaps from another process whose XRC domain belongs to the same
/// file.
///
/// The device destroys it when all processes that created or opened it have closed it. Its events reach all of them.
pub struct OpenedQueuePair<'res> {
    raw: Handle<ffi::ibv_qp>,
    domain: Parent<'res, XrcDomain<'res>>,
}

resource! {
    /// `ibv_destroy_qp`: closes the queue pair and reports a failure, which a drop ignores.
    ///
    /// # Errors
    ///
    /// The provider's errno value. The queue pair is then
    /// [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with its domain.
    #[doc(alias = "ibv_destroy_qp")]
    OpenedQueuePair<'res>: raw of ibv_qp, domain
}

impl<'res> OpenedQueuePair<'res> {
    /// `ibv_open_qp`: opens the receiving XRC queue pair of this number.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the domain has no such queue pair, or the number has more than 24 bits.
    ///  - `EOPNOTSUPP`, `ENOSYS`: the device has no extended reliable connections.
    ///  - `ENOMEM`: out of memory.
    #[doc(alias = "ibv_open_qp")]
    pub fn open(domain: impl Into<Parent<'res, XrcDomain<'res>>>, number: u32) -> Result<Self> {
        use ffi::ibv_qp_open_attr_mask as mask;

        let domain = domain.into();
        Error::within(VERB, "the number of the queue pair", number, 0, 0xff_ffff_u32)?;
        let fields =
            mask::IBV_QP_OPEN_ATTR_NUM | mask::IBV_QP_OPEN_ATTR_XRCD | mask::IBV_QP_OPEN_ATTR_TYPE;
        let mut attributes = ffi::ibv_qp_open_attr {
            comp_mask: fields.0,
            qp_num: number,
            xrcd: domain.as_raw(),
            qp_type: ffi::ibv_qp_type::IBV_QPT_XRC_RECV,
            ..Default::default()
        };
        // SAFETY: context and domain are live, and kept; a queue pair that comes back is ours alone.
        let raw = unsafe {
            Handle::new(VERB, ffi::ibv_open_qp(domain.context().as_raw(), &mut attributes))
        }?;
        Ok(Self { raw, domain })
    }

    /// `ibv_modify_qp`, as [`QueuePair::modify`](crate::QueuePair::modify).
    ///
    /// # Errors
    ///
    /// Those of [`QueuePair::modify`](crate::QueuePair::modify).
    #[doc(alias = "ibv_modify_qp")]
    pub fn modify(&mut self, transition: StateTransition) -> Result<()> {
        transition.check(QueuePairType::XrcReceive, self.state()?)?;
        // SAFETY: the queue pair is live.
        unsafe { transition.apply(self.as_raw()) }
    }

    /// `ibv_query_qp`: the state.
    ///
    /// # Errors
    ///
    /// Those of [`QueuePair::state`](crate::QueuePair::state).
    #[doc(alias = "ibv_query_qp")]
    pub fn state(&self) -> Result<QueuePairState> {
        // SAFETY: the queue pair is live.
        let queried = unsafe { QueuePairAttributes::query(self.as_raw(), AttributeMask::STATE) }?;
        Ok(queried.as_raw().qp_state.into())
    }

    /// Its number.
    pub fn number(&self) -> u32 {
        // SAFETY: the queue pair is live.
        unsafe { (*self.as_raw()).qp_num }
    }

    /// The domain that it was opened in.
    pub fn xrc_domain(&self) -> &XrcDomain<'res> {
        &self.domain
    }
}

debug! { OpenedQueuePair<'_>, self, number: self.number(), .. }
