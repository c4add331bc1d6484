use std::ffi::c_int;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::time::Instant;

use crate::base::{Error, Result, ffi, hooks, linux};

/// Readable when one of the files is.
pub(crate) fn any_of(files: &[BorrowedFd<'_>]) -> Result<OwnedFd> {
    // SAFETY: the call makes a new descriptor and takes no memory.
    let any = unsafe { ffi::new_fd("epoll_create1", linux::epoll_create1(linux::EPOLL_CLOEXEC))? };
    for &file in files {
        watch(any.as_fd(), file, linux::EPOLLIN, 0)?;
    }
    Ok(any)
}

/// Makes an epoll instance readable by these events of a file, which have this number from now on.
pub(crate) fn watch(
    any: BorrowedFd<'_>,
    file: BorrowedFd<'_>,
    events: c_int,
    number: u64,
) -> Result<()> {
    let mut event = linux::epoll_event { events: events.cast_unsigned(), u64: number };
    let (any, file) = (any.as_raw_fd(), file.as_raw_fd());
    // SAFETY: the descriptors are open, and the event is valid.
    let mut control = |change| unsafe { linux::epoll_ctl(any, change, file, &mut event) };
    match control(linux::EPOLL_CTL_ADD) {
        -1 if ffi::errno() == libc::EEXIST => {
            ffi::status("epoll_ctl", control(linux::EPOLL_CTL_MOD))
        }
        added => ffi::status("epoll_ctl", added),
    }
}

/// Takes the numbers of the files that have had an event since the last call, if they are watched edge-triggered.
#[cfg(feature = "channel")]
pub(crate) fn watched(any: BorrowedFd<'_>, mut found: impl FnMut(u64)) {
    const MOST: usize = 64;
    loop {
        let mut events = [linux::epoll_event { events: 0, u64: 0 }; MOST];
        // SAFETY: the descriptor is open, and there is room for this number of events.
        let count =
            unsafe { linux::epoll_wait(any.as_raw_fd(), events.as_mut_ptr(), MOST as c_int, 0) };
        let count = usize::try_from(count).unwrap_or(0);
        events[..count].iter().for_each(|event| found(event.u64));
        if count < MOST {
            return;
        }
    }
}

/// Sleeps until the file has one of the events, or has failed; returns false if the deadline passes first.
#[cfg(feature = "channel")]
pub(crate) fn poll(file: BorrowedFd<'_>, events: i16, deadline: Instant) -> std::io::Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        // Rounded up, so that the last round does not spin. Longer than a C int: waits again.
        let millis = left.as_nanos().div_ceil(1_000_000);
        let millis = c_int::try_from(millis).unwrap_or(c_int::MAX);
        let mut entry = libc::pollfd { fd: file.as_raw_fd(), events, revents: 0 };
        // SAFETY: `entry` is one writable entry, and the caller's borrow keeps its file open.
        match unsafe { libc::poll(&mut entry, 1, millis) } {
            0 if millis == c_int::MAX => {}
            0 => return Ok(false),
            -1 => {
                let error = std::io::Error::last_os_error();
                if error.kind() != std::io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
            _ => return Ok(true),
        }
    }
}

pub(crate) fn set_nonblocking(verb: &'static str, fd: RawFd) -> Result<()> {
    // SAFETY: no memory is involved; a closed descriptor is an error.
    let done = unsafe {
        let flags = libc::fcntl(fd, libc::F_GETFL);
        flags >= 0 && libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) == 0
    };
    if done { Ok(()) } else { Err(Error::new(verb, ffi::errno())) }
}

/// Returns what `take` gives. While that is nothing, sleeps until `fd` (non-blocking) is readable. Tries once even
/// after the deadline. Several threads may wait; a signal does not end the wait.
pub(crate) fn take_before<T>(
    verb: &'static str,
    fd: RawFd,
    deadline: Option<Instant>,
    mut take: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let mut is_last = false;
    loop {
        if let Some(taken) = take()? {
            return Ok(taken);
        }
        (_, is_last) = wait_readable(verb, &[fd], deadline, is_last)?;
    }
}

/// As [`take_before`] of the last file; or the index of another one that is readable.
pub(crate) fn take_before_or_woken<T>(
    verb: &'static str,
    files: &[RawFd],
    deadline: Option<Instant>,
    mut take: impl FnMut() -> Result<Option<T>>,
) -> Result<std::result::Result<T, usize>> {
    let mut is_last = false;
    loop {
        if let Some(taken) = take()? {
            return Ok(Ok(taken));
        }
        let first;
        (first, is_last) = wait_readable(verb, files, deadline, is_last)?;
        if first + 1 < files.len() {
            return Ok(Err(first));
        }
    }
}

/// As many files as a thread sleeps for.
const MOST_FILES: usize = 3;

