//! Waiting for peers that want to connect.

use std::marker::PhantomData;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::time::Instant;

use super::connectable::Connected;
use super::connecting::{Offer, PendingAccept, PendingConnection, connect};
use super::connection::Connection;
use super::error::ConnectionError;
use super::event::{ConnectionEventKind, Copied, EventChannel};
use super::id::Id;
use super::private_data::{Message, PrivateData};
use super::{Connectable, WAIT};
use crate::base::{Result, debug, ffi, getters, setters};
use crate::verbs::device::{Context, event_file};
use crate::verbs::queue_pair::EnhancedConnection;

/// The options of a [`Listener`].
#[derive(Clone, Debug)]
#[must_use]
pub struct ListenerBuilder {
    address: SocketAddr,
    backlog: u32,
    reuse_address: bool,
    only_ipv6: bool,
}

impl ListenerBuilder {
    setters! { self,
        /// How many requests may wait (default: 128; 0: the kernel's maximum, `net.rdma_ucm.max_backlog`).
        /// Beyond that, InfiniBand and RoCE peers get no answer and retry seconds later; iWARP peers are
        /// rejected.
        backlog(value: u32) => self.backlog = value;

        /// `RDMA_OPTION_ID_REUSEADDR`: whether the address may be in use already (default: no).
        #[doc(alias = "rdma_set_option")]
        #[doc(alias = "RDMA_OPTION_ID_REUSEADDR")]
        reuse_address(value: bool) => self.reuse_address = value;

        /// `RDMA_OPTION_ID_AFONLY`: whether the address `::` stands for IPv6 alone (default: no).
        #[doc(alias = "RDMA_OPTION_ID_AFONLY")]
        only_ipv6(value: bool) => self.only_ipv6 = value;
    }

    /// `rdma_bind_addr`, `rdma_listen`: listens for connections.
    ///
    /// # Errors
    ///
    ///  - `EADDRINUSE`: something listens at this address and port already.
    ///  - `EADDRNOTAVAIL`: something has the port already, and one of the two asks for all addresses; or the address is not
    ///    that of an RDMA device here. The error says which.
    ///  - `ENODEV`: the address is not that of an RDMA device here.
    ///  - `EACCES`: the port is privileged.
    ///  - `ENOENT`, `EACCES` and others of `rdma_create_event_channel`: `/dev/infiniband/rdma_cm` is missing,
    ///    wrong, or may not be opened.
    #[doc(alias = "rdma_bind_addr")]
    #[doc(alias = "rdma_listen")]
    pub fn bind(self) -> Result<Listener> {
        self.bind_in(ffi::rdma_port_space::RDMA_PS_TCP)
    }

    pub(super) fn bind_in<R>(self, port_space: ffi::rdma_port_space) -> Result<Listener<R>> {
        let mut id = Id::new(port_space)?;
        if self.reuse_address {
            id.set_option(ffi::RDMA_OPTION_ID_REUSEADDR.0, 1_i32)?;
        }
        if self.only_ipv6 {
            id.set_option(ffi::RDMA_OPTION_ID_AFONLY.0, 1_i32)?;
        }
        id.bind(self.address)?;
        id.listen(self.backlog)?;
        Ok(Listener { id, spare: None, requests: PhantomData })
    }
}

/// Listens for peers: for those that want a connection, or, as a
/// [`DatagramListener`](crate::rdmacm::DatagramListener), for those that want to exchange datagrams.
///
/// ```no_run
/// # // needs a peer
/// use std::time::{Duration, Instant};
/// use ibverbs::rdmacm::Listener;
/// use ibverbs::Channel;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut listener = Listener::bind("10.77.0.1:7471".parse()?)?;
/// let request = listener.next()?;
/// let context = request.open_device()?;
/// let domain = context.alloc_pd()?;
/// let prepared = Channel::builder(&domain).port(request.port()).build()?;
/// let mut channel = request.accept(prepared, b"", Instant::now() + Duration::from_secs(5))?;
/// # Ok(())
/// # }
/// ```
#[doc(alias = "rdma_create_event_channel")]
#[doc(alias = "rdma_create_id")]
pub struct Listener<R = ConnectionRequest> {
    id: Id,
    /// Opened before the next request is read, so none is lost when files run out. Each request moves to a channel of its
    /// own.
    spare: Option<EventChannel>,
    requests: PhantomData<fn() -> R>,
}

pub(super) mod sealed {
    use super::{Copied, Id};

    /// An event with an identifier of its own.
    #[expect(missing_debug_implementations, reason = "no program can name it")]
    pub struct Asked(pub(in crate::connect::rdmacm) Id, pub(in crate::connect::rdmacm) Copied);

    /// What a peer asks for.
    pub trait Request {
        fn new(asked: Asked) -> Self;
    }
}

impl Listener {
    /// The options for listening at `address`.
    pub fn builder(address: SocketAddr) -> ListenerBuilder {
        ListenerBuilder { address, backlog: 128, reuse_address: false, only_ipv6: false }
    }

