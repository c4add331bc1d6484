//! Completion channels that several queues share, and their events.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Instant;

use ibverbs::{CompletionChannel, CompletionQueue, ErrorKind, WorkCompletion, ffi};
use ibverbs_function_device::FunctionDevice;

use super::{LATE, SOON, completion, ids};

/// Returns what `f` returns, and fails the test if `f` hangs.
#[track_caller]
fn unhung<R: Send + 'static>(f: impl FnOnce() -> R + Send + 'static) -> R {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(f()));
    receiver.recv_timeout(LATE).expect("it hangs, or panicked")
}

#[test]
fn many_queues_share_a_channel() {
    let device = FunctionDevice::model();
    let context = device.context();
    let channel = CompletionChannel::new(&context).unwrap();
    let make = |token| {
        CompletionQueue::builder(&context, 16).channel(&channel).token(token).build().unwrap()
    };
    let queues = [make(0), make(1), make(2)];
    let mut room = [WorkCompletion::default(); 4];
    assert_eq!(channel.next_event().unwrap(), None);
    assert_eq!(channel.wait_until(Instant::now() + SOON).unwrap_err().kind(), ErrorKind::TimedOut);
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
    assert_eq!(channel.wait_until(Instant::now()).unwrap().token(), 0, "there already");
    assert_eq!(channel.next_event().unwrap(), None, "each once");
    assert_eq!(ids(queues[2].poll_or_arm(&mut room).unwrap()), [2]);
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(SOON);
            device.inject(queues[1].as_raw(), &completion(1));
        });
        assert_eq!(channel.wait_until(Instant::now() + LATE).unwrap().token(), 1);
    });
}

#[test]
fn each_event_goes_to_one_thread() {
    const EVENTS: u64 = 2000;
    let device = FunctionDevice::model();
    let context = device.context();
    let channel = CompletionChannel::new(&context).unwrap();
    let queue = CompletionQueue::builder(&context, 16).channel(&channel).build().unwrap();
    let (taken, end) = (AtomicU64::new(0), Instant::now() + LATE);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    match channel.wait_until(Instant::now() + SOON) {
                        Ok(_) => _ = taken.fetch_add(1, Ordering::Relaxed),
                        Err(error) => {
                            assert_eq!(error.kind(), ErrorKind::TimedOut);
                            if taken.load(Ordering::Relaxed) >= EVENTS || Instant::now() > end {
                                break;
                            }
                        }
                    }
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
    let device = FunctionDevice::model();
    let context = Arc::new(device.context());
    let channel = Arc::new(CompletionChannel::new(&context).unwrap());
    let make = |token| {
        CompletionQueue::builder(&context, 16).channel(&channel).token(token).build().unwrap()
    };
    // Two events are read but not acted upon,
    let queue = make(1);
    for _ in 0..3 {
        device.raise_cq_event(queue.as_raw());
    }
    assert!(channel.next_event().unwrap().is_some());
    assert!(channel.wait().is_ok());
    // and one is not read at all.
    unhung(move || queue.close()).unwrap();
    assert_eq!(channel.next_event().unwrap(), None, "nothing tells of a queue that is gone");

    // A reader is waiting on another thread meanwhile.
    let (queue, next) = (make(2), make(3));
    let reader = thread::spawn({
        let channel = Arc::clone(&channel);
        move || channel.wait_until(Instant::now() + LATE).unwrap().token()
    });
    thread::sleep(SOON);
    unhung(move || drop(queue));
    device.raise_cq_event(next.as_raw());
    assert_eq!(reader.join().unwrap(), 3);
    unhung(move || drop(next));

    let queue = CompletionQueue::builder(&context, 16).own_channel().build().unwrap();
    let mut room = [WorkCompletion::default(); 1];
    assert!(queue.wait_until(&mut room, Instant::now() + SOON).is_err());
    device.inject(queue.as_raw(), &completion(1));
    unhung(move || drop(queue));
    unhung(move || drop((channel, context)));
    device.assert_clean();
}

#[test]
fn a_channel_outlives_its_queues() {
    let device = FunctionDevice::model();
    let context = device.context();
    let channel = CompletionChannel::new(&context).unwrap();
    let queue = CompletionQueue::builder(&context, 16).channel(&channel).build().unwrap();
    let raw = queue.as_raw();
    std::mem::forget(queue);
    assert_eq!(channel.close().unwrap_err().kind(), ErrorKind::Busy);
    // SAFETY: the queue was forgotten, and is live; its channel is leaked.
    let queue = unsafe { CompletionQueue::from_raw(raw, &context) }.unwrap();
    assert!(queue.arm().is_ok(), "it has a channel");
    queue.close().unwrap();
    // SAFETY: null is allowed.
    unsafe {
        assert!(CompletionQueue::from_raw(std::ptr::null_mut(), &context).is_err());
        assert!(CompletionChannel::from_raw(std::ptr::null_mut(), &context).is_err());
    }
    device.fail("create_comp_channel").errno(libc::EMFILE).times(1);
    let error = CompletionQueue::builder(&context, 1).own_channel().build().unwrap_err();
    assert_eq!((error.kind(), error.verb()), (ErrorKind::Resource, "ibv_create_comp_channel"));
    drop(context);
    assert_eq!(
        (device.calls("free_context"), device.violations().0),
        (0, 0),
        "leaked with the channel"
    );
}

#[test]
fn a_channel_of_c_is_taken_over() {
    let device = FunctionDevice::model();
    let context = device.context();
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
