//! One stream as a state machine, without input, output or clock.
//!
//! It is told what has happened ([`on_message`](Conn::on_message), [`on_sent`](Conn::on_sent), [`fail`](Conn::fail)) and what the
//! program wants ([`fill`](Conn::fill), [`take_piece`](Conn::take_piece), [`shutdown`](Conn::shutdown), [`close`](Conn::close)).
//! After each, [`next_post`](Conn::next_post) says what is to be sent, until it says nothing.
//!
//! A message with data needs a credit, which the receiver gives when the program has read an earlier one. Messages without data
//! need none, and have receives of their own: of those that carry credits two at most can be unread, since what they give back
//! was sent with credits before; one says that the stream ends, and one that it is closed. Whether the peer is there is a question
//! for its device ([`Tick::Probe`]), which needs no receive: the peer's program may make no call for as long as it likes.
//!
//! Of two sides that the connection manager has connected, the one that has connected sends first, a ping if nothing else: it
//! posts its receives after it has heard of the other one, and iWARP asks for it.

use std::collections::VecDeque;
use std::io::IoSlice;

use crate::StreamError;
use crate::wire::{HEADER, Header, Hello};

/// A buffer of messages: a header, and data.
pub(crate) trait Chunk {
    /// All that is in it, the header included.
    fn bytes(&self) -> &[u8];

    fn bytes_mut(&mut self) -> &mut [u8];

    /// Makes it so long. What is new in it is anything.
    fn set_len(&mut self, len: usize);

    fn capacity(&self) -> usize;
}

/// Data that have arrived.
#[derive(Clone, Debug)]
pub(crate) enum Piece<B> {
    /// In the buffer in which they have, from this place on.
    Kept(B, usize),
    /// Receives were low.
    Copied(Box<[u8]>, usize),
}

impl<B: Chunk> Piece<B> {
    /// The bytes that are not read yet.
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Self::Kept(buffer, at) => &buffer.bytes()[*at..],
            Self::Copied(bytes, at) => &bytes[*at..],
        }
    }

    /// Marks `len` bytes as read, at most all of them.
    pub(crate) fn consume(&mut self, len: usize) {
        let len = len.min(self.bytes().len());
        let (Self::Kept(_, at) | Self::Copied(_, at)) = self;
        *at += len;
    }

    pub(crate) fn into_buffer(self) -> Option<B> {
        match self {
            Self::Kept(buffer, _) => Some(buffer),
            Self::Copied(..) => None,
        }
    }
}

/// A message to send.
#[derive(Debug)]
pub(crate) enum Post<B> {
    Data(B, Sent),
    Control([u8; HEADER], Sent),
}

/// The kind of a message in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Sent {
    pub(crate) is_data: bool,
    pub(crate) fin: bool,
    pub(crate) closed: bool,
}

/// The result of a read.
#[derive(Debug)]
pub(crate) enum Read<B> {
    Piece(Piece<B>),
    End,
    Nothing,
}

/// How far something has come that is said to the peer once.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Debug)]
enum Saying {
    No,
    Wanted,
    Sent,
    /// The peer's device has it.
    Arrived,
}

/// The consequence of a period of keep-alive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Tick {
    /// Nothing: the peer was heard of, or has time left.
    Alive,
    /// The device is to ask the peer's device whether it is there.
    Probe,
    /// A message that was sent before the last period has not arrived.
    Stuck,
}

/// The numbers of one side.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Settings {
    /// Messages with data that can be unread.
    pub(crate) receives: u32,
    /// Messages with data in flight.
    pub(crate) sends: u32,
    /// Writes are gathered from so many messages in flight on.
    pub(crate) gather_at: u32,
}

impl Settings {
    /// The number of credits that are sent at once, if no message takes them along.
    fn owed_at_most(&self) -> u32 {
        self.receives.div_ceil(2)
    }
}

/// How many messages without data are in flight at most.
pub(crate) const CONTROLS_IN_FLIGHT: u32 = 2;

