//! Polling for completions, and matching each with its operation.

use std::ffi::c_int;
use std::task::Waker;

use super::batch::BATCH;
use super::core::Core;
use super::credits::CREDITS;
use super::error::{TransportError, TransportResult};
use super::in_flight::BLOCKING;
use super::slot::{Owner, Slot, State};
use super::wait::Wait;
use crate::completion::{WorkCompletion, WorkSuccess};
use crate::ffi;

impl Core {
    /// Polls at most `most` completions into the batch, which must be empty. Returns what the verb
    /// returned. The batch is still empty after that: see [`fill`](Self::fill).
    #[inline(always)]
    pub(super) fn poll_raw(&self, most: usize) -> c_int {
        debug_assert!(self.batch.is_empty() && most <= BATCH);
        // SAFETY: what is polled is live: it is a parent of the queue pair, or part of the core. Only the
        // channel polls, which holds both; a handle that outlives it finds that out before it polls. There is
        // room for `most` completions, and no reference to them: a function of the core that makes one
        // drops it before it polls or returns, and one thread at a time uses the core.
        unsafe { self.poll_cq.get()(self.polled.get(), most as c_int, self.batch.entries()) }
    }

    /// Whether a poll found exactly one completion: that of the request with this number, with status
    /// success.
    #[inline(always)]
    pub(super) fn found_success(&self, found: c_int, wr_id: u64) -> bool {
        found == 1 && self.is_success(self.batch.entries(), wr_id)
    }

    /// Whether an entry of the batch is the completion of the request with this number, with status
    /// success.
    #[inline(always)]
    pub(super) fn is_success(&self, completion: *const ffi::ibv_wc, wr_id: u64) -> bool {
        // SAFETY: it points to an entry, which is initialised; for the rest see `poll_raw`.
        let completion = unsafe { &*completion };
        // The status of a success is 0, so one comparison finds a wrong queue pair and a failure.
        const { assert!(ffi::ibv_wc_status::IBV_WC_SUCCESS.0 == 0) };
        completion.wr_id == wr_id && (completion.qp_num ^ self.number) | completion.status.0 == 0
    }

    /// The first entry of the batch, whose status is success.
    #[inline(always)]
    pub(super) fn first_success(&self) -> WorkSuccess {
        // SAFETY: the entry is initialised; for the rest see `poll_raw`.
        WorkSuccess::from_raw(unsafe { *self.batch.entries() })
    }

    /// Puts the completions that a poll found into the batch. Returns whether there are any. A poll that
    /// failed completes nothing.
    #[inline]
    pub(super) fn fill(&self, found: c_int) -> TransportResult<bool> {
        match usize::try_from(found) {
            Ok(found) if found <= BATCH => {
                self.batch.set_len(found);
                Ok(found > 0)
            }
            _ => Err(poll_failed(found)),
        }
    }

    /// Takes the next completion, if there is one.
    #[inline]
    pub(super) fn poll(&self) -> TransportResult<Option<WorkCompletion>> {
        if self.batch.is_empty() && !self.fill(self.poll_raw(BATCH))? {
            return Ok(None);
        }
        // SAFETY: the entry is initialised; for the rest see `poll_raw`.
        let completion = unsafe { *self.batch.head() };
        // SAFETY: the batch is not empty.
        unsafe { self.batch.advance() };
        Ok(Some(completion.into()))
    }

    /// Whether `completion` is that of the request with this number.
    #[inline]
    pub(super) fn is_completion_of(&self, completion: &WorkCompletion, wr_id: u64) -> bool {
        completion.wr_id() == wr_id && completion.queue_pair_number() == self.number
    }

    /// Takes the first completion of the batch and dispatches it.
    ///
    /// # Safety
    ///
    /// The batch is not empty.
    #[inline]
    pub(super) unsafe fn dispatch_head(&self) -> TransportResult<()> {
        // SAFETY: the entry is initialised; for the rest see `poll_raw`.
        let completion = unsafe { &*self.batch.head() };
        // SAFETY: the caller has found the batch not to be empty.
        unsafe { self.batch.advance() };
        if let Some(slot) = self.slot_of_completion(completion) {
            match slot.state() {
                State::InFlight(Owner::Scope | Owner::Token | Owner::Handle) => {
                    slot.complete_for_owner(completion);
                    return Ok(());
                }
                State::InFlight(Owner::Task) => {
                    slot.complete(Owner::Task, completion);
                    self.table.owned.wake(&slot.entry);
                    return Ok(());
                }
                _ => {}
            }
        }
        self.dispatch(&(*completion).into()).map(drop)
    }

    /// Dispatches a completion that was polled for this channel. Returns the waker of its task, if that is all that
    /// has to be woken.
    #[inline]
    pub(super) fn complete_task(&self, completion: &ffi::ibv_wc) -> TransportResult<Option<Waker>> {
        if let Some(slot) = self.slot_of_completion(completion)
            && slot.state() == State::InFlight(Owner::Task)
        {
            slot.complete(Owner::Task, completion);
            return Ok(slot.entry.waker.take());
        }
        self.dispatch(&(*completion).into()).map(|_| None)
    }

