//! Free chunks, and the pool's life.

use crate::base::sync::{AtomicU32, AtomicU64, Ordering};

/// Tasks wait.
const WAITED_FOR: u64 = 1;
/// The owner is gone.
const ORPHANED: u64 = 2;
/// Where the head has the number of the first free chunk, from 1 (0: none). The bits above count takes.
const FIRST: u32 = 2;

/// A stack, with one exchange of its head for each take.
///
/// A take reads which chunk is second, then exchanges the head if the count of takes is the same. It misses a change
/// only if others meanwhile take as many chunks as the count has values, or a multiple: 2^52 with a thousand chunks,
/// which takes a year; 2^34 with the [most](Self::MOST), which takes minutes.
pub(super) struct FreeChunks {
    head: AtomicU64,
    /// Bits of the head for the first free chunk.
    index: u64,
    take: u64,
    /// Entries go by chunk number, from 1. Entry 0 is the bottom of the stack.
    links: Box<[Link]>,
    /// Chunks in use. Set when the pool is orphaned.
    in_use: AtomicU32,
}

struct Link {
    /// The chunk below it.
    next: AtomicU32,
    /// Free chunks with this on top.
    depth: AtomicU32,
}

impl FreeChunks {
    pub(super) const MOST: u32 = (1 << 28) - 1;

    pub(super) fn new(chunks: u32) -> Option<Self> {
        let mut links = Vec::new();
        links.try_reserve_exact(chunks as usize + 1).ok()?;
        links.extend((0..=chunks).map(|chunk| Link {
            next: AtomicU32::new(if chunk < chunks { chunk + 1 } else { 0 }),
            depth: AtomicU32::new(if chunk == 0 { 0 } else { chunks - chunk + 1 }),
        }));
        let take = (u64::from(chunks) + 1).next_power_of_two() << FIRST;
        let index = take - (1 << FIRST);
        let (head, in_use) = (AtomicU64::new(1 << FIRST), AtomicU32::new(0));
        Some(Self { head, index, take, links: links.into(), in_use })
    }

    #[inline(always)]
    fn first(&self, head: u64) -> &Link {
        // SAFETY: a head holds the number of a chunk, or 0; `links` has an entry for each.
        unsafe { self.links.get_unchecked(((head & self.index) >> FIRST) as usize) }
    }

    pub(super) fn count(&self) -> u32 {
        self.first(self.head.load(Ordering::Acquire)).depth.load(Ordering::Relaxed)
    }

    /// Takes a chunk. What its last user did to it happens before.
    #[inline(always)]
    pub(super) fn take(&self) -> Option<u32> {
        let mut head = self.head.load(Ordering::Acquire);
        loop {
            let chunk = head & self.index;
            if chunk == 0 {
                return None;
            }
            let next = u64::from(self.first(head).next.load(Ordering::Relaxed)) << FIRST;
            let without = (head - chunk + next).wrapping_add(self.take);
            let order = (Ordering::Acquire, Ordering::Acquire);
            match self.head.compare_exchange_weak(head, without, order.0, order.1) {
                Ok(_) => return Some((chunk >> FIRST) as u32 - 1),
                Err(now) => head = now,
            }
        }
    }

    /// Returns true if the chunk is back: `this` may then dangle. Otherwise tasks wait, or the pool is orphaned, and
    /// the caller [gives it back slowly](Self::give_back_slowly).
    ///
    /// # Safety
    ///
    /// `this` is valid while the caller has the chunk.
    #[inline(always)]
    pub(super) unsafe fn give_back(this: *const Self, chunk: u32) -> bool {
        // SAFETY: the caller has the chunk until the head is exchanged.
        let free = unsafe { &*this };
        let mut seen = free.head.load(Ordering::Acquire);
        while seen & (WAITED_FOR | ORPHANED) == 0 {
            match free.push(chunk, seen) {
                Ok(()) => return true,
                Err(now) => seen = now,
            }
        }
        false
    }

