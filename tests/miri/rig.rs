//! Two connected channels on the device.

use std::sync::Arc;

use ibverbs::{
    AccessFlags, Channel, ChannelBuilder, MemoryRegion, ProtectionDomain, SharedMemoryRegion,
    settings::MaxRnrRetries,
};

use crate::device;

pub(crate) const ALL: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_ATOMIC);

/// The channels come first, so that they are dropped first.
pub(crate) struct Pair {
    pub(crate) one: Channel<'static>,
    pub(crate) two: Channel<'static>,
    pub(crate) domain: Arc<ProtectionDomain<'static>>,
}

pub(crate) fn domain() -> Arc<ProtectionDomain<'static>> {
    let context = Arc::new(ibverbs::open("miri0").unwrap());
    Arc::new(ProtectionDomain::new(context).unwrap())
}

pub(crate) fn builder(domain: &Arc<ProtectionDomain<'static>>) -> ChannelBuilder<'static> {
    Channel::builder(domain)
        .max_send_wr(4)
        .max_recv_wr(4)
        .max_send_sge(3)
        .max_recv_sge(3)
        .max_inline_data(16)
        .access(ALL)
        .max_rnr_retries(MaxRnrRetries::UNLIMITED)
}

/// Runs a test with requests executed when they are posted, and with requests executed by polls.
pub(crate) fn both(test: impl Fn()) {
    for eager in [true, false] {
        device::eager(eager);
        test();
    }
}

impl Pair {
    pub(crate) fn new() -> Self {
        let domain = domain();
        let (one, two) = (builder(&domain).build().unwrap(), builder(&domain).build().unwrap());
        let (to_one, to_two) = (one.endpoint(), two.endpoint());
        let (one, two) = (one.handshake(to_two).unwrap(), two.handshake(to_one).unwrap());
        Self { one, two, domain }
    }

    /// A region of bytes that count from `first`.
    pub(crate) fn region(&self, len: usize, first: u8) -> MemoryRegion<'static, u8> {
        let mut region = MemoryRegion::new(&self.domain, len).unwrap();
        for (byte, n) in region.iter_mut().zip(first..) {
            *byte = n;
        }
        region
    }

    pub(crate) fn shared(&self, len: usize) -> SharedMemoryRegion<'static, u64> {
        SharedMemoryRegion::new(&self.domain, len, ALL).unwrap()
    }
}
