//! Rails on a network in virtual time: speed, failures, and what returns.

mod between;
mod closing;
mod dmabuf;
mod frames;
mod harness;
mod hostile;
mod messages;
mod support;
mod waking;

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use frames::Frame;
use ibverbs::memory::SharedMemory;
use ibverbs::{
    AccessFlags,
    settings::{AckTimeout, MaxAckRetries},
};
use ibverbs_rails::{Event, RailMemory, Rails, RailsBuilder, RailsError, Transfer};
use ibverbs_software::{Network, Verb, When};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use support::World;

const SECOND: Duration = Duration::from_secs(1);
/// The bandwidth of each rail, in bytes per second.
const BANDWIDTH: u64 = 1_250_000_000;

fn network() -> Network {
    let builder = Network::builder().manual().trace_bytes(0);
    builder.delay(Duration::from_micros(2)).bandwidth(BANDWIDTH).build()
}

/// Memory of both sides: ours with a pattern, the peer's zeroed.
fn memory(world: &World, len: usize) -> [RailMemory; 2] {
    let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
    let [ours, theirs] = world.sides.each_ref().map(|side| side.allocate(len, access).unwrap());
    ours.write(0, &pattern(len)).unwrap();
    [ours, theirs]
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 + i / 4093) as u8).collect()
}

fn bytes(memory: &RailMemory) -> Vec<u8> {
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes).unwrap();
    bytes
}

fn whole_write(ours: &RailMemory, theirs: &RailMemory) -> Transfer {
    Transfer::write(ours.slice(..).unwrap(), theirs.remote())
}

/// Returns the time that a write of `len` bytes takes on `rails` rails.
fn time_of_write(rails: usize, len: usize) -> Duration {
    let mut world = World::new(rails, network());
    let [ours, theirs] = memory(&world, len);
    let peer = world.peers[0];
    world.sides[0].post(peer, whole_write(&ours, &theirs)).unwrap();
    let time = world.until(SECOND, |world| world.ended() == [true]);
    assert_eq!(bytes(&theirs), pattern(len));
    time
}

#[test]
fn more_rails_are_faster() {
    const LEN: usize = 16 << 20;
    let one = time_of_write(1, LEN);
    for (rails, least) in [(2, 1.95), (4, 3.8), (8, 7.5)] {
        let times = one.as_secs_f64() / time_of_write(rails, LEN).as_secs_f64();
        println!("{rails} rails carry {times:.2} times what one does");
        assert!(times >= least, "{rails} rails: {times:.2}");
    }
}

/// Both sides register parts of memfds, which rails have not allocated.
#[test]
fn memory_that_is_there_goes_over_all_rails() {
    const LEN: usize = 4 << 20;
    const START: usize = 4096 + 24;
    let memfd = || {
        let file = File::from(memfd_create("rails", MemfdFlags::ALLOW_SEALING).unwrap());
        file.set_len(2 * LEN as u64).unwrap();
        fcntl_add_seals(&file, SealFlags::SHRINK).unwrap();
        file
    };
    let mut world = World::new(3, network());
    let files = [memfd(), memfd()];
    files[0].write_all_at(&pattern(LEN), START as u64).unwrap();
    let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
    let [ours, theirs] = [0, 1].map(|side| {
        let memory = SharedMemory::map_memfd(files[side].as_fd(), 0, 2 * LEN).unwrap();
        let rails: &Rails = &world.sides[side];
        for range in [0..0, 2 * LEN..2 * LEN + 1] {
            let error = rails.register(&memory, range, access).unwrap_err();
            assert!(matches!(error, RailsError::InvalidInput(_)), "{error}");
        }
        rails.register(&memory, START..START + LEN, access).unwrap()
    });
    let peer = world.peers[0];
    world.sides[0].post(peer, whole_write(&ours, &theirs)).unwrap();
    world.until(SECOND, |world| world.ended() == [true]);
    let mut arrived = vec![0; LEN];
    files[1].read_exact_at(&mut arrived, START as u64).unwrap();
    assert!(arrived == pattern(LEN));
    assert!(world.sides[0].bytes_carried(peer).iter().all(|&bytes| bytes > 0));
    // And back, beside what it was.
    files[0].write_all_at(&vec![0; LEN], START as u64).unwrap();
    let read = Transfer::read(ours.slice(..).unwrap(), theirs.remote());
    world.sides[0].post(peer, read).unwrap();
    world.until(SECOND, |world| world.ended() == [true, true]);
    assert!(bytes(&ours) == pattern(LEN));
    let mut around = [1; 24];
    files[0].read_exact_at(&mut around, START as u64 - 24).unwrap();
    assert_eq!(around, [0; 24]);
}

