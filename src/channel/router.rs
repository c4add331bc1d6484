//! Delivers each completion of a shared completion queue to the channel that it belongs to.
//!
//! A channel that polls first takes what is in its inbox. If that is empty, it polls the completion
//! queue into its own batch, keeps its own completions there, and puts those of others into their
//! inboxes. Each inbox has room for everything that its channel can have in flight.
//!
//! An inbox that gets a completion is put into the list of those that have something, at most once, and
//! at the end of the list. [`Router::poll_into`] takes them from the front, so no channel can keep
//! another one from its turn.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::mem;
use std::sync::{Arc, PoisonError};

use super::generation::Generations;
use super::in_flight::no_memory;
use super::inbox::{Label, NO_NUMBER, Ring};
use super::polled::{Found, Polled, PolledCompletion};
use super::queue_pair_numbers::Numbers;
use super::routes::{FED, Routes, Source};
use super::shared_receives::{Member, Receives};
use super::sink::BATCH;
use crate::debug::debug;
use crate::error::{Error, Result};
use crate::ffi;
use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering};

/// The inbox of a channel.
#[derive(Clone, Debug)]
pub(super) struct Inbox(Arc<Label>);

#[cfg(all(test, ibverbs_loom))]
impl Inbox {
    pub(super) fn has_place_of(&self, other: &Self) -> bool {
        self.0.index == other.0.index
    }
}

/// See the [module](self).
pub(super) struct Router {
    routes: Mutex<Routes>,
    /// The numbers of polls whose completions were handed out by `poll_into`, and that have been dealt with.
    polls_begun: AtomicU64,
    polls_done: AtomicU64,
}

impl Router {
    /// Drops the completions that are in the queue: they are of queue pairs that were destroyed, whose
    /// numbers a channel may get.
    ///
    /// # Safety
    ///
    /// The completion queue is live while the router is used (each user holds the `CompletionQueue`), and only the
    /// router polls it.
    pub(super) unsafe fn new(queue: *mut ffi::ibv_cq, capacity: u32) -> Self {
        let mut routes = Routes {
            // SAFETY: the caller vouches for it.
            source: unsafe { Source::new(queue, capacity) },
            numbers: Numbers::new(),
            inboxes: Vec::new(),
            free: Vec::new(),
            ready: VecDeque::new(),
            reserved: 0,
            fed: Vec::new(),
            batch: Box::default(),
            generations: Generations::NEW,
        };
        routes.drain();
        Self {
            routes: Mutex::new(routes),
            polls_begun: AtomicU64::new(0),
            polls_done: AtomicU64::new(0),
        }
    }

    #[inline]
    fn lock(&self) -> MutexGuard<'_, Routes> {
        // Nothing panics while it holds the lock; even if something did, the routes would be consistent.
        self.routes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn capacity(&self) -> u32 {
        self.lock().source.capacity()
    }

    /// The part of the capacity that no channel has reserved.
    pub(super) fn available(&self) -> u32 {
        self.lock().available()
    }

    /// Where the generations of a queue pair begin that was just created: behind those of all that were destroyed, as it
    /// may have the number of one of them.
    pub(super) fn generations(&self) -> Generations {
        self.lock().generations
    }

    /// A queue pair is about to be destroyed whose requests have come to these generations.
    pub(super) fn begin_after(&self, reached: Generations) {
        let mut routes = self.lock();
        routes.generations = routes.generations.max(reached);
    }

