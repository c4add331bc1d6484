//! Ending all operations, so that the device no longer uses their buffers; and the end of a scope.
//!
//! The program may use a buffer again once its completion was polled, or once the queue pair was
//! successfully moved to RESET or destroyed. Nothing else counts, in particular not an error of
//! `ibv_poll_cq`. [`Core::stop`] ends all operations in steps of growing force:
//!
//! 1. move the queue pair to ERR, and poll the completions of all flushed operations, for a bounded time;
//! 2. move it to RESET: the device releases everything, without completions;
//! 3. destroy it;
//! 4. abort the process: the device may continue to write to memory that the caller is about to use for
//!    something else, and nothing else can prevent it.
//!
//! There is one exception. If a post fails although the provider may have queued the request, a buffer that
//! the device only reads is given back after the first two steps, even if both fail. At worst the device
//! sends the peer what the buffer holds by then. Without this exception, each send on an unplugged device
//! would abort the process.
//!
//! A device that is unplugged while work is in flight gets to the last step, unless libibverbs was told to
//! treat destroying as successful: see [`AsyncEvents`](crate::device::AsyncEvents#when-the-device-goes).

use std::ffi::c_int;
use std::io::Write;
use std::time::Instant;
use std::{io, process, thread};

use super::core::Core;
use super::error::{TransportError, TransportResult};
use super::slot::{Owner, State};
use super::wait::{DEVICE_CHECK_PERIOD, Wait};
use crate::error::{Error, Result};
use crate::handle::Object;
use crate::{ffi, trace};

/// Failed polls in a row after which `flush` and `discard` give up.
pub(super) const POLL_FAILURES: u32 = 16;

impl Core {
    /// Ends everything that is in flight, and prevents further posts until the channel is reset. When it
    /// returns, the device uses no buffer of this channel any more.
    #[cold]
    pub(super) fn stop(&self) {
        if !self.try_stop() {
            self.destroy_or_abort();
        }
    }

    /// As `stop`, if the device has requests that have no completion of their own: a part of a window. If it only reads
    /// their memory (not `writes`), it stops after the first two steps: see the [module](self).
    #[cold]
    pub(super) fn stop_unsignaled(&self, writes: bool) {
        if self.destroyed.get() {
            return;
        }
        self.close();
        let outstanding = self.table.outstanding();
        // What else is in flight ends as it has ended. Of the part, the completions prove nothing.
        self.flush();
        let reset = self.reset();
        trace::channel_stopped(self.number, outstanding, reset.is_ok());
        if reset.is_err() && writes {
            self.destroy_or_abort();
        }
    }

    /// The last two steps.
    fn destroy_or_abort(&self) {
        if self.destroyed.get() || self.destroy().is_err() {
            // `eprintln` would panic if writing to stderr fails.
            let _ = writeln!(
                io::stderr(),
                "ibverbs: queue pair {:#x} could be neither flushed, reset nor destroyed; its device \
                 may still write to memory that is about to be used again: aborting (if the device \
                 was pulled out, see 'When the device goes' in the documentation of AsyncEvents)",
                self.number
            );
            process::abort();
        }
    }

    /// As `stop`, but takes the first two steps only. Returns false if both fail. Operations may then still
    /// be in flight.
    pub(super) fn try_stop(&self) -> bool {
        if self.destroyed.get() {
            return true;
        }
        self.close();
        let outstanding = self.table.outstanding();
        let complete = self.flush() || self.reset().is_ok();
        trace::channel_stopped(self.number, outstanding, complete);
        complete
    }

    /// As `try_stop`, without waiting for completions.
    pub(super) fn try_reset(&self) -> bool {
        if self.destroyed.get() {
            return true;
        }
        self.close();
        let outstanding = self.table.outstanding();
        let complete = self.reset().is_ok();
        trace::channel_stopped(self.number, outstanding, complete);
        complete
    }

