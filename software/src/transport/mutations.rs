//! Mutated captures, through the whole receive path: parsing, responder, requester, datagrams.
//!
//! `IBVERBS_SOFTWARE_PACKETS` is the number of packets [100,000], `IBVERBS_SOFTWARE_SEED` the seed [1].
//! `script/soak hostile` sends ten million under AddressSanitizer. `UPDATE_CORPUS=1` captures the corpus again.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Engine;
use super::memory::{Backing, Sge};
use super::objects::NewQueuePair;
use super::queue_pair::Transport;
use super::queues::{CompletionQueue, SharedReceiveQueue};
use super::tests::{MemoryLink, Random, Sent, VirtualClock, extended_queue, receiving, seal};
use super::work::{Data, Extra, Operation, Receive, SendRequest};
use crate::builder::Builder;
use crate::ffi::*;
use crate::wire::header::{Bth, Reader, XrcEth};
use crate::wire::sequence::wire;
use crate::wire::{PORT, icrc, opcode};

/// Packets of each kind, as two devices sent them: two bytes of length before each.
const CORPUS: &[u8] = include_bytes!("corpus.bin");

const MTU: usize = 256;
/// The length of each region.
const LENGTH: usize = 8192;
const GUARD: usize = 64;
const IOVA: u64 = 0x10_0000;
/// The contents of memory that no peer may read or write.
const SECRET: u64 = 0x5ec2_e7a1_93d4_0b6f;

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().expect("a number"))
}

fn corpus() -> Vec<Vec<u8>> {
    let (mut rest, mut all) = (CORPUS, Vec::new());
    while let Some((length, after)) = rest.split_first_chunk() {
        let (packet, after) = after.split_at(u16::from_be_bytes(*length).into());
        all.push(packet.to_vec());
        rest = after;
    }
    all
}

/// A region between guards, with the rights that the peer has.
struct Memory {
    words: Box<[u64]>,
    key: u32,
    access: u32,
}

/// A device with queue pairs of every transport: its peer is hostile.
struct Victim {
    engine: Engine,
    clock: Arc<VirtualClock>,
    sent: Sent,
    address: IpAddr,
    peer: IpAddr,
    cq: u32,
    srq: u32,
    /// Shared receive queues that packets may name: of the domain of the receiving XRC queue pair, of that
    /// domain too but with another protection domain, of another XRC domain, of none.
    named: [u32; 4],
    qps: Vec<(u32, Transport)>,
    regions: Vec<Memory>,
}

type Access = ibv_access_flags;

/// The rights of the regions: all, to read only, to write only, none.
fn rights() -> [u32; 4] {
    let local = Access::IBV_ACCESS_LOCAL_WRITE;
    let all = local
        | Access::IBV_ACCESS_REMOTE_READ
        | Access::IBV_ACCESS_REMOTE_WRITE
        | Access::IBV_ACCESS_REMOTE_ATOMIC;
    let write = local | Access::IBV_ACCESS_REMOTE_WRITE;
    [all.0, Access::IBV_ACCESS_REMOTE_READ.0, write.0, 0]
}

const TRANSPORTS: [Transport; 7] = [
    Transport::Rc,
    Transport::Rc,
    Transport::Rc,
    Transport::Uc,
    Transport::Ud,
    Transport::XrcReceive,
    Transport::XrcSend,
];

