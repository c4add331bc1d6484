//! Futures: the channel has the buffer until the device is done with it, whatever becomes of the future.

use std::future::Future;
use std::mem::forget;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread;

use ibverbs::{
    AccessFlags, AsyncChannel, BufferPool, CompareSwapWorkRequest, FetchAddWorkRequest,
    PooledBuffer, ProtectionDomain, Reactor, SendWorkRequest, SharedMemoryRange,
    SharedMemoryRegion, TransportError,
};

use crate::device;
use crate::rig::{ALL, both, builder, domain};

/// Two connected channels of one reactor.
struct Rig {
    one: AsyncChannel,
    two: AsyncChannel,
    reactor: Reactor,
    pool: BufferPool,
    domain: Arc<ProtectionDomain<'static>>,
}

impl Rig {
    fn new() -> Self {
        let domain = domain();
        let pool = BufferPool::new(&domain, 8, 8, AccessFlags::empty()).unwrap();
        let reactor = Reactor::new(domain.context_parent(), 64).unwrap();
        let prepare = || reactor.prepare(builder(&domain)).unwrap();
        let (one, two) = (prepare(), prepare());
        let (to_one, to_two) = (one.endpoint(), two.endpoint());
        let (one, two) = (one.handshake(to_two).unwrap(), two.handshake(to_one).unwrap());
        Self { one, two, reactor, pool, domain }
    }

    fn filled(&self, byte: u8) -> PooledBuffer {
        let mut buffer = self.pool.take().unwrap();
        buffer.fill(byte);
        buffer
    }

    fn serve(&self) {
        while self.reactor.turn().unwrap() > 0 {}
    }

    /// Polls a future until it has ended, and lets the reactor work meanwhile.
    fn run<F: Future + Unpin>(&self, mut future: F) -> F::Output {
        loop {
            if let Some(output) = poll(&mut future) {
                return output;
            }
            self.serve();
        }
    }
}

