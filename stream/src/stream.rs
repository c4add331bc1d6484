//! Streams of threads.

use std::fmt;
use std::io::{self, BufRead, IoSlice, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ibverbs::{ChannelId, PooledBuffer};

use crate::StreamError;
use crate::conn::{self, Cursor, Piece};
#[cfg(doc)]
use crate::hub::Hub;
use crate::hub::{Inner, State, now};

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
}

/// What both halves of a stream have. The stream ends with the last one.
pub(crate) struct Handle {
    pub(crate) hub: Arc<Inner>,
    pub(crate) id: ChannelId,
    addresses: Addresses,
    /// Who drops it may wait.
    is_of_a_thread: bool,
}

impl Handle {
    pub(crate) fn new(hub: Arc<Inner>, id: ChannelId, addresses: Addresses) -> Self {
        Self { hub, id, addresses, is_of_a_thread: true }
    }

    #[cfg(feature = "tokio")]
    pub(crate) fn of_tasks(mut self) -> Self {
        self.is_of_a_thread = false;
        self
    }

    pub(crate) fn peer_addr(&self) -> io::Result<SocketAddr> {
        self.addresses.peer.ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn local_addr(&self) -> io::Result<SocketAddr> {
        self.addresses.local.ok_or_else(|| io::ErrorKind::Unsupported.into())
    }

    pub(crate) fn error(&self) -> Option<StreamError> {
        self.hub.lock().member(self.id).map_or(Some(StreamError::Aborted), |m| m.conn.failure())
    }

    pub(crate) fn set_nodelay(&self, nodelay: bool) {
        if let Some(member) = self.hub.lock().member(self.id) {
            member.conn.nodelay = nodelay;
        }
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
        if !hub.close(*id) {
            return;
        }
        if !*is_of_a_thread {
            // The runtime ends.
            return hub.lock().remove(*id);
        }
        // Nobody else would bring what was written to the peer.
        let until = now() + hub.config.linger;
        let is_gone = |state: &mut State| Ok(state.member(*id).is_none().then_some(()));
        if hub.wait(Some(until), is_gone).is_err() {
            hub.lock().remove(*id);
        }
    }
}

/// What has arrived, and how it is read.
pub(crate) struct Reader {
    pub(crate) handle: Arc<Handle>,
    current: Option<Piece<PooledBuffer>>,
}

impl Reader {
    pub(crate) fn new(handle: Arc<Handle>) -> Self {
        Self { handle, current: None }
    }

    /// Looks with `wait` until there is a piece, or else the end.
    pub(crate) fn look<R>(
        &mut self,
        wait: impl FnOnce(&Handle, &mut dyn FnMut(&mut State) -> Result<Option<()>, StreamError>) -> R,
    ) -> R {
        let Self { handle, current } = self;
        wait(handle, &mut |state| {
            match state.read(handle.id)? {
                conn::Read::Piece(piece) => *current = Some(piece),
                conn::Read::End => {}
                conn::Read::Nothing => return Ok(None),
            }
            Ok(Some(()))
        })
    }

    pub(crate) fn has_piece(&self) -> bool {
        self.current.is_some()
    }

    /// What can be read at once.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.current.as_ref().map_or(&[], Piece::bytes)
    }

    pub(crate) fn consume(&mut self, len: usize) {
        let Some(piece) = &mut self.current else { return };
        piece.consume(len);
        if piece.bytes().is_empty() {
            let buffer = self.current.take().and_then(Piece::into_buffer);
            self.handle.hub.lock().give_back(self.handle.id, buffer);
        }
    }

