//! Promises of std's and tokio's `TcpStream`: each is a test that runs on TCP, on streams that are connected over TCP, and on streams
//! of the connection manager. README's table has the differences.

use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::Shutdown;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::LazyLock;
use std::thread;
use std::time::Duration;

use super::{Host, PATIENCE, data, soon};

/// Streams of all tests are those of two hubs.
static HOSTS: LazyLock<[Host; 2]> =
    LazyLock::new(|| [(); 2].map(|()| Host::with(|hub| hub.max_connections(64))));

fn is_thread_safe<
    T: Send + Sync + Unpin + std::fmt::Debug + UnwindSafe + RefUnwindSafe + 'static,
>() {
}

mod tcp {
    pub(super) type Stream = std::net::TcpStream;
    pub(super) type Listener = std::net::TcpListener;

    pub(super) fn pair() -> (Stream, Stream) {
        let listener = Listener::bind("127.0.0.1:0").unwrap();
        let one = Stream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }
}

mod streams {
    pub(super) use ibverbs_stream::{Listener, Stream};

    use super::*;

    pub(super) fn pair() -> (Stream, Stream) {
        let listener = Listener::bind(&HOSTS[1].hub, "127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        thread::scope(|threads| {
            let connects = threads.spawn(|| Stream::connect(&HOSTS[0].hub, to, soon()).unwrap());
            let two = listener.accept().unwrap().0;
            (connects.join().unwrap(), two)
        })
    }
}

#[cfg(feature = "rdmacm")]
mod managed {
    use ibverbs_stream::Hub;
    pub(super) use ibverbs_stream::{Listener, Stream};

    use super::*;
    use crate::managed_hub;

    pub(super) static HUBS: LazyLock<[Hub; 2]> =
        LazyLock::new(|| [(); 2].map(|()| managed_hub(64)));

    pub(super) fn address() -> std::net::SocketAddr {
        (crate::MANAGED.address(), 0).into()
    }

    pub(super) fn pair() -> (Stream, Stream) {
        let listener = Listener::bind_rdmacm(&HUBS[1], address()).unwrap();
        let to = listener.local_addr().unwrap();
        thread::scope(|threads| {
            let hub = &HUBS[0];
            let connects = threads.spawn(|| Stream::connect_rdmacm(hub, to, soon()).unwrap());
            let two = listener.accept().unwrap().0;
            (connects.join().unwrap(), two)
        })
    }
}

