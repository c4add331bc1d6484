//! How a task runs a reactor.

use std::future::poll_fn;
use std::io;
use std::task::{Context as TaskContext, Poll};
use std::time::{Duration, Instant};

use super::locked_loop::{Lock, Share, release_quietly};
use super::reactor::Reactor;
use crate::base::{Error, Result, trace};
use crate::channel::TransportError;

impl<S: Share> Reactor<S> {
    /// Runs the reactor: polls, spins for the [set number of turns](Self::spin), then arms the queue and sleeps. It
    /// returns when the reactor is [stopped](Self::stop), or after an error, which ends all operations of all channels.
    ///
    /// `poll_readable` waits for the descriptor ([`AsFd`](std::os::fd::AsFd)) in the runtime's way. It returns [`Poll::Ready`] if the
    /// descriptor may have become readable, or failed, since the last call; otherwise it has the task woken then. The
    /// descriptor fails when the device is pulled out; the reactor then ends with `EIO`.
    ///
    /// Run it in one task at a time. If that task is dropped, or a waker panics in it, the channels' futures wait until
    /// it is run again; only a reactor of `spawn_on_tokio` stops. Feature `tracing` warns of that, and of a waiting
    /// future that is dropped before the reactor ever ran.
    ///
    /// # Errors
    ///
    /// Those of [`turn`](Self::turn), [`arm`](Self::arm) and `poll_readable`.
    pub async fn run<F>(&self, poll_readable: F) -> Result<()>
    where
        F: FnMut(&mut TaskContext<'_>) -> Poll<io::Result<()>>,
    {
        self.run_by(Instant::now, poll_readable).await
    }

    pub(super) async fn run_by<F>(&self, now: fn() -> Instant, mut poll_readable: F) -> Result<()>
    where
        F: FnMut(&mut TaskContext<'_>) -> Poll<io::Result<()>>,
    {
        let mut running = Running::new(now);
        let _runner = Runner(self);
        let ended = poll_fn(|cx| self.poll_run(&mut running, cx, &mut poll_readable)).await;
        if let Err(error) = ended {
            self.stop(TransportError::Verbs(error));
        }
        ended
    }

    fn poll_run<F>(
        &self,
        running: &mut Running,
        cx: &mut TaskContext<'_>,
        mut poll_readable: F,
    ) -> Poll<Result<()>>
    where
        F: FnMut(&mut TaskContext<'_>) -> Poll<io::Result<()>>,
    {
        // First, so that a stop after the turn wakes this task.
        if self.set_runner(cx) {
            return Poll::Ready(Ok(()));
        }
        loop {
            if self.turn()? > 0 {
                running.found();
                break;
            }
            if std::mem::take(&mut running.woken) {
                // An edge-triggered runtime reports a failed descriptor only once.
                self.queue.check_device()?;
            }
            if running.armed {
                match poll_readable(cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Ok(())) => {
                        (running.armed, running.woken) = (false, true);
                    }
                    Poll::Ready(Err(error)) => {
                        let errno = error.raw_os_error().unwrap_or(libc::EIO);
                        return Poll::Ready(Err(Error::new("poll", errno)));
                    }
                }
                break;
            }
            if running.spins(self.spin) {
                break;
            }
            running.gave_up();
            // Polls again: a completion from before arming raises no event.
            self.arm()?;
            running.armed = true;
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }

    fn set_runner(&self, cx: &TaskContext<'_>) -> bool {
        let guard = self.share.lock();
        let is_same = guard.runner.as_ref().is_some_and(|own| own.will_wake(cx.waker()));
        let is_stopped = guard.is_stopped;
        drop(guard);
        if is_same || is_stopped {
            return is_stopped;
        }
        let waker = cx.waker().clone();
        let mut guard = self.share.lock();
        let (before, is_stopped) = (guard.runner.replace(waker), guard.is_stopped);
        drop(guard);
        drop(before);
        is_stopped
    }
}

/// Warns if `run`'s future is dropped while operations wait.
struct Runner<'a, S: Share>(&'a Reactor<S>);

impl<S: Share> Drop for Runner<'_, S> {
    fn drop(&mut self) {
        let guard = self.0.share.lock();
        guard.stall_warning.turned(true);
        if !guard.is_stopped && guard.core.next_busy(0).is_some() {
            trace::reactor_stands("its task was dropped while operations were in flight");
        }
        release_quietly(guard);
    }
}

/// The most idle turns before the reactor sleeps, if [`spin`](Reactor::spin) adapts.
const MOST: u32 = 64;

/// Sleeps before the reactor spins again: the least, doubled each time that it does not help, and the most.
const SLEEPS: [u32; 2] = [16, 1024];

/// The same, after the scheduler took the processor from a spinning reactor. A sleeper gets a processor when woken; one
/// that has spun waits some milliseconds for its turn.
const SLEEPS_WHEN_CROWDED: u32 = 65_536;

/// Longer than [`MOST`] turns take on a processor of their own.
const CROWDED: Duration = Duration::from_micros(500);

const ASLEEP: u32 = u32::MAX;

struct Running {
    now: fn() -> Instant,
    /// Idle turns in a row, or [`ASLEEP`].
    idle: u32,
    /// When the first of them was, if `spin` adapts.
    since: Instant,
    /// The most idle turns, if `spin` adapts.
    limit: u32,
    /// How many sleeps begin with a limit of 0, and how many have.
    pause: u32,
    sleeps: u32,
    /// No turn has found anything since.
    armed: bool,
    woken: bool,
}

impl Running {
    fn new(now: fn() -> Instant) -> Self {
        let (limit, pause) = (MOST, SLEEPS[0]);
        Self {
            now,
            idle: ASLEEP,
            since: now(),
            limit,
            pause,
            sleeps: 0,
            armed: false,
            woken: false,
        }
    }

