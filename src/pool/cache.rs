//! Buffers of a pool that one thread keeps.

use super::buffer_pool::BufferPool;
use super::pooled_buffer::{Exclusive, PoolMemory, PooledBuffer};
use crate::debug::debug;

/// The most buffers that a cache keeps.
const MOST: usize = 64;

/// Free buffers of a [`BufferPool`] that their owner keeps, such as the thread of a [`Loop`](crate::Loop): taking one and giving
/// it back are a few instructions and no atomic operation, of which the pool needs one for each.
///
/// What it keeps, 64 buffers at most, nobody else can take: the pool's other users and those who [wait](BufferPool::wait) for a
/// buffer do not get it before the cache is dropped. So a pool has 64 buffers more for each of its caches than are in use
/// at a time. A buffer that is dropped, and not [given back](Self::give_back), goes to the pool.
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
    /// It never grows. Without memory for it, it keeps nothing.
    kept: Vec<PooledBuffer<M>>,
}

impl<M: PoolMemory> BufferCache<M> {
    /// A cache that keeps nothing yet.
    pub fn new(pool: &BufferPool<M>) -> Self {
        let mut kept = Vec::new();
        let _ = kept.try_reserve_exact(MOST);
        Self { pool: pool.clone(), kept }
    }

    /// An empty buffer: one that it keeps, else one of the pool. `None` if all are in use, or kept by others.
    #[inline]
    pub fn take(&mut self) -> Option<PooledBuffer<M>> {
        if let Some(kept) = self.kept.pop() { Some(kept) } else { self.take_of_pool() }
    }

    #[cold]
    #[inline(never)]
    fn take_of_pool(&self) -> Option<PooledBuffer<M>> {
        self.pool.take()
    }

    /// Keeps a buffer, without what is in it. One that is too many, or of another pool, goes to its pool.
    #[inline]
    pub fn give_back(&mut self, mut buffer: PooledBuffer<M>) {
        if self.pool.has(&buffer) && self.kept.len() < self.kept.capacity() {
            buffer.clear();
            self.kept.push(buffer);
        }
    }
}

debug! { impl[M: PoolMemory] BufferCache<M>, self, pool: self.pool, kept: self.kept.len() }
