//! Sleeping for a loop without borrowing it, and waking who sleeps.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::event_loop::ArmedWaiter;
use ibverbs::{Loop, PooledBuffer, TransportError};
use ibverbs_function_device::{FunctionDevice, Progress};

use crate::loops::{Loops, next};
use crate::pair::TestDevice;
use crate::software::Software;

fn late() -> Instant {
    Instant::now() + Duration::from_secs(300)
}

fn is_readable(file: impl AsFd) -> bool {
    let mut entry = libc::pollfd { fd: file.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: there is one entry, which is writable, and its file is open.
    match unsafe { libc::poll(&mut entry, 1, 0) } {
        -1 => panic!("{}", io::Error::last_os_error()),
        found => found == 1,
    }
}

#[test]
fn a_wake_ends_the_wait_that_comes_next_and_no_other() {
    let mut loops = Loops::on(FunctionDevice::make());
    let waker = loops.here.waker().unwrap();
    let (channel, peer) = loops.connect();
    // Several that come before the wait are one, and come first.
    waker.wake();
    waker.clone().wake();
    loops.receive(peer, 1);
    loops.send(channel, 1, 2);
    assert!(loops.here.wait_ended_until(late()).unwrap().is_none());
    assert_eq!(loops.here.wait_ended_until(late()).unwrap().unwrap().token, 2);
    assert_eq!(next(&mut loops.peers).token, 1);
    let soon = Instant::now() + Duration::from_millis(10);
    assert!(loops.here.wait_ended_until(soon).unwrap().is_none());
    assert!(Instant::now() >= soon, "it was woken twice");
    // One that does nothing ends with a wait that is not woken.
    waker.wake();
    loops.receive(peer, 3);
    loops.send(channel, 1, 4);
    assert_eq!(loops.here.wait_ended().unwrap().token, 4);
    assert!(loops.here.wait_ended_until(late()).unwrap().is_none());
    assert_eq!(next(&mut loops.peers).token, 3);
    loops.finish();
    waker.wake();
}

#[test]
fn a_thread_that_sleeps_is_woken() {
    let mut loops = Loops::on(Software::on_sockets());
    let waker = loops.here.waker().unwrap();
    let (asked, answered) = (AtomicU64::new(0), AtomicU64::new(0));
    thread::scope(|threads| {
        threads.spawn(|| {
            for n in 1..=500 {
                asked.store(n, Ordering::Relaxed);
                waker.wake();
                while answered.load(Ordering::Relaxed) < n {
                    thread::yield_now();
                }
            }
        });
        // If one is lost, this waits for ever.
        while answered.load(Ordering::Relaxed) < 500 {
            assert!(loops.here.wait_ended_until(late()).unwrap().is_none());
            answered.store(asked.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    });
    loops.finish();
}

#[test]
fn descriptors_are_readable_from_a_wake_until_the_loop_is_armed() {
    let loops = Loops::on(FunctionDevice::make());
    let waker = loops.here.waker().unwrap();
    assert!(!is_readable(&waker));
    waker.wake();
    assert!(is_readable(&waker) && is_readable(&loops.here));
    loops.here.arm().unwrap();
    assert!(!is_readable(&waker) && !is_readable(&loops.here));
    loops.finish();
}

/// One thread sleeps on the loop's descriptor, another one with a waiter or in a wait of the loop, and takes the event.
#[test]
fn who_sleeps_on_the_descriptor_learns_of_an_event_that_another_takes() {
    let device = FunctionDevice::model();
    device.progress(Progress::Manual);
    let mut loops = Loops::on(device);
    let (channel, peer) = loops.connect();
    assert!(!is_readable(&loops.here));
    let waits: [fn(&mut Loop<'static, PooledBuffer>, ArmedWaiter<'_>); 3] = [
        |of, armed| {
            assert!(armed.wait_until(late()).unwrap());
            let _ = next(of);
        },
        |of, _| drop(of.wait_ended().unwrap()),
        |of, _| drop(of.wait_ended_until(late()).unwrap().unwrap()),
    ];
    for (round, wait) in waits.into_iter().enumerate() {
        for taken in 1..=2 {
            // It has armed and found nothing, and is about to sleep.
            loops.here.arm().unwrap();
            assert!(loops.here.next_ended().unwrap().is_none());
            assert!(!is_readable(&loops.here));
            let waiter = loops.here.waiter();
            let armed = waiter.arm().unwrap();
            for _ in 0..taken {
                loops.receive(peer, 0);
                loops.send(channel, 1, 0);
                loops.device.run();
            }
            wait(&mut loops.here, armed);
            assert!(is_readable(&loops.here), "{round}: it sleeps on");
            // What ends now, too.
            while loops.here.next_ended().unwrap().is_some() {}
            loops.receive(peer, 0);
            loops.send(channel, 1, 0);
            loops.device.run();
            assert!(is_readable(&loops.here));
            loops.here.arm().unwrap();
            while loops.here.next_ended().unwrap().is_some() {}
            while loops.peers.next_ended().unwrap().is_some() {}
        }
    }
    loops.finish();
}

/// As the loop of the page does: it arms, finds nothing, and asks for the descriptor when it is about to sleep.
#[test]
fn a_descriptor_that_nobody_has_asked_for_yet_tells_of_an_event_that_another_takes() {
    let device = FunctionDevice::model();
    device.progress(Progress::Manual);
    let mut loops = Loops::on(device);
    let (channel, peer) = loops.connect();
    loops.here.arm().unwrap();
    assert!(loops.here.next_ended().unwrap().is_none());
    let waiter = loops.here.waiter();
    let armed = waiter.arm().unwrap();
    loops.receive(peer, 1);
    loops.send(channel, 1, 2);
    loops.device.run();
    assert!(armed.wait_until(late()).unwrap());
    assert_eq!(next(&mut loops.here).token, 2);
    assert!(is_readable(&loops.here), "it sleeps on");
    loops.here.arm().unwrap();
    assert!(!is_readable(&loops.here));
    assert_eq!(next(&mut loops.peers).token, 1);
    drop(waiter);
    loops.finish();
}

#[test]
fn a_wake_up_reaches_a_waiter_a_wait_and_the_descriptor() {
    let mut loops = Loops::on(FunctionDevice::make());
    let (channel, peer) = loops.connect();
    let (waiter, waker) = (loops.here.waiter(), loops.here.waker().unwrap());
    loops.receive(peer, 1);
    for _ in 0..3 {
        loops.here.arm().unwrap();
        let armed = waiter.arm().unwrap();
        let other = waiter.clone();
        let sleeper = thread::spawn({
            let waker = waker.clone();
            move || waker.wake()
        });
        assert!(armed.wait_until(late()).unwrap());
        sleeper.join().unwrap();
        assert!(is_readable(&loops.here) && is_readable(&waker), "the waiter took it");
        assert!(loops.here.wait_ended_until(late()).unwrap().is_none());
        assert!(is_readable(&loops.here) && is_readable(&waker), "the wait took it");
        assert!(other.arm().unwrap().wait_until(Instant::now()).unwrap(), "before it was armed");
        assert!(!other.arm().unwrap().wait_until(Instant::now()).unwrap(), "once");
    }
    loops.send(channel, 1, 2);
    assert_eq!((next(&mut loops.here).token, next(&mut loops.peers).token), (2, 1));
    drop(waiter);
    loops.finish();
}

#[test]
fn a_wait_is_refused_when_the_last_that_could_end_it_is_gone() {
    let mut loops = Loops::on(FunctionDevice::make());
    let refused = |loops: &mut Loops<FunctionDevice>| {
        let TransportError::Verbs(error) = loops.here.wait_ended().unwrap_err() else { panic!() };
        assert_eq!(error.raw_os_error(), Some(libc::EDEADLK));
    };
    let wakers = [(); 2].map(|()| loops.here.waker().unwrap());
    let also = wakers[0].clone();
    drop(wakers);
    thread::scope(|threads| {
        // Before the wait, or in it.
        threads.spawn(move || drop(also));
        refused(&mut loops);
    });
    refused(&mut loops);
    let waker = loops.here.waker().unwrap();
    waker.wake();
    assert_eq!(loops.here.wait_ended().unwrap_err(), TransportError::Cancelled);
    loops.finish();
}

#[test]
fn a_wait_that_nothing_would_end_is_refused_and_a_waker_ends_one() {
    let mut loops = Loops::on(FunctionDevice::make());
    let (channel, peer) = loops.connect();
    let TransportError::Verbs(error) = loops.here.wait_ended().unwrap_err() else { panic!() };
    assert_eq!(error.raw_os_error(), Some(libc::EDEADLK));
    assert!(error.to_string().contains("nothing was posted"), "{error}");
    // A receive that has no message yet is something.
    loops.receive(peer, 1);
    loops.send(channel, 1, 2);
    assert_eq!(loops.peers.wait_ended().unwrap().token, 1);
    assert_eq!(loops.here.wait_ended().unwrap().token, 2);
    assert!(loops.peers.wait_ended().is_err(), "the receive has ended");
    let waker = loops.here.waker().unwrap();
    thread::scope(|threads| {
        threads.spawn(|| waker.wake());
        assert_eq!(loops.here.wait_ended().unwrap_err(), TransportError::Cancelled);
    });
    let soon = Instant::now() + Duration::from_millis(10);
    assert!(loops.here.wait_ended_until(soon).unwrap().is_none());
    assert!(Instant::now() >= soon, "it was woken twice");
    // While something is posted, too.
    loops.receive(peer, 3);
    let waker = loops.peers.waker().unwrap();
    waker.wake();
    assert_eq!(loops.peers.wait_ended().unwrap_err(), TransportError::Cancelled);
    assert_eq!(loops.peers.in_flight(peer), 1);
    loops.finish();
}

#[test]
fn a_waiter_returns_when_something_has_ended_since_it_was_armed_or_was_woken_since_it_slept() {
    let mut loops = Loops::on(Software::on_sockets());
    let (channel, peer) = loops.connect();
    let (waiter, waker) = (loops.here.waiter(), loops.here.waker().unwrap());
    waker.wake();
    assert!(waiter.arm().unwrap().wait_until(late()).unwrap(), "it was not told of the wake");
    let past = Instant::now();
    let armed = waiter.arm().unwrap();
    assert!(!armed.wait_until(past).unwrap(), "it was told of the wake before");
    let (one, two) = (waiter.arm().unwrap(), waiter.arm().unwrap());
    waker.wake();
    one.wait().unwrap();
    assert!(two.wait_until(late()).unwrap(), "each of them is woken");
    let armed = waiter.arm().unwrap();
    loops.receive(peer, 1);
    loops.send(channel, 1, 2);
    armed.wait().unwrap();
    assert_eq!(next(&mut loops.here).token, 2);
    assert_eq!(next(&mut loops.peers).token, 1);
    drop(waiter);
    loops.finish();
}

/// Three threads share a loop behind a lock. Each sends itself messages and sleeps until they are there, whoever has found them.
#[test]
fn no_wake_up_is_lost_among_threads_that_share_a_loop() {
    const EACH: u64 = 300;
    let mut loops = Loops::on(Software::on_sockets());
    let channels: Vec<_> = (0..3).map(|_| loops.connect()).collect();
    let (waiter, waker) = (loops.here.waiter(), loops.here.waker().unwrap());
    let (sent, shared) = ([const { AtomicU64::new(0) }; 3], Mutex::new(loops));
    let is_over = AtomicBool::new(false);
    let poll = || {
        let mut loops = shared.lock().unwrap();
        while let Some(ended) = loops.here.next_ended().unwrap() {
            ended.result().unwrap();
            sent[ended.token as usize].fetch_add(1, Ordering::Relaxed);
        }
        while let Some(ended) = loops.peers.next_ended().unwrap() {
            ended.result().unwrap();
        }
    };
    thread::scope(|threads| {
        // One sleeps for the other's end alone.
        threads.spawn(|| {
            loop {
                let armed = waiter.arm().unwrap();
                poll();
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                armed.wait().unwrap();
            }
        });
        let senders: Vec<_> = (0..3)
            .map(|index: usize| {
                let (shared, channels, sent, waiter, poll) =
                    (&shared, &channels, &sent, waiter.clone(), &poll);
                threads.spawn(move || {
                    for n in 1..=EACH {
                        let mut loops = shared.lock().unwrap();
                        loops.receive(channels[index].1, 0);
                        loops.send(channels[index].0, 1, index as u64);
                        drop(loops);
                        while sent[index].load(Ordering::Relaxed) < n {
                            let armed = waiter.arm().unwrap();
                            poll();
                            if sent[index].load(Ordering::Relaxed) < n {
                                armed.wait().unwrap();
                            }
                        }
                        // The receive has ended before: its place is free again.
                        while shared.lock().unwrap().peers.in_flight(channels[index].1) > 0 {
                            poll();
                        }
                    }
                })
            })
            .collect();
        senders.into_iter().for_each(|sender| sender.join().unwrap());
        is_over.store(true, Ordering::Relaxed);
        waker.wake();
    });
    drop(waiter);
    shared.into_inner().unwrap().finish();
}
