//! How operations end with their channel, and receives after a failure.
//!
//! Soft-RoCE flushes receives only when something else happens on the queue pair. The loop does not post receives after
//! a failure, and takes the queue pair to ERR to have earlier ones flushed.

use std::ops::Range;
use std::thread;

use super::Loop;
use super::ended::{ChannelId, GONE, Keep as _, LoopBuffer, REMOVED, STOPPED};
use super::slots::{NEVER_FREE, ONE, State};
use super::table::Table;
use crate::base::{ffi, panics::catch};
use crate::channel::parts::{Core, POLL_FAILURES, Queue};
use crate::channel::{TransportError, WorkRequest};
use crate::verbs::memory::{GatherBuffer, keep};

impl<B> Table<B> {
    pub(super) fn in_flight(&self, slots: Range<u32>) -> usize {
        let sent = self.sent_in_flight(&slots);
        let slots = &self.slots[slots.start as usize..slots.end as usize];
        sent + slots.iter().filter(|slot| slot.state.is_in_flight()).count()
    }

    /// Takes a channel's queue pair to ERR, and polls until its operations are flushed. A provider may drop the completions of a
    /// destroyed queue pair, so call it before.
    pub(super) fn flush(&mut self, channel: ChannelId, core: &Core, capacity: u32) {
        let slots = self.entries[channel.index()].slots();
        // An unknown completion ends nothing.
        let _ = self.settle_polled();
        let shares = !core.srq().is_null();
        if self.in_flight(slots.clone()) == 0 && !shares
            || core.modify(ffi::ibv_qp_state::IBV_QPS_ERR).is_err()
        {
            return;
        }
        self.flush_unsignaled(channel);
        if shares {
            self.settle_all(capacity);
        }
        let give_up = core.clock.now().checked_add(core.settings.settle_timeout);
        let mut failures = 0;
        while self.in_flight(slots.clone()) > 0 {
            match self.poll() {
                Ok(1..) => {
                    failures = 0;
                    let _ = self.settle_polled();
                }
                Ok(0) if self.end_unposted() => {}
                // The kernel or the provider's progress thread may do the flushing.
                Ok(0) => {
                    give_up.iter().for_each(|&at| core.clock.reach(at));
                    thread::yield_now();
                }
                Err(_) if failures == POLL_FAILURES => return,
                Err(_) => failures += 1,
            }
            if give_up.is_some_and(|at| core.clock.now() >= at) {
                return;
            }
        }
    }

    /// Polls until the completion queue is empty, at most its capacity: a broken provider may never stop.
    pub(super) fn settle_all(&mut self, capacity: u32) {
        let _ = self.settle_polled();
        for _ in 0..=capacity {
            match self.poll() {
                Ok(1..) => {
                    let _ = self.settle_polled();
                }
                _ => return,
            }
        }
    }

    /// Leaks the operations of a queue pair that could not be destroyed: the device may use the buffers forever.
    pub(super) fn leak(&mut self, slots: Range<u32>) {
        for index in slots {
            let slot = &mut self.slots[index as usize];
            match slot.state {
                State::Unposted => self.end_removed(index, REMOVED),
                state if state.is_in_flight() => slot.state = State::Leaked,
                _ => {}
            }
        }
    }

    /// Ends the operations of a queue pair that was reset or destroyed.
    pub(super) fn end_without_completions(
        &mut self,
        slots: Range<u32>,
        status: ffi::ibv_wc_status,
    ) {
        let _ = self.settle_polled();
        self.end_connections(slots.clone());
        for index in slots {
            if self.slots[index as usize].state.is_in_flight() {
                self.end_removed(index, status);
            }
        }
    }

    fn end_removed(&mut self, index: u32, status: ffi::ibv_wc_status) {
        let channel = self.slots[index as usize].channel;
        let cold = &mut self.cold[channel.index()];
        (cold.unposted, cold.unsignaled) = Default::default();
        self.finish(index, &ffi::ibv_wc { status, ..Default::default() });
    }

    /// Assigns all numbers so far to an earlier connection.
    pub(super) fn end_connections(&mut self, slots: Range<u32>) {
        for slot in &mut self.slots[slots.start as usize..slots.end as usize] {
            if slot.state == State::Credits
                && let Some(core) = &self.cold[slot.channel.index()].core
            {
                slot.number = core.credit_number().unwrap_or(slot.number);
            }
            slot.end_connection();
        }
    }

    #[cold]
    pub(super) fn end_with_failure(&mut self, index: u32, mut completion: ffi::ibv_wc) {
        let channel = self.slots[index as usize].channel;
        self.note_failure(channel);
        self.explain_flush(channel, &mut completion);
        self.finish(index, &completion);
        if self.is_of_tasks {
            self.end_waits(channel);
        }
    }

