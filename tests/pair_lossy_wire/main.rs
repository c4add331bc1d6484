//! A wire that loses packets, duplicates them, or lets them overtake one another (`tc netem`). To be
//! run by `script/soak pair`.
//!
//! Machine 2 sends to machine 1, writes to its memory and reads from it, some megabytes each. All must
//! arrive in order, or an error must report the loss: then both reset their channels, connect
//! again, and continue. `IBVERBS_SOAK_SECONDS` sets the duration (without it, each transfer runs
//! once).

mod client;
mod server;
mod wire;

#[path = "../support/figures.rs"]
mod figures;
#[path = "../support/two_machines.rs"]
mod two_machines;

use std::process::ExitCode;

use figures::figure;
use two_machines::{pair, role};

/// The numbers in a message: 4 KiB, which is 4 packets.
const LENGTH: usize = 512;
const BYTES: usize = LENGTH * size_of::<u64>();
/// Messages, writes and reads in flight.
const WINDOW: usize = 4;
/// Messages of a round: 2 MiB.
const MESSAGES: usize = 512;
/// The parts of the server's memory that are written and read in a round: 1 MiB.
const PARTS: usize = 256;

fn main() -> ExitCode {
    let tests: &[(&str, fn())] = &[
        ("one_percent_is_lost", || through("lost", "loss 1%", "loss-1")),
        ("five_percent_are_lost", || through("lost", "loss 5%", "loss-5")),
        ("twenty_percent_are_lost", || through("lost", "loss 20%", "loss-20")),
        ("ten_percent_are_duplicated", || through("duplicated", "duplicate 10%", "duplication")),
        ("packets_overtake", || through("reordered", "delay 2ms reorder 90% 50%", "reordering")),
    ];
    two_machines::main(tests, |role, arguments| match role {
        "server" => server::serve(),
        "client" => client::transfer(&arguments[0]),
        role => panic!("{role} is not a role"),
    })
}

/// Transfers over a wire with one fault, and reports the outcome for this row of the table.
fn through(fault: &str, netem: &str, row: &str) {
    let reports = pair(&["--netem", netem], &role("server"), &role(&format!("client {fault}")));
    let [report] = &reports[..] else { panic!("one report, not {reports:?}") };
    figure(row, &format!("`{netem}`: {report}"));
}
