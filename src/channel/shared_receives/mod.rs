//! A shared receive queue that feeds channels.

mod receives;
mod table;

pub(super) use receives::Receives;
pub(super) use table::Member;

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Instant;

use super::wait::Wait;
use super::{Channel, OperationError, OwnedBuffer, OwnedResult, TransportError};
use crate::completion::{WorkCompletion, WorkSuccess};
use crate::debug::debug;
use crate::domain::ProtectionDomain;
use crate::error::{Error, Result};
use crate::ffi;
use crate::parent::Parent;
use crate::queue_pair::SharedReceiveQueue;

/// Receives that many channels share: a [`SharedReceiveQueue`] that owns the buffers of what is posted to it.
///
/// A message takes the next receive, whichever channel it arrives on. So a server needs as many buffers as
/// messages arrive at a time, and not as many as it has peers times what each may send. Each message goes to the
/// channel that it arrived on: [`poll`](Self::poll) and [`wait`](Self::wait) take it, with its buffer.
///
/// A channel that is built [with it](crate::ChannelBuilder::shared_receive_queue) posts no receives of its own.
/// Its completion queue has room for the [capacity](Self::capacity), too. Many channels of one thread share receives
/// of [their loop](crate::Loop::add_shared_receives), which needs that room once.
///
/// A clone is the same queue. Any thread may post. The queue is destroyed, and the buffers dropped, when the last
/// clone and the last channel are dropped.
///
/// # Keeping it filled
///
/// If no receive is posted, peers retry ([`max_rnr_retries`](crate::ChannelBuilder::max_rnr_retries)), and then
/// their connections fail. So post a buffer for each message that was taken. To have memory follow the load,
/// start with few buffers and post more when [`posted`](Self::posted) gets low: look at it after each message, or
/// let the device raise an event ([`set_limit`](Self::set_limit)).
///
/// ```no_run
/// # // not on Soft-RoCE alone: needs peers
/// use std::sync::Arc;
/// use std::time::{Duration, Instant};
/// use ibverbs::{AccessFlags, BufferPool, Channel, ProtectionDomain, SharedReceives};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let context = Arc::new(ibverbs::open("rxe0")?);
/// let domain = Arc::new(ProtectionDomain::new(&context)?);
/// let receives = SharedReceives::new(&domain, 256)?;
/// let pool = BufferPool::new(&domain, 4096, 256, AccessFlags::empty())?;
/// while receives.posted() < 64 {
///     receives.post(pool.take().ok_or("all buffers are in use")?)?;
/// }
/// let mut channels = Vec::new();
/// for _ in 0..4 {
///     let prepared = Channel::builder(&domain).shared_receive_queue(&receives).build()?;
///     let deadline = Instant::now() + Duration::from_secs(10);
///     let (channel, _) = prepared.connect("server:18515", b"", deadline)?;
///     channels.push(channel);
/// }
/// loop {
///     for (peer, channel) in channels.iter_mut().enumerate() {
///         while let Some((buffer, success)) = receives.poll(channel)? {
///             println!("peer {peer}: {} bytes", success.byte_len());
///             receives.post(buffer)?;
///         }
///     }
///     # break;
/// }
/// # Ok(())
/// # }
/// ```
///
/// # When a channel ends
///
/// Messages that nobody has taken are dropped with their channel, and so is what arrives late: the buffers are
/// free again, and [`posted`](Self::posted) is smaller by as many. Nothing posts them again by itself.
///
/// A receive whose completion never comes stays posted, with its buffer, until the queue is destroyed: only
/// that proves that the device does not use it. On a device that does not complete the receive of a message that
/// was half there when the connection ended, each such end costs one receive, which `posted` still counts.
pub struct SharedReceives<B: OwnedBuffer> {
    receives: Arc<Receives>,
    buffer: PhantomData<fn(B) -> B>,
}

impl<B: OwnedBuffer> SharedReceives<B> {
    /// `ibv_create_srq`: creates a shared receive queue for at most `capacity` receives at a time, of one buffer
    /// each.
    ///
    /// # Errors
    ///
    /// Those of [`SharedReceiveQueue::new`].
    #[doc(alias = "ibv_create_srq")]
    pub fn new(
        domain: impl Into<Parent<'static, ProtectionDomain<'static>>>,
        capacity: u32,
    ) -> Result<Self> {
        let queue = SharedReceiveQueue::new(domain, capacity, 1)?;
        Ok(Self { receives: Arc::new(Receives::new(queue, capacity)?), buffer: PhantomData })
    }

