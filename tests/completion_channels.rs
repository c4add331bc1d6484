//! Events of completion queues, and waiting for them, on the test device.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::{
    CompletionChannel, CompletionFields, CompletionQueue, Context, ErrorKind, QueuePairType,
    WorkCompletion, WorkOpcode, WorkStatus, ffi,
};
use ibverbs_test_device::TestDevice;

const SOON: Duration = Duration::from_millis(20);
/// Longer than anything that does not hang.
const LATE: Duration = Duration::from_secs(60);

fn open(device: &TestDevice) -> Context<'static> {
    // SAFETY: the context is live, and closed by what takes it over.
    unsafe { Context::from_raw(device.open().unwrap()) }.unwrap()
}

fn completion(wr_id: u64) -> ffi::ibv_wc {
    ffi::ibv_wc { wr_id, ..Default::default() }
}

fn ids(completions: &[WorkCompletion]) -> Vec<u64> {
    completions.iter().map(WorkCompletion::wr_id).collect()
}

/// What `f` returns, unless it hangs.
#[track_caller]
fn unhung<R: Send + 'static>(f: impl FnOnce() -> R + Send + 'static) -> R {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(f()));
    receiver.recv_timeout(LATE).expect("it hangs, or panicked")
}

#[test]
fn waiting_takes_what_is_there_or_sleeps_until_it_comes() {
    let device = TestDevice::model();
    let context = open(&device);
    let queue = CompletionQueue::builder(&context, 16).own_channel().build().unwrap();
    let mut room = [WorkCompletion::default(); 2];
    for wr_id in [1, 2, 3] {
        device.inject(queue.as_raw(), &completion(wr_id));
    }
    assert_eq!(ids(queue.wait(&mut room).unwrap()), [1, 2]);
    assert_eq!(ids(queue.wait(&mut room).unwrap()), [3]);
    assert_eq!(device.calls("req_notify_cq"), 0, "what is there needs no event");

    let start = Instant::now();
    let error = queue.wait_timeout(&mut room, SOON).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(start.elapsed() >= SOON);
    assert!(queue.wait_deadline(&mut room, start).is_err(), "long over");

    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(SOON);
            device.inject(queue.as_raw(), &completion(4));
        });
        assert_eq!(ids(queue.wait_timeout(&mut room, LATE).unwrap()), [4]);
    });
    drop(queue);
    drop(context);
    device.assert_clean();
}

#[test]
fn a_queue_is_armed_once_per_event() {
    let device = TestDevice::model();
    let context = open(&device);
    let queue = CompletionQueue::builder(&context, 16).own_channel().build().unwrap();
    let mut room = [WorkCompletion::default(); 4];
    for _ in 0..10 {
        assert!(queue.wait_timeout(&mut room, Duration::from_millis(1)).is_err());
    }
    assert_eq!(device.calls("req_notify_cq"), 1, "or unread events would pile up");
    device.inject(queue.as_raw(), &completion(1));
    assert_eq!(ids(queue.wait(&mut room).unwrap()), [1]);
    // The event of that completion is still unread, and the queue not armed.
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(SOON);
            device.inject(queue.as_raw(), &completion(2));
        });
        assert_eq!(ids(queue.wait_timeout(&mut room, LATE).unwrap()), [2]);
    });
    assert_eq!(device.calls("req_notify_cq"), 2);
}

#[test]
fn what_cannot_be_waited_for_is_refused() {
    let device = TestDevice::model();
    let (context, other) = (open(&device), open(&device));
    let mut room = [WorkCompletion::default(); 1];
    let plain = context.create_cq(1).unwrap();
    let words = |error: ibverbs::Error| {
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        error.to_string()
    };
    assert!(words(plain.wait(&mut room).unwrap_err()).contains("channel of its own"));
    assert!(words(plain.arm().unwrap_err()).contains("without a channel"));
    assert!(words(plain.poll_or_arm(&mut room).unwrap_err()).contains("without a channel"));
    let own = CompletionQueue::builder(&context, 1).own_channel().build().unwrap();
    assert!(words(own.wait(&mut []).unwrap_err()).contains("no room"));
    assert!(words(own.poll_or_arm(&mut []).unwrap_err()).contains("no room"));
    assert!(own.channel().is_none(), "its events are not for others");

    let channel = CompletionChannel::new(&other).unwrap();
    let error = CompletionQueue::builder(&context, 1).channel(&channel).build().unwrap_err();
    assert!(words(error).contains("another context"));
    let error = CompletionQueue::builder(&context, 1).completion_vector(4).build().unwrap_err();
    assert!(words(error).contains("vector is 4, and must be within 0..=3"));
    for entries in [0, u32::MAX] {
        assert!(words(context.create_cq(entries).unwrap_err()).contains("number of entries"));
    }
}

