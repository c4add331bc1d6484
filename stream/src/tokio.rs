//! Streams of tokio's tasks: what `tokio::net` is for TCP.
//!
//! A task in each runtime whose tasks use a hub drives it. It begins with the first of them that connects or waits, and ends with
//! the hub or the runtime. A stream may move to another runtime, and outlive the one in which it was made; tasks of several
//! runtimes, tasks outside of tokio, and threads share a hub.

use std::collections::BTreeMap;
use std::future::{pending, poll_fn};
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Wake, Waker, ready};
use std::time::Instant;
use std::{fmt, mem};

use ::tokio::io::{
    AsyncBufRead, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, Interest, ReadBuf, Ready,
};
use ::tokio::net::{TcpListener, TcpStream, ToSocketAddrs, UnixStream};
use ::tokio::sync::Notify;
use ::tokio::task::{self, JoinError, JoinSet, coop};
use ::tokio::time::Sleep;
use ibverbs::ChannelId;
#[cfg(feature = "rdmacm")]
use ibverbs::rdmacm;
use ibverbs::tcp::Exchange;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;

use crate::conn::Cursor;
use crate::connect::{
    AT_A_TIME, ORDER, PATIENCE, addresses_of, lengthen_backlog, makes_room, refuse,
};
use crate::drivers::{Drivers, RuntimeId, now};
use crate::handshake::{Handshake, Progress, Role};
use crate::hub::{Guard, Hub, Inner, caught, wake};
#[cfg(feature = "rdmacm")]
use crate::manager;
use crate::owned::{NotWritten, ReceivedBuffer, SendBuffer};
use crate::state::{Member, State, TURN};
use crate::stream::{Addresses, Handle, Reader, Writer, not_taken};
use crate::watch::{PeerWatch, Sockets, Task};
use crate::wire::check_refused;
use crate::{Refusal, StreamError};

impl Hub {
    /// Drives the hub from a task of this runtime until the hub is [stopped](Self::stop). Streams of tasks see to that by
    /// themselves; a hub of threads' streams is driven as by [`run`](Self::run), but without a thread. When the future is dropped,
    /// the task remains.
    ///
    /// # Errors
    ///
    ///  - Those of the device: all streams have ended with them.
    ///
    /// # Panics
    ///
    /// Outside of a runtime of tokio whose I/O and time are enabled.
    pub async fn run_on_tokio(&self) -> io::Result<()> {
        ensure_driven(&self.inner)?;
        let stopped = self.inner.unless_stopped(pending()).await;
        match self.inner.lock().stopped {
            Some(StreamError::Aborted) => Ok(()),
            _ => stopped,
        }
    }
}

impl Inner {
    /// Why the hub was stopped. If it was not, the task is woken when it is.
    fn poll_stopped(&self, cx: &Context<'_>) -> Option<StreamError> {
        let waker = Arc::new(cx.waker().clone());
        let mut state = self.lock();
        if state.stopped.is_none() && !state.accepting.iter().any(|own| own.will_wake(&waker)) {
            state.accepting.push(waker);
        }
        state.stopped
    }
}

/// A file, and the reactor of the runtime in which this was made. `AsyncFd` has no constructor that is safe and not deprecated, so
/// this takes the file for a socket, of which only the readiness is asked for.
#[derive(Debug)]
struct Readiness(UnixStream);

impl Readiness {
    fn new(file: OwnedFd) -> io::Result<Self> {
        let file = std::os::unix::net::UnixStream::from(file);
        file.set_nonblocking(true)?;
        UnixStream::from_std(file).map(Self)
    }

    /// Waits until something has happened to the file since the last time, or may have.
    fn poll(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.0.poll_read_ready(cx))?;
        // Clears the readiness. The caller looks at the file afterwards: an event that comes meanwhile is told again.
        let _ = self
            .0
            .try_io(Interest::READABLE, || io::Result::<()>::Err(ErrorKind::WouldBlock.into()));
        Poll::Ready(Ok(()))
    }
}

/// What the driver of a runtime sleeps for.
struct Files {
    /// One descriptor for all that the hub polls for.
    polled: Readiness,
    /// Readable when peers, or the hub, may be gone.
    ends: Readiness,
    /// Until something is due.
    sleep: Pin<Box<Sleep>>,
    _sockets: Arc<Sockets>,
}

impl Files {
    fn new(inner: &Inner) -> io::Result<Self> {
        let all = epoll::create(CreateFlags::CLOEXEC)?;
        for file in [inner.loop_file.as_fd(), inner.waker.as_fd()] {
            epoll::add(&all, file, EventData::new_u64(0), EventFlags::IN)?;
        }
        let ends = inner.sockets.as_fd().try_clone_to_owned()?;
        let (polled, ends) = (Readiness::new(all)?, Readiness::new(ends)?);
        let sleep = Box::pin(::tokio::time::sleep_until(now().into()));
        Ok(Self { polled, ends, sleep, _sockets: inner.sockets.clone() })
    }
}

/// Has the runtime of the calling task drive the hub.
///
/// # Errors
///
///  - Those of a runtime that ends, and too many open files.
///
/// # Panics
///
/// In a runtime whose I/O or time is not enabled.
fn ensure_driven(inner: &Arc<Inner>) -> io::Result<()> {
    let id = Drivers::current_runtime();
    if inner.lock().drivers.serve(id) {
        return Ok(());
    }
    let files = match Files::new(inner) {
        // A peer has used up what the kernel allows of sets around the device's file. A thread can still wait for it.
        Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
            inner.watch()?;
            inner.lock().drivers.begin(id, false);
            return Ok(());
        }
        files => files?,
    };
    let mut state = inner.lock();
    if state.drivers.begin(id, true) {
        for member in state.members.iter_mut().flatten() {
            if let Some(PeerWatch::Task(task)) = &mut member.peer_watch {
                task.start_again();
            }
        }
        drop(state);
        let driver = Driver { hub: Arc::downgrade(inner), id };
        ::tokio::spawn(drive(driver, files));
    }
    Ok(())
}

/// Does what [`ensure_driven`] does, for a task that is about to sleep. The helper serves a runtime that cannot.
#[cold]
fn be_driven(inner: &Arc<Inner>) {
    let id = Drivers::current_runtime();
    let mut is_driven = false;
    if id.is_some() {
        // Tokio does not say whether the runtime has I/O and time, but by a panic.
        caught(|| is_driven = ensure_driven(inner).is_ok());
    }
    if !is_driven {
        inner.lock().drivers.begin(id, false);
    }
}

