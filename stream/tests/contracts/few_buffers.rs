//! Hubs that can register no more memory: whoever waits for a buffer gets the one that comes back, in whatever way it does.

use std::io::{ErrorKind, Read as _, Write as _};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs_software::{Verb, When};
use ibverbs_stream::{Hub, HubBuilder, Listener, Stream, tokio as tasks};
use tokio::io::AsyncWriteExt as _;

use super::{Host, PATIENCE, soon};

pub(super) fn pair(one: &Hub, two: &Hub) -> [Stream; 2] {
    let listener = Listener::bind(two, "127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::scope(|threads| {
        let connects = threads.spawn(|| Stream::connect(one, address, soon()));
        let two = listener.accept().unwrap().0;
        [connects.join().unwrap().unwrap(), two]
    })
}

/// Bytes of data in a message.
const MESSAGE: usize = 256 - 4;

const LINGER: Duration = Duration::from_millis(50);

/// Writes what the peer, which does not read, receives, and one message more. That has no credit, and stays in a buffer.
pub(super) fn fill(stream: &mut Stream) {
    stream.write_all(&[1; 9 * MESSAGE]).unwrap();
}

#[derive(Default)]
pub(super) struct Woken(pub(super) AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// A buffer of one of the streams comes back. Returns what stays.
type Way = fn([Stream; 2]) -> Vec<Stream>;

const WAYS: [Way; 4] = [
    |[one, mut two]| {
        two.read_exact(&mut [0; 2000]).unwrap();
        vec![one, two]
    },
    |[one, mut two]| {
        two.write_all(b"unread").unwrap();
        one.peek(&mut [0]).unwrap();
        drop(one);
        vec![two]
    },
    |[one, two]| {
        drop(two);
        assert!((&one).read(&mut [0]).is_err());
        vec![one]
    },
    |[one, two]| {
        drop(one);
        vec![two]
    },
];

/// A hub whose last buffer one of four streams has, and a fifth stream with its peer.
async fn full_hub() -> ([Host; 2], Vec<[Stream; 2]>, [tasks::Stream; 2]) {
    let set = |hub: HubBuilder| {
        hub.chunk(256).receives(4).shared_receives(4).keep_alive(10 * PATIENCE).linger(LINGER)
    };
    let hosts = [Host::with(set), Host::new()];
    let listener = tasks::Listener::bind(&hosts[1].hub, "127.0.0.1:0").await.unwrap();
    let connects = tasks::Stream::connect(&hosts[0].hub, listener.local_addr().unwrap());
    let (one, two) = tokio::join!(connects, listener.accept());
    let mut full: Vec<_> = (0..4).map(|_| pair(&hosts[0].hub, &hosts[1].hub)).collect();
    hosts[0].device.fail(Verb::RegMr, 12, When::Before, u32::MAX);
    full.iter_mut().for_each(|[one, _]| fill(one));
    (hosts, full, [one.unwrap(), two.unwrap().0])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_that_waits_for_a_buffer_gets_the_one_that_comes_back() {
    for way in WAYS {
        let (_hosts, mut full, [mut one, _two]) = full_hub().await;
        let mut writing = pin!(one.write_all(b"mine"));
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(woken.clone());
        for _ in 0..3 {
            let polled = writing.as_mut().poll(&mut Context::from_waker(&waker));
            assert!(polled.is_pending(), "there are buffers");
        }
        assert_eq!(woken.0.load(Ordering::SeqCst), 0, "it wakes itself");
        let comes_back = full.pop().unwrap();
        let gives = thread::spawn(move || way(comes_back));
        tokio::time::timeout(PATIENCE, writing).await.expect("it waits for ever").unwrap();
        drop(gives.join().unwrap());
    }
}

/// On a runtime of one thread, the task that gives the buffer back runs only when this one waits.
#[tokio::test]
async fn a_stream_without_a_buffer_is_not_writable() {
    let (_hosts, mut full, [one, _two]) = full_hub().await;
    let comes_back = full.pop().unwrap();
    let gives = tokio::spawn(async move {
        tokio::task::yield_now().await;
        WAYS[3](comes_back)
    });
    let mut tries = 0;
    let writing = async {
        loop {
            tries += 1;
            one.writable().await.unwrap();
            match one.try_write(b"mine") {
                Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
                written => break written.unwrap(),
            }
        }
    };
    let written = tokio::time::timeout(PATIENCE, writing).await.expect("it waits for ever");
    assert_eq!(written, 4);
    assert!(tries < 100, "it was told {tries} times that there is room");
    drop(gives.await.unwrap());
}

/// Receives that all streams share are not lost with a stream.
#[test]
fn what_a_dropped_stream_has_not_read_receives_again() {
    let set = |hub: HubBuilder| hub.chunk(256).receives(2).shared_receives(1);
    let hosts = [Host::with(set), Host::new()];
    for _ in 0..3 {
        let [one, mut two] = pair(&hosts[0].hub, &hosts[1].hub);
        two.write_all(b"unread").unwrap();
        two.set_nonblocking(true).unwrap();
        // The loop ends when the device has the bytes, and the hub of `one` has not polled for them.
        let (before, until) = (hosts[1].hub.stats().completions, soon());
        while hosts[1].hub.stats().completions == before {
            assert!(Instant::now() < until);
            assert!(two.read(&mut [0]).is_err());
        }
        drop((one, two));
    }
    let [mut one, mut two] = pair(&hosts[0].hub, &hosts[1].hub);
    two.write_all(b"hello").unwrap();
    one.set_read_timeout(Some(PATIENCE)).unwrap();
    one.read_exact(&mut [0; 5]).unwrap();
}
