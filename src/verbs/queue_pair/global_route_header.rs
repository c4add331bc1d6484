//! The header in front of each datagram.

use std::net::Ipv4Addr;

use crate::base::{Error, Result, debug, ffi};
use crate::verbs::device::Gid;
use crate::verbs::settings::FlowLabel;

/// `struct ibv_grh`: the 40 bytes before each message in the buffer of a UD receive. They name the sender.
///
/// On RoCE over IPv4 the last 20 bytes are the IPv4 header, and the first 20 are undefined. The methods detect this as
/// `ibv_init_ah_from_wc` does. On InfiniBand all bytes are undefined unless
/// [`has_global_route`](crate::completion::WorkSuccess::has_global_route) is true. The getters return `None` if there
/// is no header.
///
/// ```
/// use ibverbs::queue_pair::GlobalRouteHeader;
///
/// # fn main() -> ibverbs::Result<()> {
/// let mut received = [0; 45]; // what a receive has written
/// received[20] = 0x45; // IPv4, of 20 bytes
/// received[32..36].copy_from_slice(&[10, 0, 0, 7]);
/// received[40..].copy_from_slice(b"hello");
/// let (header, message) = GlobalRouteHeader::split(&received)?;
/// assert_eq!(header.source(), Some(std::net::Ipv4Addr::new(10, 0, 0, 7).into()));
/// assert_eq!(message, b"hello");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[doc(alias = "ibv_grh")]
pub struct GlobalRouteHeader([u8; Self::LEN]);

impl GlobalRouteHeader {
    /// The bytes of a header: add them to the buffer of each UD receive.
    pub const LEN: usize = size_of::<ffi::ibv_grh>();

    /// The header, from its bytes.
    pub const fn from_bytes(bytes: [u8; Self::LEN]) -> Self {
        Self(bytes)
    }

    /// The bytes of the header.
    pub const fn to_bytes(self) -> [u8; Self::LEN] {
        self.0
    }

    /// Splits the first [`byte_len`](crate::completion::WorkSuccess::byte_len) bytes of a UD receive's buffer into
    /// header and message.
    ///
    /// # Errors
    ///
    ///  - `EINVAL`: there are fewer than 40 bytes.
    pub fn split(received: &[u8]) -> Result<(Self, &[u8])> {
        let Some((header, message)) = received.split_first_chunk() else {
            let reason = "a received datagram begins with the 40 bytes of the global route header";
            return Err(Error::invalid("ibv_init_ah_from_wc", reason));
        };
        Ok((Self(*header), message))
    }

    /// The GID of the sender's port; on RoCE over IPv4 the mapped address.
    pub fn source(&self) -> Option<Gid> {
        self.gid(12, 8)
    }

    /// The GID that the datagram was sent to: that of our port, or of a multicast group.
    pub fn destination(&self) -> Option<Gid> {
        self.gid(16, 24)
    }

    /// The traffic class; its upper six bits are the DSCP on RoCE v2.
    pub fn traffic_class(&self) -> Option<u8> {
        match self.version()? {
            Version::Ipv4 => Some(self.ipv4()[1]),
            Version::Ipv6 => Some(self.0[0] << 4 | self.0[1] >> 4),
        }
    }

    /// The flow label; `None` over IPv4 too.
    pub fn flow_label(&self) -> Option<FlowLabel> {
        match self.version()? {
            Version::Ipv4 => None,
            Version::Ipv6 => {
                let [_, first, second, third] = *self.0.first_chunk().expect("there are 40 bytes");
                FlowLabel::new(u32::from_be_bytes([0, first & 0xf, second, third])).ok()
            }
        }
    }

    /// How many routers the packet could still pass.
    pub fn hop_limit(&self) -> Option<u8> {
        match self.version()? {
            Version::Ipv4 => Some(self.ipv4()[8]),
            Version::Ipv6 => Some(self.0[7]),
        }
    }

    /// A UDP header follows it, unlike on InfiniBand or RoCE v1.
    pub(super) fn is_roce_v2(&self) -> bool {
        const NEXT_HEADER: usize = 6;
        matches!(self.version(), Some(Version::Ipv4))
            || i32::from(self.0[NEXT_HEADER]) == libc::IPPROTO_UDP
    }

    fn ipv4(&self) -> &[u8; 20] {
        self.0.last_chunk().expect("there are 40 bytes")
    }

