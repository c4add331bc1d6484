//! Channels of many peers together.

mod owned_region;
mod pool;
mod shared_range;

pub use pool::{BufferPool, PooledBuffer};
pub use shared_range::SharedMemoryRange;
