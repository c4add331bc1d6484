//! Events, waiting, extended polling and asynchronous events on Soft-RoCE. To be run by
//! `script/test device`, in the machine that `script/vm` starts.

mod vm;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::AsyncEventKind as Kind;
use ibverbs::AsyncEventSubject as Subject;
use ibverbs::{
    AsyncEvent, AsyncEvents, CompletionChannel, CompletionFields, CompletionQueue, Error,
    ErrorKind, MemoryRegion, ProtectionDomain, QueuePair, QueuePairType, SendWorkRequest,
    WorkCompletion, WorkOpcode, ffi,
};

use vm::{PATIENCE, assert_nothing_left, completions, one_at_a_time, run, success};

const SOON: Duration = Duration::from_millis(50);

/// A reliable queue pair that is connected to itself.
fn loopback<'a>(
    domain: &'a ProtectionDomain<'a>,
    sends: &'a CompletionQueue<'a>,
    receives: &'a CompletionQueue<'a>,
) -> QueuePair<'a> {
    let builder = domain.create_qp(sends, receives, QueuePairType::ReliableConnected);
    let prepared = builder.max_send_wr(64).max_recv_wr(64).max_inline_data(64).build().unwrap();
    let itself = prepared.endpoint();
    prepared.handshake(itself).unwrap()
}

/// A message to itself; its send completes as `wr_id`, and its receive as `wr_id + 1000`.
fn exchange(pair: &mut QueuePair<'_>, region: &mut MemoryRegion<'_, u8>, wr_id: u64) {
    // SAFETY: the region outlives the queue pair, and is not looked at.
    unsafe {
        pair.post_receive(region, .., wr_id + 1000).unwrap();
        pair.post_inline(&[7; 16], wr_id).unwrap();
    }
}

fn ids(found: &[WorkCompletion]) -> Vec<u64> {
    found.iter().map(WorkCompletion::wr_id).collect()
}

#[test]
fn receiving_sleeps_until_a_message_comes() {
    let _lock = one_at_a_time();
    {
        let context = ibverbs::open("rxe0").unwrap();
        let domain = context.alloc_pd().unwrap();
        let sends = context.create_cq(64).unwrap();
        let receives = CompletionQueue::builder(&context, 64)
            .own_channel()
            .completion_vector(context.completion_vectors() - 1)
            .build()
            .unwrap();
        let mut region = domain.allocate::<u8>(64).unwrap();
        let mut pair = loopback(&domain, &sends, &receives);
        let mut room = [WorkCompletion::default(); 4];

        let start = Instant::now();
        let error = receives.wait_timeout(&mut room, SOON).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert!(start.elapsed() >= SOON);
        for round in 0..200 {
            // SAFETY: the region outlives the queue pair, and is not looked at.
            unsafe { pair.post_receive(&mut region, .., round).unwrap() };
            thread::scope(|scope| {
                scope.spawn(|| {
                    if round % 8 == 0 {
                        thread::sleep(Duration::from_millis(2));
                    }
                    // SAFETY: no memory is involved.
                    unsafe { pair.post_inline(&[1; 9], 0).unwrap() };
                });
                let found = receives.wait_timeout(&mut room, PATIENCE).unwrap();
                assert_eq!(ids(found), [round]);
                assert_eq!(found[0].result().unwrap().byte_len(), 9);
            });
            success(&completions(&sends, 1), 0);
        }
    }
    assert_nothing_left("rxe0");
}

#[test]
fn two_threads_wait_for_one_queue() {
    let _lock = one_at_a_time();
    let context = ibverbs::open("rxe0").unwrap();
    let domain = context.alloc_pd().unwrap();
    let sends = context.create_cq(64).unwrap();
    let receives = CompletionQueue::builder(&context, 64).own_channel().build().unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    let mut pair = loopback(&domain, &sends, &receives);
    for round in 0..100 {
        thread::scope(|scope| {
            let waiters = [0, 1].map(|_| {
                scope.spawn(|| {
                    let mut room = [WorkCompletion::default(); 1];
                    receives.wait_timeout(&mut room, PATIENCE).map(|found| found[0].wr_id())
                })
            });
            if round % 2 == 0 {
                thread::sleep(Duration::from_millis(1));
            }
            exchange(&mut pair, &mut region, 1);
            exchange(&mut pair, &mut region, 2);
            let mut found = waiters.map(|waiter| waiter.join().unwrap().expect("left asleep"));
            found.sort_unstable();
            assert_eq!(found, [1001, 1002]);
        });
        completions(&sends, 2);
    }
}

