use std::ffi::c_int;
use std::fmt;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::error::{ExchangeError, ExchangeStage};
use super::exchange::{Attempt, Exchange, Role};
use super::wire::check_private_data;
use crate::base::{StateError, linux};
use crate::channel::{Channel, PreparedChannel};
use crate::connect::handshake::{Handshake, Step};
use crate::verbs::device::event_file::poll;
use crate::verbs::queue_pair::{Connected, PreparedQueuePair, QueuePair};

/// The silence after which the kernel probes the peer's host.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// Unanswered probes after which the peer counts as dead.
const KEEPALIVE_PROBES: c_int = 4;

macro_rules! connect_over_methods {
    ($connected:ty) => {
        /// [Connects](crate::PreparedChannel::connect) over a stream that is already connected: a Unix socket, TLS, or a
        /// [`TcpStream`](std::net::TcpStream). The caller keeps the stream, without a deadline on its waits, and nothing watches
        /// it: when the peer dies, sends fail once the device has used up its retries, and receives wait for ever. A channel
        /// that is given a TCP stream by [`Channel::keep_stream`](crate::Channel::keep_stream) lets its
        /// [`Loop`](crate::Loop) notice.
        ///
        /// # Errors
        ///
        /// Those of [`PreparedChannel::connect`]. Close the stream then: its state is unspecified.
        pub fn connect_over(
            self,
            stream: &mut (impl $crate::tcp::DeadlineStream + ?Sized),
            private_data: &[u8],
            deadline: std::time::Instant,
        ) -> $crate::connect::tcp::Attempt<($connected, Vec<u8>), Self> {
            let role = $crate::connect::tcp::Role::Connects;
            $crate::connect::tcp::exchange(self, role, stream, private_data, deadline)
        }

        /// [Accepts](crate::PreparedChannel::accept) over a stream that is already connected: see
        /// [`connect_over`](Self::connect_over), also for a program that watches the stream.
        ///
        /// # Errors
        ///
        /// Those of [`connect_over`](Self::connect_over).
        pub fn accept_over(
            self,
            stream: &mut (impl $crate::tcp::DeadlineStream + ?Sized),
            private_data: &[u8],
            deadline: std::time::Instant,
        ) -> $crate::connect::tcp::Attempt<($connected, Vec<u8>), Self> {
            let role = $crate::connect::tcp::Role::Accepts;
            $crate::connect::tcp::exchange(self, role, stream, private_data, deadline)
        }

        /// [`connect_over`](Self::connect_over) in steps that do not wait, so that one thread serves many peers, such
        /// as with a [`Loop`](crate::Loop).
        ///
        /// # Errors
        ///
        ///  - [`PrivateDataTooLong`](crate::tcp::ExchangeError::PrivateDataTooLong).
        pub fn begin_connect(
            self,
            private_data: &[u8],
        ) -> $crate::connect::tcp::Attempt<$crate::tcp::Exchange<Self>, Self> {
            let role = $crate::connect::tcp::Role::Connects;
            $crate::tcp::Exchange::new(self, role, private_data)
        }

        /// [`accept_over`](Self::accept_over) in [steps](crate::tcp::Exchange) that do not wait.
        ///
        /// ```no_run
        /// # // not on Soft-RoCE alone: needs a peer
        /// use std::net::TcpStream;
        /// use ibverbs::tcp::{Exchange, ExchangeError, Step};
        /// use ibverbs::{Channel, PreparedChannel};
        ///
        /// /// One of many that connect, over a stream that does not block.
        /// struct Guest<'res> {
        ///     stream: TcpStream,
        ///     exchange: Exchange<PreparedChannel<'res>>,
        /// }
        ///
        /// /// To be called when the stream is readable.
        /// fn goes_on(mut guest: Guest<'_>) -> Result<Step<Channel<'_>, Guest<'_>>, ExchangeError> {
        ///     Ok(match guest.exchange.step(&mut guest.stream)? {
        ///         Step::Done((channel, _private_data)) => Step::Done(channel),
        ///         Step::Pending(exchange) => Step::Pending(Guest { exchange, ..guest }),
        ///     })
        /// }
        /// ```
        ///
        /// # Errors
        ///
        /// Those of [`begin_connect`](Self::begin_connect).
        pub fn begin_accept(
            self,
            private_data: &[u8],
        ) -> $crate::connect::tcp::Attempt<$crate::tcp::Exchange<Self>, Self> {
            let role = $crate::connect::tcp::Role::Accepts;
            $crate::tcp::Exchange::new(self, role, private_data)
        }
    };
}
pub(crate) use connect_over_methods;

