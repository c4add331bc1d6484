//! A UDP socket with the options that RoCE needs, and addresses as C has them.

use std::ffi::c_int;
use std::io;
use std::mem::{size_of, zeroed};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, SocketAddrV6, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::interfaces::interface_of;
use super::same_host::{self, Listener};
use crate::causes::explained;
use crate::wire::PORT;

// Missing in some C libraries' headers.
/// Accepts IPv6 datagrams without a checksum.
const UDP_NO_CHECK6_RX: c_int = 102;
/// Accepts several datagrams of one length as one message, with their length beside it.
pub(crate) const UDP_GRO: c_int = 104;

/// A socket, and the address that its packets are sent to.
#[derive(Debug)]
pub(crate) struct Socket {
    pub(crate) address: IpAddr,
    pub(crate) socket: UdpSocket,
    pub(super) interface: u32,
    /// The size of its receive buffer, of which the kernel's own structures take a part.
    pub(super) buffer: usize,
    /// The kernel cuts a message into datagrams, until it refuses to.
    pub(crate) segments: AtomicBool,
    /// Where other processes of this machine hand over rings.
    pub(super) listener: Option<Arc<Listener>>,
    /// Without a listener: nobody else can listen there.
    _name: Option<OwnedFd>,
}

impl Socket {
    pub(super) fn new(address: IpAddr, socket: UdpSocket, interface: u32) -> Self {
        // Without it the kernel cuts them before it hands them over: no error.
        let _ = option(&socket, libc::IPPROTO_UDP, UDP_GRO, 1);
        let buffer = receive_buffer(&socket);
        let segments = AtomicBool::new(true);
        Self { address, socket, interface, buffer, segments, listener: None, _name: None }
    }

    /// Where a packet to this address is sent.
    pub(super) fn destination(&self, to: IpAddr) -> SocketAddr {
        on(on_network(self.address, to), self.interface)
    }
}

/// The address that the network sees of a destination. Devices with addresses of IPv4 reach those that are in a group of IPv6
/// by a group of IPv4. Two groups may share it: the CRC tells them apart, as it covers the group's own address.
pub(super) fn on_network(from: IpAddr, to: IpAddr) -> IpAddr {
    match (from, to) {
        (IpAddr::V4(_), IpAddr::V6(group)) if group.is_multicast() => {
            let [_, b, c, d] = crc32fast::hash(&group.octets()).to_be_bytes();
            IpAddr::from([239, b, c, d])
        }
        _ => to,
    }
}

pub(super) fn option(
    socket: &UdpSocket,
    level: c_int,
    name: c_int,
    value: c_int,
) -> io::Result<()> {
    let size = size_of::<c_int>() as libc::socklen_t;
    // SAFETY: the value is a live integer of that size.
    let returned = unsafe {
        libc::setsockopt(socket.as_raw_fd(), level, name, (&raw const value).cast(), size)
    };
    if returned == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn receive_buffer(socket: &UdpSocket) -> usize {
    let (mut value, mut size): (c_int, _) = (0, size_of::<c_int>() as libc::socklen_t);
    // SAFETY: the value is a live integer of that size.
    let returned = unsafe {
        let to = (&raw mut value).cast();
        libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, to, &mut size)
    };
    if returned == 0 { usize::try_from(value).unwrap_or(0) } else { 0 }
}

/// The socket address of an address and RoCE's port. On IPv6, one interface is meant.
fn on(address: IpAddr, interface: u32) -> SocketAddr {
    match address {
        IpAddr::V4(v4) => SocketAddrV4::new(v4, PORT).into(),
        IpAddr::V6(v6) => {
            // Each link may have this address; elsewhere, the routes decide.
            let scope = v6.is_unicast_link_local() || v6.is_multicast();
            SocketAddrV6::new(v6, PORT, 0, if scope { interface } else { 0 }).into()
        }
    }
}

/// Creates a socket with the options that RoCE needs.
fn open(address: IpAddr, interface: u32) -> io::Result<UdpSocket> {
    let socket = UdpSocket::bind(on(address, interface))?;
    // Never fragmented, and with identification 0: the invariant CRC covers both.
    let (level, discover, how) = if address.is_ipv4() {
        (libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO)
    } else {
        (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DO)
    };
    option(&socket, level, discover, how)?;
    if address.is_ipv6() {
        // RoCE devices send UDP without a checksum.
        option(&socket, libc::IPPROTO_UDP, UDP_NO_CHECK6_RX, 1)?;
    }
    // Multicast leaves by the device's own address; if no interface has that, by the routes.
    let (level, name, value) = match address {
        IpAddr::V4(v4) => {
            (libc::IPPROTO_IP, libc::IP_MULTICAST_IF, c_int::from_ne_bytes(v4.octets()))
        }
        IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_IF, interface as c_int),
    };
    let _ = option(&socket, level, name, value);
    // An ordinary user may have at most this much.
    let _ = option(&socket, libc::SOL_SOCKET, libc::SO_RCVBUF, 8 << 20);
    let _ = option(&socket, libc::SOL_SOCKET, libc::SO_SNDBUF, 4 << 20);
    Ok(socket)
}

