//! Mutated captures, through the whole receive path: parsing, responder, requester, datagrams.
//!
//! `IBVERBS_SOFTWARE_PACKETS` is the number of packets [100,000], `IBVERBS_SOFTWARE_SEED` the seed [1].
//! `script/soak hostile` sends ten million under AddressSanitizer. `UPDATE_CORPUS=1` captures the corpus again.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::net::IpAddr;

use super::fuzz_target::{FuzzTarget, IOVA, LENGTH, names_a_queue};
use super::rig::{Random, seal};
use crate::wire::header::{Bth, XrcEth};
use crate::wire::sequence::wire;
use crate::wire::{icrc, opcode};

/// Packets of each kind, as two devices sent them: two bytes of length before each.
const CORPUS: &[u8] = include_bytes!("corpus.bin");

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

/// A packet that is almost right: of the corpus, addressed to a live queue pair, then mutated.
fn mutate(random: &mut Random, target: &FuzzTarget, capture: &[u8]) -> Vec<u8> {
    let mut packet = capture.to_vec();
    if names_a_queue(packet[0]) {
        packet.drain(Bth::SIZE..Bth::SIZE + XrcEth::SIZE);
    }
    let (number, transport) = target.qps[random.below(target.qps.len() as u64) as usize];
    let qp = target.engine.qps.get(number).unwrap();
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
        let region = random.below(target.regions.len() as u64) as usize;
        let key = target.regions[region].key;
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
            1..=4 => target.named[random.below(4) as usize],
            _ => target.named[0],
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
    packet.truncate(crate::wire::LONGEST - icrc::SIZE);
    packet
}

thread_local! {
    /// The bytes that this thread has allocated and not freed: other tests of the process do not count.
    static HELD: Cell<i64> = const { Cell::new(0) };
}

struct Counted;

#[global_allocator]
static ALLOCATOR: Counted = Counted;

// SAFETY: it is the allocator of the system, which is given what the caller gives.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.set(HELD.get() + layout.size() as i64);
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        HELD.set(HELD.get() - layout.size() as i64);
        // SAFETY: the caller's.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// Captures packets of two devices, and datagrams, once of each kind and length.
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
    for length in [0, 4, 64, 256] {
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
    let mut targets = families.map(|[address, peer]| FuzzTarget::new(address, peer));
    let (mut answers, mut data, mut reconnects, mut begun) = (0_u64, 0_u64, 0_u64, 0);
    let mut extended = 0_u64;
    for i in 0..count {
        let target = &mut targets[random.below(2) as usize];
        let capture = &corpus[random.below(corpus.len() as u64) as usize];
        let packet = mutate(&mut random, target, capture);
        let mut sealed = seal(target.peer, target.address, packet);
        if random.below(64) == 0 {
            let at = random.below(sealed.len() as u64) as usize;
            sealed[at] ^= 1 << random.below(8);
        }
        let seen = target.is_sent(&sealed);
        answers += seen.answers;
        extended += seen.extended;
        data += seen.data;
        reconnects += seen.reconnects;
        if i % 16 == 0 {
            target.refill(random.below(target.qps.len() as u64) as usize);
            target.take_sent();
        }
        if i % 1024 == 0 {
            target.assert_untouched();
        }
        if i == count / 10 {
            begun = HELD.get();
        }
    }
    targets.iter().for_each(FuzzTarget::assert_untouched);
    let grown = HELD.get() - begun;
    // The mutated packets reach the code that answers, reads memory and fails queue pairs.
    assert!(answers > count / 50, "{answers} answers");
    assert!(extended > count / 200, "{extended} answers of an XRC queue pair");
    assert!(reconnects > count / 500, "{reconnects} queue pairs failed");
    assert!(data > count / 50, "{data} bytes were read");
    assert!(grown < 1 << 20, "{grown} bytes more after 90 % of the packets");
    eprintln!(
        "{count} packets: {answers} answers ({extended} XRC), {data} bytes read, {reconnects} reconnections"
    );
}
