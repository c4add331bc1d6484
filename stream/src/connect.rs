//! Connecting streams of threads, over TCP or by the connection manager.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};
use std::{fmt, mem};

use ibverbs::event_loop::DetachedChannel;
#[cfg(feature = "rdmacm")]
use ibverbs::rdmacm;
use ibverbs::tcp::{DeadlineStream, Exchange};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use crate::handshake::{Handshake, Progress, Role};
use crate::hub::{Hub, Inner};
use crate::interrupt;
#[cfg(feature = "rdmacm")]
use crate::manager::{self, Accepting};
use crate::stream::{Addresses, Handle, Stream};
use crate::watch::PeerWatch;
use crate::wire::check_refused;
use crate::{Refusal, StreamError};

/// How long a client that a listener has accepted has to speak, and then to connect.
pub(crate) const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 100 } else { 10 });

/// How many clients connect to a listener at a time. Others wait in the backlog.
pub(crate) const AT_A_TIME: usize = 256;

/// `listen`: has 1024 clients wait, not the 128 of the standard library and of tokio. The kernel has one that finds no room there
/// try again after a second.
pub(crate) fn lengthen_backlog(listener: &impl AsFd) -> io::Result<()> {
    Ok(net::listen(listener, 1024)?)
}

/// How long a client that has connected waits for one that came before it.
pub(crate) const ORDER: Duration = Duration::from_millis(if cfg!(test) { 100_000 } else { 100 });

/// How long a client may say nothing while others wait in the backlog, or keep a place of a full hub that another one wants.
const SILENCE: Duration = Duration::from_millis(if cfg!(test) { 100_000 } else { 500 });

/// How long a client that has begun may take while others wait in the backlog. A host of many clients takes its time.
const STALL: Duration = Duration::from_secs(if cfg!(test) { 100 } else { 2 });

/// When a client makes room for one that wants its place in a full hub, if `is_full`, or else in the listener.
pub(crate) fn makes_room(since: Instant, begun: Option<Instant>, is_full: bool) -> Option<Instant> {
    match begun {
        Some(begun) => Some(begun + if is_full { SILENCE } else { STALL }),
        // It has no place of the hub.
        None => (!is_full).then_some(since + SILENCE),
    }
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
    let _connecting = interrupt::of_stream(inner, &socket)?;
    let mut handshake = Handshake::new(inner, role)?;
    loop {
        let advanced = handshake.step(Exchange::advance)?;
        if let Progress::Done(hello) = advanced {
            return handshake.finish(&hello, PeerWatch::Socket(socket), addresses).map(Stream::new);
        }
        let carried = carry(handshake.exchange(), &mut stream, deadline);
        inner.check_stopped()?;
        carried.map_err(|error| match error.kind() {
            ErrorKind::TimedOut if error.raw_os_error().is_none() => unanswered(&addresses),
            _ => error,
        })?;
    }
}

