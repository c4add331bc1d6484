//! Buffers of a pool that one thread keeps.

use super::buffer_pool::BufferPool;
use super::pooled_buffer::{Exclusive, PoolMemory, PooledBuffer};
use crate::debug::debug;

/// The most buffers that a cache keeps.
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
    /// It never grows. Without memory for it, the cache keeps nothing.
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
