//! While one verb of a device takes long, as the destroy verb of a queue pair does on iWARP, everything else goes on in
//! its own time: on other devices, and with the other objects of the same device.

use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, mpsc};
use std::task::{Context as TaskContext, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use ibverbs::device::{AsyncEventKind, AsyncEventSubject, AsyncEvents};
use ibverbs::memory::{MemoryWindow, MemoryWindowType};
use ibverbs::*;
use ibverbs_function_device::FunctionDevice;

/// The limit of waits that end because nothing comes.
const SOON: Duration = Duration::from_millis(5);

/// The limit of what must not wait. It is long, since the machine may be slow.
const PATIENCE: Duration = Duration::from_secs(60);

const KIND: Rc = Rc;

/// A channel of the reactor that is its own peer.
fn connect(reactor: &Reactor, domain: &Arc<ProtectionDomain<'static>>) -> AsyncChannel {
    let prepared = reactor.prepare(Channel::builder(domain)).unwrap();
    let own = prepared.endpoint();
    prepared.handshake(own).unwrap()
}

/// Polls a future until it has ended.
fn finish<F: Future>(reactor: &Reactor, future: F) -> F::Output {
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(output) =
            future.as_mut().poll(&mut TaskContext::from_waker(Waker::noop()))
        {
            return output;
        }
        reactor.turn().unwrap();
    }
}

/// An open device, with what the tests use again and again.
struct Side {
    device: FunctionDevice,
    context: Arc<Context<'static>>,
    domain: Arc<ProtectionDomain<'static>>,
    queue: Arc<CompletionQueue<'static>>,
    reactor: Reactor,
    /// A channel of the reactor that is its own peer.
    channel: AsyncChannel,
    closing: AsyncChannel,
    pool: BufferPool,
}

impl Side {
    fn new(device: FunctionDevice) -> Self {
        let context = Arc::new(device.context());
        let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
        let queue = Arc::new(CompletionQueue::new(&context, 16).unwrap());
        let reactor = Reactor::new(&context, 256).unwrap();
        let (channel, closing) = (connect(&reactor, &domain), connect(&reactor, &domain));
        let pool = BufferPool::new(&domain, 8, 8, AccessFlags::empty()).unwrap();
        Self { device, context, domain, queue, reactor, channel, closing, pool }
    }

    /// A channel of the reactor that others use meanwhile.
    fn channel(&self) -> AsyncChannel {
        connect(&self.reactor, &self.domain)
    }

    fn pair(&self) -> PreparedQueuePair<'static> {
        QueuePair::builder(&self.domain, &self.queue, &self.queue, KIND).build().unwrap()
    }

    /// Waits, polls, posts, turns, reads events, makes and destroys.
    fn use_everything(&self) {
        let Self { device, context, domain, .. } = self;
        let queue = CompletionQueue::builder(context, 16).own_channel().build().unwrap();
        let mut slots = [WorkCompletion::default(); 4];
        assert_eq!(
            queue.wait_until(&mut slots, Instant::now() + SOON).unwrap_err().kind(),
            ErrorKind::TimedOut
        );
        assert!(queue.poll(&mut slots).unwrap().is_empty());

        let channel = Arc::new(CompletionChannel::new(context).unwrap());
        let watched = CompletionQueue::builder(context, 16).channel(&channel).token(7);
        let watched = watched.build().unwrap();
        device.raise_cq_event(watched.as_raw());
        assert_eq!(channel.next_event().unwrap().unwrap().token(), 7);
        assert_eq!(
            channel.wait_until(Instant::now() + SOON).unwrap_err().kind(),
            ErrorKind::TimedOut
        );

        let events = AsyncEvents::new(context).unwrap();
        device.raise(context.as_raw(), ffi::ibv_event_type::IBV_EVENT_PORT_ACTIVE, 1);
        assert_eq!(events.wait().unwrap().kind(), AsyncEventKind::PortActive);
        assert_eq!(
            events.wait_until(Instant::now() + SOON).unwrap_err().kind(),
            ErrorKind::TimedOut
        );

        let prepared = Channel::builder(domain).build().unwrap();
        let own = prepared.endpoint();
        let mut channel = prepared.handshake(own).unwrap();
        let nowhere = RemoteMemoryRegion::new(0, 0, 0).unwrap();
        channel.write(Inline(&[]), nowhere).unwrap();
        let mut region = domain.allocate::<u8>(8).unwrap();
        let soon = std::time::Instant::now() + SOON;
        let failed = channel.until(soon).receive(region.slice_mut(..).unwrap());
        assert_eq!(failed.unwrap_err(), TransportError::TimedOut);
        channel.close().unwrap();

        let reactor = Reactor::new(context, 64).unwrap();
        assert_eq!(reactor.turn().unwrap(), 0);
        reactor.arm().unwrap();
        assert_eq!(reactor.turn().unwrap(), 0);

        // The reactor of which a channel is in a verb.
        let Self { reactor, channel, pool, .. } = self;
        channel.post_receive(pool.take().unwrap()).unwrap();
        let (message, _) =
            finish(reactor, channel.send(pool.take_from(b"message").unwrap().unwrap())).unwrap();
        assert_eq!(finish(reactor, channel.next_message()).unwrap().0[..], message[..]);
        reactor.arm().unwrap();

        self.pair().close().unwrap();
        context.query_port(1).unwrap();
    }
}

