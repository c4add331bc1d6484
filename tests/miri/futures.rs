//! Futures: the table has the buffer until the device is done with it, whatever becomes of the future, and on
//! whatever threads they are.

use std::future::Future;
use std::mem::forget;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread;

use ibverbs::channel::AnyBuffer;
use ibverbs::future::{Local, Locked, Share};
use ibverbs::pool::SharedMemoryRange;
use ibverbs::{
    AccessFlags, AsyncChannel, BufferPool, Channel, CompareSwapWorkRequest, FetchAddWorkRequest,
    PooledBuffer, ProtectionDomain, Reactor, SendWorkRequest, SharedMemoryRegion, TransportError,
};

use crate::device;
use crate::rig::{ALL, both, domain};

/// Two connected channels of one reactor.
struct Rig<S: Share> {
    one: AsyncChannel<S>,
    two: AsyncChannel<S>,
    reactor: Reactor<S>,
    pool: BufferPool,
    domain: Arc<ProtectionDomain<'static>>,
}

impl<S: Share> Rig<S> {
    fn new() -> Self {
        let domain = domain();
        let pool = BufferPool::new(&domain, 8, 8, AccessFlags::empty()).unwrap();
        let reactor = Reactor::with_share(domain.context_parent(), 64).unwrap();
        let prepare = || {
            let builder = Channel::builder(&domain).max_send_wr(4).max_recv_wr(4);
            reactor.prepare(builder.access(ALL)).unwrap()
        };
        let (one, two) = (prepare(), prepare());
        let (to_one, to_two) = (one.endpoint(), two.endpoint());
        let (one, two) = (one.handshake(to_two).unwrap(), two.handshake(to_one).unwrap());
        Self { one, two, reactor, pool, domain }
    }

    fn filled(&self, byte: u8) -> PooledBuffer {
        self.pool.take_from(&[byte; 8]).unwrap().unwrap()
    }

    fn serve(&self) {
        while self.reactor.turn().unwrap() > 0 {}
    }

    /// Polls a future until it has ended, and lets the reactor work meanwhile.
    fn run<F: Future>(&self, future: F) -> F::Output {
        let mut future = pin!(future);
        loop {
            if let Poll::Ready(output) =
                future.as_mut().poll(&mut Context::from_waker(Waker::noop()))
            {
                return output;
            }
            self.serve();
        }
    }
}

/// The first poll of a future posts its operation.
fn posted<F: Future + Unpin>(mut future: F) -> F {
    assert!(pin!(&mut future).poll(&mut Context::from_waker(Waker::noop())).is_pending());
    future
}

fn messages<S: Share<Buffer = PooledBuffer>>() {
    let rig = Rig::<S>::new();
    let mut mine = rig.filled(1);
    for byte in 3..6 {
        let receive = posted(rig.two.receive(rig.filled(0)));
        mine[0] = byte;
        let sent = rig.one.submit(SendWorkRequest::new(rig.filled(byte))).unwrap();
        // Neighbours, while the device reads and writes.
        mine.fill(byte);
        let (mut sent, _) = rig.run(sent).unwrap();
        sent[0] = 9;
        assert_eq!(rig.run(receive).unwrap().0[..], [byte; 8]);
    }
    drop(mine);
    // Dropped, before and after their operations have ended; the slots move when another channel comes.
    for ended in [true, false] {
        let (receive, send) =
            (posted(rig.two.receive(rig.filled(0))), posted(rig.one.send(rig.filled(7))));
        if ended {
            rig.serve();
        }
        drop((receive, send));
        let more = Channel::builder(&rig.domain).max_send_wr(30).max_recv_wr(1);
        let more = rig.reactor.prepare(more).unwrap();
        let itself = more.endpoint();
        drop(more.handshake(itself).unwrap());
        rig.serve();
        assert_eq!(rig.run(rig.two.receive(rig.filled(0))).unwrap().0[..], [7; 8]);
    }
    // The channels end with all that is in flight, and after the reactor.
    let receive = posted(rig.two.receive(rig.filled(0)));
    drop(receive);
    let Rig { one, two, reactor, pool, domain } = rig;
    drop(two);
    drop(reactor);
    let refused = one.submit(SendWorkRequest::new(pool.take().unwrap())).unwrap_err();
    assert_eq!(refused.error, TransportError::ReactorGone);
    drop((refused, one));
    assert_eq!(pool.available(), 8);
    drop((pool, domain));
    assert_eq!(device::live(), (0, 0, 0));
}

