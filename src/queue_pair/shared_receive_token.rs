//! The number by which events name a shared receive queue.

use std::sync::atomic::Ordering;

use crate::device::token;
use crate::queue_pair::SharedReceiveQueue;

impl SharedReceiveQueue<'_> {
    /// The number by which [`AsyncEvents`](crate::device::AsyncEvents) name this queue (0 unless set).
    #[doc(alias = "srq_context")]
    pub fn token(&self) -> usize {
        // SAFETY: the queue is live.
        unsafe { token(self.as_raw()) }.load(Ordering::Relaxed) as usize
    }

    /// Sets the number by which [`AsyncEvents`](crate::device::AsyncEvents) name this queue, for events that are read from now on.
    #[doc(alias = "srq_context")]
    pub fn set_token(&self, to: usize) {
        // SAFETY: the queue is live.
        unsafe { token(self.as_raw()) }
            .store(std::ptr::without_provenance_mut(to), Ordering::Relaxed);
    }
}
