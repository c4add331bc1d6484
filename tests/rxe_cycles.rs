//! Many connections, one after the other and all at once: they return all resources. To be run by
//! `script/test rxe`, in the machine that `script/vm` starts.

#[path = "support/figures.rs"]
mod figures;
#[path = "support/vm/mod.rs"]
mod vm;

use std::time::{Duration, Instant};

use ibverbs::{Channel, Inline, MemoryRegion, SendWorkRequest, SharedMemoryRegion, TransportError};

use figures::figure;
use vm::channels::{ALL, Side, connect, deadline, nothing_is_left, sides};
use vm::process::{kernel_kib, open_files, pinned_kib, resident_kib};
use vm::{BASELINE, alone, assert_nothing_left, resources, software};

/// The resources of this process and of the kernel.
#[derive(Clone, Copy)]
struct Held {
    resident: u64,
    kernel: u64,
    pinned: u64,
    files: usize,
}

impl Held {
    fn now() -> Self {
        // Memory that the allocator keeps for later is not leaked. SAFETY: it may be called at any time.
        unsafe { libc::malloc_trim(0) };
        Self {
            resident: resident_kib(),
            // Outside of the machine, other programs change it by any amount.
            kernel: if software().is_none() { kernel_kib() } else { 0 },
            pinned: pinned_kib(),
            files: open_files(),
        }
    }

    /// Whether the process has grown since `self` by more than an allocator may keep.
    fn has_grown(&self, now: &Self) -> bool {
        now.resident > self.resident + 1024
    }

    /// Asserts that nothing has grown since `self`, except for what an allocator cannot give back.
    fn assert_flat(self, what: &str) -> String {
        let now = Self::now();
        assert_eq!((now.files, now.pinned), (self.files, self.pinned), "{what}");
        let (before, after) = (self.resident, now.resident);
        assert!(!self.has_grown(&now), "{what}: resident from {before} to {after} KiB");
        // The machine's other programs use the kernel's memory too.
        let grown = now.kernel.saturating_sub(self.kernel);
        assert!(grown <= 16 * 1024, "{what}: the kernel's memory has grown by {grown} KiB");
        format!(
            "resident {before} KiB before, {after} KiB after (bound +1024); {} files open, {} KiB \
             pinned before and after; kernel memory {} to {} KiB",
            now.files, now.pinned, self.kernel, now.kernel
        )
    }
}

/// Sends `bytes` from one to the other, and compares what arrives.
fn transfer(
    one: &mut Channel<'_>,
    two: &mut Channel<'_>,
    source: &MemoryRegion<'_, u8>,
    sink: &mut MemoryRegion<'_, u8>,
) {
    let received = two.scope(|s| {
        let receive = s.post_receive(sink.slice_mut(..)?)?;
        one.until(deadline()).send(source.slice(..)?)?;
        receive.wait_until(deadline()).map(|(_, told)| told.byte_len() as usize)
    });
    assert_eq!(received, Ok(source.len()));
    assert_eq!(source[..], sink[..]);
}

/// Opens the devices, uses them, and closes them.
fn cycle(number: usize) {
    let sides = sides();
    let (mut one, mut two) = connect(sides.0.builder(), sides.1.builder());
    let mut source = MemoryRegion::<u8>::new(&sides.0.domain, 3000).unwrap();
    let mut sink = MemoryRegion::<u8>::new(&sides.1.domain, 3000).unwrap();
    source.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i ^ number) as u8);
    transfer(&mut one, &mut two, &source, &mut sink);
    let shared = SharedMemoryRegion::<u64>::new(&sides.1.domain, 8, ALL).unwrap();
    one.write(Inline(&[number as u8; 8]), shared.remote()).unwrap();
    assert_eq!(shared.read_one(0), Ok(u64::from_ne_bytes([number as u8; 8])));
    // Every other one goes with work in flight.
    if number % 2 == 1 {
        let left = two.scope(|s| {
            std::mem::forget(s.post_receive(sink.slice_mut(..).unwrap()).unwrap());
            Err::<(), _>(())
        });
        assert!(left.is_err());
    }
}

#[test]
fn a_thousand_connections_one_after_the_other() {
    const WARM: usize = 50;
    const CYCLES: usize = 1000;
    let _alone = alone("1,000 cycles", 250);
    (0..WARM).for_each(cycle);
    let mut held = Held::now();
    let start = Instant::now();
    (0..CYCLES).for_each(cycle);
    let took = start.elapsed();
    let now = Held::now();
    if held.has_grown(&now) {
        // Growth can happen once, as when the kernel makes a huge page of a stack. A leak continues.
        eprintln!("resident from {} to {} KiB: once more", held.resident, now.resident);
        held = now;
        (0..CYCLES).for_each(cycle);
    }
    assert_nothing_left("rxe0");
    assert_nothing_left("rxe1");
    let flat = held.assert_flat("1,000 cycles");
    figure(
        "cycles-1000",
        &format!(
            "{CYCLES} times: 2 devices opened, channels connected, a message and a write, every other \
             one dropped with work in flight, all closed: {took:.1?}; {flat}; resources at baseline \
             ({BASELINE})"
        ),
    );
}

/// Pairs of channels that are there at the same time.
fn all_at_once(pairs: usize, sides: &(Side, Side)) -> Duration {
    let mut source = MemoryRegion::<u8>::new(&sides.0.domain, 2000).unwrap();
    let mut sink = MemoryRegion::<u8>::new(&sides.1.domain, 2000).unwrap();
    let mut channels = Vec::new();
    let start = Instant::now();
    for _ in 0..pairs {
        channels.push(connect(sides.0.builder(), sides.1.builder()));
    }
    for device in ["rxe0", "rxe1"] {
        let expected = format!("pd 2 cq {0} qp {0} cm_id 0 mr 1 ctx 1 srq 0", pairs + 1);
        assert_eq!(resources(device), expected);
    }
    for round in 0..2 {
        for (index, (one, two)) in channels.iter_mut().enumerate() {
            source.iter_mut().zip(0..).for_each(|(byte, i)| *byte = (i ^ index ^ round) as u8);
            transfer(one, two, &source, &mut sink);
        }
    }
    // The other way round.
    for (index, (one, two)) in channels.iter_mut().enumerate() {
        let told = one.scope(|s| {
            let receive = s.post_receive(())?;
            two.until(deadline()).run(SendWorkRequest::new(&()).immediate(index as u32))?;
            receive.wait_until(deadline()).map(|(_, told)| told.immediate())
        });
        assert_eq!(told.map_err(TransportError::from), Ok(Some(index as u32)));
    }
    start.elapsed()
}

#[test]
fn five_hundred_queue_pairs_at_once() {
    const PAIRS: usize = 250;
    const ROUNDS: usize = 2;
    let _alone = alone("500 queue pairs", 250);
    let sides = sides();
    // The allocator's free blocks are fragmented at first.
    for _ in 0..2 {
        all_at_once(PAIRS, &sides);
    }
    let held = Held::now();
    // A leak of a kilobyte per queue pair would show.
    let took = [(); ROUNDS].map(|()| all_at_once(PAIRS, &sides)).into_iter().sum::<Duration>();
    let flat = held.assert_flat("500 queue pairs");
    nothing_is_left(sides);
    figure(
        "queue-pairs-500",
        &format!(
            "{} queue pairs open and connected at once, 3 messages over each pair, right to the byte, \
             {ROUNDS} times: {took:.1?}; {flat}; resources at baseline ({BASELINE})",
            2 * PAIRS
        ),
    );
}
