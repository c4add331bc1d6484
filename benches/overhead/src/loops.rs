//! A loop, one channel of which sends to itself.

use std::sync::Arc;

use ibverbs::channel::DatagramsBuilder;
use ibverbs::queue_pair::SrdOptions;
use ibverbs::{
    AccessFlags, BufferPool, ChannelId, Ended, Loop, PooledBuffer, ProtectionDomain,
    ReadWorkRequest, ReceiveWorkRequest, SendWorkRequest, SharedMemoryRegion, TransportError,
    TransportResult, operation::DatagramDestination,
};

use crate::rails::install;
use crate::rig::{DEPTH, LENGTH, PAGE, READS, WINDOW, WINDOW_OPERATIONS, context, full};

pub(crate) struct SendsRig {
    of: Loop<'static, PooledBuffer>,
    channel: ChannelId,
    pool: BufferPool,
}

impl SendsRig {
    /// A rig with this number of channels, of which one is used.
    pub(crate) fn new(channels: u32) -> Self {
        let (of, channel, domain) = make(channels);
        let pool = BufferPool::new(&domain, LENGTH, WINDOW, AccessFlags::empty()).expect("a pool");
        Self { of, channel, pool }
    }
}

/// A loop with this number of channels, and one of them.
pub(crate) fn make<B>(
    channels: u32,
) -> (Loop<'static, B>, ChannelId, Arc<ProtectionDomain<'static>>) {
    let context = context();
    let domain = Arc::new(ProtectionDomain::new(&context).expect("a domain"));
    let mut of = Loop::new(&context, 2 * DEPTH * channels).expect("a completion queue");
    let mut add = |_| {
        let builder = of.create_channel(&domain).max_send_wr(DEPTH).max_recv_wr(DEPTH);
        let prepared = builder.build().expect("a channel");
        let itself = prepared.endpoint();
        of.add(prepared.handshake(itself).expect("a connection")).expect("room")
    };
    let channels: Vec<_> = (0..channels).map(&mut add).collect();
    let channel = channels[channels.len() / 2];
    (of, channel, domain)
}

/// A loop with a datagram end, which sends to itself.
pub(crate) struct DatagramsRig {
    of: Loop<'static, PooledBuffer>,
    end: ChannelId,
    itself: DatagramDestination,
    pool: BufferPool,
}

impl DatagramsRig {
    pub(crate) fn new(srd: bool) -> Self {
        install();
        let context = context();
        let domain = Arc::new(ProtectionDomain::new(&context).expect("a domain"));
        let mut of = Loop::new(&context, 2 * DEPTH).expect("a completion queue");
        let builder = DatagramsBuilder::new(&domain).max_send_wr(DEPTH).max_recv_wr(DEPTH);
        let builder = if srd { builder.srd(SrdOptions::default()) } else { builder };
        let end = of.add_datagrams(builder).expect("an end");
        let itself = of.endpoint(end).expect("it is there");
        let itself = of.destination(end, &itself).expect("a path");
        let pool = BufferPool::new(&domain, LENGTH, WINDOW, AccessFlags::empty()).expect("a pool");
        let mut rig = Self { of, end, itself, pool };
        // The first makes the address handle.
        datagrams(&mut rig, 1).expect("it works");
        rig
    }
}

/// One datagram after the other.
#[inline(never)]
pub(crate) fn datagrams(rig: &mut DatagramsRig, operations: u64) -> TransportResult<u64> {
    let DatagramsRig { of, end, itself, pool } = rig;
    let mut buffer = full(pool, LENGTH).ok_or(TransportError::UnknownWork)?;
    let mut sum = 0;
    for _ in 0..operations {
        of.send_to(*end, buffer, itself, 0)?;
        let ended = next(of)?;
        sum += u64::from(ended.result()?.byte_len());
        buffer = ended.buffer;
    }
    Ok(sum)
}

/// Polls until an operation ends.
#[inline(always)]
pub(crate) fn next<B>(of: &mut Loop<'static, B>) -> TransportResult<Ended<B>> {
    loop {
        if let Some(ended) = of.next_ended()? {
            return Ok(ended);
        }
    }
}

/// One send after the other.
#[inline(never)]
pub(crate) fn sends(rig: &mut SendsRig, operations: u64) -> TransportResult<u64> {
    let SendsRig { of, channel, pool } = rig;
    let mut buffer = full(pool, LENGTH).ok_or(TransportError::UnknownWork)?;
    let mut sum = 0;
    for _ in 0..operations {
        of.post(*channel, SendWorkRequest::new(buffer), 0)?;
        let ended = next(of)?;
        sum += u64::from(ended.result()?.byte_len());
        buffer = ended.buffer;
    }
    Ok(sum)
}

