//! Both sides of connections, in one process.

use std::ffi::c_int;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ibverbs::{CompletionChannel, CompletionQueue, WorkCompletion};

use super::ring::Writer;
use super::senders::{Connection, LOOK};
use super::{
    Heard, Listener, MOST, Receivers, Senders, WELCOME, answer, connect, introduce, is_hung_up,
    listen, name, reserve, send,
};
use crate::device::Device;
use crate::event_files::before_sleep;
use crate::files::{Bell, Epoll, WakeFd, Waker, wait, wait_for};
use crate::foreign::Foreign;
use crate::link::namespace::namespace;
use crate::link::neighbours::{Inbox, Place};
use crate::link::socket::open_own;
use crate::link::{no_process_starts, own_address};
use crate::transport::events::{self, Record};
use crate::wire::{PORT, Packet};

fn new_receivers() -> Receivers {
    Receivers::new(Arc::new(WakeFd::new().unwrap()), Arc::new(Epoll::new().unwrap()))
}

fn listener(address: IpAddr) -> Arc<Listener> {
    Arc::new(super::listener(address).unwrap().unwrap())
}

/// The readable descriptors.
fn ready(receivers: &Receivers) -> Vec<c_int> {
    let pending = receivers.pending().map(|file| wait_for(file.as_raw_fd()));
    let mut files: Vec<_> = pending.chain([wait_for(receivers.ends().fd())]).collect();
    wait(&mut files, Some(Duration::ZERO));
    files.iter().filter(|file| file.revents != 0).map(|file| file.fd).collect()
}

/// Attends to everything that is ready, also at the listener.
fn attend(receivers: &mut Receivers, to: IpAddr, listener: &Listener) {
    receivers.open(to, listener);
    let ready = ready(receivers);
    receivers.attend(|fd| ready.contains(&fd));
}

/// The senders of the device with this address.
fn new_senders(from: IpAddr) -> Senders {
    senders_of(from, &listener(from))
}

fn senders_of(from: IpAddr, listener: &Arc<Listener>) -> Senders {
    let mut senders = Senders::new(namespace().unwrap());
    senders.set_listeners([(from, listener.clone())].into());
    senders
}

/// Ends all connections.
fn clear(senders: &mut Senders, from: IpAddr, listener: &Arc<Listener>) {
    senders.set_listeners([].into());
    senders.set_listeners([(from, listener.clone())].into());
}

/// Whether it was woken, which is forgotten.
fn has_rung(receivers: &Receivers) -> bool {
    let rung = wait(&mut [wait_for(receivers.wake_fd().fd())], Some(Duration::ZERO));
    receivers.wake_fd().clear();
    rung
}

impl Connection {
    fn send_all(&mut self, packets: &mut [Packet]) {
        assert!(self.send(packets), "it is gone");
    }
}

fn received(receivers: &mut Receivers) -> Vec<(IpAddr, IpAddr, Vec<u8>)> {
    let mut packets = Vec::new();
    receivers.receive(|(from, _), to, packet| packets.push((from, to, packet.to_vec())));
    packets
}

fn packet(number: u8) -> Packet {
    Packet { addresses: None, bytes: vec![number; 20], is_sealed: true, identification: 0 }
}

