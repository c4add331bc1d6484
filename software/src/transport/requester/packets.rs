//! The packets of a request: SEND and WRITE in pieces of the MTU, a READ in parts, and atomic ones.

use super::Step;
use crate::ffi::ibv_wc_status as Status;
use crate::transport::core::Core;
use crate::transport::queue_pair::QueuePair;
use crate::transport::sq_rq_state::SendQueue;
use crate::transport::work::{Data, Extra, Operation, own_key};
use crate::wire::header::{AtomicEth, Bth, Deth, Reth, XrcEth};
use crate::wire::opcode::{self, Part};
use crate::wire::sequence::wire;

/// The number of packets that one READ request asks for; a longer READ is several requests on the wire.
const READ_PACKETS: u32 = 16;

/// An acknowledgement is requested at least every this many packets, and four times in a window.
const ACK_EVERY: u32 = 32;

impl SendQueue {
    fn ack_every(&self) -> u64 {
        (self.window / 4).clamp(1, ACK_EVERY).into()
    }
}

impl QueuePair {
    /// One packet of a SEND or WRITE.
    pub(super) fn send_data(&mut self, core: &mut Core) -> Step {
        let (index, offset) = (self.sq.cursor, self.sq.offset);
        let posted = &self.sq.posted[index];
        let request = &posted.request;
        let number = posted.first + u64::from(offset);
        if !self.has_room(number, 1) {
            return Step::Waits;
        }
        // An address handle is for the queue pairs of its domain.
        if request.destination.is_some_and(|to| to.pd != self.pd) {
            return Step::Failed(Status::IBV_WC_LOC_QP_OP_ERR);
        }
        let path = match (self.path, request.destination) {
            (Some(path), _) => path,
            (None, Some(destination)) => destination.path,
            (None, None) => return Step::Failed(Status::IBV_WC_LOC_QP_OP_ERR),
        };
        let (first, last) = (offset == 0, offset + 1 == posted.packets);
        let part = Part {
            write: matches!(request.operation, Operation::Write { .. }),
            first,
            last,
            immediate: last && matches!(request.extra, Extra::Immediate(_)),
            invalidate: last && matches!(request.extra, Extra::Invalidate(_)),
        };
        let qpn = request.destination.map_or(self.attr.dest_qp_num, |to| to.qpn);
        let mut bth = Bth::new(self.transport.bits() | part.operation(), qpn, wire(number));
        bth.solicited = last && request.solicited;
        bth.acknowledge = self.transport.is_reliable()
            && (last || number.is_multiple_of(self.sq.ack_every()) || !self.has_room(number, 2));
        let (pd, source, qkey) = (self.pd, self.number, self.attr.qkey);
        let from = offset as usize * self.mtu;
        let length = self.mtu.min(request.length as usize - from);
        let sent = core.transmit(path, bth, |keys, packet| {
            if let Some(srq) = request.remote_srq {
                XrcEth { srq }.write(packet);
            }
            match (&self.flow, &request.destination) {
                (Some(flow), _) => flow.header.write(packet),
                (None, Some(to)) => {
                    Deth { qkey: own_key(to.key as u32, qkey), source }.write(packet)
                }
                _ => {}
            }
            if let (true, Operation::Write { address, rkey }) = (first, request.operation) {
                Reth { address, rkey, length: request.length }.write(packet);
            }
            match request.extra {
                Extra::Immediate(data) if last => packet.extend_from_slice(&data.to_ne_bytes()),
                Extra::Invalidate(rkey) if last => packet.extend_from_slice(&rkey.to_be_bytes()),
                _ => {}
            }
            match &request.data {
                Data::Inline(bytes) => {
                    packet.extend_from_slice(&bytes[from..from + length]);
                    Ok(())
                }
                Data::List(list) => keys.gather(pd, list, from as u64, length, packet),
            }
        });
        if sent.is_err() {
            return Step::Failed(Status::IBV_WC_LOC_PROT_ERR);
        }
        self.sq.high = self.sq.high.max(number + 1);
        self.sq.offset += 1;
        if last {
            self.sq.cursor += 1;
            self.sq.offset = 0;
            if !self.transport.is_reliable() {
                // UC and UD have no answers, so all requests before this one are complete too.
                self.sq.unacknowledged = self.sq.high;
                self.complete_front(core, Status::IBV_WC_SUCCESS);
            }
        }
        Step::Sent
    }

