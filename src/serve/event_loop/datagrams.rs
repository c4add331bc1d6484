//! Datagram ends: members of a loop without a peer.

use std::net::IpAddr;
use std::sync::Arc;
#[cfg(feature = "async")]
use std::task::Waker;

use super::Loop;
use super::ended::{ChannelId, LoopBuffer};
use super::members::unknown;
use super::slots::{State, index_of};
use crate::base::{Error, Result, StateError};
use crate::channel::parts::{
    DatagramEnd, DatagramPort, Directed, EndKind, KeptSend, Link, Refused,
};
use crate::channel::{
    Channel, DatagramsBuilder, EndDestination, IntoSend, OperationError, TransportError,
    WorkRequest,
};
use crate::verbs::completion::WorkSuccess;
use crate::verbs::operation::{DatagramDestination, Destination, SendQueueRequest, To};
#[cfg(doc)]
use crate::verbs::queue_pair::AddressVector;
use crate::verbs::queue_pair::{AddressHandle, GlobalRouteHeader, QueuePairEndpoint};

impl<'res, B> Loop<'res, B> {
    /// `ibv_create_qp`, `ibv_modify_qp`: adds a datagram end. It takes [room](Self::capacity) and has an id as a
    /// channel does, and is [removed](Self::remove) in the same way.
    ///
    /// [Post](Self::post) its receives as on a channel, each with 40 bytes more than the message: see
    /// [`DatagramBuffer`](crate::pool::DatagramBuffer). Send by [`send_to`](Self::send_to). Any datagram may be lost;
    /// one that finds no receive, or has another Q_Key, always is. After a send or receive has failed, remove the end
    /// and add another.
    ///
    /// # Errors
    ///
    /// Those of [`QueuePairBuilder::build`](crate::QueuePairBuilder::build) and
    /// [`PreparedQueuePair::activate`](crate::PreparedQueuePair::activate), and
    ///
    ///  - `EINVAL`: the loop has not enough [room](Self::capacity).
    ///  - `EOPNOTSUPP`: the device has no datagrams, as on iWARP.
    #[doc(alias = "ibv_create_qp")]
    pub fn add_datagrams(&mut self, builder: DatagramsBuilder<'res>) -> Result<ChannelId> {
        let (channel, end) = builder.build(&self.queue)?;
        self.add_end(channel, end).map_err(|failed| failed.error)
    }

