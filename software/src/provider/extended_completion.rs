//! Completion queues that are polled field by field: `ibv_create_cq_ex`.

use std::ffi::c_int;
use std::sync::atomic::Ordering;

use super::completion::{SoftCq, create};
use super::{object, shared};
use crate::faults::{Verb, When};
use crate::ffi::*;
use crate::transport::work::Completion;

/// The fields that a completion can have.
const FIELDS: u32 = ibv_create_cq_wc_flags::IBV_WC_EX_WITH_BYTE_LEN.0
    | ibv_create_cq_wc_flags::IBV_WC_EX_WITH_IMM.0
    | ibv_create_cq_wc_flags::IBV_WC_EX_WITH_QP_NUM.0
    | ibv_create_cq_wc_flags::IBV_WC_EX_WITH_SRC_QP.0
    | ibv_create_cq_wc_flags::IBV_WC_EX_WITH_SLID.0
    | ibv_create_cq_wc_flags::IBV_WC_EX_WITH_SL.0
    | ibv_create_cq_wc_flags::IBV_WC_EX_WITH_DLID_PATH_BITS.0
    | ibv_create_cq_wc_flags::IBV_WC_EX_WITH_COMPLETION_TIMESTAMP.0
    | ibv_create_cq_wc_flags::IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK.0;

pub(super) unsafe extern "C" fn create_cq_ex(
    context: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    type F = ibv_create_cq_wc_flags;
    // SAFETY: as the module says. Functions are set before the program has the queue.
    unsafe {
        let attr = &*attr;
        let flags = ibv_create_cq_attr_flags::IBV_CREATE_CQ_ATTR_SINGLE_THREADED
            | ibv_create_cq_attr_flags::IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
        let masks = ibv_cq_init_attr_mask::IBV_CQ_INIT_ATTR_MASK_FLAGS
            | ibv_cq_init_attr_mask::IBV_CQ_INIT_ATTR_MASK_PD;
        if attr.wc_flags & !u64::from(FIELDS) != 0 || attr.comp_mask & !masks.0 != 0 {
            return object(Err(libc::EOPNOTSUPP));
        }
        let named = attr.comp_mask & ibv_cq_init_attr_mask::IBV_CQ_INIT_ATTR_MASK_FLAGS.0 != 0;
        if named && attr.flags & !flags.0 != 0 {
            return object(Err(libc::EOPNOTSUPP));
        }
        let vector = c_int::try_from(attr.comp_vector).unwrap_or(-1);
        let times = F::IBV_WC_EX_WITH_COMPLETION_TIMESTAMP
            | F::IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;
        let is_timed = attr.wc_flags & u64::from(times.0) != 0;
        let cq = create(context, attr.cqe, attr.channel, vector, is_timed);
        if cq.is_null() {
            return std::ptr::null_mut();
        }
        libc::pthread_mutex_init((&raw mut (*cq).polling).cast(), std::ptr::null());
        let ex = cq.cast::<ibv_cq_ex>();
        (*ex).start_poll = Some(start_poll);
        (*ex).next_poll = Some(next_poll);
        (*ex).end_poll = Some(end_poll);
        (*ex).read_opcode = Some(read_opcode);
        (*ex).read_vendor_err = Some(read_vendor_err);
        (*ex).read_wc_flags = Some(read_wc_flags);
        let has = |field: F| attr.wc_flags & u64::from(field.0) != 0;
        (*ex).read_byte_len = has(F::IBV_WC_EX_WITH_BYTE_LEN).then_some(read_byte_len);
        (*ex).read_imm_data = has(F::IBV_WC_EX_WITH_IMM).then_some(read_imm_data);
        (*ex).read_qp_num = has(F::IBV_WC_EX_WITH_QP_NUM).then_some(read_qp_num);
        (*ex).read_src_qp = has(F::IBV_WC_EX_WITH_SRC_QP).then_some(read_src_qp);
        (*ex).read_slid = has(F::IBV_WC_EX_WITH_SLID).then_some(read_slid);
        (*ex).read_sl = has(F::IBV_WC_EX_WITH_SL).then_some(read_sl);
        (*ex).read_dlid_path_bits =
            has(F::IBV_WC_EX_WITH_DLID_PATH_BITS).then_some(read_dlid_path_bits);
        (*ex).read_completion_ts =
            has(F::IBV_WC_EX_WITH_COMPLETION_TIMESTAMP).then_some(read_completion_ts);
        (*ex).read_completion_wallclock_ns =
            has(F::IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK).then_some(read_wall_clock);
        ex
    }
}

