//! Chunks of one registered region.

use std::cell::UnsafeCell;
use std::future::poll_fn;
use std::hint;
use std::io::{self, Write};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::free_chunks::FreeChunks;
use super::waiting::{self, Place, Waiting};
use crate::channel::OwnedBuffer;
use crate::debug::debug;
use crate::domain::ProtectionDomain;
use crate::error::{Error, Result};
use crate::ffi;
use crate::fields::getters;
use crate::memory::{
    AccessFlags, GatherBuffer, KeptLength, RegionOptions, RemoteMemoryRegion, ScatterBuffer,
    SharedMemoryRegion, SharedMemorySlice,
};
use crate::parent::Parent;

/// Chunks begin at multiples of this, so that two of them share no cache line.
const ALIGNMENT: usize = 64;

/// Memory of which each chunk is its buffer's alone: a [`PooledBuffer`] dereferences to its bytes.
#[derive(Debug)]
pub enum Exclusive {}

/// Memory that peers access too: the bytes of a [`PooledBuffer`] are copied in and out.
#[derive(Debug)]
pub enum Shared {}

/// The memory of a pool: [`Exclusive`] or [`Shared`]. The trait is sealed.
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

/// Equal chunks of one registered region, to be taken and given back on any thread: of memory that no peer accesses
/// ([`new`](Self::new)), or that peers access as well ([`shared`](BufferPool::shared)).
///
/// A clone is the same pool. The region is deregistered when the pool and all its buffers are dropped.
/// Taking and giving back is lock-free, and costs the same in a pool of any size. A [`BufferCache`](super::BufferCache) keeps some
/// for one thread, which costs less.
///
/// ```
/// use std::sync::Arc;
///
/// use ibverbs::{AccessFlags, BufferPool, ProtectionDomain};
///
/// # fn main() -> ibverbs::Result<()> {
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// let context = Arc::new(ibverbs::open("rxe0")?);
/// let domain = Arc::new(ProtectionDomain::new(context)?);
/// let pool = BufferPool::new(&domain, 4096, 1024, AccessFlags::empty())?;
/// let mut buffer = pool.take().expect("1024 buffers");
/// buffer.extend_from_slice(b"hello")?;
/// assert_eq!(buffer[..], *b"hello");
/// # Ok(())
/// # }
/// ```
pub struct BufferPool<M = Exclusive> {
    owner: Arc<Owner>,
    memory: PhantomData<fn() -> M>,
}

impl<M> Clone for BufferPool<M> {
    fn clone(&self) -> Self {
        Self { owner: self.owner.clone(), memory: PhantomData }
    }
}

/// What all clones of a pool have in common: a reference to it. Buffers have none: the pool is there while a chunk is in use.
struct Owner(NonNull<Pool>);

impl Owner {
    #[inline(always)]
    fn pool(&self) -> &Pool {
        // SAFETY: the owner has a reference.
        unsafe { self.0.as_ref() }
    }
}

// SAFETY: the pool may be used on any thread.
unsafe impl Send for Owner {}
// SAFETY: as above.
unsafe impl Sync for Owner {}

struct Pool {
    region: SharedMemoryRegion<'static, u8>,
    chunks: Box<[UnsafeCell<Chunk>]>,
    /// The bytes of a chunk.
    chunk_len: usize,
    free: FreeChunks,
    waiting: Waiting,
}

// SAFETY: a chunk is accessed by the buffer that has it alone, and everything else may be shared.
unsafe impl Send for Pool {}
// SAFETY: as above.
unsafe impl Sync for Pool {}

/// What a buffer needs of its chunk and pool.
struct Chunk {
    addr: u64,
    /// The length that the buffer has now.
    kept: KeptLength,
    lkey: u32,
    index: u32,
    pool: *const Pool,
}

