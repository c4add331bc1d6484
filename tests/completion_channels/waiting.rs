//! Waiting for the completions of a queue with its own channel, and their contents.

use std::thread;
use std::time::{Duration, Instant};

use ibverbs::completion::WorkOpcode;
use ibverbs::{
    CompletionChannel, CompletionQueue, ErrorKind, QueuePairType, WorkCompletion, WorkStatus, ffi,
};
use ibverbs_function_device::FunctionDevice;

use super::{LATE, SOON, completion, ids};

/// Waits until the device was called so often.
fn wait_for_calls(device: &FunctionDevice, verb: &str, times: u64) {
    let end = Instant::now() + LATE;
    while device.calls(verb) < times {
        assert!(Instant::now() < end, "{} of {times} calls of {verb}", device.calls(verb));
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn waiting_takes_what_is_there_or_sleeps_until_it_comes() {
    let device = FunctionDevice::model();
    let context = device.context();
    let queue = CompletionQueue::builder(&context, 16).own_channel().build().unwrap();
    let mut room = [WorkCompletion::default(); 2];
    for wr_id in [1, 2, 3] {
        device.inject(queue.as_raw(), &completion(wr_id));
    }
    assert_eq!(ids(queue.wait(&mut room).unwrap()), [1, 2]);
    assert_eq!(ids(queue.wait(&mut room).unwrap()), [3]);
    assert_eq!(device.calls("req_notify_cq"), 0, "what is there needs no event");

    let start = Instant::now();
    let error = queue.wait_until(&mut room, Instant::now() + SOON).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(start.elapsed() >= SOON);
    assert!(queue.wait_until(&mut room, start).is_err(), "long over");

    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(SOON);
            device.inject(queue.as_raw(), &completion(4));
        });
        assert_eq!(ids(queue.wait_until(&mut room, Instant::now() + LATE).unwrap()), [4]);
    });
    drop(queue);
    drop(context);
    device.assert_clean();
}

#[test]
fn a_queue_is_armed_once_per_event() {
    let device = FunctionDevice::model();
    let context = device.context();
    let queue = CompletionQueue::builder(&context, 16).own_channel().build().unwrap();
    let mut room = [WorkCompletion::default(); 4];
    for _ in 0..10 {
        assert!(queue.wait_until(&mut room, Instant::now() + Duration::from_millis(1)).is_err());
    }
    assert_eq!(device.calls("req_notify_cq"), 1, "or unread events would pile up");
    device.inject(queue.as_raw(), &completion(1));
    assert_eq!(ids(queue.wait(&mut room).unwrap()), [1]);
    // The event of that completion is still unread, and the queue not armed.
    thread::scope(|scope| {
        scope.spawn(|| {
            wait_for_calls(&device, "req_notify_cq", 2);
            device.inject(queue.as_raw(), &completion(2));
        });
        assert_eq!(ids(queue.wait_until(&mut room, Instant::now() + LATE).unwrap()), [2]);
    });
    assert_eq!(device.calls("req_notify_cq"), 2);
}

#[test]
fn what_cannot_be_waited_for_is_refused() {
    let device = FunctionDevice::model();
    let (context, other) = (device.context(), device.context());
    let mut room = [WorkCompletion::default(); 1];
    let plain = context.create_cq(1).unwrap();
    let words = |error: ibverbs::Error| {
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        error.to_string()
    };
    assert!(
        words(plain.wait(&mut room).unwrap_err()).contains("CompletionQueueBuilder::own_channel")
    );
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
fn failures_end_a_wait() {
    let device = FunctionDevice::model();
    let context = device.context();
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
    // An arm that the device refused does not count.
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(SOON);
            device.inject(fresh.as_raw(), &completion(1));
        });
        assert_eq!(ids(fresh.wait_until(&mut room, Instant::now() + LATE).unwrap()), [1]);
    });
}

#[test]
fn a_solicited_wait_sleeps_through_the_rest() {
    let device = FunctionDevice::model();
    let context = device.context();
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
            // One before the queue is armed, and one after.
            wait_for_calls(&device, "poll_cq", 2);
            // SAFETY: as above.
            unsafe { pair.post_send(&region, ..1, 0).unwrap() };
            device.run();
        });
        let start = Instant::now();
        let found = ids(receives.wait_until(&mut room, Instant::now() + SOON * 100).unwrap());
        assert_eq!(found, [1], "found in the end");
        assert!(start.elapsed() >= SOON * 100, "but it woke nobody");
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
        let mut found = ids(receives.wait_until(&mut room, Instant::now() + LATE).unwrap());
        if found.len() < 2 {
            found.extend(ids(receives.wait_until(&mut room, Instant::now() + LATE).unwrap()));
        }
        assert_eq!(found, [2, 3]);
        assert!(start.elapsed() < LATE / 2);
    });
}

#[test]
fn odd_completions_are_kept_as_they_are() {
    let device = FunctionDevice::model();
    let context = device.context();
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
