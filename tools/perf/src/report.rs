//! The results: figures, their table, and JSON.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use ibverbs::device::{Counter, Counters, ProcessResources};
use serde::Serialize;

use crate::plan::{Measure, Operation, Plan};
use crate::rig::Result;

/// Times of operations, to 0.1 %.
///
/// While the clock runs, it only stores time stamps; it adds their differences to the histogram in batches.
#[derive(Debug)]
pub(crate) struct Samples {
    histogram: hdrhistogram::Histogram<u64>,
    moments: Vec<Instant>,
}

/// The number of time stamps in a batch.
const MOMENTS: usize = 1 << 16;

impl Samples {
    pub(crate) fn new() -> Result<Self> {
        // The histogram holds 1 ns to more than the longest wait.
        let histogram = hdrhistogram::Histogram::new_with_bounds(1, 100_000_000_000, 3)?;
        Ok(Self { histogram, moments: Vec::with_capacity(MOMENTS) })
    }

    /// Records the begin of the first operation.
    pub(crate) fn begin(&mut self) -> Instant {
        let now = Instant::now();
        self.moments.clear();
        self.moments.push(now);
        now
    }

    /// Records the end of an operation, which is the begin of the next.
    #[inline]
    pub(crate) fn mark(&mut self) -> Instant {
        let now = Instant::now();
        self.moments.push(now);
        if self.moments.len() < MOMENTS { now } else { self.turn() }
    }

    #[cold]
    fn turn(&mut self) -> Instant {
        self.end();
        // The time of the counting belongs to no operation.
        self.begin()
    }

    /// Counts the remaining time stamps after the last operation.
    pub(crate) fn end(&mut self) {
        for pair in self.moments.windows(2) {
            self.histogram.saturating_record((pair[1] - pair[0]).as_nanos() as u64);
        }
        self.moments.clear();
    }
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    /// The size of the messages, in bytes.
    pub(crate) size: u32,
    /// The total of all queue pairs.
    pub(crate) iterations: u64,
    #[serde(flatten)]
    pub(crate) figures: Figures,
}

#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum Figures {
    Latency(Latency),
    Bandwidth(Bandwidth),
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Latency {
    pub(crate) min_us: f64,
    pub(crate) p50_us: f64,
    pub(crate) p90_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) p99_9_us: f64,
    pub(crate) max_us: f64,
    pub(crate) mean_us: f64,
    pub(crate) stdev_us: f64,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Bandwidth {
    pub(crate) mib_per_second: f64,
    pub(crate) million_packets_per_second: f64,
    pub(crate) seconds: f64,
    /// Messages of UC and UD sends that did not arrive.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) lost: Option<u64>,
}

impl Row {
    pub(crate) fn of_latency(plan: &Plan, size: u32, samples: &Samples) -> Self {
        let histogram = &samples.histogram;
        // A round trip is two messages.
        let trips = match plan.operation {
            Operation::Send | Operation::Write => 2.0,
            _ => 1.0,
        };
        let us = |nanoseconds: f64| nanoseconds / 1e3 / trips;
        let at = |quantile| us(histogram.value_at_quantile(quantile) as f64);
        let figures = Figures::Latency(Latency {
            min_us: us(histogram.min() as f64),
            p50_us: at(0.5),
            p90_us: at(0.9),
            p99_us: at(0.99),
            p99_9_us: at(0.999),
            max_us: us(histogram.max() as f64),
            mean_us: us(histogram.mean()),
            stdev_us: us(histogram.stdev()),
        });
        Self { size, iterations: histogram.len(), figures }
    }

    /// A row of the number of messages, the time, and the number of messages that arrived.
    pub(crate) fn of_bandwidth(
        plan: &Plan,
        size: u32,
        messages: u64,
        time: Duration,
        arrived: u64,
    ) -> Self {
        let seconds = time.as_secs_f64();
        let rate = messages as f64 / seconds;
        let figures = Figures::Bandwidth(Bandwidth {
            mib_per_second: rate * f64::from(size) / f64::from(1 << 20),
            million_packets_per_second: rate / 1e6,
            seconds,
            lost: plan.can_lose().then(|| messages.saturating_sub(arrived)),
        });
        Self { size, iterations: messages, figures }
    }
}

