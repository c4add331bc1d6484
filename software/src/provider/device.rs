//! The device as libibverbs has it.

use std::sync::Arc;
use std::thread::JoinHandle;

use crate::driver::Shared;
use crate::event_files;
use crate::ffi::verbs_device;

/// The object that libibverbs knows: `struct verbs_device`, followed by our fields.
#[repr(C)]
pub(crate) struct RawDevice {
    pub(crate) verbs: verbs_device,
    pub(crate) shared: Arc<Shared>,
    pub(crate) thread: Option<JoinHandle<()>>,
    /// Called before it is freed.
    pub(crate) freed: fn(&Shared),
}

impl RawDevice {
    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Frees the device when its last reference is gone.
    ///
    /// # Safety
    ///
    /// `device` came from `Device::make`, and nobody uses it any more.
    pub(crate) unsafe fn free(device: *mut verbs_device) {
        // SAFETY: the caller vouches for it; the C object is the first member.
        let mut device = unsafe { Box::from_raw(device.cast::<Self>()) };
        if !device.shared.is_of_this_process() {
            // A forked child has no thread to join; the thread's reference is never dropped there.
            std::mem::forget(device);
            return;
        }
        (device.freed)(&device.shared);
        event_files::forget(&device.shared);
        device.shared.driver().stop();
        if let Some(thread) = device.thread.take() {
            // The thread does not panic. The address is free once it has ended.
            std::mem::forget(thread.join());
        }
    }
}
