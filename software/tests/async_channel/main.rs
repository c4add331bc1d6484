//! Channels whose operations are futures: every operation, cancelling at any point, ends of all kinds.

#[path = "../../../tests/support/by_hand.rs"]
mod by_hand;
mod cancelling;
mod datagrams;
mod early_receives;
mod ending;
mod removed;
mod sides;
mod wakers;
mod waking;

use std::sync::Arc;

use ibverbs::channel::AnyBuffer;
use ibverbs::future::Locked;
use ibverbs::pool::SharedMemoryRange;
use ibverbs::{
    AccessFlags, CompareSwapWorkRequest, FetchAddWorkRequest, PooledBuffer, Reactor,
    SendWorkRequest, SharedMemoryRegion, TransportError, WriteWorkRequest,
};

use sides::{LEN, connect, number, on_both};

#[test]
fn messages_go_both_ways() {
    on_both(|[one, other]| async move {
        let [ours, theirs] = connect(&one, &other);
        let echo = tokio::spawn({
            let other = other.clone();
            async move {
                for _ in 0..200 {
                    let (buffer, success) = theirs.receive(other.buffer(0)).await.unwrap();
                    assert_eq!(success.byte_len() as usize, LEN);
                    theirs.send(buffer).await.unwrap();
                }
                theirs
            }
        });
        for n in 0..200 {
            ours.send(one.buffer(n)).await.unwrap();
            let (buffer, _) = ours.receive(one.buffer(0)).await.unwrap();
            assert_eq!(number(&buffer), n);
        }
        echo.await.unwrap();
    });
}

#[test]
fn every_operation_gives_its_buffer_back() {
    on_both(|[one, other]| async move {
        let [ours, theirs] = [&one, &other].map(|side| {
            let context = side.domain.context_parent();
            let reactor = Reactor::<Locked<AnyBuffer>>::with_share(context, 64).unwrap();
            let prepared = reactor.prepare(side.builder()).unwrap();
            tokio::spawn(async move { reactor.run_on_tokio().await });
            prepared
        });
        let endpoints = (ours.endpoint(), theirs.endpoint());
        let ours = ours.handshake(endpoints.1).unwrap();
        let theirs = theirs.handshake(endpoints.0).unwrap();
        let all = AccessFlags::LOCAL_WRITE
            | AccessFlags::REMOTE_READ
            | AccessFlags::REMOTE_WRITE
            | AccessFlags::REMOTE_ATOMIC;
        let target = SharedMemoryRegion::<u64>::new(&other.domain, 4, all).unwrap();
        let local = Arc::new(SharedMemoryRegion::<u64>::new(&one.domain, 4, all).unwrap());
        local.write(0, &[1, 2, 3, 4]).unwrap();
        let range = |range| SharedMemoryRange::new(local.clone(), range).unwrap();
        let (written, _) = ours.write(range(0..4), target.remote()).await.unwrap();
        assert!(written.downcast::<SharedMemoryRange<u64>>().is_ok());
        assert_eq!(target.to_vec(), [1, 2, 3, 4]);
        let word = target.remote_range(2..3).unwrap();
        ours.run(FetchAddWorkRequest::new(range(0..1), word, 10)).await.unwrap();
        ours.run(CompareSwapWorkRequest::new(range(1..2), word, 13, 99)).await.unwrap();
        ours.read(range(2..4), target.remote_range(2..4).unwrap()).await.unwrap();
        assert_eq!(local.to_vec(), [3, 13, 99, 4]);
        let receive = theirs.receive(other.buffer(0));
        let send = ours.run(SendWorkRequest::new(one.buffer(5)).immediate(77));
        let (sent, received) = tokio::join!(send, receive);
        assert_eq!(number(&sent.unwrap().0.downcast::<PooledBuffer>().unwrap()), 5);
        assert_eq!(received.unwrap().1.immediate(), Some(77));
        let receive = theirs.receive(other.buffer(0));
        let write = ours.run(WriteWorkRequest::new(range(0..1), word).immediate(78));
        let (written, received) = tokio::join!(write, receive);
        written.unwrap();
        assert_eq!(received.unwrap().1.immediate(), Some(78));
    });
}

