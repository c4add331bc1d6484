//! Channels out of their loop, for slow verbs while the loop is not borrowed.

use std::time::Instant;

use super::Loop;
use super::ended::{ChannelId, REMOVED, STOPPED};
use super::slots::{NEVER_FREE, State};
use super::table::Table;
use crate::base::{Leak, Result, StateError, ffi};
use crate::channel::parts::{Core, DatagramEnd, Link, Queue};
use crate::channel::{PreparedChannel, TransportError};

/// A channel out of its loop, which keeps its place and slots: requests in flight complete there.
pub(crate) struct Detached<'res> {
    pub(crate) id: ChannelId,
    pub(crate) channel: PreparedChannel<'res>,
}

/// Its id no longer names a channel.
pub(crate) struct PendingDestroy<'res> {
    pub(super) index: usize,
    pub(super) link: Link<'res>,
    pub(super) is_in_flight: bool,
    /// It takes shared receives.
    pub(super) shares: bool,
    pub(super) datagrams: Option<Box<DatagramEnd<'res>>>,
}

pub(crate) struct Destroyed {
    pub(super) index: usize,
    pub(super) number: u32,
    is_reset: bool,
    result: Result<()>,
}

impl Detached<'_> {
    /// `ibv_modify_qp`, `ibv_create_qp`: replaces the queue pair. If this returns false, the next attempt to connect
    /// tries it again.
    pub(crate) fn reset(&mut self) -> bool {
        let link = &mut self.channel.link;
        let _ = link.reset();
        link.is_reset()
    }

    /// `ibv_modify_qp`: takes the queue pair to RESET, which ends all its requests.
    pub(crate) fn try_reset(&self) -> bool {
        self.channel.link.core.try_reset()
    }

    /// `ibv_modify_qp`: takes the queue pair to ERR.
    pub(crate) fn flush(&self) {
        let _ = self.channel.link.core.modify(ffi::ibv_qp_state::IBV_QPS_ERR);
    }

    pub(crate) fn check(&self, now: Instant) -> Result<()> {
        self.channel.link.core.check_device_if_due(now)
    }
}

/// Takes one step towards a connection. Also returns whether this attempt, or an earlier one, ended the requests posted
/// before.
pub(crate) fn step<'res>(
    link: &mut Link<'res>,
    step: impl FnOnce(&mut Link<'res>) -> Result<()>,
) -> (Result<()>, bool) {
    let was_receiving = link.is_receiving();
    let done = step(link);
    let has_ended = if done.is_ok() { !was_receiving } else { link.is_reset() };
    (done, has_ended)
}

impl PendingDestroy<'_> {
    /// `ibv_modify_qp`: takes the queue pair to ERR, where it takes no more shared receives. If this returns true,
    /// [take](Loop::take_completions) its messages before you destroy it: a provider may drop completions then.
    pub(crate) fn stop_sharing(&self) -> bool {
        self.shares && self.link.core.modify(ffi::ibv_qp_state::IBV_QPS_ERR).is_ok()
    }

    pub(crate) fn destroy(self) -> Destroyed {
        let Self { index, link, is_in_flight, datagrams, .. } = self;
        let is_reset = is_in_flight && link.core.reset().is_ok();
        let number = link.core.number;
        let result = link.close();
        if let (Err(_), Some(end)) = (&result, &datagrams) {
            end.leak();
        }
        Destroyed { index, number, is_reset, result }
    }
}

#[cfg_attr(not(feature = "async"), allow(dead_code))] // it is for futures
impl<'res, B> Loop<'res, B> {
    /// Makes a place. The channel stays detached until it is connected.
    pub(crate) fn place(
        &mut self,
        channel: PreparedChannel<'res>,
    ) -> Result<Detached<'res>, StateError<PreparedChannel<'res>>> {
        match self.place_for(&channel.link, true) {
            Ok(id) => Ok(Detached { id, channel }),
            Err(error) => Err(StateError::new(channel, error)),
        }
    }

    pub(crate) fn open_for_receives(&mut self, detached: &Detached<'res>) {
        self.open(detached.id, false);
    }

