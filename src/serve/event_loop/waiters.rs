//! Waiting tasks, and work deferred until the loop is not borrowed.

use std::mem::{self, MaybeUninit};
use std::task::Waker;

use super::ended::ChannelId;
use super::slots::List;
#[cfg(any(feature = "async", test))]
use crate::base::panics::Panics;
use crate::base::{Error, Result, panics::catch};
use crate::channel::TransportError;
use crate::channel::parts::{BATCH, NO_SLOT};

/// Counts of a channel's receives, beyond one for each task that waits.
#[derive(Clone, Copy, Default)]
pub(crate) struct Receiving {
    /// Receives whose tasks no longer wait: the next tasks need not post theirs.
    pub(crate) surplus: u32,
    /// Tasks with buffers that the queue had no room for.
    pub(crate) held: u32,
}

#[derive(Default)]
pub(super) struct Tasks {
    pub(super) messages: List,
    /// Tasks wait for room to send, or for a message.
    pub(super) lines: [List; 2],
    pub(super) receiving: Receiving,
    /// The last turn that woke a task for a message.
    pub(super) woken_in: u32,
    /// Sends are refused, and tasks wait until those in flight have ended.
    pub(super) is_draining: bool,
}

pub(super) struct Waiter {
    pub(super) waker: Option<Waker>,
    pub(super) before: u32,
    /// The next place in the line, or in the list of free places.
    pub(super) after: u32,
}

pub(super) struct Waiters {
    pub(super) places: Vec<Waiter>,
    pub(super) free: u32,
}

impl Waiters {
    pub(super) fn new() -> Self {
        Self { places: Vec::new(), free: NO_SLOT }
    }

    #[inline(always)]
    pub(super) fn join(&mut self, line: &mut List, waker: &mut Option<Waker>) -> Result<u32> {
        if self.free == NO_SLOT {
            self.grow()?;
        }
        let place = self.free;
        let waiter = &mut self.places[place as usize];
        self.free = waiter.after;
        // The place had no waker, so this drops nothing.
        mem::forget(mem::replace(&mut waiter.waker, waker.take()));
        (waiter.before, waiter.after) = (line.last, NO_SLOT);
        match self.places.get_mut(line.last as usize) {
            Some(before) => before.after = place,
            None => line.first = place,
        }
        line.last = place;
        Ok(place)
    }

    #[inline(always)]
    pub(super) fn leave(&mut self, line: &mut List, place: u32) -> Option<Waker> {
        let waiter = &mut self.places[place as usize];
        let (waker, before, after) = (waiter.waker.take(), waiter.before, waiter.after);
        waiter.after = mem::replace(&mut self.free, place);
        match self.places.get_mut(before as usize) {
            Some(before) => before.after = after,
            None => line.first = after,
        }
        match self.places.get_mut(after as usize) {
            Some(after) => after.before = before,
            None => line.last = before,
        }
        waker
    }

    /// Wakes the next task that was not woken yet. A woken one may never come: its future may be forgotten.
    #[cold]
    #[inline(never)]
    pub(super) fn wake_next(&mut self, deferred: &mut Deferred, mut place: u32) {
        while let Some(waiter) = self.places.get_mut(place as usize) {
            if waiter.waker.is_some() {
                return deferred.wake(&mut waiter.waker);
            }
            place = waiter.after;
        }
    }

    #[cold]
    #[inline(never)]
    fn grow(&mut self) -> Result<()> {
        let place = u32::try_from(self.places.len()).ok().filter(|&place| place != NO_SLOT);
        let (Some(place), Ok(())) = (place, self.places.try_reserve(1)) else {
            let reason = "no memory for the place of a task that waits";
            return Err(Error::with_reason("ibv_req_notify_cq", libc::ENOMEM, reason));
        };
        self.places.push(Waiter { waker: None, before: NO_SLOT, after: NO_SLOT });
        self.free = place;
        Ok(())
    }
}

/// Tasks that a turn wakes when the loop is not borrowed: one for each completion at most. They lie on the stack, so a turn
/// needs no memory, and does not come back to the loop.
pub(crate) struct Woken {
    wakers: [MaybeUninit<Waker>; BATCH],
    next: usize,
    end: usize,
}

impl Woken {
    #[inline(always)]
    pub(crate) fn new() -> Self {
        Self { wakers: [const { MaybeUninit::uninit() }; BATCH], next: 0, end: 0 }
    }

    #[inline(always)]
    pub(super) fn add(&mut self, place: &mut Option<Waker>) {
        debug_assert!(self.end < BATCH);
        if let Some(room) = self.wakers.get_mut(self.end)
            && let Some(waker) = place.take()
        {
            room.write(waker);
            self.end += 1;
        }
    }

    #[inline(always)]
    fn next(&mut self) -> Option<Waker> {
        if self.next == self.end {
            return None;
        }
        let next = self.next;
        self.next += 1;
        // SAFETY: it is below `end`, so `add` has written it. `next` has passed it, so it is read once.
        Some(unsafe { self.wakers.get_unchecked(next).assume_init_read() })
    }

    /// Wakes all, in order. The panic of a waker goes on once the others are woken.
    #[inline(always)]
    pub(crate) fn wake(&mut self) {
        while let Some(waker) = self.next() {
            waker.wake();
        }
    }
}

