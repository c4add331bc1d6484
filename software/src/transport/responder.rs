//! The receiving side of reliable connections: carries out the peer's requests and answers them.
//!
//! Every field of a packet may be chosen by an attacker. A packet that violates the specification is
//! refused before any memory is touched, and an answer is never longer than the request asked for and may
//! read.

use std::collections::VecDeque;

use super::core::Core;
use super::memory::Atomic;
use super::queue_pair::{QueuePair, Transport};
use super::requester::TURN;
use super::timers::Time;
use super::work::{Completion, Extra, Receive};
use crate::ffi::{
    ibv_access_flags as Access, ibv_event_type as Event, ibv_placement_type, ibv_wc_opcode,
    ibv_wc_status as Status,
};
use crate::wire::header::{Aeth, Bth, Nak, Reader, Reth, Syndrome};
use crate::wire::opcode::{self, Part};
use crate::wire::sequence::{add, before, distance};

/// The longest message.
pub(crate) const MAX_MESSAGE: u32 = 1 << 31;

/// The least number of results of atomic operations that are kept for repeated requests.
const KEPT_RESULTS: usize = 16;

/// Beyond the answers with data, this many acknowledgements and refusals wait at the most.
const MOST_REFUSALS: usize = 16;

/// A message that is not complete yet.
#[derive(Clone, Copy, Debug)]
struct Message {
    write: bool,
    address: u64,
    rkey: u32,
    /// The target, for a WRITE.
    length: u32,
    offset: u64,
}

/// An answer to the peer; answers are sent in the order of its requests. `again`: to a request that was answered before.
#[derive(Clone, Copy, Debug)]
enum Answer {
    Acknowledge {
        psn: u32,
        syndrome: Syndrome,
    },
    Value {
        psn: u32,
        value: u64,
        again: bool,
    },
    /// The remaining data of a READ; `begins` says whether its first packet is still to be sent.
    Read {
        psn: u32,
        /// The protection domain that the request was made in.
        pd: u32,
        address: u64,
        rkey: u32,
        left: u32,
        begins: bool,
        again: bool,
    },
}

impl Answer {
    fn psn(&self) -> u32 {
        match *self {
            Self::Acknowledge { psn, .. } | Self::Value { psn, .. } | Self::Read { psn, .. } => psn,
        }
    }

    /// Whether it answers a READ or atomic request for the first time.
    fn is_of_new_fetch(&self) -> bool {
        matches!(self, Self::Value { again: false, .. } | Self::Read { again: false, .. })
    }
}

#[derive(Debug, Default)]
pub(crate) struct Responder {
    /// The sequence number of the next packet.
    pub(crate) expected: u32,
    /// The number of complete messages.
    pub(crate) msn: u32,
    /// A NAK was sent: a packet is missing, or the receiver was not ready.
    refused: bool,
    message: Option<Message>,
    /// The receive that the message goes to.
    pub(crate) receive: Option<Receive>,
    answers: VecDeque<Answer>,
    /// Results of atomic operations by sequence number. The newest of a number counts: numbers come again.
    results: VecDeque<(u32, u64)>,
    /// The READ and atomic requests whose answers have left and cannot have arrived: until when they cannot, and the
    /// round that they left in.
    under_way: VecDeque<(Time, u64)>,
    /// The round that it had a turn in, and what is left of that turn.
    turn: (u64, u32),
    /// The first packet of the connection has arrived.
    pub(crate) is_established: bool,
}

impl Responder {
    pub(crate) fn stop(&mut self) {
        self.message = None;
        self.answers.clear();
    }

    /// Drops an incomplete message with a missing packet. Its receive serves the next one.
    pub(crate) fn abandon(&mut self) {
        self.message = None;
    }

    /// How many answers wait.
    #[cfg(test)]
    pub(crate) fn waiting(&self) -> usize {
        self.answers.len()
    }

