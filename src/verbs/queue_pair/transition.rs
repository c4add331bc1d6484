//! The states of a queue pair, and the transitions between them.

use std::fmt;

use super::address_vector::AddressVector;
use super::attributes::{
    Attribute, AttributeMask, MigrationState, QueuePairAttributes, attribute_table,
};
use crate::base::{Detail, Error, Problem, QueuePairState, QueuePairType, Result, ffi};
use crate::verbs::memory::AccessFlags;
use crate::verbs::settings::{
    AckTimeout, MaxAckRetries, MaxRnrRetries, MaximumTransferUnit, MinRnrTimer,
    PacketSequenceNumber,
};

/// A change of state, attributes, or both, for [`QueuePair::modify`](crate::QueuePair::modify).
///
/// States and type determine the attributes that a change requires and allows: see the tables of `ibv_modify_qp(3)`.
/// `modify` names the wrong attribute.
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
    /// A change to this state; only of attributes if the queue pair is already in it.
    pub fn to(state: QueuePairState) -> Self {
        let raw = ffi::ibv_qp_attr { qp_state: state.into(), ..Default::default() };
        Self { raw, mask: AttributeMask::STATE }
    }

    /// A change of attributes only, in any state.
    pub fn stay() -> Self {
        Self { raw: ffi::ibv_qp_attr::default(), mask: AttributeMask::empty() }
    }

    /// The path to use if the first one fails, with its partition key index and timeout. InfiniBand only. See also
    /// [`migration_state`](Self::migration_state).
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

    pub(super) fn part(mut self, mask: AttributeMask, state: QueuePairState) -> Self {
        self.raw.qp_state = state.into();
        self.mask = (self.mask & mask) | AttributeMask::STATE;
        self
    }

    /// A change from the C struct and its mask, for programs that fill the struct themselves or get it from a C
    /// library. [`modify`](crate::QueuePair::modify) rejects mask bits without a name.
    pub fn from_raw(raw: ffi::ibv_qp_attr, mask: ffi::ibv_qp_attr_mask) -> Self {
        Self { raw, mask: AttributeMask::from_bits_retain(mask.0) }
    }

    /// The C struct, and the mask of its attributes.
    pub fn to_raw(&self) -> (ffi::ibv_qp_attr, ffi::ibv_qp_attr_mask) {
        (self.raw, ffi::ibv_qp_attr_mask(self.mask.bits()))
    }

    /// `ibv_modify_qp`.
    ///
    /// # Safety
    ///
    /// The queue pair is live.
    pub(crate) unsafe fn apply(&self, queue_pair: *mut ffi::ibv_qp) -> Result<()> {
        let (mut raw, mask) = self.to_raw();
        // SAFETY: the caller vouches for the queue pair; the mask holds only defined bits, which fit.
        let returned = unsafe { ffi::ibv_modify_qp(queue_pair, &mut raw, mask.0 as i32) };
        ffi::status("ibv_modify_qp", returned)
    }

    pub(super) fn attributes(&self) -> QueuePairAttributes {
        QueuePairAttributes::new(self.raw, self.mask)
    }

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
        check(kind, from, to, self.mask)
    }
}

impl fmt::Debug for StateTransition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("StateTransition").field(&self.attributes()).finish()
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Rule {
    pub(super) required: AttributeMask,
    optional: AttributeMask,
}

