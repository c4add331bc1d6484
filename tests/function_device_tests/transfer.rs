//! The model moves bytes, and refuses what hardware refuses.

use crate::rig::{EVERYTHING, Rig, SIGNALED};
use ibverbs::ffi::{self, *};
use ibverbs_function_device::{Builder, Progress};
use std::ptr::null_mut;

#[test]
fn send_and_receive() {
    let rig = Rig::rc();
    rig.a.fill(10, b"hello");
    assert_eq!(rig.b.receive(7, 100, 64), 0);
    assert_eq!(rig.a.send(8, 10, 5), 0);
    assert!(rig.a.poll().is_empty());
    assert_eq!(rig.b.bytes(100, 5), [0; 5]);
    assert_eq!(rig.device.outstanding(rig.a.number()), (1, 0));

    assert_eq!(rig.device.run(), 1);
    assert_eq!(rig.b.bytes(100, 6), b"hello\0");
    let sent = rig.a.one();
    assert_eq!((sent.wr_id, sent.status), (8, ibv_wc_status::IBV_WC_SUCCESS));
    assert_eq!(sent.opcode, ibv_wc_opcode::IBV_WC_SEND);
    assert_eq!(sent.qp_num, rig.a.number());
    let received = rig.b.one();
    assert_eq!((received.wr_id, received.byte_len), (7, 5));
    assert_eq!(received.opcode, ibv_wc_opcode::IBV_WC_RECV);
    assert_eq!(received.src_qp, rig.a.number());
    assert_eq!(rig.device.outstanding(rig.a.number()), (0, 0));
    rig.finish();
}

#[test]
fn immediate_and_lists() {
    let rig = Rig::rc();
    rig.a.fill(0, b"abcdefgh");
    let mut into = [rig.b.sge(0, 3), rig.b.sge(100, 100)];
    let mut receive =
        ibv_recv_wr { wr_id: 1, sg_list: into.as_mut_ptr(), num_sge: 2, ..Default::default() };
    let mut bad = null_mut();
    unsafe { assert_eq!(ffi::ibv_post_recv(rig.b.qp, &mut receive, &mut bad), 0) };
    let mut from = [rig.a.sge(4, 4), rig.a.sge(0, 4)];
    let opcode = ibv_wr_opcode::IBV_WR_SEND_WITH_IMM;
    let error = rig.a.post(opcode, 2, (0, 0), |wr| {
        wr.sg_list = from.as_mut_ptr();
        wr.num_sge = 2;
        wr.__bindgen_anon_1.imm_data = 0x01020304;
    });
    assert_eq!(error, 0);
    // The lists were copied when posted: overwriting them now changes nothing.
    from.fill(ibv_sge::default());
    into.fill(ibv_sge::default());
    rig.device.run();
    assert_eq!(rig.b.bytes(0, 3), b"efg");
    assert_eq!(rig.b.bytes(100, 5), b"habcd");
    let wc = rig.b.one();
    assert_eq!(wc.byte_len, 8);
    assert_eq!(wc.wc_flags, 1 << 1);
    unsafe { assert_eq!(wc.__bindgen_anon_1.imm_data, 0x01020304) };
    assert_eq!(rig.a.one().status, ibv_wc_status::IBV_WC_SUCCESS);
    rig.finish();
}

