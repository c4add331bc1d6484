//! The simulated network: what it does to packets, when time passes, and that a seed decides everything.

#[path = "support/patience.rs"]
mod patience;

use std::time::{Duration, Instant};

use ibverbs::{
    AccessFlags, Channel, CompletionQueue, Context, ErrorKind, FetchAddWorkRequest, MemoryRegion,
    ProtectionDomain, Rc, TransportError, WorkStatus,
    settings::{AckTimeout, MaxAckRetries, MaxRnrRetries},
};
use ibverbs_software::{Conditions, Device, Network, PacketFate};

use patience::{PATIENCE, deadline};

/// About a millisecond.
const ACK_TIMEOUT: AckTimeout = match AckTimeout::new(8) {
    Ok(timeout) => timeout,
    Err(_) => unreachable!(),
};

fn channels<'a>(
    one: &'a ProtectionDomain<'a>,
    other: &'a ProtectionDomain<'a>,
) -> [Channel<'a>; 2] {
    let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
    let prepare = |domain: &'a ProtectionDomain<'a>| {
        let builder = domain.create_channel().access(access);
        let builder = builder.ack_timeout(ACK_TIMEOUT);
        builder.max_rnr_retries(MaxRnrRetries::UNLIMITED).build().unwrap()
    };
    let (one, other) = (prepare(one), prepare(other));
    let endpoints = (one.endpoint(), other.endpoint());
    [one.handshake(endpoints.1).unwrap(), other.handshake(endpoints.0).unwrap()]
}

#[test]
fn a_number_that_is_no_probability_is_refused() {
    for (text, network) in [
        ("loss is 2", Network::builder().loss(2.0)),
        ("loss is -1", Network::builder().loss(-1.0)),
        ("loss is NaN", Network::builder().loss(f64::NAN)),
        ("duplicate is 1.5", Network::builder().duplicate(1.5)),
        ("reorder is inf", Network::builder().reorder(f64::INFINITY)),
        ("corrupt is -0.1", Network::builder().corrupt(-0.1)),
    ] {
        let error = network.build().device().unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
        assert_eq!(error.to_string(), format!("{text}, and must be within 0..=1"));
    }
    Network::builder().loss(1.0).build().device().unwrap();
}

fn devices(network: &Network) -> [Device; 2] {
    [(); 2].map(|()| network.device().unwrap())
}

fn domains<'a>(contexts: &'a [Context<'static>; 2]) -> [ProtectionDomain<'a>; 2] {
    contexts.each_ref().map(|context| context.alloc_pd().unwrap())
}

/// Sends the message in `from` from one channel to the other, into `to`.
fn deliver(
    (sender, from): (&mut Channel<'_>, &MemoryRegion<'_, u8>),
    (receiver, to): (&mut Channel<'_>, &mut MemoryRegion<'_, u8>),
) {
    receiver
        .scope(|scope| {
            let receive = scope.post_receive(to.slice_mut(..).unwrap())?;
            sender.until(deadline()).send(from.slice(..).unwrap())?;
            receive.wait_until(deadline())?;
            Ok::<(), TransportError>(())
        })
        .unwrap();
}

/// Sends `rounds` messages there, and each back; returns the times of the network at their completions.
fn ping_pong(
    network: &Network,
    domains: &[ProtectionDomain<'_>; 2],
    channels: &mut [Channel<'_>; 2],
    rounds: usize,
) -> Vec<Duration> {
    const LENGTH: usize = 5000;
    let [one, other] = channels;
    let mut from = domains[0].allocate::<u8>(LENGTH).unwrap();
    let mut to = domains[1].allocate::<u8>(LENGTH).unwrap();
    let mut times = Vec::new();
    for round in 0..rounds {
        from.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i * 7 + i / 256 + round) as u8);
        let expected = from.to_vec();
        deliver((one, &from), (other, &mut to));
        times.push(network.now());
        assert!(to[..] == expected[..], "round {round}");
        from.fill(0);
        deliver((other, &to), (one, &mut from));
        times.push(network.now());
        assert!(from[..] == expected[..], "round {round}");
    }
    times
}