impl Victim {
    fn new(address: IpAddr, peer: IpAddr) -> Self {
        let (clock, sent) = (Arc::new(VirtualClock::default()), Sent::default());
        let settings = Builder::new().port([address]).settings();
        let mut engine = Engine::new(settings, clock.clone(), Box::new(MemoryLink(sent.clone())));
        let pd = engine.alloc_pd().unwrap();
        let cq = engine.create_cq(CompletionQueue::new(1, 0, 4096, None)).unwrap();
        let shared = SharedReceiveQueue {
            handle: 3,
            context: 0,
            pd,
            receives: Default::default(),
            max_wr: 64,
            max_sge: 2,
            limit: 0,
            users: 0,
            async_events: 0,
            xrc: None,
        };
        let srq = engine.create_srq(shared).unwrap();
        let domains = [(); 2].map(|()| engine.open_xrc_domain(None, true, false).unwrap());
        let [stranger, outsider] = [(); 2].map(|()| engine.alloc_pd().unwrap());
        let mut extended =
            |domain, pd| engine.create_srq(extended_queue((domain, pd, cq), 64)).unwrap();
        let named = [
            extended(domains[0], pd),
            extended(domains[0], stranger),
            extended(domains[1], outsider),
            srq,
        ];
        let qps = TRANSPORTS.iter().enumerate().map(|(i, &transport)| {
            let new = NewQueuePair {
                handle: 2,
                context: 0,
                pd: Some(pd),
                xrc_domain: None,
                transport,
                send_cq: Some(cq),
                receive_cq: Some(cq).filter(|_| transport != Transport::XrcSend),
                srq: (i == 2).then_some(srq),
                all_signaled: true,
                cap: ibv_qp_cap {
                    max_send_wr: 64,
                    max_recv_wr: 64,
                    max_send_sge: 2,
                    max_recv_sge: 2,
                    max_inline_data: 64,
                },
            };
            let is_target = transport == Transport::XrcReceive;
            let new = if is_target { receiving(domains[0]) } else { new };
            (engine.create_qp(new).unwrap(), transport)
        });
        let qps = qps.collect();
        let mut region = |pd, access, may: u32| {
            let mut words = vec![SECRET; (LENGTH + 2 * GUARD) / 8];
            if may != 0 {
                words[GUARD / 8..(GUARD + LENGTH) / 8].fill(0);
            }
            let words = words.into_boxed_slice();
            let start = Backing::Memory(words.as_ptr() as u64 + GUARD as u64);
            let key = engine.register(pd, start, LENGTH as u64, IOVA, access).unwrap();
            Memory { words, key, access: may }
        };
        let mut regions = Vec::from(rights().map(|access| region(pd, access, access)));
        // Memory that only the peers of the other XRC domain may reach.
        regions.push(region(outsider, rights()[0], 0));
        let mut victim = Self { engine, clock, sent, address, peer, cq, srq, named, qps, regions };
        for index in 0..victim.qps.len() {
            victim.connect(index);
        }
        victim
    }

    /// Brings a queue pair to RTS, from whatever state, with requests and receives posted.
    fn connect(&mut self, index: usize) {
        let (number, transport) = self.qps[index];
        let mut attr = ibv_qp_attr {
            port_num: 1,
            qp_access_flags: rights()[0],
            path_mtu: ibv_mtu::IBV_MTU_256,
            dest_qp_num: number,
            rq_psn: 0xff_fff0,
            sq_psn: 0xff_fff0,
            qkey: 0x1234,
            max_rd_atomic: 4,
            max_dest_rd_atomic: 4,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            ..Default::default()
        };
        attr.ah_attr.is_global = 1;
        attr.ah_attr.port_num = 1;
        attr.ah_attr.grh.dgid.raw = match self.peer {
            IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            IpAddr::V6(v6) => v6.octets(),
        };
        type S = ibv_qp_state;
        for state in [S::IBV_QPS_RESET, S::IBV_QPS_INIT, S::IBV_QPS_RTR, S::IBV_QPS_RTS] {
            attr.qp_state = state;
            let from = self.engine.qps.get(number).unwrap().state;
            let needed = super::state::row(transport, from, state).map_or(0, |row| row.0);
            let mask = needed | ibv_qp_attr_mask::IBV_QP_STATE.0;
            self.engine.modify_qp(number, &attr, mask).unwrap();
        }
        self.refill(index);
    }

    fn sge(&self, region: usize) -> Sge {
        Sge { address: IOVA, length: LENGTH as u32, lkey: self.regions[region].key }
    }

