//! Prints the outcomes of the fault tests for `docs/reliability.md`.

use std::io::Write as _;

/// Reports the outcome of a fault: `row` names its row in the table, `outcome` is a short text with the
/// figures. It is printed past the test harness, which hides the output of tests that pass.
pub(crate) fn figure(row: &str, outcome: &str) {
    // One write, so that lines of tests that run in parallel stay whole.
    let line = format!("reliability\t{row}\t{outcome}\n");
    std::io::stdout().write_all(line.as_bytes()).expect("standard output");
}
