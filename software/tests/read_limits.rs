//! A device whose queue pairs together answer few reads at a time, as some adapters do.

use std::sync::Arc;

use ibverbs::{Channel, ProtectionDomain};
use ibverbs_software::{Builder, Device};

fn domain(set: impl FnOnce(Builder) -> Builder) -> Arc<ProtectionDomain<'static>> {
    let context = set(Device::builder()).build().unwrap().open().unwrap();
    Arc::new(ProtectionDomain::new(Arc::new(context)).unwrap())
}

fn endpoint_limit(channel: &ibverbs::PreparedChannel<'_>) -> u8 {
    channel.endpoint().max_dest_rd_atomic().unwrap()
}

/// Without a setting, the second queue pair would take 16 too, and fail on its way to RTR.
#[test]
fn queue_pairs_share_what_the_device_has() {
    let domain = domain(|builder| builder.max_res_rd_atom(16));
    let mut channels = Vec::new();
    let mut limits = Vec::new();
    for _ in 0..6 {
        let prepared = Channel::builder(&domain).build().unwrap();
        let own = prepared.endpoint();
        limits.push(endpoint_limit(&prepared));
        channels.push(prepared.handshake(own).unwrap());
    }
    assert_eq!(limits, [8, 4, 2, 1, 1, 0]);
    // The next queue pair gets what the dropped ones have given back.
    drop(channels);
    assert_eq!(endpoint_limit(&Channel::builder(&domain).build().unwrap()), 8);
}

#[test]
fn a_device_with_plenty_gives_each_as_many_as_it_can_use() {
    let domain = domain(|builder| builder);
    let channels = [(); 32].map(|()| Channel::builder(&domain).build().unwrap());
    assert!(channels.iter().all(|channel| endpoint_limit(channel) == 16));
}

#[test]
fn more_than_the_device_has_is_refused() {
    let domain = domain(|builder| builder.max_res_rd_atom(16));
    let build = || Channel::builder(&domain).max_dest_rd_atomic(16).build().unwrap();
    let (one, other) = (build(), build());
    let (to_one, to_other) = (one.endpoint(), other.endpoint());
    let one = one.handshake(to_other).unwrap();
    let failed = other.handshake(to_one).unwrap_err();
    assert_eq!(failed.error.raw_os_error(), Some(libc::ENOMEM), "{}", failed.error);
    drop(one);
    failed.object.handshake(to_one).unwrap();
}
