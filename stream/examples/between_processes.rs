//! Streams between two processes beside TCP, in one run:
//! `cargo run --release -p ibverbs-stream --features tokio --example between_processes [ROUNDS [ROW..]]`.
//!
//! The other process is this program once more. Each round runs every row over both, one after the other, so that what else the
//! machine does hits both. A row has the medians of the times, that of the ratios, and between which values half of the ratios are;
//! then the medians of this process's processor time, of all its threads, in the program and in the kernel.

use std::error::Error;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, hint, mem};

use ibverbs_stream::{Hub, Listener, Stream};
use rustix::time::{ClockId, clock_gettime};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const TRIPS: u32 = 4000;
const LARGE: usize = 64;
const SMALL: usize = 50_000;

const ROWS: [&str; 11] = [
    "64 B there and back, threads",
    "64 B there and back, tasks",
    "1 MiB writes, threads",
    "1 MiB writes, tasks",
    "4 KiB writes, threads",
    "64 B writes, tasks",
    "64 B writes, threads",
    "1 MiB filled and written without a copy, tasks",
    "1 MiB filled and written without a copy, threads",
    "64 B there and back, tasks of two workers",
    "64 B there and back, threads that poll",
];

/// Rows of streams that never sleep, beside TCP's calls that never wait.
fn polls(row: usize) -> bool {
    row == 10
}

/// Rows whose tasks are in a runtime of more than one thread.
fn has_workers(row: usize) -> bool {
    row == 9
}

/// Rows that fill what they write: over TCP in the program's memory, over RDMA in the hub's.
fn fills(row: usize) -> bool {
    matches!(row, 7 | 8)
}

/// Returns a row's work: how many times, and how much is written each time; there and back, or one way.
fn work(row: usize) -> (u32, usize, bool) {
    match row {
        0 | 1 | 9 | 10 => (TRIPS, 64, true),
        2 | 3 | 7 | 8 => (LARGE as u32, 1 << 20, false),
        4 => (SMALL as u32 / 4, 4096, false),
        _ => (SMALL as u32, 64, false),
    }
}

/// The time, and the processor's time of this process.
struct Clocks(Instant, Duration);

impl Clocks {
    fn now() -> Self {
        let used = clock_gettime(ClockId::ProcessCPUTime);
        Self(Instant::now(), Duration::new(used.tv_sec as u64, used.tv_nsec as u32))
    }

    /// Returns both in microseconds, for each of so many operations.
    fn since(&self, count: u32) -> [f64; 2] {
        let Self(now, used) = Self::now();
        [now - self.0, used - self.1].map(|time| time.as_secs_f64() * 1e6 / f64::from(count))
    }
}

/// This side begins.
fn asks(mut stream: impl Read + Write, row: usize) -> Result<[f64; 2]> {
    let (count, size, and_back) = work(row);
    let (mut bytes, start) = (vec![7; size], Clocks::now());
    for round in 0..count {
        if fills(row) {
            bytes.fill(round as u8);
        }
        stream.write_all(&bytes)?;
        if and_back {
            stream.read_exact(&mut bytes)?;
        }
    }
    if !and_back {
        stream.flush()?;
        stream.read_exact(&mut [0])?;
    }
    Ok(start.since(count))
}

fn asks_in_buffers(mut stream: Stream, row: usize) -> Result<[f64; 2]> {
    let (count, size, _) = work(row);
    let start = Clocks::now();
    for round in 0..count {
        let mut left = size;
        while left > 0 {
            let mut buffer = stream.send_buffer()?;
            buffer.set_len(left.min(buffer.capacity()))?;
            buffer.fill(round as u8);
            left -= buffer.len();
            stream.write_owned(buffer)?;
        }
    }
    stream.read_exact(&mut [0])?;
    Ok(start.since(count))
}

fn answers_in_buffers(mut stream: Stream, row: usize) -> Result<()> {
    let (count, size, _) = work(row);
    let mut left = size * count as usize;
    while left > 0 {
        left -= stream.read_owned()?.ok_or("it ends")?.len();
    }
    Ok(stream.write_all(&[1])?)
}