#[test]
fn a_ring_is_handed_over_and_ends_with_either_side() {
    let _files = no_process_starts();
    let (from, to) = (own_address(20), own_address(21));
    let own = listener(from);
    let mut senders = senders_of(from, &own);
    // No process is there, and none is asked again at once.
    assert!(senders.ring(from, to).is_none());
    let opened = listener(to);
    assert!(senders.ring(from, to).is_none());
    let again = super::listener(to).map(drop).unwrap_err();
    assert_eq!(again.kind(), std::io::ErrorKind::AddrInUse, "an address has one listener");
    assert!(reserve(to).is_err() && reserve(own_address(49)).unwrap().is_some());

    clear(&mut senders, from, &own);
    let mut receivers = new_receivers();
    // Packets sent before the answer are read after it.
    senders.ring(from, to).expect("a listener").send_all(&mut [packet(1)]);
    assert!(!senders.is_done(), "it may be refused");
    attend(&mut receivers, to, &opened);
    attend(&mut receivers, to, &opened);
    assert!(senders.send_rest() && senders.is_done());
    assert!(has_rung(&receivers), "who sleeps already does not know of it");
    let ring = senders.ring(from, to).expect("it was admitted");
    ring.send_all(&mut [packet(2)]);
    let expected = [1, 2].map(|number| (from, to, vec![number; 20]));
    assert_eq!(received(&mut receivers), expected);

    // The wake-up descriptor wakes the reader, once.
    assert!(receivers.may_sleep() && receivers.all_ring());
    ring.send_all(&mut [packet(3)]);
    assert!(!receivers.all_ring() && has_rung(&receivers));
    ring.send_all(&mut [packet(4)]);
    assert!(!has_rung(&receivers) && !receivers.may_sleep());
    assert!(ready(&receivers).is_empty());
    assert_eq!(received(&mut receivers).len(), 2);

    // The last packets of a process that is gone arrive; then it is forgotten.
    ring.send_all(&mut [packet(5)]);
    clear(&mut senders, from, &own);
    attend(&mut receivers, to, &opened);
    assert_eq!(receivers.count(), 1);
    assert_eq!(received(&mut receivers).len(), 1);
    assert_eq!((receivers.count(), receivers.take_gone()), (0, vec![from]));

    // Packets of a process that ends before it is accepted arrive too.
    senders.ring(from, to).expect("a listener").send_all(&mut [packet(6)]);
    clear(&mut senders, from, &own);
    attend(&mut receivers, to, &opened);
    attend(&mut receivers, to, &opened);
    assert_eq!(received(&mut receivers), [(from, to, vec![6; 20])]);
    assert_eq!((receivers.count(), receivers.take_gone()), (0, vec![from]));

    // One that closes its connection before that, and has sent nothing, may live.
    senders.ring(from, to).expect("a listener");
    clear(&mut senders, from, &own);
    attend(&mut receivers, to, &opened);
    attend(&mut receivers, to, &opened);
    assert_eq!((receivers.count(), receivers.take_gone()), (0, vec![]));

    // The reader goes: the writer notices it when it has not read for a while.
    clear(&mut senders, from, &own);
    assert!(senders.ring(from, to).is_some());
    attend(&mut receivers, to, &opened);
    attend(&mut receivers, to, &opened);
    assert!(senders.ring(from, to).is_some());
    std::thread::sleep(LOOK);
    assert!(senders.ring(from, to).is_some());
    receivers.keep(|_| false);
    std::thread::sleep(LOOK);
    senders
        .ring(from, to)
        .expect("nobody looks while it has nothing to read")
        .send_all(&mut [packet(6)]);
    std::thread::sleep(LOOK);
    assert!(senders.ring(from, to).is_some(), "it has knocked again");
    assert!(!senders.is_unread(from, to).unwrap(), "nothing is in the new ring");
    attend(&mut receivers, to, &opened);
    attend(&mut receivers, to, &opened);
    senders.ring(from, to).unwrap().send_all(&mut [packet(7)]);
    assert_eq!(received(&mut receivers), [(from, to, vec![7; 20])]);
}

/// Packets in a ring that nobody takes go through the kernel's network, in their order.
#[test]
fn what_is_refused_is_given_back() {
    let _files = no_process_starts();
    let (from, to) = (own_address(45), own_address(46));
    let opened = listener(to);
    let mut senders = new_senders(from);
    senders.ring(from, to).unwrap().send_all(&mut [packet(1), packet(2)]);
    assert!(!senders.send_rest() && senders.take_refused().is_empty());
    drop(super::accept(&*opened).unwrap());
    senders.send_rest();
    let refused = senders.take_refused();
    let numbers: Vec<_> = refused.iter().map(|packet| packet.bytes[0]).collect();
    assert_eq!(numbers, [1, 2]);
    assert!(refused.iter().all(|packet| packet.addresses == Some((from, to))));
    assert!(senders.ring(from, to).is_none() && senders.is_done(), "it is not asked again at once");
}

/// A process that comes late finds the ring withdrawn, and its packets elsewhere. One that has taken the ring reads them there.
#[test]
fn packets_go_one_way_alone() {
    let _files = no_process_starts();
    let (from, to) = (own_address(42), own_address(19));
    let (own, opened) = (listener(from), listener(to));
    for is_late in [false, true] {
        let mut receivers = new_receivers();
        let (mut writer, file) = Writer::create().unwrap();
        let connection = connect(to).unwrap();
        introduce(&connection, (from, &own), &file).unwrap();
        writer.write(&[1; 20]);
        writer.publish();
        assert!(!is_late || writer.withdraw());
        for _ in 0..2 {
            attend(&mut receivers, to, &opened);
        }
        assert!(is_late || !writer.withdraw());
        assert_eq!(received(&mut receivers).len(), usize::from(!is_late));
        assert!(matches!(listen(&connection), Heard::End) == is_late);
    }
}

