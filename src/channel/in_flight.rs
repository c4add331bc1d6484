//! The table of outstanding operations.
//!
//! It has a slot for each request that fits into the queues. A post takes one, and the owner releases it with the
//! result: a free slot means that the queue and the completion queue have room. Two more slots, for the channel's own
//! operations, are never free, and not counted as in use.
//!
//! The slots of each queue form a ring. Operations mostly end in the order of posts, so the next slot is usually free.
//!
//! One thread at a time uses the table, so its fields are [`Cell`]s.

use std::cell::Cell;
use std::ptr::NonNull;

use super::error::no_memory;
use super::operation::Queue;
use super::slot::{Generations, Slot, State};
use crate::base::{Result, ffi};

const MAX_SLOTS: usize = 1 << 30;

pub(crate) struct InFlight {
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
    /// The same, but blocking operations need checks.
    WithoutFastPath,
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
    /// Makes the closed table of a channel. A loop has one for all its channels: theirs have no slots.
    ///
    /// # Errors
    ///
    ///  - `ENOMEM`: out of memory.
    pub(super) fn of_channel(
        capacities: &ffi::ibv_qp_cap,
        flow_control: bool,
        of_loop: bool,
    ) -> Result<Self> {
        if of_loop {
            return Self::new(0, 0, false);
        }
        Self::new(capacities.max_send_wr, capacities.max_recv_wr, flow_control)
    }

