//! Notified transfers: the immediate number of each piece, and one notification when all have arrived.
//!
//! A piece may come twice, by a device that failed and by the next one, and pieces come in any order. So a number
//! says which transfer and which piece it is of, and the receiver counts each piece once. The sender has
//! [`WINDOW`] transfers open at most: the receiver confirms those that are complete, and whose notification its program has
//! taken.

/// How many notified transfers of a direction may be open at a time.
pub(crate) const WINDOW: u64 = 48;
/// No transfer has this slot: the immediate number is that of a message.
pub(crate) const MESSAGE_SLOT: u8 = 63;
/// The most pieces of a notified transfer.
pub(crate) const MAX_PIECES: usize = 512;
/// The receiver confirms transfers each time that this many more have ended.
const CONFIRM_EVERY: u64 = 16;

/// The meaning of a piece's immediate number.
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

impl Incoming {
    pub(crate) fn new() -> Self {
        Self { told: 0, taken: 0, open: vec![Open::default(); WINDOW as usize] }
    }

    /// Counts a piece. Returns whether its transfer is complete now, which is so once; `None`: no transfer has such a mark.
    pub(crate) fn arrived(&mut self, mark: Mark) -> Option<bool> {
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
    pub(crate) fn abandon(&mut self, number: u64) -> bool {
        if (self.told..self.told + WINDOW).contains(&number) {
            let open = &mut self.open[(number % WINDOW) as usize];
            // The program takes no notification of it.
            self.taken += u64::from(!std::mem::replace(&mut open.is_complete, true));
        }
        number < self.told + WINDOW
    }

    /// The program has taken a notification.
    pub(crate) fn taken(&mut self) {
        self.taken += 1;
    }

    /// The number to tell the sender, now and then: all transfers below it are complete, and their places free.
    pub(crate) fn confirm(&mut self) -> Option<u64> {
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

/// The notified transfers that go to a peer.
#[derive(Debug)]
pub(crate) struct Outgoing {
    next: u64,
    confirmed: u64,
    /// Whether the last transfer of a place may still have pieces under way. The peer would count them for the next one.
    is_under_way: [bool; WINDOW as usize],
    /// Transfers that have failed, which the peer does not know yet.
    pub(crate) abandoned: Vec<u64>,
}

impl Outgoing {
    pub(crate) fn new() -> Self {
        let is_under_way = [false; WINDOW as usize];
        Self { next: 0, confirmed: 0, is_under_way, abandoned: Vec::new() }
    }

    /// The number of the next transfer, if it may begin.
    pub(crate) fn begin(&mut self) -> Option<u64> {
        let is_under_way = &mut self.is_under_way[(self.next % WINDOW) as usize];
        if self.next >= self.confirmed + WINDOW || *is_under_way {
            return None;
        }
        *is_under_way = true;
        self.next += 1;
        Some(self.next - 1)
    }

    /// The transfer of this number has no pieces under way any more. If it has failed, the peer is to be told.
    pub(crate) fn ended(&mut self, number: u64, has_failed: bool) {
        self.is_under_way[(number % WINDOW) as usize] = false;
        self.abandoned.extend(has_failed.then_some(number));
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
            assert_eq!(incoming.arrived(mark(order[0])), Some(false));
            assert_eq!(
                incoming.arrived(mark(order[0])),
                Some(false),
                "a repetition counts nothing"
            );
            assert_eq!(incoming.arrived(mark(order[1])), Some(false));
            assert_eq!(incoming.arrived(mark(order[2])), Some(true));
        }
        for slot in [WINDOW as u8, MESSAGE_SLOT - 1] {
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
