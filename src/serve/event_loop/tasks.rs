//! A loop for futures. No code of the program runs here: wakers and buffers that are no longer needed are returned, or
//! put into `Deferred` until the loop is not borrowed.

use std::task::Waker;
use std::{mem, slice};

use super::Loop;
use super::ended::{ChannelId, Ended, LoopBuffer};
use super::post::queue_index;
use super::slots::{List, NEVER_FREE, Slot, State};
use super::table::{ColdState, Table};
use super::waiters::{Deferred, Receiving, Tasks, Woken};
use crate::base::ffi;
use crate::channel::parts::{BATCH, NO_SLOT, Queue, Refused, count};
use crate::channel::{TransportError, TransportResult, WorkRequest};
use crate::verbs::completion::WorkSuccess;

pub(crate) enum DeferredStep<B> {
    Failed(ChannelId, Option<TransportError>),
    Woken(Waker),
    Dropped(B),
}

// Without futures, some of these are unused.
#[cfg_attr(not(feature = "async"), allow(dead_code))]
impl<B> Loop<'_, B> {
    /// Makes it the loop of a reactor, which calls slow verbs while the loop is not borrowed.
    pub(crate) fn of_tasks(mut self) -> Self {
        self.table.is_of_tasks = true;
        self
    }

    /// Returns the operation's number. A successful post takes the waker.
    ///
    /// # Errors
    ///
    /// Those of `post`, with the request.
    #[inline(always)]
    pub(crate) fn post_task<R: WorkRequest<Kept: LoopBuffer<B>>>(
        &mut self,
        channel: ChannelId,
        request: R,
        waker: &mut Option<Waker>,
    ) -> Result<u64, Refused<R>> {
        let number = self.post_as(channel, request, State::Task, 0)?;
        self.keep_waker(number, waker);
        Ok(number)
    }

    /// Posts a receive whose message [any task takes](Self::take_message).
    ///
    /// # Errors
    ///
    /// Those of `post`, with the request.
    #[inline(always)]
    pub(crate) fn post_for_message<R: WorkRequest<Kept: LoopBuffer<B>>>(
        &mut self,
        channel: ChannelId,
        request: R,
    ) -> Result<(), Refused<R>> {
        self.post_as(channel, request, State::Message, 0).map(drop)
    }

    pub(crate) fn is_done(&mut self, number: u64) -> bool {
        self.table.slot(number).is_some_and(|slot| slot.state == State::Done)
    }

    /// Wakes the first task that waits for room to send.
    #[inline(always)]
    pub(crate) fn take_done(&mut self, number: u64) -> Option<Ended<B>> {
        let table = &mut self.table;
        table.slot(number).filter(|slot| slot.state == State::Done)?;
        let done = table.take(number as u32);
        table.wake_first(done.channel.index(), Queue::Send);
        Some(done)
    }

    /// Returns whether the operation has succeeded, for [`take_success`](Self::take_success), and no task waits for its room.
    #[inline(always)]
    pub(crate) fn is_success(&self, number: u64) -> bool {
        let Table { slots, outcomes, entries, .. } = &self.table;
        let index = number as u32 as usize;
        let Some(slot) = slots.get(index) else { return false };
        let line = &entries[slot.channel.index()].tasks.lines[0];
        slot.number == number
            && slot.state == State::Done
            && outcomes[index].completion.status.0 == 0
            && line.first == NO_SLOT
    }

    /// Returns the channel's message if it is the only one, and the only task in line was woken for it. That task
    /// leaves the line and calls [`take_success`](Self::take_success).
    #[inline(always)]
    pub(crate) fn take_only_message(&mut self, channel: ChannelId, place: u32) -> Option<u64> {
        let Table { slots, outcomes, entries, waiters, .. } = &mut self.table;
        let tasks = &mut entries[channel.index()].tasks;
        let line = &mut tasks.lines[1];
        let index = tasks.messages.first;
        let slot = slots.get(index as usize)?;
        let waiter = &mut waiters.places[place as usize];
        if slot.link != NO_SLOT
            || tasks.receiving.held > 0
            || waiter.waker.is_some()
            || (line.first, line.last) != (place, place)
            || outcomes[index as usize].completion.status.0 != 0
        {
            return None;
        }
        tasks.messages.first = NO_SLOT;
        *line = List::default();
        waiter.after = mem::replace(&mut waiters.free, place);
        Some(index.into())
    }

    /// Takes the operation of this slot or number, which has succeeded.
    #[inline(always)]
    pub(crate) fn take_success(&mut self, number: u64) -> (B, WorkSuccess) {
        let index = number as u32 as usize;
        let slot = &mut self.table.slots[index];
        assert!(matches!(slot.state, State::Done | State::Arrived));
        slot.state = State::Free;
        // SAFETY: an ended operation, as asserted, still has its buffer. The slot is free from now on, so the buffer
        // is read once.
        let buffer = unsafe { slot.buffer.assume_init_read() };
        (buffer, WorkSuccess::from_raw(self.table.outcomes[index].completion))
    }

    #[inline(always)]
    pub(super) fn keep_waker(&mut self, number: u64, waker: &mut Option<Waker>) {
        let place = &mut self.table.outcomes[number as u32 as usize].waker;
        // The outcome had no waker, so this drops nothing.
        mem::forget(mem::replace(place, waker.take()));
    }

    #[inline]
    pub(crate) fn waker_of(&mut self, number: u64) -> Option<&mut Option<Waker>> {
        self.table.task_state(number)?;
        Some(&mut self.table.outcomes[number as u32 as usize].waker)
    }

    /// Gives up an operation. The caller drops what is returned while the loop is not borrowed. A buffer that the
    /// device has is [left](Self::take_deferred) when the request ends.
    pub(crate) fn abandon(&mut self, number: u64) -> (Option<Ended<B>>, Option<Waker>) {
        let waker = self.waker_of(number).and_then(Option::take);
        let done = self.take_done(number);
        if let Some(state) = self.table.task_state(number) {
            *state = State::Abandoned;
        }
        (done, waker)
    }

    #[inline(always)]
    pub(crate) fn take_message(&mut self, channel: ChannelId) -> Option<Ended<B>> {
        let messages = &mut self.table.entries[channel.index()].tasks.messages;
        let index = messages.first;
        messages.first = self.table.slots.get(index as usize)?.link;
        Some(self.table.take(index))
    }

    pub(crate) fn has_message(&self, channel: ChannelId) -> bool {
        !self.table.entries[channel.index()].tasks.messages.is_empty()
    }

    /// Wakes the first task in line if there is a message.
    #[inline]
    pub(crate) fn wake_receiver(&mut self, channel: ChannelId) {
        if self.has_message(channel) {
            self.table.wake_first(channel.index(), Queue::Receive);
        }
    }

    /// Wakes the next task if there is another message, or all if some hold buffers that there is room for now.
    #[inline]
    pub(crate) fn wake_after_message(&mut self, channel: ChannelId) {
        if self.receiving(channel).held > 0 {
            self.table.wake_all(channel.index(), Queue::Receive);
        } else {
            self.wake_receiver(channel);
        }
    }

    #[inline]
    pub(crate) fn receiving(&mut self, channel: ChannelId) -> &mut Receiving {
        &mut self.table.entries[channel.index()].tasks.receiving
    }

    /// Polls once. Returns the number of completions, for [`end_turn`](Self::end_turn).
    ///
    /// # Errors
    ///
    /// Polling failed.
    #[inline(always)]
    pub(crate) fn begin_turn(&mut self) -> TransportResult<usize> {
        let table = &mut self.table;
        table.turns = table.turns.wrapping_add(1);
        // All that polls for tasks takes all.
        debug_assert!(table.batch.is_empty());
        // SAFETY: as in `Table::poll`.
        count(unsafe { (table.poll_cq)(table.queue, BATCH as i32, table.batch.entries()) })
    }

    /// Whether a turn without completions has nothing to do.
    #[inline(always)]
    pub(crate) fn is_quiet(&self) -> bool {
        self.table.with_unposted.is_empty() && self.table.deferred.is_empty()
    }

    /// Gives each result to its owner. Unknown completions end nothing. Once the loop is not borrowed, the caller wakes the
    /// tasks in `woken`, and does what is [deferred](Self::deferred).
    #[inline(always)]
    pub(crate) fn end_turn(&mut self, found: usize, woken: &mut Woken) {
        let table = &mut self.table;
        assert!(found <= BATCH);
        // SAFETY: there are `BATCH` entries, all initialised. Nothing polls before the loop below ends.
        for completion in unsafe { slice::from_raw_parts(table.batch.entries(), found) } {
            if !table.end_for_task(completion, woken) {
                let _ = table.end(completion);
            }
        }
        if !table.with_unposted.is_empty() {
            table.end_unposted();
        }
    }

    #[inline]
    pub(crate) fn lacks_credit(&self) -> bool {
        self.table.credit_waiters.any()
    }

    #[cold]
    pub(crate) fn has_queue(&self, channel: ChannelId, queue: Queue) -> bool {
        self.table.entries[channel.index()].depths[queue_index(queue)] > 0
    }

    #[inline]
    pub(crate) fn why_stopped(&self, channel: ChannelId) -> Option<TransportError> {
        self.table.why_stopped(channel)
    }

    /// Why no message will come to the channel.
    pub(crate) fn why_ended(&self, channel: ChannelId) -> Option<TransportError> {
        self.table.why_ended(channel)
    }

    /// Refuses posts to shared receives, and on channels that are attached later.
    #[cold]
    pub(crate) fn stop_adding(&mut self, error: TransportError) {
        let error = *self.table.stopped.get_or_insert(error);
        for &(receives, _) in &self.members.shared {
            self.table.refuse(receives, error);
        }
    }

    #[cold]
    pub(crate) fn next_channel(&self, index: usize) -> Option<ChannelId> {
        self.channels_from(index).next()
    }

    /// Finds a channel from this index on with operations on the device.
    #[cold]
    pub(crate) fn next_busy(&self, index: usize) -> Option<ChannelId> {
        self.channels_from(index).find(|&channel| self.in_flight(channel) > 0)
    }

    fn channels_from(&self, index: usize) -> impl Iterator<Item = ChannelId> {
        let rest = self.table.cold.iter().zip(&self.table.entries).enumerate().skip(index);
        let there = rest.filter(|(_, (cold, _))| cold.core.is_some());
        there.map(|(index, (_, entry))| ChannelId {
            index: index as u32,
            generation: entry.generation,
        })
    }

    /// Refuses sends with [`Stopped`](TransportError::Stopped).
    #[cold]
    pub(crate) fn refuse_sends(&mut self, channel: ChannelId) {
        if self.table.why_stopped(channel).is_some() {
            return;
        }
        self.table.cold[channel.index()].stopped = Some(TransportError::Stopped);
        let entry = &mut self.table.entries[channel.index()];
        entry.next[0] = NEVER_FREE;
        entry.tasks.is_draining = true;
        self.table.has_drained = true;
        self.table.wake_all(channel.index(), Queue::Send);
    }

    /// Returns whether connections end without completions.
    pub(crate) fn is_iwarp(&self) -> bool {
        self.queue.context().is_iwarp()
    }

    /// Returns whether it refuses sends but is not closed yet.
    pub(crate) fn is_draining(&self, channel: ChannelId) -> bool {
        self.table.entries[channel.index()].tasks.is_draining
    }

    /// Counts also writes, reads and atomics.
    pub(crate) fn sends_in_flight(&self, channel: ChannelId) -> usize {
        let entry = &self.table.entries[channel.index()];
        self.table.in_flight(entry.first_slot..entry.first_slot + entry.depths[0])
    }

    #[inline]
    pub(crate) fn deferred(&mut self) -> &mut Deferred {
        &mut self.table.deferred
    }

    /// Takes one thing to do at a time, so it allocates nothing.
    #[cold]
    pub(crate) fn take_deferred(&mut self) -> Option<DeferredStep<B>> {
        let Table { deferred, outcomes, waiters, .. } = &mut self.table;
        if let Some((channel, error)) = deferred.work.failed.pop() {
            return Some(DeferredStep::Failed(channel, error));
        }
        if let Some(waker) = deferred.work.woken.pop() {
            return Some(DeferredStep::Woken(waker));
        }
        if let Some(from) = deferred.unwoken {
            let of_slots = outcomes.iter_mut().map(|outcome| &mut outcome.waker);
            let in_lines = waiters.places.iter_mut().map(|waiter| &mut waiter.waker);
            let mut wakers = of_slots.chain(in_lines).enumerate().skip(from);
            let next = wakers.find_map(|(at, waker)| waker.take().map(|waker| (at + 1, waker)));
            deferred.unwoken = next.as_ref().map(|&(at, _)| at);
            if let Some((_, waker)) = next {
                return Some(DeferredStep::Woken(waker));
            }
        }
        if let Some(ended) = self.table.pop_ended() {
            // Its place in the queue is free.
            self.table.wake_first(ended.channel.index(), Queue::Send);
            return Some(DeferredStep::Dropped(ended.buffer));
        }
        self.table.deferred.has_more = false;
        None
    }

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

    pub(super) fn forget_lines(&mut self, index: usize) {
        let Table { entries, waiters, deferred, .. } = &mut self.table;
        for line in &mut entries[index].tasks.lines {
            while line.first != NO_SLOT {
                deferred.forget(waiters.leave(line, line.first));
            }
        }
        entries[index].tasks = Tasks::default();
        self.table.cold[index] = ColdState::default();
    }
}

