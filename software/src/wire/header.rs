//! The headers. Everything on the wire is big-endian.

/// The default partition, which every port is a full member of; the only one here.
pub(crate) const PKEY: u16 = 0xffff;

/// Base transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bth {
    /// Transport and operation.
    pub(crate) opcode: u8,
    pub(crate) solicited: bool,
    /// The number of padding bytes of the payload.
    pub(crate) pad: u8,
    pub(crate) pkey: u16,
    pub(crate) qpn: u32,
    pub(crate) acknowledge: bool,
    pub(crate) psn: u32,
}

impl Bth {
    pub(crate) const SIZE: usize = 12;

    pub(crate) fn new(opcode: u8, qpn: u32, psn: u32) -> Self {
        Self { opcode, solicited: false, pad: 0, pkey: PKEY, qpn, acknowledge: false, psn }
    }

    /// `None`: too short, or of a version that does not exist.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::SIZE] = bytes.first_chunk()?;
        if bytes[1] & 0xf != 0 {
            return None;
        }
        let word = |at: usize| u32::from_be_bytes([0, bytes[at], bytes[at + 1], bytes[at + 2]]);
        Some(Self {
            opcode: bytes[0],
            solicited: bytes[1] & 0x80 != 0,
            pad: bytes[1] >> 4 & 3,
            pkey: u16::from_be_bytes([bytes[2], bytes[3]]),
            qpn: word(5),
            acknowledge: bytes[8] & 0x80 != 0,
            psn: word(9),
        })
    }

    /// Bit 6 of the second byte says that the path was not migrated.
    pub(crate) fn bytes(&self) -> [u8; Self::SIZE] {
        let mut bytes = [0; Self::SIZE];
        bytes[0] = self.opcode;
        bytes[1] = u8::from(self.solicited) << 7 | 0x40 | self.pad << 4;
        bytes[2..4].copy_from_slice(&self.pkey.to_be_bytes());
        bytes[4..8].copy_from_slice(&(self.qpn & 0xff_ffff).to_be_bytes());
        bytes[8..12].copy_from_slice(&(self.psn & 0xff_ffff).to_be_bytes());
        bytes[8] = u8::from(self.acknowledge) << 7;
        bytes
    }
}

/// Reads the extended headers of a packet, one after the other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_be_bytes)
    }

    /// Immediate data, in network byte order as verbs have it.
    pub(crate) fn immediate(&mut self) -> Option<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    pub(crate) fn reth(&mut self) -> Option<Reth> {
        Some(Reth { address: self.u64()?, rkey: self.u32()?, length: self.u32()? })
    }

    pub(crate) fn atomic(&mut self) -> Option<AtomicEth> {
        let (address, rkey) = (self.u64()?, self.u32()?);
        Some(AtomicEth { address, rkey, swap_add: self.u64()?, compare: self.u64()? })
    }

    pub(crate) fn feth(&mut self) -> Option<Feth> {
        self.u32().map(|word| Feth { placement: word & 0xf, whole_region: word >> 4 & 3 == 1 })
    }

    pub(crate) fn aeth(&mut self) -> Option<Aeth> {
        let word = self.u32()?;
        Some(Aeth { syndrome: (word >> 24) as u8, msn: word & 0xff_ffff })
    }

    pub(crate) fn deth(&mut self) -> Option<Deth> {
        Some(Deth { qkey: self.u32()?, source: self.u32()? & 0xff_ffff })
    }

    /// XRC extended transport header: the number of a shared receive queue. The other eight bits are reserved.
    pub(crate) fn xrceth(&mut self) -> Option<u32> {
        self.u32().map(|word| word & 0xff_ffff)
    }

    pub(crate) fn flow(&mut self) -> Option<FlowEth> {
        let (flow, source) = (self.u32()? & 0xff_ffff, self.u32()? & 0xff_ffff);
        Some(FlowEth { flow, source, began: self.u64()?, key: self.u64()? })
    }

    /// The remaining bytes: the payload.
    pub(crate) fn rest(self) -> &'a [u8] {
        self.0
    }
}

/// RDMA extended transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reth {
    pub(crate) address: u64,
    pub(crate) rkey: u32,
    pub(crate) length: u32,
}

impl Reth {
    pub(crate) fn write(&self, to: &mut Vec<u8>) {
        to.extend_from_slice(&self.address.to_be_bytes());
        to.extend_from_slice(&self.rkey.to_be_bytes());
        to.extend_from_slice(&self.length.to_be_bytes());
    }
}

