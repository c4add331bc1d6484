//! READ and WRITE that the initiator carries out in the memory of the target's process.

#[path = "support/child.rs"]
mod child;
#[path = "support/patience.rs"]
mod patience;

use std::io::Write;
use std::net::TcpListener;
use std::time::{Duration, Instant};

use ibverbs::{
    AccessFlags, Channel, MemoryRegion, PreparedChannel, ProtectionDomain, RemoteMemoryRegion,
    SharedMemoryRegion, TransportError, WorkStatus,
    settings::{AckTimeout, MaxAckRetries, MaxRnrRetries},
};
use ibverbs_software::Device;

use child::{Process, is_child, parent};
use patience::deadline;

const LENGTH: usize = 1 << 20;

fn device() -> Device {
    Device::builder().strict(false).one_sided(true).build().unwrap()
}

fn prepare<'a>(domain: &'a ProtectionDomain<'a>) -> PreparedChannel<'a> {
    domain
        .create_channel()
        .access(AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ)
        .ack_timeout(AckTimeout::from_duration(Duration::from_millis(30)).unwrap())
        .max_ack_retries(MaxAckRetries::new(7).unwrap())
        .max_rnr_retries(MaxRnrRetries::UNLIMITED)
        .build()
        .unwrap()
}

fn allocate_shared<'a>(domain: &'a ProtectionDomain<'a>) -> SharedMemoryRegion<'a, u8> {
    let access = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_READ | AccessFlags::LOCAL_WRITE;
    domain.allocate_shared::<u8>(LENGTH, access).unwrap()
}

fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().zip(1..).map(|(&byte, at)| u64::from(byte) * at).sum()
}

/// Messages by which the initiator tells the target what to do. They come after the WRITEs before them.
const TELL_SUM: u8 = 0;
const DEREGISTER: u8 = 1;
const REMOVE: u8 = 2;
const END: u8 = 3;

/// The target's part.
#[test]
fn lets_its_peer_in() {
    if !is_child("lets_its_peer_in") {
        return;
    }
    let device = device();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let mut region = Some(allocate_shared(&domain));
    let remote = region.as_ref().unwrap().remote().to_bytes();
    let (mut channel, _) = prepare(&domain).connect(parent(), &remote, deadline()).unwrap();
    let mut told = domain.allocate::<u8>(1).unwrap();
    loop {
        if channel.until(deadline()).receive(told.slice_mut(..).unwrap()).is_err() {
            return; // a request that is not allowed ends the connection
        }
        match (told[0], &region) {
            (TELL_SUM, Some(region)) => println!("the sum is {}.", sum(&region.to_vec())),
            (DEREGISTER, _) => {
                region = None;
                println!("deregistered");
            }
            (REMOVE, _) => {
                // Once the peer knows that the message has arrived.
                std::io::stdin().read_line(&mut String::new()).unwrap();
                device.remove();
                device.set_port_active(1, false).unwrap();
                device.set_port_active(1, true).unwrap();
                println!("removed");
                loop {
                    std::thread::park(); // until it is killed
                }
            }
            _ => break,
        }
    }
    assert_eq!(device.counters().one_sided, 0, "it was the target only");
    println!("ended well");
}

/// The initiator's side of a connection to such a target.
struct Initiator<'a> {
    target: Process,
    device: &'a Device,
    channel: Channel<'a>,
    remote: RemoteMemoryRegion,
    memory: MemoryRegion<'a, u8>,
}

impl<'a> Initiator<'a> {
    /// Makes an initiator, whose first WRITEs go by packets, until the target has let it in.
    fn new(device: &'a Device, domain: &'a ProtectionDomain<'a>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let target = Process::run("lets_its_peer_in", listener.local_addr().unwrap());
        let (channel, remote) = prepare(domain).accept(&listener, b"", deadline()).unwrap();
        let remote = RemoteMemoryRegion::from_bytes(&remote).unwrap();
        let memory = domain.allocate::<u8>(LENGTH).unwrap();
        let mut new = Self { target, device, channel, remote, memory };
        let (before, end) = (device.counters().one_sided, deadline());
        while device.counters().one_sided == before {
            assert!(Instant::now() < end, "no WRITE is one-sided: does the kernel refuse it?");
            new.write(0..1).unwrap();
        }
        new
    }

