//! What the engine stands on: a way for packets to leave, and a clock.

pub(crate) mod clock;
pub(crate) mod udp;

use std::fmt::Debug;
use std::io;
use std::net::IpAddr;

use crate::transport::timers::Time;
use crate::wire::Packet;

/// Where packets go. It may lose them, as any network may; it never waits.
pub(crate) trait Link: Debug + Send {
    /// Sends packets, each with its addresses set. They stay the caller's.
    fn send(&mut self, packets: &mut [Packet]);

    /// Takes packets to a multicast group from now on.
    fn join(&mut self, group: IpAddr) -> io::Result<()>;

    fn leave(&mut self, group: IpAddr);
}

/// Where time comes from.
pub(crate) trait Clock: Debug + Send + Sync {
    /// Nanoseconds since some moment. It never goes back.
    fn now(&self) -> Time;

    /// Nanoseconds since 1970.
    fn wall_clock(&self) -> Time;

    /// The shortest time after which an answer is given up. Shorter ones make no sense where a thread has
    /// to be woken for each packet.
    fn min_timeout(&self) -> Time;
}
