//! Streams of threads.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, BufRead, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use ibverbs::{ChannelId, PooledBuffer};

use crate::StreamError;
use crate::conn::{Cursor, Piece};
use crate::drivers::now;
#[cfg(doc)]
use crate::hub::Hub;
use crate::hub::{Inner, Owner};
use crate::owned::{NotWritten, ReceivedBuffer, SendBuffer};
use crate::state::State;

/// The addresses by which two sides have connected, if they have any.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Addresses {
    pub(crate) peer: Option<SocketAddr>,
    pub(crate) local: Option<SocketAddr>,
}

impl Addresses {
    pub(crate) fn of(stream: &TcpStream) -> Self {
        Self { peer: stream.peer_addr().ok(), local: stream.local_addr().ok() }
    }

    pub(crate) fn peer(&self) -> io::Result<SocketAddr> {
        self.peer.ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn local(&self) -> io::Result<SocketAddr> {
        self.local.ok_or_else(|| io::ErrorKind::Unsupported.into())
    }
}

/// State of both halves of a stream. The stream ends with the last one.
pub(crate) struct Handle {
    pub(crate) hub: Owner,
    pub(crate) id: ChannelId,
    pub(crate) addresses: Addresses,
    /// A thread that drops it may wait.
    is_of_a_thread: bool,
    read_timeout: Timeout,
    write_timeout: Timeout,
    is_nonblocking: AtomicBool,
}

/// How long a call waits at most, in nanoseconds. 0: for ever.
#[derive(Default)]
struct Timeout(AtomicU64);

impl Timeout {
    fn get(&self) -> Option<Duration> {
        let nanos = self.0.load(Ordering::Relaxed);
        (nanos > 0).then(|| Duration::from_nanos(nanos))
    }

    /// # Errors
    ///
    ///  - `InvalidInput`: it is zero.
    fn set(&self, timeout: Option<Duration>) -> io::Result<()> {
        if timeout.is_some_and(|timeout| timeout.is_zero()) {
            let reason = "a timeout of 0 is none: `set_nonblocking(true)` has calls not wait";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        }
        let nanos = timeout.map_or(0, |time| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
        self.0.store(nanos, Ordering::Relaxed);
        Ok(())
    }
}

impl Handle {
    pub(crate) fn new(hub: Arc<Inner>, id: ChannelId, addresses: Addresses) -> Self {
        Self {
            hub: hub.into(),
            id,
            addresses,
            is_of_a_thread: true,
            read_timeout: Timeout::default(),
            write_timeout: Timeout::default(),
            is_nonblocking: AtomicBool::new(false),
        }
    }

    #[cfg(feature = "tokio")]
    pub(crate) fn of_tasks(mut self) -> Self {
        self.is_of_a_thread = false;
        self
    }

    pub(crate) fn error(&self) -> Option<StreamError> {
        self.hub.lock().member(self.id).map_or(Some(StreamError::Aborted), |m| m.conn.failure())
    }

    pub(crate) fn set_nodelay(&self, nodelay: bool) {
        if let Some(member) = self.hub.lock().member(self.id) {
            member.conn.nodelay = nodelay;
        }
    }

    pub(crate) fn nodelay(&self) -> bool {
        self.hub.lock().member(self.id).is_some_and(|member| member.conn.nodelay)
    }

    /// When a call that begins now is to end.
    fn until(&self, timeout: &Timeout) -> Option<Instant> {
        if self.is_nonblocking.load(Ordering::Relaxed) {
            return Some(now());
        }
        timeout.get().and_then(|timeout| now().checked_add(timeout))
    }

    pub(crate) fn send_buffer(&self) -> io::Result<SendBuffer> {
        SendBuffer::new(&self.hub, self.id)
    }

    pub(crate) fn received(&self, piece: Piece<PooledBuffer>) -> ReceivedBuffer {
        ReceivedBuffer::new(&self.hub, self.id, piece)
    }

