//! Shared receive queues.

use std::ffi::c_int;

use super::translate::receive;
use super::{init_wait, object, shared, status, wait_acknowledged, xrc, zeroed};
use crate::ffi::*;
use crate::transport::queues::{SharedReceiveQueue, XrcQueue};

pub(super) unsafe extern "C" fn create_srq(
    pd: *mut ibv_pd,
    init: *mut ibv_srq_init_attr,
) -> *mut ibv_srq {
    // SAFETY: as the module says.
    object(unsafe { create(pd, (*init).attr, (*init).srq_context, None) })
}

pub(super) unsafe extern "C" fn create_srq_ex(
    _context: *mut ibv_context,
    init: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    type M = ibv_srq_init_attr_mask;
    // SAFETY: as the module says; what a bit of the mask names is given.
    unsafe {
        let init = &*init;
        let typed = init.comp_mask & M::IBV_SRQ_INIT_ATTR_TYPE.0 != 0;
        let xrc = match init.srq_type {
            _ if !typed => false,
            ibv_srq_type::IBV_SRQT_BASIC => false,
            ibv_srq_type::IBV_SRQT_XRC => true,
            _ => return object(Err(libc::EOPNOTSUPP)),
        };
        let mut known = M::IBV_SRQ_INIT_ATTR_TYPE | M::IBV_SRQ_INIT_ATTR_PD;
        let extended = M::IBV_SRQ_INIT_ATTR_XRCD | M::IBV_SRQ_INIT_ATTR_CQ;
        if xrc {
            known |= extended;
        }
        if init.comp_mask & !known.0 != 0 {
            return object(Err(libc::EOPNOTSUPP));
        }
        if init.comp_mask & M::IBV_SRQ_INIT_ATTR_PD.0 == 0 || init.pd.is_null() {
            return object(Err(libc::EINVAL));
        }
        let given = init.comp_mask & extended.0 == extended.0;
        if xrc && (!given || init.xrcd.is_null() || init.cq.is_null()) {
            return object(Err(libc::EINVAL));
        }
        let xrc = xrc.then_some((init.xrcd, init.cq));
        object(create(init.pd, init.attr, init.srq_context, xrc))
    }
}

/// # Safety
///
/// As the module says.
unsafe fn create(
    pd: *mut ibv_pd,
    attr: ibv_srq_attr,
    user: *mut std::ffi::c_void,
    xrc: Option<(*mut ibv_xrcd, *mut ibv_cq)>,
) -> Result<*mut ibv_srq, c_int> {
    // SAFETY: as the caller says.
    unsafe {
        // The kernel finds the objects of a context by their numbers in it.
        let context = (*pd).context;
        if shared(context).lock().core.settings.efa.is_some() {
            return Err(libc::EOPNOTSUPP);
        }
        if xrc.is_some_and(|(xrcd, cq)| (*xrcd).context != context || (*cq).context != context) {
            return Err(libc::EINVAL);
        }
        let soft = Box::into_raw(zeroed::<verbs_srq>());
        let srq = soft.cast::<ibv_srq>();
        let queue = SharedReceiveQueue {
            handle: srq as u64,
            context: super::context::number(context),
            pd: (*pd).handle,
            receives: Default::default(),
            max_wr: attr.max_wr,
            max_sge: attr.max_sge,
            // The limit is 0 at first, as C specifies: `ibv_modify_srq` arms it.
            limit: 0,
            users: 0,
            async_events: 0,
            xrc: xrc.map(|(domain, cq)| {
                // The engine looks up which domain it is.
                XrcQueue { handle: xrc::handle(domain), domain: 0, cq: (*cq).handle }
            }),
        };
        match shared(context).lock().create_srq(queue) {
            Ok(number) => (*srq).handle = number,
            Err(errno) => {
                drop(Box::from_raw(soft));
                return Err(errno);
            }
        }
        (*srq).context = context;
        if let Some((domain, cq)) = xrc {
            (*soft).srq_type = ibv_srq_type::IBV_SRQT_XRC;
            (*soft).xrcd = domain.cast();
            (*soft).cq = cq;
            (*soft).srq_num = (*srq).handle;
        }
        (*srq).srq_context = user;
        (*srq).pd = pd;
        init_wait(&raw mut (*srq).mutex, &raw mut (*srq).cond);
        Ok(srq)
    }
}

pub(super) unsafe extern "C" fn modify_srq(
    srq: *mut ibv_srq,
    attr: *mut ibv_srq_attr,
    mask: c_int,
) -> c_int {
    let has = |bit: ibv_srq_attr_mask| mask as u32 & bit.0 != 0;
    // SAFETY: as the module says.
    unsafe {
        let max_wr = has(ibv_srq_attr_mask::IBV_SRQ_MAX_WR).then_some((*attr).max_wr);
        let limit = has(ibv_srq_attr_mask::IBV_SRQ_LIMIT).then_some((*attr).srq_limit);
        status(shared((*srq).context).lock().modify_srq((*srq).handle, max_wr, limit))
    }
}

pub(super) unsafe extern "C" fn query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        let engine = shared((*srq).context).lock();
        let Some(known) = engine.core.srqs.get((*srq).handle) else { return libc::EINVAL };
        attr.write(ibv_srq_attr {
            max_wr: known.max_wr,
            max_sge: known.max_sge,
            srq_limit: known.limit,
        });
    }
    0
}

/// Only those for extended reliable connections have a number that others may use.
pub(super) unsafe extern "C" fn get_srq_num(srq: *mut ibv_srq, number: *mut u32) -> c_int {
    // SAFETY: as the module says; it is ours.
    unsafe {
        let soft = srq.cast::<verbs_srq>();
        if (*soft).srq_type != ibv_srq_type::IBV_SRQT_XRC {
            return status(Err(libc::EOPNOTSUPP));
        }
        number.write((*soft).srq_num);
    }
    0
}

pub(super) unsafe extern "C" fn destroy_srq(srq: *mut ibv_srq) -> c_int {
    // SAFETY: as the module says; it is ours, and freed once.
    unsafe {
        let read = match shared((*srq).context).lock().destroy_srq((*srq).handle) {
            Ok(read) => read,
            Err(errno) => return status(Err(errno)),
        };
        wait_acknowledged(&raw mut (*srq).mutex, &raw mut (*srq).cond, || {
            (&raw const (*srq).events_completed).read_volatile() == read.asynchronous
        });
        drop(Box::from_raw(srq.cast::<verbs_srq>()));
    }
    0
}

pub(super) unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    mut wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        let mut engine = shared((*srq).context).lock();
        let number = (*srq).handle;
        while let Some(request) = wr.as_ref() {
            let most = engine.core.srqs.get(number).map_or(0, |srq| srq.max_sge);
            let result = receive(request, most);
            let result = result.and_then(|receive| engine.post_srq(number, receive));
            if result.is_err() {
                *bad = wr;
                return status(result);
            }
            wr = request.next;
        }
    }
    0
}
