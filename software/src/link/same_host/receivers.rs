//! The side that receives: the processes that send to a device.

use std::ffi::c_int;
use std::io;
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use super::direct_access::Lease;
use super::line::Line;
use super::ring::Reader;
use super::{DirectAccess, MOST, accept, answer, is_hung_up, meet, own_process};
use crate::files::{Epoll, WakeFd};
use crate::foreign::{Foreign, is_behind};

/// How many packets are read from a ring before others get their turn, and the answers are sent.
const TURN: usize = 64;

/// A process that sends to us.
#[derive(Debug)]
struct Peer {
    from: IpAddr,
    /// The address of ours that it sends to.
    to: IpAddr,
    /// Access to this process's memory. Declared before the line, which is closed after it.
    _lease: Option<Lease>,
    /// `None`: what is in the ring is the last.
    line: Option<Line>,
    reader: Reader,
}

impl Peer {
    /// The peer has ended, or has another connection.
    fn end(&mut self) {
        self.line = None;
    }
}

/// The processes that send to a device.
#[derive(Debug)]
pub(in crate::link) struct Receivers {
    /// Readable when one has written to a ring whose reader sleeps.
    wake_fd: Arc<WakeFd>,
    /// Readable when one has ended.
    ends: Arc<Epoll>,
    /// Connections whose process is not known yet, with their listeners' addresses.
    pending: Vec<(IpAddr, Arc<Foreign>)>,
    all: Vec<Peer>,
    /// A process could not be let in, for want of descriptors or memory, or since files wait to be closed. Not to be woken for it
    /// again and again, the listeners are left alone until something else happens.
    is_waiting: bool,
    /// Addresses of peers that ended since the last call: nothing more comes from there.
    gone: Vec<IpAddr>,
    /// Lets them into this process's memory.
    direct_access: Option<Arc<DirectAccess>>,
}

impl Receivers {
    pub(in crate::link) fn new(wake_fd: Arc<WakeFd>, ends: Arc<Epoll>) -> Self {
        Self {
            wake_fd,
            ends,
            pending: Vec::new(),
            all: Vec::new(),
            is_waiting: false,
            gone: Vec::new(),
            direct_access: None,
        }
    }

    /// Gives peers that are accepted later access to this process's memory too.
    pub(in crate::link) fn set_direct_access(&mut self, direct_access: Arc<DirectAccess>) {
        self.direct_access = Some(direct_access);
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.pending.len() + self.all.len()
    }

    #[cfg(test)]
    pub(super) fn wake_fd(&self) -> &WakeFd {
        &self.wake_fd
    }

    #[cfg(test)]
    pub(super) fn ends(&self) -> &Epoll {
        &self.ends
    }

    /// The connections of processes that have not introduced themselves. [`Receivers::attend`] is for them.
    pub(in crate::link) fn pending(&self) -> impl Iterator<Item = &Arc<Foreign>> {
        self.pending.iter().map(|(_, connection)| connection)
    }

    /// Ends the connections to addresses that the device has no more.
    pub(in crate::link) fn keep(&mut self, has: impl Fn(IpAddr) -> bool) {
        self.pending.retain(|&(to, _)| has(to));
        self.all.retain(|peer| has(peer.to));
    }

    /// Whether to be woken for the listeners.
    pub(in crate::link) fn looks_at_listeners(&self) -> bool {
        !self.is_waiting
    }

    /// Whether a process waits at a listener, and is to be let in now.
    pub(in crate::link) fn stop_waiting(&mut self) -> bool {
        std::mem::take(&mut self.is_waiting)
    }

    /// Lets the processes in that wait at the listener of an address.
    pub(in crate::link) fn open(&mut self, to: IpAddr, listener: &impl AsRawFd) {
        // Other users, whose connections are refused, could connect for ever.
        for _ in 0..64 {
            if is_behind() {
                self.is_waiting = true;
                return;
            }
            let connection = match accept(listener) {
                Ok(connection) => connection,
                Err(e) => {
                    self.is_waiting |= e.kind() != io::ErrorKind::WouldBlock;
                    return;
                }
            };
            if own_process(&connection).is_some() && self.pending.len() + self.all.len() < MOST {
                self.pending.push((to, Arc::new(connection)));
            }
        }
    }

