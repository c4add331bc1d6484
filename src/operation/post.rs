//! Posting to queue pairs.

use std::ops::RangeBounds;

use super::post_receive::receive_methods;
use super::post_send::send_methods;
use super::prepared_request::{PostedBy, RawRequest, TakesPrepared};
use crate::error::{Error, Result};
use crate::ffi;
use crate::memory::{
    GatherElement, LocalMemory, LocalMemoryMut, RemoteMemoryRegion, ScatterElement,
};
use crate::operation::sealed::Post;
use crate::operation::{
    Batch, ListError, Posts, Prepared, PreparedReceive, ReadWorkRequest, ReceiveList,
    ReceiveWorkRequest, SendList, SendWorkRequest, WriteWorkRequest,
};
use crate::queue_pair::{
    FixedPeer, PostsRdma, QueuePair, Reads, ReceiveQueue, Sends, Transport, Writes,
};

impl<T: Transport> QueuePair<'_, T> {
    /// `ibv_post_send`, `ibv_post_recv`: posts a request to the queue that it is for, under the number
    /// `wr_id`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the request has more pieces or more inline data than the queue pair was built for, or is longer than the port's
    ///    [`max_message_size`](crate::device::PortAttributes::max_message_size) (a datagram: than its MTU, as it was when the
    ///    queue pair was built); the peer's memory is too short, or not aligned for an atomic; the queue pair has no fixed peer (UD, XRC), and the request no
    ///    [destination](crate::SendWorkRequest::to); or the queue pair's state does not allow it, or the queue pair
    ///    does not have the operation.
    ///  - `ENOMEM`: the queue is full ([`QueueFull`](crate::ErrorKind::QueueFull)).
    ///  - `EIO`: the device is gone.
    ///  - `EACCES` (Soft-RoCE and Soft-iWARP): the process has changed its credentials since it opened
    ///    the device.
    ///
    /// # Safety
    ///
    /// [That of posting](QueuePair#the-contract-of-posting). A [destination](crate::SendWorkRequest::to) is of the kind
    /// that queue pairs of this type need.
    #[doc(alias = "ibv_post_send")]
    #[doc(alias = "ibv_post_recv")]
    #[inline(always)]
    pub unsafe fn post<R: Posts<T>>(&mut self, request: R, wr_id: u64) -> Result<()> {
        // SAFETY: the queue pair is live, and the caller keeps the contract.
        unsafe { post(self, self.as_raw(), request, wr_id) }
    }

    /// `ibv_post_send`, `ibv_post_recv`: posts a request that was prepared, under the number `wr_id`.
    ///
    /// # Errors
    ///
    /// Those of [`post`](Self::post).
    ///
    /// # Safety
    ///
    /// That of [`post`](Self::post). The request was never an entry of a [list](crate::operation::WorkRequestList), which links it
    /// to the next one.
    ///
    /// The elements and the request itself may be dropped immediately.
    #[doc(alias = "ibv_post_send")]
    #[doc(alias = "ibv_post_recv")]
    #[inline(always)]
    pub unsafe fn post_prepared<R: PostedBy<T>, F>(
        &mut self,
        request: &mut Prepared<'_, R, F>,
        wr_id: u64,
    ) -> Result<()>
    where
        R::For: TakesPrepared<F>,
    {
        // SAFETY: the caller keeps the contract.
        unsafe { request.post(self, self.as_raw(), wr_id) }
    }

    send_methods!();
    receive_methods!();

    #[inline]
    pub(super) fn queue_pair(&self) -> &Self {
        self
    }
}

/// Posts a request.
///
/// # Safety
///
/// `raw` is that of the queue pair, and the caller keeps the contract of posting.
#[inline(always)]
pub(super) unsafe fn post<T: Transport, R: Posts<T>>(
    queue_pair: &QueuePair<'_, T>,
    raw: *mut ffi::ibv_qp,
    request: R,
    wr_id: u64,
) -> Result<()> {
    if <R::Operation as Post>::NEEDS_PEER {
        T::need_peer(queue_pair.erased())?;
    }
    let (operation, mut buffer) = request.split();
    let limits = queue_pair.message_limits();
    let mut list =
        R::list(&mut buffer).map_err(|error| R::Operation::explain_buffer(limits, error))?;
    let list = list.as_mut();
    operation.check(limits, list)?;
    // SAFETY: the queue pair is live; the buffer lives during the call, and then the caller keeps its memory.
    let returned = unsafe { operation.post(raw, wr_id, list) };
    if returned == 0 { Ok(()) } else { Err(operation.explain(queue_pair.erased(), list, returned)) }
}
