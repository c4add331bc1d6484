//! Messages that arrive.

use super::*;
use crate::wire::management::IpHeader;

impl Connections {
    /// Handles a message from `path.to` to `path.from`; false if it fits nothing.
    pub(crate) fn receive(&mut self, now: Time, path: Path, mad: &Mad) -> bool {
        let Some((header, message)) = Message::parse(mad) else { return false };
        match message {
            Message::Request(request) => self.requested(now, path, header, request),
            Message::ServiceRequest(request) => self.service_requested(path, header, request),
            Message::Processing(message) => self.extended(now, path, &message).is_some(),
            Message::Rejection(message) => self.rejected(now, path, &message).is_some(),
            Message::Reply(message) => self.replied(now, path, header, message).is_some(),
            Message::ReadyToUse(message) => {
                let number = self.known(path, message.remote, message.local);
                number.and_then(|number| self.is_used(number).ok()).is_some()
            }
            Message::Disconnect(message) => {
                let found = self.known(path, message.remote, message.local);
                // The REP that it overtook comes again.
                let is_early = self.unanswered(path, message.remote).is_some();
                if found.is_none() && !is_early {
                    // Its answer was lost, and this side has forgotten it since.
                    let (local, remote) = (message.remote, message.local);
                    self.send(path, header, Disconnected { local, remote });
                }
                found.is_some_and(|number| self.disconnected(now, number, header, &message))
            }
            Message::Disconnected(message) => {
                let number = self.known(path, message.remote, message.local);
                number.is_some_and(|number| self.disconnect_answered(now, number))
            }
            Message::ServiceReply(message) => self.service_answered(path, message).is_some(),
        }
    }

    /// A connection of this path, by our number.
    fn on(&self, path: Path, number: u32) -> Option<&Connection> {
        self.all.get(&number).filter(|connection| connection.attributes.path == path)
    }

    /// A connection by both numbers and both addresses.
    fn known(&self, path: Path, number: u32, remote: u32) -> Option<u32> {
        let connection = self.on(path, number)?;
        let is_connection = connection.attributes.transport != Transport::Ud;
        (is_connection && remote != 0 && connection.remote == remote).then_some(number)
    }

    /// A request that this side has sent, to which there was no answer.
    fn unanswered(&self, path: Path, number: u32) -> Option<u32> {
        let connection = self.on(path, number)?;
        (connection.state == State::ReqSent).then_some(number)
    }

    fn requested(&mut self, now: Time, path: Path, header: Header, request: Request) -> bool {
        if let Some(&number) = self.by_remote.get(&(path.to, request.guid, request.local, false)) {
            return self.requested_again(number, path, header);
        }
        let transport = match (request.transport, request.extended) {
            (0, _) => Transport::Rc,
            (1, _) => Transport::Uc,
            (3, 1) => Transport::XrcReceive,
            _ => return false,
        };
        let remote = request.local;
        if remote == 0 {
            return false;
        }
        let mut refusal = Rejection { remote, ..Rejection::default() };
        let key = (path.to, request.guid, request.qpn);
        if let Some(&stale) = self.by_queue_pair.get(&key) {
            // The peer's queue pair has another connection: it does not know of the one that this side has.
            refusal.reason = reason::STALE;
            self.send(path, header.transaction.into(), refusal);
            self.end_stale(stale, now);
            return true;
        }
        let names = IpHeader::parse(&request.data);
        let found = names.and_then(|names| self.listeners.find(request.service, &names, transport));
        let Some(listener) = found else {
            refusal.reason = reason::INVALID_SERVICE;
            self.send(path, header.transaction.into(), refusal);
            return true;
        };
        if self.is_full(path.to) || !listener.has_room() {
            return false;
        }
        let owner = listener.owner.clone();
        let number = self.next_number();
        let attributes = Attributes {
            path,
            transport,
            qpn: 0,
            // The queue pair needs it before the program accepts.
            psn: self.random() & 0xff_ffff,
            remote_qpn: request.qpn,
            remote_psn: request.psn,
            // This side may ask at once as much as the peer answers at once.
            resources: request.depth,
            depth: request.resources,
            retry: request.retry,
            rnr_retry: request.rnr_retry,
            mtu: request.mtu,
            ack_timeout: request.ack_timeout,
        };
        self.add(number, None, State::ReqReceived, attributes);
        self.set_peer(number, remote, request.guid, false);
        if let Some(connection) = self.all.get_mut(&number) {
            connection.transaction = header.transaction;
            connection.interval = time(request.local_timeout.min(LONGEST));
            connection.retries = request.manager_retries;
        }
        let modifier = header.modifier;
        let arrived = Arrived { connection: number, path, modifier, message: request };
        owner.outlet.tell(owner.id, Event::Request(Box::new(arrived)));
        true
    }

