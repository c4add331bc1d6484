//! The waits of this module as futures on tokio.
//!
//! A step reads its event without waiting, so dropping a future loses none.

use std::os::fd::AsFd;
use std::time::Instant;
use tokio::task::consume_budget;

use super::connectable::{Connected, sealed};
use super::connecting::{Connecting, PendingAccept};
use super::connection::{Connection, ConnectionControl};
use super::error::ConnectionError;
use super::event::ConnectionEvent;
use super::listener::{ConnectionRequest, Listener};
use super::route::{Route, RouteBuilder, RouteResolution};
use super::{Connectable, Step};
use crate::base::Result;
use crate::verbs::device::on_tokio::readable;

async fn finish<P: AsFd, D>(
    mut pending: P,
    step: impl Fn(P) -> Result<Step<D, P>, ConnectionError>,
) -> Result<D, ConnectionError> {
    loop {
        match step(pending)? {
            Step::Done(done) => return Ok(done),
            Step::Pending(still) => pending = still,
        }
        readable(pending.as_fd()).await?;
    }
}

/// Other tasks get their turn.
async fn next<P: AsFd, T>(source: &mut P, take: impl Fn(&mut P) -> Result<Option<T>>) -> Result<T> {
    loop {
        consume_budget().await;
        if let Some(found) = take(source)? {
            return Ok(found);
        }
        readable(source.as_fd()).await?;
    }
}

impl RouteBuilder {
    /// [`resolve`](Self::resolve) on tokio. Dropping the future gives up.
    ///
    /// # Errors
    ///
    /// Those of [`resolve`](Self::resolve), and of tokio when it registers the descriptor.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with I/O ([`enable_io`](tokio::runtime::Builder::enable_io)).
    pub async fn resolve_on_tokio(self, deadline: Instant) -> Result<Route, ConnectionError> {
        self.begin(deadline)?.finish_on_tokio().await
    }
}

impl RouteResolution {
    /// [`finish`](Self::finish) on tokio.
    ///
    /// # Errors
    ///
    /// Those of [`RouteBuilder::resolve_on_tokio`].
    ///
    /// # Panics
    ///
    /// As [`RouteBuilder::resolve_on_tokio`].
    pub async fn finish_on_tokio(self) -> Result<Route, ConnectionError> {
        finish(self, Self::step).await
    }
}

impl Route {
    /// [`connect`](Self::connect) on tokio, also for a
    /// [`PreparedAsyncChannel`](crate::future::PreparedAsyncChannel).
    ///
    /// Only the kernel sets a deadline. To give up, drop the future: that tells the peer if possible. On
    /// Soft-iWARP the kernel makes the TCP connection within `rdma_connect`, which blocks the thread.
    ///
    /// ```no_run
    /// # // needs a peer
    /// # use std::time::{Duration, Instant};
    /// # use ibverbs::rdmacm::Route;
    /// # use ibverbs::{Channel, PooledBuffer, Reactor};
    /// # async fn connect(reactor: &Reactor, domain: &std::sync::Arc<ibverbs::ProtectionDomain<'static>>, hello: PooledBuffer) -> Result<(), Box<dyn std::error::Error>> {
    /// let deadline = Instant::now() + Duration::from_secs(5);
    /// let route = Route::to("10.77.0.2:7471".parse()?).resolve_on_tokio(deadline).await?;
    /// let prepared = reactor.prepare(Channel::builder(domain).port(route.port()))?;
    /// let channel = route.connect_on_tokio(prepared, b"").await?;
    /// channel.send(hello).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`connect`](Self::connect) but the caller's deadline, and of tokio when it registers the
    /// descriptor.
    ///
    /// # Panics
    ///
    /// As [`RouteBuilder::resolve_on_tokio`].
    pub async fn connect_on_tokio<P: Connectable>(
        self,
        prepared: P,
        private_data: &[u8],
    ) -> Result<Connection<Connected<P>>, ConnectionError>
    where
        Connected<P>: Send + 'static,
    {
        let pending = self.prepare(prepared).map_err(|(.., error)| error)?;
        pending.start(private_data)?.finish_on_tokio().await
    }
}

