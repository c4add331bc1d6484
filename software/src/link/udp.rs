//! An ordinary UDP socket at each of the device's addresses, port 4791. Root is not needed for it, nor
//! any capability.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::io;
use std::mem::{size_of, zeroed};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::neighbours::{Inbox, Place};
use super::{BUFFER_FACTOR, LITTLE_ROOM, Link, MUCH_ROOM, machine, send, unread};
use crate::wire::{PORT, Packet};

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
    interface: u32,
    /// The size of its receive buffer, of which the kernel's own structures take a part.
    buffer: usize,
    /// The kernel cuts a message into datagrams, until it refuses to.
    pub(crate) segments: AtomicBool,
    /// Where other processes of this machine hand over rings.
    pub(super) door: Option<OwnedFd>,
}

impl Socket {
    fn new(address: IpAddr, socket: UdpSocket, interface: u32) -> Self {
        // Without it the kernel cuts them before it hands them over: no error.
        let _ = option(&socket, libc::IPPROTO_UDP, UDP_GRO, 1);
        let buffer = receive_buffer(&socket);
        Self { address, socket, interface, buffer, segments: AtomicBool::new(true), door: None }
    }

    /// Where a packet to this address is sent.
    pub(super) fn destination(&self, to: IpAddr) -> SocketAddr {
        on(to, self.interface)
    }
}

/// The sockets that packets come from; the link adds those of multicast groups.
#[derive(Debug)]
pub(crate) struct Sockets {
    all: Mutex<Vec<Arc<Socket>>>,
    /// Incremented by every change.
    version: AtomicU32,
}

impl Sockets {
    /// The sockets, if they are not those of this version any more, with their version.
    pub(crate) fn newer_than(&self, version: u32) -> Option<(u32, Vec<Arc<Socket>>)> {
        let current = self.version.load(Ordering::Acquire);
        (current != version).then(|| {
            let all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
            (current, all.clone())
        })
    }

    /// Must not be called while a thread receives from one of them: the engine's lock is held here.
    fn change(&self, change: impl FnOnce(&mut Vec<Arc<Socket>>)) {
        change(&mut self.all.lock().unwrap_or_else(PoisonError::into_inner));
        self.version.fetch_add(1, Ordering::Release);
    }
}

/// How many packets may wait for the kernel. More are lost.
const MOST_WAITING: usize = 4096;

#[derive(Debug)]
pub(crate) struct UdpLink {
    place: Place,
    /// Packets that the kernel had no room for. All that go through it wait behind them.
    waiting: VecDeque<Packet>,
    /// One for each address of the device.
    own: Vec<Arc<Socket>>,
    all: Arc<Sockets>,
    /// Wakes the thread that receives.
    wake: Arc<super::udp::Waker>,
}

/// Wakes a thread that sleeps on it and on sockets.
#[derive(Debug)]
pub(crate) struct Waker(OwnedFd);

impl Waker {
    pub(crate) fn new() -> io::Result<Self> {
        use std::os::fd::FromRawFd;
        // SAFETY: a plain system call; what it returns is a new descriptor, ours alone.
        unsafe {
            match libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) {
                -1 => Err(io::Error::last_os_error()),
                fd => Ok(Self(OwnedFd::from_raw_fd(fd))),
            }
        }
    }

    pub(crate) fn wake(&self) {
        let one = 1_u64;
        // SAFETY: eight bytes are written from a live variable.
        unsafe { libc::write(self.fd(), (&raw const one).cast(), 8) };
    }

    pub(crate) fn clear(&self) {
        let mut count = 0_u64;
        // SAFETY: eight bytes are read into a live variable.
        unsafe { libc::read(self.fd(), (&raw mut count).cast(), 8) };
    }

    pub(crate) fn fd(&self) -> c_int {
        self.0.as_raw_fd()
    }
}

fn option(socket: &UdpSocket, level: c_int, name: c_int, value: c_int) -> io::Result<()> {
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
            // The same address may exist on each link; elsewhere, the routes decide.
            let scope = v6.is_unicast_link_local() || v6.is_multicast();
            SocketAddrV6::new(v6, PORT, 0, if scope { interface } else { 0 }).into()
        }
    }
}

