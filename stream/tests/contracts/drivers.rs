//! Whoever drives a hub may end, or not be polled again, at any time: every other one that waits goes on.

use std::future::poll_fn;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs_stream::tokio::{Listener, Stream};
use ibverbs_stream::{Hub, HubBuilder, Role};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf};
use tokio::runtime::{Builder, Runtime};

use super::{Host, PATIENCE, data, soon};

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

async fn ends<T>(test: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, test).await.expect("it never ends")
}

async fn pair(one: &Hub, two: &Hub) -> (Stream, Stream) {
    let listener = Listener::bind(two, "127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (one, two) = tokio::join!(Stream::connect(one, address), listener.accept());
    (one.unwrap(), two.unwrap().0)
}

/// A stream of threads.
fn thread_pair(one: &Hub, two: &Hub) -> (ibverbs_stream::Stream, ibverbs_stream::Stream) {
    let listener = ibverbs_stream::Listener::bind(two, "127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::scope(|threads| {
        let connects = threads.spawn(|| ibverbs_stream::Stream::connect(one, address, soon()));
        let two = listener.accept().unwrap().0;
        (connects.join().unwrap().unwrap(), two)
    })
}

/// Bytes go there and back.
async fn talk(one: &mut Stream, two: &mut Stream) {
    let mut got = [0; 1];
    for byte in 0..20 {
        one.write_u8(byte).await.unwrap();
        one.flush().await.unwrap();
        two.read_exact(&mut got).await.unwrap();
        assert_eq!(got, [byte]);
        two.write_u8(byte).await.unwrap();
        two.flush().await.unwrap();
        assert_eq!(one.read_u8().await.unwrap(), byte);
    }
}

/// Stands for two `#[tokio::test]`s that share a hub: each has a runtime of its own.
#[test]
fn a_runtime_that_ends_takes_nothing_from_another_one() {
    let host = Host::new();
    let (ended, has_ended) = tokio::sync::oneshot::channel();
    let (begun, has_begun) = std::sync::mpsc::channel();
    thread::scope(|threads| {
        let hub = &host.hub;
        threads.spawn(move || {
            let first = runtime();
            first.block_on(ends(async {
                let (mut one, mut two) = pair(hub, hub).await;
                talk(&mut one, &mut two).await;
                begun.send(()).unwrap();
            }));
            drop(first);
            ended.send(()).unwrap();
        });
        has_begun.recv().unwrap();
        runtime().block_on(ends(async {
            let (mut one, mut two) = pair(hub, hub).await;
            talk(&mut one, &mut two).await;
            // A read is waiting when the first runtime ends.
            let mut reading = pin!(two.read_u8());
            assert!(poll_fn(|cx| Poll::Ready(reading.as_mut().poll(cx))).await.is_pending());
            has_ended.await.unwrap();
            one.write_u8(7).await.unwrap();
            one.flush().await.unwrap();
            assert_eq!(reading.await.unwrap(), 7);
            talk(&mut one, &mut two).await;
        }));
    });
}

/// The runtime in which the first stream was made is there, and nobody polls it, as with `block_on` in a thread.
#[test]
fn a_runtime_that_is_not_polled_keeps_nobody_waiting() {
    let hosts = [Host::new(), Host::new()];
    let first = runtime();
    let (_one, _two) = first.block_on(ends(pair(&hosts[0].hub, &hosts[1].hub)));
    for _ in 0..3 {
        let second = runtime();
        second.block_on(ends(async {
            let (mut one, mut two) = pair(&hosts[0].hub, &hosts[1].hub).await;
            talk(&mut one, &mut two).await;
        }));
    }
    // The stream goes on where it was.
    first.block_on(ends(async {
        let (mut one, mut two) = pair(&hosts[0].hub, &hosts[1].hub).await;
        talk(&mut one, &mut two).await;
    }));
}

