//! Unreliable messages between devices of one machine: none is lost while its reader lives, though they are sent faster than
//! they are received. The first ones too, which are sent before the two processes know each other.

#[path = "support/child.rs"]
mod child;
#[path = "support/patience.rs"]
mod patience;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use ibverbs::{
    CompletionQueue, ProtectionDomain, QueuePair, QueuePairEndpoint, QueuePairType,
    SendWorkRequest, Ud, WorkCompletion, operation::DatagramPeer, queue_pair::AddressVector,
};
use ibverbs_software::Device;

use child::{Process, is_child, parent, rings_of};
use patience::deadline;

/// More than a ring has room for, and than an inbox.
const MESSAGES: usize = 10;
const LENGTH: usize = 8 << 20;
const DATAGRAMS: usize = 6_000;
const DATAGRAM: usize = 4_000;
const QKEY: u32 = 5;

fn take<const N: usize>(queue: &CompletionQueue<'_>, count: usize, room: &mut [WorkCompletion; N]) {
    let (mut done, end) = (0, deadline());
    while done < count {
        let found = queue.poll(room).unwrap();
        assert!(found.iter().all(WorkCompletion::is_success), "{found:?}");
        done += found.len();
        assert!(Instant::now() < end, "{done} of {count} completions");
    }
}

/// Sends the address of this queue pair, and receives that of the other.
fn exchange(stream: &mut TcpStream, own: &QueuePairEndpoint) -> QueuePairEndpoint {
    let own = own.to_bytes();
    stream.write_all(&[own.len() as u8]).unwrap();
    stream.write_all(&own).unwrap();
    let mut length = [0];
    stream.read_exact(&mut length).unwrap();
    let mut other = vec![0; length[0].into()];
    stream.read_exact(&mut other).unwrap();
    QueuePairEndpoint::from_bytes(&other).unwrap()
}

/// Waits for the other side.
fn meet(stream: &mut TcpStream) {
    stream.write_all(&[1]).unwrap();
    stream.read_exact(&mut [0]).unwrap();
}

fn connected<'a>(
    domain: &'a ProtectionDomain<'a>,
    queue: &'a CompletionQueue<'a>,
    stream: &mut TcpStream,
) -> QueuePair<'a, QueuePairType> {
    let builder = domain.create_qp(queue, queue, QueuePairType::UnreliableConnected);
    let prepared = builder.max_send_wr(32).max_recv_wr(32).build().unwrap();
    let other = exchange(stream, &prepared.endpoint());
    prepared.handshake(other).unwrap()
}

fn receiver(mut stream: TcpStream) {
    // Strict mode is off, and with it CRCs, as in a release build.
    let device = Device::builder().strict(false).build().unwrap();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(2 * DATAGRAMS as u32).unwrap();
    let mut room = [WorkCompletion::default(); 64];
    let mut one = connected(&domain, &queue, &mut stream);
    let mut memory = domain.allocate::<u8>(MESSAGES * LENGTH).unwrap();
    for at in 0..MESSAGES {
        let range = at * LENGTH..(at + 1) * LENGTH;
        // SAFETY: nobody looks at the memory before all is there.
        unsafe { one.post_receive(&mut memory, range, at as u64).unwrap() };
    }
    meet(&mut stream);
    take(&queue, MESSAGES, &mut room);
    for at in 0..MESSAGES {
        assert!(memory[at * LENGTH..(at + 1) * LENGTH].iter().all(|&byte| byte == at as u8 + 1));
    }
    meet(&mut stream);
    let builder = domain.create_qp(&queue, &queue, Ud).max_recv_wr(DATAGRAMS as u32).qkey(QKEY);
    let mut datagrams = builder.build().unwrap().activate().unwrap();
    for at in 0..DATAGRAMS {
        let range = at * (DATAGRAM + 40)..(at + 1) * (DATAGRAM + 40);
        // SAFETY: as above.
        unsafe { datagrams.post_receive(&mut memory, range, at as u64).unwrap() };
    }
    exchange(&mut stream, &datagrams.endpoint());
    take(&queue, DATAGRAMS, &mut room);
    assert_eq!(device.counters().packets_malformed, 0);
    for at in 0..DATAGRAMS {
        let start = at * (DATAGRAM + 40) + 40;
        assert_eq!(memory[start..start + 4], (at as u32).to_ne_bytes());
    }
    meet(&mut stream);
}

/// Returns whether the other process has let this one in soon enough: else the messages go through the kernel, which may lose
/// some, and the test ends here.
fn sender(mut stream: TcpStream, is_to_another_process: bool) -> bool {
    // Strict mode is off, and with it CRCs, as in a release build.
    let device = Device::builder().strict(false).build().unwrap();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(2 * DATAGRAMS as u32).unwrap();
    let mut room = [WorkCompletion::default(); 64];
    let mut one = connected(&domain, &queue, &mut stream);
    let mut memory = domain.allocate::<u8>(MESSAGES * LENGTH).unwrap();
    for (byte, chunk) in (1..).zip(memory.chunks_mut(LENGTH)) {
        chunk.fill(byte);
    }
    meet(&mut stream);
    for at in 0..MESSAGES {
        // SAFETY: nobody writes to the memory before all is sent.
        unsafe { one.post_send(&memory, at * LENGTH..(at + 1) * LENGTH, 1).unwrap() };
    }
    take(&queue, MESSAGES, &mut room);
    if is_to_another_process {
        std::thread::sleep(Duration::from_millis(300));
        if rings_of(std::process::id()) == 0 {
            return false;
        }
    }
    meet(&mut stream);
    let builder = domain.create_qp(&queue, &queue, Ud).max_send_wr(DATAGRAMS as u32).qkey(QKEY);
    let mut datagrams = builder.build().unwrap().activate().unwrap();
    let to = exchange(&mut stream, &datagrams.endpoint());
    let path = AddressVector::new(1, 0).global(to.gid(), 0);
    let path = domain.create_ah(&path).unwrap();
    for at in 0..DATAGRAMS {
        memory[at * DATAGRAM..at * DATAGRAM + 4].copy_from_slice(&(at as u32).to_ne_bytes());
        let range = at * DATAGRAM..(at + 1) * DATAGRAM;
        let elements = [memory.gather_element(range).unwrap()];
        let peer = DatagramPeer { path: &path, number: to.num(), qkey: QKEY };
        let request = SendWorkRequest::new(&elements).to(peer);
        // SAFETY: this part of the memory is not written any more.
        unsafe { datagrams.post(request, 1).unwrap() };
    }
    take(&queue, DATAGRAMS, &mut room);
    meet(&mut stream);
    true
}

const BETWEEN: &str = "nothing_is_lost_between_two_processes";

#[test]
fn nothing_is_lost_between_two_processes() {
    if is_child(BETWEEN) {
        return receiver(TcpStream::connect(parent()).unwrap());
    }
    let end = deadline();
    loop {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut child = Process::run(BETWEEN, listener.local_addr().unwrap());
        if sender(listener.accept().unwrap().0, true) {
            assert!(child.0.wait().unwrap().success());
            break;
        }
        assert!(Instant::now() < end, "no process has let this one in");
    }
}

#[test]
fn nothing_is_lost_within_a_process() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || receiver(TcpStream::connect(address).unwrap()));
        assert!(sender(listener.accept().unwrap().0, false));
    });
}
