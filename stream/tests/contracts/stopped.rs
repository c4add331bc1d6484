//! Hubs that are stopped while streams are being connected: whoever waits hears of it at once.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::device::AsyncEventKind;
use ibverbs::rdmacm;
use ibverbs_software::{EventSubject, Verb, When};
use ibverbs_stream::{Hub, Listener, Role, Stream, tokio as tasks};
use tokio::io::AsyncReadExt as _;
use tokio::runtime::{Builder, Runtime};

use super::{Host, MANAGED, PATIENCE, managed_hub, soon};

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

fn is_stopped<T>(connected: io::Result<T>) {
    let Err(error) = connected else { panic!("it has connected") };
    assert_eq!(error.kind(), ErrorKind::ConnectionAborted, "{error}");
    assert_eq!(error.to_string(), "the hub of the stream was stopped");
}

/// The deadline of connects, which do not wait for it.
fn late() -> Instant {
    Instant::now() + 2 * PATIENCE
}

/// A thread and a task connect with hubs that are stopped when they wait.
fn try_both(
    mut new_hub: impl FnMut() -> Hub,
    mut wait: impl FnMut(&Hub),
    by_thread: impl Fn(&Hub) -> io::Result<Stream> + Sync,
    by_task: impl AsyncFn(&Hub) -> io::Result<tasks::Stream> + Sync,
) {
    for by_tasks in [false, true] {
        let hub = new_hub();
        thread::scope(|threads| {
            let connecting = threads.spawn(|| {
                if !by_tasks {
                    return is_stopped(by_thread(&hub));
                }
                let runtime = runtime();
                let connected = async { tokio::time::timeout(2 * PATIENCE, by_task(&hub)).await };
                is_stopped(runtime.block_on(connected).expect("it never ends"));
            });
            wait(&hub);
            hub.stop();
            let stopped = Instant::now();
            connecting.join().unwrap();
            assert!(stopped.elapsed() < PATIENCE, "it waits for its deadline");
        });
        // A connect that begins afterwards ends in the same way.
        is_stopped(by_thread(&hub));
        assert_eq!(hub.stats().connections, 0);
    }
}

/// The server takes the connection, and says nothing.
#[test]
fn a_connect_ends_while_the_server_says_nothing() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = silent.local_addr().unwrap();
    let mut accepted = Vec::new();
    let mut hosts = Vec::new();
    let new_hub = || {
        hosts.push(Host::new());
        hosts.last().unwrap().hub.clone()
    };
    let wait = |_: &Hub| {
        let (mut stream, _) = silent.accept().unwrap();
        stream.read_exact(&mut [0]).unwrap();
        accepted.push(stream);
    };
    let by_thread = |hub: &Hub| Stream::connect(hub, to, late());
    try_both(new_hub, wait, by_thread, async |hub| tasks::Stream::connect(hub, to).await);
}

/// Whether TCP waits for the first answer from this port.
fn is_asked(port: u16) -> bool {
    let state = format!(":{port:04X} 02 ");
    std::fs::read_to_string("/proc/net/tcp").unwrap().contains(&state)
}

/// A server whose backlog is full, so that TCP itself has no answer.
struct Full {
    to: SocketAddr,
    _listener: TcpListener,
    _waiting: Vec<TcpStream>,
}

impl Full {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        // SAFETY: the descriptor is a listener's.
        assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), 0) }, 0);
        let to = listener.local_addr().unwrap();
        let connect = || TcpStream::connect_timeout(&to, Duration::from_secs(1)).ok();
        let waiting = std::iter::from_fn(connect).collect();
        Self { to, _listener: listener, _waiting: waiting }
    }

    fn wait_until_asked(&self) {
        let until = soon();
        while !is_asked(self.to.port()) {
            assert!(Instant::now() < until, "nobody connects");
            thread::yield_now();
        }
    }
}

