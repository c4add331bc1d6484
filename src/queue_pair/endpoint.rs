//! What a peer must know to connect.

use std::fmt;

use crate::device::{Gid, LinkLayer};
use crate::error::{Error, Result};

/// The address of a queue pair: what both sides exchange, over TCP or otherwise, before they
/// connect.
///
/// It carries what InfiniBand (LID) and RoCE (GID) need, so one exchange serves both. With feature
/// `serde` it serialises as a struct of `num`, `lid` and `gid` (16 bytes in network order); that
/// form is stable. A number of more than 24 bits is refused on the way in. Without that feature, send
/// what [`num`](Self::num), [`lid`](Self::lid) and [`gid`](Self::gid) say, and use
/// [`new`](Self::new) on the other side. [The guide](crate#connecting-two-processes) exchanges them
/// over TCP.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(try_from = "Wire", into = "Wire"))]
pub struct QueuePairEndpoint {
    pub(crate) num: u32,
    pub(crate) lid: u16,
    pub(crate) gid: Gid,
}

/// What is on the wire.
#[cfg(feature = "serde")]
#[derive(serde::Serialize, serde::Deserialize)]
#[serde(rename = "QueuePairEndpoint")]
struct Wire {
    num: u32,
    lid: u16,
    gid: Gid,
}

#[cfg(feature = "serde")]
impl TryFrom<Wire> for QueuePairEndpoint {
    type Error = Error;

    fn try_from(wire: Wire) -> Result<Self> {
        Self::new(wire.num, wire.lid, wire.gid)
    }
}

#[cfg(feature = "serde")]
impl From<QueuePairEndpoint> for Wire {
    fn from(endpoint: QueuePairEndpoint) -> Self {
        Self { num: endpoint.num, lid: endpoint.lid, gid: endpoint.gid }
    }
}

impl QueuePairEndpoint {
    /// The endpoint of a peer that says so in a form of its own. `lid` is 0 on RoCE; `gid` may be
    /// zero on InfiniBand.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: the number has more than 24 bits.
    pub const fn new(num: u32, lid: u16, gid: Gid) -> Result<Self> {
        if num > 0xff_ffff {
            let (what, value) = ("the queue pair number", num as u64);
            return Err(Error::out_of_range("ibv_modify_qp", what, value, 0, 0xff_ffff));
        }
        Ok(Self { num, lid, gid })
    }

    /// The number of the queue pair.
    pub const fn num(&self) -> u32 {
        self.num
    }

    /// The LID of its port; 0 on RoCE.
    pub const fn lid(&self) -> u16 {
        self.lid
    }

    /// The GID of its port.
    pub const fn gid(&self) -> Gid {
        self.gid
    }

    /// Whether a port with this link layer can reach it; if not, that is an error of `verb`.
    pub(crate) fn check(&self, verb: &'static str, link_layer: LinkLayer) -> Result<()> {
        match link_layer {
            LinkLayer::Ethernet if self.gid.is_zero() => Err(Error::invalid(
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
}

impl fmt::Display for QueuePairEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QPN {:#08x}, LID {:#06x}, GID {}", self.num, self.lid, self.gid)
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
        assert!(roce.check("ibv_modify_qp", LinkLayer::Ethernet).is_ok());
        assert!(infiniband.check("ibv_modify_qp", LinkLayer::InfiniBand).is_ok());
        assert!(
            roce.check("ibv_modify_qp", LinkLayer::InfiniBand)
                .unwrap_err()
                .to_string()
                .contains("no LID")
        );
        assert!(
            infiniband
                .check("ibv_modify_qp", LinkLayer::Ethernet)
                .unwrap_err()
                .to_string()
                .contains("no GID")
        );
    }

    #[cfg(feature = "serde")]
    #[test]
    fn it_crosses_the_wire_and_is_checked() {
        let config = bincode::config::standard().with_fixed_int_encoding();
        let gid = "fe80::9:8".parse().unwrap();
        let endpoint = QueuePairEndpoint::new(0x1234, 5, gid).unwrap();
        let bytes = bincode::serde::encode_to_vec(endpoint, config).unwrap();
        let mut expected = vec![0x34, 0x12, 0, 0, 5, 0];
        expected.extend(gid.to_bytes());
        assert_eq!(bytes, expected, "the form is stable");
        let read = |bytes: &[u8]| {
            bincode::serde::decode_from_slice::<QueuePairEndpoint, _>(bytes, config).map(|(e, _)| e)
        };
        assert_eq!(read(&bytes).unwrap(), endpoint);
        for len in 0..bytes.len() {
            assert!(read(&bytes[..len]).is_err(), "{len} bytes");
        }
        expected[3] = 1;
        assert!(read(&expected).unwrap_err().to_string().contains("queue pair number"));
    }
}
