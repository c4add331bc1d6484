//! Messages that the device cuts into segments.

use super::destination::{Destination, To};
use super::sealed::{AddedOn, Kind, Request};
use super::{Adds, INLINE, SIGNALED};
use crate::error::{Error, Result};
use crate::ffi;
use crate::fields::setters;
use crate::memory::GatherBuffer;
use crate::queue_pair::{FixedPeer, SendOperations, Sends};

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
