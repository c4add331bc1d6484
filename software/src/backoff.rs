//! How a thread that polls in vain lets others run.
//!
//! If there is a processor for everyone, yielding costs nothing. If there is not, a thread that yields gets the
//! processor back only when the time of another is up, which takes milliseconds; one that sleeps gets it when it wakes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::link::Clock;
use crate::link::Time;
use crate::link::clock::RealClock;

/// Yielding for longer than this, in nanoseconds, shows that there are not enough processors.
const LONG: Time = 500_000;

/// For how long that is taken to be so, in nanoseconds.
const CROWDED_FOR: Time = 200_000_000;

/// How long a thread then sleeps, unless there is something to do, or many others sleep too.
pub(crate) const PAUSE: Duration = Duration::from_micros(200);

/// Whether the processors suffice.
#[derive(Debug)]
pub(crate) struct Backoff {
    clock: RealClock,
    /// The processors count as crowded until this time.
    crowded_until: AtomicU64,
}

impl Backoff {
    pub(crate) fn new() -> Self {
        Self { clock: RealClock::new(), crowded_until: AtomicU64::new(0) }
    }

    /// Yields, or where that takes long, calls `pause`, which sleeps for about [`PAUSE`], or until there is something to
    /// do.
    pub(crate) fn give(&self, pause: impl FnOnce()) {
        let before = self.clock.now();
        if before < self.crowded_until.load(Ordering::Relaxed) {
            return pause();
        }
        std::thread::yield_now();
        let after = self.clock.now();
        if after - before > LONG {
            self.crowded_until.store(after + CROWDED_FOR, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_crowded_machine_makes_it_pause() {
        let mut pauses = 0;
        let backoff = Backoff::new();
        backoff.give(|| pauses += 1);
        assert_eq!(pauses, 0);
        backoff.crowded_until.store(u64::MAX, Ordering::Relaxed);
        backoff.give(|| pauses += 1);
        assert_eq!(pauses, 1);
        // The crowded time ends.
        backoff.crowded_until.store(backoff.clock.now(), Ordering::Relaxed);
        backoff.give(|| pauses += 1);
        assert_eq!(pauses, 1);
    }
}
