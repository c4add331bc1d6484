//! Two engines on a simulated wire and virtual time: lost, delayed, duplicated and forged packets.

use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::Engine;
use super::memory::{Backing, Sge};
use super::objects::NewQueuePair;
use super::queue_pair::Transport;
use super::queues::CompletionQueue;
use super::timers::Time;
use super::work::{Completion, Data, Extra, Operation, Receive, SendRequest};
use crate::builder::Builder;
use crate::ffi::*;
use crate::link::{Clock, Link};
use crate::wire::header::{AtomicEth, Bth, Reth};
use crate::wire::{PORT, Packet, icrc, opcode};

#[derive(Debug, Default)]
pub(super) struct VirtualClock(pub(super) AtomicU64);

impl Clock for VirtualClock {
    fn now(&self) -> Time {
        self.0.load(Ordering::Relaxed)
    }

    fn wall_clock(&self) -> Time {
        self.now()
    }

    fn min_timeout(&self) -> Time {
        0
    }
}

pub(super) type Sent = Arc<Mutex<VecDeque<(IpAddr, IpAddr, Vec<u8>)>>>;

#[derive(Debug)]
pub(super) struct MemoryLink(pub(super) Sent);

impl Link for MemoryLink {
    fn send(&mut self, packets: &mut [Packet]) {
        let mut sent = self.0.lock().unwrap();
        for packet in packets {
            let (from, to) = packet.addresses.unwrap();
            sent.push_back((from, to, packet.bytes.clone()));
        }
    }

    fn join(&mut self, _: IpAddr) -> io::Result<()> {
        Ok(())
    }

    fn leave(&mut self, _: IpAddr) {}

    fn set_addresses(&mut self, _: &[IpAddr]) -> io::Result<()> {
        Ok(())
    }
}

/// xorshift64*
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    pub(super) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

const MTU: usize = 256;
const LENGTH: usize = 8192;
/// Memory next to a region, which must not change.
const GUARD: usize = 512;
const GUARD_BYTE: u8 = 0xa5;

/// A device with one queue pair, and a region for everything.
struct Side {
    engine: Engine,
    address: IpAddr,
    cq: u32,
    qp: u32,
    memory: Box<[u64]>,
    key: u32,
}

const SEND_LOCAL: u32 = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;
const ALL: u32 = SEND_LOCAL
    | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0
    | ibv_access_flags::IBV_ACCESS_REMOTE_READ.0
    | ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC.0;

impl Side {
    fn new(address: IpAddr, clock: &Arc<VirtualClock>, sent: &Sent) -> Self {
        let settings = Builder::new().port([address]).settings();
        let link = Box::new(MemoryLink(sent.clone()));
        let mut engine = Engine::new(settings, clock.clone(), link);
        let pd = engine.alloc_pd().unwrap();
        let cq = engine.create_cq(CompletionQueue::new(1, 0, 65_536, None)).unwrap();
        let cap = ibv_qp_cap {
            max_send_wr: 1024,
            max_recv_wr: 1024,
            max_send_sge: 4,
            max_recv_sge: 4,
            max_inline_data: 64,
        };
        let new = NewQueuePair {
            handle: 2,
            context: 0,
            pd,
            transport: Transport::Rc,
            send_cq: cq,
            receive_cq: cq,
            srq: None,
            all_signaled: true,
            cap,
        };
        let qp = engine.create_qp(new).unwrap();
        let guard = u64::from_ne_bytes([GUARD_BYTE; 8]);
        let mut memory = vec![guard; (LENGTH + 2 * GUARD) / 8].into_boxed_slice();
        memory[GUARD / 8..(GUARD + LENGTH) / 8].fill(0);
        let start = memory.as_ptr() as u64 + GUARD as u64;
        let backing = Backing::Memory(start);
        let key = engine.register(pd, backing, LENGTH as u64, 0x10_0000, ALL).unwrap();
        Self { engine, address, cq, qp, memory, key }
    }

