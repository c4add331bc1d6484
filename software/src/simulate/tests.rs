use std::time::Duration;

use ibverbs::{
    AccessFlags, AsyncChannel, BufferPool, Channel, MaxRnrRetries, ProtectionDomain, Reactor,
};
use tokio::time::{Instant, sleep, timeout};

use super::*;
use crate::Device;

pub(super) struct Host {
    pub(super) device: Device,
    domain: Arc<ProtectionDomain<'static>>,
    reactor: Arc<Reactor>,
    pub(super) pool: BufferPool,
}

impl Host {
    pub(super) fn new(network: &Network) -> Self {
        let device = network.device().unwrap();
        let context = Arc::new(device.open().unwrap());
        let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
        let reactor = Arc::new(Reactor::new(&context, 64).unwrap());
        let pool = BufferPool::new(&domain, 64, 8, AccessFlags::empty()).unwrap();
        let run = reactor.clone();
        tokio::spawn(async move { run.run_on_tokio().await });
        Self { device, domain, reactor, pool }
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

/// What two hosts see that exchange messages over a bad network, with pauses in between.
fn run(seed: u64) -> (Vec<String>, String) {
    simulate(seed, async |network| {
        let mut conditions = network.conditions();
        (conditions.loss, conditions.jitter) = (0.05, Duration::from_micros(700));
        network.set_conditions(conditions);
        let (one, other) = (Host::new(&network), Host::new(&network));
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
            ours.send(one.pool.take().unwrap()).await.unwrap();
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
        let (one, other) = (Host::new(&network), Host::new(&network));
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
        ours.send(one.pool.take().unwrap()).await.unwrap();
        // There and back, to the nanosecond.
        assert_eq!(start.elapsed(), Duration::from_micros(2600));
        assert_eq!(receiving.await.unwrap().0 - start, Duration::from_micros(1300));
        assert_eq!(timer.await.unwrap(), Duration::from_millis(1));
    });
}

#[test]
#[should_panic(expected = "has not ended after an hour")]
fn what_waits_for_ever_ends_in_a_panic() {
    simulate(1, async |_| std::future::pending::<()>().await);
}
