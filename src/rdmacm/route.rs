//! The route to a peer, found by its IP address.

use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use super::connectable::Connected;
use super::connecting::{self, PendingConnection, connect};
use super::connection::Connection;
use super::datagram::DatagramRoute;
use super::error::ConnectionError;
use super::event::{ConnectionEventKind, Copied};
use super::id::Id;
use super::{Connectable, Step};
use crate::debug::debug;
use crate::device::Context;
#[cfg(rdma_core_65)]
use crate::error::Error;
use crate::error::Result;
use crate::ffi;
use crate::foreign_enum::{getters, setters};
use crate::queue_pair::EnhancedConnection;
use crate::settings::AckTimeout;

/// The options for finding the route to a peer: see [`Route::to`].
#[derive(Clone, Debug)]
#[must_use]
pub struct RouteBuilder {
    destination: Destination,
    source: Option<SocketAddr>,
    type_of_service: Option<u8>,
    ack_timeout: Option<AckTimeout>,
    reuse_address: bool,
}

#[derive(Clone, Debug)]
enum Destination {
    Address(SocketAddr),
    #[cfg(rdma_core_65)]
    Name(String, String),
}

impl RouteBuilder {
    setters! { self,
        /// Our own address, which selects the device if several reach the peer (the kernel selects it unless
        /// set). Port 0 leaves the port to the kernel.
        source(address: SocketAddr) => self.source = Some(address);

        /// `RDMA_OPTION_ID_TOS`: the type of service (RFC 2474: the DSCP in the upper six bits), which
        /// becomes the traffic class on RoCE (the kernel's default unless set).
        #[doc(alias = "rdma_set_option")]
        #[doc(alias = "RDMA_OPTION_ID_TOS")]
        type_of_service(value: u8) => self.type_of_service = Some(value);

        /// `RDMA_OPTION_ID_ACK_TIMEOUT`: how long the **peer** is told to wait for our acknowledgements (unless
        /// set, the kernel derives it from the path). How long we wait is a setting of the queue pair:
        /// [`QueuePairBuilder::ack_timeout`](crate::QueuePairBuilder::ack_timeout).
        #[doc(alias = "RDMA_OPTION_ID_ACK_TIMEOUT")]
        ack_timeout(value: AckTimeout) => self.ack_timeout = Some(value);

        /// `RDMA_OPTION_ID_REUSEADDR`: whether the source address may be in use already (not unless set).
        #[doc(alias = "RDMA_OPTION_ID_REUSEADDR")]
        reuse_address(value: bool) => self.reuse_address = value;
    }

    /// `rdma_resolve_addr`, `rdma_resolve_route`: finds the device, the port and the path that lead to
    /// the address, before `deadline`.
    ///
    /// # Errors
    ///
    ///  - [`NoAddress`](ConnectionError::NoAddress), [`NoRoute`](ConnectionError::NoRoute): no device
    ///    leads there.
    ///  - [`TimedOut`](ConnectionError::TimedOut): the time limit has passed.
    ///  - [`Verbs`](ConnectionError::Verbs): `ENOENT`, `EACCES` and others: `/dev/infiniband/rdma_cm` is
    ///    missing, wrong, or may not be opened. `EADDRINUSE`, `EADDRNOTAVAIL`: the source address.
    ///    `EINVAL`: the addresses are of two families, or an option has a value that the kernel does not
    ///    take. `ENODEV`: no RDMA device is there.
    #[doc(alias = "rdma_resolve_addr")]
    #[doc(alias = "rdma_resolve_route")]
    pub fn resolve(self, deadline: Instant) -> Result<Route, ConnectionError> {
        self.begin(deadline)?.finish()
    }

    /// As [`resolve`](Self::resolve), in steps, for event loops. The kernel gives up at `deadline`.
    ///
    /// # Errors
    ///
    /// Those of `resolve` that occur immediately.
    pub fn begin(self, deadline: Instant) -> Result<RouteResolution, ConnectionError> {
        self.begin_in(ffi::rdma_port_space::RDMA_PS_TCP, deadline)
    }

    /// As [`resolve`](Self::resolve), for datagrams to the queue pair of a
    /// [`DatagramListener`](crate::rdmacm::DatagramListener) there.
    ///
    /// # Errors
    ///
    /// Those of `resolve`.
    pub fn resolve_datagram(self, deadline: Instant) -> Result<DatagramRoute, ConnectionError> {
        let resolution = self.begin_in(ffi::rdma_port_space::RDMA_PS_UDP, deadline)?;
        Ok(DatagramRoute::new(resolution.finish()?.id))
    }

    fn new(destination: Destination) -> Self {
        Self {
            destination,
            source: None,
            type_of_service: None,
            ack_timeout: None,
            reuse_address: false,
        }
    }

