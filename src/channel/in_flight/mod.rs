//! The table of outstanding operations.
//!
//! It has a slot for each request that fits into the queues. A post takes one, and the owner releases it with the
//! result: a free slot means that the queue and the completion queue have room. Two more slots, for the channel's own
//! operations, are never free, and not counted as in use.
//!
//! The slots of each queue form a ring. Operations mostly end in the order of posts, so the next slot is usually free.
//!
//! One thread at a time uses the table, so its fields are [`Cell`]s.

mod connection;

use std::cell::Cell;
use std::ptr::NonNull;

use super::error::no_memory;
use super::operation::Queue;
use super::slot::{Generations, Owner, Slot, State};
use crate::error::Result;

const MAX_SLOTS: usize = 1 << 30;

pub(in crate::channel) struct InFlight {
    /// The table owns them: sends, receives, the blocking operation, the credit read. The blocking operation's slot is
    /// also the next one of a queue without slots, and of a closed table.
    slots: NonNull<Slot>,
    /// Slots of both queues.
    depth: u32,
    all: u32,
    sends: u32,
    next_send: Cell<NonNull<Slot>>,
    next_receive: Cell<NonNull<Slot>>,
    /// Slots in use by operations in scopes, and by `others`.
    in_scope: Cell<u32>,
    others: Cell<u32>,
    open: Cell<Open>,
    /// First generations of the latest connection.
    begun: Cell<Generations>,
    /// The same, or those of the next connection once all operations have ended without completions.
    generations: Cell<Generations>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Open {
    Nothing,
    Receives,
    Everything,
    /// The channel takes shared receives.
    Sends,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        // SAFETY: `new` made it from a box of this length, and no reference into it outlives the table.
        drop(unsafe {
            Box::from_raw(std::ptr::slice_from_raw_parts_mut(
                self.slots.as_ptr(),
                self.all as usize,
            ))
        });
    }
}

// SAFETY: the table owns the slots, and nothing in them is tied to a thread.
unsafe impl Send for InFlight {}

impl InFlight {
    /// Makes a closed table.
    ///
    /// # Errors
    ///
    ///  - `ENOMEM`: out of memory.
    pub(in crate::channel) fn new(sends: u32, receives: u32, flow_control: bool) -> Result<Self> {
        let depth = sends as usize + receives as usize;
        let all = depth + 1 + usize::from(flow_control);
        if all > MAX_SLOTS {
            return Err(no_memory());
        }
        let mut slots = Vec::new();
        slots.try_reserve_exact(all).map_err(|_| no_memory())?;
        let generations = Generations::NEW;
        let indices = 0..all as u32;
        slots.extend(indices.map(|index| Slot::new(index, generations.first())));
        let slots = NonNull::from(Box::leak(slots.into_boxed_slice())).cast();
        let dangling = NonNull::dangling();
        let table = Self {
            slots,
            depth: depth as u32,
            all: all as u32,
            sends,
            next_send: Cell::new(dangling),
            next_receive: Cell::new(dangling),
            in_scope: Cell::new(0),
            others: Cell::new(0),
            open: Cell::new(Open::Nothing),
            begun: Cell::new(generations),
            generations: Cell::new(generations),
        };
        table.close();
        Ok(table)
    }

    #[inline]
    pub(in crate::channel) fn slots(&self) -> &[Slot] {
        // SAFETY: the slots live as long as the table, and are reached only by shared references.
        unsafe { std::slice::from_raw_parts(self.slots.as_ptr(), self.depth as usize) }
    }

    /// Includes the channel's own slots.
    #[inline]
    pub(in crate::channel) fn all_slots(&self) -> &[Slot] {
        // SAFETY: as in `slots`.
        unsafe { std::slice::from_raw_parts(self.slots.as_ptr(), self.all as usize) }
    }

    pub(in crate::channel) fn blocking(&self) -> &Slot {
        &self.all_slots()[self.depth as usize]
    }

    pub(in crate::channel) fn credit_read(&self) -> Option<&Slot> {
        self.all_slots().get(self.depth as usize + 1)
    }