/// Atomic extended transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AtomicEth {
    pub(crate) address: u64,
    pub(crate) rkey: u32,
    pub(crate) swap_add: u64,
    pub(crate) compare: u64,
}

impl AtomicEth {
    pub(crate) fn write(&self, to: &mut Vec<u8>) {
        to.extend_from_slice(&self.address.to_be_bytes());
        to.extend_from_slice(&self.rkey.to_be_bytes());
        to.extend_from_slice(&self.swap_add.to_be_bytes());
        to.extend_from_slice(&self.compare.to_be_bytes());
    }
}

/// FLUSH extended transport header, in front of the address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Feth {
    /// `enum ibv_placement_type`, any of them.
    pub(crate) placement: u32,
    /// All of the region is flushed, whatever the address.
    pub(crate) whole_region: bool,
}

impl Feth {
    pub(crate) fn write(&self, to: &mut Vec<u8>) {
        let word = u32::from(self.whole_region) << 4 | self.placement & 0xf;
        to.extend_from_slice(&word.to_be_bytes());
    }
}

/// Datagram extended transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Deth {
    pub(crate) qkey: u32,
    pub(crate) source: u32,
}

impl Deth {
    pub(crate) fn write(&self, to: &mut Vec<u8>) {
        to.extend_from_slice(&self.qkey.to_be_bytes());
        to.extend_from_slice(&(self.source & 0xff_ffff).to_be_bytes());
    }
}

/// XRC extended transport header, which follows the base transport header of each request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct XrcEth {
    /// The number of a shared receive queue.
    pub(crate) srq: u32,
}

impl XrcEth {
    pub(crate) const SIZE: usize = 4;

    pub(crate) fn write(&self, to: &mut Vec<u8>) {
        to.extend_from_slice(&(self.srq & 0xff_ffff).to_be_bytes());
    }
}

/// The header that follows the base transport header of each request of SRD and DC. It is this crate's own: how the
/// adapters' headers look is not published.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FlowEth {
    /// The number of the flow, which answers go to.
    pub(crate) flow: u32,
    /// The number of the sending queue pair.
    pub(crate) source: u32,
    /// Grows with each flow of this number.
    pub(crate) began: u64,
    /// The Q_Key, or the access key of DC.
    pub(crate) key: u64,
}

impl FlowEth {
    #[cfg(any(test, fuzzing))]
    pub(crate) const SIZE: usize = 24;

    pub(crate) fn write(&self, to: &mut Vec<u8>) {
        to.extend_from_slice(&(self.flow & 0xff_ffff).to_be_bytes());
        to.extend_from_slice(&(self.source & 0xff_ffff).to_be_bytes());
        to.extend_from_slice(&self.began.to_be_bytes());
        to.extend_from_slice(&self.key.to_be_bytes());
    }
}

/// ACK extended transport header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Aeth {
    pub(crate) syndrome: u8,
    pub(crate) msn: u32,
}

/// The reason for which a responder refuses a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Nak {
    Sequence,
    InvalidRequest,
    RemoteAccess,
    RemoteOperation,
    /// The destination does not exist, or takes nothing.
    Destination,
}

/// The decoded syndrome of an AETH.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Syndrome {
    Ack,
    /// The receiver is not ready; the code of its timer.
    NotReady(u8),
    Nak(Nak),
    Reserved,
}

impl Aeth {
    pub(crate) fn bytes(&self) -> [u8; 4] {
        (u32::from(self.syndrome) << 24 | self.msn & 0xff_ffff).to_be_bytes()
    }

    pub(crate) fn meaning(&self) -> Syndrome {
        match (self.syndrome >> 5, self.syndrome & 0x1f) {
            (0, _) => Syndrome::Ack,
            (1, timer) => Syndrome::NotReady(timer),
            (3, 0) => Syndrome::Nak(Nak::Sequence),
            (3, 1) => Syndrome::Nak(Nak::InvalidRequest),
            (3, 2) => Syndrome::Nak(Nak::RemoteAccess),
            (3, 3) => Syndrome::Nak(Nak::RemoteOperation),
            (3, 4) => Syndrome::Nak(Nak::Destination),
            _ => Syndrome::Reserved,
        }
    }
}

impl Syndrome {
    /// A credit count of 31 means that the sender of the AETH does not count credits.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Ack => 0x1f,
            Self::NotReady(timer) => 0x20 | timer & 0x1f,
            Self::Nak(Nak::Sequence) => 0x60,
            Self::Nak(Nak::InvalidRequest) => 0x61,
            Self::Nak(Nak::RemoteAccess) => 0x62,
            Self::Nak(Nak::RemoteOperation) => 0x63,
            Self::Nak(Nak::Destination) => 0x64,
            Self::Reserved => 0x40,
        }
    }
}