    fn begin_in(
        self,
        port_space: ffi::rdma_port_space,
        deadline: Instant,
    ) -> Result<RouteResolution, ConnectionError> {
        let mut id = Id::new(port_space)?;
        if self.reuse_address {
            id.set_option(ffi::RDMA_OPTION_ID_REUSEADDR.0, 1_i32)?;
        }
        if let Some(type_of_service) = self.type_of_service {
            id.set_option(ffi::RDMA_OPTION_ID_TOS.0, type_of_service)?;
        }
        if let Some(ack_timeout) = self.ack_timeout {
            id.set_option(ffi::RDMA_OPTION_ID_ACK_TIMEOUT.0, ack_timeout.value())?;
        }
        match &self.destination {
            Destination::Address(address) => {
                id.resolve_address(self.source, *address, connecting::time_left(deadline)?)?;
            }
            #[cfg(rdma_core_65)]
            Destination::Name(node, service) => {
                let text = |text: &str| {
                    let reason = "a name with a zero byte";
                    let error = Error::invalid("rdma_resolve_addrinfo", reason);
                    std::ffi::CString::new(text).map_err(|_| error)
                };
                id.resolve_name(&text(node)?, &text(service)?)?;
            }
        }
        Ok(RouteResolution { id, deadline, source: self.source })
    }
}

/// A running search for the route to a peer, in steps for event loops: see [`RouteBuilder::begin`].
/// Dropping it gives up.
#[must_use]
pub struct RouteResolution {
    id: Id,
    deadline: Instant,
    /// For the step after a name was resolved.
    #[cfg_attr(not(rdma_core_65), expect(dead_code, reason = "no name is resolved"))]
    source: Option<SocketAddr>,
}

impl RouteResolution {
    /// Proceeds as far as possible without waiting. Call it when the file is readable, or when the time
    /// limit has passed.
    ///
    /// # Errors
    ///
    /// Those of [`RouteBuilder::resolve`].
    pub fn step(mut self) -> Result<Step<Route, Self>, ConnectionError> {
        while let Some(event) = self.id.next()? {
            if self.is_done_by(&event)? {
                return Ok(Step::Done(Route { id: self.id }));
            }
        }
        connecting::time_left(self.deadline)?;
        Ok(Step::Pending(self))
    }

    /// Waits until the route is found, or the time limit that was given to `begin` has passed.
    ///
    /// # Errors
    ///
    /// Those of [`RouteBuilder::resolve`].
    pub fn finish(mut self) -> Result<Route, ConnectionError> {
        loop {
            let event = self.id.next_before(Some(self.deadline))?;
            if self.is_done_by(&event)? {
                return Ok(Route { id: self.id });
            }
        }
    }

    fn is_done_by(&mut self, event: &Copied) -> Result<bool, ConnectionError> {
        match event.kind() {
            #[cfg(rdma_core_65)]
            ConnectionEventKind::NameResolved => {
                self.id.resolve_found(self.source, connecting::time_left(self.deadline)?)?;
                Ok(false)
            }
            ConnectionEventKind::AddressResolved => {
                self.id.resolve_route(connecting::time_left(self.deadline)?)?;
                Ok(false)
            }
            ConnectionEventKind::RouteResolved => Ok(true),
            _ => Err(event.error()),
        }
    }
}

impl AsFd for RouteResolution {
    /// Readable when [`step`](Self::step) has something to do.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.id.as_fd()
    }
}

debug! { RouteResolution, self, deadline: self.deadline, .. }

/// The route to a peer: the device, the port and the path that lead to its IP address.
///
/// ```no_run
/// # // needs a peer
/// use std::time::{Duration, Instant};
/// use ibverbs::rdmacm::Route;
/// use ibverbs::{Channel, Inline};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let deadline = Instant::now() + Duration::from_secs(5);
/// let route = Route::to("10.77.0.2:7471".parse()?).resolve(deadline)?;
/// let context = route.open_device()?;
/// let domain = context.alloc_pd()?;
/// let prepared = Channel::builder(&domain).port(route.port()).build()?;
/// let mut channel = route.connect(prepared, b"hello", deadline)?;
/// channel.send(Inline(b"over RDMA"))?;
/// # Ok(())
/// # }
/// ```
#[must_use]
pub struct Route {
    id: Id,
}

impl Route {
    /// Begins to search for the route to `destination`: see [`RouteBuilder`].
    pub fn to(destination: SocketAddr) -> RouteBuilder {
        RouteBuilder::new(Destination::Address(destination))
    }

    /// `rdma_resolve_addrinfo`, `rdma_query_addrinfo`: begins to search for the route to a host and a service by their
    /// names, as `getaddrinfo` resolves them, which the thread waits for. There since rdma-core 65, with Linux 6.18;
    /// [`ToSocketAddrs`](std::net::ToSocketAddrs) and [`to`](Self::to) do it everywhere.
    ///
    /// # Errors
    ///
    /// [`RouteBuilder::resolve`] then also returns [`Verbs`](ConnectionError::Verbs) with `ENOENT`: the name or the service is
    /// not known; `EAGAIN`: no name server answers; `EOPNOTSUPP`: the kernel is older; `EINVAL`: a name has a zero byte.
    #[cfg(rdma_core_65)]
    #[doc(alias = "rdma_resolve_addrinfo")]
    #[doc(alias = "rdma_query_addrinfo")]
    pub fn to_name(node: &str, service: &str) -> RouteBuilder {
        RouteBuilder::new(Destination::Name(node.to_owned(), service.to_owned()))
    }

