//! The addresses of the machine's interfaces: listed once, and again when the kernel tells of a change.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_int};
use std::io;
use std::mem::size_of;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use super::namespace::{Namespace, namespace};

// Missing in some C libraries' headers.
const RTMGRP_LINK: u32 = 1;
const RTMGRP_IPV4_IFADDR: u32 = 0x10;
const RTMGRP_IPV6_IFADDR: u32 = 0x100;

/// The index of each address's interface.
type Indices = BTreeMap<IpAddr, u32>;

/// The listed interfaces, and the socket by which the kernel tells of changes since then.
struct Cache {
    process: u32,
    namespace: Namespace,
    changes: OwnedFd,
    indices: Indices,
}

static CACHE: Mutex<Option<Cache>> = Mutex::new(None);

/// The index of the interface that has this address, or 0. All of 127.0.0.0/8 is the loopback interface's.
pub(crate) fn interface_of(address: IpAddr) -> u32 {
    let mut cache = CACHE.lock().unwrap_or_else(PoisonError::into_inner);
    let here = (std::process::id(), namespace());
    // A child of `fork` must not read what its parent is told.
    if cache.as_ref().is_some_and(|it| (it.process, Some(it.namespace)) != here) {
        *cache = None;
    }
    match &mut *cache {
        Some(cache) => {
            if has_changed(&cache.changes) {
                cache.indices = list();
            }
            find(&cache.indices, address)
        }
        None => {
            // Before the list: what changes meanwhile is told.
            let changes = subscribe();
            let indices = list();
            let found = find(&indices, address);
            if let (Ok(changes), (process, Some(namespace))) = (changes, here) {
                *cache = Some(Cache { process, namespace, changes, indices });
            }
            found
        }
    }
}

fn find(indices: &Indices, address: IpAddr) -> u32 {
    let near = |it: &IpAddr| it.is_ipv4() && it.is_loopback();
    let loopback = || indices.iter().find(|(it, _)| near(it) && near(&address));
    indices.get(&address).or_else(|| loopback().map(|(_, index)| index)).copied().unwrap_or(0)
}

/// A socket that is told of changes of interfaces and their addresses.
fn subscribe() -> io::Result<OwnedFd> {
    // SAFETY: all zeros is a valid address; otherwise plain system calls. What the first returns is a new descriptor, ours alone.
    unsafe {
        let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let fd = libc::socket(libc::AF_NETLINK, kind, libc::NETLINK_ROUTE);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        let socket = OwnedFd::from_raw_fd(fd);
        let mut groups: libc::sockaddr_nl = std::mem::zeroed();
        groups.nl_family = libc::AF_NETLINK as _;
        groups.nl_groups = RTMGRP_LINK | RTMGRP_IPV4_IFADDR | RTMGRP_IPV6_IFADDR;
        let size = size_of::<libc::sockaddr_nl>() as libc::socklen_t;
        match libc::bind(fd, (&raw const groups).cast(), size) {
            0 => Ok(socket),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Whether something was told since the last call. Too much to keep it counts as well.
fn has_changed(changes: &OwnedFd) -> bool {
    let mut has_changed = false;
    loop {
        let mut first = 0_u8;
        // SAFETY: at most one byte is written to a live variable; the rest of a message is dropped.
        let received = unsafe {
            libc::recv(changes.as_raw_fd(), (&raw mut first).cast(), 1, libc::MSG_DONTWAIT)
        };
        if received < 0 && io::Error::last_os_error().kind() == io::ErrorKind::WouldBlock {
            return has_changed;
        }
        has_changed = true;
        if received == 0 {
            return true;
        }
    }
}

fn list() -> Indices {
    let (mut indices, mut first) = (Indices::new(), std::ptr::null_mut());
    let mut last: Option<(&CStr, u32)> = None;
    // SAFETY: the call fills in the pointer to a list, which is followed while it lives; each name is a string, and the
    // family says what an address is.
    unsafe {
        if libc::getifaddrs(&mut first) != 0 {
            return indices;
        }
        let mut next = first;
        while let Some(entry) = next.as_ref() {
            next = entry.ifa_next;
            let family = entry.ifa_addr.as_ref().map(|it| c_int::from(it.sa_family));
            let address = match family {
                Some(libc::AF_INET) => {
                    let v4 = &*entry.ifa_addr.cast::<libc::sockaddr_in>();
                    IpAddr::from(v4.sin_addr.s_addr.to_ne_bytes())
                }
                Some(libc::AF_INET6) => {
                    let v6 = &*entry.ifa_addr.cast::<libc::sockaddr_in6>();
                    IpAddr::from(v6.sin6_addr.s6_addr)
                }
                _ => continue,
            };
            let name = CStr::from_ptr(entry.ifa_name);
            let index = match last {
                Some((before, index)) if before == name => index,
                _ => libc::if_nametoindex(entry.ifa_name),
            };
            last = Some((name, index));
            // The first of several interfaces with one address.
            indices.entry(address).or_insert(index);
        }
        libc::freeifaddrs(first);
    }
    indices
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_loopback_address_is_of_the_loopback_interface() {
        // SAFETY: the name is a string.
        let lo = unsafe { libc::if_nametoindex(c"lo".as_ptr()) };
        for address in ["127.0.0.1", "127.7.7.7", "::1"] {
            if std::net::UdpSocket::bind((address, 0)).is_err() {
                eprintln!("NOT CHECKED: this machine has no {address}");
                continue;
            }
            for _ in 0..2 {
                assert_eq!(interface_of(address.parse().unwrap()), lo, "{address}");
            }
        }
        assert_eq!(interface_of("192.0.2.77".parse().unwrap()), 0);
    }

    /// In a network namespace of its own, a thread sees addresses come and go at once.
    #[test]
    fn changes_are_seen() {
        let changed = std::thread::spawn(|| {
            // SAFETY: it concerns this thread alone.
            if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
                eprintln!("NOT CHECKED: only root can make a network namespace");
                return;
            }
            let ip = |arguments: &str| {
                let _alone = crate::link::process_starts();
                let mut ip = std::process::Command::new("ip");
                assert!(ip.args(arguments.split(' ')).status().unwrap().success(), "{arguments}");
            };
            let address: IpAddr = "192.0.2.77".parse().unwrap();
            for _ in 0..3 {
                assert_eq!(interface_of(address), 0);
                ip("address add 192.0.2.77/32 dev lo");
                assert_eq!(interface_of(address), 1);
                ip("address del 192.0.2.77/32 dev lo");
            }
            assert_eq!(interface_of(address), 0);
        });
        changed.join().unwrap();
    }
}
