//! The registered buffers of a hub, which grow with what its streams need.
//!
//! A stream takes a buffer for what it sends, and keeps it until the peer's device has the message. Peers that do not read, or
//! do not acknowledge, keep buffers; so there are as many as all streams can keep, and no stream waits for another's. Registering
//! is slow, so nobody registers with the hub's lock held: [`Buffers::take`] notes that there was none, and the thread that holds
//! the lock registers more after it has released it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::{io, mem};

use ibverbs::{AccessFlags, BufferPool, PooledBuffer, ProtectionDomain};

use crate::config::Config;

pub(crate) struct Buffers {
    pools: Vec<BufferPool>,
    /// Bytes of a buffer.
    chunk: usize,
    /// The buffers that are registered.
    count: usize,
    /// The most that all streams can hold.
    most: usize,
    /// The number of buffers that a caller has not found.
    wanted: usize,
    /// Buffers that the program has.
    pub(crate) lent: usize,
    pub(crate) starved: Starved,
}

impl Buffers {
    pub(crate) fn new(config: &Config) -> Self {
        let most = config.most_buffers();
        let (pools, starved) = (Vec::new(), Starved::default());
        Self { pools, chunk: config.chunk, count: 0, most, wanted: 0, lent: 0, starved }
    }

    /// How many buffers are free.
    #[cold]
    fn available(&self) -> usize {
        self.pools.iter().map(BufferPool::available).sum()
    }

    /// Returns the streams that are called for what is free, and whether the drivers are to look.
    #[cold]
    pub(crate) fn call(&mut self) -> (Vec<usize>, bool) {
        let called = self.starved.call(self.available());
        (called, self.starved.needs_look())
    }

    /// A buffer for what this stream sends. If there is none, the caller [adds](Starved::add) the stream to those that wait.
    #[inline]
    pub(crate) fn take_for(&mut self, index: usize) -> Option<PooledBuffer> {
        if self.starved.places_taken == 0 { self.take() } else { self.take_in_turn(index) }
    }

    #[cold]
    fn take_in_turn(&mut self, index: usize) -> Option<PooledBuffer> {
        let free = self.available();
        if !self.starved.may_take(index, || free) {
            self.want_unless(free > 0);
            return None;
        }
        let found = self.take();
        if found.is_some() {
            self.starved.remove(index);
        }
        found
    }

    pub(crate) fn take(&mut self) -> Option<PooledBuffer> {
        let found = self.free();
        self.want_unless(found.is_some());
        found
    }

    /// Whether this stream would find a buffer. If not, it is told when there is one.
    #[cfg(feature = "tokio")]
    pub(crate) fn can_take(&mut self, index: usize) -> bool {
        let free = self.available();
        let found = free > 0 && self.starved.may_take(index, || free);
        self.want_unless(free > 0);
        if !found {
            self.starved.add(index);
        }
        found
    }

    fn want_unless(&mut self, found: bool) {
        if !found && self.count < self.most + self.lent {
            self.wanted = self.wanted.max(1);
        }
    }

    fn free(&self) -> Option<PooledBuffer> {
        self.pools.iter().rev().find_map(BufferPool::take)
    }

    /// One for the program, which no stream lacks then: there are more than the streams need. If there is none, it is wanted.
    pub(crate) fn lend(&mut self, needed: usize) -> Option<PooledBuffer> {
        let found = if self.has(needed + 1) { self.free() } else { None };
        match found {
            Some(_) => self.lent += 1,
            None => self.wanted = self.wanted.max(1),
        }
        found
    }

    /// Returns whether this number of buffers is registered, without those that the program has. If not, the rest is wanted.
    pub(crate) fn has(&mut self, number: usize) -> bool {
        let missing = (number + self.lent).saturating_sub(self.count);
        self.wanted = self.wanted.max(missing);
        missing == 0
    }

    pub(crate) fn are_wanted(&self) -> bool {
        self.wanted > 0
    }

