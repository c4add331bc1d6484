//! Buffers that the program has: written and read without a copy.

use std::io::{self, ErrorKind, Read as _, Write as _};
use std::net::Shutdown;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Waker};
use std::thread;
use std::time::Duration;

use ibverbs_software::{Verb, When};
use ibverbs_stream::{HubBuilder, ReceivedBuffer, Stream, tokio as tasks};
use tokio::io::AsyncWriteExt as _;

use super::few_buffers::{Woken, pair};
use super::{Host, PATIENCE, data};

/// Writes all of it, in buffers and by copies in turns.
fn write_mixed(stream: &mut Stream, bytes: &[u8]) {
    for (index, piece) in bytes.chunks(777).enumerate() {
        if index % 3 == 0 {
            stream.write_all(piece).unwrap();
            continue;
        }
        let mut buffer = stream.send_buffer().unwrap();
        if index % 3 == 1 {
            buffer.write_all(piece).unwrap();
        } else {
            buffer.set_len(piece.len()).unwrap();
            buffer.copy_from_slice(piece);
        }
        stream.write_owned(buffer).unwrap();
    }
    stream.shutdown(Shutdown::Write).unwrap();
}

/// Reads to the end, in buffers and by copies in turns. Some of the buffers are kept for a while.
fn read_mixed(stream: &mut Stream) -> Vec<u8> {
    let (mut got, mut kept) = (Vec::new(), Vec::new());
    loop {
        let mut bytes = [0; 100];
        let len = stream.read(&mut bytes).unwrap();
        got.extend(&bytes[..len]);
        let Some(buffer) = stream.read_owned().unwrap() else { return got };
        got.extend(&*buffer);
        kept.push(buffer);
        if kept.len() == 2 {
            kept.clear();
        }
    }
}

#[test]
fn buffers_and_copies_arrive_in_order() {
    for shared in [0, 3] {
        let set = |hub: HubBuilder| hub.chunk(1024).receives(3).sends(2).shared_receives(shared);
        let hosts = [Host::with(set), Host::with(set)];
        let [mut one, mut two] = pair(&hosts[0].hub, &hosts[1].hub);
        let all = data(300_000);
        thread::scope(|threads| {
            threads.spawn(|| write_mixed(&mut one, &all));
            assert!(read_mixed(&mut two) == all);
        });
    }
}

#[tokio::test]
async fn tasks_write_and_read_buffers() {
    let hosts = [Host::new(), Host::new()];
    let listener = tasks::Listener::bind(&hosts[1].hub, "127.0.0.1:0").await.unwrap();
    let connects = tasks::Stream::connect(&hosts[0].hub, listener.local_addr().unwrap());
    let (one, two) = tokio::join!(connects, listener.accept());
    let ((mut one, mut two), all) = ((one.unwrap(), two.unwrap().0), data(500_000));
    let writes = async {
        for (index, piece) in all.chunks(3000).enumerate() {
            if index % 2 == 0 {
                one.write_all(piece).await.unwrap();
                continue;
            }
            let mut buffer = one.send_buffer().unwrap();
            buffer.write_all(piece).unwrap();
            one.write_owned(buffer).await.unwrap();
        }
        one.shutdown().await.unwrap();
    };
    let reads = async {
        let mut got = Vec::<u8>::new();
        while let Some(buffer) = two.read_owned().await.unwrap() {
            got.extend(&*buffer);
        }
        assert!(got == all);
    };
    let both = async { tokio::join!(writes, reads) };
    tokio::time::timeout(PATIENCE, both).await.expect("it never ends");
}

/// Reads so many messages, and keeps them.
fn keep(stream: &Stream, count: usize) -> Vec<ReceivedBuffer> {
    (0..count).map(|_| stream.read_owned().unwrap().unwrap()).collect()
}

fn would_block<T: std::fmt::Debug>(written: Result<T, impl Into<io::Error> + std::fmt::Debug>) {
    assert_eq!(written.unwrap_err().into().kind(), ErrorKind::WouldBlock);
}

