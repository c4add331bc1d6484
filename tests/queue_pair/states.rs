//! State changes.

use super::*;
use ibverbs::queue_pair::AddressVector;
use ibverbs::queue_pair::{
    AttributeMask, DataInOrder, RateLimit, StateTransition, WorkRequestOpcode,
};
use ibverbs::settings::{
    AckTimeout, MaxAckRetries, MaxRnrRetries, MaximumTransferUnit, MinRnrTimer,
    PacketSequenceNumber,
};
use ibverbs::{Inline, SendWorkRequest};

fn mask_of(device: &FunctionDevice, back: u32) -> AttributeMask {
    let call = device.call_before("modify_qp", back).unwrap();
    AttributeMask::from_bits(call.mask as u32).unwrap()
}

#[test]
fn connecting_hands_over_exactly_what_is_needed() {
    use AttributeMask as A;

    let first = A::STATE | A::PKEY_INDEX | A::PORT;
    let path = A::STATE | A::PATH | A::PATH_MTU | A::REMOTE_NUMBER | A::RECEIVE_PSN;
    let timing = A::ACK_TIMEOUT | A::MAX_ACK_RETRIES | A::MAX_RNR_RETRIES | A::MAX_RD_ATOMIC;
    for (kind, masks) in [
        (
            QueuePairType::ReliableConnected,
            [
                first | A::ACCESS,
                path | A::MAX_DEST_RD_ATOMIC | A::MIN_RNR_TIMER,
                A::STATE | A::SEND_PSN | timing,
            ],
        ),
        (QueuePairType::UnreliableConnected, [first | A::ACCESS, path, A::STATE | A::SEND_PSN]),
        (QueuePairType::UnreliableDatagram, [first | A::QKEY, A::STATE, A::STATE | A::SEND_PSN]),
    ] {
        let device = FunctionDevice::model();
        let context = device.context();
        let domain = context.alloc_pd().unwrap();
        let queue = context.create_cq(16).unwrap();
        let prepared = builder(&domain, &queue, kind)
            .send_psn(PacketSequenceNumber::new(0x123).unwrap())
            .receive_psn(PacketSequenceNumber::new(0x456).unwrap())
            .ack_timeout(AckTimeout::new(17).unwrap())
            .max_rd_atomic(3)
            .max_dest_rd_atomic(5)
            .build()
            .unwrap();
        let endpoint = prepared.endpoint();
        let queue_pair = prepared.handshake(endpoint).unwrap();
        for (step, mask) in masks.into_iter().enumerate() {
            assert_eq!(mask_of(&device, 2 - step as u32), mask, "{kind:?}, step {step}");
        }
        let attributes = device.call_before("modify_qp", 0).unwrap().qp_attr;
        assert_eq!(attributes.sq_psn, 0x123);
        if kind == QueuePairType::ReliableConnected {
            assert_eq!((attributes.timeout, attributes.max_rd_atomic), (17, 3));
            let attributes = device.call_before("modify_qp", 1).unwrap().qp_attr;
            assert_eq!((attributes.rq_psn, attributes.max_dest_rd_atomic), (0x456, 5));
            assert_eq!(attributes.dest_qp_num, endpoint.num());
        }
        assert_eq!(queue_pair.state().unwrap(), QueuePairState::ReadyToSend);
        queue_pair.close().unwrap();
    }
}

