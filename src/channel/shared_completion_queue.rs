//! A completion queue that several channels share.

use std::iter::FusedIterator;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use super::polled::{Found, Polled, PolledCompletion};
use super::router::Router;
use crate::completion::CompletionQueue;
use crate::debug::debug;
use crate::device::Context;
use crate::error::{Error, ErrorKind, Result};
use crate::ffi;
use crate::parent::Parent;

/// A completion queue that serves several [`Channel`](crate::Channel)s, which may be on different
/// threads.
///
/// A channel that polls takes all completions that are there, and puts those of other channels into
/// their inboxes. No completion is lost and nothing is allocated. A lock guards the inboxes, so a channel
/// with a completion queue of its own is faster.
///
/// The queue has room for a fixed number of completions. Each channel reserves its depth
/// ([`max_send_wr`](crate::ChannelBuilder::max_send_wr) plus
/// [`max_recv_wr`](crate::ChannelBuilder::max_recv_wr)) from when it is built until it is dropped.
///
/// # Many channels on one thread
///
/// [`poll`](Self::poll) returns a channel that has something, by its number and its
/// [token](crate::ChannelBuilder::token). The program then takes **all** that this channel has, with
/// [`poll_token`](crate::Channel::poll_token) until that returns `None`, or by polling its handles. A
/// channel is returned again when more has come. Channels take turns: one that is always busy is returned
/// as often as any other that has something.
///
/// A blocking send of a channel, or another of its waits, polls also messages of that channel. At its end `poll` returns
/// the channel, if the messages are results of operations with tokens, or of
/// [`SharedReceives`](crate::SharedReceives), and a thread that sleeps in [`wait`](Self::wait) is woken. The program has to
/// poll its handles itself. The [descriptor](Self::event_fd) does not tell of it: the thread of an event loop should use
/// the channels itself, or be told by the threads that do.
///
/// ```no_run
/// # // not on Soft-RoCE alone: needs peers
/// use std::sync::Arc;
/// use std::time::{Duration, Instant};
/// use ibverbs::{
///     AccessFlags, BufferPool, Channel, ProtectionDomain, ReceiveWorkRequest, SharedCompletionQueue,
/// };
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let context = Arc::new(ibverbs::open("rxe0")?);
/// let domain = Arc::new(ProtectionDomain::new(&context)?);
/// let queue = Arc::new(SharedCompletionQueue::with_event_channel(&context, 1024)?);
/// let pool = BufferPool::new(&domain, 4096, 256, AccessFlags::empty())?;
/// let mut channels = Vec::new();
/// for token in 0..4 {
///     let builder = Channel::builder(&domain).shared_completion_queue(&queue).token(token);
///     let deadline = Instant::now() + Duration::from_secs(10);
///     let (mut channel, _) = builder.build()?.connect("server:18515", b"", deadline)?;
///     let buffer = pool.take().ok_or("all buffers are in use")?;
///     let receive = channel.post_owned(ReceiveWorkRequest::new(buffer))?;
///     if let Err(handle) = receive.into_token(&mut channel, 0) {
///         return Err(format!("{handle:?} is not of this channel").into());
///     }
///     channels.push(channel);
/// }
/// loop {
///     let ready = queue.wait()?; // sleeps until a channel has something
///     while let Some(ended) = channels[ready.token as usize].poll_token()? {
///         println!("channel {}: {:?}", ready.token, ended.result);
///     }
///     # break;
/// }
/// # Ok(())
/// # }
/// ```
///
/// # In an event loop
///
/// A queue that was made [with an event channel](Self::with_event_channel) has a
/// [descriptor](Self::event_fd) that becomes readable. Before the loop sleeps, it calls [`arm`](Self::arm),
/// and then [`poll`](Self::poll) until that returns `None`. In this order no completion is missed, even if
/// the loop is edge-triggered:
///
/// ```
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// # fn sleep_until_readable(_: std::os::fd::BorrowedFd<'_>) {}
/// # fn serve(_: ibverbs::ReadyChannel) {}
/// # fn run(queue: &ibverbs::SharedCompletionQueue<'_>) -> ibverbs::Result<()> {
/// loop {
///     queue.arm()?;
///     for ready in queue.ready() {
///         serve(ready?);
///     }
///     sleep_until_readable(queue.event_fd()?);
///     # break;
/// }
/// # Ok(())
/// # }
/// ```
///
/// One loop at a time can sleep on the descriptor. [`wait`](Self::wait), and channels that
/// [sleep](crate::ChannelBuilder::sleep_after), read the events themselves, so the loop would miss those:
/// use either these or the descriptor.
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

    /// `ibv_create_comp_channel`, `ibv_create_cq`: creates a completion queue that can wake threads and
    /// event loops: see [`wait`](Self::wait) and [`event_fd`](Self::event_fd).
    ///
    /// # Errors
    ///
    /// Those of [`CompletionQueue::new`] and [`CompletionChannel::new`](crate::CompletionChannel::new).
    #[doc(alias = "ibv_create_cq")]
    pub fn with_event_channel(
        context: impl Into<Parent<'ctx, Context<'ctx>>>,
        entries: u32,
    ) -> Result<Self> {
        Ok(CompletionQueue::builder(context, entries).own_channel().build()?.into())
    }

    /// `ibv_poll_cq`: returns a channel that has something, or `None`. It never waits.
    ///
    /// # Errors
    ///
    /// Those of [`CompletionQueue::poll`].
    #[doc(alias = "ibv_poll_cq")]
    pub fn poll(&self) -> Result<Option<ReadyChannel>> {
        let ready = self.router.next_ready()?;
        Ok(ready.map(|(number, token)| ReadyChannel { number, token }))
    }

    /// As [`poll`](Self::poll), for a caller that hands completions to the channels itself.
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

    /// The channels that have something: [`poll`](Self::poll) until it returns `None` or an error.
    pub fn ready(&self) -> ReadyChannels<'_, 'ctx> {
        ReadyChannels { queue: self, ended: false }
    }

    /// `ibv_req_notify_cq`: from now on, the next completion makes the [descriptor](Self::event_fd)
    /// readable. Until then the descriptor is not readable: an earlier event is read.
    ///
    /// What is there already raises no event: [`poll`](Self::poll) between this and sleeping, until that
    /// returns `None`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the queue has no event channel of its own, or wakes for solicited completions only.
    ///  - `EIO`: the device is gone.
    #[doc(alias = "ibv_req_notify_cq")]
    pub fn arm(&self) -> Result<()> {
        self.check_wakes()?;
        self.queue.rearm_own()
    }

    /// Returns a channel that has something, sleeping until there is one. Several threads may wait at the
    /// same time. A signal does not end the wait.
    ///
    /// # Errors
    ///
    /// Those of [`poll`](Self::poll) and [`arm`](Self::arm), and
    ///
    ///  - `EMFILE`, `ENFILE`, `ENOMEM` of `eventfd`: the first wait needs a file of its own.
    pub fn wait(&self) -> Result<ReadyChannel> {
        self.sleep_until(None)
    }

    /// As [`wait`](Self::wait), but returns `None` if the deadline passes first.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait).
    pub fn wait_until(&self, deadline: Instant) -> Result<Option<ReadyChannel>> {
        match self.sleep_until(Some(deadline)) {
            Ok(ready) => Ok(Some(ready)),
            Err(error) if error.kind() == ErrorKind::TimedOut => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn sleep_until(&self, deadline: Option<Instant>) -> Result<ReadyChannel> {
        self.check_wakes()?;
        if !self.router.wakes_without_event() {
            self.router.wake_without_event(self.queue.wakeable()?);
        }
        self.queue.sleep_until_found(deadline, || self.poll(), || self.router.is_any_ready())
    }

    /// The file that is readable when there is an event. Only wait for it; [`arm`](Self::arm) reads from
    /// it.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the queue has no event channel of its own, or wakes for solicited completions only.
    pub fn event_fd(&self) -> Result<BorrowedFd<'_>> {
        self.check_wakes()?;
        Ok(self.queue.own_channel()?.channel().as_fd())
    }

    /// The sends of a channel are not solicited.
    fn check_wakes(&self) -> Result<()> {
        if self.queue.is_solicited_only() {
            let reason = "the completion queue wakes for solicited completions only";
            return Err(Error::invalid("ibv_req_notify_cq", reason));
        }
        Ok(())
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

/// A channel that has something: see [`SharedCompletionQueue::poll`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub struct ReadyChannel {
    /// The channel's [number](crate::Channel::number).
    pub number: u32,
    /// What [`ChannelBuilder::token`](crate::ChannelBuilder::token) was given, or 0.
    pub token: u64,
}

/// The channels of a [`SharedCompletionQueue`] that have something: see
/// [`ready`](SharedCompletionQueue::ready).
#[derive(Debug)]
pub struct ReadyChannels<'a, 'ctx> {
    queue: &'a SharedCompletionQueue<'ctx>,
    ended: bool,
}

impl Iterator for ReadyChannels<'_, '_> {
    type Item = Result<ReadyChannel>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let ready = self.queue.poll().transpose();
        self.ended = !matches!(ready, Some(Ok(_)));
        ready
    }
}

impl FusedIterator for ReadyChannels<'_, '_> {}

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

debug! { SharedCompletionQueue<'_>, self, queue: self.queue, available: self.available(), .. }
