//! The channels of a loop: adding, connecting and removing them.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use super::Loop;
use super::detached::step;
use super::ended::{ChannelId, STOPPED};
use super::post::queue_index;
use super::slots::{MAX_SLOTS, NEVER_FREE, Outcome, SHARED, Slot, State, no_memory};
use super::table::{Aside, Entry, Table};
use super::waiters::Tasks;
use crate::base::error::{Error, Result, StateError};
use crate::base::ffi;
use crate::channel::Channel;
use crate::channel::PreparedChannel;
#[cfg(doc)]
use crate::channel::TransportError;
pub(crate) use crate::channel::parts::Core;
use crate::channel::parts::DatagramEnd;
use crate::channel::parts::Link;
use crate::channel::parts::{Limits, Queue, Target};
use crate::verbs::queue_pair::{QueuePairEndpoint, SharedReceiveQueue};

pub(super) struct Members<'res> {
    /// Indexed by channel.
    pub(super) links: Vec<Option<Link<'res>>>,
    pub(super) shared: Vec<(ChannelId, Arc<SharedReceiveQueue<'res>>)>,
    pub(super) datagrams: HashMap<ChannelId, DatagramEnd<'res>>,
    /// Completions that the queue holds. `room` are not reserved.
    pub(super) capacity: u32,
    pub(super) room: u32,
    /// Indexes of removed channels. Some of their slots may be in use.
    retired: Vec<u32>,
    free: Vec<u32>,
    /// Free slots, in order. No two ranges touch.
    gaps: Vec<Range<u32>>,
}