/// Opening a ring drops the rings that were refused, and gives their packets back.
#[test]
fn what_is_refused_is_given_back_when_another_ring_is_opened() {
    let _files = no_process_starts();
    let [from, to, other] = [7, 8, 9].map(own_address);
    let opened = [to, other].map(listener);
    let mut senders = new_senders(from);
    senders.ring(from, to).unwrap().send_all(&mut [packet(1)]);
    drop(super::accept(&*opened[0]).unwrap());
    assert!(senders.ring(from, other).is_some() && !senders.has(from, to));
    assert_eq!(senders.take_refused()[0].bytes, packet(1).bytes);
}

/// Packets without room wait until the reader makes some, and are bounded. Nothing overtakes it.
#[test]
fn what_does_not_fit_waits() {
    let _files = no_process_starts();
    let (from, to) = (own_address(47), own_address(48));
    let opened = listener(to);
    let mut receivers = new_receivers();
    let mut senders = new_senders(from);
    const COUNT: u32 = 3_000;
    let numbered = |number: u32| {
        let mut bytes = vec![0; 4096];
        bytes[..4].copy_from_slice(&number.to_ne_bytes());
        Packet { addresses: Some((from, to)), bytes, is_sealed: true, identification: 0 }
    };
    senders.ring(from, to).unwrap();
    attend(&mut receivers, to, &opened);
    attend(&mut receivers, to, &opened);
    for number in 0..COUNT {
        senders.ring(from, to).unwrap().send_all(&mut [numbered(number)]);
    }
    assert!(senders.is_full(from, to) && !senders.is_done());
    let mut next = 0;
    while next < COUNT {
        let before = next;
        receivers.receive(|_, _, bytes| {
            assert_eq!(bytes[..4], next.to_ne_bytes());
            next += 1;
        });
        assert!(next > before || !senders.send_rest(), "{next}");
        senders.send_rest();
    }
    assert!(senders.is_done() && !senders.is_full(from, to));
    // Without a reader, memory is bounded.
    for number in 0..20_000 {
        senders.ring(from, to).unwrap().send_all(&mut [numbered(number)]);
    }
    let (mut left, mut last) = (0, true);
    while last {
        last = false;
        receivers.receive(|_, _, _| (left, last) = (left + 1, true));
        senders.send_rest();
    }
    assert!((16_384..18_000).contains(&left), "{left}");
    // Waiting packets of an address that goes are dropped.
    for number in 0..2_000 {
        senders.ring(from, to).unwrap().send_all(&mut [numbered(number)]);
    }
    assert!(senders.is_full(from, to));
    senders.drop_rest(&[to]);
    assert!(senders.is_full(from, to));
    senders.drop_rest(&[from]);
    assert!(!senders.is_full(from, to));
}

#[test]
fn packets_that_go_other_ways_are_not_mixed() {
    let _files = no_process_starts();
    let (from, to, nobody) = (own_address(37), own_address(38), own_address(39));
    let opened = listener(to);
    let mut receivers = new_receivers();
    let mut place = Place::new(Arc::new(Inbox::new(Arc::new(WakeFd::new().unwrap()))), true);
    place.set_sockets(&[open_own(from, false).unwrap()]);
    let packet = |to, number| Packet {
        addresses: Some((from, to)),
        bytes: vec![number; 20],
        is_sealed: true,
        identification: 0,
    };
    assert_eq!(place.send_some(&mut [packet(to, 0)]), (1, true));
    attend(&mut receivers, to, &opened);
    attend(&mut receivers, to, &opened);
    let mut packets: Vec<_> =
        (1..).zip([nobody, nobody, to, to, nobody]).map(|(n, to)| packet(to, n)).collect();
    assert_eq!(place.send_some(&mut packets), (2, false));
    assert_eq!(place.send_some(&mut packets[2..]), (2, true));
    assert_eq!(place.send_some(&mut packets[4..]), (1, false));
    assert_eq!(received(&mut receivers), [0, 3, 4].map(|number| (from, to, vec![number; 20])));
}