/// The values are those of a handshake, attribute by attribute, and a program may set others.
#[test]
fn the_transitions_of_a_handshake_can_be_made_by_hand() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    for kind in [QueuePairType::ReliableConnected, QueuePairType::UnreliableConnected] {
        let prepare = || builder(&domain, &queue, kind).traffic_class(0x60).build().unwrap();
        let (by_hand, other) = (prepare(), prepare());
        let remote = other.endpoint();
        assert_eq!(by_hand.queue_pair().state().unwrap(), QueuePairState::Reset);
        let steps = by_hand.transitions(&remote).unwrap();
        assert_eq!(by_hand.queue_pair().state().unwrap(), QueuePairState::Reset, "none was made");
        let psn = by_hand.send_psn();
        let queue_pair = by_hand.handshake(remote).unwrap();
        let made = [2, 1, 0].map(|back| {
            let call = device.call_before("modify_qp", back).unwrap();
            StateTransition::from_raw(call.qp_attr, ffi::ibv_qp_attr_mask(call.mask as u32))
        });
        for (planned, made) in steps.into_iter().zip(made) {
            assert_eq!(format!("{planned:?}"), format!("{made:?}"));
        }
        queue_pair.close().unwrap();
        // Another path MTU, for one.
        let [init, to_receive, to_send] = other.transitions(&remote).unwrap();
        let mut queue_pair = other.into_queue_pair();
        let to_receive = to_receive.path_mtu(MaximumTransferUnit::Mtu256);
        for step in [init, to_receive, to_send.send_psn(psn)] {
            queue_pair.modify(step).unwrap();
        }
        let attributes = device.call_before("modify_qp", 1).unwrap().qp_attr;
        assert_eq!(attributes.path_mtu, ffi::ibv_mtu::IBV_MTU_256);
        assert_eq!(device.call_before("modify_qp", 0).unwrap().qp_attr.sq_psn, psn.value());
        assert_eq!(queue_pair.state().unwrap(), QueuePairState::ReadyToSend);
    }
    // A P_Key index that the port does not have is found before the first step.
    let calls = device.calls("modify_qp");
    let wrong = builder(&domain, &queue, Rc).pkey_index(0x7000).build().unwrap();
    let error = wrong.transitions(&wrong.endpoint()).unwrap_err();
    assert_eq!((error.kind(), device.calls("modify_qp")), (ErrorKind::InvalidInput, calls));
}

#[test]
fn a_datagram_queue_pair_needs_no_peer_and_a_connected_one_does() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let datagram = builder(&domain, &queue, Ud).build().unwrap();
    let datagram = datagram.activate().unwrap();
    assert_eq!(datagram.state().unwrap(), QueuePairState::ReadyToSend);
    // With the transport in the type, this does not compile.
    let kind = QueuePairType::ReliableConnected;
    let connected = builder(&domain, &queue, kind).build().unwrap();
    let error = connected.activate().unwrap_err();
    assert!(error.to_string().contains("use handshake"), "{error}");
}

#[test]
fn what_is_wrong_is_named_before_the_kernel_is_called() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let prepared = builder(&domain, &queue, Rc).build().unwrap();
    let mut queue_pair = prepared.into_queue_pair();
    let init = StateTransition::to(QueuePairState::Init).port(1).pkey_index(0);
    for (transition, text) in [
        (init, "qp_access_flags is missing for RESET to INIT of an RC queue pair"),
        (init.access(AccessFlags::empty()).qkey(7), "qkey is not allowed for RESET to INIT"),
        (StateTransition::to(QueuePairState::ReadyToSend), "no way from RESET to RTS"),
        (StateTransition::to(QueuePairState::Error), "no way from RESET to ERR"),
    ] {
        let error = queue_pair.modify(transition).unwrap_err();
        assert_eq!((error.kind(), error.verb()), (ErrorKind::InvalidInput, "ibv_modify_qp"));
        assert!(error.to_string().contains(text), "{error}");
    }
    assert_eq!(device.calls("modify_qp"), 0);
    queue_pair.modify(init.access(AccessFlags::empty())).unwrap();
    assert_eq!(queue_pair.state().unwrap(), QueuePairState::Init);
}

#[test]
fn a_state_that_changed_by_itself_is_noticed() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let mut queue_pair = to_itself(builder(&domain, &queue, Rc));
    device.break_qp(queue_pair.number());
    // libibverbs still reports RTS, from which this change is allowed: the kernel refuses it.
    let error = queue_pair.drain(false).unwrap_err();
    assert!(error.to_string().contains("no way from ERR to SQD of an RC"), "{error}");
    // The other way round: RTS does not allow the change, the real state does.
    let mut other = to_itself(builder(&domain, &queue, Rc));
    other.modify(StateTransition::to(QueuePairState::Reset)).unwrap();
    let reset = other.query_attributes(AttributeMask::STATE).unwrap();
    assert_eq!(reset.state(), Some(QueuePairState::Reset));
}