/// The deadline has passed when the peer was connected.
fn unanswered(addresses: &Addresses) -> io::Error {
    let peer = addresses.peer.map_or_else(String::new, |peer| format!(" at {peer}"));
    let text = format!(
        "the peer{peer} has taken the connection, and has not answered as a stream in time"
    );
    io::Error::new(ErrorKind::TimedOut, text)
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
        [] => match stream.read(&mut bytes[..most]) {
            Ok(len) => {
                check_refused(&bytes[..len.min(most)])?;
                Ok(exchange.received(&bytes[..len.min(most)]))
            }
            error => error,
        },
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

/// The addresses of a name, of which there is one at least.
///
/// # Errors
///
///  - Those of the look-up. The text names the host, which the system's does not.
///  - `InvalidInput`: the address is not of the form `HOST:PORT`, or the name has no address.
pub(crate) fn addresses_of<I: Iterator<Item = SocketAddr>>(
    name: impl fmt::Display,
    found: io::Result<I>,
) -> io::Result<Vec<SocketAddr>> {
    let addresses: Vec<_> = found
        .map_err(|error| {
            let is_none = error.kind() == ErrorKind::InvalidInput && error.raw_os_error().is_none();
            let hint =
                if is_none { " (the address is HOST:PORT, such as \"server:18515\")" } else { "" };
            io::Error::new(error.kind(), format!("{name}: {error}{hint}"))
        })?
        .collect();
    if addresses.is_empty() {
        let text = format!("{name}: the name has no address");
        return Err(io::Error::new(ErrorKind::InvalidInput, text));
    }
    Ok(addresses)
}

/// Connects to the first address at which a peer answers. Each gets its share of the time that is left.
fn first<T>(
    hub: &Hub,
    address: impl ToSocketAddrs + fmt::Debug,
    deadline: Instant,
    mut connect: impl FnMut(&Arc<Inner>, SocketAddr, Instant) -> io::Result<T>,
) -> io::Result<T> {
    hub.inner.watch()?;
    let addresses = addresses_of(format_args!("{address:?}"), address.to_socket_addrs())?;
    let mut last = None;
    for (tried, &to) in addresses.iter().enumerate() {
        hub.inner.check_stopped()?;
        let now = Instant::now();
        let left = deadline.saturating_duration_since(now);
        if left.is_zero() {
            let text = format!("the deadline had passed before {to} was tried");
            return Err(io::Error::new(ErrorKind::TimedOut, text));
        }
        let share = left / u32::try_from(addresses.len() - tried).unwrap_or(u32::MAX);
        match connect(&hub.inner, to, now + share) {
            Ok(connected) => return Ok(connected),
            // One of the system's has a number, and others have a text of their own.
            Err(error)
                if error.kind() == ErrorKind::TimedOut
                    && error.raw_os_error().is_none()
                    && error.get_ref().is_none() =>
            {
                let text = format!("{to} has not answered within {share:.1?}");
                last = Some(io::Error::new(ErrorKind::TimedOut, text));
            }
            Err(error) => last = Some(error),
        }
    }
    hub.inner.check_stopped()?;
    Err(last.unwrap_or_else(|| ErrorKind::InvalidInput.into()))
}

/// Does what [`TcpStream::connect_timeout`] does, until the hub is stopped.
fn connect_tcp(hub: &Inner, to: SocketAddr, deadline: Instant) -> io::Result<TcpStream> {
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let stream = TcpStream::from(net::socket_with(family, SocketType::STREAM, flags, None)?);
    match net::connect(&stream, &to) {
        Ok(()) => {}
        Err(Errno::INPROGRESS) => {
            hub.wait_for(stream.as_fd(), PollFlags::OUT, deadline)?;
            stream.take_error()?.map_or(Ok(()), Err)?;
        }
        Err(error) => return Err(error.into()),
    }
    stream.set_nonblocking(false)?;
    Ok(stream)
}

impl Stream {
    /// Connects to a [`Listener`] at an address, over TCP, and then moves to RDMA. Of a name with several addresses, each gets its
    /// share of the time that is left, for both: half of it the first of two. The error is that of the last one.
    ///
    /// # Errors
    ///
    ///  - `TimedOut`: the deadline has passed. `ConnectionAborted`: the hub was stopped. `NotConnected`: its device has failed.
    ///  - `InvalidInput`: the address is not of the form `HOST:PORT`. A host that is not found is named by the text.
    ///  - `ConnectionRefused`: nobody listens, the peer has closed the connection before it was made, or its listener has
    ///    [refused](StreamError::Refused) it.
    ///  - `InvalidData`: the peer is another program. `Unsupported`: it has another version of the exchange.
    ///  - `OutOfMemory`: the hub has [`max_connections`](crate::HubBuilder::max_connections) streams.
    ///  - Those of the verbs.
    pub fn connect(
        hub: &Hub,
        address: impl ToSocketAddrs + fmt::Debug,
        deadline: Instant,
    ) -> io::Result<Self> {
        first(hub, address, deadline, |inner, to, until| {
            let stream = connect_tcp(inner, to, until)?;
            stream.set_nodelay(true)?;
            let addresses = Addresses::of(&stream);
            over(hub, stream, Role::Connects, until, addresses)
        })
    }

    /// `rdma_connect`: connects by the connection manager to a listener that was [bound](Listener::bind_rdmacm) to an address of
    /// an RDMA device, or to a wildcard address. No TCP is needed; on iWARP it is the only way.
    ///
    /// # Errors
    ///
    ///  - `TimedOut`: the deadline has passed. `ConnectionAborted`: the hub was stopped. `NotConnected`: its device has failed.
    ///  - `ConnectionRefused`: no program listens there, or it has rejected the stream: its listener has
    ///    [refused](StreamError::Refused) it, or it is another program.
    ///  - `HostUnreachable`: no RDMA device leads there, or the peer does not answer.
    ///  - `InvalidInput`: the address is reached through another device than the hub's.
    ///  - `InvalidData`: the peer is another program.
    ///  - `OutOfMemory`: the hub has [`max_connections`](crate::HubBuilder::max_connections) streams.
    ///  - Those of [`RouteBuilder::resolve`](ibverbs::rdmacm::RouteBuilder::resolve), and of the verbs.
    #[cfg(feature = "rdmacm")]
    #[doc(alias = "rdma_connect")]
    pub fn connect_rdmacm(
        hub: &Hub,
        address: impl ToSocketAddrs + fmt::Debug,
        deadline: Instant,
    ) -> io::Result<Self> {
        first(hub, address, deadline, manager::connect).map(Self::new)
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
    local: SocketAddr,
    /// `None` while a thread waits for clients.
    waiting: Mutex<Option<Waiting>>,
    /// That thread has given it back.
    given_back: Condvar,
    deadline: Mutex<Option<Instant>>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        if self.hub.inner.is_copy() {
            // The connection manager's listener is the parent's.
            mem::forget(self.waiting.get_mut().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

/// The acceptor and the clients of a listener, while no thread has them.
#[derive(Debug)]
struct Waiting {
    acceptor: Acceptor,
    /// Clients that are connecting.
    clients: Vec<Client>,
}

/// Where clients arrive.
#[derive(Debug)]
enum Acceptor {
    Tcp(TcpListener),
    #[cfg(feature = "rdmacm")]
    Manager(rdmacm::Listener),
}

/// Lends a listener's acceptor and clients to one thread.
struct Turn<'l> {
    listener: &'l Listener,
    /// `None` when it is dropped.
    waiting: Option<Waiting>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.listener.waiting.lock().unwrap_or_else(PoisonError::into_inner) = self.waiting.take();
        // All of them: one whose deadline has passed would not pass it on.
        self.listener.given_back.notify_all();
    }
}

struct Client {
    arriving: Arriving,
    since: Instant,
    /// Since when it has a place of the hub, if it has one.
    begun: Option<Instant>,
    /// It has spoken.
    waits: bool,
}

/// How far a client is.
enum Arriving {
    /// The client has said nothing, and takes no place of the hub.
    Silent(TcpStream),
    Over(TcpStream, Box<Handshake>),
    /// The stream waits to be accepted.
    Connected(Handle),
    #[cfg(feature = "rdmacm")]
    Requested(Box<rdmacm::ConnectionRequest>),
    #[cfg(feature = "rdmacm")]
    Managed(Box<Accepting>),
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").finish_non_exhaustive()
    }
}

impl Listener {
    /// Listens at an address.
    ///
    /// # Errors
    ///
    /// Those of [`TcpListener::bind`].
    pub fn bind(hub: &Hub, address: impl ToSocketAddrs + fmt::Debug) -> io::Result<Self> {
        let addresses = addresses_of(format_args!("{address:?}"), address.to_socket_addrs())?;
        let listener = TcpListener::bind(&addresses[..])?;
        lengthen_backlog(&listener)?;
        listener.set_nonblocking(true)?;
        Self::new(hub, listener.local_addr()?, Acceptor::Tcp(listener))
    }

    /// `rdma_listen`: listens by the connection manager, at an address of an RDMA device, or at a wildcard address. Clients connect
    /// with [`Stream::connect_rdmacm`]; those that reach another device than the hub's are rejected.
    ///
    /// # Errors
    ///
    /// Those of [`ListenerBuilder::bind`](ibverbs::rdmacm::ListenerBuilder::bind).
    #[cfg(feature = "rdmacm")]
    #[doc(alias = "rdma_listen")]
    pub fn bind_rdmacm(hub: &Hub, address: SocketAddr) -> io::Result<Self> {
        let listener = rdmacm::Listener::bind(address)?;
        let local = listener.local_addr().ok_or(ErrorKind::NotConnected)?;
        Self::new(hub, local, Acceptor::Manager(listener))
    }

    fn new(hub: &Hub, local: SocketAddr, acceptor: Acceptor) -> io::Result<Self> {
        hub.inner.watch()?;
        Ok(Self {
            hub: hub.clone(),
            local,
            waiting: Mutex::new(Some(Waiting { acceptor, clients: Vec::new() })),
            given_back: Condvar::new(),
            deadline: Mutex::default(),
        })
    }

    /// The address at which it listens.
    ///
    /// # Errors
    ///
    /// None: it returns what [`TcpListener::local_addr`] does.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.local)
    }

    /// Sets until when [`accept`](Self::accept) waits. `None`: for ever.
    pub fn set_deadline(&self, deadline: Option<Instant>) {
        *self.deadline.lock().unwrap_or_else(PoisonError::into_inner) = deadline;
    }

    /// Waits for the next client that has connected, in the order in which they came. Clients connect side by side, while a thread
    /// is in this call: one that is slow, or silent, keeps others waiting for 0.1 s at most, and is given up after ten seconds. One
    /// that says nothing takes no place of the hub. When 256 clients connect at a time and another one waits, one that has said
    /// nothing for half a second makes room, and so does one that has begun to connect two seconds before. When the hub has no
    /// other place, it does so after half a second. A client that is given up, or for which there is no place, hears
    /// [why](crate::Refusal), and [`Stats::refused`](crate::Stats::refused) counts it. A client that fails to connect is no
    /// error of the listener's. Several threads may accept: one of them waits for all clients, and the next one does when that
    /// has its stream.
    ///
    /// # Errors
    ///
    ///  - `WouldBlock`: the [deadline](Self::set_deadline) has passed.
    ///  - `ConnectionAborted`: the hub was stopped. `NotConnected`: its device has failed.
    ///  - Those of [`TcpListener::accept`], such as too many open files.
    pub fn accept(&self) -> io::Result<(Stream, SocketAddr)> {
        let deadline = *self.deadline.lock().unwrap_or_else(PoisonError::into_inner);
        let mut turn = self.turn(deadline)?;
        let Some(Waiting { acceptor, clients }) = &mut turn.waiting else { unreachable!() };
        loop {
            if let Err(error) = self.hub.inner.check_stopped() {
                // Clients need not wait until the listener is dropped.
                clients.clear();
                return Err(error);
            }
            let mut failure = None;
            let now = Instant::now();
            while failure.is_none() {
                let is_crowded = clients.len() >= AT_A_TIME;
                let stuck = is_crowded.then(|| stuck(clients, now)).flatten();
                if is_crowded && stuck.is_none() {
                    break;
                }
                match acceptor.next() {
                    Ok(Some(arriving)) => {
                        if let Some(stuck) = stuck {
                            clients.remove(stuck).give_up(&self.hub.inner);
                        }
                        clients.push(Client { arriving, since: now, begun: None, waits: false });
                    }
                    Ok(None) => break,
                    // Such as too many open files: those that are connecting go on.
                    Err(error) => failure = Some(error),
                }
            }
            *clients =
                mem::take(clients).into_iter().filter_map(|client| client.step().ok()).collect();
            self.give_places(clients);
            if let Some(index) = next_in_order(clients, now)
                && let Arriving::Connected(handle) = clients.remove(index).arriving
                && let Ok(peer) = handle.addresses.peer()
            {
                return Ok((Stream::new(handle), peer));
            }
            match failure {
                Some(error) if clients.is_empty() => return Err(error),
                failure => self.sleep(acceptor, clients, deadline, failure.is_some())?,
            }
        }
    }

    /// Clients that have spoken begin to connect. Those that take too long are given up.
    fn give_places(&self, clients: &mut Vec<Client>) {
        let (hub, now) = (&self.hub.inner, Instant::now());
        for mut client in mem::take(clients) {
            match client.has_spoken() {
                Ok(has_spoken) => client.waits = has_spoken,
                // The client is gone.
                Err(_) => continue,
            }
            clients.push(client);
        }
        while let Some(next) = clients.iter().position(|client| client.waits) {
            if hub.lock().has_room().is_err()
                && let Some((until, oldest)) = oldest(clients, true)
            {
                if now < until {
                    break;
                }
                clients.remove(oldest).give_up(hub);
                continue;
            }
            let Client { arriving, since, .. } = clients.remove(next);
            // What it has said is answered at once: from now on, it is for the client to go on.
            let begun = arriving.begin(hub).and_then(|arriving| {
                Client { arriving, since, begun: Some(Instant::now()), waits: false }.step()
            });
            clients.splice(next..next, begun);
        }
        let is_late = |client: &mut Client| client.until().is_some_and(|until| now >= until);
        clients.extract_if(.., is_late).for_each(|client| client.give_up(hub));
    }

    /// Waits until no other thread waits for the clients.
    fn turn(&self, deadline: Option<Instant>) -> io::Result<Turn<'_>> {
        let mut place = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            self.hub.inner.check_stopped()?;
            if let Some(waiting) = place.take() {
                return Ok(Turn { listener: self, waiting: Some(waiting) });
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

    /// Sleeps until there is another client, or one of them goes on.
    fn sleep(
        &self,
        acceptor: &Acceptor,
        clients: &[Client],
        deadline: Option<Instant>,
        has_failed: bool,
    ) -> io::Result<()> {
        let now = Instant::now();
        let is_crowded = clients.len() >= AT_A_TIME;
        let stuck = is_crowded.then(|| oldest(clients, false)).flatten();
        let stuck = stuck.map(|(until, _)| until);
        let has_room = !is_crowded || stuck.is_some_and(|until| until <= now);
        let acceptor = PollFd::from_borrowed_fd(acceptor.as_fd(), PollFlags::IN);
        let acceptor = (has_room && !has_failed).then_some(acceptor);
        let mut files: Vec<_> =
            acceptor.into_iter().chain(clients.iter().filter_map(Client::file)).collect();
        files.push(PollFd::from_borrowed_fd(self.hub.inner.sockets.stopped(), PollFlags::IN));
        let first = clients.iter().position(Client::is_connected);
        let in_order = first
            .and_then(|first| clients[..first].iter().map(|earlier| earlier.since + ORDER).max());
        // The acceptor is asked again soon, if it has failed.
        let again = has_failed.then(|| now + ORDER);
        let wanted = clients.iter().any(|client| client.waits);
        let place = wanted.then(|| oldest(clients, true)).flatten();
        let place = place.map(|(until, _)| until);
        let give_up = clients.iter().filter_map(Client::until);
        let stuck = stuck.filter(|&until| until > now);
        let give_up = give_up.chain(stuck).chain(place).chain(deadline).chain(in_order);
        let give_up = give_up.chain(again).min();
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

impl Acceptor {
    /// A client that arrives.
    fn next(&mut self) -> io::Result<Option<Arriving>> {
        match self {
            Self::Tcp(listener) => match listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(true)?;
                    Ok(Some(Arriving::Silent(stream)))
                }
                Err(error) => match error.kind() {
                    ErrorKind::WouldBlock => Ok(None),
                    // The client is gone already.
                    ErrorKind::ConnectionAborted | ErrorKind::Interrupted => Ok(None),
                    _ => Err(error),
                },
            },
            #[cfg(feature = "rdmacm")]
            Self::Manager(listener) => {
                Ok(listener.try_next()?.map(|request| Arriving::Requested(request.into())))
            }
        }
    }
}

impl AsFd for Acceptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(listener) => listener.as_fd(),
            #[cfg(feature = "rdmacm")]
            Self::Manager(listener) => listener.as_fd(),
        }
    }
}

