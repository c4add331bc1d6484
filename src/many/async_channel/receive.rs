//! The next message, as a future.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::handover::Cancelled;
use super::state::{Shared, State};
use super::user::User;
use crate::channel::{OperationError, OwnedResult, TransportError};
use crate::many::pool::PooledBuffer;

/// The next message: see [`AsyncChannel::receive`](crate::AsyncChannel::receive).
#[must_use = "futures do nothing unless polled"]
pub struct AsyncReceive {
    shared: User,
    stage: Stage,
}

enum Stage {
    New(PooledBuffer),
    /// In line, with this ticket.
    Waiting(u64),
    Over,
}

type Output = OwnedResult<PooledBuffer>;

impl AsyncReceive {
    pub(super) fn new(shared: &Arc<Shared>, buffer: PooledBuffer) -> Self {
        Self { shared: User::new(shared), stage: Stage::New(buffer) }
    }
}

impl Future for AsyncReceive {
    type Output = Output;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Output> {
        let Self { shared, stage } = &mut *self;
        shared.with(|state| {
            let ticket = match std::mem::replace(stage, Stage::Over) {
                Stage::New(buffer) => state.join_receivers(buffer, cx)?,
                Stage::Waiting(ticket) => ticket,
                Stage::Over => {
                    let error = TransportError::UnknownWork;
                    return Poll::Ready(Err(OperationError { error, buffer: None }));
                }
            };
            let polled = state.next_message(ticket, cx);
            if polled.is_pending() {
                *stage = Stage::Waiting(ticket);
            }
            polled
        })
    }
}

impl State {
    /// Takes a place in the line of receives, and gives the channel a buffer.
    fn join_receivers(
        &mut self,
        buffer: PooledBuffer,
        cx: &Context<'_>,
    ) -> Result<u64, OperationError<PooledBuffer>> {
        let fail = |error, buffer| Err(OperationError { error, buffer });
        let has_room = self.channel.has_queues().1;
        if !has_room {
            return fail(TransportError::QueueFull, Some(buffer));
        }
        match self.refusal() {
            // Messages that have arrived before are still there.
            Some(_) if self.posted.len() > self.receivers.len() => {}
            Some(error) => return fail(error, Some(buffer)),
            None if self.posted.len() > self.receivers.len() + self.ahead => {}
            None => match self.channel.post_task_receive(buffer) {
                Ok(work) => self.posted.push_back(work),
                Err(refused) if refused.error.is_queue_full() => {
                    self.held.extend(refused.buffer);
                }
                Err(refused) => {
                    self.post_failed(refused.error);
                    return fail(refused.error, refused.buffer);
                }
            },
        }
        Ok(self.receivers.join(cx.waker()))
    }

    /// The next message, for the receive with this ticket.
    fn next_message(&mut self, ticket: u64, cx: &Context<'_>) -> Poll<Output> {
        if !self.has_message() {
            // So that this task is not woken by what it finds itself.
            self.receivers.clear_waker(ticket, &mut self.later);
            self.progress();
        }
        if !self.has_message() {
            let Some(error) = self.ended else {
                self.receivers.set_waker(ticket, cx.waker(), &mut self.later);
                return Poll::Pending;
            };
            self.receivers.remove(ticket, &mut self.later);
            return Poll::Ready(Err(OperationError { error, buffer: self.held.pop_front() }));
        }
        let Some(mut work) = self.posted.pop_front() else { return Poll::Pending };
        self.receivers.remove(ticket, &mut self.later);
        let ended = work.take_ended(&mut self.channel);
        if self.ended.is_none() {
            self.fill();
        }
        self.wake_receiver();
        let ended = ended.map_err(|error| self.failure(error));
        Poll::Ready(ended.and_then(|ended| ended.ok_or(TransportError::UnknownWork.into())))
    }

    /// Whether a message has arrived that nobody has taken, or a receive has failed.
    fn has_message(&mut self) -> bool {
        self.posted.front().is_some_and(|work| work.has_ended(&mut self.channel))
    }
}

impl Drop for AsyncReceive {
    fn drop(&mut self) {
        if let Stage::Waiting(ticket) = self.stage {
            self.shared.cancel(Cancelled::Receive(ticket));
        }
    }
}

impl fmt::Debug for AsyncReceive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncReceive").finish_non_exhaustive()
    }
}
