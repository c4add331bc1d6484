//! Work queues, indirection tables and the queue pairs that use them.

use ibverbs::device::AsyncEventSubject;
use ibverbs::flow::{EthernetMatch, Rule};
use ibverbs::work_queue::{
    Flags, IndirectionTable, ReceiveHash, ReceiveHashFields, ReceiveScalingQueuePair, State,
    WorkQueue,
};
use std::sync::Arc;

use ibverbs::ffi;

use super::*;

const NONE: Flags = Flags::empty();
const KEY: [u8; 40] = {
    let mut key = [0; 40];
    let mut at = 0;
    while at < 40 {
        key[at] = (at * 7 + 3) as u8;
        at += 1;
    }
    key
};

fn by_ports() -> ReceiveHash {
    let fields = ReceiveHashFields::SOURCE_IPV4
        | ReceiveHashFields::DESTINATION_IPV4
        | ReceiveHashFields::SOURCE_PORT_UDP
        | ReceiveHashFields::DESTINATION_PORT_UDP;
    ReceiveHash::toeplitz(KEY, fields).unwrap()
}

#[test]
fn a_work_queue_is_created_modified_and_destroyed() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let completions = context.create_cq(16).unwrap();
    let flags = Flags::SCATTER_FCS | Flags::DELAY_DROP;
    let queue = WorkQueue::new(&domain, &completions, 5, 2, flags).unwrap();
    let call = device.last_call("create_wq").unwrap().wq_init_attr;
    assert_eq!((call.wq_type, call.max_wr, call.max_sge), (ffi::ibv_wq_type::IBV_WQT_RQ, 5, 2));
    assert_eq!((call.pd, call.cq), (domain.as_raw(), completions.as_raw()));
    assert_eq!((call.comp_mask, call.create_flags), (1, 2 | 4));
    assert_eq!((queue.max_wr(), queue.max_sge()), (6, 2), "what the device has granted");
    assert_eq!(queue.state(), State::Reset);

    let error = queue.modify(State::Error).unwrap_err();
    assert_eq!((error.verb(), device.calls("modify_wq")), ("ibv_modify_wq", 0));
    queue.modify(State::Ready).unwrap();
    let call = device.last_call("modify_wq").unwrap().wq_attr;
    let ready = ffi::ibv_wq_state::IBV_WQS_RDY;
    assert_eq!((call.attr_mask, call.wq_state, call.flags_mask), (1, ready, 0));
    let (on, of) = (Flags::CVLAN_STRIPPING, Flags::all());
    queue.set_flags(on, of).unwrap();
    let call = device.last_call("modify_wq").unwrap().wq_attr;
    assert_eq!((call.attr_mask, call.flags, call.flags_mask), (4, 1, 0xf));
    assert_eq!(queue.set_flags(of, on).unwrap_err().kind(), ErrorKind::InvalidInput);
    queue.modify(State::Error).unwrap();
    let error = queue.modify(State::Ready).unwrap_err();
    assert!(error.to_string().contains("reset before"), "{error}");
    queue.modify(State::Reset).unwrap();
    assert!(queue.modify(State::Unknown(3)).is_err());
    assert_eq!(device.calls("modify_wq"), 4);
    device.fail("modify_wq").errno(libc::EIO).times(1);
    assert_eq!(queue.modify(State::Ready).unwrap_err().raw_os_error(), Some(libc::EIO));
    queue.close().unwrap();

    WorkQueue::new(&domain, &completions, 4, 1, NONE).unwrap().close().unwrap();
    let call = device.last_call("create_wq").unwrap().wq_init_attr;
    assert_eq!((call.comp_mask, call.create_flags), (0, 0), "as C without extensions");
    drop(completions);
    drop(domain);
    drop(context);
    device.assert_clean();
}

