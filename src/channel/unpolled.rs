use std::time::Instant;

use super::Channel;
#[cfg(doc)]
use super::error::TransportError;
use super::error::TransportResult;
use super::pending_work::PendingWork;
use super::posting::{WorkRequest, list_of};
use super::slot::State;
use crate::verbs::completion::WorkSuccess;

impl PendingWork {
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
        self.poll_on(channel.core())
    }

    /// Waits until the operation has ended, however long that takes.
    ///
    /// # Errors
    ///
    /// As [`poll`](Self::poll). If polling fails, the channel is stopped, so the operation has ended in
    /// any case, except with [`UnknownWork`](TransportError::UnknownWork) for another channel's work.
    pub fn wait(self, channel: &mut Channel<'_>) -> TransportResult<WorkSuccess> {
        self.wait_on(channel.core(), None)
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
        self.wait_on(channel.core(), Some(deadline))
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
///  - [`Verbs`](TransportError::Verbs): in debug builds, memory of another protection domain or device. Release
///    builds do not look: there the operation ends with an error.
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
        let slot = unsafe { core.post(operation, list.as_mut(), State::Unscoped) }?;
        Ok(PendingWork::new(core, slot))
    }
}