    /// [`ListenerBuilder::bind`] without options.
    ///
    /// With port 0 the kernel chooses the port. `0.0.0.0` and `::` stand for all devices.
    ///
    /// # Errors
    ///
    /// Those of [`ListenerBuilder::bind`].
    pub fn bind(address: SocketAddr) -> Result<Self> {
        Self::builder(address).bind()
    }
}

impl<R: sealed::Request> Listener<R> {
    /// The address, with the port that the kernel has chosen. `None` if it is neither IPv4 nor IPv6.
    #[doc(alias = "rdma_get_local_addr")]
    #[doc(alias = "rdma_get_src_port")]
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.id.local_addr()
    }

    /// Waits for a peer.
    ///
    /// # Errors
    ///
    ///  - `EMFILE`, `ENFILE`, `ENOMEM`: the process can open no file for the request, which stays queued.
    ///  - `ENODEV`: the device of the address was removed.
    #[doc(alias = "rdma_migrate_id")]
    #[expect(clippy::should_implement_trait, reason = "it never ends, and may fail and go on")]
    pub fn next(&mut self) -> Result<R> {
        self.next_before(None)
    }

    /// [`next`](Self::next), not after `deadline`.
    ///
    /// # Errors
    ///
    /// Those of `next`; `ETIMEDOUT`: no peer came.
    pub fn next_until(&mut self, deadline: Instant) -> Result<R> {
        self.next_before(Some(deadline))
    }

    fn next_before(&mut self, deadline: Option<Instant>) -> Result<R> {
        event_file::take_before(WAIT, self.id.as_fd().as_raw_fd(), deadline, || self.try_next())
    }

    /// [`next`](Self::next) without waiting.
    ///
    /// # Errors
    ///
    /// Those of `next`.
    pub fn try_next(&mut self) -> Result<Option<R>> {
        loop {
            let spare = self.spare.take().map_or_else(EventChannel::new, Ok)?;
            match self.id.next() {
                Ok(Some(event)) => {
                    if let Some(request) = self.take(event, spare)? {
                        return Ok(Some(request));
                    }
                }
                nothing => {
                    self.spare = Some(spare);
                    return nothing.map(|_| None);
                }
            }
        }
    }

    fn take(&mut self, event: Copied, spare: EventChannel) -> Result<Option<R>> {
        if let Some(raw) = event.request {
            // SAFETY: nothing else knows the identifier, which came with the event. The event is acknowledged, and its
            // channel is ours and live.
            let id = unsafe { Id::migrate(raw, spare) }?;
            return Ok(Some(R::new(sealed::Asked(id, event))));
        }
        self.spare = Some(spare);
        if event.kind() == ConnectionEventKind::DeviceRemoved {
            // The kernel waits for the destroy. After it every call fails.
            let _ = self.id.destroy();
        }
        Ok(None)
    }
}

impl<R> AsFd for Listener<R> {
    /// Readable when [`try_next`](Self::try_next) has work.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.id.as_fd()
    }
}

debug! { impl[R] Listener<R>, self, local_addr: self.id.local_addr(), .. }

/// A peer that waits for an answer. Dropping it rejects the peer.
#[must_use = "dropping it rejects the peer"]
pub struct ConnectionRequest {
    /// `None` once answered, which consumes the request.
    id: Option<Id>,
    offer: Offer,
    private_data: PrivateData,
}

impl Drop for ConnectionRequest {
    fn drop(&mut self) {
        if let Some(id) = &mut self.id {
            // The identifier is destroyed next.
            let _ = id.reject(&[]);
        }
    }
}

impl sealed::Request for ConnectionRequest {
    fn new(sealed::Asked(id, event): sealed::Asked) -> Self {
        let Copied { responder_resources, initiator_depth, .. } = event;
        let (credit_word, private_data) = event.public.private_data.split();
        let offer = Offer { responder_resources, initiator_depth, credit_word };
        Self { id: Some(id), offer, private_data }
    }
}

impl ConnectionRequest {
    fn id(&self) -> &Id {
        self.id.as_ref().expect("not answered")
    }

    fn take_id(&mut self) -> Id {
        self.id.take().expect("not answered")
    }

    getters! { self,
        /// The private data of the request.
        private_data: &PrivateData => &self.private_data;

        /// The address of the peer.
        #[doc(alias = "rdma_get_peer_addr")]
        #[doc(alias = "rdma_get_dst_port")]
        peer_addr: Option<SocketAddr> => self.id().peer_addr();

        /// The local address that the peer connects to.
        #[doc(alias = "rdma_get_local_addr")]
        #[doc(alias = "rdma_get_src_port")]
        local_addr: Option<SocketAddr> => self.id().local_addr();

        /// Opens the request's device. An open context of that device serves as well.
        ///
        /// # Errors
        ///
        /// Those of [`Device::open`](crate::Device::open).
        open_device: Result<Context<'static>> => self.id().open_device();

        /// The name of the request's device.
        device_name: Option<String> => self.id().device_name();

        /// The request's port, with which to [build](crate::QueuePairBuilder::port) the queue pair.
        port: u8 => self.id().port();

        /// Whether the device speaks iWARP. There an RDMA read's target must be memory that the peer may write.
        is_iwarp: bool => self.id().is_iwarp();

        /// `rdma_get_remote_ece`: the peer's enhanced connection options.
        ///
        /// # Errors
        ///
        /// None is known.
        #[doc(alias = "rdma_get_remote_ece")]
        remote_ece: Result<EnhancedConnection> => self.id().remote_ece();
    }