/// A chunk of a [`BufferPool`]: an [`OwnedBuffer`]. It goes back to the pool when it is dropped.
///
/// It is empty when it is taken. What is written ([`Write`], [`extend_from_slice`](Self::extend_from_slice)) is behind what is
/// there, and a send, or a write to the peer, has these bytes and no others. A receive has room for the whole
/// [capacity](Self::capacity), whatever the length is, and sets the length to that of the message when one has come. A receive
/// that has failed, or that a peer's write with an immediate has completed, leaves the length as it was. A read fills as many bytes
/// as the buffer has: set its [length](Self::set_len) first.
///
/// The bytes of a buffer of [`Shared`] memory are copied in ([`extend_from_slice`](Self::extend_from_slice), [`Write`]) and out
/// ([`as_slice`](PooledBuffer::as_slice)), and [`remote`](PooledBuffer::remote) names them for peers.
pub struct PooledBuffer<M = Exclusive> {
    /// One word, since a buffer moves into and out of each operation.
    chunk: NonNull<Chunk>,
    memory: PhantomData<fn() -> M>,
}

// SAFETY: the chunk is the buffer's alone, and its pool may be shared.
unsafe impl<M> Send for PooledBuffer<M> {}
// SAFETY: as above. What peers access too is accessed by volatile copies.
unsafe impl<M> Sync for PooledBuffer<M> {}

impl BufferPool {
    /// `ibv_reg_mr`: allocates and registers memory for `chunks` chunks of `chunk_len` bytes, as `options`
    /// say, such as [huge pages](RegionOptions::huge_pages).
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: there would be no chunks, or more than 2^28 - 1, or empty ones, or longer ones than 4 GiB - 1; or the options
    ///    let peers access the memory, or give it [another address](RegionOptions::iova).
    ///  - Those of [`SharedMemoryRegion::new`].
    #[doc(alias = "ibv_reg_mr")]
    pub fn new(
        domain: impl Into<Parent<'static, ProtectionDomain<'static>>>,
        chunk_len: usize,
        chunks: usize,
        options: impl Into<RegionOptions>,
    ) -> Result<Self> {
        Self::make(domain.into(), chunk_len, chunks, options.into())
    }
}

impl BufferPool<Shared> {
    /// `ibv_reg_mr`: as [`new`](BufferPool::new), with memory that peers access as `options` say, such as
    /// [`REMOTE_READ`](AccessFlags::REMOTE_READ).
    ///
    /// A buffer is owned by operations as others are, and names its bytes for peers ([`remote`](PooledBuffer::remote)). The key is
    /// that of the whole pool: who has it can access all chunks, also when a buffer went back. For peers that do not trust each
    /// other, make a pool for each, or bind [windows](crate::memory::MemoryWindow).
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use ibverbs::{AccessFlags, BufferPool, ProtectionDomain};
    ///
    /// # fn main() -> ibverbs::Result<()> {
    /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
    /// # rxe0.register();
    /// let domain = Arc::new(ProtectionDomain::new(Arc::new(ibverbs::open("rxe0")?))?);
    /// let pool = BufferPool::shared(&domain, 1 << 20, 16, AccessFlags::REMOTE_READ)?;
    /// let block = pool.take_from(b"a block of a file")?.expect("16 buffers");
    /// let message = block.remote().to_bytes(); // the peer reads it: `ReadWorkRequest::new(room, remote)`
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Those of [`new`](BufferPool::new), without the access; and
    ///
    ///  - `EINVAL`: the options let peers access nothing.
    ///  - `EOPNOTSUPP`: the device does not have that access.
    #[doc(alias = "ibv_reg_mr")]
    pub fn shared(
        domain: impl Into<Parent<'static, ProtectionDomain<'static>>>,
        chunk_len: usize,
        chunks: usize,
        options: impl Into<RegionOptions>,
    ) -> Result<Self> {
        Self::make(domain.into(), chunk_len, chunks, options.into())
    }
}

