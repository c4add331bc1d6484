//! The address and limits of a queue pair, which its peer needs to connect.

use crate::base::c_enum::{getters, setters};
use crate::base::error::{Detail, Error, Result};
use crate::base::ffi;
use crate::base::gid_class::GidClass;
use crate::base::queue_pair_state::QueuePairType;
use crate::verbs::device::{EndpointGid, EndpointGids, Gid, LinkLayer};
use crate::verbs::memory::RemoteMemoryRegion;
use crate::verbs::settings::{MaximumTransferUnit, PacketSequenceNumber};
use std::fmt;

/// The address and limits of a queue pair. Both sides exchange their endpoints, over TCP or otherwise, before they
/// connect.
///
/// The same endpoint serves InfiniBand (LID) and RoCE (GIDs). From both endpoints the handshake takes the best matching
/// pair of GIDs, the first packet numbers, and the smaller path MTU and number of reads and atomics answered at a time.
/// It compares transport, partition and flow control.
///
/// [`to_bytes`](Self::to_bytes) and feature `serde` serialise it, with a version; a peer with another version gets an
/// error that names it. Programs with their own format use [`new`](Self::new) and the `with_` methods, and must
/// exchange the packet numbers too.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct QueuePairEndpoint {
    pub(crate) num: u32,
    pub(crate) lid: u16,
    pub(crate) send_psn: Option<PacketSequenceNumber>,
    pub(crate) path_mtu: Option<MaximumTransferUnit>,
    pub(crate) max_dest_rd_atomic: Option<u8>,
    /// C's number; 0 if unknown.
    pub(crate) transport: u8,
    /// 0 if unknown.
    pub(crate) pkey: u16,
    pub(crate) gids: EndpointGids,
    pub(crate) credit_word: Option<RemoteMemoryRegion>,
}

impl QueuePairEndpoint {
    /// The endpoint of a peer that sends its address in its own format. `lid` is 0 on RoCE; `gid` may be zero on
    /// InfiniBand.
    ///
    /// Its first packet has number 0, unless [`with_send_psn`](Self::with_send_psn) sets another. Its limits count as
    /// no smaller than ours.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the number has more than 24 bits.
    pub const fn new(num: u32, lid: u16, gid: Gid) -> Result<Self> {
        if num > 0xff_ffff {
            let (what, value) = ("the queue pair number", num as u64);
            return Err(Error::out_of_range("ibv_modify_qp", what, value, 0, 0xff_ffff));
        }
        Ok(Self {
            num,
            lid,
            send_psn: None,
            path_mtu: None,
            max_dest_rd_atomic: None,
            transport: 0,
            pkey: 0,
            gids: EndpointGids::one(gid, GidClass::Unspecified),
            credit_word: None,
        })
    }

    setters! { const self,
        /// Sets the number of the first packet that it sends.
        #[must_use]
        with_send_psn(psn: PacketSequenceNumber) => self.send_psn = Some(psn);

        /// Sets the path MTU.
        #[must_use]
        with_path_mtu(mtu: MaximumTransferUnit) => self.path_mtu = Some(mtu);

        /// Sets how many reads and atomics it answers at a time.
        #[must_use]
        with_max_dest_rd_atomic(reads: u8) => self.max_dest_rd_atomic = Some(reads);

        /// Sets the P_Key of the partition. The handshake refuses a peer in another one.
        #[must_use]
        with_pkey(pkey: u16) => self.pkey = pkey;

        /// Sets where a channel with flow control counts its receives: its
        /// [`credit_word`](Self::credit_word).
        #[must_use]
        with_credit_word(word: RemoteMemoryRegion) => self.credit_word = Some(word);
    }

    /// Sets the type. The handshake refuses a peer whose type does not fit.
    #[must_use]
    pub fn with_transport(mut self, kind: QueuePairType) -> Self {
        self.transport = code_of(kind);
        self
    }

    /// The number of the queue pair.
    pub const fn num(&self) -> u32 {
        self.num
    }

    /// The LID of its port; 0 on RoCE.
    pub const fn lid(&self) -> u16 {
        self.lid
    }

    /// The best GID of its port.
    pub const fn gid(&self) -> Gid {
        self.gids.first().gid
    }

