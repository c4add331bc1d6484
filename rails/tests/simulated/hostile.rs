//! A peer that breaks the agreement, or says too much, too fast, or nothing.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ibverbs::{AccessFlags, RemoteMemoryRegion};
use ibverbs_rails::{ControlStream, Event, RailsError, RemoteRailMemory, Transfer};

use super::frames::{Facts, Frame, Link, VERSION};
use super::support::{Pipe, Queue, World};
use super::{SECOND, memory, network, whole_write};

/// A side alone, and a stream whose other end is the test's.
fn alone(rails: usize) -> (World, [Queue; 2], Pipe) {
    let world = World::unconnected([rails, 1], network(), |builder| builder);
    let [near, far] = Pipe::pair();
    (world, [near.input.clone(), near.output.clone()], near_of(near, far))
}

/// The far end stays open as long as the test has the lines.
fn near_of(near: Pipe, far: Pipe) -> Pipe {
    std::mem::forget(far);
    near
}

pub(crate) fn facts(name: &str) -> Facts {
    let gids = vec!["::ffff:10.0.0.2".parse().unwrap()];
    Facts { name: name.into(), link: Link::Ethernet, gids, speed: 1000 }
}

/// The error with which the only peer has gone.
fn gone(events: &[Event]) -> Option<&RailsError> {
    events.iter().find_map(|event| match event {
        Event::Disconnected { error, .. } => Some(error),
        _ => None,
    })
}

#[test]
fn more_pairs_than_devices_are_refused() {
    for pairs in [vec![(0, 0); 26_000], vec![(0, 0), (0, 1)], vec![(0, 0), (1, 0)], vec![(0, 2)]] {
        let (mut world, [said, _], pipe) = alone(2);
        world.sides[0].connect_over(pipe).unwrap();
        let rails = vec![facts("one"), facts("two")];
        said.lock().unwrap().say(&Frame::Pairs { rails, pairs: pairs.clone() });
        for _ in 0..10 {
            world.step();
        }
        let error = gone(&world.events[0]).unwrap_or_else(|| panic!("{} pairs", pairs.len()));
        assert!(error.to_string().contains("what it cannot say"), "{error}");
    }
}

#[test]
fn names_addresses_and_reasons_are_cut() {
    let (mut world, [said, _], pipe) = alone(1);
    world.sides[0].connect_over(pipe).unwrap();
    let rails = vec![facts(&"é".repeat(20_000))];
    let mut line = said.lock().unwrap();
    line.say(&Frame::Pairs { rails, pairs: vec![(0, 0)] });
    line.say(&Frame::CannotOpen { pair: 0, epoch: 1, reason: "ü".repeat(30_000) });
    drop(line);
    // The pair is opened by the end of the turn that hears of it.
    for _ in 0..10 {
        world.step();
    }
    said.lock().unwrap().say(&Frame::CannotOpen { pair: 0, epoch: 1, reason: "ü".repeat(30_000) });
    for _ in 0..10 {
        world.step();
    }
    match gone(&world.events[0]) {
        Some(RailsError::AllRailsDown(reasons)) => {
            assert_eq!(reasons.len(), 1);
            assert!(reasons[0].0.len() <= 200 && reasons[0].1.len() <= 256, "{reasons:?}");
            assert!(reasons[0].1.contains("üüü"), "{reasons:?}");
        }
        other => panic!("{other:?}"),
    }
    // The peer names more devices than anybody has, or more addresses.
    let many = Facts { gids: vec!["fd00::1".parse().unwrap(); 4097], ..facts("many") };
    for rails in [vec![facts("x"); 256], vec![many]] {
        let (mut world, [said, _], pipe) = alone(1);
        world.sides[0].accept_over(pipe).unwrap();
        said.lock().unwrap().say(&Frame::Hello { version: VERSION, queue_pairs: 1, rails });
        for _ in 0..10 {
            world.step();
        }
        let error = gone(&world.events[0]).expect("it is refused");
        assert!(error.to_string().contains("what it cannot say"), "{error}");
    }
}

