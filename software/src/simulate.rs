//! Programs on tokio in simulations that a seed repeats: tokio's timers and the network's virtual time are one clock.

mod clock;
mod host;
mod hosts;
mod process;
mod streams;
mod wire;
mod world;

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};

use self::clock::HostClock;
pub use self::host::Host;
use self::hosts::Inner;
use self::process::Process;
pub use self::streams::{SimulatedListener, SimulatedStream};
pub use self::world::World;
use crate::link::Time;
use crate::network::{Network, START};

/// A simulation that takes longer, in its own time, does not end.
const LONGEST: Time = 600_000_000_000;

/// Runs programs on tokio that use devices on a simulated [`Network`], in virtual time.
///
/// `body` makes [hosts](World::host) and starts programs on them. Each host has a runtime of tokio's, devices, a clock,
/// and streams like TCP's, by which the programs find each other; it crashes and starts again when `body` says so. All
/// runs on one thread, and nothing sleeps: while all tasks wait, time jumps to the next packet, or the next millisecond at
/// which a timer of tokio's may be due. So [`tokio::time`] and [`Network::now`] agree, and a packet arrives between two
/// timers as its delay says. The `run_on_tokio` of `ibverbs`' reactor works as usual. `body` is on a runtime of
/// its own, which never crashes, and may use devices itself.
///
/// The same seed gives the same run: the same packets at the same times, and the same order of tasks. For that, the
/// programs use no other threads, no sockets and no real time; their `tokio::select!` are `biased`, they
/// iterate over no `HashMap`, and no two tasks wait for one `tokio::sync::watch`, `broadcast` or `Notify`, since the
/// operating system seeds all these otherwise.
///
/// The seed's network loses nothing: [`Network::set_conditions`] makes it worse. It must not be
/// [driven](Network::drive_in_background) otherwise.
///
/// ```
/// use std::time::Duration;
/// use tokio::io::{AsyncReadExt, AsyncWriteExt};
///
/// for seed in 0..10 {
///     ibverbs_software::simulate(seed, async |world| {
///         let (server, client) = (world.host("server"), world.host("client"));
///         let mut listener = server.listen(7).unwrap();
///         server.start(async move {
///             let (mut stream, _) = listener.accept().await.unwrap();
///             stream.write_all(b"hello").await.unwrap();
///         });
///         let mut stream = client.connect((server.address(), 7)).await.unwrap();
///         let mut text = String::new();
///         stream.read_to_string(&mut text).await.unwrap();
///         assert_eq!(text, "hello");
///         tokio::time::sleep(Duration::from_secs(1)).await;
///         server.crash();
///         assert!(client.connect((server.address(), 7)).await.is_err());
///     });
/// }
/// ```
///
/// # Panics
///
/// If `body` does, or a task that [`Host::start`] began, or if `body` has not ended after ten minutes of virtual time; the
/// seed is then printed. Within another runtime.
pub fn simulate<T>(seed: u64, body: impl AsyncFnOnce(World) -> T) -> T {
    let network = Network::builder().seed(seed).manual().build();
    network.0.set_driven();
    let world = World::new(network, seed);
    let _seed = Seed(seed);
    // Drops the tasks: the world holds them, and they hold the world.
    let _end = End(&world.inner);
    let main = Process::new(HostClock::new(), world.inner.now());
    let mut body = Body { future: pin!(body(world.clone())), woken: Arc::new(Woken::default()) };
    let inner = &world.inner;
    loop {
        inner.bury();
        if let Some(result) = body.turn(&main, inner.now()) {
            return result;
        }
        if inner.run_hosts() || main.has_work() || body.woken.is_set() {
            continue;
        }
        if let Some(name) = inner.failed() {
            panic!("a program of {name} panicked");
        }
        let now = inner.now();
        let tick = main.next_tick(now).min(inner.next_tick().unwrap_or(Time::MAX));
        assert!(now < START + LONGEST, "the simulation has not ended after ten minutes");
        inner.happen(tick);
    }
}

/// The future of [`simulate`]'s caller.
struct Body<'a, F> {
    future: Pin<&'a mut F>,
    woken: Arc<Woken>,
}

/// Whether the body is to be polled.
struct Woken {
    is_set: AtomicBool,
    runtime: std::sync::Mutex<Option<Waker>>,
}

impl Default for Woken {
    fn default() -> Self {
        Self { is_set: AtomicBool::new(true), runtime: std::sync::Mutex::default() }
    }
}

impl Woken {
    fn is_set(&self) -> bool {
        self.is_set.load(Ordering::Relaxed)
    }

    fn runtime(&self) -> std::sync::MutexGuard<'_, Option<Waker>> {
        self.runtime.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.is_set.store(true, Ordering::Relaxed);
        self.runtime().iter().for_each(Waker::wake_by_ref);
    }
}

impl<T, F: Future<Output = T>> Body<'_, F> {
    /// Runs it, and the tasks that it has spawned, until all wait.
    fn turn(&mut self, process: &Process, now: Time) -> Option<T> {
        if !self.woken.is_set() && !process.is_due(now) {
            return None;
        }
        let waker = Waker::from(self.woken.clone());
        process.turn(now, |cx| {
            *self.woken.runtime() = Some(cx.waker().clone());
            let is_woken = self.woken.is_set.swap(false, Ordering::Relaxed);
            is_woken.then(|| self.future.as_mut().poll(&mut Context::from_waker(&waker)))
        })
    }
}

/// Says which seed it was when the simulation panics.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            crate::say(format_args!("this repeats it: ibverbs_software::simulate({}, ..)", self.0));
        }
    }
}

/// Ends all hosts.
struct End<'a>(&'a Inner);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

#[cfg(test)]
mod tests;
