//! The shortcut of a wait whose operation completes first.
//!
//! Operations mostly complete in the order of waits. A wait takes its own success straight from the polled completions
//! if it comes next. The others stay in the batch. Everything else goes through [`Core::settle`].

use std::cell::Cell;
use std::ffi::c_int;
use std::ptr::NonNull;
use std::time::Instant;

use super::count;
use crate::base::ffi;
use crate::channel::core::Core;
use crate::channel::error::{TransportError, TransportResult};
use crate::channel::slot::{Owner, Slot, State};
use crate::channel::wait::Wait;
use crate::verbs::completion::WorkSuccess;

impl Core {
    /// This slot's success, if it is there or one poll finds it. The slot is not free yet. After `None`, the caller
    /// goes on with [`settle_rest`](Self::settle_rest).
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
        self.table.release_of(slot, Owner::Scope);
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
        if matches!(slot.state(), State::Done(_) | State::Seen) && slot.has_success() {
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
        let found = self.sink.rest.take();
        if found != 0 {
            self.sink.batch.keep(0, count(found)?);
        }
        Ok(!self.sink.is_empty())
    }

    /// Polls, and frees slots whose handles were dropped. Returns true if it found only their successes. Otherwise the
    /// rest is for [`settle_rest`](Self::settle_rest).
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

    /// Takes this number's success from several completions, if it is the first or the last. Last is common: a program
    /// posts a receive, then a send, and waits for the send. `None`: all is left to [`settle_rest`](Self::settle_rest).
    ///
    /// It calls no function, so the compiler need not save registers.
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
        // SAFETY: the poll has written `found` entries, at least 2.
        let last = unsafe { first.add(found - 1) };
        if self.is_success(last, wr_id) {
            batch.keep(0, found - 1);
            return NonNull::new(last);
        }
        self.sink.rest.set(polled);
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
        self.sink.rest.set(found);
        if let Err(error) = self.wait_for_end(slot, deadline) {
            if slot.state().is_outstanding() {
                self.stop();
            }
            self.end_blocking();
            return Err(error);
        }
        let completion = slot.completion();
        self.sink.batch.set_first(*completion.as_raw());
        self.end_blocking();
        Ok(completion.result().map(drop)?)
    }

    #[inline(always)]
    pub(in crate::channel) fn blocking_success(&self) -> WorkSuccess {
        // SAFETY: the entry is initialised, and no poll writes to it: one thread at a time uses the core.
        WorkSuccess::from_raw(unsafe { *self.sink.batch.entries() })
    }

    pub(in crate::channel) fn begin_blocking(&self) -> &Slot {
        let slot = self.table.blocking();
        slot.set_state(State::InFlight(Owner::Channel));
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
        found == 1 && self.is_success(self.sink.batch.entries(), wr_id)
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

pub(crate) const BATCH: usize = 16;

/// `poll_cq` in `struct ibv_context_ops`.
pub(crate) type PollCq = unsafe extern "C" fn(*mut ffi::ibv_cq, c_int, *mut ffi::ibv_wc) -> c_int;

/// The last poll's completions.
///
/// A provider may leave fields unwritten, so all entries are initialised at the start. No reference to one exists while
/// a poll writes.
pub(crate) struct Polled {
    /// `BATCH` entries, which it owns.
    entries: NonNull<ffi::ibv_wc>,
    /// The first that was not taken, or `end`.
    next: Cell<NonNull<ffi::ibv_wc>>,
    end: Cell<NonNull<ffi::ibv_wc>>,
}

impl Polled {
    pub(crate) fn new() -> Self {
        let entries = Box::new([ffi::ibv_wc::default(); BATCH]);
        let entries = NonNull::from(Box::leak(entries)).cast();
        Self { entries, next: Cell::new(entries), end: Cell::new(entries) }
    }

    #[inline]
    pub(crate) fn entries(&self) -> *mut ffi::ibv_wc {
        self.entries.as_ptr()
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.next.get() == self.end.get()
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        // SAFETY: both point into the entries or to their end, and `next` is never behind `end`.
        unsafe { self.end.get().offset_from_unsigned(self.next.get()) }
    }

    #[inline]
    pub(crate) fn head(&self) -> *const ffi::ibv_wc {
        self.next.get().as_ptr()
    }

    /// Returns the completions that were not taken.
    ///
    /// # Safety
    ///
    /// Nothing writes to the entries while the reference exists.
    #[inline]
    pub(in crate::channel) unsafe fn rest(&self) -> &[ffi::ibv_wc] {
        // SAFETY: the entries from `next` to `end` are initialised. The caller guarantees that nothing writes to them.
        unsafe { std::slice::from_raw_parts(self.head(), self.len()) }
    }

    /// Takes completions.
    ///
    /// # Safety
    ///
    /// The batch has as many.
    #[inline]
    pub(crate) unsafe fn advance_by(&self, count: usize) {
        // SAFETY: the caller guarantees that the batch has as many, so this is at most `end`.
        self.next.set(unsafe { self.next.get().add(count) });
    }

    /// Keeps these entries, which a poll has written.
    #[inline]
    pub(crate) fn keep(&self, first: usize, end: usize) {
        assert!(first <= end && end <= BATCH);
        // SAFETY: both are at most `BATCH`, as asserted.
        unsafe {
            self.next.set(self.entries.add(first));
            self.end.set(self.entries.add(end));
        }
    }

    /// Overwrites the first entry, which was taken.
    pub(in crate::channel) fn set_first(&self, completion: ffi::ibv_wc) {
        debug_assert!(self.is_empty() || self.next.get() != self.entries);
        // SAFETY: it points to an entry, and no reference to one exists.
        unsafe { self.entries().write(completion) };
    }
}

impl Drop for Polled {
    fn drop(&mut self) {
        // SAFETY: `new` made it from a box of this type, and nothing uses the entries any more.
        drop(unsafe { Box::from_raw(self.entries.as_ptr().cast::<[ffi::ibv_wc; BATCH]>()) });
    }
}

// SAFETY: the batch owns the entries, and nothing in them is tied to a thread.
unsafe impl Send for Polled {}
