//! The shortcut of a wait whose completion is found first.
//!
//! Operations mostly complete in the order in which they are waited for. So a wait looks first at the completion that
//! comes next, of those that were polled, and takes it if it is a success of its own operation: it is not stored in
//! the slot first. What is then left stays where it was polled to, for the next wait. Everything else takes the way
//! of [`Core::settle`].

use std::cell::Cell;
use std::ffi::c_int;
use std::ptr::NonNull;
use std::time::Instant;

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

    /// The slow part of `wait`. Returns the completion, which is a success. The slot is not free yet.
    #[cold]
    #[inline(never)]
    fn wait_slow_path(
        &self,
        slot: &Slot,
        deadline: Option<Instant>,
    ) -> TransportResult<NonNull<ffi::ibv_wc>> {
        let mut settled = self.settle_rest();
        let mut wait = Wait::new(deadline);
        // An operation that has ended keeps its result, even if polling fails now.
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

    /// As [`settle`](Self::settle), but first handles what the last poll found, if a shortcut has left it.
    pub(in crate::channel) fn settle_rest(&self) -> TransportResult<bool> {
        self.take_rest()?;
        self.settle()
    }

    /// Puts the completions that a shortcut has left into the batch. Returns whether there are any.
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
    /// The value that the poll returned, for [`wait_for_blocking`](Self::wait_for_blocking).
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

/// The most completions that are polled at a time.
pub(in crate::channel) const BATCH: usize = 16;

/// `poll_cq` in `struct ibv_context_ops`.
pub(in crate::channel) type PollCq =
    unsafe extern "C" fn(*mut ffi::ibv_cq, c_int, *mut ffi::ibv_wc) -> c_int;

/// See the [module](self).
///
/// The entries are initialised once, because a provider need not write the fields that a completion
/// leaves undefined. They are only accessed through pointers and short-lived references, none of which
/// is held while a poll writes to them.
pub(in crate::channel) struct Polled {
    /// Owned: `BATCH` completions.
    entries: NonNull<ffi::ibv_wc>,
    /// The first completion that was not taken yet. It points to an entry, or is `end`.
    next: Cell<NonNull<ffi::ibv_wc>>,
    /// The end of the completions that were polled and are not taken. It points to an entry or to the end of the
    /// entries.
    end: Cell<NonNull<ffi::ibv_wc>>,
}

impl Polled {
    pub(in crate::channel) fn new() -> Self {
        let entries = Box::new([ffi::ibv_wc::default(); BATCH]);
        let entries = NonNull::from(Box::leak(entries)).cast();
        Self { entries, next: Cell::new(entries), end: Cell::new(entries) }
    }

    /// A pointer to the first of the `BATCH` entries.
    #[inline]
    pub(in crate::channel) fn entries(&self) -> *mut ffi::ibv_wc {
        self.entries.as_ptr()
    }

    /// Whether all completions were taken.
    #[inline]
    pub(in crate::channel) fn is_empty(&self) -> bool {
        self.next.get() == self.end.get()
    }

    /// How many completions were not taken yet.
    #[inline]
    pub(in crate::channel) fn len(&self) -> usize {
        // SAFETY: both point to entries, or to their end, and `next` is not behind `end`.
        unsafe { self.end.get().offset_from_unsigned(self.next.get()) }
    }

    /// A pointer to the first completion that was not taken yet, if the batch is not empty. In any case
    /// it points into the entries or to their end.
    #[inline]
    pub(in crate::channel) fn head(&self) -> *const ffi::ibv_wc {
        self.next.get().as_ptr()
    }

    /// The completions that were not taken yet.
    ///
    /// # Safety
    ///
    /// Nothing writes to the entries while the reference exists.
    #[inline]
    pub(in crate::channel) unsafe fn rest(&self) -> &[ffi::ibv_wc] {
        // SAFETY: from `next` to `end` there are initialised entries; the caller vouches for the rest.
        unsafe { std::slice::from_raw_parts(self.head(), self.len()) }
    }

    /// Marks this number of completions as taken.
    ///
    /// # Safety
    ///
    /// The batch has as many.
    #[inline]
    pub(in crate::channel) unsafe fn advance_by(&self, count: usize) {
        // SAFETY: the caller vouches for it.
        self.next.set(unsafe { self.next.get().add(count) });
    }

    /// From now on, the entries from `first` to `end`, which a poll has written, are those that were not taken.
    #[inline]
    pub(in crate::channel) fn keep(&self, first: usize, end: usize) {
        assert!(first <= end && end <= BATCH);
        // SAFETY: both are at most the number of entries.
        unsafe {
            self.next.set(self.entries.add(first));
            self.end.set(self.entries.add(end));
        }
    }

    /// Overwrites the first entry, which was taken.
    pub(in crate::channel) fn set_first(&self, completion: ffi::ibv_wc) {
        debug_assert!(self.is_empty() || self.next.get() != self.entries);
        // SAFETY: it points to an entry, and no reference to one is held.
        unsafe { self.entries().write(completion) };
    }
}

impl Drop for Polled {
    fn drop(&mut self) {
        // SAFETY: it came from a box of this type, in `new`, and nothing uses the entries any more.
        drop(unsafe { Box::from_raw(self.entries.as_ptr().cast::<[ffi::ibv_wc; BATCH]>()) });
    }
}

// SAFETY: the entries are owned, and nothing in them is tied to a thread.
unsafe impl Send for Polled {}
