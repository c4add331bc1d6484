use std::time::Instant;

use super::Channel;
use super::core::Core;
use super::error::{TransportError, TransportResult};
use super::posting::{IntoReceive, IntoSend, WorkRequest, list_of};
use super::slot::{Owner, State};
use super::wait::Wait;
use crate::verbs::completion::WorkSuccess;
use crate::verbs::memory::{GatherBuffer, RemoteMemoryRegion, ScatterBuffer};
use crate::verbs::operation::{ReadWorkRequest, WriteWorkRequest};

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
    /// That of the channel that posted it.
    identity: u64,
    /// The result was returned. The slot may then have another owner.
    taken: bool,
}

impl PendingWork {
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
        let settled = core.settle();
        self.ended(core).or_else(|| settled.err().map(Err))
    }

    fn ended(&mut self, core: &Core) -> Option<TransportResult<WorkSuccess>> {
        let Some(slot) = core.table.slot_of(self.wr_id) else {
            // The table is that of a later connection.
            self.taken = true;
            return Some(Err(TransportError::Stopped));
        };
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
    pub fn wait_until(
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
        let core = channel.core();
        self.check(core)?;
        let waited = core.settle_until(&mut Wait::new(deadline), || self.ended(core));
        waited.unwrap_or_else(|error| {
            core.stop();
            let _ = self.ended(core);
            Err(error)
        })
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
    /// `ibv_poll_cq`: takes all completions that are there, without waiting. Each [`PendingWork`] has its result then.
    ///
    /// # Errors
    ///
    ///  - [`Verbs`](TransportError::Verbs), [`UnknownCompletion`](TransportError::UnknownCompletion): polling failed. What
    ///    is in flight stays in flight.
    #[doc(alias = "ibv_poll_cq")]
    pub fn poll(&mut self) -> TransportResult<()> {
        while self.core().settle()? {}
        Ok(())
    }

    /// `ibv_post_send`, `ibv_post_recv`: posts any request, to be polled by hand.
    ///
    /// # Errors
    ///
    /// [Those of unpolled operations](Self#unpolled-operations).
    ///
    /// # Safety
    ///
    /// The caller keeps the memory valid [until the operation has ended](Self#unpolled-operations), also that of a buffer
    /// that the request owns, which is dropped when this returns. The result of a receive does not set the length of a
    /// [`PooledBuffer`](crate::PooledBuffer), which it does not know: the program does.
    #[doc(alias = "ibv_post_send")]
    #[doc(alias = "ibv_post_recv")]
    #[inline]
    pub unsafe fn post_unpolled<R: WorkRequest>(
        &mut self,
        request: R,
    ) -> TransportResult<PendingWork> {
        let core = self.core();
        let (operation, mut buffer) = request.split();
        let mut list = list_of::<R>(&core.settings.limits, &mut buffer)?;
        // SAFETY: the caller keeps the memory until the operation has ended.
        let slot = unsafe { core.post(operation, list.as_mut(), Owner::Token) }?;
        Ok(PendingWork { wr_id: slot.wr_id(), identity: core.identity, taken: false })
    }

    /// `ibv_post_send`: posts a send. See [`post_unpolled`](Self::post_unpolled).
    ///
    /// # Errors
    ///
    /// [Those of unpolled operations](Self#unpolled-operations).
    ///
    /// # Safety
    ///
    /// That of [`post_unpolled`](Self::post_unpolled).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub unsafe fn send_unpolled<M: IntoSend>(
        &mut self,
        message: M,
    ) -> TransportResult<PendingWork> {
        // SAFETY: the caller keeps the contract.
        unsafe { self.post_unpolled(message.into_send()) }
    }

    /// `ibv_post_recv`: posts a receive. See [`post_unpolled`](Self::post_unpolled).
    ///
    /// # Errors
    ///
    /// [Those of unpolled operations](Self#unpolled-operations).
    ///
    /// # Safety
    ///
    /// That of [`post_unpolled`](Self::post_unpolled).
    #[doc(alias = "ibv_post_recv")]
    #[inline]
    pub unsafe fn receive_unpolled<M: IntoReceive>(
        &mut self,
        room: M,
    ) -> TransportResult<PendingWork> {
        // SAFETY: the caller keeps the contract.
        unsafe { self.post_unpolled(room.into_receive()) }
    }

    /// `ibv_post_send`: posts an RDMA write. See [`post_unpolled`](Self::post_unpolled).
    ///
    /// # Errors
    ///
    /// [Those of unpolled operations](Self#unpolled-operations).
    ///
    /// # Safety
    ///
    /// That of [`post_unpolled`](Self::post_unpolled).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub unsafe fn write_unpolled<D: GatherBuffer>(
        &mut self,
        data: D,
        remote: impl Into<RemoteMemoryRegion>,
    ) -> TransportResult<PendingWork> {
        // SAFETY: the caller keeps the contract.
        unsafe { self.post_unpolled(WriteWorkRequest::new(data, remote)) }
    }

    /// `ibv_post_send`: posts an RDMA read. See [`post_unpolled`](Self::post_unpolled).
    ///
    /// # Errors
    ///
    /// [Those of unpolled operations](Self#unpolled-operations).
    ///
    /// # Safety
    ///
    /// That of [`post_unpolled`](Self::post_unpolled).
    #[doc(alias = "ibv_post_send")]
    #[inline]
    pub unsafe fn read_unpolled<D: ScatterBuffer>(
        &mut self,
        buffer: D,
        remote: impl Into<RemoteMemoryRegion>,
    ) -> TransportResult<PendingWork> {
        // SAFETY: the caller keeps the contract.
        unsafe { self.post_unpolled(ReadWorkRequest::new(buffer, remote)) }
    }
}
