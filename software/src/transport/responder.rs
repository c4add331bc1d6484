//! The receiving side of reliable connections: carries out the peer's requests and answers them.
//!
//! Every field of a packet may be chosen by an attacker. A packet that violates the specification is
//! refused before any memory is touched, and an answer is never longer than the request asked for and may
//! read.

mod answers;
mod fetches;

use super::core::Core;
use super::queue_pair::{QueuePair, Transport};
use super::sq_rq_state::{Answer, Message};
use super::work::{Completion, Extra};
use crate::ffi::{
    ibv_access_flags as Access, ibv_event_type as Event, ibv_wc_opcode, ibv_wc_status as Status,
};
use crate::wire::header::{Bth, Nak, Reader, Syndrome};
use crate::wire::opcode::{self, Part};
use crate::wire::sequence::{add, before, distance};

/// The longest message.
pub(crate) const MAX_MESSAGE: u32 = 1 << 31;

/// The least number of results of atomic operations that are kept for repeated requests.
const KEPT_RESULTS: usize = 16;

/// Why a packet is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// No receive is posted for it.
    NotReady,
    /// The packet is not valid in this order of operations.
    Invalid,
    /// Wrong key, bounds or rights.
    Access,
    /// The message is longer than its receive.
    TooLong,
    /// The memory of the receive may not be written.
    Protection,
    /// The shared receive queue that it names does not exist, or is of another XRC domain.
    Domain,
    /// The completion queue of that shared receive queue was overrun.
    Overrun,
}

impl QueuePair {
    /// Handles a request packet of a reliable connection.
    pub(crate) fn request(&mut self, core: &mut Core, bth: &Bth, body: &[u8]) {
        // By the specification, the 2^23 numbers before the expected one were seen, the others are new.
        let ahead = distance(bth.psn, self.responder.expected);
        if ahead > 0 {
            if !self.responder.refused {
                self.responder.refused = true;
                let psn = self.responder.expected;
                self.answer(
                    core,
                    Answer::Acknowledge { psn, syndrome: Syndrome::Nak(Nak::Sequence) },
                );
            }
            return;
        }
        if ahead < 0 {
            return self.duplicate(core, bth, body);
        }
        self.responder.refused = false;
        let body = if self.transport == Transport::XrcReceive {
            match self.name_queue(core, body) {
                Ok(rest) => rest,
                Err(refusal) => return self.refuse(core, bth.psn, refusal),
            }
        } else {
            body
        };
        let operation = bth.opcode & !opcode::TRANSPORT;
        let done = match (operation, Part::of(operation)) {
            (_, Some(part)) => self.accept(core, bth, part, body).map(|()| 1),
            (opcode::READ_REQUEST, _) => self.read(core, bth.psn, body),
            (opcode::COMPARE_SWAP | opcode::FETCH_ADD, _) => {
                self.atomic(core, bth.psn, operation, body)
            }
            (opcode::ATOMIC_WRITE, _) => self.atomic_write(core, bth.psn, body),
            (opcode::FLUSH, _) => self.flush(core, bth.psn, body),
            _ => Err(Refusal::Invalid),
        };
        match done {
            Ok(packets) => {
                let responder = &mut self.responder;
                responder.expected = add(responder.expected, packets);
                let Some(part) = Part::of(operation).filter(|_| bth.acknowledge) else {
                    return self.send_answers(core);
                };
                let answer = Answer::Acknowledge { psn: bth.psn, syndrome: Syndrome::Ack };
                let completes = part.last && (!part.write || part.immediate);
                if completes && core.holds_answers {
                    self.answer_later(core, answer);
                } else {
                    self.answer(core, answer);
                }
            }
            Err(refusal) => self.refuse(core, bth.psn, refusal),
        }
    }

