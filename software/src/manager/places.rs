//! The registered devices, and where each of their addresses is.

use std::ffi::c_int;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::causes::is_used_up;
use crate::driver::Shared;
use crate::wire::PORT;

static DEVICES: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());

/// Returns whether it is new.
pub(super) fn add(device: &Arc<Shared>) -> bool {
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    devices.retain(|device| device.strong_count() > 0);
    let is_new = !devices.iter().any(|known| known.as_ptr() == Arc::as_ptr(device));
    if is_new {
        devices.push(Arc::downgrade(device));
    }
    is_new
}

pub(super) fn remove(device: &Shared) {
    let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    devices.retain(|known| !std::ptr::eq(known.as_ptr(), device));
}

/// The devices of this process, in the order of registration.
pub(super) fn devices() -> Vec<Arc<Shared>> {
    let devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
    let all = devices.iter().filter_map(Weak::upgrade);
    all.filter(|device| device.is_of_this_process()).collect()
}

/// An address of a device.
#[derive(Clone, Debug)]
pub(super) struct Place {
    pub(super) device: Weak<Shared>,
    pub(super) guid: u64,
    pub(super) port: u8,
    pub(super) index: u8,
    pub(super) address: IpAddr,
    pub(super) mtu: u8,
}

impl Place {
    pub(super) fn is(&self, device: &Shared) -> bool {
        std::ptr::eq(self.device.as_ptr(), device)
    }

    pub(super) fn is_simulated(&self) -> bool {
        self.device.upgrade().is_some_and(|device| device.driver().membership().is_some())
    }
}

/// The addresses of one device.
pub(super) fn places_of(device: &Arc<Shared>) -> Vec<Place> {
    let engine = device.lock();
    let (guid, mtu) = (engine.core.settings.guid(), engine.core.settings.mtu.0 as u8);
    let mut places = Vec::new();
    for (port, of) in engine.core.ports.iter().enumerate() {
        for (index, &address) in of.addresses.iter().enumerate() {
            let (port, index) = (port as u8 + 1, index as u8);
            places.push(Place { device: Arc::downgrade(device), guid, port, index, address, mtu });
        }
    }
    places
}

pub(super) fn places() -> Vec<Place> {
    devices().iter().flat_map(places_of).collect()
}

/// `None`: there is no such file.
///
/// # Errors
///
/// `EMFILE`, `ENFILE`, `ENOMEM`, `ENOBUFS`: there may be one, but nothing is left to open it with.
fn found<T>(file: io::Result<T>) -> Result<Option<T>, c_int> {
    match file {
        Ok(file) => Ok(Some(file)),
        Err(e) => e.raw_os_error().filter(|errno| is_used_up(*errno)).map_or(Ok(None), Err),
    }
}

/// Whether an address is one of this machine's.
///
/// # Errors
///
/// As [`found`].
pub(super) fn is_of_machine(address: IpAddr) -> Result<bool, c_int> {
    Ok(address.is_loopback() || found(UdpSocket::bind((address, 0)))?.is_some())
}

/// Whether a device of any process of this machine has the address. Trying to bind to it could be in the way of a process that
/// binds to it.
///
/// # Errors
///
/// As [`found`].
pub(super) fn is_of_a_device(address: IpAddr) -> Result<bool, c_int> {
    let (file, name) = match address {
        IpAddr::V4(v4) => ("/proc/net/udp", format!("{:08X}", u32::from_ne_bytes(v4.octets()))),
        IpAddr::V6(v6) => {
            let words = v6.octets();
            let words = words.chunks_exact(4).map(|word| {
                let word = word.try_into().unwrap_or_default();
                format!("{:08X}", u32::from_ne_bytes(word))
            });
            ("/proc/net/udp6", words.collect())
        }
    };
    let name = format!(" {name}:{PORT:04X} ");
    Ok(places().iter().any(|place| place.address == address)
        || found(std::fs::read_to_string(file))?.is_some_and(|all| all.contains(&name)))
}

/// The address from which the machine would send to another.
pub(super) fn source_to(address: IpAddr) -> std::io::Result<IpAddr> {
    let any: IpAddr =
        if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect((address, PORT))?;
    Ok(socket.local_addr()?.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_of_any_process_is_seen() {
        for address in ["127.9.7.5", "::1"] {
            let address: IpAddr = address.parse().unwrap();
            let bound = UdpSocket::bind((address, PORT));
            match bound.as_ref().map_err(io::Error::kind) {
                Ok(_) => assert!(is_of_a_device(address).unwrap()),
                Err(io::ErrorKind::AddrInUse) => {
                    assert!(is_of_a_device(address).unwrap(), "another process has it");
                }
                Err(e) => eprintln!("NOT CHECKED: {address}: {e}"),
            }
        }
        assert_eq!(is_of_a_device("127.9.7.6".parse().unwrap()), Ok(false));
    }
}
