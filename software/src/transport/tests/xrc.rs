//! Packets of a peer that breaks the rules of extended reliable connections.

use super::*;
use crate::wire::header::{Aeth, Nak, Reader, Syndrome};

/// A receiving queue pair, and the number of a second shared receive queue with its completion queue.
fn world() -> (World, u32, u32) {
    let mut world = World::of(Kind::Extended, 1);
    let side = &mut world.sides[1];
    let domain = side.engine.core.srqs.get(side.srq.unwrap()).unwrap().xrc.unwrap().handle;
    let pd = side.engine.alloc_pd().unwrap();
    let cq = side.engine.create_cq(CompletionQueue::new(9, 0, 64, None)).unwrap();
    let srq = side.engine.create_srq(extended_queue((domain, pd, cq), 16)).unwrap();
    (world, srq, cq)
}

impl World {
    /// Delivers a request that names the queue `srq`, and returns the answers: opcodes and syndromes.
    fn forged(&mut self, operation: u8, psn: u32, srq: u32, rest: &[u8]) -> Vec<(u8, Syndrome)> {
        let mut bth = Bth::new(opcode::XRC | operation, self.sides[1].target, psn & 0xff_ffff);
        bth.acknowledge = true;
        let mut packet = bth.bytes().to_vec();
        // The bits above the number are reserved.
        packet.extend_from_slice(&(srq | 0x5a00_0000).to_be_bytes());
        packet.extend_from_slice(rest);
        let (from, to) = (self.sides[0].address, self.sides[1].address);
        self.deliver(from, to, &seal(from, to, packet));
        while self.sides[1].engine.due() == Some(0) {
            self.sides[1].engine.advance();
            self.sides[1].engine.settle();
        }
        let sent = std::mem::take(&mut *self.sent.lock().unwrap());
        let syndrome = |bytes: &[u8]| {
            Reader(&bytes[Bth::SIZE..]).aeth().as_ref().map_or(Syndrome::Reserved, Aeth::meaning)
        };
        sent.iter().map(|(_, _, bytes)| (bytes[0], syndrome(bytes))).collect()
    }
}

const START: u32 = 0xff_fff0;
const ACK: u8 = opcode::XRC | opcode::ACK;

fn reth(key: u32, length: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    Reth { address: 0x10_0000, rkey: key, length }.write(&mut bytes);
    bytes
}

#[test]
fn the_packets_of_a_message_name_one_queue() {
    let (mut world, second, second_cq) = world();
    let first = world.sides[1].srq.unwrap();
    world.sides[1].receive(7, 0, LENGTH);
    let receive = Receive { id: 8, list: Vec::new() };
    world.sides[1].engine.post_srq(second, receive).unwrap();
    assert_eq!(world.forged(opcode::SEND_FIRST, START, first, &[1; MTU]), [(ACK, Syndrome::Ack)]);
    let refused = world.forged(opcode::SEND_LAST, START + 1, second, &[2; 8]);
    assert_eq!(refused, [(ACK, Syndrome::Nak(Nak::InvalidRequest))]);
    // The receive that was begun completes on the queue that it was taken from.
    let side = &mut world.sides[1];
    let done: Vec<_> = side.poll().iter().map(|done| (done.id, done.status)).collect();
    assert_eq!(done, [(7, ibv_wc_status::IBV_WC_WR_FLUSH_ERR)]);
    assert!(side.engine.poll(second_cq).is_none());
    assert_eq!(side.state(), ibv_qp_state::IBV_QPS_ERR);
}