#[test]
fn a_connect_ends_while_tcp_waits() {
    let full = Full::new();
    let to = full.to;
    let mut hosts = Vec::new();
    let new_hub = || {
        hosts.push(Host::new());
        hosts.last().unwrap().hub.clone()
    };
    let wait = |_: &Hub| full.wait_until_asked();
    let by_thread = |hub: &Hub| Stream::connect(hub, to, late());
    try_both(new_hub, wait, by_thread, async |hub| tasks::Stream::connect(hub, to).await);
}

#[test]
fn a_connect_ends_while_the_connection_manager_waits() {
    let at = SocketAddr::from((MANAGED.address(), 0));
    let mut listener = rdmacm::Listener::bind(at).unwrap();
    let to = listener.local_addr().unwrap();
    let mut requests = Vec::new();
    let wait = |_: &Hub| requests.push(listener.next_until(soon()).unwrap());
    let by_thread = |hub: &Hub| Stream::connect_rdmacm(hub, to, late());
    let by_task = async |hub: &Hub| tasks::Stream::connect_rdmacm(hub, to).await;
    try_both(|| managed_hub(8), wait, by_thread, by_task);
}

/// Either role, over a stream of the program's.
#[test]
fn a_connect_over_a_stream_ends() {
    for role in [Role::Connects, Role::Accepts] {
        let mut hosts = Vec::new();
        let new_hub = || {
            hosts.push(Host::new());
            hosts.last().unwrap().hub.clone()
        };
        let peers = Mutex::new(Vec::new());
        let wait = |hub: &Hub| {
            while hub.stats().connections == 0 {
                thread::yield_now();
            }
        };
        let own = || {
            let (own, peer) = UnixStream::pair().unwrap();
            peers.lock().unwrap().push(peer);
            own
        };
        let by_thread = |hub: &Hub| Stream::over(hub, own(), role, late());
        try_both(new_hub, wait, by_thread, async |hub| {
            let own = own();
            own.set_nonblocking(true).unwrap();
            tasks::Stream::over(hub, tokio::net::UnixStream::from_std(own).unwrap(), role).await
        });
    }
}

/// A client in the middle of connecting hears that the listener's hub is stopped, though the listener is there.
#[test]
fn clients_of_a_listener_are_not_left_waiting() {
    for by_tasks in [false, true] {
        let host = Host::new();
        let runtime = runtime();
        let client = |to| {
            let mut client = TcpStream::connect(to).unwrap();
            client.set_read_timeout(Some(PATIENCE)).unwrap();
            client.write_all(b"i").unwrap();
            while host.hub.stats().connections == 0 {
                thread::yield_now();
            }
            host.hub.stop();
            let error = client.read(&mut [0]).err().map(|error| error.kind());
            assert!(matches!(error, None | Some(ErrorKind::ConnectionReset)), "{error:?}");
        };
        if by_tasks {
            let bound = tasks::Listener::bind(&host.hub, "127.0.0.1:0");
            let listener = runtime.block_on(bound).unwrap();
            let to = listener.local_addr().unwrap();
            thread::scope(|threads| {
                threads.spawn(|| client(to));
                is_stopped(runtime.block_on(listener.accept()));
            });
        } else {
            let listener = Listener::bind(&host.hub, "127.0.0.1:0").unwrap();
            let to = listener.local_addr().unwrap();
            thread::scope(|threads| {
                threads.spawn(|| client(to));
                is_stopped(listener.accept());
            });
        }
    }
}

/// A thread or a task waits while the device of its hub fails, and nobody else uses the hub.
fn try_removal(
    by_tasks: bool,
    wait: impl FnOnce(&Hub),
    by_thread: impl Fn(&Hub) -> io::Result<()> + Sync,
    by_task: impl AsyncFn(&Hub) -> io::Result<()> + Sync,
) {
    let host = Host::new();
    thread::scope(|threads| {
        let waiting = threads.spawn(|| {
            if !by_tasks {
                return by_thread(&host.hub);
            }
            let ends = async { tokio::time::timeout(2 * PATIENCE, by_task(&host.hub)).await };
            runtime().block_on(ends).expect("it never ends")
        });
        wait(&host.hub);
        host.device.remove();
        let removed = Instant::now();
        let error = waiting.join().unwrap().expect_err("there is nobody");
        assert!(removed.elapsed() < PATIENCE, "it waits for its deadline");
        assert_eq!(error.kind(), ErrorKind::NotConnected, "{error}");
    });
}

