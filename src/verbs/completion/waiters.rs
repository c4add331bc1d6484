//! Several threads that sleep until one completion queue has something to poll.
//!
//! One thread at a time reads events; the others sleep on a condition variable, and each event wakes all. If the reader
//! gives up, another takes its turn. A thread takes the count of events when the queue is armed, and sleeps only while
//! the count is the same.
//!
//! No wake-up is lost, because each thread polls after it saw, under the lock, that the queue is armed. If the event of
//! that arming is not raised yet, a completion after the poll raises it. If it is raised, its reader wakes all that saw
//! the old count. If it was read, the count has changed.
//!
//! An armed queue is not armed again: unread events would pile up in the kernel if every wait found something in its
//! second poll and no thread read.
//!
//! A thread may also sleep elsewhere, on the queue's file. It [rearms](Waiters::rearm) before that. A reader that takes the
//! event instead of it, or completions that raise none, makes a second file readable, which only the next rearming reads.
//! [`Waiters::wake`] does the same, so a reader takes no wake-up from the one that sleeps elsewhere.
//!
//! A wait checks under the lock, before it sleeps, whether it is cancelled. The thread that cancels it then calls
//! [`Waiters::wake_all`], which takes the lock: by then the waiter has seen it, sleeps on the condition variable, or
//! reads. A reader that may be cancelled also polls the file of a [`Waker`].

use super::waker::Waker;
use crate::base::{
    ErrorKind, Result,
    sync::{AtomicU64, Condvar, Mutex, MutexGuard, Ordering},
};
use crate::verbs::device::event_file;
use std::os::fd::BorrowedFd;
use std::sync::{OnceLock, PoisonError};
use std::time::Instant;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Read {
    Event,
    /// Completions may be there, but no event to read: the queue is still armed.
    Early,
    Woken,
}

pub(crate) struct Waiters {
    verb: &'static str,
    state: Mutex<State>,
    changed: Condvar,
    /// Ends the wait of a reader. The first wait that can be cancelled makes it.
    waker: OnceLock<Waker>,
    /// Ends the sleep of a thread that sleeps elsewhere.
    elsewhere: OnceLock<Waker>,
    wakes: AtomicU64,
    /// How many handles may call [`wake`](Waiters::wake).
    handles: AtomicU64,
}

#[derive(Default)]
struct State {
    events: u64,
    /// The queue is armed since the last event was read. The next event may be there already.
    armed: bool,
    reading: bool,
    /// Threads that sleep while another reads.
    sleeping: usize,
    /// A thread sleeps elsewhere until the next event, which it was not told of.
    rearmed: bool,
    /// `elsewhere` is readable, or will be when it is made.
    told: bool,
}

impl Waiters {
    pub(crate) fn new(verb: &'static str) -> Self {
        let (waker, elsewhere) = (OnceLock::new(), OnceLock::new());
        let (wakes, handles) = (AtomicU64::new(0), AtomicU64::new(0));
        let (state, changed) = (Mutex::default(), Condvar::new());
        Self { verb, state, changed, waker, elsewhere, wakes, handles }
    }

    /// Nothing panics in the middle of a change, so poisoning does not matter.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of events read so far, for [`wait`](Self::wait); the caller polls in between. Holds the lock
    /// while it arms, so a thread that finds the queue armed can rely on it.
    pub(super) fn arm(&self, arm: impl FnOnce() -> Result<()>) -> Result<u64> {
        let mut state = self.state();
        if !state.armed {
            arm()?;
            state.armed = true;
        }
        Ok(state.events)
    }

    /// For a caller that sleeps elsewhere. `read` takes the event of the last arming, if any, and never blocks.
    pub(super) fn rearm(
        &self,
        read: impl FnOnce() -> Result<bool>,
        arm: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let mut state = self.state();
        // A reading thread takes the event itself.
        let has_read = !state.reading && state.armed && read()?;
        if has_read {
            state.events += 1;
            state.armed = false;
        }
        if std::mem::take(&mut state.told) {
            self.elsewhere.get().inspect(|elsewhere| elsewhere.drain());
        }
        let armed = if state.armed { Ok(()) } else { arm() };
        state.armed = armed.is_ok();
        state.rearmed = true;
        let must_wake = has_read && state.sleeping > 0;
        drop(state);
        if must_wake {
            self.changed.notify_all();
        }
        armed
    }

