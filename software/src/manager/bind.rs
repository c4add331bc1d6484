//! Addresses and ports: bind, resolve, listen.

use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::abi::{Address, Kind, PS_IB, transport};
use super::id::{Id, State};
use super::names::{Claim, Family};
use super::places::{Place, devices, is_of_machine, places, source_to};
use super::{Manager, names};
use crate::driver::Shared;
use crate::link::interfaces::interface_of;
use crate::transport::connection::Listener;

/// The most requests that wait at a listener.
const MOST_WAITING: u32 = 1024;

/// The ports that are given to programs that ask for none.
fn free_ports() -> Range<u16> {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range");
    let text = text.unwrap_or_default();
    let mut ports = text.split_whitespace().filter_map(|port| port.parse().ok());
    match (ports.next(), ports.next()) {
        (Some(first), Some(last)) if first < last => first..last,
        _ => 32768..61000,
    }
}

/// Whether the process may bind to ports below 1024.
fn may_bind_low() -> bool {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mut effective = text.lines().filter_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.next().and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    let floor = std::fs::read_to_string("/proc/sys/net/ipv4/ip_unprivileged_port_start");
    let is_free = floor.is_ok_and(|floor| floor.trim() == "0");
    // CAP_NET_BIND_SERVICE
    is_free || effective.is_none_or(|effective| effective & 1 << 10 != 0)
}

impl Manager {
    /// Whether it may have the port, as `cma_check_port` of the kernel says.
    ///
    /// # Errors
    ///
    /// `EADDRNOTAVAIL`: it or another asks for all addresses. `EADDRINUSE`: another has the same one.
    fn is_free(&self, id: &Id, address: SocketAddr) -> Result<(), c_int> {
        for other in self.at_port(id.space, address.port()) {
            let Some(source) = other.source.filter(|_| !(other.reuses && id.reuses)) else {
                continue;
            };
            if !id.families(address).iter().any(|of| other.families(source).contains(of)) {
                continue;
            }
            if source.ip().is_unspecified() || address.ip().is_unspecified() {
                return Err(libc::EADDRNOTAVAIL);
            }
            if source.ip() == address.ip() {
                return Err(libc::EADDRINUSE);
            }
        }
        Ok(())
    }

    /// The port for a family of addresses, which this process shares until it listens if the identifier says so.
    fn claim(&self, id: &Id, port: u16, family: Family) -> Result<Claim, c_int> {
        let port = (id.space, port);
        let ours = self.at_port(port.0, port.1).flat_map(|other| &other.claims);
        if let Some(ours) = ours.into_iter().find(|it| it.is_sole && it.family == family) {
            return Ok(ours.clone());
        }
        if id.reuses {
            return names::share(port, family);
        }
        let places = places();
        let fits = |place: &&Place| Family::of(place.address) == family && !place.is_simulated();
        let own = id.place.as_ref().filter(fits).or(places.iter().find(fits));
        names::take(port, family, own.map(|place| place.address))
    }

    /// Gives the identifier an address with a port; a free one if it has none.
    fn take_port(&self, id: &mut Id, mut address: SocketAddr, is_named: bool) -> Result<(), c_int> {
        let take = |id: &mut Id, address: SocketAddr| {
            self.is_free(id, address)?;
            if is_named {
                let places = places();
                // Simulated devices are of no other process.
                if places.iter().any(|place| !place.is_simulated()) {
                    let families = id.families(address).iter();
                    let claims = families.map(|family| self.claim(id, address.port(), *family));
                    let claims: Result<_, _> = claims.collect();
                    id.claims = claims.map_err(|errno| match errno {
                        libc::EADDRINUSE if address.ip().is_unspecified() => libc::EADDRNOTAVAIL,
                        errno => errno,
                    })?;
                }
            }
            id.source = Some(address);
            Ok(())
        };
        if address.port() != 0 {
            if address.port() < 1024 && !may_bind_low() {
                return Err(libc::EACCES);
            }
            return take(id, address);
        }
        let ports = free_ports();
        let count = u32::from(ports.end - ports.start);
        // Where it begins differs from call to call, and from process to process.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let start = std::process::id().wrapping_mul(7919);
        for _ in 0..count {
            let next = start.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % count;
            address.set_port(ports.start + next as u16);
            match take(id, address) {
                Err(libc::EADDRINUSE | libc::EADDRNOTAVAIL) => {}
                taken => return taken,
            }
        }
        Err(libc::EADDRNOTAVAIL)
    }

