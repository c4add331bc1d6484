//! Operations that own their buffers: each buffer comes back once, and not before the device is done.

use std::mem;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::memory::HugePages;
use ibverbs::pool::SharedMemoryRange;
use ibverbs::{
    AccessFlags, BufferPool, CompareSwapWorkRequest, ErrorKind, FetchAddWorkRequest, MemoryRegion,
    PooledBuffer, ReadWorkRequest, ReceiveWorkRequest, RegionOptions, SendWorkRequest,
    SharedMemoryRegion, TransportError, WriteWorkRequest,
};
use ibverbs_software::Verb;

use crate::pair::{ALL, Pair};
use crate::software::Software;

const CHUNKS: usize = 8;

fn pool(pair: &Pair) -> BufferPool {
    BufferPool::new(&pair.domain, 16, CHUNKS, AccessFlags::empty()).unwrap()
}

fn manual() -> Pair {
    Pair::with(Software::manual(), |builder| builder)
}

fn filled(pool: &BufferPool, byte: u8) -> PooledBuffer {
    let mut buffer = pool.take().unwrap();
    buffer.fill(byte);
    buffer
}

/// Executes everything, and lets both channels poll the completions.
fn finish_all(pair: &mut Pair) {
    pair.device.run();
    for channel in [&mut pair.one, &mut pair.two] {
        channel.poll().unwrap();
    }
}

#[test]
fn a_message_goes_from_pool_to_pool() {
    let mut pair = Pair::new();
    let pool = pool(&pair);
    let mut receive = pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 0))).unwrap();
    let mut message = filled(&pool, 7);
    message.set_len(5).unwrap();
    let mut send = pair.one.post_owned(SendWorkRequest::new(message)).unwrap();
    assert_eq!(pool.available(), CHUNKS - 2);
    let (sent, _) = send.wait(&mut pair.one).unwrap();
    assert_eq!((sent.len(), &sent[..]), (5, &[7; 5][..]));
    let (received, success) = receive.wait(&mut pair.two).unwrap();
    assert_eq!(success.byte_len(), 5);
    assert_eq!(received[..6], [7, 7, 7, 7, 7, 0]);
    assert_eq!(pool.available(), CHUNKS - 2);
    drop((sent, received));
    assert_eq!(pool.available(), CHUNKS);
    assert_eq!(send.poll(&mut pair.one).unwrap_err().error, TransportError::UnknownWork);
    drop((send, receive, pool));
    pair.finish();
}

#[test]
fn every_kind_of_operation_and_of_buffer() {
    let mut pair = Pair::new();
    let target = pair.shared(4);
    target.write(0, &[1, 2, 3, 4]).unwrap();
    let shared = Arc::new(SharedMemoryRegion::<u64>::new(&pair.domain, 8, ALL).unwrap());
    let one = &mut pair.one;

    let range = SharedMemoryRange::new(shared.clone(), 2..4).unwrap();
    let mut read =
        one.post_owned(ReadWorkRequest::new(range, target.remote_range(1..3).unwrap())).unwrap();
    read.wait(one).unwrap();
    assert_eq!(shared.to_vec(), [0, 0, 2, 3, 0, 0, 0, 0]);

    let mut region = Box::new(MemoryRegion::<u64>::new(&pair.domain, 2).unwrap());
    region.copy_from_slice(&[8, 9]);
    let mut write =
        one.post_owned(WriteWorkRequest::new(region, target.remote_range(..2).unwrap())).unwrap();
    let (written, _) = write.wait(one).unwrap();
    assert_eq!(written[..], [8, 9]);
    assert_eq!(target.to_vec(), [8, 9, 3, 4]);

    let word = |at| SharedMemoryRange::new(shared.clone(), at..=at).unwrap();
    let last = target.remote_range(3..).unwrap();
    let mut add = one.post_owned(FetchAddWorkRequest::new(word(0), last, 10)).unwrap();
    add.wait(one).unwrap();
    let mut swap = one.post_owned(CompareSwapWorkRequest::new(word(1), last, 14, 99)).unwrap();
    swap.wait(one).unwrap();
    assert_eq!((shared.read_one(0).unwrap(), shared.read_one(1).unwrap()), (4, 14));
    assert_eq!(target.read_one(3).unwrap(), 99);
    drop((read, write, written, add, swap, shared, target));
    pair.finish();
}

