//! Messages: whole, in order, and each once, whatever happens to the rails.
//!
//! Each side has a ring of slots, into which the other writes. A message has a number, and its number is its slot. It
//! goes by the first pair that works; what a failed pair may have carried goes again by the next one, to the same slot,
//! with the same bytes. The immediate number of the write names the message, so that the receiver counts it once, and
//! gives it to the program in its order. A slot is used again when the receiver's program has taken the message, and no copy
//! of it is under way.

use std::collections::VecDeque;

use ibverbs_transfer::counted::FIRST_FREE;

use crate::event::TransferId;
use crate::memory::{RailMemory, RemoteRailMemory};

/// Immediate numbers from this one on are of messages. No piece of a transfer has one of them.
pub(crate) const MESSAGES: u32 = 63 << 26;
const _: () = assert!(MESSAGES >= FIRST_FREE);
/// How many messages of a direction may be under way, or wait for the program that receives them.
pub(crate) const SLOTS: u64 = 32;
/// The receiver tells the sender each time that it has taken this many more.
const TELL_EVERY: u64 = SLOTS / 4;
/// A slot begins with the length of its message.
pub(crate) const HEADER: usize = 4;
/// The bits of a message's number that an immediate number has.
const NUMBER: u32 = (1 << 26) - 1;

/// The messages from and to a peer.
#[derive(Debug)]
pub(crate) struct Messages {
    /// The slots of what arrives, into which the peer writes, and those of what leaves.
    inbox: RailMemory,
    outbox: RailMemory,
    longest: usize,
    /// The peer's slots, and the longest message that it takes.
    theirs: Option<(RemoteRailMemory, usize)>,
    /// Messages that have no slot yet.
    waiting: VecDeque<(TransferId, Vec<u8>)>,
    /// Messages that have a slot, in their order: the first one's number, and all.
    first: u64,
    sent: VecDeque<Sent>,
    /// The peer's program has taken all below.
    their_taken: u64,
    /// The bytes of the write of a message that has arrived, by slot.
    arrived: [Option<u32>; SLOTS as usize],
    /// All below were given to the program.
    next: u64,
    taken: u64,
    /// The peer knows that all below were taken.
    told: u64,
}

#[derive(Debug)]
struct Sent {
    /// `None`: the program knows that it has arrived, or that it may not.
    id: Option<TransferId>,
    len: usize,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    Waits,
    InFlight,
    Arrived,
}

/// A message that is to be posted: bytes of our memory, and the place in the peer's.
pub(crate) struct Outgoing<'a> {
    pub(crate) number: u64,
    pub(crate) memory: &'a RailMemory,
    pub(crate) start: usize,
    pub(crate) remote: &'a RemoteRailMemory,
    pub(crate) remote_start: usize,
    pub(crate) len: usize,
}

const fn slot_len(longest: usize) -> usize {
    (HEADER + longest).next_multiple_of(8)
}

impl Messages {
    /// The bytes of the slots of one direction.
    pub(crate) fn memory_len(longest: usize) -> usize {
        SLOTS as usize * slot_len(longest)
    }

    /// Both memories have the [length](Self::memory_len) for these messages.
    pub(crate) fn new(inbox: RailMemory, outbox: RailMemory, longest: usize) -> Self {
        Self {
            inbox,
            outbox,
            longest,
            theirs: None,
            waiting: VecDeque::new(),
            first: 0,
            sent: VecDeque::new(),
            their_taken: 0,
            arrived: [None; SLOTS as usize],
            next: 0,
            taken: 0,
            told: 0,
        }
    }

    /// The slots for what the peer sends, which is to be told it.
    pub(crate) fn inbox(&self) -> RemoteRailMemory {
        self.inbox.remote()
    }

