//! `query_device`, `query_port`, the clock, and P_Keys.

use std::ffi::c_int;
use std::mem::size_of;

use super::context::is_ours;
use super::shared;
use super::translate::SRD_MESSAGE;
use crate::ffi::*;
use crate::transport::responder::MAX_MESSAGE;
use crate::wire::header::PKEY;

/// The entries of the table of GIDs of a port that has this many: most are empty, as on hardware.
pub(super) fn table_length(gids: usize) -> usize {
    gids.max(16)
}

/// No vendor has this number; Soft-RoCE and Soft-iWARP have it too.
const VENDOR: u32 = 0xff_ffff;

/// Its own: that of Soft-RoCE is 0, whose faults `ibverbs` goes around.
const PART: u32 = 1;

pub(super) unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    _input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    size: usize,
) -> c_int {
    // SAFETY: as the module says.
    let settings = unsafe { shared(context) }.lock().core.settings.clone();
    let most = |n: u32| c_int::try_from(n).unwrap_or(c_int::MAX);
    let mut all = ibv_device_attr_ex::default();
    let plain = &mut all.orig_attr;
    let version = env!("CARGO_PKG_VERSION").bytes();
    for (to, from) in plain.fw_ver.iter_mut().zip(version) {
        *to = from as _;
    }
    plain.node_guid = settings.guid().to_be();
    plain.sys_image_guid = plain.node_guid;
    plain.vendor_id = VENDOR;
    plain.vendor_part_id = PART;
    plain.max_mr_size = settings.max_mr_size;
    plain.page_size_cap = 4096;
    plain.max_qp = most(settings.max_qp);
    plain.max_qp_wr = most(settings.max_qp_wr);
    plain.max_sge = most(settings.max_sge);
    plain.max_sge_rd = most(settings.max_sge);
    plain.max_cq = most(settings.max_cq);
    plain.max_cqe = most(settings.max_cqe);
    plain.max_mr = most(settings.max_mr);
    plain.max_mw = most(settings.max_mw);
    plain.max_pd = most(settings.max_pd);
    plain.max_srq = most(settings.max_srq);
    plain.max_srq_wr = most(settings.max_srq_wr);
    plain.max_srq_sge = most(settings.max_sge);
    plain.max_ah = most(settings.max_ah);
    plain.max_qp_rd_atom = settings.max_rd_atomic.into();
    plain.max_qp_init_rd_atom = settings.max_rd_atomic.into();
    plain.max_res_rd_atom = most(settings.max_res_rd_atom);
    plain.max_mcast_grp = 256;
    plain.max_mcast_qp_attach = most(settings.max_qp);
    plain.max_total_mcast_qp_attach = most(settings.max_qp);
    // In truth also with the processor's, but programs look for what adapters say.
    plain.atomic_cap = ibv_atomic_cap::IBV_ATOMIC_HCA;
    plain.max_pkeys = 1;
    plain.phys_port_cnt = settings.ports.len() as u8;
    plain.local_ca_ack_delay = 15;
    plain.device_cap_flags = (ibv_device_cap_flags::IBV_DEVICE_RC_RNR_NAK_GEN
        | ibv_device_cap_flags::IBV_DEVICE_SYS_IMAGE_GUID
        | ibv_device_cap_flags::IBV_DEVICE_SRQ_RESIZE
        | ibv_device_cap_flags::IBV_DEVICE_XRC
        | ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW
        | ibv_device_cap_flags::IBV_DEVICE_MEM_WINDOW_TYPE_2B)
        .0;
    if settings.efa.is_some() {
        plain.atomic_cap = ibv_atomic_cap::IBV_ATOMIC_NONE;
        plain.device_cap_flags = 0;
        plain.max_sge_rd = 1;
        (plain.max_mw, plain.max_srq, plain.max_srq_wr, plain.max_srq_sge) = (0, 0, 0, 0);
        (plain.max_mcast_grp, plain.max_mcast_qp_attach, plain.max_total_mcast_qp_attach) =
            (0, 0, 0);
    }
    // IB_UVERBS_DEVICE_FLUSH_GLOBAL and IB_UVERBS_DEVICE_ATOMIC_WRITE, which no header of verbs has.
    all.device_cap_flags_ex = u64::from(plain.device_cap_flags) | 1 << 38 | 1 << 40;
    all.odp_caps.general_caps = u64::from(
        (ibv_odp_general_caps::IBV_ODP_SUPPORT | ibv_odp_general_caps::IBV_ODP_SUPPORT_IMPLICIT).0,
    );
    // All operations may use pages that come on demand.
    type Odp = ibv_odp_transport_cap_bits;
    let messages =
        Odp::IBV_ODP_SUPPORT_SEND | Odp::IBV_ODP_SUPPORT_RECV | Odp::IBV_ODP_SUPPORT_SRQ_RECV;
    let unreliable = messages | Odp::IBV_ODP_SUPPORT_WRITE;
    // IBV_ODP_SUPPORT_FLUSH and IBV_ODP_SUPPORT_ATOMIC_WRITE, which older headers do not have.
    let reliable =
        (unreliable | Odp::IBV_ODP_SUPPORT_READ | Odp::IBV_ODP_SUPPORT_ATOMIC).0 | 1 << 6 | 1 << 7;
    all.odp_caps.per_transport_caps.rc_odp_caps = reliable;
    all.odp_caps.per_transport_caps.uc_odp_caps = unreliable.0;
    all.odp_caps.per_transport_caps.ud_odp_caps = messages.0;
    all.xrc_odp_caps = reliable;
    all.max_dm_size = settings.max_device_memory;
    all.phys_port_cnt_ex = settings.ports.len() as u32;
    // Time stamps are nanoseconds: 64 bits of them, at 10^6 kHz.
    all.completion_timestamp_mask = u64::MAX;
    all.hca_core_clock = 1_000_000;
    all.cq_mod_caps.max_cq_count = u16::MAX;
    all.cq_mod_caps.max_cq_period = u16::MAX;
    // SAFETY: the caller has room for `size` bytes of it.
    unsafe {
        let size = size.min(size_of::<ibv_device_attr_ex>());
        std::ptr::copy_nonoverlapping((&raw const all).cast::<u8>(), attr.cast(), size);
    }
    0
}

