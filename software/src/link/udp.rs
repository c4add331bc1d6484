//! An ordinary UDP socket at each of the device's addresses, port 4791. Root is not needed for it, nor
//! any capability.

use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::neighbours::{Inbox, Place};
use super::same_host::let_in;
use super::socket::{Socket, not_available, on_network, open_group, open_own};
use super::{BUFFER_FACTOR, DirectAccess, LITTLE_ROOM, Link, MUCH_ROOM, OneSided, send, unread};
use crate::files::{WakeFd, Waker};
use crate::wire::Packet;

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
    /// Wakes the device's thread.
    wake: Arc<Waker>,
    direct_access: Option<Arc<DirectAccess>>,
}

impl UdpLink {
    /// `through_kernel`: packets between this and other devices of the machine are sent like all others.
    pub(crate) fn new(addresses: &[IpAddr], through_kernel: bool) -> io::Result<Self> {
        let own = addresses.iter().map(|&address| open_own(address, through_kernel));
        let own = own.collect::<io::Result<Vec<_>>>()?;
        let all = Mutex::new(own.clone());
        let all = Arc::new(Sockets { all, version: AtomicU32::new(1) });
        let wake = Arc::new(Waker::new()?);
        let wake_fd = Arc::new(WakeFd::new()?);
        let mut place = Place::new(Arc::new(Inbox::new(wake_fd)), !through_kernel);
        place.set_sockets(&own);
        Ok(Self { place, waiting: VecDeque::new(), own, all, wake, direct_access: None })
    }

