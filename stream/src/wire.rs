//! The bytes that two streams exchange. All numbers are in network order.
//!
//! A message is a header of 4 bytes, and bytes of the stream behind it:
//!
//! | bits of a header | |
//! |---|---|
//! | 31 | `fin`: no data come after this message |
//! | 30 | `closed`: the sender reads no more, and posts no more |
//! | 29 | `reset`: the sender has given up |
//! | 28 | `ping`: nothing, to see whether it arrives |
//! | 27 | `has_fin`: the sender has the other side's `fin` |
//! | 26..16 | zero |
//! | 15..0 | how many messages with data the other side may send beyond those it may send already |
//!
//! A hello, the private data of the exchange, has 20 bytes: `ibvS`, the version (2), options (2), the longest message that the
//! sender receives (4), how many with data it receives at first (2), zero (2), the seconds after which it pings (4).

use crate::{Refusal, StreamError};

impl Refusal {
    /// A listener sends these instead of the exchange, or with its rejection.
    pub(crate) fn bytes(self) -> &'static [u8; 8] {
        match self {
            Self::Full => b"ibvSfull",
            Self::NoResources => b"ibvSnone",
            Self::TooSlow => b"ibvSslow",
            Self::OtherDevice => b"ibvSelse",
        }
    }
}

/// Whether the first bytes of a listener are its refusal.
pub(crate) fn check_refused(bytes: &[u8]) -> Result<(), StreamError> {
    use Refusal::{Full, NoResources, OtherDevice, TooSlow};
    let first = bytes.first_chunk();
    let all = [Full, NoResources, TooSlow, OtherDevice];
    let refused = all.into_iter().find(|&reason| first == Some(reason.bytes()));
    refused.map_or(Ok(()), |reason| Err(StreamError::Refused(reason)))
}

/// The length of a header.
pub(crate) const HEADER: usize = 4;

/// The number of receives kept for messages without data, which need no credit.
pub(crate) const CONTROLS: u32 = 4;

const FIN: u32 = 1 << 31;
const CLOSED: u32 = 1 << 30;
const RESET: u32 = 1 << 29;
const PING: u32 = 1 << 28;
const HAS_FIN: u32 = 1 << 27;

/// See the [module](self).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Header {
    pub(crate) fin: bool,
    pub(crate) closed: bool,
    pub(crate) reset: bool,
    pub(crate) ping: bool,
    pub(crate) has_fin: bool,
    pub(crate) credits: u16,
}

impl Header {
    pub(crate) fn to_bytes(self) -> [u8; HEADER] {
        let Self { fin, closed, reset, ping, has_fin, credits } = self;
        let flag = |is_set, flag| u32::from(is_set) * flag;
        let flags = flag(fin, FIN) | flag(closed, CLOSED) | flag(reset, RESET);
        let flags = flags | flag(ping, PING) | flag(has_fin, HAS_FIN);
        (flags | u32::from(credits)).to_be_bytes()
    }

    pub(crate) fn from_bytes(bytes: [u8; HEADER]) -> Result<Self, StreamError> {
        let word = u32::from_be_bytes(bytes);
        let is_set = |flag| word & flag != 0;
        if word & 0x07ff_0000 != 0 {
            return Err(StreamError::Protocol("a header has bits that mean nothing"));
        }
        Ok(Self {
            fin: is_set(FIN),
            closed: is_set(CLOSED),
            reset: is_set(RESET),
            ping: is_set(PING),
            has_fin: is_set(HAS_FIN),
            credits: word as u16,
        })
    }
}

/// The parameters that a side announces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Hello {
    /// The longest message that it receives, with its header.
    pub(crate) chunk: u32,
    /// How many messages with data it receives at first.
    pub(crate) receives: u16,
    /// After how many seconds without anything else it pings.
    pub(crate) keep_alive: u32,
    /// Its receives are those of many streams.
    pub(crate) shares: bool,
}

const MAGIC: [u8; 4] = *b"ibvS";
const VERSION: u16 = 1;
const SHARES: u16 = 1 << 1;
/// The length of a hello.
pub(crate) const HELLO: usize = 20;
/// The shortest chunk.
pub(crate) const MIN_CHUNK: u32 = 64;

impl Hello {
    pub(crate) fn to_bytes(self) -> [u8; HELLO] {
        let Self { chunk, receives, keep_alive, shares } = self;
        let mut bytes = [0; HELLO];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&VERSION.to_be_bytes());
        bytes[6..8].copy_from_slice(&(if shares { SHARES } else { 0 }).to_be_bytes());
        bytes[8..12].copy_from_slice(&chunk.to_be_bytes());
        bytes[12..14].copy_from_slice(&receives.to_be_bytes());
        bytes[16..].copy_from_slice(&keep_alive.to_be_bytes());
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self, StreamError> {
        let Some(bytes) = bytes.first_chunk::<HELLO>().filter(|_| bytes.len() == HELLO) else {
            return Err(StreamError::Protocol("its private data are no hello of a stream"));
        };
        let word = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
        let double = |at: usize| u32::from(word(at)) << 16 | u32::from(word(at + 2));
        let (options, chunk, receives) = (word(6), double(8), word(12));
        let wrong = match () {
            () if bytes[..4] != MAGIC => "its private data are no hello of a stream",
            () if word(4) != VERSION => "it speaks another version of streams",
            () if options & !SHARES != 0 || word(14) != 0 => "it wants options that are unknown",
            () if chunk < MIN_CHUNK => "the messages that it receives are too short",
            () if receives == 0 => "it receives nothing",
            () => {
                let shares = options & SHARES != 0;
                return Ok(Self { chunk, receives, keep_alive: double(16), shares });
            }
        };
        Err(StreamError::Protocol(wrong))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        // A failure becomes a test in the commit that mends it.
        #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

        #[test]
        fn a_header_that_is_read_is_written_in_the_same_bytes(bytes: [u8; HEADER]) {
            if let Ok(header) = Header::from_bytes(bytes) {
                prop_assert_eq!(header.to_bytes(), bytes);
            } else {
                prop_assert!(bytes[0] & 7 != 0 || bytes[1] != 0);
            }
        }

        #[test]
        fn a_hello_that_is_read_is_written_in_the_same_bytes(bytes: Vec<u8>, flip in 0..HELLO, by: u8) {
            prop_assert!(Hello::from_bytes(&bytes).is_err());
            let hello = Hello { chunk: 4096, receives: 8, keep_alive: 15, shares: by & 1 == 1 };
            let mut bytes = hello.to_bytes();
            prop_assert_eq!(Hello::from_bytes(&bytes), Ok(hello));
            bytes[flip] ^= by;
            if let Ok(hello) = Hello::from_bytes(&bytes) {
                prop_assert_eq!(hello.to_bytes(), bytes);
            }
        }
    }
}
