//! The store between two machines with Soft-RoCE, on a wire that loses packets, and when one of them loses its power.
//! `script/soak pair` runs it.
//!
//! Machine 1 serves, and has a client of its own; machine 2 has clients.

#![forbid(unsafe_code)]

use std::path::Path;
use std::process::{Command, Stdio};

/// The commands that both machines run first.
const PRELUDE: &str = "set -eu; kv() { timeout 200 \"$KV\" -d rxe1 \"$@\"; }; server=10.78.0.1; \
    admin() ( exec 3<>/dev/tcp/$server/7001; echo \"$1\" >&3; IFS= read -r line <&3; echo \"$line\" ); \
    listening() { until admin stats >/dev/null 2>&1; do sleep 0.2; done; }; \
    clients_are() { until admin stats | grep -q \"^clients $1 \"; do sleep 0.5; done; }; ";

/// Starts the server, runs `commands` beside it, and waits until the server has ended, which must be a success.
fn server(commands: &str) -> String {
    format!(
        "{PRELUDE} kv serve 0.0.0.0:7000 0.0.0.0:7001 & pid=$!; listening; {commands}; wait $pid; \
         echo 'the server has ended'"
    )
}

/// Runs a command in each machine, both of which must succeed. Returns what they printed.
fn pair(options: &[&str], first: &str, second: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let export = format!("export KV='{}'; ", env!("CARGO_BIN_EXE_kv"));
    let output = Command::new(root.join("script/vm"))
        .args(["pair", "-t", "400"])
        .args(options)
        .args(["--", &(export.clone() + first), "--", &(export + second)])
        .current_dir(&root)
        .stdin(Stdio::null())
        .output()
        .expect("script/vm");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    println!("{text}{errors}");
    assert!(output.status.success(), "script/vm pair: {}", output.status);
    text
}

#[test]
fn values_come_back_over_a_wire_that_loses_packets() {
    let client = format!(
        "{PRELUDE} listening; kv check $server:7000 5 one & one=$!; kv check $server:7000 5 two & two=$!; \
         wait $one; wait $two; clients_are 0; admin shutdown"
    );
    let text = pair(&["--netem", "loss 2%"], &server("true"), &client);
    for line in ["one: ", "two: ", "the server has ended"] {
        let whole = |text: &str| line.len() != 5 || text.contains("values came back whole");
        assert!(text.lines().any(|found| found.contains(line) && whole(found)), "{line}");
    }
}

/// A client's machine loses its power in the middle of a request. The other client does not notice; the
/// server does, and stops gracefully later.
#[test]
fn a_client_without_power_hurts_nobody() {
    let commands = "kv check $server:7000 25 near; clients_are 0; admin shutdown";
    let client = format!("{PRELUDE} listening; kv load $server:7000");
    let text = pair(&["--kill", "2", "--when", "loading"], &server(commands), &client);
    assert!(text.contains("values came back whole; 0 requests were repeated"));
    assert!(text.contains("the server has ended"));
}

/// The server's machine loses its power: the client gets an error in time.
#[test]
fn a_server_without_power_is_an_error_in_time() {
    let client = format!(
        "{PRELUDE} listening; set +e; kv load $server:7000; echo \"status $?\"; \
         timeout 60 \"$KV\" -d rxe1 get $server:7000 load; echo \"again $?\""
    );
    let text = pair(&["--kill", "1", "--when", "loading"], &server("true"), &client);
    // 124 would be the end of its time.
    assert!(text.contains("status 1") && text.contains("again 1"));
}
