//! A server of requests: it answers each from another buffer of its pool, with another length, and posts the receive again at
//! once. In C, on a loop, and with a task for each receive.

use std::future::Future;
use std::os::fd::{AsFd, OwnedFd};
use std::pin::Pin;
use std::ptr::NonNull;
use std::rc::Rc as Shared;
use std::sync::Arc;

use ibverbs::future::Share;
use ibverbs::pool::BufferCache;
use ibverbs::{
    AccessFlags, AsyncChannel, BufferPool, CompletionChannel, CompletionQueue, Loop, MemoryRegion,
    PooledBuffer, ProtectionDomain, QueuePair, Rc, Reactor, ReceiveWorkRequest, SendWorkRequest,
    TransportError, TransportResult,
};

use crate::c;
use crate::reactor::channel_of;
use crate::rig::{LENGTH, WINDOW, epoll_of};
use crate::server::Peers;
use crate::server_futures::{Task, Tasks, note_answer};

/// The length of an answer.
const ANSWER: usize = 32;

/// The server of C. Fields are dropped in order: the device has nothing in flight when queue pairs go.
pub(crate) struct CRig {
    rpc: NonNull<c::Rpc>,
    _peers: Peers,
    _queue_pairs: Vec<QueuePair<'static>>,
    _queue: Arc<CompletionQueue<'static>>,
    _channel: Arc<CompletionChannel<'static>>,
    _region: MemoryRegion<'static, u8>,
    _epoll: OwnedFd,
}