    /// Ends the operation that a completion belongs to. Returns false for a completion of an earlier
    /// epoch, which is dropped, and for one of a shared receive queue or of the flow control.
    ///
    /// # Errors
    ///
    /// The completion belongs to no operation in flight.
    #[inline(never)]
    pub(super) fn dispatch(&self, completion: &WorkCompletion) -> TransportResult<bool> {
        let wr_id = completion.wr_id();
        let (epoch, index) = ((wr_id >> 32) as u32, wr_id as u32);
        let current = (self.epoch.get() >> 32) as u32;
        let unknown =
            TransportError::UnknownCompletion { queue_pair: completion.queue_pair_number(), wr_id };
        if epoch != current {
            if let Some((receives, _)) = &self.receives
                && receives.owns(wr_id)
            {
                return if self.take_message(completion) { Ok(false) } else { Err(unknown) };
            }
            // The counter may wrap around between the two.
            let age = current.wrapping_sub(epoch);
            let oldest = current.wrapping_sub(self.first_epoch);
            // It may name a queue pair that the channel had before a reset.
            return if age <= oldest { Ok(false) } else { Err(unknown) };
        }
        if completion.queue_pair_number() != self.number {
            return Err(unknown);
        }
        let slot = self.table.slot(index as usize);
        match slot.map(|slot| (slot, slot.state())) {
            Some((slot, State::InFlight(Owner::Nobody))) => {
                slot.entry.buffer.clear();
                self.release(slot);
            }
            Some((slot, State::InFlight(owner))) => {
                slot.complete(owner, completion.as_raw());
                match owner {
                    Owner::OwnToken => self.table.push_ended(slot),
                    Owner::Task => self.table.owned.wake(&slot.entry),
                    _ => {}
                }
            }
            Some((slot, State::Abandoned)) => {
                self.unreported.unpolled.set(true);
                if let Err(error) = completion.result() {
                    self.record_unreported(error.into());
                }
                self.release(slot);
            }
            None if index == BLOCKING && self.blocking.replace(false) => {}
            // It is not counted among the operations in flight.
            None if index == CREDITS && self.take_credits(completion) => return Ok(false),
            _ => return Err(unknown),
        }
        Ok(true)
    }

    /// Stores the completion of a receive of the shared queue, for whoever asks for messages. Returns false if it
    /// is not such a completion.
    pub(super) fn take_message(&self, completion: &WorkCompletion) -> bool {
        let Some((receives, member)) = &self.receives else { return false };
        // It may name a queue pair that the channel had before a reset.
        let ours = completion.queue_pair_number() == self.number;
        receives.owns(completion.wr_id())
            && receives.complete(ours.then_some(*member), completion.as_raw())
    }

    /// Keeps the first failure of an operation whose handle was dropped, for the end of the scope.
    #[cold]
    pub(super) fn record_unreported(&self, error: TransportError) {
        if self.unreported.error.get().is_none() {
            self.unreported.error.set(Some(error));
        }
    }

    /// To be called after each poll of a wait that found nothing: see [`Wait::on_empty_poll`].
    #[inline]
    pub(super) fn on_empty_poll(&self, wait: &mut Wait) -> TransportResult<()> {
        let cancel = self.cancel.get().map(|cancel| &**cancel);
        wait.on_empty_poll(self.sleep.as_ref(), cancel, || self.check_device())
    }

    /// Dispatches the next completion, if there is one. Returns whether there was one.
    #[inline]
    pub(super) fn progress(&self) -> TransportResult<bool> {
        if self.batch.is_empty() && !self.fill(self.poll_raw(BATCH))? {
            return Ok(false);
        }
        // SAFETY: the batch is not empty.
        unsafe { self.dispatch_head() }.map(|()| true)
    }

    /// To be called at the end of a wait for something else than tokens. Of a shared completion queue, the wait may have
    /// polled results that are known by tokens: the queue returns the channel for them.
    #[inline]
    pub(super) fn tell_results(&self) {
        if self.router.is_some() {
            self.tell_results_to_router();
        }
    }

    #[inline(never)]
    fn tell_results_to_router(&self) {
        let is_known = |head: *const ffi::ibv_wc| {
            // SAFETY: the entry is initialised; for the rest see `poll_raw`.
            let slot = self.slot_of_completion(unsafe { &*head });
            slot.is_some_and(|slot| slot.state().is_outstanding())
        };
        while !self.batch.is_empty() && is_known(self.batch.head()) {
            // SAFETY: the batch is not empty.
            let _ = unsafe { self.dispatch_head() };
        }
        // Of an unknown completion, the next poll of the program tells.
        if (self.table.any_ended() || !self.batch.is_empty())
            && let Some((router, inbox)) = &self.router
            && !self.has_told_results.replace(true)
        {
            router.set_has_results(inbox, true);
        }
    }

    /// To be called when no operation that is known by a token has ended.
    #[inline]
    pub(super) fn tell_no_results(&self) {
        if self.has_told_results.replace(false)
            && let Some((router, inbox)) = &self.router
        {
            router.set_has_results(inbox, false);
        }
    }

