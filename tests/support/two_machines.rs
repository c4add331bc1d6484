//! Shared code of the tests between two machines. Such a program runs in three places: on the
//! host as the test, and in the two machines that the test starts, in one role each.

#![allow(
    dead_code,
    unreachable_pub,
    unused_imports,
    reason = "each test program uses a part of it"
)]

use std::io::Read as _;
use std::io::{BufRead as _, BufReader};
use std::net::{TcpListener, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;

#[path = "../../examples/common/mod.rs"]
mod common;
#[path = "vm/mod.rs"]
mod vm;

pub(crate) use common::pattern;
pub use vm::{PATIENCE, assert_nothing_left, completions, resources, run, short_name};

/// The mark at the beginning of a message from a machine to the test.
const REPORT: &str = "report: ";

/// The main function of a test program without libtest's: in a machine it plays the role that its
/// arguments name, on the host it runs the tests (those whose names contain the argument, if any).
pub fn main(tests: &[(&str, fn())], role: fn(&str, &[String])) -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if std::env::var_os("IBVERBS_VM").is_some() {
        role(&arguments[0], &arguments[1..]);
        return ExitCode::SUCCESS;
    }
    let filters: Vec<_> = arguments.iter().filter(|argument| !argument.starts_with('-')).collect();
    let chosen = |name: &str| filters.is_empty() || filters.iter().any(|f| name.contains(*f));
    let mut failed = Vec::new();
    for (name, test) in tests.iter().filter(|(name, _)| chosen(name)) {
        println!("test {name} ..");
        let start = Instant::now();
        let passed = catch_unwind(AssertUnwindSafe(test)).is_ok();
        let verdict = if passed { "ok" } else { "FAILED" };
        println!("test {name} .. {verdict} ({:.1} s)", start.elapsed().as_secs_f64());
        if !passed {
            failed.push(*name);
        }
    }
    if failed.is_empty() {
        return ExitCode::SUCCESS;
    }
    println!("failed: {}", failed.join(", "));
    ExitCode::FAILURE
}

/// The shell command that runs this program in a machine, in a role.
pub fn role(arguments: &str) -> String {
    let program = std::env::current_exe().unwrap();
    format!("'{}' {arguments}", program.to_str().unwrap())
}

/// Runs a command in each of two machines, both of which must succeed; returns what they reported.
///
/// All waits of the programs end long before the machines' time does. If that runs out, it is a machine
/// that is stuck, as emulated ones are at times: then it is tried once more, and said so.
pub fn pair(options: &[&str], first: &str, second: &str) -> Vec<String> {
    const TIMED_OUT: Option<i32> = Some(124);
    let (mut status, mut reports) = machines(options, first, second);
    if status.code() == TIMED_OUT {
        println!("the machines got stuck: once more");
        (status, reports) = machines(options, first, second);
    }
    assert!(status.success(), "script/vm pair: {status}");
    reports
}

fn machines(options: &[&str], first: &str, second: &str) -> (ExitStatus, Vec<String>) {
    let mut child = Command::new("script/vm")
        .args(["pair", "-t", &(200 + soak_seconds()).to_string()])
        .args(options)
        .args(["--", first, "--", second])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("script/vm");
    let mut reports = Vec::new();
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        let line = line.unwrap();
        println!("{line}");
        if let Some((_, report)) = line.split_once(REPORT) {
            reports.push(report.to_owned());
        }
    }
    (child.wait().unwrap(), reports)
}

/// How long a test without a natural end runs: set by `script/soak`.
pub fn soak_seconds() -> u64 {
    let seconds = std::env::var("IBVERBS_SOAK_SECONDS");
    seconds.map_or(0, |text| text.parse().expect("IBVERBS_SOAK_SECONDS is a number"))
}

/// Sends a message from a machine to the test.
pub fn report(text: &str) {
    println!("{REPORT}{text}");
}

/// Which of the two machines this is: 1 or 2.
pub fn node() -> u8 {
    std::env::var("IBVERBS_VM_NODE").unwrap().parse().unwrap()
}

/// A connection over TCP between the two machines, for agreements before and between transfers.
pub struct Peer(TcpStream);

impl Peer {
    /// Machine 1 waits for machine 2.
    pub fn meet(port: u16) -> Self {
        let stream = match node() {
            1 => TcpListener::bind(("0.0.0.0", port)).unwrap().accept().unwrap().0,
            _ => {
                let start = Instant::now();
                loop {
                    let host = std::env::var("IBVERBS_VM_PEER").unwrap();
                    match TcpStream::connect((host, port)) {
                        Ok(stream) => break stream,
                        Err(error) => assert!(start.elapsed() < PATIENCE, "{error}"),
                    }
                    thread::sleep(Duration::from_millis(50));
                }
            }
        };
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(2 * PATIENCE)).unwrap();
        Self(stream)
    }

    /// Sends a line to the peer, and returns the peer's.
    pub fn exchange<T: Serialize, U: DeserializeOwned>(&mut self, ours: T) -> U {
        let config = bincode::config::standard();
        bincode::serde::encode_into_std_write(ours, &mut self.0, config)
            .expect("the peer is there");
        bincode::serde::decode_from_std_read(&mut self.0, config).expect("the peer is there")
    }

    /// Waits, for a limited time, until the peer has gone. Until then it may not have received the last line,
    /// which the wire can lose, and which is not repeated once this machine is switched off.
    pub fn part(mut self) {
        self.0.set_read_timeout(Some(PATIENCE)).unwrap();
        // The peer closes the connection, or the closing is lost in turn: both end the wait.
        let _ = self.0.read(&mut [0]);
    }

    /// Waits until the peer has come here too.
    pub fn meet_again(&mut self) {
        let _: u8 = self.exchange(0_u8);
    }
}