/// See the [module](self).
#[derive(Clone, Debug)]
pub(crate) struct Conn<B> {
    settings: Settings,
    peer: Option<Hello>,
    /// The peer, from the moment on when it has sent something.
    awaited: Option<Hello>,
    failure: Option<StreamError>,
    /// One of the directions, or the stream, has ended, has failed, or is to end. Before, most questions need not be asked.
    ends: bool,
    /// Something has arrived or was acknowledged since the last tick.
    moved: bool,
    /// At the last tick, something was to arrive or to be acknowledged.
    was_busy: bool,
    // The receiving direction.
    ready: VecDeque<Piece<B>>,
    /// How many messages with data the peer may send.
    granted: u32,
    /// How many more it is not told of.
    owed: u32,
    fin_in: bool,
    closed_in: bool,
    /// Gathered bytes were thrown away, as the peer had closed.
    lost: bool,
    // The sending direction.
    /// What is gathered.
    tail: Option<B>,
    credits: u32,
    in_flight: u32,
    controls: u32,
    fin: Saying,
    closing: Saying,
    resets: bool,
    flushes: bool,
    pings: bool,
    /// Bytes that arrive are thrown away.
    discards: bool,
    pub(crate) nodelay: bool,
}

impl<B: Chunk> Conn<B> {
    /// One that is not connected yet. What arrives before is not lost.
    pub(crate) fn new(settings: Settings) -> Self {
        Self {
            settings,
            peer: None,
            awaited: None,
            failure: None,
            ends: false,
            moved: false,
            was_busy: false,
            ready: VecDeque::new(),
            granted: settings.receives,
            owed: 0,
            fin_in: false,
            closed_in: false,
            lost: false,
            tail: None,
            credits: 0,
            in_flight: 0,
            controls: 0,
            fin: Saying::No,
            closing: Saying::No,
            resets: false,
            flushes: false,
            pings: false,
            discards: false,
            nodelay: false,
        }
    }

    /// The peer is there.
    pub(crate) fn connected(&mut self, peer: Hello) {
        self.credits = peer.receives.into();
        self.peer = Some(peer);
    }

    /// Does what [`connected`](Self::connected) does, and tells the peer so, which waits for that.
    #[cfg(feature = "rdmacm")]
    pub(crate) fn greets(&mut self, peer: Hello) {
        self.connected(peer);
        self.pings = true;
    }

    /// The peer receives nothing before it has sent something.
    #[cfg(any(test, feature = "rdmacm"))]
    pub(crate) fn awaits(&mut self, peer: Hello) {
        self.awaited = Some(peer);
    }

    /// A message has arrived. If its buffer is not to be kept, or has nothing to read, it comes back.
    #[inline(always)]
    pub(crate) fn on_message(&mut self, buffer: B, keeps: bool) -> Option<B> {
        if self.ends && (self.failure.is_some() || self.closing >= Saying::Wanted && self.resets) {
            return Some(buffer);
        }
        self.moved = true;
        if let Some(peer) = self.awaited.take() {
            self.connected(peer);
        }
        match self.receive(buffer.bytes()) {
            Ok(0) => Some(buffer),
            Ok(_) if self.ends && self.closing != Saying::No => {
                // The program has dropped the stream, and reads nothing.
                self.reset();
                Some(buffer)
            }
            Ok(_) if self.ends && self.discards => {
                self.give_back();
                Some(buffer)
            }
            Ok(_) if keeps => {
                self.ready.push_back(Piece::Kept(buffer, HEADER));
                None
            }
            Ok(_) => {
                self.ready.push_back(Piece::Copied(buffer.bytes()[HEADER..].into(), 0));
                Some(buffer)
            }
            Err(error) => {
                self.fail(error);
                Some(buffer)
            }
        }
    }

    /// Takes what a message says. Returns how much data it has.
    fn receive(&mut self, bytes: &[u8]) -> Result<usize, StreamError> {
        let wrong = |what| Err(StreamError::Protocol(what));
        let Some((header, data)) = bytes.split_first_chunk() else {
            return wrong("a message is shorter than its header");
        };
        let header = Header::from_bytes(*header)?;
        self.ends |= header.reset || header.fin || header.closed || header.has_fin;
        if header.reset {
            return Err(StreamError::Reset);
        }
        if self.closed_in {
            return wrong("a message comes after it was closed");
        }
        self.credits += u32::from(header.credits);
        if self.credits > self.peer.map_or(0, |peer| peer.receives.into()) {
            return wrong("it gives more credits than it has receives");
        }
        if header.has_fin {
            if self.fin < Saying::Sent {
                return wrong("it has an end that was not sent");
            }
            self.fin = Saying::Arrived;
        }
        if !data.is_empty() {
            if self.fin_in {
                return wrong("data come after the end");
            }
            if self.granted == 0 {
                return wrong("a message comes without a credit");
            }
            self.granted -= 1;
        }
        self.fin_in |= header.fin;
        if header.closed {
            self.closed_in = true;
            self.lost = self.tail.take().is_some();
        }
        Ok(data.len())
    }

