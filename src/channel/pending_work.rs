//! Unpolled operations: posted by `unsafe` methods, without a scope.

use std::time::Instant;

use super::Channel;
use super::core::Core;
use super::error::{TransportError, TransportResult};
use super::kinds::{
    CompareSwap, FetchAdd, Read, Send, SendWithImmediate, Write, WriteWithImmediate,
};
use super::operation::{Operation, Receive, Request};
use super::slot::{Owner, State};
use super::wait::Wait;
use crate::completion::WorkSuccess;
use crate::memory::RemoteMemoryRegion;
use crate::memory::{GatherBuffer, ScatterBuffer};

/// An operation that was posted by one of the `unsafe` methods of [`Channel`], such as
/// [`send_unpolled`](Channel::send_unpolled).
///
/// It is a number: it borrows neither the channel nor the buffer, so a struct can hold all three, for
/// any time. Ask the channel for its result with
/// [`poll`](Self::poll) or [`wait`](Self::wait).
///
/// Dropping it leaves the operation in flight, and its place in the queue taken until the channel
/// is [reset](Channel::reset).
#[derive(Debug)]
#[must_use = "the buffer is in use until the work was polled"]
pub struct PendingWork {
    wr_id: u64,
    /// Names the channel that it was posted on.
    identity: u32,
    /// Whether the result was returned; the slot may then have another owner.
    taken: bool,
}

impl PendingWork {
    fn new(core: &Core, wr_id: u64) -> Self {
        Self { wr_id, identity: core.identity, taken: false }
    }

    /// Checks that the table of this channel holds the operation.
    fn check(&self, core: &Core) -> TransportResult<()> {
        if self.taken || self.identity != core.identity {
            return Err(TransportError::UnknownWork);
        }
        Ok(())
    }

    /// Polls once, without waiting: the result, or `None` if the operation is still in flight.
    ///
    /// Once it has returned the operation's own result (success, [`Work`](TransportError::Work),
    /// [`Stopped`](TransportError::Stopped) or [`Closed`](TransportError::Closed)), the device no longer
    /// uses the buffer, and another poll returns [`UnknownWork`](TransportError::UnknownWork).
    ///
    /// # Errors
    ///
    /// The operation's own failure; or
    ///
    ///  - [`Verbs`](TransportError::Verbs), [`UnknownCompletion`](TransportError::UnknownCompletion):
    ///    polling failed. The operation is **still in flight**.
    ///  - [`UnknownWork`](TransportError::UnknownWork): it is of another channel, or its result was
    ///    already returned.
    pub fn poll(&mut self, channel: &mut Channel<'_>) -> Option<TransportResult<WorkSuccess>> {
        let core = channel.core();
        if let Err(error) = self.check(core) {
            return Some(Err(error));
        }
        if let Some(result) = self.ended(core) {
            return Some(result);
        }
        let polled = core.progress();
        core.tell_results();
        match polled {
            Ok(_) => self.ended(core),
            Err(error) => Some(Err(error)),
        }
    }

    /// The result, if the operation has ended.
    fn ended(&mut self, core: &Core) -> Option<TransportResult<WorkSuccess>> {
        // The table is that of a later connection.
        if !core.is_of_connection(self.wr_id) {
            self.taken = true;
            return Some(Err(TransportError::Stopped));
        }
        let slot = core.table.slot(self.wr_id as u32 as usize)?;
        match slot.state() {
            State::InFlight(Owner::Token) => None,
            State::Done(Owner::Token) | State::Discarded(Owner::Token) => {
                self.taken = true;
                Some(core.take_result(slot))
            }
            _ => Some(Err(TransportError::UnknownWork)),
        }
    }

    /// Waits until the operation has ended, however long that takes.
    ///
    /// # Errors
    ///
    /// As [`poll`](Self::poll). If polling fails, the channel is stopped, so the operation has ended in
    /// any case, except with [`UnknownWork`](TransportError::UnknownWork) for another channel's work.
    pub fn wait(self, channel: &mut Channel<'_>) -> TransportResult<WorkSuccess> {
        self.wait_with(channel, None)
    }

