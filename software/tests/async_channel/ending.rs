//! The ends of channels, reactors and runtimes, with operations in flight.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use ibverbs::TransportError;
use tokio::net::{TcpListener, TcpStream};

use crate::sides::{CHUNKS, connect, current_thread, multi_thread, number, on_both, sides};

/// Polls once, with a waker that wakes no task.
fn poll<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
    match Pin::new(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

#[test]
fn dropping_a_channel_destroys_its_queue_pair_at_once() {
    let [one, other] = sides();
    let unused = one.room();
    let [ours, _theirs] = connect(&one, &other);
    assert!(one.room() < unused);
    let mut receive = ours.receive(one.buffer(1));
    let mut send = ours.send(one.buffer(2)); // nobody receives it
    assert!(poll(&mut receive).is_none() && poll(&mut send).is_none());
    drop((receive, send));
    assert_eq!(one.pool.available(), CHUNKS - 2);
    drop(ours);
    assert_eq!((one.room(), one.pool.available()), (unused, CHUNKS));
    // The queue pair is destroyed also when nothing drives the reactor any more.
    let [ours, _theirs] = connect(&one, &other);
    let mut receive = ours.receive(one.buffer(2));
    assert!(poll(&mut receive).is_none());
    drop(one.reactor);
    drop(receive);
    drop(ours);
    assert_eq!(one.pool.available(), CHUNKS);
}

#[test]
fn shutting_down_waits_for_sends_and_keeps_what_has_arrived() {
    on_both(|[one, other]| async move {
        let [ours, theirs] = connect(&one, &other).map(Arc::new);
        for _ in 0..3 {
            theirs.post_receive(other.buffer(0)).unwrap();
        }
        let mut sends: Vec<_> = (0..4).map(|n| ours.send(one.buffer(n))).collect();
        assert!(sends.iter_mut().all(|send| poll(send).is_none()));
        // Two tasks wait for the end.
        let also = ours.clone();
        let second = tokio::spawn(async move { also.shutdown().await });
        tokio::task::yield_now().await;
        let mut shutdown = pin!(ours.shutdown());
        tokio::time::timeout(Duration::from_millis(30), &mut shutdown).await.unwrap_err();
        let refused = ours.send(one.buffer(9)).await.unwrap_err();
        assert_eq!(refused.error, TransportError::Stopped);
        // The fourth has had no receive so far.
        let (buffer, _) = theirs.receive(other.buffer(0)).await.unwrap();
        assert_eq!(number(&buffer), 0);
        drop(buffer);
        shutdown.await;
        tokio::time::timeout(Duration::from_secs(60), second).await.unwrap().unwrap();
        for send in sends {
            send.await.unwrap();
        }
        theirs.shutdown().await;
        // Three messages have arrived that nobody had taken.
        for n in 1..4 {
            let (buffer, _) = theirs.receive(other.buffer(0)).await.unwrap();
            assert_eq!(number(&buffer), n);
        }
        let error = theirs.receive(other.buffer(0)).await.unwrap_err();
        assert_eq!(error.error, TransportError::Stopped);
        drop(error);
        assert_eq!(other.pool.available(), CHUNKS);
    });
}

#[test]
fn a_runtime_that_is_shut_down_in_mid_flight_leaves_everything_usable() {
    for make in [current_thread, multi_thread] {
        let [one, other] = sides().map(Arc::new);
        let runtime = make();
        let [ours, theirs] = connect(&one, &other).map(Arc::new);
        let _tasks = [one.run(&runtime), other.run(&runtime)];
        for task in 0..6 {
            let (ours, theirs) = (ours.clone(), theirs.clone());
            let (one, other) = (one.clone(), other.clone());
            runtime.spawn(async move {
                loop {
                    if task % 2 == 0 {
                        ours.send(one.buffer(1)).await.unwrap();
                    } else {
                        theirs.receive(other.buffer(0)).await.unwrap();
                    }
                }
            });
        }
        runtime.block_on(async { tokio::time::sleep(Duration::from_millis(50)).await });
        drop(runtime);
        // The channels run on another runtime. What was in flight before is delivered first.
        let runtime = make();
        let _tasks = [one.run(&runtime), other.run(&runtime)];
        runtime.block_on(async {
            let (ours, one) = (ours.clone(), one.clone());
            let send = tokio::spawn(async move { ours.send(one.buffer(777)).await.map(drop) });
            loop {
                let (buffer, _) = theirs.receive(other.buffer(0)).await.unwrap();
                match number(&buffer) {
                    1 => {}
                    777 => break,
                    n => panic!("{n}"),
                }
            }
            send.await.unwrap().unwrap();
        });
        drop(runtime);
        drop((ours, theirs));
        one.all_buffers_are_back();
        other.all_buffers_are_back();
    }
}

#[test]
fn a_reactor_that_is_dropped_ends_all_futures() {
    let [one, other] = sides();
    let [ours, theirs] = connect(&one, &other);
    let mut receive = ours.receive(one.buffer(1));
    assert!(poll(&mut receive).is_none());
    let crate::sides::Side { reactor, pool, domain } = one;
    drop(reactor);
    let error = poll(&mut receive).unwrap().unwrap_err();
    assert_eq!((error.error, error.buffer.is_some()), (TransportError::ReactorGone, true));
    drop(error);
    let late = poll(&mut ours.send(pool.take().unwrap())).unwrap().unwrap_err();
    assert_eq!((late.error, late.buffer.is_some()), (TransportError::ReactorGone, true));
    drop((late, receive));
    drop((ours, theirs, domain));
    assert_eq!(pool.available(), CHUNKS);
}

#[test]
fn a_reactor_that_is_stopped_ends_futures_with_their_buffers_and_tells_why() {
    let [one, other] = sides();
    let runtime = current_thread();
    let task = one.run(&runtime);
    let [ours, _theirs] = connect(&one, &other);
    runtime.block_on(async {
        let mut receive = ours.receive(one.buffer(1));
        let mut send = ours.send(one.buffer(2)); // nobody receives it
        assert!(poll(&mut receive).is_none() && poll(&mut send).is_none());
        let unposted = ours.send(one.buffer(3));
        tokio::task::yield_now().await;
        one.reactor.stop(TransportError::TimedOut);
        let error = receive.await.unwrap_err();
        assert_eq!((error.error, error.buffer.is_some()), (TransportError::TimedOut, true));
        for (send, n) in [(send, 2), (unposted, 3)] {
            let error = send.await.unwrap_err();
            assert_eq!(error.error, TransportError::TimedOut);
            assert_eq!(number(&error.buffer.unwrap()), n);
        }
        task.await.unwrap().unwrap();
    });
}

#[test]
fn a_peer_that_goes_away_fails_the_send_with_its_buffer() {
    on_both(|[one, other]| async move {
        let impatient = one.builder().ack_timeout(ibverbs::settings::AckTimeout::new(8).unwrap());
        let impatient =
            impatient.max_ack_retries(ibverbs::settings::MaxAckRetries::new(1).unwrap());
        let ours = one.reactor.prepare(impatient).unwrap();
        let theirs = other.reactor.prepare(other.builder()).unwrap();
        let endpoints = (ours.endpoint(), theirs.endpoint());
        let theirs = theirs.handshake(endpoints.0).unwrap();
        let ours = ours.handshake(endpoints.1).unwrap();
        let receive = ours.receive(one.buffer(1));
        drop(theirs);
        let (sent, received) = tokio::join!(ours.send(one.buffer(2)), receive);
        let error = sent.unwrap_err();
        assert!(matches!(error.error, TransportError::Work(_)), "{error}");
        assert_eq!(number(&error.buffer.unwrap()), 2);
        assert!(received.unwrap_err().error.is_consequence());
    });
}

#[test]
fn two_sides_connect_over_tcp() {
    on_both(|[one, other]| async move {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let prepared = other.reactor.prepare(other.builder()).unwrap();
            let (channel, told) = prepared.accept(&mut stream, b"welcome").await.unwrap();
            assert_eq!(told, b"hello");
            let (buffer, _) = channel.receive(other.buffer(0)).await.unwrap();
            assert_eq!(number(&buffer), 42);
            // Another client says nothing: the program's own timer ends it.
            let (mut silent, _) = listener.accept().await.unwrap();
            let prepared = other.reactor.prepare(other.builder()).unwrap();
            let before = other.room();
            let accepting = prepared.accept(&mut silent, b"");
            tokio::time::timeout(Duration::from_millis(20), accepting).await.unwrap_err();
            assert!(other.room() > before);
            // A third client sends bytes that are no endpoint.
            let (mut wrong, _) = listener.accept().await.unwrap();
            let prepared = other.reactor.prepare(other.builder()).unwrap();
            let error = prepared.accept(&mut wrong, b"").await.unwrap_err();
            assert!(matches!(error.error, ibverbs::tcp::ExchangeError::Protocol(_)), "{error}");
            // The prepared channel comes back, for the next client.
            let (mut stream, _) = listener.accept().await.unwrap();
            let (channel, _) = error.object.accept(&mut stream, b"").await.unwrap();
            let (buffer, _) = channel.receive(other.buffer(0)).await.unwrap();
            assert_eq!(number(&buffer), 43);
        });
        let mut stream = TcpStream::connect(address).await.unwrap();
        let prepared = one.reactor.prepare(one.builder()).unwrap();
        let (channel, told) = prepared.connect(&mut stream, b"hello").await.unwrap();
        assert_eq!(told, b"welcome");
        channel.send(one.buffer(42)).await.unwrap();
        let _silent = TcpStream::connect(address).await.unwrap();
        let wrong = TcpStream::connect(address).await.unwrap();
        while wrong.try_write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").is_err() {
            wrong.writable().await.unwrap();
        }
        let mut stream = TcpStream::connect(address).await.unwrap();
        let prepared = one.reactor.prepare(one.builder()).unwrap();
        let (channel, _) = prepared.connect(&mut stream, b"").await.unwrap();
        channel.send(one.buffer(43)).await.unwrap();
        server.await.unwrap();
    });
}
