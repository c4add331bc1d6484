//! Listeners: in which order clients are accepted, by how many, and what ends it.

use std::future::poll_fn;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs_stream::tokio as tasks;
use ibverbs_stream::{Hub, Listener, Refusal, Stream, StreamError};
use tokio::io::AsyncWriteExt as _;

use super::{Host, MANAGED, PATIENCE, managed_hub, soon};

async fn ends<T>(test: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, test).await.expect("it never ends")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_tasks_accept_and_one_that_gives_up_takes_nothing() {
    ends(async {
        let hosts = [Host::new(), Host::new()];
        let listener = tasks::Listener::bind(&hosts[1].hub, "127.0.0.1:0").await.unwrap();
        let (address, listener) = (listener.local_addr().unwrap(), Arc::new(listener));
        let accept = |_| {
            let listener = listener.clone();
            tokio::spawn(async move { listener.accept().await.unwrap() })
        };
        let accepting: Vec<_> = (0..4).map(accept).collect();
        let given_up = tokio::time::timeout(Duration::from_millis(5), listener.accept()).await;
        assert!(given_up.is_err());
        let mut clients = Vec::new();
        for _ in 0..4 {
            clients.push(tasks::Stream::connect(&hosts[0].hub, address).await.unwrap());
        }
        for task in accepting {
            let (mut stream, _) = task.await.unwrap();
            stream.write_all(b"x").await.unwrap();
        }
    })
    .await;
}

/// A waker that wakes nobody.
struct Nobody;

impl Wake for Nobody {
    fn wake(self: Arc<Self>) {}
}

#[tokio::test]
async fn a_future_that_is_dropped_leaves_nothing_of_its_task() {
    let host = Host::new();
    let listener = tasks::Listener::bind(&host.hub, "127.0.0.1:0").await.unwrap();
    let nobody = Arc::new(Nobody);
    for _ in 0..3 {
        let waker = Waker::from(nobody.clone());
        let mut accepting = Box::pin(listener.accept());
        assert!(accepting.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    }
    assert_eq!(Arc::strong_count(&nobody), 1);
}

#[tokio::test]
async fn a_hub_that_is_stopped_ends_what_accepts() {
    ends(async {
        let host = Host::new();
        let listener = tasks::Listener::bind(&host.hub, "127.0.0.1:0").await.unwrap();
        let mut accepting = pin!(listener.accept());
        assert!(poll_fn(|cx| Poll::Ready(accepting.as_mut().poll(cx))).await.is_pending());
        let hub = host.hub.clone();
        thread::spawn(move || hub.stop()).join().unwrap();
        let error = accepting.await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionAborted, "{error}");
        assert_eq!(listener.accept().await.unwrap_err().kind(), ErrorKind::ConnectionAborted);
    })
    .await;
}

#[test]
fn incoming_ends_when_the_hub_is_stopped() {
    let hosts = [Host::new(), Host::new()];
    let listener = Listener::bind(&hosts[1].hub, "127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::scope(|threads| {
        let streams = threads.spawn(|| listener.incoming().count());
        let _client = Stream::connect(&hosts[0].hub, address, soon()).unwrap();
        hosts[1].hub.stop();
        // The listener may be stopped before it has the client's last word.
        assert!(streams.join().unwrap() <= 1);
    });
}

fn refusal(error: &io::Error) -> Option<Refusal> {
    match error.get_ref()?.downcast_ref()? {
        StreamError::Refused(reason) => Some(*reason),
        _ => None,
    }
}

