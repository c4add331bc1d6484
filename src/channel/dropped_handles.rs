//! Operations that own their buffers, and whose handles were dropped.

use super::Channel;
use super::core::Core;
#[cfg(doc)]
use super::error::TransportError;
use super::error::TransportResult;
use super::slot::{Owner, Slot, State};

impl Channel<'_> {
    /// `ibv_poll_cq`: takes all completions that are there, without waiting. Handles have their results then, and the
    /// buffers of those that were dropped are dropped.
    ///
    /// # Errors
    ///
    ///  - [`Verbs`](TransportError::Verbs), [`UnknownCompletion`](TransportError::UnknownCompletion):
    ///    polling failed. What is in flight stays in flight.
    #[doc(alias = "ibv_poll_cq")]
    pub fn poll(&mut self) -> TransportResult<()> {
        let core = self.core();
        core.release_dropped();
        while core.settle()? {}
        Ok(())
    }
}

impl Core {
    /// Processes the handles that were dropped: frees the slot and the buffer of an operation that has
    /// ended, and marks one in flight as having no owner.
    #[inline]
    pub(super) fn release_dropped(&self) {
        if self.table.owned.any_dropped() {
            self.release_dropped_slots();
        }
    }

    #[cold]
    fn release_dropped_slots(&self) {
        let entry = |index| self.table.slot(index).map(|slot| &slot.entry);
        self.table.owned.take_dropped(entry, |index| {
            let Some(slot) = self.table.slot(index) else { return };
            if !slot.entry.take_dropped(slot.wr_id()) {
                return;
            }
            match slot.state() {
                State::InFlight(owner) if owner.is_handle() => {
                    slot.set_state(State::InFlight(Owner::Nobody));
                    self.table.owned.drop_waker(&slot.entry);
                }
                State::Done(owner) | State::Discarded(owner) if owner.is_handle() => {
                    slot.entry.buffer.clear();
                    self.release(slot);
                }
                _ => {}
            }
        });
    }

    /// After `discard_outstanding`: operations that own their buffers have ended without completions.
    pub(super) fn end_discarded_owned(&self) {
        for slot in self.table.slots() {
            match slot.state() {
                State::Discarded(Owner::Nobody) => {
                    slot.entry.buffer.clear();
                    self.table.release_of(slot, Owner::Nobody);
                }
                State::Discarded(Owner::Task) => self.table.owned.wake(&slot.entry),
                _ => {}
            }
        }
    }

    /// Drops all buffers of operations that have ended, and leaks the others. From then on, the handles of all operations
    /// are of an earlier connection.
    pub(super) fn drop_owned_buffers(&self) {
        self.drop_buffers_of(self.table.slots().iter());
    }

    /// As [`drop_owned_buffers`](Self::drop_owned_buffers), except those of tasks, which are asked for until the next
    /// connection begins.
    pub(super) fn drop_buffers_of_handles(&self) {
        let is_of_task = |slot: &Slot| slot.state().owner() == Some(Owner::Task);
        self.drop_buffers_of(self.table.slots().iter().filter(|slot| !is_of_task(slot)));
    }

    fn drop_buffers_of<'a>(&self, slots: impl Iterator<Item = &'a Slot>) {
        for slot in slots {
            slot.renumber();
            let buffer = &slot.entry.buffer;
            if slot.state().is_outstanding() {
                buffer.leak()
            } else {
                buffer.clear()
            }
            slot.entry.drop_reference();
        }
    }
}
