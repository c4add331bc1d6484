//! The table of a loop's operations.
//!
//! A request's number is its slot's index and a generation, which counts the slot's requests and is never reset. A
//! completion ends an operation only if number and queue pair are the slot's, and the request is in flight.
//!
//! `next_ended` takes an operation straight from the polled completions. One that ends in another way goes into a list,
//! after all polled ones, so results keep the order of completions. Results of tasks stay in their slots.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::Waker;

use super::credit_waiters::CreditWaiters;
use super::ended::{ChannelId, Ended, Failed, result};
use super::numbers::Numbers;
use super::sends::Sends;
use super::slots::{List, NEVER_FREE, Outcome, Slot, State, index_of};
use super::waiters::{Deferred, Tasks, Waiters};
use crate::base::ffi;
use crate::channel::parts::{
    BATCH, Core, Limits, OwnTemplates, PollCq, Polled, Queue, Target, count,
};
use crate::channel::{TransportError, TransportResult};

/// What a post needs of a channel.
#[repr(align(64))]
pub(super) struct Entry {
    pub(super) target: Target,
    /// The generation of the place's channel, or of its next one.
    pub(super) generation: u32,
    /// The slot of each queue that a post tries first.
    pub(super) next: [u32; 2],
    pub(super) limits: Limits,
    /// Slots are for sends, for receives, and with flow control one for credit reads.
    pub(super) first_slot: u32,
    pub(super) depths: [u32; 3],
    pub(super) tasks: Tasks,
}

#[derive(Default)]
pub(super) struct ColdState {
    /// `None` once the channel is removed or out of the loop.
    pub(super) core: Option<Arc<Core>>,
    /// Messages of the last post that was refused. 0: none waits.
    pub(super) lacks_credit: u32,
    /// It takes shared receives.
    pub(super) shares: bool,
    /// These are shared receives, not a channel.
    pub(super) is_shared: bool,
    /// A `LoopSender` posts its sends.
    pub(super) has_sender: bool,
    pub(super) stopped: Option<TransportError>,
    /// What fails harms no other operation.
    pub(super) survives_failures: bool,
    /// An operation has failed. Receives posted since then are in `unposted`.
    pub(super) has_failed: bool,
    /// Its peer is gone: what is flushed says so.
    pub(super) peer_gone: bool,
    /// The queue pair is to be taken to ERR, which a channel that is out of its loop waits for.
    pub(super) must_flush: bool,
    pub(super) unposted: List,
    /// Sends without completions and those that end them, in their order; and keep-alives.
    pub(super) unsignaled: List,
    /// It was dropped while out of the loop, which destroys it when it comes back.
    pub(super) is_dropped: bool,
}

impl ColdState {
    /// Returns whether the loop keeps new receives without posting them.
    pub(super) fn flushes(&self) -> bool {
        self.has_failed && self.stopped.is_none() && self.core.is_some()
    }
}

impl Entry {
    pub(super) fn slots(&self) -> std::ops::Range<u32> {
        self.first_slot..self.first_slot + self.depths.iter().sum::<u32>()
    }

    pub(super) fn receives(&self) -> std::ops::Range<u32> {
        let first = self.first_slot + self.depths[0];
        first..first + self.depths[1]
    }

    pub(super) fn credit_slot(&self) -> Option<u32> {
        let [sends, receives, own] = self.depths;
        (own > 0).then_some(self.first_slot + sends + receives)
    }

    pub(super) fn first_of(&self, queue: Queue) -> u32 {
        match queue {
            Queue::Send if self.depths[0] > 0 => self.first_slot,
            Queue::Receive if self.depths[1] > 0 => self.first_slot + self.depths[0],
            _ => NEVER_FREE,
        }
    }
}

/// An odd step visits all values.
static NEXT_GENERATION: AtomicU32 = AtomicU32::new(1);

