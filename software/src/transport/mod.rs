//! The device itself: a state machine driven by packets, verbs and time.
//!
//! It does no input and output of its own: it sends packets by a [`Link`], and reads the time from a
//! [`Clock`]. With a socket, a thread drives it; with virtual time, the test does.

pub(crate) mod completer;
pub(crate) mod completion_faults;
pub(crate) mod connection;
pub(crate) mod core;
pub(crate) mod counters;
pub(crate) mod device_memory;
pub(crate) mod drops;
pub(crate) mod events;
mod flows;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz_target;
pub(crate) mod memory;
pub(crate) mod modify;
#[cfg(test)]
mod mutations;
pub(crate) mod objects;
mod one_sided;
pub(crate) mod queue_pair;
pub(crate) mod queues;
mod registration;
pub(crate) mod requester;
pub(crate) mod responder;
#[cfg(any(test, fuzzing))]
pub(crate) mod rig;
mod sq_rq_state;
pub(crate) mod state;
pub(crate) mod table;
#[cfg(test)]
mod tests;
pub(crate) mod timers;
pub(crate) mod unreliable;
pub(crate) mod windows;
pub(crate) mod work;
pub(crate) mod xrc;
pub(crate) mod xrc_domains;

use std::net::IpAddr;
use std::sync::Arc;

use self::connection::Connections;
use self::core::Core;
use self::drops::DropReason;
use self::queue_pair::{QueuePair, Transport};
use self::table::{Table, Tag};
use self::timers::Timer;
use self::work::Path;
use crate::ffi::{ibv_event_type, ibv_qp_state};
use crate::link::receive::Source;
use crate::link::{Clock, Link, Time};
use crate::settings::Settings;
use crate::wire::header::{Bth, Deth, PKEY, Reader};
use crate::wire::management::{MANAGEMENT, MANAGEMENT_QKEY};
use crate::wire::{PORT, icrc, opcode};

/// The queue pair number that addresses all members of a multicast group.
const MULTICAST: u32 = 0xff_ffff;

/// The first number of a queue pair; 0 and 1 are reserved for subnet management.
const FIRST_QUEUE_PAIR: u32 = 0x11;

#[derive(Debug)]
pub(crate) struct Engine {
    pub(crate) qps: Table<QueuePair>,
    pub(crate) core: Core,
    pub(crate) connections: Connections,
}

impl Engine {
    pub(crate) fn new(settings: Settings, clock: Arc<dyn Clock>, link: Box<dyn Link>) -> Self {
        Self {
            qps: Table::new(Tag::High, FIRST_QUEUE_PAIR, u32::MAX),
            connections: Connections::new(settings.guid(), link.seed()),
            core: Core::new(settings, clock, link),
        }
    }

    /// Handles a received packet, from its base transport header to the invariant CRC.
    pub(crate) fn receive(&mut self, from: (IpAddr, u16), to: IpAddr, packet: &[u8]) {
        self.take(from, to, packet, true);
    }

    /// Receives a packet that may have no invariant CRC, since it has not left the machine's memory.
    pub(crate) fn receive_from(&mut self, from: Source, to: IpAddr, packet: &[u8]) {
        self.take((from.address.ip(), from.address.port()), to, packet, from.is_sealed);
    }

    fn take(&mut self, from: (IpAddr, u16), to: IpAddr, packet: &[u8], is_sealed: bool) {
        if !self.core.is_up(to) {
            return;
        }
        let counters = self.core.port_counters(to);
        counters.packets_received += 1;
        counters.bytes_received += packet.len() as u64;
        let exact = self.core.settings.is_simulated;
        let Some((bth, body)) = check(from, to, packet, is_sealed.then_some(exact)) else {
            self.core.port_counters(to).packets_malformed += 1;
            return;
        };
        let (from, number) = (from.0, bth.qpn);
        // The highest bit distinguishes full and limited members; both may talk to a full one.
        if bth.pkey & 0x7fff != PKEY & 0x7fff {
            return self.core.count_drop(from, number, DropReason::Partition);
        }
        if number == MULTICAST {
            return self.multicast((from, to), &bth, body);
        }
        let delivered = if to.is_multicast() {
            Err(DropReason::GroupNumber)
        } else if number == MANAGEMENT {
            self.manage(Path { from: to, to: from }, &bth, body)
        } else {
            self.deliver(number, (from, to), &bth, body)
        };
        if let Err(why) = delivered {
            self.core.counters.packets_unexpected += 1;
            // A late packet is no mistake: an answer, and a request of a connection that this side has ended.
            match is_answer(&bth) {
                true => {}
                false if self.is_over(number, &bth, why) => self.core.count_late(why),
                false => self.core.count_drop(from, number, why),
            }
        }
    }

