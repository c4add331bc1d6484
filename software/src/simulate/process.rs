//! A runtime of tokio's whose clock is that of a host.

use std::convert::Infallible;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};
use tokio::time::advance;

use super::clock::{HostClock, TICK};
use crate::link::Time;
use crate::transport::events;

pub(super) struct Process {
    runtime: Runtime,
    clock: HostClock,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared(Mutex<State>);

#[derive(Default)]
struct State {
    /// Ends the turn.
    root: Option<Waker>,
    /// All tasks wait.
    is_idle: bool,
    /// How many events had been written when tokio last looked at files.
    seen: u64,
    /// The host's clock when the runtime's last was set.
    shown: Time,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// No task has anything to do. After this, tokio looks at files; it does not let time pass, since the root is woken.
    fn before_park(&self) {
        let mut state = self.state();
        let written = events::written();
        state.is_idle = std::mem::replace(&mut state.seen, written) == written;
        let root = state.root.clone();
        drop(state);
        root.iter().for_each(Waker::wake_by_ref);
    }
}

impl Process {
    pub(super) fn new(clock: HostClock, now: Time) -> Self {
        let shared = Arc::new(Shared::default());
        let parking = shared.clone();
        let runtime = Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .on_thread_park(move || parking.before_park())
            .build()
            .unwrap_or_else(|e| panic!("a runtime for the simulation: {e}"));
        let shown = clock.shows(now) / TICK * TICK;
        // The ticks of both clocks come together.
        shared.state().shown = shown;
        Self { runtime, clock, shared }
    }

    pub(super) fn next_tick(&self, now: Time) -> Time {
        self.clock.next_tick(now)
    }

    /// Whether another runtime has woken a task, or events were written that this one may wait for.
    pub(super) fn has_work(&self) -> bool {
        self.runtime.metrics().global_queue_depth() > 0
            || self.shared.state().seen != events::written()
    }

    /// Whether it has work, or a timer may have expired.
    pub(super) fn is_due(&self, now: Time) -> bool {
        let shown = self.shared.state().shown;
        self.clock.shows(now) / TICK > shown / TICK || self.has_work()
    }

    pub(super) fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// Runs all tasks until they wait.
    pub(super) fn run(&self, now: Time) {
        let _: Option<Infallible> = self.turn(now, |_| None);
    }

    /// Sets the clock, and runs all tasks until they wait. `root` runs among them, until it has a result; `None`: it had
    /// nothing to do.
    pub(super) fn turn<T>(
        &self,
        now: Time,
        mut root: impl FnMut(&mut Context<'_>) -> Option<Poll<T>>,
    ) -> Option<T> {
        let shows = self.clock.shows(now);
        let passed = shows - std::mem::replace(&mut self.shared.state().shown, shows);
        let result = self.runtime.block_on(async {
            if passed > 0 {
                pass(Duration::from_nanos(passed));
            }
            std::future::poll_fn(|cx| {
                let was_idle = {
                    let mut state = self.shared.state();
                    state.root = Some(cx.waker().clone());
                    std::mem::take(&mut state.is_idle)
                };
                match root(cx) {
                    Some(Poll::Ready(result)) => Poll::Ready(Some(result)),
                    None if was_idle => Poll::Ready(None),
                    _ => Poll::Pending,
                }
            })
            .await
        });
        // The root holds the runtime, which holds the root: dropping it breaks the cycle.
        self.shared.state().root = None;
        result
    }
}

/// Lets time pass on tokio's clock. The future does so when it is polled, and then yields.
fn pass(time: Duration) {
    let advancing = pin!(advance(time));
    let polled: Poll<()> = advancing.poll(&mut Context::from_waker(Waker::noop()));
    debug_assert!(polled.is_pending(), "it yields once");
}
