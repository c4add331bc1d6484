//! Measurements on a device: they include its driver and the kernel.

use std::error::Error;
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::memory::HugePages;
use ibverbs::{
    CompletionQueue, MemoryRegion, PreparedQueuePair, ProtectionDomain, QueuePair, Rc,
    RegionOptions,
};

use crate::{connection, doublings, least, micros, point, queue_pairs};

pub(crate) fn measure(name: &str) -> Result<(), Box<dyn Error>> {
    let context = ibverbs::open(name)?;
    let domain = context.alloc_pd()?;
    let queue = context.create_cq(16)?;
    queue_pairs(
        ["Soft-RoCE, emulated machine", "the machine, with Soft-RoCE"],
        100, // the memory of fewer is lost among other uses of the kernel's
        || queue_pair(&domain, &queue),
        |_| Ok(-(free_memory()? as f64)),
    )?;
    connection("Soft-RoCE, emulated machine", || prepared(&domain, &queue))?;
    registration_memory(&domain)?;
    registration_time(&domain)
}

fn prepared<'a>(
    domain: &'a ProtectionDomain<'a>,
    queue: &'a CompletionQueue<'a>,
) -> ibverbs::Result<PreparedQueuePair<'a>> {
    domain.create_qp(queue, queue, Rc).max_send_wr(16).max_recv_wr(16).build()
}

/// A queue pair that is connected to itself.
fn queue_pair<'a>(
    domain: &'a ProtectionDomain<'a>,
    queue: &'a CompletionQueue<'a>,
) -> ibverbs::Result<QueuePair<'a>> {
    let prepared = prepared(domain, queue)?;
    let itself = prepared.endpoint();
    Ok(prepared.handshake(itself)?)
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const GIB: usize = 1 << 30;

/// The kinds of memory to register.
const PAGES: [(&str, Option<HugePages>); 3] = [
    ("ordinary pages", None),
    ("transparent huge pages", Some(HugePages::Transparent)),
    ("huge pages of 2 MiB", Some(HugePages::Size2MiB)),
];

fn allocate<'a>(
    domain: &'a ProtectionDomain<'a>,
    bytes: usize,
    pages: Option<HugePages>,
) -> ibverbs::Result<MemoryRegion<'a, u8>> {
    let options = RegionOptions::new();
    MemoryRegion::with_options(
        domain,
        bytes,
        pages.map_or(options, |pages| options.huge_pages(pages)),
    )
}

/// Memory of a registration by size. All registrations are kept to the end, because memory that the kernel
/// reuses would not be seen.
fn registration_memory(domain: &ProtectionDomain<'_>) -> Result<(), Box<dyn Error>> {
    const AT_ONCE: usize = 16;
    let owners = PAGES.map(|(_, pages)| allocate(domain, GIB, pages));
    let mut regions = Vec::new();
    for ((series, _), owner) in PAGES.iter().zip(&owners) {
        let owner = owner.as_ref().map_err(|error| *error)?;
        // The memory of smaller ones is lost among other uses.
        for bytes in [16 * MIB, 64 * MIB, 256 * MIB, GIB] {
            regions.reserve(AT_ONCE);
            let before = free_memory()?;
            for _ in 0..AT_ONCE {
                regions.push(domain.register_read_only(&owner[..bytes])?);
            }
            let used = before.saturating_sub(free_memory()?);
            point("registration-memory", series, bytes, used as f64 / (AT_ONCE * KIB) as f64);
        }
    }
    Ok(())
}

/// Time of a registration by size.
fn registration_time(domain: &ProtectionDomain<'_>) -> Result<(), Box<dyn Error>> {
    for (series, pages) in PAGES {
        // A smaller region takes a whole page too.
        let smallest = pages.map_or(4 * KIB, HugePages::bytes);
        for bytes in doublings(smallest, GIB)
            .filter(|bytes| bytes.ilog2() % 2 == smallest.ilog2() % 2 || *bytes == GIB)
        {
            // The memory was allocated and touched before.
            let owner = allocate(domain, bytes, pages)?;
            let mut took = Vec::new();
            for _ in 0..if bytes >= 64 * MIB { 24 } else { 80 } {
                let start = Instant::now();
                let region = domain.register_read_only(&owner)?;
                took.push(micros(start.elapsed()));
                drop(region);
            }
            point("registration-time", series, bytes, least(took));
        }
    }
    Ok(())
}

/// The bytes of memory that the machine has free, once freed memory has come back: each processor keeps some,
/// which compaction reclaims, and the kernel frees some with a delay.
fn free_memory() -> Result<u64, Box<dyn Error>> {
    fs::write("/proc/sys/vm/compact_memory", "1")?;
    let mut most = free_memory_now()?;
    let mut without_more = 0;
    while without_more < 5 {
        thread::sleep(Duration::from_millis(20));
        let now = free_memory_now()?;
        without_more = if now > most { 0 } else { without_more + 1 };
        most = most.max(now);
    }
    Ok(most)
}

fn free_memory_now() -> Result<u64, Box<dyn Error>> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemFree:")).ok_or("no MemFree")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kib * 1024)
}
