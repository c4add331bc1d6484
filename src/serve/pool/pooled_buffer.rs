//! Buffers of a pool.

use std::cell::UnsafeCell;
use std::io::Write;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::{hint, io, slice};

use super::free_chunks::FreeChunks;
use super::waiting::{self, Waiting};
use crate::base::{Error, Result, debug, ffi};
use crate::channel::{OwnedBuffer, Piece};
use crate::verbs::memory::{
    GatherBuffer, KeptLength, RemoteMemoryRegion, ScatterBuffer, SharedMemoryRegion,
    SharedMemorySlice,
};

/// Chunks begin at multiples of this: no two share a cache line.
pub(super) const ALIGNMENT: usize = 64;

/// Memory that peers do not access: a [`PooledBuffer`] dereferences to its bytes.
#[derive(Debug)]
pub enum Exclusive {}

/// Memory that peers access too: a [`PooledBuffer`]'s bytes are copied in and out.
#[derive(Debug)]
pub enum Shared {}

/// The memory of a pool: [`Exclusive`] or [`Shared`]. Sealed.
pub trait PoolMemory: sealed::Memory {}

impl<M: sealed::Memory> PoolMemory for M {}

mod sealed {
    pub trait Memory: 'static {
        const PEERS: bool;
    }

    impl Memory for super::Exclusive {
        const PEERS: bool = false;
    }

    impl Memory for super::Shared {
        const PEERS: bool = true;
    }
}

pub(super) struct Pool {
    pub(super) region: SharedMemoryRegion<'static, u8>,
    pub(super) chunks: Box<[UnsafeCell<Chunk>]>,
    pub(super) chunk_len: usize,
    pub(super) free: FreeChunks,
    pub(super) waiting: Waiting,
}

// SAFETY: only the buffer that has a chunk accesses it; the other fields are `Send` and `Sync`.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

pub(super) struct Chunk {
    pub(super) addr: u64,
    pub(super) kept: KeptLength,
    pub(super) lkey: u32,
    pub(super) index: u32,
    pub(super) pool: *const Pool,
    /// The program took the spare capacity, and has not set the length since.
    #[cfg(debug_assertions)]
    pub(super) spare_is_taken: bool,
}

/// A chunk of a [`BufferPool`](super::BufferPool), as an [`OwnedBuffer`]. Dropping it gives the chunk back.
///
/// It is empty when taken. [`Write`] and [`extend_from_slice`](Self::extend_from_slice) append. Operations use:
///
///  - to send, or write to the peer: the buffer's bytes.
///  - to receive: the whole [capacity](Self::capacity). The length becomes the message's. It stays if the receive
///    fails, or a peer's write with an immediate completes it.
///  - to read: the buffer's length, so [set](Self::set_len) it first.
///
/// The bytes of [`Shared`] memory are read by [`as_slice`](PooledBuffer::as_slice); [`remote`](PooledBuffer::remote)
/// names them for peers.
pub struct PooledBuffer<M = Exclusive> {
    /// One word, since a buffer moves into and out of each operation.
    chunk: NonNull<Chunk>,
    memory: PhantomData<fn() -> M>,
}

// SAFETY: the chunk is the buffer's alone, and its pool is `Sync`.
unsafe impl<M> Send for PooledBuffer<M> {}
// SAFETY: as above; memory that peers access too is only copied, by volatile accesses.
unsafe impl<M> Sync for PooledBuffer<M> {}

impl Pool {
    #[inline(always)]
    pub(super) fn buffer<M>(&self, index: u32) -> PooledBuffer<M> {
        // SAFETY: the caller took the index from the free chunks, so it is in range, and no other buffer has the chunk.
        unsafe {
            let chunk = self.chunks.get_unchecked(index as usize).get();
            (*chunk).kept.set(0);
            note_spare(chunk, false);
            PooledBuffer { chunk: NonNull::new_unchecked(chunk), memory: PhantomData }
        }
    }
}

/// Only debug builds keep it, for [`warn_of_spare`].
///
/// # Safety
///
/// The caller alone has the chunk.
#[inline(always)]
unsafe fn note_spare(_chunk: *mut Chunk, _is_taken: bool) {
    #[cfg(debug_assertions)]
    // SAFETY: the chunk is the caller's alone.
    unsafe {
        (*_chunk).spare_is_taken = _is_taken;
    }
}

