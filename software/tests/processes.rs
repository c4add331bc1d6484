//! Two processes: one is killed in mid-transfer, runs out of descriptors, or forks. Nothing hangs, nothing leaks. Their
//! packets are in memory that they share.

#[path = "support/child.rs"]
mod child;
#[path = "support/patience.rs"]
mod patience;

use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ibverbs::{
    AccessFlags, Channel, PreparedChannel, ProtectionDomain, RemoteMemoryRegion, TransportError,
    WorkStatus,
    settings::{AckTimeout, MaxAckRetries, MaxRnrRetries},
};
use ibverbs_software::Device;

use child::{Process, is_child, parent, rings_of};
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

fn rings() -> usize {
    rings_of(std::process::id())
}

/// Waits until something is true that the device's thread brings about.
fn wait_until(what: &str, is_true: impl Fn() -> bool) {
    let end = deadline();
    while !is_true() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Whether this test can run processes of other users, or in other namespaces.
fn is_root() -> bool {
    // SAFETY: no memory is involved.
    let is_root = unsafe { libc::geteuid() } == 0;
    if !is_root {
        eprintln!("NOT CHECKED: only root can run such a process");
    }
    is_root
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
        // A thread of its own closes what peers have, too.
        let most = counts.get(1).copied().unwrap_or(usize::MAX);
        let is_forgotten = || rings() <= 1 && descriptors() <= most;
        wait_until("the peer is forgotten, and its files are closed", is_forgotten);
        counts.push(descriptors());
    }
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

/// The child's part of the next tests: sends back what it receives, until that is the highest number.
#[test]
fn sends_back_until_its_peer_is_gone() {
    if is_child("sends_back_until_its_peer_is_gone") {
        send_back(|| ());
    }
}

/// The same, without a descriptor that is free once it has connected.
#[test]
fn sends_back_at_its_limit() {
    if is_child("sends_back_at_its_limit") {
        send_back(|| {
            // SAFETY: no memory is involved but a live structure.
            unsafe {
                let free = (0..4096).find(|&fd| libc::fcntl(fd, libc::F_GETFD) < 0).unwrap();
                let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
                assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit), 0);
                limit.rlim_cur = free as u64;
                assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0);
            }
            println!("no descriptor is free");
        });
    }
}

fn send_back(when_connected: impl FnOnce()) {
    let address = parent();
    let device = Device::builder().address(fixed_address()).build().unwrap();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let (mut channel, _) = prepare(&domain).connect(address, b"", deadline()).unwrap();
    when_connected();
    let mut buffer = domain.allocate::<u32>(1).unwrap();
    while channel.until(deadline()).receive(buffer.slice_mut(..).unwrap()).is_ok()
        && buffer[0] != u32::MAX
    {
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
        assert!(Instant::now() < end, "after {number} messages");
    }
}

/// The same, until the device has no ring. It offers one with a packet, now and then, and forgets it with the first packet after
/// the peer has refused it. One that the peer takes would stay.
fn exchange_through_the_kernel(channel: &mut Channel<'_>, domain: &ProtectionDomain<'_>) {
    exchange(channel, domain, |number| number >= 100 && rings() == 0);
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
        exchange(&mut channel, &domain, |number| number >= 100 && rings() == 2);
        child.kill();
        // The kernel closes the files of a process one by one. If the peer's end of our ring was open when its own ring ended, ours
        // goes when the next packet finds no peer, or another process is connected to.
        wait_until("the thread forgets the peer", || rings() <= 1);
    }
    drop((context, device));
    wait_until("nothing is left", || rings() == 0);
}

/// Packets to the process that is started pass through the kernel.
fn shares_no_memory(device: &Device, start: impl FnOnce(SocketAddr) -> Process) {
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let _child = start(listener.local_addr().unwrap());
    let accepted = prepare(&domain).accept(&listener, b"", deadline());
    let (mut channel, _) = accepted.unwrap();
    exchange_through_the_kernel(&mut channel, &domain);
}

#[test]
fn processes_of_other_users_share_no_memory() {
    if !is_root() {
        return;
    }
    let _alone = alone();
    shares_no_memory(&Device::new().unwrap(), |address| {
        Process::run_as(1, "sends_back_until_its_peer_is_gone", address)
    });
}

/// Such a process has the number 0 for the other one, as any other there.
#[test]
fn processes_that_see_no_number_of_each_other_share_no_memory() {
    if !is_root() {
        return;
    }
    let _alone = alone();
    shares_no_memory(&Device::new().unwrap(), |address| {
        Process::run_with_own_numbers("sends_back_until_its_peer_is_gone", address)
    });
}

