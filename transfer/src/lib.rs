//! Parts of an engine that moves caches, models or checkpoints over RDMA.
//!
//! - [`RegistrationCache`]: regions for the parts of memory that are asked for, by address; those that were used last stay
//!   registered, up to a number of bytes.
//! - [`counted`]: many writes with an immediate, and one notification when all have arrived.
//!
//! `examples/engine.rs` is such an engine: an arena, a registration cache, writes to many peers.

#![forbid(unsafe_code)]

mod cache;
pub mod counted;

pub use cache::{CacheError, RegistrationCache};
