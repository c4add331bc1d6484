//! The lean device, for counting instructions.

use crate::rig::{Rig, SIGNALED};
use ibverbs::ffi::{self, *};
use ibverbs_function_device::FunctionDevice;
use std::ptr::null_mut;

#[test]
fn posts_complete_at_once() {
    let rig = Rig::new(FunctionDevice::lean(), ibv_qp_type::IBV_QPT_RC, null_mut());
    rig.connect(7);
    for round in 0..100 {
        assert_eq!(rig.a.receive(round, 0, 32), 0);
        assert_eq!(rig.a.send(round + 1000, 0, 64), 0);
        let error = rig.a.post(ibv_wr_opcode::IBV_WR_RDMA_WRITE, 5, (0, 8), |wr| wr.send_flags = 0);
        assert_eq!(error, 0);
        let wc = rig.a.poll();
        assert_eq!(wc.len(), 2);
        assert_eq!((wc[0].wr_id, wc[0].byte_len), (round, 32));
        assert_eq!(wc[0].opcode, ibv_wc_opcode::IBV_WC_RECV);
        assert_eq!((wc[1].wr_id, wc[1].byte_len), (round + 1000, 64));
        assert_eq!((wc[1].status.0, wc[1].qp_num), (0, rig.a.number()));
    }
    rig.finish();
}

#[test]
fn the_ring_has_an_end() {
    let rig = Rig::new(FunctionDevice::lean(), ibv_qp_type::IBV_QPT_RC, null_mut());
    rig.connect(7);
    for id in 0..64 {
        assert_eq!(rig.a.send(id, 0, 1), 0);
    }
    assert_eq!(rig.a.send(64, 0, 1), libc::ENOMEM);
    assert_eq!(rig.a.poll().len(), 64);
    assert_eq!(rig.a.send(64, 0, 1), 0);
    rig.finish();
}

#[test]
fn extended_interfaces_and_events() {
    let rig = Rig::new(FunctionDevice::lean(), ibv_qp_type::IBV_QPT_RC, null_mut());
    unsafe {
        let channel = ibv_create_comp_channel(rig.context);
        let mut attr = ibv_cq_init_attr_ex { cqe: 16, channel, ..Default::default() };
        let cq = ibv_create_cq_ex(rig.context, &mut attr);
        let mut init = ibv_qp_init_attr_ex {
            send_cq: cq.cast(),
            recv_cq: cq.cast(),
            cap: ibv_qp_cap { max_send_wr: 16, ..Default::default() },
            qp_type: ibv_qp_type::IBV_QPT_RC,
            comp_mask: ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_PD.0
                | ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS.0,
            pd: rig.pd,
            send_ops_flags: 0xff,
            ..Default::default()
        };
        let qp = ibv_create_qp_ex(rig.context, &mut init);
        let ex = ibv_qp_to_qp_ex(qp);
        (*ex).wr_flags = SIGNALED;
        ibv_wr_start(ex);
        (*ex).wr_id = 99;
        ibv_wr_send(ex);
        ibv_wr_abort(ex);
        assert_eq!(ffi::ibv_req_notify_cq(cq.cast(), 0), 0);
        ibv_wr_start(ex);
        for id in 0..3 {
            (*ex).wr_id = id;
            ibv_wr_rdma_write(ex, 1, 2);
            ibv_wr_set_sge(ex, 3, 4, 5 + id as u32);
        }
        assert_eq!(ibv_wr_complete(ex), 0);
        let (mut from, mut context) = (null_mut(), null_mut());
        assert_eq!(ibv_get_cq_event(channel, &mut from, &mut context), 0);
        ibv_ack_cq_events(from, 1);
        let mut poll = ibv_poll_cq_attr::default();
        assert_eq!(ibv_start_poll(cq, &mut poll), 0);
        for id in 0..3 {
            assert_eq!((*cq).wr_id, id);
            assert_eq!(ibv_wc_read_byte_len(cq), 5 + id as u32);
            let next = if id < 2 { 0 } else { libc::ENOENT };
            assert_eq!(ibv_next_poll(cq), next);
        }
        ibv_end_poll(cq);
        assert_eq!(ibv_start_poll(cq, &mut poll), libc::ENOENT);
        assert_eq!(ibv_destroy_qp(qp), 0);
        assert_eq!(ibv_destroy_cq(cq.cast()), 0);
        assert_eq!(ibv_destroy_comp_channel(channel), 0);
    }
    rig.finish();
}
