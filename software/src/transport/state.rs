//! The state table of the specification: the transitions of a queue pair, and the attributes that each
//! of them requires and allows.

use super::queue_pair::Transport;
use crate::ffi::{ibv_qp_attr_mask as Mask, ibv_qp_state as State};

const AV: u32 = Mask::IBV_QP_AV.0;
const PATH_MTU: u32 = Mask::IBV_QP_PATH_MTU.0;
const DEST_QPN: u32 = Mask::IBV_QP_DEST_QPN.0;
const RQ_PSN: u32 = Mask::IBV_QP_RQ_PSN.0;
const SQ_PSN: u32 = Mask::IBV_QP_SQ_PSN.0;
const READS_IN: u32 = Mask::IBV_QP_MAX_DEST_RD_ATOMIC.0;
const READS_OUT: u32 = Mask::IBV_QP_MAX_QP_RD_ATOMIC.0;
const MIN_RNR: u32 = Mask::IBV_QP_MIN_RNR_TIMER.0;
const TIMEOUT: u32 = Mask::IBV_QP_TIMEOUT.0;
const RETRY: u32 = Mask::IBV_QP_RETRY_CNT.0;
const RNR_RETRY: u32 = Mask::IBV_QP_RNR_RETRY.0;
const PKEY: u32 = Mask::IBV_QP_PKEY_INDEX.0;
const PORT: u32 = Mask::IBV_QP_PORT.0;
const ACCESS: u32 = Mask::IBV_QP_ACCESS_FLAGS.0;
const QKEY: u32 = Mask::IBV_QP_QKEY.0;
const CURRENT: u32 = Mask::IBV_QP_CUR_STATE.0;
const NOTIFY: u32 = Mask::IBV_QP_EN_SQD_ASYNC_NOTIFY.0;

