use std::ffi::c_int;
use std::time::Instant;

use super::core::Core;
use super::credits::NO_CREDIT;
use super::error::{TransportError, TransportResult};
use super::operation::{Limits, Operation, Templates};
use super::slot::{Slot, State};
use crate::base::{err_from_call, ffi};
use crate::verbs::completion::WorkSuccess;
use crate::verbs::memory::{GatherBuffer, ScatterBuffer};
use crate::verbs::operation::sealed::Request;
use crate::verbs::operation::{Extra, ReceiveWorkRequest, SendQueueRequest, SendWorkRequest};

enum PostFailure<'a> {
    /// The device has not seen it.
    Refused(TransportError),
    /// The verb returned this. The slot is still free.
    Failed(&'a Slot, c_int),
}

impl Core {
    /// # Safety
    ///
    /// Until the state of the slot says that the operation has ended, the memory in `list` is valid. Meanwhile
    /// nothing writes it, and if the operation writes it, nothing reads it.
    #[inline(always)]
    pub(super) unsafe fn post<O: Operation>(
        &self,
        operation: O,
        list: &mut [ffi::ibv_sge],
        state: State,
    ) -> TransportResult<&Slot> {
        // SAFETY: as for this function.
        match unsafe { self.try_post(operation, list, state) } {
            Ok(slot) => Ok(slot),
            Err(PostFailure::Refused(error)) => Err(error),
            Err(PostFailure::Failed(slot, returned)) => {
                err_from_call(self.post_failed::<O>(slot, state, returned))
            }
        }
    }

