//! A process that a device shares an eventfd with puts that into sets of its own, until the kernel allows no further set around the
//! device's file (`EINVAL`). Tasks, whose runtime is such a set, go on. One test at a time: all devices of the process are concerned.

use std::fs;
use std::io::ErrorKind;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ibverbs::{AccessFlags, BufferPool, Channel, ProtectionDomain, Reactor};
use ibverbs_software::Device;
use ibverbs_stream::Hub;
use ibverbs_stream::tokio::{Listener, Stream};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::runtime::Builder;
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(60);

/// How many times each message is answered: so often the runtime sleeps until it is woken.
const ROUNDS: u8 = 100;

/// Held by the test that runs.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn run(future: impl Future<Output = ()>) {
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { timeout(PATIENCE, future).await }).expect("it waits for ever");
}

fn set() -> OwnedFd {
    // SAFETY: no memory is involved. What is returned is new, and nobody else's.
    unsafe {
        let set = libc::epoll_create1(libc::EPOLL_CLOEXEC);
        assert!(set >= 0, "{}", std::io::Error::last_os_error());
        OwnedFd::from_raw_fd(set)
    }
}

fn add(set: &OwnedFd, file: RawFd) -> bool {
    let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: 0 };
    // SAFETY: the event is a live structure; a descriptor that is not open is an error.
    unsafe { libc::epoll_ctl(set.as_raw_fd(), libc::EPOLL_CTL_ADD, file, &mut event) == 0 }
}

/// The eventfds by which devices of this process are woken: those that are in an epoll set, edge-triggered. A peer has others, which are
/// in the same sets.
fn bells() -> Vec<RawFd> {
    let info = |file| fs::read_to_string(format!("/proc/self/fdinfo/{file}")).unwrap_or_default();
    let number = |text: Option<&str>, radix| u32::from_str_radix(text.unwrap(), radix).unwrap();
    let mut bells = Vec::new();
    for set in 0..1024 {
        for line in info(set).lines().filter(|line| line.starts_with("tfd:")) {
            let mut words = line.split_whitespace();
            let (file, events) = (number(words.nth(1), 10), number(words.nth(1), 16));
            if events & libc::EPOLLET as u32 != 0 && info(file).contains("eventfd-count:") {
                bells.push(file as RawFd);
            }
        }
    }
    bells
}

/// Uses up what the kernel allows of paths of length three, which are a hundred, until the sets are dropped. The bells of the device of
/// the test before may be closed meanwhile: what is closed takes any number of sets.
fn use_up() -> Vec<OwnedFd> {
    let (mut sets, bells) = (Vec::new(), bells());
    assert!(!bells.is_empty());
    for bell in bells {
        let (first, second) = (set(), set());
        if add(&first, bell) {
            assert!(add(&second, first.as_raw_fd()));
            let third = || Some(set()).filter(|set| add(set, second.as_raw_fd()));
            sets.extend(std::iter::from_fn(third).take(128));
        }
        sets.extend([first, second]);
    }
    sets
}

#[test]
fn a_reactor_runs_on_tokio() {
    let _turn = turn();
    let device = Device::new().unwrap();
    let context = Arc::new(device.open().unwrap());
    let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
    let pool = BufferPool::new(&domain, 8, 4, AccessFlags::empty()).unwrap();
    let reactor = Reactor::new(&context, 64).unwrap();
    let _sets = use_up();
    run(async {
        let reactor = reactor.spawn_on_tokio();
        let [one, two] = [(); 2].map(|()| reactor.prepare(Channel::builder(&domain)).unwrap());
        let (mut here, mut there) = UnixStream::pair().unwrap();
        let (one, two) = tokio::join!(one.connect(&mut here, b""), two.accept(&mut there, b""));
        let ((one, _), (two, _)) = (one.unwrap(), two.unwrap());
        for byte in 0..ROUNDS {
            let receive = two.receive(pool.take().unwrap());
            let send = one.send(pool.take_from(&[byte]).unwrap().unwrap());
            let (received, sent) = tokio::join!(receive, send);
            sent.unwrap();
            assert_eq!(received.unwrap().0[..], [byte]);
        }
    });
}

#[test]
fn streams_of_tasks_are_driven() {
    let _turn = turn();
    let device = Device::new().unwrap();
    let builder = Hub::builder(&Arc::new(device.open().unwrap())).max_connections(4);
    let hub = builder.build().unwrap();
    let _sets = use_up();
    run(async {
        let listener = Listener::bind(&hub, "127.0.0.1:0").await.unwrap();
        let connects = Stream::connect(&hub, listener.local_addr().unwrap());
        let (one, two) = tokio::join!(connects, listener.accept());
        let (mut one, (mut two, _)) = (one.unwrap(), two.unwrap());
        for byte in 0..ROUNDS {
            one.write_u8(byte).await.unwrap();
            assert_eq!(two.read_u8().await.unwrap(), byte);
            two.write_u8(byte).await.unwrap();
            assert_eq!(one.read_u8().await.unwrap(), byte);
        }
    });
}

/// No stream is there for which the hub's own thread would poll.
#[test]
fn a_listener_of_tasks_hears_that_the_device_has_failed() {
    let _turn = turn();
    let device = Device::new().unwrap();
    let hub = Hub::builder(&Arc::new(device.open().unwrap())).build().unwrap();
    let _sets = use_up();
    run(async {
        let listener = Listener::bind(&hub, "127.0.0.1:0").await.unwrap();
        let (accepted, ()) = tokio::join!(listener.accept(), async { device.remove() });
        assert_eq!(accepted.unwrap_err().kind(), ErrorKind::NotConnected);
    });
}
