//! Two processes: one is killed in mid-transfer, runs out of descriptors, or forks. Nothing hangs, nothing leaks. Their
//! packets are in memory that they share.

#[path = "support/child.rs"]
mod child;
#[path = "support/patience.rs"]
mod patience;

use std::net::{IpAddr, TcpListener};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ibverbs::{
    AccessFlags, AckTimeout, Channel, MaxAckRetries, MaxRnrRetries, PreparedChannel,
    ProtectionDomain, RemoteMemoryRegion, TransportError, WorkStatus,
};
use ibverbs_software::Device;

use child::{Process, is_child, parent};
use patience::deadline;

/// The tests count descriptors: one test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static RUNS: Mutex<()> = Mutex::new(());
    RUNS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn prepare<'a>(domain: &'a ProtectionDomain<'a>) -> PreparedChannel<'a> {
    let access = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ;
    domain
        .create_channel()
        .access(access)
        .ack_timeout(AckTimeout::from_duration(Duration::from_millis(30)).unwrap())
        .max_ack_retries(MaxAckRetries::new(7).unwrap())
        .max_rnr_retries(MaxRnrRetries::UNLIMITED)
        .build()
        .unwrap()
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// The number of rings of packets that this process has in its memory.
fn rings() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("/memfd:ibverbs-software")).count()
}

