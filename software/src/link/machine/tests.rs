//! Both sides of connections, in one process.

use std::ffi::c_int;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ibverbs::{CompletionChannel, CompletionQueue, WorkCompletion};

use super::ways::{Connection, LOOK};
use super::{Heard, MOST, Senders, Ways, connect, door, introduce, listen, name, send};
use crate::device::Device;
use crate::event_files::before_sleep;
use crate::files::{Waker, wait, wait_for};
use crate::link::namespace::namespace;
use crate::link::neighbours::{Inbox, Place};
use crate::link::{no_process_starts, own_address};
use crate::transport::events::{self, Record};
use crate::wire::Packet;

fn new_senders() -> Senders {
    Senders::new(Arc::new(Waker::new().unwrap())).unwrap()
}

/// What there is something to hear from.
fn ready(senders: &Senders) -> Vec<c_int> {
    let mut files: Vec<_> = senders.guests().map(|file| wait_for(file.as_raw_fd())).collect();
    wait(&mut files, Some(Duration::ZERO));
    let guests = files.iter().filter(|file| file.revents != 0).map(|file| file.fd);
    let mut ready: Vec<_> = guests.collect();
    senders.ends().ready(|fd| ready.push(fd));
    ready
}

/// Attends to everything that is ready, also at the door.
fn attend(senders: &mut Senders, to: IpAddr, door: &OwnedFd) {
    senders.open(to, door);
    let ready = ready(senders);
    senders.attend(|fd| ready.contains(&fd));
}

fn new_ways() -> Ways {
    Ways::new(namespace().unwrap())
}

/// Whether it has rung, which is forgotten.
fn has_rung(senders: &Senders) -> bool {
    let rung = wait(&mut [wait_for(senders.bell().fd())], Some(Duration::ZERO));
    senders.bell().clear();
    rung
}

impl Connection {
    fn send_all(&mut self, packets: &mut [Packet]) {
        assert!(self.send(packets), "it is gone");
    }
}

fn received(senders: &mut Senders) -> Vec<(IpAddr, IpAddr, Vec<u8>)> {
    let mut packets = Vec::new();
    senders.receive(|(from, _), to, packet| packets.push((from, to, packet.to_vec())));
    packets
}

fn packet(number: u8) -> Packet {
    Packet { addresses: None, bytes: vec![number; 20], is_sealed: true }
}

#[test]
fn a_ring_is_handed_over_and_ends_with_either_side() {
    let _files = no_process_starts();
    let (from, to) = (own_address(20), own_address(21));
    let mut ways = new_ways();
    // Nobody is there, and is not asked again at once.
    assert!(ways.ring(from, to).is_none());
    let opened = door(to).unwrap();
    assert!(ways.ring(from, to).is_none());
    assert!(door(to).is_none(), "an address has one door");

    ways.clear();
    let mut senders = new_senders();
    // What is sent before the answer is read after it.
    ways.ring(from, to).expect("a door").send_all(&mut [packet(1)]);
    assert!(!ways.is_done(), "it may be refused");
    attend(&mut senders, to, &opened);
    attend(&mut senders, to, &opened);
    assert!(ways.send_rest() && ways.is_done());
    assert!(has_rung(&senders), "who sleeps already does not know of it");
    let ring = ways.ring(from, to).expect("it was admitted");
    ring.send_all(&mut [packet(2)]);
    let expected = [1, 2].map(|number| (from, to, vec![number; 20]));
    assert_eq!(received(&mut senders), expected);

    // A bell wakes the reader, once.
    assert!(senders.may_sleep() && senders.all_ring());
    ring.send_all(&mut [packet(3)]);
    assert!(!senders.all_ring() && has_rung(&senders));
    ring.send_all(&mut [packet(4)]);
    assert!(!has_rung(&senders) && !senders.may_sleep());
    assert!(ready(&senders).is_empty());
    assert_eq!(received(&mut senders).len(), 2);

    // The last packets of a process that is gone arrive; then it is forgotten.
    ring.send_all(&mut [packet(5)]);
    ways.clear();
    attend(&mut senders, to, &opened);
    assert_eq!(senders.count(), 1);
    assert_eq!(received(&mut senders).len(), 1);
    assert_eq!((senders.count(), senders.take_gone()), (0, vec![from]));

    // So do those of a process that is gone before it was let in.
    ways.ring(from, to).expect("a door").send_all(&mut [packet(6)]);
    ways.clear();
    attend(&mut senders, to, &opened);
    attend(&mut senders, to, &opened);
    assert_eq!(received(&mut senders), [(from, to, vec![6; 20])]);
    assert_eq!((senders.count(), senders.take_gone()), (0, vec![from]));

    // The reader goes: the writer notices it when it has not read for a while.
    ways.clear();
    assert!(ways.ring(from, to).is_some());
    attend(&mut senders, to, &opened);
    attend(&mut senders, to, &opened);
    assert!(ways.ring(from, to).is_some());
    std::thread::sleep(LOOK);
    assert!(ways.ring(from, to).is_some());
    senders.keep(|_| false);
    std::thread::sleep(LOOK);
    ways.ring(from, to)
        .expect("nobody looks while it has nothing to read")
        .send_all(&mut [packet(6)]);
    std::thread::sleep(LOOK);
    assert!(ways.ring(from, to).is_some(), "it has knocked again");
    assert!(!ways.is_unread(from, to).unwrap(), "nothing is in the new ring");
    attend(&mut senders, to, &opened);
    attend(&mut senders, to, &opened);
    ways.ring(from, to).unwrap().send_all(&mut [packet(7)]);
    assert_eq!(received(&mut senders), [(from, to, vec![7; 20])]);
}

