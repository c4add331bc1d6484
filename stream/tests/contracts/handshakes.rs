//! A peer may be gone at any step of connecting, and a listener may be dropped meanwhile. Whoever waits hears of it, and its place
//! is free again.

use std::io::{self, BufRead as _, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::rdmacm::Route;
use ibverbs::{Channel, ProtectionDomain};
use ibverbs_stream::{Hub, Listener, Stream, tokio as tasks};
use tokio::io::AsyncReadExt as _;
use tokio::runtime::{Builder, Runtime};

use super::{Host, MANAGED, PATIENCE, managed_hub, rings, soon};

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

/// Whoever connects, or is accepted, hears that the peer is gone.
fn is_told(error: &io::Error) {
    let kind = error.kind();
    let is_reason = matches!(kind, ErrorKind::ConnectionReset | ErrorKind::ConnectionRefused);
    assert!(is_reason, "{kind:?}: {error}");
}

fn ends(connected: io::Result<Stream>) {
    is_told(&match connected {
        Ok(mut stream) => {
            stream.set_read_timeout(Some(PATIENCE)).unwrap();
            stream.read(&mut [0; 8]).unwrap_err()
        }
        Err(error) => error,
    });
}

async fn ends_for_a_task(connected: io::Result<tasks::Stream>) {
    is_told(&match connected {
        Ok(mut stream) => {
            let read = tokio::time::timeout(PATIENCE, stream.read_u8()).await;
            read.expect("it never ends").unwrap_err()
        }
        Err(error) => error,
    });
}

fn until_empty(hub: &Hub) {
    let until = soon();
    while hub.stats().connections > 0 {
        assert!(Instant::now() < until, "{hub:?}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Carries at most so many bytes, and returns how many it were. Then both ends are cut off, as if both peers had been killed.
fn carry(mut from: &TcpStream, mut to: &TcpStream, most: usize) -> usize {
    let (mut count, mut byte) = (0, [0; 1]);
    while count < most && matches!(from.read(&mut byte), Ok(1)) && to.write_all(&byte).is_ok() {
        count += 1;
    }
    for stream in [from, to] {
        let _ = stream.shutdown(Shutdown::Both);
    }
    count
}

/// Stands between a client and a server, until so many bytes of one of them have passed. Returns how many of each have.
fn between(clients: &TcpListener, server: SocketAddr, most: [usize; 2]) -> [usize; 2] {
    let (client, server) = (clients.accept().unwrap().0, TcpStream::connect(server).unwrap());
    for stream in [&client, &server] {
        stream.set_nodelay(true).unwrap();
    }
    thread::scope(|threads| {
        let there = threads.spawn(|| carry(&client, &server, most[0]));
        let back = carry(&server, &client, most[1]);
        [there.join().unwrap(), back]
    })
}

/// The bytes that each side says until both are connected.
const ALL: usize = 72;

/// Cuts the connection after each byte, or some of them, and after the last one.
fn cut_everywhere(
    step: usize,
    server: SocketAddr,
    connect: impl Fn(SocketAddr) + Sync,
    hubs: [&Hub; 2],
) {
    let clients = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = clients.local_addr().unwrap();
    let cut = |most| {
        thread::scope(|threads| {
            let connects = threads.spawn(|| connect(at));
            let carried = between(&clients, server, most);
            connects.join().unwrap();
            hubs.iter().for_each(|hub| until_empty(hub));
            carried
        })
    };
    for count in (0..=ALL).step_by(step) {
        assert_eq!(cut([count, usize::MAX])[0], count);
        assert_eq!(cut([usize::MAX, count])[1], count);
    }
}

#[test]
fn peers_that_are_gone_at_any_byte_of_the_exchange_are_noticed() {
    let hosts = [Host::new(), Host::new()];
    let hubs = [&hosts[0].hub, &hosts[1].hub];
    let listener = Listener::bind(hubs[1], "127.0.0.1:0").unwrap();
    thread::scope(|threads| {
        let to = listener.local_addr().unwrap();
        let accepts = threads.spawn(|| {
            listener.incoming().for_each(|stream| ends(Ok(stream.unwrap())));
        });
        cut_everywhere(1, to, |at| ends(Stream::connect(hubs[0], at, soon())), hubs);
        hubs[1].stop();
        accepts.join().unwrap();
    });
}

#[test]
fn tasks_notice_peers_that_are_gone_at_any_byte_of_the_exchange() {
    let hosts = [Host::new(), Host::new()];
    let hubs = [&hosts[0].hub, &hosts[1].hub];
    let runtime = runtime();
    let listener = runtime.block_on(tasks::Listener::bind(hubs[1], "127.0.0.1:0")).unwrap();
    let to = listener.local_addr().unwrap();
    let accepts = runtime.spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            ends_for_a_task(Ok(stream)).await;
        }
    });
    let connect = |at| {
        runtime
            .block_on(async { ends_for_a_task(tasks::Stream::connect(hubs[0], at).await).await });
    };
    cut_everywhere(3, to, connect, hubs);
    hubs[1].stop();
    runtime.block_on(accepts).unwrap();
}

/// This process is the one that is killed, in this role.
const VICTIM: &str = "IBVERBS_STREAM_HANDSHAKE_VICTIM";

/// Where it begins with a stream.
const BEGINS_AT: &str = "IBVERBS_STREAM_HANDSHAKE_BEGINS_AT";

/// Another process, which is killed.
struct Victim(Child);

impl Victim {
    /// Starts it, and returns what it says when it is where it is to be killed. Its device and that of this process share their rings
    /// by then.
    fn start(hub: &Hub, role: &str) -> (Self, String) {
        let listener = Listener::bind_rdmacm(hub, (MANAGED.address(), 0).into()).unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "handshakes::who_is_killed_while_the_manager_connects_is_noticed"])
            .arg("--nocapture")
            .env(VICTIM, role)
            .env(BEGINS_AT, listener.local_addr().unwrap().to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut victim = Self(child);
        listener.set_deadline(Some(soon()));
        let mut stream = listener.accept().unwrap().0;
        rings::wait_until_shared(&mut stream, victim.0.id());
        drop(stream);
        until_empty(hub);
        let mut lines = BufReader::new(victim.0.stdout.take().unwrap()).lines().map(Result::unwrap);
        let said = lines.find_map(|line| Some(line.strip_prefix("is at ")?.to_owned()));
        // The rest of its output goes nowhere.
        thread::spawn(move || lines.for_each(drop));
        (victim, said.expect("the other process has ended"))
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn is_killed_as(role: &str) {
    let hub = managed_hub(8);
    let begins_at = std::env::var(BEGINS_AT).unwrap();
    rings::echo(&mut Stream::connect_rdmacm(&hub, begins_at, soon()).unwrap());
    let kept: Box<dyn std::any::Any> = match role.split_once(' ') {
        // A client that has asked, or has connected and said nothing.
        Some((step, to)) => {
            let domain = ProtectionDomain::new(Arc::new(MANAGED.open().unwrap())).unwrap();
            let mut hello = b"ibvS\0\x01\0\0".to_vec();
            hello.extend([0, 0, 16, 0, 0, 8, 0, 0, 0, 0, 0, 15]);
            let route = Route::resolve(to.parse().unwrap(), soon()).unwrap();
            let channel = Channel::builder(&domain).port(route.port()).build().unwrap();
            let prepared = route.prepare(channel).map_err(|(.., error)| error).unwrap();
            let connecting = prepared.start(&hello).unwrap();
            println!("\nis at {step}");
            match step {
                "asked" => Box::new(connecting.finish(soon()).is_ok()),
                _ => {
                    let _connection = connecting.finish(soon()).unwrap();
                    thread::sleep(PATIENCE);
                    return;
                }
            }
        }
        None => {
            let listener = Listener::bind_rdmacm(&hub, (MANAGED.address(), 0).into()).unwrap();
            println!("\nis at {}", listener.local_addr().unwrap());
            if role == "accepts" {
                Box::new(listener.accept().unwrap())
            } else {
                Box::new(listener)
            }
        }
    };
    thread::sleep(PATIENCE);
    drop(kept);
}

/// Accepts a client before this time, says that it has, and reads until the stream ends.
type Accepts = Box<dyn Fn(Instant, &mpsc::Sender<()>) -> io::Result<()>>;

#[test]
fn who_is_killed_while_the_manager_connects_is_noticed() {
    if let Ok(role) = std::env::var(VICTIM) {
        return is_killed_as(&role);
    }
    let hub = managed_hub(8);
    let runtime = runtime();
    // The server, when nobody was answered, and when it has accepted.
    for role in ["listens", "accepts"] {
        let (mut server, at) = Victim::start(&hub, role);
        let at: SocketAddr = at.parse().unwrap();
        thread::scope(|threads| {
            // A task has the connection manager's own deadline, or that which it gives itself.
            let until =
                if role == "accepts" { soon() } else { Instant::now() + Duration::from_secs(2) };
            let client = &hub;
            let connected = threads.spawn(move || Stream::connect_rdmacm(client, at, until));
            if role == "accepts" {
                let mut stream = connected.join().unwrap().unwrap();
                let reads = threads.spawn(move || stream.read(&mut [0; 8]).unwrap_err());
                server.kill();
                is_told(&reads.join().unwrap());
            } else {
                thread::sleep(Duration::from_millis(20));
                server.kill();
                let kind = connected.join().unwrap().unwrap_err().kind();
                let is_reason = matches!(
                    kind,
                    ErrorKind::TimedOut | ErrorKind::ConnectionRefused | ErrorKind::HostUnreachable
                );
                assert!(is_reason, "{kind:?}");
            }
        });
        until_empty(&hub);
    }
    // The client, when it was not answered, and when it has said nothing yet.
    for by_tasks in [false, true] {
        for step in ["asked", "connected"] {
            let at = (MANAGED.address(), 0).into();
            let accepts: Accepts;
            let to = if by_tasks {
                let listener = runtime.block_on(async { tasks::Listener::bind_rdmacm(&hub, at) });
                let listener = listener.unwrap();
                let (to, runtime) = (listener.local_addr().unwrap(), runtime.handle().clone());
                accepts = Box::new(move |until, has_accepted: &mpsc::Sender<()>| {
                    runtime.block_on(async {
                        let accepted = tokio::time::timeout_at(until.into(), listener.accept());
                        let accepted = accepted.await.map_err(|_| ErrorKind::WouldBlock)??;
                        let _ = has_accepted.send(());
                        ends_for_a_task(Ok(accepted.0)).await;
                        Ok(())
                    })
                });
                to
            } else {
                let listener = Listener::bind_rdmacm(&hub, at).unwrap();
                let to = listener.local_addr().unwrap();
                accepts = Box::new(move |until, has_accepted: &mpsc::Sender<()>| {
                    listener.set_deadline(Some(until));
                    let accepted = listener.accept()?.0;
                    let _ = has_accepted.send(());
                    ends(Ok(accepted));
                    Ok(())
                });
                to
            };
            let (mut client, _) = Victim::start(&hub, &format!("{step} {to}"));
            thread::scope(|threads| {
                let (has_accepted, accepted) = mpsc::channel();
                let killed = threads.spawn(move || {
                    if step == "connected" {
                        let _ = accepted.recv();
                        // The server reads meanwhile, or soon.
                        thread::sleep(Duration::from_millis(20));
                    }
                    client.kill();
                });
                if step == "asked" {
                    killed.join().unwrap();
                }
                let until = soon();
                loop {
                    assert!(Instant::now() < until, "{hub:?}");
                    match accepts(Instant::now() + Duration::from_millis(10), &has_accepted) {
                        Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
                        Ok(()) => break,
                    }
                    if step == "asked" && hub.stats().connections == 0 {
                        break;
                    }
                }
            });
            until_empty(&hub);
        }
    }
}

/// Clients are in the middle of connecting, and nobody accepts them any more.
#[test]
fn a_listener_that_is_dropped_leaves_no_client_waiting() {
    let [hub, client] = [(); 2].map(|()| managed_hub(8));
    let (local, at) = ("127.0.0.1:0", (MANAGED.address(), 0).into());
    let runtime = runtime();
    for over_tcp in [true, false] {
        for by_tasks in [false, true] {
            let listener: Box<dyn std::any::Any>;
            let to = match (by_tasks, over_tcp) {
                (true, _) => {
                    let bound = runtime.block_on(async {
                        match over_tcp {
                            true => tasks::Listener::bind(&hub, local).await,
                            false => tasks::Listener::bind_rdmacm(&hub, at),
                        }
                    });
                    let bound = Arc::new(bound.unwrap());
                    let (to, accepts) = (bound.local_addr().unwrap(), bound.clone());
                    // A task is accepting until it is given up, too.
                    let task = runtime.spawn(async move { drop(accepts.accept().await) });
                    listener = Box::new((bound, task));
                    to
                }
                (false, true) => {
                    let bound = Listener::bind(&hub, local).unwrap();
                    let to = bound.local_addr().unwrap();
                    listener = Box::new(bound);
                    to
                }
                (false, false) => {
                    let bound = Listener::bind_rdmacm(&hub, at).unwrap();
                    let to = bound.local_addr().unwrap();
                    listener = Box::new(bound);
                    to
                }
            };
            let begun = over_tcp.then(|| {
                let mut begun = TcpStream::connect(to).unwrap();
                begun.write_all(b"ibverbs\x01\0\x23\0\x14").unwrap();
                begun
            });
            // A client that is being connected has a place.
            let until = soon();
            while over_tcp && hub.stats().connections == 0 {
                assert!(Instant::now() < until);
                if let Some(listener) = listener.downcast_ref::<Listener>() {
                    listener.set_deadline(Some(Instant::now() + Duration::from_millis(1)));
                    assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
                }
                thread::sleep(Duration::from_millis(1));
            }
            thread::scope(|threads| {
                let connects = threads.spawn(|| match over_tcp {
                    true => Stream::connect(&client, to, soon()),
                    false => Stream::connect_rdmacm(&client, to, soon()),
                });
                thread::sleep(Duration::from_millis(20));
                if let Ok(tasks) = listener.downcast::<(Arc<tasks::Listener>, _)>() {
                    let (listener, task): (_, tokio::task::JoinHandle<()>) = *tasks;
                    task.abort();
                    drop(listener);
                }
                // The task may have accepted it before.
                match connects.join().unwrap().and_then(|mut stream| stream.read(&mut [0; 8])) {
                    Ok(count) => assert!(by_tasks && count == 0),
                    Err(error) => is_told(&error),
                }
            });
            if let Some(mut begun) = begun {
                begun.set_read_timeout(Some(PATIENCE)).unwrap();
                let mut rest = Vec::new();
                match begun.read_to_end(&mut rest) {
                    Ok(_) => {}
                    Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset),
                }
            }
            for hub in [&hub, &client] {
                until_empty(hub);
            }
        }
    }
}

#[test]
fn a_host_that_is_not_found_is_named() {
    let host = Host::new();
    let runtime = runtime();
    // No name is so long, so that nobody is asked for it.
    let name = "x".repeat(64);
    let at = (&name[..], 1);
    let errors = [
        Stream::connect(&host.hub, at, soon()).map(drop),
        Stream::connect_rdmacm(&host.hub, at, soon()).map(drop),
        Listener::bind(&host.hub, at).map(drop),
        runtime.block_on(tasks::Stream::connect(&host.hub, at)).map(drop),
        runtime.block_on(tasks::Stream::connect_rdmacm(&host.hub, at)).map(drop),
        runtime.block_on(tasks::Listener::bind(&host.hub, at)).map(drop),
    ];
    for error in errors {
        let error = error.unwrap_err().to_string();
        assert!(error.contains(&name), "{error}");
    }
}

/// The first address of a name takes the connection, and then says nothing, or closes it. The second one has a listener.
#[test]
fn an_address_that_is_no_stream_leaves_the_time_of_the_others_to_them() {
    let (host, peer) = (Host::new(), Host::new());
    let listener = Listener::bind(&peer.hub, "127.0.0.1:0").unwrap();
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let addresses = [other.local_addr().unwrap(), listener.local_addr().unwrap()];
    let by_thread = |deadline| Stream::connect(&host.hub, &addresses[..], deadline)?.peer_addr();
    let connected = thread::scope(|threads| {
        threads.spawn(|| while listener.accept().is_ok() {});
        let closes = threads.spawn(|| (0..2).for_each(|_| drop(other.accept().unwrap())));
        let by_task =
            async { tasks::Stream::connect(&host.hub, &addresses[..]).await?.peer_addr() };
        let mut connected = vec![by_thread(soon()), runtime().block_on(by_task)];
        closes.join().unwrap();
        // Now nobody accepts there. Half of this time is the first address's.
        connected.push(by_thread(Instant::now() + Duration::from_secs(20)));
        peer.hub.stop();
        connected
    });
    for peer in connected {
        assert_eq!(peer.unwrap(), addresses[1]);
    }
}

#[test]
fn a_peer_that_does_not_answer_by_the_deadline_is_named() {
    let host = Host::new();
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let to = silent.local_addr().unwrap();
    let until = Instant::now() + Duration::from_millis(50);
    let error = Stream::connect(&host.hub, to, until).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(error.to_string().contains(&to.to_string()), "{error}");
}

#[test]
fn a_client_that_reaches_another_device_than_the_hubs_is_told_so() {
    let (host, client) = (Host::new(), managed_hub(8));
    let listener = Listener::bind_rdmacm(&host.hub, (MANAGED.address(), 0).into()).unwrap();
    let to = listener.local_addr().unwrap();
    thread::scope(|threads| {
        let accepts = threads.spawn(|| listener.accept().map(drop));
        let connected = Stream::connect_rdmacm(&client, to, soon());
        host.hub.stop();
        accepts.join().unwrap().unwrap_err();
        let error = connected.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
        assert!(error.to_string().contains("another device of the peer"), "{error}");
    });
}
