//! How long a peer that does not answer is waited for, and acknowledgements that are held back.

use super::*;
use crate::transport::queues::Armed;
use crate::transport::requester::STARVED_FOR;

#[test]
fn a_dead_peer_costs_virtual_time_only() {
    let mut world = World::new(6);
    world.sides[0].post(1, Operation::Send, Extra::None, 0, 64);
    world.run(100);
    let done = world.sides[0].poll();
    assert_eq!(done[0].status, ibv_wc_status::IBV_WC_RETRY_EXC_ERR);
    // One try and seven more, each of 4.096 us * 2^8. After the first, the peer is late.
    assert_eq!(world.clock.now(), 8 * (4096 << 8) + 7);
}

#[test]
fn a_peer_that_receives_nothing_is_waited_for_and_not_for_ever() {
    const TIMEOUT: Time = 4096 << 8;
    let mut world = World::new(6);
    let is_unread = world.sides[0].is_unread.clone();
    is_unread.store(true, Ordering::Relaxed);
    world.sides[0].post(1, Operation::Send, Extra::None, 0, 64);
    let of_the_peer = std::mem::take(&mut *world.sent.lock().unwrap());
    let run_until = |world: &mut World, end: Time| {
        while world.sides[0].engine.due().is_some_and(|due| due <= end) {
            world.clock.0.fetch_max(world.sides[0].engine.due().unwrap(), Ordering::Relaxed);
            world.sides[0].engine.advance();
            world.sides[0].engine.settle();
        }
        let count = std::mem::take(&mut *world.sent.lock().unwrap()).len();
        (world.sides[0].poll().pop().map(|done| done.status), count)
    };
    assert_eq!(run_until(&mut world, STARVED_FOR), (None, 0), "nothing is sent again");
    // Packets received without an answer count.
    is_unread.store(false, Ordering::Relaxed);
    assert_eq!(run_until(&mut world, STARVED_FOR + 4 * TIMEOUT), (None, 4));
    // The device waits for it once.
    is_unread.store(true, Ordering::Relaxed);
    let failed = Some(ibv_wc_status::IBV_WC_RETRY_EXC_ERR);
    assert_eq!(run_until(&mut world, STARVED_FOR + 9 * TIMEOUT), (failed, 3));
    assert_eq!(of_the_peer.len(), 1);
}

#[test]
fn who_had_no_processor_itself_waits_on() {
    let mut world = World::new(6);
    world.sides[0].is_unread.store(true, Ordering::Relaxed);
    world.sides[0].post(1, Operation::Send, Extra::None, 0, 64);
    world.sent.lock().unwrap().clear();
    for _ in 0..3 {
        world.clock.0.fetch_add(STARVED_FOR, Ordering::Relaxed);
        world.sides[0].engine.advance();
        world.sides[0].engine.settle();
    }
    assert!(world.sides[0].poll().is_empty() && world.sent.lock().unwrap().is_empty());
}

/// Three threads: one sleeps, and has received a completion itself, without an event. Another polls it before the first has
/// looked. The first wakes all the same, as nothing else tells the third, whose completion it was.
#[test]
fn who_sleeps_wakes_for_what_it_received_though_another_has_polled_it() {
    let mut world = World::new(6);
    let [sender, sleeper] = &mut world.sides;
    let cq = sleeper.cq;
    sleeper.receive(1, 0, 64);
    sleeper.engine.arm(cq, false).unwrap();
    assert!(sleeper.engine.begin_sleep(cq) && !sleeper.engine.has_missed(cq));
    sender.post(1, Operation::Send, Extra::None, 0, 64);
    sleeper.engine.core.polling = Some((cq, true));
    world.run(0);
    let sleeper = &mut world.sides[1];
    sleeper.engine.core.polling = None;
    assert_eq!(sleeper.engine.events(cq), 0);
    assert_eq!(sleeper.poll().len(), 1);
    sleeper.engine.polled(cq);
    assert!(sleeper.engine.has_missed(cq));
    sleeper.engine.end_sleep(cq);
    // The sleeper is told once.
    assert!(sleeper.engine.begin_sleep(cq) && !sleeper.engine.has_missed(cq));
}

