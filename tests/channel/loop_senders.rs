//! Senders of a loop's channel: threads that post beside the thread that polls.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use ibverbs::event_loop::LoopSender;
use ibverbs::{
    ChannelId, PooledBuffer, ReceiveWorkRequest, RemoteMemoryRegion, SendWorkRequest,
    TransportError, WorkStatus, WriteWorkRequest,
};
use ibverbs_function_device::{FunctionDevice, Progress};

use crate::loops::{Loops, next};
use crate::pair::TestDevice;
use crate::software::Software;

type Sender = LoopSender<'static, PooledBuffer>;

fn rig<D: TestDevice>(device: D) -> (Loops<D>, ChannelId, ChannelId, Sender) {
    let mut loops = Loops::on(device);
    let (channel, peer) = loops.connect();
    let sender = loops.here.channel_sender(channel).unwrap();
    (loops, channel, peer, sender)
}

fn manual() -> FunctionDevice {
    let device = FunctionDevice::make();
    device.progress(Progress::Manual);
    device
}

/// Each thread sends its number and a count.
fn many_threads<D: TestDevice>(device: D) {
    const THREADS: usize = 4;
    const SENDS: usize = 100;
    let (mut loops, _, peer, sender) = rig(device);
    for token in 0..4 {
        loops.receive(peer, token);
    }
    let done = Arc::new(AtomicUsize::new(0));
    let threads: [_; THREADS] = std::array::from_fn(|thread| {
        let (sender, pool, done) = (sender.clone(), loops.pool.clone(), done.clone());
        thread::spawn(move || {
            for count in 0..SENDS {
                let mut message =
                    pool.take_from(&[thread as u8, count as u8]).unwrap().expect("there are 64");
                let token = (thread * SENDS + count) as u64;
                while let Err(refused) = sender.post(SendWorkRequest::new(message), token) {
                    assert_eq!(refused.error, TransportError::QueueFull);
                    message = refused.buffer.unwrap();
                    thread::yield_now();
                }
            }
            done.fetch_add(1, Ordering::SeqCst);
        })
    });
    drop(sender);
    let (mut tokens, mut messages) = (BTreeSet::new(), [0; THREADS]);
    let end = Instant::now() + std::time::Duration::from_secs(300);
    while tokens.len() < THREADS * SENDS || messages.iter().sum::<usize>() < THREADS * SENDS {
        assert!(Instant::now() < end, "{} sends, {messages:?}", tokens.len());
        if let Some(ended) = loops.here.next_ended().unwrap() {
            ended.result().unwrap();
            assert!(tokens.insert(ended.token), "{} ends twice", ended.token);
        }
        if let Some(ended) = loops.peers.next_ended().unwrap() {
            assert_eq!(ended.result().unwrap().byte_len(), 2);
            let (thread, count) = (usize::from(ended.buffer[0]), ended.buffer[1]);
            assert_eq!(usize::from(count), messages[thread], "thread {thread} in its order");
            messages[thread] += 1;
            loops.peers.post(peer, ReceiveWorkRequest::new(ended.buffer), 0).unwrap();
        }
    }
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(done.load(Ordering::SeqCst), THREADS);
    loops.finish();
}

#[test]
fn many_threads_post_while_one_polls() {
    many_threads(FunctionDevice::make());
    many_threads(Software::make());
}

#[test]
fn a_full_queue_gives_the_buffer_back() {
    let (mut loops, channel, peer, sender) = rig(manual());
    for round in 0..3 {
        for token in 0..4 {
            loops.receive(peer, token);
            sender.post(SendWorkRequest::new(loops.filled(1)), token).unwrap();
        }
        assert_eq!(loops.here.in_flight(channel), 4);
        let refused = sender.post(SendWorkRequest::new(loops.filled(1)), 5).unwrap_err();
        assert_eq!(refused.error, TransportError::QueueFull, "round {round}");
        assert!(refused.buffer.is_some());
        drop(refused);
        loops.device.run();
        for token in 0..4 {
            let ended = next(&mut loops.here);
            assert_eq!((ended.channel, ended.token), (channel, token));
            ended.result().unwrap();
            drop(next(&mut loops.peers));
        }
        assert_eq!(loops.here.in_flight(channel), 0);
    }
    loops.finish();
}