impl Drop for Woken {
    /// Wakes those that are left by a panic.
    #[inline(always)]
    fn drop(&mut self) {
        while let Some(waker) = self.next() {
            let _ = catch(|| waker.wake());
        }
    }
}

/// Work for when the loop is not borrowed.
#[derive(Default)]
pub(crate) struct DeferredWork {
    pub(crate) woken: Vec<Waker>,
    /// Channels with an error are to be closed: the device may have the request of a failed post. Others are to be
    /// flushed.
    pub(crate) failed: Vec<(ChannelId, Option<TransportError>)>,
}

/// `has_more`: there is more to [take](Loop::take_deferred).
#[cfg(any(feature = "async", test))]
impl DeferredWork {
    /// Ends what has failed, and wakes all, though an end or a waker panics.
    pub(crate) fn do_all(&mut self, end: impl Fn(ChannelId, Option<TransportError>)) -> Panics {
        let mut panics = Panics::default();
        // One catch serves all that do not panic.
        while !self.failed.is_empty() {
            panics.catch(|| {
                while let Some((channel, error)) = self.failed.pop() {
                    end(channel, error);
                }
            });
        }
        while !self.woken.is_empty() {
            panics.catch(|| {
                while let Some(waker) = self.woken.pop() {
                    waker.wake();
                }
            });
        }
        panics
    }
}

#[derive(Default)]
pub(crate) struct Deferred {
    pub(super) work: DeferredWork,
    pub(super) has_more: bool,
    /// There was no memory to note a waker: all from this index on are woken.
    pub(super) unwoken: Option<usize>,
}

impl Deferred {
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.work.woken.is_empty() && !self.has_more
    }

    /// Closes the channel later, if there is an error, or flushes it. Without memory, returns false.
    pub(super) fn fail(&mut self, channel: ChannelId, error: Option<TransportError>) -> bool {
        let has_room = self.work.failed.try_reserve(1).is_ok();
        if has_room {
            self.work.failed.push((channel, error));
            self.has_more = true;
        }
        has_room
    }

    /// Takes a waker if nothing else is due.
    #[inline(always)]
    pub(crate) fn take_only(&mut self) -> Option<Waker> {
        let DeferredWork { woken, failed } = &mut self.work;
        let is_all = woken.len() == 1 && failed.is_empty() && !self.has_more;
        woken.pop_if(|_| is_all)
    }

    #[inline(always)]
    pub(crate) fn exchange(&mut self, spare: DeferredWork) -> DeferredWork {
        mem::replace(&mut self.work, spare)
    }

    /// Wakes a task later. Without memory, the waker stays in place, and all tasks are woken.
    #[inline(always)]
    pub(super) fn wake(&mut self, place: &mut Option<Waker>) {
        if place.is_some()
            && (self.work.woken.len() < self.work.woken.capacity() || self.grow())
            && let Some(waker) = place.take()
        {
            self.work.woken.push(waker);
        }
    }

    /// Wakes the task of a discarded operation. Without memory, leaks the waker.
    pub(super) fn forget(&mut self, mut waker: Option<Waker>) {
        self.wake(&mut waker);
        mem::forget(waker);
    }

    #[cold]
    #[inline(never)]
    fn grow(&mut self) -> bool {
        let has_grown = self.work.woken.try_reserve(1).is_ok();
        if !has_grown {
            self.unwoken = Some(0);
            self.has_more = true;
        }
        has_grown
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;
    use crate::base::panics::catch;

    struct Task(Arc<AtomicUsize>, bool);

    impl Wake for Task {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
            assert!(!self.1, "in a waker");
        }
    }

    #[test]
    fn a_turn_wakes_each_task_once_though_one_panics() {
        let count = |panicking: usize, wake: fn(Woken)| {
            let count = Arc::<AtomicUsize>::default();
            let mut woken = Woken::new();
            for index in 0..BATCH {
                let mut place = Some(Arc::new(Task(count.clone(), index == panicking)).into());
                woken.add(&mut place);
                assert!(place.is_none());
            }
            let panics = catch(|| wake(woken)).is_err();
            // None is left, and none was dropped without being woken.
            assert_eq!(Arc::strong_count(&count), 1);
            (count.load(Ordering::Relaxed), panics)
        };
        for panicking in [0, 7, BATCH - 1] {
            assert_eq!(count(panicking, |mut woken| woken.wake()), (BATCH, true));
            assert_eq!(count(panicking, drop), (BATCH, false));
        }
        assert_eq!(count(BATCH, |mut woken| woken.wake()), (BATCH, false));
    }

    #[test]
    fn everything_deferred_is_done_though_each_part_panics() {
        for panicking in 0..4 {
            let woken = Arc::new(AtomicUsize::new(0));
            let task = |index| Arc::new(Task(woken.clone(), index == panicking)).into();
            let id = |index| ChannelId { index, generation: 0 };
            let mut work = DeferredWork {
                woken: (0..3).map(task).collect(),
                failed: (0..3).map(|index| (id(index), None)).collect(),
            };
            let ended = RefCell::new(Vec::new());
            let panics = work.do_all(|channel, _| {
                ended.borrow_mut().push(channel.index());
                assert_ne!(channel.index(), panicking, "at an end");
            });
            assert_eq!((ended.into_inner(), woken.load(Ordering::Relaxed)), (vec![2, 1, 0], 3));
            assert_eq!(catch(|| panics.resume()).is_err(), panicking < 3);
        }
    }
}
