//! A server whose channels share receives, and clients on another device.

use std::sync::Arc;

use ibverbs::{
    AccessFlags, BufferPool, Channel, ChannelBuilder, Context, MaxRnrRetries, MinRnrTimer,
    PooledBuffer, ProtectionDomain, SharedReceives,
};
use ibverbs_software::Device;

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

impl Side {
    pub(crate) fn new() -> Self {
        let device = Device::new().unwrap();
        let context = Arc::new(device.open().unwrap());
        let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
        let pool = BufferPool::new(&domain, LEN, CHUNKS, AccessFlags::empty()).unwrap();
        Self { context, domain, pool, device }
    }

    pub(crate) fn builder(&self) -> ChannelBuilder<'static> {
        Channel::builder(&self.domain)
            .max_send_wr(8)
            .max_recv_wr(8)
            .max_inline_data(8)
            .max_rnr_retries(MaxRnrRetries::UNLIMITED)
            .min_rnr_timer(MinRnrTimer::SHORTEST)
    }

    pub(crate) fn buffer(&self, number: u64) -> PooledBuffer {
        let mut buffer = self.pool.take().expect("a free buffer");
        buffer[..8].copy_from_slice(&number.to_le_bytes());
        buffer
    }

    /// Two ordinary channels.
    pub(crate) fn pair(&self, other: &Self) -> (Channel<'static>, Channel<'static>) {
        let (one, other) = (self.builder().build().unwrap(), other.builder().build().unwrap());
        let endpoints = (one.endpoint(), other.endpoint());
        (one.handshake(endpoints.1).unwrap(), other.handshake(endpoints.0).unwrap())
    }
}

pub(crate) struct Server {
    pub(crate) side: Side,
    pub(crate) receives: SharedReceives<PooledBuffer>,
    pub(crate) channels: Vec<Channel<'static>>,
}

impl Server {
    /// With room for `channels` channels, and `posted` receives posted.
    pub(crate) fn new(channels: usize, posted: usize) -> Self {
        let side = Side::new();
        let receives = SharedReceives::new(&side.domain, CAPACITY).unwrap();
        for _ in 0..posted {
            receives.post(side.buffer(0)).unwrap();
        }
        let channels = Vec::with_capacity(channels);
        Self { side, receives, channels }
    }

    pub(crate) fn builder(&self) -> ChannelBuilder<'static> {
        self.side.builder().shared_receive_queue(&self.receives)
    }
}

/// Connects a client to the server's channel with this token, which is its index. Returns the client's.
pub(crate) fn connect(server: &mut Server, token: usize, clients: &Side) -> Channel<'static> {
    assert_eq!(server.channels.len(), token);
    let ours = server.builder().build().unwrap();
    let theirs = clients.builder().build().unwrap();
    let endpoints = (ours.endpoint(), theirs.endpoint());
    server.channels.push(ours.handshake(endpoints.1).unwrap());
    theirs.handshake(endpoints.0).unwrap()
}

pub(crate) fn number(buffer: &[u8]) -> u64 {
    u64::from_le_bytes(buffer[..8].try_into().unwrap())
}
