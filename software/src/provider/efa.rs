//! The direct verbs of EFA, for devices that are like one.

use std::ffi::{c_int, c_void};

use super::context::is_ours;
use super::translate::SRD_RDMA;
use super::{address, object, queue_pair, set_errno, shared};
use crate::faults::{Verb, When};
use crate::ffi::*;
use crate::transport::queue_pair::Transport;

/// The capabilities of a live context's device. `Err`: it is none of EFA's kind.
///
/// # Safety
///
/// `context` is live.
unsafe fn capabilities(context: *mut ibv_context) -> Option<Result<u32, c_int>> {
    // SAFETY: the caller vouches for it, here and below.
    if !unsafe { is_ours(context) } {
        return None;
    }
    // SAFETY: it is one of ours.
    Some(unsafe { shared(context) }.lock().core.settings.efa.ok_or(libc::EOPNOTSUPP))
}

/// # Safety
///
/// As [`DirectVerbs`](ibverbs::provider::DirectVerbs) says, here and below.
pub(crate) unsafe fn query_device(context: *mut ibv_context, attr: *mut c_void) -> Option<c_int> {
    // SAFETY: as the caller says.
    let capabilities = match unsafe { capabilities(context) }? {
        Ok(capabilities) => capabilities,
        Err(errno) => return Some(errno),
    };
    // SAFETY: it is one of ours.
    let settings = unsafe { shared(context) }.lock().core.settings.clone();
    let sge = settings.max_sge as u16;
    let inline = settings.max_inline as u16;
    #[cfg_attr(not(rdma_core_65), allow(unused_mut))]
    let mut all = efadv_device_attr {
        comp_mask: 0,
        max_sq_wr: settings.max_qp_wr,
        max_rq_wr: settings.max_qp_wr,
        max_sq_sge: sge,
        max_rq_sge: sge,
        inline_buf_size: inline,
        device_caps: capabilities,
        max_rdma_size: if capabilities & RDMA == 0 { 0 } else { SRD_RDMA },
        ..Default::default()
    };
    #[cfg(rdma_core_65)]
    {
        all.inline_buf_size_ex = inline;
    }
    // SAFETY: the caller vouches for the pointer.
    unsafe { attr.cast::<efadv_device_attr>().write(all) };
    Some(0)
}

const RDMA: u32 = EFADV_DEVICE_ATTR_CAPS_RDMA_READ | EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE;

/// # Safety
///
/// As above.
pub(crate) unsafe fn query_ah(ah: *mut ibv_ah, attr: *mut c_void) -> Option<c_int> {
    // SAFETY: as the caller says; a handle holds its context.
    unsafe {
        if let Err(errno) = capabilities((*ah).context)? {
            return Some(errno);
        }
        let all = efadv_ah_attr { ahn: address::number(ah), ..Default::default() };
        attr.cast::<efadv_ah_attr>().write(all);
    }
    Some(0)
}

/// # Safety
///
/// As above.
pub(crate) unsafe fn create_qp(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
    of_efa: *mut c_void,
) -> Option<*mut ibv_qp> {
    // SAFETY: as the caller says, here and below.
    let capabilities = match unsafe { capabilities(context) }? {
        Ok(capabilities) => capabilities,
        Err(errno) => return Some(object(Err(errno))),
    };
    // SAFETY: as above.
    let failure = unsafe { shared(context) }.failures().of(Verb::CreateQp);
    if let Some((errno, When::Before)) = failure {
        return Some(object(Err(errno)));
    }
    // SAFETY: as above.
    let made = unsafe { create(context, &mut *attr, &*of_efa.cast(), capabilities) };
    Some(match (made, failure) {
        (Ok(_), Some((errno, _))) => {
            set_errno(errno);
            std::ptr::null_mut()
        }
        (made, _) => object(made),
    })
}

/// # Safety
///
/// As above.
unsafe fn create(
    context: *mut ibv_context,
    attr: &mut ibv_qp_init_attr_ex,
    of_efa: &efadv_qp_init_attr,
    capabilities: u32,
) -> Result<*mut ibv_qp, c_int> {
    type M = ibv_qp_init_attr_mask;
    type F = ibv_qp_create_send_ops_flags;
    let masks = M::IBV_QP_INIT_ATTR_PD | M::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    let is_srd = of_efa.driver_qp_type == EFADV_QP_DRIVER_TYPE_SRD;
    if of_efa.comp_mask != 0 || attr.comp_mask & !masks.0 != 0 || !attr.srq.is_null() || !is_srd {
        return Err(libc::EINVAL);
    }
    let writes = F::IBV_QP_EX_WITH_RDMA_WRITE | F::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    let wants = |operations: F| attr.send_ops_flags & u64::from(operations.0) != 0;
    let lacks = |capability| capabilities & capability == 0;
    if of_efa.flags != 0
        || wants(F::IBV_QP_EX_WITH_RDMA_READ) && lacks(EFADV_DEVICE_ATTR_CAPS_RDMA_READ)
        || wants(writes) && lacks(EFADV_DEVICE_ATTR_CAPS_RDMA_WRITE)
    {
        return Err(libc::EOPNOTSUPP);
    }
    // SAFETY: as the caller says.
    unsafe { queue_pair::create_extended(context, attr, Some(Transport::Srd)) }
}
