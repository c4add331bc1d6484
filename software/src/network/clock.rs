//! The clock of a simulated network.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::link::{Clock, Time};

/// When the clock of a network starts: some programs treat a time stamp of 0 as missing.
pub(crate) const START: Time = 1;

/// The last moment that a program can ask for (292 years): devices set timers for later ones.
pub(crate) const LAST: Time = Time::MAX / 2;

pub(super) fn duration(time: Time) -> Duration {
    Duration::from_nanos(time.saturating_sub(START))
}

pub(crate) fn nanoseconds(duration: Duration) -> Time {
    Time::try_from(duration.as_nanos()).unwrap_or(Time::MAX)
}

/// The time of a simulated network.
#[derive(Debug)]
pub(crate) struct VirtualClock(AtomicU64);

impl VirtualClock {
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(START))
    }

    /// The time never goes backwards.
    pub(super) fn set(&self, time: Time) {
        self.0.fetch_max(time, Ordering::SeqCst);
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> Time {
        self.0.load(Ordering::SeqCst)
    }

    /// No calendar is kept: each simulation begins at the same moment.
    fn wall_clock(&self) -> Time {
        self.now()
    }
}