    fn refuse(&mut self, core: &mut Core, psn: u32, refusal: Refusal) {
        let (nak, status, event) = match refusal {
            Refusal::NotReady => {
                // Later packets need no further NAK.
                self.responder.refused = true;
                let syndrome = Syndrome::NotReady(self.attr.min_rnr_timer);
                return self.answer(core, Answer::Acknowledge { psn, syndrome });
            }
            Refusal::Invalid => (
                Nak::InvalidRequest,
                Status::IBV_WC_WR_FLUSH_ERR,
                Some(Event::IBV_EVENT_QP_REQ_ERR),
            ),
            Refusal::Access => (
                Nak::RemoteAccess,
                Status::IBV_WC_WR_FLUSH_ERR,
                Some(Event::IBV_EVENT_QP_ACCESS_ERR),
            ),
            Refusal::TooLong => (Nak::InvalidRequest, Status::IBV_WC_LOC_LEN_ERR, None),
            Refusal::Protection => (Nak::RemoteOperation, Status::IBV_WC_LOC_PROT_ERR, None),
            // The event is that of hardware's drivers.
            Refusal::Domain => (
                Nak::InvalidRequest,
                Status::IBV_WC_WR_FLUSH_ERR,
                Some(Event::IBV_EVENT_QP_ACCESS_ERR),
            ),
            Refusal::Overrun => {
                (Nak::RemoteOperation, Status::IBV_WC_WR_FLUSH_ERR, Some(Event::IBV_EVENT_QP_FATAL))
            }
        };
        // Earlier answers are sent first; no answer follows it. It is the last turn of this connection.
        self.responder.give_turn(core.round);
        self.answer(core, Answer::Acknowledge { psn, syndrome: Syndrome::Nak(nak) });
        if let Some(receive) = self.responder.receive.take() {
            self.complete_receive(core, receive.id, status);
        }
        match event {
            Some(event) => self.fail_responder(core, event),
            None => self.enter_error(core),
        }
    }

    /// Handles a request that was carried out already: its answer was lost or is late.
    fn duplicate(&mut self, core: &mut Core, bth: &Bth, body: &[u8]) {
        match bth.opcode & !opcode::TRANSPORT {
            opcode::READ_REQUEST => {
                // The specification says to read again, with the current contents.
                let (pd, body) = if self.transport == Transport::XrcReceive {
                    // The request under way keeps its queue.
                    let Ok((named, rest)) = self.named_queue(core, body) else { return };
                    (named.pd, rest)
                } else {
                    (self.pd, body)
                };
                let Some(reth) = Reader(body).reth() else { return };
                // At most 2^23 packets, from at most 2^23 before the expected one on.
                if reth.length > MAX_MESSAGE {
                    return;
                }
                let end = add(bth.psn, self.packets_of(reth.length));
                if distance(end, self.responder.expected) > 0
                    || self.may_read(core, pd, reth).is_err()
                {
                    return;
                }
                let psn = bth.psn;
                self.responder.answers.retain(|answer| distance(answer.psn(), psn) < 0);
                if self.has_room_to_repeat() {
                    self.answer(core, Answer::read(psn, pd, reth, true));
                }
            }
            opcode::COMPARE_SWAP | opcode::FETCH_ADD => {
                let kept = self.responder.results.iter().rev().find(|kept| kept.0 == bth.psn);
                if let Some(&(psn, value)) = kept
                    && self.has_room_to_repeat()
                {
                    self.answer(core, Answer::Value { psn, value, again: true });
                }
            }
            opcode::ATOMIC_WRITE | opcode::FLUSH => {
                if self.has_room_to_repeat() {
                    self.answer(core, Answer::done(bth.psn, true));
                }
            }
            _ => {
                let psn = before(self.responder.expected);
                self.answer(core, Answer::Acknowledge { psn, syndrome: Syndrome::Ack });
            }
        }
    }

    fn packets_of(&self, length: u32) -> u32 {
        (length as usize).div_ceil(self.mtu).max(1) as u32
    }

    fn most_fetches(&self) -> usize {
        usize::from(self.attr.max_dest_rd_atomic)
    }

    /// Whether an answer may be repeated: however often the peer asks, few answers wait.
    fn has_room_to_repeat(&self) -> bool {
        self.responder.answers.len() <= self.most_fetches()
    }