    /// Cleans up after an attempt to connect that has failed and ended the posted receives. No task asks for their
    /// results.
    pub(crate) fn forget_attempt(&mut self, channel: ChannelId) {
        self.end_attempt(channel);
        self.drop_messages(channel.index());
    }

    /// Notes the new queue pair, which has nothing in flight. `number` is that of the old one, as in `replace`.
    pub(crate) fn renew(&mut self, detached: &Detached<'res>, number: u32) {
        self.replace(detached.id, number, &detached.channel.link.core);
    }

    pub(super) fn replace(&mut self, id: ChannelId, number: u32, core: &Core) {
        self.table.numbers.remove(number, id.index());
        self.assign(id, core);
    }

    /// Puts in a channel that is connected, or ready for receives.
    pub(crate) fn attach(&mut self, detached: Detached<'res>, is_connected: bool) -> ChannelId {
        let Detached { id, channel } = detached;
        self.attach_link(id, channel.link);
        self.open(id, is_connected);
        id
    }

    /// Allows sends, since the queue pair is now in RTS.
    #[cfg(feature = "rdmacm")]
    pub(crate) fn establish(&mut self, channel: ChannelId) {
        let Some(core) = self.table.core(channel) else { return };
        core.open_unless_stopped();
        if core.table.is_open() {
            self.open(channel, true);
        }
    }