#[test]
fn the_device_sees_what_was_asked_for() {
    let device = TestDevice::model();
    let context = open(&device);
    let channel = CompletionChannel::new(&context).unwrap();
    let queue = CompletionQueue::builder(&context, 7)
        .channel(&channel)
        .token(usize::MAX)
        .completion_vector(3)
        .solicited_only()
        .build()
        .unwrap();
    let call = device.last_call("create_cq").unwrap();
    assert_eq!((call.cqe, call.comp_vector), (7, 3));
    assert_eq!(call.cq_init_attr.channel, channel.as_raw());
    assert_eq!((queue.token(), queue.capacity()), (usize::MAX, 7));
    assert_eq!(queue.channel().unwrap().as_raw(), channel.as_raw());
    queue.arm().unwrap();
    assert_eq!(device.last_call("req_notify_cq").unwrap().solicited_only, 1);

    queue.resize(100).unwrap();
    assert_eq!((device.last_call("resize_cq").unwrap().cqe, queue.capacity()), (100, 100));
    assert_eq!(queue.resize(0).unwrap_err().kind(), ErrorKind::InvalidInput);
    device.fail("resize_cq").errno(libc::EOPNOTSUPP).times(1);
    assert_eq!(queue.resize(10).unwrap_err().kind(), ErrorKind::Unsupported);

    let fields = CompletionFields::BYTE_LEN | CompletionFields::TIMESTAMP;
    let builder = CompletionQueue::builder(&context, 9).extended(fields).ignore_overrun();
    let extended = builder.channel(&channel).token(5).completion_vector(1).build().unwrap();
    let call = device.last_call("create_cq_ex").unwrap().cq_init_attr;
    assert_eq!((call.cqe, call.comp_vector, call.wc_flags), (9, 1, 1 | 128));
    assert_eq!((call.cq_context as usize, call.channel), (5, channel.as_raw()));
    assert_eq!((call.comp_mask, call.flags), (1, 2));
    assert_eq!(extended.token(), 5);
    // SAFETY: the queue is used here alone.
    let single = unsafe { CompletionQueue::builder(&context, 9).single_threaded() };
    drop(single.build().unwrap());
    let call = device.last_call("create_cq_ex").unwrap().cq_init_attr;
    assert_eq!((call.comp_mask, call.flags, call.wc_flags), (1, 1, 0));
    assert!(call.channel.is_null());
}

#[test]
fn moderation_is_checked_and_rounded_up() {
    let device = TestDevice::model();
    let context = open(&device);
    let queue = context.create_cq(1).unwrap();
    let limits = context.query_device().unwrap().moderation();
    let (count, period) = (limits.max_count, Duration::from_micros(limits.max_period.into()));
    assert!(count > 0 && !period.is_zero(), "or this tests nothing");
    queue.moderate(count, Duration::from_nanos(3001)).unwrap();
    let call = device.last_call("modify_cq").unwrap().modify_cq_attr;
    assert_eq!((call.attr_mask, call.moderate.cq_count, call.moderate.cq_period), (1, count, 4));
    queue.moderate(0, period).unwrap();
    queue.moderate(0, Duration::ZERO).unwrap();
    let most = device.calls("modify_cq");
    for (count, period) in [
        (0, period + Duration::from_nanos(1)),
        (0, Duration::MAX),
        (count.saturating_add(1), Duration::ZERO),
    ] {
        if count != u16::MAX || !period.is_zero() {
            let error = queue.moderate(count, period).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        }
    }
    assert_eq!(device.calls("modify_cq"), most, "found before the verb");
}

