//! Many peers: buffers for them, and futures.

pub mod event_loop;
#[cfg(feature = "async")]
pub mod future;
pub mod pool;
