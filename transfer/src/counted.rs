//! Writes with an immediate, counted: many pieces, in any order, and one notification when all have arrived.
//!
//! - From one peer, on any connections: [`Outgoing`] numbers the transfers, a [`Mark`] is the immediate of a piece, and
//!   [`Incoming`] counts the pieces. A piece may come twice (by a device that failed, and by the next one), and counts
//!   once. The sender has [`WINDOW`] transfers open at most; the receiver says which are complete
//!   ([`Incoming::confirm`]), in a message of the program's own.
//! - From several peers: an [`ImmediateCounter`] counts to a number that the program says, for each immediate.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::error::Error;
use std::fmt;

/// How many transfers from one peer may be open at a time.
pub const WINDOW: u64 = 48;
/// The most pieces of a transfer.
pub const MAX_PIECES: usize = 512;
/// No [`Mark`] of a transfer has this immediate or a higher one: a program has them for other writes.
pub const FIRST_FREE: u32 = (WINDOW as u32) << 26;
/// The receiver confirms transfers each time that this many more have ended.
const CONFIRM_EVERY: u64 = 16;

/// The meaning of a piece's immediate: which transfer and which piece of it, and a number of the program's own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mark {
    /// The number of the transfer, modulo [`WINDOW`].
    slot: u8,
    /// Whether no piece has a higher number.
    is_last: bool,
    piece: u16,
    tag: u16,
}

impl Mark {
    /// The mark of a transfer of one piece. `number` is that of [`Outgoing::begin`]; the receiver gets the tag.
    #[inline]
    pub const fn new(number: u64, tag: u16) -> Self {
        Self { slot: (number % WINDOW) as u8, is_last: true, piece: 0, tag }
    }

    /// The mark of any piece of the transfer. Pieces are numbered from 0, in any order of posting, and only the one with
    /// the highest number is the last. `None`: a transfer has [`MAX_PIECES`] at most.
    #[inline]
    pub const fn piece(self, piece: u16, is_last: bool) -> Option<Self> {
        if (piece as usize) < MAX_PIECES { Some(Self { piece, is_last, ..self }) } else { None }
    }

    /// The program's number.
    #[inline]
    pub const fn tag(self) -> u16 {
        self.tag
    }

    /// The immediate of the piece's write.
    #[inline]
    pub const fn to_immediate(self) -> u32 {
        let Self { slot, is_last, piece, tag } = self;
        (slot as u32) << 26 | (is_last as u32) << 25 | (piece as u32) << 16 | tag as u32
    }

    /// The mark that has this immediate. [`Incoming::arrived`] refuses those that no transfer has.
    #[inline]
    pub const fn from_immediate(immediate: u32) -> Self {
        Self {
            slot: (immediate >> 26) as u8,
            is_last: immediate >> 25 & 1 == 1,
            piece: (immediate >> 16 & 0x1ff) as u16,
            tag: immediate as u16,
        }
    }
}

/// The transfers that arrive from a peer.
#[derive(Debug)]
pub struct Incoming {
    /// The sender knows that all transfers below are complete, and that the program has taken as many notifications. So it
    /// uses their places again.
    told: u64,
    /// How many notifications the program has taken, and how many transfers have failed.
    taken: u64,
    open: Vec<Open>,
}

#[derive(Clone, Default, Debug)]
struct Open {
    is_complete: bool,
    pieces: Option<u16>,
    arrived: u16,
    seen: [u64; MAX_PIECES / 64],
}

impl Default for Incoming {
    fn default() -> Self {
        Self::new()
    }
}

impl Incoming {
    /// None has arrived.
    pub fn new() -> Self {
        Self { told: 0, taken: 0, open: vec![Open::default(); WINDOW as usize] }
    }

    /// Counts a piece. Returns whether its transfer is complete now, which is so once; `None`: no transfer has such a mark.
    #[inline]
    pub fn arrived(&mut self, mark: Mark) -> Option<bool> {
        let open = self.open.get_mut(usize::from(mark.slot))?;
        let (word, bit) = (usize::from(mark.piece / 64), 1 << (mark.piece % 64));
        if open.is_complete || open.seen[word] & bit != 0 {
            return Some(false);
        }
        open.seen[word] |= bit;
        open.arrived += 1;
        if mark.is_last {
            open.pieces = Some(mark.piece + 1);
        }
        open.is_complete = open.pieces.is_some_and(|pieces| open.arrived >= pieces);
        Some(open.is_complete)
    }

