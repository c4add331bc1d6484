//! The reactor wakes tasks without a runtime: the test calls it itself.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::task::{Wake, Waker};

use ibverbs::Reactor;

use crate::by_hand::{Count, poll_in, poll_with};
use crate::sides::{connect, number, sides};

/// Sleeps until the reactor has something, and serves it. Returns the number of channels.
fn serve(reactor: &Reactor) -> usize {
    let mut served = 0;
    loop {
        let turn = reactor.turn().unwrap();
        if turn == 0 && served > 0 {
            return served;
        }
        served += turn;
        reactor.arm().unwrap();
        let turn = reactor.turn().unwrap();
        served += turn;
        if turn == 0 && served == 0 {
            let mut file =
                libc::pollfd { fd: reactor.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: one live `pollfd`.
            assert_eq!(unsafe { libc::poll(&mut file, 1, 60_000) }, 1, "it never wakes");
        }
    }
}

#[test]
fn one_wake_up_serves_all_and_each_wakes_its_own_task_only() {
    let [one, other] = sides();
    let pairs: Vec<_> = (0..5).map(|_| connect(&one, &other)).collect();
    let counts: Vec<_> = pairs.iter().map(|_| Arc::new(Count::default())).collect();
    let mut receives: Vec<_> =
        pairs.iter().map(|[_, theirs]| theirs.receive(other.buffer(0))).collect();
    for (receive, count) in receives.iter_mut().zip(&counts) {
        assert!(poll_in(receive, count).is_none());
    }
    let nobody = Arc::new(Count::default());
    for served in [2, 4] {
        let mut send = pairs[served][0].send(one.buffer(served as u64));
        assert!(poll_in(&mut send, &nobody).is_none());
        serve(&one.reactor);
        poll_in(&mut send, &nobody).unwrap().unwrap();
    }
    // Both messages have arrived: the sends have ended.
    assert_eq!(serve(&other.reactor), 2);
    assert_eq!(counts.iter().map(|count| count.get()).collect::<Vec<_>>(), [0, 0, 1, 0, 1]);
    for (index, receive) in receives.iter_mut().enumerate() {
        match poll_in(receive, &counts[index]) {
            Some(received) => assert_eq!(number(&received.unwrap().0), index as u64),
            None => assert!(![2, 4].contains(&index)),
        }
    }
    assert_eq!(counts.iter().map(|count| count.get()).sum::<usize>(), 2);
}

#[test]
fn a_future_that_moves_to_another_task_wakes_that_one() {
    let [one, other] = sides();
    let [ours, theirs] = connect(&one, &other);
    let counts = [(); 3].map(|()| Arc::new(Count::default()));
    let mut receive = theirs.receive(other.buffer(0));
    let mut send = ours.send(one.buffer(6));
    assert!(poll_in(&mut receive, &counts[0]).is_none());
    assert!(poll_in(&mut receive, &counts[1]).is_none());
    assert!(poll_in(&mut send, &counts[2]).is_none());
    serve(&one.reactor);
    serve(&other.reactor);
    assert_eq!(counts.each_ref().map(|count| count.get()), [0, 1, 1]);
    poll_in(&mut send, &counts[0]).unwrap().unwrap();
    assert_eq!(number(&poll_in(&mut receive, &counts[0]).unwrap().unwrap().0), 6);
}

#[test]
fn two_receives_are_woken_in_their_order() {
    let [one, other] = sides();
    let [ours, theirs] = connect(&one, &other);
    let counts = [(); 3].map(|()| Arc::new(Count::default()));
    let mut first = theirs.receive(other.buffer(0));
    let mut second = theirs.receive(other.buffer(0));
    assert!(
        poll_in(&mut first, &counts[0]).is_none() && poll_in(&mut second, &counts[1]).is_none()
    );
    let mut send = ours.send(one.buffer(1));
    assert!(poll_in(&mut send, &counts[2]).is_none());
    serve(&one.reactor);
    serve(&other.reactor);
    assert_eq!((counts[0].get(), counts[1].get()), (1, 0));
    // The first is woken, and dropped instead of being polled: the message is the second's.
    drop(first);
    assert_eq!((counts[0].get(), counts[1].get()), (1, 1));
    assert_eq!(number(&poll_in(&mut second, &counts[1]).unwrap().unwrap().0), 1);
}

/// A waker that panics, as no executor should have. It counts, too.
#[derive(Default)]
struct Panics(Arc<Count>);

impl Wake for Panics {
    fn wake(self: Arc<Self>) {
        self.0.wake_by_ref();
        panic!("a waker");
    }
}

#[test]
fn a_waker_that_panics_takes_no_wake_up_from_other_tasks() {
    let [one, other] = sides();
    let pairs: Vec<_> = (0..3).map(|_| connect(&one, &other)).collect();
    let thrower = Arc::new(Panics::default());
    let waker = Waker::from(thrower.clone());
    let counts = [(); 12].map(|()| Arc::new(Count::default()));
    // Each of three channels has four sends in flight. One of them has the waker, another one on each channel.
    let mut sends: Vec<_> = (0..12).map(|n| pairs[n / 4][0].send(one.buffer(n as u64))).collect();
    for (number, (send, count)) in sends.iter_mut().zip(&counts).enumerate() {
        if number % 5 == 0 {
            assert!(poll_with(send, &waker).is_none());
        } else {
            assert!(poll_in(send, count).is_none());
        }
    }
    for [_, theirs] in &pairs {
        (0..4).for_each(|_| theirs.post_receive(other.buffer(0)).unwrap());
    }
    let mut panics = 0;
    let woken = || counts.iter().map(|count| count.get()).sum::<usize>();
    while woken() < 9 || thrower.0.get() < 3 {
        let turn = std::panic::AssertUnwindSafe(|| serve(&one.reactor));
        panics += usize::from(std::panic::catch_unwind(turn).is_err());
    }
    // Several panics of one turn become one.
    assert!((1..=3).contains(&panics) && thrower.0.get() == 3, "each wakes once");
    for (number, (send, count)) in sends.iter_mut().zip(&counts).enumerate() {
        assert_eq!(count.get(), usize::from(number % 5 != 0));
        poll_in(send, count).expect("it has ended").unwrap();
    }
}

/// A waker that drops a future of the same channel when it is woken, as an executor may do.
struct DropsAFuture<F>(std::sync::Mutex<Option<F>>);

impl<F: Send + 'static> Wake for DropsAFuture<F> {
    fn wake(self: Arc<Self>) {
        drop(self.0.lock().unwrap().take());
    }
}

#[test]
fn a_waker_may_drop_another_future_of_the_channel() {
    let [one, other] = sides();
    let [ours, theirs] = connect(&one, &other).map(Arc::new);
    let nobody = Arc::new(Count::default());
    let mut victim = Box::pin({
        let (theirs, buffer) = (theirs.clone(), other.buffer(0));
        async move { theirs.receive(buffer).await }
    });
    let mut receive = theirs.receive(other.buffer(0));
    let mut send = ours.send(one.buffer(1));
    assert!(poll_in(&mut receive, &nobody).is_none() && poll_in(&mut victim, &nobody).is_none());
    let waker = Waker::from(Arc::new(DropsAFuture(std::sync::Mutex::new(Some(victim)))));
    assert!(poll_with(&mut receive, &waker).is_none());
    assert!(poll_in(&mut send, &nobody).is_none());
    serve(&one.reactor);
    serve(&other.reactor);
    assert_eq!(number(&poll_in(&mut receive, &nobody).unwrap().unwrap().0), 1);
    drop((receive, send));
}