/// The client hears the reason, and the server counts it. A place that is free again is there for the next one.
#[test]
fn a_hub_that_is_full_says_so() {
    for by_tasks in [false, true] {
        let hosts = [Host::with(|hub| hub.max_connections(1)), Host::new()];
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).enable_all().build().unwrap();
        let (accepted, streams) = std::sync::mpsc::channel();
        let hub = hosts[0].hub.clone();
        let address = if by_tasks {
            let listener = runtime.block_on(tasks::Listener::bind(&hub, "127.0.0.1:0")).unwrap();
            let address = listener.local_addr().unwrap();
            runtime.spawn(async move {
                while let Ok((stream, _)) = listener.accept().await {
                    accepted.send(Box::new(stream) as Box<dyn Send>).unwrap();
                }
            });
            address
        } else {
            let listener = Listener::bind(&hub, "127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap();
            thread::spawn(move || {
                while let Ok((stream, _)) = listener.accept() {
                    accepted.send(Box::new(stream) as Box<dyn Send>).unwrap();
                }
            });
            address
        };
        let first = Stream::connect(&hosts[1].hub, address, soon()).unwrap();
        let server = streams.recv().unwrap();
        for number in 1..4 {
            let error = Stream::connect(&hosts[1].hub, address, soon()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{error}");
            assert_eq!(refusal(&error), Some(Refusal::Full), "{error}");
            assert_eq!(hosts[0].hub.stats().refused, number);
        }
        let connects = tasks::Stream::connect(&hosts[1].hub, address);
        let error = runtime.block_on(connects).unwrap_err();
        assert_eq!(refusal(&error), Some(Refusal::Full), "{error}");
        thread::scope(|threads| {
            threads.spawn(|| drop(first));
            drop(server);
        });
        let until = soon();
        while hosts[0].hub.stats().connections > 0 {
            assert!(Instant::now() < until);
            thread::sleep(Duration::from_millis(1));
        }
        let _again = Stream::connect(&hosts[1].hub, address, soon()).unwrap();
        hosts[0].hub.stop();
    }
}

#[test]
fn a_hub_that_is_full_says_so_by_the_connection_manager() {
    let (server, client) = (managed_hub(1), managed_hub(8));
    let listener = Listener::bind_rdmacm(&server, (MANAGED.address(), 0).into()).unwrap();
    let to = listener.local_addr().unwrap();
    thread::scope(|threads| {
        // A stream that the server drops makes room for another one.
        let accepts = || listener.incoming().filter_map(Result::ok).collect::<Vec<_>>();
        let accepts = threads.spawn(accepts);
        let _first = Stream::connect_rdmacm(&client, to, soon()).unwrap();
        let second = Stream::connect_rdmacm(&client, to, soon());
        let refused = server.stats().refused;
        server.stop();
        let error = second.unwrap_err();
        assert_eq!((refusal(&error), refused), (Some(Refusal::Full), 1), "{error}");
        assert!(accepts.join().unwrap().len() <= 1);
    });
}

/// A listener has as many clients as it takes, and others wait. Those that say nothing make room, and so do those that have begun.
#[test]
fn clients_that_go_no_further_hear_that_others_have_waited() {
    for (by_tasks, word) in [(false, ""), (true, ""), (false, "ibverbs"), (true, "ibverbs")] {
        let hosts = [Host::with(|hub| hub.max_connections(300)), Host::new()];
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).enable_all().build().unwrap();
        let bind = || runtime.block_on(tasks::Listener::bind(&hosts[0].hub, "127.0.0.1:0"));
        let (threads, tasks) = match by_tasks {
            false => (Some(Listener::bind(&hosts[0].hub, "127.0.0.1:0").unwrap()), None),
            true => (None, Some(bind().unwrap())),
        };
        let address = threads
            .as_ref()
            .map_or_else(|| tasks.as_ref().unwrap().local_addr(), |listener| listener.local_addr());
        let address = address.unwrap();
        let connect = |_| {
            let mut client = TcpStream::connect(address).unwrap();
            client.write_all(word.as_bytes()).unwrap();
            client
        };
        let begun = Instant::now();
        let mut stuck: Vec<_> = (0..256).map(connect).collect();
        thread::scope(|scope| {
            let connects = scope.spawn(|| Stream::connect(&hosts[1].hub, address, soon()).unwrap());
            match (threads, tasks) {
                (Some(listener), _) => drop(listener.accept().unwrap()),
                (_, Some(listener)) => drop(runtime.block_on(listener.accept()).unwrap()),
                _ => unreachable!(),
            }
            drop(connects.join().unwrap());
        });
        let mut heard = [0; 8];
        stuck[0].set_read_timeout(Some(PATIENCE)).unwrap();
        stuck[0].read_exact(&mut heard).unwrap();
        assert_eq!(&heard, b"ibvSslow");
        let refused = hosts[0].hub.stats().refused;
        // All of them are given up after ten seconds.
        let is_late = begun.elapsed() >= Duration::from_secs(10);
        assert!(if by_tasks || is_late { refused > 0 } else { refused == 1 }, "{refused}");
    }
}

