//! The device counts by kind what it drops without an answer, and in strict mode reports it once per kind and queue
//! pair.

#[path = "support/patience.rs"]
mod patience;

use std::env;
use std::process::Command;
use std::time::Duration;

use ibverbs::{
    AccessFlags, ChannelBuilder, Gid, MemoryRegion, ProtectionDomain, QueuePair, QueuePairType,
    SendWorkRequest, Ud, WorkCompletion,
    operation::DatagramPeer,
    queue_pair::AddressVector,
    settings::{AckTimeout, MaxAckRetries},
};
use ibverbs_software::{Counters, Device, Network};

const LONG: Duration = Duration::from_secs(1000);
const MANY: u64 = 3;
/// Says that this process is the one whose standard error output is looked at, and whether its devices are strict.
const STRICT: &str = "IBVERBS_SOFTWARE_TEST_DROPS";
/// The number of all members of a group.
const MEMBERS: u32 = 0xff_ffff;

fn send(
    one: &mut QueuePair<'_, Ud>,
    domain: &ProtectionDomain<'_>,
    from: &MemoryRegion<'_, u8>,
    (to, number, qkey): (Gid, u32, u32),
) {
    let path = domain.create_ah(&AddressVector::new(1, 0).global(to, 0).hop_limit(1)).unwrap();
    let elements = [from.gather_element(..).unwrap()];
    let request = SendWorkRequest::new(&elements);
    let request = request.to(DatagramPeer { path: &path, number, qkey });
    // SAFETY: the region is not written.
    unsafe { one.post(request, 1).unwrap() };
}

/// Makes each mistake `MANY` times; returns the counters of the sender and the receiver.
fn make_mistakes(strict: bool) -> [Counters; 2] {
    let network = Network::new();
    let devices =
        [(); 2].map(|()| Device::builder().network(&network).strict(strict).build().unwrap());
    let contexts = devices.each_ref().map(|device| device.open().unwrap());
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let queues = contexts.each_ref().map(|context| context.create_cq(256).unwrap());
    let datagrams = |at: usize| {
        let builder = domains[at].create_qp(&queues[at], &queues[at], Ud);
        builder.max_send_wr(64).max_recv_wr(8).qkey(7).build().unwrap()
    };
    let from = domains[0].allocate::<u8>(64).unwrap();
    let mut to = domains[1].allocate::<u8>(64).unwrap();
    let mut one = datagrams(0).activate().unwrap();
    let mut other = datagrams(1).activate().unwrap();
    let unready = datagrams(1);
    let (gid, number) = (other.endpoint().gid(), other.number());
    let group: Gid = "::ffff:239.1.2.3".parse().unwrap();
    let gone = {
        let gone = datagrams(1).activate().unwrap();
        gone.number()
    };
    // No receive; then one that has no room for the 40 bytes in front.
    for _ in 0..MANY {
        send(&mut one, &domains[0], &from, (gid, number, 7));
    }
    network.run_until_idle(LONG);
    // SAFETY: nobody touches the region.
    unsafe { other.post_receive(&mut to, .., 5).unwrap() };
    for _ in 0..MANY {
        send(&mut one, &domains[0], &from, (gid, number, 7));
        send(&mut one, &domains[0], &from, (gid, number, 8));
        send(&mut one, &domains[0], &from, (gid, gone, 7));
        send(&mut one, &domains[0], &from, (gid, unready.endpoint().num(), 7));
        send(&mut one, &domains[0], &from, (group, MEMBERS, 7));
        send(&mut one, &domains[0], &from, (gid, MEMBERS, 7));
    }
    network.run_until_idle(LONG);
    other.attach_multicast(group, 0).unwrap();
    for _ in 0..MANY {
        send(&mut one, &domains[0], &from, (group, number, 7));
    }
    network.run_until_idle(LONG);
    // Unreliable connections: no receive, one that is too short, and a write that is not allowed.
    let kind = QueuePairType::UnreliableConnected;
    let prepare = |at: usize| {
        let builder = domains[at].create_qp(&queues[at], &queues[at], kind);
        builder.max_send_wr(64).max_recv_wr(8).access(AccessFlags::REMOTE_WRITE).build().unwrap()
    };
    let (uc, other_uc) = (prepare(0), prepare(1));
    let endpoints = (uc.endpoint(), other_uc.endpoint());
    let (mut uc, mut other_uc) =
        (uc.handshake(endpoints.1).unwrap(), other_uc.handshake(endpoints.0).unwrap());
    let shared = domains[1].allocate_shared::<u8>(64, AccessFlags::REMOTE_WRITE).unwrap();
    let remote = shared.remote();
    drop(shared);
    for _ in 0..MANY {
        // SAFETY: nobody touches the regions.
        unsafe { uc.post_send(&from, .., 1).unwrap() };
    }
    network.run_until_idle(LONG);
    // SAFETY: as above.
    unsafe { other_uc.post_receive(&mut to, ..8, 6).unwrap() };
    for _ in 0..MANY {
        // SAFETY: as above; the write goes nowhere.
        unsafe {
            uc.post_send(&from, .., 1).unwrap();
            uc.post_write(&from, .., remote, 1).unwrap();
        }
    }
    network.run_until_idle(LONG);
    let found = queues[1].poll(&mut [WorkCompletion::default(); 8]).unwrap().len();
    assert_eq!(found, 0, "nothing has arrived");
    devices.each_ref().map(Device::counters)
}

