//! A peer: its pairs of devices, and what goes over them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ibverbs::ChannelId;

use crate::control::Control;
use crate::devices::SENDS;
use crate::messages::Messages;
use crate::notify::{Incoming, Outgoing};
use crate::rails::TransferId;
use crate::readiness::Interest;
use crate::transfer::SHORTEST_PIECE;

/// A pair that has failed is tried again after this time, then after twice as long, and so on.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// A pair takes no more than it carries in this time.
const AHEAD: Duration = Duration::from_micros(250);
/// A pair always takes these bytes, however slow it is.
const LEAST_IN_FLIGHT: usize = 2 * SHORTEST_PIECE;

#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) control: Control,
    /// Whether this side has connected, and so opens the pairs.
    pub(crate) opens: bool,
    pub(crate) stage: Stage,
    pub(crate) pairs: Vec<Pair>,
    /// How many devices the other side has.
    pub(crate) their_devices: usize,
    /// Transfers with pieces that no request carries yet, in their order.
    pub(crate) queue: VecDeque<TransferId>,
    pub(crate) outgoing: Outgoing,
    pub(crate) incoming: Incoming,
    /// Since the pairs are agreed upon.
    pub(crate) messages: Option<Messages>,
    /// When the handshake began.
    pub(crate) since: Option<Instant>,
    /// Whether it waits until others have done their handshakes.
    pub(crate) is_held: bool,
    /// Whether there may be something to read.
    pub(crate) is_readable: bool,
    /// What the stream is watched for.
    pub(crate) watched: Option<Interest>,
    /// Whether there may be something to post.
    pub(crate) is_ready: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stage {
    /// The sides tell each other their devices.
    Greeting,
    /// Each pair is tried for the first time.
    Opening,
    Connected,
}

/// A device of ours and one of the peer's.
#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) ours: usize,
    pub(crate) theirs: usize,
    /// For people: our device and the peer's.
    pub(crate) name: String,
    pub(crate) epoch: u32,
    /// When it began to be opened.
    pub(crate) since: Instant,
    pub(crate) state: State,
    pub(crate) lanes: Vec<Lane>,
    /// Bytes that its requests carry now.
    pub(crate) in_flight: usize,
    pub(crate) rate: Rate,
    /// The bytes of transfers that it has carried since the peer is there.
    pub(crate) carried: u64,
    /// Why it has failed the last time, until it is up again. A pair that was closed for a transfer's fault has not
    /// failed.
    pub(crate) failure: Option<String>,
    pub(crate) pause: Duration,
}

/// A queue pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lane {
    pub(crate) channel: ChannelId,
    pub(crate) in_flight: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    /// Closed on both sides. The side that opens does so then.
    Down {
        retry_at: Instant,
    },
    /// The other side was asked to open it.
    Opening,
    /// So many queue pairs have not carried a probe yet. On the other side: it waits to be told.
    Probing(usize),
    Up,
    /// Closed here. The other side has yet to say so.
    Closing,
}

impl Pair {
    pub(crate) fn new(ours: usize, theirs: usize, name: String, speed: u32, now: Instant) -> Self {
        Self {
            ours,
            theirs,
            name,
            epoch: 0,
            since: now,
            state: State::Down { retry_at: now },
            lanes: Vec::new(),
            in_flight: 0,
            rate: Rate::new(speed),
            carried: 0,
            failure: None,
            pause: FIRST_PAUSE,
        }
    }

    pub(crate) fn lane(&mut self, channel: ChannelId) -> Option<&mut Lane> {
        self.lanes.iter_mut().find(|lane| lane.channel == channel)
    }

    /// Whether it can take a piece of this length.
    fn has_room(&self, len: usize) -> bool {
        let limit = (self.rate.per_second * AHEAD.as_secs_f64()) as usize;
        let has_lane = self.lanes.iter().any(|lane| lane.in_flight < SENDS);
        has_lane && self.in_flight + len <= limit.max(LEAST_IN_FLIGHT).max(len)
    }

