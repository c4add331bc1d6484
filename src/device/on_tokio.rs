//! Waiting for the kernel's files on tokio.

use std::os::fd::BorrowedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::error::{Error, Result};

/// When a device is pulled out, its files have an error, and are not readable.
pub(crate) const EVENTS: Interest = Interest::READABLE.add(Interest::ERROR);

/// Registers a file with the runtime, which then tells when it is readable or has an error.
///
/// # Panics
///
/// Outside of a tokio runtime whose I/O is enabled.
pub(crate) fn register(file: BorrowedFd<'_>) -> Result<AsyncFd<BorrowedFd<'_>>> {
    // The borrow keeps the descriptor open until the `AsyncFd` is dropped or forgotten, and it is always the same one: that
    // is what its successor, which is unsafe and newer than tokio's line of long support, asks for.
    #[allow(deprecated)]
    let registered = AsyncFd::with_interest(file, EVENTS);
    registered.map_err(|error| Error::new("epoll_ctl", error.raw_os_error().unwrap_or(libc::EIO)))
}

/// Waits until the file is readable or has an error.
#[cfg(feature = "rdmacm")]
pub(crate) async fn readable(file: BorrowedFd<'_>) -> Result<()> {
    match register(file)?.ready(EVENTS).await {
        Ok(_) => Ok(()),
        Err(error) => Err(Error::new("epoll_wait", error.raw_os_error().unwrap_or(libc::EIO))),
    }
}