    /// Whether a packet is dropped since its connection has ended here, of which its sender learns by its retries.
    fn is_over(&self, number: u32, bth: &Bth, why: DropReason) -> bool {
        let transport = bth.opcode & opcode::TRANSPORT;
        let is_reliable = transport != opcode::UC && transport != opcode::UD;
        match why {
            DropReason::NoQueuePair => is_reliable && self.qps.is_gone(number),
            DropReason::State => {
                let qp = self.qps.get(number);
                is_reliable && qp.is_some_and(|qp| qp.state == ibv_qp_state::IBV_QPS_ERR)
            }
            // Messages of connections that both sides have left.
            DropReason::Management => true,
            _ => false,
        }
    }

    fn deliver(
        &mut self,
        number: u32,
        addresses: (IpAddr, IpAddr),
        bth: &Bth,
        body: &[u8],
    ) -> Result<(), DropReason> {
        if matches!(bth.opcode & opcode::TRANSPORT, opcode::SRD | opcode::DC) && !is_answer(bth) {
            return self.request_of_flow(number, addresses, bth, body);
        }
        let qp = self.qps.get_mut(number).ok_or(DropReason::NoQueuePair)?;
        if !qp.receives() {
            return Err(DropReason::State);
        }
        deliver(qp, &mut self.core, addresses, bth, body)
    }

    /// Handles a datagram to queue pair 1.
    fn manage(&mut self, path: Path, bth: &Bth, body: &[u8]) -> Result<(), DropReason> {
        let mut reader = Reader(body);
        let deth = reader.deth();
        if bth.opcode != opcode::UD | opcode::SEND_ONLY {
            return Err(DropReason::Transport);
        }
        if deth.is_none_or(|deth| deth.qkey != MANAGEMENT_QKEY) {
            return Err(DropReason::QKey);
        }
        let mad = reader.rest().try_into().map_err(|_| DropReason::Management)?;
        let fits = self.connections.receive(self.core.now(), path, mad);
        fits.then_some(()).ok_or(DropReason::Management)
    }

    /// Sends what the connections have to say.
    fn send_management(&mut self) {
        for (path, mad) in self.connections.outbox().drain(..) {
            let bth = Bth::new(opcode::UD | opcode::SEND_ONLY, MANAGEMENT, 0);
            // Reads no memory, so nothing can be denied.
            let _ = self.core.transmit(path, bth, |_, to| {
                Deth { qkey: MANAGEMENT_QKEY, source: MANAGEMENT }.write(to);
                to.extend_from_slice(&*mad);
                Ok(())
            });
        }
    }

    fn multicast(&mut self, addresses: (IpAddr, IpAddr), bth: &Bth, body: &[u8]) {
        let members = self.core.groups.get(&addresses.1).cloned().unwrap_or_default();
        if members.is_empty() {
            self.core.count_drop(addresses.0, MULTICAST, DropReason::NoGroup);
        }
        for number in members {
            if let Err(why) = self.deliver(number, addresses, bth, body) {
                self.core.count_drop(addresses.0, number, why);
            }
        }
    }

    /// A datagram that this device has sent to a group has reached no device.
    pub(crate) fn reached_nobody(&mut self, group: IpAddr) {
        self.core.count_drop(group, MULTICAST, DropReason::NoGroup);
    }

    /// The time at which [`advance`](Self::advance) must be called; `Some(0)`: at once.
    pub(crate) fn due(&self) -> Option<Time> {
        if self.core.runnable.is_empty() { self.core.timers.next() } else { Some(0) }
    }

    /// When [`advance_connections`](Self::advance_connections) is due.
    pub(crate) fn connections_due(&self) -> Option<Time> {
        self.connections.due()
    }

    /// Repeats the messages of the connection manager that were not answered.
    pub(crate) fn advance_connections(&mut self) {
        self.connections.advance(self.core.now());
    }

    /// Whether a timer has expired.
    pub(crate) fn is_timer_due(&self) -> bool {
        self.core.timers.next().is_some_and(|at| at <= self.core.now())
    }

    /// Sends the acknowledgements that were held back.
    pub(crate) fn release_answers(&mut self) {
        for number in std::mem::take(&mut self.core.held) {
            if let Some(qp) = self.qps.get_mut(number) {
                qp.send_answers(&mut self.core);
            }
        }
    }

    /// Runs the timers that are due, and gives a turn to each queue pair that has more to send.
    pub(crate) fn advance(&mut self) {
        let now = self.core.now();
        while let Some(timer) = self.core.timers.pop(now) {
            match timer {
                Timer::QueuePair(number) => {
                    if let Some(qp) = self.qps.get_mut(number) {
                        qp.timer(&mut self.core, now);
                    }
                }
                Timer::CompletionQueue(number) => self.core.completion_timer(number, now),
                Timer::Events => self.core.events_timer(),
                Timer::Link => self.core.link_timer(),
            }
        }
        for _ in 0..self.core.runnable.len() {
            let Some(number) = self.core.runnable.pop_front() else { break };
            if let Some(qp) = self.qps.get_mut(number) {
                qp.is_runnable = false;
                qp.responder.give_turn(self.core.round);
                qp.send_answers(&mut self.core);
                qp.send_requests(&mut self.core);
            }
        }
    }