#[test]
fn an_event_loop_serves_two_queues() {
    let _lock = one_at_a_time();
    {
        let context = ibverbs::open("rxe0").unwrap();
        let domain = context.alloc_pd().unwrap();
        let channel = CompletionChannel::new(&context).unwrap();
        let make = |token| {
            CompletionQueue::builder(&context, 64).channel(&channel).token(token).build().unwrap()
        };
        let queues = [make(0), make(1)];
        let mut region = domain.allocate::<u8>(64).unwrap();
        let mut pair = loopback(&domain, &queues[0], &queues[1]);
        let mut room = [WorkCompletion::default(); 3];
        assert_eq!(channel.next_event().unwrap(), None);
        let mut found: BTreeMap<u64, usize> = BTreeMap::new();
        let mut drain = |queue: &CompletionQueue<'_>| {
            loop {
                match queue.poll_or_arm(&mut room).unwrap() {
                    [] => break,
                    some => ids(some).iter().for_each(|id| *found.entry(*id).or_default() += 1),
                }
            }
            found.len()
        };
        queues.iter().for_each(|queue| assert_eq!(drain(queue), 0));
        thread::scope(|scope| {
            scope.spawn(|| {
                for wr_id in 0..60 {
                    exchange(&mut pair, &mut region, wr_id);
                    if wr_id % 16 == 0 {
                        thread::sleep(Duration::from_millis(2));
                    }
                }
            });
            let mut count = 0;
            let start = Instant::now();
            while count < 120 {
                let mut file =
                    libc::pollfd { fd: channel.as_fd().as_raw_fd(), events: 1, revents: 0 };
                // SAFETY: there is one file.
                let ready = unsafe { libc::poll(&mut file, 1, PATIENCE.as_millis() as i32) };
                assert_eq!(ready, 1, "{count} of 120 completions, and no event");
                assert!(start.elapsed() < PATIENCE);
                while let Some(event) = channel.next_event().unwrap() {
                    count = drain(&queues[event.token()]);
                }
            }
        });
        assert!(found.values().all(|&times| times == 1), "{found:?}");
        // The queues are armed, and there may be events of theirs; nothing waits for them.
        exchange(&mut pair, &mut region, 0);
        channel.wait_timeout(PATIENCE).unwrap();
    }
    assert_nothing_left("rxe0");
}

#[test]
fn a_solicited_event_is_asked_for_by_the_sender() {
    let _lock = one_at_a_time();
    let context = ibverbs::open("rxe0").unwrap();
    let domain = context.alloc_pd().unwrap();
    let sends = context.create_cq(64).unwrap();
    let receives =
        CompletionQueue::builder(&context, 64).own_channel().solicited_only().build().unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    let mut pair = loopback(&domain, &sends, &receives);
    let wait = |timeout| {
        let mut room = [WorkCompletion::default(); 4];
        ids(receives.wait_timeout(&mut room, timeout).unwrap())
    };
    let mut send = |solicited: bool, wr_id: u64| {
        let request = SendWorkRequest::new(&[]).unwrap();
        let mut request = if solicited { request.solicited() } else { request };
        // SAFETY: the region outlives the queue pair, and is not looked at.
        unsafe {
            pair.post_receive(&mut region, .., wr_id).unwrap();
            pair.post(&mut request, 0).unwrap();
        }
        success(&completions(&sends, 1), 0);
    };
    thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let start = Instant::now();
            let found = wait(SOON * 10);
            (found, start.elapsed())
        });
        thread::sleep(SOON);
        send(false, 1);
        let (found, took) = waiter.join().unwrap();
        assert_eq!(found, [1], "found in the end");
        assert!(took >= SOON * 10, "but it woke nobody: {took:?}");

        let waiter = scope.spawn(|| wait(PATIENCE));
        thread::sleep(SOON);
        send(false, 2);
        thread::sleep(SOON);
        assert!(!waiter.is_finished());
        send(true, 3);
        assert_eq!(waiter.join().unwrap(), [2, 3]);
    });
}

