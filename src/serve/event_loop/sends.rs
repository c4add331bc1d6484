//! What the senders of a channel share with the loop.

use std::ffi::c_int;
use std::sync::Arc;

use super::ring::Ring;
use crate::base::{
    ffi,
    sync::{Mutex, MutexGuard},
};
use crate::channel::parts::{Core, OwnTemplates, Queue, Target, Templates};
use crate::channel::{OperationError, TransportError};

pub(super) struct Sends<B> {
    pub(super) core: Arc<Core>,
    pub(super) target: Target,
    /// With their tokens.
    pub(super) ring: Ring<(u64, B)>,
    pub(super) posting: Mutex<Posting>,
}

// SAFETY: the queue pair of `target` is live until `ended` is set, and any thread may post to it. The thread that has the lock of
// `posting` alone uses the templates.
unsafe impl<B: Send> Send for Sends<B> {}
// SAFETY: as above.
unsafe impl<B: Send> Sync for Sends<B> {}

pub(super) struct Posting {
    pub(super) templates: OwnTemplates,
    /// The place of the next send.
    pub(super) next: usize,
    pub(super) ended: Option<TransportError>,
}

impl<B> Sends<B> {
    pub(super) fn lock(&self) -> MutexGuard<'_, Posting> {
        self.posting.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    #[cold]
    pub(super) fn post_failed(
        &self,
        posting: &mut Posting,
        number: u64,
        (verb, returned): (&'static str, c_int),
    ) -> OperationError<B> {
        let error = ffi::failed(verb, returned).into();
        // SAFETY: the caller has the lock.
        if unsafe { Templates::may_be_posted(posting.templates.as_ptr(), Queue::Send) } {
            posting.ended = Some(TransportError::Stopped);
            // If this fails, removal ends the operations.
            let _ = self.core.modify(ffi::ibv_qp_state::IBV_QPS_ERR);
            return OperationError::from(error);
        }
        // Of a device that has completed it too, the loop has it.
        let buffer = self.ring.take(number).map(|(_, buffer)| buffer);
        if buffer.is_some() {
            self.ring.free(number);
        }
        OperationError { error, buffer }
    }
}
