//! The shortcut of a wait whose operation completes first.
//!
//! Operations mostly complete in the order of waits. A wait takes its own success straight from the polled completions
//! if it comes next. The others stay in the batch. Everything else goes through [`Core::settle`].

use std::ffi::c_int;
use std::ptr::NonNull;
use std::time::Instant;

use super::polled::{BATCH, count};
use crate::base::ffi;
use crate::channel::core::Core;
use crate::channel::error::{TransportError, TransportResult};
use crate::channel::slot::{Slot, State};
use crate::channel::wait::Wait;
use crate::verbs::completion::WorkSuccess;

impl Core {
    /// This slot's success, if it is there or one poll finds it. The slot is not free yet. After `None`, the caller
    /// goes on with [`settle_rest`](Self::settle_rest).
    #[inline(always)]
    pub(in crate::channel) fn success_now(&self, slot: &Slot) -> Option<NonNull<ffi::ibv_wc>> {
        let (wr_id, batch) = (slot.wr_id(), &self.poller.batch);
        let completion = if !batch.is_empty() {
            let head = batch.head();
            if !self.is_success(head, wr_id) {
                return None;
            }
            // SAFETY: the batch is not empty.
            unsafe { batch.advance_by(1) };
            head
        } else if slot.state() == State::Scoped {
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

    /// Takes the result of a scope's operation and frees the slot. If polling fails, the slot stays abandoned.
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
        self.table.release_scoped(slot);
        // SAFETY: it points to an initialised entry of the batch, or into the slot. Nothing writes to either: one
        // thread at a time uses the core.
        Ok(WorkSuccess::from_raw(unsafe { *completion.as_ptr() }))
    }

    /// Does not free the slot.
    #[cold]
    #[inline(never)]
    fn wait_slow_path(
        &self,
        slot: &Slot,
        deadline: Option<Instant>,
    ) -> TransportResult<NonNull<ffi::ibv_wc>> {
        if let Err(error) = self.wait_for_end(slot, deadline) {
            if slot.state().is_outstanding() {
                slot.set_state(State::Abandoned);
            } else {
                // The result is the time-out, not the flushed completion.
                self.release(slot);
            }
            return Err(error);
        }
        if slot.state().is_done() && slot.has_success() {
            return Ok(slot.completion_pointer());
        }
        let error = self.take_result(slot).err();
        Err(error.unwrap_or(TransportError::UnknownWork))
    }

    /// Goes on after a shortcut, until the slot's operation has ended.
    ///
    /// # Errors
    ///
    /// Polling has failed, and the operation is outstanding; or the wait was in vain, so the channel was stopped, and
    /// nothing is outstanding.
    #[inline(always)]
    pub(in crate::channel) fn wait_for_end(
        &self,
        slot: &Slot,
        deadline: Option<Instant>,
    ) -> TransportResult<()> {
        let mut settled = self.settle_rest();
        let mut wait = Wait::new(deadline);
        // An ended operation keeps its result, even if polling fails.
        while slot.state().is_outstanding() {
            if !settled? {
                self.on_empty_poll(&mut wait).inspect_err(|_| self.stop())?;
            }
            settled = self.settle();
        }
        Ok(())
    }

    pub(in crate::channel) fn settle_rest(&self) -> TransportResult<bool> {
        self.take_rest()?;
        self.settle()
    }

    /// Takes into the batch what a shortcut has left. Returns whether the batch has completions.
    #[inline]
    pub(super) fn take_rest(&self) -> TransportResult<bool> {
        let found = self.poller.rest.take();
        if found != 0 {
            self.poller.batch.keep(0, count(found)?);
        }
        Ok(!self.poller.is_empty())
    }

    /// Polls, and frees slots whose handles were dropped. Returns true if it found only their successes. Otherwise the
    /// rest is for [`settle_rest`](Self::settle_rest).
    #[inline]
    pub(in crate::channel) fn settle_abandoned(&self) -> bool {
        let batch = &self.poller.batch;
        if !batch.is_empty() {
            return false;
        }
        let polled = self.poll_raw(BATCH);
        let found = polled as u32 as usize;
        if !(1..=BATCH).contains(&found) {
            self.poller.rest.set(polled);
            return false;
        }
        // SAFETY: the poll has written `found` entries, and nothing polls meanwhile.
        let completions = unsafe { std::slice::from_raw_parts(batch.entries(), found) };
        let freed = self.release_abandoned(completions);
        if freed < found {
            batch.keep(freed, found);
        }
        freed == found
    }

    /// Returns `None` if this is not a scope's last operation, or there are polled completions.
    #[inline(always)]
    pub(in crate::channel) fn settle_last(&self) -> Option<bool> {
        if !self.table.has_one_in_scope() || !self.poller.is_empty() {
            return None;
        }
        let polled = self.poll_raw(BATCH);
        if polled == 1 {
            // SAFETY: the first entry is initialised, and nothing polls meanwhile.
            let completion = unsafe { &*self.poller.batch.entries() };
            let slot = self.table.slot_of(completion.wr_id);
            if let Some(slot) = slot.filter(|slot| slot.state() == State::Abandoned)
                && self.is_success(completion, slot.wr_id())
            {
                slot.free();
                self.table.count_released_in_scope(1);
                return Some(true);
            }
        }
        self.poller.rest.set(polled);
        Some(false)
    }

    /// Takes this number's success from several completions, if it is the first or the last. Last is common: a program
    /// posts a receive, then a send, and waits for the send. `None`: all is left to [`settle_rest`](Self::settle_rest).
    ///
    /// It calls no function, so the compiler need not save registers.
    #[inline(never)]
    fn take_from_poll(&self, found: c_int, wr_id: u64) -> Option<NonNull<ffi::ibv_wc>> {
        let (batch, polled) = (&self.poller.batch, found);
        let found = found as u32 as usize;
        if !(2..=BATCH).contains(&found) {
            self.poller.rest.set(polled);
            return None;
        }
        let first = batch.entries();
        if self.is_success(first, wr_id) {
            batch.keep(1, found);
            return NonNull::new(first);
        }
        // SAFETY: the poll has written `found` entries, at least 2.
        let last = unsafe { first.add(found - 1) };
        if self.is_success(last, wr_id) {
            batch.keep(0, found - 1);
            return NonNull::new(last);
        }
        self.poller.rest.set(polled);
        None
    }

    /// Polls once for the blocking operation, with nothing else in flight. Its success is then
    /// [there](Self::blocking_success).
    ///
    /// # Errors
    ///
    /// The poll's value, for [`wait_for_blocking`](Self::wait_for_blocking).
    #[inline(always)]
    pub(in crate::channel) fn blocking_now(&self, wr_id: u64) -> Result<(), c_int> {
        let found = self.poll_raw(1);
        if self.found_success(found, wr_id) { Ok(()) } else { Err(found) }
    }

    /// Waits after a poll that returned `found`, or 0 without one. The success is then [there](Self::blocking_success).
    /// If waiting fails, the channel is stopped.
    #[inline(never)]
    pub(in crate::channel) fn wait_for_blocking(
        &self,
        found: c_int,
        deadline: Option<Instant>,
    ) -> TransportResult<()> {
        let slot = self.begin_blocking();
        self.poller.rest.set(found);
        if let Err(error) = self.wait_for_end(slot, deadline) {
            if slot.state().is_outstanding() {
                self.stop();
            }
            self.end_blocking();
            return Err(error);
        }
        let completion = slot.completion();
        self.poller.batch.set_first(*completion.as_raw());
        self.end_blocking();
        Ok(completion.result().map(drop)?)
    }

    #[inline(always)]
    pub(in crate::channel) fn blocking_success(&self) -> WorkSuccess {
        // SAFETY: the entry is initialised, and no poll writes to it: one thread at a time uses the core.
        WorkSuccess::from_raw(unsafe { *self.poller.batch.entries() })
    }

    pub(in crate::channel) fn begin_blocking(&self) -> &Slot {
        let slot = self.table.blocking();
        slot.set_state(State::Unscoped);
        slot
    }

    pub(in crate::channel) fn end_blocking(&self) {
        let slot = self.table.blocking();
        slot.set_state(State::Seen);
        slot.renumber();
        self.blocking_id.set(slot.wr_id());
        self.update_fast_path();
    }

    #[inline(always)]
    fn found_success(&self, found: c_int, wr_id: u64) -> bool {
        found == 1 && self.is_success(self.poller.batch.entries(), wr_id)
    }

    #[inline(always)]
    fn is_success(&self, completion: *const ffi::ibv_wc, wr_id: u64) -> bool {
        // SAFETY: it points to an initialised entry, and no poll writes to it: one thread at a time uses the core.
        let completion = unsafe { &*completion };
        // Success is 0, so one comparison finds a wrong queue pair or a failure.
        const { assert!(ffi::ibv_wc_status::IBV_WC_SUCCESS.0 == 0) };
        completion.wr_id == wr_id && (completion.qp_num ^ self.number) | completion.status.0 == 0
    }
}
