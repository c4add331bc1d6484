//! The peer goes away in mid-transfer: its process is killed, or its machine loses its power. To be
//! run by `script/soak pair`.
//!
//! Machine 1 is the victim, machine 2 the survivor. The survivor sends messages and reads from the
//! victim's memory, a window of them at a time, until that fails.

mod survivor;
mod victim;

#[path = "../support/figures.rs"]
mod figures;
#[path = "../support/two_machines.rs"]
mod two_machines;

use std::process::ExitCode;
use std::time::Duration;

use figures::figure;
use ibverbs::settings::{AckTimeout, MaxAckRetries};
use two_machines::{pair, role};

/// The numbers in a message, and in what is read at once: 8 KiB.
const LENGTH: usize = 1024;
/// Operations of the survivor in flight.
const WINDOW: usize = 16;
/// Room for this many messages, and as much memory to read from.
const SLOTS: usize = 512;
/// The victim dies once this many messages have arrived, or the survivor has counted this many.
const ENOUGH: usize = 150;
/// Receives that the victim has posted.
const RECEIVES: usize = 64;
/// The survivor prints this when it has counted enough.
const REACHED: &str = "in mid-transfer";

/// 268 ms, seven times: long enough that a busy host alone does not exceed it.
const ACK_TIMEOUT: AckTimeout = match AckTimeout::new(16) {
    Ok(timeout) => timeout,
    Err(_) => unreachable!(),
};
const ACK_RETRIES: MaxAckRetries = match MaxAckRetries::new(6) {
    Ok(retries) => retries,
    Err(_) => unreachable!(),
};

/// How long the settings let the survivor wait for an answer. Devices may take up to four times as long.
fn retry_time() -> Duration {
    ACK_TIMEOUT.duration().unwrap() * (u32::from(ACK_RETRIES.value()) + 1)
}

fn main() -> ExitCode {
    let tests: &[(&str, fn())] = &[
        ("process_killed_under_a_queue_pair", || process_killed("verbs")),
        ("process_killed_under_a_channel", || process_killed("channel")),
        ("machine_gone_under_a_queue_pair", || machine_gone("verbs")),
        ("machine_gone_under_a_channel", || machine_gone("channel")),
    ];
    two_machines::main(tests, |role, arguments| match role {
        "victim" => victim::receive(arguments == ["dies"]),
        "witness" => victim::bear_witness(),
        "survivor" => survivor::survive(&arguments[0], arguments.get(1).is_some()),
        role => panic!("{role} is not a role"),
    })
}

fn process_killed(layer: &str) {
    // A file keeps what the victim has received, for a witness to check. Exit status 137: it was killed.
    let victim = format!("{}; [ $? = 137 ] && {}", role("victim dies"), role("witness"));
    let reports = pair(&[], &victim, &role(&format!("survivor {layer} witness")));
    let [report] = &reports[..] else { panic!("one report, not {reports:?}") };
    figure("peer-process-killed", report);
}

fn machine_gone(layer: &str) {
    let options = ["--kill", "1", "--when", REACHED];
    let reports = pair(&options, &role("victim"), &role(&format!("survivor {layer}")));
    let [report] = &reports[..] else { panic!("one report, not {reports:?}") };
    figure("peer-machine-gone", report);
}