#[test]
fn a_stream_outlives_the_runtime_in_which_it_was_made() {
    let hosts = [Host::new(), Host::new()];
    let first = runtime();
    let (mut one, mut two) = first.block_on(ends(pair(&hosts[0].hub, &hosts[1].hub)));
    drop(first);
    for workers in [0, 2] {
        let next = match workers {
            0 => runtime(),
            _ => Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap(),
        };
        next.block_on(ends(talk(&mut one, &mut two)));
        next.shutdown_background();
    }
}

/// A runtime with several threads is dropped while its tasks and those of another one are reading and writing.
#[test]
fn a_runtime_is_dropped_in_the_middle_of_a_transfer() {
    let hosts = [Host::new(), Host::new()];
    let (mut one, mut two) = runtime().block_on(ends(pair(&hosts[0].hub, &hosts[1].hub)));
    let noise = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    noise.block_on(async {
        for _ in 0..3 {
            let (mut one, mut two) = pair(&hosts[0].hub, &hosts[1].hub).await;
            tokio::spawn(async move { while one.write_all(&[1; 5000]).await.is_ok() {} });
            tokio::spawn(async move { while two.read(&mut [0; 700]).await.is_ok() {} });
        }
    });
    let writes = thread::spawn(move || {
        runtime().block_on(ends(async {
            for piece in data(2_000_000).chunks(3001) {
                one.write_all(piece).await.unwrap();
            }
            one.shutdown().await.unwrap();
            one
        }))
    });
    let reads = thread::spawn(move || {
        runtime().block_on(ends(async {
            let mut got = Vec::new();
            two.read_to_end(&mut got).await.unwrap();
            got
        }))
    });
    noise.shutdown_background();
    drop(writes.join().unwrap());
    assert!(reads.join().unwrap() == data(2_000_000));
}

#[test]
fn run_on_tokio_may_be_given_up() {
    let hosts = [Host::new(), Host::new()];
    runtime().block_on(ends(async {
        for host in &hosts {
            let run = tokio::time::timeout(Duration::from_millis(20), host.hub.run_on_tokio());
            assert!(run.await.is_err());
        }
        let (mut one, mut two) = pair(&hosts[0].hub, &hosts[1].hub).await;
        talk(&mut one, &mut two).await;
    }));
    // A future that is there and not polled serves nobody, and takes nothing from anybody.
    let first = runtime();
    let mut running = Box::pin(hosts[0].hub.run_on_tokio());
    let polled =
        first.block_on(async { poll_fn(|cx| Poll::Ready(running.as_mut().poll(cx))).await });
    assert!(polled.is_pending());
    runtime().block_on(ends(async {
        let (mut one, mut two) = pair(&hosts[0].hub, &hosts[1].hub).await;
        talk(&mut one, &mut two).await;
    }));
    // Nor does one that is dropped leave anything of its task.
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(woken.clone());
    first.block_on(async {
        let mut running = Box::pin(hosts[0].hub.run_on_tokio());
        assert!(running.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    });
    drop(waker);
    assert_eq!(Arc::strong_count(&woken), 1);
    hosts[0].hub.stop();
    first.block_on(running).unwrap();
}

/// Threads that sleep for their own bytes, and tasks of two runtimes, wake each other.
#[test]
fn threads_and_tasks_share_a_hub() {
    let host = Host::new();
    let hub = &host.hub;
    thread::scope(|threads| {
        for _ in 0..2 {
            threads.spawn(|| {
                runtime().block_on(ends(async {
                    let (mut one, mut two) = pair(hub, hub).await;
                    for _ in 0..20 {
                        talk(&mut one, &mut two).await;
                    }
                }));
            });
            let (mut one, mut two) = thread_pair(hub, hub);
            for stream in [&mut one, &mut two] {
                stream.set_read_timeout(Some(PATIENCE)).unwrap();
            }
            threads.spawn(move || {
                for byte in 0..200 {
                    one.write_all(&[byte]).unwrap();
                    let mut got = [0; 1];
                    one.read_exact(&mut got).unwrap();
                    assert_eq!(got, [byte]);
                }
            });
            threads.spawn(move || {
                for _ in 0..200 {
                    let mut got = [0; 1];
                    two.read_exact(&mut got).unwrap();
                    two.write_all(&got).unwrap();
                }
            });
        }
    });
}

struct Unparks(thread::Thread);

impl Wake for Unparks {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Does what `futures::executor::block_on` does.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    let waker = Waker::from(Arc::new(Unparks(thread::current())));
    let mut future = pin!(future);
    let until = soon();
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        let left = until.checked_duration_since(Instant::now()).expect("it never ends");
        thread::park_timeout(left);
    }
}

