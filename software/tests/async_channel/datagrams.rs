//! Datagram ends as futures: messages to any peer and to groups, futures that are dropped, and a reactor that is.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use ibverbs::channel::DatagramsBuilder;
use ibverbs::pool::DatagramBuffer;
use ibverbs::{
    AccessFlags, AsyncDatagrams, BufferPool, Context as Device, PooledBuffer, ProtectionDomain,
    Reactor, TransportError, operation::DatagramDestination,
};
use ibverbs_software::{LiveObjects, Network, Verb};

use crate::by_hand::poll_with;
use crate::sides::{Side, on_both};
use crate::wakers::{on_wake, panics};

const LEN: usize = 64;

fn pool(domain: &Arc<ProtectionDomain<'static>>) -> BufferPool {
    BufferPool::new(domain, 40 + LEN, 32, AccessFlags::empty()).unwrap()
}

fn message(pool: &BufferPool, text: &[u8]) -> DatagramBuffer {
    let mut message = DatagramBuffer::new(pool.take().unwrap()).unwrap();
    message.extend_from_slice(text).unwrap();
    message
}

fn end(side: &Side) -> AsyncDatagrams {
    side.reactor.datagrams(DatagramsBuilder::new(&side.domain)).unwrap()
}

#[test]
fn an_answer_goes_to_who_has_asked() {
    on_both(|[one, other]| async move {
        let server = end(&other);
        let address = server.endpoint();
        let theirs = pool(&other.domain);
        // A datagram that finds no receive is lost.
        (0..8).for_each(|_| server.post_receive(theirs.take().unwrap()).unwrap());
        let echo = tokio::spawn({
            let pool = theirs;
            async move {
                loop {
                    let (message, from) = server.recv_from(pool.take().unwrap()).await.unwrap();
                    server.send_to(message, &from).await.unwrap();
                }
            }
        });
        let pool = pool(&one.domain);
        let clients = [(); 3].map(|()| end(&one));
        clients.iter().for_each(|client| client.post_receive(pool.take().unwrap()).unwrap());
        let to = clients[0].destination(&address).unwrap();
        for round in 0..30_u8 {
            for (client, number) in clients.iter().zip(0_u8..) {
                client.send_to(message(&pool, &[round, number]), &to).await.unwrap();
                let (answer, from) = client.recv_from(pool.take().unwrap()).await.unwrap();
                assert_eq!(answer[..], [round, number]);
                assert_eq!((from.number, from.path.gid()), (to.number, to.path.gid()));
            }
        }
        echo.abort();
        let _ = echo.await;
    });
}

#[test]
fn a_group_hears_and_who_has_left_does_not() {
    on_both(|[one, other]| async move {
        let (sender, near, far) = (end(&one), end(&one), end(&other));
        let (here, there) = (pool(&one.domain), pool(&other.domain));
        let group = sender.group("239.7.7.7".parse().unwrap()).unwrap();
        near.join(&group).unwrap();
        far.join(&far.group("239.7.7.7".parse().unwrap()).unwrap()).unwrap();
        near.post_receive(here.take().unwrap()).unwrap();
        far.post_receive(there.take().unwrap()).unwrap();
        sender.send_to(message(&here, b"all"), &group).await.unwrap();
        let (heard, from) = near.recv_from(here.take().unwrap()).await.unwrap();
        assert_eq!((&heard[..], from.number), (&b"all"[..], sender.endpoint().num()));
        let (heard, from) = far.recv_from(there.take().unwrap()).await.unwrap();
        assert_eq!((&heard[..], from.number), (&b"all"[..], sender.endpoint().num()));
        near.leave(&group).unwrap();
        let error = near.leave(&group).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    });
}

/// Ends on a device that does what is posted when the test says so.
struct Slow {
    ends: [AsyncDatagrams; 2],
    reactor: Reactor,
    pool: BufferPool,
    domain: Arc<ProtectionDomain<'static>>,
    device: ibverbs_software::Device,
    network: Network,
}

