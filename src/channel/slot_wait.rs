//! Waiting for the operation in a slot, and its result.

use std::ffi::c_int;
use std::ptr::NonNull;
use std::time::Instant;

use super::batch::BATCH;
use super::completions::check_poll;
use super::core::Core;
use super::error::{TransportError, TransportResult};
use super::slot::{Owner, Slot, State};
use super::wait::Wait;
use crate::completion::WorkSuccess;
use crate::ffi;

impl Core {
    /// Waits until the operation in this slot has ended, takes its result and frees the slot. If polling
    /// fails, the slot is left abandoned.
    #[inline(always)]
    pub(super) fn wait(
        &self,
        slot: &Slot,
        deadline: Option<Instant>,
    ) -> TransportResult<WorkSuccess> {
        let wr_id = slot.wr_id();
        let completion = if !self.batch.is_empty() {
            let head = self.batch.head();
            if self.is_success(head, wr_id) {
                // SAFETY: the batch is not empty.
                unsafe { self.batch.advance() };
                head
            } else {
                self.wait_slow_path(slot, 0, deadline)?
            }
        } else if matches!(slot.state(), State::InFlight(_)) {
            let found = self.poll_raw(BATCH);
            if self.found_success(found, wr_id) {
                self.batch.entries()
            } else {
                match self.take_from_poll(found, wr_id) {
                    Some(completion) => completion.as_ptr(),
                    None => self.wait_slow_path(slot, found, deadline)?,
                }
            }
        } else if matches!(slot.state(), State::Done(_)) {
            self.success_of(slot)?
        } else {
            self.wait_slow_path(slot, 0, deadline)?
        };
        self.table.release_of(slot, Owner::Scope);
        // SAFETY: it points to an entry of the batch or into the slot, and is initialised; for the rest
        // see `poll_raw`.
        Ok(WorkSuccess::from_raw(unsafe { *completion }))
    }

    /// As the beginning of [`wait`](Self::wait): the completion of the operation in this slot, if it is a success that is
    /// there or is found by one poll. The slot is not free yet.
    ///
    /// # Errors
    ///
    /// What the poll returned, or 0 if there was none. If that is positive, the batch has the completions.
    #[inline(always)]
    pub(super) fn success_now(&self, slot: &Slot) -> Result<NonNull<ffi::ibv_wc>, c_int> {
        let wr_id = slot.wr_id();
        let completion = if !self.batch.is_empty() {
            let head = self.batch.head();
            if !self.is_success(head, wr_id) {
                return Err(0);
            }
            // SAFETY: the batch is not empty.
            unsafe { self.batch.advance() };
            head
        } else if matches!(slot.state(), State::InFlight(_)) {
            let found = self.poll_raw(BATCH);
            if !self.found_success(found, wr_id) {
                return self.take_from_poll(found, wr_id).ok_or(found);
            }
            self.batch.entries()
        } else if slot.is_success() {
            return Ok(slot.completion_pointer());
        } else {
            return Err(0);
        };
        NonNull::new(completion.cast_mut()).ok_or(0)
    }

    /// The common case of a poll that found several completions: puts them into the batch, and takes the one
    /// with this number. If that is the first or the last, the others stay in the batch: of a receive and the send
    /// that was posted after it, whose completion is waited for first, each is then taken by its own wait.
    /// Otherwise those that come before it are dispatched.
    ///
    /// Returns `None` in every other case: the poll failed, or the batch does not hold a success with the number,
    /// or it holds an unknown completion before it.
    ///
    /// It calls no function, so that the compiler need not save any registers.
    #[inline(never)]
    fn take_from_poll(&self, found: c_int, wr_id: u64) -> Option<NonNull<ffi::ibv_wc>> {
        if found <= 0 || found > BATCH as c_int {
            return None;
        }
        self.batch.set_len(found as usize);
        let head = self.batch.head();
        if self.is_success(head, wr_id) {
            // SAFETY: the batch is not empty.
            unsafe { self.batch.advance() };
            return NonNull::new(head.cast_mut());
        }
        // SAFETY: the batch is not empty.
        let last = unsafe { self.batch.last() };
        if self.is_success(last, wr_id) {
            // SAFETY: the batch is not empty.
            unsafe { self.batch.shorten() };
            return NonNull::new(last.cast_mut());
        }
        while !self.batch.is_empty() {
            let head = self.batch.head();
            let taken = self.is_success(head, wr_id);
            if !taken {
                // SAFETY: the entry is initialised; for the rest see `poll_raw`.
                let completion = unsafe { &*head };
                self.slot_in_flight(completion)?.complete_for_owner(completion);
            }
            // SAFETY: the batch is not empty.
            unsafe { self.batch.advance() };
            if taken {
                return NonNull::new(head.cast_mut());
            }
        }
        None
    }

