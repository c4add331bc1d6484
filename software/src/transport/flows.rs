//! SRD and DC: messages of one queue pair to any number of others, each of which arrives, or its completion says why not.
//!
//! A flow is a queue pair of the engine's own, which no program knows: half of a reliable connection between a queue
//! pair that sends and one that receives. It begins with the first request for a destination, without a handshake: its
//! packets name the key of the target and the sender, and the target's device makes its half when it sees the first. It
//! ends when another destination needs its place, when a request fails, or with its queue pair; then a packet says so.
//! Without such a packet, the target's half ends with a process of this machine. That of a process of another machine that
//! is killed stays until the target ends, or a new flow has its number.
//!
//! A queue pair of SRD has several flows to one destination, with one request each, and takes the next request at random
//! from those that wait: so messages arrive in any order, and a failed one harms no other. A DC initiator has one flow,
//! and carries its requests out in their order. It waits for all answers before it turns to another target. What fails
//! one of its requests fails the queue pair.

use std::net::IpAddr;

use super::Engine;
use super::drops::DropReason;
use super::queue_pair::{QueuePair, Transport};
use super::timers::Timer;
use super::work::{Destination, Flow, FlowStep, InboundFlow, OutboundFlow, Path, Posted, own_key};
use crate::ffi::{
    ibv_access_flags as Access, ibv_event_type as Event, ibv_qp_state as State,
    ibv_wc_status as Status,
};
use crate::link::Time;
use crate::wire::header::{Aeth, Bth, FlowEth, Nak, Reader, Syndrome};
use crate::wire::opcode;

/// How many flows a queue pair of SRD has to one destination, and to all of them.
const TO_ONE: usize = 8;
const TO_ALL: usize = 64;

/// The next request is one of so many of the oldest, unless their destinations take none now.
const WINDOW: usize = 64;

/// The most requests of a DC initiator on their way.
const IN_FLIGHT: u32 = 16;

/// One in so many messages of SRD is held back, for at most so many nanoseconds.
const HELD: u64 = 4;
const HELD_FOR: Time = 50_000;

/// The most flows of peers, with those that have ended lately.
const MOST_INBOUND: usize = 16_384;

/// 4.096 us * 2^14 (67 ms), eight times: there are no such settings for SRD.
const SRD_TIMEOUT: u8 = 14;
const SRD_RETRIES: u8 = 7;

/// The pause before a message of SRD that has found no receive comes again: 0.64 ms.
const SRD_NOT_READY: u8 = 12;

impl Engine {
    /// How many queue pairs the programs have.
    pub(crate) fn program_queue_pairs(&self) -> usize {
        self.qps.len() - self.core.flows
    }

    /// Does what is left to do for flows.
    pub(super) fn step_flows(&mut self) {
        while let Some(step) = self.core.flow_steps.pop_front() {
            match step {
                FlowStep::Send(number) => self.send_by_flows(number),
                FlowStep::Fail(number) => {
                    self.qps
                        .get_mut(number)
                        .iter_mut()
                        .for_each(|qp| qp.enter_error(&mut self.core));
                }
                FlowStep::Done { flow, of, posted, status } => {
                    self.flow_done((flow, of), *posted, status);
                }
            }
        }
    }

    // ---- Sending ----

    fn send_by_flows(&mut self, number: u32) {
        while self.send_next(number) {}
        if let Some(qp) = self.qps.get_mut(number)
            && qp.state == State::IBV_QPS_SQD
            && qp.draining
            && qp.flows.iter().all(|flow| flow.in_flight == 0)
        {
            qp.draining = false;
            if std::mem::take(&mut qp.drained_event) {
                qp.raise(&mut self.core, Event::IBV_EVENT_SQ_DRAINED);
            }
        }
    }

    /// Hands a request to a flow; false: there is none, or all wait.
    fn send_next(&mut self, number: u32) -> bool {
        let Some(qp) = self.qps.get_mut(number) else { return false };
        if qp.state != State::IBV_QPS_RTS || qp.sq.posted.is_empty() {
            return false;
        }
        let is_srd = qp.transport == Transport::Srd;
        let (posted, mut full) = (qp.sq.posted.len(), Vec::new());
        let (first, last) = match is_srd {
            true => (self.core.random.below(posted.min(WINDOW) as u64) as usize, posted),
            false => (0, 1),
        };
        for index in (first..last).chain(0..first) {
            let Some(qp) = self.qps.get(number) else { return false };
            let to = qp.sq.posted[index].request.destination;
            // An address handle is for the queue pairs of its domain.
            let Some(to) = to.filter(|to| to.pd == qp.pd) else {
                return self.refuse_request(number, index);
            };
            if full.contains(&to) {
                continue;
            }
            match self.flow_to(number, to) {
                Some(place) => return self.hand_over(number, index, place),
                None => full.push(to),
            }
        }
        false
    }

