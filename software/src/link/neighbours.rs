//! Packets between devices of one process, which do not pass through the kernel.
//!
//! Each device has an inbox. A device that sends a packet to an address of this process puts it there, as the
//! kernel puts it into a socket's buffer: behind those that are there, and if there is no room, the packet is lost.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, TryLockError, TryLockResult};
use std::time::Duration;

use super::OneSided;
use super::namespace::{Namespace, namespace};
use super::same_host::Senders;
use super::socket::Socket;
use crate::files::WakeFd;
use crate::wire::Packet;

/// How many packets may wait for a device.
const ROOM: usize = 4096;

/// How many unused buffers an inbox keeps.
const SPARE: usize = 256;

/// The packets that wait for a device.
#[derive(Debug)]
pub(crate) struct Inbox {
    contents: Mutex<Contents>,
    /// Wakes the thread that waits for packets.
    wake_fd: Arc<WakeFd>,
    /// Someone has asked to be woken for the next packet.
    is_rung: AtomicBool,
    /// There may be packets, as far as a thread knows that does not lock.
    has_some: AtomicBool,
}

#[derive(Debug, Default)]
struct Contents {
    waiting: VecDeque<Packet>,
    /// Buffers of packets that were received, for those that come.
    spare: Vec<Vec<u8>>,
}

impl Inbox {
    pub(super) fn new(wake_fd: Arc<WakeFd>) -> Self {
        Self {
            contents: Mutex::default(),
            wake_fd,
            is_rung: AtomicBool::new(false),
            has_some: AtomicBool::new(false),
        }
    }

    pub(crate) fn wake_fd(&self) -> &Arc<WakeFd> {
        &self.wake_fd
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the bytes of the packets, and leaves other buffers in their place.
    fn put(&self, packets: &mut [Packet]) {
        {
            let mut contents = self.contents();
            self.has_some.store(true, Ordering::Relaxed);
            let Contents { waiting, spare } = &mut *contents;
            let room = ROOM - waiting.len();
            for packet in packets.iter_mut().take(room) {
                let other = spare.pop().unwrap_or_default();
                let bytes = std::mem::replace(&mut packet.bytes, other);
                waiting.push_back(Packet { bytes, ..*packet });
            }
        }
        // A thread that asks to be woken looks here afterwards: either it finds the packets, or this wakes it.
        if self.is_rung.load(Ordering::Relaxed) && self.is_rung.swap(false, Ordering::Relaxed) {
            self.wake_fd.wake();
        }
    }

    /// Whether the next packet wakes the thread that waits.
    pub(crate) fn is_rung(&self) -> bool {
        self.is_rung.load(Ordering::Relaxed)
    }

    /// Asks to be woken for the next packet. Returns false if there are packets already.
    pub(crate) fn may_sleep(&self) -> bool {
        self.is_rung.store(true, Ordering::Relaxed);
        self.is_empty()
    }

    /// Whether senders should hold back: what finds no room is lost.
    fn is_full(&self) -> bool {
        self.contents().waiting.len() >= ROOM / 2
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.contents().waiting.is_empty()
    }

    /// Moves all packets to `to`, which is empty.
    pub(super) fn take(&self, to: &mut VecDeque<Packet>) {
        if self.has_some.load(Ordering::Relaxed) {
            let mut contents = self.contents();
            self.has_some.store(false, Ordering::Relaxed);
            std::mem::swap(&mut contents.waiting, to);
        }
    }

    /// Takes the buffers of packets back, as far as it needs them.
    pub(super) fn give_back(&self, packets: &mut VecDeque<Packet>) {
        let mut contents = self.contents();
        let free = SPARE - contents.spare.len();
        contents.spare.extend(packets.drain(..).map(|packet| packet.bytes).take(free));
        packets.clear();
    }
}

/// The inboxes of the devices of a process.
#[derive(Debug)]
struct Neighbours {
    process: u32,
    inboxes: BTreeMap<(Namespace, IpAddr), Arc<Inbox>>,
}

static NEIGHBOURS: RwLock<Neighbours> =
    RwLock::new(Neighbours { process: 0, inboxes: BTreeMap::new() });

/// Incremented by every change.
static VERSION: AtomicU32 = AtomicU32::new(1);

/// Waits for the lock of the inboxes, which is never held for long. Returns `None` if that does not help: another
/// thread had the lock when this process was forked, so that nobody will release it.
fn wait_for_lock<G>(try_lock: impl Fn() -> TryLockResult<G>) -> Option<G> {
    for _ in 0..5000 {
        match try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(guard)) => return Some(guard.into_inner()),
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    None
}

/// Changes the inboxes. Returns false if nobody will release their lock.
fn change(change: impl FnOnce(&mut BTreeMap<(Namespace, IpAddr), Arc<Inbox>>)) -> bool {
    let Some(mut neighbours) = wait_for_lock(|| NEIGHBOURS.try_write()) else { return false };
    let process = std::process::id();
    if neighbours.process != process {
        // The devices of a forked process's parent are not here.
        *neighbours = Neighbours { process, inboxes: BTreeMap::new() };
    }
    change(&mut neighbours.inboxes);
    VERSION.fetch_add(1, Ordering::Release);
    true
}

/// A device's place among its neighbours.
#[derive(Debug)]
pub(super) struct Place {
    inbox: Arc<Inbox>,
    /// `None`: packets from and to this device pass through the kernel.
    namespace: Option<Namespace>,
    /// The addresses that neighbours find it at.
    addresses: Vec<IpAddr>,
    /// The last destination, and its inbox, of this version of the neighbours.
    last: Option<(u32, IpAddr, Option<Arc<Inbox>>)>,
    /// To devices of other processes. `None`: as above.
    senders: Option<Senders>,
}

impl Place {
    /// Without `joins`, its packets pass through the kernel.
    pub(super) fn new(inbox: Arc<Inbox>, joins: bool) -> Self {
        let namespace = if joins { namespace() } else { None };
        let senders = namespace.map(Senders::new);
        Self { inbox, namespace, addresses: Vec::new(), last: None, senders }
    }

