//! Loops: completions that are made up, polls that fail, and every combination of what can fail when a channel goes.

use std::sync::atomic::{AtomicPtr, Ordering};
use std::thread;
use std::time::Duration;

use ibverbs::{
    Loop, PooledBuffer, ReceiveWorkRequest, SendWorkRequest, TransportError,
    completion::WorkErrorClass, ffi,
};
use ibverbs_function_device::{FunctionDevice, Progress};

use crate::loops::{Loops, next};
use crate::pair::{TestDevice, peek};

/// The limit of a wait for what never comes.
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn completions_that_are_made_up_end_nothing() {
    let device = FunctionDevice::make();
    device.progress(Progress::Manual);
    let mut loops = Loops::on(device);
    let (channel, peer) = loops.connect();
    let number = loops.here.endpoint(channel).unwrap().num();
    // Earlier requests use the slot.
    for _ in 0..9 {
        loops.receive(peer, 0);
        loops.send(channel, 1, 0);
        loops.device.run();
        let _ = (next(&mut loops.here), next(&mut loops.peers));
    }
    loops.send(channel, 1, 9);
    let (queue, wr_id) = (loops.here.as_raw(), loops.device.posted(0).unwrap().wr_id);
    let strangers = [
        (wr_id, number + 1),            // another queue pair
        (wr_id - (1 << 32), number),    // an earlier request of the slot
        (wr_id + (1 << 32), number),    // a later one
        (wr_id & !0xffff_ffff, number), // the slot that is nobody's
        (wr_id + 1, number),            // a slot that is free
        (u64::MAX, number),             // no slot
    ];
    for (wr_id, qp_num) in strangers {
        loops.device.inject(queue, &ffi::ibv_wc { wr_id, qp_num, ..Default::default() });
        let error = loops.here.next_ended().unwrap_err();
        assert_eq!(error, TransportError::UnknownCompletion { queue_pair: qp_num, wr_id });
        assert!(loops.here.next_ended().unwrap().is_none());
        assert_eq!((loops.here.in_flight(channel), loops.out()), (1, 1));
    }
    loops.receive(peer, 0);
    loops.device.run();
    // The real one, and the same again.
    let again = ffi::ibv_wc { wr_id, qp_num: number, ..Default::default() };
    loops.device.inject(queue, &again);
    assert_eq!(next(&mut loops.here).token, 9);
    assert!(loops.here.next_ended().is_err());
    // A made-up completion comes between two real ones.
    loops.receive(peer, 0);
    loops.receive(peer, 0);
    loops.send(channel, 1, 10);
    loops.device.run();
    loops.device.inject(queue, &again);
    loops.send(channel, 1, 11);
    loops.device.run();
    assert_eq!(next(&mut loops.here).token, 10);
    assert!(loops.here.next_ended().is_err());
    assert_eq!(next(&mut loops.here).token, 11);
    // A completion of a channel that was removed is late, and no error.
    loops.here.remove(channel).unwrap();
    loops.device.inject(queue, &again);
    assert!(loops.here.next_ended().unwrap().is_none());
    loops.finish();
}

/// The flushed completions come, though not at once.
#[test]
fn a_channel_that_is_removed_waits_for_its_completions() {
    let device = FunctionDevice::make();
    let mut loops = Loops::on(device.clone());
    let builder = |of: &Loop<'static, PooledBuffer>| {
        of.create_channel(&loops.domain).max_send_wr(4).max_recv_wr(4).settle_timeout(PATIENCE)
    };
    let (one, two) = crate::pair::connect(builder(&loops.here), builder(&loops.peers));
    let channel = loops.here.add(one).unwrap();
    let receive = ReceiveWorkRequest::new(loops.filled(0));
    loops.here.post(channel, receive, 7).unwrap();
    let queue = AtomicPtr::new(loops.here.as_raw());
    device.hold_completions(queue.load(Ordering::Relaxed), 0, true);
    let polled = device.calls("poll_cq");
    let device = &device;
    thread::scope(|scope| {
        scope.spawn(move || {
            let queue = queue.load(Ordering::Relaxed);
            // Waits until `remove` has polled in vain several times, or has given up.
            while device.calls("poll_cq") < polled + 5 && device.calls("destroy_qp") == 0 {
                thread::yield_now();
            }
            device.hold_completions(queue, 0, false);
            device.release_all(queue);
        });
        loops.here.remove(channel).unwrap();
    });
    let ended = next(&mut loops.here);
    let error = ended.result().unwrap_err().work_error().expect("it has a completion");
    assert_eq!((ended.token, error.class()), (7, WorkErrorClass::Flushed));
    drop((ended, two));
    loops.finish();
}

