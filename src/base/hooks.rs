//! Hooks for a provider whose devices are software in this process, without a kernel driver.
//!
//! Not part of the stable interface: only for `ibverbs-software` of the same version.
//!
//! libibverbs finds devices, GUIDs and P_Keys in sysfs, and asks the kernel for completion channels and GIDs. The
//! provider answers instead. It also hears of threads that are about to sleep, and tells the time. Without a provider
//! each hook costs one load; none is on the data path.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;
use std::sync::OnceLock;
use std::time::Instant;

use crate::base::ffi;

/// The functions of the process's one such provider.
#[derive(Debug)]
pub struct Hooks {
    /// Returns the devices for [`devices`](crate::devices), each with a reference of its own.
    pub list: fn() -> Vec<NonNull<ffi::ibv_device>>,
    /// Gives back a reference that `list` took.
    pub put: unsafe fn(NonNull<ffi::ibv_device>),
    /// Answers libibverbs' request to the kernel: the result, with `errno` set if it is -1. `None`: the file is the
    /// kernel's.
    pub ioctl: unsafe fn(c_int, u64, *mut c_void) -> Option<c_int>,
    /// Returns a port's P_Key at an index, in host byte order, or an errno value. `None`: the context is not this
    /// provider's.
    pub query_pkey: ffi::QueryPkey,
    /// Returns the GUID of a live device, in host byte order. `None`: the device is not this provider's.
    pub guid: unsafe fn(*mut ffi::ibv_device) -> Option<u64>,
    /// Returns the time of the simulated network of a live context's device. `None`: the device uses the machine's
    /// clock.
    ///
    /// If the given moment has not passed, the network's time reaches it by itself, and sleeping threads then return to
    /// their callers.
    pub virtual_time: unsafe fn(*mut ffi::ibv_context, Option<Instant>) -> Option<Instant>,
    /// Chooses the first packet sequence number of a live queue pair, so that a simulation can repeat itself. `None`: a
    /// random one.
    pub first_psn: unsafe fn(*mut ffi::ibv_qp) -> Option<u32>,
    /// A thread is about to sleep until one of the files, of which the last is that of the events, is readable, or the
    /// deadline has passed. The provider may let its devices work until then, or return at once.
    pub before_sleep: fn(&[c_int], Option<Instant>),
    /// As `before_sleep`, by a thread that polls a live completion queue, of any provider, before and after. True:
    /// there may be completions, without an event to read, and the queue is still armed. A file that was named for a queue keeps
    /// its descriptor as long as the queue lives.
    pub sleep_for: unsafe fn(*mut ffi::ibv_cq, &[c_int], Option<Instant>) -> bool,
    /// An event loop (a reactor, or a thread that waits for a `Loop`'s file) attends a live completion queue, of any
    /// provider: it sleeps until its own file is readable, then polls the queue until it is empty.
    ///
    /// If this returns a file, open as long as the queue is live, the event loop waits for that too, and calls `rest`
    /// before it reads events.
    pub attend: unsafe fn(*mut ffi::ibv_cq) -> Option<c_int>,
    /// For a queue with a file of `attend`: an event loop is about to poll for the last time before it sleeps. Returns
    /// whether there is an event to read.
    pub rest: unsafe fn(*mut ffi::ibv_cq) -> bool,
    /// The event loop cannot wait for the file of `attend`, if the live queue has one: this takes the file out of the epoll
    /// instance. From now on, events wake the loop as they do others.
    pub detach: unsafe fn(*mut ffi::ibv_cq, c_int),
    /// Whether no event will ever come in this empty file of events, of any provider, because its device was removed.
    pub is_ended: fn(c_int) -> bool,
    /// The direct verbs of EFA and mlx5, if it has such devices.
    pub direct: DirectVerbs,
    /// Opens a file for librdmacm's commands; -1 with `errno` set if that fails. `None`: the kernel's file is opened.
    pub manager_open: fn() -> Option<c_int>,
    /// Answers a command written to a file: the result, with `errno` set if it is -1. `None`: the file is not this
    /// provider's.
    pub manager_write: unsafe fn(c_int, *const c_void, usize) -> Option<isize>,
    /// A file, of any owner, is about to be closed.
    pub manager_close: fn(c_int),
}

