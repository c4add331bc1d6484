//! Which chunks of a pool are free.

use crate::sync::{AtomicU64, Ordering};

/// A bit for each chunk: 1 if it is free. Any thread takes and gives back, without a lock.
pub(super) struct FreeChunks(Box<[AtomicU64]>);

impl FreeChunks {
    /// `chunks` free chunks, or `None` if there is no memory for them.
    pub(super) fn new(chunks: usize) -> Option<Self> {
        let words = chunks.div_ceil(64);
        let mut free = Vec::new();
        free.try_reserve_exact(words).ok()?;
        free.extend((0..words).map(|word| match chunks - word * 64 {
            bits @ ..64 => AtomicU64::new((1 << bits) - 1),
            _ => AtomicU64::new(u64::MAX),
        }));
        Some(Self(free.into()))
    }

    /// Takes a chunk, unless all are in use. What its latest user did to it comes before this.
    pub(super) fn take(&self) -> Option<u32> {
        for (word, free) in self.0.iter().enumerate() {
            loop {
                // One order with `give_back` and the count of those that wait: see `Waiting`.
                let bits = free.load(Ordering::SeqCst);
                if bits == 0 {
                    break;
                }
                let bit = bits.trailing_zeros();
                if free.fetch_and(!(1 << bit), Ordering::Acquire) & (1 << bit) != 0 {
                    return Some(word as u32 * 64 + bit);
                }
            }
        }
        None
    }

    /// Gives a chunk back that was taken.
    pub(super) fn give_back(&self, index: u32) {
        self.0[index as usize / 64].fetch_or(1 << (index % 64), Ordering::SeqCst);
    }

    /// The number of chunks that are free at this moment.
    pub(super) fn count(&self) -> usize {
        self.0.iter().map(|free| free.load(Ordering::Relaxed).count_ones() as usize).sum()
    }
}
