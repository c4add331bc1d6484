//! The attributes of a queue pair, as `ibv_query_qp` returns them.

use std::fmt;

use super::address_vector::AddressVector;
use super::state::MigrationState;
use crate::ffi;
use crate::memory::AccessFlags;
use crate::queue_pair_state::QueuePairState;
use crate::settings::{
    AckTimeout, MaxAckRetries, MaxRnrRetries, MaximumTransferUnit, MinRnrTimer,
    PacketSequenceNumber,
};

/// Defines the flags together with C's names of the attributes.
macro_rules! attributes {
    ($($(#[doc = $doc:literal])* $flag:ident = $constant:ident, $name:literal;)+) => {
        bitflags::bitflags! {
            /// `enum ibv_qp_attr_mask`: some of the attributes of a queue pair.
            #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
            #[doc(alias = "ibv_qp_attr_mask")]
            pub struct AttributeMask: u32 {
                $($(#[doc = $doc])* const $flag = ffi::ibv_qp_attr_mask::$constant.0;)+
            }
        }

        impl AttributeMask {
            /// C's name of the first of them.
            pub(super) fn first_name(self) -> Option<&'static str> {
                [$((Self::$flag, $name),)+]
                    .into_iter()
                    .find_map(|(flag, name)| self.contains(flag).then_some(name))
            }
        }
    };
}

attributes! {
    /// The state.
    STATE = IBV_QP_STATE, "qp_state";
    /// The state that a change starts from.
    CURRENT_STATE = IBV_QP_CUR_STATE, "cur_qp_state";
    /// Whether an event reports that the send queue has drained.
    DRAIN_NOTIFICATION = IBV_QP_EN_SQD_ASYNC_NOTIFY, "en_sqd_async_notify";
    /// The operations that the peer may perform.
    ACCESS = IBV_QP_ACCESS_FLAGS, "qp_access_flags";
    /// The index of the partition key.
    PKEY_INDEX = IBV_QP_PKEY_INDEX, "pkey_index";
    /// The port.
    PORT = IBV_QP_PORT, "port_num";
    /// The Q_Key.
    QKEY = IBV_QP_QKEY, "qkey";
    /// The path to the peer.
    PATH = IBV_QP_AV, "ah_attr";
    /// The MTU of the path.
    PATH_MTU = IBV_QP_PATH_MTU, "path_mtu";
    /// How long the peer has to answer.
    ACK_TIMEOUT = IBV_QP_TIMEOUT, "timeout";
    /// How often an unanswered packet is sent again.
    MAX_ACK_RETRIES = IBV_QP_RETRY_CNT, "retry_cnt";
    /// How often a message that found no receive is sent again.
    MAX_RNR_RETRIES = IBV_QP_RNR_RETRY, "rnr_retry";
    /// The number of the first packet that is received.
    RECEIVE_PSN = IBV_QP_RQ_PSN, "rq_psn";
    /// How many reads and atomics may be outstanding.
    MAX_RD_ATOMIC = IBV_QP_MAX_QP_RD_ATOMIC, "max_rd_atomic";
    /// The alternate path, with its own port, partition key index and timeout.
    ALTERNATE_PATH = IBV_QP_ALT_PATH, "alt_ah_attr";
    /// How long the peer waits before it retries a message that found no receive.
    MIN_RNR_TIMER = IBV_QP_MIN_RNR_TIMER, "min_rnr_timer";
    /// The number of the first packet that is sent.
    SEND_PSN = IBV_QP_SQ_PSN, "sq_psn";
    /// How many reads and atomics of the peer are answered at a time.
    MAX_DEST_RD_ATOMIC = IBV_QP_MAX_DEST_RD_ATOMIC, "max_dest_rd_atomic";
    /// The state of path migration.
    MIGRATION_STATE = IBV_QP_PATH_MIG_STATE, "path_mig_state";
    /// The sizes.
    CAPACITIES = IBV_QP_CAP, "cap";
    /// The number of the peer's queue pair.
    REMOTE_NUMBER = IBV_QP_DEST_QPN, "dest_qp_num";
    /// The limit of packet pacing.
    RATE_LIMIT = IBV_QP_RATE_LIMIT, "rate_limit";
}

/// `struct ibv_qp_attr`: the attributes of a queue pair at the time of
/// [`QueuePair::query`](crate::QueuePair::query).
///
/// A getter returns `None` for an attribute that was not queried, or whose value is unknown to the
/// standard. An attribute that was never set, or that the queue pair's type or state does not have, has
/// whatever value the device stores.
#[derive(Clone, Copy)]
#[doc(alias = "ibv_qp_attr")]
pub struct QueuePairAttributes {
    raw: ffi::ibv_qp_attr,
    mask: AttributeMask,
}

/// Defines getters of attributes.
macro_rules! getters {
    ($($(#[$meta:meta])* $name:ident: $type:ty = $flag:ident, |$raw:ident| $value:expr;)+) => {
        impl QueuePairAttributes {
            $(
                $(#[$meta])*
                pub fn $name(&self) -> Option<$type> {
                    let $raw = &self.raw;
                    if self.mask.contains(AttributeMask::$flag) { $value } else { None }
                }
            )+
        }
    };
}

getters! {
    /// The state.
    state: QueuePairState = STATE, |raw| Some(raw.qp_state.into());
    /// Whether the send queue is still draining; in state SQD only.
    is_draining: bool = STATE, |raw| Some(raw.sq_draining != 0);
    /// The port.
    port: u8 = PORT, |raw| Some(raw.port_num);
    /// The index of the partition key.
    pkey_index: u16 = PKEY_INDEX, |raw| Some(raw.pkey_index);
    /// The operations that the peer may perform.
    access: AccessFlags = ACCESS, |raw| Some(AccessFlags::from_bits_retain(raw.qp_access_flags));
    /// The Q_Key of a UD queue pair.
    qkey: u32 = QKEY, |raw| Some(raw.qkey);
    /// The path to the peer.
    path: AddressVector = PATH, |raw| Some(raw.ah_attr.into());
    /// The MTU of the path.
    path_mtu: MaximumTransferUnit = PATH_MTU, |raw| MaximumTransferUnit::from_raw(raw.path_mtu);
    /// The number of the peer's queue pair.
    remote_number: u32 = REMOTE_NUMBER, |raw| Some(raw.dest_qp_num);
    /// The number of the next packet that is received.
    receive_psn: PacketSequenceNumber = RECEIVE_PSN, |raw| {
        PacketSequenceNumber::new(raw.rq_psn).ok()
    };
    /// The number of the next packet that is sent.
    send_psn: PacketSequenceNumber = SEND_PSN, |raw| PacketSequenceNumber::new(raw.sq_psn).ok();
    /// How many reads and atomics may be outstanding.
    max_rd_atomic: u8 = MAX_RD_ATOMIC, |raw| Some(raw.max_rd_atomic);
    /// How many reads and atomics of the peer are answered at a time.
    max_dest_rd_atomic: u8 = MAX_DEST_RD_ATOMIC, |raw| Some(raw.max_dest_rd_atomic);
    /// How long the peer waits before it retries a message that found no receive.
    min_rnr_timer: MinRnrTimer = MIN_RNR_TIMER, |raw| MinRnrTimer::new(raw.min_rnr_timer).ok();
    /// How long the peer has to answer.
    ack_timeout: AckTimeout = ACK_TIMEOUT, |raw| AckTimeout::new(raw.timeout).ok();
    /// How often an unanswered packet is sent again.
    max_ack_retries: MaxAckRetries = MAX_ACK_RETRIES, |raw| MaxAckRetries::new(raw.retry_cnt).ok();
    /// How often a message that found no receive is sent again.
    max_rnr_retries: MaxRnrRetries = MAX_RNR_RETRIES, |raw| MaxRnrRetries::new(raw.rnr_retry).ok();
    /// The alternate path.
    alternate_path: AddressVector = ALTERNATE_PATH, |raw| {
        Some(ffi::ibv_ah_attr { port_num: raw.alt_port_num, ..raw.alt_ah_attr }.into())
    };
    /// The index of the partition key on the alternate path.
    alternate_pkey_index: u16 = ALTERNATE_PATH, |raw| Some(raw.alt_pkey_index);
    /// How long the peer has to answer on the alternate path.
    alternate_ack_timeout: AckTimeout = ALTERNATE_PATH, |raw| AckTimeout::new(raw.alt_timeout).ok();
    /// The state of path migration.
    migration_state: MigrationState = MIGRATION_STATE, |raw| Some(raw.path_mig_state.into());
    /// The limit of packet pacing in kilobits per second; 0 for none.
    rate_limit: u32 = RATE_LIMIT, |raw| Some(raw.rate_limit);
    /// How many requests can be outstanding on the send queue.
    max_send_wr: u32 = CAPACITIES, |raw| Some(raw.cap.max_send_wr);
    /// How many requests can be outstanding on the receive queue.
    max_recv_wr: u32 = CAPACITIES, |raw| Some(raw.cap.max_recv_wr);
    /// How many gather elements a request on the send queue can have.
    max_send_sge: u32 = CAPACITIES, |raw| Some(raw.cap.max_send_sge);
    /// How many scatter elements a receive can have.
    max_recv_sge: u32 = CAPACITIES, |raw| Some(raw.cap.max_recv_sge);
    /// How many bytes a request can carry inline.
    max_inline_data: u32 = CAPACITIES, |raw| Some(raw.cap.max_inline_data);
}

impl QueuePairAttributes {
    pub(super) fn new(raw: ffi::ibv_qp_attr, mask: AttributeMask) -> Self {
        Self { raw, mask }
    }

    /// The attributes that were queried.
    pub fn mask(&self) -> AttributeMask {
        self.mask
    }

    /// The C struct.
    pub fn as_raw(&self) -> &ffi::ibv_qp_attr {
        &self.raw
    }
}

impl fmt::Debug for QueuePairAttributes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("QueuePairAttributes");
        macro_rules! fields {
            ($($name:ident)+) => {
                $(if let Some(value) = self.$name() {
                    out.field(stringify!($name), &value);
                })+
            };
        }
        fields! {
            state port pkey_index access qkey path path_mtu remote_number receive_psn send_psn
            max_rd_atomic max_dest_rd_atomic min_rnr_timer ack_timeout max_ack_retries
            max_rnr_retries migration_state max_send_wr max_recv_wr max_send_sge max_recv_sge
            max_inline_data
        }
        out.finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_asked_for_and_what_is_no_value_is_none() {
        let mut raw = ffi::ibv_qp_attr { rnr_retry: 7, min_rnr_timer: 99, ..Default::default() };
        raw.path_mtu.0 = 77;
        raw.qp_state.0 = 42;
        let asked = AttributeMask::all() - AttributeMask::PORT;
        let attributes = QueuePairAttributes::new(raw, asked);
        assert_eq!(attributes.state(), Some(QueuePairState::Unknown(42)));
        assert_eq!(attributes.port(), None, "not asked for");
        assert_eq!(attributes.max_rnr_retries(), Some(MaxRnrRetries::UNLIMITED));
        assert_eq!((attributes.min_rnr_timer(), attributes.path_mtu()), (None, None));
        let text = format!("{attributes:?}");
        assert!(text.contains("Unknown(42)") && !text.contains("path_mtu"), "{text}");
    }

    #[test]
    fn every_attribute_has_a_name() {
        assert!(AttributeMask::all().iter().all(|flag| flag.first_name().is_some()));
        assert_eq!(AttributeMask::empty().first_name(), None);
        let names: std::collections::HashSet<_> =
            AttributeMask::all().iter().map(AttributeMask::first_name).collect();
        assert_eq!(names.len(), 22);
    }
}
