//! Finds the route to a peer by IP address.

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
#[cfg(rdma_core_65)]
use crate::base::Error;
use crate::base::{Result, debug, ffi, getters, setters};
use crate::verbs::device::Context;
use crate::verbs::queue_pair::EnhancedConnection;
use crate::verbs::settings::AckTimeout;

/// The options for [`Route::to`].
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
        /// Our own address, which selects the device (default: the kernel does). With port 0 the kernel
        /// chooses the port.
        source(address: SocketAddr) => self.source = Some(address);

        /// `RDMA_OPTION_ID_TOS`: the type of service (RFC 2474: the DSCP in the upper six bits), on RoCE the
        /// traffic class (default: the kernel's).
        #[doc(alias = "rdma_set_option")]
        #[doc(alias = "RDMA_OPTION_ID_TOS")]
        type_of_service(value: u8) => self.type_of_service = Some(value);

        /// `RDMA_OPTION_ID_ACK_TIMEOUT`: how long the **peer** waits for our acknowledgements (default:
        /// derived from the path). For our own wait, see
        /// [`QueuePairBuilder::ack_timeout`](crate::QueuePairBuilder::ack_timeout).
        #[doc(alias = "RDMA_OPTION_ID_ACK_TIMEOUT")]
        ack_timeout(value: AckTimeout) => self.ack_timeout = Some(value);

        /// `RDMA_OPTION_ID_REUSEADDR`: whether the source address may be in use already (default: no).
        #[doc(alias = "RDMA_OPTION_ID_REUSEADDR")]
        reuse_address(value: bool) => self.reuse_address = value;
    }

    /// `rdma_resolve_addr`, `rdma_resolve_route`: finds the device, port and path, before `deadline`.
    ///
    /// # Errors
    ///
    ///  - [`NoAddress`](ConnectionError::NoAddress), [`NoRoute`](ConnectionError::NoRoute): no device leads
    ///    there.
    ///  - [`TimedOut`](ConnectionError::TimedOut): `deadline` has passed.
    ///  - [`Verbs`](ConnectionError::Verbs): `ENOENT`, `EACCES` and others: `/dev/infiniband/rdma_cm` is
    ///    missing, wrong, or may not be opened. `EADDRINUSE`, `EADDRNOTAVAIL`: the source address. `EINVAL`:
    ///    two address families, or an option's value that the kernel refuses. `ENODEV`: no RDMA device is
    ///    there.
    #[doc(alias = "rdma_resolve_addr")]
    #[doc(alias = "rdma_resolve_route")]
    pub fn resolve(self, deadline: Instant) -> Result<Route, ConnectionError> {
        self.begin(deadline)?.finish()
    }

    /// [`resolve`](Self::resolve) in steps, for event loops.
    ///
    /// # Errors
    ///
    /// Those of `resolve` that occur immediately.
    pub fn begin(self, deadline: Instant) -> Result<RouteResolution, ConnectionError> {
        self.begin_in(ffi::rdma_port_space::RDMA_PS_TCP, deadline)
    }

    /// [`resolve`](Self::resolve) for datagrams to the queue pair of a
    /// [`DatagramListener`](crate::rdmacm::DatagramListener).
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
                let invalid = |is_so, why| Error::invalid_if(is_so, "rdma_resolve_addrinfo", why);
                invalid(node.is_empty(), "the name is empty")?;
                // The resolver takes such a number, and cuts it off.
                let is_number =
                    !service.is_empty() && service.bytes().all(|byte| byte.is_ascii_digit());
                let is_port = service.parse::<u16>().is_ok();
                invalid(is_number && !is_port, "a port is at most 65535")?;
                id.resolve_name(&text(node)?, &text(service)?)?;
            }
        }
        Ok(RouteResolution { id, deadline, source: self.source })
    }
}

/// A running search, in steps: see [`RouteBuilder::begin`]. Dropping it gives up.
#[must_use]
pub struct RouteResolution {
    id: Id,
    deadline: Instant,
    /// For the step after a name.
    #[cfg_attr(not(rdma_core_65), expect(dead_code, reason = "no name is resolved"))]
    source: Option<SocketAddr>,
}

impl RouteResolution {
    /// Proceeds without waiting. Call it when the file is readable, or after the deadline.
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

