//! The safe interface never makes these calls, but rdma-core's own tests do: the device accepts or refuses them as the
//! kernel and its drivers do.

use std::mem::zeroed;

use ibverbs::Context;
use ibverbs::ffi::*;
use ibverbs::memory::DeviceMemory;
use ibverbs_software::Device;

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn context() -> Context<'static> {
    Device::new().unwrap().open().unwrap()
}

fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

fn queue_pair(kind: ibv_qp_type) -> ibv_qp_init_attr_ex {
    let cap = ibv_qp_cap {
        max_send_wr: 4,
        max_recv_wr: 4,
        max_send_sge: 1,
        max_recv_sge: 1,
        ..Default::default()
    };
    // SAFETY: all zeros is a valid value of this structure.
    ibv_qp_init_attr_ex { cap, qp_type: kind, ..unsafe { zeroed() } }
}

#[test]
fn flags_of_creation_may_be_given_but_there_are_none() -> Outcome {
    let context = context();
    let (domain, queue) = (context.alloc_pd()?, context.create_cq(4)?);
    let mut attr = queue_pair(ibv_qp_type::IBV_QPT_RC);
    let mask = ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_PD
        | ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_CREATE_FLAGS;
    (attr.comp_mask, attr.pd) = (mask.0, domain.as_raw());
    (attr.send_cq, attr.recv_cq) = (queue.as_raw(), queue.as_raw());
    // SAFETY: what the mask names is given, and lives until the queue pair is destroyed.
    unsafe {
        let qp = ibv_create_qp_ex(context.as_raw(), &mut attr);
        assert!(!qp.is_null());
        assert_eq!(ibv_destroy_qp(qp), 0);
        attr.create_flags = ibv_qp_create_flags::IBV_QP_CREATE_SCATTER_FCS.0;
        assert!(ibv_create_qp_ex(context.as_raw(), &mut attr).is_null());
    }
    assert_eq!(errno(), libc::EOPNOTSUPP);
    Ok(())
}

#[test]
fn allocators_of_a_parent_domain_are_not_needed() -> Outcome {
    let context = context();
    let domain = context.alloc_pd()?;
    // SAFETY: all zeros is a valid value of this structure.
    let mut attr: ibv_parent_domain_init_attr = unsafe { zeroed() };
    attr.pd = domain.as_raw();
    let known = ibv_parent_domain_init_attr_mask::IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS
        | ibv_parent_domain_init_attr_mask::IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
    attr.comp_mask = known.0;
    // SAFETY: the domain lives until its parent domain is deallocated.
    unsafe {
        let parent = ibv_alloc_parent_domain(context.as_raw(), &mut attr);
        assert!(!parent.is_null());
        assert_eq!(ibv_dealloc_pd(parent), 0);
        attr.comp_mask = known.0 << 1 & !known.0;
        assert!(ibv_alloc_parent_domain(context.as_raw(), &mut attr).is_null());
    }
    assert_eq!(errno(), libc::EOPNOTSUPP);
    Ok(())
}

/// A window does not need the right to write locally, but may have it.
#[test]
fn a_window_may_have_the_right_to_write_locally() -> Outcome {
    let context = context();
    let (domain, queue) = (context.alloc_pd()?, context.create_cq(4)?);
    let prepared = domain
        .create_qp(&queue, &queue, ibverbs::QueuePairType::ReliableConnected)
        .max_send_wr(4)
        .build()?;
    let itself = prepared.endpoint();
    let pair = prepared.handshake(itself)?;
    let mut memory = [0_u64; 8];
    // SAFETY: the memory outlives the region; window, region and queue pair are live until the window is deallocated.
    unsafe {
        let (access, address) = (
            ibv_access_flags::IBV_ACCESS_LOCAL_WRITE | ibv_access_flags::IBV_ACCESS_MW_BIND,
            memory.as_mut_ptr(),
        );
        let region = __ibv_reg_mr(domain.as_raw(), address.cast(), 64, access.0, 1);
        assert!(!region.is_null());
        let window = ibv_alloc_mw(domain.as_raw(), ibv_mw_type::IBV_MW_TYPE_1);
        assert!(!window.is_null());
        let mut bind: ibv_mw_bind = zeroed();
        bind.bind_info.mr = region;
        bind.bind_info.addr = address as u64;
        bind.bind_info.length = 64;
        let rights =
            ibv_access_flags::IBV_ACCESS_LOCAL_WRITE | ibv_access_flags::IBV_ACCESS_REMOTE_WRITE;
        bind.bind_info.mw_access_flags = rights.0;
        bind.send_flags = ibv_send_flags::IBV_SEND_SIGNALED.0;
        assert_eq!(ibv_bind_mw(pair.as_raw(), window, &mut bind), 0);
        let mut done: ibv_wc = zeroed();
        while ibv_poll_cq(queue.as_raw(), 1, &mut done) == 0 {}
        assert_eq!(done.status, ibv_wc_status::IBV_WC_SUCCESS);
        assert_eq!(ibv_dealloc_mw(window), 0);
        assert_eq!(ibv_dereg_mr(region), 0);
    }
    Ok(())
}