    /// The rest of `wait`, after a poll that returned `found`, or 0 if there was none. If `found` is
    /// positive, the batch has the completions already. Returns a pointer
    /// to the operation's completion, which is a success: into the batch or the slot. The slot is not
    /// free yet.
    #[cold]
    #[inline(never)]
    fn wait_slow_path(
        &self,
        slot: &Slot,
        found: c_int,
        deadline: Option<Instant>,
    ) -> TransportResult<*const ffi::ibv_wc> {
        if let Err(error) = check_poll(found) {
            return Err(self.abandon(slot, error));
        }
        loop {
            while !self.batch.is_empty() {
                let head = self.batch.head();
                if self.is_success(head, slot.wr_id()) {
                    // SAFETY: the batch is not empty.
                    unsafe { self.batch.advance() };
                    return Ok(head);
                }
                if !slot.state().is_outstanding() {
                    return self.success_of(slot);
                }
                // SAFETY: the batch is not empty.
                if let Err(error) = unsafe { self.dispatch_head() } {
                    return Err(self.abandon(slot, error));
                }
            }
            // An operation that has ended has its result, even if polling would fail.
            if !slot.state().is_outstanding() {
                return self.success_of(slot);
            }
            match self.fill(self.poll_raw(BATCH)) {
                Ok(true) => {}
                Ok(false) => self.wait_for_batch(slot, deadline)?,
                Err(error) => return Err(self.abandon(slot, error)),
            }
        }
    }

    /// Polls until the batch is not empty.
    ///
    /// # Errors
    ///
    /// If the deadline has passed, the channel is stopped and the slot is freed. If polling fails, the
    /// slot is left abandoned.
    #[cold]
    fn wait_for_batch(&self, slot: &Slot, deadline: Option<Instant>) -> TransportResult<()> {
        let mut wait = Wait::new(deadline);
        loop {
            if let Err(error) = self.on_empty_poll(&mut wait) {
                // The result is the time-out, whatever the flushed completion says.
                self.stop();
                self.release(slot);
                return Err(error);
            }
            match self.fill(self.poll_raw(BATCH)) {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(error) => return Err(self.abandon(slot, error)),
            }
        }
    }

    /// Leaves an operation in flight that cannot be waited for.
    #[cold]
    fn abandon(&self, slot: &Slot, error: TransportError) -> TransportError {
        slot.set_state(State::Abandoned);
        error
    }

    /// A pointer to the completion of an operation that has ended, if it is a success. If not, the slot
    /// is freed.
    #[inline]
    fn success_of(&self, slot: &Slot) -> TransportResult<*const ffi::ibv_wc> {
        if matches!(slot.state(), State::Done(_) | State::Seen) && slot.has_success() {
            return Ok(slot.completion_pointer().as_ptr());
        }
        let error = self.take_result(slot).err();
        Err(error.unwrap_or(TransportError::UnknownWork))
    }

    /// The error of an operation without a completion: the queue pair was destroyed or reset.
    pub(super) fn ended_by_force(&self) -> TransportError {
        if self.destroyed.get() { TransportError::Closed } else { TransportError::Stopped }
    }

    /// Takes the result of an operation that has ended, and frees its slot.
    pub(super) fn take_result(&self, slot: &Slot) -> TransportResult<WorkSuccess> {
        let result = self.result(slot);
        self.release(slot);
        result
    }

    /// The result of an operation that has ended.
    pub(super) fn result(&self, slot: &Slot) -> TransportResult<WorkSuccess> {
        match slot.state() {
            State::Done(_) | State::Seen => Ok(slot.completion().result()?),
            State::Discarded(_) => Err(self.ended_by_force()),
            _ => Err(TransportError::UnknownWork),
        }
    }
}
