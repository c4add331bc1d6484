//! What a channel keeps for its tasks, and what is to be done for them when the loop is not borrowed.

use std::mem;
use std::task::Waker;

use super::ended::ChannelId;
use super::slots::List;
use crate::channel::error::TransportError;
use crate::channel::slot::NO_SLOT;
use crate::error::{Error, Result};

/// The receives of a channel beyond those of the tasks that wait.
#[derive(Clone, Copy, Default)]
pub(crate) struct Receiving {
    /// The number of receives that tasks posted and then no longer waited for: the next tasks need not post theirs.
    pub(crate) surplus: u32,
    /// The number of tasks with buffers for which the queue had no room.
    pub(crate) held: u32,
}

/// See the [module](self).
#[derive(Default)]
pub(super) struct Tasks {
    /// Messages that no task has taken.
    pub(super) messages: List,
    /// The tasks that wait for room to send, and those that wait for a message.
    pub(super) lines: [Line; 2],
    pub(super) receiving: Receiving,
    /// The last turn in which a task was woken for a message.
    pub(super) woken_in: u32,
    /// Whether only sends are refused, and tasks wait for the end of those in flight.
    pub(super) is_draining: bool,
}

/// The places of the first and the last task that wait.
#[derive(Clone, Copy)]
pub(super) struct Line {
    pub(super) first: u32,
    pub(super) last: u32,
}

impl Default for Line {
    fn default() -> Self {
        Self { first: NO_SLOT, last: NO_SLOT }
    }
}

/// A place in a line.
pub(super) struct Waiter {
    pub(super) waker: Option<Waker>,
    pub(super) before: u32,
    /// The next place in the line. For a free place: the next free one.
    pub(super) after: u32,
}

/// All places, and the first of the free ones.
pub(super) struct Waiters {
    pub(super) places: Vec<Waiter>,
    pub(super) free: u32,
}

impl Waiters {
    pub(super) fn new() -> Self {
        Self { places: Vec::new(), free: NO_SLOT }
    }

    #[inline(always)]
    pub(super) fn join(&mut self, line: &mut Line, waker: &mut Option<Waker>) -> Result<u32> {
        if self.free == NO_SLOT {
            self.grow()?;
        }
        let place = self.free;
        let waiter = &mut self.places[place as usize];
        self.free = waiter.after;
        // The place has no waker yet, so this drops nothing.
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
    pub(super) fn leave(&mut self, line: &mut Line, place: u32) -> Option<Waker> {
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

    /// Makes a free place, when there is none.
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

/// What must be done once a loop is no longer borrowed.
#[derive(Default)]
pub(crate) struct Due {
    pub(crate) woken: Vec<Waker>,
    /// Channels to close with this error, because a post has failed whose request the device may have; without an
    /// error: channels to flush.
    pub(crate) failed: Vec<(ChannelId, Option<TransportError>)>,
}

/// What is due, and whether the table has [left](Loop::take_left) something beside it.
#[derive(Default)]
pub(crate) struct Deferred {
    /// In a box, which makes exchanging it cheap.
    pub(super) due: Box<Due>,
    pub(super) is_left: bool,
    /// Set when there was no memory to note who must be woken: everyone from this place on is woken.
    pub(super) unwoken: Option<usize>,
}

impl Deferred {
    /// Whether nothing is due.
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.due.woken.is_empty() && !self.is_left
    }

    /// Takes the waker of a task to wake, if nothing else is due.
    #[inline(always)]
    pub(crate) fn take_only(&mut self) -> Option<Waker> {
        let Due { woken, failed } = &mut *self.due;
        let is_all = woken.len() == 1 && failed.is_empty() && !self.is_left;
        woken.pop_if(|_| is_all)
    }

    /// Takes what is due, and leaves an empty list.
    #[inline(always)]
    pub(crate) fn exchange(&mut self, spare: Box<Due>) -> Box<Due> {
        mem::replace(&mut self.due, spare)
    }

    /// Wakes a task once the loop is not borrowed. Without memory for the list, its waker stays where it is, and all
    /// tasks are woken.
    #[inline(always)]
    pub(super) fn wake(&mut self, place: &mut Option<Waker>) {
        if place.is_some()
            && (self.due.woken.len() < self.due.woken.capacity() || self.grow())
            && let Some(waker) = place.take()
        {
            self.due.woken.push(waker);
        }
    }

    /// Wakes a task whose operation was discarded, once the loop is not borrowed. Without memory for the list, its
    /// waker is leaked.
    pub(super) fn forget(&mut self, mut waker: Option<Waker>) {
        self.wake(&mut waker);
        mem::forget(waker);
    }

    #[cold]
    #[inline(never)]
    fn grow(&mut self) -> bool {
        let has_grown = self.due.woken.try_reserve(1).is_ok();
        if !has_grown {
            self.unwoken = Some(0);
            self.is_left = true;
        }
        has_grown
    }
}