    /// # Safety
    ///
    /// As for [`post`](Self::post), until [`post_failed`](Self::post_failed) was called after a failure.
    #[inline(always)]
    unsafe fn try_post<O: Operation>(
        &self,
        operation: O,
        list: &mut [ffi::ibv_sge],
        state: State,
    ) -> Result<&Slot, PostFailure<'_>> {
        operation.check(&self.settings.limits, list).map_err(PostFailure::Refused)?;
        let slot = self.table.free_slot(O::QUEUE);
        let Some(slot) = slot else {
            return Err(PostFailure::Refused(self.refusal(O::QUEUE)));
        };
        // SAFETY: a free slot means that the queue pair is live; the caller vouches for the memory.
        let returned = unsafe { self.post_raw(operation, slot.wr_id(), list) };
        if returned != 0 {
            return Err(PostFailure::Failed(slot, returned));
        }
        self.table.take(O::QUEUE, slot, state);
        if state != State::Scoped {
            // As `update_fast_path` does.
            self.fast_path.set(false);
        }
        Ok(slot)
    }

    /// # Safety
    ///
    /// As [`Operation::post`].
    #[inline(always)]
    unsafe fn post_raw<O: Operation>(
        &self,
        operation: O,
        wr_id: u64,
        list: &mut [ffi::ibv_sge],
    ) -> c_int {
        // SAFETY: the caller vouches for the queue pair and the memory. Only this function accesses the requests, one
        // thread at a time.
        unsafe { operation.post(&self.target.get(), self.prepared.get(), wr_id, list) }
    }

    /// If the wait fails, the channel is stopped.
    ///
    /// # Safety
    ///
    /// During the call, the memory in `list` is valid, nothing writes it, and if the operation writes it, nothing
    /// reads it.
    #[inline(always)]
    pub(super) unsafe fn run<O: Operation>(
        &self,
        operation: O,
        list: &mut [ffi::ibv_sge],
        deadline: Option<Instant>,
    ) -> TransportResult<WorkSuccess> {
        operation.check(&self.settings.limits, list)?;
        if !self.fast_path.get() {
            // Passing a copy keeps the original in registers on the fast path: its address goes to no function.
            let mut only;
            let list = match list {
                [piece] => {
                    only = [*piece];
                    &mut only[..]
                }
                list => list,
            };
            // SAFETY: the caller vouches for the memory.
            unsafe { self.run_slow_path(operation, list, deadline) }?;
            return Ok(self.blocking_success());
        }
        let wr_id = self.blocking_id.get();
        // SAFETY: the table is open, so the queue pair is live; the caller vouches for the memory.
        let returned = unsafe { self.post_raw(operation, wr_id, list) };
        if returned != 0 {
            return Err(self.blocking_failed::<O>(returned));
        }
        if let Err(found) = self.blocking_now(wr_id) {
            self.wait_for_blocking(found, deadline)?;
        }
        Ok(self.blocking_success())
    }

    /// [`blocking_success`](Self::blocking_success) then has the completion.
    ///
    /// # Safety
    ///
    /// As for [`run`](Self::run).
    #[inline(never)]
    unsafe fn run_slow_path<O: Operation>(
        &self,
        operation: O,
        list: &mut [ffi::ibv_sge],
        deadline: Option<Instant>,
    ) -> TransportResult<()> {
        if !self.table.has_room(O::QUEUE) {
            return Err(self.refusal(O::QUEUE));
        }
        if O::TAKES_RECEIVE && self.credits.is_some() {
            self.wait_for_blocking_credit(deadline)?;
        }
        // SAFETY: a free slot means that the queue pair is live; the caller vouches for the memory.
        let returned = unsafe { self.post_raw(operation, self.blocking_id.get(), list) };
        if returned != 0 {
            return Err(self.blocking_failed::<O>(returned));
        }
        self.wait_for_blocking(0, deadline)
    }

    #[cold]
    #[inline(never)]
    fn blocking_failed<O: Operation>(&self, returned: c_int) -> TransportError {
        self.ensure_not_posted::<O>(true);
        if self.table.of(O::QUEUE).is_empty() {
            // The channel has no such queue. The fast path does not check that.
            return TransportError::QueueFull;
        }
        ffi::failed(O::VERB, returned).into()
    }

    /// The slot is free afterwards. The device may still read the buffer, but not write it: see [`stop`](super::stop).
    #[cold]
    #[inline(never)]
    pub(super) fn post_failed<O: Operation>(
        &self,
        slot: &Slot,
        state: State,
        returned: c_int,
    ) -> TransportError {
        if returned == NO_CREDIT && O::TAKES_RECEIVE {
            return self.refuse_without_credit(1);
        }
        let error = ffi::failed(O::VERB, returned).into();
        // The device may have it nevertheless.
        self.table.take(O::QUEUE, slot, state);
        self.ensure_not_posted::<O>(false);
        self.release(slot);
        error
    }

    /// Stops the channel if the device may have the request.
    #[cold]
    #[inline(never)]
    fn ensure_not_posted<O: Operation>(&self, is_blocking: bool) {
        // SAFETY: as in `post_raw`.
        if !unsafe { Templates::may_be_posted(self.prepared.get(), O::QUEUE) } {
            return;
        }
        if is_blocking {
            self.begin_blocking();
        }
        let has_ended = self.try_stop();
        // A buffer that the device only reads is given back even if it may still read it.
        if !has_ended && O::WRITES {
            self.stop();
        }
        if is_blocking {
            self.end_blocking();
        }
    }
}

/// The elements of a request's buffer.
#[inline(always)]
pub(crate) fn list_of<R: WorkRequest>(
    limits: &Limits,
    buffer: &mut R::Buffer,
) -> TransportResult<<R::Buffer as GatherBuffer>::List> {
    match R::list(buffer) {
        Ok(list) => Ok(list),
        Err(error) => err_from_call(R::Operation::explain_buffer(limits, error).into()),
    }
}

