//! What an [`AsyncChannel`](super::AsyncChannel), its futures and the reactor share.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use super::connect::Connected;
use super::handover::{Cancelled, Guard, Handover, Settle};
use super::line::Line;
use crate::channel::{
    Channel, DEVICE_CHECK_PERIOD, Later, OperationError, OwnedWork, PolledCompletion, TaskDrops,
    TransportError,
};
use crate::completion::WorkErrorClass;
use crate::many::pool::PooledBuffer;
use crate::many::reactor::Registry;
use crate::panics::Panics;

/// See the [module](self).
pub(crate) struct Shared {
    /// Everything that changes.
    handover: Handover<State>,
    /// Where operations whose futures were dropped are marked, without the lock.
    drops: TaskDrops,
    pub(super) registry: Arc<Registry>,
    /// The channel's place in the registry.
    pub(super) token: u64,
}

/// Behind the lock.
pub(super) struct State {
    pub(super) channel: Channel<'static>,
    /// Those that wait for room in the send queue.
    pub(super) room: Line,
    /// The first in that line lacks credit, not room.
    pub(super) lacks_credit: bool,
    /// A turn of the reactor will wake the first in line.
    pub(super) on_clock: bool,
    /// When a turn is to look whether the connection has ended, on a device that completes nothing then.
    next_check: Option<Instant>,
    /// Those that wait for a message.
    pub(super) receivers: Line,
    /// The receives that were posted and whose messages nobody has taken yet, in order.
    pub(super) posted: VecDeque<OwnedWork<PooledBuffer>>,
    /// Buffers of receives that could not be posted yet.
    pub(super) held: VecDeque<PooledBuffer>,
    /// The number of receives to keep posted beyond those that are waited for.
    pub(super) ahead: usize,
    /// Those that wait until the sends have ended.
    pub(super) shutdowns: Line,
    pub(super) draining: bool,
    /// Why nothing can be posted any more.
    pub(super) ended: Option<TransportError>,
    /// What is to be done with wakers when the lock is released.
    pub(super) later: Vec<Later>,
}

impl Shared {
    /// The caller then has the registry know it, and calls [`alarm`](Self::alarm).
    pub(super) fn new(connected: Connected, registry: Arc<Registry>, token: u64) -> Self {
        let Connected { channel, posted, held } = connected;
        let drops = channel.task_drops();
        let next_check = channel.must_be_checked().then(Instant::now);
        let state = State {
            channel,
            room: Line::default(),
            lacks_credit: false,
            on_clock: false,
            next_check,
            receivers: Line::default(),
            ahead: posted.len() + held.len(),
            posted,
            held,
            shutdowns: Line::default(),
            draining: false,
            ended: None,
            later: Vec::new(),
        };
        Self { handover: Handover::new(state), drops, registry, token }
    }

    #[inline]
    pub(super) fn lock(&self) -> Guard<'_, State> {
        self.handover.lock()
    }

    /// Releases the lock, then wakes the tasks that are to be woken.
    #[inline]
    pub(super) fn release<'a>(&'a self, state: Guard<'a, State>) {
        self.handover.release(state, None);
    }

    /// Calls `f` with the lock held, then wakes the tasks that are to be woken.
    pub(super) fn with<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        let mut state = self.lock();
        let result = f(&mut state);
        self.release(state);
        result
    }

    /// Takes the completions that are in the channel's inbox, and wakes the tasks whose operations have ended.
    pub(crate) fn serve(&self) {
        self.with(State::serve);
    }

    /// As [`serve`](Self::serve), for completions that the reactor has just polled. Returns false if another thread
    /// has the lock: nothing was done then. The caller waits for the lock only after it has put the completions
    /// into the inbox: that thread may need them to go on.
    #[inline]
    pub(crate) fn try_serve(&self, polled: &[PolledCompletion]) -> bool {
        let Some(mut state) = self.handover.try_lock() else { return false };
        let waker = state.complete(polled);
        self.handover.release(state, waker);
        true
    }

    /// An alarm of this channel: see [`Registry::set_alarm`]. One that comes early does no harm.
    pub(crate) fn alarm(&self) {
        let now = Instant::now();
        let next = self.with(|state| {
            // The pause of a sender without credit may be over.
            if std::mem::take(&mut state.on_clock) {
                state.wake_room();
            }
            state.check_if_due(now)
        });
        if let Some(next) = next {
            self.registry.set_alarm(next, self.token);
        }
    }

    /// Ends everything that is in flight. Later operations fail with `error`. Returns what wakers have thrown.
    pub(crate) fn end(&self, error: TransportError) -> Panics {
        let mut state = self.lock();
        state.end(error);
        self.handover.release_catching(state)
    }

    /// To be called when a future is dropped that has this place in line. It does not wait.
    pub(super) fn cancel(&self, place: Cancelled) {
        self.handover.cancel(Some(place));
    }

    /// To be called when the future of a posted operation is dropped. It does not wait.
    pub(super) fn cancel_posted(&self, wr_id: u64) {
        self.drops.mark(wr_id);
        self.handover.cancel(None);
    }
}

