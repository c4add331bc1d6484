//! The server.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ibverbs::{
    AccessFlags, BufferPool, Channel, ChannelBuilder, Context, MaxRnrRetries, MinRnrTimer,
    PooledBuffer, PreparedAsyncChannel, ProtectionDomain, Reactor,
};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::protocol::{FULL, MAX_MESSAGE};
use crate::store::Store;
use crate::{Accept, Result, session};

/// The most clients at a time, unless the program is told another number.
pub const CLIENTS: u32 = 512;
/// Messages of each client that are received or sent at the same time.
const BUFFERS: u32 = 2;
/// Operations of each client that the device may have at the same time, and so completions.
const SENDS: u32 = 4;
const RECEIVES: u32 = 4;
/// How long clients may take to finish their requests when the server stops.
const GRACE: Duration = Duration::from_secs(10);

/// The settings of the channels of both sides: one request at a time.
pub(crate) fn builder(domain: &Arc<ProtectionDomain<'static>>) -> ChannelBuilder<'static> {
    Channel::builder(domain)
        .max_send_wr(SENDS)
        .max_recv_wr(RECEIVES)
        .max_rnr_retries(MaxRnrRetries::UNLIMITED)
        .min_rnr_timer(MinRnrTimer::SHORTEST)
        .access(AccessFlags::REMOTE_READ)
}

/// What all sessions share.
pub(crate) struct Shared {
    pub(crate) domain: Arc<ProtectionDomain<'static>>,
    pub(crate) reactor: Reactor,
    pub(crate) store: Store,
    pub(crate) requests: AtomicU64,
    clients: AtomicUsize,
    /// Requests in the last second.
    rate: AtomicU64,
    pool: BufferPool,
    preparing: Mutex<()>,
}

impl Shared {
    /// A buffer, once there is one.
    pub(crate) async fn buffer(&self) -> PooledBuffer {
        loop {
            if let Some(buffer) = self.pool.take() {
                return buffer;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// A channel, once there is room: that of a client that has left comes back when its queue pair is destroyed.
    pub(crate) async fn prepare(&self) -> Result<PreparedAsyncChannel> {
        loop {
            {
                let _one_at_a_time = self.preparing.lock();
                if self.reactor.available() >= SENDS + RECEIVES {
                    return Ok(self.reactor.prepare(builder(&self.domain))?);
                }
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    fn report(&self) -> String {
        format!(
            "clients {} keys {} requests {} rate {}\n",
            self.clients.load(Ordering::Relaxed),
            self.store.keys(),
            self.requests.load(Ordering::Relaxed),
            self.rate.load(Ordering::Relaxed),
        )
    }
}

/// Serves clients, at most this number at a time, until `stop` is notified, or the admin socket says "shutdown". Then the
/// clients' requests are finished. The memory for messages and the completion queue are made for that number.
///
/// # Errors
///
/// The device or a listener fails.
pub async fn run(
    context: Context<'static>,
    mut clients: impl Accept,
    admin: Option<TcpListener>,
    stop: Arc<Notify>,
    most_clients: u32,
) -> Result<()> {
    let context = Arc::new(context);
    let domain = Arc::new(ProtectionDomain::new(&context)?);
    let buffers = BUFFERS.saturating_mul(most_clients) as usize;
    let pool = BufferPool::new(&domain, MAX_MESSAGE, buffers, AccessFlags::empty())?;
    let completions = (SENDS + RECEIVES).saturating_mul(most_clients);
    let shared = Arc::new(Shared {
        reactor: Reactor::new(&context, completions)?,
        domain,
        store: Store::default(),
        requests: AtomicU64::new(0),
        clients: AtomicUsize::new(0),
        rate: AtomicU64::new(0),
        pool,
        preparing: Mutex::default(),
    });
    let (stopping, stopped) = watch::channel(false);
    let mut sessions = JoinSet::new();
    let mut others = JoinSet::new();
    let reactor = shared.clone();
    others.spawn(async move { reactor.reactor.run_on_tokio().await.map_err(Into::into) });
    others.spawn(count(shared.clone()));
    if let Some(admin) = admin {
        others.spawn(administrate(shared.clone(), admin, stop.clone()));
    }
    let ended = loop {
        // What comes first in this list is first: the order is not to depend on chance in a simulation.
        tokio::select! {
            biased;
            accepted = clients.accept() => {
                let Ok((mut stream, address)) = accepted else { continue };
                // Only here it grows.
                if shared.clients.load(Ordering::Relaxed) >= most_clients as usize {
                    eprintln!("{address}: refused: there are {most_clients} clients already");
                    sessions.spawn(async move { drop(stream.write_all(&[FULL]).await) });
                    continue;
                }
                shared.clients.fetch_add(1, Ordering::Relaxed);
                let (shared, stopped) = (shared.clone(), stopped.clone());
                sessions.spawn(async move {
                    if let Err(error) = session::serve(shared.clone(), stream, stopped).await {
                        eprintln!("{address}: {error}");
                    }
                    shared.clients.fetch_sub(1, Ordering::Relaxed);
                });
            }
            Some(_) = sessions.join_next() => {}
            Some(ended) = others.join_next() => break ended?,
            () = stop.notified() => break Ok(()),
        }
    };
    drop(clients);
    let _ = stopping.send(true);
    let finished = async { while sessions.join_next().await.is_some() {} };
    timeout(GRACE, finished).await?;
    ended
}

/// Counts the requests of each second.
async fn count(shared: Arc<Shared>) -> Result<()> {
    let mut seconds = interval(Duration::from_secs(1));
    seconds.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut before = 0;
    loop {
        seconds.tick().await;
        let now = shared.requests.load(Ordering::Relaxed);
        shared.rate.store(now - before, Ordering::Relaxed);
        before = now;
    }
}

/// Answers the lines "stats" and "shutdown".
async fn administrate(shared: Arc<Shared>, admin: TcpListener, stop: Arc<Notify>) -> Result<()> {
    loop {
        let Ok((stream, _)) = admin.accept().await else { continue };
        let (shared, stop) = (shared.clone(), stop.clone());
        tokio::spawn(async move { answer(&shared, stream, &stop).await });
    }
}

async fn answer(shared: &Shared, mut stream: TcpStream, stop: &Notify) -> std::io::Result<()> {
    let (input, mut output) = stream.split();
    let mut lines = BufReader::new(input).lines();
    while let Some(line) = lines.next_line().await? {
        let answer = match line.trim() {
            "stats" => shared.report(),
            "shutdown" => {
                stop.notify_one();
                "stopping\n".into()
            }
            _ => "say stats or shutdown\n".into(),
        };
        output.write_all(answer.as_bytes()).await?;
    }
    Ok(())
}