#[test]
fn a_slow_rail_gets_less() {
    const LEN: usize = 16 << 20;
    let one = time_of_write(1, LEN);
    let mut world = World::new(4, network());
    // Both directions of the first rail have half the speed of the others.
    let mut half = world.network.conditions();
    half.bandwidth = Some(BANDWIDTH / 2);
    for (from, to) in [(0, 1), (1, 0)] {
        let (from, to) = (&world.devices[from][0], &world.devices[to][0]);
        world.network.set_conditions_between(from, to, half);
    }
    let [ours, theirs] = memory(&world, LEN);
    let peer = world.peers[0];
    // The first transfer shows the rails' speed.
    for _ in 0..2 {
        world.sides[0].post(peer, whole_write(&ours, &theirs)).unwrap();
        let ended = world.ended().len() + 1;
        let time = world.until(SECOND, |world| world.ended().len() == ended);
        let part = one.as_secs_f64() / time.as_secs_f64() / 3.5;
        println!("three rails and a half carry {part:.3} of their sum");
        assert!(part >= 0.95, "{part:.3}");
    }
    assert_eq!(bytes(&theirs), pattern(LEN));
}

/// Rails die and return at random times. Each transfer ends, its bytes are right, and its notification comes once.
#[test]
fn random_deaths_cost_no_transfer() {
    const LEN: usize = 256 << 10;
    let seeds = std::env::var("IBVERBS_RAILS_SEEDS").ok().map(|seeds| seeds.parse().unwrap());
    for seed in 0..seeds.unwrap_or(15_u64) {
        let mut random = fastrand::Rng::with_seed(seed);
        let rails = random.usize(2..=4);
        let mut world = World::new(rails, network());
        let [ours, theirs] = memory(&world, LEN);
        let peer = world.peers[0];
        // One rail always lives.
        let lives = random.usize(..rails);
        for tag in 0..3 {
            theirs.write(0, &vec![0; LEN]).unwrap();
            world.sides[0].post(peer, whole_write(&ours, &theirs).notify(tag)).unwrap();
            for _ in 0..random.usize(..4) {
                let at = world.network.now() + Duration::from_micros(random.u64(..150));
                world.step = Duration::from_micros(5);
                world.until(SECOND, |world| world.network.now() >= at);
                let rail = random.usize(..rails);
                let [one, other] = [&world.devices[0][rail], &world.devices[1][rail]];
                if rail == lives || random.bool() {
                    world.network.heal(one, other);
                } else if random.bool() {
                    world.network.partition_one_way(one, other);
                } else {
                    world.network.partition(one, other);
                }
            }
            world.step = Duration::from_micros(500);
            let ended = usize::from(tag) + 1;
            world.until(20 * SECOND, |world| {
                world.ended().len() == ended && world.notified().len() == ended
            });
            assert_eq!(bytes(&theirs), pattern(LEN), "seed {seed}");
        }
        assert_eq!(
            (world.ended(), world.notified()),
            (vec![true; 3], vec![0, 1, 2]),
            "seed {seed}"
        );
        world.network.heal_all();
        world.until(60 * SECOND, |world| world.sides[0].rails_up(peer) == vec![true; rails]);
    }
}