/// The driver of a runtime, until it is dropped.
struct Driver {
    hub: Weak<Inner>,
    id: RuntimeId,
}

impl Drop for Driver {
    fn drop(&mut self) {
        let Some(inner) = self.hub.upgrade() else { return };
        let mut state = inner.lock();
        if state.drivers.end(self.id) {
            state.wake_all();
        }
        if state.drivers.have_tasks() {
            return;
        }
        // The hub was kept for this driver.
        let kept = state.kept.take();
        drop(state);
        drop(kept);
    }
}

/// Drives a hub. The streams have its errors.
async fn drive(driver: Driver, mut files: Files) {
    let (mut idle, mut may_have_ended) = (0, true);
    loop {
        let Some(inner) = driver.hub.upgrade() else { return };
        let arms = idle >= inner.config.spin;
        let Ok(Some((count, due))) = inner.serve(arms, mem::take(&mut may_have_ended)) else {
            return;
        };
        if count == TURN || !arms {
            drop(inner);
            idle = if count > 0 { 0 } else { idle + 1 };
            ::tokio::task::yield_now().await;
            continue;
        }
        drop(inner);
        // The loop was armed before it was polled: an operation that ends since then raises an event.
        idle = 0;
        if due != files.sleep.deadline().into_std() {
            files.sleep.as_mut().reset(due.into());
        }
        let woken = poll_fn(|cx| {
            let ended = files.ends.poll(cx)?;
            let found = files.polled.poll(cx)?;
            let is_due = files.sleep.as_mut().poll(cx);
            if ended.is_ready() || found.is_ready() || is_due.is_ready() {
                return Poll::Ready(io::Result::Ok(ended.is_ready()));
            }
            Poll::Pending
        });
        let Ok(ended) = woken.await else { return };
        may_have_ended = ended;
    }
}

/// The place of a task's waker: the stream's reader, or its writer.
type Place = fn(&mut Member) -> &mut Option<Arc<Waker>>;

const WRITER: Place = |member| &mut member.writer;

/// Looks for something. If it is not there, the task is woken when it is. `own` is kept for the next time, when the same task
/// needs no other one.
#[inline]
fn poll_for<T, E>(
    handle: &Handle,
    cx: &Context<'_>,
    place: Place,
    own: &mut Option<Arc<Waker>>,
    mut look: impl FnMut(&mut State) -> Result<Option<T>, E>,
) -> Poll<io::Result<T>>
where
    io::Error: From<E>,
{
    // A clone need not say that it wakes the same task.
    let mut is_cloned = false;
    loop {
        let mut state = handle.hub.lock();
        if let Some(found) = look(&mut state)? {
            return Poll::Ready(Ok(found));
        }
        let noted = own.as_ref().filter(|own| is_cloned || own.will_wake(cx.waker()));
        if let Some(noted) = noted {
            return wait_in(state, handle, place, noted);
        }
        drop(state);
        // A waker is code of the program's: the lock is not held when it is cloned, called or dropped.
        *own = Some(Arc::new(cx.waker().clone()));
        is_cloned = true;
    }
}

/// Notes the task that is to be woken.
fn wait_in<T>(
    mut state: Guard<'_>,
    handle: &Handle,
    place: Place,
    noted: &Arc<Waker>,
) -> Poll<io::Result<T>> {
    let is_driven = state.drivers.serve(Drivers::current_runtime());
    let Some(member) = state.member(handle.id) else {
        return Poll::Ready(Err(StreamError::Aborted.into()));
    };
    let before = place(member).replace(noted.clone());
    drop(state);
    drop(before);
    if !is_driven {
        be_driven(&handle.hub);
    }
    Poll::Pending
}

impl Reader {
    /// Waits until there is a piece, or else the end.
    pub(crate) fn poll_piece(&mut self, cx: &Context<'_>) -> Poll<io::Result<()>> {
        if self.has_piece() {
            return Poll::Ready(Ok(()));
        }
        self.poll_copy(cx, |_| false)
    }

    /// Waits until there is a piece, or `copy` has taken its bytes.
    fn poll_copy(
        &mut self,
        cx: &Context<'_>,
        mut copy: impl FnMut(&[u8]) -> bool,
    ) -> Poll<io::Result<()>> {
        let Self { handle, pieces, waker } = self;
        let look = |state: &mut State| state.read(handle.id, pieces, &mut copy);
        poll_for(handle, cx, |member| &mut member.reader, waker, look)
    }

    /// Takes a piece, or finds the end.
    fn try_piece(&mut self) -> io::Result<()> {
        if self.has_piece() {
            return Ok(());
        }
        let Self { handle, pieces, .. } = self;
        let found = handle.hub.lock().read(handle.id, pieces, |_| false)?;
        found.ok_or_else(|| ErrorKind::WouldBlock.into())
    }

    fn poll_read(&mut self, cx: &mut Context<'_>, to: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if to.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        let budget = ready!(coop::poll_proceed(cx));
        let mut has_copied = false;
        if !self.has_piece() {
            ready!(self.poll_copy(cx, |bytes| {
                has_copied = bytes.len() <= to.remaining();
                if has_copied {
                    to.put_slice(bytes);
                }
                has_copied
            }))?;
        }
        budget.made_progress();
        if !has_copied {
            let len = self.bytes().len().min(to.remaining());
            to.put_slice(&self.bytes()[..len]);
            self.consume(len);
        }
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
        &mut self,
        cx: &mut Context<'_>,
        from: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if from.iter().all(|piece| piece.is_empty()) {
            return Poll::Ready(Ok(0));
        }
        let budget = ready!(coop::poll_proceed(cx));
        let Self { handle, waker, .. } = self;
        let write = |state: &mut State| state.write(handle.id, &mut Cursor::new(from));
        let written = ready!(poll_for(handle, cx, WRITER, waker, write))?;
        budget.made_progress();
        Poll::Ready(Ok(written))
    }

    fn poll_write_owned(
        &mut self,
        cx: &mut Context<'_>,
        buffer: &mut SendBuffer,
    ) -> Poll<io::Result<()>> {
        let budget = ready!(coop::poll_proceed(cx));
        let Self { handle, waker, .. } = self;
        let buffer = buffer.of(&handle.hub)?;
        let put = |state: &mut State| state.put(handle.id, buffer);
        ready!(poll_for(handle, cx, WRITER, waker, put))?;
        budget.made_progress();
        Poll::Ready(Ok(()))
    }