    /// Handles a packet of a SEND or WRITE that is the next in order.
    pub(crate) fn accept(
        &mut self,
        core: &mut Core,
        bth: &Bth,
        part: Part,
        body: &[u8],
    ) -> Result<(), Refusal> {
        let mut reader = Reader(body);
        let mut message = match (self.responder.message, part.first) {
            (None, true) => self.begin(core, part, &mut reader)?,
            (Some(message), false) if message.write == part.write => message,
            _ => return Err(Refusal::Invalid),
        };
        let extra = match (part.immediate, part.invalidate) {
            (true, _) => Extra::Immediate(reader.immediate().ok_or(Refusal::Invalid)?),
            (_, true) => Extra::Invalidate(reader.u32().ok_or(Refusal::Invalid)?),
            _ => Extra::None,
        };
        let payload = reader.rest();
        let fits = match (part.first, part.last) {
            (_, false) => payload.len() == self.mtu,
            (true, true) => payload.len() <= self.mtu,
            (false, true) => (1..=self.mtu).contains(&payload.len()),
        };
        let end = message.offset + payload.len() as u64;
        if !fits || end > MAX_MESSAGE.into() {
            return Err(Refusal::Invalid);
        }
        let who = (self.pd, self.number);
        if message.write {
            let length = u64::from(message.length);
            if end > length || (part.last && end != length) {
                return Err(Refusal::Invalid);
            }
            if part.immediate && self.responder.receive.is_none() {
                self.responder.receive = Some(self.take_receive(core).ok_or(Refusal::NotReady)?);
            }
            if !payload.is_empty() {
                let address = message.address.wrapping_add(message.offset);
                let access = Access::IBV_ACCESS_REMOTE_WRITE;
                core.keys
                    .remote(who, message.rkey, address, payload.len() as u64, access)
                    .map_err(|_| Refusal::Access)?
                    .write(payload);
            }
        } else {
            let receive = self.responder.receive.as_ref().ok_or(Refusal::Invalid)?;
            if end > receive.length() {
                return Err(Refusal::TooLong);
            }
            core.keys
                .scatter(self.pd, &receive.list, message.offset, payload)
                .map_err(|_| Refusal::Protection)?;
        }
        message.offset = end;
        self.responder.message = (!part.last).then_some(message);
        if part.last {
            self.finish(core, bth, part, extra, end as u32)?;
        }
        Ok(())
    }

    /// Handles the first packet of a message.
    fn begin(
        &mut self,
        core: &mut Core,
        part: Part,
        reader: &mut Reader<'_>,
    ) -> Result<Message, Refusal> {
        let (mut address, mut rkey, mut length) = (0, 0, 0);
        if part.write {
            let reth = reader.reth().ok_or(Refusal::Invalid)?;
            let access = Access::IBV_ACCESS_REMOTE_WRITE;
            if reth.length > MAX_MESSAGE || self.attr.qp_access_flags & access.0 == 0 {
                return Err(Refusal::Invalid);
            }
            if reth.length > 0 {
                let who = (self.pd, self.number);
                core.keys
                    .remote(who, reth.rkey, reth.address, reth.length.into(), access)
                    .map_err(|_| Refusal::Access)?;
            }
            (address, rkey, length) = (reth.address, reth.rkey, reth.length);
        } else if self.responder.receive.is_none() {
            self.responder.receive = Some(self.take_receive(core).ok_or(Refusal::NotReady)?);
        }
        Ok(Message { write: part.write, address, rkey, length, offset: 0 })
    }

    /// The last packet of a message has arrived.
    fn finish(
        &mut self,
        core: &mut Core,
        bth: &Bth,
        part: Part,
        extra: Extra,
        length: u32,
    ) -> Result<(), Refusal> {
        if let Extra::Invalidate(rkey) = extra {
            let who = (self.pd, self.number);
            core.invalidate_window(who, rkey).map_err(|_| Refusal::Access)?;
        }
        self.responder.msn = add(self.responder.msn, 1);
        if part.write && !part.immediate {
            return Ok(());
        }
        let Some(receive) = self.responder.receive.take() else { return Ok(()) };
        let opcode = if part.write {
            ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM
        } else {
            ibv_wc_opcode::IBV_WC_RECV
        };
        let mut completion =
            Completion::new(receive.id, self.named(), Status::IBV_WC_SUCCESS, opcode);
        completion.length = length;
        completion.source = self.flow.map_or(self.attr.dest_qp_num, |flow| flow.header.source);
        completion.address_handle = self.flow.map_or(0, |flow| flow.address_handle);
        completion.solicited = bth.solicited;
        completion.release = self.receive_release();
        completion.extra(extra);
        core.complete(self.receive_cq, completion);
        Ok(())
    }
}
