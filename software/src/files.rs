//! Waiting for files to become readable, and files that wake a thread that waits.

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
struct Epoll(OwnedFd);

impl Epoll {
    fn new() -> io::Result<Self> {
        // SAFETY: a plain system call; what it returns is a new descriptor, ours alone.
        unsafe {
            match libc::epoll_create1(libc::EPOLL_CLOEXEC) {
                -1 => Err(io::Error::last_os_error()),
                fd => Ok(Self(OwnedFd::from_raw_fd(fd))),
            }
        }
    }

    fn add(&self, fd: c_int) -> io::Result<()> {
        let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: fd as u64 };
        // SAFETY: the event is a live structure; a descriptor that is not open is an error.
        match unsafe { libc::epoll_ctl(self.fd(), libc::EPOLL_CTL_ADD, fd, &mut event) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// The file must be open still: its number may soon be another's.
    fn remove(&self, fd: c_int) {
        // SAFETY: no memory is involved; a file that is not there is an error.
        unsafe { libc::epoll_ctl(self.fd(), libc::EPOLL_CTL_DEL, fd, std::ptr::null_mut()) };
    }

    /// Readable when one of the files is.
    fn fd(&self) -> c_int {
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

/// One file that becomes readable when a thread of this process wakes its waiter, or another process sends something. The part
/// that threads wake is this process's alone. Each other process has a connection of its own, and cannot take another's wake-up.
#[derive(Debug)]
pub(crate) struct WakeFd {
    own: Waker,
    all: Epoll,
}

impl WakeFd {
    pub(crate) fn new() -> io::Result<Self> {
        let (own, all) = (Waker::new()?, Epoll::new()?);
        all.add(own.fd())?;
        Ok(Self { own, all })
    }

    /// Adds a connection, until [`remove`](Self::remove).
    pub(crate) fn add(&self, fd: c_int) -> io::Result<()> {
        self.all.add(fd)
    }

    /// The file must be open still: its number may soon be another's.
    pub(crate) fn remove(&self, fd: c_int) {
        self.all.remove(fd);
    }

    pub(crate) fn wake(&self) {
        self.own.wake();
    }

    /// Takes the wake-ups of this process's threads.
    pub(crate) fn clear(&self) {
        self.own.clear();
    }

    /// The descriptor that threads of this process make readable, without the connections.
    pub(crate) fn own_fd(&self) -> c_int {
        self.own.fd()
    }

    pub(crate) fn is_readable(&self) -> bool {
        wait(&mut [wait_for(self.fd())], Some(Duration::ZERO))
    }

    pub(crate) fn fd(&self) -> c_int {
        self.all.fd()
    }
}
