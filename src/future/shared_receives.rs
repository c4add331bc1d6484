//! Receives that channels of a reactor share.

use std::sync::Arc;

use super::share::{Lock, Locked, Share};
use crate::channel::{ChannelId, LoopBuffer, OwnedBuffer, OwnedResult};
use crate::debug::debug;
use crate::domain::ProtectionDomain;
use crate::error::Result;
use crate::memory::ScatterBuffer;
use crate::operation::ReceiveWorkRequest;
use crate::parent::Parent;
use crate::pool::PooledBuffer;
use crate::queue_pair::SharedReceiveQueue;

/// A shared receive queue (SRQ) that feeds [`AsyncChannel`](crate::AsyncChannel)s of one reactor:
/// [`Reactor::add_shared_receives`](crate::Reactor::add_shared_receives) makes one, and
/// [`Reactor::prepare_sharing`](crate::Reactor::prepare_sharing) its channels.
///
/// A message takes the next receive, whichever channel it arrives on, and
/// [`AsyncChannel::next_message`](crate::AsyncChannel::next_message) returns it there. So a server needs as many buffers as
/// messages arrive at a time, and not as many as it has peers times what each may send. Post a receive for each message: if
/// there is none, peers retry ([`max_rnr_retries`](crate::ChannelBuilder::max_rnr_retries)), and then their connections
/// fail.
///
/// It can be cloned. The queue is destroyed with the reactor and all its channels: a receive that the device had taken for a
/// channel that was dropped stays posted until then, if its completion never came.
pub struct SharedReceives<S: Share = Locked<PooledBuffer>> {
    // Dropped before the loop, which then owns it alone.
    queue: Arc<SharedReceiveQueue<'static>>,
    share: S,
    id: ChannelId,
}

impl<S: Share> SharedReceives<S> {
    pub(super) fn new(
        share: &S,
        domain: Parent<'static, ProtectionDomain<'static>>,
        capacity: u32,
    ) -> Result<Self> {
        let queue = Arc::new(SharedReceiveQueue::new(domain, capacity, 1)?);
        let id = share.lock().core.place_shared(&queue, capacity)?;
        Ok(Self { queue, share: share.clone(), id })
    }

    pub(super) fn id(&self) -> ChannelId {
        self.id
    }

    /// The queue, for its [limit](SharedReceiveQueue::set_limit). Do not post to it.
    pub fn queue(&self) -> &Arc<SharedReceiveQueue<'static>> {
        &self.queue
    }

    /// `ibv_post_srq_recv`: posts a receive for the next message of any of the channels.
    ///
    /// # Errors
    ///
    /// Those of [`Loop::post`](crate::Loop::post), with the buffer.
    #[doc(alias = "ibv_post_srq_recv")]
    pub fn post<D: ScatterBuffer>(&self, buffer: D) -> OwnedResult<S::Buffer, ()>
    where
        D::Kept: OwnedBuffer,
        S::Buffer: LoopBuffer<D::Kept>,
    {
        let request = ReceiveWorkRequest::new(buffer);
        let posted = self.share.lock().core.post_for_message(self.id, request);
        Ok(posted?)
    }

    /// The number of receives that the device has.
    pub fn posted(&self) -> usize {
        self.share.lock().core.in_flight(self.id)
    }
}

impl<S: Share> Clone for SharedReceives<S> {
    fn clone(&self) -> Self {
        Self { queue: self.queue.clone(), share: self.share.clone(), id: self.id }
    }
}

debug! { impl[S: Share] SharedReceives<S>, self, queue: self.queue, .. }
