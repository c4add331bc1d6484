//! A process that a device shares an eventfd with puts that into sets of its own, until the kernel allows no further set around the
//! device's file (`EINVAL`). Tasks, whose runtime is such a set, go on. A process of its own: all devices of it are concerned.

use std::fs;
use std::io::ErrorKind;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::sync::Arc;
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

/// The eventfds by which devices of this process are woken, which count from 2^62 down.
fn bells() -> Vec<RawFd> {
    let is_bell = |file: &RawFd| {
        let info = fs::read_to_string(format!("/proc/self/fdinfo/{file}")).unwrap_or_default();
        let count = info.lines().find_map(|line| line.strip_prefix("eventfd-count:"));
        count.is_some_and(|count| u64::from_str_radix(count.trim(), 16).unwrap() > 1 << 61)
    };
    (0..1024).filter(is_bell).collect()
}

/// Uses up what the kernel allows of paths of length three, until the sets are dropped.
fn use_up() -> Vec<OwnedFd> {
    let (mut sets, bells) = (Vec::new(), bells());
    assert!(!bells.is_empty());
    for bell in bells {
        let (first, second) = (set(), set());
        // Another test may use up the same ones.
        if add(&first, bell) && add(&second, first.as_raw_fd()) {
            let third = || Some(set()).filter(|set| add(set, second.as_raw_fd()));
            sets.extend(std::iter::from_fn(third));
        }
        sets.extend([first, second]);
    }
    sets
}

#[test]
fn a_reactor_runs_on_tokio() {
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
    let device = Device::new().unwrap();
    let hub = Hub::builder(&Arc::new(device.open().unwrap())).build().unwrap();
    let _sets = use_up();
    run(async {
        let listener = Listener::bind(&hub, "127.0.0.1:0").await.unwrap();
        let (accepted, ()) = tokio::join!(listener.accept(), async { device.remove() });
        assert_eq!(accepted.unwrap_err().kind(), ErrorKind::NotConnected);
    });
}