/// The attributes that a transition requires, and those that it allows; `None`: there is no such transition.
///
/// The attributes of alternate paths are missing, since RoCE does not have them.
pub(super) fn row(transport: Transport, from: State, to: State) -> Option<(u32, u32)> {
    use Transport::{DcInitiator, DcTarget, Rc, Srd, Uc, Ud, XrcReceive, XrcSend};
    type S = State;
    Some(match (from, to, transport) {
        (_, S::IBV_QPS_RESET | S::IBV_QPS_ERR, _) => (0, 0),
        (S::IBV_QPS_RESET, S::IBV_QPS_INIT, Ud | Srd) => (PKEY | PORT | QKEY, 0),
        (S::IBV_QPS_RESET, S::IBV_QPS_INIT, DcInitiator) => (PKEY | PORT, 0),
        (S::IBV_QPS_RESET, S::IBV_QPS_INIT, _) => (PKEY | PORT | ACCESS, 0),
        (S::IBV_QPS_INIT, S::IBV_QPS_INIT, Ud | Srd) => (0, PKEY | PORT | QKEY),
        (S::IBV_QPS_INIT, S::IBV_QPS_INIT, DcInitiator) => (0, PKEY | PORT),
        (S::IBV_QPS_INIT, S::IBV_QPS_INIT, _) => (0, PKEY | PORT | ACCESS),
        (S::IBV_QPS_INIT, S::IBV_QPS_RTR, Rc | XrcReceive) => {
            (AV | PATH_MTU | DEST_QPN | RQ_PSN | READS_IN | MIN_RNR, ACCESS | PKEY)
        }
        (S::IBV_QPS_INIT, S::IBV_QPS_RTR, Uc | XrcSend) => {
            (AV | PATH_MTU | DEST_QPN | RQ_PSN, ACCESS | PKEY)
        }
        (S::IBV_QPS_INIT, S::IBV_QPS_RTR, Ud | Srd) => (0, PKEY | QKEY),
        (S::IBV_QPS_INIT, S::IBV_QPS_RTR, DcInitiator) => (PATH_MTU, AV | PKEY),
        // It goes no further.
        (S::IBV_QPS_INIT, S::IBV_QPS_RTR, DcTarget) => (AV | PATH_MTU | MIN_RNR, ACCESS | PKEY),
        (S::IBV_QPS_RTR, S::IBV_QPS_RTS, Rc) => {
            (TIMEOUT | RETRY | RNR_RETRY | SQ_PSN | READS_OUT, CURRENT | ACCESS | MIN_RNR)
        }
        (S::IBV_QPS_RTR, S::IBV_QPS_RTS, DcInitiator) => {
            (TIMEOUT | RETRY | RNR_RETRY | SQ_PSN | READS_OUT, CURRENT)
        }
        (S::IBV_QPS_RTR, S::IBV_QPS_RTS, Srd) => (SQ_PSN, CURRENT | QKEY | RNR_RETRY),
        (S::IBV_QPS_RTR, S::IBV_QPS_RTS, XrcSend) => {
            (TIMEOUT | RETRY | RNR_RETRY | SQ_PSN | READS_OUT, CURRENT | ACCESS)
        }
        (S::IBV_QPS_RTR, S::IBV_QPS_RTS, XrcReceive) => {
            (TIMEOUT | SQ_PSN, CURRENT | ACCESS | MIN_RNR)
        }
        (S::IBV_QPS_RTR, S::IBV_QPS_RTS, Uc) => (SQ_PSN, CURRENT | ACCESS),
        (S::IBV_QPS_RTR, S::IBV_QPS_RTS, Ud) => (SQ_PSN, CURRENT | QKEY),
        (S::IBV_QPS_RTS | S::IBV_QPS_SQD, S::IBV_QPS_RTS, Rc | XrcReceive) => {
            (0, CURRENT | ACCESS | MIN_RNR)
        }
        (S::IBV_QPS_RTS | S::IBV_QPS_SQD, S::IBV_QPS_RTS, XrcSend) => (0, CURRENT | ACCESS),
        (S::IBV_QPS_RTS | S::IBV_QPS_SQD | S::IBV_QPS_SQE, S::IBV_QPS_RTS, Uc) => {
            (0, CURRENT | ACCESS)
        }
        (S::IBV_QPS_RTS | S::IBV_QPS_SQD | S::IBV_QPS_SQE, S::IBV_QPS_RTS, Ud) => {
            (0, CURRENT | QKEY)
        }
        (S::IBV_QPS_RTS | S::IBV_QPS_SQD, S::IBV_QPS_RTS, Srd) => (0, CURRENT | QKEY),
        (S::IBV_QPS_RTS | S::IBV_QPS_SQD, S::IBV_QPS_RTS, DcInitiator) => (0, CURRENT),
        (
            S::IBV_QPS_RTS,
            S::IBV_QPS_SQD,
            Rc | Uc | Ud | XrcSend | XrcReceive | Srd | DcInitiator,
        ) => (0, CURRENT | NOTIFY),
        (S::IBV_QPS_SQD, S::IBV_QPS_SQD, Rc) => (
            0,
            PORT | AV
                | TIMEOUT
                | RETRY
                | RNR_RETRY
                | READS_OUT
                | READS_IN
                | ACCESS
                | PKEY
                | MIN_RNR,
        ),
        (S::IBV_QPS_SQD, S::IBV_QPS_SQD, XrcSend) => {
            (0, PORT | AV | TIMEOUT | RETRY | RNR_RETRY | READS_OUT | ACCESS | PKEY)
        }
        (S::IBV_QPS_SQD, S::IBV_QPS_SQD, XrcReceive) => {
            (0, PORT | AV | TIMEOUT | READS_IN | ACCESS | PKEY | MIN_RNR)
        }
        (S::IBV_QPS_SQD, S::IBV_QPS_SQD, Uc) => (0, AV | ACCESS | PKEY),
        (S::IBV_QPS_SQD, S::IBV_QPS_SQD, Ud) => (0, PKEY | QKEY),
        _ => return None,
    })
}

/// The attributes of the direction that half an XRC connection does not have.
pub(crate) fn ignored(transport: Transport) -> u32 {
    match transport {
        Transport::XrcSend => READS_IN | MIN_RNR,
        Transport::XrcReceive => READS_OUT | RETRY | RNR_RETRY,
        _ => 0,
    }
}

