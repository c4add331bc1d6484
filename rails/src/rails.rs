//! All devices of this side, and the peers: the one object that a program holds.

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::net::{TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};
use std::{fmt, io};

use ibverbs::RegionOptions;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use slotmap::{SlotMap, new_key_type};

use crate::control::{Control, ControlStream, Frame, VERSION};
use crate::devices::{Device, RailsBuilder};
use crate::error::{RailsError, Result};
use crate::memory::RailMemory;
use crate::peer::{Peer, Stage, State};
use crate::transfer::{Active, Piece, Transfer};

new_key_type! {
    /// Names a peer of a [`Rails`]. When it has been removed, it names none.
    pub struct PeerId;

    /// Names a transfer of a [`Rails`].
    pub struct TransferId;

    /// A request that a device has.
    pub(crate) struct WorkId;
}

/// What has happened.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// The peer is connected: each pair of devices was tried, and one works at least.
    Connected(PeerId),
    /// The peer is gone, and with it what was under way; or the connection was not made.
    Disconnected {
        /// The peer, which is removed.
        peer: PeerId,
        /// Why.
        error: RailsError,
    },
    /// A transfer has ended.
    Ended {
        /// The transfer.
        transfer: TransferId,
        /// The peer that it was with.
        peer: PeerId,
        /// On success, all bytes are there. Otherwise any of them may be.
        result: Result<()>,
    },
    /// All bytes of a peer's [notified](Transfer::notify) write have arrived.
    Notified {
        /// The peer.
        peer: PeerId,
        /// The number that it gave the write.
        tag: u16,
    },
    /// A pair of devices has failed. What it had under way goes over the others.
    RailDown {
        /// The peer.
        peer: PeerId,
        /// Our device, by its place in [`Rails::devices`].
        device: usize,
        /// Why.
        reason: String,
    },
    /// A pair of devices works, again or for the first time.
    RailUp {
        /// The peer.
        peer: PeerId,
        /// Our device, by its place in [`Rails::devices`].
        device: usize,
    },
}

/// Several devices as one: see the [crate](crate).
pub struct Rails {
    pub(crate) devices: Vec<Device>,
    pub(crate) queue_pairs: u8,
    pub(crate) peers: SlotMap<PeerId, Peer>,
    pub(crate) transfers: SlotMap<TransferId, (PeerId, Active)>,
    pub(crate) works: SlotMap<WorkId, Work>,
    pub(crate) events: VecDeque<Event>,
    /// Pairs that are to be closed, with the epoch and the reason.
    pub(crate) failed: Vec<Failed>,
    pub(crate) random: RandomState,
}

/// What a request of a device is for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Work {
    Piece { transfer: TransferId, peer: PeerId, pair: usize, piece: Piece },
    Receive { peer: PeerId, pair: usize },
    Probe { peer: PeerId, pair: usize },
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

impl Rails {
    /// Chooses devices.
    pub fn builder() -> RailsBuilder {
        RailsBuilder::new()
    }

    pub(crate) fn with_devices(devices: Vec<Device>, queue_pairs: u8) -> Self {
        Self {
            devices,
            queue_pairs,
            peers: SlotMap::with_key(),
            transfers: SlotMap::with_key(),
            works: SlotMap::with_key(),
            events: VecDeque::new(),
            failed: Vec::new(),
            random: RandomState::new(),
        }
    }

    /// The names of the devices, in their order.
    pub fn devices(&self) -> impl ExactSizeIterator<Item = &str> {
        self.devices.iter().map(|device| device.name.as_str())
    }

    /// `ibv_reg_mr`: allocates `len` zeroed bytes and registers them on all devices, as `options` say; plain
    /// [`AccessFlags`](ibverbs::AccessFlags) convert into options.
    ///
    /// # Errors
    ///
    ///  - [`Verbs`](RailsError::Verbs): those of [`SharedMemoryRegion::new`](ibverbs::SharedMemoryRegion::new) and
    ///    [`register_in`](ibverbs::SharedMemoryRegion::register_in), with the device.
    #[doc(alias = "ibv_reg_mr")]
    pub fn allocate(&self, len: usize, options: impl Into<RegionOptions>) -> Result<RailMemory> {
        let domains = self.devices.iter().map(|device| (device.name.as_str(), &device.domain));
        RailMemory::new(&domains.collect::<Vec<_>>(), len, options.into())
    }

