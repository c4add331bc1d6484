//! Unreliable connections, draining, and shared receive queues, on a simulated network.

use std::time::Duration;

use ibverbs::device::{AsyncEventKind, AsyncEvents};
use ibverbs::{
    CompletionQueue, Context, ProtectionDomain, QueuePair, QueuePairState, QueuePairType,
    SharedReceiveQueue, WorkCompletion, settings::MaxRnrRetries,
};
use ibverbs_software::{Network, PacketFate};

const LONG: Duration = Duration::from_secs(1000);

/// Two devices on a network where time passes by `run_until_idle` alone.
fn world(seed: u64, loss: f64) -> (Network, [Context<'static>; 2]) {
    let network = Network::builder().seed(seed).loss(loss).manual().build();
    let contexts = [(); 2].map(|()| network.device().unwrap().open().unwrap());
    (network, contexts)
}

fn connect<'a>(
    domains: &'a [ProtectionDomain<'a>; 2],
    queues: &'a [CompletionQueue<'a>; 2],
    kind: QueuePairType,
    shared: Option<&'a SharedReceiveQueue<'a>>,
) -> [QueuePair<'a, QueuePairType>; 2] {
    let prepare = |i: usize| {
        let builder = domains[i].create_qp(&queues[i], &queues[i], kind);
        let builder = builder.max_send_wr(64).max_recv_wr(64);
        let builder = builder.max_rnr_retries(MaxRnrRetries::UNLIMITED);
        match shared.filter(|_| i == 1) {
            Some(shared) => builder.srq(shared).build().unwrap(),
            None => builder.build().unwrap(),
        }
    };
    let (one, other) = (prepare(0), prepare(1));
    let endpoints = [one.endpoint(), other.endpoint()];
    [one.handshake(endpoints[1]).unwrap(), other.handshake(endpoints[0]).unwrap()]
}

fn poll(queue: &CompletionQueue<'_>) -> Vec<u64> {
    let mut room = [WorkCompletion::default(); 64];
    let found = queue.poll(&mut room).unwrap();
    assert!(found.iter().all(WorkCompletion::is_success), "{found:?}");
    found.iter().map(WorkCompletion::wr_id).collect()
}

/// Each message arrives whole or not at all, in order, and nothing is sent again.
#[test]
fn an_unreliable_connection_loses_whole_messages() {
    let (network, contexts) = world(5, 0.1);
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let queues = contexts.each_ref().map(|context| context.create_cq(128).unwrap());
    let [mut one, mut other] = connect(&domains, &queues, QueuePairType::UnreliableConnected, None);
    const MESSAGES: u64 = 40;
    const LENGTH: usize = 10_000;
    let mut from = domains[0].allocate::<u8>(LENGTH).unwrap();
    let mut to = domains[1].allocate::<u8>(LENGTH).unwrap();
    let mut arrived = Vec::new();
    // SAFETY: the regions are touched only while no request is in flight.
    unsafe { other.post_receive(&mut to, .., 0).unwrap() };
    for message in 1..=MESSAGES {
        from.fill(message as u8);
        // SAFETY: as above.
        unsafe { one.post_send(&from, .., message).unwrap() };
        assert!(network.run_until_idle(LONG));
        assert_eq!(poll(&queues[0]), [message], "a send completes, whatever becomes of it");
        if let [_] = poll(&queues[1])[..] {
            assert!(to.iter().all(|&byte| byte == message as u8), "message {message} is not whole");
            arrived.push(message);
            // SAFETY: as above.
            unsafe { other.post_receive(&mut to, .., message).unwrap() };
        }
    }
    let lost = network.trace().lost();
    assert!(lost > 0 && arrived.len() < MESSAGES as usize && arrived.len() > 10, "{arrived:?}");
    let packets = network.trace().packets().len();
    assert_eq!(packets, 3 * MESSAGES as usize, "nothing is sent again, nothing is acknowledged");
}

#[test]
fn a_send_queue_drains_and_resumes() {
    let (network, contexts) = world(1, 0.0);
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let queues = contexts.each_ref().map(|context| context.create_cq(128).unwrap());
    let events = AsyncEvents::new(&contexts[0]).unwrap();
    let [mut one, mut other] = connect(&domains, &queues, QueuePairType::ReliableConnected, None);
    let from = domains[0].allocate::<u8>(8).unwrap();
    let mut to = domains[1].allocate::<u8>(8).unwrap();
    // SAFETY: nobody touches the regions.
    unsafe {
        for id in 0..4 {
            other.post_receive(&mut to, .., id).unwrap();
        }
        one.post_send(&from, .., 1).unwrap();
        one.drain(true).unwrap();
        one.post_send(&from, .., 2).unwrap();
    }
    assert_eq!(one.state().unwrap(), QueuePairState::SendQueueDrained);
    assert!(events.next_event().unwrap().is_none(), "the first is still under way");
    assert!(network.run_until_idle(LONG));
    assert_eq!(events.next_event().unwrap().unwrap().kind(), AsyncEventKind::SendQueueDrained);
    assert_eq!(poll(&queues[0]), [1], "what was posted in SQD waits");
    one.resume().unwrap();
    assert!(network.run_until_idle(LONG));
    assert_eq!(poll(&queues[0]), [2]);
    assert_eq!(poll(&queues[1]), [0, 1]);
    assert!(events.next_event().unwrap().is_none());
}

#[test]
fn a_shared_receive_queue_serves_in_order_and_warns_at_its_limit() {
    let (network, contexts) = world(2, 0.3);
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let queues = contexts.each_ref().map(|context| context.create_cq(128).unwrap());
    let events = AsyncEvents::new(&contexts[1]).unwrap();
    let shared = domains[1].create_srq(16, 1).unwrap();
    let mut to = domains[1].allocate::<u8>(64).unwrap();
    for id in 0..8 {
        // SAFETY: nobody touches the region.
        unsafe { shared.post_receive(&mut to, .., id).unwrap() };
    }
    shared.set_limit(3).unwrap();
    let kind = QueuePairType::ReliableConnected;
    let mut pairs = [(); 2].map(|()| connect(&domains, &queues, kind, Some(&shared)));
    let from = domains[0].allocate::<u8>(8).unwrap();
    let mut expected = Vec::new();
    for id in 0..8 {
        assert_eq!(events.next_event().unwrap().is_some(), id == 6, "after {id} messages");
        // SAFETY: as above.
        unsafe { pairs[id as usize % 2][0].post_send(&from, .., id).unwrap() };
        assert!(network.run_until_idle(LONG));
        assert_eq!(poll(&queues[0]), [id]);
        expected.push(id);
    }
    assert_eq!(poll(&queues[1]), expected, "in the order in which they were posted");
    let lost = |fate| fate == PacketFate::Lost;
    assert!(network.trace().packets().any(|packet| lost(packet.fate())), "the network is bad");
}