/// The peer says that it has tried all pairs, and has asked for none.
#[test]
fn a_peer_without_a_pair_is_not_connected() {
    let (mut world, [said, _], pipe) = alone(1);
    world.sides[0].accept_over(pipe).unwrap();
    let mut line = said.lock().unwrap();
    line.say(&Frame::Hello { version: VERSION, queue_pairs: 1, rails: vec![facts("one")] });
    let inbox = RemoteMemoryRegion::new(0, 32 * 4104, 1).unwrap().to_bytes();
    let memory = RemoteRailMemory::from_bytes(&inbox).unwrap();
    line.say(&Frame::Inbox { memory, longest: 4096 });
    line.say(&Frame::Ready);
    drop(line);
    for _ in 0..10 {
        world.step();
    }
    let error = gone(&world.events[0]).expect("no pair works");
    assert!(error.to_string().contains("what it cannot say"), "{error}");
}

/// Says the same over and over, faster than anybody reads.
struct Flood {
    first: Vec<u8>,
    over_and_over: Vec<u8>,
    at: usize,
    read: Arc<AtomicUsize>,
}

impl Read for Flood {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let read = self.read.fetch_add(to.len(), Ordering::Relaxed);
        if read > 64 << 20 {
            return Err(ErrorKind::WouldBlock.into());
        }
        for byte in to.iter_mut() {
            let after = self.at.checked_sub(self.first.len());
            *byte = match after {
                None => self.first[self.at],
                Some(after) => self.over_and_over[after % self.over_and_over.len()],
            };
            self.at += 1;
        }
        Ok(to.len())
    }
}

