//! A hub: the loop that many streams share, and its lock. [`drivers`](crate::drivers) says who polls it.
//!
//! The lock is held while something is posted or polled, and not while a verb is called that may take long, or a task is woken:
//! [`Guard`] does that after it has released the lock. A thread that waits for something sleeps without the lock. It has armed the
//! queue before it looked: so what it waits for comes with an event that wakes all that sleep, or was found by another thread
//! before it looked. What comes without an event ([`State::wake_threads`]) wakes them, too.
//!
//! Wakers and all else are behind the lock, so there is no order of atomics for loom to try. One word is outside of it: whether a
//! thread watches the sockets, which is set once.

use std::io::{self, Write};
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, RefUnwindSafe, UnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;
use std::time::Instant;
use std::{fmt, mem, process, thread};

use ibverbs::device::forks;
use ibverbs::event_loop::{DetachedChannel, LoopWaiter, LoopWaker};
use ibverbs::{AccessFlags, BufferPool, ChannelId, Context, Loop, PooledBuffer, ProtectionDomain};

use crate::config::{Config, HubBuilder, SMALL};
use crate::drivers::{is_clock_real, now};
use crate::error::is_gone;
use crate::state::State;
use crate::watch::{OF_DEVICE, Sockets};
use crate::{Refusal, Stats, StreamError};

/// Streams that share a device's completion queue and their buffers.
///
/// A clone is the same hub. Streams keep their hub alive. How many a program has is its choice: one for all, or one for each
/// thread, whose streams then take no lock that others want.
///
/// Threads that wait in a call drive the hub, and so does a task in each runtime of tokio whose tasks wait: they may come and go.
/// [`run`](Self::run) on a thread drives it all the time. Bytes that a stream has accepted, its end, and credits for its peer need
/// none of these: while any are owed and nobody drives, the hub has a thread of its own.
#[derive(Clone)]
pub struct Hub {
    pub(crate) inner: Owner,
}

/// A part of the program that keeps a hub.
///
/// A child of `fork` has a copy of it. Its descriptors and what the kernel has for it are the parent's, and a lock may be held by a
/// thread that the child has not. So a child leaves all of that as it is.
#[derive(Clone)]
pub(crate) struct Owner(Arc<Inner>);

impl Deref for Owner {
    type Target = Arc<Inner>;

    fn deref(&self) -> &Arc<Inner> {
        &self.0
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // The last one alone frees the hub, and is worth a system call.
        if self.is_forked() || Arc::strong_count(&self.0) == 1 && self.is_copy() {
            mem::forget(self.0.clone());
        }
    }
}

pub(crate) struct Inner {
    state: Mutex<State>,
    me: Weak<Inner>,
    pub(crate) waiter: LoopWaiter<'static>,
    pub(crate) waker: LoopWaker,
    /// The loop's descriptor.
    pub(crate) loop_file: OwnedFd,
    pub(crate) domain: Arc<ProtectionDomain<'static>>,
    pub(crate) config: Config,
    pub(crate) sockets: Arc<Sockets>,
    pub(crate) is_watched: AtomicBool,
    /// The ID of its process, and [`forks`] there.
    process: u32,
    forks: u32,
}

impl From<Arc<Inner>> for Owner {
    fn from(inner: Arc<Inner>) -> Self {
        Self(inner)
    }
}

impl HubBuilder {
    /// `ibv_create_cq`, `ibv_reg_mr`: makes the hub. Buffers of streams are registered when these come.
    ///
    /// The hub hears of the device's end by the context's file of events, and leaves these to the program. As
    /// [`Context::async_events`] does, this makes the file non-blocking, also for C code that shares the context: its
    /// `ibv_get_async_event` fails with `EAGAIN` instead of waiting.
    ///
    /// # Errors
    ///
    ///  - `InvalidInput`: a number is out of its range: which one, and the range. Or the device has no completion queue that is
    ///    long enough for this many connections; the text says for how many there is one.
    ///  - Those of [`Loop::new`](ibverbs::Loop::new) and [`BufferPool::new`](ibverbs::BufferPool::new).
    pub fn build(self) -> io::Result<Hub> {
        Hub::new(&self.context, self.checked()?)
    }
}