#[test]
fn many_queues_share_a_channel() {
    let device = TestDevice::model();
    let context = open(&device);
    let channel = CompletionChannel::new(&context).unwrap();
    let make = |token| {
        CompletionQueue::builder(&context, 16).channel(&channel).token(token).build().unwrap()
    };
    let queues = [make(0), make(1), make(2)];
    let mut room = [WorkCompletion::default(); 4];
    assert_eq!(channel.next_event().unwrap(), None);
    assert_eq!(channel.wait_timeout(SOON).unwrap_err().kind(), ErrorKind::TimedOut);
    for queue in &queues {
        assert!(queue.poll_or_arm(&mut room).unwrap().is_empty(), "armed");
    }
    for token in [2, 0] {
        device.inject(queues[token].as_raw(), &completion(token as u64));
    }
    let mut file = libc::pollfd { fd: channel.as_fd().as_raw_fd(), events: 1, revents: 0 };
    // SAFETY: there is one file.
    assert_eq!(unsafe { libc::poll(&mut file, 1, 0) }, 1, "readable");
    assert_eq!(channel.wait().unwrap().token(), 2);
    assert_eq!(channel.wait_deadline(Instant::now()).unwrap().token(), 0, "there already");
    assert_eq!(channel.next_event().unwrap(), None, "each once");
    assert_eq!(ids(queues[2].poll_or_arm(&mut room).unwrap()), [2]);
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(SOON);
            device.inject(queues[1].as_raw(), &completion(1));
        });
        assert_eq!(channel.wait_timeout(LATE).unwrap().token(), 1);
    });
}

#[test]
fn each_event_goes_to_one_thread() {
    const EVENTS: u64 = 2000;
    let device = TestDevice::model();
    let context = open(&device);
    let channel = CompletionChannel::new(&context).unwrap();
    let queue = CompletionQueue::builder(&context, 16).channel(&channel).build().unwrap();
    let taken = AtomicU64::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    match channel.wait_timeout(Duration::from_millis(500)) {
                        Ok(_) => taken.fetch_add(1, Ordering::Relaxed),
                        Err(error) => break assert_eq!(error.kind(), ErrorKind::TimedOut),
                    };
                }
            });
        }
        for _ in 0..EVENTS {
            device.raise_cq_event(queue.as_raw());
        }
    });
    assert_eq!(taken.into_inner(), EVENTS);
}

#[test]
fn a_queue_goes_at_once_whatever_became_of_its_events() {
    let device = TestDevice::model();
    let context = Arc::new(open(&device));
    let channel = Arc::new(CompletionChannel::new(&context).unwrap());
    let make = |token| {
        CompletionQueue::builder(&context, 16).channel(&channel).token(token).build().unwrap()
    };
    // Two are read, and nothing is done about them ..
    let queue = make(1);
    for _ in 0..3 {
        device.raise_cq_event(queue.as_raw());
    }
    assert!(channel.next_event().unwrap().is_some());
    assert!(channel.wait().is_ok());
    // .. and one is not read at all.
    unhung(move || queue.close().map_err(|(_, error)| error)).unwrap();
    assert_eq!(channel.next_event().unwrap(), None, "nothing tells of a queue that is gone");

    // A reader is waiting on another thread meanwhile.
    let (queue, next) = (make(2), make(3));
    let reader = thread::spawn({
        let channel = Arc::clone(&channel);
        move || channel.wait_timeout(LATE).unwrap().token()
    });
    thread::sleep(SOON);
    unhung(move || drop(queue));
    device.raise_cq_event(next.as_raw());
    assert_eq!(reader.join().unwrap(), 3);
    unhung(move || drop(next));

    let queue = CompletionQueue::builder(&context, 16).own_channel().build().unwrap();
    let mut room = [WorkCompletion::default(); 1];
    assert!(queue.wait_timeout(&mut room, SOON).is_err());
    device.inject(queue.as_raw(), &completion(1));
    unhung(move || drop(queue));
    unhung(move || drop((channel, context)));
    device.assert_clean();
}

