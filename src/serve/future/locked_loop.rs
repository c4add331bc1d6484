//! How tasks share a loop.
//!
//! The loop is borrowed while something is posted or polled, and never while the program's code runs: wakers are cloned
//! before, and woken and dropped after; events for `tracing` wait.

use std::cell::{RefCell, RefMut};
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::rc::Rc;
use std::sync::{Arc, PoisonError};
use std::task::Waker;
use std::thread;
use std::time::Instant;

use super::stall_warning::StallWarning;
use super::timer::Timer;
use crate::base::{
    debug,
    panics::{Panics, catch},
    sync::{Mutex, MutexGuard},
    trace,
};
use crate::channel::TransportError;
use crate::serve::event_loop::{
    ChannelId, DeferredStep, DeferredWork, Detached, Loop, PendingDestroy,
};

/// How the tasks of a [`Reactor`](crate::Reactor) share its loop: [`Local`], on one thread, or [`Locked`], on any.
/// Sealed.
pub trait Share: Clone + sealed::Share<Self::Buffer> {
    /// The type of the loop's buffers, as in [`Loop`].
    type Buffer: Send + 'static;
}

/// Tasks of one thread share the loop, without a lock. Its channels and futures are not `Send`.
#[derive(Debug)]
pub struct Local<B>(Rc<RefCell<State<B>>>);

/// Tasks of any threads share the loop behind one lock, taken once by each turn and poll of a future.
#[derive(Debug)]
pub struct Locked<B>(Arc<Mutex<State<B>>>);

/// A loop, with what its tasks need.
pub struct State<B> {
    pub(super) core: Loop<'static, B>,
    pub(super) is_stopped: bool,
    pub(super) runner: Option<Waker>,
    /// When to look at the clock although nothing completes.
    pub(super) alarm: Option<Instant>,
    pub(super) timer: Arc<Timer>,
    pub(super) stall_warning: StallWarning,
    /// When the kernel was last asked about the device, or first should have been.
    pub(super) device_checked: Option<Instant>,
    /// When to check the connections; set only on iWARP.
    pub(super) next_check: Option<Instant>,
    /// Room for wakers. A thread that wakes tasks takes it.
    spare: Option<DeferredWork>,
}

impl<B> State<B> {
    pub(super) fn new(core: Loop<'static, B>, timer: Arc<Timer>) -> Self {
        let (runner, alarm, device_checked, next_check) = Default::default();
        let spare = Some(DeferredWork::default());
        let (stall_warning, is_stopped) = (StallWarning::new(), false);
        Self {
            core,
            is_stopped,
            runner,
            alarm,
            timer,
            stall_warning,
            device_checked,
            next_check,
            spare,
        }
    }

    /// A reactor that has run has set `device_checked`.
    pub(super) fn note_given_up(&self) {
        if self.device_checked.is_none() {
            trace::reactor_stands("it has never run, and an operation was given up");
        }
    }

    #[cold]
    pub(super) fn set_alarm(&mut self, at: Instant) {
        if self.alarm.is_none_or(|set| at < set) {
            self.alarm = Some(at);
            self.timer.set(self.alarm);
        }
    }
}

debug! { impl[B] State<B>, self, core: self.core, .. }

/// Borrows the loop, where nothing becomes due, or a later [`Guard`] does it. Compilers keep it in registers.
pub(super) struct Borrowed<'a, S: Share + 'a> {
    state: S::State<'a>,
    /// Dropped after the lock.
    _events: trace::Hold,
}

/// Borrows the loop. Its drop wakes tasks, stops channels on which a post has failed, drops buffers that no task asks
/// for, and emits events for `tracing`.
pub(super) struct Guard<'a, S: Share> {
    share: &'a S,
    /// Taken when it ends.
    borrowed: ManuallyDrop<Borrowed<'a, S>>,
}

pub(super) trait Lock: Share {
    #[inline(always)]
    fn lock_briefly(&self) -> Borrowed<'_, Self> {
        let _events = trace::Hold::new();
        Borrowed { state: self.borrow(), _events }
    }

    #[inline(always)]
    fn lock(&self) -> Guard<'_, Self> {
        self.lock_briefly().until_done(self)
    }
}

impl<S: Share> Lock for S {}

impl<'a, S: Share> Borrowed<'a, S> {
    #[inline(always)]
    pub(super) fn until_done(self, share: &'a S) -> Guard<'a, S> {
        Guard { share, borrowed: ManuallyDrop::new(self) }
    }
}

impl<'a, S: Share> Guard<'a, S> {
    #[inline(always)]
    pub(super) fn briefly(self) -> Borrowed<'a, S> {
        // SAFETY: `self` is consumed and its drop does not run, so this is taken once.
        unsafe { ManuallyDrop::take(&mut ManuallyDrop::new(self).borrowed) }
    }

    /// For when nothing is due, or a later guard does it.
    #[inline(always)]
    pub(super) fn unlock(self) {
        drop(self.briefly());
    }
}

impl<'a, S: Share + 'a> Deref for Borrowed<'a, S> {
    type Target = State<S::Buffer>;

    #[inline(always)]
    fn deref(&self) -> &Self::Target {
        &self.state
    }
}

impl<'a, S: Share + 'a> DerefMut for Borrowed<'a, S> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.state
    }
}

