//! Streams of tokio's tasks.

use std::future::poll_fn;
use std::io::{ErrorKind, IoSlice, Read as _};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use ibverbs_stream::Role;
use ibverbs_stream::tokio::{Listener, Stream};
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::{TcpListener, TcpStream};

use super::{Host, PATIENCE, data};

async fn pair(one: &Host, two: &Host) -> (Stream, Stream) {
    let listener = Listener::bind(&two.hub, "127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (one, two) = tokio::join!(Stream::connect(&one.hub, address), listener.accept());
    (one.unwrap(), two.unwrap().0)
}

/// Fails a test that does not end.
async fn ends<T>(test: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, test).await.expect("it never ends")
}

#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// Polls once, for a task that is nobody's.
fn poll_write(stream: &mut Stream, waker: &Waker, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
    Pin::new(stream).poll_write(&mut Context::from_waker(waker), bytes)
}

fn poll_read(stream: &mut Stream, waker: &Waker, bytes: &mut [u8]) -> Poll<std::io::Result<usize>> {
    let mut to = ReadBuf::new(bytes);
    let read = Pin::new(stream).poll_read(&mut Context::from_waker(waker), &mut to);
    read.map_ok(|()| to.filled().len())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_arrive_in_order_both_ways_at_once() {
    ends(async {
        let hosts = [(); 2].map(|()| Host::with(|hub| hub.chunk(1500).receives(3).sends(2)));
        let (one, two) = pair(&hosts[0], &hosts[1]).await;
        let mut tasks = Vec::new();
        for stream in [one, two] {
            let (mut read, mut write) = stream.into_split();
            tasks.push(tokio::spawn(async move {
                for piece in data(500_000).chunks(901) {
                    write.write_all(piece).await.unwrap();
                }
                write.shutdown().await.unwrap();
            }));
            tasks.push(tokio::spawn(async move {
                let mut got = Vec::new();
                read.read_to_end(&mut got).await.unwrap();
                assert!(got == data(500_000));
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
    })
    .await;
}

#[tokio::test]
async fn half_close_lines_and_pieces() {
    ends(async {
        let hosts = [Host::new(), Host::new()];
        let (mut one, mut two) = pair(&hosts[0], &hosts[1]).await;
        assert!(one.is_write_vectored());
        let pieces = [IoSlice::new(b"one\ntw"), IoSlice::new(b"o\nthree")];
        assert_eq!(one.write_vectored(&pieces).await.unwrap(), 13);
        one.shutdown().await.unwrap();
        one.shutdown().await.unwrap();
        assert_eq!(one.write(b"x").await.unwrap_err().kind(), ErrorKind::BrokenPipe);
        let (mut lines, mut line) = (Vec::new(), String::new());
        while two.read_line(&mut line).await.unwrap() > 0 {
            lines.push(std::mem::take(&mut line));
        }
        assert_eq!(lines, ["one\n", "two\n", "three"]);
        // The other direction still works, and its drop loses nothing.
        two.write_all(b"back").await.unwrap();
        drop(two);
        let mut back = String::new();
        one.read_to_string(&mut back).await.unwrap();
        assert_eq!(back, "back");
    })
    .await;
}

/// Bytes that a write has not taken are not sent, and those of later writes are.
#[tokio::test]
async fn a_call_that_is_given_up_leaves_nothing_behind() {
    ends(async {
        let hosts = [(); 2].map(|()| Host::with(|hub| hub.chunk(256).receives(2).sends(1)));
        let (mut one, mut two) = pair(&hosts[0], &hosts[1]).await;
        let (all, mut sent) = (data(20_000), 0);
        let noop = Waker::noop();
        // Write until the peer takes no more, whatever its device has acknowledged.
        let mut idle = 0;
        while idle < 50 {
            match poll_write(&mut one, noop, &all[sent..sent + 100]) {
                Poll::Ready(taken) => (sent, idle) = (sent + taken.unwrap(), 0),
                Poll::Pending => {
                    assert!(poll_write(&mut one, noop, b"never these").is_pending());
                    idle += 1;
                    tokio::time::sleep(std::time::Duration::from_millis(1)).await;
                }
            }
        }
        assert!(sent < 2000, "{sent} bytes without a reader");
        // Reads that are given up take nothing, and the same future is not needed to go on.
        let mut got = Vec::new();
        let rest = tokio::spawn(async move {
            one.write_all(&data(20_000)[sent..]).await.unwrap();
            one.shutdown().await.unwrap();
        });
        loop {
            let mut bytes = [0; 77];
            let read = match poll_read(&mut two, noop, &mut bytes) {
                Poll::Ready(read) => read.unwrap(),
                Poll::Pending => two.read(&mut bytes).await.unwrap(),
            };
            if read == 0 {
                break;
            }
            got.extend_from_slice(&bytes[..read]);
        }
        rest.await.unwrap();
        assert!(got == all);
    })
    .await;
}

#[tokio::test]
async fn the_last_task_that_asked_is_woken_and_only_for_its_direction() {
    ends(async {
        let hosts = [Host::new(), Host::new()];
        let (mut one, mut two) = pair(&hosts[0], &hosts[1]).await;
        let [first, second] = [(); 2].map(|()| Arc::new(Woken::default()));
        for woken in [&first, &first, &second] {
            assert!(poll_read(&mut two, &woken.clone().into(), &mut [0; 4]).is_pending());
        }
        assert!(poll_read(&mut two, Waker::noop(), &mut []).is_ready(), "no room is no wait");
        one.write_all(b"hello").await.unwrap();
        while second.0.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
        assert_eq!((first.0.load(Ordering::SeqCst), second.0.load(Ordering::SeqCst)), (0, 1));
        // `BufRead` gives the same bytes until they are consumed.
        for _ in 0..2 {
            assert_eq!(two.fill_buf().await.unwrap(), b"hello");
        }
        two.consume(2);
        assert_eq!(two.fill_buf().await.unwrap(), b"llo");
    })
    .await;
}

/// A reader for whom there is always something lets other tasks of its thread run.
#[tokio::test]
async fn a_busy_reader_does_not_starve_the_others() {
    ends(async {
        let hosts = [(); 2].map(|()| Host::with(|hub| hub.chunk(1 << 20)));
        let (mut one, mut two) = pair(&hosts[0], &hosts[1]).await;
        let writes = tokio::spawn(async move {
            one.write_all(&vec![1; 900_000]).await.unwrap();
            one
        });
        two.readable().await.unwrap();
        let turns = Arc::new(AtomicUsize::new(0));
        let counted = turns.clone();
        let other = tokio::spawn(async move {
            loop {
                counted.fetch_add(1, Ordering::SeqCst);
                tokio::task::yield_now().await;
            }
        });
        for _ in 0..100_000 {
            two.read_u8().await.unwrap();
        }
        assert!(turns.load(Ordering::SeqCst) > 100, "{turns:?}");
        other.abort();
        drop(writes.await.unwrap());
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_are_copied_between_tcp_and_rdma() {
    ends(async {
        let hosts = [Host::new(), Host::new()];
        let (mut a, b) = pair(&hosts[0], &hosts[1]).await;
        let front = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = front.local_addr().unwrap();
        let proxy = tokio::spawn(async move {
            let (mut tcp, _) = front.accept().await.unwrap();
            tokio::io::copy_bidirectional(&mut tcp, &mut a).await.unwrap()
        });
        let echo = tokio::spawn(async move {
            let (mut read, mut write) = b.into_split();
            tokio::io::copy_buf(&mut read, &mut write).await.unwrap();
            write.shutdown().await.unwrap();
        });
        let (mut read, mut write) = TcpStream::connect(address).await.unwrap().into_split();
        let writes = tokio::spawn(async move {
            write.write_all(&data(1_000_000)).await.unwrap();
            write.shutdown().await.unwrap();
        });
        let mut back = Vec::new();
        read.read_to_end(&mut back).await.unwrap();
        writes.await.unwrap();
        echo.await.unwrap();
        assert_eq!(proxy.await.unwrap(), (1_000_000, 1_000_000));
        assert!(back == data(1_000_000));
    })
    .await;
}

/// A thousand small messages each way on every one of a hundred streams, whose receives are shared, and fewer than streams.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_streams_share_few_buffers() {
    ends(async {
        let set = |hub: ibverbs_stream::HubBuilder| {
            hub.chunk(512).receives(2).sends(2).shared_receives(24).max_connections(100)
        };
        let hosts = [Host::with(set), Host::with(set)];
        let listener = Listener::bind(&hosts[1].hub, "127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let serve = tokio::spawn(async move {
            for _ in 0..100 {
                let (stream, _) = listener.accept().await.unwrap();
                tokio::spawn(async move {
                    let (mut read, mut write) = stream.into_split();
                    tokio::io::copy(&mut read, &mut write).await.unwrap();
                    write.shutdown().await.unwrap();
                });
            }
            listener
        });
        let mut streams = Vec::new();
        for _ in 0..100 {
            streams.push(Stream::connect(&hosts[0].hub, address).await.unwrap());
        }
        let refused = Stream::connect(&hosts[0].hub, address).await.unwrap_err();
        assert!(refused.to_string().contains("max_connections, 100"), "{refused}");
        drop(serve.await.unwrap());
        let mut tasks = Vec::new();
        for (index, stream) in streams.into_iter().enumerate() {
            tasks.push(tokio::spawn(async move {
                let (mut read, mut write) = stream.into_split();
                let all = data(3000 + index);
                let sent = all.clone();
                let writes = tokio::spawn(async move {
                    write.write_all(&sent).await.unwrap();
                    write.shutdown().await.unwrap();
                });
                let mut got = Vec::new();
                read.read_to_end(&mut got).await.unwrap();
                assert!(got == all);
                writes.await.unwrap();
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
        while hosts.iter().any(|host| host.hub.stats().connections > 0) {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

/// Each has a buffer that is not on its way, and there are more of them than the hub has begun with. No peer costs others anything.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn peers_that_do_not_read_take_nothing_from_others() {
    ends(async {
        for (shared, slow) in [(2, 4), (8, 40)] {
            let set = |hub: ibverbs_stream::HubBuilder| {
                hub.chunk(256).receives(2).sends(2).max_connections(64)
            };
            let hosts = [Host::with(|hub| set(hub).shared_receives(shared)), Host::with(set)];
            let mut streams = Vec::new();
            for _ in 0..slow {
                let (mut one, two) = pair(&hosts[0], &hosts[1]).await;
                // Two receives, and a buffer that has no room there.
                one.write_all(&[1; 3 * 252]).await.unwrap();
                streams.push((one, two));
            }
            let (mut one, mut two) = pair(&hosts[0], &hosts[1]).await;
            let writes = tokio::spawn(async move {
                one.write_all(&data(100_000)).await.unwrap();
                one.shutdown().await.unwrap();
                one
            });
            let mut got = Vec::new();
            two.read_to_end(&mut got).await.unwrap();
            assert!(got == data(100_000));
            writes.await.unwrap();
            // The bytes for the others are there.
            let (_one, mut two) = streams.pop().unwrap();
            two.read_exact(&mut [0; 700]).await.unwrap();
        }
    })
    .await;
}

/// More clients than the hub has places: they say nothing, or begin to and do not go on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_say_too_little_take_no_place_of_others() {
    ends(async {
        let hosts = [Host::new(), Host::new()];
        let listener = Listener::bind(&hosts[0].hub, "127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut streams = Vec::new();
        for says in [&b""[..], b"i", b"ibverbs\x01\0\x23\0\x14"] {
            let mut mute = Vec::new();
            for _ in 0..20 {
                mute.push(TcpStream::connect(address).await.unwrap());
                mute.last_mut().unwrap().write_all(says).await.unwrap();
            }
            let connects = async { Stream::connect(&hosts[1].hub, address).await.unwrap() };
            let (mut one, accepted) = tokio::join!(connects, listener.accept());
            let (mut two, _) = accepted.unwrap();
            two.write_all(b"hello").await.unwrap();
            one.read_exact(&mut [0; 5]).await.unwrap();
            streams.push((one, two));
            let places = hosts[0].hub.stats().connections as usize;
            assert!(places == streams.len() || !says.is_empty(), "{places} places are taken");
        }
    })
    .await;
}

#[tokio::test]
async fn the_task_of_a_hub_ends_with_it() {
    ends(async {
        let handle = tokio::runtime::Handle::current();
        let hosts = [Host::new(), Host::new()];
        let (mut one, two) = pair(&hosts[0], &hosts[1]).await;
        let mut reading = pin!(one.read_u8());
        let polled = poll_fn(|cx| Poll::Ready(reading.as_mut().poll(cx))).await;
        assert!(polled.is_pending());
        hosts[0].hub.stop();
        assert_eq!(reading.await.unwrap_err().kind(), ErrorKind::ConnectionAborted);
        drop((one, two, hosts));
        while handle.metrics().num_alive_tasks() > 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
}

/// The stream over which two sides have connected is watched, whatever it is: its end is that of the peer, long before keep-alive.
#[tokio::test]
async fn they_connect_over_any_stream_and_see_its_end() {
    ends(async {
        let hosts = [Host::new(), Host::new()];
        let (first, second) = tokio::io::duplex(64);
        let (one, two) = tokio::join!(
            Stream::over(&hosts[0].hub, first, Role::Connects),
            Stream::over(&hosts[1].hub, second, Role::Accepts)
        );
        let (mut one, mut two) = (one.unwrap(), two.unwrap());
        assert_eq!(one.peer_addr().unwrap_err().kind(), ErrorKind::Unsupported);
        two.write_all(b"last").await.unwrap();
        one.read_exact(&mut [0; 4]).await.unwrap();
        // The stopped side sends nothing any more.
        hosts[1].hub.stop();
        drop(two);
        let error = one.read(&mut [0; 4]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
    })
    .await;
}

/// A thread that never lets the hub's task run again after a flush keeps nothing back.
#[tokio::test]
async fn what_was_flushed_needs_no_task_any_more() {
    let hosts = [Host::new(), Host::with(|hub| hub.receives(64))];
    let listener = ibverbs_stream::Listener::bind(&hosts[1].hub, "127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let reads = std::thread::spawn(move || {
        let (mut two, _) = listener.accept().unwrap();
        two.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
        let mut got = vec![0; 100_000];
        two.read_exact(&mut got).unwrap();
        got
    });
    let mut one = Stream::connect(&hosts[0].hub, address).await.unwrap();
    for piece in data(100_000).chunks(333) {
        one.write_all(piece).await.unwrap();
    }
    one.flush().await.unwrap();
    assert!(reads.join().unwrap() == data(100_000));
}

#[cfg(feature = "futures-io")]
#[tokio::test]
async fn the_traits_of_futures_io_are_the_same() {
    ends(async {
        let hosts = [Host::new(), Host::new()];
        let (mut one, mut two) = pair(&hosts[0], &hosts[1]).await;
        let pieces = [IoSlice::new(b"one "), IoSlice::new(b"two")];
        let mut one = Pin::new(&mut one);
        let written =
            poll_fn(|cx| futures_io::AsyncWrite::poll_write_vectored(one.as_mut(), cx, &pieces));
        assert_eq!(written.await.unwrap(), 7);
        poll_fn(|cx| futures_io::AsyncWrite::poll_close(one.as_mut(), cx)).await.unwrap();
        let mut two = Pin::new(&mut two);
        let mut got = [0; 4];
        let read = poll_fn(|cx| futures_io::AsyncRead::poll_read(two.as_mut(), cx, &mut got));
        assert_eq!((read.await.unwrap(), &got), (4, b"one "));
        for rest in [b"two".as_slice(), b""] {
            let len = poll_fn(|cx| {
                futures_io::AsyncBufRead::poll_fill_buf(two.as_mut(), cx)
                    .map_ok(|bytes| (bytes == rest).then_some(bytes.len()))
            });
            let len = len.await.unwrap().expect("other bytes");
            futures_io::AsyncBufRead::consume(two.as_mut(), len);
        }
    })
    .await;
}
