//! Management datagrams: the messages of the InfiniBand connection manager (volume 1, chapter 12), and the header of the RDMA
//! IP CM service in their private data (annex A11).

use std::net::IpAddr;

/// The queue pair that management datagrams are for.
pub(crate) const MANAGEMENT: u32 = 1;

/// The Q_Key of that queue pair.
pub(crate) const MANAGEMENT_QKEY: u32 = 0x8001_0000;

/// A datagram.
pub(crate) type Mad = [u8; 256];

/// The identity of an exchange's datagrams, and the options of an enhanced connection establishment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) transaction: u64,
    pub(crate) modifier: u32,
}

impl From<u64> for Header {
    fn from(transaction: u64) -> Self {
        Self { transaction, modifier: 0 }
    }
}

/// The length of the common header, before the message.
const HEADER: usize = 24;

/// Version 1, the class of communication management and its version, the method `Send`.
const CLASS: [u8; 4] = [1, 7, 2, 3];

/// The big-endian number of `width` bits that begins at a bit of a message.
fn get(message: &[u8], at: usize, width: usize) -> u64 {
    let last = (at + width - 1) / 8;
    let bytes = message.get(at / 8..=last).unwrap_or_default();
    // A field that crosses bytes has at most 64 bits, and begins or ends at the border of a byte.
    let all = bytes.iter().fold(0_u64, |all, byte| all << 8 | u64::from(*byte));
    (all >> (8 * (last + 1) - at - width)) & (u64::MAX >> (64 - width))
}

/// Writes it where zeros are.
fn put(message: &mut [u8], at: usize, width: usize, value: u64) {
    let last = (at + width - 1) / 8;
    let value = (value & (u64::MAX >> (64 - width))) << (8 * (last + 1) - at - width);
    let bytes = message.get_mut(at / 8..=last).unwrap_or_default();
    bytes.iter_mut().rev().zip(value.to_le_bytes()).for_each(|(to, from)| *to |= from);
}

/// A message with its fields, of which each is a number: the byte that it begins in, the bit of that byte, its width in bits.
/// Then the bytes that are no numbers: where each begins.
macro_rules! messages {
    ($($(#[$doc:meta])* $name:ident = $attribute:literal {
        $($(#[$field_doc:meta])* $field:ident: $type:ty = $byte:literal + $bit:literal, $width:literal;)*
        $(@ $data:ident: $size:literal = $start:literal;)*
    })*) => {
        $($(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub(crate) struct $name {
            $($(#[$field_doc])* pub(crate) $field: $type,)*
            $(pub(crate) $data: [u8; $size],)*
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: 0,)* $($data: [0; $size],)* }
            }
        }

        impl $name {
            fn read(message: &[u8]) -> Option<Self> {
                Some(Self {
                    $($field: get(message, $byte * 8 + $bit, $width) as $type,)*
                    $($data: *message.get($start..)?.first_chunk()?,)*
                })
            }

            fn write(&self, message: &mut [u8]) {
                $(put(message, $byte * 8 + $bit, $width, self.$field.into());)*
                $(message[$start..][..$size].copy_from_slice(&self.$data);)*
            }
        })*

        /// A message.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub(crate) enum Message {
            $($name($name),)*
        }

        $(impl From<$name> for Message {
            fn from(message: $name) -> Self {
                Self::$name(message)
            }
        })*

        impl Message {
            /// `None`: it is no message of the connection manager, or one that this one has no use for.
            pub(crate) fn parse(mad: &Mad) -> Option<(Header, Self)> {
                let (header, message) = mad.split_at(HEADER);
                if header[..4] != CLASS {
                    return None;
                }
                let message = match get(header, 16 * 8, 16) {
                    $($attribute => Self::$name($name::read(message)?),)*
                    _ => return None,
                };
                let modifier = get(header, 20 * 8, 32) as u32;
                Some((Header { transaction: get(header, 8 * 8, 64), modifier }, message))
            }

            pub(crate) fn mad(&self, of: Header) -> Box<Mad> {
                let mut mad: Box<Mad> = Box::new([0; 256]);
                let (header, message) = mad.split_at_mut(HEADER);
                header[..4].copy_from_slice(&CLASS);
                put(header, 8 * 8, 64, of.transaction);
                put(header, 20 * 8, 32, of.modifier.into());
                let attribute: u16 = match self {
                    $(Self::$name(all) => {
                        all.write(message);
                        $attribute
                    })*
                };
                put(header, 16 * 8, 16, attribute.into());
                mad
            }

            #[cfg(test)]
            pub(crate) fn name(&self) -> &'static str {
                match self {
                    $(Self::$name(_) => stringify!($name),)*
                }
            }
        }
    };
}