    /// Connects to a peer that [accepts](Self::accept) at this TCP address, and returns when each pair of devices was
    /// tried.
    ///
    /// # Errors
    ///
    ///  - [`Control`](RailsError::Control): the TCP connection was not made, or has failed.
    ///  - [`NoPair`](RailsError::NoPair): no device of ours can reach one of the peer's.
    ///  - [`AllRailsDown`](RailsError::AllRailsDown): none of those that should does.
    ///  - [`Refused`](RailsError::Refused): the peer speaks another version.
    ///  - [`TimedOut`](RailsError::TimedOut): the deadline has passed.
    pub fn connect(&mut self, address: impl ToSocketAddrs, deadline: Instant) -> Result<PeerId> {
        let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
        for address in address.to_socket_addrs()? {
            let time = deadline.saturating_duration_since(Instant::now());
            if time.is_zero() {
                return Err(RailsError::TimedOut);
            }
            match TcpStream::connect_timeout(&address, time) {
                Ok(stream) => {
                    let peer = self.connect_over(nonblocking(stream)?);
                    return self.wait_connected(peer, deadline);
                }
                Err(error) => last = error,
            }
        }
        Err(last.into())
    }

    /// Waits for a peer that [connects](Self::connect).
    ///
    /// # Errors
    ///
    /// Those of [`connect`](Self::connect).
    pub fn accept(&mut self, listener: &TcpListener, deadline: Instant) -> Result<PeerId> {
        loop {
            // A peer that gives up between the two makes `accept` wait for the next one, hence the mode.
            listener.set_nonblocking(true)?;
            match listener.accept() {
                Ok((stream, _)) => {
                    let peer = self.accept_over(nonblocking(stream)?);
                    return self.wait_connected(peer, deadline);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
            if Instant::now() >= deadline {
                return Err(RailsError::TimedOut);
            }
            sleep(&mut [PollFd::new(listener, PollFlags::IN)], deadline)?;
        }
    }

    /// As [`connect`](Self::connect), over a stream of the program's, and without waiting:
    /// [`Event::Connected`] or [`Event::Disconnected`] follows.
    pub fn connect_over(&mut self, stream: impl ControlStream + 'static) -> PeerId {
        let mut control = Control::new(Box::new(stream));
        let rails = self.devices.iter().map(|device| device.facts.clone()).collect();
        let queue_pairs = self.queue_pairs;
        control.send(&Frame::Hello { version: VERSION, queue_pairs, rails });
        self.peers.insert(Peer::new(control, true))
    }

    /// As [`accept`](Self::accept), over a stream of the program's, and without waiting:
    /// [`Event::Connected`] or [`Event::Disconnected`] follows.
    pub fn accept_over(&mut self, stream: impl ControlStream + 'static) -> PeerId {
        self.peers.insert(Peer::new(Control::new(Box::new(stream)), false))
    }

    fn wait_connected(&mut self, peer: PeerId, deadline: Instant) -> Result<PeerId> {
        let found = self.wait_until(deadline, |rails| {
            rails.take_event(|event| match event {
                Event::Connected(connected) => *connected == peer,
                Event::Disconnected { peer: gone, .. } => *gone == peer,
                _ => false,
            })
        });
        match found {
            Ok(Event::Disconnected { error, .. }) => Err(error),
            Ok(_) => Ok(peer),
            Err(error) => {
                self.remove(peer);
                Err(error)
            }
        }
    }

    /// Ends the connection to a peer. Its transfers end with errors.
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

    /// Begins a transfer, which [`Event::Ended`] ends. [`wait`](Self::wait) waits for it.
    ///
    /// # Errors
    ///
    ///  - [`InvalidInput`](RailsError::InvalidInput): its parts do not fit, or are of other rails' memory.
    ///  - [`UnknownPeer`](RailsError::UnknownPeer): the peer is gone, or not connected yet.
    ///  - [`AllRailsDown`](RailsError::AllRailsDown): no pair of devices works.
    pub fn post(&mut self, peer: PeerId, transfer: Transfer) -> Result<TransferId> {
        let id = peer;
        let peer = self.peers.get_mut(id).filter(|peer| peer.stage == Stage::Connected);
        let peer = peer.ok_or(RailsError::UnknownPeer)?;
        transfer.check(self.devices.len(), peer.their_devices)?;
        if let Some(reasons) = peer.failures() {
            return Err(RailsError::AllRailsDown(reasons));
        }
        let transfer = self.transfers.insert((id, Active::new(transfer)));
        peer.queue.push_back(transfer);
        self.fill(id, Instant::now());
        Ok(transfer)
    }

    /// Waits until a transfer has ended, and returns its result. Other events stay to be asked for.
    ///
    /// # Errors
    ///
    ///  - [`TimedOut`](RailsError::TimedOut): the deadline has passed. The transfer goes on.
    ///  - The transfer's error.
    pub fn wait(&mut self, transfer: TransferId, deadline: Instant) -> Result<()> {
        let is_it = |event: &Event| matches!(event, Event::Ended { transfer: ended, .. } if *ended == transfer);
        match self.wait_until(deadline, |rails| rails.take_event(is_it))? {
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
        self.wait_until(deadline, |rails| rails.next_event())
    }

    /// The next event, if there is one. It never waits; [`turn`](Self::turn) makes events.
    pub fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn take_event(&mut self, is_it: impl FnMut(&Event) -> bool) -> Option<Event> {
        let place = self.events.iter().position(is_it)?;
        self.events.remove(place)
    }

    /// Does all that can be done at the moment, without waiting: looks for completions and for the peers' words, and
    /// posts what there is room for. The waiting calls do it; a program with an event loop of its own calls it when one
    /// of the [descriptors](Self::arm) is readable, and when [the time has come](Self::next_turn).
    pub fn turn(&mut self, now: Instant) {
        for device in 0..self.devices.len() {
            self.poll(device, now);
        }
        let peers: Vec<_> = self.peers.keys().collect();
        for &peer in &peers {
            self.listen(peer, now);
            self.open_due(peer, now);
        }
        self.close_failed(now);
        for &peer in &peers {
            if self.peers.get(peer).is_some_and(|peer| peer.is_ready) {
                self.fill(peer, now);
            }
            self.speak(peer);
        }
    }

    /// When [`turn`](Self::turn) has something to do, even if nothing happens: a rail is to be tried again.
    pub fn next_turn(&self) -> Option<Instant> {
        let opening =
            self.peers.values().filter(|peer| peer.opens && peer.stage != Stage::Greeting);
        let due = opening.flat_map(|peer| &peer.pairs).filter_map(|pair| match pair.state {
            State::Down { retry_at } => Some(retry_at),
            _ => None,
        });
        due.min()
    }

    /// `ibv_req_notify_cq`: from now on, each of the descriptors becomes readable when there is something for
    /// [`turn`](Self::turn). What is there already makes none readable: call `turn` once before sleeping.
    ///
    /// # Errors
    ///
    ///  - [`Verbs`](RailsError::Verbs): a device is gone.
    #[doc(alias = "ibv_req_notify_cq")]
    pub fn arm(&self) -> Result<Vec<std::os::fd::BorrowedFd<'_>>> {
        use std::os::fd::AsFd;

        let mut descriptors = Vec::new();
        for device in &self.devices {
            device.engine.arm().map_err(|error| RailsError::verbs(&device.name, error))?;
            descriptors.push(device.engine.as_fd());
        }
        descriptors.extend(self.peers.values().filter_map(|peer| peer.control.descriptor()));
        Ok(descriptors)
    }

    /// Turns and sleeps until `found` finds something.
    fn wait_until<T>(
        &mut self,
        deadline: Instant,
        mut found: impl FnMut(&mut Self) -> Option<T>,
    ) -> Result<T> {
        loop {
            self.turn(Instant::now());
            if let Some(it) = found(self) {
                return Ok(it);
            }
            // A device that is gone has no events; its pairs fail when they are polled.
            let _ = self.arm();
            self.turn(Instant::now());
            if let Some(it) = found(self) {
                return Ok(it);
            }
            if Instant::now() >= deadline {
                return Err(RailsError::TimedOut);
            }
            let until = self.next_turn().map_or(deadline, |next| next.min(deadline));
            let devices =
                self.devices.iter().map(|device| PollFd::new(&device.engine, PollFlags::IN));
            let mut files: Vec<_> = devices.collect();
            for peer in self.peers.values() {
                if let Some(descriptor) = peer.control.descriptor() {
                    let output =
                        if peer.control.has_output() { PollFlags::OUT } else { PollFlags::empty() };
                    files.push(PollFd::from_borrowed_fd(descriptor, PollFlags::IN | output));
                }
            }
            sleep(&mut files, until)?;
        }
    }

    /// A number for a pause, different for each side, peer and time.
    pub(crate) fn random(&self, salt: impl std::hash::Hash) -> u32 {
        self.random.hash_one(salt) as u32
    }
}

/// Sleeps until one of the files is ready, or the deadline has passed.
fn sleep(files: &mut [PollFd<'_>], until: Instant) -> Result<()> {
    let time = until.saturating_duration_since(Instant::now());
    // Rounded up, or the last of it would be spent in short sleeps.
    let time = Timespec::try_from(time + Duration::from_micros(1)).ok();
    match poll(files, time.as_ref()) {
        Ok(_) => Ok(()),
        Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(io::Error::from(error).into()),
    }
}

fn nonblocking(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    Ok(stream)
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
