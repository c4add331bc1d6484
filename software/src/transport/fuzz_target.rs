//! A device whose peer is hostile: queue pairs of every transport, and memory with every right.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Engine;
use super::memory::Backing;
use super::objects::NewQueuePair;
use super::queue_pair::Transport;
use super::queues::{CompletionQueue, SharedReceiveQueue};
use super::rig::{MemoryLink, Sent, VirtualClock, extended_queue, receiving, seal};
use super::work::Sge;
use super::work::{Data, Extra, Operation, Receive, SendRequest};
use crate::builder::Builder;
use crate::ffi::*;
use crate::wire::LONGEST;
use crate::wire::header::{Bth, FlowEth, Reader, XrcEth};
use crate::wire::sequence::wire;
use crate::wire::{PORT, icrc, opcode};

/// The length of each region.
pub(crate) const LENGTH: usize = 8192;
pub(crate) const GUARD: usize = 64;
pub(crate) const IOVA: u64 = 0x10_0000;
/// The contents of memory that no peer may read or write.
pub(crate) const SECRET: u64 = 0x5ec2_e7a1_93d4_0b6f;

/// A region between guards, with the rights that the peer has.
pub(crate) struct Memory {
    pub(crate) words: Box<[u64]>,
    pub(crate) key: u32,
    pub(crate) access: u32,
}

/// A device with queue pairs of every transport: its peer is hostile.
pub(crate) struct FuzzTarget {
    pub(crate) engine: Engine,
    pub(crate) clock: Arc<VirtualClock>,
    pub(crate) sent: Sent,
    pub(crate) address: IpAddr,
    pub(crate) peer: IpAddr,
    pub(crate) cq: u32,
    pub(crate) srq: u32,
    /// Shared receive queues that packets may name: of the domain of the receiving XRC queue pair, of that
    /// domain too but with another protection domain, of another XRC domain, of none.
    pub(crate) named: [u32; 4],
    pub(crate) qps: Vec<(u32, Transport)>,
    pub(crate) regions: Vec<Memory>,
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

const QKEY: u32 = 0x1234;

pub(crate) const TRANSPORTS: [Transport; 8] = [
    Transport::Rc,
    Transport::Rc,
    Transport::Rc,
    Transport::Uc,
    Transport::Ud,
    Transport::XrcReceive,
    Transport::XrcSend,
    Transport::Srd,
];

impl FuzzTarget {
    pub(crate) fn new(address: IpAddr, peer: IpAddr) -> Self {
        let (clock, sent) = (Arc::new(VirtualClock::default()), Sent::default());
        let settings = Builder::new().port([address]).settings();
        let mut engine = Engine::new(settings, clock.clone(), Box::new(MemoryLink::new(&sent)));
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
        let domains = [(); 2].map(|()| engine.core.xrc_domains.open(None, true, false).unwrap());
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
        let mut target = Self { engine, clock, sent, address, peer, cq, srq, named, qps, regions };
        for index in 0..target.qps.len() {
            target.connect(index);
        }
        target
    }

