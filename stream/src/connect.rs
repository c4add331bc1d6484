//! How two sides connect: the crate's exchange over a stream, with a hello as its private data.

use std::io::{self, ErrorKind};
use std::mem;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ibverbs::channel::DetachedChannel;
use ibverbs::tcp::{DeadlineStream, Exchange, ExchangeError, Step};
use ibverbs::{ChannelId, MaxRnrRetries};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::StreamError;
use crate::hub::{Hub, Inner};
use crate::stream::{Addresses, Handle, Stream};
use crate::wire::Hello;

/// Which of the two sides begins an exchange.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Role {
    /// It sends first.
    Connects,
    /// It answers.
    Accepts,
}

/// How long a client has to connect, of those that a listener has accepted.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// How many clients connect to a listener at a time. Others wait in the backlog.
pub(crate) const AT_A_TIME: usize = 256;

/// A stream that is being connected. When it is dropped, its place is free again.
pub(crate) struct Joining {
    hub: Arc<Inner>,
    id: ChannelId,
    exchange: Option<Exchange<DetachedChannel<'static>>>,
    /// It is connected, and a stream has it.
    is_kept: bool,
}

/// How far it is.
pub(crate) enum Joined {
    Pending,
    Done(Vec<u8>),
}

impl Joining {
    pub(crate) fn new(hub: &Arc<Inner>, role: Role) -> io::Result<Self> {
        let channel = prepare(hub)?;
        let id = channel.id();
        let hello = hub.config.hello().to_bytes();
        let exchange = match role {
            Role::Connects => channel.begin_connect(&hello),
            Role::Accepts => channel.begin_accept(&hello),
        };
        match exchange {
            Ok(exchange) => {
                Ok(Self { hub: hub.clone(), id, exchange: Some(exchange), is_kept: false })
            }
            Err(failed) => {
                abandon(hub, failed.object);
                Err(failed.error.into())
            }
        }
    }

    pub(crate) fn exchange(&mut self) -> &mut Exchange<DetachedChannel<'static>> {
        self.exchange.as_mut().expect("it goes on")
    }

    /// Goes on with one of its steps.
    pub(crate) fn step<F>(&mut self, step: F) -> io::Result<Joined>
    where
        F: FnOnce(Exchange<DetachedChannel<'static>>) -> Stepped,
    {
        let Some(exchange) = self.exchange.take() else { return Ok(Joined::Pending) };
        match step(exchange) {
            Ok(Step::Pending(exchange)) => {
                self.exchange = Some(exchange);
                Ok(Joined::Pending)
            }
            Ok(Step::Done((channel, hello))) => {
                put_back(&self.hub, channel)?;
                Ok(Joined::Done(hello))
            }
            Err(failed) => {
                abandon(&self.hub, failed.object);
                Err(kind_of(failed.error))
            }
        }
    }

    /// The two sides are connected over this stream, on which this was said.
    pub(crate) fn finish(
        mut self,
        hello: &[u8],
        socket: OwnedFd,
        addresses: Addresses,
    ) -> io::Result<Handle> {
        // It is dropped, and with it all that is there so far, unless all goes well.
        let peer = Hello::from_bytes(hello)?;
        let mut state = self.hub.lock();
        let Some(member) = state.member(self.id) else { return Err(StreamError::Aborted.into()) };
        member.conn.connected(peer);
        // With the lock held: what has ended already is looked at when the member has it.
        self.hub.sockets.add(member.socket.insert(socket).as_fd(), self.id.index())?;
        state.pump(self.id);
        drop(state);
        self.is_kept = true;
        Ok(Handle::new(self.hub.clone(), self.id, addresses))
    }
}

impl Drop for Joining {
    fn drop(&mut self) {
        if let Some(exchange) = self.exchange.take() {
            abandon(&self.hub, exchange.into_object());
        }
        if !self.is_kept {
            self.hub.lock().remove(self.id);
        }
    }
}