    fn write(&mut self, range: std::ops::Range<usize>) -> Result<(), TransportError> {
        let remote = self.remote.slice(range.start as u64..range.end as u64).unwrap();
        let own = self.memory.slice(range).unwrap();
        self.channel.until(deadline()).write(own, remote).map(drop)
    }

    fn read(&mut self, range: std::ops::Range<usize>) -> Result<(), TransportError> {
        let remote = self.remote.slice(range.start as u64..range.end as u64).unwrap();
        let own = self.memory.slice_mut(range).unwrap();
        self.channel.until(deadline()).read(own, remote).map(drop)
    }

    fn tell(&mut self, what: u8) {
        self.memory[0] = what;
        self.channel.until(deadline()).send(self.memory.slice(..1).unwrap()).unwrap();
    }

    fn signal(&self, signal: i32) {
        // SAFETY: no memory is involved; the child is ours, and was not waited for.
        assert_eq!(unsafe { libc::kill(self.target.0.id() as i32, signal) }, 0);
    }

    /// Stops the target's process: all of its threads.
    fn stop(&self) {
        self.signal(libc::SIGSTOP);
        let (stat, end) = (format!("/proc/{}/stat", self.target.0.id()), deadline());
        while !std::fs::read_to_string(&stat).unwrap().contains(") T ") {
            assert!(Instant::now() < end);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn status(result: Result<(), TransportError>) -> WorkStatus {
    match result.unwrap_err() {
        TransportError::Work(error) => error.status(),
        other => panic!("{other}"),
    }
}

#[test]
fn a_target_that_is_stopped_is_written_and_read() {
    let device = device();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let mut it = Initiator::new(&device, &domain);
    it.stop();
    let before = it.device.counters();
    let mut expected = vec![0; LENGTH];
    let mut operations = 0;
    for (round, length) in [1, 7, 64, 4096, 4097, 100_000, LENGTH].into_iter().enumerate() {
        let start = (LENGTH - length) / 3;
        it.memory.fill(round as u8 + 1);
        expected[start..start + length].fill(round as u8 + 1);
        it.write(start..start + length).unwrap();
        it.memory.fill(0xff);
        it.read(0..LENGTH).unwrap();
        assert!(it.memory[..] == expected[..], "round {round}");
        operations += 2;
    }
    let after = it.device.counters();
    assert_eq!(after.one_sided - before.one_sided, operations);
    assert_eq!(after.packets_sent, before.packets_sent);
    // A message that is sent after a WRITE comes after it.
    it.memory.iter_mut().zip(0_u64..).for_each(|(to, at)| *to = (at * at) as u8);
    let written = sum(&it.memory);
    it.write(0..LENGTH).unwrap();
    it.signal(libc::SIGCONT);
    it.tell(TELL_SUM);
    it.target.wait_for(&format!("the sum is {written}."));
    it.tell(END);
    it.target.wait_for("ended well");
}

#[test]
fn what_the_target_does_not_allow_fails_as_by_packets() {
    let device = device();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    // The target refuses access behind the end, by the key of another region, and to a deregistered region.
    let mut it = Initiator::new(&device, &domain);
    it.remote =
        RemoteMemoryRegion::new(it.remote.address() + 1, LENGTH as u64, it.remote.rkey()).unwrap();
    assert_eq!(status(it.write(0..LENGTH)), WorkStatus::RemoteAccess);
    let mut it = Initiator::new(&device, &domain);
    it.remote =
        RemoteMemoryRegion::new(it.remote.address(), LENGTH as u64, it.remote.rkey() ^ 1).unwrap();
    assert_eq!(status(it.read(0..8)), WorkStatus::RemoteAccess);
    let mut it = Initiator::new(&device, &domain);
    it.tell(DEREGISTER);
    it.target.wait_for("deregistered");
    assert_eq!(status(it.write(0..8)), WorkStatus::RemoteAccess);
}

#[test]
fn a_target_that_is_killed_is_gone() {
    let device = device();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let mut it = Initiator::new(&device, &domain);
    it.target.kill();
    assert_eq!(status(it.write(0..8)), WorkStatus::RetryExceeded);
    // Nor is a queue pair that was destroyed a way into memory.
    let mut it = Initiator::new(&device, &domain);
    it.tell(END);
    assert!(it.target.0.wait().unwrap().success());
    assert_eq!(status(it.write(0..8)), WorkStatus::RetryExceeded);
}

/// The target's memory and its process are there still, and its port has come up again.
#[test]
fn a_target_whose_device_is_removed_is_gone() {
    let device = device();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let mut it = Initiator::new(&device, &domain);
    it.tell(REMOVE);
    it.target.0.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    it.target.wait_for("removed");
    assert_eq!(status(it.write(0..8)), WorkStatus::RetryExceeded);
}

/// The initiator's part: where the kernel refuses.
#[test]
fn goes_by_packets() {
    if !is_child("goes_by_packets") {
        return;
    }
    refuse();
    let device = device();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let (mut channel, remote) = prepare(&domain).connect(parent(), b"", deadline()).unwrap();
    let remote = RemoteMemoryRegion::from_bytes(&remote).unwrap();
    let mut memory = domain.allocate::<u8>(LENGTH).unwrap();
    for round in 0..20 {
        memory.fill(round);
        channel.until(deadline()).write(memory.slice(..).unwrap(), remote).unwrap();
        channel.until(deadline()).read(memory.slice_mut(..).unwrap(), remote).unwrap();
        assert!(memory.iter().all(|&byte| byte == round));
        // The target's table is here when the target has answered a few times.
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(device.counters().one_sided, 0);
    println!("went by packets");
}

/// Makes the kernel refuse `process_vm_readv` and `process_vm_writev` to this process, as in a container.
fn refuse() {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const EQUALS: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let step = |code, jt, jf, k: i64| libc::sock_filter { code, jt, jf, k: k as u32 };
    let refused = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let mut steps = [
        step(LOAD, 0, 0, 0), // the number of the call
        step(EQUALS, 2, 0, libc::SYS_process_vm_readv),
        step(EQUALS, 1, 0, libc::SYS_process_vm_writev),
        step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW.into()),
        step(RETURN, 0, 0, refused.into()),
    ];
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: the program is live, and its jumps stay within it.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER as libc::c_ulong;
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program), 0);
    }
}

