//! Regions, slices, channels, scopes and shared memory under Miri, on a device in Rust.
//!
//! It proves what no other test can see: that memory which the device writes while it is lent, shared or
//! in flight is nowhere covered by a reference that forbids it, and that nothing is read before it was
//! written or after it was freed. Run it by `script/test miri`; elsewhere this file is empty.
#![cfg(miri)]

mod channels;
mod device;
mod memory;
mod rig;
