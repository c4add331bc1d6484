//! Registered memory in pieces, for operations that own their buffers.

mod buffer_pool;
#[cfg(all(test, ibverbs_loom))]
mod every_order;
mod free_chunks;
mod owned_region;
mod shared_range;
mod waiting;

pub use buffer_pool::{BufferPool, Exclusive, PoolMemory, PoolWaiter, PooledBuffer, Shared};
pub use shared_range::SharedMemoryRange;
