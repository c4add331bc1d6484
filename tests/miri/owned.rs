//! Operations that own their buffers: the buffer moves into the channel, and comes back when it has ended.

use std::mem::forget;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use ibverbs::pool::SharedMemoryRange;
use ibverbs::{
    AccessFlags, BufferPool, CompareSwapWorkRequest, FetchAddWorkRequest, Inline, MemoryRegion,
    PooledBuffer, ReadWorkRequest, ReceiveWorkRequest, SendWorkRequest, SharedMemoryRegion,
    TransportError, WriteWorkRequest,
};

use crate::device;
use crate::rig::{ALL, Pair, both};

fn pool(pair: &Pair) -> BufferPool {
    BufferPool::new(&pair.domain, 8, 4, AccessFlags::empty()).unwrap()
}

fn filled(pool: &BufferPool, byte: u8) -> PooledBuffer {
    let mut buffer = pool.take().unwrap();
    buffer.fill(byte);
    buffer
}

/// The chunks are of one region.
#[test]
fn the_device_writes_one_chunk_of_a_pool_while_the_program_writes_others() {
    both(|| {
        let mut pair = Pair::new();
        let pool = pool(&pair);
        let mut mine = filled(&pool, 1);
        let mut receive = pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 0))).unwrap();
        mine[0] = 2;
        let seen = &mine[1..3];
        let mut send = pair.one.post_owned(SendWorkRequest::new(filled(&pool, 7))).unwrap();
        assert!(pool.take().is_some_and(|mut last| {
            last[3] = 4;
            last[3] == 4
        }));
        let (received, success) = receive.wait(&mut pair.two).unwrap();
        assert_eq!((seen, mine[0]), (&[1, 1][..], 2));
        mine[7] = 5;
        assert_eq!((success.byte_len(), &received[..]), (8, &[7; 8][..]));
        let (mut sent, _) = send.wait(&mut pair.one).unwrap();
        sent.set_len(3).unwrap();
        sent.fill(9);
        // They go round.
        let mut receive = pair.two.post_owned(ReceiveWorkRequest::new(received)).unwrap();
        let mut send = pair.one.post_owned(SendWorkRequest::new(sent)).unwrap();
        send.wait(&mut pair.one).unwrap();
        let (received, success) = receive.wait(&mut pair.two).unwrap();
        assert_eq!((success.byte_len(), &received[..]), (3, &[9, 9, 9, 7, 7, 7, 7, 7][..]));
        assert_eq!(mine[..], [2, 1, 1, 1, 1, 1, 1, 5]);
        drop((received, mine));
        assert_eq!(pool.available(), 4);
    });
}

#[test]
fn every_operation_and_every_kind_of_buffer() {
    both(|| {
        let mut pair = Pair::new();
        let target = pair.shared(4);
        target.write(0, &[1, 2, 3, 4]).unwrap();
        let shared = Arc::new(SharedMemoryRegion::<u64>::new(&pair.domain, 4, ALL).unwrap());
        let range = |range| SharedMemoryRange::new(shared.clone(), range).unwrap();
        let one = &mut pair.one;
        let mut read = one
            .post_owned(ReadWorkRequest::new(range(0..2), target.remote_range(2..).unwrap()))
            .unwrap();
        // A neighbour, while the device writes.
        shared.write(3, &[8]).unwrap();
        let (read_back, _) = read.wait(one).unwrap();
        assert_eq!(read_back.as_slice().unwrap().to_vec(), [3, 4]);
        let mut write = one
            .post_owned(WriteWorkRequest::new(read_back, target.remote_range(..2).unwrap()))
            .unwrap();
        write.wait(one).unwrap();
        assert_eq!(target.to_vec(), [3, 4, 3, 4]);
        let word = target.remote_range(3..).unwrap();
        let mut add = one.post_owned(FetchAddWorkRequest::new(range(0..1), word, 10)).unwrap();
        let mut swap =
            one.post_owned(CompareSwapWorkRequest::new(range(1..2), word, 14, 5)).unwrap();
        add.wait(one).unwrap();
        swap.wait(one).unwrap();
        assert_eq!((shared.to_vec(), target.read_one(3).unwrap()), (vec![4, 14, 0, 8], 5));

        let mut region = Box::new(MemoryRegion::<u64>::new(&pair.domain, 2).unwrap());
        region.copy_from_slice(&[6, 7]);
        let mut read = one
            .post_owned(ReadWorkRequest::new(region, target.remote_range(2..).unwrap()))
            .unwrap();
        let (mut region, _) = read.wait(one).unwrap();
        assert_eq!(region[..], [3, 5]);
        region[1] = 6;
        let mut receive = pair.two.post_owned(ReceiveWorkRequest::new(region)).unwrap();
        let mut send = one.post_owned(SendWorkRequest::new(range(0..1)).immediate(77)).unwrap();
        send.wait(one).unwrap();
        let (region, success) = receive.wait(&mut pair.two).unwrap();
        assert_eq!((&region[..], success.immediate()), (&[4, 6][..], Some(77)));
        let mut receive = pair.two.post_owned(ReceiveWorkRequest::new(())).unwrap();
        let mut write = one.post_owned(
            WriteWorkRequest::new(region, target.remote_range(..2).unwrap()).immediate(78),
        );
        let (region, _) = write.as_mut().unwrap().wait(one).unwrap();
        assert_eq!(receive.wait(&mut pair.two).unwrap().1.immediate(), Some(78));
        assert_eq!((&region[..], target.read_one(1).unwrap()), (&[4, 6][..], 6));
    });
}

