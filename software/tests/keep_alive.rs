//! Idle connections whose peer goes away.

#[path = "../../tests/support/kept.rs"]
mod kept;
#[path = "support/side.rs"]
mod side;

use std::sync::Arc;
use std::time::Duration;

use ibverbs::channel::ChannelClosed;
use ibverbs::{
    AccessFlags, Channel, ChannelBuilder, ErrorKind, PooledBuffer, QueuePairType, Reactor,
    SharedMemoryRegion, TransportError, WorkStatus, WriteWorkRequest,
    settings::{AckTimeout, MaxAckRetries},
};
use ibverbs_software::{Device, Network};

use side::{Side, connect, simulated};

impl Side {
    fn builder(&self) -> ChannelBuilder<'static> {
        let builder = Channel::builder(&self.domain).access(AccessFlags::REMOTE_WRITE);
        // Some completions are held for ever.
        let builder = builder.settle_timeout(Duration::from_millis(10));
        builder
            .ack_timeout(AckTimeout::new(12).unwrap())
            .max_ack_retries(MaxAckRetries::new(3).unwrap())
    }

    fn buffer(&self) -> PooledBuffer {
        self.pool.take_from(&[0; 8]).unwrap().unwrap()
    }
}

fn status(error: TransportError) -> WorkStatus {
    error.work_error().unwrap_or_else(|| panic!("{error}")).status()
}

#[test]
fn a_dead_idle_peer_is_noticed_and_a_live_one_is_not_disturbed() {
    let network = Network::builder().seed(5).delay(Duration::from_micros(10)).build();
    let sides = simulated(&network);
    let [mut one, mut other] = connect([sides[0].builder(), sides[1].builder()]);
    let mut receive = kept::receive(&mut one, sides[0].buffer()).unwrap();
    for round in 0..100 {
        one.keep_alive().unwrap();
        other.keep_alive().unwrap();
        if round % 10 == 0 {
            kept::send(&mut other, sides[1].buffer()).unwrap().wait(&mut other).unwrap();
            receive.wait(&mut one).unwrap();
            receive = kept::receive(&mut one, sides[0].buffer()).unwrap();
        }
    }
    network.partition(&sides[0].device, &sides[1].device);
    let mut calls = 0;
    let error = loop {
        calls += 1;
        if let Err(error) = one.keep_alive() {
            break error;
        }
        assert!(calls < 1_000_000);
    };
    assert_eq!(status(error), WorkStatus::RetryExceeded);
    // The receive has ended too.
    assert_eq!(status(receive.wait(&mut one).err().unwrap()), WorkStatus::Flushed);
    // The channel stays failed.
    let again = (0..10).find_map(|_| one.keep_alive().err()).expect("an error");
    assert_eq!(status(again), WorkStatus::Flushed);
}

#[test]
fn one_probe_at_a_time_and_none_beside_an_operation() {
    let network = Network::builder().seed(1).build();
    let sides = simulated(&network);
    let [mut one, mut other] = connect([sides[0].builder(), sides[1].builder()]);
    sides[0].device.hold_completions();
    for _ in 0..5 {
        one.keep_alive().unwrap();
    }
    assert_eq!(one.close().unwrap(), ChannelClosed::Flushed(1));
    sides[1].device.hold_completions();
    let _send =
        kept::post(&mut other, (), |buffer| WriteWorkRequest::new(&*buffer, nowhere())).unwrap();
    other.keep_alive().unwrap();
    assert_eq!(other.close().unwrap(), ChannelClosed::Flushed(1));
}

fn nowhere() -> ibverbs::RemoteMemoryRegion {
    ibverbs::RemoteMemoryRegion::new(0, 0, 0).unwrap()
}

#[test]
fn a_message_without_bytes_needs_no_memory() {
    let network = Network::builder().seed(1).build();
    let sides = simulated(&network);
    let [mut one, mut other] = connect([sides[0].builder(), sides[1].builder()]);
    let mut receive = kept::receive(&mut other, ()).unwrap();
    let mut told =
        kept::post(&mut one, (), |buffer| WriteWorkRequest::new(&*buffer, nowhere()).immediate(77))
            .unwrap();
    told.wait(&mut one).unwrap();
    let (_, success) = receive.wait(&mut other).unwrap();
    assert_eq!((success.immediate(), success.byte_len()), (Some(77), 0));
}

