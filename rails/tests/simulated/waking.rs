//! Which files wake a side that sleeps. If nobody reads a file, it stays readable, and would wake the side again and again.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ibverbs::RemoteMemoryRegion;
use ibverbs_rails::{ControlStream, Event, Rails, RailsBuilder, RailsError};
use ibverbs_software::{Verb, When};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::frames::{Ends, Frame, VERSION};
use super::hostile::facts;
use super::support::{Pipe, Socket, World};
use super::{SECOND, network};

/// Arms a side, looks once more, and says whether its file is readable then.
fn is_awake(side: &mut Rails, now: Instant) -> bool {
    let _ = side.arm();
    side.turn(now);
    wakes_within(side, Duration::ZERO)
}

fn wakes_within(side: &Rails, time: Duration) -> bool {
    let timeout = Timespec::try_from(time).unwrap();
    poll(&mut [PollFd::new(side, PollFlags::IN)], Some(&timeout)).unwrap() > 0
}

/// So late that no timer ends while the test runs.
fn later() -> Instant {
    Instant::now() + 3600 * SECOND
}

/// A message of the first side makes the second one's file readable.
fn a_message_wakes(world: &mut World) {
    let peer = world.peers[0];
    let now = world.now();
    world.sides[0].turn(now);
    world.sides[0].send(peer, *b"wake up").unwrap();
    world.network.advance(SECOND / 100);
    assert!(wakes_within(&world.sides[1], Duration::ZERO), "a message wakes nobody");
}

#[test]
fn a_device_that_is_gone_keeps_nobody_awake_and_the_others_wake() {
    for gone in 0..2 {
        let mut world = World::new(2, network());
        let (now, peer) = (world.now(), world.peers[1]);
        assert!(!is_awake(&mut world.sides[1], now));
        world.devices[1][gone].remove();
        let side = &mut world.sides[1];
        let error = side.arm().unwrap_err();
        assert!(matches!(error, RailsError::Verbs { .. }), "{error}");
        side.turn(now);
        assert_eq!(side.rails_up(peer), [gone != 0, gone != 1]);
        assert!(!is_awake(side, now), "device {gone} is gone, and keeps it awake");
        a_message_wakes(&mut world);
    }
}

#[test]
fn a_device_that_could_not_be_armed_once_wakes_again() {
    let mut world = World::new(2, network());
    let (now, peer) = (world.now(), world.peers[1]);
    world.devices[1][0].fail(Verb::ReqNotifyCq, 12, When::Before, 1); // ENOMEM
    let side = &mut world.sides[1];
    let error = side.arm().unwrap_err();
    assert!(matches!(error, RailsError::Verbs { .. }), "{error}");
    side.turn(now);
    assert_eq!(side.rails_up(peer), [false, true], "its events would be missed");
    world.until(SECOND, |world| world.sides.iter().all(|side| side.rails_up(peer) == [true; 2]));
    let now = world.now();
    assert!(!is_awake(&mut world.sides[1], now));
    // Messages go by the first pair.
    a_message_wakes(&mut world);
}

fn hello() -> Vec<u8> {
    Frame::Hello { version: VERSION, queue_pairs: 1, rails: vec![facts("one")] }.to_bytes()
}

/// It is answered that a pair without queue pairs cannot be opened.
fn impossible_open() -> Vec<u8> {
    let probe = RemoteMemoryRegion::new(0, 8, 1).unwrap();
    let ends = Ends { endpoints: Vec::new(), probe };
    Frame::Open { pair: 0, epoch: 1, ends }.to_bytes()
}

#[test]
fn a_peer_that_says_much_and_reads_nothing_keeps_nobody_awake_and_goes() {
    let mut world = World::unconnected([1, 1], network(), |builder| builder);
    let side = &mut world.sides[0];
    let (near, mut far) = Socket::pair();
    side.accept_over(near).unwrap();
    let now = later();
    // Until neither side takes more.
    let (mut unsaid, mut turns) = (hello(), 0);
    while turns < 5 {
        side.turn(now);
        turns += 1;
        match far.write(&unsaid) {
            Ok(length) => drop(unsaid.drain(..length)),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        if unsaid.is_empty() {
            (unsaid, turns) = (impossible_open().repeat(100), 0);
        }
    }
    assert!(!is_awake(side, now), "what the peer says is not listened to, and keeps it awake");
    side.turn(now + 9 * SECOND);
    assert!(side.next_event().is_none(), "it has time");
    side.turn(now + 10 * SECOND);
    match side.next_event() {
        Some(Event::Disconnected { error, .. }) => {
            assert!(error.to_string().contains("does not read"), "{error}");
        }
        other => panic!("{other:?}"),
    }
}

/// A stream that takes nothing as long as its peer does not read.
struct Slow {
    socket: Socket,
    is_deaf: Arc<AtomicBool>,
    /// The bytes that wait.
    unsaid: Arc<AtomicUsize>,
}

impl Read for Slow {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.socket.read(to)
    }
}

