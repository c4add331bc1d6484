//! How often this process was forked.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

/// The number of times that this process is the child of a fork.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Changes in each child of a fork: what the parent has is not the child's to use.
pub(crate) fn forks() -> u32 {
    static ONCE: Once = Once::new();
    extern "C" fn count() {
        FORKS.fetch_add(1, Ordering::Relaxed);
    }
    ONCE.call_once(|| {
        // SAFETY: the function may be called in any child: it changes an atomic only. If memory is short, a child that
        // goes on to use its parent's device may disturb that device's connections, as it may with its sockets.
        unsafe { libc::pthread_atfork(None, None, Some(count)) };
    });
    FORKS.load(Ordering::Relaxed)
}
