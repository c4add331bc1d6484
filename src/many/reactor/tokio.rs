//! Running a reactor on tokio.

use std::future::Future;
use std::io;
use std::os::fd::AsFd;
use std::pin::pin;
use std::task::{Poll, ready};

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::Reactor;
use crate::error::{Error, Result};

/// When a device is pulled out, its files have an error, and are not readable.
const EVENTS: Interest = Interest::READABLE.add(Interest::ERROR);

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
        let file = unsafe { AsyncFd::register_with_interest(self.as_fd(), EVENTS) };
        let file = file.map_err(|error| failed(error.into()))?;
        let mut ready = pin!(file.ready(EVENTS));
        self.run(|cx| {
            ready!(ready.as_mut().poll(cx))?.clear_ready();
            ready.set(file.ready(EVENTS));
            Poll::Ready(Ok(()))
        })
        .await
    }
}

fn failed(error: io::Error) -> Error {
    Error::new("epoll_ctl", error.raw_os_error().unwrap_or(libc::EIO))
}
