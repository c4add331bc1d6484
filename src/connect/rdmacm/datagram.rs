//! Datagram peers, found by IP address (SIDR), and multicast groups.

use super::error::ConnectionError;
use super::event::ConnectionEventKind;
use super::id::Id;
use super::listener::{Listener, ListenerBuilder, sealed};
use super::private_data::{Message, PrivateData};
use crate::base::{Error, QueuePairState, QueuePairType, Result, debug, ffi, getters};
use crate::verbs::device::{Context, Gid};
use crate::verbs::operation::DatagramDestination;
use crate::verbs::queue_pair::{Datagram, PreparedQueuePair, QueuePair, Transport};

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

/// To RTS, with the connection manager's Q_Key and partition.
pub(super) fn activate<'res, T: Datagram>(
    id: &mut Id,
    mut prepared: PreparedQueuePair<'res, T>,
) -> Result<QueuePair<'res, T>, ConnectionError> {
    check(id, prepared.queue_pair())?;
    let (attributes, _) = id.queue_pair_attributes(QueuePairState::Init)?;
    prepared.queue_pair_mut().set_partition(attributes.qkey, attributes.pkey_index);
    Ok(prepared.activate()?)
}

fn check<T: Transport>(id: &Id, queue_pair: &QueuePair<'_, T>) -> Result<(), ConnectionError> {
    if queue_pair.queue_pair_type() != QueuePairType::UnreliableDatagram {
        let reason = "datagrams need a queue pair of type UD";
        return Err(Error::invalid("rdma_connect", reason).into());
    }
    let context = queue_pair.protection_domain().context();
    id.check(context.as_raw(), queue_pair.settings().port)
}

/// The route to a datagram peer: see
/// [`RouteBuilder::resolve_datagram`](crate::rdmacm::RouteBuilder::resolve_datagram).
#[must_use]
pub struct DatagramRoute {
    id: Id,
}

impl DatagramRoute {
    pub(super) fn new(id: Id) -> Self {
        Self { id }
    }

    getters! { self,
        /// Opens the device: see [`Route::open_device`](crate::rdmacm::Route::open_device).
        ///
        /// # Errors
        ///
        /// Those of [`Device::open`](crate::Device::open).
        open_device: Result<Context<'static>> => self.id.open_device();

        /// The device's name.
        device_name: Option<String> => self.id.device_name();

        /// The port of the device.
        port: u8 => self.id.port();
    }

    /// `rdma_init_qp_attr`, `ibv_modify_qp`: makes a UD queue pair ready, with the connection manager's
    /// Q_Key. It may then send to many peers.
    ///
    /// # Errors
    ///
    /// [`WrongDevice`](ConnectionError::WrongDevice), [`WrongPort`](ConnectionError::WrongPort), or
    /// [`Verbs`](ConnectionError::Verbs): the queue pair is not UD (`EINVAL`), or
    /// [`PreparedQueuePair::activate`] failed.
    #[doc(alias = "rdma_init_qp_attr")]
    pub fn activate<'res, T: Datagram>(
        &mut self,
        prepared: PreparedQueuePair<'res, T>,
    ) -> Result<QueuePair<'res, T>, ConnectionError> {
        activate(&mut self.id, prepared)
    }

    /// `rdma_connect`: asks the peer where to send datagrams, and waits for the answer, not after `deadline`.
    ///
    /// `queue_pair` will send the datagrams. The private data have up to 180 bytes.
    ///
    /// # Errors
    ///
    /// See [`ConnectionError`]. [`Unreachable`](ConnectionError::Unreachable): the peer refuses (a status
    /// above 0) or does not answer. [`Verbs`](ConnectionError::Verbs) with `EINVAL`: the private data are too
    /// long, or the queue pair is not UD.
    #[doc(alias = "rdma_connect")]
    pub fn connect(
        mut self,
        queue_pair: &QueuePair<'_, impl Datagram>,
        private_data: &[u8],
        deadline: Instant,
    ) -> Result<DatagramAddress, ConnectionError> {
        check(&self.id, queue_pair)?;
        let len = Message::DatagramRequest.check("rdma_connect", private_data, false)?;
        self.id.connect(&mut parameters(private_data, len, queue_pair.number()))?;
        DatagramAddress::with_event(&mut self.id, ConnectionEventKind::Established, deadline)
    }
}

fn parameters(private_data: &[u8], len: u8, queue_pair: u32) -> ffi::rdma_conn_param {
    ffi::rdma_conn_param {
        private_data: private_data.as_ptr().cast(),
        private_data_len: len,
        qp_num: queue_pair,
        ..Default::default()
    }
}

debug! { DatagramRoute, self, peer_addr: self.id.peer_addr(), device: self.device_name(), .. }

