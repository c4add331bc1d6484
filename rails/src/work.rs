//! Requests: what is posted, and what has ended.

use std::time::Instant;

use ibverbs::{
    Ended, OperationError, ReadWorkRequest, ReceiveWorkRequest, SharedMemoryRange, TransportError,
    WorkErrorClass, WriteWorkRequest,
};
use slotmap::{Key, KeyData};

use crate::control::Frame;
use crate::devices::SENDS;
use crate::error::RailsError;
use crate::messages::immediate;
use crate::notify::{MESSAGE_SLOT, Mark};
use crate::opening::nonsense;
use crate::peer::{Lane, Peer, State};
use crate::rails::{Event, Failed, PeerId, Rails, Task, TransferId, Work, WorkId};
use crate::transfer::{Kind, Piece, SHORTEST_PIECE};

/// The most completions of a device that a turn looks at: no device keeps the others waiting.
const COMPLETIONS_PER_TURN: usize = 256;

type Buffer = SharedMemoryRange<u8>;

impl Rails {
    /// Looks for completions of a device. Returns whether there may be more.
    pub(crate) fn poll(&mut self, device: usize, now: Instant) -> bool {
        for _ in 0..COMPLETIONS_PER_TURN {
            match self.devices[device].engine.next_ended() {
                Ok(Some(ended)) => self.ended(device, &ended, now),
                Ok(None) => return false,
                // It has ended nothing.
                Err(TransportError::UnknownCompletion { .. }) => {}
                Err(error) => {
                    self.fail_device(device, &error.to_string());
                    return false;
                }
            }
        }
        true
    }

    /// All pairs of a device are to be closed.
    fn fail_device(&mut self, device: usize, reason: &str) {
        for (peer, state) in &self.peers {
            for (pair, it) in state.pairs.iter().enumerate() {
                if it.ours == device && !matches!(it.state, State::Down { .. } | State::Closing) {
                    let (epoch, reason) = (it.epoch, reason.to_owned());
                    self.failed.push(Failed { peer, pair, epoch, reason, is_fault: true });
                }
            }
        }
    }

    fn ended(&mut self, device: usize, ended: &Ended<Buffer>, now: Instant) {
        let id = WorkId::from(KeyData::from_ffi(ended.token));
        let Some(work) = self.works.remove(id) else { return };
        self.progress += 1;
        let result = ended.result();
        let (Work::Piece { peer, pair, .. }
        | Work::Receive { peer, pair }
        | Work::Probe { peer, pair }
        | Work::Message { peer, pair, .. }) = work;
        if let Err(error) = &result {
            // The slots for messages are the peer's own business.
            let is_fault = !matches!(work, Work::Piece { .. }) || !is_of_transfer(error);
            self.operation_failed(peer, pair, ended, error, is_fault);
        }
        match work {
            Work::Piece { transfer, piece, .. } => {
                self.piece_ended(peer, pair, ended, transfer, piece, result.map(drop), now);
            }
            Work::Receive { .. } => {
                if let Ok(success) = result {
                    // It counts even if the pair was closed since.
                    if let Some(number) = success.immediate() {
                        self.arrived(peer, number);
                    }
                    if self.is_current(peer, pair, ended) {
                        self.post_receive(device, peer, pair, ended.channel);
                    }
                }
            }
            Work::Message { number, .. } => {
                self.message_ended(peer, pair, ended, number, result.is_ok());
            }
            Work::Probe { .. } => {
                if result.is_ok() && self.is_current(peer, pair, ended) {
                    self.probed(peer, pair);
                }
            }
        }
    }

    fn is_current(&mut self, peer: PeerId, pair: usize, ended: &Ended<Buffer>) -> bool {
        let peer = self.peers.get_mut(peer);
        peer.is_some_and(|peer| peer.pairs[pair].lane(ended.channel).is_some())
    }

    /// An operation has failed, so its queue pair has stopped: the pair is to be closed.
    fn operation_failed(
        &mut self,
        peer: PeerId,
        pair: usize,
        ended: &Ended<Buffer>,
        error: &TransportError,
        is_fault: bool,
    ) {
        if !self.is_current(peer, pair, ended) {
            return;
        }
        let epoch = self.peers[peer].pairs[pair].epoch;
        // The first failure is the cause of the others, and comes first on a queue. On another it may be later.
        let known = self
            .failed
            .iter_mut()
            .find(|failed| (failed.peer, failed.pair, failed.epoch) == (peer, pair, epoch));
        let reason = error.to_string();
        match known {
            None => self.failed.push(Failed { peer, pair, epoch, reason, is_fault }),
            Some(_) if is_flushed(error) => {}
            Some(known) => (known.reason, known.is_fault) = (reason, is_fault),
        }
    }

