//! The side that sends: a device's paths to the devices of other processes.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{IpAddr, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ibverbs::device::forks;

use super::direct_access::{OneSided, Reach, pidfd};
use super::ring::Writer;
use super::{Heard, Listener, MOST, connect, introduce, listen, own_process};
use crate::files::Bell;
use crate::foreign::{Foreign, is_behind};
use crate::link::namespace::{Namespace, namespace};
use crate::wire::Packet;

/// How long to wait before connecting again to a listener that was not there, or stayed closed.
const AGAIN: Duration = if cfg!(test) { PATIENCE } else { Duration::from_millis(500) };

/// How often to look whether a process that does not read is still there.
pub(super) const LOOK: Duration = Duration::from_millis(1);

/// How many packets wait for room in a ring. Receivers hold back before (`Senders::is_full`).
const MOST_WAITING: usize = 16_384;

/// For how long they wait for a process that reads nothing. A test reads nothing while it writes, which may take long.
const PATIENCE: Duration = Duration::from_secs(if cfg!(test) { 600 } else { 2 });

/// For how long a process may take to let us in. One that has no descriptor left cannot, and one that is stopped does not. The
/// other side of a test may take longer.
const ANSWERS_WITHIN: Duration = if cfg!(test) { PATIENCE } else { Duration::from_millis(100) };

/// How long to wait before asking a process again that has not answered: packets wait for its answer each time.
const LATER: Duration = Duration::from_secs(5);

/// The path to an address.
#[derive(Debug)]
enum Path {
    /// Through the kernel's network, until this time: the peer's address has no listener, or its listener has refused us.
    Network(Instant),
    Ring(Connection),
}

/// A ring that another process reads.
#[derive(Debug)]
pub(in crate::link) struct Connection {
    connection: Foreign,
    writer: Writer,
    /// Wakes the other side, which has let us in and sent it. `None`: it has not answered.
    bell: Option<Bell>,
    /// When the ring was handed over.
    opened: Instant,
    /// This process's access to the memory of the process with this number.
    reach: Option<Reach>,
    process: libc::pid_t,
    /// Tells of its end, until `reach` is known. `None`: the kernel is older than 5.3, or no descriptor is left.
    pidfd: Option<OwnedFd>,
    /// When we last looked whether it is still there.
    looked: Instant,
    /// Packets written before the answer: the other side may refuse the ring.
    unanswered: Vec<Vec<u8>>,
    /// Packets that did not fit into the ring, in order.
    waiting: VecDeque<Vec<u8>>,
    /// When the first of these began to wait, or the reader last made room for one.
    progress: Instant,
    /// The reader has made no room for too long: nothing waits for it.
    is_stuck: bool,
}

impl Connection {
    /// Connects to the listener of `to`, and hands over a ring.
    fn new(from: (IpAddr, &Listener), to: IpAddr) -> Option<Self> {
        if is_behind() {
            return None;
        }
        let connection = Foreign::connection(connect(to)?);
        // Without this check, any process could take the name of an address of another machine.
        if !to.is_loopback() && UdpSocket::bind((to, 0)).is_err() {
            return None;
        }
        let process = own_process(&connection)?;
        // It answers later than this, so the number is still its own.
        let pidfd = pidfd(process).ok();
        let (writer, file) = Writer::create().ok()?;
        introduce(&connection, from, &file).ok()?;
        let now = Instant::now();
        Some(Self {
            connection,
            writer,
            bell: None,
            opened: now,
            reach: None,
            process,
            pidfd,
            looked: now,
            unanswered: Vec::new(),
            waiting: VecDeque::new(),
            progress: now,
            is_stuck: false,
        })
    }

    fn is_answered(&self) -> bool {
        self.bell.is_some()
    }

    /// Whether the other process is gone. It is looked up now and then, while it has not answered or does not read.
    fn is_gone(&mut self) -> bool {
        let reads = self.is_answered() && self.writer.is_empty();
        if reads || self.looked.elapsed() < LOOK {
            return false;
        }
        self.looked = Instant::now();
        self.is_cut_off()
    }

