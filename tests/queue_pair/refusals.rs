//! The error of a refused verb names the state, the path, the index or the depth that is wrong.

use super::*;
use ibverbs::operation::PreparedRequest;
use ibverbs::operation::{Batch, SendList};
use ibverbs::queue_pair::AddressVector;
use ibverbs::queue_pair::{SendOperations, StateTransition};
use ibverbs::settings::{
    AckTimeout, MaxAckRetries, MaxRnrRetries, MaximumTransferUnit, MinRnrTimer,
    PacketSequenceNumber,
};
use ibverbs::{Inline, SendWorkRequest};

/// The queue pair in `state`, one of those on the way to RTS.
fn bring<'a>(builder: QueuePairBuilder<'a>, state: QueuePairState) -> QueuePair<'a> {
    use QueuePairState as S;

    let prepared = builder.build().unwrap();
    let endpoint = prepared.endpoint();
    let mut queue_pair = prepared.into_queue_pair();
    let path = AddressVector::new(1, 0).global(endpoint.gid(), 3);
    for transition in [
        StateTransition::to(S::Init).port(1).pkey_index(0).access(AccessFlags::REMOTE_WRITE),
        StateTransition::to(S::ReadyToReceive)
            .path(path)
            .path_mtu(MaximumTransferUnit::Mtu1024)
            .remote_number(endpoint.num())
            .receive_psn(PacketSequenceNumber::default())
            .max_dest_rd_atomic(1)
            .min_rnr_timer(MinRnrTimer::SHORTEST),
        StateTransition::to(S::ReadyToSend)
            .ack_timeout(AckTimeout::new(14).unwrap())
            .max_ack_retries(MaxAckRetries::MAX)
            .max_rnr_retries(MaxRnrRetries::UNLIMITED)
            .send_psn(PacketSequenceNumber::default())
            .max_rd_atomic(1),
    ] {
        if queue_pair.state().unwrap() == state {
            break;
        }
        queue_pair.modify(transition).unwrap();
    }
    assert_eq!(queue_pair.state().unwrap(), state);
    queue_pair
}

#[test]
fn a_post_in_the_wrong_state_names_the_state() {
    use QueuePairState as S;

    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    let there = domain.allocate_shared::<u64>(8, AccessFlags::REMOTE_WRITE).unwrap();
    for state in [S::Reset, S::Init, S::ReadyToReceive] {
        let kind = Rc;
        let builder = builder(&domain, &queue, kind).extended(SendOperations::SEND);
        let mut queue_pair = bring(builder, state);
        // A provider whose queue is full by then returns ENOMEM: polling would not help either.
        for full in [false, true] {
            let fill = |verb| {
                if full {
                    device.fail(verb).errno(libc::ENOMEM).times(1);
                }
            };
            let elements = [region.gather_element(..8).unwrap()];
            let mut list = [PreparedRequest::new(SendWorkRequest::new(&elements), 0).unwrap()];
            let mut list = SendList::new(&mut list).unwrap();
            // SAFETY: this device queues nothing that it refuses.
            let errors = unsafe {
                fill("post_send");
                let mut errors =
                    vec![queue_pair.post(SendWorkRequest::new(Inline(b"text")), 1).unwrap_err()];
                fill("post_send");
                errors.push(queue_pair.post_send(&region, .., 1).unwrap_err());
                fill("post_send");
                errors.push(queue_pair.post_write(&region, ..8, remote(&there), 1).unwrap_err());
                fill("post_send");
                errors.push(queue_pair.post_list(&mut list).unwrap_err().error);
                fill("post_send");
                let request = SendWorkRequest::new(&elements);
                errors.push(queue_pair.split().0.post(request, 1).unwrap_err());
                fill("wr_complete");
                let batch = |b: &mut Batch<'_>| b.add(SendWorkRequest::new(&[elements[0]]), 1);
                errors.push(queue_pair.batch(batch).unwrap_err());
                errors
            };
            device.clear_faults();
            for error in errors {
                let text = format!("the queue pair is in {state}, and must be in RTS before");
                assert!(error.to_string().contains(&text), "{error}");
                assert!(!error.to_string().contains("poll"), "{error}");
                assert_eq!(error.kind(), ErrorKind::InvalidInput);
                let errno = if full { libc::ENOMEM } else { libc::EINVAL };
                assert_eq!(error.raw_os_error(), Some(errno));
            }
            if full {
                device.fail("post_recv").errno(libc::ENOMEM).times(1);
            }
            // SAFETY: the region is not touched, and outlives the queue pair.
            let received = unsafe { queue_pair.post_receive(&mut region, .., 2) };
            match (state, full) {
                (S::Reset, _) => {
                    let error = received.unwrap_err();
                    let text = "the queue pair is in RESET, and must be in INIT before";
                    assert!(error.to_string().contains(text), "{error}");
                    assert_eq!(error.kind(), ErrorKind::InvalidInput);
                }
                (S::Init, true) => {
                    let error = received.unwrap_err();
                    let text = "no receive completes before the queue pair is connected";
                    assert!(error.to_string().contains(text), "{error}");
                    assert_eq!(error.kind(), ErrorKind::QueueFull);
                }
                (_, true) => {
                    let error = received.unwrap_err();
                    assert!(error.to_string().contains("poll completions"), "{error}");
                }
                (_, false) => received.unwrap(),
            }
            device.clear_faults();
        }
        queue_pair.close().unwrap();
    }
}

