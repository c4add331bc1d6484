use std::ffi::CStr;
use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::str::FromStr;

use crate::base::{Error, Result, c_enum, ffi, hooks::hooks};

/// `union ibv_gid`: the 128-bit address of a port, in the form of an IPv6 address.
///
/// On InfiniBand it is the subnet prefix and the port's GUID. On RoCE it is an address of the network
/// interface, with IPv4 mapped (`::ffff:10.0.0.1`). `Display` and `FromStr` use the IPv6 text form.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
#[repr(transparent)]
pub struct Gid([u8; 16]);

impl Gid {
    /// The GID that names no port.
    pub const ZERO: Self = Self([0; 16]);

    /// Makes it from bytes in network order.
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The bytes in network order.
    pub const fn to_bytes(self) -> [u8; 16] {
        self.0
    }

    /// The upper 64 bits.
    pub const fn subnet_prefix(self) -> u64 {
        (u128::from_be_bytes(self.0) >> 64) as u64
    }

    /// The lower 64 bits.
    pub const fn interface_id(self) -> u64 {
        u128::from_be_bytes(self.0) as u64
    }

    /// Whether it is zero: an empty entry of a GID table.
    pub const fn is_zero(self) -> bool {
        u128::from_be_bytes(self.0) == 0
    }

    pub(crate) const fn to_ipv6(self) -> Ipv6Addr {
        Ipv6Addr::from_bits(u128::from_be_bytes(self.0))
    }

    /// The IPv4 address, if mapped.
    pub const fn to_ipv4(self) -> Option<Ipv4Addr> {
        self.to_ipv6().to_ipv4_mapped()
    }

    /// Whether it is link-local (`fe80::/10`): not routed on RoCE, the default subnet prefix on InfiniBand.
    pub const fn is_link_local(self) -> bool {
        self.to_ipv6().is_unicast_link_local()
    }

    /// Whether it is a multicast group (`ff00::/8`, or a mapped IPv4 multicast address).
    pub const fn is_multicast(self) -> bool {
        self.0[0] == 0xff || matches!(self.to_ipv4(), Some(address) if address.is_multicast())
    }
}

impl From<ffi::ibv_gid> for Gid {
    fn from(gid: ffi::ibv_gid) -> Self {
        // SAFETY: both arms are 16 plain bytes, and any bit pattern is a GID.
        Self(unsafe { gid.raw })
    }
}

impl From<Gid> for ffi::ibv_gid {
    fn from(gid: Gid) -> Self {
        Self { raw: gid.0 }
    }
}

impl From<Ipv6Addr> for Gid {
    fn from(address: Ipv6Addr) -> Self {
        Self(address.octets())
    }
}

impl From<Ipv4Addr> for Gid {
    /// The IPv4-mapped form.
    fn from(address: Ipv4Addr) -> Self {
        Self(address.to_ipv6_mapped().octets())
    }
}

impl From<Gid> for Ipv6Addr {
    fn from(gid: Gid) -> Self {
        gid.to_ipv6()
    }
}

impl FromStr for Gid {
    type Err = std::net::AddrParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse::<Ipv6Addr>().map(Self::from)
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(*self).fmt(f)
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gid({self})")
    }
}

c_enum! {
    /// `enum ibv_gid_type`: the protocol of a GID.
    pub enum GidType: ibv_gid_type(u32) {
        /// InfiniBand.
        InfiniBand = IBV_GID_TYPE_IB,
        /// RoCE v1: Ethernet frames, not routable.
        RoceV1 = IBV_GID_TYPE_ROCE_V1,
        /// RoCE v2: UDP over IP.
        RoceV2 = IBV_GID_TYPE_ROCE_V2,
    }
}

/// `struct ibv_gid_entry`: an entry of a port's GID table.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct GidEntry {
    /// The GID.
    pub gid: Gid,
    /// Its index in the port's table.
    pub index: u32,
    /// The port.
    pub port: u8,
    /// The protocol.
    pub gid_type: GidType,
    /// On RoCE, the index of its network interface (as `if_nametoindex`).
    pub interface_index: Option<u32>,
}

