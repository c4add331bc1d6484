//! Where completions are handled.
//!
//! [`Core::settle`] stores each result in its slot, and drops buffers that no handle asks for. A wait calls it until
//! its slot says that the operation has ended. The one shortcut is [`fast_path`].
//!
//! A completion belongs to an operation if it names this queue pair and the number of a slot in flight. One of an
//! earlier connection is dropped. Any other is an [`UnknownCompletion`](TransportError::UnknownCompletion), and ends
//! nothing.

mod fast_path;
mod polled;

pub(super) use polled::CqPoller;
pub(crate) use polled::{BATCH, PollCq, Polled, count, poll_cq_of};

use std::ffi::c_int;

use super::core::Core;
use super::error::{TransportError, TransportResult};
use super::slot::{Slot, State};
use super::wait::Wait;
use crate::base::ffi;
use crate::verbs::completion::WorkCompletion;

impl Core {
    /// Handles all polled completions, or those of one poll. Returns whether there were any.
    ///
    /// # Errors
    ///
    ///  - [`Verbs`](TransportError::Verbs): polling failed.
    ///  - [`UnknownCompletion`](TransportError::UnknownCompletion): the first completion belongs to no operation. The
    ///    next call handles those after it.
    #[inline]
    pub(super) fn settle(&self) -> TransportResult<bool> {
        if self.settle_abandoned() {
            return Ok(true);
        }
        if !self.take_rest()? {
            return Ok(false);
        }
        self.dispatch_batch().map(|()| true)
    }

    /// Asks `ended` again each time that completions were handled.
    ///
    /// # Errors
    ///
    /// Those of [`settle`](Self::settle) and [`Wait::on_empty_poll`]. The channel is not stopped.
    #[inline]
    pub(super) fn settle_until<R>(
        &self,
        wait: &mut Wait,
        mut ended: impl FnMut() -> Option<R>,
    ) -> TransportResult<R> {
        loop {
            if let Some(ended) = ended() {
                return Ok(ended);
            }
            if !self.settle()? {
                self.on_empty_poll(wait)?;
            }
        }
    }

    #[inline]
    pub(super) fn on_empty_poll(&self, wait: &mut Wait) -> TransportResult<()> {
        let cancel = self.cancel.get().map(|cancel| &**cancel);
        wait.on_empty_poll(self.settings.sleep.as_ref(), cancel, || self.check_device())
    }

    /// Polls into the batch, which must be empty and stays so: see [`take_rest`](Self::take_rest).
    #[inline(always)]
    fn poll_raw(&self, most: usize) -> c_int {
        let CqPoller { batch, poll_cq, queue, .. } = &self.poller;
        debug_assert!(batch.is_empty() && most <= BATCH);
        // SAFETY: the queue is live, as a parent of the queue pair: only the channel polls, which holds both, and a
        // handle that outlives it notices that first. There is room for `most` completions. No reference to them
        // exists: each function of the core drops its references before it polls or returns, and one thread at a time
        // uses it.
        unsafe { poll_cq(*queue, most as c_int, batch.entries()) }
    }

    /// Stops at the first unknown completion.
    ///
    /// # Errors
    ///
    /// The first completion is unknown. It was taken.
    #[inline(never)]
    fn dispatch_batch(&self) -> TransportResult<()> {
        // SAFETY: nothing polls while the reference exists.
        let completions = unsafe { self.poller.batch.rest() };
        for (dispatched, completion) in completions.iter().enumerate() {
            if let Err(unknown) = self.dispatch(completion) {
                let is_first = dispatched == 0;
                // SAFETY: the batch has these: the completions before this one, or this one if it is the first.
                unsafe { self.poller.batch.advance_by(dispatched + usize::from(is_first)) };
                // The next call returns the error.
                return if is_first { Err(unknown) } else { Ok(()) };
            }
        }
        // SAFETY: the batch has exactly these.
        unsafe { self.poller.batch.advance_by(completions.len()) };
        Ok(())
    }

