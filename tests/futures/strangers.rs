//! Completions that are of no operation in flight end no future, and give no buffer back.

use ibverbs::{AsyncOperation, PooledBuffer, SendWorkRequest, TransportError, ffi};

use crate::rig::{CHUNKS, Count, LEN, Rig, completions, poll, poll_in, posted, serve};

/// With a send and a receive in flight on the first channel. Returns the numbers of both.
fn in_flight(
    rig: &Rig,
) -> (AsyncOperation<SendWorkRequest<PooledBuffer>>, ibverbs::AsyncReceive, [u64; 2]) {
    let receive = posted(rig.one.receive(rig.buffer(9)));
    let received = rig.device.posted(0).unwrap();
    let send = posted(rig.one.send(rig.buffer(1)));
    let sent = rig.device.posted(0).unwrap();
    assert_eq!((received.receive, sent.receive, sent.qp_num), (true, false, rig.one.number()));
    (send, receive, [sent.wr_id, received.wr_id])
}

/// Of no queue pair, though the numbers are those of operations in flight; or of an earlier connection.
#[test]
fn completions_that_are_for_no_operation_of_a_channel_are_dropped() {
    let rig = Rig::new();
    let (mut send, mut receive, numbers) = in_flight(&rig);
    // The peer has operations in the same slots.
    let (mut back, mut from_one) =
        (posted(rig.two.send(rig.buffer(2))), posted(rig.two.receive(rig.buffer(8))));
    let count = std::sync::Arc::new(Count::default());
    assert!(poll_in(&mut send, &count).is_none() && poll_in(&mut receive, &count).is_none());
    assert!(poll_in(&mut back, &count).is_none() && poll_in(&mut from_one, &count).is_none());
    let (one, two) = (rig.one.number(), rig.two.number());
    let earlier = |wr_id: u64| wr_id - (1 << 32);
    for opcode in [ffi::ibv_wc_opcode::IBV_WC_SEND, ffi::ibv_wc_opcode::IBV_WC_RECV] {
        for (wr_id, qp_num) in numbers
            .into_iter()
            .flat_map(|wr_id| [(wr_id, two + 7), (wr_id, 0xff_ffff), (earlier(wr_id), one)])
        {
            for status in
                [ffi::ibv_wc_status::IBV_WC_SUCCESS, ffi::ibv_wc_status::IBV_WC_WR_FLUSH_ERR]
            {
                let stranger = ffi::ibv_wc { wr_id, qp_num, opcode, status, ..Default::default() };
                rig.device.inject(completions(&rig.device), &stranger);
                while rig.reactor.turn().unwrap() > 0 {}
                assert_eq!(count.get(), 0, "woken by {wr_id:#x} of {qp_num:#x}");
                // A future that polls finds it by itself.
                rig.device.inject(completions(&rig.device), &stranger);
                assert!(poll_in(&mut send, &count).is_none(), "{wr_id:#x} of {qp_num:#x}");
                assert!(poll_in(&mut receive, &count).is_none(), "{wr_id:#x} of {qp_num:#x}");
                assert!(
                    poll_in(&mut back, &count).is_none()
                        && poll_in(&mut from_one, &count).is_none()
                );
                assert_eq!(rig.device.outstanding(one), (1, 1), "both are in flight");
                assert_eq!(rig.pool.available(), CHUNKS - 4);
            }
        }
    }
    // Those of dropped futures give no buffer back either.
    drop(back);
    let stranger = ffi::ibv_wc { wr_id: numbers[0], qp_num: two + 7, ..Default::default() };
    rig.device.inject(completions(&rig.device), &stranger);
    while rig.reactor.turn().unwrap() > 0 {}
    assert_eq!(rig.pool.available(), CHUNKS - 4);
    serve(&rig.device, &rig.reactor);
    assert_eq!(poll(&mut send).expect("it has ended").unwrap().0[..], [1; LEN]);
    assert_eq!(poll(&mut receive).expect("it has ended").unwrap().0[..], [2; LEN]);
    assert_eq!(poll(&mut from_one).expect("it has ended").unwrap().0[..], [1; LEN]);
    drop((send, receive, from_one));
    rig.finish();
}