/// What ends a channel ends its sender, and every buffer comes back.
#[test]
fn a_sender_ends_with_its_channel() {
    type End = fn(&mut Loops<FunctionDevice>, ChannelId);
    let ends: [(&str, End, TransportError); 3] = [
        ("stop", |loops, at| assert_eq!(loops.here.stop(at), Ok(2)), TransportError::Stopped),
        ("remove", |loops, at| loops.here.remove(at).unwrap(), TransportError::Closed),
        (
            "take out",
            |loops, at| {
                let out = loops.here.take_out(at).unwrap();
                loops.here.end_destroyed(out.destroy()).unwrap();
            },
            TransportError::NotConnected,
        ),
    ];
    for (name, end, expected) in ends {
        let (mut loops, channel, _, sender) = rig(manual());
        for token in 0..2 {
            sender.post(SendWorkRequest::new(loops.filled(1)), token).unwrap();
        }
        end(&mut loops, channel);
        for token in 0..2 {
            let ended = next(&mut loops.here);
            assert_eq!((ended.channel, ended.token), (channel, token), "{name}");
            assert!(ended.result().is_err(), "{name}");
        }
        let refused = sender.post(SendWorkRequest::new(loops.filled(1)), 9).unwrap_err();
        assert_eq!(refused.error, expected, "{name}");
        assert!(refused.buffer.is_some(), "{name}");
        drop(refused);
        assert_eq!(loops.out(), 0, "{name}");
        loops.finish();
    }
}

#[test]
fn a_dropped_loop_takes_the_buffers_of_its_senders_along() {
    let (loops, _, _, sender) = rig(manual());
    let late = loops.filled(2);
    sender.post(SendWorkRequest::new(loops.filled(1)), 1).unwrap();
    let Loops { here, peers, pool, domain, device } = loops;
    drop(here);
    assert_eq!(pool.available(), pool.chunks() - 1, "all but this test's own");
    let refused = sender.post(SendWorkRequest::new(late), 2).unwrap_err();
    assert_eq!(refused.error, TransportError::Closed);
    drop((refused, peers, pool, domain));
    device.assert_clean();
}

#[test]
fn a_channel_that_was_put_back_has_another_sender() {
    let (mut loops, channel, peer, sender) = rig(FunctionDevice::make());
    for round in 0..3 {
        let out = loops.here.take_out(channel).unwrap();
        loops.here.put_back(out).unwrap();
        let refused = sender.post(SendWorkRequest::new(loops.filled(1)), 9).unwrap_err();
        assert_eq!(refused.error, TransportError::NotConnected);
        drop(refused);
        let another = loops.here.channel_sender(channel).unwrap();
        for token in 0..6 {
            loops.receive(peer, token);
            another.post(SendWorkRequest::new(loops.filled(1)), token).unwrap();
            let ended = next(&mut loops.here);
            assert_eq!(ended.token, token, "round {round}");
            ended.result().unwrap();
            drop(next(&mut loops.peers));
        }
    }
    loops.finish();
}

#[test]
fn a_refused_post_gives_the_buffer_back_and_one_that_may_be_queued_keeps_it() {
    let (mut loops, channel, peer, sender) = rig(manual());
    loops.device.fail("post_send").errno(libc::EIO).times(1);
    let refused = sender.post(SendWorkRequest::new(loops.filled(1)), 1).unwrap_err();
    assert!(matches!(refused.error, TransportError::Verbs(_)) && refused.buffer.is_some());
    drop(refused);
    assert_eq!(loops.out(), 0);
    loops.receive(peer, 1);
    sender.post(SendWorkRequest::new(loops.filled(1)), 2).unwrap();
    loops.device.run();
    assert_eq!(next(&mut loops.here).token, 2);
    drop(next(&mut loops.peers));

    loops.device.fail("ring_doorbell").errno(libc::EACCES).times(1);
    let failed = sender.post(SendWorkRequest::new(loops.filled(1)), 3).unwrap_err();
    assert!(failed.buffer.is_none(), "the device may still use it");
    let ended = next(&mut loops.here);
    assert_eq!((ended.channel, ended.token), (channel, 3));
    assert!(ended.result().unwrap_err().is_consequence());
    drop(ended);
    let refused = sender.post(SendWorkRequest::new(loops.filled(1)), 4).unwrap_err();
    assert_eq!(refused.error, TransportError::Stopped);
    drop(refused);
    loops.finish();
}

/// The first fails, the others are flushed, and their places are free again.
#[test]
fn operations_that_fail_come_back_in_order() {
    let (mut loops, _, _, sender) = rig(Software::manual());
    let nowhere = RemoteMemoryRegion::new(0x1000, 64, 1).unwrap();
    for round in 0..3 {
        for token in 0..4 {
            let mut buffer = loops.filled(1);
            buffer.set_len(8).unwrap();
            sender.post(WriteWorkRequest::new(buffer, nowhere), token).unwrap();
        }
        loops.device.run();
        for token in 0..4 {
            let ended = next(&mut loops.here);
            let Err(TransportError::Work(error)) = ended.result() else { panic!("it succeeds") };
            let is_first = (round, token) == (0, 0);
            assert_eq!((ended.token, error.status() != WorkStatus::Flushed), (token, is_first));
        }
    }
    loops.finish();
}

