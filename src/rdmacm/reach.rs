//! Addresses that lead to no RDMA device, found before the kernel is asked, and what its errors mean here.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use crate::error::{Error, Result};
use crate::hooks;
use crate::unusable::{DEVICES, Unusable, names};

/// Checks an address to listen at, or of a peer.
///
/// # Errors
///
///  - `EADDRNOTAVAIL`: it is the loopback address, which no RDMA device here has.
///  - `EINVAL`: it is incomplete, or that of no machine.
pub(super) fn check(verb: &'static str, address: SocketAddr, peer: bool) -> Result<()> {
    check_with(verb, address, peer, loopback_has_device)
}

fn check_with(
    verb: &'static str,
    address: SocketAddr,
    peer: bool,
    loopback_has_device: impl Fn() -> bool,
) -> Result<()> {
    let ip = address.ip().to_canonical();
    let invalid = |is_so, reason| Error::invalid_if(is_so, verb, reason);
    invalid(
        peer && ip.is_unspecified(),
        "0.0.0.0 and :: are addresses to listen at: name the peer's address",
    )?;
    invalid(peer && address.port() == 0, "port 0 is no peer's: name the port that it listens at")?;
    let broadcast = matches!(ip, IpAddr::V4(ip) if ip.is_broadcast());
    invalid(broadcast, "255.255.255.255 is no address of an RDMA device")?;
    invalid(!peer && ip.is_multicast(), "nobody listens at a multicast group: join it")?;
    if let SocketAddr::V6(v6) = address {
        invalid(
            v6.ip().is_unicast_link_local() && v6.scope_id() == 0,
            "an IPv6 address that begins with fe80 needs its interface: set the scope id",
        )?;
    }
    if ip.is_loopback() && !loopback_has_device() {
        return Err(Error::with_reason(
            verb,
            libc::EADDRNOTAVAIL,
            "no RDMA device has the loopback address: take one of a network interface that has a device (`rdma \
             link` lists them, as netdev)",
        ));
    }
    Ok(())
}

/// Whether a device of the kernel is on the interface `lo`, or this process brings devices, which may have any address.
fn loopback_has_device() -> bool {
    hooks::hooks().is_some()
        || names(Path::new(DEVICES)).iter().any(|device| {
            let ports = Path::new(DEVICES).join(device).join("ports");
            names(&ports).iter().any(|port| {
                let interfaces = ports.join(port).join("gid_attrs/ndevs");
                names(&interfaces).iter().any(|index| {
                    let name = std::fs::read_to_string(interfaces.join(index));
                    name.is_ok_and(|name| name.trim() == "lo")
                })
            })
        })
}

/// The reason for an error of the kernel, if the device that the address belongs to cannot be used from here.
#[cold]
pub(super) fn explain(error: Error) -> Error {
    match error.errno() {
        libc::ENODEV | libc::EACCES | libc::EPERM => match Unusable::first() {
            Some(device) => error.or_unusable(Some(device)),
            None if error.errno() == libc::ENODEV => Error::with_reason(
                error.verb(),
                libc::ENODEV,
                "the address is not that of an RDMA device here, and no device leads to it (`rdma link` lists them, \
                 with their network interfaces)",
            ),
            None => error,
        },
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_without_a_device_is_refused_with_the_way_out() {
        let check = |address: &str, peer, lo: bool| {
            check_with("rdma_bind_addr", address.parse().unwrap(), peer, || lo)
        };
        for (address, peer, errno, part) in [
            ("127.0.0.1:1", false, libc::EADDRNOTAVAIL, "loopback"),
            ("127.9.9.9:1", true, libc::EADDRNOTAVAIL, "loopback"),
            ("[::1]:1", true, libc::EADDRNOTAVAIL, "loopback"),
            ("[::ffff:127.0.0.1]:1", false, libc::EADDRNOTAVAIL, "loopback"),
            ("0.0.0.0:1", true, libc::EINVAL, "listen at"),
            ("[::]:1", true, libc::EINVAL, "listen at"),
            ("10.0.0.1:0", true, libc::EINVAL, "port 0"),
            ("255.255.255.255:1", false, libc::EINVAL, "255.255"),
            ("224.0.0.9:1", false, libc::EINVAL, "join it"),
            ("[ff02::1]:1", false, libc::EINVAL, "join it"),
            ("[fe80::1]:1", true, libc::EINVAL, "scope id"),
        ] {
            let error = check(address, peer, false).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(errno), "{address}: {error}");
            assert!(error.to_string().contains(part), "{address}: {error}");
        }
        for (address, peer) in [
            ("0.0.0.0:0", false),
            ("[::]:7", false),
            ("10.0.0.1:7", true),
            ("[fe80::1%2]:7", true),
            ("224.0.0.9:7", true),
        ] {
            assert_eq!(check(address, peer, false), Ok(()), "{address}");
        }
        assert_eq!(check("127.0.0.1:7", true, true), Ok(()), "a device on the loopback interface");
    }
}