    /// A READ request, for a part of what is read, or an atomic one.
    pub(super) fn send_fetch(&mut self, core: &mut Core) -> Step {
        let (index, offset) = (self.sq.cursor, self.sq.offset);
        let posted = &self.sq.posted[index];
        let request = &posted.request;
        let number = posted.first + u64::from(offset);
        // The parts are always the same, so that a repeated request equals the first one: a
        // responder takes no request that is a new one in part.
        let count = (posted.packets - offset).min(READ_PACKETS - offset % READ_PACKETS);
        let alone = number == self.sq.unacknowledged;
        if self.sq.fetching.len() >= usize::from(self.attr.max_rd_atomic)
            || !(alone || self.has_room(number, count))
        {
            return Step::Waits;
        }
        let Some(path) = self.path else { return Step::Failed(Status::IBV_WC_LOC_QP_OP_ERR) };
        let (pd, writes) = (self.pd, request.operation.returns_data());
        if let Data::List(list) = &request.data
            && offset == 0
            && core.keys.check(pd, list, writes).is_err()
        {
            return Step::Failed(Status::IBV_WC_LOC_PROT_ERR);
        }
        let operation = match request.operation {
            Operation::FetchAdd { .. } => opcode::FETCH_ADD,
            Operation::CompareSwap { .. } => opcode::COMPARE_SWAP,
            Operation::AtomicWrite { .. } => opcode::ATOMIC_WRITE,
            Operation::Flush { .. } => opcode::FLUSH,
            _ => opcode::READ_REQUEST,
        };
        let psn = wire(number);
        let mut bth = Bth::new(self.transport.bits() | operation, self.attr.dest_qp_num, psn);
        bth.acknowledge = true;
        let skip = offset * self.mtu as u32;
        let length = (request.length - skip.min(request.length)).min(count * self.mtu as u32);
        let sent = core.transmit(path, bth, |keys, packet| {
            if let Some(srq) = request.remote_srq {
                XrcEth { srq }.write(packet);
            }
            if let Some(flow) = &self.flow {
                flow.header.write(packet);
            }
            match request.operation {
                Operation::FetchAdd { address, rkey, add } => {
                    AtomicEth { address, rkey, swap_add: add, compare: 0 }.write(packet);
                }
                Operation::CompareSwap { address, rkey, compare, swap } => {
                    AtomicEth { address, rkey, swap_add: swap, compare }.write(packet);
                }
                Operation::Read { address, rkey } => {
                    let address = address.wrapping_add(skip.into());
                    Reth { address, rkey, length }.write(packet);
                }
                Operation::AtomicWrite { address, rkey } => {
                    Reth { address, rkey, length }.write(packet);
                    match &request.data {
                        Data::Inline(bytes) => packet.extend_from_slice(bytes),
                        Data::List(list) => keys.gather(pd, list, 0, length as usize, packet)?,
                    }
                }
                Operation::Flush { feth, reth } => {
                    feth.write(packet);
                    reth.write(packet);
                }
                _ => {}
            }
            Ok(())
        });
        if sent.is_err() {
            return Step::Failed(Status::IBV_WC_LOC_PROT_ERR);
        }
        let whole = offset + count == posted.packets;
        let end = number + u64::from(count);
        self.sq.high = self.sq.high.max(end);
        self.sq.fetching.push_back(end - 1);
        self.sq.offset += count;
        if whole {
            self.sq.cursor += 1;
            self.sq.offset = 0;
        }
        Step::Sent
    }
}
