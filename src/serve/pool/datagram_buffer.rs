//! Pooled buffers for datagrams, with what precedes the message.

use std::io::{self, Write};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use super::PooledBuffer;
use crate::base::{Error, Result, debug, ffi};
use crate::channel::OwnedBuffer;
use crate::serve::event_loop::Keep;
use crate::verbs::memory::{GatherBuffer, KeptLength, ScatterBuffer};
use crate::verbs::queue_pair::GlobalRouteHeader;

const HEADER: usize = GlobalRouteHeader::LEN;

/// A pooled buffer for a datagram: a message, with the [header](Self::header) of 40 bytes that precedes it.
///
/// A receive of a [datagram end](crate::Loop::add_datagrams) fills a [`PooledBuffer`] with both; [`from`](Self::from)
/// takes them apart without copying. A send sends only the message, so what was received can be sent on as it is. The
/// pool's chunks need 40 bytes more than the longest message.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// use std::io::Write;
/// use std::sync::Arc;
/// use ibverbs::{AccessFlags, BufferPool, ProtectionDomain};
/// use ibverbs::pool::DatagramBuffer;
///
/// let domain = Arc::new(ProtectionDomain::new(ibverbs::open("rxe0")?)?);
/// let pool = BufferPool::new(&domain, 40 + 1024, 16, AccessFlags::empty())?;
/// let mut message = DatagramBuffer::new(pool.take().ok_or("all buffers are in use")?)?;
/// write!(message, "load {}", 0.7)?;
/// assert_eq!(message[..], *b"load 0.7");
/// # Ok(())
/// # }
/// ```
pub struct DatagramBuffer {
    whole: PooledBuffer,
}

impl DatagramBuffer {
    /// An empty message.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the chunk has less than 40 bytes.
    pub fn new(buffer: PooledBuffer) -> Result<Self> {
        let mut message = Self { whole: buffer };
        message.whole.clear();
        message.begin()?;
        Ok(message)
    }

    /// Makes a header of zeros, not of what an earlier user of the chunk left.
    fn begin(&mut self) -> Result<()> {
        let Some(missing) = HEADER.checked_sub(self.whole.len()) else { return Ok(()) };
        let reason = "a chunk for datagrams has 40 bytes more than the longest message";
        let begun = self.whole.extend_from_slice(&[0; HEADER][..missing]);
        begun.map_err(|_| Error::invalid("ibv_sge", reason))
    }

    /// What preceded the received message; zeros if nothing was received.
    pub fn header(&self) -> GlobalRouteHeader {
        let mut bytes = [0; HEADER];
        let there = self.whole.len().min(HEADER);
        bytes[..there].copy_from_slice(&self.whole[..there]);
        GlobalRouteHeader::from_bytes(bytes)
    }

    /// The longest message.
    pub fn capacity(&self) -> usize {
        self.whole.capacity().saturating_sub(HEADER)
    }

    /// Removes the message.
    pub fn clear(&mut self) {
        let header = self.whole.len().min(HEADER);
        self.whole.set_len(header).expect("it is no longer than before");
    }

    /// Appends these bytes.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the buffer has no room for them, and stays as it was.
    pub fn extend_from_slice(&mut self, bytes: &[u8]) -> Result<()> {
        self.begin()?;
        self.whole.extend_from_slice(bytes)
    }

    /// The buffer with both.
    pub fn into_inner(self) -> PooledBuffer {
        self.whole
    }
}

impl From<PooledBuffer> for DatagramBuffer {
    /// What was received. A buffer of less than 40 bytes has an empty message.
    fn from(whole: PooledBuffer) -> Self {
        Self { whole }
    }
}

impl Write for DatagramBuffer {
    /// Appends as many bytes as there is room for. It never fails.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Without room for the header there is none for a message.
        self.begin().map_or(Ok(0), |()| self.whole.write(bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Deref for DatagramBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.whole.get(HEADER..).unwrap_or_default()
    }
}

impl DerefMut for DatagramBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.whole.get_mut(HEADER..).unwrap_or_default()
    }
}

// SAFETY: it is a part of the memory that the pooled buffer vouches for, and only this accesses it.
unsafe impl GatherBuffer for DatagramBuffer {
    type List = [ffi::ibv_sge; 1];
    type Kept = Self;

    const KEEPS_LENGTH: bool = true;

    fn gather(&self) -> Result<Self::List> {
        let [ffi::ibv_sge { addr, length, lkey }] = self.whole.gather()?;
        let header = length.min(HEADER as u32);
        Ok([ffi::ibv_sge { addr: addr + u64::from(header), length: length - header, lkey }])
    }

    fn kept_length(&mut self) -> Option<NonNull<KeptLength>> {
        self.whole.kept_length()
    }
}

// SAFETY: as above: the memory is the pooled buffer's.
unsafe impl ScatterBuffer for DatagramBuffer {
    fn scatter(&mut self) -> Result<Self::List> {
        self.whole.scatter()
    }

    fn begin_receive(&mut self) -> Result<Self::List> {
        self.whole.begin_receive()
    }
}

// SAFETY: it owns nothing but the pooled buffer, which is an `OwnedBuffer`.
unsafe impl OwnedBuffer for DatagramBuffer {}

impl Keep<PooledBuffer> for DatagramBuffer {
    #[inline(always)]
    fn keep(self) -> PooledBuffer {
        self.whole
    }
}

debug! { DatagramBuffer, self, header: self.header(), len: self.len(), capacity: self.capacity(), .. }