    /// As [`RouteBuilder::resolve`], without options.
    ///
    /// # Errors
    ///
    /// Those of [`RouteBuilder::resolve`].
    pub fn resolve(destination: SocketAddr, deadline: Instant) -> Result<Self, ConnectionError> {
        Self::to(destination).resolve(deadline)
    }

    getters! { self,
        /// Opens the device that leads to the peer. An open context of that device can be used instead.
        ///
        /// # Errors
        ///
        /// Those of [`Device::open`](crate::Device::open).
        open_device: Result<Context<'static>> => self.id.open_device();

        /// The name of the device that leads to the peer.
        device_name: Option<String> => self.id.device_name();

        /// The port of the device that leads to the peer. A queue pair must be [built
        /// with](crate::QueuePairBuilder::port) this port.
        port: u8 => self.id.port();

        /// Whether the device speaks iWARP, where the target of an RDMA read must be memory that the peer may
        /// write.
        is_iwarp: bool => self.id.is_iwarp();

        /// The address of the peer.
        #[doc(alias = "rdma_get_peer_addr")]
        #[doc(alias = "rdma_get_dst_port")]
        peer_addr: Option<SocketAddr> => self.id.peer_addr();

        /// Our own address.
        #[doc(alias = "rdma_get_local_addr")]
        #[doc(alias = "rdma_get_src_port")]
        local_addr: Option<SocketAddr> => self.id.local_addr();
    }

    /// `rdma_set_local_ece`: offers the peer these enhanced connection options.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the options name no vendor.
    #[doc(alias = "rdma_set_local_ece")]
    pub fn set_local_ece(&mut self, ece: EnhancedConnection) -> Result<()> {
        self.id.set_local_ece(ece)
    }

    /// `rdma_connect`: connects, with up to 56 bytes of private data for the peer (252 on iWARP; 24 less [with
    /// flow control](crate::rdmacm::PrivateData)), before `deadline`.
    ///
    /// On iWARP it may return later: the kernel destroys a queue pair that is connecting only when the peer has answered, or
    /// when its own time is up (10 s with Soft-iWARP), and what gives up waits for that. No other object and no other device
    /// does. [`AsyncChannel`](crate::AsyncChannel)s, and the functions for tokio, leave it to another thread.
    ///
    /// Both sides agree on the path, the MTU and the number of outstanding reads. The peer's access rights,
    /// the time-outs and the numbers of retries are those that the queue pair was built with.
    ///
    /// # Errors
    ///
    ///  - [`Rejected`](ConnectionError::Rejected): the peer refuses, or no program listens.
    ///  - [`Unreachable`](ConnectionError::Unreachable), [`TimedOut`](ConnectionError::TimedOut): the peer
    ///    does not answer.
    ///  - [`WrongDevice`](ConnectionError::WrongDevice), [`WrongPort`](ConnectionError::WrongPort): the
    ///    queue pair is not on the device and port of the route.
    ///  - [`Verbs`](ConnectionError::Verbs): the private data are too long, the queue pair is not of type
    ///    RC, only one side has [flow control](crate::ChannelBuilder::flow_control) (a peer of this crate rejects
    ///    that itself), or something failed.
    ///  - Others: see [`ConnectionError`].
    ///
    /// The queue pair is then destroyed. [`prepare`](Self::prepare) returns it instead.
    #[doc(alias = "rdma_connect")]
    #[doc(alias = "rdma_establish")]
    pub fn connect<P: Connectable>(
        self,
        prepared: P,
        private_data: &[u8],
        deadline: Instant,
    ) -> Result<Connection<Connected<P>>, ConnectionError> {
        connect(self.id, prepared, None, private_data, deadline)
    }

    /// Takes the queue pair to INIT, where it accepts receives, and sends nothing yet: the first step of
    /// [`connect`](Self::connect).
    ///
    /// # Errors
    ///
    /// The route and the queue pair come back with the reason, and nothing has changed:
    ///
    ///  - [`WrongDevice`](ConnectionError::WrongDevice), [`WrongPort`](ConnectionError::WrongPort): the
    ///    queue pair is not on the device and port of the route.
    ///  - [`Verbs`](ConnectionError::Verbs): it is not of type RC (`EINVAL`), or the device failed.
    pub fn prepare<P: Connectable>(
        self,
        prepared: P,
    ) -> Result<PendingConnection<Connected<P>>, (Self, P, ConnectionError)> {
        PendingConnection::new(self.id, prepared, None)
            .map_err(|(id, prepared, error)| (Self { id }, prepared, error))
    }
}

debug! { Route, self, peer_addr: self.peer_addr(), device: self.device_name(), port: self.port() }
