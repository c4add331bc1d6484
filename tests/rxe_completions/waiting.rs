//! Sleeping until there are completions.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, AsRawFd};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::{
    CompletionChannel, CompletionQueue, ErrorKind, Inline, SendWorkRequest, WorkCompletion,
};

use super::vm::{PATIENCE, assert_nothing_left, completions, one_at_a_time, success};
use super::{SOON, exchange, ids, loopback};

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
        let error = receives.wait_until(&mut room, Instant::now() + SOON).unwrap_err();
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
                    unsafe { pair.post(SendWorkRequest::new(Inline(&[1; 9])), 0).unwrap() };
                });
                let found = receives.wait_until(&mut room, Instant::now() + PATIENCE).unwrap();
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
                    receives
                        .wait_until(&mut room, Instant::now() + PATIENCE)
                        .map(|found| found[0].wr_id())
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
        // The queues are armed and may have raised events; nobody waits for them.
        exchange(&mut pair, &mut region, 0);
        channel.wait_until(Instant::now() + PATIENCE).unwrap();
    }
    assert_nothing_left("rxe0");
}

#[test]
fn a_solicited_event_is_asked_for_by_the_sender() {
    const LIMIT: Duration = Duration::from_secs(60);
    let _lock = one_at_a_time();
    let context = ibverbs::open("rxe0").unwrap();
    let domain = context.alloc_pd().unwrap();
    let sends = context.create_cq(64).unwrap();
    let receives =
        CompletionQueue::builder(&context, 64).own_channel().solicited_only().build().unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    let mut pair = loopback(&domain, &sends, &receives);
    let mut send = |solicited: bool, wr_id: u64| {
        let request = SendWorkRequest::new(());
        let request = if solicited { request.solicited() } else { request };
        // SAFETY: the region outlives the queue pair, and is not looked at.
        unsafe {
            pair.post_receive(&mut region, .., wr_id).unwrap();
            pair.post(request, 0).unwrap();
        }
        success(&completions(&sends, 1), 0);
    };
    // What a thread finds that waits for so long, and after what time.
    let mut round = |pause, timeout, messages: &[(bool, u64)]| {
        let (found, took) = thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                let (start, mut room) = (Instant::now(), [WorkCompletion::default(); 4]);
                let found = receives.wait_until(&mut room, start + timeout);
                (found.map(ids).unwrap_or_default(), start.elapsed())
            });
            for &(solicited, wr_id) in messages {
                thread::sleep(pause);
                send(solicited, wr_id);
            }
            waiter.join().unwrap()
        });
        completions(&receives, messages.len() - found.len());
        (found, took)
    };
    // A thread that begins late finds the first message at its first poll: that round shows nothing.
    let end = Instant::now() + LIMIT;
    for times in 1.. {
        let (found, took) = round(SOON * times, SOON * 60, &[(false, 1)]);
        if found == [1] && took >= SOON * 60 {
            break;
        }
        assert!(Instant::now() < end, "it woke the thread: {found:?} after {took:?}");
    }
    let end = Instant::now() + LIMIT;
    for times in 1.. {
        let (found, took) = round(SOON * times, LIMIT, &[(false, 2), (true, 3)]);
        if found == [2, 3] && took < LIMIT {
            break;
        }
        assert!(Instant::now() < end, "3 alone did not wake the thread: {found:?} after {took:?}");
    }
}
