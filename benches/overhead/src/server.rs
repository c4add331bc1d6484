//! An event server: it sleeps until messages have come, answers each with what it has received, and posts the receive
//! again when the answer is sent. Each connection has one buffer. In C.

use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use ibverbs::{
    CompletionChannel, CompletionQueue, Context, MemoryRegion, ProtectionDomain, QueuePair, Rc,
    TransportError, TransportResult,
};
use ibverbs_function_device::{Builder, FunctionDevice, raw};

use crate::c;
use crate::rig::{LENGTH, WINDOW_OPERATIONS, epoll_of, sleep_in};

/// The other side of all connections: messages come when it says so.
pub(crate) struct Peers {
    device: FunctionDevice,
    /// The number of messages that come at a time.
    burst: u64,
}

impl Peers {
    /// The peers of this number of connections, and a context of their device.
    pub(crate) fn new(connections: usize) -> (Self, Arc<Context<'static>>) {
        let device = Builder::lean().held_receives(connections as u32).build();
        let context = Arc::new(device.context());
        (Self { device, burst: WINDOW_OPERATIONS.min(connections as u64) }, context)
    }

    pub(crate) fn as_raw(&self) -> *mut raw::function_device {
        self.device.as_raw().cast()
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
        let server =
            unsafe { c::server_open(&handles, peers.as_raw(), raw.as_ptr(), raw.len() as u32) };
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

/// Turns what C returns into a result.
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
