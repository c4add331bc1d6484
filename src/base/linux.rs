//! The calls of Linux that this crate makes. Elsewhere it only compiles, for editors: every call fails with `ENOSYS`, as
//! rdma-core's do there (`build/elsewhere.rs`).

#[cfg(target_os = "linux")]
pub(crate) use libc::{
    __errno_location, EFD_CLOEXEC, EFD_NONBLOCK, EPOLL_CLOEXEC, EPOLL_CTL_ADD, EPOLLIN,
    MADV_HUGEPAGE, MADV_POPULATE_WRITE, MAP_HUGE_SHIFT, MAP_HUGETLB, POLLRDHUP, SYS_move_pages,
    TCP_KEEPIDLE, TFD_CLOEXEC, TFD_NONBLOCK, epoll_create1, epoll_ctl, epoll_event, eventfd,
    eventfd_read, eventfd_write, explicit_bzero, itimerspec, ppoll, timerfd_create,
    timerfd_settime,
};

#[cfg(not(target_os = "linux"))]
pub(crate) use elsewhere::*;

#[cfg(not(target_os = "linux"))]
#[allow(
    dead_code,
    non_camel_case_types,
    non_upper_case_globals,
    reason = "C's names, and fields for C"
)]
mod elsewhere {
    use std::ffi::{c_int, c_short, c_uint, c_void};

    pub(crate) use libc::{__error as __errno_location, TCP_KEEPALIVE as TCP_KEEPIDLE};

    pub(crate) const EFD_CLOEXEC: c_int = 0;
    pub(crate) const EFD_NONBLOCK: c_int = 0;
    pub(crate) const EPOLL_CLOEXEC: c_int = 0;
    pub(crate) const EPOLL_CTL_ADD: c_int = 0;
    pub(crate) const EPOLLIN: c_int = 0;
    pub(crate) const MADV_HUGEPAGE: c_int = 0;
    pub(crate) const MADV_POPULATE_WRITE: c_int = 0;
    pub(crate) const MAP_HUGE_SHIFT: c_int = 0;
    pub(crate) const MAP_HUGETLB: c_int = 0;
    pub(crate) const POLLRDHUP: c_short = libc::POLLHUP;
    pub(crate) const SYS_move_pages: c_int = -1;
    pub(crate) const TFD_CLOEXEC: c_int = 0;
    pub(crate) const TFD_NONBLOCK: c_int = 0;

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
        eventfd(c_uint, c_int);
        eventfd_read(c_int, *mut u64);
        eventfd_write(c_int, u64);
        ppoll(*mut libc::pollfd, libc::nfds_t, *const libc::timespec, *const c_void);
        timerfd_create(libc::clockid_t, c_int);
        timerfd_settime(c_int, c_int, *const itimerspec, *mut itimerspec);
    }

    pub(crate) unsafe fn explicit_bzero(memory: *mut c_void, bytes: usize) {
        // SAFETY: the caller promises that `memory` is writable for `bytes` bytes.
        unsafe { memory.cast::<u8>().write_bytes(0, bytes) }
    }
}
