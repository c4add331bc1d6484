//! The inbox of a channel that shares a completion queue.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::in_flight::no_memory;
use super::shared_receives::{Member, Receives};
use crate::error::Result;
use crate::ffi;

/// Not the number of a queue pair: those have 24 bits.
pub(super) const NO_NUMBER: u32 = u32::MAX;

/// What a channel asks its inbox for whenever it polls. It is reached without a search, and used with the router's lock
/// held.
#[derive(Debug)]
pub(super) struct Label {
    /// The index of the inbox.
    pub(super) index: usize,
    number: AtomicU32,
    is_pending: AtomicBool,
}

impl Label {
    pub(super) fn new(index: usize) -> Self {
        Self { index, number: AtomicU32::new(NO_NUMBER), is_pending: AtomicBool::new(false) }
    }

    /// The number of the channel's queue pair, if completions with this number are for this inbox, or
    /// else `NO_NUMBER`.
    #[inline]
    pub(super) fn number(&self) -> u32 {
        self.number.load(Ordering::Relaxed)
    }

    pub(super) fn set_number(&self, number: u32) {
        self.number.store(number, Ordering::Relaxed);
    }

    /// Whether the inbox has a completion, or is `overflown`.
    #[inline]
    pub(super) fn is_pending(&self) -> bool {
        self.is_pending.load(Ordering::Relaxed)
    }

    fn set_pending(&self, is_pending: bool) {
        self.is_pending.store(is_pending, Ordering::Relaxed);
    }
}

/// The completions of one channel, in the order in which they were polled.
pub(super) struct Ring {
    pub(super) label: Arc<Label>,
    pub(super) entries: Box<[ffi::ibv_wc]>,
    first: usize,
    pub(super) len: usize,
    /// A completion found no room: the device has made more completions than there were requests.
    pub(super) overflown: bool,
    /// The program's name for the channel.
    pub(super) token: u64,
    /// Whether the router's list of inboxes that have something holds this one.
    pub(super) listed: bool,
    /// The shared receive queue that feeds the channel. Completions of its receives go there.
    pub(super) receives: Option<(Arc<Receives>, Member)>,
}

impl Ring {
    /// # Errors
    ///
    ///  - `ENOMEM`: out of memory.
    pub(super) fn new(room: u32, token: u64, index: usize) -> Result<Self> {
        let mut entries = Vec::new();
        entries.try_reserve_exact(room as usize).map_err(|_| no_memory())?;
        entries.resize(room as usize, ffi::ibv_wc::default());
        let label = Arc::new(Label::new(index));
        Ok(Self { entries: entries.into(), token, ..Self::unused(label) })
    }

    /// An inbox that is free for a new channel.
    pub(super) fn unused(label: Arc<Label>) -> Self {
        let entries = Box::default();
        Self {
            label,
            entries,
            first: 0,
            len: 0,
            overflown: false,
            token: 0,
            listed: false,
            receives: None,
        }
    }

    /// Whether there is something for the channel.
    pub(super) fn has_something(&self) -> bool {
        let receives = self.receives.as_ref();
        self.label.is_pending()
            || receives.is_some_and(|(receives, member)| receives.has_message(*member))
    }

    /// The index after `index`, around the end.
    #[inline]
    fn after(&self, index: usize) -> usize {
        if index + 1 == self.entries.len() { 0 } else { index + 1 }
    }

    pub(super) fn push(&mut self, completion: &ffi::ibv_wc) {
        self.label.set_pending(true);
        if self.len == self.entries.len() {
            self.overflown = true;
            return;
        }
        let mut at = self.first + self.len;
        if at >= self.entries.len() {
            at -= self.entries.len();
        }
        self.entries[at] = *completion;
        self.len += 1;
    }

    /// Moves completions to `out` and returns how many they were.
    pub(super) fn pop(&mut self, out: &mut [ffi::ibv_wc]) -> usize {
        let count = self.len.min(out.len());
        for place in &mut out[..count] {
            *place = self.entries[self.first];
            self.first = self.after(self.first);
        }
        self.len -= count;
        self.label.set_pending(self.len > 0 || self.overflown);
        count
    }

    /// Drops everything.
    pub(super) fn clear(&mut self) {
        (self.len, self.overflown) = (0, false);
        self.label.set_pending(false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completion(wr_id: u64) -> ffi::ibv_wc {
        ffi::ibv_wc { wr_id, ..Default::default() }
    }

    fn pop_all(ring: &mut Ring, at_a_time: usize) -> Vec<u64> {
        let mut popped = Vec::new();
        loop {
            let mut out = vec![completion(0); at_a_time];
            match ring.pop(&mut out) {
                0 => return popped,
                count => popped.extend(out[..count].iter().map(|completion| completion.wr_id)),
            }
        }
    }

    #[test]
    fn a_ring_keeps_the_order_and_detects_overflow() {
        for at_a_time in 1..5 {
            let mut ring = Ring::new(3, 0, 0).unwrap();
            for round in 0..5 {
                for n in 0..3 {
                    ring.push(&completion(round * 3 + n));
                }
                assert!(!ring.overflown);
                let expected = [round * 3, round * 3 + 1, round * 3 + 2];
                assert_eq!(pop_all(&mut ring, at_a_time), expected);
                ring.push(&completion(0));
                assert_eq!(pop_all(&mut ring, at_a_time), [0]);
            }
            for n in 0..4 {
                ring.push(&completion(n));
            }
            assert!(ring.overflown);
            assert_eq!(pop_all(&mut ring, at_a_time), [0, 1, 2]);
        }
    }

    #[test]
    fn a_ring_without_room_is_empty() {
        let mut ring = Ring::new(0, 0, 0).unwrap();
        assert!(pop_all(&mut ring, 1).is_empty());
        ring.push(&completion(1));
        assert!(ring.overflown && pop_all(&mut ring, 1).is_empty());
    }
}