/// Tokio panics when such a runtime is asked to wait for a file, or for a time.
#[test]
fn a_runtime_without_io_or_time_is_served() {
    let hosts = [Host::new(), Host::new()];
    let first = runtime();
    let (mut one, mut two) = first.block_on(ends(pair(&hosts[0].hub, &hosts[1].hub)));
    for _ in 0..2 {
        let without_io = Builder::new_current_thread().enable_time().build().unwrap();
        without_io.block_on(ends(talk(&mut one, &mut two)));
        let without_time = Builder::new_current_thread().enable_io().build().unwrap();
        without_time.block_on(talk(&mut one, &mut two));
    }
    first.block_on(ends(talk(&mut one, &mut two)));
}

/// The runtime in which the streams were made has ended, and the executor is another one than tokio.
#[test]
fn a_task_outside_of_tokio_is_served() {
    let hosts = [Host::new(), Host::new()];
    let (mut one, mut two) = runtime().block_on(ends(pair(&hosts[0].hub, &hosts[1].hub)));
    let reads = thread::spawn(move || {
        let mut got = vec![0; 300_000];
        block_on(two.read_exact(&mut got)).unwrap();
        assert!(got == data(300_000));
        block_on(two.write_all(b"thanks")).unwrap();
        block_on(two.shutdown()).unwrap();
        two
    });
    block_on(one.write_all(&data(300_000))).unwrap();
    let mut got = String::new();
    block_on(one.read_to_string(&mut got)).unwrap();
    assert_eq!(got, "thanks");
    drop((one, reads.join().unwrap()));
    nothing_is_left(&hosts);
}

/// Another executor polls a task within the context of a runtime, as `Runtime::enter` allows: the task stays when the
/// runtime ends.
#[test]
fn a_task_of_another_executor_outlives_the_runtime_that_serves_it() {
    let hosts = [Host::new(), Host::new()];
    let (mut one, mut two) = runtime().block_on(ends(pair(&hosts[0].hub, &hosts[1].hub)));
    let serves = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (waits, has_waited) = std::sync::mpsc::channel();
    let context = serves.handle().clone();
    let reads = thread::spawn(move || {
        let _entered = context.enter();
        let mut reading = Box::pin(async move { two.read_u8().await });
        let first = block_on(poll_fn(|cx| Poll::Ready(reading.as_mut().poll(cx).is_pending())));
        waits.send(first).unwrap();
        block_on(reading).unwrap()
    });
    assert!(has_waited.recv().unwrap());
    // The thread sleeps, or is about to: both end.
    thread::sleep(Duration::from_millis(20));
    drop(serves);
    block_on(async {
        one.write_u8(7).await.unwrap();
        one.flush().await.unwrap();
    });
    assert_eq!(reads.join().unwrap(), 7);
}

fn nothing_is_left(hosts: &[Host]) {
    let until = soon();
    while hosts.iter().any(|host| host.hub.stats().connections > 0) {
        assert!(Instant::now() < until, "streams are left: {:?}", hosts[0].hub);
        thread::sleep(Duration::from_millis(1));
    }
}

/// Writes until the peer, which does not read, takes no more.
fn fill(stream: &mut ibverbs_stream::Stream) -> usize {
    stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let mut sent = 0;
    loop {
        match stream.write(&[1; 4096]) {
            Ok(len) => sent += len,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return sent,
            Err(error) => panic!("{error}"),
        }
    }
}

/// Reads what arrives while the writer's thread makes no call.
fn read_all(stream: &mut ibverbs_stream::Stream, len: usize) {
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.read_exact(&mut vec![0; len]).unwrap();
}

