//! Serving with tonic over RDMA. Its client connects with [`Connector`](crate::hyper::Connector).

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use ::tonic::transport::server::Connected;

pub use crate::info::RdmaConnectInfo;
use crate::tokio::{Listener, Stream};

impl Connected for Stream {
    type ConnectInfo = RdmaConnectInfo;

    fn connect_info(&self) -> RdmaConnectInfo {
        RdmaConnectInfo::of(self)
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
