//! A pair of devices: its state, and how fast it is.

use std::time::{Duration, Instant};

use ibverbs::ChannelId;

use crate::devices::SENDS;
use crate::transfer::SHORTEST_PIECE;

/// A pair that has failed is tried again after this time, then after twice as long, and so on.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// A pair takes no more than it carries in this time.
const AHEAD: Duration = Duration::from_micros(250);
/// A pair always takes these bytes, however slow it is.
const LEAST_IN_FLIGHT: usize = 2 * SHORTEST_PIECE;

/// A device of ours and one of the peer's.
#[derive(Debug)]
pub(crate) struct Pair {
    /// Its place in the list of both sides.
    pub(crate) number: u8,
    pub(crate) ours: usize,
    pub(crate) theirs: usize,
    /// For people: our device and the peer's.
    pub(crate) name: String,
    pub(crate) epoch: u32,
    /// When it began to be opened.
    pub(crate) since: Instant,
    pub(crate) state: State,
    /// Its queue pairs, by their number in the device's loop.
    pub(crate) lanes: Vec<ChannelId>,
    /// The requests of its queue pairs, and the bytes of pieces that they carry.
    pub(crate) requests: u32,
    pub(crate) in_flight: usize,
    pub(crate) rate: Rate,
    /// The bytes of transfers that it has carried since the peer is there.
    pub(crate) carried: u64,
    /// Why it has failed the last time, until it is up again. A pair that was closed for a transfer's fault has not
    /// failed.
    pub(crate) failure: Option<String>,
    pub(crate) pause: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    /// Closed on both sides. The side that opens does so then.
    Down {
        retry_at: Instant,
    },
    /// The other side was asked to open it.
    Opening,
    /// This number of queue pairs has not carried a probe yet. The side that accepted waits to be told.
    Probing(usize),
    Up,
    /// Closed here. The other side has yet to say so.
    Closing,
}

impl Pair {
    pub(crate) fn new(
        number: u8,
        (ours, theirs): (usize, usize),
        name: String,
        speed: u32,
        now: Instant,
    ) -> Self {
        Self {
            number,
            ours,
            theirs,
            name,
            epoch: 0,
            since: now,
            state: State::Down { retry_at: now },
            lanes: Vec::new(),
            requests: 0,
            in_flight: 0,
            rate: Rate::new(speed),
            carried: 0,
            failure: None,
            pause: FIRST_PAUSE,
        }
    }

    /// How long it would take to carry a piece of this length, behind what it has: in 10⁻¹⁵ seconds.
    pub(crate) fn time_of(&self, len: usize) -> u64 {
        ((self.in_flight + len) as u64).saturating_mul(self.rate.per_byte)
    }

    /// Whether it can take a piece of this length.
    pub(crate) fn has_room(&self, len: usize) -> bool {
        let has_lane = self.requests < self.lanes.len() as u32 * SENDS;
        has_lane && self.in_flight + len <= self.rate.ahead.max(len)
    }

    /// Notes requests that were posted, and the bytes of their pieces.
    pub(crate) fn takes(&mut self, requests: u32, bytes: usize, now: Instant) {
        self.requests += requests;
        self.in_flight += bytes;
        if bytes > 0 && self.rate.since.is_none() {
            self.rate.since = Some((now, self.carried));
        }
    }

    /// The bytes of further pieces that it can take.
    pub(crate) fn room(&self) -> usize {
        self.rate.ahead.saturating_sub(self.in_flight)
    }

    /// A request has ended, with a piece of this length or none.
    pub(crate) fn gives_back(&mut self, len: usize) {
        self.requests -= 1;
        self.in_flight -= len;
    }

    /// Its requests are those of a queue pair that it has no more.
    pub(crate) fn forget_requests(&mut self) {
        (self.requests, self.in_flight) = (0, 0);
    }

    /// Looks how fast it is, after some requests have ended.
    pub(crate) fn measure(&mut self, now: Instant) {
        self.rate.measure(self.carried, now, self.in_flight > 0);
    }