/// Before or after the operation has ended, on this thread or another one.
#[test]
fn a_dropped_handle_gives_its_buffer_back_after_the_completion() {
    both(|| {
        for (ended, elsewhere) in [(false, false), (false, true), (true, false), (true, true)] {
            let mut pair = Pair::new();
            let pool = pool(&pair);
            let receive = pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 0))).unwrap();
            let let_go = move || drop(receive);
            let let_go =
                || if elsewhere { thread::spawn(let_go).join().unwrap() } else { let_go() };
            let send = |pair: &mut Pair| {
                pair.one
                    .post_owned(SendWorkRequest::new(filled(&pool, 1)))
                    .unwrap()
                    .wait(&mut pair.one)
                    .unwrap();
                pair.two.poll().unwrap();
            };
            if ended {
                send(&mut pair);
                let_go();
            } else {
                let_go();
                pair.two.poll().unwrap();
                assert_eq!(pool.available(), 3);
                send(&mut pair);
            }
            pair.two.poll().unwrap();
            assert_eq!(pool.available(), 4);
            filled(&pool, 2);
        }
    });
}

/// The handles outlive the connection, the channel, and the pool.
#[test]
fn what_is_in_flight_comes_back_with_the_end_of_the_connection() {
    both(|| {
        let mut pair = Pair::new();
        let pool = pool(&pair);
        let mut first = pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 1))).unwrap();
        let second = pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 2))).unwrap();
        assert!(first.wait_until(&mut pair.two, Instant::now()).unwrap().is_none());
        let stopped = pair.two.until(Instant::now()).receive(&mut ());
        assert!(matches!(stopped, Err(TransportError::TimedOut)), "{stopped:?}");
        let ended = first.wait(&mut pair.two).unwrap_err();
        assert_eq!(ended.buffer.unwrap()[..], [1; 8]);
        let (one, two) = (pair.one.reset().unwrap(), pair.two.reset().unwrap());
        assert_eq!(pool.available(), 4);
        let (to_one, to_two) = (one.endpoint(), two.endpoint());
        pair.one = one.handshake(to_two).unwrap();
        pair.two = two.handshake(to_one).unwrap();
        let third = pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 3))).unwrap();
        let last = filled(&pool, 4);
        let Pair { one, two, domain } = pair;
        drop((two, pool));
        drop((first, second, third));
        drop((one, domain));
        assert_eq!(last[..], [4; 8]);
        drop(last);
        assert_eq!(device::live(), (0, 0, 0));
    });
}

/// Leaks on purpose: to be run without the leak check.
#[test]
fn forgotten_handles_and_channels_of_owned_operations_leak_and_dangle_nowhere() {
    both(|| {
        let mut pair = Pair::new();
        let pool = pool(&pair);
        forget(pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 1))).unwrap());
        forget(pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 2))).unwrap());
        pair.one
            .post_owned(SendWorkRequest::new(filled(&pool, 7)))
            .unwrap()
            .wait(&mut pair.one)
            .unwrap();
        pair.two.poll().unwrap();
        assert_eq!(pool.available(), 2);
        let receive = pair.one.post_owned(ReceiveWorkRequest::new(filled(&pool, 3))).unwrap();
        let Pair { one, mut two, domain } = pair;
        forget(one);
        drop((receive, pool));
        // It lands in the chunk that the forgotten channel still has.
        two.send(Inline(&[5; 8])).unwrap();
        drop((two, domain));
    });
}