/// The direct verbs of devices that are like EFA or mlx5. A pointer without a type is to the struct that is named.
#[derive(Clone, Copy, Debug)]
pub struct DirectVerbs {
    /// `efadv_query_device` for a live context: writes a `struct efadv_device_attr`, and returns 0 or an errno value.
    /// `None`, here and below: the object is not this provider's.
    pub efa_query_device: unsafe fn(*mut ffi::ibv_context, *mut c_void) -> Option<c_int>,
    /// `efadv_query_ah` for a live address handle: writes a `struct efadv_ah_attr`.
    pub efa_query_ah: unsafe fn(*mut ffi::ibv_ah, *mut c_void) -> Option<c_int>,
    /// `efadv_create_qp_ex`, with a `struct efadv_qp_init_attr`.
    pub efa_create_qp: unsafe fn(
        *mut ffi::ibv_context,
        *mut ffi::ibv_qp_init_attr_ex,
        *mut c_void,
    ) -> Option<*mut ffi::ibv_qp>,
    /// `mlx5dv_is_supported` for a live device.
    pub mlx5_is_supported: unsafe fn(*mut ffi::ibv_device) -> bool,
    /// `mlx5dv_query_device` for a live context: fills a `struct mlx5dv_context`.
    pub mlx5_query_device: unsafe fn(*mut ffi::ibv_context, *mut c_void) -> Option<c_int>,
    /// `mlx5dv_create_qp`, with a `struct mlx5dv_qp_init_attr`.
    pub mlx5_create_qp: unsafe fn(
        *mut ffi::ibv_context,
        *mut ffi::ibv_qp_init_attr_ex,
        *mut c_void,
    ) -> Option<*mut ffi::ibv_qp>,
    /// The `struct mlx5dv_qp_ex` of a live queue pair that `mlx5_create_qp` has made.
    pub mlx5_qp_ex: unsafe fn(*mut ffi::ibv_qp_ex) -> Option<*mut c_void>,
}

impl DirectVerbs {
    /// Those of a provider without such devices.
    pub const NONE: Self = Self {
        efa_query_device: |_, _| None,
        efa_query_ah: |_, _| None,
        efa_create_qp: |_, _, _| None,
        mlx5_is_supported: |_| false,
        mlx5_query_device: |_, _| None,
        mlx5_create_qp: |_, _, _| None,
        mlx5_qp_ex: |_| None,
    };
}

static HOOKS: OnceLock<&'static Hooks> = OnceLock::new();

/// Installs the hooks, once in a process; returns whether these are the installed ones.
///
/// # Safety
///
/// The functions do what the fields of [`Hooks`] say, on any thread and for as long as the process lives:
///
///  - libibverbs can open, close and query each device of `list` until `put` was called for it;
///  - `ioctl` answers as the kernel does: it writes what the request says, and nothing else;
///  - none unwinds, except `list` and `before_sleep`.
///
/// ```compile_fail,E0133
/// fn install(hooks: &'static ibverbs::provider::Hooks) {
///     ibverbs::provider::install(hooks);
/// }
/// ```
pub unsafe fn install(hooks: &'static Hooks) -> bool {
    let installed = std::ptr::eq(*HOOKS.get_or_init(|| hooks), hooks);
    if installed {
        ffi::answer_query_pkey(hooks.query_pkey);
    }
    installed
}

/// The installed hooks.
#[inline]
pub fn hooks() -> Option<&'static Hooks> {
    HOOKS.get().copied()
}

#[cfg(not(target_env = "musl"))]
type Request = std::ffi::c_ulong;
#[cfg(target_env = "musl")]
type Request = c_int;

/// libibverbs' `ioctl`: rdma-core is compiled with `-Dioctl=ibverbs_bundled_ioctl`.
///
/// # Safety
///
/// Those of `ioctl`.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibverbs_bundled_ioctl(
    fd: c_int,
    request: Request,
    argument: *mut c_void,
) -> c_int {
    if let Some(hooks) = hooks() {
        // SAFETY: the caller promises what `ioctl` needs; by `install` the hook needs no more.
        #[allow(clippy::cast_sign_loss, clippy::unnecessary_cast)]
        if let Some(answer) = unsafe { (hooks.ioctl)(fd, request as u64, argument) } {
            return answer;
        }
    }
    // SAFETY: the caller promises what `ioctl` needs.
    unsafe { libc::ioctl(fd, request, argument) }
}

