//! Room for one operation, its state, and the numbers of work requests.

use std::cell::Cell;
use std::ptr::NonNull;

use crate::completion::WorkCompletion;
use crate::ffi;
use crate::memory::KeptLength;

/// The owner of an operation, which will ask for its result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Owner {
    /// A handle within a scope, or the scope itself.
    Scope,
    /// A `PendingWork`, which may outlive the scope that it was posted in.
    Token,
    /// A `ScopedWindow`.
    Window,
    /// The channel itself, for the two operations that have slots of their own: the blocking one, and the read of the
    /// peer's credits.
    Channel,
    /// As `Window`, but a request before the last one has failed. The slot holds the completion of the first that did.
    FailedWindow,
    /// As `Window`, but the handle was dropped: nobody will ask for the result.
    LostWindow,
    /// The scope itself: the handle of a receive was dropped. Its buffer keeps a length, whose address the slot has.
    Lent,
}

/// The state of a slot and its operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// There is no operation.
    Free,
    /// The device has the request, and the owner will ask for its result.
    InFlight(Owner),
    /// As `InFlight(Owner::Scope)`, but the handle was dropped: nobody will ask for the result.
    Abandoned,
    /// The operation has completed, and the slot holds the completion.
    Done(Owner),
    /// As `Done(Owner::Scope)`, and the handle has returned the result. Or the place belongs to the window of another
    /// slot.
    Seen,
    /// The queue pair was reset or destroyed before the completion was polled. No completion will
    /// come, and the device no longer uses the buffer.
    Discarded(Owner),
}

impl Owner {
    /// Whether the operation is a window.
    #[inline]
    pub(super) fn is_window(self) -> bool {
        matches!(self, Self::Window | Self::FailedWindow | Self::LostWindow)
    }

    /// Whether a scope waits for the operation.
    #[inline]
    pub(super) fn is_of_scope(self) -> bool {
        matches!(self, Self::Scope | Self::Lent) || self.is_window()
    }

    /// Whether a completion is kept for the owner, and nothing else is left to do.
    #[inline]
    pub(super) fn awaits_completion(self) -> bool {
        // One comparison.
        (self as u8) < Self::FailedWindow as u8
    }
}

impl State {
    /// Whether the device may still use the buffer.
    #[inline]
    pub(super) fn is_outstanding(self) -> bool {
        matches!(self, Self::InFlight(_) | Self::Abandoned)
    }

    /// Whether the device may still use the buffer, and a scope waits for that.
    #[inline]
    pub(super) fn is_outstanding_in_scope(self) -> bool {
        match self {
            Self::InFlight(owner) => owner.is_of_scope(),
            state => state == Self::Abandoned,
        }
    }

    /// The owner of the operation, if there is one.
    #[inline]
    pub(super) fn owner(self) -> Option<Owner> {
        match self {
            Self::Free => None,
            Self::InFlight(owner) | Self::Done(owner) | Self::Discarded(owner) => Some(owner),
            Self::Abandoned | Self::Seen => Some(Owner::Scope),
        }
    }
}

/// A [`State`] without the owner.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Free,
    InFlight,
    Abandoned,
    Done,
    Seen,
    Discarded,
}

/// The halves of a request's number, in the order that the whole has them: it is loaded as one.
#[repr(C, align(8))]
struct RequestNumber {
    #[cfg(target_endian = "little")]
    index: u32,
    generation: Cell<u32>,
    #[cfg(target_endian = "big")]
    index: u32,
}

/// Room for one operation.
pub(super) struct Slot {
    /// The number under which its operation is posted, or the next one will be: see
    /// [`generation`](super::generation).
    number: RequestNumber,
    /// The next slot of the ring.
    pub(super) next: Cell<NonNull<Slot>>,
    /// The state. As a single cell, the compiler would not notice that the write of a post is overwritten if the handle is
    /// dropped at once.
    phase: Cell<Phase>,
    owner: Cell<Owner>,
    /// For places of a window that are not in a row: the index of the next one.
    pub(super) next_ended: Cell<u32>,
    /// For a window: the number of slots in a row that it has from this one on. They are free themselves, and are not
    /// taken.
    pub(super) run: Cell<u16>,
    /// The generation of the latest window.
    pub(super) run_generation: Cell<u32>,
    /// For an operation of [`Owner::Lent`]: the address of its buffer's length.
    pub(super) kept: Cell<Option<NonNull<KeptLength>>>,
    completion: Cell<WorkCompletion>,
}

