use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::ptr;

use super::check_receive;
use super::explain::explain_receive;
use super::sealed::{Post, Request};
use super::{Posts, without_empty};
use crate::base::{Error, QueuePairType, Result, ffi};
use crate::verbs::memory::{GatherBuffer, ScatterBuffer};
use crate::verbs::queue_pair::{MessageLimits, QueuePair, ReceiveQueue};

/// `struct ibv_recv_wr`: receives one message. Its completion has the length
/// ([`WorkSuccess::byte_len`](crate::completion::WorkSuccess::byte_len)). A message longer than the buffer is an error
/// on both sides.
///
/// If the peer may write, check the [opcode](crate::completion::WorkSuccess::opcode): a write with an immediate also
/// completes a receive. It leaves the buffer unchanged, and its length can exceed the buffer.
///
/// ```
/// use ibverbs::{Rc, ReceiveWorkRequest};
///
/// # fn main() -> ibverbs::Result<()> {
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// # let context = ibverbs::open("rxe0")?;
/// # let domain = context.alloc_pd()?;
/// let (mut header, mut body) = (domain.allocate::<u64>(2)?, domain.allocate::<u8>(1024)?);
/// # let queue = context.create_cq(16)?;
/// let prepared = domain
///     .create_qp(&queue, &queue, Rc)
///     .max_recv_sge(2) // a message can then go to two pieces
///     .build()?;
/// # let remote = prepared.endpoint();
/// let mut queue_pair = prepared.handshake(remote)?;
///
/// let request = ReceiveWorkRequest::new((header.slice_mut(..)?, body.slice_mut(..)?));
/// // SAFETY: the regions are not touched until the completion of 7 was polled, and dropped after the
/// // queue pair.
/// unsafe { queue_pair.post(request, 7)? };
/// # Ok(())
/// # }
/// ```
#[doc(alias = "ibv_recv_wr")]
#[doc(alias = "ibv_post_recv")]
#[must_use = "a request does nothing until it is posted"]
#[derive(Clone, Copy, Debug)]
pub struct ReceiveWorkRequest<D> {
    buffer: D,
}

impl<D: ScatterBuffer> ReceiveWorkRequest<D> {
    /// Receives into `buffer`; `()` is for messages without data.
    #[inline(always)]
    pub fn new(buffer: D) -> Self {
        Self { buffer }
    }
}

/// The operation of a receive.
#[derive(Clone, Copy, Debug)]
pub struct Receive;

impl<D: ScatterBuffer> Request for ReceiveWorkRequest<D> {
    type Operation = Receive;
    type Buffer = D;

    #[inline(always)]
    fn split(self) -> (Receive, D) {
        (Receive, self.buffer)
    }

    #[inline(always)]
    fn join(_: Receive, buffer: D) -> Self {
        Self { buffer }
    }

    #[inline(always)]
    fn list(buffer: &mut D) -> Result<<D as GatherBuffer>::List> {
        buffer.begin_receive()
    }
}

impl<D: ScatterBuffer, T: ReceiveQueue> Posts<T> for ReceiveWorkRequest<D> {}

impl Receive {
    #[inline(always)]
    pub(crate) fn encode(wr_id: u64, list: &mut [ffi::ibv_sge]) -> ffi::ibv_recv_wr {
        let num_sge = match list {
            [one] => c_int::from(one.length != 0),
            _ => without_empty(list) as c_int,
        };
        ffi::ibv_recv_wr { wr_id, next: ptr::null_mut(), sg_list: list.as_mut_ptr(), num_sge }
    }
}

impl Post for Receive {
    const NEEDS_PEER: bool = false;

    #[inline(always)]
    fn check(&self, limits: &MessageLimits, list: &[ffi::ibv_sge]) -> Result<()> {
        check_receive(limits, list)
    }

    #[inline(always)]
    unsafe fn post(
        self,
        queue_pair: *mut ffi::ibv_qp,
        wr_id: u64,
        list: &mut [ffi::ibv_sge],
    ) -> c_int {
        let mut request = Self::encode(wr_id, list);
        let mut bad = MaybeUninit::uninit();
        // SAFETY: the caller vouches for the queue pair and the memory; `bad` is writable.
        unsafe { ffi::ibv_post_recv(queue_pair, &mut request, bad.as_mut_ptr()) }
    }

    #[cold]
    fn explain(
        self,
        queue_pair: &QueuePair<'_, QueuePairType>,
        list: &[ffi::ibv_sge],
        returned: c_int,
    ) -> Error {
        explain_receive(queue_pair, list.len(), returned)
    }
}
