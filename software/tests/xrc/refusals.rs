//! Requests that are refused, and queues that go away or run over.

use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;

use ibverbs::device::{AsyncEventKind, AsyncEventSubject, AsyncEvents};
use ibverbs::domain::{XrcDomain, XrcDomainScope};
use ibverbs::{
    CompletionQueue, Context, ErrorKind, QueuePairState, SharedReceiveQueue, WorkCompletion,
    WorkStatus, ffi, settings::MaxRnrRetries,
};
use ibverbs_software::{Device, Network};

use super::{LONG, Side, connect, poll, post, send, succeeded, world};

fn statuses(queue: &CompletionQueue<'_>) -> Vec<(u64, WorkStatus)> {
    let status = |done: &WorkCompletion| match done.result() {
        Ok(_) => WorkStatus::Success,
        Err(error) => error.status(),
    };
    poll(queue).iter().map(|done| (done.wr_id(), status(done))).collect()
}

fn next_event(context: &Context<'_>) -> Option<(AsyncEventKind, AsyncEventSubject)> {
    let event = AsyncEvents::new(context).unwrap().next_event().unwrap();
    event.map(|event| (event.kind(), event.subject()))
}

/// The number names nothing, a queue that is not for XRC, or one of another XRC domain.
#[test]
fn a_queue_of_no_or_another_domain_gets_nothing() {
    let (network, [one, other]) = world(1, 0.0);
    let domain = Arc::new(XrcDomain::open(&other.context, XrcDomainScope::Private).unwrap());
    let foreign =
        SharedReceiveQueue::extended(&other.domain, &domain, &other.received, 4, 1).unwrap();
    let own = other.shared_queue();
    let gone = other.shared_queue();
    let gone_number = gone.number().unwrap();
    gone.close().unwrap();
    let (here, there) = (one.memory(), other.memory());
    here.fill(1);
    post(&foreign, &there, 0..8, 1).unwrap();
    post(&own, &there, 0..8, 2).unwrap();
    for number in [0, 0xff_ffff, foreign.number().unwrap(), gone_number] {
        let (mut sending, receiving) = connect(&one, &other);
        send(&mut sending, &here, 0..8, number, 5).unwrap();
        send(&mut sending, &here, 0..8, own.number().unwrap(), 6).unwrap();
        assert!(network.run_until_idle(LONG));
        let expected = [(5, WorkStatus::RemoteInvalidRequest), (6, WorkStatus::Flushed)];
        assert_eq!(statuses(&one.sent), expected, "{number:#x}");
        assert!(poll(&other.received).is_empty(), "no receive was taken");
        assert!(there.to_vec().iter().all(|&word| word == 0));
        let event = next_event(&other.context).unwrap();
        let subject = AsyncEventSubject::QueuePair(receiving.number());
        assert_eq!(event, (AsyncEventKind::QueuePairAccessError, subject));
        assert_eq!(receiving.state().unwrap(), QueuePairState::Error);
        assert!(next_event(&other.context).is_none(), "and no last request");
    }
    // Both queues still serve.
    let (mut sending, _receiving) = connect(&one, &other);
    send(&mut sending, &here, 0..8, own.number().unwrap(), 7).unwrap();
    assert!(network.run_until_idle(LONG));
    assert_eq!(succeeded(&other.received), [2]);
}

