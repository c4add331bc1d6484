//! A test that another process runs a part of: the same program, started once more.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

/// The child processes run this binary with the name of their part here.
const PART: &str = "IBVERBS_SOFTWARE_TEST_PART";
/// The address of the parent's listener.
const ADDRESS: &str = "IBVERBS_SOFTWARE_TEST_ADDRESS";

/// A child process that runs the test of this name. It is killed when the guard is dropped.
pub(crate) struct Process(pub(crate) Child);

impl Process {
    pub(crate) fn run(test: &str, address: SocketAddr) -> Self {
        Self::spawn(test, address, &mut Command::new(std::env::current_exe().unwrap()))
    }

    /// Runs as another user, who need not have access to the folder of this program.
    #[allow(dead_code, reason = "not every program needs it")]
    pub(crate) fn run_as(user: u32, test: &str, address: SocketAddr) -> Self {
        Self::spawn(test, address, Command::new("/proc/self/exe").uid(user))
    }

    /// Runs as the first process of a PID namespace.
    #[allow(dead_code, reason = "not every program needs it")]
    pub(crate) fn run_with_own_numbers(test: &str, address: SocketAddr) -> Self {
        let mut program = Command::new("unshare");
        program.args(["--pid", "--fork", "--kill-child"]).arg(std::env::current_exe().unwrap());
        Self::spawn(test, address, &mut program)
    }

    fn spawn(test: &str, address: SocketAddr, program: &mut Command) -> Self {
        let child = program
            .args(["--exact", test, "--nocapture"])
            .env(PART, test)
            .env(ADDRESS, address.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        Self(child.unwrap())
    }

    /// SIGKILL, at once.
    #[allow(dead_code, reason = "not every program needs it")]
    pub(crate) fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }

    /// Waits for a line of the child that contains `text`.
    #[allow(dead_code, reason = "not every program needs it")]
    pub(crate) fn wait_for(&mut self, text: &str) {
        let lines = BufReader::new(self.0.stdout.as_mut().unwrap()).lines();
        let mut lines = lines.map(|line| line.expect("the child's output"));
        assert!(lines.any(|line| line.contains(text)), "the child has ended without '{text}'");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Whether this process is the child that runs this part; the parent skips the test.
pub(crate) fn is_child(part: &str) -> bool {
    std::env::var(PART).is_ok_and(|name| name == part)
}

/// The address of the parent's listener.
pub(crate) fn parent() -> SocketAddr {
    std::env::var(ADDRESS).unwrap().parse().unwrap()
}

/// The number of rings of packets that a process has in its memory.
#[allow(dead_code, reason = "not every program needs it")]
pub(crate) fn rings_of(process: u32) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
    maps.lines().filter(|line| line.contains("/memfd:ibverbs-software")).count()
}

/// The memory that this process shares with others, mapped a second time for good: where each ring begins.
#[allow(dead_code, reason = "not every program needs it")]
pub(crate) fn rings() -> Vec<*mut u8> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let rings = maps.lines().filter(|line| line.contains("/memfd:ibverbs-software"));
    let ranges = rings.filter(|line| line.contains(" rw-s ")).map(|line| {
        let range = line.split(' ').next().unwrap().split_once('-').unwrap();
        let [start, end] = [range.0, range.1].map(|at| usize::from_str_radix(at, 16).unwrap());
        (start, end - start)
    });
    let again = |(start, length): (usize, usize)| {
        // SAFETY: with a length of 0, a mapping that is shared is mapped once more, where the system finds room.
        let mapped = unsafe { libc::mremap(start as *mut _, 0, length, libc::MREMAP_MAYMOVE) };
        assert_ne!(mapped, libc::MAP_FAILED);
        mapped.cast()
    };
    ranges.filter(|(_, length)| *length >= 4 << 20).map(again).collect()
}
