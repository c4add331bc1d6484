//! Negotiation: the frames that the two sides exchange over their control stream.

use std::io::{self, ErrorKind};
use std::time::Instant;

use ibverbs::AccessFlags;

use crate::control::{Frame, MAX_ADDRESSES, VERSION};
use crate::error::{RailsError, Result};
use crate::event::PeerId;
use crate::messages::Messages;
use crate::pair::{Pair, State};
use crate::pairing::{self, Facts};
use crate::peer::Stage;
use crate::rails::{Failed, Rails};

/// Frames, and reads of 4 KiB, that one peer gets in a turn, so that no peer keeps the others waiting.
const STEPS_PER_TURN: u32 = 64;

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
        let since = *peer.since.get_or_insert(now);
        let is_late = peer.time_to_connect().is_some_and(|limit| since + limit <= now);
        if !peer.is_readable && !is_late && peer.watched.is_some() {
            return;
        }
        let stage = peer.stage;
        let mut steps = STEPS_PER_TURN;
        while steps > 0 {
            let Some(peer) = self.peers.get_mut(id) else { return };
            let result = match peer.control.receive(&mut steps) {
                Ok(Some(frame)) => {
                    self.progress += 1;
                    self.understand(id, frame, now)
                }
                Ok(None) => break,
                Err(error) => Err(error.into()),
            };
            if let Err(error) = result {
                return self.lose(id, error);
            }
        }
        let Some(peer) = self.peers.get_mut(id) else { return };
        peer.is_readable = steps == 0 || peer.control.is_full();
        if is_late && peer.stage == stage {
            let text = format!("the peer was not connected after {} s", (now - since).as_secs());
            self.lose(id, io::Error::new(ErrorKind::TimedOut, text).into());
        }
    }

    /// Writes what there is to say.
    pub(crate) fn speak(&mut self, id: PeerId, now: Instant) {
        let Some(peer) = self.peers.get_mut(id) else { return };
        if !peer.control.has_output() && !peer.watched.is_some_and(|watched| watched.writes) {
            return;
        }
        let spoken = peer.control.flush(now).and_then(|()| self.watch(id));
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
            // The peer's messages arrive before its `Ready`.
            Frame::Ready if !peer.opens && peer.stage == Stage::Connected => Ok(()),
            Frame::Confirmed { below } if peer.outgoing.confirm(below) => {
                peer.is_ready = true;
                Ok(())
            }
            Frame::Abandoned { number } => {
                // Pieces that have arrived count before the transfer is given up.
                (0..self.devices.len()).for_each(|device| self.drain(device));
                let Some(peer) = self.peers.get_mut(id) else { return Ok(()) };
                if !peer.incoming.abandon(number) {
                    return Err(nonsense());
                }
                peer.confirm_transfers();
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
                    // The pair was closed meanwhile.
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
                    self.close(id, pair.into(), reason, true);
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
                            self.close(id, index, format!("the peer says: {reason}"), true);
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

    pub(crate) fn say(&mut self, id: PeerId, frame: &Frame) {
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
            check_facts(theirs)?;
            let pairs = pairing::pair(&ours, theirs);
            let answer = pairs.iter().map(|&(i, j)| (j, i)).collect();
            self.say(id, &Frame::Pairs { rails: ours, pairs: answer });
            self.room[1] = self.room[1].saturating_sub(1);
            let made = self.make_pairs(id, theirs, &pairs, now);
            if let Err(RailsError::Verbs { .. }) = &made {
                let reason = "it has no memory for messages".into();
                self.say(id, &Frame::Refused { version: VERSION, reason });
            }
            self.speak(id, now);
            return made;
        };
        self.say(id, &Frame::Refused { version: VERSION, reason: reason.clone() });
        self.speak(id, now);
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
        check_facts(theirs)?;
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
        let mut is_paired = [vec![false; self.devices.len()], vec![false; theirs.len()]];
        for (number, &(ours, theirs_index)) in (0..).zip(pairs) {
            let ours_index = usize::from(ours);
            let (Some(device), Some(other)) =
                (self.devices.get(ours_index), theirs.get(usize::from(theirs_index)))
            else {
                return Err(nonsense());
            };
            // Each device once, so the number is one.
            let [one, two] = &mut is_paired;
            if std::mem::replace(&mut one[ours_index], true)
                || std::mem::replace(&mut two[usize::from(theirs_index)], true)
            {
                return Err(nonsense());
            }
            let name = format!("{} to {}", device.name, other.name);
            let speed = match (device.facts.speed, other.speed) {
                (0, speed) | (speed, 0) => speed,
                (one, two) => one.min(two),
            };
            let devices = (ours_index, theirs_index.into());
            peer.pairs.push(Pair::new(number, devices, name, speed, now));
        }
        peer.their_devices = theirs.len();
        (peer.stage, peer.since) = (Stage::Opening, Some(now));
        let longest = self.longest_message;
        let len = Messages::memory_len(longest as usize);
        let inbox = self.allocate(len, AccessFlags::REMOTE_WRITE)?;
        let outbox = self.allocate(len, AccessFlags::empty())?;
        let messages = Messages::new(inbox, outbox, longest as usize);
        self.say(id, &Frame::Inbox { memory: messages.inbox(), longest });
        if let Some(peer) = self.peers.get_mut(id) {
            peer.messages = Some(messages);
        }
        Ok(())
    }
}

/// Whether a side can have these devices.
fn check_facts(rails: &[Facts]) -> Result<()> {
    let addresses: usize = rails.iter().map(|rail| rail.gids.len()).sum();
    let is_possible = rails.len() <= usize::from(u8::MAX) && addresses <= MAX_ADDRESSES;
    is_possible.then_some(()).ok_or_else(nonsense)
}

fn pair_of(pairs: &mut [Pair], index: u8) -> Result<&mut Pair> {
    pairs.get_mut(usize::from(index)).ok_or_else(nonsense)
}

/// The peer has said what it cannot say now.
pub(crate) fn nonsense() -> RailsError {
    let text = "the peer has said what it cannot say now: it is another program";
    RailsError::Control(io::Error::new(ErrorKind::InvalidData, text))
}