impl<'res> Members<'res> {
    pub(super) fn new(capacity: u32) -> Self {
        let (links, shared, datagrams, retired, free, gaps) = Default::default();
        Self { links, shared, datagrams, capacity, room: capacity, retired, free, gaps }
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

impl<'res, B> Loop<'res, B> {
    /// Adds a connected channel that this loop has [created](Self::create_channel). The loop owns it from now on.
    ///
    /// # Errors
    ///
    /// The channel comes back in the [`StateError`].
    ///
    ///  - `EINVAL`: another loop created the channel, or it was stopped; or the loop has not enough
    ///    [room](Self::capacity).
    ///  - `ENOMEM`: out of memory.
    pub fn add(&mut self, channel: Channel<'res>) -> Result<ChannelId, StateError<Channel<'res>>> {
        let is_open = channel.core().table.is_open();
        match self.place_for(&channel.link, is_open) {
            Ok(id) => {
                self.attach_link(id, channel.link);
                self.open(id, true);
                Ok(id)
            }
            Err(error) => Err(StateError::new(channel, error)),
        }
    }

    /// `ibv_modify_qp`: adds a channel that is not connected yet, and takes it to INIT. Post its receives before
    /// [`handshake`](Self::handshake) connects it: then even the peer's first message finds one.
    ///
    /// # Errors
    ///
    /// Those of [`add`](Self::add), and
    ///
    ///  - `EOPNOTSUPP`: on iWARP only the connection manager connects.
    ///  - The provider's errno value.
    #[doc(alias = "ibv_modify_qp")]
    pub fn add_prepared(
        &mut self,
        mut channel: PreparedChannel<'res>,
    ) -> Result<ChannelId, StateError<PreparedChannel<'res>>> {
        if let Err(error) = channel.link.open_receives() {
            return Err(StateError::new(channel, error));
        }
        match self.place_for(&channel.link, true) {
            Ok(id) => {
                self.attach_link(id, channel.link);
                self.open(id, false);
                Ok(id)
            }
            Err(error) => Err(StateError::new(channel, error)),
        }
    }

    /// `ibv_modify_qp`: connects a channel to the peer's, as [`PreparedChannel::handshake`] does. Then everything can
    /// be posted.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the loop has no such channel (any more), it is connected already, it is [taken
    ///    out](Self::take_out), or the id is of shared receives.
    ///  - Those of [`PreparedQueuePair::handshake`](crate::PreparedQueuePair::handshake). What was posted ends with
    ///    [`Stopped`](TransportError::Stopped), and the handshake can be tried again.
    #[doc(alias = "ibv_modify_qp")]
    pub fn handshake(&mut self, channel: ChannelId, remote: QueuePairEndpoint) -> Result<()> {
        const VERB: &str = "ibv_modify_qp";
        if self.table.entry(channel).is_none() {
            return Err(unknown(VERB));
        }
        let Some(link) = &mut self.members.links[channel.index()] else {
            return Err(self.without_link(channel, VERB));
        };
        let reason = match self.members.datagrams.contains_key(&channel) {
            true => "a datagram end has no peer: send_to names one",
            false => "the channel is connected",
        };
        Error::invalid_if(link.core.table.is_open(), VERB, reason)?;
        let (connected, has_ended) = step(link, |link| link.connect(&remote));
        if has_ended {
            self.end_attempt(channel);
        }
        if connected.is_ok() {
            self.open(channel, true);
        }
        connected
    }

    /// Ends operations that a failed attempt to connect has ended on the device.
    pub(super) fn end_attempt(&mut self, channel: ChannelId) {
        self.table.asides[channel.index()].has_failed = false;
        let entry = &mut self.table.entries[channel.index()];
        entry.next = [NEVER_FREE; 2];
        let slots = entry.slots();
        self.table.end_without_completions(slots, STOPPED);
    }

    /// The address of a channel, which its peer needs. `None`: the loop has no such channel (any more).
    pub fn endpoint(&self, channel: ChannelId) -> Option<QueuePairEndpoint> {
        self.table.entry(channel)?;
        self.members.links[channel.index()].as_ref().map(Link::endpoint)
    }

    /// The number of the channel's operations that the device still has.
    pub fn in_flight(&self, channel: ChannelId) -> usize {
        self.table.entry(channel).map_or(0, |entry| self.table.in_flight(entry.slots()))
    }

    /// `ibv_modify_qp`, `ibv_destroy_qp`: ends all operations of a channel and destroys it.
    /// [`next_ended`](Self::next_ended) still returns these operations, with their completions or with
    /// [`Closed`](TransportError::Closed).
    ///
    /// While operations are in flight, it polls until the device has flushed them, at most for the channel's
    /// [`settle_timeout`](crate::ChannelBuilder::settle_timeout).
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the loop has no such channel (any more), or it was [taken out](Self::take_out).
    ///  - `EBUSY`: these are [shared receives](Self::add_shared_receives) that a channel or a builder uses.
    ///  - The provider's errno value. The channel is then
    ///    [leaked](crate::_guide::verbs#when-a-resource-cannot-be-destroyed), with everything that it was made from and
    ///    the buffers of its operations in flight. Those never end, and the room is not given back.
    #[doc(alias = "ibv_destroy_qp")]
    pub fn remove(&mut self, channel: ChannelId) -> Result<()> {
        const VERB: &str = "ibv_destroy_qp";
        let Some(entry) = self.table.entry(channel) else { return Err(unknown(VERB)) };
        let slots = entry.slots();
        match self.members.links[channel.index()].take() {
            Some(link) => {
                self.table.flush(&link.core, slots, self.members.capacity);
                self.end(channel.index(), link)
            }
            None if self.members.shared_receives(channel).is_some() => self.remove_shared(channel),
            None => Err(self.without_link(channel, VERB)),
        }
    }

    #[cold]
    pub(super) fn without_link(&self, channel: ChannelId, verb: &'static str) -> Error {
        let reason = match self.members.shared_receives(channel) {
            Some(_) => {
                "these are shared receives, which are not connected: connect the channels that share them"
            }
            None => {
                "the channel was taken out of the loop: put it back, or destroy it and call Loop::end_destroyed. If what \
                 Loop::take_out returned was dropped, the channel is gone"
            }
        };
        Error::invalid(verb, reason)
    }

    /// Takes the queue pair to ERR. If that fails, [removal](Self::remove) ends its operations.
    #[cold]
    pub(super) fn to_error(&self, channel: ChannelId) {
        if let Some(Some(link)) = self.members.links.get(channel.index()) {
            let _ = link.core.modify(ffi::ibv_qp_state::IBV_QPS_ERR);
        }
    }

    /// Makes a place, where nothing can be posted before [`open`](Self::open).
    pub(super) fn place_for(&mut self, link: &Link<'res>, is_open: bool) -> Result<ChannelId> {
        const VERB: &str = "Loop::add";
        let core = &link.core;
        // SAFETY: the link holds the queue pair, which keeps its completion queue.
        let queue = unsafe { (*core.queue_pair).send_cq };
        let reason = "the channel was not created by this loop: build it with create_channel of the same loop";
        Error::invalid_if(!core.settings.of_loop || queue != self.table.queue, VERB, reason)?;
        Error::invalid_if(core.destroyed.get() || !is_open, VERB, "the channel was stopped")?;
        let shares = self.members.shared.iter().any(|(_, queue)| queue.as_raw() == core.srq());
        self.table.numbers.reserve()?;
        let [sends, receives] = link.depths();
        let depths = [sends, receives, u32::from(core.credits.is_some())];
        let id = self.take_place(depths, core.target.get(), core.settings.limits)?;
        self.table.asides[id.index()].shares = shares;
        self.assign(id, core);
        Ok(id)
    }

    /// Assigns the place to the channel's first queue pair, or another one after a reset.
    pub(super) fn assign(&mut self, id: ChannelId, core: &Core) {
        let (table, index) = (&mut self.table, id.index());
        let entry = &mut table.entries[index];
        entry.target = core.target.get();
        entry.limits = core.settings.limits;
        let (slots, credit_slot) = (entry.slots(), entry.credit_slot());
        for slot in &mut table.slots[slots.start as usize..slots.end as usize] {
            slot.queue_pair = core.number;
        }
        if let Some(slot) = credit_slot {
            let slot = &mut table.slots[slot as usize];
            slot.state = State::Credits;
            core.set_credit_number(slot.number);
        }
        table.numbers.insert(core.number, index);
    }

    pub(super) fn attach_link(&mut self, id: ChannelId, link: Link<'res>) {
        self.table.asides[id.index()].core = Some(link.core.clone());
        self.members.links[id.index()] = Some(link);
    }

    pub(super) fn take_place(
        &mut self,
        depths: [u32; 3],
        target: Target,
        limits: Limits,
    ) -> Result<ChannelId> {
        let Self { table, members, .. } = self;
        let depth = depths.iter().fold(0, |sum: u32, &depth| sum.saturating_add(depth));
        if depth > members.room {
            let what = "the sum of max_send_wr and max_recv_wr of the loop's channels, of its shared receives, and one \
                        for flow control, for which the loop or reactor was made with too few `entries`: it";
            return Err(Error::out_of_range(
                "ibv_create_qp",
                what,
                depth.into(),
                0,
                members.room.into(),
            ));
        }
        let index = place(table, members, target, limits, depths)?;
        let entry = &mut table.entries[index];
        let id = ChannelId { index: index as u32, generation: entry.generation };
        for slot in entry.slots() {
            let slot = &mut table.slots[slot as usize];
            slot.channel = id;
            slot.number &= !SHARED;
        }
        members.room -= depth;
        Ok(id)
    }

    /// Allows receives, and if it is connected, sends, unless the channel was stopped.
    pub(super) fn open(&mut self, channel: ChannelId, is_connected: bool) {
        if let Some(error) = self.table.why_stopped(channel) {
            self.table.asides[channel.index()].stopped = Some(error);
            return;
        }
        let has_failed = self.table.asides[channel.index()].has_failed;
        let entry = &mut self.table.entries[channel.index()];
        for (queue, opens) in [(Queue::Send, is_connected), (Queue::Receive, !has_failed)] {
            let first = entry.first_of(queue);
            let next = &mut entry.next[queue_index(queue)];
            if opens && *next == NEVER_FREE {
                *next = first;
            }
        }
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
        table.entries.try_reserve(1)?;
        table.asides.try_reserve(1)?;
        members.links.try_reserve(1)?;
        if depths[2] > 0 {
            table.lacking.reserve(all)?;
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
        table.outcomes.push(Outcome::new());
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
        table.asides.push(Aside::default());
        members.links.push(None);
        return Ok(all - 1);
    };
    table.asides[index as usize] = Aside::default();
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
