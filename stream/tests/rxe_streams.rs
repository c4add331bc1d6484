//! Streams on `rxe0`: the kernel's Soft-RoCE in the virtual machine of `script/vm`, elsewhere a device of software with that name;
//! and on Soft-iWARP in the machine of `script/vm --siw`. Most are connected by the connection manager.

#[path = "support/rings.rs"]
mod rings;

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::rdmacm::{self, Route};
use ibverbs::{Channel, Context, ProtectionDomain};
use ibverbs_software::Device;
use ibverbs_stream::{Hub, HubBuilder, Listener, Stream, StreamError, tokio as tasks};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const PATIENCE: Duration = Duration::from_secs(120);

fn soon() -> Instant {
    Instant::now() + PATIENCE
}

/// `None` in the virtual machine.
fn software() -> Option<&'static Device> {
    static DEVICE: OnceLock<Option<Device>> = OnceLock::new();
    let make = || {
        let device = Device::builder().name("rxe0").build().unwrap();
        device.register();
        device
    };
    DEVICE.get_or_init(|| std::env::var_os("IBVERBS_VM").is_none().then(make)).as_ref()
}

fn is_iwarp() -> bool {
    Path::new("/sys/class/infiniband/siw0").exists()
}

fn context() -> Arc<Context<'static>> {
    software();
    Arc::new(ibverbs::open(if is_iwarp() { "siw0" } else { "rxe0" }).unwrap())
}

fn hub(set: fn(HubBuilder) -> HubBuilder) -> Hub {
    set(Hub::builder(&context()).max_connections(8)).build().unwrap()
}

/// The address of the device, with this port.
fn address(port: u16) -> SocketAddr {
    let address = software().map_or(IpAddr::V4(Ipv4Addr::new(10, 77, 0, 1)), Device::address);
    SocketAddr::new(address, port)
}

fn data(len: usize) -> Vec<u8> {
    (0..len).map(|index| (index * 7 + index / 251) as u8).collect()
}

fn pair(one: &Hub, listener: &Listener, to: SocketAddr) -> (Stream, Stream) {
    thread::scope(|threads| {
        let connects = threads.spawn(|| Stream::connect_rdmacm(one, to, soon()).unwrap());
        let (two, from) = listener.accept().unwrap();
        let one = connects.join().unwrap();
        assert_eq!(one.peer_addr().unwrap(), to);
        assert_eq!((one.local_addr().unwrap(), two.peer_addr().unwrap()), (from, from));
        (one, two)
    })
}