/// Says once in a process that bytes in the spare capacity are not sent.
#[cfg(debug_assertions)]
#[cold]
fn warn_of_spare(len: u32) {
    static SAID: std::sync::Once = std::sync::Once::new();
    SAID.call_once(|| {
        // `eprintln!` panics if standard error is closed.
        let _ = writeln!(
            io::stderr(),
            "ibverbs: a `PooledBuffer` is posted with {len} bytes, after `spare_capacity_mut` without `set_len`: \
             bytes that were written there are not sent"
        );
    });
}

pub(super) fn check_len(len: usize, capacity: usize) -> Result<()> {
    if len <= capacity {
        return Ok(());
    }
    let what = "the length of a pooled buffer";
    Err(Error::out_of_range("ibv_sge", what, len as u64, 0, capacity as u64))
}

impl<M> Drop for PooledBuffer<M> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the chunk is this buffer's, which nothing uses after its drop.
        unsafe { give_back(self.chunk) }
    }
}

/// Takes the buffer's field: the buffer's address would keep it in memory.
///
/// # Safety
///
/// It is the chunk of a buffer that nothing uses any more.
#[inline(never)]
unsafe fn give_back(chunk: NonNull<Chunk>) {
    // SAFETY: the chunk is the caller's, so its pool stays until it is given back.
    unsafe {
        let Chunk { pool, index, .. } = *chunk.as_ptr();
        if !FreeChunks::give_back(&raw const (*pool).free, index) {
            give_back_slowly(pool, index);
        }
    }
}

/// # Safety
///
/// It is the number of a chunk of the pool that nothing uses any more.
#[cold]
#[inline(never)]
unsafe fn give_back_slowly(pool: *const Pool, index: u32) {
    let mut woken = None;
    // SAFETY: the pool stays until the chunk is given back. If it was the last, nothing else uses the pool.
    unsafe {
        let next = || {
            woken = (*pool).waiting.next(&(*pool).free);
            woken.is_some()
        };
        if FreeChunks::give_back_slowly(&raw const (*pool).free, index, next) {
            drop(Box::from_raw(pool.cast_mut()));
        }
    }
    waiting::wake(woken);
}

impl<M> PooledBuffer<M> {
    #[inline(always)]
    pub(super) fn chunk(&self) -> &Chunk {
        // SAFETY: the chunk is this buffer's alone, and keeps its pool.
        unsafe { self.chunk.as_ref() }
    }

    /// The bytes of the chunk: the most that the buffer, or a received message, can have.
    pub fn capacity(&self) -> usize {
        self.chunk().kept.capacity() as usize
    }

    /// Sets the length. Added bytes are what an earlier user of the chunk left there, so write them before you send
    /// them.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: it is more than the [capacity](Self::capacity).
    pub fn set_len(&mut self, len: usize) -> Result<()> {
        check_len(len, self.capacity())?;
        // SAFETY: as at `chunk`, and the borrow is exclusive.
        unsafe {
            note_spare(self.chunk.as_ptr(), false);
            self.chunk.as_mut().kept.set(len as u32);
        }
        Ok(())
    }

    /// The number of bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.chunk().kept.get() as usize
    }

    /// Whether it is empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes all bytes.
    #[inline]
    pub fn clear(&mut self) {
        // SAFETY: as in `set_len`.
        unsafe {
            note_spare(self.chunk.as_ptr(), false);
            self.chunk.as_mut().kept.set(0);
        }
    }

    /// Appends these bytes.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the buffer has no room for them, and stays as it was.
    pub fn extend_from_slice(&mut self, bytes: &[u8]) -> Result<()> {
        let len = self.len();
        self.set_len(len.saturating_add(bytes.len()))?;
        self.shared().write(len, bytes)
    }

    /// Others may access the bytes too.
    fn shared(&self) -> SharedMemorySlice<'_, u8> {
        let &Chunk { index, pool, ref kept, .. } = self.chunk();
        // SAFETY: the pool is alive, as at `chunk`.
        let pool = unsafe { &*pool };
        let start = index as usize * pool.chunk_len.next_multiple_of(ALIGNMENT);
        let bytes = pool.region.slice(start..start + kept.get() as usize);
        bytes.expect("chunks are within the region")
    }

    #[inline(always)]
    fn piece(&self, length: u32) -> [ffi::ibv_sge; 1] {
        let &Chunk { addr, lkey, .. } = self.chunk();
        [ffi::ibv_sge { addr, length, lkey }]
    }
}

