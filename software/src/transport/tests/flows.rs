//! Packets of SRD that are late, repeated, forged, and too many.

use super::*;
use crate::wire::header::{Aeth, FlowEth, Nak, Reader, Syndrome};

const QKEY: u64 = 0x1234;
const SOURCE: u32 = 0x55;

/// A queue pair of SRD on the second side, with receives.
fn world(transport: Transport) -> (World, u32) {
    let mut world = World::new(1);
    let side = &mut world.sides[1];
    let pd = side.engine.qps.get(side.qp).unwrap().pd;
    let new = NewQueuePair {
        handle: 7,
        context: 0,
        pd: Some(pd),
        xrc_domain: None,
        transport,
        send_cq: Some(side.cq),
        receive_cq: Some(side.cq),
        srq: None,
        all_signaled: true,
        cap: side.engine.qps.get(side.qp).unwrap().cap,
    };
    let number = side.engine.create_qp(new).unwrap();
    let mut attr = ibv_qp_attr { qkey: QKEY as u32, port_num: 1, ..Default::default() };
    type S = ibv_qp_state;
    for state in [S::IBV_QPS_INIT, S::IBV_QPS_RTR, S::IBV_QPS_RTS] {
        attr.qp_state = state;
        let from = side.engine.qps.get(number).unwrap().state;
        let needed = crate::transport::state::row(transport, from, state).unwrap().0;
        let mask = needed | ibv_qp_attr_mask::IBV_QP_STATE.0;
        side.engine.modify_qp(number, &attr, mask).unwrap();
    }
    for id in 0..64 {
        let receive = Receive { id, list: vec![side.sge(0, 64)] };
        side.engine.post_receive(number, receive).unwrap();
    }
    (world, number)
}

impl World {
    /// Delivers a packet of a flow; returns the syndromes of the answers.
    fn flow(&mut self, qpn: u32, operation: u8, psn: u32, header: FlowEth) -> Vec<Syndrome> {
        let mut bth = Bth::new(opcode::SRD | operation, qpn, psn);
        bth.acknowledge = true;
        let mut packet = bth.bytes().to_vec();
        header.write(&mut packet);
        if operation != opcode::DISCONNECT {
            packet.extend_from_slice(&[7; 8]);
        }
        let (from, to) = (self.sides[0].address, self.sides[1].address);
        self.deliver(from, to, &seal(from, to, packet));
        let sent = std::mem::take(&mut *self.sent.lock().unwrap());
        let answer = |(_, _, bytes): &(IpAddr, IpAddr, Vec<u8>)| {
            assert_eq!(bytes[0], opcode::SRD | opcode::ACK);
            Reader(&bytes[Bth::SIZE..]).aeth().as_ref().map_or(Syndrome::Reserved, Aeth::meaning)
        };
        sent.iter().map(answer).collect()
    }
}

#[test]
fn a_flow_that_is_over_begins_no_more() {
    let (mut world, number) = world(Transport::Srd);
    let header = |began| FlowEth { flow: 0x03_0077, source: SOURCE, began, key: QKEY };
    let send = opcode::SEND_ONLY;
    assert_eq!(world.flow(number, send, 1, header(10)), [], "not the first of a flow");
    assert_eq!(world.flow(number, send, 0, header(10)), [Syndrome::Ack]);
    assert_eq!(world.flow(number, send, 0, header(10)), [Syndrome::Ack], "it is carried out once");
    let received = world.sides[1].poll();
    assert_eq!(received.len(), 1);
    assert_eq!((received[0].qpn, received[0].source), (number, SOURCE));
    let flows = |world: &World| world.sides[1].engine.core.flows;
    assert_eq!(flows(&world), 1);
    // An end that is late ends nothing newer.
    assert_eq!(world.flow(number, opcode::DISCONNECT, 0, header(9)), []);
    assert_eq!(flows(&world), 1);
    assert_eq!(world.flow(number, opcode::DISCONNECT, 0, header(10)), []);
    assert_eq!(flows(&world), 0);
    for late in [9, 10] {
        assert_eq!(world.flow(number, send, 0, header(late)), []);
    }
    assert_eq!((flows(&world), world.sides[1].poll().len()), (0, 0));
    // The next flow of this number, before the end of which another one begins.
    for began in [11, 12] {
        assert_eq!(world.flow(number, send, 0, header(began)), [Syndrome::Ack]);
        assert_eq!((flows(&world), world.sides[1].poll().len()), (1, 1));
    }
    // An end that comes before the first packet.
    let other = FlowEth { flow: 0x78, ..header(13) };
    assert_eq!(world.flow(number, opcode::DISCONNECT, 0, other), []);
    assert_eq!(world.flow(number, send, 0, other), []);
    assert_eq!(world.sides[1].poll().len(), 0);
    world.sides[1].engine.destroy_qp(number, 7).unwrap();
    assert_eq!(flows(&world), 0);
}