/// The queue is destroyed before, while and after a message fills one of its receives.
#[test]
fn a_queue_that_is_destroyed_takes_its_receives_along() {
    let (mut before, mut within, mut after) = (0, 0, 0);
    for microseconds in 1..120 {
        // The two packets of a message take about 41 us each, and the delay.
        let network = Network::builder().delay(Duration::from_micros(10)).bandwidth(100_000_000);
        let network = network.manual().build();
        let [one, other] = [(); 2].map(|()| Side::new(&network));
        let (mut sending, receiving) = connect(&one, &other);
        let (queue, second) = (other.shared_queue(), other.shared_queue());
        let (here, there, spare) = (one.memory(), other.memory(), other.memory());
        (0..1024).for_each(|i| here.write_one(i, i as u64 + 1).unwrap());
        post(&queue, &there, 0..1024, 1).unwrap();
        post(&second, &spare, 0..1024, 2).unwrap();
        send(&mut sending, &here, 0..1024, queue.number().unwrap(), 3).unwrap();
        send(&mut sending, &here, 0..1024, second.number().unwrap(), 4).unwrap();
        network.advance(Duration::from_micros(microseconds));
        let received = succeeded(&other.received);
        queue.close().unwrap();
        let contents = there.to_vec();
        assert!(network.run_until_idle(LONG));
        assert_eq!(there.to_vec(), contents, "nobody writes to it any more");
        let sent = statuses(&one.sent);
        if received == [1] {
            after += 1;
            assert_eq!(sent, [(3, WorkStatus::Success), (4, WorkStatus::Success)]);
            assert_eq!(succeeded(&other.received), [2]);
            assert!(spare.to_vec() == here.to_vec());
        } else {
            let refused = (3, WorkStatus::RemoteInvalidRequest);
            assert_eq!(sent, [refused, (4, WorkStatus::Flushed)]);
            assert!(poll(&other.received).is_empty(), "the receive went with its queue");
            assert_eq!(receiving.state().unwrap(), QueuePairState::Error);
            *(if contents[0] == 0 { &mut before } else { &mut within }) += 1;
        }
        there.close().unwrap();
    }
    assert!(before > 10 && within > 10 && after > 10, "{before}, {within}, {after}");
}

#[test]
fn an_empty_queue_makes_the_sender_wait_and_give_up() {
    let (network, [one, other]) = world(2, 0.0);
    let queue = other.shared_queue();
    let (here, there) = (one.memory(), other.memory());
    let (mut patient, _receiving) = connect(&one, &other);
    send(&mut patient, &here, 0..1, queue.number().unwrap(), 1).unwrap();
    network.advance(Duration::from_millis(5));
    assert!(poll(&one.sent).is_empty());
    post(&queue, &there, 0..1, 2).unwrap();
    assert!(network.run_until_idle(LONG));
    assert_eq!((succeeded(&one.sent), succeeded(&other.received)), (vec![1], vec![2]));

    let sending = one.sending().max_rnr_retries(MaxRnrRetries::new(2).unwrap()).build().unwrap();
    let receiving = other.receiving().build().unwrap();
    let endpoints = (sending.endpoint(), receiving.endpoint());
    let mut sending = sending.handshake(endpoints.1).unwrap();
    let receiving = receiving.handshake(endpoints.0).unwrap();
    send(&mut sending, &here, 0..1, queue.number().unwrap(), 3).unwrap();
    assert!(network.run_until_idle(LONG));
    assert_eq!(statuses(&one.sent), [(3, WorkStatus::RnrRetryExceeded)]);
    assert_eq!(receiving.state().unwrap(), QueuePairState::ReadyToSend, "it did nothing wrong");
}

#[test]
fn a_message_that_is_too_long_or_may_not_be_written_fails_both_sides() {
    let (network, [one, other]) = world(3, 0.0);
    let queue = other.shared_queue();
    let (here, there) = (one.memory(), other.memory());
    let foreign = one.memory();
    let number = queue.number().unwrap();
    // A receive that is too short, and one whose key is not of the queue's domain.
    for (memory, local, remote) in [
        (&there, WorkStatus::LocalLength, WorkStatus::RemoteInvalidRequest),
        (&foreign, WorkStatus::LocalProtection, WorkStatus::RemoteOperation),
    ] {
        let (mut sending, _receiving) = connect(&one, &other);
        // C's call is used, since debug builds of the crate refuse memory of another domain.
        let mut piece = *memory.scatter_element(0..1).unwrap().as_raw();
        let mut receive =
            ffi::ibv_recv_wr { wr_id: 1, sg_list: &mut piece, num_sge: 1, ..Default::default() };
        let mut bad = null_mut();
        // SAFETY: the queue is live, and the test keeps the memory until all is done.
        let posted = unsafe { ffi::ibv_post_srq_recv(queue.as_raw(), &mut receive, &mut bad) };
        assert_eq!(posted, 0);
        let length = if local == WorkStatus::LocalLength { 2 } else { 1 };
        send(&mut sending, &here, 0..length, number, 2).unwrap();
        assert!(network.run_until_idle(LONG));
        assert_eq!(statuses(&other.received), [(1, local)]);
        assert_eq!(statuses(&one.sent), [(2, remote)]);
    }
}

