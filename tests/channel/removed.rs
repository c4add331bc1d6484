//! The device is removed while a program uses it. On Soft-RoCE this cannot be tested: the kernel waits until
//! the device is closed.

use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::completion::CompletionFields;
use ibverbs::device::{AsyncEventKind, AsyncEventSubject};
use ibverbs::{
    CompletionChannel, CompletionQueue, Error, ErrorKind, Loop, PooledBuffer, ProtectionDomain,
    ReceiveWorkRequest, TransportError, TransportResult, WorkCompletion, WorkStatus,
};
use ibverbs_function_device::{FunctionDevice, Kind};

use crate::figures::figure;
use crate::loops::Loops;
use crate::pair::{ModelPair as Pair, outstanding};
use crate::settling::{assert_aborts, is_child};

/// Time from the beginning of a wait to the removal of the device.
const SOON: Duration = Duration::from_millis(30);

/// A wait that takes longer than this counts as endless. It is long because everything is slow under
/// valgrind.
const LATE: Duration = Duration::from_secs(60);

/// Runs a wait and, some time after `has_begun` is true, removes the device. Returns also how long the wait
/// went on after the removal.
fn pulled_out<T: Send>(
    device: &FunctionDevice,
    has_begun: impl Fn() -> bool + Send,
    wait: impl FnOnce() -> T + Send,
) -> (T, Duration) {
    let (end, ends) = mpsc::channel::<()>();
    thread::scope(|threads| {
        let remover = threads.spawn(move || {
            let late = Instant::now() + LATE;
            while !has_begun() {
                assert!(Instant::now() < late, "the wait does not begin");
                thread::sleep(Duration::from_millis(1));
            }
            thread::sleep(SOON);
            let at = Instant::now();
            device.remove();
            // Who waits still, and in which call of the kernel, before a deadline hides it.
            let still =
                (ends.recv_timeout(LATE) == Err(RecvTimeoutError::Timeout)).then(system_calls);
            (at, still)
        });
        let result = wait();
        let ended = Instant::now();
        drop(end);
        let (at, still) = remover.join().unwrap();
        let took = ended.saturating_duration_since(at);
        assert!(still.is_none(), "it ended after {took:?}; when {LATE:?} had passed: {still:?}");
        (result, took)
    })
}

/// The system call of each thread, with its arguments in hexadecimal, and all files.
fn system_calls() -> Vec<String> {
    let folder = |path: &str| std::fs::read_dir(path).into_iter().flatten().flatten();
    let calls = folder("/proc/self/task").map(|task| {
        let call = std::fs::read_to_string(task.path().join("syscall")).unwrap_or_default();
        format!("{:?} {}", task.file_name(), call.trim())
    });
    let files = folder("/proc/self/fd").map(|file| {
        format!("{:?} {:?}", file.file_name(), std::fs::read_link(file.path()).unwrap_or_default())
    });
    calls.chain(files).collect()
}

fn assert_gone(error: Error) {
    assert_eq!(
        (error.kind(), error.raw_os_error()),
        (ErrorKind::Driver, Some(libc::EIO)),
        "{error}"
    );
    assert!(error.to_string().contains("the device may be gone"), "{error}");
}

/// Four threads wait at once: for an event, on a queue, in an extended poller, and on a channel for queues.
fn verbs_waits() -> (u32, Duration) {
    let device = FunctionDevice::model();
    let context = Arc::new(device.context());
    let channel = CompletionChannel::new(&context).unwrap();
    let queue = CompletionQueue::builder(&context, 4).channel(&channel).build().unwrap();
    let own = CompletionQueue::builder(&context, 4).own_channel().build().unwrap();
    let extended = CompletionQueue::builder(&context, 4).own_channel();
    let extended = extended.extended(CompletionFields::empty()).build().unwrap();
    let events = context.async_events().unwrap();
    assert!(queue.poll_or_arm(&mut [WorkCompletion::default()]).unwrap().is_empty());
    let far = Instant::now() + 2 * LATE;
    let ((), took) = pulled_out(
        &device,
        || true,
        || {
            thread::scope(|threads| {
                let event = threads.spawn(|| events.wait());
                // Two threads wait for the same queue, one of them with a deadline.
                let mut waits = Vec::new();
                waits.push(threads.spawn(|| channel.wait().map(drop)));
                waits.push(
                    threads
                        .spawn(|| own.wait_until(&mut [WorkCompletion::default()], far).map(drop)),
                );
                waits.push(threads.spawn(|| own.wait(&mut [WorkCompletion::default()]).map(drop)));
                waits.push(threads.spawn(|| {
                    let mut poller = extended.extended_poller().unwrap();
                    poller.wait(|completions| drop(completions.next())).map(drop)
                }));
                let event = event.join().unwrap().unwrap();
                assert_eq!(event.kind(), AsyncEventKind::DeviceFatal);
                assert_eq!(event.subject(), AsyncEventSubject::Device);
                waits.into_iter().for_each(|wait| assert_gone(wait.join().unwrap().unwrap_err()));
            });
        },
    );
    // The event is raised once. From now on every call fails at once.
    assert_eq!(events.next_event(), Ok(None));
    assert_gone(channel.next_event().unwrap_err());
    assert_gone(own.wait(&mut [WorkCompletion::default()]).unwrap_err());
    assert_gone(context.query_port(1).map(drop).unwrap_err());
    assert_gone(context.alloc_pd().map(drop).unwrap_err());
    assert_gone(context.create_cq(4).map(drop).unwrap_err());
    drop(events);
    // Closing the objects does not hang.
    extended.close().unwrap();
    own.close().unwrap();
    queue.close().unwrap();
    channel.close().unwrap();
    drop(context);
    device.assert_clean();
    (5, took)
}

