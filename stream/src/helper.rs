//! The hub's own thread: [`drivers`](crate::drivers) says when it is there.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::StreamError;
use crate::drivers::{Look, Looks, is_clock_real, now};
use crate::hub::Inner;
use crate::state::TURN;

/// How often the helper looks whether others drive the hub. A thread's last write may wait for twice as long.
const LOOK: Duration = Duration::from_millis(1);

impl Inner {
    /// Starts the helper, after [`State::takes_helper`]. If there is no thread to be had, the next caller tries again.
    pub(crate) fn start_helper(self: &Arc<Self>) {
        let is_real = is_clock_real();
        let hub = self.clone();
        let thread = thread::Builder::new().name("ibverbs-helper".to_owned());
        if is_real && thread.spawn(move || help(&hub)).is_ok() {
            return;
        }
        let mut state = self.lock_quietly();
        state.drivers.has_helper = false;
        state.drivers.is_simulated |= !is_real;
    }

    /// Polls once. Returns how much it has found, and when something is due; `None` when the hub was stopped.
    pub(crate) fn serve(
        &self,
        arms: bool,
        may_have_ended: bool,
    ) -> Result<Option<(usize, Instant)>, StreamError> {
        if may_have_ended {
            self.look_at(&self.sockets.ended(false).unwrap_or_default());
        }
        let mut state = self.lock();
        if arms && let Err(error) = state.lp.arm() {
            state.stop(StreamError::Transport(error.into()));
        }
        let count = state.turn();
        let due = state.due(now());
        state.stats.sleeps += u64::from(arms && count < TURN);
        let (passes_on, stopped) = (count == TURN && state.drivers.passes_on(), state.stopped);
        drop(state);
        if passes_on {
            self.waker.wake();
        }
        match stopped {
            Some(StreamError::Aborted) => Ok(None),
            Some(error) => Err(error),
            None => Ok(Some((count, due))),
        }
    }
}

/// The hub's own thread.
fn help(hub: &Inner) {
    let mut looks = Looks::default();
    loop {
        let mut state = hub.lock();
        let look = looks.next(state.drivers.turns, state.is_owing());
        if look == Look::Ends || state.stopped.is_some() {
            state.drivers.has_helper = false;
            return;
        }
        drop(state);
        if look == Look::Pauses {
            thread::sleep(LOOK);
            continue;
        }
        let Ok(Some((count, due))) = hub.serve(true, true) else { continue };
        looks.turns = Some(hub.lock().drivers.turns);
        if count == TURN {
            continue;
        }
        let mut files = [hub.loop_file.as_fd(), hub.waker.as_fd(), hub.sockets.as_fd()]
            .map(|file| PollFd::from_borrowed_fd(file, PollFlags::IN));
        let left = due.saturating_duration_since(Instant::now()) + Duration::from_micros(1);
        // Nothing is lost by an early return.
        let _ = poll(&mut files, Timespec::try_from(left).ok().as_ref());
    }
}