#[test]
fn a_list_of_buffers_is_one_message() {
    on_both(|[one, other]| async move {
        let [ours, theirs] = [&one, &other].map(|side| {
            let context = side.domain.context_parent();
            let reactor = Reactor::<Locked<Vec<PooledBuffer>>>::with_share(context, 64).unwrap();
            let builder = side.builder().max_send_sge(3).max_recv_sge(3);
            let prepared = reactor.prepare(builder).unwrap();
            tokio::spawn(async move { reactor.run_on_tokio().await });
            prepared
        });
        let endpoints = (ours.endpoint(), theirs.endpoint());
        let ours = ours.handshake(endpoints.1).unwrap();
        let theirs = theirs.handshake(endpoints.0).unwrap();
        for count in [1, 3, 2] {
            let room: Vec<_> = (0..3).map(|_| other.buffer(99)).collect();
            let mut list: Vec<_> = (0..count).map(|n| one.buffer(n)).collect();
            list[0].set_len(8).unwrap();
            let (sent, received) = tokio::join!(ours.send(list), theirs.receive(room));
            assert_eq!(sent.unwrap().0.len(), count as usize);
            let (room, success) = received.unwrap();
            assert_eq!(success.byte_len() as usize, 8 + (count as usize - 1) * LEN);
            let found: Vec<u8> = room.iter().flat_map(|buffer| buffer.to_vec()).collect();
            let numbers: Vec<_> = (1..count).map(|n| found[8 + (n as usize - 1) * LEN]).collect();
            assert_eq!(numbers, (1..count).map(|n| n as u8).collect::<Vec<_>>());
            assert_eq!(found.len(), success.byte_len() as usize, "each is told its length");
        }
    });
}

#[test]
fn more_operations_than_there_is_room_for_wait_in_line() {
    on_both(|[one, other]| async move {
        let [ours, theirs] = connect(&one, &other);
        let ours = Arc::new(ours);
        let receiver = tokio::spawn({
            let other = other.clone();
            async move {
                for n in 0..60 {
                    let (buffer, _) = theirs.receive(other.buffer(0)).await.unwrap();
                    assert_eq!(number(&buffer), n, "in order");
                }
                theirs
            }
        });
        let mut sends = tokio::task::JoinSet::new();
        for n in 0..60 {
            let started = Arc::new(tokio::sync::Notify::new());
            let (ours, buffer, notify) = (ours.clone(), one.buffer(n), started.clone());
            sends.spawn(async move {
                let mut send = ours.send(buffer);
                // The send waits in line from here on.
                std::future::poll_fn(|cx| {
                    let polled = std::pin::Pin::new(&mut send).poll(cx);
                    notify.notify_one();
                    polled
                })
                .await
                .map(drop)
            });
            started.notified().await;
        }
        while let Some(sent) = sends.join_next().await {
            sent.unwrap().unwrap();
        }
        receiver.await.unwrap();
    });
}

#[test]
fn receives_can_be_posted_before_anyone_waits() {
    on_both(|[one, other]| async move {
        let [ours, theirs] = connect(&one, &other);
        for _ in 0..8 {
            theirs.post_receive(other.buffer(0)).unwrap();
        }
        let full = theirs.post_receive(other.buffer(0)).unwrap_err();
        assert!(full.error.is_queue_full());
        drop(full);
        for round in 0..10 {
            for n in 0..8 {
                ours.send(one.buffer(round * 8 + n)).await.unwrap();
            }
            for n in 0..8 {
                let (buffer, _) = theirs.receive(other.buffer(0)).await.unwrap();
                assert_eq!(number(&buffer), round * 8 + n);
            }
            // The channel keeps as many receives posted as in the beginning.
            assert_eq!(other.pool.available(), sides::CHUNKS - 8);
        }
    });
}

#[test]
fn bad_input_comes_back_with_the_buffer() {
    on_both(|[one, other]| async move {
        let sleeps = one.reactor.prepare(one.builder().sleep_after(3)).unwrap_err();
        assert_eq!(sleeps.raw_os_error(), Some(libc::EINVAL));
        assert!(sleeps.to_string().contains("sleep_after"), "{sleeps}");
        let [ours, _theirs] = connect(&one, &other);
        let small = SharedMemoryRegion::<u64>::new(&other.domain, 1, AccessFlags::REMOTE_READ);
        let failed = ours.read(one.buffer(1), small.unwrap().remote()).await.unwrap_err();
        assert!(matches!(failed.error, TransportError::Verbs(_)), "{failed}");
        assert_eq!(number(&failed.buffer.unwrap()), 1);
        // A channel that was built without receives says so instead of waiting.
        let deaf = one.reactor.prepare(one.builder().max_recv_wr(0)).unwrap();
        let remote = deaf.endpoint();
        let deaf = deaf.handshake(remote).unwrap();
        let error = deaf.receive(one.buffer(2)).await.unwrap_err();
        assert_eq!((error.error, error.buffer.is_some()), (TransportError::QueueFull, true));
    });
}

use std::future::Future;
