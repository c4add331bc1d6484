//! Requests of many lengths over many streams between two processes, beside tokio's TCP, in one run:
//! `cargo run --release -p ibverbs-stream --features tokio --example many_streams [ROUNDS [CONNECTIONS..]]`.
//!
//! The other process is this program once more. Both have one thread of tokio, with a task for each connection. A connection has one
//! request under way: its length and so many bytes, which the server sends back. Each round runs every number of connections over both,
//! one after the other, so that what else the machine does hits both. A row has the medians of the requests a second, that of
//! the ratios, and between which values half of the ratios are; then the same of the processor time that a request takes in both
//! processes, of all their threads, in the program and in the kernel.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ibverbs_software::Device;
use ibverbs_stream::Hub;
use rustix::time::{ClockId, clock_gettime};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::task::JoinSet;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Requests of each measurement, on all connections together.
const REQUESTS: usize = 96_000;

/// The lengths of requests in turn. Most are short, and two have most of the bytes.
const LENGTHS: [usize; 12] = [64, 100, 256, 64, 700, 120, 1500, 64, 4000, 300, 64, 16_000];

fn processor() -> Duration {
    let used = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(used.tv_sec as u64, used.tv_nsec as u32)
}

async fn answers(mut stream: impl AsyncRead + AsyncWrite + Unpin) -> Result<()> {
    let mut bytes = vec![0; 4 + LENGTHS.into_iter().max().unwrap_or(0)];
    // The client closes between two requests.
    while stream.read(&mut bytes[..1]).await? == 1 {
        stream.read_exact(&mut bytes[1..4]).await?;
        let length = u32::from_be_bytes(bytes[..4].try_into()?) as usize;
        let request = bytes.get_mut(4..4 + length).ok_or("a length that no client sends")?;
        stream.read_exact(request).await?;
        stream.write_all(&bytes[..4 + length]).await?;
        stream.flush().await?;
    }
    Ok(())
}

async fn asks(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    first: usize,
    count: usize,
) -> Result<()> {
    let longest = 4 + LENGTHS.into_iter().max().unwrap_or(0);
    let (mut bytes, mut answer) = (vec![7; longest], vec![0; longest]);
    for &length in LENGTHS.iter().cycle().skip(first % LENGTHS.len()).take(count) {
        bytes[..4].copy_from_slice(&(length as u32).to_be_bytes());
        stream.write_all(&bytes[..4 + length]).await?;
        stream.flush().await?;
        stream.read_exact(&mut answer[..4 + length]).await?;
    }
    assert_eq!(bytes[..68], answer[..68]);
    Ok(())
}

async fn all(mut tasks: JoinSet<Result<()>>) -> Result<()> {
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    Ok(())
}

/// The hub and the runtime of either process.
struct Side {
    hub: Hub,
    runtime: tokio::runtime::Runtime,
}

impl Side {
    fn new() -> Result<Self> {
        let device = Device::new()?;
        let builder = Hub::builder(&Arc::new(device.open()?)).chunk(16 << 10).sends(4);
        Ok(Self {
            hub: builder.shared_receives(2048).max_connections(4096).build()?,
            runtime: tokio::runtime::Builder::new_current_thread().enable_all().build()?,
        })
    }
}

/// Accepts `count` connections, answers until the client closes them, and returns the processor's time since they were made.
async fn serve(hub: &Hub, count: usize, over_rdma: bool) -> Result<Duration> {
    let mut tasks = JoinSet::new();
    if over_rdma {
        let listener = ibverbs_stream::tokio::Listener::bind(hub, "127.0.0.1:0").await?;
        println!("{}", listener.local_addr()?);
        while tasks.len() < count {
            tasks.spawn(answers(listener.accept().await?.0));
        }
    } else {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        println!("{}", listener.local_addr()?);
        while tasks.len() < count {
            let stream = listener.accept().await?.0;
            stream.set_nodelay(true)?;
            tasks.spawn(answers(stream));
        }
    }
    let before = processor();
    all(tasks).await?;
    Ok(processor() - before)
}