    #[expect(clippy::too_many_arguments, reason = "what has ended, where, when and how")]
    fn piece_ended(
        &mut self,
        peer_id: PeerId,
        pair: usize,
        ended: &Ended<Buffer>,
        id: TransferId,
        piece: Piece,
        result: Result<(), TransportError>,
        now: Instant,
    ) {
        let Some(peer) = self.peers.get_mut(peer_id) else { return };
        let it = &mut peer.pairs[pair];
        if let Some(lane) = it.lane(ended.channel) {
            lane.in_flight -= 1;
            it.in_flight -= piece.len;
            let more = it.in_flight > 0;
            it.rate.carried(if result.is_ok() { piece.len } else { 0 }, now, more);
        }
        if result.is_ok() {
            peer.pairs[pair].carried += piece.len as u64;
        }
        peer.is_ready = true;
        let Some((_, Task::Transfer(active))) = self.transfers.get_mut(id) else { return };
        active.in_flight -= 1;
        match result {
            Ok(()) => {}
            Err(error) if is_of_transfer(&error) => active.fail(pair, error),
            Err(_) => {
                // It was cut before all that waits.
                if !active.has_unposted() {
                    peer.queue.push_front(id);
                }
                active.again.push(piece);
            }
        }
        if active.is_complete() {
            self.end_transfer(id);
        }
    }

    /// A transfer has no pieces left.
    pub(crate) fn end_transfer(&mut self, id: TransferId) {
        let Some((peer, task)) = self.transfers.remove(id) else { return };
        let failure = match task {
            Task::Message => None,
            Task::Transfer(active) => {
                if let Some(state) = self.peers.get_mut(peer) {
                    state.queue.retain(|&other| other != id);
                }
                active.failure
            }
        };
        let result = match failure {
            None => Ok(()),
            Some((pair, error)) => {
                let pairs = self.peers.get(peer).map_or(&[][..], |peer| &peer.pairs);
                let pair = pairs.get(pair).map_or_else(String::new, |pair| pair.name.clone());
                Err(RailsError::Transfer { pair, error })
            }
        };
        self.events.push_back(Event::Ended { transfer: id, peer, result });
    }