#[test]
fn a_resized_queue_keeps_its_completions() {
    let _lock = one_at_a_time();
    let context = ibverbs::open("rxe0").unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    let mut pair = loopback(&domain, &queue, &queue);
    for wr_id in 0..2 {
        exchange(&mut pair, &mut region, wr_id);
    }
    thread::sleep(SOON);
    queue.resize(100).unwrap();
    assert!(queue.capacity() >= 100, "{}", queue.capacity());
    for wr_id in 2..20 {
        exchange(&mut pair, &mut region, wr_id);
    }
    let mut found = ids(&completions(&queue, 40));
    found.sort_unstable();
    assert_eq!(found, (0..20).chain(1000..1020).collect::<Vec<_>>());
    for wr_id in 0..20 {
        exchange(&mut pair, &mut region, wr_id);
    }
    thread::sleep(SOON);
    let error = queue.resize(4).unwrap_err();
    assert_eq!((error.kind(), error.verb()), (ErrorKind::InvalidInput, "ibv_resize_cq"));
    assert_eq!(completions(&queue, 40).len(), 40, "and nothing is lost by that");
    let most = context.query_device().unwrap().max_cqe();
    assert_eq!(queue.resize(most + 1).unwrap_err().kind(), ErrorKind::InvalidInput);
}

#[test]
fn what_soft_roce_has_not_is_an_error() {
    let _lock = one_at_a_time();
    let context = ibverbs::open("rxe0").unwrap();
    let queue = context.create_cq(8).unwrap();
    let error = queue.moderate(4, Duration::from_micros(10)).unwrap_err();
    assert_eq!((error.kind(), error.verb()), (ErrorKind::Unsupported, "ibv_modify_cq"));
    let build = |fields| CompletionQueue::builder(&context, 8).extended(fields);
    for builder in [
        build(CompletionFields::TIMESTAMP),
        build(CompletionFields::WALLCLOCK),
        build(CompletionFields::VLAN),
        build(CompletionFields::STANDARD).ignore_overrun(),
    ] {
        let error = builder.build().unwrap_err();
        assert_eq!((error.kind(), error.verb()), (ErrorKind::Unsupported, "ibv_create_cq_ex"));
    }
    let vectors = context.completion_vectors();
    let error = CompletionQueue::builder(&context, 8).completion_vector(vectors).build();
    assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidInput);
}

#[test]
fn an_extended_queue_serves_queue_pairs() {
    let _lock = one_at_a_time();
    {
        let context = ibverbs::open("rxe0").unwrap();
        let domain = context.alloc_pd().unwrap();
        let builder = CompletionQueue::builder(&context, 64).extended(CompletionFields::STANDARD);
        let queue = builder.own_channel().build().unwrap();
        let mut region = domain.allocate::<u8>(64).unwrap();
        let mut pair = loopback(&domain, &queue, &queue);
        let mut poller = queue.extended_poller().unwrap();
        assert!(poller.poll(|completions| completions.next().unwrap().is_none()));
        let number = pair.number();
        for round in 0..20 {
            exchange(&mut pair, &mut region, round);
            let mut found = Vec::new();
            while found.len() < 2 {
                poller
                    .wait_timeout(PATIENCE, |completions| {
                        while let Some(completion) = completions.next()? {
                            assert_eq!(completion.queue_pair_number(), Some(number));
                            let success = completion.result().unwrap();
                            assert_eq!(success.immediate(), None);
                            if success.opcode() == WorkOpcode::Receive {
                                assert_eq!(success.byte_len(), Some(16));
                            }
                            found.push((completion.wr_id(), success.opcode()));
                        }
                        Ok::<_, Error>(())
                    })
                    .unwrap()
                    .unwrap();
            }
            found.sort_unstable_by_key(|&(wr_id, _)| wr_id);
            assert_eq!(found, [(round, WorkOpcode::Send), (round + 1000, WorkOpcode::Receive)]);
        }
        // A failure, and classic polling beside it.
        // SAFETY: the region outlives the queue pair, and is not looked at.
        unsafe { pair.post_receive(&mut region, .., 5).unwrap() };
        pair.to_error().unwrap();
        thread::sleep(SOON);
        let status = poller.poll(|completions| {
            completions.next().unwrap().unwrap().result().map(|_| ()).unwrap_err().status()
        });
        assert_eq!(status, ibverbs::WorkStatus::Flushed);
        assert!(queue.poll(&mut [WorkCompletion::default()]).unwrap().is_empty());
    }
    assert_nothing_left("rxe0");
}