/// The clock is tokio's. It stands still, as the runtime always has something to do.
#[tokio::test(start_paused = true)]
async fn clients_that_have_begun_keep_others_waiting_for_two_seconds() {
    async fn is(condition: impl Fn() -> bool) {
        let until = soon();
        while !condition() {
            assert!(Instant::now() < until);
            tokio::task::yield_now().await;
        }
    }
    let hosts = [Host::with(|hub| hub.max_connections(300)), Host::new()];
    let server = hosts[0].hub.clone();
    let listener = tasks::Listener::bind(&server, "127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let accepts = tokio::spawn(async move { listener.accept().await.unwrap() });
    let begin = |_| {
        let mut client = TcpStream::connect(address).unwrap();
        client.write_all(b"ibverbs").unwrap();
        client
    };
    let _stuck: Vec<_> = (0..256).map(begin).collect();
    is(|| server.stats().connections == 256).await;
    let client = hosts[1].hub.clone();
    let connects = tokio::spawn(async move { tasks::Stream::connect(&client, address).await });
    tokio::time::advance(Duration::from_secs(2)).await;
    is(|| connects.is_finished() && accepts.is_finished()).await;
    let _stream = connects.await.unwrap().unwrap();
    assert_eq!(server.stats().refused, 1);
}

/// Without a number, a hub takes as many as its device has room for, and registers buffers as they come.
#[test]
fn a_hub_that_was_not_told_how_many_takes_hundreds() {
    let device = ibverbs_software::Device::new().unwrap();
    let hub = Hub::builder(&Arc::new(device.open().unwrap())).build().unwrap();
    let listener = Listener::bind(&hub, "127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mut streams = Vec::new();
    thread::scope(|threads| {
        let connects = threads.spawn(|| {
            (0..100).map(|_| Stream::connect(&hub, address, soon()).unwrap()).collect::<Vec<_>>()
        });
        streams.extend((0..100).map(|_| listener.accept().unwrap().0));
        streams.extend(connects.join().unwrap());
    });
    // Both ends, in one hub.
    let (one, two) = streams.split_at_mut(100);
    for (one, two) in one.iter_mut().zip(two) {
        one.write_all(b"hello").unwrap();
        let mut got = [0; 5];
        two.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"hello");
    }
    hub.stop();
}

/// This test runs itself, as the other ones need their standard error.
#[test]
fn a_client_is_refused_though_nobody_reads_standard_error() {
    const UNREAD: &str = "IBVERBS_STREAM_UNREAD";
    if std::env::var_os(UNREAD).is_none() {
        let test = "listeners::a_client_is_refused_though_nobody_reads_standard_error";
        let (reader, unread) = io::pipe().unwrap();
        drop(reader);
        let unread = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(UNREAD, "1")
            .stderr(unread)
            .status()
            .unwrap();
        assert!(unread.success());
        return;
    }
    let server = Host::with(|hub| hub.max_connections(1));
    let client = Host::new();
    let listener = Listener::bind(&server.hub, "127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::scope(|threads| {
        let accepts = threads.spawn(|| listener.incoming().collect::<io::Result<Vec<_>>>());
        let _first = Stream::connect(&client.hub, address, soon()).unwrap();
        let second = Stream::connect(&client.hub, address, soon()).map(drop);
        server.hub.stop();
        assert_eq!(refusal(&second.unwrap_err()), Some(Refusal::Full));
        accepts.join().unwrap().unwrap();
    });
}
