//! Serving with axum over RDMA: `axum::serve(listener, app)` takes a [`Listener`].
//!
//! Handlers get the addresses of their client with
//! `app.into_make_service_with_connect_info::<RdmaConnectInfo>()` and the extractor `ConnectInfo<RdmaConnectInfo>`.

use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use ::axum::extract::connect_info::Connected;
use ::axum::serve::{self, IncomingStream};

pub use crate::info::RdmaConnectInfo;
use crate::tokio::{Listener, Stream};

impl serve::Listener for Listener {
    type Io = Stream;
    type Addr = SocketAddr;

    /// The next client. After an error, such as too many open files, it tries again a second later. When the hub was
    /// [stopped](crate::Hub::stop), there is none any more: `with_graceful_shutdown` ends the server.
    async fn accept(&mut self) -> (Stream, SocketAddr) {
        loop {
            match Listener::accept(self).await {
                Ok(accepted) => return accepted,
                Err(_) if self.is_stopped() => pending().await,
                Err(_) => ::tokio::time::sleep(Duration::from_secs(1)).await,
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        Listener::local_addr(self)
    }
}

impl Connected<IncomingStream<'_, Listener>> for RdmaConnectInfo {
    fn connect_info(stream: IncomingStream<'_, Listener>) -> Self {
        Self::of(stream.io())
    }
}