#[test]
fn what_cannot_be_probed_says_so() {
    let network = Network::builder().seed(1).build();
    let sides = simulated(&network);
    let [mut one, _other] = connect(
        sides
            .each_ref()
            .map(|side| side.builder().queue_pair_type(QueuePairType::UnreliableConnected)),
    );
    let TransportError::Verbs(error) = one.keep_alive().unwrap_err() else { panic!() };
    assert_eq!(error.kind(), ErrorKind::Unsupported);

    // A peer that lets nobody write. Its memory was never in danger.
    let region = SharedMemoryRegion::<u64>::new(
        &sides[1].domain,
        4,
        AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE,
    )
    .unwrap();
    let strict = Channel::builder(&sides[1].domain).access(AccessFlags::empty());
    let [mut one, _other] = connect([sides[0].builder(), strict]);
    let error = (0..1_000_000).find_map(|_| one.keep_alive().err()).expect("an error");
    assert!(error.work_error().is_some(), "{error}");
    assert_eq!(region.to_vec(), [0; 4]);
}

#[test]
fn a_task_notices_that_the_peer_is_gone() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let [one, other] = [(); 2].map(|()| Side::new(Device::new().unwrap()));
    let reactors = [&one, &other].map(|side| Arc::new(Reactor::new(&side.context, 256).unwrap()));
    runtime.block_on(async {
        // Both have threads, which may wait for a processor.
        let builder = |side: &Side| side.builder().ack_timeout(AckTimeout::new(16).unwrap());
        let ours = reactors[0].prepare(builder(&one)).unwrap();
        let theirs = reactors[1].prepare(builder(&other)).unwrap();
        let endpoints = (ours.endpoint(), theirs.endpoint());
        let ours = Arc::new(ours.handshake(endpoints.1).unwrap());
        let theirs = theirs.handshake(endpoints.0).unwrap();
        for reactor in reactors.clone() {
            tokio::spawn(async move { reactor.run_on_tokio().await });
        }
        let receive = ours.receive(one.buffer());
        let watched = ours.clone();
        let watching = tokio::spawn(async move {
            watched.keep_alive(|| tokio::time::sleep(Duration::from_millis(5))).await
        });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(!watching.is_finished());
        let (sent, received) = tokio::join!(theirs.send(other.buffer()), receive);
        sent.unwrap();
        received.unwrap();
        let receive = ours.receive(one.buffer());
        drop(theirs);
        let minute = Duration::from_secs(60);
        let error = tokio::time::timeout(minute, watching).await.unwrap().unwrap();
        assert!(error.work_error().is_some(), "{error}");
        assert!(receive.await.unwrap_err().buffer.is_some());
    });
}

/// The only place in the queue is that of a write which keeps the connection alive. When it has ended, a send that waits
/// for the place is posted, and a shutdown goes on.
#[test]
fn the_end_of_a_sign_of_life_wakes_what_waits_for_it() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for shuts_down in [false, true] {
        let [one, other] = [(); 2].map(|()| Side::new(Device::new().unwrap()));
        let reactors =
            [&one, &other].map(|side| Arc::new(Reactor::new(&side.context, 256).unwrap()));
        runtime.block_on(async {
            let ours = reactors[0].prepare(one.builder().max_send_wr(1)).unwrap();
            let mut theirs = reactors[1].prepare(other.builder()).unwrap();
            theirs.post_receive(other.buffer()).unwrap();
            let endpoints = (ours.endpoint(), theirs.endpoint());
            let ours = ours.handshake(endpoints.1).unwrap();
            let theirs = theirs.handshake(endpoints.0).unwrap();
            let mut sleeps = 0;
            let mut watching = std::pin::pin!(ours.keep_alive(|| {
                sleeps += 1;
                let over = sleeps == 1;
                std::future::poll_fn(move |_| match over {
                    true => std::task::Poll::Ready(()),
                    false => std::task::Poll::Pending,
                })
            }));
            tokio::select! {
                biased;
                error = &mut watching => panic!("{error}"),
                () = std::future::ready(()) => {}
            }
            assert_eq!(ours.in_flight(), 1);
            // No reactor runs so far: both wait.
            let waiting = async {
                if shuts_down {
                    ours.shutdown().await;
                } else {
                    ours.send(one.buffer()).await.unwrap();
                    theirs.receive(other.buffer()).await.unwrap();
                }
            };
            let running = async {
                tokio::task::yield_now().await;
                let _ = tokio::join!(reactors[0].run_on_tokio(), reactors[1].run_on_tokio());
            };
            let both = async {
                tokio::select! {
                    biased;
                    () = waiting => {}
                    () = running => panic!("the reactors have ended"),
                }
            };
            tokio::time::timeout(Duration::from_secs(60), both).await.unwrap();
        });
    }
}
