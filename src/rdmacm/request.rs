//! Peers that want to connect.

use std::net::SocketAddr;
use std::time::Instant;

use super::Connectable;
use super::connectable::Connected;
use super::connecting::{Offer, PendingAccept, PendingConnection, connect};
use super::connection::Connection;
use super::error::ConnectionError;
use super::id::Id;
use super::private_data::{Message, PrivateData};
use crate::debug::debug;
use crate::device::Context;
use crate::error::Result;
use crate::queue_pair::EnhancedConnection;

/// A peer that wants to connect, and waits for an answer. Dropping it rejects the peer.
#[must_use = "dropping it rejects the peer"]
pub struct ConnectionRequest {
    /// `None` once the request was answered.
    id: Option<Id>,
    offer: Offer,
    private_data: PrivateData,
}

impl Drop for ConnectionRequest {
    fn drop(&mut self) {
        if let Some(id) = &mut self.id {
            // If this fails, for example because the peer is gone, the identifier is destroyed next anyway.
            let _ = id.reject(&[]);
        }
    }
}

impl ConnectionRequest {
    pub(super) fn new(id: Id, offer: Offer, private_data: PrivateData) -> Self {
        Self { id: Some(id), offer, private_data }
    }

    /// The private data of the peer's request.
    pub fn private_data(&self) -> &PrivateData {
        &self.private_data
    }

