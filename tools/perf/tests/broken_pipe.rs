//! `ibverbs-perf | head` must end quietly.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

#[test]
fn it_ends_quietly_when_nobody_reads() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let program = Command::new(env!("CARGO_BIN_EXE_ibverbs-perf"))
        .arg("--help")
        .stdout(writer)
        .stderr(Stdio::piped())
        .spawn();
    let output = program.unwrap().wait_with_output().unwrap();
    assert_eq!(output.status.signal(), Some(libc::SIGPIPE), "{:?}", output.status);
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}
