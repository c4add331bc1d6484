//! The next message of a channel, as a future.

use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use super::AsyncChannel;
use super::locked_loop::{Borrowed, Guard, Lock, Locked, Share, release_quietly};
use super::operation::result_of;
use super::stall_warning::Waits;
use crate::base::{Result, debug, panics::catch};
use crate::channel::parts::{Queue, Refused};
use crate::channel::{OwnedResult, TransportError};
use crate::serve::event_loop::{ChannelId, Ended, LoopBuffer, shared_queue};
use crate::serve::pool::PooledBuffer;
use crate::verbs::completion::CompletionQueue;
use crate::verbs::domain::DomainRef;
use crate::verbs::memory::ScatterBuffer;
use crate::verbs::operation::ReceiveWorkRequest;
use crate::verbs::queue_pair::SharedReceiveQueue;

/// The next message of an [`AsyncChannel`]: see [`receive`](AsyncChannel::receive).
#[must_use = "futures do nothing unless polled"]
pub struct AsyncReceive<'a, D, S: Share> {
    channel: &'a AsyncChannel<S>,
    /// `None` once posted.
    request: Option<ReceiveWorkRequest<D>>,
    stage: Stage,
    waits: Waits,
}

#[derive(Clone, Copy, Debug)]
enum Stage {
    New,
    Waiting(u32),
    Over,
}

impl<D, S: Share> Unpin for AsyncReceive<'_, D, S> {}

