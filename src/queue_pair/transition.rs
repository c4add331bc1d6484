//! Changes of a queue pair's state and attributes.

use std::fmt;

use super::address_vector::AddressVector;
use super::attributes::{
    Attribute, AttributeMask, MigrationState, QueuePairAttributes, attribute_table,
};
use super::state::check;
use crate::error::{Error, Result};
use crate::ffi;
use crate::memory::AccessFlags;
use crate::queue_pair_state::{QueuePairState, QueuePairType};
use crate::settings::{
    AckTimeout, MaxAckRetries, MaxRnrRetries, MaximumTransferUnit, MinRnrTimer,
    PacketSequenceNumber,
};

/// A change of a queue pair's state, of its attributes, or of both, for
/// [`QueuePair::modify`](crate::QueuePair::modify).
///
/// The states and the type of the queue pair determine the attributes that a change requires and allows:
/// see the tables of `ibv_modify_qp(3)`. `modify` names the attribute that is wrong.
///
/// ```
/// use ibverbs::queue_pair::StateTransition;
/// use ibverbs::{AccessFlags, QueuePairState, Rc};
///
/// # fn main() -> ibverbs::Result<()> {
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// # let context = ibverbs::open("rxe0")?;
/// # let domain = context.alloc_pd()?;
/// # let queue = context.create_cq(16)?;
/// let prepared = domain.create_qp(&queue, &queue, Rc).build()?;
/// let mut queue_pair = prepared.into_queue_pair();
/// queue_pair.modify(
///     StateTransition::to(QueuePairState::Init)
///         .port(1)
///         .pkey_index(0)
///         .access(AccessFlags::REMOTE_WRITE),
/// )?;
/// let error = queue_pair.modify(StateTransition::to(QueuePairState::ReadyToReceive)).unwrap_err();
/// assert!(error.to_string().contains("ah_attr is missing for INIT to RTR"));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy)]
#[doc(alias = "ibv_qp_attr")]
#[must_use]
pub struct StateTransition {
    raw: ffi::ibv_qp_attr,
    mask: AttributeMask,
}

