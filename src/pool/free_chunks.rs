//! Which chunks of a pool are free, and for how long the pool is there.

use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// What one reference adds to the state, whose lower half counts free chunks.
const REFERENCE: u64 = 1 << 32;
/// The bit of the state that says that tasks wait.
const WAITED_FOR: u64 = 1 << 63;

/// The free chunks of a pool. Any thread takes and gives back, without a lock, at a cost that does not grow with the pool.
///
/// Whoever takes a chunk first takes one off the count, and then finds a bit: there is one for it, since whoever gives a chunk
/// back sets the bit first. So the count alone says that there is none, and nobody searches in vain.
///
/// The count is in one word with the references to the pool, so that who gives the last chunk back knows that it was the last.
pub(super) struct FreeChunks {
    /// A bit for each chunk: 1 if it is free.
    words: Box<[AtomicU64]>,
    /// A bit for each word: 0 if it has no free chunk. Then a bit for each word of these, and so on, up to a single word.
    levels: Vec<Box<[AtomicU64]>>,
    /// The word in which a chunk was found last.
    latest: AtomicU32,
    /// How many chunks are free, how many references there are (that of the pool's owner, and others for a moment), and whether
    /// tasks wait.
    state: AtomicU64,
    chunks: u32,
}

impl FreeChunks {
    /// `chunks` free chunks, and a reference, or `None` if there is no memory for them.
    pub(super) fn new(chunks: u32) -> Option<Self> {
        let words = ones(chunks as usize)?;
        let (mut levels, mut below) = (Vec::new(), words.len());
        while below > 1 {
            levels.try_reserve(1).ok()?;
            levels.push(ones(below)?);
            below = below.div_ceil(64);
        }
        let state = AtomicU64::new(REFERENCE | u64::from(chunks));
        Some(Self { words, levels, latest: AtomicU32::new(0), state, chunks })
    }

    /// The number of chunks that are free at this moment.
    pub(super) fn count(&self) -> u32 {
        self.state.load(Ordering::Relaxed) as u32
    }

    /// Takes a chunk, unless all are in use. What its latest user did to it comes before this.
    #[inline(always)]
    pub(super) fn take(&self) -> Option<u32> {
        let mut state = self.state.load(Ordering::Relaxed);
        loop {
            if state as u32 == 0 {
                return None;
            }
            // After the bits of all chunks that it counts.
            let order = (Ordering::Acquire, Ordering::Relaxed);
            match self.state.compare_exchange_weak(state, state - 1, order.0, order.1) {
                Ok(_) => break,
                Err(now) => state = now,
            }
        }
        let latest = self.latest.load(Ordering::Relaxed);
        Some(match self.take_of(latest) {
            Some(index) => index,
            None => self.find(),
        })
    }

    /// Takes a chunk of a word.
    #[inline(always)]
    fn take_of(&self, word: u32) -> Option<u32> {
        let free = &self.words[word as usize];
        loop {
            let bits = free.load(Ordering::Relaxed);
            if bits == 0 {
                return None;
            }
            let bit = bits.trailing_zeros();
            if free.fetch_and(!(1 << bit), Ordering::Acquire) & (1 << bit) != 0 {
                return Some(word * 64 + bit);
            }
        }
    }

    /// Finds a chunk, of which there is one for the caller.
    #[cold]
    #[inline(never)]
    fn find(&self) -> u32 {
        loop {
            let found = self.climb_down().or_else(|| {
                // For a moment, a level may not know of a chunk. Each that this misses another thread has taken meanwhile.
                (0..self.words.len() as u32).find_map(|word| self.take_of(word))
            });
            if let Some(index) = found {
                self.latest.store(index / 64, Ordering::Relaxed);
                return index;
            }
        }
    }