// SAFETY: a slot is reached through the core that its table is part of, and through the handle of its
// operation. Both are used by one thread at a time: see `Core` and `OneThread`.
unsafe impl Sync for Slot {}

impl Slot {
    /// A slot that is not free, until the table is opened.
    pub(super) fn new(index: u32, generation: u32) -> Self {
        Self {
            number: RequestNumber { index, generation: Cell::new(generation) },
            next: Cell::new(NonNull::dangling()),
            phase: Cell::new(Phase::Seen),
            owner: Cell::new(Owner::Scope),
            next_ended: Cell::new(NO_SLOT),
            run: Cell::new(1),
            // Not that of the request before the first one.
            run_generation: Cell::new(generation),
            kept: Cell::new(None),
            completion: Cell::new(WorkCompletion::default()),
        }
    }

    /// The number under which its operation is posted. If it is free: under which the next one will be.
    #[inline]
    pub(super) fn wr_id(&self) -> u64 {
        const { assert!(size_of::<RequestNumber>() == size_of::<u64>()) };
        // SAFETY: the halves are all of it, and initialised. As one load, the compiler keeps the number whole.
        unsafe { (&raw const self.number).cast::<u64>().read() }
    }

    /// The index in its table.
    #[inline]
    pub(super) fn index(&self) -> u32 {
        self.number.index
    }

    #[inline]
    pub(super) fn generation(&self) -> u32 {
        self.number.generation.get()
    }

    /// A new connection begins.
    pub(super) fn set_generation(&self, generation: u32) {
        self.number.generation.set(generation);
    }

    /// Gives the slot a number that no handle and no completion has.
    #[inline]
    pub(super) fn renumber(&self) {
        self.number.generation.set(self.number.generation.get().wrapping_add(1));
    }

    /// Frees the slot: the number of its operation now belongs to none.
    #[inline]
    pub(super) fn free(&self) {
        self.set_state(State::Free);
        self.renumber();
    }

    /// The state of the operation.
    #[inline]
    pub(super) fn state(&self) -> State {
        let owner = self.owner.get();
        match self.phase.get() {
            Phase::Free => State::Free,
            Phase::InFlight => State::InFlight(owner),
            Phase::Abandoned => State::Abandoned,
            Phase::Done => State::Done(owner),
            Phase::Seen => State::Seen,
            Phase::Discarded => State::Discarded(owner),
        }
    }

    #[inline]
    pub(super) fn set_state(&self, state: State) {
        let (phase, owner) = match state {
            State::Free => (Phase::Free, None),
            State::InFlight(owner) => (Phase::InFlight, Some(owner)),
            State::Abandoned => (Phase::Abandoned, Some(Owner::Scope)),
            State::Done(owner) => (Phase::Done, Some(owner)),
            State::Seen => (Phase::Seen, None),
            State::Discarded(owner) => (Phase::Discarded, Some(owner)),
        };
        self.phase.set(phase);
        if let Some(owner) = owner {
            self.owner.set(owner);
        }
    }

    /// The completion, if it is done.
    pub(super) fn completion(&self) -> WorkCompletion {
        self.completion.get()
    }

    /// Whether the completion is a success. The operation must be done.
    #[inline]
    pub(super) fn has_success(&self) -> bool {
        // SAFETY: it is initialised, and nothing writes to it while this reference exists: it is a cell
        // that one thread at a time uses.
        unsafe { &*self.completion.as_ptr() }.is_success()
    }

    /// Whether the operation is done, and a success that its owner has not seen.
    #[inline]
    pub(super) fn is_success(&self) -> bool {
        matches!(self.state(), State::Done(_)) && self.has_success()
    }

    /// A pointer to the completion, which is initialised from the beginning.
    #[inline]
    pub(super) fn completion_pointer(&self) -> NonNull<ffi::ibv_wc> {
        // `WorkCompletion` is a transparent wrapper.
        NonNull::from(&self.completion).cast()
    }

    /// Stores the completion, for the owner to ask for.
    #[inline]
    pub(super) fn complete(&self, owner: Owner, completion: &ffi::ibv_wc) {
        self.completion.set((*completion).into());
        self.set_state(State::Done(owner));
    }
}

/// No slot has this index.
pub(super) const NO_SLOT: u32 = u32::MAX;

// The numbers of work requests, which distinguish each request from all others that may still complete.

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
