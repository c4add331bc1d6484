//! The shortcut of a wait whose completion is found first.
//!
//! Operations mostly complete in the order in which they are waited for. So a wait looks first at the completion that
//! comes next, of those that were polled, and takes it if it is a success of its own operation: it is not stored in
//! the slot first. What is then left stays where it was polled to, for the next wait. Everything else takes the way
//! of [`Core::settle`].

use std::ffi::c_int;
use std::ptr::NonNull;
use std::time::Instant;

use super::BATCH;
use crate::channel::core::Core;
use crate::channel::error::{TransportError, TransportResult};
use crate::channel::slot::{Owner, Slot, State};
use crate::channel::wait::Wait;
use crate::completion::WorkSuccess;
use crate::ffi;

impl Core {
    /// The completion of the operation in this slot, if it is a success that is there or is found by one poll. The
    /// slot is not free yet. If it is `None`, the caller goes on with [`settle_rest`](Self::settle_rest).
    #[inline(always)]
    pub(in crate::channel) fn success_now(&self, slot: &Slot) -> Option<NonNull<ffi::ibv_wc>> {
        let (wr_id, batch) = (slot.wr_id(), &self.sink.batch);
        let completion = if !batch.is_empty() {
            let head = batch.head();
            if !self.is_success(head, wr_id) {
                return None;
            }
            // SAFETY: the batch is not empty.
            unsafe { batch.advance_by(1) };
            head
        } else if matches!(slot.state(), State::InFlight(_)) {
            let found = self.poll_raw(BATCH);
            if !self.found_success(found, wr_id) {
                return self.take_from_poll(found, wr_id);
            }
            batch.entries()
        } else if slot.is_success() {
            return Some(slot.completion_pointer());
        } else {
            return None;
        };
        NonNull::new(completion.cast_mut())
    }

    /// Waits until the operation of a scope in this slot has ended, takes its result and frees the slot. If polling
    /// fails, the slot is left abandoned.
    #[inline(always)]
    pub(in crate::channel) fn wait(
        &self,
        slot: &Slot,
        deadline: Option<Instant>,
    ) -> TransportResult<WorkSuccess> {
        let completion = match self.success_now(slot) {
            Some(completion) => completion,
            None => self.wait_slow_path(slot, deadline)?,
        };
        self.table.release_of(slot, Owner::Scope);
        // SAFETY: it points to an entry of the batch or into the slot, and is initialised; for the rest
        // see `poll_raw`.
        Ok(WorkSuccess::from_raw(unsafe { *completion.as_ptr() }))
    }

    /// The rest of `wait`. Returns the completion, which is a success. The slot is not free yet.
    #[cold]
    #[inline(never)]
    fn wait_slow_path(
        &self,
        slot: &Slot,
        deadline: Option<Instant>,
    ) -> TransportResult<NonNull<ffi::ibv_wc>> {
        let mut settled = self.settle_rest();
        let mut wait = Wait::new(deadline);
        // An operation that has ended has its result, even if polling would fail.
        while slot.state().is_outstanding() {
            match settled {
                Ok(true) => {}
                Ok(false) => {
                    if let Err(error) = self.on_empty_poll(&mut wait) {
                        // The result is the time-out, whatever the flushed completion says.
                        self.stop();
                        self.release(slot);
                        return Err(error);
                    }
                }
                Err(error) => {
                    slot.set_state(State::Abandoned);
                    return Err(error);
                }
            }
            settled = self.settle();
        }
        if matches!(slot.state(), State::Done(_) | State::Seen) && slot.has_success() {
            return Ok(slot.completion_pointer());
        }
        let error = self.take_result(slot).err();
        Err(error.unwrap_or(TransportError::UnknownWork))
    }

    /// As [`settle`](Self::settle), and handles first what the last poll has found, if a shortcut has left that.
    pub(in crate::channel) fn settle_rest(&self) -> TransportResult<bool> {
        self.take_rest()?;
        self.settle()
    }

    /// Puts into the batch what a shortcut has left. Returns whether the batch has completions.
    #[inline]
    pub(super) fn take_rest(&self) -> TransportResult<bool> {
        let found = self.sink.rest.take();
        if found != 0 {
            self.absorb(found)?;
        }
        Ok(!self.sink.is_empty())
    }

    /// Polls, and frees the slots of operations whose handles were dropped. Returns true if the poll has found successes
    /// of these alone. In every other case it leaves the rest to [`settle_rest`](Self::settle_rest), if there is any: see
    /// [`Sink::has_rest`](super::Sink::has_rest).
    #[inline]
    pub(in crate::channel) fn settle_abandoned(&self) -> bool {
        let batch = &self.sink.batch;
        if !batch.is_empty() {
            return false;
        }
        let polled = self.poll_raw(BATCH);
        let found = polled as u32 as usize;
        if !(1..=BATCH).contains(&found) {
            self.sink.rest.set(polled);
            return false;
        }
        // SAFETY: they are initialised, and nothing polls meanwhile.
        let completions = unsafe { std::slice::from_raw_parts(batch.entries(), found) };
        let freed = self.release_abandoned(completions);
        if freed < found {
            batch.keep(freed, found);
        }
        freed == found
    }

