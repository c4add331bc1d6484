//! Streams of tokio's tasks: what `tokio::net` is for TCP.
//!
//! A hub is driven by a task, which the first stream or listener starts on the runtime where that is made; it ends with the last
//! stream of the hub. On another runtime, spawn [`Hub::run_on_tokio`](crate::Hub::run_on_tokio).

use std::future::poll_fn;
use std::io::{self, ErrorKind, IoSlice};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll, Waker, ready};
use std::time::Instant;
use std::{fmt, mem};

use ::tokio::io::unix::AsyncFd;
use ::tokio::io::{
    AsyncBufRead, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, Interest, ReadBuf,
};
use ::tokio::net::{TcpListener, TcpStream, ToSocketAddrs};
use ::tokio::task::{AbortHandle, JoinSet, coop};
#[cfg(feature = "rdmacm")]
use ibverbs::rdmacm;
use ibverbs::tcp::Exchange;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use crate::StreamError;
use crate::conn::Cursor;
use crate::connect::{AT_A_TIME, PATIENCE, SILENCE, explain};
use crate::hub::{Hub, Inner, State, TURN, now};
use crate::joining::{Joined, Joining, Role};
#[cfg(feature = "rdmacm")]
use crate::manager;
use crate::stream::{Addresses, Handle, Reader, Writer};
use crate::watch::{Lifeline, Sockets, Task};

impl Hub {
    /// Serves all streams of the hub, until it is [stopped](Self::stop), or the last stream and handle of the hub is dropped.
    ///
    /// # Errors
    ///
    ///  - Those of the device: all streams have ended with them.
    ///
    /// # Panics
    ///
    /// Outside of a runtime of tokio whose I/O and time are enabled.
    pub async fn run_on_tokio(&self) -> io::Result<()> {
        self.inner.drivers().fetch_add(1, Ordering::SeqCst);
        let started = Started(Arc::downgrade(&self.inner));
        drive(&started.0, Files::new(&self.inner)?).await
    }
}

/// What a hub's task sleeps on.
struct Files {
    /// One descriptor for all that the hub polls for.
    polled: AsyncFd<OwnedFd>,
    ends: AsyncFd<OwnedFd>,
    /// They tell that the hub is gone.
    _sockets: Arc<Sockets>,
}

impl Files {
    fn new(inner: &Inner) -> io::Result<Self> {
        let all = epoll::create(CreateFlags::CLOEXEC)?;
        let state = inner.lock();
        for file in [state.lp.as_fd(), inner.waker.as_fd()] {
            epoll::add(&all, file, EventData::new_u64(0), EventFlags::IN)?;
        }
        drop(state);
        let ends = inner.sockets.as_fd().try_clone_to_owned()?;
        Ok(Self {
            polled: AsyncFd::with_interest(all, Interest::READABLE)?,
            ends: AsyncFd::with_interest(ends, Interest::READABLE)?,
            _sockets: inner.sockets.clone(),
        })
    }
}

/// Starts a task that serves the hub, if nothing does.
fn ensure_driven(inner: &Arc<Inner>) -> io::Result<()> {
    if inner.drivers().compare_exchange(0, 1, Ordering::SeqCst, Ordering::SeqCst).is_err() {
        return Ok(());
    }
    let started = Started(Arc::downgrade(inner));
    // Made here, since the caller gets an error, and nobody would get the task's.
    let files = Files::new(inner)?;
    ::tokio::spawn(async move {
        // The streams have its errors.
        let _ = drive(&started.0, files).await;
    });
    Ok(())
}

/// Counts as what drives a hub, until it is dropped.
struct Started(Weak<Inner>);

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(inner) = self.0.upgrade() {
            inner.is_left();
        }
    }
}