#[test]
fn reads_and_lists_are_spread_too() {
    let mut world = World::new(3, network());
    let [ours, theirs] = memory(&world, 1 << 20);
    theirs.write(0, &pattern(1 << 20)).unwrap();
    ours.write(0, &vec![0; 1 << 20]).unwrap();
    let peer = world.peers[0];
    // Pieces of any length, in another order.
    let cuts = [0, 1, 4097, 70_000, 500_001, 1 << 20];
    let parts = cuts.windows(2).rev().map(|cut| {
        let range = cut[0]..cut[1];
        (ours.slice(range.clone()).unwrap(), theirs.remote().slice(range).unwrap())
    });
    world.sides[0].post(peer, Transfer::read_list(parts)).unwrap();
    world.until(SECOND, |world| world.ended() == [true]);
    assert_eq!(bytes(&ours), pattern(1 << 20));
}

#[test]
fn each_notified_write_is_told_once() {
    let mut world = World::new(4, network());
    let [ours, theirs] = memory(&world, 1 << 20);
    let peer = world.peers[0];
    for tag in 0..300 {
        let len = 1 + usize::from(tag) * 1000;
        let local = ours.slice(..len).unwrap();
        let remote = theirs.remote().slice(..len).unwrap();
        world.sides[0].post(peer, Transfer::write(local, remote).notify(tag)).unwrap();
    }
    world.until(SECOND, |world| world.ended().len() == 300 && world.notified().len() == 300);
    let mut tags = world.notified();
    tags.sort_unstable();
    assert_eq!(tags, (0..300).collect::<Vec<_>>());
    assert!(world.ended().iter().all(|&ok| ok));
}

#[test]
fn a_rail_that_dies_costs_no_transfer_and_returns() {
    const LEN: usize = 4 << 20;
    for dies_after in [0, 100, 300, 700] {
        let mut world = World::new(2, network());
        let [ours, theirs] = memory(&world, LEN);
        let peer = world.peers[0];
        world.sides[0].post(peer, whole_write(&ours, &theirs).notify(7)).unwrap();
        let dies_at = world.network.now() + Duration::from_micros(dies_after);
        world.until(SECOND, |world| world.network.now() >= dies_at);
        let cut = |world: &World| {
            world.network.partition(&world.devices[0][0], &world.devices[1][0]);
        };
        cut(&world);
        world.step = Duration::from_micros(500);
        world.until(10 * SECOND, |world| world.ended() == [true] && world.notified() == [7]);
        assert_eq!(bytes(&theirs), pattern(LEN));
        let down = |event: &Event| matches!(event, Event::RailDown { device: 0, .. });
        world.until(10 * SECOND, |world| world.events.iter().all(|side| side.iter().any(down)));
        assert_eq!(world.sides[0].rails_up(peer), [false, true]);
        world.network.heal_all();
        world.until(20 * SECOND, |world| world.sides[0].rails_up(peer) == [true, true]);
        // The rail carries data again.
        world.step = Duration::from_micros(5);
        world.sides[0].post(peer, whole_write(&ours, &theirs).notify(8)).unwrap();
        world.until(SECOND, |world| world.ended() == [true, true] && world.notified() == [7, 8]);
    }
}

