//! How to wait for a completion, and for how long.

use std::hint;
use std::time::{Duration, Instant};

use super::core::Core;
use super::error::{TransportError, TransportResult};
use crate::completion::CompletionQueue;
use crate::error::ErrorKind;

/// How many empty polls go by between two looks at the clock: reading it costs about as much as a
/// poll.
const POLLS_PER_LOOK: u32 = 64;

/// How many empty polls go by between two looks whether it is time to see to the device.
const POLLS_PER_CHECK: u32 = 1 << 14;

/// Whoever polls in vain sees to the device this often. A device that was pulled out completes nothing
/// any more: without this, a wait that has no deadline would never end.
const CHECK_PERIOD: Duration = Duration::from_secs(1);

/// What a channel sleeps on when it has polled in vain for long enough.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sleep {
    /// How many polls that is.
    pub(crate) after: u32,
    /// A queue with a channel of its own. Valid as long as the core's completion queue is, which it
    /// is the owner of.
    pub(crate) queue: *const CompletionQueue<'static>,
}

/// Waiting for one thing.
#[derive(Debug)]
pub(crate) struct Patience {
    /// None: for ever.
    deadline: Option<Instant>,
    /// How many polls in a row found nothing.
    empty: u32,
    /// The completion queue was armed when it had raised so many events; the poll after that found
    /// nothing, if `spent` is called again.
    armed: Option<u64>,
    /// When the device was last seen to be there, or the wait had lasted for a while.
    checked: Option<Instant>,
}

impl Patience {
    pub(crate) fn new(deadline: Option<Instant>) -> Self {
        Self { deadline, empty: 0, armed: None, checked: None }
    }

    /// What to do when a poll found nothing.
    ///
    /// # Errors
    ///
    ///  - [`TimedOut`](TransportError::TimedOut): it is time to give up.
    ///  - [`Verbs`](TransportError::Verbs): sleeping does not work, or the device is gone.
    #[inline]
    pub(crate) fn spent(&mut self, core: &Core) -> TransportResult<()> {
        // The first poll that finds nothing looks too: the deadline may have passed before.
        if self.empty.is_multiple_of(POLLS_PER_LOOK) {
            if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                return Err(TransportError::TimedOut);
            }
            if self.empty.is_multiple_of(POLLS_PER_CHECK) {
                self.check(core)?;
            }
        }
        self.empty = self.empty.wrapping_add(1);
        match &core.sleep {
            Some(sleep) if self.empty > sleep.after => self.sleep(sleep),
            _ => {
                hint::spin_loop();
                Ok(())
            }
        }
    }

    /// Whether the device is still there, from time to time.
    #[cold]
    fn check(&mut self, core: &Core) -> TransportResult<()> {
        let now = Instant::now();
        match self.checked {
            Some(checked) if now.saturating_duration_since(checked) >= CHECK_PERIOD => {
                core.check_device()?;
                self.checked = Some(now);
            }
            Some(_) => {}
            None => self.checked = Some(now),
        }
        Ok(())
    }

    /// Arms the completion queue; and the next time, as it was still empty after that, sleeps until
    /// its event.
    #[cold]
    fn sleep(&mut self, sleep: &Sleep) -> TransportResult<()> {
        // SAFETY: the core lends its `Sleep` out, so it is alive, and the queue with it.
        let queue = unsafe { &*sleep.queue };
        match self.armed.take() {
            None => self.armed = Some(queue.arm_own()?),
            Some(seen) => match queue.sleep(seen, self.deadline) {
                // Another poll, and another look at the clock.
                Err(error) if error.kind() == ErrorKind::TimedOut => self.empty = 0,
                woken => woken?,
            },
        }
        Ok(())
    }
}
