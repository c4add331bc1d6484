//! The table of faults (docs/reliability.md), as far as one machine with Soft-RoCE can produce them:
//! what a peer may not do, what the machine does not have, and what happens to a program beside its
//! work. To be run by `script/test rxe`, in the machine that `script/vm` starts.

mod access;
mod credentials;
#[path = "../support/figures.rs"]
mod figures;
mod forks;
mod limits;
mod overrun;
mod short_receive;
mod signals;
#[path = "../support/vm/mod.rs"]
mod vm;

use vm::alone;
