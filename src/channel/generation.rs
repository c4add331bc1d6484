//! The numbers of work requests, which distinguish each request from all others that may still complete.
//!
//! A work request is numbered `generation << 32 | index`. The index is that of its slot in the table of what is in
//! flight. The generation counts the requests of the slot: it grows by one whenever the slot becomes free, and is
//! never reset. So a completion belongs to an operation only if it has the very number of the operation's request:
//! one that comes twice, or late, has an older number.
//!
//! A queue pair is replaced when its channel is reset, and the new one may have the old one's number. So the generations
//! of a new table begin behind all those of the table before it, whose completions may still be in the completion queue:
//! see [`Generations`].

/// In the lower half of a number: the request is not the last of its window. No slot has an index with these bits, nor has
/// a shared receive. The rest of the half is the position of the request, and the upper half says which window it is.
const NOT_LAST: u32 = 3 << 30;
/// The bits of the upper half that have the place of the window in its queue. The others have its generation.
const PLACE_BITS: u32 = 20;

/// The most requests of a window.
pub(super) const MAX_WINDOW: usize = (1 << 15) - 1;

/// The places of a queue that a window can complete by.
pub(super) const LEADERS: u32 = 1 << PLACE_BITS;

/// The lower half of the number of the request at this position of a window, not the last.
#[inline(always)]
pub(super) fn lower_half(position: usize) -> u32 {
    NOT_LAST | position as u32
}

/// The upper half of the numbers of all requests, without the last, of a window that completes by the slot at this place.
#[inline(always)]
pub(super) fn upper_half(place: u32, generation: u32) -> u32 {
    generation << PLACE_BITS | place
}

/// A request that is not the last of its window.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Member {
    /// The slot by which its window completes, counted among the slots of the queue.
    pub(super) place: u32,
    /// As many bits as there is room for.
    generation: u32,
    /// The position of the request in its window.
    pub(super) position: usize,
}

/// `None`: the number is of another kind.
pub(super) fn member(wr_id: u64) -> Option<Member> {
    let (lower, upper) = (wr_id as u32, (wr_id >> 32) as u32);
    let (place, generation) = (upper % LEADERS, upper >> PLACE_BITS);
    let position = (lower & !NOT_LAST) as usize;
    (lower & NOT_LAST == NOT_LAST).then_some(Member { place, generation, position })
}

impl Member {
    /// Its generation, if that of the slot has come to `reached` by now.
    pub(super) fn generation(self, reached: u32) -> u32 {
        reached.wrapping_sub(reached.wrapping_sub(self.generation) % (1 << (32 - PLACE_BITS)))
    }
}

/// Where the generations of a connection begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Generations {
    /// The generation of every slot when the connection began.
    first: u32,
    /// How many generations before `first` are of earlier connections. The others before it were not used yet.
    earlier: u32,
}

impl Generations {
    /// Those of the first connection of a completion queue. No request has the number 0.
    pub(super) const NEW: Self = Self { first: 1, earlier: 0 };

    pub(super) fn first(self) -> u32 {
        self.first
    }

    /// Those that begin behind slots that have come to these generations, from the first of these on.
    pub(super) fn after(self, reached: impl Iterator<Item = u32>) -> Self {
        let most = reached.map(|generation| generation.wrapping_sub(self.first)).max();
        self.advance(u64::from(most.unwrap_or(0)) + 1)
    }

    fn advance(self, by: u64) -> Self {
        let earlier = u64::from(self.earlier) + by;
        Self {
            first: self.first.wrapping_add(by as u32),
            earlier: u32::try_from(earlier).unwrap_or(u32::MAX),
        }
    }

    /// Whether a request of this generation was posted before the connection began.
    pub(super) fn is_earlier(self, generation: u32) -> bool {
        self.first.wrapping_sub(generation).wrapping_sub(1) < self.earlier
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_is_earlier_and_nothing_else_is() {
        let mut now = Generations::NEW;
        assert!(![0, 1, 2, u32::MAX].into_iter().any(|generation| now.is_earlier(generation)));
        now = now.after([1, 5, 3].into_iter());
        assert_eq!(now.first(), 6);
        let earlier: Vec<_> = (0..20).filter(|&generation| now.is_earlier(generation)).collect();
        assert_eq!(earlier, [1, 2, 3, 4, 5]);
        assert!(!now.is_earlier(u32::MAX) && !now.is_earlier(0xdead_beef));
        assert_eq!(now.after(std::iter::empty()).first(), 7);
    }

    #[test]
    fn generations_wrap_around() {
        let old = Generations { first: u32::MAX - 2, earlier: u32::MAX - 3 };
        let now = old.after([u32::MAX - 2, 1].into_iter());
        assert_eq!(now.first(), 2);
        assert!([u32::MAX - 2, u32::MAX, 0, 1].into_iter().all(|early| now.is_earlier(early)));
        assert!(!now.is_earlier(2));
        // A slot that was used as often as there are numbers.
        assert_eq!(now.after([1].into_iter()).first(), 2);
    }

    #[test]
    fn a_number_says_which_window_and_which_request() {
        for (place, generation) in [(0, 0), (7, 3), (LEADERS - 1, u32::MAX), (5, 1 << 12)] {
            for position in [0, 1, 17, MAX_WINDOW - 1] {
                let upper = u64::from(upper_half(place, generation));
                let found = member(upper << 32 | u64::from(lower_half(position))).unwrap();
                assert_eq!((found.place, found.position), (place, position));
                for later in [0, 1, 4095] {
                    assert_eq!(found.generation(generation.wrapping_add(later)), generation);
                }
                assert_ne!(found.generation(generation.wrapping_add(4096)), generation);
            }
        }
        // Those of slots, and of shared receives.
        for last in [0, 7, 5 << 32 | 3, u64::MAX << 32 | 0xffff, 9 << 32 | 1 << 31 | 0xffff] {
            assert_eq!(member(last), None);
        }
    }
}