impl<'a, S: Share> Deref for Guard<'a, S> {
    type Target = Borrowed<'a, S>;

    #[inline(always)]
    fn deref(&self) -> &Self::Target {
        &self.borrowed
    }
}

impl<S: Share> DerefMut for Guard<'_, S> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.borrowed
    }
}

impl<S: Share> Drop for Guard<'_, S> {
    /// A waker's panic goes on from here, unless the thread unwinds already.
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: a drop runs once, and nothing uses the field afterwards.
        let mut borrowed = unsafe { ManuallyDrop::take(&mut self.borrowed) };
        if !borrowed.core.deferred().is_empty() {
            end_and_wake(self.share, borrowed);
        }
    }
}

#[inline(never)]
fn end_and_wake<S: Share>(share: &S, mut borrowed: Borrowed<'_, S>) {
    let only = borrowed.core.deferred().take_only();
    let mut rest = None;
    if only.is_none() {
        let state = &mut *borrowed;
        rest = state.spare.take().map(|spare| state.core.deferred().exchange(spare));
    }
    drop(borrowed);
    let wake = || match only {
        Some(only) => only.wake(),
        None => wake_all(share, rest),
    };
    if thread::panicking() {
        let _ = catch(wake);
    } else {
        wake();
    }
}

/// Resumes the first panic once everything is done.
#[inline(never)]
fn wake_all<S: Share>(share: &S, work: Option<DeferredWork>) {
    let Some(mut work) = work else { return release_deferred(share).resume() };
    let mut panics = work.do_all(|channel, error| end_failed(share, channel, error));
    let mut guard = share.lock();
    guard.spare = Some(work);
    let is_empty = guard.core.deferred().is_empty();
    guard.unlock();
    if !is_empty {
        panics.add(release_deferred(share));
    }
    panics.resume();
}

pub(super) mod sealed {
    use std::ops::DerefMut;

    use super::State;

    pub trait Share<B> {
        type State<'a>: DerefMut<Target = State<B>>
        where
            Self: 'a;

        fn new(state: State<B>) -> Self;

        /// Only [`lock`](super::Lock::lock) calls it.
        fn borrow(&self) -> Self::State<'_>;
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
    type State<'a> = RefMut<'a, State<B>>;

    fn new(state: State<B>) -> Self {
        Self(Rc::new(RefCell::new(state)))
    }

    #[inline(always)]
    fn borrow(&self) -> Self::State<'_> {
        self.0.borrow_mut()
    }
}

impl<B: Send + 'static> sealed::Share<B> for Locked<B> {
    type State<'a> = MutexGuard<'a, State<B>>;

    fn new(state: State<B>) -> Self {
        Self(Arc::new(Mutex::new(state)))
    }

    #[inline(always)]
    fn borrow(&self) -> Self::State<'_> {
        // What is behind the lock is always consistent.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// [`wake_all`] without memory for the list, while others wake tasks, and for buffers that no task asks for.
#[cold]
#[inline(never)]
fn release_deferred<S: Share>(share: &S) -> Panics {
    let mut panics = Panics::default();
    loop {
        let mut guard = share.lock();
        let left = guard.core.take_deferred();
        guard.unlock();
        match left {
            Some(DeferredStep::Failed(channel, error)) => {
                panics.catch(|| end_failed(share, channel, error))
            }
            Some(DeferredStep::Woken(waker)) => panics.catch(|| waker.wake()),
            Some(DeferredStep::Dropped(buffer)) => panics.catch(|| drop(buffer)),
            None => return panics,
        }
    }
}

/// For drops: panics end here.
pub(super) fn release_quietly<S: Share>(guard: Guard<'_, S>) {
    let _ = catch(|| drop(guard));
}

#[cold]
fn end_failed<S: Share>(share: &S, channel: ChannelId, error: Option<TransportError>) {
    if let Some(error) = error {
        return stop(share, channel, error);
    }
    let mut guard = share.lock();
    let Some(out) = guard.core.borrow_to_flush(channel) else { return };
    guard.unlock();
    out.flush();
    put_back(share, out, None);
}

/// Does not wait. Later operations fail with `error`.
pub(super) fn stop<S: Share>(share: &S, channel: ChannelId, error: TransportError) {
    let mut guard = share.lock();
    let Some(closed) = guard.core.close(channel, error) else { return };
    // The tasks are woken once the channel is back.
    guard.unlock();
    let is_reset = closed.try_reset();
    put_back(share, closed, Some(is_reset));
}

/// `is_reset` is set if the channel was closed: its operations in flight end.
pub(super) fn put_back<S: Share>(share: &S, detached: Detached<'static>, is_reset: Option<bool>) {
    let id = detached.id;
    let mut guard = share.lock();
    if let Some(dropped) = guard.core.give_back(detached) {
        guard.unlock();
        return destroy(share, dropped);
    }
    if let Some(is_reset) = is_reset {
        guard.core.end_closed(id, is_reset);
    }
}

pub(super) fn destroy<S: Share>(share: &S, pending: PendingDestroy<'static>) {
    if pending.stop_sharing() {
        let mut guard = share.lock();
        guard.core.take_completions();
        release_quietly(guard);
    }
    let destroyed = pending.destroy();
    let mut guard = share.lock();
    guard.core.discard(destroyed);
    release_quietly(guard);
}