    /// All GIDs that reach it, the best first: one for each kind of address and version of RoCE of its port, or only
    /// that of [`gid_index`](crate::QueuePairBuilder::gid_index).
    pub fn gids(&self) -> impl ExactSizeIterator<Item = Gid> + '_ {
        self.gids.as_slice().iter().map(|gid| gid.gid)
    }

    getters! { const self,
        /// The number of the first packet that it sends, if known.
        send_psn: Option<PacketSequenceNumber> => self.send_psn;

        /// The largest MTU that it can use, if known.
        path_mtu: Option<MaximumTransferUnit> => self.path_mtu;

        /// How many reads and atomics of its peer it answers at a time, if known.
        max_dest_rd_atomic: Option<u8> => self.max_dest_rd_atomic;

        /// Where a channel with flow control counts its receives. The peer reads it.
        credit_word: Option<RemoteMemoryRegion> => self.credit_word;
    }

    /// Its type, if known.
    pub fn transport(&self) -> Option<QueuePairType> {
        (self.transport != 0).then(|| ffi::ibv_qp_type(self.transport.into()).into())
    }

    /// The P_Key of its partition, if known.
    pub fn pkey(&self) -> Option<u16> {
        (self.pkey != 0).then_some(self.pkey)
    }

    /// Checks what both sides must share. Otherwise the connection would silently carry nothing.
    pub(super) fn check_agrees(&self, verb: &'static str, theirs: &Self) -> Result<()> {
        if let (Some(ours), Some(theirs)) = (self.transport(), theirs.transport()) {
            let fits = match ours {
                QueuePairType::XrcSend => theirs == QueuePairType::XrcReceive,
                QueuePairType::XrcReceive => theirs == QueuePairType::XrcSend,
                _ => ours == theirs,
            };
            if !fits {
                return Err(Error::with(verb, libc::EINVAL, Detail::Types { ours, theirs }));
            }
        }
        const FULL_MEMBER: u16 = 0x8000;
        if let (Some(ours), Some(theirs)) = (self.pkey(), theirs.pkey())
            && ((ours ^ theirs) & !FULL_MEMBER != 0 || (ours | theirs) & FULL_MEMBER == 0)
        {
            return Err(Error::with(verb, libc::EINVAL, Detail::Partitions { ours, theirs }));
        }
        Ok(())
    }

    pub(super) fn check(&self, verb: &'static str, link_layer: LinkLayer) -> Result<()> {
        match link_layer {
            LinkLayer::Ethernet if self.gids.is_empty() => Err(Error::invalid(
                verb,
                "the remote endpoint has no GID, which RoCE needs: is it an InfiniBand port?",
            )),
            LinkLayer::InfiniBand if self.lid == 0 => Err(Error::invalid(
                verb,
                "the remote endpoint has no LID, which InfiniBand needs: is it a RoCE port?",
            )),
            _ => Ok(()),
        }
    }

    pub(super) fn choose_gids(
        verb: &'static str,
        ours: &EndpointGids,
        theirs: &Self,
    ) -> Result<(EndpointGid, EndpointGid)> {
        // Each side's best.
        let (a, b) = (ours.first().named(), theirs.gids.first().named());
        let none = Error::with(verb, libc::EADDRNOTAVAIL, Detail::Gids { ours: a, theirs: b });
        ours.choose(&theirs.gids).ok_or(none)
    }
}

fn code_of(kind: QueuePairType) -> u8 {
    u8::try_from(ffi::ibv_qp_type::from(kind).0).unwrap_or(0)
}

impl fmt::Display for QueuePairEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QPN {:#08x}, LID {:#06x}, GID {}", self.num, self.lid, self.gid())?;
        for gid in self.gids().skip(1) {
            write!(f, " or {gid}")?;
        }
        if let Some(psn) = self.send_psn {
            write!(f, ", PSN {:#08x}", psn.value())?;
        }
        if let Some(mtu) = self.path_mtu {
            write!(f, ", MTU {}", mtu.bytes())?;
        }
        if let Some(reads) = self.max_dest_rd_atomic {
            write!(f, ", answers {reads} reads")?;
        }
        if let Some(kind) = self.transport() {
            write!(f, ", {kind:?}")?;
        }
        if let Some(pkey) = self.pkey() {
            write!(f, ", P_Key {pkey:#06x}")?;
        }
        // Without the key: a log must not give its readers access to the memory.
        f.write_str(if self.credit_word.is_some() { ", flow control" } else { "" })
    }
}

