//! Nanoseconds per operation, for people: by criterion, in pairs.
//!
//! On a machine that does other things too, two programs that are timed one after the other differ by
//! more than what is to be seen here. So each sample is a pair: a turn of a contender and a turn of tuned
//! C, one right after the other. Criterion chooses how long turns are, takes the samples, and estimates
//! medians and how sure they are, of two things:
//!
//! - the time of an operation;
//! - the ratio of the two turns of a pair. What slows the machine down for a while slows both, and cancels.
//!
//! Tuned C is paired with tuned C as well: what lies between that ratio and 1 is noise.
//!
//! `script/bench time` runs this.

mod c;
mod channel;
mod contenders;
mod events;
mod loops;
mod many;
mod memory;
mod prepared;
mod rails;
mod reactor;
mod rig;
mod rpc;
mod senders;
mod server;
mod server_futures;
mod server_loop;
mod verbs;

use std::error::Error;
use std::fs::File;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use criterion::measurement::{Measurement, ValueFormatter, WallTime};
use criterion::{BenchmarkId, Criterion, SamplingMode, Throughput};

use contenders::{Body, Contender, contenders};
use rig::WINDOW_OPERATIONS;

/// The contender that ratios are relative to.
const REFERENCE: &str = "C tuned";
/// The number of pairs of each contender.
const PAIRS: usize = 200;
/// How long they take together, so that a turn takes 2 or 3 ms.
const WHOLE: Duration = Duration::from_secs(1);
/// The names of a contender's estimates in criterion's folder.
const TIME: &str = "time";
const RATIO: &str = "ratio";

fn main() -> Result<(), Box<dyn Error>> {
    let home = std::env::var_os("CRITERION_HOME");
    let home = PathBuf::from(home.ok_or("CRITERION_HOME is not set; script/bench sets it")?);
    let contenders = contenders(false);
    let mut times = criterion(WallTime);
    let mut ratios = criterion(Ratio);
    for group in contenders.chunk_by(|a, b| a.workload == b.workload) {
        let reference = group.iter().find(|contender| contender.layer == REFERENCE);
        let reference = reference.ok_or_else(|| format!("no {REFERENCE}"))?;
        // Results that exist at the end were measured in this run.
        let folder = home.join(reference.workload);
        if folder.exists() {
            std::fs::remove_dir_all(folder)?;
        }
        for contender in group {
            let mut pair = Pair::new(contender, reference);
            measure(&mut times, TIME, &mut pair, |ours, _, _| ours);
            measure(&mut ratios, RATIO, &mut pair, |ours, theirs, iterations| {
                iterations * ours.as_secs_f64() / theirs.as_secs_f64()
            });
        }
    }
    show(&contenders, &home)
}

fn criterion<M: Measurement>(measurement: M) -> Criterion<M> {
    Criterion::default()
        .with_measurement(measurement)
        .sample_size(PAIRS)
        .warm_up_time(WHOLE / 10)
        .measurement_time(WHOLE)
        .nresamples(10_000)
        .without_plots()
        .configure_from_args()
}

/// Lets criterion measure what `value` computes from the times of two turns of the same number of iterations.
fn measure<M: Measurement>(
    criterion: &mut Criterion<M>,
    name: &str,
    pair: &mut Pair<'_>,
    value: impl Fn(Duration, Duration, f64) -> M::Value,
) {
    let Contender { workload, layer, .. } = *pair.ours.contender;
    let mut group = criterion.benchmark_group(workload);
    // All pairs are alike, because turns of different lengths have no median.
    group.sampling_mode(SamplingMode::Flat);
    group.bench_function(BenchmarkId::new(layer, name), |bencher| {
        bencher.iter_custom(|iterations| {
            let (ours, theirs) = pair.run(iterations);
            value(ours, theirs, iterations as f64)
        });
    });
}

struct Side<'a> {
    contender: &'a Contender,
    body: Body,
}