    /// Lets processes of the user into this one's memory, and goes into theirs.
    pub(crate) fn open_direct_access(&mut self) -> io::Result<()> {
        if !self.place.is_alone() {
            let_in();
            self.direct_access = Some(DirectAccess::new()?);
        }
        Ok(())
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

impl Link for UdpLink {
    /// Packets that stay in this machine's memory need no CRC.
    fn seals(&self) -> bool {
        true
    }

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
                self.waiting.extend(self.place.take_refused());
                if !is_sent {
                    let some = &mut left[..run];
                    some.iter_mut().for_each(Packet::seal);
                    let sent = if self.waiting.is_empty() { send::send(socket, some) } else { 0 };
                    let room = MOST_WAITING.saturating_sub(self.waiting.len());
                    self.waiting.extend(some[sent..].iter_mut().take(room).map(std::mem::take));
                }
            }
            left = &mut left[run..];
        }
        self.waiting.is_empty() && self.place.is_done()
    }

    fn send_rest(&mut self) -> bool {
        let is_done = self.place.send_rest();
        self.waiting.extend(self.place.take_refused());
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
        is_done
    }

    fn lose_peer(&mut self, peer: IpAddr) {
        self.place.lose_peer(peer);
    }

    fn is_full(&mut self, from: IpAddr, to: IpAddr) -> bool {
        self.place.is_full(from, to) || !self.waiting.is_empty() && !self.place.is_near(from, to)
    }

    fn drop_rest(&mut self, from: &[IpAddr]) {
        self.place.drop_rest(from);
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
        self.place.is_unread(from, to).unwrap_or_else(|| unread::is_unread(on_network(from, to)))
    }

    fn direct_access(&self) -> Option<Arc<DirectAccess>> {
        self.direct_access.clone()
    }

    unsafe fn carry_out(&mut self, to: IpAddr, request: &OneSided, local: &[libc::iovec]) -> bool {
        // The device may have given the address up.
        let has = self.own.iter().any(|own| own.address == request.from.0);
        // SAFETY: as the caller says.
        self.direct_access.is_some() && has && unsafe { self.place.carry_out(to, request, local) }
    }

    fn join(&mut self, group: IpAddr) -> io::Result<()> {
        let of_family = |is_ipv4| self.own.iter().find(|own| own.address.is_ipv4() == is_ipv4);
        // A packet to a group of IPv6 comes from addresses of both families.
        let v6 = if group.is_ipv6() { of_family(false) } else { None };
        let socket = |own: &Arc<Socket>| {
            Ok(Arc::new(Socket::new(group, open_group(group, own)?, own.interface)))
        };
        let sockets = v6.into_iter().chain(of_family(true)).map(socket);
        let sockets = sockets.collect::<io::Result<Vec<_>>>()?;
        if sockets.is_empty() {
            return Err(not_available());
        }
        self.all.change(|all| all.extend(sockets));
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
        self.place.set_sockets(&self.own);
        self.wake.wake();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::process::Command;
    use std::time::Duration;

    use super::*;
    use crate::device::Device;
    use crate::files::{wait, wait_for};
    use crate::link::receive::Receiver;
    use crate::link::socket::option;
    use crate::link::{no_process_starts, own_address, process_starts};
    use crate::wire::{PORT, icrc};

    fn packet(from: IpAddr, to: IpAddr, number: u16) -> Packet {
        let mut bytes = vec![0; 1000];
        bytes[..2].copy_from_slice(&number.to_ne_bytes());
        Packet { addresses: Some((from, to)), bytes, is_sealed: true, identification: 0 }
    }

    /// Packets that stay in this machine's memory need no CRC.
    #[test]
    fn packets_that_leave_through_the_kernel_are_sealed() {
        let _files = no_process_starts(); // the addresses are used twice
        let (from, to) = (own_address(43), own_address(44));
        for through_kernel in [false, true] {
            let mut link = UdpLink::new(&[from], through_kernel).unwrap();
            let other = UdpLink::new(&[to], through_kernel).unwrap();
            let mut receiver = Receiver::new(other.sockets(), other.inbox()).unwrap();
            let mut unsealed = Packet { is_sealed: false, ..packet(from, to, 7) };
            unsealed.bytes[996..].fill(0);
            assert!(link.seals() && link.send(&mut [unsealed]));
            let mut crc = None;
            while crc.is_none() {
                wait(
                    &mut [wait_for(other.own[0].socket.as_raw_fd())],
                    Some(Duration::from_millis(1)),
                );
                receiver.receive(|source, _, bytes| {
                    assert_eq!(source.is_sealed, through_kernel);
                    let (inside, found) = bytes.split_last_chunk().unwrap();
                    crc = Some(u32::from_le_bytes(*found));
                    let right = icrc::compute((from, PORT), (to, PORT), inside);
                    assert_eq!(crc, Some(if through_kernel { right } else { 0 }));
                });
            }
        }
    }

    #[test]
    fn who_leaves_a_group_keeps_its_own_addresses() {
        let (v4, v6) = (own_address(41), "::1".parse().unwrap());
        let groups: [IpAddr; 2] = [[239, 1, 2, 3].into(), "ff0e::1".parse().unwrap()];
        for own in [&[v4][..], &[v4, v6]] {
            let Ok(mut link) = UdpLink::new(own, true) else {
                assert_eq!(own.len(), 2);
                eprintln!("NOT CHECKED: no IPv6, or another test of this machine has ::1");
                continue;
            };
            let sockets = link.sockets();
            let addresses = || {
                let (_, all) = sockets.newer_than(0).unwrap();
                all.iter().map(|socket| socket.address).collect::<Vec<_>>()
            };
            // In a group of IPv6, what comes from each family is received.
            for (group, times) in [(groups[0], 1), (groups[1], own.len())] {
                link.join(group).unwrap();
                assert_eq!(addresses(), [own, &vec![group; times]].concat());
                link.leave(group);
                assert_eq!(addresses(), own);
            }
        }
    }

    /// The address of a peer that is no group has nothing to do with any group.
    #[test]
    fn only_groups_of_ipv6_have_one_of_ipv4_that_stands_for_them() {
        let (own, peer) = (own_address(40), "fd00::1".parse().unwrap());
        assert_eq!(on_network(own, peer), peer);
        let group = on_network(own, "ff0e::1".parse().unwrap());
        assert!(group.is_ipv4() && group.is_multicast() && on_network(own, group) == group);
        assert_eq!(
            on_network(peer, "ff0e::1".parse().unwrap()),
            "ff0e::1".parse::<IpAddr>().unwrap()
        );
    }

    /// Lets the loopback interface send a packet each second, or all at once. Returns whether that worked.
    fn limit(action: &str, rate: &str) -> bool {
        let command = format!(
            "PATH=$PATH:/usr/sbin:/sbin; ip link set lo up &&
                tc qdisc {action} dev lo root tbf rate {rate} limit 100000000"
        );
        let _alone = process_starts();
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
                stay_on_this_processor();
                on_a_network_that_stops();
            }
        });
        thread.join().unwrap();
    }

    /// The loopback interface has a queue for each processor: what is sent from two of them may arrive in another order.
    fn stay_on_this_processor() {
        // SAFETY: the set is plain data of that size, and has a bit for the number.
        unsafe {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            let size = size_of_val(&set);
            assert_eq!(libc::sched_getaffinity(0, size, &mut set), 0);
            let is_ours = |&number: &usize| libc::CPU_ISSET(number, &set);
            let first = (0..libc::CPU_SETSIZE as usize).find(is_ours).expect("it runs on one");
            let mut one: libc::cpu_set_t = std::mem::zeroed();
            libc::CPU_SET(first, &mut one);
            assert_eq!(libc::sched_setaffinity(0, size, &one), 0);
        }
    }

    fn on_a_network_that_stops() {
        let (from, to) = (own_address(14), own_address(15));
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
        link.set_addresses(&[own_address(16)]).unwrap();
        assert!(link.send_rest() && link.waiting.is_empty());

        let _files = no_process_starts();
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