    /// Waits for the route, not after the deadline that `begin` got.
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
    /// Readable when [`step`](Self::step) has work.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.id.as_fd()
    }
}

debug! { RouteResolution, self, deadline: self.deadline, .. }

/// The device, port and path that lead to a peer's IP address.
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
    /// Options for the route to `destination`.
    pub fn to(destination: SocketAddr) -> RouteBuilder {
        RouteBuilder::new(Destination::Address(destination))
    }

    /// `rdma_resolve_addrinfo`, `rdma_query_addrinfo`: options for the route to a host and a service by name.
    ///
    /// The thread waits for the names, resolved as `getaddrinfo` does. Needs rdma-core 65 and Linux 6.18;
    /// [`ToSocketAddrs`](std::net::ToSocketAddrs) with [`to`](Self::to) works everywhere.
    ///
    /// # Errors
    ///
    /// Further [`Verbs`](ConnectionError::Verbs) of [`RouteBuilder::resolve`]: `ENOENT`: unknown name or
    /// service; `EAGAIN`: no name server answers; `EOPNOTSUPP`: the kernel is older; `EINVAL`: a name is empty or
    /// has a zero byte, or a port is above 65535.
    #[cfg(rdma_core_65)]
    #[doc(alias = "rdma_resolve_addrinfo")]
    #[doc(alias = "rdma_query_addrinfo")]
    pub fn to_name(node: &str, service: &str) -> RouteBuilder {
        RouteBuilder::new(Destination::Name(node.to_owned(), service.to_owned()))
    }

    /// [`RouteBuilder::resolve`] without options.
    ///
    /// # Errors
    ///
    /// Those of [`RouteBuilder::resolve`].
    pub fn resolve(destination: SocketAddr, deadline: Instant) -> Result<Self, ConnectionError> {
        Self::to(destination).resolve(deadline)
    }

    getters! { self,
        /// Opens the device. An open context of that device serves as well.
        ///
        /// # Errors
        ///
        /// Those of [`Device::open`](crate::Device::open).
        open_device: Result<Context<'static>> => self.id.open_device();

        /// The device's name.
        device_name: Option<String> => self.id.device_name();

        /// The port of the device, with which to [build](crate::QueuePairBuilder::port) the queue pair.
        port: u8 => self.id.port();

        /// Whether the device speaks iWARP. There an RDMA read's target must be memory that the peer may
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

    /// `rdma_connect`: connects, before `deadline`.
    ///
    /// The private data for the peer have up to 56 bytes (252 on iWARP; 24 less [with flow
    /// control](crate::rdmacm::PrivateData)). Both sides agree on path, MTU and outstanding reads; access
    /// rights, time-outs and retry counts are those that the queue pair was built with.
    ///
    /// On iWARP it may return later: the kernel destroys a connecting queue pair only when the peer has
    /// answered or the kernel's own time is up (10 s with Soft-iWARP). An
    /// [`AsyncChannel`](crate::AsyncChannel) and the functions for tokio leave that wait to another thread.
    ///
    /// # Errors
    ///
    /// See [`ConnectionError`]. [`Verbs`](ConnectionError::Verbs) with `EINVAL`: the private data are too
    /// long, the queue pair is not RC, or only one side has [flow
    /// control](crate::ChannelBuilder::flow_control) (a peer of this crate rejects that itself).
    ///
    /// A failure destroys the queue pair; [`prepare`](Self::prepare) gives it back.
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

    /// The first step of [`connect`](Self::connect): takes the queue pair to INIT, where it accepts receives.
    ///
    /// # Errors
    ///
    /// The route and the queue pair come back unchanged, with [`WrongDevice`](ConnectionError::WrongDevice),
    /// [`WrongPort`](ConnectionError::WrongPort) or [`Verbs`](ConnectionError::Verbs). `EINVAL`: the queue
    /// pair is not RC.
    pub fn prepare<P: Connectable>(
        self,
        prepared: P,
    ) -> Result<PendingConnection<Connected<P>>, (Self, P, ConnectionError)> {
        PendingConnection::new(self.id, prepared, None)
            .map_err(|(id, prepared, error)| (Self { id }, prepared, error))
    }
}

debug! { Route, self, peer_addr: self.peer_addr(), device: self.device_name(), port: self.port() }
