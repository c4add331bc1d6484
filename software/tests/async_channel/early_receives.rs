//! Receives that are posted before a channel is connected.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use ibverbs::future::PreparedAsyncChannel;
use ibverbs::tcp::{AsyncStream, ExchangeError};
use ibverbs::{AsyncChannel, TransportError, settings::MaxRnrRetries};
use ibverbs_software::{Device, Verb, When};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

use crate::sides::{CHUNKS, Side, current_thread, number, on_both};

/// A channel with this number of receives.
fn prepare(side: &Side, receives: u64) -> PreparedAsyncChannel {
    // A message that finds no receive fails.
    let builder = side.builder().max_rnr_retries(MaxRnrRetries::new(0).unwrap());
    let mut prepared = side.reactor.prepare(builder).unwrap();
    for _ in 0..receives {
        prepared.post_receive(side.buffer(0)).unwrap();
    }
    prepared
}

/// Sends messages, each of which must find a receive.
async fn send(side: &Side, channel: &AsyncChannel, numbers: std::ops::Range<u64>) {
    for n in numbers {
        channel.send(side.buffer(n)).await.unwrap();
    }
}

/// Receives them, in order.
async fn receive(side: &Side, channel: &AsyncChannel, numbers: std::ops::Range<u64>) {
    for n in numbers {
        let (buffer, _) = channel.receive(side.buffer(0)).await.unwrap();
        assert_eq!(number(&buffer), n);
    }
}

#[test]
fn they_take_the_first_messages_and_stay_as_many() {
    on_both(|[one, other]| async move {
        let (ours, theirs) = (prepare(&one, 0), prepare(&other, 8));
        let endpoints = (ours.endpoint(), theirs.endpoint());
        let theirs = theirs.handshake(endpoints.0).unwrap();
        let ours = ours.handshake(endpoints.1).unwrap();
        for round in 0..10 {
            let numbers = round * 8..(round + 1) * 8;
            send(&one, &ours, numbers.clone()).await;
            receive(&other, &theirs, numbers).await;
            assert_eq!(other.pool.available(), CHUNKS - 8);
        }
    });
}

#[test]
fn errors_give_the_buffer_back_and_a_drop_all_buffers() {
    let side = Side::spinning(&Device::new().unwrap(), 0);
    let mut prepared = prepare(&side, 8);
    let full = prepared.post_receive(side.buffer(9)).unwrap_err();
    assert_eq!(full.error, TransportError::QueueFull);
    assert_eq!(number(&full.buffer.unwrap()), 9);
    assert_eq!(side.pool.available(), CHUNKS - 8);
    drop(prepared);
    assert_eq!(side.pool.available(), CHUNKS);
}

/// A stream whose second write has gone out, and is not ready until it is told to go on.
struct Held {
    stream: TcpStream,
    writes: usize,
    go_on: oneshot::Receiver<()>,
    held: Option<oneshot::Sender<()>>,
}

impl AsyncStream for Held {
    fn poll_read(&mut self, cx: &mut Context<'_>, bytes: &mut [u8]) -> Poll<io::Result<usize>> {
        AsyncStream::poll_read(&mut self.stream, cx, bytes)
    }

    fn poll_write(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.writes < 2 {
            let written = std::task::ready!(AsyncStream::poll_write(&mut self.stream, cx, bytes))?;
            assert_eq!(written, bytes.len());
            self.writes += 1;
            if self.writes < 2 {
                return Poll::Ready(Ok(written));
            }
            self.held.take().map(|held| held.send(()));
        }
        std::task::ready!(Pin::new(&mut self.go_on).poll(cx)).unwrap();
        Poll::Ready(Ok(bytes.len()))
    }
}

/// The peer is ready, and sends, while this side has not yet been told so: it has a queue pair in RTS and no
/// `AsyncChannel`.
#[test]
fn a_message_that_comes_before_the_future_of_connecting_ends_is_kept() {
    on_both(|[one, other]| async move {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = other.clone();
        let accepting = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            prepare(&server, 0).accept(&mut stream, b"").await.unwrap().0
        });
        let (tell, go_on) = oneshot::channel();
        let (held, is_held) = oneshot::channel();
        let client = one.clone();
        let connecting = tokio::spawn(async move {
            let stream = TcpStream::connect(address).await.unwrap();
            let mut stream = Held { stream, writes: 0, go_on, held: Some(held) };
            prepare(&client, 4).connect(&mut stream, b"").await.unwrap().0
        });
        let theirs = accepting.await.unwrap();
        is_held.await.unwrap();
        send(&other, &theirs, 0..4).await;
        // Turn until the reactor has had the completions.
        while one.reactor.turn().unwrap() > 0 {}
        tell.send(()).unwrap();
        let ours = connecting.await.unwrap();
        receive(&one, &ours, 0..4).await;
        send(&other, &theirs, 4..8).await;
        receive(&one, &ours, 4..8).await;
    });
}

