//! Pairs of devices that are opened: queue pairs, made and connected on both sides, and a probe over each.

use std::time::{Duration, Instant};

use ibverbs::memory::SharedMemoryRange;
use ibverbs::{ChannelId, QueuePairEndpoint, ReadWorkRequest, RemoteMemoryRegion, TransportError};

use crate::control::{Ends, Frame};
use crate::devices::{RECEIVES, Work};
use crate::error::{RailsError, Result};
use crate::event::{self, Event, PeerId};
use crate::negotiate::nonsense;
use crate::pair::{Pair, State};
use crate::peer::Stage;
use crate::posting::SEND;
use crate::rails::Rails;

/// How many pairs this side opens at a time, and how many peers it answers.
const HANDSHAKES: usize = 64;
/// A handshake that takes longer does not keep others waiting.
const HANDSHAKE: Duration = Duration::from_secs(10);
const OTHER_NUMBER: &str = "the peer has made another number of queue pairs";
/// The bytes that a probe reads.
const PROBE: usize = 8;

impl Rails {
    /// How many handshakes may begin now. Those that take too long make room for others.
    pub(crate) fn count_handshakes(&mut self, now: Instant) {
        let is_fresh = |since: Instant| now.saturating_duration_since(since) < HANDSHAKE;
        let mut counts = [0; 2];
        for peer in self.peers.values() {
            if peer.opens {
                let is_opening = |pair: &&Pair| {
                    matches!(pair.state, State::Opening | State::Probing(_)) && is_fresh(pair.since)
                };
                counts[0] += peer.pairs.iter().filter(is_opening).count();
            } else if peer.stage == Stage::Opening && peer.since.is_some_and(is_fresh) {
                counts[1] += 1;
            }
        }
        self.room = counts.map(|count| HANDSHAKES.saturating_sub(count));
    }

    /// When a handshake that takes too long makes room for the peers that wait for it, if some do.
    pub(crate) fn next_room(&self) -> Option<Instant> {
        self.peers.values().find(|peer| peer.is_held)?;
        let opening = self.peers.values().filter(|peer| peer.stage == Stage::Opening);
        let answered = opening.filter(|peer| !peer.opens);
        let now = Instant::now();
        // Those that have taken too long already have made room.
        answered.filter_map(|peer| Some(peer.since? + HANDSHAKE)).filter(|&at| at > now).min()
    }

    /// Opens the pairs whose time has come, if this side does that.
    pub(crate) fn open_due(&mut self, id: PeerId, now: Instant) {
        let Some(peer) = self.peers.get(id) else { return };
        if !peer.opens || peer.stage == Stage::Greeting {
            return;
        }
        for pair in 0..peer.pairs.len() {
            let Some(peer) = self.peers.get_mut(id) else { return };
            let it = &mut peer.pairs[pair];
            if !matches!(it.state, State::Down { retry_at } if retry_at <= now) {
                continue;
            }
            if self.room[0] == 0 {
                return;
            }
            self.room[0] -= 1;
            it.since = now;
            self.progress += 1;
            it.epoch = it.epoch.wrapping_add(1);
            let (epoch, number) = (it.epoch, it.number);
            let opened = match self.devices[it.ours].is_active() {
                true => self.open(id, pair, None),
                false => Err("our port is not active".into()),
            };
            match opened {
                Ok(ends) => self.say(id, &Frame::Open { pair: number, epoch, ends }),
                Err(reason) => {
                    self.close(id, pair, reason, true);
                    self.closed(id, pair, now);
                }
            }
        }
    }

    /// Makes the queue pairs of a pair, and connects them if the peer's are known.
    pub(crate) fn open(
        &mut self,
        id: PeerId,
        pair: usize,
        theirs: Option<&Ends>,
    ) -> Result<Ends, String> {
        let it = &self.peers[id].pairs[pair];
        let device = it.ours;
        if !self.devices[device].is_active() {
            return Err("its port is not active".into());
        }
        if theirs.is_some_and(|ends| ends.endpoints.len() != usize::from(self.queue_pairs)) {
            return Err(OTHER_NUMBER.into());
        }
        let mut channels = Vec::new();
        let result = self.make_channels(id, pair, device, theirs, &mut channels);
        let it = &mut self.peers[id].pairs[pair];
        match result {
            Ok(ends) => {
                it.lanes = channels;
                it.state = match theirs {
                    Some(_) => State::Probing(0),
                    None => State::Opening,
                };
                Ok(ends)
            }
            Err(error) => {
                self.destroy(device, &channels);
                Err(error.to_string())
            }
        }
    }

