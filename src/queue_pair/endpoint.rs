//! The address and limits of a queue pair, which its peer needs to connect.

use std::fmt;

use crate::device::{EndpointGid, EndpointGids, Gid, LinkLayer};
use crate::error::{Error, Result};
use crate::fields::{getters, setters};
use crate::gid_class::GidClass;
use crate::memory::RemoteMemoryRegion;
use crate::settings::{MaximumTransferUnit, PacketSequenceNumber};

/// The address of a queue pair, and the limits that its peer must respect. Both sides exchange their
/// endpoints, over TCP or otherwise, before they connect.
///
/// It contains the addresses for InfiniBand (LID) and RoCE (GIDs), so one exchange serves both; the number
/// of the first packet; and two limits, of which the handshake takes the smaller one of both sides: the
/// path MTU, and how many reads and atomics the queue pair answers at a time. A port that has several
/// addresses has several GIDs here, and the handshake chooses the best matching pair.
///
/// [`to_bytes`](Self::to_bytes) has it in bytes, and with feature `serde` it can be serialised. Both forms have a version,
/// and a peer with another version gets an error that names it. Programs that exchange addresses in a form of their own use
/// [`new`](Self::new) and the `with_` methods; they must exchange the packet numbers too. The
/// guide shows the ways to connect.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct QueuePairEndpoint {
    pub(crate) num: u32,
    pub(crate) lid: u16,
    pub(crate) send_psn: Option<PacketSequenceNumber>,
    pub(crate) path_mtu: Option<MaximumTransferUnit>,
    pub(crate) max_dest_rd_atomic: Option<u8>,
    pub(crate) gids: EndpointGids,
    pub(crate) credit_word: Option<RemoteMemoryRegion>,
}

impl QueuePairEndpoint {
    /// The endpoint of a peer that sends its address in a form of its own. `lid` is 0 on RoCE; `gid` may be
    /// zero on InfiniBand.
    ///
    /// Its first packet has number 0, unless [`with_send_psn`](Self::with_send_psn) sets another. Its
    /// limits are assumed to be no smaller than ours.
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
            gids: EndpointGids::one(gid, GidClass::Unspecified),
            credit_word: None,
        })
    }

    setters! { const self,
        /// The same endpoint, whose first packet has this number.
        #[must_use]
        with_send_psn(psn: PacketSequenceNumber) => self.send_psn = Some(psn);

        /// The same endpoint with this path MTU.
        #[must_use]
        with_path_mtu(mtu: MaximumTransferUnit) => self.path_mtu = Some(mtu);

        /// The same endpoint, which answers this many reads and atomics at a time.
        #[must_use]
        with_max_dest_rd_atomic(reads: u8) => self.max_dest_rd_atomic = Some(reads);

        /// The same endpoint, of a channel with [flow control](crate::ChannelBuilder::flow_control): where it counts
        /// its receives, as [`credit_word`](Self::credit_word) told the peer.
        #[must_use]
        with_credit_word(word: RemoteMemoryRegion) => self.credit_word = Some(word);
    }

    /// The number of the queue pair.
    pub const fn num(&self) -> u32 {
        self.num
    }

    /// The LID of its port; 0 on RoCE.
    pub const fn lid(&self) -> u16 {
        self.lid
    }

    /// The GID of its port: the best, if it has several.
    pub const fn gid(&self) -> Gid {
        self.gids.first().gid
    }

    /// All GIDs by which it can be reached, the best first: one for each kind of address and version of
    /// RoCE that its port has, or only the one that [`gid_index`](crate::QueuePairBuilder::gid_index)
    /// selects.
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

        /// Where a channel with [flow control](crate::ChannelBuilder::flow_control) counts its receives. The peer
        /// reads it there.
        credit_word: Option<RemoteMemoryRegion> => self.credit_word;
    }

    /// Checks that a port with this link layer can reach it. If not, returns an error of `verb`.
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

    /// The pair of our GIDs and the peer's that a path between them uses. If none match, returns an error
    /// of `verb`.
    pub(super) fn choose_gids(
        verb: &'static str,
        ours: &EndpointGids,
        theirs: &Self,
    ) -> Result<(EndpointGid, EndpointGid)> {
        ours.choose(&theirs.gids).ok_or(Error::gids_do_not_fit(
            verb,
            ours.first().named(),
            theirs.gids.first().named(),
        ))
    }
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
        // Not the key: a log must not give its readers access to the memory.
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
