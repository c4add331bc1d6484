//! The link of the peer goes down and comes up again in mid-transfer: for a shorter and for a longer time than
//! the sender keeps retrying. `script/soak pair` runs it.
//!
//! Machine 2 sends to machine 1, which takes its own link down.

#[path = "support/figures.rs"]
mod figures;
#[path = "support/two_machines.rs"]
mod two_machines;

use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use figures::figure;
use ibverbs::device::{AsyncEventKind as Kind, AsyncEvents, PortState};
use ibverbs::{
    Channel, ChannelBuilder, Context, ProtectionDomain, QueuePairEndpoint, TransportError,
    WorkStatus,
    settings::{AckTimeout, MaxAckRetries, MaxRnrRetries, MinRnrTimer},
};
use two_machines::{
    PATIENCE, Peer, assert_nothing_left, pair, pattern, report, role, run, short_name,
};

/// Numbers in a message: 8 KiB.
const LENGTH: usize = 1024;
/// Messages in all; the link goes down after half of them.
const MESSAGES: u64 = 100;
const ACK_RETRIES: MaxAckRetries = match MaxAckRetries::new(6) {
    Ok(retries) => retries,
    Err(_) => unreachable!(),
};

/// How long the link is down, and the settings of the sender.
struct Outage {
    down: Duration,
    ack_timeout: AckTimeout,
}

impl Outage {
    fn of(name: &str) -> Self {
        let (down, code) = match name {
            // 2.1 s per attempt, seven retries.
            "short" => (Duration::from_millis(500), 19),
            // 134 ms per attempt, seven retries.
            "long" => (Duration::from_secs(8), 15),
            name => panic!("{name} is no outage"),
        };
        Self { down, ack_timeout: AckTimeout::new(code).unwrap() }
    }

    /// The shortest time for which the sender retries.
    fn retry_time(&self) -> Duration {
        self.ack_timeout.duration().unwrap() * (u32::from(ACK_RETRIES.value()) + 1)
    }

    fn is_short(&self) -> bool {
        self.down < self.retry_time()
    }
}

fn main() -> ExitCode {
    let tests: &[(&str, fn())] =
        &[("a_short_outage", || outage("short")), ("a_long_outage", || outage("long"))];
    two_machines::main(tests, |role, arguments| {
        let outage = Outage::of(&arguments[0]);
        match role {
            "receiver" => receive(&outage),
            "sender" => send(&outage),
            role => panic!("{role} is not a role"),
        }
        assert_nothing_left("rxe1");
    })
}

fn outage(name: &str) {
    let (receiver, sender) = (format!("receiver {name}"), format!("sender {name}"));
    let mut reports = pair(&[], &role(&receiver), &role(&sender));
    reports.sort(); // of the receiver, and of the sender
    let [of_receiver, of_sender] = &reports[..] else { panic!("two reports, not {reports:?}") };
    figure(
        "link-down",
        &format!("the peer's link, {of_receiver}; {of_sender}; resources at baseline"),
    );
}

fn builder<'a>(domain: &'a ProtectionDomain<'_>, outage: &Outage) -> ChannelBuilder<'a> {
    Channel::builder(domain)
        .ack_timeout(outage.ack_timeout)
        .max_ack_retries(ACK_RETRIES)
        .min_rnr_timer(MinRnrTimer::SHORTEST)
        .max_rnr_retries(MaxRnrRetries::UNLIMITED)
        .sleep_after(8)
}

fn connect<'a>(prepared: ibverbs::PreparedChannel<'a>, peer: &mut Peer) -> Channel<'a> {
    let remote: QueuePairEndpoint = peer.exchange(prepared.endpoint());
    let channel = prepared.handshake(remote).unwrap();
    peer.meet_again();
    channel
}

/// Takes the link down; the device reports it.
fn take_down(context: &Context<'_>, events: &AsyncEvents<'_>) {
    run("ip link set eth0 down");
    await_event(events, Kind::PortError);
    assert_ne!(context.query_port(1).unwrap().state(), PortState::Active);
}

