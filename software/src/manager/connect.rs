//! Connections: what the program asks of the protocol.

use std::ffi::c_int;
use std::net::IpAddr;
use std::sync::Arc;

use super::abi::{Address, Answer, Kind, Parameters, transport};
use super::file::{Queue, What};
use super::id::{Id, State, UDP_QKEY};
use super::places::{is_of_a_device, is_of_machine};
use super::{Group, Manager};
use crate::driver::Locked;
use crate::driver::Shared;
use crate::wire::management::{
    IpHeader, Reply, Request, ServiceReply, ServiceRequest, reason, status,
};

/// Copies private data, which must fit.
fn fill(to: &mut [u8], data: &[u8]) -> Result<(), c_int> {
    let to = to.get_mut(..data.len()).ok_or(libc::EINVAL)?;
    to.copy_from_slice(data);
    Ok(())
}

fn locked(device: &Arc<Shared>) -> (Locked<'_>, u64) {
    let engine = device.lock();
    let now = engine.core.now();
    (engine, now)
}

impl Manager {
    /// # Errors
    ///
    /// `EINVAL`: the route is not resolved, or the private data is too long. `ENODEV`: the device is gone. `EMFILE`, `ENFILE`,
    /// `ENOMEM`: no file or memory is left to look for who listens; it can be called again.
    pub(super) fn connect(&self, id: &mut Id, parameters: &Parameters<'_>) -> Result<(), c_int> {
        if id.state != State::Routed || !parameters.is_valid {
            return Err(libc::EINVAL);
        }
        let to = id.destination.ok_or(libc::EINVAL)?;
        let header = id.ip_header()?.bytes();
        let service = id.service(to.port());
        let mut data = [0; 216];
        let size = if id.is_datagram() { 216 } else { 92 };
        data[..IpHeader::SIZE].copy_from_slice(&header);
        fill(&mut data[IpHeader::SIZE..size], parameters.data)?;
        if id.peer == Some(to.ip()) && is_of_machine(to.ip())? && !is_of_a_device(to.ip())? {
            // No device answers there. A listener may have come since.
            let Some(found) = self.device_of_name(id, to)? else {
                id.state = State::Over;
                if id.is_datagram() {
                    id.tell(Kind::Unreachable, status::UNSUPPORTED.into());
                } else {
                    id.tell(Kind::Rejected, reason::INVALID_SERVICE.into());
                }
                return Ok(());
            };
            id.peer = Some(found);
        }
        let (place, path) = id.path()?;
        let device = place.device.upgrade().ok_or(libc::ENODEV)?;
        let owner = id.owner(&device);
        let (mut engine, now) = locked(&device);
        let number = if id.is_datagram() {
            let message = ServiceRequest { service, data, ..ServiceRequest::default() };
            engine.connections.ask(now, (path, owner), message)
        } else {
            let mut message = Request {
                vendor: parameters.vendor,
                service,
                qpn: parameters.qpn,
                resources: parameters.resources,
                depth: parameters.depth,
                flow_control: parameters.flow_control.into(),
                retry: parameters.retry,
                rnr_retry: parameters.rnr_retry,
                srq: parameters.srq.into(),
                mtu: place.mtu,
                traffic_class: id.type_of_service,
                ack_timeout: id.ack_timeout(),
                ..Request::default()
            };
            message.data.copy_from_slice(&data[..92]);
            let transport = transport(id.kind).ok_or(libc::EINVAL)?;
            let modifier = parameters.modifier;
            engine.connections.connect(now, (path, owner), modifier, transport, message)
        };
        id.state = State::Connected(number);
        Ok(())
    }

    /// The verb that attaches a queue pair joins the group; this says what it needs.
    pub(super) fn join(
        &mut self,
        queue: &Arc<Queue>,
        id: u32,
        uid: u64,
        address: Address,
    ) -> Result<Answer, c_int> {
        let Address::Inet(address) = address else { return Err(libc::EINVAL) };
        if self.id(queue, id)?.place.is_none() {
            return Err(libc::EINVAL);
        }
        let handle = self.next_handle();
        self.groups.insert(handle, Group { owner: id, uid, address: address.ip(), reported: 0 });
        queue.push((id, What::Joined(handle)).into());
        Ok(Answer::number(handle))
    }
}