/// Packets in a ring that nobody takes go through the kernel's network, in their order.
#[test]
fn what_is_refused_is_given_back() {
    let _files = no_process_starts();
    let (from, to) = (own_address(45), own_address(46));
    let opened = door(to).unwrap();
    let mut ways = new_ways();
    ways.ring(from, to).unwrap().send_all(&mut [packet(1), packet(2)]);
    assert!(!ways.send_rest() && ways.take_refused().is_empty());
    drop(super::accept(&opened).unwrap());
    ways.send_rest();
    let refused = ways.take_refused();
    let numbers: Vec<_> = refused.iter().map(|packet| packet.bytes[0]).collect();
    assert_eq!(numbers, [1, 2]);
    assert!(refused.iter().all(|packet| packet.addresses == Some((from, to))));
    assert!(ways.ring(from, to).is_none() && ways.is_done(), "it is not asked again at once");
}

/// What finds no room waits until the reader makes some, and is bounded. Nothing overtakes it.
#[test]
fn what_does_not_fit_waits() {
    let _files = no_process_starts();
    let (from, to) = (own_address(47), own_address(48));
    let opened = door(to).unwrap();
    let mut senders = new_senders();
    let mut ways = new_ways();
    const COUNT: u32 = 3_000;
    let numbered = |number: u32| {
        let mut bytes = vec![0; 4096];
        bytes[..4].copy_from_slice(&number.to_ne_bytes());
        Packet { addresses: Some((from, to)), bytes, is_sealed: true }
    };
    ways.ring(from, to).unwrap();
    attend(&mut senders, to, &opened);
    attend(&mut senders, to, &opened);
    for number in 0..COUNT {
        ways.ring(from, to).unwrap().send_all(&mut [numbered(number)]);
    }
    assert!(ways.is_full(from, to) && !ways.is_done());
    let mut next = 0;
    while next < COUNT {
        let before = next;
        senders.receive(|_, _, bytes| {
            assert_eq!(bytes[..4], next.to_ne_bytes());
            next += 1;
        });
        assert!(next > before || !ways.send_rest(), "{next}");
        ways.send_rest();
    }
    assert!(ways.is_done() && !ways.is_full(from, to));
    // Nobody reads any more: memory is bounded.
    for number in 0..20_000 {
        ways.ring(from, to).unwrap().send_all(&mut [numbered(number)]);
    }
    let (mut left, mut last) = (0, true);
    while last {
        last = false;
        senders.receive(|_, _, _| (left, last) = (left + 1, true));
        ways.send_rest();
    }
    assert!((16_384..18_000).contains(&left), "{left}");
    // What waits and is from an address that goes is dropped.
    for number in 0..2_000 {
        ways.ring(from, to).unwrap().send_all(&mut [numbered(number)]);
    }
    assert!(ways.is_full(from, to));
    ways.drop_rest(&[to]);
    assert!(ways.is_full(from, to));
    ways.drop_rest(&[from]);
    assert!(!ways.is_full(from, to));
}

#[test]
fn packets_that_go_other_ways_are_not_mixed() {
    let _files = no_process_starts();
    let (from, to, nobody) = (own_address(37), own_address(38), own_address(39));
    let opened = door(to).unwrap();
    let mut senders = new_senders();
    let mut place = Place::new(Arc::new(Inbox::new(Arc::new(Waker::new().unwrap()))), true);
    let packet = |to, number| Packet {
        addresses: Some((from, to)),
        bytes: vec![number; 20],
        is_sealed: true,
    };
    assert_eq!(place.send_some(&mut [packet(to, 0)]), (1, true));
    attend(&mut senders, to, &opened);
    attend(&mut senders, to, &opened);
    let mut packets: Vec<_> =
        (1..).zip([nobody, nobody, to, to, nobody]).map(|(n, to)| packet(to, n)).collect();
    assert_eq!(place.send_some(&mut packets), (2, false));
    assert_eq!(place.send_some(&mut packets[2..]), (2, true));
    assert_eq!(place.send_some(&mut packets[4..]), (1, false));
    assert_eq!(received(&mut senders), [0, 3, 4].map(|number| (from, to, vec![number; 20])));
}

