//! Measures how long registration takes with one key and with several, which threads make at the same time: see the README.
//!
//!     registration DEVICE [MEGABYTES]

#![forbid(unsafe_code)]

use std::num::NonZero;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::memory::RegionBuffer;
use ibverbs::{AccessFlags, ProtectionDomain, RegionOptions, SharedMemoryRegion};

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

const KEYS: [usize; 3] = [1, 2, 4];
const ROUNDS: usize = 9;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().ok_or("usage: registration DEVICE [MEGABYTES]")?;
    let megabytes = arguments.next().map_or(Ok(256), |number| number.parse::<usize>())?;
    let context = Arc::new(ibverbs::open(&name)?);
    let domain = Arc::new(ProtectionDomain::new(&context)?);
    let mut times = [const { (Vec::new(), Vec::new()) }; KEYS.len()];
    for _ in 0..ROUNDS {
        // In turns, so that other work meets all of them.
        for (&keys, (populating, registering)) in KEYS.iter().zip(&mut times) {
            let (one, other) = register(&domain, megabytes << 20, keys)?;
            populating.push(one);
            registering.push(other);
        }
    }
    for (keys, (mut populating, mut registering)) in KEYS.into_iter().zip(times) {
        populating.sort_unstable();
        registering.sort_unstable();
        let (one, other) = (populating[ROUNDS / 2], registering[ROUNDS / 2]);
        println!("{megabytes} MiB, {keys} keys: brought in {one:.1?}, registered {other:.1?}");
    }
    Ok(())
}

/// Brings memory in, then registers it with `keys` keys. Returns both times.
fn register(
    domain: &Arc<ProtectionDomain<'static>>,
    len: usize,
    keys: usize,
) -> Result<(Duration, Duration)> {
    let options = RegionOptions::from(AccessFlags::REMOTE_WRITE);
    let threads = thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN);
    let began = Instant::now();
    let mut buffers = Vec::new();
    for _ in 0..keys {
        let mut buffer = RegionBuffer::new(len / keys, options)?;
        buffer.populate(threads, |_| {})?;
        buffers.push(buffer);
    }
    let brought_in = began.elapsed();
    let began = Instant::now();
    let regions = thread::scope(|scope| {
        let register = |buffer| SharedMemoryRegion::<u8>::from_buffer(domain, buffer, options);
        let threads: Vec<_> =
            buffers.into_iter().map(|buffer| scope.spawn(move || register(buffer))).collect();
        let regions = threads.into_iter().map(|thread| thread.join().expect("it does not panic"));
        regions.collect::<ibverbs::Result<Vec<_>>>()
    })?;
    let registered = began.elapsed();
    drop(regions);
    Ok((brought_in, registered))
}