impl Arriving {
    /// Takes a place of the hub.
    fn begin(self, hub: &Arc<Inner>) -> io::Result<Self> {
        match self {
            Self::Silent(stream) => {
                stream.set_nodelay(true)?;
                match Handshake::new(hub, Role::Accepts) {
                    Ok(handshake) => Ok(Self::Over(stream, handshake.into())),
                    Err(error) => {
                        refuse(&stream, hub.refusal(&error));
                        Err(error)
                    }
                }
            }
            #[cfg(feature = "rdmacm")]
            Self::Requested(request) => Ok(Self::Managed(Accepting::new(hub, *request)?.into())),
            begun => Ok(begun),
        }
    }
}

impl Client {
    /// Whether it is to begin.
    fn has_spoken(&self) -> io::Result<bool> {
        match &self.arriving {
            Arriving::Silent(stream) => match stream.peek(&mut [0]) {
                Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
                Ok(_) => Ok(true),
                Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
                Err(error) => Err(error),
            },
            #[cfg(feature = "rdmacm")]
            Arriving::Requested(_) => Ok(true),
            _ => Ok(false),
        }
    }

    fn is_connected(&self) -> bool {
        matches!(self.arriving, Arriving::Connected(_))
    }

    /// When it is given up. One that waits for a place is not: it is for the others to go on.
    fn until(&self) -> Option<Instant> {
        let goes_on = !self.is_connected() && !self.waits;
        goes_on.then(|| self.begun.unwrap_or(self.since) + PATIENCE)
    }

