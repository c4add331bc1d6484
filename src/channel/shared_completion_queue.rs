//! The completion queue of a reactor, which its channels share.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use super::polled::{Found, Polled, PolledCompletion};
use super::router::Router;
use crate::completion::CompletionQueue;
use crate::debug::debug;
use crate::device::Context;
use crate::error::Result;
use crate::parent::Parent;

/// See the [module](self).
pub(crate) struct SharedCompletionQueue<'ctx> {
    queue: Arc<CompletionQueue<'ctx>>,
    router: Arc<Router>,
}

impl<'ctx> SharedCompletionQueue<'ctx> {
    /// `ibv_create_comp_channel`, `ibv_create_cq`: a queue with room for at least `entries` completions, which can wake
    /// event loops.
    ///
    /// # Errors
    ///
    /// Those of [`CompletionQueue::new`] and [`CompletionChannel::new`](crate::CompletionChannel::new).
    pub(crate) fn with_event_channel(
        context: impl Into<Parent<'ctx, Context<'ctx>>>,
        entries: u32,
    ) -> Result<Self> {
        let queue = CompletionQueue::builder(context, entries).own_channel().build()?;
        // SAFETY: the router and the queue stay together, here and in each channel.
        let router = Arc::new(unsafe { Router::new(queue.as_raw(), queue.capacity()) });
        Ok(Self { queue: Arc::new(queue), router })
    }

    /// `ibv_poll_cq`: finds a channel that has something, or polls completions, which the caller hands to the channels.
    pub(crate) fn poll_into(&self, polled: &mut Polled<'_>) -> Result<Found> {
        self.router.poll_into(polled)
    }

    /// Puts completions of one channel, which was not dropped since, into its inbox. [`poll_into`](Self::poll_into)
    /// then returns the channel.
    pub(crate) fn put_back(&self, polled: &[PolledCompletion]) {
        self.router.put_back(polled);
    }

    /// The number of polls that [`poll_into`](Self::poll_into) has begun, and the number of those that have been dealt
    /// with.
    pub(crate) fn polls(&self) -> (u64, u64) {
        (self.router.polls_begun(), self.router.polls_done())
    }

    /// Room for completions of [`poll_into`](Self::poll_into).
    pub(crate) fn polled(&self) -> Polled<'_> {
        Polled::new(&self.router)
    }

    /// `ibv_req_notify_cq`: from now on, the next completion makes the [descriptor](Self::event_fd)
    /// readable. Until then the descriptor is not readable: an earlier event is read.
    pub(crate) fn arm(&self) -> Result<()> {
        self.queue.rearm_own()
    }

    /// The file that is readable when there is an event.
    pub(crate) fn event_fd(&self) -> Result<BorrowedFd<'_>> {
        Ok(self.queue.own_channel()?.channel().as_fd())
    }

    /// The part of the capacity that no channel has reserved.
    pub(crate) fn available(&self) -> u32 {
        self.router.available()
    }

    /// Asks the kernel for the device: see [`CompletionQueue::check_device`].
    pub(crate) fn check_device(&self) -> Result<()> {
        self.queue.check_device()
    }

    pub(super) fn queue(&self) -> &Arc<CompletionQueue<'ctx>> {
        &self.queue
    }

    pub(super) fn router(&self) -> &Arc<Router> {
        &self.router
    }
}

debug! { SharedCompletionQueue<'_>, self, queue: self.queue, available: self.available(), .. }