/// librdmacm opens the connection manager (`src/c/manager.c`). Returns 1 if the provider answers.
///
/// # Safety
///
/// `file` is writable.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibverbs_bundled_manager_open(file: *mut c_int) -> c_int {
    let Some(opened) = hooks().and_then(|hooks| (hooks.manager_open)()) else { return 0 };
    // SAFETY: the caller promises that `file` is writable.
    unsafe { file.write(opened) };
    1
}

/// Returns 1 if the file is the provider's.
///
/// # Safety
///
/// Those of `write` to the kernel's connection manager, whose commands contain addresses; and `result` is writable.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibverbs_bundled_manager_write(
    file: c_int,
    bytes: *const c_void,
    size: usize,
    result: *mut isize,
) -> c_int {
    // SAFETY: the caller promises what such a `write` needs.
    let answer = hooks().and_then(|hooks| unsafe { (hooks.manager_write)(file, bytes, size) });
    let Some(answer) = answer else { return 0 };
    // SAFETY: the caller promises that `result` is writable.
    unsafe { result.write(answer) };
    1
}

#[unsafe(no_mangle)]
extern "C" fn ibverbs_bundled_manager_close(file: c_int) {
    if let Some(hooks) = hooks() {
        (hooks.manager_close)(file);
    }
}

/// The devices for librdmacm, which is compiled with these names for three functions of libibverbs.
#[cfg(feature = "rdmacm")]
mod of_librdmacm {
    use std::ffi::c_int;

    use super::hooks;
    use crate::base::ffi;

    /// `ibv_get_device_list`: libibverbs frees the list and gives back the references.
    ///
    /// # Safety
    ///
    /// `count` is writable, or null.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn ibverbs_bundled_get_device_list(
        count: *mut c_int,
    ) -> *mut *mut ffi::ibv_device {
        let own = hooks().map_or_else(Vec::new, |hooks| (hooks.list)());
        if own.is_empty() {
            // SAFETY: the caller promises that `count` is writable or null.
            return unsafe { ffi::ibv_get_device_list(count) };
        }
        let mut kernels: c_int = 0;
        // SAFETY: `kernels` is live. `all` has room for both lists and a null pointer; C frees both lists, from
        // `calloc`. The caller promises that `count` is writable or null.
        unsafe {
            let list = ffi::ibv_get_device_list(&raw mut kernels);
            let kernels = if list.is_null() { 0 } else { usize::try_from(kernels).unwrap_or(0) };
            let size = size_of::<*mut ffi::ibv_device>();
            let all = libc::calloc(own.len() + kernels + 1, size).cast::<*mut ffi::ibv_device>();
            if all.is_null() {
                for device in own {
                    hooks().inspect(|hooks| (hooks.put)(device));
                }
                if !count.is_null() {
                    count.write(kernels as c_int);
                }
                return list;
            }
            std::ptr::copy_nonoverlapping(own.as_ptr().cast(), all, own.len());
            if kernels > 0 {
                std::ptr::copy_nonoverlapping(list, all.add(own.len()), kernels);
            }
            libc::free(list.cast());
            if !count.is_null() {
                count.write((own.len() + kernels) as c_int);
            }
            all
        }
    }

    /// `ibv_get_device_guid`: in network byte order.
    ///
    /// # Safety
    ///
    /// The device is live.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn ibverbs_bundled_get_device_guid(device: *mut ffi::ibv_device) -> u64 {
        // SAFETY: the caller promises a live device.
        match hooks().and_then(|hooks| unsafe { (hooks.guid)(device) }) {
            Some(guid) => guid.to_be(),
            // SAFETY: as above.
            None => unsafe { ffi::ibv_get_device_guid(device) },
        }
    }

    /// `ibv_get_device_index`: a device without a kernel driver has none.
    ///
    /// # Safety
    ///
    /// The device is live.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn ibverbs_bundled_get_device_index(device: *mut ffi::ibv_device) -> c_int {
        // SAFETY: the caller promises a live device.
        match hooks().and_then(|hooks| unsafe { (hooks.guid)(device) }) {
            Some(_) => -1,
            // SAFETY: as above.
            None => unsafe { ffi::ibv_get_device_index(device) },
        }
    }
}
