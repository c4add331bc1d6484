//! Streams that are being connected: the crate's exchange over a stream, with a hello as its private data.

use std::io::{self, ErrorKind};
use std::mem;
use std::sync::Arc;

use ibverbs::ChannelBuilder;
use ibverbs::event_loop::DetachedChannel;
use ibverbs::tcp::{Exchange, ExchangeError, Step};
use ibverbs::{ChannelId, PooledBuffer, settings::MaxRnrRetries};

use crate::StreamError;
use crate::conn::Conn;
use crate::hub::{Inner, Owner};
use crate::stream::{Addresses, Handle};
use crate::watch::PeerWatch;
use crate::wire::Hello;

/// Which of the two sides begins an exchange.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// This side sends first.
    Connects,
    /// This side answers.
    Accepts,
}

/// A place of a hub whose stream is being connected. When it is dropped, it is free again, unless a stream has it.
pub(crate) struct Place {
    hub: Owner,
    id: ChannelId,
    is_kept: bool,
}

impl Place {
    pub(crate) fn new(hub: &Arc<Inner>, id: ChannelId) -> Self {
        Self { hub: hub.clone().into(), id, is_kept: false }
    }

    /// The two sides are connected.
    pub(crate) fn finish(
        &mut self,
        begin: impl FnOnce(&mut Conn<PooledBuffer>),
        peer_watch: PeerWatch,
        addresses: Addresses,
    ) -> io::Result<Handle> {
        let mut state = self.hub.lock();
        let Some(member) = state.member(self.id) else { return Err(StreamError::Aborted.into()) };
        begin(&mut member.conn);
        // With the lock held: what has ended already is looked at when the member has it.
        self.hub.sockets.add(member.peer_watch.insert(peer_watch), self.id.index())?;
        state.begins(self.id);
        drop(state);
        self.is_kept = true;
        Ok(Handle::new(Arc::clone(&self.hub), self.id, addresses))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if !self.is_kept && !self.hub.is_copy() {
            self.hub.lock().remove(self.id);
        }
    }
}

/// A stream that is being connected over another one. When it is dropped, its place is free again.
pub(crate) struct Handshake {
    place: Place,
    exchange: Option<Exchange<DetachedChannel<'static>>>,
}

/// How far it is.
pub(crate) enum Progress {
    Pending,
    Done(Vec<u8>),
}

impl Handshake {
    pub(crate) fn new(hub: &Arc<Inner>, role: Role) -> io::Result<Self> {
        let channel = prepare(hub)?;
        let id = channel.id();
        let hello = hub.config.hello().to_bytes();
        let exchange = match role {
            Role::Connects => channel.begin_connect(&hello),
            Role::Accepts => channel.begin_accept(&hello),
        };
        match exchange {
            Ok(exchange) => Ok(Self { place: Place::new(hub, id), exchange: Some(exchange) }),
            Err(failed) => {
                abandon(hub, failed.object);
                Err(failed.error.into())
            }
        }
    }

    #[cfg(feature = "tokio")]
    pub(crate) fn hub(&self) -> &Arc<Inner> {
        &self.place.hub
    }

    #[cfg(feature = "tokio")]
    pub(crate) fn id(&self) -> ChannelId {
        self.place.id
    }

    pub(crate) fn exchange(&mut self) -> &mut Exchange<DetachedChannel<'static>> {
        self.exchange.as_mut().expect("it goes on")
    }

    /// Whether it waits for room to send, not for bytes.
    pub(crate) fn has_to_send(&self) -> bool {
        self.exchange.as_ref().is_some_and(|exchange| !exchange.to_send().is_empty())
    }

    /// Goes on with one of its steps.
    pub(crate) fn step<F>(&mut self, step: F) -> io::Result<Progress>
    where
        F: FnOnce(Exchange<DetachedChannel<'static>>) -> Stepped,
    {
        let Some(exchange) = self.exchange.take() else { return Ok(Progress::Pending) };
        match step(exchange) {
            Ok(Step::Pending(exchange)) => {
                self.exchange = Some(exchange);
                Ok(Progress::Pending)
            }
            Ok(Step::Done((channel, hello))) => {
                put_back(&self.place.hub, channel)?;
                Ok(Progress::Done(hello))
            }
            Err(failed) => {
                abandon(&self.place.hub, failed.object);
                Err(kind_of(failed.error))
            }
        }
    }

    /// The two sides are connected, and the peer has said this.
    pub(crate) fn finish(
        mut self,
        hello: &[u8],
        peer_watch: PeerWatch,
        addresses: Addresses,
    ) -> io::Result<Handle> {
        let peer = Hello::from_bytes(hello)?;
        self.place.finish(|conn| conn.connected(peer), peer_watch, addresses)
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        let Some(exchange) = self.exchange.take() else { return };
        if self.place.hub.is_copy() {
            return mem::forget(exchange);
        }
        abandon(&self.place.hub, exchange.into_object());
    }
}

type Stepped = Result<
    Step<(DetachedChannel<'static>, Vec<u8>), Exchange<DetachedChannel<'static>>>,
    ibverbs::StateError<DetachedChannel<'static>, ExchangeError>,
>;

/// Returns the kind of a stream's `io::Error`: a peer that closes refuses.
fn kind_of(error: ExchangeError) -> io::Error {
    let kind = match &error {
        ExchangeError::Closed(_) => ErrorKind::ConnectionRefused,
        ExchangeError::Version { .. } => ErrorKind::Unsupported,
        _ => return error.into(),
    };
    io::Error::new(kind, error)
}

/// How a channel of a stream is made, if there is room for one.
pub(crate) fn channel(hub: &Inner) -> io::Result<ChannelBuilder<'static>> {
    let config = &hub.config;
    let state = hub.lock();
    state.has_room()?;
    let builder = match &state.shared {
        Some(shared) => state.lp.create_sharing_channel(hub.domain.clone(), shared.id)?,
        None => state.lp.create_channel(hub.domain.clone()),
    };
    // A peer's probe writes nothing, and needs the right to. There is no memory that it could name.
    Ok(builder
        .allow_remote_rw()
        .max_send_wr(config.own_sends())
        .max_recv_wr(config.own_receives())
        .max_rnr_retries(MaxRnrRetries::UNLIMITED))
}

/// `ibv_create_qp`, `ibv_post_recv`: a channel that receives what comes first, and is to be connected.
fn prepare(hub: &Inner) -> io::Result<DetachedChannel<'static>> {
    let prepared = channel(hub)?.build()?;
    let mut state = hub.lock_with_buffers(1)?;
    // Another stream may have come since.
    state.has_room()?;
    let id = state.lp.add_prepared(prepared)?;
    let added = state.add(id);
    let channel = state.lp.take_out(id)?;
    drop(state);
    match added {
        Ok(()) => Ok(channel),
        Err(error) => {
            abandon(hub, channel);
            Err(error)
        }
    }
}

fn put_back(hub: &Inner, channel: DetachedChannel<'static>) -> io::Result<()> {
    let mut state = hub.lock();
    match state.lp.put_back(channel) {
        Ok(_) => Ok(()),
        Err(failed) => {
            drop(state);
            abandon(hub, failed.object);
            Err(failed.error.into())
        }
    }
}

/// Destroys what was not connected.
fn abandon(hub: &Inner, channel: DetachedChannel<'static>) {
    let mut state = hub.lock();
    let id = channel.id();
    // The channel is of this loop.
    let _ = state.lp.put_back(channel);
    state.remove(id);
}
