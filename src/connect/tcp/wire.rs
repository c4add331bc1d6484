//! The messages of the exchange. All numbers are in network order.
//!
//! | bytes of a greeting | |
//! |---|---|
//! | 0..7 | `ibverbs` |
//! | 7 | the version, which is that of the endpoint |
//! | 8..10 | the length of the endpoint |
//! | 10..12 | the length of the private data |
//! | 12.. | the endpoint without its version, then the private data |
//!
//! A verdict has 5 bytes: a code, and an errno value (0 if ready). The code also says whether the side keeps the stream open
//! as long as its channel: then the end of the stream says that it is gone.
//!
//! Three messages, one under way at a time: the connecting side's greeting, the other's greeting and verdict, the
//! first's verdict.

use super::error::{ExchangeError, MAX_PRIVATE_DATA};
use crate::verbs::queue_pair::{CREDITS_VERSION, QueuePairEndpoint, VERSION};

const NAME: &[u8; 7] = b"ibverbs";

/// The first part, which holds the lengths of the rest.
pub(super) const HEADER: usize = 12;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Header {
    pub(super) version: u8,
    pub(super) endpoint: usize,
    pub(super) private_data: usize,
}

impl Header {
    pub(super) fn parse(bytes: &[u8; HEADER]) -> Result<Self, ExchangeError> {
        let [name @ .., version, e0, e1, d0, d1] = bytes;
        if name != NAME {
            let reason = "its first bytes are not \"ibverbs\"";
            return Err(ExchangeError::Protocol(reason));
        }
        let length = |high, low| usize::from(u16::from_be_bytes([high, low]));
        Ok(Self { version: *version, endpoint: length(*e0, *e1), private_data: length(*d0, *d1) })
    }

    /// Compares with our version and limits.
    pub(super) fn check(&self) -> Result<(), ExchangeError> {
        if !(VERSION..=CREDITS_VERSION).contains(&self.version) {
            return Err(ExchangeError::Version { ours: CREDITS_VERSION, theirs: self.version });
        }
        if self.private_data > MAX_PRIVATE_DATA {
            return Err(ExchangeError::Protocol("its private data is longer than 8192 bytes"));
        }
        Ok(())
    }
}

pub(super) fn check_private_data(private_data: &[u8]) -> Result<u16, ExchangeError> {
    let length = u16::try_from(private_data.len());
    let length = length.ok().filter(|&length| usize::from(length) <= MAX_PRIVATE_DATA);
    length.ok_or(ExchangeError::PrivateDataTooLong(private_data.len()))
}

pub(super) fn greeting(
    endpoint: &QueuePairEndpoint,
    private_data: &[u8],
) -> Result<Vec<u8>, ExchangeError> {
    let length = check_private_data(private_data)?;
    let endpoint = endpoint.to_bytes();
    let (version, endpoint) = endpoint.split_first().expect("it has a version");
    let mut bytes = Vec::with_capacity(HEADER + endpoint.len() + private_data.len());
    bytes.extend_from_slice(NAME);
    bytes.push(*version);
    // At most 140.
    bytes.extend_from_slice(&(endpoint.len() as u16).to_be_bytes());
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(endpoint);
    bytes.extend_from_slice(private_data);
    Ok(bytes)
}

pub(super) fn endpoint(header: &Header, bytes: &[u8]) -> Result<QueuePairEndpoint, ExchangeError> {
    let read = QueuePairEndpoint::read(header.version, bytes);
    read.ok_or(ExchangeError::Protocol("its endpoint is not valid"))
}

pub(super) const VERDICT: usize = 5;

const READY: u8 = 1;
const FAILED: u8 = 2;
const READY_AND_KEEPS: u8 = 3;

/// An errno value means that the handshake failed. `keeps`: the stream stays open as long as the channel.
pub(super) fn verdict(errno: Option<i32>, keeps: bool) -> [u8; VERDICT] {
    let [a, b, c, d] = errno.unwrap_or(0).to_be_bytes();
    let code = match errno {
        Some(_) => FAILED,
        None if keeps => READY_AND_KEEPS,
        None => READY,
    };
    [code, a, b, c, d]
}

/// Returns whether the peer keeps the stream.
pub(super) fn read_verdict(bytes: [u8; VERDICT]) -> Result<bool, ExchangeError> {
    let [code, errno @ ..] = bytes;
    match (code, i32::from_be_bytes(errno)) {
        (READY, 0) => Ok(false),
        (READY_AND_KEEPS, 0) => Ok(true),
        (FAILED, errno) if errno > 0 => Err(ExchangeError::Peer { errno }),
        _ => Err(ExchangeError::Protocol("it does not say whether it is ready")),
    }
}

