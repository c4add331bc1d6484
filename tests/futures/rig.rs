//! Two connected channels of one reactor, on the function device.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use ibverbs::{
    AccessFlags, AsyncChannel, BufferPool, Channel, MaxRnrRetries, PooledBuffer, ProtectionDomain,
    Reactor, SharedMemoryRegion, ffi,
};
use ibverbs_function_device::{FunctionDevice, Progress};

use crate::lost_doorbell;

pub(crate) const ALL: AccessFlags =
    AccessFlags::LOCAL_WRITE.union(AccessFlags::REMOTE_READ).union(AccessFlags::REMOTE_WRITE);

/// The number of buffers, and their length.
pub(crate) const CHUNKS: usize = 32;
pub(crate) const LEN: usize = 16;

pub(crate) struct Rig {
    pub(crate) one: AsyncChannel,
    pub(crate) two: AsyncChannel,
    pub(crate) reactor: Reactor,
    pub(crate) pool: BufferPool,
    pub(crate) domain: Arc<ProtectionDomain<'static>>,
    pub(crate) device: FunctionDevice,
}

/// Two more channels of the reactor, connected to each other.
pub(crate) fn connect(
    reactor: &Reactor,
    domain: &Arc<ProtectionDomain<'static>>,
) -> [AsyncChannel; 2] {
    let prepare = || {
        let builder = Channel::builder(domain).max_send_wr(4).max_recv_wr(4).access(ALL);
        reactor.prepare(builder.max_rnr_retries(MaxRnrRetries::UNLIMITED)).unwrap()
    };
    let (one, two) = (prepare(), prepare());
    let (to_one, to_two) = (one.endpoint(), two.endpoint());
    [one.handshake(to_two).unwrap(), two.handshake(to_one).unwrap()]
}

impl Rig {
    /// On a device that executes requests when the test says so, and then accesses the memory that they name whether or
    /// not it still exists.
    pub(crate) fn new() -> Self {
        let device = FunctionDevice::model();
        device.progress(Progress::Manual);
        device.stale_translation(true);
        let context = device.context();
        lost_doorbell::prepare(&context);
        let context = Arc::new(context);
        let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
        let pool = BufferPool::new(&domain, LEN, CHUNKS, AccessFlags::empty()).unwrap();
        let reactor = Reactor::new(&context, 64).unwrap();
        let [one, two] = connect(&reactor, &domain);
        Self { one, two, reactor, pool, domain, device }
    }

    pub(crate) fn buffer(&self, byte: u8) -> PooledBuffer {
        filled(&self.pool, byte)
    }

    pub(crate) fn target(&self) -> SharedMemoryRegion<'static, u8> {
        SharedMemoryRegion::new(&self.domain, LEN, ALL).unwrap()
    }

    /// Nothing is left, and no memory was taken from the device too early.
    #[track_caller]
    pub(crate) fn finish(self) {
        let Self { one, two, reactor, pool, domain, device } = self;
        drop((one, two));
        serve(&device, &reactor);
        assert_eq!(pool.available(), CHUNKS);
        drop((reactor, pool, domain));
        device.assert_clean();
    }
}

/// The completion queue of the reactor that the latest queue pair was made on.
pub(crate) fn completions(device: &FunctionDevice) -> *mut ffi::ibv_cq {
    device.last_call("create_qp").unwrap().qp_init_attr.send_cq
}

pub(crate) fn filled(pool: &BufferPool, byte: u8) -> PooledBuffer {
    let mut buffer = pool.take().unwrap();
    buffer.fill(byte);
    buffer
}

/// The device does what it can, and the reactor what is to be done then.
pub(crate) fn serve(device: &FunctionDevice, reactor: &Reactor) {
    device.run();
    while reactor.turn().unwrap() > 0 {}
}

/// Counts how often it is woken.
#[derive(Default)]
pub(crate) struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Count {
    pub(crate) fn get(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

pub(crate) fn poll_with<F: Future + Unpin>(future: &mut F, waker: &Waker) -> Option<F::Output> {
    match Pin::new(future).poll(&mut Context::from_waker(waker)) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

/// Polls once, in a task that the count knows the wake-ups of.
pub(crate) fn poll_in<F: Future + Unpin>(future: &mut F, count: &Arc<Count>) -> Option<F::Output> {
    poll_with(future, &Waker::from(count.clone()))
}

/// Polls once, in a task that nobody wakes.
pub(crate) fn poll<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
    poll_with(future, Waker::noop())
}

/// The future is polled for the first time, which posts its operation.
#[track_caller]
pub(crate) fn posted<F: Future + Unpin>(mut future: F) -> F {
    assert!(poll(&mut future).is_none(), "it has ended at once");
    future
}

/// Sends from one channel to the other until the message has arrived.
#[track_caller]
pub(crate) fn exchange(
    [one, two]: [&AsyncChannel; 2],
    device: &FunctionDevice,
    reactor: &Reactor,
    pool: &BufferPool,
) {
    let mut receive = posted(two.receive(filled(pool, 0)));
    let mut send = posted(one.send(filled(pool, 7)));
    serve(device, reactor);
    poll(&mut send).expect("it has ended").unwrap();
    let (message, success) = poll(&mut receive).expect("it has ended").unwrap();
    assert_eq!((success.byte_len() as usize, &message[..]), (LEN, &[7; LEN][..]));
}
