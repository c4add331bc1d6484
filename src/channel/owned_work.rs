//! Handles of operations that own their buffers: no scope, no borrow, no `unsafe`.

use std::ffi::c_int;
use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;
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
use crate::ffi;

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
    /// A slot of the core's table, even after the operation has ended.
    slot: NonNull<Slot>,
    /// `SPENT`: the result was returned, or the handle given up.
    wr_id: u64,
    buffer: PhantomData<fn() -> B>,
}

// SAFETY: a core may be used on any thread, and its slots are a part of it. Without the channel, which the thread then
// has for itself, only the atomics are touched.
unsafe impl<B: OwnedBuffer> Send for OwnedWork<B> {}
// SAFETY: as above.
unsafe impl<B: OwnedBuffer> Sync for OwnedWork<B> {}

/// No request has this number: there is no epoch 0.
const SPENT: u64 = 0;

/// How a wait has ended.
enum Waited<B> {
    /// By a success, which is still to be [taken](OwnedWork::take_success).
    Success(NonNull<ffi::ibv_wc>),
    /// As [`OwnedWork::wait_deadline`] returns it.
    Other(TransportResult<Option<OwnedResult<B>>>),
}

impl<B: OwnedBuffer> Drop for OwnedWork<B> {
    #[inline]
    fn drop(&mut self) {
        if self.wr_id != SPENT {
            self.core.table.owned.mark_dropped(&self.slot().entry, self.wr_id);
        }
    }
}

impl<B: OwnedBuffer> OwnedWork<B> {
    /// The handle of the operation in flight in this slot.
    ///
    /// # Safety
    ///
    /// The slot is of the core's table.
    #[inline]
    pub(super) unsafe fn new(core: &Arc<Core>, slot: &Slot) -> Self {
        let (slot, wr_id) = (NonNull::from(slot), slot.wr_id());
        Self { core: core.clone(), slot, wr_id, buffer: PhantomData }
    }

    /// The slot of the operation. If its number is another one, it is one of a later connection.
    #[inline(always)]
    fn slot(&self) -> &Slot {
        // SAFETY: a core never replaces its table, whose slots do not move, and this keeps the core alive. Nobody has
        // an exclusive reference to a slot.
        unsafe { self.slot.as_ref() }
    }

    /// Checks that the operation is of this connection of this channel, and not spent.
    fn check(&mut self, channel: &Channel<'_>) -> TransportResult<()> {
        if self.wr_id == SPENT || self.core.identity != channel.core().identity {
            return Err(TransportError::UnknownWork);
        }
        // A reset replaces the channel's core, or at least its connection, and drops the buffer.
        if !std::ptr::eq(&raw const *self.core, channel.core()) || self.slot().wr_id() != self.wr_id
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
        let success = match self.success_now(channel) {
            Ok(success) => success,
            Err(found) => match self.wait_slow_path(channel, found, None) {
                Waited::Success(success) => success,
                // Without a deadline there is no time-out.
                Waited::Other(ended) => return ended?.ok_or(TransportError::TimedOut),
            },
        };
        Ok(self.take_success(success))
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
        let success = match self.success_now(channel) {
            Ok(success) => success,
            Err(found) => match self.wait_slow_path(channel, found, Some(deadline)) {
                Waited::Success(success) => success,
                Waited::Other(ended) => return ended,
            },
        };
        Ok(Some(self.take_success(success)))
    }

    /// The completion, if the operation is a success that is there or is found by one poll. The slot holds the buffer.
    ///
    /// # Errors
    ///
    /// Those of [`Core::success_now`].
    #[inline(always)]
    fn success_now(&self, channel: &Channel<'_>) -> Result<NonNull<ffi::ibv_wc>, c_int> {
        let (core, slot) = (&*self.core, self.slot());
        let is_current = std::ptr::eq(core, channel.core()) && slot.wr_id() == self.wr_id;
        if !is_current || core.table.owned.any_dropped() || !slot.entry.buffer.holds::<B>() {
            return Err(0);
        }
        core.success_now(slot)
    }

    /// The buffer, and this completion of the operation.
    #[inline(always)]
    fn take_success(&mut self, completion: NonNull<ffi::ibv_wc>) -> OwnedResult<B> {
        let slot = self.slot();
        // SAFETY: it points to an entry of the batch or into the slot, and is initialised. Nothing has polled since. Who
        // found it has found a `B` in the entry too.
        let (success, buffer) = unsafe {
            (WorkSuccess::from_raw(*completion.as_ptr()), slot.entry.buffer.take_unchecked())
        };
        // Blocking operations compute `fast_path`: what the post of the operation has set is a safe value.
        self.core.table.release(slot);
        self.wr_id = SPENT;
        OwnedResult { buffer, result: Ok(success) }
    }

    /// The rest of a wait, after a poll that returned `found`, or 0 if there was none.
    #[inline(never)]
    fn wait_slow_path(
        &mut self,
        channel: &mut Channel<'_>,
        found: c_int,
        deadline: Option<Instant>,
    ) -> Waited<B> {
        // What was found is in the batch, unless polling has failed.
        if let Err(error) = self.check(channel).and_then(|()| check_poll(found)) {
            return Waited::Other(Err(error));
        }
        self.core.release_dropped();
        let mut wait = Wait::new(deadline);
        loop {
            let slot = self.slot();
            if slot.is_success() && slot.entry.buffer.holds::<B>() {
                return Waited::Success(slot.completion_pointer());
            }
            match self.ended() {
                Ok(None) => {}
                ended => return Waited::Other(ended),
            }
            let progress = match self.core.progress() {
                Ok(false) => self.core.on_empty_poll(&mut wait),
                progress => progress.map(drop),
            };
            match progress {
                Ok(()) => {}
                Err(TransportError::TimedOut) => return Waited::Other(Ok(None)),
                Err(error) => return Waited::Other(Err(error)),
            }
        }
    }

    /// The buffer and the result, if the operation has ended.
    fn ended(&mut self) -> TransportResult<Option<OwnedResult<B>>> {
        let slot = self.slot();
        match slot.state() {
            State::InFlight(owner) if owner.is_handle() => Ok(None),
            State::Done(owner) | State::Discarded(owner) if owner.is_handle() => {
                let buffer = slot.entry.buffer.take();
                let result = self.core.take_result(slot);
                self.wr_id = SPENT;
                let buffer = buffer.ok_or(TransportError::UnknownWork)?;
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
        self.wr_id != SPENT
            && std::ptr::eq(&raw const *self.core, channel.core())
            && !matches!(self.slot().state(), State::InFlight(_))
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
        let slot = self.slot();
        let state = match slot.state() {
            State::InFlight(Owner::Handle) => State::InFlight(Owner::OwnToken),
            State::Done(Owner::Handle) => State::Done(Owner::OwnToken),
            State::Discarded(Owner::Handle) => State::Discarded(Owner::OwnToken),
            _ => return Err(self),
        };
        slot.set_state(state);
        slot.entry.token.set(token);
        self.core.table.owned.any_token_ended.set(true);
        self.wr_id = SPENT;
        Ok(())
    }
}

impl<B: OwnedBuffer> fmt::Debug for OwnedWork<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedWork").field("wr_id", &self.wr_id).finish_non_exhaustive()
    }
}
