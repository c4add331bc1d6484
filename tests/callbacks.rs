//! No code of the program's runs while the crate holds one of its locks: a tracing subscriber, wakers that are woken or
//! dropped, and the allocator of a domain call back into everything. With a lock held, that would wait for ever.

#[path = "support/software.rs"]
mod software;

use std::alloc::Layout;
use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};
use std::task::{Context as TaskContext, Poll, Wake, Waker};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::device::AsyncEvents;
use ibverbs::domain::{self, Allocation};
use ibverbs::*;
use ibverbs_function_device::FunctionDevice;
use ibverbs_software::Verb;
use software::Software;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// The limit of what must not wait. It is long, since the machine may be slow.
const PATIENCE: Duration = Duration::from_secs(60);

/// The objects that callbacks use.
struct World {
    device: Software,
    context: Arc<Context<'static>>,
    domain: Arc<ProtectionDomain<'static>>,
    events: AsyncEvents<'static>,
    pool: BufferPool,
    reactor: Reactor,
    channels: Mutex<Vec<Arc<AsyncChannel>>>,
}

impl World {
    fn new() -> Arc<Self> {
        let device = Software::new();
        let context = Arc::new(device.context());
        let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
        Arc::new(Self {
            events: AsyncEvents::new(&context).unwrap(),
            pool: BufferPool::new(&domain, 64, 32, AccessFlags::empty()).unwrap(),
            reactor: Reactor::new(&context, 512).unwrap(),
            channels: Mutex::default(),
            device,
            context,
            domain,
        })
    }

    /// Probes are writes of the peer.
    fn builder(&self) -> ChannelBuilder<'static> {
        let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
        Channel::builder(&self.domain).access(access)
    }

    /// A channel of the reactor that is its own peer.
    fn connect(&self) -> Arc<AsyncChannel> {
        let mut prepared = self.reactor.prepare(self.builder()).unwrap();
        prepared.post_receive(self.pool.take().unwrap()).unwrap();
        let own = prepared.endpoint();
        let channel = Arc::new(prepared.handshake(own).unwrap());
        self.channels.lock().unwrap().push(channel.clone());
        channel
    }

    /// Empties the list under its lock. The caller drops the channels without it, since callbacks take it.
    fn take_channels(&self) -> Vec<Arc<AsyncChannel>> {
        std::mem::take(&mut self.channels.lock().unwrap())
    }

    fn channels(&self) -> Vec<Arc<AsyncChannel>> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Calls whatever takes a lock of the crate's.
    fn use_everything(&self) {
        for channel in self.channels() {
            assert_eq!(channel.credits(), None);
            if let Some(buffer) = self.pool.take() {
                // No bytes, and no receive of the peer's.
                let nowhere = RemoteMemoryRegion::new(0, 0, 0).unwrap();
                let mut write = channel.write(buffer, nowhere);
                let _ = Pin::new(&mut write).poll(&mut TaskContext::from_waker(Waker::noop()));
            }
            if let Some(buffer) = self.pool.take() {
                let mut receive = channel.receive(buffer);
                let _ = Pin::new(&mut receive).poll(&mut TaskContext::from_waker(Waker::noop()));
            }
        }
        let _ = self.reactor.turn();
        let _ = self.reactor.arm();
        let _ = (self.reactor.capacity(), self.pool.available());
        let _ = self.events.next_event();
        self.context.query_port(1).unwrap();
        drop(self.reactor.prepare(Channel::builder(&self.domain)));
        drop(Channel::builder(&self.domain).build());
    }
}

