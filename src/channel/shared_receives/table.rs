//! The receives of a shared receive queue, and the messages that have arrived for each channel.
//!
//! A receive has a slot, which holds its buffer. The lower half of its `wr_id` has the slot's index and generation, and the
//! upper half is a number that belongs to the queue alone, by which a poll
//! recognises a completion of this queue.
//!
//! A buffer leaves its slot when the completion was polled, or after the queue was destroyed. The end of a queue
//! pair frees no slot: it is not known which receives the queue pair had taken.
//!
//! Messages of one channel (a *member*) are a list through the slots, in the order of their completions. So
//! the memory for messages grows with the number of receives, and a member costs a few bytes.

use crate::channel::owned_buffer::HeldBuffer;
use crate::error::Result;
use crate::ffi;

use super::super::in_flight::no_memory;

/// No slot.
const NONE: u32 = u32::MAX;

/// Tells the numbers of receives from those of requests that have a slot in a channel's table, and is larger than any
/// index of either.
const SHARED: u32 = 1 << 30;

/// Whether the lower half of a request's number is one of a shared receive.
pub(super) fn is_shared(number: u32) -> bool {
    number >> 30 == 1
}

/// The index of a channel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::channel) struct Member(u32);

/// See the [module](self).
pub(super) struct Table {
    slots: Box<[Slot]>,
    free: Queue,
    members: Vec<Messages>,
    /// The unused ones among the members. It has room for all.
    unused: Vec<u32>,
    /// The receives that the device has, as far as is known.
    pub(super) posted: u32,
    /// The number of bits of an index.
    index_bits: u32,
}

struct Slot {
    buffer: HeldBuffer,
    state: State,
    /// Counts the receives of the slot, around the end.
    generation: u32,
    /// The next one of the same list, or `NONE`.
    next: u32,
    completion: ffi::ibv_wc,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Free,
    /// The device may use the buffer.
    Posted,
    /// The message was not taken yet.
    Arrived,
}

/// A list of slots.
#[derive(Clone, Copy)]
struct Queue {
    first: u32,
    last: u32,
}

impl Queue {
    const EMPTY: Self = Self { first: NONE, last: NONE };

    fn push(&mut self, slots: &mut [Slot], index: u32) {
        slots[index as usize].next = NONE;
        match self.last {
            NONE => self.first = index,
            last => slots[last as usize].next = index,
        }
        self.last = index;
    }

    fn pop(&mut self, slots: &[Slot]) -> Option<u32> {
        let index = self.first;
        let slot = slots.get(index as usize)?;
        self.first = slot.next;
        if self.first == NONE {
            self.last = NONE;
        }
        Some(index)
    }
}

/// What has arrived for one member.
struct Messages {
    arrived: Queue,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// Nobody has the index.
    Unused,
    InUse,
    /// The channel is gone, but its queue pair may still take receives.
    Leaked,
}

impl Table {
    /// # Errors
    ///
    ///  - `ENOMEM`: out of memory.
    pub(super) fn new(receives: u32) -> Result<Self> {
        if receives >= SHARED {
            return Err(no_memory());
        }
        let mut slots = Vec::new();
        slots.try_reserve_exact(receives as usize).map_err(|_| no_memory())?;
        slots.extend((0..receives).map(|_| Slot {
            buffer: HeldBuffer::new(),
            state: State::Free,
            generation: 0,
            next: NONE,
            completion: ffi::ibv_wc::default(),
        }));
        let (mut slots, mut free) = (slots.into_boxed_slice(), Queue::EMPTY);
        for index in 0..receives {
            free.push(&mut slots, index);
        }
        let index_bits = u32::BITS - receives.saturating_sub(1).leading_zeros();
        Ok(Self { slots, free, members: Vec::new(), unused: Vec::new(), posted: 0, index_bits })
    }

    pub(super) fn len(&self) -> u32 {
        self.slots.len() as u32
    }

    /// Takes a free slot for a receive that is about to be posted.
    pub(super) fn take(&mut self) -> Option<u32> {
        let index = self.free.pop(&self.slots)?;
        self.slots[index as usize].state = State::Posted;
        self.posted += 1;
        Some(index)
    }

