//! An endpoint as bytes, for programs and for the exchange over a stream.

use super::endpoint::QueuePairEndpoint;
use crate::base::{Error, GidClass, Result};
use crate::verbs::device::{EndpointGid, EndpointGids, Gid};
use crate::verbs::memory::RemoteMemoryRegion;
use crate::verbs::settings::{MaximumTransferUnit, PacketSequenceNumber};

/// An endpoint is written in the oldest version that can hold it.
pub(crate) const VERSION: u8 = 1;
/// With a credit word.
pub(crate) const CREDITS_VERSION: u8 = 2;

/// Number, LID, PSN, MTU, reads, type, P_Key, number of GIDs.
const FIXED: usize = 4 + 2 + 4 + 2 + 2 + 1 + 2 + 1;
/// Class and GID.
const GID: usize = 1 + 16;
const CREDIT_WORD: usize = 20;

/// Larger than any valid one.
const NO_PSN: u32 = u32::MAX;
const NO_READS: u16 = u16::MAX;

impl QueuePairEndpoint {
    /// The endpoint in at most 141 bytes, the version first. The peer passes all of them to
    /// [`from_bytes`](Self::from_bytes).
    ///
    /// ```
    /// # fn main() -> ibverbs::Result<()> {
    /// # let rxe0 = ibverbs_software::Device::builder().name("rxe0").build().unwrap();
    /// # rxe0.register();
    /// # let context = ibverbs::open("rxe0")?;
    /// # let domain = context.alloc_pd()?;
    /// use ibverbs::QueuePairEndpoint;
    ///
    /// let prepared = domain.create_channel().build()?;
    /// let bytes = prepared.endpoint().to_bytes();
    /// assert_eq!(QueuePairEndpoint::from_bytes(&bytes)?, prepared.endpoint());
    /// # Ok(())
    /// # }
    /// ```
    pub fn to_bytes(&self) -> Vec<u8> {
        let gids = self.gids.as_slice();
        let mut bytes = Vec::with_capacity(1 + FIXED + GID * gids.len() + CREDIT_WORD);
        bytes.push(if self.credit_word.is_none() { VERSION } else { CREDITS_VERSION });
        bytes.extend_from_slice(&self.num.to_be_bytes());
        bytes.extend_from_slice(&self.lid.to_be_bytes());
        let psn = self.send_psn.map_or(NO_PSN, PacketSequenceNumber::value);
        bytes.extend_from_slice(&psn.to_be_bytes());
        // At most 4096.
        let mtu = self.path_mtu.map_or(0, |mtu| mtu.bytes() as u16);
        bytes.extend_from_slice(&mtu.to_be_bytes());
        let reads = self.max_dest_rd_atomic.map_or(NO_READS, u16::from);
        bytes.extend_from_slice(&reads.to_be_bytes());
        bytes.push(self.transport);
        bytes.extend_from_slice(&self.pkey.to_be_bytes());
        bytes.push(gids.len() as u8); // at most six
        for gid in gids {
            bytes.push(gid.class.code());
            bytes.extend_from_slice(&gid.gid.to_bytes());
        }
        if let Some(word) = self.credit_word {
            bytes.extend_from_slice(&word.to_bytes());
        }
        bytes
    }

    /// The endpoint that [`to_bytes`](Self::to_bytes) serialised.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the bytes are not an endpoint, or have a version that this crate does not read.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        const VERB: &str = "ibv_modify_qp";
        let Some((&version, rest)) = bytes.split_first() else {
            return Err(Error::invalid(VERB, "the endpoint has no bytes"));
        };
        if !(VERSION..=CREDITS_VERSION).contains(&version) {
            let (what, most) = ("the version of the endpoint", CREDITS_VERSION.into());
            return Err(Error::out_of_range(VERB, what, version.into(), VERSION.into(), most));
        }
        Self::read(version, rest).ok_or(Error::invalid(VERB, "the bytes are not an endpoint"))
    }

    /// `bytes`: those after the version, which must be valid.
    pub(crate) fn read(version: u8, bytes: &[u8]) -> Option<Self> {
        if version < CREDITS_VERSION {
            return Self::read_plain(bytes);
        }
        let (bytes, word) = bytes.split_last_chunk::<CREDIT_WORD>()?;
        let word = RemoteMemoryRegion::from_bytes(word).ok()?;
        Some(Self::read_plain(bytes)?.with_credit_word(word))
    }

    fn read_plain(bytes: &[u8]) -> Option<Self> {
        let (fixed, list) = bytes.split_first_chunk::<FIXED>()?;
        let [n0, n1, n2, n3, l0, l1, p0, p1, p2, p3, m0, m1, r0, r1, transport, k0, k1, count] =
            *fixed;
        let num = u32::from_be_bytes([n0, n1, n2, n3]);
        let mut endpoint = Self::new(num, u16::from_be_bytes([l0, l1]), Gid::ZERO).ok()?;
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
        (endpoint.transport, endpoint.pkey) = (transport, u16::from_be_bytes([k0, k1]));
        let mut gids = EndpointGids::default();
        let (list, rest) = list.as_chunks::<GID>();
        for [class, gid @ ..] in list {
            let gid =
                EndpointGid { gid: Gid::from_bytes(*gid), class: GidClass::from_code(*class)? };
            if gid.gid.is_zero() || !gids.push(gid) {
                return None;
            }
        }
        endpoint.gids = gids;
        (rest.is_empty() && list.len() == usize::from(count)).then_some(endpoint)
    }
}

