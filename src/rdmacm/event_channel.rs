//! The files through which the connection manager reports events.

use std::fs::{self, File};
use std::io;
use std::os::fd::RawFd;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::time::Instant;

use super::WAIT;
use super::event::Copied;
use crate::device::{event_file, fork, no_device_for};
use crate::error::{Error, Result};
use crate::ffi;

/// The file that the kernel's module `rdma_ucm` makes.
const FILE: &str = "/dev/infiniband/rdma_cm";

/// `struct rdma_event_channel`: an open file, for the events of one identifier (and, if that listens,
/// of the requests that arrive, until each has moved to a channel of its own).
#[derive(Debug)]
pub(super) struct EventChannel {
    raw: NonNull<ffi::rdma_event_channel>,
}

// SAFETY: librdmacm allows its functions from any thread; what changes the channel takes `&mut self`.
unsafe impl Send for EventChannel {}
// SAFETY: as above.
unsafe impl Sync for EventChannel {}

impl Drop for EventChannel {
    fn drop(&mut self) {
        // SAFETY: the channel is live, and no identifier uses it any more: each owns its channel, and
        // is destroyed before it.
        unsafe { ffi::rdma_destroy_event_channel(self.raw.as_ptr()) }
    }
}

impl EventChannel {
    /// Opens a channel whose reads do not block.
    ///
    /// # Errors
    ///
    ///  - `ENOENT`, `EACCES`, `EPERM`, `ENXIO`: the file is missing, may not be opened, or is not what it
    ///    should be.
    ///  - `ENODEV`: the machine has no RDMA device.
    ///  - `EMFILE`, `ENFILE`, `ENOMEM`: something has run out.
    pub(super) fn new() -> Result<Self> {
        const VERB: &str = "rdma_create_event_channel";
        let raw = {
            // librdmacm lists the devices, and opens one when an address is on it.
            let mut opened = fork::exclusive();
            *opened = true;
            ffi::set_errno(0);
            // SAFETY: no requirements.
            NonNull::new(unsafe { ffi::rdma_create_event_channel() })
        };
        let raw = raw.ok_or_else(|| explain(Error::new(VERB, ffi::errno())))?;
        let channel = Self { raw };
        event_file::set_nonblocking(VERB, channel.fd())?;
        Ok(channel)
    }

    pub(super) fn as_ptr(&self) -> *mut ffi::rdma_event_channel {
        self.raw.as_ptr()
    }

    pub(super) fn fd(&self) -> RawFd {
        // SAFETY: the channel is live.
        unsafe { (*self.raw.as_ptr()).fd }
    }

    /// `rdma_get_cm_event`, `rdma_ack_cm_event`: takes an event, if there is one. It is copied and
    /// acknowledged right away, because destroying an identifier waits until all of its events are
    /// acknowledged.
    pub(super) fn next(&mut self) -> Result<Option<Copied>> {
        const VERB: &str = "rdma_get_cm_event";
        let mut event = ptr::null_mut();
        // SAFETY: the channel is live, and the pointer is ours. `self` is borrowed exclusively, so nothing
        // else reads, and no identifier of an event is destroyed meanwhile.
        let read = || unsafe { ffi::rdma_get_cm_event(self.raw.as_ptr(), &mut event) };
        if !event_file::read_event(VERB, read)? {
            return Ok(None);
        }
        // SAFETY: the event was read just now.
        let copied = unsafe { Copied::of(event) };
        // SAFETY: the event was read once and is not used any more. It cannot fail.
        unsafe { ffi::rdma_ack_cm_event(event) };
        Ok(Some(copied))
    }

    /// As `next`, but waits for an event until `deadline`, or without limit if there is no deadline.
    ///
    /// # Errors
    ///
    ///  - `ETIMEDOUT` of [`WAIT`]: the time limit has passed.
    pub(super) fn next_before(&mut self, deadline: Option<Instant>) -> Result<Copied> {
        event_file::take_before(WAIT, self.fd(), deadline, || self.next())
    }
}

/// The error for a file that cannot be opened or used.
#[cold]
fn explain(error: Error) -> Error {
    let reason = |errno, reason| Error::with_reason(error.verb(), errno, reason);
    match error.errno() {
        libc::EMFILE | libc::ENFILE | libc::ENOMEM => error,
        libc::ENODEV => no_device_for(error.verb()),
        // librdmacm does not report why it could not open the file.
        errno => match fs::metadata(Path::new(FILE)) {
            Err(_) => reason(
                libc::ENOENT,
                "there is no file /dev/infiniband/rdma_cm: load the kernel's module rdma_ucm \
                 (modprobe rdma_ucm), and pass the file to this container if it is one",
            ),
            Ok(file) if !file.file_type().is_char_device() => reason(
                libc::ENXIO,
                "/dev/infiniband/rdma_cm is not the device of the kernel's module rdma_ucm: remove \
                 it, and load the module (modprobe rdma_ucm)",
            ),
            Ok(_) => match File::options().read(true).write(true).open(FILE) {
                Err(denied) if denied.kind() == io::ErrorKind::PermissionDenied => reason(
                    denied.raw_os_error().unwrap_or(libc::EACCES),
                    "the process may not open /dev/infiniband/rdma_cm",
                ),
                _ => reason(
                    if errno == libc::ENOENT { libc::ENXIO } else { errno },
                    "/dev/infiniband/rdma_cm cannot be used: is the kernel's module rdma_ucm loaded?",
                ),
            },
        },
    }
}
