//! Two engines on a simulated wire and virtual time: lost, delayed, duplicated and forged packets.

mod answers;
mod long_queues;
mod strict;
mod windows;
mod xrc;

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::Engine;
use super::memory::{Backing, Sge};
use super::objects::NewQueuePair;
use super::queue_pair::Transport;
use super::queues::CompletionQueue;
use super::requester::STARVED_FOR;
use super::rig::{MemoryLink, Random, Sent, VirtualClock, extended_queue, receiving, seal};
use super::work::{Completion, Data, Extra, Operation, Receive, SendRequest};
use crate::builder::Builder;
use crate::ffi::*;
use crate::link::Clock;
use crate::link::Time;
use crate::wire::header::{AtomicEth, Bth, Reth, XrcEth};
use crate::wire::{PORT, icrc, opcode};

const MTU: usize = 256;
const LENGTH: usize = 8192;
/// Memory next to a region, which must not change.
const GUARD: usize = 512;
const GUARD_BYTE: u8 = 0xa5;

/// A device with one queue pair for each direction, and a region for everything.
struct Side {
    engine: Engine,
    address: IpAddr,
    cq: u32,
    /// Sends requests; on reliable connections it is also the target of the peer's.
    qp: u32,
    target: u32,
    /// The shared receive queue for extended reliable connections, and the peer's.
    srq: Option<u32>,
    remote_srq: Option<u32>,
    memory: Box<[u64]>,
    key: u32,
    is_unread: Arc<AtomicBool>,
}

const SEND_LOCAL: u32 = ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0;
const ALL: u32 = SEND_LOCAL
    | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0
    | ibv_access_flags::IBV_ACCESS_REMOTE_READ.0
    | ibv_access_flags::IBV_ACCESS_REMOTE_ATOMIC.0;

/// The two halves of an extended reliable connection, or twice the same queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Reliable,
    Extended,
}

impl Side {
    fn new(kind: Kind, address: IpAddr, clock: &Arc<VirtualClock>, sent: &Sent) -> Self {
        let settings = Builder::new().port([address]).settings();
        let link = Box::new(MemoryLink::new(sent));
        let is_unread = link.is_unread.clone();
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
        let new = |transport| NewQueuePair {
            handle: 2,
            context: 0,
            pd: Some(pd),
            xrc_domain: None,
            transport,
            send_cq: Some(cq),
            receive_cq: Some(cq),
            srq: None,
            all_signaled: true,
            cap,
        };
        let (qp, target, srq) = match kind {
            Kind::Reliable => {
                let qp = engine.create_qp(new(Transport::Rc)).unwrap();
                (qp, qp, None)
            }
            Kind::Extended => {
                let domain = engine.open_xrc_domain(None, true, false).unwrap();
                let srq = engine.create_srq(extended_queue((domain, pd, cq), 1024)).unwrap();
                let sending = NewQueuePair { receive_cq: None, ..new(Transport::XrcSend) };
                let sending = engine.create_qp(sending).unwrap();
                let target = engine.create_qp(receiving(domain)).unwrap();
                (sending, target, Some(srq))
            }
        };
        let guard = u64::from_ne_bytes([GUARD_BYTE; 8]);
        let mut memory = vec![guard; (LENGTH + 2 * GUARD) / 8].into_boxed_slice();
        memory[GUARD / 8..(GUARD + LENGTH) / 8].fill(0);
        let start = memory.as_ptr() as u64 + GUARD as u64;
        let backing = Backing::Memory(start);
        let key = engine.register(pd, backing, LENGTH as u64, 0x10_0000, ALL).unwrap();
        Self { engine, address, cq, qp, target, srq, remote_srq: None, memory, key, is_unread }
    }

    /// Connects a queue pair, from RESET to RTS.
    fn connect(&mut self, number: u32, to: IpAddr, qpn: u32) {
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
        type S = ibv_qp_state;
        for state in [S::IBV_QPS_INIT, S::IBV_QPS_RTR, S::IBV_QPS_RTS] {
            attr.qp_state = state;
            let qp = self.engine.qps.get(number).unwrap();
            let needed = super::state::row(qp.transport, qp.state, state).unwrap().0;
            let mask = needed | ibv_qp_attr_mask::IBV_QP_STATE.0;
            self.engine.modify_qp(number, &attr, mask).unwrap();
        }
    }