    /// The peer has forgotten this connection, and says so if it is asked to end it.
    fn end_stale(&mut self, number: u32, now: Time) {
        match self.all.get(&number).map(|connection| connection.state) {
            Some(State::Established) => self.send_disconnect(number, now),
            _ => self.lose(number, now),
        }
    }

    fn requested_again(&mut self, number: u32, path: Path, header: Header) -> bool {
        let Some(connection) = self.all.get(&number) else { return false };
        let (local, remote) = (number, connection.remote);
        match connection.state {
            State::ReqReceived => {
                let message = Processing { local, remote, which: 0, timeout: PROCESSING };
                self.send(path, connection.transaction.into(), message);
            }
            State::Timewait => {
                let reason = reason::STALE;
                let message = Rejection { local, remote, which: 2, reason, ..Rejection::default() };
                self.send(path, header.transaction.into(), message);
            }
            // The answer is repeated by itself.
            _ => {}
        }
        true
    }

    fn service_requested(&mut self, path: Path, header: Header, request: ServiceRequest) -> bool {
        let remote = request.request;
        if let Some(&number) = self.by_remote.get(&(path.to, 0, remote, true)) {
            let answer = self.all.get(&number).and_then(|connection| connection.last.clone());
            self.outbox.extend(answer.map(|mad| (path, mad)));
            return true;
        }
        let names = IpHeader::parse(&request.data);
        let service = request.service;
        let found = names.and_then(|names| self.listeners.find(service, &names, Transport::Ud));
        let Some(listener) = found else {
            let status = status::UNSUPPORTED;
            let message =
                ServiceReply { request: remote, status, service, ..ServiceReply::default() };
            self.send(path, header.transaction.into(), message);
            return true;
        };
        if self.is_full(path.to) || !listener.has_room() {
            return false;
        }
        let owner = listener.owner.clone();
        let number = self.next_number();
        self.add(number, None, State::ServiceReceived, datagrams(path));
        self.set_peer(number, remote, 0, true);
        if let Some(connection) = self.all.get_mut(&number) {
            connection.transaction = header.transaction;
        }
        let modifier = header.modifier;
        let arrived = Arrived { connection: number, path, modifier, message: request };
        owner.outlet.tell(owner.id, Event::ServiceRequest(Box::new(arrived)));
        true
    }

    fn extended(&mut self, now: Time, path: Path, message: &Processing) -> Option<()> {
        let number = match message.which {
            0 => self.unanswered(path, message.remote)?,
            _ => self.known(path, message.remote, message.local)?,
        };
        let connection = self.all.get_mut(&number)?;
        let waits = matches!(connection.state, State::ReqSent | State::RepSent);
        let repeated = connection.repeated.as_mut().filter(|_| waits)?;
        if !std::mem::replace(&mut repeated.is_extended, true) {
            let at = now + time(message.timeout.min(PROCESSING)) + repeated.interval;
            self.set_timer(number, at);
        }
        Some(())
    }

    fn rejected(&mut self, now: Time, path: Path, message: &Rejection) -> Option<()> {
        let number = if message.reason == reason::TIMEOUT && message.info_length >= 8 {
            let guid = u64::from_be_bytes(*message.info.first_chunk()?);
            *self.by_remote.get(&(path.to, guid, message.local, false))?
        } else if message.which == 0 {
            self.unanswered(path, message.remote)?
        } else {
            self.known(path, message.remote, message.local)?
        };
        let connection =
            self.all.get_mut(&number).filter(|connection| connection.attributes.path == path)?;
        let over = match connection.state {
            State::ReqSent | State::ReqReceived | State::RepSent => message.reason != reason::STALE,
            State::RepReceived | State::Established | State::DreqSent => false,
            _ => return None,
        };
        match connection.state {
            // The peer has asked for the end, which this is.
            State::DreqSent => connection.tell_disconnected(true),
            _ => connection.tell(Event::Rejected(message.reason, Box::new(message.data))),
        }
        if over {
            self.forget(number);
        } else {
            self.enter_timewait(number, now);
        }
        Some(())
    }

