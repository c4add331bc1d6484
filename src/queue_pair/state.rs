//! The attributes that each step between two states of a queue pair needs.

use super::attributes::AttributeMask;
use crate::queue_pair_state::{Problem, QueuePairState, QueuePairType, TransitionError};

/// The attributes that a transition requires, and those that it allows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Rule {
    pub(super) required: AttributeMask,
    optional: AttributeMask,
}

/// The rule for a transition; `None` if there is no such transition.
///
/// It is the rule of the InfiniBand specification, in the kernel's version: the verb needs
/// [`AttributeMask::STATE`] in addition. A provider's own transports are treated as datagrams, because
/// EFA's are.
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
    // The attributes that can change while the queue pair stays in operation.
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

/// Compares the attributes of a transition with its rule. `given` may or may not include
/// [`AttributeMask::STATE`].
pub(super) fn check(
    kind: QueuePairType,
    from: QueuePairState,
    to: QueuePairState,
    given: AttributeMask,
) -> Result<(), TransitionError> {
    // Only the provider knows which attributes its own transport requires.
    if matches!(kind, QueuePairType::Driver | QueuePairType::Unknown(_)) {
        return Ok(());
    }
    let problem = match rule(kind, from, to) {
        None => Problem::Impossible,
        Some(Rule { required, optional }) => {
            let allowed = required | optional | AttributeMask::STATE;
            if let Some(name) = (required - given).first_name() {
                Problem::Missing(name)
            } else if given == given & allowed {
                return Ok(());
            } else {
                let name = (given - allowed).first_name();
                Problem::NotAllowed(name.unwrap_or("an attribute that has no name"))
            }
        }
    };
    Err(TransitionError::new(problem, kind, from, to))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi;
    use crate::queue_pair::MigrationState;
    use AttributeMask as A;
    use QueuePairState as S;
    use QueuePairType as T;

    const TYPES: [T; 6] = [
        T::ReliableConnected,
        T::UnreliableConnected,
        T::UnreliableDatagram,
        T::RawPacket,
        T::XrcSend,
        T::XrcReceive,
    ];

    /// The required attributes on the way up, as `ibv_modify_qp(3)` lists them.
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

    /// For every transition of every transport: each missing attribute is named, each surplus one is named,
    /// and the allowed attributes are accepted.
    #[test]
    fn every_missing_and_every_forbidden_attribute_is_named() {
        let mut transitions = 0;
        for kind in TYPES {
            for (from, to) in S::ALL.iter().flat_map(|&f| S::ALL.map(|t| (f, t))) {
                let check = |given| super::check(kind, from, to, given | A::STATE);
                let Some(Rule { required, optional }) = rule(kind, from, to) else {
                    let error = check(A::empty()).unwrap_err().to_string();
                    assert!(error.starts_with(&format!("there is no way from {from} to {to}")));
                    continue;
                };
                transitions += 1;
                assert_eq!(check(required), Ok(()));
                assert_eq!(check(required | optional), Ok(()));
                for attribute in required.iter() {
                    let error = check(required - attribute).unwrap_err().to_string();
                    let name = attribute.first_name().unwrap();
                    assert!(error.starts_with(&format!("{name} is missing for {from} to {to}")));
                }
                for attribute in (A::all() - required - optional - A::STATE).iter() {
                    let error = check(required | attribute).unwrap_err().to_string();
                    let name = attribute.first_name().unwrap();
                    assert!(
                        error.starts_with(&format!("{name} is not allowed for {from} to {to}"))
                    );
                }
            }
        }
        // 7 ways to RESET, 6 to ERR, and 9 others, for each transport.
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
