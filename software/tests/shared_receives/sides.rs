//! A server whose channels share receives, and clients on another device.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::Instant;

use ibverbs::channel::OwnedResult;
use ibverbs::future::{PreparedAsyncChannel, SharedReceives};
use ibverbs::{
    AccessFlags, AsyncChannel, BufferPool, Channel, ChannelBuilder, Context, PooledBuffer,
    ProtectionDomain, Reactor,
    settings::{MaxRnrRetries, MinRnrTimer},
};
use ibverbs_software::Device;

use super::patience::deadline;

pub(crate) const CHUNKS: usize = 128;
pub(crate) const LEN: usize = 64;
/// The receives that the server can post.
pub(crate) const CAPACITY: u32 = 32;

pub(crate) struct Side {
    pub(crate) context: Arc<Context<'static>>,
    pub(crate) domain: Arc<ProtectionDomain<'static>>,
    pub(crate) pool: BufferPool,
    pub(crate) device: Device,
}

/// The settings of all channels.
pub(crate) fn settings(builder: ChannelBuilder<'static>) -> ChannelBuilder<'static> {
    builder
        .max_send_wr(8)
        .max_recv_wr(8)
        .max_rnr_retries(MaxRnrRetries::UNLIMITED)
        .min_rnr_timer(MinRnrTimer::SHORTEST)
}

impl Side {
    pub(crate) fn new() -> Self {
        let device = Device::new().unwrap();
        let context = Arc::new(device.open().unwrap());
        let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
        let pool = BufferPool::new(&domain, LEN, CHUNKS, AccessFlags::empty()).unwrap();
        Self { context, domain, pool, device }
    }

    pub(crate) fn builder(&self) -> ChannelBuilder<'static> {
        settings(Channel::builder(&self.domain))
    }

    pub(crate) fn buffer(&self, number: u64) -> PooledBuffer {
        let mut message = [0; LEN];
        message[..8].copy_from_slice(&number.to_le_bytes());
        self.pool.take_from(&message).unwrap().expect("a free buffer")
    }
}

/// A server whose reactor the test calls.
pub(crate) struct Server {
    pub(crate) side: Side,
    pub(crate) receives: SharedReceives,
    pub(crate) reactor: Reactor,
}

impl Server {
    /// Makes a server with this many receives posted.
    pub(crate) fn new(posted: usize) -> Self {
        let side = Side::new();
        let reactor = Reactor::new(&side.context, 256).unwrap();
        let receives = reactor.add_shared_receives(&side.domain, CAPACITY).unwrap();
        for _ in 0..posted {
            receives.post(side.buffer(0)).unwrap();
        }
        Self { side, receives, reactor }
    }

    pub(crate) fn prepare(&self) -> PreparedAsyncChannel {
        self.reactor.prepare_sharing(self.side.builder(), &self.receives).unwrap()
    }

    /// The server's channel, and that of a client.
    pub(crate) fn connect(&self, clients: &Side) -> (AsyncChannel, Channel<'static>) {
        let (ours, theirs) = (self.prepare(), clients.builder().build().unwrap());
        let endpoints = (ours.endpoint(), theirs.endpoint());
        (ours.handshake(endpoints.1).unwrap(), theirs.handshake(endpoints.0).unwrap())
    }

    /// Calls the reactor until the future has ended.
    #[track_caller]
    pub(crate) fn wait<F: Future>(&self, future: F) -> F::Output {
        let (mut future, end) = (pin!(future), deadline());
        loop {
            let mut nobody = TaskContext::from_waker(Waker::noop());
            if let Poll::Ready(output) = future.as_mut().poll(&mut nobody) {
                return output;
            }
            self.reactor.turn().unwrap();
            assert!(Instant::now() < end, "it does not end");
        }
    }

    #[track_caller]
    pub(crate) fn next_message(&self, channel: &AsyncChannel) -> OwnedResult<PooledBuffer> {
        self.wait(channel.next_message())
    }

    /// Receives a message, and posts its buffer again.
    #[track_caller]
    pub(crate) fn hears(&self, channel: &AsyncChannel) -> u64 {
        let (buffer, success) = self.next_message(channel).unwrap();
        assert_eq!(success.byte_len() as usize, LEN);
        let number = number(&buffer);
        self.receives.post(buffer).unwrap();
        number
    }

    /// Takes what the device has completed.
    pub(crate) fn serve(&self) {
        while self.reactor.turn().unwrap() > 0 {}
    }
}

/// Sends a message, which has arrived then.
#[track_caller]
pub(crate) fn send(peer: &mut Channel<'_>, clients: &Side, number: u64) {
    peer.until(deadline()).send(clients.buffer(number)).unwrap();
}

pub(crate) fn number(buffer: &[u8]) -> u64 {
    u64::from_le_bytes(buffer[..8].try_into().unwrap())
}