#[test]
fn bad_sizes_never_reach_the_provider() {
    let device = FunctionDevice::model();
    let (context, other) = (device.context(), device.context());
    let domain = context.alloc_pd().unwrap();
    let completions = context.create_cq(16).unwrap();
    for (wr, sge, what) in
        [(0, 1, "max_wr"), (u32::MAX, 1, "max_wr"), (1, 0, "max_sge"), (1, u32::MAX, "max_sge")]
    {
        let error = WorkQueue::new(&domain, &completions, wr, sge, NONE).unwrap_err();
        assert_eq!((error.verb(), error.kind()), ("ibv_create_wq", ErrorKind::InvalidInput));
        assert!(error.to_string().contains(what), "{error}");
    }
    let foreign = other.create_cq(16).unwrap();
    let error = WorkQueue::new(&domain, &foreign, 1, 1, NONE).unwrap_err();
    assert!(error.to_string().contains("another context"), "{error}");
    assert_eq!(device.calls("create_wq"), 0);
    device.fail("create_wq").errno(libc::EPERM).times(1);
    let error = WorkQueue::new(&domain, &completions, 1, 1, NONE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Permission);
}

#[test]
fn receives_are_posted_refused_flushed_and_taken_back() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let completions = context.create_cq(16).unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    let (address, lkey) = (region.as_ptr() as u64, region.lkey());
    let queue = WorkQueue::new(&domain, &completions, 2, 1, NONE).unwrap();
    queue.modify(State::Ready).unwrap();
    // SAFETY: the region is not touched, and outlives the queue.
    unsafe {
        queue.post_receive(&mut region, 8..24, 7).unwrap();
        let posted = device.posted(0).unwrap();
        assert_eq!((posted.qp_num, posted.receive, posted.wr_id), (queue.number(), true, 7));
        assert_eq!(posted.list, [(address + 8, 16, lkey)]);
        queue.post_receive(&mut region, 24..24, 8).unwrap();
        assert!(device.posted(0).unwrap().list.is_empty(), "no element of 0 bytes");
        let error = queue.post_receive(&mut region, .., 9).unwrap_err();
        assert_eq!((error.verb(), error.kind()), ("ibv_post_wq_recv", ErrorKind::QueueFull));
        let error = queue.post_receive(&mut region, 60..65, 9).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    }
    queue.modify(State::Error).unwrap();
    let mut slice = [WorkCompletion::default(); 4];
    let done: Vec<_> = completions
        .poll(&mut slice)
        .unwrap()
        .iter()
        .map(|done| (done.wr_id(), done.queue_pair_number(), done.result().unwrap_err().status()))
        .collect();
    let number = queue.number();
    assert_eq!(done, [(7, number, WorkStatus::Flushed), (8, number, WorkStatus::Flushed)]);

    queue.modify(State::Reset).unwrap();
    queue.modify(State::Ready).unwrap();
    let mut more = domain.allocate::<u8>(8).unwrap();
    let mut elements = [region.scatter_element(..8).unwrap(), more.scatter_element(..).unwrap()];
    let two = ReceiveWorkRequest::new(&mut elements);
    // SAFETY: as above.
    unsafe {
        let error = queue.post(two, 1).unwrap_err();
        assert!(error.to_string().contains("scatter elements is 2"), "{error}");
    }
    // SAFETY: as above.
    unsafe {
        queue.post_receive(&mut region, ..8, 1).unwrap();
        queue.post_receive(&mut region, ..8, 2).unwrap();
    }
    queue.modify(State::Reset).unwrap();
    assert!(completions.poll(&mut slice).unwrap().is_empty(), "they end without completions");
    device.fail("post_wq_recv").errno(libc::EIO).times(1);
    // SAFETY: as above.
    let error = unsafe { queue.post_receive(&mut region, ..8, 1) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Driver);
    queue.close().unwrap();
}

#[test]
fn an_event_names_the_work_queue() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let completions = context.create_cq(16).unwrap();
    let queue = WorkQueue::new(&domain, &completions, 2, 1, NONE).unwrap();
    let events = context.async_events().unwrap();
    let fatal = ffi::ibv_event_type::IBV_EVENT_WQ_FATAL;
    // SAFETY: the queue is live.
    unsafe { device.raise_about(context.as_raw(), fatal, queue.as_raw()) };
    let event = events.next_event().unwrap().unwrap();
    assert_eq!(event.subject(), AsyncEventSubject::WorkQueue(queue.number()));
    // The event was acknowledged: nothing waits.
    queue.close().unwrap();
}

