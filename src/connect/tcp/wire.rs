//! The messages of the exchange, in bytes. All numbers are in network order.
//!
//! | bytes of a greeting | |
//! |---|---|
//! | 0..7 | `ibverbs` |
//! | 7 | the version |
//! | 8..10 | the length of the endpoint |
//! | 10..12 | the length of the private data |
//! | 12.. | the endpoint, then the private data |
//!
//! A verdict has 5 bytes: a code, and an errno value (0 if ready).

use super::error::ExchangeError;
use crate::device::Gid;
use crate::device::{EndpointGid, EndpointGids};
use crate::gid_class::GidClass;
use crate::memory::RemoteMemoryRegion;
use crate::queue_pair::QueuePairEndpoint;
use crate::settings::{MaximumTransferUnit, PacketSequenceNumber};

/// The most bytes of private data that a program can exchange when it connects by
/// [`PreparedChannel::connect`](crate::PreparedChannel::connect) and similar methods: 8 KiB.
pub const MAX_PRIVATE_DATA: usize = 8192;

/// The versions of the exchange. A side greets in the oldest one that can tell all of its endpoint.
const VERSION: u8 = 1;
/// As version 1, with the credit word at the end of the endpoint: of a channel with flow control.
const CREDITS_VERSION: u8 = 2;

const NAME: &[u8; 7] = b"ibverbs";

/// The length of the first part of a greeting, which holds the lengths of the rest.
pub(super) const HEADER: usize = 12;

/// Number, LID, PSN, MTU, reads, and the number of GIDs.
const ENDPOINT: usize = 4 + 2 + 4 + 2 + 2 + 1;
/// A class and the GID.
const GID: usize = 1 + 16;
/// A region.
const CREDIT_WORD: usize = 20;

/// Stands for an absent PSN or number of reads. It is larger than any valid one.
const NO_PSN: u32 = u32::MAX;
const NO_READS: u16 = u16::MAX;

/// The first part of a greeting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Header {
    pub(super) version: u8,
    pub(super) endpoint: usize,
    pub(super) private_data: usize,
}

impl Header {
    /// Parses the first part of a greeting of any version.
    pub(super) fn parse(bytes: &[u8; HEADER]) -> Result<Self, ExchangeError> {
        let [name @ .., version, e0, e1, d0, d1] = bytes;
        if name != NAME {
            let reason = "its first bytes are not \"ibverbs\"";
            return Err(ExchangeError::Protocol(reason));
        }
        let length = |high, low| usize::from(u16::from_be_bytes([high, low]));
        Ok(Self { version: *version, endpoint: length(*e0, *e1), private_data: length(*d0, *d1) })
    }

