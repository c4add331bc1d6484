//! Many wake-ups and several waiters: no wake-up is lost, and no waiter sleeps on.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::completion::CompletionFields;
use ibverbs::{CompletionQueue, ErrorKind, WorkCompletion};
use ibverbs_function_device::FunctionDevice;

use super::{LATE, SOON, completion};

/// Completions come one at a time, each only when a thread has found the one before. If a wake-up were lost,
/// a wait would end by its deadline.
fn ping_pong(waiters: usize, rounds: u64, extended: bool) {
    let device = FunctionDevice::model();
    let context = device.context();
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
                        None => queue.wait_until(&mut room, Instant::now() + LATE).unwrap().len(),
                        Some(poller) => poller
                            .wait_until(Instant::now() + LATE, |completions| {
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
            // Some completions come late enough that all threads are asleep.
            if round % 64 == 0 {
                thread::sleep(Duration::from_millis(1));
            }
        }
        over.store(true, Ordering::Release);
        // Each thread waits once more.
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

/// Each waiter takes one completion and leaves. None may stay asleep while there is a completion.
fn one_each(waiters: u64, rounds: u64) {
    let device = FunctionDevice::model();
    let context = device.context();
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
                    if let Err(error) = queue.wait_until(&mut room, Instant::now() + LATE) {
                        // Without the abort, the other threads would wait for this one without end.
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
    let device = FunctionDevice::model();
    let context = device.context();
    let queue = CompletionQueue::builder(&context, 16).own_channel().build().unwrap();
    let wait = |timeout| {
        let start = Instant::now();
        let mut room = [WorkCompletion::default(); 1];
        let found = queue.wait_until(&mut room, start + timeout).map(|found| found.len());
        (found.map_err(|error| error.kind()), start.elapsed())
    };
    thread::scope(|scope| {
        // The first thread to wait reads the event; the others sleep until it wakes them, and one of them
        // reads next.
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
