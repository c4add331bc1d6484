//! The lock of a channel, and what others leave for whoever has it.
//!
//! The lock is held while something is posted or polled, and never while a waker is woken or dropped: either may run any
//! code. So whoever has the lock collects wakers, and wakes and drops them after releasing it. Events for `tracing`, whose
//! subscriber is the program's too, wait as well. A future that is dropped
//! does not wait for the lock. It leaves its place in line here, and whoever has the lock settles that when releasing it.
//!
//! A waker that panics takes no wake-up from other tasks: see [`Panics`].

use std::ops::{Deref, DerefMut};
use std::sync::{PoisonError, TryLockError};
use std::task::Waker;

use crate::channel::Later;
use crate::panics::Panics;
use crate::sync::{AtomicBool, Mutex, MutexGuard, Ordering, fence};
use crate::trace;

/// The most wakers that are used before the lock is taken again.
const AT_ONCE: usize = 16;

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

    /// What is to be done when the lock is released.
    fn later(&mut self) -> &mut Vec<Later>;
}

/// See the [module](self).
pub(super) struct Handover<S> {
    state: Mutex<S>,
    pub(super) cancelled: Mutex<Vec<Cancelled>>,
    /// Whether something was dropped that is not settled yet.
    pub(super) any_cancelled: AtomicBool,
}

/// The lock is held while it lives. Events that happen meanwhile are emitted when it was released.
pub(super) struct Guard<'a, S> {
    state: MutexGuard<'a, S>,
    // Dropped last.
    _events: trace::Hold,
}

impl<S> Deref for Guard<'_, S> {
    type Target = S;

    #[inline]
    fn deref(&self) -> &S {
        &self.state
    }
}

impl<S> DerefMut for Guard<'_, S> {
    #[inline]
    fn deref_mut(&mut self) -> &mut S {
        &mut self.state
    }
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
    pub(super) fn lock(&self) -> Guard<'_, S> {
        let events = trace::Hold::new();
        Guard { state: self.state.lock().unwrap_or_else(PoisonError::into_inner), _events: events }
    }

    #[inline]
    pub(super) fn try_lock(&self) -> Option<Guard<'_, S>> {
        let state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(Guard { state, _events: trace::Hold::new() })
    }

    /// Releases the lock, then wakes the tasks that are to be woken, and `last`.
    #[inline]
    pub(super) fn release<'a>(&'a self, mut state: Guard<'a, S>, last: Option<Waker>) {
        if !state.later().is_empty() {
            return self.release_with_others(state, last);
        }
        drop(state);
        // As at the end of `settle_and_release`.
        fence(Ordering::SeqCst);
        if self.any_cancelled.load(Ordering::SeqCst) {
            return self.settle_with_last(last);
        }
        if let Some(last) = last {
            last.wake();
        }
    }

    /// As [`release`](Self::release), if there are others to be woken.
    #[inline(never)]
    fn release_with_others<'a>(&'a self, mut state: Guard<'a, S>, last: Option<Waker>) {
        state.later().extend(last.map(Later::Wake));
        self.release_catching(state).resume();
    }

    /// As the end of [`release`](Self::release), if something was dropped.
    #[cold]
    fn settle_with_last(&self, last: Option<Waker>) {
        let mut panics = self.settle();
        if let Some(last) = last {
            panics.catch(|| last.wake());
        }
        panics.resume();
    }

    /// As [`release`](Self::release). What wakers have thrown is returned.
    pub(super) fn release_catching<'a>(&'a self, state: Guard<'a, S>) -> Panics {
        let mut panics = Panics::default();
        self.settle_and_release(state, &mut panics);
        panics
    }

    /// To be called when a future is dropped that has left its mark, or this place. It does not wait.
    pub(super) fn cancel(&self, place: Option<Cancelled>) {
        if let Some(place) = place {
            self.cancelled.lock().unwrap_or_else(PoisonError::into_inner).push(place);
        }
        // Not a store: one that overwrites another thread's tells whoever reads it nothing of what that thread has left.
        self.any_cancelled.swap(true, Ordering::SeqCst);
        self.settle().forget();
    }

    /// Settles what dropped futures have left, unless another thread has the lock, which then does it.
    fn settle(&self) -> Panics {
        let mut panics = Panics::default();
        // Either this sees the lock released, or the one who releases it sees `any_cancelled`.
        fence(Ordering::SeqCst);
        if let Some(state) = self.try_lock() {
            self.settle_and_release(state, &mut panics);
        }
        panics
    }

    /// Releases the lock, after everything is settled, and then uses the wakers.
    fn settle_and_release<'a>(&'a self, mut state: Guard<'a, S>, panics: &mut Panics) {
        loop {
            // What this load misses, the one after the fence finds.
            if self.any_cancelled.load(Ordering::Relaxed)
                && self.any_cancelled.swap(false, Ordering::SeqCst)
            {
                state.settle(std::iter::from_fn(|| self.next_cancelled()));
            }
            let later = state.later();
            let more = match (later.pop(), later.is_empty()) {
                (Some(only), true) => {
                    drop(state);
                    panics.catch(|| only.run());
                    false
                }
                (Some(last), false) => {
                    later.push(last);
                    run_some(state, panics)
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
    }

    fn next_cancelled(&self) -> Option<Cancelled> {
        self.cancelled.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }
}

/// Releases the lock and uses several wakers. Returns whether there are more.
#[inline(never)]
fn run_some<S: Settle>(mut state: Guard<'_, S>, panics: &mut Panics) -> bool {
    let mut some = [const { None }; AT_ONCE];
    let later = state.later();
    let count = later.len().min(AT_ONCE);
    for (place, later) in some.iter_mut().zip(later.drain(..count)) {
        *place = Some(later);
    }
    let more = !later.is_empty();
    drop(state);
    some.into_iter().take(count).flatten().for_each(|later| panics.catch(|| later.run()));
    more
}

#[cfg(all(test, not(ibverbs_loom)))]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;

    use super::*;

    struct Wakers(Vec<Later>);

    impl Settle for Wakers {
        fn settle(&mut self, _: impl Iterator<Item = Cancelled>) {}

        fn later(&mut self) -> &mut Vec<Later> {
            &mut self.0
        }
    }

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// However many there are, each is woken once, and each that is to be dropped is dropped.
    #[test]
    fn no_waker_is_left_out() {
        for wakers in [0, 1, 2, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, 2 * AT_ONCE + 1, 100] {
            for with_last in [false, true] {
                let handover = Handover::new(Wakers(Vec::new()));
                let counts: Vec<_> = (0..=wakers).map(|_| Arc::new(Count::default())).collect();
                let waker = |index: usize| Waker::from(counts[index].clone());
                let mut state = handover.lock();
                for index in 0..wakers {
                    let is_woken = index % 3 != 2;
                    let later = if is_woken { Later::Wake } else { Later::Drop };
                    state.0.push(later(waker(index)));
                }
                handover.release(state, with_last.then(|| waker(wakers)));
                for (index, count) in counts.iter().enumerate() {
                    let is_woken = if index == wakers { with_last } else { index % 3 != 2 };
                    assert_eq!(count.0.load(Ordering::SeqCst), usize::from(is_woken), "{index}");
                    assert_eq!(Arc::strong_count(count), 1, "{index} of {wakers} is kept");
                }
                assert!(handover.lock().0.is_empty());
            }
        }
    }
}