    /// Fails if the head is no longer `seen`.
    #[inline(always)]
    fn push(&self, chunk: u32, seen: u64) -> Result<(), u64> {
        let own = u64::from(chunk) + 1;
        // SAFETY: the caller passes the number of a chunk, and `links` has an entry for each.
        let link = unsafe { self.links.get_unchecked(own as usize) };
        let (below, depth) = (seen & self.index, &self.first(seen).depth);
        link.next.store((below >> FIRST) as u32, Ordering::Relaxed);
        link.depth.store(depth.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        let order = (Ordering::Release, Ordering::Acquire);
        self.head
            .compare_exchange_weak(seen, seen - below + (own << FIRST), order.0, order.1)
            .map(drop)
    }

    /// Calls `next`, while tasks wait, until it has found one, which the caller wakes afterwards. Returns true if the
    /// pool is the caller's alone. Otherwise `this` may dangle.
    ///
    /// # Safety
    ///
    /// `this` is valid while the caller has the chunk.
    pub(super) unsafe fn give_back_slowly(
        this: *const Self,
        chunk: u32,
        mut next: impl FnMut() -> bool,
    ) -> bool {
        // SAFETY: the caller has the chunk until the head is exchanged, or `in_use` has counted it out.
        let free = unsafe { &*this };
        let mut has_next = false;
        loop {
            let seen = free.head.load(Ordering::Acquire);
            if seen & ORPHANED != 0 {
                return free.in_use.fetch_sub(1, Ordering::AcqRel) == 1;
            }
            if seen & WAITED_FOR != 0 && !has_next {
                has_next = next();
            } else if free.push(chunk, seen).is_ok() {
                return false;
            }
        }
    }

    /// Marks the owner as gone: nothing takes a chunk. Returns true if no chunk is in use, and the pool is the caller's
    /// alone. Otherwise `this` may dangle.
    ///
    /// # Safety
    ///
    /// `this` is valid until this is called, and it is called once.
    pub(super) unsafe fn orphan(this: *const Self) -> bool {
        // SAFETY: the owner keeps the pool until the head is exchanged.
        let free = unsafe { &*this };
        let mut seen = free.head.load(Ordering::Acquire);
        loop {
            let left = free.first(seen).depth.load(Ordering::Relaxed);
            let used = (free.links.len() - 1) as u32 - left;
            if used == 0 {
                return true;
            }
            // Threads read it once they see `ORPHANED` in the head.
            free.in_use.store(used, Ordering::Relaxed);
            let order = (Ordering::AcqRel, Ordering::Acquire);
            match free.head.compare_exchange_weak(seen, seen | ORPHANED, order.0, order.1) {
                Ok(_) => return false,
                Err(now) => seen = now,
            }
        }
    }

    pub(super) fn is_waited_for(&self) -> bool {
        self.head.load(Ordering::Relaxed) & WAITED_FOR != 0
    }

    /// Sets whether tasks wait. [`take`](Self::take) then finds the chunks that came back before; later ones wake a
    /// task.
    pub(super) fn set_waited_for(&self, waited_for: bool) {
        if waited_for {
            self.head.fetch_or(WAITED_FOR, Ordering::AcqRel);
        } else {
            self.head.fetch_and(!WAITED_FOR, Ordering::AcqRel);
        }
    }
}

#[cfg(all(test, not(ibverbs_loom)))]
mod tests {
    use super::*;

    fn give_back(free: &FreeChunks, chunk: u32) {
        // SAFETY: it is there, and the chunk was taken.
        assert!(unsafe { FreeChunks::give_back(free, chunk) });
    }

    #[test]
    fn each_chunk_is_taken_once_at_any_size() {
        let most = if cfg!(miri) { 70 } else { 100_000 };
        for chunks in [1, 2, 64, most] {
            let free = FreeChunks::new(chunks).unwrap();
            let taken: Vec<_> = std::iter::from_fn(|| free.take()).collect();
            assert!(taken.iter().copied().eq(0..chunks), "in their order");
            assert_eq!(free.count(), 0);
            for (index, chunk) in (1..).zip([chunks - 1, chunks / 3]).take(chunks.min(2) as usize) {
                give_back(&free, chunk);
                assert_eq!(free.count(), index);
            }
            let again: Vec<_> = std::iter::from_fn(|| free.take()).collect();
            let expected = [chunks / 3, chunks - 1];
            assert_eq!(again, expected[2 - chunks.min(2) as usize..]);
        }
    }

    /// Only the count of takes has changed.
    #[test]
    fn takes_are_counted_up_to_the_end_and_from_the_beginning_again() {
        let free = FreeChunks::new(2).unwrap();
        free.set_waited_for(true);
        free.head.fetch_or(!(free.take - 1), Ordering::Relaxed);
        assert_eq!((free.take(), free.is_waited_for()), (Some(0), true));
        assert_eq!(free.head.load(Ordering::Relaxed), WAITED_FOR | 2 << FIRST);
        assert_eq!((free.take(), free.take()), (Some(1), None));
    }

    #[test]
    fn the_last_of_owner_and_chunks_ends_the_pool() {
        let free = FreeChunks::new(2).unwrap();
        let (one, two) = (free.take().unwrap(), free.take().unwrap());
        give_back(&free, one);
        // SAFETY: it is there, and this is called once.
        assert!(!unsafe { FreeChunks::orphan(&free) }, "a chunk is in use");
        // SAFETY: it is there, and the chunk was taken.
        let [is_back, is_last] = unsafe {
            let is_back = FreeChunks::give_back(&free, two);
            [is_back, FreeChunks::give_back_slowly(&free, two, || unreachable!("none waits"))]
        };
        assert!(!is_back && is_last);
        let unused = FreeChunks::new(2).unwrap();
        // SAFETY: as above.
        assert!(unsafe { FreeChunks::orphan(&unused) });
    }

    #[test]
    fn who_gives_back_has_one_task_at_most_to_wake() {
        let free = FreeChunks::new(1).unwrap();
        let chunk = free.take().unwrap();
        free.set_waited_for(true);
        let mut asked = 0;
        let next = || {
            asked += 1;
            asked == 2
        };
        // SAFETY: it is there, and the chunk was taken.
        let is_back = unsafe { FreeChunks::give_back(&free, chunk) };
        // SAFETY: as above.
        assert!(!is_back && !unsafe { FreeChunks::give_back_slowly(&free, chunk, next) });
        assert_eq!((asked, free.count()), (2, 1));
    }
}
