//! A host that sends what it likes to a device's connection manager, from an address of its own.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};

use crc32fast::Hasher;

pub(crate) const REQ: u16 = 0x10;
pub(crate) const MRA: u16 = 0x11;
pub(crate) const REJ: u16 = 0x12;
pub(crate) const REP: u16 = 0x13;
pub(crate) const RTU: u16 = 0x14;
pub(crate) const DREQ: u16 = 0x15;
pub(crate) const DREP: u16 = 0x16;

const PORT: u16 = 4791;
/// The length of the headers before a datagram: BTH and DETH.
const HEADERS: usize = 20;

pub(crate) struct Stranger {
    socket: UdpSocket,
    own: Ipv4Addr,
    /// The address of the device to which the stranger talks.
    device: Ipv4Addr,
}

/// A message that it has got.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) attribute: u16,
    /// The device's number of the connection, and the stranger's.
    pub(crate) numbers: [u32; 2],
    /// The reason of a REJ.
    pub(crate) reason: u16,
}

/// A message with these fields: where each begins behind the common header, and its bytes.
pub(crate) fn message(attribute: u16, fields: &[(usize, &[u8])]) -> [u8; 256] {
    let mut mad = [0; 256];
    mad[..4].copy_from_slice(&[1, 7, 2, 3]);
    mad[16..18].copy_from_slice(&attribute.to_be_bytes());
    for (at, bytes) in fields {
        mad[24 + at..24 + at + bytes.len()].copy_from_slice(bytes);
    }
    mad
}

impl Stranger {
    /// Makes a stranger at an address of 127.0.0.0/8 that is free.
    pub(crate) fn new(device: IpAddr) -> Self {
        let IpAddr::V4(device) = device else { panic!("{device} is not of IPv4") };
        let mut addresses = (1..=250).map(|last| Ipv4Addr::new(127, 250, 250, last));
        let bind = |own: Ipv4Addr| Some((UdpSocket::bind((own, PORT)).ok()?, own));
        let (socket, own) = addresses.find_map(bind).expect("a free address");
        Self { socket, own, device }
    }

    /// A REQ to a port of TCP's space.
    pub(crate) fn request(&self, port: u16, local: u32, qpn: u32) -> [u8; 256] {
        let service = 0x0106_0000 | u64::from(port);
        let mut header = [0; 36];
        header[1] = 0x40;
        header[16..20].copy_from_slice(&self.own.octets());
        header[32..].copy_from_slice(&self.device.octets());
        message(
            REQ,
            &[
                (0, &local.to_be_bytes()),
                (8, &service.to_be_bytes()),
                (16, &[7; 8]),
                (32, &qpn.to_be_bytes()[1..]),
                (47, &[20 << 3 | 7]),
                (50, &[3 << 4]),
                (51, &[15 << 4]),
                (140, &header),
            ],
        )
    }

    pub(crate) fn send(&self, mad: &[u8; 256]) {
        // UD SEND_ONLY to queue pair 1, from queue pair 1, with its Q_Key.
        let mut packet =
            vec![0x64, 0x40, 0xff, 0xff, 0, 0, 0, 1, 0, 0, 0, 0, 0x80, 1, 0, 0, 0, 0, 0, 1];
        packet.extend_from_slice(mad);
        let udp = (8 + packet.len() as u16 + 4).to_be_bytes();
        let ip = (20 + 8 + packet.len() as u16 + 4).to_be_bytes();
        let port = PORT.to_be_bytes();
        let mut hasher = Hasher::new();
        // Fields that routers change count as ones.
        hasher.update(&[0xff; 8]);
        hasher.update(&[0x45, 0xff, ip[0], ip[1], 0, 0, 0x40, 0, 0xff, 17, 0xff, 0xff]);
        hasher.update(&self.own.octets());
        hasher.update(&self.device.octets());
        hasher.update(&[port[0], port[1], port[0], port[1], udp[0], udp[1], 0xff, 0xff]);
        hasher.update(&packet[..4]);
        hasher.update(&[0xff]);
        hasher.update(&packet[5..]);
        packet.extend_from_slice(&hasher.finalize().to_le_bytes());
        self.socket.send_to(&packet, (self.device, PORT)).unwrap();
    }

    pub(crate) fn receive(&self) -> Answer {
        let mut packet = [0; 512];
        let length = self.socket.recv(&mut packet).unwrap();
        assert_eq!(
            length,
            HEADERS + 256 + 4,
            "a datagram is of the length of the one that it answers"
        );
        let mad = &packet[HEADERS..];
        let n16 = |at: usize| u16::from_be_bytes(mad[at..at + 2].try_into().unwrap());
        let n32 = |at: usize| u32::from_be_bytes(mad[at..at + 4].try_into().unwrap());
        Answer { attribute: n16(16), numbers: [n32(24), n32(28)], reason: n16(34) }
    }

    /// Returns the answers to all that was sent before. It sends a request to a port where nobody listens, whose refusal is the last.
    pub(crate) fn answers(&self) -> Vec<Answer> {
        const LAST: u32 = 0xffff_fff0;
        self.send(&self.request(1, LAST, 0xff_fff0));
        let all = std::iter::from_fn(|| Some(self.receive()));
        all.take_while(|answer| answer.numbers[1] != LAST).collect()
    }
}