impl<'a> Side<'a> {
    fn new(contender: &'a Contender) -> Self {
        Self { contender, body: (contender.make)() }
    }

    /// How long this many operations take. More of them may be executed, since they come in windows.
    fn run(&mut self, iterations: u64) -> Duration {
        let operations = iterations.next_multiple_of(WINDOW_OPERATIONS);
        let start = Instant::now();
        let sum = (self.body)(black_box(operations));
        let took = start.elapsed();
        assert_eq!(sum, self.contender.expected(operations), "completions are missing");
        took.mul_f64(iterations as f64 / operations as f64)
    }
}

struct Pair<'a> {
    ours: Side<'a>,
    theirs: Side<'a>,
    /// The turn that comes first: each one's, alternately.
    is_ours_first: bool,
}

impl<'a> Pair<'a> {
    fn new(contender: &'a Contender, reference: &'a Contender) -> Self {
        Self { ours: Side::new(contender), theirs: Side::new(reference), is_ours_first: true }
    }

    fn run(&mut self, iterations: u64) -> (Duration, Duration) {
        self.is_ours_first = !self.is_ours_first;
        if self.is_ours_first {
            let ours = self.ours.run(iterations);
            (ours, self.theirs.run(iterations))
        } else {
            let theirs = self.theirs.run(iterations);
            (self.ours.run(iterations), theirs)
        }
    }
}

/// The time of a contender in a pair beside tuned C: each iteration counts for that.
struct Ratio;

impl Measurement for Ratio {
    type Intermediate = ();
    type Value = f64;

    fn start(&self) {}

    fn end(&self, (): ()) -> f64 {
        unreachable!("there is no ratio of one turn: all is measured by iter_custom")
    }

    fn add(&self, a: &f64, b: &f64) -> f64 {
        a + b
    }

    fn zero(&self) -> f64 {
        0.0
    }

    fn to_f64(&self, value: &f64) -> f64 {
        *value
    }

    fn formatter(&self) -> &dyn ValueFormatter {
        self
    }
}

impl ValueFormatter for Ratio {
    fn scale_values(&self, _typical: f64, _values: &mut [f64]) -> &'static str {
        "x C"
    }

    fn scale_throughputs(
        &self,
        _typical: f64,
        _throughput: &Throughput,
        _values: &mut [f64],
    ) -> &'static str {
        "x C"
    }

    fn scale_for_machines(&self, _values: &mut [f64]) -> &'static str {
        "x C"
    }
}

/// One table of criterion's results: medians, and the 95 % bounds of the ratio's.
fn show(contenders: &[Contender], home: &Path) -> Result<(), Box<dyn Error>> {
    let mut shown = "";
    for Contender { workload, layer, .. } in contenders {
        let folder = home.join(workload).join(layer);
        if !folder.exists() {
            continue; // it was filtered out
        }
        if shown.is_empty() {
            println!("Medians of {PAIRS} pairs, the device included");
            println!("{:<35}{:>9}{:>8}   to tuned C (95 %)", "", "ns", "ratio");
        }
        let first = if shown == *workload { "" } else { workload };
        shown = workload;
        let [ns, ..] = median(&folder.join(TIME))?;
        let [ratio, low, high] = median(&folder.join(RATIO))?;
        println!("{first:<11}{layer:<24}{ns:>9.1}{ratio:>8.3}   {low:.3} to {high:.3}");
    }
    Ok(())
}

/// The median in a folder of criterion's, and its bounds.
fn median(folder: &Path) -> Result<[f64; 3], Box<dyn Error>> {
    let estimates: serde_json::Value =
        serde_json::from_reader(File::open(folder.join("new/estimates.json"))?)?;
    let median = &estimates["median"];
    let bounds = &median["confidence_interval"];
    let number = |value: &serde_json::Value| value.as_f64().ok_or("criterion has no median");
    Ok([
        number(&median["point_estimate"])?,
        number(&bounds["lower_bound"])?,
        number(&bounds["upper_bound"])?,
    ])
}
