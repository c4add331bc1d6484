//! A task of tokio drives a reactor, or nothing does.

use std::process::{Command, Stdio};
use std::task::Poll;
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
        // Stopping the reactor ends it for all, with an error: a waiting receive gets that.
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

/// However the task of a spawned reactor ends, nothing waits for it any more.
#[cfg(feature = "tokio")]
#[test]
fn a_spawned_reactor_is_stopped_when_its_task_is_gone() {
    use std::sync::Arc;
    use std::task::{Wake, Waker};

    use ibverbs::{Error, SendWorkRequest, TransportError};
    use tokio::runtime::{Builder, Runtime};

    use crate::rig::{connect, filled, poll, poll_with};

    struct Panics;

    impl Wake for Panics {
        fn wake(self: Arc<Self>) {
            panic!("the waker");
        }
    }

    let of_task = |error: Error| {
        assert!(error.to_string().contains("the task of spawn_on_tokio"), "{error}");
        error.raw_os_error() == Some(libc::ECANCELED)
    };
    let run_once = |runtime: &Runtime| runtime.block_on(async { tokio::task::yield_now().await });
    for case in ["it never ran", "it ran", "a waker", "no I/O"] {
        let rig = Rig::<Locked<PooledBuffer>>::new();
        let mut runtime = Builder::new_current_thread();
        let runtime = if case == "no I/O" { &mut runtime } else { runtime.enable_all() };
        let runtime = runtime.build().unwrap();
        let context = rig.domain.context_parent().clone();
        let reactor = Reactor::new(context, 64).unwrap();
        let mut reactor = runtime.block_on(async { reactor.spawn_on_tokio() });
        let [one, two] = connect(&reactor, &rig.domain, |builder| builder);
        let mut first = two.receive(rig.buffer(0));
        let mut waiting = one.receive(rig.buffer(0));
        let bomb = Waker::from(Arc::new(Panics));
        let waker = if case == "a waker" { &bomb } else { Waker::noop() };
        assert!(poll(&mut waiting).is_none() && poll_with(&mut first, waker).is_none(), "{case}");
        let ended = match case {
            "a waker" => {
                drop(one.submit(SendWorkRequest::new(rig.buffer(1))).unwrap());
                run_once(&runtime);
                rig.device.run();
                runtime.block_on(reactor.ended())
            }
            "no I/O" => runtime.block_on(reactor.ended()),
            _ => {
                if case == "it ran" {
                    run_once(&runtime);
                }
                drop(runtime);
                poll(&mut Box::pin(reactor.ended())).expect("at once")
            }
        };
        assert!(of_task(ended.unwrap_err()), "{case}");
        let once_more = poll(&mut Box::pin(reactor.ended())).expect("at once");
        assert_eq!(once_more, ended);
        let failed = poll(&mut waiting).expect("it has ended").unwrap_err();
        assert!(matches!(failed.error, TransportError::Verbs(error) if of_task(error)), "{case}");
        let refused = poll(&mut one.send(filled(&rig.pool, 1))).expect("at once").unwrap_err();
        assert_eq!(refused.error, failed.error);
        drop((first, waiting, failed, refused));
        drop((one, two, reactor));
        rig.finish();
    }
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
        // Armed, and polled once more: as a client that has nothing to do sleeps.
        let sleeping = Box::pin(rig.reactor.run(|_| Poll::Pending));
        let sleeping = (case != "none" && case != "turns").then_some(sleeping).map(posted);
        let sleeping = sleeping.filter(|_| case == "sleeps");
        let end = Instant::now() + Duration::from_secs(3);
        while Instant::now() < end {
            if case == "turns" {
                rig.reactor.turn().unwrap();
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        drop(sleeping);
        drop(receive);
        return rig.finish();
    }
    let spawn = |case| {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args([
            "--exact",
            "--nocapture",
            "driving::a_debug_build_says_that_no_one_drives_a_reactor",
        ]);
        let child = child.env("IBVERBS_TEST_DRIVES", case).stderr(Stdio::piped());
        child.stdout(Stdio::null()).spawn().unwrap()
    };
    let of = [("none", 1), ("dropped", 1), ("sleeps", 0), ("turns", 0)];
    let end = Instant::now() + Duration::from_secs(60);
    for (case, says, mut child) in of.map(|(case, says)| (case, says, spawn(case))) {
        loop {
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success(), "{output:?}");
            let said = String::from_utf8(output.stderr).unwrap();
            let count = said.matches(SAYS).count();
            if count == says {
                break;
            }
            // A child that the machine held up for a second says it rightly.
            assert!(says == 0 && Instant::now() < end, "{case}, {count} times: {said}");
            child = spawn(case);
        }
    }
}
