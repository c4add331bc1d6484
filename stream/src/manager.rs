//! Connecting by the connection manager: by the address of a device, over the RDMA network alone.
//!
//! A channel is connected first and then added to the hub's loop, where its receives are posted; so an attempt that fails leaves
//! nothing in the loop. The side that accepts does both before it answers. The side that connects can do it only afterwards: so it
//! sends first, and the other one waits for that.

use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;
use std::{error, fmt};

use ibverbs::rdmacm::{
    Connecting, Connection, ConnectionControl, ConnectionError, ConnectionRequest, PendingAccept,
    Route, RouteResolution, Separate, Step,
};
use ibverbs::{Channel, PooledBuffer};
use rustix::event::PollFlags;

use crate::conn::Conn;
use crate::handshake::{Place, channel};
use crate::hub::Inner;
use crate::stream::{Addresses, Handle};
use crate::watch::PeerWatch;
use crate::wire::{HELLO, Hello, check_refused};
use crate::{Refusal, StreamError};

/// Names the peer in an error of the connection manager, which is the source then.
fn of(to: SocketAddr, error: io::Error) -> io::Error {
    match error.get_ref().is_some_and(|inner| inner.is::<ConnectionError>()) {
        true => io::Error::new(error.kind(), OfPeer { to, error }),
        false => error,
    }
}

/// An error of connecting to a peer by the connection manager.
#[derive(Debug)]
struct OfPeer {
    to: SocketAddr,
    error: io::Error,
}

impl fmt::Display for OfPeer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.to, self.error)
    }
}

impl error::Error for OfPeer {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        self.error.get_ref().map(|inner| inner as _)
    }
}

/// Connects to a listener, and waits for that.
pub(crate) fn connect(hub: &Arc<Inner>, to: SocketAddr, deadline: Instant) -> io::Result<Handle> {
    try_connect(hub, to, deadline).map_err(|error| of(to, error))
}

fn try_connect(hub: &Arc<Inner>, to: SocketAddr, deadline: Instant) -> io::Result<Handle> {
    let begun = Route::to(to).begin(deadline).map_err(kind_of)?;
    let route = finished(hub, begun, RouteResolution::step, deadline)?;
    let prepared = channel(hub)?.port(route.port()).build()?;
    let hello = hub.config.hello().to_bytes();
    let pending = route.prepare(prepared).map_err(|(.., error)| kind_of(error))?;
    let connecting = pending.start(&hello).map_err(kind_of)?;
    connected(hub, finished(hub, connecting, Connecting::step, deadline)?)
}

/// Waits until something that goes on in steps is done, or the hub is stopped.
fn finished<S: AsFd, T>(
    hub: &Inner,
    mut begun: S,
    step: impl Fn(S) -> Result<Step<T, S>, ConnectionError>,
    deadline: Instant,
) -> io::Result<T> {
    loop {
        begun = match step(begun).map_err(kind_of)? {
            Step::Done(done) => return Ok(done),
            Step::Pending(pending) => pending,
        };
        hub.wait_for(begun.as_fd(), PollFlags::IN, deadline)?;
    }
}

/// Connects a task: see [`connect`].
#[cfg(feature = "tokio")]
pub(crate) async fn connect_on_tokio(
    hub: &Arc<Inner>,
    to: SocketAddr,
    resolved_by: Instant,
) -> io::Result<Handle> {
    try_connect_on_tokio(hub, to, resolved_by).await.map_err(|error| of(to, error))
}

#[cfg(feature = "tokio")]
async fn try_connect_on_tokio(
    hub: &Arc<Inner>,
    to: SocketAddr,
    resolved_by: Instant,
) -> io::Result<Handle> {
    let route = Route::to(to).resolve_on_tokio(resolved_by).await.map_err(kind_of)?;
    let prepared = channel(hub)?.port(route.port()).build()?;
    let hello = hub.config.hello().to_bytes();
    connected(hub, route.connect_on_tokio(prepared, &hello).await.map_err(kind_of)?)
}

fn connected(hub: &Arc<Inner>, connection: Connection<Channel<'static>>) -> io::Result<Handle> {
    let peer = hello(connection.private_data())?;
    let addresses = Addresses { peer: connection.peer_addr(), local: connection.local_addr() };
    let (channel, control) = connection.into_parts();
    let mut place = adopt(hub, channel, |_| {})?;
    place.finish(|conn| conn.greets(peer), PeerWatch::Control(control.into()), addresses)
}

