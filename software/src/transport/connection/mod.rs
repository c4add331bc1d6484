//! The protocol of the connection manager: volume 1, chapter 12, with the times and the choices of Linux.
//!
//! A state machine without input, output or clock: messages, calls and time go in; messages go to an outbox, and what the
//! program must know to the [`Outlet`] of the connection's [`Owner`].

mod arrived;
#[cfg(any(test, fuzzing))]
pub(crate) mod hostile;
mod listener;
#[cfg(test)]
mod model;
mod outlet;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

pub(crate) use self::listener::Listener;
use self::listener::Listeners;
pub(crate) use self::outlet::{Arrived, Event, Outlet, Owner};
use super::queue_pair::Transport;
use super::work::Path;
use crate::link::Time;
use crate::wire::header::PKEY;
use crate::wire::management::{
    Disconnect, Disconnected, Header, Mad, Message, Processing, ReadyToUse, Rejection, Reply,
    Request, ServiceReply, ServiceRequest, gid, reason, status,
};

/// The time for a response: 4.096 us * 2^20.
const RESPONSE: u8 = 20;
/// How often a message is repeated.
const RETRIES: u8 = 15;
/// The lifetime of a packet: 4.096 us * 2^16.
pub(crate) const LIFETIME: u8 = 16;
/// The time that an MRA asks for, and the most that one gets.
const PROCESSING: u8 = 24;
/// The longest a connection is remembered for after its end, and the longest time between two repetitions of a message,
/// whatever the peer has asked for.
const LONGEST: u8 = RESPONSE + 2;
/// How many requests of peers may wait for a decision of the program.
const MOST_WAITING: u32 = 8192;
/// And how many of one peer: a full backlog.
const MOST_OF_PEER: u32 = 1024;

/// 4.096 us * 2^exponent, as Linux has it: in milliseconds, and one at least.
fn time(exponent: u8) -> Time {
    1_000_000 << exponent.saturating_sub(8)
}

/// The call does not fit the state of the connection, or there is none any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WrongState;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    ReqSent,
    ReqReceived,
    RepSent,
    RepReceived,
    Established,
    DreqSent,
    DreqReceived,
    Timewait,
    ServiceSent,
    ServiceReceived,
    /// The request for a service was answered; it may come again.
    ServiceAnswered,
}

impl State {
    /// The program must decide.
    fn waits(self) -> bool {
        matches!(self, Self::ReqReceived | Self::RepReceived | Self::ServiceReceived)
    }
}

/// A message that is repeated until it is answered.
#[derive(Debug)]
struct Repeated {
    mad: Box<Mad>,
    interval: Time,
    left: u8,
    /// The peer has asked for more time since it was sent last.
    is_extended: bool,
}

/// The queue pair's attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Attributes {
    pub(crate) path: Path,
    pub(crate) transport: Transport,
    pub(crate) qpn: u32,
    pub(crate) psn: u32,
    pub(crate) remote_qpn: u32,
    pub(crate) remote_psn: u32,
    /// Its depth as a responder.
    pub(crate) resources: u8,
    /// Its depth as a requester.
    pub(crate) depth: u8,
    pub(crate) retry: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) mtu: u8,
    pub(crate) ack_timeout: u8,
}

#[derive(Debug)]
struct Connection {
    /// None: the program has not accepted it yet, or has given it up.
    owner: Option<Owner>,
    state: State,
    attributes: Attributes,
    /// The peer's number for it; 0 while that is not known.
    remote: u32,
    guid: u64,
    transaction: u64,
    repeated: Option<Repeated>,
    /// Sent again if the peer repeats itself.
    last: Option<Box<Mad>>,
    /// How long the peer may take to answer, and how often it is asked again.
    interval: Time,
    retries: u8,
    due: Option<Time>,
    /// The program was told that it is disconnected.
    is_disconnected: bool,
}

impl Connection {
    fn tell_disconnected(&mut self, is_answered: bool) {
        self.is_disconnected = true;
        self.tell(Event::Disconnected(is_answered));
    }

    fn tell(&self, event: Event) {
        if let Some(owner) = &self.owner {
            owner.outlet.tell(owner.id, event);
        }
    }
}

