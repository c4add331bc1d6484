//! Pools of several sizes.

use ibverbs::pool::{Exclusive, PoolMemory};
use ibverbs::{BufferPool, PooledBuffer};

/// Pools with chunks of several lengths, as one: a message gets the shortest chunk that is free and holds it.
///
/// ```
/// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
/// # rxe0.register();
/// use std::sync::Arc;
///
/// use ibverbs::{AccessFlags, BufferPool, ProtectionDomain};
/// use ibverbs_transfer::BufferPools;
///
/// # fn main() -> ibverbs::Result<()> {
/// let domain = Arc::new(ProtectionDomain::new(ibverbs::open("rxe0")?)?);
/// let pool = |len, chunks| BufferPool::new(&domain, len, chunks, AccessFlags::empty());
/// let pools = BufferPools::new([pool(256, 1024)?, pool(4096, 256)?, pool(1 << 20, 8)?]);
/// let buffer = pools.take(3000).expect("256 buffers");
/// assert_eq!(buffer.capacity(), 4096);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct BufferPools<M: PoolMemory = Exclusive> {
    /// The shortest chunks first.
    pools: Vec<BufferPool<M>>,
}

impl<M: PoolMemory> Clone for BufferPools<M> {
    fn clone(&self) -> Self {
        Self { pools: self.pools.clone() }
    }
}

impl<M: PoolMemory> BufferPools<M> {
    /// These pools, in any order.
    pub fn new(pools: impl IntoIterator<Item = BufferPool<M>>) -> Self {
        let mut pools: Vec<_> = pools.into_iter().collect();
        pools.sort_by_key(BufferPool::chunk_len);
        Self { pools }
    }

    /// An empty buffer with room for `len` bytes, or `None` if no chunk that has it is free. It never waits.
    pub fn take(&self, len: usize) -> Option<PooledBuffer<M>> {
        self.that_hold(len).iter().find_map(BufferPool::take)
    }

    /// Waits for a buffer with room for `len` bytes, of the pool whose chunks are the shortest that have it. The future
    /// may be dropped at any time. `None`: no chunk is so long.
    pub async fn wait(&self, len: usize) -> Option<PooledBuffer<M>> {
        let pools = self.that_hold(len);
        match pools.iter().find_map(BufferPool::take) {
            Some(buffer) => Some(buffer),
            None => Some(pools.first()?.wait().await),
        }
    }

    /// The pools, those with the shortest chunks first.
    pub fn pools(&self) -> &[BufferPool<M>] {
        &self.pools
    }

    fn that_hold(&self, len: usize) -> &[BufferPool<M>] {
        let shorter = self.pools.partition_point(|pool| pool.chunk_len() < len);
        &self.pools[shorter..]
    }
}