/// The address of a datagram peer or a multicast group. It makes a [`DatagramPeer`](crate::operation::DatagramPeer),
/// [to which](crate::SendWorkRequest::to) requests are sent.
#[derive(Clone, Copy, Debug)]
#[doc(alias = "rdma_ud_param")]
pub struct DatagramAddress {
    /// Where requests go: for [`Loop::send_to`](crate::Loop::send_to) and [`join`](crate::Loop::join).
    pub destination: DatagramDestination,
    /// The private data of the answer.
    pub private_data: PrivateData,
}

impl DatagramAddress {
    /// Waits for the event of this kind, with which the address comes.
    fn with_event(
        id: &mut Id,
        kind: ConnectionEventKind,
        deadline: Instant,
    ) -> Result<Self, ConnectionError> {
        loop {
            let event = id.next_before(Some(deadline))?;
            match event.kind() {
                found if found == kind => {
                    let (path, number) = (event.path.into(), event.queue_pair);
                    let destination = DatagramDestination { path, number, qkey: event.qkey };
                    return Ok(Self { destination, private_data: event.public.private_data });
                }
                ConnectionEventKind::AddressChanged | ConnectionEventKind::Unknown(_) => {}
                _ => return Err(event.error()),
            }
        }
    }
}

/// Listens for datagram peers: see
/// [`ListenerBuilder::bind_datagram`](crate::rdmacm::ListenerBuilder::bind_datagram).
pub type DatagramListener = Listener<DatagramRequest>;

impl ListenerBuilder {
    /// [`bind`](Self::bind) for datagram peers.
    ///
    /// # Errors
    ///
    /// Those of `bind`.
    pub fn bind_datagram(self) -> Result<DatagramListener> {
        self.bind_in(ffi::rdma_port_space::RDMA_PS_UDP)
    }
}

impl sealed::Request for DatagramRequest {
    fn new(sealed::Asked(id, event): sealed::Asked) -> Self {
        Self { id, private_data: event.public.private_data, answered: false }
    }
}

/// A peer that asks where to send datagrams. Dropping it rejects the peer.
#[must_use = "dropping it rejects the peer"]
pub struct DatagramRequest {
    id: Id,
    private_data: PrivateData,
    answered: bool,
}

impl Drop for DatagramRequest {
    fn drop(&mut self) {
        if !self.answered {
            // The identifier is destroyed next.
            let _ = self.id.reject(&[]);
        }
    }
}

impl DatagramRequest {
    getters! { self,
        /// The private data of the peer's request.
        private_data: &PrivateData => &self.private_data;

        /// The address of the peer.
        peer_addr: Option<SocketAddr> => self.id.peer_addr();

        /// Opens the request's device.
        ///
        /// # Errors
        ///
        /// Those of [`Device::open`](crate::Device::open).
        open_device: Result<Context<'static>> => self.id.open_device();

        /// The request's port.
        port: u8 => self.id.port();
    }

    /// [`DatagramRoute::activate`] for the request.
    ///
    /// # Errors
    ///
    /// Those of [`DatagramRoute::activate`].
    #[doc(alias = "rdma_init_qp_attr")]
    pub fn activate<'res, T: Datagram>(
        &mut self,
        prepared: PreparedQueuePair<'res, T>,
    ) -> Result<QueuePair<'res, T>, ConnectionError> {
        activate(&mut self.id, prepared)
    }

    /// `rdma_accept`: tells the peer to send to this queue pair, with up to 136 bytes of private data.
    ///
    /// The peer's first datagram tells its address
    /// ([`AddressVector::reply_to`](crate::queue_pair::AddressVector::reply_to)). A failure rejects the peer.
    ///
    /// # Errors
    ///
    /// [`WrongDevice`](ConnectionError::WrongDevice), [`WrongPort`](ConnectionError::WrongPort), or
    /// [`Verbs`](ConnectionError::Verbs) (`EINVAL`: the private data are too long, or the queue pair is not
    /// UD).
    #[doc(alias = "rdma_accept")]
    pub fn accept(
        mut self,
        queue_pair: &QueuePair<'_, impl Datagram>,
        private_data: &[u8],
    ) -> Result<(), ConnectionError> {
        check(&self.id, queue_pair)?;
        let len = Message::DatagramReply.check("rdma_accept", private_data, false)?;
        self.id.accept(&mut parameters(private_data, len, queue_pair.number()))?;
        self.answered = true;
        Ok(())
    }

    /// `rdma_reject`: rejects the peer, with up to 136 bytes of private data.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the private data are too long, and the peer is rejected without them.
    #[doc(alias = "rdma_reject")]
    pub fn reject(mut self, private_data: &[u8]) -> Result<()> {
        Message::DatagramReply.check("rdma_reject", private_data, false)?;
        self.answered = true;
        self.id.reject(private_data)
    }
}