    /// Moves the queue pair to ERR and polls until nothing is in flight; returns whether all operations have ended.
    fn flush(&self) -> bool {
        if self.modify(ffi::ibv_qp_state::IBV_QPS_ERR).is_err() {
            return false;
        }
        let give_up = self.clock.now().checked_add(self.settle_timeout);
        let mut outstanding = self.table.outstanding();
        let (mut failures, mut vain) = (0, 0_u32);
        while outstanding > 0 {
            match self.settle() {
                // The kernel or a progress thread of the provider may have to do the flushing.
                Ok(false) => {
                    give_up.iter().for_each(|&at| self.clock.reach(at));
                    thread::yield_now();
                }
                Err(TransportError::Verbs(_)) if failures == POLL_FAILURES => return false,
                Err(TransportError::Verbs(_)) => failures += 1,
                // A completion that is unknown or of an earlier connection ends nothing.
                Ok(true) | Err(_) => failures = 0,
            }
            let left = self.table.outstanding();
            if left < outstanding {
                outstanding = left;
                continue;
            }
            if vain.is_multiple_of(64) && give_up.is_some_and(|at| self.clock.now() >= at) {
                return false;
            }
            vain = vain.wrapping_add(1);
        }
        true
    }

    /// Checks that the kernel still has the device, by a query that the kernel must then answer, and that the
    /// connection has not ended long ago. A wait calls it about once a second while its polls find nothing.
    ///
    /// # Errors
    ///
    ///  - `EIO`, `ENODEV`: the device is gone.
    ///  - `ENOTCONN`: the queue pair was in ERR at the last check too. Since then the device had time to flush
    ///    what was posted. Soft-iWARP never flushes what is posted in ERR.
    pub(super) fn check_device(&self) -> Result<()> {
        let failed = self.query_state()? == Some(ffi::ibv_qp_state::IBV_QPS_ERR);
        if self.found_in_error.replace(failed) && failed {
            let reason = "the connection has ended, and the device does not complete what was \
                          posted after that";
            return Err(Error::with_reason("ibv_query_qp", libc::ENOTCONN, reason));
        }
        Ok(())
    }

    /// [Checks](Self::check_device) at most once in [`DEVICE_CHECK_PERIOD`].
    ///
    /// # Errors
    ///
    /// Those of `check_device`.
    pub(super) fn check_device_if_due(&self, now: Instant) -> Result<()> {
        let is_due = |at: Instant| now.saturating_duration_since(at) >= DEVICE_CHECK_PERIOD;
        if !self.checked_at.get().is_none_or(is_due) {
            return Ok(());
        }
        self.checked_at.set(Some(now));
        self.check_device()
    }

    /// The state of the queue pair, if it can be known.
    #[cold]
    #[inline(never)]
    fn query_state(&self) -> Result<Option<ffi::ibv_qp_state>> {
        if self.destroyed.get() {
            return Ok(None);
        }
        let (mut attributes, mut initial) = Default::default();
        let mask = ffi::ibv_qp_attr_mask::IBV_QP_STATE.0 as c_int;
        // SAFETY: the destroy verb was not called, whatever it would have returned, so the queue pair is
        // live; both structs are writable.
        let returned =
            unsafe { ffi::ibv_query_qp(self.queue_pair, &mut attributes, mask, &mut initial) };
        match ffi::status("ibv_query_qp", returned) {
            // Other failures do not concern the device.
            Err(error) if matches!(error.errno(), libc::EIO | libc::ENODEV) => Err(error),
            Err(_) => Ok(None),
            Ok(()) => Ok(Some(attributes.qp_state)),
        }
    }

    /// Moves the queue pair to RESET. Nothing is in flight any more, and completions of earlier requests
    /// that are polled later are dropped.
    pub(super) fn reset(&self) -> Result<()> {
        self.modify(ffi::ibv_qp_state::IBV_QPS_RESET)?;
        self.mark_all_ended();
        Ok(())
    }

    /// Destroys the queue pair, after which nothing is in flight any more. If that fails, the operations
    /// stay in flight, and the verb is not called again: the state of the queue pair is unknown.
    ///
    /// The caller has checked `destroyed`, so this was not called before.
    pub(super) fn destroy(&self) -> Result<()> {
        self.close();
        self.destroyed.set(true);
        // SAFETY: the queue pair is live, since the verb is called once: the caller has looked at `destroyed`,
        // which prevents any use of it after this, also if the verb fails.
        let returned = unsafe { ffi::ibv_qp::destroy(self.queue_pair) };
        ffi::status("ibv_destroy_qp", returned).inspect_err(trace::object_leaked)?;
        self.mark_all_ended();
        Ok(())
    }