type Stepped = Result<
    Step<(DetachedChannel<'static>, Vec<u8>), Exchange<DetachedChannel<'static>>>,
    ibverbs::StateError<DetachedChannel<'static>, ExchangeError>,
>;

/// As an `io::Error` of a stream: a peer that closes is one that refuses.
fn kind_of(error: ExchangeError) -> io::Error {
    let kind = match &error {
        ExchangeError::Closed(_) => ErrorKind::ConnectionRefused,
        ExchangeError::Version { .. } => ErrorKind::Unsupported,
        _ => return error.into(),
    };
    io::Error::new(kind, error)
}

/// `ibv_create_qp`, `ibv_post_recv`: a channel that receives what comes first, and is to be connected.
fn prepare(hub: &Arc<Inner>) -> io::Result<DetachedChannel<'static>> {
    let config = &hub.config;
    let state = hub.lock();
    if let Some(error) = state.stopped {
        return Err(error.into());
    }
    if state.count >= config.max_connections {
        let reason = format!("the hub has max_connections, {}, streams", config.max_connections);
        return Err(io::Error::new(ErrorKind::OutOfMemory, reason));
    }
    let builder = match &state.shared {
        Some(shared) => state.lp.create_sharing_channel(hub.domain.clone(), shared.id)?,
        None => state.lp.create_channel(hub.domain.clone()),
    };
    drop(state);
    let prepared = builder
        .max_send_wr(config.own_sends())
        .max_recv_wr(config.own_receives())
        .max_rnr_retries(MaxRnrRetries::UNLIMITED)
        .build()?;
    let mut state = hub.lock();
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
    // It is its own loop's.
    let _ = state.lp.put_back(channel);
    state.remove(id);
}

/// Connects over a stream that blocks.
fn over<T>(
    hub: &Hub,
    mut stream: T,
    role: Role,
    deadline: Instant,
    addresses: Addresses,
) -> io::Result<Stream>
where
    T: DeadlineStream + AsFd,
{
    let inner = &hub.inner;
    inner.watch()?;
    let socket = stream.as_fd().try_clone_to_owned()?;
    let mut joining = Joining::new(inner, role)?;
    loop {
        let advanced = joining.step(Exchange::advance)?;
        if let Joined::Done(hello) = advanced {
            return joining.finish(&hello, socket, addresses).map(Stream::new);
        }
        carry(joining.exchange(), &mut stream, deadline)?;
    }
}

/// Sends what an exchange has to send, or reads what it wants.
fn carry<T: DeadlineStream>(
    exchange: &mut Exchange<DetachedChannel<'static>>,
    stream: &mut T,
    deadline: Instant,
) -> io::Result<()> {
    stream.set_deadline(Some(deadline))?;
    let mut bytes = [0; 256];
    let most = exchange.wants().min(bytes.len());
    let done = match exchange.to_send() {
        [] => stream.read(&mut bytes[..most]).map(|len| exchange.received(&bytes[..len.min(most)])),
        to_send => stream.write(to_send).inspect(|&len| exchange.sent(len)),
    };
    match done {
        Ok(0) => Err(ErrorKind::ConnectionRefused.into()),
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::Interrupted => Ok(()),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Err(ErrorKind::TimedOut.into()),
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {
            Err(ErrorKind::ConnectionRefused.into())
        }
        Err(error) => Err(error),
    }
}