#[test]
fn who_connects_again_replaces_its_earlier_connection() {
    let (from, to) = (own_address(22), own_address(23));
    let opened = listener(to);
    let mut receivers = new_receivers();
    let own = listener(from);
    let mut both = [(); 2].map(|()| senders_of(from, &own));
    for (senders, number) in both.iter_mut().zip(1..) {
        assert!(senders.ring(from, to).is_some());
        attend(&mut receivers, to, &opened);
        attend(&mut receivers, to, &opened);
        senders.ring(from, to).unwrap().send_all(&mut [packet(number)]);
    }
    let numbers: Vec<_> = received(&mut receivers).iter().map(|packet| packet.2[0]).collect();
    assert_eq!(numbers, [1, 2]);
    assert_eq!(receivers.count(), 1);
}

#[test]
fn guests_that_say_nothing_sensible_are_sent_away() {
    let _files = no_process_starts();
    let (from, to) = (own_address(24), own_address(25));
    let opened = listener(to);
    let mut receivers = new_receivers();
    let silent = connect(to).unwrap();
    let says_nonsense = connect(to).unwrap();
    send(&says_nonsense, b"?", &[]).unwrap();
    let own = listener(from);
    let has_no_ring = connect(to).unwrap();
    let other = std::fs::File::open("/proc/self/exe").unwrap().into();
    introduce(&has_no_ring, (from, &own), &other).unwrap();
    // An address that it does not have, with the proof of another, and with none.
    let ring = Writer::create().unwrap().1;
    let [has_no_address, has_no_proof] = [(); 2].map(|()| connect(to).unwrap());
    introduce(&has_no_address, (to, &own), &ring).unwrap();
    send(&has_no_proof, from.to_string().as_bytes(), &[&ring]).unwrap();
    drop(connect(to).unwrap());
    for _ in 0..3 {
        attend(&mut receivers, to, &opened);
    }
    assert_eq!(receivers.count(), 1, "the silent one");
    for ended in [&says_nonsense, &has_no_ring, &has_no_address, &has_no_proof] {
        assert!(matches!(listen(ended), Heard::End));
    }
    assert!(matches!(listen(&silent), Heard::Nothing));
    drop(silent);
    attend(&mut receivers, to, &opened);
    assert_eq!(receivers.count(), 0);
}

/// A device has `MOST` connections at the most. Packets of other processes go through the kernel's network.
#[test]
fn there_are_not_too_many_connections() {
    let _files = no_process_starts();
    let to = own_address(26);
    let opened = listener(to);
    let mut receivers = new_receivers();
    let own = listener(own_address(27));
    let mut pending = Vec::new();
    for _ in 0..MOST + 10 {
        let mut senders = senders_of(own_address(27), &own);
        assert!(senders.ring(own_address(27), to).is_some());
        pending.push(senders);
        receivers.open(to, &*opened);
    }
    assert!(receivers.looks_at_listeners());
    assert_eq!(receivers.count(), MOST);
    drop(pending);
    attend(&mut receivers, to, &opened);
    assert_eq!(receivers.count(), 0);
}

#[test]
fn addresses_that_may_be_there_twice_have_no_listener() {
    for address in ["fe80::1", "ff02::1", "224.0.0.1"] {
        assert!(super::listener(address.parse().unwrap()).unwrap().is_none());
    }
    assert!(name("2001:db8:ffff:ffff:ffff:ffff:ffff:ffff".parse().unwrap()).is_some());
}

/// No peer is forgotten because another process comes.
#[test]
fn several_processes_have_a_ring_each() {
    let from = own_address(28);
    let addresses = [29, 30, 31].map(own_address);
    let listeners = addresses.map(listener);
    let mut receivers = new_receivers();
    let mut senders = new_senders(from);
    for &to in &addresses {
        assert!(senders.ring(from, to).is_some());
    }
    for _ in 0..2 {
        for (&to, listener) in addresses.iter().zip(&listeners) {
            attend(&mut receivers, to, listener);
        }
    }
    let other = own_address(32);
    let _listener = listener(other);
    assert!(senders.ring(from, other).is_some());
    for (&to, number) in addresses.iter().zip(1..) {
        senders.ring(from, to).unwrap().send_all(&mut [packet(number)]);
    }
    let numbers: Vec<_> = received(&mut receivers).iter().map(|packet| packet.2[0]).collect();
    assert_eq!(numbers, [1, 2, 3]);
}