/// Makes `count` connections by `connect`, sends all requests, and returns the time and the processor's time that they took.
async fn measure<S: AsyncRead + AsyncWrite + Unpin + Send + 'static>(
    count: usize,
    connect: impl AsyncFn() -> Result<S>,
) -> Result<[Duration; 2]> {
    let mut streams = Vec::with_capacity(count);
    while streams.len() < count {
        streams.push(connect().await?);
    }
    let (start, before) = (Instant::now(), processor());
    let mut tasks = JoinSet::new();
    for (first, stream) in streams.into_iter().enumerate() {
        tasks.spawn(asks(stream, first, REQUESTS.div_ceil(count)));
    }
    all(tasks).await?;
    Ok([start.elapsed(), processor() - before])
}

async fn ask(
    hub: &Hub,
    count: usize,
    address: SocketAddr,
    over_rdma: bool,
) -> Result<[Duration; 2]> {
    if over_rdma {
        let connect = async || Ok(ibverbs_stream::tokio::Stream::connect(hub, address).await?);
        return measure(count, connect).await;
    }
    let connect = async || {
        let stream = tokio::net::TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(stream)
    };
    measure(count, connect).await
}

/// The other process: for each line of its input, the number of connections and what they are, it says where it listens, and then the
/// microseconds of its processor.
fn child() -> Result<()> {
    let side = Side::new()?;
    for line in std::io::stdin().lines() {
        let line = line?;
        let (count, over) = line.split_once(' ').ok_or("a number, and what over")?;
        let used = side.runtime.block_on(serve(&side.hub, count.parse()?, over == "rdma"))?;
        println!("{}", used.as_micros());
    }
    Ok(())
}

/// The medians of a number of connections.
fn row(count: usize, ours: &[[f64; 2]], theirs: &[[f64; 2]]) {
    let sorted = |values: Vec<f64>| {
        let mut values = values;
        values.sort_by(f64::total_cmp);
        move |quarter: usize| values[quarter * (values.len() - 1) / 4]
    };
    let [rates, used] = [0, 1].map(|which| {
        let part = |all: &[[f64; 2]]| sorted(all.iter().map(|one| one[which]).collect());
        let ratios = ours.iter().zip(theirs).map(|(ours, theirs)| ours[which] / theirs[which]);
        (part(ours)(2), part(theirs)(2), sorted(ratios.collect()))
    });
    println!(
        "| {count} | {:.0} | {:.0} | {:.2} | {:.2} to {:.2} | {:.1} | {:.1} | {:.2} | {:.2} to {:.2} |",
        rates.0,
        rates.1,
        rates.2(2),
        rates.2(1),
        rates.2(3),
        used.0,
        used.1,
        used.2(2),
        used.2(1),
        used.2(3)
    );
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let first = arguments.next();
    if first.as_deref() == Some("child") {
        return child();
    }
    let rounds = first.map_or(Ok(7), |rounds| rounds.parse::<usize>())?.max(1);
    let mut counts =
        arguments.map(|count| count.parse()).collect::<std::result::Result<Vec<usize>, _>>()?;
    if counts.is_empty() {
        counts = vec![1, 10, 100, 1000];
    }
    let mut other = Command::new(std::env::current_exe()?)
        .arg("child")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut input = other.stdin.take().ok_or("its input")?;
    let mut said = BufReader::new(other.stdout.take().ok_or("its output")?).lines();
    let mut next = || -> Result<String> { Ok(said.next().ok_or("the other process has ended")??) };
    let side = Side::new()?;
    let mut found = vec![[const { Vec::new() }; 2]; counts.len()];
    for _ in 0..rounds {
        for (&count, found) in counts.iter().zip(&mut found) {
            for (over, found) in ["rdma", "tcp"].into_iter().zip(found) {
                writeln!(input, "{count} {over}")?;
                let address = next()?.parse()?;
                let asked = ask(&side.hub, count, address, over == "rdma");
                let [elapsed, used] = side.runtime.block_on(asked)?;
                let requests = (REQUESTS.div_ceil(count) * count) as f64;
                let both = used.as_secs_f64() * 1e6 + next()?.parse::<f64>()?;
                found.push([requests / elapsed.as_secs_f64(), both / requests]);
            }
        }
    }
    drop(input);
    other.wait()?;
    println!(
        "| connections | requests a second | TCP | ratio | half of them | processors, us a request | TCP | ratio | half of them |\n\
         |---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    );
    for (&count, [ours, theirs]) in counts.iter().zip(&found) {
        row(count, ours, theirs);
    }
    Ok(())
}
