//! Listeners, which are told of peers' requests.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::outlet::Owner;
use crate::transport::queue_pair::Transport;
use crate::wire::management::IpHeader;

/// A program that waits for requests.
#[derive(Clone, Debug)]
pub(crate) struct Listener {
    pub(crate) owner: Owner,
    /// The port space, and the port.
    pub(crate) service: u64,
    /// None: of every connection.
    pub(crate) transport: Option<Transport>,
    /// The one address that the peer must have asked for; an unspecified one stands for all of its family.
    pub(crate) address: IpAddr,
    /// Whether an unspecified IPv6 address stands for those of IPv4 too.
    pub(crate) is_of_both: bool,
    /// How many more requests may wait until they are read. It may listen on several devices.
    pub(crate) room: Arc<AtomicU32>,
}

impl Listener {
    fn fits(&self, header: &IpHeader) -> bool {
        let same = self.address.is_ipv4() == header.destination.is_ipv4();
        if self.address.is_unspecified() {
            same || self.is_of_both && self.address.is_ipv6()
        } else {
            self.address == header.destination
        }
    }

    fn takes(&self, transport: Transport) -> bool {
        match self.transport {
            None => transport != Transport::Ud,
            // A listener of a sending queue pair's kind gets the other half.
            Some(Transport::XrcSend) => transport == Transport::XrcReceive,
            Some(own) => own == transport,
        }
    }

    /// Takes a place for a request, if one is left.
    pub(crate) fn has_room(&self) -> bool {
        let less = |room: u32| room.checked_sub(1);
        self.room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }
}

#[derive(Debug, Default)]
pub(super) struct Listeners(BTreeMap<u64, Vec<Listener>>);

impl Listeners {
    pub(super) fn add(&mut self, listener: Listener) {
        self.remove(listener.owner.id);
        self.0.entry(listener.service).or_default().push(listener);
    }

    pub(super) fn remove(&mut self, id: u32) {
        self.0.retain(|_, of| {
            of.retain(|listener| listener.owner.id != id);
            !of.is_empty()
        });
    }

    /// One with an address goes before one without.
    pub(super) fn find(
        &self,
        service: u64,
        header: &IpHeader,
        transport: Transport,
    ) -> Option<&Listener> {
        let of = self.0.get(&service)?;
        let fitting =
            of.iter().filter(|listener| listener.fits(header) && listener.takes(transport));
        fitting.min_by_key(|listener| listener.address.is_unspecified())
    }
}
