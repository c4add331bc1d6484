//! Real time.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::Clock;
use super::Time;

/// On a busy machine, a thread may have to wait for some milliseconds until it runs.
const MIN_TIMEOUT: Time = 20_000_000;

/// Lost packets should be sent again soon. If that did not help, the other side may be waiting for a processor: the
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
    /// Time does not start at 0: some programs treat a time stamp of 0 as missing.
    fn now(&self) -> Time {
        nanoseconds(self.0.elapsed()) + 1
    }

    fn wall_clock(&self) -> Time {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, nanoseconds)
    }

    fn timeout(&self, configured: Time, late: bool) -> Time {
        let time = configured.max(MIN_TIMEOUT);
        if late { time.saturating_mul(LONGER) } else { time }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_late_gets_more_time() {
        let clock = RealClock::new();
        assert_eq!(clock.timeout(0, false), MIN_TIMEOUT);
        let times = [false, true].map(|late| clock.timeout(100_000_000, late));
        assert_eq!(times, [100_000_000, 400_000_000]);
    }
}
