//! Queue pairs.

use std::ffi::c_int;

use super::batch::{Batch, set_functions};
use super::{context, init_wait, object, shared, status, wait_acknowledged, zeroed};
use crate::ffi::*;
use crate::transport::objects::NewQueuePair;
use crate::transport::queue_pair::Transport;

/// `struct verbs_qp`, and the batch that is being built.
#[repr(C)]
pub(super) struct SoftQp {
    verbs: verbs_qp,
    /// Held from `wr_start` to `wr_complete`.
    pub(super) batching: pthread_mutex_t,
    pub(super) batch: Batch,
    pub(super) max_inline: usize,
}

pub(super) unsafe extern "C" fn create_qp(
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> *mut ibv_qp {
    // SAFETY: as the module says.
    object(unsafe { create(pd, &mut *attr, None) })
}

pub(super) unsafe extern "C" fn create_qp_ex(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    type M = ibv_qp_init_attr_mask;
    // SAFETY: as the module says; what a bit of the mask names is given.
    unsafe {
        let ex = &mut *attr;
        let known = M::IBV_QP_INIT_ATTR_PD | M::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
        let has = |bit: M| ex.comp_mask & bit.0 != 0;
        if ex.comp_mask & !known.0 != 0 || !has(M::IBV_QP_INIT_ATTR_PD) || ex.pd.is_null() {
            return object(Err(libc::EOPNOTSUPP));
        }
        let operations = has(M::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS).then_some(ex.send_ops_flags);
        let mut plain = ibv_qp_init_attr {
            qp_context: ex.qp_context,
            send_cq: ex.send_cq,
            recv_cq: ex.recv_cq,
            srq: ex.srq,
            cap: ex.cap,
            qp_type: ex.qp_type,
            sq_sig_all: ex.sq_sig_all,
        };
        let made = create(ex.pd, &mut plain, operations);
        if let Ok(qp) = made {
            ex.cap = plain.cap;
            (*qp).context = context;
        }
        object(made)
    }
}

/// The operations that a transport has, as `enum ibv_qp_create_send_ops_flags`.
fn operations_of(transport: Transport) -> u64 {
    type F = ibv_qp_create_send_ops_flags;
    let datagrams = F::IBV_QP_EX_WITH_SEND | F::IBV_QP_EX_WITH_SEND_WITH_IMM;
    let unreliable = datagrams
        | F::IBV_QP_EX_WITH_RDMA_WRITE
        | F::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
        | F::IBV_QP_EX_WITH_BIND_MW
        | F::IBV_QP_EX_WITH_LOCAL_INV;
    let reliable = unreliable
        | F::IBV_QP_EX_WITH_SEND_WITH_INV
        | F::IBV_QP_EX_WITH_RDMA_READ
        | F::IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
        | F::IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
    u64::from(match transport {
        Transport::Rc => reliable.0,
        Transport::Uc => unreliable.0,
        Transport::Ud => datagrams.0,
    })
}

/// # Safety
///
/// As the module says.
unsafe fn create(
    pd: *mut ibv_pd,
    attr: &mut ibv_qp_init_attr,
    operations: Option<u64>,
) -> Result<*mut ibv_qp, c_int> {
    let transport = match attr.qp_type {
        ibv_qp_type::IBV_QPT_RC => Transport::Rc,
        ibv_qp_type::IBV_QPT_UC => Transport::Uc,
        ibv_qp_type::IBV_QPT_UD => Transport::Ud,
        _ => return Err(libc::EOPNOTSUPP),
    };
    if operations.is_some_and(|operations| operations & !operations_of(transport) != 0) {
        return Err(libc::EOPNOTSUPP);
    }
    if attr.send_cq.is_null() || attr.recv_cq.is_null() {
        return Err(libc::EINVAL);
    }
    // SAFETY: as the caller says. The object is complete before anybody else can access it.
    unsafe {
        let soft = Box::into_raw(Box::new(SoftQp {
            verbs: *zeroed::<verbs_qp>(),
            batching: *zeroed::<pthread_mutex_t>(),
            batch: Batch::default(),
            max_inline: attr.cap.max_inline_data as usize,
        }));
        let qp = soft.cast::<ibv_qp>();
        let new = NewQueuePair {
            handle: qp as u64,
            context: context::number((*pd).context),
            pd: (*pd).handle,
            transport,
            send_cq: (*attr.send_cq).handle,
            receive_cq: (*attr.recv_cq).handle,
            srq: attr.srq.as_ref().map(|srq| srq.handle),
            all_signaled: attr.sq_sig_all != 0,
            cap: attr.cap,
        };
        let number = match shared((*pd).context).lock().create_qp(new) {
            Ok(number) => number,
            Err(errno) => {
                drop(Box::from_raw(soft));
                return Err(errno);
            }
        };
        (*qp).context = (*pd).context;
        (*qp).qp_context = attr.qp_context;
        (*qp).pd = pd;
        (*qp).send_cq = attr.send_cq;
        (*qp).recv_cq = attr.recv_cq;
        (*qp).srq = attr.srq;
        (*qp).handle = number;
        (*qp).qp_num = number;
        (*qp).state = ibv_qp_state::IBV_QPS_RESET;
        (*qp).qp_type = attr.qp_type;
        init_wait(&raw mut (*qp).mutex, &raw mut (*qp).cond);
        libc::pthread_mutex_init((&raw mut (*soft).batching).cast(), std::ptr::null());
        if let Some(operations) = operations {
            set_functions(qp.cast(), operations);
            // What `ibv_qp_to_qp_ex` looks for.
            (*soft).verbs.comp_mask |= VERBS_QP_EX;
        }
        Ok(qp)
    }
}

pub(super) unsafe extern "C" fn modify_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        let mut engine = shared((*qp).context).lock();
        status(engine.modify_qp((*qp).handle, &*attr, mask as u32))
    }
}

