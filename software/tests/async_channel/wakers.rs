//! Wakers are code of the program: they panic, they use the channel when they are woken or dropped.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Wake, Waker};
use std::thread;
use std::time::Duration;

use ibverbs::future::{AsyncOperation, AsyncReceive, Locked};
use ibverbs::{AsyncChannel, PooledBuffer, Reactor, SendWorkRequest, TransportError};

use crate::by_hand::{Count, poll, poll_with};
use crate::sides::{Side, connect, number, sides};

/// Panics when it is woken.
struct Panics;

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        panic!("the waker");
    }
}

type Call = Mutex<Option<Box<dyn FnOnce() + Send>>>;

/// Calls a function when it is woken for the first time.
struct OnWake(Call);

pub(crate) fn on_wake(call: impl FnOnce() + Send + 'static) -> Waker {
    Waker::from(Arc::new(OnWake(Mutex::new(Some(Box::new(call))))))
}

impl Wake for OnWake {
    fn wake(self: Arc<Self>) {
        let call = self.0.lock().unwrap().take();
        if let Some(call) = call {
            call();
        }
    }
}

/// Calls a function when it is dropped.
struct OnDrop(Call);

impl Wake for OnDrop {
    fn wake(self: Arc<Self>) {}
}

impl Drop for OnDrop {
    fn drop(&mut self) {
        if let Some(call) = self.0.get_mut().unwrap().take() {
            call();
        }
    }
}

pub(crate) fn panics() -> Waker {
    Waker::from(Arc::new(Panics))
}

type Sending<'a> = AsyncOperation<'a, SendWorkRequest<PooledBuffer>, Locked<PooledBuffer>>;
type Receiving<'a> = AsyncReceive<'a, PooledBuffer, Locked<PooledBuffer>>;

/// Eight sends fill the queue; two more are in line, the second with a waker that panics.
fn line<'a>(ours: &'a AsyncChannel, one: &Side) -> [Vec<Sending<'a>>; 2] {
    let mut sends: Vec<_> = (0..10).map(|n| ours.send(one.buffer(n))).collect();
    for send in &mut sends[..9] {
        assert!(poll(send).is_none());
    }
    assert!(poll_with(&mut sends[9], &panics()).is_none());
    let waiting = sends.split_off(8);
    [sends, waiting]
}

#[test]
fn dropping_a_future_does_not_panic() {
    let [one, other] = sides();
    let [ours, _theirs] = connect(&one, &other);
    let [_posted, mut waiting] = line(&ours, &one);
    let first = waiting.remove(0);
    // Dropping the first future wakes the next one in line.
    assert!(catch_unwind(AssertUnwindSafe(|| drop(first))).is_ok());
}

#[test]
fn dropping_a_future_during_a_panic_does_not_abort() {
    let [one, other] = sides();
    let [ours, _theirs] = connect(&one, &other);
    let [_posted, mut waiting] = line(&ours, &one);
    let first = waiting.remove(0);
    let thrown = catch_unwind(AssertUnwindSafe(move || {
        let _first = first;
        panic!("the task");
    }));
    assert_eq!(thrown.unwrap_err().downcast_ref(), Some(&"the task"));
}

/// Two channels have a receive each. The waker of the first panics, that of the second counts. Returns what `end` has
/// thrown.
#[track_caller]
fn both_end(error: TransportError, end: impl FnOnce(&mut Option<Arc<Reactor>>)) -> Result<(), ()> {
    let [one, other] = sides();
    let [first, _first_peer] = connect(&one, &other);
    let [second, _second_peer] = connect(&one, &other);
    let count = Arc::new(Count::default());
    let mut receives = [first.receive(one.buffer(0)), second.receive(one.buffer(1))];
    assert!(poll_with(&mut receives[0], &panics()).is_none());
    assert!(poll_with(&mut receives[1], &Waker::from(count.clone())).is_none());
    let mut reactor = Some(one.reactor);
    let ended = catch_unwind(AssertUnwindSafe(|| end(&mut reactor)));
    assert_eq!(count.get(), 1);
    for mut receive in receives {
        let ended = poll(&mut receive).expect("it has ended").unwrap_err();
        assert_eq!((ended.error, ended.buffer.is_some()), (error, true));
    }
    ended.map_err(drop)
}

#[test]
fn a_waker_that_panics_keeps_no_other_channel_from_its_end() {
    both_end(TransportError::ReactorGone, |reactor| drop(reactor.take())).unwrap();
    let stop = |reactor: &mut Option<Arc<Reactor>>| {
        reactor.as_ref().unwrap().stop(TransportError::Stopped);
    };
    both_end(TransportError::Stopped, stop).unwrap_err();
}

