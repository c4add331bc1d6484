//! Loops: receives that channels share.

use ibverbs::{
    AccessFlags, BufferPool, ChannelId, ErrorKind, Loop, PooledBuffer, ReceiveWorkRequest,
    SendWorkRequest, TransportError, completion::WorkErrorClass, ffi,
};
use ibverbs_function_device::{FunctionDevice, Progress};

use crate::loops::{LEN, Loops, next};
use crate::pair::TestDevice;
use crate::software::Software;

/// Two channels of `peers`, that share receives, and the channels of `here` that they are connected to.
fn sharing<D: TestDevice>(
    loops: &mut Loops<D>,
    capacity: u32,
) -> (ChannelId, [(ChannelId, ChannelId); 2]) {
    let receives = loops.peers.add_shared_receives(&loops.domain, capacity).unwrap();
    let pairs = [(); 2].map(|()| connect(loops, receives));
    (receives, pairs)
}

fn connect<D: TestDevice>(loops: &mut Loops<D>, receives: ChannelId) -> (ChannelId, ChannelId) {
    let builder = loops.peers.create_sharing_channel(&loops.domain, receives).unwrap();
    let builder = builder.max_send_wr(4).access(crate::pair::ALL);
    let (one, two) = crate::pair::connect(loops.prepare(&loops.here), builder);
    (loops.here.add(one).unwrap(), loops.peers.add(two).unwrap())
}

#[test]
fn a_message_comes_with_the_channel_that_it_arrived_on() {
    let mut loops = Loops::on(Software::new());
    let (receives, pairs) = sharing(&mut loops, 6);
    assert_eq!(loops.peers.capacity(), (64, 64 - 6 - 8));
    for round in 0..20 {
        for n in 0..6 {
            loops.receive(receives, n);
        }
        assert_eq!(loops.peers.in_flight(receives), 6);
        let refused = loops.peers.post(receives, ReceiveWorkRequest::new(loops.filled(0)), 9);
        assert_eq!(refused.unwrap_err().error, TransportError::QueueFull);
        for (n, &(from, to)) in pairs.iter().chain(&pairs).chain(&pairs).enumerate() {
            loops.send(from, n as u8 + 1, round);
            let ended = next(&mut loops.peers);
            assert_eq!((ended.channel, ended.token), (to, n as u64));
            assert_eq!(ended.result().unwrap().byte_len() as usize, LEN);
            assert_eq!(ended.buffer[..], [n as u8 + 1; LEN]);
            assert_eq!(next(&mut loops.here).token, round);
        }
        // Answers.
        let (from, to) = pairs[round as usize % 2];
        let answer = SendWorkRequest::new(loops.filled(7));
        let room = ReceiveWorkRequest::new(loops.filled(0));
        loops.here.post(from, room, 1).unwrap();
        loops.peers.post(to, answer, 2).unwrap();
        assert_eq!((next(&mut loops.peers).token, next(&mut loops.here).token), (2, 1));
    }
    let own = loops.peers.post(pairs[0].1, ReceiveWorkRequest::new(loops.filled(0)), 0);
    assert_eq!(own.unwrap_err().error, TransportError::ReceivesAreShared);
    loops.finish();
}

/// No queue pair shares them that the completion names, whatever its number.
#[test]
fn a_message_of_a_queue_pair_that_shares_no_receives_is_unknown() {
    let device = FunctionDevice::make();
    device.progress(Progress::Manual);
    let mut loops = Loops::on(device);
    let (receives, [(from, to), _]) = sharing(&mut loops, 4);
    let (channel, peer) = loops.connect();
    let own = loops.peers.endpoint(peer).unwrap().num();
    loops.receive(receives, 5);
    let (queue, wr_id) = (loops.peers.as_raw(), loops.device.posted(0).unwrap().wr_id);
    for qp_num in [u32::MAX, u32::MAX - 1, 0, own] {
        loops.device.inject(queue, &ffi::ibv_wc { wr_id, qp_num, ..Default::default() });
        let error = loops.peers.next_ended().unwrap_err();
        assert_eq!(error, TransportError::UnknownCompletion { queue_pair: qp_num, wr_id });
        // `remove` polls the completion here, and not `next_ended`.
        loops.device.inject(queue, &ffi::ibv_wc { wr_id, qp_num, ..Default::default() });
        loops.peers.remove(peer).err();
        assert_eq!(loops.peers.in_flight(receives), 1);
        while loops.peers.next_ended().is_err() {}
    }
    loops.send(from, 1, 0);
    loops.device.run();
    let ended = next(&mut loops.peers);
    assert_eq!((ended.channel, ended.token), (to, 5));
    drop(ended);
    let _ = (next(&mut loops.here), channel);
    loops.finish();
}

