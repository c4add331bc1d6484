//! The interface between a network and its devices.

use std::fmt::Debug;
use std::net::IpAddr;

use crate::link::Time;

/// A device, as its network drives it.
pub(crate) trait Member: Debug + Send + Sync {
    /// When its timers are to run, perhaps without those of the connection manager.
    fn due(&self, without_connections: bool) -> Option<Time>;

    /// Whether a program is to decide about a connection.
    fn waits_for_program(&self) -> bool;

    /// Runs the timers that are due, perhaps without those of the connection manager.
    fn advance(&self, without_connections: bool);

    fn receive(&self, from: (IpAddr, u16), to: IpAddr, packet: &[u8]);

    /// A datagram of its own to a group has reached no device.
    fn reached_nobody(&self, group: IpAddr);
}
