//! The link, the network device or the address is removed while a program uses it. On
//! Soft-RoCE, with cables and devices that the tests create. To be run by `script/test rxe`, in the
//! machine that `script/vm` starts.

#[path = "support/figures.rs"]
mod figures;
#[path = "support/vm/mod.rs"]
mod vm;

use std::thread;
use std::time::{Duration, Instant};

use figures::figure;
use ibverbs::device::{AsyncEventKind as Kind, AsyncEvents, PortState};
use ibverbs::{
    Channel, ChannelBuilder, Context, MemoryRegion, ProtectionDomain, Rc, TransportError,
    settings::{MaxRnrRetries, MinRnrTimer},
};

use vm::channels::{handshake, reconnect};
use vm::{PATIENCE, alone, assert_nothing_left, run, short_name};

/// Numbers in a message: 32 KiB.
const LENGTH: usize = 4096;
/// How long a transfer runs before anything happens to it.
const A_WHILE: Duration = Duration::from_millis(300);

/// A network cable of its own, with an RDMA device at each end.
struct Cable {
    number: u8,
}

impl Cable {
    /// Set up as by `script/vm`, with the same rules: packets of RDMA stay on the cable, though both ends are
    /// on this machine.
    fn new(number: u8) -> Self {
        let cable = Self { number };
        let mut commands = format!("link add w{number}a type veth peer name w{number}b\n");
        for (end, address) in [("a", 1), ("b", 2)] {
            let (net, table) = (format!("w{number}{end}"), cable.table(address));
            commands += &format!(
                "link set {net} address 52:54:00:79:0{number}:0{address}
                addr add 10.90.{number}.{address}/24 dev {net}
                rule add pref {table} oif {net} lookup {table}
                link set {net} up\n"
            );
        }
        ip(&commands);
        run(&format!(
            "for net in w{number}a w{number}b; do
                echo 1 >/proc/sys/net/ipv4/conf/$net/accept_local
                echo 0 >/proc/sys/net/ipv4/conf/$net/rp_filter
            done"
        ));
        cable.route();
        run(&format!(
            "rdma link add r{number}a type rxe netdev w{number}a
            rdma link add r{number}b type rxe netdev w{number}b"
        ));
        cable
    }

    fn table(&self, address: u8) -> u8 {
        10 + 2 * self.number + address
    }

    /// The routes from end to end, which disappear when a link goes down.
    fn route(&self) {
        let number = self.number;
        let mut commands = String::new();
        for (end, address) in [("a", 1), ("b", 2)] {
            let (net, peer, table) = (format!("w{number}{end}"), 3 - address, self.table(address));
            commands += &format!(
                "route replace 10.90.{number}.{peer} dev {net} src 10.90.{number}.{address} \
                    table {table}
                neigh replace 10.90.{number}.{peer} lladdr 52:54:00:79:0{number}:0{peer} \
                    dev {net} nud permanent\n"
            );
        }
        ip(&commands);
    }

    fn device(&self, end: &str) -> String {
        format!("r{}{end}", self.number)
    }

    fn open(&self, end: &str) -> Context<'static> {
        ibverbs::open(&self.device(end)).unwrap()
    }
}

/// Several commands of ip(8).
fn ip(commands: &str) {
    run(&format!("ip -batch - <<'END'\n{commands}END"));
}

fn builder<'a>(domain: &'a ProtectionDomain<'_>) -> ChannelBuilder<'a> {
    Channel::builder(domain)
        .min_rnr_timer(MinRnrTimer::SHORTEST)
        .max_rnr_retries(MaxRnrRetries::UNLIMITED)
        .sleep_after(100)
}

fn fill(numbers: &mut [u64], message: u64) {
    for (number, value) in numbers.iter_mut().zip(message * LENGTH as u64..) {
        *number = value;
    }
}

/// The end of one side of a transfer.
#[derive(Debug)]
struct End {
    messages: u64,
    error: TransportError,
    at: Instant,
}

impl End {
    fn name(&self) -> String {
        short_name(&self.error)
    }
}

/// Sends message after message until that fails.
fn send(channel: &mut Channel<'_>, source: &mut MemoryRegion<'_, u64>) -> End {
    for messages in 0.. {
        fill(source, messages);
        let deadline = Instant::now() + PATIENCE;
        if let Err(error) = channel.until(deadline).send(source.slice(..).unwrap()) {
            return End { messages, error, at: Instant::now() };
        }
    }
    unreachable!()
}

