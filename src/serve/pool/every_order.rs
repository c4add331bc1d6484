//! Threads that share a pool, in every order.

use loom::cell::UnsafeCell;

use super::free_chunks::FreeChunks;
use crate::base::sync::{AtomicBool, Ordering, in_every_order};

/// Only a chunk's user touches its number: loom finds two users.
struct Chunks<const N: usize> {
    free: FreeChunks,
    chunks: [UnsafeCell<u32>; N],
    has_ended: AtomicBool,
}

// SAFETY: only the thread that has taken a chunk uses its number.
unsafe impl<const N: usize> Sync for Chunks<N> {}

impl<const N: usize> Chunks<N> {
    fn new() -> Self {
        let chunks = [(); N].map(|()| UnsafeCell::new(0));
        let free = FreeChunks::new(N as u32).unwrap();
        Self { free, chunks, has_ended: AtomicBool::new(false) }
    }

    fn give_back(&self, index: u32) {
        // SAFETY: it lives until the world ends, and the chunk was taken.
        let is_back = unsafe { FreeChunks::give_back(&self.free, index) };
        // SAFETY: as above.
        if !is_back && unsafe { FreeChunks::give_back_slowly(&self.free, index, || false) } {
            self.end();
        }
    }

    fn orphan(&self) {
        // SAFETY: it lives until the world ends, and one thread does this.
        if unsafe { FreeChunks::orphan(&self.free) } {
            self.end();
        }
    }

    fn end(&self) {
        assert!(!self.has_ended.swap(true, Ordering::Relaxed), "it ends once");
        for chunk in &self.chunks {
            // SAFETY: no other thread touches it: loom checks that.
            chunk.with_mut(|number| unsafe { *number += 0 });
        }
    }

    fn try_to_use(&self) -> bool {
        let Some(index) = self.free.take() else { return false };
        self.use_taken(index);
        true
    }

    fn use_taken(&self, index: u32) {
        // SAFETY: nothing else has taken it.
        self.chunks[index as usize].with_mut(|number| unsafe { *number += 1 });
        self.give_back(index);
    }

    fn must_use(&self) {
        assert!(self.try_to_use());
    }

    fn check(&self, free: usize, uses: u32) {
        assert_eq!(self.free.count() as usize, free);
        assert_eq!(self.uses(), uses);
    }

    fn uses(&self) -> u32 {
        // SAFETY: no other thread is left.
        let used = self.chunks.iter().map(|chunk| chunk.with(|number| unsafe { *number }));
        used.sum()
    }
}

#[test]
fn a_chunk_has_one_user_at_a_time() {
    let twice = |chunks: &Chunks<2>| (0..2).for_each(|_| chunks.must_use());
    let runs = in_every_order(Chunks::new, [twice, twice], |chunks| chunks.check(2, 4));
    assert!(runs > 10, "{runs}");
}

/// Between two takes, another thread takes the first chunk, which becomes the first again.
#[test]
fn a_head_that_is_as_it_was_is_not_taken_for_the_same() {
    let once = |chunks: &Chunks<3>| chunks.must_use();
    let both = |chunks: &Chunks<3>| {
        let [one, two] = [(); 2].map(|()| chunks.free.take().unwrap());
        chunks.use_taken(one);
        chunks.use_taken(two);
    };
    in_every_order(Chunks::new, [once, both], |chunks| {
        chunks.check(3, 3);
        let mut all = [(); 3].map(|()| chunks.free.take().unwrap());
        all.sort_unstable();
        assert_eq!((all, chunks.free.take()), ([0, 1, 2], None));
    });
}

#[test]
fn who_finds_no_chunk_does_not_wait_for_one() {
    let once = |chunks: &Chunks<1>| _ = chunks.try_to_use();
    in_every_order(Chunks::new, [once, once, once], |chunks| {
        assert_eq!(chunks.free.count(), 1);
        assert!(chunks.try_to_use());
    });
}

/// A thread that sees no chunk after it says that it waits is seen by the one that gives a chunk back.
#[test]
fn no_wake_up_is_lost() {
    let waits = |chunks: &Chunks<1>| {
        chunks.free.set_waited_for(true);
        if chunks.free.take().is_none() {
            chunks.has_ended.store(true, Ordering::Relaxed);
        }
    };
    let gives_back = |chunks: &Chunks<1>| {
        // SAFETY: it lives until the world ends, and the chunk was taken.
        let is_back = unsafe { FreeChunks::give_back(&chunks.free, 0) };
        if !is_back {
            // SAFETY: as above.
            unsafe { FreeChunks::give_back_slowly(&chunks.free, 0, || true) };
            // SAFETY: no other thread touches it.
            chunks.chunks[0].with_mut(|woken| unsafe { *woken += 1 });
        }
    };
    let in_use = || {
        let chunks = Chunks::new();
        chunks.free.take().unwrap();
        chunks
    };
    in_every_order(in_use, [waits, gives_back], |chunks| {
        // SAFETY: no other thread is left.
        let woken = chunks.chunks[0].with(|woken| unsafe { *woken }) > 0;
        assert!(woken || !chunks.has_ended.load(Ordering::Relaxed));
    });
}

#[test]
fn the_pool_ends_once_and_after_all_uses() {
    let in_use = || {
        let chunks = Chunks::<2>::new();
        chunks.free.take().unwrap();
        chunks.free.take().unwrap();
        chunks
    };
    let threads: [fn(&Chunks<2>); 3] =
        [|chunks| chunks.use_taken(0), |chunks| chunks.use_taken(1), Chunks::orphan];
    in_every_order(in_use, threads, |chunks| {
        assert!(chunks.has_ended.load(Ordering::Relaxed));
        assert_eq!(chunks.uses(), 2);
    });
}
