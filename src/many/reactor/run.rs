//! Running a reactor, as a future.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use super::Reactor;
use crate::channel::TransportError;
use crate::error::{Error, Result};

/// Runs a reactor: see [`Reactor::run`].
#[must_use = "futures do nothing unless polled"]
pub struct ReactorRun<'a, F> {
    reactor: &'a Reactor,
    poll_readable: F,
    /// Turns in a row that found nothing.
    idle: u32,
    /// Whether the queue was armed, and nothing was found since.
    armed: bool,
    /// Whether the descriptor was readable, and nothing was found since.
    woken: bool,
}

impl<'a, F> ReactorRun<'a, F> {
    pub(super) fn new(reactor: &'a Reactor, poll_readable: F) -> Self {
        Self { reactor, poll_readable, idle: 0, armed: false, woken: false }
    }
}

// Nothing in it is pinned.
impl<F> Unpin for ReactorRun<'_, F> {}

impl<F> Future for ReactorRun<'_, F>
where
    F: FnMut(&mut Context<'_>) -> Poll<io::Result<()>>,
{
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let polled = self.poll_once(cx);
        if let Poll::Ready(Err(error)) = &polled {
            self.reactor.stop(TransportError::Verbs(*error));
        }
        polled
    }
}

impl<F> ReactorRun<'_, F>
where
    F: FnMut(&mut Context<'_>) -> Poll<io::Result<()>>,
{
    fn poll_once(&mut self, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let registry = &self.reactor.registry;
        // First, so that what is closed or stopped after the turn wakes this task.
        registry.set_runner(cx.waker());
        loop {
            if registry.is_stopped() {
                return Poll::Ready(Ok(()));
            }
            if self.reactor.turn()? > 0 {
                (self.idle, self.armed, self.woken) = (0, false, false);
                return again(cx);
            }
            if std::mem::take(&mut self.woken) {
                // An edge-triggered runtime tells only once that the descriptor has an error.
                registry.queue.check_device()?;
            }
            if !self.armed {
                if self.idle < self.reactor.spin {
                    self.idle += 1;
                    return again(cx);
                }
                self.reactor.arm()?;
                self.armed = true;
                // Once more: what came before the queue was armed raises no event.
                continue;
            }
            return match (self.poll_readable)(cx) {
                Poll::Pending => Poll::Pending,
                Poll::Ready(Ok(())) => {
                    (self.idle, self.armed, self.woken) = (0, false, true);
                    again(cx)
                }
                Poll::Ready(Err(error)) => {
                    let errno = error.raw_os_error().unwrap_or(libc::EIO);
                    Poll::Ready(Err(Error::new("poll", errno)))
                }
            };
        }
    }
}

/// Lets other tasks run first.
fn again<T>(cx: &Context<'_>) -> Poll<T> {
    cx.waker().wake_by_ref();
    Poll::Pending
}

impl<F> fmt::Debug for ReactorRun<'_, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReactorRun").field("armed", &self.armed).finish_non_exhaustive()
    }
}
