//! Channels that are taken out of their loop, for verbs that may take long.

use ibverbs::{ReceiveWorkRequest, SendWorkRequest, TransportError};
use ibverbs_function_device::FunctionDevice;

use crate::loops::{Loops, next};
use crate::pair::TestDevice;
use crate::software::Software;

/// The peer's first message is there when the channel is put back.
#[test]
fn a_channel_connects_outside_of_its_loop() {
    let mut loops = Loops::on(FunctionDevice::make());
    let prepared = loops.prepare(&loops.peers).build().unwrap();
    let peer = loops.peers.add_prepared(prepared).unwrap();
    loops.receive(peer, 5);
    let other = loops.prepare(&loops.here).build().unwrap();
    let remote = other.endpoint();
    let detached = loops.peers.take_out(peer).unwrap();
    assert!(loops.peers.take_out(peer).is_err() && loops.peers.remove(peer).is_err());
    assert_eq!(detached.id(), peer);
    let early = ReceiveWorkRequest::new(loops.filled(1));
    let refused = loops.peers.post(peer, early, 6).unwrap_err();
    assert_eq!(refused.error, TransportError::NotConnected);
    drop(refused);
    // An attempt that fails ends what was posted.
    loops.device.fail("modify_qp").errno(libc::EIO).times(1);
    let detached = detached.handshake(remote).unwrap_err().object;
    assert_eq!(loops.peers.put_back(detached).unwrap(), peer);
    let ended = next(&mut loops.peers);
    assert_eq!((ended.token, ended.result().unwrap_err()), (5, TransportError::Stopped));
    drop(ended);
    let detached = loops.peers.take_out(peer).unwrap().handshake(remote).unwrap();
    let to_peer = detached.endpoint();
    let again = detached.handshake(remote).unwrap_err();
    assert_eq!(again.error.raw_os_error(), Some(libc::EINVAL));
    loops.peers.put_back(again.object).unwrap();
    loops.receive(peer, 8);
    let channel = loops.here.add(other.handshake(to_peer).unwrap()).unwrap();
    loops.send(channel, 3, 1);
    assert_eq!(next(&mut loops.peers).token, 8);
    assert_eq!(next(&mut loops.here).token, 1);
    loops.finish();
}

#[test]
fn receives_that_were_posted_before_get_the_first_message() {
    let mut loops = Loops::on(Software::new());
    let prepared = loops.prepare(&loops.peers).build().unwrap();
    let peer = loops.peers.add_prepared(prepared).unwrap();
    loops.receive(peer, 5);
    let other = loops.prepare(&loops.here).build().unwrap();
    let (remote, to_peer) = (other.endpoint(), loops.peers.endpoint(peer).unwrap());
    let channel = loops.here.add(other.handshake(to_peer).unwrap()).unwrap();
    let detached = loops.peers.take_out(peer).unwrap();
    let detached = detached.handshake(remote).unwrap();
    loops.send(channel, 7, 1);
    assert_eq!(next(&mut loops.here).token, 1);
    // The message has arrived while the channel is out of its loop.
    let ended = next(&mut loops.peers);
    assert_eq!((ended.channel, ended.token, ended.buffer[0]), (peer, 5, 7));
    drop(ended);
    loops.peers.put_back(detached).unwrap();
    loops.finish();
}

#[test]
fn a_channel_that_is_destroyed_outside_ends_its_operations_and_no_others() {
    for stops in [false, true] {
        let mut loops = Loops::on(Software::new());
        let room = loops.here.capacity().1;
        let (channel, peer) = loops.connect();
        let (other, _) = loops.connect();
        for token in 1..=3 {
            let receive = ReceiveWorkRequest::new(loops.filled(0));
            loops.here.post(channel, receive, token).unwrap();
        }
        let receive = ReceiveWorkRequest::new(loops.filled(0));
        loops.here.post(other, receive, 9).unwrap();
        let detached = loops.here.take_out(channel).unwrap();
        if stops {
            detached.stop().unwrap();
            for token in 1..=3 {
                assert_eq!(next(&mut loops.here).token, token);
            }
            assert_eq!(loops.here.in_flight(channel), 0);
        }
        let destroyed = detached.destroy();
        loops.here.end_destroyed(destroyed).unwrap();
        let left: &[u64] = if stops { &[] } else { &[1, 2, 3] };
        for &token in left {
            let ended = next(&mut loops.here);
            assert_eq!((ended.token, ended.result().unwrap_err()), (token, TransportError::Closed));
        }
        assert!(loops.here.next_ended().unwrap().is_none());
        let late = SendWorkRequest::new(loops.filled(1));
        let refused = loops.here.post(channel, late, 4).unwrap_err();
        assert_eq!(refused.error, TransportError::Closed);
        drop(refused);
        assert_eq!(loops.here.in_flight(other), 1);
        assert_eq!(loops.here.capacity().1, room - 8);
        loops.peers.remove(peer).unwrap();
        loops.finish();
    }
}

