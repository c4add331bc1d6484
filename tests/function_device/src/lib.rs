//! An RDMA device made of functions, for tests and benchmarks: no hardware, no kernel driver, no
//! privileges. It is opened through the real, statically linked libibverbs, so the tested code takes
//! the same path as on hardware. Tests use it for what the software device does not show: `docs/design.md` has the list.
//!
//! There are two kinds:
//!
//! * [`FunctionDevice::lean`]: a post pushes its completion into a ring, a poll pops it. No locks, no
//!   copies, no checks: for counting the instructions of the caller. Unsignalled sends produce
//!   nothing; a receive completes as soon as it is posted, or when it is
//!   [delivered](FunctionDevice::deliver). One thread at a time. Control verbs, their faults and their log
//!   work as in the other kind.
//! * [`FunctionDevice::model`]: queue pairs (RC, UC, UD, XRC) of one device reach each other and really
//!   move bytes, with keys, bounds, access flags, states, retries and sequence numbers checked as
//!   hardware checks them. Thread-safe. A test can provoke every fault that hardware can have.
//!
//! # A first test
//!
//! ```
//! use ibverbs::ffi;
//! use ibverbs_function_device::FunctionDevice;
//!
//! let device = FunctionDevice::model();
//! let context = device.open().unwrap();
//! // By hand, as a program in C; `device.context()` is the same for tests of the crate.
//! unsafe {
//!     let pd = ffi::ibv_alloc_pd(context);
//!     assert_eq!(device.live(ibverbs_function_device::Kind::ProtectionDomain), 1);
//!     assert_eq!(ffi::ibv_dealloc_pd(pd), 0);
//!     ffi::ibv_close_device(context);
//! }
//! device.assert_clean();
//! ```
//!
//! # When things happen
//!
//! [`Progress`] says when the model executes what was posted: by default in every poll
//! ([`Progress::OnPoll`]), so that a loop that polls one side drives both. With
//! [`Progress::Manual`] nothing is executed until [`step`](FunctionDevice::step): a test can inspect the state
//! with requests in flight. A request that finds no receive posted, or no
//! peer, spends one retry per step (or poll), not per unit of time; `rnr_retry` 7 waits for ever.
//!
//! Between execution and poll, completions can be [held](FunctionDevice::hold_completions) and
//! [released](FunctionDevice::release) one by one, [shuffled](FunctionDevice::shuffle) (within what
//! hardware may do), or [made up](FunctionDevice::inject). A failed
//! completion has garbage in all fields that the standard leaves undefined.
//!
//! # Faults
//!
//! [`fail`](FunctionDevice::fail) makes any verb fail, by its name in `struct verbs_context_ops`:
//!
//! ```
//! # use ibverbs_function_device::FunctionDevice;
//! # let device = FunctionDevice::model();
//! device.fail("modify_qp").errno(libc::EIO).skip(2).times(1); // the third one
//! device.fail("poll_cq").errno(libc::EIO).times(3);           // returns -1 three times
//! device.fail("create_qp_ex").errno(libc::EOPNOTSUPP).always();
//! ```
//!
//! # Recorded calls
//!
//! [`last_call`](FunctionDevice::last_call) has the arguments of the latest call of a verb,
//! [`posted`](FunctionDevice::posted) the latest work requests with their lists and inline data.
//! [`violations`](FunctionDevice::violations) counts actions that no correct program takes, such as
//! deregistering a region under an outstanding request. To turn such an error into an invalid access, which
//! valgrind and AddressSanitizer report, [`stale_translation`](FunctionDevice::stale_translation) lets the
//! device write through the addresses it saw when the request was posted.
//!
//! # How a device dies
//!
//! A device lives until its last handle and its last context are gone, in any order. Closing a
//! context makes the device forget the queue pairs and regions that were left in it, and it never
//! touches their memory again; they count as live, and are freed with the device.
//!
//! # Limits
//!
//! The device is not in the list of `ibv_get_device_list`, and `ibv_open_device` opens it through
//! [`FunctionDevice::open`] only, unless it is [listed](FunctionDevice::listed). Partition keys are read from files that the build made, so
//! `ibv_query_pkey` fails on another machine than the one that built the tests. Frames of raw packet queue pairs
//! reach the queue pairs of the device whose flows match their Ethernet, IPv4, TCP or UDP headers; other headers are
//! recorded, and match nothing. Tags of shared receive queues are kept, but messages are not matched to them.
//!
//! The crate defines `ioctl` for the whole program, since libibverbs asks the kernel itself for
//! completion channels and GIDs; calls for other descriptors go on to the kernel.