    /// Has the peer told that nothing more is written.
    pub(crate) fn shutdown(&self) {
        let mut state = self.hub.lock();
        if let Some(member) = state.member(self.id) {
            member.conn.shutdown();
            state.pump(self.id);
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let Self { hub, id, is_of_a_thread, .. } = self;
        if hub.is_copy() {
            return;
        }
        let Some(until) = hub.close(*id).filter(|_| *is_of_a_thread) else { return };
        // The process may end as soon as this returns, and the helper with it.
        let is_gone = |state: &mut State| {
            let is_gone = state.member(*id).is_none() && !state.ending.contains(id);
            Ok(is_gone.then_some(()))
        };
        let since = now();
        let _ = hub.wait(Some(until), is_gone);
        hub.lock().has_lingered(since);
    }
}

/// The receiving side of a stream.
pub(crate) struct Reader {
    pub(crate) handle: Arc<Handle>,
    /// Pieces taken of the stream: one, or more if some were put back.
    pub(crate) pieces: VecDeque<Piece<PooledBuffer>>,
    /// The waker of the last task that has waited.
    #[cfg(feature = "tokio")]
    pub(crate) waker: Option<Arc<std::task::Waker>>,
}

impl Reader {
    pub(crate) fn new(handle: Arc<Handle>) -> Self {
        Self {
            handle,
            pieces: VecDeque::new(),
            #[cfg(feature = "tokio")]
            waker: None,
        }
    }

    fn put_back(&mut self, piece: Option<Piece<PooledBuffer>>) {
        piece.into_iter().for_each(|piece| self.pieces.push_front(piece));
    }

    pub(crate) fn has_piece(&self) -> bool {
        !self.pieces.is_empty()
    }

    /// The bytes that can be read at once.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.pieces.front().map_or(&[], Piece::bytes)
    }

    pub(crate) fn consume(&mut self, len: usize) {
        let Some(piece) = self.pieces.front_mut() else { return };
        piece.consume(len);
        if piece.bytes().is_empty() {
            let buffer = self.pieces.pop_front().and_then(Piece::into_buffer);
            self.handle.hub.lock().give_back(self.handle.id, buffer);
        }
    }

    /// Copies what there is, as far as there is room.
    pub(crate) fn copy_to(&mut self, to: &mut [u8]) -> usize {
        let len = self.peek(to);
        self.consume(len);
        len
    }

    /// Copies as [`copy_to`](Self::copy_to) does, and leaves the bytes there.
    pub(crate) fn peek(&self, to: &mut [u8]) -> usize {
        let from = self.bytes();
        let len = from.len().min(to.len());
        to[..len].copy_from_slice(&from[..len]);
        len
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        if self.handle.hub.is_copy() {
            return;
        }
        for piece in self.pieces.drain(..) {
            let mut state = self.handle.hub.lock();
            if let Some(member) = state.member(self.handle.id) {
                member.has_unread = true;
            }
            if let Some(buffer) = piece.into_buffer() {
                state.recycle(buffer);
            }
        }
    }
}

/// The sending side of a stream.
pub(crate) struct Writer {
    pub(crate) handle: Arc<Handle>,
    /// How long the `shutdown` of a task waits.
    #[cfg(feature = "tokio")]
    pub(crate) patience: Option<std::pin::Pin<Box<::tokio::time::Sleep>>>,
    /// The waker of the last task that has waited.
    #[cfg(feature = "tokio")]
    pub(crate) waker: Option<Arc<std::task::Waker>>,
    /// Its drop does not end the direction.
    pub(crate) is_forgotten: bool,
}

impl Writer {
    pub(crate) fn new(handle: Arc<Handle>) -> Self {
        Self {
            handle,
            #[cfg(feature = "tokio")]
            patience: None,
            #[cfg(feature = "tokio")]
            waker: None,
            is_forgotten: false,
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // The end of the handle says more.
        let is_last = Arc::strong_count(&self.handle) == 1;
        if !is_last && !self.is_forgotten && !self.handle.hub.is_copy() {
            self.handle.shutdown();
        }
    }
}

/// A `shutdown` has waited for long enough.
pub(crate) fn not_taken() -> io::Error {
    let reason = "the peer does not read, and so does not have everything that was written: what is left goes on its way, and \
                  the end after it, for as long as the stream is there or lingers";
    io::Error::new(io::ErrorKind::TimedOut, reason)
}

/// The half of a [`Stream`] that reads.
pub struct ReadHalf {
    reader: Arc<Mutex<Reader>>,
    handle: Arc<Handle>,
    /// A piece that [`BufRead`] has returned and is not consumed yet. Any other call puts it back first.
    held: Mutex<Option<Piece<PooledBuffer>>>,
    /// A piece may be held.
    holds: AtomicBool,
}

/// The half of a [`Stream`] that writes. Dropping it ends the direction, as [`shutdown`](Self::shutdown) does, without waiting.
pub struct WriteHalf {
    writer: Arc<Writer>,
}

/// A stream of bytes to one peer over RDMA, for threads: what [`TcpStream`](std::net::TcpStream) is over TCP.
///
/// Bytes are copied into messages when they are written, so a write returns as soon as there is room; and read from the buffers
/// in which they have arrived, without a copy through [`BufRead`]. Each direction can be used by a thread of its own:
/// [`into_split`](Self::into_split), or, as with TCP, [`try_clone`](Self::try_clone) and [`Read`] and [`Write`] of `&Stream`. Two
/// threads that read the same stream take turns: the second one waits until the first one has something, or its
/// [timeout](Self::set_read_timeout) has passed.
///
/// | | as with TCP, but |
/// |---|---|
/// | [`write`](Write::write) | while earlier bytes are in flight, what is written is gathered, and goes when these have arrived, or fill a message: without another call, but up to some 2 ms later if none waits meanwhile. [`flush`](Write::flush) and [`set_nodelay`](Self::set_nodelay) have it go at once |
/// | [`shutdown`](Self::shutdown) | returns when the peer's device has everything that was written; for a peer that does not read, `TimedOut` after [`linger`](crate::HubBuilder::linger) |
/// | drop | brings what was written to the peer, for [`linger`](crate::HubBuilder::linger) at most; with something unread, the peer gets `ConnectionReset` |
/// | failure | all that has arrived before is read first; then each call fails, and no failure looks like the end of the stream |
///
/// In a task of tokio, a call that waits holds up the runtime: use [`ibverbs_stream::tokio`](crate::tokio) there. Debug builds say
/// so on standard error.
pub struct Stream {
    // In this order: what was not read decides how the stream ends.
    read: ReadHalf,
    write: WriteHalf,
}

impl Stream {
    pub(crate) fn new(handle: Handle) -> Self {
        let handle = Arc::new(handle);
        let reader = Arc::new(Mutex::new(Reader::new(handle.clone())));
        let writer = Arc::new(Writer::new(handle.clone()));
        Self { read: ReadHalf::new(reader, handle), write: WriteHalf { writer } }
    }

