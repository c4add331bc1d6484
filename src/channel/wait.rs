use std::cell::OnceCell;
use std::hint;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::error::{TransportError, TransportResult};
use crate::base::{ErrorKind, Result, debug};
use crate::verbs::completion::{CompletionQueue, Waiters};

/// A reading of the clock costs about as much as a poll.
const POLLS_PER_CLOCK_READING: u32 = 64;

/// In polls, how often `DEVICE_CHECK_PERIOD` is looked at.
const POLLS_PER_DEVICE_CHECK: u32 = 1 << 14;

/// An unplugged device completes nothing: without checks, a wait without a deadline would never end.
pub(crate) const DEVICE_CHECK_PERIOD: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug)]
pub(super) struct Sleep {
    /// Empty polls.
    pub(super) after: u32,
    /// It has its own completion channel. It lives as long as the core, whose queue pair holds it.
    pub(super) queue: *const CompletionQueue<'static>,
}

impl Sleep {
    pub(super) fn wakeable(&self) -> Result<Arc<Waiters>> {
        // SAFETY: the queue lives as long as the core that this is part of.
        unsafe { &*self.queue }.wakeable()
    }
}

#[derive(Debug)]
pub(super) struct Wait {
    deadline: Option<Instant>,
    empty_polls: u32,
    /// The count of the queue's events when it was armed, before the latest poll.
    armed: Option<u64>,
    /// The last check, or the time when the first was due.
    device_checked: Option<Instant>,
}

impl Wait {
    pub(super) fn new(deadline: Option<Instant>) -> Self {
        Self { deadline, empty_polls: 0, armed: None, device_checked: None }
    }

    /// # Errors
    ///
    ///  - [`TimedOut`](TransportError::TimedOut): the deadline has passed.
    ///  - [`Cancelled`](TransportError::Cancelled): a cancel handle was used.
    ///  - [`Verbs`](TransportError::Verbs): sleeping failed, or `check_device` did.
    #[inline]
    pub(super) fn on_empty_poll(
        &mut self,
        sleep: Option<&Sleep>,
        cancel: Option<&Cancel>,
        check_device: impl FnOnce() -> Result<()>,
    ) -> TransportResult<()> {
        // The first empty poll too: the deadline may have passed before the wait.
        if self.empty_polls.is_multiple_of(POLLS_PER_CLOCK_READING) {
            if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(TransportError::TimedOut);
            }
            if cancel.is_some_and(Cancel::take) {
                return Err(TransportError::Cancelled);
            }
            if self.empty_polls.is_multiple_of(POLLS_PER_DEVICE_CHECK) {
                self.check_device_if_due(check_device)?;
            }
        }
        self.empty_polls = self.empty_polls.wrapping_add(1);
        match sleep {
            Some(sleep) if self.empty_polls > sleep.after => self.arm_or_sleep(sleep, cancel),
            _ => {
                hint::spin_loop();
                Ok(())
            }
        }
    }

    #[cold]
    fn check_device_if_due(
        &mut self,
        check_device: impl FnOnce() -> Result<()>,
    ) -> TransportResult<()> {
        let now = Instant::now();
        let checked = *self.device_checked.get_or_insert(now);
        if now.saturating_duration_since(checked) >= DEVICE_CHECK_PERIOD {
            check_device()?;
            self.device_checked = Some(now);
        }
        Ok(())
    }

    /// The first call arms. If the next poll finds nothing either, the second sleeps.
    #[cold]
    fn arm_or_sleep(&mut self, sleep: &Sleep, cancel: Option<&Cancel>) -> TransportResult<()> {
        // SAFETY: the queue lives as long as the core that lends its `Sleep`.
        let queue = unsafe { &*sleep.queue };
        match self.armed.take() {
            None => self.armed = Some(queue.arm_own()?),
            Some(events) => {
                let cancelled = || cancel.is_some_and(Cancel::is_pending);
                match queue.sleep(events, self.deadline, cancelled) {
                    // Poll once more, then read the clock.
                    Err(error) if error.kind() == ErrorKind::TimedOut => self.empty_polls = 0,
                    woken => woken?,
                }
                if cancelled() {
                    // Poll once more, then look at the handle.
                    self.empty_polls = 0;
                }
            }
        }
        Ok(())
    }
}

pub(super) struct Cancel {
    cancelled: AtomicBool,
    /// `None` if the channel never sleeps.
    waiters: Option<Arc<Waiters>>,
}

impl Cancel {
    /// No wait has reported it yet.
    pub(super) fn is_pending(&self) -> bool {
        self.cancelled.load(Ordering::Acquire)
    }

    /// For the wait that then returns `Cancelled`.
    pub(super) fn take(&self) -> bool {
        self.is_pending() && self.cancelled.swap(false, Ordering::AcqRel)
    }
}

/// Ends a wait of a [`Channel`](crate::Channel) from another thread: see [`Channel::cancel_handle`](crate::Channel::cancel_handle).
///
/// A handle may outlive its channel; it then does nothing.
#[derive(Clone)]
pub struct CancelHandle(Arc<Cancel>);

impl CancelHandle {
    /// Makes the first handle, or copies it.
    pub(super) fn of(cancel: &OnceCell<Arc<Cancel>>, sleep: Option<Sleep>) -> Result<Self> {
        if let Some(cancel) = cancel.get() {
            return Ok(Self(cancel.clone()));
        }
        let waiters = sleep.map(|sleep| sleep.wakeable()).transpose()?;
        let first = Arc::new(Cancel { cancelled: AtomicBool::new(false), waiters });
        Ok(Self(cancel.get_or_init(|| first).clone()))
    }

    /// Ends the wait that the channel is in, or else the next one that finds its operation still in flight.
    /// The wait returns [`Cancelled`](crate::TransportError::Cancelled) soon, also if it sleeps.
    ///
    /// One call ends one wait; several calls before that wait count as one. An operation that ends first
    /// gives its result, and the next wait is cancelled instead: see [`is_pending`](Self::is_pending).
    pub fn cancel(&self) {
        self.0.cancelled.store(true, Ordering::Release);
        if let Some(waiters) = &self.0.waiters {
            waiters.wake_all();
        }
    }

    /// Whether [`cancel`](Self::cancel) was called and no wait has reported it yet.
    pub fn is_pending(&self) -> bool {
        self.0.is_pending()
    }

    /// Takes back a [`cancel`](Self::cancel) that no wait has reported yet. Returns whether there was one.
    pub fn clear(&self) -> bool {
        self.0.take()
    }
}

debug! { CancelHandle, self, pending: self.is_pending() }