/// A conversation over a bad network; returns everything that can be seen of it.
fn conversation(seed: u64) -> (Vec<Duration>, String, Vec<u64>) {
    let network = Network::builder()
        .seed(seed)
        .loss(0.05)
        .duplicate(0.05)
        .reorder(0.1)
        .corrupt(0.02)
        .delay(Duration::from_micros(3))
        .jitter(Duration::from_micros(2))
        .bandwidth(1_000_000_000)
        .build();
    let devices = devices(&network);
    let contexts = devices.each_ref().map(|device| device.open().unwrap());
    let domains = domains(&contexts);
    let mut channels = channels(&domains[0], &domains[1]);
    let times = ping_pong(&network, &domains, &mut channels, 20);
    let counters = devices.each_ref().map(Device::counters);
    assert!(counters.iter().any(|counters| counters.retransmissions > 0), "{counters:?}");
    assert!(counters.iter().any(|counters| counters.packets_malformed > 0), "corrupted packets");
    let trace = network.trace();
    assert!(trace.lost() > 0);
    let counts = counters.iter().flat_map(|c| [c.packets_sent, c.packets_received]).collect();
    (times, trace.to_string(), counts)
}

#[test]
fn the_same_seed_gives_the_same_everything() {
    let (first, again, other) = (conversation(7), conversation(7), conversation(8));
    assert!(first == again);
    assert!(first.1 != other.1);
}

/// Two-sided messages contain no address of memory: the packets are the same byte for byte.
#[test]
fn the_same_seed_gives_the_same_bytes() {
    let run = || {
        let network = Network::builder().seed(3).loss(0.1).build();
        let contexts = devices(&network).map(|device| device.open().unwrap());
        let domains = domains(&contexts);
        ping_pong(&network, &domains, &mut channels(&domains[0], &domains[1]), 5);
        network.trace()
    };
    let (first, again) = (run(), run());
    assert!(first.packets().any(|packet| packet.fate() == PacketFate::Lost));
    assert!(first == again);
}

/// One-sided requests contain addresses of memory, which differ, and keys. Traces are equal all the same; data counts.
#[test]
fn traces_of_one_seed_are_equal_wherever_the_memory_is() {
    let mut kept = Vec::new();
    let mut run = |data: u64| {
        let network = Network::builder().seed(3).loss(0.1).build();
        let contexts = devices(&network).map(|device| device.open().unwrap());
        let domains = domains(&contexts);
        let [mut one, _other] = channels(&domains[0], &domains[1]);
        let access =
            AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
        let target = domains[1].allocate_shared::<u64>(1000, access).unwrap();
        let mut own = domains[0].allocate::<u64>(1000).unwrap();
        own.fill(data);
        for _ in 0..5 {
            one.write(own.slice(..).unwrap(), target.remote()).unwrap();
            one.read(own.slice_mut(..).unwrap(), target.remote()).unwrap();
            let counter = target.remote().typed::<u64>().unwrap().element(5).unwrap();
            one.run(FetchAddWorkRequest::new(own.slice_mut(..1).unwrap(), counter, 1)).unwrap();
            own.fill(data);
        }
        // The next run's memory is elsewhere.
        kept.push(vec![1_u8; 100_000]);
        let trace = network.trace();
        let raw: Vec<Vec<u8>> = trace.packets().map(|packet| packet.bytes().to_vec()).collect();
        std::mem::forget(target);
        (trace, raw)
    };
    let (first, again, other) = (run(1), run(1), run(2));
    assert!(first.1 != again.1, "the addresses are the same: nothing is shown");
    assert!(first.0 == again.0);
    assert_eq!(first.0.to_string(), again.0.to_string());
    assert!(first.0 != other.0, "other data");
}

#[test]
fn a_perfect_network_takes_the_time_that_it_says() {
    let delay = Duration::from_micros(10);
    let network = Network::builder().delay(delay).build();
    let contexts = devices(&network).map(|device| device.open().unwrap());
    let domains = domains(&contexts);
    let [mut one, mut other] = channels(&domains[0], &domains[1]);
    let (from, mut to) =
        (domains[0].allocate::<u8>(8).unwrap(), domains[1].allocate::<u8>(8).unwrap());
    deliver((&mut one, &from), (&mut other, &mut to));
    assert_eq!(network.now(), 2 * delay, "there, and the acknowledgement back");
    let fates: Vec<_> = network.trace().packets().map(|packet| packet.fate()).collect();
    assert_eq!(fates, [PacketFate::Delivered(delay), PacketFate::Delivered(2 * delay)]);
    assert!(network.run_until_idle(PATIENCE));
}

