//! Requests that have ended.

use ibverbs::completion::WorkErrorClass;
use ibverbs::{ChannelId, TransportError, TransportResult, WorkStatus};
use ibverbs_transfer::counted::Mark;

use crate::devices::{Device, Work};
use crate::error::{RailsError, Result};
use crate::event::{self, Event, PeerId, TransferId};
use crate::messages::MESSAGES;
use crate::negotiate::nonsense;
use crate::pair::State;
use crate::peer::Stage;
use crate::posting::RECEIVE;
use crate::rails::{Failed, Rails, Task};
use crate::transfer::Piece;

/// The most completions of a device that a turn looks at: no device keeps the others waiting.
const COMPLETIONS_PER_TURN: usize = 256;

/// The queue pair of a request that has ended.
#[derive(Clone, Copy)]
struct Place {
    peer: PeerId,
    pair: usize,
    /// Whether the pair still has it.
    is_open: bool,
}

impl Rails {
    /// Looks for completions of a device. Returns whether there may be more.
    pub(crate) fn poll(&mut self, device: usize) -> bool {
        for _ in 0..COMPLETIONS_PER_TURN {
            let Self { devices, peers, transfers, progress, .. } = self;
            let Device { engine, lanes, .. } = &mut devices[device];
            match engine.next_ended() {
                Ok(Some(ended)) => {
                    *progress += 1;
                    let (channel, token) = (ended.channel, ended.token);
                    let is_piece = token != RECEIVE
                        && lanes.get(channel.index()).is_some_and(|lane| {
                            matches!(lane.sends.front(), Some(Work::Piece(..)))
                        });
                    // Each case by itself: a reference to what has ended would keep all of it in memory.
                    match ended.result() {
                        Ok(_) if is_piece => {
                            let Some(lane) = lanes.get_mut(channel.index()) else { continue };
                            let Some(&Work::Piece(id, Piece { len, .. })) = lane.sends.front()
                            else {
                                continue;
                            };
                            lane.sends.pop_front();
                            let Some(peer) = peers.get_mut(lane.peer) else { continue };
                            let pair = &mut peer.pairs[lane.pair];
                            pair.carried += u64::from(len);
                            if lane.is_open {
                                pair.gives_back(len as usize);
                            }
                            peer.is_ready = true;
                            if let Some((_, Task::Transfer(active))) = transfers.get_mut(id) {
                                active.in_flight -= 1;
                                if active.is_complete() {
                                    self.end_transfer(id);
                                }
                            }
                        }
                        Ok(success) => {
                            let message = (success.immediate(), success.byte_len());
                            self.ended(device, channel, token, Ok(message));
                        }
                        Err(error) => self.ended(device, channel, token, Err(error)),
                    }
                }
                Ok(None) => return false,
                // Such a completion has ended no operation.
                Err(TransportError::UnknownCompletion { .. }) => {}
                Err(error) => {
                    self.fail_device(device, &error.to_string());
                    return false;
                }
            }
        }
        true
    }

    /// Looks at all completions that a device has now. Those that come meanwhile wait for the next turn.
    pub(crate) fn drain(&mut self, device: usize) {
        // The completions in the queue, and those that were found when queue pairs were destroyed.
        let most = 2 * self.devices[device].engine.capacity().0 as usize;
        for _ in 0..=most / COMPLETIONS_PER_TURN {
            if !self.poll(device) {
                return;
            }
        }
    }

    /// All pairs of a device are to be closed.
    #[cold]
    pub(crate) fn fail_device(&mut self, device: usize, reason: &str) {
        for (peer, state) in &self.peers {
            for (pair, it) in state.pairs.iter().enumerate() {
                if it.ours == device && !matches!(it.state, State::Down { .. } | State::Closing) {
                    let (epoch, reason) = (it.epoch, reason.to_owned());
                    self.failed.push(Failed { peer, pair, epoch, reason, is_fault: true });
                }
            }
        }
    }

    /// Anything but a piece that has arrived. `Ok`: a receive has this immediate number, and this length.
    #[inline(never)]
    fn ended(
        &mut self,
        device: usize,
        channel: ChannelId,
        token: u64,
        result: TransportResult<(Option<u32>, u32)>,
    ) {
        let Some(lane) = self.devices[device].lanes.get_mut(channel.index()) else { return };
        let place = Place { peer: lane.peer, pair: lane.pair, is_open: lane.is_open };
        if token != RECEIVE {
            if let Some(work) = lane.sends.pop_front() {
                self.send_ended(place, work, result.err());
            }
            return;
        }
        match result {
            Ok((immediate, bytes)) => {
                // The piece counts even if the pair was closed since.
                if let Some(number) = immediate
                    && let Err(error) = self.arrived(place.peer, number, bytes)
                {
                    self.lost.push((place.peer, error));
                }
                if place.is_open {
                    self.post_receive(device, place.peer, place.pair, channel);
                }
            }
            Err(error) => self.operation_failed(place, &error, true),
        }
    }

