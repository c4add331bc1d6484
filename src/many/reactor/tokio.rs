//! Running a reactor on tokio.

use std::io;
use std::os::fd::AsFd;
use std::task::{Poll, ready};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::Reactor;
use crate::error::{Error, Result};

impl Reactor {
    /// Runs the reactor on tokio: see [`run`](Self::run). To be spawned as a task, on a runtime of either
    /// kind.
    ///
    /// # Errors
    ///
    /// Those of [`run`](Self::run), and what tokio reports when it registers the descriptor.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime whose I/O is enabled
    /// ([`enable_io`](tokio::runtime::Builder::enable_io)).
    pub async fn run_on_tokio(&self) -> Result<()> {
        // SAFETY: the borrow keeps the reactor, and with it the open descriptor, until `file` is dropped. It
        // is always the same descriptor.
        let file = unsafe { AsyncFd::register_with_interest(self.as_fd(), Interest::READABLE) };
        let file = file.map_err(|error| failed(error.into()))?;
        self.run(|cx| {
            ready!(file.poll_read_ready(cx))?.clear_ready();
            Poll::Ready(Ok(()))
        })
        .await
    }
}

fn failed(error: io::Error) -> Error {
    Error::new("epoll_ctl", error.raw_os_error().unwrap_or(libc::EIO))
}
