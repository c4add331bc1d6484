//! What is to be done when a loop is not borrowed: tasks to wake, buffers to drop, channels to close.

use std::mem;
use std::task::Waker;

use super::ended::ChannelId;
use crate::channel::error::TransportError;

/// What is to be done when a loop is no more borrowed.
#[derive(Default)]
pub(crate) struct Due {
    pub(crate) woken: Vec<Waker>,
    /// Channels to be closed with this error, since a post has failed that the device may have; or else to be flushed.
    pub(crate) failed: Vec<(ChannelId, Option<TransportError>)>,
}

/// What is due, and whether the table has [left](Loop::take_left) something beside it.
#[derive(Default)]
pub(crate) struct Deferred {
    /// In a box, so that it is exchanged for another one cheaply.
    pub(super) due: Box<Due>,
    pub(super) is_left: bool,
    /// There was no memory to note who is to be woken: all are, from this place on.
    pub(super) unwoken: Option<usize>,
}

impl Deferred {
    /// Whether there is nothing.
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.due.woken.is_empty() && !self.is_left
    }

    /// Takes the waker of a task that is to be woken, if that is all that is due.
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

    /// Has a task woken. Without memory for the list, its waker stays where it is, and all tasks are woken.
    #[inline(always)]
    pub(super) fn wake(&mut self, place: &mut Option<Waker>) {
        if place.is_some()
            && (self.due.woken.len() < self.due.woken.capacity() || self.grow())
            && let Some(waker) = place.take()
        {
            self.due.woken.push(waker);
        }
    }

    /// Has a task woken that was forgotten. Without memory, its waker is leaked.
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
