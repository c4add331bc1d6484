//! Measures the software device side by side with the sockets below it: `script/bench software`.
//!
//! Everything is measured in turns within one run, and compared by medians, so that other work on the machine falls on
//! both sides, and by the best rounds, which had the processors for themselves. The second process is this program
//! again; the two speak over its standard input and output.

mod cost;
mod servers;
mod two;

use std::error::Error;
use std::hint::black_box;
use std::sync::OnceLock;
use std::time::Instant;

use ibverbs::memory::RawMemoryRegion;
use ibverbs::{
    AccessFlags, CompletionQueue, PreparedQueuePair, ProtectionDomain, QueuePair, Rc,
    RemoteMemoryRegion, WorkCompletion, settings::MaxRnrRetries,
};
use ibverbs_software::Device;

use cost::{idle, outstanding, queue_pairs, used};
use servers::{SERVER, servers};
use two::{Way, child, two_processes};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const CHILD: &str = "IBVERBS_SOFTWARE_BENCH_CHILD";
/// The default measurements between two processes.
const WORK: [&str; 4] = ["polling", "sleeping", "stream", PROCESSOR];
/// The processor's time of both processes for bytes that one writes to the other.
const PROCESSOR: &str = "processor";
/// The part of packets through the kernel.
const SOCKETS: &str = "sockets";
/// The part of writes that the initiator carries out.
const ONE_SIDED: &str = "one-sided";
/// Leaves out what the device is compared with.
const ALONE: &str = "alone";

const SMALL: usize = 64;
const LARGE: usize = 1 << 20;
/// Writes of 1 MiB under way.
const WINDOW: usize = 4;
/// Round trips, and writes of 1 MiB, in each round.
const TRIPS: u32 = 1000;
const WRITES: usize = 64;

/// How often all is measured, by both processes: 15 times, or `IBVERBS_SOFTWARE_BENCH_ROUNDS` (at least 1).
fn rounds() -> usize {
    std::env::var("IBVERBS_SOFTWARE_BENCH_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(15)
}

/// Memory, registered for everything, at an address that stays.
struct Memory<'pd> {
    region: RawMemoryRegion<'pd>,
    _words: Vec<u64>,
}

impl<'pd> Memory<'pd> {
    fn new(domain: &'pd ProtectionDomain<'pd>, bytes: usize) -> Result<Self> {
        let mut words = vec![0_u64; bytes.div_ceil(8)];
        let access =
            AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
        // SAFETY: the vector outlives the region, and nobody accesses its elements but the device.
        let region =
            unsafe { RawMemoryRegion::new(domain, words.as_mut_ptr().cast(), bytes, access)? };
        Ok(Self { region, _words: words })
    }

    fn remote(&self) -> Result<RemoteMemoryRegion> {
        let start = self.region.as_ptr() as u64;
        Ok(RemoteMemoryRegion::new(start, self._words.len() as u64 * 8, self.region.rkey())?)
    }
}

fn prepare<'a>(
    domain: &'a ProtectionDomain<'a>,
    sends: &'a CompletionQueue<'a>,
    receives: &'a CompletionQueue<'a>,
    depth: u32,
) -> Result<PreparedQueuePair<'a>> {
    Ok(domain
        .create_qp(sends, receives, Rc)
        .max_send_wr(depth)
        .max_recv_wr(depth)
        .access(AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE)
        .max_rnr_retries(MaxRnrRetries::UNLIMITED)
        .build()?)
}

/// Polls until something has completed.
fn poll(queue: &CompletionQueue<'_>) -> Result<WorkCompletion> {
    let mut room = [WorkCompletion::default()];
    loop {
        if let [completion] = queue.poll(&mut room)? {
            completion.result()?;
            return Ok(*completion);
        }
    }
}

