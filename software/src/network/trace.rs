//! The packets that were sent.

use std::collections::VecDeque;
use std::fmt;
use std::net::IpAddr;
use std::ops::Range;
use std::time::Duration;

use super::clock::duration;
use crate::link::Time;
use crate::wire::header::{Bth, XrcEth};
use crate::wire::{icrc, opcode};

/// The fate of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PacketFate {
    /// The packet is on its way.
    UnderWay,
    /// The packet arrived, at this time.
    Delivered(Duration),
    /// The packet was lost by chance.
    Lost,
    /// The packet was lost since its source and its destination were cut off from each other.
    Partitioned,
    /// No device had its destination's address.
    NoReceiver,
    /// The packet was lost since too many packets were under way: see
    /// [`NetworkBuilder::queue`](crate::NetworkBuilder::queue).
    QueueFull,
}

impl fmt::Display for PacketFate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnderWay => write!(f, "under way"),
            Self::Delivered(at) => write!(f, "arrived at {at:?}"),
            Self::Lost => write!(f, "lost"),
            Self::Partitioned => write!(f, "lost in a partition"),
            Self::NoReceiver => write!(f, "no receiver"),
            Self::QueueFull => write!(f, "lost in a full queue"),
        }
    }
}

/// A packet that was sent over a [`Network`](crate::Network).
///
/// The operating system chooses the addresses of memory anew in each run, and READ, WRITE and atomic requests have them in
/// their bytes. So that two runs can be compared, `==` ignores the virtual address and the key of a request, the key that a
/// SEND invalidates, and the invariant CRC, which covers them. `Display`, a line, has none of them.
#[derive(Clone, Debug)]
pub struct TracedPacket {
    sent_at: Duration,
    from: IpAddr,
    to: IpAddr,
    bytes: Vec<u8>,
    again: bool,
    fate: PacketFate,
}

impl PartialEq for TracedPacket {
    fn eq(&self, other: &Self) -> bool {
        let Self { sent_at, from, to, bytes, again, fate } = self;
        let is_same = |at: usize| bytes[at] == other.bytes[at];
        (sent_at, from, to, again, fate)
            == (&other.sent_at, &other.from, &other.to, &other.again, &other.fate)
            && bytes.len() == other.bytes.len()
            && bytes.first() == other.bytes.first()
            && (0..bytes.len().saturating_sub(icrc::SIZE))
                .all(|at| is_same(at) || place_and_key(self.opcode()).contains(&at))
    }
}

impl Eq for TracedPacket {}

/// Where a packet of this opcode has an address of memory and a key, or a key alone.
fn place_and_key(opcode: u8) -> Range<usize> {
    let operation = opcode & !opcode::TRANSPORT;
    let is_extended = opcode & opcode::TRANSPORT == opcode::XRC;
    let start = Bth::SIZE + if is_extended { XrcEth::SIZE } else { 0 };
    match operation {
        opcode::WRITE_FIRST | opcode::WRITE_ONLY | opcode::WRITE_ONLY_IMM => start..start + 12,
        opcode::READ_REQUEST | opcode::COMPARE_SWAP | opcode::FETCH_ADD => start..start + 12,
        opcode::ATOMIC_WRITE => start..start + 12,
        // Behind the header that says what is flushed.
        opcode::FLUSH => start + 4..start + 16,
        opcode::SEND_LAST_INVALIDATE | opcode::SEND_ONLY_INVALIDATE => start..start + 4,
        _ => 0..0,
    }
}

impl TracedPacket {
    /// The virtual time at which it was sent.
    pub fn sent_at(&self) -> Duration {
        self.sent_at
    }

    /// The address of the sending device.
    pub fn from(&self) -> IpAddr {
        self.from
    }

    /// The address that it was sent to.
    pub fn to(&self) -> IpAddr {
        self.to
    }

    /// Returns the bytes from the base transport header to the invariant CRC: the payload of the UDP datagram.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Whether the network made it: it is the second copy of a duplicated packet, or was replayed.
    pub fn is_copy(&self) -> bool {
        self.again
    }

    /// Returns the fate of the packet.
    pub fn fate(&self) -> PacketFate {
        self.fate
    }

    /// Its opcode: the transport in the highest three bits, the operation below.
    pub fn opcode(&self) -> u8 {
        self.bytes.first().copied().unwrap_or_default()
    }

