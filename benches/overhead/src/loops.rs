//! A loop, one channel of which sends to itself.

use std::sync::Arc;

use ibverbs::{
    AccessFlags, BufferPool, ChannelId, Ended, Loop, PooledBuffer, ProtectionDomain,
    ReceiveWorkRequest, SendWorkRequest, TransportError, TransportResult,
};

use crate::rig::{DEPTH, LENGTH, WINDOW, WINDOW_OPERATIONS, context};

pub(crate) struct SendsRig {
    of: Loop<'static, PooledBuffer>,
    channel: ChannelId,
    pool: BufferPool,
}

impl SendsRig {
    /// With this number of channels, of which one is used.
    pub(crate) fn new(channels: u32) -> Self {
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
        let pool = BufferPool::new(&domain, LENGTH, WINDOW, AccessFlags::empty()).expect("a pool");
        let mut rig = Self { of, channel, pool };
        // It makes the list.
        window(&mut rig, WINDOW_OPERATIONS).expect("it works");
        rig
    }
}

/// What ends next, which has.
#[inline(always)]
fn next(of: &mut Loop<'static, PooledBuffer>) -> TransportResult<Ended<PooledBuffer>> {
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
    let mut buffer = pool.take().ok_or(TransportError::UnknownWork)?;
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
    let take = || pool.take().ok_or(TransportError::UnknownWork);
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
    let mut buffers: [_; WINDOW] = std::array::from_fn(|_| pool.take());
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

/// Sixteen sends with one completion.
#[inline(never)]
pub(crate) fn window(rig: &mut SendsRig, operations: u64) -> TransportResult<u64> {
    let SendsRig { of, channel, pool } = rig;
    let mut buffers: [PooledBuffer; WINDOW] = std::array::from_fn(|_| pool.take().expect("one"));
    let mut sum = 0;
    for _ in 0..operations / WINDOW_OPERATIONS {
        let posted = of.post_window(*channel, buffers.map(SendWorkRequest::new), 0);
        posted.map_err(|refused| refused.error)?;
        let mut ended = [(); WINDOW].map(|()| None);
        for ended in &mut ended {
            let next = next(of)?;
            sum += u64::from(next.result()?.byte_len());
            *ended = Some(next.buffer);
        }
        buffers = ended.map(|buffer| buffer.expect("each was set"));
    }
    Ok(sum)
}