/// A receive, a send, and what has ended of both.
#[inline(never)]
pub(crate) fn pairs(rig: &mut SendsRig, operations: u64) -> TransportResult<u64> {
    let SendsRig { of, channel, pool } = rig;
    let take = || full(pool, LENGTH).ok_or(TransportError::UnknownWork);
    let (mut message, mut room) = (take()?, take()?);
    let mut sum = 0;
    for _ in 0..operations {
        of.post(*channel, ReceiveWorkRequest::new(room), 1)?;
        of.post(*channel, SendWorkRequest::new(message), 0)?;
        let ended = next(of)?;
        sum += u64::from(ended.result()?.byte_len());
        room = ended.buffer;
        let ended = next(of)?;
        ended.result()?;
        message = ended.buffer;
    }
    Ok(sum)
}

/// Sixteen sends, then their results.
#[inline(never)]
pub(crate) fn sixteen(rig: &mut SendsRig, operations: u64) -> TransportResult<u64> {
    let SendsRig { of, channel, pool } = rig;
    let mut buffers: [_; WINDOW] = std::array::from_fn(|_| full(pool, LENGTH));
    let mut sum = 0;
    for _ in 0..operations / WINDOW_OPERATIONS {
        for buffer in &mut buffers {
            let buffer = buffer.take().ok_or(TransportError::UnknownWork)?;
            of.post(*channel, SendWorkRequest::new(buffer), 0)?;
        }
        for buffer in &mut buffers {
            let ended = next(of)?;
            sum += u64::from(ended.result()?.byte_len());
            *buffer = Some(ended.buffer);
        }
    }
    Ok(sum)
}

/// A loop, buffers for pages, and the memory of the peer.
pub(crate) struct PagesRig {
    of: Loop<'static, PooledBuffer>,
    channel: ChannelId,
    pool: BufferPool,
    peer: SharedMemoryRegion<'static, u8>,
}

impl PagesRig {
    pub(crate) fn new() -> Self {
        let (of, channel, domain) = make(1);
        let pool = BufferPool::new(&domain, PAGE, READS, AccessFlags::empty()).expect("a pool");
        let peer = SharedMemoryRegion::new(&domain, PAGE, AccessFlags::REMOTE_READ);
        Self { of, channel, pool, peer: peer.expect("a region") }
    }
}

/// Reads of a page, of which as many as possible are in flight.
#[inline(never)]
pub(crate) fn reads(rig: &mut PagesRig, operations: u64) -> TransportResult<u64> {
    let PagesRig { of, channel, pool, peer } = rig;
    let remote = peer.remote();
    let mut sum = 0;
    for operation in 0..operations {
        let buffer = if operation < READS as u64 {
            full(pool, PAGE).ok_or(TransportError::UnknownWork)?
        } else {
            let ended = next(of)?;
            sum += u64::from(ended.result()?.byte_len()) / PAGE as u64 * LENGTH as u64;
            ended.buffer
        };
        of.post(*channel, ReadWorkRequest::new(buffer, remote), 0)?;
    }
    for _ in 0..operations.min(READS as u64) {
        sum += u64::from(next(of)?.result()?.byte_len()) / PAGE as u64 * LENGTH as u64;
    }
    Ok(sum)
}

/// Polls that find nothing.
#[inline(never)]
pub(crate) fn empty(rig: &mut SendsRig, operations: u64) -> TransportResult<u64> {
    for _ in 0..operations {
        if rig.of.next_ended()?.is_some() {
            return Err(TransportError::UnknownWork);
        }
    }
    Ok(operations * LENGTH as u64)
}

/// A loop whose channels share their receives.
pub(crate) struct SharedRig {
    of: Loop<'static, PooledBuffer>,
    receives: ChannelId,
    last: ChannelId,
    pool: BufferPool,
}

impl SharedRig {
    pub(crate) fn new(channels: u32) -> Self {
        let context = context();
        let domain = Arc::new(ProtectionDomain::new(&context).expect("a domain"));
        let pool = BufferPool::new(&domain, LENGTH, 1, AccessFlags::empty()).expect("a pool");
        let mut of = Loop::new(&context, DEPTH + channels).expect("a completion queue");
        let receives = of.add_shared_receives(&domain, DEPTH).expect("shared receives");
        let mut last = receives;
        for _ in 0..channels {
            let builder = of.create_sharing_channel(&domain, receives).expect("they are there");
            let prepared = builder.max_send_wr(1).build().expect("a channel");
            let itself = prepared.endpoint();
            last = of.add(prepared.handshake(itself).expect("a connection")).expect("room");
        }
        Self { of, receives, last, pool }
    }
}

/// One shared receive after the other, whose messages come on the last channel.
#[inline(never)]
pub(crate) fn shared(rig: &mut SharedRig, operations: u64) -> TransportResult<u64> {
    let SharedRig { of, receives, last, pool } = rig;
    let mut room = pool.take().ok_or(TransportError::QueueFull)?;
    let mut sum = 0;
    for _ in 0..operations {
        of.post(*receives, ReceiveWorkRequest::new(room), 0)?;
        let ended = next(of)?;
        if ended.channel != *last {
            return Err(TransportError::UnknownWork);
        }
        sum += u64::from(ended.result()?.byte_len());
        room = ended.buffer;
    }
    Ok(sum)
}