/// Receives and checks message after message until that fails, or none has come for 5 s.
fn receive(channel: &mut Channel<'_>, sink: &mut MemoryRegion<'_, u64>) -> End {
    for messages in 0.. {
        let deadline = Instant::now() + Duration::from_secs(5);
        if let Err(error) = channel.until(deadline).receive(sink.slice_mut(..).unwrap()) {
            return End { messages, error, at: Instant::now() };
        }
        let first = messages * LENGTH as u64;
        assert!(sink.iter().copied().eq(first..first + LENGTH as u64), "message {messages}");
    }
    unreachable!()
}

/// Transfers, and takes something away meanwhile; returns how each side ended.
fn transfer(
    channels: (&mut Channel<'_>, &mut Channel<'_>),
    domains: &[ProtectionDomain<'_>; 2],
    take_away: impl FnOnce(),
) -> String {
    let mut source = domains[0].allocate::<u64>(LENGTH).unwrap();
    let mut sink = domains[1].allocate::<u64>(LENGTH).unwrap();
    let (sender, receiver, gone) = thread::scope(|threads| {
        let sender = threads.spawn(|| send(channels.0, &mut source));
        let receiver = threads.spawn(|| receive(channels.1, &mut sink));
        thread::sleep(A_WHILE);
        take_away();
        let gone = Instant::now();
        (sender.join().unwrap(), receiver.join().unwrap(), gone)
    });
    // Messages that were acknowledged were received, and checked there.
    assert!(sender.messages > 0, "{sender:?}");
    assert!(receiver.messages >= sender.messages, "{receiver:?} {sender:?}");
    // The error came from the device; the sender did not reach its own deadline.
    assert!(sender.error.work_error().is_some(), "{sender:?}");
    format!(
        "after {} messages the sender got {} within {:.2} s, the receiver {}",
        sender.messages,
        sender.name(),
        sender.at.saturating_duration_since(gone).as_secs_f64(),
        receiver.name(),
    )
}

/// Sends one message each way.
fn works(channels: (&mut Channel<'_>, &mut Channel<'_>), domains: &[ProtectionDomain<'_>; 2]) {
    let mut source = domains[0].allocate::<u64>(LENGTH).unwrap();
    let mut sink = domains[1].allocate::<u64>(LENGTH).unwrap();
    fill(&mut source, 5);
    let deadline = Instant::now() + PATIENCE;
    thread::scope(|threads| {
        threads.spawn(|| {
            channels.0.until(deadline).send(source.slice(..).unwrap()).unwrap();
        });
        channels.1.until(deadline).receive(sink.slice_mut(..).unwrap()).unwrap();
    });
    assert_eq!(source[..], sink[..]);
}

/// The events up to the first of this kind.
fn await_event(events: &AsyncEvents<'_>, kind: Kind) {
    let deadline = Instant::now() + PATIENCE;
    while events.wait_until(deadline).unwrap_or_else(|e| panic!("{kind:?}: {e}")).kind() != kind {}
}

fn await_state(context: &Context<'_>, state: PortState) {
    let start = Instant::now();
    let has_address = || context.routable_gid(1).is_ok_and(|entry| entry.gid.to_ipv4().is_some());
    while context.query_port(1).unwrap().state() != state || !has_address() {
        assert!(start.elapsed() < PATIENCE);
        thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn the_link_goes_down_and_comes_up() {
    let _alone = alone("the link going down", 250);
    let cable = Cable::new(0);
    let outcome = {
        let contexts = ["a", "b"].map(|end| cable.open(end));
        let domains = [contexts[0].alloc_pd().unwrap(), contexts[1].alloc_pd().unwrap()];
        let events = [contexts[0].async_events().unwrap(), contexts[1].async_events().unwrap()];
        let (mut one, mut two) =
            handshake(builder(&domains[0]).build().unwrap(), builder(&domains[1]).build().unwrap());
        let ended = transfer((&mut one, &mut two), &domains, || drop(run("ip link set w0a down")));
        for events in &events {
            await_event(events, Kind::PortError);
        }
        run("ip link set w0a up");
        for (events, context) in events.iter().zip(&contexts) {
            await_event(events, Kind::PortActive);
            await_state(context, PortState::Active);
        }
        cable.route();
        let (mut one, mut two) = reconnect(one, two);
        works((&mut one, &mut two), &domains);
        format!(
            "its own link: PortError and PortActive at both ends; {ended}; works again after reset and \
             handshake"
        )
    };
    assert_nothing_left(&cable.device("a"));
    assert_nothing_left(&cable.device("b"));
    figure("link-down", &format!("{outcome}; resources at baseline"));
}

#[test]
fn the_address_is_removed() {
    let _alone = alone("the address being removed", 250);
    let cable = Cable::new(1);
    let outcome = {
        let contexts = ["a", "b"].map(|end| cable.open(end));
        let domains = [contexts[0].alloc_pd().unwrap(), contexts[1].alloc_pd().unwrap()];
        let events = contexts[0].async_events().unwrap();
        let (mut one, mut two) =
            handshake(builder(&domains[0]).build().unwrap(), builder(&domains[1]).build().unwrap());
        let ended = transfer((&mut one, &mut two), &domains, || {
            drop(run("ip addr del 10.90.1.1/24 dev w1a"));
        });
        await_event(&events, Kind::GidChange);
        let calls = call_everything(&contexts[0], &domains[0]);
        let before = contexts[0].gid_table().unwrap().len();
        // The device comes back, and its index in the table belongs to something else by now.
        run("ip addr add 10.90.1.3/24 dev w1a; ip addr add 10.90.1.1/24 dev w1a");
        await_event(&events, Kind::GidChange);
        while contexts[0].gid_table().unwrap().len() < before + 2 {
            await_event(&events, Kind::GidChange);
        }
        await_state(&contexts[0], PortState::Active);
        cable.route();
        let (mut one, mut two) = reconnect(one, two);
        works((&mut one, &mut two), &domains);
        format!(
            "GidChange; {ended}; {calls}; works again once the address is back, after reset and \
             handshake"
        )
    };
    assert_nothing_left(&cable.device("a"));
    assert_nothing_left(&cable.device("b"));
    figure("address-removed", &format!("{outcome}; resources at baseline"));
}

#[test]
fn the_network_device_is_deleted() {
    let _alone = alone("the network device being deleted", 250);
    let cable = Cable::new(2);
    let (outcome, dropped) = {
        let contexts = ["a", "b"].map(|end| cable.open(end));
        let domains = [contexts[0].alloc_pd().unwrap(), contexts[1].alloc_pd().unwrap()];
        let events = contexts[0].async_events().unwrap();
        let (mut one, mut two) =
            handshake(builder(&domains[0]).build().unwrap(), builder(&domains[1]).build().unwrap());
        let ended = transfer((&mut one, &mut two), &domains, || {
            // The command may wait until the program closes the device.
            run("ip link delete w2a </dev/null >/dev/null 2>&1 &");
        });
        await_event(&events, Kind::GidChange);
        let calls = call_everything(&contexts[0], &domains[0]);
        let outcome = format!("GidChange; {ended}; {calls}");
        let start = Instant::now();
        drop((one, two));
        (outcome, start.elapsed())
    };
    // None of our objects keeps the devices there.
    let start = Instant::now();
    while ibverbs::devices().unwrap().iter().any(|device| device.name().starts_with("r2")) {
        assert!(start.elapsed() < PATIENCE, "the devices do not go");
        thread::sleep(Duration::from_millis(20));
    }
    figure(
        "netdev-deleted",
        &format!("{outcome}; channels dropped in {dropped:.0?}, then the RDMA devices go as well"),
    );
}

/// Makes every call that is possible on a device whose network is gone. Returns which calls fail, and how.
fn call_everything(context: &Context<'_>, domain: &ProtectionDomain<'_>) -> String {
    let queue = context.create_cq(4);
    let calls: [(&str, Result<(), ibverbs::Error>); 9] = [
        ("query_device", context.query_device().map(drop)),
        ("query_port", context.query_port(1).map(drop)),
        ("query_gid", context.query_gid(1, 1).map(drop)),
        ("gid_table", context.gid_table().map(drop)),
        ("routable_gid", context.routable_gid(1).map(drop)),
        ("alloc_pd", context.alloc_pd().map(drop)),
        ("create_cq", context.create_cq(4).map(drop)),
        ("allocate", domain.allocate::<u8>(4096).map(drop)),
        (
            "create_qp",
            queue.and_then(|queue| domain.create_qp(&queue, &queue, Rc).build().map(drop)),
        ),
    ];
    let all = calls.len();
    let failed: Vec<_> = calls
        .into_iter()
        .filter_map(|(name, result)| Some(format!("{name} {:?}", result.err()?.kind())))
        .collect();
    format!(
        "{} of {all} calls succeed, others say why not ({})",
        all - failed.len(),
        failed.join(", ")
    )
}
