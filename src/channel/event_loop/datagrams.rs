//! Datagram ends of a loop: members without a peer, whose sends name one.

use std::net::IpAddr;
use std::sync::Arc;
#[cfg(feature = "async")]
use std::task::Waker;

use super::Loop;
use super::ended::{ChannelId, LoopBuffer};
use super::slots::{State, index_of, no_memory};
use crate::channel::Channel;
use crate::channel::datagrams::{DatagramEnd, DatagramPort, DatagramsBuilder, Directed};
use crate::channel::error::{OperationError, Refused, TransportError};
use crate::channel::owned_buffer::OwnedBuffer;
use crate::channel::posting::{IntoSend, KeptSend, WorkRequest};
use crate::completion::WorkSuccess;
use crate::error::{Error, Result};
use crate::operation::DatagramDestination;
use crate::queue_pair::{AddressHandle, AddressVector, GlobalRouteHeader, QueuePairEndpoint};
use crate::state_error::StateError;

impl<'res, B> Loop<'res, B> {
    /// `ibv_create_qp`, `ibv_modify_qp`: adds a datagram end, which takes as much [room](Self::capacity) as a channel with the
    /// same depths. It has an id as channels have, and is [removed](Self::remove) as they are.
    ///
    /// Receives are [posted](Self::post) as on a channel. Each needs room for 40 bytes more than its message: see
    /// [`DatagramBuffer`](crate::pool::DatagramBuffer). Sends are posted by [`send_to`](Self::send_to). A datagram for which
    /// there is no receive, or that carries another Q_Key, is lost without a word, and so may any be. After a send or a
    /// receive that has failed, remove the end, and add another one.
    ///
    /// # Errors
    ///
    /// Those of [`QueuePairBuilder::build`](crate::QueuePairBuilder::build) and
    /// [`PreparedQueuePair::activate`](crate::PreparedQueuePair::activate), and
    ///
    ///  - `EINVAL`: the loop has not enough [room](Self::capacity) left.
    ///  - `EOPNOTSUPP`: the device has no datagrams, as on iWARP.
    #[doc(alias = "ibv_create_qp")]
    pub fn add_datagrams(&mut self, builder: DatagramsBuilder<'res>) -> Result<ChannelId> {
        let (channel, end) = builder.build(&self.queue)?;
        self.add_end(channel, end).map_err(|failed| failed.error)
    }