/// Serves a hub.
async fn drive(hub: &Weak<Inner>, files: Files) -> io::Result<()> {
    let (mut idle, mut may_have_ended) = (0, true);
    let mut at = now();
    let mut sleep = pin!(::tokio::time::sleep_until(at.into()));
    loop {
        let Some(inner) = hub.upgrade() else { return Ok(()) };
        let arms = idle >= inner.config.spin;
        let Some((count, due)) = serve(&inner, arms, mem::take(&mut may_have_ended))? else {
            return Ok(());
        };
        drop(inner);
        if count == TURN || !arms {
            idle = if count > 0 { 0 } else { idle + 1 };
            ::tokio::task::yield_now().await;
            continue;
        }
        // It was armed before it was polled: what has ended since then is told.
        idle = 0;
        if due != at {
            at = due;
            sleep.as_mut().reset(at.into());
        }
        may_have_ended = poll_fn(|cx| {
            // They are cleared before they are looked at: what happens from now on is told again.
            let ended = files.ends.poll_read_ready(cx).map_ok(|mut ready| ready.clear_ready())?;
            let found = files.polled.poll_read_ready(cx).map_ok(|mut ready| ready.clear_ready())?;
            let is_due = sleep.as_mut().poll(cx);
            if ended.is_ready() || found.is_ready() || is_due.is_ready() {
                return Poll::Ready(io::Result::Ok(ended.is_ready()));
            }
            Poll::Pending
        })
        .await?;
    }
}

/// Polls once. Returns how much it has found, and when something is due; `None` when the hub was stopped.
fn serve(inner: &Inner, arms: bool, may_have_ended: bool) -> io::Result<Option<(usize, Instant)>> {
    if may_have_ended {
        inner.look_at(&inner.sockets.ended(false).unwrap_or_default());
    }
    let mut state = inner.lock();
    if arms && let Err(error) = state.lp.arm() {
        state.stop(StreamError::Transport(error.into()));
    }
    let count = state.turn();
    let due = state.due(now());
    state.count_sleep(arms && count < TURN);
    match state.stopped {
        Some(StreamError::Aborted) => Ok(None),
        Some(error) => Err(error.into()),
        None => Ok(Some((count, due))),
    }
}

/// What a task waits for: the stream's reader, or its writer.
type Place = fn(&mut crate::hub::Member) -> &mut Option<Waker>;

/// Looks for something. If it is not there, the task is woken when it is.
fn poll_for<T>(
    handle: &Handle,
    cx: &Context<'_>,
    place: Place,
    mut look: impl FnMut(&mut State) -> Result<Option<T>, StreamError>,
) -> Poll<io::Result<T>> {
    let mut waker = None;
    loop {
        let mut state = handle.hub.lock();
        if let Some(found) = look(&mut state)? {
            return Poll::Ready(Ok(found));
        }
        let Some(member) = state.member(handle.id) else {
            return Poll::Ready(Err(StreamError::Aborted.into()));
        };
        let place = place(member);
        if place.as_ref().is_some_and(|own| own.will_wake(cx.waker())) {
            return Poll::Pending;
        }
        if let Some(waker) = waker.take() {
            let before = place.replace(waker);
            drop(state);
            // A waker is code of the program's.
            drop(before);
            return Poll::Pending;
        }
        drop(state);
        waker = Some(cx.waker().clone());
    }
}

impl Reader {
    /// Waits until there is a piece, or else the end.
    pub(crate) fn poll_piece(&mut self, cx: &Context<'_>) -> Poll<io::Result<()>> {
        if self.has_piece() {
            return Poll::Ready(Ok(()));
        }
        self.look(|handle, look| poll_for(handle, cx, |member| &mut member.reader, look))
    }

    fn poll_read(&mut self, cx: &mut Context<'_>, to: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if to.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        let budget = ready!(coop::poll_proceed(cx));
        ready!(self.poll_piece(cx))?;
        budget.made_progress();
        let len = self.bytes().len().min(to.remaining());
        to.put_slice(&self.bytes()[..len]);
        self.consume(len);
        Poll::Ready(Ok(()))
    }

    fn poll_fill_buf(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<&[u8]>> {
        let budget = ready!(coop::poll_proceed(cx));
        ready!(self.poll_piece(cx))?;
        budget.made_progress();
        Poll::Ready(Ok(self.bytes()))
    }
}

impl Writer {
    pub(crate) fn poll_write(
        &self,
        cx: &mut Context<'_>,
        from: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if from.iter().all(|piece| piece.is_empty()) {
            return Poll::Ready(Ok(0));
        }
        let budget = ready!(coop::poll_proceed(cx));
        let id = self.handle.id;
        let written = ready!(poll_for(
            &self.handle,
            cx,
            |member| &mut member.writer,
            |state| { state.write(id, &mut Cursor::new(from)) }
        ))?;
        budget.made_progress();
        Poll::Ready(Ok(written))
    }