    fn handle(&self) -> &Handle {
        &self.read.handle
    }

    /// Another name of the same stream, with the same settings. The stream ends with the last one.
    ///
    /// # Errors
    ///
    /// None: it returns what [`TcpStream::try_clone`] does.
    pub fn try_clone(&self) -> io::Result<Self> {
        let ReadHalf { reader, handle, .. } = &self.read;
        let read = ReadHalf::new(reader.clone(), handle.clone());
        Ok(Self { read, write: WriteHalf { writer: self.write.writer.clone() } })
    }

    /// The two directions, for a thread each.
    pub fn into_split(self) -> (ReadHalf, WriteHalf) {
        (self.read, self.write)
    }

    /// [`into_split`](Self::into_split). It takes the stream, as the methods of that name in [`BufRead`] and other traits do, so
    /// that it is found when they are in scope.
    pub fn split(self) -> (ReadHalf, WriteHalf) {
        self.into_split()
    }

    /// Splits as [`into_split`](Self::into_split) does, for threads that borrow the stream.
    pub fn split_mut(&mut self) -> (&mut ReadHalf, &mut WriteHalf) {
        (&mut self.read, &mut self.write)
    }

    /// Ends a direction. With `Write`, the peer reads to the end of what was written: returns when its device has all of that.
    /// With `Read`, reads find the end from now on, also those that wait, and what arrives is thrown away.
    ///
    /// # Errors
    ///
    ///  - `WouldBlock`: the [timeout](Self::set_write_timeout) has passed. It goes on without waiting.
    ///  - `TimedOut`: the peer does not read, and the hub's [`linger`](crate::HubBuilder::linger) has passed. It goes on without
    ///    waiting.
    ///  - `BrokenPipe`: the peer has dropped its stream first, and its device may not have everything.
    ///  - Those of the [stream](StreamError).
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        if how != Shutdown::Write {
            self.read.discard();
        }
        if how != Shutdown::Read { self.write.writer.shutdown() } else { Ok(()) }
    }

    /// Reads as [`read`](Read::read) does, and leaves the bytes there.
    ///
    /// # Errors
    ///
    /// Those of `read`.
    pub fn peek(&self, to: &mut [u8]) -> io::Result<usize> {
        self.read.peek(to)
    }

