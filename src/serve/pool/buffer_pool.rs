//! Pools of buffers, and the cache of one thread.

use std::cell::UnsafeCell;
use std::future::poll_fn;
use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::task::{Context, Poll};

use super::free_chunks::FreeChunks;
use super::pooled_buffer::{
    ALIGNMENT, Chunk, Exclusive, Pool, PoolMemory, PooledBuffer, Shared, check_len,
};
use super::waiting::{Place, Waiting};
use crate::base::{Error, Result, debug, ffi, getters};
use crate::channel::{OwnedBuffer, Piece};
use crate::verbs::domain::DomainRef;
use crate::verbs::memory::{
    AccessFlags, Element, GatherBuffer, KeptLength, MemoryRegion, RegionOptions, ScatterBuffer,
    SharedMemoryRegion,
};

/// Equal chunks of one registered region. Any thread takes them and gives them back.
///
/// Only this program accesses the memory ([`new`](Self::new)), or peers do too ([`shared`](BufferPool::shared)). A
/// clone is the same pool. The region is deregistered when the pool and all its buffers are dropped.
///
/// Taking and giving back is lock-free, and costs the same in a pool of any size; a [`BufferCache`](super::BufferCache)
/// for one thread costs less.
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

/// The clones share it. Buffers have none: the pool stays while a chunk is in use.
struct Owner(NonNull<Pool>);

impl Owner {
    #[inline(always)]
    fn pool(&self) -> &Pool {
        // SAFETY: the pool is freed in the owner's drop at the earliest.
        unsafe { self.0.as_ref() }
    }
}

// SAFETY: it only lends the pool, which is `Sync`; its drop, on any thread, is atomic in `FreeChunks::orphan`.
unsafe impl Send for Owner {}
// SAFETY: as above.
unsafe impl Sync for Owner {}

impl BufferPool {
    /// `ibv_reg_mr`: allocates and registers `chunks` chunks of `chunk_len` bytes, as `options` say, such as [huge
    /// pages](RegionOptions::huge_pages).
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the number of chunks is not within 1 ..= 2^28 - 1, or their length not within 1 ..= 4 GiB - 1; or
    ///    the options let peers access the memory, or give it [another address](RegionOptions::iova).
    ///  - Those of [`SharedMemoryRegion::new`].
    #[doc(alias = "ibv_reg_mr")]
    pub fn new(
        domain: impl Into<DomainRef<'static>>,
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
    /// [`PooledBuffer::remote`] names a buffer's bytes for peers. Its key is that of the whole pool: a peer that has it
    /// can access all chunks, even after a buffer went back. For peers that do not trust each other, make a pool for
    /// each, or bind [windows](crate::memory::MemoryWindow).
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
    /// Those of [`new`](BufferPool::new), and
    ///
    ///  - `EINVAL`: the options let peers access nothing.
    ///  - `EOPNOTSUPP`: the device does not have that access.
    #[doc(alias = "ibv_reg_mr")]
    pub fn shared(
        domain: impl Into<DomainRef<'static>>,
        chunk_len: usize,
        chunks: usize,
        options: impl Into<RegionOptions>,
    ) -> Result<Self> {
        Self::make(domain.into(), chunk_len, chunks, options.into())
    }
}

impl<M: PoolMemory> BufferPool<M> {
    fn make(
        domain: DomainRef<'static>,
        chunk_len: usize,
        chunks: usize,
        options: RegionOptions,
    ) -> Result<Self> {
        const VERB: &str = "ibv_reg_mr";
        Error::within(VERB, "the length of a chunk", chunk_len as u64, 1, u32::MAX)?;
        Error::within(VERB, "the number of chunks", chunks as u64, 1, FreeChunks::MOST)?;
        // Shorter than 2^33.
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
        let (Some(free), Ok(())) = (FreeChunks::new(chunks as u32), all.try_reserve_exact(chunks))
        else {
            return Err(Error::with_reason(VERB, libc::ENOMEM, "no memory for the pool"));
        };
        all.extend((0..chunks).map(|index| {
            let (addr, kept) =
                (first.addr + (index * stride) as u64, KeptLength::new(chunk_len as u32));
            let (lkey, index) = (first.lkey, index as u32);
            UnsafeCell::new(Chunk {
                addr,
                kept,
                lkey,
                index,
                pool: ptr::null(),
                #[cfg(debug_assertions)]
                spare_is_taken: false,
            })
        }));
        let (chunks, waiting) = (all.into(), Waiting::default());
        let pool = Box::new(Pool { region, chunks, chunk_len, free, waiting });
        let pool = NonNull::from(Box::leak(pool));
        // SAFETY: nothing else has a pointer to the pool yet.
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

    /// An empty buffer, or `None` if all are in use. It never waits.
    ///
    /// A thread that finds none lets its operations end, which gives buffers back:
    /// [`Loop::wait_ended_until`](crate::Loop::wait_ended_until). If other threads have them, it waits for the future of
    /// [`wait`](Self::wait), by the `block_on` of any executor.
    pub fn take(&self) -> Option<PooledBuffer<M>> {
        let pool = self.pool();
        Some(pool.buffer(pool.free.take()?))
    }

    #[inline(always)]
    pub(super) fn has(&self, buffer: &PooledBuffer<M>) -> bool {
        ptr::eq(buffer.chunk().pool, self.pool())
    }

    /// As [`take`](Self::take), with these bytes.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: they are more than a [chunk](Self::chunk_len) holds.
    pub fn take_from(&self, bytes: &[u8]) -> Result<Option<PooledBuffer<M>>> {
        check_len(bytes.len(), self.chunk_len())?;
        let mut buffer = self.take();
        buffer.as_mut().map_or(Ok(()), |buffer| buffer.extend_from_slice(bytes))?;
        Ok(buffer)
    }

    /// Waits for an empty buffer, in an async task. The future may be dropped at any time.
    ///
    /// Tasks are served in the order in which they began to wait, unless a later one finds a free chunk first. Only the
    /// drop of a buffer wakes the future: do not wait while the task itself holds the last chunk, or while all chunks
    /// wait for messages that may not come.
    ///
    /// A buffer that comes back wakes one task. If that task neither asks for it nor drops its future, such as a
    /// forgotten one, the others wait until another buffer comes back, or a later task takes this one and gives it
    /// back.
    pub async fn wait(&self) -> PooledBuffer<M> {
        let mut waiter = self.waiter();
        poll_fn(|cx| waiter.poll_take(cx)).await
    }

    /// [`wait`](Self::wait) as a value, to be polled by hand.
    pub fn waiter(&self) -> PoolWaiter<M> {
        PoolWaiter { pool: self.clone(), place: Place::default() }
    }

    getters! { self,
        /// The number of chunks.
        chunks: usize => self.pool().chunks.len();

        /// The bytes of a chunk.
        chunk_len: usize => self.pool().chunk_len;

        /// The number of chunks that are free now.
        available: usize => self.pool().free.count() as usize;
    }
}

debug! {
    impl[M: PoolMemory] BufferPool<M>, self,
    chunk_len: self.chunk_len(), chunks: self.chunks(), available: self.available(), ..
}

impl Drop for Owner {
    fn drop(&mut self) {
        let pool = self.0.as_ptr();
        // SAFETY: the owner is dropped once, so it is orphaned once. If no chunk is in use, nothing else uses the pool,
        // which came from the box in `make`.
        unsafe {
            if FreeChunks::orphan(&raw const (*pool).free) {
                drop(Box::from_raw(pool));
            }
        }
    }
}

/// A turn to wait for a buffer: see [`BufferPool::wait`]. Dropping it gives the turn up.
pub struct PoolWaiter<M = Exclusive> {
    pool: BufferPool<M>,
    place: Place,
}

impl<M: PoolMemory> PoolWaiter<M> {
    /// A buffer if one is free. Otherwise the task is woken when its turn has come, and asks again.
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

// SAFETY: the region owns its memory, which does not move, is registered for local writes until it is dropped, and is
// accessed only through the region.
unsafe impl<T: Element> GatherBuffer for Box<MemoryRegion<'static, T>> {
    type List = [ffi::ibv_sge; 1];
    type Kept = Self;

