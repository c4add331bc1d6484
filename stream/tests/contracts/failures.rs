//! Peers that die, stay silent, or do not keep the rules; networks that lose.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::{AccessFlags, BufferPool, Channel, ProtectionDomain, settings::MaxRnrRetries};
use ibverbs_software::Device;
use ibverbs_stream::{Hub, HubBuilder, Listener, Role, Stream, StreamError};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::{Host, PATIENCE, data, soon};

/// A hello, as bytes.
fn hello(chunk: u32, receives: u16) -> Vec<u8> {
    let mut bytes = b"ibvS\0\x01\0\0".to_vec();
    bytes.extend(chunk.to_be_bytes());
    bytes.extend(receives.to_be_bytes());
    bytes.extend([0, 0, 0, 0, 0, 15]);
    bytes
}

/// A peer that sends messages of its own making.
struct Hostile {
    channel: Channel<'static>,
    pool: BufferPool,
    _device: Device,
}

impl Hostile {
    /// Connects to a listener, with this hello.
    fn connect(address: std::net::SocketAddr, hello: &[u8]) -> Self {
        let device = Device::new().unwrap();
        let domain = Arc::new(ProtectionDomain::new(Arc::new(device.open().unwrap())).unwrap());
        let pool = BufferPool::new(&domain, 4096, 16, AccessFlags::empty()).unwrap();
        let builder = Channel::builder(&domain).max_rnr_retries(MaxRnrRetries::UNLIMITED);
        let prepared = builder.max_send_wr(16).build().unwrap();
        let (channel, _) = prepared.connect(address, hello, soon()).unwrap();
        Self { channel, pool, _device: device }
    }

    /// Returns whether the message has arrived.
    fn send(&mut self, header: u32, data: &[u8]) -> bool {
        let mut buffer = self.pool.take_from(&header.to_be_bytes()).unwrap().unwrap();
        buffer.extend_from_slice(data).unwrap();
        self.channel.until(soon()).send(&buffer).is_ok()
    }
}

