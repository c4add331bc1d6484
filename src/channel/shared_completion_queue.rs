//! A completion queue that several channels share.

use std::fmt;
use std::sync::Arc;

use super::router::Router;
use crate::completion::CompletionQueue;
use crate::device::Context;
use crate::error::{Error, Result};
use crate::ffi;
use crate::parent::Parent;

/// A completion queue that serves several [`Channel`](crate::Channel)s, which may be on different
/// threads.
///
/// A channel that polls takes all completions that are there, and puts those of other channels into
/// completion is lost and nothing is allocated. A lock guards the inboxes, so a channel with a
/// completion queue of its own is faster.
///
/// The queue has room for a fixed number of completions. Each channel reserves its depth
/// ([`max_send_wr`](crate::ChannelBuilder::max_send_wr) plus
/// [`max_recv_wr`](crate::ChannelBuilder::max_recv_wr)) from when it is built until it is dropped.
///
/// ```no_run
/// use ibverbs::{Channel, SharedCompletionQueue};
///
/// # fn main() -> ibverbs::Result<()> {
/// let context = ibverbs::open("rxe0")?;
/// let domain = context.alloc_pd()?;
/// let queue = SharedCompletionQueue::new(&context, 1024)?;
/// let one = Channel::builder(&domain).shared_completion_queue(&queue).build()?;
/// let other = Channel::builder(&domain).shared_completion_queue(&queue).build()?;
/// # Ok(())
/// # }
/// ```
pub struct SharedCompletionQueue<'ctx> {
    queue: Arc<CompletionQueue<'ctx>>,
    router: Arc<Router>,
}

impl<'ctx> SharedCompletionQueue<'ctx> {
    /// `ibv_create_cq`: creates a completion queue with room for at least `entries` completions.
    ///
    /// # Errors
    ///
    /// Those of [`CompletionQueue::new`].
    #[doc(alias = "ibv_create_cq")]
    pub fn new(context: impl Into<Parent<'ctx, Context<'ctx>>>, entries: u32) -> Result<Self> {
        Ok(CompletionQueue::new(context, entries)?.into())
    }

    /// The number of completions that it has room for.
    pub fn capacity(&self) -> u32 {
        self.router.capacity()
    }

    /// The part of the capacity that no channel has reserved.
    pub fn available(&self) -> u32 {
        self.router.available()
    }

    /// The C object. It is valid while this queue or a channel that uses it exists. A completion that
    /// the caller polls from it is lost to its channel.
    pub fn as_raw(&self) -> *mut ffi::ibv_cq {
        self.queue.as_raw()
    }

    /// `ibv_destroy_cq`: destroys the completion queue, and reports a failure. Dropping it ignores a
    /// failure.
    ///
    /// # Errors
    ///
    ///  - `EBUSY`: a channel that uses it still exists. The queue is destroyed with the last of them.
    ///  - Those of [`CompletionQueue::close`].
    #[doc(alias = "ibv_destroy_cq")]
    pub fn close(self) -> Result<()> {
        match Arc::try_unwrap(self.queue) {
            Ok(queue) => queue.close(),
            Err(_) => {
                let reason = "a channel that uses the completion queue still exists";
                Err(Error::with_reason("ibv_destroy_cq", libc::EBUSY, reason))
            }
        }
    }

    pub(super) fn queue(&self) -> &Arc<CompletionQueue<'ctx>> {
        &self.queue
    }

    pub(super) fn router(&self) -> &Arc<Router> {
        &self.router
    }
}

impl<'ctx> From<CompletionQueue<'ctx>> for SharedCompletionQueue<'ctx> {
    /// Shares a completion queue that was made with other settings, such as a
    /// [channel to sleep on](crate::CompletionQueueBuilder::own_channel). Completions that are in
    /// it are dropped.
    fn from(queue: CompletionQueue<'ctx>) -> Self {
        // SAFETY: the router and the queue stay together, here and in each channel.
        let router = Arc::new(unsafe { Router::new(queue.as_raw(), queue.capacity()) });
        Self { queue: Arc::new(queue), router }
    }
}

impl fmt::Debug for SharedCompletionQueue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedCompletionQueue")
            .field("queue", &self.queue)
            .field("available", &self.available())
            .finish_non_exhaustive()
    }
}