/// Without descriptors nobody is let in, and nobody is woken for it again and again.
#[test]
fn who_cannot_be_let_in_waits() {
    let to = own_address(33);
    let opened = listener(to);
    let mut receivers = new_receivers();
    let closed = std::fs::File::open("/dev/null").unwrap();
    receivers.open(to, &closed);
    assert!(!receivers.looks_at_listeners(), "that file is no listener, which is an error as well");
    receivers.open(to, &*opened);
    assert!(!receivers.looks_at_listeners(), "a process waits at the other one");
    assert!(
        receivers.stop_waiting() && receivers.looks_at_listeners() && !receivers.stop_waiting()
    );
}

/// A thread in another network namespace would find the listeners of that one.
#[test]
fn threads_elsewhere_do_not_knock() {
    let _files = no_process_starts();
    let (from, to) = (own_address(34), own_address(35));
    let opened = listener(to);
    let mut receivers = new_receivers();
    let own = listener(from);
    let mut elsewhere = Senders::new((0, 0));
    elsewhere.set_listeners([(from, own.clone())].into());
    assert!(elsewhere.ring(from, to).is_none());
    receivers.open(to, &*opened);
    assert_eq!(receivers.count(), 0);
    assert!(senders_of(from, &own).ring(from, to).is_some());
    receivers.open(to, &*opened);
    assert_eq!(receivers.count(), 1);
}

/// A process has no room for another path. The other one, whose connection would end at once, would take that for its end.
#[test]
fn nobody_is_asked_without_room_for_a_path() {
    let _files = no_process_starts();
    let own = own_address(18);
    let opened = listener(own);
    let mut senders = senders_of(own, &opened);
    senders.fill(own);
    assert!(senders.ring(own, own).is_none());
    let nobody = super::accept(&*opened).map(drop).unwrap_err();
    assert_eq!(nobody.kind(), std::io::ErrorKind::WouldBlock);
}

/// A device gets an address, and gives it up: its connections from the other one stay.
#[test]
fn addresses_that_stay_keep_their_connections() {
    let _files = no_process_starts();
    let [from, other, to] = [10, 11, 17].map(own_address);
    let (own, its, opened) = (listener(from), listener(other), listener(to));
    let mut senders = senders_of(from, &own);
    let mut receivers = new_receivers();
    senders.ring(from, to).unwrap();
    senders.set_listeners([(from, own.clone()), (other, its)].into());
    senders.ring(other, to).unwrap();
    attend(&mut receivers, to, &opened);
    attend(&mut receivers, to, &opened);
    senders.set_listeners([(from, own)].into());
    assert!(senders.has(from, to) && !senders.has(other, to));
    attend(&mut receivers, to, &opened);
    assert_eq!((receivers.count(), receivers.take_gone()), (1, vec![other]));
    senders.ring(from, to).unwrap().send_all(&mut [packet(1)]);
    assert_eq!(received(&mut receivers), [(from, to, vec![1; 20])]);
}

/// A connection may be seen before its process is known.
#[test]
fn a_guest_has_time_to_introduce_itself() {
    let to = own_address(36);
    let opened = listener(to);
    let mut receivers = new_receivers();
    let _guest = connect(to).unwrap();
    receivers.open(to, &*opened);
    receivers.attend(|_| true);
    assert_eq!(receivers.count(), 1);
}

/// A device of this process whose thread has let in another, as if that were of another process.
struct Guest {
    device: Device,
    channel: CompletionChannel<'static>,
    senders: Senders,
    from: IpAddr,
}

impl Guest {
    fn new(name: &str, numbers: [u8; 2]) -> Self {
        let [from, to] = numbers.map(own_address);
        let device = Device::builder().name(name).address(to).build().unwrap();
        let channel = CompletionChannel::new(device.open().unwrap()).unwrap();
        let mut connection = Self { device, channel, senders: new_senders(from), from };
        assert!(connection.senders.ring(from, to).is_some());
        wait_until(|| connection.senders.is_answered(from, to));
        connection
    }

    fn send(&mut self) {
        let to = self.device.address();
        self.senders.ring(self.from, to).unwrap().send_all(&mut [packet(1)]);
    }

