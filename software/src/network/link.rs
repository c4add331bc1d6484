//! A device's link to a simulated network, and the clock of its devices.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;

use super::simulation::Membership;
use crate::link::Link;
use crate::link::Time;
use crate::wire::Packet;

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