/// Also when the stream is gone, and no more memory can be registered.
#[test]
fn a_reader_that_keeps_buffers_holds_up_its_own_stream_alone() {
    let set = |hub: HubBuilder| hub.chunk(256).receives(4).sends(2);
    let hosts = [Host::new(), Host::with(set)];
    let [mut one, two] = pair(&hosts[0].hub, &hosts[1].hub);
    let [mut other, mut other_two] = pair(&hosts[0].hub, &hosts[1].hub);
    let message = [1; 252];
    for _ in 0..4 {
        one.write_all(&message).unwrap();
    }
    let mut kept = keep(&two, 4);
    // One waits for a credit, and what follows for that.
    one.set_nonblocking(true).unwrap();
    let mut written = 0;
    let blocked = loop {
        let mut buffer = one.send_buffer().unwrap();
        buffer.write_all(&message).unwrap();
        match one.write_owned(buffer) {
            Ok(()) => written += 1,
            Err(not_written) => break not_written,
        }
    };
    assert_eq!((written, blocked.error.kind()), (1, ErrorKind::WouldBlock));
    assert_eq!(*blocked.buffer, message, "it comes back as it was");
    would_block(one.write(&message));
    one.set_nonblocking(false).unwrap();
    thread::scope(|threads| {
        threads.spawn(|| other.write_all(&data(10_000)).unwrap());
        other_two.read_exact(&mut [0; 10_000]).unwrap();
    });
    // Half of its receives are said at once.
    kept.truncate(2);
    one.set_write_timeout(Some(PATIENCE)).unwrap();
    one.write_owned(blocked.buffer).unwrap();
    drop((one, two));
    // Others than those that are kept are registered for another stream.
    let [mut one, two] = pair(&hosts[0].hub, &hosts[1].hub);
    one.write_all(b"hello").unwrap();
    assert_eq!(*keep(&two, 1)[0], *b"hello");
    assert_eq!(*kept[0], message);
    drop((one, two, other, other_two, hosts));
    assert_eq!(*kept[1], message, "they keep their memory");
}

#[test]
fn an_error_gives_the_buffer_back() {
    let hosts = [Host::new(), Host::with(|hub| hub.chunk(256))];
    let [one, two] = pair(&hosts[0].hub, &hosts[1].hub);
    let [wide, _wide] = pair(&hosts[0].hub, &hosts[0].hub);
    let filled = |stream: &Stream, len| {
        let mut buffer = stream.send_buffer().unwrap();
        buffer.set_len(len).unwrap();
        buffer
    };
    assert_eq!(
        (one.send_buffer().unwrap().capacity(), wide.send_buffer().unwrap().capacity()),
        (252, (16 << 10) - 4)
    );
    assert_eq!(
        one.send_buffer().unwrap().set_len(253).unwrap_err().kind(),
        ErrorKind::InvalidInput
    );
    for (stream, buffer, reason) in [
        (&one, filled(&wide, 253), "the buffer has 253 bytes, and the peer receives 252"),
        (&two, filled(&one, 9), "the buffer is another hub's"),
    ] {
        let len = buffer.len();
        let not_written = stream.write_owned(buffer).unwrap_err();
        assert_eq!(
            (not_written.buffer.len(), not_written.error.kind()),
            (len, ErrorKind::InvalidInput)
        );
        assert_eq!(not_written.to_string(), reason);
    }
    one.write_owned(one.send_buffer().unwrap()).unwrap();
    let buffer = filled(&one, 9);
    one.shutdown(Shutdown::Write).unwrap();
    let not_written = one.write_owned(buffer).unwrap_err();
    assert_eq!((not_written.buffer.len(), not_written.error.kind()), (9, ErrorKind::BrokenPipe));
    assert_eq!((&two).read(&mut [0]).unwrap(), 0, "something of them was written");
    hosts[0].hub.stop();
    assert_eq!(
        wide.write_owned(not_written.buffer).unwrap_err().error.kind(),
        ErrorKind::ConnectionAborted
    );
}

