//! Channels that sleep after a while instead of polling.

use std::thread;
use std::time::{Duration, Instant};

use ibverbs::{SendWorkRequest, TransportError};
use ibverbs_software::Verb;

use crate::pair::{Pair, outstanding, soon};
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
                // A receiver that does not sleep polls a thousand times meanwhile.
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
