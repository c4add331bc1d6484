//! What hardware and the kernel's Soft-RoCE refuse, report or leave open: the device is no kinder than they are.

#[path = "support/patience.rs"]
mod patience;

use std::ptr::null_mut;
use std::time::Duration;

use ibverbs::ffi::{self, ibv_access_flags as Access};
use ibverbs::{
    AccessFlags, AddressVector, AsyncEventKind, AsyncEvents, CompletionChannel, CompletionQueue,
    Context, DatagramPeer, MemoryRegion, ProtectionDomain, QueuePair, QueuePairState, Rc,
    SendWorkRequest, SharedMemoryRegion, StateTransition, Ud, WorkCompletion, WorkStatus,
};
use ibverbs_software::{Device, Network};

use patience::{PATIENCE, deadline};

const QKEY: u32 = 7;

/// Two contexts of two devices of a network.
fn contexts(network: &Network) -> [Context<'static>; 2] {
    [(); 2].map(|()| network.device().unwrap().open().unwrap())
}

fn datagrams<'a>(
    domain: &'a ProtectionDomain<'a>,
    queue: &'a CompletionQueue<'a>,
) -> QueuePair<'a, Ud> {
    let builder = domain.create_qp(queue, queue, Ud);
    let builder = builder.max_send_wr(8).max_recv_wr(8).qkey(QKEY);
    builder.build().unwrap().activate().unwrap()
}

/// Waits for the next completion.
fn next(queue: &CompletionQueue<'_>) -> WorkCompletion {
    let mut room = [WorkCompletion::default()];
    let end = deadline();
    while queue.poll(&mut room).unwrap().is_empty() {
        assert!(std::time::Instant::now() < end, "no completion");
    }
    room[0]
}

fn status(completion: &WorkCompletion) -> WorkStatus {
    completion.result().map_or_else(|error| error.status(), |_| WorkStatus::Success)
}

/// Sends a datagram.
fn send_to(
    one: &mut QueuePair<'_, Ud>,
    domain: &ProtectionDomain<'_>,
    from: &MemoryRegion<'_, u8>,
    length: usize,
    to: &QueuePair<'_, Ud>,
    solicited: bool,
) {
    let path = AddressVector::new(1, 0).global(to.endpoint().gid(), 0);
    let path = domain.create_ah(&path).unwrap();
    let elements = [from.gather_element(..length).unwrap()];
    let request = SendWorkRequest::new(&elements);
    let request = if solicited { request.solicited() } else { request };
    let request = request.to(DatagramPeer { path: &path, number: to.number(), qkey: QKEY });
    // SAFETY: the region is not written before the completion.
    unsafe { one.post(request, 1).unwrap() };
}

#[test]
fn each_device_has_a_guid_of_its_own() {
    let network = Network::new();
    let devices = [network.device().unwrap(), network.device().unwrap()];
    let v6 = Device::builder().network(&network).address("2001:db8:0:1::4001".parse().unwrap());
    let devices = [&devices[0], &devices[1], &v6.build().unwrap()];
    let guids = devices.map(|device| {
        let context = device.open().unwrap();
        let attributes = context.query_device().unwrap();
        assert_eq!(context.guid(), attributes.node_guid());
        assert_eq!(context.guid(), attributes.system_image_guid());
        // It stays when the addresses change.
        let (before, old) = (context.guid(), device.address());
        device.set_addresses(1, ["10.9.9.9".parse().unwrap()]).unwrap();
        assert_eq!(context.guid(), before);
        device.set_addresses(1, [old]).unwrap();
        before
    });
    // 10.0.0.1, as a locally administered EUI-64.
    assert_eq!(guids[0].to_string(), "0200:0aff:fe00:0001");
    // Both halves of the address, and the bit that says "locally administered".
    assert_eq!(guids[2].to_string(), "1b70:0000:0002:0003");
    assert!(guids[0] != guids[1] && guids[1] != guids[2]);
    assert!(guids.iter().all(|guid| !guid.is_zero()));
    devices[0].register();
    let list = ibverbs::devices().unwrap();
    let listed = list.iter().find(|listed| listed.name() == devices[0].name()).unwrap();
    assert_eq!(listed.guid(), guids[0]);
}

