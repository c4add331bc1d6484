//! What tells that the peer of a channel is gone. The queue pair does not: it sees nothing while nothing is sent.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

#[cfg(feature = "async")]
use crate::base::Error;
use crate::base::{Result, linux};
use crate::verbs::device::event_file;

#[allow(unreachable_pub, reason = "a sealed trait names it where there is the connection manager")]
pub trait PeerSign: Send + Sync {
    /// Makes an epoll instance readable, with this number from now on, when the peer may be gone.
    ///
    /// # Errors
    ///
    ///  - `ENOMEM`, `ENOSPC`: out of memory, or of files to watch. Not if the instance has the file already.
    fn watch(&self, peers: BorrowedFd<'_>, number: u64) -> Result<()>;

    /// Asks the kernel, without waiting.
    fn is_gone(&self) -> bool;
}

/// A stream socket: the peer has closed its end.
impl<S: AsFd + Send + Sync> PeerSign for S {
    fn watch(&self, peers: BorrowedFd<'_>, number: u64) -> Result<()> {
        event_file::watch(peers, self.as_fd(), linux::EPOLLRDHUP | linux::EPOLLET, number)
    }

    fn is_gone(&self) -> bool {
        event_file::poll(self.as_fd(), linux::POLLRDHUP, Instant::now()).unwrap_or(false)
    }
}

/// A duplicate of the socket, which keeps the connection open: its end is that of the channel.
///
/// # Errors
///
///  - `EMFILE`: the process has too many files open.
#[cfg(feature = "async")]
pub(crate) fn of_socket(socket: BorrowedFd<'_>) -> Result<Box<dyn PeerSign>> {
    match socket.try_clone_to_owned() {
        Ok(own) => Ok(Box::new(own)),
        Err(error) => Err(Error::new("dup", error.raw_os_error().unwrap_or(libc::EMFILE))),
    }
}
