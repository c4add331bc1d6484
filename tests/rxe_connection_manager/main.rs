//! Connections by IP address on Soft-RoCE, within this crate and with rdma-core's own programs. To be run
//! by `script/test rxe`, in the machine that `script/vm` starts.
//!
//! Both ends are on `rxe0`, because the kernel reaches an address of its own machine through the device that
//! has it.

#[path = "../support/connections/asynchronous.rs"]
mod asynchronous;
#[path = "../support/kept.rs"]
mod kept;
#[path = "../support/managed.rs"]
mod managed;
#[path = "../support/perftest_report.rs"]
mod perftest_report;
#[path = "../support/vm/mod.rs"]
mod vm;

mod connections;
#[path = "../support/connections/credits.rs"]
mod credits;
mod datagrams;
#[path = "../support/connections/deaths.rs"]
mod deaths;
mod file;
#[path = "../support/connections/random.rs"]
mod random;
mod refusals;
mod relay;
mod removed;
mod steps;
mod tools;

use managed::nothing_is_left;
