//! Who drives a reactor: a task of tokio, or no one.

use std::process::Command;
use std::time::{Duration, Instant};

use ibverbs::future::Locked;
use ibverbs::{PooledBuffer, Reactor};

use crate::rig::{Rig, posted};

#[cfg(feature = "tokio")]
#[test]
fn a_task_of_tokio_drives_a_reactor_until_its_guard_is_dropped() {
    use ibverbs::TransportError;
    use ibverbs_function_device::Progress;

    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let device = ibverbs_function_device::FunctionDevice::model();
        device.progress(Progress::Manual);
        let context = std::sync::Arc::new(device.context());
        let domain = std::sync::Arc::new(ibverbs::ProtectionDomain::new(context.clone()).unwrap());
        let pool = ibverbs::BufferPool::new(&domain, 8, 4, ibverbs::AccessFlags::empty()).unwrap();
        let mut reactor = Reactor::new(&context, 64).unwrap().spawn_on_tokio();
        let [one, two] = crate::rig::connect(&reactor, &domain, |builder| builder);
        let run = async {
            for byte in 0..50 {
                let receive = two.receive(pool.take().unwrap());
                let send = one.send(pool.take_from(&[byte]).unwrap().unwrap());
                let progress = async {
                    tokio::task::yield_now().await;
                    device.run();
                };
                let (received, sent, ()) = tokio::join!(receive, send, progress);
                sent.unwrap();
                assert_eq!(received.unwrap().0[..], [byte]);
            }
        };
        tokio::time::timeout(Duration::from_secs(120), run).await.expect("it is driven");
        // It ends with an error for all: what waits is told.
        let waiting = two.receive(pool.take().unwrap());
        let stopping = async {
            tokio::task::yield_now().await;
            reactor.stop(TransportError::Stopped);
            reactor.ended().await
        };
        let (waited, ended) = tokio::join!(waiting, stopping);
        assert_eq!((waited.unwrap_err().error, ended), (TransportError::Stopped, Ok(())));
        assert_eq!(reactor.ended().await, Ok(()), "once more");
        drop((one, two));

        let reactor = Reactor::new(&context, 64).unwrap().spawn_on_tokio();
        let [one, _two] = crate::rig::connect(&reactor, &domain, |builder| builder);
        let waiting = one.receive(pool.take().unwrap());
        let dropping = async {
            tokio::task::yield_now().await;
            drop(reactor);
        };
        let (waited, ()) = tokio::join!(waiting, dropping);
        assert_eq!(waited.unwrap_err().error, TransportError::ReactorGone);
    });
}

/// A process of its own, whose standard error is read: a future of it waits, and nobody makes a turn.
#[cfg(debug_assertions)]
#[test]
fn a_debug_build_says_that_no_one_drives_a_reactor() {
    const SAYS: &str = "a future has waited for a second without a turn";
    let case = std::env::var("IBVERBS_TEST_DRIVES");
    if let Ok(case) = &case {
        let rig = Rig::<Locked<PooledBuffer>>::new();
        let receive = posted(rig.two.receive(rig.buffer(0)));
        let end = Instant::now() + Duration::from_secs(3);
        while Instant::now() < end {
            match case.as_str() {
                "turns" => {
                    rig.reactor.turn().unwrap();
                }
                "sleeps" => rig.reactor.arm().unwrap(),
                _ => {}
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        drop(receive);
        return rig.finish();
    }
    let of = |case: &str| {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args([
            "--exact",
            "--nocapture",
            "driving::a_debug_build_says_that_no_one_drives_a_reactor",
        ]);
        let output = child.env("IBVERBS_TEST_DRIVES", case).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let said = of("none");
    assert_eq!(said.matches(SAYS).count(), 1, "{said}");
    assert!(!of("sleeps").contains(SAYS));
    assert!(!of("turns").contains(SAYS));
}
