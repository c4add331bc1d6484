//! Futures on a loop: a channel whose operations are futures, over one table of operations for all channels.

mod operation;
mod reactor;
mod receive;
mod share;

pub use operation::LoopOperation;
pub use reactor::LoopReactor;
pub use receive::LoopReceive;
pub use share::{Local, Locked, Share};

use std::fmt;

#[cfg(doc)]
use crate::channel::TransportError;
use crate::channel::{
    ChannelId, LoopBuffer, OwnedBuffer, OwnedResult, Refused, WorkRequest, nowhere,
};
use crate::memory::{GatherBuffer, RemoteMemoryRegion, ScatterBuffer};
use crate::operation::{
    ReadWorkRequest, ReceiveWorkRequest, SendQueueRequest, SendWorkRequest, WriteWorkRequest,
};
use crate::queue_pair::QueuePairEndpoint;
use share::release_quietly;

/// A channel of a [`LoopReactor`], whose operations are futures that own their buffers.
///
/// Its methods take `&self`: any number of tasks can use it. Its futures borrow it.
///
/// # Cancelling
///
/// A future may be dropped at any time. What then becomes of its operation depends on how far that has come:
///
/// | dropped | the operation | the buffer |
/// |---|---|---|
/// | before its first poll, or while it waits for room in the queue | is never posted | is dropped with the future |
/// | after that | goes on: a message is sent, a write takes effect | is dropped when the device is done with it (a pooled buffer goes back to its pool) |
/// | a receive | its place in line is given up. **No message is lost**: what arrives in its buffer goes to another receive, in order | holds a later message |
///
/// No drop waits for the device. A future that is forgotten ([`mem::forget`](std::mem::forget)) leaks its buffer and its
/// place in the queue until the channel is dropped. If it waited for room, all later operations wait behind it.
///
/// # When it ends
///
/// After a failed operation ([`Work`](TransportError::Work)) all later ones fail too; make a new channel to connect again.
/// Dropping the channel calls `ibv_destroy_qp`, with no lock held. A channel may outlive its reactor: its operations
/// return [`Stopped`](TransportError::Stopped).
pub struct LoopChannel<S: Share> {
    share: S,
    id: ChannelId,
}

impl<S: Share> LoopChannel<S> {
    /// The address of the channel, which its peer needs.
    pub fn endpoint(&self) -> QueuePairEndpoint {
        let endpoint = self.share.lock().core.endpoint(self.id);
        endpoint.expect("the channel is removed when it is dropped")
    }

    /// The number of messages that may be sent before the peer is asked again: see
    /// [`Channel::credits`](crate::Channel::credits).
    pub fn credits(&self) -> Option<u32> {
        self.share.lock().core.credits(self.id)
    }

    /// The number of the channel's operations that the device has.
    pub fn in_flight(&self) -> usize {
        self.share.lock().core.in_flight(self.id)
    }

    /// `ibv_post_send`: carries out any request of the send queue.
    ///
    /// It is posted when the future is first polled. If the queue is full, or the channel lacks credit
    /// ([flow control](crate::ChannelBuilder::flow_control)), it is posted when there is room: operations are posted in
    /// the order of their first polls.
    ///
    /// The output is the buffer, as the loop keeps it, and the completion.
    #[doc(alias = "ibv_post_send")]
    #[inline(always)]
    pub fn run<R: WorkRequest + SendQueueRequest>(&self, request: R) -> LoopOperation<'_, R, S>
    where
        R::Kept: OwnedBuffer,
        S::Buffer: LoopBuffer<R::Kept>,
    {
        LoopOperation::new(self, request)
    }

    /// `ibv_post_send`: as [`run`](Self::run), but posts the request at once. The future is awaited later: several
    /// operations are in flight at the same time, without a combinator of futures.
    ///
    /// # Errors
    ///
    /// Those of [`Loop::post`](crate::Loop::post), [`QueueFull`](TransportError::QueueFull) also if others wait for room,
    /// and [`Stopped`](TransportError::Stopped).
    #[doc(alias = "ibv_post_send")]
    #[inline(always)]
    pub fn submit<R: WorkRequest + SendQueueRequest>(
        &self,
        request: R,
    ) -> OwnedResult<S::Buffer, LoopOperation<'_, R, S>>
    where
        R::Kept: OwnedBuffer,
        S::Buffer: LoopBuffer<R::Kept>,
    {
        Ok(LoopOperation::submit(self, request)?)
    }