    /// The buffers to register, if any are wanted: call this without the lock, and [add](Self::add) the result.
    pub(crate) fn growth(&mut self) -> Option<Growth> {
        let least = std::mem::take(&mut self.wanted);
        // Doubling keeps the number of pools small.
        let number = least.max(self.count.min(self.most.saturating_sub(self.count)));
        (least > 0).then_some(Growth { chunk: self.chunk, number, least })
    }

    /// Adds what was registered. A failure ends the growth for streams that send: they wait for buffers that come back.
    pub(crate) fn add(&mut self, grown: io::Result<BufferPool>) -> io::Result<()> {
        match grown {
            Ok(pool) => {
                self.count += pool.chunks();
                self.pools.push(pool);
                Ok(())
            }
            Err(error) => {
                self.most = self.count.saturating_sub(self.lent);
                Err(error)
            }
        }
    }
}

/// The streams whose writers have found no buffer, by their indexes, in the order in which they have asked.
///
/// Buffers get free in many ways: a message has arrived, a stream fails or is dropped, a piece was read, more are registered. All
/// of them happen with the hub's lock held. So the release of the lock [calls](Self::call) as many of these streams as there are
/// free buffers, the first ones first. Until these have looked, the buffers are theirs, and others wait behind them.
///
/// A stream that is called may not want the buffer any more, and nobody says so. Therefore, while others wait, the drivers are
/// [to look](Self::needs_look) once more. Whoever was called and has not come by then is passed over, but keeps its place in the
/// order for as long as others wait.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Starved {
    /// Those that are not called, by their tickets.
    waiting: BTreeMap<u64, usize>,
    /// The places of streams, by index.
    places: Vec<Option<Place>>,
    /// How many streams have one.
    places_taken: usize,
    /// The next ticket.
    next: u64,
    /// Those that are called, and some that have looked since.
    called: Vec<usize>,
    /// How many of them have not.
    awaited: usize,
    /// The drivers were told to look.
    looks: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Place {
    ticket: u64,
    is_called: bool,
}

impl Starved {
    /// Whether nobody waits, but for those that are called.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Whether a stream may take one of so many free buffers.
    #[inline]
    pub(crate) fn may_take(&self, index: usize, free: impl FnOnce() -> usize) -> bool {
        self.awaited == 0
            || self
                .places
                .get(index)
                .is_some_and(|place| place.as_ref().is_some_and(|place| place.is_called))
            || free() > self.awaited
    }

    /// A stream waits for a buffer.
    #[cold]
    pub(crate) fn add(&mut self, index: usize) {
        if self.places.len() <= index {
            self.places.resize(index + 1, None);
        }
        let next = self.next;
        let place = self.places[index].get_or_insert(Place { ticket: next, is_called: false });
        let is_new = place.ticket == next;
        self.next += u64::from(is_new);
        self.places_taken += usize::from(is_new);
        self.awaited -= usize::from(mem::take(&mut place.is_called));
        self.waiting.insert(place.ticket, index);
    }

    /// A stream has a buffer, or is no more.
    #[inline]
    pub(crate) fn remove(&mut self, index: usize) {
        if let Some(place) = self.places.get_mut(index).and_then(Option::take) {
            self.places_taken -= 1;
            self.awaited -= usize::from(place.is_called);
            self.waiting.remove(&place.ticket);
            if self.places_taken == 0 {
                self.called.clear();
            }
        }
    }

    /// Calls streams for so many free buffers, and returns them: their tasks are to be woken.
    pub(crate) fn call(&mut self, free: usize) -> Vec<usize> {
        let mut called = Vec::new();
        while self.awaited < free
            && let Some((_, index)) = self.waiting.pop_first()
        {
            if let Some(place) = &mut self.places[index] {
                place.is_called = true;
                self.awaited += 1;
                called.push(index);
            }
        }
        self.called.extend(&called);
        called
    }

    /// Returns whether the drivers are to be told to look, and notes that they are.
    pub(crate) fn needs_look(&mut self) -> bool {
        !self.waiting.is_empty() && self.awaited > 0 && !mem::replace(&mut self.looks, true)
    }

