//! Regions, slices, channels, scopes, owned operations, futures and shared memory under Miri, on a device in Rust.
//!
//! No other test can check this: no reference forbids the device's writes to memory that is lent, shared or
//! in flight, and no memory is read before it was written or after it was freed. `script/test miri` runs it;
//! without Miri this file is empty.
#![cfg(miri)]

mod channels;
mod device;
mod futures;
mod loops;
mod memory;
mod rig;
