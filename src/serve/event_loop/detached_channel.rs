//! Channels out of their loop, for slow verbs of the program.

use std::net::TcpStream;
use std::sync::Arc;

use super::Loop;
use super::detached::{Destroyed, Detached, PendingDestroy, step};
use super::ended::ChannelId;
use super::members::unknown;
use super::slots::NEVER_FREE;
#[cfg(feature = "rdmacm")]
use crate::base::QueuePairType;
use crate::base::{Error, Result, StateError, debug, ffi};
use crate::channel::{PreparedChannel, TransportError};
use crate::connect::handshake::Handshake;
use crate::connect::tcp::connect_over_methods;
use crate::verbs::completion::CompletionQueue;
use crate::verbs::queue_pair::QueuePairEndpoint;

/// A channel [taken out](Loop::take_out) of its loop, to connect or destroy it while the loop does other things.
///
/// Dropping it destroys the queue pair. The loop then loses the channel's room, and the buffers that the device had.
#[must_use]
pub struct DetachedChannel<'res> {
    pub(crate) detached: Detached<'res>,
    queue: Arc<CompletionQueue<'res>>,
    /// The queue pair's when the channel was taken out, by which the loop finds it.
    number: u32,
    /// The device had operations then.
    is_in_flight: bool,
    /// An attempt to connect has ended the posted receives.
    has_ended: bool,
}

/// A channel whose queue pair was [destroyed](DetachedChannel::destroy) outside of its loop. Pass it to
/// [`Loop::end_destroyed`].
#[must_use]
pub struct DestroyedChannel<'res> {
    id: ChannelId,
    queue: Arc<CompletionQueue<'res>>,
    destroyed: Destroyed,
}

impl<'res> DetachedChannel<'res> {
    /// The channel's id, which it keeps when it is [put back](Loop::put_back).
    pub fn id(&self) -> ChannelId {
        self.detached.id
    }

    /// The channel's address, which its peer needs.
    pub fn endpoint(&self) -> QueuePairEndpoint {
        self.detached.channel.endpoint()
    }

    /// `ibv_modify_qp`: connects the channel to the peer's, as [`Loop::handshake`] does.
    ///
    /// # Errors
    ///
    /// Those of [`PreparedQueuePair::handshake`](crate::PreparedQueuePair::handshake). The channel comes back in the
    /// [`StateError`], for another attempt. What was posted ends when the channel is [put back](Loop::put_back).
    #[doc(alias = "ibv_modify_qp")]
    pub fn handshake(mut self, remote: QueuePairEndpoint) -> Result<Self, StateError<Self>> {
        let reason = "the channel is connected";
        let connected = Error::invalid_if(
            self.detached.channel.link.core.table.is_open(),
            "ibv_modify_qp",
            reason,
        )
        .and_then(|()| {
            let link = &mut self.detached.channel.link;
            let (connected, has_ended) = step(link, |link| link.connect(&remote));
            self.has_ended |= has_ended;
            connected
        });
        match connected {
            Ok(()) => Ok(self),
            Err(error) => Err(StateError::new(self, error)),
        }
    }

    pub(crate) fn take_back(mut self) -> Self {
        // The next attempt to connect tries it again.
        self.has_ended |= self.detached.reset();
        self
    }

    /// `ibv_modify_qp`: takes the queue pair to ERR, where the device ends all that is in flight. Then poll the loop
    /// until [`Loop::in_flight`] is 0, before you destroy the channel: a provider may drop completions of a destroyed
    /// queue pair.
    ///
    /// # Errors
    ///
    /// The provider's errno value.
    #[doc(alias = "ibv_modify_qp")]
    pub fn stop(&self) -> Result<()> {
        self.detached.channel.link.core.modify(ffi::ibv_qp_state::IBV_QPS_ERR)
    }

    /// `ibv_destroy_qp`: destroys the queue pair. [`Loop::end_destroyed`] returns its error.
    #[doc(alias = "ibv_destroy_qp")]
    pub fn destroy(self) -> DestroyedChannel<'res> {
        let Self { detached: Detached { id, channel }, queue, number, is_in_flight, .. } = self;
        let pending = PendingDestroy {
            index: id.index(),
            link: channel.link,
            is_in_flight,
            shares: false,
            datagrams: None,
        };
        let mut destroyed = pending.destroy();
        destroyed.number = number;
        DestroyedChannel { id, queue, destroyed }
    }

    #[cfg(feature = "rdmacm")]
    pub(crate) fn open_receives_of_init(&mut self) {
        let (_, has_ended) = step(&mut self.detached.channel.link, |link| {
            link.open_receives_of_init();
            Ok(())
        });
        self.has_ended |= has_ended;
    }

    /// Gives the channel the stream over which it was connected, so that the loop notices that the peer is gone: see
    /// [`Channel::keep_stream`](crate::Channel::keep_stream).
    pub fn keep_stream(&mut self, stream: TcpStream) {
        self.detached.channel.link.keep_stream(stream);
    }

    // Connecting over a stream: the channel is put back afterwards.
    connect_over_methods!(DetachedChannel<'res>);
}

