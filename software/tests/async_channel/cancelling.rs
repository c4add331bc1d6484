//! Futures that are dropped or forgotten at any point.

use std::future::Future;
use std::mem;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use crate::sides::{CHUNKS, Random, connect, current_thread, multi_thread, number, on_both, sides};

/// Polls a future a few times. Returns its output, or drops it.
async fn give_up_after<F: Future + Unpin>(mut future: F, polls: u64) -> Option<F::Output> {
    for _ in 0..polls {
        let polled = std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut future).poll(cx))).await;
        if let Poll::Ready(output) = polled {
            return Some(output);
        }
        tokio::task::yield_now().await;
    }
    None
}

#[test]
fn a_cancelled_receive_loses_no_message() {
    on_both(|[one, other]| async move {
        let [ours, theirs] = connect(&one, &other);
        let sender = tokio::spawn({
            let one = one.clone();
            async move {
                for n in 0..300 {
                    ours.send(one.buffer(n)).await.unwrap();
                }
                ours
            }
        });
        let (mut next, mut random, mut cancelled) = (0, Random(7), 0);
        while next < 300 {
            let polls = random.below(4);
            match give_up_after(theirs.receive(other.buffer(0)), polls).await {
                Some(received) => {
                    assert_eq!(number(&received.unwrap().0), next);
                    next += 1;
                }
                None => cancelled += 1,
            }
            // The receives that no future waits for do not become more.
            assert!(other.pool.available() >= CHUNKS - 3, "{:?}", other.pool);
        }
        assert!(cancelled > 0);
        sender.await.unwrap();
    });
}

#[test]
fn a_receive_that_times_out_leaves_its_message_to_the_next_one() {
    on_both(|[one, other]| async move {
        let [ours, theirs] = connect(&one, &other);
        for n in 0..5 {
            let waiting = theirs.receive(other.buffer(0));
            tokio::time::timeout(Duration::from_millis(5), waiting).await.unwrap_err();
            ours.send(one.buffer(n)).await.unwrap();
            let (buffer, _) = theirs.receive(other.buffer(0)).await.unwrap();
            assert_eq!(number(&buffer), n);
        }
    });
}

#[test]
fn random_cancelling_under_load_loses_no_buffer_and_keeps_the_order() {
    on_both(|[one, other]| async move {
        let mut tasks = tokio::task::JoinSet::new();
        for seed in 1..=6 {
            let [ours, theirs] = connect(&one, &other);
            let sender = one.clone();
            tasks.spawn(async move {
                let mut random = Random(seed * 7919);
                let mut sent = Vec::new();
                for n in 0..150 {
                    let polls = random.below(6);
                    match give_up_after(ours.send(sender.buffer(n)), polls).await {
                        Some(result) => {
                            result.unwrap();
                            sent.push(n);
                        }
                        None => tokio::task::yield_now().await,
                    }
                }
                // The last one arrives after all others.
                ours.send(sender.buffer(u64::MAX)).await.unwrap();
                sent.push(u64::MAX);
                Some((ours, sent))
            });
            let receiver = other.clone();
            tasks.spawn(async move {
                let (mut random, mut last) = (Random(seed * 104_729), None);
                loop {
                    let polls = random.below(5);
                    let receive = theirs.receive(receiver.buffer(0));
                    let Some(received) = give_up_after(receive, polls).await else { continue };
                    let n = number(&received.unwrap().0);
                    assert!(last.is_none_or(|last| n > last), "{n} after {last:?}");
                    last = Some(n);
                    if n == u64::MAX {
                        return None;
                    }
                }
            });
        }
        while let Some(done) = tasks.join_next().await {
            if let Some((_, sent)) = done.unwrap() {
                assert_eq!(sent.last(), Some(&u64::MAX));
            }
        }
    });
}

#[test]
fn what_was_sent_by_a_dropped_future_arrives() {
    on_both(|[one, other]| async move {
        let [ours, theirs] = connect(&one, &other);
        // Polled once: posted.
        assert!(give_up_after(ours.send(one.buffer(1)), 1).await.is_none());
        // Never polled: not posted.
        drop(ours.send(one.buffer(2)));
        let last = ours.send(one.buffer(3));
        let received = async {
            for n in [1, 3] {
                assert_eq!(number(&theirs.receive(other.buffer(0)).await.unwrap().0), n);
            }
        };
        tokio::join!(last, received).0.unwrap();
    });
}

#[test]
fn a_place_in_line_that_is_given_up_is_the_next_ones() {
    on_both(|[one, other]| async move {
        let [ours, theirs] = connect(&one, &other);
        let ours = Arc::new(ours);
        // Nobody receives: eight are in flight, the others wait for room.
        let mut first = Vec::new();
        for n in 0..8 {
            let mut send = ours.send(one.buffer(n));
            assert!(give_up_after(&mut send, 1).await.is_none());
            first.push(send);
        }
        let mut waiting = ours.send(one.buffer(100));
        assert!(give_up_after(&mut waiting, 2).await.is_none());
        let last = tokio::spawn({
            let (ours, buffer) = (ours.clone(), one.buffer(8));
            async move { ours.send(buffer).await.map(|(buffer, _)| number(&buffer)) }
        });
        tokio::task::yield_now().await;
        drop(waiting);
        for n in 0..9 {
            assert_eq!(number(&theirs.receive(other.buffer(0)).await.unwrap().0), n);
            if n == 0 {
                // A slot is free once its result was taken.
                first.remove(0).await.unwrap();
            }
        }
        assert_eq!(last.await.unwrap().unwrap(), 8);
    });
}

#[test]
fn a_forgotten_future_leaves_the_channel_working_and_leaks() {
    for runtime in [current_thread(), multi_thread()] {
        let [one, other] = sides();
        let _tasks = [one.run(&runtime), other.run(&runtime)];
        runtime.block_on(async {
            let [ours, theirs] = connect(&one, &other);
            for n in 0..4 {
                let mut send = ours.send(one.buffer(n));
                assert!(give_up_after(&mut send, 1).await.is_none());
                mem::forget(send);
                let (buffer, _) = theirs.receive(other.buffer(0)).await.unwrap();
                assert_eq!(number(&buffer), n);
            }
            // The slots of the four are taken, but there are others.
            for n in 4..20 {
                let (sent, received) =
                    tokio::join!(ours.send(one.buffer(n)), theirs.receive(other.buffer(0)));
                sent.unwrap();
                assert_eq!(number(&received.unwrap().0), n);
            }
            assert_eq!(one.pool.available(), CHUNKS - 4);
            ours.shutdown().await;
        });
        // A future that waits is forgotten with the runtime that would have woken it.
        other.all_buffers_are_back();
        assert_eq!(one.pool.available(), CHUNKS - 4);
    }
}
