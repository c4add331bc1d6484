use std::mem::{ManuallyDrop, MaybeUninit};
use std::ptr::NonNull;
use std::time::Instant;

use super::core::{Core, OneThread};
use super::error::TransportResult;
use super::operation::Queue;
use super::slot::{Slot, State};
use super::wait::Wait;
use crate::base::debug;
use crate::verbs::completion::WorkSuccess;
use crate::verbs::memory::{GatherBuffer, KeptLength};

/// An operation that was posted in a [`Scope`](crate::Scope), and its buffer.
///
/// [`wait`](Self::wait) gives the buffer back. If the handle is dropped or forgotten, the operation
/// goes on, and the buffer stays borrowed until the scope has ended. The scope then waits for the
/// operation, and reports it if it failed. A pooled buffer then has the length of the message; if a receive has several, and
/// its handle is dropped before the message has come, they are empty. A handle that is forgotten (`mem::forget`) has the
/// buffer's address and sets no length: the buffer keeps the one that it had, and the bytes are the message's.
pub struct ScopedPendingWork<'scope, B: GatherBuffer> {
    core: &'scope Core,
    slot: &'scope Slot,
    /// `MaybeUninit`: the buffer may be an exclusive reference, and the compiler must not assume that only it
    /// accesses the memory.
    buffer: MaybeUninit<B>,
    _one_thread: OneThread,
}

impl<B: GatherBuffer> Drop for ScopedPendingWork<'_, B> {
    /// Soundness does not depend on this call.
    ///
    /// Inlined, with functions that get the slot only: one with the handle's address would keep the handle in memory.
    #[inline]
    fn drop(&mut self) {
        // SAFETY: as below. The device does not write the length.
        let buffer = unsafe { self.buffer.assume_init_mut() };
        let kept = buffer.kept_length();
        if B::KEEPS_LENGTH
            && kept.is_none()
            && let Some(len) = self.core.length_for_pieces(self.slot)
        {
            buffer.received(len);
        }
        if std::mem::needs_drop::<B>() {
            // SAFETY: `new` initialised it, and `wait_with` drops no value that it reads from. A buffer owns at most
            // a list of slices: dropping it does not touch registered memory (the contract of `GatherBuffer`).
            unsafe { self.buffer.assume_init_drop() };
        }
        match kept {
            None => self.core.leave_to_scope(self.slot),
            Some(kept) => self.core.lend_to_scope(self.slot, kept),
        }
    }
}

impl Core {
    #[inline]
    fn leave_to_scope(&self, slot: &Slot) {
        match slot.state() {
            State::Scoped => slot.set_state(State::Abandoned),
            _ => self.leave_ended_to_scope(slot),
        }
    }

    /// The buffer keeps a length, and stays borrowed for the scope.
    #[inline(never)]
    fn lend_to_scope(&self, slot: &Slot, kept: NonNull<KeptLength>) {
        if slot.state() == State::Scoped {
            slot.kept.set(Some(kept));
            return slot.set_state(State::Lent);
        }
        if let Ok(success) = self.result(slot) {
            // SAFETY: the operation has ended, and the handle's borrow of the buffer has not.
            unsafe { success.tell(kept) };
        }
        self.leave_ended_to_scope(slot);
    }

    /// The length of the message, for a buffer of several pieces. A receive in flight has 0: its pieces are not told a
    /// length later, and would otherwise keep that of an earlier message.
    #[inline(never)]
    fn length_for_pieces(&self, slot: &Slot) -> Option<usize> {
        if slot.state() == State::Scoped {
            let receives = self.table.of(Queue::Receive).as_ptr_range();
            return receives.contains(&std::ptr::from_ref(slot)).then_some(0);
        }
        self.result(slot).ok()?.message_len().map(|len| len as usize)
    }

