//! Serving with tonic over RDMA. Its client connects with [`Connector`](crate::hyper::Connector).

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use ::tonic::transport::server::Connected;

use crate::tokio::{Listener, Stream};

/// What a request says of its connection: the addresses of the TCP stream over which the two sides have connected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RdmaConnectInfo {
    /// That of this side.
    pub local_addr: Option<SocketAddr>,
    /// That of the client.
    pub remote_addr: Option<SocketAddr>,
}

impl Connected for Stream {
    type ConnectInfo = RdmaConnectInfo;

    fn connect_info(&self) -> RdmaConnectInfo {
        RdmaConnectInfo { local_addr: self.local_addr().ok(), remote_addr: self.peer_addr().ok() }
    }
}

/// The streams of a listener, for `tonic::transport::Server::serve_with_incoming`. It ends, and the server with it, when the hub is
/// [stopped](crate::Hub::stop).
#[derive(Debug)]
pub struct Incoming(Listener);

impl From<Listener> for Incoming {
    fn from(listener: Listener) -> Self {
        Self(listener)
    }
}

impl futures_core::Stream for Incoming {
    type Item = io::Result<Stream>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_accept(cx).map(|accepted| match accepted {
            Err(_) if self.0.is_stopped() => None,
            accepted => Some(accepted.map(|(stream, _)| stream)),
        })
    }
}
