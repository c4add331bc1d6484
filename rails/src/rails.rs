//! All devices of this side, and the peers: the one object that a program holds.

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::ops::RangeBounds;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;
use std::{fmt, io};

use ibverbs::memory::SharedMemory;
use ibverbs::{AccessFlags, ProtectionDomain, RegionOptions};
use slotmap::SlotMap;

use crate::control::Frame;
use crate::devices::{Device, RailsBuilder};
use crate::error::{RailsError, Result};
use crate::event::{Event, PeerId, TransferId};
use crate::memory::RailMemory;
use crate::messages::Messages;
use crate::pair::State;
use crate::peer::{Peer, Stage};
use crate::readiness::{Interest, Readiness};
use crate::transfer::{Active, Transfer};

/// Several devices as one: see the [crate](crate).
pub struct Rails {
    /// No others of the process have it.
    number: u32,
    pub(crate) devices: Vec<Device>,
    pub(crate) queue_pairs: u8,
    pub(crate) peers: SlotMap<PeerId, Peer>,
    pub(crate) longest_message: u32,
    pub(crate) transfers: SlotMap<TransferId, (PeerId, Task)>,
    pub(crate) events: VecDeque<Event>,
    /// Pairs that are to be closed, with the epoch and the reason.
    pub(crate) failed: Vec<Failed>,
    /// Peers that are to be ended: they have broken the agreement, or cannot be reached.
    pub(crate) lost: Vec<(PeerId, RailsError)>,
    pub(crate) readiness: Readiness,
    /// Peers that came to [`accept`](Self::accept), which has not returned them yet.
    pub(crate) accepting: Vec<PeerId>,
    /// How many of these there may be.
    pub(crate) most_accepting: usize,
    /// How many pairs may begin to be opened, and how many peers be answered, in this turn.
    pub(crate) room: [usize; 2],
    /// Counts what has happened.
    pub(crate) progress: u64,
    /// Counts peers that came and went.
    pub(crate) changes: u64,
    turns: u32,
    keys: Vec<PeerId>,
    random: RandomState,
}

/// How many more connections than peers a listener accepts at a time, since some of them never become peers.
const MORE_ACCEPTING: usize = 64;

/// The transfers that are under way.
#[expect(clippy::large_enum_variant, reason = "most of them are transfers")]
#[derive(Debug)]
pub(crate) enum Task {
    Transfer(Active),
    Message,
}

#[derive(Debug)]
pub(crate) struct Failed {
    pub(crate) peer: PeerId,
    pub(crate) pair: usize,
    pub(crate) epoch: u32,
    pub(crate) reason: String,
    /// Whether the pair itself has failed, rather than one transfer that it carried.
    pub(crate) is_fault: bool,
}

impl RailsBuilder {
    /// Opens the devices.
    ///
    /// # Errors
    ///
    ///  - [`InvalidInput`](RailsError::InvalidInput): no device is left to be used, or more than 255; or it cannot have so
    ///    many [peers](Self::peers).
    ///  - [`Verbs`](RailsError::Verbs): a device could not be opened or set up: see [`ibverbs::open`],
    ///    [`ProtectionDomain::new`](ibverbs::ProtectionDomain::new) and [`Loop::new`](ibverbs::Loop::new).
    pub fn build(self) -> Result<Rails> {
        let devices = self.open()?;
        let readiness = Readiness::new()?;
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        Ok(Rails {
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            devices,
            queue_pairs: self.queue_pairs,
            longest_message: self.longest_message,
            most_accepting: self.peers as usize + MORE_ACCEPTING,
            peers: SlotMap::with_key(),
            transfers: SlotMap::with_key(),
            events: VecDeque::new(),
            failed: Vec::new(),
            lost: Vec::new(),
            readiness,
            accepting: Vec::new(),
            room: [0; 2],
            progress: 0,
            changes: 0,
            turns: 0,
            keys: Vec::new(),
            random: RandomState::new(),
        })
    }
}

impl Rails {
    /// Chooses devices.
    pub fn builder() -> RailsBuilder {
        RailsBuilder::new()
    }

    /// The names of the devices, in their order.
    pub fn devices(&self) -> impl ExactSizeIterator<Item = &str> {
        self.devices.iter().map(|device| device.name.as_str())
    }

