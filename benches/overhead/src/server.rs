//! An event server: it sleeps until messages have come, answers each with what it has received, and posts the receive
//! again when the answer is sent. Each connection has one buffer. In C, and by tokens on a shared completion queue.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use ibverbs::{
    AccessFlags, BufferPool, Channel, CompletionChannel, CompletionQueue, Context, MemoryRegion,
    PooledBuffer, ProtectionDomain, QueuePair, Rc, ReceiveWorkRequest, SendWorkRequest,
    SharedCompletionQueue, TransportError, TransportResult,
};
use ibverbs_function_device::{Builder, FunctionDevice};

use crate::c;
use crate::rig::{LENGTH, WINDOW_OPERATIONS, epoll_of, sleep_in};

/// The other side of all connections: messages come when it says so.
pub(crate) struct Peers {
    device: FunctionDevice,
    /// The number of messages that come at a time.
    burst: u64,
}

impl Peers {
    /// Those of this number of connections, and a context of their device.
    pub(crate) fn new(connections: usize) -> (Self, Arc<Context<'static>>) {
        let device = Builder::lean().held_receives(connections as u32).build();
        let context = Arc::new(device.context());
        (Self { device, burst: WINDOW_OPERATIONS.min(connections as u64) }, context)
    }

    /// Lets messages come, at most this many, and sleeps until they have.
    #[inline]
    pub(crate) fn next_messages(&self, most: u64, epoll: &OwnedFd) {
        let burst = self.burst.min(most) as u32;
        assert_eq!(self.device.deliver(burst), burst, "receives are missing");
        sleep_in(epoll);
    }
}

impl Drop for Peers {
    /// No receive is in flight any more when its queue pair is destroyed.
    fn drop(&mut self) {
        self.device.deliver(u32::MAX);
    }
}

/// The number of requests of one connection: a send, and a receive.
const ONE: u32 = 1;

/// The server of C. Fields are dropped in order: the device has nothing in flight when queue pairs go.
pub(crate) struct CRig {
    server: NonNull<c::Server>,
    _peers: Peers,
    _queue_pairs: Vec<QueuePair<'static>>,
    _queue: Arc<CompletionQueue<'static>>,
    _channel: Arc<CompletionChannel<'static>>,
    _region: MemoryRegion<'static, u8>,
    _epoll: OwnedFd,
}

impl CRig {
    pub(crate) fn new(connections: usize) -> Self {
        let (peers, context) = Peers::new(connections);
        let domain = Arc::new(ProtectionDomain::new(&context).expect("a domain"));
        let channel = Arc::new(CompletionChannel::new(&context).expect("a channel"));
        let depth = 2 * ONE * connections as u32;
        let queue = CompletionQueue::builder(&context, depth).channel(&channel).build();
        let queue = Arc::new(queue.expect("a completion queue"));
        let queue_pair = |_| {
            let builder = QueuePair::builder(&domain, &queue, &queue, Rc);
            let prepared = builder.max_send_wr(ONE).max_recv_wr(ONE).build().expect("a queue pair");
            let itself = prepared.endpoint();
            prepared.handshake(itself).expect("a connection")
        };
        let queue_pairs: Vec<_> = (0..connections).map(queue_pair).collect();
        let raw: Vec<_> = queue_pairs.iter().map(|queue_pair| queue_pair.as_raw()).collect();
        let mut region = MemoryRegion::new(&domain, connections * LENGTH).expect("a region");
        let epoll = epoll_of(channel.as_fd());
        let handles = c::Handles::of_server(queue.as_raw(), channel.as_raw(), &mut region, &epoll);
        // SAFETY: all objects are valid, and live longer than the server.
        let server = unsafe {
            c::server_open(&handles, peers.device.as_raw().cast(), raw.as_ptr(), raw.len() as u32)
        };
        Self {
            server: NonNull::new(server).expect("a server"),
            _peers: peers,
            _queue_pairs: queue_pairs,
            _queue: queue,
            _channel: channel,
            _region: region,
            _epoll: epoll,
        }
    }
}

