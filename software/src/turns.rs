//! How a thread that polls in vain lets others run.
//!
//! If there is a processor for everyone, yielding costs nothing. If there is not, a thread that yields gets the
//! processor back only when the time of another is up, which takes milliseconds; one that sleeps gets it when it wakes.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Yielding for longer than this shows that there are not enough processors.
const LONG: Duration = Duration::from_micros(500);

/// For how long that is taken to be so.
const CROWDED_FOR: Duration = Duration::from_millis(200);

/// How long a thread then sleeps at most.
pub(crate) const PAUSE: Duration = Duration::from_micros(200);

/// Whether the processors suffice.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    /// Until then they do not, in nanoseconds of `now`.
    crowded_until: AtomicU64,
}

/// The time since the first call.
fn now() -> Duration {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed()
}

impl Turns {
    /// Yields, or where that takes long, calls `pause`, which sleeps for [`PAUSE`] at most, or until there is something
    /// to do.
    pub(crate) fn give(&self, pause: impl FnOnce()) {
        let before = now();
        if nanoseconds(before) < self.crowded_until.load(Ordering::Relaxed) {
            return pause();
        }
        std::thread::yield_now();
        let after = now();
        if after - before > LONG {
            self.crowded_until.store(nanoseconds(after + CROWDED_FOR), Ordering::Relaxed);
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_crowded_machine_makes_it_pause() {
        let mut pauses = 0;
        let turns = Turns::default();
        turns.give(|| pauses += 1);
        assert_eq!(pauses, 0);
        turns.crowded_until.store(u64::MAX, Ordering::Relaxed);
        turns.give(|| pauses += 1);
        assert_eq!(pauses, 1);
        // It does not last for ever.
        turns.crowded_until.store(nanoseconds(now()), Ordering::Relaxed);
        turns.give(|| pauses += 1);
        assert_eq!(pauses, 1);
    }
}