    /// Waits until as many packets have arrived, in all.
    fn wait_for(&self, packets: u64) {
        wait_until(|| self.device.counters().packets_received == packets);
    }
}

fn wait_until(mut is_true: impl FnMut() -> bool) {
    for _ in 0..60_000 {
        if is_true() {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("nothing has happened for a minute");
}

/// A thread that sleeps until there is an event receives packets, without the device's thread.
#[test]
fn who_sleeps_until_an_event_stands_in() {
    let mut connection = Guest::new("stands-in", [53, 54]);
    connection.device.shared().driver().stop();
    wait_until(|| !has_thread("stands-in"));
    let file = connection.channel.as_raw_fd();
    std::thread::scope(|scope| {
        let sleeps = scope.spawn(move || before_sleep(&[file], None));
        for packets in 1..=3 {
            connection.send();
            connection.wait_for(packets);
        }
        assert!(!sleeps.is_finished());
        assert!(events::put(file, &Record::completion(0)));
        sleeps.join().unwrap();
    });
    connection.send();
    // Its deadline has passed, but it looks.
    before_sleep(&[file], Some(Instant::now()));
    connection.wait_for(4);
}

/// When nobody stands in any more, the device's thread receives: no packet waits for ever, whenever it comes.
#[test]
fn who_stood_in_hands_back() {
    let mut connection = Guest::new("hands-back", [55, 56]);
    let file = connection.channel.as_raw_fd();
    for packets in 1..=400 {
        std::thread::scope(|scope| {
            // Pauses range from none to longer than the thread waits before it takes over.
            let pause = Duration::from_micros(packets % 20 * 100);
            let sleeps = move || before_sleep(&[file], Some(Instant::now() + pause));
            scope.spawn(sleeps);
            if packets % 3 == 0 {
                std::thread::sleep(Duration::from_micros(packets % 7 * 200));
            }
            connection.send();
        });
        connection.wait_for(packets);
    }
}

/// The device's thread may consume a wake-up that was for a helper, which then does not wake, nor has asked for another one.
#[test]
fn who_stands_in_is_rung_again() {
    let mut connection = Guest::new("rung-again", [57, 58]);
    let file = connection.channel.as_raw_fd();
    std::thread::scope(|scope| {
        scope.spawn(move || before_sleep(&[file], None));
        // Also if a packet waits for ever: the scope waits for the thread.
        let _end = Put(file);
        for packets in 1..=1000 {
            connection.device.shared().driver().waker().wake();
            connection.send();
            connection.wait_for(packets);
        }
    });
}

/// The thread that stands in waits for the files that it is given, whatever had their numbers before.
#[test]
fn who_stands_in_sleeps_for_the_files_of_now() {
    let device = Device::builder().name("of-now").address(own_address(61)).build().unwrap();
    let channel = CompletionChannel::new(device.open().unwrap()).unwrap();
    let event = channel.as_raw_fd();
    // An epoll set refuses this file. It is readable, and the caller finds that out.
    let number: OwnedFd = std::fs::File::open("/proc/self/exe").unwrap().into();
    before_sleep(&[number.as_raw_fd(), event], None);
    let mut kept = Vec::new();
    for _ in 0..3 {
        let (reader, mut writer) = std::io::pipe().unwrap();
        // SAFETY: a plain system call; both numbers are this test's. What had the number before is open still.
        assert!(unsafe { libc::dup2(reader.as_raw_fd(), number.as_raw_fd()) } >= 0);
        kept.push(reader);
        let files = [number.as_raw_fd(), event];
        std::thread::scope(|scope| {
            let sleeps = scope.spawn(move || before_sleep(&files, None));
            wait_until(|| device.shared().driver().is_helped());
            std::io::Write::write_all(&mut writer, &[1]).unwrap();
            sleeps.join().unwrap();
        });
    }
}

/// A queue's files are named once, and again after they were readable; another queue may have their numbers later.
#[test]
fn who_sleeps_for_a_queue_names_its_files_once() {
    let device = Device::builder().name("named").address(own_address(13)).build().unwrap();
    let context = device.open().unwrap();
    let _queue = CompletionQueue::builder(&context, 1).own_channel().build().unwrap();
    let driver = device.shared().driver();
    let number = device.lock().core.cqs.iter().next().unwrap().0;
    let file: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
    let (other, mut kept) = (Waker::new().unwrap(), Vec::new());
    let files = [file.as_raw_fd(), other.fd()];
    for serial in [1 << 40, 2 << 40] {
        let waker = Waker::new().unwrap();
        // SAFETY: a plain system call; both numbers are this test's.
        assert!(unsafe { libc::dup2(waker.fd(), file.as_raw_fd()) } >= 0);
        let sleep = |until| driver.sleep_for(device.shared(), (number, serial), &files, until);
        for _ in 0..3 {
            std::thread::scope(|scope| {
                let sleeps = scope.spawn(|| sleep(None));
                wait_until(|| driver.is_helped());
                waker.wake();
                assert!(!sleeps.join().unwrap());
            });
            waker.clear();
            let until = Instant::now() + Duration::from_millis(1);
            assert!(!sleep(Some(until)) && Instant::now() >= until, "nothing is readable");
        }
        kept.push(waker);
    }
}

/// It also waits for the sockets that the device has now.
#[test]
fn who_stands_in_receives_datagrams() {
    let addresses = [62, 63].map(own_address);
    let device = Device::builder().name("datagrams").address(addresses[0]).build().unwrap();
    let channel = CompletionChannel::new(device.open().unwrap()).unwrap();
    let event = channel.as_raw_fd();
    device.shared().driver().stop();
    wait_until(|| !has_thread("datagrams"));
    let stranger = std::net::UdpSocket::bind((own_address(61), 0)).unwrap();
    for (address, packets) in addresses.into_iter().zip(1..) {
        device.set_addresses(1, [address]).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || before_sleep(&[event], None));
            let _end = Put(event);
            wait_until(|| device.shared().driver().is_helped());
            stranger.send_to(&[1; 20], (address, PORT)).unwrap();
            wait_until(|| device.counters().packets_received == packets);
        });
        before_sleep(&[event], None);
        assert_eq!(events::take_back(event, |_| true), 1);
    }
}

