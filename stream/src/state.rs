//! The state behind a hub's lock: the loop, the streams with their buffers, and the tasks that are woken when the lock is released.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};
use std::{io, mem};

use ibverbs::event_loop::DetachedChannel;
use ibverbs::{
    BufferPool, ChannelId, Ended, Loop, PooledBuffer, ReceiveWorkRequest, SendWorkRequest,
    TransportError,
};

use crate::buffers::Buffers;
use crate::config::Config;
use crate::conn::{Conn, Cursor, Piece, Post, Read, Sent, Tick};
use crate::drivers::{Drivers, now};
use crate::linger::Lingered;
use crate::watch::PeerWatch;
use crate::wire::HEADER;
use crate::{Stats, StreamError};

pub(crate) struct State {
    pub(crate) lp: Loop<'static, PooledBuffer>,
    pub(crate) shared: Option<Shared>,
    pub(crate) buffers: Buffers,
    small: BufferPool,
    pub(crate) members: Vec<Option<Member>>,
    pub(crate) count: u32,
    /// The streams that [owe](Conn::owes) something.
    pub(crate) owing: u32,
    pub(crate) drivers: Drivers,
    /// Tasks to wake when the lock is released.
    pub(crate) woken: Vec<Arc<Waker>>,
    /// Threads that sleep for completions are to be woken then, as something else has happened.
    pub(crate) wakes_threads: bool,
    /// Those that wait for clients or connect are to hear then that the hub was stopped.
    pub(crate) ends_waits: bool,
    /// Channels to be destroyed then.
    pub(crate) ended: Vec<(DetachedChannel<'static>, Option<PeerWatch>)>,
    /// The streams whose channels are being destroyed, or are to be.
    pub(crate) ending: Vec<ChannelId>,
    /// Streams that were dropped, with the time when they are given up, in order.
    lingering: VecDeque<(Instant, ChannelId)>,
    /// The time that drops of threads' streams have waited.
    lingered: Lingered,
    /// The hub itself, while streams linger in a simulation, where no thread keeps it.
    pub(crate) kept: Option<Arc<dyn Any + Send + Sync>>,
    /// Tasks that wait for clients, until the hub is stopped.
    pub(crate) accepting: Vec<Arc<Waker>>,
    /// Connects that are under way, each with a number of its own.
    pub(crate) connecting: BTreeMap<u64, Interrupt>,
    pub(crate) next_connect: u64,
    pub(crate) stopped: Option<StreamError>,
    next_tick: Instant,
    pub(crate) stats: Stats,
    pub(crate) config: Config,
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
    pub(crate) reader: Option<Arc<Waker>>,
    pub(crate) writer: Option<Arc<Waker>>,
    /// The connection used for set-up. It is out while it is looked at.
    pub(crate) peer_watch: Option<PeerWatch>,
    /// The reader was dropped with something that it had not read.
    pub(crate) has_unread: bool,
    /// The stream is counted in `owing`.
    owes: bool,
    /// Buffers of messages that came while the channel was being connected. They receive again when it is.
    early: Vec<PooledBuffer>,
}

impl Member {
    /// Whether there is nothing to send or to count, and nobody to wake.
    #[inline]
    fn is_settled(&self) -> bool {
        self.conn.is_settled()
            && !self.owes
            && self.writer.is_none()
            && (self.reader.is_none() || !self.conn.has_pieces())
    }
}

/// How a connect that is under way is interrupted.
pub(crate) enum Interrupt {
    /// The task is woken, and looks whether the hub was stopped.
    #[cfg_attr(not(feature = "tokio"), expect(dead_code, reason = "there are no tasks"))]
    Task(Arc<Waker>),
    /// The stream over which a thread connects, of whatever kind it is, is shut down: that ends a read and a write.
    Stream(UnixStream),
}

impl Interrupt {
    /// Returns the waker of a task, which is woken when the lock is released.
    pub(crate) fn end(self) -> Option<Arc<Waker>> {
        match self {
            Self::Task(waker) => Some(waker),
            Self::Stream(stream) => {
                // A stream that is no socket ends by the deadline.
                let _ = stream.shutdown(Shutdown::Both);
                None
            }
        }
    }
}

/// The token of a receive; those of sends say what was sent.
const RECEIVE: u64 = 0;

fn token(sent: Sent) -> u64 {
    1 | u64::from(sent.is_data) << 1 | u64::from(sent.fin) << 2 | u64::from(sent.closed) << 3
}

fn sent(token: u64) -> Sent {
    Sent { is_data: token & 2 != 0, fin: token & 4 != 0, closed: token & 8 != 0 }
}

/// The most operations of one turn: others get the lock between two.
pub(crate) const TURN: usize = 256;

/// A piece that is no longer is copied to the program with the lock held, which takes less than to lock again.
const SHORT: usize = 1024;

/// The most turns of one call: a peer that sends without end holds nobody up for longer.
const TURNS: usize = 64;

#[inline]
fn member(members: &mut [Option<Member>], id: ChannelId) -> Option<&mut Member> {
    members.get_mut(id.index())?.as_mut().filter(|member| member.id == id)
}

/// Posts what a stream has to send.
fn send_queued(
    member: &mut Member,
    lp: &mut Loop<'static, PooledBuffer>,
    small: &mut BufferPool,
    stats: &mut Stats,
) {
    while member.conn.has_queued()
        && let Some(post) = member.conn.next_post()
    {
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
    /// `shared`: the number of receives that all streams share is posted by [`recycle`](Self::recycle).
    pub(crate) fn new(
        lp: Loop<'static, PooledBuffer>,
        shared: Option<ChannelId>,
        small: BufferPool,
        config: Config,
    ) -> Self {
        Self {
            lp,
            shared: shared.map(|id| Shared { id, posted: 0 }),
            buffers: Buffers::new(&config),
            small,
            members: Vec::new(),
            count: 0,
            owing: 0,
            drivers: Drivers::default(),
            woken: Vec::new(),
            wakes_threads: false,
            ends_waits: false,
            ended: Vec::new(),
            ending: Vec::new(),
            lingering: VecDeque::new(),
            lingered: Lingered::default(),
            kept: None,
            accepting: Vec::new(),
            connecting: BTreeMap::new(),
            next_connect: 0,
            stopped: None,
            next_tick: now() + config.keep_alive,
            stats: Stats::default(),
            config,
        }
    }

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

    /// Adds a stream that is not connected yet. If that fails, the caller [removes](Self::remove) it.
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
            peer_watch: None,
            has_unread: false,
            owes: false,
            early: Vec::new(),
        });
        self.count += 1;
        for _ in 0..self.config.own_receives() {
            let buffer = self.buffers.take().ok_or(io::ErrorKind::OutOfMemory)?;
            self.post_receive(id, buffer).map_err(StreamError::Transport)?;
        }
        Ok(())
    }

    fn post_receive(&mut self, id: ChannelId, buffer: PooledBuffer) -> Result<(), TransportError> {
        self.lp.post(id, ReceiveWorkRequest::new(buffer), RECEIVE).map_err(|failed| failed.error)
    }

    /// A received buffer is free: all streams receive into it, or one sends it.
    pub(crate) fn recycle(&mut self, buffer: PooledBuffer) {
        if let Some(Shared { id, posted }) = self.shared
            && PooledBuffer::capacity(&buffer) == self.config.chunk
            && posted < self.config.shared_receives
            && self.post_receive(id, buffer).is_ok()
            && let Some(shared) = &mut self.shared
        {
            shared.posted += 1;
        }
    }

    /// Looks for something, and polls until it is there, or nothing has ended.
    pub(crate) fn look<T>(
        &mut self,
        look: &mut impl FnMut(&mut Self) -> io::Result<Option<T>>,
    ) -> io::Result<Option<T>> {
        let mut turns = 0;
        loop {
            let found = look(self)?;
            if found.is_some() || turns == TURNS || self.turn() == 0 {
                return Ok(found);
            }
            turns += 1;
        }
    }

    /// Polls, and gives what has ended to its streams. Returns how much that was; [`TURN`] at most.
    pub(crate) fn turn(&mut self) -> usize {
        self.drivers.turns += 1;
        self.buffers.starved.pass_over();
        let mut count = 0;
        while count < TURN {
            match self.lp.next_ended() {
                Ok(Some(ended)) => self.dispatch(ended),
                Ok(None) => break,
                // Such a completion ends nothing.
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
                // A probe that has failed says more than the receives that end with it.
                let error = result.err().map(|error| self.lp.keep_alive(id).err().unwrap_or(error));
                return self.has_failed(id, error);
            };
            let returned = member.conn.on_message(buffer, keeps);
            let is_settled = member.is_settled();
            if let Some(buffer) = returned {
                self.receive_again(id, buffer);
            }
            if !is_settled {
                self.pump(id);
            }
        } else {
            drop(buffer);
            let (Some(member), Ok(_)) = (self.member(id), &result) else {
                return self.has_failed(id, result.err());
            };
            member.conn.on_sent(sent(token));
            if !member.is_settled() {
                self.pump(id);
            }
        }
    }

    /// An operation of a stream has failed, if it has, and the stream with it.
    fn has_failed(&mut self, id: ChannelId, error: Option<TransportError>) {
        if let (Some(member), Some(error)) = (self.member(id), error) {
            match error {
                // The loop has noticed first.
                TransportError::PeerGone => member.conn.on_gone(),
                error => member.conn.fail(StreamError::Transport(error)),
            }
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
        let early = self.member(id).map(|member| mem::take(&mut member.early));
        for buffer in early.into_iter().flatten() {
            self.receive_again(id, buffer);
        }
        self.pump(id);
    }

    /// Posts what a stream has to send, and wakes the tasks that can go on.
    pub(crate) fn pump(&mut self, id: ChannelId) {
        let Some(member) = member(&mut self.members, id) else { return };
        if member.conn.has_queued() {
            send_queued(member, &mut self.lp, &mut self.small, &mut self.stats);
        }
        if member.conn.is_settled() && !member.owes {
            if member.conn.has_pieces() {
                self.woken.extend(member.reader.take());
            }
            self.woken.extend(member.writer.take());
            return;
        }
        if member.reader.is_some() && member.conn.can_read() {
            self.woken.extend(member.reader.take());
        }
        if member.writer.is_some()
            && (member.conn.can_write() || member.conn.is_shut_down() != Ok(false))
        {
            self.woken.extend(member.writer.take());
        }
        let owes = member.conn.owes();
        if owes != mem::replace(&mut member.owes, owes) {
            self.owing = self.owing.wrapping_add_signed(if owes { 1 } else { -1 });
        }
        if member.conn.is_over() {
            self.remove(id);
        }
    }

    /// Wakes writers that have found no buffer, as many as there are now.
    #[inline]
    pub(crate) fn feed(&mut self) {
        if self.buffers.starved.is_empty() {
            return;
        }
        let (called, is_to_look) = self.buffers.call();
        // No completion need have told threads that sleep.
        self.wakes_threads |= is_to_look || !called.is_empty() && self.drivers.threads > 0;
        for index in called {
            if let Some(Some(member)) = self.members.get_mut(index) {
                self.woken.extend(member.writer.take());
            }
        }
    }

    /// Something has happened that no completion tells to threads that sleep.
    pub(crate) fn wake_threads(&mut self) {
        self.wakes_threads |= self.drivers.threads > 0;
    }

    /// Wakes all tasks that wait for a stream. Those that wait on find that nothing serves their runtime, and change that.
    #[cfg(feature = "tokio")]
    pub(crate) fn wake_all(&mut self) {
        for member in self.members.iter_mut().flatten() {
            self.woken.extend(member.reader.take());
            self.woken.extend(member.writer.take());
        }
    }

    /// Takes bytes of the program. `None`: there is no room, and the tasks and threads that wait are woken when there is.
    pub(crate) fn write(
        &mut self,
        id: ChannelId,
        from: &mut Cursor<'_>,
    ) -> Result<Option<usize>, StreamError> {
        let (mut total, mut is_starved) = (0, false);
        loop {
            let Self { members, buffers, .. } = self;
            let member = member(members, id).ok_or(StreamError::Aborted)?;
            let take = || {
                let buffer = buffers.take_for(id.index());
                is_starved = buffer.is_none();
                buffer
            };
            let filled = match member.conn.fill(from, take) {
                Err(error) if total == 0 => return Err(error),
                filled => filled.unwrap_or(0),
            };
            // A writer that takes nothing has nothing to wake for, itself included.
            if filled == 0 {
                break;
            }
            total += filled;
            self.pump(id);
            if from.is_at_end() {
                break;
            }
        }
        if total == 0 && is_starved {
            self.buffers.starved.add(id.index());
        }
        self.stats.copied += total as u64;
        Ok((total > 0).then_some(total))
    }

    /// Whether a write would not wait. If it would for a buffer, the stream is told when there is one.
    #[cfg(feature = "tokio")]
    pub(crate) fn can_write(&mut self, id: ChannelId) -> Result<bool, StreamError> {
        let Self { members, buffers, .. } = self;
        let conn = &member(members, id).ok_or(StreamError::Aborted)?.conn;
        Ok(conn.can_write() && (!conn.needs_buffer() || buffers.can_take(id.index())))
    }

    /// Posts what is gathered, as far as that can be. Returns whether nothing is left.
    pub(crate) fn flush(&mut self, id: ChannelId) -> Result<bool, StreamError> {
        let member = self.member(id).ok_or(StreamError::Aborted)?;
        if member.conn.flush()? {
            return Ok(true);
        }
        self.pump_for_writer(id);
        self.member(id).ok_or(StreamError::Aborted)?.conn.flush()
    }

    /// Takes a buffer that the program has filled. `None`: earlier bytes are to go first.
    ///
    /// # Errors
    ///
    ///  - `InvalidInput`: it is longer than a message of this stream.
    ///  - Those of the stream.
    pub(crate) fn put(
        &mut self,
        id: ChannelId,
        buffer: &mut Option<PooledBuffer>,
    ) -> io::Result<Option<()>> {
        for _ in 0..2 {
            let Some(filled) = buffer.as_ref().filter(|filled| filled.len() > HEADER) else {
                break;
            };
            let member = self.member(id).ok_or(StreamError::Aborted)?;
            let (len, most) = (filled.len() - HEADER, member.conn.longest(filled));
            if len > most {
                let reason = format!("the buffer has {len} bytes, and the peer receives {most}");
                return Err(io::Error::new(io::ErrorKind::InvalidInput, reason));
            }
            member.conn.put(buffer)?;
            self.buffers.lent -= usize::from(buffer.is_none());
            self.pump_for_writer(id);
        }
        Ok(buffer.as_ref().is_none_or(|left| left.len() <= HEADER).then_some(()))
    }

    /// Posts for the stream's writer, which looks itself: it is not woken for that.
    fn pump_for_writer(&mut self, id: ChannelId) {
        let writer = self.member(id).and_then(|member| member.writer.take());
        self.pump(id);
        match self.member(id).filter(|member| member.conn.failure().is_none()) {
            Some(member) => member.writer = writer,
            None => self.woken.extend(writer),
        }
    }

    /// See [`Conn::has_doubled`].
    pub(crate) fn has_doubled(&mut self, id: ChannelId, written: usize) -> bool {
        self.member(id).is_some_and(|member| member.conn.has_doubled(written))
    }

    /// Takes the next piece; or lets `copy` take its bytes, if they are few, and has its buffer receive again at once. `None`: there
    /// is none, and this is not the end.
    #[inline]
    pub(crate) fn read(
        &mut self,
        id: ChannelId,
        pieces: &mut VecDeque<Piece<PooledBuffer>>,
        mut copy: impl FnMut(&[u8]) -> bool,
    ) -> Result<Option<()>, StreamError> {
        let member = self.member(id).ok_or(StreamError::Aborted)?;
        match member.conn.take_short(|bytes| bytes.len() <= SHORT && copy(bytes)) {
            Some(piece) => self.give_back(id, piece.into_buffer()),
            None => match member.conn.take_piece()? {
                Read::Piece(piece) => pieces.push_back(piece),
                Read::End => {}
                Read::Nothing => return Ok(None),
            },
        }
        Ok(Some(()))
    }

    /// A piece was read to its end.
    #[inline(always)]
    pub(crate) fn give_back(&mut self, id: ChannelId, buffer: Option<PooledBuffer>) {
        if let Some(buffer) = buffer {
            self.receive_again(id, buffer);
        }
        if let Some(member) = self.member(id) {
            member.conn.give_back();
            if member.conn.has_queued() {
                self.pump(id);
            }
        }
    }

    /// The program reads no more: what has arrived and what arrives is thrown away.
    pub(crate) fn discard(&mut self, id: ChannelId) {
        let left = self.member(id).map(|member| member.conn.discard()).unwrap_or_default();
        for piece in left {
            self.give_back(id, piece.into_buffer());
        }
        if let Some(member) = self.member(id) {
            let reader = member.reader.take();
            self.woken.extend(reader);
        }
        self.wake_threads();
        self.pump(id);
    }

    /// The program has dropped a stream. Returns whether it is gone.
    pub(crate) fn close(&mut self, id: ChannelId) -> bool {
        // Bytes that have arrived are unread, whether or not anybody has polled since.
        self.catch_up();
        let Some(member) = self.member(id) else { return true };
        let has_read_all = !member.has_unread;
        let left = member.conn.close(has_read_all);
        left.into_iter().filter_map(Piece::into_buffer).for_each(|buffer| self.recycle(buffer));
        self.pump(id);
        let is_gone = self.member(id).is_none();
        if !is_gone {
            self.lingering.push_back((now() + self.config.lingers(), id));
        }
        is_gone
    }

    /// How long a thread waits for the end of a stream that it has dropped.
    pub(crate) fn lingers_for(&self, now: Instant) -> Duration {
        self.lingered.left(now, self.config.lingers())
    }

    /// A thread has waited for the end of a stream.
    pub(crate) fn has_lingered(&mut self, since: Instant) {
        self.lingered.has_waited(since, now(), self.config.lingers());
    }

    /// The stream is needed no more.
    pub(crate) fn remove(&mut self, id: ChannelId) {
        if self.member(id).is_none() {
            return;
        }
        let Some(mut member) = self.members[id.index()].take() else { return };
        self.buffers.starved.remove(id.index());
        self.owing -= u32::from(member.owes);
        self.woken.extend(member.reader.take());
        self.woken.extend(member.writer.take());
        let left: Vec<_> = member.conn.drain().collect();
        left.into_iter().for_each(|buffer| self.recycle(buffer));
        match self.lp.take_out(id) {
            // Its place is free when it is destroyed.
            Ok(channel) => {
                self.ending.push(id);
                self.ended.push((channel, member.peer_watch));
            }
            // The caller that has taken a channel out destroys it.
            Err(_) => self.count = self.count.saturating_sub(1),
        }
    }

    /// Polls what has arrived by now, of peers that do not send without end.
    fn catch_up(&mut self) {
        for _ in 0..TURNS {
            if self.turn() == 0 {
                break;
            }
        }
    }

    /// The peer of a stream has closed the connection used for set-up.
    pub(crate) fn is_gone(&mut self, id: ChannelId) {
        // The stream reads all that has arrived before.
        self.catch_up();
        if let Some(member) = self.member(id) {
            member.conn.on_gone();
            self.pump(id);
        }
        self.wake_threads();
    }

    /// Ends all streams, and all that wait for the hub.
    pub(crate) fn stop(&mut self, error: StreamError) {
        self.ends_waits |= self.stopped.is_none();
        self.stopped.get_or_insert(error);
        self.woken.append(&mut self.accepting);
        let connecting = mem::take(&mut self.connecting);
        self.woken.extend(connecting.into_values().filter_map(Interrupt::end));
        for id in self.ids() {
            if let Some(member) = self.member(id) {
                member.conn.fail(error);
                self.pump(id);
            }
        }
        self.wakes_threads = true;
    }

    fn ids(&self) -> Vec<ChannelId> {
        self.members.iter().flatten().map(|member| member.id).collect()
    }

    /// Whether the hub is to be driven, though the program may make no further call.
    pub(crate) fn is_owing(&self) -> bool {
        self.stopped.is_none() && self.drivers.is_owing(self.owing, self.count)
    }

    pub(crate) fn needs_helper(&self) -> bool {
        (self.owing > 0 || self.drivers.have_outsiders())
            && self.drivers.lack_helper()
            && self.is_owing()
    }

    /// The caller starts the helper when it has released the lock.
    pub(crate) fn takes_helper(&mut self) -> bool {
        let needs = self.needs_helper();
        self.drivers.has_helper |= needs;
        needs
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
        if self.lingering.is_empty() && self.kept.is_some() {
            // The caller holds the hub, too.
            self.kept = None;
        }
        if self.next_tick <= now {
            self.next_tick = now + self.config.keep_alive;
            for id in self.ids() {
                self.tick(id);
            }
        }
        self.lingering.front().map_or(self.next_tick, |&(at, _)| at.min(self.next_tick))
    }

    /// A period of keep-alive has passed.
    fn tick(&mut self, id: ChannelId) {
        let Some(member) = member(&mut self.members, id) else { return };
        let failure = match member.conn.tick() {
            Tick::Alive => None,
            Tick::Stuck => Some(StreamError::TimedOut),
            Tick::Probe => self.lp.keep_alive(id).err().map(StreamError::Transport),
        };
        if let Some(failure) = failure {
            member.conn.fail(failure);
            self.wake_threads();
        }
        self.pump(id);
    }
}