    fn connect(&mut self, to: IpAddr, qpn: u32) {
        type M = ibv_qp_attr_mask;
        let mut attr = ibv_qp_attr {
            qp_state: ibv_qp_state::IBV_QPS_INIT,
            port_num: 1,
            qp_access_flags: ALL,
            path_mtu: ibv_mtu::IBV_MTU_256,
            dest_qp_num: qpn,
            rq_psn: 0xff_fff0,
            sq_psn: 0xff_fff0,
            max_rd_atomic: 4,
            max_dest_rd_atomic: 4,
            min_rnr_timer: 1,
            timeout: 8,
            retry_cnt: 7,
            rnr_retry: 7,
            ..Default::default()
        };
        attr.ah_attr.is_global = 1;
        attr.ah_attr.port_num = 1;
        let IpAddr::V4(v4) = to else { panic!("IPv4") };
        attr.ah_attr.grh.dgid.raw = v4.to_ipv6_mapped().octets();
        let init = M::IBV_QP_STATE | M::IBV_QP_PORT | M::IBV_QP_PKEY_INDEX | M::IBV_QP_ACCESS_FLAGS;
        let rtr = M::IBV_QP_STATE
            | M::IBV_QP_AV
            | M::IBV_QP_PATH_MTU
            | M::IBV_QP_DEST_QPN
            | M::IBV_QP_RQ_PSN
            | M::IBV_QP_MAX_DEST_RD_ATOMIC
            | M::IBV_QP_MIN_RNR_TIMER;
        let rts = M::IBV_QP_STATE
            | M::IBV_QP_TIMEOUT
            | M::IBV_QP_RETRY_CNT
            | M::IBV_QP_RNR_RETRY
            | M::IBV_QP_SQ_PSN
            | M::IBV_QP_MAX_QP_RD_ATOMIC;
        self.engine.modify_qp(self.qp, &attr, init.0).unwrap();
        attr.qp_state = ibv_qp_state::IBV_QPS_RTR;
        self.engine.modify_qp(self.qp, &attr, rtr.0).unwrap();
        attr.qp_state = ibv_qp_state::IBV_QPS_RTS;
        self.engine.modify_qp(self.qp, &attr, rts.0).unwrap();
    }

    fn state(&self) -> ibv_qp_state {
        self.engine.qps.get(self.qp).unwrap().state
    }

    fn sge(&self, at: usize, length: usize) -> Sge {
        Sge { address: 0x10_0000 + at as u64, length: length as u32, lkey: self.key }
    }

    fn post(&mut self, id: u64, operation: Operation, extra: Extra, at: usize, length: usize) {
        let request = SendRequest {
            id,
            operation,
            extra,
            data: Data::List(vec![self.sge(at, length)]),
            length: length as u32,
            signaled: true,
            solicited: false,
            fence: false,
            destination: None,
        };
        self.engine.post_send(self.qp, request).unwrap();
        self.engine.kick(self.qp);
        self.engine.settle();
    }

    fn receive(&mut self, id: u64, at: usize, length: usize) {
        let list = vec![self.sge(at, length)];
        self.engine.post_receive(self.qp, Receive { id, list }).unwrap();
    }

    fn poll(&mut self) -> Vec<Completion> {
        std::iter::from_fn(|| self.engine.poll(self.cq)).collect()
    }

    /// The bytes of the region.
    fn bytes(&self) -> Vec<u8> {
        let all: Vec<u8> = self.memory.iter().flat_map(|word| word.to_ne_bytes()).collect();
        all[GUARD..GUARD + LENGTH].to_vec()
    }

    fn write(&mut self, at: usize, bytes: &[u8]) {
        let words = bytes.chunks_exact(8).map(|w| u64::from_ne_bytes(w.try_into().unwrap()));
        for (to, from) in self.memory[(GUARD + at) / 8..].iter_mut().zip(words) {
            *to = from;
        }
    }

    fn assert_guards(&self) {
        let guard = u64::from_ne_bytes([GUARD_BYTE; 8]);
        let (head, rest) = self.memory.split_at(GUARD / 8);
        let tail = &rest[LENGTH / 8..];
        assert!(head.iter().chain(tail).all(|&word| word == guard));
    }
}

