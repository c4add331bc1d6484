//! Ending all operations, and the end of a scope.
//!
//! The program may use a buffer again once its completion was polled, or the queue pair was moved to RESET or
//! destroyed. An error of `ibv_poll_cq` does not count. [`Core::stop`] takes these steps until one succeeds:
//!
//! 1. move the queue pair to ERR, and poll the flushed completions, for a bounded time;
//! 2. move it to RESET: the device releases everything, without completions;
//! 3. destroy it;
//! 4. abort the process: nothing else keeps the device from writing to memory that is about to be reused.
//!
//! One exception: if a post fails but may be queued, a buffer that the device only reads is given back after step 2
//! in any case. At worst the device sends later contents. Otherwise each send on an unplugged device would abort the
//! process.
//!
//! A device that is unplugged with work in flight gets to step 4, unless libibverbs treats destroying as successful:
//! see [`AsyncEvents`](crate::device::AsyncEvents#when-the-device-goes).

use std::ffi::c_int;
use std::io::Write;
use std::time::Instant;
use std::{io, process, thread};

use super::core::Core;
use super::error::{TransportError, TransportResult};
use super::slot::State;
use super::wait::{DEVICE_CHECK_PERIOD, Wait};
use crate::base::{Error, Object, Result, ffi, trace};

/// In a row.
pub(crate) const POLL_FAILURES: u32 = 16;

impl Core {
    /// Afterwards the device uses no buffer of the channel.
    #[cold]
    pub(super) fn stop(&self) {
        if !self.try_stop() {
            self.destroy_or_abort();
        }
    }

    /// Steps 3 and 4.
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

    /// Steps 1 and 2. If both fail, operations may still be in flight.
    pub(super) fn try_stop(&self) -> bool {
        self.end_all(|| self.flush() || self.reset().is_ok())
    }

    /// Step 2.
    pub(crate) fn try_reset(&self) -> bool {
        self.end_all(|| self.reset().is_ok())
    }

    /// Refuses posts, and takes these steps unless the queue pair was destroyed. Returns whether all operations ended.
    fn end_all(&self, steps: impl FnOnce() -> bool) -> bool {
        if self.destroyed.get() {
            return true;
        }
        self.close();
        let outstanding = self.table.outstanding();
        let complete = steps();
        trace::channel_stopped(self.number, outstanding, complete);
        complete
    }