/// Defines the methods that set an attribute.
macro_rules! setters {
    (
        set and queried { $($(#[doc = $doc:literal])* $flag:ident = $constant:ident, $field:ident, $name:ident: $type:ty;)+ }
        set { $($(#[doc = $set_doc:literal])* $set_flag:ident = $set_constant:ident, $set_field:ident, $set_name:ident: $set_type:ty;)+ }
        neither $neither:tt
        queried $queried:tt
    ) => {
        impl StateTransition {
            $(
                $(#[doc = $set_doc])*
                pub fn $set_name(mut self, value: $set_type) -> Self {
                    self.raw.$set_field = Attribute::store(value);
                    self.mask |= AttributeMask::$set_flag;
                    self
                }
            )+
            $(
                $(#[doc = $doc])*
                pub fn $name(mut self, value: $type) -> Self {
                    self.raw.$field = Attribute::store(value);
                    self.mask |= AttributeMask::$flag;
                    self
                }
            )+
        }
    };
}

attribute_table!(setters);

impl StateTransition {
    /// A change to this state. If the queue pair is already in it, only attributes change.
    pub fn to(state: QueuePairState) -> Self {
        let raw = ffi::ibv_qp_attr { qp_state: state.into(), ..Default::default() };
        Self { raw, mask: AttributeMask::STATE }
    }

    /// A change of attributes only, in any state.
    pub fn stay() -> Self {
        Self { raw: ffi::ibv_qp_attr::default(), mask: AttributeMask::empty() }
    }

    /// The path to the peer that is used if the first one fails, with the index of its partition key and
    /// its own timeout. InfiniBand only. See also [`migration_state`](Self::migration_state).
    pub fn alternate_path(mut self, path: AddressVector, pkey_index: u16, t: AckTimeout) -> Self {
        self.raw.alt_ah_attr = path.to_raw();
        self.raw.alt_port_num = path.port();
        self.raw.alt_pkey_index = pkey_index;
        self.raw.alt_timeout = t.value();
        self.mask |= AttributeMask::ALTERNATE_PATH;
        self
    }

    /// The attributes that the change sets.
    pub fn mask(&self) -> AttributeMask {
        self.mask
    }

    /// The part of the attributes that is in `mask`, for a change to another state.
    pub(super) fn part(mut self, mask: AttributeMask, state: QueuePairState) -> Self {
        self.raw.qp_state = state.into();
        self.mask = (self.mask & mask) | AttributeMask::STATE;
        self
    }

    /// A change from the C struct and its mask, for programs that fill the struct themselves or get it from
    /// a C library. Bits without a name stay in the mask, and [`modify`](crate::QueuePair::modify) rejects
    /// them.
    pub fn from_raw(raw: ffi::ibv_qp_attr, mask: ffi::ibv_qp_attr_mask) -> Self {
        Self { raw, mask: AttributeMask::from_bits_retain(mask.0) }
    }

    /// The C struct, and the mask of the attributes that are set in it.
    pub fn to_raw(&self) -> (ffi::ibv_qp_attr, ffi::ibv_qp_attr_mask) {
        (self.raw, ffi::ibv_qp_attr_mask(self.mask.bits()))
    }

    /// The attributes of the change, for reading.
    pub(super) fn attributes(&self) -> QueuePairAttributes {
        QueuePairAttributes::new(self.raw, self.mask)
    }

    /// Checks that this change is allowed for a queue pair of type `kind` in the state `from`.
    pub(crate) fn check(&self, kind: QueuePairType, from: QueuePairState) -> Result<()> {
        const VERB: &str = "ibv_modify_qp";
        if self.mask.contains(AttributeMask::REMOTE_NUMBER) && self.raw.dest_qp_num > 0xff_ffff {
            let value = self.raw.dest_qp_num.into();
            return Err(Error::out_of_range(VERB, "dest_qp_num", value, 0, 0xff_ffff));
        }
        let attributes = self.attributes();
        let mut from = from;
        if self.mask.contains(AttributeMask::CURRENT_STATE) {
            from = self.raw.cur_qp_state.into();
        }
        let to = attributes.state().unwrap_or(from);
        check(kind, from, to, self.mask).map_err(Error::transition)
    }
}

impl fmt::Debug for StateTransition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StateTransition").field(&self.attributes()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Gid;
    use crate::settings::ServiceLevel;

    #[test]
    fn each_attribute_is_where_c_has_it() {
        let path = AddressVector::new(1, 3).global(Gid::ZERO, 2);
        let other = AddressVector::new(2, 4).service_level(ServiceLevel::MAX);
        let (raw, mask) = StateTransition::to(QueuePairState::ReadyToReceive)
            .current_state(QueuePairState::Init)
            .port(1)
            .pkey_index(2)
            .access(AccessFlags::REMOTE_READ)
            .qkey(3)
            .path(path)
            .path_mtu(MaximumTransferUnit::Mtu2048)
            .remote_number(5)
            .receive_psn(PacketSequenceNumber::new(6).unwrap())
            .send_psn(PacketSequenceNumber::new(7).unwrap())
            .max_rd_atomic(8)
            .max_dest_rd_atomic(9)
            .min_rnr_timer(MinRnrTimer::new(10).unwrap())
            .ack_timeout(AckTimeout::new(11).unwrap())
            .max_ack_retries(MaxAckRetries::new(4).unwrap())
            .max_rnr_retries(MaxRnrRetries::new(5).unwrap())
            .alternate_path(other, 14, AckTimeout::new(15).unwrap())
            .migration_state(MigrationState::Rearm)
            .drain_notification(true)
            .rate_limit(16)
            .to_raw();
        let all = AttributeMask::all() - AttributeMask::CAPACITIES;
        assert_eq!(mask.0, all.bits());
        assert_eq!((raw.qp_state.0, raw.cur_qp_state.0), (2, 1));
        assert_eq!((raw.port_num, raw.pkey_index, raw.qp_access_flags, raw.qkey), (1, 2, 4, 3));
        assert_eq!((raw.ah_attr.dlid, raw.ah_attr.grh.sgid_index), (3, 2));
        assert_eq!((raw.path_mtu.0, raw.dest_qp_num, raw.rq_psn, raw.sq_psn), (4, 5, 6, 7));
        assert_eq!((raw.max_rd_atomic, raw.max_dest_rd_atomic), (8, 9));
        assert_eq!((raw.min_rnr_timer, raw.timeout, raw.retry_cnt, raw.rnr_retry), (10, 11, 4, 5));
        assert_eq!((raw.alt_ah_attr.dlid, raw.alt_ah_attr.sl, raw.alt_port_num), (4, 15, 2));
        assert_eq!((raw.alt_pkey_index, raw.alt_timeout, raw.path_mig_state.0), (14, 15, 1));
        assert_eq!((raw.en_sqd_async_notify, raw.rate_limit), (1, 16));
    }

    #[test]
    fn the_c_struct_and_its_mask_are_a_change_too() {
        let attr = ffi::ibv_qp_attr {
            qp_state: ffi::ibv_qp_state::IBV_QPS_INIT,
            port_num: 1,
            ..Default::default()
        };
        let mask = ffi::ibv_qp_attr_mask::IBV_QP_STATE
            | ffi::ibv_qp_attr_mask::IBV_QP_PORT
            | ffi::ibv_qp_attr_mask::IBV_QP_PKEY_INDEX
            | ffi::ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS;
        let change = StateTransition::from_raw(attr, mask);
        assert_eq!(change.to_raw().1, mask);
        let kind = QueuePairType::ReliableConnected;
        assert!(change.check(kind, QueuePairState::Reset).is_ok());
        let unknown = ffi::ibv_qp_attr_mask(mask.0 | 1 << 31);
        let change = StateTransition::from_raw(attr, unknown);
        assert!(change.check(kind, QueuePairState::Reset).is_err());
    }

    #[test]
    fn the_wrong_attribute_is_named() {
        let check = |transition: StateTransition, from| {
            transition.check(QueuePairType::ReliableConnected, from).unwrap_err().to_string()
        };
        let init = StateTransition::to(QueuePairState::Init);
        assert_eq!(
            check(init.port(1).pkey_index(0), QueuePairState::Reset),
            "ibv_modify_qp: qp_access_flags is missing for RESET to INIT of an RC queue pair"
        );
        let whole = init.port(1).pkey_index(0).access(AccessFlags::empty());
        assert_eq!(
            check(whole.qkey(1), QueuePairState::Reset),
            "ibv_modify_qp: qkey is not allowed for RESET to INIT of an RC queue pair"
        );
        assert_eq!(
            check(whole, QueuePairState::ReadyToSend),
            "ibv_modify_qp: there is no way from RTS to INIT of an RC queue pair"
        );
        let stay = StateTransition::stay().path_mtu(MaximumTransferUnit::Mtu256);
        assert!(check(stay, QueuePairState::ReadyToSend).contains("path_mtu is not allowed"));
        let far = StateTransition::stay().remote_number(1 << 24);
        assert!(check(far, QueuePairState::Init).contains("dest_qp_num is 16777216"));
        let unknown = StateTransition::to(QueuePairState::Unknown(9));
        assert!(check(unknown, QueuePairState::Init).contains("no way from INIT to state 9"));
    }
}
