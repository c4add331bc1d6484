//! Sends on many channels in turn: by a loop, by a sender of each channel, and in C.

use std::ptr::NonNull;
use std::sync::Arc;

use ibverbs::event_loop::LoopSender;
use ibverbs::{
    AccessFlags, BufferPool, ChannelId, CompletionQueue, Loop, MemoryRegion, PooledBuffer,
    ProtectionDomain, QueuePair, Rc, SendWorkRequest, TransportError, TransportResult,
};

use crate::c;
use crate::loops::next;
use crate::rig::{LENGTH, context, full};

/// Queue pairs of C, one send at a time on each. Fields are dropped in order.
pub(crate) struct CRig {
    many: NonNull<c::Many>,
    _queue_pairs: Vec<QueuePair<'static>>,
    _queue: Arc<CompletionQueue<'static>>,
    _region: MemoryRegion<'static, u8>,
}

impl CRig {
    pub(crate) fn new(channels: usize) -> Self {
        let context = context();
        let domain = Arc::new(ProtectionDomain::new(&context).expect("a domain"));
        let queue = CompletionQueue::new(&context, 2 * channels as u32);
        let queue = Arc::new(queue.expect("a completion queue"));
        let queue_pair = |_| {
            let builder = QueuePair::builder(&domain, &queue, &queue, Rc);
            let prepared = builder.max_send_wr(1).max_recv_wr(1).build();
            let prepared = prepared.expect("a queue pair");
            let itself = prepared.endpoint();
            prepared.handshake(itself).expect("a connection")
        };
        let queue_pairs: Vec<_> = (0..channels).map(queue_pair).collect();
        let raw: Vec<_> = queue_pairs.iter().map(|queue_pair| queue_pair.as_raw()).collect();
        let mut region = MemoryRegion::new(&domain, LENGTH).expect("a region");
        let handles = c::Handles::of_queue(queue.as_raw(), &mut region);
        // SAFETY: all objects are valid, and live longer than what is opened.
        let many = unsafe { c::many_open(&handles, raw.as_ptr(), raw.len() as u32) };
        let many = NonNull::new(many).expect("memory");
        Self { many, _queue_pairs: queue_pairs, _queue: queue, _region: region }
    }

    pub(crate) fn run(
        &mut self,
        f: unsafe extern "C" fn(*mut c::Many, u64) -> i64,
        operations: u64,
    ) -> u64 {
        // SAFETY: the rig keeps all that it uses.
        unsafe { f(self.many.as_ptr(), operations) }.cast_unsigned()
    }
}

impl Drop for CRig {
    fn drop(&mut self) {
        // SAFETY: `new` opened it; it is not used any more.
        unsafe { c::many_close(self.many.as_ptr()) }
    }
}

/// A loop with this number of channels, one send at a time on each.
pub(crate) struct LoopRig {
    of: Loop<'static, PooledBuffer>,
    channels: Vec<ChannelId>,
    pool: BufferPool,
}

impl LoopRig {
    pub(crate) fn new(channels: usize) -> Self {
        let context = context();
        let domain = Arc::new(ProtectionDomain::new(&context).expect("a domain"));
        let mut of = Loop::new(&context, 2 * channels as u32).expect("a completion queue");
        let mut add = |_| {
            let builder = of.create_channel(&domain).max_send_wr(1).max_recv_wr(1);
            let prepared = builder.build().expect("a channel");
            let itself = prepared.endpoint();
            of.add(prepared.handshake(itself).expect("a connection")).expect("room")
        };
        let channels: Vec<_> = (0..channels).map(&mut add).collect();
        let pool = BufferPool::new(&domain, LENGTH, 1, AccessFlags::empty()).expect("a pool");
        Self { of, channels, pool }
    }
}

/// One send after the other, each on the next channel.
#[inline(never)]
pub(crate) fn on_loop(rig: &mut LoopRig, operations: u64) -> TransportResult<u64> {
    let LoopRig { of, channels, pool } = rig;
    let mut buffer = full(pool, LENGTH).ok_or(TransportError::UnknownWork)?;
    let (mut sum, mut turn) = (0, channels.iter().cycle());
    for _ in 0..operations {
        let channel = *turn.next().ok_or(TransportError::UnknownWork)?;
        of.post(channel, SendWorkRequest::new(buffer), 0)?;
        let ended = next(of)?;
        sum += u64::from(ended.result()?.byte_len());
        buffer = ended.buffer;
    }
    Ok(sum)
}

/// Sends by a sender of each channel.
pub(crate) struct SendersRig {
    rig: LoopRig,
    senders: Vec<LoopSender<'static, PooledBuffer>>,
}

impl SendersRig {
    pub(crate) fn new(channels: usize) -> Self {
        let mut rig = LoopRig::new(channels);
        let LoopRig { of, channels, .. } = &mut rig;
        let sender = |&channel| of.channel_sender(channel).expect("a sender");
        let senders = channels.iter().map(sender).collect();
        Self { rig, senders }
    }
}

/// One send after the other, each by the next sender, on the thread that polls.
#[inline(never)]
pub(crate) fn by_senders(rig: &mut SendersRig, operations: u64) -> TransportResult<u64> {
    let SendersRig { rig: LoopRig { of, pool, .. }, senders } = rig;
    let mut buffer = full(pool, LENGTH).ok_or(TransportError::UnknownWork)?;
    let (mut sum, mut turn) = (0, senders.iter().cycle());
    for _ in 0..operations {
        let sender = turn.next().ok_or(TransportError::UnknownWork)?;
        sender.post(SendWorkRequest::new(buffer), 0)?;
        let ended = next(of)?;
        sum += u64::from(ended.result()?.byte_len());
        buffer = ended.buffer;
    }
    Ok(sum)
}
