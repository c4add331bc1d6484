//! The C object of a queue pair, and what belongs to it, whatever its transport.

use std::ptr::NonNull;

use super::connection_settings::ConnectionSettings;
use super::driver::DriverTransport;
use super::endpoint::QueuePairEndpoint;
use super::first_values::Answers;
use super::message_limits::MessageLimits;
use super::shared_receive_queue::SharedReceiveQueue;
#[cfg(rdma_core_65)]
use crate::completion::CompletionCounter;
use crate::completion::CompletionQueue;
use crate::device::Gid;
use crate::domain::{ProtectionDomain, XrcDomain};
use crate::error::Result;
use crate::ffi;
use crate::flow::Flows;
use crate::handle::{Handle, Leak, object};
use crate::parent::Parent;
use crate::queue_pair::SendOperations;
use crate::queue_pair_state::QueuePairType;

object!(ibv_qp, ibv_destroy_qp, event_subjects);

/// A queue pair, with its transport as a value.
pub(super) struct Object<'res> {
    pub(super) raw: Handle<ffi::ibv_qp>,
    /// The C object's extended posting interface, if it has one.
    pub(super) extended: Option<NonNull<ffi::ibv_qp_ex>>,
    pub(super) properties: Properties,
    pub(super) parents: Parents<'res>,
    /// The multicast groups that it is attached to, with their LIDs.
    pub(super) groups: Vec<(Gid, u16)>,
    /// What it receives, if it takes Ethernet frames.
    pub(super) flows: Flows<'res>,
    /// What counts its operations.
    #[cfg(rdma_core_65)]
    pub(super) counters: Vec<Parent<'res, CompletionCounter<'res>>>,
    /// Given back when it is destroyed.
    pub(super) _answers: Answers,
}

/// The properties that do not change once the queue pair exists, except the settings.
#[derive(Clone, Copy, Debug)]
pub(super) struct Properties {
    pub(super) kind: QueuePairType,
    /// Whether the queue pair has a fixed peer, so that requests do not name one.
    pub(super) has_peer: bool,
    pub(super) capacities: ffi::ibv_qp_cap,
    pub(super) messages: MessageLimits,
    pub(super) settings: ConnectionSettings,
    pub(super) endpoint: QueuePairEndpoint,
    /// The operations of the extended posting interface; empty without the interface.
    pub(super) operations: SendOperations,
    /// The functions that the interface has.
    pub(super) functions: u64,
    /// The provider's own transport, for type `Driver`.
    pub(super) driver: Option<DriverTransport>,
}

/// The parents of a queue pair, held so that they outlive it.
#[derive(Clone)]
pub(super) struct Parents<'res> {
    pub(super) domain: Parent<'res, ProtectionDomain<'res>>,
    pub(super) send_cq: Parent<'res, CompletionQueue<'res>>,
    pub(super) receive_cq: Parent<'res, CompletionQueue<'res>>,
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
            self.end_flows();
        }
        self.raw.destroy().inspect_err(|_| self.leak_parents())
    }
}

impl Object<'_> {
    /// The device may use for ever what it was made from.
    fn leak_parents(&self) {
        self.parents.leak();
        #[cfg(rdma_core_65)]
        Leak::leak(&self.counters);
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
