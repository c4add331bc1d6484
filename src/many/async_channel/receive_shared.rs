//! The next message of a channel that a shared receive queue feeds, as a future.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::handover::Cancelled;
use super::state::{Shared, State};
use super::user::User;
use crate::channel::{OperationError, OwnedBuffer, OwnedResult, SharedReceives, TransportError};

/// The next message: see [`AsyncChannel::receive_shared`](crate::AsyncChannel::receive_shared).
///
/// It holds no buffer. Dropping it gives its place in line up, and loses no message.
#[must_use = "futures do nothing unless polled"]
pub struct AsyncSharedReceive<B: OwnedBuffer> {
    shared: User,
    receives: SharedReceives<B>,
    stage: Stage,
}

#[derive(Clone, Copy)]
enum Stage {
    New,
    /// In line, with this ticket.
    Waiting(u64),
    Over,
}

impl<B: OwnedBuffer> AsyncSharedReceive<B> {
    pub(super) fn new(shared: &Arc<Shared>, receives: &SharedReceives<B>) -> Self {
        Self { shared: User::new(shared), receives: receives.clone(), stage: Stage::New }
    }
}

impl<B: OwnedBuffer> Future for AsyncSharedReceive<B> {
    type Output = OwnedResult<B>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<OwnedResult<B>> {
        let Self { shared, receives, stage } = &mut *self;
        shared.with(|state| {
            let ticket = match *stage {
                Stage::New => state.receivers.join(cx.waker()),
                Stage::Waiting(ticket) => ticket,
                Stage::Over => {
                    let error = TransportError::UnknownWork;
                    return Poll::Ready(Err(OperationError { error, buffer: None }));
                }
            };
            let polled = state.next_shared_message(receives, ticket, cx);
            *stage = if polled.is_pending() { Stage::Waiting(ticket) } else { Stage::Over };
            polled
        })
    }
}

impl State {
    /// The next message, for the receive with this ticket.
    fn next_shared_message<B: OwnedBuffer>(
        &mut self,
        receives: &SharedReceives<B>,
        ticket: u64,
        cx: &Context<'_>,
    ) -> Poll<OwnedResult<B>> {
        if !self.channel.has_shared_message() {
            // So that this task is not woken by what it finds itself.
            self.receivers.clear_waker(ticket, &mut self.later);
            self.progress();
        }
        let taken = match receives.take(&mut self.channel) {
            Ok(Some(message)) => Ok(message),
            Ok(None) => match self.refusal() {
                Some(error) => Err(OperationError { error, buffer: None }),
                None => {
                    self.receivers.set_waker(ticket, cx.waker(), &mut self.later);
                    return Poll::Pending;
                }
            },
            Err(error) => Err(self.failure(error)),
        };
        self.receivers.remove(ticket, &mut self.later);
        self.wake_receiver();
        Poll::Ready(taken)
    }
}

impl<B: OwnedBuffer> Drop for AsyncSharedReceive<B> {
    fn drop(&mut self) {
        if let Stage::Waiting(ticket) = self.stage {
            self.shared.cancel(Cancelled::Receive(ticket));
        }
    }
}

impl<B: OwnedBuffer> fmt::Debug for AsyncSharedReceive<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncSharedReceive").finish_non_exhaustive()
    }
}
