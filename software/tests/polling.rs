//! A program that polls receives the packets by itself. When it stops, the device's thread does so again.

#[path = "support/patience.rs"]
mod patience;
#[path = "support/two_devices.rs"]
mod two_devices;

use ibverbs::{AccessFlags, CompletionQueue, Context, WorkCompletion};

use patience::deadline;
use two_devices::{channels, contexts};

/// Polls until the device counts the program as polling all the time.
fn poll_in_vain(queue: &CompletionQueue<'_>) {
    let mut room = [WorkCompletion::default()];
    for _ in 0..200 {
        assert!(queue.poll(&mut room).unwrap().is_empty());
    }
}

fn on_both_ways(test: fn([Context<'static>; 2])) {
    [false, true].map(contexts).into_iter().for_each(test);
}

#[test]
fn a_program_that_stops_polling_still_serves_its_peer() {
    on_both_ways(serves_its_peer);
}

fn serves_its_peer(contexts: [Context<'static>; 2]) {
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let queue = contexts[1].create_cq(1).unwrap();
    let [mut one, _other] = channels(&domains[0], &domains[1]);
    let from = domains[0].allocate::<u8>(5000).unwrap();
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
    let to = domains[1].allocate_shared::<u8>(5000, access).unwrap();
    for _ in 0..30 {
        poll_in_vain(&queue);
        one.until(deadline()).write(from.slice(..).unwrap(), to.remote()).unwrap();
    }
}

#[test]
fn a_program_that_stops_polling_with_a_message_has_acknowledged_it() {
    on_both_ways(has_acknowledged);
}

fn has_acknowledged(contexts: [Context<'static>; 2]) {
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let queue = contexts[1].create_cq(1).unwrap();
    let [mut one, mut other] = channels(&domains[0], &domains[1]);
    let from = domains[0].allocate::<u8>(50).unwrap();
    let mut to = domains[1].allocate::<u8>(50).unwrap();
    for _ in 0..30 {
        poll_in_vain(&queue);
        one.scope(|one| {
            let sending = one.post_send(from.slice(..)?)?;
            other.until(deadline()).receive(&mut to.slice_mut(..)?)?;
            // The other program does nothing more.
            sending.wait_until(deadline()).map(|_| ())
        })
        .unwrap();
    }
}

#[test]
fn a_program_that_stops_after_one_poll_in_vain_has_acknowledged_it() {
    on_both_ways(has_acknowledged_after_one);
}

fn has_acknowledged_after_one(contexts: [Context<'static>; 2]) {
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let queue = contexts[1].create_cq(1).unwrap();
    let [mut one, mut other] = channels(&domains[0], &domains[1]);
    let from = domains[0].allocate::<u8>(50).unwrap();
    let mut to = domains[1].allocate::<u8>(50).unwrap();
    for _ in 0..30 {
        poll_in_vain(&queue);
        one.scope(|one| {
            let sending = one.post_send(from.slice(..)?)?;
            other.until(deadline()).receive(&mut to.slice_mut(..)?)?;
            assert!(queue.poll(&mut [WorkCompletion::default()]).unwrap().is_empty());
            // The other program does nothing more.
            sending.wait_until(deadline()).map(|_| ())
        })
        .unwrap();
    }
}

#[test]
fn a_program_that_sleeps_after_polling_is_woken() {
    on_both_ways(is_woken);
}

fn is_woken(contexts: [Context<'static>; 2]) {
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let queue = contexts[1].create_cq(1).unwrap();
    let sleeper = CompletionQueue::builder(&contexts[1], 4).own_channel().build().unwrap();
    let pair =
        domains[1].create_qp(&sleeper, &sleeper, ibverbs::Rc).max_recv_wr(4).build().unwrap();
    let other = domains[0].create_channel().build().unwrap();
    let endpoints = (pair.endpoint(), other.endpoint());
    let mut pair = pair.handshake(endpoints.1).unwrap();
    let mut other = other.handshake(endpoints.0).unwrap();
    let from = domains[0].allocate::<u8>(8).unwrap();
    let mut to = domains[1].allocate::<u8>(8).unwrap();
    for number in 0..30 {
        // SAFETY: nobody touches the region until the completion was polled, below.
        unsafe { pair.post_receive(&mut to, .., number).unwrap() };
        poll_in_vain(&queue);
        std::thread::scope(|scope| {
            scope.spawn(|| other.until(deadline()).send(from.slice(..).unwrap()).unwrap());
            let mut room = [WorkCompletion::default()];
            let received = sleeper.wait_until(&mut room, deadline()).unwrap();
            assert!(received[0].is_success() && received[0].wr_id() == number);
        });
    }
}
