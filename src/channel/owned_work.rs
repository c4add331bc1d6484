//! Handles of operations that own their buffers: no scope, no borrow, no `unsafe`.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Instant;

use super::Channel;
use super::core::Core;
use super::error::{TransportError, TransportResult};
use super::in_flight::{Owner, Slot, State};
use super::owned_buffer::OwnedBuffer;
use super::owned_results::OwnedResult;
use super::wait::Wait;

/// An operation that owns its buffer, such as [`Channel::post_receive_owned`] posts.
///
/// The buffer is held by the channel. [`poll`](Self::poll) or [`wait`](Self::wait) gives it back when the
/// operation has ended. [`into_token`](Self::into_token) gives the handle up for a number of the
/// program's choice.
///
/// Dropping a handle discards the result, and the operation goes on. Once it has ended, the next use of the
/// channel for owned operations drops the buffer (a pooled buffer goes back to its pool). The buffer of a
/// forgotten handle is dropped when the channel is reset and connected again, or dropped. A handle may be
/// dropped on any thread.
#[must_use = "dropping it gives the buffer up"]
pub struct OwnedWork<B: OwnedBuffer> {
    core: Arc<Core>,
    wr_id: u64,
    /// The result was returned, or the handle given up.
    spent: bool,
    buffer: PhantomData<fn() -> B>,
}

impl<B: OwnedBuffer> Drop for OwnedWork<B> {
    fn drop(&mut self) {
        if !self.spent {
            self.core.table.entries.mark_dropped(self.wr_id);
        }
    }
}

impl<B: OwnedBuffer> OwnedWork<B> {
    /// The handle of an operation in flight.
    #[inline]
    pub(super) fn new(core: &Arc<Core>, wr_id: u64) -> Self {
        Self { core: core.clone(), wr_id, spent: false, buffer: PhantomData }
    }

    /// Checks that the operation is of this connection of this channel, and not spent.
    fn check(&mut self, channel: &Channel<'_>) -> TransportResult<()> {
        if self.spent || self.core.identity != channel.core().identity {
            return Err(TransportError::UnknownWork);
        }
        // A reset replaces the channel's core, or at least its connection, and drops the buffer.
        if !std::ptr::eq(&raw const *self.core, channel.core())
            || !self.core.is_of_connection(self.wr_id)
        {
            self.spent = true;
            return Err(TransportError::Stopped);
        }
        Ok(())
    }

    /// Polls once, without waiting: the buffer and the result, or `None` if the operation is still in
    /// flight.
    ///
    /// # Errors
    ///
    ///  - [`Verbs`](TransportError::Verbs), [`UnknownCompletion`](TransportError::UnknownCompletion):
    ///    polling failed. The operation is still in flight.
    ///  - [`Stopped`](TransportError::Stopped): the operation was of an earlier connection; its buffer
    ///    was dropped.
    ///  - [`UnknownWork`](TransportError::UnknownWork): the operation is of another channel, or its
    ///    result was already returned.
    pub fn poll(&mut self, channel: &mut Channel<'_>) -> TransportResult<Option<OwnedResult<B>>> {
        self.check(channel)?;
        if let Some(ended) = self.ended()? {
            return Ok(Some(ended));
        }
        self.core.release_dropped();
        self.core.progress()?;
        self.ended()
    }

    /// Waits until the operation has ended, however long that takes.
    ///
    /// # Errors
    ///
    /// As [`poll`](Self::poll). Nothing is stopped.
    pub fn wait(&mut self, channel: &mut Channel<'_>) -> TransportResult<OwnedResult<B>> {
        match self.wait_with(channel, None)? {
            Some(ended) => Ok(ended),
            // Without a deadline there is no time-out.
            None => Err(TransportError::TimedOut),
        }
    }

