//! A peer that has no receive posted, on Soft-RoCE. To be run by `script/test rxe`, in the machine
//! that `script/vm` starts.

#[path = "support/figures.rs"]
mod figures;
#[path = "support/vm/mod.rs"]
mod vm;

use std::collections::VecDeque;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use figures::figure;
use ibverbs::{
    Channel, ChannelBuilder, Context, ProtectionDomain, QueuePairEndpoint, QueuePairState, Rc,
    TransportError, WorkStatus,
    settings::{AckTimeout, MaxRnrRetries, MinRnrTimer},
};

use vm::channels::{
    Side, deadline, handshake, nothing_is_left as no_side_is_left, reconnect, sides,
};
use vm::{PATIENCE, assert_nothing_left, completions, one_at_a_time, success};

/// How long the one without receives tells the other to wait: 81.92 ms.
const TIMER: MinRnrTimer = match MinRnrTimer::new(26) {
    Ok(timer) => timer,
    Err(_) => unreachable!(),
};
const RETRIES: u8 = 4;
/// 537 ms: on Soft-RoCE the time in which the peer is not ready also counts as time without an
/// acknowledgement.
const ACK_TIMEOUT: AckTimeout = match AckTimeout::new(17) {
    Ok(timeout) => timeout,
    Err(_) => unreachable!(),
};

fn open() -> [Context<'static>; 2] {
    ["rxe0", "rxe1"].map(|device| ibverbs::open(device).unwrap())
}

fn nothing_is_left() {
    assert_nothing_left("rxe0");
    assert_nothing_left("rxe1");
}

/// How long the settings let a sender wait.
fn configured(retries: u8) -> Duration {
    TIMER.duration() * retries.into()
}

#[test]
fn a_queue_pair_gives_up_after_so_many_tries() {
    const SENDS: u64 = 8;
    let _lock = one_at_a_time();
    for retries in [RETRIES, 0] {
        let contexts = open();
        let domains = [contexts[0].alloc_pd().unwrap(), contexts[1].alloc_pd().unwrap()];
        let queues = [0, 1].map(|side| contexts[side].create_cq(32).unwrap());
        let prepare = |side: usize| {
            domains[side]
                .create_qp(&queues[side], &queues[side], Rc)
                .max_send_wr(SENDS as u32)
                .max_recv_wr(1)
                .min_rnr_timer(TIMER)
                .ack_timeout(ACK_TIMEOUT)
                .max_rnr_retries(MaxRnrRetries::new(retries).unwrap())
                .build()
                .unwrap()
        };
        let (one, two) = (prepare(0), prepare(1));
        let (to_one, to_two): (QueuePairEndpoint, _) = (one.endpoint(), two.endpoint());
        let (mut one, two) = (one.handshake(to_two).unwrap(), two.handshake(to_one).unwrap());
        let mut source = domains[0].allocate::<u8>(5000).unwrap();
        let mut sink = domains[1].allocate::<u8>(5000).unwrap();
        source.fill(7);

        let start = Instant::now();
        for wr_id in 0..SENDS {
            // SAFETY: the region outlives the queue pair, and is not written.
            unsafe { one.post_send(&source, .., wr_id).unwrap() };
        }
        let ended = completions(&queues[0], SENDS as usize);
        let took = start.elapsed();
        let (first, flushed) = ended.split_first().unwrap();
        assert_eq!(first.wr_id(), 0);
        let error = first.result().unwrap_err();
        assert_eq!(error.status(), WorkStatus::RnrRetryExceeded);
        assert!(took >= configured(retries), "{took:?}");
        for (wr_id, completion) in (1..).zip(flushed) {
            assert_eq!(completion.wr_id(), wr_id);
            assert_eq!(completion.result().unwrap_err().status(), WorkStatus::Flushed);
        }
        assert_eq!(one.state().unwrap(), QueuePairState::Error);
        assert!(sink.iter().all(|&byte| byte == 0));

        // Both connect again, with a receive posted.
        let (one, two) = (one.reset().unwrap(), two.reset().unwrap());
        vm::time_wait();
        let (to_one, to_two) = (one.endpoint(), two.endpoint());
        let (mut one, mut two) = (one.handshake(to_two).unwrap(), two.handshake(to_one).unwrap());
        // SAFETY: the regions outlive the queue pairs, and are used by the device alone.
        unsafe {
            two.post_receive(&mut sink, .., 100).unwrap();
            one.post_send(&source, .., 101).unwrap();
        }
        success(&completions(&queues[0], 1), 101);
        success(&completions(&queues[1], 1), 100);
        assert!(sink.iter().all(|&byte| byte == 7));
        drop((one, two));
        drop((source, sink));
        let outcome = format!(
            "verbs, {retries} retries: RnrRetryExceeded after {} ms (configured {} ms), the {} sends \
             after it flushed, nothing received; works again after reset and handshake",
            took.as_millis(),
            configured(retries).as_millis(),
            flushed.len(),
        );
        drop((queues, domains));
        drop(contexts);
        nothing_is_left();
        figure("rnr-finite", &format!("{outcome}; resources at baseline"));
    }
}

