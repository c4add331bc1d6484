//! A device's link to a simulated network, and the clock of its devices.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::START;
use super::simulation::Membership;
use crate::link::Time;
use crate::link::{Clock, Link};
use crate::wire::Packet;

/// The time of a simulated network.
#[derive(Debug)]
pub(crate) struct VirtualClock(AtomicU64);

impl VirtualClock {
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(START))
    }

    /// The time never goes backwards.
    pub(super) fn set(&self, time: Time) {
        self.0.fetch_max(time, Ordering::SeqCst);
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> Time {
        self.0.load(Ordering::SeqCst)
    }

    /// There is no calendar: each simulation begins at the same moment.
    fn wall_clock(&self) -> Time {
        self.now()
    }
}

#[derive(Debug)]
pub(crate) struct NetworkLink(pub(crate) Arc<Membership>);

impl Link for NetworkLink {
    fn send(&mut self, packets: &mut [Packet]) -> bool {
        self.0.network.send(self.0.number, packets);
        true
    }

    fn seed(&self) -> u64 {
        self.0.seed()
    }

    fn latency(&self) -> Time {
        self.0.network.latency()
    }

    fn join(&mut self, group: IpAddr) -> io::Result<()> {
        self.0.network.change_groups(self.0.number, |groups| {
            groups.insert(group);
        });
        Ok(())
    }

    fn leave(&mut self, group: IpAddr) {
        self.0.network.change_groups(self.0.number, |groups| {
            groups.remove(&group);
        });
    }

    fn set_addresses(&mut self, addresses: &[IpAddr]) -> io::Result<()> {
        self.0.set_addresses(addresses.to_vec())
    }
}