/// The completion queue of a shared receive queue loses a completion: what names the queue from then on is refused.
#[test]
fn a_completion_queue_that_runs_over_stops_its_connections() {
    let (network, [one, other]) = world(4, 0.0);
    let small = Arc::new(CompletionQueue::new(&other.context, 1).unwrap());
    let queue = SharedReceiveQueue::extended(&other.domain, &other.xrc, &small, 8, 1).unwrap();
    let (here, there) = (one.memory(), other.memory());
    let number = queue.number().unwrap();
    for id in 0..8 {
        post(&queue, &there, 0..1, id).unwrap();
    }
    let (mut first, first_target) = connect(&one, &other);
    let (mut second, second_target) = connect(&one, &other);
    for id in 0..2 {
        send(&mut first, &here, 0..1, number, id).unwrap();
    }
    assert!(network.run_until_idle(LONG));
    assert_eq!(first_target.state().unwrap(), QueuePairState::Error);
    assert_eq!(second_target.state().unwrap(), QueuePairState::ReadyToSend);
    poll(&one.sent);
    send(&mut second, &here, 0..1, number, 9).unwrap();
    assert!(network.run_until_idle(LONG));
    assert_eq!(statuses(&one.sent), [(9, WorkStatus::RemoteOperation)]);
    let events = AsyncEvents::new(&*other.context).unwrap();
    let kinds: Vec<_> =
        std::iter::from_fn(|| events.next_event().unwrap().map(|event| event.kind())).collect();
    let fatal = AsyncEventKind::QueuePairFatal;
    assert_eq!(kinds, [AsyncEventKind::CompletionQueueError, fatal, fatal]);
}

#[test]
fn limits_hold() {
    let side = Side::of(Device::builder().max_srq(2).max_srq_wr(4).max_sge(1).build().unwrap());
    let new = |max_wr, max_sge| {
        SharedReceiveQueue::extended(&side.domain, &side.xrc, &side.received, max_wr, max_sge)
    };
    for (max_wr, max_sge) in [(5, 1), (4, 2), (0, 1)] {
        assert_eq!(new(max_wr, max_sge).unwrap_err().kind(), ErrorKind::InvalidInput);
    }
    let queues = [new(4, 1).unwrap(), new(1, 1).unwrap()];
    assert_eq!(new(1, 1).unwrap_err().raw_os_error(), Some(libc::ENOMEM));
    let memory = side.memory();
    for id in 0..4 {
        post(&queues[0], &memory, 0..1, id).unwrap();
    }
    assert_eq!(post(&queues[0], &memory, 0..1, 4).unwrap_err().kind(), ErrorKind::QueueFull);
    assert!(queues[0].set_limit(5).is_err());
    let [first, _second] = queues;
    let number = first.number().unwrap();
    first.close().unwrap();
    let again = new(4, 1).unwrap();
    assert_ne!(again.number().unwrap(), number, "numbers are not reused at once");
}

/// A completion queue that a shared receive queue has used can be destroyed after it, and not before.
#[test]
fn a_completion_queue_outlives_its_shared_receive_queues() {
    let side = Side::of(Device::new().unwrap());
    let received = CompletionQueue::new(&side.context, 4).unwrap();
    let new = || SharedReceiveQueue::extended(&side.domain, &side.xrc, &received, 1, 1).unwrap();
    let queues = [new(), new()];
    // SAFETY: the queue is live, and the verb refuses to destroy it.
    let destroy = || unsafe { ibverbs::ffi::ibv_destroy_cq(received.as_raw()) };
    for queue in queues {
        assert_eq!(destroy(), libc::EBUSY);
        queue.close().unwrap();
    }
    received.close().unwrap();
}
