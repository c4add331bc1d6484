//! Private data in the messages of the connection manager.

use std::fmt;
use std::ops::Deref;

use crate::base::{Error, Result};
use crate::verbs::memory::RemoteMemoryRegion;

/// The private data of a connection request, an answer or a rejection.
///
/// On InfiniBand and RoCE they arrive **padded with zeros** to the message's fixed size (56 bytes for a
/// request), so encode where they end. iWARP adds no padding.
///
/// With [flow control](crate::ChannelBuilder::flow_control), the first 24 bytes of requests and answers tell
/// the peer where a channel counts its receives. The program has 24 bytes less, and does not see them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PrivateData {
    len: u8,
    bytes: [u8; 255],
}

/// Marks a credit word.
const MARK: [u8; 4] = [0xfc, b'c', b'r', 1];

const FRONT: u8 = MARK.len() as u8 + 20;

impl PrivateData {
    pub(super) const EMPTY: Self = Self { len: 0, bytes: [0; 255] };

    /// Keeps the first 255 bytes, the most that a message has.
    pub(super) fn new(bytes: &[u8]) -> Self {
        let len = u8::try_from(bytes.len()).unwrap_or(u8::MAX);
        let mut data = Self { len, ..Self::EMPTY };
        let len = usize::from(len);
        data.bytes[..len].copy_from_slice(&bytes[..len]);
        data
    }

    pub(super) fn split(self) -> (Option<RemoteMemoryRegion>, Self) {
        let word = || {
            let (front, rest) = self.split_at_checked(FRONT.into())?;
            let word = front.strip_prefix(&MARK)?;
            Some((RemoteMemoryRegion::from_bytes(word).ok()?, Self::new(rest)))
        };
        word().map_or((None, self), |(word, rest)| (Some(word), rest))
    }

    /// The bytes without trailing zeros.
    pub fn trim_end(&self) -> &[u8] {
        let end = self.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
        &self[..end]
    }
}

impl Deref for PrivateData {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

impl AsRef<[u8]> for PrivateData {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for PrivateData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Trailing zeros may be padding.
        write!(f, "b\"{}\" ({} bytes)", self.trim_end().escape_ascii(), self.len)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Message {
    Request,
    Reply,
    Reject,
    DatagramRequest,
    DatagramReply,
}

impl Message {
    /// In bytes. A request loses 36 to the IP addresses. On iWARP: the limit of the kernel's interface, minus what some
    /// devices put in front.
    pub(super) fn limit(self, iwarp: bool) -> u8 {
        match self {
            _ if iwarp => 252,
            Self::Request => 92 - 36,
            Self::Reply => 196,
            Self::Reject => 148,
            Self::DatagramRequest => 216 - 36,
            Self::DatagramReply => 136,
        }
    }

    /// # Errors
    ///
    ///  - `EINVAL`: `data` is too long.
    pub(super) fn check(self, verb: &'static str, data: &[u8], iwarp: bool) -> Result<u8> {
        check(verb, data, self.limit(iwarp))
    }