    fn send_ended(&mut self, place: Place, work: Work, error: Option<TransportError>) {
        if let Some(error) = &error {
            // The slots for messages are the peer's own business.
            let is_fault = !matches!(work, Work::Piece(..)) || !is_of_transfer(error);
            self.operation_failed(place, error, is_fault);
        }
        match (work, error) {
            (Work::Piece(transfer, piece), Some(error)) => {
                self.piece_failed(place, transfer, piece, error);
            }
            (Work::Message(number), error) => self.message_ended(place, number, error.is_none()),
            (Work::Probe, None) if place.is_open => self.probed(place.peer, place.pair),
            (Work::Probe | Work::Piece(..), _) => {}
        }
    }

    /// The requests of a queue pair that could not be destroyed do not end by themselves.
    pub(crate) fn end_leaked(&mut self, device: usize, channel: ChannelId) {
        let Some(lane) = self.devices[device].lanes.get_mut(channel.index()) else { return };
        let place = Place { peer: lane.peer, pair: lane.pair, is_open: lane.is_open };
        for work in std::mem::take(&mut lane.sends) {
            self.send_ended(place, work, Some(TransportError::Closed));
        }
    }

    /// A piece was not carried: it goes again, unless the transfer is at fault.
    fn piece_failed(&mut self, place: Place, id: TransferId, piece: Piece, error: TransportError) {
        let Some(peer) = self.peers.get_mut(place.peer) else { return };
        if place.is_open {
            peer.pairs[place.pair].gives_back(piece.len as usize);
        }
        peer.is_ready = true;
        let Some((_, Task::Transfer(active))) = self.transfers.get_mut(id) else { return };
        active.in_flight -= 1;
        if is_of_transfer(&error) {
            active.fail(place.pair, error);
        } else {
            // This transfer comes before all that wait.
            if !active.has_unposted() {
                peer.queue.push_front(id);
            }
            active.again.push(piece);
        }
        if active.is_complete() {
            self.end_transfer(id);
        }
    }

    /// A message is in the peer's memory, or goes again.
    fn message_ended(&mut self, place: Place, number: u64, has_arrived: bool) {
        let Some(peer) = self.peers.get_mut(place.peer) else { return };
        peer.is_ready = true;
        if place.is_open {
            peer.pairs[place.pair].gives_back(0);
        }
        let ended = peer.messages.as_mut().map(|messages| messages.ended(number, has_arrived));
        ended.into_iter().flatten().for_each(|id| self.end_transfer(id));
    }

    /// An operation has failed, so its queue pair has stopped: the pair is to be closed.
    fn operation_failed(&mut self, place: Place, error: &TransportError, is_fault: bool) {
        let Place { peer, pair, is_open: true, .. } = place else { return };
        let Some(state) = self.peers.get(peer) else { return };
        let epoch = state.pairs[pair].epoch;
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

    /// A transfer has no pieces left.
    pub(crate) fn end_transfer(&mut self, id: TransferId) {
        let Some((peer, task)) = self.transfers.remove(id) else { return };
        let failure = match task {
            Task::Message => None,
            Task::Transfer(active) => {
                if let Some(state) = self.peers.get_mut(peer) {
                    state.queue.retain(|&other| other != id);
                    if let Some(number) = active.number {
                        state.outgoing.ended(number, active.failure.is_some());
                    }
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
        event::push(&mut self.events, Event::Ended { transfer: id, peer, result });
    }

    /// A message, or a piece of a notified transfer of the peer's, has arrived.
    ///
    /// # Errors
    ///
    /// The peer may not have sent it.
    fn arrived(&mut self, id: PeerId, immediate: u32, bytes: u32) -> Result<()> {
        match self.peers.get(id) {
            // Its word that it is ready is still in the stream.
            Some(peer) if peer.stage == Stage::Opening && !peer.opens => self.begin(id)?,
            Some(peer) if peer.stage != Stage::Connected => return Err(nonsense()),
            _ => {}
        }
        let Some(peer) = self.peers.get_mut(id) else { return Ok(()) };
        if immediate < MESSAGES {
            let mark = Mark::from_immediate(immediate);
            if peer.incoming.arrived(mark).ok_or_else(nonsense)? {
                event::push(&mut self.events, Event::Notified { peer: id, tag: mark.tag() });
            }
            return Ok(());
        }
        let messages = peer.messages.as_mut().ok_or_else(nonsense)?;
        for bytes in messages.receive(immediate, bytes).ok_or_else(nonsense)? {
            event::push(&mut self.events, Event::Message { peer: id, bytes });
        }
        Ok(())
    }
}

/// Whether another pair would fail in the same way: the request is wrong, not the rail. Whatever else the peer's device
/// refuses is no fault of a request to memory that it allows.
fn is_of_transfer(error: &TransportError) -> bool {
    match error {
        TransportError::Work(error) => {
            error.class() == WorkErrorClass::Local || error.status() == WorkStatus::RemoteAccess
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