impl<M: PoolMemory> BufferPool<M> {
    fn make(
        domain: Parent<'static, ProtectionDomain<'static>>,
        chunk_len: usize,
        chunks: usize,
        options: RegionOptions,
    ) -> Result<Self> {
        const VERB: &str = "ibv_reg_mr";
        let most = u64::from(u32::MAX);
        if chunk_len == 0 || chunk_len as u64 > most {
            let what = "the length of a chunk";
            return Err(Error::out_of_range(VERB, what, chunk_len as u64, 1, most));
        }
        let most = u64::from(FreeChunks::MOST);
        if chunks == 0 || chunks as u64 > most {
            let what = "the number of chunks";
            return Err(Error::out_of_range(VERB, what, chunks as u64, 1, most));
        }
        // Shorter than 2^33, so neither overflows.
        let stride = chunk_len.next_multiple_of(ALIGNMENT);
        let Some(len) = stride.checked_mul(chunks) else {
            return Err(Error::invalid(VERB, "the chunks are more than memory can hold"));
        };
        let region = SharedMemoryRegion::new(domain, len, options)?;
        let local = AccessFlags::LOCAL_WRITE | AccessFlags::RELAXED_ORDERING;
        let reason = match M::PEERS {
            true => {
                "peers would access nothing: `BufferPool::new` makes a pool of memory of this program's own"
            }
            false => {
                "peers must not access the buffers of this pool: `BufferPool::shared` makes one for them"
            }
        };
        Error::invalid_if((region.access() - local).is_empty() == M::PEERS, VERB, reason)?;
        let [first] = region.slice(..chunk_len)?.scatter()?;
        let mut all = Vec::new();
        // The number of chunks is in range, see above.
        let (Some(free), Ok(())) = (FreeChunks::new(chunks as u32), all.try_reserve_exact(chunks))
        else {
            return Err(Error::with_reason(VERB, libc::ENOMEM, "no memory for the pool"));
        };
        all.extend((0..chunks).map(|index| {
            let (addr, kept) =
                (first.addr + (index * stride) as u64, KeptLength::new(chunk_len as u32));
            let (lkey, index) = (first.lkey, index as u32);
            UnsafeCell::new(Chunk { addr, kept, lkey, index, pool: ptr::null() })
        }));
        let (chunks, waiting) = (all.into(), Waiting::default());
        let pool = Box::new(Pool { region, chunks, chunk_len, free, waiting });
        let pool = NonNull::from(Box::leak(pool));
        // SAFETY: only this accesses what is there.
        for chunk in unsafe { &(*pool.as_ptr()).chunks } {
            // SAFETY: as above.
            unsafe { (*chunk.get()).pool = pool.as_ptr() };
        }
        Ok(Self { owner: Arc::new(Owner(pool)), memory: PhantomData })
    }

    #[inline(always)]
    fn pool(&self) -> &Pool {
        self.owner.pool()
    }

    /// An empty buffer, or `None` if all are in use.
    pub fn take(&self) -> Option<PooledBuffer<M>> {
        let pool = self.pool();
        Some(pool.buffer(pool.free.take()?))
    }

    /// Whether a buffer is one of this pool's.
    #[inline(always)]
    pub(super) fn has(&self, buffer: &PooledBuffer<M>) -> bool {
        ptr::eq(buffer.chunk().pool, self.pool())
    }

    /// As [`take`](Self::take), with these bytes.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: there are more of them than a [chunk](Self::chunk_len) has.
    pub fn take_from(&self, bytes: &[u8]) -> Result<Option<PooledBuffer<M>>> {
        check_len(bytes.len(), self.chunk_len())?;
        let mut buffer = self.take();
        buffer.as_mut().map_or(Ok(()), |buffer| buffer.extend_from_slice(bytes))?;
        Ok(buffer)
    }

    /// An empty buffer, when one is free: for a task of an async program. Tasks get theirs in the order in which they began to
    /// wait, unless one that comes later finds a chunk before it. The future may be dropped at any time. It is woken by the
    /// drop of a buffer, so do not wait for a chunk that the task itself holds, or that only a message would free that does
    /// not come.
    ///
    /// A buffer that comes back wakes one task. If that neither asks for it nor drops its future (one that is forgotten, or that
    /// nobody polls any more), the others go on waiting, until one that comes later takes that buffer and gives it back, or
    /// another one comes back. To wake all of them for each buffer would cost every pool what only such a program needs.
    pub async fn wait(&self) -> PooledBuffer<M> {
        let mut waiter = self.waiter();
        poll_fn(|cx| waiter.poll_take(cx)).await
    }

    /// The same as a value, for what is polled by hand.
    pub fn waiter(&self) -> PoolWaiter<M> {
        PoolWaiter { pool: self.clone(), place: Place::default() }
    }