    /// Reads without a copy: the buffer in which the next bytes have arrived. `None`: the stream has ended. The peer may send as many
    /// messages as the hub's [`receives`](crate::HubBuilder::receives) that are not read, and those that the program keeps count.
    ///
    /// # Errors
    ///
    /// Those of `read`.
    pub fn read_owned(&self) -> io::Result<Option<ReceivedBuffer>> {
        self.read.read_owned()
    }

    /// A buffer for [`write_owned`](Self::write_owned). It does not wait.
    ///
    /// # Errors
    ///
    ///  - Those of [`BufferPool::new`](ibverbs::BufferPool::new), if more buffers are to be registered and cannot be.
    ///  - [`Aborted`](StreamError::Aborted): the hub was stopped.
    pub fn send_buffer(&self) -> io::Result<SendBuffer> {
        self.handle().send_buffer()
    }

    /// Writes a buffer without a copy, all of its bytes, behind what was written before. It goes on its way at once, as far as the
    /// peer receives; otherwise this waits as `write` does.
    ///
    /// # Errors
    ///
    /// Each gives the buffer back, and nothing of it was written.
    ///
    ///  - `InvalidInput`: the buffer is another hub's, or longer than a message to this peer.
    ///  - Those of `write`.
    pub fn write_owned(&self, buffer: SendBuffer) -> Result<(), NotWritten> {
        self.write.writer.write_owned(buffer)
    }

    /// `true`: calls do not wait, and fail with `WouldBlock` instead. Such a call polls for all streams of the hub. A stream has no
    /// descriptor that says when to try again: tasks have [`readable`](crate::tokio::Stream::readable).
    ///
    /// # Errors
    ///
    /// None: it returns what [`TcpStream::set_nonblocking`] does.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.handle().is_nonblocking.store(nonblocking, Ordering::Relaxed);
        Ok(())
    }

    /// How long a read waits at most, before it fails with `WouldBlock`. `None`: for ever.
    ///
    /// # Errors
    ///
    ///  - `InvalidInput`: the timeout is zero.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.handle().read_timeout.set(timeout)
    }

    /// How long a write waits at most, before it fails with `WouldBlock`. `None`: for ever.
    ///
    /// # Errors
    ///
    ///  - `InvalidInput`: the timeout is zero.
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.handle().write_timeout.set(timeout)
    }

    /// Returns what was set by [`set_read_timeout`](Self::set_read_timeout).
    ///
    /// # Errors
    ///
    /// None: it returns what [`TcpStream::read_timeout`] does.
    pub fn read_timeout(&self) -> io::Result<Option<Duration>> {
        Ok(self.handle().read_timeout.get())
    }

    /// Returns what was set by [`set_write_timeout`](Self::set_write_timeout).
    ///
    /// # Errors
    ///
    /// None: it returns what [`TcpStream::write_timeout`] does.
    pub fn write_timeout(&self) -> io::Result<Option<Duration>> {
        Ok(self.handle().write_timeout.get())
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

    /// The peer's address, of the TCP stream over which the two sides have connected, or the connection manager's.
    ///
    /// # Errors
    ///
    ///  - `Unsupported`: they have connected over another stream, which has none.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.handle().addresses.peer()
    }

    /// Returns the own address, as [`peer_addr`](Self::peer_addr) does the peer's.
    ///
    /// # Errors
    ///
    /// As [`peer_addr`](Self::peer_addr).
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.handle().addresses.local()
    }

    /// Why the stream has failed, if it has.
    pub fn take_error(&self) -> Option<StreamError> {
        self.handle().error()
    }
}

impl ReadHalf {
    fn new(reader: Arc<Mutex<Reader>>, handle: Arc<Handle>) -> Self {
        Self { reader, handle, held: Mutex::default(), holds: AtomicBool::new(false) }
    }

