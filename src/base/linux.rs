//! The calls of Linux that this crate makes. Elsewhere it only compiles, for editors: every call fails with `ENOSYS`, as
//! rdma-core's do there (`build/names.rs`).

#[cfg(target_os = "linux")]
use std::os::fd::AsRawFd;
use std::os::fd::BorrowedFd;

#[cfg(target_os = "linux")]
pub(crate) use libc::{
    __errno_location, EFD_CLOEXEC, EFD_NONBLOCK, ENODATA, EPOLL_CLOEXEC, EPOLL_CTL_ADD,
    EPOLL_CTL_MOD, EPOLLET, EPOLLIN, EPOLLRDHUP, MADV_HUGEPAGE, MADV_POPULATE_WRITE,
    MAP_HUGE_SHIFT, MAP_HUGETLB, POLLRDHUP, TCP_KEEPCNT, TCP_KEEPIDLE, TCP_KEEPINTVL, TFD_CLOEXEC,
    TFD_NONBLOCK, epoll_create1, epoll_ctl, epoll_event, epoll_wait, eventfd, eventfd_read,
    eventfd_write, explicit_bzero, itimerspec, makedev, ppoll, timerfd_create, timerfd_settime,
};

#[cfg(not(target_os = "linux"))]
pub(crate) use elsewhere::*;

/// Whether the file stays as long as it is (`F_SEAL_SHRINK`).
#[cfg(target_os = "linux")]
pub(crate) fn is_sealed_against_shrinking(file: BorrowedFd<'_>) -> bool {
    // SAFETY: it only asks.
    let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
    seals >= 0 && seals & libc::F_SEAL_SHRINK != 0
}

/// Whether the file is of hugetlbfs, or of a kind that the kernel does not say.
#[cfg(target_os = "linux")]
pub(crate) fn is_of_huge_pages(file: BorrowedFd<'_>) -> bool {
    let mut answer = std::mem::MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: the structure is ours, and all zeros are valid.
    let (returned, answer) =
        unsafe { (libc::fstatfs(file.as_raw_fd(), answer.as_mut_ptr()), answer.assume_init()) };
    // Their types differ between C libraries.
    returned != 0 || i128::from(answer.f_type) == i128::from(libc::HUGETLBFS_MAGIC)
}

/// In bytes; 0 if the kernel does not say.
pub(crate) fn file_len(file: BorrowedFd<'_>) -> u64 {
    let file = file.try_clone_to_owned().map(std::fs::File::from);
    file.and_then(|file| file.metadata()).map_or(0, |metadata| metadata.len())
}

#[cfg(not(target_os = "linux"))]
#[allow(
    dead_code,
    non_camel_case_types,
    non_upper_case_globals,
    reason = "C's names, and fields for C"
)]
mod elsewhere {
    use std::cell::Cell;
    use std::ffi::{c_int, c_short, c_uint, c_void};
    use std::os::fd::BorrowedFd;

    thread_local! {
        static ERRNO: Cell<c_int> = const { Cell::new(libc::ENOSYS) };
    }

    /// The systems have names of their own for it.
    pub(crate) unsafe fn __errno_location() -> *mut c_int {
        ERRNO.with(Cell::as_ptr)
    }

    pub(crate) const EFD_CLOEXEC: c_int = 0;
    pub(crate) const EFD_NONBLOCK: c_int = 0;
    /// Some of the systems have none.
    pub(crate) const ENODATA: c_int = 9919;
    pub(crate) const EPOLL_CLOEXEC: c_int = 0;
    pub(crate) const EPOLL_CTL_ADD: c_int = 0;
    pub(crate) const EPOLL_CTL_MOD: c_int = 0;
    pub(crate) const EPOLLET: c_int = 0;
    pub(crate) const EPOLLIN: c_int = 0;
    pub(crate) const EPOLLRDHUP: c_int = 0;
    pub(crate) const MADV_HUGEPAGE: c_int = 0;
    pub(crate) const MADV_POPULATE_WRITE: c_int = 0;
    pub(crate) const MAP_HUGE_SHIFT: c_int = 0;
    pub(crate) const MAP_HUGETLB: c_int = 0;
    pub(crate) const POLLRDHUP: c_short = libc::POLLHUP;
    pub(crate) const TCP_KEEPCNT: c_int = 0;
    pub(crate) const TCP_KEEPIDLE: c_int = 0;
    pub(crate) const TCP_KEEPINTVL: c_int = 0;
    pub(crate) const TFD_CLOEXEC: c_int = 0;
    pub(crate) const TFD_NONBLOCK: c_int = 0;

    #[derive(Clone, Copy)]
    pub(crate) struct epoll_event {
        pub(crate) events: u32,
        pub(crate) u64: u64,
    }

    pub(crate) struct itimerspec {
        pub(crate) it_interval: libc::timespec,
        pub(crate) it_value: libc::timespec,
    }

    macro_rules! missing {
        ($($name:ident($($type:ty),*);)+) => {$(
            pub(crate) unsafe fn $name($(_: $type),*) -> c_int {
                // SAFETY: the pointer is to the thread's own value.
                unsafe { *__errno_location() = libc::ENOSYS };
                -1
            }
        )+};
    }

    missing! {
        epoll_create1(c_int);
        epoll_ctl(c_int, c_int, c_int, *mut epoll_event);
        epoll_wait(c_int, *mut epoll_event, c_int, c_int);
        eventfd(c_uint, c_int);
        eventfd_read(c_int, *mut u64);
        eventfd_write(c_int, u64);
        ppoll(*mut libc::pollfd, libc::nfds_t, *const libc::timespec, *const c_void);
        timerfd_create(libc::clockid_t, c_int);
        timerfd_settime(c_int, c_int, *const itimerspec, *mut itimerspec);
    }

    pub(crate) fn is_sealed_against_shrinking(_: BorrowedFd<'_>) -> bool {
        false
    }

    pub(crate) fn is_of_huge_pages(_: BorrowedFd<'_>) -> bool {
        false
    }

    pub(crate) fn makedev(major: c_uint, minor: c_uint) -> u64 {
        u64::from(major) << 32 | u64::from(minor)
    }

    pub(crate) unsafe fn explicit_bzero(memory: *mut c_void, bytes: usize) {
        // SAFETY: the caller promises that `memory` is writable for `bytes` bytes.
        unsafe { memory.cast::<u8>().write_bytes(0, bytes) }
    }
}
