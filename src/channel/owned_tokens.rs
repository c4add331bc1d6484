//! Operations that own their buffers and are known by tokens; and what is left of dropped handles.

use std::time::Instant;

use super::Channel;
use super::core::Core;
use super::error::{TransportError, TransportResult};
use super::owned_results::TokenResult;
use super::slot::{Owner, Slot, State};
use super::wait::Wait;

/// # Owned operations by token
impl Channel<'_> {
    /// Polls once, without waiting. Returns the first operation that has ended among those that were given
    /// [tokens](crate::OwnedWork::into_token), or `None`.
    ///
    /// # Errors
    ///
    ///  - [`Verbs`](TransportError::Verbs), [`UnknownCompletion`](TransportError::UnknownCompletion):
    ///    polling failed. What is in flight stays in flight.
    pub fn poll_token(&mut self) -> TransportResult<Option<TokenResult>> {
        let core = self.core();
        core.release_dropped();
        Ok(core.settle_for_token()?.map(|slot| core.take_token(slot)))
    }

    /// Waits until an operation with a [token](crate::OwnedWork::into_token) has ended, or the deadline has
    /// passed. If the deadline passes, it returns `None`, and everything stays in flight.
    ///
    /// # Errors
    ///
    /// As [`poll_token`](Self::poll_token).
    pub fn wait_token(&mut self, deadline: Instant) -> TransportResult<Option<TokenResult>> {
        let mut wait = Wait::new(Some(deadline));
        loop {
            if let Some(ended) = self.poll_token()? {
                return Ok(Some(ended));
            }
            match self.core().on_empty_poll(&mut wait) {
                Err(TransportError::TimedOut) => return Ok(None),
                waited => waited?,
            }
        }
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

    /// The result of an operation with a token, which has ended.
    #[inline]
    fn take_token(&self, slot: &Slot) -> TokenResult {
        let (token, buffer) = (slot.entry.token.get(), slot.entry.take_any());
        TokenResult { token, buffer, result: self.take_result(slot) }
    }
}