/// Waits until something is true that the device's thread brings about.
fn wait_until(what: &str, is_true: impl Fn() -> bool) {
    let end = deadline();
    while !is_true() {
        assert!(std::time::Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

const LENGTH: usize = 1 << 20;

/// The child's part of the next test: writes to the parent's memory until it is killed.
#[test]
fn writes_until_it_is_killed() {
    if !is_child("writes_until_it_is_killed") {
        return;
    }
    let address = parent();
    let context = Device::new().unwrap().open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let (mut channel, region) = prepare(&domain).connect(address, b"", deadline()).unwrap();
    let remote = RemoteMemoryRegion::from_bytes(&region).unwrap();
    let from = domain.allocate::<u8>(LENGTH).unwrap();
    for round in 0.. {
        channel.until(deadline()).write(from.slice(..).unwrap(), remote).unwrap();
        if round == 2 {
            println!("writing");
        }
    }
}

#[test]
fn a_peer_that_is_killed_in_mid_transfer_is_noticed_and_leaves_nothing() {
    let _alone = alone();
    let device = Device::new().unwrap();
    let context = device.open().unwrap();
    let mut counts = Vec::new();
    for _ in 0..3 {
        let domain = context.alloc_pd().unwrap();
        let access = AccessFlags::REMOTE_WRITE | AccessFlags::LOCAL_WRITE;
        let target = domain.allocate_shared::<u8>(LENGTH, access).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut child = Process::run("writes_until_it_is_killed", listener.local_addr().unwrap());
        let region = target.remote().to_bytes();
        let accepted = prepare(&domain).accept(&listener, &region, deadline());
        let (mut channel, _) = accepted.unwrap();
        child.wait_for("writing");
        child.kill();
        assert!(channel.wait_until_peer_is_gone(deadline()).unwrap());
        // A send to the peer that is gone ends by its retries, or by the deadline that the program sets.
        let error = channel.until(deadline()).send(()).unwrap_err();
        let TransportError::Work(error) = error else { panic!("{error}") };
        assert_eq!(error.status(), WorkStatus::RetryExceeded);
        drop((channel, target));
        drop((domain, listener, child));
        wait_until("the thread forgets the peer", || rings() <= 1);
        counts.push(descriptors());
    }
    assert_eq!(counts[1], counts[2], "descriptors leak: {counts:?}");
    // The device works as before.
    let domain = context.alloc_pd().unwrap();
    let [one, other] = [(); 2].map(|()| prepare(&domain));
    let endpoints = (one.endpoint(), other.endpoint());
    let mut one: Channel<'_> = one.handshake(endpoints.1).unwrap();
    let mut other = other.handshake(endpoints.0).unwrap();
    std::thread::scope(|scope| {
        let receiver = scope.spawn(|| {
            let mut room = domain.allocate::<u8>(8).unwrap();
            other.until(deadline()).receive(room.slice_mut(..).unwrap()).map(|_| ())
        });
        one.until(deadline()).send(()).unwrap();
        receiver.join().unwrap().unwrap();
    });
}

/// The address of a child's device, which other processes do not use.
fn fixed_address() -> IpAddr {
    let [_, b, c, d] = std::os::unix::process::parent_id().to_be_bytes();
    IpAddr::from([127, 160 | b, c, d])
}

/// The child's part of the next test: sends back what it receives.
#[test]
fn sends_back_until_its_peer_is_gone() {
    if !is_child("sends_back_until_its_peer_is_gone") {
        return;
    }
    let address = parent();
    let device = Device::builder().address(fixed_address()).build().unwrap();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let (mut channel, _) = prepare(&domain).connect(address, b"", deadline()).unwrap();
    let mut buffer = domain.allocate::<u32>(1).unwrap();
    while channel.until(deadline()).receive(buffer.slice_mut(..).unwrap()).is_ok() {
        channel.until(deadline()).send(buffer.slice(..).unwrap()).unwrap();
    }
}

/// Sends messages to the child of the test before, and receives them again, until `is_enough`.
fn exchange(
    channel: &mut Channel<'_>,
    domain: &ProtectionDomain<'_>,
    mut is_enough: impl FnMut(u32) -> bool,
) {
    let mut buffer = domain.allocate::<u32>(1).unwrap();
    let end = deadline();
    for number in 0.. {
        buffer[0] = number;
        channel.until(deadline()).send(buffer.slice(..).unwrap()).unwrap();
        buffer[0] = u32::MAX;
        channel.until(deadline()).receive(buffer.slice_mut(..).unwrap()).unwrap();
        assert_eq!(buffer[0], number);
        if is_enough(number) {
            break;
        }
        assert!(std::time::Instant::now() < end, "after {number} messages");
    }
}

/// One ring in each direction, also with a process that has the address of one that was killed.
#[test]
fn packets_to_other_processes_are_in_shared_memory() {
    let _alone = alone();
    let device = Device::new().unwrap();
    let context = device.open().unwrap();
    for _ in 0..3 {
        let domain = context.alloc_pd().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut child = Process::run("sends_back_until_its_peer_is_gone", address);
        let accepted = prepare(&domain).accept(&listener, b"", deadline());
        let (mut channel, _) = accepted.unwrap();
        exchange(&mut channel, &domain, |_| rings() == 2);
        exchange(&mut channel, &domain, |number| number == 100);
        assert_eq!(rings(), 2);
        child.kill();
        // Our ring goes when a packet finds no peer: an acknowledgement that was held back may be that packet.
        wait_until("the thread forgets the peer", || rings() <= 1);
    }
    drop((context, device));
    wait_until("nothing is left", || rings() == 0);
}

#[test]
fn processes_of_other_users_share_no_memory() {
    // SAFETY: no memory is involved.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("NOT CHECKED: only root can run a process as another user");
        return;
    }
    let _alone = alone();
    let device = Device::new().unwrap();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let _child = Process::run_as(1, "sends_back_until_its_peer_is_gone", address);
    let accepted = prepare(&domain).accept(&listener, b"", deadline());
    let (mut channel, _) = accepted.unwrap();
    exchange(&mut channel, &domain, |number| number == 100);
    assert_eq!(rings(), 0);
}

#[test]
fn packets_pass_through_the_kernel_if_the_program_wants_it() {
    let _alone = alone();
    let device = Device::builder().through_kernel(true).build().unwrap();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let _child = Process::run("sends_back_until_its_peer_is_gone", address);
    let accepted = prepare(&domain).accept(&listener, b"", deadline());
    let (mut channel, _) = accepted.unwrap();
    exchange(&mut channel, &domain, |number| number == 100);
    assert_eq!(rings(), 0);
}

/// A process without a processor, which is what SIGSTOP makes of it, is not gone.
#[test]
fn a_peer_that_is_not_run_for_longer_than_all_retries_take_is_waited_for() {
    let _alone = alone();
    for through_kernel in [false, true] {
        let device = Device::builder().through_kernel(through_kernel).build().unwrap();
        let context = device.open().unwrap();
        let domain = context.alloc_pd().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let child = Process::run("sends_back_until_its_peer_is_gone", address);
        let accepted = prepare(&domain).accept(&listener, b"", deadline());
        let (mut channel, _) = accepted.unwrap();
        exchange(&mut channel, &domain, |_| rings() == if through_kernel { 0 } else { 2 });
        let signal = |signal| {
            // SAFETY: no memory is involved; the child is ours, and was not waited for.
            assert_eq!(unsafe { libc::kill(child.0.id() as libc::pid_t, signal) }, 0);
        };
        let mut buffer = domain.allocate::<u32>(1).unwrap();
        let sent = channel.scope(|scope| {
            signal(libc::SIGSTOP);
            let sending = scope.post_send(buffer.slice(..)?)?;
            // The first try and seven more take less than a second.
            std::thread::sleep(Duration::from_millis(1500));
            signal(libc::SIGCONT);
            sending.wait_until(deadline()).map(|_| ())
        });
        sent.unwrap();
        channel.until(deadline()).receive(buffer.slice_mut(..).unwrap()).unwrap();
    }
}

/// The child's part of the next test: has few descriptors.
#[test]
fn works_without_descriptors() {
    if !is_child("works_without_descriptors") {
        return;
    }
    let device = Device::new().unwrap();
    let before = descriptors();
    // A limit at which opening fails after some steps, for each of the steps.
    // SAFETY: no memory is involved.
    let is_free = |fd: &usize| unsafe { libc::fcntl(*fd as i32, libc::F_GETFD) } < 0;
    let free: Vec<usize> = (0..4096).filter(is_free).collect();
    let mut opened = false;
    for (room, &end) in free.iter().enumerate().take(12) {
        let limit = libc::rlimit { rlim_cur: end as u64, rlim_max: 4096 };
        let mut old = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: both are live structures.
        unsafe {
            libc::getrlimit(libc::RLIMIT_NOFILE, &mut old);
            let limit = libc::rlimit { rlim_max: old.rlim_max, ..limit };
            assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0);
        }
        let attempts = (device.open(), Device::new(), device.open());
        let channel = attempts.0.as_ref().ok().map(ibverbs::CompletionChannel::new);
        // SAFETY: a live structure.
        unsafe { assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &old), 0) };
        for result in [&attempts.0, &attempts.2] {
            if let Err(error) = result {
                assert_eq!(error.raw_os_error(), Some(libc::EMFILE), "{error}");
            }
        }
        if let Err(error) = &attempts.1 {
            // Its message begins with the address.
            assert!(error.to_string().ends_with("(os error 24)"), "{error}");
        }
        if let Some(Err(error)) = &channel {
            assert_eq!(error.raw_os_error(), Some(libc::EMFILE), "{error}");
        }
        opened |= matches!(&channel, Some(Ok(_))) && attempts.1.is_ok() && attempts.2.is_ok();
        assert!(room > 0 || attempts.0.is_err(), "the limit has no effect");
        drop(channel);
        drop(attempts);
        assert_eq!(descriptors(), before, "with room for {room}");
    }
    assert!(opened, "even the highest limit is too low");
    println!("no descriptor leaks");
}