    /// Whether packets from and to this device pass through the kernel.
    pub(super) fn is_alone(&self) -> bool {
        self.senders.is_none()
    }

    pub(super) fn inbox(&self) -> &Arc<Inbox> {
        &self.inbox
    }

    /// Lets neighbours find the device at the addresses of these sockets.
    pub(super) fn set_sockets(&mut self, sockets: &[Arc<Socket>]) {
        if let Some(senders) = &mut self.senders {
            let listener = |socket: &Arc<Socket>| Some((socket.address, socket.listener.clone()?));
            senders.set_listeners(sockets.iter().filter_map(listener).collect());
        }
        let Some(namespace) = self.namespace else { return };
        let before = std::mem::take(&mut self.addresses);
        let changed = change(|inboxes| {
            for address in before {
                // Another device may have taken the address since.
                let is_ours = |inbox: &Arc<Inbox>| Arc::ptr_eq(inbox, &self.inbox);
                if inboxes.get(&(namespace, address)).is_some_and(is_ours) {
                    inboxes.remove(&(namespace, address));
                }
            }
            for socket in sockets {
                inboxes.insert((namespace, socket.address), self.inbox.clone());
            }
        });
        if changed {
            self.addresses = sockets.iter().map(|socket| socket.address).collect();
        } else {
            self.namespace = None;
        }
    }

    /// The inbox of the device with this address, if that is a neighbour.
    fn neighbour(&mut self, address: IpAddr) -> Option<&Inbox> {
        let namespace = self.namespace?;
        let version = VERSION.load(Ordering::Acquire);
        if self.last.as_ref().is_none_or(|last| (last.0, last.1) != (version, address)) {
            // Not the other way during a change: a packet must not overtake those before it.
            let Some(neighbours) = wait_for_lock(|| NEIGHBOURS.try_read()) else {
                // The address will not be released: no thread waits for it a second time.
                self.namespace = None;
                return None;
            };
            let ours = neighbours.process == std::process::id();
            let inbox = neighbours.inboxes.get(&(namespace, address)).filter(|_| ours).cloned();
            self.last = Some((version, address, inbox));
        }
        self.last.as_ref()?.2.as_deref()
    }

