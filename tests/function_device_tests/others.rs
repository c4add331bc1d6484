//! Unreliable, shared and extended queue pairs, windows, and the extended interfaces.

use crate::rig::{Rig, SIGNALED, route};
use ibverbs::ffi::{self, *};
use ibverbs_function_device::{Builder, Progress};
use std::ptr::null_mut;

#[test]
fn datagrams() {
    let rig = Rig::connected(ibv_qp_type::IBV_QPT_UD);
    let ah = unsafe { ibv_create_ah(rig.pd, &mut route()) };
    assert!(!ah.is_null());
    let to = |wr: &mut ibv_send_wr, qkey| {
        wr.wr.ud.ah = ah;
        wr.wr.ud.remote_qpn = rig.b.number();
        wr.wr.ud.remote_qkey = qkey;
    };
    rig.a.fill(0, b"datagram");
    rig.b.receive(1, 0, 48);
    let send = ibv_wr_opcode::IBV_WR_SEND;
    assert_eq!(rig.a.post(send, 2, (0, 8), |wr| to(wr, 0x4321)), 0); // wrong key: dropped
    assert_eq!(rig.a.post(send, 3, (0, 8), |wr| to(wr, 0x1234)), 0);
    rig.device.run();
    assert_eq!(rig.a.poll().len(), 2);
    let mut wc = rig.b.one();
    assert_eq!((wc.byte_len, wc.src_qp), (48, rig.a.number()));
    assert_eq!(rig.b.bytes(40, 8), b"datagram");
    // libibverbs can derive the way back from this header.
    let mut back = ibv_ah_attr::default();
    let error =
        unsafe { ibv_init_ah_from_wc(rig.context, 1, &mut wc, (*rig.b.mr).addr.cast(), &mut back) };
    assert_eq!(error, 0);
    assert_eq!(back.grh.sgid_index, 3);
    assert_eq!(unsafe { back.grh.dgid.raw }, unsafe { route().grh.dgid.raw });
    unsafe { assert_eq!(ibv_destroy_ah(ah), 0) };
    rig.finish();
}

#[test]
fn shared_receive_queue() {
    let device = Builder::model().build();
    let context = device.open().unwrap();
    unsafe {
        let pd = ibv_alloc_pd(context);
        let mut init = ibv_srq_init_attr {
            attr: ibv_srq_attr { max_wr: 4, max_sge: 1, srq_limit: 0 },
            ..Default::default()
        };
        let srq = ibv_create_srq(pd, &mut init);
        let mut rig = Rig::on(device, context, pd, ibv_qp_type::IBV_QPT_RC, srq);
        rig.connect(7);
        assert_eq!(rig.b.receive(1, 0, 1), libc::EINVAL);
        let mut limit = ibv_srq_attr { srq_limit: 2, ..Default::default() };
        let mask = ibv_srq_attr_mask::IBV_SRQ_LIMIT.0 as i32;
        assert_eq!(ibv_modify_srq(srq, &mut limit, mask), 0);
        for wr_id in 0..2 {
            let mut sge = rig.b.sge(0, 8);
            let mut wr = ibv_recv_wr { wr_id, sg_list: &mut sge, num_sge: 1, ..Default::default() };
            assert_eq!(ffi::ibv_post_srq_recv(srq, &mut wr, &mut null_mut()), 0);
        }
        rig.a.send(5, 0, 8);
        assert_eq!(rig.a.one().status, ibv_wc_status::IBV_WC_SUCCESS);
        assert_eq!((rig.b.one().wr_id), 0);
        let mut event = ibv_async_event::default();
        assert_eq!(ibv_get_async_event(context, &mut event), 0);
        assert_eq!(event.event_type, ibv_event_type::IBV_EVENT_SRQ_LIMIT_REACHED);
        assert_eq!(event.element.srq, srq);
        ibv_ack_async_event(&mut event);
        // With the queue pair in ERR, the shared receive queue keeps its requests.
        assert_eq!(rig.b.to_state(ibv_qp_state::IBV_QPS_ERR), 0);
        assert_eq!(ibv_get_async_event(context, &mut event), 0);
        assert_eq!(event.event_type, ibv_event_type::IBV_EVENT_QP_LAST_WQE_REACHED);
        ibv_ack_async_event(&mut event);
        assert!(rig.b.poll().is_empty());
        assert_eq!(ibv_destroy_srq(srq), libc::EBUSY);
        // One request is left in the queue, and it names the region.
        rig.drop_sides();
        assert_eq!(rig.device.violations().0, 1);
        assert_eq!(ibv_destroy_srq(srq), 0);
        assert_eq!(ibv_dealloc_pd(pd), 0);
        ibv_close_device(context);
    }
}

