//! The inboxes of a shared completion queue, and which of them a completion is for.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::mem;
use std::sync::Arc;

use super::generation::Generations;
use super::inbox::{NO_NUMBER, Ring};
use super::polled::{Polled, PolledCompletion};
use super::queue_pair_numbers::Numbers;
use super::shared_receives::Receives;
use super::sink::{BATCH, PollCq};
use crate::ffi;

/// The completion queue that a router polls, with its lock held.
pub(super) struct Source {
    queue: *mut ffi::ibv_cq,
    /// The provider's function.
    poll_cq: PollCq,
    capacity: u32,
}

// SAFETY: the completion queue may be used from any thread.
unsafe impl Send for Source {}

impl Source {
    /// # Safety
    ///
    /// The completion queue is live while this value is used.
    pub(super) unsafe fn new(queue: *mut ffi::ibv_cq, capacity: u32) -> Self {
        // SAFETY: the caller vouches for the queue, and with it for its context.
        let poll_cq = unsafe { (*(*queue).context).ops.poll_cq };
        // libibverbs sets every operation of a context before it hands the context out.
        Self { queue, poll_cq: poll_cq.expect("libibverbs sets it"), capacity }
    }

    pub(super) fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Polls with room for `out.len()` completions. Returns what the verb returned.
    #[inline]
    pub(super) fn poll(&self, out: &mut [ffi::ibv_wc]) -> c_int {
        // SAFETY: the queue is live, as the caller of `new` vouches; there is room.
        unsafe { (self.poll_cq)(self.queue, out.len() as c_int, out.as_mut_ptr()) }
    }
}

/// What the lock of a [`Router`](super::router::Router) protects.
pub(super) struct Routes {
    pub(super) source: Source,
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
    /// Where the generations of the next queue pair begin.
    pub(super) generations: Generations,
}

/// The bit of an index in `Routes::numbers` that says that a shared receive queue feeds the channel.
pub(super) const FED: usize = 1 << (usize::BITS - 1);

impl Routes {
    /// The part of the capacity that no channel has reserved.
    pub(super) fn available(&self) -> u32 {
        self.source.capacity - self.reserved
    }

    /// Polls into the router's own batch. Returns what the verb returned.
    #[inline]
    pub(super) fn poll(&mut self) -> c_int {
        self.source.poll(&mut self.batch[..])
    }

    /// Polls until the completion queue is empty, or polling fails. All completions go to inboxes.
    pub(super) fn drain(&mut self) {
        // Bounded, because the device may add completions meanwhile.
        for _ in 0..=self.source.capacity {
            let found = usize::try_from(self.poll()).unwrap_or(0);
            if found == 0 || found > BATCH {
                break;
            }
            for index in 0..found {
                let completion = self.batch[index];
                self.deliver(&completion);
            }
        }
    }

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
                Some((inbox, ring)) => polled.push(inbox, ring.token, *completion),
                None => {
                    let completion = *completion;
                    self.deliver(&completion);
                }
            }
        }
    }

    /// Puts a completion into the inbox that it was for when it was polled, if that is still its channel's.
    pub(super) fn put_back(&mut self, polled: &PolledCompletion) {
        let (inbox, completion) = (polled.inbox(), polled.completion());
        if self.inboxes[inbox].label.number() == completion.qp_num {
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
    pub(super) fn enlist(&mut self, inbox: usize) {
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
            let number = ring.label.number();
            let has_something = ring.has_something();
            if number != NO_NUMBER && has_something {
                return Some((number, ring.token));
            }
        }
        None
    }

    /// Moves completions from an inbox to `out`, and returns how many, or a negative errno value.
    pub(super) fn pop(&mut self, inbox: usize, out: &mut [ffi::ibv_wc]) -> c_int {
        let count = self.inboxes[inbox].pop(out);
        if self.inboxes[inbox].len > 0 {
            self.enlist(inbox);
        }
        if count == 0 { -libc::EOVERFLOW } else { count as c_int }
    }
}