    /// As [`settle_abandoned`](Self::settle_abandoned), if nothing was polled before, and one operation is left of the scope: whether the
    /// poll has found its success, and nothing else.
    #[inline(always)]
    pub(in crate::channel) fn settle_last(&self) -> Option<bool> {
        if !self.table.has_one_in_scope() || !self.sink.is_empty() {
            return None;
        }
        let polled = self.poll_raw(BATCH);
        if polled == 1 {
            // SAFETY: the first entry is initialised, and nothing polls meanwhile.
            let completion = unsafe { &*self.sink.batch.entries() };
            let slot = self.table.slot_of(completion.wr_id);
            if let Some(slot) = slot.filter(|slot| slot.state() == State::Abandoned)
                && self.is_success(completion, slot.wr_id())
            {
                slot.free();
                self.table.count_released_in_scope(1);
                return Some(true);
            }
        }
        self.sink.rest.set(polled);
        Some(false)
    }

    /// The common case of a poll that found several completions. Takes the one with this number, if that is the first
    /// or the last. The others stay in the batch: of a receive and the send that was posted after it, whose completion
    /// is waited for first, each is then taken by its own wait.
    ///
    /// Returns `None`, and leaves the rest to [`settle_rest`](Self::settle_rest), in every other case: the poll failed, or
    /// neither is a success with the number.
    ///
    /// It calls no function, so that the compiler need not save any registers.
    #[inline(never)]
    fn take_from_poll(&self, found: c_int, wr_id: u64) -> Option<NonNull<ffi::ibv_wc>> {
        let (batch, polled) = (&self.sink.batch, found);
        let found = found as u32 as usize;
        if !(2..=BATCH).contains(&found) {
            self.sink.rest.set(polled);
            return None;
        }
        let first = batch.entries();
        if self.is_success(first, wr_id) {
            batch.keep(1, found);
            return NonNull::new(first);
        }
        // SAFETY: there are as many entries.
        let last = unsafe { first.add(found - 1) };
        if self.is_success(last, wr_id) {
            batch.keep(0, found - 1);
            return NonNull::new(last);
        }
        self.sink.rest.set(polled);
        None
    }

    /// Polls for the blocking operation that was just posted under this number, with nothing else in flight. If it finds
    /// the success of the operation, that is [there](Self::blocking_success).
    ///
    /// # Errors
    ///
    /// What the poll returned, for [`wait_for_blocking`](Self::wait_for_blocking).
    #[inline(always)]
    pub(in crate::channel) fn blocking_now(&self, wr_id: u64) -> Result<(), c_int> {
        // One completion is enough.
        let found = self.poll_raw(1);
        if self.found_success(found, wr_id) { Ok(()) } else { Err(found) }
    }

    /// Waits for the blocking operation, after a poll that returned `found`, or 0 if there was none. On success its
    /// completion is [there](Self::blocking_success). If waiting fails, the channel is stopped.
    #[inline(never)]
    pub(in crate::channel) fn wait_for_blocking(
        &self,
        found: c_int,
        deadline: Option<Instant>,
    ) -> TransportResult<()> {
        let slot = self.begin_blocking();
        self.sink.rest.set(found);
        let mut settled = self.settle_rest();
        let mut wait = Wait::new(deadline);
        while slot.state().is_outstanding() {
            let waited = match settled {
                Ok(true) => Ok(()),
                Ok(false) => self.on_empty_poll(&mut wait),
                Err(error) => Err(error),
            };
            if let Err(error) = waited {
                self.stop();
                self.end_blocking();
                return Err(error);
            }
            settled = self.settle();
        }
        let completion = slot.completion();
        self.sink.batch.set_first(*completion.as_raw());
        self.end_blocking();
        Ok(completion.result().map(drop)?)
    }

    /// The success of the blocking operation that has just ended.
    #[inline(always)]
    pub(in crate::channel) fn blocking_success(&self) -> WorkSuccess {
        // SAFETY: the entry is initialised; for the rest see `poll_raw`.
        WorkSuccess::from_raw(unsafe { *self.sink.batch.entries() })
    }

    /// Gives the blocking operation that was posted its slot, where its result goes.
    pub(in crate::channel) fn begin_blocking(&self) -> &Slot {
        let slot = self.table.blocking();
        slot.set_state(State::InFlight(Owner::Channel));
        slot
    }

    /// The blocking operation has ended. The next one has another number.
    pub(in crate::channel) fn end_blocking(&self) {
        let slot = self.table.blocking();
        slot.set_state(State::Seen);
        slot.renumber();
        self.blocking_id.set(slot.wr_id());
        self.update_fast_path();
    }

    /// Whether a poll found exactly one completion: that of the request with this number, with status
    /// success.
    #[inline(always)]
    fn found_success(&self, found: c_int, wr_id: u64) -> bool {
        found == 1 && self.is_success(self.sink.batch.entries(), wr_id)
    }

    /// Whether an entry of the batch is the completion of the request with this number, with status
    /// success.
    #[inline(always)]
    fn is_success(&self, completion: *const ffi::ibv_wc, wr_id: u64) -> bool {
        // SAFETY: it points to an entry, which is initialised; for the rest see `poll_raw`.
        let completion = unsafe { &*completion };
        // The status of a success is 0, so one comparison finds a wrong queue pair and a failure.
        const { assert!(ffi::ibv_wc_status::IBV_WC_SUCCESS.0 == 0) };
        completion.wr_id == wr_id && (completion.qp_num ^ self.number) | completion.status.0 == 0
    }
}
