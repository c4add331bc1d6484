//! The end of a scope: waiting for its operations, and ending those that are left.

use std::time::Instant;

use super::core::Core;
use super::error::TransportResult;
use super::slot::{Owner, State};
use super::wait::Wait;

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
