//! Datagrams, and their address handles and groups.

use super::*;

/// One packet of a stranger, who knows a well-known Q_Key, must not end the queue pair.
#[test]
fn a_datagram_that_is_too_long_for_its_receive_is_lost() {
    let network = Network::new();
    let contexts = contexts(&network);
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let queues = contexts.each_ref().map(|context| context.create_cq(16).unwrap());
    let [mut one, mut two] = [0, 1].map(|i| datagrams(&domains[i], &queues[i]));
    let from = domains[0].allocate::<u8>(64).unwrap();
    let mut to = domains[1].allocate::<u8>(256).unwrap();
    // SAFETY: the region is not touched before the completions.
    unsafe {
        two.post_receive(&mut to, ..60, 1).unwrap();
        two.post_receive(&mut to, 60..120, 2).unwrap();
    }
    for length in [21, 64, 20] {
        send_to(&mut one, &domains[0], &from, length, &two, false);
        assert!(next(&queues[0]).is_success());
    }
    let done = next(&queues[1]);
    assert_eq!((done.wr_id(), done.result().unwrap().byte_len()), (1, 60), "the one that fits");
    assert_eq!(two.state().unwrap(), QueuePairState::ReadyToSend);
}

/// A datagram has one packet, and fills it.
#[test]
fn a_datagram_of_a_whole_packet_arrives() {
    let network = Network::new();
    let contexts = contexts(&network);
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let queues = contexts.each_ref().map(|context| context.create_cq(16).unwrap());
    let [mut one, mut two] = [0, 1].map(|i| datagrams(&domains[i], &queues[i]));
    let from = domains[0].allocate::<u8>(4096).unwrap();
    let mut to = domains[1].allocate::<u8>(4136).unwrap();
    // SAFETY: the region is not touched before the completion.
    unsafe { two.post_receive(&mut to, .., 1).unwrap() };
    send_to(&mut one, &domains[0], &from, 4096, &two, false);
    assert_eq!(next(&queues[1]).result().unwrap().byte_len(), 4136);
}

/// The error names the limit, and only if that is the reason.
#[test]
fn a_datagram_of_more_than_a_packet_is_refused() {
    let network = Network::new();
    let device = network.device().unwrap();
    let context = device.open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let mut one = datagrams(&domain, &queue);
    let from = domain.allocate::<u8>(4097).unwrap();
    let path = AddressVector::new(1, 0).global(one.endpoint().gid(), 0);
    let path = domain.create_ah(&path).unwrap();
    let to = DatagramPeer { path: &path, number: one.number(), qkey: QKEY };
    let mut refused = |length| {
        let elements = [from.gather_element(..length).unwrap()];
        // SAFETY: nothing is posted.
        unsafe { one.post(SendWorkRequest::new(&elements).to(to), 1).unwrap_err() }.to_string()
    };
    let (error, limit) =
        (refused(4097), "the length of the message is 4097, and must be within 0..=4096");
    assert!(error.contains(limit), "{error}");
    device.fail(Verb::PostSend, libc::EINVAL, When::Before, 1);
    let error = refused(4096);
    assert!(!error.contains("the length"), "{error}");
}

#[test]
fn an_address_handle_serves_its_own_domain_only() {
    let network = Network::new();
    let contexts = contexts(&network);
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let other = contexts[0].alloc_pd().unwrap();
    let queues = contexts.each_ref().map(|context| context.create_cq(16).unwrap());
    let [mut one, two] = [0, 1].map(|i| datagrams(&domains[i], &queues[i]));
    let from = domains[0].allocate::<u8>(8).unwrap();
    send_to(&mut one, &domains[0], &from, 8, &two, false);
    assert!(next(&queues[0]).is_success());
    send_to(&mut one, &other, &from, 8, &two, false);
    assert_eq!(status(&next(&queues[0])), WorkStatus::LocalQueuePairOperation);
}

#[test]
fn a_queue_pair_in_a_group_is_not_destroyed() {
    let context = Network::new().device().unwrap().open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(4).unwrap();
    let mut attr = ffi::ibv_qp_init_attr {
        send_cq: queue.as_raw(),
        recv_cq: queue.as_raw(),
        qp_type: ffi::ibv_qp_type::IBV_QPT_UD,
        ..Default::default()
    };
    let group: ibverbs::Gid = "::ffff:239.1.2.3".parse().unwrap();
    let group = ffi::ibv_gid { raw: group.to_bytes() };
    // SAFETY: the objects are live; what is made is destroyed.
    unsafe {
        let qp = ffi::ibv_create_qp(domain.as_raw(), &mut attr);
        assert!(!qp.is_null());
        assert_eq!(ffi::ibv_attach_mcast(qp, &group, 0), 0);
        assert_eq!(ffi::ibv_destroy_qp(qp), libc::EBUSY);
        assert_eq!(ffi::ibv_detach_mcast(qp, &group, 0), 0);
        assert_eq!(ffi::ibv_destroy_qp(qp), 0);
    }
}

/// A receiver that wants to hear of solicited messages only.
#[test]
fn a_datagram_is_solicited_if_its_sender_says_so() {
    let network = Network::new();
    let contexts = contexts(&network);
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let sent = contexts[0].create_cq(16).unwrap();
    let channel = CompletionChannel::new(&contexts[1]).unwrap();
    let received = CompletionQueue::builder(&contexts[1], 16).channel(&channel).solicited_only();
    let received = received.build().unwrap();
    let (mut one, mut two) = (datagrams(&domains[0], &sent), datagrams(&domains[1], &received));
    let from = domains[0].allocate::<u8>(8).unwrap();
    let mut to = domains[1].allocate::<u8>(256).unwrap();
    // SAFETY: the region is not touched before the completions.
    unsafe { (0..4).for_each(|id| two.post_receive(&mut to, .., id).unwrap()) };
    received.arm().unwrap();
    for solicited in [false, true] {
        assert!(channel.next_event().unwrap().is_none());
        send_to(&mut one, &domains[0], &from, 8, &two, solicited);
        assert!(network.run_until_idle(PATIENCE));
    }
    assert!(channel.next_event().unwrap().is_some());
}
