//! Events, as the program reads them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::Weak;
use std::sync::atomic::Ordering;

use super::Manager;
use super::abi::{Answer, EventAnswer, Kind};
use super::file::{Item, Queue, What};
use super::id::{Id, State, UDP_QKEY};
use super::places::places_of;
use crate::driver::Shared;
use crate::transport::connection::{Arrived, Event};
use crate::wire::management::{IpHeader, status};

/// The number of a queue pair of a multicast group.
const MULTICAST: u32 = 0xff_ffff;

impl Manager {
    /// The event that the program reads next.
    pub(super) fn read(&mut self, queue: &Arc<Queue>, item: Item) -> Answer {
        let Some(id) = self.ids.get_mut(&item.id) else {
            // An identifier takes its events along.
            return EventAnswer::new(0, item.id, Kind::DeviceRemoval as u32, 0).0;
        };
        id.reported += 1;
        match &item.what {
            What::Plain(kind, status) => id.event(*kind, *status).0,
            What::Written(kind, status, argument) => {
                let mut event = EventAnswer::new(id.uid, id.handle, *kind, *status);
                event.argument(argument);
                event.0
            }
            What::Joined(handle) => {
                let handle = *handle;
                let mut event = EventAnswer::new(0, handle, Kind::MulticastJoin as u32, 0);
                if let Some(group) = self.groups.get_mut(&handle) {
                    group.reported += 1;
                    id.reported -= 1;
                    event = EventAnswer::new(group.uid, handle, Kind::MulticastJoin as u32, 0);
                    event.datagrams(MULTICAST, UDP_QKEY, &id.vector(group.address));
                }
                event.0
            }
            What::Connection(device, Event::Request(arrived)) => {
                let m = &arrived.message;
                let kind = match (m.transport, m.extended) {
                    (1, _) => 3,
                    (3, _) => 10,
                    _ => 2,
                };
                let mut event =
                    self.request(queue, device, item.id, arrived, (m.service, &m.data, kind));
                event.data(&m.data[IpHeader::SIZE..]);
                // This side answers what the peer may ask for.
                let asked = [m.srq, m.depth, m.resources, m.flow_control, m.retry, m.rnr_retry];
                event.connection(m.qpn, asked, (m.vendor, arrived.modifier));
                event.0
            }
            What::Connection(device, Event::ServiceRequest(arrived)) => {
                let m = &arrived.message;
                let mut event =
                    self.request(queue, device, item.id, arrived, (m.service, &m.data, 4));
                event.datagram_data(&m.data[IpHeader::SIZE..]);
                event.0
            }
            What::Connection(_, event) => id.connection_event(event).0,
        }
    }

    /// A request at a listener gets an identifier of its own.
    fn request<T>(
        &mut self,
        queue: &Arc<Queue>,
        device: &Weak<Shared>,
        listener: u32,
        arrived: &Arrived<T>,
        (service, data, kind): (u64, &[u8], u8),
    ) -> EventAnswer {
        let handle = self.next_handle();
        let Some(listener) = self.ids.get(&listener) else {
            return EventAnswer::new(0, handle, Kind::DeviceRemoval as u32, 0);
        };
        listener.room.fetch_add(1, Ordering::Relaxed);
        let uid = listener.uid;
        let mut id = Id::new(handle, 0, queue.clone(), (listener.space, kind));
        id.type_of_service = listener.type_of_service;
        id.ack_timeout = listener.ack_timeout;
        id.is_child = true;
        id.state = State::Connected(arrived.connection);
        id.peer = Some(arrived.path.to);
        if let Some(names) = IpHeader::parse(data) {
            id.source = Some(SocketAddr::new(names.destination, service as u16));
            id.destination = Some(SocketAddr::new(names.source, names.port));
        }
        if let Some(device) = device.upgrade() {
            let places = places_of(&device);
            id.place = places.into_iter().find(|place| place.address == arrived.path.from);
        }
        self.ids.insert(handle, id);
        EventAnswer::new(uid, handle, Kind::ConnectRequest as u32, 0)
    }
}

impl Id {
    fn event(&self, kind: Kind, status: i32) -> EventAnswer {
        EventAnswer::new(self.uid, self.handle, kind as u32, status)
    }

    fn connection_event(&self, event: &Event) -> EventAnswer {
        match event {
            Event::Reply(m, modifier) => {
                let mut event = self.event(Kind::ConnectResponse, 0);
                event.data(&m.data);
                let vendor = u32::from(m.vendor_high) << 16
                    | u32::from(m.vendor_middle) << 8
                    | u32::from(m.vendor_low);
                let qpn = if self.kind == 9 { m.xrc_qpn } else { m.qpn };
                let offered = [m.srq, m.depth, m.resources, m.flow_control, 0, m.rnr_retry];
                event.connection(qpn, offered, (vendor, *modifier));
                event
            }
            Event::ServiceReply(m) if m.status == status::VALID => {
                let mut event = self.event(Kind::Established, 0);
                event.datagrams(m.qpn, m.qkey, &self.vector_to_peer());
                event.datagram_data(&m.data);
                event
            }
            Event::ServiceReply(m) => {
                let mut event = self.event(Kind::Unreachable, m.status.into());
                event.datagram_data(&m.data);
                event
            }
            Event::Rejected(reason, data) => {
                let mut event = self.event(Kind::Rejected, i32::from(*reason));
                event.data(&**data);
                event
            }
            Event::Established => self.event(Kind::Established, 0),
            Event::Unreachable => self.event(Kind::Unreachable, -libc::ETIMEDOUT),
            Event::Disconnected(true) => self.event(Kind::Disconnected, 0),
            Event::Disconnected(false) => self.event(Kind::Disconnected, -libc::ETIMEDOUT),
            Event::TimewaitExit | Event::Request(_) | Event::ServiceRequest(_) => {
                self.event(Kind::TimewaitExit, 0)
            }
        }
    }
}