/// The InfiniBand specification's, in the kernel's version: the verb also needs [`AttributeMask::STATE`]. Providers'
/// transports count as datagrams, because EFA's do.
pub(super) fn rule(kind: QueuePairType, from: QueuePairState, to: QueuePairState) -> Option<Rule> {
    use AttributeMask as A;
    use QueuePairState as S;
    use QueuePairType as T;

    let none = A::empty();
    let raw = kind == T::RawPacket;
    let connected =
        matches!(kind, T::ReliableConnected | T::UnreliableConnected | T::XrcSend | T::XrcReceive);
    let requester = matches!(kind, T::ReliableConnected | T::XrcSend);
    let responder = matches!(kind, T::ReliableConnected | T::XrcReceive);
    let only = |condition: bool, attributes: A| if condition { attributes } else { none };

    let address = if connected {
        A::PKEY_INDEX | A::PORT | A::ACCESS
    } else if raw {
        A::PORT
    } else {
        A::PKEY_INDEX | A::PORT | A::QKEY
    };
    let running = if connected {
        A::CURRENT_STATE
            | A::ALTERNATE_PATH
            | A::ACCESS
            | A::MIGRATION_STATE
            | only(responder, A::MIN_RNR_TIMER)
    } else if raw {
        A::RATE_LIMIT
    } else {
        A::CURRENT_STATE | A::QKEY
    };
    let (required, optional) = match (from, to) {
        (S::Unknown(_), _) | (_, S::Unknown(_)) => return None,
        (_, S::Reset) => (none, none),
        (S::Reset, S::Init) => (address, none),
        (S::Reset, _) => return None,
        (_, S::Error) => (none, none),
        (S::Init, S::Init) => (none, only(!raw, address)),
        (S::Init, S::ReadyToReceive) if connected => (
            A::PATH
                | A::PATH_MTU
                | A::REMOTE_NUMBER
                | A::RECEIVE_PSN
                | only(responder, A::MAX_DEST_RD_ATOMIC | A::MIN_RNR_TIMER),
            A::ALTERNATE_PATH | A::ACCESS | A::PKEY_INDEX,
        ),
        (S::Init, S::ReadyToReceive) => (none, only(!raw, A::PKEY_INDEX | A::QKEY)),
        (S::ReadyToReceive, S::ReadyToSend) => (
            only(!raw, A::SEND_PSN)
                | only(requester || responder, A::ACK_TIMEOUT)
                | only(requester, A::MAX_ACK_RETRIES | A::MAX_RNR_RETRIES | A::MAX_RD_ATOMIC),
            running,
        ),
        (S::ReadyToSend, S::ReadyToSend) => (none, running),
        (S::ReadyToSend, S::SendQueueDrained) => (none, only(!raw, A::DRAIN_NOTIFICATION)),
        (S::SendQueueDrained, S::ReadyToSend) => (none, only(!raw, running)),
        (S::SendQueueDrained, S::SendQueueDrained) if connected => (
            none,
            A::PATH
                | A::ALTERNATE_PATH
                | A::ACCESS
                | A::PKEY_INDEX
                | A::MIGRATION_STATE
                | only(requester || responder, A::PORT | A::ACK_TIMEOUT)
                | only(requester, A::MAX_ACK_RETRIES | A::MAX_RNR_RETRIES | A::MAX_RD_ATOMIC)
                | only(responder, A::MAX_DEST_RD_ATOMIC | A::MIN_RNR_TIMER),
        ),
        (S::SendQueueDrained, S::SendQueueDrained) => (none, only(!raw, A::PKEY_INDEX | A::QKEY)),
        (S::SendQueueError, S::ReadyToSend) if kind == T::UnreliableConnected => {
            (none, A::CURRENT_STATE | A::ACCESS)
        }
        (S::SendQueueError, S::ReadyToSend) => {
            (none, only(!connected && !raw, A::CURRENT_STATE | A::QKEY))
        }
        _ => return None,
    };
    Some(Rule { required, optional })
}

/// `given` may include [`AttributeMask::STATE`].
pub(super) fn check(
    kind: QueuePairType,
    from: QueuePairState,
    to: QueuePairState,
    given: AttributeMask,
) -> Result<()> {
    const NO_NAME: &str = "an attribute that has no name";
    let is_providers = matches!(kind, QueuePairType::Driver | QueuePairType::Unknown(_));
    let problem = match rule(kind, from, to) {
        // Only the provider knows what its own transport requires.
        _ if is_providers && AttributeMask::all().contains(given) => return Ok(()),
        _ if is_providers => Problem::NotAllowed(NO_NAME),
        None => Problem::Impossible,
        Some(Rule { required, optional }) => {
            let allowed = required | optional | AttributeMask::STATE;
            if let Some(name) = (required - given).first_name() {
                Problem::Missing(name)
            } else if given == given & allowed {
                return Ok(());
            } else {
                let name = (given - allowed).first_name();
                Problem::NotAllowed(name.unwrap_or(NO_NAME))
            }
        }
    };
    let (from, to) = (from.into(), to.into());
    let detail = Detail::Transition { problem, kind: kind.into(), from, to };
    Err(Error::with("ibv_modify_qp", libc::EINVAL, detail))
}

#[cfg(test)]
mod tests {
    use AttributeMask as A;
    use QueuePairState as S;
    use QueuePairType as T;

    use super::*;
    use crate::base::ffi;
    use crate::verbs::device::Gid;
    use crate::verbs::queue_pair::MigrationState;
    use crate::verbs::settings::ServiceLevel;

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
        for kind in [kind, QueuePairType::Driver, QueuePairType::Unknown(77)] {
            let error = change.check(kind, QueuePairState::Reset).unwrap_err();
            assert!(error.to_string().contains("an attribute that has no name"), "{error}");
        }
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

    const TYPES: [T; 6] = [
        T::ReliableConnected,
        T::UnreliableConnected,
        T::UnreliableDatagram,
        T::RawPacket,
        T::XrcSend,
        T::XrcReceive,
    ];