impl Stream {
    /// Connects to a [`Listener`] at an address, over TCP, and then moves to RDMA.
    ///
    /// # Errors
    ///
    ///  - `TimedOut`: the deadline has passed.
    ///  - `ConnectionRefused`: nobody listens, or the peer has closed the connection before it was made.
    ///  - `InvalidData`: the peer is another program. `Unsupported`: it has another version of the exchange.
    ///  - `OutOfMemory`: the hub has [`max_connections`](crate::HubBuilder::max_connections) streams.
    ///  - Those of the verbs.
    pub fn connect(hub: &Hub, address: impl ToSocketAddrs, deadline: Instant) -> io::Result<Self> {
        let mut last = io::Error::new(ErrorKind::InvalidInput, "the name has no address");
        for address in address.to_socket_addrs()? {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            match TcpStream::connect_timeout(&address, left) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    let addresses = Addresses::of(&stream);
                    return over(hub, stream, Role::Connects, deadline, addresses);
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Connects to the peer at the other end of a stream: a Unix socket, or one that was accepted by other means. The stream is
    /// used for the connection alone, and its end is taken for that of the peer.
    ///
    /// # Errors
    ///
    /// Those of [`connect`](Self::connect).
    pub fn over<T>(hub: &Hub, stream: T, role: Role, deadline: Instant) -> io::Result<Self>
    where
        T: DeadlineStream + AsFd,
    {
        over(hub, stream, role, deadline, Addresses::default())
    }
}

/// Accepts streams, as [`TcpListener`] does.
#[derive(Debug)]
pub struct Listener {
    hub: Hub,
    listener: TcpListener,
    /// The clients that are connecting; `None` while a thread waits for them.
    clients: Mutex<Option<Vec<Client>>>,
    /// That thread has given them back.
    given_back: Condvar,
    deadline: Mutex<Option<Instant>>,
}

/// The clients, while one thread waits for them.
struct Turn<'l> {
    listener: &'l Listener,
    clients: Vec<Client>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let clients = mem::take(&mut self.clients);
        *self.listener.clients.lock().unwrap_or_else(PoisonError::into_inner) = Some(clients);
        // All of them: one whose deadline has passed would not pass it on.
        self.listener.given_back.notify_all();
    }
}

struct Client {
    stream: TcpStream,
    joining: Joining,
    give_up: Instant,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("stream", &self.stream).finish_non_exhaustive()
    }
}

