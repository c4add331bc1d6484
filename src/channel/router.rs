//! Delivers each completion of a shared completion queue to the channel that it belongs to.
//!
//! A channel that polls first takes what is in its inbox. If that is empty, it polls the completion
//! queue into its own batch, keeps its own completions there, and puts those of others into their
//! inboxes. Each inbox has room for everything that its channel can have in flight.
//!
//! An inbox that gets a completion is put into the list of those that have something, at most once, and
//! at the end of the list. [`Router::next_ready`] takes them from the front, so no channel can keep
//! another one from its turn.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::fmt;
use std::mem;
use std::sync::{Arc, PoisonError};

use super::batch::{BATCH, PollCq};
use super::epoch::new_epoch;
use super::in_flight::no_memory;
use super::inbox::{NO_NUMBER, Ring};
use super::polled::{Found, Polled, PolledCompletion};
use super::queue_pair_numbers::Numbers;
use super::routes::{FED, Routes};
use super::shared_receives::{Member, Receives};
use crate::error::{Error, Result};
use crate::ffi;
use crate::sync::{Mutex, MutexGuard};

/// The index of an inbox.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Inbox(pub(super) usize);

/// See the [module](self).
pub(super) struct Router {
    /// Live while the router is used: each user holds the `CompletionQueue`.
    queue: *mut ffi::ibv_cq,
    /// The provider's function.
    poll_cq: PollCq,
    capacity: u32,
    /// Older than any channel that uses the queue.
    first_epoch: u32,
    routes: Mutex<Routes>,
}

// SAFETY: the completion queue may be used from any thread, and the rest is `Send`.
unsafe impl Send for Router {}
// SAFETY: as above; everything that changes is behind the lock.
unsafe impl Sync for Router {}

impl Router {
    /// Drops the completions that are in the queue: they are of queue pairs that were destroyed, whose
    /// numbers a channel may get.
    ///
    /// # Safety
    ///
    /// The completion queue is live while the router is used, and only the router polls it.
    pub(super) unsafe fn new(queue: *mut ffi::ibv_cq, capacity: u32) -> Self {
        let routes = Routes {
            numbers: Numbers::new(),
            inboxes: Vec::new(),
            free: Vec::new(),
            ready: VecDeque::new(),
            reserved: 0,
            fed: Vec::new(),
            batch: Box::default(),
        };
        // SAFETY: the caller vouches for the queue, and with it for its context.
        let poll_cq = unsafe { (*(*queue).context).ops.poll_cq };
        // libibverbs sets every operation of a context before it hands the context out.
        let poll_cq = poll_cq.expect("libibverbs sets it");
        let router =
            Self { queue, poll_cq, capacity, first_epoch: new_epoch(), routes: Mutex::new(routes) };
        router.drain(&mut router.lock());
        router
    }

    #[inline]
    fn lock(&self) -> MutexGuard<'_, Routes> {
        // Nothing panics while it holds the lock; even if something did, the routes would be consistent.
        self.routes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn capacity(&self) -> u32 {
        self.capacity
    }

    /// The part of the capacity that no channel has reserved.
    pub(super) fn available(&self) -> u32 {
        self.capacity - self.lock().reserved
    }

