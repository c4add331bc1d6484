//! Delivers each completion of a shared completion queue to the channel that it belongs to.
//!
//! A channel that polls first takes what is in its inbox. If that is empty, it polls the completion
//! queue into its own batch, keeps its own completions there, and puts those of others into their
//! inboxes. Each inbox has room for everything that its channel can have in flight.

use std::ffi::c_int;
use std::fmt;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::batch::{BATCH, PollCq};
use super::epoch::new_epoch;
use super::in_flight::no_memory;
use crate::error::{Error, Result};
use crate::ffi;

/// The index of an inbox.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Inbox(usize);

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

struct Routes {
    numbers: Numbers,
    /// Those that are not `in_use` are free for a new channel.
    inboxes: Vec<Ring>,
    /// The part of the capacity that channels have reserved.
    reserved: u32,
    /// For the router's own polls.
    batch: Box<[ffi::ibv_wc; BATCH]>,
}

/// Finds inboxes by the numbers of their queue pairs: a hash table with linear probing, at most half
/// full. Devices number queue pairs mostly in sequence, so most are found at the first probe.
struct Numbers {
    /// A power of two of entries.
    entries: Vec<Option<(u32, usize)>>,
    len: usize,
}

impl Numbers {
    fn new() -> Self {
        Self { entries: vec![None; 8], len: 0 }
    }

    /// The index of the number's entry, or of the free entry where it would go.
    #[inline]
    fn position(&self, number: u32) -> usize {
        let mask = self.entries.len() - 1;
        let mut at = number as usize & mask;
        // At least half of the entries are free, so this ends.
        while self.entries[at].is_some_and(|entry| entry.0 != number) {
            at = (at + 1) & mask;
        }
        at
    }

    #[inline]
    fn get(&self, number: u32) -> Option<usize> {
        self.entries[self.position(number)].map(|entry| entry.1)
    }

    /// Makes room for `numbers` numbers, so that `insert` need not allocate.
    ///
    /// # Errors
    ///
    ///  - `ENOMEM`: out of memory.
    fn reserve(&mut self, numbers: usize) -> Result<()> {
        let mut size = self.entries.len();
        while numbers * 2 > size {
            size *= 2;
        }
        if size > self.entries.len() {
            let mut entries = Vec::new();
            entries.try_reserve_exact(size).map_err(|_| no_memory())?;
            entries.resize(size, None);
            for entry in std::mem::replace(&mut self.entries, entries).into_iter().flatten() {
                let position = self.position(entry.0);
                self.entries[position] = Some(entry);
            }
        }
        Ok(())
    }

    /// Sets the inbox of a number, for which there is room.
    fn insert(&mut self, number: u32, inbox: usize) {
        let at = self.position(number);
        if self.entries[at].replace((number, inbox)).is_none() {
            self.len += 1;
        }
    }

    /// Removes a number, if it is there.
    fn remove(&mut self, number: u32) {
        let mut at = self.position(number);
        if self.entries[at].take().is_none() {
            return;
        }
        self.len -= 1;
        // The removed number may have displaced the entries that follow: insert them again.
        let mask = self.entries.len() - 1;
        loop {
            at = (at + 1) & mask;
            let Some(entry) = self.entries[at].take() else { return };
            let position = self.position(entry.0);
            self.entries[position] = Some(entry);
        }
    }
}

/// Not the number of a queue pair: those have 24 bits.
const NO_NUMBER: u32 = u32::MAX;

/// The completions of one channel, in the order in which they were polled.
struct Ring {
    entries: Box<[ffi::ibv_wc]>,
    first: usize,
    len: usize,
    /// A completion found no room: the device has made more completions than there were requests.
    overflown: bool,
    /// The number of the channel's queue pair, if completions with this number are for this inbox, or
    /// else `NO_NUMBER`.
    number: u32,
    /// Whether there is a channel.
    in_use: bool,
}

impl Ring {
    /// # Errors
    ///
    ///  - `ENOMEM`: out of memory.
    fn new(room: u32) -> Result<Self> {
        let mut entries = Vec::new();
        entries.try_reserve_exact(room as usize).map_err(|_| no_memory())?;
        entries.resize(room as usize, ffi::ibv_wc::default());
        Ok(Self { entries: entries.into(), in_use: true, ..Self::unused() })
    }

    /// An inbox that is free for a new channel.
    fn unused() -> Self {
        let entries = Box::default();
        Self { entries, first: 0, len: 0, overflown: false, number: NO_NUMBER, in_use: false }
    }

    /// The index after `index`, around the end.
    #[inline]
    fn after(&self, index: usize) -> usize {
        if index + 1 == self.entries.len() { 0 } else { index + 1 }
    }

    fn push(&mut self, completion: &ffi::ibv_wc) {
        if self.len == self.entries.len() {
            self.overflown = true;
            return;
        }
        let mut at = self.first + self.len;
        if at >= self.entries.len() {
            at -= self.entries.len();
        }
        self.entries[at] = *completion;
        self.len += 1;
    }

    /// Moves completions to `out` and returns how many they were.
    fn pop(&mut self, out: &mut [ffi::ibv_wc]) -> usize {
        let count = self.len.min(out.len());
        for place in &mut out[..count] {
            *place = self.entries[self.first];
            self.first = self.after(self.first);
        }
        self.len -= count;
        count
    }
}

impl Routes {
    /// Puts a completion into the inbox that it is for. A completion without an inbox is of a queue pair
    /// that was destroyed, and is dropped.
    fn deliver(&mut self, completion: &ffi::ibv_wc) {
        if let Some(inbox) = self.numbers.get(completion.qp_num) {
            self.inboxes[inbox].push(completion);
        }
    }

