//! Loops: flow control, and signs of life.

use std::time::{Duration, Instant};

use ibverbs::event_loop::LoopBuffer;
use ibverbs::{
    Channel, ChannelId, PooledBuffer, ReceiveWorkRequest, SendWorkRequest, TransportError,
    WriteWorkRequest, settings::MaxRnrRetries,
};
use ibverbs_function_device::FunctionDevice;

use crate::loops::{Loops, next};
use crate::software::Software;

/// Two channels with flow control, which do not survive a message without a receive.
fn connected<B>(loops: &Loops<Software, B>) -> [Channel<'static>; 2]
where
    PooledBuffer: LoopBuffer<B>,
{
    let with = |builder: ibverbs::ChannelBuilder<'static>| {
        builder.flow_control(true).max_rnr_retries(MaxRnrRetries::NONE)
    };
    let (here, there) = (loops.prepare(&loops.here), loops.prepare(&loops.peers));
    crate::pair::connect(with(here), with(there)).into()
}

fn connect<B>(loops: &mut Loops<Software, B>) -> (ChannelId, ChannelId)
where
    PooledBuffer: LoopBuffer<B>,
{
    let [one, two] = connected(loops);
    (loops.here.add(one).unwrap(), loops.peers.add(two).unwrap())
}

#[track_caller]
fn lacks_credit(loops: &mut Loops<Software>, channel: ChannelId) {
    let message = SendWorkRequest::new(loops.filled(1));
    let refused = loops.here.post(channel, message, 0).unwrap_err();
    assert_eq!(refused.error, TransportError::NoCredit);
    assert_eq!(refused.buffer.unwrap()[..], [1; crate::loops::LEN]);
}

/// Polls until a channel that was refused has credit.
#[track_caller]
fn credited(loops: &mut Loops<Software>) -> ChannelId {
    for _ in 0..1_000_000 {
        assert!(loops.here.next_ended().unwrap().is_none());
        if let Some(channel) = loops.here.next_credited() {
            return channel;
        }
    }
    panic!("no credit comes")
}

#[test]
fn a_channel_sends_what_its_peer_has_receives_for() {
    let mut loops = Loops::on(Software::new());
    let (channel, peer) = connect(&mut loops);
    let (other, _its_peer) = connect(&mut loops);
    assert_eq!((loops.here.credits(channel), loops.here.capacity()), (Some(0), (64, 46)));
    for round in 0..20 {
        lacks_credit(&mut loops, channel);
        lacks_credit(&mut loops, other);
        lacks_credit(&mut loops, channel);
        let receives = 1 + round % 3;
        for n in 0..receives {
            loops.receive(peer, n);
        }
        assert_eq!(credited(&mut loops), channel);
        // The loop reports the channel once, and the other channel has no credit.
        assert_eq!(loops.here.next_credited(), None);
        for n in 0..receives {
            while loops.here.credits(channel) == Some(0) {
                lacks_credit(&mut loops, channel);
                assert_eq!(credited(&mut loops), channel);
            }
            loops.send(channel, n as u8, n);
            assert_eq!(next(&mut loops.here).token, n);
            assert!(next(&mut loops.peers).result().is_ok());
        }
        // A write needs none.
        let nowhere = ibverbs::RemoteMemoryRegion::new(0, 0, 0).unwrap();
        let empty = loops.pool.take().unwrap();
        loops.here.post(channel, WriteWorkRequest::new(empty, nowhere), 7).unwrap();
        assert_eq!(next(&mut loops.here).token, 7);
    }
    loops.finish();
}

/// A reset takes another queue pair. The numbers of its questions, too, are those of the loop's slot for them.
#[test]
fn a_channel_that_was_reset_asks_for_credit() {
    let mut loops = Loops::on(Software::new());
    let [one, two] = connected(&loops).map(|channel| channel.reset().unwrap());
    let endpoints = [one.endpoint(), two.endpoint()];
    let (one, two) = (one.handshake(endpoints[1]).unwrap(), two.handshake(endpoints[0]).unwrap());
    let (channel, peer) = (loops.here.add(one).unwrap(), loops.peers.add(two).unwrap());
    for round in 0..3 {
        lacks_credit(&mut loops, channel);
        loops.receive(peer, round);
        assert_eq!(credited(&mut loops), channel);
        loops.send(channel, 1, round);
        assert_eq!(next(&mut loops.here).token, round);
        assert_eq!(next(&mut loops.peers).token, round);
    }
    loops.finish();
}

/// A wait that lacks credit sleeps no longer than until the peer may be asked again.
#[test]
fn a_wait_ends_when_there_is_credit() {
    let mut loops = Loops::on(Software::new());
    let (channel, peer) = connect(&mut loops);
    lacks_credit(&mut loops, channel);
    let later = Instant::now() + Duration::from_millis(20);
    assert!(loops.here.wait_ended_until(later).unwrap().is_none());
    loops.receive(peer, 0);
    let never = Instant::now() + Duration::from_secs(3600);
    assert!(loops.here.wait_ended_until(never).unwrap().is_none());
    assert_eq!(loops.here.next_credited(), Some(channel));
    loops.finish();
}

/// A read that is in flight when its channel goes, and the place is used again.
#[test]
fn a_question_ends_with_its_channel() {
    let mut loops = Loops::on(Software::new());
    for _ in 0..8 {
        let (channel, peer) = connect(&mut loops);
        lacks_credit(&mut loops, channel);
        loops.here.remove(channel).unwrap();
        assert_eq!(loops.here.next_credited(), None);
        assert_eq!((loops.here.credits(channel), loops.here.capacity().1), (None, 64));
        assert!(loops.here.next_ended().unwrap().is_none());
        loops.peers.remove(peer).unwrap();
    }
    loops.finish();
}

#[test]
fn a_peer_that_is_gone_is_noticed() {
    let mut loops = Loops::on(Software::new());
    let (channel, peer) = loops.connect();
    for _ in 0..10 {
        loops.here.keep_alive(channel).unwrap();
        while loops.here.in_flight(channel) > 0 {
            assert!(loops.here.next_ended().unwrap().is_none());
        }
    }
    loops.peers.remove(peer).unwrap();
    let error = loop {
        match loops.here.keep_alive(channel) {
            Ok(()) => assert!(loops.here.next_ended().unwrap().is_none()),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, TransportError::Work(_)), "{error}");
    loops.here.remove(channel).unwrap();
    assert_eq!(loops.here.keep_alive(channel), Err(TransportError::Closed));
    loops.finish();
}

/// The write of a sign of life, which may be posted although its post has failed, is no operation of the program's.
#[test]
fn a_sign_of_life_has_a_slot_and_no_buffer() {
    let device = FunctionDevice::model();
    let mut loops = Loops::on(device.clone());
    let (channel, _peer) = loops.connect();
    for verb in ["post_send", "ring_doorbell"] {
        device.fail(verb).errno(libc::EACCES).times(1);
        assert!(loops.here.keep_alive(channel).is_err());
        assert!(loops.here.next_ended().unwrap().is_none());
    }
    loops.here.remove(channel).unwrap();
    assert!(loops.here.next_ended().unwrap().is_none());
    let buffer = loops.filled(0);
    let refused = loops.here.post(channel, ReceiveWorkRequest::new(buffer), 0).unwrap_err();
    assert_eq!(refused.error, TransportError::Closed);
    drop(refused);
    loops.finish();
}