impl Drop for CRig {
    fn drop(&mut self) {
        // SAFETY: `new` opened it; it is not used any more.
        unsafe { c::server_close(self.server.as_ptr()) }
    }
}

/// What C answers, as here.
fn answered(bytes: i64) -> TransportResult<u64> {
    bytes.try_into().map_err(|_| TransportError::UnknownWork)
}

pub(crate) fn c_plain(rig: &mut CRig, operations: u64) -> TransportResult<u64> {
    // SAFETY: the rig keeps all that the server uses.
    answered(unsafe { c::c_plain_server(rig.server.as_ptr(), operations) })
}

pub(crate) fn c_tuned(rig: &mut CRig, operations: u64) -> TransportResult<u64> {
    // SAFETY: as above.
    answered(unsafe { c::c_tuned_server(rig.server.as_ptr(), operations) })
}

/// A server on channels that share a completion queue; operations are known by tokens. Fields are dropped in order.
pub(crate) struct SharedQueueRig {
    peers: Peers,
    channels: Vec<Channel<'static>>,
    queue: Arc<SharedCompletionQueue<'static>>,
    epoll: OwnedFd,
}

const RECEIVED: u64 = 0;
const SENT: u64 = 1;

impl SharedQueueRig {
    pub(crate) fn new(connections: usize) -> Self {
        let (peers, context) = Peers::new(connections);
        let domain = Arc::new(ProtectionDomain::new(&context).expect("a domain"));
        let pool = BufferPool::new(&domain, LENGTH, connections, AccessFlags::empty());
        let pool = pool.expect("a pool");
        let depth = 2 * ONE * connections as u32;
        let queue = SharedCompletionQueue::with_event_channel(&context, depth);
        let queue = Arc::new(queue.expect("a completion queue"));
        let channel = |token| {
            let builder = Channel::builder(&domain).max_send_wr(ONE).max_recv_wr(ONE);
            let builder = builder.shared_completion_queue(&queue).token(token as u64);
            let prepared = builder.build().expect("a channel");
            let itself = prepared.endpoint();
            let mut channel = prepared.handshake(itself).expect("a connection");
            receive(&mut channel, pool.take().expect("a buffer")).expect("it is posted");
            channel
        };
        let channels = (0..connections).map(channel).collect();
        queue.arm().expect("it works");
        let epoll = epoll_of(queue.event_fd().expect("it has one"));
        Self { peers, channels, queue, epoll }
    }
}

fn receive(channel: &mut Channel<'static>, buffer: PooledBuffer) -> TransportResult<()> {
    let work = channel.post_owned(ReceiveWorkRequest::new(buffer))?;
    work.into_token(channel, RECEIVED).map_err(|_| TransportError::UnknownWork)
}

/// Answers this many messages.
#[inline(never)]
pub(crate) fn shared_queue(rig: &mut SharedQueueRig, operations: u64) -> TransportResult<u64> {
    let SharedQueueRig { peers, channels, queue, epoll } = rig;
    let (mut answered, mut bytes) = (0, 0);
    while answered < operations {
        peers.next_messages(operations - answered, epoll);
        queue.arm()?;
        for ready in queue.ready() {
            let channel = &mut channels[ready?.token as usize];
            while let Some(ended) = channel.poll_token()? {
                let success = ended.result?;
                let Ok(mut buffer) = ended.buffer.downcast::<PooledBuffer>() else {
                    return Err(TransportError::UnknownWork);
                };
                if ended.token == RECEIVED {
                    bytes += u64::from(success.byte_len());
                    buffer.set_len(success.byte_len() as usize)?;
                    let work = channel.post_owned(SendWorkRequest::new(buffer))?;
                    work.into_token(channel, SENT).map_err(|_| TransportError::UnknownWork)?;
                } else {
                    answered += 1;
                    buffer.set_len(LENGTH)?;
                    receive(channel, buffer)?;
                }
            }
        }
    }
    Ok(bytes)
}
