//! Addresses that are well-formed but false, on a device.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ibverbs::{
    AccessFlags, Channel, CompletionQueue, Error, ErrorKind, MemoryRegion, ProtectionDomain,
    QueuePair, QueuePairEndpoint, QueuePairType, RemoteMemoryRegion, SharedMemoryRegion,
    TransportError, TransportResult, WorkStatus,
};
use ibverbs_function_device::{Builder, FunctionDevice, LinkLayer};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

use crate::encodings::endpoint;
use crate::{property_tests, rig};

fn open(device: &FunctionDevice) -> Arc<ProtectionDomain<'static>> {
    let context = device.context();
    Arc::new(ProtectionDomain::new(Arc::new(context)).unwrap())
}

fn device(infiniband: bool) -> FunctionDevice {
    let layer = if infiniband { LinkLayer::InfiniBand } else { LinkLayer::Ethernet };
    Builder::model().link_layer(layer).build()
}

/// Refused, for a reason that the caller can act on.
fn is_refusal(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::InvalidInput | ErrorKind::Unreachable)
        && !error.to_string().is_empty()
}

/// Endpoints that a peer may send: some could be of a queue pair of this device, with the address of its
/// port.
fn any_endpoint() -> impl Strategy<Value = QueuePairEndpoint> {
    let near =
        (0..0x20_u32, 0..3_u16, prop::sample::select(vec!["::ffff:10.0.0.1", "fe80::1", "::"]));
    let near = near.prop_map(|(num, lid, gid)| {
        QueuePairEndpoint::new(num, lid, gid.parse().unwrap()).unwrap()
    });
    prop_oneof![endpoint(), near]
}

/// Short enough that the test is quick, since nobody answers.
fn soon() -> Instant {
    Instant::now() + Duration::from_millis(2)
}

/// A queue pair that is connected to itself may succeed; no other can.
fn is_typed_end(result: TransportResult<ibverbs::WorkSuccess>) -> Result<(), TestCaseError> {
    match result {
        Ok(_) | Err(TransportError::Work(_) | TransportError::TimedOut) => Ok(()),
        Err(error) => Err(TestCaseError::fail(format!("{error:?}"))),
    }
}

proptest! {
    #![proptest_config(property_tests::config(300))]

    #[test]
    fn a_channel_meets_any_endpoint(remote in any_endpoint(), infiniband: bool) {
        let _turn = rig::turn();
        let device = device(infiniband);
        let domain = open(&device);
        let prepared = Channel::builder(&domain)
            .max_inline_data(16)
            .settle_timeout(Duration::from_millis(50))
            .build()
            .unwrap();
        match prepared.handshake(remote) {
            Ok(mut channel) => {
                is_typed_end(channel.send_inline_deadline(b"who?", soon()))?;
                drop(channel);
            }
            Err(failed) => prop_assert!(is_refusal(&failed.error), "{failed}"),
        }
        drop(domain);
        device.assert_clean();
    }

    #[test]
    fn a_queue_pair_meets_any_endpoint(remote in any_endpoint(), infiniband: bool, kind in 0..2_usize) {
        let _turn = rig::turn();
        let device = device(infiniband);
        let domain = open(&device);
        let queue = CompletionQueue::new(domain.context(), 8).unwrap();
        let kind = [QueuePairType::ReliableConnected, QueuePairType::UnreliableConnected][kind];
        let prepared = QueuePair::builder(&domain, &queue, &queue, kind).build().unwrap();
        if let Err(failed) = prepared.handshake(remote) {
            prop_assert!(is_refusal(&failed.error), "{failed}");
        }
        drop(queue);
        drop(domain);
        device.assert_clean();
    }

    /// Only what the peer opened is reached, whatever the region claims.
    #[test]
    fn a_false_region_reaches_nothing(
        shift in -20..60_i64,
        length in 0..64_u64,
        wrong_key in prop::bool::weighted(0.2),
        foreign in prop::bool::weighted(0.2),
        write: bool,
        any_address in prop::option::weighted(0.2, any::<u64>()),
    ) {
        const OPEN: AccessFlags = AccessFlags::REMOTE_READ.union(AccessFlags::REMOTE_WRITE);
        let _turn = rig::turn();
        let device = device(false);
        let domain = open(&device);
        let builder = || {
            let builder = Channel::builder(&domain).max_inline_data(128).access(OPEN);
            builder.settle_timeout(Duration::from_millis(50)).build().unwrap()
        };
        let (one, two) = (builder(), builder());
        let (to_one, to_two) = (one.endpoint(), two.endpoint());
        let (mut one, two) = (one.handshake(to_two).unwrap(), two.handshake(to_one).unwrap());

        // In the middle of a registered region that peers may not access.
        let target = SharedMemoryRegion::<u8>::new(&domain, 64, OPEN).unwrap();
        target.fill(7);
        let secret = MemoryRegion::<u8>::new(&domain, 64).unwrap();
        let mut local = MemoryRegion::<u8>::new(&domain, 128).unwrap();
        local.fill(1);
        let right = target.remote();
        let rkey = if wrong_key { right.rkey() ^ 0x5500 } else { right.rkey() };
        let base = if foreign { secret.as_ptr() as u64 } else { right.address() };
        let address = any_address.unwrap_or(base.wrapping_add_signed(shift));
        let Ok(region) = RemoteMemoryRegion::new(address, length, rkey) else { return Ok(()) };
        let inside = address >= right.address()
            && u128::from(address) + u128::from(length) <= u128::from(right.address()) + 64;
        let allowed = length == 0 || (inside && !wrong_key);

        let result = if write {
            one.write_deadline(&local.slice(..length as usize).unwrap(), region, soon())
        } else {
            one.read_deadline(&mut local.slice_mut(..length as usize).unwrap(), region, soon())
        };
        match result {
            Ok(_) => prop_assert!(allowed, "{region:?} of {right:?}"),
            Err(TransportError::Work(error)) => {
                // For an access of no bytes, a device may ignore the key.
                prop_assert!(!allowed || length == 0, "{region:?} of {right:?}: {error}");
                prop_assert_eq!(error.status(), WorkStatus::RemoteAccess);
            }
            Err(error) => return Err(TestCaseError::fail(format!("{error:?}"))),
        }
        let done = allowed && length > 0;
        for (at, byte) in (right.address()..).zip(target.to_vec()) {
            let reached = done && write && (address..address + length).contains(&at);
            prop_assert_eq!(byte, if reached { 1 } else { 7 }, "at {}", at - right.address());
        }
        for (at, &byte) in (0..).zip(local.iter()) {
            prop_assert_eq!(byte, if done && !write && at < length { 7 } else { 1 }, "at {}", at);
        }
        prop_assert!(secret.iter().all(|&byte| byte == 0));
        drop((one, two, target, secret, local, domain));
        device.assert_clean();
    }
}
