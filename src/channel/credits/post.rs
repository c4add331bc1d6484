//! How a channel with flow control posts.

use std::ffi::c_int;
use std::sync::Arc;

use super::super::core::Core;
use super::super::operation::Target;
use crate::ffi;
use crate::operation::takes_receive;

/// A message has no credit. No provider returns this value.
pub(in crate::channel) const NO_CREDIT: c_int = c_int::MIN;

impl Core {
    /// Makes posts count credits, with the core as first argument. Without flow control, they pay nothing.
    pub(in crate::channel) fn count_credits(self: &Arc<Self>) {
        if self.credits.is_some() {
            let this = Arc::as_ptr(self).cast_mut().cast();
            self.target.set(Target::with(this, post_send, post_recv));
        }
    }
}

/// Returns [`NO_CREDIT`] if credit is short for the list, or a credit read has failed.
///
/// # Safety
///
/// `core` points to the core of a live queue pair with flow control. The rest is as for `ibv_post_send`.
unsafe extern "C" fn post_send(
    core: *mut ffi::ibv_qp,
    request: *mut ffi::ibv_send_wr,
    refused: *mut *mut ffi::ibv_send_wr,
) -> c_int {
    // SAFETY: `core` points to a core, by the caller's contract.
    let core = unsafe { &*core.cast_const().cast::<Core>() };
    // SAFETY: the list is well-formed, by the caller's contract.
    let messages = unsafe { messages(request) };
    let credits = core.credits.as_deref().filter(|_| messages > 0);
    if credits
        .is_some_and(|credits| credits.available() < messages || credits.failed.get().is_some())
    {
        // A value in `refused` would be taken for the provider's answer to a later request.
        return NO_CREDIT;
    }
    // SAFETY: the queue pair is live and the arguments are valid, by the caller's contract.
    let returned = unsafe { ffi::ibv_post_send(core.queue_pair, request, refused) };
    if let (Some(credits), 0) = (credits, returned) {
        core.use_credits(credits, messages);
    }
    returned
}

/// Counts requests that take a receive of the peer.
///
/// # Safety
///
/// The list is well-formed.
unsafe fn messages(mut request: *const ffi::ibv_send_wr) -> u32 {
    let mut messages = 0;
    while !request.is_null() {
        // SAFETY: the list is well-formed, so this is a valid request.
        let (opcode, next) = unsafe { ((*request).opcode, (*request).next) };
        messages += u32::from(takes_receive(opcode));
        request = next;
    }
    messages
}

/// Counts the receive.
///
/// # Safety
///
/// As for [`post_send`].
unsafe extern "C" fn post_recv(
    core: *mut ffi::ibv_qp,
    request: *mut ffi::ibv_recv_wr,
    refused: *mut *mut ffi::ibv_recv_wr,
) -> c_int {
    // SAFETY: `core` points to a core, by the caller's contract.
    let core = unsafe { &*core.cast_const().cast::<Core>() };
    // SAFETY: the queue pair is live and the arguments are valid, by the caller's contract.
    let returned = unsafe { ffi::ibv_post_recv(core.queue_pair, request, refused) };
    if let (Some(credits), 0) = (&core.credits, returned) {
        credits.count_receive();
    }
    returned
}