    /// # Errors
    ///
    /// `EINVAL`: it is bound already, or the address is of a family that cannot be bound. `EADDRNOTAVAIL`: the address is not of
    /// this machine. `ENODEV`: there is no device for it. Else as `take_port`.
    pub(super) fn bind(&self, id: &mut Id, address: Address) -> Result<(), c_int> {
        if id.state != State::Idle {
            return Err(libc::EINVAL);
        }
        let address = match address {
            Address::Inet(address) => address,
            // librdmacm asks so whether AF_IB is known.
            Address::Ib if id.space == PS_IB => {
                id.state = State::Bound;
                return Ok(());
            }
            _ => return Err(libc::EINVAL),
        };
        let mut is_named = address.ip().is_unspecified();
        if !is_named {
            let places = places();
            let own = places.iter().find(|place| place.address == address.ip());
            let place = match own {
                Some(own) => own,
                None if is_of_machine(address.ip())? => {
                    is_named = true;
                    let fits = |place: &&Place| place.address.is_ipv4() == address.is_ipv4();
                    places.iter().find(fits).ok_or(libc::ENODEV)?
                }
                None => return Err(libc::EADDRNOTAVAIL),
            };
            id.place = Some(place.clone());
        }
        let taken = self.take_port(id, address, is_named);
        if taken.is_err() {
            id.place = None;
            return taken;
        }
        id.state = State::Bound;
        Ok(())
    }

    /// An address of the machine may be no device's. The address of the device of the program that listens there.
    ///
    /// # Errors
    ///
    /// As [`names::find`].
    pub(super) fn device_of_name(&self, id: &Id, to: SocketAddr) -> Result<Option<IpAddr>, c_int> {
        let service = |other: &&Id| {
            let is_here = |own: SocketAddr| own.ip() == to.ip() || own.ip().is_unspecified();
            other.state == State::Listening && other.source.is_some_and(is_here)
        };
        let fits = |place: &&Place| place.address.is_ipv4() == to.is_ipv4();
        if let Some(listener) = self.at_port(id.space, to.port()).find(service) {
            let own = listener.place.as_ref().filter(fits).map(|place| place.address);
            return Ok(own.or_else(|| places().iter().find(fits).map(|place| place.address)));
        }
        names::find((id.space, to.port()), Family::of(to.ip()))
    }

