//! The types and states of queue pairs, and what can be wrong with a transition.

use crate::base::c_enum;

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

/// Why a queue pair cannot change to a state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Problem {
    Missing(&'static str),
    NotAllowed(&'static str),
    Impossible,
}
