//! What many streams share: a loop, its lock, and the thread or task that polls it.
//!
//! The lock is held while something is posted or polled, and not while a verb is called that may take long, or a task is woken:
//! that is done when it is released, by [`Guard`]. A thread that waits for something sleeps without the lock. It has armed the
//! queue before it looked: so what it waits for comes with an event that wakes all that sleep, or was found by another thread
//! before it looked.
//!
//! Wakers and all else are behind the lock, so there is no order of atomics for loom to try. Two words are outside of it: whether a
//! thread watches the sockets, which is set once, and how many serve the hub. Who finds one that serves it, with the lock held, hands
//! the hub to it; one that leaves counts itself out first, and then takes the lock and what it was handed.

use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;
use std::time::Instant;
use std::{fmt, io, mem, thread};

use ibverbs::event_loop::{DetachedChannel, LoopWaiter, LoopWaker};
use ibverbs::{
    AccessFlags, BufferPool, ChannelId, Context, Ended, Loop, PooledBuffer, ProtectionDomain,
    ReceiveWorkRequest, SendWorkRequest, TransportError,
};

use crate::config::{Config, HubBuilder, SMALL};
use crate::conn::{Conn, Cursor, Post, Read, Sent};
use crate::watch::{Lifeline, Sockets};
use crate::{Stats, StreamError};

/// Streams that share a device's completion queue, their buffers, and who polls for them.
///
/// A clone is the same hub. Streams keep their hub alive. How many a program has is its choice: one for all, or one for each
/// thread, whose streams then take no lock that others want.
///
/// Streams of threads are served by the threads that wait. [`run`](Self::run) on a thread, or the tasks of tokio, serve all.
#[derive(Clone)]
pub struct Hub {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    state: Mutex<State>,
    pub(crate) waiter: LoopWaiter<'static>,
    pub(crate) waker: LoopWaker,
    pub(crate) domain: Arc<ProtectionDomain<'static>>,
    pub(crate) config: Config,
    pub(crate) sockets: Arc<Sockets>,
    /// How many threads or tasks serve all streams.
    drivers: AtomicUsize,
    pub(crate) is_watched: AtomicBool,
}

