//! Loops: the buffer moves into the table, which grows under it, and comes back when its operation has ended.

use std::mem::forget;
use std::sync::Arc;
use std::thread;

use ibverbs::channel::AnyBuffer;
use ibverbs::event_loop::LoopBuffer;
use ibverbs::pool::SharedMemoryRange;
use ibverbs::{
    AccessFlags, BufferPool, ChannelId, CompareSwapWorkRequest, Ended, FetchAddWorkRequest, Inline,
    Loop, MemoryRegion, PooledBuffer, ReadWorkRequest, ReceiveWorkRequest, SendWorkRequest,
    SharedMemoryRegion, TransportError, WriteWorkRequest,
};

use crate::device;
use crate::rig::{ALL, both, domain};

struct Loops<B> {
    one: Loop<'static, B>,
    two: Loop<'static, B>,
    pool: BufferPool,
    domain: Arc<ibverbs::ProtectionDomain<'static>>,
}

impl<B> Loops<B>
where
    PooledBuffer: LoopBuffer<B>,
{
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
        self.pool.take_from(&[byte; 8]).unwrap().unwrap()
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
fn buffers_of_any_type() {
    both(|| {
        let mut loops = Loops::<AnyBuffer>::new();
        let (first, peer) = loops.connect();
        let mut buffer = loops.filled(1);
        for round in 1..4 {
            loops.receive(peer);
            loops.receive(peer);
            loops.one.post(first, SendWorkRequest::new(buffer), 5).unwrap();
            loops.one.post(first, SendWorkRequest::new(Inline(&[3; 8])), 6).unwrap();
            for byte in [round, 3] {
                let ended = next(&mut loops.two).buffer.downcast::<PooledBuffer>().unwrap();
                assert_eq!(ended[..], [byte; 8]);
            }
            buffer = next(&mut loops.one).buffer.downcast().unwrap();
            assert_eq!(next(&mut loops.one).token, 6);
            buffer.fill(round + 1);
        }
        assert_eq!(thread::spawn(move || buffer).join().unwrap()[..], [4; 8]);
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

/// The chunks are of one region.
#[test]
fn the_device_writes_one_chunk_of_a_pool_while_the_program_writes_others() {
    both(|| {
        let mut loops = Loops::<PooledBuffer>::new();
        let (first, peer) = loops.connect();
        let mut mine = loops.filled(1);
        loops.receive(peer);
        mine[0] = 2;
        let seen = &mine[1..3];
        loops.one.post(first, SendWorkRequest::new(loops.filled(7)), 0).unwrap();
        let mut other = loops.filled(3);
        other[3] = 4;
        let received = next(&mut loops.two);
        assert_eq!((seen, mine[0], other[3]), (&[1, 1][..], 2, 4));
        mine[7] = 5;
        assert_eq!(received.result().unwrap().byte_len(), 8);
        assert_eq!(received.buffer[..], [7; 8]);
        let mut sent = next(&mut loops.one).buffer;
        sent.set_len(3).unwrap();
        sent.fill(9);
        // Both buffers are posted again.
        loops.two.post(peer, ReceiveWorkRequest::new(received.buffer), 0).unwrap();
        loops.one.post(first, SendWorkRequest::new(sent), 0).unwrap();
        let received = next(&mut loops.two);
        assert_eq!(received.buffer[..], [9; 3]);
        assert_eq!(mine[..], [2, 1, 1, 1, 1, 1, 1, 5]);
    });
}

#[test]
fn every_operation_and_every_kind_of_buffer() {
    both(|| {
        let mut loops = Loops::<AnyBuffer>::new();
        let (first, peer) = loops.connect();
        let target = SharedMemoryRegion::<u64>::new(&loops.domain, 4, ALL).unwrap();
        target.write(0, &[1, 2, 3, 4]).unwrap();
        let shared = Arc::new(SharedMemoryRegion::<u64>::new(&loops.domain, 4, ALL).unwrap());
        let range = |range| SharedMemoryRange::new(shared.clone(), range).unwrap();
        let read = ReadWorkRequest::new(range(0..2), target.remote_range(2..).unwrap());
        loops.one.post(first, read, 0).unwrap();
        // The program writes a neighbour while the device writes.
        shared.write(3, &[8]).unwrap();
        let read_back = next(&mut loops.one).buffer.downcast::<SharedMemoryRange<u64>>().unwrap();
        assert_eq!(read_back.as_slice().unwrap().to_vec(), [3, 4]);
        let write = WriteWorkRequest::new(read_back, target.remote_range(..2).unwrap());
        loops.one.post(first, write, 0).unwrap();
        drop(next(&mut loops.one));
        assert_eq!(target.to_vec(), [3, 4, 3, 4]);
        let word = target.remote_range(3..).unwrap();
        loops.one.post(first, FetchAddWorkRequest::new(range(0..1), word, 10), 0).unwrap();
        let swap = CompareSwapWorkRequest::new(range(1..2), word, 14, 5);
        loops.one.post(first, swap, 0).unwrap();
        drop([next(&mut loops.one), next(&mut loops.one)]);
        assert_eq!((shared.to_vec(), target.read_one(3).unwrap()), (vec![4, 14, 0, 8], 5));

        let mut region = Box::new(MemoryRegion::<u64>::new(&loops.domain, 2).unwrap());
        region.copy_from_slice(&[6, 7]);
        let read = ReadWorkRequest::new(region, target.remote_range(2..).unwrap());
        loops.one.post(first, read, 0).unwrap();
        let mut region = next(&mut loops.one).buffer.downcast::<Box<MemoryRegion<u64>>>().unwrap();
        assert_eq!(region[..], [3, 5]);
        region[1] = 6;
        loops.two.post(peer, ReceiveWorkRequest::new(region), 0).unwrap();
        let message = SendWorkRequest::new(range(0..1)).immediate(77);
        loops.one.post(first, message, 0).unwrap();
        drop(next(&mut loops.one));
        let ended = next(&mut loops.two);
        assert_eq!(ended.result().unwrap().immediate(), Some(77));
        let region = ended.buffer.downcast::<Box<MemoryRegion<u64>>>().unwrap();
        assert_eq!(region[..], [4, 6]);
        loops.two.post(peer, ReceiveWorkRequest::new(()), 0).unwrap();
        let write = WriteWorkRequest::new(region, target.remote_range(..2).unwrap());
        loops.one.post(first, write.immediate(78), 0).unwrap();
        let region = next(&mut loops.one).buffer.downcast::<Box<MemoryRegion<u64>>>().unwrap();
        assert_eq!(next(&mut loops.two).result().unwrap().immediate(), Some(78));
        assert_eq!((&region[..], target.read_one(1).unwrap()), (&[4, 6][..], 6));
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
        // The message lands in the buffer that the forgotten loop still has.
        one.post(first, SendWorkRequest::new(pool.take().unwrap()), 0).unwrap();
        drop((next(&mut one), one, pool));
    });
}
