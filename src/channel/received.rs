//! The lengths of buffers that messages were received into.

use std::ptr::NonNull;

use crate::completion::WorkSuccess;
use crate::memory::{GatherBuffer, KeptLength};

impl WorkSuccess {
    /// If a message was received: tells its buffer how long it is.
    #[inline(always)]
    pub(super) fn tell_buffer<B: GatherBuffer>(&self, buffer: &mut B) {
        if B::KEEPS_LENGTH
            && let Some(len) = self.message_len()
        {
            buffer.received(len as usize);
        }
    }

    /// The same, where only the length is known that the buffer keeps.
    ///
    /// # Safety
    ///
    /// The buffer still exists, and nothing else accesses it.
    pub(super) unsafe fn tell(&self, kept: NonNull<KeptLength>) {
        if let Some(len) = self.message_len() {
            // SAFETY: the caller vouches for it.
            unsafe { KeptLength::receive(kept, len as usize) };
        }
    }
}