#[test]
fn write_read_atomics() {
    let rig = Rig::rc();
    let target = |wr: &mut ibv_send_wr, offset: u64| {
        wr.wr.rdma.remote_addr = rig.b.address() + offset;
        wr.wr.rdma.rkey = rig.b.rkey();
    };
    rig.a.fill(0, b"written");
    let write = ibv_wr_opcode::IBV_WR_RDMA_WRITE;
    assert_eq!(rig.a.post(write, 1, (0, 7), |wr| target(wr, 50)), 0);
    let read = ibv_wr_opcode::IBV_WR_RDMA_READ;
    assert_eq!(rig.a.post(read, 2, (200, 5), |wr| target(wr, 52)), 0);
    assert_eq!(rig.device.step(1), 1);
    assert_eq!(rig.b.bytes(50, 7), b"written");
    assert_eq!(rig.a.bytes(200, 5), [0; 5]);
    assert_eq!(rig.device.step(1), 1);
    assert_eq!(rig.a.bytes(200, 5), b"itten");

    rig.b.fill(64, &41u64.to_ne_bytes());
    let add = ibv_wr_opcode::IBV_WR_ATOMIC_FETCH_AND_ADD;
    let error = rig.a.post(add, 3, (8, 8), |wr| unsafe {
        wr.wr.atomic.remote_addr = rig.b.address() + 64;
        wr.wr.atomic.rkey = rig.b.rkey();
        wr.wr.atomic.compare_add = 1;
        let _ = wr.wr.atomic;
    });
    assert_eq!(error, 0);
    let swap = ibv_wr_opcode::IBV_WR_ATOMIC_CMP_AND_SWP;
    let error = rig.a.post(swap, 4, (16, 8), |wr| {
        wr.wr.atomic.remote_addr = rig.b.address() + 64;
        wr.wr.atomic.rkey = rig.b.rkey();
        wr.wr.atomic.compare_add = 42;
        wr.wr.atomic.swap = 7;
    });
    assert_eq!(error, 0);
    rig.device.run();
    assert_eq!(rig.a.bytes(8, 8), 41u64.to_ne_bytes());
    assert_eq!(rig.a.bytes(16, 8), 42u64.to_ne_bytes());
    assert_eq!(rig.b.bytes(64, 8), 7u64.to_ne_bytes());
    let opcodes: Vec<_> = rig.a.poll().iter().map(|wc| wc.opcode).collect();
    assert_eq!(
        opcodes,
        [
            ibv_wc_opcode::IBV_WC_RDMA_WRITE,
            ibv_wc_opcode::IBV_WC_RDMA_READ,
            ibv_wc_opcode::IBV_WC_FETCH_ADD,
            ibv_wc_opcode::IBV_WC_COMP_SWAP,
        ]
    );
    rig.finish();
}

#[test]
fn inline_data_is_taken_when_posted() {
    let rig = Rig::rc();
    let mut data = *b"inline";
    rig.b.receive(1, 0, 64);
    let error = rig.a.post(ibv_wr_opcode::IBV_WR_SEND, 2, (0, 0), |wr| {
        // No region at all: inline data needs none.
        unsafe { *wr.sg_list = ibv_sge { addr: data.as_mut_ptr() as u64, length: 6, lkey: 0 } };
        wr.send_flags |= ibv_send_flags::IBV_SEND_INLINE.0;
    });
    assert_eq!(error, 0);
    data.fill(0);
    let posted = rig.device.posted(0).unwrap();
    assert_eq!(posted.inline, b"inline");
    assert_eq!((posted.qp_num, posted.receive), (rig.a.number(), false));
    rig.device.run();
    assert_eq!(rig.b.bytes(0, 6), b"inline");
    rig.finish();
}

