//! A reactor on `async-io`, the event loop of smol: nothing here is of tokio. An echo server and its client,
//! each on a software device of its own.
//!
//!   cargo run -p ibverbs-software --example async_smol

use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use async_io::{Async, Timer};
use futures_lite::future::{or, zip};
use ibverbs::tcp::AsyncStream;
use ibverbs::{
    AccessFlags, BufferPool, Channel, ProtectionDomain, Reactor, settings::MaxRnrRetries,
};
use ibverbs_software::Device;

type Failure = Box<dyn std::error::Error>;

const ROUNDS: usize = 1000;

/// A TCP stream of async-io, over which two sides can connect.
struct Stream(Async<TcpStream>);

impl AsyncStream for Stream {
    fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        bytes: &mut [u8],
    ) -> Poll<std::io::Result<usize>> {
        futures_lite::AsyncRead::poll_read(std::pin::Pin::new(&mut &self.0), cx, bytes)
    }

    fn poll_write(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<std::io::Result<usize>> {
        futures_lite::AsyncWrite::poll_write(std::pin::Pin::new(&mut &self.0), cx, bytes)
    }
}

/// One side: its device, and a reactor.
struct Side {
    domain: Arc<ProtectionDomain<'static>>,
    reactor: Reactor,
    pool: BufferPool,
}

impl Side {
    fn new() -> Result<Self, Failure> {
        let context = Arc::new(Device::new()?.open()?);
        let domain = Arc::new(ProtectionDomain::new(&context)?);
        let reactor = Reactor::new(&context, 256)?;
        let pool = BufferPool::new(&domain, 64, 16, AccessFlags::empty())?;
        Ok(Self { domain, reactor, pool })
    }

    /// Runs the reactor until `work` has ended.
    async fn run<T>(&self, work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
        // The descriptor is non-blocking already.
        let file = Async::new_nonblocking(self.reactor.as_fd())?;
        let running = async {
            self.reactor.run(|cx| file.poll_readable(cx)).await?;
            Err("the reactor was stopped".into())
        };
        or(work, running).await
    }

    fn prepare(&self) -> Result<ibverbs::future::PreparedAsyncChannel, Failure> {
        let builder = Channel::builder(&self.domain).max_rnr_retries(MaxRnrRetries::UNLIMITED);
        Ok(self.reactor.prepare(builder)?)
    }
}

async fn serve(side: &Side, listener: Async<TcpListener>) -> Result<(), Failure> {
    let mut stream = Stream(listener.accept().await?.0);
    let (channel, _) = side.prepare()?.accept(&mut stream, b"").await?;
    // So that a message never comes before its receive is posted.
    channel.post_receive(side.pool.take().ok_or("all buffers are in use")?)?;
    let mut buffer = side.pool.take().ok_or("all buffers are in use")?;
    for _ in 0..ROUNDS {
        let (message, _) = channel.receive(buffer).await?;
        (buffer, _) = channel.send(message).await?;
    }
    Ok(())
}

async fn ask(side: &Side, address: std::net::SocketAddr) -> Result<Duration, Failure> {
    let mut stream = Stream(Async::<TcpStream>::connect(address).await?);
    let (channel, _) = side.prepare()?.connect(&mut stream, b"").await?;
    // So that a message never comes before its receive is posted.
    channel.post_receive(side.pool.take().ok_or("all buffers are in use")?)?;
    let mut buffer = side.pool.take().ok_or("all buffers are in use")?;
    let start = Instant::now();
    for round in 0..ROUNDS {
        buffer.clear();
        buffer.extend_from_slice(&round.to_le_bytes())?;
        let (sent, _) = channel.send(buffer).await?;
        (buffer, _) = channel.receive(sent).await?;
        if buffer[..] != round.to_le_bytes() {
            return Err(format!("another answer in round {round}").into());
        }
    }
    Ok(start.elapsed())
}

fn main() -> Result<(), Failure> {
    let (server, client) = (Side::new()?, Side::new()?);
    let listener = Async::<TcpListener>::bind(([127, 0, 0, 1], 0))?;
    let address = listener.get_ref().local_addr()?;
    let both = async {
        let (served, asked) =
            zip(server.run(serve(&server, listener)), client.run(ask(&client, address))).await;
        served?;
        asked
    };
    let time_out = async {
        Timer::after(Duration::from_secs(60)).await;
        Err("it takes longer than a minute".into())
    };
    let elapsed = async_io::block_on(or(both, time_out))?;
    println!("{ROUNDS} messages there and back in {elapsed:?}");
    Ok(())
}
