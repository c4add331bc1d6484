//! Wakes senders that lack credit when their pause is over.
//!
//! A sender without credit asks the peer, and the end of the question wakes it. If the answers bring nothing, it
//! pauses before the next question, and no completion tells when the pause is over. Futures are tied to no
//! runtime, so they have no timer: one thread of the process keeps the time for all of them. It is started when
//! it is first needed, and ends when nobody has needed it for a while.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::state::Shared;

/// How long the thread waits for work before it ends.
const IDLE: Duration = Duration::from_secs(5);

static CLOCK: Clock = Clock {
    waiting: Mutex::new(Waiting { calls: BinaryHeap::new(), is_running: false }),
    changed: Condvar::new(),
};

struct Clock {
    waiting: Mutex<Waiting>,
    /// There is a new call.
    changed: Condvar,
}

struct Waiting {
    /// The earliest first.
    calls: BinaryHeap<Reverse<Call>>,
    is_running: bool,
}

/// A channel whose sender is to be woken.
struct Call {
    at: Instant,
    channel: Weak<Shared>,
}

impl PartialEq for Call {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl Eq for Call {}

impl PartialOrd for Call {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Call {
    fn cmp(&self, other: &Self) -> Ordering {
        self.at.cmp(&other.at)
    }
}

/// Calls [`Shared::ask_for_credit`] after this time, from another thread. Returns false if the thread cannot be
/// started.
pub(super) fn call_after(pause: Duration, channel: &Arc<Shared>) -> bool {
    let call = Call { at: Instant::now() + pause, channel: Arc::downgrade(channel) };
    let mut waiting = CLOCK.lock();
    if !waiting.is_running {
        let thread = thread::Builder::new().name("ibverbs credits".to_owned());
        if thread.spawn(|| CLOCK.run()).is_err() {
            return false;
        }
        waiting.is_running = true;
    }
    waiting.calls.push(Reverse(call));
    CLOCK.changed.notify_one();
    true
}

impl Call {
    fn make(self) {
        if let Some(channel) = self.channel.upgrade() {
            channel.ask_for_credit();
        }
    }
}

impl Clock {
    fn lock(&self) -> MutexGuard<'_, Waiting> {
        // Nothing panics while it holds the lock.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread.
    fn run(&self) {
        while let Some(call) = self.next() {
            // A task's waker may panic; the panic was printed. It must not take the time from the others.
            let _ = panic::catch_unwind(AssertUnwindSafe(|| call.make()));
        }
    }

    /// Waits for the next call. `None`: there was none for a while, and the thread ends.
    fn next(&self) -> Option<Call> {
        let mut waiting = self.lock();
        loop {
            let left = waiting
                .calls
                .peek()
                .map_or(IDLE, |Reverse(call)| call.at.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return waiting.calls.pop().map(|Reverse(call)| call);
            }
            let waited = self.changed.wait_timeout(waiting, left);
            let ended;
            (waiting, ended) = waited.unwrap_or_else(PoisonError::into_inner);
            if ended.timed_out() && waiting.calls.is_empty() {
                waiting.is_running = false;
                return None;
            }
        }
    }
}