/// Each rail dies before each of its packets. The transfer ends in its time, and two timeouts at most.
#[test]
fn a_rail_that_dies_at_any_packet_costs_no_transfer() {
    const LEN: usize = 192 << 10;
    // 2.1 ms per attempt, and two of them.
    const TIMEOUT: Duration = Duration::from_micros(2 * 4096 * 512 / 1000);
    let soon = |rails: RailsBuilder| {
        let retries = MaxAckRetries::new(1).unwrap();
        rails.ack_timeout(AckTimeout::new(9).unwrap()).max_ack_retries(retries)
    };
    let begin = |world: &mut World| {
        let [ours, theirs] = memory(world, LEN);
        world.sides[0].post(world.peers[0], whole_write(&ours, &theirs).notify(1)).unwrap();
        theirs
    };
    let has_ended = |world: &World| world.ended() == [true] && !world.notified().is_empty();
    let mut world = World::with(2, network(), soon);
    let _theirs = begin(&mut world);
    let healthy = world.until(SECOND, has_ended);
    // A packet takes more than a microsecond. "script/soak rails" tries each of them.
    let every = if std::env::var_os("IBVERBS_RAILS_SEEDS").is_some() { 1 } else { 4 };
    let (mut longest, mut deaths) = (Duration::ZERO, 0);
    for rail in 0..2 {
        for at in (rail as u64..=healthy.as_micros() as u64).step_by(every) {
            deaths += 1;
            let mut world = World::with(2, network(), soon);
            let theirs = begin(&mut world);
            let began = world.network.now();
            let dies_at = began + Duration::from_micros(at);
            while world.network.now() < dies_at {
                world.step = (dies_at - world.network.now()).min(Duration::from_micros(5));
                world.step();
            }
            world.network.partition(&world.devices[0][rail], &world.devices[1][rail]);
            world.step = Duration::from_micros(200);
            world.until(SECOND, has_ended);
            let lost = (world.network.now() - began).saturating_sub(healthy);
            assert!(lost < 2 * TIMEOUT, "rail {rail} at {at}: {lost:?}");
            longest = longest.max(lost);
            assert_eq!(bytes(&theirs), pattern(LEN));
            // No notification comes a second time.
            let later = world.network.now() + 2 * TIMEOUT;
            world.until(SECOND, |world| world.network.now() >= later);
            assert_eq!(world.notified(), [1]);
        }
    }
    println!("{deaths} deaths, the longest loss of time {longest:?}");
}

#[test]
fn all_rails_but_one_die() {
    for lives in 0..4 {
        let mut world = World::new(4, network());
        let [ours, theirs] = memory(&world, 4 << 20);
        let peer = world.peers[0];
        world.sides[0].post(peer, whole_write(&ours, &theirs).notify(1)).unwrap();
        for rail in (0..4).filter(|&rail| rail != lives) {
            let at = world.network.now() + Duration::from_micros(100);
            world.until(SECOND, |world| world.network.now() >= at);
            world.network.partition(&world.devices[0][rail], &world.devices[1][rail]);
        }
        world.step = Duration::from_micros(500);
        world.until(20 * SECOND, |world| world.ended() == [true] && world.notified() == [1]);
        assert_eq!(bytes(&theirs), pattern(4 << 20));
        let up: Vec<_> = (0..4).map(|rail| rail == lives).collect();
        world.until(20 * SECOND, |world| world.sides[0].rails_up(peer) == up);
        assert_eq!(world.notified(), [1]);
        // The last one carries on alone.
        world.sides[0].post(peer, whole_write(&ours, &theirs).notify(2)).unwrap();
        world.until(20 * SECOND, |world| world.notified() == [1, 2]);
    }
}

#[test]
fn two_queue_pairs_per_pair_carry_and_fail_together() {
    let mut world = World::with(2, network(), |rails| rails.queue_pairs(2));
    let [ours, theirs] = memory(&world, 4 << 20);
    let peer = world.peers[0];
    let queue_pairs = |world: &World| -> u32 {
        world.devices[0].iter().map(|device| device.live_objects().queue_pairs).sum()
    };
    assert_eq!(queue_pairs(&world), 4);
    world.sides[0].post(peer, whole_write(&ours, &theirs).notify(1)).unwrap();
    world.until(SECOND, |world| world.ended() == [true] && world.notified() == [1]);
    assert_eq!(bytes(&theirs), pattern(4 << 20));
    theirs.write(0, &vec![0; 4 << 20]).unwrap();
    world.sides[0].post(peer, whole_write(&ours, &theirs).notify(2)).unwrap();
    world.network.partition(&world.devices[0][0], &world.devices[1][0]);
    world.step = Duration::from_micros(500);
    world.until(20 * SECOND, |world| world.notified() == [1, 2]);
    assert_eq!(bytes(&theirs), pattern(4 << 20));
    world.until(SECOND, |world| world.sides[0].rails_up(peer) == [false, true]);
    assert_eq!(queue_pairs(&world), 2);
    // A side with another number is refused, and both say so.
    let [one, other] = [2, 3].map(|number| Rails::builder().queue_pairs(number));
    let [one, other] =
        [one.device(world.devices[0][1].name()), other.device(world.devices[1][1].name())];
    let (mut one, mut other) = (one.build().unwrap(), other.build().unwrap());
    let [near, far] = support::Pipe::pair();
    one.connect_over(near).unwrap();
    other.accept_over(far).unwrap();
    for _ in 0..3 {
        one.turn(world.now());
        other.turn(world.now());
    }
    for side in [&mut one, &mut other] {
        let Some(Event::Disconnected { error: RailsError::Refused(why), .. }) = side.next_event()
        else {
            panic!("it is refused")
        };
        assert!(why.contains("queue pairs per pair of devices"), "{why}");
    }
}