/// Sends from each chunk of a pool of huge pages to another one, and looks at every byte.
fn exchange_in_huge_pages(pair: &mut Pair, pool: &BufferPool) {
    let first = pool.take().unwrap();
    assert!(first.as_ptr().addr().is_multiple_of(HugePages::Size2MiB.bytes()));
    let mut receive = pair.two.post_owned(ReceiveWorkRequest::new(first)).unwrap();
    for byte in 1..=pool.chunks() as u8 - 1 {
        let mut send = pair.one.post_owned(SendWorkRequest::new(filled(pool, byte))).unwrap();
        let (received, success) = receive.wait(&mut pair.two).unwrap();
        assert_eq!(success.byte_len() as usize, pool.chunk_len());
        assert!(received.iter().all(|&found| found == byte));
        send.wait(&mut pair.one).unwrap();
        receive = pair.two.post_owned(ReceiveWorkRequest::new(received)).unwrap();
    }
    pair.one.run(SendWorkRequest::new(&()).immediate(0)).unwrap();
    receive.wait(&mut pair.two).unwrap();
    assert_eq!(pool.available(), pool.chunks());
}

/// The pages of 2 MiB of this machine that are free and promised to nobody.
fn free_huge_pages() -> u64 {
    let folder = "/sys/kernel/mm/hugepages/hugepages-2048kB";
    let read = |name| match std::fs::read_to_string(format!("{folder}/{name}")) {
        Ok(text) => text.trim().parse().unwrap(),
        // A kernel without huge pages.
        Err(_) => 0,
    };
    u64::saturating_sub(read("free_hugepages"), read("resv_hugepages"))
}

/// Whether there are pages of 2 MiB at all, free or not. An emulator may have none, whatever the
/// kernel below it says.
fn has_huge_pages() -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB;
    // SAFETY: a new mapping touches nothing that exists.
    let page = unsafe { libc::mmap(std::ptr::null_mut(), 2 << 20, libc::PROT_READ, flags, -1, 0) };
    if page == libc::MAP_FAILED {
        return std::io::Error::last_os_error().raw_os_error() != Some(libc::EINVAL);
    }
    // SAFETY: nobody uses the mapping, which is ours.
    assert_eq!(unsafe { libc::munmap(page, 2 << 20) }, 0);
    true
}

#[test]
fn a_pool_of_huge_pages_carries_messages_or_says_that_there_are_none() {
    let mut pair = Pair::new();
    // Three of the chunks are on two pages each, and all are on four.
    let (len, chunks) = ((1 << 20) + 64, 7);
    let pool =
        |pages| BufferPool::new(&pair.domain, len, chunks, RegionOptions::new().huge_pages(pages));
    let transparent = pool(HugePages::Transparent).unwrap();
    let before = free_huge_pages();
    let set_aside = pool(HugePages::Size2MiB);
    let after = free_huge_pages();
    exchange_in_huge_pages(&mut pair, &transparent);
    match set_aside {
        Ok(pool) => exchange_in_huge_pages(&mut pair, &pool),
        Err(error) => {
            // Other programs may take some, and give them back.
            let (kind, text) = if has_huge_pages() {
                assert!(before.min(after) < 4, "{before} and {after} are free: {error}");
                (ErrorKind::Resource, "/sys/kernel/mm/hugepages")
            } else {
                (ErrorKind::Unsupported, "no huge pages of that size")
            };
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(text), "{error}");
        }
    }
    drop(transparent);
    pair.finish();
}

#[test]
fn immediates_arrive_with_a_message_and_after_a_write() {
    let mut pair = Pair::new();
    let (pool, target) = (pool(&pair), pair.shared(2));
    let mut receive = pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 0))).unwrap();
    let mut message = filled(&pool, 7);
    message.set_len(5).unwrap();
    let mut send =
        pair.one.post_owned(SendWorkRequest::new(message).immediate(0xfeed_beef)).unwrap();
    assert_eq!(send.wait(&mut pair.one).unwrap().0[..], [7; 5]);
    let (received, success) = receive.wait(&mut pair.two).unwrap();
    assert_eq!((success.byte_len(), success.immediate()), (5, Some(0xfeed_beef)));
    assert_eq!(received[..6], [7, 7, 7, 7, 7, 0]);

    // A write's bytes go where it says. The receive tells that they are there, and its buffer stays as it is.
    let mut receive = pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 1))).unwrap();
    let (one, bytes) = (&mut pair.one, filled(&pool, 9));
    let mut write =
        one.post_owned(WriteWorkRequest::new(bytes, target.remote()).immediate(78)).unwrap();
    assert_eq!(write.wait(one).unwrap().0[..], [9; 16]);
    let (untouched, success) = receive.wait(&mut pair.two).unwrap();
    assert_eq!((&untouched[..], success.immediate()), (&[1; 16][..], Some(78)));
    assert_eq!(target.to_vec(), [u64::from_ne_bytes([9; 8]); 2]);
    drop((send, write, receive, received, untouched));
    assert_eq!(pool.available(), CHUNKS);
    drop((pool, target));
    pair.finish();
}