    pub(in crate::channel) fn of(&self, queue: Queue) -> &[Slot] {
        let (sends, receives) = self.slots().split_at(self.sends as usize);
        match queue {
            Queue::Send => sends,
            Queue::Receive => receives,
        }
    }

    /// Finds a slot by the lower half of a request's number.
    #[inline]
    pub(in crate::channel) fn slot(&self, index: usize) -> Option<&Slot> {
        self.slots().get(index)
    }

    #[inline]
    pub(in crate::channel) fn slot_of(&self, wr_id: u64) -> Option<&Slot> {
        let slot = self.all_slots().get(wr_id as u32 as usize)?;
        (slot.wr_id() == wr_id).then_some(slot)
    }

    fn pointer(&self, index: usize) -> NonNull<Slot> {
        assert!(index < self.all_slots().len());
        // SAFETY: the index is that of a slot, as asserted.
        unsafe { self.slots.add(index) }
    }

    #[inline]
    pub(in crate::channel) fn any_in_use(&self) -> bool {
        self.in_scope.get() | self.others.get() != 0
    }

    #[inline]
    pub(in crate::channel) fn any_in_scope(&self) -> bool {
        self.in_scope.get() != 0
    }

    pub(in crate::channel) fn has_one_in_scope(&self) -> bool {
        self.in_scope.get() == 1
    }

    pub(in crate::channel) fn in_use(&self) -> u32 {
        self.in_scope.get() + self.others.get()
    }

    #[inline]
    fn count_of(&self, owner: Owner) -> &Cell<u32> {
        if matches!(owner, Owner::Scope | Owner::Lent) { &self.in_scope } else { &self.others }
    }

    pub(in crate::channel) fn has_room(&self, queue: Queue) -> bool {
        self.free_slot(queue).is_some()
    }

    #[inline]
    fn next(&self, queue: Queue) -> &Cell<NonNull<Slot>> {
        match queue {
            Queue::Send => &self.next_send,
            Queue::Receive => &self.next_receive,
        }
    }

    #[inline]
    pub(in crate::channel) fn free_slot(&self, queue: Queue) -> Option<&Slot> {
        // SAFETY: the cell always points to a slot of this table.
        let slot = unsafe { self.next(queue).get().as_ref() };
        if slot.state() == State::Free { Some(slot) } else { self.search(queue) }
    }

    /// Takes a slot after the post: then the compiler knows the state, and need not load it when the handle is dropped
    /// at once.
    #[inline]
    pub(in crate::channel) fn take(&self, queue: Queue, slot: &Slot, owner: Owner) {
        self.next(queue).set(slot.next.get());
        let count = self.count_of(owner);
        count.set(count.get() + 1);
        slot.set_state(State::InFlight(owner));
    }

    #[inline(never)]
    fn search(&self, queue: Queue) -> Option<&Slot> {
        match (self.open.get(), queue) {
            (Open::Everything | Open::Sends, _) | (Open::Receives, Queue::Receive) => {}
            _ => return None,
        }
        self.free_places(queue).next()
    }

    /// Frees a slot whose result was taken or request refused. Not for windows.
    pub(in crate::channel) fn release(&self, slot: &Slot) {
        if let Some(owner) = slot.state().owner() {
            self.release_of(slot, owner);
        }
    }

    /// Frees a slot in use. If the operation or `owner` is of a scope, both are.
    #[inline]
    pub(in crate::channel) fn release_of(&self, slot: &Slot, owner: Owner) {
        slot.free();
        let count = self.count_of(owner);
        count.set(count.get().wrapping_sub(1));
    }

    /// Counts a slot that a window has taken.
    #[inline]
    pub(in crate::channel) fn count_taken_in_scope(&self) {
        self.in_scope.set(self.in_scope.get() + 1);
    }

    /// Moves on after a window has taken the slots up to `last`.
    #[inline]
    pub(in crate::channel) fn set_next_send(&self, last: &Slot) {
        self.next_send.set(last.next.get());
    }

    /// Uncounts slots that were [freed](Slot::free).
    #[inline]
    pub(in crate::channel) fn count_released_in_scope(&self, slots: usize) {
        self.in_scope.set(self.in_scope.get().wrapping_sub(slots as u32));
    }