#[test]
fn the_last_rail_gone_says_why_each_went() {
    let mut world = World::new(2, network());
    let [ours, theirs] = memory(&world, 1 << 20);
    let peer = world.peers[0];
    world.sides[0].post(peer, whole_write(&ours, &theirs)).unwrap();
    for rail in 0..2 {
        world.network.partition(&world.devices[0][rail], &world.devices[1][rail]);
    }
    world.step = Duration::from_micros(500);
    world.until(20 * SECOND, |world| world.ended() == [false]);
    let reasons = world.events[0].iter().find_map(|event| match event {
        Event::Ended { result: Err(RailsError::AllRailsDown(reasons)), .. } => Some(reasons),
        _ => None,
    });
    let reasons = reasons.expect("it says so");
    assert_eq!(reasons.len(), 2);
    for ((pair, reason), devices) in reasons.iter().zip(0..) {
        assert!(pair.starts_with(&world.devices[0][devices].name()), "{pair}");
        assert!(reason.contains("RetryExceeded"), "{reason}");
    }
    let refused = world.sides[0].post(peer, whole_write(&ours, &theirs));
    assert!(matches!(refused, Err(RailsError::AllRailsDown(_))), "{refused:?}");
    world.network.heal_all();
    world.until(20 * SECOND, |world| world.sides[0].rails_up(peer) == [true, true]);
    world.sides[0].post(peer, whole_write(&ours, &theirs)).unwrap();
    world.until(SECOND, |world| world.ended() == [false, true]);
    assert_eq!(bytes(&theirs), pattern(1 << 20));
}

/// The peer cannot make a queue pair, once. A late word of that, of a pair that works, is not listened to.
#[test]
fn a_rail_that_the_peer_cannot_open_is_tried_again() {
    let mut world = World::unconnected([2, 2], network(), |builder| builder);
    world.devices[1][0].fail(Verb::CreateQp, 12, When::Before, 1); // ENOMEM
    world.step = Duration::from_micros(500);
    let [said, _] = world.connect();
    let peer = world.peers[0];
    assert_eq!(world.sides[0].rails_up(peer), [false, true]);
    world.until(SECOND, |world| world.sides[0].rails_up(peer) == [true, true]);

    // The second pair is open for the first time.
    said.lock().unwrap().say(&Frame::CannotOpen { pair: 1, epoch: 1, reason: "late".into() });
    let start = world.network.now();
    world.until(SECOND, |world| world.network.now() - start > SECOND / 100);
    assert_eq!(world.sides[0].rails_up(peer), [true, true]);
    let down = |event: &Event| matches!(event, Event::RailDown { .. } | Event::Disconnected { .. });
    assert!(!world.events[0].iter().any(down), "{:#?}", world.events[0]);
}