macro_rules! promises_to_threads {
    ($($name:ident: $kind:ident;)+) => {$(
        mod $name {
            use super::$kind::{Listener, Stream, pair};
            use super::*;

            #[test]
            fn types_are_thread_safe_and_unwind_safe() {
                is_thread_safe::<Stream>();
                is_thread_safe::<Listener>();
            }

            #[test]
            fn nothing_is_written_at_once() {
                let (mut one, _two) = pair();
                assert_eq!(one.write(&[]).unwrap(), 0);
                one.flush().unwrap();
            }

            #[test]
            fn the_end_stays_and_the_other_direction_goes_on() {
                let (mut one, mut two) = pair();
                one.write_all(b"last").unwrap();
                one.shutdown(Shutdown::Write).unwrap();
                let mut got = Vec::new();
                two.read_to_end(&mut got).unwrap();
                assert_eq!(got, b"last");
                for _ in 0..3 {
                    assert_eq!(two.read(&mut [0; 8]).unwrap(), 0);
                }
                assert_eq!(one.write(b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
                two.write_all(b"back").unwrap();
                let mut back = [0; 4];
                one.read_exact(&mut back).unwrap();
                assert_eq!(&back, b"back");
            }

            #[test]
            fn shutdown_of_reading_wakes_a_reader_with_the_end() {
                let (one, _two) = pair();
                thread::scope(|threads| {
                    let reads = threads.spawn(|| (&one).read(&mut [0; 8]));
                    thread::sleep(Duration::from_millis(50));
                    one.shutdown(Shutdown::Read).unwrap();
                    assert_eq!(reads.join().unwrap().unwrap(), 0);
                });
                assert_eq!((&one).read(&mut [0; 8]).unwrap(), 0);
            }

            #[test]
            fn timeouts_are_kept_and_zero_is_none() {
                let (mut one, _two) = pair();
                assert_eq!(one.read_timeout().unwrap(), None);
                let short = Some(Duration::from_millis(20));
                one.set_read_timeout(short).unwrap();
                one.set_write_timeout(Some(PATIENCE)).unwrap();
                assert!(one.read_timeout().unwrap() >= short);
                assert_eq!(one.write_timeout().unwrap(), Some(PATIENCE));
                assert_eq!(one.read(&mut [0; 8]).unwrap_err().kind(), ErrorKind::WouldBlock);
                let zero = Some(Duration::ZERO);
                let error = one.set_read_timeout(zero).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::InvalidInput);
                let error = one.set_write_timeout(zero).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::InvalidInput);
            }

            #[test]
            fn what_is_peeked_at_is_there() {
                let (mut one, mut two) = pair();
                one.write_all(b"hello").unwrap();
                let mut got = [0; 5];
                while two.peek(&mut got).unwrap() < 5 {}
                assert_eq!(&got, b"hello");
                two.read_exact(&mut got[..2]).unwrap();
                assert_eq!(two.peek(&mut got).unwrap(), 3);
                assert_eq!(&got[..3], b"llo");
            }

            #[test]
            fn clones_are_the_same_stream() {
                let (one, mut two) = pair();
                let mut clone = one.try_clone().unwrap();
                assert_eq!(clone.peer_addr().unwrap(), one.peer_addr().unwrap());
                clone.set_read_timeout(Some(PATIENCE)).unwrap();
                assert_eq!(one.read_timeout().unwrap(), Some(PATIENCE));
                drop(one);
                clone.write_all(b"from the clone").unwrap();
                let mut got = [0; 14];
                two.read_exact(&mut got).unwrap();
                two.write_all(b"back").unwrap();
                clone.read_exact(&mut got[..4]).unwrap();
                drop(clone);
                assert_eq!(two.read(&mut got).unwrap(), 0);
            }

            #[test]
            fn calls_that_are_not_to_wait_do_not() {
                let (mut one, mut two) = pair();
                one.set_nonblocking(true).unwrap();
                assert_eq!(one.read(&mut [0; 8]).unwrap_err().kind(), ErrorKind::WouldBlock);
                assert_eq!(one.peek(&mut [0; 8]).unwrap_err().kind(), ErrorKind::WouldBlock);
                let mut sent = 0;
                let error = loop {
                    match one.write(&[7; 65_536]) {
                        Ok(len) => sent += len,
                        Err(error) => break error,
                    }
                };
                assert_eq!(error.kind(), ErrorKind::WouldBlock);
                two.read_exact(&mut vec![0; sent]).unwrap();
                two.write_all(b"x").unwrap();
                while one.read(&mut [0; 8]).is_err() {
                    thread::yield_now();
                }
            }

            #[test]
            fn vectored_calls_take_all_pieces() {
                let (mut one, mut two) = pair();
                let pieces = [IoSlice::new(b"one "), IoSlice::new(b""), IoSlice::new(b"two")];
                assert_eq!(one.write_vectored(&pieces).unwrap(), 7);
                let mut got = [0; 7];
                two.read_exact(&mut got).unwrap();
                assert_eq!(&got, b"one two");
            }

            #[test]
            fn settings_are_what_was_set() {
                let (one, _two) = pair();
                for nodelay in [true, false] {
                    one.set_nodelay(nodelay).unwrap();
                    assert_eq!(one.nodelay().unwrap(), nodelay);
                }
                assert!(one.take_error_is_none());
            }

            #[test]
            fn a_peer_that_drops_what_it_has_not_read_resets() {
                let (mut one, two) = pair();
                one.write_all(b"unread").unwrap();
                two.peek(&mut [0; 1]).unwrap();
                thread::scope(|threads| {
                    threads.spawn(|| drop(two));
                    let error = one.read(&mut [0; 8]).unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
                });
            }
        }
    )+};
}