    /// See [`Stream::set_read_timeout`].
    ///
    /// # Errors
    ///
    /// Those of [`Stream::set_read_timeout`].
    pub fn set_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.handle.read_timeout.set(timeout)
    }

    /// Puts the two halves of a stream together again.
    ///
    /// # Errors
    ///
    /// They are halves of two streams: both come back.
    pub fn reunite(self, write: WriteHalf) -> Result<Stream, (Self, WriteHalf)> {
        if Arc::ptr_eq(&self.handle, &write.writer.handle) {
            return Ok(Stream { read: self, write });
        }
        Err((self, write))
    }

    /// The reader, which has what this half holds.
    #[inline(always)]
    fn reader(&self) -> io::Result<MutexGuard<'_, Reader>> {
        let mut reader = match self.reader.try_lock() {
            Ok(reader) => reader,
            Err(TryLockError::WouldBlock) if self.handle.is_nonblocking.load(Ordering::Relaxed) => {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            Err(_) => self.reader.lock().unwrap_or_else(PoisonError::into_inner),
        };
        if self.holds.load(Ordering::Relaxed) {
            self.holds.store(false, Ordering::Relaxed);
            // Pieces that another name of the stream has taken meanwhile came later.
            reader.put_back(self.held.lock().unwrap_or_else(PoisonError::into_inner).take());
        }
        Ok(reader)
    }

    /// The reader with a piece, or at the end, or `copy` has taken the bytes.
    fn filled(&self, mut copy: impl FnMut(&[u8]) -> bool) -> io::Result<MutexGuard<'_, Reader>> {
        let mut reader = self.reader()?;
        if !reader.has_piece() {
            let Handle { hub, id, .. } = &*self.handle;
            let deadline = self.handle.until(&self.handle.read_timeout);
            let pieces = &mut reader.pieces;
            hub.wait(deadline, |state| Ok(state.read(*id, pieces, &mut copy)?))?;
        }
        Ok(reader)
    }

    fn read_to(&self, to: &mut [u8]) -> io::Result<usize> {
        if to.is_empty() {
            return Ok(0);
        }
        let mut len = 0;
        let mut reader = self.filled(|bytes| {
            let Some(to) = to.get_mut(..bytes.len()) else { return false };
            to.copy_from_slice(bytes);
            len = bytes.len();
            true
        })?;
        if len > 0 { Ok(len) } else { Ok(reader.copy_to(to)) }
    }

    /// See [`Stream::read_owned`].
    ///
    /// # Errors
    ///
    /// Those of [`Stream::read_owned`].
    pub fn read_owned(&self) -> io::Result<Option<ReceivedBuffer>> {
        let piece = self.filled(|_| false)?.pieces.pop_front();
        Ok(piece.map(|piece| self.handle.received(piece)))
    }

    fn peek(&self, to: &mut [u8]) -> io::Result<usize> {
        if to.is_empty() { Ok(0) } else { Ok(self.filled(|_| false)?.peek(to)) }
    }

    /// Throws away what has arrived and what arrives.
    fn discard(&self) {
        // A thread that waits has nothing, and finds the end.
        if let Ok(mut reader) = self.reader.try_lock() {
            reader.put_back(self.held.lock().unwrap_or_else(PoisonError::into_inner).take());
            while reader.has_piece() {
                reader.consume(usize::MAX);
            }
        }
        self.handle.hub.lock().discard(self.handle.id);
    }
}

impl Drop for ReadHalf {
    fn drop(&mut self) {
        // The held piece is unread, for another name of the stream or for the peer.
        let held = self.held.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        let Some(held) = held else { return };
        if let Ok(mut reader) = self.reader.try_lock() {
            return reader.put_back(Some(held));
        }
        if self.handle.hub.is_copy() {
            return;
        }
        // Another thread is reading, and has later bytes.
        let mut state = self.handle.hub.lock();
        if let Some(member) = state.member(self.handle.id) {
            member.has_unread = true;
        }
        if let Some(buffer) = held.into_buffer() {
            state.recycle(buffer);
        }
    }
}

impl BufRead for ReadHalf {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        let held = self.held.get_mut().unwrap_or_else(PoisonError::into_inner);
        if held.is_none() {
            let piece = self.filled(|_| false)?.pieces.pop_front();
            *self.holds.get_mut() = true;
            *self.held.get_mut().unwrap_or_else(PoisonError::into_inner) = piece;
        }
        let held = self.held.get_mut().unwrap_or_else(PoisonError::into_inner);
        Ok(held.as_ref().map_or(&[], Piece::bytes))
    }

    fn consume(&mut self, len: usize) {
        let held = self.held.get_mut().unwrap_or_else(PoisonError::into_inner);
        let Some(piece) = held else { return };
        piece.consume(len);
        if piece.bytes().is_empty() {
            let buffer = held.take().and_then(Piece::into_buffer);
            self.handle.hub.lock().give_back(self.handle.id, buffer);
        }
    }
}

impl Read for ReadHalf {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.read_to(to)
    }
}