    pub(crate) fn poll_flush(&self, cx: &Context<'_>) -> Poll<io::Result<()>> {
        let id = self.handle.id;
        let flush = |state: &mut State| Ok(state.flush(id)?.then_some(()));
        poll_for(&self.handle, cx, |member| &mut member.writer, flush)
    }

    pub(crate) fn poll_shutdown(&self, cx: &Context<'_>) -> Poll<io::Result<()>> {
        self.handle.shutdown();
        let id = self.handle.id;
        poll_for(
            &self.handle,
            cx,
            |member| &mut member.writer,
            |state| {
                let member = state.member(id).ok_or(StreamError::Aborted)?;
                Ok(member.conn.is_shut_down()?.then_some(()))
            },
        )
    }
}

/// Connects over a stream, up to what the peer says of itself.
async fn join<T>(mut joining: Joining, stream: &mut T) -> io::Result<(Joining, Vec<u8>)>
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    ensure_driven(joining.hub())?;
    loop {
        if let Joined::Done(hello) = joining.step(Exchange::advance)? {
            return Ok((joining, hello));
        }
        let exchange = joining.exchange();
        let mut bytes = [0; 256];
        let most = exchange.wants().min(bytes.len());
        let carried = match exchange.to_send() {
            [] => {
                let read = stream.read(&mut bytes[..most]).await;
                read.map(|len| exchange.received(&bytes[..len]))
            }
            to_send => stream.write(to_send).await.inspect(|&len| exchange.sent(len)),
        };
        match carried {
            Ok(0) => return Err(ErrorKind::ConnectionRefused.into()),
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {
                return Err(ErrorKind::ConnectionRefused.into());
            }
            carried => drop(carried?),
        }
    }
}

/// Connects over a stream that the hub watches, without a task.
async fn over_tcp(joining: Joining, mut stream: TcpStream) -> io::Result<Stream> {
    stream.set_nodelay(true)?;
    let (joining, hello) = join(joining, &mut stream).await?;
    let stream = stream.into_std()?;
    let addresses = Addresses::of(&stream);
    joining.finish(&hello, Lifeline::Socket(stream.into()), addresses).map(Stream::new)
}

/// The half of a [`Stream`] that reads.
pub struct ReadHalf(Reader);

/// The half of a [`Stream`] that writes. Dropping it ends the direction, as `shutdown` does, without waiting.
pub struct WriteHalf(Writer);

/// A stream of bytes to one peer over RDMA, for tasks: what [`TcpStream`] is over TCP.
///
/// - A write that is not ready has taken nothing, and a future that is dropped leaves nothing behind.
/// - `write_vectored` takes from all pieces. What is written while something is in flight is gathered, and goes when that has
///   arrived; or before, by `flush`, which is ready when all of it has been posted, and none of it waits for the hub's task.
/// - `shutdown` is ready when the peer's device has everything that was written.
/// - `AsyncBufRead` gives the buffers in which bytes have arrived, without a copy.
/// - One task at a time waits to read, and one to write: the last one that asks.
pub struct Stream {
    // In this order: what was not read decides how the stream ends.
    read: ReadHalf,
    write: WriteHalf,
}

impl Stream {
    fn new(handle: Handle) -> Self {
        let handle = Arc::new(handle.of_tasks());
        Self { read: ReadHalf(Reader::new(handle.clone())), write: WriteHalf(Writer { handle }) }
    }

    fn handle(&self) -> &Handle {
        &self.write.0.handle
    }

    /// Connects to a [`Listener`] at an address, over TCP, and then moves to RDMA. There is no deadline but that of TCP: use
    /// [`timeout`](::tokio::time::timeout).
    ///
    /// # Errors
    ///
    /// Those of [`Stream::connect`](crate::Stream::connect).
    pub async fn connect(hub: &Hub, address: impl ToSocketAddrs) -> io::Result<Self> {
        let stream = TcpStream::connect(address).await.map_err(explain)?;
        over_tcp(Joining::new(&hub.inner, Role::Connects)?, stream).await
    }

