//! Epochs, which distinguish the work requests of one connection from those of all others.
//!
//! A work request of a channel is numbered `epoch << 32 | index`. The index is its slot in the table of
//! what is in flight. The epoch comes from a counter of the process, each time that a queue pair is
//! made, connected or reset, so that completions that an earlier connection of the queue pair (or of
//! another one with the same number) left in a completion queue are recognised and dropped.

use std::sync::atomic::{AtomicU32, Ordering};

/// The next epoch. It begins at 1, so that a small number is never taken for one of our requests.
static NEXT: AtomicU32 = AtomicU32::new(1);

/// An epoch that is not among the last 4 billion of this process, and not 0: no request has the number 0.
pub(super) fn new_epoch() -> u32 {
    take(&NEXT)
}

fn take(next: &AtomicU32) -> u32 {
    match next.fetch_add(1, Ordering::Relaxed) {
        0 => take(next),
        epoch => epoch,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_epoch_is_0() {
        let next = AtomicU32::new(u32::MAX - 1);
        assert_eq!([(); 4].map(|()| take(&next)), [u32::MAX - 1, u32::MAX, 1, 2]);
    }
}
