//! Finds addresses that lead to no RDMA device, and explains the kernel's errors about them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, UdpSocket};
use std::path::Path;
use std::{fs, mem};

use crate::base::{
    Error, Result,
    device_access::{Unusable, devices_folder, names},
    ffi, hooks,
};
use crate::verbs::device;

/// `peer`: the address is a peer's, not one to listen at.
///
/// # Errors
///
///  - `EADDRNOTAVAIL`: the loopback address, which no RDMA device here has.
///  - `EINVAL`: incomplete, or that of no machine.
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
        let text = "no RDMA device has the loopback address";
        return Err(with_addresses(verb, libc::EADDRNOTAVAIL, text, &known_addresses()));
    }
    Ok(())
}

/// Also for the devices of [`hooks`], which may have any address.
fn loopback_has_device() -> bool {
    hooks::hooks().is_some()
        || names(&devices_folder()).iter().any(|device| {
            let ports = devices_folder().join(device).join("ports");
            names(&ports).iter().any(|port| {
                let interfaces = ports.join(port).join("gid_attrs/ndevs");
                names(&interfaces).iter().any(|index| {
                    let name = fs::read_to_string(interfaces.join(index));
                    name.is_ok_and(|name| name.trim() == "lo")
                })
            })
        })
}

#[cold]
fn with_addresses(
    verb: &'static str,
    errno: i32,
    reason: &'static str,
    addresses: &[String],
) -> Error {
    Error::with_text(verb, errno, format!("{reason}{}", in_words(addresses)), reason)
}

fn in_words(addresses: &[String]) -> String {
    if addresses.is_empty() {
        ", and no device has an IP address (`rdma link` lists the kernel's)".to_owned()
    } else {
        format!(": they have {}", addresses.join(", "))
    }
}

/// The end of a sentence about the devices.
#[cold]
pub(super) fn their_addresses() -> String {
    in_words(&known_addresses())
}

/// Those of the devices that this process has brought, and of the kernel's.
#[cold]
fn known_addresses() -> Vec<String> {
    let class = devices_folder();
    let mut found = Vec::new();
    for device in device::devices().iter().flatten() {
        if class.join(device.name()).exists() {
            continue;
        }
        let gids = device.open().and_then(|context| context.gid_table()).unwrap_or_default();
        for gid in gids {
            let own = format!("{} ({})", Ipv6Addr::from(gid.gid).to_canonical(), device.name());
            if !found.contains(&own) {
                found.push(own);
            }
        }
    }
    found.extend(addresses(&class));
    found.truncate(16);
    found
}

/// At most 16, with the devices' names.
fn addresses(class: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for device in names(class) {
        let ports = class.join(&device).join("ports");
        for port in names(&ports) {
            let gids = ports.join(port).join("gids");
            for index in names(&gids) {
                let text = fs::read_to_string(gids.join(index)).unwrap_or_default();
                let Ok(gid) = text.trim().parse::<Ipv6Addr>() else { continue };
                let link_local = gid.is_unicast_link_local();
                let own = format!("{} ({device})", gid.to_canonical());
                if !gid.is_unspecified() && !link_local && !found.contains(&own) {
                    found.push(own);
                }
            }
        }
    }
    found.truncate(16);
    found
}

/// The connection manager's errors for a device that this process cannot use.
pub(super) fn may_be_unusable(errno: i32) -> bool {
    matches!(errno, libc::ENODEV | libc::EACCES | libc::EPERM)
}

#[cold]
pub(super) fn unopened(error: Error) -> Option<Error> {
    if let Some(device) = Unusable::first() {
        return Some(error.or_unusable(Some(device)));
    }
    if let Err(e) = fs::read_dir(devices_folder())
        && let Some(errno @ (libc::EMFILE | libc::ENFILE)) = e.raw_os_error()
    {
        return Some(Error::new(error.verb(), errno));
    }
    // librdmacm leaves out a device that it cannot open, whatever the file's rights say.
    names(&devices_folder()).iter().find_map(|device| {
        let cause = device::open(device).err()?;
        let text = format!("the device {device} cannot be opened: {cause}");
        Some(Error::with_text(error.verb(), cause.errno(), text, "a device cannot be opened"))
    })
}

#[cold]
pub(super) fn explain(error: Error) -> Error {
    if !may_be_unusable(error.errno()) {
        return error;
    }
    match unopened(error) {
        Some(error) => error,
        None if error.errno() == libc::ENODEV => {
            let text = "no RDMA device has the address, or leads to it";
            with_addresses(error.verb(), libc::ENODEV, text, &known_addresses())
        }
        None => error,
    }
}

/// For an address to listen at: the kernel says `EADDRNOTAVAIL` of a port too.
#[cold]
pub(super) fn explain_bind(error: Error, address: SocketAddr) -> Error {
    let (ip, port) = (address.ip(), address.port());
    if error.errno() != libc::EADDRNOTAVAIL {
        return explain(error);
    }
    if ip.is_unspecified() || UdpSocket::bind((ip, 0)).is_ok() {
        let taken =
            if ip.is_unspecified() { "at one of the addresses" } else { "at all addresses" };
        let text = match port {
            0 => "no port is free".to_owned(),
            _ => format!("port {port} is taken: something listens at it {taken} already"),
        };
        return Error::with_text(error.verb(), error.errno(), text, "the port is taken");
    }
    let text = "no RDMA device has the address";
    with_addresses(error.verb(), error.errno(), text, &known_addresses())
}

