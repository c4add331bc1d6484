//! Posting to queue pairs.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::ops::RangeBounds;
use std::ptr;

use super::QueuePair;
use super::halves::{ReceiveHalf, SendHalf};
use super::post_receive::receive_methods;
use super::post_remote::remote_methods;
use super::post_send::send_methods;
use super::transport::Transport;
use crate::error::{Error, Result};
use crate::ffi;
use crate::memory::sge;
use crate::memory::{LocalMemory, LocalMemoryMut, RemoteMemoryRegion};
use crate::queue_pair::work_request::remote::{atomic, check_atomic, check_remote, rdma};
use crate::queue_pair::work_request::{
    Batch, GATHERED, InlineList, ListError, ReceiveList, ReceiveListEntry, SendList, SendListEntry,
    WorkRequest,
};
use crate::queue_pair::work_request::{
    explain_elements, explain_receive, explain_send, post_receive, post_send, too_long_inline,
};
use crate::settings::QueuePairType;

/// The flag of a request with a completion.
pub(super) const SIGNALED: u32 = ffi::ibv_send_flags::IBV_SEND_SIGNALED.0;
pub(super) const INLINE: u32 = ffi::ibv_send_flags::IBV_SEND_INLINE.0;

/// A request with one element, or with none if that is empty: mlx4 and mthca interpret 0 bytes as 2 GiB.
/// Only the fields that every opcode has are set. The others stay uninitialised: zeroing them would
/// dominate the cost.
#[inline]
pub(super) fn request(
    wr_id: u64,
    sge: &mut ffi::ibv_sge,
    opcode: ffi::ibv_wr_opcode,
    send_flags: u32,
) -> MaybeUninit<ffi::ibv_send_wr> {
    let mut request = MaybeUninit::<ffi::ibv_send_wr>::uninit();
    let raw = request.as_mut_ptr();
    // SAFETY: the fields are within the request, and have nothing to drop.
    unsafe {
        (*raw).wr_id = wr_id;
        (*raw).next = ptr::null_mut();
        (*raw).sg_list = sge;
        (*raw).num_sge = i32::from(sge.length != 0);
        (*raw).opcode = opcode;
        (*raw).send_flags = send_flags;
    }
    request
}

#[cold]
fn no_peer() -> Error {
    let reason = "the queue pair has no peer: post a request that says where it goes";
    Error::invalid("ibv_post_send", reason)
}

/// Posting requests of either queue, and splitting.
impl<'res, T: Transport> QueuePair<'res, T> {
    /// `ibv_post_send`, `ibv_post_recv`: posts a request to the queue that it is for, under the number
    /// `wr_id`. The same request can be posted repeatedly.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the request has more elements or more inline data than the queue pair was built for, or
    ///    the queue pair's state does not allow it, or the queue pair does not have the operation.
    ///  - `ENOMEM`: the queue is full ([`QueueFull`](crate::ErrorKind::QueueFull)).
    ///  - `EIO`: the device is gone.
    ///  - `EACCES` (Soft-RoCE and Soft-iWARP): the process has changed its credentials since it opened
    ///    the device.
    ///
    /// # Safety
    ///
    /// [That of posting](QueuePair#the-contract-of-posting).
    ///
    /// On a queue pair that sends datagrams, the request is a send with a destination
    /// ([`SendWorkRequest::to`](crate::SendWorkRequest::to)): providers read the destination without
    /// checking that there is one.
    ///
    /// The elements and the request itself may be dropped immediately.
    #[doc(alias = "ibv_post_send")]
    #[doc(alias = "ibv_post_recv")]
    #[inline]
    pub unsafe fn post(&mut self, request: &mut impl WorkRequest, wr_id: u64) -> Result<()> {
        // SAFETY: the queue pair is live, and the caller keeps the memory.
        let returned = unsafe { request.post(self.as_raw(), wr_id) };
        if returned == 0 { Ok(()) } else { Err(request.explain(self.erased(), returned)) }
    }

    send_methods!();
    remote_methods!();
    receive_methods!();

    /// The send half and the receive half, for use by two threads.
    ///
    /// ```
    /// # use ibverbs::QueuePairType;
    /// # fn main() -> ibverbs::Result<()> {
    /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
    /// # rxe0.register();
    /// # let context = ibverbs::open("rxe0")?;
    /// # let domain = context.alloc_pd()?;
    /// # let queue = context.create_cq(16)?;
    /// let mut region = domain.allocate::<u8>(16)?;
    /// # let prepared = domain.create_qp(&queue, &queue, QueuePairType::ReliableConnected)
    /// #     .max_inline_data(16).build()?;
    /// # let remote = prepared.endpoint();
    /// let mut queue_pair = prepared.handshake(remote)?;
    /// let (mut send, mut receive) = queue_pair.split();
    /// std::thread::scope(|scope| {
    ///     // SAFETY: no other request is outstanding under 1.
    ///     scope.spawn(move || unsafe { send.post_inline(b"hello", 1) });
    ///     // SAFETY: the region is not touched until the completion of 2 was polled, and dropped after
    ///     // the queue pair.
    ///     unsafe { receive.post_receive(&mut region, .., 2) }
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    #[inline]
    pub fn split(&mut self) -> (SendHalf<'_, 'res, T>, ReceiveHalf<'_, 'res, T>) {
        (SendHalf::new(self), ReceiveHalf::new(self))
    }

    #[inline]
    fn queue_pair(&self) -> &Self {
        self
    }
}

impl QueuePair<'_, QueuePairType> {
    /// Whether the queue pair has a fixed peer, so that requests do not name one.
    #[inline]
    pub(super) fn need_peer(&self) -> Result<()> {
        if self.has_peer() { Ok(()) } else { Err(no_peer()) }
    }

    /// The element of inline data, for a peer that the queue pair has.
    #[inline]
    pub(super) fn inline_element(&self, bytes: &[u8]) -> Result<ffi::ibv_sge> {
        self.need_peer()?;
        let most = self.max_inline_data();
        if bytes.len() > most as usize {
            return Err(too_long_inline(bytes.len() as u64, most));
        }
        sge(bytes.as_ptr() as u64, bytes.len(), 0)
    }
}
