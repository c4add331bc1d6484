//! Notified transfers: the immediate number of each piece, and one notification when all have arrived.
//!
//! A piece may come twice, by a device that failed and by the next one, and pieces come in any order. So a number
//! says which transfer and which piece it is of, and the receiver counts each piece once. The sender has
//! [`WINDOW`] transfers open at most: the receiver confirms those that are complete.

/// How many notified transfers of a direction may be open at a time.
pub(crate) const WINDOW: u64 = 48;
/// No transfer has this slot: the immediate number is that of a message.
pub(crate) const MESSAGE_SLOT: u8 = 63;
/// The most pieces of a notified transfer.
pub(crate) const MAX_PIECES: usize = 512;
/// So many more are complete when the receiver confirms them.
const CONFIRM_EVERY: u64 = 16;

/// What the immediate number of a piece says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Mark {
    /// The number of the transfer, modulo [`WINDOW`].
    pub(crate) slot: u8,
    /// Whether no piece has a higher number.
    pub(crate) is_last: bool,
    pub(crate) piece: u16,
    pub(crate) tag: u16,
}

impl Mark {
    pub(crate) fn to_immediate(self) -> u32 {
        let Self { slot, is_last, piece, tag } = self;
        u32::from(slot) << 26 | u32::from(is_last) << 25 | u32::from(piece) << 16 | u32::from(tag)
    }

    pub(crate) fn from_immediate(number: u32) -> Self {
        Self {
            slot: (number >> 26) as u8,
            is_last: number >> 25 & 1 == 1,
            piece: (number >> 16 & 0x1ff) as u16,
            tag: number as u16,
        }
    }
}

/// The notified transfers that arrive from a peer.
#[derive(Debug)]
pub(crate) struct Incoming {
    /// All transfers below are complete.
    complete: u64,
    confirmed: u64,
    open: Vec<Open>,
}

#[derive(Clone, Default, Debug)]
struct Open {
    is_complete: bool,
    pieces: Option<u16>,
    arrived: u16,
    seen: [u64; MAX_PIECES / 64],
}

impl Incoming {
    pub(crate) fn new() -> Self {
        Self { complete: 0, confirmed: 0, open: vec![Open::default(); WINDOW as usize] }
    }

    /// Counts a piece. Returns whether its transfer is complete now, which is so once.
    pub(crate) fn arrived(&mut self, mark: Mark) -> bool {
        let open = &mut self.open[usize::from(mark.slot) % WINDOW as usize];
        let (word, bit) = (usize::from(mark.piece / 64), 1 << (mark.piece % 64));
        if open.is_complete || open.seen[word] & bit != 0 {
            return false;
        }
        open.seen[word] |= bit;
        open.arrived += 1;
        if mark.is_last {
            open.pieces = Some(mark.piece + 1);
        }
        open.is_complete = open.pieces.is_some_and(|pieces| open.arrived >= pieces);
        let is_complete = open.is_complete;
        self.free_places();
        is_complete
    }

    /// No more pieces of this transfer come. Returns whether there can be such a transfer.
    pub(crate) fn abandon(&mut self, number: u64) -> bool {
        if number >= self.complete {
            self.open[(number % WINDOW) as usize].is_complete = true;
        }
        let is_possible = number < self.complete + WINDOW;
        self.free_places();
        is_possible
    }

    /// The place of a transfer is used again when all before it are complete, too.
    fn free_places(&mut self) {
        while self.open[(self.complete % WINDOW) as usize].is_complete {
            self.open[(self.complete % WINDOW) as usize] = Open::default();
            self.complete += 1;
        }
    }

    /// What the sender has to be told, now and then: all transfers below are complete.
    pub(crate) fn confirm(&mut self) -> Option<u64> {
        let is_due = self.complete - self.confirmed >= CONFIRM_EVERY;
        is_due.then(|| {
            self.confirmed = self.complete;
            self.complete
        })
    }
}

/// The notified transfers that go to a peer.
#[derive(Default, Debug)]
pub(crate) struct Outgoing {
    next: u64,
    confirmed: u64,
    /// Transfers that have failed, which the peer does not know yet.
    pub(crate) abandoned: Vec<u64>,
}

impl Outgoing {
    /// The number of the next transfer, if it may begin.
    pub(crate) fn begin(&mut self) -> Option<u64> {
        (self.next < self.confirmed + WINDOW).then(|| {
            self.next += 1;
            self.next - 1
        })
    }

    /// The peer says that all transfers below are complete. Returns whether it can have said that.
    pub(crate) fn confirm(&mut self, below: u64) -> bool {
        let is_possible = (self.confirmed..=self.next).contains(&below);
        if is_possible {
            self.confirmed = below;
        }
        is_possible
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            assert!(!incoming.arrived(mark(order[0])));
            assert!(!incoming.arrived(mark(order[0])), "a repetition counts nothing");
            assert!(!incoming.arrived(mark(order[1])));
            assert!(incoming.arrived(mark(order[2])));
        }
    }

    #[test]
    fn a_late_repetition_is_not_taken_for_the_next_transfer_of_the_slot() {
        let mut incoming = Incoming::new();
        let mark = |slot| Mark { slot, is_last: true, piece: 0, tag: 0 };
        // The first is not complete yet, so the second keeps its place.
        assert!(incoming.arrived(mark(1)));
        assert!(!incoming.arrived(mark(1)));
        assert!(incoming.arrived(mark(0)));
        assert_eq!(incoming.complete, 2);
    }

    #[test]
    fn a_transfer_that_fails_gives_its_place_back() {
        let mark = |slot, piece| Mark { slot, is_last: false, piece, tag: 0 };
        let mut incoming = Incoming::new();
        assert!(!incoming.arrived(mark(0, 5)) && !incoming.arrived(mark(1, 0)));
        assert!(incoming.abandon(1) && incoming.complete == 0);
        assert!(incoming.abandon(0) && incoming.complete == 2);
        assert!(incoming.abandon(1), "it may have been complete before");
        assert!(!incoming.open[1].is_complete);
        assert!(!incoming.abandon(2 + WINDOW), "a peer that makes it up");
    }

    #[test]
    fn the_window_bounds_what_is_open() {
        let (mut outgoing, mut incoming) = (Outgoing::default(), Incoming::new());
        let numbers: Vec<_> = (0..WINDOW).map(|_| outgoing.begin().unwrap()).collect();
        assert_eq!(outgoing.begin(), None);
        let mut confirmations = 0;
        for &number in &numbers {
            let slot = number as u8;
            assert!(incoming.arrived(Mark { slot, is_last: true, piece: 0, tag: 0 }));
            if let Some(below) = incoming.confirm() {
                confirmations += 1;
                assert!(outgoing.confirm(below));
            }
        }
        assert_eq!(confirmations, WINDOW / CONFIRM_EVERY);
        assert_eq!(outgoing.begin(), Some(WINDOW));
        assert!(!outgoing.confirm(WINDOW + 2) && !outgoing.confirm(1), "a peer that makes it up");
    }
}