impl From<ffi::ibv_gid_entry> for GidEntry {
    fn from(raw: ffi::ibv_gid_entry) -> Self {
        Self {
            gid: raw.gid.into(),
            index: raw.gid_index,
            port: raw.port_num as u8,
            gid_type: ffi::ibv_gid_type(raw.gid_type).into(),
            interface_index: (raw.ndev_ifindex != 0).then_some(raw.ndev_ifindex),
        }
    }
}

impl GidEntry {
    /// `if_indextoname`: the GID's network interface, such as `eth0`; `None` on InfiniBand, or if it no
    /// longer exists.
    #[doc(alias = "if_indextoname")]
    pub fn interface_name(&self) -> Option<String> {
        let index = self.interface_index?;
        let mut name = [0; libc::IF_NAMESIZE];
        // SAFETY: the array has room for any interface's name.
        let found = unsafe { libc::if_indextoname(index, name.as_mut_ptr()) };
        if found.is_null() {
            return None;
        }
        // SAFETY: the call has written a null-terminated name.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) };
        Some(name.to_string_lossy().into_owned())
    }

    /// For a peer in another network: smaller is better.
    pub(crate) fn preference(&self) -> u32 {
        match (self.gid_type, self.gid.to_ipv4().is_some(), self.gid.is_link_local()) {
            (GidType::RoceV2, true, _) => 0,
            (GidType::RoceV2, false, false) => 1,
            (GidType::RoceV2, false, true) => 2,
            (GidType::RoceV1, _, false) => 3,
            (GidType::RoceV1, _, true) => 4,
            (GidType::InfiniBand, ..) => 5,
            (GidType::Unknown(_), ..) => 6,
        }
    }

    pub(super) fn short_index(&self) -> Result<u8> {
        u8::try_from(self.index).map_err(|_| {
            let (what, value) = ("the index of the routable GID", self.index.into());
            Error::out_of_range("ibv_modify_qp", what, value, 0, u8::MAX.into())
        })
    }
}

/// A vendor's 64-bit EUI-64 identifier of a device. `Display` and `FromStr` use the form
/// `0002:c903:0012:3456`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(transparent))]
#[repr(transparent)]
pub struct Guid([u8; 8]);

impl Guid {
    /// Makes it from bytes in network order.
    pub const fn from_bytes(bytes: [u8; 8]) -> Self {
        Self(bytes)
    }

    /// The bytes in network order.
    pub const fn to_bytes(self) -> [u8; 8] {
        self.0
    }

    /// libibverbs does not know the GUIDs of this process's provider.
    ///
    /// # Safety
    ///
    /// The device is live.
    pub(super) unsafe fn of(device: *mut ffi::ibv_device) -> Self {
        // SAFETY: the caller vouches for the device.
        let answer = hooks().and_then(|hooks| unsafe { (hooks.guid)(device) });
        // SAFETY: as above.
        let asked = || Self::from_be(unsafe { ffi::ibv_get_device_guid(device) });
        answer.map_or_else(asked, |guid| Self(guid.to_be_bytes()))
    }

    pub(super) const fn from_be(raw: u64) -> Self {
        Self(raw.to_ne_bytes())
    }

    /// Whether it is 0: the device has none.
    pub const fn is_zero(self) -> bool {
        u64::from_be_bytes(self.0) == 0
    }

    /// The vendor's 24-bit OUI.
    pub const fn oui(self) -> u32 {
        u32::from_be_bytes([0, self.0[0], self.0[1], self.0[2]])
    }
}

impl fmt::Display for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g, h, i] = self.0;
        write!(f, "{a:02x}{b:02x}:{c:02x}{d:02x}:{e:02x}{g:02x}:{h:02x}{i:02x}")
    }
}

impl fmt::Debug for Guid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Guid({self})")
    }
}