debug! { DatagramRequest, self, peer_addr: self.peer_addr(), .. }

/// Membership in a multicast group. Dropping it leaves the group.
///
/// To receive, [attach](QueuePair::attach_multicast) a UD queue pair; to send, the [address](Self::peer) is
/// enough.
pub struct MulticastMembership {
    id: Id,
    group: SocketAddr,
    peer: DatagramAddress,
    joined: bool,
}

impl Drop for MulticastMembership {
    fn drop(&mut self) {
        if self.joined {
            // Destroying the identifier leaves the group too.
            let _ = self.id.leave_multicast(self.group);
        }
    }
}

impl MulticastMembership {
    /// `rdma_join_multicast`: joins the multicast address `group` through the device of our address `local`,
    /// before `deadline`.
    ///
    /// # Errors
    ///
    ///  - [`Verbs`](ConnectionError::Verbs): `EINVAL`: `group` is no multicast address, or of another family
    ///    than `local`. `ENODEV`, `EADDRNOTAVAIL`: `local` is not the address of an RDMA device.
    ///  - [`Failed`](ConnectionError::Failed), [`TimedOut`](ConnectionError::TimedOut).
    #[doc(alias = "rdma_join_multicast")]
    #[doc(alias = "rdma_join_multicast_ex")]
    pub fn join(local: IpAddr, group: IpAddr, deadline: Instant) -> Result<Self, ConnectionError> {
        Self::join_as(local, group, false, deadline)
    }

    /// [`join`](Self::join), only to send to the group.
    ///
    /// # Errors
    ///
    /// Those of `join`, and `EOPNOTSUPP` if the fabric has no send-only members.
    #[doc(alias = "rdma_join_multicast_ex")]
    pub fn join_to_send(
        local: IpAddr,
        group: IpAddr,
        deadline: Instant,
    ) -> Result<Self, ConnectionError> {
        Self::join_as(local, group, true, deadline)
    }

    fn join_as(
        local: IpAddr,
        group: IpAddr,
        send_only: bool,
        deadline: Instant,
    ) -> Result<Self, ConnectionError> {
        const VERB: &str = "rdma_join_multicast";
        let reason = "the group's address is not a multicast address";
        Error::invalid_if(!group.is_multicast(), VERB, reason)?;
        let reason = "one address is an IPv4 address and the other an IPv6 address";
        Error::invalid_if(group.is_ipv4() != local.is_ipv4(), VERB, reason)?;
        let reason = "the local address must be that of a device";
        Error::invalid_if(local.is_unspecified(), VERB, reason)?;
        let group = SocketAddr::new(group, 0);
        let mut id = Id::new(ffi::rdma_port_space::RDMA_PS_UDP)?;
        id.bind(SocketAddr::new(local, 0))?;
        id.join_multicast(group, send_only)?;
        match DatagramAddress::with_event(&mut id, ConnectionEventKind::MulticastJoined, deadline) {
            Ok(peer) => Ok(Self { id, group, peer, joined: true }),
            Err(error) => {
                let _ = id.leave_multicast(group);
                Err(error)
            }
        }
    }

    getters! { self,
        /// Opens the group's device.
        ///
        /// # Errors
        ///
        /// Those of [`Device::open`](crate::Device::open).
        open_device: Result<Context<'static>> => self.id.open_device();

        /// The port through which the group was joined.
        port: u8 => self.id.port();

        /// The group's path, queue pair number and Q_Key, for sending.
        peer: &DatagramAddress => &self.peer;

        /// The GID of the group, for [`QueuePair::attach_multicast`].
        gid: Gid => self.peer.destination.path.gid().unwrap_or(Gid::ZERO);

        /// The LID of the group, for [`QueuePair::attach_multicast`]; 0 on RoCE.
        lid: u16 => self.peer.destination.path.lid();
    }

    /// [`DatagramRoute::activate`](crate::rdmacm::DatagramRoute::activate), with the group's Q_Key.
    ///
    /// # Errors
    ///
    /// Those of [`DatagramRoute::activate`](crate::rdmacm::DatagramRoute::activate).
    pub fn activate<'res, T: Datagram>(
        &mut self,
        prepared: PreparedQueuePair<'res, T>,
    ) -> Result<QueuePair<'res, T>, ConnectionError> {
        activate(&mut self.id, prepared)
    }

    /// `rdma_leave_multicast`: leaves the group. Detach queue pairs first. Dropping ignores a failure.
    ///
    /// # Errors
    ///
    ///  - `ENODEV`: the device was removed.
    #[doc(alias = "rdma_leave_multicast")]
    pub fn leave(mut self) -> Result<()> {
        self.joined = false;
        self.id.leave_multicast(self.group)
    }
}

debug! { MulticastMembership, self, group: self.group.ip(), peer: self.peer, .. }