    /// Polls, arms, polls again and [waits](Self::wait) until `poll` finds something. `cancelled` says that it would
    /// without an event.
    pub(crate) fn sleep_until<R>(
        &self,
        deadline: Option<Instant>,
        mut poll: impl FnMut() -> Result<Option<R>>,
        cancelled: impl Fn() -> bool,
        arm: impl Fn() -> Result<()>,
        read: impl Fn(Option<&Waker>) -> Result<Read>,
    ) -> Result<R> {
        loop {
            if let Some(found) = poll()? {
                return Ok(found);
            }
            let seen = self.arm(&arm)?;
            if let Some(found) = poll()? {
                return Ok(found);
            }
            match self.wait(seen, deadline, &cancelled, &read) {
                // Queues armed for solicited completions may hold others by now.
                Err(error) if error.kind() == ErrorKind::TimedOut => {
                    return poll()?.ok_or(error);
                }
                woken => woken?,
            }
        }
    }

    /// Waits that begin after this can be cancelled.
    ///
    /// # Errors
    ///
    ///  - Those of [`Waker::new`].
    pub(crate) fn make_wakeable(&self) -> Result<()> {
        if self.waker.get().is_none() {
            let _ = self.waker.set(Waker::new()?);
        }
        Ok(())
    }

    /// Makes waiting threads check whether they are cancelled.
    pub(crate) fn wake_all(&self) {
        let state = self.state();
        if state.reading
            && let Some(waker) = self.waker.get()
        {
            waker.wake();
        }
        drop(state);
        self.changed.notify_all();
    }

    /// The file that a thread sleeps on elsewhere, beside the queue's.
    ///
    /// # Errors
    ///
    ///  - Those of [`Waker::new`].
    pub(crate) fn elsewhere(&self) -> Result<BorrowedFd<'_>> {
        if let Some(elsewhere) = self.elsewhere.get() {
            return Ok(elsewhere.as_fd());
        }
        let first = Waker::new()?;
        let elsewhere = self.elsewhere.get_or_init(|| first);
        // With the lock held, as `tell` does: a thread that arms in between would take back what is not written yet.
        let state = self.state();
        if state.told {
            elsewhere.wake();
        }
        Ok(elsewhere.as_fd())
    }

    /// If the file is not made yet, it is readable when it is.
    fn tell(&self, state: &mut State) {
        if !std::mem::replace(&mut state.told, true)
            && let Some(elsewhere) = self.elsewhere.get()
        {
            elsewhere.wake();
        }
    }

    /// Whether somebody may call [`wake`](Self::wake).
    pub(crate) fn is_wakeable(&self) -> bool {
        self.handles.load(Ordering::SeqCst) > 0
    }

    pub(crate) fn add_handle(&self) {
        self.handles.fetch_add(1, Ordering::SeqCst);
    }

    /// A wait that nothing else would end looks again whether anybody is left.
    pub(crate) fn remove_handle(&self) {
        self.handles.fetch_sub(1, Ordering::SeqCst);
        self.wake_all();
    }

    /// The number of [`wake`](Self::wake) calls. A wait ends when it changes.
    pub(crate) fn wakes(&self) -> u64 {
        self.wakes.load(Ordering::SeqCst)
    }

    pub(crate) fn wake(&self) {
        // First the number: a thread that drains a file, or checks before the lock below, must see it.
        self.wakes.fetch_add(1, Ordering::SeqCst);
        self.tell(&mut self.state());
        self.wake_all();
    }

    /// Sleeps until threads have read more than `seen` events, or `cancelled`. `read` returns after an event, at the
    /// deadline, or when woken.
    pub(super) fn wait(
        &self,
        seen: u64,
        deadline: Option<Instant>,
        cancelled: impl Fn() -> bool,
        read: impl Fn(Option<&Waker>) -> Result<Read>,
    ) -> Result<()> {
        let mut state = self.state();
        while state.events == seen && !cancelled() {
            if !state.reading {
                state.reading = true;
                drop(state);
                let turn = Turn(self);
                let waker = self.waker.get();
                let result = read(waker);
                match (&result, waker) {
                    (Ok(read @ (Read::Event | Read::Early)), _) => {
                        let mut state = self.state();
                        state.events += 1;
                        state.armed &= *read == Read::Early;
                        if std::mem::take(&mut state.rearmed) {
                            self.tell(&mut state);
                        }
                    }
                    (Ok(Read::Woken), Some(waker)) => waker.drain(),
                    _ => {}
                }
                drop(turn);
                result?;
                state = self.state();
            } else if let Some(deadline) = deadline {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(event_file::timed_out(self.verb));
                }
                state.sleeping += 1;
                let woken = self.changed.wait_timeout(state, left);
                state = woken.unwrap_or_else(PoisonError::into_inner).0;
                state.sleeping -= 1;
            } else {
                state.sleeping += 1;
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.sleeping -= 1;
            }
        }
        Ok(())
    }
}