    /// The process at this address has ended, or its device has.
    pub(crate) fn lose_peer(&mut self, peer: IpAddr) {
        self.connections.lose_peer(peer, self.core.now());
        self.end_flows_of(peer);
        self.core.link().lose_peer(peer);
    }

    /// The device is removed: nothing happens any more. No completion comes, not even for what is posted.
    pub(crate) fn remove(&mut self) {
        self.settle();
        for qp in self.qps.iter_mut() {
            self.core.keep_out(qp.number);
            self.core.timers.forget(Timer::QueuePair(qp.number), &mut qp.scheduled);
            qp.state = ibv_qp_state::IBV_QPS_ERR;
            qp.is_runnable = false;
            qp.sq.stop();
            qp.responder.stop();
        }
        self.core.runnable.clear();
        self.core.flow_steps.clear();
        self.connections.clear();
        for port in 0..self.core.ports.len() {
            self.core.drop_rest(port);
        }
        self.core.end_channels();
        self.core.wake_sleepers();
    }

    /// Must follow every call from outside: handles overruns, and sends the queued packets.
    pub(crate) fn settle(&mut self) {
        while let Some(cq) = self.core.overrun.pop() {
            let users: Vec<u32> = self
                .qps
                .iter()
                .filter(|(_, qp)| qp.send_cq == cq || qp.receive_cq == cq)
                .map(|(number, _)| number)
                .collect();
            for number in users {
                if let Some(qp) = self.qps.get_mut(number) {
                    qp.enter_error(&mut self.core);
                    qp.raise(&mut self.core, ibv_event_type::IBV_EVENT_QP_FATAL);
                }
            }
        }
        self.step_flows();
        self.send_management();
        self.core.flush();
        self.core.round += 1;
    }
}

/// Checks that hold for every packet. `exact`: the identification in the IPv4 header is known to be 0; `None`: it has no
/// invariant CRC.
fn check(
    from: (IpAddr, u16),
    to: IpAddr,
    packet: &[u8],
    exact: Option<bool>,
) -> Option<(Bth, &[u8])> {
    let (inside, sent) = packet.split_last_chunk::<{ icrc::SIZE }>()?;
    let bth = Bth::parse(inside)?;
    let body = inside.get(Bth::SIZE..)?;
    let body = body.get(..body.len().checked_sub(bth.pad.into())?)?;
    let whole = inside.len() % 4 == 0 && work::is_way(from.0, to);
    let sent = u32::from_le_bytes(*sent);
    let intact = whole
        && match exact {
            None => true,
            Some(true) => icrc::compute(from, (to, PORT), inside) == sent,
            Some(false) => icrc::matches(from, (to, PORT), inside, sent),
        };
    intact.then_some((bth, body))
}

/// Whether a packet answers a request of a reliable connection.
fn is_answer(bth: &Bth) -> bool {
    matches!(bth.opcode & !opcode::TRANSPORT, opcode::READ_FIRST..=opcode::ATOMIC_ACK)
}

/// Hands a packet to a queue pair, unless it is not for it.
fn deliver(
    qp: &mut QueuePair,
    core: &mut Core,
    (from, to): (IpAddr, IpAddr),
    bth: &Bth,
    body: &[u8],
) -> Result<(), DropReason> {
    if bth.opcode & opcode::TRANSPORT != qp.transport.bits() {
        return Err(DropReason::Transport);
    }
    if qp.transport == Transport::Ud {
        qp.datagram(core, (from, to), bth, body);
        return Ok(());
    }
    if qp.path.is_none_or(|path| path.to != from || path.from != to) {
        return Err(DropReason::Peer);
    }
    if qp.state == ibv_qp_state::IBV_QPS_RTR && !qp.responder.is_established {
        qp.responder.is_established = true;
        qp.raise(core, ibv_event_type::IBV_EVENT_COMM_EST);
    }
    match (qp.transport, is_answer(bth)) {
        (Transport::Rc | Transport::XrcSend | Transport::SrdFlow | Transport::DcFlow, true) => {
            qp.response(core, bth, body);
        }
        (Transport::Rc | Transport::XrcReceive, false) => qp.request(core, bth, body),
        // A sending XRC queue pair carries out no requests, and a receiving one has none that are answered.
        (Transport::Uc, _) => qp.unreliable(core, bth, body),
        _ => return Err(DropReason::Transport),
    }
    Ok(())
}
