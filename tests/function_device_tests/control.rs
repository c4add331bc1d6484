//! Control verbs: everything except the data path.

use crate::rig::{EVERYTHING, Rig};
use ibverbs::ffi::*;
use ibverbs_function_device::{Builder, FunctionDevice, Kind, LinkLayer};
use std::ptr::null_mut;

#[test]
fn attributes_ports_gids() {
    let device = Builder::model().ports(2).build();
    let context = device.open().unwrap();
    unsafe {
        let mut attr = ibv_device_attr_ex::default();
        assert_eq!(ibv_query_device_ex(context, std::ptr::null(), &mut attr), 0);
        assert_eq!(attr.orig_attr.phys_port_cnt, 2);
        assert_eq!(attr.orig_attr.node_guid, ibv_get_device_guid((*context).device));
        assert_ne!(attr.orig_attr.node_guid, 0);
        let mut port = ibv_port_attr::default();
        assert_eq!(___ibv_query_port(context, 2, &mut port), 0);
        assert_eq!((port.state, port.link_layer), (ibv_port_state::IBV_PORT_ACTIVE, 2));
        assert_eq!(___ibv_query_port(context, 3, &mut port), libc::EINVAL);

        let mut gids = [ibv_gid_entry::default(); 16];
        let count = _ibv_query_gid_table(context, gids.as_mut_ptr(), 16, 0, 32);
        assert_eq!(count, 8);
        assert_eq!(gids[3].gid_type, ibv_gid_type::IBV_GID_TYPE_ROCE_V2.0);
        assert_eq!(gids[7].gid.raw[12..], [10, 0, 0, 2]);
        assert_eq!(_ibv_query_gid_table(context, gids.as_mut_ptr(), 7, 0, 32), -22);
        let mut gid = ibv_gid::default();
        assert_eq!(ibv_query_gid(context, 1, 2, &mut gid), 0);
        assert_eq!(gid.raw[10..], [0xff, 0xff, 10, 0, 0, 1]);
        let mut entry = ibv_gid_entry::default();
        assert_eq!(_ibv_query_gid_ex(context, 1, 4, &mut entry, 0, 32), libc::ENODATA);
        device.set_gid(1, 4, [1; 16], 2);
        assert_eq!(_ibv_query_gid_ex(context, 1, 4, &mut entry, 0, 32), 0);

        let mut pkey = 0;
        assert_eq!(ibv_query_pkey(context, 2, 0, &mut pkey), 0);
        assert_eq!(pkey, 0xffff);
        let mut values = ibv_values_ex { comp_mask: 1, ..Default::default() };
        assert_eq!(ibv_query_rt_values_ex(context, &mut values), 0);
        assert_ne!(values.raw_clock.tv_sec, 0);
        device.change_port(1, |port| port.lid = 77);
        assert_eq!(___ibv_query_port(context, 1, &mut port), 0);
        assert_eq!(port.lid, 77);
        ibv_close_device(context);
    }
    device.assert_clean();
}

#[test]
fn infiniband_has_lids() {
    let device = Builder::model().link_layer(LinkLayer::InfiniBand).build();
    let context = device.open().unwrap();
    unsafe {
        let mut port = ibv_port_attr::default();
        assert_eq!(___ibv_query_port(context, 1, &mut port), 0);
        assert_eq!((port.lid, port.link_layer), (1, 1));
        let pd = ibv_alloc_pd(context);
        let mut attr = ibv_ah_attr { dlid: 1, port_num: 1, ..Default::default() };
        let ah = ibv_create_ah(pd, &mut attr);
        assert!(!ah.is_null());
        assert_eq!(ibv_dealloc_pd(pd), libc::EBUSY);
        assert_eq!(ibv_destroy_ah(ah), 0);
        assert_eq!(ibv_dealloc_pd(pd), 0);
        ibv_close_device(context);
    }
}

#[test]
fn all_kinds_of_objects() {
    let rig = Rig::rc();
    let device = rig.device.clone();
    unsafe {
        let td = ibv_alloc_td(rig.context, &mut ibv_td_init_attr::default());
        let mut parent = ibv_parent_domain_init_attr { pd: rig.pd, td, ..Default::default() };
        let domain = ibv_alloc_parent_domain(rig.context, &mut parent);
        assert_eq!(device.live(Kind::ProtectionDomain), 2);
        assert_eq!(ibv_dealloc_td(td), libc::EBUSY);
        assert_eq!(ibv_dealloc_pd(domain), 0);
        assert_eq!(ibv_dealloc_td(td), 0);

        let mut attr = ibv_alloc_dm_attr { length: 64, ..Default::default() };
        let dm = ibv_alloc_dm(rig.context, &mut attr);
        assert_eq!(ibv_memcpy_to_dm(dm, 60, b"1234".as_ptr().cast(), 4), 0);
        assert_ne!(ibv_memcpy_to_dm(dm, 61, b"1234".as_ptr().cast(), 4), 0);
        let access = EVERYTHING | ibv_access_flags::IBV_ACCESS_ZERO_BASED.0;
        let mr = ibv_reg_dm_mr(rig.pd, dm, 0, 64, access);
        rig.a.post(ibv_wr_opcode::IBV_WR_RDMA_READ, 1, (0, 4), |wr| {
            wr.wr.rdma.remote_addr = 60;
            wr.wr.rdma.rkey = (*mr).rkey;
        });
        device.run();
        assert_eq!(rig.a.bytes(0, 4), b"1234");
        assert_eq!(ibv_dereg_mr(mr), 0);
        assert_eq!(ibv_free_dm(dm), 0);

        let mut attr = ibv_xrcd_init_attr { comp_mask: 3, fd: -1, oflags: libc::O_CREAT };
        // `ibv_open_xrcd` is a static inline function that bindgen wraps like the others.
        let xrcd = ibv_open_xrcd(rig.context, &mut attr);
        assert_eq!(device.live(Kind::XrcDomain), 1);
        assert_eq!(ibv_close_xrcd(xrcd), 0);

        let mut modify = ibv_modify_cq_attr {
            attr_mask: 1,
            moderate: ibv_moderate_cq { cq_count: 4, cq_period: 5 },
        };
        assert_eq!(ibv_modify_cq(rig.a.cq, &mut modify), 0);
        let call = device.last_call("modify_cq").unwrap();
        assert_eq!(call.modify_cq_attr.moderate.cq_period, 5);
        assert_eq!(ibv_resize_cq(rig.a.cq, 128), 0);
        assert_eq!((*rig.a.cq).cqe, 128);

        let mut ece = ibv_ece { vendor_id: 1, options: 2, comp_mask: 0 };
        assert_eq!(ibv_set_ece(rig.a.qp, &mut ece), 0);
        ece.options = 0;
        assert_eq!(ibv_query_ece(rig.a.qp, &mut ece), 0);
        assert_eq!(ece.options, 2);
        assert_eq!(
            ibv_rereg_mr(rig.a.mr, 4, null_mut(), null_mut(), 0, 1),
            0,
            "only local access is left"
        );
    }
    rig.finish();
}

