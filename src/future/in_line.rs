//! A task that waits in a line of a channel.

use std::mem;
use std::task::Waker;

use super::AsyncChannel;
use super::share::{Guard, Lock, Share, release_quietly};
use crate::channel::{Queue, TransportResult};
use crate::panics::catch;

/// A place in a line, which is given up when this is dropped.
pub(super) struct InLine<'a, S: Share> {
    channel: &'a AsyncChannel<S>,
    queue: Queue,
    place: Option<u32>,
}

impl<'a, S: Share> InLine<'a, S> {
    /// No place yet.
    pub(super) fn new(channel: &'a AsyncChannel<S>, queue: Queue) -> Self {
        Self { channel, queue, place: None }
    }

    /// Has the task woken when it is its turn.
    ///
    /// # Errors
    ///
    ///  - `ENOMEM`: there is no memory for its place.
    pub(super) fn wait(&mut self, mut guard: Guard<'_, S>, waker: Waker) -> TransportResult<()> {
        let mut waker = Some(waker);
        let joined = match self.place {
            Some(place) => {
                mem::swap(guard.core.waker_in_line(place), &mut waker);
                Ok(())
            }
            None => {
                let joined = guard.core.join_line(self.channel.id, self.queue, &mut waker);
                joined.map(|place| self.place = Some(place))
            }
        };
        drop(guard);
        drop(waker);
        joined
    }
}

impl<S: Share> Drop for InLine<'_, S> {
    fn drop(&mut self) {
        let Some(place) = self.place else { return };
        let AsyncChannel { share, id, .. } = self.channel;
        let mut guard = share.lock();
        let waker = guard.core.leave_line(*id, self.queue, place);
        // It may have been woken for what the next one takes.
        match self.queue {
            Queue::Receive => guard.core.wake_receiver(*id),
            Queue::Send => guard.core.wake_line(*id, Queue::Send),
        }
        release_quietly(guard);
        let _ = catch(|| drop(waker));
    }
}
