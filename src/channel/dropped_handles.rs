//! Operations that own their buffers, and whose handles were dropped.

use super::Channel;
use super::core::Core;
use super::error::TransportResult;
use super::slot::{Owner, State};

impl Channel<'_> {
    /// `ibv_poll_cq`: takes all completions that are there, without waiting. Handles have their results then, and the
    /// buffers of those that were dropped are dropped.
    ///
    /// # Errors
    ///
    ///  - [`Verbs`](crate::TransportError::Verbs), [`UnknownCompletion`](crate::TransportError::UnknownCompletion):
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
                State::InFlight(Owner::Handle) => slot.set_state(State::InFlight(Owner::Dropped)),
                State::Done(Owner::Handle) | State::Discarded(Owner::Handle) => {
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
            if slot.state() == State::Discarded(Owner::Dropped) {
                slot.entry.buffer.clear();
                self.table.release_of(slot, Owner::Dropped);
            }
        }
    }

    /// Drops all buffers of operations that have ended, and leaks the others. From then on, the handles of all operations
    /// are of an earlier connection.
    pub(super) fn drop_owned_buffers(&self) {
        for slot in self.table.slots() {
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
