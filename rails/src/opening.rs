//! Pairs of devices: agreed upon, opened, probed, closed and opened again.

use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};

use ibverbs::{AccessFlags, ChannelId, ReadWorkRequest, RemoteMemoryRegion, SharedMemoryRange};
use slotmap::Key;

use crate::control::{Ends, Frame, VERSION};
use crate::devices::RECEIVES;
use crate::error::{RailsError, Result};
use crate::messages::Messages;
use crate::pairing::{self, Facts};
use crate::peer::{Lane, Pair, Stage, State};
use crate::rails::{Event, Failed, PeerId, Rails, Work};

/// How many pairs this side opens at a time, and how many peers it answers.
const HANDSHAKES: usize = 64;
/// A handshake that takes longer does not keep others waiting.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// The bytes that a probe reads.
const PROBE: usize = 8;

impl Rails {
    /// Does what the peer says.
    pub(crate) fn listen(&mut self, id: PeerId, now: Instant) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        if !peer.opens && peer.stage == Stage::Greeting {
            let is_held = self.room[1] == 0;
            if std::mem::replace(&mut peer.is_held, is_held) != is_held
                && let Err(error) = self.watch(id)
            {
                return self.lose(id, error.into());
            }
            if is_held {
                return;
            }
        }
        let Some(peer) = self.peers.get_mut(id) else { return };
        if !peer.is_readable && peer.control.descriptor().is_some() {
            return;
        }
        peer.is_readable = false;
        loop {
            let Some(peer) = self.peers.get_mut(id) else { return };
            let result = match peer.control.receive() {
                Ok(Some(frame)) => {
                    self.progress += 1;
                    self.understand(id, frame, now)
                }
                Ok(None) => return,
                Err(error) => Err(error.into()),
            };
            if let Err(error) = result {
                return self.lose(id, error);
            }
        }
    }

    /// Writes what there is to say.
    pub(crate) fn speak(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        if !peer.control.has_output() && peer.watched.is_some_and(|watched| !watched.writes) {
            return;
        }
        let spoken = peer.control.flush().and_then(|()| self.watch(id));
        if let Err(error) = spoken {
            self.lose(id, error.into());
        }
    }

    fn understand(&mut self, id: PeerId, frame: Frame, now: Instant) -> Result<()> {
        let Some(peer) = self.peers.get_mut(id) else { return Ok(()) };
        match frame {
            Frame::Hello { version, queue_pairs, rails }
                if !peer.opens && peer.stage == Stage::Greeting =>
            {
                self.greet(id, version, queue_pairs, &rails, now)
            }
            Frame::Pairs { rails, pairs } if peer.opens && peer.stage == Stage::Greeting => {
                self.make_pairs(id, &rails, &pairs, now)
            }
            Frame::Refused { version, reason } if version != VERSION => {
                let reason = format!("{reason} (ours is {VERSION})");
                Err(RailsError::Refused(reason))
            }
            Frame::Refused { reason, .. } => Err(RailsError::Refused(reason)),
            Frame::Ready if !peer.opens && peer.stage == Stage::Opening => self.connected(id),
            Frame::Confirmed { below } if peer.outgoing.confirm(below) => {
                peer.is_ready = true;
                Ok(())
            }
            Frame::Inbox { memory, longest } => {
                let devices = peer.their_devices;
                let messages = peer.messages.as_mut().ok_or_else(nonsense)?;
                messages.learn(memory, longest, devices).then_some(()).ok_or_else(nonsense)
            }
            Frame::Taken { below } => {
                let messages = peer.messages.as_mut().ok_or_else(nonsense)?;
                let ended = messages.confirmed(below).ok_or_else(nonsense)?;
                peer.is_ready = true;
                ended.into_iter().for_each(|transfer| self.end_transfer(transfer));
                Ok(())
            }
            Frame::Open { pair, epoch, ends } if !peer.opens => {
                let it = pair_of(&mut peer.pairs, pair)?;
                if !matches!(it.state, State::Down { .. }) {
                    return Err(nonsense());
                }
                it.epoch = epoch;
                let answer = match self.open(id, pair.into(), Some(&ends)) {
                    Ok(ends) => Frame::Opened { pair, epoch, ends },
                    Err(reason) => Frame::CannotOpen { pair, epoch, reason },
                };
                self.say(id, &answer);
                Ok(())
            }
            Frame::Opened { pair, epoch, ends } if peer.opens => {
                let it = pair_of(&mut peer.pairs, pair)?;
                if it.epoch != epoch || it.state != State::Opening {
                    // It was closed since.
                    return Ok(());
                }
                let pair = pair.into();
                if let Err(reason) = self.probe(id, pair, &ends) {
                    self.failed.push(Failed { peer: id, pair, epoch, reason, is_fault: true });
                }
                Ok(())
            }
            Frame::CannotOpen { pair, epoch, reason } if peer.opens => {
                let it = pair_of(&mut peer.pairs, pair)?;
                if it.epoch == epoch && it.state == State::Opening {
                    let reason = format!("the peer cannot open it: {reason}");
                    self.close(id, pair.into(), reason, true, now);
                    self.closed(id, pair.into(), now);
                }
                Ok(())
            }
            Frame::Up { pair, epoch } if !peer.opens => {
                let it = pair_of(&mut peer.pairs, pair)?;
                if it.epoch == epoch && matches!(it.state, State::Probing(_)) {
                    self.up(id, pair.into());
                }
                Ok(())
            }
            Frame::Down { pair, epoch, reason } => {
                let it = pair_of(&mut peer.pairs, pair)?;
                if it.epoch == epoch {
                    let index = pair.into();
                    match it.state {
                        State::Down { .. } => {}
                        State::Closing => self.closed(id, index, now),
                        _ => {
                            self.close(id, index, format!("the peer says: {reason}"), true, now);
                            self.closed(id, index, now);
                        }
                    }
                    self.say(id, &Frame::DownSeen { pair, epoch });
                }
                Ok(())
            }
            Frame::DownSeen { pair, epoch } => {
                let it = pair_of(&mut peer.pairs, pair)?;
                if it.epoch == epoch && it.state == State::Closing {
                    self.closed(id, pair.into(), now);
                }
                Ok(())
            }
            _ => Err(nonsense()),
        }
    }

    fn say(&mut self, id: PeerId, frame: &Frame) {
        if let Some(peer) = self.peers.get_mut(id) {
            peer.control.send(frame);
        }
    }

    /// Answers a peer that has told its devices.
    fn greet(
        &mut self,
        id: PeerId,
        version: u32,
        queue_pairs: u8,
        theirs: &[Facts],
        now: Instant,
    ) -> Result<()> {
        let reason = if version != VERSION {
            format!("it speaks version {VERSION}, not {version}")
        } else if queue_pairs != self.queue_pairs {
            let ours = self.queue_pairs;
            format!("it has {ours} queue pairs per pair of devices, not {queue_pairs}")
        } else {
            let ours: Vec<_> = self.devices.iter().map(|device| device.facts.clone()).collect();
            let pairs = pairing::pair(&ours, theirs);
            let pairs: Vec<_> = pairs.iter().map(|&(i, j)| (i as u8, j as u8)).collect();
            let answer = pairs.iter().map(|&(i, j)| (j, i)).collect();
            self.say(id, &Frame::Pairs { rails: ours, pairs: answer });
            self.room[1] = self.room[1].saturating_sub(1);
            let made = self.make_pairs(id, theirs, &pairs, now);
            if let Err(RailsError::Verbs { .. }) = &made {
                let reason = "it has no memory for messages".into();
                self.say(id, &Frame::Refused { version: VERSION, reason });
            }
            self.speak(id);
            return made;
        };
        self.say(id, &Frame::Refused { version: VERSION, reason: reason.clone() });
        self.speak(id);
        Err(RailsError::Refused(reason))
    }

    /// The pairs are agreed upon.
    fn make_pairs(
        &mut self,
        id: PeerId,
        theirs: &[Facts],
        pairs: &[(u8, u8)],
        now: Instant,
    ) -> Result<()> {
        let Some(peer) = self.peers.get_mut(id) else { return Ok(()) };
        if pairs.is_empty() {
            let names = |facts: &Facts| {
                let gids: Vec<_> = facts.gids.iter().map(ToString::to_string).collect();
                format!("{} ({})", facts.name, gids.join(" "))
            };
            return Err(RailsError::NoPair {
                ours: self.devices.iter().map(|device| names(&device.facts)).collect(),
                theirs: theirs.iter().map(names).collect(),
            });
        }
        for &(ours, theirs_index) in pairs {
            let ours_index = usize::from(ours);
            let (Some(device), Some(other)) =
                (self.devices.get(ours_index), theirs.get(usize::from(theirs_index)))
            else {
                return Err(nonsense());
            };
            let name = format!("{} to {}", device.name, other.name);
            let speed = match (device.facts.speed, other.speed) {
                (0, speed) | (speed, 0) => speed,
                (one, two) => one.min(two),
            };
            peer.pairs.push(Pair::new(ours_index, theirs_index.into(), name, speed, now));
        }
        peer.their_devices = theirs.len();
        (peer.stage, peer.since) = (Stage::Opening, Some(now));
        let longest = self.longest_message;
        let len = Messages::memory_len(longest as usize);
        let memory = self.allocate(len, AccessFlags::REMOTE_WRITE)?;
        let messages = Messages::new(memory, longest as usize);
        self.say(id, &Frame::Inbox { memory: messages.inbox()?, longest });
        if let Some(peer) = self.peers.get_mut(id) {
            peer.messages = Some(messages);
        }
        Ok(())
    }

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
            let epoch = it.epoch;
            let opened = match self.devices[it.ours].is_active() {
                true => self.open(id, pair, None),
                false => Err("our port is not active".into()),
            };
            match opened {
                Ok(ends) => self.say(id, &Frame::Open { pair: pair as u8, epoch, ends }),
                Err(reason) => {
                    self.close(id, pair, reason, true, now);
                    self.closed(id, pair, now);
                }
            }
        }
    }

    /// Makes the queue pairs of a pair, and connects them if the peer's are known.
    fn open(&mut self, id: PeerId, pair: usize, theirs: Option<&Ends>) -> Result<Ends, String> {
        let it = &self.peers[id].pairs[pair];
        let device = it.ours;
        if !self.devices[device].is_active() {
            return Err("its port is not active".into());
        }
        let mut channels = Vec::new();
        let result = self.make_channels(id, pair, device, theirs, &mut channels);
        let it = &mut self.peers[id].pairs[pair];
        match result {
            Ok(ends) => {
                it.lanes = channels.iter().map(|&channel| Lane { channel, in_flight: 0 }).collect();
                it.in_flight = 0;
                it.state = match theirs {
                    Some(_) => State::Probing(0),
                    None => State::Opening,
                };
                Ok(ends)
            }
            Err(error) => {
                for channel in channels {
                    // If that fails, it is leaked.
                    let _ = self.devices[device].engine.remove(channel);
                }
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
    fn probe(&mut self, id: PeerId, pair: usize, theirs: &Ends) -> Result<(), String> {
        let it = &mut self.peers[id].pairs[pair];
        let (device, lanes) = (it.ours, it.lanes.clone());
        if theirs.endpoints.len() != lanes.len() {
            return Err("the peer has made another number of queue pairs".into());
        }
        it.state = State::Probing(lanes.len());
        for (lane, &remote) in lanes.iter().zip(&theirs.endpoints) {
            self.probe_lane(id, pair, device, lane.channel, remote, theirs.probe)
                .map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    fn probe_lane(
        &mut self,
        peer: PeerId,
        pair: usize,
        index: usize,
        channel: ChannelId,
        remote: ibverbs::QueuePairEndpoint,
        memory: RemoteMemoryRegion,
    ) -> Result<(), ibverbs::TransportError> {
        let device = &mut self.devices[index];
        device.engine.handshake(channel, remote)?;
        let buffer = SharedMemoryRange::new(device.scratch.clone(), ..PROBE)?;
        let memory = memory.sub_region(0, PROBE as u64)?;
        let token = self.works.insert(Work::Probe { peer, pair });
        let request = ReadWorkRequest::new(buffer, memory);
        device.engine.post(channel, request, token.data().as_ffi()).map_err(|error| error.error)
    }

    /// A queue pair has carried its probe.
    pub(crate) fn probed(&mut self, id: PeerId, pair: usize) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        let it = &mut peer.pairs[pair];
        let epoch = it.epoch;
        match it.state {
            State::Probing(1) => {
                peer.control.send(&Frame::Up { pair: pair as u8, epoch });
                self.up(id, pair);
                self.tried(id);
            }
            State::Probing(lanes) => it.state = State::Probing(lanes.saturating_sub(1)),
            _ => {}
        }
    }

    fn up(&mut self, id: PeerId, pair: usize) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        peer.is_ready = true;
        let it = &mut peer.pairs[pair];
        it.is_up();
        self.events.push_back(Event::RailUp { peer: id, device: it.ours });
    }

    /// If each pair has been tried, the peer is connected, or not to be reached.
    fn tried(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        let is_tried = |pair: &Pair| pair.state == State::Up || pair.failure.is_some();
        if peer.opens && peer.stage == Stage::Opening && peer.pairs.iter().all(is_tried) {
            peer.control.send(&Frame::Ready);
            let result = self.connected(id);
            if let Err(error) = result {
                self.speak(id);
                self.lose(id, error);
            }
        }
    }

    fn connected(&mut self, id: PeerId) -> Result<()> {
        let Some(peer) = self.peers.get_mut(id) else { return Ok(()) };
        if let Some(reasons) = peer.failures() {
            return Err(RailsError::AllRailsDown(reasons));
        }
        // Both sides tell their slots before.
        peer.messages.as_ref().filter(|messages| messages.is_known()).ok_or_else(nonsense)?;
        peer.stage = Stage::Connected;
        self.events.push_back(Event::Connected(id));
        Ok(())
    }

    /// Closes the pairs that have failed.
    pub(crate) fn close_failed(&mut self, now: Instant) {
        while let Some(Failed { peer: id, pair, epoch, reason, is_fault }) = self.failed.pop() {
            let Some(peer) = self.peers.get_mut(id) else { continue };
            let it = &peer.pairs[pair];
            if it.epoch != epoch || matches!(it.state, State::Down { .. } | State::Closing) {
                continue;
            }
            self.close(id, pair, reason.clone(), is_fault, now);
            self.say(id, &Frame::Down { pair: pair as u8, epoch, reason });
        }
    }

    /// Closes a pair on this side. Its pieces wait for the others.
    fn close(&mut self, id: PeerId, pair: usize, reason: String, is_fault: bool, now: Instant) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        peer.is_ready = true;
        let it = &mut peer.pairs[pair];
        let (device, was_up) = (it.ours, it.state == State::Up);
        it.state = State::Closing;
        it.in_flight = 0;
        if is_fault {
            it.failure = Some(reason.clone());
        }
        for lane in std::mem::take(&mut it.lanes) {
            // If that fails, it is leaked, with what it has in flight.
            let _ = self.devices[device].engine.remove(lane.channel);
        }
        // What has ended comes now, also what was in flight.
        while self.poll(device, now) {}
        if was_up {
            self.events.push_back(Event::RailDown { peer: id, device, reason });
        }
        let Some(peer) = self.peers.get(id) else { return };
        if let (Some(reasons), Stage::Connected) = (peer.failures(), peer.stage) {
            self.fail_transfers(id, || RailsError::AllRailsDown(reasons.clone()));
        }
    }

    /// The other side has closed the pair, too.
    fn closed(&mut self, id: PeerId, pair: usize, now: Instant) {
        let random = self.random((pair, now));
        let Some(peer) = self.peers.get_mut(id) else { return };
        peer.is_ready = true;
        let it = &mut peer.pairs[pair];
        let retry_at = if it.failure.is_none() { now } else { it.retry_at(now, random) };
        it.state = State::Down { retry_at };
        self.tried(id);
    }

    fn fail_transfers(&mut self, id: PeerId, error: impl Fn() -> RailsError) {
        let of_peer = self.transfers.iter().filter(|(_, (peer, _))| *peer == id);
        for transfer in of_peer.map(|(transfer, _)| transfer).collect::<Vec<_>>() {
            self.transfers.remove(transfer);
            self.events.push_back(Event::Ended { transfer, peer: id, result: Err(error()) });
        }
        if let Some(peer) = self.peers.get_mut(id) {
            peer.queue.clear();
            if let Some(messages) = &mut peer.messages {
                messages.forget_waiting();
            }
        }
    }

    /// The peer is gone: everything of it ends.
    pub(crate) fn lose(&mut self, id: PeerId, error: RailsError) {
        let Some(peer) = self.peers.remove(id) else { return };
        self.progress += 1;
        self.changes += 1;
        if let (Some(stream), Some(_)) = (peer.control.descriptor(), peer.watched) {
            self.readiness.forget(stream);
        }
        for pair in &peer.pairs {
            for lane in &pair.lanes {
                let _ = self.devices[pair.ours].engine.remove(lane.channel);
            }
        }
        let text = error.to_string();
        let gone = || RailsError::Control(io::Error::new(ErrorKind::NotConnected, text.clone()));
        self.fail_transfers(id, gone);
        self.events.push_back(Event::Disconnected { peer: id, error });
    }
}

fn pair_of(pairs: &mut [Pair], index: u8) -> Result<&mut Pair> {
    pairs.get_mut(usize::from(index)).ok_or_else(nonsense)
}

/// The peer has said what it cannot say now.
pub(crate) fn nonsense() -> RailsError {
    let text = "the peer has said what it cannot say now: it is another program";
    RailsError::Control(io::Error::new(ErrorKind::InvalidData, text))
}
