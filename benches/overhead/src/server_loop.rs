//! The event server on a loop.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use ibverbs::{
    AccessFlags, BufferPool, Loop, PooledBuffer, ProtectionDomain, ReceiveWorkRequest,
    SendWorkRequest, TransportResult,
};

use crate::rig::{LENGTH, epoll_of};
use crate::server::Peers;

const RECEIVED: u64 = 0;
const SENT: u64 = 1;

/// Fields are dropped in order: the device has nothing in flight when queue pairs go.
pub(crate) struct LoopRig {
    peers: Peers,
    server: Loop<'static, PooledBuffer>,
    epoll: OwnedFd,
}

impl LoopRig {
    pub(crate) fn new(connections: usize) -> Self {
        let (peers, context) = Peers::new(connections);
        let domain = Arc::new(ProtectionDomain::new(&context).expect("a domain"));
        let pool = BufferPool::new(&domain, LENGTH, connections, AccessFlags::empty());
        let pool = pool.expect("a pool");
        let mut server = Loop::new(&context, 2 * connections as u32).expect("a completion queue");
        for _ in 0..connections {
            let builder = server.create_channel(&domain).max_send_wr(1).max_recv_wr(1);
            let prepared = builder.build().expect("a channel");
            let itself = prepared.endpoint();
            let channel = server.add(prepared.handshake(itself).expect("a connection"));
            let buffer: PooledBuffer = pool.take().expect("a buffer");
            server
                .post(channel.expect("room"), ReceiveWorkRequest::new(buffer), RECEIVED)
                .expect("it is posted");
        }
        server.arm().expect("it works");
        let epoll = epoll_of(server.as_fd());
        Self { peers, server, epoll }
    }
}

/// Answers this many messages.
#[inline(never)]
pub(crate) fn loop_server(rig: &mut LoopRig, operations: u64) -> TransportResult<u64> {
    let LoopRig { peers, server, epoll } = rig;
    let (mut answered, mut bytes) = (0, 0);
    while answered < operations {
        peers.next_messages(operations - answered, epoll);
        server.arm()?;
        while let Some(ended) = server.next_ended()? {
            let success = ended.result()?;
            let buffer = ended.buffer;
            if ended.token == RECEIVED {
                bytes += u64::from(success.byte_len());
                server.post(ended.channel, SendWorkRequest::new(buffer), SENT)?;
            } else {
                answered += 1;
                server.post(ended.channel, ReceiveWorkRequest::new(buffer), RECEIVED)?;
            }
        }
    }
    Ok(bytes)
}