#[test]
fn windows_and_invalidation() {
    let rig = Rig::rc();
    unsafe {
        let mw = ibv_alloc_mw(rig.pd, ibv_mw_type::IBV_MW_TYPE_2);
        let rkey = ibv_inc_rkey((*mw).rkey);
        let bind = ibv_wr_opcode::IBV_WR_BIND_MW;
        let error = rig.b.post(bind, 1, (0, 0), |wr| {
            wr.num_sge = 0;
            wr.__bindgen_anon_2.bind_mw.mw = mw;
            wr.__bindgen_anon_2.bind_mw.rkey = rkey;
            wr.__bindgen_anon_2.bind_mw.bind_info = ibv_mw_bind_info {
                mr: rig.b.mr,
                addr: rig.b.address() + 100,
                length: 10,
                mw_access_flags: ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0,
            };
        });
        assert_eq!(error, 0);
        rig.device.run();
        assert_eq!(rig.b.one().opcode, ibv_wc_opcode::IBV_WC_BIND_MW);
        assert_eq!(ibv_dereg_mr(rig.b.mr), libc::EBUSY);

        rig.a.fill(0, b"window");
        let write = |offset: u64| {
            rig.a.post(ibv_wr_opcode::IBV_WR_RDMA_WRITE, 2, (0, 6), |wr| {
                wr.wr.rdma.remote_addr = rig.b.address() + offset;
                wr.wr.rdma.rkey = rkey;
            })
        };
        write(102);
        rig.b.receive(3, 0, 1);
        let invalidate = ibv_wr_opcode::IBV_WR_SEND_WITH_INV;
        rig.a.post(invalidate, 4, (0, 1), |wr| {
            wr.__bindgen_anon_1.invalidate_rkey = rkey;
        });
        write(102);
        rig.device.run();
        assert_eq!(rig.b.bytes(102, 6), b"window");
        let wc = rig.b.poll();
        assert_eq!(wc[0].wc_flags, 1 << 3);
        assert_eq!(wc[0].__bindgen_anon_1.invalidated_rkey, rkey);
        let wc = rig.a.poll();
        assert_eq!(wc[2].status, ibv_wc_status::IBV_WC_REM_ACCESS_ERR);
        assert_eq!(ibv_dealloc_mw(mw), 0);
    }
    rig.finish();
}

