use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use crate::base::{Result, ffi, linux};

/// An eventfd, readable from [`wake`](Self::wake) until [`drain`](Self::drain).
pub(crate) struct Waker(OwnedFd);

impl Waker {
    /// # Errors
    ///
    ///  - `EMFILE`, `ENFILE`: the process, or the machine, has too many files open.
    ///  - `ENOMEM`: out of memory.
    pub(crate) fn new() -> Result<Self> {
        let flags = linux::EFD_NONBLOCK | linux::EFD_CLOEXEC;
        // SAFETY: no memory is involved. The descriptor is new, and nothing else owns it.
        unsafe { ffi::new_fd("eventfd", linux::eventfd(0, flags)) }.map(Self)
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    pub(crate) fn wake(&self) {
        // SAFETY: the file is open.
        unsafe { linux::eventfd_write(self.fd(), 1) };
    }

    pub(crate) fn drain(&self) {
        let mut count = 0;
        // SAFETY: the file is open, and the number is writable.
        unsafe { linux::eventfd_read(self.fd(), &mut count) };
    }
}