    /// The peer's slots. Returns whether they can be that.
    pub(crate) fn learn(&mut self, inbox: RemoteRailMemory, longest: u32, devices: usize) -> bool {
        let longest = longest as usize;
        let expected = longest
            .checked_add(HEADER + 8)
            .and_then(|_| SLOTS.checked_mul(slot_len(longest) as u64));
        let is_possible =
            self.theirs.is_none() && inbox.devices() == devices && expected == Some(inbox.len());
        if is_possible {
            self.theirs = Some((inbox, longest));
        }
        is_possible
    }

    /// The longest message that both sides take.
    pub(crate) fn longest(&self) -> usize {
        self.theirs.as_ref().map_or(0, |(_, theirs)| *theirs).min(self.longest)
    }

    /// Whether the peer has told its slots.
    pub(crate) fn is_known(&self) -> bool {
        self.theirs.is_some()
    }

    /// Whether there is one to be posted, if there is room.
    pub(crate) fn has_unposted(&self) -> bool {
        !self.waiting.is_empty() || self.sent.iter().any(|sent| sent.stage == Stage::Waits)
    }

    pub(crate) fn push(&mut self, id: TransferId, bytes: Vec<u8>) {
        self.waiting.push_back((id, bytes));
    }

    /// Gives slots to those that have none, if there are free ones.
    pub(crate) fn give_slots(&mut self) -> crate::Result<()> {
        while (self.sent.len() as u64) < SLOTS
            && let Some((id, bytes)) = self.waiting.pop_front()
        {
            let start = self.outbox_slot(self.first + self.sent.len() as u64);
            self.outbox.write(start, &(bytes.len() as u32).to_le_bytes())?;
            self.outbox.write(start + HEADER, &bytes)?;
            self.sent.push_back(Sent {
                id: Some(id),
                len: HEADER + bytes.len(),
                stage: Stage::Waits,
            });
        }
        Ok(())
    }

    fn outbox_slot(&self, number: u64) -> usize {
        (number % SLOTS) as usize * slot_len(self.longest)
    }