#[test]
fn a_transfer_that_the_peer_does_not_allow_fails_alone() {
    let mut world = World::new(2, network());
    let [ours, theirs] = memory(&world, 1 << 20);
    let closed = world.sides[1].allocate(1 << 20, AccessFlags::REMOTE_READ).unwrap();
    let peer = world.peers[0];
    let wrong = world.sides[0].post(peer, whole_write(&ours, &closed)).unwrap();
    let right = world.sides[0].post(peer, whole_write(&ours, &theirs).notify(1)).unwrap();
    world.until(20 * SECOND, |world| world.ended().len() == 2 && world.notified() == [1]);
    for event in &world.events[0] {
        match event {
            Event::Ended { transfer, result, .. } if *transfer == wrong => {
                assert!(matches!(result, Err(RailsError::Transfer { .. })), "{result:?}");
            }
            Event::Ended { transfer, result, .. } => {
                assert!(*transfer == right && result.is_ok(), "{result:?}");
            }
            _ => {}
        }
    }
    assert_eq!(bytes(&theirs), pattern(1 << 20));
    world.until(20 * SECOND, |world| world.sides[0].rails_up(peer) == [true, true]);
}

/// Two networks of the same seed number packets in the same way: the second packet of a long piece in one comes where the
/// peer expects a first one in the other, as from a device that has lost its place.
#[test]
fn what_a_broken_rail_sends_goes_over_another() {
    const WRITE_MIDDLE: u8 = 7;
    const LEN: usize = 1 << 20;
    let new = || {
        let network = Network::builder().manual().delay(Duration::from_micros(2));
        World::new(2, network.bandwidth(BANDWIDTH).build())
    };
    let post = |world: &mut World, len| {
        let [ours, theirs] = memory(world, len);
        world.sides[0].post(world.peers[0], whole_write(&ours, &theirs)).unwrap();
        theirs
    };
    let mut world = new();
    let to = world.devices[1][0].address();
    let _theirs = post(&mut world, LEN);
    let stray = |world: &World| {
        let trace = world.network.trace();
        trace.packets().find(|it| it.opcode() == WRITE_MIDDLE && it.to() == to).cloned()
    };
    world.until(SECOND, |world| stray(world).is_some());
    let stray = stray(&world).unwrap();

    let mut world = new();
    let _one_packet = post(&mut world, 1);
    world.until(SECOND, |world| world.ended() == [true]);
    world.network.partition_one_way(&world.devices[0][0], &world.devices[1][0]);
    let theirs = post(&mut world, LEN);
    world.step();
    world.network.heal_all();
    world.network.replay(&stray);
    world.until(SECOND, |world| world.ended() == [true, true]);
    assert_eq!(bytes(&theirs), pattern(LEN));
    let is_refused = |event: &Event| matches!(event, Event::RailDown { device: 0, reason, .. } if reason.contains("RemoteInvalidRequest"));
    assert!(world.events[0].iter().any(is_refused), "{:#?}", world.events[0]);
    world.until(20 * SECOND, |world| world.sides[0].rails_up(world.peers[0]) == [true, true]);
}

/// More transfers than may be open at a time fail, and the next ones are told all the same.
#[test]
fn notified_writes_that_fail_hold_no_place() {
    let mut world = World::new(2, network());
    let [ours, theirs] = memory(&world, 256 << 10);
    let closed = world.sides[1].allocate(256 << 10, AccessFlags::REMOTE_READ).unwrap();
    let peer = world.peers[0];
    for _ in 0..60 {
        world.sides[0].post(peer, whole_write(&ours, &closed).notify(1)).unwrap();
    }
    world.sides[0].post(peer, whole_write(&ours, &theirs).notify(2)).unwrap();
    world.until(100 * SECOND, |world| world.ended().len() == 61 && world.notified() == [2]);
    assert_eq!(world.ended().iter().filter(|&&is_ok| is_ok).count(), 1);

    // Transfers that fail since all rails are down hold no place either.
    for round in 0..2 {
        for _ in 0..40 {
            world.sides[0].post(peer, whole_write(&ours, &theirs).notify(3)).unwrap();
        }
        for rail in 0..2 {
            world.network.partition(&world.devices[0][rail], &world.devices[1][rail]);
        }
        world.step = Duration::from_micros(500);
        world.until(100 * SECOND, |world| world.ended().len() == 61 + 40 * (round + 1));
        world.network.heal_all();
        world.until(100 * SECOND, |world| world.sides[0].rails_up(peer) == [true, true]);
        world.step = Duration::from_micros(5);
    }
    world.sides[0].post(peer, whole_write(&ours, &theirs).notify(4)).unwrap();
    world.until(SECOND, |world| world.notified().ends_with(&[4]));
}