#[test]
fn bandwidth_is_shared_by_the_packets_of_a_device() {
    // 1 GB/s: a byte takes a nanosecond.
    let network = Network::builder().bandwidth(1_000_000_000).delay(Duration::ZERO).build();
    let contexts = devices(&network).map(|device| device.open().unwrap());
    let domains = domains(&contexts);
    let [mut one, mut other] = channels(&domains[0], &domains[1]);
    let from = domains[0].allocate::<u8>(100_000).unwrap();
    let mut to = domains[1].allocate::<u8>(100_000).unwrap();
    deliver((&mut one, &from), (&mut other, &mut to));
    let bytes: usize = network
        .trace()
        .packets()
        .filter(|packet| packet.from() == "10.0.0.1".parse::<std::net::IpAddr>().unwrap())
        .map(|packet| packet.bytes().len() + 42)
        .sum();
    assert!(bytes > 100_000);
    let shortest = Duration::from_nanos(bytes as u64);
    assert!(network.now() >= shortest, "{:?} {shortest:?}", network.now());
}

/// With 1 % loss and a peer that is gone, seconds of retries pass at once.
#[test]
fn a_partition_ends_in_an_error_after_all_retries() {
    let network = Network::new();
    let devices = devices(&network);
    let contexts = devices.each_ref().map(|device| device.open().unwrap());
    let domains = domains(&contexts);
    let prepare = |domain| {
        let timeout = AckTimeout::from_duration(Duration::from_millis(500)).unwrap();
        let builder = ibverbs::ChannelBuilder::new(domain).ack_timeout(timeout);
        builder.max_ack_retries(MaxAckRetries::new(7).unwrap()).build().unwrap()
    };
    let (one, other) = (prepare(&domains[0]), prepare(&domains[1]));
    let endpoints = (one.endpoint(), other.endpoint());
    let mut one = one.handshake(endpoints.1).unwrap();
    let _other = other.handshake(endpoints.0).unwrap();
    network.partition(&devices[0], &devices[1]);
    let from = domains[0].allocate::<u8>(8).unwrap();
    let began = Instant::now();
    let error = one.until(deadline()).send(from.slice(..).unwrap()).unwrap_err();
    assert_eq!(error.work_error().unwrap().status(), WorkStatus::RetryExceeded, "{error}");
    // The device tries once and seven times more, each for 4.096 us * 2^17 = 0.54 s.
    assert_eq!(network.now(), 8 * Duration::from_nanos(4096 << 17));
    assert!(began.elapsed() < PATIENCE);
    let trace = network.trace();
    assert_eq!(trace.packets().len(), 8);
    assert!(trace.packets().all(|packet| packet.fate() == PacketFate::Partitioned));
}

#[test]
fn a_partition_that_heals_costs_time_only() {
    let network = Network::new();
    let devices = devices(&network);
    let contexts = devices.each_ref().map(|device| device.open().unwrap());
    let domains = domains(&contexts);
    let mut channels = channels(&domains[0], &domains[1]);
    network.partition_one_way(&devices[1], &devices[0]);
    let (from, mut to) =
        (domains[0].allocate::<u8>(8).unwrap(), domains[1].allocate::<u8>(8).unwrap());
    let [one, other] = &mut channels;
    other
        .scope(|other| {
            let receive = other.post_receive(to.slice_mut(..).unwrap())?;
            one.scope(|one| {
                let mut send = one.post_send(from.slice(..).unwrap())?;
                network.advance(Duration::from_millis(3));
                assert!(send.poll().is_none(), "no acknowledgement can arrive");
                network.heal(&devices[0], &devices[1]);
                send.wait_until(deadline())?;
                Ok::<(), TransportError>(())
            })?;
            receive.wait_until(deadline())?;
            Ok::<(), TransportError>(())
        })
        .unwrap();
    assert!(devices[0].counters().retransmissions > 0);
    network.partition(&devices[0], &devices[1]);
    network.heal_all();
    ping_pong(&network, &domains, &mut channels, 2);
}