    pub(crate) fn poll_flush(&mut self, cx: &Context<'_>) -> Poll<io::Result<()>> {
        let Self { handle, waker, .. } = self;
        let flush = |state: &mut State| Ok::<_, StreamError>(state.flush(handle.id)?.then_some(()));
        poll_for(handle, cx, WRITER, waker, flush)
    }

    pub(crate) fn poll_shutdown(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.handle.shutdown();
        let Self { handle, waker, .. } = self;
        let polled = poll_for(handle, cx, WRITER, waker, |state| {
            let member = state.member(handle.id).ok_or(StreamError::Aborted)?;
            Ok::<_, StreamError>(member.conn.is_shut_down()?.then_some(()))
        });
        if polled.is_ready() || Drivers::current_runtime().is_none() {
            return polled;
        }
        let lingers = self.handle.hub.config.lingers();
        let patience = self.patience.get_or_insert_with(|| Box::pin(::tokio::time::sleep(lingers)));
        ready!(patience.as_mut().poll(cx));
        self.patience = None;
        Poll::Ready(Err(not_taken()))
    }
}

/// See [`addresses_of`].
async fn look_up(address: impl ToSocketAddrs + fmt::Debug) -> io::Result<Vec<SocketAddr>> {
    let name = format!("{address:?}");
    addresses_of(name, ::tokio::net::lookup_host(address).await)
}

/// Connects to the first address at which a peer answers. A driver notices meanwhile that the device fails.
async fn first<F>(
    hub: &Arc<Inner>,
    address: impl ToSocketAddrs + fmt::Debug,
    connect: impl Fn(SocketAddr) -> F,
) -> io::Result<Stream>
where
    F: Future<Output = io::Result<Stream>>,
{
    ensure_driven(hub)?;
    let mut last = None;
    for to in look_up(address).await? {
        match connect(to).await {
            Ok(stream) => return Ok(stream),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| ErrorKind::InvalidInput.into()))
}