    /// Posts receives, and requests whose answers the peer forges.
    fn refill(&mut self, index: usize) {
        let (number, transport) = self.qps[index];
        let list = vec![self.sge(0)];
        for id in 0..8 {
            // A full queue is fine.
            let receive = Receive { id, list: list.clone() };
            let _ = self.engine.post_receive(number, receive.clone());
            let _ = self.engine.post_srq(self.srq, receive.clone());
            for srq in &self.named[..3] {
                let _ = self.engine.post_srq(*srq, receive.clone());
            }
        }
        if !matches!(transport, Transport::Rc | Transport::XrcSend) {
            return;
        }
        let (address, rkey) = (IOVA, 7);
        let operations = [
            (Operation::Send, 700),
            (Operation::Write { address, rkey }, 8),
            (Operation::Read { address, rkey }, LENGTH as u32),
            (Operation::FetchAdd { address, rkey, add: 1 }, 8),
        ];
        for (operation, length) in operations {
            let data = Data::List(vec![Sge { length, ..self.sge(0) }]);
            let request = SendRequest {
                id: 9,
                operation,
                extra: Extra::None,
                data,
                length,
                signaled: true,
                solicited: false,
                fence: false,
                destination: None,
                remote_srq: (transport == Transport::XrcSend).then_some(5),
            };
            let _ = self.engine.post_send(number, request);
        }
        self.engine.kick(number);
        self.settle();
    }

    /// Runs the engine until it has nothing more to do now.
    fn settle(&mut self) {
        for _ in 0..10_000 {
            self.engine.settle();
            if self.engine.due().is_none_or(|due| due > self.engine.core.now()) {
                return;
            }
            self.engine.advance();
        }
        panic!("one packet keeps the device busy");
    }

    /// The packets that were sent since the last call.
    fn take_sent(&mut self) -> Vec<Vec<u8>> {
        self.sent.lock().unwrap().drain(..).map(|packet| packet.2).collect()
    }

    /// No byte changed that the peer has no right to write.
    fn assert_untouched(&self) {
        for region in &self.regions {
            let (head, rest) = region.words.split_at(GUARD / 8);
            let (inside, tail) = rest.split_at(LENGTH / 8);
            assert!(head.iter().chain(tail).all(|&word| word == SECRET), "a guard changed");
            let changes = Access::IBV_ACCESS_REMOTE_WRITE | Access::IBV_ACCESS_LOCAL_WRITE;
            if region.access & changes.0 == 0 {
                let was = if region.access == 0 { SECRET } else { 0 };
                assert!(
                    inside.iter().all(|&word| word == was),
                    "a region without the right changed"
                );
            }
        }
    }
}

/// Whether packets with this opcode name a shared receive queue behind the base transport header.
fn names_a_queue(opcode: u8) -> bool {
    let answers = opcode::READ_FIRST..=opcode::ATOMIC_ACK;
    opcode & opcode::TRANSPORT == opcode::XRC && !answers.contains(&(opcode & !opcode::TRANSPORT))
}

/// A packet that is almost right: of the corpus, addressed to a live queue pair, then mutated.
fn mutate(random: &mut Random, victim: &Victim, capture: &[u8]) -> Vec<u8> {
    let mut packet = capture.to_vec();
    if names_a_queue(packet[0]) {
        packet.drain(Bth::SIZE..Bth::SIZE + XrcEth::SIZE);
    }
    let (number, transport) = victim.qps[random.below(victim.qps.len() as u64) as usize];
    let qp = victim.engine.qps.get(number).unwrap();
    if let Some(mut bth) = Bth::parse(&packet) {
        if random.below(16) > 0 {
            bth.qpn = number;
            bth.opcode = transport.bits() | bth.opcode & !opcode::TRANSPORT;
        }
        let near = match random.below(8) {
            0..=3 => qp.responder.expected,
            4..=5 => wire(qp.sq.unacknowledged),
            6 => wire(qp.sq.high),
            _ => random.next() as u32,
        };
        let step = match random.below(4) {
            0 => random.below(9) as u32,
            1 => 0_u32.wrapping_sub(random.below(9) as u32),
            _ => 0,
        };
        bth.psn = near.wrapping_add(step) & 0xff_ffff;
        packet[..Bth::SIZE].copy_from_slice(&bth.bytes());
    }
    // The key of a region where an RETH or atomic header has it, most of the time a live one.
    if packet.len() >= Bth::SIZE + 16 && random.below(8) > 0 {
        let region = random.below(victim.regions.len() as u64) as usize;
        let key = victim.regions[region].key;
        packet[Bth::SIZE + 8..Bth::SIZE + 12].copy_from_slice(&key.to_be_bytes());
        let edges = [0, 1, 8, 255, LENGTH as u64 - 8, LENGTH as u64, u64::MAX - IOVA];
        let at = edges[random.below(7) as usize].wrapping_add(random.below(2));
        if random.below(2) == 0 {
            packet[Bth::SIZE..Bth::SIZE + 8].copy_from_slice(&IOVA.wrapping_add(at).to_be_bytes());
        }
        if random.below(4) == 0 {
            let length = edges[random.below(7) as usize] as u32;
            packet[Bth::SIZE + 12..Bth::SIZE + 16].copy_from_slice(&length.to_be_bytes());
        }
    }
    if names_a_queue(packet[0]) {
        let srq = match random.below(16) {
            0 => random.next() as u32,
            1..=4 => victim.named[random.below(4) as usize],
            _ => victim.named[0],
        };
        let mut header = Vec::new();
        XrcEth { srq }.write(&mut header);
        packet.splice(Bth::SIZE..Bth::SIZE, header);
    }
    for _ in 0..random.below(4) {
        let at = random.below(packet.len().max(1) as u64) as usize;
        match random.below(6) {
            0 => packet.truncate(at),
            1 => packet.extend(std::iter::repeat_n(random.next() as u8, at + 1)),
            2 if at < packet.len() => packet[at] = random.next() as u8,
            3 if at < packet.len() => packet[at] = [0, 0xff, 0x80, 0x7f][random.below(4) as usize],
            4 if at < packet.len() => drop(packet.drain(at..(at + 4).min(packet.len()))),
            _ if at < packet.len() => packet[at] ^= 1 << random.below(8),
            _ => {}
        }
    }
    packet.truncate(crate::link::receive::LONGEST - icrc::SIZE);
    packet
}

