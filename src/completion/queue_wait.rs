//! Sleeping until a completion queue has completions, and arming it.

#[cfg(feature = "async")]
use std::os::fd::AsFd;
#[cfg(feature = "channel")]
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use super::queue::CompletionQueue;
use super::waiters::Waiters;
use super::work_completion::WorkCompletion;
use crate::error::{Error, Result};
use crate::ffi;

impl CompletionQueue<'_> {
    /// `ibv_poll_cq`, for a queue with a [channel of its own](crate::CompletionQueueBuilder::own_channel):
    /// sleeps until there is at least one completion, then takes the oldest, at most as many as
    /// `completions` has room for.
    ///
    /// It takes completions that are in the queue already without sleeping. Otherwise it arms the
    /// queue, polls again, and sleeps until the queue's event, so it misses no completion in between.
    /// Any number of threads can wait for the same queue; an event wakes all of them, and those that
    /// find nothing go back to sleep. A signal does not end the wait (`EINTR` is retried).
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the queue has no channel of its own, or `completions` is empty.
    ///  - `EOPNOTSUPP`: the device cannot arm a queue for solicited completions only.
    ///  - `EIO`: the device is gone.
    ///  - those of [`poll`](Self::poll).
    #[doc(alias = "ibv_req_notify_cq")]
    #[doc(alias = "ibv_get_cq_event")]
    pub fn wait<'c>(&self, completions: &'c mut [WorkCompletion]) -> Result<&'c [WorkCompletion]> {
        self.wait_with(completions, None)
    }

    /// [`wait`](Self::wait), but not after `deadline`.
    ///
    /// # Errors
    ///
    ///  - `ETIMEDOUT`: there was no completion before the deadline.
    ///  - those of [`wait`](Self::wait).
    pub fn wait_until<'c>(
        &self,
        completions: &'c mut [WorkCompletion],
        deadline: Instant,
    ) -> Result<&'c [WorkCompletion]> {
        self.wait_with(completions, Some(deadline))
    }

    fn wait_with<'c>(
        &self,
        completions: &'c mut [WorkCompletion],
        deadline: Option<Instant>,
    ) -> Result<&'c [WorkCompletion]> {
        let reason = "there is no room for a completion";
        Error::invalid_if(completions.is_empty(), "ibv_poll_cq", reason)?;
        let found = self.sleep_until(deadline, || {
            Ok(Some(self.poll(completions)?.len()).filter(|&found| found > 0))
        })?;
        Ok(&completions[..found])
    }

    /// Returns what `poll` finds; while it finds nothing, sleeps until the queue may have completions, and polls again. It is
    /// [`wait_until`](Self::wait_until) for a program that polls in a way of its own. No lock is held while `poll` runs.
    ///
    /// ```no_run
    /// # // waits for a completion
    /// # fn wait(queue: &ibverbs::CompletionQueue<'_>, deadline: std::time::Instant) -> ibverbs::Result<()> {
    /// let mut completions = [ibverbs::WorkCompletion::default(); 64];
    /// let failed = queue.sleep_until(Some(deadline), || {
    ///     let polled = queue.poll(&mut completions)?;
    ///     Ok(polled.iter().find_map(|completion| completion.result().err()))
    /// })?;
    /// println!("the first request that has failed: {failed}");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    ///  - `ETIMEDOUT`: `poll` has found nothing before the deadline.
    ///  - `EINVAL`: the queue has no channel of its own.
    ///  - `EOPNOTSUPP`: the device cannot arm a queue for solicited completions only.
    ///  - `EIO`: the device is gone.
    ///  - those of `poll`.
    #[doc(alias = "ibv_req_notify_cq")]
    #[doc(alias = "ibv_get_cq_event")]
    pub fn sleep_until<R>(
        &self,
        deadline: Option<Instant>,
        poll: impl FnMut() -> Result<Option<R>>,
    ) -> Result<R> {
        self.sleep_until_found(deadline, poll, || false)
    }

    /// As [`sleep_until`](Self::sleep_until), for a `poll` that also finds what the queue raises no event for. After
    /// `is_found` becomes true of that, [`Waiters::wake_all`] must be called.
    pub(crate) fn sleep_until_found<R>(
        &self,
        deadline: Option<Instant>,
        poll: impl FnMut() -> Result<Option<R>>,
        is_found: impl Fn() -> bool,
    ) -> Result<R> {
        let channel = self.own_channel()?;
        // SAFETY: it is this queue's, which is live.
        unsafe { channel.sleep_until(self.as_raw(), deadline, poll, is_found, || self.arm()) }
    }

    /// The first half of sleeping on the queue's own channel: arms the queue. If a poll finds nothing
    /// after this, [`sleep`](Self::sleep) with the returned value misses no completion.
    pub(crate) fn arm_own(&self) -> Result<u64> {
        self.own_channel()?.arm(|| self.arm())
    }

    /// Arms the queue for a caller that sleeps until the queue's own channel is readable. Reads the event of
    /// the last arming first.
    pub(crate) fn rearm_own(&self) -> Result<()> {
        // SAFETY: it is this queue's, which is live.
        unsafe { self.own_channel()?.rearm(self.as_raw(), || self.arm()) }
    }

    /// The files that a reactor waits for: when one is readable, it polls, and calls [`rearm_own`](Self::rearm_own) before it
    /// sleeps.
    #[cfg(feature = "async")]
    pub(crate) fn files(&self) -> Result<[Option<BorrowedFd<'_>>; 2]> {
        let channel = self.own_channel()?;
        // SAFETY: it is this queue's, which is live.
        Ok([Some(channel.channel().as_fd()), unsafe { channel.attend(self.as_raw()) }])
    }

    /// The same as one file.
    #[cfg(feature = "channel")]
    pub(crate) fn ready_file(&self) -> Result<BorrowedFd<'_>> {
        // SAFETY: it is this queue's, which is live.
        Ok(unsafe { self.own_channel()?.ready(self.as_raw()) })
    }

    /// The second half: sleeps until the queue has raised an event since it was armed, or until `cancelled`
    /// returns true. After that becomes true, [`Waiters::wake_all`] must be called.
    pub(crate) fn sleep(
        &self,
        seen: u64,
        deadline: Option<Instant>,
        cancelled: impl Fn() -> bool,
    ) -> Result<()> {
        // SAFETY: it is this queue's, which is live.
        unsafe { self.own_channel()?.wait(self.as_raw(), seen, deadline, cancelled) }
    }

    /// Checks that the kernel still has the device, by a query that the kernel must then answer.
    ///
    /// # Errors
    ///
    ///  - `EIO`, `ENODEV`: the device is gone.
    pub(crate) fn check_device(&self) -> Result<()> {
        match self.context().query_device() {
            Err(error) if matches!(error.errno(), libc::EIO | libc::ENODEV) => Err(error),
            // Other failures do not concern the device.
            _ => Ok(()),
        }
    }

    /// The threads that sleep on the queue's own channel. Those that begin to sleep after this call can be
    /// woken.
    pub(crate) fn wakeable(&self) -> Result<Arc<Waiters>> {
        self.own_channel()?.wakeable()
    }

    /// `ibv_poll_cq`, then `ibv_req_notify_cq`: takes the oldest completions; if there are none, arms
    /// the queue and polls again. If it returns an empty slice, the queue is armed and empty: the next
    /// completion raises an event on the queue's channel.
    ///
    /// An event loop calls this until it returns an empty slice; see [`CompletionChannel`](crate::CompletionChannel).
    ///
    /// # Errors
    ///
    ///  - those of [`poll`](Self::poll) and [`arm`](Self::arm).
    ///  - `EINVAL`: `completions` is empty.
    #[doc(alias = "ibv_poll_cq")]
    #[doc(alias = "ibv_req_notify_cq")]
    pub fn poll_or_arm<'c>(
        &self,
        completions: &'c mut [WorkCompletion],
    ) -> Result<&'c [WorkCompletion]> {
        let reason = "there is no room for a completion";
        Error::invalid_if(completions.is_empty(), "ibv_poll_cq", reason)?;
        let found = self.poll(completions)?.len();
        if found > 0 {
            return Ok(&completions[..found]);
        }
        self.arm()?;
        self.poll(completions)
    }

    /// `ibv_req_notify_cq`: arms the queue. The next completion that is added, or the next solicited
    /// one if the queue is [for those](crate::CompletionQueueBuilder::solicited_only), raises one event.
    ///
    /// Completions that are already in the queue raise no event: poll after arming, before going to
    /// sleep. [`poll_or_arm`](Self::poll_or_arm) does that.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the queue has no channel.
    ///  - `EOPNOTSUPP`: the device cannot arm a queue for solicited completions only.
    #[doc(alias = "ibv_req_notify_cq")]
    #[inline]
    pub fn arm(&self) -> Result<()> {
        const VERB: &str = "ibv_req_notify_cq";
        // SAFETY: the queue is live.
        if unsafe { (*self.as_raw()).channel.is_null() } {
            return Err(Error::invalid(VERB, "the completion queue was made without a channel"));
        }
        // SAFETY: the queue is live.
        let returned =
            unsafe { ffi::ibv_req_notify_cq(self.as_raw(), self.is_solicited_only().into()) };
        ffi::status(VERB, returned)
    }
}
