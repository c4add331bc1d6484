//! The attributes of a queue pair: one table for flags, changes and the results of `ibv_query_qp`.

use std::fmt;

use super::address_vector::AddressVector;
use crate::base::{QueuePairState, Result, c_enum, ffi};
use crate::verbs::memory::AccessFlags;
use crate::verbs::settings::{
    AckTimeout, MaxAckRetries, MaxRnrRetries, MaximumTransferUnit, MinRnrTimer,
    PacketSequenceNumber,
};

c_enum! {
    /// `enum ibv_mig_state`: the state of a connection's migration to its alternate path.
    #[doc(alias = "ibv_mig_state")]
    pub enum MigrationState: ibv_mig_state(u32) {
        /// The queue pair uses its current path: it has no alternate path, or has migrated to it.
        Migrated = IBV_MIG_MIGRATED,
        /// The queue pair tells the peer of the alternate path.
        Rearm = IBV_MIG_REARM,
        /// Both sides are ready to move to the alternate path.
        Armed = IBV_MIG_ARMED,
    }
}

pub(super) trait Attribute<Raw>: Sized {
    /// `None` if the standard has no such value.
    fn load(raw: Raw) -> Option<Self>;
    fn store(self) -> Raw;
}

macro_rules! impl_attribute {
    ($($type:ty: $raw:ty, |$loaded:ident| $load:expr, |$value:ident| $store:expr;)+) => {
        $(impl Attribute<$raw> for $type {
            fn load($loaded: $raw) -> Option<Self> {
                $load
            }

            fn store(self) -> $raw {
                let $value = self;
                $store
            }
        })+
    };
}

impl_attribute! {
    u8: u8, |raw| Some(raw), |value| value;
    u16: u16, |raw| Some(raw), |value| value;
    u32: u32, |raw| Some(raw), |value| value;
    bool: u8, |raw| Some(raw != 0), |value| value.into();
    QueuePairState: ffi::ibv_qp_state, |raw| Some(raw.into()), |value| value.into();
    MigrationState: ffi::ibv_mig_state, |raw| Some(raw.into()), |value| value.into();
    AccessFlags: u32, |raw| Some(Self::from_bits_retain(raw)), |value| value.bits();
    AddressVector: ffi::ibv_ah_attr, |raw| Some(raw.into()), |value| value.to_raw();
    MaximumTransferUnit: ffi::ibv_mtu, |raw| Self::from_raw(raw), |value| value.as_raw();
    PacketSequenceNumber: u32, |raw| Self::new(raw).ok(), |value| value.value();
    MinRnrTimer: u8, |raw| Self::new(raw).ok(), |value| value.value();
    AckTimeout: u8, |raw| Self::new(raw).ok(), |value| value.value();
    MaxAckRetries: u8, |raw| Self::new(raw).ok(), |value| value.value();
    MaxRnrRetries: u8, |raw| Self::new(raw).ok(), |value| value.value();
}