#[test]
fn who_connects_again_replaces_its_earlier_connection() {
    let (from, to) = (own_address(22), own_address(23));
    let opened = door(to).unwrap();
    let mut senders = new_senders();
    let mut both = [new_ways(), new_ways()];
    for (ways, number) in both.iter_mut().zip(1..) {
        assert!(ways.ring(from, to).is_some());
        attend(&mut senders, to, &opened);
        attend(&mut senders, to, &opened);
        ways.ring(from, to).unwrap().send_all(&mut [packet(number)]);
    }
    let numbers: Vec<_> = received(&mut senders).iter().map(|packet| packet.2[0]).collect();
    assert_eq!(numbers, [1, 2]);
    assert_eq!(senders.count(), 1);
}

#[test]
fn guests_that_say_nothing_sensible_are_sent_away() {
    let _files = no_process_starts();
    let (from, to) = (own_address(24), own_address(25));
    let opened = door(to).unwrap();
    let mut senders = new_senders();
    let silent = connect(to).unwrap();
    let says_nonsense = connect(to).unwrap();
    send(&says_nonsense, b"?", new_senders().bell().file()).unwrap();
    let has_no_ring = connect(to).unwrap();
    let other = std::fs::File::open("/proc/self/exe").unwrap().into();
    introduce(&has_no_ring, from, &other).unwrap();
    drop(connect(to).unwrap());
    for _ in 0..3 {
        attend(&mut senders, to, &opened);
    }
    assert_eq!(senders.count(), 1, "the silent one");
    for ended in [&says_nonsense, &has_no_ring] {
        assert!(matches!(listen(ended), Heard::End));
    }
    assert!(matches!(listen(&silent), Heard::Nothing));
    drop(silent);
    attend(&mut senders, to, &opened);
    assert_eq!(senders.count(), 0);
}

/// A device has `MOST` connections at the most. Packets of other processes go through the kernel's network.
#[test]
fn there_are_not_too_many_connections() {
    let _files = no_process_starts();
    let to = own_address(26);
    let opened = door(to).unwrap();
    let mut senders = new_senders();
    let mut guests = Vec::new();
    for _ in 0..MOST + 10 {
        let mut ways = new_ways();
        assert!(ways.ring(own_address(27), to).is_some());
        guests.push(ways);
        senders.open(to, &opened);
    }
    assert!(senders.looks_at_doors());
    assert_eq!(senders.count(), MOST);
    drop(guests);
    attend(&mut senders, to, &opened);
    assert_eq!(senders.count(), 0);
}

#[test]
fn addresses_that_may_be_there_twice_have_no_door() {
    for address in ["fe80::1", "ff02::1", "224.0.0.1"] {
        assert!(door(address.parse().unwrap()).is_none());
    }
    assert!(name("2001:db8:ffff:ffff:ffff:ffff:ffff:ffff".parse().unwrap()).is_some());
}

/// Nobody is forgotten because another process comes.
#[test]
fn several_processes_have_a_ring_each() {
    let from = own_address(28);
    let addresses = [29, 30, 31].map(own_address);
    let doors = addresses.map(|to| door(to).unwrap());
    let mut senders = new_senders();
    let mut ways = new_ways();
    for &to in &addresses {
        assert!(ways.ring(from, to).is_some());
    }
    for _ in 0..2 {
        for (&to, door) in addresses.iter().zip(&doors) {
            attend(&mut senders, to, door);
        }
    }
    let other = own_address(32);
    let _door = door(other).unwrap();
    assert!(ways.ring(from, other).is_some());
    for (&to, number) in addresses.iter().zip(1..) {
        ways.ring(from, to).unwrap().send_all(&mut [packet(number)]);
    }
    let numbers: Vec<_> = received(&mut senders).iter().map(|packet| packet.2[0]).collect();
    assert_eq!(numbers, [1, 2, 3]);
}

/// Without descriptors nobody is let in, and nobody is woken for it again and again.
#[test]
fn who_cannot_be_let_in_waits() {
    let to = own_address(33);
    let opened = door(to).unwrap();
    let mut senders = new_senders();
    let closed = std::fs::File::open("/dev/null").unwrap().into();
    senders.open(to, &closed);
    assert!(!senders.looks_at_doors(), "that file is no door, which is an error as well");
    senders.open(to, &opened);
    assert!(!senders.looks_at_doors(), "a process waits at the other one");
    assert!(senders.stop_waiting() && senders.looks_at_doors() && !senders.stop_waiting());
}