    /// Takes a chunk that the levels know of.
    fn climb_down(&self) -> Option<u32> {
        'again: loop {
            let mut word = 0;
            for (level, bits) in self.levels.iter().enumerate().rev() {
                let bits = bits[word].load(Ordering::Relaxed);
                if bits == 0 {
                    if level + 1 == self.levels.len() {
                        return None;
                    }
                    self.note_empty(level + 1, word);
                    continue 'again;
                }
                word = word * 64 + bits.trailing_zeros() as usize;
            }
            match self.take_of(word as u32) {
                None if self.levels.is_empty() => return None,
                None => self.note_empty(0, word),
                taken => return taken,
            }
        }
    }

    /// Tells a level that the word below is empty, unless it is not any more.
    fn note_empty(&self, level: usize, word: usize) {
        let (above, bit) = (&self.levels[level][word / 64], 1 << (word % 64));
        // If this comes after a `note_free`, so does the load; and if it comes before, that sets the bit.
        above.fetch_and(!bit, Ordering::AcqRel);
        let below = if level == 0 { &self.words } else { &self.levels[level - 1] };
        if below[word].load(Ordering::Acquire) != 0 {
            above.fetch_or(bit, Ordering::AcqRel);
        }
    }

    /// Tells the levels that a word has a free chunk, and had none.
    #[cold]
    #[inline(never)]
    fn note_free(&self, mut word: usize) {
        for level in &self.levels {
            if level[word / 64].fetch_or(1 << (word % 64), Ordering::AcqRel) != 0 {
                return;
            }
            word /= 64;
        }
    }

    /// Gives a chunk back that was taken. True: the caller now has a reference. It is to wake a task that
    /// [waits](Self::set_waited_for), and then to [release](Self::release) it. False: there may be nothing at `this` any more.
    ///
    /// # Safety
    ///
    /// `this` is valid while the caller has the chunk.
    #[inline(always)]
    pub(super) unsafe fn give_back(this: *const Self, index: u32) -> bool {
        // SAFETY: the caller has the chunk until it is counted.
        let (words, state) = unsafe { (&(*this).words, &(*this).state) };
        let word = index as usize / 64;
        // The bit is 0.
        if words[word].fetch_add(1 << (index % 64), Ordering::AcqRel) == 0 {
            // SAFETY: as above.
            unsafe { &*this }.note_free(word);
        }
        let mut seen = state.load(Ordering::Relaxed);
        // That of the owner, and no task waits.
        while seen >> 32 == REFERENCE >> 32 {
            let order = (Ordering::Release, Ordering::Relaxed);
            match state.compare_exchange_weak(seen, seen + 1, order.0, order.1) {
                Ok(_) => return false,
                Err(now) => seen = now,
            }
        }
        state.fetch_add(REFERENCE + 1, Ordering::AcqRel);
        true
    }

    /// Gives a reference up. True: it was the last one, and no chunk is in use, so the pool is the caller's alone. False: there
    /// may be nothing at `this` any more.
    ///
    /// # Safety
    ///
    /// `this` is valid while the caller has the reference.
    pub(super) unsafe fn release(this: *const Self) -> bool {
        // SAFETY: the caller has the reference until it is no more counted.
        let (state, chunks) = unsafe { (&(*this).state, (*this).chunks) };
        state.fetch_sub(REFERENCE, Ordering::AcqRel) == REFERENCE | u64::from(chunks)
    }

    /// Whether tasks wait.
    pub(super) fn is_waited_for(&self) -> bool {
        self.state.load(Ordering::Relaxed) & WAITED_FOR != 0
    }

    /// Whether tasks wait, of which one is to be woken when a chunk comes back. From now on [`take`](Self::take) finds the chunks
    /// that came back before.
    pub(super) fn set_waited_for(&self, waited_for: bool) {
        if waited_for {
            self.state.fetch_or(WAITED_FOR, Ordering::AcqRel);
        } else {
            self.state.fetch_and(!WAITED_FOR, Ordering::AcqRel);
        }
    }
}

/// Words with this many bits, all 1.
fn ones(bits: usize) -> Option<Box<[AtomicU64]>> {
    let words = bits.div_ceil(64);
    let mut ones = Vec::new();
    ones.try_reserve_exact(words).ok()?;
    ones.extend((0..words).map(|word| match bits - word * 64 {
        bits @ ..64 => AtomicU64::new((1 << bits) - 1),
        _ => AtomicU64::new(u64::MAX),
    }));
    Some(ones.into())
}

#[cfg(all(test, not(ibverbs_loom)))]
mod tests {
    use super::*;

    /// Every bit of a level is 1 where the word below is not empty: the next search finds it.
    fn check(free: &FreeChunks) {
        let mut below = &free.words;
        for level in &free.levels {
            for (word, bits) in below.iter().enumerate() {
                let bit = level[word / 64].load(Ordering::Relaxed) >> (word % 64) & 1;
                assert!(bit == 1 || bits.load(Ordering::Relaxed) == 0, "word {word}");
            }
            below = level;
        }
    }

    #[test]
    fn each_chunk_is_taken_once_at_any_size() {
        let most = if cfg!(miri) { 70 } else { 64 * 64 * 64 + 1 };
        for chunks in [1, 63, 64, 65, 4095, 4096, 4097, most].into_iter().filter(|&n| n <= most) {
            let free = FreeChunks::new(chunks).unwrap();
            let mut taken: Vec<_> = std::iter::from_fn(|| free.take()).collect();
            assert_eq!((taken.len() as u32, free.count()), (chunks, 0));
            taken.sort_unstable();
            assert!((0..).zip(&taken).all(|(index, &taken)| index == taken));
            check(&free);
            // Any of them comes back, and is found.
            for &index in &[0, chunks / 2, chunks - 1] {
                // SAFETY: it is there, and the chunk was taken.
                assert!(!unsafe { FreeChunks::give_back(&free, index) });
                check(&free);
                assert_eq!((free.take(), free.take()), (Some(index), None));
            }
        }
    }

    /// A search looks at one word of each level, and not at all words.
    #[test]
    fn a_chunk_is_found_in_as_many_steps_as_there_are_levels() {
        let chunks = if cfg!(miri) { 64 * 64 } else { 64 * 64 * 64 };
        let free = FreeChunks::new(chunks).unwrap();
        while free.take().is_some() {}
        // SAFETY: it is there, and the chunk was taken.
        unsafe { FreeChunks::give_back(&free, chunks - 1) };
        // One more, of which the levels do not know: who looks at all words finds it first.
        free.words[5].store(1, Ordering::Relaxed);
        free.state.fetch_add(1, Ordering::Relaxed);
        free.latest.store(0, Ordering::Relaxed);
        assert_eq!(free.take(), Some(chunks - 1));
        // And it is found all the same.
        assert_eq!(free.take(), Some(5 * 64));
    }

    #[test]
    fn the_last_of_owner_and_chunks_ends_the_pool() {
        let free = FreeChunks::new(2).unwrap();
        let (one, two) = (free.take().unwrap(), free.take().unwrap());
        // SAFETY: it is there; what is given back was taken, and what is released was had.
        unsafe {
            assert!(!FreeChunks::give_back(&free, one));
            assert!(!FreeChunks::release(&free), "a chunk is in use");
            assert!(FreeChunks::give_back(&free, two), "there is no owner");
            assert!(FreeChunks::release(&free));
        }
    }
}