struct World {
    sides: [Side; 2],
    clock: Arc<VirtualClock>,
    sent: Sent,
    random: Random,
    /// All packets that were sent, with their times.
    trace: crc32fast::Hasher,
    /// Their bytes, without the CRC.
    packets: Vec<Vec<u8>>,
}

impl World {
    fn new(seed: u64) -> Self {
        let (clock, sent) = (Arc::new(VirtualClock::default()), Sent::default());
        let addresses = [IpAddr::from([127, 9, 9, 1]), IpAddr::from([127, 9, 9, 2])];
        let mut sides = addresses.map(|address| Side::new(address, &clock, &sent));
        let numbers = [sides[0].qp, sides[1].qp];
        sides[0].connect(addresses[1], numbers[1]);
        sides[1].connect(addresses[0], numbers[0]);
        Self {
            sides,
            clock,
            sent,
            random: Random(seed),
            trace: crc32fast::Hasher::new(),
            packets: Vec::new(),
        }
    }

    /// Delivers packets, of which this percentage is lost, duplicated or delayed, until both engines are idle.
    fn run(&mut self, percent: u64) {
        for _ in 0..2_000_000 {
            let packet = {
                let mut sent = self.sent.lock().unwrap();
                let late = sent.len() > 1 && self.random.below(100) < percent;
                if late { sent.remove(1) } else { sent.pop_front() }
            };
            if let Some((from, to, bytes)) = packet {
                self.trace.update(&self.clock.now().to_ne_bytes());
                self.trace.update(&bytes);
                self.packets.push(bytes[..bytes.len() - icrc::SIZE].to_vec());
                if self.random.below(100) < percent {
                    continue;
                }
                let twice = 1 + u64::from(self.random.below(100) < percent);
                for _ in 0..twice {
                    self.deliver(from, to, &bytes);
                }
                continue;
            }
            let due = self.sides.iter().filter_map(|side| side.engine.due()).min();
            let Some(due) = due else { return };
            self.clock.0.fetch_max(due, Ordering::Relaxed);
            for side in &mut self.sides {
                side.engine.advance();
                side.engine.settle();
            }
        }
        panic!("it never ends");
    }

    fn deliver(&mut self, from: IpAddr, to: IpAddr, bytes: &[u8]) {
        if let Some(side) = self.sides.iter_mut().find(|side| side.address == to) {
            side.engine.receive((from, PORT), to, bytes);
            side.engine.settle();
        }
    }
}

/// Every kind of request at once, over a bad wire.
fn everything(seed: u64, percent: u64) -> World {
    let mut world = World::new(seed);
    let pattern: Vec<u8> = (0..4096).map(|i| (i * 7 + i / 256) as u8).collect();
    world.sides[0].write(0, &pattern);
    let rkey = world.sides[1].key;
    let length = 5 * MTU + 7;
    for i in 0..8 {
        world.sides[1].receive(100 + i, 4096 + 8 * i as usize, 8);
    }
    let [one, _] = &mut world.sides;
    one.post(1, Operation::Write { address: 0x10_0000, rkey }, Extra::None, 0, length);
    for i in 0..4 {
        one.post(10 + i, Operation::Send, Extra::Immediate(i as u32), 8 * i as usize, 8);
        let add = Operation::FetchAdd { address: 0x10_0000 + 6000, rkey, add: 1 };
        one.post(20 + i, add, Extra::None, 7200 + 8 * i as usize, 8);
    }
    one.post(2, Operation::Read { address: 0x10_0000, rkey }, Extra::None, 4096, 4096 - 1096);
    let last = Operation::Write { address: 0x10_0000 + 2048, rkey };
    one.post(3, last, Extra::Immediate(77), 0, 0);
    world.run(percent);

    let [one, two] = &mut world.sides;
    let mut ids = Vec::new();
    for completion in one.poll() {
        assert_eq!(completion.status, ibv_wc_status::IBV_WC_SUCCESS, "{completion:?}");
        ids.push(completion.id);
    }
    assert_eq!(ids, [1, 10, 20, 11, 21, 12, 22, 13, 23, 2, 3], "in the order of the requests");
    let received = two.poll();
    let immediate: Vec<_> = received.iter().map(|c| (c.id, c.immediate)).collect();
    assert_eq!(immediate, [(100, 0), (101, 1), (102, 2), (103, 3), (104, 77)]);
    let (here, there) = (one.bytes(), two.bytes());
    assert_eq!(there[..length], pattern[..length]);
    assert_eq!(there[length..4096], vec![0; 4096 - length]);
    assert_eq!(there[4096..4096 + 32], pattern[..32]);
    assert_eq!(there[6000..6008], 4_u64.to_ne_bytes(), "each was carried out once");
    let before: Vec<u64> =
        here[7200..7232].chunks(8).map(|w| u64::from_ne_bytes(w.try_into().unwrap())).collect();
    assert_eq!(before, [0, 1, 2, 3]);
    assert_eq!(here[4096..4096 + length], pattern[..length]);
    one.assert_guards();
    two.assert_guards();
    world
}