    /// Polls into the batch, which must be empty. Returns whether there is something.
    #[inline]
    pub(super) fn poll_batch(&self) -> TransportResult<bool> {
        self.fill(self.poll_raw(BATCH))
    }

    /// Dispatches all completions of the batch. Those of operations whose handles were dropped, and that are successes,
    /// only free their slots.
    pub(super) fn dispatch_batch(&self) -> TransportResult<()> {
        while !self.batch.is_empty() {
            // SAFETY: nothing polls meanwhile. Of those in the batch, as many are taken as are freed.
            unsafe { self.batch.advance_by(self.release_abandoned(self.batch.rest())) };
            if !self.batch.is_empty() {
                // SAFETY: the batch is not empty.
                unsafe { self.dispatch_head() }?;
            }
        }
        Ok(())
    }

    /// Polls while operations of a scope are in flight, and polls find completions of those whose handles were dropped,
    /// and that are successes: these only free their slots. The first other completion, and what comes after it, is left
    /// in the batch.
    #[inline]
    pub(super) fn poll_abandoned(&self) -> TransportResult<()> {
        while self.table.any_in_scope() && self.batch.is_empty() {
            let found = self.poll_raw(BATCH);
            check_poll(found)?;
            // SAFETY: they are initialised, and nothing polls meanwhile.
            let completions =
                unsafe { std::slice::from_raw_parts(self.batch.entries(), found as usize) };
            let freed = self.release_abandoned(completions);
            if freed < completions.len() {
                self.batch.set_len(found as usize);
                // SAFETY: there are more.
                unsafe { self.batch.advance_by(freed) };
            } else if found == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Frees the slots of operations whose handles were dropped, and whose completions are successes. Returns the number
    /// of these at the beginning of `completions`.
    ///
    /// It calls no function, so that the compiler keeps everything in registers.
    #[inline(never)]
    fn release_abandoned(&self, completions: &[ffi::ibv_wc]) -> usize {
        const { assert!(ffi::ibv_wc_status::IBV_WC_SUCCESS.0 == 0) };
        // Read once: the compiler takes them for changed by each write to a slot.
        let (number, epoch, slots) = (self.number, self.epoch.get(), self.table.slots());
        let free = |completion: &ffi::ibv_wc| {
            // As `slot_of_completion`.
            let index = completion.wr_id.wrapping_sub(epoch) as usize;
            let is_free = index < slots.len()
                && slots[index].state() == State::Abandoned
                && (completion.qp_num ^ number) | completion.status.0 == 0;
            if is_free {
                slots[index].set_state(State::Free);
            }
            is_free
        };
        let mut rest = completions;
        while let [completion, others @ ..] = rest
            && free(completion)
        {
            rest = others;
        }
        let freed = completions.len() - rest.len();
        self.table.count_released_in_scope(freed);
        freed
    }

    /// As [`progress`](Self::progress), for all that is in the inbox of a channel with a shared completion queue,
    /// which is not polled.
    pub(super) fn progress_inbox(&self) -> TransportResult<()> {
        let Some((router, inbox)) = &self.router else {
            while self.progress()? {}
            return Ok(());
        };
        let mut last = false;
        loop {
            while !self.batch.is_empty() {
                // SAFETY: the batch is not empty.
                unsafe { self.dispatch_head() }?;
            }
            if last {
                return Ok(());
            }
            // SAFETY: there are `BATCH` initialised entries. No reference to one is held, as in `poll_raw`, and
            // this one is not used after the call.
            let out = unsafe { std::slice::from_raw_parts_mut(self.batch.entries(), BATCH) };
            let taken = router.take(inbox, out);
            self.fill(taken)?;
            last = taken < BATCH as c_int;
        }
    }

    /// The slot of a completion, if the operation is in flight and only its owner needs to learn that it has
    /// ended.
    #[inline(always)]
    pub(super) fn slot_in_flight(&self, completion: &ffi::ibv_wc) -> Option<&Slot> {
        let slot = self.slot_of_completion(completion)?;
        match slot.state() {
            State::InFlight(Owner::Scope | Owner::Token | Owner::Handle) => Some(slot),
            _ => None,
        }
    }

    /// The slot of a completion of the current epoch, in whatever state.
    #[inline(always)]
    fn slot_of_completion(&self, completion: &ffi::ibv_wc) -> Option<&Slot> {
        if completion.qp_num != self.number {
            return None;
        }
        // Out of range if the completion is of another epoch.
        let index = completion.wr_id.wrapping_sub(self.epoch.get());
        self.table.slot(usize::try_from(index).ok()?)
    }
}

/// Fails if a poll that returned `found` has failed.
#[inline]
pub(super) fn check_poll(found: c_int) -> TransportResult<()> {
    if (0..=BATCH as c_int).contains(&found) { Ok(()) } else { Err(poll_failed(found)) }
}

#[cold]
fn poll_failed(found: c_int) -> TransportError {
    // More completions than there was room for: the provider is broken.
    let found = if found > 0 { -libc::EIO } else { found };
    ffi::failed("ibv_poll_cq", found).into()
}