/// A program that posts until the queue is full pays for no system call.
#[test]
fn a_full_queue_of_a_connected_queue_pair_is_not_asked_for_its_state() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let mut queue_pair = to_itself(builder(&domain, &queue, Rc));
    let before = device.calls("query_qp");
    device.fail("post_send").errno(libc::ENOMEM).times(1);
    // SAFETY: inline data is copied.
    let error = unsafe { queue_pair.post(SendWorkRequest::new(Inline(b"text")), 1) }.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::QueueFull);
    assert!(error.to_string().contains("poll completions before posting more"), "{error}");
    assert_eq!(device.calls("query_qp"), before);
}

#[test]
fn a_queue_without_room_says_so() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    let kind = Rc;
    let one = |sends, receives| {
        to_itself(builder(&domain, &queue, kind).max_send_wr(sends).max_recv_wr(receives))
    };
    let (mut receiver, mut sender) = (one(0, 1), one(1, 0));
    // SAFETY: nothing is posted.
    let errors = unsafe {
        [
            (
                receiver.post(SendWorkRequest::new(Inline(b"text")), 1).unwrap_err(),
                "without room for sends",
            ),
            (sender.post_receive(&mut region, .., 1).unwrap_err(), "without room for receives"),
        ]
    };
    for (error, text) in errors {
        assert!(error.to_string().contains(text), "{error}");
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    }
}

#[test]
fn an_address_handle_names_what_its_path_lacks() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let peer = "2001:db8::77".parse().unwrap();
    let path = AddressVector::new(1, 0);
    for (path, text) in [
        (path, "ah_attr has no global route, which this port needs"),
        (path.global(peer, 200), "the GID table of port 1 is empty at index 200"),
        (AddressVector::new(9, 0).global(peer, 0), "port number is 9, and must be within 1..=1"),
    ] {
        let error = domain.create_ah(&path).unwrap_err();
        assert_eq!((error.kind(), error.verb()), (ErrorKind::InvalidInput, "ibv_create_ah"));
        assert!(error.to_string().contains(text), "{error}");
    }
    for errno in [libc::ETIMEDOUT, libc::ENETUNREACH, libc::EHOSTUNREACH] {
        device.fail("create_ah").errno(errno).times(1);
        let error = domain.create_ah(&path.global(peer, 3)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(errno));
        let text =
            "no path from our GID ::ffff:10.0.0.1 (index 3) to the peer's GID 2001:db8::77: ";
        assert!(error.to_string().contains(text), "{error}");
    }
    // The cause is not known.
    device.fail("create_ah").errno(libc::EINVAL).times(1);
    let error = domain.create_ah(&path.global(peer, 3)).unwrap_err();
    assert_eq!(error.to_string(), "ibv_create_ah: Invalid argument (os error 22)");
}

#[test]
fn an_empty_entry_of_the_gid_table_is_named() {
    let device = FunctionDevice::model();
    let context = device.context();
    let error = context.query_gid(1, 6).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENODATA));
    assert_eq!(error.to_string(), "ibv_query_gid_ex: the GID table of port 1 is empty at index 6");
}

#[test]
fn a_shared_receive_queue_names_what_keeps_it_from_shrinking() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let receives = domain.create_srq(16, 1).unwrap();
    let mut region = domain.allocate::<u8>(64).unwrap();
    let max = context.query_device().unwrap().max_srq_wr();
    for slot in 0..5 {
        // SAFETY: the region is not touched, and outlives the queue.
        unsafe { receives.post_receive(&mut region, .., slot) }.unwrap();
    }
    device.fail("modify_srq").errno(libc::EINVAL).times(1);
    let error = receives.resize(4).unwrap_err();
    assert_eq!(error.to_string(), "ibv_modify_srq: the queue holds more than 4 receives");
    receives.set_limit(6).unwrap();
    device.fail("modify_srq").errno(libc::EINVAL).times(1);
    let error = receives.resize(5).unwrap_err();
    let text = format!("ibv_modify_srq: max_wr is 5, and must be within 6..={max}");
    assert_eq!(error.to_string(), text);
    drop(receives);
}

/// The device has no attribute for the most inline data: what it refuses and takes is all that there is to know.
#[test]
fn too_much_inline_data_is_refused_with_the_most() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let built = |inline| builder(&domain, &queue, Rc).max_inline_data(inline).build();
    let text = built(1 << 20).unwrap_err().to_string();
    let most =
        text.strip_prefix("ibv_create_qp: max_inline_data is 1048576, and must be within 0..=");
    let most: u32 = most.unwrap_or_else(|| panic!("{text}")).parse().unwrap();
    assert!(most > 0, "{text}");
    drop(built(most).unwrap());
    let next =
        format!("ibv_create_qp: max_inline_data is {}, and must be within 0..={most}", most + 1);
    assert_eq!(built(most + 1).unwrap_err().to_string(), next);
    assert_eq!(
        device.live(ibverbs_function_device::Kind::QueuePair),
        0,
        "those that were tried are destroyed"
    );
}

#[test]
fn inline_data_is_blamed_only_where_it_was_asked_for() {
    let device = FunctionDevice::model();
    let context = device.context();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(16).unwrap();
    let refused = |inline: u32, errno: i32| {
        device.fail("create_qp").errno(errno).times(1);
        let error = builder(&domain, &queue, Rc).max_inline_data(inline).build().unwrap_err();
        assert_eq!(error.raw_os_error(), Some(errno));
        error.to_string().contains("max_inline_data")
    };
    assert!(refused(8, libc::EINVAL));
    assert!(!refused(0, libc::EINVAL) && !refused(8, libc::EACCES));
}