/// A client that was answered, and is to say that it has heard that.
pub(crate) struct Accepting {
    place: Place,
    connecting: Connecting<Separate>,
    addresses: Addresses,
}

impl Accepting {
    pub(crate) fn new(hub: &Arc<Inner>, request: ConnectionRequest) -> io::Result<Self> {
        let (place, accept, addresses) = prepare(hub, request)?;
        let hello = hub.config.hello().to_bytes();
        Ok(Self { place, connecting: accept.start(&hello).map_err(kind_of)?, addresses })
    }

    /// Goes on, without waiting. It is a stream when the client has said so.
    pub(crate) fn step(self) -> io::Result<Step<Handle, Self>> {
        let Self { place, connecting, addresses } = self;
        match connecting.step().map_err(kind_of)? {
            Step::Done(connection) => {
                finish(place, connection.into_parts().1, addresses).map(Step::Done)
            }
            Step::Pending(connecting) => Ok(Step::Pending(Self { place, connecting, addresses })),
        }
    }
}

impl AsFd for Accepting {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.connecting.as_fd()
    }
}

/// Accepts a client, and waits until that has heard of it.
#[cfg(feature = "tokio")]
pub(crate) async fn accept_on_tokio(
    hub: &Arc<Inner>,
    request: ConnectionRequest,
) -> io::Result<Handle> {
    let (place, accept, addresses) = prepare(hub, request)?;
    let hello = hub.config.hello().to_bytes();
    let control = accept.accept_on_tokio(&hello).await.map_err(kind_of)?;
    finish(place, control, addresses)
}

fn finish(
    mut place: Place,
    control: ConnectionControl,
    addresses: Addresses,
) -> io::Result<Handle> {
    place.finish(|_| {}, PeerWatch::Control(control.into()), addresses)
}

/// Whatever the client sends when it is answered finds a receive. A client that is not to be accepted is rejected.
fn prepare(
    hub: &Arc<Inner>,
    request: ConnectionRequest,
) -> io::Result<(Place, PendingAccept, Addresses)> {
    let peer = hello(request.private_data())?;
    let addresses = Addresses { peer: request.peer_addr(), local: request.local_addr() };
    let port = request.port();
    let prepared = channel(hub).and_then(|builder| Ok(builder.port(port).build()?));
    let prepared = match prepared {
        Ok(prepared) => prepared,
        Err(error) => {
            // A drop would reject the client, too, without the reason.
            let _ = request.reject(hub.refusal(&error).bytes());
            return Err(error);
        }
    };
    let (channel, accept) = match request.prepare_parts(prepared) {
        Ok(prepared) => prepared,
        Err((request, _, ConnectionError::WrongDevice)) => {
            let error = StreamError::Refused(Refusal::OtherDevice).into();
            let _ = request.reject(hub.refusal(&error).bytes());
            return Err(error);
        }
        Err((.., error)) => return Err(kind_of(error)),
    };
    Ok((adopt(hub, channel, |conn| conn.awaits(peer))?, accept, addresses))
}

/// `ibv_post_recv`: gives a channel its place in the loop.
fn adopt(
    hub: &Arc<Inner>,
    channel: Channel<'static>,
    begin: impl FnOnce(&mut Conn<PooledBuffer>),
) -> io::Result<Place> {
    let mut state = hub.lock_with_buffers(1)?;
    state.has_room()?;
    let id = match state.lp.add(channel) {
        Ok(id) => id,
        Err(failed) => {
            drop(state);
            return Err(failed.error.into());
        }
    };
    let added = state.add(id);
    if let Some(member) = state.member(id) {
        begin(&mut member.conn);
    }
    drop(state);
    let place = Place::new(hub, id);
    added.map(|()| place)
}

/// Reads the peer's hello. Zeros may follow it.
fn hello(private_data: &[u8]) -> io::Result<Hello> {
    Ok(Hello::from_bytes(private_data.get(..HELLO).unwrap_or(private_data))?)
}

/// Returns the kind of a stream's `io::Error`: a peer that goes away refuses.
fn kind_of(error: ConnectionError) -> io::Error {
    match error {
        ConnectionError::Disconnected => io::Error::new(ErrorKind::ConnectionRefused, error),
        ConnectionError::Rejected(rejection) => {
            check_refused(rejection.private_data()).map_or_else(io::Error::from, |()| error.into())
        }
        error => error.into(),
    }
}