    /// `ipv4` is the offset in the IPv4 header, `ipv6` in the 40 bytes.
    fn gid(&self, ipv4: usize, ipv6: usize) -> Option<Gid> {
        Some(match self.version()? {
            Version::Ipv4 => {
                let address: [u8; 4] = *self.ipv4()[ipv4..].first_chunk()?;
                Ipv4Addr::from(address).into()
            }
            Version::Ipv6 => Gid::from_bytes(*self.0[ipv6..].first_chunk()?),
        })
    }

    /// As libibverbs' `get_grh_header_version`: a version 6 may be undefined bytes in front of an IPv4 header, if that
    /// has the right length and checksum.
    fn version(&self) -> Option<Version> {
        let ipv4 = self.ipv4();
        if self.0[0] >> 4 != 6 {
            return (ipv4[0] >> 4 == 4).then_some(Version::Ipv4);
        }
        if ipv4[0] & 0xf == 5 && checksum(ipv4) == 0xffff {
            return Some(Version::Ipv4);
        }
        Some(Version::Ipv6)
    }
}

/// InfiniBand's layout is that of IPv6.
enum Version {
    Ipv4,
    Ipv6,
}

/// All ones if the checksum is right.
fn checksum(header: &[u8; 20]) -> u16 {
    let words = header.as_chunks::<2>().0.iter();
    let sum: u32 = words.map(|&word| u32::from(u16::from_be_bytes(word))).sum();
    // Ten words carry at most once more.
    let sum = (sum & 0xffff) + (sum >> 16);
    (sum + (sum >> 16)) as u16
}

debug! {
    GlobalRouteHeader, self,
    source: self.source(), destination: self.destination(),
    traffic_class: self.traffic_class(), hop_limit: self.hop_limit(), ..
}

#[cfg(test)]
mod tests {
    use std::net::Ipv6Addr;

    use super::*;

    const IPV4: [u8; 20] =
        [0x45, 0x60, 0, 60, 0x1c, 0x46, 0x40, 0, 63, 17, 0, 0, 192, 168, 0, 104, 192, 168, 0, 1];

    fn with_ipv4(first: u8, right: bool) -> GlobalRouteHeader {
        let mut bytes = [first; 40];
        let mut header = IPV4;
        let sum = !checksum(&header);
        header[10..12].copy_from_slice(&sum.to_be_bytes());
        header[11] ^= u8::from(!right);
        bytes[20..].copy_from_slice(&header);
        GlobalRouteHeader::from_bytes(bytes)
    }

    #[test]
    fn an_ipv4_header_is_found_behind_any_bytes() {
        for (first, right) in [(0, true), (0x45, true), (0xff, false), (0x60, true)] {
            let header = with_ipv4(first, right);
            assert_eq!(header.source(), Some(Ipv4Addr::new(192, 168, 0, 104).into()), "{first:x}");
            assert_eq!(header.destination(), Some(Ipv4Addr::new(192, 168, 0, 1).into()));
            assert_eq!((header.traffic_class(), header.hop_limit()), (Some(0x60), Some(63)));
            assert_eq!(header.flow_label(), None);
        }
        let other = with_ipv4(0x60, false);
        assert_eq!(other.source(), Some(Gid::from_bytes(*other.0[8..].first_chunk().unwrap())));
    }

    #[test]
    fn an_ipv6_header_has_its_fields() {
        let (from, to): (Ipv6Addr, Ipv6Addr) =
            ("fe80::1".parse().unwrap(), "ff0e::2".parse().unwrap());
        let mut bytes = [0; 40];
        bytes[..8].copy_from_slice(&[0x6a, 0xb1, 0x23, 0x45, 0, 9, 27, 64]);
        bytes[8..24].copy_from_slice(&from.octets());
        bytes[24..].copy_from_slice(&to.octets());
        let header = GlobalRouteHeader::from_bytes(bytes);
        assert_eq!((header.source(), header.destination()), (Some(from.into()), Some(to.into())));
        assert_eq!((header.traffic_class(), header.hop_limit()), (Some(0xab), Some(64)));
        assert_eq!(header.flow_label().map(FlowLabel::value), Some(0x1_2345));
        assert_eq!(header.to_bytes(), bytes);
    }

    #[test]
    fn other_bytes_are_no_header() {
        let header = GlobalRouteHeader::from_bytes([0; 40]);
        assert_eq!((header.source(), header.destination()), (None, None));
        assert_eq!(
            (header.traffic_class(), header.flow_label(), header.hop_limit()),
            (None, None, None)
        );
        for length in [0, 1, 39] {
            let error = GlobalRouteHeader::split(&[0; 40][..length]).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
            assert!(error.to_string().contains("40 bytes"), "{error}");
        }
        assert!(GlobalRouteHeader::split(&[0; 40]).unwrap().1.is_empty());
    }
}
