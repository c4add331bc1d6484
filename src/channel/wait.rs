//! The actions of a wait after each poll that found nothing.

use std::hint;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::cancel::Cancel;
use super::error::{TransportError, TransportResult};
use crate::completion::{CompletionQueue, Waiters};
use crate::error::{ErrorKind, Result};

/// Empty polls between two readings of the clock, which cost about as much as a poll each.
const POLLS_PER_CLOCK_READING: u32 = 64;

/// Empty polls between two checks whether [`DEVICE_CHECK_PERIOD`] has passed.
const POLLS_PER_DEVICE_CHECK: u32 = 1 << 14;

/// Time between two device-liveness checks of one wait. An unplugged device completes nothing any
/// more: without the checks, a wait without a deadline would never end.
pub(crate) const DEVICE_CHECK_PERIOD: Duration = Duration::from_secs(1);

/// How a channel sleeps when polling finds nothing for a while.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sleep {
    /// Empty polls before it sleeps.
    pub(super) after: u32,
    /// The channel's completion queue, which has a completion channel of its own. Valid for as long as
    /// the core that this is part of: the parents of the core's queue pair hold the queue.
    pub(super) queue: *const CompletionQueue<'static>,
}

impl Sleep {
    /// The threads that sleep on the queue.
    pub(super) fn wakeable(&self) -> Result<Arc<Waiters>> {
        // SAFETY: the core that this is part of is alive, and the queue lives as long as the core.
        unsafe { &*self.queue }.wakeable()
    }
}

/// The state of one wait.
#[derive(Debug)]
pub(super) struct Wait {
    /// `None`: no time limit.
    deadline: Option<Instant>,
    /// Empty polls in a row.
    empty_polls: u32,
    /// Set if the completion queue was armed before the latest poll. The value is the queue's count of
    /// events at that time.
    armed: Option<u64>,
    /// When the device was last checked, or when the first check was due.
    device_checked: Option<Instant>,
}

impl Wait {
    pub(super) fn new(deadline: Option<Instant>) -> Self {
        Self { deadline, empty_polls: 0, armed: None, device_checked: None }
    }

    /// After each poll that found nothing: spins or sleeps, and from time to time reads
    /// the clock and checks the device.
    ///
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
        // The first empty poll reads the clock too: the deadline may have passed before the wait.
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
        match self.device_checked {
            Some(checked) if now.saturating_duration_since(checked) >= DEVICE_CHECK_PERIOD => {
                check_device()?;
                self.device_checked = Some(now);
            }
            Some(_) => {}
            None => self.device_checked = Some(now),
        }
        Ok(())
    }

    /// Arms the completion queue. The next call, which comes if the poll after arming found nothing
    /// either, sleeps until the queue's event.
    #[cold]
    fn arm_or_sleep(&mut self, sleep: &Sleep, cancel: Option<&Cancel>) -> TransportResult<()> {
        // SAFETY: the core that lends its `Sleep` is alive, and the queue lives as long as the core.
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