/// Whether the transition exists and the attributes in `mask` are those that it takes.
pub(crate) fn allows(transport: Transport, from: State, to: State, mask: u32) -> bool {
    let mask = mask & !Mask::IBV_QP_STATE.0;
    row(transport, from, to).is_some_and(|(needed, allowed)| {
        // The current state is accepted for every transition.
        mask & needed == needed && mask & !(needed | allowed | CURRENT) == 0
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Transport; 7] = [
        Transport::Rc,
        Transport::Uc,
        Transport::Ud,
        Transport::XrcSend,
        Transport::XrcReceive,
        Transport::Srd,
        Transport::DcInitiator,
    ];

    #[test]
    fn the_way_up_needs_everything_and_takes_nothing_else() {
        let steps = [
            (State::IBV_QPS_RESET, State::IBV_QPS_INIT),
            (State::IBV_QPS_INIT, State::IBV_QPS_RTR),
            (State::IBV_QPS_RTR, State::IBV_QPS_RTS),
        ];
        for transport in ALL {
            for (from, to) in steps {
                let (needed, allowed) = row(transport, from, to).unwrap();
                assert!(allows(transport, from, to, needed | Mask::IBV_QP_STATE.0));
                assert!(allows(transport, from, to, needed | allowed));
                for bit in 0..32 {
                    let bit = 1 << bit;
                    if needed & bit != 0 {
                        assert!(!allows(transport, from, to, needed & !bit), "{from:?} {bit:#x}");
                    }
                }
                assert!(!allows(transport, from, to, needed | Mask::IBV_QP_ALT_PATH.0));
            }
        }
    }

    #[test]
    fn no_state_is_skipped_and_reset_and_error_are_always_there() {
        let all = (0..=6).map(State).collect::<Vec<_>>();
        for transport in ALL {
            for &from in &all {
                assert!(allows(transport, from, State::IBV_QPS_RESET, 0));
                assert!(allows(transport, from, State::IBV_QPS_ERR, 0));
            }
            assert!(row(transport, State::IBV_QPS_RESET, State::IBV_QPS_RTR).is_none());
            assert!(row(transport, State::IBV_QPS_INIT, State::IBV_QPS_RTS).is_none());
            assert!(row(transport, State::IBV_QPS_RTR, State::IBV_QPS_SQD).is_none());
            assert!(row(transport, State::IBV_QPS_ERR, State::IBV_QPS_RTS).is_none());
        }
        for reliable in [Transport::Rc, Transport::XrcSend, Transport::XrcReceive] {
            assert!(row(reliable, State::IBV_QPS_SQE, State::IBV_QPS_RTS).is_none());
        }
        assert!(row(Transport::Ud, State::IBV_QPS_SQE, State::IBV_QPS_RTS).is_some());
    }

    #[test]
    fn what_may_change_in_operation_differs_by_transport() {
        use Transport::{Rc, Uc, Ud, XrcReceive, XrcSend};
        for (transport, running, drained) in [
            (Rc, ACCESS | MIN_RNR, PORT | AV | TIMEOUT | RETRY | RNR_RETRY | READS_OUT | READS_IN),
            (XrcReceive, ACCESS | MIN_RNR, PORT | AV | TIMEOUT | READS_IN),
            (XrcSend, ACCESS, PORT | AV | TIMEOUT | RETRY | RNR_RETRY | READS_OUT),
            (Uc, ACCESS, AV),
            (Ud, QKEY, 0),
        ] {
            let row = |from, to| row(transport, from, to);
            for from in [State::IBV_QPS_RTS, State::IBV_QPS_SQD] {
                assert_eq!(row(from, State::IBV_QPS_RTS), Some((0, CURRENT | running)));
            }
            let recovers = matches!(transport, Uc | Ud).then_some((0, CURRENT | running));
            assert_eq!(row(State::IBV_QPS_SQE, State::IBV_QPS_RTS), recovers);
            assert_eq!(row(State::IBV_QPS_RTS, State::IBV_QPS_SQD), Some((0, CURRENT | NOTIFY)));
            let changes = Some((0, running | drained | PKEY));
            assert_eq!(row(State::IBV_QPS_SQD, State::IBV_QPS_SQD), changes);
        }
    }

    /// Each half of an XRC connection takes the attributes of its own direction.
    #[test]
    fn the_halves_of_an_xrc_connection_take_what_a_reliable_connection_takes() {
        let way = [State::IBV_QPS_INIT, State::IBV_QPS_RTR, State::IBV_QPS_RTS];
        for step in way.windows(2) {
            let row = |transport| row(transport, step[0], step[1]).unwrap();
            let (whole, send, receive) =
                (row(Transport::Rc), row(Transport::XrcSend), row(Transport::XrcReceive));
            assert_eq!(send.0 | receive.0, whole.0);
            assert_eq!(send.1 | receive.1, whole.1);
        }
        let row = |transport| row(transport, State::IBV_QPS_RTR, State::IBV_QPS_RTS).unwrap();
        assert_eq!(row(Transport::XrcReceive).0, TIMEOUT | SQ_PSN);
        assert_eq!(row(Transport::XrcSend).0, row(Transport::Rc).0);
    }
}
