//! Threads that share a pool, in every order.

use loom::cell::UnsafeCell;

use super::free_chunks::FreeChunks;
use crate::sync::in_every_order;

/// Chunks of which each is a number that only its user touches: loom finds two that do.
struct Chunks<const N: usize> {
    free: FreeChunks,
    chunks: [UnsafeCell<u32>; N],
}

// SAFETY: a number is used by the thread that has taken it.
unsafe impl<const N: usize> Sync for Chunks<N> {}

impl<const N: usize> Chunks<N> {
    fn new() -> Self {
        let chunks = [(); N].map(|()| UnsafeCell::new(0));
        Self { free: FreeChunks::new(N).unwrap(), chunks }
    }

    /// Uses a chunk, if there is one.
    fn try_to_use(&self) -> bool {
        let Some(index) = self.free.take() else { return false };
        // SAFETY: nothing else has taken it.
        self.chunks[index as usize].with_mut(|number| unsafe { *number += 1 });
        self.free.give_back(index);
        true
    }

    /// Uses a chunk, of which there is one for each thread.
    fn must_use(&self) {
        assert!(self.try_to_use());
    }

    /// Every chunk is back, and has been used this number of times in all.
    fn check(&self, uses: u32) {
        assert_eq!(self.free.count(), N);
        // SAFETY: no other thread is left.
        let used = self.chunks.iter().map(|chunk| chunk.with(|number| unsafe { *number }));
        assert_eq!(used.sum::<u32>(), uses);
    }
}

#[test]
fn a_chunk_has_one_user_at_a_time() {
    let twice = |chunks: &Chunks<2>| (0..2).for_each(|_| chunks.must_use());
    let runs = in_every_order(Chunks::new, [twice, twice], |chunks| chunks.check(4));
    assert!(runs > 10, "{runs}");
}

#[test]
fn who_finds_no_chunk_does_not_wait_for_one() {
    let once = |chunks: &Chunks<1>| _ = chunks.try_to_use();
    in_every_order(Chunks::new, [once, once, once], |chunks| {
        assert_eq!(chunks.free.count(), 1);
        assert!(chunks.try_to_use());
    });
}