    /// The number of the queue pair that it was sent to.
    pub fn queue_pair(&self) -> u32 {
        Bth::parse(&self.bytes).map_or(0, |bth| bth.qpn)
    }

    /// Its packet sequence number.
    pub fn sequence_number(&self) -> u32 {
        Bth::parse(&self.bytes).map_or(0, |bth| bth.psn)
    }
}

impl fmt::Display for TracedPacket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { sent_at, from, to, bytes, again, fate } = self;
        let copy = if *again { " copy" } else { "" };
        write!(f, "{sent_at:?} {from} > {to}{copy}")?;
        if let Some(bth) = Bth::parse(bytes) {
            let ask = if bth.acknowledge { " ack" } else { "" };
            let solicited = if bth.solicited { " solicited" } else { "" };
            let name = opcode::name(bth.opcode);
            write!(f, " {name} qp {:#x} psn {}{ask}{solicited}", bth.qpn, bth.psn)?;
        }
        write!(f, ", {} bytes: {fate}", bytes.len().saturating_sub(icrc::SIZE))
    }
}

/// The packets of a [`Network`](crate::Network), in the order in which they were sent.
///
/// `Display` gives a line for each. `==` compares packets as [`TracedPacket`] says: two runs with one seed are equal.
#[derive(Clone, Debug)]
pub struct Trace {
    packets: VecDeque<TracedPacket>,
    /// The number of packets that have left it.
    gone: u64,
    bytes: usize,
    room: usize,
}

impl PartialEq for Trace {
    fn eq(&self, other: &Self) -> bool {
        self.gone == other.gone && self.packets == other.packets
    }
}

impl Eq for Trace {}

impl Trace {
    pub(super) fn new(room: usize) -> Self {
        Self { packets: VecDeque::new(), gone: 0, bytes: 0, room }
    }

    /// Adds a packet; returns its number.
    pub(super) fn push(
        &mut self,
        sent_at: Time,
        (from, to): (IpAddr, IpAddr),
        bytes: &[u8],
        again: bool,
        fate: PacketFate,
    ) -> u64 {
        let number = self.gone + self.packets.len() as u64;
        let sent_at = duration(sent_at);
        let bytes = bytes.to_vec();
        self.bytes += cost(&bytes);
        self.packets.push_back(TracedPacket { sent_at, from, to, bytes, again, fate });
        while self.bytes > self.room {
            let Some(first) = self.packets.pop_front() else { break };
            self.bytes -= cost(&first.bytes);
            self.gone += 1;
        }
        number
    }

    pub(super) fn set_fate(&mut self, number: u64, fate: PacketFate) {
        let index = number.checked_sub(self.gone).and_then(|index| usize::try_from(index).ok());
        if let Some(packet) = index.and_then(|index| self.packets.get_mut(index)) {
            packet.fate = fate;
        }
    }

    /// The packets, the first one first.
    pub fn packets(&self) -> impl ExactSizeIterator<Item = &TracedPacket> + DoubleEndedIterator {
        self.packets.iter()
    }

    /// How many packets there were before these: they have left the trace.
    pub fn forgotten(&self) -> u64 {
        self.gone
    }

    /// How many of the packets were lost, for whatever reason.
    pub fn lost(&self) -> usize {
        let arrives = |fate| matches!(fate, PacketFate::Delivered(_) | PacketFate::UnderWay);
        self.packets.iter().filter(|packet| !arrives(packet.fate)).count()
    }
}

/// Bytes of the trace's room that a packet takes.
fn cost(bytes: &[u8]) -> usize {
    bytes.len() + size_of::<TracedPacket>()
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.packets.iter().try_for_each(|packet| writeln!(f, "{packet}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_trace_forgets_the_oldest() {
        let mut trace = Trace::new(3 * (100 + size_of::<TracedPacket>()));
        let address = IpAddr::from([10, 0, 0, 1]);
        let mut last = 0;
        for i in 0..10_u8 {
            let fate = PacketFate::UnderWay;
            last = trace.push(i.into(), (address, address), &[i; 100], false, fate);
        }
        trace.set_fate(last, PacketFate::Lost);
        trace.set_fate(0, PacketFate::Lost);
        assert_eq!((trace.packets().len(), trace.forgotten(), trace.lost()), (3, 7, 1));
        assert_eq!(trace.packets().next_back().unwrap().fate(), PacketFate::Lost);
        assert_eq!(trace.to_string().lines().count(), 3);
    }
}
