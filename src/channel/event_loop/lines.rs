//! Tasks in line for room to send, or for a message.

use std::task::Waker;

use super::Loop;
use super::ended::ChannelId;
use super::post::queue_index;
use super::table::{Aside, Table};
use super::waiters::{Deferred, Tasks, Waiters};
use crate::channel::error::TransportResult;
use crate::channel::operation::Queue;
use crate::channel::slot::NO_SLOT;

impl<B> Loop<'_, B> {
    /// Returns the place in line.
    ///
    /// # Errors
    ///
    ///  - `ENOMEM`: out of memory.
    #[inline(always)]
    pub(crate) fn join_line(
        &mut self,
        channel: ChannelId,
        queue: Queue,
        waker: &mut Option<Waker>,
    ) -> TransportResult<u32> {
        let Table { entries, waiters, .. } = &mut self.table;
        let lines = &mut entries[channel.index()].tasks.lines;
        Ok(waiters.join(&mut lines[queue_index(queue)], waker)?)
    }

    pub(crate) fn is_first_in_line(&self, place: u32) -> bool {
        self.table.waiters.places[place as usize].before == NO_SLOT
    }

    pub(crate) fn is_line_empty(&self, channel: ChannelId, queue: Queue) -> bool {
        let lines = &self.table.entries[channel.index()].tasks.lines;
        lines[queue_index(queue)].first == NO_SLOT
    }

    pub(crate) fn waker_in_line(&mut self, place: u32) -> &mut Option<Waker> {
        &mut self.table.waiters.places[place as usize].waker
    }

    /// Returns the waker, which the caller drops while the loop is not borrowed. If the task was woken to take
    /// something, the caller [wakes the next](Self::wake_line).
    pub(crate) fn leave_line(
        &mut self,
        channel: ChannelId,
        queue: Queue,
        place: u32,
    ) -> Option<Waker> {
        let Table { entries, waiters, .. } = &mut self.table;
        let lines = &mut entries[channel.index()].tasks.lines;
        waiters.leave(&mut lines[queue_index(queue)], place)
    }

    pub(crate) fn wake_line(&mut self, channel: ChannelId, queue: Queue) {
        self.table.wake_first(channel.index(), queue);
    }

    #[cold]
    pub(crate) fn wake_all_in_line(&mut self, channel: ChannelId, queue: Queue) {
        self.table.wake_all(channel.index(), queue);
    }

    pub(super) fn forget_lines(&mut self, index: usize) {
        let Table { entries, waiters, deferred, .. } = &mut self.table;
        for line in &mut entries[index].tasks.lines {
            while line.first != NO_SLOT {
                deferred.forget(waiters.leave(line, line.first));
            }
        }
        entries[index].tasks = Tasks::default();
        self.table.asides[index] = Aside::default();
    }
}

impl<B> Table<B> {
    #[cold]
    pub(super) fn wake_all(&mut self, channel: usize, queue: Queue) {
        let Self { entries, waiters, deferred, .. } = self;
        let mut place = entries[channel].tasks.lines[queue_index(queue)].first;
        while let Some(waiter) = waiters.places.get_mut(place as usize) {
            deferred.wake(&mut waiter.waker);
            place = waiter.after;
        }
    }

    /// Wakes all if the channel drains: then tasks wait for its end.
    #[inline(always)]
    pub(super) fn wake_first(&mut self, channel: usize, queue: Queue) {
        let first = self.entries[channel].tasks.lines[queue_index(queue)].first;
        if first != NO_SLOT {
            self.wake_place(channel, queue, first);
        }
    }

    #[inline(never)]
    fn wake_place(&mut self, channel: usize, queue: Queue, first: u32) {
        if self.entries[channel].tasks.is_draining {
            return self.wake_all(channel, queue);
        }
        match queue {
            Queue::Receive => wake_next(&mut self.waiters, &mut self.deferred, first),
            // Only the first in line may post.
            Queue::Send => {
                if let Some(waiter) = self.waiters.places.get_mut(first as usize) {
                    self.deferred.wake(&mut waiter.waker);
                }
            }
        }
    }
}

/// Wakes the next task that was not woken yet. A woken one may never come: its future may be forgotten.
#[cold]
#[inline(never)]
pub(super) fn wake_next(waiters: &mut Waiters, deferred: &mut Deferred, mut place: u32) {
    while let Some(waiter) = waiters.places.get_mut(place as usize) {
        if waiter.waker.is_some() {
            return deferred.wake(&mut waiter.waker);
        }
        place = waiter.after;
    }
}