impl fmt::Debug for QueuePairEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QueuePairEndpoint({self})")
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_has_24_bits() {
        assert!(QueuePairEndpoint::new(0xff_ffff, 0, Gid::ZERO).is_ok());
        let error = QueuePairEndpoint::new(1 << 24, 0, Gid::ZERO).unwrap_err();
        assert!(error.to_string().contains("queue pair number is 16777216"), "{error}");
    }

    #[test]
    fn the_link_layers_do_not_mix() {
        let roce = QueuePairEndpoint::new(7, 0, "::ffff:10.0.0.1".parse().unwrap()).unwrap();
        let infiniband = QueuePairEndpoint::new(7, 3, Gid::ZERO).unwrap();
        let check = |endpoint: QueuePairEndpoint, layer| {
            endpoint.check("ibv_modify_qp", layer).map_err(|error| error.to_string())
        };
        assert!(check(roce, LinkLayer::Ethernet).is_ok());
        assert!(check(infiniband, LinkLayer::InfiniBand).is_ok());
        assert!(check(roce, LinkLayer::InfiniBand).unwrap_err().contains("no LID"));
        assert!(check(infiniband, LinkLayer::Ethernet).unwrap_err().contains("no GID"));
    }

    #[test]
    fn gids_that_do_not_fit_are_both_named() {
        let ours = EndpointGids::one("::ffff:10.0.0.1".parse().unwrap(), GidClass::RoceV2);
        let theirs = QueuePairEndpoint::new(7, 0, "fe80::9".parse().unwrap()).unwrap();
        let error = QueuePairEndpoint::choose_gids("ibv_modify_qp", &ours, &theirs).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("our RoCE v2 GID ::ffff:10.0.0.1"), "{text}");
        assert!(text.contains("the peer's GID fe80::9"), "{text}");
    }

    #[test]
    fn what_both_sides_must_share_is_compared() {
        use QueuePairType as Q;

        let endpoint = QueuePairEndpoint::new(7, 3, Gid::ZERO).unwrap();
        let agree = |ours: QueuePairEndpoint, theirs: QueuePairEndpoint| {
            ours.check_agrees("ibv_modify_qp", &theirs).map_err(|error| error.to_string())
        };
        let types =
            |ours, theirs| agree(endpoint.with_transport(ours), endpoint.with_transport(theirs));
        for (ours, theirs) in [
            (Q::ReliableConnected, Q::ReliableConnected),
            (Q::UnreliableConnected, Q::UnreliableConnected),
            (Q::XrcSend, Q::XrcReceive),
            (Q::XrcReceive, Q::XrcSend),
        ] {
            assert_eq!(types(ours, theirs), Ok(()));
        }
        for (ours, theirs, text) in [
            (
                Q::ReliableConnected,
                Q::UnreliableConnected,
                "ours is an RC queue pair, and the peer's a UC one",
            ),
            (
                Q::UnreliableConnected,
                Q::ReliableConnected,
                "ours is a UC queue pair, and the peer's an RC one",
            ),
            (
                Q::XrcSend,
                Q::XrcSend,
                "ours is a sending XRC queue pair, and the peer's a sending XRC one",
            ),
            (
                Q::ReliableConnected,
                Q::Unknown(77),
                "ours is an RC queue pair, and the peer's another one",
            ),
        ] {
            let error = types(ours, theirs).unwrap_err();
            assert!(error.contains(text), "{error}");
        }
        let keys = |ours, theirs| agree(endpoint.with_pkey(ours), endpoint.with_pkey(theirs));
        for (ours, theirs) in [(0xffff, 0xffff), (0x8001, 1), (1, 0x8001), (0, 1), (1, 0)] {
            assert_eq!(keys(ours, theirs), Ok(()), "{ours:#x} {theirs:#x}");
        }
        for (ours, theirs) in [(0xffff, 0x8001), (1, 1), (1, 2), (0x8001, 2)] {
            let error = keys(ours, theirs).unwrap_err();
            assert!(
                error.contains(&format!("our P_Key is {ours:#06x}, and the peer's {theirs:#06x}")),
                "{error}"
            );
        }
        assert_eq!(agree(endpoint.with_transport(Q::XrcSend).with_pkey(1), endpoint), Ok(()));
    }

    #[test]
    fn it_says_what_it_knows() {
        let endpoint = QueuePairEndpoint::new(7, 3, Gid::ZERO).unwrap();
        assert_eq!(endpoint.to_string(), "QPN 0x000007, LID 0x0003, GID ::");
        let endpoint = endpoint
            .with_send_psn(PacketSequenceNumber::new(0xabc).unwrap())
            .with_path_mtu(MaximumTransferUnit::Mtu1024)
            .with_max_dest_rd_atomic(16);
        let text = endpoint.to_string();
        assert!(text.ends_with("GID ::, PSN 0x000abc, MTU 1024, answers 16 reads"), "{text}");
        let text =
            endpoint.with_credit_word(RemoteMemoryRegion::new(8, 8, 0x77).unwrap()).to_string();
        assert!(text.ends_with("answers 16 reads, flow control") && !text.contains("77"), "{text}");
    }
}

#[cfg(test)]
mod endpoint_bytes_tests {
    use super::*;

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
