//! Random operations of random sizes over several connections at once. A connection ends regularly or in
//! mid-transfer, and is then replaced by a new one.

mod channels;
mod verbs;

use std::thread;
use std::time::{Duration, Instant, SystemTime};

use crate::figures::figure;
use crate::vm::channels::{nothing_is_left, sides};
use crate::{Random, alone};

/// The operations of a run, and their results.
#[derive(Clone, Copy, Default, Debug)]
struct Tally {
    /// Requests that were posted: sends, writes, reads, atomics and receives.
    posted: u64,
    /// Requests whose completion was seen, and said success.
    completed: u64,
    /// Requests that were flushed, or that ended with a scope that was left early.
    flushed: u64,
    /// Messages that arrived, each the next one in order and correct to the last word.
    messages: u64,
    /// The bytes that were compared with what they should be.
    bytes: u64,
    /// Connections that ended regularly, and those that were broken off.
    finished: u64,
    broken: u64,
}

impl Tally {
    fn add(&mut self, other: Self) {
        self.posted += other.posted;
        self.completed += other.completed;
        self.flushed += other.flushed;
        self.messages += other.messages;
        self.bytes += other.bytes;
        self.finished += other.finished;
        self.broken += other.broken;
    }
}

/// Word `index` of message `number` of a stream.
fn word(stream: u64, number: u64, index: usize) -> u64 {
    (stream << 48 ^ number << 20 ^ index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// The duration of a run: `IBVERBS_SOAK_SECONDS`, or 15 s.
fn duration() -> Duration {
    let seconds = std::env::var("IBVERBS_SOAK_SECONDS").ok();
    let seconds = seconds.map(|text| text.parse().expect("IBVERBS_SOAK_SECONDS is a number"));
    Duration::from_secs(seconds.unwrap_or(15))
}

#[test]
fn random_load_is_accounted_for() {
    let duration = duration();
    let _alone = alone("random load", duration.as_secs() + 120);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
    let seed = std::env::var("IBVERBS_SOAK_SEED").ok();
    let seed = seed.map_or(now.as_nanos() as u64, |text| text.parse().expect("a number"));
    println!("IBVERBS_SOAK_SEED={seed}");
    let until = Instant::now() + duration;
    let sides = sides();
    let (mut channels, mut verbs) = (Tally::default(), Tally::default());
    thread::scope(|threads| {
        let connections: Vec<_> = (0..3_u64)
            .map(|index| {
                let sides = &sides;
                let random = Random::new(seed ^ index << 32);
                threads.spawn(move || channels::connection(sides, index, random, until))
            })
            .collect();
        let random = Random::new(!seed);
        let thin = threads.spawn(|| verbs::connection(&sides, random, until));
        for connection in connections {
            let tally = connection.join().unwrap();
            assert!(tally.messages > 0, "a connection has carried nothing");
            channels.add(tally);
        }
        verbs = thin.join().unwrap();
    });
    nothing_is_left(sides);
    for tally in [channels, verbs] {
        assert_eq!(tally.posted, tally.completed + tally.flushed, "{tally:?}");
        assert!(tally.finished > 0 && tally.broken > 0, "{tally:?}");
    }
    let tell = |t: Tally| {
        format!(
            "{} posted = {} completed + {} flushed, {} messages and {} bytes verified, {} connections \
             finished and {} broken off",
            t.posted, t.completed, t.flushed, t.messages, t.bytes, t.finished, t.broken
        )
    };
    figure(
        "random-load",
        &format!(
            "{duration:?} (seed {seed}): 3 channels: {}; queue \
             pairs: {}; resources at baseline",
            tell(channels),
            tell(verbs)
        ),
    );
}
