//! Channels on Soft-RoCE, between its two devices. To be run by `script/test rxe`, in the machine
//! that `script/vm` starts. Those tests that also pass on Soft-iWARP are in `support/reliable/channels.rs`.

#[path = "support/reliable/channels.rs"]
mod on_any_device;
#[path = "support/reliable/by_handshake.rs"]
mod transport;
#[path = "support/vm/mod.rs"]
mod vm;

use std::thread;
use std::time::{Duration, Instant};

use ibverbs::channel::ChannelClosed;
use ibverbs::completion::WorkOpcode;
use ibverbs::{
    AccessFlags, BufferPool, CompareSwapWorkRequest, FetchAddWorkRequest, Inline, Loop,
    PooledBuffer, QueuePairType, ReceiveWorkRequest, SendWorkRequest, SharedMemoryRegion,
    TransportError, WorkStatus,
    completion::WorkErrorClass,
    settings::{MaxAckRetries, MaxRnrRetries},
};

use vm::channels::{ALL, Side, connect, deadline, exchange, handshake, nothing_is_left, sides};
use vm::{PATIENCE, one_at_a_time};

#[test]
fn messages_go_both_ways() {
    let _lock = one_at_a_time();
    let sides = sides();
    let (mut one, mut two) = connect(sides.0.builder(), sides.1.builder());
    exchange(&sides, &mut one, &mut two);
    let mut region = sides.1.region(8);
    thread::scope(|threads| {
        threads.spawn(|| {
            one.run(SendWorkRequest::new(&()).immediate(0xcafe)).unwrap();
            one.send(Inline(b"inline!!")).unwrap();
        });
        let told = two.until(deadline()).receive(()).unwrap();
        assert_eq!((told.immediate(), told.byte_len()), (Some(0xcafe), 0));
        let (low, high) = region.slice_mut(..2).unwrap().split_at(1).unwrap();
        two.until(deadline()).receive(&mut (low, high)).unwrap();
    });
    assert_eq!(&region[0].to_ne_bytes(), b"inline!!");
    drop(region);
    assert_eq!(one.close().unwrap(), ChannelClosed::Drained);
    drop(two);
    nothing_is_left(sides);
}

#[test]
fn words_are_changed_from_afar() {
    let _lock = one_at_a_time();
    let sides = sides();
    let (mut one, two) = connect(sides.0.builder(), sides.1.builder());
    let target = SharedMemoryRegion::<u64>::new(&sides.1.domain, 1024, ALL).unwrap();
    let remote = target.remote();
    let mut local = sides.0.region(3);
    target.write_one(10, 7).unwrap();
    let word = remote.sub_region(80, 8).unwrap();
    one.scope(|s| {
        let (a, rest) = local.slice_mut(..)?.split_at(1)?;
        let (b, c) = rest.split_at(1)?;
        let add = s.post(FetchAddWorkRequest::new(a, word, 5))?;
        let swap = s.post(CompareSwapWorkRequest::new(b, word, 12, 100))?;
        let fail = s.post(CompareSwapWorkRequest::new(c, word, 12, 200))?;
        assert_eq!(add.wait_until(deadline())?.1.opcode(), WorkOpcode::FetchAdd);
        assert_eq!(swap.wait()?.0[0], 12);
        assert_eq!(fail.wait()?.0[0], 100);
        Ok::<_, TransportError>(())
    })
    .unwrap();
    assert_eq!((local[0], target.read_one(10).unwrap()), (7, 100));
    // The rkey does not allow this: the peer's device reports it, and the channel has to be reset.
    let outside = ibverbs::RemoteMemoryRegion::new(remote.address() + 8192, 8, remote.rkey());
    let error = one.write(Inline(&[0; 8]), outside.unwrap()).unwrap_err();
    assert_eq!(error.work_error().unwrap().status(), WorkStatus::RemoteAccess);
    let error = one.write(Inline(&[0; 8]), remote).unwrap_err();
    assert_eq!(error.work_error().unwrap().class(), WorkErrorClass::Flushed);
    let (one, two) = (one.reset().unwrap(), two.reset().unwrap());
    let (mut one, mut two) = handshake(one, two);
    exchange(&sides, &mut one, &mut two);
    drop((one, two, target, local));
    nothing_is_left(sides);
}