#[test]
fn a_channel_outlives_its_queues() {
    let device = TestDevice::model();
    let context = open(&device);
    let channel = CompletionChannel::new(&context).unwrap();
    let queue = CompletionQueue::builder(&context, 16).channel(&channel).build().unwrap();
    let raw = queue.as_raw();
    std::mem::forget(queue);
    let (channel, error) = channel.close().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    // SAFETY: the queue was forgotten, and is live.
    let queue = unsafe { CompletionQueue::from_raw(raw, &context) }.unwrap();
    assert!(queue.arm().is_ok(), "it has a channel");
    drop(queue);
    channel.close().map_err(|(_, error)| error).unwrap();
    // SAFETY: null is allowed.
    unsafe {
        assert!(CompletionQueue::from_raw(std::ptr::null_mut(), &context).is_err());
        assert!(CompletionChannel::from_raw(std::ptr::null_mut(), &context).is_err());
    }
    device.fail("create_comp_channel").errno(libc::EMFILE).times(1);
    let error = CompletionQueue::builder(&context, 1).own_channel().build().unwrap_err();
    assert_eq!((error.kind(), error.verb()), (ErrorKind::Resource, "ibv_create_comp_channel"));
    drop(context);
    device.assert_clean();
}

#[test]
fn a_channel_of_c_is_taken_over() {
    let device = TestDevice::model();
    let context = open(&device);
    let mut there = 7_u64;
    // SAFETY: as C does it; what is made is destroyed once.
    unsafe {
        let raw = ffi::ibv_create_comp_channel(context.as_raw());
        let queue_context = (&raw mut there).cast();
        let queue = ffi::ibv_create_cq(context.as_raw(), 4, queue_context, raw, 0);
        let channel = CompletionChannel::from_raw(raw, &context).unwrap();
        assert_eq!(channel.next_event().unwrap(), None, "it does not block");
        device.raise_cq_event(queue);
        assert_eq!(channel.wait().unwrap().token(), queue_context as usize);
        assert_eq!(ffi::ibv_destroy_cq(queue), 0);
    }
    drop(context);
    device.assert_clean();
}

/// One completion at a time, each of which somebody has to find before the next one comes: a lost
/// wake-up is a wait that ends by its deadline.
fn ping_pong(waiters: usize, rounds: u64, extended: bool) {
    let device = TestDevice::model();
    let context = open(&device);
    let builder = CompletionQueue::builder(&context, 16).own_channel();
    let builder = if extended { builder.extended(CompletionFields::STANDARD) } else { builder };
    let queue = builder.build().unwrap();
    let found = AtomicU64::new(0);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..waiters {
            scope.spawn(|| {
                let mut room = [WorkCompletion::default(); 2];
                let mut poller = extended.then(|| queue.extended_poller().unwrap());
                while !over.load(Ordering::Acquire) {
                    let count = match &mut poller {
                        None => queue.wait_timeout(&mut room, LATE).unwrap().len(),
                        Some(poller) => poller
                            .wait_timeout(LATE, |completions| {
                                let mut count = 0;
                                while completions.next().unwrap().is_some() {
                                    count += 1;
                                }
                                count
                            })
                            .unwrap(),
                    };
                    found.fetch_add(count as u64, Ordering::Release);
                }
            });
        }
        for round in 1..=rounds {
            device.inject(queue.as_raw(), &completion(round));
            let start = Instant::now();
            while found.load(Ordering::Acquire) < round {
                thread::yield_now();
                assert!(start.elapsed() < LATE, "round {round} was lost");
            }
            // Now and then late enough for all to be asleep.
            if round % 64 == 0 {
                thread::sleep(Duration::from_millis(1));
            }
        }
        over.store(true, Ordering::Release);
        // Everybody comes back for one more.
        for extra in 0..waiters as u64 {
            device.inject(queue.as_raw(), &completion(extra));
            let start = Instant::now();
            while found.load(Ordering::Acquire) < rounds + extra + 1 {
                thread::yield_now();
                assert!(start.elapsed() < LATE, "a waiter sleeps on");
            }
        }
    });
    assert_eq!(found.into_inner(), rounds + waiters as u64);
    drop(queue);
    drop(context);
    device.assert_clean();
}

