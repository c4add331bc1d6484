//! Prints the outcomes of the fault tests for `docs/reliability.md`.

use std::io::Write as _;

/// Reports the outcome of a fault: `row` names its row in the table, `outcome` is a short text with the
/// figures. It is printed past the test harness, which hides the output of tests that pass.
///
/// The page is about Soft-RoCE where a program of its tests is named: what happens on a device of software is not
/// printed.
pub(crate) fn figure(row: &str, outcome: &str) {
    let program = std::env::current_exe().unwrap();
    let of_soft_roce = program.file_name().unwrap().to_string_lossy().starts_with("rxe_");
    if of_soft_roce && std::env::var_os("IBVERBS_VM").is_none() {
        return;
    }
    // Print with one write, so that lines of tests that run in parallel stay whole.
    let line = format!("reliability\t{row}\t{outcome}\n");
    std::io::stdout().write_all(line.as_bytes()).expect("standard output");
}
