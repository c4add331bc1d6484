//! What tasks do with a channel.

use std::future::{Future, poll_fn};
use std::task::Poll;

use super::locked_loop::{Lock, Share, stop};
use super::operation::{InLine, result_of};
use super::{AsyncChannel, AsyncOperation, AsyncReceive, AsyncRequest};
#[cfg(doc)]
use super::{Reactor, SharedReceives};
use crate::channel::parts::Queue;
use crate::channel::{OwnedResult, TransportError};
use crate::serve::event_loop::LoopBuffer;
use crate::verbs::memory::{GatherBuffer, RemoteMemoryRegion, ScatterBuffer};
use crate::verbs::operation::{
    ReadWorkRequest, ReceiveWorkRequest, SendWorkRequest, WriteWorkRequest,
};

impl<S: Share> AsyncChannel<S> {
    /// `ibv_post_send`: carries out any request of the send queue whose buffer an operation can own. The output is the
    /// buffer, as the reactor keeps it, and the completion.
    ///
    /// ```
    /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
    /// # rxe0.register();
    /// use ibverbs::{AsyncChannel, OperationError, PooledBuffer, SendWorkRequest};
    ///
    /// async fn answer(
    ///     channel: &AsyncChannel,
    ///     text: PooledBuffer,
    /// ) -> Result<PooledBuffer, OperationError<PooledBuffer>> {
    ///     let (text, _) = channel.run(SendWorkRequest::new(text).immediate(7)).await?;
    ///     Ok(text)
    /// }
    /// ```
    ///
    /// The first poll posts it. If the queue is full, or the channel lacks credit ([flow
    /// control](crate::ChannelBuilder::flow_control)), it is posted when there is room, in the order of first polls. If
    /// there is no memory for a waiter, it fails with `ENOMEM`, and the buffer comes back.
    #[doc(alias = "ibv_post_send")]
    #[inline(always)]
    pub fn run<R: AsyncRequest<S::Buffer>>(&self, request: R) -> AsyncOperation<'_, R, S> {
        AsyncOperation::new(self, request)
    }

    /// `ibv_post_send`: as [`run`](Self::run), but posts at once. Await the future later: several operations are in
    /// flight together, without a combinator of futures.
    ///
    /// # Errors
    ///
    /// Those of [`Loop::post`](crate::Loop::post), and why the channel or the reactor was stopped.
    /// [`QueueFull`](TransportError::QueueFull) also if others wait for room.
    #[doc(alias = "ibv_post_send")]
    #[inline(always)]
    pub fn submit<R: AsyncRequest<S::Buffer>>(
        &self,
        request: R,
    ) -> OwnedResult<S::Buffer, AsyncOperation<'_, R, S>> {
        AsyncOperation::submit(self, request)
    }

    /// `ibv_post_send`: sends a message. See [`SendWorkRequest`].
    #[doc(alias = "ibv_post_send")]
    #[inline(always)]
    pub fn send<D: GatherBuffer>(&self, message: D) -> AsyncOperation<'_, SendWorkRequest<D>, S>
    where
        D::Kept: LoopBuffer<S::Buffer>,
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
    ) -> AsyncOperation<'_, WriteWorkRequest<D>, S>
    where
        D::Kept: LoopBuffer<S::Buffer>,
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
    ) -> AsyncOperation<'_, ReadWorkRequest<D>, S>
    where
        D::Kept: LoopBuffer<S::Buffer>,
    {
        self.run(ReadWorkRequest::new(buffer, remote))
    }

    /// `ibv_post_recv`: the next message, in the order of arrival. Which of several waiting tasks gets it is not fixed.
    ///
    /// The future posts `buffer` when the queue has room, and returns the message in it or in one posted before:
    /// [ahead](Self::post_receive), or by a receive that was dropped. If such a buffer is left, `buffer` is dropped.
    ///
    /// A peer whose message finds no receive waits for this side's [`MinRnrTimer`](crate::settings::MinRnrTimer), by
    /// default 10 ms. So a server posts the next receive before it answers, or keeps several posted.
    ///
    /// A message fails if it is longer than the buffer in which it arrives, so use buffers of one length. If there is
    /// no memory for a waiter, it fails with `ENOMEM`; a buffer that was posted then serves the next task.
    #[doc(alias = "ibv_post_recv")]
    #[inline(always)]
    pub fn receive<D: ScatterBuffer>(&self, buffer: D) -> AsyncReceive<'_, D, S>
    where
        D::Kept: LoopBuffer<S::Buffer>,
    {
        AsyncReceive::new(self, buffer)
    }

    /// `ibv_post_recv`: posts a receive ahead, for a message that no task waits for yet. The channel then keeps one
    /// more receive posted than tasks wait, so that the peer need not wait until the program calls
    /// [`receive`](Self::receive) again.
    ///
    /// # Errors
    ///
    /// Those of [`Loop::post`](crate::Loop::post), and why the channel or the reactor was stopped.
    #[doc(alias = "ibv_post_recv")]
    pub fn post_receive<D: ScatterBuffer>(&self, buffer: D) -> OwnedResult<S::Buffer, ()>
    where
        D::Kept: LoopBuffer<S::Buffer>,
    {
        let request = ReceiveWorkRequest::new(buffer);
        let posted = self.share.lock().core.post_for_message(self.id, request);
        Ok(posted?)
    }

    /// The next message, in order, in a buffer posted [ahead](Self::post_receive) or, for a channel with [shared
    /// receives](Reactor::prepare_sharing), by [`SharedReceives::post`].
    ///
    /// If the connection fails while nothing but shared receives is in flight, no completion tells, unless the peer is
    /// [gone](TransportError::PeerGone).
    /// [`AsyncEvents`](crate::device::AsyncEvents) does
    /// ([`LastRequestReached`](crate::device::AsyncEventKind::LastRequestReached)).
    ///
    /// # Errors
    ///
    /// Those of a [receive](Self::receive), and [`QueueFull`](TransportError::QueueFull) if the channel was built for no
    /// receives.
    pub async fn next_message(&self) -> OwnedResult<S::Buffer> {
        let mut place = InLine::new(self, Queue::Receive);
        poll_fn(|cx| {
            let waker = cx.waker().clone();
            let mut guard = self.share.lock();
            if let Some(message) = guard.core.take_message(self.id) {
                guard.core.wake_after_message(self.id);
                let stopped = guard.core.why_stopped(self.id);
                drop(guard);
                return Poll::Ready(result_of(message, stopped));
            }
            match guard.core.why_ended(self.id) {
                Some(error) => Poll::Ready(Err(error.into())),
                None => match place.wait(guard, waker) {
                    Ok(()) => Poll::Pending,
                    Err(error) => Poll::Ready(Err(error.into())),
                },
            }
        })
        .await
    }

    /// `ibv_post_send`: after each `sleep` that ends with no send, write, read or atomic in flight, writes 0 bytes to
    /// the peer, whose device acknowledges that without its program.
    ///
    /// It returns the reason when the connection has failed: after the sleep in which the device has used up its
    /// retries. Run it beside the other operations, in a task of its own or with `select!`; dropping it is harmless.
    /// The peer's channel must allow remote writes: see [`Channel::keep_alive`](crate::Channel::keep_alive).
    ///
    /// ```
    /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
    /// # rxe0.register();
    /// # async fn sleep(_: Duration) {}
    /// use std::time::Duration;
    ///
    /// # async fn watch(channel: std::sync::Arc<ibverbs::AsyncChannel>) {
    /// // `sleep` is the runtime's, such as `tokio::time::sleep`.
    /// let error = channel.keep_alive(|| sleep(Duration::from_secs(5))).await;
    /// eprintln!("the peer is gone: {error}");
    /// # }
    /// ```
    #[doc(alias = "ibv_post_send")]
    pub async fn keep_alive<P: Future>(&self, mut sleep: impl FnMut() -> P) -> TransportError {
        loop {
            sleep().await;
            if let Err(error) = self.sign_of_life() {
                return error;
            }
            // Yields even if no sleep ever waits.
            let mut has_yielded = false;
            poll_fn(|cx| {
                if std::mem::replace(&mut has_yielded, true) {
                    return Poll::Ready(());
                }
                cx.waker().wake_by_ref();
                Poll::Pending
            })
            .await;
        }
    }

    /// Waits until all posted sends, writes, reads and atomics have ended, then ends everything else.
    ///
    /// Later operations, and those not yet posted, fail with [`Stopped`](TransportError::Stopped). Messages that have
    /// arrived can still be [received](Self::receive). The peer is not told. If this is dropped early, operations in
    /// flight go on, and no new ones are posted.
    pub async fn shutdown(&self) {
        self.share.lock().core.refuse_sends(self.id);
        let mut place = InLine::new(self, Queue::Send);
        poll_fn(|cx| {
            let waker = cx.waker().clone();
            let guard = self.share.lock();
            if guard.core.sends_in_flight(self.id) == 0 || !guard.core.is_draining(self.id) {
                return Poll::Ready(());
            }
            if place.wait(guard, waker).is_err() {
                // No memory for a waiter: poll again.
                cx.waker().wake_by_ref();
            }
            Poll::Pending
        })
        .await;
        // Keeps messages that arrived before the last send ended.
        self.share.lock().core.take_completions();
        stop(&self.share, self.id, TransportError::Stopped);
    }

    fn sign_of_life(&self) -> Result<(), TransportError> {
        let mut guard = self.share.lock();
        match guard.core.why_stopped(self.id) {
            Some(error) => Err(error),
            None => guard.core.sign_of_life(self.id).map(drop),
        }
    }
}
