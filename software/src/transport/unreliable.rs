//! The receiving side of unreliable connections and of datagrams: invalid packets are dropped.

use std::net::IpAddr;

use super::core::Core;
use super::drops::DropReason;
use super::queue_pair::QueuePair;
use super::responder::Refusal;
use super::work::{Completion, Extra, Receive};
use crate::ffi::{
    ibv_access_flags as Access, ibv_wc_flags, ibv_wc_opcode, ibv_wc_status as Status,
};
use crate::wire::header::{Bth, Reader};
use crate::wire::icrc;
use crate::wire::opcode::{self, Part};
use crate::wire::sequence::add;

/// The bytes before the payload in the receive of a datagram.
const GRH: usize = 40;

impl QueuePair {
    /// Handles a packet of an unreliable connection.
    pub(crate) fn unreliable(&mut self, core: &mut Core, bth: &Bth, body: &[u8]) {
        let Some(part) = Part::of(bth.opcode & !opcode::TRANSPORT) else { return };
        if part.invalidate {
            return;
        }
        let in_order = bth.psn == self.responder.expected;
        self.responder.expected = add(bth.psn, 1);
        if part.first || !in_order {
            // A packet was lost: the current message cannot be completed any more.
            self.responder.abandon();
        }
        if !part.first && !self.responder.is_within_message() {
            return;
        }
        match self.accept(core, bth, part, body) {
            Ok(()) => {}
            Err(Refusal::Protection) => {
                if let Some(receive) = self.responder.receive.take() {
                    self.complete_receive(core, receive.id, Status::IBV_WC_LOC_PROT_ERR);
                }
                self.enter_error(core);
            }
            Err(refusal) => {
                self.responder.abandon();
                let denied = part.write
                    && self.attr.qp_access_flags & Access::IBV_ACCESS_REMOTE_WRITE.0 == 0;
                let why = match refusal {
                    Refusal::NotReady => Some(DropReason::NoReceive),
                    Refusal::TooLong => Some(DropReason::TooShort),
                    Refusal::Access => Some(DropReason::Memory),
                    Refusal::Invalid if denied => Some(DropReason::Memory),
                    Refusal::Invalid if body.len() > self.mtu || !part.last => {
                        Some(DropReason::Mtu)
                    }
                    _ => None,
                };
                if let (Some(why), Some(path)) = (why, self.path) {
                    core.count_drop(path.to, self.number, why);
                }
            }
        }
    }

    /// Delivers a datagram to its receive: 40 bytes for the addresses, then the payload.
    pub(crate) fn datagram(
        &mut self,
        core: &mut Core,
        (from, to): (IpAddr, IpAddr),
        bth: &Bth,
        body: &[u8],
    ) {
        let mut reader = Reader(body);
        let Some(deth) = reader.deth() else { return };
        let extra = match bth.opcode & !opcode::TRANSPORT {
            opcode::SEND_ONLY => Some(Extra::None),
            opcode::SEND_ONLY_IMM => reader.immediate().map(Extra::Immediate),
            _ => None,
        };
        let Some(extra) = extra else {
            core.counters.packets_unexpected += 1;
            return;
        };
        if deth.qkey != self.attr.qkey {
            core.counters.packets_unexpected += 1;
            return core.count_drop(from, self.number, DropReason::QKey);
        }
        let payload = reader.rest();
        if payload.len() > self.mtu {
            return core.count_drop(from, self.number, DropReason::Mtu);
        }
        let mut all = [0; GRH].to_vec();
        write_addresses(&mut all, (from, to), body.len());
        all.extend_from_slice(payload);
        // Anyone may send one that is too long, so it must not end the queue pair. The receive is for the next.
        let receive = self.next_receive(core).map(Receive::length);
        if receive.is_some_and(|length| all.len() as u64 > length) {
            core.counters.packets_unexpected += 1;
            return core.count_drop(from, self.number, DropReason::TooShort);
        }
        let Some(receive) = self.take_receive(core) else {
            return core.count_drop(from, self.number, DropReason::NoReceive);
        };
        let status = if core.keys.scatter(self.pd, &receive.list, 0, &all).is_err() {
            Status::IBV_WC_LOC_PROT_ERR
        } else {
            Status::IBV_WC_SUCCESS
        };
        let opcode = ibv_wc_opcode::IBV_WC_RECV;
        let mut completion = Completion::new(receive.id, self.number, status, opcode);
        completion.release = self.receive_release();
        if status != Status::IBV_WC_SUCCESS {
            core.complete(self.receive_cq, completion);
            return self.enter_error(core);
        }
        completion.length = all.len() as u32;
        completion.source = deth.source;
        // mlx5 does this; UCX drops a datagram whose kind does not fit its address.
        completion.service_level = if to.is_ipv4() { 2 } else { 1 };
        completion.solicited = bth.solicited;
        completion.flags = ibv_wc_flags::IBV_WC_GRH.0;
        completion.extra(extra);
        core.complete(self.receive_cq, completion);
    }
}

/// The global route header of a datagram: the IPv6 header, or 20 unused bytes and the IPv4 header.
fn write_addresses(to: &mut [u8], addresses: (IpAddr, IpAddr), body: usize) {
    let udp = (8 + Bth::SIZE + body + icrc::SIZE) as u16;
    match addresses {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let ip = &mut to[20..GRH];
            ip[0] = 0x45;
            ip[2..4].copy_from_slice(&(20 + udp).to_be_bytes());
            ip[6] = 0x40;
            ip[8] = 64;
            ip[9] = 17;
            ip[12..16].copy_from_slice(&source.octets());
            ip[16..20].copy_from_slice(&destination.octets());
            let sum = checksum(ip);
            ip[10..12].copy_from_slice(&sum.to_be_bytes());
        }
        (source, destination) => {
            let v6 = |address| match address {
                IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
                IpAddr::V6(v6) => v6.octets(),
            };
            to[0] = 0x60;
            to[4..6].copy_from_slice(&udp.to_be_bytes());
            to[6] = 17;
            to[7] = 64;
            to[8..24].copy_from_slice(&v6(source));
            to[24..40].copy_from_slice(&v6(destination));
        }
    }
}

fn checksum(header: &[u8]) -> u16 {
    let words = header.chunks_exact(2).map(|two| u32::from(u16::from_be_bytes([two[0], two[1]])));
    let mut sum: u32 = words.sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ipv4_header_lies_in_the_last_20_bytes() {
        let mut grh = [0; GRH];
        let source = IpAddr::from([127, 0, 0, 2]);
        write_addresses(&mut grh, (source, IpAddr::from([127, 0, 0, 3])), 100);
        assert_eq!(grh[..20], [0; 20]);
        assert_eq!(checksum(&grh[20..]), 0);
        assert_eq!(grh[32..], [127, 0, 0, 2, 127, 0, 0, 3]);
    }

    /// The lengths are those of the whole packet: UDP's 8 bytes, a base header of 12, what follows it, and the ICRC.
    #[test]
    fn both_headers_tell_the_length_of_the_packet() {
        let length = |address: IpAddr, at: usize| {
            let mut grh = [0; GRH];
            write_addresses(&mut grh, (address, address), 1000);
            u16::from_be_bytes([grh[at], grh[at + 1]])
        };
        assert_eq!(length(IpAddr::from([127, 0, 0, 2]), 22), 20 + 8 + 12 + 1000 + 4);
        assert_eq!(length("::1".parse().unwrap(), 4), 8 + 12 + 1000 + 4);
    }
}