    /// Waits until the operation has ended, or the deadline has passed.
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait), and
    ///
    ///  - [`TimedOut`](TransportError::TimedOut): the channel was stopped, and everything that was in
    ///    flight has ended.
    pub fn wait_deadline(
        self,
        channel: &mut Channel<'_>,
        deadline: Instant,
    ) -> TransportResult<WorkSuccess> {
        self.wait_with(channel, Some(deadline))
    }

    fn wait_with(
        mut self,
        channel: &mut Channel<'_>,
        deadline: Option<Instant>,
    ) -> TransportResult<WorkSuccess> {
        let (core, mut wait) = (channel.core(), Wait::new(deadline));
        self.check(core)?;
        loop {
            if let Some(result) = self.ended(core) {
                core.tell_results();
                return result;
            }
            let progress = match core.progress() {
                Ok(true) => Ok(()),
                Ok(false) => core.on_empty_poll(&mut wait),
                Err(error) => Err(error),
            };
            if let Err(error) = progress {
                core.stop();
                let _ = self.ended(core);
                return Err(error);
            }
        }
    }
}

/// # Unpolled operations
///
/// These are the primitives under the safe methods: each posts one operation, and the caller keeps the
/// buffer valid until it has ended.
///
/// The borrow of the buffer ends with the call, but the operation does not. Until the operation has
/// ended, the memory must stay registered, the program must not write it, and if the operation writes
/// it, the program must not read it either. The operation has ended when [`PendingWork::poll`] or
/// [`PendingWork::wait`] has returned its result, or when the channel was dropped, closed or
/// [reset](Self::reset).
///
/// These rules apply to the elements of the operation only. Other parts of the same region can be used
/// meanwhile, through `slice` and `slice_mut` of the region, which touch no elements but their own. A
/// reference to the whole region (`&region[..]`, `region.iter()`, an index) covers the elements of the
/// operation too, and is not allowed.
///
/// When posting fails, nothing was posted:
///
///  - [`QueueFull`](TransportError::QueueFull): as much is in flight as the channel was built for.
///  - [`Verbs`](TransportError::Verbs): an argument is wrong, or the device has refused it; or the
///    provider cannot tell whether the device has it, and the channel was stopped.
///  - [`Stopped`](TransportError::Stopped), [`Closed`](TransportError::Closed): an earlier failure has
///    stopped the channel.
impl Channel<'_> {
    /// `ibv_post_send`: posts a send, to be polled by hand. See [`send`](Self::send).
    ///
    /// # Errors
    ///
    /// [Those of unpolled operations](Self#unpolled-operations).
    ///
    /// # Safety
    ///
    /// The caller keeps the memory valid [until the operation has ended](Self#unpolled-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub unsafe fn send_unpolled(
        &mut self,
        buffer: &impl GatherBuffer,
    ) -> TransportResult<PendingWork> {
        let mut list = buffer.gather()?;
        // SAFETY: the caller keeps the memory until the operation has ended.
        unsafe { self.post_unpolled(Request::new(Send {}), list.as_mut()) }
    }

    /// `ibv_post_send`: posts a send with an immediate, to be polled by hand. See [`send_with_immediate`](Self::send_with_immediate).
    ///
    /// # Errors
    ///
    /// [Those of unpolled operations](Self#unpolled-operations).
    ///
    /// # Safety
    ///
    /// The caller keeps the memory valid [until the operation has ended](Self#unpolled-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub unsafe fn send_with_immediate_unpolled(
        &mut self,
        buffer: &impl GatherBuffer,
        immediate: u32,
    ) -> TransportResult<PendingWork> {
        let mut list = buffer.gather()?;
        // SAFETY: the caller keeps the memory until the operation has ended.
        unsafe { self.post_unpolled(Request::new(SendWithImmediate { immediate }), list.as_mut()) }
    }

    /// `ibv_post_recv`: posts a receive, to be polled by hand. See [`receive`](Self::receive).
    ///
    /// # Errors
    ///
    /// [Those of unpolled operations](Self#unpolled-operations).
    ///
    /// # Safety
    ///
    /// The caller keeps the memory valid [until the operation has ended](Self#unpolled-operations).
    #[doc(alias = "ibv_post_recv")]
    #[inline]
    pub unsafe fn receive_unpolled(
        &mut self,
        buffer: &mut impl ScatterBuffer,
    ) -> TransportResult<PendingWork> {
        let mut list = buffer.scatter()?;
        // SAFETY: the caller keeps the memory until the operation has ended.
        unsafe { self.post_unpolled(Receive, list.as_mut()) }
    }

    /// `ibv_post_send`: posts an RDMA write, to be polled by hand. See [`write`](Self::write).
    ///
    /// # Errors
    ///
    /// [Those of unpolled operations](Self#unpolled-operations).
    ///
    /// # Safety
    ///
    /// The caller keeps the memory valid [until the operation has ended](Self#unpolled-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub unsafe fn write_unpolled(
        &mut self,
        buffer: &impl GatherBuffer,
        remote: impl Into<RemoteMemoryRegion>,
    ) -> TransportResult<PendingWork> {
        let remote = remote.into();
        let mut list = buffer.gather()?;
        // SAFETY: the caller keeps the memory until the operation has ended.
        unsafe { self.post_unpolled(Request::new(Write { remote }), list.as_mut()) }
    }

    /// `ibv_post_send`: posts an RDMA write with an immediate, to be polled by hand. See [`write_with_immediate`](Self::write_with_immediate).
    ///
    /// # Errors
    ///
    /// [Those of unpolled operations](Self#unpolled-operations).
    ///
    /// # Safety
    ///
    /// The caller keeps the memory valid [until the operation has ended](Self#unpolled-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub unsafe fn write_with_immediate_unpolled(
        &mut self,
        buffer: &impl GatherBuffer,
        remote: impl Into<RemoteMemoryRegion>,
        immediate: u32,
    ) -> TransportResult<PendingWork> {
        let remote = remote.into();
        let mut list = buffer.gather()?;
        // SAFETY: the caller keeps the memory until the operation has ended.
        unsafe {
            self.post_unpolled(
                Request::new(WriteWithImmediate { remote, immediate }),
                list.as_mut(),
            )
        }
    }

    /// `ibv_post_send`: posts an RDMA read, to be polled by hand. See [`read`](Self::read).
    ///
    /// # Errors
    ///
    /// [Those of unpolled operations](Self#unpolled-operations).
    ///
    /// # Safety
    ///
    /// The caller keeps the memory valid [until the operation has ended](Self#unpolled-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub unsafe fn read_unpolled<B: ScatterBuffer>(
        &mut self,
        buffer: &mut B,
        remote: impl Into<RemoteMemoryRegion>,
    ) -> TransportResult<PendingWork> {
        let remote = remote.into();
        let mut list = buffer.scatter()?;
        // SAFETY: the caller keeps the memory until the operation has ended.
        unsafe {
            self.post_unpolled(
                Request::new(Read { remote, shared: B::PEERS_MAY_WRITE }),
                list.as_mut(),
            )
        }
    }

    /// `ibv_post_send`: posts an atomic compare-and-swap, to be polled by hand. See [`compare_swap`](Self::compare_swap).
    ///
    /// # Errors
    ///
    /// [Those of unpolled operations](Self#unpolled-operations).
    ///
    /// # Safety
    ///
    /// The caller keeps the memory valid [until the operation has ended](Self#unpolled-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub unsafe fn compare_swap_unpolled(
        &mut self,
        buffer: &mut impl ScatterBuffer,
        remote: impl Into<RemoteMemoryRegion>,
        compare: u64,
        swap: u64,
    ) -> TransportResult<PendingWork> {
        let remote = remote.into();
        let mut list = buffer.scatter()?;
        // SAFETY: the caller keeps the memory until the operation has ended.
        unsafe {
            self.post_unpolled(Request::new(CompareSwap { remote, compare, swap }), list.as_mut())
        }
    }

    /// `ibv_post_send`: posts an atomic fetch-and-add, to be polled by hand. See [`fetch_add`](Self::fetch_add).
    ///
    /// # Errors
    ///
    /// [Those of unpolled operations](Self#unpolled-operations).
    ///
    /// # Safety
    ///
    /// The caller keeps the memory valid [until the operation has ended](Self#unpolled-operations).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub unsafe fn fetch_add_unpolled(
        &mut self,
        buffer: &mut impl ScatterBuffer,
        remote: impl Into<RemoteMemoryRegion>,
        add: u64,
    ) -> TransportResult<PendingWork> {
        let remote = remote.into();
        let mut list = buffer.scatter()?;
        // SAFETY: the caller keeps the memory until the operation has ended.
        unsafe { self.post_unpolled(Request::new(FetchAdd { remote, add }), list.as_mut()) }
    }

    /// # Safety
    ///
    /// The caller keeps the memory in the list valid until the operation has ended, as for all unpolled
    /// operations.
    #[inline]
    unsafe fn post_unpolled<O: Operation>(
        &mut self,
        operation: O,
        list: &mut [crate::ffi::ibv_sge],
    ) -> TransportResult<PendingWork> {
        let core = self.core();
        // SAFETY: the caller keeps the memory until the operation has ended.
        let slot = unsafe { core.post(operation, list, Owner::Token) }?;
        Ok(PendingWork::new(core, slot.wr_id()))
    }
}
