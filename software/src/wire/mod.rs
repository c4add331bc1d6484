//! The wire format of RoCE v2: the headers of the InfiniBand specification within UDP port 4791, and
//! the invariant CRC.

pub(crate) mod header;
pub(crate) mod icrc;
pub(crate) mod management;
pub(crate) mod opcode;
pub(crate) mod sequence;

/// The UDP port of RoCE v2.
pub(crate) const PORT: u16 = 4791;

/// The longest packet: 4096 bytes, the longest headers, padding and CRC.
pub(crate) const LONGEST: usize = 4096 + 128;

/// A packet from its base transport header to the invariant CRC, with its addresses.
#[derive(Debug, Default)]
pub(crate) struct Packet {
    pub(crate) addresses: Option<(std::net::IpAddr, std::net::IpAddr)>,
    pub(crate) bytes: Vec<u8>,
    /// Whether it has its invariant CRC. Only then may it leave the machine.
    pub(crate) is_sealed: bool,
    /// The identification of its IPv4 header, which the CRC covers.
    pub(crate) identification: u16,
}

impl Packet {
    /// Computes its invariant CRC, unless it has that.
    pub(crate) fn seal(&mut self) {
        let Some((from, to)) = self.addresses.filter(|_| !self.is_sealed) else { return };
        if let Some((inside, crc)) = self.bytes.split_last_chunk_mut::<{ icrc::SIZE }>() {
            *crc = icrc::compute((from, PORT), (to, PORT), inside).to_le_bytes();
        }
        self.is_sealed = true;
    }

    /// Changes the identification that its invariant CRC is for, which it has.
    pub(crate) fn identify(&mut self, identification: u16) {
        let changed = std::mem::replace(&mut self.identification, identification) ^ identification;
        if changed != 0
            && let Some((inside, crc)) = self.bytes.split_last_chunk_mut::<{ icrc::SIZE }>()
        {
            let sent = u32::from_le_bytes(*crc);
            *crc = icrc::identify(sent, inside.len(), changed).to_le_bytes();
        }
    }
}