pub(super) struct Table<B> {
    pub(super) slots: Vec<Slot<B>>,
    pub(super) entries: Vec<Entry>,
    pub(super) cold: Vec<ColdState>,
    pub(super) batch: Polled,
    pub(super) poll_cq: PollCq,
    /// Live whenever the table polls.
    pub(super) queue: *mut ffi::ibv_cq,
    /// Owned requests of each kind. They name no queue pair, so all channels share them.
    pub(super) prepared: OwnTemplates,
    /// Indexed by slot.
    pub(super) outcomes: Vec<Outcome>,
    /// The channel that a message of shared receives came on, by slot.
    pub(super) came_on: Vec<Option<ChannelId>>,
    /// Indexed by channel. There are none beyond the last one.
    pub(super) senders: Vec<Option<Arc<Sends<B>>>>,
    /// Operations that `next_ended` returns before it polls.
    pub(super) ended: List,
    pub(super) deferred: Deferred,
    pub(super) numbers: Numbers,
    pub(super) waiters: Waiters,
    pub(super) credit_waiters: CreditWaiters,
    /// Channels with [unposted](State::Unposted) receives.
    pub(super) with_unposted: Vec<ChannelId>,
    /// There may be such a channel, or peers to look at, after an empty poll.
    pub(super) has_idle_work: bool,
    /// Tells a list the length of its message. A receive into a list sets it, always to the same function.
    pub(super) received: Option<fn(&mut B, usize)>,
    /// Number of polls for tasks.
    pub(super) turns: u32,
    /// Some channel has refused sends while those in flight were waited for.
    pub(super) has_drained: bool,
    /// A reactor calls slow verbs while the loop is not borrowed.
    pub(super) is_of_tasks: bool,
    /// The first channel in a place has it. It differs per loop, so a loop does not mistake another one's id for its
    /// own.
    pub(super) first_generation: u32,
    pub(super) stopped: Option<TransportError>,
}

impl<B> Table<B> {
    /// # Safety
    ///
    /// The queue is live whenever the table polls it, `poll_cq` is its provider's function, and nothing else polls
    /// it.
    pub(super) unsafe fn new(queue: *mut ffi::ibv_cq, poll_cq: PollCq) -> Self {
        Self {
            slots: vec![Slot::new(NEVER_FREE, State::Leaked)],
            entries: Vec::new(),
            cold: Vec::new(),
            batch: Polled::new(),
            poll_cq,
            queue,
            prepared: OwnTemplates::new(),
            outcomes: vec![Outcome::default()],
            came_on: vec![None],
            senders: Vec::new(),
            ended: List::default(),
            deferred: Deferred::default(),
            numbers: Numbers::new(),
            waiters: Waiters::new(),
            credit_waiters: CreditWaiters::default(),
            with_unposted: Vec::new(),
            has_idle_work: false,
            received: None,
            turns: 0,
            has_drained: false,
            is_of_tasks: false,
            first_generation: NEXT_GENERATION.fetch_add(0x9e37_79b1, Ordering::Relaxed),
            stopped: None,
        }
    }

    #[inline(always)]
    pub(super) fn entry(&self, channel: ChannelId) -> Option<&Entry> {
        let entry = self.entries.get(channel.index as usize);
        entry.filter(|entry| entry.generation == channel.generation)
    }

    /// Finds the first free slot of the ring, from `from` on.
    #[cold]
    #[inline(never)]
    pub(super) fn search(&self, from: u32) -> Option<u32> {
        let mut index = from;
        loop {
            let slot = &self.slots[index as usize];
            if slot.state == State::Free {
                return Some(index);
            }
            index = slot.next;
            if index == from {
                return None;
            }
        }
    }

    #[inline(always)]
    pub(super) fn poll(&mut self) -> TransportResult<usize> {
        debug_assert!(self.batch.is_empty());
        // SAFETY: the queue is live, by the contract of `new`. The batch has room for `BATCH` completions, and no
        // reference to it exists.
        let found = unsafe { (self.poll_cq)(self.queue, BATCH as i32, self.batch.entries()) };
        let found = count(found)?;
        self.batch.keep(0, found);
        Ok(found)
    }

    /// `look` is called when there is nothing. If it returns true, there may be something now.
    #[inline(always)]
    pub(super) fn next_ended(
        &mut self,
        mut look: impl FnMut(&mut Self) -> bool,
    ) -> TransportResult<Option<Ended<B>>> {
        loop {
            if self.batch.is_empty() {
                if !self.ended.is_empty() {
                    return Ok(self.pop_ended());
                }
                if self.poll()? == 0 {
                    if !self.has_idle_work || !(self.end_unposted() || look(self)) {
                        return Ok(None);
                    }
                    continue;
                }
            }
            // SAFETY: the batch is not empty, so this is an initialised entry. Nothing writes to it before the next
            // poll.
            let completion = unsafe { &*self.batch.head() };
            // SAFETY: the batch is not empty.
            unsafe { self.batch.advance_by(1) };
            if let Some(slot) = self.slots.get_mut(completion.wr_id as u32 as usize)
                && slot.number == completion.wr_id
                && slot.awaits(completion.qp_num)
                && completion.status == ffi::ibv_wc_status::IBV_WC_SUCCESS
            {
                return Ok(Some(slot.take(Failed::NOT, completion)));
            }
            let completion = *completion;
            if let Some(ended) = self.take_elsewhere(&completion) {
                return Ok(Some(ended));
            }
            self.settle(completion)?;
        }
    }

