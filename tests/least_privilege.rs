//! A peer gets nothing that the program has not asked for: no access, no keys, no old contents of the heap.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use ibverbs::memory::{
    BorrowedMemoryRegion, MemoryWindowType, RawMemoryRegion, ReadOnlyMemoryRegion,
};
use ibverbs::*;
use ibverbs_function_device::FunctionDevice;

/// Fills memory with bytes as earlier users would leave them, and looks at the memory when it is freed.
struct Dirty;

/// The address of a block that is watched, and what was in it when it was freed: bytes that are not
/// zero, and one more.
static WATCHED: AtomicUsize = AtomicUsize::new(0);
static FOUND: AtomicUsize = AtomicUsize::new(0);

// SAFETY: memory is that of the system's allocator; only contents are changed that nobody has
// written yet, and contents are read that are still there.
unsafe impl GlobalAlloc for Dirty {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract is the same; fresh memory of that size is writable.
        unsafe {
            let memory = System.alloc(layout);
            if !memory.is_null() {
                memory.write_bytes(0xa5, layout.size());
            }
            memory
        }
    }

    // `alloc_zeroed` is the default: the above, and then zeros.

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        if memory as usize == WATCHED.load(Ordering::Relaxed) {
            // SAFETY: regions are initialised, and this block is one's.
            let dirty = (0..layout.size()).filter(|&at| unsafe { memory.add(at).read() } != 0);
            FOUND.store(dirty.count() + 1, Ordering::Relaxed);
        }
        // SAFETY: the caller's contract is the same.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Dirty = Dirty;

/// Only one block is watched at a time.
static ONE: Mutex<()> = Mutex::new(());

/// How many bytes that are not zero were in the block at `address` when `free` freed it; `None` if it
/// was not given back to the heap.
fn left(address: *const u8, free: impl FnOnce()) -> Option<usize> {
    FOUND.store(0, Ordering::Relaxed);
    WATCHED.store(address as usize, Ordering::Relaxed);
    free();
    WATCHED.store(0, Ordering::Relaxed);
    FOUND.load(Ordering::Relaxed).checked_sub(1)
}

#[test]
fn the_heap_is_dirty_and_its_blocks_are_watched() {
    let _one = ONE.lock().unwrap();
    let mut block = Vec::<u8>::with_capacity(100);
    let at_first: Vec<_> = block.spare_capacity_mut().iter().map(|byte| byte.as_ptr()).collect();
    // SAFETY: the allocator has written it.
    assert!(at_first.into_iter().all(|byte| unsafe { byte.read() } == 0xa5));
    block.resize(100, 0);
    block[7] = 1;
    assert_eq!(left(block.as_ptr(), || drop(block)), Some(1));
}

/// Sizes that come from the heap, and sizes that come in pages.
const SIZES: [usize; 6] = [1, 63, 4096, 100_000, (1 << 20) - 1, (1 << 20) + 1];

#[test]
fn fresh_memory_is_zero_and_freed_memory_was_wiped() {
    let _one = ONE.lock().unwrap();
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    for size in SIZES {
        let is_heap = size < 1 << 20;
        for closed in [false, true] {
            let mut region = domain.allocate::<u8>(size).unwrap();
            assert!(region.iter().all(|&byte| byte == 0), "{size}");
            region.fill(0x5a);
            let found =
                left(
                    region.as_ptr(),
                    || {
                        if closed { region.close().unwrap() } else { drop(region) }
                    },
                );
            assert_eq!(found, is_heap.then_some(0), "{size}");

            let region = domain.allocate_shared::<u8>(size, AccessFlags::REMOTE_READ).unwrap();
            assert!(region.to_vec().iter().all(|&byte| byte == 0), "{size}");
            region.fill(0x5a);
            let found = left(region.as_slice().as_ptr().cast(), || {
                if closed { region.close().unwrap() } else { drop(region) }
            });
            assert_eq!(found, is_heap.then_some(0), "{size}");
        }
    }
    // Memory that could not be deregistered is not given back: the device may still use it.
    for size in SIZES {
        let mut region = domain.allocate::<u8>(size).unwrap();
        region.fill(0x5a);
        let address = region.as_ptr();
        device.fail("dereg_mr").errno(libc::EIO).times(1);
        assert_eq!(left(address, || drop(region)), None, "{size}");
        // SAFETY: it was leaked.
        assert_eq!(unsafe { address.read() }, 0x5a);
    }
}

/// A peer's device reaches nothing of the program but the content of the region.
#[test]
fn nothing_else_is_within_a_region() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    for size in SIZES {
        let region = domain.allocate_shared::<u8>(size, AccessFlags::REMOTE_READ).unwrap();
        let call = device.last_call("reg_mr").unwrap();
        assert_eq!((call.addr, call.length), (region.as_slice().as_ptr() as u64, size as u64));
        let remote = region.remote();
        assert_eq!((remote.address(), remote.length()), (call.addr, size as u64));
    }
}

