//! Buffers that operations own: chunks of pools, ranges of shared regions, whole regions.

use std::sync::Arc;
use std::thread;

use ibverbs::channel::{AnyBuffer, OwnedBuffer, WorkRequest};
use ibverbs::completion::WorkSuccess;
use ibverbs::memory::HugePages;
use ibverbs::pool::{BufferCache, SharedMemoryRange};
use ibverbs::{
    AccessFlags, BufferPool, ChannelId, CompareSwapWorkRequest, ErrorKind, FetchAddWorkRequest,
    Loop, MemoryRegion, PooledBuffer, ProtectionDomain, ReadWorkRequest, ReceiveWorkRequest,
    RegionOptions, SendWorkRequest, SharedMemoryRegion, WriteWorkRequest,
};

use crate::loops::next;
use crate::pair::{ALL, Pair, connect};

/// A loop with two channels that are connected to each other.
pub(crate) struct Both {
    pub(crate) event_loop: Loop<'static, AnyBuffer>,
    pub(crate) one: ChannelId,
    pub(crate) two: ChannelId,
}

impl Both {
    pub(crate) fn new(domain: &Arc<ProtectionDomain<'static>>) -> Self {
        let mut event_loop = Loop::new(domain.context_parent(), 64).unwrap();
        let side = || event_loop.create_channel(domain).max_send_wr(4).max_recv_wr(4).access(ALL);
        let (one, two) = connect(side(), side());
        let [one, two] = [one, two].map(|channel| event_loop.add(channel).unwrap());
        Self { event_loop, one, two }
    }

    pub(crate) fn receive<B: OwnedBuffer>(&mut self, buffer: B) {
        self.event_loop.post(self.two, ReceiveWorkRequest::new(buffer), 2).unwrap();
    }

    /// Posts on the first channel.
    pub(crate) fn post<R: WorkRequest<Kept: OwnedBuffer>>(&mut self, request: R) {
        self.event_loop.post(self.one, request, 1).unwrap();
    }

    /// Returns the buffer of the next operation that ends. It must have this token, and a buffer of this type.
    #[track_caller]
    pub(crate) fn ended<B: OwnedBuffer>(&mut self, token: u64) -> (B, WorkSuccess) {
        let ended = next(&mut self.event_loop);
        assert_eq!(ended.token, token);
        let success = ended.result().unwrap();
        (ended.buffer.downcast().unwrap(), success)
    }

    /// Posts on the first channel, and waits until it has ended.
    #[track_caller]
    pub(crate) fn run<R: WorkRequest<Kept: OwnedBuffer>>(&mut self, request: R) -> R::Kept {
        self.post(request);
        self.ended(1).0
    }

    /// Returns the buffers of the send and of the receive of a message, which may end in either order.
    #[track_caller]
    pub(crate) fn message<S: OwnedBuffer, R: OwnedBuffer>(&mut self) -> (S, R, WorkSuccess) {
        let mut both = [next(&mut self.event_loop), next(&mut self.event_loop)];
        both.sort_by_key(|ended| ended.token);
        let [sent, received] = both;
        sent.result().unwrap();
        let success = received.result().unwrap();
        (sent.buffer.downcast().unwrap(), received.buffer.downcast().unwrap(), success)
    }
}

const CHUNKS: usize = 8;

fn filled(pool: &BufferPool, byte: u8) -> PooledBuffer {
    pool.take_from(&vec![byte; pool.chunk_len()]).unwrap().unwrap()
}

#[test]
fn every_kind_of_operation_and_of_buffer() {
    let pair = Pair::new();
    let mut both = Both::new(&pair.domain);
    let target = pair.shared(4);
    target.write(0, &[1, 2, 3, 4]).unwrap();
    let shared = Arc::new(SharedMemoryRegion::<u64>::new(&pair.domain, 8, ALL).unwrap());

    let range = SharedMemoryRange::new(shared.clone(), 2..4).unwrap();
    both.run(ReadWorkRequest::new(range, target.remote_range(1..3).unwrap()));
    assert_eq!(shared.to_vec(), [0, 0, 2, 3, 0, 0, 0, 0]);

    let mut region = Box::new(MemoryRegion::<u64>::new(&pair.domain, 2).unwrap());
    region.copy_from_slice(&[8, 9]);
    let written = both.run(WriteWorkRequest::new(region, target.remote_range(..2).unwrap()));
    assert_eq!(written[..], [8, 9]);
    assert_eq!(target.to_vec(), [8, 9, 3, 4]);

    let word = |at| SharedMemoryRange::new(shared.clone(), at..=at).unwrap();
    let last = target.remote_range(3..).unwrap();
    both.run(FetchAddWorkRequest::new(word(0), last, 10));
    both.run(CompareSwapWorkRequest::new(word(1), last, 14, 99));
    assert_eq!((shared.read_one(0).unwrap(), shared.read_one(1).unwrap()), (4, 14));
    assert_eq!(target.read_one(3).unwrap(), 99);
    drop((both, written, shared, target));
    pair.finish();
}