    /// `rdma_connect`: connects by the connection manager: see
    /// [`Stream::connect_rdmacm`](crate::Stream::connect_rdmacm). It looks for the route for ten seconds at most; for the rest
    /// there is no deadline but the connection manager's: use [`timeout`](::tokio::time::timeout).
    ///
    /// # Errors
    ///
    /// Those of [`Stream::connect_rdmacm`](crate::Stream::connect_rdmacm).
    #[cfg(feature = "rdmacm")]
    #[doc(alias = "rdma_connect")]
    pub async fn connect_rdmacm(hub: &Hub, address: impl ToSocketAddrs) -> io::Result<Self> {
        ensure_driven(&hub.inner)?;
        let mut last = io::Error::new(ErrorKind::InvalidInput, "the name has no address");
        for to in ::tokio::net::lookup_host(address).await.map_err(explain)? {
            match manager::connect_on_tokio(&hub.inner, to, now() + PATIENCE).await {
                Ok(handle) => return Ok(Self::new(handle)),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Connects to the peer at the other end of a stream: a Unix socket, one of TLS, or one of a
    /// [simulation](https://docs.rs/ibverbs-software/latest/ibverbs_software/fn.simulate.html). The stream is used for the connection
    /// alone. A task keeps it, and takes its end for that of the peer.
    ///
    /// # Errors
    ///
    /// Those of [`Stream::connect`](crate::Stream::connect).
    pub async fn over<T>(hub: &Hub, mut stream: T, role: Role) -> io::Result<Self>
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let joining = Joining::new(&hub.inner, role)?;
        let (joining, hello) = join(joining, &mut stream).await?;
        let (inner, id) = (Arc::downgrade(&hub.inner), joining.id());
        let watch = ::tokio::spawn(async move {
            // Nothing comes but the end.
            let _ = stream.read(&mut [0]).await;
            if let Some(inner) = inner.upgrade() {
                inner.lock().is_gone(id);
            }
        });
        let handle = joining.finish(&hello, Lifeline::Task(Task(watch)), Addresses::default())?;
        Ok(Self::new(handle))
    }

    /// The two directions, for a task each.
    pub fn into_split(self) -> (ReadHalf, WriteHalf) {
        (self.read, self.write)
    }

    /// As [`into_split`](Self::into_split), for tasks that borrow the stream.
    pub fn split(&mut self) -> (&mut ReadHalf, &mut WriteHalf) {
        (&mut self.read, &mut self.write)
    }

    /// `true`: what is written goes on its way at once, as long as the peer takes it, and is not gathered.
    pub fn set_nodelay(&self, nodelay: bool) {
        self.handle().set_nodelay(nodelay);
    }

    /// Waits until a read would not wait.
    pub async fn readable(&mut self) {
        // An error is one of the next read.
        let _ = poll_fn(|cx| self.read.0.poll_piece(cx)).await;
    }

    /// Waits until a write would not wait, unless another stream takes the last buffer first.
    pub async fn writable(&self) {
        let handle = self.handle();
        let _ = poll_fn(|cx| {
            poll_for(
                handle,
                cx,
                |member| &mut member.writer,
                |state| {
                    let member = state.member(handle.id).ok_or(StreamError::Aborted)?;
                    Ok(member.conn.can_write().then_some(()))
                },
            )
        })
        .await;
    }

    /// The peer's address, of the TCP stream over which the two sides have connected, or the connection manager's.
    ///
    /// # Errors
    ///
    ///  - `Unsupported`: they have connected over another stream, which has none.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.handle().peer_addr()
    }

    /// As [`peer_addr`](Self::peer_addr), the own address.
    ///
    /// # Errors
    ///
    /// As [`peer_addr`](Self::peer_addr).
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.handle().local_addr()
    }

    /// Why the stream has failed, if it has.
    pub fn take_error(&self) -> Option<StreamError> {
        self.handle().error()
    }
}