impl Settle for State {
    fn settle(&mut self, places: impl Iterator<Item = Cancelled>) {
        self.channel.release_dropped_tasks();
        self.channel.take_wakers(&mut self.later);
        // A slot may be free now.
        self.wake_room();
        places.for_each(|place| self.remove(place));
    }

    #[inline]
    fn later(&mut self) -> &mut Vec<Later> {
        &mut self.later
    }
}

impl State {
    /// Polls for completions. If that fails, everything ends.
    pub(super) fn progress(&mut self) {
        if self.ended.is_none()
            && let Err(error) = self.channel.progress_tasks()
        {
            self.end(error);
        }
        self.collect_wakers();
    }

    /// As [`progress`](Self::progress), for what is in the inbox.
    fn serve(&mut self) {
        if self.ended.is_none()
            && let Err(error) = self.channel.progress_delivered()
        {
            self.end(error);
        }
        self.collect_wakers();
    }

    /// As [`progress`](Self::progress), for what the reactor has just polled. The waker of the first operation that
    /// has ended is returned, and not in `later`.
    #[inline]
    fn complete(&mut self, polled: &[PolledCompletion]) -> Option<Waker> {
        if self.ended.is_some() {
            return None;
        }
        let mut first = None;
        self.channel.release_dropped_tasks();
        for polled in polled {
            match self.channel.complete_task(polled) {
                Ok(None) => {}
                Ok(waker) if first.is_none() => first = waker,
                Ok(waker) => self.later.extend(waker.map(Later::Wake)),
                Err(error) => {
                    self.end(error);
                    break;
                }
            }
        }
        let anyone_waits = self.room.len() | self.receivers.len() | self.shutdowns.len() != 0;
        if anyone_waits || self.channel.has_wakers() {
            self.collect_wakers();
        }
        first
    }

    /// Ends everything if the connection has ended unnoticed. Returns when to check again.
    fn check_if_due(&mut self, now: Instant) -> Option<Instant> {
        if self.ended.is_some() || self.next_check.is_none_or(|at| now < at) {
            return None;
        }
        if let Err(error) = self.channel.check_tasks(now) {
            self.end(error);
            return None;
        }
        self.next_check = Some(now + DEVICE_CHECK_PERIOD);
        self.next_check
    }

    /// Moves the wakers of all tasks that have something to `later`.
    #[inline(never)]
    pub(super) fn collect_wakers(&mut self) {
        self.channel.take_wakers(&mut self.later);
        self.wake_receiver();
        // An operation whose future was dropped leaves its slot when it ends.
        if !self.room.is_empty() && self.channel.has_room_for_send() && !self.will_get_credit() {
            self.wake_room();
        }
        if !self.shutdowns.is_empty() && self.channel.outstanding_sends() == 0 {
            self.shutdowns.wake_all(&mut self.later);
        }
    }

    /// Whether the first in line for room can only be posted after something that will wake it.
    fn will_get_credit(&self) -> bool {
        self.lacks_credit && (self.on_clock || self.channel.is_asking_for_credit())
    }