    /// Copies what there is, as far as there is room.
    pub(crate) fn copy_to(&mut self, to: &mut [u8]) -> usize {
        let from = self.bytes();
        let len = from.len().min(to.len());
        to[..len].copy_from_slice(&from[..len]);
        self.consume(len);
        len
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        if let Some(piece) = self.current.take() {
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

/// What is written.
pub(crate) struct Writer {
    pub(crate) handle: Arc<Handle>,
}

impl Drop for Writer {
    fn drop(&mut self) {
        // The end of the handle says more.
        if Arc::strong_count(&self.handle) > 1 {
            self.handle.shutdown();
        }
    }
}

fn until(timeout: Option<Duration>) -> Option<Instant> {
    timeout.and_then(|timeout| Instant::now().checked_add(timeout))
}

/// The half of a [`Stream`] that reads.
pub struct ReadHalf {
    reader: Reader,
    timeout: Option<Duration>,
}

/// The half of a [`Stream`] that writes. Dropping it ends the direction, as [`shutdown`](Self::shutdown) does, without waiting.
pub struct WriteHalf {
    writer: Writer,
    timeout: Option<Duration>,
}

/// A stream of bytes to one peer over RDMA, for threads: what [`TcpStream`](std::net::TcpStream) is over TCP.
///
/// Bytes are copied into messages when they are written, so a write returns as soon as there is room; and read from the buffers
/// in which they have arrived, without a copy through [`BufRead`]. Each direction can be used by a thread of its own:
/// [`into_split`](Self::into_split), or, as with TCP, [`Read`] and [`Write`] of `&Stream`. Two threads that read the same stream take
/// turns: the second one waits until the first one has something, or its [timeout](Self::set_read_timeout) has passed.
///
/// | | as with TCP, but |
/// |---|---|
/// | [`write`](Write::write) | its bytes go on their way before it returns, unless something [runs](Hub::run) the hub: then they are gathered while earlier ones are in flight |
/// | [`shutdown`](Self::shutdown) | returns when the peer's device has everything that was written |
/// | drop | brings what was written to the peer, for [`linger`](crate::HubBuilder::linger) at most; with something unread, the peer gets `ConnectionReset` |
/// | failure | all that has arrived before is read first; then each call fails, and no failure looks like the end of the stream |
pub struct Stream {
    // In this order: what was not read decides how the stream ends.
    read: Mutex<ReadHalf>,
    write: WriteHalf,
}

impl Stream {
    pub(crate) fn new(handle: Handle) -> Self {
        let handle = Arc::new(handle);
        let read = ReadHalf { reader: Reader::new(handle.clone()), timeout: None };
        Self {
            read: Mutex::new(read),
            write: WriteHalf { writer: Writer { handle }, timeout: None },
        }
    }

    fn handle(&self) -> &Handle {
        &self.write.writer.handle
    }

    fn read_half(&mut self) -> &mut ReadHalf {
        self.read.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// The two directions, for a thread each.
    pub fn into_split(self) -> (ReadHalf, WriteHalf) {
        (self.read.into_inner().unwrap_or_else(PoisonError::into_inner), self.write)
    }

    /// As [`into_split`](Self::into_split), for threads that borrow the stream.
    pub fn split(&mut self) -> (&mut ReadHalf, &mut WriteHalf) {
        let read = self.read.get_mut().unwrap_or_else(PoisonError::into_inner);
        (read, &mut self.write)
    }

    /// Ends the direction to the peer, which reads to the end of what was written: returns when its device has all of that.
    /// With `Read`, reads find the end from now on, and what arrives is thrown away.
    ///
    /// # Errors
    ///
    ///  - `WouldBlock`: the [timeout](Self::set_write_timeout) has passed. It goes on without waiting.
    ///  - `BrokenPipe`: the peer has dropped its stream first, and its device may not have everything.
    ///  - Those of the [stream](StreamError).
    pub fn shutdown(&mut self, how: Shutdown) -> io::Result<()> {
        if how != Shutdown::Write {
            self.read_half().discard();
        }
        if how != Shutdown::Read { self.write.shutdown() } else { Ok(()) }
    }

    /// How long a read waits at most, before it fails with `WouldBlock`. `None`: for ever.
    pub fn set_read_timeout(&mut self, timeout: Option<Duration>) {
        self.read_half().set_timeout(timeout);
    }

    /// How long a write waits at most, before it fails with `WouldBlock`. `None`: for ever.
    pub fn set_write_timeout(&mut self, timeout: Option<Duration>) {
        self.write.set_timeout(timeout);
    }

    /// `true`: what is written goes on its way at once, as long as the peer takes it, and is not gathered.
    pub fn set_nodelay(&self, nodelay: bool) {
        self.handle().set_nodelay(nodelay);
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

impl ReadHalf {
    /// See [`Stream::set_read_timeout`].
    pub fn set_timeout(&mut self, timeout: Option<Duration>) {
        self.timeout = timeout;
    }

    /// Throws away what has arrived and what arrives.
    fn discard(&mut self) {
        let len = self.reader.bytes().len();
        self.reader.consume(len);
        let Handle { hub, id, .. } = &*self.reader.handle;
        let mut state = hub.lock();
        let left = state.member(*id).map(|member| member.conn.discard()).unwrap_or_default();
        for piece in left {
            state.give_back(*id, piece.into_buffer());
        }
        drop(state);
        hub.waker.wake();
    }
}

impl BufRead for ReadHalf {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        if !self.reader.has_piece() {
            let deadline = until(self.timeout);
            self.reader.look(|handle, look| handle.hub.wait(deadline, |state| Ok(look(state)?)))?;
        }
        Ok(self.reader.bytes())
    }

    fn consume(&mut self, len: usize) {
        self.reader.consume(len);
    }
}

impl Read for ReadHalf {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        if to.is_empty() {
            return Ok(0);
        }
        self.fill_buf()?;
        Ok(self.reader.copy_to(to))
    }
}

impl WriteHalf {
    /// See [`Stream::set_write_timeout`].
    pub fn set_timeout(&mut self, timeout: Option<Duration>) {
        self.timeout = timeout;
    }

    /// Ends the direction: see [`Stream::shutdown`].
    ///
    /// # Errors
    ///
    /// Those of [`Stream::shutdown`].
    pub fn shutdown(&mut self) -> io::Result<()> {
        let Handle { hub, id, .. } = &*self.writer.handle;
        self.writer.handle.shutdown();
        hub.wait(until(self.timeout), |state| {
            let member = state.member(*id).ok_or(StreamError::Aborted)?;
            Ok(member.conn.is_shut_down()?.then_some(()))
        })
    }

    /// Waits until what was written has been posted.
    fn flush_until(&self, deadline: Option<Instant>) -> io::Result<()> {
        let Handle { hub, id, .. } = &*self.writer.handle;
        hub.wait(deadline, |state| Ok(state.flush(*id)?.then_some(())))
    }
}

impl WriteHalf {
    fn write_pieces(&self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        if from.iter().all(|piece| piece.is_empty()) {
            return Ok(0);
        }
        let Handle { hub, id, .. } = &*self.writer.handle;
        let (deadline, is_driven) = (until(self.timeout), hub.is_driven());
        let (written, is_sent) = hub.wait(deadline, |state| {
            let Some(written) = state.write(*id, &mut Cursor::new(from))? else { return Ok(None) };
            Ok(Some((written, is_driven || state.is_flushed(*id))))
        })?;
        if !is_sent {
            // Nobody would send it later. What has been taken counts as written, whatever becomes of it.
            let _ = self.flush_until(deadline);
        }
        Ok(written)
    }
}

impl Write for WriteHalf {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.write_pieces(&[IoSlice::new(from)])
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        self.write_pieces(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.flush_until(until(self.timeout))
    }
}

impl Read for Stream {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.read_half().read(to)
    }
}

impl Read for &Stream {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.read.lock().unwrap_or_else(PoisonError::into_inner).read(to)
    }
}

impl Write for &Stream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.write.write_pieces(&[IoSlice::new(from)])
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        self.write.write_pieces(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.write.flush_until(until(self.write.timeout))
    }
}

impl BufRead for Stream {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.read_half().fill_buf()
    }

    fn consume(&mut self, len: usize) {
        self.read_half().consume(len);
    }
}

impl Write for Stream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.write.write(from)
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        self.write.write_vectored(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.write.flush()
    }
}

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
    ReadHalf: |half| &half.reader.handle;
    WriteHalf: |half| &half.writer.handle;
}
