//! The places of a loop, and the channels that have them.

use std::ops::Range;
use std::sync::Arc;

use super::ended::ChannelId;
use super::slots::{MAX_SLOTS, NEVER_FREE, Outcome, Slot, State, no_memory};
use super::table::{ColdState, Entry, Table};
use super::waiters::Tasks;
use crate::base::{Error, Result};
use crate::channel::parts::{DatagramEnd, Limits, Link, Target};
use crate::verbs::queue_pair::SharedReceiveQueue;

pub(super) struct Members<'res> {
    /// Indexed by channel.
    pub(super) links: Vec<Option<Link<'res>>>,
    pub(super) shared: Vec<(ChannelId, Arc<SharedReceiveQueue<'res>>)>,
    /// Indexed by channel. There are none beyond the last one.
    pub(super) datagrams: Vec<Option<Box<DatagramEnd<'res>>>>,
    /// Completions that the queue holds. `room` are not reserved.
    pub(super) capacity: u32,
    pub(super) room: u32,
    /// Since peers were looked at.
    pub(super) empty_polls: u32,
    /// Channels whose peers are gone, and that had nothing in flight.
    pub(super) gone: Vec<ChannelId>,
    /// Indexes of removed channels. Some of their slots may be in use.
    retired: Vec<u32>,
    free: Vec<u32>,
    /// Free slots, in order. No two ranges touch.
    gaps: Vec<Range<u32>>,
}

impl<'res> Members<'res> {
    pub(super) fn new(capacity: u32) -> Self {
        let (links, shared, datagrams, retired, free, gaps) = Default::default();
        let (room, empty_polls, gone) = (capacity, 0, Vec::new());
        Self { links, shared, datagrams, capacity, room, empty_polls, gone, retired, free, gaps }
    }

    /// # Errors
    ///
    ///  - `ENOMEM`
    pub(super) fn reserve_end(&mut self) -> Result<()> {
        let most = self.links.len() + 1;
        let more = most.saturating_sub(self.datagrams.len());
        self.datagrams.try_reserve(more).map_err(|_| no_memory())
    }

    /// [`reserve_end`](Self::reserve_end) has reserved memory.
    pub(super) fn add_end(&mut self, index: usize, end: Box<DatagramEnd<'res>>) {
        let len = self.datagrams.len().max(index + 1);
        self.datagrams.resize_with(len, || None);
        self.datagrams[index] = Some(end);
    }

    pub(super) fn is_end(&self, channel: ChannelId) -> bool {
        self.datagrams.get(channel.index()).is_some_and(Option::is_some)
    }

    pub(super) fn shared_receives(
        &self,
        receives: ChannelId,
    ) -> Option<&Arc<SharedReceiveQueue<'res>>> {
        self.shared.iter().find(|shared| shared.0 == receives).map(|(_, queue)| queue)
    }

    pub(super) fn give_back(&mut self, index: usize, depth: u32) {
        self.room += depth;
        // `place` has reserved memory.
        self.retired.push(index as u32);
    }
}

impl Members<'_> {
    /// Frees removed channels' places whose slots are all free.
    fn take_back<B>(&mut self, table: &Table<B>) {
        let Self { retired, free, gaps, .. } = self;
        retired.retain(|&index| {
            let slots = table.entries[index as usize].slots();
            let of_it = &table.slots[slots.start as usize..slots.end as usize];
            let is_free = of_it.iter().all(|slot| slot.state == State::Free);
            if is_free {
                free.push(index);
                add_gap(gaps, slots);
            }
            !is_free
        });
    }

    /// Finds free slots in a gap, or at the table's end, where the last gap may begin before `end`.
    fn find_slots(&self, depth: u32, end: u32) -> u32 {
        let is_enough = |gap: &&Range<u32>| gap.len() as u32 >= depth;
        let last = self.gaps.last().filter(|last| last.end == end);
        self.gaps.iter().find(is_enough).or(last).map_or(end, |gap| gap.start)
    }
}

/// Allocates nothing: [`place`] has reserved memory.
fn add_gap(gaps: &mut Vec<Range<u32>>, mut slots: Range<u32>) {
    if slots.start == slots.end {
        return;
    }
    let at = gaps.partition_point(|gap| gap.end < slots.start);
    if let Some(before) = gaps.get(at).filter(|gap| gap.end == slots.start) {
        slots.start = before.start;
        gaps.remove(at);
    }
    if let Some(behind) = gaps.get(at).filter(|gap| gap.start == slots.end) {
        slots.end = behind.end;
        gaps.remove(at);
    }
    gaps.insert(at, slots);
}

