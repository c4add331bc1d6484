//! On a device: what its driver and the kernel do too.
//!
//! Of what memory is missing afterwards the most counts, as some of what is freed comes back late.

use std::error::Error;
use std::fs;
use std::time::Instant;

use ibverbs::{
    CompletionQueue, HugePages, PreparedQueuePair, ProtectionDomain, QueuePair, QueuePairType,
    RegionOptions,
};

use crate::{connection, doublings, least, micros, point, steps};

pub(crate) fn measure(name: &str) -> Result<(), Box<dyn Error>> {
    let context = ibverbs::open(name)?;
    let domain = context.alloc_pd()?;
    let queue = context.create_cq(16)?;
    queue_pairs(&domain, &queue)?;
    connection("Soft-RoCE, emulated machine", || prepared(&domain, &queue))?;
    registration(&domain, "ordinary pages", None)?;
    registration(&domain, "transparent huge pages", Some(HugePages::Transparent))?;
    registration(&domain, "huge pages of 2 MiB", Some(HugePages::Size2MiB))
}

fn prepared<'a>(
    domain: &'a ProtectionDomain<'a>,
    queue: &'a CompletionQueue<'a>,
) -> ibverbs::Result<PreparedQueuePair<'a>> {
    domain
        .create_qp(queue, queue, QueuePairType::ReliableConnected)
        .max_send_wr(16)
        .max_recv_wr(16)
        .build()
}

/// A queue pair that is connected to itself.
fn queue_pair<'a>(
    domain: &'a ProtectionDomain<'a>,
    queue: &'a CompletionQueue<'a>,
) -> ibverbs::Result<QueuePair<'a>> {
    let prepared = prepared(domain, queue)?;
    let itself = prepared.endpoint();
    prepared.handshake(itself)
}

/// Time and memory of a queue pair by how many there are.
fn queue_pairs<'a>(
    domain: &'a ProtectionDomain<'a>,
    queue: &'a CompletionQueue<'a>,
) -> Result<(), Box<dyn Error>> {
    // The first one takes what is allocated once.
    drop(queue_pair(domain, queue)?);
    for count in steps(1000) {
        let (mut took, mut used) = (Vec::new(), Vec::new());
        for _ in 0..3 {
            let mut queue_pairs = Vec::with_capacity(count);
            let before = machine_memory()?;
            let start = Instant::now();
            for _ in 0..count {
                queue_pairs.push(queue_pair(domain, queue)?);
            }
            took.push(micros(start.elapsed()) / count as f64);
            used.push(before.saturating_sub(machine_memory()?) as f64 / count as f64);
        }
        point("queue-pair-time", "Soft-RoCE, emulated machine", count, least(took));
        // Less than this is lost among what else the kernel does.
        if count >= 100 {
            point("queue-pair-bytes", "the machine, with Soft-RoCE", count, most(used));
        }
    }
    Ok(())
}

/// Time and memory of a registration by size.
fn registration(
    domain: &ProtectionDomain<'_>,
    series: &str,
    pages: Option<HugePages>,
) -> Result<(), Box<dyn Error>> {
    const KIB: usize = 1 << 10;
    const GIB: usize = 1 << 30;
    const AT_ONCE: usize = 8;
    let mut options = RegionOptions::new();
    let mut smallest = 4 * KIB;
    if let Some(pages) = pages {
        options = options.huge_pages(pages);
        // A smaller region takes a whole page too.
        smallest = pages.bytes();
    }
    for bytes in doublings(smallest, GIB)
        .filter(|bytes| bytes.ilog2() % 2 == smallest.ilog2() % 2 || *bytes == GIB)
    {
        // The memory that it is about is there, and was touched, before.
        let owner = domain.allocate_with::<u8>(bytes, options)?;
        let rounds = if bytes >= GIB / 16 { 3 } else { 10 };
        let (mut took, mut used) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let mut regions = Vec::with_capacity(AT_ONCE);
            let before = machine_memory()?;
            for _ in 0..AT_ONCE {
                let start = Instant::now();
                regions.push(domain.register_read_only(&owner)?);
                took.push(micros(start.elapsed()));
            }
            let bytes = before.saturating_sub(machine_memory()?);
            used.push(bytes as f64 / (AT_ONCE * KIB) as f64);
        }
        point("registration-time", series, bytes, least(took));
        // Less than what this takes is lost among what else the kernel does.
        if bytes >= 16 << 20 {
            point("registration-memory", series, bytes, most(used));
        }
    }
    Ok(())
}

/// The bytes of memory that the machine has free.
fn machine_memory() -> Result<u64, Box<dyn Error>> {
    let text = fs::read_to_string("/proc/meminfo")?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemFree:")).ok_or("no MemFree")?;
    let kib: u64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kib * 1024)
}

fn most(values: Vec<f64>) -> f64 {
    values.into_iter().fold(0.0, f64::max)
}
