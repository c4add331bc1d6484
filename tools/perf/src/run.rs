//! Carries out the steps of a plan, on either layer and either side.

use std::time::Duration;

use ibverbs::SharedMemoryRegion;

use crate::channel::Safe;
use crate::plan::{ATOMIC_SIZE, Length, Measure, Operation, Plan};
use crate::progress::Progress;
use crate::report::{Row, Samples};
use crate::rig::{Memory, Result};
use crate::verbs::Verbs;
use crate::wire::{Answer, Step, Wire};

/// The longest step of a measurement by time. The clock is checked after each step.
const STRETCH: Duration = Duration::from_secs(2);

/// One of the two layers.
pub(crate) enum Both<'a> {
    Verbs(Verbs<'a>),
    Channel(Safe<'a>),
}

pub(crate) struct Rig<'a> {
    pub(crate) layer: Both<'a>,
    pub(crate) regions: &'a [SharedMemoryRegion<'a, u8>],
    pub(crate) plan: &'a Plan,
}

/// The steps of a measurement together.
#[derive(Default)]
struct Sum {
    messages: u64,
    arrived: u64,
    time: Duration,
}

impl Sum {
    fn add(&mut self, messages: u64, (time, arrived): (Duration, u64)) {
        self.messages += messages;
        self.arrived += arrived;
        self.time += time;
    }
}

impl Both<'_> {
    fn ping_pong(
        &mut self,
        size: u32,
        iterations: u64,
        first: bool,
        mut ready: impl FnMut() -> Result<()>,
        samples: &mut Samples,
        progress: &Progress,
    ) -> Result<Duration> {
        match self {
            Self::Verbs(verbs) => {
                ready()?;
                verbs.ping_pong(size, iterations, first, samples, progress)
            }
            Self::Channel(safe) => {
                safe.ping_pong(size, iterations, first, ready, samples, progress)
            }
        }
    }

    fn one_by_one(
        &mut self,
        size: u32,
        iterations: u64,
        samples: &mut Samples,
        progress: &Progress,
    ) -> Result<Duration> {
        match self {
            Self::Verbs(verbs) => verbs.one_by_one(size, iterations, samples, progress),
            Self::Channel(safe) => safe.one_by_one(size, iterations, samples, progress),
        }
    }

    fn flood(&mut self, size: u32, iterations: u64, progress: &Progress) -> Result<Duration> {
        match self {
            Self::Verbs(verbs) => verbs.flood(size, iterations, progress),
            Self::Channel(safe) => safe.flood(size, iterations, progress),
        }
    }

    fn drain(
        &mut self,
        size: u32,
        iterations: u64,
        mut ready: impl FnMut() -> Result<()>,
    ) -> Result<u64> {
        match self {
            Self::Verbs(verbs) => {
                ready()?;
                verbs.drain(size, iterations)
            }
            Self::Channel(safe) => safe.drain(size, iterations, ready),
        }
    }
}

