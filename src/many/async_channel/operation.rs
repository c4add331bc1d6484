//! An operation on the send queue, as a future.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use super::handover::Cancelled;
use super::state::{Shared, State};
use super::user::User;
use crate::channel::{
    Later, OperationError, OwnedBuffer, OwnedResult, Refused, TransportError, WorkRequest,
};
use crate::error::err_from_call;

/// An operation of an [`AsyncChannel`](crate::AsyncChannel): see [`AsyncChannel::run`](crate::AsyncChannel::run).
///
/// It is posted when it is first polled, or once there is room for it, and with
/// [flow control](crate::ChannelBuilder::flow_control) a credit: operations are posted in the order of their
/// first polls. Its output is the buffer and the completion.
///
/// Dropping it before it was posted gives the buffer up and sends nothing. Dropping it later discards the
/// result only: the operation goes on, and the channel drops the buffer when the device is done with it.
#[must_use = "futures do nothing unless polled"]
pub struct AsyncOperation<R: WorkRequest> {
    shared: User,
    /// Until it is posted.
    request: Option<R>,
    stage: Stage,
}

#[derive(Clone, Copy, Debug)]
enum Stage {
    New,
    /// The ticket is that of the line for room.
    InLine(u64),
    /// The number is that of the request.
    Posted(u64),
    Over,
}

impl<R: WorkRequest> AsyncOperation<R> {
    #[inline]
    pub(super) fn new(shared: &Arc<Shared>, request: R) -> Self {
        Self { shared: User::new(shared), request: Some(request), stage: Stage::New }
    }
}

// Nothing in it is pinned.
impl<R: WorkRequest> Unpin for AsyncOperation<R> {}

impl<R: WorkRequest> Future for AsyncOperation<R>
where
    R::Kept: OwnedBuffer,
{
    type Output = OwnedResult<R::Kept>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<OwnedResult<R::Kept>> {
        match self.stage {
            Stage::Posted(wr_id) => self.poll_posted(wr_id, cx),
            Stage::New | Stage::InLine(_) => self.poll_to_post(cx),
            Stage::Over => {
                let error = TransportError::UnknownWork;
                Poll::Ready(Err(OperationError { error, buffer: None }))
            }
        }
    }
}

// Results are returned where they are found: they have 80 bytes, which take as many instructions to move as a lock.
impl<R: WorkRequest> AsyncOperation<R>
where
    R::Kept: OwnedBuffer,
{
    #[inline]
    fn poll_to_post(&mut self, cx: &Context<'_>) -> Poll<OwnedResult<R::Kept>> {
        let Self { shared, request, stage } = self;
        let mut state = shared.lock();
        if let Err(error) = post(&mut state, shared, request, stage, cx) {
            shared.release(state);
            return Poll::Ready(Err(error));
        }
        shared.release(state);
        Poll::Pending
    }

    #[inline]
    fn poll_posted(&mut self, wr_id: u64, cx: &Context<'_>) -> Poll<OwnedResult<R::Kept>> {
        let Self { shared, stage, .. } = self;
        let mut state = shared.lock();
        loop {
            if let Some(success) = state.channel.take_task_success(wr_id) {
                state.wake_room();
                *stage = Stage::Over;
                shared.release(state);
                return Poll::Ready(Ok(success));
            }
            match progress(&mut state, wr_id, cx) {
                Progress::Success => {}
                Progress::Failure => {
                    let failure = take_failure(&mut state, wr_id);
                    *stage = Stage::Over;
                    shared.release(state);
                    return Poll::Ready(err_from_call(failure));
                }
                Progress::Pending => {
                    shared.release(state);
                    return Poll::Pending;
                }
            }
        }
    }
}