/// The address and the GUID of a peer, its number of a connection, and whether that numbers a request for a service: these are
/// counted apart.
type Remote = (IpAddr, u64, u32, bool);

#[derive(Debug)]
pub(crate) struct Connections {
    /// This device's.
    guid: u64,
    random: u64,
    last: u32,
    /// Keys are this side's numbers.
    all: BTreeMap<u32, Connection>,
    by_remote: BTreeMap<Remote, u32>,
    /// Keys are peers' queue pairs of which packets are expected.
    by_queue_pair: BTreeMap<(IpAddr, u64, u32), u32>,
    listeners: Listeners,
    timers: BTreeSet<(Time, u32)>,
    waiting: u32,
    /// Waiting requests of each peer.
    waiting_of: BTreeMap<IpAddr, u32>,
    outbox: Vec<(Path, Box<Mad>)>,
}

impl Connections {
    /// `seed` decides the numbers of connections and packets.
    pub(crate) fn new(guid: u64, seed: u64) -> Self {
        let mut new = Self {
            guid,
            random: seed | 1,
            last: 0,
            all: BTreeMap::new(),
            by_remote: BTreeMap::new(),
            by_queue_pair: BTreeMap::new(),
            listeners: Listeners::default(),
            timers: BTreeSet::new(),
            waiting: 0,
            waiting_of: BTreeMap::new(),
            outbox: Vec::new(),
        };
        new.last = new.random();
        new
    }

