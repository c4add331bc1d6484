//! The attributes of queue pairs at their creation.

use super::*;
use ffi::ibv_qp_init_attr_mask as mask;
use ibverbs::domain::{XrcDomain, XrcDomainScope};
use ibverbs::memory::MemoryWindowType;
use ibverbs::queue_pair::{CreateFlags, SendOperations};
use ibverbs::{Inline, Rc, SendWorkRequest};

#[test]
fn plain_queue_pairs_go_the_plain_way() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let prepared = builder(&domain, &queue, Rc).signal_all(true).build().unwrap();
    let raw = device.last_call("create_qp").unwrap().qp_init_attr;
    assert_eq!((raw.send_cq, raw.recv_cq), (queue.as_raw(), queue.as_raw()));
    assert_eq!((raw.qp_type, raw.sq_sig_all), (ffi::ibv_qp_type::IBV_QPT_RC, 1));
    assert_eq!((raw.cap.max_send_wr, raw.cap.max_recv_wr), (16, 16));
    assert!(raw.srq.is_null());
    assert_eq!(device.calls("create_qp_ex"), 0);
    let queue_pair = prepared.into_queue_pair();
    assert_eq!(queue_pair.extended_operations(), SendOperations::empty());
    assert!(queue_pair.as_raw_extended().is_none());
    assert_eq!(queue_pair.endpoint().num(), queue_pair.number());
}

#[test]
fn options_take_the_extended_way() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    // The device has none of these, but is asked for them.
    let refused = |builder: QueuePairBuilder<'_, Ud>| {
        builder.build().unwrap_err();
        device.last_call("create_qp_ex").unwrap().qp_init_attr
    };
    let new = || builder(&domain, &queue, Ud);
    let raw = refused(new().create_flags(CreateFlags::BLOCK_SELF_MULTICAST_LOOPBACK));
    let flags = mask::IBV_QP_INIT_ATTR_PD | mask::IBV_QP_INIT_ATTR_CREATE_FLAGS;
    assert_eq!((raw.create_flags, raw.comp_mask, raw.pd), (2, flags.0, domain.as_raw()));
    let raw = refused(new().source_number(0x123));
    assert_eq!((raw.create_flags, raw.comp_mask, raw.source_qpn), (1024, flags.0, 0x123));
    let raw = refused(new().max_tso_header(54));
    let header = mask::IBV_QP_INIT_ATTR_PD | mask::IBV_QP_INIT_ATTR_MAX_TSO_HEADER;
    assert_eq!((raw.max_tso_header, raw.comp_mask), (54, header.0));
    let error = new().source_number(1 << 24).build().unwrap_err();
    assert!(error.to_string().contains("source_qpn is 16777216"), "{error}");
}

#[test]
fn the_extended_interface_is_there_or_not() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let new = || builder(&domain, &queue, Rc);
    let wanted = SendOperations::SEND | SendOperations::WRITE;
    let queue_pair = new().extended(wanted).build().unwrap().into_queue_pair();
    let raw = device.last_call("create_qp_ex").unwrap().qp_init_attr;
    assert_eq!(raw.send_ops_flags, wanted.bits());
    assert_eq!(queue_pair.extended_operations(), wanted);
    assert!(queue_pair.as_raw_extended().is_some());

    device.fail("create_qp_ex").errno(libc::EOPNOTSUPP).always();
    assert_eq!(new().extended(wanted).build().unwrap_err().kind(), ErrorKind::Unsupported);
    let mut plain = to_itself(new().extended_if_available(wanted));
    assert_eq!(plain.extended_operations(), SendOperations::empty());
    // SAFETY: nothing is posted.
    unsafe { plain.batch(|_| Ok::<_, ibverbs::Error>(())) }.unwrap();
    device.clear_faults();
    // The device announces TSO, but has no function for it.
    let all = SendOperations::SEND | SendOperations::TSO;
    let error = new().extended(all).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    // After another error, the queue pair is not built without the feature.
    device.fail("create_qp_ex").errno(libc::ENOMEM).times(1);
    let error = new().extended_if_available(wanted).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Resource);
}

