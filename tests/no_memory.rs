//! No number from the caller aborts the process: a size that the heap cannot provide is a typed error.

#[path = "support/by_hand.rs"]
mod by_hand;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::pin::pin;
use std::sync::Arc;

use ibverbs::{
    AccessFlags, AsyncChannel, BufferPool, Channel, ErrorKind, MemoryRegion, OperationError,
    PooledBuffer, ProtectionDomain, Reactor, RegionOptions, Result, TransportError,
};
use ibverbs_function_device::{FunctionDevice, Kind, Progress};

use by_hand::{Count, poll_in};

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
    // Memory at a multiple of these cannot exist: addresses of a process are below 2^47.
    for alignment in [1 << 48, 1 << 56, 1 << 62] {
        for size in [8, 1 << 20] {
            refused(MemoryRegion::<u8>::with_options(
                &domain,
                size,
                RegionOptions::new().alignment(alignment),
            ));
            let options = RegionOptions::new().alignment(alignment).page_aligned();
            refused(MemoryRegion::<u8>::with_options(&domain, size, options));
        }
    }
    assert!(
        MemoryRegion::<u8>::with_options(&domain, 8, RegionOptions::new().alignment(1 << 63))
            .is_err()
    );
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
    // A pool of many chunks takes only its list of the free chunks from the heap.
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

/// How many tasks wait in a test: lists of that many are not there yet.
const TASKS: usize = 256;

/// A channel that is connected to itself, on a device that does nothing until it is told to.
struct Futures {
    channel: AsyncChannel,
    reactor: Reactor,
    pool: BufferPool,
    device: FunctionDevice,
    count: Arc<Count>,
}

impl Futures {
    fn new() -> Self {
        let device = FunctionDevice::model();
        device.progress(Progress::Manual);
        let domain = Arc::new(ProtectionDomain::new(Arc::new(device.context())).unwrap());
        let reactor = Reactor::new(domain.context_parent(), 4 * TASKS as u32).unwrap();
        let depth = TASKS as u32;
        let prepared = reactor
            .prepare(Channel::builder(&domain).max_send_wr(depth).max_recv_wr(depth))
            .unwrap();
        let itself = prepared.endpoint();
        let channel = prepared.handshake(itself).unwrap();
        let pool = BufferPool::new(&domain, 8, 4 * TASKS, AccessFlags::empty()).unwrap();
        Self { channel, reactor, pool, device, count: Arc::default() }
    }

    fn buffer(&self) -> PooledBuffer {
        self.pool.take_from(&[0; 8]).unwrap().unwrap()
    }

    /// A place in line that there is no memory for.
    #[track_caller]
    fn finds_no_place<T>(
        &self,
        poll: Option<std::result::Result<T, OperationError<PooledBuffer>>>,
    ) {
        let Some(Err(failed)) = poll else { panic!("there is no memory for it") };
        let TransportError::Verbs(error) = failed.error else { panic!("{}", failed.error) };
        assert_eq!((error.raw_os_error(), error.kind()), (Some(libc::ENOMEM), ErrorKind::Resource));
        drop(failed);
    }

    #[track_caller]
    fn finish(self) {
        let Self { channel, reactor, pool, device, count } = self;
        drop(channel);
        assert_eq!((pool.available(), Arc::strong_count(&count)), (pool.chunks(), 1));
        drop((reactor, pool));
        device.assert_clean();
    }
}

#[test]
fn a_task_without_memory_for_its_place_in_line_gets_an_error_and_its_buffer() {
    let rig = Futures::new();
    let mut sends: Vec<_> = (0..TASKS).map(|_| rig.channel.send(rig.buffer())).collect();
    assert!(sends.iter_mut().all(|send| poll_in(send, &rig.count).is_none()));
    let mut more = rig.channel.send(rig.buffer());
    with_less_than(64, || rig.finds_no_place(poll_in(&mut more, &rig.count)));
    assert_eq!(rig.pool.available(), rig.pool.chunks() - TASKS, "its buffer came back");
    // A receive that was posted is for the next task.
    let mut receive = rig.channel.receive(rig.buffer());
    with_less_than(64, || rig.finds_no_place(poll_in(&mut receive, &rig.count)));
    assert_eq!(rig.channel.in_flight(), TASKS + 1);
    let mut next = rig.channel.receive(rig.buffer());
    assert!(poll_in(&mut next, &rig.count).is_none());
    assert_eq!(rig.channel.in_flight(), TASKS + 1);
    with_less_than(64, || {
        // `next` has made the list of waiting tasks grow by several entries, so this task needs no memory.
        assert!(poll_in(&mut pin!(rig.channel.next_message()), &rig.count).is_none());
    });
    rig.device.run();
    while rig.reactor.turn().unwrap() > 0 {}
    assert!(matches!(poll_in(&mut next, &rig.count), Some(Ok(_))));
    drop((next, receive, more, sends));
    rig.finish();
}

/// Without memory for the list of those that are to be woken, all are woken.
#[test]
fn every_task_is_woken_and_every_buffer_comes_back_without_memory() {
    for cancelled in [false, true] {
        let rig = Futures::new();
        let mut sends: Vec<_> = (0..TASKS).map(|_| rig.channel.send(rig.buffer())).collect();
        assert!(sends.iter_mut().all(|send| poll_in(send, &rig.count).is_none()));
        let counts: Vec<_> = (0..TASKS).map(|_| Arc::new(Count::default())).collect();
        let mut line: Vec<_> = counts.iter().map(|_| rig.channel.send(rig.buffer())).collect();
        for (send, count) in line.iter_mut().zip(&counts) {
            assert!(poll_in(send, count).is_none());
        }
        if cancelled {
            sends.clear();
            assert_eq!(rig.pool.available(), rig.pool.chunks() - 2 * TASKS);
        }
        // All that are in line wait for it, and all that are in flight.
        with_less_than(16, || rig.reactor.stop(TransportError::Stopped));
        assert!(counts.iter().all(|count| count.get() > 0));
        if cancelled {
            assert_eq!(rig.pool.available(), rig.pool.chunks() - TASKS);
        } else {
            assert_eq!(rig.count.get(), TASKS);
        }
        for send in &mut line {
            let Some(Err(failed)) = poll_in(send, &rig.count) else { panic!("it is stopped") };
            assert_eq!(failed.error, TransportError::Stopped);
        }
        drop((sends, line));
        rig.finish();
    }
}