#[test]
fn a_flow_that_ends_acknowledges_what_it_has_received() {
    let (mut world, number) = world(Transport::Srd);
    let header = FlowEth { flow: 0x77, source: SOURCE, began: 10, key: QKEY };
    assert_eq!(world.flow(number, opcode::SEND_ONLY, 0, header), [Syndrome::Ack]);
    let engine = &mut world.sides[1].engine;
    let round = engine.core.round;
    engine.qps.iter_mut().for_each(|qp| qp.responder.turn = (round, 0));
    assert_eq!(world.flow(number, opcode::SEND_ONLY, 1, header), []);
    let engine = &mut world.sides[1].engine;
    engine.destroy_qp(number, 7).unwrap();
    engine.settle();
    assert_eq!(world.sent.lock().unwrap().len(), 1);
}

#[test]
fn what_is_not_for_a_queue_pair_is_refused_and_keeps_nothing() {
    let (mut world, number) = world(Transport::Srd);
    let header = FlowEth { flow: 0x77, source: SOURCE, began: 10, key: QKEY };
    let nobody = [Syndrome::Nak(Nak::Destination)];
    let reliable = world.sides[1].qp;
    for (to, header) in [
        (number, FlowEth { key: QKEY + 1, ..header }),
        (number, FlowEth { key: QKEY | 1 << 40, ..header }),
        (reliable, header),
        (0x77_7777, header),
    ] {
        assert_eq!(world.flow(to, opcode::SEND_ONLY, 0, header), nobody);
    }
    // A flow of one queue pair is none of another's.
    assert_eq!(world.flow(number, opcode::SEND_ONLY, 0, header), [Syndrome::Ack]);
    assert_eq!(world.flow(reliable, opcode::SEND_ONLY, 1, header), []);
    // Nor does a flow take packets itself, and DC is not SRD.
    let side = &world.sides[1];
    let flows = side.engine.qps.iter().filter(|(_, qp)| qp.flow.is_some());
    let [flow] = flows.map(|(number, _)| number).collect::<Vec<_>>()[..] else { panic!() };
    let next = FlowEth { flow: 0x79, ..header };
    assert_eq!(world.flow(flow, opcode::SEND_ONLY, 0, next), nobody);
    let side = &mut world.sides[1];
    let received = side.poll();
    assert_eq!((received.len(), received[0].status), (1, ibv_wc_status::IBV_WC_SUCCESS));
    assert_eq!(side.engine.core.flows, 1);
    side.assert_guards();
}

#[test]
fn flows_of_a_peer_whose_process_has_ended_are_over() {
    let (mut world, number) = world(Transport::Srd);
    // The first packet of a message is as long as that.
    world.sides[1].engine.qps.get_mut(number).unwrap().mtu = 8;
    let header = FlowEth { flow: 0x77, source: SOURCE, began: 10, key: QKEY };
    for (flow, operation) in [(0x77, opcode::SEND_FIRST), (0x78, opcode::SEND_ONLY)] {
        let header = FlowEth { flow, ..header };
        assert_eq!(world.flow(number, operation, 0, header), [Syndrome::Ack]);
    }
    let [peer, own] = world.sides.each_ref().map(|side| side.address);
    let engine = &mut world.sides[1].engine;
    let left = |engine: &Engine| (engine.core.flows, engine.qps.get(number).unwrap().rq.len());
    engine.lose_peer(own);
    assert_eq!(left(engine), (2, 62));
    engine.lose_peer(peer);
    assert_eq!(left(engine), (0, 63), "a receive has a part of a message that never ends");
    // A packet of before is late; the address may have another process now.
    assert_eq!(world.flow(number, opcode::SEND_FIRST, 0, header), []);
    let next = FlowEth { began: 11, ..header };
    assert_eq!(world.flow(number, opcode::SEND_ONLY, 0, next), [Syndrome::Ack]);
    let received: Vec<u64> = world.sides[1].poll().iter().map(|c| c.id).collect();
    assert_eq!(received, [1, 0]);
}

/// However many flows a peer begins, few are kept, and those that have ended make room for others.
#[test]
fn flows_of_peers_are_bounded() {
    let (mut world, number) = world(Transport::Srd);
    let to = world.sides[1].address;
    let mut packet = |flow: u32, peer: u32, operation: u8| {
        let from = IpAddr::from([10, (peer >> 16) as u8, (peer >> 8) as u8, peer as u8]);
        let mut bytes = Bth::new(opcode::SRD | operation, number, 0).bytes().to_vec();
        FlowEth { flow, source: SOURCE, began: 5, key: QKEY }.write(&mut bytes);
        let bytes = seal(from, to, bytes);
        let engine = &mut world.sides[1].engine;
        engine.receive((from, PORT), to, &bytes);
        engine.settle();
        world.sent.lock().unwrap().clear();
        (engine.core.inbound.len(), engine.core.flows)
    };
    const MOST: usize = 16_384;
    let mut kept = (0, 0);
    for peer in 0..MOST as u32 + 1000 {
        kept = packet(0x20, peer, opcode::SEND_ONLY);
        assert!(kept.0 <= MOST && kept.1 <= MOST);
    }
    assert_eq!(kept, (MOST, MOST));
    for peer in 0..100 {
        packet(0x20, peer, opcode::DISCONNECT);
    }
    assert_eq!(packet(0x21, 5, opcode::SEND_ONLY), (MOST - 99, MOST - 99));
}
