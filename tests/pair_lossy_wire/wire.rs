//! The connection between the two machines, and the statistics of the wire.

use std::fs;
use std::time::{Duration, Instant};

use ibverbs::{
    AccessFlags, Channel, ProtectionDomain, QueuePairEndpoint,
    settings::{AckTimeout, MaxRnrRetries, MinRnrTimer},
};

use crate::WINDOW;
use crate::two_machines::{Peer, run};

/// The client's requests to the server.
pub(crate) const RECEIVE: u8 = 1;
pub(crate) const RECONNECT: u8 = 2;
pub(crate) const SUM: u8 = 3;
pub(crate) const QUIT: u8 = 4;

/// The deadline of an operation. Far longer than the device's own retries (0.2 s), so that errors mostly come
/// from the device.
pub(crate) fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(2)
}

pub(crate) fn connect<'res>(domain: &'res ProtectionDomain<'_>, peer: &mut Peer) -> Channel<'res> {
    let prepared = Channel::builder(domain)
        .max_send_wr(WINDOW as u32)
        .max_recv_wr(WINDOW as u32)
        .access(AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE)
        // 34 ms per attempt, seven retries. Short, because most of the test's time is spent waiting for it.
        .ack_timeout(AckTimeout::new(13).unwrap())
        .min_rnr_timer(MinRnrTimer::SHORTEST)
        .max_rnr_retries(MaxRnrRetries::UNLIMITED)
        // Each machine has one processor, which also does the device's work.
        .sleep_after(8)
        .build()
        .unwrap();
    let remote: QueuePairEndpoint = peer.exchange(prepared.endpoint());
    let channel = prepared.handshake(remote).unwrap();
    peer.meet_again();
    channel
}

/// Connects both sides again.
pub(crate) fn reconnect<'res>(channel: Channel<'res>, peer: &mut Peer) -> Channel<'res> {
    let prepared = channel.reset().unwrap();
    // Neither is ready before the other has reset its channel.
    let remote: QueuePairEndpoint = peer.exchange(prepared.endpoint());
    // The wire delays packets too: late ones must not be taken for packets of the new connection.
    std::thread::sleep(Duration::from_millis(100));
    let channel = prepared.handshake(remote).unwrap();
    peer.meet_again();
    channel
}

/// A sum over numbers in their order (FNV-1a, by words).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Sum(pub(crate) u64);

impl Sum {
    pub(crate) fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    pub(crate) fn add(&mut self, numbers: &[u64]) {
        for &number in numbers {
            self.0 = (self.0 ^ number).wrapping_mul(0x0100_0000_01b3).rotate_left(29);
        }
    }
}

/// Packets that this machine has sent and that the wire has lost, and requests that reached its device twice
/// or out of order.
pub(crate) type Counts = [u64; 4];

pub(crate) fn counts() -> Counts {
    let queue = run("tc -s qdisc show dev eth0");
    let number = |after: &str| {
        let (_, rest) = queue.split_once(after).unwrap_or_else(|| panic!("{after} in {queue}"));
        rest.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse::<u64>().unwrap()
    };
    let counter = |name: &str| {
        let path = format!("/sys/class/infiniband/rxe1/ports/1/hw_counters/{name}");
        fs::read_to_string(path).unwrap().trim().parse::<u64>().unwrap()
    };
    let sent = number(" bytes ");
    [sent, number("(dropped "), counter("duplicate_request"), counter("out_of_seq_request")]
}
