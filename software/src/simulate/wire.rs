//! Streams between hosts: what is under way, and what has arrived. Nothing is lost: what is sent between hosts that are cut
//! off from each other arrives after that, as TCP sends it again.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::task::Waker;

use crate::link::Time;

#[derive(Default)]
pub(super) struct Wire {
    /// Keys are numbers. An end that its host has closed is not here.
    ends: BTreeMap<u64, End>,
    listeners: BTreeMap<(usize, u16), Listening>,
    next_listener: u64,
    next_end: u64,
    /// Ordered by time of arrival, then by sending.
    under_way: BTreeMap<(Time, u64), Segment>,
    sent: u64,
    /// Segments that a partition stopped.
    held: Vec<Segment>,
}

/// One end of a stream.
struct End {
    place: Place,
    peer: Place,
    received: VecDeque<u8>,
    status: Status,
    reader: Option<Waker>,
    /// Later segments arrive no earlier.
    last_arrival: Time,
}

#[derive(Clone, Copy, PartialEq)]
enum Status {
    /// The peer has not answered.
    Opening,
    Open,
    /// The peer sends nothing more.
    Ended,
    /// No peer exists.
    Reset,
}

#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) host: usize,
    pub(super) end: u64,
}

#[derive(Default)]
struct Listening {
    /// A listener of a host that has crashed is dropped later, when the next one may listen at its port.
    number: u64,
    /// Ends of streams that wait for being accepted, and the hosts at their other ends.
    waiting: VecDeque<(u64, Place)>,
    acceptor: Option<Waker>,
}

struct Segment {
    from: Place,
    to: Place,
    what: What,
}

pub(super) enum What {
    Open(u16),
    Opened,
    Bytes(Vec<u8>),
    End,
    Reset,
}

impl Wire {
    // ---- What programs do ----

    /// Returns the listener's number.
    pub(super) fn listen(&mut self, host: usize, port: u16) -> io::Result<u64> {
        if self.listeners.contains_key(&(host, port)) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        let number = self.next_listener;
        self.next_listener += 1;
        self.listeners.insert((host, port), Listening { number, ..Listening::default() });
        Ok(number)
    }

    pub(super) fn unlisten(&mut self, host: usize, port: u16, number: u64) -> Vec<u64> {
        let is_it = |listening: &Listening| listening.number == number;
        if !self.listeners.get(&(host, port)).is_some_and(is_it) {
            return Vec::new();
        }
        let listening = self.listeners.remove(&(host, port));
        listening.map_or(Vec::new(), |it| it.waiting.into_iter().map(|(end, _)| end).collect())
    }

    /// The next stream that a peer has opened: its end, and the peer. `None`: the host no longer listens.
    pub(super) fn accept(
        &mut self,
        host: usize,
        port: u16,
        number: u64,
        waker: &Waker,
    ) -> Option<Option<(u64, Place)>> {
        let listening = self.listeners.get_mut(&(host, port)).filter(|it| it.number == number)?;
        let next = listening.waiting.pop_front();
        if next.is_none() {
            listening.acceptor = Some(waker.clone());
        }
        Some(next)
    }

    /// Makes the near end of a stream. Its number.
    pub(super) fn open(&mut self, host: usize, to: usize) -> u64 {
        let end = self.next_end;
        self.next_end += 2;
        let (place, peer) = (Place { host, end }, Place { host: to, end: end + 1 });
        self.add(place, peer, Status::Opening);
        end
    }

    fn add(&mut self, place: Place, peer: Place, status: Status) {
        let (received, reader) = (VecDeque::new(), None);
        let end = End { place, peer, received, status, reader, last_arrival: 0 };
        self.ends.insert(place.end, end);
    }

    /// Whether the peer has answered.
    pub(super) fn is_open(&mut self, end: u64, waker: &Waker) -> io::Result<bool> {
        let end = self.ends.get_mut(&end).ok_or(io::ErrorKind::ConnectionAborted)?;
        match end.status {
            Status::Reset => return Err(io::ErrorKind::ConnectionRefused.into()),
            Status::Opening => end.reader = Some(waker.clone()),
            Status::Open | Status::Ended => return Ok(true),
        }
        Ok(false)
    }

    /// Takes what has arrived, as far as there is room: 0 at the end of the stream, and `None` if the reader is to wait.
    pub(super) fn read(
        &mut self,
        end: u64,
        room: usize,
        waker: &Waker,
    ) -> io::Result<Option<Vec<u8>>> {
        let end = self.ends.get_mut(&end).ok_or(io::ErrorKind::ConnectionAborted)?;
        if end.received.is_empty() && room > 0 {
            match end.status {
                Status::Reset => return Err(io::ErrorKind::ConnectionReset.into()),
                Status::Ended => {}
                _ => {
                    end.reader = Some(waker.clone());
                    return Ok(None);
                }
            }
        }
        let count = room.min(end.received.len());
        Ok(Some(end.received.drain(..count).collect()))
    }

