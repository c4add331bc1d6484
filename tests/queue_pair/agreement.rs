//! The values that two sides agree on by their endpoints.

use super::*;
use ffi::ibv_gid_type;
use ibverbs::queue_pair::AddressVector;
use ibverbs::settings::{MaximumTransferUnit, PacketSequenceNumber};

const IPV4: [&str; 2] = ["::ffff:10.0.0.1", "::ffff:10.0.0.2"];
const LOCAL: [&str; 2] = ["fe80::1", "fe80::2"];
const GLOBAL: &str = "2001:db8::1";

/// A device whose port has these GIDs of RoCE v2, at index 0, 1 and so on.
fn device_with(gids: &[&str]) -> FunctionDevice {
    let device = FunctionDevice::model();
    for index in 0..4 {
        let gid: Gid = gids.get(index).unwrap_or(&"::").parse().unwrap();
        let gid_type = ibv_gid_type::IBV_GID_TYPE_ROCE_V2.0;
        device.set_gid(1, index as u32, gid.to_bytes(), gid_type);
    }
    device
}

/// Runs a test with a queue pair builder on the device.
fn with<R>(device: &FunctionDevice, test: impl FnOnce(QueuePairBuilder<'_>) -> R) -> R {
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    test(builder(&domain, &queue, Rc))
}

/// The attributes of the path that the provider received on the way to RTR.
fn to_rtr(device: &FunctionDevice) -> ffi::ibv_qp_attr {
    device.call_before("modify_qp", 1).unwrap().qp_attr
}

#[test]
fn the_first_packet_has_a_random_number_that_the_peer_is_told() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let new = || builder(&domain, &queue, Rc).build().unwrap();
    let (one, two) = (new(), new());
    let mut numbers = vec![one.send_psn(), two.send_psn()];
    assert_eq!(one.endpoint().send_psn(), Some(one.send_psn()));
    let (to_one, to_two) = (one.endpoint(), two.endpoint());
    let mut one = one.handshake(to_two).unwrap();
    assert_eq!(to_rtr(&device).rq_psn, numbers[1].value());
    assert_eq!(device.last_call("modify_qp").unwrap().qp_attr.sq_psn, numbers[0].value());
    two.handshake(to_one).unwrap();

    // Every reset renews it. A number that was set by hand counts for one connection.
    for round in 0..50 {
        let mut prepared = one.reset().unwrap();
        numbers.push(prepared.send_psn());
        let set = PacketSequenceNumber::new(round).unwrap();
        if round % 2 == 0 {
            prepared = prepared.set_send_psn(set).receive_psn(set);
            assert_eq!((prepared.send_psn(), prepared.endpoint().send_psn()), (set, Some(set)));
        }
        let told = prepared.endpoint();
        one = prepared.handshake(told).unwrap();
        assert_eq!(to_rtr(&device).rq_psn, told.send_psn().unwrap().value());
    }
    let count = numbers.len();
    numbers.sort_unstable();
    numbers.dedup();
    // Two of 52 random numbers of 24 bits are equal once in 12000 runs.
    assert!(numbers.len() >= count - 1, "{numbers:?}");
}

#[test]
fn the_smaller_limits_of_both_sides_are_taken() {
    use MaximumTransferUnit as Mtu;

    let device = FunctionDevice::model();
    for (ours, theirs, agreed) in [
        (Some(Mtu::Mtu512), Mtu::Mtu1024, Mtu::Mtu512),
        (Some(Mtu::Mtu1024), Mtu::Mtu256, Mtu::Mtu256),
        // The port has 1024.
        (None, Mtu::Mtu4096, Mtu::Mtu1024),
        (None, Mtu::Mtu512, Mtu::Mtu512),
    ] {
        with(&device, |builder| {
            let builder = match ours {
                Some(mtu) => builder.path_mtu(mtu),
                None => builder,
            };
            let prepared = builder.build().unwrap();
            assert_eq!(prepared.endpoint().path_mtu(), Some(ours.unwrap_or(Mtu::Mtu1024)));
            let remote = prepared.endpoint().with_path_mtu(theirs);
            let _queue_pair = prepared.handshake(remote).unwrap();
            assert_eq!(to_rtr(&device).path_mtu, agreed.as_raw());
        });
    }
    for (ours, theirs, agreed) in [(8, 4, 4), (2, 16, 2), (8, 0, 0)] {
        with(&device, |builder| {
            let prepared = builder.max_rd_atomic(ours).max_dest_rd_atomic(3).build().unwrap();
            assert_eq!(prepared.endpoint().max_dest_rd_atomic(), Some(3));
            let remote = prepared.endpoint().with_max_dest_rd_atomic(theirs);
            let _queue_pair = prepared.handshake(remote).unwrap();
            assert_eq!(device.last_call("modify_qp").unwrap().qp_attr.max_rd_atomic, agreed);
            assert_eq!(to_rtr(&device).max_dest_rd_atomic, 3);
        });
    }
}

