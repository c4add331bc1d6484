//! Memory that this program did not allocate, or shares with other processes, as the buffers of operations.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, FromRawFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ibverbs::memory::{
    MemoryRange, RawMemoryRange, RawMemoryRegion, RegionBuffer, SharedMemory, SharedMemoryRange,
};
use ibverbs::{
    AccessFlags, FetchAddWorkRequest, ReadWorkRequest, RegionOptions, SendWorkRequest,
    SharedMemoryRegion, WriteWorkRequest,
};

use crate::pair::{ALL, Pair};
use crate::pools::Both;

const PAGE: usize = 4096;

fn arena(pair: &Pair, access: AccessFlags) -> Arc<RawMemoryRegion<'static>> {
    let arena: &'static mut [u64] = Box::leak(vec![0; 2 * PAGE / 8].into_boxed_slice());
    // SAFETY: the memory is never freed, and accessed by the region alone from now on.
    let region =
        unsafe { RawMemoryRegion::new(&pair.domain, arena.as_mut_ptr().cast(), 2 * PAGE, access) };
    Arc::new(region.unwrap())
}

#[test]
fn a_range_of_a_raw_region_is_a_buffer_of_every_operation() {
    let pair = Pair::new();
    let mut both = Both::new(&pair.domain);
    let region = arena(&pair, ALL);
    let target = pair.shared(4);
    target.write(0, &[1, 2, 3, 4]).unwrap();
    let range = |range| RawMemoryRange::new(region.clone(), range).unwrap();
    both.run(ReadWorkRequest::new(range(8..24), target.remote_range(1..3).unwrap()));
    let written = both.run(WriteWorkRequest::new(range(16..24), target.remote_range(..1).unwrap()));
    assert_eq!((target.to_vec(), written.byte_len()), (vec![3, 2, 3, 4], 8));
    both.run(FetchAddWorkRequest::new(range(0..8), target.remote_range(3..).unwrap(), 5));
    both.run(WriteWorkRequest::new(range(0..8), target.remote_range(..1).unwrap()).inline());
    assert_eq!(target.to_vec(), [4, 2, 3, 9]);

    // All of it.
    let long = Arc::new(SharedMemoryRegion::<u8>::new(&pair.domain, 2 * PAGE, ALL).unwrap());
    let back = both.run(WriteWorkRequest::new(region.clone(), long.remote()));
    assert!(Arc::ptr_eq(&back, &region));
    assert_eq!(long.slice(8..24).unwrap().to_vec(), [2_u64, 3].map(u64::to_ne_bytes).concat());
    both.run(ReadWorkRequest::new(long.clone(), region.remote()));
    drop((back, long));

    // Its own bytes, for a peer.
    both.run(WriteWorkRequest::new(range(0..8), range(4096..4104).remote()));
    both.receive(range(PAGE + 8..PAGE + 24));
    both.post(SendWorkRequest::new(range(PAGE..PAGE + 8)));
    let (_, received, success) = both.message::<RawMemoryRange, RawMemoryRange>();
    assert_eq!((success.byte_len(), received.byte_len()), (8, 16));
    let back = both.run(WriteWorkRequest::new(range(PAGE + 8..PAGE + 16), target.remote()));
    assert_eq!(target.to_vec(), [4, 2, 3, 9]);
    drop((both, written, received, back, range));
    // The buffers that came back have kept nothing.
    Arc::into_inner(region).expect("the last").close().unwrap();
    drop(target);
    pair.finish();
}

#[test]
fn ranges_are_checked_when_they_are_made_and_writes_when_they_are_posted() {
    let pair = Pair::new();
    let mut both = Both::new(&pair.domain);
    let region = arena(&pair, AccessFlags::REMOTE_READ);
    assert!(RawMemoryRange::new(region.clone(), 1..2 * PAGE + 1).is_err());
    #[expect(clippy::reversed_empty_ranges, reason = "that is the bad input")]
    let reversed = RawMemoryRange::new(region.clone(), 2..1);
    assert!(reversed.is_err() && RawMemoryRange::new(region.clone(), ..=usize::MAX).is_err());
    let target = pair.shared(1);
    let range = RawMemoryRange::new(region.clone(), ..8).unwrap();
    let (id, read) = (both.one, ReadWorkRequest::new(range.clone(), target.remote()));
    let refused = both.event_loop.post(id, read, 1).unwrap_err();
    assert!(refused.error.to_string().contains("LOCAL_WRITE"), "{}", refused.error);
    drop(refused);
    both.run(WriteWorkRequest::new(range, target.remote()));

    // Requests do not see it at its own address.
    let options = RegionOptions::from(ALL).iova(0);
    let at_zero = SharedMemory::from(RegionBuffer::new(PAGE, options).unwrap());
    let at_zero = Arc::new(at_zero.register(&pair.domain, .., options).unwrap());
    assert!(MemoryRange::new(at_zero.clone(), ..).is_err());
    drop((both, region, target, at_zero));
    pair.finish();
}

fn memfd(bytes: usize, seals: i32) -> File {
    // SAFETY: the name is a C string; the descriptor that comes back is ours.
    let file = unsafe {
        File::from_raw_fd(libc::memfd_create(c"arena".as_ptr(), libc::MFD_ALLOW_SEALING))
    };
    file.set_len(bytes as u64).unwrap();
    // SAFETY: it changes the file's seals.
    assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) }, 0);
    file
}