    /// Ends the completion's operation.
    ///
    /// # Errors
    ///
    /// There is none in flight.
    #[inline]
    fn dispatch(&self, completion: &ffi::ibv_wc) -> TransportResult<()> {
        if let Some(slot) = self.slot_of_completion(completion)
            && slot.state().awaits_completion()
        {
            slot.complete(completion);
            return Ok(());
        }
        self.dispatch_other(&(*completion).into())
    }

    /// Ends an operation whose result no owner asks for.
    #[inline(never)]
    fn dispatch_other(&self, completion: &WorkCompletion) -> TransportResult<()> {
        let wr_id = completion.wr_id();
        match self.slot_of_completion(completion.as_raw()).map(|slot| (slot, slot.state())) {
            Some((slot, state @ (State::Abandoned | State::Lent))) => {
                self.unreported.unpolled.set(true);
                // In an abandoned slot, this may be the length of an earlier operation.
                let kept = slot.kept.take().filter(|_| state != State::Abandoned);
                match (completion.result(), kept) {
                    (Err(error), _) => self.record_unreported(error.into()),
                    // SAFETY: the buffer is borrowed until the scope has ended, and the device is done with it.
                    (Ok(success), Some(kept)) => unsafe { success.tell(kept) },
                    (Ok(_), None) => {}
                }
                self.release(slot);
            }
            Some((slot, _))
                if self.table.credit_read().is_some_and(|read| std::ptr::eq(read, slot))
                    && self.take_credits(completion) =>
            {
                slot.renumber();
            }
            _ if self.table.is_earlier(wr_id) => {}
            _ => {
                let queue_pair = completion.queue_pair_number();
                return Err(TransportError::UnknownCompletion { queue_pair, wr_id });
            }
        }
        Ok(())
    }

    /// Leaves a failure to the end of the scope.
    pub(super) fn report_failure(&self, completion: &WorkCompletion) {
        if let Err(error) = completion.result() {
            self.record_unreported(error.into());
        }
    }

    /// Keeps the first failure for the end of the scope.
    #[cold]
    pub(crate) fn record_unreported(&self, error: TransportError) {
        if self.unreported.error.get().is_none() {
            self.unreported.error.set(Some(error));
        }
    }

    /// Frees slots of successes whose handles were dropped, up to the first other completion. It calls no function, so
    /// the compiler keeps everything in registers.
    #[inline(never)]
    fn release_abandoned(&self, completions: &[ffi::ibv_wc]) -> usize {
        const { assert!(ffi::ibv_wc_status::IBV_WC_SUCCESS.0 == 0) };
        // Read once: the compiler would read them again after each write to a slot.
        let (number, slots) = (self.number, self.table.slots());
        let Some(mut likely) = slots.first() else { return 0 };
        let mut rest = completions;
        while let [completion, others @ ..] = rest {
            // Requests mostly end in the order of the ring.
            let slot = if likely.wr_id() == completion.wr_id {
                likely
            } else {
                match slots.get(completion.wr_id as u32 as usize) {
                    Some(slot) if slot.wr_id() == completion.wr_id => slot,
                    _ => break,
                }
            };
            let is_success = (completion.qp_num ^ number) | completion.status.0 == 0;
            if slot.state() != State::Abandoned || !is_success {
                break;
            }
            slot.free();
            // SAFETY: the slot was taken, so its table was opened, and `next` points to a slot of it.
            likely = unsafe { slot.next.get().as_ref() };
            rest = others;
        }
        let freed = completions.len() - rest.len();
        self.table.count_released_in_scope(freed);
        freed
    }

    /// Finds a slot in any state.
    #[inline(always)]
    fn slot_of_completion(&self, completion: &ffi::ibv_wc) -> Option<&Slot> {
        if completion.qp_num != self.number {
            return None;
        }
        self.table.slot_of(completion.wr_id)
    }
}
