//! Two engines on a simulated wire and virtual time: lost, delayed, duplicated and forged packets.

mod answers;
mod datagrams;
mod drops;
mod flows;
mod forged;
mod long_queues;
mod strict;
mod waiting;
mod windows;
mod xrc;

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::Engine;
use super::memory::Backing;
use super::objects::NewQueuePair;
use super::queue_pair::Transport;
use super::queues::CompletionQueue;
use super::rig::{MemoryLink, Random, Sent, VirtualClock, extended_queue, receiving, seal};
use super::work::Sge;
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
                let domain = engine.core.xrc_domains.open(None, true, false).unwrap();
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

    /// Runs this many steps at the most; returns whether both are idle.
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

/// Captures every kind of request on the wire, with losses.
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