    /// When it is tried again after a failure: later each time, and not when others are.
    pub(crate) fn retry_at(&mut self, now: Instant, random: u32) -> Instant {
        let pause = self.pause;
        self.pause = (pause * 2).min(LONGEST_PAUSE);
        now + self::pause(pause, random)
    }

    pub(crate) fn is_up(&mut self) {
        (self.state, self.failure, self.pause) = (State::Up, None, FIRST_PAUSE);
    }
}

/// A pause between half of the longest and that, by a random number: not when others end theirs.
pub(crate) fn pause(longest: Duration, random: u32) -> Duration {
    longest / 2 + longest.mul_f64(f64::from(random) / f64::from(u32::MAX)) / 2
}

/// The speed of a pair, as its transfers show it.
#[derive(Debug)]
pub(crate) struct Rate {
    /// Bytes per second.
    per_second: f64,
    /// The time of a byte, in 10⁻¹⁵ seconds.
    per_byte: u64,
    /// The bytes that it may have in flight.
    ahead: usize,
    /// Since when there was always something to carry, and how much had been carried by then.
    since: Option<(Instant, u64)>,
}

impl Rate {
    /// A speed is measured for this time at least.
    const SPAN: Duration = Duration::from_micros(200);

    /// Begins with the speed of the link, in megabits per second, if that is known.
    fn new(megabits: u32) -> Self {
        let megabits = if megabits == 0 { 10_000 } else { megabits };
        let mut rate = Self { per_second: 0.0, per_byte: 0, ahead: 0, since: None };
        rate.set(f64::from(megabits) * 125_000.0);
        rate
    }

    fn set(&mut self, per_second: f64) {
        self.per_second = per_second;
        self.per_byte = (1e15 / per_second) as u64;
        self.ahead = ((per_second * AHEAD.as_secs_f64()) as usize).max(LEAST_IN_FLIGHT);
    }

    /// Measures the rate: the bytes that were carried until now, and whether more are under way.
    fn measure(&mut self, carried: u64, now: Instant, more: bool) {
        let Some((since, before)) = self.since else { return };
        let span =
            if carried > before { now.saturating_duration_since(since) } else { Duration::ZERO };
        if span >= Self::SPAN {
            let measured = (carried - before) as f64 / span.as_secs_f64();
            self.set(0.75 * self.per_second + 0.25 * measured);
            self.since = Some((now, carried));
        }
        if !more {
            self.since = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_follows_what_is_carried() {
        let mut now = Instant::now();
        let mut pair = Pair::new(0, (0, 0), String::new(), 8_000, now);
        assert_eq!(pair.rate.per_second, 1e9);
        let is_close = |pair: &Pair| (pair.rate.per_second - 5e8).abs() < 1e7;
        pair.takes(1, 500_000, now);
        for _ in 0..40 {
            now += Duration::from_millis(1);
            pair.carried += 500_000;
            pair.measure(now);
            // Nothing has ended since.
            pair.measure(now + Duration::from_secs(1));
        }
        assert!(is_close(&pair), "{}", pair.rate.per_second);
        let microseconds = pair.time_of(500_000) / 1_000_000_000;
        assert!((1_990..=2_000).contains(&microseconds), "{microseconds}");
        // A pause is not slowness.
        pair.gives_back(500_000);
        pair.measure(now);
        now += Duration::from_secs(60);
        pair.takes(1, 500_000, now);
        pair.carried += 500_000;
        pair.measure(now + Duration::from_millis(1));
        assert!(is_close(&pair), "{}", pair.rate.per_second);
    }

    #[test]
    fn pauses_grow_and_end() {
        let now = Instant::now();
        let mut pair = Pair::new(0, (0, 0), String::new(), 0, now);
        let pauses: Vec<_> = (0..12).map(|_| pair.retry_at(now, u32::MAX) - now).collect();
        assert_eq!(pauses[0], FIRST_PAUSE);
        assert!(pauses.windows(2).all(|two| two[0] <= two[1]));
        assert_eq!(pauses[11], LONGEST_PAUSE);
        pair.is_up();
        assert_eq!(pair.retry_at(now, 0) - now, FIRST_PAUSE / 2);
    }
}
