//! Polling a queue by the extended interface (`ibv_start_poll` ..).
//!
//! Most providers hold the queue's spin lock between `ibv_start_poll` and `ibv_end_poll`. If a guard object were
//! forgotten, other threads would spin for ever. So [`ExtendedPoller::poll`] keeps the guard in its own frame, lends
//! the completions to a closure, and ends the poll even if the closure panics.
//!
//! A completion is a view of the queue's current one. It borrows the [`ExtendedCompletions`] mutably, so it ends when
//! the queue moves on.
//!
//! A poll within a poll of the same queue would never return. So a queue has one poller at a time, and polling borrows
//! it mutably. After a forgotten poller the queue gets no other.
//!
//! Before rdma-core 61, rxe releases its lock when `ibv_next_poll` finds nothing, and again in `ibv_end_poll`. A thread
//! that takes the lock in between gets the last completion a second time, and loses the lock. So on rxe each completion
//! is a poll of its own.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::time::Instant;

use super::extended_completion::{CompletionFields, ExtendedCompletion};
use super::queue::{CompletionQueue, QueueRef};
use crate::base::{Error, Result, debug, ffi};

/// Polls an [extended](crate::CompletionQueueBuilder::extended) completion queue (`struct ibv_cq_ex`) without copying
/// its completions.
///
/// It reads a field when the caller asks for it. Some fields, such as timestamps, are not in a
/// [`WorkCompletion`](crate::WorkCompletion). The queue works like any other, [`CompletionQueue::poll`] included.
///
/// ```no_run
/// # // not on Soft-RoCE alone: needs time stamps
/// use ibverbs::completion::CompletionFields;
/// use ibverbs::CompletionQueue;
///
/// # fn main() -> ibverbs::Result<()> {
/// let context = ibverbs::open("mlx5_0")?;
/// let fields = CompletionFields::BYTE_LEN | CompletionFields::TIMESTAMP;
/// let queue = CompletionQueue::builder(&context, 1024).extended(fields).build()?;
/// let mut poller = queue.extended_poller()?;
/// let bytes = poller.poll(|completions| {
///     let mut bytes = 0;
///     while let Some(completion) = completions.next()? {
///         match completion.result() {
///             Ok(success) => bytes += success.byte_len().unwrap_or(0),
///             Err(error) => eprintln!("request {}: {error}", completion.wr_id()),
///         }
///         println!("at {:?} ticks", completion.timestamp());
///     }
///     Ok::<_, ibverbs::Error>(bytes)
/// })?;
/// # Ok(())
/// # }
/// ```
#[doc(alias = "ibv_cq_ex")]
pub struct ExtendedPoller<'cq> {
    queue: QueueRef<'cq>,
    fields: CompletionFields,
    one_by_one: bool,
}

impl Drop for ExtendedPoller<'_> {
    fn drop(&mut self) {
        if let Some(extended) = self.queue.extended() {
            extended.poller.end();
        }
    }
}

impl CompletionQueue<'_> {
    /// [`ExtendedPoller::new`], which borrows the queue.
    ///
    /// # Errors
    ///
    /// Those of [`ExtendedPoller::new`].
    pub fn extended_poller(&self) -> Result<ExtendedPoller<'_>> {
        ExtendedPoller::new(self)
    }
}

impl<'cq> ExtendedPoller<'cq> {
    /// Creates a poller for a queue made with
    /// [`CompletionQueueBuilder::extended`](crate::CompletionQueueBuilder::extended).
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the queue is not an extended one.
    ///  - `EBUSY`: the queue already has a poller.
    pub fn new(queue: impl Into<QueueRef<'cq>>) -> Result<Self> {
        const VERB: &str = "ibv_start_poll";
        let queue = queue.into();
        let Some(extended) = queue.extended() else {
            return Err(Error::invalid(VERB, "the completion queue is not an extended one"));
        };
        if !extended.poller.begin() {
            let reason = "the completion queue has an extended poller already";
            return Err(Error::with_reason(VERB, libc::EBUSY, reason));
        }
        let (fields, one_by_one) = (extended.fields, extended.one_by_one);
        Ok(Self { queue, fields, one_by_one })
    }