#[test]
fn a_table_has_its_queues_in_order_and_keeps_them() {
    let device = FunctionDevice::model();
    let context = Arc::new(device.context());
    let domain = Arc::new(ProtectionDomain::new(&context).unwrap());
    let completions = Arc::new(CompletionQueue::new(&context, 16).unwrap());
    let queues: Vec<_> = (0..4)
        .map(|_| Arc::new(WorkQueue::new(&domain, &completions, 2, 1, NONE).unwrap()))
        .collect();
    let table = IndirectionTable::new(queues.iter().rev()).unwrap();
    let call = device.last_call("create_rwq_ind_table").unwrap();
    assert_eq!(call.table_log_size, 2);
    let mut backwards: Vec<_> = queues.iter().map(|queue| queue.as_raw()).collect();
    backwards.reverse();
    assert_eq!(call.table[..4], backwards);
    assert_eq!(table.work_queues().map(WorkQueue::as_raw).collect::<Vec<_>>(), backwards);
    assert_eq!(table.context().as_raw(), context.as_raw());

    // One queue may stand in it more than once.
    let twice = IndirectionTable::new([&queues[0], &queues[0]]).unwrap();
    assert_ne!(twice.number(), table.number());
    twice.close().unwrap();
    drop((queues, completions, domain, context));
    assert_eq!((device.live(Kind::WorkQueue), device.live(Kind::Context)), (4, 1));
    table.close().unwrap();
    device.assert_clean();
}

#[test]
fn a_bad_table_never_reaches_the_provider() {
    let device = FunctionDevice::model();
    let (context, other) = (device.context(), device.context());
    let domains = [context.alloc_pd().unwrap(), other.alloc_pd().unwrap()];
    let completions = [context.create_cq(16).unwrap(), other.create_cq(16).unwrap()];
    let make = |at: usize| WorkQueue::new(&domains[at], &completions[at], 2, 1, NONE).unwrap();
    let (one, foreign) = (make(0), make(1));
    for (queues, what) in [
        (vec![], "no work queues"),
        (vec![&one; 3], "power of two"),
        (vec![&one; 16], "the number of work queues is 9, and must be within 1..=8"),
        (vec![&one, &foreign], "different contexts"),
    ] {
        let error = IndirectionTable::new(queues).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().contains(what), "{error}");
    }
    assert!(IndirectionTable::new(std::iter::repeat(&one)).is_err(), "it does not run for ever");
    assert_eq!(device.calls("create_rwq_ind_table"), 0);
}

#[test]
fn a_hash_is_checked() {
    use ReceiveHashFields as F;

    for (key, fields, what) in [
        (vec![], F::SOURCE_IPV4, "the length of the hash's key is 0"),
        (vec![1; 256], F::SOURCE_IPV4, "is 256"),
        (vec![1; 40], F::INNER, "no fields"),
        (vec![1; 40], F::SOURCE_IPV4 | F::DESTINATION_IPV6, "both IPv4 and IPv6"),
        (vec![1; 40], F::SOURCE_PORT_TCP | F::DESTINATION_PORT_UDP, "both TCP and UDP"),
    ] {
        let error = ReceiveHash::toeplitz(key, fields).unwrap_err();
        assert!(error.to_string().contains(what), "{error}");
    }
    let hash = by_ports();
    assert!(!format!("{hash:?}").contains("17"), "a log must not have the key: {hash:?}");
}

