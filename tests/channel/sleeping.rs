//! Channels that sleep after a while instead of polling.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::{
    CompletionQueue, ErrorKind, ProtectionDomain, SendWorkRequest, SharedCompletionQueue,
    SharedMemoryRegion, TransportError,
};
use ibverbs_software::Verb;

use crate::pair::{ALL, Pair, builder, connect, outstanding, soon};
use crate::software::Software;

fn sleeping(polls: u32) -> Pair {
    Pair::with(Software::on_sockets(), |builder| builder.sleep_after(polls))
}

#[test]
fn a_receive_sleeps_until_the_message_is_there() {
    for polls in [0, 1, 100] {
        let mut pair = sleeping(polls);
        let (before, start) = (pair.device.calls(Verb::PollCq), Instant::now());
        let (one, two, device) = (&mut pair.one, &mut pair.two, &pair.device);
        thread::scope(|threads| {
            threads.spawn(|| {
                while device.calls(Verb::ReqNotifyCq) == 0 {
                    assert!(start.elapsed() < Duration::from_secs(60), "it never slept");
                    thread::yield_now();
                }
                // Who does not sleep polls a thousand times meanwhile.
                thread::sleep(Duration::from_millis(20));
                one.run(SendWorkRequest::new(&()).immediate(9)).unwrap();
            });
            assert_eq!(two.receive(()).unwrap().immediate(), Some(9));
        });
        // Either side polls that often before it sleeps: the sender too, if
        // its acknowledgement takes long.
        let polled = device.calls(Verb::PollCq) - before;
        assert!(polled < 2 * u64::from(polls) + 50, "nobody slept: {polled} polls");
        pair.exchange();
        pair.finish();
    }
}

#[test]
fn a_sleeper_wakes_at_its_deadline() {
    let mut pair = sleeping(3);
    let start = Instant::now();
    let error = pair.one.until(soon()).receive(()).unwrap_err();
    assert_eq!(error, TransportError::TimedOut);
    assert!((20..60_000).contains(&start.elapsed().as_millis()), "{:?}", start.elapsed());
    assert_eq!(outstanding(&pair.device, &pair.one), (0, 0));
    let mut pair = pair.reconnect();
    let late = pair.one.scope(|s| s.post_receive(())?.wait_until(soon()));
    assert_eq!(TransportError::from(late.unwrap_err()), TransportError::TimedOut);
    pair.finish();
}

#[test]
fn a_scope_sleeps_too() {
    let mut pair = sleeping(5);
    let (one, two) = (&mut pair.one, &mut pair.two);
    thread::scope(|threads| {
        threads.spawn(|| {
            for n in 0..4 {
                thread::sleep(Duration::from_millis(10));
                one.run(SendWorkRequest::new(&()).immediate(n)).unwrap();
            }
        });
        two.scope(|s| {
            let receives = [(); 4].map(|()| s.post_receive(()));
            for (receive, n) in receives.into_iter().zip(0..3) {
                assert_eq!(receive?.wait()?.1.immediate(), Some(n));
            }
            Ok::<_, TransportError>(())
        })
        .unwrap();
    });
    pair.finish();
}

#[test]
fn a_device_that_cannot_be_armed_is_an_error_with_nothing_in_flight() {
    let mut pair = sleeping(0);
    pair.device.fail_always(Verb::ReqNotifyCq, libc::EIO);
    let error = pair.one.receive(()).unwrap_err();
    assert!(
        matches!(error, TransportError::Verbs(e) if e.verb() == "ibv_req_notify_cq"),
        "{error}"
    );
    assert_eq!(outstanding(&pair.device, &pair.one), (0, 0));
    pair.finish();
}

#[test]
fn channels_that_share_a_queue_wake_each_other() {
    let device = Software::on_sockets();
    let context = Arc::new(device.context());
    let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
    let queue = CompletionQueue::builder(&context, 32).own_channel().build().unwrap();
    let queue = Arc::new(SharedCompletionQueue::from(queue));
    let sharing = || builder(&domain).shared_completion_queue(&queue).sleep_after(2);
    let (mut one, mut two) = connect(sharing(), sharing());
    thread::scope(|threads| {
        threads.spawn(|| {
            for n in 0..200 {
                one.run(SendWorkRequest::new(&()).immediate(n)).unwrap();
                assert_eq!(one.receive(()).unwrap().immediate(), Some(n));
            }
        });
        for n in 0..200 {
            assert_eq!(two.receive(()).unwrap().immediate(), Some(n));
            two.run(SendWorkRequest::new(&()).immediate(n)).unwrap();
        }
    });
    drop((one, two, queue, domain, context));
    device.assert_clean();
}

/// Completions that are in the queue when it is armed raise no event.
#[test]
fn nobody_sleeps_while_its_completion_is_behind_many_others() {
    let device = Software::on_sockets();
    let context = Arc::new(device.context());
    let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
    let queue = CompletionQueue::builder(&context, 128).own_channel().build().unwrap();
    let queue = Arc::new(SharedCompletionQueue::from(queue));
    let sharing = || builder(&domain).shared_completion_queue(&queue).sleep_after(0);
    let (mut one, mut two) = connect(sharing().max_send_wr(64), sharing());
    let target = SharedMemoryRegion::<u64>::new(&domain, 1, ALL).unwrap();
    one.scope(|one| {
        for _ in 0..64 {
            std::mem::forget(one.post_write((), target.remote())?);
        }
        let start = Instant::now();
        two.until(start + Duration::from_secs(60)).write((), target.remote())?;
        assert!(start.elapsed() < Duration::from_secs(30), "it slept: {:?}", start.elapsed());
        Ok::<_, TransportError>(())
    })
    .unwrap();
    drop((one, two, target, queue, domain, context));
    device.assert_clean();
}

#[test]
fn a_queue_that_wakes_for_solicited_completions_only_is_nothing_to_sleep_on() {
    let device = Software::on_sockets();
    let context = Arc::new(device.context());
    let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
    let queue = CompletionQueue::builder(&context, 64).own_channel().solicited_only();
    let queue = SharedCompletionQueue::from(queue.build().unwrap());
    let queue = Arc::new(queue);
    let sharing = || builder(&domain).shared_completion_queue(&queue);
    let error = sharing().sleep_after(1).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains("solicited"), "{error}");
    assert_eq!(queue.available(), queue.capacity());
    // A thread that polls is not affected.
    sharing().build().unwrap().close().unwrap();
}