impl Slow {
    fn new() -> Self {
        let network = Network::builder().manual().build();
        let device = ibverbs_software::Device::builder().network(&network).build().unwrap();
        device.observe();
        let context: Device<'static> = device.open().unwrap();
        let domain = Arc::new(ProtectionDomain::new(context).unwrap());
        let reactor = Reactor::new(domain.context_parent(), 64).unwrap();
        let ends = [(); 2].map(|()| {
            let builder = DatagramsBuilder::new(&domain).max_send_wr(2).max_recv_wr(2);
            reactor.datagrams(builder.address_handles(1)).unwrap()
        });
        Self { ends, reactor, pool: pool(&domain), domain, device, network }
    }

    fn to(&self, class: u8) -> DatagramDestination {
        let [one, two] = &self.ends;
        let to = one.destination(&two.endpoint()).unwrap();
        DatagramDestination { path: to.path.traffic_class(class), ..to }
    }

    fn serve(&self) {
        assert!(self.network.run_until_idle(std::time::Duration::from_secs(9)));
        while self.reactor.turn().unwrap() > 0 {}
    }

    fn finish(self) {
        let Self { ends, reactor, pool, domain, device, .. } = self;
        drop((ends, reactor));
        assert_eq!(pool.available(), pool.chunks());
        drop((pool, domain));
        assert_eq!(device.live_objects(), LiveObjects::default());
        assert_eq!(device.early_deregistrations(), 0);
    }
}

fn poll<F: Future>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// Futures are dropped at each point of a send and a receive, with more paths than handles are kept.
#[test]
fn futures_are_dropped_at_any_point() {
    let slow = Slow::new();
    let [one, two] = &slow.ends;
    let to = [0, 1, 2, 3].map(|class| slow.to(class));
    {
        let mut sends: Vec<_> =
            to.iter().map(|to| Box::pin(one.send_to(message(&slow.pool, b"sent"), to))).collect();
        // Two are posted, and two wait for room.
        for send in &mut sends {
            assert!(poll(send.as_mut()).is_pending());
        }
        assert_eq!(one.in_flight(), 2);
        let mut receive = pin!(two.recv_from(slow.pool.take().unwrap()));
        assert!(poll(receive.as_mut()).is_pending());
        // Three sends are dropped: one not polled, one waiting, and one in flight.
        drop(one.send_to(message(&slow.pool, b"never"), &to[0]));
        drop(sends.pop());
        drop(sends.remove(0));
        slow.serve();
        assert!(poll(sends[0].as_mut()).is_ready());
        assert!(poll(sends[1].as_mut()).is_pending(), "it is posted now");
        slow.serve();
        assert!(poll(sends[1].as_mut()).is_ready());
        let Poll::Ready(Ok((heard, _))) = poll(receive) else { panic!("it was sent") };
        assert_eq!(heard[..], *b"sent");
    }
    // The message for a receive that was dropped is for the next one.
    {
        let mut dropped = Box::pin(two.recv_from(slow.pool.take().unwrap()));
        assert!(poll(dropped.as_mut()).is_pending());
        drop(dropped);
        let mut send = pin!(one.send_to(message(&slow.pool, b"later"), &to[0]));
        assert!(poll(send.as_mut()).is_pending());
        let handles = slow.device.live_objects().address_handles;
        assert!(handles <= 1 + 2, "{handles}: one that is kept, one for each place of the queue");
        slow.serve();
        assert!(poll(send).is_ready());
        let mut receive = pin!(two.recv_from(slow.pool.take().unwrap()));
        let Poll::Ready(Ok((heard, _))) = poll(receive.as_mut()) else { panic!("it is there") };
        assert_eq!(heard[..], *b"later");
    }
    slow.finish();
}