/// The resident memory of this process in pages.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse().unwrap()
}

/// How many bytes of data the answers to a request may have in total.
fn may_read(packet: &[u8]) -> usize {
    let Some(bth) = Bth::parse(packet) else { return 0 };
    let header = if names_a_queue(bth.opcode) { XrcEth::SIZE } else { 0 };
    let body = packet.get(Bth::SIZE + header..).unwrap_or_default();
    if bth.opcode & !opcode::TRANSPORT == opcode::READ_REQUEST {
        Reader(body).reth().map_or(0, |reth| (reth.length as usize).min(LENGTH))
    } else {
        0
    }
}

/// What two devices send each other, and datagrams, once of each kind and length.
fn capture() -> Vec<Vec<u8>> {
    let mut kinds = std::collections::BTreeMap::new();
    for packet in super::tests::captures() {
        kinds.entry((packet[0], packet.len())).or_insert(packet);
    }
    let mut all: Vec<Vec<u8>> = kinds.into_values().collect();
    let first = |operation, rest: &[&[u8]]| {
        let mut packet = Bth::new(operation, 0x11, 0).bytes().to_vec();
        rest.iter().for_each(|bytes| packet.extend_from_slice(bytes));
        packet
    };
    let deth = [0, 0, 0x12, 0x34, 0, 0, 0, 0x11];
    for length in [0, 4, 64, MTU] {
        let data = vec![7; length];
        let (only, immediate) = (opcode::SEND_ONLY, opcode::SEND_ONLY_IMM);
        all.push(first(opcode::UD | only, &[&deth, &data]));
        all.push(first(opcode::UD | immediate, &[&deth, &[1, 2, 3, 4], &data]));
        all.push(first(opcode::RC | opcode::SEND_ONLY_INVALIDATE, &[&[0, 0, 1, 0], &data]));
        all.push(first(opcode::RC | opcode::SEND_LAST_INVALIDATE, &[&[0, 0, 1, 0], &data]));
    }
    // Every NAK, and "receiver not ready".
    for syndrome in [0x00, 0x1f, 0x20, 0x3f, 0x60, 0x61, 0x62, 0x63, 0x64, 0x80] {
        all.push(first(opcode::RC | opcode::ACK, &[&[syndrome, 0, 0, 1]]));
        all.push(first(opcode::XRC | opcode::ACK, &[&[syndrome, 0, 0, 1]]));
    }
    all
}

#[test]
fn the_corpus_is_what_devices_send() {
    let all = capture();
    if std::env::var_os("UPDATE_CORPUS").is_some() {
        let mut bytes = Vec::new();
        for packet in &all {
            bytes.extend((packet.len() as u16).to_be_bytes());
            bytes.extend(packet);
        }
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/transport/corpus.bin");
        return std::fs::write(path, bytes).unwrap();
    }
    let kinds = |packets: &[Vec<u8>]| packets.iter().map(|packet| packet[0]).collect::<Vec<_>>();
    assert_eq!(kinds(&corpus()), kinds(&all));
}