    /// No more pieces of this transfer come. Returns whether there can be such a transfer.
    pub fn abandon(&mut self, number: u64) -> bool {
        if (self.told..self.told + WINDOW).contains(&number) {
            let open = &mut self.open[(number % WINDOW) as usize];
            // The program takes no notification of it.
            self.taken += u64::from(!std::mem::replace(&mut open.is_complete, true));
        }
        number < self.told + WINDOW
    }

    /// The program has taken a notification.
    pub fn taken(&mut self) {
        self.taken += 1;
    }

    /// The number to tell the sender, now and then: all transfers below it are complete, and their places free.
    pub fn confirm(&mut self) -> Option<u64> {
        let due = self.told + CONFIRM_EVERY;
        let is_complete = |number: u64| self.open[(number % WINDOW) as usize].is_complete;
        if self.taken < due || !(self.told..due).all(is_complete) {
            return None;
        }
        while self.told < self.taken && self.open[(self.told % WINDOW) as usize].is_complete {
            self.open[(self.told % WINDOW) as usize] = Open::default();
            self.told += 1;
        }
        Some(self.told)
    }
}

/// The transfers that go to a peer.
#[derive(Debug)]
pub struct Outgoing {
    next: u64,
    confirmed: u64,
    /// Whether the last transfer of a place may still have pieces under way. The peer would count them for the next one.
    is_under_way: [bool; WINDOW as usize],
    abandoned: Vec<u64>,
}

impl Default for Outgoing {
    fn default() -> Self {
        Self::new()
    }
}

impl Outgoing {
    /// None has begun.
    pub fn new() -> Self {
        let is_under_way = [false; WINDOW as usize];
        Self { next: 0, confirmed: 0, is_under_way, abandoned: Vec::new() }
    }

    /// The number of the next transfer, if it may begin.
    pub fn begin(&mut self) -> Option<u64> {
        let is_under_way = &mut self.is_under_way[(self.next % WINDOW) as usize];
        if self.next >= self.confirmed + WINDOW || *is_under_way {
            return None;
        }
        *is_under_way = true;
        self.next += 1;
        Some(self.next - 1)
    }

    /// The transfer of this number has no pieces under way any more. If it has failed, the peer is to be told.
    pub fn ended(&mut self, number: u64, has_failed: bool) {
        self.is_under_way[(number % WINDOW) as usize] = false;
        self.abandoned.extend(has_failed.then_some(number));
    }

    /// Transfers that have failed, and that the peer does not know yet: tell it their numbers, for
    /// [`Incoming::abandon`].
    pub fn abandoned(&mut self) -> &mut Vec<u64> {
        &mut self.abandoned
    }

    /// The peer says that all transfers below are complete. Returns whether it can have said that.
    pub fn confirm(&mut self, below: u64) -> bool {
        let is_possible = (self.confirmed..=self.next).contains(&below);
        if is_possible {
            self.confirmed = below;
        }
        is_possible
    }
}

/// Counts as many immediates as fit: a peer sends some that nobody expects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TooManyImmediates {
    /// The immediate that was not counted.
    pub immediate: u32,
}

impl fmt::Display for TooManyImmediates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the immediate {:#x} is one too many to be counted", self.immediate)
    }
}

impl Error for TooManyImmediates {}

/// Counts writes by their immediate, from whatever peers they come.
///
/// The program says how many writes belong to an immediate, before or after the first of them has come.
///
/// ```
/// use ibverbs_transfer::counted::ImmediateCounter;
///
/// let mut counter = ImmediateCounter::new(1024);
/// assert!(!counter.arrived(7)?); // `success.immediate()` of a receive that has ended
/// assert!(!counter.expect(7, 3)?);
/// assert!(!counter.arrived(7)?);
/// assert!(counter.arrived(7)?, "all three are there");
/// # Ok::<(), ibverbs_transfer::counted::TooManyImmediates>(())
/// ```
#[derive(Clone, Debug)]
pub struct ImmediateCounter {
    most: usize,
    /// The missing immediates; less than 0 if some have come, and nobody has said how many there are.
    missing: HashMap<u32, i64>,
}