    /// Tells it why.
    fn give_up(self, hub: &Inner) {
        let reason = hub.refusal(&StreamError::Refused(Refusal::TooSlow).into());
        match self.arriving {
            Arriving::Silent(stream) | Arriving::Over(stream, _) => refuse(&stream, reason),
            #[cfg(feature = "rdmacm")]
            Arriving::Requested(request) => drop(request.reject(reason.bytes())),
            #[cfg(feature = "rdmacm")]
            Arriving::Managed(_) => {}
            Arriving::Connected(_) => {}
        }
    }

    /// Goes on, without waiting.
    fn step(self) -> io::Result<Self> {
        let arriving = match self.arriving {
            Arriving::Over(mut stream, mut handshake) => {
                match handshake.step(|exchange| exchange.step(&mut stream))? {
                    Progress::Done(hello) => {
                        let addresses = Addresses::of(&stream);
                        let watch = PeerWatch::Socket(stream.into());
                        Arriving::Connected(handshake.finish(&hello, watch, addresses)?)
                    }
                    Progress::Pending => Arriving::Over(stream, handshake),
                }
            }
            #[cfg(feature = "rdmacm")]
            Arriving::Managed(accepting) => match accepting.step()? {
                ibverbs::tcp::Step::Done(handle) => Arriving::Connected(handle),
                ibverbs::tcp::Step::Pending(accepting) => Arriving::Managed(accepting.into()),
            },
            waiting => waiting,
        };
        Ok(Self { arriving, ..self })
    }

