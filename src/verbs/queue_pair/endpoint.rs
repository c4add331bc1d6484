//! The address and limits of a queue pair, which its peer needs to connect.

use crate::base::{Detail, Error, GidClass, QueuePairType, Result, ffi, getters, setters};
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
/// [`to_bytes`](Self::to_bytes) serialises it, with a version; a peer with another version gets an error that names it.
/// In the formats of `serde` (feature `serde`) it is those bytes. Programs with their own format use [`new`](Self::new)
/// and the `with_` methods, and must exchange the packet numbers too.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(into = "Vec<u8>", try_from = "Vec<u8>"))]
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