#[test]
fn remote_access_is_checked() {
    for (offset, key, expected) in [
        (4090, 0, ibv_wc_status::IBV_WC_REM_ACCESS_ERR),
        (0, 1, ibv_wc_status::IBV_WC_REM_ACCESS_ERR),
    ] {
        let rig = Rig::rc();
        let error = rig.a.post(ibv_wr_opcode::IBV_WR_RDMA_WRITE, 1, (0, 100), |wr| {
            wr.wr.rdma.remote_addr = rig.b.address() + offset;
            wr.wr.rdma.rkey = rig.b.rkey() + key;
        });
        assert_eq!(error, 0);
        assert_eq!(rig.a.send(2, 0, 1), 0);
        assert_eq!(rig.b.receive(3, 0, 1), 0);
        rig.device.run();
        let wc = rig.a.poll();
        assert_eq!((wc[0].wr_id, wc[0].status), (1, expected));
        assert_eq!(wc[0].opcode.0, 0x5a5a5a5a);
        assert_eq!((wc[1].wr_id, wc[1].status), (2, ibv_wc_status::IBV_WC_WR_FLUSH_ERR));
        assert_eq!(rig.b.one().status, ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
        assert_eq!(rig.b.bytes(4000, 96), [0; 96]);
        rig.finish();
    }
}

#[test]
fn local_keys_are_checked() {
    let rig = Rig::rc();
    rig.b.receive(1, 0, 100);
    let error = rig.a.post(ibv_wr_opcode::IBV_WR_SEND, 2, (4000, 97), |_| ());
    assert_eq!(error, 0);
    rig.device.run();
    assert_eq!(rig.a.one().status, ibv_wc_status::IBV_WC_LOC_PROT_ERR);
    assert!(rig.b.poll().is_empty());
    rig.finish();
}

#[test]
fn receive_too_small() {
    let rig = Rig::rc();
    rig.b.receive(1, 0, 4);
    rig.a.send(2, 0, 5);
    rig.device.run();
    assert_eq!(rig.a.one().status, ibv_wc_status::IBV_WC_REM_INV_REQ_ERR);
    assert_eq!(rig.b.one().status, ibv_wc_status::IBV_WC_LOC_LEN_ERR);
    // Both queue pairs can be used again after a reset.
    for side in [&rig.a, &rig.b] {
        assert_eq!(side.to_state(ibv_qp_state::IBV_QPS_RESET), 0);
    }
    rig.connect(7);
    rig.b.receive(3, 0, 5);
    rig.a.send(4, 0, 5);
    rig.device.run();
    assert_eq!(rig.a.one().status, ibv_wc_status::IBV_WC_SUCCESS);
    assert_eq!(rig.b.one().byte_len, 5);
    rig.finish();
}

#[test]
fn receiver_not_ready() {
    let rig = Rig::rc();
    rig.a.send(1, 0, 1);
    for _ in 0..100 {
        assert_eq!(rig.device.run(), 0); // retry count 7: for ever
    }
    rig.b.receive(2, 0, 1);
    assert_eq!(rig.device.run(), 1);
    assert_eq!(rig.a.one().status, ibv_wc_status::IBV_WC_SUCCESS);
    rig.finish();

    let device = Builder::model().progress(Progress::Manual).build();
    let rig = Rig::new(device, ibv_qp_type::IBV_QPT_RC, null_mut());
    rig.connect(2);
    rig.a.send(1, 0, 1);
    assert_eq!((rig.device.run(), rig.device.run(), rig.device.run()), (0, 0, 1));
    assert_eq!(rig.a.one().status, ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR);
    rig.finish();
}

#[test]
fn nobody_there() {
    let rig = Rig::rc();
    assert_eq!(rig.b.to_state(ibv_qp_state::IBV_QPS_RESET), 0);
    rig.a.send(1, 0, 1);
    rig.a.send(2, 0, 1);
    let steps: Vec<u32> = (0..4).map(|_| rig.device.run()).collect();
    assert_eq!(steps, [0, 0, 0, 1]); // three retries
    let wc = rig.a.poll();
    assert_eq!(wc[0].status, ibv_wc_status::IBV_WC_RETRY_EXC_ERR);
    assert_eq!(wc[1].status, ibv_wc_status::IBV_WC_WR_FLUSH_ERR);
    rig.finish();
}

#[test]
fn one_side_reconnected_alone_is_not_heard() {
    let rig = Rig::rc();
    rig.b.receive(1, 0, 1);
    rig.a.send(2, 0, 1);
    rig.device.run();
    // The other side still expects the old sequence numbers, so the new ones do not match.
    assert_eq!(rig.b.to_state(ibv_qp_state::IBV_QPS_RESET), 0);
    rig.b.connect(rig.a.number(), (200, 100), 7);
    rig.b.receive(3, 0, 1);
    rig.a.send(4, 0, 1);
    for _ in 0..4 {
        rig.device.run();
    }
    let wc = rig.a.poll();
    assert_eq!(wc[1].status, ibv_wc_status::IBV_WC_RETRY_EXC_ERR);
    assert!(rig.b.poll().is_empty());
    rig.finish();
}

#[test]
fn reset_and_destroy_forget_what_is_outstanding() {
    let rig = Rig::rc();
    rig.b.receive(1, 0, 64);
    assert_eq!(rig.b.to_state(ibv_qp_state::IBV_QPS_RESET), 0);
    assert_eq!(rig.device.outstanding(rig.b.number()), (0, 0));
    rig.a.fill(0, b"x");
    rig.a.send(2, 0, 1);
    rig.device.run();
    assert_eq!(rig.b.bytes(0, 1), [0]);
    assert!(rig.b.poll().is_empty());
    rig.finish();
}

#[test]
fn error_state_flushes_in_order() {
    let rig = Rig::rc();
    rig.device.pause(rig.a.number(), true);
    for id in 0..3 {
        rig.a.receive(10 + id, 0, 1);
        // Unsignalled ones are reported too when they fail.
        rig.a.post(ibv_wr_opcode::IBV_WR_SEND, id, (0, 1), |wr| wr.send_flags = 0);
    }
    assert_eq!(rig.a.to_state(ibv_qp_state::IBV_QPS_ERR), 0);
    assert_eq!(rig.a.send(3, 0, 1), 0);
    let ids: Vec<_> = rig
        .a
        .poll()
        .iter()
        .inspect(|wc| assert_eq!(wc.status, ibv_wc_status::IBV_WC_WR_FLUSH_ERR))
        .map(|wc| wc.wr_id)
        .collect();
    assert_eq!(ids, [0, 1, 2, 10, 11, 12, 3]);
    rig.finish();
}

#[test]
fn slots_come_back_with_the_poll() {
    let rig = Rig::rc();
    for id in 0..8 {
        rig.b.receive(id, 0, 1);
        let flags = if id == 7 { SIGNALED } else { 0 };
        let error = rig.a.post(ibv_wr_opcode::IBV_WR_SEND, id, (0, 1), |wr| wr.send_flags = flags);
        assert_eq!(error, 0);
    }
    assert_eq!(rig.a.send(8, 0, 1), libc::ENOMEM);
    assert_eq!(rig.b.receive(8, 0, 1), libc::ENOMEM);
    rig.device.run();
    assert_eq!(rig.a.send(8, 0, 1), libc::ENOMEM);
    assert_eq!(rig.a.one().wr_id, 7);
    assert_eq!(rig.a.send(8, 0, 1), 0);
    assert_eq!(rig.device.outstanding(rig.a.number()).0, 1);
    rig.finish();
}

#[test]
fn read_only_regions_stay_unchanged() {
    let mut rig = Rig::rc();
    unsafe {
        ibv_dereg_mr(rig.b.mr);
        rig.b.mr = ibv_reg_mr_iova2(
            rig.pd,
            rig.b.memory.as_mut_ptr().cast(),
            4096,
            rig.b.memory.as_ptr() as u64,
            EVERYTHING & !ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0,
        );
    }
    rig.a.fill(0, b"x");
    rig.a.post(ibv_wr_opcode::IBV_WR_RDMA_WRITE, 1, (0, 1), |wr| {
        wr.wr.rdma.remote_addr = rig.b.address();
        wr.wr.rdma.rkey = rig.b.rkey();
    });
    rig.device.run();
    assert_eq!(rig.a.one().status, ibv_wc_status::IBV_WC_REM_ACCESS_ERR);
    assert_eq!(rig.b.bytes(0, 1), [0]);
    rig.finish();
}

#[test]
fn connected_to_itself() {
    let rig = Rig::rc();
    for side in [&rig.a, &rig.b] {
        assert_eq!(side.to_state(ibv_qp_state::IBV_QPS_RESET), 0);
    }
    rig.a.connect(rig.a.number(), (5, 5), 7);
    rig.a.fill(0, b"self");
    rig.a.receive(1, 100, 4);
    rig.a.send(2, 0, 4);
    rig.device.run();
    assert_eq!(rig.a.bytes(100, 4), b"self");
    assert_eq!(rig.a.poll().len(), 2);
    // Connected to itself, it fails first as receiver, whose buffer is too small, then as sender, in order.
    rig.a.receive(3, 0, 1);
    rig.a.receive(4, 0, 1);
    rig.a.send(5, 0, 4);
    rig.a.send(6, 0, 4);
    rig.device.run();
    let seen: Vec<_> = rig.a.poll().iter().map(|wc| (wc.wr_id, wc.status)).collect();
    use ibv_wc_status as S;
    assert_eq!(seen[0], (3, S::IBV_WC_LOC_LEN_ERR));
    let sends: Vec<_> = seen.iter().filter(|wc| wc.0 >= 5).copied().collect();
    assert_eq!(sends, [(5, S::IBV_WC_REM_INV_REQ_ERR), (6, S::IBV_WC_WR_FLUSH_ERR)]);
    assert!(seen.contains(&(4, S::IBV_WC_WR_FLUSH_ERR)));
    rig.finish();
}