pub(super) fn not_available() -> io::Error {
    io::Error::from_raw_os_error(libc::EADDRNOTAVAIL)
}

/// Opens the socket of one of the device's addresses; `through_kernel`: without a listener.
pub(super) fn open_own(address: IpAddr, through_kernel: bool) -> io::Result<Arc<Socket>> {
    let at = |e: io::Error| explained(address, &e);
    let interface = match address {
        IpAddr::V4(_) => 0,
        IpAddr::V6(v6) => match interface_of(address) {
            0 if v6.is_unicast_link_local() => return Err(at(not_available())),
            interface => interface,
        },
    };
    let socket = open(address, interface).map_err(at)?;
    let mut socket = Socket::new(address, socket, interface);
    if through_kernel {
        socket._name = same_host::reserve(address).map_err(at)?;
    } else {
        socket.listener = same_host::listener(address).map_err(at)?.map(Arc::new);
    }
    Ok(Arc::new(socket))
}

/// A socket for packets to a group, from where the device has its own address; other devices of the machine can open
/// one at the same address.
pub(super) fn open_group(group: IpAddr, own: &Socket) -> io::Result<UdpSocket> {
    use std::os::fd::FromRawFd;
    let to = own.destination(group);
    let family = if to.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    // SAFETY: a plain system call; what it returns is a new descriptor, ours alone.
    let socket = unsafe {
        match libc::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) {
            -1 => return Err(io::Error::last_os_error()),
            fd => UdpSocket::from_raw_fd(fd),
        }
    };
    option(&socket, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
    // SAFETY: all zeros is a valid address structure; the calls get its true size.
    unsafe {
        let mut address: libc::sockaddr_storage = zeroed();
        let size = write_address(to, &mut address);
        if libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    match (to.ip(), own.address) {
        (IpAddr::V4(group), IpAddr::V4(own)) => socket.join_multicast_v4(&group, &own)?,
        (IpAddr::V6(group), _) => {
            option(&socket, libc::IPPROTO_UDP, UDP_NO_CHECK6_RX, 1)?;
            socket.join_multicast_v6(&group, own.interface)?;
        }
        (IpAddr::V4(_), IpAddr::V6(_)) => return Err(not_available()),
    }
    Ok(socket)
}

/// A socket address as C has it.
pub(crate) fn write_address(
    address: SocketAddr,
    to: &mut libc::sockaddr_storage,
) -> libc::socklen_t {
    let to: *mut libc::sockaddr_storage = to;
    match address {
        SocketAddr::V4(v4) => {
            let to = to.cast::<libc::sockaddr_in>();
            // SAFETY: the storage has room for, and the alignment of, every kind of address.
            unsafe {
                (*to).sin_family = libc::AF_INET as _;
                (*to).sin_port = v4.port().to_be();
                (*to).sin_addr.s_addr = u32::from_ne_bytes(v4.ip().octets());
            }
            size_of::<libc::sockaddr_in>() as _
        }
        SocketAddr::V6(v6) => {
            let to = to.cast::<libc::sockaddr_in6>();
            // SAFETY: as above.
            unsafe {
                (*to).sin6_family = libc::AF_INET6 as _;
                (*to).sin6_port = v6.port().to_be();
                (*to).sin6_addr.s6_addr = v6.ip().octets();
                (*to).sin6_scope_id = v6.scope_id();
            }
            size_of::<libc::sockaddr_in6>() as _
        }
    }
}

pub(crate) fn read_address(from: &libc::sockaddr_storage) -> Option<SocketAddr> {
    let raw: *const libc::sockaddr_storage = from;
    match c_int::from(from.ss_family) {
        libc::AF_INET => {
            // SAFETY: the family says what it is.
            let v4 = unsafe { &*raw.cast::<libc::sockaddr_in>() };
            let ip = Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes());
            Some(SocketAddr::new(ip.into(), u16::from_be(v4.sin_port)))
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let v6 = unsafe { &*raw.cast::<libc::sockaddr_in6>() };
            let ip = IpAddr::from(v6.sin6_addr.s6_addr);
            Some(SocketAddr::new(ip, u16::from_be(v6.sin6_port)))
        }
        _ => None,
    }
}
