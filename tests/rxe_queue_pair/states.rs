//! Every state and transition.

use super::*;
use ibverbs::device::{AsyncEventKind, AsyncEvents};
use ibverbs::queue_pair::AddressVector;
use ibverbs::queue_pair::{
    AttributeMask, DataInOrder, RateLimit, SendOperations, StateTransition, WorkRequestOpcode,
};
use ibverbs::settings::FlowLabel;
use ibverbs::settings::{
    AckTimeout, MaxAckRetries, MaxRnrRetries, MaximumTransferUnit, MinRnrTimer,
    PacketSequenceNumber,
};
use ibverbs::{Inline, SendWorkRequest};
use std::time::Instant;

/// The attributes of each step up to RTS.
fn with(
    transition: StateTransition,
    one: AttributeMask,
    peer: QueuePairEndpoint,
) -> StateTransition {
    let index = gid_index();
    match one {
        AttributeMask::PORT => transition.port(1),
        AttributeMask::PKEY_INDEX => transition.pkey_index(0),
        AttributeMask::ACCESS => transition.access(AccessFlags::REMOTE_WRITE),
        AttributeMask::QKEY => transition.qkey(0x1234),
        AttributeMask::PATH => transition.path(AddressVector::new(1, 0).global(peer.gid(), index)),
        AttributeMask::PATH_MTU => transition.path_mtu(MaximumTransferUnit::Mtu512),
        AttributeMask::REMOTE_NUMBER => transition.remote_number(peer.num()),
        AttributeMask::RECEIVE_PSN => transition.receive_psn(PacketSequenceNumber::new(3).unwrap()),
        AttributeMask::MAX_DEST_RD_ATOMIC => transition.max_dest_rd_atomic(2),
        AttributeMask::MIN_RNR_TIMER => transition.min_rnr_timer(MinRnrTimer::new(5).unwrap()),
        AttributeMask::SEND_PSN => transition.send_psn(PacketSequenceNumber::new(3).unwrap()),
        AttributeMask::ACK_TIMEOUT => transition.ack_timeout(AckTimeout::new(15).unwrap()),
        AttributeMask::MAX_ACK_RETRIES => {
            transition.max_ack_retries(MaxAckRetries::new(3).unwrap())
        }
        AttributeMask::MAX_RNR_RETRIES => {
            transition.max_rnr_retries(MaxRnrRetries::new(4).unwrap())
        }
        AttributeMask::MAX_RD_ATOMIC => transition.max_rd_atomic(2),
        other => panic!("{other:?} is not one of them"),
    }
}

/// The kernel's answer to a change that the crate would refuse.
fn kernel(queue_pair: &QueuePair<'_, QueuePairType>, transition: StateTransition) -> i32 {
    let (mut raw, mask) = transition.to_raw();
    // SAFETY: the queue pair is live, and the mask is made of defined bits.
    unsafe { ffi::ibv_modify_qp(queue_pair.as_raw(), &mut raw, mask.0 as i32) }
}