#[test]
fn immediates_arrive_with_a_message_and_after_a_write() {
    let pair = Pair::new();
    let mut both = Both::new(&pair.domain);
    let pool = BufferPool::new(&pair.domain, 16, CHUNKS, AccessFlags::empty()).unwrap();
    let target = pair.shared(2);
    both.receive(filled(&pool, 0));
    let mut message = filled(&pool, 7);
    message.set_len(5).unwrap();
    both.post(SendWorkRequest::new(message).immediate(0xfeed_beef));
    let (sent, received, success) = both.message::<PooledBuffer, PooledBuffer>();
    assert_eq!(sent[..], [7; 5]);
    assert_eq!((success.byte_len(), success.immediate()), (5, Some(0xfeed_beef)));
    assert_eq!(received[..], [7; 5]);

    // A write's bytes go where it says. The receive tells that they are there, and its buffer stays as it is.
    both.receive(filled(&pool, 1));
    both.post(WriteWorkRequest::new(filled(&pool, 9), target.remote()).immediate(78));
    let (written, untouched, success) = both.message::<PooledBuffer, PooledBuffer>();
    assert_eq!(written[..], [9; 16]);
    assert_eq!((&untouched[..], success.immediate()), (&[1; 16][..], Some(78)));
    assert_eq!(target.to_vec(), [u64::from_ne_bytes([9; 8]); 2]);
    drop((both, sent, written, received, untouched));
    assert_eq!(pool.available(), CHUNKS);
    drop((pool, target));
    pair.finish();
}

#[test]
fn a_region_that_moves_into_an_operation_is_written_by_a_receive_and_by_a_read() {
    let pair = Pair::new();
    let mut both = Both::new(&pair.domain);
    let target = pair.shared(2);
    target.write(0, &[3, 4]).unwrap();
    let new = |len| Box::new(MemoryRegion::<u64>::new(&pair.domain, len).unwrap());
    let (received, mut sent) = (new(3), new(2));
    sent.copy_from_slice(&[1, 2]);
    let address = received.as_ptr();
    both.receive(received);
    both.post(SendWorkRequest::new(sent));
    let (sent, received, success) =
        both.message::<Box<MemoryRegion<u64>>, Box<MemoryRegion<u64>>>();
    assert_eq!((success.byte_len(), &received[..], &sent[..]), (16, &[1, 2, 0][..], &[1, 2][..]));
    assert_eq!(received.as_ptr(), address, "it is the same memory");
    let mut read = both.run(ReadWorkRequest::new(sent, target.remote()));
    assert_eq!(read[..], [3, 4]);
    // The memory is the program's own again.
    read[0] = 5;
    let read = both.run(WriteWorkRequest::new(read, target.remote()));
    assert_eq!(target.to_vec(), [5, 4]);
    read.close().map_err(drop).unwrap();
    drop((both, received, target));
    pair.finish();
}

