//! How a task runs a reactor.

use std::future::poll_fn;
use std::io;
#[cfg(feature = "tokio")]
use std::os::fd::AsFd;
#[cfg(feature = "tokio")]
use std::pin::pin;
use std::task::{Context as TaskContext, Poll};
#[cfg(feature = "tokio")]
use std::{future::Future, task::ready};

use super::reactor::Reactor;
use super::share::{Lock, Share, release_quietly};
use crate::channel::TransportError;
#[cfg(feature = "tokio")]
use crate::device::on_tokio::{EVENTS, register};
use crate::error::{Error, Result};
use crate::trace;

impl<S: Share> Reactor<S> {
    /// Runs the reactor: polls, spins for the [set number of turns](Self::spin), then arms the queue and sleeps. It returns
    /// when the reactor is [stopped](Self::stop), or after an error, which ends all operations of all channels.
    ///
    /// `poll_readable` waits for the descriptor ([`AsFd`]) as the runtime does it: it returns [`Poll::Ready`] if the
    /// descriptor may have become readable, or has got an error, since the last call, and otherwise has the task woken
    /// then. The descriptor has an error when the device is pulled out; the reactor then ends with `EIO`.
    ///
    /// Run it in one task at a time. If that task is dropped, the channels' futures wait until it is run again; feature
    /// `tracing` has a warning, also if it has never run and a future is dropped that waited.
    ///
    /// # Errors
    ///
    /// Those of [`turn`](Self::turn), [`arm`](Self::arm) and `poll_readable`.
    pub async fn run<F>(&self, mut poll_readable: F) -> Result<()>
    where
        F: FnMut(&mut TaskContext<'_>) -> Poll<io::Result<()>>,
    {
        let mut running = Running::default();
        let _runner = Runner(self);
        let ended = poll_fn(|cx| self.poll_run(&mut running, cx, &mut poll_readable)).await;
        if let Err(error) = ended {
            self.stop(TransportError::Verbs(error));
        }
        ended
    }

    fn poll_run<F>(
        &self,
        running: &mut Running,
        cx: &mut TaskContext<'_>,
        mut poll_readable: F,
    ) -> Poll<Result<()>>
    where
        F: FnMut(&mut TaskContext<'_>) -> Poll<io::Result<()>>,
    {
        // First, so that a stop after the turn wakes this task.
        if self.set_runner(cx) {
            return Poll::Ready(Ok(()));
        }
        loop {
            if self.turn()? > 0 {
                *running = Running::default();
                break;
            }
            if std::mem::take(&mut running.woken) {
                // An edge-triggered runtime tells only once that the descriptor has an error.
                self.queue.check_device()?;
            }
            if running.armed {
                match poll_readable(cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Ok(())) => *running = Running { woken: true, ..Running::default() },
                    Poll::Ready(Err(error)) => {
                        let errno = error.raw_os_error().unwrap_or(libc::EIO);
                        return Poll::Ready(Err(Error::new("poll", errno)));
                    }
                }
                break;
            }
            if running.idle < self.spin {
                running.idle += 1;
                break;
            }
            // And once more: what came before the queue was armed raises no event.
            self.arm()?;
            running.armed = true;
        }
        // Other tasks run first.
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    /// Returns whether the reactor was stopped.
    fn set_runner(&self, cx: &TaskContext<'_>) -> bool {
        let guard = self.share.lock();
        let is_same = guard.runner.as_ref().is_some_and(|own| own.will_wake(cx.waker()));
        let is_stopped = guard.is_stopped;
        drop(guard);
        if is_same || is_stopped {
            return is_stopped;
        }
        let waker = cx.waker().clone();
        let mut guard = self.share.lock();
        let (before, is_stopped) = (guard.runner.replace(waker), guard.is_stopped);
        drop(guard);
        drop(before);
        is_stopped
    }

    /// Runs the reactor on tokio: see [`run`](Self::run). To be spawned as a task, on a runtime of either kind; of
    /// [`Local`](crate::future::Local), on a `LocalSet`.
    ///
    /// # Errors
    ///
    /// Those of [`run`](Self::run), and what tokio reports when it registers the descriptor.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime whose I/O is enabled
    /// ([`enable_io`](tokio::runtime::Builder::enable_io)).
    #[cfg(feature = "tokio")]
    pub async fn run_on_tokio(&self) -> Result<()> {
        let file = register(self.as_fd())?;
        let mut ready = pin!(file.ready(EVENTS));
        self.run(|cx| {
            ready!(ready.as_mut().poll(cx))?.clear_ready();
            ready.set(file.ready(EVENTS));
            Poll::Ready(Ok(()))
        })
        .await
    }
}

/// The future of [`run`](Reactor::run): what it says if it is dropped, such as with its runtime, while operations wait.
struct Runner<'a, S: Share>(&'a Reactor<S>);

impl<S: Share> Drop for Runner<'_, S> {
    fn drop(&mut self) {
        let guard = self.0.share.lock();
        if !guard.is_stopped && guard.core.next_busy(0).is_some() {
            trace::reactor_stands("its task was dropped while operations were in flight");
        }
        release_quietly(guard);
    }
}

/// What a task that runs a reactor remembers.
#[derive(Default)]
struct Running {
    /// Turns in a row that found nothing.
    idle: u32,
    /// Whether the queue was armed, and nothing was found since.
    armed: bool,
    /// Whether the descriptor was readable, and nothing was found since.
    woken: bool,
}