/// Calls a verb.
type Call = fn(&Side);

/// All verbs off the data path of what channels and reactors are made of.
const VERBS: &[(&str, Call)] = &[
    ("destroy_qp", |side| drop(side.pair())),
    ("create_qp", |side| drop(side.pair())),
    ("modify_qp", |side| {
        let pair = side.pair();
        let own = pair.endpoint();
        drop(pair.handshake(own).unwrap());
    }),
    ("create_qp", |side| drop(side.reactor.prepare(Channel::builder(&side.domain)).unwrap())),
    ("modify_qp", |side| drop(side.channel())),
    ("destroy_qp", |side| drop(side.channel())),
    ("modify_qp", |side| finish(&side.reactor, side.closing.shutdown())),
    ("query_qp", |side| _ = side.pair().into_queue_pair().query()),
    ("destroy_cq", |side| drop(side.context.create_cq(4).unwrap())),
    ("create_cq", |side| drop(side.context.create_cq(4).unwrap())),
    ("resize_cq", |side| _ = side.context.create_cq(4).unwrap().resize(8)),
    ("destroy_srq", |side| drop(SharedReceiveQueue::new(&side.domain, 4, 1).unwrap())),
    ("create_srq", |side| drop(SharedReceiveQueue::new(&side.domain, 4, 1).unwrap())),
    ("reg_mr", |side| drop(side.domain.allocate::<u8>(8).unwrap())),
    ("dereg_mr", |side| drop(side.domain.allocate::<u8>(8).unwrap())),
    ("alloc_pd", |side| drop(side.context.alloc_pd().unwrap())),
    ("dealloc_pd", |side| drop(side.context.alloc_pd().unwrap())),
    ("dealloc_mw", |side| {
        drop(MemoryWindow::new(&side.domain, MemoryWindowType::Type2).unwrap());
    }),
    ("query_port", |side| _ = side.context.query_port(1).unwrap()),
    ("query_device_ex", |side| _ = side.context.query_device().unwrap()),
    ("free_context", |side| drop(side.device.context())),
];

/// Runs `call` in a thread of its own while the verb is held, and `meanwhile` in another one.
#[track_caller]
fn during(
    verb: &str,
    device: &FunctionDevice,
    call: impl FnOnce() + Send,
    meanwhile: impl FnOnce() + Send,
) {
    device.hold_verb(verb, true);
    thread::scope(|threads| {
        let caller = threads.spawn(call);
        while !device.holds_verb(verb) {
            assert!(!caller.is_finished(), "{verb} is not called");
            thread::yield_now();
        }
        let (done, is_done) = mpsc::channel();
        let others = threads.spawn(move || {
            meanwhile();
            let _ = done.send(());
        });
        let waited = is_done.recv_timeout(PATIENCE);
        // The verb is let go first: the scope waits for all threads.
        device.hold_verb(verb, false);
        assert_ne!(waited, Err(mpsc::RecvTimeoutError::Timeout), "something waits for {verb}");
        others.join().unwrap_or_else(|_| panic!("during {verb}"));
        caller.join().unwrap();
    });
}

#[test]
fn nothing_waits_for_a_verb_that_takes_long() {
    for (verb, call) in VERBS {
        let slow = Side::new(FunctionDevice::model());
        let same = Side::new(slow.device.clone());
        let other = Side::new(FunctionDevice::model());
        for meanwhile in [&other, &same, &slow] {
            during(verb, &slow.device, || call(&slow), || meanwhile.use_everything());
        }
        assert_eq!(slow.device.violations().0, 0, "{verb}: {}", slow.device.violations().1);
    }
}

/// The verb itself waits for the acknowledgement of such an event.
#[test]
fn an_event_about_what_is_being_destroyed_is_read_and_acknowledged() {
    let side = Side::new(FunctionDevice::model());
    let pair = side.pair().into_queue_pair();
    let number = pair.number();
    let (context, raw) = (side.context.as_raw() as usize, pair.as_raw() as usize);
    let events = AsyncEvents::new(&side.context).unwrap();
    let device = &side.device;
    during(
        "destroy_qp",
        device,
        || drop(pair),
        || {
            // SAFETY: the verb waits, so the queue pair is there.
            unsafe {
                let kind = ffi::ibv_event_type::IBV_EVENT_QP_FATAL;
                device.raise_about(context as *mut _, kind, raw as *mut ffi::ibv_qp);
            }
            let event = events.next_event().unwrap().unwrap();
            assert_eq!(event.subject(), AsyncEventSubject::QueuePair(number));
        },
    );
    assert_eq!((device.calls("destroy_qp"), device.violations().0), (1, 0));
}