pub(crate) struct State {
    pub(crate) lp: Loop<'static, PooledBuffer>,
    pub(crate) shared: Option<Shared>,
    pool: BufferPool,
    small: BufferPool,
    pub(crate) members: Vec<Option<Member>>,
    pub(crate) count: u32,
    /// Tasks to wake when the lock is released.
    woken: Vec<Waker>,
    /// Channels to be destroyed then.
    ended: Vec<(DetachedChannel<'static>, Option<Lifeline>)>,
    /// The streams whose writers have found no buffer, in order.
    starved: VecDeque<ChannelId>,
    /// Those that were dropped, with the time when they are given up, in order.
    lingering: VecDeque<(Instant, ChannelId)>,
    /// The hub, as long as streams linger and somebody serves them.
    kept: Option<Arc<Inner>>,
    pub(crate) stopped: Option<StreamError>,
    next_tick: Instant,
    stats: Stats,
    config: Config,
}

/// Receives of all streams.
pub(crate) struct Shared {
    pub(crate) id: ChannelId,
    posted: u32,
}

/// One stream.
pub(crate) struct Member {
    pub(crate) id: ChannelId,
    pub(crate) conn: Conn<PooledBuffer>,
    pub(crate) reader: Option<Waker>,
    pub(crate) writer: Option<Waker>,
    /// Over which the two sides have connected; it is out while it is looked at.
    pub(crate) lifeline: Option<Lifeline>,
    /// The reader was dropped with something that it had not read.
    pub(crate) has_unread: bool,
    /// Buffers of messages that came while the channel was being connected. They receive again when it is.
    early: Vec<PooledBuffer>,
}

/// The token of a receive; those of sends say what was sent.
const RECEIVE: u64 = 0;

fn token(sent: Sent) -> u64 {
    1 | u64::from(sent.is_data) << 1 | u64::from(sent.fin) << 2 | u64::from(sent.closed) << 3
}

fn sent(token: u64) -> Sent {
    Sent { is_data: token & 2 != 0, fin: token & 4 != 0, closed: token & 8 != 0 }
}

/// The time, which is tokio's in a simulation of it.
pub(crate) fn now() -> Instant {
    #[cfg(feature = "tokio")]
    return ::tokio::time::Instant::now().into_std();
    #[cfg(not(feature = "tokio"))]
    Instant::now()
}

/// The most operations of one turn: others get the lock between two.
pub(crate) const TURN: usize = 256;

impl HubBuilder {
    /// `ibv_create_cq`, `ibv_reg_mr`: makes the hub, with the memory of its buffers.
    ///
    /// # Errors
    ///
    ///  - `InvalidInput`: a number is out of its range: which one, and the range. Or the device has no completion queue that is
    ///    long enough for this many connections; the text says for how many there is one.
    ///  - Those of [`Loop::new`](ibverbs::Loop::new) and [`BufferPool::new`](ibverbs::BufferPool::new).
    pub fn build(self) -> io::Result<Hub> {
        self.config.check(&self.context)?;
        Hub::new(&self.context, self.config)
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

    pub(crate) fn new(context: &Arc<Context<'static>>, config: Config) -> io::Result<Self> {
        let domain = Arc::new(ProtectionDomain::new(context)?);
        let access = AccessFlags::empty();
        let pool = BufferPool::new(&domain, config.chunk, config.chunks(), access)?;
        // Two can be in flight for each, and two for one that has ended meanwhile.
        let small = BufferPool::new(&domain, SMALL, 4 * config.max_connections as usize, access)?;
        let mut lp = Loop::new(context, config.all_entries())?;
        let shared = match config.shared_receives {
            0 => None,
            capacity => Some(Shared { id: lp.add_shared_receives(&domain, capacity)?, posted: 0 }),
        };
        let (waiter, waker) = (lp.waiter(), lp.waker()?);
        let mut state = State {
            lp,
            shared,
            pool,
            small,
            members: Vec::new(),
            count: 0,
            woken: Vec::new(),
            ended: Vec::new(),
            starved: VecDeque::new(),
            lingering: VecDeque::new(),
            kept: None,
            stopped: None,
            next_tick: now() + config.keep_alive,
            stats: Stats::default(),
            config: config.clone(),
        };
        for _ in 0..config.shared_receives {
            let buffer = state.pool.take().ok_or(io::ErrorKind::OutOfMemory)?;
            state.recycle(buffer);
        }
        Ok(Self {
            inner: Arc::new(Inner {
                state: Mutex::new(state),
                waiter,
                waker,
                domain,
                config,
                sockets: Arc::new(Sockets::new()?),
                drivers: AtomicUsize::new(0),
                is_watched: AtomicBool::new(false),
            }),
        })
    }

    /// What was done so far.
    pub fn stats(&self) -> Stats {
        let state = self.inner.lock();
        Stats { connections: state.count, ..state.stats }
    }

    /// Ends all streams, with [`Aborted`](StreamError::Aborted), and whatever [runs](Self::run) the hub.
    pub fn stop(&self) {
        let mut state = self.inner.lock();
        state.stop(StreamError::Aborted);
        drop(state);
        self.inner.sockets.stop();
        self.inner.waker.wake();
    }

    /// Serves all streams on this thread, until the hub is [stopped](Self::stop). Then writes are gathered while earlier ones
    /// are in flight, streams that are dropped linger without their threads, and peers are asked whether they are there.
    ///
    /// # Errors
    ///
    ///  - Those of the device: all streams have ended with them.
    pub fn run(&self) -> io::Result<()> {
        let _driving = Driving::new(&self.inner);
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

/// Somebody serves all streams, until this is dropped.
struct Driving<'a>(&'a Inner);

impl<'a> Driving<'a> {
    fn new(inner: &'a Inner) -> Self {
        inner.drivers.fetch_add(1, Ordering::SeqCst);
        Self(inner)
    }
}

impl Drop for Driving<'_> {
    fn drop(&mut self) {
        self.0.is_left();
    }
}

impl Inner {
    pub(crate) fn lock(&self) -> Guard<'_> {
        // What is behind it is consistent wherever something can panic.
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        Guard { state: Some(state), inner: self }
    }