    /// `ibv_reg_mr`: allocates `len` zeroed bytes and registers them on all devices, as `options` say; plain
    /// [`AccessFlags`](ibverbs::AccessFlags) convert into options.
    ///
    /// The pages are brought in by several threads first, unless the memory is
    /// [on demand](ibverbs::AccessFlags::ON_DEMAND), and the devices pin them at the same time.
    ///
    /// # Errors
    ///
    ///  - [`Verbs`](RailsError::Verbs): those of [`RegionBuffer::new`](ibverbs::memory::RegionBuffer::new),
    ///    [`populate`](ibverbs::memory::RegionBuffer::populate), [`from_buffer`](ibverbs::SharedMemoryRegion::from_buffer) and
    ///    [`register_in`](ibverbs::SharedMemoryRegion::register_in), with the device. `ENOMEM` comes before a page is
    ///    brought in, if all devices together would [pin](ibverbs::memory::PinnedMemory) more than the process may.
    #[doc(alias = "ibv_reg_mr")]
    pub fn allocate(&self, len: usize, options: impl Into<RegionOptions>) -> Result<RailMemory> {
        self.allocate_with_progress(len, options, |_, _| {})
    }

    /// [Allocates](Self::allocate), and tells `progress` the bytes that are done, and all that are to be done: each byte
    /// counts when it is in memory, and once more on each device. It is called on several threads.
    ///
    /// # Errors
    ///
    /// Those of [`allocate`](Self::allocate).
    #[doc(alias = "ibv_reg_mr")]
    pub fn allocate_with_progress(
        &self,
        len: usize,
        options: impl Into<RegionOptions>,
        progress: impl Fn(u64, u64) + Sync,
    ) -> Result<RailMemory> {
        RailMemory::new(self.number, &self.domains(), len, options.into(), &progress)
    }

    /// `ibv_reg_mr`: registers the bytes in `range` of memory that is there on all devices, as `options` say: a memfd of
    /// another process, a file, huge pages, the pinned arena of another library. It needs no copy of them.
    ///
    /// Memory of a GPU that programs may map, as pinned host memory of CUDA, is [`SharedMemory::from_raw`]; other memory of a
    /// GPU is a [dma-buf](Self::register_dmabuf).
    ///
    /// # Errors
    ///
    ///  - [`InvalidInput`](RailsError::InvalidInput): the range is empty or out of bounds.
    ///  - [`Verbs`](RailsError::Verbs): those of [`SharedMemory::register`], with the device.
    #[doc(alias = "ibv_reg_mr")]
    pub fn register(
        &self,
        memory: &SharedMemory,
        range: impl RangeBounds<usize>,
        options: impl Into<RegionOptions>,
    ) -> Result<RailMemory> {
        RailMemory::of_memory(self.number, &self.domains(), memory, range, options.into())
    }

    /// `ibv_reg_dmabuf_mr`: registers `len` bytes of a dma-buf from `offset` on, such as memory of a GPU, on all devices. The
    /// descriptor can be closed then. On each device it has other addresses, which [`RailMemory::remote`] tells the peer.
    ///
    /// Transfers read and write it as other memory. This program does not: [`RailMemory::read`] and
    /// [`write`](RailMemory::write) fail. [docs/dma-buf.md] says how a GPU's library exports one.
    ///
    /// [docs/dma-buf.md]: https://github.com/ibverbs-bundled/ibverbs-bundled/blob/main/docs/dma-buf.md
    ///
    /// # Errors
    ///
    ///  - [`Verbs`](RailsError::Verbs): those of [`RawMemoryRegion::map_dmabuf`](ibverbs::memory::RawMemoryRegion::map_dmabuf),
    ///    with the device: `EOPNOTSUPP` or `EPROTONOSUPPORT` if it, or the kernel, has no dma-bufs.
    #[doc(alias = "ibv_reg_dmabuf_mr")]
    pub fn register_dmabuf(
        &self,
        dmabuf: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        access: AccessFlags,
    ) -> Result<RailMemory> {
        RailMemory::of_dmabuf(self.number, &self.domains(), dmabuf, offset, len, access)
    }

    fn domains(&self) -> Vec<(&str, &Arc<ProtectionDomain<'static>>)> {
        self.devices.iter().map(|device| (device.name.as_str(), &device.domain)).collect()
    }

    /// Ends the connection to a peer. Its transfers end with errors. Messages and notifications that have arrived stay to be
    /// asked for.
    pub fn remove(&mut self, peer: PeerId) {
        let closed = io::Error::from(io::ErrorKind::NotConnected);
        self.lose(peer, RailsError::Control(closed));
        self.take_event(
            |event| matches!(event, Event::Disconnected { peer: gone, .. } if *gone == peer),
        );
    }