impl<'a, D: ScatterBuffer, S: Share> AsyncReceive<'a, D, S>
where
    D::Kept: LoopBuffer<S::Buffer>,
{
    #[inline(always)]
    pub(super) fn new(channel: &'a AsyncChannel<S>, buffer: D) -> Self {
        let request = Some(ReceiveWorkRequest::new(buffer));
        Self { channel, request, stage: Stage::New, waits: Waits::default() }
    }

    /// A receive that another task left may serve.
    #[inline(never)]
    fn post(&mut self, waker: &Waker) -> Poll<OwnedResult<S::Buffer>> {
        let AsyncChannel { share, id, .. } = self.channel;
        let Some(request) = self.request.take() else {
            return Poll::Ready(Err(TransportError::UnknownWork.into()));
        };
        let waker = waker.clone();
        let mut state = share.lock_briefly();
        if state.core.receiving(*id).surplus > 0 {
            return self.poll_unposted(state.until_done(share), request, waker);
        }
        if let Err(refused) = state.core.post_for_message(*id, request) {
            return self.refused(state.until_done(share), refused, waker);
        }
        if state.core.has_message(*id) {
            return self.poll_posted(state.until_done(share), waker);
        }
        self.wait_in_line(state, waker)
    }

    #[inline(always)]
    fn wait_in_line(
        &mut self,
        mut state: Borrowed<'a, S>,
        waker: Waker,
    ) -> Poll<OwnedResult<S::Buffer>> {
        let mut waker = Some(waker);
        match state.core.join_line(self.channel.id, Queue::Receive, &mut waker) {
            Ok(place) => {
                self.waits = state.stall_warning.wait();
                self.stage = Stage::Waiting(place);
                Poll::Pending
            }
            Err(error) => self.not_in_line(state.until_done(&self.channel.share), error, waker),
        }
    }

    #[inline(never)]
    fn poll_posted(
        &mut self,
        mut guard: Guard<'a, S>,
        waker: Waker,
    ) -> Poll<OwnedResult<S::Buffer>> {
        let id = self.channel.id;
        if let Some(message) = guard.core.take_message(id) {
            return self.end(guard, message, Some(waker));
        }
        self.wait_in_line(guard.briefly(), waker)
    }

    /// Without memory for a waiter, the next task gets the posted receive.
    #[cold]
    #[inline(never)]
    fn not_in_line(
        &mut self,
        mut guard: Guard<'a, S>,
        error: TransportError,
        waker: Option<Waker>,
    ) -> Poll<OwnedResult<S::Buffer>> {
        self.stage = Stage::Over;
        let request = self.request.take();
        let receiving = guard.core.receiving(self.channel.id);
        if request.is_some() {
            receiving.held -= 1;
        } else {
            receiving.surplus += 1;
        }
        drop(guard);
        drop(waker);
        Poll::Ready(Err(Refused::new(error, request).into()))
    }

    /// Another task has left a receive.
    #[cold]
    #[inline(never)]
    fn poll_unposted(
        &mut self,
        mut guard: Guard<'a, S>,
        request: ReceiveWorkRequest<D>,
        waker: Waker,
    ) -> Poll<OwnedResult<S::Buffer>> {
        let id = self.channel.id;
        // Messages that arrived before the stop are still there.
        let stopped = guard.core.why_stopped(id).filter(|_| !guard.core.has_message(id));
        if let Some(error) = stopped {
            drop(guard);
            self.stage = Stage::Over;
            return Poll::Ready(Err(Refused::new(error, Some(request)).into()));
        }
        let receiving = guard.core.receiving(id);
        receiving.surplus = receiving.surplus.saturating_sub(1);
        let polled = self.poll_posted(guard, waker);
        drop(request);
        polled
    }

    #[cold]
    #[inline(never)]
    fn refused(
        &mut self,
        mut guard: Guard<'a, S>,
        refused: Refused<ReceiveWorkRequest<D>>,
        waker: Waker,
    ) -> Poll<OwnedResult<S::Buffer>> {
        let id = &self.channel.id;
        if guard.core.why_stopped(*id).is_some() && guard.core.has_message(*id) {
            // As in `poll_unposted`.
            let polled = self.poll_posted(guard, waker);
            drop(refused);
            return polled;
        }
        let is_full = refused.error == TransportError::QueueFull;
        if !is_full || !guard.core.has_queue(*id, Queue::Receive) {
            drop(guard);
            self.stage = Stage::Over;
            return Poll::Ready(Err(refused.into()));
        }
        self.request = refused.request;
        guard.core.receiving(*id).held += 1;
        self.poll_posted(guard, waker)
    }

    #[inline(never)]
    fn take(&mut self, place: u32, waker: &Waker) -> Poll<OwnedResult<S::Buffer>> {
        let AsyncChannel { share, id, .. } = self.channel;
        let mut state = share.lock_briefly();
        if self.request.is_none()
            && let Some(message) = state.core.take_only_message(*id, place)
        {
            self.stage = Stage::Over;
            self.waits = Waits::default();
            return Poll::Ready(Ok(state.core.take_success(message)));
        }
        self.take_slowly(state.until_done(share), place, waker)
    }

    #[inline(never)]
    fn take_slowly(
        &mut self,
        mut guard: Guard<'a, S>,
        place: u32,
        waker: &Waker,
    ) -> Poll<OwnedResult<S::Buffer>> {
        let AsyncChannel { share, id, .. } = self.channel;
        let mut new = None;
        let own = guard.core.waker_in_line(place).as_ref();
        let is_same = own.is_some_and(|own| own.will_wake(waker));
        if !is_same && !guard.core.has_message(*id) {
            drop(guard);
            new = Some(waker.clone());
            guard = share.lock();
        }
        if let Some(message) = guard.core.take_message(*id) {
            let own = guard.core.leave_line(*id, Queue::Receive, place);
            let polled = self.end(guard, message, own);
            drop(new);
            return polled;
        }
        let Some(error) = guard.core.why_stopped(*id) else {
            self.post_held(&mut guard);
            if new.is_some() {
                mem::swap(guard.core.waker_in_line(place), &mut new);
            }
            drop(guard);
            drop(new);
            return Poll::Pending;
        };
        let own = guard.core.leave_line(*id, Queue::Receive, place);
        if self.request.is_some() {
            guard.core.receiving(*id).held -= 1;
        }
        drop(guard);
        self.stage = Stage::Over;
        drop((own, new));
        Poll::Ready(Err(Refused::new(error, self.request.take()).into()))
    }

    fn end(
        &mut self,
        mut guard: Guard<'a, S>,
        message: Ended<S::Buffer>,
        own: Option<Waker>,
    ) -> Poll<OwnedResult<S::Buffer>> {
        let id = &self.channel.id;
        self.stage = Stage::Over;
        self.waits = Waits::default();
        self.post_held(&mut guard);
        guard.core.wake_after_message(*id);
        let stopped = guard.core.why_stopped(*id);
        drop(guard);
        drop(own);
        Poll::Ready(result_of(message, stopped))
    }

    fn post_held(&mut self, guard: &mut Guard<'_, S>) {
        if let Some(request) = self.request.take() {
            self.post_held_request(guard, request);
        }
    }

    #[cold]
    #[inline(never)]
    fn post_held_request(&mut self, guard: &mut Guard<'_, S>, request: ReceiveWorkRequest<D>) {
        let id = self.channel.id;
        match guard.core.post_for_message(id, request) {
            Ok(()) => guard.core.receiving(id).held -= 1,
            Err(refused) => match refused.request {
                Some(request) => self.request = Some(request),
                // The device may have it.
                None => guard.core.receiving(id).held -= 1,
            },
        }
        if self.request.is_some() && matches!(self.stage, Stage::Over) {
            guard.core.receiving(id).held -= 1;
        }
    }
}