/// Calls `$define` with all attributes: flag, C's constant and field, name, type.
macro_rules! attribute_table {
    ($define:ident) => {
        $define! {
            set and queried {
                /// The port, counted from 1.
                PORT = IBV_QP_PORT, port_num, port: u8;
                /// The index of the partition key.
                PKEY_INDEX = IBV_QP_PKEY_INDEX, pkey_index, pkey_index: u16;
                /// The peer's rights through the queue pair.
                ACCESS = IBV_QP_ACCESS_FLAGS, qp_access_flags, access: AccessFlags;
                /// The Q_Key that datagrams to a UD queue pair must carry.
                QKEY = IBV_QP_QKEY, qkey, qkey: u32;
                /// The path to the peer.
                PATH = IBV_QP_AV, ah_attr, path: AddressVector;
                /// The path MTU, the same on both sides.
                PATH_MTU = IBV_QP_PATH_MTU, path_mtu, path_mtu: MaximumTransferUnit;
                /// The number of the peer's queue pair.
                REMOTE_NUMBER = IBV_QP_DEST_QPN, dest_qp_num, remote_number: u32;
                /// The number of the first packet that we receive, the peer's `send_psn`; in a query, of the next one.
                RECEIVE_PSN = IBV_QP_RQ_PSN, rq_psn, receive_psn: PacketSequenceNumber;
                /// The number of the first packet that we send, the peer's `receive_psn`; in a query, of the next one.
                SEND_PSN = IBV_QP_SQ_PSN, sq_psn, send_psn: PacketSequenceNumber;
                /// How many reads and atomics we may have outstanding.
                MAX_RD_ATOMIC = IBV_QP_MAX_QP_RD_ATOMIC, max_rd_atomic, max_rd_atomic: u8;
                /// How many reads and atomics of the peer we answer at a time.
                MAX_DEST_RD_ATOMIC = IBV_QP_MAX_DEST_RD_ATOMIC, max_dest_rd_atomic, max_dest_rd_atomic: u8;
                /// How long the peer waits before it resends a message that found no receive.
                MIN_RNR_TIMER = IBV_QP_MIN_RNR_TIMER, min_rnr_timer, min_rnr_timer: MinRnrTimer;
                /// How long the peer has to answer a packet.
                ACK_TIMEOUT = IBV_QP_TIMEOUT, timeout, ack_timeout: AckTimeout;
                /// How often to resend an unanswered packet.
                MAX_ACK_RETRIES = IBV_QP_RETRY_CNT, retry_cnt, max_ack_retries: MaxAckRetries;
                /// How often to resend a message that found no receive.
                MAX_RNR_RETRIES = IBV_QP_RNR_RETRY, rnr_retry, max_rnr_retries: MaxRnrRetries;
                /// The state of path migration.
                MIGRATION_STATE = IBV_QP_PATH_MIG_STATE, path_mig_state, migration_state: MigrationState;
                /// The rate limit of a raw packet queue pair in kilobits per second; 0 for none. For other types see
                /// [`QueuePair::modify_rate_limit`](crate::QueuePair::modify_rate_limit).
                RATE_LIMIT = IBV_QP_RATE_LIMIT, rate_limit, rate_limit: u32;
            }
            set {
                /// The state that the change must start from: RTR, RTS, SQD or SQE.
                CURRENT_STATE = IBV_QP_CUR_STATE, cur_qp_state, current_state: QueuePairState;
                /// Whether an event reports that the send queue has drained.
                DRAIN_NOTIFICATION = IBV_QP_EN_SQD_ASYNC_NOTIFY, en_sqd_async_notify, drain_notification: bool;
            }
            neither {
                /// The state.
                STATE = IBV_QP_STATE, qp_state;
                /// The alternate path, with its own port, partition key index and timeout.
                ALTERNATE_PATH = IBV_QP_ALT_PATH, alt_ah_attr;
                /// The sizes.
                CAPACITIES = IBV_QP_CAP, cap;
            }
            queried {
                /// The state.
                state: QueuePairState = STATE, qp_state;
                /// Whether the send queue is still draining (state SQD).
                is_draining: bool = STATE, sq_draining;
                /// The index of the partition key on the alternate path.
                alternate_pkey_index: u16 = ALTERNATE_PATH, alt_pkey_index;
                /// How long the peer has to answer on the alternate path.
                alternate_ack_timeout: AckTimeout = ALTERNATE_PATH, alt_timeout;
                /// How many requests the send queue holds.
                max_send_wr: u32 = CAPACITIES, cap.max_send_wr;
                /// How many requests the receive queue holds.
                max_recv_wr: u32 = CAPACITIES, cap.max_recv_wr;
                /// How many gather elements a request on the send queue can have.
                max_send_sge: u32 = CAPACITIES, cap.max_send_sge;
                /// How many scatter elements a receive can have.
                max_recv_sge: u32 = CAPACITIES, cap.max_recv_sge;
                /// How many bytes a request can carry inline.
                max_inline_data: u32 = CAPACITIES, cap.max_inline_data;
            }
        }
    };
}
pub(super) use attribute_table;