/// The child's part of the next test.
#[test]
fn has_a_child_with_its_own_number() {
    if !is_child("has_a_child_with_its_own_number") {
        return;
    }
    let device = Device::new().unwrap();
    let context = device.open().unwrap();
    let number = std::process::id();
    // SAFETY: the child ends below. It may wait for a lock that a thread of its parent had; then the alarm ends it.
    unsafe {
        assert_eq!(libc::unshare(libc::CLONE_NEWPID), 0);
        let child = libc::fork();
        if child == 0 {
            libc::alarm(60);
            drop((context, device));
            libc::_exit(if std::process::id() == number { 7 } else { 1 });
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
        println!("its child has ended by {status:#x}");
    }
}

/// What it has of its parent's is not its own.
#[test]
fn a_child_with_its_parents_number_drops_a_device() {
    if is_root() {
        let _alone = alone();
        let nobody = "127.0.0.1:1".parse().unwrap();
        let mut child = Process::run_with_own_numbers("has_a_child_with_its_own_number", nobody);
        child.wait_for("its child has ended by 0x700");
    }
}

/// It cannot take the ring that is handed over to it, nor hand over one.
#[test]
fn a_process_without_a_free_descriptor_is_reached_through_the_kernel() {
    let _alone = alone();
    let device = Device::new().unwrap();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mut child = Process::run("sends_back_at_its_limit", address);
    let (mut channel, _) = prepare(&domain).accept(&listener, b"", deadline()).unwrap();
    child.wait_for("no descriptor is free");
    exchange_through_the_kernel(&mut channel, &domain);
}

#[test]
fn packets_pass_through_the_kernel_if_the_program_wants_it() {
    let _alone = alone();
    let device = Device::builder().through_kernel(true).build().unwrap();
    shares_no_memory(&device, |address| Process::run("sends_back_until_its_peer_is_gone", address));
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
    for (room, &end) in free.iter().enumerate().take(14) {
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
            assert!(error.to_string().contains("RLIMIT_NOFILE"), "{error}");
        }
        if let Some(Err(error)) = &channel {
            assert_eq!(error.raw_os_error(), Some(libc::EMFILE), "{error}");
        }
        opened |= matches!(&channel, Some(Ok(_))) && attempts.1.is_ok() && attempts.2.is_ok();
        assert!(room > 0 || attempts.0.is_err(), "the limit has no effect");
        drop(channel);
        drop(attempts);
        // Another thread closes what peers could send to.
        wait_until(&format!("all is closed, with room for {room}"), || descriptors() == before);
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

/// Numbers that differ from call to call, and from child to child.
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
    *state >> 33
}

/// Says something to the device at an address, as no honest process does.
fn says(at: IpAddr, text: &[u8], files: &[i32]) -> i32 {
    let name = format!("\0ibverbs-software 8 {at}");
    // SAFETY: plain system calls, with structures of the sizes that they are told.
    unsafe {
        let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let socket = libc::socket(libc::AF_UNIX, kind, 0);
        let mut to: libc::sockaddr_un = std::mem::zeroed();
        to.sun_family = libc::AF_UNIX as _;
        to.sun_path.iter_mut().zip(name.bytes()).for_each(|(to, from)| *to = from as _);
        let status = libc::connect(socket, (&raw const to).cast(), (2 + name.len()) as u32);
        let refused = std::io::Error::last_os_error().raw_os_error() == Some(libc::ECONNREFUSED);
        assert!(status == 0 || !refused, "nobody listens at {name:?}: has the version changed?");
        let mut control = [0_u64; 4];
        let header = control.as_mut_ptr().cast::<libc::cmsghdr>();
        let size = size_of_val(files) as u32;
        (*header).cmsg_len = libc::CMSG_LEN(size) as _;
        (*header).cmsg_level = libc::SOL_SOCKET;
        (*header).cmsg_type = libc::SCM_RIGHTS;
        let to = libc::CMSG_DATA(header).cast::<i32>();
        files.iter().enumerate().for_each(|(i, &file)| to.add(i).write_unaligned(file));
        let mut part =
            libc::iovec { iov_base: text.as_ptr().cast_mut().cast(), iov_len: text.len() };
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&mut part, 1);
        if !files.is_empty() {
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(size) as _;
        }
        libc::sendmsg(socket, &message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        socket
    }
}

/// The child's part of the next test: does to all that it shares with its peer what a process can, and stops.
#[test]
fn misuses_what_it_shares() {
    if !is_child("misuses_what_it_shares") {
        return;
    }
    let device = Device::new().unwrap();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let (mut channel, told) = prepare(&domain).connect(parent(), b"", deadline()).unwrap();
    let addresses: Vec<IpAddr> =
        std::str::from_utf8(&told).unwrap().split(' ').map(|it| it.parse().unwrap()).collect();
    let mut buffer = domain.allocate::<u32>(1).unwrap();
    while buffer[0] != u32::MAX {
        channel.until(deadline()).receive(buffer.slice_mut(..).unwrap()).unwrap();
        channel.until(deadline()).send(buffer.slice(..).unwrap()).unwrap();
    }
    let mut state = u64::from(std::process::id());
    let rings = child::rings();
    assert_eq!(rings.len(), 2, "one to the peer, and one of it");
    // SAFETY: the memory stays mapped: nothing is dropped. The files are this process's; plain system calls.
    unsafe {
        // A new ring that is introduced as another's, with every file of this process as a proof.
        let ring =
            libc::memfd_create(c"ring".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
        assert_eq!(libc::ftruncate(ring, 4096 + (4 << 20)), 0);
        let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        assert_eq!(libc::fcntl(ring, libc::F_ADD_SEALS, seals), 0);
        for proof in 3..64 {
            for from in &addresses {
                says(addresses[0], from.to_string().as_bytes(), &[ring, proof]);
            }
        }
        for from in &addresses {
            says(addresses[0], from.to_string().as_bytes(), &[ring]);
            says(addresses[0], from.to_string().as_bytes(), &[]);
        }
        for _ in 0..2000 {
            let (file, any) = (3 + random(&mut state) as i32 % 61, random(&mut state));
            match random(&mut state) % 8 {
                0 => {
                    _ = libc::fcntl(
                        file,
                        libc::F_SETFL,
                        libc::O_RDWR | (any as i32 & libc::O_NONBLOCK),
                    )
                }
                1 => {
                    // Also the counter of an eventfd, which is full then.
                    let most = u64::MAX - 1;
                    let flags = libc::fcntl(file, libc::F_GETFL);
                    libc::fcntl(file, libc::F_SETFL, flags | libc::O_NONBLOCK);
                    libc::write(file, (&raw const most).cast(), 8);
                    libc::fcntl(file, libc::F_SETFL, flags & !libc::O_NONBLOCK);
                }
                2 => {
                    _ = libc::send(
                        file,
                        [0_u8; 64].as_ptr().cast(),
                        any as usize % 64,
                        libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
                    )
                }
                3 => _ = libc::recv(file, [0_u8; 64].as_mut_ptr().cast(), 64, libc::MSG_DONTWAIT),
                4 if any % 64 == 0 => _ = libc::shutdown(file, any as i32 / 64 % 3),
                5 => _ = says(addresses[0], &any.to_ne_bytes(), &[file][..any as usize % 2]),
                6 => {
                    let ring = rings[any as usize % 2].cast::<u32>();
                    // The positions, the flags, and what is behind them.
                    ring.add(random(&mut state) as usize % 6 * 16).write_volatile(any as u32);
                }
                _ => {
                    let ring = rings[any as usize % 2].add(4096).cast::<u32>();
                    ring.add(random(&mut state) as usize % 4096).write_volatile(any as u32);
                }
            }
        }
        println!("misused");
        libc::raise(libc::SIGSTOP);
        libc::_exit(0);
    }
}

/// Each of them costs its own connection alone: another one goes on, and no call of this process waits for them.
#[test]
fn processes_that_misuse_what_they_share_harm_nobody_else() {
    let _alone = alone();
    let device = Device::new().unwrap();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let _honest = Process::run("sends_back_until_its_peer_is_gone", address);
    let (mut honest, _) = prepare(&domain).accept(&listener, b"", deadline()).unwrap();
    exchange(&mut honest, &domain, |_| rings() == 2);
    let addresses = format!("{} {} 127.0.0.1", device.address(), fixed_address());
    let mut strangers = Vec::new();
    for round in 0..4 {
        let mut child = Process::run("misuses_what_it_shares", address);
        let prepared = prepare(&domain);
        let (mut channel, _) =
            prepared.accept(&listener, addresses.as_bytes(), deadline()).unwrap();
        // A ring that the other side does not take soon is withdrawn, and there is another one later.
        let (process, mut since) = (child.0.id(), Instant::now());
        exchange(&mut channel, &domain, |_| {
            if rings_of(process) != 2 {
                since = Instant::now();
            }
            since.elapsed() > Duration::from_millis(300)
        });
        let mut last = domain.allocate::<u32>(1).unwrap();
        last[0] = u32::MAX;
        channel.until(deadline()).send(last.slice(..).unwrap()).unwrap();
        channel.until(deadline()).receive(last.slice_mut(..).unwrap()).unwrap();
        let ended = std::thread::scope(|scope| {
            let told = scope.spawn(|| child.wait_for("misused"));
            while !told.is_finished() {
                exchange(&mut honest, &domain, |number| number == 20);
            }
            told.join()
        });
        ended.unwrap();
        // Whatever becomes of it, it becomes so by the deadline.
        let soon = Instant::now() + Duration::from_millis(300);
        let _ = channel.until(soon).send(());
        exchange(&mut honest, &domain, |number| number == 60);
        context.query_port(1).unwrap();
        if round % 2 == 0 {
            strangers.push((child, channel));
        }
    }
    drop(strangers);
    exchange(&mut honest, &domain, |number| number == 60);
}

/// A socket that nobody can close without waiting for the process that has the other one, which takes nothing.
fn closes_slowly() -> [TcpStream; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut slow = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (other, _) = listener.accept().unwrap();
    slow.set_nonblocking(true).unwrap();
    while slow.write(&[0; 1 << 16]).is_ok() {}
    let linger = libc::linger { l_onoff: 1, l_linger: 100_000 };
    let (value, size) = ((&raw const linger).cast(), size_of_val(&linger) as u32);
    // SAFETY: the value is live, and of that size.
    let status = unsafe {
        libc::setsockopt(slow.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, value, size)
    };
    assert_eq!(status, 0);
    [slow, other]
}

/// A process sends files whose closing takes for ever. The other one's device refuses them, and waits neither for that process nor for
/// the thread that closes them. As long as that thread waits, nobody is let in.
#[test]
fn files_that_close_slowly_stop_no_device() {
    let _alone = alone();
    let device = Device::new().unwrap();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    let is_refused = |connection: &OwnedFd| {
        let mut file = libc::pollfd { fd: connection.as_raw_fd(), events: 0, revents: 0 };
        // SAFETY: one live structure.
        unsafe { libc::poll(&mut file, 1, 0) == 1 && file.revents & libc::POLLHUP != 0 }
    };
    for are_closed in [true, false] {
        let at = listener.local_addr().unwrap();
        let mut child = Process::run("sends_back_until_its_peer_is_gone", at);
        let (mut channel, _) = prepare(&domain).accept(&listener, b"", deadline()).unwrap();
        let [_, b, c, d] = std::process::id().to_be_bytes();
        let (address, own) = (IpAddr::from([127, 160 | b, c, d]), device.address().to_string());
        let process = child.0.id() as libc::pid_t;
        let send = |times| {
            // With room for the files, and without.
            let messages = [("?", 1), ("?", 2), (&own, 2), (&own, 3), (&own, 4)];
            let send = |&(text, files): &(&str, usize)| {
                let [slow, other] = closes_slowly();
                let mut all = vec![null.as_raw_fd(); files];
                all[files - 1] = slow.as_raw_fd();
                // SAFETY: the new descriptor is this test's.
                (other, unsafe { OwnedFd::from_raw_fd(says(address, text.as_bytes(), &all)) })
            };
            messages.iter().cycle().take(times).map(send).unzip()
        };
        let count = |all: &[OwnedFd]| all.iter().filter(|it| is_refused(it)).count();
        // This process closes its own copies while the other one is stopped, and has closed none.
        let mut status = 0;
        // SAFETY: the child is ours, and the status live.
        let (first_others, first): (Vec<_>, Vec<_>) = unsafe {
            assert_eq!(libc::kill(process, libc::SIGSTOP), 0);
            assert_eq!(libc::waitpid(process, &mut status, libc::WUNTRACED), process);
            let sent = send(100);
            assert_eq!(libc::kill(process, libc::SIGCONT), 0);
            sent
        };
        // Of each, the connection and its file wait to be closed.
        wait_until("none is refused", || count(&first) > 50);
        // Who would close what is sent there?
        exchange_through_the_kernel(&mut channel, &domain);
        // These wait at the listener.
        let (others, more): (Vec<_>, Vec<_>) = send(10);
        exchange(&mut channel, &domain, |number| number == 100);
        assert_eq!(count(&more), 0);
        if are_closed {
            drop((first_others, others));
            exchange(&mut channel, &domain, |_| rings() == 2);
            wait_until("it looks no more", || count(&first) + count(&more) == 110);
        }
        let mut last = domain.allocate::<u32>(1).unwrap();
        last[0] = u32::MAX;
        channel.until(deadline()).send(last.slice(..).unwrap()).unwrap();
        let end = deadline();
        while child.0.try_wait().unwrap().is_none() {
            assert!(Instant::now() < end, "the device's end waits for a file");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(count(&first) + count(&more), 110);
    }
}