    /// Whether packets from one address to the other do not pass through the kernel.
    pub(super) fn is_near(&mut self, from: IpAddr, to: IpAddr) -> bool {
        self.neighbour(to).is_some()
            || self.senders.as_ref().is_some_and(|senders| senders.has(from, to))
    }

    /// Whether there are packets from one address to the other that the other device has not received; `None`: they pass
    /// through the kernel.
    pub(super) fn is_unread(&mut self, from: IpAddr, to: IpAddr) -> Option<bool> {
        if let Some(inbox) = self.neighbour(to) {
            return Some(!inbox.is_empty());
        }
        self.senders.as_mut()?.is_unread(from, to)
    }

    /// Whether packets from one address to the other wait for the other device to receive others.
    pub(super) fn is_full(&mut self, from: IpAddr, to: IpAddr) -> bool {
        match self.neighbour(to) {
            Some(inbox) => inbox.is_full(),
            None => self.senders.as_ref().is_some_and(|senders| senders.is_full(from, to)),
        }
    }

    pub(super) fn lose_peer(&mut self, peer: IpAddr) {
        self.senders.iter_mut().for_each(|senders| senders.lose_peer(peer));
    }

    /// Sends what rings had no room for. Returns whether nothing is left to do.
    pub(super) fn send_rest(&mut self) -> bool {
        self.senders.as_mut().is_none_or(Senders::send_rest)
    }

    pub(super) fn is_done(&self) -> bool {
        self.senders.as_ref().is_none_or(Senders::is_done)
    }

    pub(super) fn drop_rest(&mut self, from: &[IpAddr]) {
        self.senders.iter_mut().for_each(|senders| senders.drop_rest(from));
    }

    /// Packets that are to go through the kernel's network, before all others.
    pub(super) fn take_refused(&mut self) -> Vec<Packet> {
        let mut refused = self.senders.as_mut().map_or_else(Vec::new, Senders::take_refused);
        refused.iter_mut().for_each(Packet::seal);
        refused
    }

    /// Carries out an operation in the memory of the process that has the address; false: it has to go by packets.
    ///
    /// # Safety
    ///
    /// As [`Link::carry_out`](super::Link::carry_out).
    pub(super) unsafe fn carry_out(
        &mut self,
        to: IpAddr,
        request: &OneSided,
        local: &[libc::iovec],
    ) -> bool {
        if self.neighbour(to).is_some() {
            return false;
        }
        // SAFETY: as the caller says.
        self.senders
            .as_mut()
            .is_some_and(|senders| unsafe { senders.carry_out(to, request, local) })
    }