    /// A request that no flow can carry.
    fn refuse_request(&mut self, number: u32, index: usize) -> bool {
        let Some(qp) = self.qps.get_mut(number) else { return false };
        let Some(posted) = qp.sq.posted.remove(index) else { return false };
        qp.complete_send(&mut self.core, posted, Status::IBV_WC_LOC_QP_OP_ERR);
        if qp.transport == Transport::DcInitiator {
            qp.enter_error(&mut self.core);
        }
        true
    }

    /// The place of a flow of the queue pair that takes another request to this destination.
    fn flow_to(&mut self, number: u32, to: Destination) -> Option<usize> {
        let qp = self.qps.get(number)?;
        let (most, most_of_all, depth) = match qp.transport {
            Transport::Srd => (TO_ONE, TO_ALL, 1),
            _ => (1, 1, IN_FLIGHT),
        };
        let flows = &qp.flows;
        if let Some(place) = flows.iter().position(|flow| flow.to == to && flow.in_flight < depth) {
            return Some(place);
        }
        if flows.iter().filter(|flow| flow.to == to).count() >= most {
            return None;
        }
        if flows.len() >= most_of_all {
            let idle = flows.iter().find(|flow| flow.in_flight == 0)?.number;
            self.end_flow(idle);
        }
        self.begin_flow(number, to)
    }

    fn begin_flow(&mut self, of: u32, to: Destination) -> Option<usize> {
        let began = self.core.begin_flow();
        let qp = self.qps.get(of)?;
        let own = qp.attr.qkey;
        let (transport, key) = match qp.transport {
            Transport::Srd => (Transport::SrdFlow, own_key(to.key as u32, own).into()),
            _ => (Transport::DcFlow, to.key),
        };
        let (pd, mtu, attr) = (qp.pd, qp.mtu, qp.attr);
        let number = self.qps.insert(|number| {
            let mut flow = QueuePair::new(number, transport, mtu);
            let header = FlowEth { flow: number, source: of, began, key };
            flow.flow = Some(Flow { of, header, sends: true, address_handle: 0 });
            (flow.pd, flow.path, flow.state) = (pd, Some(to.path), State::IBV_QPS_RTS);
            flow.attr = attr;
            flow.attr.dest_qp_num = to.qpn;
            flow.attr.max_dest_rd_atomic = 0;
            if transport == Transport::SrdFlow {
                (flow.attr.timeout, flow.attr.retry_cnt) = (SRD_TIMEOUT, SRD_RETRIES);
                flow.attr.max_rd_atomic = 1;
            }
            flow
        })?;
        self.core.flows += 1;
        let qp = self.qps.get_mut(of)?;
        qp.flows.push(OutboundFlow { number, to, in_flight: 0 });
        Some(qp.flows.len() - 1)
    }

    fn hand_over(&mut self, number: u32, index: usize, place: usize) -> bool {
        let Some(qp) = self.qps.get_mut(number) else { return false };
        let is_srd = qp.transport == Transport::Srd;
        let Some(posted) = qp.sq.posted.remove(index) else { return false };
        let outbound = &mut qp.flows[place];
        outbound.in_flight += 1;
        let flow = outbound.number;
        let Some(flow) = self.qps.get_mut(flow) else { return false };
        flow.push_send(posted.request, posted.seal);
        // Its places are those of the other queue pair.
        flow.sq.used = 0;
        if is_srd && self.core.random.below(HELD) == 0 {
            let until = self.core.now() + self.core.random.below(HELD_FOR);
            flow.sq.not_ready_until = Some(until);
            flow.schedule(&mut self.core);
        }
        flow.send_requests(&mut self.core);
        true
    }

    fn flow_done(&mut self, (flow, of): (u32, u32), posted: Posted, status: Status) {
        if self.qps.get(flow).is_some_and(|flow| !flow.is_up()) {
            self.end_flow(flow);
        }
        let Some(qp) = self.qps.get_mut(of) else { return };
        if let Some(outbound) = qp.flows.iter_mut().find(|outbound| outbound.number == flow) {
            outbound.in_flight -= 1;
        }
        let is_srd = qp.transport == Transport::Srd;
        // As EFA tells it.
        let status = match status {
            Status::IBV_WC_RETRY_EXC_ERR if is_srd => Status::IBV_WC_RESP_TIMEOUT_ERR,
            status => status,
        };
        qp.complete_send(&mut self.core, posted, status);
        if status != Status::IBV_WC_SUCCESS && !is_srd {
            // The steps of the others, which were flushed, are before it.
            self.core.flow_steps.push_back(FlowStep::Fail(of));
        }
        self.core.flow_steps.push_back(FlowStep::Send(of));
    }