    /// The file that says when it goes on.
    fn file(&self) -> Option<PollFd<'_>> {
        match &self.arriving {
            Arriving::Over(stream, handshake) if handshake.has_to_send() => {
                Some(PollFd::new(stream, PollFlags::OUT))
            }
            // It has bytes to read, and no place yet.
            _ if self.waits => None,
            Arriving::Silent(stream) | Arriving::Over(stream, _) => {
                Some(PollFd::new(stream, PollFlags::IN))
            }
            Arriving::Connected(_) => None,
            #[cfg(feature = "rdmacm")]
            Arriving::Requested(_) => None,
            #[cfg(feature = "rdmacm")]
            Arriving::Managed(accepting) => Some(PollFd::new(&**accepting, PollFlags::IN)),
        }
    }
}

/// The first client that has connected, unless one that came before it may do so soon.
fn next_in_order(clients: &[Client], now: Instant) -> Option<usize> {
    let index = clients.iter().position(Client::is_connected)?;
    clients[..index].iter().all(|earlier| now >= earlier.since + ORDER).then_some(index)
}

/// The first client that [makes room](makes_room), and when.
fn oldest(clients: &[Client], is_full: bool) -> Option<(Instant, usize)> {
    let until = |(at, client): (usize, &Client)| {
        // If it is for the client to go on.
        client.file()?;
        Some((makes_room(client.since, client.begun, is_full)?, at))
    };
    clients.iter().enumerate().filter_map(until).min()
}

