//! How C reports that a verb failed.

use std::ffi::c_int;
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::ptr::NonNull;

use crate::base::Error;

pub(crate) fn errno() -> c_int {
    // SAFETY: the location is valid for the calling thread.
    unsafe { *crate::base::linux::__errno_location() }
}

pub(crate) fn set_errno(errno: c_int) {
    // SAFETY: the location is valid for the calling thread.
    unsafe { *crate::base::linux::__errno_location() = errno }
}

/// For a pointer, or null with `errno`.
pub(crate) fn object<T>(verb: &'static str, pointer: *mut T) -> Result<NonNull<T>, Error> {
    NonNull::new(pointer).ok_or_else(|| Error::new(verb, errno()))
}

/// For 0 or the errno value. A few providers return the negated value, or -1 with `errno`.
#[inline]
pub(crate) fn status(verb: &'static str, returned: c_int) -> Result<(), Error> {
    if returned == 0 { Ok(()) } else { Err(failed(verb, returned)) }
}

/// For a count, negative on failure.
pub(crate) fn count(verb: &'static str, returned: isize) -> Result<usize, Error> {
    usize::try_from(returned).map_err(|_| failed(verb, c_int::try_from(returned).unwrap_or(-1)))
}

/// For a descriptor, negative on failure.
///
/// # Safety
///
/// `fd` is negative, or nothing else owns it.
pub(crate) unsafe fn new_fd(verb: &'static str, fd: c_int) -> Result<OwnedFd, Error> {
    if fd < 0 {
        return Err(failed(verb, fd));
    }
    // SAFETY: the caller vouches for it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Inlined, so that the compiler sees an error, and a loop around a verb does not check twice.
#[inline]
pub(crate) fn failed(verb: &'static str, returned: c_int) -> Error {
    Error::new(verb, errno_of(returned))
}

#[cold]
#[inline(never)]
fn errno_of(returned: c_int) -> c_int {
    if returned == -1 { errno() } else { returned.saturating_abs() }
}
