//! Two streams as state machines, with the messages between them, in every order of what can happen, against two queues of bytes.

use std::collections::{HashSet, VecDeque};
use std::io::IoSlice;

use crate::StreamError;
use crate::conn::{Chunk, Conn, Cursor, Post, Read, Sent, Settings};
use crate::harness::Plain;
use crate::wire::{HEADER, Hello};

/// Bytes of data in the longest message.
const DATA: usize = 2;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Event {
    Write,
    /// A buffer of the program is written.
    Put,
    Flush,
    Read,
    /// The first of its messages on the way arrives at the peer.
    Arrive,
    /// The side hears that its first message has arrived.
    Sent,
    Shutdown,
    Close,
    /// The peer's process is gone.
    Gone,
}

const EVENTS: [Event; 9] = [
    Event::Write,
    Event::Put,
    Event::Flush,
    Event::Read,
    Event::Arrive,
    Event::Sent,
    Event::Shutdown,
    Event::Close,
    Event::Gone,
];

#[derive(Clone, Debug)]
struct Side {
    conn: Conn<Plain>,
    on_the_way: VecDeque<(Vec<u8>, Sent)>,
    arrived: VecDeque<Sent>,
    /// Bytes that this side has written and the peer has not read.
    unread: VecDeque<u8>,
    /// The number of unread bytes that have arrived at the peer.
    delivered: usize,
    written: u8,
    /// The number of written bytes that have arrived at the peer's device.
    reached: u8,
    has_shut_down: bool,
    is_closed: bool,
    has_read_end: bool,
    has_failed: bool,
    was_gone: bool,
    /// The stream was closed, and its queue pair destroyed.
    is_removed: bool,
}

impl Side {
    fn new(receives: u32) -> Self {
        let mut conn = Conn::new(Settings { receives, sends: 2, gather_at: 1 });
        let chunk = (HEADER + DATA) as u32;
        conn.connected(Hello { chunk, receives: receives as u16, keep_alive: 1, shares: false });
        Self {
            conn,
            on_the_way: VecDeque::new(),
            arrived: VecDeque::new(),
            unread: VecDeque::new(),
            delivered: 0,
            written: 0,
            reached: 0,
            has_shut_down: false,
            is_closed: false,
            has_read_end: false,
            has_failed: false,
            was_gone: false,
            is_removed: false,
        }
    }

    fn pump(&mut self) {
        while let Some(post) = self.conn.next_post() {
            self.on_the_way.push_back(match post {
                Post::Data(buffer, sent) => (buffer.bytes().to_vec(), sent),
                Post::Control(bytes, sent) => (bytes.to_vec(), sent),
            });
        }
        assert!(!self.conn.is_settled() || self.conn.clone().next_post().is_none());
        let in_flight = self.on_the_way.iter().map(|(_, sent)| sent).chain(&self.arrived);
        let (data, all) =
            (in_flight.clone().filter(|sent| sent.is_data).count(), in_flight.count());
        assert!(data <= 2 && all - data <= 2, "too much is in flight");
    }
}

type World = [Side; 2];

/// Lets something happen to a side, if it can.
fn happens(world: &mut World, index: usize, event: Event) -> bool {
    let [one, two] = world;
    let (side, peer) = if index == 0 { (one, two) } else { (two, one) };
    if side.is_removed {
        return false;
    }
    match event {
        Event::Write if !side.is_closed => {
            let bytes = [side.written, side.written + 1, side.written + 2];
            let pieces = [IoSlice::new(&bytes[..1]), IoSlice::new(&[]), IoSlice::new(&bytes[1..])];
            let mut cursor = Cursor::new(&pieces);
            let mut total = 0;
            loop {
                let take = || Some(Plain::new(64));
                match side.conn.fill(&mut cursor, take) {
                    Ok(0) => break,
                    Ok(taken) => total += taken,
                    Err(error) => {
                        assert!(total == 0 || error == StreamError::BrokenPipe);
                        assert!(!matches!(error, StreamError::Protocol(_)), "{error}");
                        break;
                    }
                }
                side.pump();
            }
            assert!(!(side.has_shut_down && total > 0), "it writes after its end");
            side.unread.extend(&bytes[..total]);
            side.written += total as u8;
            if total == 0 {
                return false;
            }
        }
        Event::Put if !side.is_closed => {
            let bytes = [side.written, side.written + 1];
            let mut buffer = Some(Plain::of(&[&[0; HEADER][..], &bytes].concat()));
            let put = side.conn.put(&mut buffer);
            assert!(put.is_ok() || buffer.is_some(), "it does not come back");
            assert!(!(side.has_shut_down && buffer.is_none()), "it writes after its end");
            if buffer.is_none() {
                side.unread.extend(bytes);
                side.written += 2;
            }
            side.pump();
        }
        Event::Flush if !side.is_closed => {
            if side.conn.flush() == Ok(true) {
                let posted: usize =
                    side.on_the_way.iter().map(|(bytes, _)| bytes.len() - HEADER).sum();
                let posted = posted as u8 + side.reached;
                assert_eq!(posted, side.written, "what was flushed is not posted");
            }
            side.pump();
        }
        Event::Read if !side.is_closed => match side.conn.take_piece() {
            Ok(Read::Piece(piece)) => {
                assert!(!side.has_read_end && !side.has_failed, "data come after the end");
                for byte in piece.bytes() {
                    assert_eq!(peer.unread.pop_front(), Some(*byte), "another byte is read");
                    peer.delivered -= 1;
                }
                side.conn.give_back();
            }
            Ok(Read::End) => {
                assert!(peer.has_shut_down && !side.has_failed, "an end that nobody has sent");
                assert!(peer.unread.is_empty(), "the end comes before {:?}", peer.unread);
                side.has_read_end = true;
                return false;
            }
            Ok(Read::Nothing) => return false,
            Err(error) => {
                assert!(
                    !side.has_read_end && !matches!(error, StreamError::Protocol(_)),
                    "{error}"
                );
                side.has_failed = true;
                return false;
            }
        },
        Event::Arrive => {
            let Some((bytes, sent)) = side.on_the_way.pop_front() else { return false };
            if peer.is_removed {
                side.on_the_way.clear();
                side.conn.fail(StreamError::TimedOut);
                side.is_removed = side.is_closed;
                return true;
            }
            side.arrived.push_back(sent);
            side.reached += (bytes.len() - HEADER) as u8;
            let keeps = bytes.len() % 2 == 0;
            let before = peer.conn.can_read();
            let returned = peer.conn.on_message(Plain::of(&bytes), keeps);
            if !peer.is_closed && peer.conn.failure().is_none() {
                side.delivered += bytes.len() - HEADER;
                assert!(bytes.len() == HEADER || !keeps || returned.is_none());
            }
            assert!(!before || peer.conn.can_read());
            let failure = peer.conn.failure();
            assert!(!matches!(failure, Some(StreamError::Protocol(_))), "{failure:?}");
            peer.pump();
        }
        Event::Sent => {
            let Some(sent) = side.arrived.pop_front() else { return false };
            side.conn.on_sent(sent);
        }
        Event::Shutdown if !side.has_shut_down => {
            side.has_shut_down = true;
            side.conn.shutdown();
        }
        Event::Close if !side.is_closed => {
            (side.is_closed, side.has_shut_down) = (true, true);
            side.conn.close(true);
        }
        Event::Gone if !side.was_gone && peer.is_removed => {
            side.was_gone = true;
            side.conn.on_gone();
        }
        _ => return false,
    }
    side.pump();
    for side in [&mut *side, &mut *peer] {
        side.is_removed |= side.is_closed && side.conn.is_over();
    }
    if !side.is_closed && side.conn.is_shut_down() == Ok(true) {
        assert_eq!(side.reached, side.written, "the peer's device has not everything");
    }
    if side.conn.is_shut_down() == Ok(true) && !peer.is_closed && peer.conn.failure().is_none() {
        assert_eq!(side.delivered, side.unread.len(), "the peer has not everything");
    }
    true
}

