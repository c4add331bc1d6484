//! Channels of many peers together.

#[cfg(feature = "async")]
mod async_channel;
#[cfg(all(test, ibverbs_loom))]
mod every_order;
mod free_chunks;
mod owned_region;
mod pool;
mod shared_range;
mod waiting;

#[cfg(feature = "async")]
pub use async_channel::{
    AsyncChannel, AsyncOperation, AsyncReceive, AsyncRequest, Local, Locked, PreparedAsyncChannel,
    Reactor, Share, SharedReceives,
};
pub use pool::{BufferPool, PooledBuffer};
pub use shared_range::SharedMemoryRange;