    fn spins(&mut self, spin: Option<u32>) -> bool {
        let spins = self.idle < spin.unwrap_or(self.limit);
        if spins {
            if self.idle == 0 && spin.is_none() {
                self.since = (self.now)();
            }
            self.idle += 1;
        }
        spins
    }

    fn found(&mut self) {
        match self.idle {
            ASLEEP if self.limit == 0 => {
                self.sleeps += 1;
                if self.sleeps >= self.pause {
                    (self.limit, self.sleeps) = (MOST, 0);
                    self.pause = SLEEPS[1].min(2 * self.pause);
                }
            }
            0 | ASLEEP => {}
            _ => {
                if !self.backs_off() {
                    (self.limit, self.pause, self.sleeps) = (MOST, SLEEPS[0], 0);
                }
            }
        }
        (self.idle, self.armed, self.woken) = (0, false, false);
    }

    fn gave_up(&mut self) {
        if !matches!(self.idle, 0 | ASLEEP) && !self.backs_off() {
            self.limit /= 2;
        }
        self.idle = ASLEEP;
    }

    /// Does not spin for a long time if something else had the processor.
    fn backs_off(&mut self) -> bool {
        let crowded = (self.now)().saturating_duration_since(self.since) > CROWDED;
        if crowded {
            (self.limit, self.pause, self.sleeps) = (0, SLEEPS_WHEN_CROWDED, 0);
        }
        crowded
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::OnceLock;

    use super::*;

    thread_local!(static PASSED: Cell<Duration> = const { Cell::new(Duration::ZERO) });

    fn now() -> Instant {
        static START: OnceLock<Instant> = OnceLock::new();
        *START.get_or_init(Instant::now) + PASSED.get()
    }

    fn idle_turns(running: &mut Running) -> u32 {
        let mut turns = 0;
        while running.spins(None) {
            turns += 1;
        }
        running.gave_up();
        turns
    }

    #[test]
    fn turns_that_find_nothing_are_made_after_something_has_ended_and_while_they_help() {
        let mut running = Running::new(now);
        assert_eq!(idle_turns(&mut running), 0, "nothing has ended yet");
        let turns = |running: &mut Running| {
            running.found();
            idle_turns(running)
        };
        let halved = [(); 8].map(|()| turns(&mut running));
        assert_eq!(halved, [64, 32, 16, 8, 4, 2, 1, 0]);
        assert_eq!(idle_turns(&mut running), 0, "woken for nothing");
        let sleeps = |running: &mut Running| {
            let mut sleeps = 1;
            while turns(running) == 0 {
                sleeps += 1;
            }
            while turns(running) > 0 {}
            sleeps
        };
        assert_eq!(sleeps(&mut running), 15, "it tries again");
        let pauses = [(); 8].map(|()| sleeps(&mut running));
        assert_eq!(pauses, [31, 63, 127, 255, 511, 1023, 1023, 1023]);
        // The next completion always comes after three turns.
        for _ in 0..100 {
            running.found();
            running.idle = 3;
            running.found();
            assert_eq!(running.limit, MOST);
        }
        while turns(&mut running) > 0 {}
        assert_eq!(sleeps(&mut running), 15, "since they have helped");
    }

    #[test]
    fn a_reactor_that_loses_its_processor_while_it_spins_sleeps_for_a_long_time() {
        let sleeps = |running: &mut Running| {
            let mut sleeps = 0;
            loop {
                running.found();
                if idle_turns(running) > 0 {
                    break sleeps;
                }
                sleeps += 1;
            }
        };
        let lose = |running: &mut Running| {
            running.found();
            assert!(running.spins(None));
            PASSED.set(PASSED.get() + CROWDED + Duration::from_nanos(1));
        };
        // It found its completion, late.
        let mut running = Running::new(now);
        lose(&mut running);
        running.found();
        assert_eq!(sleeps(&mut running), 65_536);
        let mut running = Running::new(now);
        lose(&mut running);
        while running.spins(None) {}
        running.gave_up();
        assert_eq!(sleeps(&mut running), 65_535);
        // A long sleep is no sign of a lost processor, nor is work between two spins.
        let mut running = Running::new(now);
        for _ in 0..3 {
            running.found();
            PASSED.set(PASSED.get() + CROWDED);
            assert!(running.spins(None));
            running.found();
            running.gave_up();
            PASSED.set(PASSED.get() + CROWDED);
        }
        assert_eq!(running.limit, MOST);
    }
}