/// As hardware and Soft-RoCE number them: who takes index 0 for granted does not reach a peer's IPv4 address.
#[test]
fn gid_0_may_be_link_local() {
    let network = Network::new();
    let contexts = [1, 2].map(|host| {
        let link_local = format!("fe80::{host}").parse().unwrap();
        let device =
            Device::builder().network(&network).port([link_local, [10, 7, 0, host].into()]);
        device.build().unwrap().open().unwrap()
    });
    let gid = |index| contexts[0].query_gid(1, index).unwrap().gid;
    assert_eq!([gid(0), gid(1)].map(|gid| gid.to_ipv4()), [None, Some([10, 7, 0, 1].into())]);
    let domains = contexts.each_ref().map(|context| context.alloc_pd().unwrap());
    let path = |index| AddressVector::new(1, 0).global("::ffff:10.7.0.2".parse().unwrap(), index);
    assert_eq!(domains[0].create_ah(&path(0)).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    domains[0].create_ah(&path(1)).unwrap();
    // A handshake finds the addresses that both sides have.
    let queues = contexts.each_ref().map(|context| context.create_cq(16).unwrap());
    let [mut one, mut other] = pairs(&domains, &queues);
    let from = domains[0].allocate::<u8>(8).unwrap();
    let mut to = domains[1].allocate::<u8>(8).unwrap();
    // SAFETY: the regions are not touched before the completions.
    unsafe {
        other.post_receive(&mut to, .., 1).unwrap();
        one.post_send(&from, .., 1).unwrap();
    }
    assert!(next(&queues[0]).is_success() && next(&queues[1]).is_success());
}

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

/// A program that was built with a later header has larger entries, one with an earlier header smaller ones.
#[test]
fn a_table_of_gids_has_entries_of_any_length() {
    let context = Network::new().device().unwrap().open().unwrap();
    const LENGTH: usize = size_of::<ffi::ibv_gid_entry>();
    for length in [LENGTH, LENGTH + 8, LENGTH - 4] {
        let mut room = [0xff_u8; 3 * (LENGTH + 8)];
        // SAFETY: there is room for three entries, in words.
        let found = unsafe {
            let entries = room.as_mut_ptr().cast();
            ffi::_ibv_query_gid_table(context.as_raw(), entries, 3, 0, length)
        };
        assert_eq!(found, 1, "{length}");
        let gid = context.query_gid(1, 0).unwrap().gid;
        assert_eq!(room[..16], gid.to_bytes());
        assert!(room[length.min(LENGTH)..length].iter().all(|&byte| byte == 0 || byte == 0xff));
        assert!(room[length..].iter().all(|&byte| byte == 0xff));
    }
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

/// The kernel finds an object by its number in the context of the call.
#[test]
fn objects_of_two_contexts_do_not_go_together() {
    let device = Network::new().device().unwrap();
    let [here, there] = [(); 2].map(|()| device.open().unwrap());
    let domain = here.alloc_pd().unwrap();
    let (ours, theirs) = (here.create_cq(4).unwrap(), there.create_cq(4).unwrap());
    let create = |send: &CompletionQueue<'_>, receive: &CompletionQueue<'_>| {
        let mut attr = ffi::ibv_qp_init_attr {
            send_cq: send.as_raw(),
            recv_cq: receive.as_raw(),
            qp_type: ffi::ibv_qp_type::IBV_QPT_RC,
            ..Default::default()
        };
        // SAFETY: the objects are live; what is made is destroyed.
        unsafe {
            let made = ffi::ibv_create_qp(domain.as_raw(), &mut attr);
            if made.is_null() {
                return std::io::Error::last_os_error().raw_os_error();
            }
            assert_eq!(ffi::ibv_destroy_qp(made), 0);
        }
        None
    };
    assert_eq!(create(&ours, &ours), None);
    // A region moves to a domain of its own context only.
    let (second, foreign) = (here.alloc_pd().unwrap(), there.alloc_pd().unwrap());
    let mut memory = [0_u8; 8];
    let change = ffi::ibv_rereg_mr_flags::IBV_REREG_MR_CHANGE_PD.0 as i32;
    // SAFETY: the memory lives longer than the region.
    unsafe {
        let mr = ffi::ibv_reg_mr(domain.as_raw(), memory.as_mut_ptr().cast(), 8, 0);
        for (to, is_possible) in [(&foreign, false), (&second, true)] {
            let done = ffi::ibv_rereg_mr(mr, change, to.as_raw(), null_mut(), 0, 0) == 0;
            assert_eq!(done, is_possible);
        }
        assert_eq!(ffi::ibv_dereg_mr(mr), 0);
    }
    for (send, receive) in [(&ours, &theirs), (&theirs, &ours), (&theirs, &theirs)] {
        assert_eq!(create(send, receive), Some(libc::EINVAL));
    }
}

/// Each capacity has its limit.
#[test]
fn a_queue_pair_has_what_the_device_offers_and_no_more() {
    let device = Device::builder().network(&Network::new()).max_qp_wr(4).max_sge(2);
    let context = device.max_inline_data(8).build().unwrap().open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let create = |[send, receive, gather, scatter, inline]: [u32; 5]| {
        let mut attr = ffi::ibv_qp_init_attr {
            send_cq: queue.as_raw(),
            recv_cq: queue.as_raw(),
            cap: ffi::ibv_qp_cap {
                max_send_wr: send,
                max_recv_wr: receive,
                max_send_sge: gather,
                max_recv_sge: scatter,
                max_inline_data: inline,
            },
            qp_type: ffi::ibv_qp_type::IBV_QPT_RC,
            ..Default::default()
        };
        // SAFETY: the objects are live; what is made is destroyed.
        unsafe {
            let made = ffi::ibv_create_qp(domain.as_raw(), &mut attr);
            !made.is_null() && ffi::ibv_destroy_qp(made) == 0
        }
    };
    let most = [4, 4, 2, 2, 8];
    assert!(create(most));
    for i in 0..most.len() {
        let mut more = most;
        more[i] += 1;
        assert!(!create(more), "{more:?}");
    }
}

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

/// Two connected queue pairs, of which the second answers two READ requests at a time.
fn pairs<'a>(
    domains: &'a [ProtectionDomain<'a>; 2],
    queues: &'a [CompletionQueue<'a>; 2],
) -> [QueuePair<'a>; 2] {
    let prepare = |i: usize| {
        let builder = domains[i].create_qp(&queues[i], &queues[i], Rc);
        let builder = builder.max_send_wr(8).max_recv_wr(8).access(AccessFlags::REMOTE_READ);
        builder.max_dest_rd_atomic(2).build().unwrap()
    };
    let [one, other] = [0, 1].map(prepare);
    let (to_one, to_other) = (one.endpoint(), other.endpoint());
    [one.handshake(to_other).unwrap(), other.handshake(to_one).unwrap()]
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

/// Of a completion with an error, C defines four members only.
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
    // Nobody polls.
    let event = events.wait_until(deadline()).unwrap();
    assert_eq!(event.kind(), AsyncEventKind::CommunicationEstablished);
    assert!(network.run_until_idle(Duration::from_secs(100)));
    assert!(events.next_event().unwrap().is_none(), "once");
    assert!([next(&queues[1]), next(&queues[1])].iter().all(WorkCompletion::is_success));
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

#[test]
fn only_unknown_rights_that_are_not_optional_are_refused() {
    let context = Network::new().device().unwrap().open().unwrap();
    let domain = context.alloc_pd().unwrap();
    let mut memory = [0_u8; 64];
    const OPTIONAL: std::ops::Range<u32> = 20..30;
    const LOCAL: u32 = Access::IBV_ACCESS_LOCAL_WRITE.0;
    let mut register = |access: u32| {
        // SAFETY: the memory lives longer than the region.
        unsafe {
            let start = memory.as_mut_ptr().cast();
            let change = ffi::ibv_rereg_mr_flags::IBV_REREG_MR_CHANGE_ACCESS.0 as i32;
            // libibverbs keeps optional rights from a device when a region is made, and not when it changes.
            let plain = ffi::ibv_reg_mr(domain.as_raw(), start, 64, LOCAL as i32);
            let refused =
                ffi::ibv_rereg_mr(plain, change, null_mut(), null_mut(), 0, access as i32) != 0;
            assert_eq!(ffi::ibv_dereg_mr(plain), 0);
            let mr = ffi::ibv_reg_mr(domain.as_raw(), start, 64, access as i32);
            assert_eq!(mr.is_null(), refused, "{access:#x}");
            if mr.is_null() {
                return std::io::Error::last_os_error().raw_os_error();
            }
            assert_eq!(ffi::ibv_dereg_mr(mr), 0);
        }
        None
    };
    let known = Access::IBV_ACCESS_LOCAL_WRITE
        | Access::IBV_ACCESS_REMOTE_WRITE
        | Access::IBV_ACCESS_REMOTE_READ
        | Access::IBV_ACCESS_REMOTE_ATOMIC
        | Access::IBV_ACCESS_MW_BIND
        | Access::IBV_ACCESS_ZERO_BASED
        | Access::IBV_ACCESS_ON_DEMAND
        | Access::IBV_ACCESS_HUGETLB
        | Access::IBV_ACCESS_FLUSH_GLOBAL;
    for bit in 0..31 {
        let right = 1 << bit;
        let refused = right & known.0 == 0 && !OPTIONAL.contains(&bit);
        let expected = refused.then_some(libc::EINVAL);
        assert_eq!(register(right | LOCAL), expected, "bit {bit}");
    }
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