#[test]
fn a_hostile_peer_loses_its_own_stream_alone() {
    let set = |hub: HubBuilder| hub.chunk(1024).receives(2);
    let host = Host::with(set);
    let listener = Listener::bind(&host.hub, "127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let honest_host = Host::with(set);
    let mut honest = thread::scope(|threads| {
        let connects = threads.spawn(|| Stream::connect(&honest_host.hub, address, soon()));
        let accepted = listener.accept().unwrap().0;
        (connects.join().unwrap().unwrap(), accepted)
    });
    type Attack = (&'static str, fn(&mut Hostile));
    let attacks: [Attack; 7] = [
        ("a header has bits", |peer| {
            let _ = peer.send(0x0100_0000, b"x");
        }),
        ("shorter than its header", |peer| {
            let buffer = peer.pool.take_from(&[0; 3]).unwrap().unwrap();
            let _ = peer.channel.until(soon()).send(&buffer);
        }),
        ("without a credit", |peer| {
            (0..3).for_each(|_| {
                let _ = peer.send(0, b"x");
            })
        }),
        ("more credits", |peer| {
            let _ = peer.send(9, b"");
        }),
        ("an end that was not sent", |peer| {
            let _ = peer.send(1 << 27, b"");
        }),
        ("after the end", |peer| {
            (0..2).for_each(|_| {
                let _ = peer.send(1 << 31, b"x");
            })
        }),
        ("after it was closed", |peer| {
            (0..2).for_each(|_| {
                let _ = peer.send(3 << 30, b"");
            })
        }),
    ];
    for (text, attack) in attacks {
        let (done, is_done) = mpsc::channel::<()>();
        let (attacks, attacked) = mpsc::channel();
        thread::scope(|threads| {
            threads.spawn(move || {
                let mut peer = Hostile::connect(address, &hello(4096, 8));
                attack(&mut peer);
                attacks.send(()).unwrap();
                // The peer stays, so that nothing else ends the stream.
                let _ = is_done.recv();
            });
            let (mut stream, _) = listener.accept().unwrap();
            // The attack ends before the stream reads, which would give credits.
            attacked.recv().unwrap();
            // The stream notices the fault only when it is read.
            let error = loop {
                match stream.read(&mut [0; 64]) {
                    Ok(0) => stream.set_read_timeout(Some(Duration::from_millis(1))).unwrap(),
                    Ok(_) => {}
                    Err(error) => break error,
                }
                if let Some(error) = stream.take_error() {
                    break error.into();
                }
            };
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{text}: {error}");
            assert!(error.to_string().contains(text), "{text}: {error}");
            let kind = stream.write(b"x").unwrap_err().kind();
            assert!(matches!(kind, ErrorKind::InvalidData | ErrorKind::BrokenPipe), "{kind:?}");
            drop(done);
        });
        honest.0.write_all(b"hello").unwrap();
        let mut got = [0; 5];
        honest.1.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"hello");
    }
    // A message that is longer than a buffer ends the connection on both sides.
    thread::scope(|threads| {
        threads.spawn(|| {
            let mut peer = Hostile::connect(address, &hello(4096, 8));
            assert!(!peer.send(0, &[0; 1021]));
        });
        let (mut stream, _) = listener.accept().unwrap();
        let error = stream.read(&mut [0; 64]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    });
}

#[test]
fn a_client_that_is_no_stream_is_no_error_of_the_listener() {
    let hosts = [Host::new(), Host::new()];
    let listener = Listener::bind(&hosts[0].hub, "127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // One client is silent, one is another program, one has another hello.
    let silent = TcpStream::connect(address).unwrap();
    TcpStream::connect(address).unwrap().write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    thread::scope(|threads| {
        // These clients get no stream, whatever their own side says.
        let others = [b"something else".to_vec(), hello(4096, 0)]
            .map(|hello| threads.spawn(move || drop(Hostile::connect(address, &hello))));
        while others.iter().any(|other| !other.is_finished()) {
            listener.set_deadline(Some(Instant::now() + Duration::from_millis(1)));
            assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
        }
        listener.set_deadline(None);
        let connects = threads.spawn(|| Stream::connect(&hosts[1].hub, address, soon()));
        let (two, _) = listener.accept().unwrap();
        let one = connects.join().unwrap().unwrap();
        assert_eq!(one.local_addr().unwrap(), two.peer_addr().unwrap());
    });
    listener.set_deadline(Some(Instant::now()));
    assert_eq!(listener.accept().unwrap_err().kind(), ErrorKind::WouldBlock);
    drop(silent);
    drop(listener);
    while hosts.iter().any(|host| host.hub.stats().connections > 0) {
        thread::yield_now();
    }
}

/// More clients than the hub has places: they say nothing, or begin to and do not go on.
#[test]
fn clients_that_say_too_little_take_no_place_of_others() {
    let hosts = [Host::new(), Host::new()];
    let listener = Listener::bind(&hosts[0].hub, "127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    listener.set_deadline(Some(soon()));
    let mut streams = Vec::new();
    for says in [&b""[..], b"i", b"ibverbs\x01\0\x23\0\x14"] {
        let _mute: Vec<_> = (0..20)
            .map(|_| {
                let mut mute = TcpStream::connect(address).unwrap();
                mute.write_all(says).unwrap();
                mute
            })
            .collect();
        thread::scope(|threads| {
            let connects = threads.spawn(|| Stream::connect(&hosts[1].hub, address, soon()));
            let (mut two, _) = listener.accept().unwrap();
            two.write_all(b"hello").unwrap();
            let mut one = connects.join().unwrap().unwrap();
            one.read_exact(&mut [0; 5]).unwrap();
            streams.push((one, two));
        });
        let places = hosts[0].hub.stats().connections as usize;
        assert!(places == streams.len() || !says.is_empty(), "{places} places are taken");
    }
}

#[test]
fn what_cannot_be_connected_says_why() {
    let host = Host::new();
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap();
    drop(free);
    let error = Stream::connect(&host.hub, address, soon()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for wrong in ["127.0.0.1", "127.0.0.1:port", "[::1]"] {
        for error in [
            Stream::connect(&host.hub, wrong, soon()).unwrap_err(),
            Listener::bind(&host.hub, wrong).unwrap_err(),
            runtime.block_on(ibverbs_stream::tokio::Stream::connect(&host.hub, wrong)).unwrap_err(),
            runtime.block_on(ibverbs_stream::tokio::Listener::bind(&host.hub, wrong)).unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert!(error.to_string().contains("the address is HOST:PORT"), "{error}");
        }
    }
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let at_once = Instant::now() + Duration::from_millis(20);
    let error = Stream::connect(&host.hub, silent.local_addr().unwrap(), at_once).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    // Closed before it was connected.
    thread::scope(|threads| {
        threads.spawn(|| drop(silent.accept().and_then(|_| silent.accept()).unwrap()));
        let error = Stream::connect(&host.hub, silent.local_addr().unwrap(), soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{error}");
    });
    assert_eq!(host.hub.stats().connections, 0, "streams are left");
    for (wrong, text) in [
        (Hub::builder as fn(&_) -> _, "chunk is 63, and must be within 64..=1073741824"),
        (Hub::builder, "receives is 0"),
        (Hub::builder, "max_connections is 300000, and the device has room for"),
    ] {
        let device = Device::new().unwrap();
        let context = Arc::new(device.open().unwrap());
        let builder: HubBuilder = wrong(&context);
        let builder = match text.as_bytes()[0] {
            b'c' => builder.chunk(63),
            b'r' => builder.receives(0),
            _ => builder.max_connections(300_000),
        };
        let error = builder.build().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().starts_with(text), "{error}");
    }
}

/// This test is the peer, too: it runs itself, and kills that.
#[test]
fn a_peer_that_is_killed_resets_its_streams() {
    if let Ok(port) = std::env::var("IBVERBS_STREAM_VICTIM") {
        let host = Host::new();
        let address = ("127.0.0.1", port.parse().unwrap());
        let mut stream = Stream::connect(&host.hub, address, soon()).unwrap();
        stream.write_all(b"hello").unwrap();
        stream.read_exact(&mut [0; 1]).unwrap();
        return;
    }
    for writes in [false, true] {
        let host = Host::new();
        let listener = Listener::bind(&host.hub, "127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut victim = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "failures::a_peer_that_is_killed_resets_its_streams"])
            .env("IBVERBS_STREAM_VICTIM", port.to_string())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        let mut got = [0; 5];
        stream.read_exact(&mut got).unwrap();
        thread::scope(|threads| {
            threads.spawn(|| {
                victim.kill().unwrap();
                victim.wait().unwrap();
            });
            let error = loop {
                let ended = match writes {
                    true => stream.write(&[0; 4096]).err(),
                    false => stream.read(&mut got).err(),
                };
                if let Some(error) = ended {
                    break error;
                }
            };
            assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
            assert_eq!(stream.take_error(), Some(StreamError::Reset));
        });
    }
}

/// This test is the client, too: it runs itself, and stops that, so that its device does not answer. Keep-alive ends each drop before
/// the period of `linger` is over, and the next one has what is left of that.
#[test]
fn drops_beside_a_peer_that_is_stopped_share_a_period() {
    const COUNT: u32 = 20;
    const ADDRESS: &str = "IBVERBS_STREAM_STOPPED";
    let keep_alive = Duration::from_millis(200);
    let host =
        Host::with(|hub| hub.max_connections(COUNT).keep_alive(keep_alive).linger(4 * keep_alive));
    if let Ok(address) = std::env::var(ADDRESS) {
        let connect = |_| Stream::connect(&host.hub, &*address, soon()).unwrap();
        let _all: Vec<_> = (0..COUNT).map(connect).collect();
        thread::sleep(PATIENCE);
        return;
    }
    let listener = Listener::bind(&host.hub, "127.0.0.1:0").unwrap();
    let mut victim = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "failures::drops_beside_a_peer_that_is_stopped_share_a_period"])
        .env(ADDRESS, listener.local_addr().unwrap().to_string())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let all: Vec<_> = (0..COUNT).map(|_| listener.accept().unwrap().0).collect();
    // SAFETY: it is a child that was not waited for.
    assert_eq!(unsafe { libc::kill(victim.id() as i32, libc::SIGSTOP) }, 0);
    let start = Instant::now();
    drop(all);
    let taken = start.elapsed();
    victim.kill().unwrap();
    victim.wait().unwrap();
    // Each of them would wait for two periods of keep-alive.
    assert!(taken < COUNT * keep_alive, "{taken:?} for {COUNT} streams");
}

/// This test is the client, too: it runs itself with many streams, and kills that. The server's tasks notice all of them at once, and
/// not by keep-alive.
#[test]
fn many_peers_that_are_killed_at_once_are_noticed() {
    const COUNT: u32 = 200;
    const ADDRESS: &str = "IBVERBS_STREAM_MANY";
    let host = || {
        Host::with(|hub| {
            hub.chunk(256).receives(2).sends(2).max_connections(COUNT).keep_alive(PATIENCE)
        })
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    if let Ok(address) = std::env::var(ADDRESS) {
        let host = host();
        return runtime.block_on(async {
            let mut all = Vec::new();
            for _ in 0..COUNT {
                all.push(
                    ibverbs_stream::tokio::Stream::connect(&host.hub, &*address).await.unwrap(),
                );
            }
            tokio::time::sleep(PATIENCE).await;
        });
    }
    let host = host();
    runtime.block_on(async {
        let listener =
            ibverbs_stream::tokio::Listener::bind(&host.hub, "127.0.0.1:0").await.unwrap();
        let mut victim = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "failures::many_peers_that_are_killed_at_once_are_noticed"])
            .env(ADDRESS, listener.local_addr().unwrap().to_string())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let mut tasks = Vec::new();
        for _ in 0..COUNT {
            let (mut stream, _) = listener.accept().await.unwrap();
            tasks.push(tokio::spawn(async move { stream.read_u8().await.unwrap_err().kind() }));
        }
        victim.kill().unwrap();
        victim.wait().unwrap();
        for task in tasks {
            let kind = tokio::time::timeout(PATIENCE / 2, task).await.expect("nobody notices");
            assert_eq!(kind.unwrap(), ErrorKind::ConnectionReset);
        }
    });
}

/// A stream of a task works or fails with few descriptors left for it, and for what serves it.
async fn with_few_files(address: std::net::SocketAddr) {
    let (mut left, mut works) = (0, false);
    while !works {
        // Each round has a new hub, and so a new task that serves it.
        let host = Host::new();
        let mut files = Vec::new();
        while let Ok(file) = std::fs::File::open("/dev/null") {
            files.push(file);
        }
        files.truncate(files.len() - left);
        let used = async {
            let mut stream = ibverbs_stream::tokio::Stream::connect(&host.hub, address).await?;
            stream.write_all(b"x").await?;
            stream.read_u8().await
        };
        let used = tokio::time::timeout(PATIENCE, used).await.expect("it never ends");
        works = used.is_ok_and(|byte| byte == b'x');
        left += 1;
    }
    assert!(left > 3, "{left}");
}

/// This test is the client, too: it runs itself with a limit.
#[test]
fn a_limit_on_files_is_an_error_and_no_stream_that_hangs() {
    const ADDRESS: &str = "IBVERBS_STREAM_FEW_FILES";
    if let Ok(address) = std::env::var(ADDRESS) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        return runtime.block_on(with_few_files(address.parse().unwrap()));
    }
    let host = Host::new();
    let listener = Listener::bind(&host.hub, "127.0.0.1:0").unwrap();
    let test = "failures::a_limit_on_files_is_an_error_and_no_stream_that_hangs";
    let mut client = std::process::Command::new("sh")
        .args(["-c", "ulimit -n 100; exec \"$0\" \"$@\""])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(ADDRESS, listener.local_addr().unwrap().to_string())
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let status = loop {
        listener.set_deadline(Some(Instant::now() + Duration::from_millis(5)));
        if let Ok((mut stream, _)) = listener.accept() {
            let mut got = [0; 1];
            let _ = stream.read_exact(&mut got).and_then(|()| stream.write_all(&got));
        }
        if let Some(status) = client.try_wait().unwrap() {
            break status;
        }
    };
    assert!(status.success());
}

/// Connects two ends in this process, over a stream that only the test has.
fn over_unix(one: &Hub, two: &Hub) -> (Stream, Stream) {
    let (first, second) = std::os::unix::net::UnixStream::pair().unwrap();
    thread::scope(|threads| {
        let connects =
            threads.spawn(move || Stream::over(one, first, Role::Connects, soon()).unwrap());
        let two = Stream::over(two, second, Role::Accepts, soon()).unwrap();
        (connects.join().unwrap(), two)
    })
}

#[test]
fn a_network_that_loses_costs_time_and_no_byte() {
    for (seed, loss) in [(1, 0.01), (2, 0.05), (3, 0.1)] {
        let network = ibverbs_software::Network::builder()
            .seed(seed)
            .loss(loss)
            .delay(Duration::from_micros(5))
            .build();
        let _driver = network.drive_in_background().unwrap();
        let hubs = [(); 2].map(|()| {
            let context = Arc::new(network.device().unwrap().open().unwrap());
            Hub::builder(&context).chunk(2048).receives(4).max_connections(2).build().unwrap()
        });
        let (mut one, mut two) = over_unix(&hubs[0], &hubs[1]);
        let all = data(100_000);
        thread::scope(|threads| {
            threads.spawn(|| {
                one.write_all(&all).unwrap();
                one.shutdown(Shutdown::Write).unwrap();
                let mut back = Vec::new();
                one.read_to_end(&mut back).unwrap();
                assert!(back == all);
                drop(one);
            });
            let mut got = Vec::new();
            two.read_to_end(&mut got).unwrap();
            assert!(got == all);
            two.write_all(&got).unwrap();
            drop(two);
        });
        assert!(network.trace().lost() > 0, "nothing was lost");
    }
}

/// Nothing is closed, and nothing arrives: both sides find out, also the one that only reads.
#[test]
fn a_network_that_is_cut_ends_both_sides() {
    let network = ibverbs_software::Network::builder().seed(4).build();
    let _driver = network.drive_in_background().unwrap();
    let devices = [(); 2].map(|()| network.device().unwrap());
    let hubs = devices.each_ref().map(|device| {
        let builder = Hub::builder(&Arc::new(device.open().unwrap()));
        builder.max_connections(2).keep_alive(Duration::from_millis(50)).build().unwrap()
    });
    let (mut got, until) = ([0; 6], Instant::now() + Duration::from_secs(60));
    // A busy machine may take longer than keep-alive.
    let (mut one, mut two) = loop {
        assert!(Instant::now() < until, "nothing arrives in time");
        let (mut one, mut two) = over_unix(&hubs[0], &hubs[1]);
        if one.write_all(b"before").and_then(|()| two.read_exact(&mut got)).is_ok() {
            break (one, two);
        }
    };
    network.partition(&devices[0], &devices[1]);
    let _ = one.write_all(b"after");
    for stream in [&mut one, &mut two] {
        let error = stream.read(&mut got).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        assert_eq!(stream.write(b"more").unwrap_err().kind(), ErrorKind::TimedOut);
    }
}
