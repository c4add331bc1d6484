//! Operations that own their buffers and wake tasks: what `AsyncChannel` is made of.

use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::Channel;
use super::core::Core;
use super::error::{TransportError, TransportResult};
use super::in_flight::Queue;
use super::operation_error::{OperationError, OwnedResult};
use super::owned_buffer::{Later, OwnedBuffer};
use super::owned_post::{Refused, post_owned, post_to_slot};
use super::owned_work::OwnedWork;
use super::polled::PolledCompletion;
use super::prepared::PreparedChannel;
use super::request::WorkRequest;
use super::slot::{Owner, State};
use crate::completion::WorkSuccess;
use crate::operation::ReceiveWorkRequest;

/// Marks operations whose handles were dropped, on any thread and without the channel.
pub(crate) struct TaskDrops(Arc<Core>);

impl TaskDrops {
    /// To be called when the handle of the operation with this number is dropped.
    pub(crate) fn mark(&self, wr_id: u64) {
        let table = &self.0.table;
        if let Some(slot) = table.slot(wr_id as u32 as usize) {
            table.owned.mark_dropped(&slot.entry, wr_id);
        }
    }
}

impl Channel<'_> {
    /// Posts an operation whose end wakes a task. Returns its number.
    ///
    /// The other methods of this block that take a number take one of this channel whose result was not taken.
    #[inline]
    pub(crate) fn post_task<R: WorkRequest>(
        &mut self,
        request: R,
        waker: &Waker,
    ) -> Result<u64, Refused<R>>
    where
        R::Kept: OwnedBuffer,
    {
        post_to_slot(self.core(), request, Owner::Task, |slot| {
            // There is none: it is taken when an operation ends, or its handle is dropped.
            slot.entry.waker.set(Some(waker.clone()));
            slot.wr_id()
        })
    }

    /// Whether an operation has ended, and is a success.
    pub(crate) fn has_task_ended(&self, wr_id: u64) -> Option<bool> {
        let slot = self.core().table.slot_of(wr_id)?;
        (!slot.state().is_outstanding()).then(|| slot.is_success())
    }

    /// The buffer and the completion of an operation that has ended, if it is a success, and the buffer of this type.
    #[inline]
    pub(crate) fn take_task_success<B: OwnedBuffer>(
        &mut self,
        wr_id: u64,
    ) -> Option<(B, WorkSuccess)> {
        let core = self.core();
        let slot = core.table.slot_of(wr_id)?;
        if slot.state() != State::Done(Owner::Task) || !slot.has_success() {
            return None;
        }
        let buffer = slot.entry.buffer.take()?;
        // As in `OwnedWork`: `fast_path` stays as it is.
        core.table.release_of(slot, Owner::Task);
        Some((buffer, slot.success()))
    }

    /// The failure of an operation that has ended, with its buffer.
    pub(crate) fn take_task_failure<B: OwnedBuffer>(&mut self, wr_id: u64) -> OperationError<B> {
        let core = self.core();
        let ended = core.table.slot_of(wr_id).map(|slot| core.take_owned(slot));
        match ended {
            Some(Err(failure)) => failure,
            _ => TransportError::UnknownWork.into(),
        }
    }

    /// Replaces the waker that is woken when an operation in flight ends. Returns the one before.
    pub(crate) fn replace_task_waker(&mut self, wr_id: u64, waker: Option<Waker>) -> Option<Waker> {
        self.core().table.slot_of(wr_id)?.entry.waker.replace(waker)
    }

    /// Where operations whose handles were dropped are marked.
    pub(crate) fn task_drops(&self) -> TaskDrops {
        TaskDrops(self.link.core.clone())
    }

    /// Ends the operation of a completion that was polled for this channel. Returns the waker of its task, if only
    /// that has to be woken.
    #[inline]
    pub(crate) fn complete_task(
        &mut self,
        polled: &PolledCompletion,
    ) -> TransportResult<Option<Waker>> {
        self.core().settle_polled(polled.completion())
    }

    /// Whether there are wakers to [take](Self::take_wakers).
    #[inline]
    pub(crate) fn has_wakers(&self) -> bool {
        self.core().table.owned.has_wakers()
    }

    /// Posts a receive, as [`post_task`](Self::post_task).
    pub(crate) fn post_task_receive<B: OwnedBuffer>(
        &mut self,
        buffer: B,
    ) -> OwnedResult<B, OwnedWork<B>> {
        post_owned(&self.link.core, ReceiveWorkRequest::new(buffer), Owner::Task)
    }

    /// Polls until there is nothing more, and frees what dropped handles have left.
    pub(crate) fn progress_tasks(&mut self) -> TransportResult<()> {
        let core = self.core();
        core.release_dropped();
        // It ends, because nothing is posted meanwhile.
        while core.settle()? {}
        Ok(())
    }

    /// As [`progress_tasks`](Self::progress_tasks), for what is in the channel's inbox. The shared completion queue
    /// is not polled: the reactor does that.
    pub(crate) fn progress_delivered(&mut self) -> TransportResult<()> {
        let core = self.core();
        core.release_dropped();
        core.settle_delivered()
    }

    /// Frees what dropped handles have left, as far as it has ended.
    pub(crate) fn release_dropped_tasks(&mut self) {
        self.core().release_dropped();
    }

    /// Moves what is to be done with the wakers of tasks to `into`.
    pub(crate) fn take_wakers(&mut self, into: &mut Vec<Later>) {
        self.core().table.owned.take_wakers(into);
    }

    /// Wakes every task that waits for an operation of this channel.
    pub(crate) fn wake_all_tasks(&mut self) {
        let core = self.core();
        for slot in core.table.slots() {
            core.table.owned.wake(&slot.entry);
        }
    }

    /// Whether a failure has stopped the channel, so that nothing can be posted any more.
    pub(crate) fn is_stopped(&self) -> bool {
        self.core().table.is_closed()
    }

    /// The number of operations of the send queue that the device has.
    pub(crate) fn outstanding_sends(&mut self) -> u32 {
        self.core().table.outstanding_sends()
    }

    /// Whether one more operation can be posted to the send queue.
    pub(crate) fn has_room_for_send(&self) -> bool {
        self.core().table.has_room(Queue::Send)
    }

    /// How long a send that was refused for lack of credit is to pause. `None`: the end of a read tells when it
    /// can be posted.
    pub(crate) fn credit_pause(&self) -> Option<Duration> {
        self.core().credit_pause()
    }

    /// Whether a send has no credit, and the end of a read will tell when it may have one.
    pub(crate) fn is_asking_for_credit(&self) -> bool {
        self.core().is_asking_for_credit()
    }

    /// Whether the channel was built for operations on the send queue, and for receives.
    pub(crate) fn has_queues(&self) -> (bool, bool) {
        let table = &self.core().table;
        (table.depth(Queue::Send) > 0, table.depth(Queue::Receive) > 0)
    }

    /// Whether the device may leave operations without completions when the connection has ended, as Soft-iWARP does.
    pub(crate) fn must_be_checked(&self) -> bool {
        self.link.queue_pair().protection_domain().context().is_iwarp()
    }

    /// Checks, at most once in [`DEVICE_CHECK_PERIOD`], that what is in flight can end.
    pub(crate) fn check_tasks(&mut self, now: Instant) -> TransportResult<()> {
        let core = self.core();
        if core.table.outstanding() > 0 { Ok(core.check_device_if_due(now)?) } else { Ok(()) }
    }

    /// Ends everything that is in flight, by the RESET state and without waiting. If that fails, it stays in flight.
    pub(crate) fn reset_tasks(&mut self) {
        self.core().try_reset();
    }

    /// Ends everything that is in flight: see [`Link::end_now`](super::link::Link::end_now).
    pub(crate) fn end_tasks(&mut self) {
        self.link.end_now();
    }
}

impl PreparedChannel<'_> {
    /// Posts a receive, as [`Channel::post_task_receive`], before the channel is connected. A handshake that fails ends
    /// it, and does not drop its buffer: see [`take_ended`](Self::take_ended).
    pub(crate) fn post_task_receive<B: OwnedBuffer>(
        &mut self,
        buffer: B,
    ) -> OwnedResult<B, OwnedWork<B>> {
        self.post_receive(ReceiveWorkRequest::new(buffer), Owner::Task)
    }

    /// The buffer and the completion of a receive, if it has ended: see [`OwnedWork::take_ended`].
    pub(crate) fn take_ended<B: OwnedBuffer>(
        &mut self,
        work: &mut OwnedWork<B>,
    ) -> OwnedResult<B, Option<(B, WorkSuccess)>> {
        work.take_ended_of(self.core())
    }
}