#[test]
fn dropping_a_channel_does_not_panic() {
    let [one, other] = sides();
    let [ours, _theirs] = connect(&one, &other);
    let mut receive = ours.receive(one.buffer(0));
    let mut send = ours.send(one.buffer(1));
    assert!(
        poll_with(&mut receive, &panics()).is_none() && poll_with(&mut send, &panics()).is_none()
    );
    std::mem::forget((receive, send));
    assert!(catch_unwind(AssertUnwindSafe(|| drop(ours))).is_ok());
    one.all_buffers_are_back();
}

/// Polls a receive with a waker that uses the channel when it is dropped, and then calls `f`. Fails if that hangs.
fn drop_a_waker(f: impl FnOnce(Receiving<'_>) + Send + 'static) {
    let (done, is_done) = mpsc::channel();
    thread::spawn(move || {
        let [one, other] = sides();
        let [ours, _theirs] = connect(&one, &other);
        let ours = Arc::new(ours);
        let (again, dropped) = (ours.clone(), done.clone());
        let mut receive = ours.receive(one.buffer(0));
        let call = Box::new(move || {
            assert_eq!(again.credits(), None);
            dropped.send(()).unwrap();
        });
        let waker = Waker::from(Arc::new(OnDrop(Mutex::new(Some(call)))));
        assert!(poll_with(&mut receive, &waker).is_none());
        drop(waker);
        f(receive);
        done.send(()).unwrap();
    });
    for _ in 0..2 {
        is_done.recv_timeout(Duration::from_secs(60)).expect("no deadlock");
    }
}

#[test]
fn a_waker_may_use_the_channel_when_it_is_dropped() {
    // Another task polls it.
    drop_a_waker(|mut receive| assert!(poll(&mut receive).is_none()));
    // The future is dropped.
    drop_a_waker(|receive| drop(receive));
}

#[test]
fn a_waker_of_a_send_may_use_the_channel_when_it_is_dropped() {
    let (done, is_done) = mpsc::channel();
    thread::spawn(move || {
        let [one, other] = sides();
        let [ours, _theirs] = connect(&one, &other);
        let ours = Arc::new(ours);
        // One is polled by another task, one is dropped; nobody receives them.
        let mut sends = [0, 1].map(|n| ours.send(one.buffer(n)));
        for send in &mut sends {
            let (again, done) = (ours.clone(), done.clone());
            let call = Box::new(move || {
                assert_eq!(again.credits(), None);
                done.send(()).unwrap();
            });
            let waker = Waker::from(Arc::new(OnDrop(Mutex::new(Some(call)))));
            assert!(poll_with(send, &waker).is_none());
        }
        let [mut polled, dropped] = sends;
        assert!(poll(&mut polled).is_none());
        drop(dropped);
    });
    for _ in 0..2 {
        is_done.recv_timeout(Duration::from_secs(60)).expect("no deadlock");
    }
}

/// A waker that runs its task at once shuts another channel down, at the end of a turn that has polled a message for that
/// channel.
#[test]
fn shutting_down_at_the_end_of_a_turn_loses_no_message() {
    let [one, other] = sides();
    let [first, first_peer] = connect(&one, &other);
    let [second, second_peer] = connect(&one, &other);
    let second = Arc::new(second);
    second.post_receive(one.buffer(0)).unwrap();
    let mut shutdown = Box::pin({
        let second = second.clone();
        async move { second.shutdown().await }
    });
    let begun = Arc::new(AtomicBool::new(false));
    let begin = {
        let begun = begun.clone();
        Box::new(move || {
            assert!(poll(&mut shutdown).is_some(), "nothing is sent");
            begun.store(true, Ordering::SeqCst);
        })
    };
    let mut receive = first.receive(one.buffer(0));
    let begin = Waker::from(Arc::new(OnWake(Mutex::new(Some(begin)))));
    assert!(poll_with(&mut receive, &begin).is_none());
    // Both messages have arrived when their sends have ended. Only then their reactor polls.
    for (peer, n) in [(&first_peer, 1), (&second_peer, 2)] {
        let mut send = peer.send(other.buffer(n));
        while poll(&mut send).is_none() {
            other.reactor.turn().unwrap();
        }
    }
    while !begun.load(Ordering::SeqCst) {
        one.reactor.turn().unwrap();
    }
    let received = poll(&mut second.receive(one.buffer(4))).expect("it has arrived");
    assert_eq!(number(&received.unwrap().0), 2);
}