fn has_thread(name: &str) -> bool {
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    let mut names =
        threads.filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("comm")).ok());
    names.any(|found| found.trim_end() == name)
}

/// Puts an event into a file when it is dropped.
struct Put(c_int);

impl Drop for Put {
    fn drop(&mut self) {
        events::put(self.0, &Record::completion(0));
    }
}

/// Otherwise the thread would never sleep again.
#[test]
fn the_thread_hears_a_wake_up_once() {
    let device = Device::new().unwrap();
    let waker = device.shared().driver().waker();
    waker.wake();
    wait_until(|| !wait(&mut [wait_for(waker.fd())], Some(Duration::ZERO)));
}

/// The bell that a process has been sent with the answer.
fn answered(connection: &OwnedFd) -> Bell {
    match listen(connection) {
        Heard::Answer(bell, None) => bell,
        other => panic!("{other:?}"),
    }
}

/// A process rings again and again, fills its bell, and sends messages that nobody expects. The thread that waits is
/// woken, by others as before, and no longer than that process lives.
#[test]
fn a_process_that_wakes_for_nothing_is_heard_and_forgotten() {
    let _files = no_process_starts();
    let [from, other, to] = [50, 51, 52].map(own_address);
    let opened = listener(to);
    let own = listener(from);
    let mut receivers = new_receivers();
    let mut honest = new_senders(other);
    honest.ring(other, to).unwrap();
    let connection = connect(to).unwrap();
    introduce(&connection, (from, &own), &Writer::create().unwrap().1).unwrap();
    attend(&mut receivers, to, &opened);
    attend(&mut receivers, to, &opened);
    assert_eq!(receivers.count(), 2);
    assert!(has_rung(&receivers) && receivers.may_sleep());
    let bell = answered(&connection);
    for _ in 0..10_000 {
        bell.ring();
    }
    assert!(has_rung(&receivers) && !has_rung(&receivers), "all are taken at once");
    fill(&bell);
    bell.ring();
    assert!(has_rung(&receivers) && !has_rung(&receivers), "a full bell can be rung");
    // SAFETY: a plain system call for a socket of this test's.
    assert_eq!(unsafe { libc::send(connection.as_raw_fd(), [0_u8; 9].as_ptr().cast(), 9, 0) }, 9);
    assert!(!has_rung(&receivers) && ready(&receivers).is_empty());
    honest.ring(other, to).unwrap().send_all(&mut [packet(1)]);
    assert!(has_rung(&receivers), "others wake it as before");
    assert_eq!(received(&mut receivers).len(), 1);
    // Its end is no wake-up, but is seen behind what it has sent.
    drop(connection);
    assert!(receivers.may_sleep() && !has_rung(&receivers));
    attend(&mut receivers, to, &opened);
    assert_eq!((receivers.count(), receivers.take_gone()), (1, vec![from]));
    assert!(ready(&receivers).is_empty());
}