#[test]
fn a_handshake_that_fails_ends_them_and_others_can_be_posted() {
    let devices = [(); 2].map(|()| Device::new().unwrap());
    let [one, other] = [0, 1].map(|at| Side::spinning(&devices[at], 0));
    let runtime = current_thread();
    let _tasks = [one.run(&runtime), other.run(&runtime)];
    // The verb fails on the way from INIT to RTR, then to RTS.
    for calls_before in 0..2 {
        let (ours, theirs) = (prepare(&one, 0), prepare(&other, 4));
        let (to_ours, to_theirs) = (ours.endpoint(), theirs.endpoint());
        devices[1].let_pass(Verb::ModifyQp, calls_before);
        devices[1].fail(Verb::ModifyQp, libc::EIO, When::Before, 1);
        let failed = theirs.handshake(to_ours).unwrap_err();
        assert_eq!(failed.error.raw_os_error(), Some(libc::EIO));
        assert_eq!(other.pool.available(), CHUNKS, "the buffers were dropped");
        let mut theirs = failed.object;
        (0..5).for_each(|_| theirs.post_receive(other.buffer(0)).unwrap());
        let (ours, theirs) =
            (ours.handshake(to_theirs).unwrap(), theirs.handshake(to_ours).unwrap());
        runtime.block_on(async {
            send(&one, &ours, 0..5).await;
            receive(&other, &theirs, 0..5).await;
        });
        drop((ours, theirs));
        one.all_buffers_are_back();
        other.all_buffers_are_back();
    }
}

#[test]
fn attempts_to_connect_that_fail_leave_a_channel_that_connects() {
    let devices = [(); 2].map(|()| Device::new().unwrap());
    let [one, other] = [0, 1].map(|at| Arc::new(Side::spinning(&devices[at], 0)));
    let runtime = current_thread();
    let _tasks = [one.run(&runtime), other.run(&runtime)];
    runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let streams = async || {
            let accepting = listener.accept();
            let (near, far) = tokio::join!(TcpStream::connect(address), accepting);
            (near.unwrap(), far.unwrap().0)
        };
        let (ours, theirs) = (prepare(&one, 3), prepare(&other, 4));
        let posted = || [&one, &other].map(|side| CHUNKS - side.pool.available());

        // The other side has gone before anything was said.
        let (mut near, far) = streams().await;
        drop(far);
        let failed = ours.connect(&mut near, b"").await.unwrap_err();
        assert_eq!(posted(), [3, 4]);
        let ours = failed.object;

        // The handshake of one side fails when the other's has succeeded: that has a connected queue pair.
        let (mut near, mut far) = streams().await;
        devices[1].fail(Verb::ModifyQp, libc::EIO, When::Before, 1);
        let both = tokio::join!(ours.connect(&mut near, b""), theirs.accept(&mut far, b""));
        let (ours, theirs) = (both.0.unwrap_err(), both.1.unwrap_err());
        assert!(matches!(ours.error, ExchangeError::Peer { errno: libc::EIO }), "{}", ours.error);
        assert!(matches!(theirs.error, ExchangeError::Verbs(_)), "{}", theirs.error);
        assert_eq!(posted(), [0, 0]);

        let (mut near, mut far) = streams().await;
        let (mut ours, mut theirs) = (ours.object, theirs.object);
        (0..3).for_each(|_| ours.post_receive(one.buffer(0)).unwrap());
        (0..4).for_each(|_| theirs.post_receive(other.buffer(0)).unwrap());
        let both = tokio::join!(ours.connect(&mut near, b""), theirs.accept(&mut far, b""));
        let (ours, theirs) = (both.0.unwrap().0, both.1.unwrap().0);
        assert_eq!(posted(), [3, 4]);
        for _ in 0..2 {
            send(&one, &ours, 0..4).await;
            receive(&other, &theirs, 0..4).await;
            send(&other, &theirs, 0..3).await;
            receive(&one, &ours, 0..3).await;
        }
    });
    one.all_buffers_are_back();
    other.all_buffers_are_back();
}