#[test]
fn no_wake_up_is_lost() {
    ping_pong(1, 20_000, false);
}

#[test]
fn no_wake_up_is_lost_among_threads() {
    ping_pong(4, 10_000, false);
}

#[test]
fn no_wake_up_is_lost_by_an_extended_poller() {
    ping_pong(1, 10_000, true);
}

/// Each waiter takes one completion and leaves; none may be left asleep beside one that is there.
fn one_each(waiters: u64, rounds: u64) {
    let device = TestDevice::model();
    let context = open(&device);
    let queue = CompletionQueue::builder(&context, 16).own_channel().build().unwrap();
    let (start, end) = (Barrier::new(waiters as usize + 1), Barrier::new(waiters as usize + 1));
    thread::scope(|scope| {
        for waiter in 1..=waiters {
            let (start, end, queue) = (&start, &end, &queue);
            scope.spawn(move || {
                let mut room = [WorkCompletion::default(); 1];
                for round in 0..rounds {
                    start.wait();
                    spin(round * waiter * 7919 % 400);
                    if let Err(error) = queue.wait_timeout(&mut room, LATE) {
                        // The others would wait for this thread for ever.
                        eprintln!("round {round}: a wake-up was lost: {error}");
                        std::process::abort();
                    }
                    end.wait();
                }
            });
        }
        for round in 0..rounds {
            start.wait();
            for wr_id in 1..=waiters {
                spin(round * wr_id * 104_729 % 1500);
                device.inject(queue.as_raw(), &completion(wr_id));
            }
            end.wait();
        }
    });
}

fn spin(turns: u64) {
    for _ in 0..turns {
        std::hint::spin_loop();
    }
}

#[test]
fn no_waiter_is_left_asleep() {
    one_each(2, 4000);
    one_each(3, 4000);
}

#[test]
fn waiters_with_different_deadlines_do_not_hold_each_other_up() {
    let device = TestDevice::model();
    let context = open(&device);
    let queue = CompletionQueue::builder(&context, 16).own_channel().build().unwrap();
    let wait = |timeout| {
        let start = Instant::now();
        let mut room = [WorkCompletion::default(); 1];
        let found = queue.wait_timeout(&mut room, timeout).map(|found| found.len());
        (found.map_err(|error| error.kind()), start.elapsed())
    };
    thread::scope(|scope| {
        // Who comes first reads; the others sleep beside it, and one of them reads on.
        let first = scope.spawn(|| wait(SOON * 3));
        thread::sleep(SOON / 2);
        let short = scope.spawn(|| wait(SOON));
        let long = scope.spawn(|| wait(LATE));
        let (found, took) = short.join().unwrap();
        assert_eq!(found, Err(ErrorKind::TimedOut));
        assert!(took >= SOON && took < LATE / 2, "{took:?}");
        let (found, took) = first.join().unwrap();
        assert_eq!(found, Err(ErrorKind::TimedOut));
        assert!(took >= SOON * 3, "{took:?}");
        device.inject(queue.as_raw(), &completion(1));
        let (found, took) = long.join().unwrap();
        assert_eq!(found, Ok(1));
        assert!(took < LATE / 2, "{took:?}");
    });
}