    /// The lower half of the number of the receive in this slot: its index, and in the other bits as much as there is
    /// room for of the generation.
    pub(super) fn number(&self, index: u32) -> u32 {
        let generation = self.slots[index as usize].generation << self.index_bits;
        SHARED | generation & (SHARED - 1) | index
    }

    /// The slot of the receive with this number, unless that has completed.
    fn index_of(&self, number: u32) -> Option<u32> {
        let index = number & ((1 << self.index_bits) - 1);
        ((index as usize) < self.slots.len() && self.number(index) == number).then_some(index)
    }

    /// Where the buffer of a slot is kept.
    pub(super) fn buffer(&self, index: u32) -> &HeldBuffer {
        &self.slots[index as usize].buffer
    }

    /// Frees the slot of a receive that was not posted.
    pub(super) fn untake(&mut self, index: u32) {
        self.posted -= 1;
        self.release(index);
    }

    fn release(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.state = State::Free;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(&mut self.slots, index);
    }

    /// A new member.
    ///
    /// # Errors
    ///
    ///  - `ENOMEM`: out of memory.
    pub(super) fn join(&mut self) -> Result<Member> {
        let messages = Messages { arrived: Queue::EMPTY, stage: Stage::InUse };
        if let Some(index) = self.unused.pop() {
            self.members[index as usize] = messages;
            return Ok(Member(index));
        }
        // So that `leave` need not allocate.
        self.unused.try_reserve(self.members.len() + 1).map_err(|_| no_memory())?;
        self.members.try_reserve(1).map_err(|_| no_memory())?;
        self.members.push(messages);
        Ok(Member(self.members.len() as u32 - 1))
    }

    /// The member's channel is gone. If its queue pair may still exist, nobody gets the index again.
    pub(super) fn leave(&mut self, member: Member, leaked: bool) {
        let stage = if leaked { Stage::Leaked } else { Stage::Unused };
        self.members[member.0 as usize].stage = stage;
        if !leaked {
            self.unused.push(member.0);
        }
    }

    /// Whether a message is there for the member.
    pub(super) fn has_message(&self, member: Member) -> bool {
        self.members[member.0 as usize].arrived.first != NONE
    }

    /// Takes the oldest message of a member: the buffer, and the completion.
    pub(super) fn next(&mut self, member: Member) -> Option<(HeldBuffer, ffi::ibv_wc)> {
        let index = self.members[member.0 as usize].arrived.pop(&self.slots)?;
        let slot = &self.slots[index as usize];
        let message = (slot.buffer.take_any(), slot.completion);
        self.release(index);
        Some(message)
    }

    /// A completion of the receive with this number was polled. Its message is the member's. If there is none, this
    /// returns the buffer.
    ///
    /// # Errors
    ///
    /// No receive with this number is posted.
    pub(super) fn complete(
        &mut self,
        number: u32,
        member: Option<Member>,
        completion: &ffi::ibv_wc,
    ) -> std::result::Result<Option<HeldBuffer>, ()> {
        let index = self.index_of(number).ok_or(())?;
        let slot = &mut self.slots[index as usize];
        if slot.state != State::Posted {
            return Err(());
        }
        self.posted -= 1;
        let member = member.map(|member| &mut self.members[member.0 as usize]);
        match member.filter(|messages| messages.stage == Stage::InUse) {
            Some(messages) => {
                (slot.state, slot.completion) = (State::Arrived, *completion);
                messages.arrived.push(&mut self.slots, index);
                Ok(None)
            }
            None => {
                let buffer = slot.buffer.take_any();
                self.release(index);
                Ok(Some(buffer))
            }
        }
    }