#[test]
fn a_memfd_is_memory_that_processes_and_peers_share() {
    let pair = Pair::new();
    let mut both = Both::new(&pair.domain);
    let file = memfd(3 * PAGE, libc::F_SEAL_SHRINK);
    let ours = SharedMemory::map_memfd(file.as_fd(), PAGE as u64, 2 * PAGE).unwrap();
    let region = Arc::new(ours.register(&pair.domain, PAGE.., ALL).unwrap());
    drop(ours);
    let target = pair.shared(1);
    target.write(0, &[7]).unwrap();
    both.run(ReadWorkRequest::new(
        SharedMemoryRange::new(region.clone(), 8..16).unwrap(),
        target.remote(),
    ));
    // What another process would see.
    let mut seen = [0; 8];
    std::os::unix::fs::FileExt::read_exact_at(&file, &mut seen, 2 * PAGE as u64 + 8).unwrap();
    assert_eq!(u64::from_ne_bytes(seen), 7);
    std::os::unix::fs::FileExt::write_all_at(&file, &[9; 8], 2 * PAGE as u64).unwrap();
    assert_eq!(region.slice(..8).unwrap().to_vec(), [9; 8]);
    // Nobody can take the memory away, and it is no memory to have references into.
    assert!(file.set_len(PAGE as u64).is_err());
    drop((both, target));
    let region = Arc::into_inner(region).unwrap();
    assert_eq!(region.into_inner().unwrap_err().raw_os_error(), Some(libc::EBUSY));
    pair.finish();
}

#[test]
fn a_file_that_may_be_shrunk_under_its_mapping_is_refused() {
    let unsealed = memfd(PAGE, 0);
    let error = SharedMemory::map_memfd(unsealed.as_fd(), 0, PAGE).unwrap_err();
    assert!(error.to_string().contains("F_SEAL_SHRINK"), "{error}");
    let path = std::env::temp_dir().join(format!("ibverbs-{}", std::process::id()));
    let plain = File::create_new(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    plain.set_len(PAGE as u64).unwrap();
    assert!(SharedMemory::map_memfd(plain.as_fd(), 0, PAGE).is_err());

    let sealed = memfd(2 * PAGE, libc::F_SEAL_SHRINK);
    for (offset, len, words) in [
        (0, 2 * PAGE + 1, "the file ends"),
        (PAGE as u64, PAGE + 1, "the file ends"),
        (u64::MAX, 2, "the file ends"),
        (8, PAGE, "multiple of the page size"),
        (0, 0, "empty"),
    ] {
        let error = SharedMemory::map_memfd(sealed.as_fd(), offset, len).unwrap_err();
        assert!(error.to_string().contains(words), "{offset} {len}: {error}");
    }
    let no_writers = memfd(PAGE, libc::F_SEAL_SHRINK | libc::F_SEAL_WRITE);
    assert!(SharedMemory::map_memfd(no_writers.as_fd(), 0, PAGE).is_err());
}

struct Owner<'a> {
    #[expect(dead_code, reason = "it is freed with the owner")]
    memory: Box<[u8]>,
    drops: &'a AtomicUsize,
}

impl Drop for Owner<'_> {
    fn drop(&mut self) {
        self.drops.fetch_add(1, Ordering::SeqCst);
        panic!("of the program's own code");
    }
}

fn owned(drops: &'static AtomicUsize) -> SharedMemory {
    let mut memory = vec![5_u8; 2 * PAGE].into_boxed_slice();
    let address = NonNull::new(memory.as_mut_ptr()).unwrap();
    // SAFETY: the owner keeps the memory, and nothing else accesses it.
    unsafe { SharedMemory::from_raw(address, 2 * PAGE, Owner { memory, drops }) }.unwrap()
}

#[test]
fn the_owner_gets_its_memory_back_after_the_last_operation() {
    static DROPS: AtomicUsize = AtomicUsize::new(0);
    let pair = Pair::new();
    let mut both = Both::new(&pair.domain);
    let memory = owned(&DROPS);
    let region = memory.register(&pair.domain, 100..200, ALL).unwrap();
    let again = region.register_in(&pair.domain, ALL).unwrap();
    assert_eq!((again.len(), again.remote().address()), (100, region.remote().address()));
    assert!(memory.addresses().contains(&(region.remote().address() as usize)));
    assert!(memory.register(&pair.domain, 5..5, ALL).is_err());
    assert!(memory.register(&pair.domain, ..=2 * PAGE, ALL).is_err());
    let range = SharedMemoryRange::new(Arc::new(region), 50..58).unwrap();
    both.receive(range);
    drop((memory, again));
    assert_eq!(DROPS.load(Ordering::SeqCst), 0, "the receive has it");
    let pool = pair.shared(1);
    let message = SharedMemoryRange::new(Arc::new(pool), ..).unwrap();
    both.post(SendWorkRequest::new(message));
    let (sent, received, _) = both.message::<SharedMemoryRange<u64>, SharedMemoryRange<u8>>();
    assert_eq!(received.as_slice().unwrap().to_vec(), [0; 8]);
    drop(received);
    assert_eq!(DROPS.load(Ordering::SeqCst), 1);
    drop((both, sent));
    pair.finish();
}

#[test]
fn anonymous_memory_comes_back_from_its_only_part() {
    let pair = Pair::new();
    let memory = SharedMemory::from(RegionBuffer::new(2 * PAGE, RegionOptions::new()).unwrap());
    let [first, second] =
        [0..PAGE, PAGE..2 * PAGE].map(|range| memory.register(&pair.domain, range, ALL).unwrap());
    first.write(PAGE - 1, &[1]).unwrap();
    second.write(0, &[2]).unwrap();
    assert!(first.write(PAGE, &[3]).is_err());
    assert!(first.into_inner().is_err(), "others have it");
    drop(memory);
    let whole = second.into_inner().unwrap();
    assert_eq!((whole.len(), &whole[PAGE - 1..=PAGE]), (2 * PAGE, &[1, 2][..]));
    pair.finish();
}
