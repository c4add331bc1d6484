//! Connects by IP address in an asynchronous program: an echo server of any number of clients, on tokio.
//!
//! ```text
//! cargo run --features rdmacm,tokio --example async_cm -- 0.0.0.0:7471             # on one machine
//! cargo run --features rdmacm,tokio --example async_cm -- 10.77.0.1:7471 hello you # on another
//! ```
//!
//! With an address alone it listens there, and echoes what each peer sends. With messages it connects to
//! that address, sends them, and prints what comes back.
//!
//! All receives are posted before the connection is there, so it works on iWARP too.

use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, process};

use ibverbs::future::{PreparedAsyncChannel, SpawnedReactor};
use ibverbs::rdmacm::{Connection, ConnectionRequest, Listener, PendingConnection, Route};
use ibverbs::{
    AccessFlags, AsyncChannel, BufferPool, Channel, Context, ErrorKind, ProtectionDomain, Reactor,
};
use tokio::time::{sleep, timeout};

const TIME: Duration = Duration::from_secs(10);

/// How long to wait when a resource has run out.
const PAUSE: Duration = Duration::from_millis(100);

/// The maximum length of a message.
const LONGEST: usize = 4096;

/// The receives that each channel keeps posted.
const RECEIVES: usize = 4;

type Outcome<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

#[allow(dead_code, reason = "a test calls the two sides")]
fn main() -> Outcome {
    let mut arguments = env::args().skip(1);
    let Some(address) = arguments.next() else {
        eprintln!("usage: async_cm ADDRESS:PORT [MESSAGE...]");
        process::exit(2);
    };
    let (address, messages) = (address.parse()?, arguments.collect::<Vec<_>>());
    let _software = ibverbs_software::register_if_none()?; // a device, if the machine has none
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        if messages.is_empty() { listen(address).await } else { connect(address, &messages).await }
    })
}

/// The device, with what its channels share.
struct Side {
    domain: Arc<ProtectionDomain<'static>>,
    reactor: SpawnedReactor,
    pool: BufferPool,
}

impl Side {
    fn new(context: Context<'static>) -> Outcome<Self> {
        let context = Arc::new(context);
        let domain = Arc::new(ProtectionDomain::new(&context)?);
        let pool = BufferPool::new(&domain, LONGEST, 1024, AccessFlags::empty())?;
        let reactor = Reactor::new(&context, 4096)?.spawn_on_tokio();
        Ok(Self { domain, reactor, pool })
    }

    fn prepare(&self, port: u8) -> Outcome<PreparedAsyncChannel> {
        let builder = Channel::builder(&self.domain).port(port).max_recv_wr(RECEIVES as u32 + 1);
        Ok(self.reactor.prepare(builder)?)
    }

    /// Posts the receives, then connects or accepts.
    async fn establish(
        &self,
        mut pending: PendingConnection<AsyncChannel>,
    ) -> Outcome<Connection<AsyncChannel>> {
        for _ in 0..RECEIVES {
            let buffer = self.pool.take().ok_or("all buffers are in use")?;
            pending.queue_pair().post_receive(buffer)?;
        }
        Ok(timeout(TIME, pending.start(b"")?.finish_on_tokio()).await??)
    }
}

pub(crate) async fn connect(address: SocketAddr, messages: &[String]) -> Outcome {
    let route = Route::to(address).resolve_on_tokio(Instant::now() + TIME).await?;
    let side = Side::new(route.open_device()?)?;
    let prepared = side.prepare(route.port())?;
    let mut channel = side.establish(route.prepare(prepared).map_err(|(.., error)| error)?).await?;
    for message in messages {
        let bytes = message.as_bytes().get(..LONGEST).unwrap_or(message.as_bytes());
        let buffer = side.pool.take_from(bytes)?.ok_or("all buffers are in use")?;
        let (buffer, _) = channel.send(buffer).await?;
        let (echo, _) = timeout(TIME, channel.receive(buffer)).await??;
        println!("{}", String::from_utf8_lossy(&echo));
    }
    channel.shutdown().await;
    channel.disconnect()?;
    Ok(())
}

pub(crate) async fn listen(address: SocketAddr) -> Outcome {
    let mut listener = Listener::bind(address)?;
    println!("listening at {}", listener.local_addr().unwrap_or(address));
    // The objects of the device on which the first client comes. A server on several devices would keep some
    // for each.
    let mut side: Option<Arc<Side>> = None;
    loop {
        let request = match listener.next_on_tokio().await {
            // Such as too many open files.
            Err(error) if error.kind() == ErrorKind::Resource => {
                println!("{error}");
                sleep(PAUSE).await;
                continue;
            }
            request => request?,
        };
        let opened = match &side {
            Some(side) => Ok(side.clone()),
            None => request.open_device().map_err(Into::into).and_then(Side::new).map(Arc::new),
        };
        let side = match opened {
            Ok(opened) => side.insert(opened).clone(),
            // The peer is rejected.
            Err(error) => {
                println!("{:?}: {error}", request.peer_addr());
                continue;
            }
        };
        tokio::spawn(async move {
            let peer = request.peer_addr();
            match echo(&side, request).await {
                Ok(count) => println!("{peer:?} has sent {count} messages"),
                Err(error) => println!("{peer:?}: {error}"),
            }
        });
    }
}

/// Echoes until the peer disconnects.
async fn echo(side: &Side, request: ConnectionRequest) -> Outcome<u64> {
    let prepared = side.prepare(request.port())?;
    let connection =
        side.establish(request.prepare(prepared).map_err(|(.., error)| error)?).await?;
    let (channel, mut control) = connection.into_parts();
    let mut count = 0;
    loop {
        let buffer = side.pool.take().ok_or("all buffers are in use")?;
        let receive = channel.receive(buffer);
        tokio::select! {
            biased;
            received = receive => match received {
                Ok((message, _)) => {
                    channel.send(message).await?;
                    count += 1;
                }
                // On iWARP the end of the connection ends the receives.
                Err(flushed) if flushed.error.is_consequence() => return Ok(count),
                Err(failed) => return Err(failed.into()),
            },
            // On InfiniBand and RoCE the queue pair does not notice that by itself.
            event = control.event_on_tokio() => {
                event?;
                control.disconnect()?;
                return Ok(count);
            }
        }
    }
}
