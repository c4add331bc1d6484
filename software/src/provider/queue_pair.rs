//! Queue pairs.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Instant;

use super::batch::{Batch, SoftQp, set_functions};
use super::{context, init_wait, object, shared, status, wait_acknowledged, xrc, zeroed};
use crate::driver::Locked;
use crate::ffi::*;
use crate::network::Membership;
use crate::transport::objects::NewQueuePair;
use crate::transport::queue_pair::{Owner, Transport};

/// Room for inline data comes in so many bytes, as on adapters, and each queue pair has some: programs rely on it.
const INLINE_UNIT: u32 = 64;

pub(super) unsafe extern "C" fn create_qp(
    pd: *mut ibv_pd,
    attr: *mut ibv_qp_init_attr,
) -> *mut ibv_qp {
    // SAFETY: as the module says.
    object(unsafe { create((*pd).context, (pd, null_mut()), &mut *attr, None, None) })
}

pub(super) unsafe extern "C" fn create_qp_ex(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    // SAFETY: as the module says.
    object(unsafe { create_extended(context, attr, None) })
}

/// `driver`: the transport of a queue pair of type `IBV_QPT_DRIVER`.
///
/// # Safety
///
/// As the module says.
pub(super) unsafe fn create_extended(
    context: *mut ibv_context,
    attr: *mut ibv_qp_init_attr_ex,
    driver: Option<Transport>,
) -> Result<*mut ibv_qp, c_int> {
    type M = ibv_qp_init_attr_mask;
    // SAFETY: as the module says; what a bit of the mask names is given.
    unsafe {
        let ex = &mut *attr;
        let known = M::IBV_QP_INIT_ATTR_PD
            | M::IBV_QP_INIT_ATTR_XRCD
            | M::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS
            | M::IBV_QP_INIT_ATTR_CREATE_FLAGS;
        let has = |bit: M| ex.comp_mask & bit.0 != 0;
        let flagged = has(M::IBV_QP_INIT_ATTR_CREATE_FLAGS) && ex.create_flags != 0;
        if ex.comp_mask & !known.0 != 0 || flagged {
            return Err(libc::EOPNOTSUPP);
        }
        let pd = if has(M::IBV_QP_INIT_ATTR_PD) { ex.pd } else { null_mut() };
        let xrcd = if has(M::IBV_QP_INIT_ATTR_XRCD) { ex.xrcd } else { null_mut() };
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
        let made = create(context, (pd, xrcd), &mut plain, operations, driver);
        if made.is_ok() {
            ex.cap = plain.cap;
        }
        made
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
        | F::IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
        | F::IBV_QP_EX_WITH_ATOMIC_WRITE
        | F::IBV_QP_EX_WITH_FLUSH;
    u64::from(match transport {
        Transport::Rc | Transport::XrcSend => reliable.0,
        Transport::Uc => unreliable.0,
        Transport::Ud => datagrams.0,
        Transport::Srd => {
            (datagrams
                | F::IBV_QP_EX_WITH_RDMA_WRITE
                | F::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
                | F::IBV_QP_EX_WITH_RDMA_READ)
                .0
        }
        Transport::DcInitiator => {
            (datagrams
                | F::IBV_QP_EX_WITH_SEND_WITH_INV
                | F::IBV_QP_EX_WITH_RDMA_WRITE
                | F::IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
                | F::IBV_QP_EX_WITH_RDMA_READ
                | F::IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
                | F::IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD)
                .0
        }
        Transport::XrcReceive | Transport::DcTarget | Transport::SrdFlow | Transport::DcFlow => 0,
    })
}

/// # Safety
///
/// As the module says.
unsafe fn create(
    context: *mut ibv_context,
    (pd, xrcd): (*mut ibv_pd, *mut ibv_xrcd),
    attr: &mut ibv_qp_init_attr,
    operations: Option<u64>,
    driver: Option<Transport>,
) -> Result<*mut ibv_qp, c_int> {
    let transport = match attr.qp_type {
        ibv_qp_type::IBV_QPT_DRIVER => driver.ok_or(libc::EOPNOTSUPP)?,
        ibv_qp_type::IBV_QPT_RC => Transport::Rc,
        ibv_qp_type::IBV_QPT_UC => Transport::Uc,
        ibv_qp_type::IBV_QPT_UD => Transport::Ud,
        ibv_qp_type::IBV_QPT_XRC_SEND => Transport::XrcSend,
        ibv_qp_type::IBV_QPT_XRC_RECV => Transport::XrcReceive,
        _ => return Err(libc::EOPNOTSUPP),
    };
    if operations.is_some_and(|operations| operations & !operations_of(transport) != 0) {
        return Err(libc::EOPNOTSUPP);
    }
    // SAFETY: as the caller says.
    let is_efa = unsafe { shared(context) }.lock().core.settings.efa.is_some();
    if is_efa && !matches!(transport, Transport::Ud | Transport::Srd) {
        return Err(libc::EOPNOTSUPP);
    }
    let sends = !matches!(transport, Transport::XrcReceive | Transport::DcTarget);
    let receives =
        !matches!(transport, Transport::XrcSend | Transport::XrcReceive | Transport::DcInitiator);
    let has_domain = match transport {
        Transport::XrcReceive => !xrcd.is_null(),
        _ => !pd.is_null() && xrcd.is_null(),
    };
    let has_queues = if receives { !attr.recv_cq.is_null() } else { attr.srq.is_null() };
    let is_served = transport != Transport::DcTarget || !attr.srq.is_null();
    if !has_domain || !has_queues || !is_served || (sends && attr.send_cq.is_null()) {
        return Err(libc::EINVAL);
    }
    // The kernel finds the objects of a context by their numbers in it.
    // SAFETY: those that are given are live.
    let is_of_one_context = unsafe {
        let is_ours = |other: *mut ibv_context| other == context;
        pd.as_ref().is_none_or(|pd| is_ours(pd.context))
            && xrcd.as_ref().is_none_or(|xrcd| is_ours(xrcd.context))
            && [attr.send_cq, attr.recv_cq]
                .iter()
                .all(|cq| cq.as_ref().is_none_or(|cq| is_ours(cq.context)))
            && attr.srq.as_ref().is_none_or(|srq| is_ours(srq.context))
    };
    if !is_of_one_context {
        return Err(libc::EINVAL);
    }
    if !receives {
        (attr.cap.max_recv_wr, attr.cap.max_recv_sge) = (0, 0);
    }
    if !sends {
        attr.cap = ibv_qp_cap::default();
    }
    // SAFETY: as the caller says.
    let most_inline = unsafe { shared(context) }.lock().core.settings.max_inline;
    if sends && attr.cap.max_inline_data <= most_inline {
        let whole = attr.cap.max_inline_data.max(1).next_multiple_of(INLINE_UNIT);
        attr.cap.max_inline_data = whole.min(most_inline);
    }
    // SAFETY: as the caller says. The object is complete before another thread can access it.
    unsafe {
        let soft = allocate(context, attr.cap.max_inline_data);
        let qp = soft.cast::<ibv_qp>();
        let new = NewQueuePair {
            handle: qp as u64,
            context: context::number(context),
            pd: pd.as_ref().map(|pd| pd.handle),
            xrc_domain: xrcd.as_ref().map(|_| xrc::handle(xrcd)),
            transport,
            send_cq: sends.then(|| (*attr.send_cq).handle),
            receive_cq: receives.then(|| (*attr.recv_cq).handle),
            srq: attr.srq.as_ref().map(|srq| srq.handle),
            all_signaled: attr.sq_sig_all != 0,
            cap: attr.cap,
        };
        let number = match shared(context).lock().create_qp(new) {
            Ok(number) => number,
            Err(errno) => {
                drop(Box::from_raw(soft));
                return Err(errno);
            }
        };
        (*qp).qp_context = attr.qp_context;
        (*qp).pd = pd;
        (*qp).send_cq = attr.send_cq;
        (*qp).recv_cq = attr.recv_cq;
        (*qp).srq = attr.srq;
        (*qp).handle = number;
        (*qp).qp_num = number;
        (*qp).state = ibv_qp_state::IBV_QPS_RESET;
        (*qp).qp_type = attr.qp_type;
        if !xrcd.is_null() {
            set_domain(soft, xrcd);
        }
        if let Some(operations) = operations {
            set_functions(qp.cast(), operations);
            // `ibv_qp_to_qp_ex` tests this bit.
            (*soft).verbs.comp_mask |= VERBS_QP_EX;
        }
        Ok(qp)
    }
}

/// A C object for a queue pair that nobody else can access yet.
///
/// # Safety
///
/// As the module says.
unsafe fn allocate(context: *mut ibv_context, max_inline: u32) -> *mut SoftQp {
    let soft = Box::into_raw(Box::new(SoftQp {
        verbs: *zeroed::<verbs_qp>(),
        batching: *zeroed::<pthread_mutex_t>(),
        #[cfg(feature = "mlx5")]
        direct: mlx5dv_qp_ex::default(),
        batch: Batch::default(),
        max_inline: max_inline as usize,
    }));
    let qp = soft.cast::<ibv_qp>();
    // SAFETY: it is ours, and stays where it is.
    unsafe {
        (*qp).context = context;
        init_wait(&raw mut (*qp).mutex, &raw mut (*qp).cond);
        libc::pthread_mutex_init((&raw mut (*soft).batching).cast(), std::ptr::null());
    }
    soft
}

/// # Safety
///
/// As the module says.
unsafe fn set_domain(soft: *mut SoftQp, xrcd: *mut ibv_xrcd) {
    // SAFETY: as the caller says.
    unsafe {
        (*soft).verbs.comp_mask |= VERBS_QP_XRCD;
        (*soft).verbs.xrcd = xrcd.cast();
    }
}

/// Opens a receiving XRC queue pair that exists by its number.
pub(super) unsafe extern "C" fn open_qp(
    context: *mut ibv_context,
    attr: *mut ibv_qp_open_attr,
) -> *mut ibv_qp {
    type M = ibv_qp_open_attr_mask;
    // SAFETY: as the module says; what a bit of the mask names is given.
    unsafe {
        let attr = &*attr;
        let needed = M::IBV_QP_OPEN_ATTR_NUM | M::IBV_QP_OPEN_ATTR_XRCD | M::IBV_QP_OPEN_ATTR_TYPE;
        let known = needed | M::IBV_QP_OPEN_ATTR_CONTEXT;
        if attr.comp_mask & !known.0 != 0 {
            return object(Err(libc::EOPNOTSUPP));
        }
        let receiving = attr.qp_type == ibv_qp_type::IBV_QPT_XRC_RECV;
        let known = attr.xrcd.as_ref().is_some_and(|xrcd| xrcd.context == context);
        if attr.comp_mask & needed.0 != needed.0 || !known || !receiving {
            return object(Err(libc::EINVAL));
        }
        let soft = allocate(context, 0);
        let qp = soft.cast::<ibv_qp>();
        let owner = Owner {
            handle: qp as u64,
            context: context::number(context),
            xrc_domain: Some(xrc::handle(attr.xrcd)),
            async_events: 0,
        };
        if let Err(errno) = shared(context).lock().open_qp(attr.qp_num, owner) {
            drop(Box::from_raw(soft));
            return object(Err(errno));
        }
        if attr.comp_mask & M::IBV_QP_OPEN_ATTR_CONTEXT.0 != 0 {
            (*qp).qp_context = attr.qp_context;
        }
        (*qp).handle = attr.qp_num;
        (*qp).qp_num = attr.qp_num;
        (*qp).state = ibv_qp_state::IBV_QPS_UNKNOWN;
        (*qp).qp_type = attr.qp_type;
        set_domain(soft, attr.xrcd);
        qp
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
        let result = engine.modify_qp((*qp).handle, &*attr, mask as u32);
        let to = (*attr).qp_state;
        let stops = to == ibv_qp_state::IBV_QPS_RESET || to == ibv_qp_state::IBV_QPS_ERR;
        wait_for_peer(engine, (*qp).handle, stops && result.is_ok());
        status(result)
    }
}

/// A peer that accesses memory by itself ([`one_sided`](crate::Builder::one_sided)) finishes what it has begun, unless it has stopped:
/// the memory is registered still. The engine is not locked meanwhile.
fn wait_for_peer(engine: Locked<'_>, number: u32, waits: bool) {
    let access = engine.core.direct_access().filter(|_| waits).cloned();
    drop(engine);
    access.into_iter().for_each(|access| _ = access.wait_for_pair(number));
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
        let mut engine = shared((*qp).context).lock();
        let destroyed = engine.destroy_qp((*qp).handle, qp as u64);
        wait_for_peer(engine, (*qp).handle, destroyed.is_ok());
        let read = match destroyed {
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
    // SAFETY: the caller vouches for it.
    unsafe { membership((*qp).context) }.map(|membership| membership.first_psn())
}

/// The time of the simulated network of the context's device. It will reach `at` by itself.
///
/// # Safety
///
/// The context is live, of whichever provider.
pub(crate) unsafe fn virtual_time(
    context: *mut ibv_context,
    at: Option<Instant>,
) -> Option<Instant> {
    // SAFETY: the caller vouches for it.
    unsafe { membership(context) }.map(|membership| membership.network.time(at))
}

/// # Safety
///
/// The context is live, of whichever provider.
unsafe fn membership<'a>(context: *mut ibv_context) -> Option<&'a Arc<Membership>> {
    // SAFETY: the caller vouches for it; the device is used only if the context is one of ours.
    unsafe { context::is_ours(context).then(|| shared(context))?.driver().membership() }
}