#[test]
fn what_a_write_with_a_timeout_has_taken_arrives_without_another_call() {
    let hosts = [Host::new(), Host::new()];
    let (mut one, mut two) = thread_pair(&hosts[0].hub, &hosts[1].hub);
    let sent = fill(&mut one);
    read_all(&mut two, sent);
    // One write of which the last part has no room.
    let (mut one, mut two) = thread_pair(&hosts[0].hub, &hosts[1].hub);
    one.set_write_timeout(Some(PATIENCE)).unwrap();
    let all = data(8 * 16_380 + 1000);
    one.write_all(&all).unwrap();
    read_all(&mut two, all.len());
    drop(one);
    assert_eq!(two.read(&mut [0; 8]).unwrap(), 0);
}

#[test]
fn an_end_that_was_asked_for_arrives_without_another_call() {
    for dropped in [false, true] {
        let hosts = [Host::new(), Host::new()];
        let (mut one, mut two) = thread_pair(&hosts[0].hub, &hosts[1].hub);
        let sent = fill(&mut one);
        let rest: Box<dyn Send> = if dropped {
            let (read, write) = one.into_split();
            drop(write);
            Box::new(read)
        } else {
            let error = one.shutdown(Shutdown::Write).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::WouldBlock);
            Box::new(one)
        };
        read_all(&mut two, sent);
        assert_eq!(two.read(&mut [0; 8]).unwrap(), 0, "dropped: {dropped}");
        drop(rest);
    }
}