const PEERS: AccessFlags = AccessFlags::REMOTE_READ
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_ATOMIC)
    .union(AccessFlags::FLUSH_GLOBAL)
    .union(AccessFlags::FLUSH_PERSISTENT);

#[test]
fn access_is_local_unless_asked_for() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let granted = || AccessFlags::from_bits_retain(device.last_call("reg_mr").unwrap().access);
    assert_eq!(AccessFlags::default(), AccessFlags::LOCAL_WRITE);

    let mut memory = [0_u8; 64];
    drop(domain.allocate::<u8>(64).unwrap());
    assert_eq!(granted(), AccessFlags::LOCAL_WRITE);
    drop(domain.register(&mut memory).unwrap());
    assert_eq!(granted(), AccessFlags::LOCAL_WRITE);
    drop(domain.register_read_only(&memory).unwrap());
    assert_eq!(granted(), AccessFlags::empty());
    drop(domain.allocate_shared::<u8>(64, RegionOptions::new()).unwrap());
    assert_eq!(granted(), AccessFlags::LOCAL_WRITE);
    // One right is requested, and only that one is granted.
    for access in PEERS.iter() {
        let asked = access | AccessFlags::REMOTE_WRITE;
        let region = domain.allocate_shared::<u8>(64, asked);
        if let Ok(region) = region {
            assert_eq!(granted(), asked | AccessFlags::LOCAL_WRITE);
            drop(region);
        }
        // Memory that can be seen as `&[T]` is never open to peers, whatever is requested.
        let calls = device.calls("reg_mr");
        assert!(
            MemoryRegion::<u8>::with_options(&domain, 64, RegionOptions::from(access)).is_err(),
            "{access:?}"
        );
        assert!(BorrowedMemoryRegion::with_access(&domain, &mut memory, access).is_err());
        assert!(ReadOnlyMemoryRegion::with_access(&domain, &memory, access).is_err());
        assert_eq!(device.calls("reg_mr"), calls);
    }
}

#[test]
fn queue_pairs_allow_nothing_but_sends_unless_asked() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(8).unwrap();
    let kind = Rc;
    // INIT is the first of the three steps.
    let granted = || {
        let call = device.call_before("modify_qp", 2).unwrap();
        assert_eq!(call.qp_attr.qp_state, ffi::ibv_qp_state::IBV_QPS_INIT);
        AccessFlags::from_bits_retain(call.qp_attr.qp_access_flags) & PEERS
    };
    let prepared = domain.create_qp(&queue, &queue, kind).build().unwrap();
    let itself = prepared.endpoint();
    drop(prepared.handshake(itself).unwrap());
    assert_eq!(granted(), AccessFlags::empty());
    let prepared = domain.create_qp(&queue, &queue, kind).allow_remote_rw().build().unwrap();
    let itself = prepared.endpoint();
    drop(prepared.handshake(itself).unwrap());
    assert_eq!(granted(), AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE);
    let prepared = domain.create_channel().build().unwrap();
    let itself = prepared.endpoint();
    drop(prepared.handshake(itself).unwrap());
    assert_eq!(granted(), AccessFlags::empty());
}

/// Only `RemoteMemoryRegion` contains an rkey: no log output does, nor the endpoints that a program exchanges
/// to connect.
#[test]
fn rkeys_are_in_remote_regions_only() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let mut memory = [0_u8; 64];
    let region = domain.allocate_shared::<u8>(64, AccessFlags::REMOTE_READ).unwrap();
    // SAFETY: nothing else uses the memory for as long as the region is there.
    let raw =
        unsafe { RawMemoryRegion::new(&domain, memory.as_mut_ptr(), 64, AccessFlags::REMOTE_READ) };
    let raw = raw.unwrap();
    let window = domain.alloc_mw(MemoryWindowType::Type1).unwrap();
    let channel = domain.create_channel().build().unwrap();
    for (key, region) in [(region.rkey(), region.remote()), (raw.rkey(), raw.remote())] {
        assert_eq!(region.rkey(), key);
        assert!(format!("{region:?}").contains(&format!("rkey: {key:#x}")), "{region:?}");
    }
    let texts = [
        format!("{region:?} {region:#?}"),
        format!("{:?}", region.as_slice()),
        format!("{raw:?}"),
        format!("{window:?}"),
        format!("{domain:?} {context:?}"),
        format!("{channel:?}"),
        format!("{} {:?}", channel.endpoint(), channel.endpoint()),
    ];
    for key in [region.rkey(), raw.rkey(), window.rkey()] {
        for text in &texts {
            assert!(!text.contains(&format!("{key:#x}")), "{key:#x}: {text}");
            assert!(!text.contains("key"), "{text}");
        }
    }
}
