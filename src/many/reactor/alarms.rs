//! Has channels served when their time has come, though nothing completes.
//!
//! A sender without credit asks the peer, and the end of the question wakes it. If the answers bring nothing, it pauses
//! before the next question, and no completion tells when the pause is over. And on iWARP no completion tells that a
//! connection has ended. The turns of the reactor look at the clock then, and a timer of the kernel makes the reactor's
//! descriptor readable for the next turn.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use crate::error::{Error, Result};
use crate::ffi;

/// When which channels, by their tokens, are to be served though nothing completes.
pub(in crate::many) struct Alarms {
    /// The earliest first.
    set: Mutex<BinaryHeap<Reverse<(Instant, u64)>>>,
    timer: OwnedFd,
    /// An epoll instance: readable when the timer is, or the file of the completion queue.
    ready: OwnedFd,
}

impl Alarms {
    /// `events` is the file of the completion queue.
    pub(in crate::many) fn new(events: BorrowedFd<'_>) -> Result<Self> {
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
        Ok(Self { set: Mutex::default(), timer, ready })
    }

    pub(in crate::many) fn ready(&self) -> BorrowedFd<'_> {
        self.ready.as_fd()
    }

    /// Has the channel with this token served at `at`.
    pub(in crate::many) fn set(&self, at: Instant, token: u64) {
        let mut set = self.set.lock().unwrap_or_else(PoisonError::into_inner);
        let is_first = set.peek().is_none_or(|Reverse((first, _))| at < *first);
        set.push(Reverse((at, token)));
        if is_first {
            self.start_timer(Some(at));
        }
    }

    /// The channels whose time has come. The second value: whether there are others.
    pub(in crate::many) fn take_due(&self) -> (Vec<u64>, bool) {
        let mut set = self.set.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let mut due = Vec::new();
        while let Some(Reverse((at, token))) = set.peek() {
            if *at > now {
                break;
            }
            due.push(*token);
            set.pop();
        }
        let next = set.peek().map(|Reverse((at, _))| *at);
        if !due.is_empty() {
            // Until then, the timer is not readable.
            self.start_timer(next);
        }
        (due, next.is_some())
    }

    /// Makes the timer readable at `at`, or never.
    fn start_timer(&self, at: Option<Instant>) {
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