    getters! { self,
        /// The number of chunks.
        chunks: usize => self.pool().chunks.len();

        /// The number of bytes of a chunk.
        chunk_len: usize => self.pool().chunk_len;

        /// The number of chunks that are free at this moment.
        available: usize => self.pool().free.count() as usize;
    }
}

debug! {
    impl[M: PoolMemory] BufferPool<M>, self,
    chunk_len: self.chunk_len(), chunks: self.chunks(), available: self.available(), ..
}

impl Pool {
    /// The buffer of a chunk that was taken for it.
    #[inline(always)]
    fn buffer<M>(&self, index: u32) -> PooledBuffer<M> {
        // SAFETY: the index is that of a chunk, which no other buffer has: it was free until now.
        unsafe {
            let chunk = self.chunks.get_unchecked(index as usize).get();
            (*chunk).kept.set(0);
            PooledBuffer { chunk: NonNull::new_unchecked(chunk), memory: PhantomData }
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let pool = self.0.as_ptr();
        // SAFETY: the owner is dropped once. If no chunk is in use, nothing uses the pool any more, which came from the box in `make`.
        unsafe {
            if FreeChunks::orphan(&raw const (*pool).free) {
                drop(Box::from_raw(pool));
            }
        }
    }
}

/// Checks the length of a buffer.
fn check_len(len: usize, capacity: usize) -> Result<()> {
    if len <= capacity {
        return Ok(());
    }
    let what = "the length of a pooled buffer";
    Err(Error::out_of_range("ibv_sge", what, len as u64, 0, capacity as u64))
}

/// A place in the line of those that wait for a buffer: see [`BufferPool::wait`]. Dropping it gives the place up.
pub struct PoolWaiter<M = Exclusive> {
    pool: BufferPool<M>,
    place: Place,
}

impl<M: PoolMemory> PoolWaiter<M> {
    /// A buffer if one is free. Otherwise, the task is woken when its turn has come, and asks again.
    pub fn poll_take(&mut self, cx: &mut Context<'_>) -> Poll<PooledBuffer<M>> {
        let pool = self.pool.owner.pool();
        pool.waiting.poll_take(&pool.free, &mut self.place, cx).map(|index| pool.buffer(index))
    }
}

impl<M> Drop for PoolWaiter<M> {
    fn drop(&mut self) {
        let pool = self.pool.owner.pool();
        pool.waiting.leave(&pool.free, &mut self.place);
    }
}

debug! { impl[M: PoolMemory] PoolWaiter<M>, self, pool: self.pool, .. }

impl<M> Drop for PooledBuffer<M> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: nothing uses the buffer after this.
        unsafe { give_back(self.chunk) }
    }
}

/// Gives a chunk back. A function of the buffer's field: one that got the buffer's address would keep the buffer in
/// memory.
///
/// # Safety
///
/// It is the chunk of a buffer, which nothing uses any more.
#[inline(never)]
unsafe fn give_back(chunk: NonNull<Chunk>) {
    // SAFETY: the chunk is the caller's, and its pool is there until it is given back.
    unsafe {
        let Chunk { pool, index, .. } = *chunk.as_ptr();
        if !FreeChunks::give_back(&raw const (*pool).free, index) {
            give_back_slowly(pool, index);
        }
    }
}