    /// Hears what the other process says, and returns whether it is gone.
    fn is_cut_off(&mut self) -> bool {
        match listen(&self.connection) {
            Heard::Nothing if !self.is_late() || !self.writer.withdraw() => return false,
            Heard::Answer(bell, table) if !self.is_answered() => {
                self.bell = Some(bell);
                let lets_in = table.zip(self.pidfd.take());
                self.reach =
                    lets_in.and_then(|(table, end)| Reach::new(&table, self.process, end).ok());
                self.unanswered = Vec::new();
                return false;
            }
            // Nobody reads the ring from now on: the packets go another way.
            Heard::Nothing | Heard::Answer(..) | Heard::End => {}
        }
        // Of two calls, the second one finds this too.
        // SAFETY: no memory is involved.
        unsafe { libc::shutdown(self.connection.as_raw_fd(), libc::SHUT_RDWR) };
        true
    }

    /// Whether the other process has had its time to answer.
    fn is_late(&self) -> bool {
        !self.is_answered() && self.opened.elapsed() >= ANSWERS_WITHIN
    }

    /// When to ask a process again that has not let us in.
    fn again(&self) -> Instant {
        Instant::now() + if self.is_late() { LATER } else { AGAIN }
    }

    /// Carries out an operation in the other process's memory; see [`Reach::carry_out`].
    ///
    /// # Safety
    ///
    /// As there.
    unsafe fn carry_out(&mut self, request: &OneSided, local: &[libc::iovec]) -> io::Result<bool> {
        if !self.is_answered() && self.is_cut_off() {
            return Ok(false);
        }
        let Some(reach) = &self.reach else { return Ok(false) };
        let is_connected = || reach.is_connected(&self.connection);
        // SAFETY: as the caller says.
        let done = unsafe { reach.carry_out(self.writer.lease(), request, local, is_connected) };
        if done.is_err() {
            self.reach = None;
        }
        done
    }

    /// Sends packets. What does not fit waits, for a time. Returns false if the other process is gone.
    pub(in crate::link) fn send(&mut self, packets: &mut [Packet]) -> bool {
        self.write_waiting();
        for packet in packets {
            self.writer.set_sealed(packet.is_sealed);
            if !self.waiting.is_empty() || !self.write(&packet.bytes) {
                self.wait(std::mem::take(&mut packet.bytes));
            }
        }
        self.ring()
    }

    fn write(&mut self, packet: &[u8]) -> bool {
        let fits = self.writer.write(packet);
        if fits {
            self.is_stuck = false;
            if !self.is_answered() {
                self.unanswered.push(packet.to_vec());
            }
        }
        fits
    }

    fn wait(&mut self, packet: Vec<u8>) {
        if self.waiting.is_empty() {
            self.progress = Instant::now();
        }
        if !self.is_stuck && self.waiting.len() < MOST_WAITING {
            self.waiting.push_back(packet);
        }
    }

    fn write_waiting(&mut self) {
        let before = self.waiting.len();
        while let Some(packet) = self.waiting.pop_front() {
            if !self.write(&packet) {
                self.waiting.push_front(packet);
                break;
            }
        }
        if self.waiting.len() < before {
            self.progress = Instant::now();
        } else if before > 0 && self.progress.elapsed() > PATIENCE {
            self.is_stuck = true;
            self.waiting.clear();
        }
    }

    /// Wakes the reader if it sleeps. Returns false if it is gone.
    fn ring(&mut self) -> bool {
        if !self.writer.publish() {
            return true;
        }
        // A process answers before it asks to be woken.
        if !self.is_answered() && self.is_cut_off() {
            return false;
        }
        self.bell.iter().for_each(Bell::ring);
        true
    }

    /// Whether it has something left to do: packets wait, or may have to go another way.
    fn is_busy(&self) -> bool {
        !self.waiting.is_empty() || !self.unanswered.is_empty()
    }

    /// The packets that the other side has certainly not read, as it was never there to read.
    fn take_back(self) -> impl Iterator<Item = Vec<u8>> {
        let refused = !self.is_answered();
        self.unanswered.into_iter().chain(self.waiting).filter(move |_| refused)
    }
}