#[test]
fn device_memory_is_copied_in_words() -> Outcome {
    let context = context();
    let memory = DeviceMemory::with_alignment(&context, 64, 8)?;
    let bytes = [1_u8; 8];
    memory.write(4, &bytes)?;
    for (offset, length) in [(2, 4), (4, 6)] {
        assert!(memory.write(offset, &bytes[..length]).is_err(), "{length} bytes at {offset}");
        assert!(
            memory.read(offset, &mut [0_u8; 8][..length]).is_err(),
            "{length} bytes at {offset}"
        );
    }
    Ok(())
}

/// The half of a connection that only sends takes no attribute of the half that only receives, and a mask that names
/// them is no mistake: the kernel drops those bits, and some programs set them.
#[test]
fn half_an_xrc_connection_leaves_out_what_the_other_half_has() -> Outcome {
    let context = context();
    let (domain, queue) = (context.alloc_pd()?, context.create_cq(4)?);
    let gid = context.query_gid(1, 0)?.gid;
    let mut attr = queue_pair(ibv_qp_type::IBV_QPT_XRC_SEND);
    (attr.comp_mask, attr.pd) = (ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_PD.0, domain.as_raw());
    attr.send_cq = queue.as_raw();
    type M = ibv_qp_attr_mask;
    let state = M::IBV_QP_STATE;
    // SAFETY: what the masks name is given; the queue pair is live until it is destroyed.
    unsafe {
        let qp = ibv_create_qp_ex(context.as_raw(), &mut attr);
        assert!(!qp.is_null());
        let mut to: ibv_qp_attr = zeroed();
        (to.qp_state, to.port_num) = (ibv_qp_state::IBV_QPS_INIT, 1);
        let init = state | M::IBV_QP_PKEY_INDEX | M::IBV_QP_PORT | M::IBV_QP_ACCESS_FLAGS;
        assert_eq!(ibv_modify_qp(qp, &mut to, init.0 as i32), 0);
        (to.qp_state, to.path_mtu) = (ibv_qp_state::IBV_QPS_RTR, ibv_mtu::IBV_MTU_1024);
        (to.ah_attr.is_global, to.ah_attr.port_num) = (1, 1);
        to.ah_attr.grh.dgid.raw = gid.to_bytes();
        let whole =
            state | M::IBV_QP_AV | M::IBV_QP_PATH_MTU | M::IBV_QP_DEST_QPN | M::IBV_QP_RQ_PSN;
        let both = whole | M::IBV_QP_MAX_DEST_RD_ATOMIC | M::IBV_QP_MIN_RNR_TIMER;
        assert_eq!(ibv_modify_qp(qp, &mut to, both.0 as i32), 0);
        assert_eq!(ibv_destroy_qp(qp), 0);
    }
    Ok(())
}

/// UCX looks for a device file of this name.
#[test]
fn a_device_has_the_names_of_its_files() {
    let device = Device::builder().name("soft7").build().unwrap();
    // SAFETY: the device is live.
    let raw = unsafe { &*device.as_raw() };
    let text = |name: &[std::ffi::c_char]| {
        let bytes: Vec<u8> = name.iter().map(|&c| c as u8).take_while(|&c| c != 0).collect();
        String::from_utf8(bytes).unwrap()
    };
    assert_eq!(text(&raw.dev_name), "soft7");
    assert_eq!(text(&raw.ibdev_path), "/sys/class/infiniband/soft7");
}