fn stream(
    queue_pair: &mut QueuePair<'_>,
    sends: &CompletionQueue<'_>,
    memory: &Memory<'_>,
    remote: RemoteMemoryRegion,
    (writes, size): (usize, usize),
    wait: impl Fn(&CompletionQueue<'_>) -> Result<()>,
) -> Result<()> {
    for posted in 0..writes + WINDOW {
        if posted >= WINDOW {
            wait(sends)?;
        }
        if posted < writes {
            // SAFETY: nobody reads the memory, and it outlives the queue pair.
            unsafe { queue_pair.post_write(&memory.region, ..size, remote, 0)? };
        }
    }
    Ok(())
}

/// Whether this part was requested. The child gets it from its parent.
fn asked(name: &str) -> bool {
    static WORDS: OnceLock<Vec<String>> = OnceLock::new();
    let words = WORDS.get_or_init(|| match std::env::var(CHILD) {
        Ok(words) => words.split(' ').map(str::to_owned).collect(),
        Err(_) => std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect(),
    });
    let among = |names: &[&str]| words.iter().any(|word| names.contains(&word.as_str()));
    among(&[name]) || WORK.contains(&name) && !among(&WORK)
}

/// NaN without values.
fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// A line, if anything was measured. The ratios are the median of those of the rounds, and that of the best rounds.
fn beside(what: &str, unit: &str, other: &str, device: &[f64], base: &[f64]) {
    if device.is_empty() {
        return;
    }
    let ratios: Vec<f64> = device.iter().zip(base).map(|(a, b)| a / b).collect();
    // Times are best if short, rates if high.
    let choose = if unit.starts_with("us") { f64::min } else { f64::max };
    let best = |values: &[f64]| values.iter().copied().reduce(choose).unwrap_or(f64::NAN);
    let (value, other_value, ratio) = (median(device), median(base), median(&ratios));
    let (best, other_best) = (best(device), best(base));
    println!(
        "| {what} | {value:.1} {unit} | {other}: {other_value:.1} {unit} | {ratio:.2} \
         | {best:.1}, {other_best:.1}: {:.2} |",
        best / other_best
    );
}

fn endpoints<'a>(
    one: PreparedQueuePair<'a>,
    other: PreparedQueuePair<'a>,
) -> Result<[QueuePair<'a>; 2]> {
    let (to_one, to_other) = (one.endpoint(), other.endpoint());
    let one = one.handshake(to_other).map_err(|e| e.error)?;
    Ok([one, other.handshake(to_one).map_err(|e| e.error)?])
}

/// Two devices, and one thread.
fn one_process() -> Result<()> {
    let contexts = [Device::new()?.open()?, Device::new()?.open()?];
    let domains = [contexts[0].alloc_pd()?, contexts[1].alloc_pd()?];
    let queues = [contexts[0].create_cq(64)?, contexts[1].create_cq(64)?];
    let one = prepare(&domains[0], &queues[0], &queues[0], 32)?;
    let other = prepare(&domains[1], &queues[1], &queues[1], 32)?;
    let [mut one, _other] = endpoints(one, other)?;
    let memory = [Memory::new(&domains[0], LARGE)?, Memory::new(&domains[1], LARGE)?];
    let remote = memory[1].remote()?;
    let (mut device, mut copies) = (Vec::new(), Vec::new());
    let (from, mut to) = (vec![3_u8; LARGE], vec![0_u8; LARGE]);
    for _ in 0..rounds() {
        let start = Instant::now();
        let once = |queue: &CompletionQueue<'_>| poll(queue).map(drop);
        stream(&mut one, &queues[0], &memory[0], remote, (WRITES, LARGE), once)?;
        let writes = WRITES as f64 / start.elapsed().as_secs_f64();
        let start = Instant::now();
        for _ in 0..WRITES {
            to.copy_from_slice(black_box(&from));
            black_box(&to);
        }
        let copied = WRITES as f64 / start.elapsed().as_secs_f64();
        device.push(writes);
        copies.push(copied);
    }
    beside("writes of 1 MiB, one process", "MiB/s", "copying", &device, &copies);
    Ok(())
}

fn main() -> Result<()> {
    let way = match (asked(SOCKETS), asked(ONE_SIDED)) {
        (true, _) => Way::Sockets,
        (_, true) => Way::OneSided,
        _ => Way::Memory,
    };
    match std::env::var(CHILD) {
        Ok(words) if words.starts_with(SERVER) => return servers::child(&words),
        Ok(_) => return child(way),
        Err(_) => {}
    }
    // Parts by name, or all but the servers.
    let parts = ["two", SOCKETS, ONE_SIDED, "one", "growth", "idle", "servers"];
    let all = !parts.iter().any(|part| asked(part));
    let wanted = |name: &str| all || asked(name);
    if ["two", SOCKETS, ONE_SIDED, "one"].into_iter().any(wanted) {
        println!(
            "| what | the device | without it | ratio | best rounds |\n|---|---:|---:|---:|---:|"
        );
    }
    if wanted("two") {
        two_processes(Way::Memory)?;
    }
    if wanted(SOCKETS) {
        println!("| through the kernel's sockets: | | | | |");
        two_processes(Way::Sockets)?;
    }
    if wanted(ONE_SIDED) {
        println!("| writes that the initiator carries out: | | | | |");
        two_processes(Way::OneSided)?;
    }
    if wanted("one") {
        one_process()?;
    }
    if wanted("growth") {
        println!(
            "\n| number | making one | memory of one | a write of 64 bytes |\n|---|---:|---:|---:|"
        );
        [1, 100, 10_000].into_iter().try_for_each(queue_pairs)?;
        [1, 100, 10_000].into_iter().try_for_each(outstanding)?;
    }
    if wanted("idle") {
        idle()?;
    }
    if asked("servers") {
        servers()?;
    }
    Ok(())
}
