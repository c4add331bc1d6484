//! Channels that one shared receive queue feeds.

mod asynchronous;
mod ending;
#[path = "../support/patience.rs"]
mod patience;
mod sides;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::{
    AsyncEventKind, AsyncEventSubject, AsyncEvents, Channel, Inline, ReceiveWorkRequest,
    SendWorkRequest, SharedMemoryRange, SharedReceives, TransportError,
};

use patience::{PATIENCE, deadline};
use sides::{CHUNKS, LEN, Server, Side, connect, number};

/// What the server has for the channel with this token.
fn take_all(server: &mut Server, token: u64) -> Vec<u64> {
    let mut numbers = Vec::new();
    while let Some(message) = server.receives.poll(&mut server.channels[token as usize]).unwrap() {
        let (buffer, success) = message;
        assert_eq!(success.byte_len() as usize, LEN);
        numbers.push(number(&buffer));
        server.receives.post(buffer).unwrap();
    }
    numbers
}

#[test]
fn few_receives_serve_many_peers_in_the_order_of_each() {
    const PEERS: usize = 40;
    const MESSAGES: u64 = 25;
    let mut server = Server::new(PEERS, 8);
    let clients = Side::new();
    let mut peers: Vec<_> = (0..PEERS).map(|index| connect(&mut server, index, &clients)).collect();
    let mut seen = vec![Vec::new(); PEERS];
    thread::scope(|threads| {
        for (half, peers) in peers.chunks_mut(PEERS / 2).enumerate() {
            let clients = &clients;
            threads.spawn(move || {
                for n in 0..MESSAGES {
                    for (index, peer) in peers.iter_mut().enumerate() {
                        let token = (half * PEERS / 2 + index) as u64;
                        let work = peer
                            .post_owned(SendWorkRequest::new(clients.buffer(token * 1000 + n)))
                            .unwrap();
                        { work }.wait_until(peer, deadline()).unwrap().unwrap();
                    }
                }
            });
        }
        while seen.iter().map(Vec::len).sum::<usize>() < PEERS * MESSAGES as usize {
            for (token, seen) in seen.iter_mut().enumerate() {
                seen.extend(take_all(&mut server, token as u64));
            }
        }
    });
    for (token, seen) in seen.iter().enumerate() {
        let expected: Vec<_> = (0..MESSAGES).map(|n| token as u64 * 1000 + n).collect();
        assert_eq!(seen, &expected);
    }
    assert_eq!(server.receives.posted(), 8);
    assert_eq!(server.side.pool.available(), CHUNKS - 8);
}

#[test]
fn a_message_that_another_wait_of_the_channel_has_polled_is_there() {
    let mut server = Server::new(1, 8);
    let clients = Side::new();
    let mut peer = connect(&mut server, 0, &clients);
    let mut receive = peer.post_owned(ReceiveWorkRequest::new(clients.buffer(0))).unwrap();
    let mut send = peer.post_owned(SendWorkRequest::new(clients.buffer(5))).unwrap();
    send.wait_until(&mut peer, deadline()).unwrap().unwrap();
    // It polls the message beside its own completion.
    server.channels[0].until(deadline()).send(()).unwrap();
    assert_eq!(take_all(&mut server, 0), [5]);
    receive.wait_until(&mut peer, deadline()).unwrap().unwrap();
}