/// Of a channel, with a number that no connection has had, or of a slot that is free or does not exist: the provider
/// cannot be trusted any more, and the channel ends.
#[test]
fn a_completion_of_nothing_ends_the_channel_with_nothing_in_flight() {
    for which in 0..8 {
        for by_the_reactor in [true, false] {
            for can_be_taken_back in [true, false] {
                let rig = Rig::new();
                let (mut send, mut receive, [sent, received]) = in_flight(&rig);
                let (first, qp_num) = (sent & !0xffff_ffff, rig.one.number());
                let wr_id = [
                    0,
                    7,
                    u64::MAX,
                    sent + (1 << 32),
                    sent + 1,
                    received + 1,
                    first | 0x7fff_ffff,
                    first | 0xffff_ffff,
                ][which];
                if !can_be_taken_back {
                    for verb in ["modify_qp", "destroy_qp"] {
                        rig.device.fail(verb).errno(libc::EIO).always();
                    }
                }
                let stranger = ffi::ibv_wc { wr_id, qp_num, ..Default::default() };
                rig.device.inject(completions(&rig.device), &stranger);
                if by_the_reactor {
                    while rig.reactor.turn().unwrap() > 0 {}
                }
                let in_flight = if can_be_taken_back { (0, 0) } else { (1, 1) };
                let ended = poll(&mut send).expect("it has ended").unwrap_err();
                assert_eq!(rig.device.outstanding(qp_num), in_flight, "when it ends");
                let queue_pair = qp_num;
                assert_eq!(ended.error, TransportError::UnknownCompletion { queue_pair, wr_id });
                assert_eq!(ended.buffer.is_some(), can_be_taken_back, "{wr_id:#x}");
                let ended_too = poll(&mut receive).expect("it has ended").unwrap_err();
                assert_eq!(
                    ended_too.error,
                    TransportError::UnknownCompletion { queue_pair, wr_id }
                );
                assert_eq!(ended_too.buffer.is_some(), can_be_taken_back, "{wr_id:#x}");
                drop((send, receive, ended, ended_too));
                let left = if can_be_taken_back { 0 } else { 2 };
                assert_eq!(rig.pool.available(), CHUNKS - left);
                serve(&rig.device, &rig.reactor);
                if can_be_taken_back {
                    rig.finish();
                } else {
                    assert_eq!(rig.device.violations().0, 0, "{}", rig.device.violations().1);
                }
            }
        }
    }
}

/// The completion of an operation ends it once: the same one again is of nothing.
#[test]
fn a_completion_that_comes_twice_ends_the_next_operation_of_the_slot_with_its_channel() {
    let rig = Rig::new();
    let mut sink = posted(rig.two.receive(rig.buffer(0)));
    let mut send = posted(rig.one.send(rig.buffer(1)));
    let (wr_id, qp_num) = (rig.device.posted(0).unwrap().wr_id, rig.one.number());
    serve(&rig.device, &rig.reactor);
    poll(&mut send).expect("it has ended").unwrap();
    poll(&mut sink).expect("it has ended").unwrap();
    let mut next = posted(rig.one.send(rig.buffer(2)));
    let again = ffi::ibv_wc { wr_id, qp_num, ..Default::default() };
    rig.device.inject(completions(&rig.device), &again);
    let ended = poll(&mut next).expect("it has ended").unwrap_err();
    assert_eq!(rig.device.outstanding(qp_num), (0, 0));
    assert!(matches!(ended.error, TransportError::UnknownCompletion { .. }), "{ended}");
    drop((ended, next, send, sink));
    rig.finish();
}