    fn state(&self) -> ibv_qp_state {
        self.engine.qps.get(self.target).unwrap().state
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
            remote_srq: self.remote_srq,
        };
        self.engine.post_send(self.qp, request).unwrap();
        self.engine.kick(self.qp);
        self.engine.settle();
    }

    fn receive(&mut self, id: u64, at: usize, length: usize) {
        let list = vec![self.sge(at, length)];
        let receive = Receive { id, list };
        match self.srq {
            Some(srq) => self.engine.post_srq(srq, receive).unwrap(),
            None => self.engine.post_receive(self.qp, receive).unwrap(),
        }
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
        Self::of(Kind::Reliable, seed)
    }

    fn of(kind: Kind, seed: u64) -> Self {
        let (clock, sent) = (Arc::new(VirtualClock::default()), Sent::default());
        let addresses = [IpAddr::from([127, 9, 9, 1]), IpAddr::from([127, 9, 9, 2])];
        let mut sides = addresses.map(|address| Side::new(kind, address, &clock, &sent));
        for (i, peer) in [(0, 1), (1, 0)] {
            let (qp, target, srq) = (sides[peer].qp, sides[peer].target, sides[peer].srq);
            let side = &mut sides[i];
            side.remote_srq = srq;
            side.connect(side.qp, addresses[peer], target);
            if side.target != side.qp {
                side.connect(side.target, addresses[peer], qp);
            }
        }
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
        assert!(self.run_for(2_000_000, percent), "it never ends");
    }

    /// The same for this many steps at the most; returns whether both are idle.
    fn run_for(&mut self, steps: u32, percent: u64) -> bool {
        for _ in 0..steps {
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
            let Some(due) = due else { return true };
            self.clock.0.fetch_max(due, Ordering::Relaxed);
            for side in &mut self.sides {
                side.engine.advance();
                side.engine.settle();
            }
        }
        false
    }

    fn deliver(&mut self, from: IpAddr, to: IpAddr, bytes: &[u8]) {
        if let Some(side) = self.sides.iter_mut().find(|side| side.address == to) {
            side.engine.receive((from, PORT), to, bytes);
            side.engine.settle();
        }
    }
}

/// Every kind of request at once, over a bad wire.
fn everything(kind: Kind, seed: u64, percent: u64) -> World {
    let mut world = World::of(kind, seed);
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
    let mut packets = everything(Kind::Reliable, 11, 10).packets;
    packets.extend(everything(Kind::Extended, 11, 10).packets);
    packets
}

#[test]
fn everything_arrives_once_and_in_order_over_a_bad_wire() {
    for percent in [0, 1, 5, 20] {
        for seed in 1..=25 {
            everything(Kind::Reliable, seed, percent);
            everything(Kind::Extended, seed, percent);
        }
    }
}

#[test]
fn the_same_seed_gives_the_same_packets_at_the_same_times() {
    for kind in [Kind::Reliable, Kind::Extended] {
        let seen = |seed| everything(kind, seed, 10).trace.finalize();
        assert_eq!(seen(7), seen(7));
        assert_ne!(seen(7), seen(8));
    }
}