/// The runtime is not polled after the write, or it has ended.
#[test]
fn what_a_task_has_written_arrives_though_nobody_polls_its_runtime() {
    for ends_too in [false, true] {
        let hosts = [Host::new(), Host::new()];
        let listener = ibverbs_stream::Listener::bind(&hosts[1].hub, "127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let first = runtime();
        let (mut one, mut two) = thread::scope(|threads| {
            let accepts = threads.spawn(|| listener.accept().unwrap().0);
            let one = first.block_on(ends(Stream::connect(&hosts[0].hub, address))).unwrap();
            (one, accepts.join().unwrap())
        });
        let (mut sent, noop) = (0, Waker::noop());
        first.block_on(async {
            // Writes until there is no room, with the driver polled in between, or not.
            for _ in 0..50 {
                let mut cx = Context::from_waker(noop);
                if let Poll::Ready(len) = Pin::new(&mut one).poll_write(&mut cx, &[1; 4096]) {
                    sent += len.unwrap();
                }
                tokio::task::yield_now().await;
            }
        });
        if ends_too {
            drop(first);
        }
        read_all(&mut two, sent);
        drop(one);
        assert_eq!(two.read(&mut [0; 8]).unwrap(), 0);
        drop(two);
        nothing_is_left(&hosts);
    }
}

/// A driver has taken the event for more than it handles in a turn, and is not polled again: the other one hears of it.
#[test]
fn what_a_driver_leaves_is_told_to_others() {
    const MESSAGES: usize = 2000;
    let many = |hub: HubBuilder| {
        let hub = hub.chunk(64).max_connections(2).keep_alive(10 * PATIENCE);
        hub.receives(MESSAGES as u32).sends(MESSAGES as u32)
    };
    let host = Host::with(many);
    // On the same device, so that all is known to have arrived.
    let peer = many(Hub::builder(&Arc::new(host.device.open().unwrap()))).build().unwrap();
    let listener = ibverbs_stream::Listener::bind(&peer, "127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let runtimes = [runtime(), runtime()];
    let (mut ours, mut peers) = (Vec::new(), Vec::new());
    for runtime in &runtimes {
        let (one, two) = thread::scope(|threads| {
            let accepts = threads.spawn(|| listener.accept().unwrap().0);
            let connects = Stream::connect(&host.hub, address);
            (runtime.block_on(ends(connects)).unwrap(), accepts.join().unwrap())
        });
        two.set_nodelay(true).unwrap();
        ours.push(Arc::new(one));
        peers.push(two);
    }
    let waits = |at: usize| {
        let stream: Arc<Stream> = ours[at].clone();
        runtimes[at].spawn(async move { stream.readable().await })
    };
    let [first, second] = [waits(0), waits(1)];
    let poll = |at: usize, times| {
        runtimes[at].block_on(async {
            for _ in 0..times {
                tokio::task::yield_now().await;
            }
        });
    };
    (0..2).for_each(|at| poll(at, 10));
    for _ in 0..MESSAGES - 1 {
        peers[0].write_all(b"x").unwrap();
    }
    peers[1].write_all(b"x").unwrap();
    host.wait_until_all_has_arrived();
    poll(0, 2);
    assert!(first.is_finished());
    let until = soon();
    while !second.is_finished() {
        assert!(Instant::now() < until, "nobody tells the other driver");
        poll(1, 2);
        thread::yield_now();
    }
}

/// Tasks of the set were the first that waited for the hub. They end with it, and the hub's driver does not.
#[test]
fn a_local_set_that_is_dropped_takes_nothing_from_others() {
    let hosts = [Host::new(), Host::new()];
    runtime().block_on(ends(async {
        let set = tokio::task::LocalSet::new();
        let (mut one, mut two) = set.run_until(pair(&hosts[0].hub, &hosts[1].hub)).await;
        let (mut other, mut its_peer) = set.run_until(pair(&hosts[0].hub, &hosts[1].hub)).await;
        let reads = set.spawn_local(async move { two.read_u8().await });
        set.run_until(tokio::task::yield_now()).await;
        assert!(!reads.is_finished());
        drop(set);
        assert!(reads.await.unwrap_err().is_cancelled());
        assert_eq!(one.read(&mut [0; 8]).await.unwrap(), 0, "it has ended with its task");
        talk(&mut other, &mut its_peer).await;
        drop((one, other, its_peer));
    }));
    nothing_is_left(&hosts);
}

fn threads_of_hubs() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.flatten().filter_map(|task| std::fs::read(task.path().join("comm")).ok());
    names.filter(|name| name.starts_with(b"ibverbs-helper")).count()
}

/// This test runs itself, as other tests have helpers, too.
#[test]
fn the_hubs_own_thread_is_there_only_while_something_is_owed() {
    const ALONE: &str = "IBVERBS_STREAM_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let test = "drivers::the_hubs_own_thread_is_there_only_while_something_is_owed";
        let alone = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test])
            .env(ALONE, "1")
            .output()
            .unwrap();
        assert!(alone.status.success(), "{}", String::from_utf8_lossy(&alone.stdout));
        return;
    }
    let hosts = [Host::new(), Host::new()];
    let (mut one, mut two) = thread_pair(&hosts[0].hub, &hosts[1].hub);
    one.write_all(b"hello").unwrap();
    two.read_exact(&mut [0; 5]).unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    let has_ended = || {
        while threads_of_hubs() > 0 {
            assert!(Instant::now() < until, "nothing is owed, and it stays");
            thread::sleep(Duration::from_millis(20));
        }
    };
    has_ended();
    // It has its name when it first runs. If the peer's device was late, there was room for all, and it ends.
    let mut sent = 0;
    while threads_of_hubs() == 0 {
        assert!(Instant::now() < until, "bytes are owed, and it is not there");
        sent += fill(&mut one);
        thread::sleep(Duration::from_millis(100));
    }
    read_all(&mut two, sent);
    has_ended();
}

/// A program that computes for many periods of keep-alive, and makes no call.
#[test]
fn a_peer_that_makes_no_call_is_alive() {
    for shares in [0, 16] {
        let short = |hub: HubBuilder| hub.keep_alive(Duration::from_millis(30));
        let hosts = [Host::with(short), Host::with(|hub| short(hub).shared_receives(shares))];
        let (mut one, mut two) = thread_pair(&hosts[0].hub, &hosts[1].hub);
        thread::scope(|threads| {
            let reads = threads.spawn(|| {
                one.set_read_timeout(Some(PATIENCE)).unwrap();
                one.read_exact(&mut [0; 5])
            });
            // More periods than the peer has receives: in each, the device asks the peer's.
            let sent = || hosts[0].device.counters().packets_sent;
            let (before, until) = (sent(), soon());
            while sent() < before + 60 && !reads.is_finished() {
                assert!(Instant::now() < until, "the device asks {} times", sent() - before);
                thread::sleep(Duration::from_millis(1));
            }
            assert!(!reads.is_finished(), "{:?}", reads.join());
            two.write_all(b"hello").unwrap();
            reads.join().unwrap().unwrap();
        });
    }
}