    /// Takes a channel out for verbs that change only the queue pair's state. Operations go on. `None`: it is out, or
    /// was removed.
    pub(crate) fn borrow_out(&mut self, channel: ChannelId) -> Option<Detached<'res>> {
        self.table.entry(channel)?;
        let link = self.members.links[channel.index()].take()?;
        Some(Detached { id: channel, channel: PreparedChannel { link } })
    }

    /// As [`borrow_out`](Self::borrow_out), to take it to ERR. If it is out, that is done once it is back.
    pub(crate) fn borrow_to_flush(&mut self, channel: ChannelId) -> Option<Detached<'res>> {
        let out = self.borrow_out(channel)?;
        self.table.cold[channel.index()].must_flush = false;
        Some(out)
    }

    /// Refuses further posts, wakes all waiting tasks, and takes the channel out for a reset. `None`: it is out, or was
    /// removed.
    pub(crate) fn close(
        &mut self,
        channel: ChannelId,
        error: TransportError,
    ) -> Option<Detached<'res>> {
        self.table.entry(channel)?;
        self.table.refuse(channel, error);
        let detached = self.borrow_out(channel);
        if detached.is_some() {
            // A reset changes the core.
            self.table.cold[channel.index()].core = None;
        }
        detached
    }

    #[cold]
    pub(super) fn stop_and_reset(&mut self, channel: ChannelId) {
        if let Some(closed) = self.close(channel, TransportError::Stopped) {
            let is_reset = closed.try_reset();
            self.give_back(closed);
            self.end_closed(channel, is_reset);
        }
    }

    /// Returns a channel that was dropped meanwhile: the caller destroys it.
    pub(crate) fn give_back(&mut self, detached: Detached<'res>) -> Option<PendingDestroy<'res>> {
        if self.table.cold[detached.id.index()].is_dropped {
            return Some(self.give_up(detached));
        }
        let id = detached.id;
        self.attach_link(id, detached.channel.link);
        if self.table.cold[id.index()].must_flush {
            self.table.flush_later(id);
        }
        None
    }

    /// Ends operations in flight, but without `is_reset` only when the channel is removed.
    pub(crate) fn end_closed(&mut self, channel: ChannelId, is_reset: bool) {
        let slots = self.table.entries[channel.index()].slots();
        if is_reset {
            self.table.end_without_completions(slots.clone(), STOPPED);
        }
        let Table { outcomes, deferred, .. } = &mut self.table;
        let outcomes = &mut outcomes[slots.start as usize..slots.end as usize];
        outcomes.iter_mut().for_each(|outcome| deferred.wake(&mut outcome.waker));
    }

    /// Takes a channel out for good. Slots stay until [`discard`](Self::discard). `None`: it is out, and `give_back`
    /// returns it.
    pub(crate) fn detach(&mut self, channel: ChannelId) -> Option<PendingDestroy<'res>> {
        match self.members.links[channel.index()].take() {
            Some(link) => Some(self.begin_destroy(channel.index(), link)),
            None => {
                self.table.cold[channel.index()].is_dropped = true;
                None
            }
        }
    }

    pub(crate) fn give_up(&mut self, detached: Detached<'res>) -> PendingDestroy<'res> {
        self.begin_destroy(detached.id.index(), detached.channel.link)
    }

    pub(super) fn end(&mut self, index: usize, link: Link<'res>) -> Result<()> {
        let pending = self.begin_destroy(index, link);
        self.finish_destroy(pending.destroy())
    }

    fn begin_destroy(&mut self, index: usize, link: Link<'res>) -> PendingDestroy<'res> {
        self.table.end_sender(index, TransportError::Closed);
        self.retire(index);
        let table = &mut self.table;
        // Destroying the queue pair changes the core.
        table.cold[index].core = None;
        let slots = table.entries[index].slots();
        let (is_in_flight, shares) = (table.in_flight(slots) > 0, table.cold[index].shares);
        let datagrams = self.members.datagrams.get_mut(index).and_then(Option::take);
        PendingDestroy { index, link, is_in_flight, shares, datagrams }
    }

    /// Makes the channel's id invalid.
    pub(super) fn retire(&mut self, index: usize) -> ChannelId {
        let table = &mut self.table;
        let generation = table.entries[index].generation;
        let id = ChannelId { index: index as u32, generation };
        self.members.gone.retain(|gone| *gone != id);
        table.forget_credit(id);
        table.end_connections(table.entries[index].slots());
        table.entries[index].generation = generation.wrapping_add(1);
        id
    }

    pub(super) fn finish_destroy(&mut self, destroyed: Destroyed) -> Result<()> {
        let Destroyed { index, number, is_reset, result } = destroyed;
        let Self { table, members, .. } = self;
        let entry = &table.entries[index];
        let (slots, credit_slot) = (entry.slots(), entry.credit_slot());
        // Either success proves that the device has no requests.
        if is_reset || result.is_ok() {
            table.end_without_completions(slots.clone(), REMOVED);
        }
        if result.is_ok() {
            if let Some(slot) = credit_slot {
                table.slots[slot as usize].state = State::Free;
            }
            members.give_back(index, slots.len() as u32);
        } else {
            table.leak(slots);
        }
        if table.cold[index].shares {
            // A provider may still hold completions of messages that it took from shared receives.
            table.settle_all(members.capacity);
        }
        table.numbers.remove(number, index);
        result
    }

    /// Ends a channel, and drops results and wakers that no task asks for.
    pub(crate) fn discard(&mut self, destroyed: Destroyed) {
        let index = destroyed.index;
        // A queue pair that could not be destroyed is leaked.
        let _ = self.finish_destroy(destroyed);
        self.drop_messages(index);
        for slot in self.table.entries[index].slots() {
            let waker = self.table.outcomes[slot as usize].waker.take();
            self.table.deferred.forget(waker);
            if self.table.slots[slot as usize].state == State::Done {
                self.table.leave(slot);
            }
        }
        self.forget_lines(index);
    }

    pub(crate) fn take_completions(&mut self) {
        self.table.turns = self.table.turns.wrapping_add(1);
        self.table.settle_all(self.members.capacity);
    }

    fn drop_messages(&mut self, index: usize) {
        let mut messages = std::mem::take(&mut self.table.entries[index].tasks.messages);
        while let Some(slot) = self.table.slots.get(messages.first as usize) {
            let message = std::mem::replace(&mut messages.first, slot.link);
            self.table.leave(message);
        }
    }
}

impl<B> Table<B> {
    /// Refuses further posts, and wakes all tasks in the lines.
    pub(super) fn refuse(&mut self, channel: ChannelId, error: TransportError) {
        let index = channel.index();
        self.end_sender(index, error);
        self.entries[index].next = [NEVER_FREE; 2];
        self.cold[index].stopped.get_or_insert(error);
        self.entries[index].tasks.is_draining = false;
        for queue in [Queue::Send, Queue::Receive] {
            self.wake_all(index, queue);
        }
    }

    pub(super) fn why_stopped(&self, channel: ChannelId) -> Option<TransportError> {
        self.cold[channel.index()].stopped.or(self.stopped)
    }
}
