//! Peers that are gone: how a loop notices, and what ends then.
//!
//! Each channel may have a sign of its peer (`PeerSign`): the stream over which it was connected, or the connection
//! manager's. All signs of a loop are in one epoll instance of its completion queue: a thread that sleeps for the loop
//! wakes for it too. Threads look at it after an empty poll, before they sleep; a thread that only polls looks now and
//! then. By then the completion queue has all that the peer sent before it left, which is handed out first.

use super::Loop;
use super::ended::ChannelId;
use super::members::Members;
use super::post::queue_index;
use super::slots::{NEVER_FREE, no_memory};
use super::table::Table;
use crate::base::{Result, ffi};
use crate::channel::TransportError;
use crate::channel::parts::{Link, PeerSign, Queue};
use crate::verbs::completion::CompletionQueue;
use crate::verbs::device::event_file;

/// Empty polls between two looks of a poller that never sleeps.
const POLLS_PER_LOOK: u32 = 1 << 14;

/// Names no channel.
const NOBODY: u64 = u64::MAX;

impl<B> Loop<'_, B> {
    /// A channel whose peer is gone, and that had no operation in flight to say so: its process has ended, its host does
    /// not answer, or it has dropped its channel. [`remove`](Self::remove) it. Each channel is returned once.
    ///
    /// Of a channel with operations in flight, these end with [`PeerGone`](TransportError::PeerGone) instead. The loop
    /// notices by the TCP stream over which the channel was connected, or by the connection manager (but on iWARP, whose
    /// queue pairs notice themselves). Call this after [`next_ended`](Self::next_ended) has returned `None`.
    pub fn next_gone(&mut self) -> Option<ChannelId> {
        self.members.gone.pop()
    }

    pub(super) fn has_gone(&self) -> bool {
        !self.members.gone.is_empty()
    }

    /// Ends channels whose peers are gone. `is_due`: nobody may have slept for long. Returns whether there were any.
    pub(crate) fn look_at_peers(&mut self, is_due: bool) -> bool {
        let Self { table, members, queue, .. } = self;
        members.look_at_peers(table, queue, is_due)
    }

    /// Watches the file before its channel is in the loop, so that nothing can fail then.
    ///
    /// # Errors
    ///
    /// Those of `WaitChannel::peers` and `PeerSign::watch`.
    pub(crate) fn prepare_watch(&mut self, sign: Option<&dyn PeerSign>) -> Result<()> {
        let Some(sign) = sign else { return Ok(()) };
        // Each channel is in it once, at most.
        let room = self.table.entries.len() + 1 - self.members.gone.len();
        self.members.gone.try_reserve(room).map_err(|_| no_memory())?;
        let channel = self.queue.own_channel()?;
        sign.watch(channel.peers()?, NOBODY)?;
        channel.begin_to_watch();
        self.table.has_idle_work = true;
        Ok(())
    }

    pub(super) fn watch(&mut self, channel: ChannelId, link: &Link<'_>) {
        let Some(sign) = link.peer_sign() else { return };
        let number = u64::from(channel.generation) << 32 | u64::from(channel.index);
        if !self.table.cold[channel.index()].peer_gone
            && let Ok(files) = self.queue.own_channel().and_then(|channel| channel.peers())
        {
            // The file is there already, and the change needs no memory.
            let _ = sign.watch(files, number);
        }
    }
}

impl Members<'_> {
    #[cold]
    #[inline(never)]
    pub(super) fn look_after_empty_poll<B>(
        &mut self,
        table: &mut Table<B>,
        queue: &CompletionQueue<'_>,
    ) -> bool {
        self.empty_polls = self.empty_polls.wrapping_add(1);
        let is_due = self.empty_polls.is_multiple_of(POLLS_PER_LOOK);
        self.look_at_peers(table, queue, is_due)
    }

    fn look_at_peers<B>(
        &mut self,
        table: &mut Table<B>,
        queue: &CompletionQueue<'_>,
        is_due: bool,
    ) -> bool {
        let files = queue.own_channel().ok().and_then(|channel| channel.take_look(is_due));
        let mut any = false;
        if let Some(files) = files {
            event_file::watched(files, |number| any |= self.peer_may_be_gone(table, number));
        }
        any
    }

    fn peer_may_be_gone<B>(&mut self, table: &mut Table<B>, number: u64) -> bool {
        let channel = ChannelId { index: number as u32, generation: (number >> 32) as u32 };
        if table.entry(channel).is_none() {
            return false;
        }
        // One that is out of the loop is watched anew when it comes back.
        let Some(link) = &self.links[channel.index()] else { return false };
        if !link.peer_sign().is_some_and(PeerSign::is_gone) {
            return false;
        }
        if table.end_of_peer(channel) && !table.is_of_tasks {
            self.gone.push(channel);
        }
        true
    }
}

impl<B> Table<B> {
    /// The device ends what is in flight. Returns whether nothing is.
    fn end_of_peer(&mut self, channel: ChannelId) -> bool {
        let index = channel.index();
        let cold = &mut self.cold[index];
        if std::mem::replace(&mut cold.peer_gone, true) || cold.stopped.is_some() {
            return false;
        }
        cold.has_failed = true;
        let entry = &mut self.entries[index];
        if entry.first_of(Queue::Receive) != NEVER_FREE {
            // A post of a receive then finds the queue full and looks for the reason.
            entry.next[queue_index(Queue::Receive)] = NEVER_FREE;
        }
        let slots = entry.slots();
        let is_idle = self.in_flight(slots) == 0;
        self.flush_later(channel);
        if is_idle && self.is_of_tasks {
            self.refuse(channel, TransportError::PeerGone);
        }
        is_idle
    }

    /// Takes the queue pair to ERR; that of tasks, once the loop is not borrowed.
    pub(super) fn flush_later(&mut self, channel: ChannelId) {
        if self.is_of_tasks {
            self.cold[channel.index()].must_flush = true;
            if self.deferred.fail(channel, None) {
                return;
            }
        }
        if let Some(core) = self.core(channel) {
            // Only the owner of the loop uses the core. If this fails, removal ends its operations.
            let _ = core.modify(ffi::ibv_qp_state::IBV_QPS_ERR);
            self.flush_unsignaled(channel);
        }
    }

    /// Tasks that wait though nothing is in flight any more end.
    #[cold]
    pub(super) fn end_waits(&mut self, channel: ChannelId) {
        let index = channel.index();
        let cold = &self.cold[index];
        let is_waited = !self.entries[index].tasks.lines[queue_index(Queue::Receive)].is_empty();
        if cold.has_failed && (is_waited || cold.peer_gone) && self.is_idle(channel) {
            if self.cold[index].peer_gone {
                self.refuse(channel, TransportError::PeerGone);
            } else {
                self.wake_all(index, Queue::Receive);
            }
        }
    }

    fn is_idle(&self, channel: ChannelId) -> bool {
        self.in_flight(self.entries[channel.index()].slots()) == 0
    }

    /// Why no message will come.
    pub(super) fn why_ended(&self, channel: ChannelId) -> Option<TransportError> {
        let (cold, entry) = (&self.cold[channel.index()], &self.entries[channel.index()]);
        self.why_stopped(channel).or_else(|| match cold.has_failed {
            true => self.is_idle(channel).then(super::ended::flushed),
            false if cold.shares || entry.first_of(Queue::Receive) != NEVER_FREE => None,
            // It was built without a place for a receive.
            false => Some(TransportError::QueueFull),
        })
    }
}