    /// Makes an inbox for `room` completions, for a queue pair that does not exist yet. The token names its
    /// channel to the program. If a shared receive queue feeds the channel, the completion queue needs room for
    /// the receives of that too, once for all channels that it feeds.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: less than `room` of the capacity is left.
    ///  - `ENOMEM`: out of memory.
    pub(super) fn reserve(
        &self,
        room: u32,
        token: u64,
        receives: Option<(Arc<Receives>, Member)>,
    ) -> Result<Inbox> {
        let mut routes = self.lock();
        let left = routes.available();
        let is_same = |fed: &Arc<Receives>| {
            receives.as_ref().is_some_and(|(receives, _)| Arc::ptr_eq(fed, receives))
        };
        let known = routes.fed.iter().position(|(fed, _)| is_same(fed));
        let messages = match (&receives, known) {
            (Some((receives, _)), None) => receives.capacity(),
            _ => 0,
        };
        let needed = room.saturating_add(messages);
        if needed > left {
            let what = if messages == 0 {
                "what the channel needs of the shared completion queue (max_send_wr + max_recv_wr)"
            } else {
                "what the channel needs of the shared completion queue (max_send_wr + the capacity \
                 of its SharedReceives)"
            };
            let verb = "ChannelBuilder::build";
            return Err(Error::out_of_range(verb, what, needed.into(), 0, left.into()));
        }
        let index = routes.free.last().copied().unwrap_or(routes.inboxes.len());
        let mut ring = Ring::new(room, token, index)?;
        routes.fed.try_reserve(1).map_err(|_| no_memory())?;
        // Reserve now, so that neither the code below nor `register`, `deliver` or `release` allocates.
        if routes.free.is_empty() {
            let channels = routes.inboxes.len() + 1;
            routes.inboxes.try_reserve(1).map_err(|_| no_memory())?;
            routes.free.try_reserve(channels).map_err(|_| no_memory())?;
            let listed = routes.ready.len();
            routes.ready.try_reserve(channels - listed).map_err(|_| no_memory())?;
            routes.numbers.reserve(channels)?;
        }
        routes.reserved += needed;
        match (&receives, known) {
            (Some(_), Some(known)) => routes.fed[known].1 += 1,
            (Some((receives, _)), None) => routes.fed.push((receives.clone(), 1)),
            (None, _) => {}
        }
        ring.receives = receives;
        let inbox = Inbox(ring.label.clone());
        if routes.free.pop().is_some() {
            // The list may still hold the index.
            ring.listed = routes.inboxes[index].listed;
            routes.inboxes[index] = ring;
        } else {
            routes.inboxes.push(ring);
        }
        Ok(inbox)
    }

    /// From now on, delivers completions of the queue pair with this number to the inbox.
    ///
    /// The number may still belong to another inbox, if its queue pair was destroyed and its channel was
    /// not dropped yet.
    pub(super) fn register(&self, inbox: &Inbox, number: u32) {
        let mut routes = self.lock();
        if let Some(old) = routes.numbers.get(number) {
            // Completions of the old queue pair must not fill the new one's inbox.
            routes.drain();
            routes.inboxes[old & !FED].label.set_number(NO_NUMBER);
        }
        let fed = if routes.inboxes[inbox.0.index].receives.is_some() { FED } else { 0 };
        routes.numbers.insert(number, inbox.0.index | fed);
        inbox.0.set_number(number);
    }

    /// As [`register`](Self::register), for an inbox whose queue pair was reset and is about to be
    /// destroyed.
    pub(super) fn renumber(&self, inbox: &Inbox, number: u32) {
        self.clear(inbox);
        let mut routes = self.lock();
        let old = inbox.0.number();
        inbox.0.set_number(NO_NUMBER);
        if old != NO_NUMBER {
            routes.numbers.remove(old);
        }
        drop(routes);
        self.register(inbox, number);
    }

