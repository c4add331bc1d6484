//! The types and states of queue pairs, and the error of a wrong transition.

use std::fmt;

use crate::base::{c_enum, ffi};

c_enum! {
    /// `enum ibv_qp_type`: the transport service of a queue pair.
    #[doc(alias = "ibv_qp_type")]
    pub enum QueuePairType: ibv_qp_type(u32) {
        /// RC: connected to one peer. Every message arrives once, whole and in order, or its sender gets an error.
        ReliableConnected = IBV_QPT_RC,
        /// UC: connected to one peer. Messages may be lost; those that arrive are whole.
        UnreliableConnected = IBV_QPT_UC,
        /// UD: datagrams of up to the MTU to any peer. A receive has 40 bytes of global route header before the
        /// message.
        UnreliableDatagram = IBV_QPT_UD,
        /// Whole Ethernet frames.
        RawPacket = IBV_QPT_RAW_PACKET,
        /// The sending side of an extended reliable connection.
        XrcSend = IBV_QPT_XRC_SEND,
        /// The receiving side of an extended reliable connection.
        XrcReceive = IBV_QPT_XRC_RECV,
        /// A transport of the provider's own, such as EFA's SRD.
        Driver = IBV_QPT_DRIVER,
    }
}

impl QueuePairType {
    /// The words before "queue pair" in an error.
    pub(crate) const fn named(self) -> &'static str {
        match self {
            Self::ReliableConnected => "an RC",
            Self::UnreliableConnected => "a UC",
            Self::UnreliableDatagram => "a UD",
            Self::RawPacket => "a raw packet",
            Self::XrcSend => "a sending XRC",
            Self::XrcReceive => "a receiving XRC",
            Self::Driver | Self::Unknown(_) => "another",
        }
    }
}

c_enum! {
    /// `enum ibv_qp_state`: the state of a queue pair.
    ///
    /// [`PreparedQueuePair::handshake`](crate::PreparedQueuePair::handshake) takes a queue pair from
    /// RESET to RTS; [`QueuePair::modify`](crate::QueuePair::modify) takes single steps.
    #[doc(alias = "ibv_qp_state")]
    pub enum QueuePairState: ibv_qp_state(u32), "state" {
        /// RESET: the state after creation. Nothing can be posted.
        Reset = IBV_QPS_RESET, "RESET";
        /// INIT: receives can be posted; messages are not answered yet.
        Init = IBV_QPS_INIT, "INIT";
        /// RTR: messages are received.
        ReadyToReceive = IBV_QPS_RTR, "RTR";
        /// RTS: messages are received and sent.
        ReadyToSend = IBV_QPS_RTS, "RTS";
        /// SQD: messages are received. Sends that have begun complete; the rest waits.
        SendQueueDrained = IBV_QPS_SQD, "SQD";
        /// SQE: a send failed on an unreliable queue pair. Messages are received; new sends are flushed.
        SendQueueError = IBV_QPS_SQE, "SQE";
        /// ERR: nothing is sent or received; every request is flushed.
        Error = IBV_QPS_ERR, "ERR";
    }
}

impl QueuePairState {
    /// All named states.
    pub const ALL: [Self; 7] = [
        Self::Reset,
        Self::Init,
        Self::ReadyToReceive,
        Self::ReadyToSend,
        Self::SendQueueDrained,
        Self::SendQueueError,
        Self::Error,
    ];
}

/// Small, because an [`Error`](crate::Error) holds it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct TransitionError {
    problem: Problem,
    from: u8,
    to: u8,
    kind: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Problem {
    Missing(&'static str),
    NotAllowed(&'static str),
    Impossible,
}

impl TransitionError {
    pub(crate) fn new(
        problem: Problem,
        kind: QueuePairType,
        from: QueuePairState,
        to: QueuePairState,
    ) -> Self {
        // All named values fit.
        let byte = |value: u32| u8::try_from(value).unwrap_or(u8::MAX);
        let state = |state| byte(ffi::ibv_qp_state::from(state).0);
        let kind = byte(ffi::ibv_qp_type::from(kind).0);
        Self { problem, from: state(from), to: state(to), kind }
    }
}

impl fmt::Display for TransitionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = |raw: u8| QueuePairState::from(ffi::ibv_qp_state(raw.into()));
        let (from, to) = (state(self.from), state(self.to));
        match self.problem {
            Problem::Missing(name) => write!(f, "{name} is missing for {from} to {to}")?,
            Problem::NotAllowed(name) => write!(f, "{name} is not allowed for {from} to {to}")?,
            Problem::Impossible => write!(f, "there is no way from {from} to {to}")?,
        }
        let kind = QueuePairType::from(ffi::ibv_qp_type(self.kind.into())).named();
        write!(f, " of {kind} queue pair")
    }
}
