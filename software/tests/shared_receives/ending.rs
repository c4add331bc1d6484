//! Channels and queues that end with receives posted and messages not taken: every buffer comes back, or is
//! leaked if the device may still use it.

use ibverbs::{Channel, Inline, SendWorkRequest, TransportError};
use ibverbs_software::{Verb, When};

use super::patience::deadline;
use super::sides::{CAPACITY, CHUNKS, LEN, Server, Side, connect, number};

fn send(peer: &mut Channel<'_>, clients: &Side, number: u64) {
    let mut work = peer.post_owned(SendWorkRequest::new(clients.buffer(number))).unwrap();
    work.wait_until(peer, deadline()).unwrap().unwrap();
}

#[test]
fn messages_that_nobody_takes_go_with_their_channel() {
    for polled in [false, true] {
        let mut server = Server::new(2, 8);
        let clients = Side::new();
        let mut peers = [0, 1].map(|index| connect(&mut server, index, &clients));
        for n in 0..6 {
            send(&mut peers[n % 2], &clients, n as u64);
        }
        if polled {
            // All completions leave the completion queue, for the channels' lists.
            server.channels.iter_mut().for_each(|channel| channel.poll().unwrap());
            assert_eq!(server.receives.posted(), 2);
        }
        let last = server.channels.pop().unwrap();
        drop(last);
        // Each channel polls its own messages.
        assert_eq!(server.receives.posted(), if polled { 2 } else { 5 });
        assert_eq!(server.side.pool.available(), CHUNKS - 2 - 3);
        let mut taken = Vec::new();
        while let Some((buffer, _)) = server.receives.poll(&mut server.channels[0]).unwrap() {
            taken.push(number(&buffer));
        }
        assert_eq!(taken, [0, 2, 4]);
        server.channels.clear();
        let Server { side, receives, .. } = server;
        receives.close().unwrap();
        assert_eq!(side.pool.available(), CHUNKS);
    }
}

#[test]
fn a_new_connection_gets_no_message_of_the_old_one() {
    for polled in [false, true] {
        let mut server = Server::new(1, 8);
        let clients = Side::new();
        let mut peer = connect(&mut server, 0, &clients);
        for round in 0..5 {
            for n in 0..3 {
                send(&mut peer, &clients, round * 10 + n);
            }
            if polled {
                server.channels[0].poll().unwrap();
            }
            let ours = server.channels.pop().unwrap().reset().unwrap();
            let theirs = peer.reset().unwrap();
            let endpoints = (ours.endpoint(), theirs.endpoint());
            server.channels.push(ours.handshake(endpoints.1).unwrap());
            peer = theirs.handshake(endpoints.0).unwrap();
            assert_eq!(server.receives.posted(), 5);
            assert_eq!(server.side.pool.available(), CHUNKS - 5);
            send(&mut peer, &clients, round * 10 + 9);
            let message = server.receives.wait_until(&mut server.channels[0], deadline());
            assert_eq!(number(&message.unwrap().unwrap().0), round * 10 + 9);
            while server.receives.posted() < 8 {
                server.receives.post(server.side.buffer(0)).unwrap();
            }
        }
    }
}

#[test]
fn a_channel_that_was_stopped_says_so_and_keeps_what_has_arrived() {
    let mut server = Server::new(1, 8);
    let clients = Side::new();
    let mut peer = connect(&mut server, 0, &clients);
    send(&mut peer, &clients, 1);
    send(&mut peer, &clients, 2);
    // The peer has posted no receive: the send does not end.
    let soon = std::time::Instant::now() + std::time::Duration::from_millis(20);
    let channel = &mut server.channels[0];
    let timed_out = channel.until(soon).send(Inline(&[0; 8])).unwrap_err();
    assert_eq!(timed_out, TransportError::TimedOut);
    for n in [1, 2] {
        assert_eq!(number(&server.receives.wait(channel).unwrap().0), n);
    }
    assert_eq!(server.receives.wait(channel).unwrap_err().error, TransportError::Stopped);
    assert_eq!(server.receives.posted(), 6);
}