    /// Frees the inbox of a queue pair that was destroyed, or never existed.
    pub(super) fn release(&self, inbox: &Inbox) {
        let mut routes = self.lock();
        let ring = &mut routes.inboxes[inbox.0.index];
        let (number, room) = (inbox.0.number(), ring.entries.len() as u32);
        let listed = ring.listed;
        ring.clear();
        inbox.0.set_number(NO_NUMBER);
        let receives = mem::replace(ring, Ring::unused(inbox.0.clone())).receives;
        ring.listed = listed;
        routes.free.push(inbox.0.index);
        if number != NO_NUMBER {
            routes.numbers.remove(number);
        }
        // Completions of the queue pair take up room in the completion queue until they are polled.
        routes.drain();
        routes.reserved -= room;
        if let Some((receives, _)) = receives
            && let Some(index) = routes.fed.iter().position(|fed| Arc::ptr_eq(&fed.0, &receives))
        {
            routes.fed[index].1 -= 1;
            if routes.fed[index].1 == 0 {
                routes.fed.swap_remove(index);
                routes.reserved -= receives.capacity();
            }
        }
    }

    /// Drops all completions of a queue pair that was reset.
    pub(super) fn clear(&self, inbox: &Inbox) {
        let mut routes = self.lock();
        routes.drain();
        routes.inboxes[inbox.0.index].clear();
    }

    /// The next channel that has something, for a caller that hands completions to the channels itself: polls into
    /// `polled`, which must be empty, if no channel has something yet. Until they have been dealt with, the poll is
    /// [under way](Self::polls_begun).
    ///
    /// # Errors
    ///
    /// Those of `ibv_poll_cq`.
    pub(super) fn poll_into(&self, polled: &mut Polled<'_>) -> Result<Found> {
        debug_assert!(polled.is_empty());
        polled.clear();
        let mut routes = self.lock();
        // Each round polls at least one completion. The bound matters only for a device that invents
        // completions.
        for _ in 0..=routes.source.capacity() {
            if let Some((_, token)) = routes.take_ready() {
                return Ok(Found::Ready(token));
            }
            let found = routes.poll();
            // A negative value is larger than any length.
            let count = found as u32 as usize;
            if count == 0 {
                break;
            }
            if count > BATCH {
                return Err(poll_failed(found));
            }
            routes.sort(count, polled);
            if !polled.is_empty() {
                // While the lock is held: what is in nobody's reach is of a poll that has begun.
                self.polls_begun.fetch_add(1, Ordering::SeqCst);
                return Ok(Found::Completions);
            }
        }
        Ok(Found::Nothing)
    }

    /// The completions that `poll_into` has returned last have been dealt with.
    #[inline]
    pub(super) fn poll_done(&self) {
        self.polls_done.fetch_add(1, Ordering::SeqCst);
    }

    /// The number of polls that have begun. The completions that they found are in nobody's reach until as many are
    /// [done](Self::polls_done).
    pub(super) fn polls_begun(&self) -> u64 {
        self.polls_begun.load(Ordering::SeqCst)
    }

    pub(super) fn polls_done(&self) -> u64 {
        self.polls_done.load(Ordering::SeqCst)
    }

    /// Puts completions of one channel, which was not dropped since, into its inbox.
    #[cold]
    pub(super) fn put_back(&self, polled: &[PolledCompletion]) {
        let mut routes = self.lock();
        for polled in polled {
            routes.put_back(polled);
        }
    }

