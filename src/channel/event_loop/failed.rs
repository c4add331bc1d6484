//! Receives of a channel whose connection has failed.
//!
//! The device flushes what it has. But Soft-RoCE looks at its receives only when something else happens on the queue pair: what
//! is posted after the failure would stay there. So it does not get it, and what it has gets a push.

use super::Loop;
use super::ended::{ChannelId, LoopBuffer};
use super::slots::{NEVER_FREE, ONE, State};
use super::table::Table;
use crate::channel::operation::Queue;
use crate::channel::owned_buffer::OwnedBuffer;
use crate::channel::request::WorkRequest;
use crate::ffi;
use crate::memory::{GatherBuffer, keep};

impl<B> Table<B> {
    /// The device has completed an operation of the channel with an error.
    #[cold]
    pub(super) fn note_failure(&mut self, channel: ChannelId) {
        let index = channel.index();
        let aside = &mut self.asides[index];
        let Some(core) = aside.core.as_ref().filter(|_| !aside.has_failed) else { return };
        let entry = &mut self.entries[index];
        if entry.first_of(Queue::Receive) == NEVER_FREE || aside.stopped.is_some() {
            return;
        }
        // From now on, a post takes the way for a full queue.
        entry.next[1] = NEVER_FREE;
        let receives = entry.receives();
        if self.is_of_tasks {
            let deferred = &mut self.deferred;
            if deferred.due.failed.try_reserve(1).is_ok() {
                deferred.due.failed.push((channel, None));
                deferred.is_left = true;
            }
        } else if self.slots[receives.start as usize..receives.end as usize]
            .iter()
            .any(|slot| slot.state.is_in_flight())
        {
            // The owner of the loop alone uses the core.
            if !core.destroyed.get() {
                let _ = core.modify(ffi::ibv_qp_state::IBV_QPS_ERR);
            }
        }
        self.asides[index].has_failed = true;
    }

    /// A free slot for a receive of a channel whose connection has failed.
    fn unposted_slot(&mut self, channel: ChannelId) -> Option<u32> {
        let aside = &self.asides[channel.index()];
        if !aside.flushes() {
            return None;
        }
        let first = self.entries[channel.index()].first_of(Queue::Receive);
        let free = self.search(first)?;
        self.with_unposted.try_reserve(1).ok()?;
        Some(free)
    }

    /// Ends the receives that were not posted, as far as nothing is left of those before them. Returns whether there was one.
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
        let mut list = std::mem::take(&mut self.asides[channel.index()].unposted);
        while let Some(slot) = self.slots.get(list.first as usize) {
            let (index, next) = (list.first, slot.link);
            let flushed = ffi::ibv_wc {
                wr_id: slot.number,
                qp_num: slot.queue_pair,
                status: ffi::ibv_wc_status::IBV_WC_WR_FLUSH_ERR,
                ..Default::default()
            };
            self.finish(index, &flushed);
            list.first = next;
        }
    }
}

impl<B> Loop<'_, B> {
    /// Takes a receive that the device is not to get. Returns its number, or what is to be refused.
    #[cold]
    #[inline(never)]
    pub(super) fn keep_unposted<R: WorkRequest>(
        &mut self,
        channel: ChannelId,
        state: State,
        token: u64,
        mut buffer: R::Buffer,
    ) -> Result<u64, R::Buffer>
    where
        R::Kept: OwnedBuffer,
        B: LoopBuffer<R::Kept>,
    {
        let table = &mut self.table;
        let Some(index) = table.unposted_slot(channel) else { return Err(buffer) };
        let slot = &mut table.slots[index as usize];
        slot.number = slot.number.wrapping_add(ONE);
        (slot.token, slot.state, slot.kept) = (token, State::Unposted, buffer.kept_length());
        slot.buffer.write(B::keep(keep(buffer)));
        table.outcomes[index as usize].was = state;
        let number = slot.number;
        let unposted = &mut table.asides[channel.index()].unposted;
        if unposted.is_empty() {
            table.with_unposted.push(channel);
        }
        unposted.push(&mut table.slots, index);
        // Those of a loop come from its next poll, those of tasks at once.
        if table.is_of_tasks {
            table.end_unposted();
        }
        Ok(number)
    }
}
