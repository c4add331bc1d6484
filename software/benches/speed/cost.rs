//! Measures the cost of queue pairs, requests under way and idle devices.

use std::time::{Duration, Instant};

use ibverbs::Context;
use ibverbs_software::Device;

use super::{LARGE, Memory, Result, SMALL, TRIPS, median, poll, prepare, rounds};

/// The bytes of this process that are in memory.
fn resident() -> Result<f64> {
    let pages = std::fs::read_to_string("/proc/self/statm")?;
    let pages: f64 = pages.split(' ').nth(1).ok_or("statm")?.parse()?;
    Ok(pages * 4096.)
}

/// The time of a small write to a queue pair of the same device, with `count` of them.
pub(crate) fn queue_pairs(count: usize) -> Result<()> {
    let context: Context<'static> = Device::new()?.open()?;
    let domain = context.alloc_pd()?;
    let queue = context.create_cq(64)?;
    let memory = Memory::new(&domain, LARGE)?;
    let remote = memory.remote()?;
    let before = resident()?;
    let start = Instant::now();
    let mut pairs = Vec::with_capacity(count);
    for _ in 0..count {
        let prepared = prepare(&domain, &queue, &queue, 4)?;
        let own = prepared.endpoint();
        pairs.push(prepared.handshake(own).map_err(|e| e.error)?);
    }
    let each = start.elapsed().as_secs_f64() * 1e6 / count as f64;
    let memory_each = (resident()? - before) / count as f64;
    let mut times = Vec::new();
    for round in 0..rounds() {
        let start = Instant::now();
        for i in 0..TRIPS as usize {
            let pair = &mut pairs[(i * 7919 + round) % count];
            // SAFETY: nobody reads the memory, and it outlives the queue pairs.
            unsafe { pair.post_write(&memory.region, ..SMALL, remote, 0)? };
            poll(&queue)?;
        }
        times.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(TRIPS));
    }
    println!(
        "| {count} queue pairs | {each:.1} us | {memory_each:.0} bytes | {:.1} us |",
        median(&times)
    );
    Ok(())
}

/// The time of each of `count` small writes that are posted before the first is polled.
pub(crate) fn outstanding(count: usize) -> Result<()> {
    let context = Device::new()?.open()?;
    let domain = context.alloc_pd()?;
    let queue = context.create_cq(count as u32 + 1)?;
    let memory = Memory::new(&domain, LARGE)?;
    let remote = memory.remote()?;
    let prepared = prepare(&domain, &queue, &queue, count as u32)?;
    let own = prepared.endpoint();
    let mut pair = prepared.handshake(own).map_err(|e| e.error)?;
    let mut times = Vec::new();
    let repeat = (1000 / count).max(1);
    for _ in 0..rounds() {
        let start = Instant::now();
        for _ in 0..repeat {
            for _ in 0..count {
                // SAFETY: as above.
                unsafe { pair.post_write(&memory.region, ..SMALL, remote, 0)? };
            }
            for _ in 0..count {
                poll(&queue)?;
            }
        }
        times.push(start.elapsed().as_secs_f64() * 1e6 / (repeat * count) as f64);
    }
    println!("| {count} requests under way | | | {:.1} us |", median(&times));
    Ok(())
}

/// The processor's time that this process has used.
pub(crate) fn used() -> Duration {
    // SAFETY: all zeros is a valid value, and the call fills it.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let time = |time: libc::timeval| {
        Duration::from_secs(time.tv_sec as u64) + Duration::from_micros(time.tv_usec as u64)
    };
    time(usage.ru_utime) + time(usage.ru_stime)
}

pub(crate) fn idle() -> Result<()> {
    let contexts: Vec<_> = (0..10).map(|_| Ok(Device::new()?.open()?)).collect::<Result<_>>()?;
    std::thread::sleep(Duration::from_millis(100));
    let before = used();
    std::thread::sleep(Duration::from_secs(1));
    let used = used() - before;
    println!(
        "\n{} idle devices used {} us of a processor in a second.",
        contexts.len(),
        used.as_micros()
    );
    Ok(())
}
