//! Messages of a hostile peer, tried as a property and by a fuzzer.

use std::io::IoSlice;

use crate::conn::{Chunk, Conn, Cursor, Post, Settings};
use crate::wire::{HEADER, Hello};

/// A buffer of ordinary memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Plain {
    bytes: Vec<u8>,
    capacity: usize,
}

impl Plain {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { bytes: Vec::new(), capacity }
    }

    pub(crate) fn of(bytes: &[u8]) -> Self {
        Self { bytes: bytes.to_vec(), capacity: bytes.len() }
    }
}

impl Chunk for Plain {
    fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }

    fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity, "it has no room for {len} bytes");
        self.bytes.resize(len, 0);
    }

    fn capacity(&self) -> usize {
        self.capacity
    }
}

/// Feeds a stream with messages of a peer: bytes that say how long each is, and the messages. Whatever they say, what it keeps
/// and sends is within its bounds, and after a failure it says nothing any more.
pub fn messages(data: &[u8]) {
    let settings = Settings { receives: 4, sends: 2, gather_at: 1 };
    let mut conn = Conn::<Plain>::new(settings);
    let (first, mut rest) = data.split_at(data.len().min(20));
    let peer = Hello::from_bytes(first);
    let fallback = Hello { chunk: 64, receives: 3, keep_alive: 1, shares: false };
    let peer = peer.unwrap_or(fallback);
    conn.connected(peer);
    let (mut in_flight, mut unread, mut is_closed) = (Vec::new(), 0_u32, false);
    while let Some((&what, after)) = rest.split_first() {
        let len = usize::from(what & 0x3f).min(after.len());
        let (bytes, next) = after.split_at(len);
        rest = next;
        match what >> 6 {
            0 | 1 => {
                let was_unread = unread;
                let kept = conn.on_message(Plain::of(bytes), what & 0x40 == 0).is_none();
                // Data after the close are thrown away.
                if conn.failure().is_none() && !is_closed && bytes.len() > HEADER {
                    unread += 1;
                }
                assert!(!kept || unread == was_unread + 1);
                assert!(unread <= settings.receives, "{unread} messages are unread");
            }
            2 => {
                let pieces = [IoSlice::new(bytes)];
                let take = || Some(Plain::new(128));
                if let Ok(taken) = conn.fill(&mut Cursor::new(&pieces), take) {
                    assert!(taken <= bytes.len());
                }
                if bytes.len() > 50 {
                    conn.shutdown();
                }
            }
            _ => {
                in_flight.drain(..).for_each(|sent| conn.on_sent(sent));
                while let Ok(crate::conn::Read::Piece(piece)) = conn.take_piece() {
                    assert!(!piece.bytes().is_empty());
                    unread -= 1;
                    conn.give_back();
                }
                if bytes.len() > 60 {
                    conn.close(true);
                    is_closed = true;
                }
            }
        }
        while let Some(post) = conn.next_post() {
            let sent = match post {
                Post::Data(buffer, sent) => {
                    let len = buffer.bytes().len();
                    assert!((HEADER + 1..=peer.chunk as usize).contains(&len));
                    sent
                }
                Post::Control(_, sent) => sent,
            };
            in_flight.push(sent);
        }
        let data = in_flight.iter().filter(|sent| sent.is_data).count();
        assert!(data <= 2 && in_flight.len() - data <= 2, "{in_flight:?}");
    }
    if conn.failure().is_some() {
        assert!(conn.next_post().is_none());
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    proptest! {
        // A failure becomes a test in the commit that mends it.
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn a_hostile_peer_stays_within_bounds(messages in vec((0_u8..4, vec(any::<u8>(), 0..63)), 0..40)) {
            // Most headers are valid, so that it gets beyond the first.
            let mut data = vec![0; 20];
            for (what, mut bytes) in messages {
                if let [a, b, c, d, ..] = &mut bytes[..] {
                    (*a, *b) = (*a & 0xf8 & if *d & 1 == 0 { 0 } else { 0xff }, 0);
                    (*c, *d) = (0, *d & 3);
                }
                data.push(what << 6 | bytes.len() as u8);
                data.extend(bytes);
            }
            super::messages(&data);
        }

        #[test]
        fn any_bytes(data: Vec<u8>) {
            super::messages(&data);
        }
    }
}