impl Id {
    /// The device, and the number of the connection on it.
    fn connection(&self) -> Result<(Arc<Shared>, u32), c_int> {
        let State::Connected(number) = self.state else { return Err(libc::EINVAL) };
        let device = self.place.as_ref().and_then(|place| place.device.upgrade());
        Ok((device.ok_or(libc::ENODEV)?, number))
    }

    /// The passive side accepts with what it offers; or of the active side, whose queue pair is ready.
    pub(super) fn accept(
        &mut self,
        uid: u64,
        parameters: &Parameters<'_>,
    ) -> Result<Answer, c_int> {
        let (device, number) = self.connection()?;
        let owner = self.owner(&device);
        let (mut engine, now) = locked(&device);
        let done = if !parameters.is_valid {
            engine.connections.ready(number)
        } else if self.is_datagram() {
            let port = self.source.map_or(0, |source| source.port());
            let (qpn, qkey, service) = (parameters.qpn, UDP_QKEY, self.service(port));
            let mut message = ServiceReply {
                status: status::VALID,
                qpn,
                qkey,
                service,
                ..ServiceReply::default()
            };
            fill(&mut message.data, parameters.data)?;
            engine.connections.answer(number, owner, message)
        } else {
            let mut message = Reply {
                qpn: parameters.qpn,
                vendor_high: (parameters.vendor >> 16) as u8,
                vendor_middle: (parameters.vendor >> 8) as u8,
                vendor_low: parameters.vendor as u8,
                resources: parameters.resources,
                depth: parameters.depth,
                flow_control: parameters.flow_control.into(),
                rnr_retry: parameters.rnr_retry,
                srq: parameters.srq.into(),
                ..Reply::default()
            };
            fill(&mut message.data, parameters.data)?;
            engine.connections.accept(now, number, owner, parameters.modifier, message)
        };
        done.map_err(|_| libc::EINVAL)?;
        if parameters.is_valid {
            self.uid = uid;
        }
        Ok(Answer::nothing())
    }

    pub(super) fn reject(&mut self, why: u8, data: &[u8]) -> Result<Answer, c_int> {
        let room = if self.is_datagram() { 136 } else { 148 };
        if data.len() > room {
            return Err(libc::EINVAL);
        }
        let (device, number) = self.connection()?;
        let port = self.source.map_or(0, |source| source.port());
        let why = if why == 0 { reason::CONSUMER } else { why.into() };
        let service = self.service(port);
        let done = device.lock().connections.reject(number, why, data, service);
        done.map_err(|_| libc::EINVAL)?;
        if !self.is_datagram() {
            self.state = State::Over;
        }
        Ok(Answer::nothing())
    }

    pub(super) fn disconnect(&mut self) -> Result<Answer, c_int> {
        let (device, number) = self.connection()?;
        let (mut engine, now) = locked(&device);
        let done = engine.connections.disconnect(now, number);
        // The connection may have ended already, as both sides know.
        if done.is_err() && engine.connections.attributes(number).is_some() {
            return Err(libc::EINVAL);
        }
        Ok(Answer::nothing())
    }

    pub(super) fn queue_pair_attributes(&self, state: u32) -> Result<Answer, c_int> {
        let connection = match self.state {
            State::Connected(_) => {
                let (device, number) = self.connection()?;
                let engine = device.lock();
                engine.connections.attributes(number)
            }
            _ => None,
        };
        self.attributes(state, connection)
    }

    /// The program has seen an event of the queue pair.
    pub(super) fn notified(&self, event: u32) -> Result<Answer, c_int> {
        const COMM_EST: u32 = 4;
        let (device, number) = self.connection()?;
        if event != COMM_EST {
            return Err(libc::EINVAL);
        }
        let mut engine = device.lock();
        match engine.connections.is_used(number) {
            Ok(()) => Ok(Answer::nothing()),
            // The RTU has come already.
            Err(_) if engine.connections.is_established(number) => Err(libc::EISCONN),
            Err(_) => Err(libc::EINVAL),
        }
    }

    /// The address of the peer's device, or of a group.
    pub(super) fn vector_to_peer(&self) -> [u8; 32] {
        self.peer.map_or([0; 32], |peer: IpAddr| self.vector(peer))
    }
}