#[test]
fn a_peer_that_tells_its_address_alone_leaves_the_limits_to_us() {
    let device = FunctionDevice::model();
    with(&device, |builder| {
        let prepared = builder.max_rd_atomic(5).build().unwrap();
        let endpoint = prepared.endpoint();
        let remote = QueuePairEndpoint::new(endpoint.num(), 0, endpoint.gid()).unwrap();
        assert_eq!((remote.send_psn(), remote.path_mtu()), (None, None));
        let _queue_pair = prepared.handshake(remote).unwrap();
        let attributes = to_rtr(&device);
        assert_eq!((attributes.rq_psn, attributes.path_mtu.0), (0, 3));
        assert_eq!(device.last_call("modify_qp").unwrap().qp_attr.max_rd_atomic, 5);
    });
}

#[test]
fn the_gids_that_fit_are_chosen_wherever_they_are() {
    // Our GIDs, the peer's, and the choice of both sides: the index of ours, and the peer's GID.
    for (ours, theirs, index, gid) in [
        (&[LOCAL[0], IPV4[0]][..], &[LOCAL[1], IPV4[1]][..], 1, IPV4[1]),
        (&[LOCAL[0], IPV4[0]], &[LOCAL[1]], 0, LOCAL[1]),
        (&[IPV4[0], GLOBAL, LOCAL[0]], &[LOCAL[1]], 2, LOCAL[1]),
        (&[LOCAL[0]], &[IPV4[1], LOCAL[1]], 0, LOCAL[1]),
    ] {
        let (here, there) = (device_with(ours), device_with(theirs));
        let remote = with(&there, |builder| builder.build().unwrap().endpoint());
        with(&here, |builder| {
            let prepared = builder.build().unwrap();
            assert_eq!(prepared.endpoint().gids().len(), ours.len());
            let _queue_pair = prepared.handshake(remote).unwrap();
        });
        let path = to_rtr(&here).ah_attr.grh;
        let chosen = (path.sgid_index, Gid::from(path.dgid));
        assert_eq!(chosen, (index, gid.parse().unwrap()), "{ours:?} to {theirs:?}");
        // A datagram takes the same path.
        let context = here.context();
        let path = AddressVector::to_peer(&context, 1, &remote).unwrap();
        assert_eq!((path.source_gid_index(), path.gid()), (Some(index), gid.parse().ok()));
    }
}

#[test]
fn a_gid_that_was_set_is_the_only_one() {
    let device = device_with(&[LOCAL[0], IPV4[0]]);
    with(&device, |builder| {
        let prepared = builder.gid_index(0).build().unwrap();
        assert_eq!(prepared.endpoint().gids().collect::<Vec<_>>(), [LOCAL[0].parse().unwrap()]);
        let remote = QueuePairEndpoint::new(5, 0, IPV4[1].parse().unwrap()).unwrap();
        let error = prepared.handshake(remote).unwrap_err().error;
        assert_eq!(
            (error.kind(), error.raw_os_error()),
            (ErrorKind::Unreachable, Some(libc::EADDRNOTAVAIL))
        );
        let text = error.to_string();
        assert!(text.contains("our RoCE v2 GID fe80::1"), "{text}");
        assert!(text.contains("the peer's GID ::ffff:10.0.0.2"), "{text}");
    });
    let context = device_with(&[IPV4[0]]).context();
    let remote = QueuePairEndpoint::new(5, 0, LOCAL[1].parse().unwrap()).unwrap();
    let error = AddressVector::to_peer(&context, 1, &remote).unwrap_err();
    assert_eq!((error.verb(), error.raw_os_error()), ("ibv_create_ah", Some(libc::EADDRNOTAVAIL)));
}
