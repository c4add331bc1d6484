//! Beginning and ending a connection.

use super::{InFlight, MAX_SLOTS, Open};
use crate::channel::slot::{Generations, Owner, Slot, State, member};

impl InFlight {
    pub(in crate::channel) fn is_earlier(&self, wr_id: u64) -> bool {
        let generation = match member(wr_id) {
            Some(member) => match self.slot(member.place as usize) {
                Some(slot) => member.generation(slot.generation()),
                None => return false,
            },
            None if (wr_id as u32 as usize) < MAX_SLOTS => (wr_id >> 32) as u32,
            None => return false,
        };
        self.generations.get().is_earlier(generation)
    }

    /// Makes all numbers so far earlier ones.
    pub(in crate::channel) fn end_connection(&self) -> Generations {
        let reached = self.all_slots().iter().map(Slot::generation);
        let generations = self.begun.get().after(reached);
        self.generations.set(generations);
        generations
    }

    /// Is called before anything is posted.
    pub(in crate::channel) fn begin(&self, generations: Generations) {
        self.begun.set(generations);
        self.generations.set(generations);
        for slot in self.all_slots() {
            slot.set_generation(generations.first());
        }
    }

    /// Frees all slots. Those for receives may be taken.
    pub(in crate::channel) fn open_receives(&self) {
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

    pub(in crate::channel) fn open_sends(&self) {
        self.next_send.set(self.pointer(if self.sends > 0 { 0 } else { self.depth as usize }));
        self.open.set(Open::Everything);
    }

    /// Opens a channel with shared receives.
    pub(in crate::channel) fn open_sends_only(&self) {
        self.open_sends();
        self.open.set(Open::Sends);
    }

    pub(in crate::channel) fn close(&self) {
        let never_free = self.pointer(self.depth as usize);
        self.next_send.set(never_free);
        self.next_receive.set(never_free);
        self.open.set(Open::Nothing);
    }

    pub(in crate::channel) fn is_open(&self) -> bool {
        matches!(self.open.get(), Open::Everything | Open::Sends)
    }

    /// Returns whether the channel is open and posts its own receives.
    pub(in crate::channel) fn is_open_for_all(&self) -> bool {
        self.open.get() == Open::Everything
    }

    pub(in crate::channel) fn is_open_for_receives(&self) -> bool {
        self.open.get() == Open::Receives
    }

    pub(in crate::channel) fn is_closed(&self) -> bool {
        self.open.get() == Open::Nothing
    }

    /// Ends all requests after the queue pair was reset or destroyed. Returns whether the program had dropped a handle
    /// of one.
    pub(in crate::channel) fn discard_outstanding(&self) -> bool {
        self.end_connection();
        for own in &self.all_slots()[self.depth as usize..] {
            own.set_state(State::Seen);
            own.renumber();
        }
        let mut any_abandoned = false;
        for slot in self.slots() {
            match slot.state() {
                State::InFlight(Owner::LostWindow) => {
                    any_abandoned = true;
                    self.release_window(slot);
                }
                // The program knows of the failure.
                State::InFlight(Owner::FailedWindow) => {
                    slot.set_state(State::Done(Owner::FailedWindow));
                }
                State::InFlight(Owner::Lent) | State::Abandoned => {
                    any_abandoned = true;
                    self.release_of(slot, Owner::Scope);
                }
                State::InFlight(owner) => slot.set_state(State::Discarded(owner)),
                _ => {}
            }
        }
        any_abandoned
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{open, opened, release, take};
    use super::*;
    use crate::channel::operation::Queue;

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
        table.open_sends();
        assert!(table.is_open() && !table.is_open_for_receives());
        assert_eq!((take(&table, Queue::Send), take(&table, Queue::Receive)), (Some(0), Some(3)));
        assert_eq!((table.in_use(), table.outstanding()), (3, 3));
    }

    #[test]
    fn discarded_requests_are_no_longer_outstanding() {
        let table = opened(3, 0);
        for _ in 0..3 {
            table.take(Queue::Send, table.free_slot(Queue::Send).unwrap(), Owner::Scope);
        }
        table.slot(0).unwrap().set_state(State::Abandoned);
        table.slot(1).unwrap().complete(Owner::Scope, &crate::ffi::ibv_wc::default());
        assert!(table.discard_outstanding());
        let states = [State::Free, State::Done(Owner::Scope), State::Discarded(Owner::Scope)];
        assert_eq!([0, 1, 2].map(|index| table.slot(index).unwrap().state()), states);
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
                table.take(Queue::Send, slot, Owner::Scope);
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
