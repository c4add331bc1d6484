//! Runs a small concurrent program in every order in which its threads can take their locks and use their flags.
//!
//! The threads are real, but one at a time runs. Where a thread takes a lock, uses a flag, or waits for a
//! condition variable, [`explore`] decides which one continues; then it runs the program again with another
//! decision, until there is none left (depth first). In between nothing is shared, so no other point needs a
//! decision. Only switches away from a thread that could continue are limited in number: two or three of them
//! show nearly all defects, and without a limit there are too many orders.
//!
//! If no thread can continue and not all have ended, a wake-up was lost: the program has failed. It has failed
//! also if it does not end.
//!
//! [`Mutex`], [`Condvar`] and [`AtomicBool`] are those of the standard library outside of [`explore`]. Time does not
//! pass in an exploration: a wait with a time limit lasts until it is woken. There are no spurious wake-ups. Memory
//! is sequentially consistent: what a weaker order of a flag allows is not explored.

mod primitives;

pub(crate) use primitives::{AtomicBool, Condvar, Mutex, MutexGuard};

use std::cell::RefCell;
use std::sync::{self, Arc, PoisonError};
use std::thread;

thread_local! {
    /// The run that this thread is part of, and its index in it.
    static RUN: RefCell<Option<(Arc<Run>, usize)>> = const { RefCell::new(None) };
}

fn current() -> Option<(Arc<Run>, usize)> {
    RUN.with_borrow(Clone::clone)
}

/// A program that needs more does not end.
const MOST_SWITCHES: usize = 10_000;

#[derive(Clone, Copy, PartialEq, Debug)]
enum Status {
    Ready,
    /// Waits for the mutex or the condition variable at this address.
    Blocked(usize),
    Ended,
}

/// One of `of` ways to continue.
#[derive(Clone, Copy, Debug)]
struct Decision {
    taken: usize,
    of: usize,
}

struct State {
    threads: Vec<Status>,
    /// The thread that may run.
    running: Option<usize>,
    /// The addresses of the mutexes that are locked.
    locked: Vec<usize>,
    decisions: Vec<Decision>,
    /// How many decisions of the list this run has made.
    decided: usize,
    /// How many more times a thread that could continue may be interrupted.
    interruptions: usize,
    /// How many times a thread was switched to.
    switches: usize,
    /// No thread can continue, or the program does not end.
    stuck: bool,
}

/// One execution of the program.
struct Run {
    /// Whether releasing a lock is a point of decision too.
    at_releases: bool,
    state: sync::Mutex<State>,
    /// One for each thread.
    turns: Vec<sync::Condvar>,
}

impl Run {
    fn state(&self) -> sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Decides which thread runs next, and returns when it is the turn of `me`, unless that has ended.
    /// `me` is `None` before the first thread runs.
    fn switch(&self, mut state: sync::MutexGuard<'_, State>, me: Option<usize>) {
        let ready = |index: usize, state: &State| state.threads[index] == Status::Ready;
        let mut candidates: Vec<_> =
            (0..state.threads.len()).filter(|&index| ready(index, &state)).collect();
        let interrupts = me.is_some_and(|me| ready(me, &state));
        if let Some(me) = me.filter(|_| interrupts) {
            // First the way without interruption.
            candidates.retain(|&other| other != me && state.interruptions > 0);
            candidates.insert(0, me);
        }
        let next = match candidates[..] {
            [] => None,
            [only] => Some(only),
            _ => {
                let at = state.decided;
                state.decided += 1;
                if at == state.decisions.len() {
                    state.decisions.push(Decision { taken: 0, of: candidates.len() });
                }
                assert_eq!(state.decisions[at].of, candidates.len(), "the program is not the same");
                Some(candidates[state.decisions[at].taken])
            }
        };
        if interrupts && next != me {
            state.interruptions -= 1;
        }
        state.running = next;
        state.switches += 1;
        match next {
            Some(_) if state.switches > MOST_SWITCHES => {
                state.stuck = true;
                self.turns.iter().for_each(sync::Condvar::notify_one);
            }
            Some(next) => self.turns[next].notify_one(),
            None if state.threads.iter().all(|&status| status == Status::Ended) => {}
            None => {
                state.stuck = true;
                self.turns.iter().for_each(sync::Condvar::notify_one);
            }
        }
        if let Some(me) = me {
            self.wait_for_turn(state, me);
        }
    }

