//! How long threads wait for the ends of streams that they drop: one period in all, if they drop several one after the other.

use std::time::{Duration, Instant};

/// How long each drop waits at most when the period is used up.
const EACH: Duration = Duration::from_millis(10);

/// The used part of the period, which comes back while no drop waits.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Lingered {
    /// When all of the period is there again.
    restored: Option<Instant>,
}

impl Lingered {
    /// How long a drop may wait that begins now.
    pub(crate) fn left(&self, now: Instant, period: Duration) -> Duration {
        let used = self.restored.map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
        period.saturating_sub(used).max(EACH.min(period))
    }

    /// A drop has waited, whatever has ended that.
    pub(crate) fn has_waited(&mut self, since: Instant, now: Instant, period: Duration) {
        let waited = now.saturating_duration_since(since);
        // The time that a drop has waited comes back within as long, from the end of the wait on.
        let restored = self.restored.map_or(since, |at| at.max(since)) + 2 * waited;
        self.restored = Some(restored.min(now + period));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERIOD: Duration = Duration::from_secs(2);

    /// Drops `number` streams, one after the other. Each wait ends after `each`, or after `left` if that is less.
    fn drop_all(
        lingered: &mut Lingered,
        now: &mut Instant,
        number: u32,
        each: Duration,
    ) -> Duration {
        let start = *now;
        for _ in 0..number {
            let since = *now;
            *now += lingered.left(since, PERIOD).min(each);
            lingered.has_waited(since, *now, PERIOD);
        }
        *now - start
    }

    #[test]
    fn drops_share_a_period_whatever_ends_each() {
        for millis in [5, 100, 800, 1999, 2000, 10_000] {
            let (mut lingered, mut now) = (Lingered::default(), Instant::now());
            let each = Duration::from_millis(millis);
            let taken = drop_all(&mut lingered, &mut now, 500, each);
            assert!(taken <= PERIOD + 500 * EACH, "{taken:?} with {each:?} for each");
            assert!(taken >= PERIOD.min(500 * each), "{taken:?} with {each:?} for each");
            // The time comes back while nothing is dropped.
            let before = lingered.left(now, PERIOD);
            now += PERIOD / 2;
            assert!(lingered.left(now, PERIOD) >= before.max(PERIOD / 2));
            now += PERIOD / 2;
            assert_eq!(lingered.left(now, PERIOD), PERIOD);
        }
    }

    #[test]
    fn a_period_may_be_short_or_long() {
        let (now, year) = (Instant::now(), Duration::from_secs(365 * 24 * 3600));
        for period in [Duration::ZERO, Duration::from_millis(1), year] {
            let mut lingered = Lingered::default();
            assert_eq!(lingered.left(now, period), period);
            lingered.has_waited(now, now + period, period);
            assert_eq!(lingered.left(now + period, period), EACH.min(period));
        }
    }
}