#[test]
fn threads_that_share_receives_keep_the_order_of_each_peer() {
    const MESSAGES: u64 = 400;
    let mut server = Server::new(4, 16);
    let clients = Side::new();
    let mut peers: Vec<_> = (0..4).map(|index| connect(&mut server, index, &clients)).collect();
    let served = AtomicUsize::new(0);
    thread::scope(|threads| {
        for channel in &mut server.channels {
            let (receives, served) = (&server.receives, &served);
            threads.spawn(move || {
                for n in 0..MESSAGES {
                    let message = receives.wait_until(channel, deadline()).unwrap().unwrap().0;
                    assert_eq!(number(&message), n);
                    receives.post(message).unwrap();
                    served.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        for peer in &mut peers {
            let clients = &clients;
            threads.spawn(move || {
                let mut works = std::collections::VecDeque::new();
                for n in 0..MESSAGES {
                    if works.len() == 8 {
                        let mut work: ibverbs::OwnedWork<_> = works.pop_front().unwrap();
                        work.wait_until(peer, deadline()).unwrap().unwrap();
                    }
                    works.push_back(
                        peer.post_owned(SendWorkRequest::new(clients.buffer(n))).unwrap(),
                    );
                }
                for mut work in works {
                    work.wait_until(peer, deadline()).unwrap().unwrap();
                }
            });
        }
    });
    assert_eq!(served.into_inner(), 4 * MESSAGES as usize);
}

#[test]
fn a_channel_may_have_a_completion_queue_of_its_own() {
    let (ours, theirs) = (Side::new(), Side::new());
    let receives = SharedReceives::new(&ours.domain, 4).unwrap();
    let mut channels = Vec::new();
    for _ in 0..3 {
        let one = ours.builder().shared_receive_queue(&receives).build().unwrap();
        let other = theirs.builder().build().unwrap();
        let endpoints = (one.endpoint(), other.endpoint());
        channels.push((one.handshake(endpoints.1).unwrap(), other.handshake(endpoints.0).unwrap()));
    }
    for round in 0..20 {
        for (index, (ours_channel, their_channel)) in channels.iter_mut().enumerate() {
            receives.post(ours.buffer(0)).unwrap();
            let numbered = theirs.buffer(round * 10 + index as u64);
            let mut send = their_channel.post_owned(SendWorkRequest::new(numbered)).unwrap();
            let message = receives.wait_until(ours_channel, deadline()).unwrap().unwrap().0;
            assert_eq!(number(&message), round * 10 + index as u64);
            // The channel still sends, blocking and otherwise, with a receive of its own on the other side.
            send.wait_until(their_channel, deadline()).unwrap().unwrap();
            let mut receive =
                their_channel.post_owned(ReceiveWorkRequest::new(theirs.buffer(0))).unwrap();
            let mut work = ours_channel.post_owned(SendWorkRequest::new(message)).unwrap();
            work.wait_until(ours_channel, deadline()).unwrap().unwrap();
            receive.wait_until(their_channel, deadline()).unwrap().unwrap();
        }
    }
    assert_eq!(receives.posted(), 0);
}

#[test]
fn a_message_comes_while_a_blocking_send_waits() {
    let mut server = Server::new(1, 4);
    let clients = Side::new();
    let mut peer = connect(&mut server, 0, &clients);
    let mut works: Vec<_> =
        (0..3).map(|n| peer.post_owned(SendWorkRequest::new(clients.buffer(n))).unwrap()).collect();
    for work in &mut works {
        work.wait_until(&mut peer, deadline()).unwrap().unwrap();
    }
    let mut receive = peer.post_owned(ReceiveWorkRequest::new(clients.buffer(0))).unwrap();
    // The send polls the three messages while it looks for its own completion.
    server.channels[0].until(deadline()).send(Inline(&7_u64.to_le_bytes())).unwrap();
    let ended = receive.wait_until(&mut peer, deadline()).unwrap().unwrap();
    assert_eq!(number(&ended.0), 7);
    assert_eq!(take_all(&mut server, 0), [0, 1, 2]);
}

#[test]
fn the_limit_event_can_be_waited_for() {
    let mut server = Server::new(2, 6);
    let clients = Side::new();
    let mut peers = [0, 1].map(|index| connect(&mut server, index, &clients));
    let events = AsyncEvents::new(&server.side.context).unwrap();
    server.receives.set_token(77);
    assert_eq!(server.receives.token(), 77);
    for _ in 0..2 {
        server.receives.set_limit(4).unwrap();
        assert_eq!(events.next_event().unwrap(), None);
        thread::scope(|threads| {
            threads.spawn(|| {
                thread::sleep(Duration::from_millis(20));
                for n in 0..3 {
                    let peer = &mut peers[n % 2];
                    let mut work =
                        peer.post_owned(SendWorkRequest::new(clients.buffer(n as u64))).unwrap();
                    work.wait_until(peer, deadline()).unwrap().unwrap();
                }
            });
            let event = events.wait_until(deadline()).unwrap();
            assert_eq!(event.kind(), AsyncEventKind::SharedReceiveQueueLimit);
            assert_eq!(event.subject(), AsyncEventSubject::SharedReceiveQueue(77));
        });
        // Raised once: the event must be armed again.
        assert_eq!(events.next_event().unwrap(), None);
        let taken = take_all(&mut server, 0).len() + take_all(&mut server, 1).len();
        assert_eq!((taken, server.receives.posted()), (3, 6));
    }
    let most = server.receives.capacity();
    assert_eq!(server.receives.set_limit(most + 1).unwrap_err().raw_os_error(), Some(libc::EINVAL));
}

#[test]
fn what_is_wrong_gets_a_typed_error() {
    let mut server = Server::new(1, 0);
    let clients = Side::new();
    let peer = connect(&mut server, 0, &clients);
    let Server { side, receives, channels } = &mut server;
    let channel = &mut channels[0];

    // The channel posts no receives of its own, whichever way.
    let of_its_own = |error: TransportError| {
        assert_eq!(error, TransportError::ReceivesAreShared);
        assert!(error.to_string().contains("shared receive queue"), "{error}");
    };
    of_its_own(channel.post_owned(ReceiveWorkRequest::new(side.buffer(0))).unwrap_err().error);
    let mut region = side.domain.allocate::<u8>(LEN).unwrap();
    of_its_own(channel.receive(region.slice_mut(..).unwrap()).unwrap_err());
    let in_scope = channel.scope(|scope| {
        scope.post_receive(region.slice_mut(..).unwrap()).map(drop)?;
        Ok::<_, TransportError>(())
    });
    of_its_own(in_scope.unwrap_err().into());
    let mut prepared = side.builder().shared_receive_queue(receives).build().unwrap();
    of_its_own(prepared.post_owned(ReceiveWorkRequest::new(side.buffer(0))).unwrap_err().error);
    drop(prepared);

    // The queue is full, and the buffer comes back.
    for _ in 0..receives.capacity() {
        receives.post(side.buffer(0)).unwrap();
    }
    let full = receives.post(side.buffer(99)).unwrap_err();
    assert!(full.error.is_queue_full());
    assert_eq!(number(&full.buffer.unwrap()), 99);

    // Another queue's channel, and a channel without.
    let others = SharedReceives::<ibverbs::PooledBuffer>::new(&side.domain, 4).unwrap();
    assert_eq!(others.poll(channel).unwrap_err().error, TransportError::UnknownWork);
    let (mut without, _other) = clients.pair(&Side::new());
    assert_eq!(receives.poll(&mut without).unwrap_err().error, TransportError::UnknownWork);

    // Those of another context.
    let error = clients.builder().shared_receive_queue(receives).build().unwrap_err();
    assert!(error.to_string().contains("another context"), "{error}");

    let error = receives.clone().close().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EBUSY));
    for capacity in [0, u32::MAX] {
        let refused = SharedReceives::<SharedMemoryRange<u8>>::new(&side.domain, capacity);
        assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
    drop(peer);
}

#[test]
fn a_message_that_is_too_long_fails_its_own_peer_alone() {
    let mut server = Server::new(2, 0);
    let clients = Side::new();
    let mut peers = [0, 1].map(|index| connect(&mut server, index, &clients));
    for _ in 0..4 {
        let mut short = server.side.buffer(0);
        short.set_len(8).unwrap();
        server.receives.post(short).unwrap();
    }
    let send = |peer: &mut Channel<'_>, len| {
        let mut buffer = clients.buffer(5);
        buffer.set_len(len).unwrap();
        let mut work = peer.post_owned(SendWorkRequest::new(buffer)).unwrap();
        work.wait_until(peer, deadline()).map(Option::unwrap)
    };
    assert!(send(&mut peers[0], 9).is_err());
    let failed = server.receives.wait_until(&mut server.channels[0], deadline()).unwrap_err();
    assert!(matches!(failed.error, TransportError::Work(_)) && failed.buffer.is_some());
    drop(failed);
    for _ in 0..3 {
        send(&mut peers[1], 8).unwrap();
        let message = server.receives.wait_until(&mut server.channels[1], deadline()).unwrap();
        message.unwrap();
    }
    assert_eq!(server.receives.posted(), 0);
    assert_eq!(server.side.pool.available(), CHUNKS);
    // No completion tells a wait that the connection has failed.
    let start = Instant::now();
    let error = server.receives.wait(&mut server.channels[0]).unwrap_err().error;
    let TransportError::Verbs(error) = error else { panic!("{error}") };
    assert_eq!(error.raw_os_error(), Some(libc::ENOTCONN));
    assert!(start.elapsed() < PATIENCE);
}