/// Makes a place, which may reuse slots of removed channels of any depth.
pub(super) fn place<B>(
    table: &mut Table<B>,
    members: &mut Members<'_>,
    target: Target,
    limits: Limits,
    depths: [u32; 3],
) -> Result<usize> {
    members.take_back(table);
    let (depth, all) = (depths.iter().sum::<u32>(), table.entries.len() + 1);
    let end = table.slots.len() as u32;
    let first = if depth == 0 { NEVER_FREE } else { members.find_slots(depth, end) };
    let new = (first + depth).saturating_sub(end) as usize;
    let reserved = (|| {
        table.slots.try_reserve(new)?;
        table.outcomes.try_reserve(new)?;
        table.came_on.try_reserve(new)?;
        table.entries.try_reserve(1)?;
        table.cold.try_reserve(1)?;
        members.links.try_reserve(1)?;
        if depths[2] > 0 {
            table.credit_waiters.reserve(all)?;
        }
        // Then removing a channel allocates nothing.
        members.retired.try_reserve(all - members.retired.len())?;
        members.free.try_reserve(all - members.free.len())?;
        members.gaps.try_reserve(all + 1 - members.gaps.len())
    })();
    if reserved.is_err() || end as usize + new > MAX_SLOTS {
        return Err(no_memory());
    }
    if let Some(at) = members.gaps.iter().position(|gap| gap.start == first) {
        let gap = &mut members.gaps[at];
        gap.start = gap.end.min(first + depth);
        if gap.start == gap.end {
            members.gaps.remove(at);
        }
    }
    for index in end..end + new as u32 {
        table.slots.push(Slot::new(index, State::Free));
        table.outcomes.push(Outcome::default());
        table.came_on.push(None);
    }
    let [sends, receives, own] = depths;
    for (from, depth) in
        [(first, sends), (first + sends, receives), (first + sends + receives, own)]
    {
        for index in from..from + depth {
            let slot = &mut table.slots[index as usize];
            slot.next = if index + 1 == from + depth { from } else { index + 1 };
            // An earlier channel's receive may have left an address here.
            slot.kept = None;
        }
    }
    let (next, tasks) = ([NEVER_FREE; 2], Tasks::default());
    let generation = table.first_generation;
    let entry = Entry { target, generation, next, limits, first_slot: first, depths, tasks };
    let Some(index) = members.free.pop() else {
        table.entries.push(entry);
        table.cold.push(ColdState::default());
        members.links.push(None);
        return Ok(all - 1);
    };
    table.cold[index as usize] = ColdState::default();
    let place = &mut table.entries[index as usize];
    *place = Entry { generation: place.generation, ..entry };
    Ok(index as usize)
}

#[cold]
pub(super) fn unknown(verb: &'static str) -> Error {
    Error::invalid(verb, "the loop has no such channel (any more)")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn orders(of: &[Range<u32>]) -> Vec<Vec<Range<u32>>> {
        if of.is_empty() {
            return vec![Vec::new()];
        }
        let mut all = Vec::new();
        for at in 0..of.len() {
            let mut rest = of.to_vec();
            let first = rest.remove(at);
            all.extend(orders(&rest).into_iter().map(|rest| [vec![first.clone()], rest].concat()));
        }
        all
    }

    #[test]
    #[cfg_attr(miri, ignore = "numbers alone; it takes minutes")]
    fn gaps_are_in_order_and_merged_whichever_comes_first() {
        for order in orders(&[0..1, 1..3, 4..5, 5..9, 9..10, 12..13]) {
            let (mut gaps, mut is_free) = (Vec::new(), [false; 14]);
            for slots in order {
                is_free[slots.start as usize..slots.end as usize].fill(true);
                add_gap(&mut gaps, slots);
                let mut expected: Vec<Range<u32>> = Vec::new();
                for at in (0..14).filter(|&at| is_free[at as usize]) {
                    match expected.last_mut().filter(|gap| gap.end == at) {
                        Some(gap) => gap.end += 1,
                        None => expected.push(at..at + 1),
                    }
                }
                assert_eq!(gaps, expected);
            }
        }
    }
}