macro_rules! reads {
    ($type:ident: $($field:tt).+) => {
        impl AsyncRead for $type {
            fn poll_read(
                self: Pin<&mut Self>,
                cx: &mut Context<'_>,
                to: &mut ReadBuf<'_>,
            ) -> Poll<io::Result<()>> {
                self.get_mut().$($field).+.poll_read(cx, to)
            }
        }

        impl AsyncBufRead for $type {
            fn poll_fill_buf(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<&[u8]>> {
                self.get_mut().$($field).+.poll_fill_buf(cx)
            }

            fn consume(self: Pin<&mut Self>, len: usize) {
                self.get_mut().$($field).+.consume(len);
            }
        }
    };
}

macro_rules! writes {
    ($type:ident: $($field:tt).+) => {
        impl AsyncWrite for $type {
            fn poll_write(
                self: Pin<&mut Self>,
                cx: &mut Context<'_>,
                from: &[u8],
            ) -> Poll<io::Result<usize>> {
                self.$($field).+.poll_write(cx, &[IoSlice::new(from)])
            }

            fn poll_write_vectored(
                self: Pin<&mut Self>,
                cx: &mut Context<'_>,
                from: &[IoSlice<'_>],
            ) -> Poll<io::Result<usize>> {
                self.$($field).+.poll_write(cx, from)
            }

            fn is_write_vectored(&self) -> bool {
                true
            }

            fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                self.$($field).+.poll_flush(cx)
            }

            fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                self.$($field).+.poll_shutdown(cx)
            }
        }
    };
}

reads!(Stream: read.0);
reads!(ReadHalf: 0);
writes!(Stream: write.0);
writes!(WriteHalf: 0);

#[cfg(feature = "futures-io")]
mod on_futures {
    use futures_io as traits;

    use super::*;

    macro_rules! reads {
        ($type:ident: $($field:tt).+) => {
            impl traits::AsyncRead for $type {
                fn poll_read(
                    self: Pin<&mut Self>,
                    cx: &mut Context<'_>,
                    to: &mut [u8],
                ) -> Poll<io::Result<usize>> {
                    let mut to = ReadBuf::new(to);
                    let read = self.get_mut().$($field).+.poll_read(cx, &mut to);
                    read.map_ok(|()| to.filled().len())
                }
            }

            impl traits::AsyncBufRead for $type {
                fn poll_fill_buf(
                    self: Pin<&mut Self>,
                    cx: &mut Context<'_>,
                ) -> Poll<io::Result<&[u8]>> {
                    self.get_mut().$($field).+.poll_fill_buf(cx)
                }

                fn consume(self: Pin<&mut Self>, len: usize) {
                    self.get_mut().$($field).+.consume(len);
                }
            }
        };
    }

    macro_rules! writes {
        ($type:ident: $($field:tt).+) => {
            impl traits::AsyncWrite for $type {
                fn poll_write(
                    self: Pin<&mut Self>,
                    cx: &mut Context<'_>,
                    from: &[u8],
                ) -> Poll<io::Result<usize>> {
                    self.$($field).+.poll_write(cx, &[IoSlice::new(from)])
                }

                fn poll_write_vectored(
                    self: Pin<&mut Self>,
                    cx: &mut Context<'_>,
                    from: &[IoSlice<'_>],
                ) -> Poll<io::Result<usize>> {
                    self.$($field).+.poll_write(cx, from)
                }

                fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                    self.$($field).+.poll_flush(cx)
                }

                fn poll_close(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                    self.$($field).+.poll_shutdown(cx)
                }
            }
        };
    }

    reads!(Stream: read.0);
    reads!(ReadHalf: 0);
    writes!(Stream: write.0);
    writes!(WriteHalf: 0);
}

/// Accepts streams, as [`TcpListener`] does.
pub struct Listener {
    hub: Hub,
    local: SocketAddr,
    door: Door,
    /// The clients that are connecting.
    clients: JoinSet<io::Result<Stream>>,
    crowd: Arc<Crowd>,
}