impl Listener {
    /// Listens at an address.
    ///
    /// # Errors
    ///
    /// Those of [`TcpListener::bind`].
    pub fn bind(hub: &Hub, address: impl ToSocketAddrs) -> io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        hub.inner.watch()?;
        Ok(Self {
            hub: hub.clone(),
            listener,
            clients: Mutex::new(Some(Vec::new())),
            given_back: Condvar::new(),
            deadline: Mutex::default(),
        })
    }

    /// The address at which it listens.
    ///
    /// # Errors
    ///
    /// Those of [`TcpListener::local_addr`].
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// From now on [`accept`](Self::accept) waits until then at most. `None`: for ever.
    pub fn set_deadline(&self, deadline: Option<Instant>) {
        *self.deadline.lock().unwrap_or_else(PoisonError::into_inner) = deadline;
    }

    /// Waits for the next client that has connected. Clients connect side by side, while a thread is in this call: one that is slow, or silent, keeps no other
    /// one waiting, and is given up after ten seconds. A client that fails to connect is no error of the listener's.
    /// Several threads may accept: one of them waits for all clients, and the next one does when that has its stream.
    ///
    /// # Errors
    ///
    ///  - `WouldBlock`: the [deadline](Self::set_deadline) has passed.
    ///  - `ConnectionAborted`: the hub was stopped.
    ///  - Those of [`TcpListener::accept`], such as too many open files.
    pub fn accept(&self) -> io::Result<(Stream, SocketAddr)> {
        let deadline = *self.deadline.lock().unwrap_or_else(PoisonError::into_inner);
        let mut turn = self.turn(deadline)?;
        let clients = &mut turn.clients;
        loop {
            self.check_stopped()?;
            while clients.len() < AT_A_TIME
                && let Some(stream) = self.next()?
            {
                // Without room for it, the client sees the end.
                if let Ok(client) = Client::new(&self.hub.inner, stream) {
                    clients.push(client);
                }
            }
            let now = Instant::now();
            let mut index = 0;
            while index < clients.len() {
                match clients[index].step(now) {
                    Ok(None) => index += 1,
                    Ok(Some(hello)) => {
                        let Client { stream, joining, .. } = clients.swap_remove(index);
                        let addresses = Addresses::of(&stream);
                        let Some(peer) = addresses.peer else { continue };
                        if let Ok(handle) = joining.finish(&hello, stream.into(), addresses) {
                            return Ok((Stream::new(handle), peer));
                        }
                    }
                    Err(_) => drop(clients.swap_remove(index)),
                }
            }
            self.sleep(clients, deadline)?;
        }
    }

    /// Waits until no other thread waits for the clients.
    fn turn(&self, deadline: Option<Instant>) -> io::Result<Turn<'_>> {
        let mut place = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            self.check_stopped()?;
            if let Some(clients) = place.take() {
                return Ok(Turn { listener: self, clients });
            }
            place = match deadline.map(|at| at.saturating_duration_since(Instant::now())) {
                Some(Duration::ZERO) => return Err(ErrorKind::WouldBlock.into()),
                Some(left) => {
                    let waited = self.given_back.wait_timeout(place, left);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.given_back.wait(place).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    fn check_stopped(&self) -> io::Result<()> {
        self.hub.inner.lock().stopped.map_or(Ok(()), |error| Err(error.into()))
    }

    fn next(&self) -> io::Result<Option<TcpStream>> {
        match self.listener.accept() {
            Ok((stream, _)) => Ok(Some(stream)),
            Err(error) => match error.kind() {
                ErrorKind::WouldBlock => Ok(None),
                // It is gone already.
                ErrorKind::ConnectionAborted | ErrorKind::Interrupted => Ok(None),
                _ => Err(error),
            },
        }
    }

    /// Sleeps until there is another client, or one of them goes on.
    fn sleep(&self, clients: &[Client], deadline: Option<Instant>) -> io::Result<()> {
        let accepts = clients.len() < AT_A_TIME;
        let listener = accepts.then(|| PollFd::new(&self.listener, PollFlags::IN));
        let going = clients.iter().map(|client| {
            let writes =
                client.joining.exchange.as_ref().is_some_and(|it| !it.to_send().is_empty());
            let flags = if writes { PollFlags::OUT } else { PollFlags::IN };
            PollFd::new(&client.stream, flags)
        });
        let mut files: Vec<_> = listener.into_iter().chain(going).collect();
        files.push(PollFd::from_borrowed_fd(self.hub.inner.sockets.stopped(), PollFlags::IN));
        let give_up = clients.iter().map(|client| client.give_up).chain(deadline).min();
        let now = Instant::now();
        if deadline.is_some_and(|deadline| now >= deadline) {
            return Err(ErrorKind::WouldBlock.into());
        }
        // Rounded up, or the last of it would be spent in short sleeps.
        let left = give_up.map(|at| at.saturating_duration_since(now) + Duration::from_micros(1));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut files, left.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// The streams of the clients, one after the other.
    pub fn incoming(&self) -> Incoming<'_> {
        Incoming(self)
    }
}

impl Client {
    fn new(hub: &Arc<Inner>, stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        let joining = Joining::new(hub, Role::Accepts)?;
        Ok(Self { stream, joining, give_up: Instant::now() + PATIENCE })
    }

    /// The hello of the peer when it is connected.
    fn step(&mut self, now: Instant) -> io::Result<Option<Vec<u8>>> {
        let Self { stream, joining, give_up } = self;
        match joining.step(|exchange| exchange.step(stream))? {
            Joined::Done(hello) => Ok(Some(hello)),
            Joined::Pending if now >= *give_up => Err(ErrorKind::TimedOut.into()),
            Joined::Pending => Ok(None),
        }
    }
}

/// The streams that a [`Listener`] accepts.
#[derive(Debug)]
pub struct Incoming<'l>(&'l Listener);

impl Iterator for Incoming<'_> {
    type Item = io::Result<Stream>;

    fn next(&mut self) -> Option<io::Result<Stream>> {
        Some(self.0.accept().map(|(stream, _)| stream))
    }
}
