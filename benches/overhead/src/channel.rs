//! The channel layer, without `unsafe`.

use std::sync::Arc;

use ibverbs::channel::{ScopeError, ScopedPendingWork};
use ibverbs::{
    AccessFlags, Channel, Loop, MemoryRegion, PooledBuffer, ProtectionDomain, SharedMemoryRegion,
    TransportError,
};

use crate::rig::{DEPTH, LENGTH, PAGE, READS, WINDOW, WINDOW_OPERATIONS, context};

pub(crate) struct ChannelRig {
    channel: Channel<'static>,
    region: MemoryRegion<'static, u8>,
}

impl ChannelRig {
    pub(crate) fn new() -> Self {
        Self::of(&Arc::new(ProtectionDomain::new(context()).expect("a domain")))
    }

    fn of(domain: &Arc<ProtectionDomain<'static>>) -> Self {
        let prepared = Channel::builder(domain).max_send_wr(DEPTH).max_recv_wr(DEPTH).build();
        let prepared = prepared.expect("a channel");
        let itself = prepared.endpoint();
        let channel = prepared.handshake(itself).expect("a connection");
        let region = MemoryRegion::new(domain, WINDOW * LENGTH).expect("a region");
        Self { channel, region }
    }
}

/// A receive, a send that is waited for, and the receive, whose completion comes first. All are in one
/// scope.
#[inline(never)]
pub(crate) fn ping_pong(rig: &mut ChannelRig, operations: u64) -> Result<u64, TransportError> {
    let ChannelRig { channel, region } = rig;
    let (message, rest) = region.slice_mut(..)?.split_at(LENGTH)?;
    let (message, received) = (message.as_slice(), rest.split_at(LENGTH)?.0);
    let mut sum = 0;
    let result = channel.scope(|scope| {
        let mut buffer = received;
        for _ in 0..operations {
            let receive = scope.post_receive(buffer)?;
            scope.post_send(message)?.wait()?;
            let success;
            (buffer, success) = receive.wait()?;
            sum += u64::from(success.byte_len());
        }
        Ok(())
    });
    result.map_err(ended)?;
    Ok(sum)
}

/// Sixteen sends, then the waits for them. All are in one scope.
#[inline(never)]
pub(crate) fn window(rig: &mut ChannelRig, operations: u64) -> Result<u64, TransportError> {
    let ChannelRig { channel, region } = rig;
    let message = region.slice(..LENGTH)?;
    let mut sum = 0;
    let result = channel.scope(|scope| {
        let mut window = [const { None }; WINDOW];
        for _ in 0..operations / WINDOW_OPERATIONS {
            for pending in &mut window {
                *pending = Some(scope.post_send(message)?);
            }
            for pending in window.iter_mut().filter_map(Option::take) {
                sum += u64::from(pending.wait()?.1.byte_len());
            }
        }
        Ok(())
    });
    result.map_err(ended)?;
    Ok(sum)
}

/// Sixteen sends without handles, then the wait for all. All are in one scope.
#[inline(never)]
pub(crate) fn window_at_once(rig: &mut ChannelRig, operations: u64) -> Result<u64, TransportError> {
    let ChannelRig { channel, region } = rig;
    let message = region.slice(..LENGTH)?;
    let mut sum = 0;
    let result = channel.scope(|scope| {
        for _ in 0..operations / WINDOW_OPERATIONS {
            for _ in 0..WINDOW {
                scope.post_send(message)?;
            }
            scope.wait_all()?;
            sum += WINDOW_OPERATIONS * LENGTH as u64;
        }
        Ok(())
    });
    result.map_err(ended)?;
    Ok(sum)
}

/// Sixteen sends without handles in a scope of their own, whose end waits for them.
#[inline(never)]
pub(crate) fn window_per_scope(
    rig: &mut ChannelRig,
    operations: u64,
) -> Result<u64, TransportError> {
    let ChannelRig { channel, region } = rig;
    let message = region.slice(..LENGTH)?;
    let mut sum = 0;
    for _ in 0..operations / WINDOW_OPERATIONS {
        let result = channel.scope(|scope| {
            for _ in 0..WINDOW {
                scope.post_send(message)?;
            }
            Ok(())
        });
        result.map_err(ended)?;
        sum += WINDOW_OPERATIONS * LENGTH as u64;
    }
    Ok(sum)
}

/// One operation after the other.
#[inline(never)]
pub(crate) fn w6(rig: &mut ChannelRig, operations: u64) -> Result<u64, TransportError> {
    let ChannelRig { channel, region } = rig;
    let message = region.slice(..LENGTH)?;
    let mut sum = 0;
    for _ in 0..operations {
        sum += u64::from(channel.send(message)?.byte_len());
    }
    Ok(sum)
}

/// One operation after the other, in one scope.
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