/// The loop polls for a channel that it removes, and keeps what it finds for later.
#[test]
fn a_place_is_free_when_next_ended_has_returned_its_operation() {
    let (mut loops, channel, peer, sender) = rig(manual());
    let (other, _) = loops.connect();
    for token in 0..4 {
        loops.receive(peer, token);
        sender.post(SendWorkRequest::new(loops.filled(1)), token).unwrap();
    }
    loops.device.run();
    loops.send(other, 2, 9);
    loops.here.remove(other).unwrap();
    assert_eq!(loops.here.in_flight(channel), 0);
    let refused = sender.post(SendWorkRequest::new(loops.filled(1)), 5).unwrap_err();
    assert_eq!(refused.error, TransportError::QueueFull);
    drop(refused);
    for token in [0, 1, 2, 3, 9] {
        let ended = next(&mut loops.here);
        assert_eq!((ended.token, ended.result().is_ok()), (token, token < 4));
        let posted = sender.post(SendWorkRequest::new(loops.filled(1)), 5);
        assert_eq!(posted.is_ok(), token < 4, "{token}");
    }
    loops.finish();
}

/// The loop has what it found while it removed another channel: the slot is not free for a sender.
#[test]
fn a_channel_whose_sends_have_ended_has_a_sender_once_they_are_returned() {
    let (mut loops, _, _, _sender) = rig(manual());
    let (channel, peer) = loops.connect();
    let (other, _) = loops.connect();
    loops.receive(peer, 1);
    loops.send(channel, 1, 1);
    loops.device.run();
    loops.send(other, 2, 2);
    loops.here.remove(other).unwrap();
    assert_eq!(loops.here.in_flight(channel), 0);
    let refused = loops.here.channel_sender(channel).unwrap_err();
    assert!(refused.to_string().contains("has not returned"), "{refused}");
    assert_eq!(next(&mut loops.here).token, 1);
    let sender = loops.here.channel_sender(channel).unwrap();
    assert_eq!(next(&mut loops.here).token, 2);
    loops.receive(peer, 3);
    sender.post(SendWorkRequest::new(loops.filled(3)), 3).unwrap();
    loops.device.run();
    assert_eq!(next(&mut loops.here).token, 3);
    assert!(loops.here.next_ended().unwrap().is_none());
    loops.finish();
}

#[test]
fn a_loop_sleeps_while_there_is_a_sender() {
    let (mut loops, _, peer, sender) = rig(Software::on_sockets());
    loops.receive(peer, 1);
    let message = SendWorkRequest::new(loops.filled(1));
    let posting = thread::spawn(move || sender.post(message, 7).unwrap());
    assert_eq!(loops.here.wait_ended().unwrap().token, 7);
    posting.join().unwrap();
    // The last one is gone, and nothing was posted.
    let Err(TransportError::Verbs(error)) = loops.here.wait_ended() else { panic!("it ends") };
    assert_eq!(error.raw_os_error(), Some(libc::EDEADLK));
    loops.peers.wait_ended().unwrap().result().unwrap();
    loops.finish();
}

#[test]
fn what_has_no_sender() {
    let mut loops = Loops::on(manual());
    let (channel, _) = loops.connect();
    loops.send(channel, 1, 1);
    let code = |error: ibverbs::Error| error.raw_os_error().unwrap();
    let sender = loops.here.channel_sender(channel);
    assert!(sender.unwrap_err().to_string().contains("has not returned"));
    let unconnected = loops.prepare(&loops.here).build().unwrap();
    let unconnected = loops.here.add_prepared(unconnected).unwrap();
    assert_eq!(code(loops.here.channel_sender(unconnected).unwrap_err()), libc::EINVAL);
    loops.here.remove(unconnected).unwrap();
    assert_eq!(code(loops.here.channel_sender(unconnected).unwrap_err()), libc::EINVAL);
    let (channel, _) = loops.connect();
    drop(loops.here.channel_sender(channel).unwrap());
    let refused = loops.here.post(channel, SendWorkRequest::new(loops.filled(1)), 1).unwrap_err();
    assert!(refused.to_string().contains("LoopSender"), "{refused}");
    drop(refused);
    loops.finish();
}