    /// A message has arrived at the peer's device.
    pub(crate) fn on_sent(&mut self, sent: Sent) {
        self.moved = true;
        let count = if sent.is_data { &mut self.in_flight } else { &mut self.controls };
        *count = count.saturating_sub(1);
        if sent.fin {
            self.fin = Saying::Arrived;
        }
        if sent.closed {
            self.closing = Saying::Arrived;
        }
    }

    /// Notes the first failure. All that has arrived can be read.
    pub(crate) fn fail(&mut self, error: StreamError) {
        self.failure.get_or_insert(error);
        self.ends = true;
        self.tail = None;
    }

    /// The peer's process or host is gone.
    pub(crate) fn on_gone(&mut self) {
        self.ends = true;
        if self.fin_in && self.fin == Saying::Arrived {
            // Both directions have ended: it is only not said.
            self.closed_in = true;
        } else if !self.closed_in {
            self.fail(StreamError::Reset);
        }
    }

    /// Whether [`next_post`](Self::next_post) may have something. Mostly it has not.
    #[inline]
    pub(crate) fn has_queued(&self) -> bool {
        self.tail.is_some()
            || self.owed >= self.settings.owed_at_most()
            || self.pings
            || self.ends && (self.fin == Saying::Wanted || self.closing == Saying::Wanted)
    }

    /// Whether nothing is to be sent or said, and nothing ends. Then only readers and writers may have to be told something.
    #[inline]
    pub(crate) fn is_settled(&self) -> bool {
        let is_settled = !self.ends && !self.has_queued();
        debug_assert!(!is_settled || !self.owes() && !self.is_over());
        is_settled
    }

    /// Returns the message to send next.
    #[inline(always)]
    pub(crate) fn next_post(&mut self) -> Option<Post<B>> {
        let peer = self.peer?;
        if self.ends && (self.failure.is_some() || self.closed_in) {
            return None;
        }
        if self.tail_goes(peer)
            && let Some(mut buffer) = self.tail.take()
        {
            self.credits -= 1;
            self.in_flight += 1;
            self.flushes = false;
            let (header, sent) = self.header(true);
            buffer.bytes_mut()[..HEADER].copy_from_slice(&header.to_bytes());
            return Some(Post::Data(buffer, sent));
        }
        let ends = self.tail.is_none()
            && (self.fin == Saying::Wanted
                || self.closing == Saying::Wanted && self.fin >= Saying::Sent)
            || self.resets && self.closing == Saying::Wanted;
        let credits = !self.fin_in && self.owed >= self.settings.owed_at_most();
        let pings = self.pings;
        let room = if ends { CONTROLS_IN_FLIGHT } else { 1 };
        if !(ends || credits || pings) || self.controls >= room {
            return None;
        }
        self.controls += 1;
        let (header, sent) = self.header(false);
        let header = Header { ping: self.pings, ..header };
        self.pings = false;
        Some(Post::Control(header.to_bytes(), sent))
    }

    /// Whether what is gathered is to be sent now.
    fn tail_goes(&self, peer: Hello) -> bool {
        let Settings { sends, gather_at, .. } = self.settings;
        self.tail.as_ref().is_some_and(|tail| {
            self.credits > 0
                && self.in_flight < sends
                && (self.in_flight < gather_at
                    || self.flushes
                    || self.nodelay
                    || self.fin == Saying::Wanted
                    || tail.bytes().len() >= most(tail, peer))
        })
    }

    /// The header of the next message, which is the last one if nothing is left.
    fn header(&mut self, is_data: bool) -> (Header, Sent) {
        let credits = u16::try_from(self.owed).unwrap_or(u16::MAX);
        self.owed -= u32::from(credits);
        self.granted += u32::from(credits);
        if !self.ends {
            let header = Header { credits, ..Header::default() };
            return (header, Sent { is_data, fin: false, closed: false });
        }
        let reset = self.resets;
        let fin = self.fin == Saying::Wanted && self.tail.is_none();
        if fin {
            self.fin = Saying::Sent;
        }
        let closed = self.closing == Saying::Wanted && (reset || self.fin >= Saying::Sent);
        if closed {
            self.closing = Saying::Sent;
        }
        let header = Header { fin, closed, reset, ping: false, has_fin: self.fin_in, credits };
        (header, Sent { is_data, fin, closed })
    }

