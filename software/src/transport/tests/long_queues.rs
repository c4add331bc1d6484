//! Send queues with far more packets than sequence numbers.

use super::*;
use crate::transport::core::Core;
use crate::transport::queue_pair::QueuePair;
use crate::wire::header::{Aeth, Syndrome};
use crate::wire::sequence::wire;

/// The packets of a request of the most bytes.
const MOST: u64 = (1 << 31) / MTU as u64;

impl Side {
    /// A region without memory, as large as any request.
    fn null_region(&mut self) -> u32 {
        let pd = self.engine.qps.get(self.qp).unwrap().pd;
        let most = 4_u64 << 31;
        self.engine.register(pd, Backing::Null, most, 0, ALL).unwrap()
    }

    fn qp_and_core(&mut self) -> (&mut QueuePair, &mut Core) {
        (self.engine.qps.get_mut(self.qp).unwrap(), &mut self.engine.core)
    }

    /// Posts a write of that many packets, and sends nothing.
    fn queue(&mut self, id: u64, packets: u64, lkey: u32) {
        let length = (packets * MTU as u64) as u32;
        let request = SendRequest {
            id,
            operation: Operation::Write { address: 0x10_0000, rkey: 1 },
            extra: Extra::None,
            data: Data::List(vec![Sge { address: 0, length, lkey }]),
            length,
            signaled: true,
            solicited: false,
            fence: false,
            destination: None,
            remote_srq: None,
        };
        self.engine.post_send(self.qp, request).unwrap();
    }

    /// Pretends that the peer has acknowledged everything before this packet, which is of the oldest request.
    fn skip_to(&mut self, number: u64) {
        let (qp, core) = self.qp_and_core();
        let front = qp.sq.posted.front().unwrap();
        assert!((front.first..front.end()).contains(&number));
        (qp.sq.cursor, qp.sq.offset) = (0, (number - front.first) as u32);
        (qp.sq.unacknowledged, qp.sq.high) = (number, number);
        qp.send_requests(core);
        self.engine.settle();
    }
}

impl World {
    /// The peer acknowledges what was sent last; returns how many packets were sent since.
    fn acknowledge(&mut self) -> usize {
        let sent = std::mem::take(&mut *self.sent.lock().unwrap());
        let Some((from, to, last)) = sent.back() else { return 0 };
        let side = &mut self.sides[0];
        let psn = Bth::parse(last).unwrap().psn;
        let mut ack = Bth::new(opcode::RC | opcode::ACK, side.qp, psn).bytes().to_vec();
        ack.extend_from_slice(&Aeth { syndrome: Syndrome::Ack.code(), msn: 0 }.bytes());
        let ack = seal(*to, *from, ack);
        side.engine.receive((*to, PORT), *from, &ack);
        while side.engine.due() == Some(0) {
            side.engine.advance();
        }
        side.engine.settle();
        sent.len()
    }
}

/// Each length of a queue begins, and ends: in between, the numbers wrap around wherever they like.
#[test]
fn queues_of_every_length_are_sent_to_their_end() {
    let near = |packets: u64| packets.saturating_sub(2)..=packets + 2;
    let edges = [3, 32, 128, 1 << 22, 1 << 23, 3 << 22, 1 << 24, 1 << 25];
    for total in edges.into_iter().flat_map(near) {
        let mut world = World::new(1);
        let side = &mut world.sides[0];
        let lkey = side.null_region();
        let (mut left, mut requests) = (total, Vec::new());
        while left > 0 {
            requests.push(left.min(MOST));
            left -= left.min(MOST);
        }
        for (id, &packets) in requests.iter().enumerate() {
            side.queue(id as u64, packets, lkey);
        }
        let number = side.qp;
        side.engine.kick(number);
        side.engine.settle();
        let due = side.engine.due();
        assert!(due.is_some(), "{total} packets: nothing is sent, and no timer runs");
        // Most of each request is left out; the last packets of one and the first of the next are not.
        let (mut skipped, mut done) = (None, Vec::new());
        while done.len() < requests.len() {
            let front = world.sides[0].engine.qps.get(number).unwrap().sq.posted.front().unwrap();
            let (id, end) = (front.request.id, front.end());
            if front.packets > 1000 && skipped.replace(id) != Some(id) {
                world.sent.lock().unwrap().clear();
                world.sides[0].skip_to(end - 300);
            }
            assert!(world.acknowledge() > 0, "{total} packets: it has stopped in request {id}");
            done.extend(world.sides[0].poll());
        }
        for (id, done) in done.iter().enumerate() {
            assert_eq!((done.id, done.status), (id as u64, ibv_wc_status::IBV_WC_SUCCESS));
        }
        let qp = world.sides[0].engine.qps.get(number).unwrap();
        assert!(qp.sq.posted.is_empty() && qp.state == ibv_qp_state::IBV_QPS_RTS);
        assert_eq!(qp.sq.next, 0xff_fff0 + total);
        assert_eq!(wire(qp.sq.unacknowledged), wire(0xff_fff0 + total));
    }
}

/// A WRITE of the reported longest message, whose packets but the first and the last are left out.
#[test]
fn the_last_packet_of_the_longest_message_is_taken() {
    let mut world = World::new(1);
    let rkey = world.sides[1].null_region();
    let (from, to, number) = (world.sides[0].address, world.sides[1].address, world.sides[1].qp);
    let packet = |opcode, psn, reth: Option<Reth>| {
        let mut packet = Bth::new(opcode::RC | opcode, number, psn).bytes().to_vec();
        reth.iter().for_each(|reth| reth.write(&mut packet));
        packet.extend([0; MTU]);
        seal(from, to, packet)
    };
    let start = Reth { address: 0, rkey, length: 1 << 31 };
    world.deliver(from, to, &packet(opcode::WRITE_FIRST, 0xff_fff0, Some(start)));
    let (qp, _) = world.sides[1].qp_and_core();
    qp.responder.skip_to((1 << 31) - MTU as u64);
    world.deliver(from, to, &packet(opcode::WRITE_LAST, 0xff_fff1, None));
    let (qp, _) = world.sides[1].qp_and_core();
    assert_eq!((qp.responder.expected, qp.responder.msn), (0xff_fff2, 1));
}

/// The reported longest message, packet by packet: 8 million of them.
#[test]
#[ignore = "half a minute in a release build: script/soak runs it"]
fn the_longest_message_arrives() {
    let mut world = World::new(1);
    let lkey = world.sides[0].null_region();
    let rkey = world.sides[1].null_region();
    let length = 1 << 31;
    for (id, operation) in
        [Operation::Write { address: 0, rkey }, Operation::Read { address: 0, rkey }]
            .into_iter()
            .enumerate()
    {
        let request = SendRequest {
            id: id as u64,
            operation,
            extra: Extra::None,
            data: Data::List(vec![Sge { address: 0, length, lkey }]),
            length,
            signaled: true,
            solicited: false,
            fence: false,
            destination: None,
            remote_srq: None,
        };
        let side = &mut world.sides[0];
        side.engine.post_send(side.qp, request).unwrap();
        side.engine.kick(side.qp);
        side.engine.settle();
        let done = loop {
            world.run_for(1_000_000, 0);
            world.packets.clear();
            if let Some(done) = world.sides[0].poll().first() {
                break *done;
            }
        };
        assert_eq!((done.id, done.status), (id as u64, ibv_wc_status::IBV_WC_SUCCESS));
    }
}
