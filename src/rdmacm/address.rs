//! IP addresses in C's form.

use std::mem;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};

use crate::ffi;

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
                    #[cfg(target_vendor = "apple")]
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
                    #[cfg(target_vendor = "apple")]
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
    /// `*mut`, because some C functions take that, although they only read.
    pub(super) fn as_mut_ptr(&mut self) -> *mut ffi::sockaddr {
        (&raw mut self.0).cast()
    }
}

/// The IP address at `raw`, if it is one.
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