/// As adapters do: a program that polls in vain, and then arms without another look, hears of what came in between.
#[test]
fn a_queue_that_is_armed_with_a_completion_in_it_raises_its_event_at_once() {
    let mut world = World::new(6);
    world.sides[1].receive(1, 0, 64);
    world.sides[0].post(1, Operation::Send, Extra::None, 0, 64);
    world.run(0);
    let receiver = &mut world.sides[1];
    let cq = receiver.cq;
    let arm = |receiver: &mut Side, solicited_only| {
        receiver.engine.arm(cq, solicited_only).unwrap();
        receiver.engine.core.cqs.get_mut(cq).unwrap().armed
    };
    assert_eq!(arm(receiver, true), Armed::Solicited, "the message does not ask for an event");
    assert_eq!(arm(receiver, false), Armed::No, "the event disarms it");
    assert_eq!(arm(receiver, false), Armed::Any, "it has told of what is in it");
    assert_eq!(receiver.poll().len(), 1);
    assert_eq!(arm(receiver, false), Armed::Any, "there is nothing in it");
}

/// Lets a side look only when its timer has been due for so long.
fn look_late(side: &mut Side, clock: &VirtualClock, late: Time) {
    clock.0.fetch_max(side.engine.due().unwrap() + late, Ordering::Relaxed);
    side.engine.advance();
    side.engine.settle();
}

#[test]
fn who_looks_late_does_not_hold_it_against_the_peer() {
    const TIMEOUT: Time = 4096 << 8;
    let mut world = World::new(6);
    world.sides[1].receive(1, 0, 64);
    world.sides[0].post(1, Operation::Send, Extra::None, 0, 64);
    for again in 1..=20 {
        // The answer is on its way all the time, and what was lost comes again.
        look_late(&mut world.sides[0], &world.clock, 2 * TIMEOUT);
        assert!(world.sides[0].poll().is_empty());
        assert_eq!(world.sides[0].engine.core.counters.retransmissions, again);
    }
    // A thread that is in time counts.
    for _ in 0..7 {
        look_late(&mut world.sides[0], &world.clock, 0);
    }
    assert!(world.sides[0].poll().is_empty());
    world.run(0);
    assert_eq!(world.sides[0].poll()[0].status, ibv_wc_status::IBV_WC_SUCCESS);
}

#[test]
fn who_is_always_late_gives_up_nevertheless() {
    let mut world = World::new(6);
    world.sides[0].post(1, Operation::Send, Extra::None, 0, 64);
    let mut looks = 0;
    let done = loop {
        look_late(&mut world.sides[0], &world.clock, 1_000_000_000);
        looks += 1;
        if let Some(done) = world.sides[0].poll().pop() {
            break done;
        }
    };
    assert_eq!(done.status, ibv_wc_status::IBV_WC_RETRY_EXC_ERR);
    assert_eq!(looks, STARVED_FOR / ((4096 << 8) + 1) + 8);
}

/// The opcodes of the packets that were sent.
fn opcodes(world: &World) -> Vec<u8> {
    let sent = std::mem::take(&mut *world.sent.lock().unwrap());
    sent.iter().map(|(_, _, bytes)| bytes[0]).collect()
}