trait NoError {
    fn take_error_is_none(&self) -> bool;
}

impl NoError for std::net::TcpStream {
    fn take_error_is_none(&self) -> bool {
        self.take_error().unwrap().is_none()
    }
}

impl NoError for ibverbs_stream::Stream {
    fn take_error_is_none(&self) -> bool {
        self.take_error().is_none()
    }
}

promises_to_threads! {
    threads_on_tcp: tcp;
    threads_on_streams: streams;
}

#[cfg(feature = "rdmacm")]
promises_to_threads! {
    threads_on_managed_streams: managed;
}

mod tcp_tasks {
    pub(super) use tokio::net::tcp::{OwnedReadHalf as ReadHalf, OwnedWriteHalf as WriteHalf};
    pub(super) use tokio::net::{TcpListener as Listener, TcpStream as Stream};

    pub(super) async fn listener() -> Listener {
        Listener::bind("127.0.0.1:0").await.unwrap()
    }

    pub(super) async fn connect(to: std::net::SocketAddr) -> Stream {
        Stream::connect(to).await.unwrap()
    }
}

mod stream_tasks {
    pub(super) use ibverbs_stream::tokio::{Listener, ReadHalf, Stream, WriteHalf};

    use super::HOSTS;

    pub(super) async fn listener() -> Listener {
        Listener::bind(&HOSTS[1].hub, "127.0.0.1:0").await.unwrap()
    }

    pub(super) async fn connect(to: std::net::SocketAddr) -> Stream {
        Stream::connect(&HOSTS[0].hub, to).await.unwrap()
    }
}

#[cfg(feature = "rdmacm")]
mod managed_tasks {
    pub(super) use ibverbs_stream::tokio::{Listener, ReadHalf, Stream, WriteHalf};

    use super::managed::{HUBS, address};

    pub(super) async fn listener() -> Listener {
        Listener::bind_rdmacm(&HUBS[1], address()).unwrap()
    }

    pub(super) async fn connect(to: std::net::SocketAddr) -> Stream {
        Stream::connect_rdmacm(&HUBS[0], to).await.unwrap()
    }
}

