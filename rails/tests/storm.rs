//! Many peers at once, in real time.

use std::collections::HashSet;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs_rails::{Event, Rails};
use ibverbs_software::Device;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

const THREADS: u16 = 8;
const PER_THREAD: u16 = 125;

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(600)
}

/// Rails of a device of their own each, all of which connect at the same time, and say their number.
fn storm(address: SocketAddr, thread: u16, is_over: &AtomicBool) {
    let rails = || Rails::builder().device("storm0").peers(1).longest_message(64).build().unwrap();
    let connect = |mut rails: Rails| {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_nonblocking(true).unwrap();
        let peer = rails.connect_over(stream).unwrap();
        (rails, peer, false)
    };
    let mut all: Vec<_> = (0..PER_THREAD).map(|_| connect(rails())).collect();
    let until = deadline();
    while all.iter().any(|(.., is_done)| !is_done) && !is_over.load(Ordering::Relaxed) {
        for (place, (rails, peer, is_done)) in (0..).zip(&mut all) {
            rails.turn(Instant::now());
            while let Some(event) = rails.next_event() {
                match event {
                    Event::Connected(_) => {
                        let number = thread * PER_THREAD + place;
                        rails.send(*peer, number.to_le_bytes()).unwrap();
                    }
                    Event::Ended { result, .. } => {
                        result.unwrap();
                        *is_done = true;
                    }
                    Event::RailUp { .. } => {}
                    event => panic!("{event:?}"),
                }
            }
        }
        assert!(Instant::now() < until);
        thread::yield_now();
    }
}

/// Tells the others when this thread panics, so that they do not wait for it.
struct Tells<'a>(&'a AtomicBool);

impl Drop for Tells<'_> {
    fn drop(&mut self) {
        self.0.store(thread::panicking(), Ordering::Relaxed);
    }
}

#[test]
fn a_thousand_peers_at_once() {
    let count = usize::from(THREADS * PER_THREAD);
    // A peer here and its side of the hub have seven.
    let needed = 8 * count as u64;
    let limit = getrlimit(Resource::Nofile);
    let most = limit.maximum.unwrap_or(u64::MAX);
    assert!(most >= needed, "{count} peers need {needed} descriptors: raise `ulimit -Hn`, {most}");
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).unwrap();
    let device = Device::builder().name("storm0").max_cqe(1 << 17).build().unwrap();
    device.register();
    let hub = Rails::builder().device("storm0").peers(count as u32).longest_message(64);
    let mut hub = hub.build().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let began = Instant::now();
    let mut missing: HashSet<u16> = (0..THREADS * PER_THREAD).collect();
    let mut silent = HashSet::new();
    let is_over = AtomicBool::new(false);
    let time = thread::scope(|scope| {
        let is_over = &is_over;
        for number in 0..THREADS {
            scope.spawn(move || storm(address, number, is_over));
        }
        let _tells = Tells(is_over);
        for _ in 0..count {
            silent.insert(hub.accept(&listener, deadline()).unwrap());
        }
        let time = began.elapsed();
        while !missing.is_empty() {
            match hub.wait_event(deadline()).unwrap() {
                Event::Message { peer, bytes } => {
                    let number = u16::from_le_bytes(bytes.try_into().unwrap());
                    assert!(missing.remove(&number), "{number} came twice");
                    silent.remove(&peer);
                }
                // The peer has closed, since it was told that its message has arrived.
                Event::Disconnected { peer, error } if silent.contains(&peer) => {
                    panic!("the message of {peer:?} is lost, one of {missing:?}: {error}");
                }
                _ => {}
            }
        }
        time
    });
    println!(
        "{count} peers were connected in {:.2} s, and each sent a message",
        time.as_secs_f64()
    );
}

#[test]
fn who_comes_before_the_listener_tries_again() {
    let device = Device::builder().name("early0").build().unwrap();
    device.register();
    let rails = || Rails::builder().device("early0").build().unwrap();
    // A port that nobody listens on.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    thread::scope(|scope| {
        let early = scope.spawn(|| {
            let mut rails = rails();
            let peer = rails.connect(address, deadline()).unwrap();
            rails.receive(peer, deadline()).unwrap()
        });
        // The client may have tried by then, or not: both are right.
        thread::sleep(Duration::from_millis(50));
        let listener = TcpListener::bind(address).unwrap();
        let mut rails = rails();
        let peer = rails.accept(&listener, deadline()).unwrap();
        let sent = rails.send(peer, *b"welcome").unwrap();
        rails.wait(sent, deadline()).unwrap();
        assert_eq!(early.join().unwrap(), b"welcome");
    });
    // Without a listener, the last failure is returned, no later than was asked for.
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let error = rails().connect(gone, Instant::now() + Duration::from_millis(30)).unwrap_err();
    assert!(error.to_string().contains("the control stream"), "{error}");
}