/// The streams have ended on both sides, and have given everything back.
fn nothing_is_left(hubs: &[&Hub]) {
    let until = soon();
    while hubs.iter().any(|hub| hub.stats().connections > 0) {
        assert!(Instant::now() < until, "{hubs:?}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// The side that accepts writes first in one, the other one in the other.
#[test]
fn threads_connect_by_an_address_of_the_device() {
    let small = |hub: HubBuilder| hub.chunk(1024).receives(2).sends(2);
    let shared = |hub: HubBuilder| hub.chunk(1024).receives(4).shared_receives(16);
    for set in [small as fn(HubBuilder) -> HubBuilder, shared] {
        let hubs = [hub(set), hub(set)];
        let mut places = vec![(address(0).ip(), address(0).ip())];
        places.push((IpAddr::V4(Ipv4Addr::UNSPECIFIED), address(0).ip()));
        if software().is_some() {
            // No device of the kernel has this address.
            places.push((IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::LOCALHOST)));
        }
        for (bound, asked) in places {
            let listener = Listener::bind_rdmacm(&hubs[1], (bound, 0).into()).unwrap();
            let port = listener.local_addr().unwrap().port();
            assert_ne!(port, 0);
            for accepter_is_first in [true, false] {
                let (one, two) = pair(&hubs[0], &listener, (asked, port).into());
                let [mut writes, mut reads] =
                    if accepter_is_first { [two, one] } else { [one, two] };
                let all = data(100_000);
                thread::scope(|threads| {
                    threads.spawn(|| {
                        writes.write_all(&all).unwrap();
                        writes.shutdown(Shutdown::Write).unwrap();
                        let mut back = Vec::new();
                        writes.read_to_end(&mut back).unwrap();
                        assert!(back == all[..7777]);
                        drop(writes);
                    });
                    let mut got = Vec::new();
                    reads.read_to_end(&mut got).unwrap();
                    assert!(got == all);
                    reads.write_all(&got[..7777]).unwrap();
                    drop(reads);
                });
            }
        }
        nothing_is_left(&[&hubs[0], &hubs[1]]);
    }
}

/// This test needs no connection manager, and no address that it knows.
#[test]
fn threads_connect_over_tcp() {
    let hubs = [hub(|hub| hub), hub(|hub| hub)];
    let listener = Listener::bind(&hubs[1], "127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    let all = data(100_000);
    thread::scope(|threads| {
        let connects = threads.spawn(|| Stream::connect(&hubs[0], to, soon()));
        listener.set_deadline(Some(soon()));
        if is_iwarp() {
            while !connects.is_finished() {
                listener.set_deadline(Some(Instant::now() + Duration::from_millis(5)));
                assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
            }
            let error = connects.join().unwrap().unwrap_err();
            assert!(error.to_string().contains("connection manager"), "{error}");
            return;
        }
        let (mut two, _) = listener.accept().unwrap();
        let mut one = connects.join().unwrap().unwrap();
        let all = &all;
        threads.spawn(move || {
            let mut got = Vec::new();
            two.read_to_end(&mut got).unwrap();
            assert!(got == *all);
        });
        one.write_all(all).unwrap();
        one.shutdown(Shutdown::Write).unwrap();
        assert_eq!(one.read(&mut [0; 8]).unwrap(), 0);
    });
    nothing_is_left(&[&hubs[0], &hubs[1]]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tasks_connect_by_an_address_of_the_device() {
    let test = async {
        let hubs = [hub(|hub| hub), hub(|hub| hub.chunk(2048))];
        let listener = tasks::Listener::bind_rdmacm(&hubs[1], address(0)).unwrap();
        let to = listener.local_addr().unwrap();
        let echoes = tokio::spawn(async move {
            for _ in 0..4 {
                let (stream, _) = listener.accept().await.unwrap();
                tokio::spawn(async move {
                    let (mut read, mut write) = stream.into_split();
                    tokio::io::copy(&mut read, &mut write).await.unwrap();
                    write.shutdown().await.unwrap();
                });
            }
        });
        let asks = (0..4).map(|n| {
            let hub = hubs[0].clone();
            tokio::spawn(async move {
                let stream = tasks::Stream::connect_rdmacm(&hub, to).await.unwrap();
                assert_eq!(stream.peer_addr().unwrap(), to);
                let (mut read, mut write) = stream.into_split();
                let all = data(50_000 + n);
                let sent = all.clone();
                let writes = tokio::spawn(async move {
                    write.write_all(&sent).await.unwrap();
                    write.shutdown().await.unwrap();
                });
                let mut back = Vec::new();
                read.read_to_end(&mut back).await.unwrap();
                assert!(back == all);
                writes.await.unwrap();
            })
        });
        for ask in asks.collect::<Vec<_>>() {
            ask.await.unwrap();
        }
        echoes.await.unwrap();
        while hubs.iter().any(|hub| hub.stats().connections > 0) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, test).await.expect("it never ends");
}

/// A client that is refused costs nothing: the hub has its room and its buffers afterwards.
#[test]
fn who_is_refused_hears_of_it_and_leaves_nothing() {
    let hubs = [hub(|hub| hub), hub(|hub| hub.max_connections(1))];
    let listener = Listener::bind_rdmacm(&hubs[1], address(0)).unwrap();
    let to = listener.local_addr().unwrap();
    let nobody = {
        let gone = rdmacm::Listener::bind(address(0)).unwrap();
        gone.local_addr().unwrap()
    };
    for _ in 0..10 {
        let error = Stream::connect_rdmacm(&hubs[0], nobody, soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{error}");
    }
    let late = Stream::connect_rdmacm(&hubs[0], to, Instant::now()).unwrap_err();
    assert_eq!(late.kind(), ErrorKind::TimedOut);
    let (one, two) = pair(&hubs[0], &listener, to);
    thread::scope(|threads| {
        // The hub has no room for a second stream, and another program's connection is no stream.
        let refused = threads.spawn(|| {
            for _ in 0..3 {
                let error = Stream::connect_rdmacm(&hubs[0], to, soon()).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{error}");
            }
            let route = Route::resolve(to, soon()).unwrap();
            let domain = ProtectionDomain::new(context()).unwrap();
            let channel = Channel::builder(&domain).port(route.port()).build().unwrap();
            let error = route.connect(channel, b"something else", soon()).unwrap_err();
            assert!(matches!(error, rdmacm::ConnectionError::Rejected(_)), "{error}");
        });
        while !refused.is_finished() {
            listener.set_deadline(Some(Instant::now() + Duration::from_millis(5)));
            assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        }
        refused.join().unwrap();
    });
    listener.set_deadline(None);
    thread::scope(|threads| {
        threads.spawn(|| drop(one));
        drop(two);
    });
    nothing_is_left(&[&hubs[0], &hubs[1]]);
    let (one, two) = pair(&hubs[0], &listener, to);
    thread::scope(|threads| {
        threads.spawn(|| drop(one));
        drop(two);
    });
    nothing_is_left(&[&hubs[0], &hubs[1]]);
}

/// One client has begun and does not go on; one is connected and says nothing. They keep nobody waiting, and the second one,
/// of which it would not be known whether it receives, is given up.
#[test]
fn a_silent_client_costs_its_own_stream_alone() {
    let set = |hub: HubBuilder| hub.keep_alive(Duration::from_millis(50));
    let hubs = [hub(|hub| hub), hub(set)];
    let listener = Listener::bind_rdmacm(&hubs[1], address(0)).unwrap();
    let to = listener.local_addr().unwrap();
    let domain = ProtectionDomain::new(context()).unwrap();
    let mut hello = b"ibvS\0\x01\0\0".to_vec();
    hello.extend([0, 0, 16, 0, 0, 8, 0, 0, 0, 0, 0, 15]);
    let begin = || {
        let route = Route::resolve(to, soon()).unwrap();
        let channel = Channel::builder(&domain).port(route.port()).build().unwrap();
        route.prepare(channel).map_err(|(.., error)| error).unwrap().start(&hello).unwrap()
    };
    // On iWARP it is connected as soon as it was answered.
    let stands_still = (!is_iwarp()).then(begin);
    let (one, mut two) = pair(&hubs[0], &listener, to);
    let silent = begin();
    let (_silent, mut accepted) = thread::scope(|threads| {
        let finishes = threads.spawn(|| silent.finish(soon()).unwrap());
        let accepted = listener.accept().unwrap().0;
        (finishes.join().unwrap(), accepted)
    });
    // The silent client has not said that its receives are there.
    accepted.write_all(b"waits").unwrap_err();
    let error = accepted.read(&mut [0; 8]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(accepted.take_error(), Some(StreamError::TimedOut));
    (&one).write_all(b"honest").unwrap();
    two.read_exact(&mut [0; 6]).unwrap();
    // A client that gives up leaves its place.
    drop((stands_still, accepted));
    let until = soon();
    while hubs[1].stats().connections > 1 {
        assert!(Instant::now() < until, "{:?}", hubs[1]);
        listener.set_deadline(Some(Instant::now() + Duration::from_millis(5)));
        assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    }
}

/// This test is the peer, too: it runs itself, and kills that.
#[test]
fn a_peer_that_is_killed_resets_its_streams() {
    if let Ok(to) = std::env::var("IBVERBS_STREAM_VICTIM") {
        let hub = hub(|hub| hub);
        let mut stream = Stream::connect_rdmacm(&hub, to, soon()).unwrap();
        stream.write_all(b"hello").unwrap();
        return rings::echo(&mut stream);
    }
    let hub = hub(|hub| hub);
    let listener = Listener::bind_rdmacm(&hub, address(0)).unwrap();
    let mut victim = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_peer_that_is_killed_resets_its_streams"])
        .env("IBVERBS_STREAM_VICTIM", listener.local_addr().unwrap().to_string())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let (mut stream, _) = listener.accept().unwrap();
    let mut got = [0; 5];
    stream.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"hello");
    if software().is_some() {
        rings::wait_until_shared(&mut stream, victim.id());
    }
    victim.kill().unwrap();
    victim.wait().unwrap();
    let error = stream.read(&mut got).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
}