    /// Takes what has succeeded, and is in no slot of the channel's own.
    #[inline(never)]
    fn take_elsewhere(&mut self, completion: &ffi::ibv_wc) -> Option<Ended<B>> {
        if !self.senders.is_empty()
            && let Some(ended) = self.take_sent(completion)
        {
            return Some(ended);
        }
        self.take_shared(completion)
    }

    /// Ends a polled operation. If it goes into the list, all other polled ones follow.
    ///
    /// # Errors
    ///
    /// A completion is unknown. It ends nothing.
    #[cold]
    #[inline(never)]
    fn settle(&mut self, completion: ffi::ibv_wc) -> TransportResult<()> {
        let settled = self.end(&completion);
        if self.ended.is_empty() { settled } else { settled.and(self.settle_polled()) }
    }

    /// Ends the operations of all polled completions.
    ///
    /// # Errors
    ///
    /// A completion is unknown. It ends nothing.
    pub(super) fn settle_polled(&mut self) -> TransportResult<()> {
        let mut settled = Ok(());
        while !self.batch.is_empty() {
            // SAFETY: as in `next_ended`.
            let completion = unsafe { *self.batch.head() };
            // SAFETY: as in `next_ended`.
            unsafe { self.batch.advance_by(1) };
            settled = settled.and(self.end(&completion));
        }
        settled
    }

    /// Ends the completion's operation.
    ///
    /// # Errors
    ///
    /// It is unknown: no operation in flight has its number and queue pair, and none of an earlier connection had its
    /// number.
    pub(super) fn end(&mut self, completion: &ffi::ibv_wc) -> TransportResult<()> {
        let &ffi::ibv_wc { wr_id, qp_num: queue_pair, status, .. } = completion;
        let unknown = Err(TransportError::UnknownCompletion { queue_pair, wr_id });
        self.adopt_sent(completion);
        let index = index_of(wr_id);
        match self.slots.get(index as usize) {
            Some(slot)
                if slot.number == wr_id
                    && slot.state.is_in_flight()
                    && match slot.is_shared() {
                        true => self.sharing(queue_pair).is_some(),
                        false => slot.queue_pair == queue_pair,
                    } =>
            {
                self.end_covered(index, completion);
                if status != ffi::ibv_wc_status::IBV_WC_SUCCESS
                    && !self.slots[index as usize].is_shared()
                {
                    self.end_with_failure(index, *completion);
                } else {
                    self.finish(index, completion);
                }
                Ok(())
            }
            Some(slot) if slot.state == State::Credits && slot.queue_pair == queue_pair => {
                let (channel, is_earlier) = (slot.channel, slot.is_earlier(wr_id));
                if self.take_credits(channel, completion) || is_earlier {
                    return Ok(());
                }
                unknown
            }
            Some(slot) if slot.is_earlier(wr_id) => Ok(()),
            _ => unknown,
        }
    }

    /// Gives its owner a result. The device no longer has the operation.
    pub(super) fn finish(&mut self, index: u32, completion: &ffi::ibv_wc) {
        if matches!(self.slots[index as usize].state, State::List | State::Unposted) {
            self.restore_state(index, completion);
        }
        // A destroyed queue pair has no number in the table.
        let is_shared = self.slots[index as usize].is_shared();
        let shared_by = if is_shared { self.sharing(completion.qp_num) } else { None };
        self.came_on[index as usize] = shared_by;
        if matches!(self.slots[index as usize].state, State::Task | State::Message) {
            let wake = |deferred: &mut Deferred, waker: &mut Option<Waker>| deferred.wake(waker);
            return self.finish_for_task(index, completion, shared_by, wake);
        }
        let Self { slots, cold, outcomes, .. } = self;
        let (slot, outcome) = (&mut slots[index as usize], &mut outcomes[index as usize]);
        if result(completion).is_ok() {
            slot.receive(completion);
        }
        outcome.completion = *completion;
        let waiting = shared_by.unwrap_or(slot.channel).index();
        match slot.state {
            State::Abandoned => self.leave(index),
            State::Probe => {
                slot.state = State::Free;
                if let (Some(core), Err(error)) = (&cold[waiting].core, result(completion)) {
                    core.record_unreported(error);
                }
                self.wake_first(waiting, Queue::Send);
            }
            _ => self.push_ended(index),
        }
    }

