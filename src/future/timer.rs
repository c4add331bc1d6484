//! Makes a reactor's descriptor readable when its time has come, though nothing completes.
//!
//! A sender without credit asks the peer, and pauses before it asks again; no completion tells when the pause is over. And
//! on iWARP no completion tells that a connection has ended. The turns of the reactor look at the clock then.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::time::Instant;

use crate::error::{Error, Result};
use crate::ffi;

/// A timer of the kernel, and the file that a reactor sleeps on.
pub(super) struct Timer {
    timer: OwnedFd,
    /// An epoll instance: readable when the timer is, or the file of the completion queue.
    ready: OwnedFd,
}

impl Timer {
    /// `events` is the file of the completion queue.
    pub(super) fn new(events: BorrowedFd<'_>) -> Result<Self> {
        // SAFETY: these make new descriptors; no memory is involved.
        let (ready, timer) = unsafe {
            let ready = crate::linux::epoll_create1(crate::linux::EPOLL_CLOEXEC);
            let ready = descriptor("epoll_create1", ready)?;
            let flags = crate::linux::TFD_NONBLOCK | crate::linux::TFD_CLOEXEC;
            let timer = crate::linux::timerfd_create(libc::CLOCK_MONOTONIC, flags);
            (ready, descriptor("timerfd_create", timer)?)
        };
        for file in [events, timer.as_fd()] {
            let mut event =
                crate::linux::epoll_event { events: crate::linux::EPOLLIN as u32, u64: 0 };
            // SAFETY: the descriptors are open, and the event is valid.
            let done = unsafe {
                let (ready, file) = (ready.as_raw_fd(), file.as_raw_fd());
                crate::linux::epoll_ctl(ready, crate::linux::EPOLL_CTL_ADD, file, &mut event)
            };
            if done != 0 {
                return Err(last_error("epoll_ctl"));
            }
        }
        Ok(Self { timer, ready })
    }

    pub(super) fn ready(&self) -> BorrowedFd<'_> {
        self.ready.as_fd()
    }

    /// Makes the timer readable at `at`, or never. Until then it is not readable.
    pub(super) fn set(&self, at: Option<Instant>) {
        let nothing = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let left = at.map_or(nothing, |at| {
            // Zero would stop the timer.
            let left = at.saturating_duration_since(Instant::now());
            let nanos = libc::c_long::from(left.subsec_nanos().cast_signed());
            // 68 years at most.
            let seconds = i32::try_from(left.as_secs()).unwrap_or(i32::MAX).into();
            let nanos = if seconds == 0 { nanos.max(1) } else { nanos };
            libc::timespec { tv_sec: seconds, tv_nsec: nanos }
        });
        let value = crate::linux::itimerspec { it_interval: nothing, it_value: left };
        // SAFETY: the descriptor is open, and the value is valid, so this does not fail.
        unsafe {
            crate::linux::timerfd_settime(self.timer.as_raw_fd(), 0, &value, ptr::null_mut())
        };
    }
}

/// Takes over the result of a system call.
///
/// # Safety
///
/// `fd` is negative, or a descriptor that nothing else owns.
unsafe fn descriptor(call: &'static str, fd: RawFd) -> Result<OwnedFd> {
    if fd < 0 {
        return Err(last_error(call));
    }
    // SAFETY: the caller vouches for it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn last_error(call: &'static str) -> Error {
    let errno = io::Error::last_os_error().raw_os_error();
    Error::new(call, errno.unwrap_or_else(ffi::errno))
}