impl FromStr for Guid {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong =
            Error::invalid("ibv_get_device_guid", "a GUID has the form 0002:c903:0012:3456");
        let mut bytes = [0; 8];
        let mut groups = text.split(':');
        for pair in bytes.chunks_exact_mut(2) {
            let group = groups.next().filter(|g| g.len() == 4).ok_or(wrong)?;
            if !group.bytes().all(|c| c.is_ascii_hexdigit()) {
                return Err(wrong);
            }
            let value = u16::from_str_radix(group, 16).map_err(|_| wrong)?;
            pair.copy_from_slice(&value.to_be_bytes());
        }
        if groups.next().is_some() { Err(wrong) } else { Ok(Self(bytes)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(gid: &str, gid_type: GidType) -> GidEntry {
        GidEntry { gid: gid.parse().unwrap(), index: 0, port: 1, gid_type, interface_index: None }
    }

    #[test]
    fn an_interface_is_named_by_its_index() {
        // SAFETY: the name is null-terminated.
        let loopback = unsafe { libc::if_nametoindex(c"lo".as_ptr()) };
        let entry = |ndev_ifindex| {
            GidEntry::from(ffi::ibv_gid_entry { ndev_ifindex, ..Default::default() })
        };
        assert_eq!(entry(loopback).interface_name().as_deref(), Some("lo"));
        assert_eq!(entry(0).interface_name(), None);
        assert_eq!(entry(u32::MAX).interface_name(), None);
    }

    #[test]
    fn a_gid_is_an_ipv6_address() {
        let gid: Gid = "::ffff:10.77.0.1".parse().unwrap();
        assert_eq!(gid.to_ipv4(), Some(Ipv4Addr::new(10, 77, 0, 1)));
        assert_eq!(gid, Gid::from(Ipv4Addr::new(10, 77, 0, 1)));
        assert_eq!(gid.to_string(), "::ffff:10.77.0.1");
        let gid: Gid = "fe80::1:2".parse().unwrap();
        assert_eq!((gid.subnet_prefix(), gid.interface_id()), (0xfe80 << 48, 0x1_0002));
        assert!(gid.is_link_local() && !gid.is_multicast() && !gid.is_zero());
        assert!("ff0e::1".parse::<Gid>().unwrap().is_multicast());
        assert!("::ffff:224.1.2.3".parse::<Gid>().unwrap().is_multicast());
        assert!("10.77.0.1".parse::<Gid>().is_err());
    }

    #[test]
    fn a_gid_survives_the_union() {
        let gid: Gid = "2001:db8::17".parse().unwrap();
        assert_eq!(Gid::from(ffi::ibv_gid::from(gid)), gid);
        let raw = ffi::ibv_gid::from(gid);
        // SAFETY: any 16 bytes are valid in both arms.
        assert_eq!(u64::from_be(unsafe { raw.global.subnet_prefix }), gid.subnet_prefix());
    }

    #[test]
    fn the_best_gid_is_routable() {
        let mut table = [
            entry("fe80::1", GidType::RoceV1),
            entry("fe80::1", GidType::RoceV2),
            entry("2001:db8::1", GidType::RoceV1),
            entry("2001:db8::1", GidType::RoceV2),
            entry("::ffff:10.0.0.1", GidType::RoceV2),
        ];
        table.sort_by_key(GidEntry::preference);
        assert_eq!(table[0].gid.to_ipv4(), Some(Ipv4Addr::new(10, 0, 0, 1)));
        assert_eq!(table[1], entry("2001:db8::1", GidType::RoceV2));
        assert_eq!(table[4], entry("fe80::1", GidType::RoceV1));
    }

    #[test]
    fn unknown_gid_types_are_kept() {
        assert_eq!(GidType::from(ffi::ibv_gid_type(77)), GidType::Unknown(77));
        assert_eq!(ffi::ibv_gid_type::from(GidType::Unknown(77)).0, 77);
    }

    #[test]
    fn a_guid_reads_what_it_writes() {
        let guid = Guid::from_bytes([0x00, 0x02, 0xc9, 0x03, 0x00, 0x12, 0x34, 0x56]);
        assert_eq!(guid.to_string(), "0002:c903:0012:3456");
        assert_eq!(guid.to_string().parse(), Ok(guid));
        assert_eq!(guid.oui(), 0x02c9);
        for bad in ["", "0002:c903:0012", "0002:c903:0012:3456:0000", "+002:c903:0012:3456"] {
            assert!(bad.parse::<Guid>().is_err(), "{bad}");
        }
    }
}