    /// Counts without the credit read.
    pub(in crate::channel) fn outstanding(&self) -> u32 {
        let slots = self.slots().iter().chain([self.blocking()]);
        slots.map(|slot| u32::from(slot.state().is_outstanding())).sum()
    }

    pub(in crate::channel) fn outstanding_sends(&self) -> u32 {
        let sends = self.of(Queue::Send).iter();
        sends.map(|slot| u32::from(slot.state().is_outstanding())).sum()
    }
}

#[cfg(test)]
pub(in crate::channel) mod tests {
    use super::*;

    pub(in crate::channel) fn opened(sends: u32, receives: u32) -> InFlight {
        let table = InFlight::new(sends, receives, true).unwrap();
        open(&table);
        table
    }

    pub(in crate::channel) fn open(table: &InFlight) {
        table.open_receives();
        table.open_sends();
    }

    pub(in crate::channel) fn take(table: &InFlight, queue: Queue) -> Option<u32> {
        let slot = table.free_slot(queue)?;
        table.take(queue, slot, Owner::Scope);
        Some(slot.index())
    }

    pub(in crate::channel) fn release(table: &InFlight, index: usize) {
        table.release(table.slot(index).unwrap());
    }

    #[test]
    fn each_queue_has_its_own_slots() {
        let table = opened(2, 1);
        assert_eq!([(); 3].map(|()| take(&table, Queue::Send)), [Some(0), Some(1), None]);
        assert!(!table.has_room(Queue::Send) && table.has_room(Queue::Receive));
        assert_eq!([(); 2].map(|()| take(&table, Queue::Receive)), [Some(2), None]);
        assert_eq!((table.in_use(), table.outstanding()), (3, 3));
        release(&table, 1);
        release(&table, 2);
        assert_eq!((take(&table, Queue::Send), take(&table, Queue::Receive)), (Some(1), Some(2)));
        assert_eq!(take(&table, Queue::Receive), None);
    }

    #[test]
    fn a_ring_wraps_around_and_finds_free_slots_out_of_order() {
        let table = opened(4, 4);
        for round in 0..20 {
            assert_eq!(take(&table, Queue::Receive), Some(4 + round % 4));
            release(&table, 4 + round as usize % 4);
        }
        for _ in 0..4 {
            take(&table, Queue::Send);
        }
        for free in [2, 1, 3, 0, 2] {
            release(&table, free);
            assert!(table.has_room(Queue::Send));
            assert_eq!(take(&table, Queue::Send), Some(free as u32));
            assert_eq!(take(&table, Queue::Send), None);
        }
    }

    #[test]
    fn a_queue_may_have_no_slot_at_all() {
        assert!(!opened(0, 3).has_room(Queue::Send));
        assert!(!opened(3, 0).has_room(Queue::Receive));
        assert_eq!(take(&opened(0, 3), Queue::Receive), Some(0));
        assert_eq!(take(&opened(0, 3), Queue::Send), None);
        assert_eq!(take(&opened(3, 0), Queue::Receive), None);
        assert_eq!(take(&opened(0, 0), Queue::Send), None);
    }

    /// The end of a scope waits only for its own operations.
    #[test]
    fn operations_of_scopes_are_counted_apart() {
        let table = opened(2, 0);
        let counts = || (table.any_in_scope(), table.in_use());
        assert_eq!(counts(), (false, 0));
        let taken = [Owner::Scope, Owner::Token].map(|owner| {
            let slot = table.free_slot(Queue::Send).unwrap();
            table.take(Queue::Send, slot, owner);
            slot
        });
        assert_eq!(counts(), (true, 2));
        table.release(taken[0]);
        assert_eq!(counts(), (false, 1));
        table.release(taken[1]);
        assert_eq!(counts(), (false, 0));
    }

    #[test]
    fn an_index_that_does_not_exist_has_no_slot() {
        let table = opened(1, 1);
        assert!(table.slot(1).is_some() && table.slot(2).is_none());
        let first = table.slot(0).unwrap().wr_id();
        for index in [4, 1 << 30, 1 << 31, u64::from(u32::MAX)] {
            assert!(table.slot_of(first | index).is_none(), "{index:#x}");
        }
    }
}