    /// Step 1.
    fn flush(&self) -> bool {
        if self.modify(ffi::ibv_qp_state::IBV_QPS_ERR).is_err() {
            return false;
        }
        let give_up = self.clock.now().checked_add(self.settings.settle_timeout);
        let mut outstanding = self.table.outstanding();
        let (mut failures, mut vain) = (0, 0_u32);
        while outstanding > 0 {
            match self.settle() {
                // The kernel or a thread of the provider may have to flush.
                Ok(false) => {
                    give_up.iter().for_each(|&at| self.clock.reach(at));
                    thread::yield_now();
                }
                Err(TransportError::Verbs(_)) if failures == POLL_FAILURES => return false,
                Err(TransportError::Verbs(_)) => failures += 1,
                // An unknown completion, or one of an earlier connection, ends nothing.
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

    /// A wait calls it about once a second while its polls find nothing.
    ///
    /// # Errors
    ///
    ///  - `EIO`, `ENODEV`: the device is gone. The kernel answers the query, not the provider.
    ///  - `ENOTCONN`: the queue pair was in ERR at the last check too, so the device had time to flush. Soft-iWARP
    ///    never flushes what is posted in ERR.
    pub(super) fn check_device(&self) -> Result<()> {
        let failed = self.query_state()? == Some(ffi::ibv_qp_state::IBV_QPS_ERR);
        if self.found_in_error.replace(failed) && failed {
            let reason = "the connection has ended, and the device does not complete what was \
                          posted after that";
            return Err(Error::with_reason("ibv_query_qp", libc::ENOTCONN, reason));
        }
        Ok(())
    }

    /// At most once in [`DEVICE_CHECK_PERIOD`].
    ///
    /// # Errors
    ///
    /// Those of `check_device`.
    pub(crate) fn check_device_if_due(&self, now: Instant) -> Result<()> {
        let is_due = |at: Instant| now.saturating_duration_since(at) >= DEVICE_CHECK_PERIOD;
        if !self.checked_at.get().is_none_or(is_due) {
            return Ok(());
        }
        self.checked_at.set(Some(now));
        self.check_device()
    }

    #[cold]
    #[inline(never)]
    fn query_state(&self) -> Result<Option<ffi::ibv_qp_state>> {
        if self.destroyed.get() {
            return Ok(None);
        }
        let (mut attributes, mut initial) = Default::default();
        let mask = ffi::ibv_qp_attr_mask::IBV_QP_STATE.0 as c_int;
        // SAFETY: the destroy verb was not called, so the queue pair is live; both structs are writable.
        let returned =
            unsafe { ffi::ibv_query_qp(self.queue_pair, &mut attributes, mask, &mut initial) };
        match ffi::status("ibv_query_qp", returned) {
            // Other failures do not concern the device.
            Err(error) if matches!(error.errno(), libc::EIO | libc::ENODEV) => Err(error),
            Err(_) => Ok(None),
            Ok(()) => Ok(Some(attributes.qp_state)),
        }
    }

    /// Later completions of earlier requests are dropped.
    pub(crate) fn reset(&self) -> Result<()> {
        self.modify(ffi::ibv_qp_state::IBV_QPS_RESET)?;
        self.mark_all_ended();
        Ok(())
    }

    /// The caller has checked `destroyed`. After a failure the operations stay in flight, and the state of the queue
    /// pair is unknown: the verb is not called again.
    pub(super) fn destroy(&self) -> Result<()> {
        self.close();
        self.destroyed.set(true);
        // SAFETY: the caller has checked `destroyed`, so the queue pair is live. The flag prevents any later use,
        // also if the verb fails.
        let returned = unsafe { ffi::ibv_qp::destroy(self.queue_pair) };
        ffi::status("ibv_destroy_qp", returned).inspect_err(trace::object_leaked)?;
        self.mark_all_ended();
        Ok(())
    }

    fn mark_all_ended(&self) {
        if self.table.discard_outstanding() {
            self.unreported.unpolled.set(true);
            self.record_unreported(self.ended_by_force());
        }
        if let Some(credits) = &self.credits {
            credits.close();
        }
    }

    pub(crate) fn modify(&self, state: ffi::ibv_qp_state) -> Result<()> {
        if self.destroyed.get() {
            return Err(Error::invalid("ibv_modify_qp", "the channel's queue pair was destroyed"));
        }
        let mut attributes = ffi::ibv_qp_attr { qp_state: state, ..Default::default() };
        let mask = ffi::ibv_qp_attr_mask::IBV_QP_STATE.0 as c_int;
        // SAFETY: the destroy verb was not called, since `destroyed` is set before. So the queue pair is live.
        let returned = unsafe { ffi::ibv_modify_qp(self.queue_pair, &mut attributes, mask) };
        ffi::status("ibv_modify_qp", returned).inspect_err(trace::verb_failed)
    }

    /// Makes room for new completions after a reset.
    ///
    /// # Errors
    ///
    /// The completion queue cannot be polled, or does not become empty.
    pub(super) fn discard(&self) -> Result<()> {
        // SAFETY: the queue pair was reset, so it and its completion queue are live.
        let mut left = unsafe { (*(*self.queue_pair).send_cq).cqe };
        let mut failures = 0;
        // Only a faulty device has more completions than the queue can hold.
        while left >= 0 {
            match self.settle() {
                Ok(false) => return Ok(()),
                Err(TransportError::Verbs(error)) if failures == POLL_FAILURES => {
                    return Err(error);
                }
                Err(TransportError::Verbs(_)) => failures += 1,
                // They are unknown or of the earlier connection.
                Ok(true) | Err(_) => (failures, left) = (0, left - 1),
            }
        }
        let reason = "the completion queue does not become empty";
        Err(Error::with_reason("ibv_poll_cq", libc::ETIMEDOUT, reason))
    }
}

#[derive(Clone, Copy)]
pub(super) enum ScopeExit {
    /// After this deadline it stops the channel.
    Wait(Option<Instant>),
    /// Stops the channel if any is in flight.
    Stop,
}

impl Core {
    pub(super) fn has_unpolled(&self) -> bool {
        self.unreported.unpolled.get()
            || self.table.any_in_scope()
                && self.table.slots().iter().any(|slot| slot.state().is_unseen_in_scope())
    }

    /// Returns the first failure that no handle has reported. Then nothing of the scope is in flight, and its slots
    /// are free. It does not panic.
    #[inline(always)]
    pub(super) fn end_scope(&self, exit: ScopeExit) -> TransportResult<()> {
        let mut result = Ok(());
        if !self.is_scope_over() {
            result = self.poll_and_end_scope(exit);
        }
        self.update_fast_path();
        result
    }

    #[inline]
    fn is_scope_over(&self) -> bool {
        !self.table.any_in_scope() && !self.unreported.unpolled.get()
    }

    #[inline(never)]
    fn poll_and_end_scope(&self, exit: ScopeExit) -> TransportResult<()> {
        let mut polled = Ok(());
        if let ScopeExit::Wait(_) = exit {
            polled = match self.settle_last() {
                // It was the last one.
                Some(true) if !self.unreported.unpolled.get() => return Ok(()),
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

    #[inline]
    pub(super) fn wait_for_all(&self, deadline: Option<Instant>) -> TransportResult<()> {
        self.settle_scope()?;
        if self.is_scope_over() {
            return Ok(());
        }
        self.wait_for_all_on(deadline)
    }

    #[inline(never)]
    fn wait_for_all_on(&self, deadline: Option<Instant>) -> TransportResult<()> {
        let mut wait = Wait::new(deadline);
        while self.table.any_in_scope() {
            // A slot in use may be of an ended operation whose handle still exists.
            if !self.settle()? {
                if !self.is_scope_outstanding() {
                    break;
                }
                self.on_empty_poll(&mut wait).inspect_err(|_| self.stop())?;
            }
        }
        self.take_unreported()
    }

    fn take_unreported(&self) -> TransportResult<()> {
        // If false, there is no error.
        if !self.unreported.unpolled.replace(false) {
            return Ok(());
        }
        self.unreported.error.take().map_or(Ok(()), Err)
    }

    /// Does not wait.
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

    #[inline(never)]
    fn settle_scope_on(&self) -> TransportResult<()> {
        let mut settled = self.poller.has_rest();
        while settled && self.table.any_in_scope() {
            settled = self.settle_rest()?;
        }
        Ok(())
    }

    fn is_scope_outstanding(&self) -> bool {
        self.table.any_in_scope()
            && self.table.slots().iter().any(|slot| slot.state().is_outstanding_in_scope())
    }

    fn release_scope_slots(&self) -> TransportResult<()> {
        let mut result = Ok(());
        for slot in self.table.slots() {
            match slot.state() {
                State::Done | State::Discarded => {
                    result = result.and(self.take_result(slot).map(drop));
                }
                State::Seen => self.table.release_scoped(slot),
                _ => {}
            }
        }
        result
    }
}
