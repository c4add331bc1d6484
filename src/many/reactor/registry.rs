//! The channels of a reactor.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;

use crate::channel::{PolledCompletion, SharedCompletionQueue, TransportError};
use crate::many::async_channel::Shared;

/// What a reactor shares with its channels.
pub(crate) struct Registry {
    pub(super) queue: Arc<SharedCompletionQueue<'static>>,
    places: Mutex<Places>,
    /// Channels to be destroyed. `None`: the reactor is gone.
    closing: Mutex<Option<Vec<Arc<Shared>>>>,
    /// Of the task that runs the reactor, while it sleeps.
    runner: Mutex<Option<Waker>>,
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
    pub(super) fn new(queue: SharedCompletionQueue<'static>) -> Self {
        Self {
            queue: Arc::new(queue),
            places: Mutex::default(),
            closing: Mutex::new(Some(Vec::new())),
            runner: Mutex::default(),
        }
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
            channel.end(TransportError::Stopped);
        }
    }

    /// Serves the channel with this token: it takes what is in its inbox.
    pub(super) fn serve(&self, token: u64) {
        if let Some(channel) = self.channel(token) {
            channel.serve();
        }
    }

    /// Serves the channel with this token: these completions were polled for it. If it is gone, they are dropped:
    /// nothing is posted before a channel is connected.
    #[inline]
    pub(super) fn serve_polled(&self, token: u64, polled: &[PolledCompletion]) {
        if let Some(channel) = self.channel(token)
            && !channel.try_serve(polled)
        {
            self.queue.put_back(polled);
        }
    }

    #[inline]
    fn channel(&self, token: u64) -> Option<Arc<Shared>> {
        lock(&self.places).channels.get(token as usize).and_then(Weak::upgrade)
    }

    /// Has the reactor end and destroy a channel. Returns it if the reactor is gone.
    pub(crate) fn close(&self, channel: Arc<Shared>) -> Result<(), Arc<Shared>> {
        match &mut *lock(&self.closing) {
            Some(closing) => closing.push(channel),
            None => return Err(channel),
        }
        self.wake_runner();
        Ok(())
    }

    /// Ends the channels that were given to [`close`](Self::close). Each is destroyed then, or with the last
    /// of its futures.
    pub(super) fn end_closing(&self) {
        let closing = match &mut *lock(&self.closing) {
            Some(closing) if !closing.is_empty() => std::mem::take(closing),
            _ => return,
        };
        for channel in closing {
            channel.end(TransportError::Stopped);
        }
    }

    /// Ends all channels: nobody serves them any more.
    pub(super) fn stop(&self, error: TransportError) {
        let closing = lock(&self.closing).take();
        let channels = std::mem::take(&mut lock(&self.places).channels);
        for channel in channels.iter().filter_map(Weak::upgrade) {
            channel.end(error);
        }
        for channel in closing.into_iter().flatten() {
            channel.end(error);
        }
        self.wake_runner();
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

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").field("queue", &self.queue).finish_non_exhaustive()
    }
}