pub(super) unsafe extern "C" fn query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
) -> c_int {
    // SAFETY: as the module says.
    let engine = unsafe { shared(context) }.lock();
    let index = usize::from(port).checked_sub(1);
    let Some(port) = index.and_then(|index| engine.core.ports.get(index)) else {
        return libc::EINVAL;
    };
    let (state, physical) = if port.active {
        (ibv_port_state::IBV_PORT_ACTIVE, 5)
    } else {
        (ibv_port_state::IBV_PORT_DOWN, 3)
    };
    let all = ibv_port_attr {
        state,
        max_mtu: ibv_mtu::IBV_MTU_4096,
        active_mtu: engine.core.settings.mtu,
        gid_tbl_len: table_length(port.gids().len()) as c_int,
        max_msg_sz: if engine.core.settings.efa.is_some() { SRD_MESSAGE } else { MAX_MESSAGE },
        pkey_tbl_len: 1,
        // The codes of four lanes of 25 Gb/s, an arbitrary speed.
        active_width: 2,
        active_speed: 32,
        phys_state: physical,
        link_layer: IBV_LINK_LAYER_ETHERNET.0 as u8,
        port_cap_flags: 1 << 16,
        ..Default::default()
    };
    // SAFETY: as the module says.
    unsafe { attr.write(all) };
    0
}

/// The speed of the lanes that `query_port` names, in units of 100 Mb/s.
#[cfg(rdma_core_65)]
pub(super) unsafe extern "C" fn query_port_speed(
    context: *mut ibv_context,
    port: u32,
    speed: *mut u64,
) -> c_int {
    // SAFETY: as the module says.
    let ports = unsafe { shared(context) }.lock().core.ports.len();
    if !(1..=ports).contains(&(port as usize)) {
        return libc::EINVAL;
    }
    // SAFETY: as the module says.
    unsafe { speed.write(4 * 25 * 10) };
    0
}

pub(super) unsafe extern "C" fn query_rt_values(
    context: *mut ibv_context,
    values: *mut ibv_values_ex,
) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        let now = shared(context).lock().core.now();
        let clock = ibv_values_mask::IBV_VALUES_MASK_RAW_CLOCK.0;
        if (*values).comp_mask & clock != 0 {
            (*values).raw_clock.tv_sec = 0;
            (*values).raw_clock.tv_nsec = now as _;
        }
        (*values).comp_mask &= clock;
    }
    0
}

/// # Safety
///
/// `context` is live.
pub(crate) unsafe fn query_pkey(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
) -> Option<Result<u16, c_int>> {
    // SAFETY: the caller vouches for the context, of whichever provider.
    if !unsafe { is_ours(context) } {
        return None;
    }
    // SAFETY: it is one of ours.
    let ports = unsafe { shared(context) }.lock().core.ports.len();
    let known = (1..=ports).contains(&usize::from(port)) && index == 0;
    Some(if known { Ok(PKEY) } else { Err(libc::EINVAL) })
}