#[test]
fn dma_bufs_are_mapped() {
    let rig = Rig::rc();
    unsafe {
        let fd = libc::memfd_create(c"dma".as_ptr(), 0);
        assert_eq!(libc::ftruncate(fd, 8192), 0);
        let mr = ibv_reg_dmabuf_mr(rig.pd, 4096, 4096, 0x1000, fd, EVERYTHING as i32);
        assert!(!mr.is_null());
        rig.a.fill(0, b"dma");
        rig.a.post(ibv_wr_opcode::IBV_WR_RDMA_WRITE, 1, (0, 3), |wr| {
            wr.wr.rdma.remote_addr = 0x1010;
            wr.wr.rdma.rkey = (*mr).rkey;
        });
        rig.device.run();
        let mut read = [0u8; 3];
        assert_eq!(libc::pread(fd, read.as_mut_ptr().cast(), 3, 4096 + 16), 3);
        assert_eq!(&read, b"dma");
        assert_eq!(ibv_dereg_mr(mr), 0);
        libc::close(fd);
    }
    rig.finish();
}

#[test]
fn transitions_are_checked() {
    let device = FunctionDevice::model();
    let rig = Rig::new(device, ibv_qp_type::IBV_QPT_RC, null_mut());
    use ibv_qp_attr_mask as M;
    // INIT needs the access flags; RTS cannot come next.
    let mask = M::IBV_QP_STATE.0 | M::IBV_QP_PKEY_INDEX.0 | M::IBV_QP_PORT.0;
    let init = |attr: &mut ibv_qp_attr| {
        attr.qp_state = ibv_qp_state::IBV_QPS_INIT;
        attr.port_num = 1;
    };
    assert_eq!(rig.a.modify(mask, init), libc::EINVAL);
    let all = mask | M::IBV_QP_ACCESS_FLAGS.0;
    assert_eq!(rig.a.modify(all | M::IBV_QP_QKEY.0, init), libc::EINVAL);
    assert_eq!(rig.a.modify(all, |attr| attr.qp_state = ibv_qp_state::IBV_QPS_INIT), libc::EINVAL);
    assert_eq!(rig.a.modify(all, init), 0);
    assert_eq!(rig.a.to_state(ibv_qp_state::IBV_QPS_RTS), libc::EINVAL);
    assert_eq!(rig.a.send(1, 0, 1), libc::EINVAL);
    assert_eq!(rig.device.last_call("modify_qp").unwrap().mask, 1);
    let before = rig.device.call_before("modify_qp", 1).unwrap();
    assert_eq!((before.mask as u32, before.qp_attr.port_num), (all, 1));
    assert_eq!(rig.device.calls("modify_qp"), 5);

    let (mut attr, mut init) = (ibv_qp_attr::default(), ibv_qp_init_attr::default());
    unsafe { assert_eq!(ibv_query_qp(rig.a.qp, &mut attr, 1, &mut init), 0) };
    assert_eq!(attr.qp_state, ibv_qp_state::IBV_QPS_INIT);
    assert_eq!((init.cap.max_inline_data, init.send_cq), (64, rig.a.cq));
    rig.finish();
}

#[test]
fn either_may_go_first() {
    let device = FunctionDevice::model();
    let context = device.open().unwrap();
    let other = device.open().unwrap();
    assert_eq!(device.live(Kind::Context), 2);
    unsafe { ibv_close_device(other) };
    drop(device);
    unsafe {
        let pd = ibv_alloc_pd(context);
        assert_eq!(ibv_dealloc_pd(pd), 0);
        ibv_close_device(context);
    }
}

#[test]
fn a_closed_context_leaves_nothing_running() {
    let rig = Rig::rc();
    rig.b.receive(1, 0, 64);
    rig.a.fill(0, b"x");
    rig.a.send(2, 0, 1);
    unsafe { ibv_close_device(rig.context) };
    assert_eq!(rig.device.run(), 0);
    assert_eq!(rig.b.memory[0], 0);
    assert_eq!(rig.device.live(Kind::QueuePair), 2);
    assert_eq!(rig.device.live(Kind::Context), 0);
}