/// What the wire sees of every kind of request, with losses.
pub(super) fn captures() -> Vec<Vec<u8>> {
    everything(11, 10).packets
}

#[test]
fn everything_arrives_once_and_in_order_over_a_bad_wire() {
    for percent in [0, 1, 5, 20] {
        for seed in 1..=25 {
            everything(seed, percent);
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_packets_at_the_same_times() {
    let seen = |seed| everything(seed, 10).trace.finalize();
    assert_eq!(seen(7), seen(7));
    assert_ne!(seen(7), seen(8));
}

/// A packet with a correct CRC and arbitrary contents.
pub(super) fn seal(from: IpAddr, to: IpAddr, mut packet: Vec<u8>) -> Vec<u8> {
    packet.truncate(packet.len() / 4 * 4);
    let icrc = icrc::compute((from, PORT), (to, PORT), &packet);
    packet.extend_from_slice(&icrc.to_le_bytes());
    packet
}

/// Packets of a malicious peer: almost correct.
fn forge(random: &mut Random, qpn: u32, expected: u32, key: u32) -> Vec<u8> {
    let near = |random: &mut Random, n: u32| n.wrapping_add(random.below(5) as u32).wrapping_sub(2);
    let operation = random.below(26) as u8;
    let psn = if random.below(3) > 0 { expected } else { near(random, expected) };
    let mut bth = Bth::new(opcode::RC | operation, qpn, psn & 0xff_ffff);
    bth.acknowledge = random.below(2) == 0;
    bth.pad = if random.below(4) == 0 { random.below(4) as u8 } else { 0 };
    let mut packet = bth.bytes().to_vec();
    let rkey = if random.below(8) == 0 { near(random, key) } else { key };
    let edges = [0, 1, 8, MTU as u64, LENGTH as u64 - 8, LENGTH as u64, 1 << 31, u64::MAX / 2];
    let offset = edges[random.below(8) as usize].wrapping_add(random.below(3)).wrapping_sub(1);
    let address = 0x10_0000_u64.wrapping_add(offset);
    let length = edges[random.below(8) as usize].wrapping_add(random.below(3)) as u32;
    match random.below(4) {
        0 => Reth { address, rkey, length }.write(&mut packet),
        1 => AtomicEth { address, rkey, swap_add: 1, compare: 0 }.write(&mut packet),
        2 => packet.extend_from_slice(&(random.next() as u32).to_be_bytes()),
        _ => {}
    }
    let payload = [0, 1, 8, MTU, MTU + 4, 3 * MTU][random.below(6) as usize];
    packet.resize(packet.len() + payload, 0x66);
    if random.below(4) == 0 {
        let at = random.below(packet.len() as u64) as usize;
        packet[at] ^= 1 << random.below(8);
    }
    packet
}

/// No memory outside of the region changes, no answer is longer than the region that it may read, and
/// the state that is kept for the peer stays bounded.
#[test]
fn forged_packets_do_no_harm() {
    let mut answered = 0;
    for seed in 1..=2000 {
        let mut world = World::new(seed);
        for i in 0..64 {
            world.sides[1].receive(i, 0, LENGTH);
        }
        let (from, to) = (world.sides[0].address, world.sides[1].address);
        for _ in 0..300 {
            let side = &mut world.sides[1];
            if side.state() == ibv_qp_state::IBV_QPS_ERR {
                break;
            }
            let expected = side.engine.qps.get(side.qp).unwrap().responder.expected;
            let packet = forge(&mut world.random, side.qp, expected, side.key);
            let packet = seal(from, to, packet);
            side.engine.receive((from, PORT), to, &packet);
            while side.engine.due() == Some(0) {
                side.engine.advance();
            }
            side.engine.settle();
            let mut sent = world.sent.lock().unwrap();
            let bytes: usize = sent.iter().map(|packet| packet.2.len()).sum();
            answered += sent.len();
            assert!(bytes <= (LENGTH / MTU + 40) * (MTU + 64), "{bytes} bytes for one packet");
            sent.clear();
        }
        world.sides[1].assert_guards();
        // Each receive completed at most once.
        let mut ids: Vec<u64> = world.sides[1].poll().iter().map(|c| c.id).collect();
        let count = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), count);
    }
    assert!(answered > 2000, "{answered}: too few of them get anywhere");
}

/// Random bytes, and packets with a wrong CRC.
#[test]
fn noise_is_dropped() {
    let mut world = World::new(3);
    let (from, to) = (world.sides[0].address, world.sides[1].address);
    for _ in 0..20_000 {
        let length = world.random.below(200) as usize;
        let noise: Vec<u8> = (0..length).map(|_| world.random.next() as u8).collect();
        let sealed = if world.random.below(2) == 0 { seal(from, to, noise) } else { noise };
        world.deliver(from, to, &sealed);
    }
    assert_eq!(world.sides[1].state(), ibv_qp_state::IBV_QPS_RTS);
    let counters = world.sides[1].engine.core.counters;
    assert_eq!(counters.packets_malformed + counters.packets_unexpected, 20_000, "{counters:?}");
}

#[test]
fn what_a_stranger_sends_is_not_for_us() {
    let mut world = World::new(4);
    let (stranger, to) = (IpAddr::from([127, 9, 9, 3]), world.sides[1].address);
    let side = &mut world.sides[1];
    side.receive(1, 0, 64);
    let expected = side.engine.qps.get(side.qp).unwrap().responder.expected;
    let packet = Bth::new(opcode::RC | opcode::SEND_ONLY, side.qp, expected).bytes().to_vec();
    side.engine.receive((stranger, PORT), to, &seal(stranger, to, packet.clone()));
    assert_eq!(side.engine.core.counters.packets_unexpected, 1);
    assert!(side.poll().is_empty());
    let peer = world.sides[0].address;
    world.deliver(peer, to, &seal(peer, to, packet));
    assert_eq!(world.sides[1].poll().len(), 1);
}

/// Deregistered memory is neither read nor written, even if the request was valid when it arrived.
#[test]
fn a_region_that_is_gone_is_not_touched() {
    let mut world = World::new(5);
    let rkey = world.sides[1].key;
    let read = Operation::Read { address: 0x10_0000, rkey };
    world.sides[0].post(1, read, Extra::None, 0, LENGTH);
    let key = world.sides[1].key;
    world.sides[1].engine.deregister(key).unwrap();
    world.run(0);
    let status: Vec<_> = world.sides[0].poll().iter().map(|c| c.status).collect();
    assert_eq!(status, [ibv_wc_status::IBV_WC_REM_ACCESS_ERR]);
    assert_eq!(world.sides[1].state(), ibv_qp_state::IBV_QPS_ERR);
}

#[test]
fn a_dead_peer_costs_virtual_time_only() {
    let mut world = World::new(6);
    world.sides[0].post(1, Operation::Send, Extra::None, 0, 64);
    world.run(100);
    let done = world.sides[0].poll();
    assert_eq!(done[0].status, ibv_wc_status::IBV_WC_RETRY_EXC_ERR);
    // One try and seven more, each of 4.096 us * 2^8.
    assert_eq!(world.clock.now(), 8 * (4096 << 8));
}
