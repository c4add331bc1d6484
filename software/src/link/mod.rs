//! The interfaces that the engine uses: a link that sends packets, and a clock.

pub(crate) mod clock;
mod machine;
pub(crate) mod neighbours;
pub(crate) mod receive;
mod send;
pub(crate) mod udp;

use std::fmt::Debug;
use std::io;
use std::net::IpAddr;

use crate::transport::timers::Time;
use crate::wire::Packet;

/// Sends packets. It may lose them, as any network may; it never blocks.
pub(crate) trait Link: Debug + Send {
    /// Sends packets, each with its addresses set. The caller keeps them.
    fn send(&mut self, packets: &mut [Packet]);

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

    /// The shortest time to wait for an answer. A shorter one makes no sense if each packet has to wake a
    /// thread.
    fn min_timeout(&self) -> Time;
}

/// An address of this machine that no test of another process has, for each number below 60.
#[cfg(test)]
fn own_address(number: u8) -> IpAddr {
    let [_, _, c, d] = std::process::id().to_be_bytes();
    IpAddr::from([127, 192 + number, c, d])
}