#[test]
fn failures_end_a_wait() {
    let device = TestDevice::model();
    let context = open(&device);
    let queue = CompletionQueue::builder(&context, 16).own_channel().build().unwrap();
    let mut room = [WorkCompletion::default(); 1];
    device.fail("poll_cq").errno(libc::EIO).times(1);
    assert_eq!(queue.wait(&mut room).unwrap_err().verb(), "ibv_poll_cq");
    device.fail("poll_cq").errno(libc::EIO).skip(1).times(1);
    assert_eq!(queue.wait(&mut room).unwrap_err().verb(), "ibv_poll_cq", "the second poll");
    let fresh = CompletionQueue::builder(&context, 16).own_channel().build().unwrap();
    device.fail("req_notify_cq").errno(libc::EOPNOTSUPP).times(1);
    let error = fresh.wait(&mut room).unwrap_err();
    assert_eq!((error.kind(), error.verb()), (ErrorKind::Unsupported, "ibv_req_notify_cq"));
    // A refused arm does not count as one.
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(SOON);
            device.inject(fresh.as_raw(), &completion(1));
        });
        assert_eq!(ids(fresh.wait_timeout(&mut room, LATE).unwrap()), [1]);
    });
}

#[test]
fn odd_completions_are_kept_as_they_are() {
    let device = TestDevice::model();
    let context = open(&device);
    let queue = context.create_cq(16).unwrap();
    let odd = ffi::ibv_wc {
        opcode: ffi::ibv_wc_opcode(0x7777),
        wc_flags: 0xffff_fff4,
        byte_len: u32::MAX,
        ..completion(1)
    };
    device.inject(queue.as_raw(), &odd);
    let odd = ffi::ibv_wc { status: ffi::ibv_wc_status(0x8888), ..completion(2) };
    device.inject(queue.as_raw(), &odd);
    let mut room = [WorkCompletion::default(); 4];
    let found = queue.poll(&mut room).unwrap();
    let success = found[0].result().unwrap();
    assert_eq!(success.opcode(), WorkOpcode::Unknown(0x7777));
    assert_eq!(success.flags(), 0xffff_fff4);
    assert_eq!((success.immediate(), success.invalidated_rkey()), (None, None));
    assert_eq!(found[1].result().unwrap_err().status(), WorkStatus::Unknown(0x8888));
}

#[test]
fn a_solicited_wait_sleeps_through_the_rest() {
    let device = TestDevice::model();
    let context = open(&device);
    let domain = context.alloc_pd().unwrap();
    let sends = context.create_cq(16).unwrap();
    let receives =
        CompletionQueue::builder(&context, 16).own_channel().solicited_only().build().unwrap();
    let connection = QueuePairType::ReliableConnected;
    let prepared =
        domain.create_qp(&sends, &receives, connection).max_recv_wr(4).max_send_wr(4).build();
    let prepared = prepared.unwrap();
    let itself = prepared.endpoint();
    let mut pair = prepared.handshake(itself).unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    for wr_id in 1..=3 {
        // SAFETY: the region outlives the queue pair, and is not looked at.
        unsafe { pair.post_receive(&mut region, .., wr_id).unwrap() };
    }
    let mut room = [WorkCompletion::default(); 4];

    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(SOON);
            // SAFETY: as above.
            unsafe { pair.post_send(&region, ..1, 0).unwrap() };
            device.run();
        });
        let start = Instant::now();
        let found = ids(receives.wait_timeout(&mut room, SOON * 4).unwrap());
        assert_eq!(found, [1], "found in the end");
        assert!(start.elapsed() >= SOON * 4, "but it woke nobody");
    });
    let raw = pair.as_raw() as usize;
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(SOON);
            for send_flags in [0, ffi::ibv_send_flags::IBV_SEND_SOLICITED.0] {
                let mut request = ffi::ibv_send_wr {
                    opcode: ffi::ibv_wr_opcode::IBV_WR_SEND,
                    send_flags,
                    ..Default::default()
                };
                // SAFETY: the queue pair is live, and the request without data.
                let returned = unsafe {
                    let pair = raw as *mut ffi::ibv_qp;
                    ffi::ibv_post_send(pair, &mut request, &mut std::ptr::null_mut())
                };
                assert_eq!(returned, 0);
            }
            device.run();
        });
        let start = Instant::now();
        let mut found = ids(receives.wait_timeout(&mut room, LATE).unwrap());
        if found.len() < 2 {
            found.extend(ids(receives.wait_timeout(&mut room, LATE).unwrap()));
        }
        assert_eq!(found, [2, 3]);
        assert!(start.elapsed() < LATE / 2);
    });
}
