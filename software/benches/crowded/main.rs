//! How programs wait on a crowded machine: calls of 32 bytes between two processes over the software device, beside TCP and
//! UDP, while 0, 2 and 4 other processes never stop: `script/bench crowded`.
//!
//! And WRITEs to a program that waits for them by looking at its memory, by packets and by the initiator alone.
//!
//! All kinds of calls are measured in turns within one run, in alternating order, so that other work on the machine falls on all of
//! them. Compare the ratios: the figures themselves are those of the machine. The servers and the spinners are this program
//! again.

mod clients;
mod plot;
mod servers;

use std::error::Error;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

type Result<T = ()> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Names the part that a child process of this program plays.
const PART: &str = "IBVERBS_SOFTWARE_BENCH_PART";
const SPINNER: &str = "spinner";
const SPINNERS: [usize; 3] = [0, 2, 4];
const CALLS: usize = 1500;
/// Where a call may take the slices of two processes.
const FEW_CALLS: usize = 200;
/// The bytes of a call, and of its answer.
const SIZE: usize = 32;
/// A call that takes longer, in microseconds, is late.
const LATE: f64 = 200.0;

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Reactor,
    TokioTcp,
    Blocking,
    Tcp,
    Udp,
    Writes,
    OneSided,
}

const KINDS: [Kind; 5] = [Kind::Reactor, Kind::TokioTcp, Kind::Blocking, Kind::Tcp, Kind::Udp];
/// Their server never sleeps, so each is measured alone.
const LOOKING: [Kind; 2] = [Kind::Writes, Kind::OneSided];

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Reactor => "futures",
            Self::TokioTcp => "tokio's TCP",
            Self::Blocking => "blocking",
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
            Self::Writes => "WRITEs",
            Self::OneSided => "WRITEs, one-sided",
        }
    }

    /// The kind that it replaces.
    fn compared_with(self) -> Option<Self> {
        match self {
            Self::Reactor => Some(Self::TokioTcp),
            Self::Blocking => Some(Self::Tcp),
            _ => None,
        }
    }
}

/// A child process, killed when this is dropped.
struct Process(Child);

impl Process {
    fn start(part: &str) -> Result<Self> {
        let mut program = Command::new(std::env::current_exe()?);
        Ok(Self(program.env(PART, part).stdout(Stdio::piped()).spawn()?))
    }

    /// The port that a server listens at, which is its first line.
    fn port(&mut self) -> Result<u16> {
        let lines = BufReader::new(self.0.stdout.take().ok_or("no output")?).lines();
        let line = lines.into_iter().next().ok_or("the server has ended")??;
        Ok(line.trim().parse()?)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The latencies of some calls, in microseconds.
type Client = Box<dyn FnMut(usize) -> Result<Vec<f64>>>;

/// The measurements of one kind.
struct Row {
    kind: Kind,
    median: f64,
    p99: f64,
    mean: f64,
    late_a_second: f64,
}

impl Row {
    fn new(kind: Kind, mut times: Vec<f64>) -> Self {
        times.sort_by(f64::total_cmp);
        let (count, all) = (times.len() as f64, times.iter().sum::<f64>());
        let at = |part: f64| times[((count - 1.0) * part) as usize];
        let late = times.iter().filter(|&&time| time > LATE).count() as f64;
        let (median, p99) = (at(0.5), at(0.99));
        Self { kind, median, p99, mean: all / count, late_a_second: late * 1e6 / all }
    }
}

fn measure(kinds: &[Kind], rounds: usize) -> Result<Vec<Row>> {
    let mut all = Vec::new();
    for &kind in kinds {
        let mut server = Process::start(kind.name())?;
        let client = clients::connect(kind, server.port()?)?;
        all.push((kind, server, client, Vec::new()));
    }
    for round in 0..=rounds {
        let mut order: Vec<_> = all.iter_mut().collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for (kind, _, client, times) in order {
            let found = client(if LOOKING.contains(kind) { FEW_CALLS } else { CALLS })?;
            // The first round warms up.
            if round > 0 {
                times.extend(found);
            }
        }
    }
    Ok(all.into_iter().map(|(kind, _, _, times)| Row::new(kind, times)).collect())
}

fn main() -> Result {
    match std::env::var(PART) {
        Ok(part) if part == SPINNER => loop {
            std::hint::spin_loop();
        },
        Ok(part) => {
            let kind = KINDS
                .into_iter()
                .chain(LOOKING)
                .find(|kind| kind.name() == part)
                .ok_or("which server?")?;
            return servers::serve(kind);
        }
        Err(_) => {}
    }
    let rounds = std::env::var("IBVERBS_SOFTWARE_BENCH_ROUNDS").ok();
    let rounds = rounds.and_then(|n| n.parse().ok()).unwrap_or(4);
    println!(
        "| spinners | calls over | median us | p99 us | mean us | late a second | median, mean, late: times TCP |"
    );
    println!("|---:|---|---:|---:|---:|---:|---|");
    let mut measured = Vec::new();
    for spinners in SPINNERS {
        let _spinners: Vec<_> =
            (0..spinners).map(|_| Process::start(SPINNER)).collect::<Result<_>>()?;
        let mut rows = measure(&KINDS, rounds)?;
        for kind in LOOKING {
            rows.extend(measure(&[kind], rounds)?);
        }
        for row in &rows {
            let Row { kind, median, p99, mean, late_a_second } = row;
            let other =
                kind.compared_with().and_then(|other| rows.iter().find(|row| row.kind == other));
            let ratios = other.map_or(String::new(), |other| {
                format!(
                    "{:.2}, {:.2}, {:.2}",
                    median / other.median,
                    mean / other.mean,
                    late_a_second / other.late_a_second.max(1.0)
                )
            });
            let name = kind.name();
            println!(
                "| {spinners} | {name} | {median:.1} | {p99:.0} | {mean:.1} | {late_a_second:.0} | {ratios} |"
            );
        }
        measured.push((spinners, rows));
    }
    // cargo itself gives "--bench".
    match std::env::args().skip(1).find(|argument| argument.ends_with(".svg")) {
        Some(file) => Ok(std::fs::write(file, plot::svg(&measured))?),
        None => Ok(()),
    }
}
