//! A key-value store over RDMA, on tokio. It has no line of `unsafe`.
//!
//! Requests and answers are messages. A value of up to 4 KiB is a part of its message. A larger one, of up to
//! 1 MiB, is read from the other side's memory: the server reads what a client puts, and a client reads what
//! it gets. Each client has a channel. The server has a reactor per core, each on a thread of its own, with its clients.
//!
//! - `protocol`: the messages
//! - `store`: the values
//! - `server`: clients that come and go, the admin socket, the timer, shutting down
//! - `shared`: what its sessions share
//! - `session`: one client of the server
//! - `client`: the other side, which connects again after a failure
//! - `load`: clients that check every answer, or measure
//! - `plain`: the same store over TCP, for comparison

#![forbid(unsafe_code)]
#![allow(missing_docs, missing_debug_implementations)] // an example

pub mod client;
pub mod load;
pub mod plain;
pub mod protocol;
pub mod server;
mod session;
mod shared;
mod store;

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use ibverbs::channel::AnyBuffer;
use ibverbs::future::Locked;
use ibverbs::tcp::AsyncStream;
use ibverbs::{PooledBuffer, completion::WorkSuccess};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};

pub type Failure = Box<dyn std::error::Error + Send + Sync>;
pub type Result<T, E = Failure> = std::result::Result<T, E>;

/// Messages are in pooled buffers, and large values in memory of their own.
pub(crate) type Share = Locked<AnyBuffer>;

/// The message in a buffer.
pub(crate) fn message((buffer, _): (AnyBuffer, WorkSuccess)) -> Result<PooledBuffer> {
    buffer.downcast().map_err(|_| "that is no buffer for messages".into())
}

/// A byte stream by which both sides find each other: TCP, or one of a simulated network in tests.
pub trait Stream: AsyncStream + AsyncRead + AsyncWrite + Unpin + Send + 'static {}

impl<S: AsyncStream + AsyncRead + AsyncWrite + Unpin + Send + 'static> Stream for S {}

/// How a client reaches the server.
pub trait Connect: Send + Sync {
    type Stream: Stream;
    fn connect(&self) -> impl Future<Output = io::Result<Self::Stream>> + Send;
}

impl Connect for SocketAddr {
    type Stream = TcpStream;

    async fn connect(&self) -> io::Result<TcpStream> {
        TcpStream::connect(self).await
    }
}

/// How the server gets its clients. An `accept` that is dropped loses none.
pub trait Accept: Send {
    type Stream: Stream;
    fn accept(&mut self) -> impl Future<Output = io::Result<(Self::Stream, SocketAddr)>> + Send;
}

impl Accept for TcpListener {
    type Stream = TcpStream;

    async fn accept(&mut self) -> io::Result<(TcpStream, SocketAddr)> {
        let (stream, address) = TcpListener::accept(self).await?;
        keep_alive(&stream)?;
        Ok((stream, address))
    }
}

/// Lets the kernel find out within seconds that the other machine is gone, also while nothing is sent.
fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    let second = Duration::from_secs(1);
    let probes =
        TcpKeepalive::new().with_time(5 * second).with_interval(2 * second).with_retries(3);
    SockRef::from(stream).set_tcp_keepalive(&probes)
}
