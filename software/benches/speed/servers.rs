//! A server of one thread that sends messages of 64 bytes back, on the device and over TCP, by the number of its
//! connections. Each connection has one message under way.
//!
//! What is measured is the processor's time of the server's process: its own, the device's thread's, and the kernel's for
//! it. So other programs on the machine count for little. Clients are in this process, and take turns.

mod clients;
mod device;
mod tcp;

use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::future::{Local, Locked};

use super::cost::used;
use super::{CHILD, Result, median, rounds};
use clients::Clients;

/// The first word of what a child is asked for, if it is a server.
pub(crate) const SERVER: &str = "server";
const CONNECTIONS: [usize; 4] = [1, 10, 100, 1000];
/// How long clients send in each round.
const TURN: Duration = Duration::from_millis(200);
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Tokens,
    Futures,
    FuturesOfOneThread,
    Epoll,
    Tokio,
}

/// With the word that asks a child for it, and its name in tables. The first one is compared with each.
const KINDS: [(Kind, &str, &str); 5] = [
    (Kind::Tokens, "tokens", "loop"),
    (Kind::Futures, "futures", "futures"),
    (Kind::FuturesOfOneThread, "local", "futures, one thread"),
    (Kind::Epoll, "epoll", "TCP, epoll"),
    (Kind::Tokio, "tokio", "TCP, tokio"),
];

/// A server: it prints its port, and then, for each line that it gets, the processor's time that it has used.
pub(crate) fn child(words: &str) -> Result<()> {
    let fields: Vec<&str> = words.split(' ').collect();
    let &[SERVER, kind, connections] = fields.as_slice() else { return Err(words.into()) };
    let connections = connections.parse()?;
    let kind = KINDS.iter().find(|(_, word, _)| *word == kind).ok_or("what server?")?.0;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    println!("{}", listener.local_addr()?.port());
    thread::spawn(|| {
        for _ in std::io::stdin().lines().map_while(|line| line.ok()) {
            println!("{}", used().as_nanos());
        }
        std::process::exit(0);
    });
    match kind {
        Kind::Tokens => device::tokens(&listener, connections),
        Kind::Futures => device::futures::<Locked<_>>(listener, connections),
        Kind::FuturesOfOneThread => device::futures::<Local<_>>(listener, connections),
        Kind::Epoll => tcp::epoll(&listener, connections),
        Kind::Tokio => tcp::tokio(listener),
    }
}

/// A server in a process of its own, with clients in this one.
struct Server {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    clients: Clients,
}

impl Server {
    fn start(kind: Kind, word: &str, connections: usize) -> Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .env(CHILD, format!("{SERVER} {word} {connections}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let input = process.stdin.take().ok_or("its input")?;
        let mut output = BufReader::new(process.stdout.take().ok_or("its output")?);
        let port = read_number(&mut output)?;
        let over_tcp = matches!(kind, Kind::Epoll | Kind::Tokio);
        let clients = Clients::connect(over_tcp, u16::try_from(port)?, connections)?;
        Ok(Self { process, input, output, clients })
    }

    fn used(&mut self) -> Result<Duration> {
        writeln!(self.input)?;
        Ok(Duration::from_nanos(read_number(&mut self.output)?))
    }

    /// Messages per second of the server's processor, and per second.
    fn turn(&mut self) -> Result<[f64; 2]> {
        let (before, start) = (self.used()?, Instant::now());
        let answered = self.clients.ask(TURN)? as f64;
        let (time, used) = (start.elapsed(), self.used()? - before);
        Ok([answered / used.as_secs_f64(), answered / time.as_secs_f64()])
    }
}

impl Drop for Server {
    /// The child ends when its input is closed.
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn read_number(output: &mut impl BufRead) -> Result<u64> {
    let mut line = String::new();
    output.read_line(&mut line)?;
    Ok(line.trim().parse()?)
}

/// The table, and the same as points of a chart.
pub(crate) fn servers() -> Result<()> {
    let names = KINDS.map(|(_, _, name)| name);
    println!(
        "\n| connections | thousands of messages per second of the server's processor: {} | loop beside epoll | futures \
         beside tokio | all by the clock: loop beside epoll |\n|---:|{}---:|---:|---:|",
        names.join(" | "),
        "---:|".repeat(names.len())
    );
    let mut points = String::new();
    for connections in CONNECTIONS {
        let start = |(kind, word, _)| Server::start(kind, word, connections);
        let mut servers = KINDS.into_iter().map(start).collect::<Result<Vec<_>>>()?;
        let mut turns = Vec::new();
        // The first round warms up.
        for round in 0..=rounds() {
            let turn = servers.iter_mut().map(Server::turn).collect::<Result<Vec<_>>>()?;
            turns.extend((round > 0).then_some(turn));
        }
        let middle = |of: &dyn Fn(&[[f64; 2]]) -> f64| {
            median(&turns.iter().map(|turn| of(turn)).collect::<Vec<_>>())
        };
        let mut line = format!("| {connections} |");
        for (kind, name) in names.into_iter().enumerate() {
            let rate = middle(&|turn| turn[kind][0]) / 1000.;
            line += &format!(" {rate:.1} |");
            points += &format!("servers\t{name}\t{connections}\t{rate:.2}\n");
        }
        let beside = |one: Kind, other: Kind, by: usize| {
            middle(&|turn| turn[one as usize][by] / turn[other as usize][by])
        };
        println!(
            "{line} {:.2} | {:.2} | {:.2} |",
            beside(Kind::Tokens, Kind::Epoll, 0),
            beside(Kind::Futures, Kind::Tokio, 0),
            beside(Kind::Tokens, Kind::Epoll, 1)
        );
    }
    print!("\n{points}");
    Ok(())
}