/// # Safety
///
/// As the module says; the caller holds `polling`.
unsafe fn advance(ex: *mut ibv_cq_ex) -> c_int {
    let cq = ex.cast::<SoftCq>();
    // SAFETY: as the caller says.
    unsafe {
        let shared = shared((*ex).context);
        match shared.failures().of(Verb::PollCq) {
            None => {}
            Some((errno, When::Before)) => return errno,
            Some((errno, When::After)) => {
                shared.lock().poll((*ex).handle);
                return errno;
            }
        }
        if (*cq).is_idle(shared, (*ex).handle) {
            return libc::ENOENT;
        }
        let Some(completion) = shared.lock().poll((*ex).handle) else {
            return libc::ENOENT;
        };
        (*ex).status = completion.status;
        (*ex).wr_id = completion.id;
        (*cq).current = Some(completion);
    }
    0
}

unsafe extern "C" fn start_poll(ex: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        if (*attr).comp_mask != 0 {
            return libc::EINVAL;
        }
        let polling = (&raw mut (*ex.cast::<SoftCq>()).polling).cast();
        libc::pthread_mutex_lock(polling);
        let returned = advance(ex);
        // Without a completion there is no poll to end.
        if returned != 0 {
            libc::pthread_mutex_unlock(polling);
        }
        returned
    }
}

unsafe extern "C" fn next_poll(ex: *mut ibv_cq_ex) -> c_int {
    // SAFETY: as the module says; a poll is under way.
    unsafe { advance(ex) }
}

unsafe extern "C" fn end_poll(ex: *mut ibv_cq_ex) {
    // SAFETY: as the module says; a poll is under way.
    unsafe {
        (*ex.cast::<SoftCq>()).current = None;
        if (*ex.cast::<SoftCq>()).is_attended.load(Ordering::Relaxed) {
            shared((*ex).context).lock().polled((*ex).handle);
        }
        libc::pthread_mutex_unlock((&raw mut (*ex.cast::<SoftCq>()).polling).cast());
    }
}

/// A field of the completion that a poll is at.
///
/// # Safety
///
/// As the module says.
unsafe fn field<T>(ex: *mut ibv_cq_ex, read: impl Fn(&Completion) -> T) -> T {
    let none = Completion::new(0, 0, ibv_wc_status(0), ibv_wc_opcode(0));
    // SAFETY: as the caller says.
    read(unsafe { (*ex.cast::<SoftCq>()).current.as_ref() }.unwrap_or(&none))
}

macro_rules! field_functions {
    ($($name:ident -> $type:ty = $read:expr;)*) => {
        $(unsafe extern "C" fn $name(ex: *mut ibv_cq_ex) -> $type {
            // SAFETY: as the module says; a poll is under way.
            unsafe { field(ex, $read) }
        })*
    };
}

field_functions! {
    read_opcode -> ibv_wc_opcode = |c| c.opcode;
    read_byte_len -> u32 = |c| c.length;
    read_imm_data -> __be32 = |c| c.immediate;
    read_qp_num -> u32 = |c| c.qpn;
    read_src_qp -> u32 = |c| c.source;
    read_wc_flags -> u32 = |c| c.flags;
    read_completion_ts -> u64 = |c| c.time;
    read_wall_clock -> u64 = |c| c.wall_clock;
    read_vendor_err -> u32 = |_| 0;
    read_slid -> u32 = |c| c.address_handle.into();
    read_sl -> u8 = |c| c.service_level;
    read_dlid_path_bits -> u8 = |_| 0;
}