#[test]
fn a_refusal_of_the_kernel_is_explained() {
    let device = FunctionDevice::model();
    let context = device.context();
    let most = context.query_device().unwrap().max_qp_rd_atom();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let prepared = builder(&domain, &queue, Rc).build().unwrap();
    let endpoint = prepared.endpoint();
    let mut queue_pair = prepared.into_queue_pair();
    let init = StateTransition::to(QueuePairState::Init).access(AccessFlags::empty());
    let refused = |queue_pair: &mut QueuePair<'_>, transition, text: &str| {
        device.fail("modify_qp").errno(libc::EINVAL).times(1);
        let error = queue_pair.modify(transition).unwrap_err();
        device.clear_faults();
        assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
        assert!(error.to_string().contains(text), "{error}, not {text}");
    };
    refused(&mut queue_pair, init.port(9).pkey_index(0), "port_num is 9, and must be within 1..=1");
    refused(&mut queue_pair, init.port(1).pkey_index(999), "pkey_index is 999");
    queue_pair.modify(init.port(1).pkey_index(0)).unwrap();
    let path = |index| AddressVector::new(1, 0).global(endpoint.gid(), index);
    let to_nobody = AddressVector::new(1, 0).global("2001:db8::77".parse().unwrap(), 1);
    let link_local = context.query_gid(1, 1).unwrap();
    let ready = StateTransition::to(QueuePairState::ReadyToReceive)
        .path(path(1))
        .path_mtu(MaximumTransferUnit::Mtu256)
        .remote_number(endpoint.num())
        .receive_psn(PacketSequenceNumber::default())
        .max_dest_rd_atomic(1)
        .min_rnr_timer(MinRnrTimer::SHORTEST);
    let text = format!("max_dest_rd_atomic is 255, and must be within 0..={most}");
    refused(&mut queue_pair, ready.max_dest_rd_atomic(255), &text);
    let local = ready.path(AddressVector::new(1, 0));
    refused(&mut queue_pair, local, "ah_attr has no global route");
    refused(&mut queue_pair, ready.path(path(200)), "GID table of port 1 is empty at index 200");
    refused(&mut queue_pair, ready.path(path(7)), "GID table of port 1 is empty at index 7");
    refused(&mut queue_pair, ready.path(AddressVector::new(2, 0)), "ah_attr.port_num is 2");
    refused(&mut queue_pair, ready, "Invalid argument");
    // The kernel could not resolve the path.
    for (errno, kind) in [
        (libc::ETIMEDOUT, ErrorKind::TimedOut),
        (libc::ENETUNREACH, ErrorKind::Unreachable),
        (libc::EHOSTUNREACH, ErrorKind::Unreachable),
    ] {
        device.fail("modify_qp").errno(errno).times(1);
        let error = queue_pair.modify(ready.path(to_nobody)).unwrap_err();
        assert_eq!((error.kind(), error.raw_os_error()), (kind, Some(errno)));
        let text = format!("our GID {} (index 1) to the peer's GID 2001:db8::77: ", link_local.gid);
        assert!(error.to_string().contains(&text), "{error}");
    }
    // Other errors are passed on as they are.
    device.fail("modify_qp").errno(libc::EIO).times(1);
    assert_eq!(queue_pair.modify(ready).unwrap_err().kind(), ErrorKind::Driver);
    queue_pair.modify(ready).unwrap();
}

