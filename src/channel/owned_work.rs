//! Handles of operations that own their buffers: no scope, no borrow, no `unsafe`.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use super::Channel;
use super::core::Core;
use super::error::{TransportError, TransportResult};
use super::operation_error::{OperationError, OwnedResult};
use super::owned_buffer::OwnedBuffer;
use super::slot::{Owner, Slot, State};
use super::wait::Wait;
use crate::completion::WorkSuccess;
use crate::debug::debug;
use crate::error::err_from_call;
use crate::ffi;

/// An operation that owns its buffer: see [`Channel::post_owned`].
///
/// The buffer is held by the channel. [`poll`](Self::poll) or [`wait`](Self::wait) gives it back when the
/// operation has ended. A program that has no place for handles, such as a server, has a [`Loop`](crate::Loop), which
/// returns what has ended with a number of the program's choice.
///
/// Dropping a handle discards the result, and the operation goes on. Its buffer is dropped (a pooled buffer goes back to its
/// pool) when the channel has polled the completion: by [`Channel::poll`], by a wait for another handle that does not find its own completion at once, or by a post of an owned operation that finds the queue full. If some
/// other wait has polled it, the next post of an owned operation drops the buffer. The buffer of a forgotten handle is
/// dropped when the channel is reset and connected again, or dropped. A handle may be dropped on any thread.
#[must_use = "dropping it gives the buffer up"]
pub struct OwnedWork<B: OwnedBuffer> {
    /// `None`: the result was returned, or the handle given up.
    core: Option<Arc<Core>>,
    /// A slot of the core's table.
    slot: NonNull<Slot>,
    /// The number of the operation.
    wr_id: u64,
    buffer: PhantomData<fn() -> B>,
}

// SAFETY: a core may be used on any thread, and its slots are a part of it. Without the channel, which the thread then
// has for itself, only the atomics are touched.
unsafe impl<B: OwnedBuffer> Send for OwnedWork<B> {}
// SAFETY: as above.
unsafe impl<B: OwnedBuffer> Sync for OwnedWork<B> {}

impl<B: OwnedBuffer> Drop for OwnedWork<B> {
    #[inline]
    fn drop(&mut self) {
        if let Some(core) = self.core.take() {
            give_up(core, self.slot, self.wr_id);
        }
    }
}

/// The handle of the operation in this slot of the core was dropped.
///
/// A function of the handle's fields: one that got the handle's address would keep the handle in memory.
#[inline(never)]
fn give_up(core: Arc<Core>, slot: NonNull<Slot>, wr_id: u64) {
    // SAFETY: it is a slot of this core's table. Nothing has an exclusive reference to a slot.
    core.table.owned.mark_dropped(&unsafe { slot.as_ref() }.entry, wr_id);
}

impl<B: OwnedBuffer> OwnedWork<B> {
    /// The handle of the operation in flight in this slot.
    ///
    /// # Safety
    ///
    /// The slot is of the core's table, and holds a `B`. No other handle has been made for the operation.
    #[inline(always)]
    pub(super) unsafe fn new(core: &Arc<Core>, slot: &Slot) -> Self {
        let core = slot.entry.take_reference(core);
        Self {
            core: Some(core),
            slot: NonNull::from(slot),
            wr_id: slot.wr_id(),
            buffer: PhantomData,
        }
    }

