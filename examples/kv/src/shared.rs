//! What the server and its sessions share.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize};

use ibverbs::{
    AccessFlags, BufferPool, Channel, ChannelBuilder, PooledBuffer, ProtectionDomain, Reactor,
    settings::{MaxRnrRetries, MinRnrTimer},
};
use tokio::runtime::Handle;

use crate::protocol::MAX_MESSAGE;
use crate::store::Store;
use crate::{Result, Share};

/// Messages of each client that are received or sent at the same time.
const BUFFERS: u32 = 2;
/// Operations of each client that the device may have at the same time, and so completions.
const SENDS: u32 = 4;
const RECEIVES: u32 = 4;

/// The settings of the channels of both sides: one request at a time.
pub(crate) fn builder(domain: &Arc<ProtectionDomain<'static>>) -> ChannelBuilder<'static> {
    Channel::builder(domain)
        .max_send_wr(SENDS)
        .max_recv_wr(RECEIVES)
        .max_rnr_retries(MaxRnrRetries::UNLIMITED)
        .min_rnr_timer(MinRnrTimer::SHORTEST)
        .access(AccessFlags::REMOTE_READ)
}

/// The state that all sessions share.
pub(crate) struct Shared {
    pub(crate) domain: Arc<ProtectionDomain<'static>>,
    pub(crate) store: Store,
    pub(crate) requests: AtomicU64,
    pub(crate) clients: AtomicUsize,
    /// Requests in the last second.
    pub(crate) rate: AtomicU64,
}

/// A reactor, on the thread of a runtime, and what its clients need.
pub(crate) struct Core {
    pub(crate) reactor: Reactor<Share>,
    pool: BufferPool,
    pub(crate) runtime: Handle,
    pub(crate) clients: AtomicUsize,
}

impl Core {
    pub(crate) fn new(shared: &Shared, clients: u32, runtime: Handle) -> Result<Arc<Self>> {
        let context = shared.domain.context_parent();
        let reactor = Reactor::with_share(context, (SENDS + RECEIVES).saturating_mul(clients))?;
        let buffers = BUFFERS.saturating_mul(clients) as usize;
        let pool = BufferPool::new(&shared.domain, MAX_MESSAGE, buffers, AccessFlags::empty())?;
        Ok(Arc::new(Self { reactor, pool, runtime, clients: AtomicUsize::new(0) }))
    }

    /// Takes a buffer. One is free, unless the device keeps those of clients that have left.
    pub(crate) fn buffer(&self) -> Result<PooledBuffer> {
        Ok(self.pool.take().ok_or("all buffers are in use")?)
    }
}