#[test]
fn a_message_that_nobody_receives_ends_in_time() {
    let _lock = one_at_a_time();
    let sides = sides();
    let (mut one, mut two) = connect(sides.0.builder(), sides.1.builder());
    let mut region = sides.0.region(64);
    for round in 0..2 {
        exchange(&sides, &mut one, &mut two);
        let start = Instant::now();
        let soon = start + Duration::from_millis(100);
        let late = one.until(soon).send(region.slice(..).unwrap()).unwrap_err();
        assert_eq!(late, TransportError::TimedOut);
        assert!(start.elapsed() >= Duration::from_millis(100));
        assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
        region.fill(round);
        assert_eq!(one.receive(()).unwrap_err(), TransportError::Stopped);
        (one, two) = handshake(one.reset().unwrap(), two.reset().unwrap());
    }
    exchange(&sides, &mut one, &mut two);
    drop((one, two, region));
    nothing_is_left(sides);
}

#[test]
fn an_unreliable_connection_carries_messages_too() {
    let _lock = one_at_a_time();
    let sides = sides();
    let unreliable =
        |side: &Side| side.builder().queue_pair_type(QueuePairType::UnreliableConnected);
    let (mut one, mut two) = connect(unreliable(&sides.0), unreliable(&sides.1));
    let mut region = sides.1.region(4);
    // The receive is posted before the message comes, which nobody would send again.
    let received = two.scope(|s| {
        let receive = s.post_receive(region.slice_mut(..)?)?;
        one.send(Inline(&[9; 32])).unwrap();
        receive.wait_until(deadline()).map(|(part, _)| part[3])
    });
    assert_eq!(received.unwrap(), u64::from_ne_bytes([9; 8]));
    drop((one, two, region));
    nothing_is_left(sides);
}

#[test]
fn a_loop_serves_several_peers_in_the_order_of_each() {
    const MESSAGES: u64 = 20;
    let _lock = one_at_a_time();
    let sides = sides();
    let pool = BufferPool::new(&sides.1.domain, 64, 16, AccessFlags::empty()).unwrap();
    let mut server = Loop::<PooledBuffer>::new(&sides.1.context, 128).unwrap();
    let mut clients = Vec::new();
    for _ in 0..3 {
        let builder = server.create_channel(&sides.1.domain);
        let builder = builder.max_rnr_retries(MaxRnrRetries::UNLIMITED);
        let (client, served) = connect(sides.0.builder(), builder);
        let channel = server.add(served).unwrap();
        for _ in 0..2 {
            server.post(channel, ReceiveWorkRequest::new(pool.take().unwrap()), 0).unwrap();
        }
        clients.push((client, sides.0.region(1)));
    }
    thread::scope(|threads| {
        for (client, region) in &mut clients {
            threads.spawn(move || {
                for number in 0..MESSAGES {
                    let answer = region.slice_mut(..).unwrap();
                    client
                        .scope(|s| {
                            let receive = s.post_receive(answer)?;
                            s.post_send(Inline(&number.to_ne_bytes()))?.wait()?;
                            receive.wait().map(drop)
                        })
                        .unwrap();
                    assert_eq!(region[0], number);
                }
            });
        }
        let (mut seen, mut sent) = ([0; 3], 0);
        while sent < 3 * MESSAGES {
            let ended = server.wait_ended_until(deadline()).unwrap().expect("a message");
            ended.result().unwrap();
            let (index, buffer) = (ended.channel.index(), ended.buffer);
            if ended.token == 0 {
                assert_eq!(buffer[..], u64::to_ne_bytes(seen[index]));
                seen[index] += 1;
                server.post(ended.channel, SendWorkRequest::new(buffer), 1).unwrap();
            } else {
                sent += 1;
                server.post(ended.channel, ReceiveWorkRequest::new(buffer), 0).unwrap();
            }
        }
    });
    drop((clients, server));
    assert_eq!(pool.available(), pool.chunks());
    drop(pool);
    nothing_is_left(sides);
}

#[test]
#[ignore = "Soft-RoCE: takes seconds; software/tests/keep_alive.rs has it in virtual time"]
fn keep_alive_notices_that_an_idle_peer_is_gone() {
    let _lock = one_at_a_time();
    let sides = sides();
    let builder = || sides.0.builder().max_ack_retries(MaxAckRetries::new(2).unwrap());
    let (mut one, two) = connect(builder(), sides.1.builder());
    let alive = Instant::now() + Duration::from_millis(200);
    while Instant::now() < alive {
        one.keep_alive().unwrap();
        thread::sleep(Duration::from_millis(5));
    }
    drop(two);
    let late = deadline();
    let error = loop {
        match one.keep_alive() {
            Ok(()) => assert!(Instant::now() < late, "nobody notices"),
            Err(error) => break error,
        }
        thread::sleep(Duration::from_millis(5));
    };
    let status = error.work_error().map(|error| error.status());
    assert_eq!(status, Some(WorkStatus::RetryExceeded), "{error}");
    drop(one);
    nothing_is_left(sides);
}
