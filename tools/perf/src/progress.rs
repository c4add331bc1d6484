//! A progress bar, on a terminal and for long runs only.
//!
//! The loop that is measured stores where it is; a thread that is asleep most of the time shows it.

use std::fmt::{Display, Write};
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

/// A run that takes no longer than this has no bar.
const SHORT: Duration = Duration::from_secs(2);
const REFRESH: Duration = Duration::from_millis(200);
/// How many steps the bar has.
const WHOLE: u64 = 10_000;

#[derive(Debug, Default)]
struct State {
    /// The part of the whole at which the current stretch begins, and its own.
    base: AtomicU64,
    span: AtomicU64,
    /// Where the stretch is, of how many iterations.
    done: AtomicU64,
    expected: AtomicU64,
    over: AtomicBool,
}

impl State {
    fn position(&self) -> u64 {
        let load = |value: &AtomicU64| value.load(Ordering::Relaxed);
        let expected = load(&self.expected).max(1);
        load(&self.base) + load(&self.span) * load(&self.done).min(expected) / expected
    }
}

#[derive(Debug)]
pub(crate) struct Progress {
    state: Arc<State>,
    bar: ProgressBar,
    shown: Option<JoinHandle<()>>,
}

impl Progress {
    /// Shown if there is a terminal to see it on.
    pub(crate) fn new() -> Self {
        let mut progress = Self::hidden();
        if std::io::stderr().is_terminal() {
            let (state, bar) = (Arc::clone(&progress.state), progress.bar.clone());
            progress.shown = Some(std::thread::spawn(move || show(&state, &bar)));
        }
        progress
    }

    pub(crate) fn hidden() -> Self {
        let bar = ProgressBar::with_draw_target(Some(WHOLE), ProgressDrawTarget::hidden());
        Self { state: Arc::default(), bar, shown: None }
    }

    /// Prints a line where the bar is, which moves down.
    pub(crate) fn println(&self, line: &dyn Display) {
        self.bar.suspend(|| println!("{line}"));
    }

    /// A stretch of so many iterations begins, which goes from one fraction of the whole to another.
    pub(crate) fn stretch(&self, from: f64, to: f64, iterations: u64) {
        let steps = |fraction: f64| (fraction.clamp(0.0, 1.0) * WHOLE as f64) as u64;
        let state = &self.state;
        state.done.store(0, Ordering::Relaxed);
        state.base.store(steps(from), Ordering::Relaxed);
        state.span.store(steps(to).saturating_sub(steps(from)), Ordering::Relaxed);
        state.expected.store(iterations, Ordering::Relaxed);
    }

    /// So many iterations of the stretch are done. It costs a store.
    #[inline]
    pub(crate) fn at(&self, iteration: u64) {
        self.state.done.store(iteration, Ordering::Relaxed);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.state.over.store(true, Ordering::Relaxed);
        if let Some(shown) = self.shown.take() {
            shown.thread().unpark();
            // It cannot fail in a way that matters here.
            let _ = shown.join();
        }
    }
}

fn show(state: &State, bar: &ProgressBar) {
    let left = |state: &ProgressState, text: &mut dyn Write| {
        // While it warms up, nobody knows.
        if state.pos() > 0 {
            let _ = write!(text, ", {:#} left", HumanDuration(state.eta()));
        }
    };
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {percent:>3} %{left}") {
        bar.set_style(style.with_key("left", left));
    }
    let (start, mut position) = (Instant::now(), 0);
    // It is not seen at first, but learns how fast it goes.
    while !state.over.load(Ordering::Relaxed) {
        if bar.is_hidden() && start.elapsed() >= SHORT {
            bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        // What a stretch had less of than was expected does not turn it back.
        position = state.position().max(position);
        if position == 0 {
            bar.reset_eta();
        }
        bar.set_position(position);
        std::thread::park_timeout(REFRESH);
    }
    bar.finish_and_clear();
}