#[test]
fn the_extended_interfaces() {
    let device = Builder::model().progress(Progress::OnPost).build();
    let rig = Rig::new(device, ibv_qp_type::IBV_QPT_RC, null_mut());
    unsafe {
        let mut cq_attr = ibv_cq_init_attr_ex {
            cqe: 16,
            wc_flags: ibv_create_cq_wc_flags::IBV_WC_EX_WITH_BYTE_LEN.0 as u64,
            ..Default::default()
        };
        let cq = ibv_create_cq_ex(rig.context, &mut cq_attr);
        let mut init = ibv_qp_init_attr_ex {
            send_cq: cq.cast(),
            recv_cq: cq.cast(),
            cap: ibv_qp_cap {
                max_send_wr: 4,
                max_recv_wr: 1,
                max_send_sge: 2,
                max_recv_sge: 1,
                max_inline_data: 32,
            },
            qp_type: ibv_qp_type::IBV_QPT_RC,
            comp_mask: ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_PD.0
                | ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS.0,
            pd: rig.pd,
            send_ops_flags: ibv_qp_create_send_ops_flags::IBV_QP_EX_WITH_SEND.0 as u64,
            ..Default::default()
        };
        let qp = ibv_create_qp_ex(rig.context, &mut init);
        let ex = ibv_qp_to_qp_ex(qp);
        assert!(ibv_qp_to_qp_ex(rig.b.qp).is_null());
        let side = crate::rig::Side { cq: cq.cast(), qp, mr: rig.a.mr, memory: Box::new([]) };
        side.connect(rig.b.number(), (1, 2), 7);
        rig.b.connect((*qp).qp_num, (2, 1), 7);
        for id in 0..3 {
            rig.b.receive(id, 100 * id as usize, 100);
        }
        rig.a.fill(0, b"gathered");
        let mut data = *b"inline";

        ibv_wr_start(ex);
        (*ex).wr_flags = SIGNALED;
        (*ex).wr_id = 1;
        ibv_wr_send(ex);
        let list = [rig.a.sge(0, 4), rig.a.sge(4, 4)];
        ibv_wr_set_sge_list(ex, 2, list.as_ptr());
        (*ex).wr_id = 2;
        ibv_wr_send(ex);
        ibv_wr_set_inline_data(ex, data.as_mut_ptr().cast(), 6);
        assert!(rig.b.poll().is_empty());
        assert_eq!(ibv_wr_complete(ex), 0);
        assert_eq!(rig.b.poll().len(), 2);
        assert_eq!(rig.b.bytes(0, 8), b"gathered");
        assert_eq!(rig.b.bytes(100, 6), b"inline");

        // Aborted, too long, or not requested at creation: nothing is posted.
        ibv_wr_start(ex);
        ibv_wr_send(ex);
        ibv_wr_abort(ex);
        ibv_wr_start(ex);
        for _ in 0..3 {
            ibv_wr_send(ex);
        }
        assert_eq!(ibv_wr_complete(ex), libc::ENOMEM);
        ibv_wr_start(ex);
        ibv_wr_rdma_write(ex, 1, 1);
        assert_eq!(ibv_wr_complete(ex), libc::EOPNOTSUPP);
        assert_eq!(rig.device.outstanding((*qp).qp_num), (2, 0));

        let mut attr = ibv_poll_cq_attr::default();
        assert_eq!(ibv_start_poll(cq, &mut attr), 0);
        assert_eq!(((*cq).wr_id, (*cq).status), (1, ibv_wc_status::IBV_WC_SUCCESS));
        assert_eq!(ibv_wc_read_byte_len(cq), 8);
        assert!((*cq).read_imm_data.is_none());
        assert_eq!(ibv_next_poll(cq), 0);
        assert_eq!((*cq).wr_id, 2);
        assert_eq!(ibv_wc_read_opcode(cq), ibv_wc_opcode::IBV_WC_SEND);
        assert_eq!(ibv_next_poll(cq), libc::ENOENT);
        ibv_end_poll(cq);
        assert_eq!(ibv_start_poll(cq, &mut attr), libc::ENOENT);
        assert_eq!(rig.device.outstanding((*qp).qp_num), (0, 0));
        assert_eq!(ibv_destroy_qp(qp), 0);
        assert_eq!(ibv_destroy_cq(cq.cast()), 0);
    }
    rig.finish();
}

