//! Why a post has failed. Providers report the same mistake differently, so the request is compared with the queue pair.

use std::ffi::c_int;

use crate::base::{Detail, Error, QueuePairState, QueuePairType, ffi};
use crate::verbs::operation::{INLINE, total};
use crate::verbs::queue_pair::QueuePair;

const SEND: &str = "ibv_post_send";
const RECEIVE: &str = "ibv_post_recv";

#[cold]
pub(super) fn explain_request(
    queue_pair: &QueuePair<'_, QueuePairType>,
    request: &ffi::ibv_send_wr,
    returned: c_int,
) -> Error {
    // SAFETY: the request was made from a list of that length, which it still borrows.
    let elements = unsafe { elements(request) };
    explain_send(queue_pair, elements, request.send_flags, returned)
}

/// `returned` 0: a refusal without a value.
#[cold]
pub(crate) fn explain_send(
    queue_pair: &QueuePair<'_, QueuePairType>,
    elements: &[ffi::ibv_sge],
    send_flags: u32,
    returned: c_int,
) -> Error {
    let (count, most) = (elements.len() as u64, queue_pair.max_send_sge().into());
    if count > most {
        return Error::out_of_range(SEND, "the number of gather elements", count, 0, most);
    }
    if send_flags & INLINE != 0 {
        let (length, most) = (total(elements), queue_pair.max_inline_data().into());
        if length > most {
            return Error::out_of_range(SEND, "the length of inline data", length, 0, most);
        }
    }
    if returned == 0 {
        let reason = "the provider does not say why: the queue is full, or the device does not have this operation";
        return Error::with_reason(SEND, libc::ENOMEM, reason);
    }
    explain_state(queue_pair, ffi::failed(SEND, returned))
}

#[cold]
pub(super) fn explain_batch(queue_pair: &QueuePair<'_, QueuePairType>, returned: c_int) -> Error {
    explain_state(queue_pair, ffi::failed("ibv_wr_complete", returned))
}

#[cold]
pub(crate) fn explain_receive(
    queue_pair: &QueuePair<'_, QueuePairType>,
    elements: usize,
    returned: c_int,
) -> Error {
    if queue_pair.shared_receive_queue().is_some() {
        return Error::invalid(RECEIVE, "receives are posted to the shared receive queue");
    }
    let (count, most) = (elements as u64, queue_pair.max_recv_sge().into());
    if count > most {
        return Error::out_of_range(RECEIVE, "the number of scatter elements", count, 0, most);
    }
    explain_state(queue_pair, ffi::failed(RECEIVE, returned))
}

fn explain_state(queue_pair: &QueuePair<'_, QueuePairType>, error: Error) -> Error {
    let errno = error.errno();
    // Providers return these for a wrong state and for a full queue.
    if !matches!(errno, libc::EINVAL | libc::ENOMEM | libc::ENOSPC) {
        return error;
    }
    let (verb, receives) = (error.verb(), error.verb() == RECEIVE);
    if receives && queue_pair.max_recv_wr() == 0 {
        return Error::invalid(verb, "the queue pair was built without room for receives");
    }
    if !receives && queue_pair.max_send_wr() == 0 {
        return Error::invalid(verb, "the queue pair was built without room for sends");
    }
    match (queue_pair.state_before_rts(), receives) {
        (Some(state), false) => {
            Error::with(verb, errno, Detail::State { state, needed: QueuePairState::ReadyToSend })
        }
        (Some(QueuePairState::Reset), true) => {
            let (state, needed) = (QueuePairState::Reset, QueuePairState::Init);
            Error::with(verb, errno, Detail::State { state, needed })
        }
        (Some(QueuePairState::Init), true) if errno != libc::EINVAL => {
            let reason = "the receive queue is full, and no receive completes before the queue pair \
                          is connected: build it with a larger max_recv_wr";
            Error::with_reason(verb, errno, reason)
        }
        _ => error,
    }
}

/// # Safety
///
/// `sg_list` and `num_sge` are those of a slice that is still borrowed.
unsafe fn elements(request: &ffi::ibv_send_wr) -> &[ffi::ibv_sge] {
    if request.num_sge == 0 {
        return &[];
    }
    // SAFETY: the caller vouches for it.
    unsafe { std::slice::from_raw_parts(request.sg_list, request.num_sge as usize) }
}
