//! Completions of a channel: finding them, and giving each to its operation.

use std::ffi::c_int;
use std::sync::Arc;
use std::time::Instant;

use super::core::Core;
use super::error::{TransportError, TransportResult};
use super::in_flight::{BLOCKING, Slot, State};
use super::shared_completion_queue::{Inbox, Router};
use super::wait::Patience;
use crate::completion::{WorkCompletion, WorkError, WorkSuccess};
use crate::ffi;

impl Core {
    /// Takes the next completion, if there is one, to `self.completion`. Returns what the verb did.
    #[inline(always)]
    pub(crate) fn poll_raw(&self) -> c_int {
        // SAFETY: what is polled is live, as the parents of the queue pair and the core are; there is
        // room for one, to which there is no reference: none is ever made that outlives the function
        // that makes it, none of which polls meanwhile, and one thread at a time uses the core.
        unsafe { self.poll_cq.get()(self.polled.get(), 1, self.completion.get()) }
    }

    /// Whether a poll has found the completion of the request with this number, and it says success.
    #[inline(always)]
    pub(crate) fn is_success(&self, found: c_int, wr_id: u64) -> bool {
        // SAFETY: the completion is initialised; for the rest see `poll_raw`.
        let completion = unsafe { &*self.completion.get() };
        found == 1
            && completion.wr_id == wr_id
            && completion.qp_num == self.number
            && completion.status == ffi::ibv_wc_status::IBV_WC_SUCCESS
    }

    /// The completion that was polled last, which says success.
    #[inline(always)]
    pub(crate) fn success(&self) -> WorkSuccess {
        // SAFETY: the completion is initialised; for the rest see `poll_raw`.
        WorkSuccess::from_raw(unsafe { *self.completion.get() })
    }

    /// What a poll has found. An error is not the completion of anything.
    #[inline]
    pub(crate) fn found(&self, found: c_int) -> TransportResult<Option<WorkCompletion>> {
        match found {
            // SAFETY: the completion is initialised; for the rest see `poll_raw`.
            1 => Ok(Some(unsafe { *self.completion.get() }.into())),
            0 => Ok(None),
            found => Err(poll_failed(found)),
        }
    }

    /// Takes the next completion, if there is one.
    #[inline]
    pub(crate) fn poll(&self) -> TransportResult<Option<WorkCompletion>> {
        self.found(self.poll_raw())
    }

    /// Whether `completion` is that of the request with this number.
    #[inline]
    pub(crate) fn is(&self, completion: &WorkCompletion, wr_id: u64) -> bool {
        completion.wr_id() == wr_id && completion.queue_pair_number() == self.number
    }

    /// Gives a completion to the operation that it is of. Returns whether there was one: a completion
    /// that an earlier epoch left is dropped.
    ///
    /// # Errors
    ///
    /// No operation of this channel is waiting for it.
    pub(crate) fn dispatch(&self, completion: &WorkCompletion) -> TransportResult<bool> {
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
                    self.leave(error);
                }
                self.release(slot);
            }
            None if index == BLOCKING && self.blocking.replace(false) => {}
            _ => return Err(unknown),
        }
        Ok(true)
    }

    /// Remembers that an operation failed of which nobody asked the result.
    #[cold]
    pub(crate) fn leave(&self, error: WorkError) {
        if self.left.error.get().is_none() {
            self.left.error.set(Some(error));
        }
    }

    /// Polls once, and gives what it finds to whom it belongs.
    #[inline]
    pub(crate) fn progress(&self) -> TransportResult<bool> {
        match self.poll()? {
            Some(completion) => self.dispatch(&completion).map(|_| true),
            None => Ok(false),
        }
    }

    /// Waits until the operation in this slot has ended and takes its result; the slot is then free,
    /// or, on an error that is not its result, abandoned to whoever polls next.
    #[inline(always)]
    pub(crate) fn wait(
        &self,
        slot: &Slot,
        deadline: Option<Instant>,
    ) -> TransportResult<WorkSuccess> {
        // Completions mostly come in the order in which they are waited for.
        let found = self.poll_raw();
        if self.is_success(found, slot.wr_id()) {
            self.table.release(slot);
        } else {
            self.wait_on(slot, found, deadline)?;
        }
        Ok(self.success())
    }

    /// The rest of `wait`, when the first poll did not find the completion, or a failure. On success
    /// the completion is put where the one that was polled last would be.
    #[inline(never)]
    fn wait_on(
        &self,
        slot: &Slot,
        mut found: c_int,
        deadline: Option<Instant>,
    ) -> TransportResult<()> {
        let mut patience = Patience::new(deadline);
        loop {
            let polled = match self.found(found) {
                Ok(Some(completion)) => self.dispatch(&completion).map(|_| true),
                Ok(None) => Ok(false),
                Err(error) => Err(error),
            };
            // What has ended has ended, whatever was polled besides.
            if !slot.state().is_outstanding() {
                let success = self.collect(slot)?;
                // SAFETY: see `poll_raw`.
                unsafe { self.completion.get().write(*success.as_raw()) };
                return Ok(());
            }
            match polled {
                Ok(true) => {}
                Ok(false) => {
                    if let Err(error) = patience.spent(self) {
                        // Of what is flushed now there is nothing to tell but that it took too long.
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
    pub(crate) fn collect(&self, slot: &Slot) -> TransportResult<WorkSuccess> {
        let result = self.result(slot);
        self.release(slot);
        result
    }

    /// The result of an operation that has ended.
    pub(crate) fn result(&self, slot: &Slot) -> TransportResult<WorkSuccess> {
        match slot.state() {
            State::Done(_) | State::Seen => Ok(slot.completion().result()?),
            State::Lost(_) if self.destroyed.get() => Err(TransportError::Closed),
            State::Lost(_) => Err(TransportError::Stopped),
            _ => Err(TransportError::UnknownWork),
        }
    }
}

/// `poll_cq` of a channel whose completion queue is shared.
///
/// # Safety
///
/// `route` points to the route of a live core, and there is room for one completion, which is
/// initialised.
pub(crate) unsafe extern "C" fn poll_routed(
    route: *mut ffi::ibv_cq,
    _one: c_int,
    completion: *mut ffi::ibv_wc,
) -> c_int {
    // SAFETY: the caller vouches for both.
    let ((router, inbox), completion) =
        unsafe { (&*route.cast::<(Arc<Router>, Inbox)>(), &mut *completion) };
    router.poll(*inbox, completion)
}

#[cold]
fn poll_failed(found: c_int) -> TransportError {
    // A provider that claims more than it had room for is not believed.
    let found = if found > 0 { -libc::EIO } else { found };
    ffi::failed("ibv_poll_cq", found).into()
}
