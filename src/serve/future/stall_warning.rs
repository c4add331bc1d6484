//! In debug builds: one line on standard error when a future has waited for a second without a turn of its reactor.
//!
//! A thread looks at the process's reactors as long as there are any.

#[cfg(all(debug_assertions, not(miri), not(ibverbs_loom)))]
mod watching {
    use std::io::{self, Write};
    use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
    use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};
    use std::thread;
    use std::time::{Duration, Instant};

    const PATIENCE: u64 = 1000;

    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    static ALL: Mutex<Vec<Weak<Watched>>> = Mutex::new(Vec::new());

    #[derive(Default, Debug)]
    struct Watched {
        waiting: AtomicUsize,
        /// Armed, nothing found since, and the task that armed it still exists.
        sleeps: AtomicBool,
        is_told: AtomicBool,
        /// In milliseconds: its last turn, or when a future began to wait.
        since: AtomicU64,
    }

    fn now() -> u64 {
        START.elapsed().as_millis() as u64
    }

    impl Watched {
        fn check(&self) {
            let waits =
                self.waiting.load(Ordering::Relaxed) > 0 && !self.sleeps.load(Ordering::Relaxed);
            if waits
                && now().saturating_sub(self.since.load(Ordering::Relaxed)) >= PATIENCE
                && !self.is_told.swap(true, Ordering::Relaxed)
            {
                // `eprintln!` panics if standard error is closed.
                let _ = writeln!(
                    io::stderr(),
                    "ibverbs: a future has waited for a second without a turn of its reactor: \
                     `Reactor::spawn_on_tokio` or `Reactor::run` drives it"
                );
            }
        }
    }

    #[derive(Debug)]
    pub(in crate::serve::future) struct StallWarning(Arc<Watched>);

    impl StallWarning {
        pub(in crate::serve::future) fn new() -> Self {
            let watched = Arc::<Watched>::default();
            let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
            if all.is_empty() {
                let started = thread::Builder::new().name("ibverbs-watch".into()).spawn(run);
                if started.is_err() {
                    return Self(watched);
                }
            }
            all.push(Arc::downgrade(&watched));
            Self(watched)
        }

        pub(in crate::serve::future) fn turned(&self, found: bool) {
            if found {
                self.0.sleeps.store(false, Ordering::Relaxed);
            }
            self.0.since.store(now(), Ordering::Relaxed);
        }

        pub(in crate::serve::future) fn sleeps(&self) {
            self.0.sleeps.store(true, Ordering::Relaxed);
        }

        pub(in crate::serve::future) fn wait(&self) -> Waits {
            if self.0.waiting.fetch_add(1, Ordering::Relaxed) == 0 {
                self.0.since.fetch_max(now(), Ordering::Relaxed);
            }
            Waits(Some(self.0.clone()))
        }
    }

    #[derive(Default, Debug)]
    pub(in crate::serve::future) struct Waits(Option<Arc<Watched>>);

    impl Drop for Waits {
        fn drop(&mut self) {
            if let Some(watched) = &self.0 {
                watched.waiting.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    fn run() {
        loop {
            thread::sleep(Duration::from_millis(PATIENCE / 4));
            let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
            all.retain(|watched| {
                watched.upgrade().is_some_and(|watched| {
                    watched.check();
                    true
                })
            });
            if all.is_empty() {
                return;
            }
        }
    }
}

#[cfg(not(all(debug_assertions, not(miri), not(ibverbs_loom))))]
mod nothing {
    #[derive(Debug)]
    pub(in crate::serve::future) struct StallWarning;

    #[derive(Default, Debug)]
    pub(in crate::serve::future) struct Waits;

    impl StallWarning {
        pub(in crate::serve::future) fn new() -> Self {
            Self
        }

        #[inline(always)]
        pub(in crate::serve::future) fn turned(&self, _: bool) {}

        #[inline(always)]
        pub(in crate::serve::future) fn sleeps(&self) {}

        #[inline(always)]
        pub(in crate::serve::future) fn wait(&self) -> Waits {
            Waits
        }
    }
}

#[cfg(not(all(debug_assertions, not(miri), not(ibverbs_loom))))]
pub(super) use nothing::{StallWarning, Waits};
#[cfg(all(debug_assertions, not(miri), not(ibverbs_loom)))]
pub(super) use watching::{StallWarning, Waits};