/// What the clients of a listener know of each other.
#[derive(Default)]
struct Crowd {
    /// There are as many as may be, and others may wait.
    is_full: AtomicBool,
    /// In order of arrival.
    clients: Mutex<Vec<Client>>,
    /// One at a time takes a place, so that no other one takes what is made free for it.
    turn: ::tokio::sync::Mutex<()>,
}

struct Client {
    task: AbortHandle,
    /// It has begun to connect.
    has_place: Arc<AtomicBool>,
}

impl Crowd {
    /// Until a client has said something. Another end of the stream is found when it is read.
    async fn wait_until_it_speaks(&self, stream: &TcpStream) -> io::Result<()> {
        while let Err(elapsed) = ::tokio::time::timeout(SILENCE, stream.readable()).await {
            if self.is_full.load(Ordering::SeqCst) {
                return Err(elapsed.into());
            }
        }
        match stream.peek(&mut [0]).await? {
            0 => Err(ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }

    /// The client that has been connecting for the longest time.
    fn oldest(&self) -> Option<AbortHandle> {
        let clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        let connects = |client: &&Client| {
            client.has_place.load(Ordering::SeqCst) && !client.task.is_finished()
        };
        clients.iter().find(connects).map(|client| client.task.clone())
    }

    /// Has others give up, as long as the hub has no place for the next one.
    async fn place<T>(
        &self,
        has_place: &AtomicBool,
        mut take: impl FnMut() -> io::Result<T>,
    ) -> io::Result<T> {
        let _turn = self.turn.lock().await;
        loop {
            match take() {
                Err(error) if error.kind() == ErrorKind::OutOfMemory => {
                    let oldest = self.oldest().ok_or(error)?;
                    oldest.abort();
                    while !oldest.is_finished() {
                        ::tokio::task::yield_now().await;
                    }
                }
                taken => {
                    has_place.store(taken.is_ok(), Ordering::SeqCst);
                    return taken;
                }
            }
        }
    }
}

/// Where clients arrive.
#[derive(Debug)]
enum Door {
    Tcp(TcpListener),
    /// With its file.
    #[cfg(feature = "rdmacm")]
    Manager(rdmacm::Listener, AsyncFd<OwnedFd>),
}

/// A client that has arrived.
enum Arrived {
    Over(TcpStream),
    #[cfg(feature = "rdmacm")]
    Managed(Box<rdmacm::ConnectionRequest>),
}

impl Door {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Arrived>> {
        match self {
            Self::Tcp(listener) => {
                listener.poll_accept(cx).map_ok(|(stream, _)| Arrived::Over(stream))
            }
            #[cfg(feature = "rdmacm")]
            Self::Manager(listener, file) => loop {
                if let Some(request) = listener.try_next()? {
                    return Poll::Ready(Ok(Arrived::Managed(request.into())));
                }
                // Before it is looked at: what happens from now on is told again.
                ready!(file.poll_read_ready(cx))?.clear_ready();
            },
        }
    }
}

impl Arrived {
    async fn connect(self, hub: &Hub, crowd: &Crowd, has_place: &AtomicBool) -> io::Result<Stream> {
        match self {
            Self::Over(stream) => {
                crowd.wait_until_it_speaks(&stream).await?;
                let take = || Joining::new(&hub.inner, Role::Accepts);
                over_tcp(crowd.place(has_place, take).await?, stream).await
            }
            #[cfg(feature = "rdmacm")]
            Self::Managed(request) => {
                crowd.place(has_place, || hub.inner.lock().has_room()).await?;
                manager::accept_on_tokio(&hub.inner, *request).await.map(Stream::new)
            }
        }
    }
}

impl Listener {
    /// Listens at an address.
    ///
    /// # Errors
    ///
    /// Those of [`TcpListener::bind`].
    pub async fn bind(hub: &Hub, address: impl ToSocketAddrs) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await.map_err(explain)?;
        Self::new(hub, listener.local_addr()?, Door::Tcp(listener))
    }

    /// `rdma_listen`: listens by the connection manager: see
    /// [`Listener::bind_rdmacm`](crate::Listener::bind_rdmacm).
    ///
    /// # Errors
    ///
    /// Those of [`Listener::bind_rdmacm`](crate::Listener::bind_rdmacm).
    ///
    /// # Panics
    ///
    /// Outside of a runtime of tokio whose I/O and time are enabled.
    #[cfg(feature = "rdmacm")]
    #[doc(alias = "rdma_listen")]
    pub fn bind_rdmacm(hub: &Hub, address: SocketAddr) -> io::Result<Self> {
        let listener = rdmacm::Listener::bind(address)?;
        let local = listener.local_addr().ok_or(ErrorKind::NotConnected)?;
        let file = listener.as_fd().try_clone_to_owned()?;
        let file = AsyncFd::with_interest(file, Interest::READABLE)?;
        Self::new(hub, local, Door::Manager(listener, file))
    }

    fn new(hub: &Hub, local: SocketAddr, door: Door) -> io::Result<Self> {
        ensure_driven(&hub.inner)?;
        let crowd = Arc::default();
        Ok(Self { hub: hub.clone(), local, door, clients: JoinSet::new(), crowd })
    }

    /// The address at which it listens.
    ///
    /// # Errors
    ///
    /// None: it returns what [`TcpListener::local_addr`] does.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.local)
    }

