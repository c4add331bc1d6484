//! Real time.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::Clock;
use crate::transport::timers::Time;

/// On a busy machine, a thread may have to wait for some milliseconds until it runs.
const MIN_TIMEOUT: Time = 20_000_000;

/// What was lost should be sent again soon. If that did not help, the other side may be waiting for a processor: the
/// specification allows four times the configured time.
const LONGER: Time = 4;

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

    fn timeout(&self, configured: Time, retries: u8) -> Time {
        let time = configured.max(MIN_TIMEOUT);
        if retries == 0 { time } else { time.saturating_mul(LONGER) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_retried_in_vain_gets_more_time() {
        let clock = RealClock::new();
        assert_eq!(clock.timeout(0, 0), MIN_TIMEOUT);
        assert_eq!(
            [0, 1, 7].map(|retries| clock.timeout(100_000_000, retries)),
            [100_000_000, 400_000_000, 400_000_000]
        );
    }
}
