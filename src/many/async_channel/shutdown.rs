//! Shutting an asynchronous channel down, as a future.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::handover::Cancelled;
use super::state::{Shared, State};
use super::user::User;
use crate::channel::TransportError;

/// Shuts a channel down: see [`AsyncChannel::shutdown`](crate::AsyncChannel::shutdown).
#[must_use = "futures do nothing unless polled"]
pub struct AsyncShutdown {
    shared: User,
    /// Its place among those that wait.
    ticket: Option<u64>,
    /// When the last send had ended: the number of polls so far. Messages that they found have arrived, and are kept.
    polls: Option<u64>,
}

impl AsyncShutdown {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        Self { shared: User::new(shared), ticket: None, polls: None }
    }
}

impl Future for AsyncShutdown {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Self { shared, ticket, polls } = &mut *self;
        shared.with(|state: &mut State| {
            if !state.draining {
                state.draining = true;
                // Those that were not posted yet fail.
                state.wake_all_for_room();
            }
            state.progress();
            let mut has_arrived = || {
                let polls = *polls.get_or_insert_with(|| shared.registry.polls_begun());
                shared.registry.has_arrived(polls, shared)
            };
            let is_over =
                state.ended.is_some() || state.channel.outstanding_sends() == 0 && has_arrived();
            if !is_over {
                match *ticket {
                    Some(ticket) => {
                        state.shutdowns.set_waker(ticket, cx.waker(), &mut state.later);
                    }
                    None => *ticket = Some(state.shutdowns.join(cx.waker())),
                }
                return Poll::Pending;
            }
            if let Some(ticket) = ticket.take() {
                state.shutdowns.remove(ticket, &mut state.later);
            }
            // What has just arrived may be in the inbox.
            state.progress();
            state.end(TransportError::Stopped);
            Poll::Ready(())
        })
    }
}

impl Drop for AsyncShutdown {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            self.shared.cancel(Cancelled::Shutdown(ticket));
        }
    }
}

impl fmt::Debug for AsyncShutdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncShutdown").finish_non_exhaustive()
    }
}
