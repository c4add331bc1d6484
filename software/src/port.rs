//! Ports that go down and up, and addresses that change.

use std::io;
use std::net::IpAddr;

use crate::device::{Device, check_addresses, invalid};
use crate::ffi::ibv_event_type;
use crate::manager;
use crate::transport::Engine;

fn index(engine: &Engine, port: u8) -> io::Result<usize> {
    let index = usize::from(port).checked_sub(1);
    let index = index.filter(|&index| index < engine.core.ports.len());
    index.ok_or_else(|| invalid("the device has no such port"))
}

impl Device {
    /// Takes the link of a port down, or up again. Contexts get the event `IBV_EVENT_PORT_ERR` or
    /// `IBV_EVENT_PORT_ACTIVE`.
    ///
    /// While it is down, `query_port` says so, and all packets from and to its addresses are lost; queue pairs go on
    /// retrying. Does nothing if the port is in that state already.
    ///
    /// # Errors
    ///
    /// [`InvalidInput`](io::ErrorKind::InvalidInput): the device has no such port. Ports count from 1.
    pub fn set_port_active(&self, port: u8, active: bool) -> io::Result<()> {
        let mut engine = self.lock();
        let index = index(&engine, port)?;
        // Packets sent before are on their way.
        engine.settle();
        if std::mem::replace(&mut engine.core.ports[index].active, active) != active {
            let event = if active {
                ibv_event_type::IBV_EVENT_PORT_ACTIVE
            } else {
                engine.core.drop_rest(index);
                ibv_event_type::IBV_EVENT_PORT_ERR
            };
            let all_up = engine.core.ports.iter().all(|port| port.active);
            engine
                .core
                .direct_access()
                .into_iter()
                .for_each(|direct_access| direct_access.set_open(all_up));
            engine.core.raise_in_all_contexts(event, port.into());
        }
        Ok(())
    }

    /// Changes the addresses of a port, and so its GIDs. Contexts get the event `IBV_EVENT_GID_CHANGE`.
    ///
    /// Queue pairs and address handles that use an address which is gone keep it, as on hardware: their packets and
    /// the answers are lost.
    ///
    /// # Errors
    ///
    /// Nothing has changed then:
    ///
    /// - [`InvalidInput`](io::ErrorKind::InvalidInput): the device has no such port, or there are no addresses, or
    ///   more than 255, or one is that of no one machine (0.0.0.0, a multicast group).
    /// - [`AddrInUse`](io::ErrorKind::AddrInUse), [`AddrNotAvailable`](io::ErrorKind::AddrNotAvailable): as for
    ///   [`Builder::build`](crate::Builder::build).
    pub fn set_addresses(
        &self,
        port: u8,
        addresses: impl IntoIterator<Item = IpAddr>,
    ) -> io::Result<()> {
        let addresses: Vec<IpAddr> = addresses.into_iter().take(256).collect();
        if addresses.is_empty() || addresses.len() > 255 {
            return Err(invalid("a port has 1 to 255 addresses"));
        }
        check_addresses(&addresses)?;
        let mut engine = self.lock();
        let index = index(&engine, port)?;
        engine.settle();
        let ports = engine.core.ports.iter().enumerate();
        let all = ports.flat_map(|(i, port)| if i == index { &addresses } else { &port.addresses });
        let all: Vec<IpAddr> = all.copied().collect();
        engine.core.link().set_addresses(&all)?;
        engine.core.ports[index].addresses = addresses;
        engine.core.raise_in_all_contexts(ibv_event_type::IBV_EVENT_GID_CHANGE, port.into());
        drop(engine);
        manager::moved(self.shared(), &all);
        Ok(())
    }
}
