//! Where completions are handled.
//!
//! [`Core::settle`] is the only function that handles them: it polls, and ends the operations of all completions that it
//! found. The slot of an operation gets its result; a buffer that no handle asks for is dropped. A wait calls `settle` until
//! the slot of its operation says that it has ended.
//!
//! [`fast_path`] is the one shortcut: a wait that finds the completion of its own operation first takes that from
//! what was polled, without the way through the slot. It leaves the others for the next wait or the next `settle`.
//!
//! # Which operation a completion belongs to
//!
//! A completion belongs to an operation if it names this queue pair, and has the number of a slot that is in flight:
//! see [`generation`](super::generation). One with a number of an earlier connection is dropped. Any other is an
//! [`UnknownCompletion`](TransportError::UnknownCompletion), and ends nothing.

mod fast_path;

pub(super) use fast_path::{BATCH, PollCq, Polled};

use std::cell::Cell;
use std::ffi::c_int;

use super::core::Core;
use super::error::{TransportError, TransportResult};
use super::slot::{Owner, Slot, State};
use super::wait::Wait;
use crate::completion::WorkCompletion;
use crate::ffi;

/// What a channel polls with, and what it polled last.
pub(super) struct Sink {
    batch: Polled,
    /// The provider's function that polls, and the completion queue.
    poll_cq: PollCq,
    queue: *mut ffi::ibv_cq,
    /// What the last poll of a [shortcut](fast_path) returned, if the shortcut left it to [`Core::settle_rest`].
    /// Otherwise 0.
    rest: Cell<c_int>,
}

impl Sink {
    /// Polls a completion queue. For a channel of a loop it polls nothing.
    ///
    /// # Safety
    ///
    /// The completion queue is live.
    pub(super) unsafe fn new(queue: *mut ffi::ibv_cq, of_loop: bool) -> Self {
        // SAFETY: the caller vouches for the queue.
        let poll_cq = if of_loop { poll_nothing } else { unsafe { poll_cq_of(queue) } };
        Self { batch: Polled::new(), poll_cq, queue, rest: Cell::new(0) }
    }

    /// Whether all polled completions were dispatched.
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.batch.is_empty()
    }

    /// Whether polled completions are left, or the last poll has failed.
    #[inline]
    pub(super) fn has_rest(&self) -> bool {
        self.rest.get() != 0 || !self.is_empty()
    }
}

impl Core {
    /// Handles all completions that there are: what was polled before, or else what one poll finds. Returns whether
    /// there were any.
    ///
    /// # Errors
    ///
    ///  - [`Verbs`](TransportError::Verbs): polling failed, which ends nothing.
    ///  - [`UnknownCompletion`](TransportError::UnknownCompletion): the first completion belongs to no operation. What
    ///    came before an unknown one was handled by an earlier call, and what comes after it is handled by the next.
    #[inline]
    pub(super) fn settle(&self) -> TransportResult<bool> {
        self.poll_and_dispatch()
    }

    /// Waits until `ended` returns something. It is asked each time that completions were handled.
    ///
    /// # Errors
    ///
    /// Those of [`settle`](Self::settle), and of [`Wait::on_empty_poll`]. Nothing was stopped.
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

    /// What a wait does after each `settle` that found nothing: see [`Wait::on_empty_poll`].
    #[inline]
    pub(super) fn on_empty_poll(&self, wait: &mut Wait) -> TransportResult<()> {
        let cancel = self.cancel.get().map(|cancel| &**cancel);
        wait.on_empty_poll(self.sleep.as_ref(), cancel, || self.check_device())
    }

    /// Polls at most `most` completions into the batch, which must be empty. Returns what the verb
    /// returned. The batch is still empty after that: see [`absorb`](Self::absorb).
    #[inline(always)]
    fn poll_raw(&self, most: usize) -> c_int {
        let Sink { batch, poll_cq, queue, .. } = &self.sink;
        debug_assert!(batch.is_empty() && most <= BATCH);
        // SAFETY: the queue is live: it is a parent of the queue pair. Only the channel polls, which holds both; a handle
        // that outlives it finds that out before it polls. There is
        // room for `most` completions, and no reference to them: a function of the core that makes one
        // drops it before it polls or returns, and one thread at a time uses the core.
        unsafe { poll_cq(*queue, most as c_int, batch.entries()) }
    }

    /// Puts the completions that a poll found into the batch. Returns whether there are any. A poll that
    /// failed completes nothing.
    #[inline]
    fn absorb(&self, found: c_int) -> TransportResult<bool> {
        let found = count(found)?;
        self.sink.batch.keep(0, found);
        Ok(found > 0)
    }

    #[inline]
    fn poll_and_dispatch(&self) -> TransportResult<bool> {
        if self.settle_abandoned() {
            return Ok(true);
        }
        if !self.take_rest()? {
            return Ok(false);
        }
        self.dispatch_batch().map(|()| true)
    }