    /// A driver looks: buffers are kept no longer for those that were called.
    #[inline]
    pub(crate) fn pass_over(&mut self) {
        self.looks = false;
        if self.places_taken == 0 {
            return;
        }
        for index in self.called.drain(..) {
            if let Some(place) = &mut self.places[index] {
                place.is_called = false;
            }
        }
        self.awaited = 0;
        // Who has been passed over may never write again.
        if self.waiting.is_empty() {
            self.places.clear();
            self.places_taken = 0;
        }
    }
}

/// Buffers to be registered.
pub(crate) struct Growth {
    chunk: usize,
    number: usize,
    least: usize,
}

impl Growth {
    /// `ibv_reg_mr`: registers as many as is sensible, or else as many as are needed.
    pub(crate) fn register(
        self,
        domain: &Arc<ProtectionDomain<'static>>,
    ) -> io::Result<BufferPool> {
        let Self { chunk, number, least } = self;
        let register = |number| BufferPool::new(domain, chunk, number, AccessFlags::empty());
        let registered = register(number).or_else(|error| match number > least {
            true => register(least),
            false => Err(error),
        });
        registered.map_err(|error| {
            let kind = io::Error::from(error).kind();
            let reason = format!(
                "{least} more buffers of {chunk} bytes cannot be registered ({error}): raise RLIMIT_MEMLOCK (ulimit -l), or set a \
                 smaller chunk, fewer receives, or shared_receives"
            );
            io::Error::new(kind, reason)
        })
    }
}

#[cfg(test)]
impl Starved {
    /// Makes those equal in which the same streams wait in the same order.
    pub(crate) fn normalize(&mut self) {
        let mut places: Vec<_> = self.places.iter_mut().flatten().collect();
        places.sort_by_key(|place| place.ticket);
        let (mut tickets, mut next) = (BTreeMap::new(), 0);
        for place in places {
            tickets.insert(place.ticket, next);
            place.ticket = next;
            next += 1;
        }
        let waiting = mem::take(&mut self.waiting).into_iter();
        self.waiting = waiting.map(|(ticket, index)| (tickets[&ticket], index)).collect();
        self.next = next;
        while self.places.pop_if(|place| place.is_none()).is_some() {}
        let places = &self.places;
        self.called
            .retain(|&index| matches!(places.get(index), Some(Some(place)) if place.is_called));
        self.called.sort_unstable();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_are_called_as_there_are_buffers_in_the_order_in_which_they_asked() {
        let mut starved = Starved::default();
        (0..5).for_each(|index| starved.add(index));
        assert_eq!(starved.call(2), [0, 1]);
        assert_eq!(starved.call(2), []);
        assert!(starved.may_take(1, || 2) && !starved.may_take(4, || 2));
        starved.remove(1);
        assert_eq!(starved.call(1), [], "the buffer is the first one's");
        assert!(starved.needs_look() && !starved.needs_look());
        starved.pass_over();
        assert_eq!(starved.call(1), [2]);
        // The first one comes late, and has kept its place.
        starved.add(0);
        starved.remove(2);
        assert_eq!(starved.call(1), [0]);
    }

    /// Each write would look up who waits.
    #[test]
    fn writers_that_do_not_come_leave_nothing_behind_when_nobody_else_waits() {
        let mut starved = Starved::default();
        starved.add(0);
        assert_eq!(starved.call(1), [0]);
        starved.pass_over();
        assert_eq!(starved.places_taken, 0);
        // The same while another one waits, which then has its buffer.
        (0..2).for_each(|index| starved.add(index));
        assert_eq!(starved.call(1), [0]);
        starved.pass_over();
        assert_eq!(starved.places_taken, 2);
        assert_eq!(starved.call(1), [1]);
        starved.remove(1);
        starved.pass_over();
        assert_eq!((starved.places_taken, &starved.called[..]), (0, &[][..]));
        starved.add(1);
        assert_eq!(starved.call(1), [1]);
    }
}
