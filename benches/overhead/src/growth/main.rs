//! How cost grows with the work: time and memory by number, size and depth.
//!
//! `growth host` measures this crate alone, on a device made of functions; `growth device NAME` measures
//! a device, with what its driver and the kernel do. Each line of output is a point of a chart:
//! chart, series, x, y, separated by tabs. `script/bench growth` makes charts and tables of them.
//!
//! Machines do other things too: of several runs the shortest counts, which is the one that was
//! disturbed least.

mod allocator;
#[path = "../c.rs"]
#[allow(dead_code, reason = "shared with the contenders")]
mod c;
mod device;
mod host;
#[path = "../reactor.rs"]
#[allow(dead_code, reason = "shared with the contenders")]
mod reactor;
#[path = "../rig.rs"]
#[allow(dead_code, reason = "shared with the contenders")]
mod rig;

use std::error::Error;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use ibverbs::{PreparedQueuePair, QueuePair};

#[global_allocator]
static ALLOCATOR: allocator::Counting = allocator::Counting;

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let result = match arguments[..] {
        ["host"] => host::measure(),
        ["device", name] => device::measure(name),
        _ => {
            eprintln!("usage: growth host | device NAME");
            return ExitCode::FAILURE;
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("growth: {error}");
            ExitCode::FAILURE
        }
    }
}

fn point(chart: &str, series: &str, x: usize, y: f64) {
    println!("{chart}\t{series}\t{x}\t{y:.4}");
}

fn least(values: Vec<f64>) -> f64 {
    values.into_iter().fold(f64::INFINITY, f64::min)
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

fn most(values: Vec<f64>) -> f64 {
    values.into_iter().fold(0.0, f64::max)
}

/// Time to create one more queue pair by the number that exist, and the memory of each. `memory` returns the
/// bytes in use with the given number of queue pairs; from `fewest` on that is meaningful.
fn queue_pairs<'a>(
    [time, memory_of]: [&str; 2],
    fewest: usize,
    mut make: impl FnMut() -> ibverbs::Result<QueuePair<'a>>,
    memory: impl Fn(usize) -> Result<f64, Box<dyn Error>>,
) -> Result<(), Box<dyn Error>> {
    const MOST: usize = 1000;
    const ROUNDS: usize = 5;
    const MORE: usize = 60;
    let counts: Vec<_> = steps(MOST).collect();
    // The lists have room for all, because the heap is measured.
    let room = |len| counts.iter().map(|_| Vec::with_capacity(len)).collect::<Vec<_>>();
    let (mut took, mut bytes) = (room(ROUNDS * MORE), room(ROUNDS));
    // The first one also takes what is allocated once.
    drop(make()?);
    for _ in 0..ROUNDS {
        let mut there = Vec::with_capacity(MOST);
        let before = memory(0)?;
        for (index, &count) in counts.iter().enumerate() {
            while there.len() < count {
                there.push(make()?);
            }
            bytes[index].push((memory(count)? - before) / count as f64);
            for _ in 0..MORE {
                let start = Instant::now();
                let one = make()?;
                took[index].push(micros(start.elapsed()));
                drop(one);
            }
        }
    }
    for ((count, took), bytes) in counts.into_iter().zip(took).zip(bytes) {
        point("queue-pair-time", time, count, least(took));
        if count >= fewest {
            point("queue-pair-bytes", memory_of, count, most(bytes));
        }
    }
    Ok(())
}

/// The time to create a queue pair, to connect it to itself, and to destroy it: three points.
fn connection<'a>(
    series: &str,
    mut build: impl FnMut() -> ibverbs::Result<PreparedQueuePair<'a>>,
) -> ibverbs::Result<()> {
    const ROUNDS: usize = 100;
    const AT_ONCE: usize = 10;
    let mut rounds = [const { Vec::new() }; 3];
    for _ in 0..ROUNDS {
        let start = Instant::now();
        let prepared = (0..AT_ONCE).map(|_| build()).collect::<Result<Vec<_>, _>>()?;
        let created = Instant::now();
        let connect = |one: PreparedQueuePair<'a>| {
            let itself = one.endpoint();
            one.handshake(itself).map_err(|failed| failed.error)
        };
        let connected = prepared.into_iter().map(connect).collect::<Result<Vec<_>, _>>()?;
        let ready = Instant::now();
        drop(connected);
        let steps = [created - start, ready - created, ready.elapsed()];
        for (round, step) in rounds.iter_mut().zip(steps) {
            round.push(micros(step) / AT_ONCE as f64);
        }
    }
    for (step, round) in (1..).zip(rounds) {
        point("connection", series, step, least(round));
    }
    Ok(())
}

/// 1, 3, 10, 30 .. up to and including `most`.
fn steps(most: usize) -> impl Iterator<Item = usize> {
    (0..)
        .flat_map(|power| [10_usize.pow(power), 3 * 10_usize.pow(power)])
        .take_while(move |n| *n <= most)
}

/// 1, 2, 4, 8 .. up to and including `most`.
fn doublings(from: usize, most: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(from), |n| Some(n * 2)).take_while(move |n| *n <= most)
}