/// One operation after the other, each in a scope of its own.
#[inline(never)]
pub(crate) fn w6_per_scope(rig: &mut ChannelRig, operations: u64) -> Result<u64, TransportError> {
    let ChannelRig { channel, region } = rig;
    let message = region.slice(..LENGTH)?;
    let mut sum = 0;
    for _ in 0..operations {
        let result = channel.scope(|scope| Ok(scope.post_send(message)?.wait()?.1));
        sum += u64::from(result.map_err(ended)?.byte_len());
    }
    Ok(sum)
}

/// All operations in one scope, with a full window in flight all the time.
#[inline(never)]
pub(crate) fn w7(rig: &mut ChannelRig, operations: u64) -> Result<u64, TransportError> {
    let ChannelRig { channel, region } = rig;
    let message = region.slice(..LENGTH)?;
    let mut sum = 0;
    let result = channel.scope(|scope| {
        let mut window =
            [(); WINDOW].map(move |()| scope.post_send(message).expect("there is room"));
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

/// One send after the other, each in a scope of its own, whose end waits for it.
#[inline(never)]
pub(crate) fn w6_left(rig: &mut ChannelRig, operations: u64) -> Result<u64, TransportError> {
    let ChannelRig { channel, region } = rig;
    let message = region.slice(..LENGTH)?;
    for _ in 0..operations {
        channel.scope(|scope| scope.post_send(message).map(drop)).map_err(ended)?;
    }
    Ok(operations * LENGTH as u64)
}

/// A channel, memory for pages, and that of the peer.
pub(crate) struct PagesRig {
    channel: Channel<'static>,
    pages: MemoryRegion<'static, u8>,
    peer: SharedMemoryRegion<'static, u8>,
}

impl PagesRig {
    pub(crate) fn new() -> Self {
        let context = context();
        let domain = Arc::new(ProtectionDomain::new(&context).expect("a domain"));
        let ChannelRig { channel, .. } = ChannelRig::of(&domain);
        let pages = MemoryRegion::new(&domain, READS * PAGE).expect("a region");
        let peer = SharedMemoryRegion::new(&domain, PAGE, AccessFlags::REMOTE_READ);
        Self { channel, pages, peer: peer.expect("a region") }
    }
}

/// Reads of a page, of which as many as possible are in flight.
#[inline(never)]
pub(crate) fn reads(rig: &mut PagesRig, operations: u64) -> Result<u64, TransportError> {
    let PagesRig { channel, pages, peer, .. } = rig;
    let remote = peer.remote();
    let mut rest = pages.slice_mut(..)?;
    let mut free: [_; READS] = std::array::from_fn(|_| None);
    for place in &mut free {
        let (page, others) = rest.split_at(PAGE)?;
        (*place, rest) = (Some(page), others);
    }
    let mut sum = 0;
    let result = channel.scope(|scope| {
        let mut flying = [const { None::<ScopedPendingWork<'_, _>> }; READS];
        // Each place in turn: a wait for its last read, then the next one. Beyond `operations` there are only waits.
        for operation in 0..operations + READS as u64 {
            let place = operation as usize % READS;
            let page = match flying[place].take() {
                Some(pending) => {
                    let (page, success) = pending.wait()?;
                    sum += u64::from(success.byte_len()) / PAGE as u64 * LENGTH as u64;
                    page
                }
                None => free[place].take().ok_or(TransportError::UnknownWork)?,
            };
            if operation < operations {
                flying[place] = Some(scope.post_read(page, remote)?);
            }
        }
        Ok(())
    });
    result.map_err(ended)?;
    Ok(sum)
}

/// A rig that makes channels.
pub(crate) struct DomainRig {
    domain: Arc<ProtectionDomain<'static>>,
    of: Loop<'static, PooledBuffer>,
}

impl DomainRig {
    pub(crate) fn new() -> Self {
        let context = context();
        let domain = Arc::new(ProtectionDomain::new(&context).expect("a domain"));
        Self { domain, of: Loop::new(&context, DEPTH).expect("a loop") }
    }
}

/// A channel that is connected to itself, and dropped.
#[inline(never)]
pub(crate) fn made(rig: &mut DomainRig, operations: u64) -> Result<u64, TransportError> {
    for _ in 0..operations {
        let prepared = Channel::builder(&rig.domain).build()?;
        let itself = prepared.endpoint();
        drop(prepared.handshake(itself).map_err(|failed| failed.error)?);
    }
    Ok(operations * LENGTH as u64)
}

/// Makes channels of a loop.
#[inline(never)]
pub(crate) fn made_for_loop(rig: &mut DomainRig, operations: u64) -> Result<u64, TransportError> {
    let DomainRig { domain, of } = rig;
    for _ in 0..operations {
        let prepared = of.create_channel(&*domain).build()?;
        let itself = prepared.endpoint();
        let channel = prepared.handshake(itself).map_err(|failed| failed.error)?;
        let channel = of.add(channel).map_err(|failed| failed.error)?;
        of.remove(channel)?;
    }
    Ok(operations * LENGTH as u64)
}
