//! Channels that one shared receive queue feeds: of a loop, of a reactor that the test calls, and of one on tokio.

mod asynchronous;
mod ending;
#[path = "../support/patience.rs"]
mod patience;
mod sides;

use std::thread;
use std::time::{Duration, Instant};

use ibverbs::device::{AsyncEventKind, AsyncEventSubject, AsyncEvents};
use ibverbs::{
    AccessFlags, BufferPool, Loop, PooledBuffer, Reactor, ReceiveWorkRequest, TransportError,
};

use patience::deadline;
use sides::{CAPACITY, CHUNKS, LEN, Server, Side, number, send, settings};

#[test]
fn few_receives_serve_many_peers_in_the_order_of_each() {
    const PEERS: usize = 40;
    const MESSAGES: u64 = 25;
    let (server, clients) = (Side::new(), Side::new());
    let mut event_loop = Loop::<PooledBuffer>::new(&server.context, 1024).unwrap();
    let receives = event_loop.add_shared_receives(&server.domain, CAPACITY).unwrap();
    let mut channels = Vec::new();
    let mut peers: Vec<_> = (0..PEERS)
        .map(|_| {
            let ours = event_loop.create_sharing_channel(&server.domain, receives).unwrap();
            let (ours, theirs) =
                (settings(ours).build().unwrap(), clients.builder().build().unwrap());
            let endpoints = (ours.endpoint(), theirs.endpoint());
            channels.push(event_loop.add(ours.handshake(endpoints.1).unwrap()).unwrap());
            theirs.handshake(endpoints.0).unwrap()
        })
        .collect();
    for _ in 0..8 {
        event_loop.post(receives, ReceiveWorkRequest::new(server.buffer(0)), 0).unwrap();
    }
    let mut seen = vec![Vec::new(); PEERS];
    thread::scope(|threads| {
        for (half, peers) in peers.chunks_mut(PEERS / 2).enumerate() {
            let clients = &clients;
            threads.spawn(move || {
                for n in 0..MESSAGES {
                    for (index, peer) in peers.iter_mut().enumerate() {
                        let peer_number = (half * PEERS / 2 + index) as u64;
                        send(peer, clients, peer_number * 1000 + n);
                    }
                }
            });
        }
        let end = deadline();
        while seen.iter().map(Vec::len).sum::<usize>() < PEERS * MESSAGES as usize {
            assert!(Instant::now() < end);
            let Some(ended) = event_loop.next_ended().unwrap() else { continue };
            assert_eq!(ended.result().unwrap().byte_len() as usize, LEN);
            let at = channels.iter().position(|&channel| channel == ended.channel).unwrap();
            seen[at].push(number(&ended.buffer));
            event_loop.post(receives, ReceiveWorkRequest::new(ended.buffer), 0).unwrap();
        }
    });
    for (at, seen) in seen.iter().enumerate() {
        let expected: Vec<_> = (0..MESSAGES).map(|n| at as u64 * 1000 + n).collect();
        assert_eq!(seen, &expected);
    }
    assert_eq!((event_loop.in_flight(receives), server.pool.available()), (8, CHUNKS - 8));
}

#[test]
fn the_limit_event_can_be_waited_for() {
    let server = Server::new(6);
    let clients = Side::new();
    let (channels, mut peers): (Vec<_>, Vec<_>) = (0..2).map(|_| server.connect(&clients)).unzip();
    let events = AsyncEvents::new(&server.side.context).unwrap();
    let queue = server.receives.queue();
    queue.set_token(77);
    assert_eq!(queue.token(), 77);
    for _ in 0..2 {
        queue.set_limit(4).unwrap();
        assert_eq!(events.next_event().unwrap(), None);
        thread::scope(|threads| {
            threads.spawn(|| {
                thread::sleep(Duration::from_millis(20));
                for n in 0..3 {
                    send(&mut peers[n % 2], &clients, n as u64);
                }
            });
            let event = events.wait_until(deadline()).unwrap();
            assert_eq!(event.kind(), AsyncEventKind::SharedReceiveQueueLimit);
            assert_eq!(event.subject(), AsyncEventSubject::SharedReceiveQueue(77));
        });
        // Raised once: the event must be armed again.
        assert_eq!(events.next_event().unwrap(), None);
        assert_eq!([0, 1, 0].map(|at| server.hears(&channels[at])), [0, 1, 2]);
        assert_eq!(server.receives.posted(), 6);
    }
    let refused = queue.set_limit(queue.max_wr() + 1).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::EINVAL));
}

#[test]
fn what_is_wrong_gets_a_typed_error() {
    let server = Server::new(0);
    let clients = Side::new();
    let (ours, _peer) = server.connect(&clients);
    let Server { side, receives, reactor } = &server;

    // The channel posts no receives of its own, connected or not.
    let of_its_own = |error: TransportError| {
        assert_eq!(error, TransportError::ReceivesAreShared);
        assert!(error.to_string().contains("shared ones"), "{error}");
    };
    let refused = ours.post_receive(side.buffer(7)).unwrap_err();
    of_its_own(refused.error);
    assert_eq!(number(&refused.buffer.unwrap()), 7);
    let refused = server.wait(ours.receive(side.buffer(8))).unwrap_err();
    of_its_own(refused.error);
    assert_eq!(number(&refused.buffer.unwrap()), 8);
    of_its_own(server.prepare().post_receive(side.buffer(0)).unwrap_err().error);

    // The queue is full, and the buffer comes back.
    for _ in 0..CAPACITY {
        receives.post(side.buffer(0)).unwrap();
    }
    let full = receives.post(side.buffer(99)).unwrap_err();
    assert!(full.error.is_queue_full());
    assert_eq!(number(&full.buffer.unwrap()), 99);

    // Another reactor refuses these shared receives.
    let others = Reactor::new(&side.context, 64).unwrap();
    let error = others.prepare_sharing(side.builder(), receives).unwrap_err();
    assert!(error.to_string().contains("another reactor"), "{error}");

    // A domain of another context.
    let error = reactor.prepare_sharing(clients.builder(), receives).unwrap_err();
    assert!(error.to_string().contains("of two contexts"), "{error}");

    for capacity in [0, u32::MAX] {
        let refused = reactor.add_shared_receives(&side.domain, capacity);
        assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
}

#[test]
fn a_message_that_is_too_long_fails_its_own_peer_alone() {
    let server = Server::new(0);
    let clients = Side::new();
    let (ours, mut peers): (Vec<_>, Vec<_>) = (0..2).map(|_| server.connect(&clients)).unzip();
    for _ in 0..4 {
        server.receives.post(server.side.pool.take().unwrap()).unwrap();
    }
    let long = BufferPool::new(&clients.domain, LEN + 1, 1, AccessFlags::empty()).unwrap();
    let mut send = |at: usize, len| {
        let buffer = long.take_from(&vec![5; len]).unwrap().unwrap();
        let peer = &mut peers[at];
        peer.until(deadline()).send(&buffer)
    };
    assert!(send(0, LEN + 1).is_err());
    let failed = server.next_message(&ours[0]).unwrap_err();
    assert!(matches!(failed.error, TransportError::Work(_)) && failed.buffer.is_some());
    drop(failed);
    for _ in 0..3 {
        send(1, 8).unwrap();
        assert_eq!(server.next_message(&ours[1]).unwrap().0[..], [5; 8]);
    }
    assert_eq!(server.receives.posted(), 0);
    assert_eq!(server.side.pool.available(), CHUNKS);
}