macro_rules! promises_to_tasks {
    ($($name:ident: $kind:ident;)+) => {$(
        mod $name {
            use std::sync::Arc;

            use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader, Interest};

            use super::$kind::{Listener, ReadHalf, Stream, WriteHalf, connect, listener};
            use super::*;

            async fn pair() -> (Stream, Stream) {
                let listener = listener().await;
                let connects = connect(listener.local_addr().unwrap());
                let (one, two) = tokio::join!(connects, listener.accept());
                (one, two.unwrap().0)
            }

            /// Fails a test that does not end.
            async fn ends<T>(test: impl Future<Output = T>) -> T {
                tokio::time::timeout(PATIENCE, test).await.expect("it never ends")
            }

            #[test]
            fn types_are_thread_safe_and_unwind_safe() {
                is_thread_safe::<Stream>();
                is_thread_safe::<Listener>();
                is_thread_safe::<ReadHalf>();
                is_thread_safe::<WriteHalf>();
            }

            #[tokio::test]
            async fn calls_that_try_say_what_is_to_wait_for() {
                ends(async {
                    let (one, mut two) = pair().await;
                    let kind = |error: std::io::Error| error.kind();
                    assert_eq!(one.try_read(&mut [0; 8]).map_err(kind), Err(ErrorKind::WouldBlock));
                    one.writable().await.unwrap();
                    assert!(one.ready(Interest::WRITABLE).await.unwrap().is_writable());
                    let (mut sent, all) = (0, data(50_000));
                    loop {
                        match one.try_write(&all) {
                            Ok(len) => sent += len,
                            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                            Err(error) => panic!("{error}"),
                        }
                    }
                    two.read_exact(&mut vec![0; sent]).await.unwrap();
                    one.writable().await.unwrap();
                    two.write_all(b"hello").await.unwrap();
                    one.readable().await.unwrap();
                    let mut got = [0; 5];
                    assert_eq!(one.peek(&mut got).await.unwrap(), 5);
                    assert!(one.ready(Interest::READABLE).await.unwrap().is_readable());
                    let (first, second) = got.split_at_mut(2);
                    let mut to = [IoSliceMut::new(first), IoSliceMut::new(second)];
                    assert_eq!(one.try_read_vectored(&mut to).unwrap(), 5);
                    assert_eq!(&got, b"hello");
                    assert_eq!(one.try_write_vectored(&[IoSlice::new(b"x")]).unwrap(), 1);
                    drop(two);
                })
                .await;
            }

            #[allow(unused_mut, reason = "`split` of TCP borrows")]
            #[tokio::test]
            async fn split_is_found_with_the_traits_in_scope() {
                ends(async {
                    let (mut one, mut two) = pair().await;
                    one.write_all(b"line\n").await.unwrap();
                    let (read, mut write) = two.split();
                    let mut lines = BufReader::new(read).lines();
                    let line = lines.next_line().await.unwrap().unwrap();
                    write.write_all(line.as_bytes()).await.unwrap();
                    write.flush().await.unwrap();
                    let mut got = [0; 4];
                    one.read_exact(&mut got).await.unwrap();
                    assert_eq!(&got, b"line");
                })
                .await;
            }

            #[tokio::test]
            async fn halves_are_put_together_again() {
                ends(async {
                    let (one, two) = pair().await;
                    let (read, write) = one.into_split();
                    let (other_read, other_write) = two.into_split();
                    assert_eq!(read.peer_addr().unwrap(), write.peer_addr().unwrap());
                    assert!(read.reunite(other_write).is_err());
                    other_read.local_addr().unwrap();
                    let (mut one, two) = pair().await;
                    let (read, write) = two.into_split();
                    let mut two = read.reunite(write).unwrap();
                    one.write_all(b"x").await.unwrap();
                    assert_eq!(two.read_u8().await.unwrap(), b'x');
                    // A half that is forgotten ends nothing.
                    let (mut read, write) = one.into_split();
                    write.forget();
                    two.write_all(b"y").await.unwrap();
                    assert_eq!(read.read_u8().await.unwrap(), b'y');
                })
                .await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn several_tasks_accept_of_one_listener() {
                ends(async {
                    let listener = Arc::new(listener().await);
                    let to = listener.local_addr().unwrap();
                    let accept = |_| {
                        let listener = listener.clone();
                        tokio::spawn(async move { listener.accept().await.unwrap().1 })
                    };
                    let tasks: Vec<_> = (0..3).map(accept).collect();
                    let (mut clients, mut accepted) = (Vec::new(), Vec::new());
                    for _ in 0..3 {
                        clients.push(connect(to).await);
                    }
                    for task in tasks {
                        accepted.push(task.await.unwrap());
                    }
                    accepted.sort();
                    let mut connected: Vec<_> =
                        clients.iter().map(|client| client.local_addr().unwrap()).collect();
                    connected.sort();
                    assert_eq!(accepted, connected);
                })
                .await;
            }

            #[tokio::test]
            async fn a_read_that_is_given_up_loses_nothing() {
                ends(async {
                    let (mut one, mut two) = pair().await;
                    let mut got = [0; 5];
                    let short = Duration::from_millis(5);
                    assert!(tokio::time::timeout(short, two.read(&mut got)).await.is_err());
                    one.write_all(b"hello").await.unwrap();
                    one.set_nodelay(true).unwrap();
                    assert!(one.nodelay().unwrap());
                    two.read_exact(&mut got).await.unwrap();
                    assert_eq!(&got, b"hello");
                    one.shutdown().await.unwrap();
                    assert_eq!(two.read(&mut got).await.unwrap(), 0);
                })
                .await;
            }
        }
    )+};
}

promises_to_tasks! {
    tasks_on_tcp: tcp_tasks;
    tasks_on_streams: stream_tasks;
}

#[cfg(feature = "rdmacm")]
promises_to_tasks! {
    tasks_on_managed_streams: managed_tasks;
}