/// Sleeps until a file is readable, or has an error that the next read reports. The file of the events comes last.
///
/// Returns the index of the first such file, and whether the deadline has passed. If so, the next call, with `is_last`,
/// fails even if a file is readable that yields nothing.
fn wait_readable(
    verb: &'static str,
    files: &[RawFd],
    deadline: Option<Instant>,
    is_last: bool,
) -> Result<(usize, bool)> {
    if is_last {
        return Err(timed_out(verb));
    }
    if let Some(hooks) = hooks::hooks() {
        (hooks.before_sleep)(files, deadline);
    }
    let mut entries = [libc::pollfd { fd: -1, events: libc::POLLIN, revents: 0 }; MOST_FILES];
    let count = files.len().min(MOST_FILES);
    let entries = &mut entries[..count];
    entries.iter_mut().zip(files).for_each(|(entry, &fd)| entry.fd = fd);
    loop {
        let left = deadline.map(|deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            libc::timespec {
                tv_sec: left.as_secs().try_into().unwrap_or(std::ffi::c_long::MAX),
                tv_nsec: left.subsec_nanos() as libc::c_long,
            }
        });
        let is_over = left.is_some_and(|left| left.tv_sec == 0 && left.tv_nsec == 0);
        let left = left.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        let count = count as libc::nfds_t;
        // SAFETY: there are `count` files, and the time is null or valid.
        match unsafe { linux::ppoll(entries.as_mut_ptr(), count, left, std::ptr::null()) } {
            0 => return Err(timed_out(verb)),
            1.. => {
                let first = entries.iter().position(|file| file.revents != 0);
                return Ok((first.unwrap_or(0), is_over));
            }
            _ => match ffi::errno() {
                libc::EINTR => {}
                errno => return Err(Error::new(verb, errno)),
            },
        }
    }
}

#[cold]
pub(crate) fn timed_out(verb: &'static str) -> Error {
    Error::with_reason(verb, libc::ETIMEDOUT, "the deadline has passed")
}

/// `read` returns 0, or -1 with `errno`. False: no event.
#[inline]
pub(crate) fn read_event(verb: &'static str, mut read: impl FnMut() -> i32) -> Result<bool> {
    loop {
        // A short read does not set `errno`.
        ffi::set_errno(0);
        if read() == 0 {
            return Ok(true);
        }
        match ffi::errno() {
            libc::EINTR => {}
            libc::EAGAIN => return Ok(false),
            errno => return Err(Error::new(verb, errno)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::fd::AsRawFd as _;
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;
    use crate::base::ErrorKind;

    const SOON: Duration = Duration::from_millis(20);

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no ppoll")]
    fn a_deadline_ends_a_wait_but_never_early() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let start = Instant::now();
        let error =
            take_before("ibv_x", ours.as_raw_fd(), Some(Instant::now() + SOON), || Ok(None::<()>))
                .unwrap_err();
        assert_eq!((error.kind(), error.verb()), (ErrorKind::TimedOut, "ibv_x"));
        assert!(start.elapsed() >= SOON);
        let past = Some(Instant::now());
        assert!(take_before("ibv_x", ours.as_raw_fd(), past, || Ok(None::<()>)).is_err());
        assert_eq!(take_before("ibv_x", ours.as_raw_fd(), past, || Ok(Some(7))).unwrap(), 7);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no ppoll")]
    fn a_deadline_ends_a_wait_for_a_file_that_is_always_readable() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(b"x").unwrap();
        let (fd, waker) = (ours.as_raw_fd(), theirs.as_raw_fd());
        let soon = || Some(Instant::now() + SOON);
        let nothing = || Ok(None::<()>);
        let error = take_before("ibv_x", fd, soon(), nothing).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        let error = take_before_or_woken("ibv_x", &[waker, fd], soon(), nothing).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no ppoll")]
    fn a_signal_does_not_end_a_wait() {
        extern "C" fn ignore(_: libc::c_int) {}
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        // SAFETY: the handler does nothing; without SA_RESTART it interrupts system calls.
        let (this, installed) = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = ignore as extern "C" fn(libc::c_int) as usize;
            let installed = libc::sigaction(libc::SIGUSR2, &action, std::ptr::null_mut());
            (libc::syscall(libc::SYS_gettid), installed)
        };
        assert_eq!(installed, 0);
        let start = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for _ in 0..5 {
                    std::thread::sleep(SOON);
                    // SAFETY: the thread is alive, as it waits for this one below.
                    let sent = unsafe {
                        libc::syscall(libc::SYS_tgkill, libc::getpid(), this, libc::SIGUSR2)
                    };
                    assert_eq!(sent, 0);
                }
                theirs.write_all(b"x").unwrap();
                theirs
            });
            let mut tries = 0;
            let first = take_before("ibv_x", ours.as_raw_fd(), None, || {
                tries += 1;
                Ok((tries > 1).then_some(()))
            });
            assert_eq!((first, tries), (Ok(()), 2), "not woken by the signals");
        });
        assert!(start.elapsed() >= SOON * 5);
    }

    #[test]
    fn nothing_to_read_and_failure_are_told_apart() {
        let returning = |errno: i32, returned: i32| {
            read_event("ibv_x", || {
                ffi::set_errno(errno);
                returned
            })
        };
        assert_eq!(returning(0, 0), Ok(true));
        assert_eq!(returning(libc::EAGAIN, -1), Ok(false));
        assert_eq!(returning(libc::ENODEV, -1).unwrap_err().raw_os_error(), Some(libc::ENODEV));
        ffi::set_errno(libc::EAGAIN);
        let short = read_event("ibv_x", || -1).unwrap_err();
        assert_eq!(
            short.raw_os_error(),
            Some(libc::EIO),
            "the errno value of an earlier call is not believed"
        );
        let mut interrupted = 2;
        let patient = read_event("ibv_x", || match interrupted {
            0 => 0,
            _ => {
                interrupted -= 1;
                ffi::set_errno(libc::EINTR);
                -1
            }
        });
        assert_eq!(patient, Ok(true));
    }
}