#[test]
fn what_is_dropped_is_counted_and_told_once() {
    if let Ok(strict) = env::var(STRICT) {
        let [sender, receiver] = make_mistakes(strict == "yes");
        assert_eq!(receiver.dropped_without_receive, 2 * MANY);
        assert_eq!(receiver.dropped_too_long, 2 * MANY);
        assert_eq!(receiver.dropped_wrong_key, 2 * MANY);
        assert_eq!(receiver.dropped_wrong_state, MANY);
        assert_eq!(receiver.dropped_without_queue_pair, MANY);
        assert_eq!(receiver.dropped_without_group, 2 * MANY);
        assert_eq!(sender.dropped_without_group, MANY);
        return;
    }
    for (strict, lines) in [("yes", 11), ("no", 0)] {
        let output = Command::new(env::current_exe().unwrap())
            .args(["what_is_dropped_is_counted_and_told_once", "--nocapture"])
            .env(STRICT, strict)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{text}");
        let told: Vec<&str> =
            text.lines().filter(|line| line.contains("dropped a packet")).collect();
        assert_eq!(told.len(), lines, "{text}");
        let mut different = told.clone();
        different.sort_unstable();
        different.dedup();
        assert_eq!(different.len(), told.len(), "{text}");
    }
}

/// Sends to a peer that has ended its connection.
fn send_after_the_end() {
    let network = Network::new();
    let devices =
        [(); 2].map(|()| Device::builder().network(&network).strict(true).build().unwrap());
    let contexts = devices.each_ref().map(|device| device.open().unwrap());
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let [one, other] = domains.each_ref().map(|domain| domain.create_channel().build().unwrap());
    let endpoints = (one.endpoint(), other.endpoint());
    let mut one = one.handshake(endpoints.1).unwrap();
    drop(other.handshake(endpoints.0).unwrap());
    assert!(one.send(()).is_err(), "its retries tell it");
    assert!(devices[1].counters().dropped_without_queue_pair > 1);
}

/// Clients that send something and close, and then their server's end does: one after the other, on sockets and on a network.
fn many_clients_close(devices: [Device; 2]) {
    const CLIENTS: usize = 200;
    let contexts = devices.each_ref().map(|device| device.open().unwrap());
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let mut servers = Vec::new();
    let mut clients = Vec::new();
    // The servers soon give up; they alone send to who is gone.
    let timeouts = [Duration::from_secs(4), Duration::from_millis(1)];
    let prepare = |at: usize| {
        let timeout = AckTimeout::from_duration(timeouts[at]).unwrap();
        let builder = ChannelBuilder::new(&domains[at]).ack_timeout(timeout);
        builder.max_ack_retries(MaxAckRetries::new(3).unwrap()).build().unwrap()
    };
    for _ in 0..CLIENTS {
        let [one, other] = [0, 1].map(prepare);
        let endpoints = (one.endpoint(), other.endpoint());
        clients.push(one.handshake(endpoints.1).unwrap());
        servers.push(other.handshake(endpoints.0).unwrap());
    }
    let mut memory = domains[1].allocate::<u8>(8).unwrap();
    for (nth, (mut client, mut server)) in clients.into_iter().zip(servers).enumerate() {
        let ended = server.scope(|scope| {
            let receive = scope.post_receive(memory.slice_mut(..).unwrap())?;
            client.until(patience::deadline()).send(())?;
            drop(client);
            receive.wait_until(patience::deadline())?;
            // Some servers ask for something afterwards.
            if nth % 10 == 0 {
                let sent = scope.post_send(())?.wait_until(patience::deadline());
                assert!(sent.is_err(), "the client is gone");
            }
            Ok::<(), ibverbs::TransportError>(())
        });
        assert!(ended.is_ok() || nth % 10 == 0, "{nth}: {ended:?}");
    }
}

/// Runs a test again as a process of strict devices, and returns what it writes to the standard error output.
fn strict_errors(test: &str) -> String {
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(STRICT, "yes")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{text}");
    text
}

/// A line is for what a program can mend.
#[test]
fn what_comes_after_a_connection_has_ended_is_counted_and_not_told() {
    if env::var(STRICT).is_ok() {
        return send_after_the_end();
    }
    let text = strict_errors("what_comes_after_a_connection_has_ended_is_counted_and_not_told");
    assert!(!text.contains("dropped a packet"), "{text}");
}

#[test]
fn clients_that_close_in_order_are_no_mistake() {
    if env::var(STRICT).is_ok() {
        let network = Network::new();
        let strict = || Device::builder().strict(true);
        many_clients_close([(); 2].map(|()| strict().network(&network).build().unwrap()));
        return many_clients_close([(); 2].map(|()| strict().build().unwrap()));
    }
    let text = strict_errors("clients_that_close_in_order_are_no_mistake");
    assert!(!text.contains("dropped a packet"), "{text}");
}
