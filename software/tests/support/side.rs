//! One of two devices of this process, with what a test needs on it, and channels between two of them.

use std::sync::Arc;

use ibverbs::{
    AccessFlags, BufferPool, Channel, ChannelBuilder, Context, PreparedChannel, ProtectionDomain,
};
use ibverbs_software::{Device, Network};

pub(crate) struct Side {
    pub(crate) device: Device,
    pub(crate) context: Arc<Context<'static>>,
    pub(crate) domain: Arc<ProtectionDomain<'static>>,
    /// 64 buffers of 8 bytes.
    pub(crate) pool: BufferPool,
}

impl Side {
    pub(crate) fn new(device: Device) -> Self {
        let context = Arc::new(device.open().unwrap());
        let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
        let pool = BufferPool::new(&domain, 8, 64, AccessFlags::empty()).unwrap();
        Self { device, context, domain, pool }
    }
}

/// Two sides on a simulated network.
pub(crate) fn simulated(network: &Network) -> [Side; 2] {
    [(); 2].map(|()| Side::new(network.device().unwrap()))
}

pub(crate) fn connect(builders: [ChannelBuilder<'static>; 2]) -> [Channel<'static>; 2] {
    handshake(builders.map(|builder| builder.build().unwrap()))
}

pub(crate) fn handshake([one, other]: [PreparedChannel<'static>; 2]) -> [Channel<'static>; 2] {
    let endpoints = (one.endpoint(), other.endpoint());
    [one.handshake(endpoints.1).unwrap(), other.handshake(endpoints.0).unwrap()]
}