#[test]
fn a_region_that_moves_into_an_operation_is_written_by_a_receive_and_by_a_read() {
    let mut pair = Pair::new();
    let target = pair.shared(2);
    target.write(0, &[3, 4]).unwrap();
    let new = |len| Box::new(MemoryRegion::<u64>::new(&pair.domain, len).unwrap());
    let (received, read) = (new(3), new(2));
    let address = received.as_ptr();
    let mut receive = pair.two.post_owned(ReceiveWorkRequest::new(received)).unwrap();
    pair.one.send(pair.region(16, 1).slice(..).unwrap()).unwrap();
    let (received, success) = receive.wait(&mut pair.two).unwrap();
    let bytes = |first: u8| u64::from_ne_bytes(std::array::from_fn(|n| first + n as u8));
    assert_eq!((success.byte_len(), &received[..]), (16, &[bytes(1), bytes(9), 0][..]));
    assert_eq!(received.as_ptr(), address, "it is the same memory");
    let mut read = pair.one.post_owned(ReadWorkRequest::new(read, target.remote())).unwrap();
    let (mut read, _) = read.wait(&mut pair.one).unwrap();
    assert_eq!(read[..], [3, 4]);
    // It is the program's own again.
    read[0] = 5;
    let mut write = pair.one.post_owned(WriteWorkRequest::new(read, target.remote())).unwrap();
    let (read, _) = write.wait(&mut pair.one).unwrap();
    assert_eq!(target.to_vec(), [5, 4]);
    read.close().map_err(drop).unwrap();
    drop((receive, received, write, target));
    pair.finish();
}

#[test]
fn a_wait_that_times_out_leaves_everything_in_flight() {
    let mut pair = manual();
    let pool = pool(&pair);
    let mut receive = pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 0))).unwrap();
    let soon = Instant::now() + Duration::from_millis(2);
    assert!(receive.wait_until(&mut pair.two, soon).unwrap().is_none());
    assert!(receive.poll(&mut pair.two).unwrap().is_none());
    assert_eq!(pool.available(), CHUNKS - 1);
    let mut send = pair.one.post_owned(SendWorkRequest::new(filled(&pool, 3))).unwrap();
    pair.device.run();
    receive.wait(&mut pair.two).unwrap();
    send.wait(&mut pair.one).unwrap();
    let driver = pair.device.drive();
    pair.exchange();
    drop((send, receive, pool, driver));
    pair.finish();
}

#[test]
fn a_dropped_handle_gives_its_buffer_back_after_the_completion() {
    for on_another_thread in [false, true] {
        for dropped_before_the_end in [true, false] {
            let mut pair = manual();
            let pool = pool(&pair);
            let receive = pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 0))).unwrap();
            let send = pair.one.post_owned(SendWorkRequest::new(filled(&pool, 1))).unwrap();
            let drop_both = move || drop((receive, send));
            let drop_both = || {
                if on_another_thread {
                    thread::spawn(drop_both).join().unwrap();
                } else {
                    drop_both();
                }
            };
            if dropped_before_the_end {
                drop_both();
                for channel in [&mut pair.one, &mut pair.two] {
                    channel.poll().unwrap();
                }
                assert_eq!(pool.available(), CHUNKS - 2, "the device may still use them");
                finish_all(&mut pair);
            } else {
                finish_all(&mut pair);
                assert_eq!(pool.available(), CHUNKS - 2, "the handles may ask for them");
                drop_both();
                finish_all(&mut pair);
            }
            assert_eq!(pool.available(), CHUNKS);
            // The slots in the queues are free too.
            let driver = pair.device.drive();
            for _ in 0..8 {
                pair.exchange();
            }
            drop((pool, driver));
            pair.finish();
        }
    }
}

#[test]
fn a_forgotten_handle_gives_its_buffer_back_with_the_connection() {
    let mut pair = manual();
    let pool = pool(&pair);
    mem::forget(pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 0))).unwrap());
    mem::forget(pair.one.post_owned(SendWorkRequest::new(filled(&pool, 1))).unwrap());
    finish_all(&mut pair);
    assert_eq!(pool.available(), CHUNKS - 2);
    let mut pair = pair.reconnect();
    assert_eq!(pool.available(), CHUNKS);
    mem::forget(pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 0))).unwrap());
    drop((pair.one, pair.two));
    assert_eq!(pool.available(), CHUNKS);
}