    /// The core and the slot of the operation, if this connection of this channel has it.
    ///
    /// # Errors
    ///
    ///  - [`UnknownWork`](TransportError::UnknownWork): the operation is of another channel, or its result was
    ///    returned.
    ///  - [`Stopped`](TransportError::Stopped): it is of an earlier connection.
    fn find<'a>(&self, channel: &'a Channel<'_>) -> OwnedResult<B, (&'a Core, &'a Slot)> {
        self.find_in(channel.core())
    }

    /// As [`find`](Self::find), in the core of a channel that need not be connected.
    fn find_in<'a>(&self, core: &'a Core) -> OwnedResult<B, (&'a Core, &'a Slot)> {
        if self.is_of(core) {
            // SAFETY: it is a slot of this core's table, which lives as long as the core, as do the slots.
            return Ok((core, unsafe { self.slot.as_ref() }));
        }
        Err(not_found(self.identity(), core).into())
    }

    /// What names the channel, unless the handle was given up.
    #[inline(always)]
    fn identity(&self) -> Option<u64> {
        self.core.as_ref().map(|core| core.identity)
    }

    /// Whether this is a handle of the connection that the core has, whose result was not returned. If so, the slot is one
    /// of this core, and has the operation.
    #[inline(always)]
    fn is_of(&self, core: &Core) -> bool {
        // SAFETY: the slot is of `self.core`, and that is this core, which is alive. Nothing has an exclusive
        // reference to a slot.
        self.core.as_deref().is_some_and(|own| std::ptr::eq(own, core))
            && unsafe { self.slot.as_ref() }.wr_id() == self.wr_id
    }

    /// Polls once, without waiting: the buffer and the completion, or `None` if the operation is still in
    /// flight.
    ///
    /// # Errors
    ///
    /// With the buffer:
    ///
    ///  - [`Work`](TransportError::Work): the operation failed.
    ///  - [`Stopped`](TransportError::Stopped), [`Closed`](TransportError::Closed): it was ended by force, and
    ///    may or may not have been carried out.
    ///
    /// Without:
    ///
    ///  - [`Verbs`](TransportError::Verbs), [`UnknownCompletion`](TransportError::UnknownCompletion):
    ///    polling failed. The operation is still in flight.
    ///  - [`Stopped`](TransportError::Stopped): the operation was of an earlier connection; its buffer
    ///    was dropped.
    ///  - [`UnknownWork`](TransportError::UnknownWork): the operation is of another channel, or its
    ///    result was already returned.
    pub fn poll(&mut self, channel: &mut Channel<'_>) -> OwnedResult<B, Option<(B, WorkSuccess)>> {
        let (core, slot) = self.find(channel)?;
        if slot.state().is_outstanding() {
            core.release_dropped();
            let settled = core.settle();
            if slot.state().is_outstanding() {
                settled?;
            }
        }
        self.take(core, slot)
    }

    /// Waits until the operation has ended, however long that takes.
    ///
    /// # Errors
    ///
    /// As [`poll`](Self::poll). Nothing is stopped.
    #[inline(always)]
    pub fn wait(&mut self, channel: &mut Channel<'_>) -> OwnedResult<B> {
        let (slot, completion) = self.wait_for_success(channel, None)?;
        // SAFETY: `wait_for_success` says so, and nothing was taken since.
        Ok(unsafe { self.take_success(channel.core(), slot, completion) })
    }

    /// Waits until the operation has ended, or the deadline has passed. If the deadline passes, it returns
    /// `None`, and everything stays in flight.
    ///
    /// # Errors
    ///
    /// As [`poll`](Self::poll). Nothing is stopped.
    #[inline(always)]
    pub fn wait_until(
        &mut self,
        channel: &mut Channel<'_>,
        deadline: Instant,
    ) -> OwnedResult<B, Option<(B, WorkSuccess)>> {
        match self.wait_for_success(channel, Some(deadline)) {
            Ok((slot, completion)) => {
                // SAFETY: as in `wait`.
                Ok(Some(unsafe { self.take_success(channel.core(), slot, completion) }))
            }
            Err(OperationError { error: TransportError::TimedOut, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The slot of the operation, which holds a `B`, and its completion, which is a success.
    ///
    /// # Errors
    ///
    /// Those of [`poll`](Self::poll), and `TimedOut` if the deadline has passed.
    #[inline(always)]
    fn wait_for_success<'a>(
        &mut self,
        channel: &'a Channel<'_>,
        deadline: Option<Instant>,
    ) -> OwnedResult<B, (&'a Slot, NonNull<ffi::ibv_wc>)> {
        let core = channel.core();
        if !self.is_of(core) {
            return err_from_call(not_found(self.identity(), core).into());
        }
        // SAFETY: it is a slot of this core's table, which lives as long as the core, as do the slots.
        let slot = unsafe { self.slot.as_ref() };
        // Before anything is taken from what was polled. The operation of a handle has its buffer.
        if !slot.entry.buffer.holds::<B>() {
            return err_from_call(TransportError::UnknownWork.into());
        }
        match core.success_now(slot) {
            Some(completion) => Ok((slot, completion)),
            None => match wait_slow_path(core, slot, deadline) {
                // It may have run code of any kind.
                Ok(completion) if slot.entry.buffer.holds::<B>() => Ok((slot, completion)),
                Ok(_) => err_from_call(TransportError::UnknownWork.into()),
                Err(error) if slot.state().is_outstanding() => err_from_call(error.into()),
                Err(error) => {
                    slot.entry.put_reference(self.core.take());
                    err_from_call(take_failure(core, slot, error))
                }
            },
        }
    }

    /// The buffer and the completion, which is of the operation in this slot.
    ///
    /// # Safety
    ///
    /// The slot holds a `B`.
    #[inline(always)]
    unsafe fn take_success(
        &mut self,
        core: &Core,
        slot: &Slot,
        completion: NonNull<ffi::ibv_wc>,
    ) -> (B, WorkSuccess) {
        // SAFETY: the caller vouches for it.
        let buffer = unsafe { slot.entry.buffer.take_unchecked() };
        // Blocking operations compute `fast_path`: what the post of the operation has set is a safe value.
        core.table.release_of(slot, Owner::Handle);
        slot.entry.put_reference(self.core.take());
        // SAFETY: it points to an entry of the batch or into the slot, and is initialised. Nothing has polled since.
        (buffer, WorkSuccess::from_raw(unsafe { *completion.as_ptr() }))
    }

    /// The buffer and the completion, if the operation has ended.
    fn take(&mut self, core: &Core, slot: &Slot) -> OwnedResult<B, Option<(B, WorkSuccess)>> {
        let ended = core.take_owned(slot);
        if !matches!(ended, Ok(None)) {
            slot.entry.put_reference(self.core.take());
        }
        ended
    }
}

impl Core {
    /// The buffer and the completion of the operation in this slot, if it has ended. The slot is then free.
    pub(super) fn take_owned<B: OwnedBuffer>(
        &self,
        slot: &Slot,
    ) -> OwnedResult<B, Option<(B, WorkSuccess)>> {
        match slot.state() {
            State::InFlight(Owner::Handle) => Ok(None),
            State::Done(Owner::Handle) | State::Discarded(Owner::Handle) => {
                let buffer = slot.entry.buffer.take();
                match (self.take_result(slot), buffer) {
                    (Ok(success), Some(buffer)) => Ok(Some((buffer, success))),
                    (Ok(_), None) => Err(TransportError::UnknownWork.into()),
                    (Err(error), buffer) => Err(OperationError { error, buffer }),
                }
            }
            _ => Err(TransportError::UnknownWork.into()),
        }
    }
}

/// Why a core does not have the operation of a handle of the channel with this identity.
#[cold]
#[inline(never)]
fn not_found(identity: Option<u64>, core: &Core) -> TransportError {
    // A reset replaces the channel's core, or at least its connection, and drops the buffer.
    if identity == Some(core.identity) {
        TransportError::Stopped
    } else {
        TransportError::UnknownWork
    }
}

/// The error of the operation in this slot, which has ended, or else `error`.
#[cold]
#[inline(never)]
fn take_failure<B: OwnedBuffer>(
    core: &Core,
    slot: &Slot,
    error: TransportError,
) -> OperationError<B> {
    match core.take_owned(slot) {
        Err(own) => own,
        Ok(ended) => OperationError { error, buffer: ended.map(|(buffer, _)| buffer) },
    }
}

/// The rest of a wait. Returns the completion of the operation in this slot, which is a success.
///
/// # Errors
///
/// The operation may have ended, or not: not if it is `TimedOut`.
#[inline(never)]
fn wait_slow_path(
    core: &Core,
    slot: &Slot,
    deadline: Option<Instant>,
) -> TransportResult<NonNull<ffi::ibv_wc>> {
    core.release_dropped();
    let settled = core.settle_rest();
    if slot.state().is_outstanding() {
        settled?;
    }
    core.settle_until(&mut Wait::new(deadline), || (!slot.state().is_outstanding()).then_some(()))?;
    if slot.is_success() {
        return Ok(slot.completion_pointer());
    }
    // The caller finds the operation's own.
    Err(TransportError::Stopped)
}

debug! { impl[B: OwnedBuffer] OwnedWork<B>, self, wr_id: self.wr_id, .. }