    #[cold]
    #[inline(never)]
    fn restore_state(&mut self, index: u32, completion: &ffi::ibv_wc) {
        let slot = &mut self.slots[index as usize];
        if slot.state == State::List
            && let Some(received) = self.received
            && let Ok(success) = result(completion)
            && let Some(len) = success.message_len()
        {
            // SAFETY: an operation in flight has its buffer, and the device is done with it.
            received(unsafe { slot.buffer.assume_init_mut() }, len as usize);
        }
        slot.state = slot.was;
    }

    fn push_ended(&mut self, index: u32) {
        self.slots[index as usize].state = State::Ended;
        self.ended.push(&mut self.slots, index);
    }

    /// Lists an operation that no task asks for. Its buffer is dropped once the loop is not borrowed.
    pub(super) fn leave(&mut self, index: u32) {
        self.push_ended(index);
        self.deferred.has_more = true;
    }

    #[inline(always)]
    pub(super) fn take(&mut self, index: u32) -> Ended<B> {
        let slot = &mut self.slots[index as usize];
        debug_assert!(matches!(slot.state, State::Ended | State::Done | State::Arrived));
        slot.state = State::Free;
        let outcome = &self.outcomes[index as usize];
        let came_on = self.came_on[index as usize].filter(|_| slot.is_shared());
        Ended {
            channel: came_on.unwrap_or(slot.channel),
            token: slot.token,
            // SAFETY: an ended operation still has its buffer. The slot is free from now on, so the buffer is read
            // once.
            buffer: unsafe { slot.buffer.assume_init_read() },
            failed: Failed::of(&outcome.completion),
            completion: outcome.completion,
        }
    }

    #[inline(never)]
    pub(super) fn pop_ended(&mut self) -> Option<Ended<B>> {
        let index = self.ended.first;
        self.ended.first = self.slots.get(index as usize)?.link;
        let ended = self.take(index);
        self.free_sent(index);
        Some(ended)
    }
}

#[cfg(test)]
mod tests {
    use crate::verbs::queue_pair::MessageLimits;
    use std::ffi::c_int;
    use std::ptr;

    use super::super::members::{Members, place};
    use super::super::slots::ONE;
    use super::*;

    unsafe extern "C" fn poll(_: *mut ffi::ibv_cq, _: c_int, _: *mut ffi::ibv_wc) -> c_int {
        0
    }

    unsafe extern "C" fn post_send(
        _: *mut ffi::ibv_qp,
        _: *mut ffi::ibv_send_wr,
        _: *mut *mut ffi::ibv_send_wr,
    ) -> c_int {
        0
    }

    unsafe extern "C" fn post_recv(
        _: *mut ffi::ibv_qp,
        _: *mut ffi::ibv_recv_wr,
        _: *mut *mut ffi::ibv_recv_wr,
    ) -> c_int {
        0
    }

    /// A reused place whose slots are all in use, while their generations wrap around.
    #[test]
    fn a_full_ring_is_found_to_be_full_whatever_its_generations_are() {
        // SAFETY: nothing is polled.
        let mut table = unsafe { Table::<()>::new(ptr::null_mut(), poll) };
        let mut members = Members::new(8);
        let target = Target::with(ptr::null_mut(), post_send, post_recv);
        let limits = Limits {
            max_send_sge: 1,
            max_recv_sge: 1,
            messages: MessageLimits::new(0, 0),
            reliable: true,
            private_reads: true,
        };
        let take = |table: &mut Table<()>, members: &mut Members<'_>| {
            let place = place(table, members, target, limits, [2, 3, 0]).unwrap();
            [Queue::Send, Queue::Receive].map(|queue| table.entries[place].first_of(queue))
        };
        let first = take(&mut table, &mut members);
        for slot in &mut table.slots[first[0] as usize..] {
            slot.number += u64::from(u32::MAX - 3) << 32;
            slot.end_connection();
        }
        members.give_back(0, 0);
        let rings = take(&mut table, &mut members);
        assert_eq!((rings, table.slots.len()), (first, 6));
        for _ in 0..8 {
            for slot in &mut table.slots[rings[0] as usize..] {
                slot.number = slot.number.wrapping_add(ONE);
                slot.state = State::Token;
            }
            for first in rings {
                assert_eq!(table.search(first), None);
                let next = table.slots[first as usize].next;
                table.slots[next as usize].state = State::Free;
                assert_eq!(table.search(first), Some(next));
            }
        }
        table.slots.iter_mut().for_each(|slot| slot.state = State::Leaked);
    }
}