/// Makes this thread the reader until it is dropped.
struct Turn<'a>(&'a Waiters);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.reading = false;
        let must_wake = state.sleeping > 0;
        drop(state);
        // One becomes the reader if the count is unchanged.
        if must_wake {
            self.0.changed.notify_all();
        }
    }
}

#[cfg(all(test, not(ibverbs_loom)))]
mod tests {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::base::Error;

    const SOON: Duration = Duration::from_millis(50);
    const LATE: Duration = Duration::from_secs(60);

    const NOT: fn() -> bool = || false;

    fn waiters() -> Waiters {
        Waiters::new("ibv_x")
    }

    fn never(_: Option<&Waker>) -> Result<Read> {
        panic!("this is not to be called")
    }

    /// Reports each read, and waits for its result.
    #[expect(clippy::type_complexity, reason = "three simple things")]
    fn reader() -> (impl Fn(Option<&Waker>) -> Result<Read>, Receiver<()>, Sender<Result<()>>) {
        let (reads, is_reading) = mpsc::channel();
        let (tell, told) = mpsc::channel();
        let read = move |_: Option<&Waker>| {
            reads.send(()).unwrap();
            let answer: Result<()> = told.recv_timeout(LATE).unwrap();
            answer.map(|()| Read::Event)
        };
        (read, is_reading, tell)
    }

    #[test]
    fn an_event_that_another_read_in_between_keeps_nobody_asleep() {
        let waiters = waiters();
        let late = waiters.arm(|| Ok(())).unwrap();
        let seen = waiters.arm(|| unreachable!()).unwrap();
        waiters.wait(seen, None, NOT, |_| Ok(Read::Event)).unwrap();
        waiters.wait(late, None, NOT, never).unwrap();
    }

    #[test]
    fn who_wakes_early_leaves_the_queue_armed() {
        let waiters = waiters();
        let seen = waiters.arm(|| Ok(())).unwrap();
        waiters.wait(seen, None, NOT, |_| Ok(Read::Early)).unwrap();
        waiters.wait(seen, None, NOT, never).unwrap();
        let seen = waiters.arm(|| unreachable!()).unwrap();
        waiters.wait(seen, None, NOT, |_| Ok(Read::Event)).unwrap();
        let armed = Cell::new(false);
        let arm = || {
            armed.set(true);
            Ok(())
        };
        waiters.arm(arm).unwrap();
        assert!(armed.get());
    }

    #[test]
    fn each_event_needs_an_arming_and_only_one() {
        let waiters = waiters();
        let seen = waiters.arm(|| Ok(())).unwrap();
        assert_eq!(waiters.arm(|| unreachable!()).unwrap(), seen);
        let past = Some(Instant::now());
        let over =
            waiters.wait(seen, past, NOT, |_| Err(event_file::timed_out("ibv_x"))).unwrap_err();
        assert_eq!(over.kind(), ErrorKind::TimedOut);
        assert_eq!(waiters.arm(|| unreachable!()).unwrap(), seen, "still armed");
        waiters.wait(seen, None, NOT, |_| Ok(Read::Event)).unwrap();
        let failed = waiters.arm(|| Err(Error::new("ibv_x", libc::EIO))).unwrap_err();
        assert_eq!(failed.errno(), libc::EIO);
        let armed = Cell::new(false);
        let arm = || {
            armed.set(true);
            Ok(())
        };
        assert_eq!(waiters.arm(arm).unwrap(), seen + 1);
        assert!(armed.get(), "a failure does not arm");
    }

    #[test]
    fn who_finds_the_queue_armed_can_rely_on_it() {
        let waiters = waiters();
        let (arming, is_arming) = mpsc::channel();
        let (finish, finished) = mpsc::channel::<()>();
        let (saw, seen) = mpsc::channel();
        thread::scope(|scope| {
            let waiters = &waiters;
            scope.spawn(move || {
                waiters.arm(|| {
                    arming.send(()).unwrap();
                    finished.recv().unwrap();
                    Ok(())
                })
            });
            is_arming.recv_timeout(LATE).unwrap();
            scope.spawn(move || saw.send(waiters.arm(|| unreachable!()).unwrap()).unwrap());
            assert_eq!(seen.recv_timeout(SOON), Err(RecvTimeoutError::Timeout), "not armed yet");
            finish.send(()).unwrap();
            seen.recv_timeout(LATE).unwrap();
        });
    }