    /// The next client that has connected. Clients connect side by side, each in a task: one that is slow, or silent, keeps no
    /// other one waiting, and is given up as [`Listener::accept`](crate::Listener::accept) says. A client that fails to connect is
    /// no error of the listener's. The future may be dropped at any time.
    ///
    /// # Errors
    ///
    ///  - `ConnectionAborted`: the hub was stopped.
    ///  - Those of [`TcpListener::accept`], such as too many open files.
    pub async fn accept(&mut self) -> io::Result<(Stream, SocketAddr)> {
        poll_fn(|cx| self.poll_accept(cx)).await
    }

    /// See [`accept`](Self::accept).
    ///
    /// # Errors
    ///
    /// As [`accept`](Self::accept).
    pub fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<(Stream, SocketAddr)>> {
        loop {
            if let Some(error) = self.hub.inner.lock().stopped {
                return Poll::Ready(Err(error.into()));
            }
            while self.clients.len() < AT_A_TIME {
                match self.door.poll_next(cx) {
                    Poll::Ready(Ok(arrived)) => self.admit(arrived),
                    Poll::Ready(Err(error)) if error.kind() == ErrorKind::ConnectionAborted => {}
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                    Poll::Pending => break,
                }
            }
            self.crowd.is_full.store(self.clients.len() >= AT_A_TIME, Ordering::SeqCst);
            match self.clients.poll_join_next(cx) {
                Poll::Ready(Some(Ok(Ok(stream)))) => {
                    if let Ok(peer) = stream.peer_addr() {
                        return Poll::Ready(Ok((stream, peer)));
                    }
                }
                // One that has failed has made room.
                Poll::Ready(Some(_)) => {}
                Poll::Ready(None) | Poll::Pending => return Poll::Pending,
            }
        }
    }

    /// Has a client connect.
    fn admit(&mut self, arrived: Arrived) {
        let (hub, crowd, has_place) = (self.hub.clone(), self.crowd.clone(), Arc::default());
        let own = Arc::clone(&has_place);
        let task = self.clients.spawn(async move {
            ::tokio::time::timeout(PATIENCE, arrived.connect(&hub, &crowd, &own)).await?
        });
        let mut clients = self.crowd.clients.lock().unwrap_or_else(PoisonError::into_inner);
        clients.retain(|client| !client.task.is_finished());
        clients.push(Client { task, has_place });
    }
}

macro_rules! debug {
    ($($type:ident: $handle:expr;)+) => {$(
        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let handle: fn(&Self) -> &Handle = $handle;
                let handle = handle(self);
                f.debug_struct(stringify!($type))
                    .field("local", &handle.local_addr().ok())
                    .field("peer", &handle.peer_addr().ok())
                    .finish_non_exhaustive()
            }
        }
    )+};
}

debug! {
    Stream: |stream| stream.handle();
    ReadHalf: |half| &half.0.handle;
    WriteHalf: |half| &half.0.handle;
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").field("local", &self.local).finish_non_exhaustive()
    }
}