#[test]
fn what_cannot_be_sent_comes_back() {
    let slow = Slow::new();
    let one = &slow.ends[0];
    let refused = |text: &[u8], to: DatagramDestination| {
        let mut send = pin!(one.send_to(message(&slow.pool, text), &to));
        let Poll::Ready(Err(refused)) = poll(send.as_mut()) else { panic!("it waits") };
        assert_eq!(DatagramBuffer::from(refused.buffer.unwrap())[..], *text);
        refused.error
    };
    slow.device.fail(Verb::CreateAh, libc::EHOSTUNREACH, ibverbs_software::When::Before, 1);
    assert_eq!(refused(b"kept", slow.to(5)).raw_os_error(), Some(libc::EHOSTUNREACH));
    let number = DatagramDestination { number: u32::MAX, ..slow.to(0) };
    assert!(refused(b"kept", number).to_string().contains("remote queue pair"));
    let short = BufferPool::new(&slow.domain, 39, 1, AccessFlags::empty()).unwrap();
    let refused = one.post_receive(short.take().unwrap()).unwrap_err();
    assert!(refused.error.to_string().contains("40 bytes precede"), "{refused}");
    drop((refused, short));
    slow.finish();
}

#[test]
fn an_end_outlives_its_reactor() {
    let slow = Slow::new();
    let to = slow.to(0);
    let Slow { ends: [one, two], reactor, pool, domain, device, network } = slow;
    {
        let mut send = pin!(one.send_to(message(&pool, b"late"), &to));
        assert!(poll(send.as_mut()).is_pending());
        drop(reactor);
        let Poll::Ready(Err(failed)) = poll(send) else { panic!("nothing serves it") };
        assert_eq!(failed.error, TransportError::ReactorGone);
        let buffer: PooledBuffer = pool.take().unwrap();
        let mut receive = pin!(two.recv_from(buffer));
        let Poll::Ready(Err(failed)) = poll(receive.as_mut()) else { panic!("it waits") };
        assert_eq!(failed.error, TransportError::ReactorGone);
    }
    drop((one, two));
    assert_eq!(pool.available(), pool.chunks());
    drop((pool, domain, network));
    assert_eq!(device.live_objects(), LiveObjects::default());
}

/// Another task's waker panics while a task joins a group, which it does when it is woken.
#[test]
fn a_waker_that_panics_destroys_no_end_that_joins() {
    let slow = Slow::new();
    let to = slow.to(0);
    let Slow { ends, reactor, pool, domain, device, network } = slow;
    let builder = DatagramsBuilder::new(&domain).max_send_wr(4).address_handles(1);
    let (one, reactor) = (Arc::new(reactor.datagrams(builder).unwrap()), Arc::new(reactor));
    let group = one.group("239.7.7.7".parse().unwrap()).unwrap();
    let idle =
        |network: &Network| assert!(network.run_until_idle(std::time::Duration::from_secs(9)));
    {
        let join = {
            let one = one.clone();
            move || one.join(&group).unwrap()
        };
        let late = [message(&pool, b"late"), message(&pool, b"late")];
        let serve = {
            let (one, reactor, network) = (one.clone(), reactor.clone(), network.clone());
            move || {
                let mut sends = late.map(|late| {
                    let (one, to) = (one.clone(), to);
                    Box::pin(async move { one.send_to(late, &to).await })
                });
                // Both are woken by one turn within the other: first the last, which joins while the other is still due.
                for (send, waker) in sends.iter_mut().zip([panics(), on_wake(join)]) {
                    assert!(poll_with(send, &waker).is_none());
                }
                idle(&network);
                let _ = reactor.turn();
            }
        };
        let mut sends = [(); 2].map(|()| Box::pin(one.send_to(message(&pool, b"sent"), &to)));
        for (send, waker) in sends.iter_mut().zip([on_wake(serve), Waker::noop().clone()]) {
            assert!(poll_with(send, &waker).is_none());
        }
        idle(&network);
        assert!(catch_unwind(AssertUnwindSafe(|| reactor.turn())).is_err());
        assert_eq!(device.live_objects().queue_pairs, 3);
        assert!(sends.iter_mut().all(|send| poll(send.as_mut()).is_ready()));
        one.leave(&group).unwrap();
        let mut send = pin!(one.send_to(message(&pool, b"more"), &to));
        assert!(poll(send.as_mut()).is_pending());
        idle(&network);
        reactor.turn().unwrap();
        assert!(matches!(poll(send), Poll::Ready(Ok(_))));
    }
    drop((one, ends, reactor));
    assert_eq!(pool.available(), pool.chunks());
    drop((pool, domain, network));
    assert_eq!(device.live_objects(), LiveObjects::default());
}