/// Connecting over TCP or another stream.
impl<'res> PreparedChannel<'res> {
    /// Connects to the peer that [accepts](Self::accept) at `address`. Returns the channel, ready on both sides, and
    /// the peer's private data.
    ///
    /// Both sides exchange their endpoints and up to [`MAX_PRIVATE_DATA`](crate::tcp::MAX_PRIVATE_DATA) bytes of
    /// private data over TCP, and shake hands. The TCP stream stays open as long as the channel: see
    /// [`Channel::peer_is_gone`].
    ///
    /// ```no_run
    /// # // not on Soft-RoCE alone: needs a peer
    /// use std::time::{Duration, Instant};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let context = ibverbs::open("rxe0")?;
    /// # let domain = context.alloc_pd()?;
    /// let deadline = Instant::now() + Duration::from_secs(10);
    /// let prepared = domain.create_channel().build()?;
    /// let (mut channel, told) = prepared.connect("server:18515", b"my name", deadline)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// The deadline bounds everything but the look-up of a host name, which a [`SocketAddr`](std::net::SocketAddr)
    /// avoids, and the kernel's look-up of the peer's MAC address.
    ///
    /// Neither this TCP traffic nor RDMA is encrypted or authenticated; [`connect_over`](Self::connect_over) takes a
    /// stream that is.
    ///
    /// # Errors
    ///
    /// See [`ExchangeError`]. The peer is told, or sees the end of the stream. The channel comes back in the
    /// [`StateError`] for another attempt, [reset](Channel::reset) if its own handshake was done.
    pub fn connect(
        self,
        address: impl ToSocketAddrs + fmt::Debug,
        private_data: &[u8],
        deadline: Instant,
    ) -> Attempt<(Channel<'res>, Vec<u8>), Self> {
        let stream = check_private_data(private_data).and_then(|_| dial(address, deadline));
        over(self, Role::Connects, true, stream, private_data, deadline).map(keep)
    }

    /// Waits for a peer that [connects](Self::connect) to the listener, and connects to it.
    ///
    /// Several threads may wait at one listener if all use this method: it makes the listener non-blocking while it
    /// accepts. A client that fails to connect makes this return an error. So a server for arbitrary clients accepts
    /// the stream itself, on a thread that may wait, and calls [`accept_over`](Self::accept_over).
    ///
    /// ```no_run
    /// # // not on Soft-RoCE alone: needs a peer
    /// use std::net::TcpListener;
    /// use std::time::{Duration, Instant};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let context = ibverbs::open("rxe0")?;
    /// # let domain = context.alloc_pd()?;
    /// let listener = TcpListener::bind("[::]:18515")?;
    /// let deadline = Instant::now() + Duration::from_secs(60);
    /// let prepared = domain.create_channel().build()?;
    /// let (mut channel, told) = prepared.accept(&listener, b"welcome", deadline)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`connect`](Self::connect).
    pub fn accept(
        self,
        listener: &TcpListener,
        private_data: &[u8],
        deadline: Instant,
    ) -> Attempt<(Channel<'res>, Vec<u8>), Self> {
        let stream = check_private_data(private_data).and_then(|_| next_client(listener, deadline));
        over(self, Role::Accepts, true, stream, private_data, deadline).map(keep)
    }

    connect_over_methods!(Channel<'res>);
}

/// Connecting over TCP or another stream.
impl<'res, T: Connected> PreparedQueuePair<'res, T> {
    /// [Connects](PreparedChannel::connect), and also returns the TCP stream for the program to keep: see
    /// [`peer_has_closed`].
    ///
    /// # Errors
    ///
    /// Those of [`PreparedChannel::connect`].
    pub fn connect(
        self,
        address: impl ToSocketAddrs + fmt::Debug,
        private_data: &[u8],
        deadline: Instant,
    ) -> Attempt<(QueuePair<'res, T>, Vec<u8>, TcpStream), Self> {
        let stream = check_private_data(private_data).and_then(|_| dial(address, deadline));
        over(self, Role::Connects, false, stream, private_data, deadline)
    }

    /// [Accepts](PreparedChannel::accept), and also returns the TCP stream for the program to keep: see
    /// [`peer_has_closed`].
    ///
    /// # Errors
    ///
    /// Those of [`PreparedChannel::connect`].
    pub fn accept(
        self,
        listener: &TcpListener,
        private_data: &[u8],
        deadline: Instant,
    ) -> Attempt<(QueuePair<'res, T>, Vec<u8>, TcpStream), Self> {
        let stream = check_private_data(private_data).and_then(|_| next_client(listener, deadline));
        over(self, Role::Accepts, false, stream, private_data, deadline)
    }