/// Connects over a stream, up to what the peer says of itself.
async fn join<T>(mut handshake: Handshake, stream: &mut T) -> io::Result<(Handshake, Vec<u8>)>
where
    T: AsyncRead + AsyncWrite + Unpin,
{
    ensure_driven(handshake.hub())?;
    loop {
        if let Progress::Done(hello) = handshake.step(Exchange::advance)? {
            return Ok((handshake, hello));
        }
        let exchange = handshake.exchange();
        let mut bytes = [0; 256];
        let most = exchange.wants().min(bytes.len());
        let carried = match exchange.to_send() {
            [] => {
                let read = stream.read(&mut bytes[..most]).await;
                if let Ok(len) = read {
                    check_refused(&bytes[..len])?;
                }
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

/// Waits for the end of the connection over which a stream was set up, and tells the hub of it.
async fn watch<T>(connection: Arc<Mutex<T>>, hub: Weak<Inner>, id: ChannelId)
where
    T: AsyncRead + Unpin,
{
    // Nothing comes but the end.
    let ended = poll_fn(|cx| {
        let mut connection = connection.lock().unwrap_or_else(PoisonError::into_inner);
        Pin::new(&mut *connection).poll_read(cx, &mut ReadBuf::new(&mut [0]))
    });
    // A read of a connection whose runtime has ended says `Other`, and nothing of the peer.
    let is_of_the_peer = !matches!(ended.await, Err(error) if error.kind() == ErrorKind::Other);
    if is_of_the_peer && let Some(inner) = hub.upgrade() {
        inner.lock().is_gone(id);
    }
}

/// Both sides are connected over a stream that the hub watches, without a task.
fn joined(stream: TcpStream, handshake: Handshake, hello: &[u8]) -> io::Result<Stream> {
    let stream = stream.into_std()?;
    let addresses = Addresses::of(&stream);
    handshake.finish(hello, PeerWatch::Socket(stream.into()), addresses).map(Stream::new)
}

/// The half of a [`Stream`] that reads.
pub struct ReadHalf(Mutex<Reader>);

/// The half of a [`Stream`] that writes. Dropping it ends the direction, as `shutdown` does, without waiting.
pub struct WriteHalf(Writer);

/// A stream of bytes to one peer over RDMA, for tasks: what [`TcpStream`] is over TCP.
///
/// - A write that is not ready has taken nothing, and a future that is dropped leaves nothing behind.
/// - `write_vectored` takes from all pieces. What is written while something is in flight is gathered, and goes when that has
///   arrived; or before, by `flush`, which is ready when all of it has been posted, and none of it waits for the hub's task.
/// - `shutdown` is ready when the peer's device has everything that was written. If the peer does not read, it fails with
///   `TimedOut` after [`linger`](crate::HubBuilder::linger), and what was written goes on its way without a call.
/// - `AsyncBufRead` gives the buffers in which bytes have arrived, without a copy.
/// - One task at a time waits to read, and one to write: the last one that asks.
/// - In a runtime whose I/O or time is not enabled, reads and writes are served by a thread of the hub. Tokio says by a panic that
///   they are not: it is caught, and its message is on standard error once. Other calls panic there.
pub struct Stream {
    // In this order: what was not read decides how the stream ends.
    read: ReadHalf,
    write: WriteHalf,
}

impl Stream {
    fn new(handle: Handle) -> Self {
        let handle = Arc::new(handle.of_tasks());
        Self {
            read: ReadHalf(Mutex::new(Reader::new(handle.clone()))),
            write: WriteHalf(Writer::new(handle)),
        }
    }

    fn handle(&self) -> &Handle {
        &self.write.0.handle
    }

    /// Its place in the hub.
    #[cfg(test)]
    pub(crate) fn index(&self) -> usize {
        self.handle().id.index()
    }

    /// Connects to a [`Listener`] at an address, over TCP, and then moves to RDMA. Addresses of a name are tried one after the other,
    /// and the error is that of the last one. There is no deadline but that of TCP for each: a server that takes the connection, and
    /// says nothing, keeps the task waiting. Use [`timeout`](::tokio::time::timeout).
    ///
    /// # Errors
    ///
    /// Those of [`Stream::connect`](crate::Stream::connect).
    pub async fn connect(hub: &Hub, address: impl ToSocketAddrs + fmt::Debug) -> io::Result<Self> {
        let connects = first(&hub.inner, address, |to| async move {
            let mut stream = TcpStream::connect(to).await?;
            stream.set_nodelay(true)?;
            let handshake = Handshake::new(&hub.inner, Role::Connects)?;
            let (handshake, hello) = join(handshake, &mut stream).await?;
            joined(stream, handshake, &hello)
        });
        hub.inner.unless_stopped(connects).await
    }

    /// `rdma_connect`: connects by the connection manager: see
    /// [`Stream::connect_rdmacm`](crate::Stream::connect_rdmacm). It looks for the route for ten seconds at most; for the rest
    /// there is no deadline but the connection manager's: use [`timeout`](::tokio::time::timeout). The manager asks 16 times, 4.6 s
    /// apart, as Linux does, so a server that dies with the request unanswered is noticed after 74 s; later by as much as its
    /// manager has asked for (MRA), which Linux does for 69 s.
    ///
    /// # Errors
    ///
    /// Those of [`Stream::connect_rdmacm`](crate::Stream::connect_rdmacm).
    #[cfg(feature = "rdmacm")]
    #[doc(alias = "rdma_connect")]
    pub async fn connect_rdmacm(
        hub: &Hub,
        address: impl ToSocketAddrs + fmt::Debug,
    ) -> io::Result<Self> {
        let connects = first(&hub.inner, address, |to| async move {
            manager::connect_on_tokio(&hub.inner, to, now() + PATIENCE).await.map(Self::new)
        });
        hub.inner.unless_stopped(connects).await
    }

    /// Connects to the peer at the other end of a stream: a Unix socket, one of TLS, or one of a
    /// [simulation](https://docs.rs/ibverbs-software/latest/ibverbs_software/fn.simulate.html). The stream is used for the connection
    /// alone, and the data are not: over TLS, too, they are plain. A task of the runtime takes the end of the stream for that of the
    /// peer. If the runtime ends, another one whose tasks use the hub goes on with that, as far as the stream allows; keep-alive
    /// finds the end of others. Any task or thread that uses the hub may drop the stream, after it has woken all others, and may be
    /// the one that serves runtimes without a driver: a drop that waits holds those up.
    ///
    /// # Errors
    ///
    /// Those of [`Stream::connect`](crate::Stream::connect).
    pub async fn over<T>(hub: &Hub, mut stream: T, role: Role) -> io::Result<Self>
    where
        T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let handshake = Handshake::new(&hub.inner, role)?;
        let joins = join(handshake, &mut stream);
        let (handshake, hello) = hub.inner.unless_stopped(joins).await?;
        let (inner, id) = (Arc::downgrade(&hub.inner), handshake.id());
        let stream = Arc::new(Mutex::new(stream));
        let task = Task::new(move || ::tokio::spawn(watch(stream.clone(), inner.clone(), id)));
        let handle = handshake.finish(&hello, PeerWatch::Task(task), Addresses::default())?;
        Ok(Self::new(handle))
    }

    /// The two directions, for a task each. [`ReadHalf::reunite`] puts them together again.
    pub fn into_split(self) -> (ReadHalf, WriteHalf) {
        (self.read, self.write)
    }

    /// [`into_split`](Self::into_split). It takes the stream, as the methods of that name in `AsyncBufReadExt` and other traits do,
    /// so that it is found when they are in scope.
    pub fn split(self) -> (ReadHalf, WriteHalf) {
        self.into_split()
    }

    /// Splits as [`into_split`](Self::into_split) does, for tasks that borrow the stream.
    pub fn split_mut(&mut self) -> (&mut ReadHalf, &mut WriteHalf) {
        (&mut self.read, &mut self.write)
    }

    fn own(&mut self) -> &mut Reader {
        self.read.own()
    }

    fn reader(&self) -> &ReadHalf {
        &self.read
    }

    fn writer(&self) -> &Writer {
        &self.write.0
    }

    fn own_writer(&mut self) -> &mut Writer {
        &mut self.write.0
    }

    /// Waits until one of the directions would not wait, and says which.
    ///
    /// # Errors
    ///
    /// None: an error of the stream is one of the next read or write.
    pub async fn ready(&self, interest: Interest) -> io::Result<Ready> {
        poll_fn(|cx| {
            let mut ready = Ready::EMPTY;
            if interest.is_readable() && self.poll_read_ready(cx).is_ready() {
                ready |= Ready::READABLE;
            }
            if interest.is_writable() && self.poll_write_ready(cx).is_ready() {
                ready |= Ready::WRITABLE;
            }
            if ready.is_empty() { Poll::Pending } else { Poll::Ready(Ok(ready)) }
        })
        .await
    }

    /// `true`: what is written goes on its way at once, as long as the peer takes it, and is not gathered.
    ///
    /// # Errors
    ///
    /// None: it returns what [`TcpStream::set_nodelay`] does.
    pub fn set_nodelay(&self, nodelay: bool) -> io::Result<()> {
        self.handle().set_nodelay(nodelay);
        Ok(())
    }

    /// Returns what was set by [`set_nodelay`](Self::set_nodelay).
    ///
    /// # Errors
    ///
    /// None: it returns what [`TcpStream::nodelay`] does.
    pub fn nodelay(&self) -> io::Result<bool> {
        Ok(self.handle().nodelay())
    }

    /// Why the stream has failed, if it has.
    pub fn take_error(&self) -> Option<StreamError> {
        self.handle().error()
    }
}

impl ReadHalf {
    fn own(&mut self) -> &mut Reader {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Reader> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reader(&self) -> &Self {
        self
    }

    /// Puts the two halves of a stream together again.
    ///
    /// # Errors
    ///
    /// They are halves of two streams: both come back.
    pub fn reunite(self, write: WriteHalf) -> Result<Stream, (Self, WriteHalf)> {
        if Arc::ptr_eq(&self.lock().handle, &write.0.handle) {
            return Ok(Stream { read: self, write });
        }
        Err((self, write))
    }
}

impl WriteHalf {
    fn writer(&self) -> &Writer {
        &self.0
    }

    fn own_writer(&mut self) -> &mut Writer {
        &mut self.0
    }

    /// Drops it without ending the direction.
    pub fn forget(mut self) {
        self.0.is_forgotten = true;
    }
}

/// Calls that do not wait, for a stream and the half that reads.
macro_rules! try_read_methods {
    ($($type:ident)+) => {$(
        impl $type {
            /// Waits until a read would not wait.
            ///
            /// # Errors
            ///
            /// None: an error of the stream is one of the next read.
            pub async fn readable(&self) -> io::Result<()> {
                poll_fn(|cx| self.poll_read_ready(cx)).await
            }

            /// See [`readable`](Self::readable). The last task that asks is woken.
            ///
            /// # Errors
            ///
            /// As [`readable`](Self::readable).
            pub fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                let budget = ready!(coop::poll_proceed(cx));
                let _ = ready!(self.reader().lock().poll_piece(cx));
                budget.made_progress();
                Poll::Ready(Ok(()))
            }

            /// Reads without a copy: see [`Stream::read_owned`](crate::Stream::read_owned).
            ///
            /// # Errors
            ///
            ///  - Those of the [stream](StreamError).
            pub async fn read_owned(&mut self) -> io::Result<Option<ReceivedBuffer>> {
                let reader = self.own();
                poll_fn(|cx| reader.poll_fill_buf(cx).map_ok(drop)).await?;
                let piece = reader.pieces.pop_front();
                Ok(piece.map(|piece| reader.handle.received(piece)))
            }

            /// Reads what is there, without waiting.
            ///
            /// # Errors
            ///
            ///  - `WouldBlock`: nothing is.
            ///  - Those of the [stream](StreamError).
            pub fn try_read(&self, to: &mut [u8]) -> io::Result<usize> {
                self.try_read_vectored(&mut [IoSliceMut::new(to)])
            }

            /// Reads as [`try_read`](Self::try_read) does, into several buffers.
            ///
            /// # Errors
            ///
            /// Those of [`try_read`](Self::try_read).
            pub fn try_read_vectored(&self, to: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
                if to.iter().all(|piece| piece.is_empty()) {
                    return Ok(0);
                }
                let mut reader = self.reader().lock();
                reader.try_piece()?;
                Ok(to.iter_mut().map(|piece| reader.copy_to(piece)).sum())
            }

            /// Reads as `read` does, and leaves the bytes there.
            ///
            /// # Errors
            ///
            ///  - Those of the [stream](StreamError).
            pub async fn peek(&self, to: &mut [u8]) -> io::Result<usize> {
                let mut to = ReadBuf::new(to);
                poll_fn(|cx| self.poll_peek(cx, &mut to)).await
            }

            /// See [`peek`](Self::peek).
            ///
            /// # Errors
            ///
            /// As [`peek`](Self::peek).
            pub fn poll_peek(
                &self,
                cx: &mut Context<'_>,
                to: &mut ReadBuf<'_>,
            ) -> Poll<io::Result<usize>> {
                let mut reader = self.reader().lock();
                ready!(reader.poll_piece(cx))?;
                let len = reader.bytes().len().min(to.remaining());
                to.put_slice(&reader.bytes()[..len]);
                Poll::Ready(Ok(len))
            }
        }
    )+};
}

/// Calls that do not wait, for a stream and the half that writes.
macro_rules! try_write_methods {
    ($($type:ident)+) => {$(
        impl $type {
            /// Waits until a write would not wait, unless another stream takes the last buffer first.
            ///
            /// # Errors
            ///
            /// None: an error of the stream is one of the next write.
            pub async fn writable(&self) -> io::Result<()> {
                poll_fn(|cx| self.poll_write_ready(cx)).await
            }

            /// See [`writable`](Self::writable). The last task that asks is woken.
            ///
            /// # Errors
            ///
            /// As [`writable`](Self::writable).
            pub fn poll_write_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                let budget = ready!(coop::poll_proceed(cx));
                let handle = &self.writer().handle;
                let look = |state: &mut State| Ok::<_, StreamError>(state.can_write(handle.id)?.then_some(()));
                let _ = ready!(poll_for(handle, cx, WRITER, &mut None, look));
                budget.made_progress();
                Poll::Ready(Ok(()))
            }

            /// See [`Stream::send_buffer`](crate::Stream::send_buffer).
            ///
            /// # Errors
            ///
            /// Those of [`Stream::send_buffer`](crate::Stream::send_buffer).
            pub fn send_buffer(&self) -> io::Result<SendBuffer> {
                self.writer().handle.send_buffer()
            }

            /// Writes a buffer without a copy: see [`Stream::write_owned`](crate::Stream::write_owned). A future that is dropped
            /// has written nothing, and drops the buffer.
            ///
            /// # Errors
            ///
            /// Those of [`Stream::write_owned`](crate::Stream::write_owned), with the buffer.
            pub async fn write_owned(&mut self, mut buffer: SendBuffer) -> Result<(), NotWritten> {
                let written = poll_fn(|cx| self.own_writer().poll_write_owned(cx, &mut buffer));
                written.await.map_err(|error| NotWritten { buffer, error })
            }

            /// Writes as much as there is room for, without waiting.
            ///
            /// # Errors
            ///
            ///  - `WouldBlock`: there is no room.
            ///  - Those of the [stream](StreamError).
            pub fn try_write(&self, from: &[u8]) -> io::Result<usize> {
                self.try_write_vectored(&[IoSlice::new(from)])
            }

            /// Writes as [`try_write`](Self::try_write) does, from several buffers.
            ///
            /// # Errors
            ///
            /// Those of [`try_write`](Self::try_write).
            pub fn try_write_vectored(&self, from: &[IoSlice<'_>]) -> io::Result<usize> {
                if from.iter().all(|piece| piece.is_empty()) {
                    return Ok(0);
                }
                let Handle { hub, id, .. } = &*self.writer().handle;
                let written = hub.lock().write(*id, &mut Cursor::new(from))?;
                written.ok_or_else(|| ErrorKind::WouldBlock.into())
            }
        }
    )+};
}

/// Addresses, of a stream and its halves.
macro_rules! address_methods {
    ($($type:ident: $handle:expr;)+) => {$(
        impl $type {
            /// The peer's address, of the TCP stream over which the two sides have connected, or the connection manager's.
            ///
            /// # Errors
            ///
            ///  - `Unsupported`: they have connected over another stream, which has none.
            pub fn peer_addr(&self) -> io::Result<SocketAddr> {
                let addresses: fn(&Self) -> Addresses = $handle;
                addresses(self).peer()
            }

            /// Returns the own address, as [`peer_addr`](Self::peer_addr) does the peer's.
            ///
            /// # Errors
            ///
            /// As [`peer_addr`](Self::peer_addr).
            pub fn local_addr(&self) -> io::Result<SocketAddr> {
                let addresses: fn(&Self) -> Addresses = $handle;
                addresses(self).local()
            }
        }

        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($type))
                    .field("local", &self.local_addr().ok())
                    .field("peer", &self.peer_addr().ok())
                    .finish_non_exhaustive()
            }
        }
    )+};
}