    fn gather(&self) -> Result<Self::List> {
        self.slice(..)?.gather()
    }
}

// SAFETY: as above. Any bytes are a valid `Element`.
unsafe impl<T: Element> ScatterBuffer for Box<MemoryRegion<'static, T>> {
    const PEERS_MAY_WRITE: bool = false;

    fn scatter(&mut self) -> Result<Self::List> {
        self.slice_mut(..)?.scatter()
    }
}

// SAFETY: it borrows nothing, and is `Send` and `Sync`.
unsafe impl<T: Element> OwnedBuffer for Box<MemoryRegion<'static, T>> {}

impl<T: Element> Piece for Box<MemoryRegion<'static, T>> {}

// The most buffers of a cache.

const MOST: usize = 64;

/// Free buffers of a [`BufferPool`] that one owner keeps, such as the thread of a [`Loop`](crate::Loop). Taking and
/// giving back needs no atomic operation; the pool needs one for each.
///
/// It keeps up to 64 buffers, which others, also those that [wait](BufferPool::wait), get only when it is dropped: give
/// a pool 64 more buffers for each cache. A buffer that is dropped, not [given back](Self::give_back), goes to the
/// pool.
///
/// ```
/// use std::sync::Arc;
///
/// use ibverbs::pool::BufferCache;
/// use ibverbs::{AccessFlags, BufferPool, ProtectionDomain};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// let domain = Arc::new(ProtectionDomain::new(Arc::new(ibverbs::open("rxe0")?))?);
/// let pool = BufferPool::new(&domain, 4096, 1024, AccessFlags::empty())?;
/// let mut cache = BufferCache::new(&pool);
/// let answer = cache.take().ok_or("all buffers are in use")?; // empty
/// cache.give_back(answer); // when it is sent
/// # Ok(())
/// # }
/// ```
pub struct BufferCache<M = Exclusive> {
    pool: BufferPool<M>,
    /// It never grows.
    kept: Vec<PooledBuffer<M>>,
}

impl<M: PoolMemory> BufferCache<M> {
    /// An empty cache.
    pub fn new(pool: &BufferPool<M>) -> Self {
        let mut kept = Vec::new();
        let _ = kept.try_reserve_exact(MOST);
        Self { pool: pool.clone(), kept }
    }

    /// An empty buffer, from the cache or else the pool. `None` if all are in use, or kept by others.
    #[inline]
    pub fn take(&mut self) -> Option<PooledBuffer<M>> {
        if let Some(kept) = self.kept.pop() { Some(kept) } else { self.take_of_pool() }
    }

    #[cold]
    #[inline(never)]
    fn take_of_pool(&self) -> Option<PooledBuffer<M>> {
        self.pool.take()
    }

    /// Keeps a buffer, emptied. If the cache is full, or the buffer of another pool, it goes to its pool.
    #[inline]
    pub fn give_back(&mut self, mut buffer: PooledBuffer<M>) {
        if self.pool.has(&buffer) && self.kept.len() < self.kept.capacity() {
            buffer.clear();
            self.kept.push(buffer);
        }
    }
}

debug! { impl[M: PoolMemory] BufferCache<M>, self, pool: self.pool, kept: self.kept.len() }
