//! The devices of software that `script/libibverbs` puts into a shared `libibverbs.so.1`.
//!
//! `hooks.c`, which is compiled with rdma-core's shared library, calls these functions.

#![warn(clippy::print_stderr, clippy::print_stdout)]

mod counters;

use std::ffi::c_int;
use std::io::{Error, ErrorKind, Write as _};
use std::ptr::null;
use std::sync::{Mutex, Once, PoisonError};

use ibverbs::ffi::ibv_device;
use ibverbs::provider::hooks;
use ibverbs_software::Device;

use self::counters::Published;

/// The devices of one process, which live until it ends. A child of `fork` makes its own.
struct Made {
    process: u32,
    published: Option<&'static Mutex<Published>>,
    /// The devices as C sees them. The last is null.
    list: Vec<*const ibv_device>,
}

// SAFETY: the pointers are only handed to C, whose reference counts are atomic.
unsafe impl Send for Made {}

static MADE: Mutex<Option<Made>> = Mutex::new(None);

/// Writes the devices that `IBVERBS_SOFTWARE` names, with a null pointer after the last, and returns 0; or returns an
/// errno value, and says on standard error what is wrong. The first call of a process makes the devices. If that fails,
/// the next call tries again.
///
/// # Safety
///
/// `list` is writable. What it gets is valid until the process forks.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibverbs_loadable_devices(list: *mut *const *const ibv_device) -> c_int {
    let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
    let process = std::process::id();
    if made.as_ref().is_none_or(|made| made.process != process) {
        // The parent's devices stay as they are: the threads that run them are the parent's.
        std::mem::forget(made.take());
        let devices = match Device::from_environment() {
            Ok(devices) => &*devices.unwrap_or_default().leak(),
            Err(e) => {
                // `eprintln!` would panic if standard error is closed, and so end a program in C.
                let _ = writeln!(std::io::stderr(), "libibverbs: {e}");
                return errno(&e);
            }
        };
        // The connection manager has those that are registered.
        for device in devices {
            device.register();
        }
        let pointers = devices.iter().map(|device| device.as_raw().cast_const());
        let list = pointers.chain([null()]).collect();
        *made = Some(Made { process, published: Published::new(devices).map(publish), list });
    }
    let found = made.as_ref().map_or(null(), |made| made.list.as_ptr());
    // SAFETY: the caller vouches for it.
    unsafe { list.write(found) };
    0
}

/// Has the counts of this process added to those of all processes, every second and when it ends. A fork finds no lock of the
/// devices' list held for long, and the lock of these is its parent's alone.
fn publish(published: Published) -> &'static Mutex<Published> {
    extern "C" fn last() {
        // A thread that has a lock may wait for this one.
        let Ok(made) = MADE.try_lock() else { return };
        if let Some(Made { process, published: Some(published), .. }) = &*made
            && *process == std::process::id()
            && let Ok(mut published) = published.try_lock()
        {
            published.add_last();
        }
    }
    static ONCE: Once = Once::new();
    // SAFETY: the function is one of this library, which stays loaded.
    ONCE.call_once(|| unsafe {
        libc::atexit(last);
    });
    let published: &Mutex<_> = Box::leak(Box::new(Mutex::new(published)));
    counters::start(|| _ = published.lock().unwrap_or_else(PoisonError::into_inner).add());
    published
}

fn errno(error: &Error) -> c_int {
    match error.kind() {
        ErrorKind::AddrInUse => libc::EADDRINUSE,
        ErrorKind::AddrNotAvailable => libc::EADDRNOTAVAIL,
        _ => error.raw_os_error().unwrap_or(libc::EINVAL),
    }
}

/// The GUID of one of these devices, in host byte order.
///
/// # Safety
///
/// The device is live.
#[unsafe(no_mangle)]
unsafe extern "C" fn ibverbs_loadable_guid(device: *mut ibv_device) -> u64 {
    // SAFETY: the caller vouches for the device.
    unsafe { hooks().and_then(|hooks| (hooks.guid)(device)) }.unwrap_or_default()
}