messages! {
    /// REQ: asks for a connection.
    Request = 0x10 {
        local: u32 = 0 + 0, 32;
        vendor: u32 = 5 + 0, 24;
        service: u64 = 8 + 0, 64;
        guid: u64 = 16 + 0, 64;
        qpn: u32 = 32 + 0, 24;
        resources: u8 = 35 + 0, 8;
        depth: u8 = 39 + 0, 8;
        remote_timeout: u8 = 43 + 0, 5;
        /// RC 0, UC 1, XRC 3.
        transport: u8 = 43 + 5, 2;
        flow_control: u8 = 43 + 7, 1;
        psn: u32 = 44 + 0, 24;
        local_timeout: u8 = 47 + 0, 5;
        retry: u8 = 47 + 5, 3;
        pkey: u16 = 48 + 0, 16;
        mtu: u8 = 50 + 0, 4;
        rnr_retry: u8 = 50 + 5, 3;
        manager_retries: u8 = 51 + 0, 4;
        srq: u8 = 51 + 4, 1;
        /// XRC 1.
        extended: u8 = 51 + 5, 3;
        local_lid: u16 = 52 + 0, 16;
        remote_lid: u16 = 54 + 0, 16;
        traffic_class: u8 = 92 + 0, 8;
        hop_limit: u8 = 93 + 0, 8;
        ack_timeout: u8 = 95 + 0, 5;
        @ from: 16 = 56;
        @ to: 16 = 72;
        @ data: 92 = 140;
    }
    /// MRA: the answer will take longer.
    Processing = 0x11 {
        local: u32 = 0 + 0, 32;
        remote: u32 = 4 + 0, 32;
        /// REQ 0, REP 1.
        which: u8 = 8 + 0, 2;
        timeout: u8 = 9 + 0, 5;
    }
    /// REJ: there will be no connection.
    Rejection = 0x12 {
        local: u32 = 0 + 0, 32;
        remote: u32 = 4 + 0, 32;
        /// REQ 0, REP 1, another 2.
        which: u8 = 8 + 0, 2;
        info_length: u8 = 9 + 0, 7;
        reason: u16 = 10 + 0, 16;
        @ info: 72 = 12;
        @ data: 148 = 84;
    }
    /// REP: accepts.
    Reply = 0x13 {
        local: u32 = 0 + 0, 32;
        remote: u32 = 4 + 0, 32;
        qpn: u32 = 12 + 0, 24;
        vendor_high: u8 = 15 + 0, 8;
        /// The number of an end-to-end context, or of a receiving XRC queue pair.
        xrc_qpn: u32 = 16 + 0, 24;
        vendor_middle: u8 = 19 + 0, 8;
        psn: u32 = 20 + 0, 24;
        vendor_low: u8 = 23 + 0, 8;
        resources: u8 = 24 + 0, 8;
        depth: u8 = 25 + 0, 8;
        flow_control: u8 = 26 + 7, 1;
        rnr_retry: u8 = 27 + 0, 3;
        srq: u8 = 27 + 3, 1;
        guid: u64 = 28 + 0, 64;
        @ data: 196 = 36;
    }
    /// RTU: the active side is ready.
    ReadyToUse = 0x14 {
        local: u32 = 0 + 0, 32;
        remote: u32 = 4 + 0, 32;
    }
    /// DREQ: ends a connection. `qpn` is the receiver's.
    Disconnect = 0x15 {
        local: u32 = 0 + 0, 32;
        remote: u32 = 4 + 0, 32;
        qpn: u32 = 8 + 0, 24;
    }
    /// DREP: the answer.
    Disconnected = 0x16 {
        local: u32 = 0 + 0, 32;
        remote: u32 = 4 + 0, 32;
    }
    /// SIDR_REQ: asks which queue pair takes a service's datagrams.
    ServiceRequest = 0x17 {
        request: u32 = 0 + 0, 32;
        pkey: u16 = 4 + 0, 16;
        service: u64 = 8 + 0, 64;
        @ data: 216 = 16;
    }
    /// SIDR_REP: the answer.
    ServiceReply = 0x18 {
        request: u32 = 0 + 0, 32;
        status: u8 = 4 + 0, 8;
        qpn: u32 = 8 + 0, 24;
        service: u64 = 12 + 0, 64;
        qkey: u32 = 20 + 0, 32;
        @ data: 136 = 96;
    }
}

