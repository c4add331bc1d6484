//! Messages: whole, in order, and each once, whatever happens to the rails.
//!
//! Each side has a ring of slots, into which the other writes. A message has a number, and its number is its slot. It
//! goes by the first pair that works; what a failed pair may have carried goes again by the next one, to the same slot,
//! with the same bytes. The immediate number of the write names the message, so that the receiver counts it once, and
//! gives it to the program in its order. A slot is used again when the receiver's program has taken the message.

use std::collections::VecDeque;

use crate::event::TransferId;
use crate::memory::{RailMemory, RemoteRailMemory};
use crate::notify::MESSAGE_SLOT;

/// How many messages of a direction may be under way, or wait for the program that receives them.
pub(crate) const SLOTS: u64 = 32;
/// So many more were taken when the sender is told.
const TELL_EVERY: u64 = SLOTS / 4;
/// A slot begins with the length of its message.
pub(crate) const HEADER: usize = 4;
/// The bits of a message's number that an immediate number has.
const NUMBER: u32 = (1 << 26) - 1;

/// The messages from and to a peer.
#[derive(Debug)]
pub(crate) struct Messages {
    /// The slots of what arrives, then those of what leaves.
    memory: RailMemory,
    longest: usize,
    /// The peer's slots, and the longest message that it takes.
    theirs: Option<(RemoteRailMemory, usize)>,
    /// Those that have no slot yet.
    waiting: VecDeque<(TransferId, Vec<u8>)>,
    /// Those that the peer's program has not taken, in their order: the first one's number, and all.
    first: u64,
    sent: VecDeque<Sent>,
    /// Whether a message has arrived, by slot.
    arrived: [bool; SLOTS as usize],
    /// All below were given to the program.
    next: u64,
    taken: u64,
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
    /// The bytes of both sides' slots.
    pub(crate) fn memory_len(longest: usize) -> usize {
        2 * SLOTS as usize * slot_len(longest)
    }

    /// The memory has the [length](Self::memory_len) for these messages.
    pub(crate) fn new(memory: RailMemory, longest: usize) -> Self {
        Self {
            memory,
            longest,
            theirs: None,
            waiting: VecDeque::new(),
            first: 0,
            sent: VecDeque::new(),
            arrived: [false; SLOTS as usize],
            next: 0,
            taken: 0,
            told: 0,
        }
    }

    /// The slots for what the peer sends, which is to be told it.
    pub(crate) fn inbox(&self) -> crate::Result<RemoteRailMemory> {
        self.memory.remote().slice(..SLOTS as usize * slot_len(self.longest))
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
            self.memory.write(start, &(bytes.len() as u32).to_le_bytes())?;
            self.memory.write(start + HEADER, &bytes)?;
            self.sent.push_back(Sent {
                id: Some(id),
                len: HEADER + bytes.len(),
                stage: Stage::Waits,
            });
        }
        Ok(())
    }

    fn outbox_slot(&self, number: u64) -> usize {
        (SLOTS + number % SLOTS) as usize * slot_len(self.longest)
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
        Some(Outgoing { number, memory: &self.memory, start, remote, remote_start, len })
    }

    /// What was begun has arrived in the peer's memory, or goes again. Returns the message whose end the program is to
    /// be told.
    pub(crate) fn ended(&mut self, number: u64, has_arrived: bool) -> Option<TransferId> {
        let place = usize::try_from(number.checked_sub(self.first)?).ok()?;
        let sent = self.sent.get_mut(place)?;
        sent.stage = if has_arrived { Stage::Arrived } else { Stage::Waits };
        if has_arrived { sent.id.take() } else { None }
    }

    /// All have failed, as the program is told. Those with a slot may arrive all the same: their numbers are given.
    pub(crate) fn forget_waiting(&mut self) {
        self.waiting.clear();
    }

    /// The peer's program has taken all below. Returns the messages that have ended by that, or `None` if it cannot be.
    pub(crate) fn confirmed(&mut self, below: u64) -> Option<Vec<TransferId>> {
        let count =
            below.checked_sub(self.first).filter(|&count| count <= self.sent.len() as u64)?;
        self.first = below;
        Some(self.sent.drain(..count as usize).filter_map(|sent| sent.id).collect())
    }

    /// A message has arrived: all that can be given to the program now. `None`: it is none of this crate's.
    pub(crate) fn receive(&mut self, immediate: u32) -> Option<Vec<Vec<u8>>> {
        let ahead = (immediate.wrapping_sub(self.next as u32)) & NUMBER;
        let mut messages = Vec::new();
        if u64::from(ahead) >= SLOTS {
            // It came before, by another pair.
            return Some(messages);
        }
        self.arrived[((self.next + u64::from(ahead)) % SLOTS) as usize] = true;
        loop {
            let slot = (self.next % SLOTS) as usize;
            if !std::mem::take(&mut self.arrived[slot]) {
                return Some(messages);
            }
            let start = slot * slot_len(self.longest);
            let mut len = [0; HEADER];
            self.memory.read(start, &mut len).ok()?;
            let len = u32::from_le_bytes(len) as usize;
            let mut bytes = vec![0; Some(len).filter(|&len| len <= self.longest)?];
            self.memory.read(start + HEADER, &mut bytes).ok()?;
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
    u32::from(MESSAGE_SLOT) << 26 | number as u32 & NUMBER
}