    /// Where what is written to this end goes.
    pub(super) fn peer(&self, end: u64) -> io::Result<Place> {
        let end = self.ends.get(&end).filter(|end| end.status != Status::Reset);
        end.map(|end| end.peer).ok_or_else(|| io::ErrorKind::BrokenPipe.into())
    }

    /// The host of an end.
    pub(super) fn host(&self, end: u64) -> usize {
        self.ends.get(&end).map_or(0, |end| end.place.host)
    }

    /// Puts something on its way, which takes this long.
    pub(super) fn send(&mut self, from: u64, arrival: Time, what: What) {
        let Some(end) = self.ends.get_mut(&from) else { return };
        end.last_arrival = end.last_arrival.max(arrival);
        let (arrival, segment) =
            (end.last_arrival, Segment { from: end.place, to: end.peer, what });
        self.put(arrival, segment);
    }

    fn put(&mut self, arrival: Time, segment: Segment) {
        self.sent += 1;
        self.under_way.insert((arrival, self.sent), segment);
    }

    /// The end has been closed, or its host has crashed.
    pub(super) fn remove(&mut self, end: u64) {
        self.ends.remove(&end);
    }

    /// All ends of a host, which listens nowhere from now on.
    pub(super) fn ends_of(&mut self, host: usize) -> Vec<u64> {
        // Their acceptors are tasks of the host.
        self.listeners.retain(|&(of, _), _| of != host);
        let of_host = self.ends.values().filter(|end| end.place.host == host);
        of_host.map(|end| end.place.end).collect()
    }

    // ---- What the simulation does ----

    pub(super) fn next_due(&self) -> Option<Time> {
        self.under_way.first_key_value().map(|(key, _)| key.0)
    }

    /// Lets the next segment arrive. `arrival`: when an answer from one host to the other does. Returns whom to wake.
    pub(super) fn deliver(
        &mut self,
        cut: &BTreeSet<(usize, usize)>,
        arrival: impl FnOnce(usize, usize) -> Time,
    ) -> Option<Waker> {
        let (_, segment) = self.under_way.pop_first()?;
        let Segment { from, to, .. } = segment;
        if cut.contains(&(from.host, to.host)) {
            self.held.push(segment);
            return None;
        }
        match segment.what {
            What::Open(port) => {
                if let Some(listening) = self.listeners.get_mut(&(to.host, port)) {
                    listening.waiting.push_back((to.end, from));
                    let waker = listening.acceptor.take();
                    self.add(to, from, Status::Open);
                    self.send(to.end, arrival(to.host, from.host), What::Opened);
                    return waker;
                }
            }
            what => match (self.ends.get_mut(&to.end), what) {
                (Some(end), what) => {
                    match what {
                        What::Opened => end.status = Status::Open,
                        What::Bytes(bytes) => end.received.extend(bytes),
                        What::End => end.status = Status::Ended,
                        What::Reset | What::Open(_) => end.status = Status::Reset,
                    }
                    return end.reader.take();
                }
                (None, What::Reset) => return None,
                (None, _) => {}
            },
        }
        // It comes after what the end has sent that was here.
        let last = self.under_way.iter().rfind(|(_, segment)| segment.from.end == to.end);
        let last = last.map_or(0, |(key, _)| key.0);
        let at = arrival(to.host, from.host).max(last);
        self.put(at, Segment { from: to, to: from, what: What::Reset });
        None
    }

    /// Two hosts are no longer cut off from each other.
    pub(super) fn release(&mut self, from: usize, to: usize, arrival: Time) {
        let is_between = |segment: &mut Segment| (segment.from.host, segment.to.host) == (from, to);
        let held: Vec<_> = self.held.extract_if(.., is_between).collect();
        let ends: BTreeSet<u64> = held.iter().map(|segment| segment.from.end).collect();
        let is_later = |(_, segment): &(_, &Segment)| ends.contains(&segment.from.end);
        let later: Vec<_> = self.under_way.iter().filter(is_later).map(|(key, _)| *key).collect();
        let later = later.into_iter().filter_map(|key| Some((key.0, self.under_way.remove(&key)?)));
        let all: Vec<_> = held.into_iter().map(|segment| (arrival, segment)).chain(later).collect();
        for (at, segment) in all {
            let at = at.max(arrival);
            if let Some(end) = self.ends.get_mut(&segment.from.end) {
                end.last_arrival = end.last_arrival.max(at);
            }
            self.put(at, segment);
        }
    }
}
