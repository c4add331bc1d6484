//! A connection that is being made, and what becomes of it when it is given up.

use std::mem::ManuallyDrop;

use super::connectable::sealed;
use super::id::Id;

/// A queue pair or channel and its identifier, from `rdma_connect` or `rdma_accept` until the connection is
/// established.
///
/// On iWARP the kernel destroys either only when the peer has answered, or when its time is up (10 s with Soft-iWARP).
#[derive(Debug)]
pub(super) struct Attempt<Q: sealed::Connected> {
    pub(super) object: ManuallyDrop<Q>,
    pub(super) id: ManuallyDrop<Id>,
    pub(super) iwarp: bool,
}

impl<Q: sealed::Connected> Attempt<Q> {
    pub(super) fn new(object: Q, id: Id, iwarp: bool) -> Self {
        Self { object: ManuallyDrop::new(object), id: ManuallyDrop::new(id), iwarp }
    }

    /// Both of them, for a connection that is established.
    pub(super) fn into_parts(self) -> (Q, Id) {
        // SAFETY: what is forgotten is not used again.
        unsafe { ManuallyDrop::new(self).take() }
    }

    /// # Safety
    ///
    /// Neither is used again.
    unsafe fn take(&mut self) -> (Q, Id) {
        // SAFETY: the caller promises that they are taken once.
        unsafe { (ManuallyDrop::take(&mut self.object), ManuallyDrop::take(&mut self.id)) }
    }
}

impl<Q: sealed::Connected> Drop for Attempt<Q> {
    fn drop(&mut self) {
        // SAFETY: it is dropped.
        let (object, id) = unsafe { self.take() };
        if self.iwarp {
            object.give_up(id);
        } else {
            drop((object, id));
        }
    }
}
