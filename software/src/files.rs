//! Waiting for files to become readable, and files that wake a thread that waits.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

use crate::foreign::Foreign;

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

/// [`Epoll::wait`] returns as many events at most.
const EVENTS: usize = 8;

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

    fn change(&self, operation: c_int, fd: c_int, events: c_int, token: u64) -> io::Result<()> {
        let mut event = libc::epoll_event { events: events as u32, u64: token };
        // SAFETY: the event is a live structure; a descriptor that is not open is an error.
        match unsafe { libc::epoll_ctl(self.fd(), operation, fd, &mut event) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Adds a file. [`wait`](Self::wait) returns the token when one of these events is there.
    pub(crate) fn add(&self, fd: c_int, events: c_int, token: u64) -> io::Result<()> {
        self.change(libc::EPOLL_CTL_ADD, fd, events, token)
    }

    /// Waits for a file of the caller's until it is readable once; its token is its number. The kernel looks up the number and what
    /// is open there: if the number was another file's at the last call, it adds this one, and the other is forgotten once it
    /// has been readable.
    pub(crate) fn add_once(&self, fd: c_int) -> io::Result<()> {
        let (events, token) = (libc::EPOLLIN | libc::EPOLLONESHOT, fd as u64);
        match self.change(libc::EPOLL_CTL_MOD, fd, events, token) {
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => self.add(fd, events, token),
            result => result,
        }
    }

    /// The file must be open still: its number may soon be another's.
    pub(crate) fn remove(&self, fd: c_int) {
        // A file that is not there is an error.
        let _ = self.change(libc::EPOLL_CTL_DEL, fd, 0, 0);
    }

    /// Sleeps until there is an event, and returns the tokens of some. It returns none at a signal, and when the time has passed, or
    /// all but a part of a millisecond of it.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> impl Iterator<Item = u64> + Clone {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; EVENTS];
        let millis = timeout.map_or(-1, |time| time.as_millis().try_into().unwrap_or(c_int::MAX));
        if millis == 0 && timeout != Some(Duration::ZERO) {
            wait(&mut [wait_for(self.fd())], timeout);
        }
        // SAFETY: there are as many live structures.
        let count =
            unsafe { libc::epoll_wait(self.fd(), events.as_mut_ptr(), EVENTS as _, millis) };
        events.into_iter().take(usize::try_from(count).unwrap_or(0)).map(|event| event.u64)
    }

    /// Readable when one of the files is.
    pub(crate) fn fd(&self) -> c_int {
        self.0.as_raw_fd()
    }
}

/// An eventfd by which another process wakes this one. Its counter begins high, and who rings takes one from it. That makes the file
/// writable once more, and wakes the threads that wait for it in an epoll set, edge-triggered.
///
/// Both processes share the file with its flags, and each may do with it what it likes. So ringing is a call that says itself that it
/// does not wait. There is no such call to write to an eventfd: a write would wait while the counter is full, if the other process has
/// cleared `O_NONBLOCK`.
#[derive(Debug)]
pub(crate) struct Bell(Foreign);

/// A bell can be rung so often, which at a million times a second takes longer than any program runs.
const RINGS: u64 = 1 << 62;

impl Bell {
    pub(crate) fn new() -> io::Result<Self> {
        let (flags, rings) = (libc::EFD_CLOEXEC | libc::EFD_NONBLOCK | libc::EFD_SEMAPHORE, RINGS);
        // SAFETY: plain system calls; what the first returns is a new descriptor, ours alone; eight bytes are read from a live
        // variable.
        unsafe {
            let bell = match libc::eventfd(0, flags) {
                -1 => return Err(io::Error::last_os_error()),
                fd => Self(Foreign::file(OwnedFd::from_raw_fd(fd))),
            };
            match libc::write(bell.0.as_raw_fd(), (&raw const rings).cast(), size_of_val(&rings)) {
                -1 => Err(io::Error::last_os_error()),
                _ => Ok(bell),
            }
        }
    }

    /// The bell that another process has sent. `None`: the file is of another kind, or the kernel is older than 5.8 and has no
    /// call for eventfds that never waits.
    ///
    /// The kernel's files without a name share one inode. Only those of them that can be read without waiting are read from.
    pub(crate) fn open(file: Foreign) -> Option<Self> {
        let inode = |file: &OwnedFd| {
            // Asks no server of a file system, which may let it wait.
            let flags = libc::AT_EMPTY_PATH | libc::AT_STATX_DONT_SYNC;
            // SAFETY: the structure is plain data, and the call gets its address and an empty string.
            unsafe {
                let mut status: libc::statx = std::mem::zeroed();
                let (fd, path, to) = (file.as_raw_fd(), c"".as_ptr(), &raw mut status);
                let found = libc::syscall(libc::SYS_statx, fd, path, flags, libc::STATX_INO, to);
                let device = (status.stx_dev_major, status.stx_dev_minor);
                (found == 0).then_some((device, status.stx_ino))
            }
        };
        let own = Self::new().ok()?;
        let like = inode(&own.0);
        (like.is_some() && inode(&file) == like && own.take_one()).then_some(Self(file))
    }

    /// Rings. Whatever kind of file the other process has sent, this does not wait.
    pub(crate) fn ring(&self) {
        self.take_one();
    }

    fn take_one(&self) -> bool {
        let mut one = 0_u64;
        let part = libc::iovec { iov_base: (&raw mut one).cast(), iov_len: size_of_val(&one) };
        let at_its_position: libc::c_long = -1;
        // SAFETY: eight bytes are written to a live variable at most.
        let taken = unsafe {
            libc::syscall(
                libc::SYS_preadv2,
                self.0.as_raw_fd(),
                &raw const part,
                1,
                at_its_position,
                at_its_position,
                libc::RWF_NOWAIT,
            )
        };
        taken == 8
    }

