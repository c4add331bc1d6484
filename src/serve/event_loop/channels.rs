//! The channels of a loop: adding, connecting and removing them.

use super::Loop;
use super::detached::step;
use super::ended::{ChannelId, STOPPED};
use super::members::{place, unknown};
use super::post::queue_index;
use super::slots::{NEVER_FREE, SHARED, State};
use crate::base::{Error, Result, StateError, ffi};
use crate::channel::parts::{Core, Limits, Link, Queue, Target};
use crate::channel::{Channel, PreparedChannel, TransportError};
use crate::verbs::queue_pair::QueuePairEndpoint;

impl<'res, B> Loop<'res, B> {
    /// Adds a connected channel that this loop has [created](Self::create_channel). The loop owns it from now on.
    ///
    /// # Errors
    ///
    /// The channel comes back in the [`StateError`].
    ///
    ///  - `EINVAL`: another loop created the channel, or it was stopped; or the loop has not enough
    ///    [room](Self::capacity).
    ///  - `EMFILE`, `ENFILE`: the process, or the machine, has too many files open to watch the channel's peer.
    ///  - `ENOMEM`: out of memory.
    pub fn add(&mut self, channel: Channel<'res>) -> Result<ChannelId, StateError<Channel<'res>>> {
        let is_open = channel.core().table.is_open();
        let watched = self.prepare_watch(channel.link.peer_sign());
        match watched.and_then(|()| self.place_for(&channel.link, is_open)) {
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
        let watched = self.prepare_watch(channel.link.peer_sign());
        match watched.and_then(|()| self.place_for(&channel.link, true)) {
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
        let is_end = self.members.is_end(channel);
        let Some(link) = &mut self.members.links[channel.index()] else {
            return Err(self.without_link(channel, VERB));
        };
        let reason = match is_end {
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
        self.table.cold[channel.index()].has_failed = false;
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

    /// `ibv_modify_qp`: ends all operations of a channel without waiting: the device flushes them, and later posts are
    /// refused. [`next_ended`](Self::next_ended) still returns this number of its operations, those that the device
    /// flushed with [`Stopped`](TransportError::Stopped); with the last, all buffers are back. [`remove`](Self::remove)
    /// does not wait then.
    ///
    /// ```
    /// # use ibverbs::{ChannelId, Loop, PooledBuffer, TransportError};
    /// # fn serve(_: &mut Loop<'_, PooledBuffer>, _: ibverbs::Ended<PooledBuffer>) {}
    /// /// Serves all others meanwhile.
    /// fn end(server: &mut Loop<'_, PooledBuffer>, channel: ChannelId) -> Result<(), TransportError> {
    ///     let mut left = server.stop(channel)?;
    ///     while left > 0 {
    ///         let ended = server.wait_ended()?;
    ///         left -= usize::from(ended.channel == channel);
    ///         serve(server, ended);
    ///     }
    ///     Ok(server.remove(channel)?)
    /// }
    /// ```
    ///
    /// Receives that are [shared](Self::create_sharing_channel) do not count: they end with the queue, or with a message.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the loop has no such channel (any more), it was [taken out](Self::take_out), or the id is of shared
    ///    receives.
    ///  - The provider's errno value. Nothing has ended then, but later posts are refused.
    #[doc(alias = "ibv_modify_qp")]
    pub fn stop(&mut self, channel: ChannelId) -> Result<usize> {
        const VERB: &str = "ibv_modify_qp";
        let Some(entry) = self.table.entry(channel) else { return Err(unknown(VERB)) };
        let slots = entry.slots();
        let Some(link) = &self.members.links[channel.index()] else {
            return Err(self.without_link(channel, VERB));
        };
        self.table.refuse(channel, TransportError::Stopped);
        link.core.modify(ffi::ibv_qp_state::IBV_QPS_ERR)?;
        self.table.flush_unsignaled(channel);
        let slots = &self.table.slots[slots.start as usize..slots.end as usize];
        Ok(slots.iter().filter(|slot| slot.state.is_to_return()).count())
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
        if self.table.entry(channel).is_none() {
            return Err(unknown(VERB));
        }
        self.table.end_sender(channel.index(), TransportError::Closed);
        match self.members.links[channel.index()].take() {
            Some(link) => {
                self.table.flush(channel, &link.core, self.members.capacity);
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
    pub(super) fn move_to_error(&mut self, channel: ChannelId) {
        if let Some(Some(link)) = self.members.links.get(channel.index()) {
            let _ = link.core.modify(ffi::ibv_qp_state::IBV_QPS_ERR);
            self.table.flush_unsignaled(channel);
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
        self.table.cold[id.index()].shares = shares;
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
        self.watch(id, &link);
        self.table.cold[id.index()].core = Some(link.core.clone());
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
            self.table.cold[channel.index()].stopped = Some(error);
            return;
        }
        let cold = &self.table.cold[channel.index()];
        let (has_failed, last) = (cold.has_failed, cold.unsignaled.last);
        let lacks = self.table.covering(channel).is_some();
        let entry = &mut self.table.entries[channel.index()];
        for (queue, opens) in [(Queue::Send, is_connected), (Queue::Receive, !has_failed)] {
            let first = match queue {
                Queue::Send if lacks => last,
                _ => entry.first_of(queue),
            };
            let next = &mut entry.next[queue_index(queue)];
            if opens && *next == NEVER_FREE {
                *next = first;
            }
        }
    }
}