debug! { DetachedChannel<'_>, self, id: self.id(), .. }
debug! { DestroyedChannel<'_>, self, id: self.id, .. }

#[cold]
fn of_another_loop(verb: &'static str) -> Error {
    Error::invalid(verb, "the channel was taken out of another loop: give it back to that one")
}

impl<'res, B> Loop<'res, B> {
    /// Takes a channel out, to connect or destroy it while the loop does other things, even on another thread. Until it
    /// is [put back](Self::put_back), nothing can be posted to it. What was posted goes on, and
    /// [`next_ended`](Self::next_ended) returns it.
    ///
    /// ```no_run
    /// # // not on Soft-RoCE alone: needs a peer
    /// use std::sync::Mutex;
    /// use ibverbs::{ChannelId, Loop, PooledBuffer, QueuePairEndpoint};
    ///
    /// fn connect(server: &Mutex<Loop<'_, PooledBuffer>>, channel: ChannelId, peer: QueuePairEndpoint) -> ibverbs::Result<()> {
    ///     let detached = server.lock().unwrap().take_out(channel)?;
    ///     // The kernel may look up the peer's MAC address meanwhile.
    ///     let (detached, connected) = match detached.handshake(peer) {
    ///         Ok(detached) => (detached, Ok(())),
    ///         Err(failed) => (failed.object, Err(failed.error)),
    ///     };
    ///     server.lock().unwrap().put_back(detached)?;
    ///     connected
    /// }
    /// ```
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the loop has no such channel (any more), it is out already, or the id is of shared receives or of a
    ///    datagram end, which has no peer to connect to.
    ///
    /// If the last sends have [no completion](Self::post_unsignaled), this writes 0 bytes to the peer, as
    /// [`keep_alive`](Self::keep_alive) does, so that they come back. The peer must allow
    /// [`REMOTE_WRITE`](crate::AccessFlags::REMOTE_WRITE) then.
    ///
    /// A [`LoopSender`](super::LoopSender) of the channel posts nothing any more: ask for another when it is back.
    pub fn take_out(&mut self, channel: ChannelId) -> Result<DetachedChannel<'res>> {
        const VERB: &str = "ibv_modify_qp";
        let Some(entry) = self.table.entry(channel) else { return Err(unknown(VERB)) };
        let (slots, credit_slot) = (entry.slots(), entry.credit_slot());
        let reason = "a datagram end is not taken out: there is no peer to connect it to";
        Error::invalid_if(self.datagram_end(channel).is_some(), VERB, reason)?;
        let Some(link) = self.members.links[channel.index()].take() else {
            return Err(self.without_link(channel, VERB));
        };
        self.table.end_sender(channel.index(), TransportError::NotConnected);
        // Nothing could be posted behind them.
        self.table.flush_unsignaled(channel);
        self.table.entries[channel.index()].next = [NEVER_FREE; 2];
        // The verbs will change the core.
        let core = self.table.cold[channel.index()].core.take();
        if let (Some(slot), Some(number)) =
            (credit_slot, core.and_then(|core| core.credit_number()))
        {
            self.table.slots[slot as usize].number = number;
        }
        Ok(DetachedChannel {
            number: link.core.number,
            is_in_flight: self.table.in_flight(slots) > 0,
            has_ended: false,
            queue: self.queue().clone(),
            detached: Detached { id: channel, channel: PreparedChannel { link } },
        })
    }

    /// Puts back a channel that was [taken out](Self::take_out). If an attempt to connect has failed, what was posted
    /// before ends with [`Stopped`](crate::TransportError::Stopped).
    ///
    /// # Errors
    ///
    /// The channel comes back in the [`StateError`].
    ///
    ///  - `EINVAL`: it is of another loop.
    ///  - `EMFILE`, `ENFILE`, `ENOMEM`: too many files are open, or there is no memory, to watch the channel's peer.
    pub fn put_back(
        &mut self,
        detached: DetachedChannel<'res>,
    ) -> Result<ChannelId, StateError<DetachedChannel<'res>>> {
        if !Arc::ptr_eq(&detached.queue, self.queue()) {
            return Err(StateError::new(detached, of_another_loop("ibv_modify_qp")));
        }
        if let Err(error) = self.prepare_watch(detached.detached.channel.link.peer_sign()) {
            return Err(StateError::new(detached, error));
        }
        let DetachedChannel { detached: Detached { id, channel }, number, has_ended, .. } =
            detached;
        let link = channel.link;
        if has_ended {
            self.end_attempt(id);
            self.replace(id, number, &link.core);
        }
        let (is_connected, is_receiving) = (link.core.table.is_open(), link.is_receiving());
        self.attach_link(id, link);
        if is_connected || is_receiving {
            self.open(id, is_connected);
        }
        Ok(id)
    }

    /// Ends the operations of a channel that was [taken out](Self::take_out) and destroyed, as [`remove`](Self::remove)
    /// does. Its id no longer names a channel.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: it is of another loop, which ends its operations only when that loop is dropped.
    ///  - The provider's errno value: the queue pair could not be destroyed, see [`remove`](Self::remove).
    pub fn end_destroyed(&mut self, destroyed: DestroyedChannel<'res>) -> Result<()> {
        let DestroyedChannel { id, queue, destroyed } = destroyed;
        if !Arc::ptr_eq(&queue, self.queue()) {
            return Err(of_another_loop("ibv_destroy_qp"));
        }
        self.retire(id.index());
        self.finish_destroy(destroyed)
    }
}

impl Handshake for DetachedChannel<'_> {
    type Connected = Self;
    type Shaken = Self;

    fn endpoint(&self) -> QueuePairEndpoint {
        self.endpoint()
    }

    fn handshake(self, remote: QueuePairEndpoint) -> Result<Self, StateError<Self>> {
        self.handshake(remote)
    }

    fn take_back(shaken: Self) -> Self {
        shaken.take_back()
    }

    fn set_peer_keeps(shaken: &mut Self, keeps: bool) {
        shaken.detached.channel.link.peer_keeps = keeps;
    }

    fn finish(shaken: Self) -> Self {
        shaken
    }

    #[cfg(feature = "rdmacm")]
    fn place(&self) -> (*mut ffi::ibv_context, QueuePairType) {
        self.detached.channel.link.queue_pair().place()
    }

    #[cfg(feature = "rdmacm")]
    fn into_connected(mut self) -> Self {
        self.open_receives_of_init();
        self
    }
}