/// A request that a [`Channel`](crate::Channel), a [`Scope`](crate::Scope) or an
/// [`AsyncChannel`](crate::AsyncChannel) carries out: their methods `run` and `post` take any.
///
/// The trait is sealed. [`SendWorkRequest`], [`WriteWorkRequest`](crate::WriteWorkRequest),
/// [`ReadWorkRequest`](crate::ReadWorkRequest), [`CompareSwapWorkRequest`](crate::CompareSwapWorkRequest),
/// [`FetchAddWorkRequest`](crate::FetchAddWorkRequest),
/// [`LocalInvalidateWorkRequest`](crate::operation::LocalInvalidateWorkRequest) and [`ReceiveWorkRequest`] have it.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a work request of a channel",
    label = "a request is needed here, such as `SendWorkRequest::new(buffer)`",
    note = "a channel has one peer, so its requests have no destination; flushes and atomic writes exist in batches of \
            queue pairs only"
)]
pub trait WorkRequest:
    Request<Operation: Operation, Buffer: GatherBuffer<Kept = <Self as WorkRequest>::Kept>>
{
    /// The buffer that the operation keeps while it is in flight, and gives back; `()` if the post copies the bytes.
    type Kept: GatherBuffer;
}

#[diagnostic::do_not_recommend]
impl<R: Request<Operation: Operation>> WorkRequest for R {
    type Kept = <R::Buffer as GatherBuffer>::Kept;
}

/// A message: a buffer, or a request that sends one.
///
/// The trait is sealed: every [`GatherBuffer`] and every [`SendWorkRequest`] has it.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not registered memory that the device can read",
    label = "a slice of a region is needed here, such as `region.slice(..)?`, or a `SendWorkRequest`",
    note = "bytes that are not registered can be sent as `Inline(bytes)`"
)]
pub trait IntoSend: sealed::Message {
    /// The request.
    type Request: WorkRequest + SendQueueRequest;

    /// The request that sends the message.
    fn into_send(self) -> Self::Request;
}

#[diagnostic::do_not_recommend]
impl<D: GatherBuffer> IntoSend for D {
    type Request = SendWorkRequest<D>;

    #[inline(always)]
    fn into_send(self) -> SendWorkRequest<D> {
        SendWorkRequest::new(self)
    }
}

impl<D: GatherBuffer, X: Extra> IntoSend for SendWorkRequest<D, X> {
    type Request = Self;

    #[inline(always)]
    fn into_send(self) -> Self {
        self
    }
}

/// Room for a message: a buffer, or a request that receives one.
///
/// The trait is sealed: every [`ScatterBuffer`] and every [`ReceiveWorkRequest`] has it.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not registered memory that the device can write",
    label = "needed: `region.slice_mut(..)?` of a `MemoryRegion`, or `region.slice(..)?` of a `SharedMemoryRegion`"
)]
pub trait IntoReceive: sealed::Room {
    /// The request.
    type Request: WorkRequest;

    /// The request that receives the message.
    fn into_receive(self) -> Self::Request;
}

#[diagnostic::do_not_recommend]
impl<D: ScatterBuffer> IntoReceive for D {
    type Request = ReceiveWorkRequest<D>;

    #[inline(always)]
    fn into_receive(self) -> ReceiveWorkRequest<D> {
        ReceiveWorkRequest::new(self)
    }
}

impl<D: ScatterBuffer> IntoReceive for ReceiveWorkRequest<D> {
    type Request = Self;

    #[inline(always)]
    fn into_receive(self) -> Self {
        self
    }
}

mod sealed {
    use super::*;

    pub trait Message {}

    #[diagnostic::do_not_recommend]
    impl<D: GatherBuffer> Message for D {}
    impl<D, X> Message for SendWorkRequest<D, X> {}

    pub trait Room {}

    #[diagnostic::do_not_recommend]
    impl<D: ScatterBuffer> Room for D {}
    impl<D> Room for ReceiveWorkRequest<D> {}
}

pub(crate) type KeptSend<M> = <<M as IntoSend>::Request as WorkRequest>::Kept;
pub(crate) type KeptReceive<M> = <<M as IntoReceive>::Request as WorkRequest>::Kept;
