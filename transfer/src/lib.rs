//! Parts of an engine that moves caches, models or checkpoints over RDMA.
//!
//! - [`RegistrationCache`]: regions for the parts of memory that are asked for, by address; those that were used last stay
//!   registered, up to a number of bytes.
//! - [`counted`]: many writes with an immediate, and one notification when all have arrived.
//! - [`BufferPools`]: pools with chunks of several lengths.
//! - [`Outbox`]: posts before a channel is connected.
//! - [`PciFunction`]: where an adapter is, and how far from a GPU, a disk, a NUMA node or a block of memory.
//!
//! `examples/engine.rs` is such an engine: an arena, a registration cache, writes to many peers.

#![forbid(unsafe_code)]
#![warn(clippy::print_stderr, clippy::print_stdout)]

mod cache;
pub mod counted;
mod outbox;
mod pci;
mod pools;

pub use cache::{CacheError, RegistrationCache};
pub use outbox::{Outbox, OutboxError, Unposted};
pub use pci::{ParsePciAddressError, PciAddress, PciDistance, PciFunction};
pub use pools::BufferPools;
