//! The tests that `script/check-device` runs on an RDMA device of any kind. They ask the device for what differs (addresses,
//! limits, operations, the way to connect). Each test runs alone, in a process of its own, so that a crash or a hang is an
//! outcome of that test only.
//!
//! A test that the device has no way to pass prints a line that begins with [`unsupported`]'s words and says what is
//! missing, and a fault that is the device's own one of [`fault`]. Lines of [`figure`] go into the report.

#[path = "../support/reliable/channels.rs"]
mod channels;
mod connected;
mod datagrams;
mod device;
mod figures;
mod memory;
mod objects;
#[path = "../support/reliable/queue_pairs.rs"]
mod queue_pairs;
mod transport;
#[path = "../support/vm/mod.rs"]
mod vm;

/// Says that this device has no way to pass the test, and why.
fn unsupported(why: &str) {
    println!("NOT SUPPORTED: {why}");
}

/// Says that the device does what no device may; no program can help that.
fn fault(what: &str) {
    println!("DEVICE FAULT: {what}");
}

/// A line of the report.
fn figure(name: &str, value: &str) {
    println!("FIGURE: {name:24} {value}");
}
