//! Receives that are posted before the channel is connected.

use ibverbs::{ErrorKind, ReceiveWorkRequest, SendWorkRequest, TransportError};
use ibverbs_software::Verb;

use crate::loops::{Loops, next};
use crate::software::Software;

#[test]
fn the_first_messages_find_their_receives() {
    let mut loops = Loops::on(Software::new());
    let prepared = loops.prepare(&loops.peers).build().unwrap();
    let endpoint = prepared.endpoint();
    let peer = loops.peers.add_prepared(prepared).unwrap();
    for token in 0..4 {
        loops.receive(peer, token);
    }
    assert_eq!(loops.peers.endpoint(peer), Some(endpoint));
    assert_eq!(loops.device.outstanding(endpoint.num()), Some((0, 4)));
    let full = ReceiveWorkRequest::new(loops.filled(0));
    let full = loops.peers.post(peer, full, 9).unwrap_err();
    assert_eq!(full.error, TransportError::QueueFull);
    drop(full);
    // The other side is ready first, and sends at once.
    let other = loops.prepare(&loops.here).build().unwrap();
    let to_other = other.endpoint();
    let channel = loops.here.add(other.handshake(endpoint).unwrap()).unwrap();
    for number in 0..4 {
        loops.send(channel, number, number.into());
    }
    loops.peers.handshake(peer, to_other).unwrap();
    for number in 0..4 {
        let ended = next(&mut loops.peers);
        assert_eq!((ended.token, ended.buffer[0]), (number.into(), number));
        assert_eq!(next(&mut loops.here).token, number.into());
    }
    loops.finish();
}

#[test]
fn a_channel_that_ends_before_it_is_connected_gives_its_buffers_back() {
    for removed in [false, true] {
        let mut loops = Loops::on(Software::new());
        let prepared = loops.prepare(&loops.peers).build().unwrap();
        let peer = loops.peers.add_prepared(prepared).unwrap();
        (0..2).for_each(|token| loops.receive(peer, token));
        assert_eq!(loops.out(), 2);
        if removed {
            loops.peers.remove(peer).unwrap();
            assert_eq!([next(&mut loops.peers).token, next(&mut loops.peers).token], [0, 1]);
            assert_eq!((loops.out(), loops.device.live_objects().queue_pairs), (0, 0));
        }
        loops.finish();
    }
}

/// Neither reset nor destroyed: the device may still write the buffers, which are leaked.
#[test]
fn buffers_of_a_queue_pair_that_cannot_be_destroyed_are_leaked() {
    let mut loops = Loops::on(Software::new());
    let prepared = loops.prepare(&loops.peers).build().unwrap();
    let peer = loops.peers.add_prepared(prepared).unwrap();
    loops.receive(peer, 0);
    let Loops { here, peers, pool, domain, device } = loops;
    device.fail_always(Verb::ModifyQp, libc::EIO);
    device.fail_always(Verb::DestroyQp, libc::EIO);
    drop((here, peers));
    assert_eq!(pool.available(), pool.chunks() - 1);
    drop((pool, domain));
    device.clear_failures();
    assert_eq!(device.early_deregistrations(), 0);
}

#[test]
fn a_failed_handshake_ends_the_receives_and_the_next_starts_again() {
    // The first step has been made, so two are left.
    for step in 0..2 {
        let mut loops = Loops::on(Software::new());
        let prepared = loops.prepare(&loops.peers).build().unwrap();
        let peer = loops.peers.add_prepared(prepared).unwrap();
        loops.receive(peer, 1);
        let other = loops.prepare(&loops.here).build().unwrap();
        let to_other = other.endpoint();
        loops.device.let_pass(Verb::ModifyQp, step);
        loops.device.fail_next(Verb::ModifyQp, libc::ENETUNREACH);
        let failed = loops.peers.handshake(peer, to_other).unwrap_err();
        assert_eq!(failed.raw_os_error(), Some(libc::ENETUNREACH));
        let ended = next(&mut loops.peers);
        assert_eq!((ended.token, ended.result().unwrap_err()), (1, TransportError::Stopped));
        drop(ended);
        loops.peers.handshake(peer, to_other).unwrap();
        let to_peer = loops.peers.endpoint(peer).unwrap();
        let channel = loops.here.add(other.handshake(to_peer).unwrap()).unwrap();
        loops.receive(peer, 2);
        loops.send(channel, 5, 3);
        let ended = next(&mut loops.peers);
        assert_eq!((ended.token, ended.buffer[0]), (2, 5));
        drop(ended);
        loops.finish();
    }
}

#[test]
fn a_queue_pair_that_does_not_reach_init_comes_back() {
    let mut loops = Loops::on(Software::new());
    let prepared = loops.prepare(&loops.peers).build().unwrap();
    loops.device.fail_next(Verb::ModifyQp, libc::ENOMEM);
    let refused = loops.peers.add_prepared(prepared).unwrap_err();
    assert_eq!(refused.error.kind(), ErrorKind::Resource);
    let peer = loops.peers.add_prepared(refused.object).unwrap();
    loops.receive(peer, 1);
    let early = loops.peers.post(peer, SendWorkRequest::new(loops.pool.take().unwrap()), 2);
    assert_eq!(early.unwrap_err().error, TransportError::NotConnected);
    loops.finish();
}