    /// `rdma_set_local_ece`: answers the peer with these enhanced connection options.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the options name no vendor.
    #[doc(alias = "rdma_set_local_ece")]
    pub fn set_local_ece(&mut self, ece: EnhancedConnection) -> Result<()> {
        self.id.as_mut().expect("not answered").set_local_ece(ece)
    }

    /// `rdma_accept`: accepts the peer and waits until the connection is established, not after `deadline`.
    ///
    /// The private data have up to 196 bytes (252 on iWARP; 24 less [with flow control](PrivateData)).
    ///
    /// # Errors
    ///
    /// See [`ConnectionError`]. [`Disconnected`](ConnectionError::Disconnected),
    /// [`Unreachable`](ConnectionError::Unreachable) and [`Rejected`](ConnectionError::Rejected): the peer
    /// has given up. [`Verbs`](ConnectionError::Verbs) with `EINVAL`: the private data are too long, the
    /// queue pair is not RC, or only one side has [flow control](crate::ChannelBuilder::flow_control).
    ///
    /// A failure destroys the queue pair and rejects the peer; [`prepare`](Self::prepare) gives both back.
    #[doc(alias = "rdma_accept")]
    pub fn accept<P: Connectable>(
        mut self,
        prepared: P,
        private_data: &[u8],
        deadline: Instant,
    ) -> Result<Connection<Connected<P>>, ConnectionError> {
        connect(self.take_id(), prepared, Some(self.offer), private_data, deadline)
    }

    /// The first step of [`accept`](Self::accept): takes the queue pair to INIT, where it accepts receives.
    ///
    /// # Errors
    ///
    /// The request and the queue pair come back unchanged, with
    /// [`WrongDevice`](ConnectionError::WrongDevice), [`WrongPort`](ConnectionError::WrongPort) or
    /// [`Verbs`](ConnectionError::Verbs). `EINVAL`: the queue pair is not RC, or only one side has [flow
    /// control](crate::ChannelBuilder::flow_control).
    pub fn prepare<P: Connectable>(
        mut self,
        prepared: P,
    ) -> Result<PendingConnection<Connected<P>>, (Self, P, ConnectionError)> {
        let (id, offer) = (self.take_id(), self.offer);
        PendingConnection::new(id, prepared, Some(offer)).map_err(|(id, prepared, error)| {
            self.id = Some(id);
            (self, prepared, error)
        })
    }

    /// [`prepare`](Self::prepare), with the queue pair or channel separate from the answer: the program can
    /// post receives **before** it accepts. On iWARP a message that finds no receive ends the connection.
    ///
    /// ```no_run
    /// # // needs a peer
    /// # use std::time::{Duration, Instant};
    /// # use ibverbs::rdmacm::Listener;
    /// # use ibverbs::Channel;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let mut listener = Listener::bind("10.77.0.1:7471".parse()?)?;
    /// # let request = listener.next()?;
    /// # let context = request.open_device()?;
    /// # let domain = context.alloc_pd()?;
    /// let mut region = domain.allocate::<u8>(64)?;
    /// let prepared = Channel::builder(&domain).port(request.port()).build()?;
    /// let (mut channel, accept) = request.prepare_parts(prepared).map_err(|(.., error)| error)?;
    /// let room = region.slice_mut(..)?;
    /// let mut control = None;
    /// channel.scope(|scope| {
    ///     let receive = scope.post_receive(room)?;
    ///     control = accept.accept(b"", Instant::now() + Duration::from_secs(5)).ok();
    ///     if control.is_some() {
    ///         receive.wait()?;
    ///     }
    ///     Ok::<_, ibverbs::TransportError>(())
    /// })?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`prepare`](Self::prepare). The queue pair comes back unless it has left RESET.
    #[expect(clippy::type_complexity, reason = "what is given back is simply all there was")]
    pub fn prepare_parts<P: Connectable>(
        mut self,
        prepared: P,
    ) -> Result<(Connected<P>, PendingAccept), (Self, Option<P>, ConnectionError)> {
        let (id, offer) = (self.take_id(), self.offer);
        PendingAccept::new(id, prepared, offer).map_err(|(id, prepared, error)| {
            self.id = Some(id);
            (self, prepared, error)
        })
    }

    /// `rdma_reject`: rejects the peer, with up to 148 bytes of private data (252 on iWARP).
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the private data are too long, and the peer is rejected without them; or the peer is
    ///    gone.
    #[doc(alias = "rdma_reject")]
    pub fn reject(mut self, private_data: &[u8]) -> Result<()> {
        Message::Reject.check("rdma_reject", private_data, self.is_iwarp())?;
        self.take_id().reject(private_data)
    }
}

debug! {
    ConnectionRequest, self,
    peer_addr: self.peer_addr(), device: self.device_name(), port: self.port(), ..
}
