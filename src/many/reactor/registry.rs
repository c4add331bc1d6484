//! The channels of a reactor.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;
use std::time::Instant;

use super::alarms::Alarms;
use crate::channel::{PolledCompletion, SharedCompletionQueue, TransportError};
use crate::error::Result;
use crate::many::async_channel::Shared;
use crate::panics::{Panics, catch};

/// What a reactor shares with its channels.
pub(crate) struct Registry {
    pub(super) queue: Arc<SharedCompletionQueue<'static>>,
    places: Mutex<Places>,
    /// Channels to be destroyed. `None`: the reactor is gone.
    closing: Mutex<Option<Vec<Arc<Shared>>>>,
    /// Of the task that runs the reactor, while it sleeps.
    runner: Mutex<Option<Waker>>,
    /// Channels that wait until what was polled for them has reached them.
    waiting: Mutex<Vec<Weak<Shared>>>,
    /// Whether `waiting` has something, or an alarm is set.
    any_waiting: AtomicBool,
    pub(super) alarms: Alarms,
}

#[derive(Default)]
struct Places {
    /// By token. Empty if the channel is not connected yet, or gone.
    channels: Vec<Weak<Shared>>,
    free: Vec<u64>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is behind these locks is consistent at every moment.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Registry {
    /// The queue has an event channel.
    pub(super) fn new(queue: SharedCompletionQueue<'static>) -> Result<Self> {
        Ok(Self {
            alarms: Alarms::new(queue.event_fd()?)?,
            queue: Arc::new(queue),
            places: Mutex::default(),
            closing: Mutex::new(Some(Vec::new())),
            runner: Mutex::default(),
            waiting: Mutex::default(),
            any_waiting: AtomicBool::new(false),
        })
    }

    pub(crate) fn queue(&self) -> &Arc<SharedCompletionQueue<'static>> {
        &self.queue
    }

    /// A token for a channel.
    pub(crate) fn reserve(&self) -> u64 {
        let mut places = lock(&self.places);
        if let Some(token) = places.free.pop() {
            return token;
        }
        places.channels.push(Weak::new());
        places.channels.len() as u64 - 1
    }

    /// Gives a token back.
    pub(crate) fn release(&self, token: u64) {
        let mut places = lock(&self.places);
        if let Some(place) = places.channels.get_mut(token as usize) {
            *place = Weak::new();
            places.free.push(token);
        }
    }

    /// From now on, the channel with this token is served.
    pub(crate) fn connect(&self, token: u64, channel: &Arc<Shared>) {
        if let Some(place) = lock(&self.places).channels.get_mut(token as usize) {
            *place = Arc::downgrade(channel);
        }
        // The reactor may have gone meanwhile.
        if lock(&self.closing).is_none() {
            channel.end(TransportError::Stopped).resume();
        }
    }

    /// Serves the channel with this token: it takes what is in its inbox.
    pub(super) fn serve(&self, token: u64) {
        if let Some(channel) = self.channel(token) {
            channel.serve();
        }
    }

    /// Serves the channel with this token: these completions were polled for it. If it is not connected yet, they
    /// are of receives that were posted before, and stay in its inbox. If it is gone, they are dropped.
    #[inline]
    pub(super) fn serve_polled(&self, token: u64, polled: &[PolledCompletion]) {
        if !self.channel(token).is_some_and(|channel| channel.try_serve(polled)) {
            self.queue.put_back(polled);
        }
    }

    /// The number of polls so far. Completions that one of them has found may still be on their way to their channels.
    pub(crate) fn polls_begun(&self) -> u64 {
        self.queue.polls().0
    }

    /// Whether all that the first `begun` polls have found has reached its channels. If not, the channel is served when
    /// it has.
    pub(crate) fn has_arrived(&self, begun: u64, channel: &Arc<Shared>) -> bool {
        let has_arrived = || self.queue.polls().1 >= begun;
        if has_arrived() {
            return true;
        }
        lock(&self.waiting).push(Arc::downgrade(channel));
        self.any_waiting.store(true, Ordering::SeqCst);
        // Either this sees that the poll is done, or the thread that has polled sees the flag.
        has_arrived()
    }

