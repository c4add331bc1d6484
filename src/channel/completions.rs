//! Polling for completions, and matching each with its operation.

use std::ffi::c_int;
use std::time::Instant;

use super::core::Core;
use super::error::{TransportError, TransportResult};
use super::in_flight::{BLOCKING, Slot, State};
use super::wait::Wait;
use crate::completion::{WorkCompletion, WorkError, WorkSuccess};
use crate::ffi;

impl Core {
    /// Polls the next completion, if there is one, into `self.completion`. Returns what the verb
    /// returned.
    #[inline(always)]
    pub(super) fn poll_raw(&self) -> c_int {
        // SAFETY: what is polled is live: it is a parent of the queue pair, or part of the core. There is
        // room for one completion, and no reference to it: a function of the core that makes one drops
        // it before it polls or returns, and one thread at a time uses the core.
        unsafe { self.poll_cq.get()(self.polled.get(), 1, self.completion.get()) }
    }

    /// Whether a poll found the completion of the request with this number, with status success.
    #[inline(always)]
    pub(super) fn is_success(&self, found: c_int, wr_id: u64) -> bool {
        // SAFETY: the completion is initialised; for the rest see `poll_raw`.
        let completion = unsafe { &*self.completion.get() };
        found == 1
            && completion.wr_id == wr_id
            && completion.qp_num == self.number
            && completion.status == ffi::ibv_wc_status::IBV_WC_SUCCESS
    }

    /// The completion that was polled last. Its status is success.
    #[inline(always)]
    pub(super) fn success(&self) -> WorkSuccess {
        // SAFETY: the completion is initialised; for the rest see `poll_raw`.
        WorkSuccess::from_raw(unsafe { *self.completion.get() })
    }

    /// The completion that a poll found, if any. A poll that failed completes nothing.
    #[inline]
    pub(super) fn completion_of_poll(
        &self,
        found: c_int,
    ) -> TransportResult<Option<WorkCompletion>> {
        match found {
            // SAFETY: the completion is initialised; for the rest see `poll_raw`.
            1 => Ok(Some(unsafe { *self.completion.get() }.into())),
            0 => Ok(None),
            found => Err(poll_failed(found)),
        }
    }

    /// Polls the next completion, if there is one.
    #[inline]
    pub(super) fn poll(&self) -> TransportResult<Option<WorkCompletion>> {
        self.completion_of_poll(self.poll_raw())
    }

    /// Whether `completion` is that of the request with this number.
    #[inline]
    pub(super) fn is_completion_of(&self, completion: &WorkCompletion, wr_id: u64) -> bool {
        completion.wr_id() == wr_id && completion.queue_pair_number() == self.number
    }

    /// Ends the operation that a completion belongs to. Returns false for a completion of an earlier
    /// epoch, which is dropped.
    ///
    /// # Errors
    ///
    /// The completion belongs to no operation in flight.
    pub(super) fn dispatch(&self, completion: &WorkCompletion) -> TransportResult<bool> {
        let wr_id = completion.wr_id();
        let (epoch, index) = ((wr_id >> 32) as u32, wr_id as u32);
        let current = (self.epoch.get() >> 32) as u32;
        let unknown =
            TransportError::UnknownCompletion { queue_pair: completion.queue_pair_number(), wr_id };
        if completion.queue_pair_number() != self.number {
            return Err(unknown);
        }
        if epoch != current {
            // The counter may wrap around between the two.
            let age = current.wrapping_sub(epoch);
            let oldest = current.wrapping_sub(self.first_epoch);
            return if age <= oldest { Ok(false) } else { Err(unknown) };
        }
        let slot = self.table.slot(index);
        match slot.map(|slot| (slot, slot.state())) {
            Some((slot, State::InFlight(owner))) => slot.complete(owner, *completion.as_raw()),
            Some((slot, State::Abandoned)) => {
                if let Err(error) = completion.result() {
                    self.record_unreported(error);
                }
                self.release(slot);
            }
            None if index == BLOCKING && self.blocking.replace(false) => {}
            _ => return Err(unknown),
        }
        Ok(true)
    }

    /// Keeps the first failure of an operation whose handle was dropped, for the end of the scope.
    #[cold]
    pub(super) fn record_unreported(&self, error: WorkError) {
        if self.unreported.error.get().is_none() {
            self.unreported.error.set(Some(error));
        }
    }

    /// To be called after each poll of a wait that found nothing: see [`Wait::on_empty_poll`].
    #[inline]
    pub(super) fn on_empty_poll(&self, wait: &mut Wait) -> TransportResult<()> {
        wait.on_empty_poll(self.sleep.as_ref(), || self.check_device())
    }

    /// Polls once and dispatches the completion that it finds. Returns whether it found one.
    #[inline]
    pub(super) fn progress(&self) -> TransportResult<bool> {
        match self.poll()? {
            Some(completion) => self.dispatch(&completion).map(|_| true),
            None => Ok(false),
        }
    }

    /// Waits until the operation in this slot has ended, takes its result and frees the slot. If polling
    /// fails, the slot is left abandoned.
    #[inline(always)]
    pub(super) fn wait(
        &self,
        slot: &Slot,
        deadline: Option<Instant>,
    ) -> TransportResult<WorkSuccess> {
        // Operations mostly complete in the order in which they are waited for.
        let found = self.poll_raw();
        if self.is_success(found, slot.wr_id()) {
            self.table.release(slot);
        } else {
            self.wait_slow_path(slot, found, deadline)?;
        }
        Ok(self.success())
    }

    /// The rest of `wait`, if the first poll did not find a success of the operation. On success the
    /// completion is copied to where the one that was polled last is.
    #[inline(never)]
    fn wait_slow_path(
        &self,
        slot: &Slot,
        mut found: c_int,
        deadline: Option<Instant>,
    ) -> TransportResult<()> {
        let mut wait = Wait::new(deadline);
        loop {
            let polled = match self.completion_of_poll(found) {
                Ok(Some(completion)) => self.dispatch(&completion).map(|_| true),
                Ok(None) => Ok(false),
                Err(error) => Err(error),
            };
            // If the operation has ended, a failure to poll does not matter.
            if !slot.state().is_outstanding() {
                let success = self.take_result(slot)?;
                // SAFETY: see `poll_raw`.
                unsafe { self.completion.get().write(*success.as_raw()) };
                return Ok(());
            }
            match polled {
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
            found = self.poll_raw();
        }
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
            State::Discarded(_) if self.destroyed.get() => Err(TransportError::Closed),
            State::Discarded(_) => Err(TransportError::Stopped),
            _ => Err(TransportError::UnknownWork),
        }
    }
}

#[cold]
fn poll_failed(found: c_int) -> TransportError {
    // More completions than there was room for: the provider is broken.
    let found = if found > 0 { -libc::EIO } else { found };
    ffi::failed("ibv_poll_cq", found).into()
}