    /// `ibv_post_send`: sends a message. See [`SendWorkRequest`].
    #[doc(alias = "ibv_post_send")]
    #[inline(always)]
    pub fn send<D: GatherBuffer>(&self, message: D) -> LoopOperation<'_, SendWorkRequest<D>, S>
    where
        D::Kept: OwnedBuffer,
        S::Buffer: LoopBuffer<D::Kept>,
    {
        self.run(SendWorkRequest::new(message))
    }

    /// `ibv_post_send`: writes to the peer's memory. See [`WriteWorkRequest`].
    #[doc(alias = "ibv_post_send")]
    #[inline(always)]
    pub fn write<D: GatherBuffer>(
        &self,
        data: D,
        remote: impl Into<RemoteMemoryRegion>,
    ) -> LoopOperation<'_, WriteWorkRequest<D>, S>
    where
        D::Kept: OwnedBuffer,
        S::Buffer: LoopBuffer<D::Kept>,
    {
        self.run(WriteWorkRequest::new(data, remote))
    }

    /// `ibv_post_send`: reads the peer's memory. See [`ReadWorkRequest`].
    #[doc(alias = "ibv_post_send")]
    #[inline(always)]
    pub fn read<D: ScatterBuffer>(
        &self,
        buffer: D,
        remote: impl Into<RemoteMemoryRegion>,
    ) -> LoopOperation<'_, ReadWorkRequest<D>, S>
    where
        D::Kept: OwnedBuffer,
        S::Buffer: LoopBuffer<D::Kept>,
    {
        self.run(ReadWorkRequest::new(buffer, remote))
    }

    /// `ibv_post_recv`: the next message. Messages are handed out in the order in which they arrive; which of several
    /// tasks gets one is not fixed.
    ///
    /// The future posts `buffer`, and returns the buffer with the message, which may be one that was posted before:
    /// [ahead](Self::post_receive), or by a receive that was dropped. If such a one is left, `buffer` is not needed, and
    /// is dropped. If the queue is full, it is posted when there is room.
    ///
    /// A message that is longer than the buffer it arrives in fails, so use buffers of one length.
    #[doc(alias = "ibv_post_recv")]
    #[inline(always)]
    pub fn receive<D: ScatterBuffer>(&self, buffer: D) -> LoopReceive<'_, D, S>
    where
        D::Kept: OwnedBuffer,
        S::Buffer: LoopBuffer<D::Kept>,
    {
        LoopReceive::new(self, buffer)
    }

    /// `ibv_post_recv`: posts a receive for a message that nobody waits for yet. From then on the channel has one more
    /// receive posted than there are tasks that wait, so that the peer need not wait for the program to come back to
    /// [`receive`](Self::receive).
    ///
    /// # Errors
    ///
    /// Those of [`Loop::post`](crate::Loop::post), and [`Stopped`](TransportError::Stopped).
    #[doc(alias = "ibv_post_recv")]
    pub fn post_receive<D: ScatterBuffer>(&self, buffer: D) -> OwnedResult<S::Buffer, ()>
    where
        D::Kept: OwnedBuffer,
        S::Buffer: LoopBuffer<D::Kept>,
    {
        let request = ReceiveWorkRequest::new(buffer);
        let mut guard = self.share.lock();
        let posted = match guard.stopped {
            Some(error) => Err(Refused { error, request: Some(request) }),
            None => guard.core.post_for_message(self.id, request),
        };
        drop(guard);
        Ok(posted?)
    }

    /// `ibv_post_send`: writes 0 bytes to the peer, whose device acknowledges that without the peer's program. An error
    /// says that the peer is gone, after the retries of the device.
    ///
    /// The peer's channel must allow remote writes: see [`Channel::keep_alive`](crate::Channel::keep_alive).
    #[doc(alias = "ibv_post_send")]
    pub fn probe(&self) -> LoopOperation<'_, WriteWorkRequest<()>, S>
    where
        S::Buffer: LoopBuffer<()>,
    {
        self.write((), nowhere())
    }
}

impl<S: Share> Drop for LoopChannel<S> {
    fn drop(&mut self) {
        let detached = self.share.lock().core.detach(self.id);
        if let Some(detached) = detached {
            let destroyed = detached.destroy();
            let mut guard = self.share.lock();
            guard.core.discard(destroyed);
            release_quietly(&self.share, guard);
        }
    }
}

impl<S: Share> fmt::Debug for LoopChannel<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LoopChannel").field("id", &self.id).finish_non_exhaustive()
    }
}
