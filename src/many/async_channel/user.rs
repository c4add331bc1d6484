//! How a channel and its futures hold what they share.

use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::Arc;

use super::state::Shared;

/// A reference of an [`AsyncChannel`](super::AsyncChannel) or a future.
///
/// The queue pair is destroyed with the last reference. The verb may take long, and a future may be dropped on a thread of a
/// runtime, so the last one leaves that to the reactor.
pub(super) struct User(ManuallyDrop<Arc<Shared>>);

impl User {
    #[inline]
    pub(super) fn new(shared: &Arc<Shared>) -> Self {
        Self(ManuallyDrop::new(shared.clone()))
    }
}

impl Deref for User {
    type Target = Arc<Shared>;

    #[inline]
    fn deref(&self) -> &Arc<Shared> {
        &self.0
    }
}

impl Drop for User {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: it is taken once, here.
        let shared = unsafe { ManuallyDrop::take(&mut self.0) };
        if let Some(last) = Arc::into_inner(shared) {
            destroy(last);
        }
    }
}

#[cold]
#[inline(never)]
fn destroy(last: Shared) {
    let registry = last.registry.clone();
    // If the reactor is gone, it is destroyed here.
    drop(registry.close(Arc::new(last)));
}