/// Posts an operation, unless it is not its turn or there is no room.
#[inline]
fn post<R: WorkRequest>(
    state: &mut State,
    shared: &Arc<Shared>,
    request: &mut Option<R>,
    stage: &mut Stage,
    cx: &Context<'_>,
) -> Result<(), OperationError<R::Kept>>
where
    R::Kept: OwnedBuffer,
{
    if let Some(error) = state.refusal() {
        let request = request.take();
        return fail(state, stage, Refused { error, request });
    }
    let is_next = match *stage {
        Stage::InLine(ticket) => state.room.is_first(ticket),
        _ => state.room.is_empty(),
    };
    if is_next {
        let Some(taken) = request.take() else {
            return Err(TransportError::UnknownWork.into());
        };
        match state.channel.post_task(taken, cx.waker()) {
            Ok(wr_id) => {
                if let Stage::InLine(ticket) = *stage {
                    state.room.remove(ticket, &mut state.later);
                    // There may be room for more than one.
                    state.wake_room();
                }
                *stage = Stage::Posted(wr_id);
                return Ok(());
            }
            Err(refused) => {
                state.lacks_credit = refused.error == TransportError::NoCredit;
                if state.lacks_credit {
                    pause(state, shared);
                }
                let is_full = refused.error.is_queue_full() && state.channel.has_queues().0;
                if !is_full && !state.lacks_credit {
                    state.post_failed(refused.error);
                    return fail(state, stage, refused);
                }
                *request = refused.request;
            }
        }
    }
    match *stage {
        Stage::InLine(ticket) => state.room.set_waker(ticket, cx.waker(), &mut state.later),
        _ => *stage = Stage::InLine(state.room.join(cx.waker())),
    }
    Ok(())
}

/// Has the first in line look again when it may ask for credit, unless the end of a read will do that.
#[cold]
fn pause(state: &mut State, shared: &Arc<Shared>) {
    if let Some(pause) = state.start_pause() {
        shared.registry.set_alarm(Instant::now() + pause, shared.token);
    }
}

/// Gives up the place in line.
#[cold]
fn fail<T, R: WorkRequest>(
    state: &mut State,
    stage: &mut Stage,
    refused: Refused<R>,
) -> Result<T, OperationError<R::Kept>>
where
    R::Kept: OwnedBuffer,
{
    if let Stage::InLine(ticket) = *stage {
        state.room.remove(ticket, &mut state.later);
        state.wake_room();
    }
    *stage = Stage::Over;
    Err(refused.into())
}

/// How far an operation is that was posted.
enum Progress {
    Pending,
    Success,
    Failure,
}

/// Polls if the operation has not ended.
#[inline(never)]
fn progress(state: &mut State, wr_id: u64, cx: &Context<'_>) -> Progress {
    let mut ended = state.channel.has_task_ended(wr_id);
    if ended.is_none() {
        // So that this task is not woken by what it finds itself.
        let mut own = state.channel.replace_task_waker(wr_id, None);
        state.progress();
        ended = state.channel.has_task_ended(wr_id);
        let is_pending = ended.is_none() && state.ended.is_none();
        if is_pending {
            let same = if own.as_ref().is_some_and(|own| own.will_wake(cx.waker())) {
                own.take()
            } else {
                None
            };
            let waker = same.unwrap_or_else(|| cx.waker().clone());
            state.channel.replace_task_waker(wr_id, Some(waker));
        }
        state.later.extend(own.map(Later::Drop));
        if is_pending {
            return Progress::Pending;
        }
    }
    if ended == Some(true) { Progress::Success } else { Progress::Failure }
}

/// The failure of an operation, or of its channel.
#[cold]
#[inline(never)]
fn take_failure<B: OwnedBuffer>(state: &mut State, wr_id: u64) -> OperationError<B> {
    match state.ended {
        // The device may still use the buffer, since nothing would end the operation.
        Some(error) if state.channel.has_task_ended(wr_id).is_none() => error.into(),
        _ => {
            let failure = state.channel.take_task_failure(wr_id);
            state.wake_room();
            state.failure(failure)
        }
    }
}

impl<R: WorkRequest> Drop for AsyncOperation<R> {
    #[inline(always)]
    fn drop(&mut self) {
        if matches!(self.stage, Stage::InLine(_) | Stage::Posted(_)) {
            cancel(&self.shared, self.stage);
        }
    }
}

#[cold]
#[inline(never)]
fn cancel(shared: &Shared, stage: Stage) {
    match stage {
        Stage::InLine(ticket) => shared.cancel(Cancelled::Room(ticket)),
        Stage::Posted(wr_id) => shared.cancel_posted(wr_id),
        Stage::New | Stage::Over => {}
    }
}

impl<R: WorkRequest> fmt::Debug for AsyncOperation<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncOperation").field("stage", &self.stage).finish_non_exhaustive()
    }
}
