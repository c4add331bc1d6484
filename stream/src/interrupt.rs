//! Ends the waits of streams that are being connected when their hub is stopped.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
#[cfg(feature = "tokio")]
use std::{sync::Arc, task::Waker};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::hub::Inner;
use crate::state::Interrupt;

/// A connect that is under way. Until this is dropped, [`State::stop`](crate::state::State::stop) interrupts it.
pub(crate) struct Connecting<'a> {
    hub: &'a Inner,
    number: u64,
}

impl<'a> Connecting<'a> {
    /// # Errors
    ///
    ///  - The hub was stopped.
    pub(crate) fn new(hub: &'a Inner, interrupt: Interrupt) -> io::Result<Self> {
        let mut state = hub.lock();
        if let Some(error) = state.stopped {
            drop(state);
            return Err(error.into());
        }
        let number = state.next_connect;
        state.next_connect += 1;
        state.connecting.insert(number, interrupt);
        Ok(Self { hub, number })
    }
}

impl Drop for Connecting<'_> {
    fn drop(&mut self) {
        if self.hub.is_copy() {
            return;
        }
        // A waker is code of the program's: it is dropped when the lock is released.
        let interrupt = self.hub.lock().connecting.remove(&self.number);
        drop(interrupt);
    }
}

impl Inner {
    /// # Errors
    ///
    ///  - The hub was stopped.
    pub(crate) fn check_stopped(&self) -> io::Result<()> {
        self.lock().stopped.map_or(Ok(()), |error| Err(error.into()))
    }

    /// Waits until a file is ready.
    ///
    /// # Errors
    ///
    ///  - `TimedOut`: the deadline has passed.
    ///  - The hub was stopped.
    pub(crate) fn wait_for(
        &self,
        file: BorrowedFd<'_>,
        events: PollFlags,
        deadline: Instant,
    ) -> io::Result<()> {
        let stopped = self.sockets.stopped();
        loop {
            self.check_stopped()?;
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let mut files = [
                PollFd::from_borrowed_fd(file, events),
                PollFd::from_borrowed_fd(stopped, PollFlags::IN),
            ];
            // Rounded up, or the last of it would be spent in short sleeps.
            let left = Timespec::try_from(left + Duration::from_micros(1)).ok();
            match poll(&mut files, left.as_ref()) {
                Ok(_) if files[0].revents().is_empty() => {}
                Ok(_) => return self.check_stopped(),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Waits for a future, until the hub is stopped.
    ///
    /// # Errors
    ///
    ///  - The hub was stopped.
    ///  - Those of the future.
    #[cfg(feature = "tokio")]
    pub(crate) async fn unless_stopped<T>(
        &self,
        future: impl Future<Output = io::Result<T>>,
    ) -> io::Result<T> {
        let mut future = std::pin::pin!(future);
        let mut noted: Option<(Arc<Waker>, Connecting<'_>)> = None;
        std::future::poll_fn(|cx| {
            match &noted {
                Some((waker, _)) if waker.will_wake(cx.waker()) => self.check_stopped()?,
                _ => {
                    let waker = Arc::new(cx.waker().clone());
                    let interrupt = Interrupt::Task(waker.clone());
                    noted = Some((waker, Connecting::new(self, interrupt)?));
                }
            }
            future.as_mut().poll(cx)
        })
        .await
    }
}

/// Has a thread's reads and writes of a stream end when the hub is stopped.
pub(crate) fn of_stream<'a>(hub: &'a Inner, stream: &impl AsFd) -> io::Result<Connecting<'a>> {
    let stream = UnixStream::from(stream.as_fd().try_clone_to_owned()?);
    Connecting::new(hub, Interrupt::Stream(stream))
}