#[test]
fn a_peer_that_ends_ends_its_transfers() {
    let mut world = World::new(2, network());
    let [ours, theirs] = memory(&world, 1 << 20);
    let peers = world.peers;
    world.sides[0].post(peers[0], whole_write(&ours, &theirs)).unwrap();
    world.sides[1].remove(peers[1]);
    world.until(SECOND, |world| world.ended() == [false]);
    let is_gone = |event: &Event| matches!(event, Event::Disconnected { .. });
    assert!(world.events[0].iter().any(is_gone));
    let refused = world.sides[0].post(peers[0], whole_write(&ours, &theirs));
    assert!(matches!(refused, Err(RailsError::UnknownPeer)), "{refused:?}");
}

#[test]
fn progress_is_told_of_memory_and_of_each_device() {
    const LEN: u64 = 8 << 20;
    let world = World::unconnected([3, 1], network(), |builder| builder);
    let told = std::sync::Mutex::new(Vec::new());
    let memory = world.sides[0].allocate_with_progress(
        LEN as usize,
        AccessFlags::REMOTE_WRITE,
        |done, all| {
            assert_eq!(all, 4 * LEN);
            told.lock().unwrap().push(done);
        },
    );
    assert_eq!(memory.unwrap().len() as u64, LEN);
    let mut told = told.into_inner().unwrap();
    told.sort_unstable();
    // Progress is told in memory first, then on each device.
    assert_eq!(told, [LEN, 2 * LEN, 3 * LEN, 4 * LEN]);
}

#[test]
fn bad_input_names_the_limit() {
    let mut world = World::new(1, network());
    let other = World::new(2, network());
    let [ours, theirs] = memory(&world, 4096);
    let peer = world.peers[0];
    let mut refused =
        |transfer: Transfer, words: &str| match world.sides[0].post(peer, transfer).unwrap_err() {
            RailsError::InvalidInput(text) => assert!(text.contains(words), "{text}"),
            error => panic!("{error}"),
        };
    let slice = |len| ours.slice(..len).unwrap();
    refused(Transfer::write(slice(10), theirs.remote()), "10 bytes of ours are for 4096");
    refused(Transfer::read(slice(4096), theirs.remote()).notify(1), "a read notifies no one");
    refused(Transfer::write_list([]), "no parts");
    let [foreign, _] = memory(&other, 4096);
    refused(Transfer::write(foreign.slice(..).unwrap(), theirs.remote()), "of other rails");
    let same = Rails::builder().device(world.devices[0][0].name()).build().unwrap();
    let foreign = same.allocate(4096, AccessFlags::LOCAL_WRITE).unwrap();
    refused(Transfer::write(foreign.slice(..).unwrap(), theirs.remote()), "of other rails");
    let two = other.sides[1].allocate(4096, AccessFlags::REMOTE_WRITE).unwrap();
    refused(Transfer::write(slice(4096), two.remote()), "of a peer with other devices");
    let many = (0..513).map(|i| (slice(1), theirs.remote().slice(i..=i).unwrap()));
    refused(Transfer::write_list(many).notify(1), "512 parts at most, not 513");
    let many = Rails::builder().device(world.devices[0][0].name()).peers(1 << 20).build();
    match many.unwrap_err() {
        RailsError::InvalidInput(text) => assert!(text.contains("1048576 peers take"), "{text}"),
        error => panic!("{error}"),
    }
    for range in [5000..6000, 7..7, 4096..4097] {
        assert!(matches!(ours.slice(range), Err(RailsError::InvalidInput(_))));
    }
}
