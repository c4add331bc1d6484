//! Operations that own their buffers and are known by tokens; and what is left of dropped handles.

use std::time::Instant;

use super::Channel;
use super::core::Core;
use super::error::{TransportError, TransportResult};
use super::in_flight::{Owner, State};
use super::owned_results::TokenResult;
use super::wait::Wait;

/// # Owned operations by token
impl Channel<'_> {
    /// Polls once, without waiting. Returns one ended operation among those that were given
    /// [tokens](crate::OwnedWork::into_token), or `None`.
    ///
    /// # Errors
    ///
    ///  - [`Verbs`](TransportError::Verbs), [`UnknownCompletion`](TransportError::UnknownCompletion):
    ///    polling failed. What is in flight stays in flight.
    pub fn poll_token(&mut self) -> TransportResult<Option<TokenResult>> {
        let core = self.core();
        core.release_dropped();
        if let Some(ended) = core.next_token() {
            return Ok(Some(ended));
        }
        while core.progress()? {
            if let Some(ended) = core.next_token() {
                return Ok(Some(ended));
            }
        }
        Ok(None)
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
        if self.table.owned.take_any_dropped() {
            self.release_dropped_slots();
        }
    }

    #[cold]
    fn release_dropped_slots(&self) {
        for slot in self.table.slots() {
            if !slot.entry.is_dropped(slot.wr_id()) {
                continue;
            }
            match slot.state() {
                State::InFlight(owner) if owner.is_handle() => {
                    slot.set_state(State::InFlight(Owner::Nobody));
                    drop(slot.entry.waker.take());
                }
                State::Done(owner) | State::Discarded(owner) if owner.is_handle() => {
                    slot.entry.buffer.clear();
                    self.release(slot);
                }
                _ => {}
            }
        }
    }

    /// After `discard_outstanding`: operations that own their buffers have ended without completions.
    pub(super) fn end_discarded_owned(&self) {
        self.table.owned.any_token_ended.set(true);
        for slot in self.table.slots() {
            match slot.state() {
                State::Discarded(Owner::Nobody) => {
                    slot.entry.buffer.clear();
                    self.table.release(slot);
                }
                State::Discarded(Owner::Task) => self.table.owned.wake(&slot.entry),
                _ => {}
            }
        }
    }

    /// Drops all buffers of operations that have ended, and leaks the others.
    pub(super) fn drop_owned_buffers(&self) {
        for slot in self.table.slots() {
            let buffer = &slot.entry.buffer;
            if slot.state().is_outstanding() { buffer.leak() } else { buffer.clear() }
        }
    }

    /// The first operation with a token that has ended.
    fn next_token(&self) -> Option<TokenResult> {
        if !self.table.owned.any_token_ended.get() {
            return None;
        }
        let ended = |state| {
            matches!(state, State::Done(Owner::OwnToken) | State::Discarded(Owner::OwnToken))
        };
        let Some(slot) = self.table.slots().iter().find(|slot| ended(slot.state())) else {
            self.table.owned.any_token_ended.set(false);
            return None;
        };
        let (token, buffer) = (slot.entry.token.get(), slot.entry.take_any());
        Some(TokenResult { token, buffer, result: self.take_result(slot) })
    }
}