fn builder<'a>(domain: &'a ProtectionDomain<'_>, retries: u8) -> ChannelBuilder<'a> {
    Channel::builder(domain)
        .min_rnr_timer(TIMER)
        .ack_timeout(ACK_TIMEOUT)
        .max_rnr_retries(MaxRnrRetries::new(retries).unwrap())
        .sleep_after(100)
}

/// Sends a message from one to two, which posts its receive after `delay`. Returns how long sending took.
fn late(
    domains: &[ProtectionDomain<'_>; 2],
    one: &mut Channel<'_>,
    two: &mut Channel<'_>,
    late: Duration,
) -> Duration {
    let mut source = domains[0].allocate::<u64>(1000).unwrap();
    let mut sink = domains[1].allocate::<u64>(1000).unwrap();
    for (index, number) in source.iter_mut().enumerate() {
        *number = 3 + index as u64;
    }
    let (deadline, begun) = (Instant::now() + PATIENCE, Barrier::new(2));
    thread::scope(|threads| {
        let sending = threads.spawn(|| {
            let start = Instant::now();
            begun.wait();
            one.until(deadline).send(source.slice(..).unwrap()).unwrap();
            start.elapsed()
        });
        begun.wait();
        thread::sleep(late);
        two.until(deadline).receive(sink.slice_mut(..).unwrap()).unwrap();
        assert!(sink.iter().copied().eq(3..1003));
        sending.join().unwrap()
    })
}

/// The machine on which these figures were measured.
#[test]
fn the_kernel_is_known() {
    let kernel = vm::run("uname -r");
    assert!(!kernel.trim().is_empty());
    figure("kernel", kernel.trim());
}

#[test]
fn a_channel_gives_up_after_so_many_tries() {
    let _lock = one_at_a_time();
    let took = {
        let contexts = open();
        let domains = [contexts[0].alloc_pd().unwrap(), contexts[1].alloc_pd().unwrap()];
        let prepare = |side: usize| builder(&domains[side], RETRIES).build().unwrap();
        let (mut one, two) = handshake(prepare(0), prepare(1));
        let source = domains[0].allocate::<u64>(10).unwrap();
        let start = Instant::now();
        let deadline = start + PATIENCE;
        let error = one.until(deadline).send(source.slice(..).unwrap()).unwrap_err();
        let took = start.elapsed();
        assert_eq!(error.work_error().unwrap().status(), WorkStatus::RnrRetryExceeded);
        assert!(took >= configured(RETRIES), "{took:?}");
        assert!(one.send(source.slice(..).unwrap()).unwrap_err().is_consequence());
        let (mut one, mut two) = reconnect(one, two);
        late(&domains, &mut one, &mut two, Duration::ZERO);
        took
    };
    nothing_is_left();
    figure(
        "rnr-finite",
        &format!(
            "channel, {RETRIES} retries: RnrRetryExceeded after {} ms (configured {} ms); works again \
             after reset and handshake; resources at baseline",
            took.as_millis(),
            configured(RETRIES).as_millis(),
        ),
    );
}

#[test]
fn unlimited_tries_end_at_the_deadline() {
    const DEADLINE: Duration = Duration::from_millis(600);
    let _lock = one_at_a_time();
    let (took, waited) = {
        let contexts = open();
        let domains = [contexts[0].alloc_pd().unwrap(), contexts[1].alloc_pd().unwrap()];
        let unlimited = MaxRnrRetries::UNLIMITED.value();
        let prepare = |side: usize| builder(&domains[side], unlimited).build().unwrap();
        let (mut one, mut two) = handshake(prepare(0), prepare(1));
        // The receive comes later than any finite count of retries allows.
        let long = configured(unlimited + 2);
        let waited = late(&domains, &mut one, &mut two, long);
        assert!(waited >= long);

        let source = domains[0].allocate::<u64>(10).unwrap();
        let start = Instant::now();
        let error = one.until(start + DEADLINE).send(source.slice(..).unwrap()).unwrap_err();
        let took = start.elapsed();
        assert_eq!(error, TransportError::TimedOut);
        assert!(took >= DEADLINE && took < PATIENCE, "{took:?}");
        let error = one.send(source.slice(..).unwrap()).unwrap_err();
        assert_eq!(error, TransportError::Stopped);
        let (mut one, mut two) = reconnect(one, two);
        late(&domains, &mut one, &mut two, Duration::ZERO);
        (took, waited)
    };
    nothing_is_left();
    figure(
        "rnr-infinite",
        &format!(
            "a receive that came {} ms late: the message arrived; none: TimedOut after {} ms (deadline \
             {} ms); works again after reset and handshake; resources at baseline",
            waited.as_millis(),
            took.as_millis(),
            DEADLINE.as_millis(),
        ),
    );
}

#[test]
fn with_flow_control_no_message_finds_the_receiver_unready() {
    const MESSAGES: u64 = 200;
    let _lock = one_at_a_time();
    let sides = sides();
    let build = |side: &Side| {
        let builder = side.builder().flow_control(true).max_recv_wr(4);
        // The first message without a receive would end the connection.
        builder.max_rnr_retries(MaxRnrRetries::NONE).build().unwrap()
    };
    let (mut one, mut two) = handshake(build(&sides.0), build(&sides.1));
    for round in 0..2 {
        let mut message = sides.0.region(1);
        let soon = Instant::now() + Duration::from_millis(300);
        let refused = one.until(soon).send(message.slice(..).unwrap()).unwrap_err();
        assert_eq!(refused, TransportError::NoCredit);
        let mut inbox = sides.1.region(4);
        thread::scope(|threads| {
            threads.spawn(|| {
                for number in 0..MESSAGES {
                    message[0] = number;
                    one.until(deadline()).send(message.slice(..).unwrap()).unwrap();
                }
            });
            let rooms = inbox.slice_mut(..).unwrap().split_at(2).unwrap();
            let (one, other) = rooms.0.split_at(1).unwrap();
            let (third, fourth) = rooms.1.split_at(1).unwrap();
            two.scope(|scope| {
                let mut posted = VecDeque::new();
                for room in [one, other, third, fourth] {
                    posted.push_back(scope.post_receive(room)?);
                }
                for number in 0..MESSAGES {
                    if number % 32 == 0 {
                        thread::sleep(Duration::from_millis(5));
                    }
                    let (room, _) = posted.pop_front().unwrap().wait_until(deadline())?;
                    assert_eq!(room[0], number, "round {round}");
                    if number + 4 < MESSAGES {
                        posted.push_back(scope.post_receive(room)?);
                    }
                }
                Ok::<_, TransportError>(())
            })
            .unwrap();
        });
        (one, two) = reconnect(one, two);
    }
    figure(
        "rnr-flow-control",
        &format!(
            "no receive: NoCredit at the deadline of 300 ms; then {MESSAGES} messages arrived at a slow receiver \
             with 4 receives; again after reset and handshake"
        ),
    );
    drop((one, two));
    no_side_is_left(sides);
}