/// The paths to the devices of other processes.
#[derive(Debug)]
pub(in crate::link) struct Senders {
    /// The device's listeners, by address.
    listeners: BTreeMap<IpAddr, Arc<Listener>>,
    /// Keys are source and destination.
    paths: BTreeMap<(IpAddr, IpAddr), Path>,
    /// Packets of rings that were refused: they go through the kernel's network.
    refused: Vec<Packet>,
    /// [`forks`] of the process that has opened them.
    forks: u32,
    /// Where the device's addresses are. A thread that sends may be elsewhere, and would find other listeners there.
    namespace: Namespace,
    /// The kernel does not let this process into another one's memory, which was said.
    is_refused: bool,
}

impl Senders {
    pub(in crate::link) fn new(namespace: Namespace) -> Self {
        Self {
            listeners: BTreeMap::new(),
            paths: BTreeMap::new(),
            refused: Vec::new(),
            forks: forks(),
            namespace,
            is_refused: false,
        }
    }

    /// The device has these addresses now. Connections from others end.
    pub(in crate::link) fn set_listeners(&mut self, all: BTreeMap<IpAddr, Arc<Listener>>) {
        let before = std::mem::replace(&mut self.listeners, all);
        let stays = |from: &IpAddr| {
            let both = before.get(from).zip(self.listeners.get(from));
            both.is_some_and(|(before, now)| Arc::ptr_eq(before, now))
        };
        self.paths.retain(|(from, _), _| stays(from));
    }

    /// The other process is gone.
    pub(in crate::link) fn forget(&mut self, from: IpAddr, to: IpAddr) {
        if let Some(Path::Ring(ring)) = self.paths.remove(&(from, to)) {
            let addresses = Some((from, to));
            let is_sealed = ring.writer.is_sealed();
            let packet = |bytes| Packet { addresses, bytes, is_sealed, identification: 0 };
            self.refused.extend(ring.take_back().map(packet));
        }
    }

    /// The process at an address has ended: closes the rings that it has read. The kernel may close its end of them a little later:
    /// then [`is_gone`](Connection::is_gone) finds that.
    pub(in crate::link) fn lose_peer(&mut self, peer: IpAddr) {
        self.paths.retain(|&(_, to), path| match path {
            Path::Ring(ring) if to == peer && ring.is_answered() => !ring.is_cut_off(),
            _ => true,
        });
    }

    /// Packets that are to go through the kernel's network, before all others.
    pub(in crate::link) fn take_refused(&mut self) -> Vec<Packet> {
        std::mem::take(&mut self.refused)
    }

    /// The ring to an address, if there is one: else packets have to go through the kernel's network.
    pub(in crate::link) fn ring(&mut self, from: IpAddr, to: IpAddr) -> Option<&mut Connection> {
        if self.forks != forks() {
            return None;
        }
        match self.paths.get_mut(&(from, to)) {
            None => self.open(from, to),
            Some(Path::Network(until)) => {
                if Instant::now() >= *until {
                    self.open(from, to);
                }
            }
            Some(Path::Ring(ring)) => {
                if ring.is_gone() {
                    let (was_there, again) = (ring.is_answered(), ring.again());
                    self.forget(from, to);
                    if was_there {
                        self.open(from, to);
                    } else {
                        self.paths.insert((from, to), Path::Network(again));
                    }
                }
            }
        }
        // The other side reads the ring once it has answered.
        match self.paths.get_mut(&(from, to))? {
            Path::Ring(ring) => Some(ring),
            Path::Network(_) => None,
        }
    }

    /// Carries out an operation in the memory of the process at an address, if that lets this one in. False: it has to go by
    /// packets.
    ///
    /// # Safety
    ///
    /// As [`Link::carry_out`](crate::link::Link::carry_out).
    pub(in crate::link) unsafe fn carry_out(
        &mut self,
        to: IpAddr,
        request: &OneSided,
        local: &[libc::iovec],
    ) -> bool {
        let Some(ring) = self.ring(request.from.0, to) else { return false };
        let process = ring.process;
        // SAFETY: as the caller says.
        let done = unsafe { ring.carry_out(request, local) };
        done.unwrap_or_else(|e| {
            if !std::mem::replace(&mut self.is_refused, true) {
                crate::say(format_args!(
                    "ibverbs-software: the kernel does not let this process into the memory of process {process}: {e}. One-sided \
                     operations go by packets"
                ));
            }
            false
        })
    }