impl Hub {
    /// Starts to build a hub on an open device.
    pub fn builder(context: &Arc<Context<'static>>) -> HubBuilder {
        HubBuilder::new(context)
    }

    /// A hub with the [default settings](HubBuilder), on the device of this name or the first one.
    ///
    /// # Errors
    ///
    ///  - Those of [`ibverbs::open`] and [`HubBuilder::build`].
    pub fn open(device: Option<&str>) -> io::Result<Self> {
        let context = device.map_or_else(ibverbs::open_first, ibverbs::open)?;
        Self::builder(&Arc::new(context)).build()
    }

    fn new(context: &Arc<Context<'static>>, config: Config) -> io::Result<Self> {
        let domain = Arc::new(ProtectionDomain::new(context)?);
        // Two can be in flight for each, and two for one that has ended meanwhile.
        let number = 4 * config.max_connections as usize;
        let small = BufferPool::new(&domain, SMALL, number, AccessFlags::empty())?;
        let mut lp = Loop::new(context, config.all_entries())?;
        let shared = match config.shared_receives {
            0 => None,
            capacity => Some(lp.add_shared_receives(&domain, capacity)?),
        };
        let (waiter, waker) = (lp.waiter(), lp.waker()?);
        let loop_file = lp.as_fd().try_clone_to_owned()?;
        let events = context.async_events().ok();
        let sockets = Arc::new(Sockets::new(events.as_ref().map(AsFd::as_fd))?);
        let state = Mutex::new(State::new(lp, shared, small, config.clone()));
        let inner = Arc::new_cyclic(|me| Inner {
            state,
            me: me.clone(),
            waiter,
            waker,
            loop_file,
            domain,
            config,
            sockets,
            is_watched: AtomicBool::new(false),
            process: process::id(),
            forks: forks(),
        });
        let receives = inner.config.shared_receives;
        let mut state = inner.lock_with_buffers(0)?;
        for _ in 0..receives {
            let buffer = state.buffers.take().ok_or(io::ErrorKind::OutOfMemory)?;
            state.recycle(buffer);
        }
        drop(state);
        Ok(Self { inner: inner.into() })
    }

    /// Counters since the hub was made.
    pub fn stats(&self) -> Stats {
        let state = self.inner.lock();
        Stats { connections: state.count, ..state.stats }
    }

    /// Ends all streams, with [`Aborted`](StreamError::Aborted), all calls that connect or accept, and whatever [runs](Self::run) the
    /// hub. A thread that looks up the name of a host goes on with that first.
    pub fn stop(&self) {
        self.inner.lock().stop(StreamError::Aborted);
    }

    /// Drives the hub on this thread, until it is [stopped](Self::stop). Then what was gathered goes as soon as what was in flight
    /// has arrived, though no other thread makes a call, and streams that are dropped linger without their threads.
    ///
    /// # Errors
    ///
    ///  - Those of the device: all streams have ended with them.
    pub fn run(&self) -> io::Result<()> {
        let _running = Running::new(&self.inner);
        self.inner.watch()?;
        self.inner.wait(None, |state| match state.stopped {
            Some(StreamError::Aborted) => Ok(Some(())),
            Some(error) => Err(error.into()),
            None => Ok(None),
        })
    }
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

/// A thread runs the hub, until this is dropped.
struct Running<'a>(&'a Inner);

impl<'a> Running<'a> {
    fn new(inner: &'a Inner) -> Self {
        inner.lock().drivers.runs += 1;
        Self(inner)
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.lock().drivers.runs -= 1;
    }
}

/// A thread waits, and drives the hub meanwhile, until this is dropped.
struct Waiting<'a>(&'a Inner);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.lock().drivers.threads -= 1;
    }
}

impl Inner {
    /// Whether this is a child of the process that has the hub. What is dropped there is left as it is.
    pub(crate) fn is_copy(&self) -> bool {
        self.is_forked() || self.process != process::id()
    }

    /// [`is_copy`](Self::is_copy) for what is dropped with each message: it makes no system call, and takes a child of the system
    /// call alone for its parent.
    pub(crate) fn is_forked(&self) -> bool {
        self.forks != forks()
    }