    /// Gives it a turn, even if it had one in this round.
    pub(crate) fn give_turn(&mut self, round: u64) {
        self.turn = (round, TURN);
    }

    pub(crate) fn is_within_message(&self) -> bool {
        self.message.is_some()
    }
}

/// Why a packet is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// No receive is posted for it.
    NotReady,
    /// It is not valid in this order of operations.
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
        // As the specification has it: the 2^23 numbers before the expected one were seen, the others are new.
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

    fn may_read(&self, core: &Core, pd: u32, reth: Reth) -> Result<(), Refusal> {
        if self.attr.qp_access_flags & Access::IBV_ACCESS_REMOTE_READ.0 == 0 {
            return Err(Refusal::Invalid);
        }
        if reth.length == 0 {
            return Ok(());
        }
        let who = (pd, self.number);
        let access = Access::IBV_ACCESS_REMOTE_READ;
        core.keys
            .remote(who, reth.rkey, reth.address, reth.length.into(), access)
            .map(|_| ())
            .map_err(|_| Refusal::Access)
    }

    /// Whether the peer may have one more READ or atomic request outstanding. Those count whose answers it cannot have
    /// yet, since they have not left, or are on their way for less time than the network takes.
    fn check_fetches(&mut self, core: &Core) -> Result<(), Refusal> {
        let (now, round) = (core.now(), core.round);
        let responder = &mut self.responder;
        responder.under_way.retain(|&(until, left_in)| until > now || left_in == round);
        let waiting = responder.answers.iter().filter(|answer| answer.is_of_new_fetch()).count();
        let outstanding = waiting + responder.under_way.len();
        if responder.message.is_some() || outstanding >= self.most_fetches() {
            return Err(Refusal::Invalid);
        }
        Ok(())
    }

    fn read(&mut self, core: &mut Core, psn: u32, body: &[u8]) -> Result<u32, Refusal> {
        self.check_fetches(core)?;
        let reth = Reader(body).reth().ok_or(Refusal::Invalid)?;
        if reth.length > MAX_MESSAGE {
            return Err(Refusal::Invalid);
        }
        self.may_read(core, self.pd, reth)?;
        self.responder.msn = add(self.responder.msn, 1);
        self.responder.answers.push_back(Answer::read(psn, self.pd, reth, false));
        Ok(self.packets_of(reth.length))
    }

    fn atomic(
        &mut self,
        core: &mut Core,
        psn: u32,
        operation: u8,
        body: &[u8],
    ) -> Result<u32, Refusal> {
        self.check_fetches(core)?;
        let header = Reader(body).atomic().ok_or(Refusal::Invalid)?;
        let access = Access::IBV_ACCESS_REMOTE_ATOMIC;
        if self.attr.qp_access_flags & access.0 == 0 || header.address % 8 != 0 {
            return Err(Refusal::Invalid);
        }
        let who = (self.pd, self.number);
        let target = core
            .keys
            .remote(who, header.rkey, header.address, 8, access)
            .map_err(|_| Refusal::Access)?;
        let operation = if operation == opcode::FETCH_ADD {
            Atomic::FetchAdd(header.swap_add)
        } else {
            Atomic::CompareSwap { compare: header.compare, swap: header.swap_add }
        };
        let value = target.atomic(operation).map_err(|_| Refusal::Access)?;
        let most = self.most_fetches().max(KEPT_RESULTS);
        let responder = &mut self.responder;
        responder.msn = add(responder.msn, 1);
        responder.results.push_back((psn, value));
        if responder.results.len() > most {
            responder.results.pop_front();
        }
        responder.answers.push_back(Answer::Value { psn, value, again: false });
        Ok(1)
    }

    fn atomic_write(&mut self, core: &mut Core, psn: u32, body: &[u8]) -> Result<u32, Refusal> {
        self.check_fetches(core)?;
        let mut reader = Reader(body);
        let reth = reader.reth().ok_or(Refusal::Invalid)?;
        let value: [u8; 8] = reader.rest().try_into().map_err(|_| Refusal::Invalid)?;
        let access = Access::IBV_ACCESS_REMOTE_WRITE;
        let is_allowed = self.attr.qp_access_flags & access.0 != 0;
        if !is_allowed || reth.length != 8 || reth.address % 8 != 0 {
            return Err(Refusal::Invalid);
        }
        let who = (self.pd, self.number);
        let target = core.keys.remote(who, reth.rkey, reth.address, 8, access);
        let target = target.map_err(|_| Refusal::Access)?;
        target.atomic(Atomic::Write(u64::from_ne_bytes(value))).map_err(|_| Refusal::Access)?;
        self.responder.msn = add(self.responder.msn, 1);
        self.responder.answers.push_back(Answer::done(psn, false));
        Ok(1)
    }

    /// What was written is in memory already, where all see it.
    fn flush(&mut self, core: &mut Core, psn: u32, body: &[u8]) -> Result<u32, Refusal> {
        self.check_fetches(core)?;
        let mut reader = Reader(body);
        let feth = reader.feth().ok_or(Refusal::Invalid)?;
        let reth = reader.reth().ok_or(Refusal::Invalid)?;
        let global = feth.placement & ibv_placement_type::IBV_FLUSH_GLOBAL.0;
        let persistent = feth.placement & ibv_placement_type::IBV_FLUSH_PERSISTENT.0;
        let who = (self.pd, self.number);
        for (wanted, access) in [
            (global, Access::IBV_ACCESS_FLUSH_GLOBAL),
            (persistent, Access::IBV_ACCESS_FLUSH_PERSISTENT),
        ] {
            if wanted == 0 {
                continue;
            }
            if self.attr.qp_access_flags & access.0 == 0 {
                return Err(Refusal::Invalid);
            }
            let range = match core.keys.region(reth.rkey).filter(|_| feth.whole_region) {
                Some(region) => (region.iova, 0),
                None => (reth.address, reth.length.into()),
            };
            core.keys
                .remote(who, reth.rkey, range.0, range.1, access)
                .map_err(|_| Refusal::Access)?;
        }
        self.responder.msn = add(self.responder.msn, 1);
        self.responder.answers.push_back(Answer::done(psn, false));
        Ok(1)
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
            Completion::new(receive.id, self.number, Status::IBV_WC_SUCCESS, opcode);
        completion.length = length;
        completion.source = self.attr.dest_qp_num;
        completion.solicited = bth.solicited;
        completion.release = self.receive_release();
        completion.extra(extra);
        core.complete(self.receive_cq, completion);
        Ok(())
    }

    // ---- Answers ----

    fn answer(&mut self, core: &mut Core, answer: Answer) {
        self.queue_answer(answer);
        self.send_answers(core);
    }

    /// The program that receives will now get a completion. If it posts, the answer goes with that.
    fn answer_later(&mut self, core: &mut Core, answer: Answer) {
        self.queue_answer(answer);
        if !core.held.contains(&self.number) {
            core.held.push(self.number);
        }
    }

    fn queue_answer(&mut self, answer: Answer) {
        let both_acknowledge = |last: &Answer| {
            let is_ack = |answer: &Answer| {
                matches!(answer, Answer::Acknowledge { syndrome: Syndrome::Ack, .. })
            };
            is_ack(last) && is_ack(&answer)
        };
        let is_full = self.responder.answers.len() > self.most_fetches() + MOST_REFUSALS;
        match self.responder.answers.back_mut() {
            // The later acknowledgement covers both.
            Some(last) if both_acknowledge(last) => *last = answer,
            // The peer has asked before it had an answer. The last one tells the same.
            Some(last @ Answer::Acknowledge { .. }) if is_full => *last = answer,
            _ => self.responder.answers.push_back(answer),
        }
    }

    /// Sends answers, as many packets as one turn allows. In each round there is one turn, however many requests have
    /// come: other queue pairs wait for theirs, and the program for the device's lock.
    pub(crate) fn send_answers(&mut self, core: &mut Core) {
        if self.responder.turn.0 != core.round {
            self.responder.give_turn(core.round);
        }
        while let Some(&answer) = self.responder.answers.front() {
            if self.responder.turn.1 == 0 {
                return self.run_later(core);
            }
            self.responder.turn.1 -= 1;
            let rest = self.send_answer(core, answer);
            // A failure has dropped all answers.
            match (rest, self.responder.answers.front_mut()) {
                (Some(rest), Some(front)) => *front = rest,
                (None, Some(_)) => {
                    self.responder.answers.pop_front();
                    if answer.is_of_new_fetch() {
                        let arrives = core.now().saturating_add(core.link().latency());
                        self.responder.under_way.push_back((arrives, core.round));
                    }
                }
                (_, None) => return,
            }
        }
    }

    /// Sends one packet; returns the rest of the answer.
    fn send_answer(&mut self, core: &mut Core, answer: Answer) -> Option<Answer> {
        let path = self.path?;
        let (qpn, msn) = (self.attr.dest_qp_num, self.responder.msn);
        let operation = match answer {
            Answer::Acknowledge { .. } => opcode::ACK,
            Answer::Value { .. } => opcode::ATOMIC_ACK,
            Answer::Read { left, begins, .. } => match (begins, left as usize <= self.mtu) {
                (true, true) => opcode::READ_ONLY,
                (true, false) => opcode::READ_FIRST,
                (false, true) => opcode::READ_LAST,
                (false, false) => opcode::READ_MIDDLE,
            },
        };
        let syndrome = match answer {
            Answer::Acknowledge { syndrome, .. } => syndrome,
            _ => Syndrome::Ack,
        };
        let aeth = Aeth { syndrome: syndrome.code(), msn };
        let bth = Bth::new(self.transport.bits() | operation, qpn, answer.psn());
        let (number, mtu) = (self.number, self.mtu);
        let sent = core.transmit(path, bth, |keys, packet| {
            if operation != opcode::READ_MIDDLE {
                packet.extend_from_slice(&aeth.bytes());
            }
            match answer {
                Answer::Value { value, .. } => packet.extend_from_slice(&value.to_be_bytes()),
                Answer::Read { pd, address, rkey, left, .. } if left > 0 => {
                    let who = (pd, number);
                    let part = mtu.min(left as usize);
                    let access = Access::IBV_ACCESS_REMOTE_READ;
                    keys.remote(who, rkey, address, part as u64, access)?.read(part, packet);
                }
                _ => {}
            }
            Ok(())
        });
        if sent.is_err() {
            // The right to read was revoked in the meantime.
            let syndrome = Syndrome::Nak(Nak::RemoteAccess);
            self.responder.answers.clear();
            self.send_answer(core, Answer::Acknowledge { psn: answer.psn(), syndrome });
            self.fail_responder(core, Event::IBV_EVENT_QP_ACCESS_ERR);
            return None;
        }
        match answer {
            Answer::Read { psn, pd, address, rkey, left, again, .. } if left as usize > mtu => {
                let (psn, address) = (add(psn, 1), address.wrapping_add(mtu as u64));
                let left = left - mtu as u32;
                Some(Answer::Read { psn, pd, address, rkey, left, begins: false, again })
            }
            _ => None,
        }
    }
}

impl Answer {
    /// The answer of a request that was carried out, and returns no data.
    fn done(psn: u32, again: bool) -> Self {
        Self::Read { psn, pd: 0, address: 0, rkey: 0, left: 0, begins: true, again }
    }

    fn read(psn: u32, pd: u32, reth: Reth, again: bool) -> Self {
        let Reth { address, rkey, length } = reth;
        Self::Read { psn, pd, address, rkey, left: length, begins: true, again }
    }
}
