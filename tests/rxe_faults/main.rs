//! The faults of docs/reliability.md that one machine with Soft-RoCE can produce: forbidden accesses by a peer,
//! limits of the machine, and signals and forks. To be run by `script/test rxe`, in the machine that `script/vm` starts.

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