    pub(crate) fn as_fd(&self) -> &OwnedFd {
        &self.0
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

/// So many bells are in a set at most: one of each process that sends.
pub(crate) const MOST_BELLS: usize = 256;

/// Programs wait for the file in a set of a reactor's, which is in a set of a runtime's. One more is to spare.
const DEEP: usize = 3;

/// One file that becomes readable when a thread of this process wakes its waiter, or another process does. Each other process has a
/// bell of its own, and cannot take another's wake-up.
#[derive(Debug)]
pub(crate) struct WakeFd {
    own: Waker,
    all: Epoll,
}

impl WakeFd {
    pub(crate) fn new() -> io::Result<Self> {
        let wake_fd = Self { own: Waker::new()?, all: Epoll::new()? };
        wake_fd.all.add(wake_fd.own.fd(), libc::EPOLLIN | libc::EPOLLET, 0)?;
        Ok(wake_fd)
    }

    /// Adds a bell, until [`remove`](Self::remove), and wakes once.
    pub(crate) fn add(&self, bell: &Bell) -> io::Result<()> {
        self.all.add(bell.0.as_raw_fd(), libc::EPOLLOUT | libc::EPOLLET, 0)
    }

    pub(crate) fn remove(&self, bell: &Bell) {
        self.all.remove(bell.0.as_raw_fd());
    }

    pub(crate) fn wake(&self) {
        self.own.wake();
    }

    /// Takes all wake-ups that have come. A thread that waits for this file edge-triggered learns of the next one without this call.
    pub(crate) fn clear(&self) {
        // Another process may ring all the time. A wake-up that is left wakes a thread for nothing, once.
        for _ in 0..MOST_BELLS / EVENTS + 2 {
            if self.all.wait(Some(Duration::ZERO)).count() < EVENTS {
                break;
            }
        }
    }

    /// Whether a program may wait for this file in a set that is in other sets. The kernel limits the paths from a file through
    /// sets (`EINVAL`), and another process, which has the bells too, may have used them up.
    pub(crate) fn can_be_nested(&self) -> bool {
        let mut fd = self.fd();
        [(); DEEP].map(|()| Epoll::new()).iter().all(|set| {
            let is_added = set.as_ref().is_ok_and(|set| set.add(fd, libc::EPOLLIN, 0).is_ok());
            fd = set.as_ref().map_or(-1, Epoll::fd);
            is_added
        })
    }

    /// Takes this file out of an epoll instance.
    pub(crate) fn leave(&self, set: c_int) {
        // SAFETY: no memory is involved. A file that is not there is an error.
        unsafe { libc::epoll_ctl(set, libc::EPOLL_CTL_DEL, self.fd(), std::ptr::null_mut()) };
    }

    pub(crate) fn fd(&self) -> c_int {
        self.all.fd()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn all_wake_ups_are_taken_at_once() {
        let wake_fd = WakeFd::new().unwrap();
        let is_readable = || wait(&mut [wait_for(wake_fd.fd())], Some(Duration::ZERO));
        assert!(!is_readable());
        let bells = [(); 3 * EVENTS].map(|()| Bell::new().unwrap());
        for bell in &bells {
            wake_fd.add(bell).unwrap();
        }
        for _ in 0..2 {
            assert!(is_readable());
            wake_fd.clear();
            assert!(!is_readable());
            bells.iter().for_each(Bell::ring);
        }
        wake_fd.clear();
        bells.iter().for_each(|bell| wake_fd.remove(bell));
        bells.iter().for_each(Bell::ring);
        assert!(!is_readable());
        wake_fd.wake();
        assert!(is_readable());
    }

    /// Another process has the bells too, and may put them into sets of its own.
    #[test]
    fn paths_that_are_used_up_are_noticed() {
        let _files = crate::link::no_process_starts();
        let wake_fd = WakeFd::new().unwrap();
        let bell = Bell::new().unwrap();
        wake_fd.add(&bell).unwrap();
        assert!(wake_fd.can_be_nested());
        let line = [(); DEEP].map(|()| Epoll::new().unwrap());
        let mut fd = bell.0.as_raw_fd();
        for set in &line {
            set.add(fd, libc::EPOLLIN, 0).unwrap();
            fd = set.fd();
        }
        let used: Vec<_> = std::iter::repeat_with(|| Epoll::new().unwrap())
            .take_while(|set| set.add(fd, libc::EPOLLIN, 0).is_ok())
            .collect();
        assert!(!wake_fd.can_be_nested(), "{}", used.len());
        drop(used);
        assert!(wake_fd.can_be_nested());
    }

    /// Times are not a multiple of the kernel's unit: a thread neither returns too early, nor again and again.
    #[test]
    fn a_set_is_waited_for_to_the_end() {
        let (all, file) = (Epoll::new().unwrap(), Waker::new().unwrap());
        all.add_once(file.fd()).unwrap();
        for time in [Duration::from_micros(300), Duration::from_micros(2_300)] {
            let (until, mut waits) = (Instant::now() + time, 0);
            loop {
                let left = until.saturating_duration_since(Instant::now());
                assert_eq!(all.wait(Some(left)).count(), 0);
                waits += 1;
                if left.is_zero() {
                    break;
                }
            }
            assert!(waits <= 4, "{waits}");
        }
        file.wake();
        for timeout in [None, Some(Duration::from_secs(60))] {
            assert_eq!(all.wait(timeout).collect::<Vec<_>>(), [file.fd() as u64]);
            assert_eq!(all.wait(Some(Duration::ZERO)).count(), 0, "once");
            all.add_once(file.fd()).unwrap();
        }
        assert!(Epoll::new().unwrap().add_once(-1).is_err());
    }
}