impl<Q: sealed::Connected> Connecting<Q> {
    /// [`finish`](Self::finish) on tokio. Dropping the future gives up, and tells the peer if possible; on
    /// iWARP another thread waits for that.
    ///
    /// # Errors
    ///
    /// Those of [`Route::connect_on_tokio`].
    ///
    /// # Panics
    ///
    /// As [`RouteBuilder::resolve_on_tokio`].
    pub async fn finish_on_tokio(mut self) -> Result<Connection<Q>, ConnectionError>
    where
        Q: Send + 'static,
    {
        self.attempt.give_up_elsewhere();
        finish(self, Self::step).await
    }
}

impl Listener {
    /// [`next`](Self::next) on tokio. Dropping the future loses no request.
    ///
    /// # Errors
    ///
    /// Those of [`next`](Self::next), and of tokio when it registers the descriptor.
    ///
    /// # Panics
    ///
    /// As [`RouteBuilder::resolve_on_tokio`].
    pub async fn next_on_tokio(&mut self) -> Result<ConnectionRequest> {
        next(self, Self::try_next).await
    }
}

impl ConnectionRequest {
    /// [`accept`](Self::accept) on tokio, also for a
    /// [`PreparedAsyncChannel`](crate::future::PreparedAsyncChannel).
    ///
    /// Only the kernel sets a deadline. To give up, drop the future: that rejects the peer.
    ///
    /// ```no_run
    /// # // needs a peer
    /// # use ibverbs::rdmacm::Listener;
    /// # use ibverbs::{BufferPool, Channel, Reactor};
    /// # async fn serve(reactor: &Reactor, domain: &std::sync::Arc<ibverbs::ProtectionDomain<'static>>, pool: &BufferPool, listener: &mut Listener) -> Result<(), Box<dyn std::error::Error>> {
    /// let request = listener.next_on_tokio().await?;
    /// let mut prepared = reactor.prepare(Channel::builder(domain).port(request.port()))?;
    /// let channel = request.accept_on_tokio(prepared, b"").await?;
    /// let (message, success) = channel.receive(pool.take().ok_or("all buffers are in use")?).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`accept`](Self::accept) but the caller's deadline, and of tokio when it registers the
    /// descriptor.
    ///
    /// # Panics
    ///
    /// As [`RouteBuilder::resolve_on_tokio`].
    pub async fn accept_on_tokio<P: Connectable>(
        self,
        prepared: P,
        private_data: &[u8],
    ) -> Result<Connection<Connected<P>>, ConnectionError>
    where
        Connected<P>: Send + 'static,
    {
        let pending = self.prepare(prepared).map_err(|(.., error)| error)?;
        pending.start(private_data)?.finish_on_tokio().await
    }
}

impl PendingAccept {
    /// [`accept`](Self::accept) on tokio. Dropping the future rejects the peer.
    ///
    /// # Errors
    ///
    /// Those of [`ConnectionRequest::accept_on_tokio`].
    ///
    /// # Panics
    ///
    /// As [`RouteBuilder::resolve_on_tokio`].
    pub async fn accept_on_tokio(
        self,
        private_data: &[u8],
    ) -> Result<ConnectionControl, ConnectionError> {
        let connection = self.start(private_data)?.finish_on_tokio().await?;
        Ok(connection.into_parts().1)
    }
}

impl<Q: sealed::Connected> Connection<Q> {
    /// Waits for an [`event`](Self::event) on tokio. Dropping the future loses none.
    ///
    /// # Errors
    ///
    /// Those of [`event`](Self::event), and of tokio when it registers the descriptor.
    ///
    /// # Panics
    ///
    /// As [`RouteBuilder::resolve_on_tokio`].
    pub async fn event_on_tokio(&mut self) -> Result<ConnectionEvent> {
        next(self, Self::event).await
    }
}

impl ConnectionControl {
    /// Waits for an [`event`](Self::event) on tokio. Dropping the future loses none.
    ///
    /// # Errors
    ///
    /// Those of [`Connection::event_on_tokio`].
    ///
    /// # Panics
    ///
    /// As [`RouteBuilder::resolve_on_tokio`].
    pub async fn event_on_tokio(&mut self) -> Result<ConnectionEvent> {
        next(self, Self::event).await
    }
}