/// The provider's `ibv_next_poll` gives up its lock too early: it must not be called.
#[test]
fn each_completion_is_a_poll_of_its_own() {
    unsafe extern "C" fn broken(_: *mut ffi::ibv_cq_ex) -> i32 {
        eprintln!("the workaround for Soft-RoCE is not in effect");
        std::process::abort()
    }
    let _lock = one_at_a_time();
    let context = ibverbs::open("rxe0").unwrap();
    let domain = context.alloc_pd().unwrap();
    let builder = CompletionQueue::builder(&context, 64).extended(CompletionFields::empty());
    let queue = builder.build().unwrap();
    // SAFETY: the queue is live, an extended one, and not being polled.
    unsafe { (*queue.as_raw().cast::<ffi::ibv_cq_ex>()).next_poll = Some(broken) };
    let mut region = domain.allocate::<u8>(64).unwrap();
    let mut pair = loopback(&domain, &queue, &queue);
    for wr_id in 0..4 {
        exchange(&mut pair, &mut region, wr_id);
    }
    thread::sleep(SOON);
    let mut poller = queue.extended_poller().unwrap();
    let mut found = Vec::new();
    let start = Instant::now();
    while found.len() < 8 {
        poller.poll(|completions| {
            while let Some(completion) = completions.next().unwrap() {
                found.push(completion.wr_id());
            }
        });
        assert!(start.elapsed() < PATIENCE);
    }
    found.sort_unstable();
    assert_eq!(found, [0, 1, 2, 3, 1000, 1001, 1002, 1003]);
}

#[test]
fn two_threads_that_poll_an_extended_queue_find_each_completion_once() {
    const MESSAGES: u64 = 1000;
    let _lock = one_at_a_time();
    let context = ibverbs::open("rxe0").unwrap();
    let domain = context.alloc_pd().unwrap();
    let sends = context.create_cq(64).unwrap();
    // Room for all: the pollers may be late.
    let builder = CompletionQueue::builder(&context, 4096).extended(CompletionFields::empty());
    let receives = builder.build().unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    let mut pair = loopback(&domain, &sends, &receives);
    let stop = AtomicBool::new(false);
    let over = || stop.load(Ordering::Acquire);
    let all = thread::scope(|scope| {
        let extended = scope.spawn(|| {
            let mut poller = receives.extended_poller().unwrap();
            let mut found = Vec::new();
            while !over() {
                poller.poll(|completions| {
                    while let Some(completion) = completions.next().unwrap() {
                        found.push(completion.wr_id());
                    }
                });
                thread::yield_now();
            }
            found
        });
        let classic = scope.spawn(|| {
            let mut room = [WorkCompletion::default(); 2];
            let mut found = Vec::new();
            while !over() {
                found.extend(ids(receives.poll(&mut room).unwrap()));
                thread::yield_now();
            }
            found
        });
        let mut found = 0;
        for wr_id in 0..MESSAGES {
            exchange(&mut pair, &mut region, wr_id);
            while wr_id - found >= 16 {
                found += completions(&sends, 1).len() as u64;
            }
        }
        completions(&sends, (MESSAGES - found) as usize);
        stop.store(true, Ordering::Release);
        [extended.join().unwrap(), classic.join().unwrap()]
    });
    assert!(all.iter().all(|found| !found.is_empty()), "or this tests nothing");
    let mut all = all.concat();
    // What the two had no time for.
    let mut room = vec![WorkCompletion::default(); 4096];
    all.extend(ids(receives.poll(&mut room).unwrap()));
    all.sort_unstable();
    let twice = all.windows(2).filter(|pair| pair[0] == pair[1]).count();
    assert_eq!((twice, all.len() as u64), (0, MESSAGES));
}