#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

struct Panics;

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        panic!("a waker that panics");
    }
}

#[test]
fn a_waker_that_panics_takes_nothing_from_others() {
    let hosts = [Host::new(), Host::new()];
    runtime().block_on(ends(async {
        let mut pairs = Vec::new();
        for _ in 0..3 {
            pairs.push(pair(&hosts[0].hub, &hosts[1].hub).await);
        }
        let woken = Arc::new(Woken::default());
        let wakers = [Waker::from(Arc::new(Panics)), Waker::from(woken.clone())];
        for ((_, two), waker) in pairs.iter_mut().zip(&wakers) {
            let mut bytes = [0; 8];
            let mut to = ReadBuf::new(&mut bytes);
            assert!(Pin::new(two).poll_read(&mut Context::from_waker(waker), &mut to).is_pending());
        }
        for (one, _) in &mut pairs {
            one.write_all(b"x").await.unwrap();
            one.flush().await.unwrap();
        }
        while woken.0.load(Ordering::SeqCst) == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        for (_, two) in &mut pairs {
            assert_eq!(two.read_u8().await.unwrap(), b'x');
        }
    }));
}

/// The runtime of the connection over which they were set up ends; then the peer's process does.
#[test]
fn a_stream_over_another_one_outlives_the_runtime_of_that() {
    let hosts = [Host::new(), Host::new()];
    let first = runtime();
    let (mut one, mut two) = first.block_on(ends(async {
        let (first, second) = tokio::io::duplex(64);
        let (one, two) = tokio::join!(
            Stream::over(&hosts[0].hub, first, Role::Connects),
            Stream::over(&hosts[1].hub, second, Role::Accepts)
        );
        (one.unwrap(), two.unwrap())
    }));
    drop(first);
    runtime().block_on(ends(async {
        talk(&mut one, &mut two).await;
        hosts[1].hub.stop();
        drop(two);
        let error = one.read(&mut [0; 4]).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
    }));
}

#[test]
fn a_linger_for_ever_is_a_number() {
    let hosts = [Host::with(|hub| hub.linger(Duration::MAX)), Host::new()];
    let (one, two) = thread_pair(&hosts[0].hub, &hosts[1].hub);
    thread::scope(|threads| {
        threads.spawn(|| drop(one));
        drop(two);
    });
    let (one, two) = runtime().block_on(ends(pair(&hosts[0].hub, &hosts[1].hub)));
    drop((one, two));
    nothing_is_left(&hosts);
}

/// Peers that do not read hold a thread up once, however many streams it drops; what they read later arrives all the same.
#[test]
fn streams_that_are_dropped_one_after_the_other_share_a_period() {
    let linger = Duration::from_millis(500);
    let hosts = [Host::with(|hub| hub.linger(linger)), Host::new()];
    let mut pairs: Vec<_> = (0..8).map(|_| thread_pair(&hosts[0].hub, &hosts[1].hub)).collect();
    for (one, _) in &mut pairs {
        fill(one);
    }
    let start = Instant::now();
    let (ones, _twos): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
    drop(ones);
    let taken = start.elapsed();
    assert!(taken >= linger, "{taken:?}");
    // Each of them would wait for one.
    assert!(taken < 8 * linger, "{taken:?} for 8 streams");
}

