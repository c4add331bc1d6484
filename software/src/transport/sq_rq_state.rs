//! The state of the two sides of a queue pair: what it has sent ([`requester`](super::requester)), and what it answers
//! ([`responder`](super::responder)).

use std::collections::VecDeque;

use super::work::{Posted, Receive};
use crate::link::Time;
use crate::wire::header::{Reth, Syndrome};

/// The number of packets that a queue pair sends in one turn, before others get theirs.
pub(crate) const TURN: u32 = 32;

#[derive(Debug, Default)]
pub(crate) struct SendQueue {
    /// Requests from the oldest that is not complete to the newest.
    pub(crate) posted: VecDeque<Posted>,
    /// Places that stay occupied until their completion, or a later one, is polled.
    pub(crate) used: u32,
    /// Sends that completed without a completion, since the last one with a completion.
    pub(crate) unsignaled: u32,
    /// The next packet to send: an index in `posted`, and a packet of that request.
    pub(crate) cursor: usize,
    pub(crate) offset: u32,
    /// The numbers of the first packet of the next request, of the oldest packet that is not acknowledged, and of the
    /// first that was never sent. Packets count from the first sequence number, and on beyond 24 bits: a full
    /// queue has up to 2^37 of them. At most a window is between the last two.
    pub(crate) next: u64,
    pub(crate) unacknowledged: u64,
    pub(crate) high: u64,
    /// The last packet of each READ and atomic request that waits for its answer.
    pub(crate) fetching: VecDeque<u64>,
    pub(crate) retries: u8,
    pub(crate) not_ready_retries: u8,
    /// The timer has expired since the last answer, also one that a packet is missing.
    pub(crate) late: bool,
    /// For how long the peer was waited for since its last answer because it received nothing.
    pub(crate) starved_for: Time,
    /// The time at which everything is sent again if no answer has arrived.
    pub(crate) deadline: Option<Time>,
    /// The peer had no receive: nothing is sent before this time.
    pub(crate) not_ready_until: Option<Time>,
    /// The most packets without an acknowledgement. Losses reduce it.
    pub(crate) window: u32,
    /// The window without losses.
    pub(crate) full_window: u32,
    /// A gap in the answers was seen, and they were requested again. Prevents a second request for the same gap.
    pub(crate) asked_again: bool,
}

impl SendQueue {
    pub(crate) fn start(&mut self, psn: u32) {
        let first = u64::from(psn);
        (self.next, self.unacknowledged, self.high) = (first, first, first);
    }

    /// Stops sending, and waiting for answers.
    pub(crate) fn stop(&mut self) {
        self.deadline = None;
        self.not_ready_until = None;
        self.fetching.clear();
    }

    pub(super) fn is_fetch_before(&self, index: usize) -> bool {
        self.posted.iter().take(index).any(|posted| posted.request.operation.is_fetching())
    }
}

/// An answer to the peer; answers are sent in the order of its requests. `again`: to a request that was answered before.
#[derive(Clone, Copy, Debug)]
pub(super) enum Answer {
    Acknowledge {
        psn: u32,
        syndrome: Syndrome,
    },
    Value {
        psn: u32,
        value: u64,
        again: bool,
    },
    /// The remaining data of a READ; `begins` says whether its first packet is still to be sent.
    Read {
        psn: u32,
        /// The protection domain that the request was made in.
        pd: u32,
        address: u64,
        rkey: u32,
        left: u32,
        begins: bool,
        again: bool,
    },
}

impl Answer {
    /// The answer of a request that was carried out, and returns no data.
    pub(super) fn done(psn: u32, again: bool) -> Self {
        Self::Read { psn, pd: 0, address: 0, rkey: 0, left: 0, begins: true, again }
    }

    pub(super) fn read(psn: u32, pd: u32, reth: Reth, again: bool) -> Self {
        let Reth { address, rkey, length } = reth;
        Self::Read { psn, pd, address, rkey, left: length, begins: true, again }
    }

    pub(super) fn psn(&self) -> u32 {
        match *self {
            Self::Acknowledge { psn, .. } | Self::Value { psn, .. } | Self::Read { psn, .. } => psn,
        }
    }

    /// Whether it answers a READ or atomic request for the first time.
    pub(super) fn is_of_new_fetch(&self) -> bool {
        matches!(self, Self::Value { again: false, .. } | Self::Read { again: false, .. })
    }
}

/// A message that is not complete yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Message {
    pub(super) write: bool,
    pub(super) address: u64,
    pub(super) rkey: u32,
    /// The target, for a WRITE.
    pub(super) length: u32,
    pub(super) offset: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Responder {
    /// The sequence number of the next packet.
    pub(crate) expected: u32,
    /// The number of complete messages.
    pub(crate) msn: u32,
    /// A NAK was sent: a packet is missing, or the receiver was not ready.
    pub(super) refused: bool,
    pub(super) message: Option<Message>,
    /// The receive that the message goes to.
    pub(crate) receive: Option<Receive>,
    pub(super) answers: VecDeque<Answer>,
    /// Results of atomic operations by sequence number. The newest of a number counts: numbers come again.
    pub(super) results: VecDeque<(u32, u64)>,
    /// The READ and atomic requests whose answers have left and cannot have arrived: until when they cannot, and the
    /// round that they left in.
    pub(super) under_way: VecDeque<(Time, u64)>,
    /// The round that it had a turn in, and what is left of that turn.
    pub(super) turn: (u64, u32),
    /// The first packet of the connection has arrived.
    pub(crate) is_established: bool,
}

#[cfg(test)]
impl Responder {
    /// Pretends that so many bytes of the message have arrived.
    pub(super) fn skip_to(&mut self, offset: u64) {
        self.message.iter_mut().for_each(|message| message.offset = offset);
    }
}

impl Responder {
    pub(crate) fn stop(&mut self) {
        self.message = None;
        self.answers.clear();
    }

    /// Drops an incomplete message with a missing packet. Its receive serves the next one.
    pub(crate) fn abandon(&mut self) {
        self.message = None;
    }

    /// How many answers wait.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        self.answers.len()
    }

    /// Gives it a turn, even if it had one in this round.
    pub(crate) fn give_turn(&mut self, round: u64) {
        self.turn = (round, TURN);
    }

    pub(crate) fn is_within_message(&self) -> bool {
        self.message.is_some()
    }
}