/// The reasons of a REJ that are used here.
pub(crate) mod reason {
    pub(crate) const TIMEOUT: u16 = 4;
    pub(crate) const INVALID_SERVICE: u16 = 8;
    pub(crate) const STALE: u16 = 10;
    pub(crate) const CONSUMER: u16 = 28;
}

/// The states of a service in a SIDR_REP.
pub(crate) mod status {
    pub(crate) const VALID: u8 = 0;
    pub(crate) const UNSUPPORTED: u8 = 1;
    pub(crate) const REJECTED: u8 = 2;
}

/// The header of the RDMA IP CM service, which begins the private data of REQ and SIDR_REQ: whom the program talks to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct IpHeader {
    /// The port of the active side.
    pub(crate) port: u16,
    pub(crate) source: IpAddr,
    pub(crate) destination: IpAddr,
}

impl IpHeader {
    pub(crate) const SIZE: usize = 36;

    pub(crate) fn parse(data: &[u8]) -> Option<Self> {
        let header: &[u8; Self::SIZE] = data.first_chunk()?;
        let address = |at: usize| -> Option<IpAddr> {
            let all: [u8; 16] = *header[at..].first_chunk()?;
            match header[1] >> 4 {
                4 => Some(IpAddr::from(*all.last_chunk::<4>()?)),
                6 => Some(IpAddr::from(all)),
                _ => None,
            }
        };
        let port = u16::from_be_bytes([header[2], header[3]]);
        (header[0] == 0).then_some(())?;
        Some(Self { port, source: address(4)?, destination: address(20)? })
    }

    /// The source decides on the version; the destination is of the same.
    pub(crate) fn bytes(&self) -> [u8; Self::SIZE] {
        let mut header = [0; Self::SIZE];
        header[1] = if self.source.is_ipv4() { 0x40 } else { 0x60 };
        header[2..4].copy_from_slice(&self.port.to_be_bytes());
        for (at, address) in [(4, self.source), (20, self.destination)] {
            match address {
                IpAddr::V4(v4) => header[at + 12..at + 16].copy_from_slice(&v4.octets()),
                IpAddr::V6(v6) => header[at..at + 16].copy_from_slice(&v6.octets()),
            }
        }
        header
    }
}

