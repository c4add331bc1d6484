//! The allowed outcomes of each request: it completes once, in the order of its queue, with the right bytes;
//! or it is lost in a reset or with its queue pair.

use std::collections::VecDeque;

use ibverbs::{WorkCompletion, completion::WorkErrorClass};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

/// A request that was posted.
#[derive(Debug)]
pub(crate) struct Posted {
    pub(crate) wr_id: u64,
    /// Whether it has a completion when it succeeds. Receives always have one.
    pub(crate) signaled: bool,
    pub(crate) region: usize,
    pub(crate) kind: Kind,
}

#[derive(Debug)]
pub(crate) enum Kind {
    /// A send, with its number on its connection.
    Send {
        nth: usize,
    },
    Receive {
        nth: usize,
    },
    Write,
    /// The expected content of a read, where that is known.
    Read {
        expected: Option<Vec<u8>>,
    },
}

/// One queue of a queue pair.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    pub(crate) posted: VecDeque<Posted>,
    /// A request has failed, so those after it fail too.
    pub(crate) failed: bool,
}

/// The requests that a completion has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    /// All requests that were executed: unsignalled ones before the completed one, and that one.
    pub(crate) requests: Vec<Posted>,
    /// Whether the last of them succeeded.
    pub(crate) success: bool,
}

impl Queue {
    /// Removes the request of a completion, and those without completion before it.
    pub(crate) fn end(
        &mut self,
        completion: &WorkCompletion,
        troubled: bool,
    ) -> Result<Ended, TestCaseError> {
        let wr_id = completion.wr_id();
        let at = self.posted.iter().position(|posted| posted.wr_id == wr_id);
        let Some(at) = at else {
            return Err(TestCaseError::fail(format!("{completion:?} has no request")));
        };
        let requests: Vec<_> = self.posted.drain(..=at).collect();
        let (_, before) = requests.split_last().expect("there is one");
        if let Some(posted) = before.iter().find(|posted| posted.signaled) {
            let what = format!("{completion:?} comes before that of {posted:?}");
            return Err(TestCaseError::fail(what));
        }
        match completion.result() {
            Ok(_) => prop_assert!(!self.failed, "{completion:?} after a failure"),
            Err(error) => {
                prop_assert!(troubled, "{completion:?}, where nothing is wrong");
                if self.failed {
                    prop_assert_eq!(error.class(), WorkErrorClass::Flushed);
                    prop_assert!(before.is_empty(), "{before:?} have no completion");
                }
                self.failed = true;
            }
        }
        Ok(Ended { requests, success: completion.is_success() })
    }
}

/// The record of one queue pair.
#[derive(Debug, Default)]
pub(crate) struct Books {
    pub(crate) sends: Queue,
    pub(crate) receives: Queue,
    /// Messages that the peer has sent on this connection and that were not received yet.
    pub(crate) incoming: VecDeque<Vec<u8>>,
    /// The number of sends and receives that were posted on this connection.
    pub(crate) sent: usize,
    pub(crate) posted_receives: usize,
}

impl Books {
    /// How many of the first requests of the send queue are executed, whatever happens next. A send waits for
    /// its receive, of which the peer has posted this many, and later requests wait behind it.
    pub(crate) fn due_sends(&self, receives: usize) -> usize {
        let waits = |posted: &Posted| matches!(posted.kind, Kind::Send { nth } if nth >= receives);
        self.sends.posted.iter().position(waits).unwrap_or(self.sends.posted.len())
    }

    /// Whether a completion that must come was not polled yet.
    pub(crate) fn is_due(&self, peer: &Books) -> bool {
        let due = self.due_sends(peer.posted_receives);
        let signaled = self.sends.posted.iter().take(due).any(|posted| posted.signaled);
        // Messages of the peer that must arrive.
        let blocked = peer.sends.posted.iter().skip(peer.due_sends(self.posted_receives));
        let sent = blocked
            .filter_map(|posted| match posted.kind {
                Kind::Send { nth } => Some(nth),
                _ => None,
            })
            .next()
            .unwrap_or(peer.sent);
        let receives = |posted: &Posted| matches!(posted.kind, Kind::Receive { nth } if nth < sent);
        signaled || self.receives.posted.iter().any(receives)
    }
}
