//! Posting to shared receive queues.

use std::ffi::c_int;
use std::ops::RangeBounds;
use std::ptr;

use super::sealed::Request;
use super::{Receive, ReceiveWorkRequest};
use crate::error::{Error, Result};
use crate::ffi;
use crate::memory::{LocalMemoryMut, ScatterBuffer, ScatterElement};
use crate::queue_pair::SharedReceiveQueue;

const POST: &str = "ibv_post_srq_recv";

/// Posts a receive to a queue of at most `most` elements a request, by the verb. The request is well-formed; the buffer lives
/// during the call, and then the caller keeps its memory.
#[inline]
pub(crate) fn post_by<D: ScatterBuffer>(
    verb: &'static str,
    post: impl FnOnce(*mut ffi::ibv_recv_wr, *mut *mut ffi::ibv_recv_wr) -> c_int,
    most: u32,
    request: ReceiveWorkRequest<D>,
    wr_id: u64,
) -> Result<()> {
    let (_, mut buffer) = request.split();
    let mut list = buffer.scatter()?;
    let list = list.as_mut();
    let mut bad = ptr::null_mut();
    let returned = post(&mut Receive::encode(wr_id, list), &mut bad);
    if returned == 0 {
        return Ok(());
    }
    let (count, most) = (list.len() as u64, most.into());
    if count > most {
        return Err(Error::out_of_range(verb, "the number of scatter elements", count, 0, most));
    }
    Err(ffi::failed(verb, returned))
}

impl SharedReceiveQueue<'_> {
    /// `ibv_post_srq_recv`: posts a receive under the number `wr_id`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the request has more elements than the queue was created for.
    ///  - `ENOMEM`: the queue is full ([`QueueFull`](crate::ErrorKind::QueueFull)).
    ///  - `EIO`: the device is gone.
    ///
    /// # Safety
    ///
    /// [That of posting](crate::QueuePair#the-contract-of-posting). A request ends when its completion
    /// was polled, or the shared receive queue was destroyed ([`close`](Self::close) has returned `Ok`).
    /// Destroying a queue pair does not end it.
    #[doc(alias = "ibv_post_srq_recv")]
    #[inline]
    pub unsafe fn post<D: ScatterBuffer>(
        &self,
        request: ReceiveWorkRequest<D>,
        wr_id: u64,
    ) -> Result<()> {
        // SAFETY: the queue is live, and the caller keeps the contract.
        let post =
            |request: *mut _, bad| unsafe { ffi::ibv_post_srq_recv(self.as_raw(), request, bad) };
        post_by(POST, post, self.max_sge(), request, wr_id)
    }

    /// `ibv_post_srq_recv`: receives one message, from any of the queue pairs, into the elements of
    /// `region` in `range`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the range is out of bounds, or longer than 4 GiB - 1 bytes.
    ///  - `ENOMEM`: the queue is full ([`QueueFull`](crate::ErrorKind::QueueFull)).
    ///  - `EIO`: the device is gone.
    ///
    /// # Safety
    ///
    /// That of [`post`](Self::post).
    #[doc(alias = "ibv_post_srq_recv")]
    #[inline]
    pub unsafe fn post_receive(
        &self,
        region: &mut impl LocalMemoryMut,
        range: impl RangeBounds<usize>,
        wr_id: u64,
    ) -> Result<()> {
        let element = ScatterElement::new(region.sge_mut(range)?);
        // SAFETY: the caller keeps the contract.
        unsafe { self.post(ReceiveWorkRequest::new(element), wr_id) }
    }
}
