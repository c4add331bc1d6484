//! Extended reliable connections over a bad network: a seed decides everything.

use std::time::Duration;

use ibverbs_software::{Device, Network, PacketFate};

use super::{LONG, Side, connect, post, send, succeeded};

/// Messages of several lengths, over two connections to two queues; returns all that the network saw.
fn conversation(seed: u64) -> (String, Vec<u64>) {
    let network = Network::builder()
        .seed(seed)
        .loss(0.05)
        .duplicate(0.05)
        .reorder(0.1)
        .corrupt(0.02)
        .delay(Duration::from_micros(3))
        .jitter(Duration::from_micros(2))
        .manual()
        .build();
    let [one, other] = [(); 2].map(|()| Side::new(&network));
    let mut sending = [(); 2].map(|()| connect(&one, &other));
    let queues = [(); 2].map(|()| other.shared_queue());
    let (here, there) = (one.memory(), other.memory());
    let mut received = Vec::new();
    for message in 0..60 {
        let length = [1, 500, 1024][message % 3];
        let queue = &queues[message / 2 % 2];
        (0..length).for_each(|i| here.write_one(i, (message * 7919 + i) as u64).unwrap());
        there.fill(0);
        post(queue, &there, 0..1024, message as u64).unwrap();
        let (sending, _) = &mut sending[message % 2];
        send(sending, &here, 0..length, queue.number().unwrap(), message as u64).unwrap();
        assert!(network.run_until_idle(LONG));
        assert_eq!(succeeded(&one.sent), [message as u64]);
        received.extend(succeeded(&other.received));
        assert_eq!(there.to_vec()[..length], here.to_vec()[..length]);
        assert!(there.to_vec()[length..].iter().all(|&word| word == 0));
    }
    let counters = [&one, &other].map(|side| Device::counters(&side.device));
    assert!(counters[0].retransmissions > 0, "{counters:?}");
    let trace = network.trace();
    assert!(trace.packets().any(|packet| packet.fate() == PacketFate::Lost));
    let text = trace.to_string();
    assert!(text.contains("XRC SEND_FIRST") && text.contains("XRC ACKNOWLEDGE"), "{text}");
    assert!(trace.packets().all(|packet| packet.opcode() >> 5 == 5));
    (text, received)
}

#[test]
fn the_same_seed_gives_the_same_packets() {
    let (first, again, other) = (conversation(7), conversation(7), conversation(8));
    assert_eq!(first.1, (0..60).collect::<Vec<_>>());
    assert!(first == again);
    assert!(first.0 != other.0);
}