#[test]
fn a_forgotten_channel_keeps_its_buffers() {
    let mut pair = manual();
    let pool = pool(&pair);
    let receive = pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 0))).unwrap();
    mem::forget(pair.two);
    drop(receive);
    assert_eq!(pool.available(), CHUNKS - 1);
}

#[test]
fn a_channel_that_ends_gives_buffers_back_though_handles_live_on() {
    let mut pair = manual();
    let pool = pool(&pair);
    let receive = pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 0))).unwrap();
    drop(pair.two);
    assert_eq!(pool.available(), CHUNKS);
    drop(receive);
    assert_eq!(pool.available(), CHUNKS);
}

#[test]
fn when_nothing_ends_the_operations_their_buffers_are_leaked() {
    let mut pair = manual();
    let pool = pool(&pair);
    let receive = pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 0))).unwrap();
    pair.device.fail_always(Verb::ModifyQp, libc::EIO);
    pair.device.fail_always(Verb::DestroyQp, libc::EIO);
    drop(pair.two);
    pair.device.clear_failures();
    drop(receive);
    assert_eq!(pool.available(), CHUNKS - 1, "the device may still use it");
}

#[test]
fn a_stopped_channel_says_so_and_gives_buffers_back() {
    let mut pair = manual();
    let pool = pool(&pair);
    let mut receive = pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 0))).unwrap();
    let dropped = pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 0))).unwrap();
    let mut region = pair.region(8, 0);
    let mut buffer = region.slice_mut(..).unwrap();
    let stopped = pair.two.until(Instant::now()).receive(&mut buffer);
    assert_eq!(stopped.unwrap_err(), TransportError::TimedOut);
    let ended = receive.poll(&mut pair.two).unwrap_err();
    assert!(ended.error.is_consequence());
    drop((ended.buffer.unwrap(), dropped));
    pair.two.poll().unwrap();
    assert_eq!(pool.available(), CHUNKS);
    let refused = pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 0))).unwrap_err();
    assert_eq!(refused.error, TransportError::Stopped);
    drop((receive, region, refused, pool));
    pair.reconnect().finish();
}

#[test]
fn a_discarded_operation_has_not_the_result_of_the_one_before() {
    // The two receives have the same place in the channel, as there is only one.
    let mut pair = Pair::with(Software::manual(), |builder| builder.max_recv_wr(1));
    let pool = pool(&pair);
    let mut early = pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 0))).unwrap();
    drop(pair.one.post_owned(SendWorkRequest::new(filled(&pool, 7))).unwrap());
    finish_all(&mut pair);
    assert_eq!(early.wait(&mut pair.two).unwrap().0[..], [7; 16]);
    let mut discarded = pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 0))).unwrap();
    // The queue pair does not go to the error state, which would flush the receive: it is reset.
    pair.device.fail_next(Verb::ModifyQp, libc::EIO);
    let stopped = pair.two.until(Instant::now()).send(());
    assert_eq!(stopped.unwrap_err(), TransportError::TimedOut);
    let ended = discarded.wait(&mut pair.two).unwrap_err();
    assert_eq!(ended.error, TransportError::Stopped);
    drop((early, discarded, ended.buffer.unwrap()));
    assert_eq!(pool.available(), CHUNKS);
    drop(pool);
    pair.reconnect().finish();
}

#[test]
fn a_handle_of_an_earlier_connection_is_stopped_and_harms_nobody() {
    let mut pair = manual();
    let pool = pool(&pair);
    let mut early = pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 0))).unwrap();
    let early_too = pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 0))).unwrap();
    let mut pair = pair.reconnect();
    let mut late = pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 0))).unwrap();
    let late_too = pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 0))).unwrap();
    assert_eq!(early.poll(&mut pair.two).unwrap_err().error, TransportError::Stopped);
    drop(late_too);
    drop(early_too);
    let mut sends =
        [1, 2].map(|byte| pair.one.post_owned(SendWorkRequest::new(filled(&pool, byte))).unwrap());
    finish_all(&mut pair);
    assert_eq!(late.poll(&mut pair.two).unwrap().unwrap().0[..], [1; 16]);
    for send in &mut sends {
        send.wait(&mut pair.one).unwrap();
    }
    finish_all(&mut pair);
    drop((early, late, sends));
    assert_eq!(pool.available(), CHUNKS);
    drop(pool);
    pair.finish();
}

