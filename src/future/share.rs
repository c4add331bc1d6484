//! How tasks share a loop.
//!
//! The loop is borrowed while something is posted or polled, and never while code of the program's runs: wakers are
//! cloned before, woken and dropped after. Events for `tracing` wait, too.

use std::cell::{RefCell, RefMut};
use std::ops::{Deref, DerefMut};
use std::rc::Rc;
use std::sync::{Arc, PoisonError};
use std::task::Waker;
use std::time::Instant;

use super::timer::Timer;
use crate::channel::{ChannelId, Detached, Doomed, Due, Left, Loop, TransportError};
use crate::debug::debug;
use crate::panics::{Panics, catch};
use crate::sync::{Mutex, MutexGuard};
use crate::trace;

/// How the tasks of a [`Reactor`](crate::Reactor) share its loop: [`Local`], on one thread, or [`Locked`], on any.
///
/// The trait is sealed.
pub trait Share: Clone + sealed::Share<Self::Buffer> {
    /// The type of the buffers of the loop, as in [`Loop`].
    type Buffer: Send + 'static;
}

/// Tasks of one thread share the loop, without a lock: for runtimes of one thread, and for a runtime per thread. Its
/// channels and futures are not `Send`.
#[derive(Debug)]
pub struct Local<B>(Rc<RefCell<State<B>>>);

/// Tasks of any threads share the loop, behind one lock, which is taken once by each poll of a future and by each turn.
#[derive(Debug)]
pub struct Locked<B>(Arc<Mutex<State<B>>>);

/// A loop, and what its tasks need beside it.
pub struct State<B> {
    pub(super) core: Loop<'static, B>,
    pub(super) is_stopped: bool,
    /// Of the task that runs the reactor.
    pub(super) runner: Option<Waker>,
    /// When the reactor has to look at the clock, though nothing completes.
    pub(super) alarm: Option<Instant>,
    pub(super) timer: Arc<Timer>,
    /// When the device was last asked for, or when the first question was due.
    pub(super) device_checked: Option<Instant>,
    /// When the connections are asked for next, on a device that completes nothing when they end.
    pub(super) next_check: Option<Instant>,
    /// An empty list that has room, unless a thread wakes tasks with it.
    spare: Option<Box<Due>>,
}

impl<B> State<B> {
    pub(super) fn new(core: Loop<'static, B>, timer: Arc<Timer>) -> Self {
        let (runner, alarm, device_checked, next_check) = Default::default();
        let spare = Some(Box::default());
        Self { core, is_stopped: false, runner, alarm, timer, device_checked, next_check, spare }
    }

    /// A future was dropped that waited. A reactor that runs has looked at the device.
    pub(super) fn note_given_up(&self) {
        if self.device_checked.is_none() {
            trace::reactor_stands("it has never run, and an operation was given up");
        }
    }

    /// Has the descriptor become readable at this time, or earlier.
    #[cold]
    pub(super) fn set_alarm(&mut self, at: Instant) {
        if self.alarm.is_none_or(|set| at < set) {
            self.alarm = Some(at);
            self.timer.set(self.alarm);
        }
    }
}

debug! { impl[B] State<B>, self, core: self.core, .. }

/// The loop is borrowed while it lives. Events that happen meanwhile are emitted afterwards.
#[expect(missing_debug_implementations, reason = "no program can name it")]
pub struct Guard<G> {
    state: G,
    // Dropped last.
    _events: trace::Hold,
}

impl<G: Deref> Deref for Guard<G> {
    type Target = G::Target;

    #[inline(always)]
    fn deref(&self) -> &G::Target {
        &self.state
    }
}

impl<G: DerefMut> DerefMut for Guard<G> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut G::Target {
        &mut self.state
    }
}

pub(super) mod sealed {
    use std::ops::DerefMut;

    use super::State;

    pub trait Share<B> {
        type Guard<'a>: DerefMut<Target = State<B>>
        where
            Self: 'a;

        fn new(state: State<B>) -> Self;

        /// To be given to [`release`](super::release), or dropped if there is nothing to be done later.
        fn lock(&self) -> Self::Guard<'_>;
    }
}

impl<B> Clone for Local<B> {
    #[inline]
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<B> Clone for Locked<B> {
    #[inline]
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<B: Send + 'static> Share for Local<B> {
    type Buffer = B;
}

impl<B: Send + 'static> Share for Locked<B> {
    type Buffer = B;
}

impl<B: Send + 'static> sealed::Share<B> for Local<B> {
    type Guard<'a> = Guard<RefMut<'a, State<B>>>;

    fn new(state: State<B>) -> Self {
        Self(Rc::new(RefCell::new(state)))
    }

    #[inline(always)]
    fn lock(&self) -> Self::Guard<'_> {
        Guard { _events: trace::Hold::new(), state: self.0.borrow_mut() }
    }
}

