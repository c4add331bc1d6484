//! Shared receive queues, address handles and what Soft-RoCE lacks, in the machine of `script/vm`.

#[path = "support/vm/mod.rs"]
mod vm;

use ibverbs::device::{AsyncEventKind, AsyncEventSubject};
use ibverbs::domain::{ThreadDomain, XrcDomain, XrcDomainScope};
use ibverbs::{ErrorKind, Gid, QueuePairType, ReceiveWorkRequest, Ud, WorkStatus};
use std::time::Instant;
use vm::{assert_nothing_left, completions, one_at_a_time, success};

const RC: QueuePairType = QueuePairType::ReliableConnected;

#[test]
#[ignore = "Soft-RoCE: it resizes shared receive queues in a way that the crate refuses"]
fn two_queue_pairs_share_their_receives_and_the_limit_is_told() {
    let _lock = one_at_a_time();
    {
        let context = ibverbs::open("rxe0").unwrap();
        let domain = context.alloc_pd().unwrap();
        let events = context.async_events().unwrap();
        let sent = context.create_cq(16).unwrap();
        let received = context.create_cq(16).unwrap();
        let receives = domain.create_srq(8, 2).unwrap();
        receives.set_token(17);
        let [mut one, mut two] = [(), ()].map(|()| {
            let builder = domain.create_qp(&sent, &received, RC).srq(&receives).max_send_wr(4);
            let prepared = builder.build().unwrap();
            let own = prepared.endpoint();
            prepared.handshake(own).unwrap()
        });
        let mut region = domain.allocate::<u8>(4 * 64).unwrap();
        let mut message = domain.allocate::<u8>(32).unwrap();
        message.fill(0xa5);
        for slot in 0..3_usize {
            // SAFETY: the region is not touched until all completions were polled.
            unsafe { receives.post_receive(&mut region, slot * 64..slot * 64 + 64, slot as u64) }
                .unwrap();
        }
        {
            // Two pieces, in the order given.
            let (head, tail) = region.slice_mut(192..256).unwrap().split_at(10).unwrap();
            let mut elements =
                [head.into_scatter_element().unwrap(), tail.into_scatter_element().unwrap()];
            let request = ReceiveWorkRequest::new(&mut elements);
            // SAFETY: as above.
            unsafe { receives.post(request, 3) }.unwrap();
        }
        receives.set_limit(3).unwrap();

        let mut from = Vec::new();
        for turn in [0, 1, 1, 0] {
            let queue_pair = if turn == 0 { &mut one } else { &mut two };
            let number = queue_pair.number();
            // SAFETY: the message is not touched until its completion was polled, right below.
            unsafe { queue_pair.post_send(&message, .., 100) }.unwrap();
            success(&completions(&sent, 1), 100);
            let completion = completions(&received, 1)[0];
            assert_eq!(completion.queue_pair_number(), number, "it says whose it is");
            assert_eq!(completion.result().unwrap().byte_len(), 32);
            from.push(completion.wr_id());
        }
        assert_eq!(from, [0, 1, 2, 3], "first come, first served");
        for slot in 0..4 {
            assert!(region[slot * 64..slot * 64 + 32].iter().all(|&byte| byte == 0xa5), "{slot}");
            assert!(region[slot * 64 + 32..slot * 64 + 64].iter().all(|&byte| byte == 0), "{slot}");
        }
        // Both queue pairs may already have raised the event that connections are established.
        let limit = loop {
            let event = events.wait_until(Instant::now() + vm::PATIENCE).unwrap();
            if event.kind() == AsyncEventKind::SharedReceiveQueueLimit {
                break event;
            }
        };
        assert_eq!(limit.subject(), AsyncEventSubject::SharedReceiveQueue(17));
        assert_eq!(receives.query().unwrap().limit, 0, "the limit is told once");

        assert_eq!(receives.resize(64).unwrap_err().kind(), ErrorKind::Unsupported);
        // SAFETY: if it fails, so does the test, and the queue is not used any more.
        unsafe { receives.resize_unchecked(64) }.unwrap();
        assert!(receives.query().unwrap().max_wr >= 64);
        one.close().unwrap();
        two.close().unwrap();
        receives.close().unwrap();
    }
    assert_nothing_left("rxe0");
}

#[test]
fn a_message_that_finds_no_shared_receive_is_told_so() {
    let _lock = one_at_a_time();
    let context = ibverbs::open("rxe0").unwrap();
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(4).unwrap();
    let receives = domain.create_srq(4, 1).unwrap();
    let prepared = domain
        .create_qp(&queue, &queue, RC)
        .srq(&receives)
        .max_rnr_retries(ibverbs::settings::MaxRnrRetries::NONE)
        .build()
        .unwrap();
    let own = prepared.endpoint();
    let mut queue_pair = prepared.handshake(own).unwrap();
    let message = domain.allocate::<u8>(8).unwrap();
    // SAFETY: the message is not touched until its completion was polled.
    unsafe { queue_pair.post_send(&message, .., 1) }.unwrap();
    let error = completions(&queue, 1)[0].result().unwrap_err();
    assert_eq!(error.status(), WorkStatus::RnrRetryExceeded);
    assert!(error.to_string().contains("receives"), "{error}");
}

#[test]
#[ignore = "Soft-RoCE: what it lacks"]
fn what_the_device_lacks_is_unsupported() {
    let _lock = one_at_a_time();
    let context = ibverbs::open("rxe0").unwrap();
    assert_eq!(ThreadDomain::new(&context).unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(context.query_raw_clock().unwrap_err().kind(), ErrorKind::Unsupported);
    let error = XrcDomain::open(&context, XrcDomainScope::Private).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    let domain = context.alloc_pd().unwrap();
    let queue = context.create_cq(4).unwrap();
    let queue_pair = domain.create_qp(&queue, &queue, RC).build().unwrap().into_queue_pair();
    assert_eq!(queue_pair.query_ece().unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn partition_keys_are_found() {
    let _lock = one_at_a_time();
    let context = ibverbs::open("rxe0").unwrap();
    assert_eq!(context.query_pkey(1, 0), Ok(0xffff));
    assert_eq!(context.pkey_index(1, 0xffff), Ok(0));
    assert_eq!(context.pkey_index(1, 0x1234).unwrap_err().kind(), ErrorKind::NotFound);
    let error = context.query_pkey(1, 1).unwrap_err();
    assert_eq!(error.to_string(), "ibv_query_pkey: pkey_index is 1, and must be within 0..=0");
}

#[test]
#[ignore = "Soft-RoCE: joins groups by a network interface"]
fn a_group_is_joined_and_left() {
    let _lock = one_at_a_time();
    {
        let context = ibverbs::open("rxe0").unwrap();
        let domain = context.alloc_pd().unwrap();
        let queue = context.create_cq(4).unwrap();
        let datagrams = domain.create_qp(&queue, &queue, Ud);
        let mut queue_pair = datagrams.build().unwrap().activate().unwrap();
        for group in ["::ffff:239.1.2.3", "ff0e::17"] {
            let group: Gid = group.parse().unwrap();
            queue_pair.attach_multicast(group, 0).unwrap();
            queue_pair.detach_multicast(group, 0).unwrap();
            assert_eq!(
                queue_pair.detach_multicast(group, 0).unwrap_err().kind(),
                ErrorKind::InvalidInput,
                "it left already"
            );
        }
    }
    assert_nothing_left("rxe0");
}
