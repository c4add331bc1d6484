//! The clock of a host, which may be wrong.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::link::Time;
use crate::network::{LAST, START};

/// The resolution of tokio's timers, in nanoseconds.
pub(super) const TICK: Time = 1_000_000;

const MILLION: u128 = 1_000_000;

/// A host's clock: nanoseconds that begin with the simulation, if the clock was never set.
#[derive(Clone, Copy, Debug)]
struct Dial {
    /// When it was set last: the time of the network, and its own.
    set_at: Time,
    showed: Time,
    /// Millionths that it is too fast.
    fast: i32,
}

impl Dial {
    fn new() -> Self {
        Self { set_at: START, showed: 0, fast: 0 }
    }

    fn speed(&self) -> u128 {
        (MILLION as i64 + i64::from(self.fast)).max(1) as u128
    }

    /// Sets the clock to its present value and `ahead`, from where it goes on.
    fn set(&mut self, now: Time, ahead: Time, fast: i32) {
        let shows = self.shows(now);
        *self =
            Self { set_at: now, showed: shows.max(shows.saturating_add(ahead).min(LAST)), fast };
    }

    /// The clock's value at this time of the network.
    fn shows(&self, now: Time) -> Time {
        let passed = u128::from(now.saturating_sub(self.set_at));
        let shows = u128::from(self.showed) + passed * self.speed() / MILLION;
        shows.min((Time::MAX - TICK).into()) as Time
    }

    /// The time of the network at which it shows this, which it does not yet.
    fn when(&self, shows: Time) -> Time {
        let passes = u128::from(shows.saturating_sub(self.showed));
        self.set_at.saturating_add((passes * MILLION).div_ceil(self.speed()) as Time)
    }

    /// The time of the network at which the next timer of tokio's may be due.
    fn next_tick(&self, now: Time) -> Time {
        self.when((self.shows(now) / TICK + 1) * TICK)
    }
}

/// The clock of a host. A clone is another handle of it.
#[derive(Clone, Debug)]
pub(super) struct HostClock(Arc<Mutex<Dial>>);

impl HostClock {
    pub(super) fn new() -> Self {
        Self(Arc::new(Mutex::new(Dial::new())))
    }

    fn dial(&self) -> MutexGuard<'_, Dial> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the clock to its present value and `ahead`, from where it goes on.
    pub(super) fn set(&self, now: Time, ahead: Time, fast: i32) {
        self.dial().set(now, ahead, fast);
    }

    /// The clock's value at this time of the network.
    pub(super) fn shows(&self, now: Time) -> Time {
        self.dial().shows(now)
    }

    /// The time of the network at which the next timer of tokio's may be due.
    pub(super) fn next_tick(&self, now: Time) -> Time {
        self.dial().next_tick(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_shows_each_tick_at_the_time_that_it_tells() {
        let mut clock = Dial::new();
        for (now, ahead, fast) in [(START, 0, 0), (5_000_123, 7, 300), (9_999_999, 1 << 40, -999)] {
            clock.set(now, ahead, fast);
            let mut at = now;
            for _ in 0..1000 {
                let next = clock.next_tick(at);
                assert!(next > at && clock.shows(next) / TICK > clock.shows(at) / TICK);
                assert!(clock.shows(next - 1) / TICK == clock.shows(at) / TICK);
                at = next;
            }
        }
        let passed = clock.when(clock.shows(START + 20_000_000) + 1_000_000) - START;
        assert!((21_000_900..21_001_100).contains(&passed), "{passed}");
    }
}