    #[test]
    fn an_event_wakes_all() {
        let waiters = waiters();
        let (read, is_reading, tell) = reader();
        let seen = waiters.arm(|| Ok(())).unwrap();
        let (woken, wakes) = mpsc::channel();
        thread::scope(|scope| {
            let (waiters, first) = (&waiters, woken.clone());
            scope.spawn(move || first.send(waiters.wait(seen, None, NOT, read)).unwrap());
            is_reading.recv_timeout(LATE).unwrap();
            for _ in 0..3 {
                let deadline = Some(Instant::now() + LATE);
                let woken = woken.clone();
                scope.spawn(move || woken.send(waiters.wait(seen, deadline, NOT, never)).unwrap());
            }
            assert!(wakes.recv_timeout(SOON).is_err(), "nobody wakes for nothing");
            tell.send(Ok(())).unwrap();
            for _ in 0..4 {
                wakes.recv_timeout(LATE).expect("one sleeps on").unwrap();
            }
        });
    }

    #[test]
    fn when_the_reader_gives_up_another_reads_on() {
        let waiters = waiters();
        let (read, is_reading, tell) = reader();
        let seen = waiters.arm(|| Ok(())).unwrap();
        thread::scope(|scope| {
            let waiters = &waiters;
            let first = scope.spawn(move || waiters.wait(seen, None, NOT, read));
            is_reading.recv_timeout(LATE).unwrap();
            let (read, is_reading, tell_second) = reader();
            let second = scope.spawn(move || waiters.wait(seen, None, NOT, read));
            assert!(is_reading.recv_timeout(SOON).is_err(), "one at a time");
            let soon = Some(Instant::now() + SOON);
            let over = waiters.wait(seen, soon, NOT, never).unwrap_err();
            assert_eq!((over.kind(), over.verb()), (ErrorKind::TimedOut, "ibv_x"));
            tell.send(Err(Error::new("ibv_x", libc::ETIMEDOUT))).unwrap();
            assert_eq!(first.join().unwrap().unwrap_err().kind(), ErrorKind::TimedOut);
            is_reading.recv_timeout(LATE).expect("nobody reads on");
            tell_second.send(Ok(())).unwrap();
            second.join().unwrap().unwrap();
        });
    }

    #[test]
    fn when_the_reader_panics_another_reads_on() {
        let waiters = waiters();
        let seen = waiters.arm(|| Ok(())).unwrap();
        thread::scope(|scope| {
            let waiters = &waiters;
            assert!(scope.spawn(move || waiters.wait(seen, None, NOT, never)).join().is_err());
            waiters.wait(seen, None, NOT, |_| Ok(Read::Event)).unwrap();
        });
    }

    fn until(condition: impl Fn() -> bool) {
        while !condition() {
            thread::yield_now();
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no ppoll")]
    fn a_cancelled_thread_wakes_whether_it_reads_or_not() {
        for (cancelled, other) in [(0, 1), (1, 0)] {
            let waiters = waiters();
            waiters.make_wakeable().unwrap();
            let events = Waker::new().unwrap();
            let flags = [(); 2].map(|()| AtomicBool::new(false));
            let seen = waiters.arm(|| Ok(())).unwrap();
            let read = |waker: Option<&Waker>| {
                let take = || Ok(None::<()>);
                let (fd, waker) = (events.fd(), waker.unwrap().fd());
                let woken = event_file::take_before_or_woken("ibv_x", &[waker, fd], None, || {
                    // SAFETY: the file is open, and the number is writable.
                    let read = unsafe { crate::base::linux::eventfd_read(fd, &mut 0) };
                    if read == 0 { Ok(Some(())) } else { take() }
                });
                Ok(if woken?.is_ok() { Read::Event } else { Read::Woken })
            };
            thread::scope(|scope| {
                let threads = [0, 1].map(|index| {
                    let (waiters, flag, read) = (&waiters, &flags[index], &read);
                    let wait = move || {
                        waiters.wait(seen, None, || flag.load(Ordering::Acquire), read).unwrap();
                    };
                    let thread = scope.spawn(wait);
                    until(|| waiters.state().reading);
                    thread
                });
                thread::sleep(SOON);
                flags[cancelled].store(true, Ordering::Release);
                waiters.wake_all();
                until(|| threads[cancelled].is_finished());
                thread::sleep(SOON);
                assert!(!threads[other].is_finished(), "it was not cancelled");
                events.wake();
            });
            assert_eq!(waiters.state().events, seen + 1);
        }
    }
}