#[test]
fn mutated_packets_do_no_harm() {
    let count = setting("IBVERBS_SOFTWARE_PACKETS", 100_000);
    let mut random = Random(setting("IBVERBS_SOFTWARE_SEED", 1).wrapping_mul(2) | 1);
    let corpus = corpus();
    assert!(corpus.len() > 30, "{}", corpus.len());
    let families = [
        ["127.9.9.1", "127.9.9.2"].map(|address| address.parse::<IpAddr>().unwrap()),
        ["fd00::1", "fd00::2"].map(|address| address.parse::<IpAddr>().unwrap()),
    ];
    let mut victims = families.map(|[address, peer]| Victim::new(address, peer));
    // A read may begin at any byte of it.
    let secrets = [0, 8, 16, 24, 32, 40, 48, 56].map(|bits| SECRET.rotate_left(bits).to_ne_bytes());
    let (mut answers, mut data, mut reconnects, mut begun) = (0_u64, 0_u64, 0_u64, 0);
    let mut extended = 0_u64;
    for i in 0..count {
        let victim = &mut victims[random.below(2) as usize];
        let capture = &corpus[random.below(corpus.len() as u64) as usize];
        let packet = mutate(&mut random, victim, capture);
        let mut sealed = seal(victim.peer, victim.address, packet);
        if random.below(64) == 0 {
            let at = random.below(sealed.len() as u64) as usize;
            sealed[at] ^= 1 << random.below(8);
        }
        victim.clock.0.fetch_add(20_000, Ordering::Relaxed);
        victim.engine.receive((victim.peer, PORT), victim.address, &sealed);
        victim.settle();
        let mut read = 0;
        for sent in victim.take_sent() {
            let operation = sent[0] & !opcode::TRANSPORT;
            if !(opcode::READ_FIRST..=opcode::ATOMIC_ACK).contains(&operation) {
                continue; // a request of ours, sent again
            }
            answers += 1;
            extended += u64::from(sent[0] & opcode::TRANSPORT == opcode::XRC);
            let headers = if operation == opcode::READ_MIDDLE { 0 } else { 4 };
            let body = &sent[Bth::SIZE + headers..sent.len() - icrc::SIZE];
            match operation {
                opcode::ACK => assert!(body.is_empty()),
                opcode::ATOMIC_ACK => assert_eq!(body.len(), 8),
                _ => read += body.len() - usize::from(sent[1] >> 4 & 3),
            }
            let secret = body.windows(8).any(|bytes| secrets.iter().any(|secret| bytes == secret));
            assert!(!secret, "a secret was read");
        }
        assert!(read <= may_read(&sealed[..sealed.len() - icrc::SIZE]), "{read} bytes");
        data += read as u64;
        // Like a program: takes completions, reconnects what has failed, keeps the queues filled.
        while victim.engine.poll(victim.cq).is_some() {}
        for index in 0..victim.qps.len() {
            let qp = victim.engine.qps.get(victim.qps[index].0).unwrap();
            assert!(qp.rq.len() <= 64 && qp.sq.posted.len() <= 64);
            if !qp.is_up() {
                victim.connect(index);
                reconnects += 1;
            }
        }
        if i % 16 == 0 {
            victim.refill(random.below(victim.qps.len() as u64) as usize);
            victim.take_sent();
        }
        if i % 1024 == 0 {
            victim.assert_untouched();
        }
        if i == count / 10 {
            begun = resident();
        }
    }
    victims.iter().for_each(Victim::assert_untouched);
    let grown = resident().saturating_sub(begun) * 4 / 1024;
    // The mutated packets reach the code that answers, reads memory and fails queue pairs.
    assert!(answers > count / 50, "{answers} answers");
    assert!(extended > count / 200, "{extended} answers of an XRC queue pair");
    assert!(reconnects > count / 500, "{reconnects} queue pairs failed");
    assert!(data > count / 50, "{data} bytes were read");
    assert!(grown < 64, "{grown} MiB more after 90 % of the packets");
    eprintln!(
        "{count} packets: {answers} answers ({extended} XRC), {data} bytes read, {reconnects} reconnections"
    );
}
