//! Asynchronous events: of ports, of queue pairs, and of objects that are destroyed in the meantime.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::device::AsyncEventKind as Kind;
use ibverbs::device::AsyncEventSubject as Subject;
use ibverbs::device::{AsyncEvent, AsyncEvents};
use ibverbs::{Inline, Rc, SendWorkRequest};

use super::vm::{PATIENCE, assert_nothing_left, completions, kernel_release, one_at_a_time, run};
use super::{SOON, exchange, loopback};

/// The next event of this kind. Events of other kinds may come first.
fn await_event(events: &AsyncEvents<'_>, kind: Kind) -> AsyncEvent {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let event = events.wait_until(deadline).unwrap_or_else(|e| panic!("{kind:?}: {e}"));
        if event.kind() == kind {
            return event;
        }
    }
}

#[test]
#[ignore = "Soft-RoCE: switches a network interface off"]
fn ports_come_and_go() {
    let _lock = one_at_a_time();
    {
        let context = ibverbs::open("rxe0").unwrap();
        let events = context.async_events().unwrap();
        run("ip link set veth0 down");
        assert_eq!(await_event(&events, Kind::PortError).subject(), Subject::Port(1));
        run("ip link set veth0 up");
        assert_eq!(await_event(&events, Kind::PortActive).subject(), Subject::Port(1));
        // Some events stay unread when the context is closed.
        run("ip link set veth0 down; ip link set veth0 up");
    }
    assert_nothing_left("rxe0");
    // Restores the GID table of the port for other tests.
    let context = ibverbs::open("rxe0").unwrap();
    let start = Instant::now();
    while context.routable_gid(1).is_err() || context.query_gid(1, 1).is_err() {
        assert!(start.elapsed() < PATIENCE);
        thread::sleep(SOON);
    }
}

#[test]
fn queue_pairs_and_shared_receive_queues_raise_events() {
    let _lock = one_at_a_time();
    {
        let context = ibverbs::open("rxe0").unwrap();
        let domain = context.alloc_pd().unwrap();
        let events = context.async_events().unwrap();
        let queue = context.create_cq(64).unwrap();
        let receives = domain.create_srq(16, 1).unwrap();
        receives.set_token(5);
        let mut region = domain.allocate::<u8>(64).unwrap();
        let builder = domain.create_qp(&queue, &queue, Rc);
        let prepared = builder.max_send_wr(16).max_inline_data(16).srq(&receives).build().unwrap();
        let itself = prepared.endpoint();
        let mut pair = prepared.handshake(itself).unwrap();
        for wr_id in 0..3 {
            // SAFETY: the region outlives the queue pair, and is not looked at.
            unsafe { receives.post_receive(&mut region, .., wr_id).unwrap() };
        }
        receives.set_limit(3).unwrap();
        // SAFETY: no memory is involved.
        unsafe { pair.post(SendWorkRequest::new(Inline(&[1; 3])), 9).unwrap() };
        completions(&queue, 2);
        let event = await_event(&events, Kind::SharedReceiveQueueLimit);
        assert_eq!(event.subject(), Subject::SharedReceiveQueue(5));

        pair.drain(true).unwrap();
        let event = await_event(&events, Kind::SendQueueDrained);
        assert_eq!(event.subject(), Subject::QueuePair(pair.number()));
        pair.to_error().unwrap();
        // Linux 6.1 does not raise it.
        if kernel_release() >= (6, 12) {
            let event = await_event(&events, Kind::LastRequestReached);
            assert_eq!(event.subject(), Subject::QueuePair(pair.number()));
        } else {
            let event = events.wait_until(Instant::now() + SOON).ok();
            println!("on Linux {:?} there was {event:?}", kernel_release());
        }
    }
    assert_nothing_left("rxe0");
}

#[test]
fn objects_go_while_their_events_are_read() {
    let _lock = one_at_a_time();
    {
        let context = ibverbs::open("rxe0").unwrap();
        let domain = context.alloc_pd().unwrap();
        let (over, count) = (AtomicBool::new(false), AtomicU32::new(0));
        thread::scope(|scope| {
            scope.spawn(|| {
                let events = context.async_events().unwrap();
                while !over.load(Ordering::Acquire) {
                    let is_event = events.wait_until(Instant::now() + SOON / 10).is_ok();
                    count.fetch_add(is_event.into(), Ordering::Relaxed);
                }
            });
            let end = Instant::now() + PATIENCE;
            let goes_on = |&round: &u64| {
                round < 100 || count.load(Ordering::Relaxed) == 0 && Instant::now() < end
            };
            for round in (0..).take_while(goes_on) {
                let sends = context.create_cq(64).unwrap();
                let small = context.create_cq(1).unwrap();
                let mut region = domain.allocate::<u8>(64).unwrap();
                let mut pair = loopback(&domain, &sends, &small);
                for wr_id in 0..u64::from(small.capacity()) + 3 {
                    exchange(&mut pair, &mut region, wr_id);
                }
                // Destroyed at any time relative to the event.
                thread::sleep(Duration::from_micros(round % 100 * 20));
            }
            over.store(true, Ordering::Release);
        });
        assert!(count.into_inner() > 0, "or this tests nothing");
    }
    assert_nothing_left("rxe0");
}
