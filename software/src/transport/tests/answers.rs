//! Tests of the responder's answers: to requests that come again, to too many at once, and in fair turns.

use super::*;
use crate::wire::header::{Aeth, Syndrome};

/// A READ request for the first bytes of the region.
fn read_request(side: &Side, psn: u32, length: u32) -> Vec<u8> {
    let bth = Bth::new(opcode::RC | opcode::READ_REQUEST, side.qp, psn & 0xff_ffff);
    let mut packet = bth.bytes().to_vec();
    Reth { address: 0x10_0000, rkey: side.key, length }.write(&mut packet);
    packet
}

fn fetch_add(side: &Side, psn: u32) -> Vec<u8> {
    let bth = Bth::new(opcode::RC | opcode::FETCH_ADD, side.qp, psn & 0xff_ffff);
    let mut packet = bth.bytes().to_vec();
    let rkey = side.key;
    AtomicEth { address: 0x10_0000, rkey, swap_add: 1, compare: 0 }.write(&mut packet);
    packet
}

impl World {
    /// A packet of the first side arrives at the second, which does not settle.
    fn arrive(&mut self, packet: Vec<u8>) {
        let (from, to) = (self.sides[0].address, self.sides[1].address);
        let packet = seal(from, to, packet);
        self.sides[1].engine.receive((from, PORT), to, &packet);
    }

    /// Returns what the second side has sent: opcodes, and the rest after the base header.
    fn answers(&mut self) -> Vec<(u8, Vec<u8>)> {
        self.sides[1].engine.core.flush();
        let sent = std::mem::take(&mut *self.sent.lock().unwrap());
        let split = |(_, _, packet): (_, _, Vec<u8>)| {
            let bth = Bth::parse(&packet).unwrap();
            (bth.opcode, packet[Bth::SIZE..packet.len() - icrc::SIZE].to_vec())
        };
        sent.into_iter().map(split).collect()
    }

    /// The second side expects this number next.
    fn expect(&mut self, psn: u32) {
        let side = &mut self.sides[1];
        side.engine.qps.get_mut(side.qp).unwrap().responder.expected = psn & 0xff_ffff;
    }
}

fn syndrome((operation, rest): &(u8, Vec<u8>)) -> Option<u8> {
    (*operation == opcode::RC | opcode::ACK).then(|| rest[0])
}

/// The later of two atomic operations with the same number is repeated.
#[test]
fn a_repeated_atomic_gets_the_newest_value_of_its_number() {
    let mut world = World::new(1);
    let psn = 0xff_fff0;
    let mut value_of = |expected: u32| {
        world.expect(expected);
        let packet = fetch_add(&world.sides[1], psn);
        world.arrive(packet);
        world.sides[1].engine.settle();
        let answers = world.answers();
        assert_eq!(answers.len(), 1);
        u64::from_be_bytes(answers[0].1[4..12].try_into().unwrap())
    };
    assert_eq!(value_of(psn), 0, "carried out");
    assert_eq!(value_of(psn + 1), 0, "repeated");
    // 2^24 packets later.
    assert_eq!(value_of(psn), 1, "carried out");
    assert_eq!(value_of(psn + 1), 1, "repeated");
}

/// However many READ requests come at once, a queue pair sends one turn of answers, and so do the others.
#[test]
fn a_flood_of_duplicates_earns_one_turn() {
    const TURN: usize = 32;
    let mut world = World::new(1);
    world.expect(0x1000);
    let whole = LENGTH as u32;
    for _ in 0..500 {
        let packet = read_request(&world.sides[1], 0x1000 - 32, whole);
        world.arrive(packet);
    }
    assert_eq!(world.answers().len(), TURN, "for 500 requests");
    world.sides[1].engine.settle();
    // In the next rounds the same, and never more.
    for _ in 0..20 {
        for _ in 0..50 {
            let packet = read_request(&world.sides[1], 0x1000 - 32, whole);
            world.arrive(packet);
        }
        assert!(world.answers().len() <= TURN);
        world.sides[1].engine.settle();
        world.sides[1].engine.advance();
        assert!(world.answers().len() <= TURN);
        world.sides[1].engine.settle();
    }
    // The last one is answered in full, and then there is rest.
    while world.sides[1].engine.due() == Some(0) {
        world.sides[1].engine.advance();
        world.sides[1].engine.settle();
    }
    let qp = world.sides[1].engine.qps.get(world.sides[1].qp).unwrap();
    assert_eq!(qp.state, ibv_qp_state::IBV_QPS_RTS);
}

/// Duplicates of atomic operations are bounded, and for messages that find no receive: what waits stays bounded.
#[test]
fn what_waits_for_a_turn_is_bounded() {
    let mut world = World::new(1);
    world.expect(0xff_fff0);
    let packet = fetch_add(&world.sides[1], 0xff_fff0);
    world.arrive(packet);
    for _ in 0..5000 {
        for packet in [
            fetch_add(&world.sides[1], 0xff_fff0),
            Bth::new(opcode::RC | opcode::SEND_ONLY, world.sides[1].qp, 0xff_fff1).bytes().to_vec(),
        ] {
            world.arrive(packet);
        }
    }
    let waiting = {
        let qp = world.sides[1].engine.qps.get(world.sides[1].qp).unwrap();
        qp.responder.waiting()
    };
    assert!(waiting < 64, "{waiting} answers wait");
}

