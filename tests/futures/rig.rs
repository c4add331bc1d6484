//! Two connected channels of one reactor, on the function device.

use std::future::Future;
use std::sync::Arc;

use ibverbs::future::Share;
use ibverbs::{
    AccessFlags, AsyncChannel, BufferPool, Channel, ChannelBuilder, PooledBuffer, ProtectionDomain,
    Reactor, ffi, settings::MaxRnrRetries,
};
use ibverbs_function_device::{FunctionDevice, Progress};

pub(crate) use crate::by_hand::{Count, poll, poll_in, poll_with};
use crate::lost_doorbell;

pub(crate) const ALL: AccessFlags =
    AccessFlags::LOCAL_WRITE.union(AccessFlags::REMOTE_READ).union(AccessFlags::REMOTE_WRITE);

/// The number of buffers, and their length.
pub(crate) const CHUNKS: usize = 32;
pub(crate) const LEN: usize = 16;

/// Two channels of one reactor, which are connected to each other.
pub(crate) struct Rig<S: Share> {
    pub(crate) one: AsyncChannel<S>,
    pub(crate) two: AsyncChannel<S>,
    pub(crate) reactor: Reactor<S>,
    pub(crate) pool: BufferPool,
    pub(crate) domain: Arc<ProtectionDomain<'static>>,
    pub(crate) device: FunctionDevice,
}

impl<S: Share> Rig<S> {
    /// Uses a device that executes requests when the test says so.
    pub(crate) fn new() -> Self {
        Self::with(|builder| builder)
    }

    pub(crate) fn with(
        settings: impl Fn(ChannelBuilder<'static>) -> ChannelBuilder<'static>,
    ) -> Self {
        let device = FunctionDevice::model();
        device.progress(Progress::Manual);
        device.stale_translation(true);
        let context = device.context();
        lost_doorbell::prepare(&context);
        let context = Arc::new(context);
        let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
        let pool = BufferPool::new(&domain, LEN, CHUNKS, AccessFlags::empty()).unwrap();
        let reactor = Reactor::with_share(&context, 64).unwrap();
        let [one, two] = connect(&reactor, &domain, settings);
        Self { one, two, reactor, pool, domain, device }
    }

    pub(crate) fn buffer(&self, byte: u8) -> PooledBuffer {
        filled(&self.pool, byte)
    }

    /// The device does what it can, and the reactor what is to be done then.
    pub(crate) fn serve(&self) {
        self.device.run();
        while self.reactor.turn().unwrap() > 0 {}
    }

    /// The buffers that are not in the pool.
    pub(crate) fn out(&self) -> usize {
        CHUNKS - self.pool.available()
    }

    /// Asserts that nothing is left, and that no memory was taken from the device too early.
    #[track_caller]
    pub(crate) fn finish(self) {
        let Self { one, two, reactor, pool, domain, device } = self;
        drop((one, two));
        assert_eq!(pool.available(), CHUNKS);
        assert_eq!(reactor.capacity(), (64, 64));
        drop((reactor, pool, domain));
        device.assert_clean();
    }
}

impl<S: Share<Buffer = PooledBuffer>> Rig<S> {
    /// A message goes from one channel to the other.
    #[track_caller]
    pub(crate) fn exchange(&self, byte: u8) {
        let mut receive = posted(self.two.receive(self.buffer(0)));
        let mut send = posted(self.one.send(self.buffer(byte)));
        self.serve();
        poll(&mut send).expect("it has ended").unwrap();
        let (message, success) = poll(&mut receive).expect("it has arrived").unwrap();
        assert_eq!((success.byte_len() as usize, &message[..]), (LEN, &[byte; LEN][..]));
    }
}

pub(crate) fn connect<S: Share>(
    reactor: &Reactor<S>,
    domain: &Arc<ProtectionDomain<'static>>,
    settings: impl Fn(ChannelBuilder<'static>) -> ChannelBuilder<'static>,
) -> [AsyncChannel<S>; 2] {
    let prepare = || {
        let builder = Channel::builder(domain).max_send_wr(4).max_recv_wr(4).access(ALL);
        reactor.prepare(settings(builder.max_rnr_retries(MaxRnrRetries::UNLIMITED))).unwrap()
    };
    let (one, two) = (prepare(), prepare());
    let (to_one, to_two) = (one.endpoint(), two.endpoint());
    [one.handshake(to_two).unwrap(), two.handshake(to_one).unwrap()]
}

/// Runs a test with futures of one thread, and with those behind a lock.
macro_rules! both {
    (of $buffer:ident; $($(#[$attribute:meta])* fn $name:ident() -> $rig:ident $body:block)*) => {$(
        $(#[$attribute])*
        #[test]
        fn $name() {
            fn run<S: Share<Buffer = $buffer>>() {
                type $rig<S> = $crate::rig::Rig<S>;
                $body
            }
            run::<Local<$buffer>>();
            run::<Locked<$buffer>>();
        }
    )*};
    ($($tests:tt)*) => { both! { of PooledBuffer; $($tests)* } };
}

pub(crate) use both;

/// The completion queue of the reactor that the latest queue pair was made on.
pub(crate) fn completions(device: &FunctionDevice) -> *mut ffi::ibv_cq {
    device.last_call("create_qp").unwrap().qp_init_attr.send_cq
}

pub(crate) fn filled(pool: &BufferPool, byte: u8) -> PooledBuffer {
    pool.take_from(&vec![byte; pool.chunk_len()]).unwrap().unwrap()
}

/// The future is polled for the first time, which posts its operation.
#[track_caller]
pub(crate) fn posted<F: Future + Unpin>(mut future: F) -> F {
    assert!(poll(&mut future).is_none(), "it has ended at once");
    future
}