    /// Serves the channels that wait for what was polled. To be called when it has reached its channels.
    #[inline]
    pub(super) fn serve_waiting(&self) {
        if self.any_waiting.load(Ordering::SeqCst) {
            self.serve_all_waiting();
        }
    }

    #[cold]
    fn serve_all_waiting(&self) {
        // Before the list is taken: whoever adds to it later sets the flag again.
        self.any_waiting.store(false, Ordering::SeqCst);
        let waiting = std::mem::take(&mut *lock(&self.waiting));
        let mut panics = Panics::default();
        for channel in waiting.iter().filter_map(Weak::upgrade) {
            panics.catch(|| channel.serve());
        }
        let (due, more) = self.alarms.take_due();
        if more {
            self.any_waiting.store(true, Ordering::SeqCst);
        }
        for channel in due.iter().filter_map(|&token| self.channel(token)) {
            // A task's waker that panics must not take the time from other channels.
            let _ = catch(|| channel.alarm());
        }
        panics.resume();
    }

    /// Has a turn call [`Shared::alarm`] at `at`.
    pub(crate) fn set_alarm(&self, at: Instant, token: u64) {
        self.alarms.set(at, token);
        self.any_waiting.store(true, Ordering::SeqCst);
    }

    #[inline]
    fn channel(&self, token: u64) -> Option<Arc<Shared>> {
        lock(&self.places).channels.get(token as usize).and_then(Weak::upgrade)
    }

    /// Has the reactor end and destroy a channel. Returns it if the reactor is gone.
    pub(crate) fn close(&self, channel: Arc<Shared>) -> std::result::Result<(), Arc<Shared>> {
        match &mut *lock(&self.closing) {
            Some(closing) => closing.push(channel),
            None => return Err(channel),
        }
        let mut panics = Panics::default();
        panics.catch(|| self.wake_runner());
        // A channel is being dropped.
        panics.forget();
        Ok(())
    }

    /// Ends at most `most` of the channels that were given to [`close`](Self::close), and returns how many. Each is
    /// destroyed then; or, if it has futures, when the last of them has given it to `close` again.
    #[inline]
    pub(super) fn end_closing(&self, most: usize) -> usize {
        let closing: Vec<_> = match &mut *lock(&self.closing) {
            Some(closing) if !closing.is_empty() => {
                closing.drain(..closing.len().min(most)).collect()
            }
            _ => return 0,
        };
        let count = closing.len();
        end_all(closing, TransportError::Stopped).resume();
        count
    }

    /// Ends all channels: nobody serves them any more. Returns what wakers have thrown.
    pub(super) fn stop(&self, error: TransportError) -> Panics {
        let closing = lock(&self.closing).take();
        let channels = std::mem::take(&mut lock(&self.places).channels);
        let channels = channels.iter().filter_map(Weak::upgrade);
        let mut panics = end_all(channels.chain(closing.into_iter().flatten()), error);
        panics.catch(|| self.wake_runner());
        panics
    }

    /// Whether nobody serves the channels any more.
    pub(super) fn is_stopped(&self) -> bool {
        lock(&self.closing).is_none()
    }

    /// Has the task that runs the reactor look again.
    pub(crate) fn wake_runner(&self) {
        let runner = lock(&self.runner).take();
        if let Some(runner) = runner {
            runner.wake();
        }
    }

    pub(super) fn set_runner(&self, waker: &Waker) {
        let waker = waker.clone();
        let before = lock(&self.runner).replace(waker);
        drop(before);
    }
}

/// Ends channels. Returns what wakers have thrown.
#[inline(never)]
fn end_all(channels: impl IntoIterator<Item = Arc<Shared>>, error: TransportError) -> Panics {
    let mut panics = Panics::default();
    for channel in channels {
        panics.add(channel.end(error));
    }
    panics
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").field("queue", &self.queue).finish_non_exhaustive()
    }
}
