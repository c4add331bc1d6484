use std::pin::pin;
use std::sync::Mutex;
use std::time::Duration;

use ibverbs::{
    AccessFlags, AsyncChannel, BufferPool, Channel, ProtectionDomain, Reactor,
    settings::MaxRnrRetries,
};
use tokio::time::{Instant, sleep, timeout};

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::*;
use crate::network::Conditions;

pub(super) struct Side {
    domain: Arc<ProtectionDomain<'static>>,
    reactor: Arc<Reactor>,
    pub(super) pool: BufferPool,
}

impl Side {
    pub(super) fn new(host: &Host) -> Self {
        let device = host.device().unwrap();
        let context = Arc::new(device.open().unwrap());
        let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
        let reactor = Arc::new(Reactor::new(&context, 64).unwrap());
        let pool = BufferPool::new(&domain, 64, 8, AccessFlags::empty()).unwrap();
        let run = reactor.clone();
        tokio::spawn(async move { run.run_on_tokio().await });
        Self { domain, reactor, pool }
    }

    pub(super) fn connect(&self, other: &Self) -> [AsyncChannel; 2] {
        let [one, two] = [self, other].map(|host| {
            let builder = Channel::builder(&host.domain).max_send_wr(4).max_recv_wr(4);
            host.reactor.prepare(builder.max_rnr_retries(MaxRnrRetries::UNLIMITED)).unwrap()
        });
        let endpoints = (one.endpoint(), two.endpoint());
        [one.handshake(endpoints.1).unwrap(), two.handshake(endpoints.0).unwrap()]
    }
}

/// Returns what two hosts see that exchange messages over a bad network, with pauses in between.
fn run(seed: u64) -> (Vec<String>, String) {
    simulate(seed, async |network| {
        let mut conditions = network.conditions();
        (conditions.loss, conditions.jitter) = (0.05, Duration::from_micros(700));
        network.set_conditions(conditions);
        let (one, other) = (Side::new(&network.host("one")), Side::new(&network.host("other")));
        let [ours, theirs] = one.connect(&other);
        let start = Instant::now();
        let echo = tokio::spawn(async move {
            for _ in 0..20 {
                let (buffer, _) = theirs.receive(other.pool.take().unwrap()).await.unwrap();
                sleep(Duration::from_millis(3)).await;
                theirs.send(buffer).await.unwrap();
            }
        });
        let mut log = Vec::new();
        for _ in 0..20 {
            ours.send(one.pool.take_from(&[1; 8]).unwrap().unwrap()).await.unwrap();
            let mut receiving = pin!(ours.receive(one.pool.take().unwrap()));
            let in_time = timeout(Duration::from_millis(5), receiving.as_mut()).await.is_ok();
            if !in_time {
                receiving.await.unwrap();
            }
            assert_eq!(start.elapsed(), network.now(), "it is one clock");
            log.push(format!("{:?} {in_time}", network.now()));
        }
        echo.await.unwrap();
        (log, network.trace().to_string())
    })
}

#[test]
fn a_seed_repeats_packets_times_and_the_order_of_tasks() {
    let runs: Vec<_> = (0..20).map(run).collect();
    for (seed, first) in (0..).zip(&runs) {
        assert!(*first == run(seed), "seed {seed}");
        assert!(first.1.contains(": lost"), "seed {seed}");
    }
    assert!(runs.iter().all(|run| *run == runs[0] || run.1 != runs[0].1));
    assert!(runs[0] != runs[1]);
    // Some answers come in time, and some do not.
    for in_time in ["true", "false"] {
        assert!(runs.iter().any(|run| run.0.iter().any(|line| line.ends_with(in_time))));
    }
}

#[test]
fn timers_and_packets_come_in_the_order_of_their_times() {
    simulate(1, async |network| {
        let mut conditions = network.conditions();
        conditions.delay = Duration::from_micros(1300);
        network.set_conditions(conditions);
        let (one, other) = (Side::new(&network.host("one")), Side::new(&network.host("other")));
        let [ours, theirs] = one.connect(&other);
        let receiving = tokio::spawn(async move {
            theirs.receive(other.pool.take().unwrap()).await.unwrap();
            (Instant::now(), theirs, other)
        });
        let start = Instant::now();
        let timer = tokio::spawn(async move {
            sleep(Duration::from_millis(1)).await;
            Instant::now() - start
        });
        ours.send(one.pool.take_from(&[1; 8]).unwrap().unwrap()).await.unwrap();
        // The round trip takes this long, to the nanosecond.
        assert_eq!(start.elapsed(), Duration::from_micros(2600));
        assert_eq!(receiving.await.unwrap().0 - start, Duration::from_micros(1300));
        assert_eq!(timer.await.unwrap(), Duration::from_millis(1));
    });
}

