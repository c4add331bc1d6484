//! Connections by IP address on Soft-RoCE, within this crate and with rdma-core's own programs. To be run
//! by `script/test rxe`, in the machine that `script/vm` starts.
//!
//! Both ends are on `rxe0`, because the kernel reaches an address of its own machine through the device that
//! has it.

#[path = "../support/managed.rs"]
mod managed;
#[path = "../support/vm/mod.rs"]
mod vm;

mod connections;
mod datagrams;
mod deaths;
mod file;
mod random;
mod refusals;
mod removed;
mod steps;
mod tools;

use std::time::{Duration, Instant};

/// The objects that remain when ours are gone. librdmacm keeps the device open once it has used it.
const BASELINE: &str = "pd 1 cq 1 qp 1 cm_id 0 mr 0 ctx 1 srq 0";

/// Asserts that nothing is left but the device that librdmacm keeps open.
fn nothing_is_left() {
    let start = Instant::now();
    loop {
        let resources = vm::resources("rxe0");
        if resources == BASELINE || resources == vm::BASELINE {
            return;
        }
        assert!(start.elapsed() < Duration::from_secs(20), "{resources}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