async fn asks_in_buffers_as_task(
    mut stream: ibverbs_stream::tokio::Stream,
    row: usize,
) -> Result<[f64; 2]> {
    let (count, size, _) = work(row);
    let start = Clocks::now();
    for round in 0..count {
        let mut left = size;
        while left > 0 {
            let mut buffer = stream.send_buffer()?;
            buffer.set_len(left.min(buffer.capacity()))?;
            buffer.fill(round as u8);
            left -= buffer.len();
            stream.write_owned(buffer).await?;
        }
    }
    stream.read_exact(&mut [0]).await?;
    Ok(start.since(count))
}

async fn answers_in_buffers_as_task(
    mut stream: ibverbs_stream::tokio::Stream,
    row: usize,
) -> Result<()> {
    let (count, size, _) = work(row);
    let mut left = size * count as usize;
    while left > 0 {
        left -= stream.read_owned().await?.ok_or("it ends")?.len();
    }
    stream.write_all(&[1]).await?;
    Ok(stream.flush().await?)
}

fn answers(mut stream: impl Read + Write, row: usize) -> Result<()> {
    let (count, size, and_back) = work(row);
    let mut bytes = vec![7; if and_back { size } else { 64 << 10 }];
    if and_back {
        for _ in 0..count {
            stream.read_exact(&mut bytes)?;
            stream.write_all(&bytes)?;
        }
        return Ok(());
    }
    let mut left = size * count as usize;
    while left > 0 {
        let most = bytes.len().min(left);
        left -= stream.read(&mut bytes[..most])?.max(1);
    }
    Ok(stream.write_all(&[1])?)
}

async fn asks_as_task(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    row: usize,
) -> Result<[f64; 2]> {
    let (count, size, and_back) = work(row);
    let (mut bytes, start) = (vec![7; size], Clocks::now());
    for round in 0..count {
        if fills(row) {
            bytes.fill(round as u8);
        }
        stream.write_all(&bytes).await?;
        if and_back {
            stream.read_exact(&mut bytes).await?;
        }
    }
    if !and_back {
        stream.flush().await?;
        stream.read_exact(&mut [0]).await?;
    }
    Ok(start.since(count))
}

async fn answers_as_task(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    row: usize,
) -> Result<()> {
    let (count, size, and_back) = work(row);
    let mut bytes = vec![7; if and_back { size } else { 64 << 10 }];
    if and_back {
        for _ in 0..count {
            stream.read_exact(&mut bytes).await?;
            stream.write_all(&bytes).await?;
        }
        return Ok(());
    }
    let mut left = size * count as usize;
    while left > 0 {
        let most = bytes.len().min(left);
        left -= stream.read(&mut bytes[..most]).await?.max(1);
    }
    stream.write_all(&[1]).await?;
    Ok(stream.flush().await?)
}

/// A stream of TCP whose thread never sleeps.
struct Polling(TcpStream);

fn poll<T>(mut call: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match call() {
            Err(error) if error.kind() == ErrorKind::WouldBlock => hint::spin_loop(),
            result => return result,
        }
    }
}

impl Read for Polling {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        poll(|| self.0.read(to))
    }
}

impl Write for Polling {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        poll(|| self.0.write(from))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn hub(device: &ibverbs_software::Device, row: usize) -> Result<Hub> {
    let hub = Hub::builder(&Arc::new(device.open()?)).chunk(64 << 10).max_connections(4);
    Ok(hub.spin(if polls(row) { u32::MAX } else { 0 }).build()?)
}

/// Runs a task.
fn block_on<T: Send + 'static>(
    row: usize,
    task: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    if !has_workers(row) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        return runtime.block_on(task);
    }
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).enable_all().build()?;
    runtime.block_on(runtime.spawn(task))?
}

/// The other process: answers the rows that its input names, each at listeners of its own.
fn child() -> Result<()> {
    let device = ibverbs_software::Device::new()?;
    for line in std::io::stdin().lines() {
        let (row, over_rdma) =
            line?.split_once(' ').map(|(a, b)| (a.parse(), b == "rdma")).ok_or("a row")?;
        let row: usize = row?;
        let hub = hub(&device, row)?;
        if row.is_multiple_of(2) {
            if over_rdma {
                let listener = Listener::bind(&hub, "127.0.0.1:0")?;
                println!("{}", listener.local_addr()?);
                let stream = listener.accept()?.0;
                if fills(row) {
                    answers_in_buffers(stream, row)?;
                } else {
                    answers(stream, row)?;
                }
            } else {
                let listener = TcpListener::bind("127.0.0.1:0")?;
                println!("{}", listener.local_addr()?);
                let stream = listener.accept()?.0;
                stream.set_nodelay(true)?;
                if polls(row) {
                    stream.set_nonblocking(true)?;
                    answers(Polling(stream), row)?;
                } else {
                    answers(stream, row)?;
                }
            }
        } else {
            block_on(row, async move {
                if over_rdma {
                    let listener =
                        ibverbs_stream::tokio::Listener::bind(&hub, "127.0.0.1:0").await?;
                    println!("{}", listener.local_addr()?);
                    let stream = listener.accept().await?.0;
                    if fills(row) {
                        answers_in_buffers_as_task(stream, row).await
                    } else {
                        answers_as_task(stream, row).await
                    }
                } else {
                    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
                    println!("{}", listener.local_addr()?);
                    let stream = listener.accept().await?.0;
                    stream.set_nodelay(true)?;
                    answers_as_task(stream, row).await
                }
            })?;
        }
    }
    Ok(())
}

