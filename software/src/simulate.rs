//! Programs on tokio in simulations that a seed repeats: tokio's timers and the network's virtual time are one clock.

use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::time::{Instant, Sleep, advance, sleep_until};

use crate::network::{Network, START, Simulation};
use crate::transport::events;
use crate::transport::timers::Time;

/// The resolution of tokio's timers, in nanoseconds.
const TICK: Time = 1_000_000;

/// A simulation that takes longer, in its own time, does not end.
const LONGEST: Duration = Duration::from_secs(3600);

/// Runs a program on tokio that uses devices on a simulated [`Network`], in virtual time.
///
/// `body`, and the tasks that it spawns, run on one thread, on a runtime of tokio's whose clock is the network's: nothing
/// sleeps, and while all tasks wait, time jumps to the next timer of tokio's or the next event of the network, whichever is
/// earlier. So [`tokio::time`] and [`Network::now`] agree, and a packet arrives between two timers as its delay says. The
/// `run_on_tokio` of `ibverbs`' reactor works as usual.
///
/// The same seed gives the same run: the same packets at the same times, and the same order of tasks. For that, the program
/// uses no other threads, no sockets and no real time; its `tokio::select!` are `biased`, and it iterates over no
/// `HashMap`, since both are seeded by the operating system otherwise.
///
/// The seed's network loses nothing: [`Network::set_conditions`] makes it worse. It must not be
/// [driven](Network::drive_in_background) otherwise.
///
/// ```
/// use std::time::Duration;
///
/// let took = ibverbs_software::simulate(7, async |network| {
///     let device = network.device().unwrap();
///     tokio::time::sleep(Duration::from_secs(60)).await;
///     drop(device);
///     network.now()
/// });
/// assert_eq!(took, Duration::from_secs(60));
/// ```
///
/// # Panics
///
/// If `body` does, or has not ended after an hour of virtual time; the seed is then printed. Within another runtime.
pub fn simulate<T>(seed: u64, body: impl AsyncFnOnce(Network) -> T) -> T {
    let network = Network::builder().seed(seed).manual().build();
    network.0.set_driven();
    let driver = Arc::new(Driver {
        network: network.0.clone(),
        start: OnceLock::new(),
        state: Mutex::default(),
    });
    let (parking, unparked) = (driver.clone(), driver.clone());
    let runtime = Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .on_thread_park(move || parking.before_park())
        .on_thread_unpark(move || {
            unparked.follow();
        })
        .build()
        .unwrap_or_else(|e| panic!("a runtime for the simulation: {e}"));
    let _seed = Seed(seed);
    let result = runtime.block_on(async {
        driver.start.get_or_init(Instant::now);
        let mut body = pin!(body(network));
        std::future::poll_fn(|cx| {
            driver.state().root = Some(cx.waker().clone());
            let polled = body.as_mut().poll(cx);
            let is_over = driver.elapsed().is_some_and(|elapsed| elapsed >= LONGEST);
            assert!(!is_over || polled.is_ready(), "the simulation has not ended after an hour");
            polled
        })
        .await
    });
    driver.state().alarm = None;
    result
}

/// Says which seed it was when the simulation panics.
struct Seed(u64);

impl Drop for Seed {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("this repeats it: ibverbs_software::simulate({}, ..)", self.0);
        }
    }
}

/// Lets the network work while all tasks wait.
struct Driver {
    network: Arc<Simulation>,
    /// When the simulation began.
    start: OnceLock<Instant>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Wakes the body. While it is woken, tokio looks at files, and does not let time pass.
    root: Option<Waker>,
    /// The tick of the network's next event.
    alarm: Option<Pin<Box<Sleep>>>,
    /// How many events had been written when tokio last looked at files.
    written: u64,
}

impl Driver {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn elapsed(&self) -> Option<Duration> {
        self.start.get().map(Instant::elapsed)
    }

    /// Sets the network's clock to tokio's; returns the time.
    fn follow(&self) -> Option<Time> {
        let now = START + self.elapsed()?.as_nanos() as Time;
        self.network.set_time(now);
        Some(now)
    }

    /// All tasks wait. Timers of tokio's expire at ticks, so what the network does before the next tick is next.
    fn before_park(&self) {
        let mut state = self.state();
        while let Some(now) = self.follow() {
            let written = events::written();
            let is_over = now > START + LONGEST.as_nanos() as Time;
            if is_over || std::mem::replace(&mut state.written, written) != written {
                state.root.iter().for_each(Waker::wake_by_ref);
                return;
            }
            let next_tick = START + ((now - START) / TICK + 1) * TICK;
            let due = self.network.next_due();
            let Some(due) = due.filter(|&due| due < next_tick) else {
                return self.set_alarm(&mut state, due);
            };
            if due > now {
                pass(Duration::from_nanos(due - now));
            }
            if !self.network.step(due.max(now)) {
                return;
            }
        }
    }

    /// Wakes the thread at the tick before this time, or when the simulation has lasted too long.
    fn set_alarm(&self, state: &mut State, due: Option<Time>) {
        let Some(start) = self.start.get() else { return };
        let last = Duration::from_nanos(TICK) + LONGEST;
        let after = due.map_or(last, |due| Duration::from_nanos((due - START) / TICK * TICK));
        let at = *start + after.min(last);
        if state.alarm.as_ref().is_none_or(|alarm| alarm.deadline() != at) {
            let alarm = state.alarm.insert(Box::pin(sleep_until(at)));
            // It is registered when it is polled.
            let _ = alarm.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        }
    }
}

/// Lets time pass on tokio's clock. The future does so when it is polled, and then yields.
fn pass(time: Duration) {
    let advancing = pin!(advance(time));
    let polled: Poll<()> = advancing.poll(&mut Context::from_waker(Waker::noop()));
    debug_assert!(polled.is_pending(), "it yields once");
}

#[cfg(test)]
mod replication;
#[cfg(test)]
mod tests;
