//! Waiting for the kernel's files on tokio.

use std::io;
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
    // SAFETY: the borrow keeps the descriptor open until the `AsyncFd` is dropped or forgotten. It is always the same one.
    let registered = unsafe { AsyncFd::register_with_interest(file, EVENTS) };
    registered.map_err(|error| {
        let errno = io::Error::from(error).raw_os_error().unwrap_or(libc::EIO);
        Error::new("epoll_ctl", errno)
    })
}

/// Waits until the file is readable or has an error.
#[cfg(feature = "rdmacm")]
pub(crate) async fn readable(file: BorrowedFd<'_>) -> Result<()> {
    match register(file)?.ready(EVENTS).await {
        Ok(_) => Ok(()),
        Err(error) => Err(Error::new("epoll_wait", error.raw_os_error().unwrap_or(libc::EIO))),
    }
}