    /// Takes bytes of the program, as far as there is room in one message. 0: there is none, or no buffer to be had.
    ///
    /// # Errors
    ///
    /// It can send nothing any more.
    #[inline(always)]
    pub(crate) fn fill(
        &mut self,
        from: &mut Cursor<'_>,
        take: impl FnOnce() -> Option<B>,
    ) -> Result<usize, StreamError> {
        self.check_writable()?;
        let Some(peer) = self.peer.filter(|_| !from.is_at_end()) else { return Ok(0) };
        let before = self.tail.as_ref().map_or(HEADER, |tail| tail.bytes().len());
        if self.tail.is_none() {
            self.tail = take();
        }
        let Some(tail) = &mut self.tail else { return Ok(0) };
        let most = most(tail, peer);
        let mut at = before;
        while at < most
            && let Some(bytes) = from.bytes()
        {
            let len = bytes.len().min(most - at);
            tail.set_len(at + len);
            tail.bytes_mut()[at..].copy_from_slice(&bytes[..len]);
            at += len;
            from.advance(len);
        }
        Ok(at - before)
    }

    #[inline(always)]
    fn check_writable(&self) -> Result<(), StreamError> {
        if self.ends {
            if self.closed_in || self.fin != Saying::No {
                return Err(StreamError::BrokenPipe);
            }
            if let Some(error) = self.failure {
                return Err(error);
            }
        }
        Ok(())
    }

    /// How many bytes of data a message may have in this buffer.
    pub(crate) fn longest(&self, buffer: &B) -> usize {
        self.peer.map_or(0, |peer| most(buffer, peer) - HEADER)
    }

    /// Takes a buffer that the program has filled, as a message of its own if nothing is written behind it before it goes. It stays
    /// where it is while earlier bytes are gathered; those are to go first.
    ///
    /// # Errors
    ///
    /// Those of [`fill`](Self::fill).
    pub(crate) fn put(&mut self, buffer: &mut Option<B>) -> Result<(), StreamError> {
        self.check_writable()?;
        self.flushes = true;
        if self.tail.is_none() {
            self.tail = buffer.take();
        }
        Ok(())
    }

    /// Whether what is gathered has reached another power of two with the last bytes that were written, so many.
    pub(crate) fn has_doubled(&self, written: usize) -> bool {
        self.tail.as_ref().is_some_and(|tail| {
            let len = tail.bytes().len() - HEADER;
            len.checked_ilog2() != len.saturating_sub(written).checked_ilog2()
        })
    }

    /// Asks for gathered bytes to be posted at the next turn. Returns whether none are left.
    pub(crate) fn flush(&mut self) -> Result<bool, StreamError> {
        self.flushes = self.tail.is_some();
        match self.failure {
            Some(error) => Err(error),
            None if self.lost => Err(StreamError::BrokenPipe),
            None => Ok(self.tail.is_none()),
        }
    }

    /// Takes the next piece to be read. After the piece was read, [`give_back`](Self::give_back) says so.
    pub(crate) fn take_piece(&mut self) -> Result<Read<B>, StreamError> {
        if let Some(piece) = self.ready.pop_front() {
            return Ok(Read::Piece(piece));
        }
        match &self.failure {
            _ if !self.ends => Ok(Read::Nothing),
            _ if self.fin_in || self.discards => Ok(Read::End),
            Some(error) => Err(*error),
            None if self.closed_in => Err(StreamError::Reset),
            None => Ok(Read::Nothing),
        }
    }