    /// Splits off the first packets, as many as go the same way, and sends them if that is not through the kernel.
    /// Returns their number, and whether they were sent.
    pub(super) fn send_some(&mut self, packets: &mut [Packet]) -> (usize, bool) {
        let mut count = 0;
        while let Some(addresses @ (from, to)) =
            packets.get(count).and_then(|packet| packet.addresses)
        {
            let same =
                packets[count..].iter().take_while(|packet| packet.addresses == Some(addresses));
            let same = same.count();
            if let Some(inbox) = self.neighbour(to) {
                if count == 0 {
                    inbox.put(&mut packets[..same]);
                    return (same, true);
                }
                break;
            }
            if let Some(senders) = &mut self.senders
                && let Some(ring) = senders.ring(from, to)
            {
                if count > 0 {
                    break;
                }
                if !ring.send(&mut packets[..same]) {
                    senders.forget(from, to);
                }
                return (same, true);
            }
            count += same;
        }
        (count, false)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.set_sockets(&[]);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::files::{wait, wait_for};
    use crate::link::receive::Receiver;
    use crate::link::udp::UdpLink;
    use crate::link::{self, LITTLE_ROOM, Link, MUCH_ROOM, no_process_starts};
    use crate::wire::PORT;

    fn own_address(number: u8) -> IpAddr {
        link::own_address(64 + number)
    }

    fn link(address: u8, through_kernel: bool) -> UdpLink {
        UdpLink::new(&[own_address(address)], through_kernel).unwrap()
    }

    /// Also while another has it open, as a child of a fork may.
    #[test]
    fn a_socket_that_the_device_has_no_more_wakes_no_helper() {
        let _files = no_process_starts();
        let mut device = link(1, false);
        let mut receiver = Receiver::new(device.sockets(), device.inbox()).unwrap();
        let is_woken =
            |receiver: &Receiver| receiver.waits().wait(Some(Duration::ZERO)).count() > 0;
        assert!(receiver.may_wait() && !is_woken(&receiver) && receiver.are_watched());
        let stranger = std::net::UdpSocket::bind((own_address(5), 0)).unwrap();
        let _kept = receiver.sockets().to_vec();
        for (number, wakes) in [(1, true), (11, false)] {
            device.set_addresses(&[own_address(number)]).unwrap();
            assert!(receiver.may_wait());
            stranger.send_to(&[1; 20], (own_address(1), PORT)).unwrap();
            assert_eq!(is_woken(&receiver), wakes);
        }
    }

    fn packet(from: u8, to: u8, number: usize) -> Packet {
        let addresses = Some((own_address(from), own_address(to)));
        Packet {
            addresses,
            bytes: number.to_le_bytes().to_vec(),
            is_sealed: true,
            ..Packet::default()
        }
    }

    fn number(bytes: &[u8]) -> usize {
        usize::from_le_bytes(bytes.try_into().unwrap())
    }

    /// The numbers of all packets that have arrived.
    fn received(receiver: &mut Receiver) -> Vec<usize> {
        let mut numbers = Vec::new();
        while receiver.receive(|_, _, bytes| numbers.push(number(bytes))) > 0 {}
        numbers
    }

    /// Whether a device was woken, which is forgotten.
    fn has_rung(link: &UdpLink) -> bool {
        let wake_fd = link.inbox().wake_fd().clone();
        let rung = wait(&mut [wait_for(wake_fd.fd())], Some(Duration::ZERO));
        wake_fd.clear();
        rung
    }

    /// A sender may be interrupted between its decision to ring and the ring, while the receiver takes the packet and asks for
    /// the next one. The thread that waits then comes back once, not for ever.
    #[test]
    fn a_late_ring_is_heard_once() {
        let _files = no_process_starts();
        let (mut one, other) = (link(17, false), link(18, false));
        let mut receiver = Receiver::new(other.sockets(), other.inbox()).unwrap();
        let wake_fd = other.inbox().wake_fd().clone();
        let rings = || wait(&mut [wait_for(wake_fd.fd())], Some(Duration::ZERO));

        assert!(receiver.may_sleep() && !rings());
        wake_fd.wake();
        assert!(rings() && received(&mut receiver).is_empty());
        assert!(receiver.may_sleep() && !rings());

        // After a packet too, and the next one rings.
        one.send(&mut [packet(17, 18, 1)]);
        assert!(rings() && !receiver.may_sleep() && !rings());
        assert_eq!(received(&mut receiver), [1]);
        assert!(receiver.may_sleep() && !rings());
        wake_fd.wake();
        assert!(received(&mut receiver).is_empty() && receiver.may_sleep() && !rings());
        one.send(&mut [packet(17, 18, 2)]);
        assert!(rings());
        assert_eq!(received(&mut receiver), [2]);

        // A thread that leaves a wake-up where it is leaves it to the next one.
        assert!(receiver.may_wait() && rings());
        one.send(&mut [packet(17, 18, 3)]);
        assert!(!receiver.may_wait() && rings());
        assert_eq!(received(&mut receiver), [3]);
        assert!(receiver.may_sleep() && !rings());
    }

    #[test]
    fn neighbours_get_packets_without_the_kernel() {
        let _files = no_process_starts();
        let (mut one, other) = (link(2, false), link(3, false));
        let mut receiver = Receiver::new(other.sockets(), other.inbox()).unwrap();

        let room = [3, 4].map(|to| one.room(own_address(2), own_address(to)));
        assert_eq!(room[0], MUCH_ROOM);
        assert!(room[1] >= LITTLE_ROOM);

        // Packets come in order, with their addresses; one wake-up for one request.
        assert!(other.inbox().may_sleep());
        for few in (0..200).collect::<Vec<_>>().chunks(64) {
            let mut packets: Vec<_> = few.iter().map(|&n| packet(2, 3, n)).collect();
            one.send(&mut packets);
        }
        assert!(has_rung(&other) && !has_rung(&other) && !other.inbox().may_sleep());
        let mut next = 0;
        let count = receiver.receive(|from, to, bytes| {
            assert_eq!((from.address.ip(), from.address.port()), (own_address(2), PORT));
            assert_eq!((to, number(bytes)), (own_address(3), next));
            next += 1;
        });
        assert!(count == 200 && next == 200 && other.inbox().is_empty());

        // The wake-up was requested once more.
        one.send(&mut [packet(2, 3, 1)]);
        assert!(has_rung(&other));
        assert_eq!(received(&mut receiver), [1]);
        one.send(&mut [packet(2, 3, 1)]);
        assert!(!has_rung(&other));
        assert_eq!(received(&mut receiver), [1]);

        // The buffers go back and forth.
        let mut packets = [packet(2, 3, 2)];
        one.send(&mut packets);
        assert!(packets[0].bytes.capacity() > 0);

        // Senders are told to hold back. What does not fit is lost.
        assert!(!one.is_full(own_address(2), own_address(3)));
        let mut many: Vec<_> = (0..ROOM + 10).map(|n| packet(2, 3, n)).collect();
        one.send(&mut many);
        assert!(one.is_full(own_address(2), own_address(3)));
        let numbers = received(&mut receiver);
        assert_eq!((numbers.len(), numbers[0], numbers[ROOM - 1]), (ROOM, 2, ROOM - 2));

        // To several: neighbours, itself, one that wants it through the kernel, and nobody.
        let third = link(4, true);
        let mut at_third = Receiver::new(third.sockets(), third.inbox()).unwrap();
        let mut at_one = Receiver::new(one.sockets(), one.inbox()).unwrap();
        let to = [4, 4, 3, 5, 2, 4, 3];
        let mut packets: Vec<_> = (0..).zip(to).map(|(n, to)| packet(2, to, n)).collect();
        one.send(&mut packets);
        assert_eq!(received(&mut receiver), [2, 6]);
        assert_eq!(received(&mut at_one), [4]);
        assert!(third.inbox().is_empty(), "they have passed through the kernel");
        assert_eq!(received(&mut at_third), [0, 1, 5]);

        // A packet that is not from one of its addresses is not sent at all.
        one.send(&mut [packet(4, 3, 7)]);
        assert_eq!(received(&mut receiver), []);

        // An address that moves, and one whose device is gone.
        let mut other = other;
        other.set_addresses(&[own_address(6)]).unwrap();
        one.send(&mut [packet(2, 3, 8), packet(2, 6, 9)]);
        assert_eq!(received(&mut receiver), [9]);
        let inbox = other.inbox();
        drop((other, receiver));
        one.send(&mut [packet(2, 6, 10)]);
        assert!(inbox.is_empty());
        let again = link(6, false);
        one.send(&mut [packet(2, 6, 11)]);
        assert!(inbox.is_empty() && !again.inbox().is_empty());
    }

    /// Packets do not leave through the kernel, where they could be overtaken, during a change.
    #[test]
    fn packets_wait_for_changes() {
        let (mut one, other) = (link(9, false), link(10, false));
        let (tell, changes) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                change(|_| {
                    tell.send(()).unwrap();
                    std::thread::sleep(Duration::from_millis(20));
                })
            });
            changes.recv().unwrap();
            one.send(&mut [packet(9, 10, 1)]);
        });
        assert!(!other.inbox().is_empty());
    }

    /// The kernel's packets are received even if the inbox always has some.
    #[test]
    fn sockets_are_not_forgotten() {
        let (mut one, mut other) = (link(7, false), link(8, true));
        let mut receiver = Receiver::new(one.sockets(), one.inbox()).unwrap();
        other.send(&mut [packet(8, 7, 1)]);
        let mut numbers = Vec::new();
        for _ in 0..40 {
            one.send(&mut [packet(7, 7, 0)]);
            receiver.receive(|_, _, bytes| numbers.push(number(bytes)));
        }
        assert_eq!(numbers.iter().sum::<usize>(), 1);
    }
}
