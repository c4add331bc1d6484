//! The software device against the kernel's Soft-RoCE, between two machines. `script/test pair` runs it.
//!
//! Machine 1 has Soft-RoCE, and runs rdma-core's and perftest's programs as machine 2 asks for them (`kernel`).
//! Machine 2 has a software device in a process without any privilege, which speaks those programs' exchanges of
//! addresses and plays their peer (`software`). It checks every byte that the exchange lets it check.

mod cases;
mod examples;
mod exchange;
mod kernel;
mod memory;
#[path = "../../software/tests/support/multicast.rs"]
mod multicast;
#[path = "../../software/tests/support/patience.rs"]
mod patience;
mod perftest;
#[path = "../support/perftest_report.rs"]
mod perftest_report;
mod ping_pong;
#[path = "../support/two_machines.rs"]
mod two_machines;

use std::process::ExitCode;

use two_machines::{pair, role, soak_seconds};

/// The addresses of the two machines on the wire, of each family.
const KERNEL: [&str; 3] = ["10.78.0.1", "fd78::1", "fe80::78:1"];
const SOFTWARE: [&str; 3] = ["10.78.0.2", "fd78::2", "fe80::78:2"];
/// Another one, for a second device beside that.
const SECOND: &str = "fd78::3";

fn main() -> ExitCode {
    let tests: &[(&str, fn())] = &[("the_kernel_understands_the_software_device", run)];
    two_machines::main(tests, |role, arguments| match role {
        "kernel" => kernel::serve(),
        "software" => cases::run(&arguments[0], number(&arguments[1]), number(&arguments[2])),
        "end" => cases::end(),
        role => panic!("{role} is not a role"),
    })
}

fn number(argument: &str) -> u32 {
    argument.parse().expect("a number")
}

fn run() {
    let mut reports = Vec::new();
    if soak_seconds() == 0 {
        reports.extend(machines("short", "0 1", 0));
    } else {
        // Each part has machines of its own: a fault of QEMU's, which becomes likely in a quarter of an hour, repeats
        // that part only.
        for losses in ["0", "1", "5"] {
            reports.extend((0..cases::PARTS).flat_map(|part| machines("long", losses, part)));
        }
    }
    assert!(reports.iter().all(|report| report.starts_with("passed")), "{reports:#?}");
}

/// Runs a part of a table at each of these losses, in two machines. Returns a report for each loss.
fn machines(table: &str, losses: &str, part: u32) -> Vec<String> {
    let buffers = match table {
        "short" => "",
        _ => "echo 8388608 >/proc/sys/net/core/rmem_max",
    };
    // The program has a user's rights only. An rxe device would keep UDP port 4791 to itself.
    let software = format!(
        "rdma link delete rxe0; rdma link delete rxe1; rmmod rdma_rxe
        {buffers}
        {}; {}; ip address add {SECOND}/64 dev eth0 nodad
        user='setpriv --reuid=65534 --regid=65534 --clear-groups --no-new-privs --bounding-set=-all'
        for loss in {losses}; do
            [ $loss = 0 ] || tc qdisc replace dev eth0 root netem loss $loss%
            $user {} || true # its report says so
        done
        $user {}",
        addresses(SOFTWARE),
        neighbours(KERNEL, 1),
        role(&format!("software {table} $loss {part}")),
        role("end"),
    );
    let kernel = format!(
        "ip link set eth0 txqueuelen {}; {}; {}; {}",
        kernel::QUEUE,
        addresses(KERNEL),
        neighbours(SOFTWARE, 2),
        role("kernel")
    );
    // Many times of what it takes on a host that does nothing else.
    let reports = pair(&["-t", "1200"], &kernel, &software);
    assert_eq!(reports.len(), losses.split(' ').count(), "{reports:?}");
    reports
}

/// The commands that give a machine its addresses of IPv6.
fn addresses(addresses: [&str; 3]) -> String {
    let one = |address| format!("ip address add {address}/64 dev eth0 nodad");
    [addresses[1], addresses[2]].map(one).join("; ")
}

/// The command that tells a machine where the other one's addresses are: a question for that may be lost, and then
/// connecting fails.
fn neighbours(addresses: [&str; 3], machine: u8) -> String {
    let one = |address| {
        format!(
            "ip neigh replace {address} lladdr 52:54:00:77:00:0{machine} dev eth0 nud permanent"
        )
    };
    addresses.map(one).join("; ")
}