#![allow(
    clippy::not_unsafe_ptr_arg_deref,
    reason = "handles are looked up in the device's lists, and followed only when found"
)]

mod controls;
mod options;
mod records;

pub use controls::Fault;
pub use options::{Builder, LinkLayer, Progress};
pub use records::{Kind, Posted};

use ibverbs::{Context, ffi};
use std::ffi::CString;
use std::io;
use std::ptr::NonNull;

/// `device.h`: the device as C sees it.
#[allow(
    missing_docs,
    missing_debug_implementations,
    non_camel_case_types,
    non_upper_case_globals,
    unreachable_pub,
    unused_imports,
    clippy::all,
    clippy::missing_safety_doc,
    clippy::undocumented_unsafe_blocks
)]
pub mod raw {
    include!(concat!(env!("OUT_DIR"), "/device.rs"));
}

/// A handle to a device; cloning it makes another handle to the same device.
#[derive(Debug)]
pub struct FunctionDevice {
    raw: NonNull<raw::function_device>,
}

// SAFETY: the functions of device.h lock the device, and its life is counted atomically.
unsafe impl Send for FunctionDevice {}
// SAFETY: as above.
unsafe impl Sync for FunctionDevice {}

impl Drop for FunctionDevice {
    fn drop(&mut self) {
        // SAFETY: this handle holds one reference, given up here.
        unsafe { raw::device_release(self.raw.as_ptr()) }
    }
}

impl Clone for FunctionDevice {
    fn clone(&self) -> Self {
        // SAFETY: this handle keeps the device alive.
        unsafe { raw::device_hold(self.raw.as_ptr()) };
        Self { raw: self.raw }
    }
}

impl FunctionDevice {
    /// A device for counting instructions.
    ///
    /// # Panics
    ///
    /// As [`Builder::build`].
    pub fn lean() -> Self {
        Builder::lean().build()
    }

    /// A device that moves bytes, on Ethernet, executing in every poll.
    ///
    /// # Panics
    ///
    /// As [`Builder::build`].
    pub fn model() -> Self {
        Builder::model().build()
    }

    /// Opens a context, to be closed with `ibv_close_device` (which `Context::from_raw` does).
    ///
    /// # Errors
    ///
    /// What [`fail`](Self::fail) put in for `"open_device"`; `EMFILE` without descriptors.
    pub fn open(&self) -> io::Result<*mut ffi::ibv_context> {
        // SAFETY: the handle is valid.
        let context = unsafe { raw::device_open(self.raw.as_ptr()) };
        if context.is_null() {
            return Err(io::Error::last_os_error());
        }
        Ok(context)
    }

    /// Opens a context, as an object of the crate.
    ///
    /// # Panics
    ///
    /// If [`open`](Self::open) fails.
    pub fn context(&self) -> Context<'static> {
        let context = self.open().expect("the device opens");
        // SAFETY: the context is live, and handed over.
        unsafe { Context::from_raw(context) }.expect("it is not null")
    }

    /// The device for the list of [`ibverbs::devices`], which a program gives to [`ibverbs::provider::install`]. It lives as
    /// long as the device. From now on, it has no GUID.
    pub fn listed(&self) -> NonNull<ffi::ibv_device> {
        // SAFETY: the handle is valid.
        let device = unsafe { raw::device_listed(self.raw.as_ptr()) };
        NonNull::new(device.cast()).expect("a device has one")
    }

    /// Messages arrive in this many of the oldest [held receives](Builder::held_receives), or in all of them.
    /// Returns in how many.
    pub fn deliver(&self, messages: u32) -> u32 {
        // SAFETY: the handle is valid.
        unsafe { raw::device_deliver(self.as_raw(), messages) }
    }

    /// The handle for the functions in [`raw`].
    pub fn as_raw(&self) -> *mut raw::function_device {
        self.raw.as_ptr()
    }

    fn from_options(options: &raw::device_options) -> io::Result<Self> {
        // SAFETY: options is read only.
        let raw = unsafe { raw::device_create(options) };
        NonNull::new(raw).map(|raw| Self { raw }).ok_or_else(io::Error::last_os_error)
    }
}

/// Asserts that device.h knows the handle. An unknown one is an error in the test itself.
#[track_caller]
fn known(error: i32, what: &str) {
    assert_eq!(error, 0, "the function device does not know this {what}");
}

fn c_name(verb: &str) -> CString {
    CString::new(verb).expect("a verb's name has no NUL")
}
