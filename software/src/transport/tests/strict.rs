//! Data that the program changes before its send has completed.

use super::*;

/// A region of the first side that peers may not write.
fn private(side: &mut Side) -> u32 {
    let pd = side.engine.qps.get(side.qp).unwrap().pd;
    let start = Backing::Memory(side.memory.as_ptr() as u64 + GUARD as u64);
    side.engine.register(pd, start, LENGTH as u64, 0x10_0000, SEND_LOCAL).unwrap()
}

fn send(side: &mut Side, lkey: u32, length: u32) {
    let request = SendRequest {
        id: 7,
        operation: Operation::Send,
        extra: Extra::None,
        data: Data::List(vec![Sge { address: 0x10_0000, length, lkey }]),
        length,
        signaled: false,
        solicited: false,
        fence: false,
        destination: None,
        remote_srq: None,
    };
    side.engine.post_send(side.qp, request).unwrap();
    side.engine.kick(side.qp);
    side.engine.settle();
}

#[test]
fn a_send_whose_data_was_changed_is_reported() {
    for (strict, writable, changes) in [
        (true, false, false),
        (true, false, true),
        // A peer may have changed it.
        (true, true, true),
        (false, false, true),
    ] {
        let mut world = World::new(1);
        world.sides[1].receive(1, 0, LENGTH);
        let side = &mut world.sides[0];
        side.engine.core.settings.strict = strict;
        let lkey = if writable { side.key } else { private(side) };
        send(side, lkey, 5000);
        if changes {
            side.write(4992, &[1; 8]);
        }
        world.run(0);
        let done = world.sides[0].poll();
        let reported = strict && !writable && changes;
        assert_eq!(world.sides[0].engine.core.counters.changed_sends, u64::from(reported));
        if reported {
            // Even of a send that would have had no completion.
            assert_eq!(done[0].status, ibv_wc_status::IBV_WC_GENERAL_ERR);
            assert_eq!(world.sides[0].state(), ibv_qp_state::IBV_QPS_ERR);
        } else {
            assert!(done.iter().all(|done| done.status == ibv_wc_status::IBV_WC_SUCCESS));
            assert_eq!(world.sides[0].state(), ibv_qp_state::IBV_QPS_RTS);
        }
    }
}