    /// A message, or a piece of a notified transfer of the peer's, has arrived.
    fn arrived(&mut self, id: PeerId, immediate: u32) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        let mark = Mark::from_immediate(immediate);
        if mark.slot == MESSAGE_SLOT {
            let messages = peer.messages.as_mut();
            match messages.and_then(|messages| messages.receive(immediate)) {
                Some(messages) => {
                    let events = messages.into_iter();
                    self.events.extend(events.map(|bytes| Event::Message { peer: id, bytes }));
                }
                None => self.lose(id, nonsense()),
            }
            return;
        }
        if peer.incoming.arrived(mark) {
            self.events.push_back(Event::Notified { peer: id, tag: mark.tag });
        }
        if let Some(below) = peer.incoming.confirm() {
            peer.control.send(&Frame::Confirmed { below });
        }
    }

    /// A message is in the peer's memory, or goes again.
    fn message_ended(
        &mut self,
        peer: PeerId,
        pair: usize,
        ended: &Ended<Buffer>,
        number: u64,
        has_arrived: bool,
    ) {
        let Some(peer) = self.peers.get_mut(peer) else { return };
        peer.is_ready = true;
        if let Some(lane) = peer.pairs[pair].lane(ended.channel) {
            lane.in_flight -= 1;
        }
        let messages = peer.messages.as_mut();
        if let Some(id) = messages.and_then(|messages| messages.ended(number, has_arrived)) {
            self.end_transfer(id);
        }
    }

    /// Posts messages to a peer, on the first queue pair of the first pair that works.
    fn fill_messages(&mut self, id: PeerId) {
        loop {
            let Some(Peer { pairs, messages: Some(messages), .. }) = self.peers.get_mut(id) else {
                return;
            };
            // Late writes of a pair that is closing may still change the slots that it has written.
            let is_closing = pairs.iter().any(|pair| pair.state == State::Closing);
            let given = if is_closing { Ok(()) } else { messages.give_slots() };
            if let Err(error) = given {
                return self.lose(id, error);
            }
            let Some(pair) = pairs.iter().position(|pair| pair.state == State::Up) else { return };
            let it = &mut pairs[pair];
            let Some(lane) = it.lanes.first_mut().filter(|lane| lane.in_flight < SENDS) else {
                return;
            };
            let Some(message) = messages.begin() else { return };
            let (start, len, number) = (message.start, message.len, message.number);
            let local = message.memory.slice(start..start + len);
            let local =
                local.and_then(|local| local.range(it.ours, 0, len).map_err(RailsError::range));
            let remote = message.remote.part(it.theirs, message.remote_start, len);
            let (buffer, remote) = match (local, remote) {
                (Ok(buffer), Ok(remote)) => (buffer, remote),
                (Err(error), _) => return self.lose(id, error),
                (_, Err(error)) => return self.lose(id, RailsError::range(error)),
            };
            let token = self.works.insert(Work::Message { peer: id, pair, number });
            let request = WriteWorkRequest::new(buffer, remote).immediate(immediate(number));
            let engine = &mut self.devices[it.ours].engine;
            match engine.post(lane.channel, request, token.data().as_ffi()) {
                Ok(()) => lane.in_flight += 1,
                Err(error) => {
                    match error.buffer {
                        Some(_) => drop(messages.ended(number, false)),
                        None => lane.in_flight += 1,
                    }
                    return self.not_posted(id, pair, token, &error);
                }
            }
        }
    }

    pub(crate) fn post_receive(
        &mut self,
        device: usize,
        peer: PeerId,
        pair: usize,
        channel: ibverbs::ChannelId,
    ) {
        let scratch = &self.devices[device].scratch;
        let Ok(buffer) = Buffer::new(scratch.clone(), ..) else { return };
        let token = self.works.insert(Work::Receive { peer, pair });
        let engine = &mut self.devices[device].engine;
        let posted = engine.post(channel, ReceiveWorkRequest::new(buffer), token.data().as_ffi());
        if let Err(error) = posted {
            self.not_posted(peer, pair, token, &error);
        }
    }

    /// A post has failed: the pair is to be closed.
    fn not_posted(
        &mut self,
        peer: PeerId,
        pair: usize,
        token: WorkId,
        error: &OperationError<Buffer>,
    ) {
        // Without the buffer, it is in flight.
        if error.buffer.is_some() {
            self.works.remove(token);
        }
        let epoch = self.peers[peer].pairs[pair].epoch;
        let reason = error.error.to_string();
        self.failed.push(Failed { peer, pair, epoch, reason, is_fault: true });
    }

    /// Posts pieces of a peer's transfers, as many as there is room for.
    pub(crate) fn fill(&mut self, id: PeerId, now: Instant) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        peer.is_ready = false;
        self.fill_messages(id);
        while let Some(peer) = self.peers.get_mut(id)
            && let Some(&transfer) = peer.queue.front()
        {
            let Some((_, Task::Transfer(active))) = self.transfers.get_mut(transfer) else {
                peer.queue.pop_front();
                continue;
            };
            if active.transfer.tag.is_some() && active.slot.is_none() {
                // The peer may not have counted yet what a pair has carried that is closing.
                let is_closing = peer.pairs.iter().any(|pair| pair.state == State::Closing);
                match if is_closing { None } else { peer.outgoing.begin() } {
                    Some(slot) => active.slot = Some(slot),
                    None => return,
                }
            }
            let Some(pair) = peer.choose(SHORTEST_PIECE) else { return };
            let Some(piece) = active.next_piece(peer.pairs_up()) else {
                peer.queue.pop_front();
                continue;
            };
            if !self.post_piece(id, pair, transfer, piece, now) {
                return;
            }
        }
    }

    /// Posts a piece. Returns whether it was posted; else it waits again, and its pair is to be closed.
    fn post_piece(
        &mut self,
        id: PeerId,
        pair: usize,
        transfer: TransferId,
        piece: Piece,
        now: Instant,
    ) -> bool {
        let token = self.works.insert(Work::Piece { transfer, peer: id, pair, piece });
        let (Some(peer), Some((_, Task::Transfer(active)))) =
            (self.peers.get_mut(id), self.transfers.get_mut(transfer))
        else {
            return false;
        };
        let it = &mut peer.pairs[pair];
        let (ours, theirs) = (it.ours, it.theirs);
        let Some(Lane { channel, in_flight }) = it.least_busy() else { return false };
        let channel = *channel;
        let engine = &mut self.devices[ours].engine;
        let (local, remote) = &active.transfer.parts[piece.part];
        let (buffer, remote) = match (
            local.range(ours, piece.offset, piece.len),
            remote.part(theirs, piece.offset, piece.len),
        ) {
            (Ok(buffer), Ok(remote)) => (buffer, remote),
            // `check` has seen that both are in bounds.
            (Err(error), _) | (_, Err(error)) => {
                self.works.remove(token);
                active.fail(pair, error.into());
                return true;
            }
        };
        let number = token.data().as_ffi();
        let posted = match (active.transfer.kind, active.mark(piece)) {
            (Kind::Read, _) => engine.post(channel, ReadWorkRequest::new(buffer, remote), number),
            (Kind::Write, None) => {
                engine.post(channel, WriteWorkRequest::new(buffer, remote), number)
            }
            (Kind::Write, Some(mark)) => {
                let request = WriteWorkRequest::new(buffer, remote);
                engine.post(channel, request.immediate(mark.to_immediate()), number)
            }
        };
        match posted {
            Ok(()) => {
                *in_flight += 1;
                it.in_flight += piece.len;
                it.rate.begins(now);
                active.in_flight += 1;
                true
            }
            Err(error) => {
                if error.buffer.is_some() {
                    active.again.push(piece);
                } else {
                    *in_flight += 1;
                    it.in_flight += piece.len;
                    active.in_flight += 1;
                }
                self.not_posted(id, pair, token, &error);
                false
            }
        }
    }
}

/// Whether another pair would fail in the same way: the request is wrong, not the rail.
fn is_of_transfer(error: &TransportError) -> bool {
    match error {
        TransportError::Work(error) => {
            matches!(error.class(), WorkErrorClass::Local | WorkErrorClass::Remote)
        }
        _ => false,
    }
}

fn is_flushed(error: &TransportError) -> bool {
    match error {
        TransportError::Work(error) => error.class() == WorkErrorClass::Flushed,
        TransportError::Closed | TransportError::Stopped => true,
        _ => false,
    }
}