/// The index of the interface that has this address, or 0.
fn interface_of(address: Ipv6Addr) -> u32 {
    let mut first = std::ptr::null_mut();
    // SAFETY: the call fills in the pointer to a list, which is followed while it lives; each name is a string.
    unsafe {
        if libc::getifaddrs(&mut first) != 0 {
            return 0;
        }
        let (mut found, mut next) = (0, first);
        while let Some(entry) = next.as_ref() {
            let is_it = entry.ifa_addr.as_ref().is_some_and(|it| {
                c_int::from(it.sa_family) == libc::AF_INET6
                    && (*entry.ifa_addr.cast::<libc::sockaddr_in6>()).sin6_addr.s6_addr
                        == address.octets()
            });
            if is_it {
                found = libc::if_nametoindex(entry.ifa_name);
                break;
            }
            next = entry.ifa_next;
        }
        libc::freeifaddrs(first);
        found
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
    // As much as an ordinary user may have.
    let _ = option(&socket, libc::SOL_SOCKET, libc::SO_RCVBUF, 8 << 20);
    let _ = option(&socket, libc::SOL_SOCKET, libc::SO_SNDBUF, 4 << 20);
    Ok(socket)
}

fn not_available() -> io::Error {
    io::Error::from_raw_os_error(libc::EADDRNOTAVAIL)
}

/// Opens the socket of one of the device's addresses; `through_kernel`: without a door.
fn open_own(address: IpAddr, through_kernel: bool) -> io::Result<Arc<Socket>> {
    let at = |e: io::Error| io::Error::new(e.kind(), format!("{address}: {e}"));
    let interface = match address {
        IpAddr::V4(_) => 0,
        IpAddr::V6(v6) => match interface_of(v6) {
            0 if v6.is_unicast_link_local() => return Err(at(not_available())),
            interface => interface,
        },
    };
    let socket = open(address, interface).map_err(at)?;
    let mut socket = Socket::new(address, socket, interface);
    if !through_kernel {
        socket.door = machine::door(address);
    }
    Ok(Arc::new(socket))
}

impl UdpLink {
    /// `through_kernel`: packets between this and other devices of the machine are sent like all others.
    pub(crate) fn new(addresses: &[IpAddr], through_kernel: bool) -> io::Result<Self> {
        let own = addresses.iter().map(|&address| open_own(address, through_kernel));
        let own = own.collect::<io::Result<Vec<_>>>()?;
        let all = Mutex::new(own.clone());
        let all = Arc::new(Sockets { all, version: AtomicU32::new(1) });
        let wake = Arc::new(Waker::new()?);
        let mut place = Place::new(Arc::new(Inbox::new(wake.clone())), !through_kernel);
        place.set_addresses(addresses);
        Ok(Self { place, waiting: VecDeque::new(), own, all, wake })
    }

    pub(crate) fn inbox(&self) -> Arc<Inbox> {
        self.place.inbox().clone()
    }

    pub(crate) fn sockets(&self) -> Arc<Sockets> {
        self.all.clone()
    }

    #[cfg(test)]
    pub(crate) fn own(&self) -> &[Arc<Socket>] {
        &self.own
    }

    pub(crate) fn waker(&self) -> Arc<Waker> {
        self.wake.clone()
    }
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

impl Link for UdpLink {
    fn send(&mut self, packets: &mut [Packet]) -> bool {
        self.send_rest();
        let mut left = packets;
        while !left.is_empty() {
            let from = left[0].addresses.map(|addresses| addresses.0);
            // Consecutive packets that leave by the same socket, or go to the same neighbour.
            let mut run = left.iter().take_while(|p| p.addresses.map(|a| a.0) == from).count();
            let socket = self.own.iter().find(|socket| Some(socket.address) == from);
            if let Some(socket) = socket {
                let is_sent;
                (run, is_sent) = self.place.send_some(&mut left[..run]);
                if !is_sent {
                    let some = &mut left[..run];
                    let sent = if self.waiting.is_empty() { send::send(socket, some) } else { 0 };
                    let room = MOST_WAITING - self.waiting.len();
                    self.waiting.extend(some[sent..].iter_mut().take(room).map(std::mem::take));
                }
            }
            left = &mut left[run..];
        }
        self.waiting.is_empty()
    }

    fn send_rest(&mut self) -> bool {
        while let Some(first) = self.waiting.front() {
            let from = first.addresses.map(|addresses| addresses.0);
            let socket = self.own.iter().find(|socket| Some(socket.address) == from);
            let packets = self.waiting.as_mut_slices().0;
            let run = packets.iter().take_while(|p| p.addresses.map(|a| a.0) == from).count();
            // The device may have given the address up.
            let sent = socket.map_or(run, |socket| send::send(socket, &mut packets[..run]));
            self.waiting.drain(..sent);
            if sent < run {
                return false;
            }
        }
        true
    }

    fn drop_rest(&mut self, from: &[IpAddr]) {
        self.waiting.retain(|packet| packet.addresses.is_none_or(|(own, _)| !from.contains(&own)));
    }

    fn room(&mut self, from: IpAddr, to: IpAddr) -> usize {
        if self.place.is_near(from, to) {
            return MUCH_ROOM;
        }
        // The other socket of this machine is taken to have a buffer like ours.
        let own = self.own.iter().find(|own| own.address == from && to.is_loopback());
        let buffer = own.map_or(0, |own| own.buffer);
        (buffer / BUFFER_FACTOR).clamp(LITTLE_ROOM, MUCH_ROOM)
    }

    fn is_unread(&mut self, from: IpAddr, to: IpAddr) -> bool {
        self.place.is_unread(from, to).unwrap_or_else(|| unread::is_unread(to))
    }

    fn join(&mut self, group: IpAddr) -> io::Result<()> {
        let of_family = |own: &&Arc<Socket>| own.address.is_ipv4() == group.is_ipv4();
        let own = self.own.iter().find(of_family).ok_or_else(not_available)?;
        let socket = Arc::new(Socket::new(group, open_group(group, own)?, own.interface));
        self.all.change(|all| all.push(socket));
        self.wake.wake();
        Ok(())
    }

    fn leave(&mut self, group: IpAddr) {
        self.all.change(|all| all.retain(|socket| socket.address != group));
        self.wake.wake();
    }

    fn set_addresses(&mut self, addresses: &[IpAddr]) -> io::Result<()> {
        let socket =
            |&address: &IpAddr| match self.own.iter().find(|socket| socket.address == address) {
                Some(socket) => Ok(socket.clone()),
                None => open_own(address, self.place.is_alone()),
            };
        let own = addresses.iter().map(socket).collect::<io::Result<Vec<_>>>()?;
        self.all.change(|all| {
            all.retain(|socket| socket.address.is_multicast());
            all.extend(own.iter().cloned());
        });
        self.own = own;
        self.place.set_addresses(addresses);
        self.wake.wake();
        Ok(())
    }
}

/// A socket for packets to a group, from where the device has its own address; other devices of the machine can open
/// one at the same address.
fn open_group(group: IpAddr, own: &Socket) -> io::Result<UdpSocket> {
    use std::os::fd::FromRawFd;
    let family = if group.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
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
        let size = write_address(own.destination(group), &mut address);
        if libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    match (group, own.address) {
        (IpAddr::V4(group), IpAddr::V4(own)) => socket.join_multicast_v4(&group, &own)?,
        (IpAddr::V6(group), _) => {
            option(&socket, libc::IPPROTO_UDP, UDP_NO_CHECK6_RX, 1)?;
            socket.join_multicast_v6(&group, own.interface)?;
        }
        (IpAddr::V4(_), IpAddr::V6(_)) => return Err(not_available()),
    }
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Duration;

    use super::*;
    use crate::device::Device;
    use crate::files::{wait, wait_for};
    use crate::link::receive::Receiver;
    use crate::link::{STARTS_PROCESSES, own_address};

    fn packet(from: IpAddr, to: IpAddr, number: u16) -> Packet {
        let mut bytes = vec![0; 1000];
        bytes[..2].copy_from_slice(&number.to_ne_bytes());
        Packet { addresses: Some((from, to)), bytes }
    }

    #[test]
    fn who_leaves_a_group_keeps_its_own_addresses() {
        let (own, group) = (own_address(41), IpAddr::from([239, 1, 2, 3]));
        let mut link = UdpLink::new(&[own], true).unwrap();
        let sockets = link.sockets();
        let addresses = || {
            let (_, all) = sockets.newer_than(0).unwrap();
            all.iter().map(|socket| socket.address).collect::<Vec<_>>()
        };
        link.join(group).unwrap();
        assert_eq!(addresses(), [own, group]);
        link.leave(group);
        assert_eq!(addresses(), [own]);
    }

    /// Lets the loopback interface send a packet each second, or all at once. Returns whether that worked.
    fn limit(action: &str, rate: &str) -> bool {
        let command = format!(
            "PATH=$PATH:/usr/sbin:/sbin; ip link set lo up &&
                tc qdisc {action} dev lo root tbf rate {rate} limit 100000000"
        );
        let _alone = STARTS_PROCESSES.write().unwrap_or_else(PoisonError::into_inner);
        Command::new("sh").args(["-c", &command]).status().unwrap().success()
    }

    const STOPPED: &str = "8kbit burst 2000";

    /// An ordinary loopback interface takes everything at once. So this test has one of its own that stops.
    #[test]
    fn packets_wait_until_the_kernel_has_room() {
        // A thread of its own, which alone is in the new namespace.
        let thread = std::thread::spawn(|| {
            // SAFETY: a plain system call.
            if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
                eprintln!("NOT CHECKED: only root can make a network interface");
            } else if !limit("add", STOPPED) {
                eprintln!("NOT CHECKED: it takes the command tc, and the kernel's sch_tbf");
            } else {
                on_a_network_that_stops();
            }
        });
        thread.join().unwrap();
    }

    fn on_a_network_that_stops() {
        let (from, to) = (own_address(9), own_address(10));
        let mut link = UdpLink::new(&[from], true).unwrap();
        let other = UdpLink::new(&[to], true).unwrap();
        option(&link.own[0].socket, libc::SOL_SOCKET, libc::SO_SNDBUF, 20_000).unwrap();
        let mut packets: Vec<_> = (0..200).map(|number| packet(from, to, number)).collect();
        assert!(!link.send(&mut packets[..150]), "the socket's buffer is too small for that");
        assert!(!link.send(&mut packets[150..]), "nothing overtakes them");
        assert!(!link.send_rest());
        assert!(link.waiting.len() > 50);

        // Most are lost now, and memory is bounded.
        for _ in 0..100 {
            let mut packets: Vec<_> = (0..64).map(|_| packet(from, to, 200)).collect();
            assert!(!link.send(&mut packets));
        }
        assert_eq!(link.waiting.len(), MOST_WAITING);
        link.waiting.truncate(200);

        assert!(limit("change", "8gbit burst 1000000"));
        let mut receiver = Receiver::new(other.sockets(), other.inbox()).unwrap();
        let mut numbers = Vec::new();
        for _ in 0..10_000 {
            if numbers.last() == Some(&199) {
                break;
            }
            link.send_rest();
            wait(&mut [wait_for(other.own[0].socket.as_raw_fd())], Some(Duration::from_millis(1)));
            receiver.receive(|_, _, bytes| {
                let number = u16::from_ne_bytes(bytes[..2].try_into().unwrap());
                numbers.extend((number < 200).then_some(number));
            });
        }
        assert!(numbers.iter().copied().eq(0..200), "{numbers:?}");

        // The rest is not sent if its port goes down, nor from an address that the device has no more.
        assert!(limit("change", STOPPED));
        let fill = |link: &mut dyn Link| {
            let full = (0..1000).any(|_| {
                let packets = (0..200).map(|number| packet(from, to, number));
                !link.send(&mut packets.collect::<Vec<_>>())
            });
            assert!(full && !link.send_rest());
        };
        fill(&mut link);
        link.drop_rest(&[to]);
        assert!(!link.waiting.is_empty(), "those of another port stay");
        link.drop_rest(&[from]);
        assert!(link.waiting.is_empty());
        fill(&mut link);
        link.set_addresses(&[own_address(11)]).unwrap();
        assert!(link.send_rest() && link.waiting.is_empty());

        drop(link);
        let device = || Device::builder().address(from).through_kernel(true).build().unwrap();
        let ends: [fn(&Device); 2] =
            [|device| device.set_port_active(1, false).unwrap(), Device::remove];
        for end in ends {
            let device = device();
            fill(device.lock().core.link());
            end(&device);
            assert!(device.lock().core.link().send_rest(), "nothing is left");
        }
    }
}