#[test]
fn in_manual_mode_only_the_program_lets_time_pass() {
    let network = Network::builder().manual().delay(Duration::from_millis(1)).build();
    let contexts = devices(&network).map(|device| device.open().unwrap());
    let domains = domains(&contexts);
    let [mut one, mut other] = channels(&domains[0], &domains[1]);
    let (from, mut to) =
        (domains[0].allocate::<u8>(8).unwrap(), domains[1].allocate::<u8>(8).unwrap());
    other
        .scope(|other| {
            let mut receive = other.post_receive(to.slice_mut(..).unwrap())?;
            one.scope(|one| {
                let mut send = one.post_send(from.slice(..).unwrap())?;
                for _ in 0..100 {
                    assert!(send.poll().is_none());
                }
                assert_eq!(network.now(), Duration::ZERO);
                network.advance(Duration::from_micros(999));
                assert!(receive.poll().is_none());
                network.advance(Duration::from_micros(1));
                assert!(receive.poll().is_some() && send.poll().is_none());
                assert_eq!(network.now(), Duration::from_millis(1));
                assert!(network.run_until_idle(Duration::from_secs(1)));
                assert!(send.poll().is_some());
                Ok::<(), TransportError>(())
            })
        })
        .unwrap();
}

#[test]
fn threads_that_sleep_let_the_network_work() {
    const ROUNDS: usize = 10;
    let network = Network::builder().seed(1).loss(0.05).build();
    let contexts = devices(&network).map(|device| device.open().unwrap());
    let domains = domains(&contexts);
    let queues = contexts
        .each_ref()
        .map(|context| CompletionQueue::builder(context, 64).own_channel().build().unwrap());
    let queue_pair = |i: usize| {
        let kind = Rc;
        let builder = domains[i].create_qp(&queues[i], &queues[i], kind).max_recv_wr(16);
        builder.max_rnr_retries(MaxRnrRetries::UNLIMITED).build().unwrap()
    };
    let (one, other) = (queue_pair(0), queue_pair(1));
    let endpoints = [one.endpoint(), other.endpoint()];
    let mut one = one.handshake(endpoints[1]).unwrap();
    let mut other = other.handshake(endpoints[0]).unwrap();
    let from = domains[0].allocate::<u8>(10_000).unwrap();
    let mut to = domains[1].allocate::<u8>(10_000).unwrap();
    let wait = |i: usize| {
        let mut room = [ibverbs::WorkCompletion::default()];
        let found = queues[i].wait_until(&mut room, deadline()).unwrap();
        assert!(found.iter().all(|completion| completion.is_success()), "{found:?}");
    };
    // The receives come before the sends: while a sender retries, virtual time passes quickly.
    for _ in 0..ROUNDS {
        // SAFETY: nobody touches the region before the completions.
        unsafe { other.post_receive(&mut to, .., 1).unwrap() };
    }
    std::thread::scope(|scope| {
        let receiver = scope.spawn(|| (0..ROUNDS).for_each(|_| wait(1)));
        for _ in 0..ROUNDS {
            // SAFETY: as above.
            unsafe { one.post_send(&from, .., 2).unwrap() };
            wait(0);
        }
        receiver.join().unwrap();
    });
}

/// The channels do not wait here, so only the background thread delivers packets.
#[test]
fn a_background_thread_drives_for_those_who_wait_for_files_themselves() {
    let network = Network::new();
    let contexts = devices(&network).map(|device| device.open().unwrap());
    let domains = domains(&contexts);
    let [mut one, mut other] = channels(&domains[0], &domains[1]);
    let (from, mut to) =
        (domains[0].allocate::<u8>(8).unwrap(), domains[1].allocate::<u8>(8).unwrap());
    let driver = network.drive_in_background().unwrap();
    other
        .scope(|other| {
            let _receive = other.post_receive(to.slice_mut(..).unwrap())?;
            one.scope(|one| {
                let _send = one.post_send(from.slice(..).unwrap())?;
                let began = Instant::now();
                while network.now() < Duration::from_micros(2) {
                    assert!(began.elapsed() < PATIENCE);
                    std::thread::yield_now();
                }
                Ok::<(), TransportError>(())
            })
        })
        .unwrap();
    drop(driver);
}