#[test]
fn buffers_go_round_on_one_thread() {
    both(messages::<Local<PooledBuffer>>);
}

#[test]
fn buffers_go_round_behind_a_lock() {
    both(messages::<Locked<PooledBuffer>>);
}

#[test]
fn one_sided_operations_use_shared_memory() {
    both(|| {
        let rig = Rig::<Locked<AnyBuffer>>::new();
        let new = || Arc::new(SharedMemoryRegion::<u64>::new(&rig.domain, 4, ALL).unwrap());
        let (local, target) = (new(), new());
        let range = |range| SharedMemoryRange::new(local.clone(), range).unwrap();
        local.write(0, &[1, 2, 3, 4]).unwrap();
        let write = posted(rig.one.write(range(0..2), target.remote_range(2..).unwrap()));
        // The program writes a neighbour while the device reads.
        local.write(3, &[5]).unwrap();
        rig.run(write).unwrap();
        let word = target.remote_range(3..).unwrap();
        rig.run(rig.one.run(FetchAddWorkRequest::new(range(0..1), word, 10))).unwrap();
        rig.run(rig.one.run(CompareSwapWorkRequest::new(range(1..2), word, 12, 20))).unwrap();
        rig.run(rig.one.read(range(2..4), target.remote_range(2..).unwrap())).unwrap();
        assert_eq!((local.to_vec(), target.to_vec()), (vec![2, 12, 1, 20], vec![0, 0, 1, 20]));
    });
}

/// Reset on this thread, while the loop is used on another one.
#[test]
fn a_channel_is_closed_while_others_work() {
    both(|| {
        let rig = Rig::<Locked<PooledBuffer>>::new();
        let receives = [0; 3].map(|byte| posted(rig.two.receive(rig.filled(byte))));
        let sends = [1; 3].map(|byte| posted(rig.one.send(rig.filled(byte))));
        thread::scope(|threads| {
            threads.spawn(|| rig.run(rig.one.shutdown()));
            threads.spawn(|| rig.reactor.stop(TransportError::Cancelled));
            rig.serve();
        });
        for operation in receives {
            let _ = rig.run(operation);
        }
        for operation in sends {
            let _ = rig.run(operation);
        }
        drop((rig.one, rig.two));
        assert_eq!(rig.pool.available(), 8);
    });
}

struct Unpark(thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// A task that sends, one that drops its future, and a reactor, each on its own thread.
#[test]
fn tasks_posts_and_turns_on_several_threads() {
    both(|| {
        let rig = Rig::<Locked<PooledBuffer>>::new();
        let receives = [0; 3].map(|byte| posted(rig.two.receive(rig.filled(byte))));
        thread::scope(|threads| {
            let task = threads.spawn(|| {
                let waker = Waker::from(Arc::new(Unpark(thread::current())));
                for _ in 0..2 {
                    let mut send = rig.one.send(rig.filled(7));
                    while pin!(&mut send).poll(&mut Context::from_waker(&waker)).is_pending() {
                        thread::park();
                    }
                }
            });
            let dropped = threads.spawn(|| drop(posted(rig.one.send(rig.filled(7)))));
            while !task.is_finished() {
                rig.serve();
                thread::yield_now();
            }
            task.join().unwrap();
            dropped.join().unwrap();
        });
        rig.serve();
        for receive in receives {
            assert_eq!(rig.run(receive).unwrap().0[..], [7; 8]);
        }
        assert_eq!(rig.pool.available(), 8);
    });
}

/// Leaks on purpose: to be run without the leak check.
#[test]
fn forgotten_futures_leak_and_dangle_nowhere() {
    both(|| {
        let rig = Rig::<Local<PooledBuffer>>::new();
        forget(posted(rig.two.receive(rig.filled(0))));
        forget(posted(rig.one.send(rig.filled(4))));
        rig.serve();
        let Rig { one, two, reactor, pool, .. } = rig;
        forget(two);
        let receive = posted(one.receive(pool.take().unwrap()));
        forget((receive, reactor));
        drop(one);
        drop(pool);
    });
}