/// The GID of an address.
pub(crate) fn gid(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// The address of a GID.
#[cfg(test)]
pub(crate) fn address(gid: [u8; 16]) -> IpAddr {
    std::net::Ipv6Addr::from(gid).to_canonical()
}

/// A datagram read from bytes is written so that it is read again as the same.
#[cfg(any(test, fuzzing))]
pub(crate) mod property {
    use super::*;

    pub(crate) fn messages(data: &[u8]) {
        for chunk in data.chunks(256) {
            let mut mad = [0; 256];
            mad[..chunk.len()].copy_from_slice(chunk);
            if let Some((header, message)) = Message::parse(&mad) {
                assert_eq!(Message::parse(&message.mad(header)), Some((header, message)));
            }
        }
        if let Some(header) = IpHeader::parse(data) {
            assert_eq!(IpHeader::parse(&header.bytes()), Some(header));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes as the kernel's own macros place them (`include/rdma/ibta_vol1_c12.h`).
    #[test]
    fn fields_are_where_the_specification_has_them() {
        let request = Request {
            local: 0x0102_0304,
            vendor: 0x0a_0b0c,
            service: 0x0106_1234,
            guid: 0x1122_3344_5566_7788,
            qpn: 0x9a_bcde,
            resources: 3,
            depth: 4,
            remote_timeout: 20,
            transport: 3,
            flow_control: 1,
            psn: 0x12_3456,
            local_timeout: 19,
            retry: 7,
            pkey: 0xffff,
            mtu: 3,
            rnr_retry: 5,
            manager_retries: 15,
            srq: 1,
            extended: 1,
            local_lid: 0xffff,
            remote_lid: 0xffff,
            traffic_class: 8,
            hop_limit: 64,
            ack_timeout: 17,
            from: [1; 16],
            to: [2; 16],
            data: [9; 92],
        };
        let header = Header { transaction: 0x8877_6655_4433_2211, modifier: 0x0506_0708 };
        let mad = Message::from(request.clone()).mad(header);
        assert_eq!(mad[..8], [1, 7, 2, 3, 0, 0, 0, 0]);
        assert_eq!(mad[8..18], [0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 0, 0x10]);
        assert_eq!(mad[18..24], [0, 0, 5, 6, 7, 8]);
        let m = &mad[24..];
        assert_eq!(m[..8], [1, 2, 3, 4, 0, 0x0a, 0x0b, 0x0c]);
        assert_eq!(m[8..16], [0, 0, 0, 0, 1, 6, 0x12, 0x34]);
        assert_eq!(m[32..40], [0x9a, 0xbc, 0xde, 3, 0, 0, 0, 4]);
        assert_eq!(m[43..48], [20 << 3 | 3 << 1 | 1, 0x12, 0x34, 0x56, 19 << 3 | 7]);
        assert_eq!(m[48..56], [0xff, 0xff, 3 << 4 | 5, 15 << 4 | 1 << 3 | 1, 255, 255, 255, 255]);
        assert_eq!((m[92], m[93], m[95], m[139], m[140], m[231]), (8, 64, 17 << 3, 0, 9, 9));
        assert_eq!(Message::parse(&mad), Some((header, request.into())));

        let reply = Reply { rnr_retry: 7, srq: 1, flow_control: 1, guid: 5, ..Reply::default() };
        let m = &Message::from(reply).mad(1.into())[24..];
        assert_eq!((m[26], m[27], m[35]), (1, 7 << 5 | 1 << 4, 5));
        let rejection = Rejection { which: 1, info_length: 8, reason: 28, ..Rejection::default() };
        let m = &Message::from(rejection).mad(1.into())[24..];
        assert_eq!(m[8..12], [0x40, 16, 0, 28]);
        let m = &Message::from(Processing { which: 1, timeout: 24, ..Default::default() })
            .mad(1.into())[24..];
        assert_eq!(m[8..10], [0x40, 24 << 3]);
    }

    #[test]
    fn what_is_no_message_of_the_connection_manager_is_none() {
        let good = Message::from(ReadyToUse { local: 1, remote: 2 }).mad(3.into());
        assert!(Message::parse(&good).is_some());
        for (at, value) in
            [(0, 2), (1, 3), (2, 1), (3, 0x81), (16, 1), (17, 0x0f), (17, 0x19), (17, 0x20)]
        {
            let mut bad = *good;
            bad[at] = value;
            assert_eq!(Message::parse(&bad), None, "byte {at}");
        }
    }

    #[test]
    fn the_ip_header_has_the_last_four_bytes_of_ipv4() {
        let header = IpHeader {
            port: 0x1234,
            source: "10.1.2.3".parse().unwrap(),
            destination: "10.4.5.6".parse().unwrap(),
        };
        let bytes = header.bytes();
        assert_eq!(bytes[..4], [0, 0x40, 0x12, 0x34]);
        assert_eq!((&bytes[16..20], &bytes[32..36]), (&[10, 1, 2, 3][..], &[10, 4, 5, 6][..]));
        assert_eq!(IpHeader::parse(&bytes), Some(header));
        let six = IpHeader {
            source: "fd00::1".parse().unwrap(),
            destination: "fd00::2".parse().unwrap(),
            port: 1,
        };
        assert_eq!(IpHeader::parse(&six.bytes()), Some(six));
        let mut other = bytes;
        other[1] = 0x50;
        assert_eq!(IpHeader::parse(&other), None);
        other = bytes;
        other[0] = 1;
        assert_eq!((IpHeader::parse(&other), IpHeader::parse(&bytes[..35])), (None, None));
    }

    #[test]
    fn gids_are_of_addresses() {
        for text in ["10.0.0.1", "fd00::1"] {
            let is: IpAddr = text.parse().unwrap();
            assert_eq!(address(gid(is)), is);
        }
        assert_eq!(gid("1.2.3.4".parse().unwrap())[10..], [255, 255, 1, 2, 3, 4]);
    }
}
