//! Operations that own their buffers and wake tasks: what `AsyncChannel` is made of.

use std::task::Waker;

use super::Channel;
use super::error::TransportResult;
use super::in_flight::{Owner, Queue};
use super::operation::{
    CompareSwap, FetchAdd, Read, Receive, Request, Send, SendWithImmediate, Write,
    WriteWithImmediate,
};
use super::owned_buffer::OwnedBuffer;
use super::owned_results::PostError;
use super::owned_work::OwnedWork;
use crate::memory::RemoteMemoryRegion;

/// An operation on the send queue.
#[derive(Clone, Copy, Debug)]
pub(crate) enum TaskRequest {
    Send,
    SendWithImmediate { immediate: u32 },
    Write { remote: RemoteMemoryRegion },
    WriteWithImmediate { remote: RemoteMemoryRegion, immediate: u32 },
    Read { remote: RemoteMemoryRegion },
    CompareSwap { remote: RemoteMemoryRegion, compare: u64, swap: u64 },
    FetchAdd { remote: RemoteMemoryRegion, add: u64 },
}

impl Channel<'_> {
    /// Posts an operation whose end wakes the task that [`set_waker`](OwnedWork::set_waker) names.
    pub(crate) fn post_task<B: OwnedBuffer>(
        &mut self,
        buffer: B,
        request: TaskRequest,
    ) -> Result<OwnedWork<B>, PostError<B>> {
        let owner = Owner::Task;
        match request {
            TaskRequest::Send => self.post_owned(buffer, Request::new(Send {}), owner),
            TaskRequest::SendWithImmediate { immediate } => {
                self.post_owned(buffer, Request::new(SendWithImmediate { immediate }), owner)
            }
            TaskRequest::Write { remote } => {
                self.post_owned(buffer, Request::new(Write { remote }), owner)
            }
            TaskRequest::WriteWithImmediate { remote, immediate } => {
                let request = WriteWithImmediate { remote, immediate };
                self.post_owned(buffer, Request::new(request), owner)
            }
            TaskRequest::Read { remote } => self.post_owned(
                buffer,
                Request::new(Read { remote, shared: B::PEERS_MAY_WRITE }),
                owner,
            ),
            TaskRequest::CompareSwap { remote, compare, swap } => {
                self.post_owned(buffer, Request::new(CompareSwap { remote, compare, swap }), owner)
            }
            TaskRequest::FetchAdd { remote, add } => {
                self.post_owned(buffer, Request::new(FetchAdd { remote, add }), owner)
            }
        }
    }

    /// Posts a receive, as [`post_task`](Self::post_task).
    pub(crate) fn post_task_receive<B: OwnedBuffer>(
        &mut self,
        buffer: B,
    ) -> Result<OwnedWork<B>, PostError<B>> {
        self.post_owned(buffer, Receive, Owner::Task)
    }

    /// Polls until there is nothing more, and frees what dropped handles have left.
    pub(crate) fn progress_tasks(&mut self) -> TransportResult<()> {
        let core = self.core();
        core.release_dropped();
        // Until there is nothing in the batch either: nobody is told of what stays there. It ends, because
        // nothing is posted meanwhile.
        while core.progress()? {}
        Ok(())
    }

    /// As [`progress_tasks`](Self::progress_tasks), for what is in the channel's inbox. The shared completion queue
    /// is not polled: the reactor does that.
    pub(crate) fn progress_delivered(&mut self) -> TransportResult<()> {
        let core = self.core();
        core.release_dropped();
        core.progress_inbox()
    }

    /// Frees what dropped handles have left, as far as it has ended.
    pub(crate) fn release_dropped_tasks(&mut self) {
        self.core().release_dropped();
    }

    /// Moves the wakers of operations that have ended to `into`.
    pub(crate) fn take_woken(&mut self, into: &mut Vec<Waker>) {
        self.core().table.entries.take_woken(into);
    }

    /// Wakes every task that waits for an operation of this channel.
    pub(crate) fn wake_all_tasks(&mut self) {
        let core = self.core();
        for slot in core.table.slots() {
            core.table.entries.wake(slot.wr_id());
        }
    }

    /// The number of operations of the send queue that the device has.
    pub(crate) fn outstanding_sends(&mut self) -> u32 {
        self.core().table.outstanding_sends()
    }

    /// Whether one more operation can be posted to the send queue.
    pub(crate) fn has_room_for_send(&self) -> bool {
        self.core().table.has_room(Queue::Send)
    }

    /// Whether the channel was built for operations on the send queue, and for receives.
    pub(crate) fn has_queues(&self) -> (bool, bool) {
        let table = &self.core().table;
        (table.depth(Queue::Send) > 0, table.depth(Queue::Receive) > 0)
    }

    /// Ends everything that is in flight: see [`Link::end_now`](super::link::Link::end_now).
    pub(crate) fn end_tasks(&mut self) {
        self.link.end_now();
    }
}