/// The device, the plan and the results.
#[derive(Debug, Serialize)]
pub(crate) struct Report<'a> {
    pub(crate) device: &'a str,
    pub(crate) port: u8,
    /// The path MTU, in bytes.
    pub(crate) mtu: u32,
    #[serde(flatten)]
    pub(crate) plan: &'a Plan,
    pub(crate) results: Vec<Row>,
    pub(crate) counted: Option<Counted>,
}

/// The resources of the client during the measurement, and its port's counters: all traffic of the port, that of
/// other programs included.
#[derive(Debug, Serialize)]
pub(crate) struct Counted {
    queue_pairs: usize,
    memory_regions: usize,
    pinned_bytes: u64,
    /// The counters that have changed, by the driver's names.
    counters: BTreeMap<String, u64>,
    #[serde(skip)]
    known: Vec<(Counter, u64)>,
}

impl Counted {
    pub(crate) fn new(held: &ProcessResources, moved: &Counters) -> Self {
        let known = Counter::ALL.iter().filter_map(|&counter| Some((counter, moved.get(counter)?)));
        Self {
            queue_pairs: held.queue_pairs,
            memory_regions: held.memory_regions,
            pinned_bytes: held.pinned_bytes,
            counters: moved.iter().map(|(name, value)| (name.to_owned(), value)).collect(),
            known: known.collect(),
        }
    }
}

impl std::fmt::Display for Counted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { queue_pairs, memory_regions, pinned_bytes, known, .. } = self;
        write!(
            f,
            "held: {queue_pairs} queue pairs, {memory_regions} memory regions, {pinned_bytes} bytes pinned\n\
             counted on the port:"
        )?;
        for (index, (counter, value)) in known.iter().enumerate() {
            write!(f, "{} {value} {counter}", if index == 0 { "" } else { "," })?;
        }
        if known.is_empty() { write!(f, " nothing") } else { Ok(()) }
    }
}

impl Report<'_> {
    pub(crate) fn json(&self) -> Result<String> {
        Ok(serde_json::to_string_pretty(self)?)
    }

    /// The settings of the measurement, in one paragraph.
    pub(crate) fn heading(&self) -> String {
        let Self { device, port, mtu, plan: p, .. } = self;
        let wait = if p.events { "events" } else { "polling" };
        let mut text = format!(
            "{} {} on {}, {} layer: device {device}, port {port}, MTU {mtu}, {wait}",
            p.operation, p.measure, p.transport, p.layer
        );
        if p.inline > 0 {
            let _ = write!(text, ", inline up to {} B", p.inline);
        }
        if p.measure == Measure::Bandwidth {
            let _ = write!(
                text,
                "\nqueue pairs {}, send queue {}, list {}, a completion per {}",
                p.queue_pairs, p.send_depth, p.list, p.moderation
            );
            // The other settings depend on the operation.
            let _ = match p.operation {
                Operation::Send => write!(text, ", receive queue {}", p.receive_depth),
                Operation::Write => Ok(()),
                _ => write!(text, ", outstanding {}", p.outstanding),
            };
        }
        text
    }

    /// The first line of the table.
    pub(crate) fn columns(&self) -> String {
        match self.plan.measure {
            Measure::Latency => format!(
                "{:>8} {:>10} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}",
                "bytes",
                "iterations",
                "min us",
                "p50 us",
                "p90 us",
                "p99 us",
                "p99.9 us",
                "max us",
                "mean us",
                "stdev us"
            ),
            Measure::Bandwidth => {
                let lost = if self.plan.can_lose() { "lost" } else { "" };
                format!(
                    "{:>8} {:>10} {:>10} {:>10} {lost:>10}",
                    "bytes", "iterations", "MiB/s", "Mpps"
                )
                .trim_end()
                .to_owned()
            }
        }
    }
}

impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:>8} {:>10}", self.size, self.iterations)?;
        match &self.figures {
            Figures::Latency(l) => {
                let all = [
                    l.min_us, l.p50_us, l.p90_us, l.p99_us, l.p99_9_us, l.max_us, l.mean_us,
                    l.stdev_us,
                ];
                all.iter().try_for_each(|us| write!(f, " {us:>9.2}"))
            }
            Figures::Bandwidth(b) => {
                let (mib, mpps) = (b.mib_per_second, b.million_packets_per_second);
                write!(f, " {mib:>10.3} {mpps:>10.6}")?;
                b.lost.map_or(Ok(()), |lost| write!(f, " {lost:>10}"))
            }
        }
    }
}
