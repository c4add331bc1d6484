//! The files that devices write events to. A thread that sleeps on one lets its device work meanwhile.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use crate::driver::Shared;

/// `inode` tells whether the descriptor is still that file: libibverbs closes completion channels without telling the
/// provider.
struct EventFile {
    inode: u64,
    device: Weak<Shared>,
}

/// Keys are descriptors.
static FILES: Mutex<BTreeMap<c_int, EventFile>> = Mutex::new(BTreeMap::new());

fn files() -> MutexGuard<'static, BTreeMap<c_int, EventFile>> {
    FILES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The inode, which tells a file from a later one with the same descriptor.
pub(crate) fn inode(fd: c_int) -> Option<u64> {
    // SAFETY: the structure is plain data, and the call gets its address.
    unsafe {
        let mut status: libc::stat = std::mem::zeroed();
        #[allow(clippy::unnecessary_cast, reason = "its type differs between architectures")]
        (libc::fstat(fd, &mut status) == 0).then_some(status.st_ino as u64)
    }
}

/// A thread that sleeps on this file lets the device work.
pub(crate) fn add(fd: c_int, device: &Arc<Shared>) {
    if let Some(inode) = inode(fd) {
        files().insert(fd, EventFile { inode, device: Arc::downgrade(device) });
    }
}

/// The device is being freed.
pub(crate) fn forget(device: &Arc<Shared>) {
    files().retain(|_, file| file.device.as_ptr() != Arc::as_ptr(device));
}

fn device_of(fd: c_int) -> Option<Arc<Shared>> {
    let (expected, device) = {
        let files = files();
        let file = files.get(&fd)?;
        (file.inode, file.device.upgrade()?)
    };
    (inode(fd) == Some(expected) && device.is_of_this_process()).then_some(device)
}

/// Called by a thread that is about to sleep until one of the files is readable, of which the last is that of the
/// events, or the deadline has passed. Returns at once if that file is not here.
pub(crate) fn before_sleep(files: &[c_int], deadline: Option<Instant>) {
    if let Some(device) = files.last().and_then(|&fd| device_of(fd)) {
        device.driver().sleep(&device, files, deadline);
    }
}