/// Packets of a malicious peer: almost correct.
fn forge(random: &mut Random, side: &Side) -> Vec<u8> {
    let (qpn, key) = (side.target, side.key);
    let qp = side.engine.qps.get(qpn).unwrap();
    let expected = qp.responder.expected;
    let near = |random: &mut Random, n: u32| n.wrapping_add(random.below(5) as u32).wrapping_sub(2);
    let operation = random.below(26) as u8;
    let psn = if random.below(3) > 0 { expected } else { near(random, expected) };
    let mut bth = Bth::new(qp.transport.bits() | operation, qpn, psn & 0xff_ffff);
    bth.acknowledge = random.below(2) == 0;
    bth.pad = if random.below(4) == 0 { random.below(4) as u8 } else { 0 };
    let mut packet = bth.bytes().to_vec();
    if let Some(srq) = side.srq {
        let srq = if random.below(16) == 0 { near(random, srq) } else { srq };
        XrcEth { srq }.write(&mut packet);
    }
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
        let kind = if seed % 2 == 0 { Kind::Extended } else { Kind::Reliable };
        let mut world = World::of(kind, seed);
        for i in 0..64 {
            world.sides[1].receive(i, 0, LENGTH);
        }
        let (from, to) = (world.sides[0].address, world.sides[1].address);
        for _ in 0..300 {
            let side = &mut world.sides[1];
            if side.state() == ibv_qp_state::IBV_QPS_ERR {
                break;
            }
            let packet = forge(&mut world.random, side);
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
    // One try and seven more, each of 4.096 us * 2^8. After the first, the peer is late.
    assert_eq!(world.clock.now(), 8 * (4096 << 8) + 7);
}

#[test]
fn a_peer_that_receives_nothing_is_waited_for_and_not_for_ever() {
    const TIMEOUT: Time = 4096 << 8;
    let mut world = World::new(6);
    let is_unread = world.sides[0].is_unread.clone();
    is_unread.store(true, Ordering::Relaxed);
    world.sides[0].post(1, Operation::Send, Extra::None, 0, 64);
    let of_the_peer = std::mem::take(&mut *world.sent.lock().unwrap());
    let run_until = |world: &mut World, end: Time| {
        while world.sides[0].engine.due().is_some_and(|due| due <= end) {
            world.clock.0.fetch_max(world.sides[0].engine.due().unwrap(), Ordering::Relaxed);
            world.sides[0].engine.advance();
            world.sides[0].engine.settle();
        }
        let count = std::mem::take(&mut *world.sent.lock().unwrap()).len();
        (world.sides[0].poll().pop().map(|done| done.status), count)
    };
    assert_eq!(run_until(&mut world, STARVED_FOR), (None, 0), "nothing is sent again");
    // What it has received without an answer counts.
    is_unread.store(false, Ordering::Relaxed);
    assert_eq!(run_until(&mut world, STARVED_FOR + 4 * TIMEOUT), (None, 4));
    // It is waited for once.
    is_unread.store(true, Ordering::Relaxed);
    let failed = Some(ibv_wc_status::IBV_WC_RETRY_EXC_ERR);
    assert_eq!(run_until(&mut world, STARVED_FOR + 9 * TIMEOUT), (failed, 3));
    assert_eq!(of_the_peer.len(), 1);
}

#[test]
fn who_had_no_processor_itself_waits_on() {
    let mut world = World::new(6);
    world.sides[0].is_unread.store(true, Ordering::Relaxed);
    world.sides[0].post(1, Operation::Send, Extra::None, 0, 64);
    world.sent.lock().unwrap().clear();
    for _ in 0..3 {
        world.clock.0.fetch_add(STARVED_FOR, Ordering::Relaxed);
        world.sides[0].engine.advance();
        world.sides[0].engine.settle();
    }
    assert!(world.sides[0].poll().is_empty() && world.sent.lock().unwrap().is_empty());
}

/// The opcodes of the packets that were sent.
fn opcodes(world: &World) -> Vec<u8> {
    let sent = std::mem::take(&mut *world.sent.lock().unwrap());
    sent.iter().map(|(_, _, bytes)| bytes[0]).collect()
}

#[test]
fn an_acknowledgement_that_is_held_back_goes_with_the_next_message_and_is_never_lost() {
    for how in 0..4 {
        let mut world = World::new(8);
        world.sides[1].receive(1, 0, 64);
        world.sides[0].receive(1, 0, 64);
        world.sides[0].post(2, Operation::Send, Extra::None, 0, 64);
        let (from, to, bytes) = world.sent.lock().unwrap().pop_front().unwrap();
        world.sides[1].engine.core.holds_answers = true;
        world.deliver(from, to, &bytes);
        assert_eq!(opcodes(&world), [], "it is held back");
        let Side { engine, qp, .. } = &mut world.sides[1];
        match how {
            0 => world.sides[1].post(3, Operation::Send, Extra::None, 0, 64),
            1 => engine.release_answers(),
            2 => drop(engine.destroy_qp(*qp, 2).unwrap()),
            _ => {
                let reset = ibv_qp_attr_mask::IBV_QP_STATE.0;
                engine.modify_qp(*qp, &ibv_qp_attr::default(), reset).unwrap();
            }
        }
        world.sides[1].engine.settle();
        let message: &[u8] = if how == 0 { &[opcode::SEND_ONLY] } else { &[] };
        assert_eq!(opcodes(&world), [message, &[opcode::ACK]].concat(), "way {how}");
    }
}

#[test]
fn who_misses_a_packet_is_not_late() {
    let mut world = World::new(7);
    let rkey = world.sides[1].key;
    let write = Operation::Write { address: 0x10_0000, rkey };
    world.sides[0].post(1, write, Extra::None, 0, 3 * MTU);
    // The packets that the other side is to get, of those that were sent.
    let mut deliver = |these: &[bool]| {
        let sent = std::mem::take(&mut *world.sent.lock().unwrap());
        assert_eq!(sent.len(), these.len());
        for ((from, to, bytes), _) in sent.into_iter().zip(these).filter(|(_, arrives)| **arrives) {
            world.deliver(from, to, &bytes);
        }
        let due = world.sides[0].engine.due().map(|due| due - world.clock.now());
        due.map(|due| due - (4096 << 8))
    };
    assert_eq!(deliver(&[true, false, true]), Some(0));
    assert_eq!(deliver(&[true]), Some(0), "something is missing");
    assert_eq!(deliver(&[false, false]), Some(0), "it comes again, but is lost");
    world.clock.0.fetch_add(4096 << 8, Ordering::Relaxed);
    world.sides[0].engine.advance();
    world.sides[0].engine.settle();
    let late = world.sides[0].engine.due().unwrap() - world.clock.now();
    assert_eq!(late, (4096 << 8) + 1);
    world.run(0);
    assert_eq!(world.sides[0].poll()[0].status, ibv_wc_status::IBV_WC_SUCCESS);
}
