//! The ports of wildcard addresses, and of addresses that no device has, are the machine's: whoever binds to one takes an
//! abstract name of Unix sockets, which the kernel gives to one process only, and frees when that ends. A second name says
//! at which address the device is.
//!
//! A name is a hint, which anybody may take: at worst a client asks a device that refuses it.

use std::ffi::c_int;
use std::io;
use std::net::IpAddr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

fn name(space: u16, port: u16) -> String {
    format!("ibverbs-cm/{space:04x}/{port}")
}

/// Takes the port. The names are given back when they are dropped.
///
/// # Errors
///
/// `EADDRINUSE`: another process has it, unless `is_shared`.
pub(super) fn publish(
    (space, port): (u16, u16),
    devices: &[IpAddr],
    is_shared: bool,
) -> Result<Vec<UnixDatagram>, c_int> {
    let take = |name: &str| UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name)?);
    let name = name(space, port);
    let mut taken = Vec::new();
    match take(&name) {
        Ok(socket) => taken.push(socket),
        Err(e) if e.kind() == io::ErrorKind::AddrInUse && is_shared => {}
        Err(e) if e.kind() == io::ErrorKind::AddrInUse => return Err(libc::EADDRINUSE),
        Err(e) => return Err(e.raw_os_error().unwrap_or(libc::ENOMEM)),
    }
    taken.extend(devices.iter().filter_map(|address| take(&format!("{name}/{address}")).ok()));
    Ok(taken)
}

/// The address of the device that listens on a port of the machine.
pub(super) fn find(space: u16, port: u16, is_ipv4: bool) -> Option<IpAddr> {
    let all = std::fs::read_to_string("/proc/net/unix").ok()?;
    let prefix = format!("@{}/", name(space, port));
    all.lines().find_map(|line| {
        let address: IpAddr = line.rsplit(' ').next()?.strip_prefix(&prefix)?.parse().ok()?;
        (address.is_ipv4() == is_ipv4).then_some(address)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_process_and_says_where_the_device_is() {
        let port = std::process::id() as u16;
        let space = 0xffff;
        assert_eq!(find(space, port, true), None);
        let here = [IpAddr::from([127, 3, 2, 1]), "fd00::1".parse().unwrap()];
        let taken = publish((space, port), &here, false).unwrap();
        assert_eq!(find(space, port, true), Some(here[0]));
        assert_eq!(find(space, port, false), Some(here[1]));
        assert_eq!(find(space, port.wrapping_add(1), true), None);
        assert_eq!(publish((space, port), &[], false).err(), Some(libc::EADDRINUSE));
        assert!(publish((space, port), &[], true).unwrap().is_empty());
        drop(taken);
        assert_eq!(find(space, port, true), None);
        assert!(publish((space, port), &[], false).is_ok());
    }
}
