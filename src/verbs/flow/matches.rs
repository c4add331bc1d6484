use std::net::{Ipv4Addr, Ipv6Addr};

use crate::base::{debug, ffi};

/// A header that a [`Rule`](crate::flow::Rule) matches. The trait is sealed.
pub trait HeaderMatch: private::Header {}

pub(crate) mod private {
    use crate::base::ffi;

    /// C's form of a header.
    pub trait Header {
        /// `inner`: for a tunnel's inner headers.
        fn append(&self, to: &mut Vec<u8>, inner: bool);

        /// The bytes are those of the value alone.
        fn value(&self) -> (ffi::ibv_flow_spec_type, Vec<u8>);
    }
}

/// # Safety
///
/// `T` has no padding.
unsafe fn bytes_of<T: Copy>(value: &T) -> &[u8] {
    // SAFETY: the caller vouches that all bytes are initialised; the result borrows the value.
    unsafe { std::slice::from_raw_parts(std::ptr::from_ref(value).cast(), size_of::<T>()) }
}

/// C's filter as value and mask; each field gets two methods.
macro_rules! header {
    (
        $(#[$meta:meta])*
        pub struct $name:ident: $spec:ident / $filter:ident;
        $($(#[$field_meta:meta])* $method:ident, $masked:ident: $type:ty => $field:ident, |$value:ident| $convert:expr;)+
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy)]
        #[must_use = "it is for a rule"]
        pub struct $name {
            spec: ffi::$spec,
        }

        impl $name {
            $(
                $(#[$field_meta])*
                pub fn $method(mut self, $value: $type) -> Self {
                    self.spec.val.$field = $convert;
                    // SAFETY: the field is a number or an array of bytes: any bits are valid.
                    self.spec.mask.$field = unsafe { all_ones() };
                    self
                }

                /// Matches the bits in `mask` only.
                pub fn $masked(self, value: $type, mask: $type) -> Self {
                    let mut this = self.$method(value);
                    let $value = mask;
                    this.spec.mask.$field = $convert;
                    this
                }
            )+

            fn build(kind: ffi::ibv_flow_spec_type) -> Self {
                // SAFETY: zeros are valid for all fields: numbers and arrays of bytes.
                let mut spec: ffi::$spec = unsafe { std::mem::zeroed() };
                spec.type_ = kind;
                spec.size = size_of::<ffi::$spec>() as u16;
                Self { spec }
            }
        }

        impl private::Header for $name {
            fn append(&self, to: &mut Vec<u8>, inner: bool) {
                let mut spec = self.spec;
                if inner {
                    spec.type_.0 |= ffi::ibv_flow_spec_type::IBV_FLOW_SPEC_INNER.0;
                }
                // Padding has no value.
                let start = to.len();
                to.resize(start + size_of::<ffi::$spec>(), 0);
                let mut put = |at: usize, bytes: &[u8]| {
                    to[start + at..start + at + bytes.len()].copy_from_slice(bytes);
                };
                put(std::mem::offset_of!(ffi::$spec, type_), &spec.type_.0.to_ne_bytes());
                put(std::mem::offset_of!(ffi::$spec, size), &spec.size.to_ne_bytes());
                $(
                    // SAFETY: numbers and arrays of bytes have no padding.
                    unsafe {
                        let at = std::mem::offset_of!(ffi::$filter, $field);
                        put(std::mem::offset_of!(ffi::$spec, val) + at, bytes_of(&spec.val.$field));
                        put(std::mem::offset_of!(ffi::$spec, mask) + at, bytes_of(&spec.mask.$field));
                    }
                )+
            }

            fn value(&self) -> (ffi::ibv_flow_spec_type, Vec<u8>) {
                let mut spec = Vec::new();
                self.append(&mut spec, false);
                let start = std::mem::offset_of!(ffi::$spec, val);
                let end = start + size_of::<ffi::$filter>();
                (self.spec.type_, spec[start..end].to_vec())
            }
        }

        impl HeaderMatch for $name {}

        debug! { $name, self, value: self.spec.val, mask: self.spec.mask }
    };
}

macro_rules! one_type {
    ($($name:ident: $kind:ident;)+) => {
        $(
            impl $name {
                /// Matches every packet with this header; the methods narrow it.
                pub fn new() -> Self {
                    Self::build(ffi::ibv_flow_spec_type::$kind)
                }
            }

            impl Default for $name {
                fn default() -> Self {
                    Self::new()
                }
            }
        )+
    };
}

/// # Safety
///
/// Any bits are a valid `T`.
unsafe fn all_ones<T: Copy>() -> T {
    let mut value = std::mem::MaybeUninit::<T>::uninit();
    // SAFETY: the memory is writable, and the caller vouches for the value.
    unsafe {
        value.as_mut_ptr().write_bytes(0xff, 1);
        value.assume_init()
    }
}

fn ipv4(address: Ipv4Addr) -> u32 {
    u32::from_ne_bytes(address.octets())
}

header! {
    /// `struct ibv_flow_spec_eth`: the Ethernet header.
    pub struct EthernetMatch: ibv_flow_spec_eth / ibv_flow_eth_filter;
    /// The destination MAC address.
    destination, destination_masked: [u8; 6] => dst_mac, |value| value;
    /// The source MAC address.
    source, source_masked: [u8; 6] => src_mac, |value| value;
    /// The EtherType, such as 0x0800 for IPv4.
    ether_type, ether_type_masked: u16 => ether_type, |value| value.to_be();
    /// The VLAN tag: 3 bits of priority, 1 bit, 12 bits of VLAN number.
    vlan_tag, vlan_tag_masked: u16 => vlan_tag, |value| value.to_be();
}

header! {
    /// `struct ibv_flow_spec_ipv4_ext`: the IPv4 header.
    pub struct Ipv4Match: ibv_flow_spec_ipv4_ext / ibv_flow_ipv4_ext_filter;
    /// The source address.
    source, source_masked: Ipv4Addr => src_ip, |value| ipv4(value);
    /// The destination address.
    destination, destination_masked: Ipv4Addr => dst_ip, |value| ipv4(value);
    /// The protocol, such as 17 for UDP.
    protocol, protocol_masked: u8 => proto, |value| value;
    /// The type of service.
    type_of_service, type_of_service_masked: u8 => tos, |value| value;
    /// The time to live.
    time_to_live, time_to_live_masked: u8 => ttl, |value| value;
    /// The flags: bit 0 more fragments, bit 1 don't fragment.
    flags, flags_masked: u8 => flags, |value| value;
}

header! {
    /// `struct ibv_flow_spec_ipv6`: the IPv6 header.
    pub struct Ipv6Match: ibv_flow_spec_ipv6 / ibv_flow_ipv6_filter;
    /// The source address.
    source, source_masked: Ipv6Addr => src_ip, |value| value.octets();
    /// The destination address.
    destination, destination_masked: Ipv6Addr => dst_ip, |value| value.octets();
    /// The flow label: 20 bits.
    flow_label, flow_label_masked: u32 => flow_label, |value| value.to_be();
    /// The next header, such as 17 for UDP.
    next_header, next_header_masked: u8 => next_hdr, |value| value;
    /// The traffic class.
    traffic_class, traffic_class_masked: u8 => traffic_class, |value| value;
    /// The hop limit.
    hop_limit, hop_limit_masked: u8 => hop_limit, |value| value;
}

header! {
    /// `struct ibv_flow_spec_tcp_udp`: the ports of TCP or UDP.
    pub struct PortMatch: ibv_flow_spec_tcp_udp / ibv_flow_tcp_udp_filter;
    /// The destination port.
    destination, destination_masked: u16 => dst_port, |value| value.to_be();
    /// The source port.
    source, source_masked: u16 => src_port, |value| value.to_be();
}

impl PortMatch {
    /// Matches every TCP segment; the methods narrow it.
    pub fn tcp() -> Self {
        Self::build(ffi::ibv_flow_spec_type::IBV_FLOW_SPEC_TCP)
    }

    /// Matches every UDP datagram; the methods narrow it.
    pub fn udp() -> Self {
        Self::build(ffi::ibv_flow_spec_type::IBV_FLOW_SPEC_UDP)
    }
}

header! {
    /// `struct ibv_flow_spec_esp`: the header of an encrypted IPsec payload.
    pub struct EspMatch: ibv_flow_spec_esp / ibv_flow_esp_filter;
    /// The security parameters index.
    security_parameters_index, security_parameters_index_masked: u32 => spi, |value| value.to_be();
    /// The sequence number.
    sequence_number, sequence_number_masked: u32 => seq, |value| value.to_be();
}

header! {
    /// `struct ibv_flow_spec_gre`: the header of a GRE tunnel.
    pub struct GreMatch: ibv_flow_spec_gre / ibv_flow_gre_filter;
    /// The first 16 bits: which fields are present, and the version.
    flags_and_version, flags_and_version_masked: u16 => c_ks_res0_ver, |value| value.to_be();
    /// The EtherType of the inner packet.
    protocol, protocol_masked: u16 => protocol, |value| value.to_be();
    /// The key.
    key, key_masked: u32 => key, |value| value.to_be();
}

header! {
    /// `struct ibv_flow_spec_mpls`: an MPLS label, at its place among the headers.
    pub struct MplsMatch: ibv_flow_spec_mpls / ibv_flow_mpls_filter;
    /// The entry: 20 bits of label, 3 of traffic class, 1 for the bottom of the stack, 8 of time to live.
    entry, entry_masked: u32 => label, |value| value.to_be();
}

header! {
    /// `struct ibv_flow_spec_tunnel`: the header of a VXLAN tunnel.
    pub struct VxlanMatch: ibv_flow_spec_tunnel / ibv_flow_tunnel_filter;
    /// The VXLAN network identifier: 24 bits.
    network_identifier, network_identifier_masked: u32 => tunnel_id, |value| value.to_be();
}

one_type! {
    EthernetMatch: IBV_FLOW_SPEC_ETH;
    Ipv4Match: IBV_FLOW_SPEC_IPV4_EXT;
    Ipv6Match: IBV_FLOW_SPEC_IPV6;
    EspMatch: IBV_FLOW_SPEC_ESP;
    GreMatch: IBV_FLOW_SPEC_GRE;
    MplsMatch: IBV_FLOW_SPEC_MPLS;
    VxlanMatch: IBV_FLOW_SPEC_VXLAN_TUNNEL;
}
