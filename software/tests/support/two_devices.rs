//! Two devices of this process, and channels between them.

use ibverbs::{
    AccessFlags, Channel, Context, ProtectionDomain,
    settings::{AckTimeout, MaxRnrRetries},
};
use ibverbs_software::Device;

/// Two channels that are connected to each other, each on a device of its own.
pub(crate) fn channels<'a>(
    one: &'a ProtectionDomain<'a>,
    other: &'a ProtectionDomain<'a>,
) -> [Channel<'a>; 2] {
    let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
    // However late a receive is posted.
    let patient = MaxRnrRetries::UNLIMITED;
    let prepare = |domain: &'a ProtectionDomain<'a>| {
        // However late the other device's thread runs.
        let late = AckTimeout::new(20).unwrap();
        domain.create_channel().access(access).max_rnr_retries(patient).ack_timeout(late).build()
    };
    let (one, other) = (prepare(one).unwrap(), prepare(other).unwrap());
    let endpoints = (one.endpoint(), other.endpoint());
    [one.handshake(endpoints.1).unwrap(), other.handshake(endpoints.0).unwrap()]
}

/// Contexts of two devices, whose packets pass [through the
/// kernel](ibverbs_software::Builder::through_kernel), or not.
pub(crate) fn contexts(through_kernel: bool) -> [Context<'static>; 2] {
    let device = || Device::builder().through_kernel(through_kernel).build();
    [(); 2].map(|()| device().unwrap().open().unwrap())
}
