//! A message that is longer than its receive.

use std::time::{Duration, Instant};

use ibverbs::{Channel, MemoryRegion, TransportError, WorkStatus, completion::WorkError, ffi};

use crate::alone;
use crate::figures::figure;
use crate::vm::PATIENCE;
use crate::vm::channels::{connect, deadline, exchange, nothing_is_left, reconnect, sides};

/// The state of a channel's queue pair that the kernel reports.
fn state(channel: &Channel<'_>) -> ffi::ibv_qp_state {
    let (mut attr, mut init) = Default::default();
    let mask = ffi::ibv_qp_attr_mask::IBV_QP_STATE.0 as i32;
    // SAFETY: the queue pair is live, and both structs are writable.
    let error = unsafe { ffi::ibv_query_qp(channel.as_raw(), &mut attr, mask, &mut init) };
    assert_eq!(error, 0);
    attr.qp_state
}

#[test]
fn a_message_that_does_not_fit_is_told_to_both() {
    let _alone = alone("short receive", 250);
    let sides = sides();
    let (mut one, mut two) = connect(sides.0.builder(), sides.1.builder());
    let mut seen = Vec::new();
    let mut slowest = Duration::ZERO;
    // The receive ends within the only packet, at the end of a packet, in a later packet, one byte early;
    // and a receive without room.
    for (message, room) in [(65, 64), (1025, 1024), (20_000, 4096), (20_000, 19_999), (1, 0)] {
        let what = format!("{message} bytes into {room}");
        let source = MemoryRegion::<u8>::new(&sides.0.domain, message).unwrap();
        let mut sink = MemoryRegion::<u8>::new(&sides.1.domain, room + 4096).unwrap();
        sink.fill(0xcc);
        let start = Instant::now();
        let mut sent = None;
        let received = two.scope(|s| {
            let (short, rest) = sink.slice_mut(..)?.split_at(room)?;
            let receive = s.post_receive(short)?;
            let behind = s.post_receive(rest)?;
            sent = Some(one.until(deadline()).send(source.slice(..)?));
            let error = receive.wait_until(deadline()).map(drop).unwrap_err();
            // Later requests end too.
            let flushed = behind.wait_until(deadline()).map(drop).unwrap_err();
            assert_eq!(flushed.work_error().unwrap().status(), WorkStatus::Flushed, "{what}");
            Ok::<_, TransportError>(error.work_error().unwrap())
        });
        let received: WorkError = received.unwrap();
        let sent = sent.unwrap().unwrap_err().work_error().unwrap();
        slowest = slowest.max(start.elapsed());
        assert_eq!(state(&one), ffi::ibv_qp_state::IBV_QPS_ERR, "{what}");
        assert_eq!(state(&two), ffi::ibv_qp_state::IBV_QPS_ERR, "{what}");
        assert!(sink[room..].iter().all(|&byte| byte == 0xcc), "{what}: it ran over its end");
        // The status of the standard, and that of Soft-RoCE.
        let length = (WorkStatus::LocalLength, WorkStatus::RemoteInvalidRequest);
        let rxe = (WorkStatus::LocalQueuePairOperation, WorkStatus::RemoteOperation);
        let statuses = (received.status(), sent.status());
        assert!(statuses == length || statuses == rxe, "{what}: {statuses:?}");
        seen.push(statuses);
        (one, two) = reconnect(one, two);
        exchange(&sides, &mut one, &mut two);
    }
    assert!(slowest < PATIENCE, "{slowest:?}");
    let cases = seen.len();
    seen.dedup();
    drop((one, two));
    nothing_is_left(sides);
    figure(
        "short-receive",
        &format!(
            "{cases} lengths: (receiver, sender) {seen:?}, within {slowest:.1?} (bound \
             {PATIENCE:?}); nothing written behind the receive's end; both queue pairs in ERR, the \
             receive behind it Flushed; reset, connected again and data moved after each; resources \
             at baseline"
        ),
    );
}