/// Nothing more can be added to the counter of a bell.
fn fill(bell: &Bell) {
    let mut step = 1_u64 << 63;
    while step > 0 {
        // SAFETY: a plain system call for a descriptor of this test's, with a live buffer of that size.
        while unsafe { libc::write(bell.as_fd().as_raw_fd(), (&raw const step).cast(), 8) } == 8 {}
        step /= 2;
    }
}

/// The process that answers has the bell too. It may fill or empty it, and ask for calls that wait. Nobody waits for it.
#[test]
fn a_bell_is_rung_without_waiting() {
    let full = Bell::new().unwrap();
    fill(&full);
    // SAFETY: plain system calls; the new descriptor is this test's alone.
    let empty = unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, 0)) };
    let empty = Bell::open(Foreign::file(empty)).unwrap();
    // A kind of file that looks like one, and whose reader would wait.
    // SAFETY: a plain system call; the new descriptor is this test's alone.
    let other = unsafe { OwnedFd::from_raw_fd(libc::inotify_init1(0)) };
    let other = Bell::open(Foreign::file(other)).unwrap();
    let (sender, rung) = std::sync::mpsc::channel();
    for bell in [full, empty, other] {
        // SAFETY: a plain system call for a descriptor of this test's.
        assert_eq!(unsafe { libc::fcntl(bell.as_fd().as_raw_fd(), libc::F_SETFL, 0) }, 0);
        let sender = sender.clone();
        std::thread::spawn(move || {
            bell.ring();
            sender.send(()).unwrap();
        });
    }
    for _ in 0..3 {
        rung.recv_timeout(Duration::from_secs(60)).expect("it waits for the other process");
    }
}

/// A process answers with a file that is no bell, or with none: it is not written to, and packets go another way.
#[test]
fn an_answer_without_a_bell_ends_the_connection() {
    let _files = no_process_starts();
    let (from, to) = (own_address(59), own_address(60));
    let opened = listener(to);
    let own = listener(from);
    let null = std::fs::File::options().write(true).open("/dev/null").unwrap();
    let ring = Writer::create().unwrap().1;
    let socket = super::socket().unwrap();
    let (_reader, pipe) = std::io::pipe().unwrap();
    let files: [Option<OwnedFd>; 5] =
        [None, Some(null.into()), Some(ring), Some(socket), Some(pipe.into())];
    for file in files {
        let mut senders = senders_of(from, &own);
        assert!(senders.ring(from, to).is_some());
        let connection = super::accept(&*opened).unwrap();
        send(&connection, WELCOME, file.iter().collect::<Vec<_>>().as_slice()).unwrap();
        assert_eq!([(); 2].map(|()| senders.is_unread(from, to)), [None; 2], "{file:?}");
        assert!(is_hung_up(&connection), "{file:?}");
    }
    let mut senders = senders_of(from, &own);
    assert!(senders.ring(from, to).is_some());
    let connection = super::accept(&*opened).unwrap();
    answer(&connection, &Bell::new().unwrap(), None).unwrap();
    assert!(senders.is_answered(from, to));
}

/// While one thread stands in and leaves, others may wait for the events of other queues.
#[test]
fn armed_queues_are_counted() {
    let device = Device::new().unwrap();
    let context = device.open().unwrap();
    let queue = || CompletionQueue::builder(&context, 1).own_channel().build().unwrap();
    let armed = || device.lock().core.armed;
    let (one, other) = (queue(), queue());
    assert_eq!(armed(), 0);
    let mut room = [WorkCompletion::default()];
    for _ in 0..2 {
        for queue in [&one, &other] {
            assert!(queue.poll_or_arm(&mut room).unwrap().is_empty());
        }
        assert_eq!(armed(), 2);
    }
    drop(one);
    assert_eq!(armed(), 1);
    drop(other);
    assert_eq!(armed(), 0);
}
