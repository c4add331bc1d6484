//! The functions of the provider, which libibverbs calls. Each translates C's arguments, calls the engine with
//! its lock held, and translates the answer back.
//!
//! The safety of all of them rests on the contract of the verbs: pointers are live objects of this provider
//! (libibverbs finds the function in the object's own context), arguments are readable, results writable,
//! and an object is not used during or after its destroy verb.

mod address;
mod batch;
pub(crate) mod completion;
mod context;
pub(crate) mod device;
mod device_memory;
#[cfg(feature = "efa")]
pub(crate) mod efa;
mod extended_completion;
mod faulty;
pub(crate) mod ioctl;
mod memory;
#[cfg(feature = "mlx5")]
pub(crate) mod mlx5;
mod operations;
mod pd;
mod post;
pub(crate) mod query;
mod queue_pair;
mod shared_receive;
mod translate;
mod xrc;

pub(crate) use operations::{device_operations, guid};
pub(crate) use queue_pair::{first_psn, virtual_time};

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::Arc;

use self::device::RawDevice;
use crate::driver::Shared;
use crate::ffi::{ibv_context, pthread_cond_t, pthread_mutex_t};

/// The device of a context.
///
/// # Safety
///
/// `context` is a live context of this provider.
unsafe fn shared<'a>(context: *mut ibv_context) -> &'a Arc<Shared> {
    // SAFETY: the caller vouches for the context, which holds a reference to its device; that is one of
    // ours.
    unsafe { (*(*context).device.cast::<RawDevice>()).shared() }
}

pub(crate) use crate::ffi::set_errno;

/// Converts a result for verbs that return an object.
fn object<T>(made: Result<*mut T, c_int>) -> *mut T {
    made.unwrap_or_else(|errno| {
        set_errno(errno);
        null_mut()
    })
}

/// Converts a result for verbs that return an errno value.
fn status(result: Result<(), c_int>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(errno) => {
            set_errno(errno);
            errno
        }
    }
}

/// An object of C on the heap, all zeros.
fn zeroed<T>() -> Box<T> {
    // SAFETY: it is called for C structures only, of integers, pointers and nullable functions.
    unsafe { Box::new(std::mem::zeroed()) }
}

/// Initialises the mutex and the condition variable that a destroy verb waits with.
///
/// # Safety
///
/// Both are writable and stay where they are.
unsafe fn init_wait(mutex: *mut pthread_mutex_t, condition: *mut pthread_cond_t) {
    // SAFETY: the caller vouches for both; null means the usual attributes.
    unsafe {
        libc::pthread_mutex_init(mutex.cast(), std::ptr::null());
        libc::pthread_cond_init(condition.cast(), std::ptr::null());
    }
}

/// Waits until the program has acknowledged all events that it has read, as destroy verbs do.
///
/// # Safety
///
/// All are of one live object of libibverbs; `acknowledged` tells what was acknowledged.
unsafe fn wait_acknowledged(
    mutex: *mut pthread_mutex_t,
    condition: *mut pthread_cond_t,
    acknowledged: impl Fn() -> bool,
) {
    // SAFETY: the caller vouches for them; the mutex guards what is looked at.
    unsafe {
        libc::pthread_mutex_lock(mutex.cast());
        while !acknowledged() {
            libc::pthread_cond_wait(condition.cast(), mutex.cast());
        }
        libc::pthread_mutex_unlock(mutex.cast());
    }
}