#[test]
fn a_spreading_queue_pair_has_a_table_and_a_hash_and_nothing_else() {
    let device = FunctionDevice::model();
    let (context, other) = (device.context(), device.context());
    let domain = context.alloc_pd().unwrap();
    let completions = context.create_cq(16).unwrap();
    let queue = WorkQueue::new(&domain, &completions, 2, 1, NONE).unwrap();
    let table = IndirectionTable::new([&queue]).unwrap();
    let kind = QueuePairType::RawPacket;
    let hash = by_ports();
    let pair = ReceiveScalingQueuePair::new(&domain, &table, kind, &hash).unwrap();
    let call = device.last_call("create_qp_ex").unwrap();
    let attributes = call.qp_init_attr;
    assert_eq!(attributes.qp_type, ffi::ibv_qp_type::IBV_QPT_RAW_PACKET);
    assert_eq!(attributes.comp_mask, 1 | 1 << 4 | 1 << 5);
    assert_eq!((attributes.pd, attributes.rwq_ind_tbl), (domain.as_raw(), table.as_raw()));
    assert!(attributes.send_cq.is_null() && attributes.recv_cq.is_null());
    let conf = attributes.rx_hash_conf;
    assert_eq!((conf.rx_hash_function, conf.rx_hash_key_len), (1, 40));
    assert_eq!((call.hash_key[..40].to_vec(), conf.rx_hash_fields_mask), (KEY.to_vec(), 0xc3));
    assert_eq!((pair.queue_pair_type(), pair.number() != 0), (kind, true));
    let mut pair = pair;
    let init = StateTransition::to(QueuePairState::Init);
    let error = pair.modify(init).unwrap_err();
    assert!(error.to_string().contains("port_num is missing"), "{error}");
    assert_eq!(pair.modify(init.port(1)).unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(device.calls("modify_qp"), 1, "as mlx5");
    pair.close().unwrap();

    let refused = |kind, hash: &ReceiveHash, errno, what| {
        let error = ReceiveScalingQueuePair::new(&domain, &table, kind, hash).unwrap_err();
        assert_eq!(error.raw_os_error(), errno);
        assert!(error.to_string().contains(what), "{error}");
    };
    let rc = QueuePairType::ReliableConnected;
    refused(rc, &hash, Some(libc::EOPNOTSUPP), "of this type");
    let ipv6 = ReceiveHash::toeplitz(KEY, ReceiveHashFields::SOURCE_IPV6).unwrap();
    refused(kind, &ipv6, Some(libc::EOPNOTSUPP), "cannot hash");
    let foreign = other.alloc_pd().unwrap();
    let error = ReceiveScalingQueuePair::new(&foreign, &table, kind, &hash).unwrap_err();
    assert!(error.to_string().contains("another context"), "{error}");
    assert_eq!(device.calls("create_qp_ex"), 1);
    // The length of a key is the device's to judge.
    let short = ReceiveHash::toeplitz([1; 8], ReceiveHashFields::SOURCE_IPV4).unwrap();
    refused(kind, &short, Some(libc::EINVAL), "");
}

#[test]
fn frames_are_spread_by_their_hash() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let completions = [context.create_cq(64).unwrap(), context.create_cq(64).unwrap()];
    let sends = context.create_cq(64).unwrap();
    let queues = completions
        .each_ref()
        .map(|completions| WorkQueue::new(&domain, completions, 32, 1, NONE).unwrap());
    let mut region = domain.allocate::<u8>(128).unwrap();
    for queue in &queues {
        queue.modify(State::Ready).unwrap();
        for wr_id in 0..32 {
            // SAFETY: the region is not touched, and outlives the queue.
            unsafe { queue.post_receive(&mut region, .., wr_id).unwrap() };
        }
    }
    let table = IndirectionTable::new(&queues).unwrap();
    let kind = QueuePairType::RawPacket;
    let mut pair = ReceiveScalingQueuePair::new(&domain, &table, kind, &by_ports()).unwrap();
    let rule = Rule::new(1).matching(EthernetMatch::new().destination(OUR_MAC));
    let flow = pair.create_flow(&rule).unwrap();
    let mut sender = raw_packets(&domain, &sends);

    let arrived = || {
        let _ = received(&sends);
        completions.each_ref().map(|queue| received(queue).len())
    };
    for port in 0..16 {
        send(&mut sender, &frame(OUR_MAC, [10, 0, 0, 9], (port, 4791), b"spread"));
    }
    let [one, two] = arrived();
    assert_eq!(one + two, 16);
    assert!(one > 0 && two > 0, "both have work: {one} and {two}");
    for _ in 0..4 {
        send(&mut sender, &frame(OUR_MAC, [10, 0, 0, 9], (1234, 4791), b"one flow"));
    }
    let once = arrived();
    assert!(once == [4, 0] || once == [0, 4], "one connection stays together: {once:?}");
    send(&mut sender, &frame(THEIR_MAC, [10, 0, 0, 9], (1, 2), b"not ours"));
    assert_eq!(arrived(), [0, 0]);

    let other = raw_packets(&domain, &sends);
    pair.destroy_flow(flow).unwrap();
    let error = pair.destroy_flow(flow).unwrap_err();
    assert!(error.to_string().contains("no such flow"), "{error}");
    send(&mut sender, &frame(OUR_MAC, [10, 0, 0, 9], (1234, 4791), b"nobody's"));
    assert_eq!(arrived(), [0, 0]);
    drop((other, sender));
    pair.close().unwrap();
}