    /// Whether a driver polls for all streams.
    pub(crate) fn is_driven(&self) -> bool {
        self.drivers.load(Ordering::SeqCst) > 0
    }

    /// Somebody does not serve it any more.
    pub(crate) fn is_left(&self) {
        if self.drivers.fetch_sub(1, Ordering::SeqCst) == 1 {
            let kept = self.lock().kept.take();
            drop(kept);
        }
    }

    /// The program has dropped a stream. Returns whether it has to see to its end.
    pub(crate) fn close(self: &Arc<Self>, id: ChannelId) -> bool {
        let mut state = self.lock();
        if state.close(id) {
            return false;
        }
        if !self.is_driven() {
            return true;
        }
        // The stream may have been all that kept it.
        state.kept = Some(self.clone());
        drop(state);
        // Its time may be earlier than that for which the driver sleeps.
        self.waker.wake();
        false
    }

    #[cfg(feature = "tokio")]
    pub(crate) fn drivers(&self) -> &AtomicUsize {
        &self.drivers
    }

    /// Waits until `look` finds something, and serves all streams meanwhile.
    ///
    /// # Errors
    ///
    ///  - `WouldBlock`: the deadline has passed.
    ///  - What `look` returns.
    pub(crate) fn wait<T>(
        &self,
        deadline: Option<Instant>,
        mut look: impl FnMut(&mut State) -> io::Result<Option<T>>,
    ) -> io::Result<T> {
        let mut idle = 0;
        loop {
            let mut state = self.lock();
            if let Some(found) = state.look(&mut look)? {
                return Ok(found);
            }
            drop(state);
            if idle < self.config.spin {
                idle += 1;
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
        }
    }

    /// Destroys a channel that was taken out of the loop. What comes of it is given back to all.
    fn destroy(&self, channel: DetachedChannel<'static>) {
        let id = channel.id();
        // If it fails, destroying ends what it has.
        let _ = channel.stop();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.turn();
        drop(state);
        let destroyed = channel.destroy();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // It is leaked then, with its buffers.
        let _ = state.lp.end_destroyed(destroyed);
        state.turn();
        state.count = state.count.saturating_sub(1);
        debug_assert_eq!(state.lp.in_flight(id), 0);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.sockets.stop();
    }
}

/// The lock. When it is released, tasks are woken and channels destroyed.
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
            && !(state.woken.is_empty() && state.ended.is_empty())
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
        let (woken, ended) = (mem::take(&mut state.woken), mem::take(&mut state.ended));
        drop(state);
        let has_ended = !ended.is_empty();
        for (channel, lifeline) in ended {
            self.inner.destroy(channel);
            // The peer sees its end, when the queue pair is gone.
            drop(lifeline);
        }
        woken.into_iter().for_each(Waker::wake);
        if has_ended {
            // For threads that wait for room, for buffers, or for the end of this.
            self.inner.waker.wake();
            drop(self.inner.lock());
        }
    }
}

#[inline]
fn member(members: &mut [Option<Member>], id: ChannelId) -> Option<&mut Member> {
    members.get_mut(id.index())?.as_mut().filter(|member| member.id == id)
}

/// Posts what a stream has to send.
fn say(
    member: &mut Member,
    lp: &mut Loop<'static, PooledBuffer>,
    small: &mut BufferPool,
    stats: &mut Stats,
) {
    while let Some(post) = member.conn.next_post() {
        let (buffer, sent) = match post {
            Post::Data(buffer, sent) => (Some(buffer), sent),
            Post::Control(bytes, sent) => (small.take_from(&bytes).ok().flatten(), sent),
        };
        let posted = match buffer {
            Some(buffer) => lp.post(member.id, SendWorkRequest::new(buffer), token(sent)),
            None => Err(TransportError::QueueFull.into()),
        };
        match posted {
            Ok(()) if sent.is_data => stats.messages += 1,
            Ok(()) => stats.controls += 1,
            Err(failed) => member.conn.fail(StreamError::Transport(failed.error)),
        }
    }
}

impl State {
    #[inline]
    pub(crate) fn member(&mut self, id: ChannelId) -> Option<&mut Member> {
        member(&mut self.members, id)
    }

