//! The direct verbs of mlx5 that DC needs, for devices that have it.

use std::ffi::{c_int, c_void};
use std::mem::offset_of;

use super::batch::{SoftQp, last};
use super::context::is_ours;
use super::operations::settings;
use super::{address, object, queue_pair, set_errno, shared};
use crate::faults::{Verb, When};
use crate::ffi::*;
use crate::transport::queue_pair::Transport;

/// Whether a live context's device has DC.
///
/// # Safety
///
/// `context` is live.
unsafe fn has_dc(context: *mut ibv_context) -> Option<bool> {
    // SAFETY: the caller vouches for it.
    let is_ours = unsafe { is_ours(context) };
    // SAFETY: it is one of ours.
    is_ours.then(|| unsafe { shared(context) }.lock().core.settings.has_dc)
}

/// # Safety
///
/// As [`DirectVerbs`](ibverbs::provider::DirectVerbs) says, here and below.
pub(crate) unsafe fn is_supported(device: *mut ibv_device) -> bool {
    // SAFETY: as the caller says.
    unsafe { settings(device) }.is_some_and(|settings| settings.has_dc)
}

/// # Safety
///
/// As above.
pub(crate) unsafe fn query_device(context: *mut ibv_context, attr: *mut c_void) -> Option<c_int> {
    type M = mlx5dv_context_comp_mask;
    // SAFETY: as the caller says.
    if !unsafe { has_dc(context) }? {
        return Some(libc::EOPNOTSUPP);
    }
    // SAFETY: it is one of ours.
    let most = unsafe { shared(context) }.lock().core.settings.max_rd_atomic.into();
    // SAFETY: as the caller says.
    let attr = unsafe { &mut *attr.cast::<mlx5dv_context>() };
    let comp_mask = attr.comp_mask & u64::from(M::MLX5DV_CONTEXT_MASK_MAX_DC_RD_ATOM.0);
    *attr = mlx5dv_context {
        comp_mask,
        max_dc_rd_atom: most,
        max_dc_init_rd_atom: most,
        ..Default::default()
    };
    Some(0)
}

/// # Safety
///
/// As above.
pub(crate) unsafe fn create_qp(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
    of_mlx5: *mut c_void,
) -> Option<*mut ibv_qp> {
    // SAFETY: as the caller says, here and below.
    if !unsafe { has_dc(context) }? {
        return Some(object(Err(libc::EOPNOTSUPP)));
    }
    // SAFETY: as above.
    let failure = unsafe { shared(context) }.failures().of(Verb::CreateQp);
    if let Some((errno, When::Before)) = failure {
        return Some(object(Err(errno)));
    }
    // SAFETY: as above.
    let made = unsafe { create(context, &mut *attr, &*of_mlx5.cast()) };
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
    of_mlx5: &mlx5dv_qp_init_attr,
) -> Result<*mut ibv_qp, c_int> {
    // Keys of memory, streams and flags of creation are not there.
    if of_mlx5.comp_mask != u64::from(mlx5dv_qp_init_attr_mask::MLX5DV_QP_INIT_ATTR_MASK_DC.0) {
        return Err(libc::EOPNOTSUPP);
    }
    let operations = ibv_qp_init_attr_mask::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS.0;
    let is_target = match of_mlx5.dc_init_attr.dc_type {
        mlx5dv_dc_type::MLX5DV_DCTYPE_DCT => true,
        mlx5dv_dc_type::MLX5DV_DCTYPE_DCI => false,
        _ => return Err(libc::EINVAL),
    };
    if is_target && attr.comp_mask & operations != 0 || !is_target && !attr.srq.is_null() {
        return Err(libc::EINVAL);
    }
    let transport = if is_target { Transport::DcTarget } else { Transport::DcInitiator };
    // SAFETY: as the caller says; a target has this member of the union.
    unsafe {
        let qp = queue_pair::create_extended(context, attr, Some(transport))?;
        if is_target {
            let key = of_mlx5.dc_init_attr.__bindgen_anon_1.dct_access_key;
            let mut engine = shared(context).lock();
            engine.qps.get_mut((*qp).handle).ok_or(libc::EINVAL)?.access_key = key;
        } else {
            (*qp.cast::<SoftQp>()).direct.wr_set_dc_addr = Some(wr_set_dc_addr);
        }
        Ok(qp)
    }
}

/// # Safety
///
/// As above.
pub(crate) unsafe fn qp_ex(qp: *mut ibv_qp_ex) -> Option<*mut c_void> {
    // SAFETY: as the caller says: it holds its context, and is one of ours then.
    unsafe {
        let is_ours = is_ours((*qp).qp_base.context);
        is_ours.then(|| (&raw mut (*qp.cast::<SoftQp>()).direct).cast())
    }
}

unsafe extern "C" fn wr_set_dc_addr(
    direct: *mut mlx5dv_qp_ex,
    ah: *mut ibv_ah,
    number: u32,
    key: u64,
) {
    let qp = direct.wrapping_byte_sub(offset_of!(SoftQp, direct)).cast::<ibv_qp_ex>();
    // SAFETY: as the module's parent says; a batch is open.
    unsafe {
        last(qp, |request| {
            let to = address::destination(ah, number, key).ok_or(libc::EINVAL)?;
            request.destination = Some(to);
            Ok(())
        });
    }
}