fn ask(hub: &Hub, row: usize, address: &str, over_rdma: bool) -> Result<[f64; 2]> {
    if row.is_multiple_of(2) {
        if over_rdma {
            let deadline = Instant::now() + Duration::from_secs(10);
            let stream = Stream::connect(hub, address, deadline)?;
            return if fills(row) { asks_in_buffers(stream, row) } else { asks(stream, row) };
        }
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        if polls(row) {
            stream.set_nonblocking(true)?;
            return asks(Polling(stream), row);
        }
        return asks(stream, row);
    }
    let (hub, address) = (hub.clone(), address.to_owned());
    block_on(row, async move {
        if over_rdma {
            let stream = ibverbs_stream::tokio::Stream::connect(&hub, address).await?;
            if fills(row) {
                asks_in_buffers_as_task(stream, row).await
            } else {
                asks_as_task(stream, row).await
            }
        } else {
            let stream = tokio::net::TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            asks_as_task(stream, row).await
        }
    })
}

fn main() -> Result<()> {
    let mut args = env::args().skip(1);
    let first = args.next();
    if first.as_deref() == Some("child") {
        return child();
    }
    let rounds = first.map_or(Ok(11), |rounds| rounds.parse::<usize>())?;
    let rows: Vec<usize> = args.map(|row| row.parse()).collect::<std::result::Result<_, _>>()?;
    let rows = if rows.is_empty() { (0..ROWS.len()).collect() } else { rows };
    let mut other = Command::new(env::current_exe()?)
        .arg("child")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut input = other.stdin.take().ok_or("its input")?;
    let mut output = BufReader::new(other.stdout.take().ok_or("its output")?);
    let device = ibverbs_software::Device::new()?;
    let mut times = [const { [Vec::new(), Vec::new()] }; ROWS.len()];
    for _ in 0..rounds {
        for &row in &rows {
            for (over, times) in times[row].iter_mut().enumerate() {
                let over_rdma = over == 0;
                writeln!(input, "{row} {}", if over_rdma { "rdma" } else { "tcp" })?;
                let mut address = String::new();
                output.read_line(&mut address)?;
                let hub = hub(&device, row)?;
                times.push(ask(&hub, row, address.trim(), over_rdma)?);
            }
        }
    }
    drop(input);
    other.wait()?;
    println!(
        "| two processes | us | TCP | ratio | half of them | client's processor | TCP |\n\
         |---|---:|---:|---:|---:|---:|---:|"
    );
    for row in rows {
        let [ours, theirs] = mem::take(&mut times[row]);
        let ratios = ours.iter().zip(&theirs).map(|(ours, theirs)| ours[0] / theirs[0]).collect();
        let part = |all: &[[f64; 2]], which: usize| all.iter().map(|times| times[which]).collect();
        let columns = [part(&ours, 0), part(&theirs, 0), ratios, part(&ours, 1), part(&theirs, 1)];
        let [ours, theirs, ratios, used, theirs_used] = columns.map(|mut all: Vec<f64>| {
            all.sort_by(f64::total_cmp);
            all
        });
        let at = |all: &[f64], part: usize| all[part * (all.len() - 1) / 4];
        println!(
            "| {} | {:.2} | {:.2} | {:.2} | {:.2} to {:.2} | {:.2} | {:.2} |",
            ROWS[row],
            at(&ours, 2),
            at(&theirs, 2),
            at(&ratios, 2),
            at(&ratios, 1),
            at(&ratios, 3),
            at(&used, 2),
            at(&theirs_used, 2)
        );
    }
    Ok(())
}
