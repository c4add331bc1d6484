//! A channel after a reset.

use std::sync::Arc;

use ibverbs::{ErrorKind, ProtectionDomain, SharedCompletionQueue};
use ibverbs_function_device::Kind;

use crate::pair::*;

#[test]
fn each_connection_has_a_queue_pair_of_its_own() {
    let mut pair = Pair::new();
    let mut numbers = vec![pair.one.number()];
    for _ in 0..5 {
        pair = pair.reconnect();
        assert_eq!(pair.one.endpoint().num(), pair.one.number());
        assert!(!numbers.contains(&pair.one.number()), "{numbers:?}");
        numbers.push(pair.one.number());
        pair.exchange();
        assert_eq!(pair.device.live(Kind::QueuePair), 2, "the old ones are destroyed");
    }
    pair.finish();
}

#[test]
fn where_there_is_no_room_for_another_the_channel_keeps_its_own() {
    let mut pair = Pair::new();
    let (number, psn) = (pair.one.number(), pair.one.endpoint().send_psn());
    pair.device.fail("create_qp").errno(libc::ENOMEM).always();
    pair = pair.reconnect();
    assert_eq!(pair.one.number(), number);
    // Two random numbers of 24 bits are equal once in 16 million runs.
    assert_ne!(pair.one.endpoint().send_psn(), psn);
    pair.exchange();
    pair.device.clear_faults();
    pair = pair.reconnect();
    assert_ne!(pair.one.number(), number);
    pair.exchange();
    pair.finish();
}

#[test]
fn a_device_that_is_gone_or_a_port_that_is_down_ends_the_channel() {
    for (verb, errno) in [("create_qp", libc::EIO), ("query_port", libc::ENODEV)] {
        let Pair { one, two, domain, device } = Pair::new();
        device.fail(verb).errno(errno).always();
        let error = one.reset().unwrap_err();
        assert_eq!((error.raw_os_error(), error.kind() == ErrorKind::Resource), (errno, false));
        device.clear_faults();
        assert_eq!(device.live(Kind::QueuePair), 1, "the other's");
        drop((two, domain));
        device.assert_clean();
    }
}

/// The destroy verb is called once. What the old queue pair may still need is leaked; the new one is
/// destroyed as usual.
#[test]
fn an_old_queue_pair_that_cannot_be_destroyed_is_an_error() {
    let Pair { one, two, domain, device } = Pair::new();
    device.fail("destroy_qp").errno(libc::EIO).times(1);
    assert_eq!(one.reset().unwrap_err().raw_os_error(), libc::EIO);
    assert_eq!(device.live(Kind::QueuePair), 2, "the leaked one, and the other's");
    drop(two);
    assert_eq!(device.live(Kind::QueuePair), 1);
    drop(domain);
}

#[test]
fn channels_on_a_shared_queue_find_their_completions_after_a_reset() {
    let device = ibverbs_function_device::FunctionDevice::model();
    let context = Arc::new(device.context());
    let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
    let queue = Arc::new(SharedCompletionQueue::new(&context, 64).unwrap());
    let sharing = || builder(&domain).shared_completion_queue(&queue);
    let (one, two) = connect(sharing(), sharing());
    let (other, another) = connect(sharing(), sharing());
    let mut pair = Pair { one, two, domain: domain.clone(), device: device.clone() };
    let mut others = Pair { one: other, two: another, domain: domain.clone(), device };
    for _ in 0..40 {
        pair = pair.reconnect();
        pair.exchange();
        others.exchange();
    }
    // The shared queue still has room for four channels of this depth, and not for five.
    drop(others);
    let (one, two) = connect(sharing(), sharing());
    drop((one, two, queue, domain, context));
    pair.finish();
}
