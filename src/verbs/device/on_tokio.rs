use std::os::fd::BorrowedFd;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::base::{Error, Result};

/// The files of a removed device have an error.
pub(crate) const EVENTS: Interest = Interest::READABLE.add(Interest::ERROR);

/// # Panics
///
/// Outside of a tokio runtime with I/O.
pub(crate) fn register(file: BorrowedFd<'_>) -> Result<AsyncFd<BorrowedFd<'_>>> {
    // The borrow keeps the descriptor open until the `AsyncFd` is dropped or forgotten, as the unsafe successor of this
    // function demands. That is newer than tokio's LTS release.
    #[allow(deprecated)]
    let registered = AsyncFd::with_interest(file, EVENTS);
    registered.map_err(|error| Error::new("epoll_ctl", error.raw_os_error().unwrap_or(libc::EIO)))
}

#[cfg(feature = "rdmacm")]
pub(crate) async fn readable(file: BorrowedFd<'_>) -> Result<()> {
    match register(file)?.ready(EVENTS).await {
        Ok(_) => Ok(()),
        Err(error) => Err(Error::new("epoll_wait", error.raw_os_error().unwrap_or(libc::EIO))),
    }
}
