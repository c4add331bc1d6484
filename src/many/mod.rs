//! Channels of many peers together.

mod async_channel;
#[cfg(all(test, ibverbs_loom))]
mod every_order;
mod free_chunks;
mod owned_region;
mod panics;
mod pool;
mod reactor;
mod shared_range;

pub use async_channel::{
    AsyncChannel, AsyncConnect, AsyncOperation, AsyncReceive, AsyncSharedReceive, AsyncShutdown,
    PreparedAsyncChannel,
};
pub use pool::{BufferPool, PooledBuffer};
pub use reactor::{Reactor, ReactorRun};
pub use shared_range::SharedMemoryRange;