#[test]
fn peers_that_come_and_go_cost_no_receive() {
    let mut server = Server::new(20, 0);
    let clients = Side::new();
    for _ in 0..4 {
        server.receives.post(server.side.buffer(0)).unwrap();
    }
    for index in 0..20 {
        let mut peer = connect(&mut server, index, &clients);
        for n in 0..3 {
            let _in_flight = peer.post_owned(SendWorkRequest::new(clients.buffer(n))).unwrap();
        }
        drop(peer);
        drop(server.channels.pop());
        server.channels.clear();
        // Place holders, so that tokens stay indices.
        for _ in 0..=index {
            let prepared = server.builder().build().unwrap();
            let other = clients.builder().build().unwrap();
            let endpoint = other.endpoint();
            server.channels.push(prepared.handshake(endpoint).unwrap());
        }
        while server.receives.posted() < 4 {
            server.receives.post(server.side.buffer(0)).unwrap();
        }
    }
    server.channels.clear();
    let Server { side, receives, .. } = server;
    receives.close().unwrap();
    assert_eq!(side.pool.available(), CHUNKS);
}

#[test]
fn a_queue_pair_that_cannot_be_destroyed_keeps_the_receives_and_their_buffers() {
    let mut server = Server::new(2, 8);
    let clients = Side::new();
    let mut peers = [0, 1].map(|index| connect(&mut server, index, &clients));
    send(&mut peers[0], &clients, 1);
    server.side.device.fail(Verb::DestroyQp, libc::EIO, When::Before, 1);
    drop(server.channels.remove(0));
    // The message's completion was seen, so its buffer is back.
    assert_eq!((server.receives.posted(), server.side.pool.available()), (7, CHUNKS - 7));
    // The other channel goes on.
    send(&mut peers[1], &clients, 2);
    let message = server.receives.wait_until(&mut server.channels[0], deadline()).unwrap();
    assert_eq!(number(&message.unwrap().0), 2);
    server.channels.clear();
    let Server { side, receives, .. } = server;
    assert_eq!(receives.close().unwrap_err().raw_os_error(), Some(libc::EBUSY));
    // The device still has them.
    assert_eq!(side.pool.available(), CHUNKS - 6);
}

#[test]
fn a_shared_queue_that_cannot_be_destroyed_leaks_its_buffers() {
    for close in [false, true] {
        let Server { side, receives, .. } = Server::new(0, 8);
        side.device.fail(Verb::DestroySrq, libc::EIO, When::Before, 1);
        if close {
            assert_eq!(receives.close().unwrap_err().raw_os_error(), Some(libc::EIO));
        } else {
            drop(receives);
        }
        assert_eq!(side.pool.available(), CHUNKS - 8);
    }
}

#[test]
fn a_receive_that_is_refused_comes_back() {
    let Server { side, receives, .. } = Server::new(0, 0);
    side.device.fail(Verb::PostSrqRecv, libc::ENOMEM, When::Before, 1);
    let refused = receives.post(side.buffer(3)).unwrap_err();
    assert_eq!(number(&refused.buffer.unwrap()), 3);
    assert_eq!((receives.posted(), side.pool.available()), (0, CHUNKS));
    // The slot is free again.
    for _ in 0..CAPACITY {
        receives.post(side.buffer(0)).unwrap();
    }
}

#[test]
fn a_device_that_is_removed_gives_nothing_back_that_it_may_still_use() {
    let mut server = Server::new(1, 8);
    let clients = Side::new();
    let mut peer = connect(&mut server, 0, &clients);
    send(&mut peer, &clients, 1);
    server.side.device.remove();
    let refused = server.receives.post(server.side.buffer(9));
    let came_back = match refused {
        Ok(()) => 0,
        Err(error) => usize::from(error.buffer.is_some()),
    };
    let Server { side, receives, channels } = server;
    drop(channels);
    drop(receives);
    // The eight that were posted, unless their completions were seen; and the ninth, if it was not refused.
    let kept = CHUNKS - side.pool.available();
    assert!(kept + came_back <= 9, "{kept} {came_back}");
    let mut all = Vec::new();
    while let Some(mut buffer) = side.pool.take() {
        buffer.fill(1);
        assert_eq!(buffer.len(), LEN);
        all.push(buffer);
    }
}
