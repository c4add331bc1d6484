//! The server.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use ibverbs::{Context, ProtectionDomain, TransportError};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Handle};
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::protocol::FULL;
use crate::shared::{Core, Shared};
use crate::store::Store;
use crate::{Accept, Result, session};

/// The most clients at a time, unless the program is told another number.
pub const CLIENTS: u32 = 512;
/// How long to wait after the listener has failed.
const PAUSE: Duration = Duration::from_millis(100);
/// How long clients may take to finish their requests when the server stops.
const GRACE: Duration = Duration::from_secs(10);

/// All cores. Their reactors, and so the threads, end with it.
struct Cores(Vec<Arc<Core>>);

impl Cores {
    /// Starts this number of threads with a core each; if it is 0, one core in the caller's runtime. `others` gets a task
    /// per core, which ends when its reactor does.
    fn start(
        shared: &Shared,
        threads: usize,
        most_clients: u32,
        others: &mut JoinSet<Result<()>>,
    ) -> Result<Self> {
        let mut cores = Self(Vec::new());
        if threads == 0 {
            let core = Core::new(shared, most_clients, Handle::current())?;
            cores.0.push(core.clone());
            others.spawn(async move { Ok(core.reactor.run_on_tokio().await?) });
        }
        let clients = most_clients.div_ceil(u32::try_from(threads)?.max(1));
        for _ in 0..threads {
            let runtime = Builder::new_current_thread().enable_all().build()?;
            let core = Core::new(shared, clients, runtime.handle().clone())?;
            cores.0.push(core.clone());
            let (tell, ended) = oneshot::channel();
            thread::spawn(move || {
                let _ = tell.send(runtime.block_on(core.reactor.run_on_tokio()));
            });
            others.spawn(async move { Ok(ended.await??) });
        }
        Ok(cores)
    }

    /// The one with the fewest clients.
    fn next(&self) -> Result<Arc<Core>> {
        let fewest = self.0.iter().min_by_key(|core| core.clients.load(Ordering::Relaxed));
        Ok(fewest.ok_or("there is no core")?.clone())
    }
}

impl Drop for Cores {
    fn drop(&mut self) {
        self.0.iter().for_each(|core| core.reactor.stop(TransportError::Stopped));
    }
}

impl Shared {
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
/// clients' requests are finished. The memory for messages and the completion queues are made for that number.
///
/// `threads` threads have a reactor each, and a part of the clients. If it is 0, all are in the caller's runtime, as a
/// simulation needs it.
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
    threads: usize,
) -> Result<()> {
    let context = Arc::new(context);
    let domain = Arc::new(ProtectionDomain::new(&context)?);
    let shared = Arc::new(Shared {
        domain,
        store: Store::default(),
        requests: AtomicU64::new(0),
        clients: AtomicUsize::new(0),
        rate: AtomicU64::new(0),
    });
    let (stopping, stopped) = watch::channel(false);
    let mut sessions = JoinSet::new();
    let mut others = JoinSet::new();
    let cores = Cores::start(&shared, threads, most_clients, &mut others)?;
    others.spawn(count(shared.clone()));
    if let Some(admin) = admin {
        others.spawn(administrate(shared.clone(), admin, stop.clone()));
    }
    let ended = loop {
        // The first branch that is ready wins: the order is not to depend on chance in a simulation.
        tokio::select! {
            biased;
            accepted = clients.accept() => {
                let (mut stream, address) = match accepted {
                    Ok(accepted) => accepted,
                    Err(error) => {
                        eprintln!("{error}");
                        // Too many files may be open. Accept again when a session has ended, unless the server is stopped.
                        tokio::select! {
                            Some(_) = sessions.join_next() => {}
                            () = tokio::time::sleep(PAUSE) => {}
                            () = stop.notified() => break Ok(()),
                        }
                        continue;
                    }
                };
                // The count grows only here.
                if shared.clients.load(Ordering::Relaxed) >= most_clients as usize {
                    eprintln!("{address}: refused: there are {most_clients} clients already");
                    sessions.spawn(async move { drop(stream.write_all(&[FULL]).await) });
                    continue;
                }
                let core = cores.next()?;
                let (shared, stopped, runtime) =
                    (shared.clone(), stopped.clone(), core.runtime.clone());
                for count in [&shared.clients, &core.clients] {
                    count.fetch_add(1, Ordering::Relaxed);
                }
                let session = async move {
                    let serving = session::serve(shared.clone(), core.clone(), stream, stopped);
                    if let Err(error) = serving.await {
                        eprintln!("{address}: {error}");
                    }
                    // The core has room before another client is accepted.
                    for count in [&core.clients, &shared.clients] {
                        count.fetch_sub(1, Ordering::Relaxed);
                    }
                };
                sessions.spawn_on(session, &runtime);
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
        let Ok((stream, _)) = admin.accept().await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
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
