//! Conditions of a network that name devices: between two of them, and partitions.

use std::sync::Arc;

use crate::device::Device;
use crate::network::{Conditions, Network};

impl Network {
    /// Changes how packets from one device to another are treated that are sent from now on, until one of the two is gone.
    ///
    /// Does nothing for a device that is not on this network; so do the methods of partitions.
    pub fn set_conditions_between(&self, from: &Device, to: &Device, conditions: Conditions) {
        if let (Some(from), Some(to)) = (self.member(from), self.member(to)) {
            self.0.set_between(from, to, conditions);
        }
    }

    /// Cuts two devices off from each other, in both directions. Packets between them that are under way are lost.
    pub fn partition(&self, one: &Device, other: &Device) {
        self.partition_one_way(one, other);
        self.partition_one_way(other, one);
    }

    /// Loses all packets from one device to another, and none in the other direction.
    pub fn partition_one_way(&self, from: &Device, to: &Device) {
        self.set_cut(from, to, true);
    }

    /// Ends every partition between two devices.
    pub fn heal(&self, one: &Device, other: &Device) {
        self.set_cut(one, other, false);
        self.set_cut(other, one, false);
    }

    fn set_cut(&self, from: &Device, to: &Device, is_cut: bool) {
        if let (Some(from), Some(to)) = (self.member(from), self.member(to)) {
            self.0.set_cut(from, to, is_cut);
        }
    }

    fn member(&self, device: &Device) -> Option<u64> {
        device.membership().filter(|member| Arc::ptr_eq(&member.network, &self.0)).map(|m| m.number)
    }
}