    /// Ends all operations without completions: the queue pair was reset or destroyed.
    fn mark_all_ended(&self) {
        if self.table.discard_outstanding() {
            self.unreported.unpolled.set(true);
            self.record_unreported(self.ended_by_force());
        }
        if let Some(credits) = &self.credits {
            credits.close();
        }
    }

    pub(super) fn modify(&self, state: ffi::ibv_qp_state) -> Result<()> {
        if self.destroyed.get() {
            return Err(Error::invalid("ibv_modify_qp", "the channel's queue pair was destroyed"));
        }
        let mut attributes = ffi::ibv_qp_attr { qp_state: state, ..Default::default() };
        let mask = ffi::ibv_qp_attr_mask::IBV_QP_STATE.0 as c_int;
        // SAFETY: the destroy verb was not called: `destroyed` is set before the call. So the queue pair is live.
        let returned = unsafe { ffi::ibv_modify_qp(self.queue_pair, &mut attributes, mask) };
        ffi::status("ibv_modify_qp", returned).inspect_err(trace::verb_failed)
    }

    /// Empties the completion queue of a queue pair that was reset, so that there is room for new
    /// completions.
    ///
    /// # Errors
    ///
    /// The completion queue cannot be polled, or does not become empty.
    pub(super) fn discard(&self) -> Result<()> {
        // SAFETY: the queue pair was reset, so it is there, and so is its completion queue.
        let mut left = unsafe { (*(*self.queue_pair).send_cq).cqe };
        let mut failures = 0;
        // What comes beyond what the queue can hold, the device makes up.
        while left >= 0 {
            match self.settle() {
                Ok(false) => return Ok(()),
                Err(TransportError::Verbs(error)) if failures == POLL_FAILURES => {
                    return Err(error);
                }
                Err(TransportError::Verbs(_)) => failures += 1,
                // They are of the earlier connection, or unknown.
                Ok(true) | Err(_) => (failures, left) = (0, left - 1),
            }
        }
        let reason = "the completion queue does not become empty";
        Err(Error::with_reason("ibv_poll_cq", libc::ETIMEDOUT, reason))
    }
}

// The end of a scope: waiting for its operations, and ending those that are left.

/// How the operations of a scope are ended.
#[derive(Clone, Copy)]
pub(super) enum ScopeExit {
    /// By waiting, until this deadline at the latest. What is in flight then is ended by stopping the channel.
    Wait(Option<Instant>),
    /// By stopping the channel, if any is in flight.
    Stop,
}

impl Core {
    /// Whether there is an operation of the scope whose result was not seen.
    pub(super) fn has_unpolled(&self) -> bool {
        let unseen = |state| match state {
            State::Abandoned => true,
            State::Seen => false,
            state => state.owner().is_some_and(Owner::is_of_scope),
        };
        self.unreported.unpolled.get()
            || self.table.any_in_scope()
                && self.table.slots().iter().any(|slot| unseen(slot.state()))
    }

    /// Ends all operations of the scope. Returns the first failure that no handle has reported.
    ///
    /// When it returns, no operation of the scope is in flight, and all its slots are free. It does not
    /// panic.
    #[inline(always)]
    pub(super) fn end_scope(&self, exit: ScopeExit) -> TransportResult<()> {
        let mut result = Ok(());
        if !self.is_scope_over() {
            result = self.poll_and_end_scope(exit);
        }
        self.update_fast_path();
        result
    }

    /// Whether there is nothing to do at the end of a scope.
    #[inline]
    fn is_scope_over(&self) -> bool {
        !self.table.any_in_scope() && !self.unreported.unpolled.get()
    }