/// With what has ended already, and receives that were never posted.
#[test]
fn one_call_ends_all_operations_of_a_channel_and_says_how_many_come_back() {
    for has_failed in [false, true] {
        let mut loops = Loops::on(Software::new());
        let (channel, peer) = loops.connect();
        let (other, _) = loops.connect();
        for token in 1..=3 {
            loops.here.post(channel, ReceiveWorkRequest::new(loops.filled(0)), token).unwrap();
        }
        loops.here.post(other, ReceiveWorkRequest::new(loops.filled(0)), 9).unwrap();
        if has_failed {
            // Nobody receives it: the peer is not there any more.
            loops.peers.remove(peer).unwrap();
            loops.send(channel, 7, 4);
            assert_eq!(next(&mut loops.here).token, 4);
            let unposted = ReceiveWorkRequest::new(loops.filled(0));
            loops.here.post(channel, unposted, 8).unwrap();
        } else {
            // Nobody receives it.
            loops.send(channel, 7, 4);
        }
        let mut left = loops.here.stop(channel).unwrap();
        assert_eq!(left, 4);
        let late = loops.here.post(channel, SendWorkRequest::new(loops.filled(1)), 6).unwrap_err();
        assert_eq!(late.error, TransportError::Stopped);
        drop(late);
        while left > 0 {
            let ended = next(&mut loops.here);
            let error = ended.result().unwrap_err();
            assert_eq!(ended.channel, channel);
            // After a failure, the device has flushed them before.
            assert!(error == TransportError::Stopped || has_failed, "{error}");
            assert!(error.is_consequence());
            left -= 1;
        }
        assert_eq!((loops.here.in_flight(channel), loops.here.in_flight(other)), (0, 1));
        assert!(loops.here.next_ended().unwrap().is_none());
        loops.here.remove(channel).unwrap();
        assert_eq!(loops.here.stop(channel).unwrap_err().raw_os_error(), Some(libc::EINVAL));
        loops.finish();
    }
}

#[test]
fn a_channel_goes_back_to_its_own_loop_only() {
    let mut loops = Loops::on(Software::new());
    let (channel, peer) = loops.connect();
    let detached = loops.here.take_out(channel).unwrap();
    let refused = loops.peers.put_back(detached).unwrap_err();
    assert_eq!(refused.error.raw_os_error(), Some(libc::EINVAL));
    loops.here.put_back(refused.object).unwrap();
    loops.receive(peer, 1);
    loops.send(channel, 1, 2);
    assert_eq!(next(&mut loops.here).token, 2);
    assert_eq!(next(&mut loops.peers).token, 1);
    let destroyed = loops.here.take_out(channel).unwrap().destroy();
    let error = loops.peers.end_destroyed(destroyed).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    loops.finish();
}

/// A queue pair that cannot be destroyed may write its buffers for ever.
#[test]
fn what_a_channel_had_is_leaked_if_it_cannot_be_destroyed_outside() {
    let mut loops = Loops::on(FunctionDevice::make());
    let (channel, _) = loops.connect();
    let receive = ReceiveWorkRequest::new(loops.filled(0));
    loops.here.post(channel, receive, 1).unwrap();
    let out = loops.out();
    loops.device.fail("modify_qp").errno(libc::EIO).always();
    loops.device.fail("destroy_qp").errno(libc::EIO).always();
    let destroyed = loops.here.take_out(channel).unwrap().destroy();
    assert_eq!(loops.here.end_destroyed(destroyed).unwrap_err().raw_os_error(), Some(libc::EIO));
    assert!(loops.here.next_ended().unwrap().is_none());
    assert_eq!(loops.out(), out, "its buffer came back");
}
