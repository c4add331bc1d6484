//! Loops: the buffer moves into the table, which grows under it, and comes back when its operation has ended.

use std::mem::forget;
use std::thread;

use ibverbs::channel::{AnyBuffer, LoopBuffer, PreparedWindow};
use ibverbs::{
    AccessFlags, BufferPool, ChannelId, Ended, Inline, Loop, PooledBuffer, ReceiveWorkRequest,
    SendWorkRequest, TransportError,
};

use crate::device;
use crate::rig::{ALL, both, domain};

struct Loops<B> {
    one: Loop<'static, B>,
    two: Loop<'static, B>,
    pool: BufferPool,
    domain: std::sync::Arc<ibverbs::ProtectionDomain<'static>>,
}

impl<B: LoopBuffer<PooledBuffer>> Loops<B> {
    fn new() -> Self {
        let domain = domain();
        let pool = BufferPool::new(&domain, 8, 8, AccessFlags::empty()).unwrap();
        let new = || Loop::new(domain.context_parent(), 64).unwrap();
        Self { one: new(), two: new(), pool, domain }
    }

    fn connect(&mut self) -> (ChannelId, ChannelId) {
        let Self { one, two, domain, .. } = self;
        let prepare = |of: &Loop<'static, B>| {
            let builder = of.create_channel(&*domain).max_send_wr(4).max_recv_wr(4);
            builder.access(ALL).max_inline_data(16).build().unwrap()
        };
        let (first, second) = (prepare(one), prepare(two));
        let (to_first, to_second) = (first.endpoint(), second.endpoint());
        let first = one.add(first.handshake(to_second).unwrap()).unwrap();
        (first, two.add(second.handshake(to_first).unwrap()).unwrap())
    }

    fn filled(&self, byte: u8) -> PooledBuffer {
        let mut buffer = self.pool.take().unwrap();
        buffer.fill(byte);
        buffer
    }

    fn receive(&mut self, channel: ChannelId) {
        let buffer = self.filled(0);
        self.two.post(channel, ReceiveWorkRequest::new(buffer), 0).unwrap();
    }
}

fn next<B>(of: &mut Loop<'static, B>) -> Ended<B> {
    loop {
        if let Some(ended) = of.next_ended().unwrap() {
            return ended;
        }
    }
}

#[test]
fn buffers_go_round_while_the_table_grows() {
    both(|| {
        let mut loops = Loops::<PooledBuffer>::new();
        let (first, its_peer) = loops.connect();
        loops.receive(its_peer);
        // The slots move.
        let (second, other_peer) = loops.connect();
        loops.receive(other_peer);
        for (channel, byte) in [(first, 1), (second, 2), (first, 3)] {
            let message = SendWorkRequest::new(loops.filled(byte));
            loops.one.post(channel, message, 7).unwrap();
            let ended = next(&mut loops.two);
            assert_eq!(
                (ended.channel.index(), &ended.buffer[..]),
                (channel.index(), &[byte; 8][..])
            );
            let mut sent = next(&mut loops.one);
            assert_eq!(sent.token, 7);
            sent.buffer[0] = 9;
            loops.two.post(ended.channel, ReceiveWorkRequest::new(ended.buffer), 0).unwrap();
        }
        // A loop moves to another thread, with what is in flight.
        let Loops { mut one, two, pool, domain } = loops;
        let mut two = thread::spawn(move || two).join().unwrap();
        one.post(first, SendWorkRequest::new(pool.take().unwrap()), 8).unwrap();
        drop((next(&mut one), next(&mut two)));
        drop((one, two));
        assert_eq!(pool.available(), 8);
        drop((pool, domain));
        assert_eq!(device::live(), (0, 0, 0));
    });
}

#[test]
fn windows_and_buffers_of_any_type() {
    both(|| {
        let mut loops = Loops::<AnyBuffer>::new();
        let (first, peer) = loops.connect();
        let window = [1, 2].map(|byte| SendWorkRequest::new(loops.filled(byte)));
        let mut window = PreparedWindow::new(window).unwrap();
        for round in 1..4 {
            loops.receive(peer);
            loops.receive(peer);
            loops.receive(peer);
            loops.one.post_window(first, window, 5).unwrap();
            loops.one.post(first, SendWorkRequest::new(Inline(&[3; 8])), 6).unwrap();
            for byte in [round, 2 * round, 3] {
                let ended = next(&mut loops.two).buffer.downcast::<PooledBuffer>().unwrap();
                assert_eq!(ended[..], [byte; 8]);
            }
            window = next(&mut loops.one).buffer.downcast().unwrap();
            assert_eq!(next(&mut loops.one).token, 6);
            // Other bytes, and another buffer.
            window.bytes_mut(0).unwrap().fill(round + 1);
            let other = SendWorkRequest::new(loops.filled(2 * (round + 1)));
            drop(window.set(1, other).unwrap());
        }
        let moved = thread::spawn(move || window).join().unwrap();
        assert_eq!(moved.into_buffers()[1][..], [8; 8]);
        let five = [(); 5].map(|()| SendWorkRequest::new(loops.filled(0)));
        let five = PreparedWindow::new(five).unwrap();
        let refused = loops.one.post_window(first, five, 0).unwrap_err();
        assert!(matches!(refused.error, TransportError::Verbs(_)) && refused.buffers.is_some());
    });
}

#[test]
fn a_channel_that_is_removed_gives_its_buffers_back() {
    both(|| {
        let mut loops = Loops::<PooledBuffer>::new();
        let (first, peer) = loops.connect();
        loops.receive(peer);
        loops.two.remove(peer).unwrap();
        let ended = next(&mut loops.two);
        assert!(ended.result().is_err());
        assert_eq!(ended.buffer[..], [0; 8]);
        drop(ended);
        let (second, peer) = loops.connect();
        loops.receive(peer);
        loops.one.post(second, SendWorkRequest::new(loops.filled(4)), 0).unwrap();
        assert_eq!(next(&mut loops.two).buffer[..], [4; 8]);
        loops.one.remove(first).unwrap();
    });
}

/// Leaks on purpose: to be run without the leak check.
#[test]
fn forgotten_loops_leak_and_dangle_nowhere() {
    both(|| {
        let mut loops = Loops::<PooledBuffer>::new();
        let (first, peer) = loops.connect();
        loops.receive(peer);
        loops.receive(peer);
        loops.one.post(first, SendWorkRequest::new(loops.filled(4)), 0).unwrap();
        forget(next(&mut loops.two));
        let Loops { mut one, two, pool, .. } = loops;
        forget(two);
        // It lands in the buffer that the forgotten loop still has.
        one.post(first, SendWorkRequest::new(pool.take().unwrap()), 0).unwrap();
        drop((next(&mut one), one, pool));
    });
}