    /// The queue pair with the least to do.
    pub(crate) fn least_busy(&mut self) -> Option<&mut Lane> {
        let lane = self.lanes.iter_mut().min_by_key(|lane| lane.in_flight)?;
        (lane.in_flight < SENDS).then_some(lane)
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

impl Peer {
    pub(crate) fn new(control: Control, opens: bool) -> Self {
        Self {
            control,
            opens,
            stage: Stage::Greeting,
            pairs: Vec::new(),
            their_devices: 0,
            queue: VecDeque::new(),
            outgoing: Outgoing::default(),
            incoming: Incoming::new(),
            messages: None,
            since: None,
            is_held: false,
            is_readable: true,
            watched: None,
            is_ready: false,
        }
    }

    /// The pair that would have carried a piece of this length first, if it has room now. If it has not, the piece
    /// waits for it: another would take longer.
    pub(crate) fn choose(&self, len: usize) -> Option<usize> {
        let time = |pair: &Pair| (pair.in_flight + len) as f64 / pair.rate.per_second;
        let up = self.pairs.iter().enumerate().filter(|(_, pair)| pair.state == State::Up);
        let (best, pair) = up.min_by(|(_, one), (_, other)| time(one).total_cmp(&time(other)))?;
        pair.has_room(len).then_some(best)
    }

    pub(crate) fn pairs_up(&self) -> usize {
        self.pairs.iter().filter(|pair| pair.state == State::Up).count()
    }

    /// If no pair works, nor is about to: why, by pair.
    pub(crate) fn failures(&self) -> Option<Vec<(String, String)>> {
        let failure = |pair: &Pair| Some((pair.name.clone(), pair.failure.clone()?));
        self.pairs.iter().map(failure).collect()
    }
}

/// The speed of a pair, as its transfers show it.
#[derive(Debug)]
pub(crate) struct Rate {
    /// Bytes per second.
    pub(crate) per_second: f64,
    /// What was carried since then, while there was always something to carry.
    since: Option<Instant>,
    bytes: usize,
}

impl Rate {
    /// A speed is measured for this time at least.
    const SPAN: Duration = Duration::from_micros(200);

    /// Begins with the speed of the link, in megabits per second, if that is known.
    fn new(megabits: u32) -> Self {
        let megabits = if megabits == 0 { 10_000 } else { megabits };
        Self { per_second: f64::from(megabits) * 125_000.0, since: None, bytes: 0 }
    }

    /// Something is to be carried.
    pub(crate) fn begins(&mut self, now: Instant) {
        if self.since.is_none() {
            (self.since, self.bytes) = (Some(now), 0);
        }
    }

    /// This was carried, and more is under way, or not.
    pub(crate) fn carried(&mut self, bytes: usize, now: Instant, more: bool) {
        self.bytes += bytes;
        let Some(since) = self.since else { return };
        let span = now.saturating_duration_since(since);
        if span >= Self::SPAN {
            let measured = self.bytes as f64 / span.as_secs_f64();
            self.per_second = 0.75 * self.per_second + 0.25 * measured;
            (self.since, self.bytes) = (Some(now), 0);
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
        let mut rate = Rate::new(8_000);
        assert_eq!(rate.per_second, 1e9);
        rate.begins(now);
        for _ in 0..40 {
            now += Duration::from_millis(1);
            rate.carried(500_000, now, true);
        }
        assert!((rate.per_second - 5e8).abs() < 1e7, "{}", rate.per_second);
        // A pause is not slowness.
        rate.carried(0, now, false);
        rate.begins(now + Duration::from_secs(60));
        rate.carried(500_000, now + Duration::from_millis(60_001), true);
        assert!((rate.per_second - 5e8).abs() < 1e7, "{}", rate.per_second);
    }

    #[test]
    fn pauses_grow_and_end() {
        let now = Instant::now();
        let mut pair = Pair::new(0, 0, String::new(), 0, now);
        let pauses: Vec<_> = (0..12).map(|_| pair.retry_at(now, u32::MAX) - now).collect();
        assert_eq!(pauses[0], FIRST_PAUSE);
        assert!(pauses.windows(2).all(|two| two[0] <= two[1]));
        assert_eq!(pauses[11], LONGEST_PAUSE);
        pair.is_up();
        assert_eq!(pair.retry_at(now, 0) - now, FIRST_PAUSE / 2);
    }
}
