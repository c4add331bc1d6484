//! An operation on the send queue, as a future.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::state::{Cancelled, Shared, State};
use crate::channel::{
    OperationError, OwnedBuffer, OwnedResult, OwnedWork, TaskRequest, TransportError,
};
use crate::completion::WorkSuccess;

/// A send, write, read or atomic operation of an [`AsyncChannel`](crate::AsyncChannel).
///
/// It is posted when it is first polled, or once there is room for it: operations are posted in the order
/// of their first polls. Its output is the buffer and the completion.
///
/// Dropping it before it was posted gives the buffer up and sends nothing. Dropping it later discards the
/// result only: the operation goes on, and the channel drops the buffer when the device is done with it.
#[must_use = "futures do nothing unless polled"]
pub struct AsyncOperation<B: OwnedBuffer> {
    shared: Arc<Shared>,
    request: TaskRequest,
    stage: Stage<B>,
}

enum Stage<B: OwnedBuffer> {
    /// The ticket is that of the line for room.
    New {
        buffer: Option<B>,
        ticket: Option<u64>,
    },
    Posted(OwnedWork<B>),
    Over,
}

impl<B: OwnedBuffer> AsyncOperation<B> {
    pub(super) fn new(shared: &Arc<Shared>, request: TaskRequest, buffer: B) -> Self {
        let stage = Stage::New { buffer: Some(buffer), ticket: None };
        Self { shared: shared.clone(), request, stage }
    }
}

/// The output of an operation's future.
type Output<B> = Result<(B, WorkSuccess), OperationError<B>>;

// Nothing in it is pinned.
impl<B: OwnedBuffer> Unpin for AsyncOperation<B> {}

impl<B: OwnedBuffer> Future for AsyncOperation<B> {
    type Output = Output<B>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Output<B>> {
        let Self { shared, request, stage } = &mut *self;
        let polled = shared.with(|state| match stage {
            Stage::New { buffer, ticket } => {
                let polled = post(state, *request, buffer, ticket, cx)?;
                Ok(polled.map(|work| {
                    work.set_first_waker(&mut state.channel, cx.waker());
                    *stage = Stage::Posted(work);
                    None
                }))
            }
            Stage::Posted(work) => poll_posted(state, work, cx).map(|polled| polled.map(Some)),
            Stage::Over => Err(OperationError { error: TransportError::UnknownWork, buffer: None }),
        });
        let output = match polled {
            // It was posted just now.
            Ok(Poll::Ready(None)) | Ok(Poll::Pending) => return Poll::Pending,
            Ok(Poll::Ready(Some(success))) => Ok(success),
            Err(error) => Err(error),
        };
        *stage = Stage::Over;
        Poll::Ready(output)
    }
}

/// Posts an operation, unless it is not its turn or there is no room.
fn post<B: OwnedBuffer>(
    state: &mut State,
    request: TaskRequest,
    buffer: &mut Option<B>,
    ticket: &mut Option<u64>,
    cx: &Context<'_>,
) -> Result<Poll<OwnedWork<B>>, OperationError<B>> {
    if let Some(error) = state.refusal() {
        return fail(state, ticket, error, buffer.take());
    }
    let is_next = match *ticket {
        Some(ticket) => state.room.is_first(ticket),
        None => state.room.is_empty(),
    };
    if is_next {
        let Some(taken) = buffer.take() else {
            return fail(state, ticket, TransportError::UnknownWork, None);
        };
        match state.channel.post_task(taken, request) {
            Ok(work) => {
                if let Some(ticket) = ticket.take() {
                    state.room.remove(ticket);
                    // There may be room for more than one.
                    state.wake_room();
                }
                return Ok(Poll::Ready(work));
            }
            Err(refused) => {
                let waits = refused.error.is_queue_full() && state.channel.has_queues().0;
                if !waits {
                    return fail(state, ticket, refused.error, Some(refused.buffer));
                }
                *buffer = Some(refused.buffer);
            }
        }
    }
    match *ticket {
        Some(ticket) => state.room.set_waker(ticket, cx.waker()),
        None => *ticket = Some(state.room.join(cx.waker())),
    }
    Ok(Poll::Pending)
}

/// Gives up the place in line.
fn fail<T, B>(
    state: &mut State,
    ticket: &mut Option<u64>,
    error: TransportError,
    buffer: Option<B>,
) -> Result<T, OperationError<B>> {
    if let Some(ticket) = ticket.take() {
        state.room.remove(ticket);
        state.wake_room();
    }
    Err(OperationError { error, buffer })
}

/// The result of an operation that was posted, if it has ended.
fn poll_posted<B: OwnedBuffer>(
    state: &mut State,
    work: &mut OwnedWork<B>,
    cx: &Context<'_>,
) -> Result<Poll<(B, WorkSuccess)>, OperationError<B>> {
    if !work.has_ended(&mut state.channel) {
        // So that this task is not woken by what it finds itself.
        let own = work.take_waker(&mut state.channel);
        state.progress();
        if !work.has_ended(&mut state.channel) {
            if let Some(error) = state.ended {
                // The device may still use the buffer, since nothing would end the operation.
                return Err(OperationError { error, buffer: None });
            }
            let waker = own.as_ref().filter(|own| own.will_wake(cx.waker()));
            work.set_waker(&mut state.channel, waker.unwrap_or(cx.waker()));
            return Ok(Poll::Pending);
        }
    }
    let ended = work.take_ended(&mut state.channel);
    state.wake_room();
    match ended {
        Ok(Some(OwnedResult { buffer, result })) => match result {
            Ok(success) => Ok(Poll::Ready((buffer, success))),
            Err(error) => Err(OperationError { error: state.reason(error), buffer: Some(buffer) }),
        },
        Ok(None) => Ok(Poll::Pending),
        Err(error) => Err(OperationError { error, buffer: None }),
    }
}

impl<B: OwnedBuffer> Drop for AsyncOperation<B> {
    fn drop(&mut self) {
        let cancelled = match &self.stage {
            Stage::New { ticket: Some(ticket), .. } => Cancelled::Room(*ticket),
            Stage::Posted(_) => Cancelled::Posted,
            _ => return,
        };
        // The handle first: it marks the operation.
        self.stage = Stage::Over;
        self.shared.cancel(cancelled);
    }
}

impl<B: OwnedBuffer> fmt::Debug for AsyncOperation<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncOperation").field("request", &self.request).finish_non_exhaustive()
    }
}
