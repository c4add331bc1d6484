//! Once it is built, a channel never allocates: not when it posts, polls, waits, stores completions for other channels, or
//! fails.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use ibverbs::channel::AnyBuffer;
use ibverbs::{
    AccessFlags, BufferPool, Channel, ChannelId, CompareSwapWorkRequest, FetchAddWorkRequest,
    Inline, Loop, MemoryRegion, ProtectionDomain, Reactor, ReceiveWorkRequest, SendWorkRequest,
    SharedMemoryRegion, TransportError,
};
use ibverbs_function_device::FunctionDevice;

/// Counts what the current thread allocates.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
    static BYTES: Cell<isize> = const { Cell::new(0) };
}

// SAFETY: everything is left to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        BYTES.with(|bytes| bytes.set(bytes.get() + layout.size() as isize));
        // SAFETY: as the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        BYTES.with(|bytes| bytes.set(bytes.get() - layout.size() as isize));
        // SAFETY: as the caller's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// How often `f` allocates.
fn allocations(f: impl FnOnce()) -> usize {
    let before = ALLOCATIONS.with(Cell::get);
    f();
    ALLOCATIONS.with(Cell::get) - before
}

const ALL: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_ATOMIC);

struct Rig {
    one: Channel<'static>,
    two: Channel<'static>,
    domain: Arc<ProtectionDomain<'static>>,
}

impl Rig {
    fn new(device: &FunctionDevice) -> Self {
        let context = Arc::new(device.context());
        let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
        let builder = || Channel::builder(&domain).access(ALL).max_inline_data(16);
        let (one, two) = (builder().build().unwrap(), builder().build().unwrap());
        let (to_one, to_two) = (one.endpoint(), two.endpoint());
        let (one, two) = (one.handshake(to_two).unwrap(), two.handshake(to_one).unwrap());
        Self { one, two, domain }
    }
}

#[test]
fn nothing_is_allocated_per_operation() {
    assert_eq!(allocations(|| drop(std::hint::black_box(Box::new(1)))), 1, "it counts");
    {
        let device = FunctionDevice::model();
        let Rig { mut one, mut two, domain } = Rig::new(&device);
        let mut region = MemoryRegion::<u64>::new(&domain, 64).unwrap();
        let target = SharedMemoryRegion::<u64>::new(&domain, 64, ALL).unwrap();
        let remote = target.remote();
        let word = remote.sub_region(0, 8).unwrap();
        let mut round = || {
            let (mut one_half, mut other) = region.slice_mut(..).unwrap().split_at(32).unwrap();
            one.write(&one_half, remote).unwrap();
            one.write(Inline(&[1; 8]), word).unwrap();
            one.read(&mut one_half, remote).unwrap();
            let mut old = one_half.reborrow().slice(..1).unwrap();
            one.run(FetchAddWorkRequest::new(&mut old, word, 1)).unwrap();
            one.run(CompareSwapWorkRequest::new(&mut old, word, 1, 2)).unwrap();
            two.scope(|two| {
                let parts = other.reborrow().chunks(4)?;
                let mut receives = [const { None }; 8];
                for (receive, part) in receives.iter_mut().zip(parts) {
                    *receive = Some(two.post_receive(part)?);
                }
                one.scope(|one| {
                    // The program waits for the sends in reverse order: the table keeps the other completions.
                    let sends = [(); 8].map(|()| one.post_send(Inline(&[7; 8])).unwrap());
                    for send in sends.into_iter().rev() {
                        send.wait()?;
                    }
                    Ok::<_, TransportError>(())
                })
                .unwrap();
                for receive in receives.into_iter().rev().flatten() {
                    receive.wait()?;
                }
                Ok::<_, TransportError>(())
            })
            .unwrap();
            // SAFETY: there is no memory.
            let mut work = unsafe { two.post_unpolled(ReceiveWorkRequest::new(())) }.unwrap();
            assert!(work.poll(&mut two).is_none());
            one.send(()).unwrap();
            work.wait(&mut two).unwrap();
        };
        // The function device allocates memory of its own; the other allocator is not C's.
        assert_eq!(allocations(&mut round), 0);
        assert_eq!(allocations(|| (0..100).for_each(|_| round())), 0);
        let failing = || {
            let late = std::time::Instant::now();
            assert_eq!(two.until(late).receive(()).unwrap_err(), TransportError::TimedOut);
            two.scope(|s| s.post_send(()).map(drop)).unwrap_err();
        };
        assert_eq!(allocations(failing), 0);
    }
}

/// A loop of one channel, connected to itself.
fn looped(domain: &Arc<ProtectionDomain<'static>>) -> (Loop<'static, AnyBuffer>, ChannelId) {
    let mut event_loop = Loop::new(domain.context_parent(), 64).unwrap();
    let prepared = event_loop.create_channel(domain).access(ALL).build().unwrap();
    let itself = prepared.endpoint();
    let channel = event_loop.add(prepared.handshake(itself).unwrap()).unwrap();
    (event_loop, channel)
}