    /// Whether a pair with this device of ours works, for each device in its order. Empty if there is no such peer.
    pub fn rails_up(&self, peer: PeerId) -> Vec<bool> {
        let Some(peer) = self.peers.get(peer) else { return Vec::new() };
        let is_up =
            |device| peer.pairs.iter().any(|pair| pair.ours == device && pair.state == State::Up);
        (0..self.devices.len()).map(is_up).collect()
    }

    /// The bytes of transfers that each device of ours has carried with this peer, in the devices' order: for a display.
    /// What the peer's own transfers carry counts on its side. Empty if there is no such peer.
    pub fn bytes_carried(&self, peer: PeerId) -> Vec<u64> {
        let Some(peer) = self.peers.get(peer) else { return Vec::new() };
        let mut bytes = vec![0; self.devices.len()];
        peer.pairs.iter().for_each(|pair| bytes[pair.ours] += pair.carried);
        bytes
    }

    /// Begins a transfer, which [`Event::Ended`] ends. [`wait`](Self::wait) waits for it.
    ///
    /// # Errors
    ///
    ///  - [`InvalidInput`](RailsError::InvalidInput): its parts do not fit, or are of other rails' memory.
    ///  - [`UnknownPeer`](RailsError::UnknownPeer): the peer is gone, or not connected yet.
    ///  - [`AllRailsDown`](RailsError::AllRailsDown): no pair of devices works.
    pub fn post(&mut self, peer: PeerId, transfer: Transfer) -> Result<TransferId> {
        let id = peer;
        let peer = connected(&mut self.peers, id)?;
        transfer.check(self.number, peer.their_devices)?;
        let transfer = self.transfers.insert((id, Task::Transfer(Active::new(transfer))));
        peer.queue.push_back(transfer);
        self.fill(id, Instant::now());
        Ok(transfer)
    }

    /// Sends a message, which [`Event::Message`] gives to the peer's program: whole, once, and in the order of the
    /// messages to this peer, also when rails fail. [`Event::Ended`] tells that it is in the peer's memory, as are all before
    /// it: the peer's program gets it, even if this side closes then.
    ///
    /// It is not in order with transfers: if the peer is to find the bytes of one, wait for its end before.
    ///
    /// Messages wait here while the peer's program does not take those that it has got; the program bounds how many, by
    /// waiting. After [`AllRailsDown`](RailsError::AllRailsDown), a message may still arrive when a rail returns.
    ///
    /// # Errors
    ///
    ///  - [`InvalidInput`](RailsError::InvalidInput): it is longer than one of the sides
    ///    [allows](RailsBuilder::longest_message).
    ///  - [`UnknownPeer`](RailsError::UnknownPeer): the peer is gone, or not connected yet.
    ///  - [`AllRailsDown`](RailsError::AllRailsDown): no pair of devices works.
    pub fn send(&mut self, peer: PeerId, message: impl Into<Vec<u8>>) -> Result<TransferId> {
        let (id, message) = (peer, message.into());
        let peer = connected(&mut self.peers, id)?;
        let messages = peer.messages.as_mut().ok_or(RailsError::UnknownPeer)?;
        let (len, longest) = (message.len(), messages.longest());
        if len > longest {
            let text = format!("a message has {longest} bytes at most, not {len}");
            return Err(RailsError::InvalidInput(text));
        }
        let transfer = self.transfers.insert((id, Task::Message));
        messages.push(transfer, message);
        self.fill(id, Instant::now());
        Ok(transfer)
    }

    /// Waits until a transfer or a message has ended, and returns its result. Other events stay to be asked for.
    ///
    /// # Errors
    ///
    ///  - [`TimedOut`](RailsError::TimedOut): the deadline has passed. The transfer goes on.
    ///  - The transfer's error.
    pub fn wait(&mut self, transfer: TransferId, deadline: Instant) -> Result<()> {
        let is_it = |event: &Event| matches!(event, Event::Ended { transfer: ended, .. } if *ended == transfer);
        match self.wait_until(deadline, None, |rails| rails.take_event(is_it))? {
            Event::Ended { result, .. } => result,
            _ => Ok(()),
        }
    }

