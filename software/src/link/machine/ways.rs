//! The side that sends: the ways to other processes' devices.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::ring::Writer;
use super::{Heard, MOST, connect, introduce, is_ours, listen, ring_bell};
use crate::link::neighbours::{Namespace, namespace};
use crate::wire::Packet;

/// How long to wait before knocking again at a door that was not there, or stayed closed.
const AGAIN: Duration = Duration::from_millis(500);

/// How often to look whether a process that does not read is still there.
pub(super) const LOOK: Duration = Duration::from_millis(1);

/// The number of times that this process is the child of a fork: what the parent had connected is the parent's.
static FORKS: AtomicU32 = AtomicU32::new(0);

fn forks() -> u32 {
    static ONCE: Once = Once::new();
    extern "C" fn count() {
        FORKS.fetch_add(1, Ordering::Relaxed);
    }
    ONCE.call_once(|| {
        // SAFETY: the function may be called in any child: it changes an atomic only. If memory is short, a child that
        // goes on to use its parent's device may disturb that device's connections, as it may with its sockets.
        unsafe { libc::pthread_atfork(None, None, Some(count)) };
    });
    FORKS.load(Ordering::Relaxed)
}

/// What a device knows of the way to an address.
#[derive(Debug)]
enum Way {
    /// Through the kernel's network: nobody is at the door, or nobody who lets us in. Since then.
    Network(Instant),
    Ring(Connection),
}

/// A ring that another process reads.
#[derive(Debug)]
pub(in crate::link) struct Connection {
    connection: OwnedFd,
    writer: Writer,
    /// The other side has answered.
    is_admitted: bool,
    /// When we last looked whether it is still there.
    looked: Instant,
}

impl Connection {
    /// Knocks at the door of `to`, and hands over a ring.
    fn new(from: IpAddr, to: IpAddr) -> Option<Self> {
        let connection = connect(to).filter(is_ours)?;
        let (writer, file) = Writer::create().ok()?;
        introduce(&connection, from, &file).ok()?;
        Some(Self { connection, writer, is_admitted: false, looked: Instant::now() })
    }

    /// Whether the other process is gone. It is looked up now and then, while it has not answered or does not read.
    fn is_gone(&mut self) -> bool {
        if self.is_admitted && (self.writer.is_empty() || self.looked.elapsed() < LOOK) {
            return false;
        }
        self.looked = Instant::now();
        self.is_cut_off()
    }

    /// Hears what the other process says, and returns whether it is gone.
    fn is_cut_off(&mut self) -> bool {
        let heard = listen(&self.connection);
        self.is_admitted |= heard == Heard::Something;
        heard == Heard::End
    }

    /// Sends packets. What does not fit is lost. Fails if the other process is gone.
    pub(in crate::link) fn send(&mut self, packets: &[Packet]) -> io::Result<()> {
        for packet in packets {
            self.writer.write(&packet.bytes);
        }
        if self.writer.publish() { ring_bell(&self.connection) } else { Ok(()) }
    }
}

/// The ways to other processes.
#[derive(Debug)]
pub(in crate::link) struct Ways {
    /// By source and destination.
    ways: BTreeMap<(IpAddr, IpAddr), Way>,
    /// [`forks`] of the process that has opened them.
    forks: u32,
    /// Where the device's addresses are. A thread that sends may be elsewhere, and would find other doors there.
    namespace: Namespace,
}

impl Ways {
    pub(in crate::link) fn new(namespace: Namespace) -> Self {
        Self { ways: BTreeMap::new(), forks: forks(), namespace }
    }

    /// Ends all connections: the device has other addresses now.
    pub(in crate::link) fn clear(&mut self) {
        self.ways.clear();
    }

    /// The other process is gone.
    pub(in crate::link) fn forget(&mut self, from: IpAddr, to: IpAddr) {
        self.ways.remove(&(from, to));
    }

    /// The ring to an address, if there is one: else packets have to go through the kernel's network.
    pub(in crate::link) fn ring(&mut self, from: IpAddr, to: IpAddr) -> Option<&mut Connection> {
        if self.forks != FORKS.load(Ordering::Relaxed) {
            return None;
        }
        match self.ways.get_mut(&(from, to)) {
            None => self.knock(from, to),
            Some(Way::Network(since)) => {
                if since.elapsed() >= AGAIN {
                    self.knock(from, to);
                }
            }
            Some(Way::Ring(ring)) => {
                if ring.is_gone() {
                    if ring.is_admitted {
                        self.knock(from, to);
                    } else {
                        self.ways.insert((from, to), Way::Network(Instant::now()));
                    }
                }
            }
        }
        match self.ways.get_mut(&(from, to))? {
            Way::Ring(ring) if ring.is_admitted => Some(ring),
            _ => None,
        }
    }

    /// Whether there is a ring to an address.
    pub(in crate::link) fn has(&self, from: IpAddr, to: IpAddr) -> bool {
        matches!(self.ways.get(&(from, to)), Some(Way::Ring(ring)) if ring.is_admitted)
    }

    /// Whether there are packets in the ring to an address that were not read; `None`: there is no ring.
    pub(in crate::link) fn is_unread(&mut self, from: IpAddr, to: IpAddr) -> Option<bool> {
        match self.ways.get_mut(&(from, to))? {
            Way::Ring(ring) => {
                (ring.is_admitted && !ring.is_cut_off()).then(|| !ring.writer.is_empty())
            }
            Way::Network(_) => None,
        }
    }

    fn knock(&mut self, from: IpAddr, to: IpAddr) {
        self.ways.remove(&(from, to));
        let is_here = namespace() == Some(self.namespace);
        let ring = if is_here { Connection::new(from, to) } else { None };
        let way = ring.map_or_else(|| Way::Network(Instant::now()), Way::Ring);
        if matches!(way, Way::Ring(_)) || self.ways.len() >= MOST {
            self.ways.retain(|_, way| match way {
                Way::Network(since) => since.elapsed() < AGAIN,
                Way::Ring(ring) => !ring.is_cut_off(),
            });
        }
        if self.ways.len() < MOST {
            self.ways.insert((from, to), way);
        }
    }
}