/// Whatever was written and not given up arrives, and both ends are over.
fn comes_to_its_end(mut world: World) {
    for side in &mut world {
        side.has_shut_down |= !side.is_closed;
        side.conn.shutdown();
        side.pump();
    }
    let calm = [Event::Arrive, Event::Sent, Event::Read];
    for round in 0.. {
        let mut moved = false;
        for index in 0..2 {
            for event in calm {
                moved |= happens(&mut world, index, event);
            }
        }
        if !moved {
            break;
        }
        assert!(round < 100, "it never ends");
    }
    let was_closed = world.iter().any(|side| side.is_closed || side.was_gone);
    for index in 0..2 {
        let [one, two] = &world;
        let (side, peer) = if index == 0 { (one, two) } else { (two, one) };
        if !was_closed {
            assert!(side.has_read_end && peer.unread.is_empty(), "{:?} stands still", peer.unread);
            assert_eq!(side.conn.is_shut_down(), Ok(true));
        }
        if !side.is_closed {
            assert!(side.conn.can_read() && side.conn.can_write(), "somebody waits for ever");
        }
    }
    for index in 0..2 {
        happens(&mut world, index, Event::Close);
    }
    for _ in 0..8 {
        for index in 0..2 {
            happens(&mut world, index, Event::Arrive);
            happens(&mut world, index, Event::Sent);
        }
    }
    for side in &world {
        assert!(side.is_removed, "its queue pair is needed for ever: {:?}", side.conn);
    }
}

#[test]
fn in_every_order_of_eight_events_no_byte_is_lost_doubled_or_made_up() {
    for receives in [1, 3] {
        let mut worlds = vec![[Side::new(receives), Side::new(receives)]];
        let (mut known, mut count) = (HashSet::new(), 0_usize);
        for depth in 1..=8 {
            let mut next = Vec::new();
            for world in &worlds {
                for index in 0..2 {
                    // Both sides are alike at first.
                    if depth == 1 && index == 1 {
                        continue;
                    }
                    for event in EVENTS {
                        let mut after = world.clone();
                        if happens(&mut after, index, event) && known.insert(digest(&after)) {
                            count += 1;
                            comes_to_its_end(after.clone());
                            next.push(after);
                        }
                    }
                }
            }
            worlds = next;
        }
        assert!(count > 5000, "{count}");
    }
}

/// Two worlds of the same digest are taken for the same.
fn digest(world: &World) -> u128 {
    use std::fmt::Write as _;
    use std::hash::{DefaultHasher, Hash, Hasher};

    /// Hashes what is written.
    struct Digest(DefaultHasher, DefaultHasher);

    impl std::fmt::Write for Digest {
        fn write_str(&mut self, text: &str) -> std::fmt::Result {
            text.hash(&mut self.0);
            text.hash(&mut self.1);
            Ok(())
        }
    }

    let mut digest = Digest(DefaultHasher::new(), DefaultHasher::new());
    1_u8.hash(&mut digest.1);
    write!(digest, "{world:?}").expect("it takes everything");
    u128::from(digest.0.finish()) << 64 | u128::from(digest.1.finish())
}
