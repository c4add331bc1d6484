//! Pairs that fail, and peers that go.

use std::io::{self, ErrorKind};
use std::time::Instant;

use ibverbs::ChannelId;

use crate::control::{Frame, cut_reason};
use crate::error::RailsError;
use crate::event::{self, Event, PeerId};
use crate::pair::State;
use crate::peer::Stage;
use crate::rails::{Failed, Rails, Task};

impl Rails {
    /// Closes the pairs that have failed, and ends the peers that have broken the agreement.
    pub(crate) fn close_failed(&mut self) {
        while let Some((id, error)) = self.lost.pop() {
            self.lose(id, error);
        }
        while let Some(Failed { peer: id, pair, epoch, reason, is_fault }) = self.failed.pop() {
            let Some(peer) = self.peers.get_mut(id) else { continue };
            let it = &peer.pairs[pair];
            if it.epoch != epoch || matches!(it.state, State::Down { .. } | State::Closing) {
                continue;
            }
            let number = it.number;
            let reason = self.close(id, pair, reason, is_fault);
            self.say(id, &Frame::Down { pair: number, epoch, reason });
        }
    }

    /// Closes a pair on this side. Its pieces wait for the others. Returns the reason as it is told.
    pub(crate) fn close(
        &mut self,
        id: PeerId,
        pair: usize,
        mut reason: String,
        is_fault: bool,
    ) -> String {
        cut_reason(&mut reason);
        let Some(peer) = self.peers.get_mut(id) else { return reason };
        peer.is_ready = true;
        let it = &mut peer.pairs[pair];
        let (device, was_up) = (it.ours, it.state == State::Up);
        it.state = State::Closing;
        it.forget_requests();
        if is_fault {
            it.failure = Some(reason.clone());
        }
        let channels = std::mem::take(&mut it.lanes);
        self.destroy(device, &channels);
        // Every operation has ended now, those in flight too.
        self.drain(device);
        channels.into_iter().for_each(|channel| self.end_leaked(device, channel));
        if was_up {
            let reason = reason.clone();
            event::push(&mut self.events, Event::RailDown { peer: id, device, reason });
        }
        if let Some(peer) = self.peers.get(id)
            && let (Some(reasons), Stage::Connected) = (peer.failures(), peer.stage)
        {
            self.fail_transfers(id, || RailsError::AllRailsDown(reasons.clone()));
        }
        reason
    }

    /// Destroys queue pairs. What they have in flight ends, and is to be polled.
    pub(crate) fn destroy(&mut self, device: usize, channels: &[ChannelId]) {
        let device = &mut self.devices[device];
        for &channel in channels {
            device.lanes[channel.index()].is_open = false;
            // If that fails, it is leaked, with what it has in flight.
            let _ = device.engine.remove(channel);
        }
    }

    /// The other side has closed the pair, too.
    pub(crate) fn closed(&mut self, id: PeerId, pair: usize, now: Instant) {
        let random = self.random((pair, now));
        let Some(peer) = self.peers.get_mut(id) else { return };
        peer.is_ready = true;
        let it = &mut peer.pairs[pair];
        let retry_at = if it.failure.is_none() { now } else { it.retry_at(now, random) };
        it.state = State::Down { retry_at };
        self.tried(id);
    }

    /// All transfers and messages to a peer end with an error. None of their requests is under way.
    fn fail_transfers(&mut self, id: PeerId, error: impl Fn() -> RailsError) {
        let of_peer = self.transfers.iter().filter(|(_, (peer, _))| *peer == id);
        for transfer in of_peer.map(|(transfer, _)| transfer).collect::<Vec<_>>() {
            if let (Some((_, Task::Transfer(active))), Some(peer)) =
                (self.transfers.remove(transfer), self.peers.get_mut(id))
            {
                active.number.iter().for_each(|&number| peer.outgoing.ended(number, true));
            }
            event::push(
                &mut self.events,
                Event::Ended { transfer, peer: id, result: Err(error()) },
            );
        }
        if let Some(peer) = self.peers.get_mut(id) {
            peer.queue.clear();
            if let Some(messages) = &mut peer.messages {
                messages.forget_waiting();
            }
        }
    }

    /// The peer is gone: everything of it ends. What the devices have acknowledged counts before, on both sides: the peer
    /// may have been told that it has arrived.
    pub(crate) fn lose(&mut self, id: PeerId, error: RailsError) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        // The peer may still read.
        let _ = peer.control.flush(Instant::now());
        let lanes: Vec<_> = (peer.pairs.iter_mut())
            .map(|pair| (pair.ours, std::mem::take(&mut pair.lanes)))
            .collect();
        for (device, lanes) in &lanes {
            self.destroy(*device, lanes);
        }
        for &(device, _) in &lanes {
            self.drain(device);
        }
        let mut text = error.to_string();
        cut_reason(&mut text);
        self.fail_transfers(id, || {
            RailsError::Control(io::Error::new(ErrorKind::NotConnected, text.clone()))
        });
        let Some(peer) = self.peers.remove(id) else { return };
        self.progress += 1;
        self.changes += 1;
        if let (Some(stream), Some(_)) = (peer.control.descriptor(), peer.watched) {
            self.readiness.forget(stream);
        }
        event::push(&mut self.events, Event::Disconnected { peer: id, error });
    }
}