impl Write for Slow {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.unsaid.store(bytes.len(), Ordering::Relaxed);
        if self.is_deaf.load(Ordering::Relaxed) {
            return Err(ErrorKind::WouldBlock.into());
        }
        self.socket.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl ControlStream for Slow {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.socket.descriptor()
    }
}

/// It is not listened to in the middle of what was read of its words.
#[test]
fn a_peer_that_reads_again_gets_all_answers() {
    let mut world = World::unconnected([1, 1], network(), |builder| builder);
    let side = &mut world.sides[0];
    let (socket, mut far) = Socket::pair();
    let (is_deaf, unsaid) = (Arc::new(AtomicBool::new(true)), Arc::<AtomicUsize>::default());
    let stream = Slow { socket, is_deaf: is_deaf.clone(), unsaid: unsaid.clone() };
    side.accept_over(stream).unwrap();
    far.write_all(&hello()).unwrap();
    let now = later();
    let mut asked = 0;
    while unsaid.load(Ordering::Relaxed) <= 128 << 10 {
        far.write_all(&impossible_open().repeat(64)).unwrap();
        asked += 64;
        (0..3).for_each(|_| side.turn(now));
    }
    is_deaf.store(false, Ordering::Relaxed);
    let (mut said, mut bytes) = (Vec::new(), [0; 1 << 16]);
    let all = asked + 2; // the devices, and the slots for messages
    while Frame::all_of(&said).len() < all {
        let is_awake = is_awake(side, now);
        if let Ok(length) = far.read(&mut bytes) {
            said.extend(&bytes[..length]);
        } else {
            let count = Frame::all_of(&said).len();
            let wakes = is_awake || wakes_within(side, 30 * SECOND);
            assert!(wakes, "{count} of {all} answers, and it sleeps");
        }
    }
}

/// So many handshakes that others have to wait, and a peer that does.
fn held(now: Instant) -> (World, Vec<Pipe>, UnixStream) {
    let settings = |builder: RailsBuilder| builder.peers(65).longest_message(64);
    let mut world = World::unconnected([1, 1], network(), settings);
    let mut pipes = Vec::new();
    for _ in 0..64 {
        let [near, far] = Pipe::pair();
        world.sides[0].accept_over(near).unwrap();
        far.output.lock().unwrap().bytes.extend(hello());
        pipes.push(far);
    }
    let (near, mut far) = Socket::pair();
    world.sides[0].accept_over(near).unwrap();
    far.write_all(&hello()).unwrap();
    for _ in 0..3 {
        world.sides[0].turn(now);
    }
    assert_eq!(far.read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock, "it has to wait");
    (world, pipes, far)
}

#[test]
fn a_peer_that_has_to_wait_and_resets_keeps_nobody_awake() {
    let now = later();
    let (mut world, mut pipes, far) = held(now);
    let side = &mut world.sides[0];
    drop(far);
    assert!(!is_awake(side, now), "a stream that has to wait keeps it awake");
    // When there is room for it, its end is seen.
    pipes.pop();
    for _ in 0..3 {
        side.turn(now);
    }
    let ended = std::iter::from_fn(|| side.next_event());
    let ended = ended.filter(|event| matches!(event, Event::Disconnected { .. })).count();
    assert_eq!(ended, 2);
}

#[test]
fn a_peer_that_has_to_wait_is_heard_when_others_took_too_long() {
    // The others have a second left.
    let (mut world, _pipes, mut far) = held(Instant::now() - 9 * SECOND);
    let side = &mut world.sides[0];
    loop {
        let is_awake = is_awake(side, Instant::now());
        if far.read(&mut [0]).is_ok() {
            break;
        }
        assert!(is_awake || wakes_within(side, 30 * SECOND), "nobody makes room for it");
    }
}