impl Rig<'_> {
    /// All messages of a step.
    fn total(&self, iterations: u64) -> u64 {
        iterations * u64::from(self.plan.queue_pairs)
    }

    /// Zeroes the memory in which messages are detected and atomics count.
    fn clear(&self, size: u32) -> Result<()> {
        if self.plan.operation.is_atomic()
            || (self.plan.operation, self.plan.measure) == (Operation::Write, Measure::Latency)
        {
            for region in self.regions {
                Memory::of(region, self.plan)?.target.slice(..size as usize)?.zero();
            }
        }
        Ok(())
    }

    /// Checks the memory after atomics: each fetch-and-add has counted.
    fn check(&self, iterations: u64) -> Result<()> {
        let expected = match self.plan.operation {
            Operation::FetchAdd => iterations,
            // Only the first compare-and-swap has found the value that it compares with.
            Operation::CompareSwap => 1,
            _ => return Ok(()),
        };
        for region in self.regions {
            let mut bytes = [0; ATOMIC_SIZE as usize];
            Memory::of(region, self.plan)?.target.read(0, &mut bytes)?;
            let found = u64::from_ne_bytes(bytes);
            if found != expected {
                let operation = self.plan.operation;
                return Err(format!("{operation} has left {found} and not {expected}").into());
            }
        }
        Ok(())
    }

    /// The server's part of a step; returns the number of messages that arrived.
    pub(crate) fn answer(&mut self, size: u32, iterations: u64, wire: &mut Wire) -> Result<u64> {
        self.clear(size)?;
        let mut ready = || Ok(wire.send(&Answer::Yes(()))?);
        let total = self.total(iterations);
        let arrived = match (self.plan.measure, self.plan.operation) {
            (Measure::Latency, Operation::Send | Operation::Write) => {
                let (mut unused, progress) = (Samples::new()?, Progress::hidden());
                let layer = &mut self.layer;
                layer.ping_pong(size, iterations, false, ready, &mut unused, &progress)?;
                total
            }
            (Measure::Bandwidth, Operation::Send) => self.layer.drain(size, iterations, ready)?,
            _ => {
                // The client works on our memory without any action of ours.
                ready()?;
                total
            }
        };
        match wire.step()? {
            Step::Done => self.check(iterations)?,
            step => return Err(format!("the client wants {step:?} before it is done").into()),
        }
        Ok(arrived)
    }

    /// The client's part of a step; returns its time and the number of messages that arrived.
    fn step(
        &mut self,
        size: u32,
        iterations: u64,
        samples: &mut Samples,
        wire: &mut Wire,
        progress: &Progress,
    ) -> Result<(Duration, u64)> {
        self.clear(size)?;
        wire.send(&Step::Run { size, iterations })?;
        wire.answer::<()>()?;
        let layer = &mut self.layer;
        let time = match (self.plan.measure, self.plan.operation) {
            (Measure::Latency, Operation::Send | Operation::Write) => {
                layer.ping_pong(size, iterations, true, || Ok(()), samples, progress)?
            }
            (Measure::Latency, _) => layer.one_by_one(size, iterations, samples, progress)?,
            (Measure::Bandwidth, _) => layer.flood(size, iterations, progress)?,
        };
        wire.send(&Step::Done)?;
        Ok((time, wire.answer()?))
    }

    /// Measures one size. `part` converts a fraction of this size to a fraction of the whole.
    pub(crate) fn measure(
        &mut self,
        size: u32,
        wire: &mut Wire,
        progress: &Progress,
        part: &dyn Fn(f64) -> f64,
    ) -> Result<Row> {
        let plan = self.plan;
        let list = u64::from(plan.list);
        let mut samples = Samples::new()?;
        let mut rate = None;
        if plan.warm_up > 0 {
            progress.stretch(part(0.0), part(0.0), 1);
            let (time, _) = self.step(size, plan.warm_up, &mut Samples::new()?, wire, progress)?;
            rate = Some(plan.warm_up as f64 / time.as_secs_f64());
        }
        let mut sum = Sum::default();
        match plan.length {
            Length::Iterations(iterations) => {
                progress.stretch(part(0.0), part(1.0), self.total(iterations));
                sum.add(
                    self.total(iterations),
                    self.step(size, iterations, &mut samples, wire, progress)?,
                );
            }
            Length::Time(whole) => {
                let fraction = |time: Duration| time.as_secs_f64() / whole.as_secs_f64();
                // Skip a remainder of less than a hundredth of the time.
                while fraction(sum.time) < 0.99 {
                    let left = (whole - sum.time).min(STRETCH);
                    // The rate is only a rough estimate before the first step.
                    let left = if sum.time.is_zero() { left / 10 } else { left };
                    let wanted = rate.map_or(16.0, |rate| rate * left.as_secs_f64()) as u64;
                    let iterations = wanted.next_multiple_of(list).max(list);
                    let (from, to) = (fraction(sum.time), fraction(sum.time + left));
                    progress.stretch(part(from), part(to), self.total(iterations));
                    sum.add(
                        self.total(iterations),
                        self.step(size, iterations, &mut samples, wire, progress)?,
                    );
                    let per_queue_pair = sum.messages as f64 / f64::from(plan.queue_pairs);
                    rate = Some(per_queue_pair / sum.time.as_secs_f64());
                }
            }
        }
        Ok(match plan.measure {
            Measure::Latency => Row::of_latency(plan, size, &samples),
            Measure::Bandwidth => {
                Row::of_bandwidth(plan, size, sum.messages, sum.time, sum.arrived)
            }
        })
    }
}