    // ---- Ending ----

    /// Ends the flows of a queue pair, and those that reach it. What they have not completed is the queue pair's again.
    pub(super) fn end_flows(&mut self, number: u32) {
        if !self.qps.get(number).is_some_and(|qp| qp.transport.has_flows()) {
            return;
        }
        let serves = |qp: &QueuePair| qp.flow.is_some_and(|flow| flow.of == number);
        let flows: Vec<u32> =
            self.qps.iter().filter(|(_, qp)| serves(qp)).map(|(number, _)| number).collect();
        flows.into_iter().for_each(|flow| self.end_flow(flow));
    }

    /// Ends the flows of a peer that can no longer say that they are over.
    pub(super) fn end_flows_of(&mut self, peer: IpAddr) {
        let of_peer = self.core.inbound.range((peer, 0)..=(peer, u16::MAX));
        let flows: Vec<u32> = of_peer.filter_map(|(_, flow)| flow.number).collect();
        flows.into_iter().for_each(|flow| self.end_flow(flow));
    }

    fn end_flow(&mut self, number: u32) {
        let Some(mut qp) = self.qps.remove(number) else { return };
        qp.send_last_answers(&mut self.core);
        self.core.flows -= 1;
        self.core.timers.forget(Timer::QueuePair(number), &mut qp.scheduled);
        let (Some(flow), Some(path)) = (qp.flow, qp.path) else { return };
        if !flow.sends {
            if let Some(inbound) = self.core.inbound.get_mut(&place(path.to, &flow.header)) {
                inbound.number = None;
            }
            self.core.inbound_ended = true;
            qp.flush_receives(&mut self.core);
            if let Some(target) = self.qps.get_mut(flow.of) {
                qp.rq.into_iter().rev().for_each(|receive| target.rq.push_front(receive));
            }
            return;
        }
        if let Some(of) = self.qps.get_mut(flow.of) {
            of.flows.retain(|outbound| outbound.number != number);
            qp.sq.posted.into_iter().rev().for_each(|posted| of.sq.posted.push_front(posted));
        }
        let to = qp.attr.dest_qp_num;
        let bth = Bth::new(qp.transport.bits() | opcode::DISCONNECT, to, 0);
        // It reads no memory, so nothing can be denied.
        let _ = self.core.transmit(path, bth, |_, to| {
            flow.header.write(to);
            Ok(())
        });
    }

    // ---- Receiving ----

    /// A packet of a peer's flow, for a queue pair of this number.
    pub(super) fn request_of_flow(
        &mut self,
        number: u32,
        (from, to): (IpAddr, IpAddr),
        bth: &Bth,
        body: &[u8],
    ) -> Result<(), DropReason> {
        let mut reader = Reader(body);
        let header = reader.flow().ok_or(DropReason::Transport)?;
        let path = Path { from: to, to: from };
        if bth.opcode & !opcode::TRANSPORT == opcode::DISCONNECT {
            self.end_inbound(from, &header);
            return Ok(());
        }
        let known = self.core.inbound.get(&place(from, &header)).copied();
        let flow = match known {
            Some(InboundFlow { began, number }) if began == header.began => {
                number.ok_or(DropReason::State)?
            }
            // It is late.
            Some(InboundFlow { began, .. }) if began > header.began => {
                return Err(DropReason::State);
            }
            // The first packet comes later, or was lost.
            _ if bth.psn != 0 => return Err(DropReason::State),
            _ => match self.admit(number, bth, &header, path) {
                Ok(flow) => flow,
                Err((nak, why)) => {
                    self.refuse_flow(path, bth, &header, nak);
                    return Err(why);
                }
            },
        };
        let of = self.qps.get(flow).and_then(|qp| qp.flow).map(|flow| flow.of);
        if of != Some(number) {
            return Err(DropReason::Peer);
        }
        // The flow takes the receives of its queue pair.
        let target = self.qps.get_mut(number).ok_or(DropReason::NoQueuePair)?;
        let receives = std::mem::take(&mut target.rq);
        let Some(qp) = self.qps.get_mut(flow) else { return Err(DropReason::State) };
        qp.rq.extend(receives);
        let is_live = qp.receives();
        if is_live {
            qp.request(&mut self.core, bth, reader.rest());
        }
        let receives = std::mem::take(&mut qp.rq);
        if let Some(target) = self.qps.get_mut(number) {
            target.rq = receives;
        }
        if is_live { Ok(()) } else { Err(DropReason::State) }
    }