#[test]
fn shutdown_is_bounded_when_the_peer_does_not_read() {
    let hosts = [Host::with(|hub| hub.linger(Duration::from_millis(100))), Host::new()];
    runtime().block_on(ends(async {
        let (mut one, mut two) = pair(&hosts[0].hub, &hosts[1].hub).await;
        let mut sent = 0;
        let full = Duration::from_millis(50);
        while let Ok(len) = tokio::time::timeout(full, one.write(&[1; 4096])).await {
            sent += len.unwrap();
        }
        for _ in 0..2 {
            let error = one.shutdown().await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        }
        // The stream goes on.
        let mut got = Vec::new();
        two.read_to_end(&mut got).await.unwrap();
        assert_eq!(got.len(), sent);
        one.shutdown().await.unwrap();
    }));
    let (mut one, mut two) = thread_pair(&hosts[0].hub, &hosts[1].hub);
    let sent = fill(&mut one);
    one.set_write_timeout(None).unwrap();
    let error = one.shutdown(Shutdown::Write).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    read_all(&mut two, sent);
    assert_eq!(two.read(&mut [0; 8]).unwrap(), 0);
}

/// A stream of the program's, which says when it has ended, and what it does when it is dropped.
struct Own(DuplexStream, Arc<AtomicUsize>, Box<dyn FnMut() + Send + Sync>);

impl Drop for Own {
    fn drop(&mut self) {
        (self.2)();
    }
}

impl AsyncRead for Own {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let before = to.filled().len();
        let read = Pin::new(&mut self.0).poll_read(cx, to);
        if read.is_ready() && to.filled().len() == before {
            self.1.fetch_add(1, Ordering::SeqCst);
        }
        read
    }
}

impl AsyncWrite for Own {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, from)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

/// The hub has the last reference to the stream, as the task that read it has ended.
#[test]
fn a_stream_that_panics_when_it_is_dropped_takes_nothing_from_others() {
    let hosts = [Host::new(), Host::new()];
    runtime().block_on(ends(async {
        let (one, two) = tokio::io::duplex(1024);
        let ended = Arc::new(AtomicUsize::new(0));
        let panics = Box::new(|| panic!("the drop of a stream that panics"));
        let (one, two) = tokio::join!(
            Stream::over(&hosts[0].hub, Own(one, ended.clone(), panics), Role::Connects),
            Stream::over(&hosts[1].hub, two, Role::Accepts)
        );
        drop(two.unwrap());
        while ended.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
        drop(one);
        while hosts[0].hub.stats().connections > 0 {
            tokio::task::yield_now().await;
        }
        let (mut one, mut two) = pair(&hosts[0].hub, &hosts[1].hub).await;
        talk(&mut one, &mut two).await;
    }));
}

/// So it may wait for them.
#[test]
fn a_programs_stream_is_dropped_when_others_are_woken() {
    let hosts = [Host::new(), Host::new()];
    runtime().block_on(ends(async {
        loop {
            let woken = Arc::new(Woken(AtomicUsize::new(0)));
            let (ended, early) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(true)));
            let looks = {
                let (woken, early) = (woken.clone(), early.clone());
                move || early.store(woken.0.load(Ordering::SeqCst) > 0, Ordering::SeqCst)
            };
            let (one, two) = tokio::io::duplex(1024);
            let (one, two) = tokio::join!(
                Stream::over(
                    &hosts[0].hub,
                    Own(one, ended.clone(), Box::new(looks)),
                    Role::Connects
                ),
                Stream::over(&hosts[1].hub, two, Role::Accepts)
            );
            let (mut reads, mut writes) = pair(&hosts[0].hub, &hosts[1].hub).await;
            drop(two.unwrap());
            while ended.load(Ordering::SeqCst) == 0 {
                tokio::task::yield_now().await;
            }
            let waker = Waker::from(woken.clone());
            let mut reads = pin!(reads.read_u8());
            assert!(reads.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            writes.write_all(b"x").await.unwrap();
            // Nobody looks at the hub in between, so that the drop finds what has arrived.
            thread::sleep(Duration::from_millis(10));
            let before = woken.0.load(Ordering::SeqCst) > 0;
            drop(one);
            if !before && woken.0.load(Ordering::SeqCst) > 0 {
                assert!(early.load(Ordering::SeqCst));
                break;
            }
        }
    }));
}
