//! No number from the caller aborts the process: a size that the heap cannot provide is a typed error.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use ibverbs::*;
use ibverbs_function_device::{FunctionDevice, Kind};

/// Refuses allocations of the current thread from a given size on.
struct Limited;

thread_local! {
    static LIMIT: Cell<usize> = const { Cell::new(usize::MAX) };
}

// SAFETY: what is not refused is left to the system's allocator.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() >= LIMIT.get() {
            return std::ptr::null_mut();
        }
        // SAFETY: as the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Limited = Limited;

/// Runs `f` on a heap that gives less than `limit` bytes at a time.
fn with_less_than<R>(limit: usize, f: impl FnOnce() -> R) -> R {
    LIMIT.set(limit);
    let result = f();
    LIMIT.set(usize::MAX);
    result
}

#[track_caller]
fn refused<T>(result: Result<T>) {
    let Err(error) = result else { panic!("there is no memory for it") };
    assert_eq!((error.raw_os_error(), error.kind()), (Some(libc::ENOMEM), ErrorKind::Resource));
    assert!(error.to_string().contains("no memory for"), "{error}");
}

#[test]
fn a_region_without_memory_is_a_typed_error() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    // Below 1 MiB it comes from the heap.
    let size = (1 << 20) - 64;
    with_less_than(size, || {
        refused(domain.allocate::<u8>(size));
        refused(domain.allocate_shared::<u64>(size / 8, AccessFlags::REMOTE_READ));
    });
    assert_eq!(device.calls("reg_mr"), 0);
    domain.allocate::<u8>(size).unwrap().close().unwrap();
    // Nobody has memory at a multiple of these: addresses of a process are below 2^47.
    for alignment in [1 << 48, 1 << 56, 1 << 62] {
        for size in [8, 1 << 20] {
            refused(domain.allocate_with::<u8>(size, RegionOptions::new().alignment(alignment)));
            let options = RegionOptions::new().alignment(alignment).page_aligned();
            refused(domain.allocate_with::<u8>(size, options));
        }
    }
    assert!(domain.allocate_with::<u8>(8, RegionOptions::new().alignment(1 << 63)).is_err());
    drop(domain);
    drop(context);
    device.assert_clean();
}

#[test]
fn a_channel_without_memory_is_a_typed_error() {
    let device = FunctionDevice::model();
    let context = Arc::new(device.context());
    let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
    let most = context.query_device().unwrap().max_qp_wr().min(1000);
    let build = || Channel::builder(&domain).max_send_wr(most).max_recv_wr(most).build();
    with_less_than(most as usize * 48, || refused(build()));
    assert_eq!(device.calls("create_qp"), 0);
    drop(build().unwrap());
    drop((domain, context));
    device.assert_clean();
}

#[test]
fn a_pool_without_memory_is_a_typed_error() {
    let device = FunctionDevice::model();
    let domain = Arc::new(ProtectionDomain::new(Arc::new(device.context())).unwrap());
    let new = |len, chunks| BufferPool::new(&domain, len, chunks, AccessFlags::empty());
    // Below 1 MiB, the chunks come from the heap.
    with_less_than((1 << 20) - 64, || refused(new(64, (1 << 14) - 1)));
    assert_eq!(device.calls("reg_mr"), 0);
    // Of many chunks, only what tells the free ones does.
    let chunks = 1 << 16;
    with_less_than(chunks / 8, || refused(new(64, chunks)));
    assert_eq!((device.calls("reg_mr"), device.calls("dereg_mr")), (1, 1));
    let pool = new(64, chunks).unwrap();
    assert_eq!(pool.available(), chunks);
    drop((pool, domain));
    device.assert_clean();
}

#[test]
fn an_asynchronous_channel_without_memory_is_a_typed_error_and_the_reactor_goes_on() {
    let device = FunctionDevice::model();
    let context = Arc::new(device.context());
    let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
    let most = context.query_device().unwrap().max_qp_wr().min(1000);
    let reactor = Reactor::new(&context, 4 * most).unwrap();
    let prepare = || {
        reactor.prepare(Channel::builder(&domain).max_send_wr(most).max_recv_wr(most)).map(|one| {
            let itself = one.endpoint();
            one.handshake(itself).unwrap()
        })
    };
    let first = prepare().unwrap();
    let (_, room) = reactor.capacity();
    with_less_than(most as usize * 48, || refused(prepare()));
    assert_eq!((reactor.capacity().1, device.live(Kind::QueuePair)), (room, 1));
    reactor.turn().unwrap();
    let second = prepare().unwrap();
    assert_eq!(reactor.capacity().1, 0);
    drop((first, second));
    reactor.turn().unwrap();
    assert_eq!(reactor.capacity().1, 4 * most);
    drop((reactor, domain, context));
    device.assert_clean();
}