impl CRig {
    pub(crate) fn new(connections: usize, receives: usize) -> Self {
        let all = connections * receives;
        let (peers, context) = Peers::new(all);
        let domain = Arc::new(ProtectionDomain::new(&context).expect("a domain"));
        let channel = Arc::new(CompletionChannel::new(&context).expect("a channel"));
        let queue = CompletionQueue::builder(&context, 2 * all as u32).channel(&channel).build();
        let queue = Arc::new(queue.expect("a completion queue"));
        let depth = receives as u32;
        let queue_pair = |_| {
            let builder = QueuePair::builder(&domain, &queue, &queue, Rc);
            let prepared = builder.max_send_wr(depth).max_recv_wr(depth).build();
            let prepared = prepared.expect("a queue pair");
            let itself = prepared.endpoint();
            prepared.handshake(itself).expect("a connection")
        };
        let queue_pairs: Vec<_> = (0..connections).map(queue_pair).collect();
        let raw: Vec<_> = queue_pairs.iter().map(|queue_pair| queue_pair.as_raw()).collect();
        let mut region = MemoryRegion::new(&domain, (all + WINDOW) * LENGTH).expect("a region");
        let epoll = epoll_of(channel.as_fd());
        let handles = c::Handles::of_server(queue.as_raw(), channel.as_raw(), &mut region, &epoll);
        let count = raw.len() as u32;
        // SAFETY: all objects are valid, and live longer than the server.
        let rpc = unsafe { c::rpc_open(&handles, peers.as_raw(), raw.as_ptr(), count, depth) };
        Self {
            rpc: NonNull::new(rpc).expect("a server"),
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
        unsafe { c::rpc_close(self.rpc.as_ptr()) }
    }
}

pub(crate) fn c_tuned(rig: &mut CRig, operations: u64) -> TransportResult<u64> {
    // SAFETY: the rig keeps all that the server uses.
    let bytes = unsafe { c::c_tuned_rpc(rig.rpc.as_ptr(), operations) };
    bytes.try_into().map_err(|_| TransportError::UnknownWork)
}

const RECEIVED: u64 = 0;
const SENT: u64 = 1;

/// Fields are dropped in order: the device has nothing in flight when queue pairs go.
pub(crate) struct LoopRig {
    peers: Peers,
    server: Loop<'static, PooledBuffer>,
    pool: BufferPool,
    cache: BufferCache,
    epoll: OwnedFd,
}

impl LoopRig {
    pub(crate) fn new(connections: usize, receives: usize) -> Self {
        let all = connections * receives;
        let (peers, context) = Peers::new(all);
        let domain = Arc::new(ProtectionDomain::new(&context).expect("a domain"));
        let pool = BufferPool::new(&domain, LENGTH, all + WINDOW, AccessFlags::empty());
        let pool = pool.expect("a pool");
        let mut server = Loop::new(&context, 2 * all as u32).expect("a completion queue");
        let depth = receives as u32;
        let mut channels = Vec::new();
        for _ in 0..connections {
            let builder = server.create_channel(&domain).max_send_wr(depth).max_recv_wr(depth);
            let prepared = builder.build().expect("a channel");
            let itself = prepared.endpoint();
            let channel = server.add(prepared.handshake(itself).expect("a connection"));
            channels.push(channel.expect("room"));
        }
        for _ in 0..receives {
            for &channel in &channels {
                let room = ReceiveWorkRequest::new(pool.take().expect("a buffer"));
                server.post(channel, room, RECEIVED).expect("it is posted");
            }
        }
        server.arm().expect("it works");
        let epoll = epoll_of(server.as_fd());
        let cache = BufferCache::new(&pool);
        Self { peers, server, pool, cache, epoll }
    }
}

/// Answers this many requests, and keeps the buffers of answers.
#[inline(never)]
pub(crate) fn on_loop_with_cache(rig: &mut LoopRig, operations: u64) -> TransportResult<u64> {
    let LoopRig { peers, server, cache, epoll, .. } = rig;
    let (mut answered, mut bytes) = (0, 0);
    while answered < operations {
        peers.next_messages(operations - answered, epoll);
        server.arm()?;
        while let Some(ended) = server.next_ended()? {
            let success = ended.result()?;
            if ended.token == RECEIVED {
                bytes += u64::from(success.byte_len());
                let mut answer = cache.take().ok_or(TransportError::QueueFull)?;
                answer.set_len(ANSWER)?;
                server.post(ended.channel, SendWorkRequest::new(answer), SENT)?;
                server.post(ended.channel, ReceiveWorkRequest::new(ended.buffer), RECEIVED)?;
            } else {
                answered += 1;
                cache.give_back(ended.buffer);
            }
        }
    }
    Ok(bytes)
}

/// Answers this many requests.
#[inline(never)]
pub(crate) fn on_loop(rig: &mut LoopRig, operations: u64) -> TransportResult<u64> {
    let LoopRig { peers, server, pool, epoll, .. } = rig;
    let (mut answered, mut bytes) = (0, 0);
    while answered < operations {
        peers.next_messages(operations - answered, epoll);
        server.arm()?;
        while let Some(ended) = server.next_ended()? {
            let success = ended.result()?;
            if ended.token == RECEIVED {
                bytes += u64::from(success.byte_len());
                let mut answer = pool.take().ok_or(TransportError::QueueFull)?;
                answer.set_len(ANSWER)?;
                server.post(ended.channel, SendWorkRequest::new(answer), SENT)?;
                server.post(ended.channel, ReceiveWorkRequest::new(ended.buffer), RECEIVED)?;
            } else {
                answered += 1; // and the buffer goes back to the pool
            }
        }
    }
    Ok(bytes)
}

/// A server with a task for each receive.
pub(crate) type TasksRig<S> = Tasks<S>;

/// Answers one request after the other.
async fn serve<S: Share<Buffer = PooledBuffer>>(
    channel: Shared<AsyncChannel<S>>,
    pool: BufferPool,
) -> TransportError {
    let Some(mut room) = pool.take() else { return TransportError::QueueFull };
    loop {
        let (request, received) = match channel.receive(room).await {
            Ok(request) => request,
            Err(failed) => return failed.error,
        };
        let Some(mut answer) = pool.take() else { return TransportError::QueueFull };
        if let Err(error) = answer.set_len(ANSWER) {
            return error.into();
        }
        if let Err(failed) = channel.send(answer).await {
            return failed.error;
        }
        note_answer(received.byte_len());
        room = request;
    }
}

pub(crate) fn tasks<S: Share<Buffer = PooledBuffer> + 'static>(
    connections: usize,
    receives: usize,
) -> TasksRig<S> {
    let all = connections * receives;
    let (peers, context) = Peers::new(all);
    let domain = Arc::new(ProtectionDomain::new(&context).expect("a domain"));
    let pool = BufferPool::new(&domain, LENGTH, all + WINDOW, AccessFlags::empty());
    let pool = pool.expect("a pool");
    let reactor = Reactor::with_share(&context, 2 * all as u32).expect("a reactor");
    let channels: Vec<_> = (0..connections)
        .map(|_| Shared::new(channel_of(&reactor, &domain, receives as u32)))
        .collect();
    let task = |index: usize| -> Pin<Box<dyn Future<Output = TransportError>>> {
        Box::pin(serve::<S>(channels[index % connections].clone(), pool.clone()))
    };
    let tasks: Vec<Task> = (0..all).map(task).collect();
    Tasks::new(peers, reactor, tasks)
}