/// A peer that has more READ requests outstanding than was agreed is refused, as by hardware. Those count whose
/// answers have not left; on a network that takes time, also those whose answers cannot have arrived.
#[test]
fn more_outstanding_reads_than_agreed_are_refused() {
    const AGREED: u32 = 4;
    let refused = Syndrome::Nak(crate::wire::header::Nak::InvalidRequest).code();
    for count in [AGREED, AGREED + 1] {
        let mut world = World::new(1);
        world.expect(0x100);
        for i in 0..count {
            let packet = read_request(&world.sides[1], 0x100 + i, 8);
            world.arrive(packet);
        }
        let answers = world.answers();
        let refusals = answers.iter().filter(|answer| syndrome(answer) == Some(refused)).count();
        assert_eq!(refusals, usize::from(count > AGREED), "{count} at once");
        assert_eq!(answers.len(), count as usize);
    }
    // One after the other, each after the answer to the one before: as many as one likes.
    let mut world = World::new(1);
    world.expect(0x100);
    for i in 0..20 {
        let packet = read_request(&world.sides[1], 0x100 + i, 8);
        world.arrive(packet);
        world.sides[1].engine.settle();
        assert_eq!(world.answers()[0].0, opcode::RC | opcode::READ_ONLY);
    }
}

/// "Receiver not ready" acknowledges nothing, so it does not renew the retries of a packet that was lost: the counter
/// of the kernel's Soft-RoCE (`rxe_comp.c`) is renewed by the same answers as here.
#[test]
fn a_receiver_that_is_not_ready_renews_no_retries() {
    let mut world = World::new(1);
    let side = &mut world.sides[0];
    side.post(1, Operation::Send, Extra::None, 0, 8);
    let (from, peer) = (side.address, world.sides[1].address);
    let mut lost = 0;
    let status = loop {
        // Every other try is lost.
        let sent = std::mem::take(&mut *world.sent.lock().unwrap());
        let arrives = lost % 2 == 1;
        for (_, _, bytes) in sent.into_iter().filter(|_| arrives) {
            world.deliver(from, peer, &bytes);
        }
        lost += 1;
        assert!(lost < 100, "it goes on for ever");
        // The answer: no receive is posted.
        let answers = std::mem::take(&mut *world.sent.lock().unwrap());
        for (_, _, bytes) in answers {
            let aeth = Aeth { syndrome: bytes[Bth::SIZE], msn: 0 };
            assert!(matches!(aeth.meaning(), Syndrome::NotReady(_)));
            world.deliver(peer, from, &bytes);
        }
        if let Some(done) = world.sides[0].poll().first() {
            break done.status;
        }
        let due = world.sides[0].engine.due().unwrap();
        world.clock.0.fetch_max(due, Ordering::Relaxed);
        world.sides[0].engine.advance();
        world.sides[0].engine.settle();
    };
    assert_eq!(status, ibv_wc_status::IBV_WC_RETRY_EXC_ERR);
    // Seven losses are retried, and the eighth is not; seven tries in between arrived.
    assert_eq!(lost, 16, "eight losses, seven arrivals in between, and the look at the completion");
}

/// Requested data is not sent after the queue pair has failed, or was moved to the error state.
#[test]
fn a_queue_pair_in_the_error_state_answers_nothing_more() {
    let mut world = World::new(1);
    world.expect(0x100);
    // More than a turn.
    let packet = read_request(&world.sides[1], 0x100, LENGTH as u32);
    world.arrive(packet);
    for psn in 0x120..0x122 {
        let packet = read_request(&world.sides[1], psn, LENGTH as u32);
        world.arrive(packet);
    }
    assert_eq!(world.answers().len(), 32);
    let side = &mut world.sides[1];
    let attr = ibv_qp_attr { qp_state: ibv_qp_state::IBV_QPS_ERR, ..Default::default() };
    side.engine.modify_qp(side.qp, &attr, ibv_qp_attr_mask::IBV_QP_STATE.0).unwrap();
    while side.engine.due() == Some(0) {
        side.engine.advance();
        side.engine.settle();
    }
    assert!(world.answers().is_empty());
}

/// Losses halve the window; what arrives makes it grow to what it was, and no further.
#[test]
fn the_window_recovers() {
    let mut world = World::new(1);
    let rkey = world.sides[1].key;
    let write = Operation::Write { address: 0x10_0000, rkey };
    let mut windows = Vec::new();
    for round in 0..80 {
        if round == 20 {
            let side = &mut world.sides[0];
            side.engine.qps.get_mut(side.qp).unwrap().shrink_window();
        }
        world.sides[0].post(round, write, Extra::None, 0, LENGTH);
        world.run(0);
        let side = &world.sides[0];
        windows.push(side.engine.qps.get(side.qp).unwrap().sq.window);
    }
    let full = windows[19];
    assert!(windows[20] < full, "{windows:?}");
    assert!(windows[20..].is_sorted() && windows[79] == full, "{windows:?}");
}