#[test]
fn a_wait_for_nothing_ends_at_its_deadline() {
    let network = Network::new();
    let context = network.device().unwrap().open().unwrap();
    let queue = CompletionQueue::builder(&context, 1).own_channel().build().unwrap();
    let mut room = [ibverbs::WorkCompletion::default()];
    let error =
        queue.wait_until(&mut room, Instant::now() + Duration::from_millis(20)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert_eq!(network.now(), Duration::ZERO, "virtual time stands still");
}

/// However far the program lets it pass, there is time left for the devices' timers.
#[test]
fn time_passes_up_to_its_end_and_devices_work_then() {
    let network = Network::new();
    let contexts = devices(&network).map(|device| device.open().unwrap());
    let domains = domains(&contexts);
    let mut channels = channels(&domains[0], &domains[1]);
    for _ in 0..2 {
        network.advance(Duration::MAX);
        assert!(network.now() > Duration::from_secs(200 * 365 * 86400));
        ping_pong(&network, &domains, &mut channels, 1);
    }
}

#[test]
fn addresses_are_the_networks() {
    let network = Network::new();
    let first = network.device().unwrap();
    let chosen = Device::builder().network(&network).address("10.0.0.2".parse().unwrap());
    let chosen = chosen.address("fd00::7".parse().unwrap()).build().unwrap();
    let third = network.device().unwrap();
    assert_eq!(third.address().to_string(), "10.0.0.3");
    let again = Device::builder().network(&network).address(first.address()).build();
    assert_eq!(again.unwrap_err().kind(), std::io::ErrorKind::AddrInUse);
    let twice = ["10.1.0.1".parse().unwrap(); 2];
    assert!(Device::builder().network(&network).port(twice).build().is_err());
    // Another network has its own.
    assert_eq!(Network::new().device().unwrap().address(), first.address());
    let context = chosen.open().unwrap();
    assert_eq!(context.query_gid(1, 1).unwrap().gid.to_string(), "fd00::7");
    let address = chosen.address();
    drop((context, chosen));
    Device::builder().network(&network).address(address).build().unwrap();
}

#[test]
fn late_packets_of_an_old_connection_change_nothing() {
    let network = Network::new();
    let contexts = devices(&network).map(|device| device.open().unwrap());
    let domains = domains(&contexts);
    ping_pong(&network, &domains, &mut channels(&domains[0], &domains[1]), 3);
    let old = network.trace();
    let mut fresh = channels(&domains[0], &domains[1]);
    for packet in old.packets() {
        network.replay(packet);
    }
    assert!(network.run_until_idle(Duration::from_secs(1)));
    let packets = network.trace();
    let replayed = packets.packets().filter(|packet| packet.is_copy()).count();
    assert_eq!(replayed, old.packets().len());
    ping_pong(&network, &domains, &mut fresh, 3);
}

#[test]
fn conditions_change_while_the_network_runs() {
    let network = Network::new();
    assert_eq!(network.conditions(), Conditions::PERFECT);
    let contexts = devices(&network).map(|device| device.open().unwrap());
    let domains = domains(&contexts);
    let mut channels = channels(&domains[0], &domains[1]);
    ping_pong(&network, &domains, &mut channels, 2);
    assert_eq!(network.trace().lost(), 0);
    let mut bad = Conditions::PERFECT;
    bad.loss = 0.2;
    network.set_conditions(bad);
    ping_pong(&network, &domains, &mut channels, 5);
    assert!(network.trace().lost() > 0);
}

/// A thread that drives the network while it sleeps has two reasons to wake up.
#[test]
fn a_thread_that_sleeps_and_drives_can_be_cancelled() {
    let network = Network::new();
    let contexts = devices(&network).map(|device| device.open().unwrap());
    let domains = domains(&contexts);
    for when in [Duration::ZERO, Duration::from_millis(20)] {
        let prepare = |domain| {
            let builder = ProtectionDomain::create_channel(domain).sleep_after(0);
            builder.build().unwrap()
        };
        let (one, other) = (prepare(&domains[0]), prepare(&domains[1]));
        let endpoints = (one.endpoint(), other.endpoint());
        let mut one = one.handshake(endpoints.1).unwrap();
        let _other = other.handshake(endpoints.0).unwrap();
        let handle = one.cancel_handle().unwrap();
        let error = std::thread::scope(|threads| {
            threads.spawn(|| {
                std::thread::sleep(when);
                handle.cancel();
            });
            one.until(deadline()).receive(()).unwrap_err()
        });
        assert_eq!(error, TransportError::Cancelled);
    }
}
