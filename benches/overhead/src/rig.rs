//! The objects that contenders use: a queue pair on the lean device, made through the crate, also for C.

use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use ibverbs::queue_pair::SendOperations;
use ibverbs::{
    AccessFlags, BufferPool, CompletionChannel, CompletionQueue, Context, MemoryRegion,
    PooledBuffer, ProtectionDomain, QueuePair, Rc, RemoteMemoryRegion, SharedMemoryRegion,
    SharedReceiveQueue,
};
use ibverbs_function_device::FunctionDevice;

/// The length of a message.
pub(crate) const LENGTH: usize = 64;
/// The number of outstanding operations, where it is more than one.
pub(crate) const WINDOW: usize = 16;
/// The depth of the queues.
pub(crate) const DEPTH: u32 = 64;
/// The length of a read, and how many are in flight.
pub(crate) const PAGE: usize = 4096;
pub(crate) const READS: usize = 64;
/// [`WINDOW`] as a count of operations.
pub(crate) const WINDOW_OPERATIONS: u64 = WINDOW as u64;

/// Fields are dropped in any order: each keeps its own parents alive.
pub(crate) struct Rig {
    pub(crate) queue_pair: QueuePair<'static>,
    pub(crate) queue: Arc<CompletionQueue<'static>>,
    pub(crate) region: MemoryRegion<'static, u8>,
    /// The channel of the queue's events, if it has one.
    pub(crate) channel: Option<Arc<CompletionChannel<'static>>>,
    /// Sleeps until the channel has an event.
    pub(crate) epoll: Option<OwnedFd>,
    pub(crate) shared: SharedMemoryRegion<'static, u8>,
}

impl Rig {
    pub(crate) fn new() -> Self {
        Self::on(&context())
    }

    pub(crate) fn on(context: &Arc<Context<'static>>) -> Self {
        let queue = CompletionQueue::new(context, DEPTH).expect("a completion queue");
        Self::build(context, queue, None, SendOperations::empty(), false)
    }

    /// A rig whose queue pair takes shared receives.
    pub(crate) fn of_shared_receives() -> Self {
        let context = context();
        let queue = CompletionQueue::new(&context, DEPTH).expect("a completion queue");
        Self::build(&context, queue, None, SendOperations::empty(), true)
    }

    /// A rig with memory for reads of pages.
    pub(crate) fn of_pages() -> Self {
        let rig = Self::new();
        let domain = Arc::new(ProtectionDomain::new(context()).expect("a domain"));
        let region = MemoryRegion::new(&domain, READS * PAGE).expect("a region");
        Self { region, ..rig }
    }

    /// A rig whose completion queue raises events.
    pub(crate) fn with_events() -> Self {
        let context = context();
        let channel = Arc::new(CompletionChannel::new(&context).expect("a channel"));
        let queue = CompletionQueue::builder(&context, DEPTH).channel(&channel).build();
        Self::build(
            &context,
            queue.expect("a completion queue"),
            Some(channel),
            SendOperations::empty(),
            false,
        )
    }

    /// A rig whose queue pair has the extended posting interface.
    pub(crate) fn extended() -> Self {
        let context = context();
        let queue = CompletionQueue::new(&context, DEPTH).expect("a completion queue");
        Self::build(&context, queue, None, SendOperations::SEND, false)
    }

    pub(crate) fn build(
        context: &Arc<Context<'static>>,
        queue: CompletionQueue<'static>,
        channel: Option<Arc<CompletionChannel<'static>>>,
        extended: SendOperations,
        shares: bool,
    ) -> Self {
        let domain = Arc::new(ProtectionDomain::new(context).expect("a domain"));
        let queue = Arc::new(queue);
        let mut builder =
            QueuePair::builder(&domain, &queue, &queue, Rc).max_send_wr(DEPTH).max_recv_wr(DEPTH);
        if !extended.is_empty() {
            builder = builder.extended(extended);
        }
        if shares {
            let receives = SharedReceiveQueue::new(&domain, DEPTH, 1).expect("shared receives");
            builder = builder.srq(Arc::new(receives));
        }
        let prepared = builder.build().expect("a queue pair");
        let itself = prepared.endpoint();
        let queue_pair = prepared.handshake(itself).expect("a connection");
        let region = MemoryRegion::new(&domain, WINDOW * LENGTH).expect("a region");
        let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
        let shared = SharedMemoryRegion::new(&domain, LENGTH, access).expect("a shared region");
        let epoll = channel.as_ref().map(|channel| epoll_of(channel.as_fd()));
        Self { queue_pair, queue, region, channel, epoll, shared }
    }

    pub(crate) fn remote(&self) -> RemoteMemoryRegion {
        self.shared.remote()
    }
}

/// A buffer of a pool, with this length.
pub(crate) fn full(pool: &BufferPool, len: usize) -> Option<PooledBuffer> {
    let mut buffer = pool.take()?;
    buffer.set_len(len).ok()?;
    Some(buffer)
}

/// A context of a lean device; it keeps the device.
pub(crate) fn context() -> Arc<Context<'static>> {
    Arc::new(FunctionDevice::lean().context())
}

/// Calls the function of `contenders.h`, as the contenders in C do.
pub(crate) fn epoll_of(file: BorrowedFd<'_>) -> OwnedFd {
    unsafe extern "C" {
        safe fn epoll_of(file: c_int) -> c_int;
    }
    let epoll = epoll_of(file.as_raw_fd());
    assert!(epoll >= 0, "epoll");
    // SAFETY: it was just made, and nobody else has it.
    unsafe { OwnedFd::from_raw_fd(epoll) }
}

pub(crate) fn sleep_in(epoll: &OwnedFd) {
    unsafe extern "C" {
        safe fn sleep_in(epoll: c_int) -> c_int;
    }
    assert_eq!(sleep_in(epoll.as_raw_fd()), 0, "epoll");
}