#[test]
#[should_panic(expected = "has not ended after ten minutes")]
fn what_waits_for_ever_ends_in_a_panic() {
    simulate(1, async |_| std::future::pending::<()>().await);
}

/// Talks to the hosts `a` and `b` of a world.
async fn connected(a: &Host, b: &Host) -> (SimulatedStream, SimulatedStream) {
    let mut listener = b.listen(7).unwrap();
    let ours = a.connect((b.address(), 7)).await.unwrap();
    (ours, listener.accept().await.unwrap().0)
}

#[test]
fn streams_take_their_time_and_wait_out_a_partition() {
    simulate(1, async |world| {
        let (a, b) = (world.host("a"), world.host("b"));
        let slow =
            |delay| Conditions { delay: Duration::from_millis(delay), ..Conditions::PERFECT };
        a.set_conditions_to(&b, slow(5));
        b.set_conditions_to(&a, slow(2));
        let (mut ours, mut theirs) = connected(&a, &b).await;
        assert_eq!(world.now(), Duration::from_millis(7));
        a.partition(&b);
        ours.write_all(b"hel").await.unwrap();
        assert!(timeout(Duration::from_secs(1), theirs.read_u8()).await.is_err());
        a.heal(&b);
        let healed = world.now();
        ours.write_all(b"lo").await.unwrap();
        drop(ours);
        let mut text = String::new();
        theirs.read_to_string(&mut text).await.unwrap();
        assert_eq!((text.as_str(), world.now() - healed), ("hello", Duration::from_millis(5)));
        theirs.write_all(b"!").await.unwrap();
        sleep(Duration::from_millis(10)).await;
        let broken = theirs.write_all(b"!").await.unwrap_err();
        assert_eq!(broken.kind(), std::io::ErrorKind::BrokenPipe);
        let refused = a.connect((b.address(), 7)).await.unwrap_err();
        assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
        let nowhere = a.connect(([127, 0, 0, 1].into(), 7)).await.unwrap_err();
        assert_eq!(nowhere.kind(), std::io::ErrorKind::AddrNotAvailable);
        let _listener = b.listen(7).unwrap();
        assert_eq!(b.listen(7).unwrap_err().kind(), std::io::ErrorKind::AddrInUse);
    });
}

#[test]
fn nothing_overtakes_what_the_same_end_of_a_stream_has_sent() {
    for seed in 0..100 {
        simulate(seed, async |world| {
            let jitter = Duration::from_micros(500);
            world.set_conditions(Conditions { jitter, ..Conditions::PERFECT });
            let (a, b) = (world.host("a"), world.host("b"));
            let mut listener = b.listen(7).unwrap();
            b.start(async move {
                for _ in 0..2 {
                    listener.accept().await.unwrap().0.write_all(b"hello").await.unwrap();
                }
            });
            // The answer to `connect`, and then the end.
            let mut ours = a.connect((b.address(), 7)).await.unwrap();
            sleep(Duration::from_millis(5)).await;
            let mut text = String::new();
            ours.read_to_string(&mut text).await.unwrap();
            assert_eq!(text, "hello");
            // The end, and then the answer to what comes after it.
            let mut ours = a.connect((b.address(), 7)).await.unwrap();
            ours.write_all(b"too late").await.unwrap();
            ours.read_exact(&mut [0; 5]).await.unwrap();
        });
    }
}

#[test]
fn what_is_sent_before_a_partition_arrives_in_order_after_it() {
    simulate(1, async |world| {
        let (a, b) = (world.host("a"), world.host("b"));
        let delay = Duration::from_millis(5);
        a.set_conditions_to(&b, Conditions { delay, ..Conditions::PERFECT });
        let (mut ours, mut theirs) = connected(&a, &b).await;
        ours.write_all(b"hel").await.unwrap();
        sleep(Duration::from_millis(4)).await;
        ours.write_all(b"lo").await.unwrap();
        a.partition(&b);
        sleep(Duration::from_millis(2)).await;
        a.heal(&b);
        drop(ours);
        let mut text = String::new();
        theirs.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "hello");
    });
}

#[test]
fn a_host_of_another_simulation_changes_nothing() {
    let strangers = simulate(1, async |world| ["one", "other"].map(|name| world.host(name)));
    simulate(2, async |world| {
        let (a, b) = (world.host("a"), world.host("b"));
        let (mut ours, mut theirs) = connected(&a, &b).await;
        for stranger in &strangers {
            a.partition(stranger);
            let delay = Duration::from_secs(5);
            a.set_conditions_to(stranger, Conditions { delay, ..Conditions::PERFECT });
            let before = world.now();
            ours.write_all(b"!").await.unwrap();
            theirs.read_u8().await.unwrap();
            assert_eq!(world.now() - before, Conditions::PERFECT.delay);
            a.heal(stranger);
        }
        // There is no such number here.
        let stranger = Host { number: 7, ..strangers[0].clone() };
        a.partition(&stranger);
    });
}