/// Every step up, on every transport: the crate refuses what the kernel refuses, and names it; the kernel
/// accepts what the crate passes on.
#[test]
fn the_rules_are_those_of_the_kernel() {
    use AttributeMask as A;
    use QueuePairState as S;

    let path = A::PATH | A::PATH_MTU | A::REMOTE_NUMBER | A::RECEIVE_PSN;
    let timing = A::ACK_TIMEOUT | A::MAX_ACK_RETRIES | A::MAX_RNR_RETRIES | A::MAX_RD_ATOMIC;
    let everything = path
        | timing
        | A::PORT
        | A::PKEY_INDEX
        | A::ACCESS
        | A::QKEY
        | A::MAX_DEST_RD_ATOMIC
        | A::MIN_RNR_TIMER
        | A::SEND_PSN;
    let connected = A::PORT | A::PKEY_INDEX | A::ACCESS;
    with_rxe0(|_, domain, queue| {
        for (kind, steps) in [
            (
                QueuePairType::ReliableConnected,
                [connected, path | A::MAX_DEST_RD_ATOMIC | A::MIN_RNR_TIMER, timing | A::SEND_PSN],
            ),
            (QueuePairType::UnreliableConnected, [connected, path, A::SEND_PSN]),
            (
                QueuePairType::UnreliableDatagram,
                [A::PORT | A::PKEY_INDEX | A::QKEY, A::empty(), A::SEND_PSN],
            ),
        ] {
            let mut queue_pair = builder(domain, queue, kind).build().unwrap().into_queue_pair();
            let peer = queue_pair.endpoint();
            let states = [S::Init, S::ReadyToReceive, S::ReadyToSend];
            for (to, required) in states.into_iter().zip(steps) {
                let from = queue_pair.state().unwrap();
                let change = |attributes: A| {
                    attributes.iter().fold(StateTransition::to(to), |t, one| with(t, one, peer))
                };
                for missing in required.iter() {
                    let transition = change(required - missing);
                    assert_eq!(
                        kernel(&queue_pair, transition),
                        libc::EINVAL,
                        "{kind:?} {missing:?}"
                    );
                    let error = queue_pair.modify(transition).unwrap_err();
                    assert!(error.to_string().contains(&format!("is missing for {from} to {to}")));
                }
                for extra in (everything - required).iter() {
                    let transition = change(required | extra);
                    let refused = queue_pair.modify(transition);
                    // The queue pair has changed now, if that was allowed: try the next state from the same
                    // beginning.
                    let Err(error) = refused else {
                        assert_eq!(queue_pair.state().unwrap(), to);
                        queue_pair = again(queue_pair, &steps, from, peer);
                        continue;
                    };
                    let text = format!("is not allowed for {from} to {to}");
                    assert!(error.to_string().contains(&text), "{error}");
                    assert_eq!(kernel(&queue_pair, transition), libc::EINVAL, "{kind:?} {extra:?}");
                }
                queue_pair.modify(change(required)).unwrap();
                assert_eq!(queue_pair.state().unwrap(), to);
            }
            queue_pair.close().unwrap();
        }
    });
}

/// Back to RESET, and up to state `to` again.
fn again<'a>(
    mut queue_pair: QueuePair<'a, QueuePairType>,
    steps: &[AttributeMask; 3],
    to: QueuePairState,
    peer: QueuePairEndpoint,
) -> QueuePair<'a, QueuePairType> {
    queue_pair.modify(StateTransition::to(QueuePairState::Reset)).unwrap();
    let states =
        [QueuePairState::Init, QueuePairState::ReadyToReceive, QueuePairState::ReadyToSend];
    for (state, required) in states.into_iter().zip(steps) {
        if queue_pair.state().unwrap() == to {
            break;
        }
        let transition =
            required.iter().fold(StateTransition::to(state), |t, one| with(t, one, peer));
        queue_pair.modify(transition).unwrap();
    }
    queue_pair
}