    pub(crate) fn add_end(
        &mut self,
        channel: Channel<'res>,
        end: DatagramEnd<'res>,
    ) -> Result<ChannelId, StateError<Channel<'res>>> {
        if let Err(error) = self.members.reserve_end() {
            return Err(StateError::new(channel, error));
        }
        let id = self.add(channel)?;
        self.table.cold[id.index()].survives_failures = end.at.kind == EndKind::Srd;
        self.members.add_end(id.index(), Box::new(end));
        Ok(id)
    }

    /// `ibv_post_send`: sends a datagram of at most the port's MTU, and keeps its buffer as [`post`](Self::post) does.
    /// The first send to a path makes its address handle, for which the kernel may look up the peer's MAC address on
    /// RoCE. The handle is kept ([`address_handles`](DatagramsBuilder::address_handles)).
    ///
    /// The send ends when the datagram is on its way. Nothing tells whether it arrives.
    ///
    /// # Errors
    ///
    /// Those of [`post`](Self::post), with the buffer, and
    ///
    ///  - [`Closed`](TransportError::Closed): the loop has no such datagram end (any more).
    ///  - [`Verbs`](TransportError::Verbs): those of [`AddressHandle::new`]; `EINVAL`: the message is longer than the
    ///    MTU, or the path goes through another port.
    #[doc(alias = "ibv_post_send")]
    #[doc(alias = "ibv_create_ah")]
    pub fn send_to<M: IntoSend>(
        &mut self,
        end: ChannelId,
        message: M,
        destination: &impl EndDestination,
        token: u64,
    ) -> Result<(), OperationError<B>>
    where
        KeptSend<M>: LoopBuffer<B>,
    {
        self.post_to(end, message.into_send(), destination, token)
    }

    /// `ibv_wr_start`: as [`send_to`](Self::send_to), for any request: also a write, a read and a write with an immediate on
    /// [SRD](DatagramsBuilder::srd), and these and atomics on [DC](DatagramsBuilder::dc_initiator).
    ///
    /// # Errors
    ///
    /// Those of [`send_to`](Self::send_to), and
    ///
    ///  - [`Verbs`](TransportError::Verbs): `EOPNOTSUPP`: the end does not have the operation. `EINVAL`: the destination is
    ///    for ends of another transport.
    #[doc(alias = "ibv_wr_start")]
    #[doc(alias = "mlx5dv_wr_set_dc_addr")]
    pub fn post_to<R: WorkRequest<Kept: LoopBuffer<B>> + SendQueueRequest>(
        &mut self,
        end: ChannelId,
        request: R,
        destination: &impl EndDestination,
        token: u64,
    ) -> Result<(), OperationError<B>> {
        let posted = match self.handle_to(end, destination) {
            Ok((handle, functions)) => {
                let directed = Directed::new(request, destination.peer(&handle), functions);
                self.post_by(end, directed, &handle, State::Token, token)
            }
            Err(error) => Err(Refused::new(error, Some(request))),
        };
        Ok(posted.map(drop)?)
    }

    fn handle_to<D: EndDestination>(
        &mut self,
        end: ChannelId,
        destination: &D,
    ) -> Result<(Arc<AddressHandle<'res>>, u64), TransportError> {
        let path = destination.path();
        let end = self.datagram_end(end).ok_or(TransportError::Closed)?;
        end.at.check::<D>()?;
        let functions = end.at.functions;
        drop(end.take_spent());
        if let Some(handle) = end.known(path)? {
            return Ok((handle, functions));
        }
        let handle = Arc::new(AddressHandle::new(end.at.domain.clone(), path)?);
        drop(end.keep(path, &handle));
        Ok((handle, functions))
    }

    fn post_by<R: WorkRequest<Kept: LoopBuffer<B>> + SendQueueRequest, P: Destination>(
        &mut self,
        end: ChannelId,
        directed: Directed<To<R, P>>,
        handle: &Arc<AddressHandle<'res>>,
        state: State,
        token: u64,
    ) -> Result<u64, Refused<R>> {
        let posted = self.post_as::<_, Refused<Directed<_>>>(end, directed, state, token);
        let first = self.table.entries.get(end.index()).map_or(0, |entry| entry.first_slot);
        let of_end = self.datagram_end(end);
        match posted {
            Ok(number) => {
                if let Some(of_end) = of_end {
                    of_end.posted((index_of(number) - first) as usize, handle.clone());
                }
                Ok(number)
            }
            Err(Refused { error, request }) => {
                if let (Some(of_end), None) = (of_end, &request) {
                    of_end.hold(handle.clone());
                }
                Err(Refused { error, request: request.map(Directed::into_request) })
            }
        }
    }

    #[cfg(feature = "async")]
    pub(crate) fn post_task_to<R: WorkRequest<Kept: LoopBuffer<B>> + SendQueueRequest>(
        &mut self,
        end: ChannelId,
        request: R,
        (destination, functions): (&impl EndDestination, u64),
        handle: &Arc<AddressHandle<'res>>,
        waker: &mut Option<Waker>,
    ) -> Result<u64, Refused<R>> {
        let directed = Directed::new(request, destination.peer(handle), functions);
        let number = self.post_by(end, directed, handle, State::Task, 0)?;
        self.keep_waker(number, waker);
        Ok(number)
    }

    pub(crate) fn datagram_end(&mut self, id: ChannelId) -> Option<&mut DatagramEnd<'res>> {
        self.table.entry(id)?;
        self.members.datagrams.get_mut(id.index())?.as_deref_mut()
    }

    fn known_end(&self, id: ChannelId, verb: &'static str) -> Result<&DatagramPort<'res>> {
        let reason = "the loop has no such datagram end (any more)";
        let end = self.table.entry(id).and(self.members.datagrams.get(id.index()));
        end.and_then(Option::as_deref)
            .map(|end| &*end.at)
            .ok_or_else(|| Error::invalid(verb, reason))
    }

    fn known_link(&mut self, id: ChannelId, verb: &'static str) -> Result<&mut Link<'res>> {
        self.known_end(id, verb)?;
        self.members.links[id.index()].as_mut().ok_or_else(|| unknown(verb))
    }

    /// The destination of a peer's datagram end, from the [endpoint](Self::endpoint) that the peer has sent. Its Q_Key
    /// is that of this end: change the field if the peer's differs.
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

    /// The sender of a datagram, as the destination of an answer. `success` is the completion of the receive, and
    /// `header` what the [buffer](crate::pool::DatagramBuffer::header) has in front of the message. The Q_Key is that
    /// of this end: a datagram does not carry its sender's.
    ///
    /// # Errors
    ///
    /// Those of [`AddressVector::reply_to`], and `EINVAL` as for [`destination`](Self::destination).
    #[doc(alias = "ibv_init_ah_from_wc")]
    pub fn sender(
        &self,
        end: ChannelId,
        success: &WorkSuccess,
        header: &GlobalRouteHeader,
    ) -> Result<DatagramDestination> {
        self.known_end(end, "ibv_init_ah_from_wc")?.sender(success, header)
    }

    /// The destination of a multicast group, from its IP address, on RoCE. Sending to a group needs no
    /// [join](Self::join). On InfiniBand, use `MulticastMembership` of feature `rdmacm`, which joins the group.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the loop has no such datagram end (any more), or this is no multicast address.
    ///  - `EADDRNOTAVAIL`: the port has no GID of the same address family.
    ///  - `EOPNOTSUPP`: the port is an InfiniBand port.
    pub fn group(&self, end: ChannelId, group: IpAddr) -> Result<DatagramDestination> {
        self.known_end(end, "ibv_create_ah")?.group(group)
    }

    /// `ibv_attach_mcast`: the end receives what is sent to the group, until it [leaves](Self::leave) or is removed.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the loop has no such datagram end (any more), or the destination is no group.
    ///  - `ENOMEM`: the device has no room for another group, or the group none for another member.
    ///  - The provider's errno value.
    #[doc(alias = "ibv_attach_mcast")]
    pub fn join(&mut self, end: ChannelId, group: &DatagramDestination) -> Result<()> {
        self.known_link(end, "ibv_attach_mcast")?.join(&group.path)
    }

    /// `ibv_detach_mcast`: leaves a [joined](Self::join) group.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the loop has no such datagram end (any more), or it is not in the group.
    #[doc(alias = "ibv_detach_mcast")]
    pub fn leave(&mut self, end: ChannelId, group: &DatagramDestination) -> Result<()> {
        self.known_link(end, "ibv_detach_mcast")?.leave(&group.path)
    }
}
