//! Events, and the names of the peers and transfers that they are about.

use std::collections::VecDeque;

use slotmap::new_key_type;

use crate::error::{RailsError, Result};

new_key_type! {
    /// Names a peer of a [`Rails`](crate::Rails). When it has been removed, it names none.
    pub struct PeerId;

    /// Names a transfer or a message of a [`Rails`](crate::Rails).
    pub struct TransferId;
}

/// An event of a peer or a transfer.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// The peer is connected: each pair of devices was tried, and one works at least.
    Connected(PeerId),
    /// The peer is gone, and with it what was under way; or the connection was not made.
    Disconnected {
        /// The peer, which is removed.
        peer: PeerId,
        /// Why.
        error: RailsError,
    },
    /// A transfer or a message has ended.
    Ended {
        /// The transfer.
        transfer: TransferId,
        /// The peer that it was with.
        peer: PeerId,
        /// On success, all bytes are there. Otherwise any of them may be.
        result: Result<()>,
    },
    /// A message of the peer's: the next in the order in which it [sent](crate::Rails::send) them.
    Message {
        /// The peer.
        peer: PeerId,
        /// The message.
        bytes: Vec<u8>,
    },
    /// All bytes of a peer's [notified](crate::Transfer::notify) write have arrived.
    Notified {
        /// The peer.
        peer: PeerId,
        /// The number that it gave the write.
        tag: u16,
    },
    /// A pair of devices has failed. What it had under way goes over the others. Of the changes of a rail that the program
    /// has not taken, the last two are kept.
    RailDown {
        /// The peer.
        peer: PeerId,
        /// Our device, by its place in [`Rails::devices`](crate::Rails::devices).
        device: usize,
        /// Why.
        reason: String,
    },
    /// A pair of devices works, again or for the first time.
    RailUp {
        /// The peer.
        peer: PeerId,
        /// Our device, by its place in [`Rails::devices`](crate::Rails::devices).
        device: usize,
    },
}

impl Event {
    /// The peer and the device of a rail that has changed.
    fn rail(&self) -> Option<(PeerId, usize)> {
        match *self {
            Self::RailDown { peer, device, .. } | Self::RailUp { peer, device } => {
                Some((peer, device))
            }
            _ => None,
        }
    }
}

/// Puts an event behind those that the program has not taken. Of the changes of a rail the last two are kept; all others
/// are as many as the program has asked for, or the agreement allows.
pub(crate) fn push(events: &mut VecDeque<Event>, event: Event) {
    if let Some(rail) = event.rail() {
        let mut others = (0..events.len()).filter(|&place| events[place].rail() == Some(rail));
        if let (Some(first), Some(_)) = (others.next(), others.next()) {
            events.remove(first);
        }
    }
    events.push_back(event);
}
