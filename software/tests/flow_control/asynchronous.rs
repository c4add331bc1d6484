//! Futures that wait for credit.

use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Wake, Waker};

use ibverbs::{AsyncChannel, Reactor};
use tokio::time::{sleep, timeout};

use super::*;

fn runtime(threads: usize) -> tokio::runtime::Runtime {
    let mut builder = match threads {
        0 => tokio::runtime::Builder::new_current_thread(),
        _ => tokio::runtime::Builder::new_multi_thread(),
    };
    if threads > 0 {
        builder.worker_threads(threads);
    }
    builder.enable_all().build().unwrap()
}

/// Connected channels, each with a reactor that runs.
fn connect_async(sides: &[Side; 2]) -> [Arc<AsyncChannel>; 2] {
    let reactors = sides.each_ref().map(|side| Arc::new(Reactor::new(&side.context, 256).unwrap()));
    let [one, other] = [0, 1].map(|side| reactors[side].prepare(sides[side].builder()).unwrap());
    let endpoints = (one.endpoint(), other.endpoint());
    let channels = [one.handshake(endpoints.1).unwrap(), other.handshake(endpoints.0).unwrap()];
    for reactor in reactors {
        tokio::spawn(async move { reactor.run_on_tokio().await });
    }
    channels.map(Arc::new)
}

async fn within<T>(future: impl Future<Output = T>) -> T {
    timeout(PATIENCE, future).await.expect("a result in time")
}

#[test]
fn a_send_without_credit_is_posted_when_the_peer_has_a_receive() {
    for threads in [0, 2] {
        let sides = sides();
        runtime(threads).block_on(async {
            let [one, other] = connect_async(&sides);
            for round in 0..40 {
                let sent = Arc::new(AtomicBool::new(false));
                let sending = tokio::spawn({
                    let (one, sent, buffer) = (one.clone(), sent.clone(), sides[0].buffer(round));
                    async move {
                        one.send(buffer).await.unwrap();
                        sent.store(true, Ordering::SeqCst);
                    }
                });
                // Some are long enough for pauses.
                sleep(Duration::from_millis(round % 4)).await;
                assert!(!sent.load(Ordering::SeqCst), "there is no receive");
                let receive = other.receive(sides[1].buffer(0));
                let (buffer, _) = within(receive).await.unwrap();
                assert_eq!(number(&buffer), round);
                within(sending).await.unwrap();
            }
            assert_eq!(one.credits(), Some(0));
        });
    }
}

#[test]
fn many_senders_take_turns_and_reads_need_no_credit() {
    const TASKS: u64 = 20;
    let sides = sides();
    runtime(2).block_on(async {
        let [one, other] = connect_async(&sides);
        let senders: Vec<_> = (0..TASKS)
            .map(|message| {
                let (one, buffer) = (one.clone(), sides[0].buffer(message));
                tokio::spawn(async move { one.send(buffer).await.map(drop) })
            })
            .collect();
        let mut seen = Vec::new();
        for round in 0..TASKS {
            if round % 5 == 0 {
                sleep(Duration::from_millis(3)).await;
            }
            let (buffer, _) = within(other.receive(sides[1].buffer(0))).await.unwrap();
            seen.push(number(&buffer));
        }
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..TASKS));
        for sender in senders {
            within(sender).await.unwrap().unwrap();
        }
    });
}

#[test]
fn a_cancelled_wait_for_credit_lets_the_next_one_go() {
    let sides = sides();
    runtime(0).block_on(async {
        let [one, other] = connect_async(&sides);
        for round in 0..20 {
            let first = one.send(sides[0].buffer(99));
            assert!(timeout(Duration::from_micros(200 * round), first).await.is_err());
            let next = one.send(sides[0].buffer(round));
            let receive = other.receive(sides[1].buffer(0));
            let (sent, received) = within(async { tokio::join!(next, receive) }).await;
            sent.unwrap();
            assert_eq!(number(&received.unwrap().0), round);
        }
        assert_eq!(sides[0].pool.available(), 64);
    });
}

#[test]
fn a_channel_ends_while_its_senders_wait_for_credit() {
    let sides = sides();
    runtime(2).block_on(async {
        for wait in [0, 5] {
            let [one, _other] = connect_async(&sides);
            let (sender, buffer) = (one.clone(), sides[0].buffer(1));
            let waiting = tokio::spawn(async move { sender.send(buffer).await });
            sleep(Duration::from_millis(wait)).await;
            within(one.shutdown()).await;
            let error = within(waiting).await.unwrap().unwrap_err();
            assert_eq!(error.error, TransportError::Stopped);
            assert!(error.buffer.is_some());
        }
    });
}

/// Counts its wake-ups, and panics at each if told to.
#[derive(Debug)]
struct Woken(AtomicUsize, bool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
        assert!(!self.1, "this waker panics, as the test wants");
    }
}

/// No thread but the one that turns keeps the time: the reactor's file is readable when a pause is over.
#[test]
fn a_waker_that_panics_after_a_pause_does_not_stop_other_senders() {
    let network = Network::builder().build();
    let sides = simulated(&network);
    let reactors = sides.each_ref().map(|side| Reactor::new(&side.context, 256).unwrap());
    let connect = || {
        let [one, other] =
            [0, 1].map(|side| reactors[side].prepare(sides[side].builder()).unwrap());
        let endpoints = (one.endpoint(), other.endpoint());
        (one.handshake(endpoints.1).unwrap(), other.handshake(endpoints.0).unwrap())
    };
    let channels = [connect(), connect()];
    let woken = [true, false].map(|panics| Arc::new(Woken(AtomicUsize::new(0), panics)));
    let mut sends = [0, 1].map(|at| Box::pin(channels[at].0.send(sides[0].buffer(at as u64))));
    for (send, woken) in sends.iter_mut().zip(&woken) {
        let waker = Waker::from(woken.clone());
        assert!(send.as_mut().poll(&mut std::task::Context::from_waker(&waker)).is_pending());
    }
    let (start, mut rounds) = (Instant::now(), 0);
    while woken.iter().any(|woken| woken.0.load(Ordering::SeqCst) == 0) {
        // The peers are asked in vain some times.
        if rounds == 5 {
            assert!(woken.iter().all(|woken| woken.0.load(Ordering::SeqCst) == 0));
            for (_, peer) in &channels {
                peer.post_receive(sides[1].buffer(0)).unwrap();
            }
        }
        rounds += 1;
        network.run_until_idle(Duration::from_secs(1));
        reactors[0].arm().unwrap();
        // A waker that a completion wakes may end the turn by its panic.
        let turn = || reactors[0].turn().map(drop);
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(turn));
        let mut file =
            libc::pollfd { fd: reactors[0].as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: there is one entry, which is writable.
        unsafe { libc::poll(&mut file, 1, 100) };
        assert!(start.elapsed() < PATIENCE, "{woken:?}");
    }
}
