//! The channel layer: no `unsafe` in here.

use std::sync::Arc;

use ibverbs::{Channel, MemoryRegion, ProtectionDomain, ScopeError, TransportError};

use crate::rig::{DEPTH, LENGTH, WINDOW, WINDOW_OPERATIONS, context};

pub(crate) struct ChannelRig {
    channel: Channel<'static>,
    region: MemoryRegion<'static, u8>,
}

impl ChannelRig {
    pub(crate) fn new() -> Self {
        let context = context();
        let domain = Arc::new(ProtectionDomain::new(&context).expect("a domain"));
        let prepared = Channel::builder(&domain).max_send_wr(DEPTH).build().expect("a channel");
        let itself = prepared.endpoint();
        let channel = prepared.handshake(itself).expect("a connection");
        let region = MemoryRegion::new(&domain, WINDOW * LENGTH).expect("a region");
        Self { channel, region }
    }
}

/// One after the other.
#[inline(never)]
pub(crate) fn w6(rig: &mut ChannelRig, operations: u64) -> Result<u64, TransportError> {
    let ChannelRig { channel, region } = rig;
    let message = region.slice(..LENGTH)?;
    let mut sum = 0;
    for _ in 0..operations {
        sum += u64::from(channel.send(&message)?.byte_len());
    }
    Ok(sum)
}

/// One after the other, in one scope.
#[inline(never)]
pub(crate) fn w6_scoped(rig: &mut ChannelRig, operations: u64) -> Result<u64, TransportError> {
    let ChannelRig { channel, region } = rig;
    let message = region.slice(..LENGTH)?;
    let mut sum = 0;
    let result = channel.scope(|scope| {
        for _ in 0..operations {
            sum += u64::from(scope.post_send(message)?.wait()?.1.byte_len());
        }
        Ok(())
    });
    result.map_err(ended)?;
    Ok(sum)
}

/// All of them in one scope, a window of them in flight all the time.
#[inline(never)]
pub(crate) fn w7(rig: &mut ChannelRig, operations: u64) -> Result<u64, TransportError> {
    let ChannelRig { channel, region } = rig;
    let message = region.slice(..LENGTH)?;
    let mut sum = 0;
    let result = channel.scope(|scope| {
        let mut window = [(); WINDOW].map(|()| scope.post_send(message).expect("there is room"));
        let mut posted = WINDOW_OPERATIONS;
        while posted < operations {
            for pending in &mut window {
                let oldest = std::mem::replace(pending, scope.post_send(message)?);
                sum += u64::from(oldest.wait()?.1.byte_len());
            }
            posted += WINDOW_OPERATIONS;
        }
        for pending in window {
            sum += u64::from(pending.wait()?.1.byte_len());
        }
        Ok(())
    });
    result.map_err(ended)?;
    Ok(sum)
}

fn ended(error: ScopeError<TransportError>) -> TransportError {
    match error {
        ScopeError::Closure(error) | ScopeError::Exit(error) => error,
    }
}