    /// xorshift64*
    fn random(&mut self) -> u32 {
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        (self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    }

    /// A number that no connection has.
    fn next_number(&mut self) -> u32 {
        loop {
            self.last = self.last.wrapping_add(1);
            if self.last != 0 && !self.all.contains_key(&self.last) {
                return self.last;
            }
        }
    }

    // ---- What the engine asks ----

    /// The messages that are to be sent.
    pub(crate) fn outbox(&mut self) -> &mut Vec<(Path, Box<Mad>)> {
        &mut self.outbox
    }

    pub(crate) fn due(&self) -> Option<Time> {
        self.timers.first().map(|timer| timer.0)
    }

    /// Whether the program must decide about a connection: it will, or the peer gives up.
    pub(crate) fn waits_for_program(&self) -> bool {
        self.waiting > 0
    }

    #[cfg(any(test, fuzzing))]
    /// How many connections there are, those included that are remembered after their end.
    pub(crate) fn count(&self) -> usize {
        self.all.len()
    }

    /// Repeats what was not answered, and forgets what is long over.
    pub(crate) fn advance(&mut self, now: Time) {
        while let Some(&(at, number)) = self.timers.first()
            && at <= now
        {
            self.timers.pop_first();
            if let Some(connection) = self.all.get_mut(&number) {
                connection.due = None;
                self.expired(number, now);
            }
        }
    }

    fn expired(&mut self, number: u32, now: Time) {
        let Some(connection) = self.all.get_mut(&number) else { return };
        let Some(repeated) = &mut connection.repeated else {
            if connection.is_disconnected {
                connection.tell(Event::TimewaitExit);
            }
            return self.forget(number);
        };
        if let Some(left) = repeated.left.checked_sub(1) {
            repeated.left = left;
            repeated.is_extended = false;
            let at = now + repeated.interval;
            let (path, mad) = (connection.attributes.path, repeated.mad.clone());
            self.outbox.push((path, mad));
            return self.set_timer(number, at);
        }
        match connection.state {
            State::DreqSent => {
                connection.tell_disconnected(false);
                self.enter_timewait(number, now);
            }
            state => {
                connection.tell(Event::Unreachable);
                if state == State::ReqSent {
                    self.reject_late(number);
                }
                self.forget(number);
            }
        }
    }

    /// Nothing can reach this peer any more: its process has ended.
    pub(crate) fn lose_peer(&mut self, peer: IpAddr, now: Time) {
        let of = |connection: &Connection| connection.attributes.path.to == peer;
        let lost: Vec<u32> = self.all.iter().filter(|(_, c)| of(c)).map(|(n, _)| *n).collect();
        for number in lost {
            self.lose(number, now);
        }
    }

    fn lose(&mut self, number: u32, now: Time) {
        let Some(connection) = self.all.get_mut(&number) else { return };
        match connection.state {
            State::Established | State::DreqSent => {
                connection.tell_disconnected(true);
                self.enter_timewait(number, now);
            }
            State::DreqReceived => self.enter_timewait(number, now),
            State::Timewait | State::ServiceAnswered => {}
            State::ServiceReceived => self.forget(number),
            State::ReqSent | State::ServiceSent | State::RepSent | State::ReqReceived => {
                connection.tell(Event::Unreachable);
                self.forget(number);
            }
            State::RepReceived => {
                connection.tell(Event::Rejected(reason::TIMEOUT, Box::new([0; 148])));
                self.enter_timewait(number, now);
            }
        }
    }

    /// The device is removed: nothing is sent any more, and nobody is told.
    pub(crate) fn clear(&mut self) {
        let all: Vec<u32> = self.all.keys().copied().collect();
        all.into_iter().for_each(|number| self.forget(number));
        self.listeners = Listeners::default();
        self.outbox.clear();
    }

    // ---- Calls ----

    /// Adds a listener, or replaces that of the same owner.
    pub(crate) fn listen(&mut self, listener: Listener) {
        self.listeners.add(listener);
    }

    pub(crate) fn stop_listening(&mut self, id: u32) {
        self.listeners.remove(id);
    }

    /// Sends a REQ. What the program does not decide is filled in here. Returns the number of the connection.
    pub(crate) fn connect(
        &mut self,
        now: Time,
        (path, owner): (Path, Owner),
        modifier: u32,
        transport: Transport,
        mut request: Request,
    ) -> u32 {
        let number = self.next_number();
        request.local = number;
        request.guid = self.guid;
        request.psn = self.random() & 0xff_ffff;
        (request.local_timeout, request.remote_timeout) = (RESPONSE, RESPONSE);
        request.manager_retries = RETRIES;
        request.pkey = PKEY;
        (request.local_lid, request.remote_lid) = (0xffff, 0xffff);
        (request.from, request.to) = (gid(path.from), gid(path.to));
        request.hop_limit = 64;
        (request.transport, request.extended) = match transport {
            Transport::Uc => (1, 0),
            Transport::XrcSend | Transport::XrcReceive => (3, 1),
            _ => (0, 0),
        };
        if request.extended != 0 {
            // The other half has these attributes.
            (request.resources, request.retry, request.rnr_retry, request.srq) = (0, 0, 0, 0);
        }
        let attributes = Attributes {
            path,
            transport,
            qpn: request.qpn,
            psn: request.psn,
            remote_qpn: 0,
            remote_psn: 0,
            resources: request.resources,
            depth: request.depth,
            retry: request.retry,
            rnr_retry: request.rnr_retry,
            mtu: request.mtu,
            ack_timeout: request.ack_timeout,
        };
        self.add(number, Some(owner), State::ReqSent, attributes);
        let interval = time(RESPONSE) + 2 * time(LIFETIME);
        let header = Header { transaction: number.into(), modifier };
        self.send_until_answered(number, now, Message::from(request).mad(header), interval);
        number
    }

    /// Sends a SIDR_REQ. Returns the number of the exchange.
    pub(crate) fn ask(
        &mut self,
        now: Time,
        (path, owner): (Path, Owner),
        mut request: ServiceRequest,
    ) -> u32 {
        let number = self.next_number();
        (request.request, request.pkey) = (number, PKEY);
        self.add(number, Some(owner), State::ServiceSent, datagrams(path));
        let mad = Message::from(request).mad(u64::from(number).into());
        self.send_until_answered(number, now, mad, time(RESPONSE));
        number
    }

    /// Sends a REP.
    pub(crate) fn accept(
        &mut self,
        now: Time,
        number: u32,
        owner: Owner,
        modifier: u32,
        mut reply: Reply,
    ) -> Result<(), WrongState> {
        let guid = self.guid;
        let connection = self.in_state(number, State::ReqReceived)?;
        connection.owner = Some(owner);
        let own = &mut connection.attributes;
        own.qpn = reply.qpn;
        (own.resources, own.depth) = (reply.resources, reply.depth);
        (reply.guid, reply.psn) = (guid, own.psn);
        (reply.local, reply.remote) = (number, connection.remote);
        if connection.attributes.transport == Transport::XrcReceive {
            (reply.xrc_qpn, reply.qpn, reply.depth, reply.srq) = (reply.qpn, 0, 0, 1);
        }
        let (interval, transaction) = (connection.interval, connection.transaction);
        self.set_state(number, State::RepSent);
        let mad = Message::from(reply).mad(Header { transaction, modifier });
        self.send_until_answered(number, now, mad, interval);
        Ok(())
    }

    /// Sends an RTU: the queue pair is ready.
    pub(crate) fn ready(&mut self, number: u32) -> Result<(), WrongState> {
        let connection = self.in_state(number, State::RepReceived)?;
        let message = ReadyToUse { local: number, remote: connection.remote };
        let mad = Message::from(message).mad(connection.transaction.into());
        connection.last = Some(mad.clone());
        let path = connection.attributes.path;
        self.outbox.push((path, mad));
        self.set_state(number, State::Established);
        Ok(())
    }

    /// Something has come over the queue pair: the RTU was lost, or comes later.
    pub(crate) fn is_used(&mut self, number: u32) -> Result<(), WrongState> {
        let connection = self.in_state(number, State::RepSent)?;
        connection.tell(Event::Established);
        self.set_state(number, State::Established);
        Ok(())
    }

    pub(crate) fn is_established(&self, number: u32) -> bool {
        self.all.get(&number).is_some_and(|connection| connection.state == State::Established)
    }

    /// Answers a request for a service.
    pub(crate) fn answer(
        &mut self,
        number: u32,
        owner: Owner,
        mut reply: ServiceReply,
    ) -> Result<(), WrongState> {
        let connection = self.in_state(number, State::ServiceReceived)?;
        connection.owner = Some(owner);
        reply.request = connection.remote;
        self.send_answer(number, reply);
        Ok(())
    }

    fn send_answer(&mut self, number: u32, reply: ServiceReply) {
        let Some(connection) = self.all.get_mut(&number) else { return };
        let mad = Message::from(reply).mad(connection.transaction.into());
        connection.last = Some(mad.clone());
        let path = connection.attributes.path;
        self.outbox.push((path, mad));
        self.set_state(number, State::ServiceAnswered);
    }

    /// Sends a REJ, or a SIDR_REP that says so; `service` is for that.
    pub(crate) fn reject(
        &mut self,
        number: u32,
        why: u16,
        data: &[u8],
        service: u64,
    ) -> Result<(), WrongState> {
        let connection = self.all.get(&number).ok_or(WrongState)?;
        match connection.state {
            State::ReqReceived | State::RepReceived => {
                self.send_rejection(number, why, data);
                self.forget(number);
            }
            State::ServiceReceived => {
                let request = connection.remote;
                let mut reply = ServiceReply {
                    request,
                    status: status::REJECTED,
                    service,
                    ..ServiceReply::default()
                };
                reply.data.iter_mut().zip(data).for_each(|(to, from)| *to = *from);
                self.send_answer(number, reply);
            }
            _ => return Err(WrongState),
        }
        Ok(())
    }

    /// Sends a DREQ, or the answer to the peer's. Once is enough: later calls do nothing.
    pub(crate) fn disconnect(&mut self, now: Time, number: u32) -> Result<(), WrongState> {
        let connection = self.all.get_mut(&number).ok_or(WrongState)?;
        match connection.state {
            State::Established | State::RepSent => self.send_disconnect(number, now),
            State::DreqReceived => {
                self.send_disconnected(number);
                self.enter_timewait(number, now);
            }
            State::DreqSent | State::Timewait => {}
            _ => return Err(WrongState),
        }
        Ok(())
    }

    /// The program gives the connection up, in whatever state it is. The peer learns of it.
    pub(crate) fn abandon(&mut self, now: Time, number: u32) {
        let Some(connection) = self.all.get_mut(&number) else { return };
        connection.owner = None;
        match connection.state {
            State::ReqSent => {
                self.reject_late(number);
                self.forget(number);
            }
            State::ReqReceived | State::RepReceived => {
                self.send_rejection(number, reason::CONSUMER, &[]);
                self.forget(number);
            }
            // A REJ could overtake the REP, or be lost; this is repeated.
            State::RepSent | State::Established => self.send_disconnect(number, now),
            State::DreqReceived => {
                self.send_disconnected(number);
                self.enter_timewait(number, now);
            }
            State::ServiceReceived => {
                // The service's number is 0: the program that knew it is gone.
                let _ = self.reject(number, 0, &[], 0);
                self.forget(number);
            }
            State::ServiceSent | State::ServiceAnswered => self.forget(number),
            State::DreqSent | State::Timewait => {}
        }
    }

    /// Events go to another owner from now on.
    pub(crate) fn set_owner(&mut self, number: u32, owner: Owner) {
        if let Some(connection) = self.all.get_mut(&number)
            && connection.owner.is_some()
        {
            connection.owner = Some(owner);
        }
    }

    /// Returns the queue pair's attributes, and whether the peer is known.
    pub(crate) fn attributes(&self, number: u32) -> Option<(Attributes, bool)> {
        let connection = self.all.get(&number)?;
        match connection.state {
            State::ReqSent => Some((connection.attributes, false)),
            State::ReqReceived | State::RepSent | State::RepReceived | State::Established => {
                Some((connection.attributes, true))
            }
            _ => None,
        }
    }

    // ---- Inside ----

    fn in_state(&mut self, number: u32, state: State) -> Result<&mut Connection, WrongState> {
        self.all.get_mut(&number).filter(|connection| connection.state == state).ok_or(WrongState)
    }

    fn add(&mut self, number: u32, owner: Option<Owner>, state: State, attributes: Attributes) {
        self.count_waiting(attributes.path.to, false, state.waits());
        let connection = Connection {
            owner,
            state,
            attributes,
            remote: 0,
            guid: 0,
            transaction: number.into(),
            repeated: None,
            last: None,
            interval: time(RESPONSE),
            retries: RETRIES,
            due: None,
            is_disconnected: false,
        };
        self.all.insert(number, connection);
    }

    /// In every state but those that repeat a message or wait for their end, no timer runs.
    fn set_state(&mut self, number: u32, state: State) {
        let Some(connection) = self.all.get_mut(&number) else { return };
        let peer = connection.attributes.path.to;
        let before = std::mem::replace(&mut connection.state, state);
        connection.repeated = None;
        if let Some(due) = connection.due.take() {
            self.timers.remove(&(due, number));
        }
        self.count_waiting(peer, before.waits(), state.waits());
    }

    /// A connection with a peer waits for the program's decision, or no longer.
    fn count_waiting(&mut self, peer: IpAddr, before: bool, after: bool) {
        let change = |count: u32| count + u32::from(after) - u32::from(before);
        self.waiting = change(self.waiting);
        let of_peer = change(self.waiting_of.get(&peer).copied().unwrap_or(0));
        if of_peer == 0 {
            self.waiting_of.remove(&peer);
        } else {
            self.waiting_of.insert(peer, of_peer);
        }
    }

    /// Whether no more requests of a peer may wait.
    fn is_full(&self, peer: IpAddr) -> bool {
        let of_peer = self.waiting_of.get(&peer).copied().unwrap_or(0);
        self.waiting >= MOST_WAITING || of_peer >= MOST_OF_PEER
    }

    fn set_timer(&mut self, number: u32, at: Time) {
        let Some(connection) = self.all.get_mut(&number) else { return };
        if let Some(due) = connection.due.replace(at) {
            self.timers.remove(&(due, number));
        }
        self.timers.insert((at, number));
    }

    /// The peer's number and queue pair are known from now on.
    fn set_peer(&mut self, number: u32, remote: u32, guid: u64, is_service: bool) {
        let Some(connection) = self.all.get_mut(&number) else { return };
        (connection.remote, connection.guid) = (remote, guid);
        let (to, qpn) = (connection.attributes.path.to, connection.attributes.remote_qpn);
        self.by_remote.insert((to, guid, remote, is_service), number);
        if qpn != 0 && !is_service {
            self.by_queue_pair.insert((to, guid, qpn), number);
        }
    }

    /// Packets of the peer's queue pair are expected no longer.
    fn forget_queue_pair(&mut self, number: u32) {
        let Some(connection) = self.all.get(&number) else { return };
        let Attributes { path, remote_qpn, .. } = connection.attributes;
        let key = (path.to, connection.guid, remote_qpn);
        if self.by_queue_pair.get(&key) == Some(&number) {
            self.by_queue_pair.remove(&key);
        }
    }

    fn forget(&mut self, number: u32) {
        self.forget_queue_pair(number);
        let Some(connection) = self.all.remove(&number) else { return };
        self.count_waiting(connection.attributes.path.to, connection.state.waits(), false);
        if let Some(due) = connection.due {
            self.timers.remove(&(due, number));
        }
        for is_service in [false, true] {
            let key =
                (connection.attributes.path.to, connection.guid, connection.remote, is_service);
            if self.by_remote.get(&key) == Some(&number) {
                self.by_remote.remove(&key);
            }
        }
    }

    fn enter_timewait(&mut self, number: u32, now: Time) {
        self.forget_queue_pair(number);
        self.set_state(number, State::Timewait);
        let timeout = self.all.get(&number).map(|connection| connection.attributes.ack_timeout);
        self.set_timer(number, now + time(timeout.unwrap_or(0).min(LONGEST)));
    }

    /// In the state that waits for the answer already.
    fn send_until_answered(&mut self, number: u32, now: Time, mad: Box<Mad>, interval: Time) {
        let Some(connection) = self.all.get_mut(&number) else { return };
        let left = connection.retries;
        let path = connection.attributes.path;
        self.outbox.push((path, mad.clone()));
        connection.repeated = Some(Repeated { mad, interval, left, is_extended: false });
        self.set_timer(number, now + interval);
    }

    fn send(&mut self, path: Path, header: Header, message: impl Into<Message>) {
        self.outbox.push((path, message.into().mad(header)));
    }

    /// For a connection whose peer has said something.
    fn send_rejection(&mut self, number: u32, why: u16, data: &[u8]) {
        let Some(connection) = self.all.get(&number) else { return };
        let which = match connection.state {
            State::ReqReceived => 0,
            State::RepReceived => 1,
            _ => 2,
        };
        let mut message = Rejection {
            local: number,
            remote: connection.remote,
            which,
            reason: why,
            ..Rejection::default()
        };
        message.data.iter_mut().zip(data).for_each(|(to, from)| *to = *from);
        let (path, transaction) = (connection.attributes.path, connection.transaction);
        self.send(path, transaction.into(), message);
    }

    /// The program no longer waits for an answer. The peer finds the request by this device's GUID.
    fn reject_late(&mut self, number: u32) {
        let Some(connection) = self.all.get(&number) else { return };
        let mut message = Rejection {
            local: number,
            remote: connection.remote,
            reason: reason::TIMEOUT,
            info_length: 8,
            ..Rejection::default()
        };
        message.info[..8].copy_from_slice(&self.guid.to_be_bytes());
        let (path, transaction) = (connection.attributes.path, connection.transaction);
        self.send(path, transaction.into(), message);
    }

    fn send_disconnect(&mut self, number: u32, now: Time) {
        let Some(connection) = self.all.get(&number) else { return };
        let (remote, qpn) = (connection.remote, connection.attributes.remote_qpn);
        let (interval, transaction) = (connection.interval, connection.transaction);
        self.set_state(number, State::DreqSent);
        let mad = Message::from(Disconnect { local: number, remote, qpn }).mad(transaction.into());
        self.send_until_answered(number, now, mad, interval);
    }

    fn send_disconnected(&mut self, number: u32) {
        let Some(connection) = self.all.get(&number) else { return };
        let message = Disconnected { local: number, remote: connection.remote };
        let (path, transaction) = (connection.attributes.path, connection.transaction);
        self.send(path, transaction.into(), message);
    }
}

/// Datagrams have no connection: the program makes its own address handles.
fn datagrams(path: Path) -> Attributes {
    Attributes {
        path,
        transport: Transport::Ud,
        qpn: 0,
        psn: 0,
        remote_qpn: 0,
        remote_psn: 0,
        resources: 0,
        depth: 0,
        retry: 0,
        rnr_retry: 0,
        mtu: 0,
        ack_timeout: 0,
    }
}