impl WriteHalf {
    /// See [`Stream::set_write_timeout`].
    ///
    /// # Errors
    ///
    /// Those of [`Stream::set_write_timeout`].
    pub fn set_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.writer.handle.write_timeout.set(timeout)
    }

    /// See [`Stream::send_buffer`].
    ///
    /// # Errors
    ///
    /// Those of [`Stream::send_buffer`].
    pub fn send_buffer(&self) -> io::Result<SendBuffer> {
        self.writer.handle.send_buffer()
    }

    /// See [`Stream::write_owned`].
    ///
    /// # Errors
    ///
    /// Those of [`Stream::write_owned`].
    pub fn write_owned(&self, buffer: SendBuffer) -> Result<(), NotWritten> {
        self.writer.write_owned(buffer)
    }

    /// Ends the direction: see [`Stream::shutdown`].
    ///
    /// # Errors
    ///
    /// Those of [`Stream::shutdown`].
    pub fn shutdown(&self) -> io::Result<()> {
        self.writer.shutdown()
    }
}

impl Writer {
    fn until(&self) -> Option<Instant> {
        self.handle.until(&self.handle.write_timeout)
    }

    fn shutdown(&self) -> io::Result<()> {
        let Handle { hub, id, .. } = &*self.handle;
        self.handle.shutdown();
        let patience = now() + hub.config.lingers();
        let deadline = self.until().map_or(patience, |deadline| deadline.min(patience));
        let waited = hub.wait(Some(deadline), |state| {
            let member = state.member(*id).ok_or(StreamError::Aborted)?;
            Ok(member.conn.is_shut_down()?.then_some(()))
        });
        waited.map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock if deadline == patience => not_taken(),
            _ => error,
        })
    }

    /// Waits until what was written has been posted.
    fn flush_until(&self, deadline: Option<Instant>) -> io::Result<()> {
        let Handle { hub, id, .. } = &*self.handle;
        hub.wait(deadline, |state| Ok(state.flush(*id)?.then_some(())))
    }

    fn write_owned(&self, mut buffer: SendBuffer) -> Result<(), NotWritten> {
        let Handle { hub, id, .. } = &*self.handle;
        let written = buffer
            .of(hub)
            .and_then(|filled| hub.wait(self.until(), |state| state.put(*id, filled)));
        written.map_err(|error| NotWritten { buffer, error })
    }

    fn write_pieces(&self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        if from.iter().all(|piece| piece.is_empty()) {
            return Ok(0);
        }
        let Handle { hub, id, .. } = &*self.handle;
        hub.wait(self.until(), |state| {
            let written = state.write(*id, &mut Cursor::new(from))?;
            let has_gathered = state.owing > 0 && state.drivers.runs == 0;
            if has_gathered && state.has_doubled(*id, written.unwrap_or_default()) {
                // Nobody else may have polled for what was in flight. To do so for each short write costs more than the write.
                state.turn();
            }
            Ok(written)
        })
    }
}

macro_rules! write_through {
    ($($type:ty: $($field:ident).+;)+) => {$(
        impl Write for $type {
            fn write(&mut self, from: &[u8]) -> io::Result<usize> {
                self.$($field).+.write_pieces(&[IoSlice::new(from)])
            }

            fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
                self.$($field).+.write_pieces(from)
            }

            fn flush(&mut self) -> io::Result<()> {
                self.$($field).+.flush_until(self.$($field).+.until())
            }
        }
    )+};
}

write_through! {
    WriteHalf: writer;
    Stream: write.writer;
    &Stream: write.writer;
}

impl Read for Stream {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.read.read_to(to)
    }
}

impl Read for &Stream {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.read.read_to(to)
    }
}

impl BufRead for Stream {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.read.fill_buf()
    }

    fn consume(&mut self, len: usize) {
        self.read.consume(len);
    }
}

// A panic leaves what is behind their locks consistent.
impl UnwindSafe for Handle {}
impl RefUnwindSafe for Handle {}
impl UnwindSafe for Reader {}
impl RefUnwindSafe for Reader {}
impl UnwindSafe for Writer {}
impl RefUnwindSafe for Writer {}
impl UnwindSafe for ReadHalf {}
impl RefUnwindSafe for ReadHalf {}

macro_rules! debug {
    ($($type:ident: $handle:expr;)+) => {$(
        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                let handle: fn(&Self) -> &Handle = $handle;
                let handle = handle(self);
                f.debug_struct(stringify!($type))
                    .field("local", &handle.addresses.local)
                    .field("peer", &handle.addresses.peer)
                    .finish_non_exhaustive()
            }
        }
    )+};
}

debug! {
    Stream: |stream| stream.handle();
    ReadHalf: |half| &half.handle;
    WriteHalf: |half| &half.writer.handle;
}
