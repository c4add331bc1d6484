//! Futures that are dropped or forgotten at any point.

use std::future::Future;
use std::mem;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use ibverbs::future::PreparedAsyncChannel;
use ibverbs::{
    AccessFlags, AsyncChannel, CompareSwapWorkRequest, FetchAddWorkRequest, SharedMemoryRegion,
    TransportError,
};
use tokio::net::{TcpListener, TcpStream};

use crate::sides::{
    CHUNKS, Random, SENDS, Side, connect, current_thread, multi_thread, number, on_both, sides,
};

const ALL: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_ATOMIC);

/// Polls a future once. Returns its output if that is there.
async fn poll_once<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
    let polled = std::future::poll_fn(|cx| Poll::Ready(Pin::new(&mut *future).poll(cx))).await;
    match polled {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

/// Polls a future a few times. Returns its output, or drops it.
async fn give_up_after<F: Future>(future: F, polls: u64) -> Option<F::Output> {
    let mut future = pin!(future);
    for _ in 0..polls {
        if let Some(output) = poll_once(&mut future).await {
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

/// Whether an operation was posted. A future that was dropped does not say so.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Posted {
    No,
    Perhaps,
    Surely,
}

/// A task's record of the operations of its channel, which has the task's futures only, one at a time.
#[derive(Default)]
struct Account {
    /// How many may have been posted after the last one whose result is known: they end in order.
    in_flight: usize,
    /// The messages, each with its number.
    sends: Vec<(u64, Posted)>,
    /// The values written into the peer's first word.
    writes: Vec<(u64, Posted)>,
    /// How many times the peer's second word was incremented: at least, at most.
    added: [u64; 2],
    /// How many operations were given up that were surely posted, and that perhaps only waited for room.
    given_up: [usize; 2],
}

impl Account {
    /// Polls a future a few times, and drops it then. The first poll posts its operation if there is room.
    async fn attempt<F, T, E>(&mut self, future: F, polls: u64) -> (Posted, Option<T>)
    where
        F: Future<Output = Result<T, E>>,
        E: std::fmt::Debug,
    {
        // Another thread may be about to free the place of the future that was dropped last.
        let has_room = self.in_flight + 2 <= SENDS;
        self.in_flight += usize::from(polls > 0);
        match give_up_after(future, polls).await {
            Some(result) => {
                self.in_flight = 0;
                (Posted::Surely, Some(result.unwrap()))
            }
            None if polls == 0 => (Posted::No, None),
            None => {
                self.given_up[usize::from(!has_room)] += 1;
                (if has_room { Posted::Surely } else { Posted::Perhaps }, None)
            }
        }
    }

    /// Whether the first word may have this value, once everything that was posted so far has ended.
    fn may_have_written(&self, word: u64) -> bool {
        let writes = self.writes.iter().rev();
        let mut last = writes.scan(false, |over, &(number, posted)| {
            (!std::mem::replace(over, posted == Posted::Surely)).then_some((number, posted))
        });
        last.any(|(number, posted)| number == word && posted != Posted::No)
    }

    fn may_have_added(&self, sum: u64) -> bool {
        (self.added[0]..=self.added[1]).contains(&sum)
    }

    /// Everything that was surely posted has arrived, once and in order, and nothing that was not posted.
    fn check_messages(&self, arrived: &[u64]) {
        let mut arrived = arrived.iter().copied().peekable();
        for &(number, posted) in &self.sends {
            let has_arrived = arrived.next_if_eq(&number).is_some();
            match posted {
                Posted::No => assert!(!has_arrived, "{number} was not posted"),
                Posted::Perhaps => {}
                Posted::Surely => {
                    assert!(has_arrived, "{number} is lost, before {:?}", arrived.peek())
                }
            }
        }
        assert_eq!(arrived.next(), None, "it was not sent, came twice, or too late");
    }
}

#[test]
fn random_cancelling_under_load_loses_no_buffer_and_no_message_and_keeps_the_order() {
    on_both(|[one, other]| async move {
        let mut pairs = tokio::task::JoinSet::new();
        for seed in 1..=6 {
            let [ours, theirs] = connect(&one, &other);
            let words = SharedMemoryRegion::<u64>::new(&other.domain, 2, ALL).unwrap();
            let [word, sum] = [0, 1].map(|at| words.remote_range(at..=at).unwrap());
            words.write(0, &[u64::MAX]).unwrap();
            let sender = one.clone();
            let send = async move {
                let short =
                    |number: u64| sender.pool.take_from(&number.to_le_bytes()).unwrap().unwrap();
                let mut random = Random(seed * 7919);
                let mut account = Account::default();
                account.writes.push((u64::MAX, Posted::Surely));
                for n in 0..300 {
                    // Sometimes as many are given up at once as the queue has places, so that the next ones find none.
                    let polls = random.below(if n / 32 % 2 == 0 { 6 } else { 2 });
                    match random.below(8) {
                        0 => {
                            let read = ours.read(short(n), word);
                            let read = account.attempt(read, polls).await.1;
                            let word = read.map(|(buffer, _)| number(&buffer));
                            assert!(word.is_none_or(|word| account.may_have_written(word)));
                        }
                        1 => {
                            let write = ours.write(short(n), word);
                            let posted = account.attempt(write, polls).await.0;
                            account.writes.push((n, posted));
                        }
                        2 => {
                            let add = ours.run(FetchAddWorkRequest::new(short(n), sum, 1));
                            let (posted, added) = account.attempt(add, polls).await;
                            let before = added.map(|(buffer, _)| number(&buffer));
                            assert!(before.is_none_or(|before| account.may_have_added(before)));
                            account.added[0] += u64::from(posted == Posted::Surely);
                            account.added[1] += u64::from(posted != Posted::No);
                        }
                        3 => {
                            // The swap changes nothing, and tells what is there.
                            let swap =
                                ours.run(CompareSwapWorkRequest::new(short(n), sum, u64::MAX, 0));
                            let swapped = account.attempt(swap, polls).await.1;
                            let sum = swapped.map(|(buffer, _)| number(&buffer));
                            assert!(sum.is_none_or(|sum| account.may_have_added(sum)));
                        }
                        _ => {
                            let posted = account.attempt(ours.send(sender.buffer(n)), polls).await;
                            account.sends.push((n, posted.0));
                        }
                    }
                    if n % 32 == 0 {
                        // All that were posted before have ended when this one has.
                        let (read, _) = ours.read(short(n), word).await.unwrap();
                        assert!(account.may_have_written(number(&read)), "{}", number(&read));
                        account.in_flight = 0;
                    }
                }
                // The last one arrives after all others.
                ours.send(sender.buffer(u64::MAX)).await.unwrap();
                account.sends.push((u64::MAX, Posted::Surely));
                // The channel lives until the message has arrived.
                (ours, account)
            };
            let receiver = other.clone();
            let receive = async move {
                let (mut random, mut arrived) = (Random(seed * 104_729), Vec::new());
                while arrived.last() != Some(&u64::MAX) {
                    let polls = random.below(5);
                    let receive = theirs.receive(receiver.buffer(0));
                    let Some(received) = give_up_after(receive, polls).await else { continue };
                    arrived.push(number(&received.unwrap().0));
                }
                (theirs, arrived)
            };
            let (send, receive) = (tokio::spawn(send), tokio::spawn(receive));
            pairs.spawn(async move {
                let ((_ours, account), (_theirs, arrived)) =
                    (send.await.unwrap(), receive.await.unwrap());
                account.check_messages(&arrived);
                let [word, sum] = words.to_vec()[..] else { panic!("there are two words") };
                assert!(account.may_have_written(word), "{word} of {:?}", account.writes);
                assert!(account.may_have_added(sum), "{sum} of {:?}", account.added);
                account.given_up
            });
        }
        let mut given_up = [0; 2];
        while let Some(done) = pairs.join_next().await {
            let more = done.unwrap();
            given_up = [given_up[0] + more[0], given_up[1] + more[1]];
        }
        assert!(given_up[0] > 0, "no operation was given up that had been posted");
        assert!(given_up[1] > 0, "none was given up that may have been in line");
    });
}

/// Connects over a stream, unless it gives up after some polls. The stream is closed then.
async fn try_to_connect(
    prepared: PreparedAsyncChannel,
    mut stream: TcpStream,
    connects: bool,
    polls: u64,
) -> Option<AsyncChannel> {
    let connected = match connects {
        true => give_up_after(prepared.connect(&mut stream, b""), polls).await,
        false => give_up_after(prepared.accept(&mut stream, b""), polls).await,
    };
    // The other side may have given up.
    Some(connected?.ok()?.0)
}

#[test]
fn connecting_and_shutting_down_may_be_cancelled_at_random() {
    on_both(|[one, other]| async move {
        let unused = [one.room(), other.room()];
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut random = Random(31);
        for round in 0..20 {
            let mut attempt = 0;
            let (ours, theirs) = loop {
                let prepare = |side: &Side| {
                    let mut prepared = side.reactor.prepare(side.builder()).unwrap();
                    prepared.post_receive(side.buffer(0)).unwrap();
                    prepared
                };
                let near = TcpStream::connect(address).await.unwrap();
                let (far, _) = listener.accept().await.unwrap();
                // The first attempt is always given up, and the last one never.
                let mut polls = || match attempt {
                    0 => random.below(2),
                    5 => u64::MAX,
                    _ => 1 << random.below(10),
                };
                let connecting = try_to_connect(prepare(&one), near, true, polls());
                let accepting = try_to_connect(prepare(&other), far, false, polls());
                match tokio::join!(connecting, accepting) {
                    (Some(ours), Some(theirs)) => break (ours, theirs),
                    _ => attempt += 1,
                }
            };
            // The queue has room for all of them, so the first poll posts. The peer has a receive for one.
            let count = 2 + random.below(SENDS as u64 - 1);
            let mut sends: Vec<_> = (0..count).map(|n| ours.send(one.buffer(n))).collect();
            for send in &mut sends {
                assert!(poll_once(send).await.is_none());
            }
            // The program asks for some results, and not for the others.
            sends.truncate(random.below(count + 1) as usize);
            let over = give_up_after(ours.shutdown(), 1 + random.below(20)).await;
            assert_eq!(over, None, "there are sends in flight");
            let shut_down = async {
                let mut attempt = 0;
                loop {
                    attempt += 1;
                    let polls = if attempt < 5 { 1 + random.below(20) } else { u64::MAX };
                    if give_up_after(ours.shutdown(), polls).await.is_some() {
                        break;
                    }
                    let refused = ours.send(one.buffer(round)).await.unwrap_err();
                    assert_eq!(refused.error, TransportError::Stopped);
                    assert_eq!(number(&refused.buffer.unwrap()), round);
                }
            };
            let receive = async {
                for n in 0..count {
                    let (buffer, _) = theirs.receive(other.buffer(0)).await.unwrap();
                    assert_eq!(number(&buffer), n);
                }
            };
            tokio::join!(shut_down, receive);
            for (n, send) in sends.into_iter().enumerate() {
                assert_eq!(number(&send.await.unwrap().0), n as u64);
            }
            // Nothing else was sent.
            theirs.shutdown().await;
            let stopped = theirs.receive(other.buffer(0)).await.unwrap_err();
            assert_eq!(stopped.error, TransportError::Stopped);
        }
        // No queue pair is left.
        assert_eq!([one.room(), other.room()], unused);
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
        // The peer has no receive: eight sends are in flight, the others wait for room.
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
fn a_forgotten_future_leaves_the_channel_working_and_leaks_until_that_is_dropped() {
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
            ours.shutdown().await;
            assert_eq!(one.pool.available(), CHUNKS - 4);
        });
        // The channel had the four buffers.
        one.all_buffers_are_back();
        other.all_buffers_are_back();
    }
}