/// A future that is dropped has written nothing.
#[tokio::test]
async fn a_write_that_is_given_up_has_written_nothing() {
    let hosts = [Host::new(), Host::with(|hub| hub.receives(1))];
    let listener = tasks::Listener::bind(&hosts[1].hub, "127.0.0.1:0").await.unwrap();
    let connects = tasks::Stream::connect(&hosts[0].hub, listener.local_addr().unwrap());
    let (one, two) = tokio::join!(connects, listener.accept());
    let (mut one, mut two) = (one.unwrap(), two.unwrap().0);
    let filled = |stream: &tasks::Stream, byte| {
        let mut buffer = stream.send_buffer().unwrap();
        buffer.write_all(&[byte; 9]).unwrap();
        buffer
    };
    for byte in 0..2 {
        one.write_owned(filled(&one, byte)).await.unwrap();
    }
    let given_up = filled(&one, 9);
    {
        let mut writing = pin!(one.write_owned(given_up));
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(woken.clone());
        for _ in 0..3 {
            assert!(writing.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        }
        assert_eq!(woken.0.load(Ordering::SeqCst), 0, "it wakes itself");
    }
    let writes = async {
        one.write_owned(filled(&one, 2)).await.unwrap();
        one.shutdown().await.unwrap();
    };
    let reads = async {
        let mut got = Vec::<u8>::new();
        while let Some(buffer) = two.read_owned().await.unwrap() {
            got.extend(&*buffer);
        }
        assert_eq!(got, [[0; 9], [1; 9], [2; 9]].concat());
    };
    let both = async { tokio::join!(writes, reads) };
    tokio::time::timeout(PATIENCE, both).await.expect("it never ends");
}

/// However many buffers the program has, and no stream lacks one for it.
#[test]
fn buffers_of_the_program_are_beside_those_of_streams() {
    let set =
        |hub: HubBuilder| hub.chunk(256).receives(4).shared_receives(4).keep_alive(10 * PATIENCE);
    let hosts = [Host::with(set), Host::new()];
    let [mut one, mut two] = pair(&hosts[0].hub, &hosts[1].hub);
    let mut mine: Vec<_> = (0..50).map(|_| one.send_buffer().unwrap()).collect();
    hosts[0].device.fail(Verb::RegMr, 12, When::Before, u32::MAX);
    while let Ok(buffer) = one.send_buffer() {
        mine.push(buffer);
    }
    let error = one.send_buffer().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    assert!(error.to_string().contains("RLIMIT_MEMLOCK"), "{error}");
    one.write_all(&data(2000)).unwrap();
    two.read_exact(&mut [0; 2000]).unwrap();
}

/// A thread that waits for a buffer sleeps; no operation ends when the program drops one.
#[test]
fn a_thread_that_waits_for_a_buffer_gets_the_one_that_a_program_drops() {
    let set = |hub: HubBuilder| {
        let hub = hub.chunk(256).receives(4).shared_receives(4).keep_alive(10 * PATIENCE);
        hub.linger(Duration::from_millis(50))
    };
    let hosts = [Host::with(set), Host::new()];
    let [mut one, _two] = pair(&hosts[0].hub, &hosts[1].hub);
    let mut full: Vec<_> = (0..4).map(|_| pair(&hosts[0].hub, &hosts[1].hub)).collect();
    let first = one.send_buffer().unwrap();
    hosts[0].device.fail(Verb::RegMr, 12, When::Before, u32::MAX);
    let mut mine: Vec<_> = std::iter::from_fn(|| one.send_buffer().ok()).collect();
    mine.push(first);
    full.iter_mut().for_each(|[one, _]| super::few_buffers::fill(one));
    let before = hosts[0].hub.stats().sleeps;
    thread::scope(|threads| {
        let writes = threads.spawn(|| {
            one.set_write_timeout(Some(PATIENCE)).unwrap();
            one.write_all(b"hello")
        });
        while hosts[0].hub.stats().sleeps == before {
            thread::yield_now();
        }
        drop(mine);
        writes.join().unwrap().unwrap();
    });
}