impl ImmediateCounter {
    /// Counts up to `most` immediates at a time.
    pub fn new(most: usize) -> Self {
        Self { most, missing: HashMap::new() }
    }

    /// Expects `count` more writes with this immediate. Returns whether all that are expected have come. What has come
    /// beyond them counts for the next that are expected; if there is nothing, the immediate is forgotten.
    ///
    /// # Errors
    ///
    /// As many immediates are counted as fit.
    pub fn expect(&mut self, immediate: u32, count: u32) -> Result<bool, TooManyImmediates> {
        self.add(immediate, count.into()).map(|missing| missing <= 0)
    }

    /// A write with this immediate has come. Returns whether it was the last that is expected: then the immediate is
    /// forgotten, and can be used again.
    ///
    /// # Errors
    ///
    /// As many immediates are counted as fit.
    pub fn arrived(&mut self, immediate: u32) -> Result<bool, TooManyImmediates> {
        self.add(immediate, -1).map(|missing| missing == 0)
    }

    /// Returns what is missing then.
    fn add(&mut self, immediate: u32, more: i64) -> Result<i64, TooManyImmediates> {
        let counted = self.missing.len();
        match self.missing.entry(immediate) {
            Entry::Occupied(mut missing) => {
                // No program runs for 2^63 writes.
                let left = missing.get().saturating_add(more);
                *missing.get_mut() = left;
                if left == 0 {
                    missing.remove();
                }
                Ok(left)
            }
            Entry::Vacant(_) if more == 0 => Ok(0),
            Entry::Vacant(_) if counted >= self.most => Err(TooManyImmediates { immediate }),
            Entry::Vacant(place) => {
                place.insert(more);
                Ok(more)
            }
        }
    }

    /// Forgets an immediate whose writes no longer matter. Those that come later begin anew.
    pub fn forget(&mut self, immediate: u32) {
        self.missing.remove(&immediate);
    }

    /// How many immediates are counted now.
    pub fn len(&self) -> usize {
        self.missing.len()
    }

    /// Whether none is counted now.
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_names_no_piece_that_a_transfer_cannot_have() {
        let mark = Mark::new(WINDOW + 3, 9);
        assert_eq!(mark, Mark { slot: 3, is_last: true, piece: 0, tag: 9 });
        assert_eq!(mark.piece(511, false).unwrap().to_immediate(), 3 << 26 | 511 << 16 | 9);
        assert_eq!(mark.piece(512, true), None);
        assert!(Mark::new(WINDOW - 1, 9).piece(511, true).unwrap().to_immediate() < FIRST_FREE);
    }

    #[test]
    fn immediates_are_counted_from_either_end_and_bounded() {
        let mut counter = ImmediateCounter::new(2);
        assert_eq!((counter.arrived(1), counter.arrived(1)), (Ok(false), Ok(false)));
        assert_eq!(counter.expect(2, 1), Ok(false));
        // A peer makes one up.
        assert_eq!(counter.arrived(3), Err(TooManyImmediates { immediate: 3 }));
        assert_eq!(counter.expect(3, 1), Err(TooManyImmediates { immediate: 3 }));
        assert_eq!(counter.expect(3, 0), Ok(true));
        assert_eq!((counter.expect(1, 2), counter.len()), (Ok(true), 1));
        assert_eq!((counter.arrived(2), counter.is_empty()), (Ok(true), true));
        // Once more, in two parts.
        assert_eq!((counter.expect(1, 1), counter.expect(1, 1)), (Ok(false), Ok(false)));
        assert_eq!((counter.arrived(1), counter.arrived(1)), (Ok(false), Ok(true)));
        counter.arrived(1).unwrap();
        counter.forget(1);
        assert!(counter.is_empty());
    }

    #[test]
    fn writes_of_a_next_round_that_come_early_do_not_hide_the_end_of_this_one() {
        let mut counter = ImmediateCounter::new(1);
        (0..3).for_each(|_| assert_eq!(counter.arrived(1), Ok(false)));
        assert_eq!(counter.expect(1, 2), Ok(true), "the third is of the next round");
        assert_eq!((counter.expect(1, 2), counter.arrived(1)), (Ok(false), Ok(true)));
        assert!(counter.is_empty());
    }

