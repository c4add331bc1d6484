//! Channels of many peers together.

#[cfg(feature = "async")]
mod async_channel;
#[cfg(all(test, ibverbs_loom))]
mod every_order;
mod free_chunks;
#[cfg(feature = "async")]
mod loop_futures;
mod owned_region;
mod pool;
#[cfg(feature = "async")]
mod reactor;
mod shared_range;

#[cfg(feature = "async")]
pub use async_channel::{
    AsyncChannel, AsyncConnect, AsyncOperation, AsyncReceive, AsyncSharedReceive, AsyncShutdown,
    PreparedAsyncChannel,
};
#[cfg(feature = "async")]
pub use loop_futures::{
    Local, Locked, LoopChannel, LoopOperation, LoopReactor, LoopReceive, Share,
};
pub use pool::{BufferPool, PooledBuffer};
#[cfg(feature = "async")]
pub use reactor::{Reactor, ReactorRun};
pub use shared_range::SharedMemoryRange;
