//! Connecting the client of hyper-util, and tonic's, over RDMA.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::Uri;
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use tower_service::Service;

use crate::Hub;
use crate::tokio::Stream;

/// Connects to the host and the port of an `http` URI (80 without one): for `hyper_util::client::legacy::Client`, and for
/// `tonic::transport::Endpoint::connect_with_connector`. The stream is not encrypted, so a URI of `https`, or of another scheme, is
/// an error: see [`any_scheme`](Self::any_scheme).
#[derive(Clone, Debug)]
pub struct Connector {
    hub: Hub,
    takes_any_scheme: bool,
    #[cfg(feature = "rdmacm")]
    by_manager: bool,
}

impl Connector {
    /// With the streams of this hub.
    pub fn new(hub: &Hub) -> Self {
        Self {
            hub: hub.clone(),
            takes_any_scheme: false,
            #[cfg(feature = "rdmacm")]
            by_manager: false,
        }
    }

    /// Does what [`new`](Self::new) does, by the [connection manager](Stream::connect_rdmacm).
    #[cfg(feature = "rdmacm")]
    pub fn rdmacm(hub: &Hub) -> Self {
        Self { by_manager: true, ..Self::new(hub) }
    }

    /// Connects whatever the scheme is (port 443 for `https`), for a connector that puts TLS on the stream.
    #[must_use]
    pub fn any_scheme(self) -> Self {
        Self { takes_any_scheme: true, ..self }
    }
}

impl Service<Uri> for Connector {
    type Response = TokioIo<Stream>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<TokioIo<Stream>>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let this = self.clone();
        Box::pin(async move {
            let scheme = uri.scheme_str().unwrap_or("http");
            if !this.takes_any_scheme && scheme != "http" {
                let reason = format!(
                    "the stream is not encrypted, and the URI is of {scheme}: see `Connector::any_scheme`"
                );
                return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
            }
            let default = if uri.scheme_str() == Some("https") { 443 } else { 80 };
            let reason = || io::Error::new(io::ErrorKind::InvalidInput, "the URI names no host");
            // An address of IPv6 is in brackets there.
            let host = uri.host().ok_or_else(reason)?.trim_matches(['[', ']']);
            let port = uri.port_u16().unwrap_or(default);
            #[cfg(feature = "rdmacm")]
            if this.by_manager {
                return Stream::connect_rdmacm(&this.hub, (host, port)).await.map(TokioIo::new);
            }
            Stream::connect(&this.hub, (host, port)).await.map(TokioIo::new)
        })
    }
}

impl Connection for Stream {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}
