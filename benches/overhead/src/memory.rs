//! Buffers of a pool that are taken and dropped, also under sends of two threads, and copies out of shared memory.

use std::hint::black_box;
use std::sync::Arc;
use std::thread;

use ibverbs::pool::BufferCache;
use ibverbs::{
    AccessFlags, BufferPool, ChannelId, Loop, PooledBuffer, ProtectionDomain, SendWorkRequest,
    SharedMemoryRegion, TransportError, TransportResult,
};

use crate::c;
use crate::loops::{make, next};
use crate::rig::{LENGTH, PAGE, Rig, WINDOW, context, full};

/// A pool, all but one chunk of which are in use: as where receives have them.
pub(crate) struct PoolRig {
    pool: BufferPool,
    cache: BufferCache,
    _in_use: Vec<PooledBuffer>,
}

impl PoolRig {
    pub(crate) fn new(chunks: usize) -> Self {
        let domain = Arc::new(ProtectionDomain::new(context()).expect("a domain"));
        let pool = BufferPool::new(&domain, LENGTH, chunks, AccessFlags::empty()).expect("a pool");
        let mut in_use: Vec<_> = (0..chunks).filter_map(|_| pool.take()).collect();
        drop(in_use.swap_remove(chunks / 2));
        Self { cache: BufferCache::new(&pool), pool, _in_use: in_use }
    }
}

#[inline(never)]
pub(crate) fn take_and_drop(rig: &mut PoolRig, operations: u64) -> TransportResult<u64> {
    let mut bytes = 0;
    for _ in 0..operations {
        let buffer = rig.pool.take().ok_or(TransportError::QueueFull)?;
        bytes += black_box(&buffer).capacity() as u64;
    }
    Ok(bytes)
}

#[inline(never)]
pub(crate) fn take_and_keep(rig: &mut PoolRig, operations: u64) -> TransportResult<u64> {
    let mut bytes = 0;
    for _ in 0..operations {
        let buffer = rig.cache.take().ok_or(TransportError::QueueFull)?;
        bytes += black_box(&buffer).capacity() as u64;
        rig.cache.give_back(buffer);
    }
    Ok(bytes)
}

/// Two loops, and a pool for both.
pub(crate) struct TwoRig {
    loops: [(Loop<'static, PooledBuffer>, ChannelId); 2],
    pool: BufferPool,
}

impl TwoRig {
    pub(crate) fn new() -> Self {
        let (one, channel, domain) = make(1);
        let (two, other, _) = make(1);
        let pool = BufferPool::new(&domain, LENGTH, WINDOW, AccessFlags::empty()).expect("a pool");
        Self { loops: [(one, channel), (two, other)], pool }
    }
}

/// Each thread does half of the sends, each from another buffer.
#[inline(never)]
pub(crate) fn two_threads(rig: &mut TwoRig, operations: u64) -> TransportResult<u64> {
    let TwoRig { loops, pool } = rig;
    let send_all = |(of, channel): &mut (Loop<'static, PooledBuffer>, ChannelId)| {
        let mut sum = 0;
        for _ in 0..operations / 2 {
            let buffer = full(pool, LENGTH).ok_or(TransportError::QueueFull)?;
            of.post(*channel, SendWorkRequest::new(buffer), 0)?;
            sum += u64::from(next(of)?.result()?.byte_len());
        }
        Ok(sum)
    };
    let [one, two] = loops;
    thread::scope(|threads| {
        let other = threads.spawn(|| send_all(two));
        let own: TransportResult<u64> = send_all(one);
        Ok(own? + other.join().map_err(|_| TransportError::UnknownWork)??)
    })
}

/// Two threads in C, each with a rig of its own.
pub(crate) struct CTwoRig {
    rigs: [Rig; 2],
}

impl CTwoRig {
    pub(crate) fn new() -> Self {
        Self { rigs: [Rig::new(), Rig::new()] }
    }

    pub(crate) fn run(&mut self, operations: u64) -> u64 {
        let [one, two] = &mut self.rigs;
        let (mut one, mut two) = (c::Handles::of(one), c::Handles::of(two));
        // SAFETY: the handles belong to the rigs, which outlive the run.
        unsafe { c::c_tuned_w23(&mut one, &mut two, operations) }.cast_unsigned()
    }
}

/// A page that peers access too.
pub(crate) struct CopiesRig {
    region: SharedMemoryRegion<'static, u8>,
    to: Vec<u8>,
}

impl CopiesRig {
    pub(crate) fn new() -> Self {
        let domain = Arc::new(ProtectionDomain::new(context()).expect("a domain"));
        let region = SharedMemoryRegion::new(&domain, PAGE + 8, AccessFlags::REMOTE_READ);
        Self { region: region.expect("a region"), to: vec![0; PAGE + 8] }
    }
}

/// Copies of a page, from and to eight alignments.
#[inline(never)]
pub(crate) fn copies(rig: &mut CopiesRig, operations: u64) -> ibverbs::Result<u64> {
    let CopiesRig { region, to } = rig;
    for operation in 0..operations as usize {
        let at = operation % 8;
        region.read(operation * 3 % 8, &mut to[at..at + PAGE])?;
        black_box(&mut *to);
    }
    Ok(operations * LENGTH as u64)
}
