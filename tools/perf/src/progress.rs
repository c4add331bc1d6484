//! A progress bar, on a terminal and for long runs only.
//!
//! The measured loop stores its position; a thread that sleeps most of the time shows it.

use std::fmt::{Display, Write};
use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use indicatif::{HumanDuration, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

/// A shorter run has no bar.
const SHORT: Duration = Duration::from_secs(2);
const REFRESH: Duration = Duration::from_millis(200);
/// The number of steps of the bar.
const WHOLE: u64 = 10_000;

#[derive(Debug, Default)]
struct State {
    /// The fraction of the whole at which the current stretch begins, and the fraction that it covers.
    base: AtomicU64,
    span: AtomicU64,
    /// The position within the stretch, and its number of iterations.
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
    /// Creates the bar, which is shown only on a terminal.
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

    /// Prints a line above the bar.
    pub(crate) fn println(&self, line: &dyn Display) {
        self.bar.suspend(|| println!("{line}"));
    }

    /// Begins a stretch of this many iterations, from one fraction of the whole to another.
    pub(crate) fn stretch(&self, from: f64, to: f64, iterations: u64) {
        let steps = |fraction: f64| (fraction.clamp(0.0, 1.0) * WHOLE as f64) as u64;
        let state = &self.state;
        state.done.store(0, Ordering::Relaxed);
        state.base.store(steps(from), Ordering::Relaxed);
        state.span.store(steps(to).saturating_sub(steps(from)), Ordering::Relaxed);
        state.expected.store(iterations, Ordering::Relaxed);
    }

    /// Sets the number of finished iterations of the stretch. It costs one store.
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
            // An error of the thread does not matter here.
            let _ = shown.join();
        }
    }
}

fn show(state: &State, bar: &ProgressBar) {
    let mut display = View::new(bar, ProgressDrawTarget::stderr);
    let start = Instant::now();
    while !state.over.load(Ordering::Relaxed) {
        display.refresh(state, start.elapsed());
        std::thread::park_timeout(REFRESH);
    }
    bar.finish_and_clear();
}

/// The state that the thread shows. It has no clock: the time is an argument.
struct View<'a, Target> {
    bar: &'a ProgressBar,
    target: Target,
    position: u64,
}

impl<'a, Target: Fn() -> ProgressDrawTarget> View<'a, Target> {
    fn new(bar: &'a ProgressBar, target: Target) -> Self {
        let left = |state: &ProgressState, text: &mut dyn Write| {
            // During the warm-up, the remaining time is unknown.
            if state.pos() > 0 {
                let _ = write!(text, ", {:#} left", HumanDuration(state.eta()));
            }
        };
        if let Ok(style) = ProgressStyle::with_template("{bar:40} {percent:>3} %{left}") {
            bar.set_style(style.with_key("left", left));
        }
        Self { bar, target, position: 0 }
    }

    /// Updates the bar for this elapsed time. It is hidden at first, but already measures the rate.
    fn refresh(&mut self, state: &State, elapsed: Duration) {
        if self.bar.is_hidden() && elapsed >= SHORT {
            self.bar.set_draw_target((self.target)());
        }
        // The bar does not go back when a stretch ends before its expected end.
        self.position = state.position().max(self.position);
        if self.position == 0 {
            self.bar.reset_eta();
        }
        self.bar.set_position(self.position);
        // Draw at once, without indicatif's rate limit.
        self.bar.tick();
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Mutex;

    use indicatif::TermLike;

    use super::*;

    /// A terminal that records the lines that were written, and when it was cleared.
    #[derive(Clone, Debug, Default)]
    struct Lines(Arc<Mutex<Vec<String>>>);

    impl Lines {
        fn add(&self, line: &str) -> io::Result<()> {
            self.0.lock().unwrap().push(line.to_owned());
            Ok(())
        }

        fn take(&self) -> String {
            std::mem::take(&mut *self.0.lock().unwrap()).join("|")
        }
    }

    impl TermLike for Lines {
        fn width(&self) -> u16 {
            80
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, line: &str) -> io::Result<()> {
            self.add(line)
        }
        fn write_str(&self, text: &str) -> io::Result<()> {
            self.add(text)
        }
        fn clear_line(&self) -> io::Result<()> {
            self.add("(cleared)")
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_bar_is_seen_in_long_runs_only_and_leaves_nothing_behind() {
        let (progress, lines) = (Progress::hidden(), Lines::default());
        let terminal = || ProgressDrawTarget::term_like(Box::new(lines.clone()));
        let mut display = View::new(&progress.bar, terminal);
        progress.stretch(0.0, 0.5, 100);
        for (iteration, elapsed) in [(1, 0), (20, 1_000), (40, 1_999)] {
            progress.at(iteration);
            display.refresh(&progress.state, Duration::from_millis(elapsed));
            assert_eq!(lines.take(), "", "after {elapsed} ms");
        }
        progress.at(50);
        display.refresh(&progress.state, SHORT);
        let shown = lines.take();
        assert!(shown.contains(" 25 %") && shown.contains(" left"), "{shown}");
        // The bar does not go back when a stretch ends early.
        progress.at(80);
        display.refresh(&progress.state, 2 * SHORT);
        progress.stretch(0.3, 1.0, 100);
        display.refresh(&progress.state, 2 * SHORT);
        assert!(!lines.take().contains(" 30 %"));
        progress.bar.finish_and_clear();
        let end = lines.take();
        assert!(end.contains("(cleared)") && !end.contains('%'), "{end}");
    }
}