    /// Adds what was built.
    pub(crate) fn add_end(
        &mut self,
        channel: Channel<'res>,
        end: DatagramEnd<'res>,
    ) -> Result<ChannelId, StateError<Channel<'res>>> {
        if self.members.datagrams.try_reserve(1).is_err() {
            return Err(StateError::new(channel, no_memory()));
        }
        let id = self.add(channel)?;
        self.members.datagrams.insert(id, end);
        Ok(id)
    }

    /// `ibv_post_send`: sends a datagram, of at most the port's MTU, and keeps its buffer as [`post`](Self::post) does. The
    /// address handle of the path is made when the path is used first, and kept for the next message
    /// ([`address_handles`](DatagramsBuilder::address_handles)): on RoCE, the kernel may look up the peer's MAC address then.
    ///
    /// The send has ended when the datagram is on its way: nothing tells whether it arrives.
    ///
    /// # Errors
    ///
    /// Those of [`post`](Self::post), with the buffer, and
    ///
    ///  - [`Closed`](TransportError::Closed): the loop has no such datagram end (any more).
    ///  - [`Verbs`](TransportError::Verbs): those of [`AddressHandle::new`]; `EINVAL`: the message is longer than the MTU, or
    ///    the path goes through another port.
    #[doc(alias = "ibv_post_send")]
    #[doc(alias = "ibv_create_ah")]
    pub fn send_to<M: IntoSend>(
        &mut self,
        end: ChannelId,
        message: M,
        destination: &DatagramDestination,
        token: u64,
    ) -> Result<(), OperationError<B>>
    where
        KeptSend<M>: OwnedBuffer,
        B: LoopBuffer<KeptSend<M>>,
    {
        let request = message.into_send();
        let posted = match self.handle_to(end, &destination.path) {
            Ok(handle) => self.post_to(end, request, destination, &handle, State::Token, token),
            Err(error) => Err(Refused::new(error, Some(request))),
        };
        Ok(posted.map(drop)?)
    }

    fn handle_to(
        &mut self,
        end: ChannelId,
        path: &AddressVector,
    ) -> Result<Arc<AddressHandle<'res>>, TransportError> {
        let end = self.datagram_end(end).ok_or(TransportError::Closed)?;
        drop(end.take_spent());
        if let Some(handle) = end.known(path)? {
            return Ok(handle);
        }
        let handle = Arc::new(AddressHandle::new(end.at.domain.clone(), path)?);
        drop(end.keep(path, &handle));
        Ok(handle)
    }

    /// Posts a send with this handle, which is one of the end's.
    pub(super) fn post_to<R: WorkRequest>(
        &mut self,
        end: ChannelId,
        request: R,
        destination: &DatagramDestination,
        handle: &Arc<AddressHandle<'res>>,
        state: State,
        token: u64,
    ) -> Result<u64, Refused<R>>
    where
        R::Kept: OwnedBuffer,
        B: LoopBuffer<R::Kept>,
    {
        let directed = Directed::new(request, handle, destination);
        let posted = self.post_as::<_, Refused<Directed<R>>>(end, directed, state, token);
        let first = self.table.entries.get(end.index()).map_or(0, |entry| entry.first_slot);
        let of_end = self.datagram_end(end);
        match posted {
            Ok(number) => {
                if let Some(of_end) = of_end {
                    of_end.posted((index_of(number) - first) as usize, handle.clone());
                }
                Ok(number)
            }
            Err(Refused { error, request, index }) => {
                if let (Some(of_end), None) = (of_end, &request) {
                    of_end.hold(handle.clone());
                }
                Err(Refused { error, request: request.map(Directed::into_request), index })
            }
        }
    }

    /// As [`send_to`](Self::send_to) with this handle, for a task that is woken when it has ended: see
    /// [`post_task`](Self::post_task).
    #[cfg(feature = "async")]
    pub(crate) fn post_task_to<R: WorkRequest>(
        &mut self,
        end: ChannelId,
        request: R,
        destination: &DatagramDestination,
        handle: &Arc<AddressHandle<'res>>,
        waker: &mut Option<Waker>,
    ) -> Result<u64, Refused<R>>
    where
        R::Kept: OwnedBuffer,
        B: LoopBuffer<R::Kept>,
    {
        let number = self.post_to(end, request, destination, handle, State::Task, 0)?;
        self.keep_waker(number, waker);
        Ok(number)
    }

    /// The state of a datagram end, if the loop has it.
    pub(crate) fn datagram_end(&mut self, id: ChannelId) -> Option<&mut DatagramEnd<'res>> {
        self.members.datagrams.get_mut(&id)
    }

    fn known_end(&self, id: ChannelId, verb: &'static str) -> Result<&DatagramPort<'res>> {
        let reason = "the loop has no such datagram end (any more)";
        let end = self.members.datagrams.get(&id);
        end.map(|end| &*end.at).ok_or_else(|| Error::invalid(verb, reason))
    }

    /// Where a datagram end of the peer's is, of which the peer has sent the [endpoint](Self::endpoint). It has the Q_Key of
    /// this end; if the peer's is another one, change the field.
    ///
    /// # Errors
    ///
    /// Those of [`AddressVector::to_peer`], and
    ///
    ///  - `EINVAL`: the loop has no such datagram end (any more).
    pub fn destination(
        &self,
        end: ChannelId,
        peer: &QueuePairEndpoint,
    ) -> Result<DatagramDestination> {
        self.known_end(end, "ibv_create_ah")?.destination(peer)
    }

    /// Who has sent a datagram: where an answer goes. `success` is the completion of its receive, and `header` what the
    /// [buffer](crate::pool::DatagramBuffer::header) has in front of the message. The Q_Key is that of this end: no datagram
    /// tells its sender's.
    ///
    /// # Errors
    ///
    /// Those of [`AddressVector::reply_to`], and
    ///
    ///  - `EINVAL`: the loop has no such datagram end (any more).
    #[doc(alias = "ibv_init_ah_from_wc")]
    pub fn sender(
        &self,
        end: ChannelId,
        success: &WorkSuccess,
        header: &GlobalRouteHeader,
    ) -> Result<DatagramDestination> {
        self.known_end(end, "ibv_init_ah_from_wc")?.sender(success, header)
    }

    /// Where a multicast group is, by its IP address, on RoCE. To send to it, no end needs to [join](Self::join) it. On
    /// InfiniBand, `MulticastMembership` of feature `rdmacm` joins the group, and says where it is.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the loop has no such datagram end (any more), or the address is not that of a group.
    ///  - `EADDRNOTAVAIL`: the port has no GID of the same family of addresses.
    ///  - `EOPNOTSUPP`: the port is one of InfiniBand.
    pub fn group(&self, end: ChannelId, group: IpAddr) -> Result<DatagramDestination> {
        self.known_end(end, "ibv_create_ah")?.group(group)
    }

    /// `ibv_attach_mcast`: from now on, the end receives what is sent to the group, until it [leaves](Self::leave) or is removed.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the loop has no such datagram end (any more), or the destination is no group.
    ///  - `ENOMEM`: the device has no group left, or the group has no room left.
    ///  - The provider's errno value.
    #[doc(alias = "ibv_attach_mcast")]
    pub fn join(&mut self, end: ChannelId, group: &DatagramDestination) -> Result<()> {
        self.known_end(end, "ibv_attach_mcast")?;
        match &mut self.members.links[end.index()] {
            Some(link) => link.join(&group.path),
            None => Err(super::members::unknown("ibv_attach_mcast")),
        }
    }

    /// `ibv_detach_mcast`: leaves a group that the end has [joined](Self::join).
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the loop has no such datagram end (any more), or it is not in the group.
    #[doc(alias = "ibv_detach_mcast")]
    pub fn leave(&mut self, end: ChannelId, group: &DatagramDestination) -> Result<()> {
        self.known_end(end, "ibv_detach_mcast")?;
        match &mut self.members.links[end.index()] {
            Some(link) => link.leave(&group.path),
            None => Err(super::members::unknown("ibv_detach_mcast")),
        }
    }
}