    /// Whether there can be another stream.
    pub(crate) fn has_room(&self) -> io::Result<()> {
        let most = self.config.max_connections;
        if let Some(error) = self.stopped {
            return Err(error.into());
        }
        if self.count >= most {
            let reason = format!("the hub has max_connections, {most}, streams");
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, reason));
        }
        Ok(())
    }

    /// Adds a stream that is not connected yet. If that fails, it is to be [removed](Self::remove).
    pub(crate) fn add(&mut self, id: ChannelId) -> io::Result<()> {
        let index = id.index();
        if self.members.len() <= index {
            self.members.resize_with(index + 1, || None);
        }
        self.members[index] = Some(Member {
            id,
            conn: Conn::new(self.config.settings()),
            reader: None,
            writer: None,
            lifeline: None,
            has_unread: false,
            early: Vec::new(),
        });
        self.count += 1;
        for _ in 0..self.config.own_receives() {
            let buffer = self.pool.take().ok_or(io::ErrorKind::OutOfMemory)?;
            self.post_receive(id, buffer).map_err(StreamError::Transport)?;
        }
        Ok(())
    }

    fn post_receive(&mut self, id: ChannelId, buffer: PooledBuffer) -> Result<(), TransportError> {
        self.lp.post(id, ReceiveWorkRequest::new(buffer), RECEIVE).map_err(|failed| failed.error)
    }

    /// A buffer is free that was received into: for all streams, or for the pool.
    pub(crate) fn recycle(&mut self, buffer: PooledBuffer) {
        let Some(Shared { id, posted }) = self.shared else { return };
        if PooledBuffer::capacity(&buffer) == self.config.chunk
            && posted < self.config.shared_receives
            && self.post_receive(id, buffer).is_ok()
            && let Some(shared) = &mut self.shared
        {
            shared.posted += 1;
        }
    }

    /// Looks for something, and polls until it is there, or nothing has ended.
    fn look<T>(
        &mut self,
        look: &mut impl FnMut(&mut Self) -> io::Result<Option<T>>,
    ) -> io::Result<Option<T>> {
        loop {
            let found = look(self)?;
            if found.is_some() || self.turn() == 0 {
                return Ok(found);
            }
        }
    }

    /// Polls, and gives what has ended to its streams. Returns how much that was; [`TURN`] at most.
    pub(crate) fn turn(&mut self) -> usize {
        let mut count = 0;
        while count < TURN {
            match self.lp.next_ended() {
                Ok(Some(ended)) => self.dispatch(ended),
                Ok(None) => break,
                // It has ended nothing.
                Err(TransportError::UnknownCompletion { .. }) => {}
                Err(error) => {
                    self.stop(StreamError::Transport(error));
                    break;
                }
            }
            count += 1;
        }
        count
    }

    fn dispatch(&mut self, ended: Ended<PooledBuffer>) {
        self.stats.completions += 1;
        let (id, token, result) = (ended.channel, ended.token, ended.result());
        let buffer = ended.buffer;
        if token == RECEIVE {
            let low = self.config.shared_receives / 2;
            let keeps = self.shared.as_mut().is_none_or(|shared| {
                shared.posted -= 1;
                shared.posted >= low
            });
            let (Some(member), Ok(_)) = (self.member(id), &result) else {
                self.recycle(buffer);
                return self.has_failed(id, result.err());
            };
            let returned = member.conn.on_message(buffer, keeps);
            if let Some(buffer) = returned {
                self.receive_again(id, buffer);
            }
        } else {
            drop(buffer);
            if sent(token).is_data {
                self.feed();
            }
            let (Some(member), Ok(_)) = (self.member(id), &result) else {
                return self.has_failed(id, result.err());
            };
            member.conn.on_sent(sent(token));
        }
        self.pump(id);
    }

    /// An operation of a stream has failed, if it has, and the stream with it.
    fn has_failed(&mut self, id: ChannelId, error: Option<TransportError>) {
        if let (Some(member), Some(error)) = (self.member(id), error) {
            member.conn.fail(StreamError::Transport(error));
            self.pump(id);
        }
    }

    /// A stream's buffer is free: it receives again.
    pub(crate) fn receive_again(&mut self, id: ChannelId, buffer: PooledBuffer) {
        if self.shared.is_some() {
            self.recycle(buffer);
        } else if let Some(member) = self.member(id)
            && member.conn.failure().is_none()
            && let Err(failed) = self.lp.post(id, ReceiveWorkRequest::new(buffer), RECEIVE)
        {
            match (self.member(id), failed.error, failed.buffer) {
                (Some(member), TransportError::NotConnected, Some(buffer)) => {
                    member.early.push(buffer);
                }
                (_, error, _) => self.has_failed(id, Some(error)),
            }
        }
    }

    /// The two sides are connected.
    pub(crate) fn begins(&mut self, id: ChannelId) {
        let early = self.member(id).map(|member| std::mem::take(&mut member.early));
        for buffer in early.into_iter().flatten() {
            self.receive_again(id, buffer);
        }
        self.pump(id);
    }

    /// Posts what a stream has to send, and wakes whom that concerns.
    pub(crate) fn pump(&mut self, id: ChannelId) {
        let Some(member) = member(&mut self.members, id) else { return };
        if member.conn.has_to_say() {
            say(member, &mut self.lp, &mut self.small, &mut self.stats);
        }
        if member.reader.is_some() && member.conn.can_read() {
            self.woken.extend(member.reader.take());
        }
        if member.writer.is_some()
            && (member.conn.can_write() || member.conn.is_shut_down() != Ok(false))
        {
            self.woken.extend(member.writer.take());
        }
        let has_dropped = member.conn.has_dropped();
        if member.conn.is_over() {
            self.remove(id);
        } else if has_dropped {
            self.feed();
        }
    }

    /// There may be a buffer: wakes all writers that have found none. The first of them may not want it any more.
    fn feed(&mut self) {
        while let Some(starved) = self.starved.pop_front() {
            self.wake(starved);
        }
    }

    /// Wakes the tasks of a stream.
    pub(crate) fn wake(&mut self, id: ChannelId) {
        if let Some(Some(member)) = self.members.get_mut(id.index()) {
            self.woken.extend(member.reader.take());
            self.woken.extend(member.writer.take());
        }
    }

    /// Takes bytes of the program. `None`: there is no room, and who waits is woken when there is.
    pub(crate) fn write(
        &mut self,
        id: ChannelId,
        from: &mut Cursor<'_>,
    ) -> Result<Option<usize>, StreamError> {
        let mut total = 0;
        loop {
            let Self { members, pool, .. } = self;
            let member = member(members, id).ok_or(StreamError::Aborted)?;
            let filled = match member.conn.fill(from, || pool.take()) {
                Err(error) if total == 0 => return Err(error),
                filled => filled.unwrap_or(0),
            };
            total += filled;
            self.pump(id);
            if filled == 0 || from.is_at_end() {
                break;
            }
        }
        if total == 0 && self.shared.is_some() && !self.starved.contains(&id) {
            self.starved.push_back(id);
        }
        self.stats.copied += total as u64;
        Ok((total > 0).then_some(total))
    }

    /// Posts what is gathered, as far as that can be. Returns whether nothing is left.
    pub(crate) fn flush(&mut self, id: ChannelId) -> Result<bool, StreamError> {
        let member = self.member(id).ok_or(StreamError::Aborted)?;
        if member.conn.flush()? {
            return Ok(true);
        }
        self.pump(id);
        self.member(id).ok_or(StreamError::Aborted)?.conn.flush()
    }

    /// Whether nothing is gathered.
    pub(crate) fn is_flushed(&mut self, id: ChannelId) -> bool {
        self.member(id).is_none_or(|member| !member.conn.has_tail())
    }

    pub(crate) fn read(&mut self, id: ChannelId) -> Result<Read<PooledBuffer>, StreamError> {
        self.member(id).map_or(Err(StreamError::Aborted), |member| member.conn.take_piece())
    }

    /// A piece was read to its end.
    pub(crate) fn give_back(&mut self, id: ChannelId, buffer: Option<PooledBuffer>) {
        if let Some(buffer) = buffer {
            self.receive_again(id, buffer);
        }
        if let Some(member) = self.member(id) {
            member.conn.give_back();
            if member.conn.has_to_say() {
                self.pump(id);
            }
        }
    }

    /// The program has dropped a stream. Returns whether it is gone.
    fn close(&mut self, id: ChannelId) -> bool {
        // What has arrived is unread, whether or not anybody has polled since.
        self.catch_up();
        let Some(member) = self.member(id) else { return true };
        let has_read_all = !member.has_unread;
        member.conn.close(has_read_all);
        self.pump(id);
        let is_gone = self.member(id).is_none();
        if !is_gone {
            self.lingering.push_back((now() + self.config.linger, id));
        }
        is_gone
    }

    /// The stream is needed no more.
    pub(crate) fn remove(&mut self, id: ChannelId) {
        if self.member(id).is_none() {
            return;
        }
        let Some(mut member) = self.members[id.index()].take() else { return };
        self.woken.extend(member.reader.take());
        self.woken.extend(member.writer.take());
        let left: Vec<_> = member.conn.drain().collect();
        left.into_iter().for_each(|buffer| self.recycle(buffer));
        self.feed();
        match self.lp.take_out(id) {
            // Its place is free when it is destroyed.
            Ok(channel) => self.ended.push((channel, member.lifeline)),
            // A channel that was taken out is destroyed by the caller that took it.
            Err(_) => self.count = self.count.saturating_sub(1),
        }
    }

    /// Polls what has arrived by now, of peers that do not send without end.
    fn catch_up(&mut self) {
        for _ in 0..64 {
            if self.turn() == 0 {
                break;
            }
        }
    }

    /// The peer of a stream has closed the stream over which it had connected.
    pub(crate) fn is_gone(&mut self, id: ChannelId) {
        // What has arrived before comes first.
        self.catch_up();
        if let Some(member) = self.member(id) {
            member.conn.on_gone();
            self.pump(id);
        }
    }

    /// Ends all streams.
    pub(crate) fn stop(&mut self, error: StreamError) {
        self.stopped.get_or_insert(error);
        let ids: Vec<_> = self.members.iter().flatten().map(|member| member.id).collect();
        for id in ids {
            if let Some(member) = self.member(id) {
                member.conn.fail(error);
                self.pump(id);
            }
        }
    }

    #[cfg(feature = "tokio")]
    pub(crate) fn count_sleep(&mut self, sleeps: bool) {
        self.stats.sleeps += u64::from(sleeps);
    }

    /// Does what is due by now, and returns when something is due next.
    pub(crate) fn due(&mut self, now: Instant) -> Instant {
        while let Some(&(at, id)) = self.lingering.front() {
            if at > now && self.member(id).is_some() {
                break;
            }
            self.lingering.pop_front();
            self.remove(id);
        }
        if self.lingering.is_empty() {
            // Who calls this has another one.
            self.kept = None;
        }
        if self.next_tick <= now {
            self.next_tick = now + self.config.keep_alive;
            let ids: Vec<_> = self.members.iter().flatten().map(|member| member.id).collect();
            for id in ids {
                if let Some(member) = self.member(id)
                    && member.conn.tick()
                {
                    member.conn.fail(StreamError::TimedOut);
                }
                self.pump(id);
            }
        }
        self.lingering.front().map_or(self.next_tick, |&(at, _)| at.min(self.next_tick))
    }
}

impl Inner {
    /// Looks at streams whose peers may be gone, and ends those that are.
    pub(crate) fn look_at(&self, indexes: &[usize]) {
        for &index in indexes {
            let mut state = self.lock();
            // Another stream may have the place by now: that one's lifeline says whether it was meant.
            let member = state.members.get_mut(index).and_then(Option::as_mut);
            let Some((id, mut line)) =
                member.and_then(|member| Some((member.id, member.lifeline.take()?)))
            else {
                continue;
            };
            drop(state);
            let has_ended = line.has_ended();
            let mut state = self.lock();
            let Some(member) = state.member(id) else { continue };
            let line = member.lifeline.insert(line);
            if has_ended {
                state.is_gone(id);
            } else {
                // With the lock held, so that the member has it when there is more. If this fails, keep-alive finds the end.
                let _ = self.sockets.add_again(line, index);
            }
        }
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
                hub.waker.wake();
            }
        });
        if started.is_err() {
            self.is_watched.store(false, Ordering::SeqCst);
        }
        started.map(drop)
    }
}