impl<B: Send + 'static> sealed::Share<B> for Locked<B> {
    type Guard<'a> = Guard<MutexGuard<'a, State<B>>>;

    fn new(state: State<B>) -> Self {
        Self(Arc::new(Mutex::new(state)))
    }

    #[inline(always)]
    fn lock(&self) -> Self::Guard<'_> {
        let events = trace::Hold::new();
        // What is behind the lock is consistent at every moment.
        Guard { _events: events, state: self.0.lock().unwrap_or_else(PoisonError::into_inner) }
    }
}

/// Gives the loop back, then wakes the tasks that are to be woken, and drops the buffers that no task asks for.
#[inline(always)]
pub(super) fn release<S: Share>(share: &S, mut guard: S::Guard<'_>) {
    if !guard.core.deferred().is_empty() {
        release_and_wake(share, guard);
    }
}

/// As [`release`], and closes a channel on which a post has failed.
#[inline(never)]
pub(super) fn release_and_wake<S: Share>(share: &S, mut guard: S::Guard<'_>) {
    // The usual case.
    if let Some(only) = guard.core.deferred().take_only() {
        drop(guard);
        return only.wake();
    }
    release_all(share, guard);
}

#[inline(never)]
fn release_all<S: Share>(share: &S, mut guard: S::Guard<'_>) {
    let state = &mut *guard;
    let Some(spare) = state.spare.take() else {
        drop(guard);
        return release_left(share).resume();
    };
    let mut rest = Rest { share, due: Some(state.core.deferred().exchange(spare)) };
    drop(guard);
    let Some(due) = &mut rest.due else { return };
    while let Some((channel, error)) = due.failed.pop() {
        stop(share, channel, error);
    }
    while let Some(waker) = due.woken.pop() {
        waker.wake();
    }
}

/// What is still to be done, also when a waker has panicked.
struct Rest<'a, S: Share> {
    share: &'a S,
    /// There until it is the spare list again.
    due: Option<Box<Due>>,
}

impl<S: Share> Drop for Rest<'_, S> {
    #[inline]
    fn drop(&mut self) {
        let mut panics = Panics::default();
        let woken = self.due.iter_mut().flat_map(|due| due.woken.drain(..));
        woken.for_each(|waker| panics.catch(|| waker.wake()));
        let mut guard = self.share.lock();
        guard.spare = self.due.take();
        let is_empty = guard.core.deferred().is_empty();
        drop(guard);
        if !is_empty {
            panics.add(release_left(self.share));
        }
        // It is already unwinding, or what has panicked is a buffer.
        panics.forget();
    }
}

/// As [`release_and_wake`], one by one: while others wake tasks, without memory, and for buffers that no task asks for.
/// Returns what they have thrown.
#[cold]
#[inline(never)]
fn release_left<S: Share>(share: &S) -> Panics {
    let mut panics = Panics::default();
    loop {
        let left = share.lock().core.take_left();
        match left {
            Some(Left::Failed(channel, error)) => panics.catch(|| stop(share, channel, error)),
            Some(Left::Woken(waker)) => panics.catch(|| waker.wake()),
            Some(Left::Dropped(buffer)) => panics.catch(|| drop(buffer)),
            None => return panics,
        }
    }
}

/// As [`release`], where something is dropped: panics end here.
pub(super) fn release_quietly<S: Share>(share: &S, guard: S::Guard<'_>) {
    let _ = catch(|| release(share, guard));
}

/// Ends all operations of a channel, without waiting. Further ones fail with `error`.
pub(super) fn stop<S: Share>(share: &S, channel: ChannelId, error: TransportError) {
    let mut guard = share.lock();
    let Some(closed) = guard.core.close(channel, error) else { return release(share, guard) };
    drop(guard);
    let is_reset = closed.try_reset();
    put_back(share, closed, Some(is_reset));
}

/// Puts a channel back that was taken out; if it was closed, and reset or not, what it had in flight ends.
pub(super) fn put_back<S: Share>(share: &S, detached: Detached<'static>, is_reset: Option<bool>) {
    let id = detached.id;
    let mut guard = share.lock();
    if let Some(dropped) = guard.core.give_back(detached) {
        drop(guard);
        return destroy(share, dropped);
    }
    if let Some(is_reset) = is_reset {
        guard.core.end_closed(id, is_reset);
    }
    release(share, guard);
}

/// Destroys a channel.
pub(super) fn destroy<S: Share>(share: &S, doomed: Doomed<'static>) {
    if doomed.stop_sharing() {
        let mut guard = share.lock();
        guard.core.take_completions();
        release_quietly(share, guard);
    }
    let destroyed = doomed.destroy();
    let mut guard = share.lock();
    guard.core.discard(destroyed);
    release_quietly(share, guard);
}
