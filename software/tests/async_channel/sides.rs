//! Two devices with a reactor each, and pairs of channels between them.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use ibverbs::{
    AccessFlags, AsyncChannel, BufferPool, Channel, ChannelBuilder, PooledBuffer, ProtectionDomain,
    Reactor,
    settings::{AckTimeout, MaxRnrRetries, MinRnrTimer},
};
use ibverbs_software::Device;
use tokio::runtime::{Builder, Runtime};

pub(crate) const CHUNKS: usize = 128;
pub(crate) const LEN: usize = 64;

/// How many operations of a channel can be in flight on its send queue.
pub(crate) const SENDS: usize = 8;

pub(crate) struct Side {
    pub(crate) domain: Arc<ProtectionDomain<'static>>,
    pub(crate) reactor: Arc<Reactor>,
    pub(crate) pool: BufferPool,
}

impl Side {
    fn new(device: &Device) -> Self {
        Self::spinning(device, 0)
    }

    /// A side with a reactor that spins for this number of turns.
    pub(crate) fn spinning(device: &Device, turns: u32) -> Self {
        let context = Arc::new(device.open().unwrap());
        let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
        let reactor = Arc::new(Reactor::new(&context, 1024).unwrap().spin(turns));
        let pool = BufferPool::new(&domain, LEN, CHUNKS, AccessFlags::empty()).unwrap();
        Self { domain, reactor, pool }
    }

    /// A channel of which 8 sends and 8 receives can be in flight.
    pub(crate) fn builder(&self) -> ChannelBuilder<'static> {
        Channel::builder(&self.domain)
            .max_send_wr(SENDS as u32)
            .max_recv_wr(8)
            .max_rnr_retries(MaxRnrRetries::UNLIMITED)
            .min_rnr_timer(MinRnrTimer::SHORTEST)
            // However late the other device's thread runs.
            .ack_timeout(AckTimeout::new(20).unwrap())
            .allow_remote_rw()
            .access(
                AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC,
            )
    }

    pub(crate) fn buffer(&self, number: u64) -> PooledBuffer {
        let mut message = [0; LEN];
        message[..8].copy_from_slice(&number.to_le_bytes());
        self.pool.take_from(&message).unwrap().expect("a free buffer")
    }

    /// How many more operations the channels of the reactor can have.
    pub(crate) fn room(&self) -> u32 {
        self.reactor.capacity().1
    }

    /// Spawns a task that runs the reactor.
    pub(crate) fn run(&self, runtime: &Runtime) -> tokio::task::JoinHandle<ibverbs::Result<()>> {
        let reactor = self.reactor.clone();
        runtime.spawn(async move { reactor.run_on_tokio().await })
    }

    /// Waits until all buffers are back.
    pub(crate) fn all_buffers_are_back(&self) {
        let start = std::time::Instant::now();
        while self.pool.available() < CHUNKS {
            let _ = self.reactor.turn();
            assert!(start.elapsed() < Duration::from_secs(30), "{:?}", self.pool);
            std::thread::yield_now();
        }
    }
}

pub(crate) fn number(buffer: &[u8]) -> u64 {
    u64::from_le_bytes(buffer[..8].try_into().unwrap())
}

pub(crate) fn connect(one: &Side, other: &Side) -> [AsyncChannel; 2] {
    let ours = one.reactor.prepare(one.builder()).unwrap();
    let theirs = other.reactor.prepare(other.builder()).unwrap();
    let endpoints = (ours.endpoint(), theirs.endpoint());
    [ours.handshake(endpoints.1).unwrap(), theirs.handshake(endpoints.0).unwrap()]
}

pub(crate) fn sides() -> [Side; 2] {
    [(); 2].map(|()| Side::new(&Device::new().unwrap()))
}

pub(crate) fn current_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

pub(crate) fn multi_thread() -> Runtime {
    Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap()
}

/// Runs `test` with both reactors running, on both kinds of runtime, with packets that pass through the kernel and
/// with packets that do not.
pub(crate) fn on_both<F: Future<Output = ()>>(test: impl Fn([Arc<Side>; 2]) -> F) {
    for (runtime, through_kernel) in [(current_thread(), true), (multi_thread(), false)] {
        let device = || Device::builder().through_kernel(through_kernel).build().unwrap();
        let sides = [(); 2].map(|()| Arc::new(Side::new(&device())));
        let tasks = sides.each_ref().map(|side| side.run(&runtime));
        runtime.block_on(async {
            tokio::time::timeout(Duration::from_secs(120), test(sides.clone())).await.unwrap();
        });
        // With the test's channels gone, everything has come back.
        sides.iter().for_each(|side| side.all_buffers_are_back());
        assert!(tasks.iter().all(|task| !task.is_finished()));
    }
}

/// A sequence of random numbers.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}