#[test]
fn a_query_tells_what_was_set() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let queue_pair = to_itself(
        builder(&domain, &queue, Rc)
            .pkey_index(0)
            .path_mtu(MaximumTransferUnit::Mtu512)
            .send_psn(PacketSequenceNumber::new(9).unwrap())
            .receive_psn(PacketSequenceNumber::new(9).unwrap())
            .max_rd_atomic(2)
            .max_dest_rd_atomic(4)
            .min_rnr_timer(MinRnrTimer::new(3).unwrap())
            .ack_timeout(AckTimeout::new(20).unwrap())
            .max_ack_retries(MaxAckRetries::new(2).unwrap())
            .max_rnr_retries(MaxRnrRetries::UNLIMITED)
            .traffic_class(8)
            .hop_limit(3),
    );
    let found = queue_pair.query().unwrap();
    assert_eq!(found.state(), Some(QueuePairState::ReadyToSend));
    assert_eq!((found.port(), found.pkey_index()), (Some(1), Some(0)));
    assert_eq!(found.path_mtu(), Some(MaximumTransferUnit::Mtu512));
    assert_eq!(found.remote_number(), Some(queue_pair.number()));
    assert_eq!((found.max_rd_atomic(), found.max_dest_rd_atomic()), (Some(2), Some(4)));
    assert_eq!(found.min_rnr_timer(), MinRnrTimer::new(3).ok());
    assert_eq!(found.ack_timeout(), AckTimeout::new(20).ok());
    assert_eq!(found.max_ack_retries(), MaxAckRetries::new(2).ok());
    assert_eq!(found.max_rnr_retries(), Some(MaxRnrRetries::UNLIMITED));
    assert_eq!(found.path().unwrap().gid(), Some(queue_pair.endpoint().gid()));
    assert_eq!(found.max_send_wr(), Some(queue_pair.max_send_wr()));
    assert_eq!(found.rate_limit(), None, "not asked for");
    // A device that does not report all limits is given the lowest values.
    device.fail("query_qp").errno(libc::EOPNOTSUPP).times(1);
    let least = queue_pair.query().unwrap();
    assert_eq!((least.port(), least.path_mtu()), (Some(1), None));
    device.fail("query_qp").errno(libc::EIO).times(1);
    assert_eq!(queue_pair.query().unwrap_err().kind(), ErrorKind::Driver);
}

#[test]
fn an_error_flushes_and_a_reset_connects_again() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    let mut queue_pair = to_itself(builder(&domain, &queue, Rc));
    let number = queue_pair.number();
    // SAFETY: the region is not touched before the completions.
    unsafe { queue_pair.post_receive(&mut region, .., 1).unwrap() };
    queue_pair.to_error().unwrap();
    let [(1, Err(error))] = completions(&queue)[..] else { panic!("one is flushed") };
    assert_eq!(error.status(), WorkStatus::Flushed);

    device.fail("modify_qp").errno(libc::EIO).times(1);
    let failed = queue_pair.reset().unwrap_err();
    assert_eq!(failed.error.raw_os_error(), Some(libc::EIO));
    let queue_pair = failed.object;
    let psn = PacketSequenceNumber::new(0x777).unwrap();
    let prepared = queue_pair.reset().unwrap().set_send_psn(psn).receive_psn(psn);
    assert_eq!((prepared.endpoint().num(), prepared.send_psn()), (number, psn));
    let endpoint = prepared.endpoint();
    let mut queue_pair = prepared.handshake(endpoint).unwrap();
    assert_eq!(device.last_call("modify_qp").unwrap().qp_attr.sq_psn, 0x777);
    // SAFETY: the region is not touched before the completions.
    unsafe {
        queue_pair.post_receive(&mut region, 32.., 2).unwrap();
        queue_pair.post(SendWorkRequest::new(Inline(b"again")), 3).unwrap();
    }
    let mut done = successes(&queue);
    done.sort_unstable();
    assert_eq!((done, &region[32..37]), (vec![2, 3], b"again".as_slice()));
}

#[test]
fn a_drained_queue_pair_resumes() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let mut queue_pair = to_itself(builder(&domain, &queue, Rc));
    queue_pair.drain(true).unwrap();
    let notify = AttributeMask::STATE | AttributeMask::DRAIN_NOTIFICATION;
    assert_eq!(mask_of(&device, 0), notify);
    assert_eq!(queue_pair.state().unwrap(), QueuePairState::SendQueueDrained);
    let stay = StateTransition::stay().max_rd_atomic(1).max_ack_retries(MaxAckRetries::MAX);
    queue_pair.modify(stay).unwrap();
    queue_pair.resume().unwrap();
    assert_eq!(queue_pair.state().unwrap(), QueuePairState::ReadyToSend);
    assert_eq!(queue_pair.query().unwrap().max_ack_retries(), Some(MaxAckRetries::MAX));
}

#[test]
fn what_a_device_does_not_have_is_a_typed_error() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let mut queue_pair = to_itself(builder(&domain, &queue, Rc));
    // The device has no packet pacing.
    let error = queue_pair.modify_rate_limit(RateLimit { rate: 1000, ..Default::default() });
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Unsupported);
    // The device reports no ordering, so none is promised.
    assert_eq!(queue_pair.data_in_order(WorkRequestOpcode::Write), DataInOrder::empty());
}
