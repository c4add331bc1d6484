//! The interfaces that the engine uses: a link that sends packets, and a clock.

pub(crate) mod clock;
pub(crate) mod interfaces;
mod namespace;
pub(crate) mod neighbours;
pub(crate) mod receive;
mod same_host;
mod send;
pub(crate) mod socket;
pub(crate) mod udp;
pub(crate) mod unix_sockets;
mod unread;

pub(crate) use self::same_host::{DirectAccess, OneSided};

use std::fmt::Debug;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
#[cfg(test)]
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::wire::Packet;

/// Nanoseconds of a device's clock.
pub(crate) type Time = u64;

/// How many bytes may be under way to where nothing else is known: about the receive buffer of an ordinary user's
/// socket.
pub(crate) const LITTLE_ROOM: usize = 128 << 10;

/// The limit for a device of this machine, which has more room: so the two devices' threads wait less for each other.
const MUCH_ROOM: usize = 512 << 10;

/// A datagram takes at most this many times its length in a socket's buffer.
const BUFFER_FACTOR: usize = 3;

/// Sends packets. It may lose them, as any network may; it never blocks.
pub(crate) trait Link: Debug + Send {
    /// Sends packets, each with its addresses set. The caller keeps them, but not their bytes. Returns whether the link
    /// has sent them all; if not, [`send_rest`](Self::send_rest) is called soon.
    fn send(&mut self, packets: &mut [Packet]) -> bool;

    /// Whether it seals packets where that is needed.
    fn seals(&self) -> bool {
        false
    }

    /// Sends what there was no room for. Returns whether nothing is left.
    fn send_rest(&mut self) -> bool {
        true
    }

    /// Drops what there was no room for, if it is from one of these addresses.
    fn drop_rest(&mut self, _from: &[IpAddr]) {}

    /// The process at an address has ended.
    fn lose_peer(&mut self, _peer: IpAddr) {}

    /// Whether packets from one address to the other find no room at the moment. A sender that learns of no loss
    /// holds back then.
    fn is_full(&mut self, _from: IpAddr, _to: IpAddr) -> bool {
        false
    }

    /// How many bytes one queue pair may have under way from one address to the other.
    fn room(&mut self, _from: IpAddr, _to: IpAddr) -> usize {
        LITTLE_ROOM
    }

    /// A number that others cannot guess, from which the numbers of connections follow.
    fn seed(&self) -> u64 {
        RandomState::new().hash_one(0)
    }

    /// How long a packet is under way at least, in nanoseconds.
    fn latency(&self) -> Time {
        0
    }

    /// Whether packets from one address to the other have arrived at a device of this machine that has not received them
    /// yet. Then its threads wait for a processor.
    fn is_unread(&mut self, _from: IpAddr, _to: IpAddr) -> bool {
        false
    }

    /// Gives peers of this machine access to this process's memory.
    fn direct_access(&self) -> Option<Arc<DirectAccess>> {
        None
    }

    /// Carries out a one-sided operation in the memory of the process that has the address, if that lets this one in.
    /// `local` is the memory of the request. False: it has to go by packets.
    ///
    /// # Safety
    ///
    /// A READ writes to all of `local`: no Rust reference to that memory may be in use, as when an adapter writes there.
    unsafe fn carry_out(
        &mut self,
        _to: IpAddr,
        _request: &OneSided,
        _local: &[libc::iovec],
    ) -> bool {
        false
    }

    /// Receives packets to a multicast group from now on.
    fn join(&mut self, group: IpAddr) -> io::Result<()>;

    fn leave(&mut self, group: IpAddr);

    /// Replaces the addresses of the device, or fails and changes nothing.
    fn set_addresses(&mut self, addresses: &[IpAddr]) -> io::Result<()>;
}

/// Tells the time.
pub(crate) trait Clock: Debug + Send + Sync {
    /// Nanoseconds since a fixed moment. It never goes backwards.
    fn now(&self) -> Time;

    /// Nanoseconds since 1970.
    fn wall_clock(&self) -> Time;

    /// The time to wait for an answer, from the configured time, and whether the last one was late. A real clock gives
    /// more than the configured time, since the other side may have to wait for a processor.
    fn timeout(&self, configured: Time, _late: bool) -> Time {
        configured
    }
}

/// An address of this machine that no test of another process has, for each number below 128. No two tests name the same
/// number; those of neighbours have the upper half.
#[cfg(test)]
fn own_address(number: u8) -> IpAddr {
    let [_, _, c, d] = std::process::id().to_be_bytes();
    IpAddr::from([127, 128 + number, c, d])
}

/// Between its fork and its `exec`, a new process has a copy of every file of this one: what a test closes meanwhile is
/// not closed. Tests for which that matters hold this; those that start processes do so alone.
#[cfg(test)]
static STARTS_PROCESSES: RwLock<()> = RwLock::new(());

#[cfg(test)]
pub(crate) fn no_process_starts() -> RwLockReadGuard<'static, ()> {
    STARTS_PROCESSES.read().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
pub(crate) fn process_starts() -> RwLockWriteGuard<'static, ()> {
    STARTS_PROCESSES.write().unwrap_or_else(PoisonError::into_inner)
}