    pub(crate) fn lock(&self) -> Guard<'_> {
        Guard { state: Some(self.lock_quietly()), inner: self }
    }

    /// Nothing is to be done after this lock is released.
    pub(crate) fn lock_quietly(&self) -> MutexGuard<'_, State> {
        // The state is consistent wherever something can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock, with the buffers of so many more streams.
    ///
    /// # Errors
    ///
    ///  - Those of [`BufferPool::new`](ibverbs::BufferPool::new).
    pub(crate) fn lock_with_buffers(&self, streams: u32) -> io::Result<Guard<'_>> {
        let number = |state: &State| self.config.buffers_of(state.count + streams);
        let (state, ()) = self.lock_when(|state| {
            let number = number(state);
            state.buffers.has(number).then_some(())
        })?;
        Ok(state)
    }

    /// A buffer for the program, and how many bytes of data a message of the stream may have.
    pub(crate) fn lend(&self, id: ChannelId) -> io::Result<(PooledBuffer, usize)> {
        let (mut state, buffer) = self.lock_when(|state| {
            let needed = self.config.buffers_of(state.count);
            state.buffers.lend(needed)
        })?;
        let most = state.member(id).map(|member| member.conn.longest(&buffer));
        if most.is_none() {
            state.buffers.lent -= 1;
        }
        Ok((buffer, most.ok_or(StreamError::Aborted)?))
    }

    /// The lock, when buffers that `look` wants are registered.
    fn lock_when<T>(
        &self,
        mut look: impl FnMut(&mut State) -> Option<T>,
    ) -> io::Result<(Guard<'_>, T)> {
        loop {
            let mut state = self.lock();
            if let Some(found) = look(&mut state) {
                return Ok((state, found));
            }
            let growth = state.buffers.growth();
            drop(state);
            let grown = growth.map(|growth| growth.register(&self.domain));
            let mut state = self.lock();
            grown.map_or(Ok(()), |grown| state.buffers.add(grown))?;
        }
    }

    /// The program has dropped a stream. Returns how long its thread is to wait for the end of it, if it can.
    pub(crate) fn close(self: &Arc<Self>, id: ChannelId) -> Option<Instant> {
        let mut state = self.lock();
        if state.close(id) {
            return None;
        }
        state.drivers.is_simulated |= !is_clock_real();
        if state.drivers.is_simulated {
            if !state.drivers.have_tasks() {
                // The runtime ends, and nobody would bring what was written to the peer.
                state.remove(id);
                return None;
            }
            // The stream may have been all that kept it.
            state.kept = Some(self.clone());
        }
        let now = now();
        let until = (state.drivers.runs == 0).then(|| now + state.lingers_for(now));
        drop(state);
        // Its time may be earlier than that for which a driver sleeps.
        self.waker.wake();
        until
    }

    /// Waits until `look` finds something, and serves all streams meanwhile.
    ///
    /// # Errors
    ///
    ///  - `WouldBlock`: the deadline has passed.
    ///  - What `look` returns.
    #[inline(always)]
    pub(crate) fn wait<T>(
        &self,
        deadline: Option<Instant>,
        mut look: impl FnMut(&mut State) -> io::Result<Option<T>>,
    ) -> io::Result<T> {
        // Mostly it is there.
        let mut state = self.lock();
        if let Some(found) = state.look(&mut look)? {
            return Ok(found);
        }
        state.drivers.threads += 1;
        drop(state);
        self.wait_on(Waiting(self), deadline, look)
    }

    /// The first look has found nothing.
    #[cold]
    fn wait_on<T>(
        &self,
        _waiting: Waiting<'_>,
        deadline: Option<Instant>,
        mut look: impl FnMut(&mut State) -> io::Result<Option<T>>,
    ) -> io::Result<T> {
        warn_of_tokio();
        let mut idle = 0;
        loop {
            if idle < self.config.spin {
                idle += 1;
                if let Some(found) = self.lock().look(&mut look)? {
                    return Ok(found);
                }
                continue;
            }
            // Before it is polled: what ends afterwards wakes the thread.
            let armed = match self.waiter.arm() {
                Ok(armed) => armed,
                Err(error) => {
                    self.lock().stop(StreamError::Transport(error.into()));
                    continue;
                }
            };
            let mut state = self.lock();
            if let Some(found) = state.look(&mut look)? {
                return Ok(found);
            }
            let now = now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            let due = state.due(now);
            state.stats.sleeps += 1;
            drop(state);
            let until = deadline.map_or(due, |deadline| deadline.min(due));
            if let Err(error) = armed.wait_until(until) {
                self.lock().stop(StreamError::Transport(error.into()));
            }
            idle = 0;
            // Once more before it is armed, which costs more than a poll.
            if let Some(found) = self.lock().look(&mut look)? {
                return Ok(found);
            }
        }
    }

    /// Destroys a channel that was taken out of the loop. What comes of it is given back to all.
    fn destroy(&self, channel: DetachedChannel<'static>) {
        let id = channel.id();
        // If it fails, destroying ends what it has.
        let _ = channel.stop();
        self.lock_quietly().turn();
        let destroyed = channel.destroy();
        let mut state = self.lock_quietly();
        // A queue pair that cannot be destroyed is leaked, with its buffers.
        let _ = state.lp.end_destroyed(destroyed);
        state.turn();
        state.count = state.count.saturating_sub(1);
        state.ending.retain(|ending| *ending != id);
        debug_assert_eq!(state.lp.in_flight(id), 0);
    }

    /// Looks at streams whose peers may be gone, and at the device, and ends those that are.
    pub(crate) fn look_at(&self, indexes: &[usize]) {
        for &index in indexes {
            if index == OF_DEVICE {
                // The kernel is asked: some drivers arm queues of a device that has failed.
                if let Err(error) = self.domain.context().query_port(1)
                    && is_gone(&error)
                {
                    self.lock().stop(StreamError::Transport(error.into()));
                }
                continue;
            }
            let mut state = self.lock();
            // Another stream may have the place by now: its own connection says whether it was meant.
            let member = state.members.get_mut(index).and_then(Option::as_mut);
            // A task stays: what it has is dropped where a panic of the program's code is caught.
            let taken = member.and_then(|member| {
                let watch = member.peer_watch.take_if(|watch| watch.file().is_some())?;
                Some((member.id, watch))
            });
            let Some((id, mut watch)) = taken else { continue };
            drop(state);
            let has_ended = watch.has_ended();
            let mut state = self.lock();
            let Some(member) = state.member(id) else { continue };
            let watch = member.peer_watch.insert(watch);
            if has_ended {
                state.is_gone(id);
            } else {
                // With the lock held, so that the member has it when there is more. If this fails, keep-alive finds the end.
                let _ = self.sockets.add_again(watch, index);
            }
        }
    }

    /// A client of a listener is refused for this error. Returns what it is told.
    pub(crate) fn refusal(&self, error: &io::Error) -> Refusal {
        let mut state = self.lock();
        let typed = error.get_ref().and_then(|inner| inner.downcast_ref());
        let reason = match typed {
            Some(&StreamError::Refused(reason)) => reason,
            _ if state.has_room().is_err() => Refusal::Full,
            _ => Refusal::NoResources,
        };
        state.stats.refused += 1;
        let is_first = state.stats.refused == 1;
        drop(state);
        if is_first {
            warn(format_args!(
                "a client is refused: {error} (Stats::refused counts those that follow)"
            ));
        }
        reason
    }

    /// Has a thread watch the streams, for those whose threads sleep for completions.
    pub(crate) fn watch(self: &Arc<Self>) -> io::Result<()> {
        if self.is_watched.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        let (sockets, hub) = (self.sockets.clone(), Arc::downgrade(self));
        let thread = thread::Builder::new().name("ibverbs-stream".to_owned());
        let started = thread.spawn(move || {
            while let Some(ended) = sockets.ended(true) {
                let Some(hub) = Weak::upgrade(&hub) else { return };
                hub.look_at(&ended);
            }
        });
        if started.is_err() {
            self.is_watched.store(false, Ordering::SeqCst);
        }
        started.map(drop)
    }
}