#[test]
fn a_shared_receive_queue_takes_the_place_of_the_own() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let shared = domain.create_srq(8, 1).unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    let mut queue_pair = to_itself(builder(&domain, &queue, Rc).srq(&shared));
    let raw = device.last_call("create_qp").unwrap().qp_init_attr;
    assert_eq!((raw.srq, raw.cap.max_recv_wr), (shared.as_raw(), 0));
    assert_eq!(queue_pair.shared_receive_queue().map(|q| q.as_raw()), Some(shared.as_raw()));
    // SAFETY: the region is not touched before the completions.
    unsafe {
        shared.post_receive(&mut region, ..8, 1).unwrap();
        queue_pair.post(SendWorkRequest::new(Inline(b"shared")), 2).unwrap();
    }
    assert_eq!(successes(&queue).len(), 2);
    assert_eq!(&region[..6], b"shared");
    // SAFETY: nothing is posted.
    let error = unsafe { queue_pair.post_receive(&mut region, ..8, 3) }.unwrap_err();
    assert!(error.to_string().contains("posted to the shared receive queue"), "{error}");
    // A shared receive queue of another context is refused.
    let other = device.context();
    let other_domain = other.alloc_pd().unwrap();
    let stranger = other_domain.create_srq(8, 1).unwrap();
    let error = domain.create_qp(&queue, &queue, Rc).srq(&stranger).build().unwrap_err();
    assert!(error.to_string().contains("another context"), "{error}");
}

#[test]
fn an_xrc_receiver_has_a_domain_and_no_queues() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let xrc = XrcDomain::open(&context, XrcDomainScope::Private).unwrap();
    let new = |kind| builder(&domain, &queue, kind);
    let error = new(QueuePairType::XrcReceive).build().unwrap_err();
    assert!(error.to_string().contains("needs an XRC domain"), "{error}");
    let error = new(QueuePairType::XrcSend).xrc_domain(&xrc).build().unwrap_err();
    assert!(error.to_string().contains("only a receiving XRC"), "{error}");
    let receiver = new(QueuePairType::XrcReceive).xrc_domain(&xrc).build().unwrap();
    let raw = device.last_call("create_qp_ex").unwrap().qp_init_attr;
    assert_eq!((raw.xrcd, raw.comp_mask), (xrc.as_raw(), mask::IBV_QP_INIT_ATTR_XRCD.0));
    assert!(raw.pd.is_null() && raw.send_cq.is_null() && raw.recv_cq.is_null());
    let sender = new(QueuePairType::XrcSend).build().unwrap();
    let (there, here) = (receiver.endpoint(), sender.endpoint());
    let receiver = receiver.handshake(here).unwrap();
    let sender = sender.handshake(there).unwrap();
    assert_eq!(receiver.state().unwrap(), QueuePairState::ReadyToSend);
    assert_eq!(sender.state().unwrap(), QueuePairState::ReadyToSend);
}

#[test]
fn what_was_created_elsewhere_is_adopted() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let other = context.create_cq(16).unwrap();
    let mut attributes = ffi::ibv_qp_init_attr {
        send_cq: queue.as_raw(),
        recv_cq: queue.as_raw(),
        qp_type: ffi::ibv_qp_type::IBV_QPT_RC,
        cap: ffi::ibv_qp_cap { max_send_wr: 3, max_send_sge: 2, ..Default::default() },
        ..Default::default()
    };
    // SAFETY: domain and queues are live.
    let raw = unsafe { ffi::ibv_create_qp(domain.as_raw(), &mut attributes) };
    let new = |queue, kind| domain.create_qp(queue, queue, kind);
    for builder in [
        new(&other, QueuePairType::ReliableConnected),
        new(&queue, QueuePairType::UnreliableConnected),
    ] {
        // SAFETY: the queue pair is live, and stays ours as this fails.
        let error = unsafe { builder.adopt(raw) }.unwrap_err();
        assert!(error.to_string().contains("not one that the builder describes"), "{error}");
    }
    // SAFETY: that is null.
    unsafe { new(&queue, QueuePairType::ReliableConnected).adopt(std::ptr::null_mut()) }
        .unwrap_err();
    // SAFETY: the queue pair is live and handed over.
    let prepared = unsafe { new(&queue, QueuePairType::ReliableConnected).adopt(raw) }.unwrap();
    let endpoint = prepared.endpoint();
    let queue_pair = prepared.handshake(endpoint).unwrap();
    assert_eq!((queue_pair.as_raw(), queue_pair.max_send_wr()), (raw, attributes.cap.max_send_wr));
    drop(queue_pair);
    drop((queue, other));
    drop(domain);
    drop(context);
    device.assert_clean();
}

#[test]
fn one_that_was_never_connected_says_why_it_cannot_be_destroyed() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let prepared = builder(&domain, &queue, Rc).build().unwrap();
    device.fail("destroy_qp").errno(libc::EBUSY).times(1);
    let error = prepared.close().unwrap_err();
    assert_eq!((error.verb(), error.raw_os_error()), ("ibv_destroy_qp", Some(libc::EBUSY)));
    assert_eq!(device.calls("destroy_qp"), 1);
}

