//! The standard library's locks and flags. Tests built with `--cfg ibverbs_loom` use loom's, and run in every order of
//! the threads that a processor's memory allows: see the step "loom" of script/test.

#[cfg(all(test, ibverbs_loom))]
pub(crate) use loom::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
};
#[cfg(not(all(test, ibverbs_loom)))]
pub(crate) use std::sync::{
    Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
};

/// Runs `threads` on what `new` returns, in every order, and `check` after each run. Returns the number of runs.
///
/// A thread that could continue is interrupted at most twice, or `LOOM_MAX_PREEMPTIONS` times: without a limit there
/// are too many orders. A lost wake-up fails the test, because no thread can continue.
#[cfg(all(test, ibverbs_loom))]
pub(crate) fn in_every_order<W: Send + Sync + 'static, const N: usize>(
    new: fn() -> W,
    threads: [fn(&W); N],
    check: fn(&W),
) -> usize {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    let mut model = loom::model::Builder::new();
    model.preemption_bound.get_or_insert(2);
    // A run that needs more does not end.
    model.max_branches = 100_000;
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = runs.clone();
    model.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        let world = Arc::new(new());
        let run = |thread: fn(&W)| {
            let world = world.clone();
            loom::thread::spawn(move || thread(&world))
        };
        for thread in threads.map(run) {
            thread.join().expect("it does not panic");
        }
        check(&world);
    });
    runs.load(Ordering::Relaxed)
}