    /// Attends to those of its files that `is_ready` names.
    pub(in crate::link) fn attend(&mut self, is_ready: impl Fn(c_int) -> bool) {
        let (ready, waiting) = std::mem::take(&mut self.pending)
            .into_iter()
            .partition(|(_, connection)| is_ready(connection.as_raw_fd()));
        self.pending = waiting;
        for (to, connection) in ready {
            self.admit(to, connection);
        }
        if is_ready(self.ends.fd()) {
            for peer in &mut self.all {
                if peer.line.as_ref().is_some_and(|line| is_hung_up(line.connection())) {
                    peer.end();
                }
            }
        }
        self.part();
    }

    /// Forgets peers that have ended, once all that they sent was read.
    fn part(&mut self) {
        let is_over = |peer: &Peer| peer.line.is_none() && peer.reader.is_empty();
        let ended: Vec<IpAddr> = self.all.iter().filter(|s| is_over(s)).map(|s| s.from).collect();
        self.all.retain(|peer| !is_over(peer));
        // A peer that has another connection has not ended.
        let is_here = |from: &IpAddr| self.all.iter().any(|peer| peer.from == *from);
        self.gone.extend(ended.into_iter().filter(|from| !is_here(from)));
    }

    /// The addresses whose process has ended, or whose device has.
    pub(in crate::link) fn take_gone(&mut self) -> Vec<IpAddr> {
        std::mem::take(&mut self.gone)
    }

    fn admit(&mut self, to: IpAddr, connection: Arc<Foreign>) {
        let (from, file) = match meet(&connection) {
            Ok(met) => met,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                return self.pending.push((to, connection));
            }
            Err(_) => return,
        };
        let Ok(reader) = Reader::new(&file) else { return };
        let Ok(line) = Line::new(connection.clone(), &self.wake_fd, &self.ends) else { return };
        if !reader.take() {
            return;
        }
        // Whatever is in the ring is read before anyone asks to be rung, also what a process has left that has ended since.
        let access = self.direct_access.as_ref();
        let lease = access.and_then(|access| access.admit(&connection, reader.mapping()));
        let line = match answer(&connection, line.bell(), lease.as_ref().map(Lease::table)) {
            Ok(()) => Some(line),
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe && !reader.is_empty() => None,
            Err(_) => return,
        };
        let is_older = |older: &&mut Peer| (older.from, older.to) == (from, to);
        self.all.iter_mut().filter(is_older).for_each(Peer::end);
        self.all.push(Peer { from, to, _lease: lease, line, reader });
        // A thread that sleeps for packets of the others asks this one too to ring.
        self.wake_fd.wake();
    }

    /// Whether all will ring when they have packets, as far as they have none now.
    pub(in crate::link) fn all_ring(&self) -> bool {
        self.all.iter().all(|peer| peer.reader.is_rung())
    }

    /// Asks all to ring. Returns false if there are packets already.
    pub(in crate::link) fn may_sleep(&self) -> bool {
        // All of them, also behind one that has packets. The thread that receives forgets peers that have ended.
        let is_awake = |peer: &&Peer| !peer.reader.may_sleep() || peer.line.is_none();
        self.all.iter().filter(is_awake).count() == 0
    }

    /// Whether [`take_gone`](Self::take_gone) has something.
    pub(in crate::link) fn has_gone(&self) -> bool {
        !self.gone.is_empty()
    }

    /// Passes on packets with their source, whether they are sealed, and their destination; returns their number.
    pub(in crate::link) fn receive(
        &mut self,
        mut each: impl FnMut((IpAddr, bool), IpAddr, &[u8]),
    ) -> usize {
        let (mut count, mut is_over) = (0, false);
        for peer in &mut self.all {
            let (from, to) = ((peer.from, peer.reader.is_sealed()), peer.to);
            match peer.reader.read(TURN, |packet| each(from, to, packet)) {
                Ok(read) => count += read,
                Err(_) => peer.end(),
            }
            is_over |= peer.line.is_none();
        }
        if is_over {
            self.part();
        }
        count
    }
}