    /// Dispatches all completions of the batch, which is not empty, up to the first unknown one.
    ///
    /// # Errors
    ///
    /// The first completion is unknown. It was taken.
    #[inline(never)]
    fn dispatch_batch(&self) -> TransportResult<()> {
        // SAFETY: nothing polls meanwhile.
        let completions = unsafe { self.sink.batch.rest() };
        for (dispatched, completion) in completions.iter().enumerate() {
            if let Err(unknown) = self.dispatch(completion) {
                let is_first = dispatched == 0;
                // SAFETY: the batch has as many.
                unsafe { self.sink.batch.advance_by(dispatched + usize::from(is_first)) };
                // Otherwise the next call returns the error.
                return if is_first { Err(unknown) } else { Ok(()) };
            }
        }
        // SAFETY: these are all.
        unsafe { self.sink.batch.advance_by(completions.len()) };
        Ok(())
    }

    /// Ends the operation that a completion belongs to.
    ///
    /// # Errors
    ///
    /// The completion belongs to no operation in flight.
    #[inline]
    fn dispatch(&self, completion: &ffi::ibv_wc) -> TransportResult<()> {
        if let Some(slot) = self.slot_of_completion(completion)
            && let State::InFlight(owner) = slot.state()
            && owner.awaits_completion()
        {
            slot.complete(owner, completion);
            return Ok(());
        }
        self.dispatch_other(&(*completion).into())
    }

    /// As [`dispatch`](Self::dispatch), for an operation whose result no owner will ask for.
    #[inline(never)]
    fn dispatch_other(&self, completion: &WorkCompletion) -> TransportResult<()> {
        let wr_id = completion.wr_id();
        match self.slot_of_completion(completion.as_raw()).map(|slot| (slot, slot.state())) {
            Some((slot, State::InFlight(owner))) if owner.is_window() => {
                self.end_window(slot, owner, completion);
            }
            Some((slot, state @ (State::Abandoned | State::InFlight(Owner::Lent)))) => {
                self.unreported.unpolled.set(true);
                // An operation that was discarded has left its length in the slot.
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
            _ if self.take_window_failure(completion) || self.table.is_earlier(wr_id) => {}
            _ => {
                let queue_pair = completion.queue_pair_number();
                return Err(TransportError::UnknownCompletion { queue_pair, wr_id });
            }
        }
        Ok(())
    }

    /// Keeps the first failure of an operation whose handle was dropped, for the end of the scope.
    #[cold]
    pub(super) fn record_unreported(&self, error: TransportError) {
        if self.unreported.error.get().is_none() {
            self.unreported.error.set(Some(error));
        }
    }

    /// Frees the slots of operations whose handles were dropped, and whose completions are successes. Returns the number
    /// of these at the beginning of `completions`.
    ///
    /// It calls no function, so that the compiler keeps everything in registers.
    #[inline(never)]
    fn release_abandoned(&self, completions: &[ffi::ibv_wc]) -> usize {
        const { assert!(ffi::ibv_wc_status::IBV_WC_SUCCESS.0 == 0) };
        // Read once: the compiler assumes that each write to a slot changes them.
        let (number, slots) = (self.number, self.table.slots());
        let Some(mut likely) = slots.first() else { return 0 };
        let mut rest = completions;
        while let [completion, others @ ..] = rest {
            // Requests mostly end in the order of the ring. Otherwise as `slot_of_completion`.
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

    /// The slot of the request that a completion names, in whatever state.
    #[inline(always)]
    fn slot_of_completion(&self, completion: &ffi::ibv_wc) -> Option<&Slot> {
        if completion.qp_num != self.number {
            return None;
        }
        self.table.slot_of(completion.wr_id)
    }
}

/// The provider's function that polls.
///
/// # Safety
///
/// The completion queue is live.
pub(super) unsafe fn poll_cq_of(queue: *mut ffi::ibv_cq) -> PollCq {
    // SAFETY: the caller vouches for the queue, and with it for its context.
    let poll_cq = unsafe { (*(*queue).context).ops.poll_cq };
    // libibverbs sets every operation of a context before it hands the context out.
    poll_cq.expect("libibverbs sets it")
}

/// That of a channel whose completions a [`Loop`](crate::Loop) polls.
unsafe extern "C" fn poll_nothing(_: *mut ffi::ibv_cq, _: c_int, _: *mut ffi::ibv_wc) -> c_int {
    0
}

/// The number of completions that a poll found which returned `found`.
#[inline]
pub(super) fn count(found: c_int) -> TransportResult<usize> {
    match usize::try_from(found) {
        Ok(found) if found <= BATCH => Ok(found),
        _ => Err(poll_failed(found)),
    }
}

#[cold]
fn poll_failed(found: c_int) -> TransportError {
    // More completions than there was room for: the provider is broken.
    let found = if found > 0 { -libc::EIO } else { found };
    ffi::failed("ibv_poll_cq", found).into()
}
