//! Futures of channels that a shared receive queue feeds.

use std::sync::Arc;
use std::time::Duration;

use ibverbs::future::SharedReceives;
use ibverbs::{AsyncChannel, Reactor, TransportError};
use tokio::runtime::{Builder, Runtime};

use super::sides::{CHUNKS, Side, number};

struct Sides {
    ours: Side,
    theirs: Side,
    reactors: [Arc<Reactor>; 2],
    receives: SharedReceives,
}

impl Sides {
    fn new(runtime: &Runtime, posted: usize) -> Arc<Self> {
        let (ours, theirs) = (Side::new(), Side::new());
        let reactors =
            [&ours, &theirs].map(|side| Arc::new(Reactor::new(&side.context, 1024).unwrap()));
        for reactor in &reactors {
            let reactor = reactor.clone();
            runtime.spawn(async move { reactor.run_on_tokio().await.unwrap() });
        }
        let receives = reactors[0].add_shared_receives(&ours.domain, 32).unwrap();
        for _ in 0..posted {
            receives.post(ours.buffer(0)).unwrap();
        }
        Arc::new(Self { ours, theirs, reactors, receives })
    }

    fn connect(&self) -> (AsyncChannel, AsyncChannel) {
        let builder = self.ours.builder();
        let one = self.reactors[0].prepare_sharing(builder, &self.receives).unwrap();
        let other = self.reactors[1].prepare(self.theirs.builder()).unwrap();
        let endpoints = (one.endpoint(), other.endpoint());
        (one.handshake(endpoints.1).unwrap(), other.handshake(endpoints.0).unwrap())
    }
}

fn on_both<F: Future<Output = ()>>(posted: usize, test: impl Fn(Arc<Sides>) -> F) {
    let current = Builder::new_current_thread().enable_all().build().unwrap();
    let multi = Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap();
    for runtime in [current, multi] {
        let sides = Sides::new(&runtime, posted);
        runtime.block_on(async {
            tokio::time::timeout(Duration::from_secs(120), test(sides.clone())).await.unwrap();
        });
    }
}

#[test]
fn tasks_of_many_peers_get_their_own_messages_in_order() {
    on_both(8, |sides| async move {
        let mut tasks = Vec::new();
        for peer in 0..20_u64 {
            let (ours, theirs) = sides.connect();
            let (server, client) = (sides.clone(), sides.clone());
            tasks.push(tokio::spawn(async move {
                for n in 0..30 {
                    let (buffer, _) = ours.next_message().await.unwrap();
                    assert_eq!(number(&buffer), peer * 100 + n);
                    server.receives.post(buffer).unwrap();
                    ours.send(server.ours.buffer(n)).await.unwrap();
                }
            }));
            tasks.push(tokio::spawn(async move {
                for n in 0..30 {
                    theirs.send(client.theirs.buffer(peer * 100 + n)).await.unwrap();
                    let (buffer, _) = theirs.receive(client.theirs.buffer(0)).await.unwrap();
                    assert_eq!(number(&buffer), n);
                }
            }));
        }
        for task in tasks {
            task.await.unwrap();
        }
        assert_eq!(sides.receives.posted(), 8);
    });
}

#[test]
fn a_cancelled_receive_loses_no_message() {
    on_both(8, |sides| async move {
        let (ours, theirs) = sides.connect();
        for n in 0..50 {
            let soon = Duration::from_micros(n * 7 % 50);
            let early = tokio::time::timeout(soon, ours.next_message());
            let send = theirs.send(sides.theirs.buffer(n));
            let (early, sent) = tokio::join!(early, send);
            sent.unwrap();
            let (buffer, _) = match early {
                Ok(received) => received.unwrap(),
                Err(_) => ours.next_message().await.unwrap(),
            };
            assert_eq!(number(&buffer), n);
            sides.receives.post(buffer).unwrap();
        }
    });
}

#[test]
fn a_channel_that_ends_tells_its_receives_and_keeps_what_has_arrived() {
    on_both(8, |sides| async move {
        let (ours, theirs) = sides.connect();
        theirs.send(sides.theirs.buffer(1)).await.unwrap();
        ours.shutdown().await;
        let (buffer, _) = ours.next_message().await.unwrap();
        assert_eq!(number(&buffer), 1);
        let error = ours.next_message().await.unwrap_err();
        assert_eq!(error.error, TransportError::Stopped);
        drop(buffer);

        let (ours, _theirs) = sides.connect();
        let ours = Arc::new(ours);
        let waits = ours.clone();
        let waiting = tokio::spawn(async move { waits.next_message().await.map(drop) });
        tokio::task::yield_now().await;
        ours.shutdown().await;
        assert_eq!(waiting.await.unwrap().unwrap_err().error, TransportError::Stopped);
        assert_eq!(sides.receives.posted(), 7);
        assert_eq!(sides.ours.pool.available(), CHUNKS - 7);
    });
}