    /// Waits for the next event.
    ///
    /// # Errors
    ///
    ///  - [`TimedOut`](RailsError::TimedOut): the deadline has passed.
    pub fn wait_event(&mut self, deadline: Instant) -> Result<Event> {
        self.wait_until(deadline, None, |rails| rails.next_event())
    }

    /// Waits for the next message of a peer. Other events stay to be asked for.
    ///
    /// # Errors
    ///
    ///  - [`TimedOut`](RailsError::TimedOut): the deadline has passed.
    ///  - [`UnknownPeer`](RailsError::UnknownPeer): the peer is gone, and no message of it is left.
    pub fn receive(&mut self, peer: PeerId, deadline: Instant) -> Result<Vec<u8>> {
        let is_it = |event: &Event| matches!(event, Event::Message { peer: of, .. } if *of == peer);
        let found = self.wait_until(deadline, None, |rails| {
            let message = rails.take_event(is_it);
            message.map(Some).or_else(|| (!rails.peers.contains_key(peer)).then_some(None))
        });
        match found? {
            Some(Event::Message { bytes, .. }) => Ok(bytes),
            _ => Err(RailsError::UnknownPeer),
        }
    }

    /// The next event, if there is one. It never waits; [`turn`](Self::turn) makes events.
    pub fn next_event(&mut self) -> Option<Event> {
        self.take_event(|_| true)
    }

    pub(crate) fn take_event(&mut self, is_it: impl FnMut(&Event) -> bool) -> Option<Event> {
        let place = self.events.iter().position(is_it)?;
        let event = self.events.remove(place)?;
        match event {
            Event::Message { peer, .. } => self.message_taken(peer),
            Event::Notified { peer, .. } => self.notification_taken(peer),
            // The program knows it, whatever it has asked for.
            Event::Connected(peer) | Event::Disconnected { peer, .. } => {
                self.accepting.retain(|&other| other != peer);
            }
            _ => {}
        }
        Some(event)
    }

    /// The program has a message, so that there is room for another.
    pub(crate) fn message_taken(&mut self, peer: PeerId) {
        let Some(peer) = self.peers.get_mut(peer) else { return };
        if let Some(below) = peer.messages.as_mut().and_then(Messages::taken) {
            peer.control.send(&Frame::Taken { below });
        }
    }

    /// The program has a notification, so that there is room for another.
    pub(crate) fn notification_taken(&mut self, peer: PeerId) {
        let Some(peer) = self.peers.get_mut(peer) else { return };
        peer.incoming.taken();
        peer.confirm_transfers();
    }

    /// Does all that can be done at the moment, without waiting: looks for completions and for the peers' words, and
    /// posts what there is room for. The waiting calls do it; a program with an event loop of its own calls it when the
    /// [descriptor](Self::arm) is readable.
    pub fn turn(&mut self, now: Instant) {
        let before = self.progress;
        for device in 0..self.devices.len() {
            self.poll(device);
        }
        let mut peers = std::mem::take(&mut self.keys);
        peers.clear();
        peers.extend(self.peers.keys());
        // Completions come often, and words seldom.
        self.turns = self.turns.wrapping_add(1);
        if self.progress == before || self.turns.is_multiple_of(16) {
            for peer in self.readiness.peers() {
                if let Some(peer) = self.peers.get_mut(peer) {
                    peer.is_readable = true;
                }
            }
            self.count_handshakes(now);
            for &peer in &peers {
                self.listen(peer, now);
                self.open_due(peer, now);
            }
        }
        self.close_failed();
        for &peer in &peers {
            if self.peers.get(peer).is_some_and(|peer| peer.is_ready) {
                self.fill(peer, now);
            }
            self.speak(peer, now);
        }
        self.keys = peers;
    }

    /// When [`turn`](Self::turn) has something to do, even if nothing happens: a rail is to be tried again, a peer has had
    /// time enough to connect or to read, or has said more than one turn looks at.
    fn next_turn(&self) -> Option<Instant> {
        let heard = || self.peers.values().filter(|peer| !peer.is_held);
        if heard().any(|peer| peer.is_readable && !peer.control.is_full()) {
            return Some(Instant::now());
        }
        let late = heard().filter_map(|peer| Some(peer.since? + peer.time_to_connect()?));
        let opening =
            self.peers.values().filter(|peer| peer.opens && peer.stage != Stage::Greeting);
        let due = opening.flat_map(|peer| &peer.pairs).filter_map(|pair| match pair.state {
            State::Down { retry_at } => Some(retry_at),
            _ => None,
        });
        let unread = self.peers.values().filter_map(|peer| peer.control.full_until());
        due.chain(late).chain(unread).chain(self.next_room()).min()
    }