    /// Whether it is of our version, and within our limits.
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

/// A complete greeting.
pub(super) fn greeting(
    endpoint: &QueuePairEndpoint,
    private_data: &[u8],
) -> Result<Vec<u8>, ExchangeError> {
    let length = u16::try_from(private_data.len());
    let Some(length) = length.ok().filter(|&length| usize::from(length) <= MAX_PRIVATE_DATA) else {
        return Err(ExchangeError::PrivateDataTooLong(private_data.len()));
    };
    let gids = endpoint.gids.as_slice();
    let (version, word) = match endpoint.credit_word {
        None => (VERSION, None),
        Some(word) => (CREDITS_VERSION, Some(word.to_bytes())),
    };
    let endpoint_length = ENDPOINT + GID * gids.len() + word.map_or(0, |word| word.len());
    let mut bytes = Vec::with_capacity(HEADER + endpoint_length + private_data.len());
    bytes.extend_from_slice(NAME);
    bytes.push(version);
    // At most six GIDs: it fits.
    bytes.extend_from_slice(&(endpoint_length as u16).to_be_bytes());
    bytes.extend_from_slice(&length.to_be_bytes());
    bytes.extend_from_slice(&endpoint.num.to_be_bytes());
    bytes.extend_from_slice(&endpoint.lid.to_be_bytes());
    let psn = endpoint.send_psn.map_or(NO_PSN, PacketSequenceNumber::value);
    bytes.extend_from_slice(&psn.to_be_bytes());
    // All are at most 4096.
    let mtu = endpoint.path_mtu.map_or(0, |mtu| mtu.bytes() as u16);
    bytes.extend_from_slice(&mtu.to_be_bytes());
    let reads = endpoint.max_dest_rd_atomic.map_or(NO_READS, u16::from);
    bytes.extend_from_slice(&reads.to_be_bytes());
    bytes.push(gids.len() as u8);
    for gid in gids {
        bytes.push(gid.class.code());
        bytes.extend_from_slice(&gid.gid.to_bytes());
    }
    bytes.extend_from_slice(word.as_ref().map_or(&[], |word| &word[..]));
    bytes.extend_from_slice(private_data);
    Ok(bytes)
}

/// The endpoint of a greeting with this header.
pub(super) fn endpoint(header: &Header, bytes: &[u8]) -> Result<QueuePairEndpoint, ExchangeError> {
    let read = || {
        if header.version < CREDITS_VERSION {
            return read_endpoint(bytes);
        }
        let (bytes, word) = bytes.split_last_chunk::<CREDIT_WORD>()?;
        let word = RemoteMemoryRegion::from_bytes(word).ok()?;
        Some(read_endpoint(bytes)?.with_credit_word(word))
    };
    read().ok_or(ExchangeError::Protocol("its endpoint is not valid"))
}

fn read_endpoint(bytes: &[u8]) -> Option<QueuePairEndpoint> {
    let (fixed, list) = bytes.split_first_chunk::<ENDPOINT>()?;
    let [n0, n1, n2, n3, l0, l1, p0, p1, p2, p3, m0, m1, r0, r1, count] = *fixed;
    let num = u32::from_be_bytes([n0, n1, n2, n3]);
    let mut endpoint = QueuePairEndpoint::new(num, u16::from_be_bytes([l0, l1]), Gid::ZERO).ok()?;
    endpoint.send_psn = match u32::from_be_bytes([p0, p1, p2, p3]) {
        NO_PSN => None,
        psn => Some(PacketSequenceNumber::new(psn).ok()?),
    };
    endpoint.path_mtu = match u16::from_be_bytes([m0, m1]) {
        0 => None,
        mtu => Some(MaximumTransferUnit::from_bytes(mtu.into()).ok()?),
    };
    endpoint.max_dest_rd_atomic = match u16::from_be_bytes([r0, r1]) {
        NO_READS => None,
        reads => Some(u8::try_from(reads).ok()?),
    };
    let mut gids = EndpointGids::default();
    let (list, rest) = list.as_chunks::<GID>();
    for [class, gid @ ..] in list {
        let gid = EndpointGid { gid: Gid::from_bytes(*gid), class: GidClass::from_code(*class)? };
        if gid.gid.is_zero() || !gids.push(gid) {
            return None;
        }
    }
    endpoint.gids = gids;
    (rest.is_empty() && list.len() == usize::from(count)).then_some(endpoint)
}

/// The length of a verdict.
pub(super) const VERDICT: usize = 5;

const READY: u8 = 1;
const FAILED: u8 = 2;

/// How the handshake of this side went: ready, or failed with an errno value.
pub(super) fn verdict(errno: Option<i32>) -> [u8; VERDICT] {
    let [a, b, c, d] = errno.unwrap_or(0).to_be_bytes();
    [if errno.is_some() { FAILED } else { READY }, a, b, c, d]
}

/// Whether the peer is ready.
pub(super) fn read_verdict(bytes: [u8; VERDICT]) -> Result<(), ExchangeError> {
    let [code, errno @ ..] = bytes;
    match (code, i32::from_be_bytes(errno)) {
        (READY, 0) => Ok(()),
        (FAILED, errno) if errno > 0 => Err(ExchangeError::Peer { errno }),
        _ => Err(ExchangeError::Protocol("it does not say whether it is ready")),
    }
}

/// Reads a greeting and a verdict as an exchange does. What is valid is written in the same bytes.
#[cfg(any(test, fuzzing))]
pub fn exchanged_bytes(data: &[u8]) {
    if let Some((bytes, _)) = data.split_first_chunk::<VERDICT>() {
        let written = match read_verdict(*bytes) {
            Ok(()) => Some(verdict(None)),
            Err(ExchangeError::Peer { errno }) => Some(verdict(Some(errno))),
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

    fn sample() -> QueuePairEndpoint {
        let mut endpoint = QueuePairEndpoint::new(0x12_3456, 7, "2001:db8::1".parse().unwrap())
            .unwrap()
            .with_send_psn(PacketSequenceNumber::new(0xab_cdef).unwrap())
            .with_path_mtu(MaximumTransferUnit::Mtu4096)
            .with_max_dest_rd_atomic(16);
        let gid = "::ffff:10.0.0.1".parse().unwrap();
        endpoint.gids.push(EndpointGid { gid, class: GidClass::RoceV2 });
        endpoint
    }

    fn parts(bytes: &[u8]) -> (Header, &[u8], &[u8]) {
        let (header, rest) = bytes.split_first_chunk().unwrap();
        let header = Header::parse(header).unwrap();
        let (endpoint, data) = rest.split_at(header.endpoint);
        (header, endpoint, data)
    }

    #[test]
    fn a_greeting_is_stable_and_read_back() {
        let bytes = greeting(&sample(), b"data").unwrap();
        let mut expected = b"ibverbs\x01\0\x31\0\x04".to_vec();
        expected.extend([0, 0x12, 0x34, 0x56, 0, 7, 0, 0xab, 0xcd, 0xef, 0x10, 0, 0, 16, 2]);
        for (gid, class) in sample().gids().zip([0, 3]) {
            expected.push(class);
            expected.extend(gid.to_bytes());
        }
        expected.extend(b"data");
        assert_eq!(bytes, expected);
        let (header, ours, data) = parts(&bytes);
        assert!(header.check().is_ok());
        assert_eq!((endpoint(&header, ours).unwrap(), data), (sample(), &b"data"[..]));

        let bare = QueuePairEndpoint::new(1, 2, Gid::ZERO).unwrap();
        let bytes = greeting(&bare, b"").unwrap();
        let (header, ours, _) = parts(&bytes);
        assert_eq!(endpoint(&header, ours).unwrap(), bare);
    }

    #[test]
    fn a_credit_word_makes_it_version_two() {
        let word = RemoteMemoryRegion::new(0x1122_3344_5566_7788, 8, 0x99aa_bbcc).unwrap();
        let with = sample().with_credit_word(word);
        let bytes = greeting(&with, b"data").unwrap();
        let plain = greeting(&sample(), b"").unwrap();
        let mut expected = b"ibverbs\x02\0\x45\0\x04".to_vec();
        expected.extend(&plain[HEADER..]);
        expected.extend(word.to_bytes());
        expected.extend(b"data");
        assert_eq!(bytes, expected);
        let (header, ours, data) = parts(&bytes);
        assert!(header.check().is_ok());
        assert_eq!((endpoint(&header, ours).unwrap(), data), (with, &b"data"[..]));
        for len in 0..ours.len() {
            assert!(endpoint(&header, &ours[..len]).is_err(), "{len} bytes");
        }
        // Each version has its own length.
        assert!(endpoint(&Header { version: 1, ..header }, ours).is_err());
        assert!(endpoint(&header, &plain[HEADER..]).is_err());
        let mut beyond = ours.to_vec();
        let at = beyond.len() - CREDIT_WORD;
        beyond[at..at + 16].fill(0xff);
        assert!(endpoint(&header, &beyond).is_err(), "a region beyond the address space");
    }

    #[test]
    fn only_what_is_whole_and_valid_is_an_endpoint() {
        let bytes = greeting(&sample(), b"").unwrap();
        let header = parts(&bytes).0;
        let endpoint = |bytes: &[u8]| endpoint(&header, bytes);
        let right = &bytes[HEADER..];
        for len in 0..right.len() {
            assert!(endpoint(&right[..len]).is_err(), "{len} bytes");
        }
        let with = |at: usize, byte: u8| {
            let mut wrong = right.to_vec();
            wrong[at] = byte;
            endpoint(&wrong).is_ok()
        };
        assert!(with(5, 9), "another LID");
        assert!(!with(0, 1), "a number of more than 24 bits");
        assert!(!with(6, 1), "a PSN of more than 24 bits");
        assert!(!with(10, 7), "no such MTU");
        assert!(!with(12, 1), "more reads than 8 bits hold");
        assert!(!with(14, 1) && !with(14, 3), "another count of GIDs");
        assert!(!with(15, 4), "no such class");
        let mut many = sample();
        let gid = many.gids.first();
        while many.gids.as_slice().len() < 6 {
            many.gids.push(gid);
        }
        let bytes = greeting(&many, b"").unwrap();
        assert!(endpoint(&bytes[HEADER..]).is_ok());
        let mut seven = bytes[HEADER..].to_vec();
        seven.extend_from_within(15..15 + GID);
        seven[14] = 7;
        assert!(endpoint(&seven).is_err());
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
        assert!(read_verdict(verdict(None)).is_ok());
        let failed = read_verdict(verdict(Some(libc::ENOMEM)));
        assert!(matches!(failed, Err(ExchangeError::Peer { errno: libc::ENOMEM })));
        for wrong in [[0; 5], [1, 0, 0, 0, 1], [2, 0, 0, 0, 0], [2, 0xff, 0, 0, 0], [3, 0, 0, 0, 0]]
        {
            assert!(matches!(read_verdict(wrong), Err(ExchangeError::Protocol(_))), "{wrong:?}");
        }
    }
}