    /// The first message that is not under way, which is so from now on.
    pub(crate) fn begin(&mut self) -> Option<Outgoing<'_>> {
        let (place, sent) =
            self.sent.iter_mut().enumerate().find(|(_, sent)| sent.stage == Stage::Waits)?;
        let (number, len) = (self.first + place as u64, sent.len);
        let (remote, longest) = self.theirs.as_ref()?;
        sent.stage = Stage::InFlight;
        let start = self.outbox_slot(number);
        let remote_start = (number % SLOTS) as usize * slot_len(*longest);
        Some(Outgoing { number, memory: &self.outbox, start, remote, remote_start, len })
    }

    /// Notes that a message has arrived in the peer's memory, or goes again. Returns the messages whose end the program is to be
    /// told: all before them have arrived, too, so the peer gives them to its program.
    pub(crate) fn ended(&mut self, number: u64, has_arrived: bool) -> Vec<TransferId> {
        let place = number.checked_sub(self.first).and_then(|place| usize::try_from(place).ok());
        if let Some(sent) = place.and_then(|place| self.sent.get_mut(place)) {
            let has_arrived = has_arrived || number < self.their_taken;
            sent.stage = if has_arrived { Stage::Arrived } else { Stage::Waits };
        }
        let arrived = self.sent.iter_mut().take_while(|sent| sent.stage == Stage::Arrived);
        let ended = arrived.filter_map(|sent| sent.id.take()).collect();
        self.free_slots();
        ended
    }

    /// The slot of a message of which a copy is under way is not free: the copy would overwrite the next one.
    fn free_slots(&mut self) {
        while self.first < self.their_taken
            && self.sent.front().is_some_and(|sent| sent.stage != Stage::InFlight)
        {
            self.sent.pop_front();
            self.first += 1;
        }
    }

    /// All have failed, as the program is told. Those with a slot may arrive all the same: their numbers are given.
    pub(crate) fn forget_waiting(&mut self) {
        self.waiting.clear();
    }

    /// The peer's program has taken all below. Returns the messages that have ended by that, or `None` if it cannot be.
    pub(crate) fn confirmed(&mut self, below: u64) -> Option<Vec<TransferId>> {
        if !(self.their_taken..=self.first + self.sent.len() as u64).contains(&below) {
            return None;
        }
        self.their_taken = below;
        let taken = self.sent.iter_mut().take(below.saturating_sub(self.first) as usize);
        let mut ended = Vec::new();
        for sent in taken {
            ended.extend(sent.id.take());
            if sent.stage == Stage::Waits {
                sent.stage = Stage::Arrived;
            }
        }
        // Those behind them may have arrived before.
        let arrived = self.sent.iter_mut().take_while(|sent| sent.stage == Stage::Arrived);
        ended.extend(arrived.filter_map(|sent| sent.id.take()));
        self.free_slots();
        Some(ended)
    }

    /// Takes a message that a write of `bytes` bytes has delivered, and returns all messages that are now in order. `None` if
    /// the write is not a message of this crate, or is beyond the inbox.
    pub(crate) fn receive(&mut self, immediate: u32, bytes: u32) -> Option<Vec<Vec<u8>>> {
        let ahead = u64::from(immediate.wrapping_sub(self.next as u32) & NUMBER);
        let mut messages = Vec::new();
        if ahead > u64::from(NUMBER) - SLOTS {
            // The message came before, by another pair.
            return Some(messages);
        }
        let number = self.next + ahead;
        if number >= self.told + SLOTS {
            return None;
        }
        self.arrived[(number % SLOTS) as usize] = Some(bytes);
        loop {
            let slot = (self.next % SLOTS) as usize;
            let Some(written) = self.arrived[slot].take() else { return Some(messages) };
            let start = slot * slot_len(self.longest);
            let mut len = [0; HEADER];
            self.inbox.read(start, &mut len).ok()?;
            let len = u32::from_le_bytes(len) as usize;
            // No more is allocated than was written.
            let is_whole = len <= self.longest && HEADER + len == written as usize;
            let mut bytes = vec![0; is_whole.then_some(len)?];
            self.inbox.read(start + HEADER, &mut bytes).ok()?;
            messages.push(bytes);
            self.next += 1;
        }
    }

    /// The program has taken a message. Returns what the peer is to be told, now and then: all below were taken.
    pub(crate) fn taken(&mut self) -> Option<u64> {
        self.taken += 1;
        (self.taken - self.told >= TELL_EVERY).then(|| {
            self.told = self.taken;
            self.taken
        })
    }
}

/// The immediate number of a message.
pub(crate) fn immediate(number: u64) -> u32 {
    MESSAGES | number as u32 & NUMBER
}

#[cfg(test)]
mod tests {
    use ibverbs::AccessFlags;
    use ibverbs_software::Device;

    use super::*;

    /// Both directions are the same memory, so what is sent is read here.
    fn messages(device: &str) -> (Messages, Device) {
        let device = Device::builder().name(device).build().unwrap();
        device.register();
        let rails = crate::Rails::builder().device(device.name()).build().unwrap();
        let memory = rails.allocate(Messages::memory_len(60), AccessFlags::REMOTE_WRITE).unwrap();
        let mut messages = Messages::new(memory.clone(), memory, 60);
        let inbox = messages.inbox();
        assert!(messages.learn(inbox, 60, 1));
        (messages, device)
    }

    fn ids(count: usize) -> Vec<TransferId> {
        let mut ids = slotmap::SlotMap::with_key();
        (0..count).map(|_| ids.insert(())).collect()
    }