#[test]
fn a_datagram_too_long_for_its_own_receive() {
    let rig = Rig::connected(ibv_qp_type::IBV_QPT_UD);
    let ah = unsafe { ibv_create_ah(rig.pd, &mut route()) };
    rig.a.receive(1, 0, 40);
    for id in 2..4 {
        let error = rig.a.post(ibv_wr_opcode::IBV_WR_SEND, id, (0, 8), |wr| {
            wr.wr.ud.ah = ah;
            wr.wr.ud.remote_qpn = rig.a.number();
            wr.wr.ud.remote_qkey = 0x1234;
        });
        assert_eq!(error, 0);
    }
    rig.device.run();
    let seen: Vec<_> = rig.a.poll().iter().map(|wc| (wc.wr_id, wc.status)).collect();
    use ibv_wc_status as S;
    assert_eq!(
        seen,
        [(1, S::IBV_WC_LOC_LEN_ERR), (2, S::IBV_WC_SUCCESS), (3, S::IBV_WC_WR_FLUSH_ERR)]
    );
    unsafe { assert_eq!(ibv_destroy_ah(ah), 0) };
    rig.finish();
}

#[test]
fn extended_reliable_connection() {
    let rig = Rig::rc();
    unsafe {
        let mut attr = ibv_xrcd_init_attr { comp_mask: 3, fd: -1, oflags: libc::O_CREAT };
        let xrcd = ibv_open_xrcd(rig.context, &mut attr);
        let mut attr = ibv_srq_init_attr_ex {
            attr: ibv_srq_attr { max_wr: 4, max_sge: 1, srq_limit: 0 },
            comp_mask: 0xf,
            srq_type: ibv_srq_type::IBV_SRQT_XRC,
            pd: rig.pd,
            xrcd,
            cq: rig.b.cq,
            ..Default::default()
        };
        let srq = ibv_create_srq_ex(rig.context, &mut attr);
        assert!(!srq.is_null());
        let mut number = 0;
        assert_eq!(ibv_get_srq_num(srq, &mut number), 0);
        let mut init = ibv_qp_init_attr_ex {
            qp_type: ibv_qp_type::IBV_QPT_XRC_RECV,
            comp_mask: ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_XRCD.0,
            xrcd,
            ..Default::default()
        };
        let target = ibv_create_qp_ex(rig.context, &mut init);
        let mut init = ibv_qp_init_attr {
            send_cq: rig.a.cq,
            qp_type: ibv_qp_type::IBV_QPT_XRC_SEND,
            cap: ibv_qp_cap { max_send_wr: 4, max_send_sge: 1, ..Default::default() },
            ..Default::default()
        };
        let source = ibv_create_qp(rig.pd, &mut init);
        assert!(!target.is_null() && !source.is_null());
        let side = |qp| crate::rig::Side { cq: rig.a.cq, qp, mr: rig.a.mr, memory: Box::new([]) };
        let (from, to) = (side(source), side(target));
        from.connect((*target).qp_num, (1, 2), 7);
        to.connect((*source).qp_num, (2, 1), 7);
        let mut sge = rig.b.sge(0, 8);
        let mut wr = ibv_recv_wr { wr_id: 1, sg_list: &mut sge, num_sge: 1, ..Default::default() };
        assert_eq!(ffi::ibv_post_srq_recv(srq, &mut wr, &mut null_mut()), 0);
        rig.a.fill(0, b"xrc");
        let error = from.post(ibv_wr_opcode::IBV_WR_SEND, 2, (0, 3), |wr| {
            wr.qp_type.xrc.remote_srqn = number;
        });
        assert_eq!(error, 0);
        rig.device.run();
        assert_eq!(rig.b.bytes(0, 3), b"xrc");
        let wc = rig.b.one();
        assert_eq!((wc.wr_id, wc.qp_num), (1, (*target).qp_num));
        assert_eq!(rig.a.one().wr_id, 2);
        assert_eq!(ibv_destroy_qp(source), 0);
        assert_eq!(ibv_destroy_srq(srq), 0);
        assert_eq!(ibv_close_xrcd(xrcd), libc::EBUSY);
        assert_eq!(ibv_destroy_qp(target), 0);
        assert_eq!(ibv_close_xrcd(xrcd), 0);
    }
    rig.finish();
}