/// A socket address in C's form.
pub(super) struct RawAddress(libc::sockaddr_storage);

impl From<SocketAddr> for RawAddress {
    fn from(address: SocketAddr) -> Self {
        // SAFETY: the struct has only integers, for which zero is valid.
        let mut raw = Self(unsafe { mem::zeroed() });
        let storage = &raw mut raw.0;
        match address {
            SocketAddr::V4(v4) => {
                let value = libc::sockaddr_in {
                    #[cfg(not(target_os = "linux"))]
                    sin_len: size_of::<libc::sockaddr_in>() as u8,
                    sin_family: libc::AF_INET as libc::sa_family_t,
                    sin_port: v4.port().to_be(),
                    sin_addr: libc::in_addr { s_addr: u32::from(*v4.ip()).to_be() },
                    sin_zero: [0; 8],
                };
                // SAFETY: the storage is ours, large and aligned enough for every address.
                unsafe { storage.cast::<libc::sockaddr_in>().write(value) };
            }
            SocketAddr::V6(v6) => {
                let value = libc::sockaddr_in6 {
                    #[cfg(not(target_os = "linux"))]
                    sin6_len: size_of::<libc::sockaddr_in6>() as u8,
                    sin6_family: libc::AF_INET6 as libc::sa_family_t,
                    sin6_port: v6.port().to_be(),
                    sin6_flowinfo: v6.flowinfo(),
                    sin6_addr: libc::in6_addr { s6_addr: v6.ip().octets() },
                    sin6_scope_id: v6.scope_id(),
                };
                // SAFETY: as above.
                unsafe { storage.cast::<libc::sockaddr_in6>().write(value) };
            }
        }
        raw
    }
}

impl RawAddress {
    /// Some C functions take `*mut`, although they only read.
    pub(super) fn as_mut_ptr(&mut self) -> *mut ffi::sockaddr {
        (&raw mut self.0).cast()
    }
}

/// `None` for other families.
///
/// # Safety
///
/// `raw` points to an address with the length of the family that it names.
pub(super) unsafe fn socket_addr(raw: *const ffi::sockaddr) -> Option<SocketAddr> {
    // SAFETY: the caller vouches for the memory.
    let family = unsafe { (*raw).sa_family };
    match i32::from(family) {
        libc::AF_INET => {
            // SAFETY: the caller vouches for the length of the family; the read is unaligned.
            let raw = unsafe { raw.cast::<libc::sockaddr_in>().read_unaligned() };
            let ip = Ipv4Addr::from(u32::from_be(raw.sin_addr.s_addr));
            Some(SocketAddrV4::new(ip, u16::from_be(raw.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let raw = unsafe { raw.cast::<libc::sockaddr_in6>().read_unaligned() };
            let ip = Ipv6Addr::from(raw.sin6_addr.s6_addr);
            let port = u16::from_be(raw.sin6_port);
            Some(SocketAddrV6::new(ip, port, raw.sin6_flowinfo, raw.sin6_scope_id).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "uses the file system")]
    fn the_addresses_that_devices_have_are_named() {
        let folder = std::env::temp_dir().join(format!("ibverbs-reach-{}", std::process::id()));
        let gids = folder.join("rxe0/ports/1/gids");
        fs::create_dir_all(&gids).unwrap();
        for (index, gid) in [
            ("0", "fe80:0000:0000:0000:5054:00ff:fe77:ff00\n"),
            ("1", "0000:0000:0000:0000:0000:ffff:0a4d:0001\n"),
            ("2", "0000:0000:0000:0000:0000:ffff:0a4d:0001\n"),
            ("3", "2001:0db8:0000:0000:0000:0000:0000:0001\n"),
            ("4", "0000:0000:0000:0000:0000:0000:0000:0000\n"),
        ] {
            fs::write(gids.join(index), gid).unwrap();
        }
        let addresses = addresses(&folder);
        fs::remove_dir_all(folder).unwrap();
        let error = |addresses: &[String]| {
            with_addresses("rdma_bind_addr", libc::EADDRNOTAVAIL, "no device", addresses)
                .to_string()
        };
        let text = "rdma_bind_addr: no device: they have 10.77.0.1 (rxe0), 2001:db8::1 (rxe0)";
        assert_eq!(error(&addresses), text);
        assert!(error(&[]).ends_with(
            "no device, and no device has an IP address (`rdma link` lists the kernel's)"
        ));
    }

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

    #[test]
    fn addresses_go_to_c_and_back() {
        for text in ["10.77.0.1:7471", "0.0.0.0:0", "[fe80::1%3]:65535", "[2001:db8::7]:1"] {
            let address: SocketAddr = text.parse().unwrap();
            let mut raw = RawAddress::from(address);
            // SAFETY: the storage is ours, and holds an address.
            assert_eq!(unsafe { socket_addr(raw.as_mut_ptr()) }, Some(address));
        }
        // SAFETY: the struct has only integers.
        let mut none = RawAddress(unsafe { mem::zeroed() });
        // SAFETY: as above; there is no family 0.
        assert_eq!(unsafe { socket_addr(none.as_mut_ptr()) }, None);
    }

    #[test]
    fn c_has_the_port_and_the_address_in_network_order() {
        let mut raw = RawAddress::from("1.2.3.4:258".parse::<SocketAddr>().unwrap());
        // SAFETY: the storage is larger than this.
        let bytes = unsafe { raw.as_mut_ptr().cast::<[u8; 8]>().read() };
        assert_eq!(bytes[2..], [1, 2, 1, 2, 3, 4]);
    }
}