    /// Leaks the buffers that the device may still use.
    pub(super) fn leak_posted(&self) {
        for slot in &self.slots {
            if slot.state == State::Posted {
                slot.buffer.leak();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completion(wr_id: u32) -> ffi::ibv_wc {
        ffi::ibv_wc { wr_id: wr_id.into(), ..Default::default() }
    }

    /// The number of a receive that was just posted.
    fn take(table: &mut Table) -> u32 {
        let index = table.take().unwrap();
        table.number(index)
    }

    fn taken(table: &mut Table, member: Member) -> Option<u64> {
        table.next(member).map(|(_, completion)| completion.wr_id)
    }

    #[test]
    fn each_member_gets_its_messages_in_the_order_of_their_completions() {
        let mut table = Table::new(4).unwrap();
        let (one, other) = (table.join().unwrap(), table.join().unwrap());
        for round in 0..10 {
            let slots = [(); 4].map(|()| take(&mut table));
            assert_eq!((table.take(), table.posted), (None, 4), "{round}");
            for (index, member) in [(2, one), (0, other), (3, one), (1, one)] {
                assert!(matches!(
                    table.complete(slots[index], Some(member), &completion(index as u32)),
                    Ok(None)
                ));
            }
            assert_eq!(table.posted, 0);
            assert_eq!([(); 4].map(|()| taken(&mut table, one)), [Some(2), Some(3), Some(1), None]);
            assert!(table.has_message(other) && !table.has_message(one));
            assert_eq!([(); 2].map(|()| taken(&mut table, other)), [Some(0), None]);
        }
    }

    #[test]
    fn what_nobody_gets_frees_its_slot() {
        let mut table = Table::new(2).unwrap();
        let member = table.join().unwrap();
        let slots = [(); 2].map(|()| take(&mut table));
        assert!(matches!(table.complete(slots[0], None, &completion(0)), Ok(Some(_))));
        table.leave(member, true);
        assert!(matches!(table.complete(slots[1], Some(member), &completion(0)), Ok(Some(_))));
        assert_ne!(table.join().unwrap(), member, "a leaked queue pair keeps its index");
        assert!(table.take().is_some() && table.take().is_some());
    }

    #[test]
    fn a_receive_completes_once() {
        let mut table = Table::new(2).unwrap();
        let member = table.join().unwrap();
        let slot = take(&mut table);
        assert!(is_shared(slot));
        assert!(table.complete(slot, Some(member), &completion(0)).is_ok());
        assert!(table.complete(slot, Some(member), &completion(0)).is_err());
        assert!(table.complete(slot + 1, Some(member), &completion(0)).is_err());
        assert!(table.complete(NONE, Some(member), &completion(0)).is_err());
        assert_eq!(taken(&mut table, member), Some(0));
        // Twice, so that the same slot has another receive.
        let others = [(); 2].map(|()| take(&mut table));
        assert_eq!(table.take(), None);
        assert!(table.complete(slot, Some(member), &completion(0)).is_err(), "it comes late");
        for other in others {
            assert!(table.complete(other, None, &completion(0)).is_ok());
        }
        table.leave(member, false);
        assert_eq!(table.join().unwrap(), member);
    }

    #[test]
    fn every_number_is_found_whatever_the_capacity() {
        let capacities = [1, 2, 3, 255, 256, 257];
        for &capacity in &capacities[..if cfg!(miri) { 3 } else { 6 }] {
            let mut table = Table::new(capacity).unwrap();
            for _ in 0..2 * capacity {
                let index = table.take().unwrap();
                let number = table.number(index);
                assert!(is_shared(number) && table.index_of(number) == Some(index));
                table.untake(index);
                assert_eq!(table.index_of(number), None);
            }
            // As much of the generation as there is room for.
            table.slots[0].generation = u32::MAX;
            assert!(is_shared(table.number(0)), "{capacity}");
            assert_eq!(table.index_of(table.number(0)), Some(0));
        }
    }

    #[test]
    fn an_index_is_given_to_one_member_at_a_time() {
        let mut table = Table::new(0).unwrap();
        let members = [(); 4].map(|()| table.join().unwrap());
        for (leaving, leaked) in [(2, false), (0, false), (3, true)] {
            table.leave(members[leaving], leaked);
        }
        let again = [(); 3].map(|()| table.join().unwrap());
        assert_eq!(again, [members[0], members[2], Member(4)]);
    }
}