    connect_over_methods!(QueuePair<'res, T>);
}

/// The stream over which the channel was connected. It shows whether the peer is alive.
impl Channel<'_> {
    /// The TCP stream of [`connect`](PreparedChannel::connect) or [`accept`](PreparedChannel::accept), for the
    /// program's own use: nothing else reads or writes there. The channel keeps it across a [reset](Channel::reset) and
    /// the next [`handshake`](PreparedChannel::handshake).
    pub fn stream(&self) -> Option<&TcpStream> {
        self.link.stream.as_ref()
    }

    /// Gives the channel the stream over which the program has connected it, such as by
    /// [`accept_over`](PreparedChannel::accept_over) or an [`Exchange`](crate::tcp::Exchange). The [`Loop`](crate::Loop)
    /// that it is [added](crate::Loop::add) to then notices that the peer is gone.
    pub fn keep_stream(&mut self, stream: TcpStream) {
        self.link.keep_stream(stream);
    }

    /// Takes the TCP stream out of the channel. When it is closed, the peer's [`Loop`](crate::Loop) takes this side for
    /// gone.
    pub fn take_stream(&mut self) -> Option<TcpStream> {
        self.link.stream.take()
    }

    /// Asks the kernel, without waiting, whether the peer has closed its end of the [stream](Self::stream): it dropped
    /// its channel, ended, or died.
    ///
    /// It also counts as gone when its host has not answered for about 30 seconds, such as after a loss of power.
    ///
    /// # Errors
    ///
    ///  - `NotConnected`: the channel has no stream.
    ///  - Those of [`peer_has_closed`].
    pub fn peer_is_gone(&self) -> io::Result<bool> {
        peer_has_closed(self.required_stream()?)
    }

    /// Waits until [`peer_is_gone`](Self::peer_is_gone); returns false if the deadline passes first. For a side that
    /// only lends its memory, and must keep it as long as the peer may use it.
    ///
    /// # Errors
    ///
    /// Those of [`peer_is_gone`](Self::peer_is_gone).
    pub fn wait_until_peer_is_gone(&self, deadline: Instant) -> io::Result<bool> {
        wait_until_peer_closes(self.required_stream()?, deadline)
    }

    fn required_stream(&self) -> io::Result<&TcpStream> {
        let reason = "the channel was not connected over a TCP stream, or the stream was taken";
        self.stream().ok_or_else(|| io::Error::new(io::ErrorKind::NotConnected, reason))
    }
}

/// Whether the peer has closed its end of a stream socket, even if its data is still unread. This does not wait, and
/// reads nothing.
///
/// For TLS, pass the underlying socket.
///
/// # Errors
///
///  - `OutOfMemory`: the kernel has no memory left for the query.
pub fn peer_has_closed(stream: impl AsFd) -> io::Result<bool> {
    poll(stream.as_fd(), crate::base::linux::POLLRDHUP, Instant::now())
}

/// Waits until [`peer_has_closed`]; returns false if the deadline passes first.
///
/// # Errors
///
/// Those of [`peer_has_closed`].
pub fn wait_until_peer_closes(stream: impl AsFd, deadline: Instant) -> io::Result<bool> {
    poll(stream.as_fd(), crate::base::linux::POLLRDHUP, deadline)
}

fn keep<'res>(
    (mut channel, private_data, stream): (Channel<'res>, Vec<u8>, TcpStream),
) -> (Channel<'res>, Vec<u8>) {
    channel.link.stream = Some(stream);
    (channel, private_data)
}

/// Without a stream, returns its error.
fn over<P: Handshake>(
    prepared: P,
    role: Role,
    keeps: bool,
    stream: Result<TcpStream, ExchangeError>,
    private_data: &[u8],
    deadline: Instant,
) -> Attempt<(P::Connected, Vec<u8>, TcpStream), P> {
    let set_up = |stream: TcpStream| {
        stream.set_nodelay(true).and_then(|()| watch_host(&stream)).map_err(ExchangeError::Io)?;
        Ok(stream)
    };
    let stream = match stream.and_then(set_up) {
        Ok(stream) => stream,
        Err(error) => return Err(StateError::new(prepared, error)),
    };
    let mut exchange = Exchange::new(prepared, role, private_data)?.keeping(keeps);
    loop {
        exchange = match exchange.step(&mut Ready(&stream))? {
            Step::Done((connected, theirs)) => return Ok((connected, theirs, stream)),
            Step::Pending(exchange) => exchange,
        };
        let events = if exchange.to_send().is_empty() { libc::POLLIN } else { libc::POLLOUT };
        // A peer that sends byte by byte keeps the socket readable.
        let error = match poll(stream.as_fd(), events, deadline) {
            Ok(true) if Instant::now() < deadline => continue,
            Ok(_) => io::ErrorKind::TimedOut.into(),
            Err(error) => error,
        };
        return Err(exchange.fail(ExchangeError::from_stream(error)));
    }
}

/// Never blocks, though the socket may for others.
struct Ready<'s>(&'s TcpStream);

