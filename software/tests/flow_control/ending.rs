//! Resets, new connections, and channels that end while a credit is asked for.

use ibverbs::Inline;
use ibverbs::channel::ChannelClosed;
use ibverbs_software::{Verb, When};

use super::*;

fn exchange(sides: &[Side; 2], [one, other]: &mut [Channel<'static>; 2]) {
    for _ in 0..2 {
        let receives = [0; 5].map(|_| kept::receive(other, sides[1].buffer(0)).unwrap());
        for message in 0..5 {
            one.wait_for_credit_until(deadline()).unwrap();
            one.until(deadline()).send(sides[0].buffer(message)).unwrap();
        }
        for (expected, receive) in receives.into_iter().enumerate() {
            assert_eq!(received(other, receive), expected as u64);
        }
    }
}

#[test]
fn the_counters_start_over_after_a_reset() {
    let network = Network::builder().seed(9).loss(0.02).build();
    let sides = simulated(&network);
    let mut channels = connect(sides.each_ref().map(Side::builder));
    for round in 0..4 {
        exchange(&sides, &mut channels);
        let [mut one, mut other] = channels;
        match round {
            // Receives are left over: they are no credits of the next connection.
            0 => drop(kept::receive(&mut other, sides[1].buffer(0)).unwrap()),
            // A question is left over.
            1 => assert!(kept::send(&mut one, sides[0].buffer(0)).is_err()),
            // A failure is.
            2 => {
                network.partition(&sides[0].device, &sides[1].device);
                let error = one.wait_for_credit().unwrap_err();
                assert!(error.work_error().is_some(), "{error}");
                network.heal_all();
            }
            _ => {}
        }
        let prepared = [one.reset().unwrap(), other.reset().unwrap()];
        channels = handshake(prepared);
        assert_eq!(channels[0].credits(), Some(0));
        let soon = Instant::now() + Duration::from_millis(1);
        let error = channels[0].wait_for_credit_until(soon).unwrap_err();
        assert_eq!(error, TransportError::NoCredit, "round {round}");
    }
    exchange(&sides, &mut channels);
}

#[test]
fn a_reset_without_room_for_a_second_queue_pair_starts_over_too() {
    let sides = sides();
    let mut channels = connect(sides.each_ref().map(Side::builder));
    exchange(&sides, &mut channels);
    let [one, mut other] = channels;
    drop(kept::receive(&mut other, sides[1].buffer(0)).unwrap());
    for side in &sides {
        side.device.fail(Verb::CreateQp, libc::ENOMEM, When::Before, 1);
    }
    let numbers = [one.number(), other.number()];
    let mut channels = handshake([one.reset().unwrap(), other.reset().unwrap()]);
    assert_eq!(channels.each_ref().map(Channel::number), numbers);
    let nothing_is_left = |channel: &mut Channel<'_>| {
        let soon = Instant::now() + Duration::from_millis(1);
        let error = channel.wait_for_credit_until(soon).unwrap_err();
        assert_eq!((error, channel.credits()), (TransportError::NoCredit, Some(0)));
    };
    nothing_is_left(&mut channels[0]);
    exchange(&sides, &mut channels);
    nothing_is_left(&mut channels[0]);
}

#[test]
fn a_stopped_channel_says_so() {
    let sides = sides();
    let [mut one, _other] = connect(sides.each_ref().map(Side::builder));
    let mut receive = kept::receive(&mut one, sides[0].buffer(0)).unwrap();
    let soon = Instant::now() + Duration::from_millis(1);
    assert_eq!(one.until(soon).receive(()).unwrap_err(), TransportError::TimedOut);
    assert!(receive.wait(&mut one).err().unwrap().is_consequence());
    assert_eq!(one.wait_for_credit().unwrap_err(), TransportError::Stopped);
    assert_eq!(one.send(Inline(&[])).unwrap_err(), TransportError::Stopped);
    assert_eq!(kept::send(&mut one, ()).err(), Some(TransportError::Stopped));
    assert_eq!(one.close().unwrap(), ChannelClosed::Drained);
}

/// The read is not one of the program's operations.
#[test]
fn a_channel_is_closed_while_a_credit_is_asked_for() {
    let network = Network::builder().seed(1).build();
    let sides = simulated(&network);
    let [mut one, other] = connect(sides.each_ref().map(Side::builder));
    sides[0].device.hold_completions();
    assert_eq!(kept::send(&mut one, ()).err(), Some(TransportError::NoCredit));
    assert_eq!(one.close().unwrap(), ChannelClosed::Drained);
    drop(other);
}

/// Completions that never come are waited for by the network's clock: the same polls in each run, and no real time.
#[test]
fn the_end_of_a_channel_waits_in_virtual_time() {
    const SETTLE: Duration = Duration::from_secs(100_000);
    let network = Network::new();
    let sides = simulated(&network);
    let [mut one, other] =
        connect(sides.each_ref().map(|side| side.builder().settle_timeout(SETTLE)));
    let _receive = kept::receive(&mut one, sides[0].buffer(0)).unwrap();
    sides[0].device.hold_completions();
    assert_eq!(one.close().unwrap(), ChannelClosed::Flushed(1));
    assert!(network.now() >= SETTLE);
    drop(other);
}

/// The device may still write the answer: its memory stays.
#[test]
fn a_queue_pair_that_cannot_be_destroyed_keeps_the_memory_of_the_answer() {
    let network = Network::builder().seed(1).build();
    let sides = simulated(&network);
    let [mut one, mut other] = connect(sides.each_ref().map(Side::builder));
    let _ = kept::receive(&mut other, sides[1].buffer(0)).unwrap();
    assert_eq!(kept::send(&mut one, ()).err(), Some(TransportError::NoCredit));
    let other_region = sides[0].domain.allocate::<u64>(1).unwrap();
    sides[0].device.fail(Verb::DestroyQp, libc::EIO, When::Before, 1);
    sides[0].device.fail(Verb::DeregMr, libc::EIO, When::Before, 1);
    assert_eq!(one.close().unwrap_err().verb(), "ibv_destroy_qp");
    // The answer arrives in memory that is still there.
    assert!(network.run_until_idle(Duration::from_secs(1)));
    // That verb was not called yet.
    assert_eq!(other_region.close().unwrap_err().verb(), "ibv_dereg_mr");
}

/// A device that takes no request.
#[test]
fn a_question_that_cannot_be_posted_is_an_error_of_the_verb() {
    let sides = sides();
    let [mut one, mut other] = connect(sides.each_ref().map(Side::builder));
    sides[0].device.fail(Verb::PostSend, libc::ENOMEM, When::Before, 1);
    let refused = kept::send(&mut one, ()).err().expect("the verb fails");
    assert!(matches!(refused, TransportError::Verbs(_)), "{refused}");
    let receive = kept::receive(&mut other, sides[1].buffer(0)).unwrap();
    one.wait_for_credit_until(deadline()).unwrap();
    one.until(deadline()).send(sides[0].buffer(1)).unwrap();
    assert_eq!(received(&mut other, receive), 1);
}