    /// Makes a closed table.
    ///
    /// # Errors
    ///
    ///  - `ENOMEM`: out of memory.
    fn new(sends: u32, receives: u32, flow_control: bool) -> Result<Self> {
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
    pub(super) fn slots(&self) -> &[Slot] {
        // SAFETY: the slots live as long as the table, and are reached only by shared references.
        unsafe { std::slice::from_raw_parts(self.slots.as_ptr(), self.depth as usize) }
    }

    /// Includes the channel's own slots.
    #[inline]
    pub(super) fn all_slots(&self) -> &[Slot] {
        // SAFETY: as in `slots`.
        unsafe { std::slice::from_raw_parts(self.slots.as_ptr(), self.all as usize) }
    }

    pub(super) fn blocking(&self) -> &Slot {
        &self.all_slots()[self.depth as usize]
    }

    pub(super) fn credit_read(&self) -> Option<&Slot> {
        self.all_slots().get(self.depth as usize + 1)
    }

    pub(super) fn of(&self, queue: Queue) -> &[Slot] {
        let (sends, receives) = self.slots().split_at(self.sends as usize);
        match queue {
            Queue::Send => sends,
            Queue::Receive => receives,
        }
    }

    #[inline]
    pub(super) fn slot_of(&self, wr_id: u64) -> Option<&Slot> {
        let slot = self.all_slots().get(wr_id as u32 as usize)?;
        (slot.wr_id() == wr_id).then_some(slot)
    }

    fn pointer(&self, index: usize) -> NonNull<Slot> {
        assert!(index < self.all_slots().len());
        // SAFETY: the index is that of a slot, as asserted.
        unsafe { self.slots.add(index) }
    }

    pub(super) fn any_in_use(&self) -> bool {
        self.in_scope.get() | self.others.get() != 0
    }

    pub(super) fn any_in_scope(&self) -> bool {
        self.in_scope.get() != 0
    }

    pub(super) fn has_one_in_scope(&self) -> bool {
        self.in_scope.get() == 1
    }

    pub(super) fn in_use(&self) -> u32 {
        self.in_scope.get() + self.others.get()
    }

    #[inline]
    fn count_of(&self, state: State) -> &Cell<u32> {
        if state.is_unscoped() { &self.others } else { &self.in_scope }
    }

    pub(super) fn has_room(&self, queue: Queue) -> bool {
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
    pub(super) fn free_slot(&self, queue: Queue) -> Option<&Slot> {
        // SAFETY: the cell always points to a slot of this table.
        let slot = unsafe { self.next(queue).get().as_ref() };
        if slot.state() == State::Free { Some(slot) } else { self.search(queue) }
    }

    /// Takes a slot after the post: then the compiler knows the state, and need not load it when the handle is dropped
    /// at once.
    #[inline]
    pub(super) fn take(&self, queue: Queue, slot: &Slot, state: State) {
        self.next(queue).set(slot.next.get());
        let count = self.count_of(state);
        count.set(count.get() + 1);
        slot.set_state(state);
    }

    #[inline(never)]
    fn search(&self, queue: Queue) -> Option<&Slot> {
        match (self.open.get(), queue) {
            (Open::Everything | Open::WithoutFastPath, _) | (Open::Receives, Queue::Receive) => {}
            _ => return None,
        }
        self.of(queue).iter().find(|slot| slot.state() == State::Free)
    }

    /// Frees a slot whose result was taken or request refused.
    pub(super) fn release(&self, slot: &Slot) {
        let state = slot.state();
        if state != State::Free {
            slot.free();
            let count = self.count_of(state);
            count.set(count.get().wrapping_sub(1));
        }
    }

    /// Frees the slot of a scope's operation.
    #[inline]
    pub(super) fn release_scoped(&self, slot: &Slot) {
        slot.free();
        self.count_released_in_scope(1);
    }

    /// Uncounts slots that were [freed](Slot::free).
    #[inline]
    pub(super) fn count_released_in_scope(&self, slots: usize) {
        self.in_scope.set(self.in_scope.get().wrapping_sub(slots as u32));
    }

    /// Counts without the credit read.
    pub(super) fn outstanding(&self) -> u32 {
        let slots = self.slots().iter().chain([self.blocking()]);
        slots.map(|slot| u32::from(slot.state().is_outstanding())).sum()
    }

    pub(super) fn outstanding_sends(&self) -> u32 {
        let sends = self.of(Queue::Send).iter();
        sends.map(|slot| u32::from(slot.state().is_outstanding())).sum()
    }

    pub(super) fn is_earlier(&self, wr_id: u64) -> bool {
        let is_slot = (wr_id as u32 as usize) < MAX_SLOTS;
        is_slot && self.generations.get().is_earlier((wr_id >> 32) as u32)
    }

    /// Makes all numbers so far earlier ones.
    pub(super) fn end_connection(&self) -> Generations {
        let reached = self.all_slots().iter().map(Slot::generation);
        let generations = self.begun.get().after(reached);
        self.generations.set(generations);
        generations
    }

    /// Is called before anything is posted.
    pub(super) fn begin(&self, generations: Generations) {
        self.begun.set(generations);
        self.generations.set(generations);
        for slot in self.all_slots() {
            slot.set_generation(generations.first());
        }
    }

    /// Frees all slots. Those for receives may be taken.
    pub(super) fn open_receives(&self) {
        let (sends, depth) = (self.sends as usize, self.depth as usize);
        self.begin(self.end_connection());
        for slot in self.all_slots() {
            slot.set_state(State::Seen);
        }
        for (index, slot) in self.slots().iter().enumerate() {
            slot.set_state(State::Free);
            let next = match index + 1 {
                next if next == sends => 0,
                next if next == depth => sends,
                next => next,
            };
            slot.next.set(self.pointer(next));
        }
        self.next_send.set(self.pointer(depth));
        // Without slots for receives, this one is never free.
        self.next_receive.set(self.pointer(sends));
        self.in_scope.set(0);
        self.others.set(0);
        self.open.set(Open::Receives);
    }

    pub(super) fn open_sends(&self, has_fast_path: bool) {
        self.next_send.set(self.pointer(if self.sends > 0 { 0 } else { self.depth as usize }));
        self.open.set(if has_fast_path { Open::Everything } else { Open::WithoutFastPath });
    }

    pub(super) fn close(&self) {
        let never_free = self.pointer(self.depth as usize);
        self.next_send.set(never_free);
        self.next_receive.set(never_free);
        self.open.set(Open::Nothing);
    }

    pub(crate) fn is_open(&self) -> bool {
        matches!(self.open.get(), Open::Everything | Open::WithoutFastPath)
    }

    pub(super) fn has_fast_path(&self) -> bool {
        self.open.get() == Open::Everything
    }

    pub(super) fn is_open_for_receives(&self) -> bool {
        self.open.get() == Open::Receives
    }

    pub(super) fn is_closed(&self) -> bool {
        self.open.get() == Open::Nothing
    }

    /// Ends all requests after the queue pair was reset or destroyed. Returns whether the program had dropped a handle
    /// of one.
    pub(super) fn discard_outstanding(&self) -> bool {
        self.end_connection();
        for own in &self.all_slots()[self.depth as usize..] {
            own.set_state(State::Seen);
            own.renumber();
        }
        let mut any_abandoned = false;
        for slot in self.slots() {
            match slot.state() {
                State::Lent | State::Abandoned => {
                    any_abandoned = true;
                    self.release_scoped(slot);
                }
                State::Scoped => slot.set_state(State::Discarded),
                State::Unscoped => slot.set_state(State::UnscopedDiscarded),
                _ => {}
            }
        }
        any_abandoned
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(sends: u32, receives: u32) -> InFlight {
        let table = InFlight::new(sends, receives, true).unwrap();
        open(&table);
        table
    }

    fn open(table: &InFlight) {
        table.open_receives();
        table.open_sends(true);
    }

    fn take(table: &InFlight, queue: Queue) -> Option<u32> {
        let slot = table.free_slot(queue)?;
        table.take(queue, slot, State::Scoped);
        Some(slot.wr_id() as u32)
    }

    fn release(table: &InFlight, index: usize) {
        table.release(&table.slots()[index]);
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
        let taken = [State::Scoped, State::Unscoped].map(|state| {
            let slot = table.free_slot(Queue::Send).unwrap();
            table.take(Queue::Send, slot, state);
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
        assert!(table.slots().get(1).is_some() && table.slots().get(2).is_none());
        let first = table.slots()[0].wr_id();
        for index in [4, 1 << 30, 1 << 31, u64::from(u32::MAX)] {
            assert!(table.slot_of(first | index).is_none(), "{index:#x}");
        }
    }

    #[test]
    fn a_closed_table_gives_nothing_out_but_takes_back() {
        let table = InFlight::new(1, 1, false).unwrap();
        assert_eq!(take(&table, Queue::Send), None);
        open(&table);
        take(&table, Queue::Send).unwrap();
        table.close();
        release(&table, 0);
        assert!(!table.has_room(Queue::Send) && !table.is_open());
        assert_eq!(take(&table, Queue::Send), None);
        assert_eq!(table.in_use(), 0);
        open(&table);
        assert_eq!(take(&table, Queue::Send), Some(0));
    }

    #[test]
    fn receives_come_first_and_stay_when_sends_may_be_posted() {
        let table = InFlight::new(2, 2, false).unwrap();
        table.open_receives();
        assert!(table.is_open_for_receives() && !table.is_open());
        assert!(!table.has_room(Queue::Send) && table.has_room(Queue::Receive));
        assert_eq!((take(&table, Queue::Send), take(&table, Queue::Receive)), (None, Some(2)));
        table.open_sends(true);
        assert!(table.is_open() && !table.is_open_for_receives());
        assert_eq!((take(&table, Queue::Send), take(&table, Queue::Receive)), (Some(0), Some(3)));
        assert_eq!((table.in_use(), table.outstanding()), (3, 3));
    }

    #[test]
    fn discarded_requests_are_no_longer_outstanding() {
        let table = opened(3, 0);
        for _ in 0..3 {
            table.take(Queue::Send, table.free_slot(Queue::Send).unwrap(), State::Scoped);
        }
        table.slots()[0].set_state(State::Abandoned);
        table.slots()[1].complete(&crate::base::ffi::ibv_wc::default());
        assert!(table.discard_outstanding());
        let states = [State::Free, State::Done, State::Discarded];
        assert_eq!([0, 1, 2].map(|index| table.slots()[index].state()), states);
        assert_eq!((table.in_use(), table.outstanding()), (2, 0));
    }

    #[test]
    fn no_number_comes_twice() {
        let table = opened(2, 1);
        let mut seen = std::collections::HashSet::new();
        let mut connections = Vec::new();
        for connection in 0..4 {
            let mut numbers = Vec::new();
            for round in 0..connection + 3 {
                let slot = table.free_slot(Queue::Send).unwrap();
                table.take(Queue::Send, slot, State::Scoped);
                let number = slot.wr_id();
                assert!(seen.insert(number), "{number:#x}");
                assert!(table.slot_of(number).is_some() && !table.is_earlier(number));
                numbers.push(number);
                if round < connection + 2 {
                    table.release(slot);
                    assert!(table.slot_of(number).is_none(), "its completion comes again");
                }
            }
            connections.push(numbers);
            table.close();
            table.discard_outstanding();
            let all = connections.iter().flatten();
            assert!(all.clone().all(|&number| table.is_earlier(number)));
            open(&table);
            assert!(all.clone().all(|&number| table.is_earlier(number)));
            assert!(all.clone().all(|&number| table.slot_of(number).is_none()));
        }
    }
}