#[test]
fn every_wait_of_the_verbs_layer_ends() {
    verbs_waits();
}

/// Every way to wait on a channel without a deadline.
const WAITS: [fn(&mut Pair) -> TransportResult<()>; 5] = [
    // Blocking.
    |pair| {
        let mut region = pair.region(8, 0);
        pair.one.receive(&mut region.slice_mut(..)?).map(drop)
    },
    // In a scope.
    |pair| {
        let mut region = pair.region(8, 0);
        let result = pair.one.scope(|s| s.post_receive(region.slice_mut(..)?)?.wait().map(drop));
        result.map_err(TransportError::from)
    },
    |pair| {
        let mut region = pair.region(8, 0);
        let result = pair.one.scope(|s| s.post_receive(region.slice_mut(..)?)?.spin_poll());
        result.map(drop).map_err(TransportError::from)
    },
    // At the end of a scope.
    |pair| {
        let mut region = pair.region(16, 0);
        let result = pair.one.scope(|s| {
            for part in region.slice_mut(..)?.chunks(8)? {
                std::mem::forget(s.post_receive(part)?);
            }
            Ok::<_, TransportError>(())
        });
        result.map_err(TransportError::from)
    },
    // Without a scope.
    |pair| {
        let mut region = pair.region(8, 0);
        // SAFETY: the region lives until the channel has ended the receive.
        let work =
            unsafe { pair.one.post_unpolled(ReceiveWorkRequest::new(&mut region.slice_mut(..)?)) }?;
        let result = work.wait(&mut pair.one).map(drop);
        // Nothing is in flight when it is dropped.
        assert_eq!(pair.one.as_raw(), std::ptr::null_mut());
        result
    },
];

/// Each way, spinning or asleep. The buffers are taken back from the device before the wait returns.
fn channel_waits() -> (u32, Duration) {
    let (mut waits, mut slowest) = (0, Duration::ZERO);
    for sleeping in [false, true] {
        for wait in WAITS {
            let device = FunctionDevice::model();
            let mut pair =
                Pair::with(
                    device.clone(),
                    |builder| {
                        if sleeping { builder.sleep_after(3) } else { builder }
                    },
                );
            pair.exchange();
            let number = pair.one.number();
            let is_posted = || device.outstanding(number) != (0, 0);
            let (result, took) = pulled_out(&device, is_posted, || wait(&mut pair));
            let Err(TransportError::Verbs(error)) = result else { panic!("{result:?}") };
            assert_gone(error);
            let verbs = ["ibv_query_qp", "ibv_get_cq_event", "ibv_req_notify_cq"];
            assert!(verbs.contains(&error.verb()), "{error}");
            // No completion came and RESET failed, so the queue pair was destroyed before the buffer was
            // given back.
            assert_eq!((device.live(Kind::QueuePair), device.violations().0), (1, 0));
            assert_ne!(pair.two.number(), number);
            assert_eq!(pair.one.send(()).unwrap_err(), TransportError::Closed);
            assert_eq!(pair.one.scope(|s| s.post_send(()).map(drop)).map_err(Into::into), {
                Err(TransportError::Closed)
            });
            pair.finish();
            waits += 1;
            slowest = slowest.max(took);
        }
    }
    (waits, slowest)
}