#[test]
fn an_operation_of_a_loop_allocates_nothing() {
    let device = FunctionDevice::model();
    let domain = Arc::new(ProtectionDomain::new(Arc::new(device.context())).unwrap());
    let pool = BufferPool::new(&domain, 64, 8, AccessFlags::empty()).unwrap();
    let (mut event_loop, channel) = looped(&domain);
    let mut round = || {
        let post = |of: &mut Loop<'static, AnyBuffer>| {
            of.post(channel, ReceiveWorkRequest::new(pool.take().unwrap()), 1).unwrap();
            of.post(channel, SendWorkRequest::new(pool.take_from(&[1; 8]).unwrap().unwrap()), 2)
                .unwrap();
            of.post(channel, ReceiveWorkRequest::new(()), 3).unwrap();
            of.post(channel, SendWorkRequest::new(()), 4).unwrap();
        };
        post(&mut event_loop);
        (0..4).for_each(|_| drop(event_loop.wait_ended().unwrap()));
    };
    round();
    assert_eq!(allocations(|| (0..100).for_each(|_| round())), 0);
}

#[test]
fn nothing_is_left_of_a_channel_and_its_loop() {
    let device = FunctionDevice::model();
    let round = || {
        let Rig { mut one, mut two, domain } = Rig::new(&device);
        // SAFETY: there is no memory.
        let late = unsafe { two.post_unpolled(ReceiveWorkRequest::new(())) }.unwrap();
        // SAFETY: as above.
        let _ = unsafe { one.post_unpolled(ReceiveWorkRequest::new(())) }.unwrap();
        one.send(()).unwrap();
        late.wait(&mut two).unwrap();
        let prepared = one.reset().map_err(|failed| failed.error).unwrap();
        let itself = prepared.endpoint();
        let one = prepared.handshake(itself).unwrap();
        let (mut event_loop, channel) = looped(&domain);
        let pool = BufferPool::new(&domain, 64, 8, AccessFlags::empty()).unwrap();
        let receive = ReceiveWorkRequest::new(pool.take().unwrap());
        event_loop.post(channel, receive, 1).unwrap();
        drop((one, two, event_loop));
    };
    // The first round makes what the process needs once.
    round();
    let before = BYTES.with(Cell::get);
    round();
    assert_eq!(BYTES.with(Cell::get), before);
}

fn ready<F: Future>(future: F, reactor: &Reactor) -> F::Output {
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        reactor.turn().unwrap();
    }
}

#[test]
fn a_future_that_is_ready_allocates_nothing() {
    let device = FunctionDevice::model();
    let context = Arc::new(device.context());
    let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
    let pool = BufferPool::new(&domain, 64, 8, AccessFlags::empty()).unwrap();
    let reactor = Reactor::new(&context, 128).unwrap();
    let prepare = || reactor.prepare(Channel::builder(&domain).access(ALL)).unwrap();
    let (one, two) = (prepare(), prepare());
    let (to_one, to_two) = (one.endpoint(), two.endpoint());
    let (one, two) = (one.handshake(to_two).unwrap(), two.handshake(to_one).unwrap());
    two.post_receive(pool.take().unwrap()).unwrap();
    let round = || {
        let (buffer, _) =
            ready(one.send(pool.take_from(&[1; 8]).unwrap().unwrap()), &reactor).unwrap();
        drop(buffer);
        drop(ready(two.receive(pool.take().unwrap()), &reactor).unwrap());
    };
    // The queues of receives get their size.
    (0..4).for_each(|_| round());
    assert_eq!(allocations(|| (0..100).for_each(|_| round())), 0);
}

/// The bytes that each of many idle channels of one reactor takes.
fn bytes_of_a_channel(channels: u32, depth: u32, shared: bool) -> isize {
    let device = FunctionDevice::model();
    let context = Arc::new(device.context());
    let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
    let reactor = Reactor::new(&context, channels * depth * 2 + 64).unwrap();
    let receives = shared.then(|| reactor.add_shared_receives(&domain, 64).unwrap());
    let connect = || {
        let builder = Channel::builder(&domain).max_send_wr(depth).max_recv_wr(depth);
        let prepared = match &receives {
            Some(receives) => reactor.prepare_sharing(builder, receives).unwrap(),
            None => reactor.prepare(builder).unwrap(),
        };
        let itself = prepared.endpoint();
        prepared.handshake(itself).unwrap()
    };
    let mut all = Vec::with_capacity(channels as usize);
    let before = BYTES.with(Cell::get);
    all.extend((0..channels).map(|_| connect()));
    (BYTES.with(Cell::get) - before) / channels as isize
}

#[test]
fn an_idle_channel_takes_few_bytes_however_many_there_are() {
    // Debug builds know the domain of each channel's memory.
    let domain = if cfg!(debug_assertions) { 128 } else { 0 };
    // docs/performance.md has these numbers, rounded up.
    for (depth, shared, most) in [(16, false, 12_288), (1, false, 4_096), (1, true, 4_352)] {
        let taken = [10, 100, 500].map(|channels| bytes_of_a_channel(channels, depth, shared));
        println!("depth {depth}, shared receives: {shared}: {taken:?} bytes");
        let most = most + domain;
        assert!(taken.iter().all(|bytes| (1..=most).contains(bytes)), "{depth}: {taken:?}");
    }
}
