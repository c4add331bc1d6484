//! The ports of wildcard addresses, and of addresses that no device has, are the machine's: whoever binds to one takes an
//! abstract name of Unix sockets for each family of addresses, which the kernel gives to one process only, and frees when that
//! ends. A second name says at which address the device is.
//!
//! A name is a hint, which anybody may take: at worst a client asks a device that refuses it.

use std::ffi::c_int;
use std::io;
use std::net::IpAddr;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Family {
    Ipv4,
    Ipv6,
}

impl Family {
    pub(super) fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::Ipv4 } else { Self::Ipv6 }
    }
}

fn name(space: u16, port: u16) -> String {
    format!("ibverbs-cm/{space:04x}/{port}")
}

/// Takes the port for these families of addresses, of which there is a device or not. The names are given back when they are
/// dropped.
///
/// # Errors
///
/// `EADDRINUSE`: another process has it, for a family that is not shared.
pub(super) fn publish(
    (space, port): (u16, u16),
    families: &[(Family, Option<IpAddr>)],
    is_shared: impl Fn(Family) -> bool,
) -> Result<Vec<UnixDatagram>, c_int> {
    let take = |name: &str| UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(name)?);
    let name = name(space, port);
    let mut taken = Vec::new();
    for &(family, _) in families {
        match take(&format!("{name}/{family:?}")) {
            Ok(socket) => taken.push(socket),
            Err(e) if e.kind() == io::ErrorKind::AddrInUse && is_shared(family) => {}
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => return Err(libc::EADDRINUSE),
            Err(e) => return Err(e.raw_os_error().unwrap_or(libc::ENOMEM)),
        }
    }
    let devices = families.iter().filter_map(|(_, device)| *device);
    taken.extend(devices.filter_map(|address| take(&format!("{name}/{address}")).ok()));
    Ok(taken)
}

/// The address of the device that listens on a port of the machine.
pub(super) fn find(space: u16, port: u16, family: Family) -> Option<IpAddr> {
    let all = std::fs::read_to_string("/proc/net/unix").ok()?;
    let prefix = format!("@{}/", name(space, port));
    all.lines().find_map(|line| {
        let address: IpAddr = line.rsplit(' ').next()?.strip_prefix(&prefix)?.parse().ok()?;
        (Family::of(address) == family).then_some(address)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_process_and_says_where_the_device_is() {
        let port = std::process::id() as u16;
        let space = 0xffff;
        assert_eq!(find(space, port, Family::Ipv4), None);
        let here = [IpAddr::from([127, 3, 2, 1]), "fd00::1".parse().unwrap()];
        let both = [(Family::Ipv4, Some(here[0])), (Family::Ipv6, Some(here[1]))];
        let taken = publish((space, port), &both, |_| false).unwrap();
        assert_eq!(find(space, port, Family::Ipv4), Some(here[0]));
        assert_eq!(find(space, port, Family::Ipv6), Some(here[1]));
        assert_eq!(find(space, port.wrapping_add(1), Family::Ipv4), None);
        for one in both {
            assert_eq!(publish((space, port), &[one], |_| false).err(), Some(libc::EADDRINUSE));
            assert!(publish((space, port), &[one], |_| true).unwrap().is_empty());
        }
        drop(taken);
        assert_eq!(find(space, port, Family::Ipv4), None);
        assert!(publish((space, port), &both, |_| false).is_ok());
    }

    #[test]
    fn each_family_is_taken_for_itself() {
        let (space, port) = (0xfffe, std::process::id() as u16);
        let [one, other] = [Family::Ipv4, Family::Ipv6].map(|family| [(family, None)]);
        let _one = publish((space, port), &one, |_| false).unwrap();
        let other_taken = publish((space, port), &other, |_| false).unwrap();
        assert_eq!(
            publish((space, port), &[one[0], other[0]], |_| false).err(),
            Some(libc::EADDRINUSE)
        );
        drop(other_taken);
        assert_eq!(
            publish((space, port), &[other[0], one[0]], |_| false).err(),
            Some(libc::EADDRINUSE)
        );
        assert!(publish((space, port), &other, |_| false).is_ok(), "a failure keeps nothing");
    }
}