impl Write for Flood {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl ControlStream for Flood {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

#[test]
fn a_turn_ends_however_much_a_peer_says() {
    // Whole frames, and one that takes long to become whole.
    let many = Frame::Taken { below: 0 }.to_bytes();
    let mut long = 100_000_u32.to_be_bytes().to_vec();
    long.resize(100_004, 11);
    for over_and_over in [many, long] {
        let mut world = World::unconnected([1, 1], network(), |builder| builder);
        let read = Arc::<AtomicUsize>::default();
        let pairs = Frame::Pairs { rails: vec![facts("one")], pairs: vec![(0, 0)] };
        let flood = Flood { first: pairs.to_bytes(), over_and_over, at: 0, read: read.clone() };
        world.sides[0].connect_over(flood).unwrap();
        for _ in 0..20 {
            let before = read.load(Ordering::Relaxed);
            world.step();
            let read = read.load(Ordering::Relaxed) - before;
            assert!(read <= 1 << 20, "{read} bytes in one turn");
        }
        let read = read.load(Ordering::Relaxed);
        let is_gone = gone(&world.events[0]).is_some();
        assert!(is_gone || read > 4096, "it is listened to: {read} bytes");
    }
}

/// Connections as a port scanner makes them: the program never learns that they exist.
#[test]
fn a_peer_that_says_nothing_is_dropped() {
    let mut world = World::unconnected([1, 1], network(), |builder| builder);
    let lines: Vec<_> = (0..100).map(|_| Pipe::pair()).collect();
    let mut far = Vec::new();
    for (number, [near, other]) in lines.into_iter().enumerate() {
        world.sides[0].accept_over(near).unwrap();
        // One peer says its devices, and then nothing.
        if number == 0 {
            let hello =
                Frame::Hello { version: VERSION, queue_pairs: 1, rails: vec![facts("one")] };
            other.output.lock().unwrap().say(&hello);
        }
        far.push(other);
    }
    let dropped = |world: &World| {
        let is_dropped = |event: &&Event| {
            matches!(event, Event::Disconnected { error: RailsError::Control(_), .. })
        };
        world.events[0].iter().filter(is_dropped).count()
    };
    world.step = SECOND / 10;
    let later = world.network.now() + 8 * SECOND;
    world.until(10 * SECOND, |world| world.network.now() >= later);
    assert_eq!(dropped(&world), 0, "they have time");
    world.until(5 * SECOND, |world| dropped(world) == 99);
    assert!(far[1..].iter().all(|far| far.input.lock().unwrap().is_closed));
    world.until(60 * SECOND, |world| dropped(world) == 100);
    assert!(far[0].input.lock().unwrap().is_closed);
    let error = gone(&world.events[0]).unwrap();
    assert!(error.to_string().contains("was not connected"), "{error}");
}

/// A connected world, whose sides have two rails, and what each side reads.
fn connected() -> (World, [Queue; 2]) {
    let mut world = World::unconnected([2, 2], network(), |builder| builder);
    let lines = world.connect();
    (world, lines)
}

/// Time passes, in which the second side's program takes nothing.
fn steps_without_the_program(world: &mut World, steps: usize) {
    for _ in 0..steps {
        world.network.advance(world.step);
        let now = world.now();
        world.sides.iter_mut().for_each(|side| side.turn(now));
    }
}

#[test]
fn messages_without_credit_end_the_connection() {
    let (mut world, [said, _]) = connected();
    let peer = world.peers[0];
    for number in 0..2000_u32 {
        if world.sides[0].send(peer, number.to_le_bytes()).is_err() {
            break;
        }
    }
    // The sender is told that all were taken, again and again.
    let mut below = 0;
    for _ in 0..200 {
        steps_without_the_program(&mut world, 20);
        below += 32;
        said.lock().unwrap().say(&Frame::Taken { below });
    }
    let events: Vec<_> = std::iter::from_fn(|| world.sides[1].next_event()).collect();
    let got = events.iter().filter(|event| matches!(event, Event::Message { .. })).count();
    assert_eq!(got, 32);
    let error = gone(&events).expect("it is dropped");
    assert!(error.to_string().contains("what it cannot say"), "{error}");
}

#[test]
fn notifications_wait_for_the_program_and_never_without_bound() {
    let (mut world, [said, _]) = connected();
    let [ours, theirs] = memory(&world, 4096);
    let peer = world.peers[0];
    for number in 0..500 {
        world.sides[0].post(peer, whole_write(&ours, &theirs).notify(number)).unwrap();
    }
    steps_without_the_program(&mut world, 1000);
    let ended = std::iter::from_fn(|| world.sides[0].next_event()).count();
    assert_eq!(ended, 48, "so many can wait for a program that takes none");
    // The sender is told that they were taken. What comes then is none of the numbers that it may use.
    for round in 1..=8 {
        said.lock().unwrap().say(&Frame::Confirmed { below: 48 * round });
        steps_without_the_program(&mut world, 500);
    }
    let events: Vec<_> = std::iter::from_fn(|| world.sides[1].next_event()).collect();
    let got = events.iter().filter(|event| matches!(event, Event::Notified { .. })).count();
    assert_eq!(got, 48, "{events:?}");
}

#[test]
fn a_program_that_takes_notifications_late_gets_all() {
    let (mut world, _) = connected();
    let [ours, theirs] = memory(&world, 4096);
    let peer = world.peers[0];
    for number in 0..300 {
        world.sides[0].post(peer, whole_write(&ours, &theirs).notify(number)).unwrap();
    }
    let mut tags = Vec::new();
    while tags.len() < 300 {
        steps_without_the_program(&mut world, 1);
        if let Some(Event::Notified { tag, .. }) = world.sides[1].next_event() {
            tags.push(tag);
        }
    }
    tags.sort_unstable();
    assert_eq!(tags, (0..300).collect::<Vec<_>>());
}

#[test]
fn rails_that_change_fill_no_memory() {
    let (mut world, _) = connected();
    // The last of each rail.
    for _ in 0..30 {
        for up in [false, true] {
            let [one, other] = [&world.devices[0][0], &world.devices[1][0]];
            if up {
                world.network.heal(one, other)
            } else {
                world.network.partition(one, other)
            }
            let peer = world.peers[0];
            world.sides[0].send(peer, [0]).unwrap();
            let mut steps = 0;
            while world.sides[0].rails_up(peer)[0] != up {
                world.step = Duration::from_millis(1);
                steps_without_the_program(&mut world, 1);
                // The other side takes the messages.
                while world.sides[1].receive(world.peers[1], world.now()).is_ok() {}
                steps += 1;
                assert!(steps < 100_000);
            }
        }
    }
    let events: Vec<_> = std::iter::from_fn(|| world.sides[0].next_event()).collect();
    let changes = |event: &&Event| matches!(event, Event::RailUp { .. } | Event::RailDown { .. });
    let changes: Vec<_> = events.iter().filter(changes).collect();
    assert!(changes.len() <= 4, "{changes:?}");
    assert!(matches!(changes.last(), Some(Event::RailUp { device: 0, .. })), "{changes:?}");
}

#[test]
fn a_long_reason_is_cut_and_shared() {
    let mut world = World::unconnected([1, 1], network(), |builder| builder);
    let [said, _] = world.connect();
    let [ours, theirs] = memory(&world, 1 << 20);
    let peer = world.peers[0];
    for _ in 0..50 {
        world.sides[0].post(peer, whole_write(&ours, &theirs)).unwrap();
    }
    said.lock().unwrap().say(&Frame::Down { pair: 0, epoch: 1, reason: "no ".repeat(30_000) });
    world.until(SECOND, |world| world.ended().iter().filter(|&&is_ok| !is_ok).count() > 40);
    let reasons = world.events[0].iter().filter_map(|event| match event {
        Event::Ended { result: Err(RailsError::AllRailsDown(reasons)), .. } => Some(reasons),
        _ => None,
    });
    let reasons: Vec<_> = reasons.collect();
    assert!(reasons.iter().all(|other| Arc::ptr_eq(other, reasons[0])));
    assert!(reasons[0][0].1.len() <= 256 && reasons[0][0].1.contains("no no"), "{:?}", reasons[0]);
}

/// The peer is told its slots for messages: it cannot write behind them.
#[test]
fn a_peer_writes_its_slots_and_nothing_behind_them() {
    let (mut world, [said, _]) = connected();
    let frames = Frame::all_of(&said.lock().unwrap().said);
    let inbox = frames.into_iter().find_map(|frame| match frame {
        Frame::Inbox { memory, .. } => Some(memory),
        _ => None,
    });
    let inbox = inbox.expect("it was told").to_bytes();
    let len = 4096;
    let [ours, _] = memory(&world, len);
    let peer = world.peers[0];
    let mut write = |start: fn(&RemoteMemoryRegion) -> u64| {
        let parts = inbox.chunks(20).flat_map(|bytes| {
            let part = RemoteMemoryRegion::from_bytes(bytes).unwrap();
            RemoteMemoryRegion::new(start(&part), len as u64, part.rkey()).unwrap().to_bytes()
        });
        let remote = RemoteRailMemory::from_bytes(&parts.collect::<Vec<_>>()).unwrap();
        let write = Transfer::write(ours.slice(..).unwrap(), remote);
        let id = world.sides[0].post(peer, write).unwrap();
        let is_it =
            |event: &Event| matches!(event, Event::Ended { transfer, .. } if *transfer == id);
        world.until(SECOND, |world| world.events[0].iter().any(is_it));
        let end = world.events[0].iter().find_map(|event| match event {
            Event::Ended { transfer, result, .. } if *transfer == id => Some(result.is_ok()),
            _ => None,
        });
        end.unwrap()
    };
    assert!(write(RemoteMemoryRegion::address), "its slots are its own");
    assert!(!write(|part| part.address() + part.length()), "what is behind them is not");
}

#[test]
fn no_length_overflows() {
    let world = World::unconnected([2, 1], network(), |builder| builder);
    for len in [usize::MAX, usize::MAX / 2, isize::MAX as usize, 1 << 62] {
        let error = world.sides[0].allocate(len, AccessFlags::REMOTE_WRITE).unwrap_err();
        assert!(matches!(error, RailsError::Verbs { .. }), "{error}");
    }
}