    #[test]
    fn the_way_up_is_that_of_the_manual() {
        let path = A::PATH | A::PATH_MTU | A::REMOTE_NUMBER | A::RECEIVE_PSN;
        let retries = A::MAX_ACK_RETRIES | A::MAX_RNR_RETRIES | A::MAX_RD_ATOMIC;
        let steps = [(S::Reset, S::Init), (S::Init, S::ReadyToReceive)];
        let last = (S::ReadyToReceive, S::ReadyToSend);
        for (kind, required) in [
            (
                T::ReliableConnected,
                [
                    A::PKEY_INDEX | A::PORT | A::ACCESS,
                    path | A::MAX_DEST_RD_ATOMIC | A::MIN_RNR_TIMER,
                    A::SEND_PSN | A::ACK_TIMEOUT | retries,
                ],
            ),
            (T::UnreliableConnected, [A::PKEY_INDEX | A::PORT | A::ACCESS, path, A::SEND_PSN]),
            (T::UnreliableDatagram, [A::PKEY_INDEX | A::PORT | A::QKEY, A::empty(), A::SEND_PSN]),
            (T::RawPacket, [A::PORT, A::empty(), A::empty()]),
            (
                T::XrcSend,
                [A::PKEY_INDEX | A::PORT | A::ACCESS, path, A::SEND_PSN | A::ACK_TIMEOUT | retries],
            ),
            (
                T::XrcReceive,
                [
                    A::PKEY_INDEX | A::PORT | A::ACCESS,
                    path | A::MAX_DEST_RD_ATOMIC | A::MIN_RNR_TIMER,
                    A::SEND_PSN | A::ACK_TIMEOUT,
                ],
            ),
        ] {
            for ((from, to), required) in steps.into_iter().chain([last]).zip(required) {
                assert_eq!(rule(kind, from, to).unwrap().required, required, "{kind:?} to {to}");
            }
        }
    }

    #[test]
    fn every_missing_and_every_forbidden_attribute_is_named() {
        let mut transitions = 0;
        for kind in TYPES {
            for (from, to) in S::ALL.iter().flat_map(|&f| S::ALL.map(|t| (f, t))) {
                let check = |given| super::check(kind, from, to, given | A::STATE);
                let Some(Rule { required, optional }) = rule(kind, from, to) else {
                    let error = check(A::empty()).unwrap_err().to_string();
                    assert!(error.contains(&format!(": there is no way from {from} to {to}")));
                    continue;
                };
                transitions += 1;
                assert_eq!(check(required), Ok(()));
                assert_eq!(check(required | optional), Ok(()));
                for attribute in required.iter() {
                    let error = check(required - attribute).unwrap_err().to_string();
                    let name = attribute.first_name().unwrap();
                    assert!(error.contains(&format!(": {name} is missing for {from} to {to}")));
                }
                for attribute in (A::all() - required - optional - A::STATE).iter() {
                    let error = check(required | attribute).unwrap_err().to_string();
                    let name = attribute.first_name().unwrap();
                    assert!(error.contains(&format!(": {name} is not allowed for {from} to {to}")));
                }
            }
        }
        // 7 to RESET, 6 to ERR, and 9 others, for each transport.
        assert_eq!(transitions, 6 * 22);
    }

    #[test]
    fn what_works_on_the_way_is_allowed() {
        let ok = |kind, from, to, given| check(kind, from, to, given).is_ok();
        assert!(ok(T::ReliableConnected, S::ReadyToSend, S::ReadyToSend, A::MIN_RNR_TIMER));
        assert!(!ok(T::XrcSend, S::ReadyToSend, S::ReadyToSend, A::MIN_RNR_TIMER));
        assert!(ok(T::RawPacket, S::ReadyToSend, S::ReadyToSend, A::RATE_LIMIT));
        assert!(ok(T::UnreliableDatagram, S::SendQueueError, S::ReadyToSend, A::CURRENT_STATE));
        assert!(ok(T::UnreliableConnected, S::SendQueueDrained, S::SendQueueDrained, A::PATH));
        assert!(!ok(T::UnreliableConnected, S::SendQueueDrained, S::SendQueueDrained, A::PORT));
        assert!(ok(T::XrcReceive, S::SendQueueDrained, S::SendQueueDrained, A::ACK_TIMEOUT));
        assert!(!ok(T::XrcReceive, S::SendQueueDrained, S::SendQueueDrained, A::MAX_RD_ATOMIC));
        assert!(!ok(T::ReliableConnected, S::ReadyToSend, S::Error, A::CURRENT_STATE));
        assert!(ok(T::Driver, S::Reset, S::ReadyToSend, A::QKEY), "only the provider knows");
        assert_eq!(QueuePairState::from(ffi::ibv_qp_state(42)), S::Unknown(42));
        assert_eq!(MigrationState::from(ffi::ibv_mig_state(9)), MigrationState::Unknown(9));
    }
}