/// Headers read from bytes are written as the same bytes, as far as they have a meaning.
#[cfg(any(test, fuzzing))]
pub(crate) mod property {
    use super::*;

    /// The extended headers, one after the other.
    pub fn device_headers(data: &[u8]) {
        if let Some(bth) = Bth::parse(data) {
            assert_eq!(Bth::parse(&bth.bytes()), Some(bth));
            assert!(bth.qpn <= 0xff_ffff && bth.psn <= 0xff_ffff && bth.pad < 4);
        }
        // Each header consumes what it writes, or nothing is read.
        let mut written = Vec::new();
        if let Some(reth) = Reader(data).reth() {
            reth.write(&mut written);
            assert_eq!(written, data[..written.len()]);
        }
        written.clear();
        if let Some(atomic) = Reader(data).atomic() {
            atomic.write(&mut written);
            assert_eq!(written, data[..written.len()]);
        }
        written.clear();
        if let Some(deth) = Reader(data).deth() {
            deth.write(&mut written);
            assert_eq!(Reader(&written).deth(), Some(deth));
            assert_eq!(written[..4], data[..4], "the Q_Key");
        }
        written.clear();
        if let Some(srq) = Reader(data).xrceth() {
            XrcEth { srq }.write(&mut written);
            assert_eq!(Reader(&written).xrceth(), Some(srq));
        }
        if let Some(flow) = Reader(data).flow() {
            written.clear();
            flow.write(&mut written);
            assert_eq!(Reader(&written).flow(), Some(flow));
        }
        if let Some(feth) = Reader(data).feth() {
            written.clear();
            feth.write(&mut written);
            assert_eq!(Reader(&written).feth(), Some(feth));
        }
        if let Some(aeth) = Reader(data).aeth() {
            let again = Aeth { syndrome: aeth.syndrome, ..aeth };
            assert_eq!(Reader(&again.bytes()).aeth(), Some(aeth));
            // A syndrome that means something is written as it was read.
            match aeth.meaning() {
                Syndrome::Reserved => {}
                Syndrome::Ack => assert_eq!(aeth.syndrome >> 5, 0),
                meaning => assert_eq!(meaning.code(), aeth.syndrome),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_survive_the_wire() {
        let bth = Bth {
            opcode: 0x64,
            solicited: true,
            pad: 3,
            pkey: 0x8001,
            qpn: 0xabcdef,
            acknowledge: true,
            psn: 0x123456,
        };
        assert_eq!(Bth::parse(&bth.bytes()), Some(bth));
        assert_eq!(Bth::parse(&bth.bytes()[..11]), None);
        let mut version = bth.bytes();
        version[1] |= 1;
        assert_eq!(Bth::parse(&version), None);

        let mut bytes = Vec::new();
        let reth = Reth { address: 1 << 60, rkey: 7, length: 9 };
        let atomic = AtomicEth { address: 2, rkey: 3, swap_add: 4, compare: 5 };
        let deth = Deth { qkey: 0x8000_0000, source: 0x99 };
        reth.write(&mut bytes);
        atomic.write(&mut bytes);
        deth.write(&mut bytes);
        XrcEth { srq: 0xab_cdef }.write(&mut bytes);
        let mut reader = Reader(&bytes);
        assert_eq!(reader.reth(), Some(reth));
        assert_eq!(reader.atomic(), Some(atomic));
        assert_eq!(reader.deth(), Some(deth));
        assert_eq!(reader.0.len(), XrcEth::SIZE);
        assert_eq!(Reader(&[0xff; 4]).xrceth(), Some(0xff_ffff), "the reserved bits do not count");
        assert_eq!(reader.xrceth(), Some(0xab_cdef));
        assert_eq!((reader.u32(), reader.rest().len()), (None, 0));
    }

    #[test]
    fn syndromes_survive_the_wire() {
        use Nak::{Destination, InvalidRequest, RemoteAccess, RemoteOperation, Sequence};
        let naks = [Sequence, InvalidRequest, RemoteAccess, RemoteOperation, Destination];
        let mut all = vec![Syndrome::Ack, Syndrome::NotReady(31), Syndrome::NotReady(0)];
        all.extend(naks.map(Syndrome::Nak));
        for syndrome in all {
            assert_eq!(Aeth { syndrome: syndrome.code(), msn: 0 }.meaning(), syndrome);
        }
    }
}