impl PooledBuffer<Shared> {
    /// The bytes, to be copied out and in: a peer may write them meanwhile.
    pub fn as_slice(&self) -> SharedMemorySlice<'_, u8> {
        self.shared()
    }

    /// The bytes, for a peer that reads or writes them. For a write, set the [length](Self::set_len) first. Keep the
    /// buffer until the peer is done: the next user of the chunk would share it with the peer.
    pub fn remote(&self) -> RemoteMemoryRegion {
        self.shared().remote()
    }
}

impl PooledBuffer {
    /// The rest of the chunk, to be filled before [`set_len`](Self::set_len) adds it. It has what an earlier user of
    /// the chunk left there. Debug builds say so, in one line on standard error, when the buffer is sent without
    /// `set_len`: then these bytes are not sent.
    pub fn spare_capacity_mut(&mut self) -> &mut [u8] {
        let len = self.len();
        // SAFETY: the chunk is this buffer's alone, and the borrow is exclusive.
        unsafe { note_spare(self.chunk.as_ptr(), true) };
        // SAFETY: as at `deref`, of the whole chunk; the borrow is exclusive.
        let all = unsafe { slice::from_raw_parts_mut(self.data(), self.capacity()) };
        &mut all[len..]
    }

    fn data(&self) -> *mut u8 {
        let Chunk { addr, pool, .. } = self.chunk();
        // SAFETY: the pool is alive, as at `chunk`.
        let region = unsafe { &(**pool).region };
        // The region has no iova of its own.
        region.as_slice().as_ptr().with_addr(*addr as usize)
    }
}

impl<M> Write for PooledBuffer<M> {
    /// Appends as many bytes as there is room for. It never fails.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = self.capacity() - self.len();
        let bytes = &bytes[..room.min(bytes.len())];
        self.extend_from_slice(bytes).map(|()| bytes.len()).map_err(Into::into)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Deref for PooledBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the chunk is a part of the region, which is initialised and lives as long as the pool. It is this
        // buffer's alone until its drop. Peers have no access, and the device has only while an operation owns it.
        unsafe { slice::from_raw_parts(self.data(), self.chunk().kept.get() as usize) }
    }
}

impl DerefMut for PooledBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; the borrow is exclusive.
        unsafe { slice::from_raw_parts_mut(self.data(), self.chunk().kept.get() as usize) }
    }
}

// SAFETY: the memory is registered for local writes as long as the pool exists, which this keeps alive. Only this value
// accesses it, as at `deref`.
unsafe impl<M: PoolMemory> GatherBuffer for PooledBuffer<M> {
    type List = [ffi::ibv_sge; 1];
    type Kept = Self;

    const KEEPS_LENGTH: bool = true;

    #[inline]
    fn gather(&self) -> Result<Self::List> {
        #[cfg(debug_assertions)]
        if self.chunk().spare_is_taken {
            warn_of_spare(self.chunk().kept.get());
        }
        Ok(self.piece(self.chunk().kept.get()))
    }

    #[inline(always)]
    fn kept_length(&mut self) -> Option<NonNull<KeptLength>> {
        // SAFETY: this buffer's chunk is valid, as at `chunk`.
        NonNull::new(unsafe { &raw mut (*self.chunk.as_ptr()).kept })
    }
}

// SAFETY: as above. Any bytes are a valid `u8`.
unsafe impl<M: PoolMemory> ScatterBuffer for PooledBuffer<M> {
    const PEERS_MAY_WRITE: bool = M::PEERS;

    #[inline]
    fn scatter(&mut self) -> Result<Self::List> {
        let reason = "the buffer is empty, so nothing would be read: set its length (`PooledBuffer::set_len`)";
        Error::invalid_if(self.is_empty(), "ibv_sge", reason)?;
        self.gather()
    }

    #[inline(always)]
    fn begin_receive(&mut self) -> Result<Self::List> {
        // SAFETY: as in `set_len`. A message overwrites the bytes.
        unsafe { note_spare(self.chunk.as_ptr(), false) };
        let capacity = self.chunk().kept.capacity();
        // SAFETY: `make` refuses empty chunks. So no post checks whether the piece is empty.
        unsafe { hint::assert_unchecked(capacity > 0) };
        Ok(self.piece(capacity))
    }
}

// SAFETY: it borrows nothing, and is `Send` and `Sync`. Its drop gives the chunk back.
unsafe impl<M: PoolMemory> OwnedBuffer for PooledBuffer<M> {}

impl<M: PoolMemory> Piece for PooledBuffer<M> {}

debug! { impl[M] PooledBuffer<M>, self, len: self.chunk().kept.get(), capacity: self.capacity(), .. }