    /// Brings a queue pair to RTS, from whatever state, with requests and receives posted.
    pub(crate) fn connect(&mut self, index: usize) {
        let (number, transport) = self.qps[index];
        let mut attr = ibv_qp_attr {
            port_num: 1,
            qp_access_flags: rights()[0],
            path_mtu: ibv_mtu::IBV_MTU_256,
            dest_qp_num: number,
            rq_psn: 0xff_fff0,
            sq_psn: 0xff_fff0,
            qkey: QKEY,
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

    pub(crate) fn sge(&self, region: usize) -> Sge {
        Sge { address: IOVA, length: LENGTH as u32, lkey: self.regions[region].key }
    }

    /// Posts receives, and requests whose answers the peer forges.
    pub(crate) fn refill(&mut self, index: usize) {
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
    pub(crate) fn settle(&mut self) {
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
    pub(crate) fn take_sent(&mut self) -> Vec<Vec<u8>> {
        self.sent.lock().unwrap().drain(..).map(|packet| packet.2).collect()
    }

    /// No byte changed that the peer has no right to write.
    pub(crate) fn assert_untouched(&self) {
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
pub(crate) fn names_a_queue(opcode: u8) -> bool {
    let answers = opcode::READ_FIRST..=opcode::ATOMIC_ACK;
    opcode & opcode::TRANSPORT == opcode::XRC && !answers.contains(&(opcode & !opcode::TRANSPORT))
}

/// The length of what follows the base transport header of a packet of any operation.
fn header(code: u8) -> usize {
    let answers = opcode::READ_FIRST..=opcode::ATOMIC_ACK;
    let is_of_flow = matches!(code & opcode::TRANSPORT, opcode::SRD | opcode::DC);
    if is_of_flow && !answers.contains(&(code & !opcode::TRANSPORT)) {
        FlowEth::SIZE
    } else if names_a_queue(code) {
        XrcEth::SIZE
    } else {
        0
    }
}

/// How many bytes of data the answers to a request may have in total.
fn may_read(packet: &[u8]) -> usize {
    let Some(bth) = Bth::parse(packet) else { return 0 };
    let body = packet.get(Bth::SIZE + header(bth.opcode)..).unwrap_or_default();
    if bth.opcode & !opcode::TRANSPORT == opcode::READ_REQUEST {
        Reader(body).reth().map_or(0, |reth| (reth.length as usize).min(LENGTH))
    } else {
        0
    }
}

/// The effects of a packet.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// Answers, and those of a receiving XRC queue pair among them; bytes of data that were read.
    pub(crate) answers: u64,
    pub(crate) extended: u64,
    pub(crate) data: u64,
    /// Queue pairs that failed.
    pub(crate) reconnects: u64,
}

impl FuzzTarget {
    /// The peer sends a packet, with its CRC. No answer is longer than the request allows, and none has a secret.
    pub(crate) fn is_sent(&mut self, sealed: &[u8]) -> Seen {
        // A read may begin at any byte of it.
        let secrets =
            [0, 8, 16, 24, 32, 40, 48, 56].map(|bits| SECRET.rotate_left(bits).to_ne_bytes());
        let mut seen = Seen::default();
        self.clock.0.fetch_add(20_000, Ordering::Relaxed);
        self.engine.receive((self.peer, PORT), self.address, sealed);
        self.settle();
        for sent in self.take_sent() {
            let operation = sent[0] & !opcode::TRANSPORT;
            if !(opcode::READ_FIRST..=opcode::ATOMIC_ACK).contains(&operation) {
                continue; // a request of ours, sent again
            }
            seen.answers += 1;
            seen.extended += u64::from(sent[0] & opcode::TRANSPORT == opcode::XRC);
            let headers = if operation == opcode::READ_MIDDLE { 0 } else { 4 };
            let body = &sent[Bth::SIZE + headers..sent.len() - icrc::SIZE];
            match operation {
                opcode::ACK => assert!(body.is_empty()),
                opcode::ATOMIC_ACK => assert_eq!(body.len(), 8),
                _ => seen.data += body.len() as u64 - u64::from(sent[1] >> 4 & 3),
            }
            let secret = body.windows(8).any(|bytes| secrets.iter().any(|secret| bytes == secret));
            assert!(!secret, "a secret was read");
        }
        let inside = &sealed[..sealed.len().saturating_sub(icrc::SIZE)];
        assert!(seen.data <= may_read(inside) as u64, "{} bytes", seen.data);
        // Like a program: takes completions, and reconnects what has failed.
        while self.engine.poll(self.cq).is_some() {}
        for index in 0..self.qps.len() {
            let qp = self.engine.qps.get(self.qps[index].0).unwrap();
            assert!(qp.rq.len() <= 64 && qp.sq.posted.len() <= 64);
            if !qp.is_up() {
                self.connect(index);
                seen.reconnects += 1;
            }
        }
        seen
    }
}

/// Packets of a peer with correct checksums. Before each of them: a byte that says what of it is made right, and two of
/// length.
pub fn device_packets(mut data: &[u8]) {
    let (address, peer) = (IpAddr::from([127, 9, 9, 1]), IpAddr::from([127, 9, 9, 2]));
    let mut target = FuzzTarget::new(address, peer);
    for round in 0.. {
        let Some(([right, high, low], rest)) = data.split_first_chunk() else { break };
        let length = usize::from(u16::from_be_bytes([*high, *low]));
        let (packet, rest) = rest.split_at(length.min(rest.len()));
        data = rest;
        let mut packet = packet[..packet.len().min(LONGEST - icrc::SIZE)].to_vec();
        target.make_right(*right, &mut packet);
        target.is_sent(&seal(peer, address, packet));
        if round % 16 == 0 {
            target.refill(usize::from(*right) % target.qps.len());
            target.take_sent();
        }
    }
    target.assert_untouched();
}

impl FuzzTarget {
    /// Addresses a packet to a queue pair (the lowest three bits), with a number that it expects (two bits) and the key of
    /// a region (three bits).
    fn make_right(&self, right: u8, packet: &mut [u8]) {
        let Some(mut bth) = Bth::parse(packet) else { return };
        if let Some(&(number, transport)) = self.qps.get(usize::from(right & 7)) {
            let qp = self.engine.qps.get(number).unwrap();
            bth.qpn = number;
            bth.opcode = transport.bits() | bth.opcode & !opcode::TRANSPORT;
            bth.psn = match right >> 3 & 3 {
                0 => bth.psn,
                1 => qp.responder.expected,
                2 => wire(qp.sq.unacknowledged),
                _ => wire(qp.sq.high),
            };
        }
        packet[..Bth::SIZE].copy_from_slice(&bth.bytes());
        let at = Bth::SIZE + header(bth.opcode);
        match at - Bth::SIZE {
            XrcEth::SIZE if packet.len() >= at => {
                packet[Bth::SIZE..at].copy_from_slice(&self.named[0].to_be_bytes());
            }
            FlowEth::SIZE if packet.len() >= at => {
                packet[at - 8..at].copy_from_slice(&u64::from(QKEY).to_be_bytes());
            }
            _ => {}
        }
        if let (Some(region), true) =
            (self.regions.get(usize::from(right >> 5)), packet.len() >= at + 12)
        {
            packet[at + 8..at + 12].copy_from_slice(&region.key.to_be_bytes());
        }
    }
}