    /// Makes this side's half of a flow.
    fn admit(
        &mut self,
        number: u32,
        bth: &Bth,
        header: &FlowEth,
        path: Path,
    ) -> Result<u32, (Nak, DropReason)> {
        let nobody = |why| (Nak::Destination, why);
        let target = self.qps.get(number).ok_or(nobody(DropReason::NoQueuePair))?;
        let (transport, key) = match (target.transport, bth.opcode & opcode::TRANSPORT) {
            (Transport::Srd, opcode::SRD) => (Transport::SrdFlow, target.attr.qkey.into()),
            (Transport::DcTarget, opcode::DC) => (Transport::DcFlow, target.access_key),
            _ => return Err(nobody(DropReason::Transport)),
        };
        if !target.receives() {
            return Err(nobody(DropReason::State));
        }
        if header.key != key {
            let nak =
                if transport == Transport::SrdFlow { Nak::Destination } else { Nak::RemoteAccess };
            return Err((nak, DropReason::QKey));
        }
        let place = place(path.to, header);
        if !self.has_place(&place) {
            return Err((Nak::RemoteOperation, DropReason::State));
        }
        // Its end was lost.
        if let Some(InboundFlow { number: Some(before), .. }) =
            self.core.inbound.get(&place).copied()
        {
            self.end_flow(before);
        }
        let Some(target) = self.qps.get(number) else {
            return Err(nobody(DropReason::NoQueuePair));
        };
        let (pd, cq, srq, mtu, attr) =
            (target.pd, target.receive_cq, target.srq, target.mtu, target.attr);
        let address_handle = match transport {
            Transport::SrdFlow => self.core.address_number(pd, path.to),
            _ => 0,
        };
        let fetches = self.core.settings.max_rd_atomic;
        let made = self.qps.insert(|flow| {
            let mut qp = QueuePair::new(flow, transport, mtu);
            qp.flow = Some(Flow { of: number, header: *header, sends: false, address_handle });
            (qp.pd, qp.receive_cq, qp.srq) = (pd, cq, srq);
            (qp.path, qp.state) = (Some(path), State::IBV_QPS_RTR);
            qp.attr.min_rnr_timer = match transport {
                Transport::SrdFlow => SRD_NOT_READY,
                _ => attr.min_rnr_timer,
            };
            qp.attr.max_dest_rd_atomic = fetches;
            qp.attr.dest_qp_num = header.flow;
            qp.attr.qp_access_flags = match transport {
                // The rights are those of the regions alone.
                Transport::SrdFlow => {
                    Access::IBV_ACCESS_REMOTE_WRITE.0 | Access::IBV_ACCESS_REMOTE_READ.0
                }
                _ => attr.qp_access_flags,
            };
            qp.responder.is_established = true;
            qp
        });
        let made = made.ok_or((Nak::RemoteOperation, DropReason::State))?;
        self.core.flows += 1;
        self.core.inbound.insert(place, InboundFlow { began: header.began, number: Some(made) });
        Ok(made)
    }

    /// Whether a flow of a peer can be kept. Those that have ended make room.
    fn has_place(&mut self, place: &(IpAddr, u16)) -> bool {
        let inbound = &mut self.core.inbound;
        if inbound.len() < MOST_INBOUND || inbound.contains_key(place) {
            return true;
        }
        // Looking for them takes long.
        if std::mem::take(&mut self.core.inbound_ended) {
            inbound.retain(|_, flow| flow.number.is_some());
        }
        inbound.len() < MOST_INBOUND
    }

    /// Tells the peer that nobody takes its message.
    fn refuse_flow(&mut self, path: Path, bth: &Bth, header: &FlowEth, nak: Nak) {
        let answer = Bth::new(bth.opcode & opcode::TRANSPORT | opcode::ACK, header.flow, bth.psn);
        let aeth = Aeth { syndrome: Syndrome::Nak(nak).code(), msn: 0 };
        let _ = self.core.transmit(path, answer, |_, to| {
            to.extend_from_slice(&aeth.bytes());
            Ok(())
        });
    }

    /// A peer's flow is over.
    fn end_inbound(&mut self, from: IpAddr, header: &FlowEth) {
        let place = place(from, header);
        match self.core.inbound.get(&place).copied() {
            Some(InboundFlow { began, .. }) if began > header.began => return,
            Some(InboundFlow { number, .. }) => number.into_iter().for_each(|it| self.end_flow(it)),
            None if !self.has_place(&place) => return,
            None => {}
        }
        // Its first packet may come later than this one.
        self.core.inbound_ended = true;
        let ended = InboundFlow { began: header.began, number: None };
        self.core.inbound.insert(place, ended);
    }
}

/// The number without its tag, so that there are few of one peer.
fn place(from: IpAddr, header: &FlowEth) -> (IpAddr, u16) {
    (from, header.flow as u16)
}
