//! A child of `fork` that drops its copies of a hub, of streams and of a listener: the parent's go on. One test: it concerns the whole
//! process.

use std::fs::File;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs_software::Device;
use ibverbs_stream::{Hub, Listener, Stream};

const PATIENCE: Duration = Duration::from_secs(60);

/// This process is the peer, and connects to this port.
const PEER: &str = "IBVERBS_STREAM_FORKED_PEER";

/// This process is the first one of its PID namespace, as each of its children is of another one.
const FIRST: &str = "IBVERBS_STREAM_FORKED_FIRST";

/// `fork`. The child of a process that `is_first` has the parent's process ID.
fn fork(is_first: bool) -> libc::pid_t {
    let own = File::open("/proc/self/ns/pid").unwrap();
    if is_first {
        // SAFETY: no memory is involved.
        assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWPID) }, 0);
    }
    // SAFETY: the child's caller ends it.
    let child = unsafe { libc::fork() };
    if is_first && child != 0 {
        // SAFETY: the file is open, and of this process's own namespace.
        assert_eq!(unsafe { libc::setns(own.as_raw_fd(), libc::CLONE_NEWPID) }, 0);
    }
    child
}

/// The system call alone, which calls no handler of `pthread_atfork`.
fn fork_bare() -> libc::pid_t {
    let nothing: libc::c_long = 0;
    let flags = libc::c_long::from(libc::SIGCHLD);
    // SAFETY: the child has a copy of all memory, and its caller ends it.
    let child =
        unsafe { libc::syscall(libc::SYS_clone, flags, nothing, nothing, nothing, nothing) };
    child as libc::pid_t
}

/// Waits for a child, which does not wait for anything.
fn until_ended(child: libc::pid_t) {
    assert!(child > 0);
    let (mut status, until) = (0, Instant::now() + PATIENCE);
    loop {
        // SAFETY: the child is ours, and the status is writable.
        match unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) } {
            0 if Instant::now() < until => thread::yield_now(),
            // SAFETY: the child is ours, and was not waited for. No other signal ends the first process of a namespace.
            0 => assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0),
            ended => break assert_eq!(ended, child),
        }
    }
    assert_eq!(status, 0, "the child waits");
}

/// Runs the test once more in a process that is the first one of a new PID namespace, as that of a container is.
fn run_as_first() {
    let command = || {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--pid", "--fork", "--kill-child"]);
        command
    };
    if !command().arg("true").status().is_ok_and(|status| status.success()) {
        return println!(
            "NOT CHECKED: a first process of a PID namespace: `unshare` cannot make one here"
        );
    }
    let mut test = command();
    test.arg(std::env::current_exe().unwrap()).env(FIRST, "");
    assert!(test.status().unwrap().success());
}

fn hub() -> (Hub, Device) {
    let device = Device::new().unwrap();
    let builder = Hub::builder(&Arc::new(device.open().unwrap())).max_connections(8);
    (builder.keep_alive(10 * PATIENCE).build().unwrap(), device)
}

fn talk(one: &mut Stream, two: &mut Stream) {
    let mut got = [0; 5];
    one.write_all(b"hello").unwrap();
    two.read_exact(&mut got).unwrap();
    two.write_all(&got).unwrap();
    one.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"hello");
}

#[test]
fn what_a_child_drops_costs_its_parent_nothing() {
    let (hub, _device) = hub();
    if let Ok(port) = std::env::var(PEER) {
        let address = ("127.0.0.1", port.parse().unwrap());
        let mut stream = Stream::connect(&hub, address, Instant::now() + PATIENCE).unwrap();
        stream.write_all(b"hello").unwrap();
        stream.read_exact(&mut [0]).unwrap_err();
        return;
    }
    let listener = Listener::bind(&hub, "127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let connect = || {
        thread::scope(|threads| {
            let connects =
                threads.spawn(|| Stream::connect(&hub, address, Instant::now() + PATIENCE));
            let two = listener.accept().unwrap().0;
            (connects.join().unwrap().unwrap(), two)
        })
    };
    let (mut one, mut two) = connect();
    let mut peer = Command::new(std::env::current_exe().unwrap())
        .env(PEER, address.port().to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let (mut of_peer, _) = listener.accept().unwrap();
    of_peer.read_exact(&mut [0; 5]).unwrap();
    talk(&mut one, &mut two);
    // One of them has something that it has not read.
    one.write_all(b"unread").unwrap();
    two.peek(&mut [0; 6]).unwrap();
    // Most of the children are born while a thread that they have not holds the hub's lock.
    let (locks, has_ended) = (hub.clone(), Arc::new(AtomicBool::new(false)));
    let ends = has_ended.clone();
    let locker = thread::spawn(move || {
        while !ends.load(Ordering::Relaxed) {
            locks.stats();
        }
    });
    let is_first = std::env::var(FIRST).is_ok();
    for _ in 0..8 {
        let child = fork(is_first);
        if child == 0 {
            drop((two, one, of_peer, listener, hub));
            // SAFETY: it ends the child at once.
            unsafe { libc::_exit(0) };
        }
        until_ended(child);
    }
    let (read_half, write_half) = one.into_split();
    // Those that are the first process of a namespace have their parent's ID.
    for _ in 0..if is_first { 0 } else { 8 } {
        let child = fork_bare();
        if child == 0 {
            // Nothing is freed, for which a thread of the parent's might hold a lock.
            drop(write_half);
            // SAFETY: it ends the child at once.
            unsafe { libc::_exit(0) };
        }
        until_ended(child);
    }
    let mut one = read_half.reunite(write_half).unwrap();
    has_ended.store(true, Ordering::Relaxed);
    locker.join().unwrap();
    two.read_exact(&mut [0; 6]).unwrap();
    talk(&mut one, &mut two);
    let (mut three, mut four) = connect();
    talk(&mut three, &mut four);
    // The thread that watches the peers is there.
    thread::scope(|threads| {
        threads.spawn(|| {
            peer.kill().unwrap();
            peer.wait().unwrap();
        });
        of_peer.set_read_timeout(Some(PATIENCE)).unwrap();
        let error = of_peer.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
    });
    if !is_first {
        run_as_first();
    }
}