    /// Sends what did not fit. Returns whether nothing is left to do.
    pub(in crate::link) fn send_rest(&mut self) -> bool {
        let (mut is_done, mut gone) = (true, Vec::new());
        for (&addresses, path) in &mut self.paths {
            let Path::Ring(ring) = path else { continue };
            if ring.is_busy() {
                if ring.is_cut_off() {
                    gone.push((addresses, ring.again()));
                    continue;
                }
                ring.write_waiting();
                ring.ring();
                is_done &= !ring.is_busy();
            }
        }
        for ((from, to), again) in gone {
            self.forget(from, to);
            self.paths.insert((from, to), Path::Network(again));
        }
        is_done
    }

    /// Whether there is nothing left to do.
    pub(in crate::link) fn is_done(&self) -> bool {
        self.refused.is_empty()
            && self.paths.values().all(|path| !matches!(path, Path::Ring(ring) if ring.is_busy()))
    }

    /// Drops what waits and is from one of these addresses.
    pub(in crate::link) fn drop_rest(&mut self, from: &[IpAddr]) {
        for ((own, _), path) in &mut self.paths {
            if let Path::Ring(ring) = path
                && from.contains(own)
            {
                ring.waiting.clear();
                ring.unanswered.clear();
            }
        }
    }

    /// Whether packets to an address wait for its process to read others.
    pub(in crate::link) fn is_full(&self, from: IpAddr, to: IpAddr) -> bool {
        matches!(self.paths.get(&(from, to)), Some(Path::Ring(ring)) if !ring.waiting.is_empty())
    }

    /// Whether the other side has answered.
    #[cfg(test)]
    pub(super) fn is_answered(&mut self, from: IpAddr, to: IpAddr) -> bool {
        let Some(Path::Ring(ring)) = self.paths.get_mut(&(from, to)) else { return false };
        !ring.is_cut_off() && ring.is_answered()
    }

    /// Whether there is a ring to an address.
    pub(in crate::link) fn has(&self, from: IpAddr, to: IpAddr) -> bool {
        matches!(self.paths.get(&(from, to)), Some(Path::Ring(_)))
    }

    /// Whether there are packets in the ring to an address that were not read; `None`: there is no ring.
    pub(in crate::link) fn is_unread(&mut self, from: IpAddr, to: IpAddr) -> Option<bool> {
        match self.paths.get_mut(&(from, to))? {
            Path::Ring(ring) => (!ring.is_cut_off()).then(|| !ring.writer.is_empty()),
            Path::Network(_) => None,
        }
    }

    fn open(&mut self, from: IpAddr, to: IpAddr) {
        self.paths.remove(&(from, to));
        if self.paths.len() >= MOST {
            self.make_room();
            // The other process would take the end of a connection that is not kept for the end of this process.
            if self.paths.len() >= MOST {
                return;
            }
        }
        let is_here = namespace() == Some(self.namespace);
        let own = self.listeners.get(&from).filter(|_| is_here);
        let ring = own.and_then(|own| Connection::new((from, own), to));
        if ring.is_some() {
            self.make_room();
        }
        let path = ring.map_or_else(|| Path::Network(Instant::now() + AGAIN), Path::Ring);
        self.paths.insert((from, to), path);
    }

    /// Forgets the paths that are no longer in use.
    fn make_room(&mut self) {
        let mut gone = Vec::new();
        self.paths.retain(|&addresses, path| match path {
            Path::Network(until) => Instant::now() < *until,
            Path::Ring(ring) => {
                if ring.is_cut_off() {
                    gone.push(addresses);
                }
                true
            }
        });
        gone.into_iter().for_each(|(from, to)| self.forget(from, to));
    }

    /// Takes all places for paths that there are.
    #[cfg(test)]
    pub(super) fn fill(&mut self, from: IpAddr) {
        let until = Instant::now() + Duration::from_secs(3600);
        let to = |number: usize| IpAddr::from((number as u128).to_be_bytes());
        let paths = (0..MOST).map(|number| ((from, to(number)), Path::Network(until)));
        self.paths.extend(paths);
    }
}
