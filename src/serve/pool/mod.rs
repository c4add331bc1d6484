//! Registered memory in pieces, for operations that own their buffers: those of a [`Loop`](crate::Loop) and of futures.
//!
//! ```
//! use std::sync::Arc;
//! use ibverbs::{AccessFlags, BufferPool, ProtectionDomain};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
//! # rxe0.register();
//! let domain = Arc::new(ProtectionDomain::new(ibverbs::open_first()?)?);
//! let pool = BufferPool::new(&domain, 4096, 64, AccessFlags::empty())?; // 64 chunks of 4096 bytes
//! let mut buffer = pool.take().ok_or("all buffers are in use")?; // empty
//! buffer.extend_from_slice(b"hello")?;
//! drop(buffer); // it is in the pool again
//! assert_eq!(pool.available(), 64);
//! # Ok(())
//! # }
//! ```
//!
//! | type | what it is |
//! |---|---|
//! | [`BufferPool`], [`PooledBuffer`] | chunks of one region, which go back when dropped: the program's own, or accessed by peers too ([`Shared`]) |
//! | [`BufferCache`] | keeps chunks for one thread |
//! | [`DatagramBuffer`] | a chunk with a datagram's message and what precedes it |
//! | [`PoolWaiter`] | waits for a chunk |
//! | [`SharedMemoryRange`] | a range of an `Arc<SharedMemoryRegion>` |
//! | `Box<MemoryRegion<'static, T>>` | a whole region |

mod buffer_pool;
mod datagram_buffer;
#[cfg(all(test, ibverbs_loom))]
mod every_order;
mod free_chunks;
mod pooled_buffer;
mod waiting;

pub use crate::verbs::memory::SharedMemoryRange;
pub use buffer_pool::{BufferCache, BufferPool, PoolWaiter};
pub use datagram_buffer::DatagramBuffer;
pub use pooled_buffer::{Exclusive, PoolMemory, PooledBuffer, Shared};
