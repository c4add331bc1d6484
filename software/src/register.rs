//! The devices that `ibverbs::devices()` lists.

use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ibverbs::provider::{DirectVerbs, Hooks, install};

use crate::event_files;
use crate::ffi::{device_hold, device_put, ibv_device};
use crate::manager;
use crate::provider;

struct Registered(NonNull<ibv_device>);

// SAFETY: this file only counts references, which is allowed from any thread.
unsafe impl Send for Registered {}

/// The handle of a device removes it, and holds a reference until then.
static DEVICES: Mutex<Vec<Registered>> = Mutex::new(Vec::new());

#[allow(clippy::needless_update, reason = "not without the features")]
static HOOKS: Hooks = Hooks {
    list,
    put,
    ioctl: provider::ioctl::answer,
    guid: provider::guid,
    virtual_time: provider::virtual_time,
    query_pkey: provider::query::query_pkey,
    first_psn: provider::first_psn,
    before_sleep: event_files::before_sleep,
    sleep_for: provider::completion::sleep_for,
    attend: provider::completion::attend,
    rest: provider::completion::rest,
    detach: provider::completion::detach,
    is_ended: provider::completion::is_ended,
    direct: DirectVerbs {
        #[cfg(feature = "efa")]
        efa_query_device: provider::efa::query_device,
        #[cfg(feature = "efa")]
        efa_query_ah: provider::efa::query_ah,
        #[cfg(feature = "efa")]
        efa_create_qp: provider::efa::create_qp,
        #[cfg(feature = "mlx5")]
        mlx5_is_supported: provider::mlx5::is_supported,
        #[cfg(feature = "mlx5")]
        mlx5_query_device: provider::mlx5::query_device,
        #[cfg(feature = "mlx5")]
        mlx5_create_qp: provider::mlx5::create_qp,
        #[cfg(feature = "mlx5")]
        mlx5_qp_ex: provider::mlx5::qp_ex,
        ..DirectVerbs::NONE
    },
    manager_open: manager::open,
    manager_write: manager::write,
    manager_close: manager::close,
};

/// Installs the hooks of libibverbs. Must be called before a device is opened.
pub(crate) fn install_hooks() {
    // SAFETY: the devices of the list are held until `put`, and the other functions answer for this provider's objects alone.
    unsafe { install(&HOOKS) };
}

fn devices() -> MutexGuard<'static, Vec<Registered>> {
    DEVICES.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn add(device: NonNull<ibv_device>) {
    let mut devices = devices();
    if devices.iter().all(|registered| registered.0 != device) {
        devices.push(Registered(device));
    }
}

pub(crate) fn remove(device: NonNull<ibv_device>) {
    devices().retain(|registered| registered.0 != device);
}

fn list() -> Vec<NonNull<ibv_device>> {
    let devices = devices();
    let hold = |registered: &Registered| {
        // SAFETY: the handle, which waits for the lock before it lets go, holds the device.
        unsafe { device_hold(registered.0.as_ptr()) };
        registered.0
    };
    devices.iter().map(hold).collect()
}

/// # Safety
///
/// The caller has a reference, and gives it back by this call.
unsafe fn put(device: NonNull<ibv_device>) {
    // SAFETY: the caller vouches for it.
    unsafe { device_put(device.as_ptr()) };
}