/// Sends from each chunk of a pool of huge pages to another one, and looks at every byte.
fn exchange_in_huge_pages(pair: &Pair, pool: &BufferPool) {
    let first = pool.take().unwrap();
    assert!(first.as_ptr().addr().is_multiple_of(HugePages::Size2MiB.bytes()));
    let mut both = Both::new(&pair.domain);
    both.receive(first);
    for byte in 1..=pool.chunks() as u8 - 1 {
        both.post(SendWorkRequest::new(filled(pool, byte)));
        let (_sent, received, success) = both.message::<PooledBuffer, PooledBuffer>();
        assert_eq!(success.byte_len() as usize, pool.chunk_len());
        assert!(received.iter().all(|&found| found == byte));
        both.receive(received);
    }
    drop(both);
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
    let pair = Pair::new();
    // Three of the chunks are on two pages each, and all are on four.
    let (len, chunks) = ((1 << 20) + 64, 7);
    let pool =
        |pages| BufferPool::new(&pair.domain, len, chunks, RegionOptions::new().huge_pages(pages));
    let transparent = pool(HugePages::Transparent).unwrap();
    let before = free_huge_pages();
    let set_aside = pool(HugePages::Size2MiB);
    let after = free_huge_pages();
    exchange_in_huge_pages(&pair, &transparent);
    match set_aside {
        Ok(pool) => exchange_in_huge_pages(&pair, &pool),
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
                        buffer.extend_from_slice(&mark).unwrap();
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
    let elsewhere = RegionOptions::from(none).iova(0);
    let error = BufferPool::new(&pair.domain, 8, 8, elsewhere).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
    let mut buffer = new(8, 1, none).unwrap().take().unwrap();
    buffer.extend_from_slice(b"four").unwrap();
    assert!(buffer.set_len(9).is_err() && buffer.extend_from_slice(&[0; 5]).is_err());
    assert_eq!(buffer[..], *b"four");
    drop(buffer);
    let error = new(8, 1, none).unwrap().take_from(&[0; 9]).unwrap_err();
    assert!(error.to_string().contains("the length of a pooled buffer is 9"), "{error}");
    pair.finish();
}

#[test]
fn a_cache_keeps_what_is_given_back_to_it_as_far_as_it_may() {
    let pair = Pair::new();
    let pool = || BufferPool::new(&pair.domain, 8, 70, AccessFlags::empty()).unwrap();
    let (pool, other) = (pool(), pool());
    let mut cache = BufferCache::new(&pool);
    let mut buffer = cache.take().unwrap();
    buffer.extend_from_slice(b"secret").unwrap();
    let chunk = buffer.spare_capacity_mut().as_ptr();
    cache.give_back(buffer);
    assert_eq!(pool.available(), 69, "the pool does not have it");
    let mut again = cache.take().unwrap();
    assert_eq!((again.len(), again.spare_capacity_mut().as_ptr()), (0, chunk.wrapping_sub(6)));
    // A chunk of another pool, which may have another length, is not kept.
    cache.give_back(other.take().unwrap());
    assert_eq!((other.available(), cache.take().is_some()), (70, true));
    // Nor are more than 64.
    let all: Vec<_> = std::iter::from_fn(|| cache.take()).collect();
    assert_eq!((all.len(), pool.available()), (69, 0), "one is taken");
    for buffer in all {
        cache.give_back(buffer);
    }
    assert_eq!(pool.available(), 69 - 64);
    drop((cache, again));
    assert_eq!(pool.available(), 70);
    drop((pool, other));
    pair.finish();
}

/// Each case is a process of its own, whose standard error is read.
#[cfg(debug_assertions)]
#[test]
fn a_debug_build_says_that_bytes_beyond_the_length_are_not_sent() {
    const SAYS: &str = "after `spare_capacity_mut` without `set_len`";
    const CASES: [(&str, usize); 6] =
        [("empty", 1), ("appended", 1), ("set", 0), ("cleared", 0), ("received", 0), ("other", 0)];
    if let Ok(case) = std::env::var("IBVERBS_TEST_SPARE") {
        let pair = Pair::new();
        let pool = BufferPool::new(&pair.domain, 8, 2, AccessFlags::empty()).unwrap();
        let mut both = Both::new(&pair.domain);
        let mut message = |from: PooledBuffer, to: PooledBuffer| {
            both.receive(to);
            both.post(SendWorkRequest::new(from));
            let (sent, received, _) = both.message::<PooledBuffer, PooledBuffer>();
            (sent, received)
        };
        let [mut buffer, mut other] = [(); 2].map(|()| pool.take().unwrap());
        if case == "appended" {
            buffer.extend_from_slice(b"ab").unwrap();
        }
        buffer.spare_capacity_mut()[..2].copy_from_slice(b"hi");
        match &*case {
            "set" => buffer.set_len(2).unwrap(),
            "cleared" => buffer.clear(),
            "received" => (other, buffer) = message(other, buffer),
            "other" => {
                drop(buffer);
                buffer = pool.take().unwrap();
            }
            _ => {}
        }
        for _ in 0..2 {
            (buffer, other) = message(buffer, other);
        }
        drop((buffer, other, both, pool));
        return pair.finish();
    }
    for (case, says) in CASES {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let name = "pools::a_debug_build_says_that_bytes_beyond_the_length_are_not_sent";
        child.args(["--exact", "--nocapture", name]).env("IBVERBS_TEST_SPARE", case);
        let output = child.output().unwrap();
        assert!(output.status.success(), "{case}: {output:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(said.matches(SAYS).count(), says, "{case}: {said}");
    }
}