#[test]
fn a_device_that_fails_ends_the_waits_for_clients() {
    for by_tasks in [false, true] {
        // A listener that is asked waits soon afterwards, or finds that the device has failed.
        let (asked, waits) = std::sync::mpsc::channel();
        let by_thread = |hub: &Hub| {
            let listener = Listener::bind(hub, "127.0.0.1:0")?;
            listener.set_deadline(Some(late()));
            asked.send(()).unwrap();
            listener.accept().map(drop)
        };
        let by_task = async |hub: &Hub| {
            let listener = tasks::Listener::bind(hub, "127.0.0.1:0").await?;
            asked.send(()).unwrap();
            listener.accept().await.map(drop)
        };
        try_removal(by_tasks, move |_| waits.recv().unwrap(), by_thread, by_task);
    }
}

#[test]
fn a_device_that_fails_ends_connects() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = silent.local_addr().unwrap();
    for by_tasks in [false, true] {
        let mut accepted = None;
        let wait = |_: &Hub| {
            let (mut stream, _) = silent.accept().unwrap();
            stream.read_exact(&mut [0]).unwrap();
            accepted = Some(stream);
        };
        let by_thread = |hub: &Hub| Stream::connect(hub, to, late()).map(drop);
        let by_task = async |hub: &Hub| tasks::Stream::connect(hub, to).await.map(drop);
        try_removal(by_tasks, wait, by_thread, by_task);
    }
}

#[test]
fn a_device_that_fails_ends_connects_while_tcp_waits() {
    let full = Full::new();
    for by_tasks in [false, true] {
        let by_thread = |hub: &Hub| Stream::connect(hub, full.to, late()).map(drop);
        let by_task = async |hub: &Hub| tasks::Stream::connect(hub, full.to).await.map(drop);
        try_removal(by_tasks, |_| full.wait_until_asked(), by_thread, by_task);
    }
}

/// Some drivers arm the queues of a device that has failed. The event file says so to those that wait.
#[test]
fn a_device_that_fails_and_can_be_armed_ends_streams() {
    for by_tasks in [false, true] {
        let host = Host::new();
        let fails = || {
            host.device.fail(Verb::QueryPort, 5, When::Before, 1000);
            host.device.make_up_event(AsyncEventKind::DeviceFatal, EventSubject::Device).unwrap();
        };
        let error = if by_tasks {
            runtime()
                .block_on(async {
                    let listener = tasks::Listener::bind(&host.hub, "127.0.0.1:0").await.unwrap();
                    let connects =
                        tasks::Stream::connect(&host.hub, listener.local_addr().unwrap());
                    let (one, other) = tokio::join!(connects, listener.accept());
                    let (mut one, _other) = (one.unwrap(), other.unwrap());
                    fails();
                    tokio::time::timeout(PATIENCE, one.read_u8()).await.expect("nobody is told")
                })
                .unwrap_err()
        } else {
            let listener = Listener::bind(&host.hub, "127.0.0.1:0").unwrap();
            let to = listener.local_addr().unwrap();
            thread::scope(|threads| {
                let connects = threads.spawn(|| Stream::connect(&host.hub, to, soon()).unwrap());
                let (mut other, _) = listener.accept().unwrap();
                let _one = connects.join().unwrap();
                other.set_read_timeout(Some(PATIENCE)).unwrap();
                let reads = threads.spawn(move || other.read(&mut [0]).unwrap_err());
                fails();
                reads.join().unwrap()
            })
        };
        assert_eq!(error.kind(), ErrorKind::NotConnected, "{error}");
    }
}