/// The next event of this kind; others may come before it.
fn await_event(events: &AsyncEvents<'_>, kind: Kind) -> AsyncEvent {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let event = events.wait_deadline(deadline).unwrap_or_else(|e| panic!("{kind:?}: {e}"));
        if event.kind() == kind {
            return event;
        }
    }
}

#[test]
fn ports_come_and_go() {
    let _lock = one_at_a_time();
    {
        let context = ibverbs::open("rxe0").unwrap();
        let events = context.async_events().unwrap();
        run("ip link set veth0 down");
        assert_eq!(await_event(&events, Kind::PortError).subject(), Subject::Port(1));
        run("ip link set veth0 up");
        assert_eq!(await_event(&events, Kind::PortActive).subject(), Subject::Port(1));
        // .. and some that nobody reads, before the context is closed.
        run("ip link set veth0 down; ip link set veth0 up");
    }
    assert_nothing_left("rxe0");
    // The address table of the port is there again for other tests.
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
        let builder = domain.create_qp(&queue, &queue, QueuePairType::ReliableConnected);
        let prepared = builder.max_send_wr(16).max_inline_data(16).srq(&receives).build().unwrap();
        let itself = prepared.endpoint();
        let mut pair = prepared.handshake(itself).unwrap();
        for wr_id in 0..3 {
            // SAFETY: the region outlives the queue pair, and is not looked at.
            unsafe { receives.post_receive(&mut region, .., wr_id).unwrap() };
        }
        receives.set_limit(3).unwrap();
        // SAFETY: no memory is involved.
        unsafe { pair.post_inline(&[1; 3], 9).unwrap() };
        completions(&queue, 2);
        let event = await_event(&events, Kind::SharedReceiveQueueLimit);
        assert_eq!(event.subject(), Subject::SharedReceiveQueue(5));

        pair.drain(true).unwrap();
        let event = await_event(&events, Kind::SendQueueDrained);
        assert_eq!(event.subject(), Subject::QueuePair(pair.number()));
        pair.to_error().unwrap();
        let event = await_event(&events, Kind::LastRequestReached);
        assert_eq!(event.subject(), Subject::QueuePair(pair.number()));
    }
    assert_nothing_left("rxe0");
}

#[test]
fn objects_go_while_their_events_are_read() {
    let _lock = one_at_a_time();
    {
        let context = ibverbs::open("rxe0").unwrap();
        let domain = context.alloc_pd().unwrap();
        let over = AtomicBool::new(false);
        thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let events = context.async_events().unwrap();
                let mut count = 0;
                while !over.load(Ordering::Acquire) {
                    count += u32::from(events.wait_timeout(SOON / 10).is_ok());
                }
                count
            });
            for round in 0..100 {
                let sends = context.create_cq(64).unwrap();
                let small = context.create_cq(1).unwrap();
                let mut region = domain.allocate::<u8>(64).unwrap();
                let mut pair = loopback(&domain, &sends, &small);
                for wr_id in 0..u64::from(small.capacity()) + 3 {
                    exchange(&mut pair, &mut region, wr_id);
                }
                // At any time relative to the event.
                thread::sleep(Duration::from_micros(round * 20));
            }
            over.store(true, Ordering::Release);
            assert!(reader.join().unwrap() > 0, "or this tests nothing");
        });
    }
    assert_nothing_left("rxe0");
}
