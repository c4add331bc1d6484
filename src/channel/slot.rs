use std::cell::Cell;
use std::ptr::NonNull;

use crate::base::ffi;
use crate::verbs::completion::WorkCompletion;
use crate::verbs::memory::KeptLength;

/// Who asks for the result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Owner {
    /// A handle within a scope, or the scope itself.
    Scope,
    /// May outlive its scope.
    Token,
    /// The channel: the blocking operation and the read of the peer's credits have slots of their own.
    Channel,
    /// The handle of a receive was dropped. The slot has the address of its buffer's length.
    Lent,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    Free,
    InFlight(Owner),
    /// As `InFlight(Owner::Scope)`, but the handle was dropped.
    Abandoned,
    Done(Owner),
    /// The handle has returned the result.
    Seen,
    /// The queue pair was reset or destroyed first. No completion will come.
    Discarded(Owner),
}

impl Owner {
    #[inline]
    pub(super) fn is_of_scope(self) -> bool {
        matches!(self, Self::Scope | Self::Lent)
    }

    /// Nothing is to do but to keep the completion.
    #[inline]
    pub(super) fn awaits_completion(self) -> bool {
        // One comparison.
        (self as u8) < Self::Lent as u8
    }
}

impl State {
    /// Whether the device may still use the buffer.
    #[inline]
    pub(super) fn is_outstanding(self) -> bool {
        matches!(self, Self::InFlight(_) | Self::Abandoned)
    }

    #[inline]
    pub(super) fn is_outstanding_in_scope(self) -> bool {
        match self {
            Self::InFlight(owner) => owner.is_of_scope(),
            state => state == Self::Abandoned,
        }
    }

    #[inline]
    pub(super) fn owner(self) -> Option<Owner> {
        match self {
            Self::Free => None,
            Self::InFlight(owner) | Self::Done(owner) | Self::Discarded(owner) => Some(owner),
            Self::Abandoned | Self::Seen => Some(Owner::Scope),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    Free,
    InFlight,
    Abandoned,
    Done,
    Seen,
    Discarded,
}

/// In the order of the whole number, which is loaded as one.
#[repr(C, align(8))]
struct RequestNumber {
    #[cfg(target_endian = "little")]
    index: u32,
    generation: Cell<u32>,
    #[cfg(target_endian = "big")]
    index: u32,
}

pub(super) struct Slot {
    /// While the slot is free: of the next operation.
    number: RequestNumber,
    /// In the ring.
    pub(super) next: Cell<NonNull<Slot>>,
    /// Two cells: with one, the compiler keeps the write of a post that a dropped handle overwrites at once.
    phase: Cell<Phase>,
    owner: Cell<Owner>,
    /// The address of the buffer's length, for [`Owner::Lent`].
    pub(super) kept: Cell<Option<NonNull<KeptLength>>>,
    completion: Cell<WorkCompletion>,
}

// SAFETY: one thread at a time uses the core of the table and the handle of the operation: see `Core`, `OneThread`.
unsafe impl Sync for Slot {}

impl Slot {
    /// Not free until the table is opened.
    pub(super) fn new(index: u32, generation: u32) -> Self {
        Self {
            number: RequestNumber { index, generation: Cell::new(generation) },
            next: Cell::new(NonNull::dangling()),
            phase: Cell::new(Phase::Seen),
            owner: Cell::new(Owner::Scope),
            kept: Cell::new(None),
            completion: Cell::new(WorkCompletion::default()),
        }
    }

    /// While the slot is free: the number of the next operation.
    #[inline]
    pub(super) fn wr_id(&self) -> u64 {
        const { assert!(size_of::<RequestNumber>() == size_of::<u64>()) };
        // SAFETY: the halves are all of it, and initialised. One load keeps the number whole.
        unsafe { (&raw const self.number).cast::<u64>().read() }
    }

    #[inline]
    pub(super) fn generation(&self) -> u32 {
        self.number.generation.get()
    }

    pub(super) fn set_generation(&self, generation: u32) {
        self.number.generation.set(generation);
    }

    #[inline]
    pub(super) fn renumber(&self) {
        self.number.generation.set(self.number.generation.get().wrapping_add(1));
    }

    #[inline]
    pub(super) fn free(&self) {
        self.set_state(State::Free);
        self.renumber();
    }

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

    pub(super) fn completion(&self) -> WorkCompletion {
        self.completion.get()
    }

    /// The operation must be done.
    #[inline]
    pub(super) fn has_success(&self) -> bool {
        // SAFETY: it is initialised, and one thread at a time uses the cell.
        unsafe { &*self.completion.as_ptr() }.is_success()
    }

    #[inline]
    pub(super) fn is_success(&self) -> bool {
        matches!(self.state(), State::Done(_)) && self.has_success()
    }

    /// Always initialised.
    #[inline]
    pub(super) fn completion_pointer(&self) -> NonNull<ffi::ibv_wc> {
        // `WorkCompletion` is a transparent wrapper.
        NonNull::from(&self.completion).cast()
    }

    #[inline]
    pub(super) fn complete(&self, owner: Owner, completion: &ffi::ibv_wc) {
        self.completion.set((*completion).into());
        self.set_state(State::Done(owner));
    }
}

/// One generation, in a request's number.
pub(crate) const ONE: u64 = 1 << 32;

pub(crate) const NO_SLOT: u32 = u32::MAX;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Generations {
    /// That of every slot when the connection began.
    first: u32,
    /// How many before `first` earlier connections used.
    earlier: u32,
}

impl Generations {
    /// No request has the number 0.
    pub(super) const NEW: Self = Self { first: 1, earlier: 0 };

    pub(super) fn first(self) -> u32 {
        self.first
    }

    /// `reached` has the generations of the slots.
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
}
