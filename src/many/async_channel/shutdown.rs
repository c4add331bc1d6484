//! Shutting an asynchronous channel down, as a future.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::state::{Shared, State};
use crate::channel::TransportError;

/// Shuts a channel down: see [`AsyncChannel::shutdown`](crate::AsyncChannel::shutdown).
#[must_use = "futures do nothing unless polled"]
pub struct AsyncShutdown {
    shared: Arc<Shared>,
}

impl AsyncShutdown {
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        Self { shared: shared.clone() }
    }
}

impl Future for AsyncShutdown {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        self.shared.with(|state: &mut State| {
            if !state.draining {
                state.draining = true;
                // Those that were not posted yet fail.
                state.wake_all_for_room();
            }
            state.progress();
            if state.ended.is_none() && state.channel.outstanding_sends() > 0 {
                state.shutdown = Some(cx.waker().clone());
                return Poll::Pending;
            }
            state.end(TransportError::Stopped);
            Poll::Ready(())
        })
    }
}

impl fmt::Debug for AsyncShutdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncShutdown").finish_non_exhaustive()
    }
}