impl<B> Table<B> {
    #[inline(always)]
    fn slot(&mut self, number: u64) -> Option<&mut Slot<B>> {
        self.slots.get_mut(number as u32 as usize).filter(|slot| slot.number == number)
    }

    /// Returns the state of an operation in flight.
    fn task_state(&mut self, number: u64) -> Option<&mut State> {
        let state = &mut self.slot(number)?.state;
        Some(state).filter(|state| **state == State::Task)
    }

    /// Ends a success of a future, or a message that is not of shared receives. Returns false for anything else.
    #[inline(always)]
    fn end_for_task(&mut self, completion: &ffi::ibv_wc, woken: &mut Woken) -> bool {
        let index = completion.wr_id as u32;
        let Some(slot) = self.slots.get(index as usize) else { return false };
        debug_assert_eq!(self.slots.len(), self.outcomes.len());
        if slot.number != completion.wr_id
            || slot.queue_pair != completion.qp_num
            || !matches!(slot.state, State::Task | State::Message)
            || completion.status != ffi::ibv_wc_status::IBV_WC_SUCCESS
        {
            return false;
        }
        self.finish_for_task(index, completion, None, |_, waker| woken.add(waker));
        true
    }

    #[inline(always)]
    pub(super) fn finish_for_task(
        &mut self,
        index: u32,
        completion: &ffi::ibv_wc,
        shared_by: Option<ChannelId>,
        mut wake: impl FnMut(&mut Deferred, &mut Option<Waker>),
    ) {
        let Self { slots, entries, outcomes, deferred, waiters, turns, has_drained, .. } = self;
        // Each slot has an outcome. So no panic, whose arguments the compiler would prepare in each turn.
        let (Some(slot), Some(outcome)) =
            (slots.get_mut(index as usize), outcomes.get_mut(index as usize))
        else {
            return;
        };
        // A slice is copied as a whole, where an assignment may be taken apart.
        slice::from_mut(&mut outcome.completion).copy_from_slice(slice::from_ref(completion));
        let channel = shared_by.unwrap_or(slot.channel).index();
        if slot.state == State::Task {
            slot.state = State::Done;
            wake(deferred, &mut outcome.waker);
            if !*has_drained {
                return;
            }
        } else {
            let tasks = &mut entries[channel].tasks;
            slot.state = State::Arrived;
            if completion.status == ffi::ibv_wc_status::IBV_WC_SUCCESS {
                slot.receive(completion);
            }
            tasks.messages.push(slots, index);
            let first = tasks.lines[1].first;
            match waiters.places.get_mut(first as usize) {
                Some(first) if first.waker.is_some() => {
                    tasks.woken_in = *turns;
                    wake(deferred, &mut first.waker);
                }
                // The first task was woken for an earlier message and has not come. Its future may be forgotten.
                Some(_) if tasks.woken_in != *turns => {
                    tasks.woken_in = *turns;
                    waiters.wake_next(deferred, first);
                }
                _ => {}
            }
        }
        if self.entries[channel].tasks.is_draining {
            self.wake_all(channel, Queue::Send);
        }
    }

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
            Queue::Receive => self.waiters.wake_next(&mut self.deferred, first),
            // Only the first in line may post.
            Queue::Send => {
                if let Some(waiter) = self.waiters.places.get_mut(first as usize) {
                    self.deferred.wake(&mut waiter.waker);
                }
            }
        }
    }
}
