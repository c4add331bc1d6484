//! Posting, with C's lists of work requests.

use std::ffi::c_int;

use super::translate::{Rules, bind_request, receive, send_request};
use super::{shared, status};
use crate::driver::Locked;
use crate::ffi::*;
use crate::transport::work::{Data, Extra, Operation, SendRequest};

pub(super) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    mut wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        let mut engine = shared((*qp).context).lock();
        let number = (*qp).handle;
        let mut result = Ok(());
        while let Some(request) = wr.as_ref() {
            result = post_one(&mut engine, number, request);
            if result.is_err() {
                *bad = wr;
                break;
            }
            wr = request.next;
        }
        engine.kick(number);
        status(result)
    }
}

/// # Safety
///
/// As the module says.
unsafe fn post_one(engine: &mut Locked<'_>, number: u32, wr: &ibv_send_wr) -> Result<(), c_int> {
    let rules = Rules::of(engine.check_sends(number, 1)?);
    // SAFETY: as the caller says.
    let request = unsafe { send_request(wr, &rules)? };
    engine.post_send(number, request)
}

pub(super) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    mut wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        let mut engine = shared((*qp).context).lock();
        let number = (*qp).handle;
        while let Some(request) = wr.as_ref() {
            let most = engine.qps.get(number).map_or(0, |qp| qp.cap.max_recv_sge);
            let result = receive(request, most);
            let result = result.and_then(|receive| engine.post_receive(number, receive));
            if result.is_err() {
                *bad = wr;
                return status(result);
            }
            wr = request.next;
        }
    }
    0
}

/// Binds a window of type 1, which gets a new key with each binding.
pub(super) unsafe extern "C" fn bind_mw(
    qp: *mut ibv_qp,
    mw: *mut ibv_mw,
    info: *mut ibv_mw_bind,
) -> c_int {
    // SAFETY: as the module says.
    unsafe {
        let rkey = (*mw).rkey & !0xff | (*mw).rkey.wrapping_add(1) & 0xff;
        let has = |flag: ibv_send_flags| (*info).send_flags & flag.0 != 0;
        let bind = match bind_request(mw, rkey, &(*info).bind_info) {
            Ok(bind) => bind,
            Err(errno) => return status(Err(errno)),
        };
        let mut request = SendRequest {
            id: (*info).wr_id,
            operation: Operation::Bind(bind),
            extra: Extra::None,
            data: Data::List(Vec::new()),
            length: 0,
            signaled: has(ibv_send_flags::IBV_SEND_SIGNALED),
            solicited: false,
            fence: has(ibv_send_flags::IBV_SEND_FENCE),
            destination: None,
            remote_srq: None,
        };
        let number = (*qp).handle;
        let mut engine = shared((*qp).context).lock();
        let result = engine.check_sends(number, 1).map(Rules::of);
        let result = result.and_then(|rules| rules.check(&mut request));
        let result = result.and_then(|()| engine.post_send(number, request));
        engine.kick(number);
        if result.is_ok() {
            (*mw).rkey = rkey;
        }
        status(result)
    }
}