    /// As `end_scope`, if something is left.
    #[inline(never)]
    fn poll_and_end_scope(&self, exit: ScopeExit) -> TransportResult<()> {
        let mut polled = Ok(());
        if let ScopeExit::Wait(_) = exit {
            polled = match self.settle_last() {
                Some(true) => Ok(()),
                Some(false) => self.settle_scope_on(),
                None => self.settle_scope(),
            };
            if polled.is_ok() && self.is_scope_over() {
                return Ok(());
            }
        }
        self.end_scope_on(exit, polled)
    }

    /// The rest of `end_scope`, after polls with this result.
    #[inline(never)]
    fn end_scope_on(&self, exit: ScopeExit, polled: TransportResult<()>) -> TransportResult<()> {
        let mut result = match exit {
            ScopeExit::Wait(deadline) => polled.and_then(|()| self.wait_for_scope(deadline)),
            ScopeExit::Stop => self.settle_scope(),
        };
        if self.table.any_in_scope() {
            if self.is_scope_outstanding() {
                self.stop();
            }
            result = result.and(self.release_scope_slots());
        }
        result.and(self.take_unreported())
    }

    /// Waits until all operations of the scope have ended.
    fn wait_for_scope(&self, deadline: Option<Instant>) -> TransportResult<()> {
        let mut wait = Wait::new(deadline);
        for slot in self.table.slots() {
            while slot.state().is_outstanding_in_scope() {
                if !self.settle()? {
                    self.on_empty_poll(&mut wait)?;
                }
            }
        }
        Ok(())
    }

    /// Waits until all operations of the scope have ended, and reports what no handle has seen.
    #[inline]
    pub(super) fn wait_for_all(&self, deadline: Option<Instant>) -> TransportResult<()> {
        self.settle_scope()?;
        if self.is_scope_over() {
            return Ok(());
        }
        self.wait_for_all_on(deadline)
    }

    /// The rest of `wait_for_all`.
    #[inline(never)]
    fn wait_for_all_on(&self, deadline: Option<Instant>) -> TransportResult<()> {
        let mut wait = Wait::new(deadline);
        loop {
            if !self.table.any_in_scope() {
                break;
            }
            // A slot in use may belong to an operation that has ended and whose handle still exists.
            if !self.settle()? {
                if !self.is_scope_outstanding() {
                    break;
                }
                if let Err(error) = self.on_empty_poll(&mut wait) {
                    self.stop();
                    return Err(error);
                }
            }
        }
        self.take_unreported()
    }

    /// The first failure of an operation whose handle was dropped, since the last call.
    fn take_unreported(&self) -> TransportResult<()> {
        // False if there is no error.
        if !self.unreported.unpolled.replace(false) {
            return Ok(());
        }
        self.unreported.error.take().map_or(Ok(()), Err)
    }

    /// Settles what there is while anything of the scope is in use, without waiting.
    #[inline]
    fn settle_scope(&self) -> TransportResult<()> {
        while self.table.any_in_scope() {
            if !self.settle_abandoned() {
                self.settle_scope_on()?;
                break;
            }
        }
        Ok(())
    }

    /// The rest of `settle_scope`.
    #[inline(never)]
    fn settle_scope_on(&self) -> TransportResult<()> {
        let mut settled = self.sink.has_rest();
        while settled && self.table.any_in_scope() {
            settled = self.settle_rest()?;
        }
        Ok(())
    }

    fn is_scope_outstanding(&self) -> bool {
        self.table.any_in_scope()
            && self.table.slots().iter().any(|slot| slot.state().is_outstanding_in_scope())
    }

    /// Frees the slots of the scope. Returns the first failure that no handle has reported.
    fn release_scope_slots(&self) -> TransportResult<()> {
        let mut result = Ok(());
        for slot in self.table.slots() {
            match slot.state() {
                State::Done(owner) | State::Discarded(owner) if owner.is_window() => {
                    result = result.and(self.take_window_result(slot).map(drop));
                }
                State::Done(Owner::Scope) | State::Discarded(Owner::Scope) => {
                    result = result.and(self.take_result(slot).map(drop));
                }
                State::Seen => self.table.release_of(slot, Owner::Scope),
                _ => {}
            }
        }
        result
    }
}