#[test]
fn a_process_without_descriptors_gets_errors_and_leaks_none() {
    let _alone = alone();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut child = Process::run("works_without_descriptors", listener.local_addr().unwrap());
    child.wait_for("no descriptor leaks");
    assert!(child.0.wait().unwrap().success());
}

/// Children of `fork` come and go; the parent goes on as if nothing had happened.
#[test]
fn a_fork_in_mid_transfer_changes_nothing_for_the_parent() {
    let _alone = alone();
    let contexts = [(); 2].map(|()| Device::new().unwrap().open().unwrap());
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let (one, other) = (prepare(&domains[0]), prepare(&domains[1]));
    let endpoints = (one.endpoint(), other.endpoint());
    let mut one = one.handshake(endpoints.1).unwrap();
    let _other = other.handshake(endpoints.0).unwrap();
    let access = AccessFlags::REMOTE_WRITE | AccessFlags::LOCAL_WRITE;
    let target = domains[1].allocate_shared::<u8>(LENGTH, access).unwrap();
    let from = domains[0].allocate::<u8>(LENGTH).unwrap();
    for _ in 0..5 {
        let writer = |one: &mut Channel<'_>| {
            for _ in 0..3 {
                one.until(deadline()).write(from.slice(..).unwrap(), target.remote()).unwrap();
            }
        };
        std::thread::scope(|scope| {
            let writing = scope.spawn(|| writer(&mut one));
            // SAFETY: the child calls functions that are safe after a fork only, and ends.
            let child = unsafe { libc::fork() };
            assert!(child >= 0);
            if child == 0 {
                // SAFETY: it ends the process at once.
                unsafe { libc::_exit(0) };
            }
            writing.join().unwrap();
            let mut status = 0;
            // SAFETY: a live variable; the child is ours.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            assert_eq!(status, 0);
        });
    }
}
