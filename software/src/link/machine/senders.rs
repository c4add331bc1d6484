//! The side that receives: the processes that send to a device.

use std::ffi::c_int;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use super::gate::Seat;
use super::line::Line;
use super::ring::Reader;
use super::{Gate, Heard, MOST, accept, answer, listen, meet, own_process};
use crate::files::{Epoll, Waker};

/// How many packets are read from a ring before others get their turn, and the answers are sent.
const TURN: usize = 64;

/// A process that sends to us.
#[derive(Debug)]
struct Sender {
    from: IpAddr,
    /// The address of ours that it sends to.
    to: IpAddr,
    /// It may use this process's memory. Before the line, which is closed after it.
    _seat: Option<Seat>,
    line: Line,
    reader: Reader,
    /// It is gone, or has another connection: what is in the ring is the last.
    is_ending: bool,
}

/// The processes that send to a device.
#[derive(Debug)]
pub(in crate::link) struct Senders {
    /// What they ring when they have written to a ring whose reader sleeps.
    bell: Arc<Waker>,
    ends: Arc<Epoll>,
    /// Those who have not introduced themselves yet; the address whose door it was.
    guests: Vec<(IpAddr, Arc<OwnedFd>)>,
    all: Vec<Sender>,
    /// A process could not be let in, for want of descriptors or memory. Not to be woken for it again and again, the
    /// doors are left alone until something else happens.
    is_waiting: bool,
    /// Those who have ended since they were last asked for: nothing more comes from there.
    gone: Vec<IpAddr>,
    /// Lets them into this process's memory.
    gate: Option<Arc<Gate>>,
}

impl Senders {
    pub(in crate::link) fn new(bell: Arc<Waker>) -> io::Result<Self> {
        let ends = Arc::new(Epoll::new()?);
        Ok(Self {
            bell,
            ends,
            guests: Vec::new(),
            all: Vec::new(),
            is_waiting: false,
            gone: Vec::new(),
            gate: None,
        })
    }

    /// From now on, who is let in is let into this process's memory too.
    pub(in crate::link) fn set_gate(&mut self, gate: Arc<Gate>) {
        self.gate = Some(gate);
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.guests.len() + self.all.len()
    }

    #[cfg(test)]
    pub(super) fn bell(&self) -> &Waker {
        &self.bell
    }

    /// The connections of those who have introduced themselves, which tell of the end.
    pub(in crate::link) fn ends(&self) -> &Arc<Epoll> {
        &self.ends
    }

    /// The connections of those who have not. [`Senders::attend`] is for them, and for the ends.
    pub(in crate::link) fn guests(&self) -> impl Iterator<Item = &Arc<OwnedFd>> {
        self.guests.iter().map(|(_, connection)| connection)
    }

    /// Ends the connections to addresses that the device has no more.
    pub(in crate::link) fn keep(&mut self, has: impl Fn(IpAddr) -> bool) {
        self.guests.retain(|&(to, _)| has(to));
        self.all.retain(|sender| has(sender.to));
    }

    /// Whether to be woken for the doors.
    pub(in crate::link) fn looks_at_doors(&self) -> bool {
        !self.is_waiting
    }

    /// Whether a process waits at a door, and is to be let in now.
    pub(in crate::link) fn stop_waiting(&mut self) -> bool {
        std::mem::take(&mut self.is_waiting)
    }

    /// Lets the processes in that wait at the door of an address.
    pub(in crate::link) fn open(&mut self, to: IpAddr, door: &OwnedFd) {
        // Those of other users, who are sent away, could go on for ever.
        for _ in 0..64 {
            let guest = match accept(door) {
                Ok(guest) => guest,
                Err(e) => {
                    self.is_waiting |= e.kind() != io::ErrorKind::WouldBlock;
                    return;
                }
            };
            if own_process(&guest).is_some() && self.guests.len() + self.all.len() < MOST {
                self.guests.push((to, Arc::new(guest)));
            }
        }
    }

    /// Attends to those of its files that `is_ready` names.
    pub(in crate::link) fn attend(&mut self, is_ready: impl Fn(c_int) -> bool) {
        for sender in &mut self.all {
            // If there is more to hear, it will be ready again.
            let is_ready = is_ready(sender.line.fd());
            sender.is_ending |=
                is_ready && !matches!(listen(sender.line.connection()), Heard::Nothing);
        }
        let (ready, waiting) = std::mem::take(&mut self.guests)
            .into_iter()
            .partition(|(_, connection)| is_ready(connection.as_raw_fd()));
        self.guests = waiting;
        for (to, connection) in ready {
            self.admit(to, connection);
        }
        self.part();
    }

    /// Forgets those who have ended, once all that they sent was read.
    fn part(&mut self) {
        let is_over = |sender: &Sender| sender.is_ending && sender.reader.is_empty();
        let ended: Vec<IpAddr> = self.all.iter().filter(|s| is_over(s)).map(|s| s.from).collect();
        self.all.retain(|sender| !is_over(sender));
        // Who has another connection has not ended.
        let is_here = |from: &IpAddr| self.all.iter().any(|sender| sender.from == *from);
        self.gone.extend(ended.into_iter().filter(|from| !is_here(from)));
    }

    /// The addresses whose process has ended, or whose device has.
    pub(in crate::link) fn take_gone(&mut self) -> Vec<IpAddr> {
        std::mem::take(&mut self.gone)
    }

    fn admit(&mut self, to: IpAddr, connection: Arc<OwnedFd>) {
        let (from, file) = match meet(&connection) {
            Ok(met) => met,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                return self.guests.push((to, connection));
            }
            Err(_) => return,
        };
        let Ok(reader) = Reader::new(&file) else { return };
        let Ok(line) = Line::new(connection.clone(), &self.ends) else { return };
        // Whatever is in the ring is read before anyone asks to be rung, also what a process has left that has ended since.
        let seat = self.gate.as_ref().and_then(|gate| gate.admit(&connection));
        let is_ending = match answer(&connection, &self.bell, seat.is_some()) {
            Ok(()) => false,
            Err(e) if e.kind() == io::ErrorKind::BrokenPipe => true,
            Err(_) => return,
        };
        if let Some(seat) = &seat
            && seat.hand_over(&connection).is_err()
        {
            return;
        }
        for older in &mut self.all {
            older.is_ending |= (older.from, older.to) == (from, to);
        }
        self.all.push(Sender { from, to, _seat: seat, line, reader, is_ending });
        // A thread that sleeps for packets of the others asks this one too to ring.
        self.bell.wake();
    }

    /// Whether all will ring when they have packets, as far as they have none now.
    pub(in crate::link) fn all_ring(&self) -> bool {
        self.all.iter().all(|sender| sender.reader.is_rung())
    }

    /// Asks all to ring. Returns false if there are packets already.
    pub(in crate::link) fn may_sleep(&self) -> bool {
        // All of them, also behind one that has packets.
        self.all.iter().filter(|sender| !sender.reader.may_sleep()).count() == 0
    }

    /// Passes on packets with their source, whether they are sealed, and their destination; returns their number.
    pub(in crate::link) fn receive(
        &mut self,
        mut each: impl FnMut((IpAddr, bool), IpAddr, &[u8]),
    ) -> usize {
        let (mut count, mut is_over) = (0, false);
        for sender in &mut self.all {
            let (from, to) = ((sender.from, sender.reader.is_sealed()), sender.to);
            match sender.reader.read(TURN, |packet| each(from, to, packet)) {
                Ok(read) => count += read,
                Err(_) => sender.is_ending = true,
            }
            is_over |= sender.is_ending;
        }
        if is_over {
            self.part();
        }
        count
    }
}