#[test]
fn a_poll_that_fails_ends_nothing() {
    let mut loops = Loops::on(FunctionDevice::make());
    let (channel, peer) = loops.connect();
    loops.receive(peer, 1);
    loops.send(channel, 1, 2);
    for value in [-1, -libc::EIO, i32::MIN, 17, i32::MAX] {
        loops.device.poll_error(value);
        loops.device.fail("poll_cq").errno(libc::EIO).times(1);
        let error = loops.here.next_ended().unwrap_err();
        assert!(matches!(error, TransportError::Verbs(error) if error.verb() == "ibv_poll_cq"));
        assert_eq!(loops.out(), 2);
    }
    assert_eq!((next(&mut loops.here).token, next(&mut loops.peers).token), (2, 1));
    loops.finish();
}

/// Each step of removing a channel works or fails, and so it is when the loop is dropped: no buffer comes back while the
/// device may write to it.
#[test]
fn no_buffer_comes_back_while_the_device_may_use_it() {
    for bits in 0..128_u32 {
        let [error_fails, reset_fails, destroy_fails, poll_fails, held, stale, dropped] =
            [1, 2, 4, 8, 16, 32, 64].map(|bit| bits & bit != 0);
        let device = FunctionDevice::make();
        device.stale_translation(true);
        device.keep_stale_completions(stale);
        let mut loops = Loops::on(device.clone());
        let (channel, peer) = loops.connect();
        let (other, its_peer) = loops.connect();
        loops.send(channel, 7, 0);
        let queue = loops.here.as_raw();
        loops.receive(peer, 0);
        let _ = (next(&mut loops.here), next(&mut loops.peers));
        let buffer = loops.filled(0);
        let address = buffer.as_ptr();
        loops.here.post(channel, ReceiveWorkRequest::new(buffer), 1).unwrap();
        let fail = |verb, fails| {
            if fails {
                device.fail(verb).errno(libc::EIO).always();
            }
        };
        fail("modify_to_err", error_fails);
        fail("modify_to_reset", reset_fails);
        fail("destroy_qp", destroy_fails);
        fail("poll_cq", poll_fails);
        if held {
            device.hold_completions(queue, 0, true);
        }
        if !dropped {
            assert_eq!(loops.here.remove(channel).is_err(), destroy_fails, "{bits:b}");
        }
        device.clear_faults();
        if held {
            device.hold_completions(queue, 0, false);
        }
        if dropped {
            fail("modify_to_reset", reset_fails);
            fail("destroy_qp", destroy_fails);
            // The other loop's channels are destroyed after that.
            let Loops { here, peers, pool, domain, device } = loops;
            drop(here);
            device.clear_faults();
            let flushed = !destroy_fails || !reset_fails;
            assert_eq!(pool.chunks() - pool.available(), usize::from(!flushed), "{bits:b}");
            device.run();
            drop(peers);
            assert_eq!(device.violations().0, 0, "{bits:b} {}", device.violations().1);
            drop((pool, domain));
            continue;
        }
        // The receive has ended, or its buffer is leaked.
        let flushed = !error_fails && !poll_fails && !held;
        if destroy_fails && reset_fails && !flushed {
            assert_eq!((loops.out(), loops.here.capacity().1), (1, 48), "{bits:b}");
            assert!(loops.here.next_ended().unwrap().is_none(), "{bits:b}");
        } else {
            let ended = next(&mut loops.here);
            assert_eq!(ended.token, 1);
            assert!(ended.result().unwrap_err().is_consequence());
            let mut buffer = ended.buffer;
            buffer.fill(0xee);
            // A message that the peer sends now does not reach the buffer.
            let message = SendWorkRequest::new(loops.filled(0x55));
            let _ = loops.peers.post(peer, message, 0);
            device.run();
            assert_eq!(peek(address, 8), [0xee; 8], "{bits:b}: written after it was given back");
            drop(buffer);
        }
        // The others work.
        loops.receive(its_peer, 3);
        loops.send(other, 1, 4);
        assert_eq!(next(&mut loops.here).token, 4);
        assert_eq!(device.violations().0, 0, "{bits:b} {}", device.violations().1);
        if !destroy_fails {
            loops.finish();
        }
    }
}