thread_local! {
    /// How many this thread has run.
    static CALLBACKS: Cell<usize> = const { Cell::new(0) };
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Uses everything, unless this is called by that.
fn callback(world: &World) {
    if !INSIDE.replace(true) {
        CALLBACKS.set(CALLBACKS.get() + 1);
        world.use_everything();
        INSIDE.set(false);
    }
}

/// A waker of a task, or a subscriber of `tracing`, that calls back into the world.
#[derive(Clone)]
struct Calls(Arc<OnceLock<Arc<World>>>);

impl Calls {
    fn call(&self) {
        if let Some(world) = self.0.get() {
            callback(world);
        }
    }
}

impl Wake for Calls {
    fn wake(self: Arc<Self>) {
        self.call();
    }
}

impl Drop for Calls {
    fn drop(&mut self) {
        self.call();
    }
}

impl Subscriber for Calls {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "ibverbs"
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {
        self.call();
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Polls a future, with a waker that calls back, until it is ready.
fn finish<F: Future + Unpin>(world: &World, calls: &Calls, mut future: F) -> F::Output {
    let start = Instant::now();
    loop {
        // A new one each time, so that the one before is dropped.
        let waker = Waker::from(Arc::new(calls.clone()));
        if let Poll::Ready(output) =
            Pin::new(&mut future).poll(&mut TaskContext::from_waker(&waker))
        {
            return output;
        }
        world.device.run();
        // A turn fails when polling does; the channels have ended then.
        let _ = world.reactor.turn();
        assert!(start.elapsed() < PATIENCE, "it does not end");
    }
}

/// Channels that work, fail, are dropped and stopped, and queue pairs that cannot be polled or destroyed.
fn use_channels(world: &Arc<World>, calls: &Calls) {
    let channel = world.connect();
    for _ in 0..3 {
        let buffer = world.pool.take_from(&[0; 64]).unwrap().unwrap();
        finish(world, calls, channel.send(buffer)).unwrap();
        // The test does not await this: a callback may have taken the message.
        let mut receive = channel.receive(world.pool.take().unwrap());
        let waker = Waker::from(Arc::new(calls.clone()));
        let _ = Pin::new(&mut receive).poll(&mut TaskContext::from_waker(&waker));
        world.device.run();
        world.reactor.turn().unwrap();
    }
    // Memory that is not there: the operation fails, and the channel ends.
    let nowhere = RemoteMemoryRegion::new(0x1000, 8, 0xdead).unwrap();
    let buffer = world.pool.take_from(&[0; 64]).unwrap().unwrap();
    finish(world, calls, channel.write(buffer, nowhere)).unwrap_err();

    // A failing verb in a post, in a poll, and at the end.
    for verb in [Verb::PostSend, Verb::PollCq, Verb::ModifyQp, Verb::DestroyQp] {
        let channel = world.connect();
        let mut receive = channel.receive(world.pool.take().unwrap());
        let waker = Waker::from(Arc::new(calls.clone()));
        let _ = Pin::new(&mut receive).poll(&mut TaskContext::from_waker(&waker));
        world.device.fail_next(verb, libc::EIO);
        let buffer = world.pool.take_from(&[0; 64]).unwrap().unwrap();
        let _ = finish(world, calls, channel.send(buffer));
        drop(world.take_channels());
        drop(receive);
        drop(channel);
        let _ = world.reactor.turn();
    }

    // Ended with operations in flight.
    let channel = world.connect();
    let mut receive = channel.receive(world.pool.take().unwrap());
    let waker = Waker::from(Arc::new(calls.clone()));
    let _ = Pin::new(&mut receive).poll(&mut TaskContext::from_waker(&waker));
    world.reactor.stop(TransportError::Stopped);
    drop(receive);
    drop(channel);
    drop(world.take_channels());
}

/// Runs a test whose callbacks would wait for ever if they found a lock held.
fn finds_no_lock_held(test: impl FnOnce() + Send + 'static) {
    let (done, is_done) = mpsc::channel::<()>();
    let test = thread::spawn(move || {
        let _done = done;
        test();
    });
    if is_done.recv_timeout(PATIENCE) == Err(mpsc::RecvTimeoutError::Timeout) {
        // The thread holds the lock for ever.
        eprintln!("a callback waits for a lock of the crate's");
        std::process::abort();
    }
    test.join().unwrap();
}

#[test]
fn callbacks_find_no_lock_held() {
    finds_no_lock_held(|| {
        let world = World::new();
        let calls = Calls(Arc::default());
        assert!(calls.0.set(world.clone()).is_ok());
        tracing::subscriber::with_default(calls.clone(), || use_channels(&world, &calls));
        let calls = CALLBACKS.get();
        assert!(calls > 50, "only {calls} callbacks: this tests nothing");
    });
}

/// The crate finds out with a lock held that no task runs the reactor, and tells it afterwards.
#[test]
fn what_is_told_with_a_lock_held_is_told_afterwards() {
    finds_no_lock_held(|| {
        let world = World::new();
        let calls = Calls(Arc::default());
        assert!(calls.0.set(world.clone()).is_ok());
        let channel = world.connect();
        let mut receive = channel.receive(world.pool.take().unwrap());
        let _ = Pin::new(&mut receive).poll(&mut TaskContext::from_waker(Waker::noop()));
        tracing::subscriber::with_default(calls, || {
            drop(receive);
            assert_eq!(CALLBACKS.get(), 1);
        });
        drop(world.take_channels());
    });
}

/// An allocator that calls everything of another device, and of its own device all that calls no verb.
struct Allocator {
    world: Arc<World>,
    own: Arc<Mutex<Option<Arc<Own>>>>,
    calls: Arc<AtomicUsize>,
}

/// The objects of the device whose verbs call the allocator.
struct Own {
    reactor: Reactor,
    pool: BufferPool,
    channels: Mutex<Vec<Arc<AsyncChannel>>>,
}

impl Allocator {
    fn call(&self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        callback(&self.world);
        let own = self.own.lock().unwrap().clone();
        let Some(own) = own else { return };
        let _ = (own.reactor.capacity(), own.pool.available());
        drop(own.pool.take());
        for channel in own.channels.lock().unwrap().iter() {
            let _ = channel.credits();
        }
    }
}

// SAFETY: the memory is zeroed, of that layout, and valid until it is freed. Nothing forks here.
unsafe impl domain::Allocator for Allocator {
    fn alloc(&self, layout: Layout, _: u64) -> Allocation {
        self.call();
        // SAFETY: the size is not 0.
        let memory = unsafe { std::alloc::alloc_zeroed(layout) };
        NonNull::new(memory).map_or(Allocation::Failed, Allocation::Memory)
    }

    unsafe fn free(&self, memory: NonNull<u8>, layout: Layout, _: u64) {
        self.call();
        // SAFETY: `alloc` has allocated it, with this layout.
        unsafe { std::alloc::dealloc(memory.as_ptr(), layout) };
    }
}

/// Queue pairs of the domain are created and destroyed by the program, by a reactor and at the end of channels.
#[test]
fn an_allocator_finds_no_lock_held() {
    finds_no_lock_held(|| {
        let device = FunctionDevice::model();
        let context = Arc::new(device.context());
        let base = Arc::new(ProtectionDomain::new(&context).unwrap());
        let (own, calls) = (Arc::new(Mutex::new(None)), Arc::new(AtomicUsize::new(0)));
        let allocator = Allocator { world: World::new(), own: own.clone(), calls: calls.clone() };
        // SAFETY: there is no thread domain.
        let domain =
            unsafe { ProtectionDomain::parent_domain_with_allocator(&base, None, allocator) };
        let domain = Arc::new(domain.unwrap());
        let used = Arc::new(Own {
            reactor: Reactor::new(&context, 64).unwrap(),
            pool: BufferPool::new(&domain, 64, 8, AccessFlags::empty()).unwrap(),
            channels: Mutex::default(),
        });
        *own.lock().unwrap() = Some(used.clone());
        let Own { reactor, channels, .. } = &*used;

        // Each line makes and destroys one queue pair.
        let queue_pairs = 3;
        drop(Channel::builder(&domain).build().unwrap());
        drop(reactor.prepare(Channel::builder(&domain)).unwrap());
        let prepared = reactor.prepare(Channel::builder(&domain)).unwrap();
        let peer = prepared.endpoint();
        channels.lock().unwrap().push(Arc::new(prepared.handshake(peer).unwrap()));
        let channel = std::mem::take(&mut *channels.lock().unwrap());
        drop(channel);
        reactor.turn().unwrap();
        assert_eq!(calls.load(Ordering::Relaxed), 2 * queue_pairs);
        // `own` keeps the domain, which keeps the allocator, which keeps `own`: clearing it breaks the cycle.
        *own.lock().unwrap() = None;
        assert_eq!(device.violations().0, 0, "{}", device.violations().1);
    });
}