// A panic of the program's code leaves what is behind the lock consistent.
impl UnwindSafe for Inner {}
impl RefUnwindSafe for Inner {}

impl Drop for Inner {
    fn drop(&mut self) {
        self.sockets.stop();
    }
}

/// The lock. When it is released, tasks are woken, channels destroyed, buffers registered, and the helper is started.
pub(crate) struct Guard<'a> {
    state: Option<MutexGuard<'a, State>>,
    inner: &'a Inner,
}

impl Deref for Guard<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        self.state.as_ref().expect("until it is dropped")
    }
}

impl DerefMut for Guard<'_> {
    fn deref_mut(&mut self) -> &mut State {
        self.state.as_mut().expect("until it is dropped")
    }
}

impl Drop for Guard<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(state) = &self.state
            && (!state.woken.is_empty()
                || !state.ended.is_empty()
                || state.wakes_threads
                || state.buffers.are_wanted()
                || !state.buffers.starved.is_empty()
                || state.needs_helper())
        {
            self.attend();
        }
    }
}

impl Guard<'_> {
    /// Does what is not to be done with the lock held.
    #[cold]
    fn attend(&mut self) {
        let Some(mut state) = self.state.take() else { return };
        state.feed();
        // Mostly it is one, and the list keeps its memory.
        let last = state.woken.pop();
        let woken = if state.woken.is_empty() { Vec::new() } else { mem::take(&mut state.woken) };
        let ended = mem::take(&mut state.ended);
        let growth = state.buffers.growth();
        // For threads that wait for room, for buffers, or for the end of a channel.
        let wakes_threads = mem::take(&mut state.wakes_threads) || !ended.is_empty();
        let ends_waits = mem::take(&mut state.ends_waits);
        let starts_helper = state.takes_helper();
        drop(state);
        // Before anything that may take long.
        woken.into_iter().chain(last).for_each(wake);
        if ends_waits {
            self.inner.sockets.stop();
        }
        if starts_helper && let Some(hub) = self.inner.me.upgrade() {
            hub.start_helper();
        }
        if let Some(growth) = growth {
            let grown = growth.register(&self.inner.domain);
            let mut state = self.inner.lock();
            // Writers that have found no buffer wait for one that comes back.
            let _ = state.buffers.add(grown);
        }
        let watches = ended.into_iter().map(|(channel, peer_watch)| {
            self.inner.destroy(channel);
            peer_watch
        });
        let watches: Vec<_> = watches.collect();
        if wakes_threads {
            self.inner.waker.wake();
            drop(self.inner.lock());
        }
        // A program's stream may wait in its drop, even for another stream. The peer sees the end, as the queue pair is gone.
        watches.into_iter().for_each(|peer_watch| caught(|| drop(peer_watch)));
    }
}

/// rustc offers the types of threads where those of tasks are meant: says so once, where a wait holds up a runtime.
fn warn_of_tokio() {
    #[cfg(feature = "tokio")]
    static ONCE: std::sync::Once = std::sync::Once::new();
    #[cfg(feature = "tokio")]
    if cfg!(debug_assertions) && ::tokio::runtime::Handle::try_current().is_ok() {
        ONCE.call_once(|| {
            warn(format_args!(
                "a call that blocks its thread waits inside of tokio. In a task it holds up the runtime: use \
                 ibverbs_stream::tokio there. (A thread of spawn_blocking may wait.)"
            ));
        });
    }
}

/// Wakes a task. A waker is code of the program's.
pub(crate) fn wake(waker: Arc<Waker>) {
    caught(move || {
        waker.wake_by_ref();
        drop(waker);
    });
}

/// Runs code of the program's: if it panics, that is its own task's loss, and no other's.
pub(crate) fn caught(code: impl FnOnce()) {
    if let Err(payload) = catch_unwind(AssertUnwindSafe(code)) {
        // Its drop may panic again.
        mem::forget(payload);
    }
}

/// Writes a line to standard error. `eprintln!` would panic if that is closed.
fn warn(text: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "ibverbs-stream: {text}");
}