/// Reads a greeting and a verdict as an exchange does. Valid ones are written in the same bytes.
#[cfg(any(test, fuzzing))]
pub fn exchanged_bytes(data: &[u8]) {
    if let Some((bytes, _)) = data.split_first_chunk::<VERDICT>() {
        let written = match read_verdict(*bytes) {
            Ok(keeps) => Some(verdict(None, keeps)),
            Err(ExchangeError::Peer { errno }) => Some(verdict(Some(errno), false)),
            Err(_) => None,
        };
        assert!(written.is_none_or(|written| written == *bytes), "{bytes:?}");
    }
    let Some((first, rest)) = data.split_first_chunk::<HEADER>() else { return };
    let Ok(header) = Header::parse(first) else { return };
    let checked = header.check();
    let whole = header.endpoint + header.private_data;
    if checked.is_err() || rest.len() < whole {
        return;
    }
    let (bytes, private_data) = rest[..whole].split_at(header.endpoint);
    if let Ok(endpoint) = endpoint(&header, bytes) {
        assert_eq!(greeting(&endpoint, private_data).unwrap(), data[..HEADER + whole]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verbs::memory::RemoteMemoryRegion;

    fn sample() -> QueuePairEndpoint {
        QueuePairEndpoint::new(0x12_3456, 7, "2001:db8::1".parse().unwrap()).unwrap()
    }

    fn parts(bytes: &[u8]) -> (Header, &[u8], &[u8]) {
        let (header, rest) = bytes.split_first_chunk().unwrap();
        let header = Header::parse(header).unwrap();
        let (endpoint, data) = rest.split_at(header.endpoint);
        (header, endpoint, data)
    }

    #[test]
    fn a_greeting_is_stable_and_read_back() {
        let word = RemoteMemoryRegion::new(0x1122_3344_5566_7788, 8, 0x99aa_bbcc).unwrap();
        for (sample, version, length) in
            [(sample(), 1, 0x23), (sample().with_credit_word(word), 2, 0x37)]
        {
            let bytes = greeting(&sample, b"data").unwrap();
            let mut expected = b"ibverbs".to_vec();
            expected.extend([version, 0, length, 0, 4]);
            expected.extend(&sample.to_bytes()[1..]);
            expected.extend(b"data");
            assert_eq!(bytes, expected);
            let (header, ours, data) = parts(&bytes);
            assert!(header.check().is_ok());
            assert_eq!((endpoint(&header, ours).unwrap(), data), (sample, &b"data"[..]));
            // Each version has its own length.
            assert!(endpoint(&Header { version: 3 - version, ..header }, ours).is_err());
        }
    }

    #[test]
    fn headers_of_others_are_told_apart() {
        let parse = |bytes: &[u8; HEADER]| Header::parse(bytes).and_then(|header| header.check());
        assert!(matches!(parse(b"GET / HTTP/1"), Err(ExchangeError::Protocol(_))));
        let newer = parse(b"ibverbs\x03\0\0\0\0");
        assert!(matches!(newer, Err(ExchangeError::Version { ours: 2, theirs: 3 })));
        assert!(parse(b"ibverbs\x02\0\0\0\0").is_ok() && parse(b"ibverbs\0\0\0\0\0").is_err());
        assert!(matches!(parse(b"ibverbs\x01\0\x0f\x20\x01"), Err(ExchangeError::Protocol(_))));
        assert!(parse(b"ibverbs\x01\0\x0f\x20\0").is_ok());
        let long = greeting(&sample(), &[0; MAX_PRIVATE_DATA + 1]);
        assert!(matches!(long, Err(ExchangeError::PrivateDataTooLong(8193))));
        assert!(matches!(
            greeting(&sample(), &[0; 1 << 17]),
            Err(ExchangeError::PrivateDataTooLong(_))
        ));
    }

    #[test]
    fn verdicts_are_ready_or_have_an_errno() {
        for keeps in [false, true] {
            assert!(read_verdict(verdict(None, keeps)).is_ok_and(|read| read == keeps));
        }
        let failed = read_verdict(verdict(Some(libc::ENOMEM), true));
        assert!(matches!(failed, Err(ExchangeError::Peer { errno: libc::ENOMEM })));
        for wrong in [[0; 5], [1, 0, 0, 0, 1], [2, 0, 0, 0, 0], [2, 0xff, 0, 0, 0], [4, 0, 0, 0, 0]]
        {
            assert!(matches!(read_verdict(wrong), Err(ExchangeError::Protocol(_))), "{wrong:?}");
        }
    }
}
