//! Connections: requests, what fails, and what the first message does.

use super::*;

/// A C program, which nothing stops before the device does.
#[test]
fn a_request_has_no_more_inline_data_than_its_queue_pair() {
    let context = Network::new().device().unwrap().open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let prepared = domain.create_qp(&queue, &queue, Rc).max_send_wr(4).max_inline_data(8);
    let prepared = prepared.build().unwrap();
    let own = prepared.endpoint();
    let pair = prepared.handshake(own).unwrap();
    let most = pair.max_inline_data();
    let data = vec![0_u8; most as usize + 1];
    let post = |length: u32| {
        let mut piece = ffi::ibv_sge { addr: data.as_ptr() as u64, length, lkey: 0 };
        let mut request = ffi::ibv_send_wr {
            sg_list: &mut piece,
            num_sge: 1,
            opcode: ffi::ibv_wr_opcode::IBV_WR_SEND,
            send_flags: ffi::ibv_send_flags::IBV_SEND_INLINE.0,
            ..Default::default()
        };
        let mut bad = null_mut();
        // SAFETY: the queue pair is live, and inline data is copied.
        let errno = unsafe { ffi::ibv_post_send(pair.as_raw(), &mut request, &mut bad) };
        assert_eq!(errno != 0, bad == &raw mut request);
        errno
    };
    assert_eq!([most, most + 1].map(post), [0, libc::EINVAL]);
}

#[test]
fn more_reads_than_the_peer_answers_at_a_time_end_the_connection() {
    for excess in [false, true] {
        let network = Network::new();
        let contexts = contexts(&network);
        let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
        let queues = contexts.each_ref().map(|context| context.create_cq(16).unwrap());
        let [mut one, _other] = pairs(&domains, &queues);
        if excess {
            one.drain(false).unwrap();
            let more = StateTransition::to(QueuePairState::SendQueueDrained).max_rd_atomic(3);
            one.modify(more).unwrap();
            one.resume().unwrap();
        }
        let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ;
        let there = SharedMemoryRegion::<u8>::new(&domains[1], 8, access).unwrap();
        let from = there.remote_range(..).unwrap();
        let mut here = domains[0].allocate::<u8>(8).unwrap();
        // SAFETY: the region is not touched before the completions.
        unsafe {
            for id in 0..6 {
                one.post_read(&mut here, .., from, id).unwrap();
            }
        }
        let seen: Vec<WorkStatus> = (0..6).map(|_| status(&next(&queues[0]))).collect();
        if excess {
            assert!(seen.contains(&WorkStatus::RemoteInvalidRequest), "{seen:?}");
        } else {
            assert_eq!(seen, [WorkStatus::Success; 6]);
        }
    }
}

/// C defines only four members of a completion with an error.
#[test]
fn a_failed_completion_tells_no_opcode_and_no_length() {
    let network = Network::new();
    let contexts = contexts(&network);
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let queues = contexts.each_ref().map(|context| context.create_cq(16).unwrap());
    let [_one, mut other] = pairs(&domains, &queues);
    let mut to = domains[1].allocate::<u8>(8).unwrap();
    // SAFETY: the region is not touched.
    unsafe { other.post_receive(&mut to, .., 3).unwrap() };
    other.modify(StateTransition::to(QueuePairState::Error)).unwrap();
    let mut wc = ffi::ibv_wc::default();
    // SAFETY: there is room for one completion.
    assert_eq!(unsafe { ffi::ibv_poll_cq(queues[1].as_raw(), 1, &mut wc) }, 1);
    assert_eq!((wc.wr_id, wc.status), (3, ffi::ibv_wc_status::IBV_WC_WR_FLUSH_ERR));
    assert_eq!(wc.qp_num, other.number());
    assert!(wc.opcode.0 > 0xff && wc.byte_len > 1 << 31, "{:?}", wc.opcode);
}

/// A message that comes before the receiver is ready to send. The wait alone lets the network work.
#[test]
fn the_first_message_is_an_event_until_the_receiver_can_send() {
    let network = Network::new();
    let contexts = contexts(&network);
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let queues = contexts.each_ref().map(|context| context.create_cq(16).unwrap());
    let events = AsyncEvents::new(&contexts[1]).unwrap();
    let prepare = |i: usize| {
        let builder = domains[i].create_qp(&queues[i], &queues[i], Rc);
        builder.max_send_wr(8).max_recv_wr(8).build().unwrap()
    };
    let [one, other] = [0, 1].map(prepare);
    let (to_one, to_other) = (one.endpoint(), other.endpoint());
    let mut one = one.handshake(to_other).unwrap();
    let mut other = other.into_queue_pair();
    let path = AddressVector::new(1, 0).global(to_one.gid(), 0);
    let steps = [
        StateTransition::to(QueuePairState::Init)
            .port(1)
            .pkey_index(0)
            .access(AccessFlags::empty()),
        StateTransition::to(QueuePairState::ReadyToReceive)
            .path(path)
            .path_mtu(contexts[0].query_port(1).unwrap().active_mtu().unwrap())
            .remote_number(to_one.num())
            .receive_psn(to_one.send_psn().unwrap())
            .max_dest_rd_atomic(1)
            .min_rnr_timer(Default::default()),
    ];
    let mut to = domains[1].allocate::<u8>(8).unwrap();
    for step in steps {
        other.modify(step).unwrap();
    }
    let from = domains[0].allocate::<u8>(8).unwrap();
    // SAFETY: the regions are not touched before the completions.
    unsafe {
        other.post_receive(&mut to, .., 1).unwrap();
        other.post_receive(&mut to, .., 2).unwrap();
        one.post_send(&from, .., 1).unwrap();
        one.post_send(&from, .., 2).unwrap();
    }
    // No completion is polled here.
    let event = events.wait_until(deadline()).unwrap();
    assert_eq!(event.kind(), AsyncEventKind::CommunicationEstablished);
    assert!(network.run_until_idle(Duration::from_secs(100)));
    assert!(events.next_event().unwrap().is_none(), "once");
    assert!([next(&queues[1]), next(&queues[1])].iter().all(WorkCompletion::is_success));
}

/// Hardware would send either.
#[test]
fn data_that_is_changed_before_the_completion_is_reported() {
    for strict in [true, false] {
        let network = Network::new();
        let build = || Device::builder().network(&network).strict(strict).build().unwrap();
        let devices = [build(), build()];
        let contexts = devices.each_ref().map(|device| device.open().unwrap());
        let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
        let queues = contexts.each_ref().map(|context| context.create_cq(16).unwrap());
        let [mut one, mut other] = pairs(&domains, &queues);
        let mut from = domains[0].allocate::<u8>(8).unwrap();
        let mut to = domains[1].allocate::<u8>(8).unwrap();
        // SAFETY: the region is not touched before the completion.
        unsafe { other.post_receive(&mut to, .., 1).unwrap() };
        // SAFETY: the device only reads the memory, and by copies that may race.
        unsafe { one.post_send(&from, .., 2).unwrap() };
        from.fill(1);
        let done = next(&queues[0]);
        assert_eq!(done.wr_id(), 2);
        let expected = if strict { WorkStatus::General } else { WorkStatus::Success };
        assert_eq!(status(&done), expected);
        assert_eq!(devices[0].counters().changed_sends, u64::from(strict));
    }
}