    /// Waits until the operation has ended, or the deadline has passed. If the deadline passes, it returns
    /// `None`, and everything stays in flight.
    ///
    /// # Errors
    ///
    /// As [`poll`](Self::poll). Nothing is stopped.
    pub fn wait_deadline(
        &mut self,
        channel: &mut Channel<'_>,
        deadline: Instant,
    ) -> TransportResult<Option<OwnedResult<B>>> {
        self.wait_with(channel, Some(deadline))
    }

    fn wait_with(
        &mut self,
        channel: &mut Channel<'_>,
        deadline: Option<Instant>,
    ) -> TransportResult<Option<OwnedResult<B>>> {
        self.check(channel)?;
        self.core.release_dropped();
        let mut wait = None;
        loop {
            if let Some(ended) = self.ended()? {
                return Ok(Some(ended));
            }
            if !self.core.progress()? {
                let wait = wait.get_or_insert_with(|| Wait::new(deadline));
                match self.core.on_empty_poll(wait) {
                    Err(TransportError::TimedOut) => return Ok(None),
                    waited => waited?,
                }
            }
        }
    }

    /// The buffer and the result, if the operation has ended.
    fn ended(&mut self) -> TransportResult<Option<OwnedResult<B>>> {
        let core = &*self.core;
        let Some(slot) = core.table.slot(self.wr_id as u32 as usize) else {
            return Err(TransportError::UnknownWork);
        };
        match slot.state() {
            State::InFlight(owner) if owner.is_handle() => Ok(None),
            State::Done(owner) | State::Discarded(owner) if owner.is_handle() => {
                self.spent = true;
                let Some(buffer) = core.table.entries.of(self.wr_id).buffer.take() else {
                    return Err(TransportError::UnknownWork);
                };
                let result = core.take_result(slot);
                Ok(Some(OwnedResult { buffer, result }))
            }
            _ => Err(TransportError::UnknownWork),
        }
    }

    /// The buffer and the result, if the operation has ended, without polling.
    ///
    /// # Errors
    ///
    /// As [`poll`](Self::poll).
    pub(crate) fn take_ended(
        &mut self,
        channel: &mut Channel<'_>,
    ) -> TransportResult<Option<OwnedResult<B>>> {
        self.check(channel)?;
        self.ended()
    }

    /// Whether the operation has ended. False for one of another channel.
    pub(crate) fn has_ended(&self, channel: &mut Channel<'_>) -> bool {
        self.slot_of(channel).is_some_and(|slot| !matches!(slot.state(), State::InFlight(_)))
    }

    /// The slot, if this is the channel of the operation.
    fn slot_of<'a>(&'a self, channel: &mut Channel<'_>) -> Option<&'a Slot> {
        if self.spent || !std::ptr::eq(&raw const *self.core, channel.core()) {
            return None;
        }
        self.core.table.slot(self.wr_id as u32 as usize)
    }

    /// Replaces the handle by `token`, which [`Channel::poll_token`] returns when the operation has ended.
    /// Tokens need not be distinct.
    ///
    /// # Errors
    ///
    /// Returns the handle if the operation is of another channel or an earlier connection.
    pub fn into_token(mut self, channel: &mut Channel<'_>, token: u64) -> Result<(), Self> {
        if self.check(channel).is_err() {
            return Err(self);
        }
        let Some(slot) = self.core.table.slot(self.wr_id as u32 as usize) else {
            return Err(self);
        };
        let state = match slot.state() {
            State::InFlight(Owner::Handle) => State::InFlight(Owner::OwnToken),
            State::Done(Owner::Handle) => State::Done(Owner::OwnToken),
            State::Discarded(Owner::Handle) => State::Discarded(Owner::OwnToken),
            _ => return Err(self),
        };
        slot.set_state(state);
        self.core.table.entries.of(self.wr_id).token.set(token);
        self.core.table.entries.any_token_ended.set(true);
        self.spent = true;
        Ok(())
    }
}

impl<B: OwnedBuffer> fmt::Debug for OwnedWork<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedWork").field("wr_id", &self.wr_id).finish_non_exhaustive()
    }
}