impl Read for Ready<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let start = bytes.as_mut_ptr().cast();
        // SAFETY: the borrowed socket is open, and the kernel writes at most the length of `bytes`.
        done(unsafe { libc::recv(self.0.as_raw_fd(), start, bytes.len(), libc::MSG_DONTWAIT) })
    }
}

impl Write for Ready<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: the borrowed socket is open, and the kernel reads at most the length of `bytes`.
        done(unsafe { libc::send(self.0.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), flags) })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn done(returned: isize) -> io::Result<usize> {
    usize::try_from(returned).map_err(|_| io::Error::last_os_error())
}

/// Finds a dead host even if nothing is sent.
fn watch_host(stream: &TcpStream) -> io::Result<()> {
    let seconds = |time: Duration| c_int::try_from(time.as_secs()).unwrap_or(c_int::MAX);
    for (level, option, value) in [
        (libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1),
        (libc::IPPROTO_TCP, linux::TCP_KEEPIDLE, seconds(KEEPALIVE_IDLE)),
        (libc::IPPROTO_TCP, linux::TCP_KEEPINTVL, seconds(KEEPALIVE_INTERVAL)),
        (libc::IPPROTO_TCP, linux::TCP_KEEPCNT, KEEPALIVE_PROBES),
    ] {
        let length = size_of::<c_int>() as libc::socklen_t;
        let value: *const c_int = &value;
        // SAFETY: the borrowed socket is open; each option takes an int, and `value` points to `length` bytes.
        let returned =
            unsafe { libc::setsockopt(stream.as_raw_fd(), level, option, value.cast(), length) };
        if returned != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Tries the name's addresses in turn. Each gets its share of the time that is left.
fn dial(
    address: impl ToSocketAddrs + fmt::Debug,
    deadline: Instant,
) -> Result<TcpStream, ExchangeError> {
    let addresses = address.to_socket_addrs().map_err(|error| {
        let text =
            format!("{address:?}: {error} (the address is HOST:PORT, such as \"server:18515\")");
        ExchangeError::Io(io::Error::new(error.kind(), text))
    })?;
    let addresses: Vec<_> = addresses.collect();
    let mut last = None;
    for (tried, &address) in addresses.iter().enumerate() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let error = io::ErrorKind::TimedOut.into();
            return Err(ExchangeError::NoConnection { address, error });
        }
        let share = left / u32::try_from(addresses.len() - tried).unwrap_or(u32::MAX);
        match TcpStream::connect_timeout(&address, share.max(Duration::from_millis(1))) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = Some(ExchangeError::NoConnection { address, error }),
        }
    }
    Err(last.unwrap_or_else(|| {
        let reason = format!("{address:?}: the host name has no address");
        ExchangeError::Io(io::Error::new(io::ErrorKind::NotFound, reason))
    }))
}

fn next_client(listener: &TcpListener, deadline: Instant) -> Result<TcpStream, ExchangeError> {
    use io::ErrorKind as Kind;

    loop {
        if !poll(listener.as_fd(), libc::POLLIN, deadline).map_err(ExchangeError::Io)? {
            return Err(ExchangeError::TimedOut(ExchangeStage::Stream));
        }
        match accept_now(listener) {
            Ok(stream) => return Ok(stream),
            // The client has left, or another thread has it.
            Err(error)
                if matches!(
                    error.kind(),
                    Kind::WouldBlock | Kind::Interrupted | Kind::ConnectionAborted
                ) => {}
            Err(error) => return Err(ExchangeError::Io(error)),
        }
    }
}

/// Another thread may accept the client first, so the listener must not block. All threads share the socket's
/// blocking mode, and take turns to change it.
fn accept_now(listener: &TcpListener) -> io::Result<TcpStream> {
    static TURN: Mutex<()> = Mutex::new(());

    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the borrowed listener is open, and `F_GETFL` takes no argument.
    let flags = unsafe { libc::fcntl(listener.as_raw_fd(), libc::F_GETFL) };
    if flags < 0 {
        return Err(io::Error::last_os_error());
    }
    let blocks = flags & libc::O_NONBLOCK == 0;
    if blocks {
        listener.set_nonblocking(true)?;
    }
    let accepted = listener.accept();
    if blocks {
        listener.set_nonblocking(false)?;
    }
    Ok(accepted?.0)
}
