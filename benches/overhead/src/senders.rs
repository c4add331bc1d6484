//! A sender of a loop's channel.

use ibverbs::event_loop::LoopSender;
use ibverbs::{
    AccessFlags, BufferPool, Loop, PooledBuffer, SendWorkRequest, TransportError, TransportResult,
};

use crate::loops::{make, next};
use crate::rig::{LENGTH, WINDOW, full};

/// A loop, and a sender of one of its channels.
pub(crate) struct SenderRig {
    of: Loop<'static, PooledBuffer>,
    sender: LoopSender<'static, PooledBuffer>,
    pool: BufferPool,
}

impl SenderRig {
    pub(crate) fn new() -> Self {
        let (mut of, channel, domain) = make(1);
        let sender = of.channel_sender(channel).expect("a sender");
        let pool = BufferPool::new(&domain, LENGTH, WINDOW, AccessFlags::empty()).expect("a pool");
        Self { of, sender, pool }
    }
}

/// One send after the other, by the sender, on the thread that polls.
#[inline(never)]
pub(crate) fn sends(rig: &mut SenderRig, operations: u64) -> TransportResult<u64> {
    let SenderRig { of, sender, pool } = rig;
    let mut buffer = full(pool, LENGTH).ok_or(TransportError::UnknownWork)?;
    let mut sum = 0;
    for _ in 0..operations {
        sender.post(SendWorkRequest::new(buffer), 0)?;
        let ended = next(of)?;
        sum += u64::from(ended.result()?.byte_len());
        buffer = ended.buffer;
    }
    Ok(sum)
}