    /// Puts completions into the inboxes that they are for.
    #[cold]
    pub(super) fn deliver<'a>(&self, completions: impl Iterator<Item = &'a ffi::ibv_wc>) {
        let mut routes = self.lock();
        for completion in completions {
            routes.deliver(completion);
        }
    }

    /// As `ibv_poll_cq`, for one channel: returns the number of its completions that were put at the
    /// beginning of `out`, or a negative errno value. The caller keeps the completion queue alive.
    ///
    /// It finds nothing only if the completion queue was empty, so a caller that has armed the queue
    /// may then sleep.
    #[inline]
    pub(super) fn poll<const MOST: usize>(
        &self,
        inbox: &Inbox,
        out: &mut [ffi::ibv_wc; MOST],
    ) -> c_int {
        let routes = self.lock();
        if inbox.0.is_pending() {
            return pop(routes, inbox.0.index, out);
        }
        let found = routes.source.poll(out);
        // Most often one or two of the channel that polls: all are, if the first and the last are.
        let number = inbox.0.number();
        let is_own = |index: usize| out[index].qp_num == number;
        let last = (found as u32).wrapping_sub(1) as usize;
        if last < 2 && is_own(0) && is_own(last) {
            return found;
        }
        sort_and_poll_on(routes, number, out, found)
    }

    /// As [`poll`](Self::poll), without polling the completion queue: returns what is in the inbox.
    pub(super) fn take(&self, inbox: &Inbox, out: &mut [ffi::ibv_wc]) -> c_int {
        let routes = self.lock();
        if inbox.0.is_pending() { pop(routes, inbox.0.index, out) } else { 0 }
    }

    /// As [`poll`](Self::poll), for a channel that a shared receive queue feeds. The completions of its receives go
    /// there, and are not returned: so their order is that of the completion queue, whichever thread polls.
    pub(super) fn poll_fed(&self, inbox: &Inbox, out: &mut [ffi::ibv_wc; BATCH]) -> c_int {
        let mut routes = self.lock();
        if inbox.0.is_pending() {
            return pop(routes, inbox.0.index, out);
        }
        let number = inbox.0.number();
        for _ in 0..=routes.source.capacity() {
            let found = routes.source.poll(out);
            let Ok(found) = usize::try_from(found) else { return found };
            if found == 0 || found > out.len() {
                return found as c_int;
            }
            let mut own = 0;
            for index in 0..found {
                let completion = out[index];
                if completion.qp_num != number {
                    routes.deliver(&completion);
                } else if routes.take_message(inbox.0.index, &completion) {
                    // The channel may wait for something else.
                    routes.enlist(inbox.0.index);
                } else {
                    out[own] = completion;
                    own += 1;
                }
            }
            if own > 0 {
                return own as c_int;
            }
        }
        0
    }
}

debug! { Router, self, capacity: self.capacity(), .. }

/// The rest of `poll`, after a poll that returned `found`: completions are in `out`, some of which may be for other
/// channels.
///
/// It takes the lock along: so a poll that does not come here needs fewer registers.
#[inline(never)]
fn sort_and_poll_on(
    mut routes: MutexGuard<'_, Routes>,
    number: u32,
    out: &mut [ffi::ibv_wc],
    mut found: c_int,
) -> c_int {
    let is_own = |completion: &ffi::ibv_wc| completion.qp_num == number;
    // Each round polls at least one completion, and there are at most `capacity` of them while the
    // lock is held. The bound matters only for a device that invents completions.
    for _ in 0..=routes.source.capacity() {
        // A negative value is larger than any length, so one comparison finds failures too.
        let count = found as u32 as usize;
        let Some(polled) = out.get(..count) else { return found };
        // In pairs, as the compiler unrolls no search.
        let mut pairs = polled.chunks_exact(2);
        if pairs.all(|pair| pair.iter().all(is_own)) && pairs.remainder().iter().all(is_own) {
            return found;
        }
        let mut own = 0;
        for index in 0..count {
            if is_own(&out[index]) {
                if own != index {
                    out[own] = out[index];
                }
                own += 1;
            } else {
                routes.deliver(&out[index]);
            }
        }
        if own > 0 {
            return own as c_int;
        }
        found = routes.source.poll(out);
    }
    0
}

/// Moves completions from an inbox to `out`, and returns how many, or a negative errno value. It takes the lock along too.
#[inline(never)]
fn pop(mut routes: MutexGuard<'_, Routes>, inbox: usize, out: &mut [ffi::ibv_wc]) -> c_int {
    routes.pop(inbox, out)
}

#[cold]
fn poll_failed(found: c_int) -> Error {
    // More completions than there was room for: the provider is broken.
    let found = if found > 0 { -libc::EIO } else { found };
    ffi::failed("ibv_poll_cq", found)
}
