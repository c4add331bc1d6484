//! A connection that is being made, and what becomes of it when it is given up.

use std::mem::ManuallyDrop;
#[cfg(feature = "tokio")]
use std::thread;

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
    /// How both are dropped on iWARP, where either may wait for the peer.
    give_up: fn(Q, Id),
}

/// A thread waits for the peer: neither the caller, nor the reactor that gets the queue pair when the identifier is gone.
#[cfg(feature = "tokio")]
fn in_a_thread<Q: Send + 'static, I: Send + 'static>(object: Q, id: I) {
    let in_this_order = (id, object);
    // If there is no thread for it, this one waits after all.
    let _ = thread::Builder::new().name("give up".into()).spawn(move || drop(in_this_order));
}

impl<Q: sealed::Connected> Attempt<Q> {
    pub(super) fn new(object: Q, id: Id, iwarp: bool) -> Self {
        let (object, id) = (ManuallyDrop::new(object), ManuallyDrop::new(id));
        Self { object, id, iwarp, give_up: Q::give_up }
    }

    /// The caller's thread must not wait for the peer.
    #[cfg(feature = "tokio")]
    pub(super) fn give_up_elsewhere(&mut self)
    where
        Q: Send + 'static,
    {
        self.give_up = in_a_thread;
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
            return (self.give_up)(object, id);
        }
        drop((object, id));
    }
}