/// Takes the link up; the device reports it.
fn take_up(events: &AsyncEvents<'_>) {
    run("ip link set eth0 up");
    await_event(events, Kind::PortActive);
}

fn await_event(events: &AsyncEvents<'_>, kind: Kind) {
    let deadline = Instant::now() + PATIENCE;
    while events.wait_until(deadline).unwrap_or_else(|e| panic!("{kind:?}: {e}")).kind() != kind {}
}

fn receive(outage: &Outage) {
    let context = ibverbs::open("rxe1").unwrap();
    let domain = context.alloc_pd().unwrap();
    let events = context.async_events().unwrap();
    let mut peer = Peer::meet(18515);
    let mut channel = connect(builder(&domain, outage).build().unwrap(), &mut peer);
    let mut sink = domain.allocate::<u64>(LENGTH).unwrap();
    let (mut next, mut errors) = (0, Vec::new());
    thread::scope(|threads| {
        let mut link = None;
        while next < MESSAGES {
            if next == MESSAGES / 2 && link.is_none() {
                take_down(&context, &events);
                link = Some(threads.spawn(|| {
                    thread::sleep(outage.down);
                    take_up(&events);
                }));
            }
            let deadline = Instant::now() + 2 * outage.down.max(outage.retry_time());
            match channel.until(deadline).receive(sink.slice_mut(..).unwrap()) {
                Ok(_) => {
                    assert!((0..LENGTH).all(|index| sink[index] == pattern(next, index)));
                    next += 1;
                }
                Err(error) => {
                    errors.push(short_name(&error));
                    let prepared = channel.reset().unwrap();
                    channel = connect(prepared, &mut peer);
                    // The sender goes on with what has not arrived.
                    let () = peer.exchange(next);
                }
            }
        }
        link.unwrap().join().unwrap();
    });
    peer.meet_again();
    let ended = match errors.len() {
        0 => "no error".to_owned(),
        _ => errors.join(", "),
    };
    report(&format!(
        "down for {:.1} s: receiver: PortError, PortActive, {ended}, all {MESSAGES} messages in order",
        outage.down.as_secs_f64(),
    ));
}

fn send(outage: &Outage) {
    let context = ibverbs::open("rxe1").unwrap();
    let domain = context.alloc_pd().unwrap();
    let mut peer = Peer::meet(18515);
    let mut channel = connect(builder(&domain, outage).build().unwrap(), &mut peer);
    let mut source = domain.allocate::<u64>(LENGTH).unwrap();
    let (mut next, mut failure) = (0, None);
    let mut longest = Duration::ZERO;
    while next < MESSAGES {
        for (index, number) in source.iter_mut().enumerate() {
            *number = pattern(next, index);
        }
        let start = Instant::now();
        match channel.until(start + 2 * PATIENCE).send(source.slice(..).unwrap()) {
            Ok(_) => next += 1,
            Err(TransportError::Work(error)) if failure.is_none() => {
                assert_eq!(error.status(), WorkStatus::RetryExceeded);
                failure = Some(start.elapsed());
                let prepared = channel.reset().unwrap();
                channel = connect(prepared, &mut peer);
                let arrived = peer.exchange(());
                // The acknowledgement of one message may have been lost.
                assert!(arrived == next || arrived == next + 1, "{arrived}, {next}");
                next = arrived;
            }
            Err(error) => panic!("{error}"),
        }
        longest = longest.max(start.elapsed());
    }
    peer.meet_again();
    let configured = outage.retry_time();
    let ended = match failure {
        None => {
            assert!(outage.is_short(), "it should have failed");
            assert!(longest >= outage.down / 2, "there was no outage: {longest:?}");
            format!("none failed, the longest took {:.2} s", longest.as_secs_f64())
        }
        Some(took) => {
            assert!(!outage.is_short(), "it should have gone on");
            assert!(took >= configured / 2 && took < outage.down, "{took:?}");
            format!("RetryExceeded after {:.2} s, then reset and handshake", took.as_secs_f64())
        }
    };
    report(&format!("sender, configured for {:.2} s: {ended}", configured.as_secs_f64()));
}
