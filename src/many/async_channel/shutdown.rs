//! Shutting an asynchronous channel down, as a future.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::handover::Cancelled;
use super::state::{Shared, State};
use crate::channel::TransportError;

/// Shuts a channel down: see [`AsyncChannel::shutdown`](crate::AsyncChannel::shutdown).
#[must_use = "futures do nothing unless polled"]
pub struct AsyncShutdown {
    shared: Arc<Shared>,
    /// Its place among those that wait.
    ticket: Option<u64>,
}

impl AsyncShutdown {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        Self { shared: shared.clone(), ticket: None }
    }
}

impl Future for AsyncShutdown {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let Self { shared, ticket } = &mut *self;
        shared.with(|state: &mut State| {
            if !state.draining {
                state.draining = true;
                // Those that were not posted yet fail.
                state.wake_all_for_room();
            }
            state.progress();
            if state.ended.is_none() && state.channel.outstanding_sends() > 0 {
                match *ticket {
                    Some(ticket) => state.shutdowns.set_waker(ticket, cx.waker()),
                    None => *ticket = Some(state.shutdowns.join(cx.waker())),
                }
                return Poll::Pending;
            }
            if let Some(ticket) = ticket.take() {
                state.shutdowns.remove(ticket);
            }
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