#[test]
#[ignore = "Soft-RoCE: the kernel takes the hop limit from the route"]
fn a_query_tells_what_was_set() {
    with_rxe0(|_, domain, queue| {
        let prepared = reliable(domain, queue)
            .path_mtu(MaximumTransferUnit::Mtu512)
            .send_psn(PacketSequenceNumber::new(0x12_3456).unwrap())
            .receive_psn(PacketSequenceNumber::new(0x12_3456).unwrap())
            .max_rd_atomic(2)
            .max_dest_rd_atomic(4)
            .min_rnr_timer(MinRnrTimer::new(3).unwrap())
            .ack_timeout(AckTimeout::new(15).unwrap())
            .max_ack_retries(MaxAckRetries::new(2).unwrap())
            .max_rnr_retries(MaxRnrRetries::new(5).unwrap())
            .traffic_class(0x20)
            .flow_label(FlowLabel::new(0x1234).unwrap())
            .hop_limit(7)
            .build()
            .unwrap();
        let endpoint = prepared.endpoint();
        let mut queue_pair = prepared.handshake(endpoint).unwrap();
        let found = queue_pair.query().unwrap();
        assert_eq!(found.state(), Some(QueuePairState::ReadyToSend));
        assert_eq!((found.port(), found.pkey_index()), (Some(1), Some(0)));
        let everything =
            AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
        assert!(found.access().unwrap().contains(everything));
        assert_eq!(found.path_mtu(), Some(MaximumTransferUnit::Mtu512));
        assert_eq!(found.remote_number(), Some(endpoint.num()));
        assert_eq!(found.send_psn(), PacketSequenceNumber::new(0x12_3456).ok());
        assert_eq!(found.receive_psn(), PacketSequenceNumber::new(0x12_3456).ok());
        assert_eq!((found.max_rd_atomic(), found.max_dest_rd_atomic()), (Some(2), Some(4)));
        assert_eq!(found.min_rnr_timer(), MinRnrTimer::new(3).ok());
        assert_eq!(found.ack_timeout(), AckTimeout::new(15).ok());
        assert_eq!(found.max_ack_retries(), MaxAckRetries::new(2).ok());
        assert_eq!(found.max_rnr_retries(), MaxRnrRetries::new(5).ok());
        let path = found.path().unwrap();
        assert_eq!((path.gid(), path.port()), (Some(endpoint.gid()), 1));
        let grh = path.to_raw().grh;
        // On RoCE, the kernel takes the hop limit from the route and ignores ours.
        assert_eq!((grh.traffic_class, grh.flow_label, grh.hop_limit), (0x20, 0x1234, 64));
        assert!(found.max_send_wr() >= Some(32) && found.max_inline_data() >= Some(64));
        // Attributes that can be changed together with the state.
        let stay = StateTransition::stay().min_rnr_timer(MinRnrTimer::new(9).unwrap());
        queue_pair.modify(stay).unwrap();
        let mask = AttributeMask::MIN_RNR_TIMER | AttributeMask::STATE;
        let found = queue_pair.query_attributes(mask).unwrap();
        assert_eq!(found.min_rnr_timer(), MinRnrTimer::new(9).ok());
        assert_eq!((found.state(), found.port()), (Some(QueuePairState::ReadyToSend), None));
        assert_eq!(queue_pair.data_in_order(WorkRequestOpcode::Write), DataInOrder::empty());
        let error = queue_pair.modify_rate_limit(RateLimit::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
    });
}

#[test]
fn an_error_flushes_and_a_reset_connects_again() {
    with_rxe0(|_, domain, queue| {
        let mut there = domain.allocate::<u8>(64).unwrap();
        let (mut one, mut two) = pair(|| reliable(domain, queue));
        let numbers = (one.number(), two.number());
        // SAFETY: the region is not touched before the completions.
        unsafe {
            two.post_receive(&mut there, .., 1).unwrap();
            two.post_receive(&mut there, .., 2).unwrap();
        }
        two.to_error().unwrap();
        for completion in completions(queue, 2) {
            assert_eq!(completion.result().unwrap_err().status(), WorkStatus::Flushed);
        }
        let error = two.drain(false).unwrap_err();
        assert!(error.to_string().contains("no way from ERR to SQD"), "{error}");
        one.to_error().unwrap();
        for round in 1..4 {
            let psn = |n: u32| PacketSequenceNumber::new(round * 1000 + n).unwrap();
            let first = one.reset().unwrap().set_send_psn(psn(1)).receive_psn(psn(2));
            let second = two.reset().unwrap().set_send_psn(psn(2)).receive_psn(psn(1));
            assert_eq!((first.endpoint().num(), second.endpoint().num()), numbers);
            let (here, peer) = (first.endpoint(), second.endpoint());
            one = first.handshake(peer).unwrap();
            two = second.handshake(here).unwrap();
            // SAFETY: the region is not touched before the completions.
            unsafe {
                two.post_receive(&mut there, .., 3).unwrap();
                one.post(SendWorkRequest::new(Inline(&[round as u8; 5])), 4).unwrap();
            }
            let done = completions(queue, 2);
            success(&done, 3);
            success(&done, 4);
            assert_eq!(there[..5], [round as u8; 5]);
        }
    });
}

#[test]
fn a_drained_queue_pair_holds_what_is_posted() {
    with_rxe0(|context, domain, queue| {
        let events = AsyncEvents::new(context).unwrap();
        let mut there = domain.allocate::<u8>(64).unwrap();
        let (mut one, mut two) = pair(|| reliable(domain, queue));
        // SAFETY: the region is not touched before the completions.
        unsafe {
            two.post_receive(&mut there, ..32, 1).unwrap();
            two.post_receive(&mut there, 32.., 3).unwrap();
        }
        one.drain(true).unwrap();
        let event = events.wait_until(Instant::now() + vm::PATIENCE).unwrap();
        assert_eq!(event.kind(), AsyncEventKind::SendQueueDrained);
        let found = one.query_attributes(AttributeMask::STATE).unwrap();
        assert_eq!(found.state(), Some(QueuePairState::SendQueueDrained));
        assert_eq!(found.is_draining(), Some(false));
        // SAFETY: no other request is outstanding under 2.
        unsafe { one.post(SendWorkRequest::new(Inline(b"later")), 2).unwrap() };
        std::thread::sleep(std::time::Duration::from_millis(100));
        assert!(queue.poll(&mut [WorkCompletion::default()]).unwrap().is_empty());
        one.resume().unwrap();
        assert_eq!(one.state().unwrap(), QueuePairState::ReadyToSend);
        // rxe goes on with the next post only.
        // SAFETY: no other request is outstanding under 4.
        unsafe { one.post(SendWorkRequest::new(Inline(b"at last")), 4).unwrap() };
        let done = completions(queue, 4);
        (1..=4).for_each(|wr_id| assert!(success(&done, wr_id).byte_len() <= 7));
        assert_eq!((&there[..5], &there[32..39]), (&b"later"[..], &b"at last"[..]));
    });
}

/// The way to RTS, step by step, before which a post fails: "The contract of posting", 3.
fn steps(peer: QueuePairEndpoint) -> [StateTransition; 3] {
    use AttributeMask as A;

    let path = A::PATH | A::PATH_MTU | A::REMOTE_NUMBER | A::RECEIVE_PSN;
    let timing = A::ACK_TIMEOUT | A::MAX_ACK_RETRIES | A::MAX_RNR_RETRIES | A::MAX_RD_ATOMIC;
    [
        (QueuePairState::Init, A::PORT | A::PKEY_INDEX | A::ACCESS),
        (QueuePairState::ReadyToReceive, path | A::MAX_DEST_RD_ATOMIC | A::MIN_RNR_TIMER),
        (QueuePairState::ReadyToSend, timing | A::SEND_PSN),
    ]
    .map(|(to, required)| {
        required.iter().fold(StateTransition::to(to), |t, one| with(t, one, peer))
    })
}

/// An error of a post does not end the request: Soft-RoCE has queued it, and sends what the memory holds
/// once the queue pair is in RTS.
#[test]
#[ignore = "Soft-RoCE: it keeps a request whose post has failed"]
fn a_post_that_failed_before_rts_is_carried_out_in_rts() {
    with_rxe0(|_, domain, queue| {
        let mut from = domain.allocate::<u8>(8).unwrap();
        let mut there = domain.allocate::<u8>(64).unwrap();
        let new = || reliable(domain, queue).extended(SendOperations::SEND);
        let mut one = new().build().unwrap().into_queue_pair();
        let psn = PacketSequenceNumber::new(3).unwrap();
        let two = new().send_psn(psn).receive_psn(psn).build().unwrap();
        let (here, peer) = (one.endpoint(), two.endpoint());
        let mut two = two.handshake(here).unwrap();
        let element = [from.gather_element(..).unwrap()];
        let (address, wr_ids) = (element[0].as_raw().addr as *mut u8, 1..);
        for (wr_id, step) in wr_ids.zip(steps(peer)) {
            let state = one.state().unwrap();
            // SAFETY: the device reads the memory as it is then, and all completions are polled below.
            let error = unsafe {
                if wr_id == 3 {
                    one.batch(|b| b.add(SendWorkRequest::new(&element), wr_id)).unwrap_err()
                } else {
                    let request = SendWorkRequest::new(&element);
                    one.post(request, wr_id).unwrap_err()
                }
            };
            assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
            let text = format!("the queue pair is in {state}, and must be in RTS");
            assert!(error.to_string().contains(&text), "{error}");
            one.modify(step).unwrap();
        }
        // What a program might do with memory that it takes for its own again.
        // SAFETY: the region lives on, and only this test accesses it.
        unsafe { address.write_bytes(0x77, 8) };
        // SAFETY: the regions are not touched before the completions.
        unsafe {
            for n in 0..4 {
                two.post_receive(&mut there, n * 16..n * 16 + 16, 100 + n as u64).unwrap();
            }
            one.post(
                SendWorkRequest::new(Inline(b"the only post that succeeded"[..16].as_ref())),
                4,
            )
            .unwrap();
        }
        let done = completions(queue, 8);
        for wr_id in (1..=4).chain(100..104) {
            success(&done, wr_id);
        }
        for message in 0..3 {
            assert_eq!(there[message * 16..message * 16 + 8], [0x77; 8], "message {message}");
        }
        assert_eq!(there[48..64], b"the only post th"[..]);
        from.fill(0);
    });
}

/// Only RESET takes such a request back.
#[test]
fn a_reset_takes_back_what_a_failed_post_has_queued() {
    with_rxe0(|_, domain, queue| {
        let mut there = domain.allocate::<u8>(64).unwrap();
        let new = || reliable(domain, queue);
        let mut one = new().build().unwrap().into_queue_pair();
        let psn = PacketSequenceNumber::new(3).unwrap();
        let two = new().send_psn(psn).receive_psn(psn).build().unwrap();
        let (here, peer) = (one.endpoint(), two.endpoint());
        let mut two = two.handshake(here).unwrap();
        // SAFETY: the regions are not touched before the completions.
        unsafe {
            two.post_receive(&mut there, ..32, 100).unwrap();
            two.post_receive(&mut there, 32.., 101).unwrap();
            one.post(SendWorkRequest::new(Inline(b"refused")), 1).unwrap_err();
            let [init, ..] = steps(peer);
            one.modify(init).unwrap();
            one.post(SendWorkRequest::new(Inline(b"refused too")), 2).unwrap_err();
            one.modify(StateTransition::to(QueuePairState::Reset)).unwrap();
            for step in steps(peer) {
                one.modify(step).unwrap();
            }
            one.post(SendWorkRequest::new(Inline(b"first")), 3).unwrap();
            one.post(SendWorkRequest::new(Inline(b"second")), 4).unwrap();
        }
        let done = completions(queue, 4);
        for wr_id in [3, 4, 100, 101] {
            success(&done, wr_id);
        }
        assert_eq!((&there[..5], &there[32..38]), (&b"first"[..], &b"second"[..]));
    });
}

/// Requests that a reset has taken back are no part of the next connection. Linux 6.12 goes on with the
/// cleared entries of its queue, which are RDMA writes without data, and this peer refuses writes.
#[test]
fn a_reset_leaves_no_trace_in_the_next_connection() {
    with_rxe0(|_, domain, queue| {
        let mut inbox = domain.allocate::<u8>(16).unwrap();
        let new = || reliable(domain, queue).access(AccessFlags::empty());
        let mut one = new().build().unwrap().into_queue_pair();
        for wr_id in 0..3 {
            // SAFETY: an inline post has copied its bytes.
            unsafe { one.post(SendWorkRequest::new(Inline(b"refused")), wr_id) }.unwrap_err();
        }
        let (one, two) = (one.reset().unwrap(), new().build().unwrap());
        let (here, there) = (one.endpoint(), two.endpoint());
        let (mut one, mut two) = (one.handshake(there).unwrap(), two.handshake(here).unwrap());
        // SAFETY: the region is not touched before the completions.
        unsafe {
            two.post_receive(&mut inbox, .., 4).unwrap();
            one.post(SendWorkRequest::new(Inline(b"a message")), 3).unwrap();
        }
        let both = completions(queue, 2);
        success(&both, 3);
        assert_eq!(success(&both, 4).byte_len(), 9);
        assert_eq!(inbox[..9], b"a message"[..]);
    });
}