#[cfg(feature = "serde")]
impl From<QueuePairEndpoint> for Vec<u8> {
    fn from(endpoint: QueuePairEndpoint) -> Self {
        endpoint.to_bytes()
    }
}

#[cfg(feature = "serde")]
impl TryFrom<Vec<u8>> for QueuePairEndpoint {
    type Error = Error;

    fn try_from(bytes: Vec<u8>) -> Result<Self> {
        Self::from_bytes(&bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::QueuePairType;

    fn sample() -> QueuePairEndpoint {
        let mut endpoint = QueuePairEndpoint::new(0x12_3456, 7, "2001:db8::1".parse().unwrap())
            .unwrap()
            .with_send_psn(PacketSequenceNumber::new(0xab_cdef).unwrap())
            .with_path_mtu(MaximumTransferUnit::Mtu4096)
            .with_max_dest_rd_atomic(16)
            .with_transport(QueuePairType::UnreliableConnected)
            .with_pkey(0x8001);
        let gid = "::ffff:10.0.0.1".parse().unwrap();
        endpoint.gids.push(EndpointGid { gid, class: GidClass::RoceV2 });
        endpoint
    }

    fn is_valid(bytes: &[u8]) -> bool {
        QueuePairEndpoint::from_bytes(bytes).is_ok()
    }

    #[test]
    fn its_bytes_are_stable_and_read_back() {
        let mut expected =
            vec![1, 0, 0x12, 0x34, 0x56, 0, 7, 0, 0xab, 0xcd, 0xef, 0x10, 0, 0, 16, 3, 0x80, 1, 2];
        for (gid, class) in sample().gids().zip([0, 3]) {
            expected.push(class);
            expected.extend(gid.to_bytes());
        }
        assert_eq!(sample().to_bytes(), expected);
        let word = RemoteMemoryRegion::new(0x1122_3344_5566_7788, 8, 0x99aa_bbcc).unwrap();
        let with_word = sample().with_credit_word(word);
        expected[0] = 2;
        expected.extend(word.to_bytes());
        assert_eq!(with_word.to_bytes(), expected);
        let bare = QueuePairEndpoint::new(1, 2, Gid::ZERO).unwrap();
        for endpoint in [sample(), with_word, bare] {
            let bytes = endpoint.to_bytes();
            assert_eq!(QueuePairEndpoint::from_bytes(&bytes).unwrap(), endpoint);
            assert!((0..bytes.len()).all(|len| !is_valid(&bytes[..len])), "not whole");
        }
        for version in [1, 3] {
            expected[0] = version;
            assert!(!is_valid(&expected), "the credit word is in version 2");
        }
        let error = QueuePairEndpoint::from_bytes(&expected).unwrap_err().to_string();
        assert!(
            error.contains("version of the endpoint is 3, and must be within 1..=2"),
            "{error}"
        );
        let mut beyond = with_word.to_bytes();
        let at = beyond.len() - CREDIT_WORD;
        beyond[at..at + 16].fill(0xff);
        assert!(!is_valid(&beyond), "a region beyond the address space");
    }

    #[test]
    #[cfg(feature = "serde")]
    fn serde_has_the_same_bytes() {
        let config = bincode::config::standard();
        let written = bincode::serde::encode_to_vec(sample(), config).unwrap();
        assert_eq!(written[1..], sample().to_bytes());
        assert_eq!(usize::from(written[0]), written.len() - 1);
        let read =
            |bytes: &[u8]| bincode::serde::decode_from_slice::<QueuePairEndpoint, _>(bytes, config);
        assert_eq!(read(&written).unwrap().0, sample());
        assert!((0..written.len()).all(|len| read(&written[..len]).is_err()), "not whole");
        let other = [&[written[0], 3], &written[2..]].concat();
        let error = read(&other).unwrap_err().to_string();
        assert!(error.contains("version of the endpoint is 3"), "{error}");

        let text = serde_json::to_string(&sample()).unwrap();
        assert_eq!(serde_json::from_str::<QueuePairEndpoint>(&text).unwrap(), sample());
    }

    #[test]
    fn only_what_is_valid_is_an_endpoint() {
        let right = sample().to_bytes();
        let with = |at: usize, byte: u8| {
            let mut wrong = right.clone();
            wrong[at] = byte;
            is_valid(&wrong)
        };
        assert!(with(6, 9), "another LID");
        assert!(!with(1, 1), "a number of more than 24 bits");
        assert!(!with(7, 1), "a PSN of more than 24 bits");
        assert!(!with(11, 7), "no such MTU");
        assert!(!with(13, 1), "more reads than 8 bits hold");
        assert!(with(15, 77) && with(16, 0), "a type that has no name here, and another P_Key");
        assert!(!with(18, 1) && !with(18, 3), "another count of GIDs");
        assert!(!with(19, 4), "no such class");
        let mut many = sample();
        let gid = many.gids.first();
        while many.gids.as_slice().len() < 6 {
            many.gids.push(gid);
        }
        let mut seven = many.to_bytes();
        assert!(is_valid(&seven));
        seven.extend_from_within(19..19 + GID);
        seven[18] = 7;
        assert!(!is_valid(&seven));
    }
}