/// Every way to wait for what ends on a loop.
const LOOP_WAITS: [fn(&mut Loop<'static, PooledBuffer>) -> TransportError; 2] = [
    |of| of.wait_ended().map(drop).unwrap_err(),
    |of| of.wait_ended_until(Instant::now() + 2 * LATE).map(drop).unwrap_err(),
];

/// The error stops nothing: the buffer comes back when the loop ends, or is leaked if the queue pair cannot be
/// destroyed.
#[test]
fn every_wait_of_a_loop_ends() {
    for leaked in [false, true] {
        for wait in LOOP_WAITS {
            let device = FunctionDevice::model();
            let mut loops = Loops::on(device.clone());
            let (_channel, peer) = loops.connect();
            loops.receive(peer, 1);
            let number = loops.peers.endpoint(peer).unwrap().num();
            let (error, _) = pulled_out(&device, || true, || wait(&mut loops.peers));
            let TransportError::Verbs(error) = error else { panic!("{error:?}") };
            assert_gone(error);
            assert_eq!((device.outstanding(number), loops.out()), ((0, 1), 1));
            if leaked {
                device.fail("destroy_qp").errno(libc::EIO).times(1);
            }
            let Loops { here, peers, pool, domain, .. } = loops;
            drop(peers);
            assert_eq!(pool.chunks() - pool.available(), usize::from(leaked));
            drop((here, domain, pool));
            assert_eq!(device.violations().0, 0, "{}", device.violations().1);
            assert_eq!(device.live(Kind::QueuePair), u32::from(leaked));
            assert_eq!(device.live(Kind::MemoryRegion), u32::from(leaked));
        }
    }
}

/// The removal of the device does not count as a completion: a buffer stays lent until the queue pair is
/// destroyed.
fn buffers_stay_lent() {
    let mut pair = Pair::new();
    let mut region = pair.region(8, 0);
    let (device, number) = (pair.device.clone(), pair.one.number());
    let result = pair.one.scope(|s| {
        let mut receive = s.post_receive(region.slice_mut(..)?)?;
        device.remove();
        for _ in 0..1000 {
            assert!(receive.poll().is_none(), "it was given back for nothing");
        }
        assert_eq!(device.outstanding(number), (0, 1));
        // A new request is refused and takes no slot.
        let refused = s.post_receive(()).map(drop).unwrap_err();
        assert!(matches!(refused, TransportError::Verbs(e) if e.raw_os_error() == Some(libc::EIO)));
        assert_eq!(device.outstanding(number), (0, 1));
        Err::<(), _>(TransportError::UnknownWork)
    });
    assert_eq!(result.map_err(TransportError::from), Err(TransportError::UnknownWork));
    assert_eq!((device.live(Kind::QueuePair), device.violations().0), (1, 0));
    drop(region);
    pair.finish();
}

/// A removed device that can still flush does so, and the channel ends as after any failure.
fn what_is_flushed_ends_at_once() {
    let mut pair = Pair::new();
    let mut region = pair.region(8, 0);
    let (device, number) = (pair.device.clone(), pair.one.number());
    thread::scope(|threads| {
        threads.spawn(|| {
            let late = Instant::now() + LATE;
            while device.outstanding(number) == (0, 0) {
                assert!(Instant::now() < late, "the receive is not posted");
                thread::sleep(Duration::from_millis(1));
            }
            thread::sleep(SOON);
            device.kill();
        });
        let error = pair.one.receive(region.slice_mut(..).unwrap()).unwrap_err();
        assert_eq!(error.work_error().unwrap().status(), WorkStatus::Flushed);
    });
    drop(region);
    pair.finish();
}

#[test]
fn a_device_that_is_pulled_out_ends_every_wait() {
    let (waits, slowest) = verbs_waits();
    let (more, slow) = channel_waits();
    buffers_stay_lent();
    what_is_flushed_ends_at_once();
    figure(
        "device-removed",
        &format!(
            "DeviceFatal delivered once; {} waits without deadline (events, completion channel, \
             queue, poller; channels blocking, scoped, unpolled; spinning and asleep) ended with EIO \
             ('the device may be gone'), the slowest {:.1?} after it (bound {LATE:?}); no buffer came \
             back before its queue pair was destroyed; where that fails too the process aborts (see \
             when_a_device_is_pulled_out_and_not_destroyed_the_process_aborts); nothing left",
            waits + more,
            slowest.max(slow)
        ),
    );
}

/// The kernel answers a destroy verb for an object that went with the device by an error, unless libibverbs
/// was told to take it for success. Then nothing proves that the device no longer uses the memory.
#[test]
fn when_a_device_is_pulled_out_and_not_destroyed_the_process_aborts() {
    const NAME: &str = "removed::when_a_device_is_pulled_out_and_not_destroyed_the_process_aborts";
    if is_child(NAME) {
        let mut pair = Pair::new();
        let mut region = pair.region(8, 0);
        pair.device.fail("destroy_qp").errno(libc::EIO).always();
        let device = pair.device.clone();
        let number = pair.one.number();
        let is_posted = || device.outstanding(number) != (0, 0);
        let _ = pulled_out(&device, is_posted, || pair.one.receive(region.slice_mut(..).unwrap()));
        eprintln!("still here");
        return;
    }
    assert_aborts(NAME);
}

/// With nothing in flight there is nothing to prove: the objects are leaked, without an abort.
#[test]
fn a_device_that_is_pulled_out_leaks_what_is_idle() {
    let mut pair = Pair::new();
    pair.exchange();
    let Pair { one, two, domain, device } = pair;
    assert_eq!(outstanding(&device, &one), (0, 0));
    for verb in ["destroy_qp", "destroy_cq", "dealloc_pd", "dereg_mr"] {
        device.fail(verb).errno(libc::EIO).always();
    }
    device.remove();
    assert_gone(one.close().unwrap_err());
    drop(two);
    let domain: Result<ProtectionDomain<'_>, _> = Arc::try_unwrap(domain);
    drop(domain);
    assert_eq!((device.live(Kind::QueuePair), device.calls("destroy_qp")), (2, 2));
    // Parents are not destroyed while the leaked object exists, and the memory is not freed.
    let calls = ["destroy_cq", "dealloc_pd", "free_context"].map(|verb| device.calls(verb));
    assert_eq!((calls, device.violations().0), ([0; 3], 0), "{}", device.violations().1);
}
