//! Channels between the two devices.

use std::sync::Arc;
use std::thread;
use std::time::Instant;

use ibverbs::{
    AccessFlags, Channel, ChannelBuilder, Context, MemoryRegion, PreparedChannel, ProtectionDomain,
    settings::{AckTimeout, MaxRnrRetries, MinRnrTimer},
};

use super::{PATIENCE, assert_nothing_left, time_wait};

/// The rights of both sides.
pub const ALL: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_ATOMIC);

/// One of the two devices.
pub struct Side {
    pub context: Arc<Context<'static>>,
    pub domain: Arc<ProtectionDomain<'static>>,
}

impl Side {
    pub fn new(device: &str) -> Self {
        let context = Arc::new(ibverbs::open(device).unwrap());
        let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
        Self { context, domain }
    }

    pub fn builder(&self) -> ChannelBuilder<'static> {
        Channel::builder(&self.domain)
            .access(ALL)
            .max_send_sge(4)
            .max_recv_sge(4)
            .max_inline_data(64)
            .min_rnr_timer(MinRnrTimer::SHORTEST)
            .max_rnr_retries(MaxRnrRetries::UNLIMITED)
            .ack_timeout(AckTimeout::new(17).unwrap())
    }

    pub fn region(&self, len: usize) -> MemoryRegion<'static, u64> {
        MemoryRegion::new(&self.domain, len).unwrap()
    }
}

pub fn sides() -> (Side, Side) {
    (Side::new("rxe0"), Side::new("rxe1"))
}

pub fn connect(
    one: ChannelBuilder<'static>,
    two: ChannelBuilder<'static>,
) -> (Channel<'static>, Channel<'static>) {
    handshake(one.build().unwrap(), two.build().unwrap())
}

pub fn handshake<'res>(
    one: PreparedChannel<'res>,
    two: PreparedChannel<'res>,
) -> (Channel<'res>, Channel<'res>) {
    let (to_one, to_two) = (one.endpoint(), two.endpoint());
    (one.handshake(to_two).unwrap(), two.handshake(to_one).unwrap())
}

/// Resets both and connects them again.
pub fn reconnect<'res>(one: Channel<'res>, two: Channel<'res>) -> (Channel<'res>, Channel<'res>) {
    let (one, two) = (one.reset().unwrap(), two.reset().unwrap());
    time_wait();
    handshake(one, two)
}

pub fn deadline() -> Instant {
    Instant::now() + PATIENCE
}

/// Sends a message each way, and compares what arrives.
pub fn exchange(sides: &(Side, Side), one: &mut Channel<'_>, two: &mut Channel<'_>) {
    let (mut near, mut far) = (sides.0.region(100), sides.1.region(100));
    for (index, number) in near.iter_mut().enumerate() {
        *number = index as u64;
    }
    thread::scope(|threads| {
        threads.spawn(|| {
            one.until(deadline()).send(near.slice(..).unwrap()).unwrap();
            near.fill(0);
            one.until(deadline()).receive(near.slice_mut(..).unwrap()).unwrap();
        });
        two.until(deadline()).receive(far.slice_mut(..).unwrap()).unwrap();
        two.until(deadline()).send(far.slice(..50).unwrap()).unwrap();
    });
    assert!(near.iter().copied().eq((0..50).chain([0; 50])));
    assert!(far.iter().copied().eq(0..100));
}

pub fn nothing_is_left(sides: (Side, Side)) {
    drop(sides);
    assert_nothing_left("rxe0");
    assert_nothing_left("rxe1");
}