try_read_methods! { Stream ReadHalf }
try_write_methods! { Stream WriteHalf }
address_methods! {
    Stream: |stream| stream.handle().addresses;
    ReadHalf: |half| half.lock().handle.addresses;
    WriteHalf: |half| half.0.handle.addresses;
}

macro_rules! impl_async_read {
    ($type:ident) => {
        impl AsyncRead for $type {
            fn poll_read(
                self: Pin<&mut Self>,
                cx: &mut Context<'_>,
                to: &mut ReadBuf<'_>,
            ) -> Poll<io::Result<()>> {
                self.get_mut().own().poll_read(cx, to)
            }
        }

        impl AsyncBufRead for $type {
            fn poll_fill_buf(
                self: Pin<&mut Self>,
                cx: &mut Context<'_>,
            ) -> Poll<io::Result<&[u8]>> {
                self.get_mut().own().poll_fill_buf(cx)
            }

            fn consume(self: Pin<&mut Self>, len: usize) {
                self.get_mut().own().consume(len);
            }
        }
    };
}

macro_rules! impl_async_write {
    ($type:ident: $($field:tt).+) => {
        impl AsyncWrite for $type {
            fn poll_write(
                self: Pin<&mut Self>,
                cx: &mut Context<'_>,
                from: &[u8],
            ) -> Poll<io::Result<usize>> {
                self.get_mut().$($field).+.poll_write(cx, &[IoSlice::new(from)])
            }

            fn poll_write_vectored(
                self: Pin<&mut Self>,
                cx: &mut Context<'_>,
                from: &[IoSlice<'_>],
            ) -> Poll<io::Result<usize>> {
                self.get_mut().$($field).+.poll_write(cx, from)
            }

            fn is_write_vectored(&self) -> bool {
                true
            }

            fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                self.get_mut().$($field).+.poll_flush(cx)
            }

            fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                self.get_mut().$($field).+.poll_shutdown(cx)
            }
        }
    };
}