impl<D: ScatterBuffer, S: Share> Future for AsyncReceive<'_, D, S>
where
    D::Kept: LoopBuffer<S::Buffer>,
{
    type Output = OwnedResult<S::Buffer>;

    #[inline(always)]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.stage {
            Stage::Waiting(place) => self.take(place, cx.waker()),
            Stage::New => self.post(cx.waker()),
            Stage::Over => Poll::Ready(Err(TransportError::UnknownWork.into())),
        }
    }
}

impl<D, S: Share> Drop for AsyncReceive<'_, D, S> {
    #[inline(always)]
    fn drop(&mut self) {
        if let Stage::Waiting(place) = self.stage {
            give_up(self.channel, place, self.request.is_some());
        }
    }
}

/// The next task gets its receive, if posted.
#[cold]
#[inline(never)]
fn give_up<S: Share>(channel: &AsyncChannel<S>, place: u32, is_held: bool) {
    let AsyncChannel { share, id, .. } = channel;
    let mut guard = share.lock();
    guard.note_given_up();
    let waker = guard.core.leave_line(*id, Queue::Receive, place);
    let receiving = guard.core.receiving(*id);
    if is_held {
        receiving.held -= 1;
    } else {
        receiving.surplus += 1;
    }
    // It may have been woken for a message.
    guard.core.wake_receiver(*id);
    release_quietly(guard);
    let _ = catch(|| drop(waker));
}

debug! { impl[D, S: Share] AsyncReceive<'_, D, S>, self, stage: self.stage, .. }

/// A shared receive queue (SRQ) for [`AsyncChannel`](crate::AsyncChannel)s of one reactor.
/// [`Reactor::add_shared_receives`](crate::Reactor::add_shared_receives) makes one,
/// [`Reactor::prepare_sharing`](crate::Reactor::prepare_sharing) its channels. A clone is the same queue.
///
/// A message takes the next receive, on whichever channel it arrives;
/// [`AsyncChannel::next_message`](crate::AsyncChannel::next_message) returns it there. So a server needs buffers only
/// for the messages that arrive at a time. Without a receive, peers retry
/// ([`max_rnr_retries`](crate::ChannelBuilder::max_rnr_retries)), and then their connections fail.
///
/// The queue is destroyed with the reactor and all its channels. A receive that the device took for a dropped channel,
/// without a completion, stays posted until then.
pub struct SharedReceives<S: Share = Locked<PooledBuffer>> {
    // Dropped before the loop, which then owns it alone.
    queue: Arc<SharedReceiveQueue<'static>>,
    share: S,
    id: ChannelId,
}

impl<S: Share> SharedReceives<S> {
    pub(super) fn new(
        share: &S,
        completions: &CompletionQueue<'static>,
        domain: DomainRef<'static>,
        capacity: u32,
    ) -> Result<Self> {
        let queue = shared_queue(completions, domain, capacity)?;
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
    /// Those of [`Loop::post`](crate::Loop::post), with the buffer; the error with which the reactor was
    /// [stopped](crate::Reactor::stop); and
    ///
    ///  - [`ReactorGone`](TransportError::ReactorGone): the reactor was dropped.
    #[doc(alias = "ibv_post_srq_recv")]
    pub fn post<D: ScatterBuffer>(&self, buffer: D) -> OwnedResult<S::Buffer, ()>
    where
        D::Kept: LoopBuffer<S::Buffer>,
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
