//! Running a reactor on tokio.

use std::future::Future;
use std::os::fd::AsFd;
use std::pin::pin;
use std::task::{Poll, ready};

use super::Reactor;
use crate::device::on_tokio::{EVENTS, register};
use crate::error::Result;

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
