//! Shared code of the tests on `rxe0` and `rxe1`: the kernel's Soft-RoCE, in the virtual machine of `script/vm`, as root;
//! elsewhere two devices of software, which have these names.

#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part of it")]

pub mod channels;
pub mod process;

use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ibverbs::{
    CompletionQueue, Context, ProtectionDomain, TransportError, WorkCompletion,
    completion::WorkSuccess,
};

use ibverbs_software::{Device, LiveObjects};

use process::Watchdog;

/// Longer than anything here takes, even on a host that is ten times slower and does other things. What
/// has not come by then never comes.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Waits until no packet of a connection that was reset can be on its way any more: the next one
/// between the same queue pairs could take it for its own. (The standard's TimeWait.)
pub fn time_wait() {
    std::thread::sleep(Duration::from_millis(50));
}

/// Taken by all tests of a binary, because each counts objects of the whole machine: they run one after the
/// other.
pub fn one_at_a_time() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    software(); // now, before a test looks for them
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Like [`one_at_a_time`], for a test that must end within `seconds`, which is many times its usual duration.
pub fn alone(test: &'static str, seconds: u64) -> (Watchdog, MutexGuard<'static, ()>) {
    let lock = one_at_a_time();
    (Watchdog::new(test, Duration::from_secs(seconds)), lock)
}

/// Runs a command line, which must succeed; returns what it printed.
pub fn run(command: &str) -> String {
    let output = Command::new("bash").args(["-ec", command]).output().expect("bash");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command}: {}: {error}", output.status);
    String::from_utf8(output.stdout).expect("text")
}

/// The version of the machine's kernel, such as (6, 12): what Soft-RoCE does differs between some.
pub fn kernel_release() -> (u32, u32) {
    let release = run("uname -r");
    let mut numbers = release.split('.').map(|number| number.parse().expect("a number"));
    (numbers.next().expect("a version"), numbers.next().expect("a version"))
}

/// Whether a datagram can be sent here. Before Linux 5.16 the provider needs feature `neigh` for the address handle, and the
/// one that it does not make stays in the kernel, with its domain, for as long as the program runs.
pub fn has_address_handles() -> bool {
    let has = software().is_some() || kernel_release() >= (5, 16);
    if !has {
        println!("NOT CHECKED: datagrams, which take feature `neigh` before Linux 5.16");
    }
    has
}

/// The index of the GIDs of both devices that hold their IPv4 addresses.
pub fn gid_index() -> u8 {
    if software().is_some() { 0 } else { 1 }
}

/// Asserts that the kernel has only its own protection domain, completion queue and queue pair.
pub const BASELINE: &str = "pd 1 cq 1 qp 1 cm_id 0 mr 0 ctx 0 srq 0";

/// The kernel's counts of the objects of a device, in the order of [`BASELINE`].
pub fn resources(device: &str) -> String {
    if let Some(devices) = software() {
        let device = devices.iter().find(|one| one.name() == device).expect("rxe0 or rxe1");
        // The kernel has one of each of the first three.
        let LiveObjects {
            contexts,
            protection_domains,
            memory_regions,
            completion_queues,
            shared_receive_queues,
            queue_pairs,
            ..
        } = device.live_objects();
        return format!(
            "pd {} cq {} qp {} cm_id 0 mr {memory_regions} ctx {contexts} srq {shared_receive_queues}",
            protection_domains + 1,
            completion_queues + 1,
            queue_pairs + 1,
        );
    }
    let all = run("rdma resource show");
    let line = all.lines().find_map(|line| line.split_once(&format!("{device}: ")));
    let line = line.unwrap_or_else(|| panic!("no {device} in:\n{all}")).1.trim();
    // Linux before 5.15 does not count shared receive queues.
    if line.contains("srq") { line.to_owned() } else { format!("{line} srq 0") }
}

/// The devices of software that stand for `rxe0` and `rxe1` outside of the machine, or `None` in it.
pub fn software() -> Option<&'static [Device; 2]> {
    static DEVICES: OnceLock<Option<[Device; 2]>> = OnceLock::new();
    let make = |name| {
        let device = Device::builder().name(name).build().unwrap();
        device.register();
        device
    };
    // Nor for script/check-device, which names a device.
    let others = ["IBVERBS_VM", "IBVERBS_CHECK_DEVICE"];
    let alone = others.iter().all(|name| std::env::var_os(name).is_none());
    let make = || alone.then(|| ["rxe0", "rxe1"].map(make));
    DEVICES.get_or_init(make).as_ref()
}

/// Waits until nothing of ours is left on a device. The kernel destroys some objects a little later.
pub fn assert_nothing_left(device: &str) {
    let start = Instant::now();
    while resources(device) != BASELINE {
        assert!(start.elapsed() < PATIENCE, "{device}: {}", resources(device));
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs a test with a context, a domain and a queue on rxe0, and sees that it left nothing.
pub fn with_rxe0(test: impl FnOnce(&Context<'_>, &ProtectionDomain<'_>, &CompletionQueue<'_>)) {
    let _lock = one_at_a_time();
    let context = ibverbs::open("rxe0").unwrap();
    {
        let domain = context.alloc_pd().unwrap();
        let queue = context.create_cq(256).unwrap();
        test(&context, &domain, &queue);
        queue.close().unwrap();
        domain.close().unwrap();
    }
    context.close().unwrap();
    assert_nothing_left("rxe0");
}

/// An error in one word, for reports.
pub fn short_name(error: &TransportError) -> String {
    match error {
        TransportError::Work(error) => format!("{:?}", error.status()),
        TransportError::TimedOut => "TimedOut".to_owned(),
        TransportError::Stopped => "Stopped".to_owned(),
        TransportError::QueueFull => "QueueFull".to_owned(),
        TransportError::NoCredit => "NoCredit".to_owned(),
        error => error.to_string(),
    }
}

/// Polls until `count` requests have completed.
pub fn completions(queue: &CompletionQueue<'_>, count: usize) -> Vec<WorkCompletion> {
    let mut found = Vec::new();
    let mut slice = [WorkCompletion::default(); 4];
    let start = Instant::now();
    while found.len() < count {
        found.extend_from_slice(queue.poll(&mut slice).expect("the queue works"));
        assert!(start.elapsed() < PATIENCE, "{} of {count} completions", found.len());
        std::thread::sleep(Duration::from_micros(50));
    }
    found
}

/// The completion of the request with this number, among those of [`completions`]; it succeeded.
pub fn success(completions: &[WorkCompletion], wr_id: u64) -> WorkSuccess {
    let completion = completions.iter().find(|completion| completion.wr_id() == wr_id);
    completion.expect("a completion").result().unwrap_or_else(|error| panic!("{wr_id}: {error}"))
}
