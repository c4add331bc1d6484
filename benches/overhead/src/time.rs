//! Nanoseconds per operation, for people.
//!
//! On a machine that does other things too, two programs that are timed one after the other differ by
//! more than what is to be seen here. So the contenders of a workload take turns, a millisecond each,
//! in rounds; a ratio is taken within a round, and what is printed is the median over the rounds. (The
//! usual benchmark harnesses time one contender after the other.)

use std::hint::black_box;
use std::time::{Duration, Instant};

use crate::contenders::{Body, Contender, contenders};

const ROUNDS: usize = 101;
/// How long a turn takes, about.
const TURN: Duration = Duration::from_millis(1);
/// What ratios are relative to.
const REFERENCE: &str = "C tuned";

pub(crate) fn time() -> Result<(), String> {
    println!("Nanoseconds per operation, the device included: medians of {ROUNDS} rounds");
    println!("{:<5}{:<18}{:>8}{:>8}", "", "", "ns", "ratio");
    let contenders = contenders();
    for group in contenders.chunk_by(|a, b| a.workload == b.workload) {
        let reference = group.iter().position(|contender| contender.layer == REFERENCE);
        let reference = reference.ok_or_else(|| format!("no {REFERENCE}"))?;
        let mut bodies: Vec<_> = group.iter().map(|contender| (contender.make)()).collect();
        let operations: Vec<_> = bodies.iter_mut().map(calibrate).collect();
        let mut rounds = vec![Vec::with_capacity(ROUNDS); group.len()];
        for round in 0..ROUNDS {
            for turn in 0..group.len() {
                // Another one begins each time.
                let index = (round + turn) % group.len();
                let operations = operations[index];
                let took = run(&mut bodies[index], operations);
                rounds[index].push(took.as_nanos() as f64 / operations as f64);
            }
        }
        for (index, Contender { workload, layer, .. }) in group.iter().enumerate() {
            let pairs = rounds[index].iter().zip(&rounds[reference]);
            let ratio = median(pairs.map(|(ours, theirs)| ours / theirs).collect());
            let workload = if index == 0 { workload } else { "" };
            let ns = median(rounds[index].clone());
            println!("{workload:<5}{layer:<18}{ns:>8.1}{ratio:>8.2}");
        }
    }
    Ok(())
}

/// How many operations take a turn's time.
fn calibrate(body: &mut Body) -> u64 {
    let mut operations = 1024;
    while run(body, operations) < TURN {
        operations *= 2;
    }
    operations
}

fn run(body: &mut Body, operations: u64) -> Duration {
    let start = Instant::now();
    black_box(body(black_box(operations)));
    start.elapsed()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