/// A request that is sent again names its own queue, whatever is under way.
#[test]
fn a_repeated_read_does_not_disturb_the_message_under_way() {
    let (mut world, second, second_cq) = world();
    let (first, key) = (world.sides[1].srq.unwrap(), world.sides[1].key);
    world.sides[1].receive(7, 0, LENGTH);
    let read = reth(key, 8);
    let only = opcode::XRC | opcode::READ_ONLY;
    assert_eq!(world.forged(opcode::READ_REQUEST, START, first, &read), [(only, Syndrome::Ack)]);
    assert_eq!(
        world.forged(opcode::SEND_FIRST, START + 1, first, &[1; MTU]),
        [(ACK, Syndrome::Ack)]
    );
    // The requests name another protection domain, then no queue, then what they named before.
    assert_eq!(world.forged(opcode::READ_REQUEST, START, second, &read), []);
    assert_eq!(world.forged(opcode::READ_REQUEST, START, 0, &read), []);
    assert_eq!(world.forged(opcode::READ_REQUEST, START, first, &read), [(only, Syndrome::Ack)]);
    assert_eq!(world.forged(opcode::SEND_LAST, START + 2, first, &[1; 8]), [(ACK, Syndrome::Ack)]);
    let side = &mut world.sides[1];
    let done: Vec<_> = side.poll().iter().map(|done| (done.id, done.length)).collect();
    assert_eq!(done, [(7, MTU as u32 + 8)]);
    assert!(side.engine.poll(second_cq).is_none());
}

#[test]
fn what_names_no_queue_of_the_domain_is_refused() {
    let key = world().0.sides[1].key;
    let write = [reth(key, 8), vec![1; 8]].concat();
    let read = reth(key, 8);
    let mut atomic = Vec::new();
    AtomicEth { address: 0x10_0000, rkey: key, swap_add: 1, compare: 0 }.write(&mut atomic);
    let requests: [(u8, &[u8]); 4] = [
        (opcode::SEND_ONLY, &[1; 8]),
        (opcode::WRITE_ONLY, &write),
        (opcode::READ_REQUEST, &read),
        (opcode::FETCH_ADD, &atomic),
    ];
    for (operation, rest) in requests {
        let (mut world, second, _) = world();
        world.sides[1].receive(7, 0, LENGTH);
        world.sides[1].engine.destroy_srq(second).unwrap();
        let refused = world.forged(operation, START, second, rest);
        assert_eq!(refused, [(ACK, Syndrome::Nak(Nak::InvalidRequest))], "{operation}");
        let side = &mut world.sides[1];
        assert!(side.poll().is_empty());
        assert_eq!(side.state(), ibv_qp_state::IBV_QPS_ERR);
        assert_eq!(side.bytes(), vec![0; LENGTH]);
        assert_eq!(side.engine.qps.get(side.target).unwrap().owners[0].async_events, 1);
    }
}

/// A packet that ends within the header that names the queue, and packets for the half that has no such direction.
#[test]
fn short_packets_and_the_wrong_direction_do_nothing() {
    let (mut world, ..) = world();
    let (from, to) = (world.sides[0].address, world.sides[1].address);
    let srq = world.sides[1].srq.unwrap();
    let sending = world.sides[1].qp;
    for operation in [opcode::SEND_ONLY, opcode::READ_REQUEST, opcode::FETCH_ADD] {
        let mut packet = Bth::new(opcode::XRC | operation, sending, START).bytes().to_vec();
        packet.extend_from_slice(&srq.to_be_bytes());
        world.deliver(from, to, &seal(from, to, packet));
    }
    for operation in [opcode::ACK, opcode::READ_ONLY, opcode::ATOMIC_ACK] {
        assert_eq!(world.forged(operation, START, srq, &[0; 8]), []);
    }
    assert_eq!(world.sides[1].engine.core.counters.packets_unexpected, 6);
    let bare = Bth::new(opcode::XRC | opcode::SEND_ONLY, world.sides[1].target, START);
    world.deliver(from, to, &seal(from, to, bare.bytes().to_vec()));
    assert_eq!(world.sides[1].state(), ibv_qp_state::IBV_QPS_ERR);
    let sending = world.sides[1].engine.qps.get(sending).unwrap();
    assert_eq!(sending.state, ibv_qp_state::IBV_QPS_RTS);
}
