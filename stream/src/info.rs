//! Connection info of a request.

use std::net::SocketAddr;

use crate::tokio::Stream;

/// Connection info of a request: the addresses of the TCP stream over which the two sides have connected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RdmaConnectInfo {
    /// The address of this side.
    pub local_addr: Option<SocketAddr>,
    /// The address of the client.
    pub remote_addr: Option<SocketAddr>,
}

impl RdmaConnectInfo {
    pub(crate) fn of(stream: &Stream) -> Self {
        Self { local_addr: stream.local_addr().ok(), remote_addr: stream.peer_addr().ok() }
    }
}
