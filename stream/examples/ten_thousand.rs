//! Ten thousand streams between two processes, on shared receives: `ulimit -n 11000; ten_thousand [STREAMS]` starts a server,
//! connects them, measures what an idle end takes of memory, sends a message there and back on each, all at once, and closes
//! them.

use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use ibverbs_software::Device;
use ibverbs_stream::Hub;
use ibverbs_stream::tokio::{Listener, Stream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Connections that are made at a time.
const SIDE_BY_SIDE: usize = 32;

/// The bytes of memory that the process has.
fn resident() -> Result<usize> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).ok_or("no VmRSS")?;
    let kib: usize = line.split_whitespace().nth(1).ok_or("no number")?.parse()?;
    Ok(kib * 1024)
}

/// How many KiB of memory an idle end has: what the process has taken since it had `before` bytes, divided by `count`.
fn idle_end(before: usize, count: usize) -> Result<f64> {
    let kib = resident()?.saturating_sub(before) as f64 / count as f64 / 1024.0;
    // Memory that the process has once counts only if there are few ends.
    assert!(count < 1000 || kib <= 8.0, "an idle end has {kib:.1} KiB, more than 8");
    Ok(kib)
}

fn hub(device: &Device, count: usize) -> Result<Hub> {
    let builder = Hub::builder(&Arc::new(device.open()?)).chunk(4096).receives(4).sends(2);
    Ok(builder.shared_receives(512).max_connections(count as u32).build()?)
}

/// The server's process. It prints its address, accepts `count` streams, prints the memory of an idle end, and echoes until every
/// client has shut down.
async fn serve(count: usize) -> Result<()> {
    let device = Device::new()?;
    let hub = hub(&device, count)?;
    let listener = Listener::bind(&hub, "127.0.0.1:0").await?;
    say(listener.local_addr()?)?;
    let before = resident()?;
    let mut accepted = Vec::with_capacity(count);
    while accepted.len() < count {
        accepted.push(listener.accept().await?.0);
    }
    say(format_args!("{:.1}", idle_end(before, count)?))?;
    let echoes: Vec<_> = accepted
        .into_iter()
        .map(|mut stream| {
            tokio::spawn(async move {
                let mut bytes = [0; 64];
                while let len @ 1.. = stream.read(&mut bytes).await? {
                    stream.write_all(&bytes[..len]).await?;
                }
                stream.shutdown().await
            })
        })
        .collect();
    for echo in echoes {
        echo.await??;
    }
    Ok(())
}

/// Writes a line, at once also to a pipe.
fn say(line: impl std::fmt::Display) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

/// Ends the server when the client fails.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1).peekable();
    let serves = arguments.next_if(|argument| argument == "serve").is_some();
    let count = arguments.next().map_or(Ok(10_000), |count| count.parse())?;
    if serves {
        return serve(count).await;
    }
    let program = std::env::current_exe()?;
    let mut command = Command::new(program);
    let server = command.args(["serve", &count.to_string()]).stdout(Stdio::piped()).spawn()?;
    let mut server = Server(server);
    let mut said = BufReader::new(server.0.stdout.take().ok_or("no pipe")?).lines();
    let address: std::net::SocketAddr = said.next().ok_or("the server has ended")??.parse()?;

    let device = Device::new()?;
    let client = hub(&device, count)?;
    let (start, before) = (Instant::now(), resident()?);
    let mut streams = Vec::with_capacity(count);
    while streams.len() < count {
        let more = SIDE_BY_SIDE.min(count - streams.len());
        let connects: Vec<_> = (0..more)
            .map(|_| {
                let client = client.clone();
                tokio::spawn(async move { Stream::connect(&client, address).await })
            })
            .collect();
        for connected in connects {
            streams.push(connected.await??);
        }
    }
    let elapsed = start.elapsed();
    let idle = idle_end(before, count)?;
    let of_server = said.next().ok_or("the server has ended")??;
    println!("{count} streams in {elapsed:?}, {:?} each", elapsed / count as u32);
    println!("an idle end has {idle:.1} KiB, one of the server {of_server} KiB");

    let start = Instant::now();
    let trips: Vec<_> = streams
        .into_iter()
        .enumerate()
        .map(|(index, mut stream)| {
            tokio::spawn(async move {
                let (sent, mut got) = (index.to_ne_bytes(), [0; 8]);
                stream.write_all(&sent).await?;
                stream.read_exact(&mut got).await?;
                assert_eq!(got, sent);
                stream.shutdown().await
            })
        })
        .collect();
    for trip in trips {
        trip.await??;
    }
    println!("a message there and back on each, all at once: {:?}", start.elapsed());
    while client.stats().connections > 0 {
        tokio::task::yield_now().await;
    }
    let status = server.0.wait()?;
    assert!(status.success(), "the server: {status}");
    println!("all closed after {:?}", start.elapsed());
    Ok(())
}
