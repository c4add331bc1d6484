use std::time::Instant;

use super::core::Core;
use super::error::{TransportError, TransportResult};
use super::slot::{Slot, State};
use super::wait::Wait;
use crate::verbs::completion::WorkSuccess;

/// An operation that was posted with [`Channel::post_unpolled`](crate::Channel::post_unpolled).
///
/// It is a number: it borrows neither the channel nor the buffer, so a struct can hold all three, for
/// any time. Ask the channel for its result with
/// [`poll`](Self::poll) or [`wait`](Self::wait).
///
/// Dropping it leaves the operation in flight, and its place in the queue taken until the channel
/// is [reset](crate::Channel::reset).
#[derive(Debug)]
#[must_use = "the buffer is in use until the work was polled"]
pub struct PendingWork {
    wr_id: u64,
    /// That of the channel that posted it.
    identity: u64,
    /// The result was returned. The slot may then have another owner.
    taken: bool,
}

impl PendingWork {
    #[inline]
    pub(super) fn new(core: &Core, slot: &Slot) -> Self {
        Self { wr_id: slot.wr_id(), identity: core.identity, taken: false }
    }

    fn check(&self, core: &Core) -> TransportResult<()> {
        if self.taken || self.identity != core.identity {
            return Err(TransportError::UnknownWork);
        }
        Ok(())
    }

    fn ended(&mut self, core: &Core) -> Option<TransportResult<WorkSuccess>> {
        let Some(slot) = core.table.slot_of(self.wr_id) else {
            // The table is that of a later connection.
            self.taken = true;
            return Some(Err(TransportError::Stopped));
        };
        match slot.state() {
            State::Unscoped => None,
            State::UnscopedDone | State::UnscopedDiscarded => {
                self.taken = true;
                Some(core.take_result(slot))
            }
            _ => Some(Err(TransportError::UnknownWork)),
        }
    }

    pub(super) fn poll_on(&mut self, core: &Core) -> Option<TransportResult<WorkSuccess>> {
        if let Err(error) = self.check(core) {
            return Some(Err(error));
        }
        if let Some(result) = self.ended(core) {
            return Some(result);
        }
        let settled = core.settle();
        self.ended(core).or_else(|| settled.err().map(Err))
    }

    pub(super) fn wait_on(
        mut self,
        core: &Core,
        deadline: Option<Instant>,
    ) -> TransportResult<WorkSuccess> {
        self.check(core)?;
        let waited = core.settle_until(&mut Wait::new(deadline), || self.ended(core));
        waited.unwrap_or_else(|error| {
            core.stop();
            let _ = self.ended(core);
            Err(error)
        })
    }
}