    fn wait_for_turn(&self, mut state: sync::MutexGuard<'_, State>, me: usize) {
        while state.stuck || state.running != Some(me) {
            if state.threads[me] == Status::Ended {
                return;
            }
            if state.stuck {
                drop(state);
                // A destructor may lock too; it must not panic again.
                assert!(thread::panicking(), "a wake-up was lost, or the program does not end");
                return;
            }
            state = self.turns[me].wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self, me: usize, mutex: usize) {
        self.switch(self.state(), Some(me));
        let mut state = self.state();
        while state.locked.contains(&mutex) && !state.stuck {
            state.threads[me] = Status::Blocked(mutex);
            self.switch(state, Some(me));
            state = self.state();
        }
        state.locked.push(mutex);
    }

    /// Whether the mutex was free, and is now locked.
    fn try_lock(&self, me: usize, mutex: usize) -> bool {
        self.switch(self.state(), Some(me));
        let mut state = self.state();
        let free = !state.locked.contains(&mutex);
        if free {
            state.locked.push(mutex);
        }
        free
    }

    /// Lets those that wait for what is at this address try again.
    fn wake(state: &mut State, address: usize) {
        for status in &mut state.threads {
            if *status == Status::Blocked(address) {
                *status = Status::Ready;
            }
        }
    }

    fn unlock(&self, mutex: usize) {
        let mut state = self.state();
        state.locked.retain(|&locked| locked != mutex);
        Self::wake(&mut state, mutex);
    }

    /// Releases the mutex and blocks, in one step.
    fn wait(&self, me: usize, condvar: usize, mutex: usize) {
        self.unlock(mutex);
        let mut state = self.state();
        state.threads[me] = Status::Blocked(condvar);
        self.switch(state, Some(me));
    }
}

/// Ends a thread, however it ends.
struct Ending(Arc<Run>, usize);

impl Drop for Ending {
    fn drop(&mut self) {
        RUN.take();
        let mut state = self.0.state();
        state.threads[self.1] = Status::Ended;
        self.0.switch(state, Some(self.1));
    }
}

/// The number of interruptions for programs that have many orders: 2, or `IBVERBS_EXPLORE_INTERRUPTIONS`.
pub(crate) fn interruptions() -> usize {
    match std::env::var("IBVERBS_EXPLORE_INTERRUPTIONS") {
        Ok(text) => text.parse().expect("IBVERBS_EXPLORE_INTERRUPTIONS is a number"),
        Err(_) => 2,
    }
}

/// Runs `threads` on what `new` returns, in every order with at most `interruptions` switches away from a
/// thread that could continue, and `check` after each run. Returns the number of runs.
pub(crate) fn explore<W: Sync>(
    interruptions: usize,
    new: impl Fn() -> W,
    threads: &[&(dyn Fn(&W) + Sync)],
    check: impl Fn(&W),
) -> usize {
    explore_points(false, interruptions, new, threads, check)
}

/// As [`explore`], for programs with [`Mutex::try_lock`]: that sees how long another thread has a lock, so
/// releasing one is a point of decision too.
pub(crate) fn explore_with_tries<W: Sync>(
    interruptions: usize,
    new: impl Fn() -> W,
    threads: &[&(dyn Fn(&W) + Sync)],
    check: impl Fn(&W),
) -> usize {
    explore_points(true, interruptions, new, threads, check)
}

fn explore_points<W: Sync>(
    at_releases: bool,
    interruptions: usize,
    new: impl Fn() -> W,
    threads: &[&(dyn Fn(&W) + Sync)],
    check: impl Fn(&W),
) -> usize {
    let mut decisions = Vec::new();
    for runs in 1.. {
        let world = new();
        let state = State {
            threads: vec![Status::Ready; threads.len()],
            running: None,
            locked: Vec::new(),
            decisions,
            decided: 0,
            interruptions,
            switches: 0,
            stuck: false,
        };
        let turns = threads.iter().map(|_| sync::Condvar::new()).collect();
        let run = Arc::new(Run { at_releases, state: sync::Mutex::new(state), turns });
        let failed = thread::scope(|scope| {
            let handles: Vec<_> = threads
                .iter()
                .enumerate()
                .map(|(me, thread)| {
                    let (run, world) = (run.clone(), &world);
                    scope.spawn(move || {
                        let ending = Ending(run.clone(), me);
                        RUN.set(Some((run.clone(), me)));
                        run.wait_for_turn(run.state(), me);
                        thread(world);
                        drop(ending);
                    })
                })
                .collect();
            run.switch(run.state(), None);
            // All are joined, so that none of the panics is lost.
            let results: Vec<_> = handles.into_iter().map(thread::ScopedJoinHandle::join).collect();
            results.into_iter().any(|result| result.is_err())
        });
        let mut state = run.state();
        decisions = std::mem::take(&mut state.decisions);
        assert!(!failed, "run {runs} has failed, after {decisions:?}");
        check(&world);
        while decisions.pop_if(|last| last.taken + 1 == last.of).is_some() {}
        match decisions.last_mut() {
            Some(last) => last.taken += 1,
            None => return runs,
        }
    }
    unreachable!("the program ends")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads and writes under two locks: the defect needs one interruption.
    fn add(counter: &Mutex<u32>) {
        let before = *lock(counter);
        *lock(counter) = before + 1;
    }

    #[test]
    fn every_order_is_run() {
        let found = sync::Mutex::new(std::collections::BTreeSet::new());
        let note = |counter: &Mutex<u32>| {
            found.lock().unwrap().insert(*lock(counter));
        };
        explore(0, || Mutex::new(0), &[&add, &add], note);
        assert_eq!(found.lock().unwrap().iter().copied().collect::<Vec<_>>(), [2]);
        let runs = explore(2, || Mutex::new(0), &[&add, &add], note);
        assert_eq!(found.lock().unwrap().iter().copied().collect::<Vec<_>>(), [1, 2]);
        assert!(runs > 4, "{runs}");
    }

    #[test]
    fn a_lost_wake_up_is_found() {
        struct World(Mutex<bool>, Condvar);
        // Looks before it locks again to sleep.
        let sleeper = |World(flag, changed): &World| {
            if !*lock(flag) {
                drop(changed.wait(lock(flag)).unwrap_or_else(PoisonError::into_inner));
            }
        };
        let waker = |World(flag, changed): &World| {
            *lock(flag) = true;
            changed.notify_all();
        };
        let new = || World(Mutex::new(false), Condvar::new());
        let result = std::panic::catch_unwind(|| explore(1, new, &[&sleeper, &waker], |_| ()));
        let text = *result.unwrap_err().downcast::<String>().unwrap();
        assert!(text.contains("has failed"), "{text}");
        let sleeper = |World(flag, changed): &World| {
            let mut set = lock(flag);
            while !*set {
                set = changed.wait(set).unwrap_or_else(PoisonError::into_inner);
            }
        };
        explore(3, new, &[&sleeper, &sleeper, &waker], |world| assert!(*lock(&world.0)));
    }

    #[test]
    fn who_tries_a_lock_finds_it_free_or_taken() {
        let found = sync::Mutex::new(std::collections::BTreeSet::new());
        let tries = |mutex: &Mutex<()>| {
            found.lock().unwrap().insert(mutex.try_lock().is_ok());
        };
        let locks = |mutex: &Mutex<()>| drop(lock(mutex));
        explore(2, || Mutex::new(()), &[&locks, &tries], |_| ());
        assert_eq!(found.lock().unwrap().iter().copied().collect::<Vec<_>>(), [true]);
        explore_with_tries(2, || Mutex::new(()), &[&locks, &tries], |_| ());
        assert_eq!(found.lock().unwrap().iter().copied().collect::<Vec<_>>(), [false, true]);
    }

    #[test]
    fn a_flag_changes_between_two_looks() {
        let found = sync::Mutex::new(std::collections::BTreeSet::new());
        let looks = |flag: &AtomicBool| {
            let both = (flag.load(Ordering::Relaxed), flag.load(Ordering::Relaxed));
            found.lock().unwrap().insert(both);
        };
        let sets = |flag: &AtomicBool| flag.store(true, Ordering::Relaxed);
        explore(1, || AtomicBool::new(false), &[&looks, &sets], |_| ());
        let found = found.into_inner().unwrap();
        assert_eq!(
            found.into_iter().collect::<Vec<_>>(),
            [(false, false), (false, true), (true, true)]
        );
    }

    #[test]
    fn a_program_that_does_not_end_is_found() {
        let endless = |flag: &Mutex<bool>| while !*lock(flag) {};
        let result = std::panic::catch_unwind(|| {
            explore(0, || Mutex::new(false), &[&endless], |_| ());
        });
        let text = *result.unwrap_err().downcast::<String>().unwrap();
        assert!(text.contains("has failed"), "{text}");
    }
}