    pub(super) fn first_epoch(&self) -> u32 {
        self.first_epoch
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
        let left = self.capacity - routes.reserved;
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
            // As `SharedCompletionQueue::available` counts.
            let what = if messages == 0 {
                "what the channel needs of the shared completion queue (max_send_wr + max_recv_wr)"
            } else {
                "what the channel needs of the shared completion queue (max_send_wr + the capacity \
                 of its SharedReceives)"
            };
            let verb = "ChannelBuilder::build";
            return Err(Error::out_of_range(verb, what, needed.into(), 0, left.into()));
        }
        let mut ring = Ring::new(room, token)?;
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
        let index = match routes.free.pop() {
            Some(index) => {
                // The list may still hold the index.
                ring.listed = routes.inboxes[index].listed;
                routes.inboxes[index] = ring;
                index
            }
            None => {
                routes.inboxes.push(ring);
                routes.inboxes.len() - 1
            }
        };
        Ok(Inbox(index))
    }

    /// From now on, delivers completions of the queue pair with this number to the inbox.
    ///
    /// The number may still belong to another inbox, if its queue pair was destroyed and its channel was
    /// not dropped yet.
    pub(super) fn register(&self, inbox: Inbox, number: u32) {
        let mut routes = self.lock();
        if let Some(old) = routes.numbers.get(number) {
            // Completions of the old queue pair must not fill the new one's inbox.
            self.drain(&mut routes);
            routes.inboxes[old & !FED].number = NO_NUMBER;
        }
        let fed = if routes.inboxes[inbox.0].receives.is_some() { FED } else { 0 };
        routes.numbers.insert(number, inbox.0 | fed);
        routes.inboxes[inbox.0].number = number;
    }

    /// As [`register`](Self::register), for an inbox whose queue pair was reset and is about to be
    /// destroyed.
    pub(super) fn renumber(&self, inbox: Inbox, number: u32) {
        self.clear(inbox);
        let mut routes = self.lock();
        let old = mem::replace(&mut routes.inboxes[inbox.0].number, NO_NUMBER);
        if old != NO_NUMBER {
            routes.numbers.remove(old);
        }
        drop(routes);
        self.register(inbox, number);
    }

    /// Frees the inbox of a queue pair that was destroyed, or never existed.
    pub(super) fn release(&self, inbox: Inbox) {
        let mut routes = self.lock();
        let ring = &mut routes.inboxes[inbox.0];
        let (number, room) = (ring.number, ring.entries.len() as u32);
        let listed = ring.listed;
        let receives = mem::replace(ring, Ring::unused()).receives;
        ring.listed = listed;
        routes.free.push(inbox.0);
        if number != NO_NUMBER {
            routes.numbers.remove(number);
        }
        // Completions of the queue pair take up room in the completion queue until they are polled.
        self.drain(&mut routes);
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
    pub(super) fn clear(&self, inbox: Inbox) {
        let mut routes = self.lock();
        self.drain(&mut routes);
        routes.inboxes[inbox.0].clear();
    }

    /// Polls until the completion queue is empty, or polling fails. All completions go to inboxes.
    fn drain(&self, routes: &mut Routes) {
        // Bounded, because the device may add completions meanwhile.
        for _ in 0..=self.capacity {
            let found = usize::try_from(self.poll_queue(&mut routes.batch[..])).unwrap_or(0);
            if found == 0 || found > BATCH {
                break;
            }
            for index in 0..found {
                let completion = routes.batch[index];
                routes.deliver(&completion);
            }
        }
    }

    /// The next channel that has something: the queue pair's number, and the token. Polls the completion
    /// queue if no channel has something yet. If it returns `None`, the queue was empty.
    ///
    /// The caller keeps the completion queue alive.
    ///
    /// # Errors
    ///
    /// Those of `ibv_poll_cq`.
    pub(super) fn next_ready(&self) -> Result<Option<(u32, u64)>> {
        let mut routes = self.lock();
        // Each round polls at least one completion. The bound matters only for a device that invents
        // completions.
        for _ in 0..=self.capacity {
            if let Some(ready) = routes.take_ready() {
                return Ok(Some(ready));
            }
            let found = self.poll_queue(&mut routes.batch[..]);
            match usize::try_from(found) {
                Ok(0) => break,
                Ok(found) if found <= BATCH => {
                    for index in 0..found {
                        let completion = routes.batch[index];
                        routes.deliver(&completion);
                    }
                }
                _ => return Err(poll_failed(found)),
            }
        }
        Ok(None)
    }

    /// As [`next_ready`](Self::next_ready), for a caller that hands completions to the channels itself: polls into
    /// `polled`, which must be empty, if no channel has something yet.
    ///
    /// # Errors
    ///
    /// Those of `ibv_poll_cq`.
    pub(super) fn poll_into(&self, polled: &mut Polled<'_>) -> Result<Found> {
        debug_assert!(polled.is_empty());
        polled.clear();
        let mut routes = self.lock();
        // As in `next_ready`.
        for _ in 0..=self.capacity {
            if let Some((_, token)) = routes.take_ready() {
                return Ok(Found::Ready(token));
            }
            let found = self.poll_queue(&mut routes.batch[..]);
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
                return Ok(Found::Completions);
            }
        }
        Ok(Found::Nothing)
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
    pub(super) fn poll(&self, inbox: Inbox, out: &mut [ffi::ibv_wc]) -> c_int {
        let mut routes = self.lock();
        let Some(ring) = routes.inboxes.get(inbox.0) else { return -libc::EINVAL };
        let number = ring.number;
        if ring.is_pending {
            return routes.pop(inbox.0, out);
        }
        let found = self.poll_queue(out);
        // A negative value is larger than any length, so one comparison finds failures too.
        let count = found as u32 as usize;
        let Some(polled) = out.get(..count) else { return found };
        let is_own = |completion: &ffi::ibv_wc| completion.qp_num == number;
        // Most often one or two of the channel that polls, or else none, or several. Those in pairs, as the compiler
        // unrolls no search.
        let all_own = match polled {
            [only] => is_own(only),
            [first, second] => is_own(first) && is_own(second),
            polled => {
                let mut pairs = polled.chunks_exact(2);
                pairs.all(|pair| pair.iter().all(is_own)) && pairs.remainder().iter().all(is_own)
            }
        };
        if all_own {
            return found;
        }
        self.sort_and_poll_on(&mut routes, number, out, count)
    }

    /// As [`poll`](Self::poll), without polling the completion queue: returns what is in the inbox.
    pub(super) fn take(&self, inbox: Inbox, out: &mut [ffi::ibv_wc]) -> c_int {
        let mut routes = self.lock();
        match routes.inboxes.get(inbox.0) {
            Some(ring) if ring.is_pending => routes.pop(inbox.0, out),
            Some(_) => 0,
            None => -libc::EINVAL,
        }
    }

    /// As [`poll`](Self::poll), for a channel that a shared receive queue feeds. The completions of its receives go
    /// there, and are not returned: so their order is that of the completion queue, whichever thread polls.
    pub(super) fn poll_fed(&self, inbox: Inbox, out: &mut [ffi::ibv_wc]) -> c_int {
        let mut routes = self.lock();
        let Some(ring) = routes.inboxes.get(inbox.0) else { return -libc::EINVAL };
        let number = ring.number;
        if ring.is_pending {
            return routes.pop(inbox.0, out);
        }
        for _ in 0..=self.capacity {
            let found = self.poll_queue(out);
            let Ok(found) = usize::try_from(found) else { return found };
            if found == 0 || found > out.len() {
                return found as c_int;
            }
            let mut own = 0;
            for index in 0..found {
                let completion = out[index];
                if completion.qp_num != number {
                    routes.deliver(&completion);
                } else if !routes.take_message(inbox.0, &completion) {
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

    /// Polls the completion queue, with room for `out.len()` completions.
    #[inline]
    fn poll_queue(&self, out: &mut [ffi::ibv_wc]) -> c_int {
        // SAFETY: the caller uses the completion queue, so it is live; there is room.
        unsafe { (self.poll_cq)(self.queue, out.len() as c_int, out.as_mut_ptr()) }
    }

    /// The rest of `poll`, where `found` completions are in `out`, some of which are for other channels.
    #[inline(never)]
    fn sort_and_poll_on(
        &self,
        routes: &mut Routes,
        number: u32,
        out: &mut [ffi::ibv_wc],
        mut found: usize,
    ) -> c_int {
        // Each round polls at least one completion, and there are at most `capacity` of them while the
        // lock is held. The bound matters only for a device that invents completions.
        for _ in 0..=self.capacity {
            let mut own = 0;
            for index in 0..found {
                if out[index].qp_num == number {
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
            let returned = self.poll_queue(out);
            found = match usize::try_from(returned) {
                Ok(found) if found > 0 && found <= out.len() => found,
                _ => return returned,
            };
        }
        0
    }
}

impl fmt::Debug for Router {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Router").field("capacity", &self.capacity).finish_non_exhaustive()
    }
}

#[cold]
fn poll_failed(found: c_int) -> Error {
    // More completions than there was room for: the provider is broken.
    let found = if found > 0 { -libc::EIO } else { found };
    ffi::failed("ibv_poll_cq", found)
}

/// A `poll_cq` for channels that share a completion queue.
///
/// # Safety
///
/// `route` points to the router and the inbox of a live channel. `completions` points to `most`
/// initialised completions, and `most` is not negative.
pub(super) unsafe extern "C" fn poll_routed(
    route: *mut ffi::ibv_cq,
    most: c_int,
    completions: *mut ffi::ibv_wc,
) -> c_int {
    // SAFETY: the caller vouches for both.
    let ((router, inbox), out) = unsafe {
        (
            &*route.cast::<(Arc<Router>, Inbox)>(),
            std::slice::from_raw_parts_mut(completions, most as usize),
        )
    };
    router.poll(*inbox, out)
}

/// As [`poll_routed`], for channels that a shared receive queue feeds.
///
/// # Safety
///
/// As for [`poll_routed`].
pub(super) unsafe extern "C" fn poll_routed_receives(
    route: *mut ffi::ibv_cq,
    most: c_int,
    completions: *mut ffi::ibv_wc,
) -> c_int {
    // SAFETY: the caller vouches for both.
    let ((router, inbox), out) = unsafe {
        (
            &*route.cast::<(Arc<Router>, Inbox)>(),
            std::slice::from_raw_parts_mut(completions, most as usize),
        )
    };
    router.poll_fed(*inbox, out)
}
