//! How cost grows with the work: time and memory by number, size and depth.
//!
//! `growth host` measures this crate alone, on a device made of functions; `growth device NAME` measures
//! a device, with what its driver and the kernel do. Each line of output is a point of a chart:
//! chart, series, x, y, separated by tabs. `script/bench growth` draws them.

mod allocator;
mod device;
mod host;
#[path = "../rig.rs"]
#[allow(dead_code, reason = "shared with the contenders")]
mod rig;

use std::process::ExitCode;
use std::time::Duration;

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

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn least(values: Vec<f64>) -> f64 {
    values.into_iter().fold(f64::INFINITY, f64::min)
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
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