impl_async_read!(Stream);
impl_async_read!(ReadHalf);
impl_async_write!(Stream: write.0);
impl_async_write!(WriteHalf: 0);

#[cfg(feature = "futures-io")]
mod on_futures {
    use futures_io as traits;

    use super::*;

    macro_rules! impl_async_read {
        ($type:ident) => {
            impl traits::AsyncRead for $type {
                fn poll_read(
                    self: Pin<&mut Self>,
                    cx: &mut Context<'_>,
                    to: &mut [u8],
                ) -> Poll<io::Result<usize>> {
                    let mut to = ReadBuf::new(to);
                    let read = self.get_mut().own().poll_read(cx, &mut to);
                    read.map_ok(|()| to.filled().len())
                }
            }

            impl traits::AsyncBufRead for $type {
                fn poll_fill_buf(
                    self: Pin<&mut Self>,
                    cx: &mut Context<'_>,
                ) -> Poll<io::Result<&[u8]>> {
                    self.get_mut().own().poll_fill_buf(cx)
                }

                fn consume(self: Pin<&mut Self>, len: usize) {
                    self.get_mut().own().consume(len);
                }
            }
        };
    }

    macro_rules! impl_async_write {
        ($type:ident: $($field:tt).+) => {
            impl traits::AsyncWrite for $type {
                fn poll_write(
                    self: Pin<&mut Self>,
                    cx: &mut Context<'_>,
                    from: &[u8],
                ) -> Poll<io::Result<usize>> {
                    self.get_mut().$($field).+.poll_write(cx, &[IoSlice::new(from)])
                }

                fn poll_write_vectored(
                    self: Pin<&mut Self>,
                    cx: &mut Context<'_>,
                    from: &[IoSlice<'_>],
                ) -> Poll<io::Result<usize>> {
                    self.get_mut().$($field).+.poll_write(cx, from)
                }

                fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                    self.get_mut().$($field).+.poll_flush(cx)
                }

                fn poll_close(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                    self.get_mut().$($field).+.poll_shutdown(cx)
                }
            }
        };
    }

    impl_async_read!(Stream);
    impl_async_read!(ReadHalf);
    impl_async_write!(Stream: write.0);
    impl_async_write!(WriteHalf: 0);
}

/// Accepts streams, as [`TcpListener`] does: several tasks may accept, of an `Arc<Listener>`.
pub struct Listener {
    hub: Hub,
    local: SocketAddr,
    accepting: Mutex<Accepting>,
    pending: Arc<PendingClients>,
    tasks: Arc<WaitingTasks>,
}

/// The acceptor of a listener, and its clients.
struct Accepting {
    acceptor: Acceptor,
    /// The clients that are connecting. Each has its number in the order in which they came.
    joins: JoinSet<(u64, io::Result<Stream>)>,
    /// Streams that have connected.
    connected: BTreeMap<u64, Stream>,
    /// One for which there was no room, as [`AT_A_TIME`] are there.
    waits: Option<Arrived>,
    /// The number of the next client.
    next: u64,
    /// The time that a client that has connected gives to those that came before it, and one that waits to those that are there.
    patience: Pin<Box<Sleep>>,
}

/// The tasks that wait for a client of one listener: what happens wakes all of them.
#[derive(Default)]
struct WaitingTasks(Mutex<Vec<WaitingTask>>);

struct WaitingTask {
    waker: Weak<Waker>,
    /// That of a task that polls without a future. A future keeps it itself, so that it goes with the future.
    kept: Option<Arc<Waker>>,
}

impl WaitingTasks {
    fn add(&self, waker: &Arc<Waker>, keeps: bool) {
        let kept = keeps.then(|| waker.clone());
        let mut tasks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        tasks.retain(|task| task.waker.strong_count() > 0);
        let is_there = |task: &WaitingTask| match &task.kept {
            Some(kept) => keeps && kept.will_wake(waker),
            None => task.waker.as_ptr() == Arc::as_ptr(waker),
        };
        if !tasks.iter().any(is_there) {
            tasks.push(WaitingTask { waker: Arc::downgrade(waker), kept });
        }
    }
}

impl Wake for WaitingTasks {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let tasks = mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        tasks.into_iter().filter_map(|task| task.kept.or(task.waker.upgrade())).for_each(wake);
    }
}

/// State that the clients of a listener share.
#[derive(Default)]
struct PendingClients {
    /// Clients in order of arrival.
    clients: Mutex<Vec<Client>>,
    /// One at a time takes a place, so that no other one takes what is made free for it.
    turn: ::tokio::sync::Mutex<()>,
    /// A client that had a place has connected, or was given up.
    changed: Notify,
}

