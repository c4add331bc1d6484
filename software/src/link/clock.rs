//! Real time.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::Clock;
use crate::transport::timers::Time;

/// On a busy machine, a thread may have to wait for some milliseconds until it runs.
const MIN_TIMEOUT: Time = 20_000_000;

#[derive(Debug)]
pub(crate) struct RealClock(Instant);

impl RealClock {
    pub(crate) fn new() -> Self {
        Self(Instant::now())
    }
}

fn nanoseconds(duration: Duration) -> Time {
    Time::try_from(duration.as_nanos()).unwrap_or(Time::MAX)
}

impl Clock for RealClock {
    /// It does not start at 0: some programs treat a time stamp of 0 as missing.
    fn now(&self) -> Time {
        nanoseconds(self.0.elapsed()) + 1
    }

    fn wall_clock(&self) -> Time {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, nanoseconds)
    }

    fn min_timeout(&self) -> Time {
        MIN_TIMEOUT
    }
}