    fn replied(&mut self, now: Time, path: Path, header: Header, message: Reply) -> Option<()> {
        if message.local == 0 {
            return None;
        }
        let Some(number) = self.unanswered(path, message.remote) else {
            let number = self.known(path, message.remote, message.local)?;
            return self.replied_again(number);
        };
        let xrc = self.all.get(&number)?.attributes.transport == Transport::XrcSend;
        let qpn = if xrc { message.xrc_qpn } else { message.qpn };
        let taken = self.by_remote.contains_key(&(path.to, message.guid, message.local, false));
        let stale = self.by_queue_pair.get(&(path.to, message.guid, qpn)).copied();
        if taken || stale.is_some() {
            // A connection that the peer no longer knows of.
            let (local, remote, reason) = (number, message.local, reason::STALE);
            let refusal = Rejection { local, remote, which: 1, reason, ..Rejection::default() };
            self.send(path, header.transaction.into(), refusal);
            stale.into_iter().for_each(|stale| self.end_stale(stale, now));
            return Some(());
        }
        let connection = self.all.get_mut(&number)?;
        let own = &mut connection.attributes;
        (own.remote_qpn, own.remote_psn) = (qpn, message.psn);
        (own.depth, own.resources) = (message.resources, message.depth);
        own.rnr_retry = message.rnr_retry;
        self.set_peer(number, message.local, message.guid, false);
        self.set_state(number, State::RepReceived);
        let connection = self.all.get(&number)?;
        connection.tell(Event::Reply(Box::new(message), header.modifier));
        Some(())
    }

    fn replied_again(&mut self, number: u32) -> Option<()> {
        let connection = self.all.get(&number)?;
        let path = connection.attributes.path;
        match connection.state {
            State::RepReceived => {
                let (local, remote) = (number, connection.remote);
                let message = Processing { local, remote, which: 1, timeout: PROCESSING };
                self.send(path, connection.transaction.into(), message);
            }
            State::Established => {
                let ready = connection.last.clone();
                self.outbox.extend(ready.map(|mad| (path, mad)));
            }
            _ => return None,
        }
        Some(())
    }

    fn disconnected(
        &mut self,
        now: Time,
        number: u32,
        header: Header,
        message: &Disconnect,
    ) -> bool {
        let Some(connection) = self.all.get_mut(&number) else { return false };
        match connection.state {
            State::RepSent | State::Established | State::DreqSent
                if message.qpn == connection.attributes.qpn =>
            {
                let asked = connection.state == State::DreqSent;
                connection.transaction = header.transaction;
                connection.tell_disconnected(true);
                if asked {
                    // Both sides want the end.
                    self.send_disconnected(number);
                    self.enter_timewait(number, now);
                } else {
                    self.set_state(number, State::DreqReceived);
                }
            }
            State::Timewait => {
                connection.transaction = header.transaction;
                self.send_disconnected(number);
            }
            State::DreqReceived => {}
            _ => return false,
        }
        true
    }

    fn disconnect_answered(&mut self, now: Time, number: u32) -> bool {
        let Some(connection) = self.all.get_mut(&number) else { return false };
        match connection.state {
            State::DreqSent => connection.tell_disconnected(true),
            State::DreqReceived => {}
            _ => return false,
        }
        self.enter_timewait(number, now);
        true
    }

    fn service_answered(&mut self, path: Path, message: ServiceReply) -> Option<()> {
        let number = message.request;
        let connection = self.on(path, number)?;
        if connection.state != State::ServiceSent {
            return None;
        }
        connection.tell(Event::ServiceReply(Box::new(message)));
        self.forget(number);
        Some(())
    }
}