struct Client {
    task: Option<task::Id>,
    number: u64,
    since: Instant,
    has_spoken: bool,
    /// Since when it has a place of the hub, and connects.
    begun: Option<Instant>,
    /// It is to give its place to another one.
    gives_up: Arc<Notify>,
}

/// A client that connects, until this is dropped.
struct Attempt {
    pending: Arc<PendingClients>,
    number: u64,
    gives_up: Arc<Notify>,
}

impl Drop for Attempt {
    fn drop(&mut self) {
        self.begin(None);
        self.pending.changed.notify_waiters();
    }
}

impl PendingClients {
    fn clients(&self) -> MutexGuard<'_, Vec<Client>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When the first client [makes room](makes_room), and what has it give up.
    fn oldest(&self, is_full: bool) -> Option<(Instant, Arc<Notify>)> {
        let clients = self.clients();
        // Others wait for a place themselves.
        let going_on = clients.iter().filter(|client| client.begun.is_some() || !client.has_spoken);
        let until = |client: &Client| makes_room(client.since, client.begun, is_full);
        let untils = going_on.filter_map(|client| Some((until(client)?, &client.gives_up)));
        let first = untils.min_by_key(|(until, _)| *until);
        first.map(|(until, gives_up)| (until, gives_up.clone()))
    }

    /// Returns until when a client waits for those that came before it and may connect soon.
    fn in_order(&self, number: u64) -> Option<Instant> {
        let clients = self.clients();
        let earlier = clients.iter().filter(|client| client.number < number);
        earlier.map(|client| client.since + ORDER).max().filter(|&until| until > now())
    }
}

impl Attempt {
    fn begin(&self, begun: Option<Instant>) {
        let mut clients = self.pending.clients();
        if let Some(client) = clients.iter_mut().find(|client| client.number == self.number) {
            (client.has_spoken, client.begun) = (true, begun);
        }
    }

    /// Waits for the client's first bytes. A stream that ends is an error of the read.
    async fn wait_until_it_speaks(&self, stream: &TcpStream) -> io::Result<()> {
        match stream.peek(&mut [0]).await? {
            0 => Err(ErrorKind::UnexpectedEof.into()),
            _ => Ok(()),
        }
    }

    /// Takes a place. While the hub has none, one that others have had for too long is made free.
    async fn place<T>(&self, mut take: impl FnMut() -> io::Result<T>) -> io::Result<T> {
        let pending = &self.pending;
        self.begin(None);
        let _turn = pending.turn.lock().await;
        loop {
            let mut changed = pin!(pending.changed.notified());
            let error = match take() {
                Err(error) if error.kind() == ErrorKind::OutOfMemory => error,
                taken => {
                    self.begin(taken.is_ok().then(now));
                    return taken;
                }
            };
            let (until, gives_up) = pending.oldest(true).ok_or(error)?;
            if ::tokio::time::timeout_at(until.into(), changed.as_mut()).await.is_err() {
                gives_up.notify_one();
                changed.await;
            }
        }
    }

    /// Waits for as long as a client may take, and until it is to give up.
    async fn in_time<T>(&self, future: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        let late = async {
            let _ = ::tokio::time::timeout(PATIENCE, self.gives_up.notified()).await;
            // The runtime looks at its files before it goes on: what the client has sent is read.
            ::tokio::task::yield_now().await;
        };
        let (mut future, mut late) = (pin!(future), pin!(late));
        poll_fn(|cx| match future.as_mut().poll(cx) {
            Poll::Pending => late.as_mut().poll(cx).map(|()| Err(ErrorKind::TimedOut.into())),
            done => done,
        })
        .await
    }
}

/// Where clients arrive.
#[derive(Debug)]
enum Acceptor {
    Tcp(TcpListener),
    /// With its file.
    #[cfg(feature = "rdmacm")]
    Manager(rdmacm::Listener, Readiness),
}

/// A client that has arrived.
enum Arrived {
    Over(TcpStream),
    #[cfg(feature = "rdmacm")]
    Managed(Box<rdmacm::ConnectionRequest>),
}

impl Acceptor {
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
                ready!(file.poll(cx))?;
            },
        }
    }
}

