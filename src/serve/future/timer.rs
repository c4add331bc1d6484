//! Makes a reactor's descriptor readable at a time, though nothing completes.
//!
//! A sender without credit pauses before it asks the peer again. On iWARP, connections end without a completion. The
//! reactor's turns then look at the clock.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::time::Instant;

use crate::base::{Result, ffi};
use crate::verbs::device::event_file;

pub(super) struct Timer {
    timer: OwnedFd,
    /// An epoll instance: readable when the timer or the completion queue's file is.
    ready: OwnedFd,
}

impl Timer {
    /// `queue`: the completion queue's files.
    pub(super) fn new(queue: [Option<BorrowedFd<'_>>; 3]) -> Result<Self> {
        // SAFETY: it makes a new descriptor; no memory is involved.
        let timer = unsafe {
            let flags = crate::base::linux::TFD_NONBLOCK | crate::base::linux::TFD_CLOEXEC;
            let timer = crate::base::linux::timerfd_create(libc::CLOCK_MONOTONIC, flags);
            ffi::new_fd("timerfd_create", timer)?
        };
        let files: Vec<_> = queue.into_iter().flatten().chain([timer.as_fd()]).collect();
        let ready = event_file::any_of(&files)?;
        Ok(Self { timer, ready })
    }

    pub(super) fn ready(&self) -> BorrowedFd<'_> {
        self.ready.as_fd()
    }

    /// Not readable before `at`, nor ever for `None`.
    pub(super) fn set(&self, at: Option<Instant>) {
        let nothing = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let left = at.map_or(nothing, |at| {
            // Zero would stop the timer.
            let left = at.saturating_duration_since(Instant::now());
            let nanos = libc::c_long::from(left.subsec_nanos().cast_signed());
            let seconds = i32::try_from(left.as_secs()).unwrap_or(i32::MAX).into();
            let nanos = if seconds == 0 { nanos.max(1) } else { nanos };
            libc::timespec { tv_sec: seconds, tv_nsec: nanos }
        });
        let value = crate::base::linux::itimerspec { it_interval: nothing, it_value: left };
        // SAFETY: the descriptor is open and the value valid, so this does not fail.
        unsafe {
            crate::base::linux::timerfd_settime(self.timer.as_raw_fd(), 0, &value, ptr::null_mut())
        };
    }
}