#[test]
fn an_acknowledgement_that_is_held_back_goes_with_the_next_message_and_is_never_lost() {
    for how in 0..4 {
        let mut world = World::new(8);
        world.sides[1].receive(1, 0, 64);
        world.sides[0].receive(1, 0, 64);
        world.sides[0].post(2, Operation::Send, Extra::None, 0, 64);
        let (from, to, bytes) = world.sent.lock().unwrap().pop_front().unwrap();
        world.sides[1].engine.core.holds_answers = true;
        world.deliver(from, to, &bytes);
        assert_eq!(opcodes(&world), [], "it is held back");
        let Side { engine, qp, .. } = &mut world.sides[1];
        match how {
            0 => world.sides[1].post(3, Operation::Send, Extra::None, 0, 64),
            1 => engine.release_answers(),
            2 => drop(engine.destroy_qp(*qp, 2).unwrap()),
            _ => {
                let reset = ibv_qp_attr_mask::IBV_QP_STATE.0;
                engine.modify_qp(*qp, &ibv_qp_attr::default(), reset).unwrap();
            }
        }
        world.sides[1].engine.settle();
        let message: &[u8] = if how == 0 { &[opcode::SEND_ONLY] } else { &[] };
        assert_eq!(opcodes(&world), [message, &[opcode::ACK]].concat(), "way {how}");
    }
}

/// It has had its turn, and its program, which has all that it waits for, ends it.
#[test]
fn a_queue_pair_that_ends_acknowledges_what_it_has_received() {
    for how in 0..3 {
        let mut world = World::new(8);
        let [sender, Side { engine, qp, key, .. }] = &mut world.sides;
        let round = engine.core.round;
        engine.qps.get_mut(*qp).unwrap().responder.turn = (round, 0);
        let read = Operation::Read { address: 0x10_0000, rkey: *key };
        sender.post(1, read, Extra::None, 0, 2 * MTU);
        sender.post(2, Operation::Send, Extra::None, 0, 64);
        sender.post(3, read, Extra::None, 0, 2 * MTU);
        world.sides[1].receive(1, 0, 64);
        let Side { engine, qp, .. } = &mut world.sides[1];
        for (from, to, bytes) in std::mem::take(&mut *world.sent.lock().unwrap()) {
            engine.receive((from, PORT), to, &bytes);
        }
        assert_eq!(engine.qps.get(*qp).unwrap().responder.waiting(), 3);
        let end = |engine: &mut Engine, state| {
            let attr = ibv_qp_attr { qp_state: state, ..Default::default() };
            engine.modify_qp(*qp, &attr, ibv_qp_attr_mask::IBV_QP_STATE.0).unwrap();
        };
        match how {
            0 => drop(engine.destroy_qp(*qp, 2).unwrap()),
            1 => end(engine, ibv_qp_state::IBV_QPS_RESET),
            _ => end(engine, ibv_qp_state::IBV_QPS_ERR),
        }
        engine.settle();
        // What it was to read before the message; not what comes after it.
        let sent = [opcode::READ_FIRST, opcode::READ_LAST, opcode::ACK];
        assert_eq!(opcodes(&world), sent, "way {how}");
    }
}

#[test]
fn who_misses_a_packet_is_not_late() {
    let mut world = World::new(7);
    let rkey = world.sides[1].key;
    let write = Operation::Write { address: 0x10_0000, rkey };
    world.sides[0].post(1, write, Extra::None, 0, 3 * MTU);
    // The packets that the other side is to get, of those that were sent.
    let mut deliver = |these: &[bool]| {
        let sent = std::mem::take(&mut *world.sent.lock().unwrap());
        assert_eq!(sent.len(), these.len());
        for ((from, to, bytes), _) in sent.into_iter().zip(these).filter(|(_, arrives)| **arrives) {
            world.deliver(from, to, &bytes);
        }
        let due = world.sides[0].engine.due().map(|due| due - world.clock.now());
        due.map(|due| due - (4096 << 8))
    };
    assert_eq!(deliver(&[true, false, true]), Some(0));
    assert_eq!(deliver(&[true]), Some(0), "something is missing");
    assert_eq!(deliver(&[false, false]), Some(0), "it comes again, but is lost");
    world.clock.0.fetch_add(4096 << 8, Ordering::Relaxed);
    world.sides[0].engine.advance();
    world.sides[0].engine.settle();
    let late = world.sides[0].engine.due().unwrap() - world.clock.now();
    assert_eq!(late, (4096 << 8) + 1);
    world.run(0);
    assert_eq!(world.sides[0].poll()[0].status, ibv_wc_status::IBV_WC_SUCCESS);
}