fn poll<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
    match Pin::new(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

/// The first poll of a future posts its operation.
fn posted<F: Future + Unpin>(mut future: F) -> F {
    assert!(poll(&mut future).is_none());
    future
}

#[test]
fn the_device_writes_one_chunk_while_the_program_writes_others() {
    both(|| {
        let rig = Rig::new();
        let mut mine = rig.filled(1);
        let receive = posted(rig.two.receive(rig.filled(0)));
        mine[0] = 2;
        let seen = &mine[1..3];
        let (mut sent, _) = rig.run(rig.one.send(rig.filled(7))).unwrap();
        let (received, success) = rig.run(receive).unwrap();
        assert_eq!((seen, success.byte_len(), &received[..]), (&[1, 1][..], 8, &[7; 8][..]));
        mine[7] = 5;
        sent.fill(9);
        // They go round; this time the receive is there before anyone waits for it.
        rig.two.post_receive(received).unwrap();
        rig.run(rig.one.run(SendWorkRequest::new(sent).immediate(77))).unwrap();
        let (received, success) = rig.run(rig.two.receive(rig.filled(0))).unwrap();
        assert_eq!((&received[..], success.immediate()), (&[9; 8][..], Some(77)));
        assert_eq!(mine[..], [2, 1, 1, 1, 1, 1, 1, 5]);
    });
}

#[test]
fn one_sided_operations_use_shared_memory() {
    both(|| {
        let rig = Rig::new();
        let new = || Arc::new(SharedMemoryRegion::<u64>::new(&rig.domain, 4, ALL).unwrap());
        let (local, target) = (new(), new());
        let range = |range| SharedMemoryRange::new(local.clone(), range).unwrap();
        local.write(0, &[1, 2, 3, 4]).unwrap();
        let write = posted(rig.one.write(range(0..2), target.remote_range(2..).unwrap()));
        // A neighbour, while the device reads.
        local.write(3, &[5]).unwrap();
        rig.run(write).unwrap();
        let word = target.remote_range(3..).unwrap();
        rig.run(rig.one.run(FetchAddWorkRequest::new(range(0..1), word, 10))).unwrap();
        rig.run(rig.one.run(CompareSwapWorkRequest::new(range(1..2), word, 12, 20))).unwrap();
        rig.run(rig.one.read(range(2..4), target.remote_range(2..).unwrap())).unwrap();
        assert_eq!((local.to_vec(), target.to_vec()), (vec![2, 12, 1, 20], vec![0, 0, 1, 20]));
    });
}

/// On this thread or another one, before or after its operation has ended.
#[test]
fn a_dropped_future_gives_its_buffer_back_after_the_completion() {
    both(|| {
        for (ended, elsewhere) in [(false, false), (false, true), (true, false), (true, true)] {
            let rig = Rig::new();
            let receive = posted(rig.two.receive(rig.filled(0)));
            let send = posted(rig.one.send(rig.filled(1)));
            let word = SharedMemoryRegion::<u64>::new(&rig.domain, 1, ALL).unwrap();
            let read = posted(rig.one.read(rig.filled(0), word.remote()));
            let let_go = move || drop((send, receive, read));
            let let_go =
                || if elsewhere { thread::spawn(let_go).join().unwrap() } else { let_go() };
            if ended {
                rig.serve();
                let_go();
            } else {
                let_go();
                rig.serve();
            }
            rig.serve();
            // The message was for a future that is gone: the next one has it.
            let (message, _) = rig.run(rig.two.receive(rig.filled(0))).unwrap();
            assert_eq!(message[..], [1; 8]);
            drop(message);
            rig.serve();
            assert_eq!(rig.pool.available(), 8);
        }
    });
}

/// The futures outlive the channel, the reactor, and the pool.
#[test]
fn what_is_in_flight_comes_back_with_the_end_of_the_channel() {
    both(|| {
        let rig = Rig::new();
        // Posted; the fifth waits in line; the last is new.
        let mut sends = [(); 5].map(|()| posted(rig.one.send(rig.filled(1))));
        let mut new = rig.one.send(rig.filled(2));
        let last = rig.filled(3);
        let Rig { one, two, reactor, pool, domain } = rig;
        drop(one);
        reactor.turn().unwrap();
        for send in &mut sends {
            let ended = poll(send).expect("it has ended").unwrap_err();
            assert_eq!(ended.buffer.unwrap()[..], [1; 8]);
        }
        assert_eq!(poll(&mut new).unwrap().unwrap_err().buffer.unwrap()[..], [2; 8]);
        let mut receive = posted(two.receive(pool.take().unwrap()));
        drop(reactor);
        let ended = poll(&mut receive).expect("it has ended").unwrap_err();
        assert_eq!(ended.error, TransportError::Stopped);
        drop((two, pool, domain));
        assert_eq!((last[..].to_vec(), ended.buffer.unwrap().len()), (vec![3; 8], 8));
        drop((sends, new, receive, last));
        assert_eq!(device::live(), (0, 0, 0));
    });
}

#[test]
fn a_failing_poll_ends_every_future_with_nothing_in_flight() {
    both(|| {
        let rig = Rig::new();
        let mut receive = posted(rig.two.receive(rig.filled(4)));
        device::fail_polls(1);
        let ended = poll(&mut receive).expect("it has ended").unwrap_err();
        let mut buffer = ended.buffer.expect("the queue pair was reset");
        buffer[0] = 1;
        rig.run(rig.two.shutdown());
    });
}

/// Leaks on purpose: to be run without the leak check.
#[test]
fn forgotten_futures_channels_and_reactors_leak_and_dangle_nowhere() {
    both(|| {
        for what in 0..8_u32 {
            let rig = Rig::new();
            forget(posted(rig.one.send(rig.filled(1))));
            forget(posted(rig.one.receive(rig.filled(2))));
            let send = posted(rig.two.send(rig.filled(3)));
            let mut receive = rig.two.receive(rig.filled(4));
            // It finds the message of the first.
            let message = poll(&mut receive);
            let forget_if = |forgotten, value| if forgotten { forget(value) } else { drop(value) };
            let Rig { one, two, reactor, pool, domain } = rig;
            forget_if(what & 1 != 0, one);
            drop((send, message, pool));
            if what & 2 != 0 {
                forget(reactor);
            } else {
                reactor.turn().unwrap();
                drop(reactor);
            }
            forget_if(what & 4 != 0, two);
            drop((receive, domain));
        }
    });
}
