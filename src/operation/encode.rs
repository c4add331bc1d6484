//! From requests to C's structures, and lists that a provider takes piece by piece.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ptr;

use super::destination::{Destination, To};
use super::explain::explain_send;
use super::sealed::{AddedOn, Kind, Post, Posted, Request};
use super::{Adds, INLINE, MAX_MESSAGE_LENGTH, SIGNALED, total, without_empty};
use crate::error::{Error, Result, err_from_call};
use crate::ffi;
use crate::foreign_enum::setters;
use crate::memory::GatherBuffer;
use crate::queue_pair::{FixedPeer, MessageLimits, QueuePair, SendOperations, Sends};
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
        limits.check_domain("ibv_post_send", list)?;
        limits.check_length(K::OPCODE, length)
    }
}

/// Whether it is an RDMA read.
pub(crate) const fn is_read<K: Kind>() -> bool {
    matches!(K::OPCODE, ffi::ibv_wr_opcode::IBV_WR_RDMA_READ)
}

/// Checks that a receive of several pieces is not longer than a message. A single piece is left to the device.
#[inline(always)]
pub(crate) fn check_receive(limits: &MessageLimits, list: &[ffi::ibv_sge]) -> Result<()> {
    if list.len() > 1 && total(list) > MAX_MESSAGE_LENGTH {
        return err_from_call(too_long_receive(total(list)));
    }
    limits.check_domain("ibv_post_recv", list)
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

/// `ibv_wr_send_tso`: sends data as several messages, each of which begins with a copy of a header that the device
/// updates. In batches only: see [`Batch::add`](crate::operation::Batch::add).
#[doc(alias = "ibv_wr_send_tso")]
#[must_use = "a request does nothing until it is posted"]
#[derive(Clone, Copy, Debug)]
pub struct SegmentedSendWorkRequest<'h, D> {
    buffer: D,
    operation: SegmentedSend<'h>,
}

impl<'h, D: GatherBuffer> SegmentedSendWorkRequest<'h, D> {
    /// Sends `data` in messages of at most `segment` bytes after the header, which has at most 65535 bytes.
    pub fn new(data: D, header: &'h [u8], segment: u16) -> Self {
        Self { buffer: data, operation: SegmentedSend { flags: 0, header, segment } }
    }
}

impl<D> SegmentedSendWorkRequest<'_, D> {
    setters! { self,
        /// As [`SendWorkRequest::unsignaled`](crate::SendWorkRequest::unsignaled).
        unsignaled() => self.operation.flags |= SIGNALED;

        /// As [`SendWorkRequest::ip_checksum`](crate::SendWorkRequest::ip_checksum).
        ip_checksum() => self.operation.flags |= ffi::ibv_send_flags::IBV_SEND_IP_CSUM.0;
    }

    /// As [`SendWorkRequest::to`](crate::SendWorkRequest::to).
    pub fn to<A: Destination>(self, destination: A) -> To<Self, A> {
        To::new(self, destination)
    }
}

/// The operation without the data.
#[derive(Clone, Copy, Debug)]
pub struct SegmentedSend<'h> {
    flags: u32,
    header: &'h [u8],
    segment: u16,
}

impl<'h, D: GatherBuffer> Request for SegmentedSendWorkRequest<'h, D> {
    type Operation = SegmentedSend<'h>;
    type Buffer = D;

    fn split(self) -> (SegmentedSend<'h>, D) {
        let mut operation = self.operation;
        if D::INLINE {
            operation.flags |= INLINE;
        }
        (operation, self.buffer)
    }

    fn join(operation: SegmentedSend<'h>, buffer: D) -> Self {
        Self { buffer, operation }
    }

    fn list(buffer: &mut D) -> Result<D::List> {
        buffer.gather()
    }
}

impl<D: GatherBuffer, T: Sends> AddedOn<T> for SegmentedSendWorkRequest<'_, D> {}

impl<D: GatherBuffer, T: Sends + FixedPeer> Adds<T> for SegmentedSendWorkRequest<'_, D> {}

impl Kind for SegmentedSend<'_> {
    const OPCODE: ffi::ibv_wr_opcode = ffi::ibv_wr_opcode::IBV_WR_TSO;
    const EXTENDED: SendOperations = SendOperations::TSO;
    const HAS_DATA: bool = true;
    const NEEDS_PEER: bool = true;
    const WRITES: bool = false;
    const RELIABLE: bool = false;

    fn flags(&self) -> u32 {
        self.flags
    }

    fn fits(&self, _: u64) -> Result<()> {
        let length = self.header.len() as u64;
        Error::within("ibv_wr_send_tso", "the length of the header", length, 0, u16::MAX)
    }

    unsafe fn fill(&self, _: *mut ffi::ibv_send_wr) {
        // It is in the extended interface alone.
    }

    unsafe fn emit(&self, queue_pair: *mut ffi::ibv_qp_ex) {
        let (header, length) = (self.header.as_ptr().cast_mut().cast(), self.header.len() as u16);
        // SAFETY: the caller vouches for the queue pair and its function, which only reads the header.
        unsafe {
            let send = (*queue_pair).wr_send_tso.unwrap_unchecked();
            send(queue_pair, header, length, self.segment);
        }
    }
}