/// # Safety
///
/// It is the number of a chunk of the pool, which nothing uses any more.
#[cold]
#[inline(never)]
unsafe fn give_back_slowly(pool: *const Pool, index: u32) {
    let mut woken = None;
    // SAFETY: the pool is there until the chunk is given back. If it was the last one, nothing uses the pool any more.
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
    fn chunk(&self) -> &Chunk {
        // SAFETY: the chunk is this buffer's alone, and its pool is there while a buffer is.
        unsafe { self.chunk.as_ref() }
    }

    /// The number of bytes of the chunk: the most that the buffer can have, and a message that is received.
    pub fn capacity(&self) -> usize {
        self.chunk().kept.capacity() as usize
    }

    /// Sets the length. The bytes stay as they are: those that were not in the buffer before are what an earlier user of the
    /// chunk has left there, so write them before they are sent.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: that is more than the [capacity](Self::capacity).
    pub fn set_len(&mut self, len: usize) -> Result<()> {
        check_len(len, self.capacity())?;
        // SAFETY: as at `chunk`, and the borrow is exclusive.
        unsafe { self.chunk.as_mut() }.kept.set(len as u32);
        Ok(())
    }

    /// The number of bytes in it.
    #[inline]
    pub fn len(&self) -> usize {
        self.chunk().kept.get() as usize
    }

    /// Whether it has no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes all bytes.
    #[inline]
    pub fn clear(&mut self) {
        // SAFETY: as in `set_len`.
        unsafe { self.chunk.as_mut() }.kept.set(0);
    }

    /// Appends these bytes.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the buffer has no room for them. It is as it was.
    pub fn extend_from_slice(&mut self, bytes: &[u8]) -> Result<()> {
        let len = self.len();
        self.set_len(len.saturating_add(bytes.len()))?;
        self.shared().write(len, bytes)
    }

    /// Its bytes, as those of a region that others access too.
    fn shared(&self) -> SharedMemorySlice<'_, u8> {
        let &Chunk { index, pool, ref kept, .. } = self.chunk();
        // SAFETY: the pool is alive, as at `chunk`.
        let pool = unsafe { &*pool };
        let start = index as usize * pool.chunk_len.next_multiple_of(ALIGNMENT);
        let bytes = pool.region.slice(start..start + kept.get() as usize);
        bytes.expect("chunks are within the region")
    }

    /// As it is posted, with this length.
    #[inline(always)]
    fn piece(&self, length: u32) -> [ffi::ibv_sge; 1] {
        let &Chunk { addr, lkey, .. } = self.chunk();
        [ffi::ibv_sge { addr, length, lkey }]
    }
}

impl PooledBuffer<Shared> {
    /// The bytes in it, to be copied out and in: a peer may write them meanwhile.
    pub fn as_slice(&self) -> SharedMemorySlice<'_, u8> {
        self.shared()
    }

    /// The bytes in it, for a peer that reads or writes them. For a write, set the [length](Self::set_len) first. Keep the buffer
    /// until the peer is done: the next user of the chunk would share it with the peer.
    pub fn remote(&self) -> RemoteMemoryRegion {
        self.shared().remote()
    }
}

impl PooledBuffer {
    /// The bytes of the chunk that are not in the buffer, to be filled before [`set_len`](Self::set_len) adds them. They are
    /// what an earlier user of the chunk has left there.
    pub fn spare_capacity_mut(&mut self) -> &mut [u8] {
        let len = self.len();
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
    /// Appends as many of these bytes as there is room for. It never fails.
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
        // SAFETY: the chunk is a part of the region, which lives as long as the pool, and is initialised.
        // It is ours alone: it was free when it was taken, and is not until this is dropped, peers have no
        // access, and the device has none while the buffer is not in an operation, which would own it.
        unsafe { slice::from_raw_parts(self.data(), self.chunk().kept.get() as usize) }
    }
}

impl DerefMut for PooledBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above; the borrow is exclusive.
        unsafe { slice::from_raw_parts_mut(self.data(), self.chunk().kept.get() as usize) }
    }
}

// SAFETY: the memory is registered for local writes for as long as the pool exists, which this keeps
// alive. Only this value accesses it, as at `deref`.
unsafe impl<M: PoolMemory> GatherBuffer for PooledBuffer<M> {
    type List = [ffi::ibv_sge; 1];
    type Kept = Self;

    const KEEPS_LENGTH: bool = true;

    #[inline]
    fn gather(&self) -> Result<Self::List> {
        Ok(self.piece(self.chunk().kept.get()))
    }

    #[inline(always)]
    fn kept_length(&mut self) -> Option<NonNull<KeptLength>> {
        // SAFETY: the chunk is there: see `chunk`.
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
        let capacity = self.chunk().kept.capacity();
        // SAFETY: a pool has no empty chunks, see `make`. So no post looks whether the piece is empty.
        unsafe { hint::assert_unchecked(capacity > 0) };
        Ok(self.piece(capacity))
    }
}

// SAFETY: it borrows nothing, and may be used on any thread. The chunk goes back to the pool when it is dropped.
unsafe impl<M: PoolMemory> OwnedBuffer for PooledBuffer<M> {}

debug! { impl[M] PooledBuffer<M>, self, len: self.chunk().kept.get(), capacity: self.capacity(), .. }
