//! Channels and queues that end with receives posted and messages not taken: every buffer comes back, or is
//! leaked if the device may still use it.

use ibverbs::{Loop, PooledBuffer, ReceiveWorkRequest, SendWorkRequest, TransportError};
use ibverbs_software::{Verb, When};

use super::sides::{CAPACITY, CHUNKS, LEN, Server, Side, number, send};

#[test]
fn messages_that_nobody_takes_go_with_their_channel() {
    for polled in [false, true] {
        let server = Server::new(8);
        let clients = Side::new();
        let [first, second] = [(); 2].map(|()| server.connect(&clients));
        let (ours, mut peers) = (first.0, [first.1, second.1]);
        for n in 0..6 {
            send(&mut peers[n % 2], &clients, n as u64);
        }
        if polled {
            // All completions leave the completion queue, for the channels' lists.
            server.serve();
            assert_eq!(server.receives.posted(), 2);
        }
        drop(second.0);
        assert_eq!(server.receives.posted(), 2);
        assert_eq!(server.side.pool.available(), CHUNKS - 2 - 3);
        // A channel that connects later hears its own messages only.
        let (next, mut peer) = server.connect(&clients);
        send(&mut peer, &clients, 7);
        assert_eq!(server.hears(&next), 7);
        assert_eq!([(); 3].map(|()| server.hears(&ours)), [0, 2, 4]);
        drop((ours, next));
        let Server { side, receives, reactor } = server;
        drop((receives, reactor));
        assert_eq!(side.pool.available(), CHUNKS);
    }
}

#[test]
fn peers_that_come_and_go_cost_no_receive() {
    let server = Server::new(0);
    let clients = Side::new();
    let room = server.reactor.capacity();
    for _ in 0..20 {
        while server.receives.posted() < 4 {
            server.receives.post(server.side.buffer(0)).unwrap();
        }
        let (ours, mut peer) = server.connect(&clients);
        for _ in 0..3 {
            // SAFETY: there is no memory.
            let _in_flight = unsafe { peer.post_unpolled(SendWorkRequest::new(())) }.unwrap();
        }
        drop(peer);
        drop(ours);
        assert_eq!(server.reactor.capacity(), room);
    }
    let Server { side, receives, reactor } = server;
    drop((receives, reactor));
    assert_eq!(side.pool.available(), CHUNKS);
}

#[test]
fn a_queue_pair_that_cannot_be_destroyed_keeps_the_receives_and_their_buffers() {
    let server = Server::new(8);
    let clients = Side::new();
    let [first, second] = [(); 2].map(|()| server.connect(&clients));
    let mut peers = [first.1, second.1];
    send(&mut peers[0], &clients, 1);
    server.side.device.fail(Verb::DestroyQp, libc::EIO, When::Before, 1);
    drop(first.0);
    // The message's completion was seen, so its buffer is back.
    assert_eq!((server.receives.posted(), server.side.pool.available()), (7, CHUNKS - 7));
    // The other channel goes on.
    send(&mut peers[1], &clients, 2);
    let (message, _) = server.next_message(&second.0).unwrap();
    assert_eq!(number(&message), 2);
    drop((message, second.0));
    let Server { side, receives, reactor } = server;
    drop((receives, reactor));
    // The device still has them.
    assert_eq!(side.pool.available(), CHUNKS - 6);
}

#[test]
fn a_shared_queue_that_cannot_be_destroyed_leaks_its_buffers() {
    let Server { side, receives, reactor } = Server::new(8);
    side.device.fail(Verb::DestroySrq, libc::EIO, When::Before, 1);
    drop((receives, reactor));
    assert_eq!(side.pool.available(), CHUNKS - 8);

    let mut event_loop = Loop::<PooledBuffer>::new(&side.context, 64).unwrap();
    let receives = event_loop.add_shared_receives(&side.domain, 8).unwrap();
    for _ in 0..8 {
        event_loop.post(receives, ReceiveWorkRequest::new(side.buffer(0)), 0).unwrap();
    }
    side.device.fail(Verb::DestroySrq, libc::EIO, When::Before, 1);
    assert_eq!(event_loop.remove(receives).unwrap_err().raw_os_error(), Some(libc::EIO));
    assert!(event_loop.next_ended().unwrap().is_none());
    drop(event_loop);
    assert_eq!(side.pool.available(), CHUNKS - 16);
}

#[test]
fn a_receive_that_is_refused_comes_back() {
    let Server { side, receives, reactor } = Server::new(0);
    side.device.fail(Verb::PostSrqRecv, libc::ENOMEM, When::Before, 1);
    let refused = receives.post(side.buffer(3)).unwrap_err();
    assert!(matches!(refused.error, TransportError::Verbs(_)));
    assert_eq!(number(&refused.buffer.unwrap()), 3);
    assert_eq!((receives.posted(), side.pool.available()), (0, CHUNKS));
    // The slot is free again.
    for _ in 0..CAPACITY {
        receives.post(side.buffer(0)).unwrap();
    }
    drop((receives, reactor));
    assert_eq!(side.pool.available(), CHUNKS);
}

#[test]
fn a_device_that_is_removed_gives_nothing_back_that_it_may_still_use() {
    let server = Server::new(8);
    let clients = Side::new();
    let (ours, mut peer) = server.connect(&clients);
    send(&mut peer, &clients, 1);
    server.side.device.remove();
    let refused = server.receives.post(server.side.buffer(9));
    let came_back = match refused {
        Ok(()) => 0,
        Err(error) => usize::from(error.buffer.is_some()),
    };
    let Server { side, receives, reactor } = server;
    drop(ours);
    drop((receives, reactor));
    // The eight that were posted, unless their completions were seen; and the ninth, if it was not refused.
    let kept = CHUNKS - side.pool.available();
    assert!(kept + came_back <= 9, "{kept} {came_back}");
    let mut all = Vec::new();
    while let Some(mut buffer) = side.pool.take() {
        buffer.extend_from_slice(&[1; LEN]).unwrap();
        all.push(buffer);
    }
}
