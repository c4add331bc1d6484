//! Messages: whole, in order, each once.

use std::time::{Duration, Instant};

use ibverbs_rails::{Event, RailsError, TransferId};

use super::support::World;
use super::{SECOND, network};

/// The message of this number: its length differs, and its bytes tell the number.
fn message(number: usize) -> Vec<u8> {
    let len = [0, 1, 7, 300, 4092][number % 5];
    let number = number as u32;
    number.to_le_bytes().into_iter().chain((0..len).map(|i| (number * 31 + i) as u8)).collect()
}

fn messages(count: usize) -> Vec<Vec<u8>> {
    (0..count).map(message).collect()
}

#[test]
fn messages_of_both_sides_come_in_order() {
    const COUNT: usize = 500;
    for queue_pairs in [1, 2] {
        let mut world = World::with(3, network(), |rails| rails.queue_pairs(queue_pairs));
        for number in 0..COUNT {
            for side in 0..2 {
                let peer = world.peers[side];
                world.sides[side].send(peer, message(number)).unwrap();
            }
        }
        world.until(SECOND, |world| (0..2).all(|side| world.messages(side).len() == COUNT));
        world.until(SECOND, |world| world.ended().len() == COUNT);
        assert!(world.ended().iter().all(|&ok| ok));
        for side in 0..2 {
            assert_eq!(world.messages(side), messages(COUNT));
        }
    }
}

#[test]
fn a_message_that_nobody_takes_holds_back_the_others() {
    let mut world = World::new(2, network());
    let peer = world.peers[0];
    for number in 0..100 {
        world.sides[0].send(peer, message(number)).unwrap();
    }
    for _ in 0..2000 {
        world.network.advance(world.step);
        let now = world.now();
        world.sides.iter_mut().for_each(|side| side.turn(now));
    }
    let ended = std::iter::from_fn(|| world.sides[0].next_event()).count();
    assert_eq!(ended, 32, "so many slots there are");
    let mut taken = Vec::new();
    while taken.len() < 100 {
        world.network.advance(world.step);
        let now = world.now();
        world.sides.iter_mut().for_each(|side| side.turn(now));
        // Waiting messages are given out in their order, however seldom the program asks.
        if let Some(Event::Message { bytes, .. }) = world.sides[1].next_event() {
            taken.push(bytes);
        }
    }
    assert_eq!(taken, messages(100));
}

#[test]
fn rails_that_die_cost_no_message() {
    let seeds = std::env::var("IBVERBS_RAILS_SEEDS").ok().map(|seeds| seeds.parse().unwrap());
    for seed in 0..seeds.unwrap_or(15_u64) {
        let mut random = fastrand::Rng::with_seed(seed);
        let rails = random.usize(1..=3);
        let mut world = World::new(rails, network());
        let peer = world.peers[0];
        let mut ids = Vec::new();
        // Also all at once.
        for _ in 0..random.usize(1..8) {
            for _ in 0..random.usize(..60) {
                match world.sides[0].send(peer, message(ids.len())) {
                    Ok(id) => ids.push(id),
                    Err(error) => assert!(matches!(error, RailsError::AllRailsDown(_)), "{error}"),
                }
            }
            let rail = random.usize(..rails);
            let [one, other] = [&world.devices[0][rail], &world.devices[1][rail]];
            match random.u8(..4) {
                0 => world.network.heal(one, other),
                1 => world.network.partition_one_way(one, other),
                2 => world.network.partition_one_way(other, one),
                _ => world.network.partition(one, other),
            }
            world.step = Duration::from_micros(if random.bool() { 5 } else { 500 });
            let at = world.network.now() + world.step * random.u32(..1000);
            world.until(60 * SECOND, |world| world.network.now() >= at);
        }
        world.network.heal_all();
        world.step = Duration::from_micros(500);
        world.until(60 * SECOND, |world| world.sides[0].rails_up(peer) == vec![true; rails]);
        // Messages that failed before they had a slot stay away. No other is lost, and none comes twice.
        let last = world.sides[0].send(peer, message(ids.len())).unwrap();
        ids.push(last);
        world.until(10 * SECOND, |world| world.ended().len() == ids.len());
        let got = world.messages(1);
        let mut got = got.iter().peekable();
        for (number, &id) in ids.iter().enumerate() {
            if got.next_if(|got| **got == message(number)).is_none() {
                assert!(has_failed(&world, id), "seed {seed}: message {number} is missing");
            }
        }
        assert_eq!(got.next(), None, "seed {seed}");
    }
}

fn has_failed(world: &World, id: TransferId) -> bool {
    let is_it = |event: &Event| matches!(event, Event::Ended { transfer, result: Err(_), .. } if *transfer == id);
    world.events[0].iter().any(is_it)
}

#[test]
fn bad_input_names_the_limit() {
    let mut world = World::with(1, network(), |rails| rails.longest_message(100));
    let peer = world.peers[0];
    match world.sides[0].send(peer, vec![0; 101]).unwrap_err() {
        RailsError::InvalidInput(text) => assert!(text.contains("100 bytes at most, not 101")),
        error => panic!("{error}"),
    }
    for message in [vec![], vec![7; 100]] {
        world.sides[0].send(peer, message).unwrap();
    }
    world.until(SECOND, |world| world.messages(1) == [&[][..], &[7; 100]]);
    world.sides[1].remove(world.peers[1]);
    world.until(SECOND, |world| {
        world.events[0].iter().any(|event| matches!(event, Event::Disconnected { .. }))
    });
    let refused = world.sides[0].send(peer, [1]);
    assert!(matches!(refused, Err(RailsError::UnknownPeer)), "{refused:?}");
    let nothing = world.sides[0].receive(peer, Instant::now());
    assert!(matches!(nothing, Err(RailsError::UnknownPeer)), "{nothing:?}");
}
