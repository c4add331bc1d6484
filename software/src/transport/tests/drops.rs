//! Packets that are dropped without an answer.

use super::*;
use crate::transport::counters::Counters;

/// An unreliable connection of the second side to the first.
fn unreliable(side: &mut Side, to: IpAddr) -> u32 {
    let pd = side.engine.qps.get(side.qp).unwrap().pd;
    let new = NewQueuePair {
        handle: 2,
        context: 0,
        pd: Some(pd),
        xrc_domain: None,
        transport: Transport::Uc,
        send_cq: Some(side.cq),
        receive_cq: Some(side.cq),
        srq: None,
        all_signaled: true,
        cap: ibv_qp_cap { max_recv_wr: 1, max_recv_sge: 1, ..Default::default() },
    };
    let number = side.engine.create_qp(new).unwrap();
    side.connect(number, to, 7);
    let receive = Receive { id: 9, list: vec![side.sge(0, LENGTH)] };
    side.engine.post_receive(number, receive).unwrap();
    number
}

/// Receives a packet with these headers and so many bytes.
fn receive(side: &mut Side, from: IpAddr, bth: Bth, payload: usize) -> Counters {
    let mut packet = bth.bytes().to_vec();
    packet.resize(packet.len() + payload, 1);
    let packet = seal(from, side.address, packet);
    side.engine.receive((from, PORT), side.address, &packet);
    side.engine.core.counters()
}

#[test]
fn each_kind_is_counted() {
    let mut world = World::new(1);
    let [peer, side] = &mut world.sides;
    let from = peer.address;
    let number = unreliable(side, from);
    let psn = side.engine.qps.get(number).unwrap().responder.expected;
    let send = Bth::new(opcode::UC | opcode::SEND_ONLY, number, psn);
    // The two ends have other MTUs: the first packet of a message is too short, or its only one too long.
    let first = Bth { opcode: opcode::UC | opcode::SEND_FIRST, ..send };
    assert_eq!(receive(side, from, first, MTU / 2).dropped_wrong_mtu, 1);
    assert_eq!(receive(side, from, send, 2 * MTU).dropped_wrong_mtu, 2);
    // Another partition. The bit of full members does not count.
    assert_eq!(receive(side, from, Bth { pkey: 0x1234, ..send }, 8).dropped_wrong_partition, 1);
    assert_eq!(side.poll().len(), 0);
    assert_eq!(receive(side, from, Bth { pkey: 0x7fff, ..send }, 8).dropped_wrong_partition, 1);
    assert_eq!(side.poll().len(), 1);
    let stranger = IpAddr::from([10, 9, 9, 9]);
    assert_eq!(receive(side, stranger, send, 8).dropped_wrong_peer, 1);
    let reliable = Bth { opcode: opcode::RC | opcode::SEND_ONLY, ..send };
    assert_eq!(receive(side, from, reliable, 8).dropped_without_queue_pair, 1);
    // A late answer is nobody's mistake.
    let answer = Bth { opcode: opcode::RC | opcode::ACK, qpn: 0x777, ..send };
    let counters = receive(side, from, answer, 4);
    assert_eq!((counters.dropped_without_queue_pair, counters.packets_unexpected), (1, 3));
}