/// For most providers, queue pairs lack the fields that `ibv_qp_to_qp_ex` reads.
#[test]
fn an_adopted_queue_pair_is_extended_if_the_builder_says_so() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let operations = SendOperations::SEND | SendOperations::WRITE;
    let created = || {
        let mut attributes = ffi::ibv_qp_init_attr_ex {
            send_cq: queue.as_raw(),
            recv_cq: queue.as_raw(),
            qp_type: ffi::ibv_qp_type::IBV_QPT_RC,
            cap: ffi::ibv_qp_cap { max_send_wr: 3, max_send_sge: 2, ..Default::default() },
            comp_mask: (mask::IBV_QP_INIT_ATTR_PD | mask::IBV_QP_INIT_ATTR_SEND_OPS_FLAGS).0,
            pd: domain.as_raw(),
            send_ops_flags: operations.bits(),
            ..Default::default()
        };
        // SAFETY: context, domain and queues are live.
        unsafe { ffi::ibv_create_qp_ex(context.as_raw(), &mut attributes) }
    };
    let new = || domain.create_qp(&queue, &queue, Rc);
    let all = SendOperations::all();
    for (builder, has) in [
        (new(), SendOperations::empty()),
        (new().extended(SendOperations::SEND), SendOperations::SEND),
        (new().extended_if_available(operations), operations),
        (new().extended_if_available(all), SendOperations::empty()),
    ] {
        // SAFETY: the queue pair is live and handed over.
        let queue_pair = unsafe { builder.adopt(created()) }.unwrap().into_queue_pair();
        assert_eq!(queue_pair.extended_operations(), has);
        assert_eq!(queue_pair.as_raw_extended().is_some(), !has.is_empty());
    }
    let raw = created();
    // SAFETY: the queue pair is live, and stays ours as this fails.
    let error = unsafe { new().extended(all).adopt(raw) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    // SAFETY: the queue pair is live and handed over.
    drop(unsafe { new().adopt(raw) }.unwrap());
    drop(queue);
    drop(domain);
    drop(context);
    device.assert_clean();
}

#[test]
fn a_type_that_has_a_name_is_known_by_it() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let number = ffi::ibv_qp_type::from(QueuePairType::UnreliableDatagram).0;
    let prepared = builder(&domain, &queue, QueuePairType::Unknown(number)).build().unwrap();
    let mut queue_pair = prepared.activate().unwrap();
    assert_eq!(queue_pair.queue_pair_type(), QueuePairType::UnreliableDatagram);
    // A provider would follow the address handle that the request does not have.
    let number = ffi::ibv_mw_type::from(MemoryWindowType::Type2).0;
    let mut window = domain.alloc_mw(MemoryWindowType::Unknown(number)).unwrap();
    assert_eq!(window.window_type(), MemoryWindowType::Type2);
    // SAFETY: nothing is outstanding.
    let error = unsafe { queue_pair.post_invalidate_mw(&mut window, 1) }.unwrap_err();
    assert!(error.to_string().contains("a UD queue pair has no windows"), "{error}");
}

/// An emulated adapter set the inline data to 0 and succeeded: messages would wait for ever.
#[test]
fn a_device_that_grants_less_than_was_asked_is_refused() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let new = || {
        let builder = domain.create_qp(&queue, &queue, Rc).max_send_wr(11).max_recv_wr(12);
        builder.max_send_sge(3).max_recv_sge(4).max_inline_data(64)
    };
    let sizes = [
        ("max_send_wr", 11),
        ("max_recv_wr", 12),
        ("max_send_sge", 3),
        ("max_recv_sge", 4),
        ("max_inline_data", 64),
    ];
    for (bit, (what, asked)) in sizes.into_iter().enumerate() {
        device.grants_less(1 << bit);
        for error in
            [new().build().unwrap_err(), new().extended(SendOperations::SEND).build().unwrap_err()]
        {
            assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
            let told = error.to_string();
            let most = format!("0..={}", asked - 1);
            assert!(
                told.contains(what)
                    && told.contains(&format!("is {asked}"))
                    && told.contains(&most),
                "{told}"
            );
        }
    }
    device.grants_less(0);
    drop(new().build().unwrap());
    assert_eq!(device.calls("destroy_qp"), 11, "nothing is left");
}
