//! Streams between hosts, which programs use as those of TCP.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::hosts::{Inner, address};
use super::wire::What;

/// Accepts streams that other hosts [connect](super::Host::connect). Dropping it ends that.
pub struct SimulatedListener {
    world: Arc<Inner>,
    host: usize,
    port: u16,
    number: u64,
}

impl SimulatedListener {
    pub(super) fn new(world: &Arc<Inner>, host: usize, port: u16) -> io::Result<Self> {
        let number = world.state().wire.listen(host, port)?;
        Ok(Self { world: world.clone(), host, port, number })
    }

    /// The next stream, and the address of the host that has connected it, once there is one. A future that is dropped
    /// loses no stream.
    ///
    /// # Errors
    ///
    /// `ConnectionAborted`: the host has crashed.
    pub async fn accept(&mut self) -> io::Result<(SimulatedStream, SocketAddr)> {
        let (end, peer) = poll_fn(|cx| {
            let accepted =
                self.world.state().wire.accept(self.host, self.port, self.number, cx.waker());
            match accepted {
                None => Poll::Ready(Err(io::Error::from(io::ErrorKind::ConnectionAborted))),
                Some(None) => Poll::Pending,
                Some(Some(accepted)) => Poll::Ready(Ok(accepted)),
            }
        })
        .await?;
        let port = 49152 + (peer.end / 2 % 16384) as u16;
        let stream = SimulatedStream { world: self.world.clone(), end };
        Ok((stream, SocketAddr::new(address(peer.host), port)))
    }
}

impl Drop for SimulatedListener {
    fn drop(&mut self) {
        let waiting = self.world.state().wire.unlisten(self.host, self.port, self.number);
        waiting.into_iter().for_each(|end| self.world.reset(end));
    }
}

impl fmt::Debug for SimulatedListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimulatedListener").field("port", &self.port).finish_non_exhaustive()
    }
}

/// One end of a stream between two hosts, which has tokio's traits [`AsyncRead`] and [`AsyncWrite`].
///
/// Bytes take as long as a packet between these hosts, and none are lost: those that meet a partition arrive after it, and a
/// stream that is quiet notices none. When a host crashes, its peers are told so by `ConnectionReset`. Writing never waits.
pub struct SimulatedStream {
    world: Arc<Inner>,
    end: u64,
}

impl SimulatedStream {
    pub(super) async fn connect(
        world: Arc<Inner>,
        host: usize,
        to: usize,
        port: u16,
    ) -> io::Result<Self> {
        let end = world.state().wire.open(host, to);
        let stream = Self { world, end };
        stream.world.send(end, What::Open(port))?;
        poll_fn(|cx| match stream.world.state().wire.is_open(end, cx.waker()) {
            Ok(false) => Poll::Pending,
            Ok(true) => Poll::Ready(Ok(())),
            Err(error) => Poll::Ready(Err(error)),
        })
        .await?;
        Ok(stream)
    }
}

impl AsyncRead for SimulatedStream {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = self.world.state().wire.read(self.end, buffer.remaining(), cx.waker());
        let Some(bytes) = read? else { return Poll::Pending };
        buffer.put_slice(&bytes);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for SimulatedStream {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.world.send(self.end, What::Bytes(bytes.to_vec()))?;
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.world.send(self.end, What::End))
    }
}

impl ibverbs::tcp::AsyncStream for SimulatedStream {
    fn poll_read(&mut self, cx: &mut Context<'_>, bytes: &mut [u8]) -> Poll<io::Result<usize>> {
        let mut buffer = ReadBuf::new(bytes);
        ready!(AsyncRead::poll_read(Pin::new(self), cx, &mut buffer))?;
        Poll::Ready(Ok(buffer.filled().len()))
    }

    fn poll_write(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        AsyncWrite::poll_write(Pin::new(self), cx, bytes)
    }
}

impl Drop for SimulatedStream {
    fn drop(&mut self) {
        // Its host may have crashed, and a second end of the stream is no harm.
        let _ = self.world.send(self.end, What::End);
        self.world.state().wire.remove(self.end);
    }
}

impl fmt::Debug for SimulatedStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimulatedStream").field("end", &self.end).finish_non_exhaustive()
    }
}

impl Inner {
    /// Sends something from this end of a stream.
    pub(super) fn send(&self, end: u64, what: What) -> io::Result<()> {
        let peer = self.state().wire.peer(end)?;
        let host = self.state().wire.host(end);
        let arrival = self.arrival(host, peer.host);
        self.state().wire.send(end, arrival, what);
        Ok(())
    }

    /// Ends a stream at once.
    pub(super) fn reset(&self, end: u64) {
        let _ = self.send(end, What::Reset);
        self.state().wire.remove(end);
    }
}