    /// `ibv_post_srq_recv`: posts a receive for the next message of any of the channels. The message must not be
    /// longer than the buffer, so use buffers of one length.
    ///
    /// # Errors
    ///
    /// The buffer comes back in the [`OperationError`], unless the provider may have queued the receive: then the
    /// buffer stays with the queue.
    ///
    ///  - [`QueueFull`](TransportError::QueueFull): [`capacity`](Self::capacity) receives are posted, or have
    ///    messages that were not taken.
    ///  - [`Verbs`](TransportError::Verbs): `EINVAL`, the buffer is longer than 4 GiB - 1 bytes; `EIO`, the device
    ///    is gone.
    #[doc(alias = "ibv_post_srq_recv")]
    pub fn post(&self, buffer: B) -> Result<(), OperationError<B>> {
        self.receives.post(buffer)
    }

    /// The number of receives that are posted and have no message yet, as far as completions were polled.
    pub fn posted(&self) -> u32 {
        self.receives.posted()
    }

    /// The most receives that can be posted, including those whose messages were not taken yet.
    pub fn capacity(&self) -> u32 {
        self.receives.capacity()
    }

    /// `ibv_modify_srq`: has the device raise an event, once, when fewer than `limit` receives are posted. See
    /// [`SharedReceiveQueue::set_limit`]. 0 disarms it.
    ///
    /// [`AsyncEvents`](crate::AsyncEvents) deliver it, as
    /// [`SharedReceiveQueueLimit`](crate::AsyncEventKind::SharedReceiveQueueLimit) of the
    /// [token](Self::set_token). They can be waited for, with a deadline or in an event loop.
    ///
    /// ```no_run
    /// # // not on Soft-RoCE alone: waits for an event
    /// # fn refill(context: &ibverbs::Context<'_>, receives: &ibverbs::SharedReceives<ibverbs::PooledBuffer>, pool: &ibverbs::BufferPool) -> Result<(), Box<dyn std::error::Error>> {
    /// use ibverbs::{AsyncEventKind, AsyncEventSubject};
    ///
    /// receives.set_token(7);
    /// receives.set_limit(16)?;
    /// let events = context.async_events()?; // readable (`AsFd`) when there is one
    /// loop {
    ///     let event = events.wait()?;
    ///     if event.kind() == AsyncEventKind::SharedReceiveQueueLimit
    ///         && event.subject() == AsyncEventSubject::SharedReceiveQueue(7)
    ///     {
    ///         for _ in 0..64 {
    ///             receives.post(pool.take().ok_or("all buffers are in use")?)?;
    ///         }
    ///         receives.set_limit(16)?;
    ///     }
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`SharedReceiveQueue::set_limit`].
    #[doc(alias = "ibv_modify_srq")]
    pub fn set_limit(&self, limit: u32) -> Result<()> {
        self.receives.queue().set_limit(limit)
    }

    /// The number by which [`AsyncEvents`](crate::AsyncEvents) name this queue (0 unless set).
    #[doc(alias = "srq_context")]
    pub fn token(&self) -> usize {
        self.receives.queue().token()
    }

    /// Sets the number by which [`AsyncEvents`](crate::AsyncEvents) name this queue.
    #[doc(alias = "srq_context")]
    pub fn set_token(&self, to: usize) {
        self.receives.queue().set_token(to);
    }

    /// Takes the oldest message of a channel, if there is one. Polls once if there is none, without waiting.
    ///
    /// The result is that of a [receive](Channel::receive). If it is an error, the connection has failed.
    ///
    /// # Errors
    ///
    ///  - [`Verbs`](TransportError::Verbs), [`UnknownCompletion`](TransportError::UnknownCompletion):
    ///    polling failed.
    ///  - [`UnknownWork`](TransportError::UnknownWork): the channel was not built with these receives.
    pub fn poll(&self, channel: &mut Channel<'_>) -> OwnedResult<B, Option<(B, WorkSuccess)>> {
        if let Some(message) = self.take(channel)? {
            return Ok(Some(message));
        }
        channel.core().release_dropped();
        // A completion of another operation may come before that of a message.
        while channel.core().settle()? && !self.is_there(channel) {}
        self.take(channel)
    }

    /// Waits until the channel has a message, however long that takes.
    ///
    /// # Errors
    ///
    /// As [`poll`](Self::poll), and
    ///
    ///  - [`Stopped`](TransportError::Stopped), [`Closed`](TransportError::Closed): the channel is stopped.
    ///  - [`Verbs`](TransportError::Verbs): `ENOTCONN`, the connection has failed. A wait that spins notices this
    ///    within about a second, one that [sleeps](crate::ChannelBuilder::sleep_after) only when it is woken.
    ///  - [`Cancelled`](TransportError::Cancelled): a [cancel handle](crate::CancelHandle) was used.
    pub fn wait(&self, channel: &mut Channel<'_>) -> OwnedResult<B> {
        match self.wait_with(channel, None)? {
            Some(message) => Ok(message),
            // Without a deadline there is no time-out.
            None => Err(TransportError::TimedOut.into()),
        }
    }

    /// As [`wait`](Self::wait), but returns `None` if the deadline passes first. Nothing is stopped then.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait).
    pub fn wait_until(
        &self,
        channel: &mut Channel<'_>,
        deadline: Instant,
    ) -> OwnedResult<B, Option<(B, WorkSuccess)>> {
        self.wait_with(channel, Some(deadline))
    }

    fn wait_with(
        &self,
        channel: &mut Channel<'_>,
        deadline: Option<Instant>,
    ) -> OwnedResult<B, Option<(B, WorkSuccess)>> {
        let mut wait = Wait::new(deadline);
        loop {
            if let Some(message) = self.poll(channel)? {
                return Ok(Some(message));
            }
            let core = channel.core();
            if let Some(reason) = core.why_no_message_comes() {
                return Err(reason.into());
            }
            let cancel = core.cancel.get().map(|cancel| &**cancel);
            let waited =
                wait.on_empty_poll(core.sleep.as_ref(), cancel, || core.check_connection());
            match waited {
                Err(TransportError::TimedOut) => return Ok(None),
                waited => waited?,
            }
        }
    }

    /// Takes the oldest message of the channel, without polling.
    pub(crate) fn take(
        &self,
        channel: &mut Channel<'_>,
    ) -> OwnedResult<B, Option<(B, WorkSuccess)>> {
        let member = match &channel.core().receives {
            Some((receives, member)) if Arc::ptr_eq(receives, &self.receives) => *member,
            _ => return Err(TransportError::UnknownWork.into()),
        };
        let Some((buffer, completion)) = self.receives.next(member) else { return Ok(None) };
        // All buffers are of this type: `post` takes no others.
        let buffer = buffer.take().ok_or(TransportError::UnknownWork)?;
        match WorkCompletion::from(completion).result() {
            Ok(success) => Ok(Some((buffer, success))),
            Err(error) => Err(OperationError { error: error.into(), buffer: Some(buffer) }),
        }
    }

    fn is_there(&self, channel: &Channel<'_>) -> bool {
        channel.has_shared_message()
    }

    /// The C object. It is valid while this or a channel that was built with it exists. Do not post to it.
    pub fn as_raw(&self) -> *mut ffi::ibv_srq {
        self.receives.queue().as_raw()
    }

    /// `ibv_destroy_srq`: destroys the queue, and reports a failure. Dropping it ignores a failure.
    ///
    /// # Errors
    ///
    ///  - `EBUSY`: a channel or a clone still exists. The queue is destroyed with the last of them.
    ///  - Those of [`SharedReceiveQueue::close`]. The buffers that are posted are then leaked too.
    #[doc(alias = "ibv_destroy_srq")]
    pub fn close(self) -> Result<()> {
        match Arc::try_unwrap(self.receives) {
            Ok(receives) => receives.close(),
            Err(_) => Err(in_use()),
        }
    }

    pub(super) fn shared(&self) -> &Arc<Receives> {
        &self.receives
    }
}

#[cold]
fn in_use() -> Error {
    let reason = "a channel that uses the shared receive queue, or a clone of it, still exists";
    Error::with_reason("ibv_destroy_srq", libc::EBUSY, reason)
}

impl Channel<'_> {
    /// Whether a message of [`SharedReceives`] is there that nobody has taken.
    pub(crate) fn has_shared_message(&self) -> bool {
        let receives = self.core().receives.as_ref();
        receives.is_some_and(|(receives, member)| receives.has_message(*member))
    }
}

impl<B: OwnedBuffer> Clone for SharedReceives<B> {
    fn clone(&self) -> Self {
        Self { receives: self.receives.clone(), buffer: PhantomData }
    }
}

debug! {
    impl[B: OwnedBuffer] SharedReceives<B>, self,
    capacity: self.capacity(), posted: self.posted(), ..
}