    /// Whether something has arrived that the program has not taken.
    pub(crate) fn has_pieces(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Takes the next piece, if it is `short`.
    #[inline]
    pub(crate) fn take_short(&mut self, short: impl FnOnce(&[u8]) -> bool) -> Option<Piece<B>> {
        if short(self.ready.front()?.bytes()) { self.ready.pop_front() } else { None }
    }

    /// A piece was read: the peer may send another one.
    pub(crate) fn give_back(&mut self) {
        self.owed += 1;
    }

    /// The program reads no more: what arrives is thrown away. Returns what has arrived, which is to be given back.
    pub(crate) fn discard(&mut self) -> VecDeque<Piece<B>> {
        (self.discards, self.ends) = (true, true);
        std::mem::take(&mut self.ready)
    }

    /// The program writes no more.
    pub(crate) fn shutdown(&mut self) {
        self.ends = true;
        if self.fin == Saying::No {
            self.fin = Saying::Wanted;
        }
    }

    /// Whether the peer's device has all that was written, and the peer knows that nothing follows, or has closed.
    pub(crate) fn is_shut_down(&self) -> Result<bool, StreamError> {
        match self.failure {
            _ if self.fin == Saying::Arrived => Ok(true),
            Some(error) => Err(error),
            None if self.lost || self.closed_in && self.in_flight > 0 => {
                Err(StreamError::BrokenPipe)
            }
            None => Ok(self.closed_in),
        }
    }

    /// The program has dropped the stream, and has read all that has arrived or not. Returns what it has not taken.
    pub(crate) fn close(&mut self, has_read_all: bool) -> VecDeque<Piece<B>> {
        let left = std::mem::take(&mut self.ready);
        if self.closing != Saying::No {
            return left;
        }
        self.ends = true;
        if !has_read_all || !left.is_empty() {
            self.reset();
        } else {
            self.shutdown();
            self.closing = Saying::Wanted;
        }
        left
    }

    /// Tells the peer that nothing comes any more, and nothing is read.
    fn reset(&mut self) {
        self.tail = None;
        (self.resets, self.ends) = (true, true);
        self.closing = Saying::Wanted;
    }

    /// After [`close`](Self::close): the queue pair is needed no more.
    pub(crate) fn is_over(&self) -> bool {
        let is_said = self.closing == Saying::Arrived && self.in_flight + self.controls == 0;
        self.closing != Saying::No && (is_said || self.failure.is_some() || self.closed_in)
    }

    /// A period of keep-alive has passed.
    pub(crate) fn tick(&mut self) -> Tick {
        let has_moved = std::mem::take(&mut self.moved);
        let is_busy = self.in_flight + self.controls > 0 || self.awaited.is_some();
        let was_busy = std::mem::replace(&mut self.was_busy, is_busy);
        // A peer whose streams share receives may have none for a while. Its device says so to ours, which tries again, and
        // reports a peer that does not answer.
        let waits_for_receives = self.peer.is_some_and(|peer| peer.shares);
        if has_moved || self.closing != Saying::No && !is_busy {
            Tick::Alive
        } else if is_busy {
            if was_busy && !waits_for_receives { Tick::Stuck } else { Tick::Alive }
        } else if self.peer.is_some() {
            Tick::Probe
        } else {
            Tick::Alive
        }
    }

    /// Whether something is to be sent, or the peer to be told something, though the program makes no further call.
    pub(crate) fn owes(&self) -> bool {
        let can_send = self.peer.is_some() && self.failure.is_none() && !self.closed_in;
        let is_open = !self.fin_in && self.closing == Saying::No;
        can_send
            && (self.tail.is_some()
                || self.fin == Saying::Wanted
                || self.closing != Saying::No
                || is_open && (self.discards || self.owed >= self.settings.owed_at_most()))
    }

    pub(crate) fn failure(&self) -> Option<StreamError> {
        self.failure
    }

    /// Whether a read would not wait.
    pub(crate) fn can_read(&self) -> bool {
        !self.ready.is_empty() || self.fin_in || self.closed_in || self.failure.is_some()
    }

    /// Whether a write would not wait, if there are buffers.
    pub(crate) fn can_write(&self) -> bool {
        self.tail.as_ref().is_none_or(|tail| self.has_room(tail)) || self.will_refuse()
    }

    /// Whether a write needs a buffer.
    #[cfg(feature = "tokio")]
    pub(crate) fn needs_buffer(&self) -> bool {
        self.tail.is_none() && !self.will_refuse()
    }

    fn has_room(&self, tail: &B) -> bool {
        self.peer.is_some_and(|peer| tail.bytes().len() < most(tail, peer))
    }

    /// Whether a write ends with an error.
    fn will_refuse(&self) -> bool {
        self.fin != Saying::No || self.closed_in || self.failure.is_some()
    }

    /// Takes the buffers that are left.
    pub(crate) fn drain(&mut self) -> impl Iterator<Item = B> {
        self.tail.take().into_iter().chain(self.ready.drain(..).filter_map(Piece::into_buffer))
    }
}

/// The longest message: what the buffer holds, and the peer receives.
fn most<B: Chunk>(tail: &B, peer: Hello) -> usize {
    tail.capacity().min(peer.chunk as usize)
}

/// How far the bytes of the program were taken.
#[derive(Debug)]
pub(crate) struct Cursor<'a> {
    pieces: &'a [IoSlice<'a>],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(pieces: &'a [IoSlice<'a>]) -> Self {
        Self { pieces, at: 0 }
    }

    /// The next ones.
    fn bytes(&mut self) -> Option<&'a [u8]> {
        while let Some((first, rest)) = self.pieces.split_first() {
            if self.at < first.len() {
                return Some(&first[self.at..]);
            }
            (self.pieces, self.at) = (rest, 0);
        }
        None
    }

    fn advance(&mut self, len: usize) {
        self.at += len;
    }

    pub(crate) fn is_at_end(&mut self) -> bool {
        self.bytes().is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::harness::Plain;

    const PEER: Hello = Hello { chunk: 64, receives: 4, keep_alive: 1, shares: false };

    fn conn() -> Conn<Plain> {
        Conn::new(Settings { receives: 4, sends: 2, gather_at: 1 })
    }

    fn post(conn: &mut Conn<Plain>) -> Sent {
        match conn.next_post() {
            Some(Post::Data(_, sent) | Post::Control(_, sent)) => sent,
            None => panic!("nothing is sent"),
        }
    }

    fn write(conn: &mut Conn<Plain>) -> Sent {
        conn.fill(&mut Cursor::new(&[IoSlice::new(b"x")]), || Some(Plain::new(64))).unwrap();
        post(conn)
    }

    #[test]
    fn what_is_sent_just_before_a_tick_has_a_whole_period_to_arrive() {
        let mut conn = conn();
        conn.connected(PEER);
        let mut sent = write(&mut conn);
        for _ in 0..3 {
            assert_eq!(conn.tick(), Tick::Alive);
            conn.on_sent(sent);
            assert_eq!(conn.tick(), Tick::Alive);
            // The stream was idle until now.
            sent = write(&mut conn);
        }
        assert_eq!(conn.tick(), Tick::Alive);
        assert_eq!(conn.tick(), Tick::Stuck, "it has not arrived for a whole period");
    }

    /// The peer may give no receive back for as long as its program computes.
    #[test]
    fn an_idle_stream_asks_the_device_and_takes_no_receive_of_the_peer() {
        let mut conn = conn();
        assert_eq!(conn.tick(), Tick::Alive, "it is being connected");
        conn.connected(PEER);
        for _ in 0..100 {
            assert_eq!(conn.tick(), Tick::Probe);
            assert!(conn.next_post().is_none());
        }
        let sent = write(&mut conn);
        conn.on_sent(sent);
        assert_eq!(conn.tick(), Tick::Alive, "the peer was heard of");
        conn.close(true);
        let sent = post(&mut conn);
        conn.on_sent(sent);
        assert_eq!((conn.tick(), conn.tick()), (Tick::Alive, Tick::Alive), "it is over");
    }

    /// A peer whose streams share receives lets messages wait until another stream has given one back.
    #[test]
    fn what_waits_for_a_shared_receive_is_the_devices_to_judge() {
        let mut conn = conn();
        conn.connected(Hello { shares: true, ..PEER });
        let _sent = write(&mut conn);
        for _ in 0..100 {
            assert_eq!(conn.tick(), Tick::Alive);
        }
    }

    #[test]
    fn a_client_that_was_just_accepted_has_a_whole_period_to_speak() {
        let mut conn = conn();
        conn.awaits(PEER);
        assert_eq!(conn.tick(), Tick::Alive);
        let mut other = conn.clone();
        assert_eq!(other.tick(), Tick::Stuck, "it says nothing");
        assert!(conn.on_message(Plain::of(&[0; HEADER]), true).is_some());
        assert_eq!(conn.tick(), Tick::Alive);
    }
}