    #[test]
    fn a_mark_keeps_all_its_parts() {
        for slot in [0, 1, 47] {
            for (piece, tag) in [(0, 0), (1, 65535), (511, 7)] {
                for is_last in [false, true] {
                    let mark = Mark { slot, is_last, piece, tag };
                    assert_eq!(Mark::from_immediate(mark.to_immediate()), mark);
                }
            }
        }
    }

    #[test]
    fn a_transfer_is_complete_once_in_any_order() {
        let mark = |piece| Mark { slot: 0, is_last: piece == 2, piece, tag: 9 };
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0], [2, 0, 1]] {
            let mut incoming = Incoming::new();
            assert_eq!(incoming.arrived(mark(order[0])), Some(false));
            assert_eq!(
                incoming.arrived(mark(order[0])),
                Some(false),
                "a repetition counts nothing"
            );
            assert_eq!(incoming.arrived(mark(order[1])), Some(false));
            assert_eq!(incoming.arrived(mark(order[2])), Some(true));
        }
        for slot in [WINDOW as u8, 63] {
            assert_eq!(Incoming::new().arrived(Mark { slot, ..mark(0) }), None);
        }
    }

    fn whole(slot: u64) -> Mark {
        Mark { slot: slot as u8, is_last: true, piece: 0, tag: 0 }
    }

    #[test]
    fn a_late_repetition_is_not_taken_for_the_next_transfer_of_the_slot() {
        let mut incoming = Incoming::new();
        for slot in 0..WINDOW {
            assert_eq!(incoming.arrived(whole(slot)), Some(true));
            assert_eq!(incoming.arrived(whole(slot)), Some(false));
            assert_eq!(incoming.confirm(), None, "the program has taken none");
            assert_eq!(incoming.arrived(whole(0)), Some(false));
        }
        (0..CONFIRM_EVERY).for_each(|_| incoming.taken());
        assert_eq!(incoming.confirm(), Some(CONFIRM_EVERY));
        assert_eq!(incoming.arrived(whole(0)), Some(true), "the next one of the slot");
        assert_eq!(incoming.arrived(whole(CONFIRM_EVERY)), Some(false), "not told yet");
    }

    #[test]
    fn a_transfer_that_fails_gives_its_place_back() {
        let mut incoming = Incoming::new();
        let mark = Mark { piece: 5, is_last: false, ..whole(0) };
        assert_eq!(incoming.arrived(mark), Some(false));
        for number in (0..CONFIRM_EVERY).rev() {
            assert_eq!(incoming.confirm(), None);
            assert!(incoming.abandon(number));
            assert!(incoming.abandon(number), "once is enough");
        }
        assert_eq!(incoming.confirm(), Some(CONFIRM_EVERY));
        assert!(incoming.abandon(1), "the sender was told meanwhile");
        assert_eq!(incoming.arrived(mark), Some(false));
        assert!(!incoming.abandon(CONFIRM_EVERY + WINDOW), "a peer that makes it up");
    }

    #[test]
    fn the_window_bounds_what_is_open() {
        let (mut outgoing, mut incoming) = (Outgoing::new(), Incoming::new());
        let numbers: Vec<_> = (0..WINDOW).map(|_| outgoing.begin().unwrap()).collect();
        assert_eq!(outgoing.begin(), None);
        let mut confirmations = 0;
        for &number in &numbers {
            assert_eq!(incoming.arrived(whole(number)), Some(true));
            incoming.taken();
            if let Some(below) = incoming.confirm() {
                confirmations += 1;
                assert!(outgoing.confirm(below));
            }
        }
        assert_eq!(confirmations, WINDOW / CONFIRM_EVERY);
        // A piece that the peer has counted may still be repeated.
        assert_eq!(outgoing.begin(), None);
        outgoing.ended(1, false);
        assert_eq!(outgoing.begin(), None, "the first is under way");
        outgoing.ended(0, true);
        assert_eq!((outgoing.begin(), outgoing.begin()), (Some(WINDOW), Some(WINDOW + 1)));
        assert_eq!((outgoing.begin(), outgoing.abandoned.len()), (None, 1));
        assert!(!outgoing.confirm(WINDOW + 3) && !outgoing.confirm(1), "a peer that makes it up");
    }
}