macro_rules! attributes {
    (
        set and queried { $($(#[doc = $doc:literal])* $flag:ident = $constant:ident, $field:ident, $name:ident: $type:ty;)+ }
        set { $($(#[doc = $set_doc:literal])* $set_flag:ident = $set_constant:ident, $set_field:ident, $set_name:ident: $set_type:ty;)+ }
        neither { $($(#[doc = $other_doc:literal])* $other:ident = $other_constant:ident, $other_field:ident;)+ }
        queried { $($(#[doc = $part_doc:literal])* $part:ident: $part_type:ty = $of:ident, $($part_field:ident).+;)+ }
    ) => {
        bitflags::bitflags! {
            /// `enum ibv_qp_attr_mask`: some of the attributes of a queue pair.
            #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
            #[doc(alias = "ibv_qp_attr_mask")]
            pub struct AttributeMask: u32 {
                $($(#[doc = $other_doc])* const $other = ffi::ibv_qp_attr_mask::$other_constant.0;)+
                $($(#[doc = $set_doc])* const $set_flag = ffi::ibv_qp_attr_mask::$set_constant.0;)+
                $($(#[doc = $doc])* const $flag = ffi::ibv_qp_attr_mask::$constant.0;)+
            }
        }

        impl AttributeMask {
            /// C's name of the first flag, in C's order.
            pub(super) fn first_name(self) -> Option<&'static str> {
                let names = [
                    $((Self::$other, stringify!($other_field)),)+
                    $((Self::$set_flag, stringify!($set_field)),)+
                    $((Self::$flag, stringify!($field)),)+
                ];
                let first = self.bits() & self.bits().wrapping_neg();
                names.into_iter().find_map(|(flag, name)| (flag.bits() == first).then_some(name))
            }
        }

        impl QueuePairAttributes {
            $(
                $(#[doc = $doc])*
                pub fn $name(&self) -> Option<$type> {
                    self.of(AttributeMask::$flag, self.raw.$field)
                }
            )+
            $(
                $(#[doc = $part_doc])*
                pub fn $part(&self) -> Option<$part_type> {
                    self.of(AttributeMask::$of, self.raw.$($part_field).+)
                }
            )+
        }

        impl fmt::Debug for QueuePairAttributes {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let mut out = f.debug_struct("QueuePairAttributes");
                $(if let Some(value) = self.$part() {
                    out.field(stringify!($part), &value);
                })+
                $(if let Some(value) = self.$name() {
                    out.field(stringify!($name), &value);
                })+
                out.finish_non_exhaustive()
            }
        }
    };
}

attribute_table!(attributes);

/// `struct ibv_qp_attr`: the result of [`QueuePair::query`](crate::QueuePair::query).
///
/// A getter returns `None` for an attribute that was not queried, or has a value unknown to the standard. An attribute
/// that was never set, or that the type or state lacks, has whatever value the device stores.
#[derive(Clone, Copy)]
#[doc(alias = "ibv_qp_attr")]
pub struct QueuePairAttributes {
    raw: ffi::ibv_qp_attr,
    mask: AttributeMask,
}

impl QueuePairAttributes {
    fn of<Raw, T: Attribute<Raw>>(&self, flag: AttributeMask, raw: Raw) -> Option<T> {
        if self.mask.contains(flag) { T::load(raw) } else { None }
    }

    /// The alternate path.
    pub fn alternate_path(&self) -> Option<AddressVector> {
        let raw = ffi::ibv_ah_attr { port_num: self.raw.alt_port_num, ..self.raw.alt_ah_attr };
        self.of(AttributeMask::ALTERNATE_PATH, raw)
    }

    /// `ibv_query_qp`.
    ///
    /// # Safety
    ///
    /// The queue pair is live.
    pub(super) unsafe fn query(queue_pair: *mut ffi::ibv_qp, mask: AttributeMask) -> Result<Self> {
        let (mut raw, mut created) = Default::default();
        // SAFETY: the caller vouches for the queue pair; both structs are writable, and the bits are defined ones, which fit.
        let returned =
            unsafe { ffi::ibv_query_qp(queue_pair, &mut raw, mask.bits() as i32, &mut created) };
        ffi::status("ibv_query_qp", returned)?;
        Ok(Self { raw, mask })
    }

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
