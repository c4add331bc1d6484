//! Waiting for files to become readable, and a file that wakes who waits, in this process or another.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

pub(crate) fn wait_for(fd: c_int) -> libc::pollfd {
    libc::pollfd { fd, events: libc::POLLIN, revents: 0 }
}

/// Sleeps until one of the files is readable, or the time has passed. Returns whether one may be readable: an error
/// counts, since the next read reports it.
pub(crate) fn wait(files: &mut [libc::pollfd], timeout: Option<Duration>) -> bool {
    let timeout = timeout.map(|timeout| libc::timespec {
        // 68 years at most.
        tv_sec: i32::try_from(timeout.as_secs()).unwrap_or(i32::MAX).into(),
        tv_nsec: timeout.subsec_nanos() as _,
    });
    let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: there are as many live structures, and the time is null or valid.
    unsafe { libc::ppoll(files.as_mut_ptr(), files.len() as _, timeout, std::ptr::null()) != 0 }
}

/// Many files to wait for, of which the kernel keeps the list.
#[derive(Debug)]
pub(crate) struct Epoll(OwnedFd);

impl Epoll {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: a plain system call; what it returns is a new descriptor, ours alone.
        unsafe {
            match libc::epoll_create1(libc::EPOLL_CLOEXEC) {
                -1 => Err(io::Error::last_os_error()),
                fd => Ok(Self(OwnedFd::from_raw_fd(fd))),
            }
        }
    }

    pub(crate) fn add(&self, fd: c_int) -> io::Result<()> {
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: fd as u64 };
        // SAFETY: the event is a live structure; a descriptor that is not open is an error.
        match unsafe { libc::epoll_ctl(self.fd(), libc::EPOLL_CTL_ADD, fd, &mut event) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The file must be open still: its number may soon be another's.
    pub(crate) fn remove(&self, fd: c_int) {
        // SAFETY: no memory is involved; a file that is not there is an error.
        unsafe { libc::epoll_ctl(self.fd(), libc::EPOLL_CTL_DEL, fd, std::ptr::null_mut()) };
    }

    /// Calls `each` with every file that is readable, but with 64 at the most.
    pub(crate) fn ready(&self, mut each: impl FnMut(c_int)) {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 64];
        // SAFETY: there is room for as many events.
        let count =
            unsafe { libc::epoll_wait(self.fd(), events.as_mut_ptr(), events.len() as c_int, 0) };
        let count = usize::try_from(count).unwrap_or(0);
        events.iter().take(count).for_each(|event| each(event.u64 as c_int));
    }

    /// Readable when one of the files is.
    pub(crate) fn fd(&self) -> c_int {
        self.0.as_raw_fd()
    }
}

/// Wakes a thread that sleeps on it, and on other files.
#[derive(Debug)]
pub(crate) struct Waker(OwnedFd);

impl Waker {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: a plain system call; what it returns is a new descriptor, ours alone.
        unsafe {
            match libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) {
                -1 => Err(io::Error::last_os_error()),
                fd => Ok(Self(OwnedFd::from_raw_fd(fd))),
            }
        }
    }

    /// One of another process. What would block who wakes it is refused, as is any other kind of file.
    pub(crate) fn of_other(file: OwnedFd) -> io::Result<Self> {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))?;
        // SAFETY: no memory is involved.
        let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
        let is_one = link.as_os_str() == "anon_inode:[eventfd]";
        if is_one && flags >= 0 && flags & libc::O_NONBLOCK != 0 {
            Ok(Self(file))
        } else {
            Err(io::ErrorKind::InvalidData.into())
        }
    }

    pub(crate) fn file(&self) -> &OwnedFd {
        &self.0
    }

    pub(crate) fn wake(&self) {
        let one = 1_u64;
        // SAFETY: eight bytes are written from a live variable.
        unsafe { libc::write(self.fd(), (&raw const one).cast(), 8) };
    }

    pub(crate) fn clear(&self) {
        let mut count = 0_u64;
        // SAFETY: eight bytes are read into a live variable.
        unsafe { libc::read(self.fd(), (&raw mut count).cast(), 8) };
    }

    pub(crate) fn fd(&self) -> c_int {
        self.0.as_raw_fd()
    }
}
