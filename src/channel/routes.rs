//! The inboxes of a shared completion queue, and which of them a completion is for.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::mem;
use std::sync::Arc;

use super::batch::BATCH;
use super::inbox::{NO_NUMBER, Ring};
use super::polled::{Polled, PolledCompletion};
use super::queue_pair_numbers::Numbers;
use super::router::Inbox;
use super::shared_receives::Receives;
use crate::ffi;

/// What the lock of a [`Router`](super::router::Router) protects.
pub(super) struct Routes {
    pub(super) numbers: Numbers,
    pub(super) inboxes: Vec<Ring>,
    /// The inboxes that are free for a new channel. It has room for all.
    pub(super) free: Vec<usize>,
    /// The inboxes that got something since they were last taken from this list. It has room for all.
    pub(super) ready: VecDeque<usize>,
    /// The part of the capacity that channels have reserved.
    pub(super) reserved: u32,
    /// The shared receive queues that feed channels, each with the number of those channels.
    pub(super) fed: Vec<(Arc<Receives>, u32)>,
    /// For the router's own polls.
    pub(super) batch: Box<[ffi::ibv_wc; BATCH]>,
}

/// The bit of an index in `Routes::numbers` that says that a shared receive queue feeds the channel.
pub(super) const FED: usize = 1 << (usize::BITS - 1);

impl Routes {
    /// Puts a completion into the inbox that it is for. A completion without an inbox is of a queue pair
    /// that was destroyed, and is dropped.
    pub(super) fn deliver(&mut self, completion: &ffi::ibv_wc) {
        let Some(inbox) = self.numbers.get(completion.qp_num) else {
            return self.deliver_to_nobody(completion);
        };
        match self.inboxes.get_mut(inbox) {
            Some(ring) => {
                ring.push(completion);
                self.enlist(inbox);
            }
            // It has the bit `FED`.
            None => self.deliver_fed(inbox & !FED, completion),
        }
    }

    /// Moves the first `count` completions of the router's batch to `polled`, except those that have to go to an
    /// inbox or to a shared receive queue.
    #[inline]
    pub(super) fn sort(&mut self, count: usize, polled: &mut Polled<'_>) {
        for index in 0..count.min(BATCH) {
            let completion = &self.batch[index];
            let inbox = self.numbers.get(completion.qp_num);
            match inbox.and_then(|inbox| Some((inbox, self.inboxes.get(inbox)?))) {
                Some((inbox, ring)) => polled.push(Inbox(inbox), ring.token, *completion),
                None => {
                    let completion = *completion;
                    self.deliver(&completion);
                }
            }
        }
    }

    /// Puts a completion into the inbox that it was for when it was polled, if that is still its channel's.
    pub(super) fn put_back(&mut self, polled: &PolledCompletion) {
        let (Inbox(inbox), completion) = (polled.inbox(), polled.completion());
        if self.inboxes[inbox].number == completion.qp_num {
            self.inboxes[inbox].push(completion);
            self.enlist(inbox);
        }
    }

    /// As `deliver`, to a channel that a shared receive queue feeds.
    #[inline(never)]
    fn deliver_fed(&mut self, inbox: usize, completion: &ffi::ibv_wc) {
        if !self.take_message(inbox, completion) {
            self.inboxes[inbox].push(completion);
        }
        self.enlist(inbox);
    }

    /// Stores the completion of a receive of the shared queue that feeds a channel. Returns false if it is not
    /// such a completion.
    pub(super) fn take_message(&mut self, inbox: usize, completion: &ffi::ibv_wc) -> bool {
        let receives = self.inboxes[inbox].receives.as_ref();
        receives.is_some_and(|(receives, member)| {
            receives.owns(completion.wr_id) && receives.complete(Some(*member), completion)
        })
    }

    /// The queue pair was destroyed. If the receive was one of a shared queue, that can have its place again.
    #[cold]
    fn deliver_to_nobody(&mut self, completion: &ffi::ibv_wc) {
        if let Some((receives, _)) = self.fed.iter().find(|fed| fed.0.owns(completion.wr_id)) {
            receives.complete(None, completion);
        }
    }

    /// Puts an inbox that has something into the list of those, unless it is in the list.
    #[inline]
    fn enlist(&mut self, inbox: usize) {
        if !mem::replace(&mut self.inboxes[inbox].listed, true) {
            self.ready.push_back(inbox);
        }
    }

    /// Takes the first inbox that still has something from the list: the queue pair's number, and the
    /// token.
    pub(super) fn take_ready(&mut self) -> Option<(u32, u64)> {
        while let Some(index) = self.ready.pop_front() {
            let ring = &mut self.inboxes[index];
            ring.listed = false;
            if ring.number != NO_NUMBER && ring.has_something() {
                return Some((ring.number, ring.token));
            }
        }
        None
    }

    /// Moves completions from an inbox to `out`, and returns how many, or a negative errno value.
    #[inline(never)]
    pub(super) fn pop(&mut self, inbox: usize, out: &mut [ffi::ibv_wc]) -> c_int {
        let count = self.inboxes[inbox].pop(out);
        if self.inboxes[inbox].len > 0 {
            self.enlist(inbox);
        }
        if count == 0 { -libc::EOVERFLOW } else { count as c_int }
    }
}
