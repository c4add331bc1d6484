use std::cell::Cell;
use std::ptr::NonNull;

use crate::base::ffi;
use crate::verbs::completion::WorkCompletion;
use crate::verbs::memory::KeptLength;

/// Of a slot. Without `Unscoped`, a handle within a scope, or the scope itself, asks for the result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// In flight.
    Scoped,
    /// In flight. A token that may outlive its scope, or the channel's blocking operation, asks for the result.
    Unscoped,
    /// In flight. The handle of a receive was dropped. The slot has the address of its buffer's length.
    Lent,
    /// In flight. The handle was dropped.
    Abandoned,
    Done,
    UnscopedDone,
    /// The handle has returned the result.
    Seen,
    /// The queue pair was reset or destroyed first. No completion will come.
    Discarded,
    UnscopedDiscarded,
    Free,
}

impl State {
    /// In flight, and the result is asked for.
    #[inline]
    pub(super) fn awaits_completion(self) -> bool {
        matches!(self, Self::Scoped | Self::Unscoped)
    }

    /// Whether the device may still use the buffer.
    #[inline]
    pub(super) fn is_outstanding(self) -> bool {
        matches!(self, Self::Scoped | Self::Unscoped | Self::Lent | Self::Abandoned)
    }

    #[inline]
    pub(super) fn is_outstanding_in_scope(self) -> bool {
        matches!(self, Self::Scoped | Self::Lent | Self::Abandoned)
    }

    #[inline]
    pub(super) fn is_unscoped(self) -> bool {
        matches!(self, Self::Unscoped | Self::UnscopedDone | Self::UnscopedDiscarded)
    }

    /// A handle has not returned the result.
    pub(super) fn is_unseen_in_scope(self) -> bool {
        !matches!(self, Self::Free | Self::Seen) && !self.is_unscoped()
    }

    #[inline]
    pub(super) fn is_done(self) -> bool {
        matches!(self, Self::Done | Self::UnscopedDone | Self::Seen)
    }
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
    state: Cell<State>,
    /// The address of the buffer's length, for [`State::Lent`].
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
            state: Cell::new(State::Seen),
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

    pub(super) fn state(&self) -> State {
        self.state.get()
    }

    #[inline]
    pub(super) fn set_state(&self, state: State) {
        self.state.set(state);
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
        matches!(self.state(), State::Done | State::UnscopedDone) && self.has_success()
    }

    /// Always initialised.
    #[inline]
    pub(super) fn completion_pointer(&self) -> NonNull<ffi::ibv_wc> {
        // `WorkCompletion` is a transparent wrapper.
        NonNull::from(&self.completion).cast()
    }

    /// The operation is one that [awaits its completion](State::awaits_completion).
    #[inline]
    pub(super) fn complete(&self, completion: &ffi::ibv_wc) {
        self.completion.set((*completion).into());
        let is_unscoped = self.state() == State::Unscoped;
        self.set_state(if is_unscoped { State::UnscopedDone } else { State::Done });
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
