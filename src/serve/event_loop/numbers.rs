//! Channels by queue pair number.

use super::slots::no_memory;
use crate::base::Result;

/// A hash table with linear probing, at most half full.
pub(super) struct Numbers {
    /// A power of two in length.
    entries: Vec<Option<(u32, u32)>>,
    len: usize,
}

/// Returns where a search begins. Devices number queue pairs in steps of a power of two; Fibonacci hashing spreads
/// these evenly.
#[inline]
fn start(number: u32, size: usize) -> usize {
    ((u64::from(number.wrapping_mul(0x9e37_79b1)) * size as u64) >> 32) as usize
}

impl Numbers {
    pub(super) fn new() -> Self {
        Self { entries: vec![None; 8], len: 0 }
    }

    /// Finds the number's entry, or the free one for it.
    #[inline]
    fn position(&self, number: u32) -> usize {
        let mask = self.entries.len() - 1;
        let mut at = start(number, self.entries.len());
        // This ends: at least half of the entries are free.
        while self.entries[at].is_some_and(|entry| entry.0 != number) {
            at = (at + 1) & mask;
        }
        at
    }

    #[inline]
    pub(super) fn get(&self, number: u32) -> Option<usize> {
        self.entries[self.position(number)].map(|entry| entry.1 as usize)
    }

    /// Makes room, so that `insert` does not allocate.
    ///
    /// # Errors
    ///
    ///  - `ENOMEM`: out of memory.
    pub(super) fn reserve(&mut self) -> Result<()> {
        if (self.len + 1) * 2 > self.entries.len() {
            let size = self.entries.len() * 2;
            let mut entries = Vec::new();
            entries.try_reserve_exact(size).map_err(|_| no_memory())?;
            entries.resize(size, None);
            for entry in std::mem::replace(&mut self.entries, entries).into_iter().flatten() {
                let position = self.position(entry.0);
                self.entries[position] = Some(entry);
            }
        }
        Ok(())
    }

    pub(super) fn insert(&mut self, number: u32, channel: usize) {
        let at = self.position(number);
        if self.entries[at].replace((number, channel as u32)).is_none() {
            self.len += 1;
        }
    }

    /// Does nothing if a newer queue pair has got the number.
    pub(super) fn remove(&mut self, number: u32, channel: usize) {
        let mut at = self.position(number);
        if self.entries[at].take_if(|entry| entry.1 as usize == channel).is_none() {
            return;
        }
        self.len -= 1;
        // The removed entry may have displaced those that follow.
        let mask = self.entries.len() - 1;
        loop {
            at = (at + 1) & mask;
            let Some(entry) = self.entries[at].take() else { return };
            let position = self.position(entry.0);
            self.entries[position] = Some(entry);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_found_in_a_few_steps_however_many_there_are() {
        let channels = if cfg!(miri) { 60 } else { 10_000 };
        for step in [1, 2, 4, 64, 256, 4096, 0x1_0001] {
            let mut numbers = Numbers::new();
            let of = |channel: usize| 0x1234 + channel as u32 * step;
            for channel in 0..channels {
                numbers.reserve().unwrap();
                numbers.insert(of(channel), channel);
            }
            let mask = numbers.entries.len() - 1;
            for channel in 0..channels {
                let begin = start(of(channel), numbers.entries.len());
                let steps = numbers.position(of(channel)).wrapping_sub(begin) & mask;
                assert!(
                    steps < 8,
                    "{steps} steps to channel {channel}, numbers in steps of {step}"
                );
                assert_eq!(numbers.get(of(channel)), Some(channel));
            }
        }
    }

    #[test]
    fn numbers_are_found_after_any_insertions_and_removals() {
        let mut numbers = Numbers::new();
        let mut model = std::collections::BTreeMap::new();
        // Few distinct low bits, so that many collide.
        let mut state = 1_u32;
        for step in 0..if cfg!(miri) { 12 } else { 5_000 } {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let number = (state >> 16) % 16 + ((state >> 24) % 8) * 1024;
            if state & 0x800 == 0 {
                numbers.reserve().unwrap();
                numbers.insert(number, step);
                model.insert(number, step);
            } else {
                numbers.remove(number, usize::MAX);
                numbers.remove(number, model.remove(&number).unwrap_or(0));
            }
            assert_eq!(numbers.len, model.len());
            assert!(numbers.len * 2 <= numbers.entries.len());
            for high in 0..8 {
                for low in 0..16 {
                    let number = low + high * 1024;
                    assert_eq!(numbers.get(number), model.get(&number).copied());
                }
            }
        }
    }
}