    #[inline(never)]
    fn leave_ended_to_scope(&self, slot: &Slot) {
        match slot.state() {
            State::Done => {
                self.unreported.unpolled.set(true);
                self.report_failure(&slot.completion());
                self.table.release_scoped(slot);
            }
            State::Seen | State::Discarded => self.table.release_scoped(slot),
            _ => {}
        }
    }
}

impl<'scope, B: GatherBuffer> ScopedPendingWork<'scope, B> {
    #[inline]
    pub(super) fn new(core: &'scope Core, slot: &'scope Slot, buffer: B) -> Self {
        Self { core, slot, buffer: MaybeUninit::new(buffer), _one_thread: OneThread::default() }
    }

    /// Polls once, without waiting: the result of the operation, or `None` if it is still in flight.
    /// After the operation has ended, each call returns the same result, and [`wait`](Self::wait) gives
    /// the buffer back at once.
    ///
    /// # Errors
    ///
    ///  - [`Work`](crate::TransportError::Work): the operation failed.
    ///  - [`Verbs`](crate::TransportError::Verbs),
    ///    [`UnknownCompletion`](crate::TransportError::UnknownCompletion): polling failed. The
    ///    operation is still in flight, and can be polled again.
    ///  - [`Stopped`](crate::TransportError::Stopped), [`Closed`](crate::TransportError::Closed): it
    ///    was ended by force, and may or may not have been carried out.
    #[inline]
    pub fn poll(&mut self) -> Option<TransportResult<WorkSuccess>> {
        if self.slot.state().is_outstanding() {
            let settled = self.core.settle();
            if self.slot.state().is_outstanding() {
                return settled.err().map(Err);
            }
        }
        Some(self.seen())
    }

    fn seen(&mut self) -> TransportResult<WorkSuccess> {
        if self.slot.state() == State::Done {
            self.slot.set_state(State::Seen);
        }
        self.core.result(self.slot)
    }

    /// Polls until the operation has ended, however long that takes.
    ///
    /// # Errors
    ///
    /// Those of [`poll`](Self::poll).
    #[inline]
    pub fn spin_poll(&mut self) -> TransportResult<WorkSuccess> {
        let mut wait = Wait::new(None);
        while self.slot.state().is_outstanding() {
            let settled = self.core.settle();
            if !self.slot.state().is_outstanding() {
                break;
            }
            if !settled? && let Err(error) = self.core.on_empty_poll(&mut wait) {
                self.core.stop();
                let _ = self.seen();
                return Err(error);
            }
        }
        self.seen()
    }

    /// Waits until the operation has ended, however long that takes, and gives the buffer back.
    ///
    /// # Errors
    ///
    /// Those of [`poll`](Self::poll). The buffer then stays borrowed until the scope has ended. After
    /// most errors the channel cannot be used any more: end the scope.
    #[inline(always)]
    pub fn wait(self) -> TransportResult<(B, WorkSuccess)> {
        self.wait_with(None)
    }

    /// Waits until the operation has ended, or the deadline has passed, and gives the buffer back.
    ///
    /// # Errors
    ///
    /// Those of [`wait`](Self::wait), and
    ///
    ///  - [`TimedOut`](crate::TransportError::TimedOut): the channel was stopped, and everything that
    ///    was in flight has ended.
    #[inline]
    pub fn wait_until(self, deadline: Instant) -> TransportResult<(B, WorkSuccess)> {
        self.wait_with(Some(deadline))
    }

    #[inline(always)]
    fn wait_with(self, deadline: Option<Instant>) -> TransportResult<(B, WorkSuccess)> {
        let this = ManuallyDrop::new(self);
        let success = this.core.wait(this.slot, deadline)?;
        // SAFETY: `new` initialised it. It is read once: `this` is not dropped. The completion was seen, so the
        // device no longer uses the memory.
        let mut buffer = unsafe { this.buffer.assume_init_read() };
        success.tell_buffer(&mut buffer);
        Ok((buffer, success))
    }
}

debug! { impl[B: GatherBuffer] ScopedPendingWork<'_, B>, self, state: self.slot.state(), .. }
