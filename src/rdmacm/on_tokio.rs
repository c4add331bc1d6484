//! The waits of this module as futures on tokio.
//!
//! Each takes the steps that an event loop would take, and waits for the file in between. Dropping one loses no event:
//! an event is read in a step, and a step waits for nothing.

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
use crate::device::on_tokio::readable;
use crate::error::Result;

/// Takes the steps of something until it is done.
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

/// Waits until `take` finds something. Other tasks get their turn, however much there is.
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
    /// As [`resolve`](Self::resolve), on tokio. The kernel gives up at `deadline`. Dropping the future gives up.
    ///
    /// # Errors
    ///
    /// Those of [`resolve`](Self::resolve), and what tokio reports when it registers the descriptor.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime whose I/O is enabled
    /// ([`enable_io`](tokio::runtime::Builder::enable_io)).
    #[doc(alias = "rdma_resolve_addr")]
    #[doc(alias = "rdma_resolve_route")]
    pub async fn resolve_on_tokio(self, deadline: Instant) -> Result<Route, ConnectionError> {
        self.begin(deadline)?.finish_on_tokio().await
    }
}

impl RouteResolution {
    /// As [`finish`](Self::finish), on tokio.
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
    /// As [`connect`](Self::connect), on tokio. For a [`PreparedAsyncChannel`](crate::future::PreparedAsyncChannel) as well as
    /// for the other types.
    ///
    /// There is no deadline but the kernel's: drop the future when the program's own timer says so. That gives up, and
    /// tells the peer if possible. With Soft-iWARP the thread waits for the TCP connection, which the kernel makes within
    /// `rdma_connect`.
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
    /// Those of [`connect`](Self::connect) but the caller's time limit, and what tokio reports when it registers the
    /// descriptor.
    ///
    /// # Panics
    ///
    /// As [`RouteBuilder::resolve_on_tokio`].
    #[doc(alias = "rdma_connect")]
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
    /// As [`finish`](Self::finish), on tokio. Dropping the future gives up, and tells the peer if possible. No thread of
    /// the runtime waits for that on iWARP: another one does.
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
    /// As [`next`](Self::next), on tokio. Dropping the future loses no request.
    ///
    /// # Errors
    ///
    /// Those of [`next`](Self::next), and what tokio reports when it registers the descriptor.
    ///
    /// # Panics
    ///
    /// As [`RouteBuilder::resolve_on_tokio`].
    pub async fn next_on_tokio(&mut self) -> Result<ConnectionRequest> {
        next(self, Self::try_next).await
    }
}

impl ConnectionRequest {
    /// As [`accept`](Self::accept), on tokio. For a [`PreparedAsyncChannel`](crate::future::PreparedAsyncChannel) as well as for
    /// the other types.
    ///
    /// There is no deadline but the kernel's: drop the future when the program's own timer says so. That rejects the
    /// peer.
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
    /// Those of [`accept`](Self::accept) but the caller's time limit, and what tokio reports when it registers the
    /// descriptor.
    ///
    /// # Panics
    ///
    /// As [`RouteBuilder::resolve_on_tokio`].
    #[doc(alias = "rdma_accept")]
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
    /// As [`accept`](Self::accept), on tokio. Dropping the future rejects the peer.
    ///
    /// # Errors
    ///
    /// Those of [`ConnectionRequest::accept_on_tokio`].
    ///
    /// # Panics
    ///
    /// As [`RouteBuilder::resolve_on_tokio`].
    #[doc(alias = "rdma_accept")]
    pub async fn accept_on_tokio(
        self,
        private_data: &[u8],
    ) -> Result<ConnectionControl, ConnectionError> {
        let connection = self.start(private_data)?.finish_on_tokio().await?;
        Ok(connection.into_parts().1)
    }
}

impl<Q: sealed::Connected> Connection<Q> {
    /// As [`event`](Self::event), on tokio, but waits for an event. Dropping the future loses none.
    ///
    /// # Errors
    ///
    /// Those of [`event`](Self::event), and what tokio reports when it registers the descriptor.
    ///
    /// # Panics
    ///
    /// As [`RouteBuilder::resolve_on_tokio`].
    #[doc(alias = "rdma_get_cm_event")]
    pub async fn event_on_tokio(&mut self) -> Result<ConnectionEvent> {
        next(self, Self::event).await
    }
}

impl ConnectionControl {
    /// As [`event`](Self::event), on tokio, but waits for an event. Dropping the future loses none.
    ///
    /// # Errors
    ///
    /// Those of [`event`](Self::event), and what tokio reports when it registers the descriptor.
    ///
    /// # Panics
    ///
    /// As [`RouteBuilder::resolve_on_tokio`].
    #[doc(alias = "rdma_get_cm_event")]
    pub async fn event_on_tokio(&mut self) -> Result<ConnectionEvent> {
        next(self, Self::event).await
    }
}