/// A program that is not interested in results only posts, and drops the handles.
#[test]
fn a_program_that_only_posts_gets_its_places_and_buffers_back() {
    let mut pair = manual();
    let pool = pool(&pair);
    // More than the queue has places, and than the pool has buffers.
    for n in 0..3 * CHUNKS as u8 {
        let mut receive = pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 0))).unwrap();
        drop(pair.one.post_owned(SendWorkRequest::new(filled(&pool, n))).unwrap());
        pair.device.run();
        let (received, _) = receive.wait(&mut pair.two).unwrap();
        assert_eq!(received[..], [n; 16]);
    }
    // What has not ended keeps its place.
    finish_all(&mut pair);
    for n in 0..4 {
        drop(pair.one.post_owned(SendWorkRequest::new(filled(&pool, n))).unwrap());
    }
    let full = pair.one.post_owned(SendWorkRequest::new(filled(&pool, 4))).unwrap_err();
    assert_eq!(full.error, TransportError::QueueFull);
    assert_eq!(pool.available(), CHUNKS - 5);
    drop((full, pool));
    pair.finish();
}

#[test]
fn a_post_that_fails_gives_the_buffer_back() {
    let mut pair = manual();
    let pool = pool(&pair);
    let mut receives = Vec::new();
    for _ in 0..4 {
        receives.push(pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 0))).unwrap());
    }
    let full = pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 6))).unwrap_err();
    assert_eq!((full.error, &full.buffer.unwrap()[..]), (TransportError::QueueFull, &[6; 16][..]));
    let target = pair.shared(1);
    let too_long =
        pair.one.post_owned(WriteWorkRequest::new(filled(&pool, 6), target.remote())).unwrap_err();
    assert!(too_long.to_string().contains("is 16, and must be within 0..=8"), "{too_long}");
    drop((too_long, receives, target));
    finish_all(&mut pair);
    // Dropped handles free their slots once their receives have ended.
    let pair = pair.reconnect();
    assert_eq!(pool.available(), CHUNKS);
    drop(pool);
    pair.finish();
}

#[test]
fn they_go_beside_scopes_and_blocking_operations() {
    let mut pair = Pair::new();
    let pool = pool(&pair);
    let mut receive = pair.two.post_owned(ReceiveWorkRequest::new(filled(&pool, 0))).unwrap();
    let region = pair.region(4, 1);
    pair.one.send(region.slice(..).unwrap()).unwrap();
    pair.exchange();
    assert_eq!(receive.wait(&mut pair.two).unwrap().0[..4], region[..]);
    drop((receive, region, pool));
    pair.finish();
}

#[test]
fn a_pool_never_gives_a_chunk_out_twice() {
    let pair = Pair::new();
    let pool = BufferPool::new(&pair.domain, 8, 70, AccessFlags::empty()).unwrap();
    let all: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
    assert_eq!((all.len(), pool.available()), (70, 0));
    drop(all);
    thread::scope(|threads| {
        for mark in 1..=4_u64 {
            let pool = &pool;
            threads.spawn(move || {
                for round in 0..500 {
                    let taken: Vec<_> = (0..20).filter_map(|_| pool.take()).collect();
                    let mark = (mark << 32 | round).to_ne_bytes();
                    let taken = taken.into_iter().map(|mut buffer| {
                        buffer.copy_from_slice(&mark);
                        buffer
                    });
                    for buffer in taken.collect::<Vec<_>>() {
                        assert_eq!(buffer[..], mark);
                    }
                }
            });
        }
    });
    assert_eq!(pool.available(), 70);
    drop(pool);
    pair.finish();
}

#[test]
fn a_pool_refuses_what_it_cannot_be() {
    let pair = Pair::new();
    let new = |len, chunks, access| BufferPool::new(&pair.domain, len, chunks, access);
    let none = AccessFlags::empty();
    for (len, chunks) in
        [(0, 1), (1, 0), (usize::MAX, 2), (1 << 20, usize::MAX), (1 << 31, 1 << 31)]
    {
        assert!(new(len, chunks, none).is_err(), "{chunks} of {len}");
    }
    for access in [AccessFlags::REMOTE_READ, AccessFlags::REMOTE_WRITE, AccessFlags::MW_BIND] {
        assert!(new(8, 8, access).is_err(), "{access:?}");
    }
    let elsewhere = RegionOptions::from(none).zero_based();
    let error = BufferPool::new(&pair.domain, 8, 8, elsewhere).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    let mut buffer = new(8, 1, none).unwrap().take().unwrap();
    assert!(buffer.set_len(9).is_err());
    assert_eq!(buffer.len(), 8);
    drop(buffer);
    pair.finish();
}