/// The client that makes room for one that waits in the backlog.
fn stuck(clients: &[Client], now: Instant) -> Option<usize> {
    let (_, at) = oldest(clients, false).filter(|(until, _)| now >= *until)?;
    // What has come meanwhile is looked at first.
    let ready = clients[at].file().map(|file| poll(&mut [file], Some(&Timespec::default())));
    (ready == Some(Ok(0))).then_some(at)
}

/// Tells a client why it is not connected, as far as that can be without waiting.
pub(crate) fn refuse(stream: &impl AsFd, reason: Refusal) {
    // Unread bytes would have the system throw the refusal away.
    let _ = net::recv(stream, &mut [0; 512], RecvFlags::DONTWAIT);
    let _ = net::send(stream, reason.bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
    let _ = net::shutdown(stream, net::Shutdown::Write);
}

/// The streams that a [`Listener`] accepts.
#[derive(Debug)]
pub struct Incoming<'l>(&'l Listener);

impl Iterator for Incoming<'_> {
    type Item = io::Result<Stream>;

    /// `None`: the hub was stopped.
    fn next(&mut self) -> Option<io::Result<Stream>> {
        let accepted = self.0.accept().map(|(stream, _)| stream);
        if accepted.is_err() && self.0.hub.inner.lock().stopped.is_some() {
            None
        } else {
            Some(accepted)
        }
    }
}

#[cfg(test)]
mod tests {
    use ibverbs_software::Device;

    use super::*;

    #[test]
    fn each_address_of_a_name_gets_its_share_of_the_time_that_is_left() {
        let device = Device::new().unwrap();
        let builder = Hub::builder(&Arc::new(device.open().unwrap())).max_connections(4);
        let hub = builder.build().unwrap();
        let addresses = [1, 2, 3].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        let hour = Duration::from_secs(3600);
        let mut seen = Vec::new();
        let connected = first(&hub, &addresses[..], Instant::now() + hour, |_, to, until| {
            seen.push((to, until.saturating_duration_since(Instant::now())));
            io::Result::<()>::Err(ErrorKind::TimedOut.into())
        });
        let error = connected.unwrap_err();
        assert!(error.to_string().starts_with("127.0.0.1:3 has not answered within"), "{error}");
        // None of them has taken its time.
        for (at, (to, share)) in seen.into_iter().enumerate() {
            let most = hour / (3 - at as u32);
            assert_eq!(to, addresses[at]);
            assert!(share <= most && share > most - hour / 10, "{to}: {share:?}");
        }
    }
}