    /// Moves completions from an inbox to `out`, and returns how many, or a negative errno value.
    #[inline(never)]
    fn pop(&mut self, inbox: Inbox, out: &mut [ffi::ibv_wc]) -> c_int {
        match self.inboxes[inbox.0].pop(out) {
            0 => -libc::EOVERFLOW,
            count => count as c_int,
        }
    }
}

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
            reserved: 0,
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

    /// Makes an inbox for `room` completions, for a queue pair that does not exist yet.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: less than `room` of the capacity is left.
    ///  - `ENOMEM`: out of memory.
    pub(super) fn reserve(&self, room: u32) -> Result<Inbox> {
        let mut routes = self.lock();
        let left = self.capacity - routes.reserved;
        if room > left {
            // As `SharedCompletionQueue::available` counts.
            let what =
                "what the channel needs of the shared completion queue (max_send_wr + max_recv_wr)";
            let verb = "ChannelBuilder::build";
            return Err(Error::out_of_range(verb, what, room.into(), 0, left.into()));
        }
        let ring = Ring::new(room)?;
        // Reserve now, so that neither the code below nor `register` allocates.
        let channels = routes.inboxes.len() + 1;
        routes.inboxes.try_reserve(1).map_err(|_| no_memory())?;
        routes.numbers.reserve(channels)?;
        routes.reserved += room;
        let index = match routes.inboxes.iter().position(|ring| !ring.in_use) {
            Some(index) => {
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
            routes.inboxes[old].number = NO_NUMBER;
        }
        routes.numbers.insert(number, inbox.0);
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
        *ring = Ring::unused();
        if number != NO_NUMBER {
            routes.numbers.remove(number);
        }
        // Completions of the queue pair take up room in the completion queue until they are polled.
        self.drain(&mut routes);
        routes.reserved -= room;
    }

    /// Drops all completions of a queue pair that was reset.
    pub(super) fn clear(&self, inbox: Inbox) {
        let mut routes = self.lock();
        self.drain(&mut routes);
        let ring = &mut routes.inboxes[inbox.0];
        (ring.len, ring.overflown) = (0, false);
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

    /// As `ibv_poll_cq`, for one channel: returns the number of its completions that were put at the
    /// beginning of `out`, or a negative errno value. The caller keeps the completion queue alive.
    ///
    /// It finds nothing only if the completion queue was empty, so a caller that has armed the queue
    /// may then sleep.
    #[inline]
    fn poll(&self, inbox: Inbox, out: &mut [ffi::ibv_wc]) -> c_int {
        let mut routes = self.lock();
        let Some(ring) = routes.inboxes.get(inbox.0) else { return -libc::EINVAL };
        let number = ring.number;
        if ring.len > 0 || ring.overflown {
            return routes.pop(inbox, out);
        }
        let found = self.poll_queue(out);
        if found <= 0 || found > out.len() as c_int {
            return found;
        }
        // Mostly a single completion, or several of the channel that polls.
        if out[..found as usize].iter().all(|completion| completion.qp_num == number) {
            return found;
        }
        self.sort_and_poll_on(&mut routes, number, out, found as usize)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn completion(wr_id: u64) -> ffi::ibv_wc {
        ffi::ibv_wc { wr_id, ..Default::default() }
    }

    fn pop_all(ring: &mut Ring, at_a_time: usize) -> Vec<u64> {
        let mut popped = Vec::new();
        loop {
            let mut out = vec![completion(0); at_a_time];
            match ring.pop(&mut out) {
                0 => return popped,
                count => popped.extend(out[..count].iter().map(|completion| completion.wr_id)),
            }
        }
    }

    #[test]
    fn a_ring_keeps_the_order_and_detects_overflow() {
        for at_a_time in 1..5 {
            let mut ring = Ring::new(3).unwrap();
            for round in 0..5 {
                for n in 0..3 {
                    ring.push(&completion(round * 3 + n));
                }
                assert!(!ring.overflown);
                let expected = [round * 3, round * 3 + 1, round * 3 + 2];
                assert_eq!(pop_all(&mut ring, at_a_time), expected);
                ring.push(&completion(0));
                assert_eq!(pop_all(&mut ring, at_a_time), [0]);
            }
            for n in 0..4 {
                ring.push(&completion(n));
            }
            assert!(ring.overflown);
            assert_eq!(pop_all(&mut ring, at_a_time), [0, 1, 2]);
        }
    }

    #[test]
    fn a_ring_without_room_is_empty() {
        let mut ring = Ring::new(0).unwrap();
        assert!(pop_all(&mut ring, 1).is_empty());
        ring.push(&completion(1));
        assert!(ring.overflown && pop_all(&mut ring, 1).is_empty());
    }

    #[test]
    fn numbers_are_found_after_any_insertions_and_removals() {
        let mut numbers = Numbers::new();
        let mut model = std::collections::BTreeMap::new();
        // Few distinct low bits, so that many collide.
        let mut state = 1_u32;
        for step in 0..if cfg!(miri) { 30 } else { 5_000 } {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let number = (state >> 16) % 16 + ((state >> 24) % 8) * 1024;
            if state & 0x800 == 0 {
                numbers.reserve(numbers.len + 1).unwrap();
                numbers.insert(number, step);
                model.insert(number, step);
            } else {
                numbers.remove(number);
                model.remove(&number);
            }
            assert_eq!(numbers.len, model.len());
            assert!(numbers.len * 2 <= numbers.entries.len());
            for high in 0..8 {
                for low in 0..16 {
                    let number = low + high * 1024;
                    assert_eq!(numbers.get(number), model.get(&number).copied());
                }
            }
        }
    }
}
