//! Buffers of a hub that the program has: it writes them, or reads what has arrived in them, without a copy.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::{error, fmt, io, mem};

use ibverbs::{ChannelId, PooledBuffer};

use crate::conn::{Chunk, Piece};
use crate::hub::{Inner, Owner};
use crate::wire::HEADER;

/// A registered buffer of a hub, which the program fills and a stream [sends](crate::Stream::write_owned) without a copy.
///
/// It has no bytes at first. [`io::Write`] appends to them; [`set_len`](Self::set_len) makes room that is filled in place. Dropped, it
/// goes back to its hub. A hub registers buffers that programs have in addition to those that its streams need.
pub struct SendBuffer {
    hub: Owner,
    /// With room for the header in front. `None`: it was written.
    buffer: Option<PooledBuffer>,
    capacity: usize,
}

impl SendBuffer {
    pub(crate) fn new(hub: &Owner, id: ChannelId) -> io::Result<Self> {
        let (mut buffer, capacity) = hub.lend(id)?;
        Chunk::set_len(&mut buffer, HEADER);
        Ok(Self { hub: hub.clone(), buffer: Some(buffer), capacity })
    }

    /// The most bytes that it can have: those of a message to the stream's peer.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Makes it so long. What is new in it is anything, such as bytes of an earlier message: fill it.
    ///
    /// # Errors
    ///
    ///  - `InvalidInput`: it is more than its [capacity](Self::capacity).
    pub fn set_len(&mut self, len: usize) -> io::Result<()> {
        if len > self.capacity {
            let reason = format!("{len} bytes are more than the {} of the buffer", self.capacity);
            return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
        }
        if let Some(buffer) = &mut self.buffer {
            Chunk::set_len(buffer, HEADER + len);
        }
        Ok(())
    }

    /// The buffer, for a stream of this hub.
    ///
    /// # Errors
    ///
    ///  - `InvalidInput`: it is another hub's.
    pub(crate) fn of(&mut self, hub: &Arc<Inner>) -> io::Result<&mut Option<PooledBuffer>> {
        if Arc::ptr_eq(&self.hub, hub) {
            return Ok(&mut self.buffer);
        }
        Err(io::Error::new(io::ErrorKind::InvalidInput, "the buffer is another hub's"))
    }
}

impl Deref for SendBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.buffer.as_ref().map_or(&[], |buffer| &buffer.bytes()[HEADER..])
    }
}

impl DerefMut for SendBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.buffer.as_mut().map_or(&mut [], |buffer| &mut buffer.bytes_mut()[HEADER..])
    }
}

impl io::Write for SendBuffer {
    /// Appends what there is room for.
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        let Some(buffer) = &mut self.buffer else { return Ok(0) };
        let before = buffer.bytes().len();
        let len = from.len().min(HEADER + self.capacity - before);
        Chunk::set_len(buffer, before + len);
        buffer.bytes_mut()[before..].copy_from_slice(&from[..len]);
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for SendBuffer {
    fn drop(&mut self) {
        let Some(buffer) = self.buffer.take() else { return };
        if self.hub.is_forked() {
            return mem::forget(buffer);
        }
        let mut state = self.hub.lock();
        state.buffers.lent -= 1;
        state.recycle(buffer);
    }
}

/// Bytes that have arrived, in the registered buffer in which they have: [`Stream::read_owned`](crate::Stream::read_owned).
///
/// While the program has it, the peer may send one message less, and nobody else has less: dropped, it receives again. It may
/// outlive its stream.
pub struct ReceivedBuffer {
    hub: Owner,
    id: ChannelId,
    piece: Option<Piece<PooledBuffer>>,
}

impl ReceivedBuffer {
    pub(crate) fn new(hub: &Owner, id: ChannelId, piece: Piece<PooledBuffer>) -> Self {
        hub.lock_quietly().buffers.lent += usize::from(matches!(piece, Piece::Kept(..)));
        Self { hub: hub.clone(), id, piece: Some(piece) }
    }
}

impl Deref for ReceivedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.piece.as_ref().map_or(&[], Piece::bytes)
    }
}

impl Drop for ReceivedBuffer {
    fn drop(&mut self) {
        let buffer = self.piece.take().and_then(Piece::into_buffer);
        if self.hub.is_forked() {
            return mem::forget(buffer);
        }
        let mut state = self.hub.lock();
        state.buffers.lent -= usize::from(buffer.is_some());
        if state.member(self.id).is_some() {
            state.give_back(self.id, buffer);
        } else if let Some(buffer) = buffer {
            state.recycle(buffer);
        }
    }
}

/// A buffer that was not written, with the reason.
#[derive(Debug)]
pub struct NotWritten {
    /// The buffer, unchanged.
    pub buffer: SendBuffer,
    /// Why.
    pub error: io::Error,
}

impl fmt::Display for NotWritten {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl error::Error for NotWritten {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        Some(&self.error)
    }
}

impl From<NotWritten> for io::Error {
    fn from(not_written: NotWritten) -> Self {
        not_written.error
    }
}

macro_rules! debug {
    ($($type:ident)+) => {$(
        impl fmt::Debug for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_struct(stringify!($type)).field("len", &self.len()).finish_non_exhaustive()
            }
        }
    )+};
}

debug! { SendBuffer ReceivedBuffer }