    #[test]
    fn a_message_has_ended_when_those_before_it_have() {
        let (mut messages, _device) = messages("messages0");
        let ids = ids(3);
        ids.iter().for_each(|&id| messages.push(id, vec![7; 9]));
        messages.give_slots().unwrap();
        let numbers: Vec<_> = std::iter::from_fn(|| messages.begin().map(|it| it.number)).collect();
        assert_eq!(numbers, [0, 1, 2]);
        assert_eq!(messages.ended(1, true), []);
        assert_eq!(messages.ended(0, false), []);
        assert_eq!(messages.begin().map(|it| it.number), Some(0), "it goes again");
        assert_eq!(messages.ended(2, true), []);
        assert_eq!(messages.ended(0, true), ids);
        assert_eq!(messages.ended(0, true), [], "once");
    }

    /// The second one has arrived by another pair than the first, whose pair has failed.
    #[test]
    fn a_message_has_ended_when_those_before_it_were_taken() {
        let (mut messages, _device) = messages("messages3");
        let ids = ids(3);
        ids.iter().for_each(|&id| messages.push(id, vec![7; 9]));
        messages.give_slots().unwrap();
        while messages.begin().is_some() {}
        assert_eq!((messages.ended(1, true), messages.ended(0, false)), (vec![], vec![]));
        assert_eq!(messages.confirmed(1), Some(ids[..2].to_vec()));
        assert_eq!(messages.ended(2, true), ids[2..]);
    }

    #[test]
    fn no_slot_is_used_again_while_a_copy_is_under_way() {
        let (mut messages, _device) = messages("messages1");
        let count = SLOTS as usize + 2;
        let ids = ids(count);
        ids.iter().for_each(|&id| messages.push(id, vec![7; 9]));
        messages.give_slots().unwrap();
        while messages.begin().is_some() {}
        // A pair has failed that had carried the first two, and another one repeats the first.
        assert_eq!((messages.ended(0, false), messages.ended(1, false)), (vec![], vec![]));
        assert_eq!(messages.begin().map(|it| it.number), Some(0));
        assert_eq!(messages.confirmed(2), Some(ids[..2].to_vec()));
        messages.give_slots().unwrap();
        assert!(
            messages.begin().is_none(),
            "the second was taken: it does not go again, and the first is under way"
        );
        assert_eq!(messages.waiting.len(), 2);
        assert_eq!(messages.ended(0, false), []);
        messages.give_slots().unwrap();
        let numbers: Vec<_> = std::iter::from_fn(|| messages.begin().map(|it| it.number)).collect();
        assert_eq!(numbers, [SLOTS, SLOTS + 1]);
        assert!(
            messages.confirmed(1).is_none() && messages.confirmed(SLOTS + 3).is_none(),
            "made up"
        );
    }

    #[test]
    fn what_has_no_place_or_another_length_is_refused() {
        let (mut messages, _device) = messages("messages2");
        let arrives = |messages: &mut Messages, number: u64, len: u32, written: u32| {
            let start = (number % SLOTS) as usize * slot_len(60);
            messages.inbox.write(start, &len.to_le_bytes()).unwrap();
            messages.receive(immediate(number), written)
        };
        let arrived = |count: usize| Some(vec![vec![0; 5]; count]);
        assert_eq!(arrives(&mut messages, 1, 5, 9), arrived(0), "not before the first");
        assert_eq!(arrives(&mut messages, 0, 5, 9), arrived(2));
        assert_eq!(arrives(&mut messages, 0, 5, 9), arrived(0), "it came before");
        for number in 2..SLOTS {
            assert_eq!(arrives(&mut messages, number, 5, 9), arrived(1));
        }
        assert_eq!(arrives(&mut messages, SLOTS, 5, 9), None, "the program has taken none");
        let told: Vec<_> = (0..SLOTS).filter_map(|_| messages.taken()).collect();
        assert_eq!(told, [8, 16, 24, 32]);
        for (len, written) in [(60, 8), (61, 65), (u32::MAX, 3), (5, 8)] {
            assert_eq!(arrives(&mut messages, SLOTS, len, written), None, "{len} of {written}");
        }
        assert_eq!(arrives(&mut messages, 2 * SLOTS, 5, 9), None);
    }
}
