//! Handles of operations that own their buffers: no scope, no borrow, no `unsafe`.

use std::ffi::c_int;
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Instant;

use super::Channel;
use super::completions::check_poll;
use super::core::Core;
use super::error::{TransportError, TransportResult};
use super::in_flight::{Owner, Slot, State};
use super::owned_buffer::OwnedBuffer;
use super::owned_results::OwnedResult;
use super::wait::Wait;
use crate::completion::WorkSuccess;

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
    /// `SPENT`: the result was returned, or the handle given up.
    wr_id: u64,
    buffer: PhantomData<fn() -> B>,
}

/// No request has this number: there is no epoch 0.
const SPENT: u64 = 0;

impl<B: OwnedBuffer> Drop for OwnedWork<B> {
    #[inline]
    fn drop(&mut self) {
        if self.wr_id != SPENT {
            self.core.table.entries.mark_dropped(self.wr_id);
        }
    }
}

impl<B: OwnedBuffer> OwnedWork<B> {
    /// The handle of an operation in flight.
    #[inline]
    pub(super) fn new(core: &Arc<Core>, wr_id: u64) -> Self {
        Self { core: core.clone(), wr_id, buffer: PhantomData }
    }

    /// Checks that the operation is of this connection of this channel, and not spent.
    fn check(&mut self, channel: &Channel<'_>) -> TransportResult<()> {
        if self.wr_id == SPENT || self.core.identity != channel.core().identity {
            return Err(TransportError::UnknownWork);
        }
        // A reset replaces the channel's core, or at least its connection, and drops the buffer.
        if !std::ptr::eq(&raw const *self.core, channel.core())
            || !self.core.is_of_connection(self.wr_id)
        {
            self.wr_id = SPENT;
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
    #[inline(always)]
    pub fn wait(&mut self, channel: &mut Channel<'_>) -> TransportResult<OwnedResult<B>> {
        match self.success_now(channel) {
            Ok((buffer, success)) => Ok(OwnedResult { buffer, result: Ok(success) }),
            // Without a deadline there is no time-out.
            Err(found) => {
                self.wait_slow_path(channel, found, None)?.ok_or(TransportError::TimedOut)
            }
        }
    }

    /// Waits until the operation has ended, or the deadline has passed. If the deadline passes, it returns
    /// `None`, and everything stays in flight.
    ///
    /// # Errors
    ///
    /// As [`poll`](Self::poll). Nothing is stopped.
    #[inline(always)]
    pub fn wait_deadline(
        &mut self,
        channel: &mut Channel<'_>,
        deadline: Instant,
    ) -> TransportResult<Option<OwnedResult<B>>> {
        match self.success_now(channel) {
            Ok((buffer, success)) => Ok(Some(OwnedResult { buffer, result: Ok(success) })),
            Err(found) => self.wait_slow_path(channel, found, Some(deadline)),
        }
    }

    /// The buffer and the completion, if the operation is a success that is there or is found by one poll.
    ///
    /// # Errors
    ///
    /// Those of [`Core::success_now`].
    #[inline(always)]
    fn success_now(&mut self, channel: &Channel<'_>) -> Result<(B, WorkSuccess), c_int> {
        let core = &*self.core;
        let is_current = std::ptr::eq(core, channel.core()) && core.is_of_connection(self.wr_id);
        if !is_current || core.table.entries.any_dropped() {
            return Err(0);
        }
        let slot = core.table.slot(self.wr_id as u32 as usize).ok_or(0)?;
        if !matches!(slot.state(), State::InFlight(Owner::Handle) | State::Done(Owner::Handle)) {
            return Err(0);
        }
        let completion = core.success_now(slot)?;
        // SAFETY: it points to an entry of the batch or into the slot, and is initialised. Nothing polls meanwhile.
        let completion = unsafe { *completion.as_ptr() };
        let Some(buffer) = core.table.entries.of(self.wr_id).buffer.take() else {
            // The slot of a handle has a buffer of the handle's type.
            slot.complete(Owner::Handle, &completion);
            return Err(0);
        };
        core.release(slot);
        self.wr_id = SPENT;
        Ok((buffer, WorkSuccess::from_raw(completion)))
    }

    /// The rest of a wait, after a poll that returned `found`, or 0 if there was none.
    #[inline(never)]
    fn wait_slow_path(
        &mut self,
        channel: &mut Channel<'_>,
        found: c_int,
        deadline: Option<Instant>,
    ) -> TransportResult<Option<OwnedResult<B>>> {
        self.check(channel)?;
        // What was found is in the batch, unless polling has failed.
        check_poll(found)?;
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
                let wr_id = std::mem::replace(&mut self.wr_id, SPENT);
                let Some(buffer) = core.table.entries.of(wr_id).buffer.take() else {
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
        if self.wr_id == SPENT || !std::ptr::eq(&raw const *self.core, channel.core()) {
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
        self.wr_id = SPENT;
        Ok(())
    }
}

impl<B: OwnedBuffer> fmt::Debug for OwnedWork<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedWork").field("wr_id", &self.wr_id).finish_non_exhaustive()
    }
}
