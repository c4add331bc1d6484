//! Waking a thread that sleeps until a file is readable.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use crate::error::{Error, Result};
use crate::ffi;

/// An eventfd: readable from [`wake`](Self::wake) until [`drain`](Self::drain).
pub(crate) struct Waker(OwnedFd);

impl Waker {
    /// # Errors
    ///
    ///  - `EMFILE`, `ENFILE`: the process, or the machine, has too many files open.
    ///  - `ENOMEM`: out of memory.
    pub(crate) fn new() -> Result<Self> {
        // SAFETY: no memory is involved.
        let fd = unsafe {
            crate::linux::eventfd(0, crate::linux::EFD_NONBLOCK | crate::linux::EFD_CLOEXEC)
        };
        if fd < 0 {
            return Err(Error::new("eventfd", ffi::errno()));
        }
        // SAFETY: the descriptor is open, and nothing else owns it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    /// Makes the file readable. It fails only if it is readable already.
    pub(crate) fn wake(&self) {
        // SAFETY: the file is open.
        unsafe { crate::linux::eventfd_write(self.fd(), 1) };
    }

    /// Makes the file unreadable. It fails only if it is unreadable already.
    pub(crate) fn drain(&self) {
        let mut count = 0;
        // SAFETY: the file is open, and the number is writable.
        unsafe { crate::linux::eventfd_read(self.fd(), &mut count) };
    }
}