    fn explain_flush(&self, channel: ChannelId, completion: &mut ffi::ibv_wc) {
        if completion.status != ffi::ibv_wc_status::IBV_WC_WR_FLUSH_ERR {
            return;
        }
        let cold = &self.cold[channel.index()];
        if cold.peer_gone {
            completion.status = GONE;
        } else if !self.is_of_tasks && cold.stopped == Some(TransportError::Stopped) {
            completion.status = STOPPED;
        }
    }

    fn note_failure(&mut self, channel: ChannelId) {
        let index = channel.index();
        let cold = &self.cold[index];
        let is_over = cold.core.is_none() || cold.has_failed || cold.stopped.is_some();
        if is_over || cold.survives_failures {
            return;
        }
        let entry = &mut self.entries[index];
        if entry.first_of(Queue::Receive) == NEVER_FREE {
            // Tasks wait for messages of shared receives.
            self.cold[index].has_failed = self.is_of_tasks;
            return;
        }
        // A post of a receive then finds the queue full and looks for the reason.
        entry.next[1] = NEVER_FREE;
        let receives = entry.receives();
        if self.is_of_tasks || self.in_flight(receives) > 0 {
            self.flush_later(channel);
        }
        self.cold[index].has_failed = true;
    }

    fn unposted_slot(&mut self, channel: ChannelId) -> Option<u32> {
        let cold = &self.cold[channel.index()];
        if !cold.flushes() {
            return None;
        }
        let first = self.entries[channel.index()].first_of(Queue::Receive);
        let free = self.search(first)?;
        self.with_unposted.try_reserve(1).ok()?;
        Some(free)
    }

    /// Ends unposted receives once all before them have ended.
    #[cold]
    #[inline(never)]
    pub(super) fn end_unposted(&mut self) -> bool {
        let mut any = false;
        let mut at = 0;
        while let Some(&channel) = self.with_unposted.get(at) {
            let slots = self.entries[channel.index()].receives();
            let of_it = &self.slots[slots.start as usize..slots.end as usize];
            let is_current = self.entries[channel.index()].generation == channel.generation;
            if is_current
                && of_it
                    .iter()
                    .any(|slot| slot.state.is_in_flight() && slot.state != State::Unposted)
            {
                at += 1;
                continue;
            }
            self.with_unposted.swap_remove(at);
            if is_current {
                any = true;
                self.flush_unposted(channel);
            }
        }
        any
    }

    fn flush_unposted(&mut self, channel: ChannelId) {
        let mut list = std::mem::take(&mut self.cold[channel.index()].unposted);
        while let Some(slot) = self.slots.get(list.first as usize) {
            let (index, next) = (list.first, slot.link);
            let mut flushed = ffi::ibv_wc {
                wr_id: slot.number,
                qp_num: slot.queue_pair,
                status: ffi::ibv_wc_status::IBV_WC_WR_FLUSH_ERR,
                ..Default::default()
            };
            self.explain_flush(channel, &mut flushed);
            self.finish(index, &flushed);
            list.first = next;
        }
    }
}

impl<B> Drop for Loop<'_, B> {
    fn drop(&mut self) {
        // Polled completions end their operations first.
        let _ = self.table.settle_polled();
        for index in 0..self.members.links.len() {
            if let Some(link) = self.members.links[index].take() {
                let _ = self.end(index, link);
            }
        }
        while let Some(&(receives, _)) = self.members.shared.last() {
            if self.remove_shared(receives).is_err() {
                // A builder holds the queue, or the verb failed.
                if let Some((id, _)) = self.members.shared.pop_if(|shared| shared.0 == receives) {
                    self.table.leak(self.table.entries[id.index()].slots());
                }
            }
        }
        for index in 0..self.table.slots.len() as u32 {
            let state = self.table.slots[index as usize].state;
            if matches!(state, State::Ended | State::Done | State::Arrived) {
                let _ = catch(|| drop(self.table.take(index)));
            }
        }
    }
}

impl<B> Loop<'_, B> {
    /// Keeps a receive without posting it.
    #[cold]
    #[inline(never)]
    pub(super) fn keep_unposted<R: WorkRequest<Kept: LoopBuffer<B>>>(
        &mut self,
        channel: ChannelId,
        state: State,
        token: u64,
        mut buffer: R::Buffer,
    ) -> Result<u64, R::Buffer> {
        let table = &mut self.table;
        let Some(index) = table.unposted_slot(channel) else { return Err(buffer) };
        let slot = &mut table.slots[index as usize];
        slot.number = slot.number.wrapping_add(ONE);
        (slot.token, slot.state, slot.kept) = (token, State::Unposted, buffer.kept_length());
        slot.buffer.write(keep(buffer).keep());
        slot.was = state;
        let number = slot.number;
        let unposted = &mut table.cold[channel.index()].unposted;
        if unposted.is_empty() {
            table.with_unposted.push(channel);
            table.has_idle_work = true;
        }
        unposted.push(&mut table.slots, index);
        // Tasks get these results at once; a program polls for them.
        if table.is_of_tasks {
            table.end_unposted();
        }
        Ok(number)
    }
}
