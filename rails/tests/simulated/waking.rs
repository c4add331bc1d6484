//! What wakes a side that sleeps: a file that stays readable, and that nobody reads, would keep it awake.

use std::time::{Duration, Instant};

use ibverbs_rails::{Rails, RailsError};
use ibverbs_software::{Verb, When};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::support::World;
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