    /// # Errors
    ///
    /// `EINVAL`: it is resolved already, or the destination is no IP address. Else as `bind`. What goes wrong later is an event.
    pub(super) fn resolve(
        &self,
        id: &mut Id,
        source: Address,
        destination: Address,
    ) -> Result<(), c_int> {
        let Address::Inet(mut to) = destination else { return Err(libc::EINVAL) };
        match (id.state, source) {
            (State::Idle, Address::Inet(own)) if !own.ip().is_unspecified() || own.port() != 0 => {
                self.bind(id, source)?;
            }
            (State::Idle | State::Bound, _) => {}
            _ => return Err(libc::EINVAL),
        }
        id.state = State::Bound;
        let places = places();
        let is_ipv4 = to.is_ipv4();
        let fits = |place: &&Place| place.address.is_ipv4() == is_ipv4;
        if to.ip().is_unspecified()
            && let Some(place) = places.iter().find(fits)
        {
            to.set_ip(place.address);
        }
        let is_own = places.iter().any(|place| place.address == to.ip());
        let named =
            if is_own || !is_of_machine(to.ip())? { None } else { self.device_of_name(id, to)? };
        let peer = named.unwrap_or(to.ip());
        if id.place.is_none() {
            let mut candidates = places.iter().filter(fits);
            let route = source_to(peer);
            let same_machine = |place: &&Place| place.address.is_loopback() && peer.is_loopback();
            let own = candidates.clone().find(|place| place.address == peer);
            let routed = route.as_ref().ok();
            let routed = candidates.clone().find(|place| Some(&place.address) == routed);
            // The machine may prefer another address of the interface than the device's.
            let interface = route.as_ref().map_or(0, |source| interface_of(*source));
            let near = |place: &&Place| interface != 0 && interface_of(place.address) == interface;
            let place = own.or(routed).or_else(|| candidates.clone().find(near));
            let place = place.or_else(|| candidates.clone().find(same_machine));
            // A simulated network has no routes: its devices reach each other.
            let place = place.or_else(|| candidates.find(|place| place.is_simulated()));
            // Devices with addresses of IPv4 are in groups of IPv6 too.
            let is_group = peer.is_ipv6() && peer.is_multicast();
            let joins = |place: &&Place| is_group && place.address.is_ipv4();
            id.place = place.or_else(|| places.iter().find(joins)).cloned();
            if id.place.is_none() {
                let errno = route.err().and_then(|e| e.raw_os_error()).unwrap_or(libc::ENODEV);
                id.tell(Kind::AddressError, -errno);
                return Ok(());
            }
        }
        let Some(place) = &id.place else { return Err(libc::EINVAL) };
        let mut own = id.source.unwrap_or_else(|| SocketAddr::new(place.address, 0));
        if own.ip().is_unspecified() {
            own.set_ip(place.address);
        }
        if own.port() == 0 {
            self.take_port(id, own, false)?;
        } else {
            id.source = Some(own);
        }
        (id.destination, id.peer) = (Some(to), Some(peer));
        id.state = State::Resolved;
        id.tell(Kind::AddressResolved, 0);
        Ok(())
    }

    /// # Errors
    ///
    /// `EINVAL`: it does not fit its state. Else as `bind`; an identifier that shares its port has it alone from here on, and so
    /// gets `EADDRINUSE` if another process shares it too.
    pub(super) fn listen(&self, id: &mut Id, backlog: u32) -> Result<(), c_int> {
        if id.state == State::Idle {
            self.bind(id, Address::Inet((Ipv4Addr::UNSPECIFIED, 0).into()))?;
        }
        let Some(source) = id.source.filter(|_| id.state == State::Bound) else {
            return Err(libc::EINVAL);
        };
        if std::mem::take(&mut id.reuses) {
            let families =
                id.claims.iter().map(|claim| self.claim(id, source.port(), claim.family));
            let claims = self.is_free(id, source).and_then(|()| families.collect());
            match claims {
                Ok(claims) => id.claims = claims,
                Err(errno) => {
                    id.reuses = true;
                    return Err(errno);
                }
            }
        }
        let backlog = if backlog as i32 <= 0 { MOST_WAITING } else { backlog.min(MOST_WAITING) };
        id.room.store(backlog, Ordering::Relaxed);
        id.state = State::Listening;
        id.listen_everywhere();
        Ok(())
    }
}

impl Id {
    /// Whose connections it takes at this address.
    fn families(&self, at: SocketAddr) -> &'static [Family] {
        match at {
            SocketAddr::V4(_) => &[Family::Ipv4],
            SocketAddr::V6(_) if self.is_ipv6_only => &[Family::Ipv6],
            SocketAddr::V6(_) => &[Family::Ipv4, Family::Ipv6],
        }
    }

    /// On its device, or on all if it has none.
    pub(super) fn listen_everywhere(&self) {
        match &self.place {
            Some(place) => place.device.upgrade().iter().for_each(|device| self.listen_on(device)),
            None => devices().iter().for_each(|device| self.listen_on(device)),
        }
    }

    pub(super) fn listen_on(&self, device: &Arc<Shared>) {
        let Some(source) = self.source else { return };
        let listener = Listener {
            owner: self.owner(device),
            service: self.service(source.port()),
            transport: transport(self.kind),
            address: source.ip(),
            is_of_both: !self.is_ipv6_only,
            room: self.room.clone(),
        };
        device.lock().connections.listen(listener);
    }
}