    /// A credit word, if any, followed by `data`.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: `data` is too long.
    pub(super) fn compose(
        self,
        verb: &'static str,
        word: Option<RemoteMemoryRegion>,
        data: &[u8],
        iwarp: bool,
    ) -> Result<PrivateData> {
        let Some(word) = word else {
            self.check(verb, data, iwarp)?;
            return Ok(PrivateData::new(data));
        };
        let len = check(verb, data, self.limit(iwarp) - FRONT)?;
        let mut all = PrivateData { len: FRONT + len, ..PrivateData::EMPTY };
        let (front, rest) = all.bytes.split_at_mut(FRONT.into());
        front[..MARK.len()].copy_from_slice(&MARK);
        front[MARK.len()..].copy_from_slice(&word.to_bytes());
        rest[..data.len()].copy_from_slice(data);
        Ok(all)
    }
}

fn check(verb: &'static str, data: &[u8], limit: u8) -> Result<u8> {
    Error::within(verb, "the length of the private data", data.len() as u64, 0, limit)?;
    Ok(data.len() as u8)
}

/// Fuzzing: splits a peer's private data, and checks that the parts make the whole.
#[cfg(any(test, fuzzing))]
pub fn private_data(bytes: &[u8]) {
    let data = PrivateData::new(bytes);
    let (word, rest) = data.split();
    assert!(rest.trim_end().len() <= rest.len() && rest.len() <= bytes.len());
    assert_eq!(word.is_some(), rest.len() < data.len());
    for message in [Message::Request, Message::Reply, Message::DatagramRequest] {
        for iwarp in [false, true] {
            if let Ok(composed) = message.compose("verb", word, &rest, iwarp) {
                assert_eq!(composed, data, "{message:?}");
                assert!(composed.len() <= message.limit(iwarp).into(), "{message:?}");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_credit_word_goes_in_front() {
        let word = RemoteMemoryRegion::new(0x1122_3344_5566_7788, 8, 9).unwrap();
        for (message, iwarp, room) in [
            (Message::Request, false, 56 - 24),
            (Message::Reply, false, 196 - 24),
            (Message::Request, true, 252 - 24),
        ] {
            let compose = |word, len: usize| message.compose("verb", word, &vec![3; len], iwarp);
            for len in [0, 1, room] {
                let all = compose(Some(word), len).unwrap();
                assert_eq!(all.len(), 24 + len);
                let (found, rest) = all.split();
                assert_eq!((found, &rest[..]), (Some(word), &vec![3; len][..]));
                // InfiniBand and RoCE pad the data.
                let mut padded = [0; 255];
                padded[..all.len()].copy_from_slice(&all);
                let (found, rest) = PrivateData::new(&padded).split();
                assert_eq!((found, rest.trim_end()), (Some(word), &vec![3; len][..]));
            }
            let error = compose(Some(word), room + 1).unwrap_err().to_string();
            assert!(error.contains(&format!("is {}", room + 1)), "{error}");
            let plain = compose(None, room + 24).unwrap();
            assert_eq!(plain.split(), (None, plain));
            assert!(compose(None, room + 25).is_err());
        }
    }

    #[test]
    fn what_only_looks_like_a_credit_word_is_the_program_s() {
        // Too short, another mark, and a region that ends beyond 64 bits.
        let short = [&MARK[..], &[0; 19]].concat();
        let other = [&b"\xfccr\x02"[..], &[0; 20]].concat();
        let beyond = [&MARK[..], &[0xff; 20]].concat();
        for bytes in [&short, &other, &beyond] {
            let data = PrivateData::new(bytes);
            assert_eq!(data.split(), (None, data));
        }
    }

    #[test]
    fn the_padding_can_be_cut_off() {
        let mut padded = [0; 56];
        padded[..4].copy_from_slice(b"a\0b!");
        let data = PrivateData::new(&padded);
        assert_eq!((data.len(), data.trim_end()), (56, &b"a\0b!"[..]));
        assert_eq!(PrivateData::EMPTY.trim_end(), b"");
        assert_eq!(PrivateData::new(&[0; 9]).trim_end(), b"");
        assert_eq!(PrivateData::new(&[7; 300]).len(), 255);
    }

    #[test]
    fn each_message_has_its_limit() {
        for (message, limit) in [
            (Message::Request, 56),
            (Message::Reply, 196),
            (Message::Reject, 148),
            (Message::DatagramRequest, 180),
            (Message::DatagramReply, 136),
        ] {
            assert_eq!(message.check("rdma_connect", &vec![1; limit], false), Ok(limit as u8));
            let error = message.check("rdma_connect", &vec![1; limit + 1], false).unwrap_err();
            let text = error.to_string();
            assert!(
                text.contains(&format!("is {}", limit + 1)) && text.contains("private"),
                "{text}"
            );
            assert_eq!(message.check("rdma_connect", &[0; 252], true), Ok(252));
            for len in [253, 256, 256 + 40, 1 << 20] {
                assert!(message.check("rdma_connect", &vec![0; len], true).is_err(), "{len}");
                assert!(message.check("rdma_connect", &vec![0; len], false).is_err(), "{len}");
            }
        }
    }
}