impl Arrived {
    async fn connect(self, hub: &Arc<Inner>, attempt: &Attempt) -> io::Result<Stream> {
        match self {
            Self::Over(mut stream) => {
                let joins = async {
                    attempt.in_time(attempt.wait_until_it_speaks(&stream)).await?;
                    let handshake = attempt.place(|| Handshake::new(hub, Role::Accepts)).await;
                    let handshake =
                        handshake.inspect_err(|error| refuse(&stream, hub.refusal(error)))?;
                    stream.set_nodelay(true)?;
                    attempt.in_time(join(handshake, &mut stream)).await
                };
                let (handshake, hello) = match joins.await {
                    Ok(joined) => joined,
                    Err(error) => {
                        // The system's own limit has a number.
                        if error.kind() == ErrorKind::TimedOut && error.raw_os_error().is_none() {
                            let slow = StreamError::Refused(Refusal::TooSlow).into();
                            refuse(&stream, hub.refusal(&slow));
                        }
                        return Err(error);
                    }
                };
                joined(stream, handshake, &hello)
            }
            #[cfg(feature = "rdmacm")]
            Self::Managed(request) => {
                // Without room, the client is rejected in the next step.
                let _ = attempt.place(|| hub.lock().has_room()).await;
                let accepts = manager::accept_on_tokio(hub, *request);
                attempt.in_time(accepts).await.map(Stream::new)
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
    pub async fn bind(hub: &Hub, address: impl ToSocketAddrs + fmt::Debug) -> io::Result<Self> {
        let addresses = look_up(address).await?;
        let listener = TcpListener::bind(&addresses[..]).await?;
        lengthen_backlog(&listener)?;
        Self::new(hub, listener.local_addr()?, Acceptor::Tcp(listener))
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
        let file = Readiness::new(listener.as_fd().try_clone_to_owned()?)?;
        Self::new(hub, local, Acceptor::Manager(listener, file))
    }

    fn new(hub: &Hub, local: SocketAddr, acceptor: Acceptor) -> io::Result<Self> {
        ensure_driven(&hub.inner)?;
        let accepting = Mutex::new(Accepting {
            acceptor,
            joins: JoinSet::new(),
            connected: BTreeMap::new(),
            waits: None,
            next: 0,
            patience: Box::pin(::tokio::time::sleep(ORDER)),
        });
        let (pending, tasks) = (Arc::default(), Arc::default());
        Ok(Self { hub: hub.clone(), local, accepting, pending, tasks })
    }

    /// The address at which it listens.
    ///
    /// # Errors
    ///
    /// None: it returns what [`TcpListener::local_addr`] does.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.local)
    }

    /// The next client that has connected, in the order in which they came. Clients connect side by side, each in a task: one that
    /// is slow, or silent, keeps others waiting for 0.1 s at most, 256 of them for two seconds, and is given up as
    /// [`Listener::accept`](crate::Listener::accept) says. A client that fails to connect is no error of the listener's. The future
    /// may be dropped at any time.
    ///
    /// # Errors
    ///
    ///  - `ConnectionAborted`: the hub was stopped. `NotConnected`: its device has failed.
    ///  - Those of [`TcpListener::accept`], such as too many open files.
    pub async fn accept(&self) -> io::Result<(Stream, SocketAddr)> {
        let mut own: Option<Arc<Waker>> = None;
        poll_fn(|cx| {
            own.take_if(|own| !own.will_wake(cx.waker()));
            self.poll_woken(own.get_or_insert_with(|| Arc::new(cx.waker().clone())), false)
        })
        .await
    }

    /// See [`accept`](Self::accept). All tasks that wait are woken, not only the last one.
    ///
    /// # Errors
    ///
    /// As [`accept`](Self::accept).
    pub fn poll_accept(&self, cx: &mut Context<'_>) -> Poll<io::Result<(Stream, SocketAddr)>> {
        self.poll_woken(&Arc::new(cx.waker().clone()), true)
    }

    fn poll_woken(
        &self,
        waker: &Arc<Waker>,
        keeps: bool,
    ) -> Poll<io::Result<(Stream, SocketAddr)>> {
        // Before it is looked at: what happens from now on wakes the task.
        self.tasks.add(waker, keeps);
        let waker = Waker::from(self.tasks.clone());
        let mut cx = Context::from_waker(&waker);
        if let Some(error) = self.hub.inner.poll_stopped(&cx) {
            return Poll::Ready(Err(error.into()));
        }
        // Dropped when the lock is released, as that wakes tasks.
        let mut nameless = Vec::new();
        let mut accepting = self.accepting.lock().unwrap_or_else(PoisonError::into_inner);
        let mut failure = None;
        loop {
            while failure.is_none() {
                let has_room = accepting.joins.len() + accepting.connected.len() < AT_A_TIME;
                if let Some(arrived) = accepting.waits.take_if(|_| has_room) {
                    self.admit(&mut accepting, arrived);
                }
                if accepting.waits.is_some() {
                    break;
                }
                match accepting.acceptor.poll_next(&mut cx) {
                    Poll::Ready(Ok(arrived)) => accepting.waits = Some(arrived),
                    Poll::Ready(Err(error)) if error.kind() == ErrorKind::ConnectionAborted => {}
                    Poll::Ready(Err(error)) => failure = Some(error),
                    Poll::Pending => break,
                }
            }
            let Poll::Ready(Some(joined)) = accepting.joins.poll_join_next_with_id(&mut cx) else {
                break;
            };
            // One that has failed has made room.
            let id = joined.as_ref().map_or_else(JoinError::id, |(id, _)| *id);
            self.pending.clients().retain(|client| client.task != Some(id));
            if let Ok((_, (number, Ok(stream)))) = joined {
                accepting.connected.insert(number, stream);
            }
        }
        while let Some((&number, _)) = accepting.connected.first_key_value() {
            if let Some(until) = self.pending.in_order(number) {
                accepting.patience.as_mut().reset(until.into());
                if accepting.patience.as_mut().poll(&mut cx).is_pending() {
                    return Poll::Pending;
                }
            }
            if let Some(stream) = accepting.connected.remove(&number) {
                match stream.peer_addr() {
                    Ok(peer) => return Poll::Ready(Ok((stream, peer))),
                    Err(_) => nameless.push(stream),
                }
            }
        }
        let until = match failure {
            Some(error) if accepting.joins.is_empty() => return Poll::Ready(Err(error)),
            // Such as too many open files: those that are connecting come first, and the acceptor is asked again soon.
            Some(_) => Some(now() + ORDER),
            None => {
                let first = accepting.waits.as_ref().and_then(|_| self.pending.oldest(false));
                first.map(|(until, gives_up)| {
                    if until > now() {
                        return until;
                    }
                    // Not a permit: one that speaks just then goes on. One that does not hear of it is asked again.
                    gives_up.notify_waiters();
                    now() + ORDER
                })
            }
        };
        if let Some(until) = until {
            accepting.patience.as_mut().reset(until.into());
            if accepting.patience.as_mut().poll(&mut cx).is_ready() {
                drop(accepting);
                waker.wake_by_ref();
            }
        }
        Poll::Pending
    }

    #[cfg(any(feature = "axum", feature = "tonic"))]
    pub(crate) fn is_stopped(&self) -> bool {
        self.hub.inner.lock().stopped.is_some()
    }

    /// Has a client connect.
    fn admit(&self, accepting: &mut Accepting, arrived: Arrived) {
        let (hub, pending) = (self.hub.clone(), self.pending.clone());
        let (number, gives_up) = (accepting.next, Arc::<Notify>::default());
        accepting.next += 1;
        let attempt = Attempt { pending, number, gives_up: gives_up.clone() };
        // Before the task runs. A runtime that ends drops it at once.
        let (since, begun, has_spoken) = (now(), None, false);
        let client = Client { task: None, number, since, has_spoken, begun, gives_up };
        self.pending.clients().push(client);
        let joins = accepting.joins.spawn(async move {
            let connects = arrived.connect(&hub.inner, &attempt);
            (number, hub.inner.unless_stopped(connects).await)
        });
        if let Some(client) = self.pending.clients().last_mut() {
            client.task = Some(joins.id());
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if self.hub.inner.is_copy() {
            return;
        }
        let own = Waker::from(self.tasks.clone());
        self.hub.inner.lock().accepting.retain(|waker| !waker.will_wake(&own));
    }
}

// A panic leaves what is behind their locks consistent. A `Sleep` has no such promise, and is only polled.
impl UnwindSafe for Listener {}
impl RefUnwindSafe for Listener {}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").field("local", &self.local).finish_non_exhaustive()
    }
}