/// A thread in another network namespace would find the doors of that one.
#[test]
fn threads_elsewhere_do_not_knock() {
    let (from, to) = (own_address(34), own_address(35));
    let opened = door(to).unwrap();
    let mut senders = new_senders();
    assert!(Ways::new((0, 0)).ring(from, to).is_none());
    senders.open(to, &opened);
    assert_eq!(senders.count(), 0);
    assert!(new_ways().ring(from, to).is_some());
    senders.open(to, &opened);
    assert_eq!(senders.count(), 1);
}

/// Who connects may be seen before it has said who it is.
#[test]
fn a_guest_has_time_to_introduce_itself() {
    let to = own_address(36);
    let opened = door(to).unwrap();
    let mut senders = new_senders();
    let _guest = connect(to).unwrap();
    senders.open(to, &opened);
    senders.attend(|_| true);
    assert_eq!(senders.count(), 1);
}

/// A device of this process whose thread has let in another, as if that were of another process.
struct Guest {
    device: Device,
    channel: CompletionChannel<'static>,
    ways: Ways,
    from: IpAddr,
}

impl Guest {
    fn new(name: &str, numbers: [u8; 2]) -> Self {
        let [from, to] = numbers.map(own_address);
        let device = Device::builder().name(name).address(to).build().unwrap();
        let channel = CompletionChannel::new(device.open().unwrap()).unwrap();
        let mut guest = Self { device, channel, ways: new_ways(), from };
        assert!(guest.ways.ring(from, to).is_some());
        wait_until(|| guest.ways.is_answered(from, to));
        guest
    }

    fn send(&mut self) {
        let to = self.device.address();
        self.ways.ring(self.from, to).unwrap().send_all(&mut [packet(1)]);
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
    let mut guest = Guest::new("stands-in", [37, 38]);
    guest.device.shared().driver().stop();
    wait_until(|| {
        let threads = std::fs::read_dir("/proc/self/task").unwrap();
        let mut names = threads
            .filter_map(|thread| std::fs::read_to_string(thread.ok()?.path().join("comm")).ok());
        !names.any(|name| name == "stands-in\n")
    });
    let file = guest.channel.as_raw_fd();
    std::thread::scope(|scope| {
        let sleeps = scope.spawn(move || before_sleep(&[file], None));
        for packets in 1..=3 {
            guest.send();
            guest.wait_for(packets);
        }
        assert!(!sleeps.is_finished());
        assert!(events::put(file, &Record::completion(0)));
        sleeps.join().unwrap();
    });
    guest.send();
    // Its deadline has passed, but it looks.
    before_sleep(&[file], Some(Instant::now()));
    guest.wait_for(4);
}

/// When nobody stands in any more, the device's thread receives: no packet waits for ever, whenever it comes.
#[test]
fn who_stood_in_hands_back() {
    let mut guest = Guest::new("hands-back", [39, 40]);
    let file = guest.channel.as_raw_fd();
    for packets in 1..=400 {
        std::thread::scope(|scope| {
            // From none at all to longer than the thread waits before it takes over.
            let pause = Duration::from_micros(packets % 20 * 100);
            let sleeps = move || before_sleep(&[file], Some(Instant::now() + pause));
            scope.spawn(sleeps);
            if packets % 3 == 0 {
                std::thread::sleep(Duration::from_micros(packets % 7 * 200));
            }
            guest.send();
        });
        guest.wait_for(packets);
    }
}

/// The device's thread may hear a bell that was for who stands in, who then does not wake, nor has asked for another one.
#[test]
fn who_stands_in_is_rung_again() {
    let mut guest = Guest::new("rung-again", [41, 42]);
    let file = guest.channel.as_raw_fd();
    std::thread::scope(|scope| {
        scope.spawn(move || before_sleep(&[file], None));
        // Also if a packet waits for ever: the scope waits for the thread.
        let _end = Put(file);
        for packets in 1..=1000 {
            guest.device.shared().driver().waker().wake();
            guest.send();
            guest.wait_for(packets);
        }
    });
}

/// Puts an event into a file when it is dropped.
struct Put(c_int);

impl Drop for Put {
    fn drop(&mut self) {
        events::put(self.0, &Record::completion(0));
    }
}

/// Else it would never sleep again.
#[test]
fn the_thread_hears_a_wake_up_once() {
    let device = Device::new().unwrap();
    let waker = device.shared().driver().waker();
    waker.wake();
    wait_until(|| !wait(&mut [wait_for(waker.fd())], Some(Duration::ZERO)));
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
