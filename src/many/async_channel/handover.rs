//! The lock of a channel, and what others leave for whoever has it.
//!
//! The lock is held while something is posted or polled, and never while a task is woken: a waker may run any
//! code. So whoever has the lock collects wakers, and wakes after releasing it. A future that is dropped does not
//! wait for the lock. It leaves its place in line here, and whoever has the lock settles that when releasing it.
//!
//! A waker that panics takes no wake-up from other tasks: the panic goes on when the others are woken.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{PoisonError, TryLockError};
use std::task::Waker;

use crate::sync::{AtomicBool, Mutex, MutexGuard, Ordering, fence};

/// The most tasks that are woken before the lock is taken again.
const WAKE_AT_ONCE: usize = 16;

/// A place in line that nobody needs any more.
#[derive(Clone, Copy)]
pub(super) enum Cancelled {
    /// In the line for room in the send queue.
    Room(u64),
    /// In the line of receives.
    Receive(u64),
    /// Among those that shut the channel down.
    Shutdown(u64),
}

/// What is behind the lock.
pub(super) trait Settle {
    /// Settles what dropped futures have left: these places, and what they have marked elsewhere.
    fn settle(&mut self, places: impl Iterator<Item = Cancelled>);

    /// Those to be woken when the lock is released.
    fn wakers(&mut self) -> &mut Vec<Waker>;
}

/// See the [module](self).
pub(super) struct Handover<S> {
    state: Mutex<S>,
    pub(super) cancelled: Mutex<Vec<Cancelled>>,
    /// Whether something was dropped that is not settled yet.
    pub(super) any_cancelled: AtomicBool,
}

impl<S: Settle> Handover<S> {
    pub(super) fn new(state: S) -> Self {
        Self {
            state: Mutex::new(state),
            cancelled: Mutex::default(),
            any_cancelled: AtomicBool::new(false),
        }
    }

    #[inline]
    pub(super) fn lock(&self) -> MutexGuard<'_, S> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub(super) fn try_lock(&self) -> Option<MutexGuard<'_, S>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(state)) => Some(state.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Releases the lock, then wakes the tasks that are to be woken.
    #[inline]
    pub(super) fn release<'a>(&'a self, mut state: MutexGuard<'a, S>) {
        if !state.wakers().is_empty() {
            return self.settle_and_release(state);
        }
        drop(state);
        // As at the end of `settle_and_release`.
        fence(Ordering::SeqCst);
        if self.any_cancelled.load(Ordering::SeqCst) {
            self.settle();
        }
    }

    /// To be called when a future is dropped that has left its mark, or this place. It does not wait.
    pub(super) fn cancel(&self, place: Option<Cancelled>) {
        if let Some(place) = place {
            self.cancelled.lock().unwrap_or_else(PoisonError::into_inner).push(place);
        }
        // Not a store: one that overwrites another thread's tells whoever reads it nothing of what that thread has left.
        self.any_cancelled.swap(true, Ordering::SeqCst);
        self.settle();
    }

    /// Settles what dropped futures have left, unless another thread has the lock, which then does it.
    fn settle(&self) {
        // Either this sees the lock released, or the one who releases it sees `any_cancelled`.
        fence(Ordering::SeqCst);
        if let Some(state) = self.try_lock() {
            self.settle_and_release(state);
        }
    }

    /// Releases the lock, after everything is settled, and wakes tasks.
    fn settle_and_release<'a>(&'a self, mut state: MutexGuard<'a, S>) {
        let mut panic = None;
        loop {
            // What this load misses, the one after the fence finds.
            if self.any_cancelled.load(Ordering::Relaxed)
                && self.any_cancelled.swap(false, Ordering::SeqCst)
            {
                state.settle(std::iter::from_fn(|| self.next_cancelled()));
            }
            let wakers = state.wakers();
            let more = match (wakers.pop(), wakers.is_empty()) {
                (Some(only), true) => {
                    drop(state);
                    wake(only, &mut panic);
                    false
                }
                (Some(last), false) => {
                    wakers.push(last);
                    wake_some(state, &mut panic)
                }
                (None, _) => {
                    drop(state);
                    false
                }
            };
            fence(Ordering::SeqCst);
            if !more && !self.any_cancelled.load(Ordering::SeqCst) {
                break;
            }
            // Whoever has it does the rest.
            let Some(again) = self.try_lock() else { break };
            state = again;
        }
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    fn next_cancelled(&self) -> Option<Cancelled> {
        self.cancelled.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }
}

/// What a waker that panicked has thrown.
type Panic = Option<Box<dyn Any + Send>>;

/// Wakes a task. If that panics, `panic` has what it threw, unless it has something.
fn wake(waker: Waker, panic: &mut Panic) {
    // Nothing of ours is used after a panic that it could have changed.
    if let Err(thrown) = catch_unwind(AssertUnwindSafe(|| waker.wake())) {
        panic.get_or_insert(thrown);
    }
}

/// Releases the lock and wakes several tasks. Returns whether there are more to wake.
#[inline(never)]
fn wake_some<S: Settle>(mut state: MutexGuard<'_, S>, panic: &mut Panic) -> bool {
    let mut woken = [const { None }; WAKE_AT_ONCE];
    let wakers = state.wakers();
    let count = wakers.len().min(WAKE_AT_ONCE);
    for (place, waker) in woken.iter_mut().zip(wakers.drain(..count)) {
        *place = Some(waker);
    }
    let more = !wakers.is_empty();
    drop(state);
    woken.into_iter().take(count).flatten().for_each(|waker| wake(waker, panic));
    more
}