#[test]
fn a_crash_ends_tasks_streams_and_devices_and_the_host_starts_again() {
    simulate(1, async |world| {
        let (a, b) = (world.host("a"), world.host("b"));
        let log = Arc::new(Mutex::new(Vec::new()));
        let (mut ours, theirs) = connected(&a, &b).await;
        for life in 0..3_u8 {
            let (host, log) = (b.clone(), log.clone());
            let program = b.start(async move {
                let _side = Side::new(&host);
                // A task that the program knows nothing of any more ends, too.
                tokio::spawn(async move {
                    loop {
                        sleep(Duration::from_millis(10)).await;
                        log.lock().unwrap().push(life);
                    }
                });
                std::future::pending::<()>().await;
            });
            sleep(Duration::from_millis(35)).await;
            b.crash();
            assert!(program.await.unwrap_err().is_cancelled());
        }
        assert_eq!(*log.lock().unwrap(), [0, 0, 0, 1, 1, 1, 2, 2, 2]);
        let reset = ours.read_u8().await.unwrap_err();
        assert_eq!(reset.kind(), std::io::ErrorKind::ConnectionReset);
        drop(theirs);
    });
}

#[test]
fn a_host_listens_at_the_same_port_right_after_a_crash() {
    simulate(1, async |world| {
        let (a, b) = (world.host("a"), world.host("b"));
        for _ in 0..2 {
            let mut listener = b.listen(7).unwrap();
            b.start(async move { while listener.accept().await.is_ok() {} });
            a.connect((b.address(), 7)).await.unwrap();
            // The listener itself is dropped when the next one listens.
            b.crash();
        }
        let _listener = b.listen(7).unwrap();
        a.connect((b.address(), 7)).await.unwrap();
    });
}

#[test]
fn what_a_crashed_host_has_sent_does_not_confuse_its_next_life() {
    // Each life has other sequence numbers.
    let starts: Vec<_> = simulate(1, async |world| {
        let (a, b) = (world.host("a"), world.host("b"));
        let peer = Side::new(&b);
        let mut starts = Vec::new();
        for _ in 0..3 {
            let side = Side::new(&a);
            let [ours, theirs] = side.connect(&peer);
            let receiving = theirs.receive(peer.pool.take().unwrap());
            let (sent, received) =
                tokio::join!(ours.send(side.pool.take_from(&[1; 8]).unwrap().unwrap()), receiving);
            assert!(sent.is_ok() && received.is_ok());
            starts.push(world.trace().packets().next_back().unwrap().sequence_number());
            a.crash();
            // Its packets go nowhere now, and it gets none.
            let before = world.trace().packets().len();
            assert!(
                timeout(
                    Duration::from_secs(9),
                    ours.send(side.pool.take_from(&[1; 8]).unwrap().unwrap())
                )
                .await
                .is_err()
            );
            assert_eq!(world.trace().packets().len(), before);
        }
        starts
    });
    assert!(starts[0] != starts[1] && starts[1] != starts[2], "{starts:?}");
}

#[test]
fn the_clocks_of_hosts_differ() {
    simulate(1, async |world| {
        let hosts = [("right", 0), ("fast", 100_000), ("slow", -100_000)];
        let hosts = hosts.map(|(name, millionths)| {
            let host = world.host(name);
            host.set_clock(Duration::from_secs(5), millionths);
            host
        });
        let ended = hosts.each_ref().map(|host| {
            let world = world.clone();
            host.start(async move {
                let start = Instant::now();
                sleep(Duration::from_secs(9)).await;
                assert_eq!(start.elapsed(), Duration::from_secs(9));
                world.now().as_millis()
            })
        });
        let [right, fast, slow] = ended;
        let ended = [right.await.unwrap(), fast.await.unwrap(), slow.await.unwrap()];
        assert_eq!(ended, [9_000, 8_181, 10_000]);
        assert_eq!(hosts.map(|host| host.now().as_millis()), [15_000, 16_000, 14_000]);
    });
}

#[test]
fn a_clock_that_is_set_as_far_as_it_goes_ticks_on() {
    simulate(1, async |world| {
        let host = world.host("ahead");
        host.start(async {}).await.unwrap();
        for _ in 0..2 {
            host.set_clock(Duration::MAX, i32::MAX);
            let before = host.now();
            host.start(async { sleep(Duration::from_secs(9)).await }).await.unwrap();
            let passed = host.now() - before;
            assert!((9..10).contains(&passed.as_secs()), "{passed:?}");
        }
    });
}

#[test]
#[should_panic(expected = "a program of server panicked")]
fn a_program_that_panics_ends_the_simulation() {
    simulate(1, async |world| {
        world.host("server").start(async { panic!("as it is to") });
        sleep(Duration::from_secs(1)).await;
    });
}
