//! Clients are accepted in the order in which they came, however slow the machine is, and as many as there is room for: in tests,
//! a client waits long for another one.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Barrier, mpsc};
use std::time::{Duration, Instant};
use std::{iter, thread};

use ibverbs::tcp::DeadlineStream;
use ibverbs_software::Device;

use crate::{Hub, Listener, Refusal, Role, Stream, StreamError};

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(120)
}

/// Says when the client has spoken. Its last word, which connects it, follows that of one that came later.
struct Speaks {
    stream: TcpStream,
    has_spoken: bool,
    says: mpsc::Sender<()>,
    later: Option<mpsc::Receiver<()>>,
}

impl Read for Speaks {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.stream.read(bytes)
    }
}

impl Write for Speaks {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.has_spoken
            && let Some(later) = self.later.take()
        {
            later.recv().unwrap();
        }
        self.has_spoken = true;
        let written = self.stream.write(bytes);
        // Nobody listens to the client that came first.
        let _ = self.says.send(());
        written
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

impl DeadlineStream for Speaks {
    fn set_deadline(&mut self, deadline: Option<Instant>) -> io::Result<()> {
        self.stream.set_deadline(deadline)
    }
}

impl AsFd for Speaks {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

fn hub() -> Hub {
    hub_of(16)
}

fn hub_of(most: u32) -> Hub {
    let context = Device::new().unwrap().open().unwrap();
    Hub::builder(&Arc::new(context)).max_connections(most).build().unwrap()
}

type Client = (SocketAddr, thread::JoinHandle<Stream>);

/// Clients that have come in this order, have spoken in another one, and wait for the server.
fn clients(hub: &Hub, address: SocketAddr) -> Vec<Client> {
    let arrived: Vec<_> = (0..8).map(|_| TcpStream::connect(address).unwrap()).collect();
    let mut later = None;
    let speak = |stream: TcpStream| {
        let (from, hub) = (stream.local_addr().unwrap(), hub.clone());
        let (says, said) = mpsc::channel();
        let stream = Speaks { stream, has_spoken: false, says, later: later.take() };
        let connects = move || Stream::over(&hub, stream, Role::Connects, soon()).unwrap();
        let client = (from, thread::spawn(connects));
        said.recv().unwrap();
        later = Some(said);
        client
    };
    let mut clients: Vec<_> = arrived.into_iter().rev().map(speak).collect();
    clients.reverse();
    clients
}

fn are_in_order(clients: Vec<Client>, accepted: Vec<(impl Sized, SocketAddr)>) {
    for ((own, client), (_, from)) in clients.into_iter().zip(&accepted) {
        assert_eq!(own, *from);
        drop(client.join().unwrap());
    }
}

#[test]
fn clients_are_accepted_in_the_order_in_which_they_came() {
    let hubs = [hub(), hub()];
    let listener = Listener::bind(&hubs[1], "127.0.0.1:0").unwrap();
    let connecting = clients(&hubs[0], listener.local_addr().unwrap());
    let accepted = connecting.iter().map(|_| listener.accept().unwrap()).collect();
    are_in_order(connecting, accepted);
}

#[cfg(feature = "tokio")]
#[test]
fn tasks_accept_clients_in_the_order_in_which_they_came() {
    let runtime = ::tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let hubs = [hub(), hub()];
        let listener = crate::tokio::Listener::bind(&hubs[1], "127.0.0.1:0").await.unwrap();
        let connecting = clients(&hubs[0], listener.local_addr().unwrap());
        let mut accepted = Vec::new();
        for _ in &connecting {
            accepted.push(listener.accept().await.unwrap());
        }
        are_in_order(connecting, accepted);
    });
}

/// 300 clients connect at the same instant. As many as there is room for are connected, and the others hear why they are not.
/// The server sends what it accepts.
fn all_at_once<T>(server: &Hub, address: SocketAddr, accepted: &mpsc::Receiver<T>) {
    let room = server.inner.config.max_connections as usize;
    let (hub, start) = (hub_of(300), Barrier::new(300));
    let connect = || {
        start.wait();
        Stream::connect(&hub, address, soon())
    };
    let connected: Vec<_> = thread::scope(|threads| {
        let clients: Vec<_> = (0..300).map(|_| threads.spawn(connect)).collect();
        clients.into_iter().map(|client| client.join().unwrap()).collect()
    });
    let next = || accepted.recv_timeout(Duration::from_secs(120)).ok();
    let streams: Vec<_> = iter::from_fn(next).take(connected.iter().flatten().count()).collect();
    server.stop();
    let mut refused = 0;
    for error in connected.iter().filter_map(|connected| connected.as_ref().err()) {
        let reason = error.get_ref().and_then(|inner| inner.downcast_ref());
        assert_eq!(reason, Some(&StreamError::Refused(Refusal::Full)), "{error:?}");
        refused += 1;
    }
    assert_eq!((streams.len(), server.stats().refused), (room, refused as u64));
}

#[test]
fn clients_that_come_all_at_once_connect_as_far_as_there_is_room() {
    for room in [300, 227] {
        let server = hub_of(room);
        let listener = Listener::bind(&server, "127.0.0.1:0").unwrap();
        let (accepts, accepted) = mpsc::channel();
        thread::scope(|threads| {
            threads.spawn(|| {
                while let Ok((stream, _)) = listener.accept() {
                    accepts.send(stream).unwrap();
                }
            });
            all_at_once(&server, listener.local_addr().unwrap(), &accepted);
        });
    }
}

#[cfg(feature = "tokio")]
#[test]
fn tasks_have_all_clients_connect_at_once_as_far_as_there_is_room() {
    let runtime = ::tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    for room in [300, 227] {
        let server = hub_of(room);
        let listener = runtime.block_on(crate::tokio::Listener::bind(&server, "127.0.0.1:0"));
        let listener = listener.unwrap();
        let address = listener.local_addr().unwrap();
        let (accepts, accepted) = mpsc::channel();
        runtime.spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                accepts.send(stream).unwrap();
            }
        });
        all_at_once(&server, address, &accepted);
    }
}