    /// Wakes the first receive in line if there is a message, or if none can come any more.
    pub(super) fn wake_receiver(&mut self) {
        let Self { channel, posted, receivers, later, ended, .. } = self;
        let has_message = posted.front().is_some_and(|work| work.has_ended(channel))
            || channel.has_shared_message();
        if ended.is_some() || has_message {
            receivers.wake_first(later);
        }
    }

    /// Wakes the first in line for room in the send queue.
    #[inline]
    pub(super) fn wake_room(&mut self) {
        self.room.wake_first(&mut self.later);
    }

    /// Wakes all in line for room in the send queue.
    pub(super) fn wake_all_for_room(&mut self) {
        self.room.wake_all(&mut self.later);
    }

    /// If the first in line, which lacks credit, has to pause before it asks again: how long. The caller then
    /// sets the clock.
    pub(super) fn start_pause(&mut self) -> Option<Duration> {
        if self.on_clock {
            return None;
        }
        let pause = self.channel.credit_pause();
        self.on_clock = pause.is_some();
        pause
    }

    /// Why nothing can be posted, if that is so.
    pub(super) fn refusal(&self) -> Option<TransportError> {
        self.ended.or(self.draining.then_some(TransportError::Stopped))
    }

    /// The failure of an operation, with the reason why the channel has ended.
    pub(super) fn failure<B>(&self, failed: OperationError<B>) -> OperationError<B> {
        // Without a buffer the error is not the operation's own.
        let error = if failed.buffer.is_some() { self.reason(failed.error) } else { failed.error };
        OperationError { error, ..failed }
    }

    /// Why an operation was ended with `error`.
    fn reason(&self, error: TransportError) -> TransportError {
        match error {
            TransportError::Stopped | TransportError::Closed => self.ended.unwrap_or(error),
            // A channel that a shared receive queue feeds is flushed when it is ended.
            TransportError::Work(work) if work.class() == WorkErrorClass::Flushed => {
                self.ended.unwrap_or(error)
            }
            error => error,
        }
    }

    /// Posts the buffers that were held back, as far as they are needed and there is room.
    pub(super) fn fill(&mut self) {
        while self.posted.len() < self.receivers.len() + self.ahead {
            let Some(buffer) = self.held.pop_front() else { return };
            match self.channel.post_task_receive(buffer) {
                Ok(work) => self.posted.push_back(work),
                Err(error) if error.error.is_queue_full() => {
                    // It was not posted.
                    return error
                        .buffer
                        .into_iter()
                        .for_each(|buffer| self.held.push_front(buffer));
                }
                Err(error) => return self.end(error.error),
            }
        }
        // What is left is needed only if more are in line than buffers were posted.
        let surplus = (self.posted.len() + self.held.len())
            .saturating_sub(self.receivers.len() + self.ahead)
            .min(self.held.len());
        self.held.truncate(self.held.len() - surplus);
    }

    /// Ends everything that is in flight.
    pub(super) fn end(&mut self, error: TransportError) {
        if self.ended.is_none() {
            self.ended = Some(error);
            self.channel.end_tasks();
            self.channel.wake_all_tasks();
        }
        self.channel.take_wakers(&mut self.later);
        self.room.wake_all(&mut self.later);
        self.receivers.wake_all(&mut self.later);
        self.shutdowns.wake_all(&mut self.later);
    }

    /// To be called after a post that failed with `error`. If the device may have had the request, the channel was
    /// stopped, and other operations have ended with it.
    pub(super) fn post_failed(&mut self, error: TransportError) {
        if self.channel.is_stopped() {
            self.end(error);
        }
    }

    /// Gives up a place in line.
    fn remove(&mut self, cancelled: Cancelled) {
        match cancelled {
            Cancelled::Room(ticket) => {
                self.room.remove(ticket, &mut self.later);
                // If it was woken to post next, another one has to be.
                self.wake_room();
            }
            Cancelled::Receive(ticket) => {
                self.receivers.remove(ticket, &mut self.later);
                self.fill();
                self.wake_receiver();
            }
            Cancelled::Shutdown(ticket) => self.shutdowns.remove(ticket, &mut self.later),
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.registry.release(self.token);
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("token", &self.token).finish_non_exhaustive()
    }
}
