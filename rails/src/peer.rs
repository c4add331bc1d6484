//! A peer: its pairs of devices, and what goes over them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use ibverbs_transfer::counted::{Incoming, Outgoing};

use crate::control::{Control, Frame};
use crate::error::Reasons;
use crate::event::TransferId;
use crate::messages::Messages;
use crate::pair::{Pair, State};
use crate::readiness::Interest;

/// A peer that has connected says its devices at once.
const GREETING: Duration = Duration::from_secs(10);
/// Each pair of devices is tried once in this time.
const OPENING: Duration = Duration::from_secs(60);

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
    /// When its stage began; `None` as long as this side has not listened to it.
    pub(crate) since: Option<Instant>,
    /// Whether it waits until others have done their handshakes.
    pub(crate) is_held: bool,
    /// Whether there may be something to read.
    pub(crate) is_readable: bool,
    /// The readiness that the stream is watched for.
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

impl Peer {
    pub(crate) fn new(control: Control, opens: bool) -> Self {
        Self {
            control,
            opens,
            stage: Stage::Greeting,
            pairs: Vec::new(),
            their_devices: 0,
            queue: VecDeque::new(),
            outgoing: Outgoing::new(),
            incoming: Incoming::new(),
            messages: None,
            since: None,
            is_held: false,
            is_readable: true,
            watched: None,
            is_ready: false,
        }
    }

    /// How long it may take until it is connected, from the beginning of its stage. A peer to which this side connects may
    /// take as long as the program likes.
    pub(crate) fn time_to_connect(&self) -> Option<Duration> {
        match self.stage {
            _ if self.opens => None,
            Stage::Greeting => Some(GREETING),
            Stage::Opening => Some(OPENING),
            Stage::Connected => None,
        }
    }

    /// Tells the peer which of its notified transfers have ended, now and then.
    pub(crate) fn confirm_transfers(&mut self) {
        if let Some(below) = self.incoming.confirm() {
            self.control.send(&Frame::Confirmed { below });
        }
    }

    /// The pair that would have carried a piece of this length first, if it has room now. If it has not, the piece
    /// waits for it: another would take longer.
    #[inline]
    pub(crate) fn choose(&self, len: usize) -> Option<usize> {
        let (mut best, mut least) = (None, u64::MAX);
        for (place, pair) in self.pairs.iter().enumerate() {
            let time = pair.time_of(len);
            if pair.state == State::Up && (time < least || best.is_none()) {
                (best, least) = (Some(place), time);
            }
        }
        best.filter(|&best| self.pairs[best].has_room(len))
    }

    pub(crate) fn pairs_up(&self) -> usize {
        self.pairs.iter().filter(|pair| pair.state == State::Up).count()
    }

    /// If no pair works, nor is about to: why, by pair.
    pub(crate) fn failures(&self) -> Option<Reasons> {
        if self.pairs.iter().any(|pair| pair.failure.is_none()) {
            return None;
        }
        let failure = |pair: &Pair| Some((pair.name.clone(), pair.failure.clone()?));
        Some(self.pairs.iter().filter_map(failure).collect())
    }
}