    fn make_channels(
        &mut self,
        id: PeerId,
        pair: usize,
        index: usize,
        theirs: Option<&Ends>,
        channels: &mut Vec<ChannelId>,
    ) -> ibverbs::Result<Ends> {
        let mut endpoints = Vec::new();
        for lane in 0..usize::from(self.queue_pairs) {
            let device = &mut self.devices[index];
            let prepared = device.channel().build()?;
            let channel = device.engine.add_prepared(prepared)?;
            device.add_lane(channel, id, pair);
            channels.push(channel);
            endpoints.extend(device.engine.endpoint(channel));
            for _ in 0..RECEIVES {
                self.post_receive(index, id, pair, channel);
            }
            let remote = theirs.and_then(|ends| ends.endpoints.get(lane).copied());
            if let Some(remote) = remote {
                self.devices[index].engine.handshake(channel, remote)?;
            }
        }
        let probe = self.devices[index].scratch.remote();
        Ok(Ends { endpoints, probe })
    }

    /// Connects the queue pairs of a pair to those that the peer has made, and sends something over each.
    pub(crate) fn probe(&mut self, id: PeerId, pair: usize, theirs: &Ends) -> Result<(), String> {
        let it = &mut self.peers[id].pairs[pair];
        let lanes = it.lanes.clone();
        if theirs.endpoints.len() != lanes.len() {
            return Err(OTHER_NUMBER.into());
        }
        it.state = State::Probing(lanes.len());
        for (&channel, &remote) in lanes.iter().zip(&theirs.endpoints) {
            self.probe_lane(id, pair, channel, remote, theirs.probe)
                .map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn probe_lane(
        &mut self,
        peer: PeerId,
        pair: usize,
        channel: ChannelId,
        remote: QueuePairEndpoint,
        memory: RemoteMemoryRegion,
    ) -> Result<(), TransportError> {
        let index = self.peers[peer].pairs[pair].ours;
        let device = &mut self.devices[index];
        device.engine.handshake(channel, remote)?;
        let buffer = SharedMemoryRange::new(device.scratch.clone(), ..PROBE)?;
        let memory = memory.sub_region(0, PROBE as u64)?;
        let posted = device.engine.post(channel, ReadWorkRequest::new(buffer, memory), SEND);
        posted.map_err(|error| error.error)?;
        device.lanes[channel.index()].sends.push_back(Work::Probe);
        Ok(())
    }

    /// A queue pair has carried its probe.
    pub(crate) fn probed(&mut self, id: PeerId, pair: usize) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        let it = &mut peer.pairs[pair];
        let epoch = it.epoch;
        match it.state {
            State::Probing(1) => {
                peer.control.send(&Frame::Up { pair: it.number, epoch });
                self.up(id, pair);
                self.tried(id);
            }
            State::Probing(lanes) => it.state = State::Probing(lanes.saturating_sub(1)),
            _ => {}
        }
    }

    pub(crate) fn up(&mut self, id: PeerId, pair: usize) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        peer.is_ready = true;
        let it = &mut peer.pairs[pair];
        it.is_up();
        let device = it.ours;
        event::push(&mut self.events, Event::RailUp { peer: id, device });
    }

    /// If each pair has been tried, the peer is connected, or not to be reached.
    pub(crate) fn tried(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        if peer.opens && peer.stage == Stage::Opening && peer.pairs.iter().all(is_tried) {
            peer.control.send(&Frame::Ready);
            if let Err(error) = self.connected(id) {
                self.lost.push((id, error));
            }
        }
    }

    /// Each pair was tried, as the side says that opens them. If none was, the peer is another program.
    pub(crate) fn connected(&mut self, id: PeerId) -> Result<()> {
        let Some(peer) = self.peers.get(id) else { return Ok(()) };
        match peer.failures() {
            Some(reasons) => Err(RailsError::AllRailsDown(reasons)),
            None if peer.pairs.iter().any(is_tried) => self.begin(id),
            None => Err(nonsense()),
        }
    }

    /// The program gets to know the peer.
    pub(crate) fn begin(&mut self, id: PeerId) -> Result<()> {
        let Some(peer) = self.peers.get_mut(id) else { return Ok(()) };
        // Both sides tell their slots before.
        peer.messages.as_ref().filter(|messages| messages.is_known()).ok_or_else(nonsense)?;
        peer.stage = Stage::Connected;
        event::push(&mut self.events, Event::Connected(id));
        Ok(())
    }
}

fn is_tried(pair: &Pair) -> bool {
    pair.state == State::Up || pair.failure.is_some()
}