#[test]
fn the_end_of_a_channel_leaves_the_receives_to_the_others() {
    let mut loops = Loops::on(Software::new());
    let (receives, [first, second]) = sharing(&mut loops, 4);
    for n in 0..4 {
        loops.receive(receives, n);
    }
    // The channel goes before anybody has asked for this message.
    loops.send(first.0, 1, 0);
    let _ = next(&mut loops.here);
    let busy = loops.peers.remove(receives).unwrap_err();
    assert_eq!(busy.kind(), ErrorKind::Busy);
    loops.peers.remove(first.1).unwrap();
    let ended = next(&mut loops.peers);
    assert_eq!((ended.token, ended.buffer[0]), (0, 1));
    drop(ended);
    assert_eq!((loops.peers.in_flight(receives), loops.out()), (3, 3));
    loops.send(second.0, 2, 0);
    let ended = next(&mut loops.peers);
    assert_eq!((ended.channel, ended.token), (second.1, 1));
    drop(ended);
    // Another one in its place.
    let third = connect(&mut loops, receives);
    assert_eq!(third.1.index(), first.1.index());
    loops.send(third.0, 3, 0);
    let ended = next(&mut loops.peers);
    assert_eq!((ended.channel, ended.token, ended.buffer[0]), (third.1, 2, 3));
    drop(ended);
    loops.peers.remove(second.1).unwrap();
    loops.peers.remove(third.1).unwrap();
    // The last receive ends with the queue.
    loops.peers.remove(receives).unwrap();
    let ended = next(&mut loops.peers);
    assert_eq!((ended.channel, ended.token), (receives, 3));
    assert_eq!(ended.result().unwrap_err(), TransportError::Closed);
    drop(ended);
    assert_eq!(loops.peers.capacity().1, 64);
    let gone = loops.peers.create_sharing_channel(&loops.domain, receives).err().unwrap();
    assert_eq!(gone.kind(), ErrorKind::InvalidInput);
    loops.finish();
}

#[test]
fn a_buffer_has_the_length_of_its_message() {
    let mut loops = Loops::on(Software::new());
    let (receives, pairs) = sharing(&mut loops, 4);
    let mut buffer = loops.pool.take().unwrap();
    for message in [&b"a"[..], b"longer", b"", b"short"] {
        for (from, to) in pairs {
            loops.peers.post(receives, ReceiveWorkRequest::new(buffer), 0).unwrap();
            let sent = loops.pool.take_from(message).unwrap().unwrap();
            loops.here.post(from, SendWorkRequest::new(sent), 0).unwrap();
            next(&mut loops.here).result().unwrap();
            let ended = next(&mut loops.peers);
            assert_eq!((ended.channel, &ended.buffer[..]), (to, message));
            buffer = ended.buffer;
        }
    }
    drop(buffer);
    loops.finish();
}

/// A message that is too long fails, with its buffer, and so does its channel alone.
#[test]
fn a_failure_is_of_one_channel() {
    let mut loops = Loops::on(Software::new());
    let (receives, [first, second]) = sharing(&mut loops, 4);
    for n in 0..2 {
        loops.receive(receives, n);
    }
    let long = BufferPool::new(&loops.domain, 2 * LEN, 1, AccessFlags::empty()).unwrap();
    let message = long.take_from(&[0; 2 * LEN]).unwrap().unwrap();
    loops.here.post(first.0, SendWorkRequest::new(message), 0).unwrap();
    let ended = next(&mut loops.peers);
    assert_eq!((ended.channel, ended.token), (first.1, 0));
    let error = ended.result().unwrap_err().work_error().unwrap();
    assert_ne!(error.class(), WorkErrorClass::Flushed);
    assert!(next(&mut loops.here).result().is_err());
    drop(ended);
    loops.send(second.0, 5, 0);
    let ended = next(&mut loops.peers);
    assert_eq!((ended.channel, ended.token, ended.buffer[0]), (second.1, 1, 5));
    drop(ended);
    loops.peers.remove(first.1).unwrap();
    drop(long);
    loops.finish();
}

#[test]
fn a_loop_that_is_dropped_ends_its_shared_receives() {
    let mut loops = Loops::on(Software::new());
    let (receives, _) = sharing(&mut loops, 4);
    for n in 0..4 {
        loops.receive(receives, n);
    }
    // Another loop refuses the shared receives of this one.
    let other = Loop::<PooledBuffer>::new(loops.domain.context_parent(), 8).unwrap();
    assert!(other.create_sharing_channel(&loops.domain, receives).is_err());
    assert!(other.shared_receive_queue(receives).is_none());
    let queue = loops.peers.shared_receive_queue(receives).unwrap();
    queue.set_limit(2).unwrap();
    queue.set_token(7);
    assert_eq!(queue.token(), 7);
    drop(other);
    loops.finish();
}