    /// The address of the peer.
    #[doc(alias = "rdma_get_peer_addr")]
    #[doc(alias = "rdma_get_dst_port")]
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.id.as_ref()?.peer_addr()
    }

    /// The local address that the peer has connected to.
    #[doc(alias = "rdma_get_local_addr")]
    #[doc(alias = "rdma_get_src_port")]
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.id.as_ref()?.local_addr()
    }

    /// Opens the device on which the request arrived. An open context of that device can be used instead.
    ///
    /// # Errors
    ///
    /// Those of [`Device::open`](crate::Device::open).
    pub fn open_device(&self) -> Result<Context<'static>> {
        match &self.id {
            Some(id) => id.open_device(),
            None => Err(answered()),
        }
    }

    /// The name of the device on which the request arrived.
    pub fn device_name(&self) -> Option<String> {
        self.id.as_ref()?.device_name()
    }

    /// The port of the device on which the request arrived. A queue pair must be [built
    /// with](crate::QueuePairBuilder::port) this port.
    pub fn port(&self) -> u8 {
        self.id.as_ref().map_or(0, Id::port)
    }

    /// Whether the device speaks iWARP, where the target of an RDMA read must be memory that the peer may
    /// write.
    pub fn is_iwarp(&self) -> bool {
        self.id.as_ref().is_some_and(Id::is_iwarp)
    }

    /// `rdma_get_remote_ece`: the enhanced connection options that the peer offers.
    ///
    /// # Errors
    ///
    /// None is known.
    #[doc(alias = "rdma_get_remote_ece")]
    pub fn remote_ece(&self) -> Result<EnhancedConnection> {
        self.id.as_ref().ok_or_else(answered)?.remote_ece()
    }

    /// `rdma_set_local_ece`: answers the peer with these enhanced connection options.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the options name no vendor.
    #[doc(alias = "rdma_set_local_ece")]
    pub fn set_local_ece(&mut self, ece: EnhancedConnection) -> Result<()> {
        self.id.as_mut().ok_or_else(answered)?.set_local_ece(ece)
    }

    /// `rdma_accept`: accepts, with up to 196 bytes of private data for the peer (252 on iWARP; 24 less [with
    /// flow control](PrivateData)), and waits until the connection is established, not after `deadline`.
    ///
    /// # Errors
    ///
    ///  - [`Disconnected`](ConnectionError::Disconnected), [`Unreachable`](ConnectionError::Unreachable),
    ///    [`Rejected`](ConnectionError::Rejected): the peer has given up in the meantime.
    ///  - [`TimedOut`](ConnectionError::TimedOut): the time limit has passed.
    ///  - [`WrongDevice`](ConnectionError::WrongDevice), [`WrongPort`](ConnectionError::WrongPort): the
    ///    queue pair is not on the device and port of the request.
    ///  - [`Verbs`](ConnectionError::Verbs): the private data are too long, the queue pair is not of type
    ///    RC, only one side has [flow control](crate::ChannelBuilder::flow_control), or something failed.
    ///
    /// The queue pair is then destroyed and the peer rejected. [`prepare`](Self::prepare) returns both
    /// instead.
    #[doc(alias = "rdma_accept")]
    pub fn accept<P: Connectable>(
        mut self,
        prepared: P,
        private_data: &[u8],
        deadline: Instant,
    ) -> Result<Connection<Connected<P>>, ConnectionError> {
        let id = self.id.take().ok_or_else(answered)?;
        connect(id, prepared, Some(self.offer), private_data, deadline)
    }

    /// Takes the queue pair to INIT, where it accepts receives, and does not answer the peer yet: the first
    /// step of [`accept`](Self::accept).
    ///
    /// # Errors
    ///
    /// The request and the queue pair come back with the reason, and nothing has changed:
    ///
    ///  - [`WrongDevice`](ConnectionError::WrongDevice), [`WrongPort`](ConnectionError::WrongPort): the
    ///    queue pair is not on the device and port of the request.
    ///  - [`Verbs`](ConnectionError::Verbs): it is not of type RC, or only one side has
    ///    [flow control](crate::ChannelBuilder::flow_control) (both `EINVAL`), or the device failed.
    pub fn prepare<P: Connectable>(
        mut self,
        prepared: P,
    ) -> Result<PendingConnection<Connected<P>>, (Self, P, ConnectionError)> {
        let Some(id) = self.id.take() else { return Err((self, prepared, answered().into())) };
        let offer = self.offer;
        PendingConnection::new(id, prepared, Some(offer)).map_err(|(id, prepared, error)| {
            self.id = Some(id);
            (self, prepared, error)
        })
    }

    /// As [`prepare`](Self::prepare), but returns the queue pair or channel separately from the answer, so
    /// that receives can be posted **before** the peer is accepted. That matters on iWARP, where a message
    /// that finds no receive ends the connection.
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
    /// Those of [`prepare`](Self::prepare). The request comes back with the reason, and so does the queue
    /// pair unless it has left RESET.
    #[expect(clippy::type_complexity, reason = "what is given back is simply all there was")]
    pub fn prepare_parts<P: Connectable>(
        mut self,
        prepared: P,
    ) -> Result<(Connected<P>, PendingAccept), (Self, Option<P>, ConnectionError)> {
        let Some(id) = self.id.take() else {
            return Err((self, Some(prepared), answered().into()));
        };
        PendingAccept::new(id, prepared, self.offer).map_err(|(id, prepared, error)| {
            self.id = Some(id);
            (self, prepared, error)
        })
    }

    /// `rdma_reject`: rejects the peer, with up to 148 bytes of private data (252 on iWARP).
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the private data are too long; the peer is then rejected without them. Or the peer
    ///    is gone.
    #[doc(alias = "rdma_reject")]
    pub fn reject(mut self, private_data: &[u8]) -> Result<()> {
        Message::Reject.check("rdma_reject", private_data, self.is_iwarp())?;
        match self.id.take() {
            Some(mut id) => id.reject(private_data),
            None => Err(answered()),
        }
    }
}

/// The error for a case that cannot happen: answering consumes the request.
#[cold]
fn answered() -> crate::error::Error {
    crate::error::Error::invalid("rdma_accept", "the request was answered already")
}

debug! {
    ConnectionRequest, self,
    peer_addr: self.peer_addr(), device: self.device_name(), port: self.port(), ..
}
