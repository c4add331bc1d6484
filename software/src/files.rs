//! Waiting for files to become readable.

use std::ffi::c_int;
use std::time::Duration;

pub(crate) fn wait_for(fd: c_int) -> libc::pollfd {
    libc::pollfd { fd, events: libc::POLLIN, revents: 0 }
}

/// Sleeps until one of the files is readable, or the time has passed. Returns whether one may be readable: an error
/// counts, since the next read reports it.
pub(crate) fn wait(files: &mut [libc::pollfd], timeout: Option<Duration>) -> bool {
    let timeout = timeout.map(|timeout| libc::timespec {
        tv_sec: timeout.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_nsec: timeout.subsec_nanos() as _,
    });
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: there are as many live structures, and the time is null or valid.
    unsafe { libc::ppoll(files.as_mut_ptr(), files.len() as _, timeout, std::ptr::null()) != 0 }
}
