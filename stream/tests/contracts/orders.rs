//! Two runtimes and a thread use one hub, in every order of what can happen to them: tasks begin, peers answer, a runtime is polled,
//! a runtime ends, or is not polled any more. Buffers run out meanwhile. Whoever is left has what its peer has said.
//!
//! Runtimes are polled by hand, so each order is the order in which things happen.

use std::io::{ErrorKind, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

use ibverbs_stream::{Listener, Stream, tokio as tasks};
use tokio::runtime::{Builder, Runtime};

use super::{Host, data, soon};

/// More than all buffers of the hub hold.
const QUESTION: usize = 3000;

#[derive(Clone, Copy, PartialEq, Debug)]
enum Event {
    /// A task of this runtime asks, and waits for the answer.
    Asks(usize),
    /// The peer reads the question when it comes, and answers.
    Answers(usize),
    Polled(usize),
    /// Or it stands still from now on.
    Ends(usize),
}

use Event::{Answers, Asks, Ends, Polled};

const EVENTS: [Event; 6] = [Asks(0), Asks(1), Answers(0), Answers(1), Polled(0), Ends(0)];

fn orders(left: &[Event]) -> Vec<Vec<Event>> {
    if left.is_empty() {
        return vec![Vec::new()];
    }
    let mut all = Vec::new();
    for at in 0..left.len() {
        let mut rest = left.to_vec();
        let first = rest.remove(at);
        all.extend(orders(&rest).into_iter().map(|rest| [vec![first], rest].concat()));
    }
    all
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

/// Runs what is ready in the runtime, and looks at its files.
fn poll(runtime: &Runtime) {
    runtime.block_on(async {
        for _ in 0..3 {
            tokio::task::yield_now().await;
        }
    });
}

/// What tasks have done with a stream. Another task goes on where one has ended with its runtime.
#[derive(Default)]
struct Talk {
    asked: std::sync::atomic::AtomicUsize,
    is_answered: AtomicBool,
}

async fn talk(stream: &tasks::Stream, talk: &Talk) {
    let question = data(QUESTION);
    loop {
        let asked = talk.asked.load(Ordering::SeqCst);
        if asked == QUESTION {
            break;
        }
        stream.writable().await.unwrap();
        match stream.try_write(&question[asked..]) {
            Ok(count) => talk.asked.store(asked + count, Ordering::SeqCst),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
    }
    while !talk.is_answered.load(Ordering::SeqCst) {
        stream.readable().await.unwrap();
        match stream.try_read(&mut [0; 8]) {
            Ok(count) => {
                assert_eq!(count, 1);
                talk.is_answered.store(true, Ordering::SeqCst);
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
    }
}

fn answer(peer: &mut Stream) {
    let mut question = vec![0; QUESTION];
    peer.read_exact(&mut question).unwrap();
    assert!(question == data(QUESTION));
    peer.write_all(b"!").unwrap();
}

#[test]
fn in_any_order_nobody_waits_for_ever() {
    let small = || {
        Host::with(|hub| hub.chunk(256).receives(2).sends(2).shared_receives(4).max_connections(4))
    };
    let hosts = [small(), Host::new()];
    let listener = Listener::bind(&hosts[1].hub, "127.0.0.1:0").unwrap();
    let to = listener.local_addr().unwrap();
    let connecting = runtime();
    let pair = |_| {
        thread::scope(|threads| {
            let accepts = threads.spawn(|| listener.accept().unwrap().0);
            let ours = connecting.block_on(tasks::Stream::connect(&hosts[0].hub, to)).unwrap();
            (Arc::new(ours), accepts.join().unwrap())
        })
    };
    let (ours, mut peers): (Vec<_>, Vec<_>) = (0..2).map(pair).unzip();
    let (mut waits, mut wakes) = thread::scope(|threads| {
        let accepts = threads.spawn(|| listener.accept().unwrap().0);
        (Stream::connect(&hosts[0].hub, to, soon()).unwrap(), accepts.join().unwrap())
    });
    drop(connecting);
    let mut stands_still = false;
    for order in orders(&EVENTS).into_iter().flat_map(|order| [order.clone(), order]) {
        stands_still = !stands_still;
        // In every other order, a thread sleeps for the same hub.
        let has_thread = order[0] == Asks(0) || order[5] == Polled(0);
        let (mut runtimes, mut still) = ([Some(runtime()), Some(runtime())], None);
        let talks = [(); 2].map(|()| Arc::<Talk>::default());
        thread::scope(|threads| {
            let sleeper = has_thread.then(|| threads.spawn(|| waits.read_exact(&mut [0]).unwrap()));
            let mut quiet: Vec<_> = peers.iter_mut().map(Some).collect();
            let asks = |runtime: &Runtime, of: usize| {
                let (stream, with) = (ours[of].clone(), talks[of].clone());
                runtime.spawn(async move { talk(&stream, &with).await });
            };
            for &event in &order {
                match event {
                    Asks(of) => {
                        if let Some(runtime) = &runtimes[of] {
                            asks(runtime, of);
                            poll(runtime);
                        }
                    }
                    Answers(of) => {
                        let peer = quiet[of].take().unwrap();
                        threads.spawn(|| answer(peer));
                    }
                    Polled(of) => runtimes[of].iter().for_each(poll),
                    Ends(of) if stands_still => still = runtimes[of].take(),
                    Ends(of) => drop(runtimes[of].take()),
                }
            }
            // The talk of that runtime goes on in the other one, which is the only one left.
            let left = runtimes[1].as_ref().unwrap();
            asks(left, 0);
            let end = soon();
            while !talks.iter().all(|talk| talk.is_answered.load(Ordering::SeqCst)) {
                assert!(Instant::now() < end, "{order:?} {stands_still} {has_thread}");
                poll(left);
                thread::yield_now();
            }
            if let Some(sleeper) = sleeper {
                wakes.write_all(b"!").unwrap();
                sleeper.join().unwrap();
            }
        });
        drop(still);
    }
}