    /// `ibv_start_poll`, `ibv_end_poll`: lends the queue's completions to `f`, one at a time. Never blocks. Lending a
    /// completion removes it from the queue.
    ///
    /// # Deadlocks
    ///
    /// While `f` has a completion, the provider may hold the queue's lock. The following may then wait for ever, until
    /// `f` returns or has asked for another completion and got none:
    ///
    ///  - any other use of the queue;
    ///  - a post to a queue pair that completes to it (mlx4, mlx5 and hns take the lock when the send queue is full);
    ///  - destroying such a queue pair or shared receive queue, or changing its state.
    #[doc(alias = "ibv_start_poll")]
    #[doc(alias = "ibv_end_poll")]
    #[inline]
    pub fn poll<R>(&mut self, f: impl FnOnce(&mut ExtendedCompletions<'_>) -> R) -> R {
        f(&mut self.completions())
    }

    /// [`poll`](Self::poll), repeated until `f` was lent a completion or a poll failed, and sleeping in between.
    ///
    /// The queue has a [channel of its own](crate::CompletionQueueBuilder::own_channel); sleeping works as in
    /// [`CompletionQueue::wait`]. `f` must ask for a completion in every call.
    ///
    /// # Errors
    ///
    /// Those of [`CompletionQueue::sleep_until`], without a deadline.
    pub fn wait<R>(&mut self, mut f: impl FnMut(&mut ExtendedCompletions<'_>) -> R) -> Result<R> {
        self.queue.sleep_until(None, || Ok(self.attempt(&mut f)))
    }

    /// [`wait`](Self::wait) until `deadline`.
    ///
    /// # Errors
    ///
    /// Those of [`wait`](Self::wait), and `ETIMEDOUT`: there was no completion before the deadline.
    pub fn wait_until<R>(
        &mut self,
        deadline: Instant,
        mut f: impl FnMut(&mut ExtendedCompletions<'_>) -> R,
    ) -> Result<R> {
        self.queue.sleep_until(Some(deadline), || Ok(self.attempt(&mut f)))
    }

    /// [`poll`](Self::poll); if `f` was lent nothing, arms the queue and polls again. See
    /// [`CompletionQueue::poll_or_arm`].
    ///
    /// Returns `None` if both polls found nothing: the next completion then raises an event. `f` must ask for a
    /// completion in every call.
    ///
    /// # Errors
    ///
    /// Those of [`CompletionQueue::arm`].
    pub fn poll_or_arm<R>(
        &mut self,
        mut f: impl FnMut(&mut ExtendedCompletions<'_>) -> R,
    ) -> Result<Option<R>> {
        if let Some(returned) = self.attempt(&mut f) {
            return Ok(Some(returned));
        }
        self.queue.arm()?;
        Ok(self.attempt(&mut f))
    }

    /// `None`: no completion, no failure.
    fn attempt<R>(&self, f: &mut impl FnMut(&mut ExtendedCompletions<'_>) -> R) -> Option<R> {
        let mut completions = self.completions();
        let returned = f(&mut completions);
        completions.eventful.then_some(returned)
    }

    /// The callers borrow the poller mutably, so one exists at a time.
    #[inline]
    fn completions(&self) -> ExtendedCompletions<'_> {
        ExtendedCompletions {
            // SAFETY: the queue is not null.
            raw: unsafe { NonNull::new_unchecked(self.queue.as_raw()) }.cast(),
            fields: self.fields,
            one_by_one: self.one_by_one,
            open: false,
            eventful: false,
            poller: PhantomData,
        }
    }

    /// The queue that it polls.
    pub fn queue(&self) -> &CompletionQueue<'cq> {
        &self.queue
    }

    /// The fields that the queue reports.
    pub fn fields(&self) -> CompletionFields {
        self.fields
    }
}

debug! { ExtendedPoller<'_>, self, queue: self.queue, fields: self.fields, .. }

/// The completions that [`ExtendedPoller::poll`] lends, one at a time: moving on changes the one that a view refers to.
///
/// ```compile_fail,E0499
/// # fn f(poller: &mut ibverbs::completion::ExtendedPoller<'_>) -> ibverbs::Result<()> {
/// poller.poll(|completions| {
///     let first = completions.next()?;
///     let second = completions.next()?;
///     println!("{first:?}"); // which is the second by now
///     Ok(())
/// })
/// # }
/// ```
///
/// A completion cannot leave the closure, or its thread, either.
///
/// ```compile_fail
/// # fn f(poller: &mut ibverbs::completion::ExtendedPoller<'_>) {
/// let kept = poller.poll(|completions| completions.next()).unwrap();
/// # }
/// ```
///
/// ```compile_fail,E0277
/// fn send<T: Send>() {}
/// send::<ibverbs::completion::ExtendedCompletions<'_>>();
/// ```
pub struct ExtendedCompletions<'p> {
    raw: NonNull<ffi::ibv_cq_ex>,
    fields: CompletionFields,
    one_by_one: bool,
    open: bool,
    /// A poll found a completion, or failed.
    eventful: bool,
    poller: PhantomData<&'p mut ()>,
}

impl Drop for ExtendedCompletions<'_> {
    #[inline]
    fn drop(&mut self) {
        self.end();
    }
}

impl ExtendedCompletions<'_> {
    /// `ibv_start_poll`, `ibv_next_poll`: the next completion, valid until the next call. `None` says that the queue is
    /// empty, and ends the poll; another call starts a new one.
    ///
    /// # Errors
    ///
    ///  - `EIO`, or the provider's errno value: the queue is broken. This completes no request: the buffers still
    ///    belong to the device.
    #[allow(clippy::should_implement_trait, reason = "what is lent cannot be an Iterator's item")]
    #[doc(alias = "ibv_start_poll")]
    #[doc(alias = "ibv_next_poll")]
    #[inline]
    pub fn next(&mut self) -> Result<Option<ExtendedCompletion<'_>>> {
        if self.open && self.one_by_one {
            self.end();
        }
        let (verb, returned) = if self.open {
            // SAFETY: the poll is open. The provider set the function.
            let next_poll = unsafe { (*self.raw.as_ptr()).next_poll.unwrap_unchecked() };
            // SAFETY: the queue is live.
            ("ibv_next_poll", unsafe { next_poll(self.raw.as_ptr()) })
        } else {
            let mut attributes = ffi::ibv_poll_cq_attr { comp_mask: 0 };
            // SAFETY: no poll is open: the one poller is borrowed. The provider set the function.
            let start_poll = unsafe { (*self.raw.as_ptr()).start_poll.unwrap_unchecked() };
            // SAFETY: the queue is live.
            ("ibv_start_poll", unsafe { start_poll(self.raw.as_ptr(), &mut attributes) })
        };
        if returned == 0 {
            self.open = true;
            self.eventful = true;
            // SAFETY: the poll is open until the borrow ends. Creating the queue checked the functions.
            return Ok(Some(unsafe { ExtendedCompletion::new(self.raw, self.fields) }));
        }
        self.end();
        if returned == libc::ENOENT {
            return Ok(None);
        }
        self.eventful = true;
        // mlx5 and hns return negative numbers.
        Err(Error::new(verb, returned.max(0)))
    }

    #[inline]
    fn end(&mut self) {
        if std::mem::take(&mut self.open) {
            // SAFETY: the poll is open. The provider set the function.
            let end_poll = unsafe { (*self.raw.as_ptr()).end_poll.unwrap_unchecked() };
            // SAFETY: the queue is live.
            unsafe { end_poll(self.raw.as_ptr()) }
        }
    }
}

debug! { ExtendedCompletions<'_>, self, fields: self.fields, open: self.open, .. }