#[test]
fn where_the_kernel_refuses_operations_go_by_packets() {
    let device = device();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let region = allocate_shared(&domain);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut child = Process::run("goes_by_packets", listener.local_addr().unwrap());
    let remote = region.remote().to_bytes();
    let (_channel, _) = prepare(&domain).accept(&listener, &remote, deadline()).unwrap();
    child.wait_for("went by packets");
}

/// The initiator's part of the next test: is in a region of its peer and does not leave.
#[test]
fn stops_in_the_memory_of_its_peer() {
    if !is_child("stops_in_the_memory_of_its_peer") {
        return;
    }
    let device = device();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let (mut channel, remote) = prepare(&domain).connect(parent(), b"", deadline()).unwrap();
    let remote = RemoteMemoryRegion::from_bytes(&remote).unwrap();
    let memory = domain.allocate::<u8>(8).unwrap();
    let end = deadline();
    while device.counters().one_sided == 0 {
        assert!(Instant::now() < end, "no WRITE is one-sided: does the kernel refuse it?");
        channel.until(end).write(memory.slice(..).unwrap(), remote.slice(..8).unwrap()).unwrap();
    }
    for start in child::rings() {
        // SAFETY: this is in the memory of a ring, which stays mapped, where an operation says which region it is in.
        unsafe { start.cast::<u64>().add(24).write_volatile(remote.rkey().into()) };
    }
    println!("in the memory");
    loop {
        std::thread::park(); // until it is killed
    }
}

#[test]
fn a_peer_that_stops_in_a_region_keeps_that_region_alone() {
    let device = device();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let (region, other) = (allocate_shared(&domain), allocate_shared(&domain));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut peer = Process::run("stops_in_the_memory_of_its_peer", listener.local_addr().unwrap());
    let remote = region.remote().to_bytes();
    let (channel, _) = prepare(&domain).accept(&listener, &remote, deadline()).unwrap();
    peer.wait_for("in the memory");
    std::thread::scope(|scope| {
        let closes = scope.spawn(|| region.close());
        // The device works while it waits.
        let mut calls = 0;
        while !closes.is_finished() {
            context.query_port(1).unwrap();
            drop(domain.create_channel().build().unwrap());
            calls += 1;
        }
        assert!(calls > 10, "{calls}");
        let error = closes.join().unwrap().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBUSY), "{error}");
    });
    other.close().unwrap();
    drop(channel);
}
