//! Tests of arriving datagrams.

use super::*;
use crate::wire::header::Deth;

/// A datagram is a whole message that is sent. Anything else takes no receive.
#[test]
fn only_whole_sends_are_datagrams() {
    let mut world = World::new(1);
    let [peer, side] = &mut world.sides;
    let pd = side.engine.qps.get(side.qp).unwrap().pd;
    let number = side
        .engine
        .create_qp(NewQueuePair {
            handle: 2,
            context: 0,
            pd: Some(pd),
            xrc_domain: None,
            transport: Transport::Ud,
            send_cq: Some(side.cq),
            receive_cq: Some(side.cq),
            srq: None,
            all_signaled: true,
            cap: ibv_qp_cap { max_recv_wr: 1, max_recv_sge: 1, ..Default::default() },
        })
        .unwrap();
    side.connect(number, peer.address, 0);
    let receive = Receive { id: 9, list: vec![side.sge(0, 64)] };
    side.engine.post_receive(number, receive).unwrap();
    let mut statuses_after = |operation: u8, qkey: u32| {
        let mut packet = Bth::new(opcode::UD | operation, number, 0).bytes().to_vec();
        Deth { qkey, source: 7 }.write(&mut packet);
        packet.extend_from_slice(&[1; 8]);
        let packet = seal(peer.address, side.address, packet);
        side.engine.receive((peer.address, PORT), side.address, &packet);
        let statuses: Vec<_> = side.poll().iter().map(|done| done.status).collect();
        (statuses, side.engine.core.counters.packets_unexpected)
    };
    let others = [
        opcode::SEND_FIRST,
        opcode::SEND_LAST,
        opcode::SEND_LAST_IMM,
        opcode::SEND_ONLY_INVALIDATE,
        opcode::WRITE_ONLY,
        opcode::WRITE_ONLY_IMM,
        opcode::READ_REQUEST,
    ];
    for (count, operation) in others.into_iter().enumerate() {
        assert_eq!(statuses_after(operation, 0), (vec![], count as u64 + 1), "{operation:#x}");
    }
    let wrong_key = others.len() as u64 + 1;
    assert_eq!(statuses_after(opcode::SEND_ONLY, 1), (vec![], wrong_key));
    let arrived = vec![ibv_wc_status::IBV_WC_SUCCESS];
    assert_eq!(statuses_after(opcode::SEND_ONLY_IMM, 0), (arrived, wrong_key));
}
