//! Requests of the send queue in C's form, on the stack.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ptr;

use super::explain::explain_send;
use super::sealed::{Kind, Post, Posted};
use super::{INLINE, MAX_MESSAGE_LENGTH, SIGNALED, total, without_empty};
use crate::error::{Error, Result, err_from_call};
use crate::ffi;
use crate::queue_pair::{MessageLimits, QueuePair};
use crate::queue_pair_state::QueuePairType;

/// The C struct of a request. Fields that the opcode does not have stay uninitialised: zeroing them would dominate the
/// cost. Empty pieces are left out of the list.
#[inline(always)]
pub(crate) fn encode<K: Kind>(
    kind: &K,
    wr_id: u64,
    list: &mut [ffi::ibv_sge],
) -> MaybeUninit<ffi::ibv_send_wr> {
    let mut request = MaybeUninit::uninit();
    // SAFETY: it is a request.
    unsafe { encode_at(request.as_mut_ptr(), kind, wr_id, list) };
    request
}

/// As [`encode`], where `request` points to.
///
/// # Safety
///
/// The pointer is to a request, which may be uninitialised.
#[inline(always)]
pub(crate) unsafe fn encode_at<K: Kind>(
    request: *mut ffi::ibv_send_wr,
    kind: &K,
    wr_id: u64,
    list: &mut [ffi::ibv_sge],
) {
    let num_sge = match list {
        [one] => c_int::from(one.length != 0),
        _ => without_empty(list) as c_int,
    };
    // SAFETY: the fields are within the request, and have nothing to drop.
    unsafe {
        (*request).wr_id = wr_id;
        (*request).next = ptr::null_mut();
        (*request).sg_list = list.as_mut_ptr();
        (*request).num_sge = num_sge;
        (*request).opcode = K::OPCODE;
        (*request).send_flags = SIGNALED ^ kind.flags();
        kind.fill(request);
    }
}

/// Checks a request of the send queue before it is posted: its length, and what else is wrong on whatever queue pair.
#[inline(always)]
pub(crate) fn check<K: Kind>(
    limits: &MessageLimits,
    kind: &K,
    list: &[ffi::ibv_sge],
) -> Result<()> {
    let length = total(list);
    kind.fits(length)?;
    if const { is_read::<K>() } && list.len() > 1 {
        limits.check_pieces_of_read(list.len())?;
    }
    if kind.flags() & INLINE != 0 {
        limits.check_inline(length)
    } else {
        limits.check_length(K::OPCODE, length)
    }
}

/// Whether it is an RDMA read.
pub(crate) const fn is_read<K: Kind>() -> bool {
    matches!(K::OPCODE, ffi::ibv_wr_opcode::IBV_WR_RDMA_READ)
}

/// Checks that a receive of several pieces is not longer than a message. A single piece is left to the device.
#[inline(always)]
pub(crate) fn check_receive(list: &[ffi::ibv_sge]) -> Result<()> {
    if list.len() > 1 && total(list) > MAX_MESSAGE_LENGTH {
        return err_from_call(too_long_receive(total(list)));
    }
    Ok(())
}

#[cold]
fn too_long_receive(length: u64) -> Error {
    let what = "the length of the message";
    Error::out_of_range("ibv_post_recv", what, length, 0, MAX_MESSAGE_LENGTH)
}

#[diagnostic::do_not_recommend]
impl<K: Posted> Post for K {
    const NEEDS_PEER: bool = <K as Kind>::NEEDS_PEER;

    #[inline(always)]
    fn check(&self, limits: &MessageLimits, list: &[ffi::ibv_sge]) -> Result<()> {
        check(limits, self, list)
    }

    #[cold]
    fn explain_buffer(limits: &MessageLimits, error: Error) -> Error {
        limits.explain(K::OPCODE, error)
    }

    #[inline(always)]
    unsafe fn post(
        self,
        queue_pair: *mut ffi::ibv_qp,
        wr_id: u64,
        list: &mut [ffi::ibv_sge],
    ) -> c_int {
        let mut request = encode(&self, wr_id, list);
        // Only a list needs to know where the verb stopped; ignoring it here avoids clearing it.
        let mut bad = MaybeUninit::uninit();
        // SAFETY: the caller vouches for the queue pair and the memory; the request is well-formed; `bad` is
        // writable.
        unsafe { ffi::ibv_post_send(queue_pair, request.as_mut_ptr(), bad.as_mut_ptr()) }
    }

    #[cold]
    fn explain(
        self,
        queue_pair: &QueuePair<'_, QueuePairType>,
        list: &[ffi::ibv_sge],
        returned: c_int,
    ) -> Error {
        explain_send(queue_pair, list, SIGNALED ^ self.flags(), returned)
    }
}
