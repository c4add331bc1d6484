//! A progress bar, on a terminal and for long runs only.
//!
//! The loop that is measured stores where it is; a thread that is asleep most of the time shows it.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

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
    shown: Option<JoinHandle<()>>,
}

impl Progress {
    /// Shown if `wanted`, and if there is a terminal to see it on.
    pub(crate) fn new(wanted: bool) -> Self {
        let state = Arc::new(State::default());
        let shown = (wanted && std::io::stderr().is_terminal()).then(|| {
            let state = Arc::clone(&state);
            std::thread::spawn(move || show(&state))
        });
        Self { state, shown }
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

fn show(state: &State) {
    let over = || state.over.load(Ordering::Relaxed);
    let start = std::time::Instant::now();
    while start.elapsed() < SHORT {
        if over() {
            return;
        }
        std::thread::park_timeout(SHORT);
    }
    let bar = ProgressBar::new(WHOLE);
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {percent:>3} %, {eta} left") {
        bar.set_style(style);
    }
    while !over() {
        bar.set_position(state.position());
        std::thread::park_timeout(REFRESH);
    }
    bar.finish_and_clear();
}