    /// `ibv_req_notify_cq`: from now on, the descriptor ([`AsFd`]) becomes readable when there is something for
    /// [`turn`](Self::turn), or it is time for it. What is there already does not make it readable: call `turn` once
    /// before sleeping.
    ///
    /// # Errors
    ///
    ///  - [`Verbs`](RailsError::Verbs): a device is gone, or was not armed. It does not make the descriptor readable, and the
    ///    next `turn` closes its pairs; everything else does: the program can sleep. It is tried again by the next call.
    ///  - [`Control`](RailsError::Control): the timer cannot be set, or no more files can be waited for.
    #[doc(alias = "ibv_req_notify_cq")]
    pub fn arm(&mut self) -> Result<()> {
        let mut armed = self.readiness.wake_at(self.next_turn()).map_err(RailsError::from);
        for index in 0..self.devices.len() {
            if let Err(error) = self.arm_device(index) {
                self.fail_device(index, &error.to_string());
                armed = armed.and(Err(error));
            }
        }
        armed
    }

    fn arm_device(&mut self, index: usize) -> Result<()> {
        let Device { engine, name, watched, .. } = &mut self.devices[index];
        let armed = engine.arm().map_err(|error| RailsError::verbs(name, error));
        if armed.is_ok() && !*watched {
            self.readiness.add(engine.as_fd())?;
        } else if armed.is_err() && *watched {
            // The file of a device that is gone is readable for ever.
            self.readiness.forget(engine.as_fd());
        }
        *watched = armed.is_ok();
        armed
    }

    /// Watches a peer's stream for what is to be done with it.
    pub(crate) fn watch(&mut self, id: PeerId) -> io::Result<()> {
        let Some(peer) = self.peers.get_mut(id) else { return Ok(()) };
        if let Some(stream) = peer.control.descriptor() {
            let (reads, writes) = (!peer.control.is_full(), peer.control.has_output());
            // A peer that is held is not read, so epoll would report the end of its stream again and again.
            let interest = (!peer.is_held).then_some(Interest { reads, writes });
            let before = std::mem::replace(&mut peer.watched, interest);
            self.readiness.watch(id, stream, interest, before)?;
        }
        Ok(())
    }

    /// Turns and sleeps until `found` finds something.
    pub(crate) fn wait_until<T>(
        &mut self,
        deadline: Instant,
        other: Option<BorrowedFd<'_>>,
        mut found: impl FnMut(&mut Self) -> Option<T>,
    ) -> Result<T> {
        let mut is_armed = false;
        loop {
            let before = self.progress;
            self.turn(Instant::now());
            if let Some(it) = found(self) {
                return Ok(it);
            }
            if Instant::now() >= deadline {
                return Err(RailsError::TimedOut);
            }
            if self.progress != before {
                is_armed = false;
            } else if is_armed {
                // A listener has to wait while too many are not connected yet.
                let has_place = self.accepting.len() < self.most_accepting;
                self.readiness.sleep(other.filter(|_| has_place), deadline)?;
                is_armed = false;
            } else {
                // The next turn closes the pairs of a device that is gone.
                if let Err(error @ RailsError::Control(_)) = self.arm() {
                    return Err(error);
                }
                is_armed = true;
            }
        }
    }

    /// A number for a pause, different for each side, peer and time.
    pub(crate) fn random(&self, salt: impl std::hash::Hash) -> u32 {
        self.random.hash_one(salt) as u32
    }
}

/// The peer, if it is connected and a pair works.
fn connected(peers: &mut SlotMap<PeerId, Peer>, id: PeerId) -> Result<&mut Peer> {
    let peer = peers.get_mut(id).filter(|peer| peer.stage == Stage::Connected);
    let peer = peer.ok_or(RailsError::UnknownPeer)?;
    match peer.failures() {
        Some(reasons) => Err(RailsError::AllRailsDown(reasons)),
        None => Ok(peer),
    }
}

impl AsFd for Rails {
    /// The file that is readable when there is something to do, after [`arm`](Rails::arm). Only wait for it.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.readiness.as_fd()
    }
}

impl fmt::Debug for Rails {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rails")
            .field("devices", &self.devices().collect::<Vec<_>>())
            .field("peers", &self.peers.len())
            .field("transfers", &self.transfers.len())
            .finish_non_exhaustive()
    }
}