pub(super) unsafe extern "C" fn query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        let engine = shared((*qp).context).lock();
        let Some(known) = engine.qps.get((*qp).handle) else { return libc::EINVAL };
        let mut all = known.attr;
        all.qp_state = known.state;
        all.cur_qp_state = known.state;
        all.cap = known.cap;
        all.sq_draining = known.draining.into();
        all.path_mig_state = ibv_mig_state::IBV_MIG_MIGRATED;
        attr.write(all);
        (*qp).state = known.state;
        init.write(ibv_qp_init_attr {
            qp_context: (*qp).qp_context,
            send_cq: (*qp).send_cq,
            recv_cq: (*qp).recv_cq,
            srq: (*qp).srq,
            cap: known.cap,
            qp_type: (*qp).qp_type,
            sq_sig_all: known.all_signaled.into(),
        });
    }
    0
}

pub(super) unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: as the module says; it is ours, and freed once.
    unsafe {
        let read = match shared((*qp).context).lock().destroy_qp((*qp).handle) {
            Ok(read) => read,
            Err(errno) => return status(Err(errno)),
        };
        wait_acknowledged(&raw mut (*qp).mutex, &raw mut (*qp).cond, || {
            (&raw const (*qp).events_completed).read_volatile() == read.asynchronous
        });
        drop(Box::from_raw(qp.cast::<SoftQp>()));
    }
    0
}

/// The first packet sequence number of a queue pair on a simulated network: its seed decides.
///
/// # Safety
///
/// The queue pair is live, of whichever provider.
pub(crate) unsafe fn first_psn(qp: *mut ibv_qp) -> Option<u32> {
    // SAFETY: the caller vouches for it; the device is used only if the context is one of ours.
    let shared = unsafe {
        let context = (*qp).context;
        if !context::is_ours(context) {
            return None;
        }
        shared(context)
    };
    shared.driver().membership().map(|membership| membership.first_psn())
}
